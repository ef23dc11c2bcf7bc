//! Replacing the stack of a frozen queue: the new one is prepared beside the one in use, then the queue switches to it.
//! Preparing may fail and changes nothing; the switch cannot fail.

use super::{Built, Prepared, Queue, Slot, Stack, StackError};
use crate::Ring;
use block::{Segment, Tag};

impl<R: Ring> Queue<R> {
    /// Put another stack in the place of the one there is, which comes back. Requests that were held back
    /// stay, under their tags and with their data, and will enter the new one; counters go on.
    ///
    /// # Errors
    /// [`StackError`] when the numbers do not fit: nothing has changed.
    ///
    /// # Panics
    /// When the queue is not frozen and drained: a node would lose what it holds.
    pub fn replace(&mut self, stack: Stack<R>) -> Result<Stack<R>, StackError> {
        self.replace_like(stack, |_| false)
    }

    /// The same; what the nodes counted of which it is said, by number, that they are as they were goes on being counted.
    ///
    /// # Errors
    /// As [`replace`](Queue::replace).
    ///
    /// # Panics
    /// As [`replace`](Queue::replace).
    pub fn replace_like(
        &mut self,
        stack: Stack<R>,
        is_as_before: impl Fn(usize) -> bool,
    ) -> Result<Stack<R>, StackError> {
        let prepared = self.prepare(stack)?;
        Ok(self.switch_to(prepared, is_as_before))
    }

    /// Builds what a stack needs to be this queue's, beside the one there is, which goes on.
    ///
    /// # Errors
    /// [`StackError`] when the numbers do not fit.
    pub fn prepare(&self, stack: Stack<R>) -> Result<Prepared<R>, StackError> {
        Built::new(stack, self.depth, self.segments_per_tag).map(Prepared)
    }

    /// Puts a stack that was prepared for this queue in the place of the one there is, as
    /// [`replace_like`](Queue::replace_like) does. Returns the stack there was.
    ///
    /// # Panics
    /// As [`replace`](Queue::replace).
    pub fn switch_to(&mut self, prepared: Prepared<R>, is_as_before: impl Fn(usize) -> bool) -> Stack<R> {
        assert!(self.frozen && self.is_drained(), "a stack is replaced only while nothing moves in it");
        let Built { seats, spare, rooms, segments: entries, tags } = prepared.0;
        let children = |spare: &[Vec<Tag>]| spare.iter().map(|tags| tags.len() as u16).collect::<Vec<_>>();
        let counts = children(&std::mem::replace(&mut self.common.spare, spare));
        let seats = std::mem::replace(&mut self.seats, seats);
        self.common.rooms = rooms;
        if entries != self.common.segments.len() {
            // Those of the front-end's tags come first, and keep their places.
            let mut segments = std::mem::take(&mut self.common.segments).into_vec();
            segments.resize(entries, Segment::EMPTY);
            self.common.segments = segments.into();
        }
        for (number, counts) in self.stats.nodes().iter().enumerate() {
            match (seats.get(number), self.seats.get_mut(number)) {
                (Some(old), Some(new)) if is_as_before(number) => new.count_on_from(old),
                // What was counted was of another node, though its number is the same.
                _ => counts.store((0, 0, 0)),
            }
        }
        let old = seats.into_nodes().zip(counts).map(|(seat, count)| (seat.node, count, seat.leaf));
        let old = Stack { nodes: old.collect() };
        if tags != self.slots.len() {
            // Those of the front-end keep their places; those of children are all free.
            let mut slots = std::mem::take(&mut self.slots).into_vec();
            slots.resize(tags, Slot::FREE);
            self.slots = slots.into();
            self.common.spawned.reserve(tags);
            self.parked.reserve(tags);
            self.ended.reserve(tags);
        }
        let limit_ns = self.slow.as_ref().map(|slow| slow.limit_ns());
        self.slow = None;
        self.look_for_slow(limit_ns);
        old
    }
}
