//! The configuration space of a virtio block device, and the features that the device offers.

use super::SECTOR;
use crate::Features;
use block::{Bytes, QueueLimits, Sectors};

/// Properties that the front-end adds to the limits of the block device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Shape {
    /// Number of request queues.
    pub queues: u16,
    /// Maximum number of data segments of a request.
    pub segments_max: u32,
    /// Longest data segment in bytes.
    pub segment_len_max: u32,
    /// Maximum number of ranges of a discard or write zeroes request.
    pub ranges_max: u32,
    /// Whether the device refuses writes.
    pub is_read_only: bool,
}

impl Shape {
    /// Sectors of the longest request.
    fn sectors_max(&self) -> u32 {
        let len = u64::from(self.segments_max) * u64::from(self.segment_len_max);
        u32::try_from(len / SECTOR).unwrap_or(u32::MAX)
    }
}

/// `VIRTIO_BLK_Z_HM`: a host-managed zoned device.
const HOST_MANAGED: u8 = 1;

/// Zones of a device, as the configuration space describes them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Zoned {
    pub(super) zone_sectors: u32,
    open_max: u32,
    active_max: u32,
    pub(super) append_sectors_max: u32,
    pub(super) write_granularity: u32,
}

/// The configuration of a virtio block device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Config {
    pub(super) capacity: Sectors,
    pub(super) block_size: u32,
    pub(super) is_read_only: bool,
    pub(super) discard_sectors_max: u32,
    pub(super) discard_ranges_max: u32,
    pub(super) write_zeroes_sectors_max: u32,
    pub(super) write_zeroes_ranges_max: u32,
    discard_alignment: u32,
    may_unmap: bool,
    physical_exponent: u8,
    alignment_offset: u8,
    io_min_blocks: u16,
    io_opt_blocks: u32,
    has_write_cache: bool,
    is_write_back: bool,
    shape: Shape,
    pub(super) zoned: Option<Zoned>,
}

impl Config {
    /// Bytes of the configuration space, up to and including the zoned characteristics.
    pub const LEN: usize = 96;
    /// Offset of `writeback`, the only byte that the driver may write.
    pub const WRITE_BACK_AT: usize = 32;

    /// Describes a device with validated limits.
    pub fn new(limits: &QueueLimits, capacity: Bytes, shape: Shape) -> Config {
        let block = limits.logical_block_size.0.max(SECTOR);
        let sectors = |sectors: Sectors| u32::try_from(sectors.0).unwrap_or(u32::MAX);
        let blocks = |bytes: Bytes| u32::try_from(bytes.0 / block).unwrap_or(u32::MAX);
        let ranges = |sectors_max: Sectors| if sectors_max.0 == 0 { 0 } else { shape.ranges_max };
        let physical = (limits.physical_block_size.0 / block).max(1);
        let is_zoned = limits.features.contains(block::Features::ZONED);
        let zoned = is_zoned.then(|| Zoned {
            zone_sectors: sectors(limits.chunk_sectors),
            open_max: limits.max_open_zones,
            active_max: limits.max_active_zones,
            append_sectors_max: sectors(limits.max_zone_append_sectors).min(shape.sectors_max()),
            write_granularity: u32::try_from(limits.zone_write_granularity.0.max(block)).unwrap_or(u32::MAX),
        });
        // 5.2.5.1: a host-managed device must not offer discard.
        let discard = if is_zoned { Sectors(0) } else { limits.max_discard_sectors };
        let has_write_cache = limits.features.contains(block::Features::WRITE_CACHE);
        Config {
            capacity: Sectors(capacity.0 / SECTOR),
            block_size: u32::try_from(block).unwrap_or(512),
            is_read_only: shape.is_read_only,
            discard_sectors_max: sectors(discard),
            discard_ranges_max: ranges(discard),
            write_zeroes_sectors_max: sectors(limits.max_write_zeroes_sectors),
            write_zeroes_ranges_max: ranges(limits.max_write_zeroes_sectors),
            discard_alignment: sectors(limits.discard_granularity.sectors()).max((block / SECTOR) as u32),
            may_unmap: limits.max_wzeroes_unmap_sectors.0 > 0,
            physical_exponent: physical.ilog2() as u8,
            alignment_offset: u8::try_from(limits.alignment_offset.0 / block).unwrap_or(0),
            io_min_blocks: u16::try_from(blocks(limits.io_min)).unwrap_or(u16::MAX),
            io_opt_blocks: blocks(limits.io_opt),
            has_write_cache,
            is_write_back: has_write_cache,
            shape,
            zoned,
        }
    }

