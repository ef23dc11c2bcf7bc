//! The table of numeric limits, from which listings, the parser and its messages are generated.

use super::{Features, QueueLimits};
use crate::{Bytes, Sectors};
use std::fmt;

/// Unit of a limit's value.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Unit {
    /// Bytes.
    Bytes,
    /// Sectors of 512 bytes.
    Sectors,
    /// A bit mask: a number of bytes less one.
    Mask,
    /// A plain number.
    Count,
}

type Set = fn(&mut QueueLimits, u64);

/// One limit, by its kernel name.
#[derive(Clone, Copy)]
pub struct Field {
    /// The kernel's name of the field.
    pub name: &'static str,
    /// Purpose, in half a line.
    pub about: &'static str,
    /// Unit of its value.
    pub unit: Unit,
    /// Largest value that the kernel's type holds.
    pub(super) max: u64,
    get: fn(&QueueLimits) -> u64,
    /// `None` for fields that `validate` computes and that no user limit influences, and for fields without a
    /// counterpart here.
    pub(super) set: Option<Set>,
}

impl Field {
    /// Reason why the limit cannot be set; `None`: it can be set.
    pub fn why_fixed(&self) -> Option<&'static str> {
        if self.set.is_some() {
            return None;
        }
        Some(match self.name {
            "features" | "flags" => "it is determined by the devices below",
            "max_zone_append_sectors" => "it is computed (set max_hw_zone_append_sectors)",
            "atomic_write_max_sectors" => "it is computed (set atomic_write_hw_max)",
            "atomic_write_boundary_sectors" => "it is computed (set atomic_write_hw_boundary)",
            "atomic_write_unit_min" => "it is computed (set atomic_write_hw_unit_min)",
            "atomic_write_unit_max" => "it is computed (set atomic_write_hw_unit_max)",
            "dma_pad_mask" => "nothing here pads memory",
            "max_integrity_segments" => "integrity data is never cut here",
            _ => "nothing here has write streams",
        })
    }
}

impl fmt::Debug for Field {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({:?})", self.name, self.unit)
    }
}

macro_rules! row {
    ($name:ident, Bytes, $about:literal, $set:expr) => {
        Field {
            name: stringify!($name),
            about: $about,
            unit: Unit::Bytes,
            max: u32::MAX as u64,
            get: |limits| limits.$name.0,
            set: $set,
        }
    };
    ($name:ident, Sectors, $about:literal, $set:expr) => {
        Field {
            name: stringify!($name),
            about: $about,
            unit: Unit::Sectors,
            max: u32::MAX as u64,
            get: |limits| limits.$name.0,
            set: $set,
        }
    };
    ($name:ident, Mask, $about:literal, $set:expr) => {
        Field {
            name: stringify!($name),
            about: $about,
            unit: Unit::Mask,
            max: u64::MAX,
            get: |limits| limits.$name,
            set: $set,
        }
    };
    ($name:ident, $count:ty, $about:literal, $set:expr) => {
        Field {
            name: stringify!($name),
            about: $about,
            unit: Unit::Count,
            max: <$count>::MAX as u64,
            get: |limits| limits.$name.into(),
            set: $set,
        }
    };
}

/// A row whose field is set to the given value.
macro_rules! field {
    ($name:ident, Bytes, $about:literal) => {
        row!($name, Bytes, $about, Some(|limits, value| limits.$name = Bytes(value)))
    };
    ($name:ident, Sectors, $about:literal) => {
        row!($name, Sectors, $about, Some(|limits, value| limits.$name = Sectors(value)))
    };
    ($name:ident, Mask, $about:literal) => {
        row!($name, Mask, $about, Some(|limits, value| limits.$name = value))
    };
    ($name:ident, $count:ty, $about:literal) => {
        row!($name, $count, $about, Some(|limits, value| limits.$name = value as $count))
    };
}

/// A row whose field is computed; setting it sets the user's limit `$through`, as writing to sysfs does.
macro_rules! user {
    ($name:ident, $through:ident, $about:literal) => {
        row!($name, Sectors, $about, Some(|limits, value| limits.$through = Sectors(value)))
    };
}

/// A row for a field of the kernel's structure that no device here has.
macro_rules! absent {
    ($name:literal, $unit:ident, $about:literal) => {
        Field { name: $name, about: $about, unit: Unit::$unit, max: 0, get: |_| 0, set: None }
    };
}

