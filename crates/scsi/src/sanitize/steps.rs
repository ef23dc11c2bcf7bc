//! SANITIZE as a program: passes over the whole medium, with a few requests in flight.

use super::{HEADER_LEN, Operation, SANITIZE_FAILED};
use crate::bytes::{be8, be16};
use crate::program::{Buffer, Completed, Needs, ProgramIo, ProgramMemory, Step, Steps, Target};
use crate::{Can, Media, Nexus, Outcome, Sense};
use block::{Flags, Op, Status};
use std::sync::Arc;

/// Bytes of a request.
const CHUNK_LEN: u32 = 1 << 20;
/// Maximum number of requests in flight.
const SLOTS: usize = 4;

/// Parameters of OVERWRITE.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Overwrite {
    /// Pattern to write repeatedly into each block.
    pattern: Vec<u8>,
    /// Whether every second pass writes the complement (INVERT).
    inverts: bool,
    passes: u8,
}

impl Overwrite {
    /// Parses the parameter list. Errors: 05/26/00 for a wrong field, 05/1A/00 for a truncated pattern.
    pub(super) fn parse(list: &[u8], media: &Media) -> Result<Overwrite, Sense> {
        let (flags, len) = (be8(list, 0), be16(list, 2));
        // TEST: only the default method is supported.
        if flags & 0x60 != 0 {
            return Err(Sense::parameter_field(0, Some(6)));
        }
        if flags & 0x1F == 0 {
            return Err(Sense::parameter_field(0, Some(4)));
        }
        if len == 0 || u32::from(len) > media.block_size {
            return Err(Sense::parameter_field(2, None));
        }
        let start = HEADER_LEN as usize;
        let pattern = list.get(start..start + usize::from(len)).ok_or(Sense::PARAMETER_LIST_LENGTH)?;
        Ok(Overwrite { pattern: pattern.to_vec(), inverts: flags & 0x80 != 0, passes: flags & 0x1F })
    }

    /// Fills memory with whole blocks of the pattern.
    fn fill(&self, memory: &mut [u8], block_size: usize, pass: u8) {
        let complement = if self.inverts && pass % 2 == 1 { 0xFF } else { 0 };
        for block in memory.chunks_mut(block_size) {
            let pattern = self.pattern.iter().cycle();
            block.iter_mut().zip(pattern).for_each(|(to, from)| *to = from ^ complement);
        }
    }
}

/// Method of sanitizing the medium.
#[derive(Debug)]
pub(super) enum Method {
    Overwrite(Overwrite),
    /// BLOCK ERASE: writes zeroes, and deallocates.
    Erase,
}

/// Operation of a pass.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Pass {
    Write,
    WriteZeroes,
    Discard,
}

/// A sanitize operation in progress.
pub(super) struct Run {
    nexus: Arc<Nexus>,
    operation: Operation,
    method: Method,
    media: Media,
    /// Whether the command's outcome is due before the operation ends (IMMED).
    is_immediate: bool,
    wanted: u64,
    changed: fn(&Nexus),
    passes: Vec<Pass>,
    /// Index of the current pass.
    pass: usize,
    /// Whether the memory has the pattern of this pass.
    is_filled: bool,
    /// Offset of the next request in this pass.
    next: u64,
    /// Bytes done in all passes.
    done: u64,
    lens: [Option<u32>; SLOTS],
    /// Whether the flush at the end of a pass is in flight, or done.
    is_flushed: bool,
    has_failed: bool,
}

impl Run {
    pub(super) fn new(
        nexus: Arc<Nexus>,
        operation: Operation,
        method: Method,
        media: Media,
        is_immediate: bool,
        wanted: u64,
        changed: fn(&Nexus),
    ) -> Run {
        let passes = match &method {
            Method::Overwrite(overwrite) => vec![Pass::Write; overwrite.passes.into()],
            Method::Erase => {
                // Write zeroes first: discarding alone need not destroy the data.
                let can_zero = media.can.contains(Can::WRITE_ZEROES);
                let mut passes = vec![if can_zero { Pass::WriteZeroes } else { Pass::Write }];
                passes.extend(media.can.contains(Can::UNMAP | Can::UNMAP_ZEROES).then_some(Pass::Discard));
                passes
            }
        };
        Run {
            nexus,
            operation,
            method,
            media,
            is_immediate,
            wanted,
            changed,
            passes,
            pass: 0,
            is_filled: false,
            next: 0,
            done: 0,
            lens: [None; SLOTS],
            is_flushed: false,
            has_failed: false,
        }
    }

