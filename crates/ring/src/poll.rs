//! Decides how long to poll before sleeping.
//!
//! What counts is the time until an event comes, whether it was polled for or slept through. If it is within the
//! limit but longer than the budget, a longer poll would have found the event: the budget doubles. If it is longer
//! than the limit, no poll would have: the budget halves, so what is idle soon sleeps at once.

/// Shortest useful poll: the duration of two system calls.
const MIN_NS: u64 = 2_000;

/// The adaptive time of polling before sleeping.
#[derive(Debug)]
pub struct AdaptivePoll {
    max_ns: u64,
    /// 0: there is no poll.
    now_ns: u64,
}

impl AdaptivePoll {
    /// Creates a budget of at most `max_ns` nanoseconds; 0 disables polling.
    pub fn new(max_ns: u64) -> AdaptivePoll {
        AdaptivePoll { max_ns, now_ns: max_ns }
    }

    /// Whether there may be a poll.
    #[inline]
    pub fn is_enabled(&self) -> bool {
        self.max_ns > 0
    }

    /// Returns the nanoseconds to poll this time; 0: not at all.
    #[inline]
    pub fn budget(&self) -> u64 {
        self.now_ns
    }

    /// Adapts the budget to the time for which an event was waited for.
    #[inline]
    pub fn learn(&mut self, waited_ns: u64) {
        if waited_ns > self.max_ns {
            self.now_ns = if self.now_ns / 2 < MIN_NS { 0 } else { self.now_ns / 2 };
        } else if waited_ns > self.now_ns {
            self.now_ns = (self.now_ns * 2).max(MIN_NS).min(self.max_ns);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spinning_gives_up_when_nothing_comes_and_returns_when_something_does() {
        let mut spin = AdaptivePoll::new(100_000);
        assert_eq!(spin.budget(), 100_000);
        (0..20).for_each(|_| spin.learn(1_000_000));
        assert_eq!(spin.budget(), 0);
        // Events come after a time that a short poll does not cover.
        (0..20).for_each(|_| spin.learn(40_000));
        assert!((40_000..=100_000).contains(&spin.budget()), "{}", spin.budget());
        let budget = spin.budget();
        spin.learn(1_000);
        assert_eq!(spin.budget(), budget);
        let mut off = AdaptivePoll::new(0);
        off.learn(1);
        assert_eq!(off.budget(), 0);
        assert!(!off.is_enabled());
    }
}
