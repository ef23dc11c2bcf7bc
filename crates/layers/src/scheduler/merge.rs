//! Decides whether adjacent requests may be merged: arithmetic on limits, without a queue.
//!
//! Source of the rules: `blk_rq_merge_ok`, `ll_back_merge_fn`, `ll_front_merge_fn`, `req_gap_back_merge` and
//! `blk_rq_get_max_sectors` in the kernel's block/blk-merge.c. As in the kernel, segment counts of merged
//! requests are added, even if their memory is contiguous.

use block::{Op, QueueLimits, Segment};

/// Entries of the segment table for one merged request: the most that one vectored operation takes.
pub(super) const SEGMENTS_MAX: u32 = 64;

/// Longest read in bytes that every zero-copy backend answers at once (a zero device: up to 32 MiB).
const ZERO_COPY_MAX: u64 = 16 << 20;

/// The memory of a group, as far as merging needs it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Memory {
    segments: u32,
    /// The address of the first segment, and the end of the last one.
    first: u64,
    end: u64,
    pub(super) mergeable: bool,
    /// Whether the backend answers with memory of its own (zero-copy).
    pub(super) zero_copy: bool,
}

impl Memory {
    pub(super) const NONE: Memory =
        Memory { segments: 0, first: 0, end: 0, mergeable: false, zero_copy: false };
    /// The memory of a request that needs none.
    pub(super) const UNNEEDED: Memory = Memory { mergeable: true, ..Memory::NONE };
    /// The memory of a read that may be answered zero-copy.
    pub(super) const ZERO_COPY: Memory = Memory { zero_copy: true, ..Memory::UNNEEDED };

    /// Returns the memory of both, one behind the other.
    pub(super) fn followed_by(&self, behind: &Memory) -> Memory {
        Memory { segments: self.segments + behind.segments, first: self.first, end: behind.end, ..*self }
    }
}

/// The limits of the device below, which merged requests keep.
#[derive(Clone, Debug)]
pub(super) struct Rules {
    max: u64,
    max_discard: u64,
    /// Chunk size (`chunk_sectors`); 0: no chunk limit.
    chunk: u64,
    max_segments: u32,
    max_segment_size: u64,
    seg_boundary_mask: u64,
    virt_boundary_mask: u64,
}

impl Rules {
    pub(super) fn new(limits: &QueueLimits) -> Rules {
        let granule = limits.discard_granularity.0.max(512);
        Rules {
            max: limits.max_sectors.bytes().0,
            // Whole granules, as in the split rules.
            max_discard: limits.max_discard_sectors.bytes().align_down(granule).0,
            chunk: limits.chunk_sectors.bytes().0,
            max_segments: u32::from(limits.max_segments).min(SEGMENTS_MAX),
            max_segment_size: limits.max_segment_size.0.max(1),
            seg_boundary_mask: limits.seg_boundary_mask,
            virt_boundary_mask: limits.virt_boundary_mask,
        }
    }

    /// Summarises a request's memory. `reachable` returns `false` for memory that only the kernel can access.
    pub(super) fn memory(
        &self,
        segments: impl Iterator<Item = Segment>,
        reachable: impl Fn(Segment) -> bool,
    ) -> Memory {
        let mut memory = Memory::UNNEEDED;
        for segment in segments {
            if memory.segments == 0 {
                memory.first = segment.offset;
            }
            memory.end = segment.offset + u64::from(segment.len);
            memory.mergeable &= reachable(segment);
            memory.segments += self.segments(segment);
        }
        memory.mergeable &= memory.segments < self.max_segments.max(1);
        memory
    }

    /// Returns how many segments a contiguous segment of memory counts as.
    fn segments(&self, segment: Segment) -> u32 {
        let len = u64::from(segment.len);
        let last = (segment.offset + len).saturating_sub(1);
        if len <= self.max_segment_size && (segment.offset ^ last) & !self.seg_boundary_mask == 0 {
            return 1;
        }
        let (mut count, mut taken) = (0, 0);
        while taken < len {
            let to_boundary = self.seg_boundary_mask - (self.seg_boundary_mask & (segment.offset + taken));
            taken += (to_boundary.min(self.max_segment_size - 1) + 1).min(len - taken);
            count += 1;
        }
        count
    }

