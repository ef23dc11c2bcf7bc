//! Decides how long a virtqueue is polled before its driver has to kick again.
//!
//! [`AdaptivePoll`] learns from the time from an empty queue to its next requests, whether it was polled all the
//! while or not.

use queue::Nanos;
use ring::AdaptivePoll;

/// The adaptive budget of a queue.
#[derive(Debug)]
pub(super) struct PollBudget {
    time: AdaptivePoll,
    /// End of the poll in progress.
    until: Nanos,
    /// When the queue was first seen to be empty after its last requests; `None`: it was not.
    empty_since: Option<Nanos>,
}

impl PollBudget {
    /// Creates a budget of at most `max_ns` nanoseconds; 0 disables polling.
    pub(super) fn new(max_ns: u64) -> PollBudget {
        PollBudget { time: AdaptivePoll::new(max_ns), until: Nanos(0), empty_since: None }
    }

    /// Records that requests were found: polling continues from `now`.
    #[inline]
    pub(super) fn found(&mut self, now: Nanos) {
        if !self.time.is_enabled() {
            return;
        }
        if let Some(since) = self.empty_since.take() {
            self.time.learn(now.since(since));
        }
        self.until = now.after(self.time.budget());
    }

    /// Records that nothing was found. Returns whether to poll again.
    #[inline]
    pub(super) fn goes_on(&mut self, now: Nanos) -> bool {
        if !self.time.is_enabled() {
            return false;
        }
        self.empty_since.get_or_insert(now);
        now < self.until
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_queue_that_is_never_polled_waits_at_once() {
        let mut budget = PollBudget::new(0);
        budget.found(Nanos(1000));
        assert!(!budget.goes_on(Nanos(1000)));
    }

    /// Lets requests come at intervals of `gap_ns`. Returns the nanoseconds of polling, and the number of
    /// requests that polling found.
    fn run(budget: &mut PollBudget, count: u32, gap_ns: u64) -> (u64, u32) {
        const STEP_NS: u64 = 500;
        let (mut polled_ns, mut hits) = (0, 0);
        let mut now = Nanos(1 << 40);
        for _ in 0..count {
            budget.found(now);
            let next = now.after(gap_ns);
            let start = now;
            while now < next && budget.goes_on(now) {
                now = now.after(STEP_NS);
            }
            polled_ns += now.since(start);
            hits += u32::from(now >= next);
            now = now.max(next);
        }
        (polled_ns, hits)
    }

    #[test]
    fn polling_that_finds_nothing_ends() {
        let mut budget = PollBudget::new(100_000);
        let (polled_ns, hits) = run(&mut budget, 160, 1_000_000);
        assert!(polled_ns < 300_000, "{polled_ns} ns of polling for 160 ms");
        assert_eq!(hits, 0);
        assert_eq!(run(&mut budget, 160, 1_000_000), (0, 0));
    }

    #[test]
    fn polling_returns_when_requests_come_within_the_limit() {
        let mut budget = PollBudget::new(100_000);
        for gap_ns in [1_000, 40_000, 90_000] {
            // A pause first, after which the queue is not polled.
            run(&mut budget, 20, 1_000_000);
            let (_, hits) = run(&mut budget, 100, gap_ns);
            assert!(hits >= 90, "{hits} of 100 requests each {gap_ns} ns were found by polling");
        }
    }
}
