//! REPORT ZONES of ZBC-2. It asks the device for a part of its zones at a time, and keeps the descriptors that fit
//! the allocation length.

use super::{BlockZone, DESCRIPTOR_LEN, GAP, NO_ZONE, RECORDS_MAX, query};
use crate::bytes::{be32, be64, put};
use crate::data::failed_at;
use crate::dispatch::Call;
use crate::program::{Completed, Needs, Program, ProgramMemory, Step, Steps};
use crate::sense::Sense;
use crate::{Begin, Outcome};
use block::{Zone, ZoneCondition, ZoneKind};

/// Maximum number of bytes of a report. Initiators ask again for the zones behind it.
const REPORT_MAX: u32 = 1 << 20;
const PARTIAL: u8 = 0x80;
const OPTIONS: u8 = 0x3F;

/// Zones that a report has.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Select {
    All,
    Condition(ZoneCondition),
    /// Zones with the RESET bit, or the NON_SEQ bit, which no zone has.
    Nothing,
    NoGaps,
    /// Zones without a write pointer.
    NoWritePointer,
}

impl Select {
    /// Decodes REPORTING OPTIONS. Returns `None` for a value that is reserved or not supported.
    fn of(options: u8) -> Option<Select> {
        Some(match options {
            0x00 => Select::All,
            0x01 => Select::Condition(ZoneCondition::Empty),
            0x02 => Select::Condition(ZoneCondition::ImplicitOpen),
            0x03 => Select::Condition(ZoneCondition::ExplicitOpen),
            0x04 => Select::Condition(ZoneCondition::Closed),
            0x05 => Select::Condition(ZoneCondition::Full),
            0x06 => Select::Condition(ZoneCondition::ReadOnly),
            0x07 => Select::Condition(ZoneCondition::Offline),
            0x10 | 0x11 => Select::Nothing,
            0x3E => Select::NoGaps,
            0x3F => Select::NoWritePointer,
            _ => return None,
        })
    }

    fn has(self, descriptor: &Descriptor) -> bool {
        match self {
            Select::All => true,
            Select::Condition(condition) => descriptor.condition == condition,
            Select::Nothing => false,
            Select::NoGaps => descriptor.kind != GAP,
            Select::NoWritePointer => descriptor.condition == ZoneCondition::NotWritePointer,
        }
    }
}

/// A zone as REPORT ZONES describes it.
#[derive(Clone, Copy, Debug)]
struct Descriptor {
    kind: u8,
    condition: ZoneCondition,
    start: u64,
    len: u64,
    /// All ones if the zone has no valid write pointer.
    write_pointer: u64,
}

impl Descriptor {
    /// Returns the zone, and the gap between its capacity and the next zone, of length 0 if there is none.
    fn of(zone: &BlockZone) -> [Descriptor; 2] {
        let is_sequential = zone.kind != ZoneKind::Conventional;
        let capacity = if is_sequential { zone.capacity } else { zone.len };
        let has_pointer = matches!(
            zone.condition,
            ZoneCondition::Empty
                | ZoneCondition::ImplicitOpen
                | ZoneCondition::ExplicitOpen
                | ZoneCondition::Closed
        );
        let own = Descriptor {
            kind: zone.kind as u8,
            condition: zone.condition,
            start: zone.start,
            len: capacity,
            write_pointer: if has_pointer { zone.write_pointer } else { u64::MAX },
        };
        let gap = Descriptor {
            kind: GAP,
            condition: ZoneCondition::NotWritePointer,
            start: zone.start + capacity,
            len: zone.len - capacity,
            write_pointer: u64::MAX,
        };
        [own, gap]
    }

    fn encode(&self) -> [u8; DESCRIPTOR_LEN] {
        let mut bytes = [0; DESCRIPTOR_LEN];
        // The numbers of types and conditions are the block layer's.
        (bytes[0], bytes[1]) = (self.kind, (self.condition as u8) << 4);
        put(&mut bytes, 8, &self.len.to_be_bytes());
        put(&mut bytes, 16, &self.start.to_be_bytes());
        put(&mut bytes, 24, &self.write_pointer.to_be_bytes());
        bytes
    }
}

