//! Stacks limits: the kernel's `blk_stack_limits`.

use super::validate::{boundary_fits_chunk, min_not_zero};
use super::{Features, QueueLimits, UNLIMITED_BYTES};
use crate::{Bytes, Sectors};

/// Features that the stacked device has as soon as one child has them (`BLK_FEAT_INHERIT_MASK`).
const INHERITED: Features = Features::WRITE_CACHE
    .union(Features::FUA)
    .union(Features::ROTATIONAL)
    .union(Features::STABLE_WRITES)
    .union(Features::ZONED)
    .union(Features::RAID_PARTIAL_STRIPES_EXPENSIVE);
/// Features that the stacked device keeps only while every child has them. The stacking driver sets them
/// before it stacks its children.
const SHARED: Features = Features::NOWAIT.union(Features::POLL);

/// The child is misaligned to the children stacked before it. The limits were combined nevertheless, with
/// [`misaligned`](QueueLimits::misaligned) set: the device works, but more slowly.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Misaligned {
    /// Alignment offsets of the children's physical blocks do not match.
    #[error("its physical blocks begin where those of the others do not")]
    Offset,
    /// The larger physical block size is no multiple of the larger logical block size.
    #[error("its logical block size does not divide the physical block size of the other devices")]
    PhysicalBlock,
    /// `io_min` is no multiple of the physical block size.
    #[error("io_min is not a multiple of the physical block size")]
    IoMin,
    /// `io_opt` is no multiple of the physical block size.
    #[error("io_opt is not a multiple of the physical block size")]
    IoOpt,
    /// `chunk_sectors` is no multiple of the physical block size.
    #[error("chunk_sectors is not a multiple of the physical block size")]
    Chunk,
    /// `alignment_offset` is no multiple of the logical block size.
    #[error("alignment_offset is not a multiple of the logical block size")]
    AlignmentOffset,
}

fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// Least common multiple of two sizes, where 0 means "none". A result past the kernel's 32 bits is "none" as
/// well.
fn lcm_not_zero(a: Bytes, b: Bytes) -> Bytes {
    if a.0 == 0 || b.0 == 0 {
        return Bytes(a.0 | b.0);
    }
    let lcm = (a.0 / gcd(a.0, b.0)).checked_mul(b.0);
    Bytes(lcm.filter(|&lcm| lcm <= UNLIMITED_BYTES.0).unwrap_or(0))
}

/// Rounds down to whole logical blocks, but not below a page.
fn round_sectors(sectors: &mut Sectors, block: Bytes) {
    let unit = block.sectors().0.max(1);
    sectors.0 = (sectors.0 - sectors.0 % unit).max(8);
}

impl QueueLimits {
    /// Combines the limits with those of a child whose data begins at its sector `start`. Both must be valid,
    /// or `self` be [`stacking`](QueueLimits::stacking); call [`validate`](QueueLimits::validate) after the
    /// last child.
    ///
    /// # Errors
    /// [`Misaligned`], the first reason of possibly several. The limits are combined nevertheless.
    pub fn stack(&mut self, bottom: &QueueLimits, start: Sectors) -> Result<(), Misaligned> {
        self.features = self
            .features
            .union(bottom.features.intersection(INHERITED))
            .difference(SHARED.difference(bottom.features.intersection(SHARED)));
        self.misaligned |= bottom.misaligned;
        self.stack_maxima(bottom);
        let aligned = self.stack_blocks(bottom, start);
        self.misaligned |= aligned.is_err();
        for sectors in [&mut self.max_sectors, &mut self.max_hw_sectors, &mut self.max_dev_sectors] {
            round_sectors(sectors, self.logical_block_size);
        }
        self.stack_discard(bottom, start);
        self.zone_write_granularity = self.zone_write_granularity.max(bottom.zone_write_granularity);
        if !self.features.contains(Features::ZONED) {
            self.zone_write_granularity = Bytes::ZERO;
            self.max_zone_append_sectors = Sectors(0);
        }
        if !self.stack_atomic_writes(bottom, start) {
            self.atomic_write_hw_max = Bytes::ZERO;
            self.atomic_write_hw_unit_max = Bytes::ZERO;
            self.atomic_write_hw_unit_min = Bytes::ZERO;
            self.atomic_write_hw_boundary = Bytes::ZERO;
        }
        aligned
    }

    fn stack_maxima(&mut self, bottom: &QueueLimits) {
        // 0 means "no limit": the other side's limit applies.
        for (top, bottom) in [
            (&mut self.max_sectors, bottom.max_sectors),
            (&mut self.max_user_sectors, bottom.max_user_sectors),
            (&mut self.max_hw_sectors, bottom.max_hw_sectors),
            (&mut self.max_dev_sectors, bottom.max_dev_sectors),
            (&mut self.max_secure_erase_sectors, bottom.max_secure_erase_sectors),
        ] {
            top.0 = min_not_zero(top.0, bottom.0);
        }
        self.max_segment_size.0 = min_not_zero(self.max_segment_size.0, bottom.max_segment_size.0);
        self.seg_boundary_mask = min_not_zero(self.seg_boundary_mask, bottom.seg_boundary_mask);
        self.virt_boundary_mask = min_not_zero(self.virt_boundary_mask, bottom.virt_boundary_mask);
        for (top, bottom) in [
            (&mut self.max_segments, bottom.max_segments),
            (&mut self.max_discard_segments, bottom.max_discard_segments),
        ] {
            *top = min_not_zero((*top).into(), bottom.into()) as u16;
        }
        // 0 means "not supported": one child that lacks it is enough.
        for (top, bottom) in [
            (&mut self.max_write_zeroes_sectors, bottom.max_write_zeroes_sectors),
            (&mut self.max_user_wzeroes_unmap_sectors, bottom.max_user_wzeroes_unmap_sectors),
            (&mut self.max_hw_wzeroes_unmap_sectors, bottom.max_hw_wzeroes_unmap_sectors),
            (&mut self.max_hw_zone_append_sectors, bottom.max_hw_zone_append_sectors),
        ] {
            *top = bottom.min(*top);
        }
        self.dma_alignment = self.dma_alignment.max(bottom.dma_alignment);
    }

