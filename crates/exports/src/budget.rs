//! Memory budget of the connections of a front-end on one reactor, and the queue of those that wait for memory.
//! NBD and iSCSI have a budget each.
//!
//! A connection is charged for a payload as its bytes arrive, and for a read's data when the read is
//! submitted, until the reply was sent. Up to [`FLOOR`] a connection is never refused, so one with small
//! requests never waits for others; beyond it the reactor's budget decides, and refused connections wait in a
//! first-come, first-served queue.
//!
//! *Invariant:* the connection at the head of the queue makes progress even when half-received payloads have
//! used up the budget: one connection at a time may exceed it by one request.

use block::Segment;
use queue::{Nanos, QueueId};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

/// Bytes that a connection may hold regardless of others; also the smallest step in which payloads are
/// received.
pub const FLOOR: u64 = 1 << 20;
/// Step in which payloads of slow clients, or of clients not known to be fast, are received, so that their
/// progress shows.
pub(super) const SLOW_STEP: u32 = 64 << 10;
/// A connection without progress for this long is closed while others wait for the memory that it holds.
pub const GRACE: Duration = Duration::from_secs(1);
/// Bytes of the largest request.
const REQUEST_MAX: u64 = 32 << 20;
/// Interval of the checks for connections that owe the rest of a request.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);
/// Interval of the checks while connections wait for memory.
const CHECK_INTERVAL_UNDER_PRESSURE: Duration = Duration::from_millis(100);

/// Limits on a reactor's connections.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Limits {
    /// Bytes of payloads and of data for replies, of all connections.
    pub memory: u64,
    /// A client that has sent part of a request and nothing more for this long is disconnected; `None`:
    /// never.
    pub stall: Option<Duration>,
}

impl Default for Limits {
    fn default() -> Self {
        Limits { memory: 1 << 30, stall: Some(Duration::from_secs(60)) }
    }
}

/// How often limits took effect, for one device. Only its reactors count, rarely.
#[derive(Default, Debug)]
pub struct LimitCounts {
    /// Clients disconnected in the middle of a request.
    pub stalled: AtomicU64,
    /// Clients disconnected because others waited for their memory.
    pub evicted: AtomicU64,
    /// Requests that waited for memory.
    pub waited: AtomicU64,
    /// Clients refused because of the limit on connections of the export.
    pub refused: AtomicU64,
}

impl LimitCounts {
    /// All counts with their names.
    pub fn named(&self) -> [(&'static str, u64); 4] {
        [
            ("connections", self.refused.load(Relaxed)),
            ("memory", self.waited.load(Relaxed)),
            ("memory-disconnects", self.evicted.load(Relaxed)),
            ("stall-disconnects", self.stalled.load(Relaxed)),
        ]
    }
}

/// Why `tick` closed a connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CutReason {
    /// It sent part of a request, and nothing for the time of [`Limits::stall`].
    Stalled,
    /// Others waited for its memory, and it made no progress for [`GRACE`].
    Evicted,
}

/// A connection that `tick` closed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Cut {
    /// The queue of its device.
    pub queue: QueueId,
    /// Reason.
    pub why: CutReason,
    /// Bytes that it held.
    pub held: u64,
    /// How long it made no progress.
    pub still: Duration,
}

/// Longest interval between two checks that counts as time without progress: in a longer one the process was
/// stopped, or too busy to see what arrived.
const GAP_MAX: Duration = Duration::from_secs(2);

/// A check that comes this much early is the distant one.
const EARLY_MAX_NS: u64 = 100_000_000;

/// Requests a call of `tick` after a time.
pub type Alarm = Box<dyn Fn(Duration) + Send>;

