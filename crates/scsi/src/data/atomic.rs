//! COMPARE AND WRITE and ORWRITE: SBC-4 sections 5.3 and 5.14. Both read, then write, and hold the range
//! exclusively during that time, which excludes other commands of this process.
//!
//! A backend that supports `Op::CompareAndWrite` excludes every process: COMPARE AND WRITE tries it first, and
//! reads the range only to find the difference that it reports.

use super::range::{Blocks, check_data_out, failed};
use super::verify::first_difference;
use crate::dispatch::Call;
use crate::program::{Buffer, Completed, Needs, Program, ProgramIo, ProgramMemory, Step, Steps, Target};
use crate::sense::Sense;
use crate::{Begin, Outcome, ScsiStatus};
use block::{Flags, Op, Status};

/// Maximum number of bytes that ORWRITE reads at once.
const CHUNK: u32 = 1 << 20;
const FUA: u8 = 0x08;
/// Limit for attempts of a comparison by the backend. Another one follows if the backend finds a difference
/// which is gone when the range is read: another process has stored the expected data in between.
const ATTEMPTS_MAX: u8 = 16;

/// Use of the blocks that were read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kind {
    /// Compare them with the first half of the data-out; if they are equal, write the second half.
    CompareAndWrite,
    /// Combine them with the data-out by OR, and write the result.
    Or,
}

/// Begins COMPARE AND WRITE, of at most as many blocks as VPD page B0h reports (LIO-12: LIO has one).
pub(crate) fn compare_and_write(call: &Call<'_>) -> Begin {
    let blocks = Blocks::of(&call.cdb);
    if blocks.count > call.facts.compare_and_write_max().into() {
        return blocks.too_long().into();
    }
    program(call, blocks, Kind::CompareAndWrite).unwrap_or_else(Begin::from)
}

/// Begins ORWRITE (16).
pub(crate) fn or_write(call: &Call<'_>) -> Begin {
    program(call, Blocks::of(&call.cdb), Kind::Or).unwrap_or_else(Begin::from)
}

