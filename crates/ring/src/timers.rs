//! Timers: a binary heap in front of the kernel, so a timer costs no system call. Owned by a ring, on its
//! thread. A cancelled timer leaves the heap when it comes to the top, or when such are the greater part.
//!
//! *Invariant:* a timer ends once: by `due` or by `cancel`.

use queue::{IoId, Nanos};
use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// The timers of one ring.
#[derive(Default)]
pub(crate) struct Timers {
    /// Time, order of setting, slot.
    heap: BinaryHeap<Reverse<(Nanos, u64, u32)>>,
    /// Empty for a timer that was cancelled and is still in the heap.
    slots: Vec<Option<IoId>>,
    free: Vec<u32>,
    set: u64,
    cancelled: usize,
}

impl Timers {
    /// Set one. Equal times come due in the order they were set.
    pub(crate) fn set(&mut self, id: IoId, at: Nanos) {
        let slot = self.free.pop().unwrap_or_else(|| {
            self.slots.push(None);
            self.slots.len() as u32 - 1
        });
        self.slots[slot as usize] = Some(id);
        self.set += 1;
        self.heap.push(Reverse((at, self.set, slot)));
    }

    /// Take it back; whether there was one. Looks at all of them: cancelling is rare.
    pub(crate) fn cancel(&mut self, id: IoId) -> bool {
        let Some(slot) = self.slots.iter_mut().find(|slot| **slot == Some(id)) else { return false };
        *slot = None;
        self.cancelled += 1;
        if self.cancelled > 64 && self.cancelled * 2 > self.heap.len() {
            let (slots, free) = (&self.slots, &mut self.free);
            self.heap.retain(|Reverse((_, _, slot))| {
                let keep = slots[*slot as usize].is_some();
                if !keep {
                    free.push(*slot);
                }
                keep
            });
            self.cancelled = 0;
        }
        true
    }

    /// When the next one is due.
    #[inline]
    pub(crate) fn next(&mut self) -> Option<Nanos> {
        while let Some(&Reverse((at, _, slot))) = self.heap.peek() {
            if self.slots[slot as usize].is_some() {
                return Some(at);
            }
            self.pop();
        }
        None
    }

    /// One that is due at `now`, earliest first.
    #[inline]
    pub(crate) fn due(&mut self, now: Nanos) -> Option<IoId> {
        if self.next()? > now {
            return None;
        }
        self.pop()
    }

    fn pop(&mut self) -> Option<IoId> {
        let Reverse((_, _, slot)) = self.heap.pop()?;
        self.free.push(slot);
        let id = self.slots[slot as usize].take();
        self.cancelled -= usize::from(id.is_none());
        id
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use block::{Cookie, Tag};
    use queue::QueueId;

    fn id(generation: u32) -> IoId {
        IoId { queue: QueueId(0), cookie: Cookie { tag: Tag(1), generation } }
    }

    #[test]
    fn they_come_due_by_time_and_then_in_the_order_they_were_set() {
        let mut timers = Timers::default();
        for (generation, at) in [(1, 30), (2, 10), (3, 20), (4, 10)] {
            timers.set(id(generation), Nanos(at));
        }
        assert_eq!(timers.next(), Some(Nanos(10)));
        assert_eq!(timers.due(Nanos(9)), None);
        let due: Vec<_> = std::iter::from_fn(|| timers.due(Nanos(25))).collect();
        assert_eq!(due, [id(2), id(4), id(3)]);
        assert_eq!(timers.next(), Some(Nanos(30)));
    }

    #[test]
    fn a_cancelled_timer_is_found_once_and_never_due() {
        let mut timers = Timers::default();
        timers.set(id(1), Nanos(5));
        timers.set(id(2), Nanos(6));
        assert!(timers.cancel(id(1)));
        assert!(!timers.cancel(id(1)));
        assert_eq!(timers.next(), Some(Nanos(6)));
        assert_eq!(timers.due(Nanos(100)), Some(id(2)));
        assert_eq!(timers.due(Nanos(100)), None);
    }

    #[test]
    fn cancelled_timers_do_not_pile_up() {
        let mut timers = Timers::default();
        timers.set(id(0), Nanos(1));
        for round in 1..10_000 {
            timers.set(id(round), Nanos(1 << 40));
            assert!(timers.cancel(id(round)));
        }
        assert!(timers.heap.len() < 200 && timers.slots.len() < 200);
        assert_eq!(timers.due(Nanos(u64::MAX)), Some(id(0)));
        assert_eq!(timers.due(Nanos(u64::MAX)), None);
    }
}
