//! Timers in a binary heap, so a timer costs no system call of its own. Owned by a ring, on its thread. A
//! cancelled timer is removed from the heap when it reaches the top, or when cancelled ones are the majority.
//!
//! *Invariant:* a timer completes once: by `due` or by `cancel`.

use queue::{IoId, Nanos};
use slab::Slab;
use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// The timers of one ring.
#[derive(Default)]
pub(crate) struct Timers {
    /// Time, sequence number, slot.
    heap: BinaryHeap<Reverse<(Nanos, u64, u32)>>,
    /// Empty for a cancelled timer that is still in the heap.
    slots: Slab<Option<IoId>>,
    set: u64,
    cancelled: usize,
}

impl Timers {
    /// Sets a timer. Timers of equal times expire in the order in which they were set.
    pub(crate) fn set(&mut self, id: IoId, at: Nanos) {
        let slot = self.slots.insert(Some(id)) as u32;
        self.set += 1;
        self.heap.push(Reverse((at, self.set, slot)));
    }

    /// Cancels a timer by a linear search, as cancelling is rare. Returns whether it existed.
    pub(crate) fn cancel(&mut self, id: IoId) -> bool {
        let Some((_, slot)) = self.slots.iter_mut().find(|(_, slot)| **slot == Some(id)) else {
            return false;
        };
        *slot = None;
        self.cancelled += 1;
        if self.cancelled > 64 && self.cancelled * 2 > self.heap.len() {
            let slots = &mut self.slots;
            self.heap.retain(|Reverse((_, _, slot))| {
                let keep = slots[*slot as usize].is_some();
                if !keep {
                    slots.remove(*slot as usize);
                }
                keep
            });
            self.cancelled = 0;
        }
        true
    }

    /// When the next timer is due.
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

    /// Removes and returns the earliest timer that is due at `now`.
    #[inline]
    pub(crate) fn due(&mut self, now: Nanos) -> Option<IoId> {
        if self.next()? > now {
            return None;
        }
        self.pop()
    }

    fn pop(&mut self) -> Option<IoId> {
        let Reverse((_, _, slot)) = self.heap.pop()?;
        let id = self.slots.remove(slot as usize);
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
    fn timers_expire_by_time_then_in_the_order_they_were_set() {
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
        assert!(timers.heap.len() < 200 && timers.slots.capacity() < 200);
        assert_eq!(timers.due(Nanos(u64::MAX)), Some(id(0)));
        assert_eq!(timers.due(Nanos(u64::MAX)), None);
    }
}
