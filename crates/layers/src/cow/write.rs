//! Requests that change data: writes, writes of zeroes, discards.

use super::journal::JournalFull;
use super::log::{After, READ_BACK_LEN, STEP_LEN, records};
use super::{Cow, Phase, State};
use block::{Bytes, Cookie, Data, Flags, Op, Request, Segment, Status};
use queue::{Cx, Ring, Verdict};

/// Child requests that write a partially covered chunk at once: before, within and behind the written range.
const COPY_CHILDREN: usize = 3;

impl Cow {
    pub(super) fn change<R: Ring>(&mut self, io: Cookie, req: &mut Request, cx: &mut Cx<'_, R>) -> Verdict {
        let chunks = self.chunks(req.offset.0, req.end().0);
        let all_live = self.index.run(chunks.clone()) == (true, chunks.end);
        // Writes to chunks that are not stored yet have to be recorded in the journal.
        if all_live && self.index.is_stored(chunks) {
            *self.state(io) = State { phase: Phase::Whole(true), len: req.len, ..State::NEW };
            req.offset = req.offset + self.data_at;
            return Verdict::Down(self.store);
        }
        if req.flags.contains(Flags::NOWAIT) {
            return Verdict::Up(Status::Again);
        }
        if req.flags.contains(Flags::FAST_ZERO) && self.needs_copies(req) {
            return Verdict::Up(Status::NotSupported);
        }
        *self.state(io) = State { at: req.offset.0, ..State::NEW };
        self.step(io, req, cx)
    }

    /// Returns whether the first or last chunk has to be completed from the origin.
    fn needs_copies(&self, req: &Request) -> bool {
        [req.offset.0, req.end().0 - 1].into_iter().any(|at| {
            let chunk = at / self.chunk;
            !self.index.is_live(chunk) && !self.covers(req, chunk)
        })
    }

    /// Returns whether a chunk lies entirely within a request.
    fn covers(&self, req: &Request, chunk: u64) -> bool {
        let start = chunk * self.chunk;
        req.offset.0 <= start && req.end().0 >= (start + self.chunk).min(self.size)
    }

    /// Continues a write at its current offset.
    pub(super) fn step<R: Ring>(&mut self, io: Cookie, req: &Request, cx: &mut Cx<'_, R>) -> Verdict {
        let end = req.end().0;
        loop {
            let at = self.state(io).at;
            if at >= end {
                return match req.flags.contains(Flags::FUA) {
                    true => self.flush(io, req, cx),
                    false => self.end_write(io, req, cx),
                };
            }
            if cx.spare_children() < COPY_CHILDREN {
                return self.wait_for_others(io, Phase::Wait, cx);
            }
            let chunk = at / self.chunk;
            let (live, run_end) = self.index.run(self.chunks(at, end));
            let run_end = (run_end * self.chunk).min(end);
            let outcome = if live {
                return self.overwrite(io, req, run_end, cx);
            } else if self.covers(req, chunk) {
                self.write_new(io, req, run_end, cx)
            } else if req.op == Op::Discard {
                // A discard is a hint: partially covered chunks keep the origin's data.
                self.state(io).at = end.min((chunk + 1) * self.chunk);
                continue;
            } else {
                self.write_partial(io, req, chunk, cx)
            };
            match outcome {
                Some(verdict) => return verdict,
                None if self.index.is_live(chunk) => {}
                None => return self.wait_for_others(io, Phase::Wait, cx),
            }
        }
    }

    /// Overwrites live chunks up to `to` at most. Chunks that are not stored are recorded in the journal
    /// first.
    fn overwrite<R: Ring>(&mut self, io: Cookie, req: &Request, to: u64, cx: &mut Cx<'_, R>) -> Verdict {
        let at = self.state(io).at;
        let (stored, run_end) = self.index.stored_run(self.chunks(at, to));
        let to = to.min(run_end * self.chunk);
        if stored {
            return self.start_step(io, req, to, 0, cx);
        }
        let to = to.min(at - at % STEP_LEN + STEP_LEN);
        // A request that claimed chunks appends their records before it releases them.
        if self.index.is_claimed(self.chunks(at, to)) {
            return self.wait_for_others(io, Phase::Wait, cx);
        }
        if Cow::is_opaque(req, cx) {
            return self.sync_first(io, req, cx);
        }
        if let Err(why) = self.index.journal.admit(records(at, to)) {
            return self.make_space(io, req, why, cx);
        }
        self.record(io, req, (at, to), (at, to), Segment::EMPTY, cx);
        // A request that writes the journal may wait for these records to be filled in.
        self.index.waiting.wake_fenced(self.held.waiter());
        self.state(io).end = to;
        self.write_records(io, req, After::Overwrite, cx)
    }