    /// Returns whether requests of an operation may be merged to one from `start` to `end` with this memory.
    pub(super) fn admit(&self, op: Op, start: u64, end: u64, ahead: &Memory, behind: &Memory) -> bool {
        let mergeable = ahead.mergeable && behind.mergeable && ahead.zero_copy == behind.zero_copy;
        let max = match op {
            Op::Discard => return end - start <= self.max_discard && mergeable,
            _ if ahead.zero_copy && end - start > ZERO_COPY_MAX => return false,
            _ if self.chunk == 0 => self.max,
            _ => self.max.min(self.chunk - start % self.chunk),
        };
        end - start <= max
            && mergeable
            && ahead.segments + behind.segments <= self.max_segments
            && (ahead.end | behind.first) & self.virt_boundary_mask == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use block::{Bytes, Region, Sectors};

    fn segment(offset: u64, len: u32) -> Segment {
        Segment { offset, len, region: Region(1) }
    }

    fn rules(change: impl Fn(&mut QueueLimits)) -> Rules {
        let (max_hw_sectors, max_hw_discard_sectors) = (Sectors(2560), Sectors(2048));
        let mut limits = QueueLimits { max_hw_sectors, max_hw_discard_sectors, ..QueueLimits::default() };
        change(&mut limits);
        limits.validate().unwrap();
        Rules::new(&limits)
    }

    fn admits(rules: &Rules, ahead: Segment, behind: Segment) -> bool {
        let memory = |segment| rules.memory(std::iter::once(segment), |_| true);
        let len = u64::from(ahead.len + behind.len);
        rules.admit(Op::Read, 0, len, &memory(ahead), &memory(behind))
    }

    #[test]
    fn merged_requests_stay_within_max_sectors_and_chunks() {
        let plain = rules(|limits| limits.max_user_sectors = Sectors(16));
        assert!(admits(&plain, segment(0, 4096), segment(4096, 4096)));
        assert!(!admits(&plain, segment(0, 4096), segment(4096, 4608)));
        let chunks = rules(|limits| limits.chunk_sectors = Sectors(16));
        let none = Memory::UNNEEDED;
        assert!(chunks.admit(Op::Write, 8192, 16384, &none, &none));
        assert!(!chunks.admit(Op::Write, 4096, 12288, &none, &none), "it would cross a chunk");
        assert!(chunks.admit(Op::Discard, 4096, 12288, &none, &none), "chunks do not limit discards");
        assert!(!chunks.admit(Op::Discard, 0, (1 << 20) + 512, &none, &none));
    }

    #[test]
    fn merged_requests_stay_within_max_segments_and_gaps() {
        let few = rules(|limits| limits.max_segments = 2);
        assert!(admits(&few, segment(0, 512), segment(9000, 512)));
        let sized = rules(|limits| {
            (limits.max_segments, limits.max_segment_size) = (3, Bytes(4096));
        });
        assert!(!admits(&sized, segment(0, 8192), segment(8192, 8192)), "four segments of 4 KiB");
        let gaps = rules(|limits| limits.virt_boundary_mask = 4095);
        assert!(admits(&gaps, segment(512, 3584), segment(8192, 512)));
        assert!(!admits(&gaps, segment(0, 512), segment(8192, 512)), "it ends within a page");
        assert!(!admits(&gaps, segment(0, 4096), segment(512, 512)), "it begins within a page");
    }

    #[test]
    fn memory_that_only_the_kernel_can_access_is_not_merged() {
        let rules = rules(|_| ());
        assert!(!rules.memory(std::iter::once(segment(0, 512)), |_| false).mergeable);
    }

    #[test]
    fn contiguous_memory_counts_as_segments_by_size_and_boundary() {
        let sized = rules(|limits| limits.max_segment_size = Bytes(4096));
        assert_eq!(sized.segments(segment(100, 4096)), 1);
        assert_eq!(sized.segments(segment(100, 4097)), 2);
        let bounded = rules(|limits| limits.seg_boundary_mask = 0xffff);
        assert_eq!(bounded.segments(segment(0xf000, 0x1000)), 1);
        assert_eq!(bounded.segments(segment(0xf000, 0x1001)), 2);
    }
}