/// Begins REPORT ZONES.
pub(crate) fn report(call: &Call<'_>) -> Begin {
    let media = &call.facts.media;
    let (lba, allocation, options) = (be64(&call.cdb, 2), be32(&call.cdb, 10), call.cdb[14]);
    if lba >= media.blocks {
        return Sense::LBA_OUT_OF_RANGE.into();
    }
    let Some(select) = Select::of(options & OPTIONS) else { return Sense::cdb_field(14, Some(5)).into() };
    let mut data = vec![0; DESCRIPTOR_LEN];
    put(&mut data, 8, &(media.blocks - 1).to_be_bytes());
    if let Some(blocks) = media.zones.and_then(|zoned| zoned.granularity(media)) {
        put(&mut data, 16, &blocks.to_be_bytes());
    }
    Begin::Program(Program::new(
        call.nexus,
        Report {
            lba,
            next: lba << media.block_shift(),
            end: media.bytes(),
            shift: media.block_shift(),
            select,
            is_partial: options & PARTIAL != 0,
            allocation: allocation.min(REPORT_MAX),
            count: 0,
            data,
            is_asked: false,
        },
    ))
}

struct Report {
    lba: u64,
    /// Offset, in bytes, of the zones to ask for next.
    next: u64,
    /// Size of the unit in bytes.
    end: u64,
    shift: u32,
    select: Select,
    /// Whether the ZONE LIST LENGTH counts the returned descriptors instead of all selected ones.
    is_partial: bool,
    allocation: u32,
    /// Selected zones.
    count: u64,
    data: Vec<u8>,
    is_asked: bool,
}

impl Report {
    /// Adds the zones of these records. Error: there is none.
    fn add(&mut self, records: &[u8]) -> Result<(), Sense> {
        let before = self.next;
        for zone in BlockZone::of_records(records, self.shift) {
            // A zone that contains the LBA is reported, and so is a gap.
            for part in Descriptor::of(&zone) {
                let is_behind = part.start.saturating_add(part.len) > self.lba;
                if part.len == 0 || !is_behind || !self.select.has(&part) {
                    continue;
                }
                let fits = self.data.len() + DESCRIPTOR_LEN <= self.allocation as usize;
                if fits {
                    self.data.extend_from_slice(&part.encode());
                }
                self.count += u64::from(fits || !self.is_partial);
            }
            self.next = self.next.max(zone.end().saturating_mul(1 << self.shift));
        }
        if self.next > before { Ok(()) } else { Err(NO_ZONE) }
    }

    fn is_complete(&self) -> bool {
        let is_full = self.data.len() + DESCRIPTOR_LEN > self.allocation as usize;
        self.next >= self.end || self.is_partial && is_full
    }

    fn outcome(&mut self) -> Outcome {
        let mut data = std::mem::take(&mut self.data);
        let len = u32::try_from(self.count * DESCRIPTOR_LEN as u64).unwrap_or(u32::MAX);
        put(&mut data, 0, &len.to_be_bytes());
        Outcome::with_data(data, self.allocation)
    }
}

impl Steps for Report {
    fn needs(&self) -> Needs {
        Needs { scratch: RECORDS_MAX * Zone::RECORD_LEN as u32, ..Needs::default() }
    }

    fn step(&mut self, completed: Option<Completed>, memory: &mut ProgramMemory<'_>) -> Step {
        match completed {
            None if self.is_asked => return Step::Wait,
            None => self.is_asked = true,
            Some(Completed { status, .. }) if !status.is_ok() => {
                return Step::Finished(failed_at(status, self.next >> self.shift, false));
            }
            Some(_) => {
                let records = memory.scratch.get(..self.needs().scratch as usize).unwrap_or_default();
                if let Err(sense) = self.add(records) {
                    return Step::Finished(sense.into());
                }
                if self.is_complete() {
                    return Step::Finished(self.outcome());
                }
            }
        }
        Step::Submit(query(self.next, self.end, RECORDS_MAX))
    }
}
