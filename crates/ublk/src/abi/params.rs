//! `struct ublk_params`: parameters of a block device.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Lower bound of [`ParamSegment`]'s maximum segment size, in bytes.
pub const SEGMENT_SIZE_MIN: u32 = 4096;

/// Attributes of a device.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Attributes(pub u32);

impl Attributes {
    /// The device is read-only.
    pub const READ_ONLY: Attributes = Attributes(1);
    /// The device is rotational: seeks are slow.
    pub const ROTATIONAL: Attributes = Attributes(2);
    /// The device has a volatile write cache, so durability requires flushes.
    pub const VOLATILE_CACHE: Attributes = Attributes(4);
    /// The device supports FUA writes.
    pub const FUA: Attributes = Attributes(8);

    /// Returns the attributes, with `other` added if `wanted`.
    #[must_use]
    pub const fn with(self, other: Attributes, wanted: bool) -> Attributes {
        if wanted { Attributes(self.0 | other.0) } else { self }
    }

    /// Returns whether this set contains all attributes of `other`.
    pub const fn has(self, other: Attributes) -> bool {
        self.0 & other.0 == other.0
    }
}

/// Set of the valid parts of [`Params`].
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ParamTypes(pub u32);

impl ParamTypes {
    /// [`Params::basic`]; required.
    pub const BASIC: ParamTypes = ParamTypes(1);
    /// [`Params::discard`].
    pub const DISCARD: ParamTypes = ParamTypes(2);
    /// [`Params::devt`], set by the driver.
    pub const DEVT: ParamTypes = ParamTypes(4);
    /// [`Params::zoned`].
    pub const ZONED: ParamTypes = ParamTypes(8);
    /// [`Params::dma`].
    pub const DMA_ALIGN: ParamTypes = ParamTypes(16);
    /// [`Params::seg`].
    pub const SEGMENT: ParamTypes = ParamTypes(32);
    /// [`Params::integrity`].
    pub const INTEGRITY: ParamTypes = ParamTypes(64);

    /// Returns whether this set contains all types of `other`.
    pub const fn has(self, other: ParamTypes) -> bool {
        self.0 & other.0 == other.0
    }

    /// Returns the union of both sets.
    #[must_use]
    pub const fn with(self, other: ParamTypes) -> ParamTypes {
        ParamTypes(self.0 | other.0)
    }
}

/// `struct ublk_param_basic`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct ParamBasic {
    /// [`Attributes`].
    pub attrs: u32,
    /// `log2` of the logical block size in bytes.
    pub logical_bs_shift: u8,
    /// `log2` of the physical block size in bytes.
    pub physical_bs_shift: u8,
    /// `log2` of the optimal request size in bytes.
    pub io_opt_shift: u8,
    /// `log2` of the minimum efficient request size in bytes.
    pub io_min_shift: u8,
    /// Largest request, in sectors.
    pub max_sectors: u32,
    /// Boundary that requests do not cross multiples of, in sectors; 0 for none. For zoned devices the zone
    /// size.
    pub chunk_sectors: u32,
    /// Size in sectors.
    pub dev_sectors: u64,
    /// Mask of the boundary at which gaps between segments must lie: the boundary in bytes, minus one.
    pub virt_boundary_mask: u64,
}

/// `struct ublk_param_discard`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct ParamDiscard {
    /// Offset of the first discard unit, in bytes.
    pub discard_alignment: u32,
    /// Discard unit, in bytes.
    pub discard_granularity: u32,
    /// Largest discard, in sectors.
    pub max_discard_sectors: u32,
    /// Largest write-zeroes request, in sectors.
    pub max_write_zeroes_sectors: u32,
    /// Maximum number of ranges of a discard; the driver accepts only 1.
    pub max_discard_segments: u16,
    /// Must be zero.
    pub reserved0: u16,
}

/// `struct ublk_param_devt`: device numbers, set by the driver.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct ParamDevt {
    /// Major number of `/dev/ublkcN`.
    pub char_major: u32,
    /// Minor number of `/dev/ublkcN`.
    pub char_minor: u32,
    /// Major number of `/dev/ublkbN`, or 0 until it is started.
    pub disk_major: u32,
    /// Minor number of `/dev/ublkbN`.
    pub disk_minor: u32,
}

/// `struct ublk_param_zoned`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct ParamZoned {
    /// Maximum number of open zones; 0 for no limit.
    pub max_open_zones: u32,
    /// Maximum number of active zones; 0 for no limit.
    pub max_active_zones: u32,
    /// Largest zone append, in sectors; not 0.
    pub max_zone_append_sectors: u32,
    /// Must be zero.
    pub reserved: [u8; 20],
}

