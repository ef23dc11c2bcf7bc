//! Seeded random numbers, so that a printed seed reproduces its run.

/// A stream of random numbers.
#[derive(Clone, Debug)]
pub(crate) struct Rng(fastrand::Rng);

impl Rng {
    pub(crate) fn new(seed: u64) -> Rng {
        Rng(fastrand::Rng::with_seed(seed))
    }

    pub(crate) fn word(&mut self) -> u64 {
        self.0.u64(..)
    }

    pub(crate) fn below(&mut self, limit: u64) -> u64 {
        self.0.u64(..limit)
    }

    pub(crate) fn chance(&mut self, permille: u32) -> bool {
        self.below(1000) < u64::from(permille)
    }

    pub(crate) fn pick<'a, T>(&mut self, choices: &'a [T]) -> &'a T {
        &choices[self.below(choices.len() as u64) as usize]
    }
}
