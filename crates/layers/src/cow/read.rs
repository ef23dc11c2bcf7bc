//! Requests that change nothing: reads, questions for extents, prefetches.

use super::{Cow, Phase, Slot};
use block::{Bytes, Cookie, Extent, Flags, Op, Request, Status};
use queue::{Cx, Ring, Verdict};

/// Where a stretch of the device is read from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum From {
    Store,
    Origin,
    /// Neither: past the end of an origin that is shorter than the device.
    Nothing,
}

impl Cow {
    /// Where `from` is read, and up to where that holds, at most `to`.
    fn stretch(&self, from: u64, to: u64) -> (From, u64) {
        let (live, end) = self.index.run(self.chunks(from, to));
        let end = (end * self.chunk).min(to);
        match live {
            true => (From::Store, end),
            false if from < self.origin_size => (From::Origin, end.min(self.origin_size)),
            false => (From::Nothing, end),
        }
    }

    /// Hand a request down as a whole, cut to `end`.
    fn hand_down(&mut self, io: Cookie, req: &mut Request, from: From, end: u64) -> Verdict {
        *self.slot(io) = Slot { phase: Phase::Whole(from == From::Store), len: req.len, ..Slot::NEW };
        req.len = Bytes(end - req.offset.0);
        if from == From::Store {
            req.offset = req.offset + self.data_at;
            return Verdict::Down(self.store);
        }
        Verdict::Down(self.origin)
    }

    pub(super) fn read<R: Ring>(&mut self, io: Cookie, req: &mut Request, cx: &mut Cx<'_, R>) -> Verdict {
        let (start, end) = (req.offset.0, req.end().0);
        match self.stretch(start, end) {
            (From::Nothing, to) if to == end => {
                zero(req, start, end, cx);
                Verdict::Up(Status::Ok)
            }
            (from, to) if to == end => self.hand_down(io, req, from, end),
            _ if req.flags.has(Flags::NOWAIT) => Verdict::Up(Status::Again),
            _ => {
                *self.slot(io) = Slot { phase: Phase::Pieces, at: start, ..Slot::NEW };
                self.start_pieces(io, req, cx);
                if self.slot(io).pieces == 0 && self.slot(io).at < end {
                    Verdict::Blocked
                } else {
                    self.read_on(io)
                }
            }
        }
    }

    /// Read pieces until nothing is left or no child request is spare.
    fn start_pieces<R: Ring>(&mut self, io: Cookie, req: &Request, cx: &mut Cx<'_, R>) {
        let end = req.end().0;
        while self.slot(io).at < end && cx.spare_children() > 0 {
            let at = self.slot(io).at;
            let (from, to) = self.stretch(at, end);
            let mut piece = self.part(req, at, to, cx);
            match from {
                From::Nothing => zero(req, at, to, cx),
                From::Origin => self.spawn(io, self.origin, piece, cx),
                From::Store => {
                    piece.offset = piece.offset + self.data_at;
                    self.spawn(io, self.store, piece, cx);
                }
            }
            self.slot(io).at = to;
        }
    }

    pub(super) fn piece_read<R: Ring>(&mut self, io: Cookie, req: &Request, cx: &mut Cx<'_, R>) -> Verdict {
        if self.slot(io).status.is_ok() {
            self.start_pieces(io, req, cx);
        }
        self.read_on(io)
    }

    fn read_on(&mut self, io: Cookie) -> Verdict {
        let Slot { pieces, status, .. } = *self.slot(io);
        if pieces > 0 { Verdict::Held } else { Verdict::Up(status) }
    }

    /// The first stretch is described; whoever asks goes on from its end.
    pub(super) fn extents<R: Ring>(&mut self, io: Cookie, req: &mut Request, cx: &mut Cx<'_, R>) -> Verdict {
        let start = req.offset.0;
        let (from, end) = self.stretch(start, req.end().0);
        if from != From::Nothing {
            return self.hand_down(io, req, from, end);
        }
        let record = Extent { len: Bytes(end - start), hole: true, zero: true }.to_record();
        let mut rest = req.data;
        let mut record = &record[..];
        while let Some(piece) = cx.segments(rest, u64::MAX).next() {
            let bytes = cx.ring.bytes_mut(piece);
            let head = record.len().min(bytes.len());
            bytes[..head].copy_from_slice(&record[..head]);
            bytes[head..].fill(0);
            record = &record[head..];
            let before = rest;
            rest = cx.advance(rest, piece.len.into());
            if rest == before || matches!(rest, block::Data::One(segment) if segment.len == 0) {
                break;
            }
        }
        Verdict::Up(Status::Ok)
    }

    pub(super) fn prefetch(&mut self, io: Cookie, req: &mut Request) -> Verdict {
        debug_assert_eq!(req.op, Op::Prefetch);
        match self.stretch(req.offset.0, req.end().0) {
            (From::Nothing, _) => Verdict::Up(Status::Ok),
            (from, end) => self.hand_down(io, req, from, end),
        }
    }
}

/// Fill the part of a read's memory that is for `from` to `to` with zeroes.
fn zero<R: Ring>(req: &Request, from: u64, to: u64, cx: &mut Cx<'_, R>) {
    let (mut done, len) = (0, to - from);
    let data = cx.advance(req.data, from - req.offset.0);
    while done < len {
        let rest = cx.advance(data, done);
        let Some(piece) = cx.segments(rest, len - done).next() else { return };
        cx.ring.bytes_mut(piece).fill(0);
        done += u64::from(piece.len);
    }
}