fn program(call: &Call<'_>, blocks: Blocks, kind: Kind) -> Result<Begin, Outcome> {
    let media = &call.facts.media;
    blocks.check_transfer(media)?;
    if blocks.count == 0 {
        return Ok(Outcome::good(0).into());
    }
    let len = blocks.len(media) as u32;
    let data_out = if kind == Kind::CompareAndWrite { 2 * len } else { len };
    check_data_out(call, data_out.into())?;
    let fast = call.unit().fast_facts();
    let is_durable = call.cdb[1] & FUA != 0 || fast.write_through;
    Ok(Begin::Program(Program::new(
        call.nexus,
        ReadThenWrite {
            kind,
            start: blocks.offset(media),
            len,
            done: 0,
            shift: media.block_shift(),
            flags: if is_durable && fast.can_fua { Flags::FUA } else { Flags::empty() },
            flushes: is_durable && fast.fua_flushes,
            attempts: 0,
            phase: Phase::Idle,
        },
    )))
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Phase {
    Idle,
    /// The backend compares and writes.
    Comparing,
    Reading,
    Writing,
    Flushing,
}

struct ReadThenWrite {
    kind: Kind,
    start: u64,
    len: u32,
    /// Bytes written so far.
    done: u32,
    shift: u32,
    flags: Flags,
    /// Whether a flush follows the last write.
    flushes: bool,
    /// Comparisons by the backend so far; 0 if it does not support them.
    attempts: u8,
    phase: Phase,
}

impl ReadThenWrite {
    /// Returns how many bytes to read and write next. COMPARE AND WRITE processes all bytes at once,
    /// because it must write nothing before all of them are compared.
    fn chunk(&self) -> u32 {
        match self.kind {
            Kind::CompareAndWrite => self.len,
            Kind::Or => CHUNK.min(self.len - self.done),
        }
    }

    fn io(&self, op: Op, buffer: Buffer) -> ProgramIo {
        let flags = if matches!(op, Op::Write | Op::CompareAndWrite) { self.flags } else { Flags::empty() };
        let offset = self.start + u64::from(self.done);
        ProgramIo { slot: 0, unit: Target::Own, op, offset, len: self.chunk().into(), flags, buffer }
    }

    /// Has the backend compare and write.
    fn compare(&mut self) -> Step {
        self.phase = Phase::Comparing;
        self.attempts += 1;
        Step::Submit(self.io(Op::CompareAndWrite, Buffer::DataOut(0..2 * self.len)))
    }

    fn read(&mut self) -> Step {
        self.phase = Phase::Reading;
        let chunk = self.chunk();
        Step::Submit(self.io(Op::Read, Buffer::Scratch(0..chunk)))
    }

    /// Decides what to write, after the blocks have been read.
    fn modify(&self, memory: &mut ProgramMemory<'_>) -> Result<Buffer, Outcome> {
        let chunk = self.chunk();
        let read = memory.scratch.get_mut(..chunk as usize).unwrap_or_default();
        match self.kind {
            Kind::CompareAndWrite => {
                let expected = memory.data_out.get(..chunk as usize).unwrap_or_default();
                match first_difference(read, expected) {
                    Some(at) => Err(Sense::miscompare(at as u64).into()),
                    None => Ok(Buffer::DataOut(chunk..2 * chunk)),
                }
            }
            Kind::Or => {
                let operand = memory.data_out.get(self.done as usize..).unwrap_or_default();
                read.iter_mut().zip(operand).for_each(|(byte, operand)| *byte |= operand);
                Ok(Buffer::Scratch(0..chunk))
            }
        }
    }
}

impl Steps for ReadThenWrite {
    fn needs(&self) -> Needs {
        Needs {
            data_out: if self.kind == Kind::CompareAndWrite { 2 * self.len } else { self.len },
            scratch: self.chunk(),
            exclusive: Some(self.start..self.start + u64::from(self.len)),
        }
    }

    fn step(&mut self, completed: Option<Completed>, memory: &mut ProgramMemory<'_>) -> Step {
        if completed.is_none() && self.phase != Phase::Idle {
            return Step::Wait;
        }
        if let (Phase::Comparing, Some(Completed { status, .. })) = (self.phase, completed) {
            match status {
                Status::NotSupported => {
                    self.attempts = 0;
                    return self.read();
                }
                Status::Protection => return self.read(),
                _ => {}
            }
        }
        if let Some(Completed { status, .. }) = completed
            && !status.is_ok()
        {
            let is_write = self.phase != Phase::Reading;
            return Step::Finished(failed(status, self.start + u64::from(self.done), self.shift, is_write));
        }
        if matches!(self.phase, Phase::Comparing | Phase::Writing) {
            self.done += self.chunk();
        }
        let wanted = self.needs().data_out.into();
        match self.phase {
            Phase::Reading => match self.modify(memory) {
                Ok(_) if self.attempts >= ATTEMPTS_MAX => {
                    Step::Finished(Outcome { wanted, ..Outcome::status(ScsiStatus::Busy) })
                }
                Ok(_) if self.attempts > 0 => self.compare(),
                Ok(buffer) => {
                    self.phase = Phase::Writing;
                    Step::Submit(self.io(Op::Write, buffer))
                }
                Err(outcome) => Step::Finished(Outcome { wanted, ..outcome }),
            },
            Phase::Comparing | Phase::Writing if self.done == self.len && self.flushes => {
                self.phase = Phase::Flushing;
                Step::Submit(ProgramIo { offset: 0, len: 0, ..self.io(Op::Flush, Buffer::None) })
            }
            Phase::Comparing | Phase::Flushing => Step::Finished(Outcome::good(wanted)),
            Phase::Writing if self.done == self.len => Step::Finished(Outcome::good(wanted)),
            Phase::Idle if self.kind == Kind::CompareAndWrite => self.compare(),
            Phase::Idle | Phase::Writing => self.read(),
        }
    }
}
