//! Range locks on clusters.
//!
//! Requests that only read, or write in place, share a range; requests that change the state of a cluster
//! hold it exclusively. Locks are granted in order of arrival, so no request starves. A thread holds only
//! one range at a time, so there is no deadlock.

use std::ops::Range;
use std::sync::{Condvar, Mutex, PoisonError};

#[derive(Debug)]
struct Claim {
    number: u64,
    clusters: Range<u64>,
    exclusive: bool,
}

#[derive(Debug, Default)]
struct State {
    next: u64,
    /// Holders and waiters, in order of arrival.
    claims: Vec<Claim>,
    waiting: usize,
}

/// The range locks of a disk.
#[derive(Debug, Default)]
pub(crate) struct Ranges {
    state: Mutex<State>,
    released: Condvar,
}

/// A range lock that is held until this is dropped.
#[derive(Debug)]
pub(crate) struct Held<'a> {
    ranges: &'a Ranges,
    number: u64,
}

impl State {
    /// Returns whether no earlier claim conflicts with this one.
    fn may_go(&self, number: u64) -> bool {
        let Some(place) = self.claims.iter().position(|claim| claim.number == number) else { return true };
        let claim = &self.claims[place];
        self.claims[..place].iter().all(|earlier| {
            let apart =
                earlier.clusters.end <= claim.clusters.start || claim.clusters.end <= earlier.clusters.start;
            apart || !(earlier.exclusive || claim.exclusive)
        })
    }
}

impl Ranges {
    /// Waits for a range of clusters, and locks it.
    pub(crate) fn hold(&self, clusters: Range<u64>, exclusive: bool) -> Held<'_> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let number = state.next;
        state.next += 1;
        state.claims.push(Claim { number, clusters, exclusive });
        while !state.may_go(number) {
            state.waiting += 1;
            state = self.released.wait(state).unwrap_or_else(PoisonError::into_inner);
            state.waiting -= 1;
        }
        Held { ranges: self, number }
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        let mut state = self.ranges.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.claims.retain(|claim| claim.number != self.number);
        let waiting = state.waiting > 0;
        drop(state);
        if waiting {
            self.ranges.released.notify_all();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
    use std::time::Duration;

    #[test]
    fn exclusive_claims_wait_for_shared_ones_and_block_later_ones() {
        let (ranges, wrote) = (Ranges::default(), AtomicBool::new(false));
        std::thread::scope(|scope| {
            let reading = ranges.hold(0..4, false);
            drop(ranges.hold(2..3, false));
            drop(ranges.hold(4..9, true));
            scope.spawn(|| {
                let _held = ranges.hold(3..5, true);
                wrote.store(true, SeqCst);
            });
            while ranges.state.lock().unwrap().claims.len() < 2 {
                std::thread::yield_now();
            }
            scope.spawn(|| {
                drop(ranges.hold(0..4, false));
                assert!(wrote.load(SeqCst), "it arrived later");
            });
            std::thread::sleep(Duration::from_millis(20));
            assert!(!wrote.load(SeqCst));
            drop(reading);
        });
        assert!(ranges.state.lock().unwrap().claims.is_empty());
    }
}