    fn complete(&mut self, completed: Completed) {
        let Some(len) = self.lens.get_mut(usize::from(completed.slot)).and_then(Option::take) else { return };
        if completed.status != Status::Ok {
            self.has_failed = true;
            return;
        }
        self.done += u64::from(len);
        let total = self.media.bytes().saturating_mul(self.passes.len() as u64);
        self.operation.report(self.done, total);
    }

    /// Returns the next request of a pass, for a free slot.
    fn request(&mut self, slot: usize, pass: Pass) -> ProgramIo {
        let rest = self.media.bytes() - self.next;
        let len = u32::try_from(rest).map_or(CHUNK_LEN, |rest| rest.min(CHUNK_LEN));
        let (op, buffer) = match pass {
            Pass::Write => (Op::Write, Buffer::Scratch(0..len)),
            Pass::WriteZeroes => (Op::WriteZeroes, Buffer::None),
            Pass::Discard => (Op::Discard, Buffer::None),
        };
        let offset = self.next;
        self.next += u64::from(len);
        self.lens[slot] = Some(len);
        ProgramIo {
            slot: slot as u8,
            unit: Target::Own,
            op,
            offset,
            len: len.into(),
            flags: Flags::empty(),
            buffer,
        }
    }

    fn flush(&mut self) -> ProgramIo {
        self.is_flushed = true;
        self.lens[0] = Some(0);
        ProgramIo {
            slot: 0,
            unit: Target::Own,
            op: Op::Flush,
            offset: 0,
            len: 0,
            flags: Flags::empty(),
            buffer: Buffer::None,
        }
    }

    fn fill(&mut self, memory: &mut ProgramMemory<'_>) {
        if std::mem::replace(&mut self.is_filled, true) {
            return;
        }
        match &self.method {
            Method::Overwrite(overwrite) => {
                overwrite.fill(memory.scratch, self.media.block_size as usize, self.pass as u8);
            }
            Method::Erase => memory.scratch.fill(0),
        }
    }

    fn end(&mut self) -> Step {
        if self.has_failed {
            // When the program is dropped, the operation fails.
            let sense = SANITIZE_FAILED;
            return Step::Finished(Outcome::check(sense));
        }
        self.operation.end();
        (self.changed)(&self.nexus);
        Step::Finished(Outcome::good(self.wanted))
    }
}

impl Steps for Run {
    fn needs(&self) -> Needs {
        let scratch = if self.passes.contains(&Pass::Write) { CHUNK_LEN } else { 0 };
        Needs { scratch, exclusive: Some(0..self.media.bytes()), ..Needs::default() }
    }

    fn survives_abort(&self) -> bool {
        true
    }

    fn step(&mut self, completed: Option<Completed>, memory: &mut ProgramMemory<'_>) -> Step {
        if std::mem::take(&mut self.is_immediate) {
            return Step::Respond(Outcome::good(self.wanted));
        }
        if let Some(completed) = completed {
            self.complete(completed);
        }
        loop {
            let is_idle = self.lens.iter().all(Option::is_none);
            let pass = self.passes.get(self.pass).copied().filter(|_| !self.has_failed);
            let Some(pass) = pass else {
                return if is_idle { self.end() } else { Step::Wait };
            };
            if self.next < self.media.bytes() {
                let Some(slot) = self.lens.iter().position(Option::is_none) else { return Step::Wait };
                if pass == Pass::Write {
                    self.fill(memory);
                }
                return Step::Submit(self.request(slot, pass));
            }
            if !is_idle {
                return Step::Wait;
            }
            if !self.is_flushed {
                return Step::Submit(self.flush());
            }
            // The next pass must overwrite data that is on stable storage.
            (self.pass, self.next, self.is_filled, self.is_flushed) = (self.pass + 1, 0, false, false);
        }
    }
}
