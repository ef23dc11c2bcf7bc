//! Queue limits: the kernel's `struct queue_limits` for user space.
//!
//! Fields have the kernel's names and meanings: 0 means "not set" wherever it does in the kernel, and
//! [`UNLIMITED_SECTORS`] is the kernel's `UINT_MAX`. A driver sets the fields that it knows over
//! [`QueueLimits::default`] and calls [`validate`](QueueLimits::validate), which fills in the rest. A
//! stacking device starts from [`QueueLimits::stacking`] and calls [`stack`](QueueLimits::stack) for each of
//! its children.
//!
//! Source of every rule: `blk_validate_limits`, `blk_set_stacking_limits` and `blk_stack_limits` in the
//! kernel's block/blk-settings.c. `dma_pad_mask`, write streams and the integrity profile with its segments
//! have no counterpart in user space: they are listed as 0 and cannot be set. A device describes its
//! integrity format with [`Integrity`](crate::Integrity), which stacked devices do not inherit. The cached
//! `max_fast_segment_size` is left out.

mod fields;
mod parse;
mod stack;
mod sysfs;
mod validate;

#[cfg(test)]
mod tests;

pub use fields::{Field, Unit};
pub use parse::{LimitOverrides, ParseLimitsError};
pub use stack::Misaligned;
pub use sysfs::{Attribute, Scale};
pub use validate::LimitsError;

use crate::{Bytes, Sectors};
use bitflags::bitflags;

/// No limit, for a field in sectors: the kernel's `UINT_MAX`.
pub const UNLIMITED_SECTORS: Sectors = Sectors(u32::MAX as u64);
/// No limit, for a field in bytes: the kernel's `UINT_MAX`.
pub const UNLIMITED_BYTES: Bytes = Bytes(u32::MAX as u64);
/// `BLK_SEG_BOUNDARY_MASK`: a segment must not cross a 4 GiB boundary.
pub const SEG_BOUNDARY_MASK: u64 = 0xffff_ffff;

bitflags! {
    /// Features of a device, numbered as the kernel's `BLK_FEAT_*`.
    #[derive(Clone, Copy, Default, PartialEq, Eq, Hash, Debug)]
    pub struct Features: u32 {
        /// Has a volatile write cache, so flushes are needed for durability.
        const WRITE_CACHE = 1 << 0;
        /// Honours FUA writes. Has no meaning without [`WRITE_CACHE`](Features::WRITE_CACHE).
        const FUA = 1 << 1;
        /// A rotational disk: seeks are slow.
        const ROTATIONAL = 1 << 2;
        /// The memory of a write must not change until the write completes.
        const STABLE_WRITES = 1 << 5;
        /// Completes requests within submission.
        const SYNCHRONOUS = 1 << 6;
        /// Honours [`Flags::NOWAIT`](crate::Flags::NOWAIT).
        const NOWAIT = 1 << 7;
        /// Completions can be polled for.
        const POLL = 1 << 9;
        /// A zoned device.
        const ZONED = 1 << 10;
        /// Supports atomic writes, within the `atomic_write_*` limits.
        const ATOMIC_WRITES = 1 << 14;
        /// A RAID on which writes of less than a stripe are expensive.
        const RAID_PARTIAL_STRIPES_EXPENSIVE = 1 << 15;
    }
}

