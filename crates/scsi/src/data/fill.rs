//! WRITE SAME and UNMAP: SBC-4 sections 5.35 and 5.52 to 5.54. Both fill ranges, with several requests in
//! flight.

use super::range::{Blocks, check_data_out, failed};
use crate::bytes::{be16, be32, be64};
use crate::dispatch::Call;
use crate::program::{Buffer, Completed, Needs, Program, ProgramIo, ProgramMemory, Step, Steps, Target};
use crate::sense::Sense;
use crate::zones::access::{Span, guard};
use crate::{Begin, Can, Outcome};
use block::{Flags, Op, Status};

/// Bytes of one write of the pattern.
const CHUNK: u64 = 1 << 20;
/// Bytes of one discard or write-zeroes request.
const CHUNK_WITHOUT_DATA: u64 = 1 << 30;
/// Maximum number of requests in flight.
const PARALLEL: usize = 4;
/// Bits of WRITE SAME.
const NDOB: u8 = 0x01;
const UNMAP: u8 = 0x08;

/// Method of filling the ranges.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum FillMethod {
    /// Deallocate the ranges; their content afterwards is unspecified.
    Discard,
    /// Make the ranges read as zeroes; they may be deallocated.
    Unmap,
    /// Make the ranges read as zeroes, and keep them allocated.
    Zero,
    /// Write the pattern: the block of data-out, or zeroes.
    Pattern,
}

impl FillMethod {
    fn chunk(self) -> u64 {
        if self == FillMethod::Pattern { CHUNK } else { CHUNK_WITHOUT_DATA }
    }
}

/// Begins WRITE SAME (10), (16) and (32). LIO-14: PBDATA, LBDATA and ANCHOR are not valid bits, and a
/// length of 0 is refused (WSNZ), so that an omitted field does not overwrite the rest of the medium. NDOB
/// is supported.
pub(crate) fn write_same(call: &Call<'_>) -> Begin {
    write_same_program(call).unwrap_or_else(Begin::from)
}

fn write_same_program(call: &Call<'_>) -> Result<Begin, Outcome> {
    let (facts, media) = (&call.facts, &call.facts.media);
    let blocks = Blocks::of(&call.cdb);
    let flags = call.cdb[if call.cdb[0] == 0x7F { 10 } else { 1 }];
    let has_ndob = call.cdb[0] != 0x41 && flags & NDOB != 0;
    blocks.check(media)?;
    if blocks.count == 0 {
        return Err(blocks.too_long().into());
    }
    let most = facts.write_same_max();
    if most != 0 && blocks.count > most {
        return Err(blocks.too_long().into());
    }
    let data_out = if has_ndob { 0 } else { media.block_size };
    check_data_out(call, data_out.into())?;
    let start = blocks.offset(media);
    // The blocks must read as the pattern afterwards, deallocated or not. It is not known before it has
    // arrived: see `Fill::choose`.
    let method = if flags & UNMAP != 0 { FillMethod::Unmap } else { FillMethod::Zero };
    let fill = Fill::new(call, method, vec![(start, blocks.len(media))], data_out);
    let span = Span { lba: blocks.lba, count: blocks.count, is_write: true };
    Ok(Begin::Program(guard(call.nexus, media, span, fill)))
}

/// Begins UNMAP, whose parameter list has not been received yet.
pub(crate) fn unmap_begin(call: &Call<'_>) -> Begin {
    let len = be16(&call.cdb, 7);
    match len {
        0 => Outcome::good(0).into(),
        // LIO-13: a list shorter than its header is an error.
        1..8 => Sense::PARAMETER_LIST_LENGTH.into(),
        len => call.parameters(len.into()),
    }
}

