//! Requests that change what the device holds: writes, write zeroes, discards.

use super::{Cow, Phase, Slot};
use block::{Bytes, Cookie, Data, Flags, Op, Request, Status};
use queue::{Cx, Ring, Verdict};

/// Child requests that completing a chunk takes at once: before, within and behind what was written.
const COPY_PIECES: usize = 3;

impl Cow {
    pub(super) fn change<R: Ring>(&mut self, io: Cookie, req: &mut Request, cx: &mut Cx<'_, R>) -> Verdict {
        let chunks = self.chunks(req.offset.0, req.end().0);
        let all_live = self.index.run(chunks.clone()) == (true, chunks.end);
        // A chunk that another request has just brought in would be forgotten with this process before that is told.
        let kept = match req.flags.has(Flags::FUA) {
            true => self.index.is_stored(chunks.clone()),
            false => self.index.is_told(chunks.clone()),
        };
        if all_live && kept {
            *self.slot(io) = Slot { phase: Phase::Whole(true), len: req.len, ..Slot::NEW };
            req.offset = req.offset + self.data_at;
            return Verdict::Down(self.store);
        }
        if req.flags.has(Flags::NOWAIT) {
            return Verdict::Up(Status::Again);
        }
        if req.flags.has(Flags::FAST_ZERO) && self.needs_copies(req) {
            return Verdict::Up(Status::NotSupported);
        }
        *self.slot(io) = Slot { at: req.offset.0, ..Slot::NEW };
        self.step(io, req, cx)
    }

    /// Whether a chunk at one of its ends has to be completed from the origin.
    fn needs_copies(&self, req: &Request) -> bool {
        [req.offset.0, req.end().0 - 1].into_iter().any(|at| {
            let chunk = at / self.chunk;
            !self.index.is_live(chunk) && !self.covers(req, chunk)
        })
    }

    /// Whether a chunk of a request is there and would be forgotten with this process.
    fn is_untold(&self, req: &Request) -> bool {
        let mut chunks = self.chunks(req.offset.0, req.end().0);
        chunks.any(|chunk| self.index.is_live(chunk) && !self.index.is_told(chunk..chunk + 1))
    }

    /// Whether all of a chunk lies within a request.
    fn covers(&self, req: &Request, chunk: u64) -> bool {
        let start = chunk * self.chunk;
        req.offset.0 <= start && req.end().0 >= (start + self.chunk).min(self.size)
    }

    /// Go on with a request from where it stands.
    pub(super) fn step<R: Ring>(&mut self, io: Cookie, req: &Request, cx: &mut Cx<'_, R>) -> Verdict {
        let end = req.end().0;
        loop {
            let at = self.slot(io).at;
            if at >= end {
                return match req.flags.has(Flags::FUA) {
                    true => self.flush(io, cx),
                    // Discards may have passed over chunks that are not there.
                    false if self.slot(io).allocated || self.is_untold(req) => self.tally(io, req, cx),
                    false => Verdict::Up(Status::Ok),
                };
            }
            if cx.spare_children() < COPY_PIECES {
                return self.wait(io, Phase::Wait, cx);
            }
            let chunk = at / self.chunk;
            let (live, run_end) = self.index.run(self.chunks(at, end));
            let run_end = (run_end * self.chunk).min(end);
            if live {
                return self.start_step(io, req, run_end, 0, cx);
            }
            if self.covers(req, chunk) {
                // All chunks of the run but the last are whole; that one may not be.
                let last = run_end.div_ceil(self.chunk);
                let last = if self.covers(req, last - 1) { last } else { last - 1 };
                let claimed = self.index.claim(chunk..last);
                if claimed > 0 {
                    let to = ((chunk + claimed) * self.chunk).min(end);
                    return self.start_step(io, req, to, claimed, cx);
                }
            } else if req.op == Op::Discard {
                // What the origin holds there stays: a discard is a hint.
                self.slot(io).at = end.min((chunk + 1) * self.chunk);
                continue;
            } else if self.index.claim(chunk..chunk + 1) == 1 {
                return self.start_copy(io, req, chunk, cx);
            }
            if !self.index.is_live(chunk) {
                return self.wait(io, Phase::Wait, cx);
            }
        }
    }

