//! A ring that carries nothing: memory for the requests, and a clock that is told the time.

use block::{Region, Segment};
use queue::{FileId, FileOp, IoId, Nanos, Patience, Ring, RingFull};
use std::time::Instant;

/// The requests' own memory.
pub(super) const BUFFERS: Region = Region(0);
/// What reads of a null device are lent; nobody looks at it.
pub(super) const ZEROES: Region = Region(1);

/// Memory that begins on a page, as a ring's regions do; each page is touched.
pub(super) struct Pages {
    memory: Vec<u8>,
    start: usize,
}

impl Pages {
    pub(super) fn new(len: usize) -> Pages {
        const PAGE: usize = 4096;
        let memory = vec![1; len + PAGE];
        let start = memory.as_ptr().align_offset(PAGE);
        Pages { memory, start }
    }

    #[inline]
    pub(super) fn get(&self, at: usize, len: usize) -> &[u8] {
        &self.memory[self.start + at..][..len]
    }

    #[inline]
    pub(super) fn get_mut(&mut self, at: usize, len: usize) -> &mut [u8] {
        &mut self.memory[self.start + at..][..len]
    }
}

pub(crate) struct BenchRing {
    origin: Instant,
    now: Nanos,
    memory: Pages,
}

impl BenchRing {
    pub(super) fn new(memory: usize) -> BenchRing {
        BenchRing { origin: Instant::now(), now: Nanos(0), memory: Pages::new(memory) }
    }

    /// Look at the clock, as a reactor does once a turn.
    pub(super) fn look_at_clock(&mut self) -> Nanos {
        self.now = Nanos(self.origin.elapsed().as_nanos() as u64);
        self.now
    }
}

impl Ring for BenchRing {
    #[inline]
    fn now(&self) -> Nanos {
        self.now
    }

    /// The beginning of all there is: whoever allocates is alone here.
    fn allocate(&mut self, len: u32) -> Option<Segment> {
        Some(Segment { offset: 0, len, region: BUFFERS })
    }

    fn free(&mut self, _: Segment) {}

    #[inline]
    fn bytes(&self, segment: Segment) -> &[u8] {
        debug_assert_eq!(segment.region, BUFFERS);
        self.memory.get(segment.offset as usize, segment.len as usize)
    }

    #[inline]
    fn bytes_mut(&mut self, segment: Segment) -> &mut [u8] {
        debug_assert_eq!(segment.region, BUFFERS);
        self.memory.get_mut(segment.offset as usize, segment.len as usize)
    }

    fn try_now(&mut self, _: FileId, _: FileOp, _: &[Segment], _: Patience) -> Option<i64> {
        None
    }

    fn start(&mut self, _: IoId, _: FileId, _: FileOp, _: &[Segment]) -> Result<(), RingFull> {
        Err(RingFull)
    }

    fn timer(&mut self, id: IoId, _: Nanos) {
        unreachable!("{id:?} set a timer")
    }

    fn cancel(&mut self, _: IoId) {}
}
