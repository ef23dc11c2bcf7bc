//! `service-time`: chooses the path that would complete a request first, by bytes in flight and relative
//! throughput; of equal ones, the least recently chosen.
//!
//! If all usable paths have the same throughput, that is the path with the least bytes in flight. Then the
//! choice is the minimum of one key of two halves for each path, as in `queue_length.rs`:
//!
//! ```text
//! bytes:  63: not usable   62…0: bytes in flight
//! rest:   63…25: stamp of the last choice   24…8: requests in flight   7…0: the path
//! ```
//!
//! *Invariant:* each stamp belongs to one path, and stamps increase.

use super::{PATHS_MAX, PathArgs, Report, renumber};
use std::cmp::Ordering;

/// Products of sizes and throughputs that could overflow are compared coarsely (`ST_MAX_INFLIGHT_SIZE`).
const BYTES_MAX: u64 = u64::MAX >> 7;

const UNUSABLE: u64 = 1 << 63;
const REQUEST: u64 = 1 << 8;
const STAMP: u64 = 1 << 25;
const STAMPS: u64 = !(STAMP - 1);
const REQUESTS: u64 = STAMP - REQUEST;
/// The stamp from which on stamps are renumbered between two iterations of the queue. One iteration takes far
/// fewer stamps than remain.
const STAMPS_FULL: u64 = STAMPS / 2;
/// Keys compared in one step. Keys without a path are not usable.
const STEP: usize = 4;

#[derive(Clone, Copy, Debug)]
struct Key {
    bytes: u64,
    rest: u64,
}

impl Key {
    /// Returns the whole key; with equal throughputs the least one is chosen.
    #[inline]
    fn whole(self) -> u128 {
        u128::from(self.bytes) << 64 | u128::from(self.rest)
    }

    fn is_usable(self) -> bool {
        self.bytes & UNUSABLE == 0
    }
}

/// The paths of a group.
#[derive(Debug)]
pub(in crate::multipath) struct ServiceTime {
    /// The key of each path.
    keys: Box<[Key; PATHS_MAX]>,
    /// Whether all usable paths have the same throughput.
    even: bool,
    /// Whether `even` is set and one step compares all paths.
    is_small: bool,
    /// Number of steps beyond the first that are needed to compare all paths.
    more_steps: u8,
    count: u8,
    /// Increment of the chosen key: one request, and the next stamp.
    next: u64,
    /// Relative throughput of each path, 0 to 100.
    throughputs: Box<[u32]>,
}

#[inline(always)]
fn least(keys: &[Key; STEP]) -> u128 {
    // Sequential minima: comparing in pairs takes more registers than are free.
    let [a, b, c, d] = keys;
    a.whole().min(b.whole()).min(c.whole()).min(d.whole())
}

/// Compares two paths, each by bytes in flight and throughput, for a request of `len` bytes; `Less`: `a`
/// completes it first. As the kernel's `st_compare_load`, it compares `(bytes in flight + len) / throughput`
/// without dividing.
fn compare(a: (u64, u32), b: (u64, u32), len: u64) -> Ordering {
    if a.1 == b.1 {
        return a.0.cmp(&b.0);
    }
    // The path with the higher throughput comes first.
    let by_throughput = b.1.cmp(&a.1);
    if a.0 == b.0 || a.1 == 0 || b.1 == 0 {
        return by_throughput;
    }
    let (mut own, mut others) = (a.0.saturating_add(len), b.0.saturating_add(len));
    if own >= BYTES_MAX || others >= BYTES_MAX {
        own >>= 7;
        others >>= 7;
    }
    let (own, others) = (own * u64::from(b.1), others * u64::from(a.1));
    own.cmp(&others).then(by_throughput)
}

impl ServiceTime {
    /// Creates a selector with no usable path.
    pub(super) fn new(paths: &[PathArgs]) -> ServiceTime {
        let throughput =
            |path: &PathArgs| if let PathArgs::Throughput(throughput) = path { *throughput } else { 1 };
        let count = paths.len() as u8;
        let keys = std::array::from_fn(|path| Key { bytes: UNUSABLE, rest: path as u64 });
        ServiceTime {
            keys: Box::new(keys),
            even: true,
            is_small: false,
            more_steps: count.saturating_sub(1) / STEP as u8,
            count,
            next: REQUEST,
            throughputs: paths.iter().map(throughput).collect(),
        }
    }