/// The queue limits of a device. After [`validate`](QueueLimits::validate) a field that requests are checked
/// against is 0 only where 0 has a meaning of its own: "no limit" (`chunk_sectors`, `virt_boundary_mask`,
/// `io_opt`) or "not supported" (discard, write zeroes, zones, atomic writes).
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct QueueLimits {
    /// Features of the device.
    pub features: Features,
    /// The children are misaligned to each other, so `alignment_offset` has no meaning
    /// (`BLK_FLAG_MISALIGNED`).
    pub misaligned: bool,
    /// Unit of addressing: a power of two from 512 to 65536.
    pub logical_block_size: Bytes,
    /// Unit that the device writes without read-modify-write.
    pub physical_block_size: Bytes,
    /// Smallest request that performs well.
    pub io_min: Bytes,
    /// Optimal size of large requests; 0: no preference.
    pub io_opt: Bytes,
    /// Offset of the first physical block from the device's first byte.
    pub alignment_offset: Bytes,

    /// Largest request that the driver supports.
    pub max_hw_sectors: Sectors,
    /// Largest request that the device behind the driver supports; 0: no limit of its own.
    pub max_dev_sectors: Sectors,
    /// Limit set by the user in place of the default cap; 0: none.
    pub max_user_sectors: Sectors,
    /// Largest request. Computed by `validate` from the three fields above, never read by it.
    pub max_sectors: Sectors,
    /// No request crosses a multiple of this; 0: no such limit. Need not be a power of two.
    pub chunk_sectors: Sectors,

    /// Most memory segments of a request.
    pub max_segments: u16,
    /// Longest memory segment.
    pub max_segment_size: Bytes,
    /// No segment crosses a multiple of this plus one.
    pub seg_boundary_mask: u64,
    /// Gaps between segments must lie on a multiple of this plus one: all segments but the first start there,
    /// and all but the last end there. 0: no such limit.
    pub virt_boundary_mask: u64,
    /// Address and length of each segment are multiples of this plus one.
    pub dma_alignment: u64,

    /// Largest discard that the driver supports; 0: discard is not supported.
    pub max_hw_discard_sectors: Sectors,
    /// Limit on discards set by the user.
    pub max_user_discard_sectors: Sectors,
    /// Largest discard: computed, the smaller of the two fields above.
    pub max_discard_sectors: Sectors,
    /// Unit of discards; 0 when discard is not supported.
    pub discard_granularity: Bytes,
    /// Offset of the first discard unit from the device's first byte.
    pub discard_alignment: Bytes,
    /// Most ranges of a discard.
    pub max_discard_segments: u16,
    /// Largest secure erase; 0: not supported.
    pub max_secure_erase_sectors: Sectors,

    /// Largest write-zeroes request; 0: not supported.
    pub max_write_zeroes_sectors: Sectors,
    /// Largest write-zeroes request that may deallocate, by the driver: 0, or `max_write_zeroes_sectors`.
    pub max_hw_wzeroes_unmap_sectors: Sectors,
    /// Limit on deallocating write-zeroes requests set by the user.
    pub max_user_wzeroes_unmap_sectors: Sectors,
    /// Largest deallocating write-zeroes request: computed, the smaller of the two fields above.
    pub max_wzeroes_unmap_sectors: Sectors,

    /// Largest zone append that the driver supports; 0: zone appends are emulated.
    pub max_hw_zone_append_sectors: Sectors,
    /// Largest zone append: computed.
    pub max_zone_append_sectors: Sectors,
    /// Unit of writes to a sequential zone.
    pub zone_write_granularity: Bytes,
    /// Most zones open at once; 0: no limit.
    pub max_open_zones: u32,
    /// Most zones active (open or closed) at once; 0: no limit.
    pub max_active_zones: u32,

    /// Largest atomic write that the driver supports.
    pub atomic_write_hw_max: Bytes,
    /// No atomic write crosses a multiple of this; 0: no such limit.
    pub atomic_write_hw_boundary: Bytes,
    /// Smallest atomic write that the driver supports: a power of two.
    pub atomic_write_hw_unit_min: Bytes,
    /// Largest naturally aligned atomic write that the driver supports: a power of two.
    pub atomic_write_hw_unit_max: Bytes,
    /// Largest atomic write: computed.
    pub atomic_write_max_sectors: Sectors,
    /// No atomic write crosses a multiple of this: computed.
    pub atomic_write_boundary_sectors: Sectors,
    /// Smallest atomic write: computed.
    pub atomic_write_unit_min: Bytes,
    /// Largest naturally aligned atomic write: computed.
    pub atomic_write_unit_max: Bytes,
}

