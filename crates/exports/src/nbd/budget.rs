//! The memory that the NBD connections of one reactor hold: how much it may be, and which connections wait for some.
//!
//! A connection is charged for a payload as its bytes arrive, for a read's data when the read is submitted, until the
//! reply was sent. Up to [`FLOOR`] a connection is never refused, so that one with small requests never waits for others;
//! beyond it the budget of the reactor decides, and those that it refuses wait in line, first come first served.
//!
//! *Invariant:* the connection at the head of the line makes progress even when payloads that are all half received have used
//! up the budget: one connection at a time may overdraw it by one request.

use block::Segment;
use queue::{Nanos, QueueId};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

/// Bytes that a connection may hold whatever others hold, and at least so much of a payload is received at once.
pub const FLOOR: u64 = 1 << 20;
/// Parts in which payloads are received from a client that is slow, or not known to be fast, so that its progress shows.
pub(super) const SLOW_STEP: u32 = 64 << 10;
/// A connection that has moved nothing for so long is closed while others wait for the memory that it holds.
pub const GRACE: Duration = Duration::from_secs(1);
/// Time between two looks at connections that owe part of a request.
const LOOK: Duration = Duration::from_secs(1);
/// Time between two looks while connections wait for memory.
const LOOK_UNDER_PRESSURE: Duration = Duration::from_millis(100);

/// What the NBD connections of one reactor may hold, and for how long.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Limits {
    /// Bytes of payloads and of data for replies, of all connections.
    pub memory: u64,
    /// A client that has sent part of a request and nothing more for so long is disconnected; none: never.
    pub stall: Option<Duration>,
}

impl Default for Limits {
    fn default() -> Self {
        Limits { memory: 1 << 30, stall: Some(Duration::from_secs(60)) }
    }
}

/// How often limits took effect, for one device. Only its reactors count, each with few additions.
#[derive(Default, Debug)]
pub struct LimitCounts {
    /// Clients disconnected for half a request.
    pub stalled: AtomicU64,
    /// Clients disconnected for memory that others waited for.
    pub evicted: AtomicU64,
    /// Requests that waited for memory.
    pub waited: AtomicU64,
    /// Clients refused for the number of connections to the export.
    pub refused: AtomicU64,
}

impl LimitCounts {
    /// All of them with their names.
    pub fn named(&self) -> [(&'static str, u64); 4] {
        [
            ("connections", self.refused.load(Relaxed)),
            ("memory", self.waited.load(Relaxed)),
            ("memory-disconnects", self.evicted.load(Relaxed)),
            ("stall-disconnects", self.stalled.load(Relaxed)),
        ]
    }
}

/// Why a connection was closed by [`tick`](super::Front::tick).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CutReason {
    /// It sent part of a request, and nothing for the time of [`Limits::stall`].
    Stalled,
    /// Others waited for its memory, and it moved nothing for [`GRACE`].
    Evicted,
}

/// A connection that was closed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Cut {
    /// The queue of its device.
    pub queue: QueueId,
    /// Why.
    pub why: CutReason,
    /// Bytes that it held.
    pub held: u64,
    /// How long it had moved nothing.
    pub still: Duration,
}

/// The longest time between two looks that counts as time in which a connection moved nothing: where more passed, the
/// process was stopped, or too busy to see what came.
const GAP_MAX: Duration = Duration::from_secs(2);

/// Asks for a call of [`tick`](super::Front::tick) after a time.
pub type Alarm = Box<dyn Fn(Duration) + Send>;

/// The account of a reactor.
#[derive(Default)]
pub(super) struct Budget {
    pub(super) limits: Limits,
    used: u64,
    /// Connections that wait for memory, by number, in order.
    waiting: VecDeque<u32>,
    /// The connection that may exceed the budget until its request is over.
    overdraft: Option<u32>,
    /// Memory was given back, or given out to the head of the line, since the line last moved.
    freed: bool,
    alarm: Option<Alarm>,
    /// The alarm was asked for and has not come.
    ticking: bool,
    /// When it came last.
    looked: Nanos,
}

impl Budget {
    pub(super) fn set(&mut self, limits: Limits, alarm: Option<Alarm>) {
        (self.limits, self.alarm) = (limits, alarm);
    }

    /// Whether much less is in use than there is.
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

    /// Whether connection `index` may hold `bytes` more although it holds [`FLOOR`]. `resumed`: it was at the head of the
    /// line. `goes_on`: it needs them for a payload of which it holds the beginning.
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

    /// Connection `index` gave `bytes` back, and still holds `held`.
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

    /// Put a connection in line. `resumed`: it was at its head, and had to come back.
    pub(super) fn wait(&mut self, index: u32, resumed: bool) {
        if resumed {
            self.waiting.push_front(index);
            // What was given back so far was not enough.
            self.freed = false;
        } else {
            self.waiting.push_back(index);
        }
        self.look_soon(LOOK_UNDER_PRESSURE);
    }

    /// The head of the line, if something changed for it.
    pub(super) fn next_in_line(&mut self) -> Option<u32> {
        if std::mem::take(&mut self.freed) { self.waiting.pop_front() } else { None }
    }

    /// The head of the line has got what it needs: the next one may be lucky, too.
    pub(super) fn line_moves(&mut self) {
        self.freed = true;
    }

    /// Whether [`next_in_line`](Budget::next_in_line) has one.
    pub(super) fn has_next(&self) -> bool {
        self.freed && !self.waiting.is_empty()
    }

    /// A connection is over or ends: it waits no longer.
    pub(super) fn leave(&mut self, index: u32) {
        self.waiting.retain(|&waiting| waiting != index);
        self.freed |= !self.waiting.is_empty();
    }

    /// A connection is gone that held `held`.
    pub(super) fn close(&mut self, index: u32, held: u64) {
        self.give_back(index, held, 0);
        self.leave(index);
    }

    /// Connections owe parts of requests: have them looked at.
    #[inline]
    pub(super) fn look(&mut self) {
        if !self.ticking && self.limits.stall.is_some() {
            self.look_soon(LOOK.min(self.limits.stall.unwrap_or(LOOK) / 4));
        }
    }

    #[cold]
    fn look_soon(&mut self, after: Duration) {
        if !self.ticking
            && let Some(alarm) = &self.alarm
        {
            alarm(after);
            self.ticking = true;
        }
    }

    /// The alarm has come: the time since it last did, as far as that counts.
    pub(super) fn passed(&mut self, now: Nanos) -> Duration {
        self.ticking = false;
        let last = std::mem::replace(&mut self.looked, now);
        Duration::from_nanos(now.0.saturating_sub(last.0)).min(GAP_MAX)
    }

    /// Bytes that connections should give up for those in line; none: nobody waits.
    pub(super) fn wanted(&self) -> Option<u64> {
        let over = self.used.saturating_sub(self.limits.memory);
        // What the largest requests need.
        let needed = self.waiting.len() as u64 * (super::HELD_MAX / 2);
        (needed > 0).then_some(over + needed)
    }

    /// Ask for the next alarm. `owed`: connections still owe parts of requests.
    pub(super) fn look_again(&mut self, owed: bool) {
        if !self.waiting.is_empty() {
            self.look_soon(LOOK_UNDER_PRESSURE);
        } else if owed {
            self.look();
        }
    }
}

/// The bytes that a segment is charged with.
#[inline]
pub(super) fn charge_of(segment: Segment) -> u64 {
    segment.len.into()
}
