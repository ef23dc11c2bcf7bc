//! READ, WRITE, PRE-FETCH, SYNCHRONIZE CACHE and SEEK: commands that consist of a single block request.

use super::range::Blocks;
use crate::bytes::{be8, be16, be24, be32, be64};
use crate::command::{BlockIo, Command};
use crate::dispatch::Call;
use crate::nexus::Nexus;
use crate::program::{Buffer, Completed, Needs, Program, ProgramIo, ProgramMemory, Step, Steps, Target};
use crate::sense::Sense;
use crate::unit::FastFacts;
use crate::zones::access::{Span, SpanningRead, guard, spans_zones};
use crate::{Begin, Outcome};
use block::{Flags, Op};

/// FUA, and the mask of FUA and DPO: flags of reads and writes.
const FUA: u8 = 0x08;
const FLAGS: u8 = 0x18;

/// Returns the block request of a plain read or write, or `None` if something is restricted, unusual or
/// wrong, so that the slow path must decide.
///
/// Neither locks nor allocates.
#[inline]
pub(crate) fn fast(nexus: &Nexus, command: &Command<'_>) -> Option<BlockIo> {
    let cdb = command.cdb;
    let opcode = *cdb.first()?;
    let (is_write, lba, count, flags, len) = match opcode {
        0x28 | 0x2A => (opcode == 0x2A, be32(cdb, 2).into(), be16(cdb, 7).into(), be8(cdb, 1), 10),
        0x88 | 0x8A => (opcode == 0x8A, be64(cdb, 2), be32(cdb, 10), be8(cdb, 1), 16),
        0xA8 | 0xAA => (opcode == 0xAA, be32(cdb, 2).into(), be32(cdb, 6), be8(cdb, 1), 12),
        0x08 | 0x0A => {
            let count = if be8(cdb, 4) == 0 { 256 } else { be8(cdb, 4).into() };
            (opcode == 0x0A, (be24(cdb, 1) & 0x1F_FFFF).into(), count, 0, 6)
        }
        _ => return None,
    };
    // Group number and CONTROL are the last bytes; the slow path rejects invalid bits in them.
    let is_plain = cdb.len() >= len && cdb[len - 1] == 0 && (len == 6 || cdb[group_at(len)] & 0xC0 == 0);
    if !is_plain || nexus.is_slow(is_write) {
        return None;
    }
    if len == 6 && be8(cdb, 1) & 0xE0 != 0 {
        return None;
    }
    let facts = nexus.unit().fast_facts();
    if facts.is_zoned {
        return None;
    }
    let valid = if facts.fua_valid { FLAGS } else { 0 };
    if flags & !valid != 0 || is_write && facts.is_protected {
        return None;
    }
    let blocks = u64::from(count);
    if lba.checked_add(blocks).is_none_or(|end| end > facts.blocks) || count > facts.blocks_max {
        return None;
    }
    transfer(is_write, lba, blocks, flags & FUA != 0, command, &facts)
}

/// Returns the index of the byte with the group number, by the length of the CDB.
fn group_at(len: usize) -> usize {
    if len == 10 { 6 } else { len - 2 }
}

/// Returns the request of a read or write that passed all checks, or `None` if its length is 0 or not whole
/// blocks.
fn transfer(
    is_write: bool,
    lba: u64,
    count: u64,
    has_fua: bool,
    command: &Command<'_>,
    facts: &FastFacts,
) -> Option<BlockIo> {
    let shift = facts.block_shift;
    let wanted = count << shift;
    let expected = u64::from(if is_write { command.data_out } else { command.data_in });
    let moved = wanted.min(expected);
    let block = (1_u64 << shift) - 1;
    // FCP-4 section 9.4.2 and RFC 7143 section 11.4.5.2: an initiator that expects less receives, or sends,
    // less. A write of part of a block is refused.
    let len = if is_write { moved } else { moved.saturating_add(block) & !block };
    if len == 0 || is_write && len & block != 0 {
        return None;
    }
    let mut flags = Flags::empty();
    if is_write && (has_fua || facts.write_through) {
        if facts.fua_flushes {
            return None;
        }
        flags.set(Flags::FUA, facts.can_fua);
    }
    Some(BlockIo {
        op: if is_write { Op::Write } else { Op::Read },
        offset: lba << shift,
        len,
        transfer: u32::try_from(moved).ok()?,
        flags,
        wanted,
        block_shift: shift,
        descriptor_sense: facts.descriptor_sense,
    })
}

/// Begins READ (6), (10), (12) and (16).
pub(crate) fn read(call: &Call<'_>) -> Begin {
    read_or_write(call, false).unwrap_or_else(Begin::from)
}

/// Begins WRITE (6), (10), (12), (16) and WRITE ATOMIC (16).
pub(crate) fn write(call: &Call<'_>) -> Begin {
    read_or_write(call, true).unwrap_or_else(Begin::from)
}

