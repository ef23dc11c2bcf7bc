//! Replacing the stack of a frozen queue. The new stack is prepared beside the current one, then the queue
//! switches to it. Preparing may fail without any effect; the switch cannot fail.

use super::{Built, Modes, Prepared, Queue, Slot, Stack, StackError};
use crate::Ring;
use block::{Segment, Tag};

impl<R: Ring> Queue<R> {
    /// Replaces the stack and returns the old one. Requests that are held back keep their tags and data, and
    /// will enter the new stack. Counters of the queue continue.
    ///
    /// # Errors
    /// [`StackError`] if the stack does not fit: nothing has changed.
    ///
    /// # Panics
    /// If the queue is not frozen and drained: a node would lose requests that it holds.
    pub fn replace(&mut self, stack: Stack<R>) -> Result<Stack<R>, StackError> {
        self.replace_like(stack, |_| false)
    }

    /// Replaces the stack as [`replace`](Queue::replace) does. Counters of the nodes for which `is_as_before`
    /// returns true, by number, continue.
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

    /// Builds a stack for this queue beside the current one, which continues.
    ///
    /// # Errors
    /// [`StackError`] if the stack does not fit.
    pub fn prepare(&self, stack: Stack<R>) -> Result<Prepared<R>, StackError> {
        Built::new(stack, self.depth, self.segments_per_tag).map(Prepared)
    }

    /// Switches to a stack that was prepared for this queue, as [`replace_like`](Queue::replace_like) does.
    /// Returns the old stack.
    ///
    /// # Panics
    /// As [`replace`](Queue::replace).
    pub fn switch_to(&mut self, prepared: Prepared<R>, is_as_before: impl Fn(usize) -> bool) -> Stack<R> {
        assert!(
            self.modes.contains(Modes::FROZEN) && self.is_drained(),
            "a stack is replaced only while nothing moves in it"
        );
        let Built { nodes, spare, own_segments, segments: entries, tags } = prepared.0;
        let children = |spare: &[Vec<Tag>]| spare.iter().map(|tags| tags.len() as u16).collect::<Vec<_>>();
        let counts = children(&std::mem::replace(&mut self.common.spare, spare));
        let nodes = std::mem::replace(&mut self.nodes, nodes);
        self.common.own_segments = own_segments;
        if entries != self.common.segments.len() {
            // The entries of the front-end's tags come first and keep their positions.
            let mut segments = std::mem::take(&mut self.common.segments).into_vec();
            segments.resize(entries, Segment::EMPTY);
            self.common.segments = segments.into();
        }
        for (number, counts) in self.stats.nodes().iter().enumerate() {
            match (nodes.get(number), self.nodes.get_mut(number)) {
                (Some(old), Some(new)) if is_as_before(number) => new.count_on_from(old),
                // Another node had this number.
                _ => counts.store((0, 0, 0)),
            }
        }
        let old = nodes.into_nodes().zip(counts).map(|(entry, count)| (entry.node, count, entry.leaf));
        let old = Stack { nodes: old.collect() };
        if tags != self.slots.len() {
            // Slots of the front-end keep their positions; those of children are all free.
            let mut slots = std::mem::take(&mut self.slots).into_vec();
            slots.resize(tags, Slot::FREE);
            self.slots = slots.into();
            self.common.spawned.reserve(tags);
            self.parked.reserve(tags);
            self.ended.reserve(tags);
        }
        let limit_ns = self.slow.as_ref().map(|slow| slow.limit_ns());
        self.slow = None;
        self.set_slow_limit(limit_ns);
        old
    }
}
