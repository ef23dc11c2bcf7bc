//! Keeping a raw disk raw: no client may turn a file into an image of another format by what it writes to it.
//!
//! Who opens the file later without a format, QEMU for example, would take it for that image, and read the files of the
//! host that its header names. So as in QEMU's `raw` driver, a write to the first [`HEAD_LEN`] bytes of a file that is raw
//! because nobody said otherwise is refused with `EPERM` if the file would begin as an image then.
//!
//! Requests that touch these bytes are done one at a time over all queues, so that several together cannot write what one
//! may not. The rest of the bytes is read first if the request does not cover them. Memory that only the kernel reaches is
//! copied through a file in memory, and written from the copy: what a client changes in it after the check does no harm.
//! Other requests pay one comparison.

use super::container::{HEAD_LEN, container};
use super::node::{FileNode, Phase};
use crate::pieces::each_piece;
use block::{Cookie, Data, Flags, Op, Request, Segment, Status};
use queue::{Cx, FileOp, Ring, Verdict};

/// What the ring is doing for a request that touches the head.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Step {
    /// Another such request goes first.
    Wait,
    /// The bytes that are there are read.
    Read,
    /// The request's bytes are copied into the file in memory …
    CopyOut,
    /// … and from there into memory that we reach.
    CopyIn,
    /// The copy is written to the file.
    Write,
}

/// How long a request waits for another that touches the head before it tries again: twice as long each time.
const WAIT_NS_MIN: u64 = 50_000;
const WAIT_NS_MAX: u64 = 10_000_000;

impl FileNode {
    /// A request that writes to the head: check what the file would begin with.
    #[cold]
    pub(super) fn protect<R: Ring>(&mut self, io: Cookie, req: &Request, cx: &mut Cx<'_, R>) -> Verdict {
        if req.flags.has(Flags::NOWAIT) {
            return Verdict::Up(Status::Again);
        }
        if !self.shared.claim_head(self.key(io)) {
            let slot = self.slot(io);
            let wait_ns = slot.look_ns.max(WAIT_NS_MIN);
            (slot.phase, slot.look_ns) = (Phase::Head(Step::Wait), (2 * wait_ns).min(WAIT_NS_MAX));
            cx.timer(io, cx.now().after(wait_ns));
            return Verdict::Held;
        }
        let slot = self.slot(io);
        (slot.claimed_head, slot.look_ns) = (true, 0);
        let facts = self.shared.facts;
        if facts.start.0 == 0 && req.offset.0 == 0 && req.len.0 >= HEAD_LEN as u64 {
            return self.head_read(io, req, [0; HEAD_LEN], cx);
        }
        let len = self.head_block();
        let Some(memory) = cx.ring.allocate(len) else { return Verdict::Blocked };
        self.slot(io).bounce = memory;
        let op = FileOp::Read { offset: 0 };
        self.start(io, Phase::Head(Step::Read), op, Data::One(memory), len.into(), cx)
    }

    /// Bytes that are read or written at once where the file begins: direct I/O wants whole blocks.
    fn head_block(&self) -> u32 {
        let facts = &self.shared.facts;
        facts.direct.map_or(0, |alignment| alignment.offset).max(facts.block).max(HEAD_LEN as u32)
    }

    /// The ring has done a step.
    pub(super) fn head_moved<R: Ring>(
        &mut self,
        io: Cookie,
        req: &Request,
        step: Step,
        result: i64,
        cx: &mut Cx<'_, R>,
    ) -> Verdict {
        match (step, result) {
            (Step::Wait, 0..) => self.protect(io, req, cx),
            (Step::Write, ..0) => self.not_moved(io, req, result, cx),
            (_, ..0) => self.failed(req, result),
            (Step::Read, count) => {
                // What is not there reads as zeroes.
                let mut head = [0; HEAD_LEN];
                let count = (count as usize).min(HEAD_LEN);
                let memory = self.slot(io).bounce;
                head[..count].copy_from_slice(&cx.ring.bytes(memory)[..count]);
                self.head_read(io, req, head, cx)
            }
            (Step::CopyOut, count) if count as u64 == u64::from(self.slot(io).bounce.len) => {
                let memory = self.slot(io).bounce;
                self.scratch_op(io, Step::CopyIn, FileOp::Read { offset: 0 }, memory, cx)
            }
            (Step::CopyIn, count) if count as u64 == u64::from(self.slot(io).bounce.len) => {
                let memory = self.slot(io).bounce;
                let mut head = [0; HEAD_LEN];
                head.copy_from_slice(&self.head);
                let (at, len) = self.overlap_of_head(req);
                head[at..at + len].copy_from_slice(&cx.ring.bytes(memory)[..len]);
                if !self.stays_raw(&head) {
                    return Verdict::Up(Status::NotPermitted);
                }
                self.write_copy(io, req, cx)
            }
            (Step::CopyOut | Step::CopyIn, _) => Verdict::Up(Status::IoError),
            (Step::Write, count) => {
                self.slot(io).done += count as u64;
                match count {
                    0 => Verdict::Up(Status::IoError),
                    _ if self.slot(io).done < u64::from(self.slot(io).bounce.len) => {
                        self.write_copy(io, req, cx)
                    }
                    _ => {
                        self.free_bounce(io, cx);
                        self.transfer(io, req, cx)
                    }
                }
            }
        }
    }

