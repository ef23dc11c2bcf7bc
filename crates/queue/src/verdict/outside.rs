//! What comes to a queue from outside its requests: sockets and alarms of its nodes, batches, the end of the stack, and
//! questions about requests.

use super::{Queue, State};
use crate::node::Resumed;
use crate::slow::SlowNotes;
use crate::sockets::{NodeEvent, QUEUE_ALARM, alarm_node};
use crate::{Cx, Nanos, NodeId, Ring, Slow, Standing, UnderWay};
use block::{Cookie, Tag};

/// How often nodes are asked in one turn to start what they gathered, so that a node that always has more does not
/// keep others of its thread waiting.
const ROUNDS_MAX: u32 = 16;

impl<R: Ring> Queue<R> {
    /// What is not a request's end is a node's alarm.
    #[cold]
    pub(super) fn alarm(&mut self, cookie: Cookie, ring: &mut R) {
        let Some(node) = alarm_node(cookie) else { panic!("late or double end of {cookie:?}") };
        if node == QUEUE_ALARM {
            return self.timeouts_due(ring);
        }
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
            self.must_retry = true;
            self.parked.push_back(tag);
        }
    }

    /// Something has come for a node itself, as on a socket of its own.
    ///
    /// # Panics
    /// When it names a request that it does not hold.
    pub fn node_event(&mut self, node: NodeId, event: NodeEvent, ring: &mut R) {
        let mut cx = Cx { common: &mut self.common, node, ring };
        self.seats[node].node.event(event, &mut cx);
        self.resume(ring);
    }

    /// End the held requests that nodes have named.
    pub(super) fn resume(&mut self, ring: &mut R) {
        while let Some(Resumed { io, result, part }) = self.common.resumed.pop_front() {
            self.moved = true;
            self.slots[io.tag.index()].replaced |= part;
            self.complete(io, result, ring);
        }
    }

    /// Have the nodes let go of what they have at the ring, sockets and alarms, and the queue of its own. Whether nothing is left: ask again
    /// after each turn until then, and only then [`replace`](Queue::replace) the stack or drop the queue.
    ///
    /// # Panics
    /// When something is under way.
    pub fn close(&mut self, ring: &mut R) -> bool {
        assert!(self.is_drained(), "a stack is closed only while nothing moves in it");
        let mut closed = self.disarm_timeouts(ring);
        for (number, seat) in self.seats.iter_mut().enumerate() {
            let mut cx = Cx { common: &mut self.common, node: NodeId(number as u8), ring };
            closed &= seat.node.close(&mut cx);
        }
        closed
    }

    /// Requests ended, or children came to be, while nodes started what they had gathered: what follows from that is
    /// gathered once more by nodes that were asked already, and so on. What is left after some rounds waits for the next
    /// turn, see [`has_parked`](Queue::has_parked).
    #[cold]
    pub(super) fn resume_and_commit(&mut self, ring: &mut R) {
        self.moved = true;
        for _ in 0..ROUNDS_MAX {
            self.start_children(ring);
            self.resume(ring);
            self.commit(ring);
            if self.common.spawned.is_empty() && self.common.resumed.is_empty() {
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

    /// Whether [`turn`](Queue::turn) must be called again before the thread sleeps. While nothing but blocked requests are
    /// parked, it need not: see [`Verdict::Blocked`](crate::Verdict::Blocked).
    pub fn must_turn(&self) -> bool {
        self.must_retry || !self.common.resumed.is_empty() || !self.common.spawned.is_empty()
    }

    /// Whether turns since the last call did more than offer blocked requests in vain.
    pub(crate) fn take_moved(&mut self) -> bool {
        std::mem::take(&mut self.moved)
    }

    /// Look for requests that take so long or longer; `None`: for none.
    pub fn look_for_slow(&mut self, limit_ns: Option<u64>) {
        if self.slow.as_ref().map(|slow| slow.limit_ns()) != limit_ns {
            self.slow = limit_ns.map(|limit| Box::new(SlowNotes::new(limit, self.slots.len())));
        }
    }

    /// Whether it looks for slow requests.
    pub fn looks_for_slow(&self) -> bool {
        self.slow.is_some()
    }

    /// Look at those that ended this turn.
    pub(super) fn find_slow(&mut self, now: Nanos) {
        let Some(slow) = &mut self.slow else { return };
        for end in &self.done {
            let slot = &self.slots[end.tag.index()];
            let took = now.since(slot.start);
            if took >= slow.limit_ns() {
                slow.find(end.tag, &slot.req, slot.start, end.status, took);
            }
        }
    }

    /// Hand each request that was found to be slow since the last call to `each`. How many more there were than a
    /// turn has room for.
    pub fn take_slow(&mut self, each: impl FnMut(Slow)) -> u64 {
        let Some(slow) = &mut self.slow else { return 0 };
        let (found, missed) = slow.take();
        found.for_each(each);
        missed
    }

    /// Requests that are under way, in the order of their tags. Scans all slots, and allocates once.
    pub fn under_way(&self, now: Nanos) -> Vec<UnderWay> {
        let count = self.slots.iter().filter(|slot| slot.state != State::Free).count();
        let mut all: Vec<UnderWay> = Vec::with_capacity(count);
        for (index, slot) in self.slots.iter().enumerate().filter(|(_, slot)| slot.state != State::Free) {
            let tag = Tag(index as u16);
            // Where it waits for a thaw it has been handed to no node.
            let is_waiting = slot.depth == 0 && slot.state == State::Parked;
            all.push(UnderWay {
                tag,
                parent: slot.parent.map(|parent| parent.tag),
                req: slot.req,
                standing: match slot.state {
                    _ if is_waiting => Standing::Waiting,
                    State::Parked => Standing::Parked,
                    State::Free | State::Moving | State::Held => Standing::Held,
                },
                node: match slot.depth {
                    0 => None,
                    depth => Some(slot.path[usize::from(depth) - 1]),
                },
                age_ns: now.since(slot.start),
            });
        }
        all
    }
}
