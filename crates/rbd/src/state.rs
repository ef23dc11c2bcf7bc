//! What a node reports of an image, for `show`: progress, losses and the exclusive lock.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

/// After this time without an answer, `show` reports that the cluster does not answer.
const SILENT_NS: u64 = 5_000_000_000;

/// Written by the node's thread only.
#[derive(Default, Debug)]
pub(crate) struct State {
    in_flight: AtomicU64,
    /// When a request was answered last, or was the first to be in flight.
    progress_ns: AtomicU64,
    /// Requests in flight that need the exclusive lock.
    writes: AtomicU64,
    /// When one of them was answered last, or was the first to be in flight.
    write_progress_ns: AtomicU64,
    /// The cluster has excluded this client.
    blocklisted: AtomicBool,
    /// A write was refused because the exclusive lock is lost.
    locked_out: AtomicBool,
    timeouts: AtomicU64,
}

impl State {
    pub(crate) fn set_in_flight(&self, in_flight: u32, now_ns: u64) {
        self.in_flight.store(in_flight.into(), Relaxed);
        self.progress_ns.store(now_ns, Relaxed);
    }

    /// Records that a request was started: the first one starts the clock.
    pub(crate) fn started(&self, in_flight: u32, now_ns: u64) {
        if in_flight == 1 {
            self.progress_ns.store(now_ns, Relaxed);
        }
        self.in_flight.store(in_flight.into(), Relaxed);
    }

    /// Records how many requests that need the exclusive lock are in flight, when one has ended or the first one
    /// has started.
    pub(crate) fn set_writes(&self, writes: u32, now_ns: u64) {
        self.writes.store(writes.into(), Relaxed);
        self.write_progress_ns.store(now_ns, Relaxed);
    }

    /// Returns how long requests that need the exclusive lock have waited while none was answered.
    pub(crate) fn write_wait_ns(&self, now_ns: u64) -> u64 {
        match self.writes.load(Relaxed) {
            0 => 0,
            _ => now_ns.saturating_sub(self.write_progress_ns.load(Relaxed)),
        }
    }

    pub(crate) fn count_timeout(&self) {
        self.timeouts.fetch_add(1, Relaxed);
    }

    pub(crate) fn set_blocklisted(&self) -> bool {
        !self.blocklisted.swap(true, Relaxed)
    }

    pub(crate) fn is_blocklisted(&self) -> bool {
        self.blocklisted.load(Relaxed)
    }

    pub(crate) fn set_locked_out(&self) -> bool {
        !self.locked_out.swap(true, Relaxed)
    }

    /// Returns what `show` prints of the cluster.
    pub(crate) fn describe(&self, now_ns: u64) -> String {
        let in_flight = self.in_flight.load(Relaxed);
        let silent_ns = now_ns.saturating_sub(self.progress_ns.load(Relaxed));
        let timeouts = self.timeouts.load(Relaxed);
        let write_wait_ns = self.write_wait_ns(now_ns);
        if self.is_blocklisted() {
            "this client is blocklisted: every request fails (remove the device and add it again)".to_owned()
        } else if self.locked_out.load(Relaxed) {
            "another client has the exclusive lock: writes fail (remove the device and add it again)"
                .to_owned()
        } else if in_flight > 0 && silent_ns >= SILENT_NS {
            let seconds = silent_ns / 1_000_000_000;
            format!("no answer for {seconds} s to {in_flight} requests (ask: ceph -s)")
        } else if write_wait_ns >= SILENT_NS {
            let (seconds, writes) = (write_wait_ns / 1_000_000_000, self.writes.load(Relaxed));
            format!("{writes} writes have waited {seconds} s for the exclusive lock (ask: rbd lock ls)")
        } else if timeouts > 0 {
            format!("answers; {timeouts} requests have timed out")
        } else {
            "answers".to_owned()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cluster_without_answers_is_reported_only_while_requests_wait() {
        let state = State::default();
        state.started(1, 1_000_000_000);
        assert_eq!(state.describe(2_000_000_000), "answers");
        state.started(2, 8_000_000_000);
        assert_eq!(state.describe(13_000_000_000), "no answer for 12 s to 2 requests (ask: ceph -s)");
        state.set_in_flight(0, 13_000_000_000);
        assert_eq!(state.describe(99_000_000_000), "answers");
    }

    #[test]
    fn writes_that_wait_for_the_lock_are_reported_while_reads_are_answered() {
        let state = State::default();
        state.started(1, 1_000_000_000);
        state.set_writes(1, 1_000_000_000);
        state.set_in_flight(3, 8_000_000_000);
        let expected = "1 writes have waited 7 s for the exclusive lock (ask: rbd lock ls)";
        assert_eq!(state.describe(8_000_000_000), expected);
        assert_eq!(state.write_wait_ns(3_000_000_000), 2_000_000_000);
        state.set_writes(0, 8_000_000_000);
        assert_eq!((state.describe(9_000_000_000).as_str(), state.write_wait_ns(9)), ("answers", 0));
    }

    #[test]
    fn a_blocklisted_client_is_reported_before_all_else() {
        let state = State::default();
        state.started(1, 0);
        assert!(state.set_blocklisted());
        assert!(!state.set_blocklisted(), "it is logged once");
        assert!(state.describe(99_000_000_000).starts_with("this client is blocklisted"));
    }
}