    /// Combines block sizes, preferred sizes, chunks and alignment: the limits that can be misaligned.
    fn stack_blocks(&mut self, bottom: &QueueLimits, start: Sectors) -> Result<(), Misaligned> {
        let mut aligned = Ok(());
        let mut check = |holds: bool, why: Misaligned| {
            if !holds && aligned.is_ok() {
                aligned = Err(why);
            }
            holds
        };
        let alignment = bottom.alignment_offset_at(start);
        if self.alignment_offset != alignment {
            let above = self.physical_block_size.max(self.io_min) + self.alignment_offset;
            let below = bottom.physical_block_size.max(bottom.io_min) + alignment;
            check(above.max(below).0.is_multiple_of(above.min(below).0), Misaligned::Offset);
        }
        self.logical_block_size = self.logical_block_size.max(bottom.logical_block_size);
        self.physical_block_size = self.physical_block_size.max(bottom.physical_block_size);
        self.io_min = self.io_min.max(bottom.io_min);
        self.io_opt = lcm_not_zero(self.io_opt, bottom.io_opt);
        if bottom.chunk_sectors.0 != 0 {
            self.chunk_sectors.0 = gcd(self.chunk_sectors.0, bottom.chunk_sectors.0);
        }
        if !check(self.physical_block_size.is_aligned(self.logical_block_size.0), Misaligned::PhysicalBlock) {
            self.physical_block_size = self.logical_block_size;
        }
        let physical = self.physical_block_size;
        if !check(self.io_min.is_aligned(physical.0), Misaligned::IoMin) {
            self.io_min = physical;
        }
        if !check(self.io_opt.is_aligned(physical.0), Misaligned::IoOpt) {
            self.io_opt = Bytes::ZERO;
        }
        if !check(self.chunk_sectors.0.is_multiple_of(physical.sectors().0.max(1)), Misaligned::Chunk) {
            self.chunk_sectors = Sectors(0);
        }
        let lowest = lcm_not_zero(self.alignment_offset, alignment);
        self.alignment_offset = Bytes(lowest.0 % physical.max(self.io_min).0.max(1));
        check(self.alignment_offset.is_aligned(self.logical_block_size.0), Misaligned::AlignmentOffset);
        aligned
    }

    /// Children that cannot discard do not count: their part of a discard is skipped.
    fn stack_discard(&mut self, bottom: &QueueLimits, start: Sectors) {
        if bottom.discard_granularity.0 == 0 {
            return;
        }
        let alignment = bottom.discard_alignment_at(start);
        self.max_discard_sectors.0 = min_not_zero(self.max_discard_sectors.0, bottom.max_discard_sectors.0);
        self.max_hw_discard_sectors.0 =
            min_not_zero(self.max_hw_discard_sectors.0, bottom.max_hw_discard_sectors.0);
        self.discard_granularity = self.discard_granularity.max(bottom.discard_granularity);
        let lowest = lcm_not_zero(self.discard_alignment, alignment);
        self.discard_alignment = Bytes(lowest.0 % self.discard_granularity.0);
    }

    /// The first child sets the values, later children narrow them. Returns false if the stacked device has
    /// no atomic writes.
    fn stack_atomic_writes(&mut self, bottom: &QueueLimits, start: Sectors) -> bool {
        let (min, max) = (bottom.atomic_write_hw_unit_min, bottom.atomic_write_hw_unit_max);
        let boundary = bottom.atomic_write_hw_boundary;
        let unit = min.max(boundary).sectors().0.max(1);
        if !bottom.features.contains(Features::ATOMIC_WRITES) || min.0 == 0 || !start.0.is_multiple_of(unit) {
            return false;
        }
        if self.atomic_write_hw_max == UNLIMITED_BYTES {
            if !boundary_fits_chunk(self.chunk_sectors, boundary.sectors()) {
                return false;
            }
            self.atomic_write_hw_unit_max = max;
            self.atomic_write_hw_unit_min = min;
            self.atomic_write_hw_max = bottom.atomic_write_hw_max;
            self.atomic_write_hw_boundary = boundary;
        } else {
            if self.atomic_write_hw_boundary != boundary
                || self.atomic_write_hw_unit_min > max
                || self.atomic_write_hw_unit_max < min
            {
                return false;
            }
            self.atomic_write_hw_max = self.atomic_write_hw_max.min(bottom.atomic_write_hw_max);
            self.atomic_write_hw_unit_min = self.atomic_write_hw_unit_min.max(min);
            self.atomic_write_hw_unit_max = self.atomic_write_hw_unit_max.min(max);
        }
        // The largest power of two that divides the chunk: in a chunk of 24 KiB, atomic writes have at most 8
        // KiB.
        if self.chunk_sectors.0 != 0 {
            let chunk = self.chunk_sectors.bytes();
            let factor = Bytes(1 << chunk.0.trailing_zeros());
            self.atomic_write_hw_unit_max = self.atomic_write_hw_unit_max.min(factor);
            self.atomic_write_hw_unit_min = self.atomic_write_hw_unit_min.min(self.atomic_write_hw_unit_max);
            self.atomic_write_hw_max = self.atomic_write_hw_max.min(chunk);
        }
        true
    }
}
