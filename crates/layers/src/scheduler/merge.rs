//! Whether requests that touch may go down as one: arithmetic on limits, without a queue.
//!
//! Source of the rules: `blk_rq_merge_ok`, `ll_back_merge_fn`, `ll_front_merge_fn`, `req_gap_back_merge` and
//! `blk_rq_get_max_sectors` in the kernel's block/blk-merge.c. As there, the segments of merged requests are added up,
//! also where memory follows on memory.

use block::{Op, QueueLimits, Segment};

/// Entries of the segment table that one merged request has: what one vectored operation takes.
pub(super) const PIECES_MAX: u32 = 64;

/// What a lender lends at once for sure, which is 32 MiB for a device of zeroes.
const LENT_MAX: u64 = 16 << 20;

/// The memory of a group, as far as merging asks.
#[derive(Clone, Copy, Debug)]
pub(super) struct Memory {
    segments: u32,
    /// Where its first piece begins, and its last ends.
    first: u64,
    end: u64,
    pub(super) mergeable: bool,
    /// There is none: it is to be lent some.
    pub(super) lent: bool,
}

impl Memory {
    pub(super) const NONE: Memory = Memory { segments: 0, first: 0, end: 0, mergeable: false, lent: false };
    /// That of a request which needs none.
    pub(super) const UNNEEDED: Memory = Memory { mergeable: true, ..Memory::NONE };
    /// That of a read that is to be lent some.
    pub(super) const LENT: Memory = Memory { lent: true, ..Memory::UNNEEDED };

    /// That of both, one behind the other.
    pub(super) fn followed_by(&self, behind: &Memory) -> Memory {
        Memory { segments: self.segments + behind.segments, first: self.first, end: behind.end, ..*self }
    }
}

/// The limits that merged requests are held to. Those of what stands below.
#[derive(Clone, Debug)]
pub(super) struct Rules {
    max: u64,
    max_discard: u64,
    /// 0: none.
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
            // As long as a discard is cut to, which is whole granules.
            max_discard: limits.max_discard_sectors.bytes().align_down(granule).0,
            chunk: limits.chunk_sectors.bytes().0,
            max_segments: u32::from(limits.max_segments).min(PIECES_MAX),
            max_segment_size: limits.max_segment_size.0.max(1),
            seg_boundary_mask: limits.seg_boundary_mask,
            virt_boundary_mask: limits.virt_boundary_mask,
        }
    }

    /// What a request's memory comes to. `false` from `reachable`: only the kernel can reach that piece.
    pub(super) fn memory(
        &self,
        pieces: impl Iterator<Item = Segment>,
        reachable: impl Fn(Segment) -> bool,
    ) -> Memory {
        let mut memory = Memory::UNNEEDED;
        for piece in pieces {
            if memory.segments == 0 {
                memory.first = piece.offset;
            }
            memory.end = piece.offset + u64::from(piece.len);
            memory.mergeable &= reachable(piece);
            memory.segments += self.segments(piece);
        }
        memory.mergeable &= memory.segments < self.max_segments.max(1);
        memory
    }

    /// How many segments one piece of memory is.
    fn segments(&self, piece: Segment) -> u32 {
        let len = u64::from(piece.len);
        let last = (piece.offset + len).saturating_sub(1);
        if len <= self.max_segment_size && (piece.offset ^ last) & !self.seg_boundary_mask == 0 {
            return 1;
        }
        let (mut count, mut taken) = (0, 0);
        while taken < len {
            let to_boundary = self.seg_boundary_mask - (self.seg_boundary_mask & (piece.offset + taken));
            taken += (to_boundary.min(self.max_segment_size - 1) + 1).min(len - taken);
            count += 1;
        }
        count
    }

    /// Whether requests of that operation from `start` to `end` may be one, with that memory one behind the other.
    pub(super) fn admit(&self, op: Op, start: u64, end: u64, ahead: &Memory, behind: &Memory) -> bool {
        let mergeable = ahead.mergeable && behind.mergeable && ahead.lent == behind.lent;
        let max = match op {
            Op::Discard => return end - start <= self.max_discard && mergeable,
            _ if ahead.lent && end - start > LENT_MAX => return false,
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

    fn piece(offset: u64, len: u32) -> Segment {
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
        let memory = |piece| rules.memory(std::iter::once(piece), |_| true);
        let len = u64::from(ahead.len + behind.len);
        rules.admit(Op::Read, 0, len, &memory(ahead), &memory(behind))
    }

    #[test]
    fn merged_requests_keep_to_max_sectors_and_chunks() {
        let plain = rules(|limits| limits.max_user_sectors = Sectors(16));
        assert!(admits(&plain, piece(0, 4096), piece(4096, 4096)));
        assert!(!admits(&plain, piece(0, 4096), piece(4096, 4608)));
        let chunks = rules(|limits| limits.chunk_sectors = Sectors(16));
        let none = Memory::UNNEEDED;
        assert!(chunks.admit(Op::Write, 8192, 16384, &none, &none));
        assert!(!chunks.admit(Op::Write, 4096, 12288, &none, &none), "it would cross a chunk");
        assert!(chunks.admit(Op::Discard, 4096, 12288, &none, &none), "chunks do not matter to a discard");
        assert!(!chunks.admit(Op::Discard, 0, (1 << 20) + 512, &none, &none));
    }

    #[test]
    fn merged_requests_keep_to_max_segments_and_gaps() {
        let few = rules(|limits| limits.max_segments = 2);
        assert!(admits(&few, piece(0, 512), piece(9000, 512)));
        let sized = rules(|limits| {
            (limits.max_segments, limits.max_segment_size) = (3, Bytes(4096));
        });
        assert!(!admits(&sized, piece(0, 8192), piece(8192, 8192)), "four segments of 4 KiB");
        let gaps = rules(|limits| limits.virt_boundary_mask = 4095);
        assert!(admits(&gaps, piece(512, 3584), piece(8192, 512)));
        assert!(!admits(&gaps, piece(0, 512), piece(8192, 512)), "it ends within a page");
        assert!(!admits(&gaps, piece(0, 4096), piece(512, 512)), "it begins within a page");
    }

    #[test]
    fn memory_that_only_the_kernel_reaches_is_not_merged() {
        let rules = rules(|_| ());
        assert!(!rules.memory(std::iter::once(piece(0, 512)), |_| false).mergeable);
    }

    #[test]
    fn pieces_are_counted_as_segments_by_size_and_boundary() {
        let sized = rules(|limits| limits.max_segment_size = Bytes(4096));
        assert_eq!(sized.segments(piece(100, 4096)), 1);
        assert_eq!(sized.segments(piece(100, 4097)), 2);
        let bounded = rules(|limits| limits.seg_boundary_mask = 0xffff);
        assert_eq!(bounded.segments(piece(0xf000, 0x1000)), 1);
        assert_eq!(bounded.segments(piece(0xf000, 0x1001)), 2);
    }
}