    /// Hand the part up to `to` to the store, `claimed` chunks of which become live by that.
    fn start_step<R: Ring>(
        &mut self,
        io: Cookie,
        req: &Request,
        to: u64,
        claimed: u64,
        cx: &mut Cx<'_, R>,
    ) -> Verdict {
        let at = self.slot(io).at;
        let mut part = self.part(req, at, to, cx);
        part.offset = part.offset + self.data_at;
        if claimed > 0 && part.op == Op::Discard {
            // What lies in the store there was never the device's: it must not come to light.
            part.op = Op::WriteZeroes;
        }
        let slot = self.slot(io);
        (slot.phase, slot.end) = (Phase::Step { claimed }, to);
        self.spawn(io, self.store, part, cx);
        Verdict::Held
    }

    pub(super) fn step_done<R: Ring>(
        &mut self,
        io: Cookie,
        req: &Request,
        claimed: u64,
        cx: &mut Cx<'_, R>,
    ) -> Verdict {
        let Slot { at, end, status, .. } = *self.slot(io);
        let first = at / self.chunk;
        if claimed > 0 {
            if status.is_ok() {
                self.index.set_live(first..first + claimed);
                self.slot(io).allocated = true;
            }
            self.index.disclaim(first..first + claimed);
        }
        if !status.is_ok() {
            return Verdict::Up(status);
        }
        self.slot(io).at = end;
        self.step(io, req, cx)
    }

    /// Read a claimed chunk, of which the request covers a part: what the origin has of it, then zeroes.
    fn start_copy<R: Ring>(&mut self, io: Cookie, req: &Request, chunk: u64, cx: &mut Cx<'_, R>) -> Verdict {
        let start = chunk * self.chunk;
        let len = self.chunk.min(self.size - start);
        let Some(buffer) = cx.ring.allocate(len as u32) else {
            self.index.disclaim(chunk..chunk + 1);
            return self.wait(io, Phase::Wait, cx);
        };
        let slot = self.slot(io);
        (slot.buffer, slot.end, slot.phase) = (buffer, req.end().0.min(start + len), Phase::CopyRead);
        let from_origin = len.min(self.origin_size.saturating_sub(start)) as u32;
        cx.ring.bytes_mut(buffer.slice(from_origin, len as u32 - from_origin)).fill(0);
        if from_origin == 0 {
            return self.write_copy(io, req, cx);
        }
        let mut read = Request::new(Op::Read, Bytes(start), Bytes(from_origin.into()));
        read.data = Data::One(buffer.slice(0, from_origin));
        self.spawn(io, self.origin, read, cx);
        Verdict::Held
    }

    pub(super) fn copy_read<R: Ring>(&mut self, io: Cookie, req: &Request, cx: &mut Cx<'_, R>) -> Verdict {
        if !self.slot(io).status.is_ok() {
            return self.copy_written(io, req, cx);
        }
        if cx.spare_children() < COPY_PIECES {
            // Another request took them meanwhile. The chunk is read again then.
            let chunk = self.slot(io).at / self.chunk;
            self.free(io, cx);
            self.index.disclaim(chunk..chunk + 1);
            return self.wait(io, Phase::Wait, cx);
        }
        self.write_copy(io, req, cx)
    }

    /// Write the whole chunk: the request's part, and what was read on both sides of it.
    fn write_copy<R: Ring>(&mut self, io: Cookie, req: &Request, cx: &mut Cx<'_, R>) -> Verdict {
        let Slot { at, end, buffer, .. } = *self.slot(io);
        let start = at - at % self.chunk;
        let chunk_end = start + u64::from(buffer.len);
        self.slot(io).phase = Phase::CopyWrite;
        let mut body = self.part(req, at, end, cx);
        body.offset = body.offset + self.data_at;
        self.spawn(io, self.store, body, cx);
        for (from, to) in [(start, at), (end, chunk_end)] {
            if from < to {
                let len = Bytes(to - from);
                let mut rest = Request::new(Op::Write, Bytes(from) + self.data_at, len);
                rest.data = Data::One(buffer.slice((from - start) as u32, len.0 as u32));
                self.spawn(io, self.store, rest, cx);
            }
        }
        Verdict::Held
    }

    /// The chunk is written, or something went wrong on the way.
    pub(super) fn copy_written<R: Ring>(&mut self, io: Cookie, req: &Request, cx: &mut Cx<'_, R>) -> Verdict {
        self.free(io, cx);
        self.step_done(io, req, 1, cx)
    }
}
