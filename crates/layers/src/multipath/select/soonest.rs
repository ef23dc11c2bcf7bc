//! `service-time`: the path that would have a request done first, by bytes in flight and relative throughput; of such the
//! one that was chosen longest ago.
//!
//! Where all usable paths carry alike that is the one with the least bytes in flight. Then all that decides is one number
//! of two halves for each path, as in `fewest.rs`:
//!
//! ```text
//! bytes:  63: not usable   62…0: bytes in flight
//! rest:   63…25: when it was chosen, in turns   24…8: requests in flight   7…0: the path
//! ```
//!
//! *Invariant:* a turn is given to one path alone, and later ones are greater.

use super::{PATHS_MAX, PathArgs, Report, count_turns_anew};
use std::cmp::Ordering;

/// Products of sizes and throughputs that could overflow are compared coarsely (`ST_MAX_INFLIGHT_SIZE`).
const BYTES_MAX: u64 = u64::MAX >> 7;

const UNUSABLE: u64 = 1 << 63;
const REQUEST: u64 = 1 << 8;
const TURN: u64 = 1 << 25;
const TURNS: u64 = !(TURN - 1);
const REQUESTS: u64 = TURN - REQUEST;
/// From here on turns are counted from the beginning again, in good time: one turn of a queue takes far fewer.
const TURNS_FULL: u64 = TURNS / 2;
/// So many are compared at once. Lanes without a path are not usable.
const STEP: usize = 4;

#[derive(Clone, Copy, Debug)]
struct Lane {
    bytes: u64,
    rest: u64,
}

impl Lane {
    /// The one with the least is chosen, where all carry alike.
    #[inline]
    fn whole(self) -> u128 {
        u128::from(self.bytes) << 64 | u128::from(self.rest)
    }

    fn is_usable(self) -> bool {
        self.bytes & UNUSABLE == 0
    }
}

/// All paths of a group.
#[derive(Debug)]
pub(in crate::multipath) struct Soonest {
    /// By path.
    lanes: Box<[Lane; PATHS_MAX]>,
    /// All usable paths carry alike.
    even: bool,
    /// All usable paths carry alike, and one step compares all paths.
    is_small: bool,
    /// Steps that hold the lanes of all paths, beyond the first.
    more_steps: u8,
    count: u8,
    /// What is added to the lane that is chosen next: a request, and the next turn.
    next: u64,
    /// What each carries, 0 to 100.
    throughputs: Box<[u32]>,
}

#[inline(always)]
fn least(lanes: &[Lane; STEP]) -> u128 {
    // One after the other: two at once would take more registers than there are to spare.
    let [a, b, c, d] = lanes;
    a.whole().min(b.whole()).min(c.whole()).min(d.whole())
}

