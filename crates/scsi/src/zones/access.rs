//! Rules of zones for reads and writes, of ZBC-2.
//!
//! A read or write within one zone goes to the device at once, and the zone's state is read only if it fails,
//! for the sense data ([`explain`]). Other commands that write, and transfers that span zones, read the states
//! first ([`guard`]). Another command may change a zone in between, so the device checks every write itself.

use super::{BlockZone, GAP_ACCESS, INVALID_READ, NO_ZONE, UNALIGNED_WRITE, WRITE_BOUNDARY, query};
use crate::command::{BlockIo, complete};
use crate::data::failed_at as failed;
use crate::program::{Buffer, Completed, Needs, Program, ProgramIo, ProgramMemory, Step, Steps};
use crate::sense::Sense;
use crate::{Media, Nexus, Outcome};
use block::{Op, Status, Zone, ZoneCondition, ZoneKind};
use std::sync::Arc;

/// Maximum number of zones in a span: transfers are at most 8 MiB, and zones at least 4 KiB.
const ZONES_MAX: u32 = 4096;

/// Blocks that a command reads or writes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Span {
    pub(crate) lba: u64,
    /// Number of blocks; at least 1.
    pub(crate) count: u64,
    pub(crate) is_write: bool,
}

impl Span {
    fn end(&self) -> u64 {
        self.lba.saturating_add(self.count)
    }

    /// Checks the span against the states of its zones, which are in order.
    fn check(&self, zones: &[BlockZone]) -> Result<(), Sense> {
        let first = zones.first().ok_or(NO_ZONE)?;
        if zones.iter().any(|zone| zone.kind != first.kind) {
            return Err(if self.is_write { WRITE_BOUNDARY } else { INVALID_READ });
        }
        zones.iter().try_for_each(|zone| zone.check_alive(self.is_write))?;
        if first.kind != ZoneKind::SequentialRequired {
            return Ok(());
        }
        let in_gap = |zone: &BlockZone| {
            zone.capacity < zone.len && self.lba < zone.end() && self.end() > zone.writable_end()
        };
        // A write that starts before a gap crosses the end of its zone.
        let is_in_gap =
            if self.is_write { self.lba >= first.writable_end() } else { zones.iter().any(in_gap) };
        if is_in_gap {
            return Err(GAP_ACCESS);
        }
        if !self.is_write {
            return Ok(());
        }
        if self.end() > first.writable_end() {
            return Err(WRITE_BOUNDARY);
        }
        if first.condition == ZoneCondition::Full {
            return Err(Sense::INVALID_FIELD_IN_CDB);
        }
        if self.lba != first.write_pointer { Err(UNALIGNED_WRITE) } else { Ok(()) }
    }
}

/// Returns whether a span reaches beyond the zone in which it starts.
pub(crate) fn spans_zones(media: &Media, span: &Span) -> bool {
    media
        .zones
        .is_some_and(|zoned| span.lba / zoned.zone_blocks != span.end().saturating_sub(1) / zoned.zone_blocks)
}

/// Returns a program that runs `steps`, on a zoned unit only if the rules permit the span.
pub(crate) fn guard(
    nexus: &Arc<Nexus>,
    media: &Media,
    span: Span,
    steps: impl Steps + 'static,
) -> Box<Program> {
    match media.zones {
        None => Program::new(nexus, steps),
        Some(_) => Program::new(nexus, Guarded::new(media, span, Then::Run(Box::new(steps)))),
    }
}

/// Returns a program that finds out why a read or write of a zoned unit failed, and whose outcome is the
/// command's. Returns `None` if the status says it, or the unit is not zoned.
pub fn explain(nexus: &Arc<Nexus>, io: &BlockIo, status: Status) -> Option<Box<Program>> {
    if !matches!(io.op, Op::Read | Op::Write) || !matches!(status, Status::IoError | Status::Invalid) {
        return None;
    }
    let media = nexus.unit().media();
    media.zones?;
    let (lba, count) = (io.offset >> io.block_shift, io.len >> io.block_shift);
    let span = Span { lba, count, is_write: io.op == Op::Write };
    Some(Program::new(nexus, Guarded::new(&media, span, Then::End(complete(io, status)))))
}

