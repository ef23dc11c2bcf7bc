//! VERIFY and WRITE AND VERIFY: SBC-4 sections 5.36 to 5.38 and 5.48 to 5.50. They read the medium, whereas
//! LIO's are no-ops (LIO-15).

use super::range::{Blocks, check_data_out, failed};
use crate::dispatch::Call;
use crate::program::{Buffer, Completed, Needs, ProgramIo, ProgramMemory, Step, Steps, Target};
use crate::sense::Sense;
use crate::zones::access::{Span, guard};
use crate::{Begin, Can, Outcome};
use block::{Flags, Op};

/// Bytes that one request reads.
const CHUNK: u32 = 1 << 20;
/// Maximum number of requests in flight.
const PARALLEL: usize = 2;

/// Comparison that BYTCHK selects.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Compare {
    /// Compare nothing: only check that the medium is readable.
    Nothing,
    /// Compare with data-out of the same length.
    All,
    /// Compare each block with one block of data-out.
    Same,
}

impl Compare {
    /// Decodes BYTCHK. Returns `None` for the reserved value.
    fn of(cdb1: u8) -> Option<Compare> {
        match cdb1 >> 1 & 3 {
            0 => Some(Compare::Nothing),
            1 => Some(Compare::All),
            3 => Some(Compare::Same),
            _ => None,
        }
    }
}

/// Begins VERIFY (10), (12) and (16).
pub(crate) fn verify(call: &Call<'_>) -> Begin {
    program(call, false).unwrap_or_else(Begin::from)
}

/// Begins WRITE AND VERIFY (10), (12) and (16). BYTCHK 0 and 1 both compare with the written data: reading
/// it back without a comparison would prove less at the same cost.
pub(crate) fn write_verify(call: &Call<'_>) -> Begin {
    program(call, true).unwrap_or_else(Begin::from)
}

fn program(call: &Call<'_>, writes: bool) -> Result<Begin, Outcome> {
    let media = &call.facts.media;
    let blocks = Blocks::of(&call.cdb);
    let compare = match Compare::of(call.cdb[1]) {
        None => return Err(Sense::cdb_field(1, Some(2)).into()),
        Some(Compare::Same) if writes => return Err(Sense::cdb_field(1, Some(2)).into()),
        Some(_) if writes => Compare::All,
        Some(compare) => compare,
    };
    if compare == Compare::All {
        blocks.check_transfer(media)?
    } else {
        blocks.check(media)?
    }
    if blocks.count == 0 {
        return Ok(Outcome::good(0).into());
    }
    let len = blocks.len(media);
    let data_out = match compare {
        Compare::Nothing => 0,
        Compare::All => len as u32,
        Compare::Same => media.block_size,
    };
    let wanted = len;
    let (len, data_out) = match writes {
        // As for WRITE, an initiator that expects to send less writes less, in whole blocks.
        true => {
            let sent = len.min(call.command.data_out.into());
            if sent == 0 {
                return Ok(Outcome::good(wanted).into());
            }
            if sent % u64::from(media.block_size) != 0 {
                return Err(Outcome { wanted, ..Sense::INVALID_TRANSFER.into() });
            }
            (sent, sent as u32)
        }
        false if compare == Compare::Nothing => (len, 0),
        false => {
            check_data_out(call, data_out.into())?;
            (len, data_out)
        }
    };
    let start = blocks.offset(media);
    let is_cached = media.write_cache && media.can.contains(Can::FUA);
    let span = Span { lba: blocks.lba, count: len >> media.block_shift(), is_write: writes };
    Ok(Begin::Program(guard(
        call.nexus,
        media,
        span,
        Verify {
            start,
            end: start + len,
            next: start,
            compare,
            data_out,
            wanted: if writes { wanted } else { data_out.into() },
            block: media.block_size,
            write: writes.then_some(if is_cached { Flags::FUA } else { Flags::empty() }),
            is_writing: false,
            slots: [None; PARALLEL],
            worst: None,
        },
    )))
}

/// Failure of a verification and its offset. The lowest offset is reported, whatever completes first.
#[derive(Clone, Debug)]
struct Failure {
    offset: u64,
    outcome: Outcome,
}