/// The memory account of a reactor.
#[derive(Default)]
pub(super) struct Budget {
    pub(super) limits: Limits,
    used: u64,
    /// Connections that wait for memory, by index, in order.
    waiting: VecDeque<u32>,
    /// The connection that may exceed the budget until its request is complete.
    overdraft: Option<u32>,
    /// Memory was freed, or granted to the head of the queue, since the queue last moved.
    freed: bool,
    alarm: Option<Alarm>,
    /// The alarm is set.
    ticking: bool,
    /// Time of the last check.
    checked: Nanos,
    /// The time of the distant check, if one is scheduled: nothing but silence is watched for.
    distant: Option<Nanos>,
    /// Longest interval from the last check to the next one that counts as a whole, if above [`GAP_MAX`].
    gap_max: Duration,
}

impl Budget {
    pub(super) fn set(&mut self, limits: Limits, alarm: Option<Alarm>) {
        (self.limits, self.alarm) = (limits, alarm);
    }

    /// Whether at most half of the budget would be in use with `more` bytes.
    pub(super) fn is_calm(&self, more: u64) -> bool {
        self.waiting.is_empty() && self.used + more <= self.limits.memory / 2
    }

    /// Whether any connection holds memory.
    pub(super) fn is_used(&self) -> bool {
        self.used > 0
    }

    pub(super) fn add(&mut self, bytes: u64) {
        self.used += bytes;
    }

    /// Whether connection `index` may hold `bytes` more although it holds [`FLOOR`]. `resumed`: it was at the
    /// head of the queue. `goes_on`: the bytes are for a payload that it has received in part.
    #[cold]
    pub(super) fn grants(&mut self, index: u32, bytes: u64, resumed: bool, goes_on: bool) -> bool {
        if !resumed && !self.waiting.is_empty() {
            return goes_on && self.overdraft == Some(index);
        }
        if self.used + bytes <= self.limits.memory {
            return true;
        }
        match self.overdraft {
            Some(holder) => holder == index && goes_on,
            None => {
                self.overdraft = Some(index);
                true
            }
        }
    }

    /// Connection `index` has freed `bytes`, and still holds `held`.
    #[inline]
    pub(super) fn give_back(&mut self, index: u32, bytes: u64, held: u64) {
        self.used -= bytes;
        if self
            .overdraft
            .is_some_and(|holder| self.used <= self.limits.memory || (holder == index && held <= FLOOR))
        {
            self.overdraft = None;
        }
        self.freed |= !self.waiting.is_empty();
    }

    /// Queues a connection. `resumed`: it was at the head and was refused again.
    pub(super) fn wait(&mut self, index: u32, resumed: bool) {
        if resumed {
            self.waiting.push_front(index);
            // The memory freed so far was not enough.
            self.freed = false;
        } else {
            self.waiting.push_back(index);
        }
        self.check_soon(CHECK_INTERVAL_UNDER_PRESSURE);
    }

    /// Takes the head of the queue, if memory was freed since the last call.
    pub(super) fn next_in_line(&mut self) -> Option<u32> {
        if std::mem::take(&mut self.freed) { self.waiting.pop_front() } else { None }
    }

    /// The head of the queue has got its memory: try the next one, too.
    pub(super) fn line_moves(&mut self) {
        self.freed = true;
    }

    /// Whether [`next_in_line`](Budget::next_in_line) would return a connection.
    pub(super) fn has_next(&self) -> bool {
        self.freed && !self.waiting.is_empty()
    }

    /// Removes a connection from the queue.
    pub(super) fn leave(&mut self, index: u32) {
        self.waiting.retain(|&waiting| waiting != index);
        self.freed |= !self.waiting.is_empty();
    }

    /// A connection that held `held` bytes is closed.
    pub(super) fn close(&mut self, index: u32, held: u64) {
        self.give_back(index, held, 0);
        self.leave(index);
    }

    /// Schedules a check, because connections owe the rest of a request.
    #[inline]
    pub(super) fn look(&mut self) {
        if !self.ticking && self.limits.stall.is_some() {
            self.check_soon(CHECK_INTERVAL.min(self.limits.stall.unwrap_or(CHECK_INTERVAL) / 4));
        }
    }

