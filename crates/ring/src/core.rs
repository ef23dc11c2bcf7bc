//! What both engines share: memory, files, timers, sockets' answers, the clock and the events not yet
//! handed out. Owned by a ring, on its thread.

use crate::batching::Batching;
use crate::chunks::Chunks;
use crate::config::{Event, RingConfig};
use crate::files::{File, Files};
use crate::memory::Memory;
use crate::ops::{Ops, Origin};
use crate::sys;
use crate::timers::Timers;
use crate::waker::{WOKEN, Waker};
use queue::{IoId, Nanos};
use std::collections::VecDeque;
use std::io;

/// The parts of a ring that do not depend on its engine.
pub(crate) struct Core {
    pub(crate) memory: Memory,
    pub(crate) chunks: Chunks,
    pub(crate) files: Files,
    pub(crate) timers: Timers,
    pub(crate) ops: Ops,
    pub(crate) events: VecDeque<Event>,
    pub(crate) waker: Waker,
    pub(crate) now: Nanos,
    pub(crate) spin: Spin,
    pub(crate) batching: Batching,
    /// How many operations and sends were started: the time by which removed memory is kept.
    pub(crate) started: u64,
    /// When memory goes back to the system, unless more is freed by then. `None`: there is none to give.
    trim_at: Option<Nanos>,
}

/// How long after the last large block was freed such blocks go back to the system: long against the pauses
/// of a client that works, so that their pages are not faulted in again and again.
const TRIM_AFTER_NS: u64 = 100_000_000;

impl Core {
    pub(crate) fn new(config: &RingConfig) -> io::Result<Core> {
        let mut memory = Memory::new(config.memory_max);
        let chunks = Chunks::new(config.receive_buffers, config.receive_buffer_len, &mut memory)?;
        Ok(Core {
            memory,
            chunks,
            files: Files::default(),
            timers: Timers::default(),
            ops: Ops::default(),
            events: VecDeque::with_capacity(256),
            waker: Waker::new()?,
            now: sys::now(),
            spin: Spin::new(config.poll_us),
            batching: Batching::new(sys::now(), sys::is_scheduled_plainly()),
            started: 0,
            trim_at: None,
        })
    }

    /// Say that what `id` named has ended.
    #[inline]
    pub(crate) fn io_event(&mut self, id: IoId, result: i64) {
        self.events.push_back(Event::Io { queue: id.queue, cookie: id.cookie, result });
    }

    /// A file operation is over; gives the file back when that was removed and may go now.
    #[inline]
    #[must_use]
    pub(crate) fn op_ended(&mut self, slot: u32, result: i64) -> Option<File> {
        let (origin, file) = self.ops.end(slot);
        match origin {
            Origin::Node(id) => self.io_event(id, result),
            Origin::Front(token) => self.events.push_back(Event::Ended { token, result }),
        }
        self.files.end(file)
    }

    /// Hand out the timers that are due.
    #[inline]
    pub(crate) fn expire_timers(&mut self) {
        while let Some(id) = self.timers.due(self.now) {
            self.io_event(id, 0);
        }
    }

    /// Take what the waker raised; the bits.
    pub(crate) fn take_woken(&mut self) -> u32 {
        let bits = self.waker.take();
        if bits & WOKEN != 0 {
            self.events.push_back(Event::Woken);
        }
        bits
    }

    /// How long a sleep may last: `None` for as long as it takes. Looks at the clock if there is a timer.
    pub(crate) fn sleep_max(&mut self) -> Option<u64> {
        let next = self.timers.next().into_iter().chain(self.trim_at).min()?;
        self.now = sys::now();
        Some(next.since(self.now))
    }

    /// The ring is about to sleep: not for long if there is memory to give back.
    #[inline]
    pub(crate) fn before_sleep(&mut self) {
        if self.memory.freed_large() {
            self.trim_at = Some(sys::now().after(TRIM_AFTER_NS));
        }
    }

    /// The ring has slept. When no large block was in use for long, give their memory back.
    #[inline]
    pub(crate) fn after_sleep(&mut self) {
        if self.trim_at.is_some_and(|at| sys::now() >= at) {
            self.trim_at = None;
            self.memory.trim();
        }
    }
}

/// How long to look for events before sleeping. Doubled, up to a limit, when that found one; halved when it
/// did not: an idle ring soon sleeps at once, save for one short look in 16.
pub(crate) struct Spin {
    max_ns: u64,
    now_ns: u64,
    misses: u32,
}

impl Spin {
    /// The shortest look worth having: two system calls' worth.
    const MIN_NS: u64 = 2_000;

    fn new(poll_us: Option<u32>) -> Spin {
        let max_ns = u64::from(poll_us.unwrap_or(0)) * 1000;
        Spin { max_ns, now_ns: max_ns, misses: 0 }
    }

    /// How long to look this time. 0: not at all.
    pub(crate) fn budget(&mut self) -> u64 {
        if self.now_ns >= Self::MIN_NS || self.max_ns == 0 {
            return self.now_ns;
        }
        self.misses += 1;
        if self.misses.is_multiple_of(16) { Self::MIN_NS.min(self.max_ns) } else { 0 }
    }

    /// Whether the look found something.
    pub(crate) fn learn(&mut self, found: bool) {
        self.now_ns = if found {
            (self.now_ns * 2).clamp(Self::MIN_NS, self.max_ns.max(Self::MIN_NS))
        } else {
            self.now_ns / 2
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spinning_gives_up_when_nothing_comes_and_returns_when_something_does() {
        let mut spin = Spin::new(Some(100));
        assert_eq!(spin.budget(), 100_000);
        (0..20).for_each(|_| spin.learn(false));
        let looks: Vec<_> = (0..32).map(|_| spin.budget()).filter(|budget| *budget > 0).collect();
        assert_eq!(looks, [Spin::MIN_NS; 2]);
        (0..20).for_each(|_| spin.learn(true));
        assert_eq!(spin.budget(), 100_000);
        assert_eq!(Spin::new(None).budget(), 0);
    }
}
