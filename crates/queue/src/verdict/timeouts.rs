//! Timeouts of requests: the block layer's `queue/io_timeout`.
//!
//! While requests are in flight, an alarm of the queue comes now and then and looks at all slots: nothing is done for a
//! request itself. The holder of one that has taken too long is asked to give up. A tag is freed only when its holder says
//! that the request is over, so memory that the kernel may still write to never changes hands; the request then ends with
//! [`Status::Timeout`](block::Status::Timeout). One that succeeds after all has succeeded.
//!
//! *Invariant:* at most one alarm is with the ring, and none for long after the last request: an idle queue wakes nobody.

use super::{Queue, State};
use crate::sockets::{QUEUE_ALARM, alarm_cookie};
use crate::{Cx, IoId, NodeId, Ring};
use block::{Cookie, Request, Tag};

/// How often slots are looked at: an eighth of the timeout, within these bounds. So a request is cancelled at the latest
/// when an eighth of the timeout has passed beyond it.
const PERIOD_NS_MIN: u64 = 5_000_000;
const PERIOD_NS_MAX: u64 = 1_000_000_000;

/// Requests of the front-end that have taken too long since they were last taken note of.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TimedOut {
    /// How many.
    pub count: u64,
    /// One of them, and which node held it or the request that it was split into.
    pub request: Request,
    /// Its tag.
    pub tag: Tag,
    /// How long it had taken when its holder was asked to give up.
    pub age_ns: u64,
    /// The node that it was with.
    pub node: NodeId,
}

/// A queue's timeout, and where it stands with it.
pub(super) struct Timeouts {
    limit_ns: Option<u64>,
    /// The alarm is with the ring, or its end on the way.
    is_armed: bool,
    /// Requests are in flight, there is a limit and no alarm: one is to be set in this turn.
    pub(super) is_to_be_armed: bool,
    found: Option<TimedOut>,
}

impl Timeouts {
    pub(super) fn new(limit_ns: Option<u64>) -> Timeouts {
        Timeouts { limit_ns, is_armed: false, is_to_be_armed: false, found: None }
    }

    /// The first request is in flight.
    #[inline]
    pub(super) fn begins(&mut self) {
        self.is_to_be_armed = self.limit_ns.is_some() && !self.is_armed;
    }

    fn period_ns(&self) -> u64 {
        self.limit_ns.map_or(PERIOD_NS_MAX, |limit| (limit / 8).clamp(PERIOD_NS_MIN, PERIOD_NS_MAX))
    }
}

impl<R: Ring> Queue<R> {
    /// Cancel requests that take longer from now on; `None`: none.
    pub fn set_timeout(&mut self, limit_ns: Option<u64>) {
        self.timeouts.limit_ns = limit_ns;
        if self.in_flight > 0 {
            self.timeouts.begins();
        }
    }

    fn alarm_id(&self) -> IoId {
        IoId { queue: self.common.queue, cookie: alarm_cookie(QUEUE_ALARM) }
    }

    #[cold]
    pub(super) fn arm_timeouts(&mut self, ring: &mut R) {
        self.timeouts.is_to_be_armed = false;
        self.timeouts.is_armed = true;
        ring.timer(self.alarm_id(), ring.now().after(self.timeouts.period_ns()));
    }

    /// The alarm has come, or was cancelled.
    pub(super) fn timeouts_due(&mut self, ring: &mut R) {
        self.timeouts.is_armed = false;
        self.expire(ring);
        // What is held back while the queue is frozen takes no time before it enters the stack.
        if !self.is_drained() {
            self.timeouts.begins();
        }
    }

    /// Take the alarm back; whether there is none any more.
    pub(super) fn disarm_timeouts(&mut self, ring: &mut R) -> bool {
        self.timeouts.is_to_be_armed = false;
        if self.timeouts.is_armed {
            ring.cancel(self.alarm_id());
        }
        !self.timeouts.is_armed
    }

    /// Ask the holders of requests that have taken too long to give up. Returns how many were asked, requests that others
    /// were split into included. One that is still held when the timeout has passed once more is asked again: what was
    /// cancelled may since have gone on to another path, or have been started anew, and be stuck there.
    pub fn expire(&mut self, ring: &mut R) -> usize {
        let Some(limit_ns) = self.timeouts.limit_ns else { return 0 };
        let now = ring.now();
        let mut asked = 0;
        for (index, slot) in self.slots.iter_mut().enumerate() {
            let due_ns = limit_ns.saturating_mul(u64::from(slot.expired) + 1);
            let age_ns = now.since(slot.entered());
            if slot.state != State::Held || age_ns < due_ns {
                continue;
            }
            let tag = Tag(index as u16);
            let holder = slot.path[usize::from(slot.depth) - 1];
            if slot.expired == 0 && slot.parent.is_none() {
                let found = self.timeouts.found.get_or_insert(TimedOut {
                    count: 0,
                    request: slot.req,
                    tag,
                    age_ns,
                    node: holder,
                });
                found.count += 1;
            }
            slot.expired = slot.expired.saturating_add(1);
            asked += 1;
            let cookie = Cookie { tag, generation: slot.generation };
            let mut cx = Cx { common: &mut self.common, node: holder, ring };
            self.seats[holder].node.cancel(cookie, &mut cx);
        }
        asked
    }

    /// What has timed out since the last call.
    #[inline]
    pub fn take_timed_out(&mut self) -> Option<TimedOut> {
        self.timeouts.found.take()
    }
}
