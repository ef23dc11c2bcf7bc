//! GET LBA STATUS: SBC-4 section 5.7.

use super::range::{Blocks, failed};
use crate::bytes::{be32, put};
use crate::dispatch::Call;
use crate::program::{Buffer, Completed, Needs, Program, ProgramIo, ProgramMemory, Step, Steps, Target};
use crate::{Begin, Can, Outcome};
use block::{Extent, Flags, Op, Status};

/// Maximum number of records to query at once.
const RECORDS: u32 = 256;
/// Smallest valid allocation length, in bytes.
const ALLOCATION_MIN: u32 = 24;
const HEADER: usize = 8;
const DESCRIPTOR: usize = 16;

/// Provisioning status of blocks.
const MAPPED: u8 = 0;
const DEALLOCATED: u8 = 1;

/// Begins GET LBA STATUS (16).
pub(crate) fn lba_status(call: &Call<'_>) -> Begin {
    let media = &call.facts.media;
    let blocks = Blocks { count: 1, ..Blocks::of(&call.cdb) };
    let allocation = be32(&call.cdb, 10);
    if let Err(sense) = blocks.check(media) {
        return sense.into();
    }
    if allocation < ALLOCATION_MIN {
        return crate::Sense::cdb_field(10, None).into();
    }
    let status = LbaStatus {
        lba: blocks.lba,
        end: media.blocks,
        shift: media.block_shift(),
        allocation,
        is_asked: false,
    };
    // Blocks of a fully provisioned unit are all mapped.
    if !call.facts.is_thin() || !media.can.contains(Can::EXTENTS) {
        return status.report(&[]).into();
    }
    Begin::Program(Program::new(call.nexus, status))
}

struct LbaStatus {
    lba: u64,
    end: u64,
    shift: u32,
    allocation: u32,
    is_asked: bool,
}

impl LbaStatus {
    fn records(&self) -> u32 {
        let fit = (self.allocation as usize - HEADER) / DESCRIPTOR;
        // Extents that are not whole blocks are merged, so a few more records than descriptors are queried.
        u32::try_from(fit).unwrap_or(RECORDS).saturating_mul(2).clamp(2, RECORDS)
    }

    /// Returns the parameter data for these extents, which start at the LBA. A block is deallocated only if
    /// all of it is a hole.
    fn report(&self, extents: &[Extent]) -> Outcome {
        let mut runs: Vec<(u64, u64, u8)> = Vec::new();
        let mut add = |from: u64, to: u64, status: u8| match runs.last_mut() {
            _ if from >= to => {}
            Some(last) if last.2 == status && last.1 == from => last.1 = to,
            _ => runs.push((from, to, status)),
        };
        let mut at = self.lba << self.shift;
        let mut reported = self.lba;
        // A block can span several extents: adjacent extents with the same status count as one.
        for run in extents.chunk_by(|one, next| one.hole == next.hole) {
            let end = run.iter().fold(at, |end, extent| end.saturating_add(extent.len.0));
            if run[0].hole {
                let first = at.div_ceil(1 << self.shift).max(reported);
                let last = (end >> self.shift).min(self.end);
                add(reported, first.min(self.end), MAPPED);
                add(first, last, DEALLOCATED);
                reported = reported.max(first.min(self.end)).max(last);
            }
            at = end;
        }
        // A block within which the last extent ends is left to the next command, unless nothing was
        // reported yet.
        let known = if extents.is_empty() { self.end } else { (at >> self.shift).min(self.end) };
        add(reported, known, MAPPED);
        if runs.is_empty() {
            runs.push((self.lba, self.lba + 1, MAPPED));
        }
        let mut data = vec![0; HEADER];
        for (from, to, status) in runs {
            let mut descriptor = [0; DESCRIPTOR];
            put(&mut descriptor, 0, &from.to_be_bytes());
            put(&mut descriptor, 8, &u32::try_from(to - from).unwrap_or(u32::MAX).to_be_bytes());
            descriptor[12] = status;
            if data.len() + DESCRIPTOR > self.allocation as usize {
                break;
            }
            data.extend_from_slice(&descriptor);
            // The next descriptor has to start where this one ends.
            if to - from > u32::MAX.into() {
                break;
            }
        }
        let len = data.len() as u32 - 4;
        put(&mut data, 0, &len.to_be_bytes());
        Outcome::with_data(data, self.allocation)
    }
}

impl Steps for LbaStatus {
    fn needs(&self) -> Needs {
        Needs { scratch: self.records() * Extent::RECORD_LEN as u32, ..Needs::default() }
    }

    fn step(&mut self, completed: Option<Completed>, memory: &mut ProgramMemory<'_>) -> Step {
        let offset = self.lba << self.shift;
        let scratch = self.needs().scratch;
        let Some(Completed { status, .. }) = completed else {
            if std::mem::replace(&mut self.is_asked, true) {
                return Step::Wait;
            }
            return Step::Submit(ProgramIo {
                slot: 0,
                unit: Target::Own,
                op: Op::Extents,
                offset,
                len: (self.end - self.lba) << self.shift,
                flags: Flags::empty(),
                buffer: Buffer::Scratch(0..scratch),
            });
        };
        Step::Finished(match status {
            Status::Ok => {
                let records = memory.scratch.get(..scratch as usize).unwrap_or_default();
                let extents = records.chunks_exact(Extent::RECORD_LEN).map_while(Extent::from_record);
                self.report(&extents.collect::<Vec<_>>())
            }
            Status::NotSupported => self.report(&[]),
            status => failed(status, offset, self.shift, false),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use block::Bytes;
    use proptest::prelude::*;

    const BLOCKS: u64 = 64;

    proptest! {
        /// Descriptors are contiguous from the LBA on, and a block is deallocated only if all of it is a
        /// hole.
        #[test]
        fn blocks_are_deallocated_if_all_of_them_is_a_hole(
            lba in 0..BLOCKS,
            runs in prop::collection::vec((1_u64..3000, any::<bool>()), 1..40),
            allocation in 24_u32..1000,
        ) {
            let status = LbaStatus { lba, end: BLOCKS, shift: 9, allocation, is_asked: true };
            let mut left = (BLOCKS - lba) << 9;
            let mut extents = Vec::new();
            let mut is_hole = vec![true; BLOCKS as usize];
            for (len, hole) in runs {
                let at = (BLOCKS << 9) - left;
                let len = len.min(left);
                if len > 0 {
                    extents.push(Extent { len: Bytes(len), hole, zero: hole });
                    if !hole {
                        is_hole[(at >> 9) as usize..=((at + len - 1) >> 9) as usize].fill(false);
                    }
                }
                left -= len;
            }
            let known = ((BLOCKS << 9) - left) >> 9;
            let data = status.report(&extents).data;
            let mut next = lba;
            for descriptor in data[8..].chunks_exact(16) {
                let from = crate::bytes::be64(descriptor, 0);
                let count = u64::from(be32(descriptor, 8));
                prop_assert!(from == next && count > 0 && from + count <= BLOCKS);
                for block in from..from + count {
                    let is_deallocated = block < known && is_hole[block as usize];
                    prop_assert_eq!(descriptor[12] == 1, is_deallocated, "block {}", block);
                }
                next = from + count;
            }
            prop_assert!(next > lba && data.len() <= allocation as usize);
        }
    }
}
