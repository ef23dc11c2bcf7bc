//! Computes where a request is split: arithmetic on byte offsets, without a queue.
//!
//! Source of the rules: `get_max_io_size`, `bio_split_io_at`, `bio_split_discard` and
//! `bio_split_write_zeroes` in the kernel's block/blk-merge.c. Each function returns the length of the first
//! child request: the whole length if no split is needed, 0 if a split is needed but impossible. A segment's
//! offset in its region serves as its address: regions are page-aligned.

use block::{Data, QueueLimits, Request, Segment};

/// Queue limits in bytes, as the split rules use them.
#[derive(Debug)]
pub(crate) struct Cuts {
    /// The longest request with contiguous memory that is within all limits if it starts on a physical block.
    whole: u64,
    /// The length of the children of a request with contiguous memory that starts on a physical block; 0:
    /// each split has to be computed.
    stride: u64,
    /// Mask of the bits of an offset within a physical block.
    within_block: u64,
    max: u64,
    max_write_zeroes: u64,
    /// Longest zone append; 0: the device does not support zone append.
    max_zone_append: u64,
    /// Chunk size (`chunk_sectors`); 0: no chunk limit.
    chunk: u64,
    logical_block: u64,
    physical_block: u64,
    max_segments: u32,
    max_segment_size: u64,
    seg_boundary_mask: u64,
    virt_boundary_mask: u64,
    /// Longest discard, a multiple of the granularity; 0: discards are not split.
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
            stride: 0,
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
        cuts.stride = cuts.even_stride();
        cuts
    }

    /// Returns the longest request that needs no split on any physical block. Contiguous memory no longer
    /// than `max_segment_size` counts as two segments at most, if it crosses a segment boundary.
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

    /// Returns the length of every child but the last if neither chunks nor segment limits split a request
    /// with contiguous memory, else 0. Memory that crosses one segment boundary counts as two segments.
    fn even_stride(&self) -> u64 {
        let most = self.most_from(0, self.max);
        let is_even = self.chunk == 0
            && self.max_segments >= 2
            && self.virt_boundary_mask == 0
            && most <= self.max_segment_size.min(self.seg_boundary_mask);
        if is_even { most } else { 0 }
    }

    /// Returns the first child's length of a read or write with contiguous memory, if it follows from
    /// `stride`. The result equals that of [`data`](Cuts::data).
    #[inline]
    pub(crate) fn even_child(&self, offset: u64, len: u64) -> Option<u64> {
        (self.stride != 0 && offset & self.within_block == 0).then(|| len.min(self.stride))
    }

    #[inline]
    pub(crate) fn is_surely_whole(&self, req: &Request) -> bool {
        req.len.0 <= self.whole && req.offset.0 & self.within_block == 0 && matches!(req.data, Data::One(_))
    }

    /// Returns the largest length of one request from `offset` (BLK-1): it ends on a physical block if
    /// possible, else on a logical block.
    fn most_from(&self, offset: u64, max: u64) -> u64 {
        let chunk_left = if self.chunk == 0 { u64::MAX } else { self.chunk - offset % self.chunk };
        let max = max.min(chunk_left);
        let start = offset & (self.physical_block - 1);
        let end = (start + max) & !(self.physical_block - 1);
        if end > start { end - start } else { max & !(self.logical_block - 1) }
    }

    /// Returns the first child's length of a read or write of `len` bytes in `segments` (BLK-1, BLK-2).
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

    /// Returns `len` for a zone append that fits, or 0 if it would have to be split (BLK-5). The append
    /// starts at its zone's first block, so the rest of the chunk is the zone.
    pub(crate) fn append(&self, offset: u64, segments: impl Iterator<Item = Segment>, len: u64) -> u64 {
        let fits = len <= self.max_zone_append && self.data(offset, segments, len) == len;
        if fits { len } else { 0 }
    }

    /// Takes as much of one memory segment as the segment limits and `most` bytes allow. Returns whether that
    /// was all of it.
    fn take(&self, segment: Segment, most: u64, count: &mut u32, bytes: &mut u64) -> bool {
        let len = u64::from(segment.len);
        let room = len.min(most.saturating_sub(*bytes));
        let mut taken = 0;
        while taken < room && *count < self.max_segments {
            let address = segment.offset + taken;
            // Both limits are computed less one, because the mask may be all ones.
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

    /// Returns the first child's length of a discard (BLK-4): splits lie on the granularity; chunks do not
    /// apply.
    pub(crate) fn discard(&self, offset: u64, len: u64) -> u64 {
        if self.max_discard == 0 || len <= self.max_discard {
            return len;
        }
        let end = (offset + self.max_discard).saturating_sub(self.discard_alignment);
        let beyond = end % self.discard_granularity;
        if self.max_discard > beyond { self.max_discard - beyond } else { self.max_discard }
    }

    /// Returns the first child's length of a write of zeroes (BLK-4). Unsupported ones go down whole and are
    /// rejected.
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