    pub(super) fn set_usable(&mut self, is_usable: impl Fn(u8) -> bool) {
        for path in 0..self.count {
            let key = &mut self.keys[usize::from(path)];
            if !is_usable(path) {
                key.bytes |= UNUSABLE;
            } else if !key.is_usable() {
                key.bytes &= !UNUSABLE;
                key.rest = (key.rest & !STAMPS) + (self.next - REQUEST);
                self.next += STAMP;
            }
        }
        let mut usable = self.keys.iter().zip(&self.throughputs).filter(|(key, _)| key.is_usable());
        let first = usable.next();
        self.even = first.is_none_or(|(_, first)| usable.all(|(_, throughput)| throughput == first));
        self.is_small = self.even && self.more_steps == 0;
    }

    pub(super) fn has_usable(&self) -> bool {
        self.keys.iter().any(|key| key.is_usable())
    }

    /// Chooses the path for the next request, which has `len` bytes, if one step compares all paths and they
    /// have equal throughput; counts the request as in flight there. Called only while a path is usable.
    #[inline(always)]
    pub(super) fn take_small(&mut self, len: u64) -> Option<u8> {
        if !self.is_small {
            return None;
        }
        let (steps, _) = self.keys.as_chunks::<STEP>();
        Some(self.put(least(&steps[0]), len))
    }

    /// Chooses as [`take_small`](ServiceTime::take_small) does, among any number of paths of any throughput.
    pub(super) fn take_in_general(&mut self, len: u64) -> u8 {
        if !self.even {
            return self.put(self.fastest(len), len);
        }
        let (steps, _) = self.keys.as_chunks::<STEP>();
        let steps = steps.iter().take(1 + usize::from(self.more_steps));
        self.put(steps.fold(u128::MAX, |best, step| best.min(least(step))), len)
    }

    #[inline(always)]
    fn put(&mut self, best: u128, len: u64) -> u8 {
        let path = best as u8;
        let bytes = ((best >> 64) as u64).wrapping_add(len);
        let rest = (best as u64 & !STAMPS).wrapping_add(self.next);
        self.keys[usize::from(path)] = Key { bytes, rest };
        self.next += STAMP;
        path
    }

    #[inline(never)]
    fn fastest(&self, len: u64) -> u128 {
        let usable = self.keys.iter().zip(&self.throughputs).filter(|(key, _)| key.is_usable());
        let order = |a: &(&Key, &u32), b: &(&Key, &u32)| {
            compare((a.0.bytes, *a.1), (b.0.bytes, *b.1), len).then(a.0.rest.cmp(&b.0.rest))
        };
        // At least one path is usable.
        usable.min_by(order).map_or(0, |(key, _)| key.whole())
    }

    #[inline]
    pub(in crate::multipath) fn end(&mut self, path: u8, len: u64) {
        let key = &mut self.keys[usize::from(path)];
        key.bytes = key.bytes.wrapping_sub(len);
        key.rest -= REQUEST;
    }

    #[inline]
    pub(super) fn report(&self, path: u8) -> Report {
        let Key { bytes, rest } = self.keys[usize::from(path)];
        Report { requests: (rest & REQUESTS) / REQUEST, bytes: bytes & !UNUSABLE, ..Report::default() }
    }

    /// Renumbers stamps if needed; called between two iterations of the queue.
    #[inline]
    pub(super) fn renumber_stamps(&mut self) {
        if self.next & STAMPS >= STAMPS_FULL {
            let keys = self.keys[..usize::from(self.count)].iter_mut();
            self.next = REQUEST + renumber(keys.map(|key| &mut key.rest), STAMP, STAMPS);
        }
    }

    /// Advances the stamp to where renumbering starts.
    #[cfg(test)]
    pub(super) fn exhaust_stamps(&mut self) {
        self.next = REQUEST + (STAMPS_FULL & STAMPS);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_throughputs_compare_by_bytes_in_flight() {
        assert_eq!(compare((100, 5), (200, 5), 1 << 20), Ordering::Less);
        assert_eq!(compare((0, 0), (0, 0), 0), Ordering::Equal);
    }

    #[test]
    fn equal_bytes_or_no_throughput_compare_by_throughput() {
        assert_eq!(compare((100, 5), (100, 6), 4096), Ordering::Greater);
        assert_eq!(compare((0, 0), (1 << 40, 1), 4096), Ordering::Greater);
    }

    #[test]
    fn estimated_time_decides_and_throughput_breaks_ties() {
        // (4096 + 4096) / 1 against (12288 + 4096) / 3
        assert_eq!(compare((4096, 1), (12288, 3), 4096), Ordering::Greater);
        // (0 + 10) / 1 against (20 + 10) / 3: a tie
        assert_eq!(compare((0, 1), (20, 3), 10), Ordering::Greater);
        assert_eq!(compare((u64::MAX / 2, 100), (u64::MAX / 4, 1), 4096), Ordering::Less);
    }
}