    /// Writes new chunks that the request covers entirely, up to `run_end` at most. Returns `None` if another
    /// request has claimed the first.
    fn write_new<R: Ring>(
        &mut self,
        io: Cookie,
        req: &Request,
        run_end: u64,
        cx: &mut Cx<'_, R>,
    ) -> Option<Verdict> {
        let (at, end) = (self.state(io).at, req.end().0);
        let chunk = at / self.chunk;
        let opaque = Cow::is_opaque(req, cx);
        let step = if opaque { READ_BACK_LEN } else { STEP_LEN };
        // Every chunk of the run but the last is covered; the last may not be.
        let last = run_end.div_ceil(self.chunk);
        let last = if self.covers(req, last - 1) { last } else { last - 1 };
        let last = last.min(chunk + (step / self.chunk).max(1));
        let claimed = match self.claim(io, chunk..last) {
            Ok(0) => return None,
            Ok(claimed) => claimed,
            Err(why) => return Some(self.make_space(io, req, why, cx)),
        };
        let to = ((chunk + claimed) * self.chunk).min(end);
        if opaque {
            let Some(buffer) = cx.ring.allocate((to - at) as u32) else {
                self.release_claim(io, chunk..chunk + claimed);
                return Some(self.wait_for_memory(io, Phase::Wait, cx));
            };
            self.state(io).buffer = buffer;
        }
        Some(self.start_step(io, req, to, claimed, cx))
    }

    /// Writes a new chunk that the request covers in part. Returns `None` if another request has claimed it.
    fn write_partial<R: Ring>(
        &mut self,
        io: Cookie,
        req: &Request,
        chunk: u64,
        cx: &mut Cx<'_, R>,
    ) -> Option<Verdict> {
        match self.claim(io, chunk..chunk + 1) {
            Ok(0) => None,
            Ok(_) => Some(self.start_copy(io, req, chunk, cx)),
            Err(why) => Some(self.make_space(io, req, why, cx)),
        }
    }

    /// Claims the first of these chunks and those behind it up to one that is claimed already, with space for
    /// their records in the journal. Returns how many were claimed.
    fn claim(&mut self, io: Cookie, chunks: std::ops::Range<u64>) -> Result<u64, JournalFull> {
        let records_to = |last: u64| records(chunks.start * self.chunk, (last * self.chunk).min(self.size));
        let wanted = records_to(chunks.end);
        self.index.journal.admit(wanted)?;
        let claimed = self.index.claim(chunks.clone());
        let admitted = if claimed > 0 { records_to(chunks.start + claimed) } else { 0 };
        if wanted > admitted {
            self.index.journal.give_back(wanted - admitted);
            self.index.waiting.wake_fenced(self.held.waiter());
        }
        self.state(io).admitted = admitted;
        Ok(claimed)
    }

    /// Releases claimed chunks that were not written, and the journal space for their records.
    fn release_claim(&mut self, io: Cookie, chunks: std::ops::Range<u64>) {
        let admitted = std::mem::take(&mut self.state(io).admitted);
        self.index.journal.give_back(admitted);
        self.index.release(chunks);
        self.index.waiting.wake_fenced(self.held.waiter());
    }

    /// Writes the request's data up to `to` to the store; `claimed` chunks become live when that completes.
    pub(super) fn start_step<R: Ring>(
        &mut self,
        io: Cookie,
        req: &Request,
        to: u64,
        claimed: u64,
        cx: &mut Cx<'_, R>,
    ) -> Verdict {
        let at = self.state(io).at;
        let mut part = self.part(req, at, to, cx);
        part.offset = part.offset + self.data_at;
        if claimed > 0 && part.op == Op::Discard {
            // Stale data in the store must not become visible, so a discard of new chunks writes zeroes.
            part.op = Op::WriteZeroes;
        }
        let state = self.state(io);
        (state.phase, state.end) = (Phase::Step { claimed }, to);
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
        let State { at, end, status, buffer, .. } = *self.state(io);
        let first = at / self.chunk;
        if claimed == 0 || !status.is_ok() {
            self.free(io, cx);
            if claimed > 0 {
                self.release_claim(io, first..first + claimed);
            }
            return self.next_step(io, req, cx);
        }
        if Cow::is_opaque(req, cx) {
            if cx.spare_children() == 0 {
                // Another request took the spare child meanwhile. The step starts over.
                self.free(io, cx);
                self.release_claim(io, first..first + claimed);
                return self.wait_for_others(io, Phase::Wait, cx);
            }
            self.state(io).phase = Phase::ReadBack { claimed };
            let start = Bytes(first * self.chunk);
            let mut read = Request::new(Op::Read, start + self.data_at, Bytes(buffer.len.into()));
            read.data = Data::One(buffer);
            self.spawn(io, self.store, read, cx);
            return Verdict::Held;
        }
        self.make_live(io, req, claimed, (at, end), cx)
    }

