//! Discard and write zeroes: done by `fallocate`, or by writing zeroes if the file system refuses.
//!
//! A refusal is remembered for all queues. Discard is then no longer supported, as in the kernel's loop
//! driver (LOOP-10). Write zeroes continues by writing, unless FAST_ZERO was requested.

use super::node::{FileNode, Phase, ZEROES_LEN};
use block::{Cookie, Data, Flags, Op, Request, Status};
use queue::{Blocking, Cx, FileOp, Ring, Verdict};
use std::sync::atomic::Ordering::{Relaxed, Release};

const PUNCH: i32 = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
const ZERO: i32 = libc::FALLOC_FL_ZERO_RANGE | libc::FALLOC_FL_KEEP_SIZE;

impl FileNode {
    /// Starts a discard or write zeroes, or continues after `fallocate` was refused.
    pub(super) fn clear<R: Ring>(&mut self, io: Cookie, req: &Request, cx: &mut Cx<'_, R>) -> Verdict {
        let facts = self.shared.facts;
        let aligned = ((facts.start.0 + req.offset.0) | req.len.0).is_multiple_of(facts.block.into());
        if facts.block_device && !aligned && req.op == Op::Discard {
            // Less than a block cannot be deallocated, and need not be.
            return Verdict::Up(Status::Ok);
        }
        let Some(mode) = self.mode(req).filter(|_| aligned || !facts.block_device) else {
            return self.without_allocate(io, req, cx);
        };
        let op = FileOp::Allocate { mode, offset: facts.start.0 + req.offset.0, len: req.len.0 };
        if facts.memory {
            if let Some(result) = cx.try_now(self.file, op, Data::NONE, 0, Blocking::Allowed) {
                return self.cleared(io, req, mode, result, cx);
            }
        } else if req.flags.contains(Flags::NOWAIT) {
            return Verdict::Up(Status::Again);
        }
        self.start(io, Phase::Allocate(mode), op, Data::NONE, 0, cx)
    }

    /// Returns the mode of `fallocate`, or `None` if it was refused before or is not sufficient.
    fn mode(&self, req: &Request) -> Option<i32> {
        let punch = (!self.shared.no_punch.load(Relaxed)).then_some(PUNCH);
        // A block device may zero a range by writing, which is not fast.
        let slow = self.shared.facts.block_device && req.flags.contains(Flags::FAST_ZERO);
        let zero = (!slow && !self.shared.no_zero_range.load(Relaxed)).then_some(ZERO);
        match req.op {
            Op::Discard => punch,
            _ if req.flags.contains(Flags::NO_UNMAP) => zero,
            _ => punch.or(zero),
        }
    }

    /// Processes the end of `fallocate` with this mode. The mode is passed because another request may have
    /// been refused in the meantime, after which `mode` returns a different one.
    pub(super) fn cleared<R: Ring>(
        &mut self,
        io: Cookie,
        req: &Request,
        mode: i32,
        result: i64,
        cx: &mut Cx<'_, R>,
    ) -> Verdict {
        match i32::try_from(-result).unwrap_or(libc::EIO) {
            0 => {
                self.shared.cleared.fetch_add(1, Release);
                self.make_durable(io, req, cx)
            }
            libc::EOPNOTSUPP | libc::ENOSYS => {
                match mode {
                    PUNCH => self.shared.no_punch.store(true, Relaxed),
                    _ => self.shared.no_zero_range.store(true, Relaxed),
                }
                self.clear(io, req, cx)
            }
            _ => self.failed(req, result),
        }
    }

    /// Writes zeroes, if the request allows that.
    fn without_allocate<R: Ring>(&mut self, io: Cookie, req: &Request, cx: &mut Cx<'_, R>) -> Verdict {
        if req.op == Op::Discard || req.flags.contains(Flags::FAST_ZERO) {
            return Verdict::Up(Status::NotSupported);
        }
        if !self.slot(io).is_zeroing() {
            let Some(zeroes) = cx.ring.allocate(ZEROES_LEN) else { return Verdict::Blocked };
            cx.ring.bytes_mut(zeroes).fill(0);
            self.slot(io).zeroes = zeroes;
        }
        self.transfer(io, req, cx)
    }
}
