//! Seeded random numbers: xoshiro256**, seeded by splitmix64, both from `rand_xoshiro`.
//!
//! Not `fastrand`, which the other crates use: a seed that a failed run printed, or that a test pins, must
//! give the same run on every platform and after every update of dependencies. `fastrand` changed the numbers
//! of its seeds in a minor release (2.1.0); `rand_xoshiro` names its generators and promises their numbers.

use rand_xoshiro::Xoshiro256StarStar;
use rand_xoshiro::rand_core::{Rng as _, SeedableRng};

/// A stream of random numbers.
#[derive(Clone, Debug)]
pub struct Rng(Xoshiro256StarStar);

impl Rng {
    /// Creates the stream of a seed.
    pub fn new(seed: u64) -> Rng {
        Rng(Xoshiro256StarStar::seed_from_u64(seed))
    }

    /// Returns the next 64 bits.
    pub fn word(&mut self) -> u64 {
        self.0.next_u64()
    }

    /// Returns a number below `limit`, which must not be 0. The bias of about `limit` / 2^64 is negligible.
    pub fn below(&mut self, limit: u64) -> u64 {
        assert!(limit > 0);
        ((u128::from(self.word()) * u128::from(limit)) >> 64) as u64
    }

    /// Returns a number from `low` to `high` inclusive.
    pub fn between(&mut self, low: u64, high: u64) -> u64 {
        low + self.below(high - low + 1)
    }

    /// Returns `true` with a probability of `permille` in a thousand.
    pub fn chance(&mut self, permille: u32) -> bool {
        permille > 0 && self.below(1000) < u64::from(permille)
    }

    /// Returns a random element of `choices`, which must not be empty.
    pub fn pick<'a, T>(&mut self, choices: &'a [T]) -> &'a T {
        &choices[self.below(choices.len() as u64) as usize]
    }

    /// Creates an independent stream for a part of the system, so that its draws do not affect others.
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
        // The state's second word, by the reference C code of splitmix64 from 1234567; xoshiro256** gives
        // this function of it first.
        let second = 3_203_168_211_198_807_973_u64;
        assert_eq!(Rng::new(1_234_567).word(), second.wrapping_mul(5).rotate_left(7).wrapping_mul(9));
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