    /// The head is known as far as the request leaves it: put the request's bytes into it, and check it.
    fn head_read<R: Ring>(
        &mut self,
        io: Cookie,
        req: &Request,
        mut head: [u8; HEAD_LEN],
        cx: &mut Cx<'_, R>,
    ) -> Verdict {
        self.free_bounce(io, cx);
        let (at, len) = self.overlap_of_head(req);
        match req.data {
            _ if req.op != Op::Write => head[at..at + len].fill(0),
            Data::One(data) if cx.ring.is_opaque(data) => return self.copy_opaque(io, req, data, head, cx),
            data => each_piece(cx, data, len as u64, |ring, piece, done| {
                let into = at + done as usize;
                head[into..into + piece.len as usize].copy_from_slice(ring.bytes(piece));
            }),
        }
        if !self.stays_raw(&head) {
            return Verdict::Up(Status::NotPermitted);
        }
        match req.op {
            Op::Write => self.transfer(io, req, cx),
            _ => self.clear(io, req, cx),
        }
    }

    /// Where the request's bytes lie in the file's head, and how many of them.
    fn overlap_of_head(&self, req: &Request) -> (usize, usize) {
        let at = (self.shared.facts.start.0 + req.offset.0) as usize;
        (at, (HEAD_LEN - at).min(req.len.0 as usize))
    }

    fn stays_raw(&self, head: &[u8; HEAD_LEN]) -> bool {
        let format = container(head);
        if let Some(format) = format {
            self.shared.refuse_head(format);
        }
        format.is_none()
    }

    /// Copy the request's first block out of memory that only the kernel reaches.
    fn copy_opaque<R: Ring>(
        &mut self,
        io: Cookie,
        req: &Request,
        data: Segment,
        head: [u8; HEAD_LEN],
        cx: &mut Cx<'_, R>,
    ) -> Verdict {
        let len = self.head_block().min(req.len.0 as u32);
        let Some(memory) = cx.ring.allocate(len) else { return Verdict::Blocked };
        self.slot(io).bounce = memory;
        self.head.copy_from_slice(&head);
        self.scratch_op(
            io,
            Step::CopyOut,
            FileOp::Write { offset: 0, durable: false },
            data.slice(0, len),
            cx,
        )
    }

    fn scratch_op<R: Ring>(
        &mut self,
        io: Cookie,
        step: Step,
        op: FileOp,
        memory: Segment,
        cx: &mut Cx<'_, R>,
    ) -> Verdict {
        // Without that file what is in such memory cannot be checked.
        let Some(scratch) = self.scratch_file else { return Verdict::Up(Status::NotPermitted) };
        self.slot(io).phase = Phase::Head(step);
        match cx.start(io, scratch, op, Data::One(memory), memory.len.into()) {
            Ok(()) => Verdict::Held,
            Err(queue::RingFull) => Verdict::Blocked,
        }
    }

    /// Write what is left of the copy.
    fn write_copy<R: Ring>(&mut self, io: Cookie, req: &Request, cx: &mut Cx<'_, R>) -> Verdict {
        let done = self.slot(io).done;
        let memory = self.slot(io).bounce;
        let left = memory.slice(done as u32, memory.len - done as u32);
        let offset = self.shared.facts.start.0 + req.offset.0 + done;
        let op = FileOp::Write { offset, durable: self.is_durable(req) };
        self.start(io, Phase::Head(Step::Write), op, Data::One(left), left.len.into(), cx)
    }

    fn free_bounce<R: Ring>(&mut self, io: Cookie, cx: &mut Cx<'_, R>) {
        let memory = std::mem::replace(&mut self.slot(io).bounce, Segment::EMPTY);
        if memory.len > 0 {
            cx.ring.free(memory);
        }
    }
}