impl QueueLimits {
    /// All numeric limits, in the order of the kernel's structure.
    pub const FIELDS: [Field; 46] = [
        Field {
            name: "features",
            about: "what the device can do: write cache, FUA, rotational, zoned, ...",
            unit: Unit::Mask,
            max: u32::MAX as u64,
            get: |limits| limits.features.bits().into(),
            set: None,
        },
        Field {
            name: "flags",
            about: "whether the stack is misaligned",
            unit: Unit::Mask,
            max: u32::MAX as u64,
            // `BLK_FLAG_MISALIGNED`.
            get: |limits| u64::from(limits.misaligned) << 1,
            set: None,
        },
        Field {
            name: "rotational",
            about: "1: a rotating disk",
            unit: Unit::Count,
            max: 1,
            get: |limits| limits.features.contains(Features::ROTATIONAL).into(),
            set: Some(|limits, value| {
                let others = limits.features.difference(Features::ROTATIONAL);
                limits.features = if value == 0 { others } else { others.union(Features::ROTATIONAL) };
            }),
        },
        field!(logical_block_size, Bytes, "the smallest unit of a request"),
        field!(physical_block_size, Bytes, "the smallest unit that is written without a read-modify-write"),
        field!(io_min, Bytes, "the smallest request that is efficient"),
        field!(io_opt, Bytes, "the best size of large requests; 0: none"),
        field!(alignment_offset, Bytes, "the offset of the device's start from a physical block"),
        field!(max_hw_sectors, Sectors, "the largest read or write that the device takes"),
        field!(max_dev_sectors, Sectors, "the largest read or write of the medium; 0: no limit"),
        field!(max_user_sectors, Sectors, "the largest read or write that the user allows; 0: no limit"),
        user!(max_sectors, max_user_sectors, "the largest read or write that is issued"),
        field!(chunk_sectors, Sectors, "a request does not cross multiples of this; 0: no limit"),
        field!(max_segments, u16, "memory segments of a request"),
        field!(max_segment_size, Bytes, "the length of a memory segment"),
        field!(
            seg_boundary_mask,
            Mask,
            "a memory segment does not cross an address whose bits under the mask are 0"
        ),
        field!(
            virt_boundary_mask,
            Mask,
            "segments join at addresses whose bits under the mask are 0; 0: anywhere"
        ),
        field!(dma_alignment, Mask, "alignment of memory: address bits under the mask are 0"),
        field!(max_hw_discard_sectors, Sectors, "the largest discard that the device takes; 0: none"),
        field!(max_user_discard_sectors, Sectors, "the largest discard that the user allows"),
        user!(max_discard_sectors, max_user_discard_sectors, "the largest discard that is issued"),
        field!(discard_granularity, Bytes, "the unit that a discard deallocates"),
        field!(discard_alignment, Bytes, "the offset of the first discard unit"),
        field!(max_discard_segments, u16, "ranges of a discard request"),
        field!(max_secure_erase_sectors, Sectors, "the largest secure erase; 0: none"),
        row!(
            max_write_zeroes_sectors,
            Sectors,
            "the largest write-zeroes request; 0: none",
            Some(|limits, value| {
                limits.max_write_zeroes_sectors = Sectors(value);
                // Where write-zeroes requests deallocate at all, they all do.
                if limits.max_hw_wzeroes_unmap_sectors.0 != 0 {
                    limits.max_hw_wzeroes_unmap_sectors = Sectors(value);
                }
            })
        ),
        field!(
            max_hw_wzeroes_unmap_sectors,
            Sectors,
            "the largest write-zeroes request that deallocates; 0: none"
        ),
        field!(
            max_user_wzeroes_unmap_sectors,
            Sectors,
            "the largest deallocating write-zeroes request that the user allows"
        ),
        user!(
            max_wzeroes_unmap_sectors,
            max_user_wzeroes_unmap_sectors,
            "the largest deallocating write-zeroes request that is issued"
        ),
        field!(max_hw_zone_append_sectors, Sectors, "the largest zone append that the device takes; 0: none"),
        row!(max_zone_append_sectors, Sectors, "the largest zone append that is issued", None),
        field!(zone_write_granularity, Bytes, "the unit of writes to sequential zones"),
        field!(max_open_zones, u32, "zones that may be open at once; 0: no limit"),
        field!(max_active_zones, u32, "zones that may be open or closed at once; 0: no limit"),
        field!(atomic_write_hw_max, Bytes, "the largest atomic write that the device takes; 0: none"),
        field!(
            atomic_write_hw_boundary,
            Bytes,
            "an atomic write does not cross multiples of this; 0: no limit"
        ),
        field!(atomic_write_hw_unit_min, Bytes, "the smallest atomic write that the device takes"),
        field!(atomic_write_hw_unit_max, Bytes, "the largest aligned atomic write that the device takes"),
        row!(atomic_write_max_sectors, Sectors, "the largest atomic write that is issued", None),
        row!(atomic_write_boundary_sectors, Sectors, "the boundary of atomic writes that are issued", None),
        row!(atomic_write_unit_min, Bytes, "the smallest atomic write that is issued", None),
        row!(atomic_write_unit_max, Bytes, "the largest aligned atomic write that is issued", None),
        absent!("dma_pad_mask", Mask, "padding of transfers"),
        absent!("max_integrity_segments", Count, "segments of integrity data"),
        absent!("max_write_streams", Count, "write streams"),
        absent!("write_stream_granularity", Bytes, "the unit of a write stream"),
    ];

    /// All numeric limits and their values.
    pub fn values(&self) -> impl Iterator<Item = (Field, u64)> + '_ {
        Self::FIELDS.into_iter().map(|field| (field, (field.get)(self)))
    }

    /// The value of a limit by its kernel name; `None` if there is no such limit.
    pub fn value(&self, name: &str) -> Option<u64> {
        self.values().find(|(field, _)| field.name == name).map(|(_, value)| value)
    }
}
