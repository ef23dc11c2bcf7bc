//! What a device can take: the kernel's `struct queue_limits`, for user space.
//!
//! The fields have the kernel's names and meanings; 0 means "not set" wherever it does there, and
//! [`UNLIMITED_SECTORS`] is its `UINT_MAX`. A driver fills in what it knows over [`QueueLimits::default`]
//! and calls [`validate`](QueueLimits::validate), which completes the rest; a stacking device starts from
//! [`QueueLimits::stacking`] and takes in one child after the other with [`stack`](QueueLimits::stack).
//!
//! Source of every rule: `blk_validate_limits`, `blk_set_stacking_limits` and `blk_stack_limits` in the
//! kernel's block/blk-settings.c. Nothing in user space has `dma_pad_mask`, write streams, or an integrity profile with
//! its segments: they are listed, as 0, and cannot be set. What a device keeps of the last is its
//! [`Integrity`](crate::Integrity), which nothing that is stacked on it passes on. The cached `max_fast_segment_size` is left out.

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

/// No limit on a number of sectors: the kernel's `UINT_MAX`.
pub const UNLIMITED_SECTORS: Sectors = Sectors(u32::MAX as u64);
/// No limit on a number of bytes: the kernel's `UINT_MAX`.
pub const UNLIMITED_BYTES: Bytes = Bytes(u32::MAX as u64);
/// `BLK_SEG_BOUNDARY_MASK`: segments may lie anywhere in 4 GiB.
pub const SEG_BOUNDARY_MASK: u64 = 0xffff_ffff;

/// What a device can do: a set of the constants below, numbered as the kernel's `BLK_FEAT_*`.
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash, Debug)]
pub struct Features(u32);

impl Features {
    /// None of them.
    pub const NONE: Features = Features(0);
    /// It has a volatile write cache: a flush means something.
    pub const WRITE_CACHE: Features = Features(1 << 0);
    /// It takes writes past the cache. Means nothing without [`WRITE_CACHE`](Features::WRITE_CACHE).
    pub const FUA: Features = Features(1 << 1);
    /// It seeks.
    pub const ROTATIONAL: Features = Features(1 << 2);
    /// The memory of a write must not change until it is over.
    pub const STABLE_WRITES: Features = Features(1 << 5);
    /// It completes within the submission.
    pub const SYNCHRONOUS: Features = Features(1 << 6);
    /// It honours [`Flags::NOWAIT`](crate::Flags::NOWAIT).
    pub const NOWAIT: Features = Features(1 << 7);
    /// It can be polled for completions.
    pub const POLL: Features = Features(1 << 9);
    /// It is a zoned device.
    pub const ZONED: Features = Features(1 << 10);
    /// It takes atomic writes, within the `atomic_write_*` limits.
    pub const ATOMIC_WRITES: Features = Features(1 << 14);
    /// It is a RAID for which less than a stripe is dear.
    pub const RAID_PARTIAL_STRIPES_EXPENSIVE: Features = Features(1 << 15);

    /// As the kernel numbers them.
    pub const fn bits(self) -> u32 {
        self.0
    }

    /// Both sets together.
    #[must_use]
    pub const fn with(self, other: Features) -> Features {
        Features(self.0 | other.0)
    }

    /// This set less the other.
    #[must_use]
    pub const fn without(self, other: Features) -> Features {
        Features(self.0 & !other.0)
    }

    /// Those that are in both.
    #[must_use]
    pub const fn and(self, other: Features) -> Features {
        Features(self.0 & other.0)
    }

    /// Whether all of `other` are in this set.
    pub const fn has(self, other: Features) -> bool {
        self.0 & other.0 == other.0
    }
}

