//! Zones of host-managed zoned units: ZBC (INCITS 536) and ZBC-2.
//!
//! Zones are those that the device reports ([`Op::ReportZones`](block::Op::ReportZones)), with their states;
//! nothing is remembered here. The rules for reads and writes are in [`access`], REPORT ZONES in [`report`],
//! and the commands that change zones in [`manage`].
//!
//! Not supported: zone domains and realms, SEQUENTIALIZE ZONE, and ZONE COUNT.

pub(crate) mod access;
mod manage;
mod report;

pub use access::explain;
pub(crate) use manage::manage;
pub(crate) use report::report;

use crate::Media;
use crate::bytes::put;
use crate::program::{Buffer, ProgramIo, Target};
use crate::sense::{Key, Sense};
use crate::unit::Facts;
use block::{Flags, Op, Zone, ZoneCondition, ZoneKind};

/// PERIPHERAL DEVICE TYPE of a host-managed zoned block device.
pub(crate) const DEVICE_TYPE: u8 = 0x14;
/// Version descriptor: ZBC, no version claimed.
pub(crate) const VERSION_DESCRIPTOR: u16 = 0x0620;
/// Bytes of a zone descriptor, and of the header of a report.
const DESCRIPTOR_LEN: usize = 64;
/// ZONE TYPE of the LBAs between the capacity of a zone and the next zone.
const GAP: u8 = 0x5;
/// Maximum number of records that one request for zones asks for.
const RECORDS_MAX: u32 = 1024;

/// 05/21/04 UNALIGNED WRITE COMMAND.
const UNALIGNED_WRITE: Sense = Sense::new(Key::IllegalRequest, 0x21, 0x04);
/// 05/21/05 WRITE BOUNDARY VIOLATION.
const WRITE_BOUNDARY: Sense = Sense::new(Key::IllegalRequest, 0x21, 0x05);
/// 05/21/06 ATTEMPT TO READ INVALID DATA.
const INVALID_READ: Sense = Sense::new(Key::IllegalRequest, 0x21, 0x06);
/// 05/21/09 ATTEMPT TO ACCESS GAP ZONE.
const GAP_ACCESS: Sense = Sense::new(Key::IllegalRequest, 0x21, 0x09);
/// 07/27/08 ZONE IS READ ONLY.
const ZONE_READ_ONLY: Sense = Sense::new(Key::DataProtect, 0x27, 0x08);
/// 07/2C/0E ZONE IS OFFLINE.
const ZONE_OFFLINE: Sense = Sense::new(Key::DataProtect, 0x2C, 0x0E);
/// 07/55/0E INSUFFICIENT ZONE RESOURCES.
const INSUFFICIENT_RESOURCES: Sense = Sense::new(Key::DataProtect, 0x55, 0x0E);
/// 04/44/00 INTERNAL TARGET FAILURE: the device reports no zone for an LBA.
const NO_ZONE: Sense = Sense::new(Key::HardwareError, 0x44, 0x00);

/// Zones of a medium.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Zoned {
    /// Length of a zone in logical blocks. Only the last zone may be shorter.
    pub zone_blocks: u64,
    /// Maximum number of open zones; 0: no limit.
    pub open_max: u32,
}

impl Zoned {
    /// Returns ZONE STARTING LBA GRANULARITY: the length of a zone in blocks, if all zones of the medium have it.
    fn granularity(&self, media: &Media) -> Option<u64> {
        media.blocks.is_multiple_of(self.zone_blocks).then_some(self.zone_blocks)
    }
}

/// A zone in logical blocks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct BlockZone {
    start: u64,
    /// Blocks up to the next zone.
    len: u64,
    /// Blocks that can be written, from the start on; the rest of the zone is a gap.
    capacity: u64,
    write_pointer: u64,
    kind: ZoneKind,
    condition: ZoneCondition,
}

impl BlockZone {
    /// Decodes the records of a report up to the first that is none.
    fn of_records(records: &[u8], shift: u32) -> impl Iterator<Item = BlockZone> + '_ {
        let blocks = move |sectors: block::Sectors| sectors.0.checked_shr(shift - 9).unwrap_or(0);
        records.chunks_exact(Zone::RECORD_LEN).map_while(Zone::from_record).map(move |zone| BlockZone {
            start: blocks(zone.start),
            len: blocks(zone.len),
            capacity: blocks(zone.capacity.min(zone.len)),
            write_pointer: blocks(zone.write_pointer),
            kind: zone.kind,
            condition: zone.condition,
        })
    }

    fn end(&self) -> u64 {
        self.start.saturating_add(self.len)
    }

    /// Returns the first block behind the capacity.
    fn writable_end(&self) -> u64 {
        self.start.saturating_add(self.capacity)
    }

    /// Checks that the zone is neither offline nor, for writes, read-only.
    fn check_alive(&self, is_write: bool) -> Result<(), Sense> {
        match self.condition {
            ZoneCondition::Offline => Err(ZONE_OFFLINE),
            ZoneCondition::ReadOnly if is_write => Err(ZONE_READ_ONLY),
            _ => Ok(()),
        }
    }
}

/// Returns the request for the zones of a range in bytes, into the start of the scratch memory.
fn query(offset: u64, end: u64, records: u32) -> ProgramIo {
    let len = records * Zone::RECORD_LEN as u32;
    ProgramIo {
        slot: 0,
        unit: Target::Own,
        op: Op::ReportZones,
        offset,
        len: end - offset,
        flags: Flags::empty(),
        buffer: Buffer::Scratch(0..len),
    }
}

/// Returns the body of VPD page B6h. For a host-managed unit the optimal numbers of sequential write
/// preferred zones are not reported: they are all ones.
pub(crate) fn characteristics(zoned: &Zoned, facts: &Facts) -> Vec<u8> {
    /// ZONE ALIGNMENT METHOD: zones start at multiples of the granularity.
    const CONSTANT_STARTS: u8 = 0x8;
    let mut page = vec![0; 0x3C];
    // URSWRZ: reads above the write pointer succeed. AAORB is 0.
    page[0] = 0x01;
    put(&mut page, 4, &[0xFF; 8]);
    let most = if zoned.open_max == 0 { u32::MAX } else { zoned.open_max };
    put(&mut page, 12, &most.to_be_bytes());
    if let Some(blocks) = zoned.granularity(&facts.media) {
        page[19] = CONSTANT_STARTS;
        put(&mut page, 20, &blocks.to_be_bytes());
    }
    page
}