/// Continuation of a command whose span is permitted.
enum Then {
    Run(Box<dyn Steps>),
    End(Outcome),
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Phase {
    Idle,
    Asking,
    Running,
}

/// Program that reads the states of the zones of a span, checks the rules, and then continues.
struct Guarded {
    span: Span,
    shift: u32,
    /// Number of zones in the span.
    records: u32,
    then: Then,
    phase: Phase,
}

impl Guarded {
    fn new(media: &Media, span: Span, then: Then) -> Guarded {
        let zone_blocks = media.zones.map_or(media.blocks, |zoned| zoned.zone_blocks).max(1);
        let zones = span.end().saturating_sub(1) / zone_blocks - span.lba / zone_blocks + 1;
        let records = u32::try_from(zones).unwrap_or(u32::MAX).min(ZONES_MAX);
        Guarded { span, shift: media.block_shift(), records, then, phase: Phase::Idle }
    }

    fn records_len(&self) -> u32 {
        self.records * Zone::RECORD_LEN as u32
    }
}

impl Steps for Guarded {
    fn needs(&self) -> Needs {
        let own = Needs { scratch: self.records_len(), ..Needs::default() };
        match &self.then {
            Then::End(_) => own,
            Then::Run(steps) => {
                let needs = steps.needs();
                Needs { scratch: needs.scratch.max(own.scratch), ..needs }
            }
        }
    }

    fn step(&mut self, completed: Option<Completed>, memory: &mut ProgramMemory<'_>) -> Step {
        let offset = self.span.lba << self.shift;
        match (self.phase, completed) {
            (Phase::Idle, _) => {
                self.phase = Phase::Asking;
                Step::Submit(query(offset, self.span.end() << self.shift, self.records))
            }
            (Phase::Asking, None) => Step::Wait,
            (Phase::Asking, Some(Completed { status, .. })) => {
                self.phase = Phase::Running;
                let records = memory.scratch.get(..self.records_len() as usize).unwrap_or_default();
                let zones: Vec<BlockZone> = BlockZone::of_records(records, self.shift).collect();
                if status.is_ok()
                    && let Err(sense) = self.span.check(&zones)
                {
                    return Step::Finished(sense.into());
                }
                match &mut self.then {
                    Then::End(outcome) => Step::Finished(outcome.clone()),
                    Then::Run(steps) if status.is_ok() => steps.step(None, memory),
                    Then::Run(_) => Step::Finished(failed(status, self.span.lba, false)),
                }
            }
            (Phase::Running, completed) => match &mut self.then {
                Then::End(outcome) => Step::Finished(outcome.clone()),
                Then::Run(steps) => steps.step(completed, memory),
            },
        }
    }
}

/// A read that spans zones, whose data passes through the scratch memory.
pub(crate) struct SpanningRead {
    /// Offset in bytes.
    pub(crate) offset: u64,
    /// Length in bytes: whole blocks.
    pub(crate) len: u32,
    /// Bytes that the initiator expects.
    pub(crate) transfer: u32,
    /// Bytes that the CDB requests.
    pub(crate) wanted: u64,
    pub(crate) shift: u32,
    pub(crate) is_submitted: bool,
}

impl Steps for SpanningRead {
    fn needs(&self) -> Needs {
        Needs { scratch: self.len, ..Needs::default() }
    }

    fn step(&mut self, completed: Option<Completed>, memory: &mut ProgramMemory<'_>) -> Step {
        match completed {
            None if std::mem::replace(&mut self.is_submitted, true) => Step::Wait,
            None => {
                let end = self.offset + u64::from(self.len);
                let buffer = Buffer::Scratch(0..self.len);
                Step::Submit(ProgramIo { op: Op::Read, buffer, ..query(self.offset, end, 0) })
            }
            Some(Completed { status: Status::Ok, .. }) => {
                let data = memory.scratch.get(..self.transfer as usize).unwrap_or_default().to_vec();
                Step::Finished(Outcome { data, ..Outcome::good(self.wanted) })
            }
            Some(Completed { status, .. }) => {
                Step::Finished(failed(status, self.offset >> self.shift, false))
            }
        }
    }
}
