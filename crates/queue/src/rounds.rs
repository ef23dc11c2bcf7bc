//! Things that are done one at a time for all queues of a device, such as syncs: whoever asks is served by a
//! round that begins after it asked, whoever began that.

use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

/// Rounds of one kind. The number is even while none runs and grows by one at each beginning and each
/// success; what did not succeed takes it back.
#[derive(Default, Debug)]
pub struct Rounds(AtomicU64);

impl Rounds {
    /// What the number has to reach for a round that begins from now on to have ended.
    pub fn promise(&self) -> u64 {
        let now = self.0.load(SeqCst);
        now + if now.is_multiple_of(2) { 2 } else { 3 }
    }

    /// Whether it has.
    pub fn is_kept(&self, promise: u64) -> bool {
        self.0.load(SeqCst) >= promise
    }

    /// Whether one runs.
    pub fn is_under_way(&self) -> bool {
        !self.0.load(SeqCst).is_multiple_of(2)
    }

    /// Begin one, unless one runs.
    pub fn begin(&self) -> bool {
        let now = self.0.load(SeqCst);
        now.is_multiple_of(2) && self.0.compare_exchange(now, now + 1, SeqCst, SeqCst).is_ok()
    }

    /// The one that runs has succeeded.
    pub fn end(&self) {
        self.0.fetch_add(1, SeqCst);
    }

    /// The one that was begun has not: it keeps no promise. If it failed, that was told before.
    pub fn withdraw(&self) {
        self.0.fetch_sub(1, SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_asks_is_served_by_a_round_that_begins_later_and_by_no_other() {
        let rounds = Rounds::default();
        let first = rounds.promise();
        assert!(rounds.begin() && !rounds.begin(), "one at a time");
        let second = rounds.promise();
        rounds.end();
        assert!(rounds.is_kept(first) && !rounds.is_kept(second), "it had begun before the second came");
        assert!(rounds.begin() && rounds.is_under_way());
        rounds.withdraw();
        assert!(!rounds.is_kept(second) && rounds.begin(), "what was cancelled serves nobody");
        rounds.end();
        assert!(rounds.is_kept(second) && !rounds.is_under_way());
    }
}
