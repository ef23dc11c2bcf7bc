//! Properties of the medium: type and abilities of the device under a logical unit.

use crate::Zoned;
use bitflags::bitflags;
use block::{Bytes, Features, Profile};

bitflags! {
    /// Optional abilities of a device.
    #[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
    pub struct Can: u8 {
        /// [`Op::Discard`](block::Op::Discard) is supported.
        const UNMAP = 1;
        /// [`Op::WriteZeroes`](block::Op::WriteZeroes) is supported.
        const WRITE_ZEROES = 1 << 1;
        /// [`Flags::FUA`](block::Flags::FUA) is supported; otherwise a FUA write is a write and a flush.
        const FUA = 1 << 2;
        /// [`Op::Extents`](block::Op::Extents) is supported.
        const EXTENTS = 1 << 3;
        /// A discarded range reads as zeroes.
        const UNMAP_ZEROES = 1 << 4;
        /// Blocks that were never written have no storage, so writes can fail with
        /// [`Status::NoSpace`](block::Status::NoSpace).
        const THIN = 1 << 5;
    }
}

/// The device under a logical unit. Lengths are in bytes unless a name says blocks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Media {
    /// Capacity in logical blocks.
    pub blocks: u64,
    /// Bytes of a logical block: a power of two from 512 to 65536.
    pub block_size: u32,
    /// `log2` of the number of logical blocks in a physical block.
    pub physical_exponent: u8,
    /// First LBA that is at the start of a physical block.
    pub lowest_aligned: u16,
    /// Longest transfer of a command in bytes; a multiple of the block size.
    pub transfer_max: u32,
    /// Optimal length of a transfer; 0: unknown.
    pub transfer_best: u32,
    /// Smallest efficient length of a transfer; 0: one block.
    pub transfer_min: u32,
    /// Smallest range that can be deallocated; 0: one block.
    pub unmap_granularity: u32,
    /// Offset of the first range that can be deallocated.
    pub unmap_alignment: u32,
    /// Longest write that is atomic with regard to power loss; 0: none is guaranteed.
    pub atomic_max: u32,
    /// The medium is read-only: writes fail.
    pub read_only: bool,
    /// The medium is rotational: seeks are slow.
    pub rotational: bool,
    /// START STOP UNIT ejects and loads the medium (RMB).
    pub removable: bool,
    /// Writes may be lost in a power failure until a flush.
    pub write_cache: bool,
    /// Optional abilities.
    pub can: Can,
    /// Zones of a host-managed zoned unit; `None` for other units.
    pub zones: Option<Zoned>,
}

impl Media {
    /// Longest transfer of a command in bytes, unless the device has a lower limit.
    pub const TRANSFER_MAX: u32 = 8 << 20;

    /// Creates a medium without optional abilities.
    pub const fn new(blocks: u64, block_size: u32) -> Media {
        Media {
            blocks,
            block_size,
            physical_exponent: 0,
            lowest_aligned: 0,
            transfer_max: Media::TRANSFER_MAX,
            transfer_best: 0,
            transfer_min: 0,
            unmap_granularity: 0,
            unmap_alignment: 0,
            atomic_max: 0,
            read_only: false,
            rotational: false,
            removable: false,
            write_cache: false,
            can: Can::empty(),
            zones: None,
        }
    }

