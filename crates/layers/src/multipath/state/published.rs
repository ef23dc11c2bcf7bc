//! The counts that path selectors publish for the status.

use super::super::select::Report;
use super::Multipath;
#[cfg(loom)]
use loom::sync::atomic::AtomicU64;
#[cfg(not(loom))]
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, PoisonError};

/// The selector counts that one hardware queue publishes for the status; written by that queue alone, on one
/// cache line for each path.
#[derive(Debug)]
pub(in super::super) struct Published {
    paths: Box<[Counts]>,
}

#[derive(Default, Debug)]
#[repr(align(64))]
struct Counts([AtomicU64; 5]);

impl Published {
    fn new(paths: usize) -> Published {
        Published { paths: (0..paths).map(|_| Default::default()).collect() }
    }

    #[inline]
    pub(in super::super) fn set(&self, path: usize, report: Report) {
        let Report { requests, bytes, service_time, stale_after, misses } = report;
        let Some(Counts(cells)) = self.paths.get(path) else { return };
        cells
            .iter()
            .zip([requests, bytes, service_time, stale_after, misses])
            .for_each(|(cell, value)| cell.store(value, Relaxed));
    }

    /// Resets all counts to 0.
    pub(in super::super) fn clear(&self) {
        (0..self.paths.len()).for_each(|path| self.set(path, Report::default()));
    }

    fn get(&self, path: usize) -> Report {
        let [requests, bytes, service_time, stale_after, misses] =
            std::array::from_fn(|cell| self.paths[path].0[cell].load(Relaxed));
        Report { requests, bytes, service_time, stale_after, misses }
    }
}

impl Multipath {
    /// Registers a queue's published counts. Returns them with the queue's number.
    pub(in super::super) fn publish(&self) -> (Arc<Published>, usize) {
        let published = Arc::new(Published::new(self.paths.len()));
        let mut all = self.published.lock().unwrap_or_else(PoisonError::into_inner);
        // Counts of queues that ended are 0, and have no other owner.
        all.retain(|other| Arc::strong_count(other) > 1);
        all.push(published.clone());
        (published, all.len() - 1)
    }

    /// Combines the published counts of all queues for a path: sums, and the maximum of averages.
    pub(super) fn report(&self, path: usize) -> Report {
        let all = self.published.lock().unwrap_or_else(PoisonError::into_inner);
        all.iter().map(|published| published.get(path)).fold(Report::default(), |sum, one| Report {
            requests: sum.requests + one.requests,
            bytes: sum.bytes + one.bytes,
            service_time: sum.service_time.max(one.service_time),
            stale_after: sum.stale_after.max(one.stale_after),
            misses: sum.misses + one.misses,
        })
    }

    /// Returns the requests and bytes in flight that selectors of all queues count, for tests that they
    /// balance.
    pub fn in_flight(&self) -> (u64, u64) {
        let reports = (0..self.paths.len()).map(|path| self.report(path));
        reports.fold((0, 0), |sum, one| (sum.0 + one.requests, sum.1 + one.bytes))
    }
}
