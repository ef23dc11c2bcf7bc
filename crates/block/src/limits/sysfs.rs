//! The limits as /sys/block/NAME/queue has them: its names and units.
//!
//! Only what is called otherwise there, or counted otherwise, stands in the table; the other files have the field's own
//! name and unit. Source: `queue_attrs` in the kernel's block/blk-sysfs.c.

use super::{Field, QueueLimits};
use crate::{Bytes, Sectors};

/// What a file of sysfs counts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Scale {
    /// What its field counts.
    Same,
    /// Bytes of a field that counts sectors.
    BytesOfSectors,
    /// Kibibytes of a field that counts sectors.
    KibOfSectors,
}

/// A file of sysfs.
#[derive(Clone, Copy, Debug)]
pub struct Attribute {
    /// Its name.
    pub name: &'static str,
    field: &'static str,
    /// How it counts.
    pub scale: Scale,
}

const fn attribute(name: &'static str, field: &'static str, scale: Scale) -> Attribute {
    Attribute { name, field, scale }
}

impl Attribute {
    /// Those that differ from their fields.
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

    /// The field that it shows.
    ///
    /// # Panics
    /// Never: the table names fields that there are.
    pub fn field(&self) -> Field {
        let mut fields = QueueLimits::FIELDS.into_iter();
        fields.find(|field| field.name == self.field).expect("the table names fields that there are")
    }

    /// What the file says of a field's value.
    pub fn shown(&self, value: u64) -> u64 {
        match self.scale {
            Scale::Same => value,
            Scale::BytesOfSectors => value << Sectors::SHIFT,
            Scale::KibOfSectors => value >> 1,
        }
    }

    /// The field's value, of what is written to the file; a size with a suffix is understood, too.
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
