//! Requests that change what the device holds: writes, write zeroes, discards.

use super::journal::NoRoom;
use super::log::{After, BACK_LEN, STEP_LEN, records};
use super::{Cow, Phase, Slot};
use block::{Bytes, Cookie, Data, Flags, Op, Request, Segment, Status};
use queue::{Cx, Ring, Verdict};

/// Child requests that completing a chunk takes at once: before, within and behind what was written.
const COPY_PIECES: usize = 3;

impl Cow {
    pub(super) fn change<R: Ring>(&mut self, io: Cookie, req: &mut Request, cx: &mut Cx<'_, R>) -> Verdict {
        let chunks = self.chunks(req.offset.0, req.end().0);
        let all_live = self.index.run(chunks.clone()) == (true, chunks.end);
        // What goes to chunks that are not stored yet has to be recorded.
        if all_live && self.index.is_stored(chunks) {
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
                    true => self.flush(io, req, cx),
                    false => self.finish(io, req, cx),
                };
            }
            if cx.spare_children() < COPY_PIECES {
                return self.wait(io, Phase::Wait, cx);
            }
            let chunk = at / self.chunk;
            let (live, run_end) = self.index.run(self.chunks(at, end));
            let run_end = (run_end * self.chunk).min(end);
            let moved_on = if live {
                return self.write_over(io, req, run_end, cx);
            } else if self.covers(req, chunk) {
                self.bring_in(io, req, run_end, cx)
            } else if req.op == Op::Discard {
                // What the origin holds there stays: a discard is a hint.
                self.slot(io).at = end.min((chunk + 1) * self.chunk);
                continue;
            } else {
                self.complete(io, req, chunk, cx)
            };
            match moved_on {
                Some(verdict) => return verdict,
                None if self.index.is_live(chunk) => {}
                None => return self.wait(io, Phase::Wait, cx),
            }
        }
    }

    /// Write to chunks that are live, up to `to` at most. What is not stored is recorded first.
    fn write_over<R: Ring>(&mut self, io: Cookie, req: &Request, to: u64, cx: &mut Cx<'_, R>) -> Verdict {
        let at = self.slot(io).at;
        let (stored, run_end) = self.index.stored_run(self.chunks(at, to));
        let to = to.min(run_end * self.chunk);
        if stored {
            return self.start_step(io, req, to, 0, cx);
        }
        let to = to.min(at - at % STEP_LEN + STEP_LEN);
        // Whoever brings a chunk in appends its records before it lets go of it.
        if self.index.is_claimed(self.chunks(at, to)) {
            return self.wait(io, Phase::Wait, cx);
        }
        if Cow::is_opaque(req, cx) {
            return self.store_first(io, req, cx);
        }
        if let Err(why) = self.index.journal.admit(records(at, to)) {
            return self.make_room(io, req, why, cx);
        }
        self.record(io, req, (at, to), (at, to), Segment::EMPTY, cx);
        self.slot(io).end = to;
        self.write_records(io, req, After::Overwrite, cx)
    }

    /// Bring chunks in of which the request covers all, up to `run_end` at most. `None`: another request has the first.
    fn bring_in<R: Ring>(
        &mut self,
        io: Cookie,
        req: &Request,
        run_end: u64,
        cx: &mut Cx<'_, R>,
    ) -> Option<Verdict> {
        let (at, end) = (self.slot(io).at, req.end().0);
        let chunk = at / self.chunk;
        let opaque = Cow::is_opaque(req, cx);
        let step = if opaque { BACK_LEN } else { STEP_LEN };
        // All chunks of the run but the last are whole; that one may not be.
        let last = run_end.div_ceil(self.chunk);
        let last = if self.covers(req, last - 1) { last } else { last - 1 };
        let last = last.min(chunk + (step / self.chunk).max(1));
        let claimed = match self.claim(io, chunk..last) {
            Ok(0) => return None,
            Ok(claimed) => claimed,
            Err(why) => return Some(self.make_room(io, req, why, cx)),
        };
        let to = ((chunk + claimed) * self.chunk).min(end);
        if opaque {
            let Some(buffer) = cx.ring.allocate((to - at) as u32) else {
                self.let_go(io, chunk..chunk + claimed);
                return Some(self.wait(io, Phase::Wait, cx));
            };
            self.slot(io).buffer = buffer;
        }
        Some(self.start_step(io, req, to, claimed, cx))
    }

    /// Bring a chunk in of which the request covers a part. `None`: another request has it.
    fn complete<R: Ring>(
        &mut self,
        io: Cookie,
        req: &Request,
        chunk: u64,
        cx: &mut Cx<'_, R>,
    ) -> Option<Verdict> {
        match self.claim(io, chunk..chunk + 1) {
            Ok(0) => None,
            Ok(_) => Some(self.start_copy(io, req, chunk, cx)),
            Err(why) => Some(self.make_room(io, req, why, cx)),
        }
    }

    /// Claims the first of these chunks and those behind it that no other request has, with room in the journal for their
    /// records. Returns how many.
    fn claim(&mut self, io: Cookie, chunks: std::ops::Range<u64>) -> Result<u64, NoRoom> {
        let records_to = |last: u64| records(chunks.start * self.chunk, (last * self.chunk).min(self.size));
        let wanted = records_to(chunks.end);
        self.index.journal.admit(wanted)?;
        let claimed = self.index.claim(chunks.clone());
        let admitted = if claimed > 0 { records_to(chunks.start + claimed) } else { 0 };
        self.index.journal.give_back(wanted - admitted);
        self.slot(io).admitted = admitted;
        Ok(claimed)
    }

    /// Let go of chunks that do not come in, and of the room for their records.
    fn let_go(&mut self, io: Cookie, chunks: std::ops::Range<u64>) {
        let admitted = std::mem::take(&mut self.slot(io).admitted);
        self.index.journal.give_back(admitted);
        self.index.disclaim(chunks);
    }

    /// Hand the part up to `to` to the store, `claimed` chunks of which become live by that.
    pub(super) fn start_step<R: Ring>(
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
        let Slot { at, end, status, buffer, .. } = *self.slot(io);
        let first = at / self.chunk;
        if claimed == 0 || !status.is_ok() {
            self.free(io, cx);
            if claimed > 0 {
                self.let_go(io, first..first + claimed);
            }
            return self.step_ended(io, req, cx);
        }
        if Cow::is_opaque(req, cx) {
            if cx.spare_children() == 0 {
                // Another request took it meanwhile. All of it is done again then.
                self.free(io, cx);
                self.let_go(io, first..first + claimed);
                return self.wait(io, Phase::Wait, cx);
            }
            self.slot(io).phase = Phase::ReadBack { claimed };
            let start = Bytes(first * self.chunk);
            let mut read = Request::new(Op::Read, start + self.data_at, Bytes(buffer.len.into()));
            read.data = Data::One(buffer);
            self.spawn(io, self.store, read, cx);
            return Verdict::Held;
        }
        self.came_in(io, req, claimed, (at, end), cx)
    }

    /// What was brought in has been read back.
    pub(super) fn read_back<R: Ring>(
        &mut self,
        io: Cookie,
        req: &Request,
        claimed: u64,
        cx: &mut Cx<'_, R>,
    ) -> Verdict {
        let Slot { at, status, .. } = *self.slot(io);
        let first = at / self.chunk;
        if !status.is_ok() {
            self.free(io, cx);
            self.let_go(io, first..first + claimed);
            return self.step_ended(io, req, cx);
        }
        // The buffer has all of it.
        let end = ((first + claimed) * self.chunk).min(self.size);
        self.came_in(io, req, claimed, (end, end), cx)
    }

    /// The store has the chunks that were claimed: they are live from now on. `body`: what of them the request has, rather
    /// than the buffer.
    fn came_in<R: Ring>(
        &mut self,
        io: Cookie,
        req: &Request,
        claimed: u64,
        body: (u64, u64),
        cx: &mut Cx<'_, R>,
    ) -> Verdict {
        let Slot { at, buffer, .. } = *self.slot(io);
        let chunks = at / self.chunk..at / self.chunk + claimed;
        let (from, to) = (chunks.start * self.chunk, (chunks.end * self.chunk).min(self.size));
        debug_assert_eq!(self.slot(io).admitted, records(from, to));
        // In this order: a sync that has seen the records has seen that the chunks are live.
        self.index.set_live(chunks.clone());
        self.record(io, req, (from, to), body, buffer, cx);
        self.slot(io).admitted = 0;
        self.index.disclaim(chunks);
        self.free(io, cx);
        self.step_ended(io, req, cx)
    }

    fn step_ended<R: Ring>(&mut self, io: Cookie, req: &Request, cx: &mut Cx<'_, R>) -> Verdict {
        let slot = self.slot(io);
        if !slot.status.is_ok() {
            return Verdict::Up(slot.status);
        }
        slot.at = slot.end;
        self.step(io, req, cx)
    }

    /// Read a claimed chunk, of which the request covers a part: what the origin has of it, then zeroes.
    fn start_copy<R: Ring>(&mut self, io: Cookie, req: &Request, chunk: u64, cx: &mut Cx<'_, R>) -> Verdict {
        let start = chunk * self.chunk;
        let len = self.chunk.min(self.size - start);
        let Some(buffer) = cx.ring.allocate(len as u32) else {
            self.let_go(io, chunk..chunk + 1);
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
            return self.step_done(io, req, 1, cx);
        }
        if cx.spare_children() < COPY_PIECES {
            // Another request took them meanwhile. The chunk is read again then.
            let chunk = self.slot(io).at / self.chunk;
            self.free(io, cx);
            self.let_go(io, chunk..chunk + 1);
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
}
