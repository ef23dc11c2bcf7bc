//! Direct I/O for unaligned requests, through a window of whole blocks in aligned memory.
//!
//! A request is processed in windows of at most 1 MiB. For a read, the window is read and the requested
//! bytes are copied from it. A write that covers its window copies its data in and writes it. A write that
//! covers part of a block claims its range exclusively ([`RangeLock`](queue::RangeLock)), reads the window,
//! copies its data in, and writes it back.

use super::facts::Alignment;
use super::node::{FileNode, Phase};
use crate::segments::each_segment;
use block::{Bytes, Cookie, Data, Flags, Op, Request, Segment, Status};
use queue::{Cx, FileOp, Ring, Verdict};

/// Maximum number of bytes of a request per window.
const WINDOW: u64 = 1 << 20;
/// Bytes copied at a time between two segments of the ring's memory.
const CHUNK: usize = 4096;

impl FileNode {
    /// Starts the next window of a request.
    pub(super) fn start_window<R: Ring>(
        &mut self,
        io: Cookie,
        req: &Request,
        alignment: Alignment,
        cx: &mut Cx<'_, R>,
    ) -> Verdict {
        if req.flags.contains(Flags::NOWAIT) {
            return Verdict::Up(Status::Again);
        }
        let block = u64::from(alignment.offset);
        let start = req.offset.0 + self.slot(io).done;
        let end = req.end().0.min(start + WINDOW);
        let end = if end == req.end().0 { end } else { Bytes(end).align_down(block).0 };
        let window = (Bytes(start).align_down(block).0, end.next_multiple_of(block));
        let partial = window != (start, end);
        if req.op != Op::Read && partial && !self.claim(io, req) {
            return Verdict::Blocked;
        }
        if self.slot(io).bounce.len == 0 {
            let Some(memory) = cx.ring.allocate((WINDOW + 2 * block) as u32) else {
                return Verdict::Blocked;
            };
            self.slot(io).bounce = memory;
        }
        let slot = self.slot(io);
        slot.window = window;
        slot.window_done = 0;
        if req.op == Op::Read || partial {
            return self.window_step(io, req, Phase::WindowRead, cx);
        }
        self.copy_in(io, req, cx);
        self.window_step(io, req, Phase::WindowWrite, cx)
    }

    /// Starts to read or write the rest of the window.
    fn window_step<R: Ring>(
        &mut self,
        io: Cookie,
        req: &Request,
        phase: Phase,
        cx: &mut Cx<'_, R>,
    ) -> Verdict {
        let facts = self.shared.facts;
        let slot = self.slot(io);
        let left = slot.window.1 - slot.window.0 - slot.window_done;
        let memory = slot.bounce.slice(slot.window_done as u32, left as u32);
        let offset = facts.start.0 + slot.window.0 + slot.window_done;
        let durable = req.flags.contains(Flags::FUA) && !slot.is_zeroing();
        let op = match phase {
            Phase::WindowRead => FileOp::Read { offset },
            _ => FileOp::Write { offset, durable },
        };
        self.start(io, phase, op, Data::One(memory), left, cx)
    }

    /// Processes the end of a read or write of the window.
    pub(super) fn window_moved<R: Ring>(
        &mut self,
        io: Cookie,
        req: &Request,
        result: i64,
        cx: &mut Cx<'_, R>,
    ) -> Verdict {
        if result < 0 {
            return self.not_moved(io, req, result, cx);
        }
        let block = self.shared.facts.direct.map_or(1, |alignment| u64::from(alignment.offset));
        let slot = self.slot(io);
        slot.window_done += result as u64;
        let phase = slot.phase;
        let len = slot.window.1 - slot.window.0;
        let at_end = slot.window_done < len && (result == 0 || !slot.window_done.is_multiple_of(block));
        if slot.window_done < len && !at_end {
            return self.window_step(io, req, phase, cx);
        }
        match phase {
            Phase::WindowRead if req.op == Op::Read => {
                self.copy_out(io, req, cx);
                let done = self.slot(io).done;
                if at_end && done < req.len.0 {
                    return self.ended_early(req, done, cx);
                }
                self.transfer(io, req, cx)
            }
            Phase::WindowRead => {
                // Nothing exists beyond the end of a truncated file, so there is nothing to preserve.
                let missing = slot.bounce.slice(slot.window_done as u32, (len - slot.window_done) as u32);
                slot.window_done = 0;
                cx.ring.bytes_mut(missing).fill(0);
                self.copy_in(io, req, cx);
                self.window_step(io, req, Phase::WindowWrite, cx)
            }
            _ if at_end => Verdict::Up(Status::IoError),
            _ => {
                let slot = self.slot(io);
                slot.done = (slot.window.1 - req.offset.0).min(req.len.0);
                self.transfer(io, req, cx)
            }
        }
    }

    /// Returns the position of the request's next bytes in the window, and their count.
    fn overlap(&mut self, io: Cookie, req: &Request) -> (u64, u64) {
        let slot = self.slot(io);
        let start = req.offset.0 + slot.done;
        (start - slot.window.0, slot.window.1.min(req.end().0) - start)
    }

    /// Copies the request's bytes to the window.
    fn copy_in<R: Ring>(&mut self, io: Cookie, req: &Request, cx: &mut Cx<'_, R>) {
        let (skip, len) = self.overlap(io, req);
        let slot = self.slot(io);
        let into = slot.bounce.slice(skip as u32, len as u32);
        if slot.is_zeroing() {
            return cx.ring.bytes_mut(into).fill(0);
        }
        let data = cx.advance(req.data, slot.done);
        each_segment(cx, data, len, |ring, segment, done| {
            copy(ring, segment, into.slice(done as u32, segment.len));
        });
    }

    /// Copies the requested bytes from the window to the request's memory, and counts them as done.
    fn copy_out<R: Ring>(&mut self, io: Cookie, req: &Request, cx: &mut Cx<'_, R>) {
        let (skip, len) = self.overlap(io, req);
        let slot = self.slot(io);
        let len = len.min(slot.window_done.saturating_sub(skip));
        let data = cx.advance(req.data, slot.done);
        slot.done += len;
        if len == 0 {
            return;
        }
        let from = slot.bounce.slice(skip as u32, len as u32);
        each_segment(cx, data, len, |ring, segment, done| {
            copy(ring, from.slice(done as u32, segment.len), segment);
        });
    }
}

/// Copies between two segments of the ring's memory, of which only one can be borrowed at a time.
fn copy<R: Ring>(ring: &mut R, from: Segment, into: Segment) {
    let mut chunk = [0; CHUNK];
    let mut done = 0;
    while done < from.len {
        let len = (from.len - done).min(CHUNK as u32);
        let chunk = &mut chunk[..len as usize];
        chunk.copy_from_slice(ring.bytes(from.slice(done, len)));
        ring.bytes_mut(into.slice(done, len)).copy_from_slice(chunk);
        done += len;
    }
}
