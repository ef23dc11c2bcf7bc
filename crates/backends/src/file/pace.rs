//! When a buffered write is done in place: while writes return at once.
//!
//! A buffered write mostly copies into the page cache, a few microseconds, and the ring would only add a
//! worker thread's wake-up. But it can wait: for dirty pages to be written back, for a block of which it
//! covers a part to be read. Then everything else on the thread waits too. So each is timed, and after one
//! that was slow the ring takes them for a while, longer each time it happens again.

use queue::Nanos;
use std::time::Instant;

/// Slower than this, and it waited: copying 1 MiB takes 100 to 200 µs.
const SLOW_NS: u64 = 1_000_000;
/// How long the ring takes over the first time.
const AWAY_NS_MIN: u64 = 10_000_000;
/// How long at most: one stall a second is borne.
const AWAY_NS_MAX: u64 = 1_000_000_000;

#[derive(Debug)]
pub(super) struct Pace {
    /// Not in place before this time.
    resume: Nanos,
    /// How long the ring takes over next time.
    away_ns: u64,
}

impl Pace {
    pub(super) const NEW: Pace = Pace { resume: Nanos(0), away_ns: AWAY_NS_MIN };

    /// Whether to do the next write in place.
    pub(super) fn is_fast(&self, now: Nanos) -> bool {
        now >= self.resume
    }

    /// Do a write in place, and look how long it took.
    pub(super) fn time<T>(&mut self, now: Nanos, write: impl FnOnce() -> T) -> T {
        let start = Instant::now();
        let result = write();
        self.took(now, start.elapsed().as_nanos() as u64);
        result
    }

    fn took(&mut self, now: Nanos, nanos: u64) {
        if nanos < SLOW_NS {
            if self.away_ns > AWAY_NS_MIN && now.since(self.resume) > AWAY_NS_MAX {
                self.away_ns = AWAY_NS_MIN;
            }
            return;
        }
        self.resume = now.after(nanos).after(self.away_ns);
        self.away_ns = (self.away_ns * 4).min(AWAY_NS_MAX);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slow_write_sends_the_next_ones_to_the_ring_for_a_while() {
        let mut pace = Pace::NEW;
        let start = Nanos(1_000_000_000);
        pace.took(start, 5_000);
        assert!(pace.is_fast(start));
        pace.took(start, 2_000_000);
        assert!(!pace.is_fast(start.after(11_000_000)) && pace.is_fast(start.after(12_000_000)));
    }

    #[test]
    fn it_stays_away_longer_each_time_and_forgets_after_a_good_second() {
        let mut pace = Pace::NEW;
        let mut now = Nanos(1_000_000_000);
        for away in [10_000_000, 40_000_000, 160_000_000, 640_000_000, 1_000_000_000, 1_000_000_000] {
            pace.took(now, SLOW_NS);
            assert_eq!(pace.resume, now.after(SLOW_NS + away));
            now = pace.resume;
        }
        pace.took(now.after(1_500_000_000), 5_000);
        assert_eq!(pace.away_ns, AWAY_NS_MIN);
    }
}
