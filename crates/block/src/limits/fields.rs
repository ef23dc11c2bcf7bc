//! The one table of limits that are numbers: listings, the parser and its messages come from it.

use super::{Features, QueueLimits};
use crate::{Bytes, Sectors};
use std::fmt;

/// What a field's number counts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Unit {
    /// Bytes.
    Bytes,
    /// Sectors of 512 bytes.
    Sectors,
    /// Bytes less one, as a bit mask.
    Mask,
    /// Things.
    Count,
}

type Set = fn(&mut QueueLimits, u64);

/// One limit by its kernel name.
#[derive(Clone, Copy)]
pub struct Field {
    /// The kernel's name of the field.
    pub name: &'static str,
    /// What it counts.
    pub unit: Unit,
    /// The largest value that the kernel's type holds.
    pub(super) max: u64,
    get: fn(&QueueLimits) -> u64,
    /// `None` for what `validate` computes and no wish of the user stands for, and for what nothing here has.
    pub(super) set: Option<Set>,
}

impl Field {
    /// Why nobody can set it; `None`: it can be set.
    pub fn why_fixed(&self) -> Option<&'static str> {
        if self.set.is_some() {
            return None;
        }
        Some(match self.name {
            "features" | "flags" => "it says what stands below",
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
    ($name:ident, Bytes, $set:expr) => {
        Field {
            name: stringify!($name),
            unit: Unit::Bytes,
            max: u32::MAX as u64,
            get: |limits| limits.$name.0,
            set: $set,
        }
    };
    ($name:ident, Sectors, $set:expr) => {
        Field {
            name: stringify!($name),
            unit: Unit::Sectors,
            max: u32::MAX as u64,
            get: |limits| limits.$name.0,
            set: $set,
        }
    };
    ($name:ident, Mask, $set:expr) => {
        Field {
            name: stringify!($name),
            unit: Unit::Mask,
            max: u64::MAX,
            get: |limits| limits.$name,
            set: $set,
        }
    };
    ($name:ident, $count:ty, $set:expr) => {
        Field {
            name: stringify!($name),
            unit: Unit::Count,
            max: <$count>::MAX as u64,
            get: |limits| limits.$name.into(),
            set: $set,
        }
    };
}

/// A row whose field is set as it is read.
macro_rules! field {
    ($name:ident, Bytes) => {
        row!($name, Bytes, Some(|limits, value| limits.$name = Bytes(value)))
    };
    ($name:ident, Sectors) => {
        row!($name, Sectors, Some(|limits, value| limits.$name = Sectors(value)))
    };
    ($name:ident, Mask) => {
        row!($name, Mask, Some(|limits, value| limits.$name = value))
    };
    ($name:ident, $count:ty) => {
        row!($name, $count, Some(|limits, value| limits.$name = value as $count))
    };
}

/// A row whose field is computed, but which the user limits through another, as through sysfs.
macro_rules! wish {
    ($name:ident, $through:ident) => {
        row!($name, Sectors, Some(|limits, value| limits.$through = Sectors(value)))
    };
}

/// A row of what the kernel's structure has and no device of ours.
macro_rules! nothing {
    ($name:literal, $unit:ident) => {
        Field { name: $name, unit: Unit::$unit, max: 0, get: |_| 0, set: None }
    };
}

impl QueueLimits {
    /// All limits that are numbers, in the order of the structure.
    pub const FIELDS: [Field; 46] = [
        Field {
            name: "features",
            unit: Unit::Mask,
            max: u32::MAX as u64,
            get: |limits| limits.features.bits().into(),
            set: None,
        },
        Field {
            name: "flags",
            unit: Unit::Mask,
            max: u32::MAX as u64,
            // `BLK_FLAG_MISALIGNED`.
            get: |limits| u64::from(limits.misaligned) << 1,
            set: None,
        },
        Field {
            name: "rotational",
            unit: Unit::Count,
            max: 1,
            get: |limits| limits.features.has(Features::ROTATIONAL).into(),
            set: Some(|limits, value| {
                let others = limits.features.without(Features::ROTATIONAL);
                limits.features = if value == 0 { others } else { others.with(Features::ROTATIONAL) };
            }),
        },
        field!(logical_block_size, Bytes),
        field!(physical_block_size, Bytes),
        field!(io_min, Bytes),
        field!(io_opt, Bytes),
        field!(alignment_offset, Bytes),
        field!(max_hw_sectors, Sectors),
        field!(max_dev_sectors, Sectors),
        field!(max_user_sectors, Sectors),
        wish!(max_sectors, max_user_sectors),
        field!(chunk_sectors, Sectors),
        field!(max_segments, u16),
        field!(max_segment_size, Bytes),
        field!(seg_boundary_mask, Mask),
        field!(virt_boundary_mask, Mask),
        field!(dma_alignment, Mask),
        field!(max_hw_discard_sectors, Sectors),
        field!(max_user_discard_sectors, Sectors),
        wish!(max_discard_sectors, max_user_discard_sectors),
        field!(discard_granularity, Bytes),
        field!(discard_alignment, Bytes),
        field!(max_discard_segments, u16),
        field!(max_secure_erase_sectors, Sectors),
        row!(
            max_write_zeroes_sectors,
            Sectors,
            Some(|limits, value| {
                limits.max_write_zeroes_sectors = Sectors(value);
                // Where writes of zeroes deallocate, all of them do.
                if limits.max_hw_wzeroes_unmap_sectors.0 != 0 {
                    limits.max_hw_wzeroes_unmap_sectors = Sectors(value);
                }
            })
        ),
        field!(max_hw_wzeroes_unmap_sectors, Sectors),
        field!(max_user_wzeroes_unmap_sectors, Sectors),
        wish!(max_wzeroes_unmap_sectors, max_user_wzeroes_unmap_sectors),
        field!(max_hw_zone_append_sectors, Sectors),
        row!(max_zone_append_sectors, Sectors, None),
        field!(zone_write_granularity, Bytes),
        field!(max_open_zones, u32),
        field!(max_active_zones, u32),
        field!(atomic_write_hw_max, Bytes),
        field!(atomic_write_hw_boundary, Bytes),
        field!(atomic_write_hw_unit_min, Bytes),
        field!(atomic_write_hw_unit_max, Bytes),
        row!(atomic_write_max_sectors, Sectors, None),
        row!(atomic_write_boundary_sectors, Sectors, None),
        row!(atomic_write_unit_min, Bytes, None),
        row!(atomic_write_unit_max, Bytes, None),
        nothing!("dma_pad_mask", Mask),
        nothing!("max_integrity_segments", Count),
        nothing!("max_write_streams", Count),
        nothing!("write_stream_granularity", Bytes),
    ];

    /// The limits that are numbers, by name, for listings.
    pub fn values(&self) -> impl Iterator<Item = (Field, u64)> + '_ {
        Self::FIELDS.into_iter().map(|field| (field, (field.get)(self)))
    }

    /// The value of one limit by its kernel name.
    pub fn value(&self, name: &str) -> Option<u64> {
        self.values().find(|(field, _)| field.name == name).map(|(_, value)| value)
    }
}