    /// Handles the read-back of newly written chunks.
    pub(super) fn read_back<R: Ring>(
        &mut self,
        io: Cookie,
        req: &Request,
        claimed: u64,
        cx: &mut Cx<'_, R>,
    ) -> Verdict {
        let State { at, status, .. } = *self.state(io);
        let first = at / self.chunk;
        if !status.is_ok() {
            self.free(io, cx);
            self.release_claim(io, first..first + claimed);
            return self.next_step(io, req, cx);
        }
        // The buffer has the data of all claimed chunks.
        let end = ((first + claimed) * self.chunk).min(self.size);
        self.make_live(io, req, claimed, (end, end), cx)
    }

    /// Makes claimed chunks live after the store has written them. `body` is the range whose data the request
    /// has; the buffer has the rest.
    fn make_live<R: Ring>(
        &mut self,
        io: Cookie,
        req: &Request,
        claimed: u64,
        body: (u64, u64),
        cx: &mut Cx<'_, R>,
    ) -> Verdict {
        let State { at, buffer, .. } = *self.state(io);
        let chunks = at / self.chunk..at / self.chunk + claimed;
        let (from, to) = (chunks.start * self.chunk, (chunks.end * self.chunk).min(self.size));
        debug_assert_eq!(self.state(io).admitted, records(from, to));
        // The chunks become live first, so that a sync that sees the records also sees the live chunks.
        self.index.set_live(chunks.clone());
        self.record(io, req, (from, to), body, buffer, cx);
        self.state(io).admitted = 0;
        self.index.release(chunks);
        self.index.waiting.wake_fenced(self.held.waiter());
        self.free(io, cx);
        self.next_step(io, req, cx)
    }

    fn next_step<R: Ring>(&mut self, io: Cookie, req: &Request, cx: &mut Cx<'_, R>) -> Verdict {
        let state = self.state(io);
        if !state.status.is_ok() {
            return Verdict::Up(state.status);
        }
        state.at = state.end;
        self.step(io, req, cx)
    }

    /// Reads a claimed chunk that the request covers in part from the origin. Past the origin's end the chunk
    /// is zeroes.
    fn start_copy<R: Ring>(&mut self, io: Cookie, req: &Request, chunk: u64, cx: &mut Cx<'_, R>) -> Verdict {
        let start = chunk * self.chunk;
        let len = self.chunk.min(self.size - start);
        let Some(buffer) = cx.ring.allocate(len as u32) else {
            self.release_claim(io, chunk..chunk + 1);
            return self.wait_for_memory(io, Phase::Wait, cx);
        };
        let state = self.state(io);
        (state.buffer, state.end, state.phase) = (buffer, req.end().0.min(start + len), Phase::CopyRead);
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
        if !self.state(io).status.is_ok() {
            return self.step_done(io, req, 1, cx);
        }
        if cx.spare_children() < COPY_CHILDREN {
            // Another request took the spare children meanwhile. The chunk is read again.
            let chunk = self.state(io).at / self.chunk;
            self.free(io, cx);
            self.release_claim(io, chunk..chunk + 1);
            return self.wait_for_others(io, Phase::Wait, cx);
        }
        self.write_copy(io, req, cx)
    }

    /// Writes the whole chunk: the request's range, and the copied data on both sides of it.
    fn write_copy<R: Ring>(&mut self, io: Cookie, req: &Request, cx: &mut Cx<'_, R>) -> Verdict {
        let State { at, end, buffer, .. } = *self.state(io);
        let start = at - at % self.chunk;
        let chunk_end = start + u64::from(buffer.len);
        self.state(io).phase = Phase::CopyWrite;
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
