//! What is in flight on each path: `queue-length` and `service-time`.

use super::{PathArgs, Report};
use std::cmp::Ordering;

/// Products of sizes and throughputs that could overflow are compared coarsely (`ST_MAX_INFLIGHT_SIZE`).
const BYTES_MAX: u64 = u64::MAX >> 7;

/// One path.
#[derive(Clone, Copy, Debug)]
pub(super) struct Load {
    requests: u64,
    bytes: u64,
    throughput: u32,
}

pub(super) fn of(paths: &[PathArgs]) -> Box<[Load]> {
    let load = |path: &PathArgs| {
        let throughput = if let PathArgs::Throughput(throughput) = path { *throughput } else { 1 };
        Load { requests: 0, bytes: 0, throughput }
    };
    paths.iter().map(load).collect()
}

impl Load {
    #[inline]
    pub(super) fn start(&mut self, len: u64) {
        self.requests += 1;
        self.bytes += len;
    }

    #[inline]
    pub(super) fn end(&mut self, len: u64) {
        self.requests -= 1;
        self.bytes -= len;
    }

    pub(super) fn report(&self) -> Report {
        Report { requests: self.requests, bytes: self.bytes, ..Report::default() }
    }

    /// Which of two would have a request of `len` bytes done first; `Less`: this one. The kernel's `st_compare_load`:
    /// `(bytes in flight + len) / throughput`, without dividing.
    fn compare(&self, other: &Load, len: u64) -> Ordering {
        if self.throughput == other.throughput {
            return self.bytes.cmp(&other.bytes);
        }
        // The faster one first, for nothing else tells them apart.
        let by_throughput = other.throughput.cmp(&self.throughput);
        if self.bytes == other.bytes || self.throughput == 0 || other.throughput == 0 {
            return by_throughput;
        }
        let (mut own, mut others) = (self.bytes.saturating_add(len), other.bytes.saturating_add(len));
        if own >= BYTES_MAX || others >= BYTES_MAX {
            own >>= 7;
            others >>= 7;
        }
        let (own, others) = (own * u64::from(other.throughput), others * u64::from(self.throughput));
        own.cmp(&others).then(by_throughput)
    }
}

/// The place of the path with the fewest requests in flight; of equals the one chosen longest ago.
#[inline]
pub(super) fn shortest(loads: &[Load], usable: &[u16]) -> Option<usize> {
    let (mut best, mut fewest) = (None, u64::MAX);
    for (place, &path) in usable.iter().enumerate() {
        let requests = loads[usize::from(path)].requests;
        if requests < fewest {
            (best, fewest) = (Some(place), requests);
        }
        if requests == 0 {
            break;
        }
    }
    best
}

/// The place of the path that would be done first; of equals the one chosen longest ago.
#[inline]
pub(super) fn soonest(loads: &[Load], usable: &[u16], len: u64) -> Option<usize> {
    let (mut best, first) = (0, loads[usize::from(*usable.first()?)]);
    let mut best_load = first;
    for (place, &path) in usable.iter().enumerate().skip(1) {
        let load = loads[usize::from(path)];
        if load.compare(&best_load, len) == Ordering::Less {
            (best, best_load) = (place, load);
        }
    }
    Some(best)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn load(bytes: u64, throughput: u32) -> Load {
        Load { requests: 1, bytes, throughput }
    }

    #[test]
    fn equal_throughputs_compare_by_what_is_in_flight() {
        assert_eq!(load(100, 5).compare(&load(200, 5), 1 << 20), Ordering::Less);
        assert_eq!(load(0, 0).compare(&load(0, 0), 0), Ordering::Equal);
    }

    #[test]
    fn equal_bytes_or_no_throughput_compare_by_throughput() {
        assert_eq!(load(100, 5).compare(&load(100, 6), 4096), Ordering::Greater);
        assert_eq!(load(0, 0).compare(&load(1 << 40, 1), 4096), Ordering::Greater);
    }

    #[test]
    fn what_a_path_would_take_decides_and_throughput_breaks_ties() {
        // (4096 + 4096) / 1 against (12288 + 4096) / 3
        assert_eq!(load(4096, 1).compare(&load(12288, 3), 4096), Ordering::Greater);
        // (0 + 10) / 1 against (20 + 10) / 3: a tie
        assert_eq!(load(0, 1).compare(&load(20, 3), 10), Ordering::Greater);
        assert_eq!(load(u64::MAX / 2, 100).compare(&load(u64::MAX / 4, 1), 4096), Ordering::Less);
    }
}
