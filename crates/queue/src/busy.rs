//! For how long any of a device's hardware queues had a request under way, as the kernel's `io_ticks` of a disk with several
//! queues: neither their sum nor the longest of them.
//!
//! Owner: the device. Each queue says when it stops being empty and when it is empty again, at most twice a turn and never
//! for a request; whoever asks reads one word. It is the only memory that queues of a device write together.

use crate::Nanos;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// The low bits of the word: how many queues are busy.
const COUNT_BITS: u32 = 12;
const COUNT: u64 = (1 << COUNT_BITS) - 1;
/// `log2` of the unit of time, in nanoseconds: the other 52 bits count more than four years of those, and a sign.
const UNIT_BITS: u32 = 6;

/// Busy times of several queues, together.
#[derive(Default, Debug)]
pub struct BusyTogether {
    /// How many are busy, and above that the times when the last one became idle less those when the first one became
    /// busy. While some are, the time now is missing in that. Wraps.
    word: AtomicU64,
    /// The most that was told: clocks of threads are read a little apart, and a counter never goes down.
    told: AtomicU64,
}

/// A time in the word's upper bits.
fn raised(now: Nanos) -> u64 {
    now.0 >> UNIT_BITS << COUNT_BITS
}

impl BusyTogether {
    /// One more queue has something to do.
    pub(crate) fn enter(&self, now: Nanos) {
        self.change(|word| match word & COUNT {
            0 => word.wrapping_sub(raised(now)) + 1,
            _ => word + 1,
        });
    }

    /// A queue that had has nothing more.
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

    /// For how long at least one was busy, to within 64 ns. `now` is on the clock of the queues' rings.
    pub fn busy_ns(&self, now: Nanos) -> u64 {
        let word = self.word.load(Relaxed);
        let closed = if word & COUNT == 0 { word } else { word.wrapping_add(raised(now)) };
        // Below 0 where one thread's clock was read a moment before another's.
        let units = (closed as i64 >> COUNT_BITS).max(0) as u64;
        let busy_ns = units << UNIT_BITS;
        self.told.fetch_max(busy_ns, Relaxed).max(busy_ns)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::QueueStats;
    use std::sync::Arc;

    #[test]
    fn times_of_queues_that_overlap_count_once_and_those_that_do_not_add_up() {
        let together = Arc::new(BusyTogether::default());
        let queues = [(); 2].map(|()| QueueStats::default());
        queues.iter().for_each(|queue| queue.share(together.clone()));
        let ms = |ms: u64| Nanos(1 << 40 | ms << 20);
        let busy = |at| together.busy_ns(ms(at)) >> 20;
        queues[0].in_flight(1, ms(10));
        queues[1].in_flight(3, ms(20));
        assert_eq!(busy(25), 15, "it runs on");
        queues[0].in_flight(0, ms(30));
        queues[1].in_flight(1, ms(35));
        queues[1].in_flight(0, ms(40));
        assert_eq!(busy(90), 30);
        queues[0].in_flight(1, ms(100));
        queues[0].in_flight(0, ms(110));
        assert_eq!(busy(999), 40);
        let each = queues.map(|queue| queue.snapshot(ms(999)).busy_ns >> 20);
        assert_eq!(each, [30, 20], "each by itself is as it was");
    }

    #[test]
    fn what_was_told_never_goes_down_and_a_queue_that_is_gone_is_idle() {
        let together = Arc::new(BusyTogether::default());
        together.enter(Nanos(1000));
        let told = together.busy_ns(Nanos(9000));
        together.leave(Nanos(8000));
        assert_eq!(together.busy_ns(Nanos(9000)), told);
        let queue = QueueStats::default();
        queue.share(together.clone());
        queue.in_flight(1, Nanos(20_000));
        drop(queue);
        assert_eq!(together.busy_ns(Nanos(1 << 40)), told);
    }

    #[test]
    fn many_threads_leave_nothing_behind() {
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
