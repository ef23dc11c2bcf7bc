//! Validates limits as a whole: fills in the kernel's defaults, applies its caps, and refuses invalid values.

use super::{Features, QueueLimits, SEG_BOUNDARY_MASK, UNLIMITED_BYTES};
use crate::{Bytes, Sectors};

/// `PAGE_SIZE`, also the kernel's `BLK_MIN_SEGMENT_SIZE`: every driver accepts a segment of this size.
const PAGE: Bytes = Bytes(4096);
/// `BLK_SAFE_MAX_SECTORS`: default of `max_hw_sectors`.
const SAFE_MAX_SECTORS: Sectors = Sectors(255);
/// `BLK_DEF_MAX_SECTORS_CAP`, 4 MiB: cap on `max_sectors` unless the user or the device's `io_opt` or
/// `io_min` exceeds it.
const DEFAULT_CAP_SECTORS: Sectors = Sectors(8192);
/// `BLK_MAX_SEGMENTS`: default of `max_segments`.
const DEFAULT_SEGMENTS: u16 = 128;
/// `BLK_MAX_SEGMENT_SIZE`: default of `max_segment_size`.
const DEFAULT_SEGMENT_SIZE: Bytes = Bytes(65536);
/// `BLK_MAX_BLOCK_SIZE` of a kernel with large folios.
const BLOCK_SIZE_MAX: u64 = 65536;

/// A limit with an invalid value.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{field} = {value}: {rule}")]
pub struct LimitsError {
    /// Kernel name of the field.
    pub field: &'static str,
    /// Value of the field.
    pub value: u64,
    /// The rule that the value breaks.
    pub rule: &'static str,
}

fn require(holds: bool, field: &'static str, value: u64, rule: &'static str) -> Result<(), LimitsError> {
    if holds { Ok(()) } else { Err(LimitsError { field, value, rule }) }
}

/// The smaller of two limits, where 0 means "no limit".
pub(super) fn min_not_zero(a: u64, b: u64) -> u64 {
    match (a, b) {
        (0, limit) | (limit, 0) => limit,
        _ => a.min(b),
    }
}

/// The largest power of two not above `value`; 0 for 0.
fn power_of_two_below(value: u64) -> u64 {
    if value == 0 { 0 } else { 1 << value.ilog2() }
}

impl QueueLimits {
    /// Fills in the kernel's defaults for unset fields, applies caps, and refuses invalid values. On an error
    /// nothing is changed. Idempotent.
    ///
    /// # Errors
    /// [`LimitsError`] with the field, its value and the rule it breaks. Beyond the kernel's rules, a
    /// number that its 32-bit field would not hold is refused, and so is a `max_user_sectors` that rounds
    /// down to nothing.
    pub fn validate(&mut self) -> Result<(), LimitsError> {
        let mut limits = self.clone();
        for (field, value) in limits.values() {
            require(value <= field.max, field.name, value, "does not fit the kernel's field")?;
        }
        limits.validate_blocks()?;
        limits.validate_sizes()?;
        limits.validate_segments()?;
        limits.validate_discard_and_zeroes()?;
        if limits.alignment_offset.0 != 0 {
            limits.alignment_offset.0 &= limits.physical_block_size.0 - 1;
            limits.misaligned = false;
        }
        if !limits.features.contains(Features::WRITE_CACHE) {
            limits.features = limits.features.difference(Features::FUA);
        }
        limits.complete_atomic_writes();
        limits.validate_zones()?;
        *self = limits;
        Ok(())
    }

    fn validate_blocks(&mut self) -> Result<(), LimitsError> {
        if self.logical_block_size.0 == 0 {
            self.logical_block_size = Bytes(512);
        }
        let logical = self.logical_block_size.0;
        require(
            logical.is_power_of_two() && (512..=BLOCK_SIZE_MAX).contains(&logical),
            "logical_block_size",
            logical,
            "must be a power of two from 512 to 65536 bytes",
        )?;
        let physical = self.physical_block_size.0;
        if physical < logical {
            self.physical_block_size.0 = logical;
        } else {
            require(
                physical.is_power_of_two(),
                "physical_block_size",
                physical,
                "must be a power of two of bytes",
            )?;
        }
        self.io_min = self.io_min.max(self.physical_block_size);
        self.io_opt = self.io_opt.align_down(self.physical_block_size.0);
        Ok(())
    }

    fn validate_sizes(&mut self) -> Result<(), LimitsError> {
        let block = self.logical_block_size.sectors().0;
        if self.max_hw_sectors.0 == 0 {
            self.max_hw_sectors = SAFE_MAX_SECTORS;
        }
        let hw = self.max_hw_sectors.0;
        require(hw >= PAGE.sectors().0, "max_hw_sectors", hw, "must be at least 8 sectors, a page")?;
        require(hw >= block, "max_hw_sectors", hw, "must be at least one logical block")?;
        self.max_hw_sectors.0 -= hw % block;

        let most = min_not_zero(self.max_hw_sectors.0, self.max_dev_sectors.0);
        let user = self.max_user_sectors.0;
        let wanted = if user != 0 {
            require(
                user >= PAGE.sectors().0.max(block),
                "max_user_sectors",
                user,
                "must be at least 8 sectors, a page, and one logical block",
            )?;
            user
        } else if self.io_opt.sectors() > DEFAULT_CAP_SECTORS {
            self.io_opt.sectors().0
        } else if self.io_min.sectors() > DEFAULT_CAP_SECTORS {
            self.io_min.sectors().0
        } else {
            DEFAULT_CAP_SECTORS.0
        };
        let max = most.min(wanted);
        require(
            max >= block,
            "max_dev_sectors",
            self.max_dev_sectors.0,
            "must be at least one logical block",
        )?;
        self.max_sectors.0 = max - max % block;
        Ok(())
    }

