//! Memory budget of a front-end's connections on one reactor, and the queue of connections that wait for
//! memory. NBD and iSCSI have separate budgets.
//!
//! A connection is charged for a payload as its bytes arrive, and for a read's data when the read is
//! submitted, until the reply has been sent. Up to [`FLOOR`] a connection is never refused, so one with
//! small requests never waits for others. Beyond that the reactor's budget decides, and refused connections
//! wait in a first-come, first-served queue.
//!
//! *Invariant:* the connection at the head of the queue makes progress even when half-received payloads have
//! used up the budget: one connection at a time may exceed it by one request.

use block::Segment;
use queue::{Nanos, QueueId};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

/// Bytes that a connection may hold regardless of other connections; also the smallest step in which
/// payloads are received.
pub const FLOOR: u64 = 1 << 20;
/// Bytes per step in which payloads are received from clients that are slow or not known to be fast, so
/// that their progress is visible.
pub(super) const SLOW_STEP: u32 = 64 << 10;
/// A connection without progress for this long is closed while others wait for the memory that it holds.
pub const GRACE: Duration = Duration::from_secs(1);
/// Bytes of the largest request.
const REQUEST_MAX: u64 = 32 << 20;
/// Interval of the checks for connections that owe the rest of a request.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);
/// Interval of the checks while connections wait for memory.
const CHECK_INTERVAL_UNDER_PRESSURE: Duration = Duration::from_millis(100);

/// Limits for a reactor's connections.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Limits {
    /// Maximum bytes of payloads and reply data, of all connections together.
    pub memory: u64,
    /// Time after which a client is disconnected if it has sent part of a request and nothing more; `None`
    /// disables this.
    pub stall: Option<Duration>,
}

impl Default for Limits {
    fn default() -> Self {
        Limits { memory: 1 << 30, stall: Some(Duration::from_secs(60)) }
    }
}

/// Counts of events in which limits took effect, for one device. Only its reactors count, and rarely.
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
    /// Returns all counts with their names.
    pub fn named(&self) -> [(&'static str, u64); 4] {
        [
            ("connections", self.refused.load(Relaxed)),
            ("memory", self.waited.load(Relaxed)),
            ("memory-disconnects", self.evicted.load(Relaxed)),
            ("stall-disconnects", self.stalled.load(Relaxed)),
        ]
    }
}

/// Reasons why `tick` closed a connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CutReason {
    /// The client sent part of a request, and nothing more for the time of [`Limits::stall`].
    Stalled,
    /// Other connections waited for its memory, and it made no progress for [`GRACE`].
    Evicted,
}

/// A connection that `tick` closed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Cut {
    /// The queue of its device.
    pub queue: QueueId,
    /// The reason.
    pub why: CutReason,
    /// Bytes that the connection held.
    pub held: u64,
    /// Time without progress.
    pub still: Duration,
}

/// Longest interval between two checks that counts as time without progress. In a longer interval the
/// process was stopped, or too busy to notice what arrived.
const GAP_MAX: Duration = Duration::from_secs(2);

/// A check that comes at most this much early still counts as the distant one, in nanoseconds.
const EARLY_MAX_NS: u64 = 100_000_000;

/// Requests that `tick` be called after the given time.
pub type Alarm = Box<dyn Fn(Duration) + Send>;

/// The memory account of a reactor.
#[derive(Default)]
pub(super) struct Budget {
    pub(super) limits: Limits,
    used: u64,
    /// Connections that wait for memory, by index, in order of arrival.
    waiting: VecDeque<u32>,
    /// The connection that may exceed the budget until its request is complete.
    overdraft: Option<u32>,
    /// Whether memory was freed, or granted to the head of the queue, since the queue last advanced.
    freed: bool,
    alarm: Option<Alarm>,
    /// Whether the alarm is set.
    ticking: bool,
    /// Time of the last check.
    checked: Nanos,
    /// Time of the distant check, if one is scheduled. Until then the checks only watch for silent
    /// connections.
    distant: Option<Nanos>,
    /// Longest interval from the last check to the next one that is counted in full, if above [`GAP_MAX`].
    gap_max: Duration,
}

