//! The limits as `/sys/block/NAME/queue` shows them: its names and units.
//!
//! The table has only files whose name or unit differs from the field's. Source: `queue_attrs` in the
//! kernel's block/blk-sysfs.c.

use super::{Field, QueueLimits};
use crate::{Bytes, Sectors};

/// Unit of a sysfs file, relative to that of its field.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Scale {
    /// The field's own unit.
    Same,
    /// Bytes, where the field counts sectors.
    BytesOfSectors,
    /// Kibibytes, where the field counts sectors.
    KibOfSectors,
}

/// A file of sysfs.
#[derive(Clone, Copy, Debug)]
pub struct Attribute {
    /// Name of the file.
    pub name: &'static str,
    field: &'static str,
    /// Unit of the file.
    pub scale: Scale,
}

const fn attribute(name: &'static str, field: &'static str, scale: Scale) -> Attribute {
    Attribute { name, field, scale }
}

impl Attribute {
    /// All files whose name or unit differs from the field's.
    pub const ALL: [Attribute; 15] = [
        attribute("hw_sector_size", "logical_block_size", Scale::Same),
        attribute("minimum_io_size", "io_min", Scale::Same),
        attribute("optimal_io_size", "io_opt", Scale::Same),
        attribute("max_hw_sectors_kb", "max_hw_sectors", Scale::KibOfSectors),
        attribute("max_sectors_kb", "max_sectors", Scale::KibOfSectors),
        attribute("discard_max_hw_bytes", "max_hw_discard_sectors", Scale::BytesOfSectors),
        attribute("discard_max_bytes", "max_discard_sectors", Scale::BytesOfSectors),
        attribute("write_zeroes_max_bytes", "max_write_zeroes_sectors", Scale::BytesOfSectors),
        attribute("write_zeroes_unmap_max_hw_bytes", "max_hw_wzeroes_unmap_sectors", Scale::BytesOfSectors),
        attribute("write_zeroes_unmap_max_bytes", "max_wzeroes_unmap_sectors", Scale::BytesOfSectors),
        attribute("zone_append_max_bytes", "max_zone_append_sectors", Scale::BytesOfSectors),
        attribute("atomic_write_max_bytes", "atomic_write_max_sectors", Scale::BytesOfSectors),
        attribute("atomic_write_boundary_bytes", "atomic_write_boundary_sectors", Scale::BytesOfSectors),
        attribute("atomic_write_unit_min_bytes", "atomic_write_unit_min", Scale::Same),
        attribute("atomic_write_unit_max_bytes", "atomic_write_unit_max", Scale::Same),
    ];

    /// The field that the file shows.
    ///
    /// # Panics
    /// Never: the table only names existing fields.
    pub fn field(&self) -> Field {
        let mut fields = QueueLimits::FIELDS.into_iter();
        fields.find(|field| field.name == self.field).expect("the table names existing fields")
    }

    /// Converts a value of the field to the unit of the file.
    pub fn shown(&self, value: u64) -> u64 {
        match self.scale {
            Scale::Same => value,
            Scale::BytesOfSectors => value << Sectors::SHIFT,
            Scale::KibOfSectors => value >> 1,
        }
    }

    /// Parses a value written to the file into the unit of the field; a size with a suffix is accepted as
    /// well.
    pub(super) fn parse(&self, text: &str) -> Result<u64, &'static str> {
        let size = || text.parse::<Bytes>().map_err(|_| "is not a size such as 4096 or 64K");
        let bytes = match (self.scale, text.parse::<u64>()) {
            (Scale::Same, _) => return size().map(|size| size.0),
            (Scale::KibOfSectors, Ok(kib)) => Bytes(kib.checked_mul(1024).ok_or("is too much")?),
            _ => size()?,
        };
        if !bytes.is_aligned(1 << Sectors::SHIFT) {
            return Err("is not a whole number of sectors of 512 bytes");
        }
        Ok(bytes.sectors().0)
    }
}