/// Limits with every field unset.
const UNSET: QueueLimits = QueueLimits {
    features: Features::empty(),
    misaligned: false,
    logical_block_size: Bytes(0),
    physical_block_size: Bytes(0),
    io_min: Bytes(0),
    io_opt: Bytes(0),
    alignment_offset: Bytes(0),
    max_hw_sectors: Sectors(0),
    max_dev_sectors: Sectors(0),
    max_user_sectors: Sectors(0),
    max_sectors: Sectors(0),
    chunk_sectors: Sectors(0),
    max_segments: 0,
    max_segment_size: Bytes(0),
    seg_boundary_mask: 0,
    virt_boundary_mask: 0,
    dma_alignment: 0,
    max_hw_discard_sectors: Sectors(0),
    max_user_discard_sectors: Sectors(0),
    max_discard_sectors: Sectors(0),
    discard_granularity: Bytes(0),
    discard_alignment: Bytes(0),
    max_discard_segments: 0,
    max_secure_erase_sectors: Sectors(0),
    max_write_zeroes_sectors: Sectors(0),
    max_hw_wzeroes_unmap_sectors: Sectors(0),
    max_user_wzeroes_unmap_sectors: Sectors(0),
    max_wzeroes_unmap_sectors: Sectors(0),
    max_hw_zone_append_sectors: Sectors(0),
    max_zone_append_sectors: Sectors(0),
    zone_write_granularity: Bytes(0),
    max_open_zones: 0,
    max_active_zones: 0,
    atomic_write_hw_max: Bytes(0),
    atomic_write_hw_boundary: Bytes(0),
    atomic_write_hw_unit_min: Bytes(0),
    atomic_write_hw_unit_max: Bytes(0),
    atomic_write_max_sectors: Sectors(0),
    atomic_write_boundary_sectors: Sectors(0),
    atomic_write_unit_min: Bytes(0),
    atomic_write_unit_max: Bytes(0),
};

impl Default for QueueLimits {
    /// The limits that a driver starts from: every field is unset and the user limits neither discards nor
    /// deallocating write-zeroes requests. Not usable before [`validate`](QueueLimits::validate) has filled
    /// in the kernel's defaults (255 sectors, 128 segments of 64 KiB, no discard).
    fn default() -> Self {
        QueueLimits {
            max_user_discard_sectors: UNLIMITED_SECTORS,
            max_user_wzeroes_unmap_sectors: UNLIMITED_SECTORS,
            ..UNSET
        }
    }
}

impl QueueLimits {
    /// The limits that a stacking device starts from, before it stacks its children: no limits.
    pub fn stacking() -> QueueLimits {
        QueueLimits {
            logical_block_size: Bytes(512),
            physical_block_size: Bytes(512),
            io_min: Bytes(512),
            discard_granularity: Bytes(512),
            dma_alignment: 511,
            seg_boundary_mask: SEG_BOUNDARY_MASK,
            max_segments: u16::MAX,
            max_discard_segments: u16::MAX,
            max_hw_sectors: UNLIMITED_SECTORS,
            max_segment_size: UNLIMITED_BYTES,
            max_sectors: UNLIMITED_SECTORS,
            max_dev_sectors: UNLIMITED_SECTORS,
            max_write_zeroes_sectors: UNLIMITED_SECTORS,
            max_hw_wzeroes_unmap_sectors: UNLIMITED_SECTORS,
            max_user_wzeroes_unmap_sectors: UNLIMITED_SECTORS,
            max_hw_zone_append_sectors: UNLIMITED_SECTORS,
            max_user_discard_sectors: UNLIMITED_SECTORS,
            atomic_write_hw_max: UNLIMITED_BYTES,
            ..UNSET
        }
    }

    /// `alignment_offset` as sysfs shows it: −1 when the children are misaligned.
    pub fn alignment_offset_shown(&self) -> i64 {
        if self.misaligned { -1 } else { self.alignment_offset.0 as i64 }
    }

    /// Bytes from `start` to the next physical block of the device: the `alignment_offset` of a partition
    /// that starts at `start`.
    pub fn alignment_offset_at(&self, start: Sectors) -> Bytes {
        let granularity = self.physical_block_size.0.max(self.io_min.0).max(512);
        let into = (start.0 % (granularity >> Sectors::SHIFT)) << Sectors::SHIFT;
        Bytes((granularity + self.alignment_offset.0 - into) % granularity)
    }

    /// Bytes from `start` to the next discard unit; 0 when discard is not supported.
    pub fn discard_alignment_at(&self, start: Sectors) -> Bytes {
        let granularity = self.discard_granularity.sectors().0;
        if self.max_discard_sectors.0 == 0 || granularity == 0 {
            return Bytes::ZERO;
        }
        let alignment = self.discard_alignment.sectors().0;
        Sectors((granularity + alignment - start.0 % granularity) % granularity).bytes()
    }
}