/// Which of two paths, by what is in flight and throughput, would have a request of `len` bytes done first; `Less`: `a`. The
/// kernel's `st_compare_load`: `(bytes in flight + len) / throughput`, without dividing.
fn compare(a: (u64, u32), b: (u64, u32), len: u64) -> Ordering {
    if a.1 == b.1 {
        return a.0.cmp(&b.0);
    }
    // The faster one first, for nothing else tells them apart.
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

impl Soonest {
    /// None of the paths is usable yet.
    pub(super) fn new(paths: &[PathArgs]) -> Soonest {
        let throughput =
            |path: &PathArgs| if let PathArgs::Throughput(throughput) = path { *throughput } else { 1 };
        let count = paths.len() as u8;
        let lanes = std::array::from_fn(|path| Lane { bytes: UNUSABLE, rest: path as u64 });
        Soonest {
            lanes: Box::new(lanes),
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
            let lane = &mut self.lanes[usize::from(path)];
            if !is_usable(path) {
                lane.bytes |= UNUSABLE;
            } else if !lane.is_usable() {
                lane.bytes &= !UNUSABLE;
                lane.rest = (lane.rest & !TURNS) + (self.next - REQUEST);
                self.next += TURN;
            }
        }
        let mut usable = self.lanes.iter().zip(&self.throughputs).filter(|(lane, _)| lane.is_usable());
        let first = usable.next();
        self.even = first.is_none_or(|(_, first)| usable.all(|(_, throughput)| throughput == first));
        self.is_small = self.even && self.more_steps == 0;
    }

    pub(super) fn has_usable(&self) -> bool {
        self.lanes.iter().any(|lane| lane.is_usable())
    }

    /// Chooses the path for the next request, which has `len` bytes, if one step compares all paths and they
    /// carry alike; counts the request as in flight there. Called only while a path is usable.
    #[inline(always)]
    pub(super) fn take_small(&mut self, len: u64) -> Option<u8> {
        if !self.is_small {
            return None;
        }
        let (steps, _) = self.lanes.as_chunks::<STEP>();
        Some(self.put(least(&steps[0]), len))
    }

    /// [`take_small`](Soonest::take_small) for any number of paths and any throughput.
    pub(super) fn take_in_general(&mut self, len: u64) -> u8 {
        if !self.even {
            return self.put(self.soonest(len), len);
        }
        let (steps, _) = self.lanes.as_chunks::<STEP>();
        let steps = steps.iter().take(1 + usize::from(self.more_steps));
        self.put(steps.fold(u128::MAX, |best, step| best.min(least(step))), len)
    }

    #[inline(always)]
    fn put(&mut self, best: u128, len: u64) -> u8 {
        let path = best as u8;
        let bytes = ((best >> 64) as u64).wrapping_add(len);
        let rest = (best as u64 & !TURNS).wrapping_add(self.next);
        self.lanes[usize::from(path)] = Lane { bytes, rest };
        self.next += TURN;
        path
    }

    #[inline(never)]
    fn soonest(&self, len: u64) -> u128 {
        let usable = self.lanes.iter().zip(&self.throughputs).filter(|(lane, _)| lane.is_usable());
        let order = |a: &(&Lane, &u32), b: &(&Lane, &u32)| {
            compare((a.0.bytes, *a.1), (b.0.bytes, *b.1), len).then(a.0.rest.cmp(&b.0.rest))
        };
        // There is one.
        usable.min_by(order).map_or(0, |(lane, _)| lane.whole())
    }

    #[inline]
    pub(in crate::multipath) fn end(&mut self, path: u8, len: u64) {
        let lane = &mut self.lanes[usize::from(path)];
        lane.bytes = lane.bytes.wrapping_sub(len);
        lane.rest -= REQUEST;
    }

    #[inline]
    pub(super) fn report(&self, path: u8) -> Report {
        let Lane { bytes, rest } = self.lanes[usize::from(path)];
        Report { requests: (rest & REQUESTS) / REQUEST, bytes: bytes & !UNUSABLE, ..Report::default() }
    }

    /// Between two turns of the queue: there are enough turns for the one that comes.
    #[inline]
    pub(super) fn look_after_turns(&mut self) {
        if self.next & TURNS >= TURNS_FULL {
            let lanes = self.lanes[..usize::from(self.count)].iter_mut();
            self.next = REQUEST + count_turns_anew(lanes.map(|lane| &mut lane.rest), TURN, TURNS);
        }
    }

    /// As if so many turns had been taken.
    #[cfg(test)]
    pub(super) fn use_up_turns(&mut self) {
        self.next = REQUEST + (TURNS_FULL & TURNS);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_throughputs_compare_by_what_is_in_flight() {
        assert_eq!(compare((100, 5), (200, 5), 1 << 20), Ordering::Less);
        assert_eq!(compare((0, 0), (0, 0), 0), Ordering::Equal);
    }

    #[test]
    fn equal_bytes_or_no_throughput_compare_by_throughput() {
        assert_eq!(compare((100, 5), (100, 6), 4096), Ordering::Greater);
        assert_eq!(compare((0, 0), (1 << 40, 1), 4096), Ordering::Greater);
    }

    #[test]
    fn what_a_path_would_take_decides_and_throughput_breaks_ties() {
        // (4096 + 4096) / 1 against (12288 + 4096) / 3
        assert_eq!(compare((4096, 1), (12288, 3), 4096), Ordering::Greater);
        // (0 + 10) / 1 against (20 + 10) / 3: a tie
        assert_eq!(compare((0, 1), (20, 3), 10), Ordering::Greater);
        assert_eq!(compare((u64::MAX / 2, 100), (u64::MAX / 4, 1), 4096), Ordering::Less);
    }
}
