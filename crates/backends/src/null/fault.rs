//! Fault injection as in the kernel's lib/fault-inject.c: `interval:probability:space:times`.
//!
//! The first `space` opportunities pass. After that, every `interval`th one is a fault with `probability`
//! percent, at most `times` times. All queues of a device share the counts; a race between two queues can
//! lose one fault.
//! fault.

use std::fmt;
use std::str::FromStr;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicI64, AtomicU64};

/// Options of a fault.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FaultSpec {
    /// Interval of the opportunities that may be a fault; 0 and 1 mean all of them.
    pub interval: u64,
    /// Probability of a fault in percent.
    pub probability: u32,
    /// Number of opportunities that pass first.
    pub space: i64,
    /// Maximum number of faults; -1 for no limit.
    pub times: i64,
}

/// The error for text that is not four numbers.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("\"{0}\" is not INTERVAL:PROBABILITY:SPACE:TIMES")]
pub struct ParseFaultError(String);

impl FromStr for FaultSpec {
    type Err = ParseFaultError;

    /// Parses four numbers separated by colons or commas; in a stack, commas are doubled.
    fn from_str(text: &str) -> Result<FaultSpec, ParseFaultError> {
        let error = || ParseFaultError(text.to_owned());
        let words: Vec<&str> = text.split([':', ',']).collect();
        let [interval, probability, space, times] = words[..] else { return Err(error()) };
        let spec = FaultSpec {
            interval: interval.parse().map_err(|_| error())?,
            probability: probability.parse().map_err(|_| error())?,
            space: space.parse().map_err(|_| error())?,
            times: times.parse().map_err(|_| error())?,
        };
        let fits = spec.probability <= 100 && spec.space >= 0 && spec.times >= -1;
        if fits { Ok(spec) } else { Err(error()) }
    }
}

impl fmt::Display for FaultSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}:{}:{}", self.interval, self.probability, self.space, self.times)
    }
}

/// State of a fault.
#[derive(Debug)]
pub(super) struct Fault {
    spec: FaultSpec,
    space: AtomicI64,
    times: AtomicI64,
    count: AtomicU64,
    pub(super) happened: AtomicU64,
}

impl Fault {
    pub(super) fn new(spec: FaultSpec) -> Fault {
        Fault {
            spec,
            space: AtomicI64::new(spec.space),
            times: AtomicI64::new(spec.times),
            count: AtomicU64::new(0),
            happened: AtomicU64::new(0),
        }
    }

    /// Returns whether the fault occurs now, as the kernel's `should_fail` does for a size of 1.
    pub(super) fn strikes(&self, chance: &mut Chance) -> bool {
        if self.spec.probability == 0 || self.times.load(Relaxed) == 0 {
            return false;
        }
        if self.space.load(Relaxed) > 1 {
            self.space.fetch_sub(1, Relaxed);
            return false;
        }
        if self.spec.interval > 1
            && !(self.count.fetch_add(1, Relaxed) + 1).is_multiple_of(self.spec.interval)
        {
            return false;
        }
        if chance.below(100) >= u64::from(self.spec.probability) {
            return false;
        }
        if self.times.load(Relaxed) > 0 {
            self.times.fetch_sub(1, Relaxed);
        }
        self.happened.fetch_add(1, Relaxed);
        true
    }
}

/// A seeded random number generator, so that a replayed simulation has the same faults.
#[derive(Debug)]
pub(super) struct Chance(fastrand::Rng);

impl Chance {
    pub(super) fn new(seed: u64) -> Chance {
        Chance(fastrand::Rng::with_seed(seed))
    }

    /// Returns a number below `bound`, which must not be 0.
    pub(super) fn below(&mut self, bound: u64) -> u64 {
        self.0.u64(..bound)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn strikes(text: &str, count: usize) -> String {
        let fault = Fault::new(text.parse().unwrap());
        let mut chance = Chance::new(1);
        (0..count).map(|_| if fault.strikes(&mut chance) { 'x' } else { '.' }).collect()
    }

    #[test]
    fn interval_space_and_times_match_the_kernel() {
        assert_eq!(strikes("1:100:0:-1", 5), "xxxxx");
        assert_eq!(strikes("3:100:0:-1", 7), "..x..x.");
        assert_eq!(strikes("1:100:0:2", 5), "xx...");
        assert_eq!(strikes("1:100:4:-1", 6), "...xxx");
        assert_eq!(strikes("1:0:0:-1", 3), "...");
        let half = strikes("1:50:0:-1", 1000).matches('x').count();
        assert!((400..600).contains(&half), "{half}");
    }

    #[test]
    fn an_invalid_fault_is_refused() {
        for text in ["", "1", "1:2:3", "1:101:0:1", "1:1:-1:1", "a:1:1:1", "1:1:0:-2", "1:1:0:1:1"] {
            assert!(text.parse::<FaultSpec>().is_err(), "{text}");
        }
        assert_eq!("1,50,0,-1".parse::<FaultSpec>().unwrap().to_string(), "1:50:0:-1");
    }
}