    /// Returns the medium for a device with this profile.
    pub fn of(profile: &Profile) -> Media {
        let (limits, abilities) = (&profile.limits, &profile.abilities);
        let block_size = u32::try_from(limits.logical_block_size.0).unwrap_or(512).clamp(512, 1 << 16);
        let bytes = |bytes: Bytes| u32::try_from(bytes.0).unwrap_or(u32::MAX) / block_size * block_size;
        let abilities = [
            (abilities.discard, Can::UNMAP),
            (abilities.write_zeroes, Can::WRITE_ZEROES),
            (abilities.fua, Can::FUA),
            (profile.sparse, Can::EXTENTS | Can::THIN),
        ];
        let can = abilities.into_iter().filter(|(has, _)| *has).fold(Can::empty(), |can, (_, one)| can | one);
        let physical = limits.physical_block_size.0.checked_div(block_size.into()).unwrap_or(1).max(1);
        // Atomic writes with a boundary are not offered, because WRITE ATOMIC (16) may start anywhere.
        let atomic_max = match limits.atomic_write_boundary_sectors.0 {
            _ if limits.features.contains(Features::ZONED) => 0,
            0 => bytes(limits.atomic_write_max_sectors.bytes()).min(Media::TRANSFER_MAX),
            _ => 0,
        };
        let zone_blocks = limits.chunk_sectors.bytes().0 / u64::from(block_size);
        let is_zoned = limits.features.contains(Features::ZONED) && zone_blocks > 0;
        let zones = is_zoned.then_some(Zoned { zone_blocks, open_max: limits.max_open_zones });
        let lowest = limits.alignment_offset.0 / u64::from(block_size);
        Media {
            physical_exponent: physical.ilog2().min(15) as u8,
            lowest_aligned: u16::try_from(lowest).unwrap_or(0),
            transfer_max: Media::TRANSFER_MAX,
            transfer_best: bytes(limits.io_opt),
            transfer_min: bytes(limits.io_min),
            unmap_granularity: bytes(limits.discard_granularity),
            unmap_alignment: bytes(limits.discard_alignment),
            atomic_max,
            read_only: profile.read_only,
            rotational: profile.abilities.rotational,
            write_cache: limits.features.contains(Features::WRITE_CACHE),
            // Zones are reset instead of deallocated.
            can: if is_zoned { can & Can::FUA } else { can },
            zones,
            ..Media::new(profile.size.0 / u64::from(block_size), block_size)
        }
    }

    /// Returns `log2` of the block size.
    pub const fn block_shift(&self) -> u32 {
        self.block_size.trailing_zeros()
    }

    /// Returns the capacity in bytes.
    pub const fn bytes(&self) -> u64 {
        self.blocks.saturating_mul(self.block_size as u64)
    }

    /// Returns the number of whole blocks in this many bytes.
    pub const fn blocks_of(&self, bytes: u32) -> u32 {
        bytes >> self.block_shift()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use block::{Abilities, QueueLimits};

    #[test]
    fn a_profile_becomes_the_medium_that_it_describes() {
        let mut limits = QueueLimits {
            features: Features::WRITE_CACHE | Features::FUA,
            logical_block_size: Bytes(512),
            physical_block_size: Bytes(4096),
            io_opt: Bytes(1 << 20),
            discard_granularity: Bytes(4096),
            ..QueueLimits::default()
        };
        limits.io_min = Bytes(4096);
        let profile = Profile {
            size: Bytes(1_000_000 * 512),
            read_only: true,
            abilities: Abilities { fua: true, discard: true, ..Abilities::MEMORY },
            limits,
            bytewise: false,
            zero_copy_reads: false,
            inline: false,
            sparse: true,
            opaque: true,
        };
        let media = Media::of(&profile);
        assert_eq!((media.blocks, media.block_size, media.physical_exponent), (1_000_000, 512, 3));
        assert_eq!((media.transfer_best, media.transfer_min, media.unmap_granularity), (1 << 20, 4096, 4096));
        assert!(media.read_only && media.write_cache && !media.rotational && !media.removable);
        assert_eq!(media.can, Can::UNMAP | Can::WRITE_ZEROES | Can::FUA | Can::EXTENTS | Can::THIN);
        assert_eq!((media.atomic_max, media.zones), (0, None));
        let mut zoned = profile;
        zoned.limits.features |= Features::ZONED;
        (zoned.limits.chunk_sectors, zoned.limits.max_open_zones) = (block::Sectors(8192), 7);
        zoned.limits.atomic_write_max_sectors = block::Sectors(64);
        let media = Media::of(&zoned);
        assert_eq!(media.zones, Some(Zoned { zone_blocks: 8192, open_max: 7 }));
        assert_eq!((media.can, media.atomic_max), (Can::FUA, 0));
    }
}
