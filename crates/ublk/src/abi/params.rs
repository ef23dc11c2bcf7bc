//! `struct ublk_params`: what a block device is like.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// The least that [`ParamSegment`] may allow for a segment, in bytes.
pub const SEGMENT_SIZE_MIN: u32 = 4096;

/// Properties of a device.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Attributes(pub u32);

impl Attributes {
    /// Not to be written.
    pub const READ_ONLY: Attributes = Attributes(1);
    /// Seeks cost.
    pub const ROTATIONAL: Attributes = Attributes(2);
    /// What was written is durable only after a flush.
    pub const VOLATILE_CACHE: Attributes = Attributes(4);
    /// A write can be durable by itself.
    pub const FUA: Attributes = Attributes(8);

    /// With these too, if `wanted`.
    #[must_use]
    pub const fn with(self, other: Attributes, wanted: bool) -> Attributes {
        if wanted { Attributes(self.0 | other.0) } else { self }
    }

    /// Whether all of `other` are set.
    pub const fn has(self, other: Attributes) -> bool {
        self.0 & other.0 == other.0
    }
}

/// Which parts of [`Params`] count.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ParamTypes(pub u32);

impl ParamTypes {
    /// [`Params::basic`]; every device has it.
    pub const BASIC: ParamTypes = ParamTypes(1);
    /// [`Params::discard`].
    pub const DISCARD: ParamTypes = ParamTypes(2);
    /// [`Params::devt`]; the driver fills it in.
    pub const DEVT: ParamTypes = ParamTypes(4);
    /// [`Params::zoned`].
    pub const ZONED: ParamTypes = ParamTypes(8);
    /// [`Params::dma`].
    pub const DMA_ALIGN: ParamTypes = ParamTypes(16);
    /// [`Params::seg`].
    pub const SEGMENT: ParamTypes = ParamTypes(32);
    /// [`Params::integrity`].
    pub const INTEGRITY: ParamTypes = ParamTypes(64);

    /// Whether all of `other` are in it.
    pub const fn has(self, other: ParamTypes) -> bool {
        self.0 & other.0 == other.0
    }

    /// With these too.
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
    /// `log2` of the logical block, in bytes.
    pub logical_bs_shift: u8,
    /// `log2` of the physical block, in bytes.
    pub physical_bs_shift: u8,
    /// `log2` of the optimal request, in bytes.
    pub io_opt_shift: u8,
    /// `log2` of the smallest good request, in bytes.
    pub io_min_shift: u8,
    /// The largest request, in sectors.
    pub max_sectors: u32,
    /// Requests do not cross multiples of this, in sectors; 0: they may. For zoned devices the zone size.
    pub chunk_sectors: u32,
    /// The size, in sectors.
    pub dev_sectors: u64,
    /// Segments start and end at multiples of this plus one, in bytes.
    pub virt_boundary_mask: u64,
}

/// `struct ublk_param_discard`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct ParamDiscard {
    /// Where the first granule starts, in bytes.
    pub discard_alignment: u32,
    /// What is discarded at the least, in bytes.
    pub discard_granularity: u32,
    /// The most in one, in sectors.
    pub max_discard_sectors: u32,
    /// The most write zeroes in one, in sectors.
    pub max_write_zeroes_sectors: u32,
    /// Ranges in one: the driver takes 1 only.
    pub max_discard_segments: u16,
    /// Zero.
    pub reserved0: u16,
}

/// `struct ublk_param_devt`: device numbers, filled in by the driver.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct ParamDevt {
    /// Of `/dev/ublkcN`.
    pub char_major: u32,
    /// Of `/dev/ublkcN`.
    pub char_minor: u32,
    /// Of `/dev/ublkbN`; 0 until it is started.
    pub disk_major: u32,
    /// Of `/dev/ublkbN`.
    pub disk_minor: u32,
}

