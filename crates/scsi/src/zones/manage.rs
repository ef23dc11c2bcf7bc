//! OPEN, CLOSE, FINISH ZONE and RESET WRITE POINTER of ZBC-2. They read the condition of the zones, and
//! change those whose condition the command applies to.

use super::{BlockZone, INSUFFICIENT_RESOURCES, NO_ZONE, RECORDS_MAX, query};
use crate::bytes::be64;
use crate::data::failed_at;
use crate::dispatch::Call;
use crate::program::{Buffer, Completed, Needs, Program, ProgramIo, ProgramMemory, Step, Steps};
use crate::sense::Sense;
use crate::{Begin, Outcome};
use block::{Op, Status, Zone, ZoneCondition as Condition, ZoneKind};

/// ALL: the command applies to all zones, and ZONE ID is ignored.
const ALL: u8 = 0x01;

/// Service actions of ZONE MANAGEMENT OUT.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Action {
    Close,
    Finish,
    Open,
    Reset,
}

impl Action {
    fn op(self) -> Op {
        match self {
            Action::Close => Op::ZoneClose,
            Action::Finish => Op::ZoneFinish,
            Action::Open => Op::ZoneOpen,
            Action::Reset => Op::ZoneReset,
        }
    }

    /// Returns whether the action changes a zone in this condition. In other conditions it succeeds without
    /// an effect.
    fn changes(self, condition: Condition, is_all: bool) -> bool {
        let is_open = matches!(condition, Condition::ImplicitOpen | Condition::ExplicitOpen);
        let is_empty = condition == Condition::Empty;
        match self {
            Action::Close => is_open,
            Action::Finish => is_open || condition == Condition::Closed || is_empty && !is_all,
            Action::Open if is_all => condition == Condition::Closed,
            Action::Open => is_empty || matches!(condition, Condition::Closed | Condition::ImplicitOpen),
            Action::Reset => is_open || matches!(condition, Condition::Closed | Condition::Full),
        }
    }
}

/// Begins ZONE MANAGEMENT OUT.
pub(crate) fn manage(call: &Call<'_>) -> Begin {
    let media = &call.facts.media;
    let (zone_id, is_all) = (be64(&call.cdb, 2), call.cdb[14] & ALL != 0);
    let action = match call.cdb[1] & 0x1F {
        0x01 => Action::Close,
        0x02 => Action::Finish,
        0x03 => Action::Open,
        _ => Action::Reset,
    };
    if !is_all && zone_id >= media.blocks {
        return Sense::LBA_OUT_OF_RANGE.into();
    }
    let next = if is_all { 0 } else { zone_id << media.block_shift() };
    let open_max = media.zones.map_or(0, |zoned| zoned.open_max);
    Begin::Program(Program::new(
        call.nexus,
        Manage {
            action,
            zone_id: (!is_all).then_some(zone_id),
            next,
            end: media.bytes(),
            shift: media.block_shift(),
            open_max: open_max.into(),
            explicit: 0,
            zones: Vec::new(),
            phase: Phase::Idle,
        },
    ))
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Phase {
    Idle,
    /// The conditions of zones are being read.
    Asking,
    /// A zone is being changed.
    Changing,
}

struct Manage {
    action: Action,
    /// First LBA of the zone; `None` for ALL.
    zone_id: Option<u64>,
    /// Offset, in bytes, of the zones to ask for next, or of the zone that is being changed.
    next: u64,
    /// Size of the unit in bytes.
    end: u64,
    shift: u32,
    /// Maximum number of open zones; 0: no limit.
    open_max: u64,
    /// Explicitly open zones.
    explicit: u64,
    /// Offsets of the zones to change, which are changed from the last one on.
    zones: Vec<u64>,
    phase: Phase,
}

impl Manage {
    /// Adds the zones of these records that the command changes.
    fn add(&mut self, records: &[u8]) -> Result<(), Sense> {
        let before = self.next;
        for zone in BlockZone::of_records(records, self.shift) {
            self.explicit += u64::from(zone.condition == Condition::ExplicitOpen);
            if let Some(zone_id) = self.zone_id {
                // ZONE ID must be the first LBA of a zone that has a write pointer; a gap is such a zone neither.
                if zone.start != zone_id || zone.kind == ZoneKind::Conventional {
                    return Err(Sense::cdb_field(2, None));
                }
                zone.check_alive(true)?;
            }
            if self.action.changes(zone.condition, self.zone_id.is_none()) {
                self.zones.push(zone.start << self.shift);
            }
            self.next = self.next.max(zone.end().saturating_mul(1 << self.shift));
            if self.zone_id.is_some() {
                self.next = self.end;
                return Ok(());
            }
        }
        if self.next > before { Ok(()) } else { Err(NO_ZONE) }
    }

    /// Checks that all zones can be open at once: otherwise OPEN with ALL opens none.
    fn check_resources(&self) -> Result<(), Sense> {
        let is_open_all = self.action == Action::Open && self.zone_id.is_none();
        let open = self.explicit + self.zones.len() as u64;
        if is_open_all && !self.zones.is_empty() && self.open_max > 0 && open > self.open_max {
            return Err(INSUFFICIENT_RESOURCES);
        }
        Ok(())
    }

    /// Returns the next request.
    fn submit(&mut self) -> Step {
        if self.phase == Phase::Asking {
            return Step::Submit(query(self.next, self.end, self.records()));
        }
        let Some(offset) = self.zones.pop() else { return Step::Finished(Outcome::good(0)) };
        self.next = offset;
        self.change(self.action.op())
    }

    fn change(&self, op: Op) -> Step {
        Step::Submit(ProgramIo { op, len: 0, buffer: Buffer::None, ..query(self.next, self.end, 0) })
    }

    fn records(&self) -> u32 {
        if self.zone_id.is_some() { 1 } else { RECORDS_MAX }
    }

    fn failed(&self, status: Status) -> Step {
        let is_write = self.phase == Phase::Changing;
        Step::Finished(failed_at(status, self.next >> self.shift, is_write))
    }
}

impl Steps for Manage {
    fn needs(&self) -> Needs {
        Needs { scratch: self.records() * Zone::RECORD_LEN as u32, ..Needs::default() }
    }

    fn step(&mut self, completed: Option<Completed>, memory: &mut ProgramMemory<'_>) -> Step {
        match (self.phase, completed) {
            (Phase::Idle, _) if self.action == Action::Reset && self.zone_id.is_none() => {
                self.phase = Phase::Changing;
                return self.change(Op::ZoneResetAll);
            }
            (Phase::Idle, _) => self.phase = Phase::Asking,
            (_, None) => return Step::Wait,
            (_, Some(Completed { status, .. })) if !status.is_ok() => return self.failed(status),
            (Phase::Changing, Some(_)) => {}
            (Phase::Asking, Some(_)) => {
                let records = memory.scratch.get(..self.needs().scratch as usize).unwrap_or_default();
                if let Err(sense) = self.add(records) {
                    return Step::Finished(sense.into());
                }
                if self.next >= self.end {
                    self.phase = Phase::Changing;
                    if let Err(sense) = self.check_resources() {
                        return Step::Finished(sense.into());
                    }
                }
            }
        }
        self.submit()
    }
}