impl Budget {
    pub(super) fn set(&mut self, limits: Limits, alarm: Option<Alarm>) {
        (self.limits, self.alarm) = (limits, alarm);
    }

    /// Returns whether at most half of the budget would be in use with `more` additional bytes.
    pub(super) fn is_calm(&self, more: u64) -> bool {
        self.waiting.is_empty() && self.used + more <= self.limits.memory / 2
    }

    /// Returns whether any connection holds memory.
    pub(super) fn is_used(&self) -> bool {
        self.used > 0
    }

    pub(super) fn add(&mut self, bytes: u64) {
        self.used += bytes;
    }

    /// Returns whether connection `index`, which already holds [`FLOOR`], may hold `bytes` more. `resumed`:
    /// it was at the head of the queue. `goes_on`: the bytes are for a payload that it has already received
    /// in part.
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

    /// Records that connection `index` has freed `bytes`, and still holds `held`.
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

    /// Queues a connection. `resumed`: it was at the head and was refused again, so it returns to the head.
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

    /// Lets the next connection try, after the head of the queue was granted its memory.
    pub(super) fn line_moves(&mut self) {
        self.freed = true;
    }

    /// Returns whether [`next_in_line`](Budget::next_in_line) would return a connection.
    pub(super) fn has_next(&self) -> bool {
        self.freed && !self.waiting.is_empty()
    }

    /// Removes a connection from the queue.
    pub(super) fn leave(&mut self, index: u32) {
        self.waiting.retain(|&waiting| waiting != index);
        self.freed |= !self.waiting.is_empty();
    }

    /// Releases the `held` bytes of a closed connection, and removes it from the queue.
    pub(super) fn close(&mut self, index: u32, held: u64) {
        self.give_back(index, held, 0);
        self.leave(index);
    }

    /// Schedules a check, because some connections have sent only part of a request.
    #[inline]
    pub(super) fn look(&mut self) {
        if !self.ticking && self.limits.stall.is_some() {
            self.check_soon(CHECK_INTERVAL.min(self.limits.stall.unwrap_or(CHECK_INTERVAL) / 4));
        }
    }

    /// Returns whether checks can be scheduled.
    pub(super) fn has_alarm(&self) -> bool {
        self.alarm.is_some()
    }

    /// Schedules a check within this time, unless one is already scheduled.
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

    /// Schedules a check after this time. [`look`](Budget::look) and waiting connections schedule their own
    /// checks in between.
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

    /// Records that the alarm has fired. Returns the time since the last check, limited to [`GAP_MAX`], or
    /// to a second more than the time after which the check was due.
    pub(super) fn passed(&mut self, now: Nanos) -> Duration {
        self.ticking = false;
        // The clock, which is read early in a turn, can be behind the alarm's.
        self.distant = self.distant.filter(|&distant| distant > now.after(EARLY_MAX_NS));
        let ahead = self.distant.map_or(Duration::ZERO, |distant| Duration::from_nanos(distant.since(now)));
        let gap_max = std::mem::replace(&mut self.gap_max, ahead + CHECK_INTERVAL).max(GAP_MAX);
        let last = std::mem::replace(&mut self.checked, now);
        Duration::from_nanos(now.0.saturating_sub(last.0)).min(gap_max)
    }

    /// Returns how many bytes connections should free for those in the queue, or `None` if no connection
    /// waits.
    pub(super) fn wanted(&self) -> Option<u64> {
        let over = self.used.saturating_sub(self.limits.memory);
        // This is enough for the largest requests.
        let needed = self.waiting.len() as u64 * REQUEST_MAX;
        (needed > 0).then_some(over + needed)
    }

    /// Schedules the next check. `owed`: some connections have sent only part of a request.
    pub(super) fn schedule_next_check(&mut self, owed: bool) {
        if !self.waiting.is_empty() {
            self.check_soon(CHECK_INTERVAL_UNDER_PRESSURE);
        } else if owed {
            self.look();
        }
    }
}

/// Returns the bytes charged for a segment.
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
