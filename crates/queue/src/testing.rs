//! A ring in memory, for the unit tests of nodes: time that moves when a test says so, memory, timers, and
//! files if the test has some.
//!
//! Seeded faults on all paths are the simulation's part (`sim::SimRing`).

use crate::{Blocking, FileId, FileOp, IoId, Nanos, Ring, RingFull};
use block::{Cookie, Region, Segment};

/// Files of a [`TestRing`]. The default has none: nothing can be done at once, and nothing can be started.
pub trait TestFiles: Default {
    /// See [`Ring::try_now`].
    fn try_now(
        &mut self,
        memory: &mut TestMemory,
        file: FileId,
        op: FileOp,
        data: &[Segment],
        blocking: Blocking,
    ) -> Option<i64> {
        let _ = (memory, file, op, data, blocking);
        None
    }

    /// See [`Ring::try_batched`].
    fn try_batched(
        &mut self,
        id: IoId,
        file: FileId,
        op: FileOp,
        data: &[Segment],
        blocking: Blocking,
    ) -> bool {
        let _ = (id, file, op, data, blocking);
        false
    }

    /// See [`Ring::batch_ns`].
    fn batch_ns(&self) -> u64 {
        0
    }

    /// See [`Ring::start`].
    ///
    /// # Errors
    /// [`RingFull`]: nothing was started.
    fn start(&mut self, id: IoId, file: FileId, op: FileOp, data: &[Segment]) -> Result<(), RingFull> {
        let _ = (id, file, op, data);
        Err(RingFull)
    }

    /// See [`Ring::is_opaque`].
    fn is_opaque(&self, segment: Segment) -> bool {
        let _ = segment;
        false
    }
}

/// No files.
#[derive(Debug, Default)]
pub struct NoFiles;

impl TestFiles for NoFiles {}

/// Memory of a [`TestRing`]: a region for each allocation. Fresh memory is filled with 0xEE.
#[derive(Debug, Default)]
pub struct TestMemory {
    regions: Vec<Vec<u8>>,
    /// Allocations that were not freed yet.
    pub live: isize,
    /// So many further allocations fail.
    pub short: u32,
}

impl TestMemory {
    /// Allocates memory that belongs to the test itself, and is not counted as live.
    pub fn own(&mut self, len: u32) -> Segment {
        self.regions.push(vec![0xEE; len as usize]);
        Segment { offset: 0, len, region: Region(self.regions.len() as u16 - 1) }
    }

    /// See [`Ring::bytes`].
    pub fn bytes(&self, segment: Segment) -> &[u8] {
        let at = segment.offset as usize;
        &self.regions[usize::from(segment.region.0)][at..at + segment.len as usize]
    }

    /// See [`Ring::bytes_mut`].
    pub fn bytes_mut(&mut self, segment: Segment) -> &mut [u8] {
        let at = segment.offset as usize;
        &mut self.regions[usize::from(segment.region.0)][at..at + segment.len as usize]
    }
}

/// `ECANCELED` of Linux, as a result.
const CANCELED: i64 = -125;

/// A timer that was set and has not ended.
#[derive(Clone, Copy, Debug)]
struct Timer {
    at: Nanos,
    id: IoId,
    is_cancelled: bool,
}

/// A ring in memory.
#[derive(Debug, Default)]
pub struct TestRing<F = NoFiles> {
    /// The time.
    pub now: Nanos,
    /// Memory of the ring's requests.
    pub memory: TestMemory,
    /// Files of the ring.
    pub files: F,
    /// Requests that were to be cancelled, in order.
    pub cancelled: Vec<Cookie>,
    timers: Vec<Timer>,
}

impl<F: TestFiles> TestRing<F> {
    /// Returns a ring at that time.
    pub fn at(now: Nanos) -> TestRing<F> {
        TestRing { now, ..TestRing::default() }
    }

    /// Number of timers that are set.
    pub fn timers(&self) -> usize {
        self.timers.len()
    }

    /// Ends the first timer that is due at `until` or before, and advances the clock to it. Returns its name,
    /// and the result to complete it with: 0, or `-ECANCELED` if it was cancelled.
    pub fn end_timer(&mut self, until: Nanos) -> Option<(IoId, i64)> {
        let (index, _) = self.timers.iter().enumerate().min_by_key(|(_, timer)| timer.at)?;
        if self.timers[index].at > until {
            return None;
        }
        let Timer { at, id, is_cancelled } = self.timers.remove(index);
        self.now = self.now.max(at);
        Some((id, if is_cancelled { CANCELED } else { 0 }))
    }
}

impl<F: TestFiles> Ring for TestRing<F> {
    fn now(&self) -> Nanos {
        self.now
    }

    fn allocate(&mut self, len: u32) -> Option<Segment> {
        if let Some(left) = self.memory.short.checked_sub(1) {
            self.memory.short = left;
            return None;
        }
        self.memory.live += 1;
        Some(self.memory.own(len))
    }

    fn free(&mut self, segment: Segment) {
        self.memory.live -= 1;
        self.memory.regions[usize::from(segment.region.0)] = Vec::new();
    }

    fn bytes(&self, segment: Segment) -> &[u8] {
        self.memory.bytes(segment)
    }

    fn bytes_mut(&mut self, segment: Segment) -> &mut [u8] {
        self.memory.bytes_mut(segment)
    }

    fn is_opaque(&self, segment: Segment) -> bool {
        self.files.is_opaque(segment)
    }

    fn try_now(&mut self, file: FileId, op: FileOp, data: &[Segment], blocking: Blocking) -> Option<i64> {
        self.files.try_now(&mut self.memory, file, op, data, blocking)
    }

    fn try_batched(
        &mut self,
        id: IoId,
        file: FileId,
        op: FileOp,
        data: &[Segment],
        blocking: Blocking,
    ) -> bool {
        self.files.try_batched(id, file, op, data, blocking)
    }

    fn batch_ns(&self) -> u64 {
        self.files.batch_ns()
    }

    fn start(&mut self, id: IoId, file: FileId, op: FileOp, data: &[Segment]) -> Result<(), RingFull> {
        self.files.start(id, file, op, data)
    }

    fn timer(&mut self, id: IoId, at: Nanos) {
        self.timers.push(Timer { at, id, is_cancelled: false });
    }

    fn cancel(&mut self, id: IoId) {
        self.cancelled.push(id.cookie);
        for timer in self.timers.iter_mut().filter(|timer| timer.id == id) {
            (timer.at, timer.is_cancelled) = (timer.at.min(self.now), true);
        }
    }
}
