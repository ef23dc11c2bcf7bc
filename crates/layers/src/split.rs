//! Cuts requests so that none goes beyond the queue limits of what stands below.
//!
//! Where the cuts lie is the kernel's `__bio_split_to_limits`, in [`cuts`]. A request that needs none goes
//! down as it is. One that does stays held here while its pieces go down as child requests: as many at once
//! as child requests are spare, the others as those end. It ends when the last one has, with the first
//! error there was; after an error no more pieces are started.
//!
//! A flush, a prefetch, a question for extents or zones and what a zone is told are never cut; a zone append
//! that would have to be is refused. Whether memory is aligned is the backend's
//! matter here: it copies what it cannot take as it is (`dma_alignment` is not held against a request).
//!
//! *Invariant:* while a request is held here, at least one of its pieces is under way.

mod cuts;
mod shared;

#[cfg(test)]
mod tests;

use block::{Bytes, Cookie, Data, Flags, Op, QueueLimits, Request, Status};
use cuts::Cuts;
use queue::{ChildKind, Cx, Event, Node, NodeId, Ring, Verdict};

pub use shared::SplitLayer;

/// What is left of a request that was cut.
#[derive(Clone, Copy)]
struct Rest {
    /// Where it begins on the device; the request's end when nothing is left.
    offset: Bytes,
    /// The memory from there on.
    data: Data,
    /// Pieces under way.
    pieces: u32,
    /// The first error, else `Ok`.
    status: Status,
}

/// The layer.
pub struct Split {
    child: NodeId,
    cuts: Cuts,
    /// By tag; without meaning for a request that is not held here.
    rests: Box<[Rest]>,
}

impl Split {
    /// Holds requests to `limits`, which were validated, on their way to `child`.
    pub fn new(limits: &QueueLimits, child: NodeId) -> Split {
        Split { child, cuts: Cuts::new(limits), rests: Box::default() }
    }

    /// How many child requests the layer should have in a queue of that depth: four pieces for each
    /// request, and never so few that one large request goes down piece by piece.
    pub fn children(depth: u16) -> u16 {
        depth.saturating_mul(4).clamp(64, 8192)
    }

    /// How long the first piece of `req` is; its whole length when it need not be cut, 0 when it cannot be.
    fn head<R: Ring>(&self, req: &Request, cx: &Cx<'_, R>) -> u64 {
        match req.op {
            Op::Read | Op::Write => self.cuts.data(req.offset.0, cx.segments(req.data, req.len.0), req.len.0),
            Op::Discard => self.cuts.discard(req.offset.0, req.len.0),
            Op::WriteZeroes => self.cuts.write_zeroes(req.offset.0, req.len.0),
            Op::ZoneAppend => self.cuts.append(req.offset.0, cx.segments(req.data, req.len.0), req.len.0),
            Op::Flush | Op::Prefetch | Op::Extents => req.len.0,
            Op::ReportZones | Op::ZoneReset | Op::ZoneResetAll => req.len.0,
            Op::ZoneOpen | Op::ZoneClose | Op::ZoneFinish => req.len.0,
        }
    }

    /// The long way of `submit`: a request that may have to be cut. Kept apart, so that the short one stays a
    /// few instructions.
    #[inline(never)]
    fn cut<R: Ring>(&mut self, io: Cookie, req: &Request, cx: &mut Cx<'_, R>) -> Verdict {
        let head = self.head(req, cx);
        if head == req.len.0 {
            return Verdict::Down(self.child);
        }
        if req.op == Op::ZoneAppend {
            return Verdict::Up(Status::Invalid);
        }
        if req.flags.has(Flags::NOWAIT) {
            return Verdict::Up(Status::Again);
        }
        if head == 0 {
            return Verdict::Up(Status::Invalid);
        }
        self.rests[io.tag.index()] =
            Rest { offset: req.offset, data: req.data, pieces: 0, status: Status::Ok };
        self.start_pieces(io, req, Some(head), cx);
        if self.rests[io.tag.index()].pieces == 0 { Verdict::Busy } else { Verdict::Held }
    }

    /// Start pieces until nothing is left or no child request is spare. `head`: the first one's length, where
    /// it is known.
    fn start_pieces<R: Ring>(
        &mut self,
        io: Cookie,
        req: &Request,
        mut head: Option<u64>,
        cx: &mut Cx<'_, R>,
    ) {
        let mut rest = self.rests[io.tag.index()];
        while rest.offset < req.end() && cx.spare_children() > 0 {
            let mut piece = Request {
                offset: rest.offset,
                len: req.end() - rest.offset,
                data: rest.data,
                op: req.op,
                // A piece fills a part of the request's own memory.
                flags: req.flags.without(Flags::MAY_LEND),
            };
            let len = head.take().unwrap_or_else(|| self.head(&piece, cx));
            if len == 0 {
                rest.status = Status::Invalid;
                break;
            }
            if len < piece.len.0 {
                piece.len = Bytes(len);
                if req.op.moves_data() {
                    rest.data = cx.advance(piece.data, len);
                }
                cx.probe(io.tag, &piece, Event::Split { rest: piece.end() });
            }
            if let (true, Data::One(segment)) = (req.op.moves_data(), piece.data) {
                piece.data = Data::One(segment.slice(0, piece.len.0 as u32));
            }
            rest.offset = piece.end();
            rest.pieces += 1;
            let spawned = cx.spawn(io, self.child, ChildKind::Piece, piece);
            debug_assert!(spawned.is_ok(), "a spare child was seen");
        }
        self.rests[io.tag.index()] = rest;
    }
}

impl<R: Ring> Node<R> for Split {
    fn attach(&mut self, _: NodeId, tags: usize) {
        let none = Rest { offset: Bytes::ZERO, data: Data::NONE, pieces: 0, status: Status::Ok };
        self.rests = vec![none; tags].into();
    }

    #[inline]
    fn submit(&mut self, io: Cookie, req: &mut Request, cx: &mut Cx<'_, R>) -> Verdict {
        if self.cuts.is_surely_whole(req) {
            return Verdict::Down(self.child);
        }
        self.cut(io, req, cx)
    }

    fn child_end(
        &mut self,
        io: Cookie,
        req: &mut Request,
        _: &Request,
        status: Status,
        cx: &mut Cx<'_, R>,
    ) -> Verdict {
        let rest = &mut self.rests[io.tag.index()];
        rest.pieces -= 1;
        if rest.status.is_ok() {
            rest.status = status;
        }
        if rest.status.is_ok() && rest.offset < req.end() {
            self.start_pieces(io, req, None, cx);
        }
        let rest = &self.rests[io.tag.index()];
        if rest.pieces == 0 { Verdict::Up(rest.status) } else { Verdict::Held }
    }

    /// Nothing of ours is with the ring: the pieces are as old as the request and are asked themselves.
    fn cancel(&mut self, _: Cookie, _: &mut Cx<'_, R>) {}
}
