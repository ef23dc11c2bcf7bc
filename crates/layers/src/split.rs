//! Splits requests that exceed the queue limits of the device below.
//!
//! The split points follow the kernel's `__bio_split_to_limits`, see [`cuts`]. A request within the limits
//! goes down unchanged. A larger one is held while its parts go down as [child
//! requests](crate::split_requests): as many at once as there are spare child requests, the others as those
//! complete. It completes after its last child, with the first error; after an error it starts no more.
//!
//! Flushes, prefetches, extent queries, zone reports and zone management commands are never split; a zone
//! append that exceeds the limits is rejected. `dma_alignment` is not enforced here: a backend copies data
//! that is misaligned in memory.

mod cuts;
mod shared;

#[cfg(test)]
mod tests;

use crate::split_requests::{ChildRange, SplitRequests};
use block::{Cookie, Data, Flags, Op, QueueLimits, Request, Status};
use cuts::Cuts;
use queue::{Cx, Node, NodeId, Ring, Verdict};

pub use shared::SplitLayer;

/// The node of one hardware queue.
pub struct Split {
    child: NodeId,
    cuts: Cuts,
    split: SplitRequests,
}

impl Split {
    /// Creates a node that splits requests for `child` to the validated `limits`.
    pub fn new(limits: &QueueLimits, child: NodeId) -> Split {
        Split { child, cuts: Cuts::new(limits), split: SplitRequests::default() }
    }

    /// Returns how many child requests the layer needs in a queue of that depth: four for each request, and
    /// at least 64, so that the children of one large request run in parallel.
    pub fn children(depth: u16) -> u16 {
        depth.saturating_mul(4).clamp(64, 8192)
    }

    /// The slow path of `submit`: a request that may have to be split. It is not inlined, so that the fast
    /// path stays a few instructions.
    #[inline(never)]
    fn cut<R: Ring>(&mut self, io: Cookie, req: &Request, cx: &mut Cx<'_, R>) -> Verdict {
        if is_zero_copy(req) {
            return Verdict::Down(self.child);
        }
        let whole = head(&self.cuts, req, cx);
        if whole == req.len.0 {
            return Verdict::Down(self.child);
        }
        if req.op == Op::ZoneAppend {
            return Verdict::Up(Status::Invalid);
        }
        let Split { child, cuts, split } = self;
        split.begin(io, req, cx, next_child(*child, cuts, Some(whole)))
    }
}

/// Returns the function that computes the next child request. `first` is the first child's length if it is
/// known.
fn next_child<R: Ring>(
    child: NodeId,
    cuts: &Cuts,
    mut first: Option<u64>,
) -> impl FnMut(&Request, &Cx<'_, R>) -> Option<ChildRange> {
    move |left, cx| {
        let len = first.take().unwrap_or_else(|| head(cuts, left, cx));
        (len > 0).then_some(ChildRange { child, len, start: 0 })
    }
}

/// Returns the length of the first child request: all of `req` if it need not be split, 0 if it cannot be.
#[inline]
fn head<R: Ring>(cuts: &Cuts, req: &Request, cx: &Cx<'_, R>) -> u64 {
    if let (Op::Read | Op::Write, Data::One(_)) = (req.op, req.data)
        && let Some(len) = cuts.even_child(req.offset.0, req.len.0)
    {
        return len;
    }
    computed_head(cuts, req, cx)
}

/// Computes [`head`] by the kernel's rules for each operation.
#[inline(never)]
fn computed_head<R: Ring>(cuts: &Cuts, req: &Request, cx: &Cx<'_, R>) -> u64 {
    match req.op {
        Op::Read | Op::Write => cuts.data(req.offset.0, cx.segments(req.data, req.len.0), req.len.0),
        Op::Discard => cuts.discard(req.offset.0, req.len.0),
        Op::WriteZeroes => cuts.write_zeroes(req.offset.0, req.len.0),
        Op::ZoneAppend => cuts.append(req.offset.0, cx.segments(req.data, req.len.0), req.len.0),
        Op::Flush | Op::Prefetch | Op::Extents => req.len.0,
        Op::ReportZones | Op::ZoneReset | Op::ZoneResetAll => req.len.0,
        Op::ZoneOpen | Op::ZoneClose | Op::ZoneFinish => req.len.0,
        Op::ReadTuples | Op::WriteTuples | Op::CompareAndWrite => req.len.0,
    }
}

/// Returns whether the request is a read without memory of its own that the backend answers with a reference
/// to its pages. Such a read was submitted before the limits were set, and is not split.
fn is_zero_copy(req: &Request) -> bool {
    req.flags.contains(Flags::ZERO_COPY) && matches!(req.data, Data::One(segment) if segment.len == 0)
}

impl<R: Ring> Node<R> for Split {
    fn attach(&mut self, _: NodeId, tags: usize) {
        self.split.attach(tags);
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
        let Split { child, cuts, split } = self;
        split.end(io, req, status, cx, next_child(*child, cuts, None))
    }

    /// Does nothing: the children have the request's age, so the queue cancels them itself.
    fn cancel(&mut self, _: Cookie, _: &mut Cx<'_, R>) {}
}
