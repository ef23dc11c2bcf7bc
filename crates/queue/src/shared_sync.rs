//! Syncs that all queues of a device share: one runs at a time, and serves every request that arrived before
//! it started. Requests that find one running wait on a [`WaitList`](crate::WaitList).

use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

/// A sync that runs at most once at a time over all queues.
///
/// The count is even while no sync runs. It grows by one when a sync starts and by one more when that
/// succeeds; a sync that does not succeed takes its own increment back.
#[derive(Default, Debug)]
pub struct SharedSync(AtomicU64);

impl SharedSync {
    /// Returns the ticket of a request that arrives now: a sync that starts from now on serves it.
    pub fn ticket(&self) -> u64 {
        let now = self.0.load(SeqCst);
        now + if now.is_multiple_of(2) { 2 } else { 3 }
    }

    /// Whether a sync that serves this ticket has succeeded.
    pub fn is_served(&self, ticket: u64) -> bool {
        self.0.load(SeqCst) >= ticket
    }

    /// Whether a sync runs.
    pub fn is_running(&self) -> bool {
        !self.0.load(SeqCst).is_multiple_of(2)
    }

    /// Starts a sync, which the caller carries out. `false`: one runs already.
    pub fn begin(&self) -> bool {
        let now = self.0.load(SeqCst);
        now.is_multiple_of(2) && self.0.compare_exchange(now, now + 1, SeqCst, SeqCst).is_ok()
    }

    /// Ends the sync that runs: it has succeeded. The caller then wakes those that wait for it.
    pub fn succeed(&self) {
        self.0.fetch_add(1, SeqCst);
    }

    /// Ends the sync that runs: it failed, or was never started, and serves nobody. The caller has recorded a
    /// failure before, and then wakes those that wait for it.
    pub fn abandon(&self) {
        self.0.fetch_sub(1, SeqCst);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_request_is_served_only_by_a_sync_that_starts_after_it() {
        let sync = SharedSync::default();
        let first = sync.ticket();
        assert!(sync.begin() && !sync.begin(), "one at a time");
        let second = sync.ticket();
        sync.succeed();
        assert!(sync.is_served(first) && !sync.is_served(second), "it had started before the second came");
        assert!(sync.begin() && sync.is_running());
        sync.abandon();
        assert!(!sync.is_served(second) && sync.begin(), "a sync that was abandoned serves nobody");
        sync.succeed();
        assert!(sync.is_served(second) && !sync.is_running());
    }
}
