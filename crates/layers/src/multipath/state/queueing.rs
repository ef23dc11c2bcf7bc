//! Decides whether requests are queued while no path is usable; handles suspensions, which change that
//! (MP-4).

use super::Multipath;
use queue::Nanos;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Release};

/// A suspension with flush: requests without a path fail.
const SUSPENDED_FLUSHED: u32 = 1;
/// A suspension without flush: requests without a path are pushed back.
const SUSPENDED_NOFLUSH: u32 = 2;
/// The device is being removed.
const REMOVED: u32 = 3;

impl Multipath {
    /// Returns whether requests are queued while no path is usable.
    pub fn queues_if_no_path(&self) -> bool {
        self.queue_if_no_path.load(Acquire)
    }

    pub(super) fn set_queue_if_no_path(&self, queue: bool) {
        // The timeout starts anew.
        self.no_path_since_ns.store(0, Release);
        self.queue_if_no_path.store(queue, Release);
        self.saved_queue_if_no_path.store(queue, Release);
        self.changed();
    }

    /// Sets for how long requests are queued while no path is usable before all of them fail; 0: without
    /// limit.
    pub fn set_no_path_timeout(&self, timeout_ns: u64) {
        self.no_path_timeout_ns.store(timeout_ns, Release);
    }

    /// Returns whether a request without a path is queued rather than failed at time `now` (MP-4).
    pub(in super::super) fn may_queue(&self, now: Nanos) -> bool {
        if self.suspended.load(Acquire) == SUSPENDED_NOFLUSH {
            return false;
        }
        if !self.queues_if_no_path() {
            return false;
        }
        let timeout_ns = self.no_path_timeout_ns.load(Acquire);
        if timeout_ns == 0 {
            return true;
        }
        // 0 means that no request has needed a path since.
        let since =
            self.no_path_since_ns.compare_exchange(0, now.0.max(1), AcqRel, Acquire).unwrap_or_else(|s| s);
        if since != 0 && now.0.saturating_sub(since) >= timeout_ns {
            self.queue_if_no_path.store(false, Release);
            self.saved_queue_if_no_path.store(false, Release);
            self.changed();
            return false;
        }
        true
    }

    /// Returns whether requests without a path are pushed back to the device's queue, to be sent by the next
    /// table. True during a suspension without flush (the kernel's `must_push_back`).
    pub(in super::super) fn must_push_back(&self) -> bool {
        self.suspended.load(Acquire) == SUSPENDED_NOFLUSH
    }

    /// Prepares for a suspension. With `noflush`, requests without a path are pushed back; without, they
    /// fail.
    pub fn presuspend(&self, noflush: bool) {
        // If queueing is off already, the saved value stays: an earlier suspension may have turned it off.
        if !noflush && self.queue_if_no_path.swap(false, AcqRel) {
            self.saved_queue_if_no_path.store(true, Release);
        }
        self.suspended.store(if noflush { SUSPENDED_NOFLUSH } else { SUSPENDED_FLUSHED }, Release);
        self.changed();
    }

    /// Prepares for removal of the device: no request waits any longer for a path or an activation.
    pub fn prepare_removal(&self) {
        self.queue_if_no_path.store(false, Release);
        self.suspended.store(REMOVED, Release);
        self.changed();
    }

    /// Returns whether the device is being removed.
    pub(in super::super) fn is_being_removed(&self) -> bool {
        self.suspended.load(Acquire) == REMOVED
    }

    /// Ends a suspension: restores `queue_if_no_path`.
    pub fn resume(&self) {
        self.suspended.store(0, Release);
        self.queue_if_no_path.store(self.saved_queue_if_no_path.load(Acquire), Release);
        self.changed();
    }
}
