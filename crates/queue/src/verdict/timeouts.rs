//! Timeouts of requests: the block layer's `queue/io_timeout`.
//!
//! While requests are in flight, a periodic alarm of the queue scans all slots; nothing is done per request.
//! The node that holds an expired request is asked to cancel it. A tag is freed only when that node completes
//! the request, so memory that the kernel may still write to is never reused. The request then fails with
//! [`Status::Timeout`](block::Status::Timeout), or succeeds if it succeeded after all.
//!
//! *Invariant:* at most one alarm is set, and none for long after the last request: an idle queue has no
//! timer.

use super::{Marks, Queue, State};
use crate::sockets::{QUEUE_ALARM, alarm_cookie};
use crate::{Cx, IoId, NodeId, Ring};
use block::{Cookie, Request, Tag};

/// Bounds of the scan period, which is an eighth of the timeout. So a request is cancelled at most an eighth
/// of the timeout late.
const PERIOD_NS_MIN: u64 = 5_000_000;
const PERIOD_NS_MAX: u64 = 1_000_000_000;

/// Requests of the front-end that expired since the last call of [`Queue::take_timed_out`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TimedOut {
    /// Their number.
    pub count: u64,
    /// One of them.
    pub request: Request,
    /// Tag of the request.
    pub tag: Tag,
    /// Its age when it was cancelled, in nanoseconds.
    pub age_ns: u64,
    /// The node that held it.
    pub node: NodeId,
}

/// State of a queue's timeout.
pub(super) struct Timeouts {
    limit_ns: Option<u64>,
    /// The alarm is set, or its completion pending.
    is_armed: bool,
    /// Requests are in flight with a limit but without an alarm: it is set in this turn.
    pub(super) is_to_be_armed: bool,
    found: Option<TimedOut>,
}

impl Timeouts {
    pub(super) fn new(limit_ns: Option<u64>) -> Timeouts {
        Timeouts { limit_ns, is_armed: false, is_to_be_armed: false, found: None }
    }

    /// Called when a request is submitted to an idle queue.
    #[inline]
    pub(super) fn begins(&mut self) {
        self.is_to_be_armed = self.limit_ns.is_some() && !self.is_armed;
    }

    fn period_ns(&self) -> u64 {
        self.limit_ns.map_or(PERIOD_NS_MAX, |limit| (limit / 8).clamp(PERIOD_NS_MIN, PERIOD_NS_MAX))
    }
}

impl<R: Ring> Queue<R> {
    /// Sets the time in nanoseconds after which requests are cancelled; `None`: never.
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

    /// Called when the alarm expired or was cancelled.
    pub(super) fn timeouts_due(&mut self, ring: &mut R) {
        self.timeouts.is_armed = false;
        self.expire(ring);
        // Requests that a frozen queue holds back do not age before they enter the stack.
        if !self.is_drained() {
            self.timeouts.begins();
        }
    }

    /// Cancels the alarm. Returns whether none is set any more.
    pub(super) fn disarm_timeouts(&mut self, ring: &mut R) -> bool {
        self.timeouts.is_to_be_armed = false;
        if self.timeouts.is_armed {
            ring.cancel(self.alarm_id());
        }
        !self.timeouts.is_armed
    }

    /// Asks nodes to cancel the expired requests that they hold. Returns how many requests that were,
    /// children included. A request that is still held after another timeout is cancelled again: it may since
    /// have been retried on another path and be stuck there.
    pub fn expire(&mut self, ring: &mut R) -> usize {
        let Some(limit_ns) = self.timeouts.limit_ns else { return 0 };
        let now = ring.now();
        let mut asked = 0;
        for (index, slot) in self.slots.iter_mut().enumerate() {
            let due_ns = limit_ns.saturating_mul(u64::from(slot.times_expired()) + 1);
            let age_ns = now.since(slot.entered());
            if slot.state != State::Held || age_ns < due_ns {
                continue;
            }
            let tag = Tag(index as u16);
            let holder = slot.path[usize::from(slot.depth) - 1];
            if slot.times_expired() == 0 && slot.parent.is_none() {
                let found = self.timeouts.found.get_or_insert(TimedOut {
                    count: 0,
                    request: slot.req,
                    tag,
                    age_ns,
                    node: holder,
                });
                found.count += 1;
            }
            slot.expired = slot.times_expired().saturating_add(1);
            slot.marks |= Marks::EXPIRED;
            asked += 1;
            let cookie = Cookie { tag, generation: slot.generation };
            let mut cx = Cx { common: &mut self.common, node: holder, ring };
            self.nodes[holder].node.cancel(cookie, &mut cx);
        }
        asked
    }

    /// Returns the requests that expired since the last call.
    #[inline]
    pub fn take_timed_out(&mut self) -> Option<TimedOut> {
        self.timeouts.found.take()
    }
}