/// The limits of a device. After [`validate`](QueueLimits::validate) no field that a request is held
/// against is 0 except where 0 is a meaning of its own: "no such limit" (`chunk_sectors`,
/// `virt_boundary_mask`, `io_opt`) or "cannot do that" (discard, write zeroes, zones, atomic writes).
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct QueueLimits {
    /// What it can do.
    pub features: Features,
    /// Children do not line up: `alignment_offset` means nothing (`BLK_FLAG_MISALIGNED`).
    pub misaligned: bool,
    /// The unit of addressing: a power of two from 512 to 65536.
    pub logical_block_size: Bytes,
    /// The unit that the medium writes without reading first.
    pub physical_block_size: Bytes,
    /// The smallest request that is not slow.
    pub io_min: Bytes,
    /// The best size of a large request; 0: none is better than another.
    pub io_opt: Bytes,
    /// Where the first physical block begins, counted from the device's first byte.
    pub alignment_offset: Bytes,

    /// What the driver can take in one request.
    pub max_hw_sectors: Sectors,
    /// What the device behind the driver can take; 0: no limit of its own.
    pub max_dev_sectors: Sectors,
    /// What the user asked for in place of the default cap; 0: nothing.
    pub max_user_sectors: Sectors,
    /// The most that one request carries. Computed by `validate` from the three above, never read by it.
    pub max_sectors: Sectors,
    /// No request crosses a multiple of this; 0: no such limit. Need not be a power of two.
    pub chunk_sectors: Sectors,

    /// Pieces of memory that one request names.
    pub max_segments: u16,
    /// The longest such piece.
    pub max_segment_size: Bytes,
    /// No piece crosses a multiple of this plus one.
    pub seg_boundary_mask: u64,
    /// All but the first piece start, and all but the last end, on a multiple of this plus one; 0: no such
    /// limit.
    pub virt_boundary_mask: u64,
    /// Pieces start on, and are as long as, a multiple of this plus one.
    pub dma_alignment: u64,

    /// The largest discard that the driver can take; 0: it cannot.
    pub max_hw_discard_sectors: Sectors,
    /// The largest discard that the user wants.
    pub max_user_discard_sectors: Sectors,
    /// The largest discard: computed, the smaller of the two.
    pub max_discard_sectors: Sectors,
    /// The unit of discarding; 0 when it cannot discard.
    pub discard_granularity: Bytes,
    /// Where the first such unit begins, counted from the device's first byte.
    pub discard_alignment: Bytes,
    /// Ranges that one discard names.
    pub max_discard_segments: u16,
    /// The largest secure erase; 0: it cannot.
    pub max_secure_erase_sectors: Sectors,

    /// The largest write of zeroes; 0: it cannot.
    pub max_write_zeroes_sectors: Sectors,
    /// The largest write of zeroes that deallocates, by the driver: 0, or `max_write_zeroes_sectors`.
    pub max_hw_wzeroes_unmap_sectors: Sectors,
    /// The largest write of zeroes that deallocates, by the user's wish.
    pub max_user_wzeroes_unmap_sectors: Sectors,
    /// The largest write of zeroes that deallocates: computed, the smaller of the two.
    pub max_wzeroes_unmap_sectors: Sectors,

    /// The largest zone append that the driver can take; 0: appends are emulated.
    pub max_hw_zone_append_sectors: Sectors,
    /// The largest zone append: computed.
    pub max_zone_append_sectors: Sectors,
    /// The unit of writing in a sequential zone.
    pub zone_write_granularity: Bytes,
    /// Zones that may be open at once; 0: all.
    pub max_open_zones: u32,
    /// Zones that may be open or partly written at once; 0: all.
    pub max_active_zones: u32,

    /// The largest atomic write that the driver can take.
    pub atomic_write_hw_max: Bytes,
    /// No atomic write crosses a multiple of this; 0: no such limit.
    pub atomic_write_hw_boundary: Bytes,
    /// The smallest atomic write by the driver: a power of two.
    pub atomic_write_hw_unit_min: Bytes,
    /// The largest naturally aligned atomic write by the driver: a power of two.
    pub atomic_write_hw_unit_max: Bytes,
    /// The largest atomic write: computed.
    pub atomic_write_max_sectors: Sectors,
    /// No atomic write crosses a multiple of this: computed.
    pub atomic_write_boundary_sectors: Sectors,
    /// The smallest atomic write: computed.
    pub atomic_write_unit_min: Bytes,
    /// The largest naturally aligned atomic write: computed.
    pub atomic_write_unit_max: Bytes,
}

/// All unset.
const UNSET: QueueLimits = QueueLimits {
    features: Features::NONE,
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
    /// What a driver starts from: all unset, and no wish of the user that limits discards. Not yet usable:
    /// [`validate`](QueueLimits::validate) puts the kernel's defaults in (255 sectors, 128 segments of
    /// 64 KiB, no discard).
    fn default() -> Self {
        QueueLimits {
            max_user_discard_sectors: UNLIMITED_SECTORS,
            max_user_wzeroes_unmap_sectors: UNLIMITED_SECTORS,
            ..UNSET
        }
    }
}

impl QueueLimits {
    /// What a stacking device starts from, before it takes in its children: no limits.
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

    /// `alignment_offset` as sysfs shows it: −1 when the children do not line up.
    pub fn alignment_offset_shown(&self) -> i64 {
        if self.misaligned { -1 } else { self.alignment_offset.0 as i64 }
    }

    /// Bytes from `start` to the next place where the device's physical blocks begin: what a part of the
    /// device that starts there has as its own `alignment_offset`.
    pub fn alignment_offset_at(&self, start: Sectors) -> Bytes {
        let granularity = self.physical_block_size.0.max(self.io_min.0).max(512);
        let into = (start.0 % (granularity >> Sectors::SHIFT)) << Sectors::SHIFT;
        Bytes((granularity + self.alignment_offset.0 - into) % granularity)
    }

    /// Bytes from `start` to the next place where a discard may begin; 0 when it cannot discard.
    pub fn discard_alignment_at(&self, start: Sectors) -> Bytes {
        let granularity = self.discard_granularity.sectors().0;
        if self.max_discard_sectors.0 == 0 || granularity == 0 {
            return Bytes::ZERO;
        }
        let alignment = self.discard_alignment.sectors().0;
        Sectors((granularity + alignment - start.0 % granularity) % granularity).bytes()
    }
}