/// `struct ublk_param_dma_align`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct ParamDmaAlign {
    /// Alignment of buffers for direct I/O in bytes, minus one.
    pub alignment: u32,
    /// Must be zero.
    pub pad: [u8; 4],
}

/// `struct ublk_param_segment`. None of its values may be 0.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct ParamSegment {
    /// Mask of the boundary that segments must not cross: the boundary in bytes, minus one.
    pub seg_boundary_mask: u64,
    /// Longest segment, in bytes; at least [`SEGMENT_SIZE_MIN`].
    pub max_segment_size: u32,
    /// Maximum number of segments of a request.
    pub max_segments: u16,
    /// Must be zero.
    pub pad: [u8; 2],
}

/// `struct ublk_param_integrity`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct ParamIntegrity {
    /// `LBMD_PI_CAP_*` of `linux/fs.h`.
    pub flags: u32,
    /// Maximum number of segments of integrity data; 0 for no limit.
    pub max_integrity_segments: u16,
    /// `log2` of the data bytes that one tuple protects.
    pub interval_exp: u8,
    /// Bytes of metadata per interval; not 0.
    pub metadata_size: u8,
    /// Offset of the tuple in the metadata, in bytes.
    pub pi_offset: u8,
    /// `LBMD_PI_CSUM_*` of `linux/fs.h`.
    pub csum_type: u8,
    /// Bytes of application tag.
    pub tag_size: u8,
    /// Must be zero.
    pub pad: [u8; 5],
}

impl ParamIntegrity {
    /// Bit of `flags`: the block layer generates and verifies tuples (`LBMD_PI_CAP_INTEGRITY`).
    pub const CAN_GUARD: u32 = 1;
    /// Bit of `flags`: tuples have a reference tag (`LBMD_PI_CAP_REFTAG`).
    pub const HAS_REF_TAG: u32 = 2;
    /// Value of `csum_type`: no checksum; tuples are not verified.
    pub const CSUM_NONE: u8 = 0;
    /// Value of `csum_type`: T10 PI with the IP checksum.
    pub const CSUM_IP: u8 = 1;
    /// Value of `csum_type`: T10 PI with CRC-16.
    pub const CSUM_CRC16: u8 = 2;
    /// Value of `csum_type`: NVMe protection information with CRC-64.
    pub const CSUM_CRC64: u8 = 4;

    /// Returns the bytes of the tuple that the driver interprets, or `None` for an unknown type.
    pub const fn tuple_len(&self) -> Option<u8> {
        match self.csum_type {
            ParamIntegrity::CSUM_NONE => Some(0),
            ParamIntegrity::CSUM_IP | ParamIntegrity::CSUM_CRC16 => Some(8),
            ParamIntegrity::CSUM_CRC64 => Some(16),
            _ => None,
        }
    }
}

/// `struct ublk_params`. A driver with a shorter structure uses only the beginning, and returns its own
/// length in `len`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Params {
    /// Bytes of the structure.
    pub len: u32,
    /// Valid parts: [`ParamTypes`].
    pub types: u32,
    /// Basic parameters.
    pub basic: ParamBasic,
    /// Discard and write zeroes.
    pub discard: ParamDiscard,
    /// Device numbers.
    pub devt: ParamDevt,
    /// Zones.
    pub zoned: ParamZoned,
    /// Memory alignment.
    pub dma: ParamDmaAlign,
    /// Padding that a C compiler inserts to align the next field; must be zero.
    pub gap: [u8; 4],
    /// Segments.
    pub seg: ParamSegment,
    /// Integrity.
    pub integrity: ParamIntegrity,
}

impl Params {
    /// Creates parameters without any valid part.
    pub fn new() -> Params {
        Params {
            len: size_of::<Params>() as u32,
            types: 0,
            basic: ParamBasic::default(),
            discard: ParamDiscard::default(),
            devt: ParamDevt::default(),
            zoned: ParamZoned::default(),
            dma: ParamDmaAlign::default(),
            gap: [0; 4],
            seg: ParamSegment::default(),
            integrity: ParamIntegrity::default(),
        }
    }

    /// Returns the valid parts.
    pub const fn types(&self) -> ParamTypes {
        ParamTypes(self.types)
    }

    /// Returns the attributes.
    pub const fn attributes(&self) -> Attributes {
        Attributes(self.basic.attrs)
    }
}

impl Default for Params {
    fn default() -> Params {
        Params::new()
    }
}
