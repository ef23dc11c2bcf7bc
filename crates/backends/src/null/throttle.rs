//! `mbps`: limits the throughput of a device.
//!
//! The budget is null_blk's: each tick provides the bytes for a fiftieth of a second, and requests that
//! find too little wait for the next tick. Unlike in null_blk, a request larger than a tick's budget uses
//! the budget of later ticks instead of waiting forever, and the next requests wait for it; the rate is the
//! same.

use queue::Nanos;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed};
use std::sync::atomic::{AtomicI64, AtomicU64};

/// Largest rate in MiB per second, as in null_blk.
pub(super) const MBPS_MAX: u32 = 40960;
/// Ticks per second, as null_blk's `TICKS_PER_SEC`.
const TICKS: u64 = 50;
const TICK_NS: u64 = 1_000_000_000 / TICKS;

/// Budget of a device, shared by its queues, with the rest for this tick.
#[derive(Debug)]
pub(super) struct Budget {
    per_tick: i64,
    left: AtomicI64,
    tick: AtomicU64,
}

impl Budget {
    pub(super) fn new(mbps: u32) -> Budget {
        let per_tick = (1 << 20) / TICKS as i64 * i64::from(mbps);
        Budget { per_tick, left: AtomicI64::new(per_tick), tick: AtomicU64::new(0) }
    }

    /// Takes this many bytes from the budget.
    ///
    /// # Errors
    /// The time at which to try again.
    pub(super) fn take(&self, bytes: u64, now: Nanos) -> Result<(), Nanos> {
        let (tick, last) = (now.0 / TICK_NS, self.tick.load(Acquire));
        if tick > last && self.tick.compare_exchange(last, tick, AcqRel, Relaxed).is_ok() {
            let passed = i64::try_from(tick - last).unwrap_or(i64::MAX);
            let fill = |left: i64| {
                Some(left.saturating_add(self.per_tick.saturating_mul(passed)).min(self.per_tick))
            };
            let _ = self.left.fetch_update(AcqRel, Relaxed, fill);
        }
        if self.left.load(Relaxed) <= 0 {
            return Err(Nanos((tick + 1) * TICK_NS));
        }
        self.left.fetch_sub(bytes as i64, AcqRel);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the bytes per second that sequential requests of this size move.
    fn second_of(mbps: u32, len: u64) -> u64 {
        let budget = Budget::new(mbps);
        let (mut now, mut moved) = (Nanos(TICK_NS), 0);
        while now.0 < 1_000_000_000 + TICK_NS {
            match budget.take(len, now) {
                Ok(()) => moved += len,
                Err(then) => now = then,
            }
        }
        moved
    }

    #[test]
    fn throughput_matches_the_limit() {
        for (mbps, len) in [(1, 4096), (1, 65536), (100, 4096), (100, 4 << 20)] {
            let wanted = u64::from(mbps) << 20;
            let moved = second_of(mbps, len);
            assert!(moved.abs_diff(wanted) <= wanted / 20 + 2 * len, "{mbps} MiB/s by {len}: {moved}");
        }
    }
}
