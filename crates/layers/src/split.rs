//! Cuts requests so that none goes beyond the queue limits of what stands below.
//!
//! Where the cuts lie is the kernel's `__bio_split_to_limits`, in [`cuts`]. A request that needs none goes
//! down as it is. One that does stays held here while its [pieces](crate::pieces) go down as child requests: as
//! many at once as child requests are spare, the others as those end. It ends when the last one has, with the
//! first error there was; after an error no more pieces are started.
//!
//! A flush, a prefetch, a question for extents or zones and what a zone is told are never cut; a zone append
//! that would have to be is refused. Whether memory is aligned is the backend's
//! matter here: it copies what it cannot take as it is (`dma_alignment` is not held against a request).

mod cuts;
mod shared;

#[cfg(test)]
mod tests;

use crate::pieces::{Piece, Pieces};
use block::{Cookie, Data, Flags, Op, QueueLimits, Request, Status};
use cuts::Cuts;
use queue::{Cx, Node, NodeId, Ring, Verdict};

pub use shared::SplitLayer;

/// The layer.
pub struct Split {
    child: NodeId,
    cuts: Cuts,
    pieces: Pieces,
}

impl Split {
    /// Holds requests to `limits`, which were validated, on their way to `child`.
    pub fn new(limits: &QueueLimits, child: NodeId) -> Split {
        Split { child, cuts: Cuts::new(limits), pieces: Pieces::default() }
    }

    /// How many child requests the layer should have in a queue of that depth: four pieces for each
    /// request, and never so few that one large request goes down piece by piece.
    pub fn children(depth: u16) -> u16 {
        depth.saturating_mul(4).clamp(64, 8192)
    }

    /// The long way of `submit`: a request that may have to be cut. Kept apart, so that the short one stays a
    /// few instructions.
    #[inline(never)]
    fn cut<R: Ring>(&mut self, io: Cookie, req: &Request, cx: &mut Cx<'_, R>) -> Verdict {
        if is_to_be_lent(req) {
            return Verdict::Down(self.child);
        }
        let whole = head(&self.cuts, req, cx);
        if whole == req.len.0 {
            return Verdict::Down(self.child);
        }
        if req.op == Op::ZoneAppend {
            return Verdict::Up(Status::Invalid);
        }
        let Split { child, cuts, pieces } = self;
        pieces.begin(io, req, cx, pieces_of(*child, cuts, Some(whole)))
    }
}

/// What a request is cut into. `first`: the first piece's length, where it is known.
fn pieces_of<R: Ring>(
    child: NodeId,
    cuts: &Cuts,
    mut first: Option<u64>,
) -> impl FnMut(&Request, &Cx<'_, R>) -> Option<Piece> {
    move |left, cx| {
        let len = first.take().unwrap_or_else(|| head(cuts, left, cx));
        (len > 0).then_some(Piece { child, len, start: 0 })
    }
}

/// How long the first piece of `req` is; its whole length when it need not be cut, 0 when it cannot be.
fn head<R: Ring>(cuts: &Cuts, req: &Request, cx: &Cx<'_, R>) -> u64 {
    match req.op {
        Op::Read | Op::Write => cuts.data(req.offset.0, cx.segments(req.data, req.len.0), req.len.0),
        Op::Discard => cuts.discard(req.offset.0, req.len.0),
        Op::WriteZeroes => cuts.write_zeroes(req.offset.0, req.len.0),
        Op::ZoneAppend => cuts.append(req.offset.0, cx.segments(req.data, req.len.0), req.len.0),
        Op::Flush | Op::Prefetch | Op::Extents => req.len.0,
        Op::ReportZones | Op::ZoneReset | Op::ZoneResetAll => req.len.0,
        Op::ZoneOpen | Op::ZoneClose | Op::ZoneFinish | Op::ReadTuples | Op::WriteTuples => req.len.0,
    }
}

/// A read that came without memory, when nothing stood here yet and what is below lends its own: it came before the
/// limits, and goes past them.
fn is_to_be_lent(req: &Request) -> bool {
    req.flags.has(Flags::MAY_LEND) && matches!(req.data, Data::One(segment) if segment.len == 0)
}

impl<R: Ring> Node<R> for Split {
    fn attach(&mut self, _: NodeId, tags: usize) {
        self.pieces.attach(tags);
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
        let Split { child, cuts, pieces } = self;
        pieces.end(io, req, status, cx, pieces_of(*child, cuts, None))
    }

    /// Nothing of ours is with the ring: the pieces are as old as the request and are asked themselves.
    fn cancel(&mut self, _: Cookie, _: &mut Cx<'_, R>) {}
}