    /// Whether checks can be scheduled.
    pub(super) fn has_alarm(&self) -> bool {
        self.alarm.is_some()
    }

    /// Schedules a check at the latest after this time, unless one is scheduled already.
    pub(super) fn check_within(&mut self, after: Duration) {
        self.check_soon(after);
    }

    #[cold]
    fn check_soon(&mut self, after: Duration) {
        if !self.ticking
            && let Some(alarm) = &self.alarm
        {
            alarm(after);
            self.ticking = true;
        }
    }

    /// Schedules a check after this time. [`look`](Budget::look) and waiting connections do not wait for it:
    /// they schedule their own in between.
    pub(super) fn check_later(&mut self, after: Duration) {
        if after <= CHECK_INTERVAL {
            self.check_soon(after);
        } else if !self.ticking
            && self.distant.is_none()
            && let Some(alarm) = &self.alarm
        {
            alarm(after);
            self.distant = Some(self.checked.after(after.as_nanos() as u64));
            self.gap_max = after + CHECK_INTERVAL;
        }
    }

    /// The alarm has fired: returns the time since the last check, at most [`GAP_MAX`], or a second more than
    /// the time after which the check was due.
    pub(super) fn passed(&mut self, now: Nanos) -> Duration {
        self.ticking = false;
        // A clock that is read early in a turn can be behind the alarm's.
        self.distant = self.distant.filter(|&distant| distant > now.after(EARLY_MAX_NS));
        let ahead = self.distant.map_or(Duration::ZERO, |distant| Duration::from_nanos(distant.since(now)));
        let gap_max = std::mem::replace(&mut self.gap_max, ahead + CHECK_INTERVAL).max(GAP_MAX);
        let last = std::mem::replace(&mut self.checked, now);
        Duration::from_nanos(now.0.saturating_sub(last.0)).min(gap_max)
    }

    /// Bytes that connections should free for those in the queue; `None`: nobody waits.
    pub(super) fn wanted(&self) -> Option<u64> {
        let over = self.used.saturating_sub(self.limits.memory);
        // Enough for the largest requests.
        let needed = self.waiting.len() as u64 * REQUEST_MAX;
        (needed > 0).then_some(over + needed)
    }

    /// Schedules the next check. `owed`: connections still owe the rest of a request.
    pub(super) fn schedule_next_check(&mut self, owed: bool) {
        if !self.waiting.is_empty() {
            self.check_soon(CHECK_INTERVAL_UNDER_PRESSURE);
        } else if owed {
            self.look();
        }
    }
}

/// Bytes charged for a segment.
#[inline]
pub(super) fn charge_of(segment: Segment) -> u64 {
    segment.len.into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::{Arc, Mutex};

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn a_distant_check_does_not_delay_a_near_one_and_stays_scheduled() {
        let set = Arc::new(Mutex::new(Vec::new()));
        let alarms = set.clone();
        let mut budget = Budget::default();
        budget.set(
            Limits::default(),
            Some(Box::new(move |after| alarms.lock().unwrap().push(after.as_secs()))),
        );
        let at = |seconds: u64| Nanos(seconds * 1_000_000_000);
        assert_eq!(budget.passed(at(10)), GAP_MAX);
        budget.check_later(5 * SECOND);
        budget.look();
        assert_eq!(*set.lock().unwrap(), [5, 1]);
        assert_eq!(budget.passed(at(11)), SECOND);
        budget.check_later(5 * SECOND);
        assert_eq!(*set.lock().unwrap(), [5, 1], "the distant one is still to come");
        assert_eq!(budget.passed(at(15)), 4 * SECOND);
        budget.check_later(5 * SECOND);
        assert_eq!(*set.lock().unwrap(), [5, 1, 5]);
        assert_eq!(budget.passed(at(20)), 5 * SECOND);
        budget.check_later(5 * SECOND);
        assert_eq!(budget.passed(at(60)), 6 * SECOND, "the process was stopped meanwhile");
    }
}