    /// Returns the size of the device.
    pub fn capacity(&self) -> Sectors {
        self.capacity
    }

    /// Whether the device is zoned (host-managed).
    pub fn is_zoned(&self) -> bool {
        self.zoned.is_some()
    }

    /// First byte of the zone that contains `offset`; 0 for a device without zones.
    pub fn zone_start(&self, offset: Bytes) -> Bytes {
        let len = self.zoned.map_or(0, |zoned| u64::from(zoned.zone_sectors) * SECTOR);
        Bytes(offset.0.checked_div(len).unwrap_or(0) * len)
    }

    /// Changes the size: the driver is notified that the configuration changed.
    pub fn set_capacity(&mut self, capacity: Bytes) {
        self.capacity = Sectors(capacity.0 / SECTOR);
    }

    /// Returns whether the driver manages the write cache (`writeback` is 1). If not, every write must be
    /// durable when it completes.
    #[inline]
    pub fn is_write_back(&self) -> bool {
        self.is_write_back
    }

    /// Stores the driver's choice of the cache mode. A device without a write cache stays in write-through
    /// mode.
    pub fn set_write_back(&mut self, on: bool) {
        self.is_write_back = on && self.has_write_cache;
    }

    /// Returns the offered features of the block device. The transport adds those of rings and of
    /// vhost-user.
    pub fn features(&self) -> Features {
        let when = |holds: bool, feature: Features| if holds { feature } else { Features::empty() };
        // FLUSH is offered even without a write cache: "Devices SHOULD always offer VIRTIO_BLK_F_FLUSH".
        Features::SIZE_MAX
            | Features::SEG_MAX
            | Features::BLK_SIZE
            | Features::FLUSH
            | Features::TOPOLOGY
            | Features::CONFIG_WCE
            | when(self.is_read_only, Features::RO)
            | when(self.shape.queues > 1, Features::MQ)
            | when(self.discard_ranges_max > 0 && !self.is_read_only, Features::DISCARD)
            | when(self.write_zeroes_ranges_max > 0 && !self.is_read_only, Features::WRITE_ZEROES)
            | when(self.zoned.is_some(), Features::ZONED)
    }

    /// Returns the configuration space. `features` are those that the driver acknowledged, or all offered
    /// ones: the zoned characteristics are included only if the driver knows them.
    pub fn to_bytes(&self, features: Features) -> [u8; Config::LEN] {
        let mut space = [0; Config::LEN];
        let mut at = |offset: usize, bytes: &[u8]| space[offset..offset + bytes.len()].copy_from_slice(bytes);
        at(0, &self.capacity.0.to_le_bytes());
        at(8, &self.shape.segment_len_max.to_le_bytes());
        at(12, &self.shape.segments_max.to_le_bytes());
        // Offset 16 is the geometry, which is not offered.
        at(20, &self.block_size.to_le_bytes());
        at(24, &[self.physical_exponent, self.alignment_offset]);
        at(26, &self.io_min_blocks.to_le_bytes());
        at(28, &self.io_opt_blocks.to_le_bytes());
        at(Config::WRITE_BACK_AT, &[self.is_write_back.into()]);
        at(34, &self.shape.queues.to_le_bytes());
        at(36, &self.discard_sectors_max.to_le_bytes());
        at(40, &self.discard_ranges_max.to_le_bytes());
        at(44, &self.discard_alignment.to_le_bytes());
        at(48, &self.write_zeroes_sectors_max.to_le_bytes());
        at(52, &self.write_zeroes_ranges_max.to_le_bytes());
        at(56, &[self.may_unmap.into()]);
        // Offset 60 is secure erase, which is not offered.
        if let Some(zoned) = self.zoned.filter(|_| features.contains(Features::ZONED)) {
            at(72, &zoned.zone_sectors.to_le_bytes());
            at(76, &zoned.open_max.to_le_bytes());
            at(80, &zoned.active_max.to_le_bytes());
            at(84, &zoned.append_sectors_max.to_le_bytes());
            at(88, &zoned.write_granularity.to_le_bytes());
            at(92, &[HOST_MANAGED]);
        }
        space
    }
}
