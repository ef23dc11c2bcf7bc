//! Split requests: each is held while its parts go down as child requests, as many at once as are spare.
//!
//! The state belongs to a node, which chooses the length and the target of each child request.
//!
//! *Invariant:* a request that is held here has at least one child request in flight.

use block::{Bytes, Cookie, Data, Flags, Request, Status};
use queue::{ChildKind, Cx, Event, NodeId, Ring, Verdict};

/// The next child request of a split request.
pub(crate) struct ChildRange {
    /// The node that receives the child request.
    pub(crate) child: NodeId,
    /// The length in bytes, at most the rest of the parent.
    pub(crate) len: u64,
    /// The start of the child's device, in bytes on the device that is split.
    pub(crate) start: u64,
}

/// The part of a split request that no child request covers yet.
#[derive(Clone, Copy)]
struct Rest {
    /// The offset on the device; the request's end if nothing remains.
    offset: Bytes,
    /// The memory of the rest.
    data: Data,
    /// Child requests in flight.
    children: u32,
    /// The first error, else `Ok`.
    status: Status,
}

/// The split requests of a node.
#[derive(Default)]
pub(crate) struct SplitRequests {
    /// The rest of each request, by tag; meaningless for a request that is not held here.
    rests: Box<[Rest]>,
}

impl SplitRequests {
    /// Allocates the state per tag; called by the node's `attach`.
    pub(crate) fn attach(&mut self, tags: usize) {
        let none = Rest { offset: Bytes::ZERO, data: Data::NONE, children: 0, status: Status::Ok };
        self.rests = vec![none; tags].into();
    }

    /// Splits a request and starts its first children. `next` returns the child request at the front of what
    /// remains, or `None` if that cannot be split.
    #[inline]
    pub(crate) fn begin<R: Ring>(
        &mut self,
        io: Cookie,
        req: &Request,
        cx: &mut Cx<'_, R>,
        next: impl FnMut(&Request, &Cx<'_, R>) -> Option<ChildRange>,
    ) -> Verdict {
        // A NOWAIT request must not wait for tags of children.
        if req.flags.contains(Flags::NOWAIT) {
            return Verdict::Up(Status::Again);
        }
        self.rests[io.tag.index()] =
            Rest { offset: req.offset, data: req.data, children: 0, status: Status::Ok };
        self.start(io, req, cx, next);
        match self.rests[io.tag.index()] {
            Rest { children: 0, status: Status::Ok, .. } => Verdict::Blocked,
            Rest { children: 0, status, .. } => Verdict::Up(status),
            _ => Verdict::Held,
        }
    }

    /// Handles the completion of a child request; called by the node's `child_end`.
    #[inline]
    pub(crate) fn end<R: Ring>(
        &mut self,
        io: Cookie,
        req: &Request,
        status: Status,
        cx: &mut Cx<'_, R>,
        next: impl FnMut(&Request, &Cx<'_, R>) -> Option<ChildRange>,
    ) -> Verdict {
        let rest = &mut self.rests[io.tag.index()];
        rest.children -= 1;
        if rest.status.is_ok() {
            rest.status = status;
        }
        if rest.status.is_ok() && rest.offset < req.end() {
            self.start(io, req, cx, next);
        }
        let rest = &self.rests[io.tag.index()];
        if rest.children == 0 { Verdict::Up(rest.status) } else { Verdict::Held }
    }

    /// Starts child requests until nothing remains or no child request is spare.
    fn start<R: Ring>(
        &mut self,
        io: Cookie,
        req: &Request,
        cx: &mut Cx<'_, R>,
        mut next: impl FnMut(&Request, &Cx<'_, R>) -> Option<ChildRange>,
    ) {
        let rest = &mut self.rests[io.tag.index()];
        // A child fills a part of the request's own memory.
        let flags = req.flags.difference(Flags::ZERO_COPY);
        let (op, end) = (req.op, req.end());
        // The remaining memory is not kept in `rest`: it is nearly always one segment, which then stays in
        // registers.
        let (mut offset, mut data) = (rest.offset, rest.data);
        while offset < end {
            let left = Request { offset, len: end - offset, data, op, flags };
            let Some(ChildRange { child, len, start }) = next(&left, cx) else {
                rest.status = Status::Invalid;
                break;
            };
            let (of_piece, beyond) = match data {
                Data::One(segment) if op.moves_data() => {
                    let (front, back) = segment.split_at(len as u32);
                    (Data::One(front), Data::One(back))
                }
                run if op.moves_data() && len < left.len.0 => (run, cx.advance(run, len)),
                other => (other, other),
            };
            let child_req =
                Request { offset: Bytes(offset.0 - start), len: Bytes(len), data: of_piece, op, flags };
            if cx.spawn(io, child, ChildKind::Piece, child_req).is_err() {
                break;
            }
            rest.children += 1;
            if len < left.len.0 {
                let child_req = Request { offset, ..child_req };
                cx.probe(io.tag, &child_req, Event::Split { rest: child_req.end() });
            }
            (offset, data) = (offset + Bytes(len), beyond);
        }
        (rest.offset, rest.data) = (offset, data);
    }
}
