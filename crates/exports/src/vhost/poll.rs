//! Decides how long a virtqueue is polled before its driver has to kick again.
//!
//! The budget doubles, up to a limit, when polling found requests, and halves when it did not. A queue that
//! has become idle therefore soon waits for kicks at once, except for a short poll after every sixteenth
//! batch.

use queue::Nanos;

/// Shortest useful poll: the duration of a kick, which is two system calls of the driver's host.
const MIN_NS: u64 = 2_000;
/// Number of batches after which a short poll is tried although polling has not paid off lately.
const TRIAL: u32 = 16;

/// The adaptive budget of a queue.
#[derive(Debug)]
pub(super) struct PollBudget {
    max_ns: u64,
    now_ns: u64,
    misses: u32,
    /// End of the poll in progress.
    until: Nanos,
    /// Whether nothing has been found since the poll began.
    is_trying: bool,
}

impl PollBudget {
    /// Creates a budget of at most `max_ns` nanoseconds; 0 disables polling.
    pub(super) fn new(max_ns: u64) -> PollBudget {
        PollBudget { max_ns, now_ns: max_ns, misses: 0, until: Nanos(0), is_trying: false }
    }

    /// Records that requests were found: polling continues from `now`.
    #[inline]
    pub(super) fn found(&mut self, now: Nanos) {
        if self.max_ns == 0 {
            return;
        }
        if self.is_trying {
            self.now_ns = (self.now_ns * 2).clamp(MIN_NS.min(self.max_ns), self.max_ns);
            self.is_trying = false;
        }
        self.until = now.after(self.budget());
    }

    fn budget(&mut self) -> u64 {
        if self.now_ns >= MIN_NS {
            return self.now_ns;
        }
        self.misses += 1;
        if self.misses.is_multiple_of(TRIAL) { MIN_NS.min(self.max_ns) } else { 0 }
    }

    /// Records that nothing was found. Returns whether to poll again.
    #[inline]
    pub(super) fn goes_on(&mut self, now: Nanos) -> bool {
        if now < self.until {
            self.is_trying = true;
            return true;
        }
        if std::mem::take(&mut self.is_trying) {
            self.now_ns /= 2;
        }
        false
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

    #[test]
    fn polling_that_finds_nothing_gets_rarer_and_returns_when_it_pays() {
        let mut budget = PollBudget::new(100_000);
        let mut now = Nanos(0);
        // Requests come once a millisecond, so each poll is in vain.
        let mut polled_ns = 0;
        for _ in 0..160 {
            now = now.after(1_000_000);
            budget.found(now);
            let start = now;
            while budget.goes_on(now) {
                now = now.after(500);
            }
            polled_ns += now.since(start);
        }
        assert!(polled_ns < 300_000, "{polled_ns} ns of polling for 160 ms");
        // Now requests come every microsecond.
        for _ in 0..200 {
            budget.found(now);
            budget.goes_on(now);
            now = now.after(1_000);
        }
        budget.found(now);
        assert!(budget.goes_on(now.after(90_000)));
    }
}
