//! What comes to a queue from outside its requests: sockets and alarms of its nodes, batches, and the end of the stack.

use super::{Queue, State};
use crate::node::Resumed;
use crate::sockets::{NodeEvent, alarm_node};
use crate::{Cx, NodeId, Ring};
use block::{Cookie, Tag};

/// How often nodes are asked in one turn to start what they gathered, so that a node that always has more does not
/// keep others of its thread waiting.
const ROUNDS_MAX: u32 = 16;

impl<R: Ring> Queue<R> {
    /// What is not a request's end is a node's alarm.
    #[cold]
    pub(super) fn alarm(&mut self, cookie: Cookie, ring: &mut R) {
        let Some(node) = alarm_node(cookie) else { panic!("late or double end of {cookie:?}") };
        self.node_event(node, NodeEvent::Alarm, ring);
    }

    /// A node wants a whole request once more, as the front-end submitted it: with the others that are held back while
    /// the queue is frozen, else next turn.
    #[cold]
    pub(super) fn take_back(&mut self, tag: Tag) {
        let slot = &mut self.slots[tag.index()];
        slot.state = State::Parked;
        if self.frozen {
            self.waiting.push_back(tag);
        } else {
            // Where a parked request was offered, so that it is offered to the top again.
            slot.path[0] = NodeId::TOP;
            slot.depth = 1;
            self.parked.push_back(tag);
        }
    }

    /// Something has come for a node itself, as on a socket of its own.
    ///
    /// # Panics
    /// When it names a request that it does not hold.
    pub fn node_event(&mut self, node: NodeId, event: NodeEvent, ring: &mut R) {
        let mut cx = Cx { common: &mut self.common, node, ring };
        self.seats[node.index()].node.event(event, &mut cx);
        self.resume(ring);
    }

    /// End the held requests that nodes have named.
    pub(super) fn resume(&mut self, ring: &mut R) {
        while let Some(Resumed { io, result, part }) = self.common.resumed.pop_front() {
            self.slots[io.tag.index()].replaced |= part;
            self.complete(io, result, ring);
        }
    }

    /// Have the nodes let go of what they have at the ring, sockets and alarms. Whether nothing is left: ask again
    /// after each turn until then, and only then [`replace`](Queue::replace) the stack or drop the queue.
    ///
    /// # Panics
    /// When something is under way.
    pub fn close(&mut self, ring: &mut R) -> bool {
        assert!(self.is_drained(), "a stack is closed only while nothing moves in it");
        let mut closed = true;
        for (number, seat) in self.seats.iter_mut().enumerate() {
            let mut cx = Cx { common: &mut self.common, node: NodeId(number as u8), ring };
            closed &= seat.node.close(&mut cx);
        }
        closed
    }

    /// Requests ended while nodes started what they had gathered: what follows from that is gathered once more, and so
    /// on. What is left after some rounds waits for the next turn, see [`has_parked`](Queue::has_parked).
    #[cold]
    pub(super) fn resume_and_commit(&mut self, ring: &mut R) {
        for _ in 0..ROUNDS_MAX {
            self.resume(ring);
            self.commit(ring);
            if !self.common.spawned.is_empty() {
                self.start_children(ring);
            }
            if self.common.resumed.is_empty() {
                return;
            }
        }
    }

    pub(super) fn commit(&mut self, ring: &mut R) {
        for (number, seat) in self.seats.iter_mut().enumerate() {
            let mut cx = Cx { common: &mut self.common, node: NodeId(number as u8), ring };
            seat.node.commit(&mut cx);
        }
    }
}
