//! Events of a queue that are not completions of requests: sockets and alarms of its nodes, the end of a
//! batch, closing the stack; and queries about requests.

use super::{Modes, Queue, State};
use crate::slow::SlowNotes;
use crate::sockets::{NodeEvent, QUEUE_ALARM, alarm_node};
use crate::{Cx, InFlight, InFlightState, Nanos, NodeId, Ring, Slow};
use block::{Cookie, Tag};

/// Most calls of `commit` per node in one turn, so that a node that always has more work does not delay other
/// queues of its thread.
const COMMITS_MAX: u32 = 16;

impl<R: Ring> Queue<R> {
    /// Handles a completion that belongs to no request: an alarm of a node or of the queue.
    #[cold]
    pub(super) fn alarm(&mut self, cookie: Cookie, ring: &mut R) {
        let Some(node) = alarm_node(cookie) else { panic!("late or double end of {cookie:?}") };
        if node == QUEUE_ALARM {
            return self.timeouts_due(ring);
        }
        self.node_event(node, NodeEvent::Alarm, ring);
    }

    /// Passes an event to a node, of one of its sockets for example.
    ///
    /// # Panics
    /// If the node resumes a request that it does not hold.
    pub fn node_event(&mut self, node: NodeId, event: NodeEvent, ring: &mut R) {
        let mut cx = Cx { common: &mut self.common, node, ring };
        self.nodes[node].node.event(event, &mut cx);
        self.resume(ring);
    }

    /// Makes the nodes close their sockets and alarms, and the queue its own alarm. Returns whether all are
    /// closed. Call it after each turn until then; only then [`replace`](Queue::replace) the stack or drop
    /// the queue.
    ///
    /// # Panics
    /// If requests are in flight.
    pub fn close(&mut self, ring: &mut R) -> bool {
        assert!(self.is_drained(), "a stack is closed only while nothing moves in it");
        let mut closed = self.disarm_timeouts(ring);
        for (number, entry) in self.nodes.iter_mut().enumerate() {
            let mut cx = Cx { common: &mut self.common, node: NodeId(number as u8), ring };
            closed &= entry.node.close(&mut cx);
        }
        closed
    }

    /// Processes requests that were resumed and children that were spawned in `commit`, which nodes above may
    /// batch again, and so on. What is left after [`COMMITS_MAX`] repetitions waits for the next turn, see
    /// [`has_parked`](Queue::has_parked).
    #[cold]
    pub(super) fn resume_and_commit(&mut self, ring: &mut R) {
        self.moved = true;
        for _ in 0..COMMITS_MAX {
            self.start_children(ring);
            self.resume(ring);
            self.commit(ring);
            if self.common.spawned.is_empty() && self.common.resumed.is_empty() {
                return;
            }
        }
    }

    pub(super) fn commit(&mut self, ring: &mut R) {
        for (number, entry) in self.nodes.iter_mut().enumerate() {
            let mut cx = Cx { common: &mut self.common, node: NodeId(number as u8), ring };
            entry.node.commit(&mut cx);
        }
    }

    /// Whether [`turn`](Queue::turn) must be called again before the thread sleeps. Blocked requests do not
    /// need that: see [`Verdict::Blocked`](crate::Verdict::Blocked).
    pub fn must_turn(&self) -> bool {
        self.must_retry || !self.common.resumed.is_empty() || !self.common.spawned.is_empty()
    }

    /// Whether turns since the last call did anything but offer blocked requests in vain.
    pub(crate) fn take_moved(&mut self) -> bool {
        std::mem::take(&mut self.moved)
    }

    /// Records requests that take `limit_ns` nanoseconds or longer from now on; `None`: none.
    pub fn set_slow_limit(&mut self, limit_ns: Option<u64>) {
        if self.slow.as_ref().map(|slow| slow.limit_ns()) != limit_ns {
            self.slow = limit_ns.map(|limit| Box::new(SlowNotes::new(limit, self.slots.len())));
            self.modes.set(Modes::WATCHED, self.slow.is_some() || self.common.probe.is_some());
        }
    }

    /// Whether slow requests are recorded.
    pub fn tracks_slow(&self) -> bool {
        self.slow.is_some()
    }

    /// Records the slow ones of the requests that completed in this turn.
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

    /// Calls `each` for every slow request since the last call. Returns the number of those that were not
    /// recorded because there were too many in one turn.
    pub fn take_slow(&mut self, each: impl FnMut(Slow)) -> u64 {
        let Some(slow) = &mut self.slow else { return 0 };
        let (found, missed) = slow.take();
        found.for_each(each);
        missed
    }

    /// Returns the requests in flight, by tag. Scans all slots and allocates once.
    pub fn list_in_flight(&self, now: Nanos) -> Vec<InFlight> {
        let count = self.slots.iter().filter(|slot| slot.state != State::Free).count();
        let mut all: Vec<InFlight> = Vec::with_capacity(count);
        for (index, slot) in self.slots.iter().enumerate().filter(|(_, slot)| slot.state != State::Free) {
            let tag = Tag(index as u16);
            // A request that is held back is in no node.
            let is_waiting = slot.depth == 0 && slot.state == State::Parked;
            all.push(InFlight {
                tag,
                parent: slot.parent.map(|parent| parent.tag),
                req: slot.req,
                state: match slot.state {
                    _ if is_waiting => InFlightState::Waiting,
                    State::Parked => InFlightState::Parked,
                    State::Free | State::Moving | State::Held => InFlightState::Held,
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