/// Continues UNMAP with its parameter list.
pub(crate) fn unmap(call: &Call<'_>, list: &[u8]) -> Begin {
    match unmap_ranges(call, list) {
        Ok(ranges) if ranges.is_empty() => Outcome::good(list.len() as u64).into(),
        Ok(ranges) => {
            let method = if call.facts.unmaps_to_zeroes() { FillMethod::Unmap } else { FillMethod::Discard };
            let fill = Fill { wanted: list.len() as u64, ..Fill::new(call, method, ranges, 0) };
            Begin::Program(Program::new(call.nexus, fill))
        }
        Err(sense) => sense.into(),
    }
}

/// Decodes and checks the descriptors, before any of them takes effect.
fn unmap_ranges(call: &Call<'_>, list: &[u8]) -> Result<Vec<(u64, u64)>, Sense> {
    const HEADER: usize = 8;
    const DESCRIPTOR: usize = 16;
    let (media, attributes) = (&call.facts.media, &call.facts.attributes);
    if list.len() < HEADER {
        return Err(Sense::PARAMETER_LIST_LENGTH);
    }
    // Of a list that is truncated by the parameter list length, all complete descriptors count.
    let len = usize::from(be16(list, 2)).min(list.len() - HEADER);
    let descriptors = list[HEADER..HEADER + len].chunks_exact(DESCRIPTOR);
    if descriptors.len() > attributes.max_unmap_block_desc_count as usize {
        return Err(Sense::parameter_field(2, None));
    }
    let mut ranges = Vec::with_capacity(descriptors.len());
    let mut total = 0_u64;
    for (index, descriptor) in descriptors.enumerate() {
        let (lba, count) = (be64(descriptor, 0), u64::from(be32(descriptor, 8)));
        if lba.checked_add(count).is_none_or(|end| end > media.blocks) {
            return Err(Sense::LBA_OUT_OF_RANGE);
        }
        total = total.saturating_add(count);
        if attributes.max_unmap_lba_count != u32::MAX && total > attributes.max_unmap_lba_count.into() {
            return Err(Sense::parameter_field((HEADER + DESCRIPTOR * index + 8) as u16, None));
        }
        if count > 0 {
            ranges.push((lba << media.block_shift(), count << media.block_shift()));
        }
    }
    Ok(ranges)
}

/// Program that fills ranges.
struct Fill {
    method: FillMethod,
    /// Remaining ranges, as offset and length in bytes; the last element is next.
    ranges: Vec<(u64, u64)>,
    /// Number of slots in use: on a zoned unit requests must arrive in order.
    parallel: usize,
    /// Range of each slot's request in flight.
    slots: [Option<(u64, u64)>; PARALLEL],
    /// Method of each slot's request.
    ways: [FillMethod; PARALLEL],
    /// Bytes of data-out: one block, or 0 without data-out.
    data_out: u32,
    /// Bytes of scratch memory for the pattern.
    scratch: u32,
    /// Whether the pattern is in the scratch memory.
    is_prepared: bool,
    started: bool,
    /// Whether the ranges may stay allocated: UNMAP without a promised content succeeds even if the device
    /// refuses to deallocate.
    may_stay: bool,
    can_zero: bool,
    /// Whether discarded ranges read as zeroes.
    discard_zeroes: bool,
    flags: Flags,
    shift: u32,
    wanted: u64,
    failed: Option<Outcome>,
}

impl Fill {
    fn new(call: &Call<'_>, method: FillMethod, mut ranges: Vec<(u64, u64)>, data_out: u32) -> Fill {
        let media = &call.facts.media;
        let can = media.can;
        ranges.reverse();
        let longest = ranges.iter().map(|range| range.1).max().unwrap_or(0).min(CHUNK);
        let is_through = call.unit().fast_facts().write_through && can.contains(Can::FUA);
        let can_zero = can.contains(Can::WRITE_ZEROES);
        Fill {
            method,
            ranges,
            parallel: if media.zones.is_some() { 1 } else { PARALLEL },
            slots: [None; PARALLEL],
            ways: [method; PARALLEL],
            data_out,
            // Discards without a promised content never fall back to writing.
            scratch: if method == FillMethod::Discard { 0 } else { longest as u32 },
            is_prepared: false,
            started: false,
            may_stay: method == FillMethod::Discard,
            can_zero,
            discard_zeroes: can.contains(Can::UNMAP | Can::UNMAP_ZEROES),
            flags: if is_through { Flags::FUA } else { Flags::empty() },
            shift: media.block_shift(),
            wanted: data_out.into(),
            failed: None,
        }
    }

