//! Decides when a buffered write is done inline: as long as such writes return at once.
//!
//! A buffered write mostly copies to the page cache within a few microseconds; the ring would only add the
//! wake-up of a worker thread. But it can wait for write-back of dirty pages, or for the read of a
//! partially covered block, and everything else on the thread waits with it. So each write is timed, and
//! after a slow one the ring does the writes for a while, longer each time that it happens again.

use queue::Nanos;
use std::time::Instant;

/// Duration in nanoseconds above which a write must have waited: copying 1 MiB takes 100 to 200 µs.
const SLOW_NS: u64 = 1_000_000;
/// Time for which the ring does the writes at first, in nanoseconds.
const AWAY_NS_MIN: u64 = 10_000_000;
/// Maximum of that time, in nanoseconds: one stall per second is acceptable.
const AWAY_NS_MAX: u64 = 1_000_000_000;

#[derive(Debug)]
pub(super) struct Pace {
    /// Time before which no write is done inline.
    resume: Nanos,
    /// Time for which the ring does the writes after the next slow one, in nanoseconds.
    away_ns: u64,
}

impl Pace {
    pub(super) const NEW: Pace = Pace { resume: Nanos(0), away_ns: AWAY_NS_MIN };

    /// Returns whether to do the next write inline.
    pub(super) fn is_fast(&self, now: Nanos) -> bool {
        now >= self.resume
    }

    /// Does a write inline and measures its duration.
    pub(super) fn time<T>(&mut self, now: Nanos, write: impl FnOnce() -> T) -> T {
        let start = Instant::now();
        let result = write();
        self.took(now, start.elapsed().as_nanos() as u64);
        result
    }

    /// Records the duration of a write in nanoseconds.
    pub(super) fn took(&mut self, now: Nanos, nanos: u64) {
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
    fn inline_writes_pause_longer_each_time_until_a_second_without_stalls() {
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
