//! Zones of a zoned device, as [`Op::ReportZones`](crate::Op::ReportZones) reports them.
//!
//! Source: `struct blk_zone` and the two enums beside it in the kernel's uapi/linux/blkzoned.h.

use crate::Sectors;

/// Type of a zone.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(u8)]
pub enum ZoneKind {
    /// No write pointer: accepts writes anywhere.
    Conventional = 1,
    /// Must be written at its write pointer.
    SequentialRequired = 2,
    /// Should be written at its write pointer.
    SequentialPreferred = 3,
}

/// Condition of a zone.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(u8)]
pub enum ZoneCondition {
    /// Conventional: has no write pointer.
    NotWritePointer = 0,
    /// Nothing was written since the last reset.
    Empty = 1,
    /// Opened implicitly, by a write.
    ImplicitOpen = 2,
    /// Opened explicitly, by a zone-open request.
    ExplicitOpen = 3,
    /// Partly written and not open.
    Closed = 4,
    /// Read-only for good.
    ReadOnly = 13,
    /// Full: accepts no write before it is reset.
    Full = 14,
    /// Unusable.
    Offline = 15,
}

impl ZoneKind {
    /// Converts the kernel's number; `None` if unknown.
    pub const fn from_number(number: u8) -> Option<ZoneKind> {
        Some(match number {
            1 => ZoneKind::Conventional,
            2 => ZoneKind::SequentialRequired,
            3 => ZoneKind::SequentialPreferred,
            _ => return None,
        })
    }
}

impl ZoneCondition {
    /// Converts the kernel's number; `None` if unknown.
    pub const fn from_number(number: u8) -> Option<ZoneCondition> {
        Some(match number {
            0 => ZoneCondition::NotWritePointer,
            1 => ZoneCondition::Empty,
            2 => ZoneCondition::ImplicitOpen,
            3 => ZoneCondition::ExplicitOpen,
            4 => ZoneCondition::Closed,
            13 => ZoneCondition::ReadOnly,
            14 => ZoneCondition::Full,
            15 => ZoneCondition::Offline,
            _ => return None,
        })
    }
}

/// A zone. All positions are on the device that answers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Zone {
    /// First sector.
    pub start: Sectors,
    /// Size of the zone in address space. Never 0.
    pub len: Sectors,
    /// Writable sectors, from the start of the zone.
    pub capacity: Sectors,
    /// Next sector to be written; `u64::MAX` for read-only and offline zones, which have no valid write
    /// pointer.
    pub write_pointer: Sectors,
    /// Type of the zone.
    pub kind: ZoneKind,
    /// Condition of the zone.
    pub condition: ZoneCondition,
}

impl Zone {
    /// Bytes of one record in a request's data. A record has the layout of the kernel's `struct blk_zone`, so
    /// a front-end can pass it to a kernel unchanged.
    pub const RECORD_LEN: usize = 64;

    /// Encodes the zone as a record.
    pub fn to_record(&self) -> [u8; Self::RECORD_LEN] {
        let mut record = [0; Self::RECORD_LEN];
        record[..8].copy_from_slice(&self.start.0.to_ne_bytes());
        record[8..16].copy_from_slice(&self.len.0.to_ne_bytes());
        record[16..24].copy_from_slice(&self.write_pointer.0.to_ne_bytes());
        record[24] = self.kind as u8;
        record[25] = self.condition as u8;
        record[32..40].copy_from_slice(&self.capacity.0.to_ne_bytes());
        record
    }

    /// Decodes a record; `None` when there are too few bytes or the values are no valid zone.
    pub fn from_record(record: &[u8]) -> Option<Zone> {
        let record = record.get(..Self::RECORD_LEN)?;
        let number = |at: usize| Some(Sectors(u64::from_ne_bytes(record[at..at + 8].try_into().ok()?)));
        let zone = Zone {
            start: number(0)?,
            len: number(8)?,
            write_pointer: number(16)?,
            capacity: number(32)?,
            kind: ZoneKind::from_number(record[24])?,
            condition: ZoneCondition::from_number(record[25])?,
        };
        (zone.len.0 > 0).then_some(zone)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_encoded_zone_decodes_to_the_same_zone() {
        for number in 0..=255 {
            let Some(condition) = ZoneCondition::from_number(number) else { continue };
            let zone = Zone {
                start: Sectors(1 << 40),
                len: Sectors(524_288),
                capacity: Sectors(520_000),
                write_pointer: Sectors((1 << 40) + 8),
                kind: ZoneKind::SequentialRequired,
                condition,
            };
            assert_eq!(condition as u8, number);
            assert_eq!(Zone::from_record(&zone.to_record()), Some(zone));
        }
    }

    #[test]
    fn invalid_records_decode_to_none() {
        assert_eq!(Zone::from_record(&[0; 64]), None, "the end of a list");
        assert_eq!(Zone::from_record(&[1; 63]), None, "too short");
        assert_eq!(Zone::from_record(&[9; 64]), None, "no such kind");
    }

    #[test]
    fn a_record_is_laid_out_as_blk_zone() {
        let zone = Zone {
            start: Sectors(1),
            len: Sectors(2),
            capacity: Sectors(4),
            write_pointer: Sectors(3),
            kind: ZoneKind::Conventional,
            condition: ZoneCondition::Offline,
        };
        let record = zone.to_record();
        let at = |place: usize| u64::from_ne_bytes(record[place..place + 8].try_into().unwrap());
        assert_eq!([at(0), at(8), at(16), at(32)], [1, 2, 3, 4]);
        assert_eq!((record[24], record[25]), (1, 15));
    }
}
