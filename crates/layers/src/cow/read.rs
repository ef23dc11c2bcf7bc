//! Requests that change nothing: reads, extent queries, prefetches.

use super::{Cow, Phase, State};
use block::{Bytes, Cookie, Extent, Flags, Op, Request, Status};
use queue::{Cx, Ring, Verdict};

/// The source of the data of a range of the device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Source {
    Store,
    Origin,
    /// Zeroes: past the end of an origin that is shorter than the device.
    Zeroes,
}

impl Cow {
    /// Returns the source of byte `from`, and the end of the range with that source, at most `to`.
    fn source(&self, from: u64, to: u64) -> (Source, u64) {
        let (live, end) = self.index.run(self.chunks(from, to));
        let end = (end * self.chunk).min(to);
        match live {
            true => (Source::Store, end),
            false if from < self.origin_size => (Source::Origin, end.min(self.origin_size)),
            false => (Source::Zeroes, end),
        }
    }

    /// Passes a request down, shortened to `end`.
    fn pass_down(&mut self, io: Cookie, req: &mut Request, from: Source, end: u64) -> Verdict {
        *self.state(io) = State { phase: Phase::Whole(from == Source::Store), len: req.len, ..State::NEW };
        req.len = Bytes(end - req.offset.0);
        if from == Source::Store {
            req.offset = req.offset + self.data_at;
            return Verdict::Down(self.store);
        }
        Verdict::Down(self.origin)
    }

    pub(super) fn read<R: Ring>(&mut self, io: Cookie, req: &mut Request, cx: &mut Cx<'_, R>) -> Verdict {
        let (start, end) = (req.offset.0, req.end().0);
        match self.source(start, end) {
            (Source::Zeroes, to) if to == end => {
                zero(req, start, end, cx);
                Verdict::Up(Status::Ok)
            }
            (from, to) if to == end => self.pass_down(io, req, from, end),
            _ if req.flags.contains(Flags::NOWAIT) => Verdict::Up(Status::Again),
            _ => {
                *self.state(io) = State { phase: Phase::Read, at: start, ..State::NEW };
                self.start_reads(io, req, cx);
                if self.state(io).children == 0 && self.state(io).at < end {
                    Verdict::Blocked
                } else {
                    self.read_verdict(io)
                }
            }
        }
    }

    /// Starts child reads until nothing remains or no child request is spare.
    fn start_reads<R: Ring>(&mut self, io: Cookie, req: &Request, cx: &mut Cx<'_, R>) {
        let end = req.end().0;
        while self.state(io).at < end && cx.spare_children() > 0 {
            let at = self.state(io).at;
            let (from, to) = self.source(at, end);
            let mut piece = self.part(req, at, to, cx);
            match from {
                Source::Zeroes => zero(req, at, to, cx),
                Source::Origin => self.spawn(io, self.origin, piece, cx),
                Source::Store => {
                    piece.offset = piece.offset + self.data_at;
                    self.spawn(io, self.store, piece, cx);
                }
            }
            self.state(io).at = to;
        }
    }

    pub(super) fn child_read<R: Ring>(&mut self, io: Cookie, req: &Request, cx: &mut Cx<'_, R>) -> Verdict {
        if self.state(io).status.is_ok() {
            self.start_reads(io, req, cx);
        }
        self.read_verdict(io)
    }

    fn read_verdict(&mut self, io: Cookie) -> Verdict {
        let State { children, status, .. } = *self.state(io);
        if children > 0 { Verdict::Held } else { Verdict::Up(status) }
    }

    /// Answers an extent query for the first range only; the caller continues from its end.
    pub(super) fn extents<R: Ring>(&mut self, io: Cookie, req: &mut Request, cx: &mut Cx<'_, R>) -> Verdict {
        let start = req.offset.0;
        let (from, end) = self.source(start, req.end().0);
        if from != Source::Zeroes {
            return self.pass_down(io, req, from, end);
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
        match self.source(req.offset.0, req.end().0) {
            (Source::Zeroes, _) => Verdict::Up(Status::Ok),
            (from, end) => self.pass_down(io, req, from, end),
        }
    }
}

/// Fills the part of a read's memory from byte `from` to byte `to` with zeroes.
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
