//! Keeps a raw disk raw: no client may turn a file into an image of another format by writing that format's
//! header.
//!
//! A program that later opens the file without a format, QEMU for example, would detect that image, and
//! read the host's files that its header names. So as in QEMU's `raw` driver, a write to the first
//! [`HEAD_LEN`] bytes is refused with `EPERM` if the file would then begin with such a header, unless the
//! user specified `format=raw`.
//!
//! Requests that touch these bytes are serialised over all queues, so that several requests together cannot
//! write a header that a single one may not. If the request does not cover all of these bytes, the others
//! are read first. Data in memory that only the kernel can access is copied through a file in memory, and
//! written from the copy, so a client cannot change it after the check. For all other requests the check
//! costs one comparison.

use super::container::{HEAD_LEN, container};
use super::node::{FileNode, Phase};
use crate::segments::{each_segment, is_opaque};
use block::{Cookie, Data, Flags, Op, Request, Segment, Status};
use queue::{Cx, FileOp, Ring, Verdict};

/// Step of a request that touches the head.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Step {
    /// Waiting for another such request.
    Wait,
    /// Reading the current bytes.
    Read,
    /// Copying the request's data to the file in memory …
    CopyOut,
    /// … and from there to memory that we can access.
    CopyIn,
    /// Writing the copy to the file.
    Write,
}

impl FileNode {
    /// Starts a write to the head, by checking what the file would begin with.
    #[cold]
    pub(super) fn protect<R: Ring>(&mut self, io: Cookie, req: &Request, cx: &mut Cx<'_, R>) -> Verdict {
        if req.flags.contains(Flags::NOWAIT) {
            return Verdict::Up(Status::Again);
        }
        let key = self.key(io);
        if !self.shared.claim_head(key) {
            self.held.listen(&self.shared.waiting, cx);
            if !self.shared.claim_head(key) {
                self.slot(io).phase = Phase::Head(Step::Wait);
                return self.held.hold(io);
            }
        }
        self.slot(io).claimed_head = true;
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

    /// Returns the length of reads and writes at the beginning of the file, because direct I/O requires
    /// whole blocks.
    fn head_block(&self) -> u32 {
        let facts = &self.shared.facts;
        facts.direct.map_or(0, |alignment| alignment.offset).max(facts.block).max(HEAD_LEN as u32)
    }

    /// Processes the end of a step.
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
                // Missing bytes read as zeroes.
                let mut head = [0; HEAD_LEN];
                let count = (count as usize).min(HEAD_LEN);
                let memory = self.slot(io).bounce;
                head[..count].copy_from_slice(&cx.ring.bytes(memory)[..count]);
                self.head_read(io, req, head, cx)
            }
            (Step::CopyOut, count) if count as u64 == u64::from(self.slot(io).bounce.len) => {
                let memory = self.slot(io).bounce;
                let op = FileOp::Read { offset: 0 };
                self.scratch_op(io, Step::CopyIn, op, (Data::One(memory), memory.len), cx)
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

    /// Combines the request's bytes with the rest of the head, and checks the result.
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
            data if is_opaque(cx, data, req.len.0) => return self.copy_opaque(io, req, head, cx),
            data => each_segment(cx, data, len as u64, |ring, segment, done| {
                let into = at + done as usize;
                head[into..into + segment.len as usize].copy_from_slice(ring.bytes(segment));
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

    /// Returns the position of the request's bytes in the head, and their count.
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

    /// Copies the request's first block out of memory that only the kernel can access.
    fn copy_opaque<R: Ring>(
        &mut self,
        io: Cookie,
        req: &Request,
        head: [u8; HEAD_LEN],
        cx: &mut Cx<'_, R>,
    ) -> Verdict {
        let len = self.head_block().min(req.len.0 as u32);
        let Some(memory) = cx.ring.allocate(len) else { return Verdict::Blocked };
        self.slot(io).bounce = memory;
        self.head.copy_from_slice(&head);
        let op = FileOp::Write { offset: 0, durable: false };
        self.scratch_op(io, Step::CopyOut, op, (req.data, len), cx)
    }

    fn scratch_op<R: Ring>(
        &mut self,
        io: Cookie,
        step: Step,
        op: FileOp,
        (data, len): (Data, u32),
        cx: &mut Cx<'_, R>,
    ) -> Verdict {
        // Without the scratch file such memory cannot be checked.
        let Some(scratch) = self.scratch_file else { return Verdict::Up(Status::NotPermitted) };
        self.slot(io).phase = Phase::Head(step);
        match cx.start(io, scratch, op, data, len.into()) {
            Ok(()) => Verdict::Held,
            Err(queue::RingFull) => Verdict::Blocked,
        }
    }

    /// Writes the rest of the copy.
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
