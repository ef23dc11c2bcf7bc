//! Seeded randomness: xoshiro256**, seeded by splitmix64 (both by Blackman and Vigna, public domain).
//!
//! Written out here rather than taken from a crate: a seed that a failed run printed must replay that run on
//! every platform and after every update of a dependency.

/// A stream of random numbers.
#[derive(Clone, Debug)]
pub struct Rng {
    state: [u64; 4],
}

/// One step of splitmix64.
pub(crate) fn splitmix(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut z = *state;
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

impl Rng {
    /// The stream of a seed.
    pub fn new(mut seed: u64) -> Rng {
        Rng { state: std::array::from_fn(|_| splitmix(&mut seed)) }
    }

    /// The next number.
    pub fn word(&mut self) -> u64 {
        let s = &mut self.state;
        let result = s[1].wrapping_mul(5).rotate_left(7).wrapping_mul(9);
        let t = s[1] << 17;
        s[2] ^= s[0];
        s[3] ^= s[1];
        s[1] ^= s[2];
        s[0] ^= s[3];
        s[2] ^= t;
        s[3] = s[3].rotate_left(45);
        result
    }

    /// A number below `limit`, which must not be 0. The bias of one part in 2^64 does not matter here.
    pub fn below(&mut self, limit: u64) -> u64 {
        assert!(limit > 0);
        ((u128::from(self.word()) * u128::from(limit)) >> 64) as u64
    }

    /// A number from `low` to `high`, both included.
    pub fn between(&mut self, low: u64, high: u64) -> u64 {
        low + self.below(high - low + 1)
    }

    /// True `permille` times in a thousand.
    pub fn chance(&mut self, permille: u32) -> bool {
        permille > 0 && self.below(1000) < u64::from(permille)
    }

    /// One of them. There must be one.
    pub fn pick<'a, T>(&mut self, choices: &'a [T]) -> &'a T {
        &choices[self.below(choices.len() as u64) as usize]
    }

    /// A stream of its own for a part of the system, so that one part's draws do not shift another's.
    #[must_use]
    pub fn fork(&mut self) -> Rng {
        Rng::new(self.word())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_gives_the_published_numbers() {
        // From the reference C code of splitmix64 with state 1234567.
        let mut state = 1_234_567;
        let got: Vec<_> = (0..3).map(|_| splitmix(&mut state)).collect();
        assert_eq!(got, [6_457_827_717_110_365_317, 3_203_168_211_198_807_973, 9_817_491_932_198_370_423]);
        // From the reference C code of xoshiro256** with state 1, 2, 3, 4.
        let mut rng = Rng { state: [1, 2, 3, 4] };
        let got: Vec<_> = (0..4).map(|_| rng.word()).collect();
        assert_eq!(got, [11_520, 0, 1_509_978_240, 1_215_971_899_390_074_240]);
    }

    #[test]
    fn ranges_are_kept_and_covered() {
        let mut rng = Rng::new(7);
        let mut seen = [0; 5];
        (0..1000).for_each(|_| seen[rng.between(10, 14) as usize - 10] += 1);
        assert!(seen.iter().all(|&count| count > 100), "{seen:?}");
        assert!((0..1000).all(|_| !rng.chance(0)));
        assert!((0..1000).all(|_| rng.chance(1000)));
    }
}
