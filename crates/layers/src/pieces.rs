//! Requests that are cut: each is held while its pieces go down as child requests, as many at once as are spare.
//!
//! Belongs to a node, which says where a piece ends and whom it goes to.
//!
//! *Invariant:* while a request is held here, at least one of its pieces is under way.

use block::{Bytes, Cookie, Data, Flags, Request, Status};
use queue::{ChildKind, Cx, Event, NodeId, Ring, Verdict};

/// The next piece of a request.
pub(crate) struct Piece {
    /// Whom it goes to.
    pub(crate) child: NodeId,
    /// How long it is: at most what is left.
    pub(crate) len: u64,
    /// Where the device begins that the child stands for, on the one that is asked.
    pub(crate) start: u64,
}

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

/// What of a node's requests is at its children in pieces.
#[derive(Default)]
pub(crate) struct Pieces {
    /// By tag; without meaning for a request that is not held here.
    rests: Box<[Rest]>,
}

impl Pieces {
    /// In the node's `attach`.
    pub(crate) fn attach(&mut self, tags: usize) {
        let none = Rest { offset: Bytes::ZERO, data: Data::NONE, pieces: 0, status: Status::Ok };
        self.rests = vec![none; tags].into();
    }

    /// Begin with a request. `next`: its piece at the front of what is left, `None` where it can be cut nowhere.
    #[inline]
    pub(crate) fn begin<R: Ring>(
        &mut self,
        io: Cookie,
        req: &Request,
        cx: &mut Cx<'_, R>,
        next: impl FnMut(&Request, &Cx<'_, R>) -> Option<Piece>,
    ) -> Verdict {
        // What must not wait for tags cannot be held.
        if req.flags.has(Flags::NOWAIT) {
            return Verdict::Up(Status::Again);
        }
        self.rests[io.tag.index()] =
            Rest { offset: req.offset, data: req.data, pieces: 0, status: Status::Ok };
        self.start(io, req, cx, next);
        match self.rests[io.tag.index()] {
            Rest { pieces: 0, status: Status::Ok, .. } => Verdict::Blocked,
            Rest { pieces: 0, status, .. } => Verdict::Up(status),
            _ => Verdict::Held,
        }
    }

    /// In the node's `child_end`: a piece has ended.
    #[inline]
    pub(crate) fn end<R: Ring>(
        &mut self,
        io: Cookie,
        req: &Request,
        status: Status,
        cx: &mut Cx<'_, R>,
        next: impl FnMut(&Request, &Cx<'_, R>) -> Option<Piece>,
    ) -> Verdict {
        let rest = &mut self.rests[io.tag.index()];
        rest.pieces -= 1;
        if rest.status.is_ok() {
            rest.status = status;
        }
        if rest.status.is_ok() && rest.offset < req.end() {
            self.start(io, req, cx, next);
        }
        let rest = &self.rests[io.tag.index()];
        if rest.pieces == 0 { Verdict::Up(rest.status) } else { Verdict::Held }
    }

    /// Start pieces until nothing is left or no child request is spare.
    fn start<R: Ring>(
        &mut self,
        io: Cookie,
        req: &Request,
        cx: &mut Cx<'_, R>,
        mut next: impl FnMut(&Request, &Cx<'_, R>) -> Option<Piece>,
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
            let Some(Piece { child, len, start }) = next(&piece, cx) else {
                rest.status = Status::Invalid;
                break;
            };
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
            piece.offset = Bytes(piece.offset.0 - start);
            let spawned = cx.spawn(io, child, ChildKind::Piece, piece);
            debug_assert!(spawned.is_ok(), "a spare child was seen");
        }
        self.rests[io.tag.index()] = rest;
    }
}