    /// Chooses the method, now that the pattern is known.
    fn choose(&mut self, memory: &ProgramMemory<'_>) {
        let is_zero = memory.data_out.iter().take(self.data_out as usize).all(|byte| *byte == 0);
        self.method = match self.method {
            FillMethod::Unmap if is_zero && self.discard_zeroes => FillMethod::Discard,
            FillMethod::Unmap | FillMethod::Zero if !is_zero || !self.can_zero => FillMethod::Pattern,
            method => method,
        };
    }

    fn prepare(&mut self, memory: &mut ProgramMemory<'_>) {
        let pattern = memory.data_out.get(..self.data_out as usize).unwrap_or_default();
        let scratch = memory.scratch.get_mut(..self.scratch as usize).unwrap_or_default();
        if pattern.is_empty() {
            scratch.fill(0);
        } else {
            scratch.chunks_mut(pattern.len()).for_each(|part| part.copy_from_slice(&pattern[..part.len()]));
        }
        self.is_prepared = true;
    }

    fn completed(&mut self, Completed { slot, status }: Completed) {
        let slot = usize::from(slot);
        let Some((offset, len)) = self.slots.get_mut(slot).and_then(Option::take) else { return };
        match status {
            Status::Ok => {}
            Status::NotSupported if self.may_stay => {}
            // The device reported that it cannot do this: write the range instead.
            Status::NotSupported if self.ways[slot] != FillMethod::Pattern => {
                self.method = FillMethod::Pattern;
                self.ranges.push((offset, len));
            }
            status => {
                self.failed.get_or_insert(failed(status, offset, self.shift, true));
            }
        }
    }

    /// Returns the next request.
    fn next(&mut self, slot: usize) -> Option<ProgramIo> {
        let (offset, len) = self.ranges.pop()?;
        let now = len.min(self.method.chunk());
        if now < len {
            self.ranges.push((offset + now, len - now));
        }
        self.slots[slot] = Some((offset, now));
        self.ways[slot] = self.method;
        let (op, flags, buffer) = match self.method {
            FillMethod::Discard => (Op::Discard, Flags::empty(), Buffer::None),
            FillMethod::Unmap => (Op::WriteZeroes, self.flags, Buffer::None),
            FillMethod::Zero => (Op::WriteZeroes, self.flags | Flags::NO_UNMAP, Buffer::None),
            FillMethod::Pattern => (Op::Write, self.flags, Buffer::Scratch(0..now as u32)),
        };
        Some(ProgramIo { slot: slot as u8, unit: Target::Own, op, offset, len: now, flags, buffer })
    }
}

impl Steps for Fill {
    fn needs(&self) -> Needs {
        Needs { data_out: self.data_out, scratch: self.scratch, exclusive: None }
    }

    fn step(&mut self, completed: Option<Completed>, memory: &mut ProgramMemory<'_>) -> Step {
        if let Some(completed) = completed {
            self.completed(completed);
        }
        if !std::mem::replace(&mut self.started, true) {
            self.choose(memory);
        }
        if self.method == FillMethod::Pattern && !self.is_prepared {
            self.prepare(memory);
        }
        if self.failed.is_none()
            && let Some(slot) = self.slots[..self.parallel].iter().position(Option::is_none)
            && let Some(io) = self.next(slot)
        {
            return Step::Submit(io);
        }
        if self.slots.iter().any(Option::is_some) {
            return Step::Wait;
        }
        Step::Finished(self.failed.take().unwrap_or_else(|| Outcome::good(self.wanted)))
    }
}
