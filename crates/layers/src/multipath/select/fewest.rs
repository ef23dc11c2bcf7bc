//! `queue-length`: the path with the fewest requests in flight, of such the one that was chosen longest ago.
//!
//! All that this goes by is one number for each path, so that the path to take is the one whose number is least:
//!
//! ```text
//! 63: not usable   62…46: requests in flight   45…8: when it was chosen, in turns   7…0: the path
//! ```
//!
//! *Invariant:* a turn is given to one path alone, and later ones are greater: whoever has the least number is first in
//! the kernel's list of those that it would look at.

use super::{PATHS_MAX, Report, count_turns_anew};

const UNUSABLE: u64 = 1 << 63;
const REQUEST: u64 = 1 << 46;
const TURN: u64 = 1 << 8;
const TURNS: u64 = REQUEST - TURN;
/// From here on turns are counted from the beginning again, in good time: one turn of a queue takes far fewer.
const TURNS_FULL: u64 = TURNS / 2;
/// So many are compared at once. Lanes without a path are not usable.
const STEP: usize = 4;

/// All paths of a group.
#[derive(Debug)]
pub(in crate::multipath) struct Fewest {
    /// By path.
    lanes: Box<[u64; PATHS_MAX]>,
    /// Steps that hold the lanes of all paths, beyond the first.
    more_steps: u8,
    count: u8,
    /// What is added to the lane that is chosen next: a request, and the next turn.
    next: u64,
}

#[inline]
fn least(lanes: [u64; STEP]) -> u64 {
    let [a, b, c, d] = lanes;
    a.min(b).min(c.min(d))
}

impl Fewest {
    /// With so many paths, none of them usable.
    pub(super) fn new(count: u8) -> Fewest {
        let lanes = std::array::from_fn(|path| UNUSABLE | path as u64);
        let more_steps = count.saturating_sub(1) / STEP as u8;
        Fewest { lanes: Box::new(lanes), more_steps, count, next: REQUEST }
    }

    pub(super) fn set_usable(&mut self, is_usable: impl Fn(u8) -> bool) {
        for path in 0..self.count {
            let lane = &mut self.lanes[usize::from(path)];
            if !is_usable(path) {
                *lane |= UNUSABLE;
            } else if *lane & UNUSABLE != 0 {
                *lane = (*lane & !UNUSABLE & !TURNS) + (self.next - REQUEST);
                self.next += TURN;
            }
        }
    }

    pub(super) fn has_usable(&self) -> bool {
        self.lanes.iter().any(|lane| lane & UNUSABLE == 0)
    }

    /// Chooses the path for the next request if one step compares all paths, and counts the request as in
    /// flight there. Called only while a path is usable.
    #[inline(always)]
    pub(super) fn take_small(&mut self) -> Option<u8> {
        if self.more_steps > 0 {
            return None;
        }
        let (steps, _) = self.lanes.as_chunks::<STEP>();
        Some(self.put(least(steps[0])))
    }

    /// [`take_small`](Fewest::take_small) for any number of paths.
    pub(super) fn take_of_many(&mut self) -> u8 {
        let (steps, _) = self.lanes.as_chunks::<STEP>();
        let steps = steps.iter().take(1 + usize::from(self.more_steps));
        self.put(steps.fold(u64::MAX, |best, step| best.min(least(*step))))
    }

    #[inline(always)]
    fn put(&mut self, best: u64) -> u8 {
        let path = best as u8;
        self.lanes[usize::from(path)] = (best & !TURNS) + self.next;
        self.next += TURN;
        path
    }

    #[inline]
    pub(in crate::multipath) fn end(&mut self, path: u8) {
        self.lanes[usize::from(path)] -= REQUEST;
    }

    #[inline]
    pub(super) fn report(&self, path: u8) -> Report {
        let requests = (self.lanes[usize::from(path)] & !UNUSABLE) / REQUEST;
        Report { requests, ..Report::default() }
    }

    /// Between two turns of the queue: there are enough turns for the one that comes.
    #[inline]
    pub(super) fn look_after_turns(&mut self) {
        if self.next & TURNS >= TURNS_FULL {
            self.next =
                REQUEST + count_turns_anew(self.lanes[..usize::from(self.count)].iter_mut(), TURN, TURNS);
        }
    }

    /// As if so many turns had been taken.
    #[cfg(test)]
    pub(super) fn use_up_turns(&mut self) {
        self.next = REQUEST + (TURNS_FULL & TURNS);
    }
}
