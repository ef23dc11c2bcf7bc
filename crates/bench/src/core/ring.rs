//! A ring without I/O: memory for the requests, and a clock that is set by calls.

use block::{Region, Segment};
use memmap2::{Advice, MmapMut};
use queue::{Blocking, FileId, FileOp, IoId, Nanos, Ring, RingFull};
use std::time::Instant;

/// The region of the requests' own memory.
pub(super) const BUFFERS: Region = Region(0);
/// The region of zero-copy memory for reads of a null device; it is never accessed.
pub(super) const ZEROES: Region = Region(1);

/// Page-aligned memory, like a ring's regions, with all pages populated.
pub(super) struct Pages {
    memory: MmapMut,
}

impl Pages {
    /// Allocates `len` bytes; `huge`: in pages of 2 MiB if the kernel has them, else in pages of 4 KiB.
    pub(super) fn new(len: usize, huge: bool) -> Pages {
        let mut memory = MmapMut::map_anon(len).expect("memory for a disk");
        // A kernel without huge pages refuses: then the pages are small, like those of a RAM disk.
        let _ = memory.advise(if huge { Advice::HugePage } else { Advice::NoHugePage });
        memory.fill(1);
        Pages { memory }
    }

    #[inline]
    pub(super) fn get(&self, at: usize, len: usize) -> &[u8] {
        &self.memory[at..][..len]
    }

    #[inline]
    pub(super) fn get_mut(&mut self, at: usize, len: usize) -> &mut [u8] {
        &mut self.memory[at..][..len]
    }
}

pub(crate) struct BenchRing {
    origin: Instant,
    now: Nanos,
    memory: Pages,
}

impl BenchRing {
    pub(super) fn new(memory: usize) -> BenchRing {
        BenchRing { origin: Instant::now(), now: Nanos(0), memory: Pages::new(memory, false) }
    }

    /// Reads the clock, as a reactor does once a turn.
    pub(super) fn read_clock(&mut self) -> Nanos {
        self.now = Nanos(self.origin.elapsed().as_nanos() as u64);
        self.now
    }
}

impl Ring for BenchRing {
    #[inline]
    fn now(&self) -> Nanos {
        self.now
    }

    /// Returns the beginning of the memory, since it has only one user.
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

    fn try_now(&mut self, _: FileId, _: FileOp, _: &[Segment], _: Blocking) -> Option<i64> {
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
