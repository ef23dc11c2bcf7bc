//! State shared by both engines: memory, files, timers, the clock and pending events. Owned by a ring, on its
//! thread.

use crate::batch::Batch;
use crate::batching::Batching;
use crate::chunks::Chunks;
use crate::config::{Event, RingConfig};
use crate::files::{File, Files};
use crate::memory::Memory;
use crate::ops::{Ops, Origin};
use crate::poll::AdaptivePoll;
use crate::sys;
use crate::timers::Timers;
use crate::waker::{WOKEN, Waker};
use queue::{IoId, Nanos};
use std::collections::VecDeque;
use std::io;

/// The engine-independent parts of a ring.
pub(crate) struct Core {
    pub(crate) memory: Memory,
    pub(crate) chunks: Chunks,
    pub(crate) files: Files,
    pub(crate) timers: Timers,
    pub(crate) ops: Ops,
    pub(crate) events: VecDeque<Event>,
    pub(crate) waker: Waker,
    pub(crate) now: Nanos,
    pub(crate) spin: AdaptivePoll,
    pub(crate) batching: Batching,
    /// Inline operations that the next turn performs.
    pub(crate) batch: Batch,
    /// Number of operations and sends started so far; orders them against the removal of memory.
    pub(crate) started: u64,
    /// When free memory is returned to the system, unless more is freed before. `None`: nothing to return.
    trim_at: Option<Nanos>,
}

/// Delay between freeing the last large block and returning such blocks to the system: longer than the pauses
/// of an active client, so that its pages are not faulted in again and again.
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
            spin: AdaptivePoll::new(u64::from(config.poll_us.unwrap_or(0)) * 1000),
            batching: Batching::new(sys::now(), sys::is_scheduled_plainly()),
            batch: Batch::default(),
            started: 0,
            trim_at: None,
        })
    }

    /// Queues the completion of a node's operation.
    #[inline]
    pub(crate) fn io_event(&mut self, id: IoId, result: i64) {
        self.events.push_back(Event::Io { queue: id.queue, cookie: id.cookie, result });
    }

    /// Completes a file operation. Returns the file if it was removed and this was its last operation.
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

    /// Queues completions for the timers that are due.
    #[inline]
    pub(crate) fn expire_timers(&mut self) {
        while let Some(id) = self.timers.due(self.now) {
            self.io_event(id, 0);
        }
    }

    /// Takes the bits that the waker raised.
    pub(crate) fn take_woken(&mut self) -> u32 {
        let bits = self.waker.take();
        if bits & WOKEN != 0 {
            self.events.push_back(Event::Woken);
        }
        bits
    }

    /// Longest time to sleep in nanoseconds: `None` without limit. Reads the clock if there is a timer.
    pub(crate) fn sleep_max(&mut self) -> Option<u64> {
        let next = self.timers.next().into_iter().chain(self.trim_at).min()?;
        self.now = sys::now();
        Some(next.since(self.now))
    }

    /// Called before sleeping: schedules the return of free memory.
    #[inline]
    pub(crate) fn before_sleep(&mut self) {
        if self.memory.freed_large() {
            self.trim_at = Some(sys::now().after(TRIM_AFTER_NS));
        }
    }

    /// Called after sleeping: returns free memory if no large block was freed for long.
    #[inline]
    pub(crate) fn after_sleep(&mut self) {
        if self.trim_at.is_some_and(|at| sys::now() >= at) {
            self.trim_at = None;
            self.memory.trim();
        }
    }
}
