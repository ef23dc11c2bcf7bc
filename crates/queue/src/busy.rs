//! Busy time of a device: how long at least one of its hardware queues had a request in flight, as the
//! kernel's `io_ticks` of a disk with several queues. It is neither the sum of the queues' busy times nor the
//! longest of them.
//!
//! Owner: the device. Each queue reports when it becomes busy and when it becomes idle, at most twice a turn
//! and never for a single request. Readers load one word. This is the only memory that several queues of a
//! device write.

use crate::Nanos;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// The low bits of the word count busy queues.
const COUNT_BITS: u32 = 12;
const COUNT: u64 = (1 << COUNT_BITS) - 1;
/// `log2` of the unit of time, in nanoseconds. The other 52 bits of the word hold a sign and more than four
/// years in that unit.
const UNIT_BITS: u32 = 6;

/// Busy time of several queues together.
#[derive(Default, Debug)]
pub struct BusyTogether {
    /// Low bits: number of busy queues. Upper bits: sum of the times at which the last one became idle, minus
    /// the sum of those at which the first one became busy. While a queue is busy, the current time has to be
    /// added. Wraps.
    word: AtomicU64,
    /// The largest value that was returned. Threads read their clocks at slightly different times, and a
    /// counter must not decrease.
    reported: AtomicU64,
}

/// Returns a time in the word's upper bits.
fn raised(now: Nanos) -> u64 {
    now.0 >> UNIT_BITS << COUNT_BITS
}

impl BusyTogether {
    /// Counts a queue that became busy.
    pub(crate) fn enter(&self, now: Nanos) {
        self.change(|word| match word & COUNT {
            0 => word.wrapping_sub(raised(now)) + 1,
            _ => word + 1,
        });
    }

    /// Counts a queue that became idle.
    pub(crate) fn leave(&self, now: Nanos) {
        self.change(|word| match word & COUNT {
            1 => (word - 1).wrapping_add(raised(now)),
            _ => word - 1,
        });
    }

    fn change(&self, next: impl Fn(u64) -> u64) {
        let mut word = self.word.load(Relaxed);
        while let Err(newer) = self.word.compare_exchange_weak(word, next(word), Relaxed, Relaxed) {
            word = newer;
        }
    }

    /// Returns how long at least one queue was busy, in nanoseconds, to within 64 ns. `now` is on the clock
    /// of the queues' rings.
    pub fn busy_ns(&self, now: Nanos) -> u64 {
        let word = self.word.load(Relaxed);
        let closed = if word & COUNT == 0 { word } else { word.wrapping_add(raised(now)) };
        // Negative if one thread read its clock slightly before another.
        let units = (closed as i64 >> COUNT_BITS).max(0) as u64;
        let busy_ns = units << UNIT_BITS;
        self.reported.fetch_max(busy_ns, Relaxed).max(busy_ns)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::QueueStats;
    use std::sync::Arc;

    #[test]
    fn overlapping_busy_times_count_once() {
        let together = Arc::new(BusyTogether::default());
        let queues = [(); 2].map(|()| QueueStats::default());
        queues.iter().for_each(|queue| queue.share(together.clone()));
        let ms = |ms: u64| Nanos(1 << 40 | ms << 20);
        let busy = |at| together.busy_ns(ms(at)) >> 20;
        queues[0].in_flight(1, ms(10));
        queues[1].in_flight(3, ms(20));
        assert_eq!(busy(25), 15, "busy time includes the current period");
        queues[0].in_flight(0, ms(30));
        queues[1].in_flight(1, ms(35));
        queues[1].in_flight(0, ms(40));
        assert_eq!(busy(90), 30);
        queues[0].in_flight(1, ms(100));
        queues[0].in_flight(0, ms(110));
        assert_eq!(busy(999), 40);
        let each = queues.map(|queue| queue.snapshot(ms(999)).busy_ns >> 20);
        assert_eq!(each, [30, 20], "each queue still has its own busy time");
    }

    #[test]
    fn busy_time_never_decreases_and_a_dropped_queue_is_idle() {
        let together = Arc::new(BusyTogether::default());
        together.enter(Nanos(1000));
        let before = together.busy_ns(Nanos(9000));
        together.leave(Nanos(8000));
        assert_eq!(together.busy_ns(Nanos(9000)), before);
        let queue = QueueStats::default();
        queue.share(together.clone());
        queue.in_flight(1, Nanos(20_000));
        drop(queue);
        assert_eq!(together.busy_ns(Nanos(1 << 40)), before);
    }

    #[test]
    fn concurrent_changes_balance_out() {
        let together = BusyTogether::default();
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    (0..1000).for_each(|_| {
                        together.enter(Nanos(64));
                        together.leave(Nanos(64))
                    })
                });
            }
        });
        assert_eq!(together.word.load(Relaxed), 0);
    }
}
