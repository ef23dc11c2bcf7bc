//! Mistakes made on purpose: a simulation that does not find them finds nothing.

use block::{Bytes, Cookie, Flags, Op, Request, Status};
use queue::{ChildKind, Cx, Node, NodeId, Ring, Verdict};
use sim::Rng;

/// A mistake.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Breakage {
    /// FUA writes are acknowledged before they are stable.
    EarlyFua,
    /// Flushes are acknowledged and not done.
    SkippedFlush,
    /// The last sector of a write is not written.
    DroppedTail,
    /// A request is cut in two, and each half gets the other's data.
    SwappedHalves,
    /// A flush succeeds after one that failed and lost data.
    ForgottenSyncError,
    /// Now and then a request is never ended.
    LostRequest,
    /// Now and then memory is taken and not given back.
    LeakedMemory,
    /// Write zeroes is taken for a hint.
    IgnoredZeroes,
    /// A stack that takes the place of another does not know that a sync has failed.
    ForgetfulSwap,
}

impl Breakage {
    /// All of them.
    pub const ALL: [Breakage; 9] = [
        Breakage::EarlyFua,
        Breakage::SkippedFlush,
        Breakage::DroppedTail,
        Breakage::SwappedHalves,
        Breakage::ForgottenSyncError,
        Breakage::LostRequest,
        Breakage::LeakedMemory,
        Breakage::IgnoredZeroes,
        Breakage::ForgetfulSwap,
    ];
}

/// A layer that makes one of the mistakes.
pub(super) struct Broken {
    child: NodeId,
    breakage: Breakage,
    rng: Rng,
    /// By tag: the request as it came.
    before: Vec<Request>,
    /// By tag: halves under way.
    halves: Vec<u8>,
}

impl Broken {
    pub(super) fn new(child: NodeId, breakage: Breakage, rng: Rng) -> Broken {
        Broken { child, breakage, rng, before: Vec::new(), halves: Vec::new() }
    }

    fn swap_halves<R: Ring>(&mut self, io: Cookie, req: &Request, cx: &mut Cx<'_, R>) -> Verdict {
        let half = Bytes(req.len.0 / 2);
        if !half.is_aligned(512) || cx.spare_children() < 2 {
            return Verdict::Down(self.child);
        }
        for first in [true, false] {
            let offset = if first { req.offset } else { req.offset + half };
            let data = cx.advance(req.data, if first { half.0 } else { 0 });
            let piece = Request { offset, len: half, data, ..*req };
            cx.spawn(io, self.child, ChildKind::Piece, piece).expect("there were two");
        }
        self.halves[io.tag.index()] = 2;
        Verdict::Held
    }
}

impl<R: Ring> Node<R> for Broken {
    fn attach(&mut self, _: NodeId, tags: usize) {
        self.before = vec![Request::flush(); tags];
        self.halves = vec![0; tags];
    }

    fn submit(&mut self, io: Cookie, req: &mut Request, cx: &mut Cx<'_, R>) -> Verdict {
        self.before[io.tag.index()] = *req;
        match (self.breakage, req.op) {
            (Breakage::EarlyFua, Op::Write) => req.flags = req.flags.without(Flags::FUA),
            (Breakage::SkippedFlush, Op::Flush) => return Verdict::Up(Status::Ok),
            (Breakage::IgnoredZeroes, Op::WriteZeroes) => return Verdict::Up(Status::Ok),
            (Breakage::DroppedTail, Op::Write) if req.len.0 > 512 => req.len = req.len - Bytes(512),
            (Breakage::SwappedHalves, Op::Write) => return self.swap_halves(io, req, cx),
            (Breakage::LostRequest, _) if self.rng.chance(20) => return Verdict::Held,
            (Breakage::LeakedMemory, _) if self.rng.chance(20) => drop(cx.ring.allocate(4096)),
            _ => {}
        }
        Verdict::Down(self.child)
    }

    fn end_io(&mut self, io: Cookie, req: &mut Request, status: Status, _: &mut Cx<'_, R>) -> Verdict {
        *req = self.before[io.tag.index()];
        Verdict::Up(status)
    }

    fn child_end(
        &mut self,
        io: Cookie,
        _: &mut Request,
        _: &Request,
        status: Status,
        _: &mut Cx<'_, R>,
    ) -> Verdict {
        let left = &mut self.halves[io.tag.index()];
        *left -= 1;
        if *left == 0 { Verdict::Up(status) } else { Verdict::Held }
    }
}