/// Program that reads a range in chunks, several at a time, and compares them.
struct Verify {
    start: u64,
    end: u64,
    /// Offset of the next chunk.
    next: u64,
    compare: Compare,
    data_out: u32,
    /// Bytes of data-out that the CDB requests.
    wanted: u64,
    block: u32,
    /// WRITE AND VERIFY: flags of the write that comes first; `None` if it has been submitted, or there is
    /// none.
    write: Option<Flags>,
    is_writing: bool,
    /// Offset and length of the chunk that each slot reads.
    slots: [Option<(u64, u32)>; PARALLEL],
    worst: Option<Failure>,
}

impl Verify {
    /// Returns the bytes of a chunk, which is whole blocks.
    fn chunk(&self) -> u32 {
        let whole = self.end - self.start;
        CHUNK.min(u32::try_from(whole).unwrap_or(CHUNK))
    }

    fn fail(&mut self, offset: u64, outcome: Outcome) {
        if self.worst.as_ref().is_none_or(|worst| offset < worst.offset) {
            self.worst = Some(Failure { offset, outcome });
        }
    }

    fn completed(&mut self, completed: Completed, memory: &ProgramMemory<'_>) {
        let shift = self.block.trailing_zeros();
        if std::mem::take(&mut self.is_writing) {
            if !completed.status.is_ok() {
                self.fail(self.start, failed(completed.status, self.start, shift, true));
            }
            return;
        }
        let slot = usize::from(completed.slot);
        let Some((offset, len)) = self.slots.get_mut(slot).and_then(Option::take) else { return };
        if !completed.status.is_ok() {
            return self.fail(offset, failed(completed.status, offset, shift, false));
        }
        let from = slot * self.chunk() as usize;
        let read = memory.scratch.get(from..from + len as usize).unwrap_or_default();
        let differs = match self.compare {
            Compare::Nothing => None,
            Compare::All => {
                let at = (offset - self.start) as usize;
                first_difference(read, memory.data_out.get(at..at + read.len()).unwrap_or_default())
            }
            Compare::Same => {
                let block = memory.data_out.get(..self.block as usize).unwrap_or_default();
                read.chunks(self.block as usize).enumerate().find_map(|(index, one)| {
                    first_difference(one, block).map(|at| index * self.block as usize + at)
                })
            }
        };
        if let Some(at) = differs {
            let found = offset + at as u64;
            self.fail(found, Sense::miscompare(found - self.start).into());
        }
    }
}

/// Returns the index of the first byte that differs, or is missing in one of the strings.
pub(super) fn first_difference(one: &[u8], other: &[u8]) -> Option<usize> {
    if one == other {
        return None;
    }
    let common = one.iter().zip(other).position(|(one, other)| one != other);
    Some(common.unwrap_or(one.len().min(other.len())))
}

impl Steps for Verify {
    fn needs(&self) -> Needs {
        let chunks = (self.end - self.start).div_ceil(self.chunk().into()).min(PARALLEL as u64) as u32;
        Needs {
            data_out: self.data_out,
            scratch: self.chunk() * chunks,
            // The written data is verified before any other request can write there.
            exclusive: self.write.map(|_| self.start..self.end),
        }
    }

    fn step(&mut self, completed: Option<Completed>, memory: &mut ProgramMemory<'_>) -> Step {
        if let Some(completed) = completed {
            self.completed(completed, memory);
        }
        if self.is_writing {
            return Step::Wait;
        }
        if let Some(flags) = self.write.take() {
            self.is_writing = true;
            return Step::Submit(ProgramIo {
                slot: 0,
                unit: Target::Own,
                op: Op::Write,
                offset: self.start,
                len: self.end - self.start,
                flags,
                buffer: Buffer::DataOut(0..self.data_out),
            });
        }
        let free = self.slots.iter().position(Option::is_none);
        if let (None, Some(slot)) = (&self.worst, free)
            && self.next < self.end
        {
            let chunk = self.chunk();
            let len = chunk.min(u32::try_from(self.end - self.next).unwrap_or(chunk));
            let (offset, at) = (self.next, slot as u32 * chunk);
            self.slots[slot] = Some((offset, len));
            self.next += u64::from(len);
            return Step::Submit(ProgramIo {
                slot: slot as u8,
                unit: Target::Own,
                op: Op::Read,
                offset,
                len: len.into(),
                flags: Flags::empty(),
                buffer: Buffer::Scratch(at..at + len),
            });
        }
        if self.slots.iter().any(Option::is_some) {
            return Step::Wait;
        }
        Step::Finished(match self.worst.take() {
            Some(failure) => failure.outcome,
            None => Outcome::good(self.wanted),
        })
    }
}
