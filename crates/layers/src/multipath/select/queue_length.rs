//! `queue-length`: chooses the path with the fewest requests in flight; of equal ones, the least recently
//! chosen.
//!
//! The choice is the minimum of one key for each path:
//!
//! ```text
//! 63: not usable   62…46: requests in flight   45…8: stamp of the last choice   7…0: the path
//! ```
//!
//! *Invariant:* each stamp belongs to one path, and stamps increase: the path with the least key is the first
//! in the kernel's list of equal ones.

use super::{PATHS_MAX, Report, renumber};

const UNUSABLE: u64 = 1 << 63;
const REQUEST: u64 = 1 << 46;
const STAMP: u64 = 1 << 8;
const STAMPS: u64 = REQUEST - STAMP;
/// The stamp from which on stamps are renumbered between two iterations of the queue. One iteration takes far
/// fewer stamps than remain.
const STAMPS_FULL: u64 = STAMPS / 2;
/// Keys compared in one step. Keys without a path are not usable.
const STEP: usize = 4;

/// The paths of a group.
#[derive(Debug)]
pub(in crate::multipath) struct QueueLength {
    /// The key of each path.
    keys: Box<[u64; PATHS_MAX]>,
    /// Number of steps beyond the first that are needed to compare all paths.
    more_steps: u8,
    count: u8,
    /// Increment of the chosen key: one request, and the next stamp.
    next: u64,
}

#[inline]
fn least(keys: [u64; STEP]) -> u64 {
    let [a, b, c, d] = keys;
    a.min(b).min(c.min(d))
}

impl QueueLength {
    /// Creates a selector of `count` paths, none of them usable.
    pub(super) fn new(count: u8) -> QueueLength {
        let keys = std::array::from_fn(|path| UNUSABLE | path as u64);
        let more_steps = count.saturating_sub(1) / STEP as u8;
        QueueLength { keys: Box::new(keys), more_steps, count, next: REQUEST }
    }

    pub(super) fn set_usable(&mut self, is_usable: impl Fn(u8) -> bool) {
        for path in 0..self.count {
            let key = &mut self.keys[usize::from(path)];
            if !is_usable(path) {
                *key |= UNUSABLE;
            } else if *key & UNUSABLE != 0 {
                *key = (*key & !UNUSABLE & !STAMPS) + (self.next - REQUEST);
                self.next += STAMP;
            }
        }
    }

    pub(super) fn has_usable(&self) -> bool {
        self.keys.iter().any(|key| key & UNUSABLE == 0)
    }

    /// Chooses the path for the next request if one step compares all paths, and counts the request as in
    /// flight there. Called only while a path is usable.
    #[inline(always)]
    pub(super) fn take_small(&mut self) -> Option<u8> {
        if self.more_steps > 0 {
            return None;
        }
        let (steps, _) = self.keys.as_chunks::<STEP>();
        Some(self.put(least(steps[0])))
    }

    /// Chooses as [`take_small`](QueueLength::take_small) does, among any number of paths.
    pub(super) fn take_of_many(&mut self) -> u8 {
        let (steps, _) = self.keys.as_chunks::<STEP>();
        let steps = steps.iter().take(1 + usize::from(self.more_steps));
        self.put(steps.fold(u64::MAX, |best, step| best.min(least(*step))))
    }

    #[inline(always)]
    fn put(&mut self, best: u64) -> u8 {
        let path = best as u8;
        self.keys[usize::from(path)] = (best & !STAMPS) + self.next;
        self.next += STAMP;
        path
    }

    #[inline]
    pub(in crate::multipath) fn end(&mut self, path: u8) {
        self.keys[usize::from(path)] -= REQUEST;
    }

    #[inline]
    pub(super) fn report(&self, path: u8) -> Report {
        let requests = (self.keys[usize::from(path)] & !UNUSABLE) / REQUEST;
        Report { requests, ..Report::default() }
    }

    /// Renumbers stamps if needed; called between two iterations of the queue.
    #[inline]
    pub(super) fn renumber_stamps(&mut self) {
        if self.next & STAMPS >= STAMPS_FULL {
            self.next = REQUEST + renumber(self.keys[..usize::from(self.count)].iter_mut(), STAMP, STAMPS);
        }
    }

    /// Advances the stamp to where renumbering starts.
    #[cfg(test)]
    pub(super) fn exhaust_stamps(&mut self) {
        self.next = REQUEST + (STAMPS_FULL & STAMPS);
    }
}