    fn validate_segments(&mut self) -> Result<(), LimitsError> {
        if self.max_segments == 0 {
            self.max_segments = DEFAULT_SEGMENTS;
        }
        if self.max_discard_segments == 0 {
            self.max_discard_segments = 1;
        }
        if self.seg_boundary_mask == 0 {
            self.seg_boundary_mask = SEG_BOUNDARY_MASK;
        }
        let mask = self.seg_boundary_mask;
        require(mask >= PAGE.0 - 1, "seg_boundary_mask", mask, "must be at least 4095, a page less one")?;
        let size = self.max_segment_size.0;
        if self.virt_boundary_mask != 0 {
            if size == 0 {
                self.max_segment_size = UNLIMITED_BYTES;
            }
        } else if size == 0 {
            self.max_segment_size = DEFAULT_SEGMENT_SIZE;
        } else {
            require(size >= PAGE.0, "max_segment_size", size, "must be at least 4096 bytes, a page")?;
        }
        if self.dma_alignment == 0 {
            self.dma_alignment = 511;
        }
        let dma = self.dma_alignment;
        require(dma <= PAGE.0, "dma_alignment", dma, "must be at most a page, 4096")?;
        Ok(())
    }

    fn validate_discard_and_zeroes(&mut self) -> Result<(), LimitsError> {
        let unmap = self.max_hw_wzeroes_unmap_sectors;
        require(
            unmap.0 == 0 || unmap == self.max_write_zeroes_sectors,
            "max_hw_wzeroes_unmap_sectors",
            unmap.0,
            "must be 0 or the same as max_write_zeroes_sectors",
        )?;
        self.max_wzeroes_unmap_sectors = unmap.min(self.max_user_wzeroes_unmap_sectors);
        self.max_discard_sectors = self.max_hw_discard_sectors.min(self.max_user_discard_sectors);
        self.discard_granularity = if self.max_discard_sectors.0 == 0 {
            Bytes::ZERO
        } else {
            self.discard_granularity.max(self.physical_block_size)
        };
        Ok(())
    }

    fn validate_zones(&mut self) -> Result<(), LimitsError> {
        if !self.features.contains(Features::ZONED) {
            for (field, value) in [
                ("max_open_zones", self.max_open_zones.into()),
                ("max_active_zones", self.max_active_zones.into()),
                ("zone_write_granularity", self.zone_write_granularity.0),
                ("max_zone_append_sectors", self.max_zone_append_sectors.0),
            ] {
                require(value == 0, field, value, "must be 0 on a device that is not zoned")?;
            }
            return Ok(());
        }
        require(
            self.max_active_zones == 0 || self.max_open_zones <= self.max_active_zones,
            "max_open_zones",
            self.max_open_zones.into(),
            "must not exceed max_active_zones: an open zone is active",
        )?;
        self.zone_write_granularity = self.zone_write_granularity.max(self.logical_block_size);
        let fits = self.chunk_sectors.min(self.max_hw_sectors).0;
        self.max_zone_append_sectors.0 = min_not_zero(self.max_hw_zone_append_sectors.0, fits);
        Ok(())
    }

    /// Computes the effective atomic write limits. A driver with inconsistent limits gets no atomic writes,
    /// which is no error in the kernel either.
    fn complete_atomic_writes(&mut self) {
        let boundary = self.atomic_write_hw_boundary.sectors();
        if !self.atomic_writes_make_sense(boundary) {
            self.atomic_write_max_sectors = Sectors(0);
            self.atomic_write_boundary_sectors = Sectors(0);
            self.atomic_write_unit_min = Bytes::ZERO;
            self.atomic_write_unit_max = Bytes::ZERO;
            return;
        }
        // The size that is guaranteed to fit one request from one buffer: a logical block in each of the
        // first and the last segment, a page in every segment between.
        let segments = u64::from(self.max_segments);
        let guaranteed = segments.min(2) * self.logical_block_size.0 + segments.saturating_sub(2) * PAGE.0;
        let unit_most = Bytes(power_of_two_below(self.max_hw_sectors.bytes().0.min(guaranteed)));
        self.atomic_write_max_sectors = self.atomic_write_hw_max.sectors().min(self.max_hw_sectors);
        self.atomic_write_unit_min = self.atomic_write_hw_unit_min.min(unit_most);
        self.atomic_write_unit_max = self.atomic_write_hw_unit_max.min(unit_most);
        self.atomic_write_boundary_sectors = boundary;
    }

    fn atomic_writes_make_sense(&self, boundary: Sectors) -> bool {
        let (most, min, max) =
            (self.atomic_write_hw_max, self.atomic_write_hw_unit_min, self.atomic_write_hw_unit_max);
        let chunk = self.chunk_sectors;
        self.features.contains(Features::ATOMIC_WRITES)
            && most.0 != 0
            && most != UNLIMITED_BYTES
            && min.0.is_power_of_two()
            && max.0.is_power_of_two()
            && min <= max
            && max <= most
            && (chunk.0 == 0 || most.sectors() <= chunk)
            && (boundary.0 == 0
                || (most <= self.atomic_write_hw_boundary
                    && boundary_fits_chunk(chunk, boundary)
                    && boundary.0.is_power_of_two()))
    }
}

/// Whether one of the two divides the other; 0 means "none" for either.
pub(super) fn boundary_fits_chunk(chunk: Sectors, boundary: Sectors) -> bool {
    chunk.0 == 0 || boundary.0 == 0 || chunk.0.max(boundary.0).is_multiple_of(chunk.0.min(boundary.0))
}