fn read_or_write(call: &Call<'_>, is_write: bool) -> Result<Begin, Sense> {
    let media = &call.facts.media;
    let blocks = Blocks::of(&call.cdb);
    blocks.check_transfer(media)?;
    // WRITE ATOMIC has its own limit.
    if call.cdb[0] == 0x9C && blocks.count > media.blocks_of(media.atomic_max).into() {
        return Err(blocks.too_long());
    }
    let has_fua = call.cdb[0] > 0x1F && call.cdb[1] & FUA != 0;
    let facts = call.unit().fast_facts();
    let wanted = blocks.len(media);
    if let Some(io) = transfer(is_write, blocks.lba, blocks.count, has_fua, call.command, &facts) {
        let span = Span { lba: blocks.lba, count: io.len >> io.block_shift, is_write };
        return Ok(match spans_zones(media, &span) {
            false => Begin::Io(io),
            true => Begin::Program(spanning(call, span, &io)),
        });
    }
    let announced = if is_write { call.command.data_out } else { call.command.data_in };
    if blocks.count == 0 || !is_write && announced == 0 {
        return Ok(Outcome::good(wanted).into());
    }
    let len = wanted.min(announced.into());
    if len == 0 || len % u64::from(media.block_size) != 0 {
        return Ok(Outcome { wanted, ..Sense::INVALID_TRANSFER.into() }.into());
    }
    // On a device without FUA, a flush follows the write.
    let durable = DurableWrite {
        offset: blocks.offset(media),
        len: len as u32,
        wanted,
        shift: media.block_shift(),
        flags: Flags::empty(),
        flushes: true,
        state: 0,
    };
    let span = Span { lba: blocks.lba, count: len >> media.block_shift(), is_write: true };
    Ok(Begin::Program(guard(call.nexus, media, span, durable)))
}

/// Returns the program of a read or write that spans zones.
fn spanning(call: &Call<'_>, span: Span, io: &BlockIo) -> Box<Program> {
    let (offset, len, shift) = (io.offset, io.len as u32, io.block_shift.into());
    let (media, wanted) = (&call.facts.media, io.wanted);
    if !span.is_write {
        let read = SpanningRead { offset, len, transfer: io.transfer, wanted, shift, is_submitted: false };
        return guard(call.nexus, media, span, read);
    }
    let write = DurableWrite { offset, len, wanted, shift, flags: io.flags, flushes: false, state: 0 };
    guard(call.nexus, media, span, write)
}

/// Program of a write that is followed by a flush if necessary.
struct DurableWrite {
    offset: u64,
    len: u32,
    wanted: u64,
    shift: u32,
    flags: Flags,
    flushes: bool,
    /// Number of requests submitted.
    state: u8,
}

impl Steps for DurableWrite {
    fn needs(&self) -> Needs {
        Needs { data_out: self.len, ..Needs::default() }
    }

    fn step(&mut self, completed: Option<Completed>, _: &mut ProgramMemory<'_>) -> Step {
        if let Some(Completed { status, .. }) = completed
            && !status.is_ok()
        {
            return Step::Finished(super::range::failed(status, self.offset, self.shift, true));
        }
        if completed.is_none() && self.state > 0 {
            return Step::Wait;
        }
        self.state += 1;
        let io = ProgramIo {
            slot: 0,
            unit: Target::Own,
            op: Op::Write,
            offset: self.offset,
            len: self.len.into(),
            flags: self.flags,
            buffer: Buffer::DataOut(0..self.len),
        };
        match self.state {
            1 => Step::Submit(io),
            2 if self.flushes => {
                Step::Submit(ProgramIo { op: Op::Flush, offset: 0, len: 0, buffer: Buffer::None, ..io })
            }
            _ => Step::Finished(Outcome::good(self.wanted)),
        }
    }
}

/// Executes SEEK (6) and (10): checks the LBA.
pub(crate) fn seek(call: &Call<'_>) -> Begin {
    let blocks = Blocks { count: 1, ..Blocks::of(&call.cdb) };
    match blocks.check(&call.facts.media) {
        Ok(()) => Outcome::good(0).into(),
        Err(sense) => sense.into(),
    }
}

/// Begins PRE-FETCH (10) and (16), of at most as much as one command can transfer. The status is GOOD,
/// because the initiator cannot rely on the cache (CONDITION MET would report that all blocks are cached).
pub(crate) fn prefetch(call: &Call<'_>) -> Begin {
    range_request(call, Op::Prefetch)
}

/// Begins SYNCHRONIZE CACHE (10) and (16): flushes the whole device, whatever the range. Even with IMMED
/// the status waits for the flush, so that errors are reported.
pub(crate) fn synchronize(call: &Call<'_>) -> Begin {
    range_request(call, Op::Flush)
}

fn range_request(call: &Call<'_>, op: Op) -> Begin {
    let media = &call.facts.media;
    let blocks = Blocks::of(&call.cdb);
    if let Err(sense) = blocks.check(media) {
        return sense.into();
    }
    let blocks = blocks.or_rest(media);
    if op == Op::Flush {
        return Begin::Io(call.flush());
    }
    match blocks.len(media) {
        0 => Outcome::good(0).into(),
        len => {
            let len = len.min(media.transfer_max.into());
            Begin::Io(BlockIo { op, offset: blocks.offset(media), len, ..call.flush() })
        }
    }
}
