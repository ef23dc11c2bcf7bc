//! Memory that detects misuse: every allocation is a separate region, filled with a pattern when it is
//! allocated, invalid once it is freed, and pinned while an operation in flight uses it.

use crate::Rng;
use block::{Region, Segment};
use std::collections::VecDeque;

/// Content of fresh memory: a read that completes without filling its memory yields this as garbage.
const FRESH: u8 = 0xA5;
/// Number of regions that are freed before a region number is reused, so that a stale segment is invalid.
const QUARANTINE: usize = 256;

#[derive(Debug)]
struct Chunk {
    bytes: Vec<u8>,
    /// The allocation; the bytes of the region before it must not be used.
    whole: Segment,
    live: bool,
    pins: u32,
}

/// All memory of a simulated ring.
#[derive(Default, Debug)]
pub(crate) struct Arena {
    chunks: Vec<Chunk>,
    retired: VecDeque<u16>,
    live: usize,
}

impl Arena {
    /// Allocates `len` bytes: a page or more at offset 0 of its region, less at a random multiple of 64
    /// bytes.
    pub(crate) fn allocate(&mut self, len: u32, rng: &mut Rng) -> Segment {
        assert!(len > 0 && len <= 32 << 20, "allocate({len}): 1 byte to 32 MiB");
        let offset = if len < 4096 { rng.below(64) * 64 } else { 0 };
        let rested = if self.retired.len() > QUARANTINE { self.retired.pop_front() } else { None };
        let number = rested.unwrap_or_else(|| {
            u16::try_from(self.chunks.len()).expect("fewer than 65536 regions are in use")
        });
        let whole = Segment { offset, len, region: Region(number) };
        let bytes = vec![FRESH; offset as usize + len as usize];
        let chunk = Chunk { bytes, whole, live: true, pins: 0 };
        match self.chunks.get_mut(usize::from(number)) {
            Some(slot) => *slot = chunk,
            None => self.chunks.push(chunk),
        }
        self.live += 1;
        whole
    }

    /// Frees a whole allocation.
    pub(crate) fn free(&mut self, segment: Segment) {
        let chunk = self.chunk(segment);
        assert_eq!(chunk.whole, segment, "free of a part of an allocation");
        assert_eq!(chunk.pins, 0, "free of {segment:?} while an operation uses it");
        let chunk = &mut self.chunks[usize::from(segment.region.0)];
        chunk.live = false;
        chunk.bytes = Vec::new();
        self.retired.push_back(segment.region.0);
        self.live -= 1;
    }

    pub(crate) fn bytes(&self, segment: Segment) -> &[u8] {
        if segment.len == 0 {
            return &[];
        }
        let chunk = self.chunk(segment);
        &chunk.bytes[segment.offset as usize..segment.offset as usize + segment.len as usize]
    }

    pub(crate) fn bytes_mut(&mut self, segment: Segment) -> &mut [u8] {
        if segment.len == 0 {
            return &mut [];
        }
        self.chunk(segment);
        let chunk = &mut self.chunks[usize::from(segment.region.0)];
        &mut chunk.bytes[segment.offset as usize..segment.offset as usize + segment.len as usize]
    }

    /// Records the start (`true`) or end (`false`) of an operation on this memory.
    pub(crate) fn pin(&mut self, segment: Segment, pin: bool) {
        if segment.len > 0 {
            self.chunk(segment);
            let pins = &mut self.chunks[usize::from(segment.region.0)].pins;
            *pins = if pin { *pins + 1 } else { pins.checked_sub(1).expect("pins are paired") };
        }
    }

    /// Returns the number of allocations that were not freed.
    pub(crate) fn live(&self) -> usize {
        self.live
    }

    /// Frees all memory after a power cut, regardless of its owner.
    pub(crate) fn clear(&mut self) {
        for (number, chunk) in self.chunks.iter_mut().enumerate().filter(|(_, chunk)| chunk.live) {
            (chunk.live, chunk.pins, chunk.bytes) = (false, 0, Vec::new());
            self.retired.push_back(number as u16);
        }
        self.live = 0;
    }

    fn chunk(&self, segment: Segment) -> &Chunk {
        let Some(chunk) = self.chunks.get(usize::from(segment.region.0)) else {
            panic!("{segment:?} names no memory")
        };
        assert!(chunk.live, "{segment:?} was freed");
        let (start, whole) = (segment.offset, chunk.whole);
        let inside =
            start >= whole.offset && start + u64::from(segment.len) <= whole.offset + u64::from(whole.len);
        assert!(inside, "{segment:?} leaves its allocation {whole:?}");
        chunk
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn arena() -> (Arena, Rng) {
        (Arena::default(), Rng::new(1))
    }

    #[test]
    fn memory_is_filled_when_given_out_and_counted() {
        let (mut arena, mut rng) = arena();
        let segment = arena.allocate(512, &mut rng);
        assert!(arena.bytes(segment).iter().all(|&byte| byte == FRESH));
        arena.bytes_mut(segment)[511] = 1;
        assert_eq!((arena.bytes(segment)[511], arena.live()), (1, 1));
        arena.free(segment);
        assert_eq!(arena.live(), 0);
    }

    #[test]
    fn allocations_from_a_page_on_are_page_aligned() {
        let (mut arena, mut rng) = arena();
        assert!((0..50).all(|_| arena.allocate(4096, &mut rng).offset == 0));
        assert!((0..50).any(|_| arena.allocate(512, &mut rng).offset != 0));
    }

    #[test]
    fn region_numbers_are_reused_after_a_while() {
        let (mut arena, mut rng) = arena();
        for _ in 0..70_000 {
            let segment = arena.allocate(64, &mut rng);
            arena.free(segment);
        }
        assert!(arena.chunks.len() <= QUARANTINE + 2);
    }

    #[test]
    #[should_panic(expected = "was freed")]
    fn use_after_free_panics() {
        let (mut arena, mut rng) = arena();
        let segment = arena.allocate(512, &mut rng);
        arena.free(segment);
        arena.bytes(segment);
    }

    #[test]
    #[should_panic(expected = "was freed")]
    fn double_free_panics() {
        let (mut arena, mut rng) = arena();
        let segment = arena.allocate(512, &mut rng);
        arena.free(segment);
        arena.free(segment);
    }

    #[test]
    #[should_panic(expected = "leaves its allocation")]
    fn a_segment_that_is_too_long_panics() {
        let (mut arena, mut rng) = arena();
        let segment = arena.allocate(4096, &mut rng);
        arena.bytes(Segment { len: 4097, ..segment });
    }

    #[test]
    #[should_panic(expected = "while an operation uses it")]
    fn freeing_memory_under_an_operation_panics() {
        let (mut arena, mut rng) = arena();
        let segment = arena.allocate(4096, &mut rng);
        arena.pin(segment, true);
        arena.free(segment);
    }
}
