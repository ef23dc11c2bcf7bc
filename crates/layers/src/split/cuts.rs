//! Where a request is cut: arithmetic on bytes, without a queue.
//!
//! Source of the rules: `get_max_io_size`, `bio_split_io_at`, `bio_split_discard` and
//! `bio_split_write_zeroes` in the kernel's block/blk-merge.c. Each function answers with the length of the
//! first piece: all of it when no cut is needed, 0 when no cut is allowed where one is needed. The place of a
//! segment in its region stands for its address: regions begin on a page.

use block::{Data, QueueLimits, Request, Segment};

/// Queue limits in the form that cutting wants: bytes throughout.
#[derive(Debug)]
pub(crate) struct Cuts {
    /// A request with its memory in one piece, no longer than this, that starts on a physical block needs no
    /// look at anything else.
    whole: u64,
    /// The bits of an offset within a physical block.
    within_block: u64,
    max: u64,
    max_write_zeroes: u64,
    /// 0: the device takes none.
    max_zone_append: u64,
    /// 0: none.
    chunk: u64,
    logical_block: u64,
    physical_block: u64,
    max_segments: u32,
    max_segment_size: u64,
    seg_boundary_mask: u64,
    virt_boundary_mask: u64,
    /// A multiple of the granularity; 0: discards are not cut.
    max_discard: u64,
    discard_granularity: u64,
    discard_alignment: u64,
}

impl Cuts {
    pub(crate) fn new(limits: &QueueLimits) -> Cuts {
        let discard_granularity = limits.discard_granularity.0.max(512);
        let max_discard = limits.max_discard_sectors.bytes().0;
        let mut cuts = Cuts {
            whole: 0,
            within_block: limits.physical_block_size.0 - 1,
            max: limits.max_sectors.bytes().0,
            max_write_zeroes: limits.max_write_zeroes_sectors.bytes().0,
            max_zone_append: limits.max_zone_append_sectors.bytes().0,
            chunk: limits.chunk_sectors.bytes().0,
            logical_block: limits.logical_block_size.0,
            physical_block: limits.physical_block_size.0,
            max_segments: limits.max_segments.into(),
            max_segment_size: limits.max_segment_size.0,
            seg_boundary_mask: limits.seg_boundary_mask,
            virt_boundary_mask: limits.virt_boundary_mask,
            max_discard: max_discard - max_discard % discard_granularity,
            discard_granularity,
            discard_alignment: limits.discard_alignment.0 % discard_granularity,
        };
        cuts.whole = cuts.surely_whole();
        cuts
    }

    /// The longest request that is whole on whichever physical block it starts. One piece of memory as long
    /// as a segment may be comes to two segments at most, when it lies across a segment boundary.
    fn surely_whole(&self) -> u64 {
        if self.chunk != 0 || self.max_segments < 2 {
            return 0;
        }
        let unlimited = |limit: u64| if limit == 0 { u64::MAX } else { limit };
        self.most_from(0, self.max)
            .min(unlimited(self.most_from(0, self.max_write_zeroes)))
            .min(unlimited(self.max_discard))
            .min(self.max_segment_size)
            .min(self.seg_boundary_mask)
    }

    #[inline]
    pub(crate) fn is_surely_whole(&self, req: &Request) -> bool {
        req.len.0 <= self.whole && req.offset.0 & self.within_block == 0 && matches!(req.data, Data::One(_))
    }

    /// The most that one request from `offset` may carry (BLK-1): it ends on a physical block if it can, else
    /// on a logical one.
    fn most_from(&self, offset: u64, max: u64) -> u64 {
        let chunk_left = if self.chunk == 0 { u64::MAX } else { self.chunk - offset % self.chunk };
        let max = max.min(chunk_left);
        let start = offset & (self.physical_block - 1);
        let end = (start + max) & !(self.physical_block - 1);
        if end > start { end - start } else { max & !(self.logical_block - 1) }
    }

    /// A read or a write of `len` bytes whose memory is `segments` (BLK-1, BLK-2).
    pub(crate) fn data(&self, offset: u64, segments: impl Iterator<Item = Segment>, len: u64) -> u64 {
        let most = self.most_from(offset, self.max);
        let (mut count, mut bytes) = (0u32, 0u64);
        let mut last_end = None;
        for segment in segments {
            let gap = last_end.is_some_and(|end: u64| (end | segment.offset) & self.virt_boundary_mask != 0);
            if gap || !self.take(segment, most, &mut count, &mut bytes) {
                let end = (offset + bytes) & !(self.logical_block - 1);
                return end.saturating_sub(offset);
            }
            last_end = Some(segment.offset + u64::from(segment.len));
        }
        len
    }

    /// A zone append of `len` bytes (BLK-5): all of it, or 0 where it would have to be cut. Where it starts is
    /// its zone's beginning, so what is left of the chunk is the zone.
    pub(crate) fn append(&self, offset: u64, segments: impl Iterator<Item = Segment>, len: u64) -> u64 {
        let fits = len <= self.max_zone_append && self.data(offset, segments, len) == len;
        if fits { len } else { 0 }
    }

    /// Take as much of one piece of memory as the limits on segments and `most` bytes leave room for.
    /// `false`: not all of it.
    fn take(&self, segment: Segment, most: u64, count: &mut u32, bytes: &mut u64) -> bool {
        let len = u64::from(segment.len);
        let room = len.min(most.saturating_sub(*bytes));
        let mut taken = 0;
        while taken < room && *count < self.max_segments {
            let address = segment.offset + taken;
            // Less one, as the mask may be all ones.
            let to_boundary = self.seg_boundary_mask - (self.seg_boundary_mask & address);
            let size = to_boundary.min(self.max_segment_size - 1) + 1;
            taken += size.min(room - taken);
            *count += 1;
            if (segment.offset + taken) & self.virt_boundary_mask != 0 {
                break;
            }
        }
        *bytes += taken;
        taken == len
    }

    /// A discard (BLK-4): every cut lies on the granularity. Chunks do not matter to it.
    pub(crate) fn discard(&self, offset: u64, len: u64) -> u64 {
        if self.max_discard == 0 || len <= self.max_discard {
            return len;
        }
        let end = (offset + self.max_discard).saturating_sub(self.discard_alignment);
        let beyond = end % self.discard_granularity;
        if self.max_discard > beyond { self.max_discard - beyond } else { self.max_discard }
    }

    /// A write of zeroes (BLK-4). What the device cannot do at all goes down to be refused.
    pub(crate) fn write_zeroes(&self, offset: u64, len: u64) -> u64 {
        if self.max_write_zeroes == 0 {
            return len;
        }
        match self.most_from(offset, self.max_write_zeroes) {
            0 => len,
            most => most.min(len),
        }
    }
}
