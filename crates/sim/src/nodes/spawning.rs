//! Nodes that start children: parts of a request, and copies of it.

use crate::Rng;
use block::{Bytes, Cookie, Data, Flags, Op, Request, Status};
use queue::{ChildKind, Cx, Node, NodeId, Ring, Verdict};

/// State of a parent that waits for children.
#[derive(Clone, Copy)]
struct Wait {
    left: u32,
    status: Status,
}

impl Wait {
    /// Handles the end of a child; returns the parent's verdict. The first error wins.
    fn child_end(&mut self, status: Status) -> Verdict {
        if self.status.is_ok() {
            self.status = status;
        }
        self.left -= 1;
        if self.left == 0 { Verdict::Up(self.status) } else { Verdict::Held }
    }
}

/// Splits reads, writes, discards and write-zeroes requests at random sectors into up to four children.
pub struct Chop {
    child: NodeId,
    rng: Rng,
    wait: Vec<Wait>,
}

impl Chop {
    /// Largest number of children of a request.
    pub const PIECES: u16 = 4;

    /// Creates a splitter above `child`.
    pub fn new(child: NodeId, rng: Rng) -> Chop {
        Chop { child, rng, wait: Vec::new() }
    }
}

impl<R: Ring> Node<R> for Chop {
    fn attach(&mut self, _: NodeId, tags: usize) {
        self.wait = vec![Wait { left: 0, status: Status::Ok }; tags];
    }

    fn submit(&mut self, io: Cookie, req: &mut Request, cx: &mut Cx<'_, R>) -> Verdict {
        let sectors = req.len.0 >> 9;
        let count = self.rng.between(1, u64::from(Self::PIECES)).min(sectors);
        if count < 2 || req.op.is_special() || !(req.op.moves_data() || req.op.is_write()) {
            return Verdict::Down(self.child);
        }
        if cx.spare_children() < count as usize {
            return Verdict::Busy;
        }
        let (mut from, mut left) = (0, count);
        while left > 0 {
            let to = if left == 1 { sectors } else { self.rng.between(from + 1, sectors - left + 1) };
            let data = if req.op.moves_data() { cx.advance(req.data, from << 9) } else { req.data };
            let (offset, len) = (req.offset + Bytes(from << 9), Bytes((to - from) << 9));
            // Zero-copy memory of children could not be reported to the submitter of the parent.
            let flags = req.flags.difference(Flags::ZERO_COPY);
            let piece = Request { offset, len, data, flags, ..*req };
            cx.spawn(io, self.child, ChildKind::Piece, piece).expect("enough children are free");
            (from, left) = (to, left - 1);
        }
        self.wait[io.tag.index()] = Wait { left: count as u32, status: Status::Ok };
        Verdict::Held
    }

    fn child_end(
        &mut self,
        io: Cookie,
        _: &mut Request,
        _: &Request,
        status: Status,
        _: &mut Cx<'_, R>,
    ) -> Verdict {
        self.wait[io.tag.index()].child_end(status)
    }

    fn cancel(&mut self, _: Cookie, _: &mut Cx<'_, R>) {}
}

/// Writes to two children, and reads from either; a failed read is retried on the other.
pub struct Mirror {
    children: [NodeId; 2],
    rng: Rng,
    wait: Vec<Wait>,
    /// By tag: the child that a read has not tried yet, if any, and the memory of the request.
    other: Vec<(Option<NodeId>, Data)>,
}

impl Mirror {
    /// Number of children of a request.
    pub const COPIES: u16 = 2;

    /// Creates a mirror of two children.
    pub fn new(children: [NodeId; 2], rng: Rng) -> Mirror {
        Mirror { children, rng, wait: Vec::new(), other: Vec::new() }
    }
}

impl<R: Ring> Node<R> for Mirror {
    fn attach(&mut self, _: NodeId, tags: usize) {
        self.wait = vec![Wait { left: 0, status: Status::Ok }; tags];
        self.other = vec![(None, Data::NONE); tags];
    }

    fn submit(&mut self, io: Cookie, req: &mut Request, cx: &mut Cx<'_, R>) -> Verdict {
        if !(req.op.is_write() || req.op == Op::Flush) {
            let first = self.rng.below(2) as usize;
            self.other[io.tag.index()] = (Some(self.children[1 - first]), req.data);
            return Verdict::Down(self.children[first]);
        }
        if cx.spare_children() < usize::from(Self::COPIES) {
            return Verdict::Busy;
        }
        self.wait[io.tag.index()] = Wait { left: u32::from(Self::COPIES), status: Status::Ok };
        for child in self.children {
            cx.spawn(io, child, ChildKind::Copy, *req).expect("enough children are free");
        }
        Verdict::Held
    }

    fn end_io(&mut self, io: Cookie, req: &mut Request, status: Status, _: &mut Cx<'_, R>) -> Verdict {
        let (other, data) = &mut self.other[io.tag.index()];
        match other.take() {
            Some(other) if !status.is_ok() && status.is_path_error() => {
                req.data = *data;
                Verdict::Down(other)
            }
            _ => Verdict::Up(status),
        }
    }

    fn child_end(
        &mut self,
        io: Cookie,
        _: &mut Request,
        _: &Request,
        status: Status,
        _: &mut Cx<'_, R>,
    ) -> Verdict {
        self.wait[io.tag.index()].child_end(status)
    }

    fn cancel(&mut self, _: Cookie, _: &mut Cx<'_, R>) {}
}
