//! WRITE SAME and UNMAP: SBC-4 sections 5.35 and 5.52 to 5.54. Both fill ranges, several requests at a time.

use super::range::{Blocks, check_data_out, failed};
use crate::bytes::{be16, be32, be64};
use crate::dispatch::Call;
use crate::program::{Buffer, Completed, Needs, Program, ProgramIo, ProgramMemory, Step, Steps, Target};
use crate::sense::Sense;
use crate::{Begin, Can, Outcome};
use block::{Flags, Op, Status};

/// Bytes of one write of the pattern.
const CHUNK: u64 = 1 << 20;
/// Bytes of one discard or write-zeroes request.
const CHUNK_WITHOUT_DATA: u64 = 1 << 30;
/// Requests in flight.
const PARALLEL: usize = 4;
/// Bits of WRITE SAME.
const NDOB: u8 = 0x01;
const UNMAP: u8 = 0x08;

/// How the ranges are filled.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Way {
    /// Deallocate; what the ranges read as does not matter.
    Discard,
    /// They read as zeroes, and may be deallocated.
    Unmap,
    /// They read as zeroes, and stay allocated.
    Zero,
    /// Write the pattern: the block of data-out, or zeroes.
    Pattern,
}

impl Way {
    fn chunk(self) -> u64 {
        if self == Way::Pattern { CHUNK } else { CHUNK_WITHOUT_DATA }
    }
}

/// WRITE SAME (10), (16) and (32). LIO-14: PBDATA, LBDATA and ANCHOR are no valid bits, and a length of 0 is refused
/// (WSNZ), so that a field left out does not overwrite the rest of the medium. NDOB is supported.
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
    let most = facts.attributes.max_write_same_len;
    if most != 0 && blocks.count > most.into() {
        return Err(blocks.too_long().into());
    }
    let data_out = if has_ndob { 0 } else { media.block_size };
    check_data_out(call, data_out.into())?;
    let start = blocks.offset(media);
    // Blocks read as the pattern afterwards, deallocated or not. It is known only when it arrived: see `Fill::choose`.
    let way = if flags & UNMAP != 0 { Way::Unmap } else { Way::Zero };
    let fill = Fill::new(call, way, vec![(start, blocks.len(media))], data_out);
    Ok(Begin::Program(Program::new(call.nexus, fill)))
}

/// UNMAP. The parameter list was not received yet.
pub(crate) fn unmap_begin(call: &Call<'_>) -> Begin {
    let len = be16(&call.cdb, 7);
    match len {
        0 => Outcome::good(0).into(),
        // LIO-13.
        1..8 => Sense::PARAMETER_LIST_LENGTH.into(),
        len => call.parameters(len.into()),
    }
}

/// UNMAP, with its parameter list.
pub(crate) fn unmap(call: &Call<'_>, list: &[u8]) -> Begin {
    match unmap_ranges(call, list) {
        Ok(ranges) if ranges.is_empty() => Outcome::good(list.len() as u64).into(),
        Ok(ranges) => {
            let way = if call.facts.unmaps_to_zeroes() { Way::Unmap } else { Way::Discard };
            let fill = Fill { wanted: list.len() as u64, ..Fill::new(call, way, ranges, 0) };
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
    // A list that the parameter list length cuts short counts as far as it goes, in whole descriptors.
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

/// Fills ranges.
struct Fill {
    way: Way,
    /// Ranges left, as offset and length in bytes; the last one first.
    ranges: Vec<(u64, u64)>,
    /// Ranges of requests in flight.
    slots: [Option<(u64, u64)>; PARALLEL],
    /// The way of each slot's request.
    ways: [Way; PARALLEL],
    /// Bytes of data-out: one block, or 0.
    data_out: u32,
    /// Bytes of scratch memory for the pattern.
    scratch: u32,
    /// The pattern is in the scratch memory.
    is_prepared: bool,
    started: bool,
    /// UNMAP that promises nothing: a device that refuses to deallocate did all that it had to.
    may_stay: bool,
    can_zero: bool,
    /// Discarded ranges read as zeroes.
    discard_zeroes: bool,
    flags: Flags,
    shift: u32,
    wanted: u64,
    failed: Option<Outcome>,
}

impl Fill {
    fn new(call: &Call<'_>, way: Way, mut ranges: Vec<(u64, u64)>, data_out: u32) -> Fill {
        let media = &call.facts.media;
        let can = media.can;
        ranges.reverse();
        let longest = ranges.iter().map(|range| range.1).max().unwrap_or(0).min(CHUNK);
        let is_through = call.unit().fast_facts().write_through && can.contains(Can::FUA);
        let can_zero = can.contains(Can::WRITE_ZEROES);
        Fill {
            way,
            ranges,
            slots: [None; PARALLEL],
            ways: [way; PARALLEL],
            data_out,
            // Discards that promise nothing never fall back to writing.
            scratch: if way == Way::Discard { 0 } else { longest as u32 },
            is_prepared: false,
            started: false,
            may_stay: way == Way::Discard,
            can_zero,
            discard_zeroes: can.contains(Can::UNMAP | Can::UNMAP_ZEROES),
            flags: if is_through { Flags::FUA } else { Flags::empty() },
            shift: media.block_shift(),
            wanted: data_out.into(),
            failed: None,
        }
    }

    /// Decides how to fill, now that the pattern is known.
    fn choose(&mut self, memory: &ProgramMemory<'_>) {
        let is_zero = memory.data_out.iter().take(self.data_out as usize).all(|byte| *byte == 0);
        self.way = match self.way {
            Way::Unmap if is_zero && self.discard_zeroes => Way::Discard,
            Way::Unmap | Way::Zero if !is_zero || !self.can_zero => Way::Pattern,
            way => way,
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
            // The device found out that it cannot: the range is written instead.
            Status::NotSupported if self.ways[slot] != Way::Pattern => {
                self.way = Way::Pattern;
                self.ranges.push((offset, len));
            }
            status => {
                self.failed.get_or_insert(failed(status, offset, self.shift, true));
            }
        }
    }

    /// The next request.
    fn next(&mut self, slot: usize) -> Option<ProgramIo> {
        let (offset, len) = self.ranges.pop()?;
        let now = len.min(self.way.chunk());
        if now < len {
            self.ranges.push((offset + now, len - now));
        }
        self.slots[slot] = Some((offset, now));
        self.ways[slot] = self.way;
        let (op, flags, buffer) = match self.way {
            Way::Discard => (Op::Discard, Flags::empty(), Buffer::None),
            Way::Unmap => (Op::WriteZeroes, self.flags, Buffer::None),
            Way::Zero => (Op::WriteZeroes, self.flags | Flags::NO_UNMAP, Buffer::None),
            Way::Pattern => (Op::Write, self.flags, Buffer::Scratch(0..now as u32)),
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
        if self.way == Way::Pattern && !self.is_prepared {
            self.prepare(memory);
        }
        if self.failed.is_none()
            && let Some(slot) = self.slots.iter().position(Option::is_none)
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