/// `struct ublk_param_zoned`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct ParamZoned {
    /// Zones open at a time; 0: any number.
    pub max_open_zones: u32,
    /// Zones active at a time; 0: any number.
    pub max_active_zones: u32,
    /// The largest zone append, in sectors; not 0.
    pub max_zone_append_sectors: u32,
    /// Zero.
    pub reserved: [u8; 20],
}

/// `struct ublk_param_dma_align`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct ParamDmaAlign {
    /// What buffers of direct I/O must be aligned to, less one, in bytes.
    pub alignment: u32,
    /// Zero.
    pub pad: [u8; 4],
}

/// `struct ublk_param_segment`. None of its values may be 0.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct ParamSegment {
    /// Segments do not cross multiples of this plus one, in bytes.
    pub seg_boundary_mask: u64,
    /// The longest segment, in bytes; at least [`SEGMENT_SIZE_MIN`].
    pub max_segment_size: u32,
    /// The most segments of a request.
    pub max_segments: u16,
    /// Zero.
    pub pad: [u8; 2],
}

/// `struct ublk_param_integrity`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct ParamIntegrity {
    /// `LBMD_PI_CAP_*` of `linux/fs.h`.
    pub flags: u32,
    /// The most segments of integrity data; 0: any number.
    pub max_integrity_segments: u16,
    /// `log2` of the bytes that one tuple protects.
    pub interval_exp: u8,
    /// Bytes of metadata for each of them; not 0.
    pub metadata_size: u8,
    /// Where the tuple starts in it, in bytes.
    pub pi_offset: u8,
    /// `LBMD_PI_CSUM_*` of `linux/fs.h`.
    pub csum_type: u8,
    /// Bytes of application tag.
    pub tag_size: u8,
    /// Zero.
    pub pad: [u8; 5],
}

impl ParamIntegrity {
    /// Of `flags`: tuples are made and checked by whoever knows how.
    pub const CAN_GUARD: u32 = 1;
    /// Of `flags`: a tuple says where it belongs.
    pub const HAS_PLACE: u32 = 2;
    /// A `csum_type`: tuples are nobody's to check.
    pub const CSUM_NONE: u8 = 0;
    /// A `csum_type`: T10's tuples with the IP checksum.
    pub const CSUM_IP: u8 = 1;
    /// A `csum_type`: T10's tuples with CRC-16.
    pub const CSUM_CRC16: u8 = 2;
    /// A `csum_type`: NVMe's tuples with CRC-64.
    pub const CSUM_CRC64: u8 = 4;

    /// How much of the metadata is what the driver knows of; `None`: there is no such type.
    pub const fn tuple_len(&self) -> Option<u8> {
        match self.csum_type {
            ParamIntegrity::CSUM_NONE => Some(0),
            ParamIntegrity::CSUM_IP | ParamIntegrity::CSUM_CRC16 => Some(8),
            ParamIntegrity::CSUM_CRC64 => Some(16),
            _ => None,
        }
    }
}

/// `struct ublk_params`. A driver with a shorter one takes the beginning and says so in `len`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Params {
    /// Length of the whole, in bytes.
    pub len: u32,
    /// [`ParamTypes`].
    pub types: u32,
    /// What every device has.
    pub basic: ParamBasic,
    /// Discard and write zeroes.
    pub discard: ParamDiscard,
    /// Device numbers.
    pub devt: ParamDevt,
    /// Zones.
    pub zoned: ParamZoned,
    /// Memory alignment.
    pub dma: ParamDmaAlign,
    /// What a C compiler leaves out here to align the next field. Zero.
    pub gap: [u8; 4],
    /// Segments.
    pub seg: ParamSegment,
    /// Integrity.
    pub integrity: ParamIntegrity,
}

impl Params {
    /// Nothing said yet.
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

    /// Which parts count.
    pub const fn types(&self) -> ParamTypes {
        ParamTypes(self.types)
    }

    /// The attributes.
    pub const fn attributes(&self) -> Attributes {
        Attributes(self.basic.attrs)
    }
}

impl Default for Params {
    fn default() -> Params {
        Params::new()
    }
}
