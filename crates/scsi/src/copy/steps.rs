//! EXTENDED COPY as a program: two chunks are read and written at the same time.

use super::parameters::{OWN_UNIT, Segment};
use super::report::Progress;
use super::{CHUNK_LEN, COPY_ABORTED, NOT_REACHABLE, Party, THIRD_PARTY_FAILURE};
use crate::program::{Buffer, Completed, Needs, ProgramIo, ProgramMemory, Step, Steps, Target};
use crate::{Nexus, Outcome, Sense};
use block::{Flags, Op, Status};
use std::sync::Arc;

/// Maximum number of chunks in flight.
const SLOTS: usize = 2;

/// Ranges of a segment, in bytes.
#[derive(Debug)]
struct Range {
    source: Target,
    destination: Target,
    /// Offset in the source.
    from: u64,
    /// Offset in the destination.
    to: u64,
    len: u64,
    /// Bytes whose copy has begun.
    begun: u64,
    /// Whether chunks are copied from the end, because the destination overlaps the source from above.
    is_backward: bool,
    /// Maximum number of chunks in flight: one if the ranges overlap.
    slots: usize,
}

/// Part of a range that a slot copies.
#[derive(Clone, Copy, Debug)]
struct Chunk {
    /// Offset in the range.
    at: u64,
    len: u32,
    /// Whether its data was read and is being written.
    is_written: bool,
}

/// State of an EXTENDED COPY.
pub(super) struct Copy {
    nexus: Arc<Nexus>,
    segments: Vec<Segment>,
    parties: Vec<Party>,
    progress: Arc<Progress>,
    may: fn(&Nexus, bool) -> bool,
    /// Bytes of the parameter list.
    wanted: u64,
    /// Index of the next segment.
    next: usize,
    range: Option<Range>,
    chunks: [Option<Chunk>; SLOTS],
    failure: Option<Sense>,
}

impl Copy {
    pub(super) fn new(
        nexus: &Arc<Nexus>,
        segments: Vec<Segment>,
        parties: Vec<Party>,
        progress: Arc<Progress>,
        may: fn(&Nexus, bool) -> bool,
        wanted: u64,
    ) -> Copy {
        let nexus = nexus.clone();
        let (range, chunks, failure) = (None, [None; SLOTS], None);
        Copy { nexus, segments, parties, progress, may, wanted, next: 0, range, chunks, failure }
    }

    /// Returns the unit with this CSCD descriptor id.
    fn party(&self, id: u16) -> Result<(Target, &Arc<Nexus>), Sense> {
        match self.parties.get(usize::from(id)) {
            Some(Party::Own) => Ok((Target::Own, &self.nexus)),
            Some(Party::Other(nexus)) => Ok((Target::Other(nexus.clone()), nexus)),
            Some(Party::Missing(sense)) => Err(*sense),
            None if id == OWN_UNIT => Ok((Target::Own, &self.nexus)),
            None => Err(NOT_REACHABLE),
        }
    }

    /// Checks a segment and converts it to bytes.
    fn range(&self, segment: &Segment) -> Result<Range, Sense> {
        let (source, from) = self.party(segment.source)?;
        let (destination, to) = self.party(segment.destination)?;
        if !(self.may)(from, false) || !(self.may)(to, true) {
            return Err(THIRD_PARTY_FAILURE);
        }
        let is_same = Arc::ptr_eq(from.unit(), to.unit());
        let (from, to) = (from.unit().media(), to.unit().media());
        let unit = if segment.counts_destination { to.block_size } else { from.block_size };
        let len = u64::from(segment.blocks) * u64::from(unit);
        if !len.is_multiple_of(from.block_size.into()) || !len.is_multiple_of(to.block_size.into()) {
            return Err(COPY_ABORTED);
        }
        let bytes = |media: &crate::Media, lba: u64| {
            let start = lba.checked_mul(media.block_size.into())?;
            start.checked_add(len).filter(|end| *end <= media.bytes()).map(|_| start)
        };
        let from = bytes(&from, segment.source_lba).ok_or(COPY_ABORTED)?;
        let to = bytes(&to, segment.destination_lba).ok_or(COPY_ABORTED)?;
        let overlaps = is_same && from.abs_diff(to) < len;
        let slots = if overlaps { 1 } else { SLOTS };
        Ok(Range { source, destination, from, to, len, begun: 0, is_backward: overlaps && from < to, slots })
    }

    /// Starts the next chunk of the range in a slot.
    fn read(&mut self, slot: usize) -> Option<ProgramIo> {
        let range = self.range.as_mut().filter(|range| slot < range.slots && range.begun < range.len)?;
        let len = u32::try_from(range.len - range.begun).map_or(CHUNK_LEN, |rest| rest.min(CHUNK_LEN));
        range.begun += u64::from(len);
        let at = if range.is_backward { range.len - range.begun } else { range.begun - u64::from(len) };
        self.chunks[slot] = Some(Chunk { at, len, is_written: false });
        let range = self.range.as_ref()?;
        Some(request(slot, range.source.clone(), Op::Read, range.from + at, len))
    }

    /// Processes a completion. Returns the write of a chunk that was read.
    fn complete(&mut self, completed: Completed) -> Option<ProgramIo> {
        let slot = usize::from(completed.slot);
        let chunk = self.chunks.get_mut(slot)?;
        let begun = chunk.take()?;
        if completed.status != Status::Ok {
            self.failure.get_or_insert(THIRD_PARTY_FAILURE);
            return None;
        }
        if begun.is_written {
            self.progress.add(begun.len.into());
            return None;
        }
        // After a failure, no further data is written.
        let range = self.range.as_ref().filter(|_| self.failure.is_none())?;
        *chunk = Some(Chunk { is_written: true, ..begun });
        Some(request(slot, range.destination.clone(), Op::Write, range.to + begun.at, begun.len))
    }

    fn end(&mut self, failure: Option<Sense>) -> Step {
        let outcome = match failure {
            // The COMMAND-SPECIFIC INFORMATION is the number of processed segments: SPC-6 section 6.4.6.
            Some(sense) => {
                Outcome::check(Sense { command: Some(self.next.saturating_sub(1) as u64), ..sense })
            }
            None => Outcome::good(self.wanted),
        };
        self.progress.end(&outcome);
        Step::Finished(outcome)
    }
}

impl Drop for Copy {
    /// Records the result of a copy that was aborted.
    fn drop(&mut self) {
        self.progress.abandon();
    }
}

fn request(slot: usize, unit: Target, op: Op, offset: u64, len: u32) -> ProgramIo {
    let start = slot as u32 * CHUNK_LEN;
    let buffer = Buffer::Scratch(start..start + len);
    ProgramIo { slot: slot as u8, unit, op, offset, len: len.into(), flags: Flags::empty(), buffer }
}

impl Steps for Copy {
    fn needs(&self) -> Needs {
        Needs { scratch: CHUNK_LEN * SLOTS as u32, ..Needs::default() }
    }

    fn step(&mut self, completed: Option<Completed>, _: &mut ProgramMemory<'_>) -> Step {
        if let Some(write) = completed.and_then(|completed| self.complete(completed)) {
            return Step::Submit(write);
        }
        loop {
            let free =
                if self.failure.is_some() { None } else { self.chunks.iter().position(Option::is_none) };
            if let Some(read) = free.and_then(|slot| self.read(slot)) {
                return Step::Submit(read);
            }
            if self.chunks.iter().any(Option::is_some) {
                return Step::Wait;
            }
            if let Some(sense) = self.failure.take() {
                return self.end(Some(sense));
            }
            if self.range.take().is_some() {
                self.progress.end_segment();
            }
            // The segment is complete: begin the next one.
            let Some(segment) = self.segments.get(self.next).copied() else { return self.end(None) };
            self.next += 1;
            match self.range(&segment) {
                Ok(range) => self.range = Some(range),
                Err(sense) => return self.end(Some(sense)),
            }
        }
    }
}
