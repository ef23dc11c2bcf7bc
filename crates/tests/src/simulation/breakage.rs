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
    /// A write that follows on the one before is taken for a part of it, and forgotten.
    ForgottenPart,
    /// An overlay's table is not written.
    ForgottenTable,
    /// An overlay's table is written before the data of which it speaks is on stable storage.
    EarlyTable,
    /// An overlay's chunk is not completed from the origin when it is written in part.
    IncompleteChunk,
    /// An overlay's records are not written.
    ForgottenRecords,
    /// An overlay believes its journal, and looks at no checksum.
    BelievedRecords,
    /// Multipath does not hear that a request has come back from a path.
    UncountedEnd,
    /// A path's error is told although another path could have carried the request out.
    PathErrorTold,
    /// A snapshot's copies are not written.
    ForgottenCopy,
    /// An exception is written before what it names is on stable storage.
    EarlyException,
    /// Now and then a write to an origin is not copied for its snapshots first.
    PassedBy,
    /// The header of a snapshot that is lost does not say so.
    UnrecordedLoss,
    /// The header of a snapshot that is lost counts as written although its disk has failed.
    UnheededHeader,
    /// Regions are written before the log has their marks.
    ForgottenMark,
    /// Marks go before what was written is on stable storage.
    EarlyUnmark,
    /// A mirror does not hear that one of its devices has not taken a write.
    StaleLeg,
    /// Now and then a piece of a region is not copied.
    HalfCopied,
    /// The log of a mirror does not keep the record of legs that failed.
    ForgottenRecord,
}

/// Where a mirror's log has the record of legs that failed.
pub(super) const RECORD_AT: std::ops::Range<usize> = 16..512;

impl Breakage {
    /// It is made below an overlay.
    pub(super) fn is_of_overlays(self) -> bool {
        use Breakage::{BelievedRecords, EarlyTable, ForgottenRecords, ForgottenTable, IncompleteChunk};
        matches!(self, ForgottenTable | EarlyTable | IncompleteChunk | ForgottenRecords | BelievedRecords)
    }

    /// It is made in a multipath.
    pub(super) fn is_of_paths(self) -> bool {
        matches!(self, Breakage::UncountedEnd | Breakage::PathErrorTold)
    }

    /// It is made in a mirror, rather than in a snapshot or its origin.
    pub(super) fn is_of_mirrors(self) -> bool {
        use Breakage::{EarlyUnmark, ForgottenMark, ForgottenRecord, HalfCopied, StaleLeg};
        matches!(self, ForgottenMark | EarlyUnmark | StaleLeg | HalfCopied | ForgottenRecord)
    }

    /// Those of targets that keep state.
    pub const OF_TARGETS: [Breakage; 10] = [
        Breakage::ForgottenCopy,
        Breakage::EarlyException,
        Breakage::PassedBy,
        Breakage::UnrecordedLoss,
        Breakage::UnheededHeader,
        Breakage::ForgottenMark,
        Breakage::EarlyUnmark,
        Breakage::StaleLeg,
        Breakage::HalfCopied,
        Breakage::ForgottenRecord,
    ];

    /// Those of stacks.
    pub const ALL: [Breakage; 17] = [
        Breakage::EarlyFua,
        Breakage::SkippedFlush,
        Breakage::DroppedTail,
        Breakage::SwappedHalves,
        Breakage::ForgottenSyncError,
        Breakage::LostRequest,
        Breakage::LeakedMemory,
        Breakage::IgnoredZeroes,
        Breakage::ForgetfulSwap,
        Breakage::ForgottenPart,
        Breakage::ForgottenTable,
        Breakage::EarlyTable,
        Breakage::IncompleteChunk,
        Breakage::ForgottenRecords,
        Breakage::BelievedRecords,
        Breakage::UncountedEnd,
        Breakage::PathErrorTold,
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
    /// Where the last write ended.
    end: Bytes,
}

impl Broken {
    pub(super) fn new(child: NodeId, breakage: Breakage, rng: Rng) -> Broken {
        Broken { child, breakage, rng, before: Vec::new(), halves: Vec::new(), end: Bytes::ZERO }
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
        let follows = req.op == Op::Write && std::mem::replace(&mut self.end, req.end()) == req.offset;
        match (self.breakage, req.op) {
            (Breakage::ForgottenPart, Op::Write) if follows => return Verdict::Up(Status::Ok),
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

/// A node that makes one of the mistakes of overlays and of targets, between one and a device of its own.
pub(super) struct BrokenBelow {
    child: NodeId,
    breakage: Breakage,
    /// Where the store's data begins, or what is forgotten of it.
    data_at: Bytes,
    /// The flush before the last was not done.
    owed: bool,
}

impl BrokenBelow {
    pub(super) fn new(child: NodeId, breakage: Breakage, data_at: Bytes) -> BrokenBelow {
        BrokenBelow { child, breakage, data_at, owed: false }
    }
}

impl<R: Ring> Node<R> for BrokenBelow {
    fn submit(&mut self, _: Cookie, req: &mut Request, cx: &mut Cx<'_, R>) -> Verdict {
        match (self.breakage, req.op) {
            (Breakage::ForgottenTable, Op::Write) if req.offset < self.data_at => {
                return Verdict::Up(Status::Ok);
            }
            (Breakage::ForgottenRecords, Op::Write)
                if (self.data_at.0..self.data_at.0.next_multiple_of(1 << 20)).contains(&req.offset.0) =>
            {
                return Verdict::Up(Status::Ok);
            }
            (Breakage::ForgottenCopy, Op::Write) if req.offset >= self.data_at => {
                return Verdict::Up(Status::Ok);
            }
            (Breakage::EarlyException, Op::Flush) | (Breakage::ForgottenMark, Op::Write) => {
                return Verdict::Up(Status::Ok);
            }
            (Breakage::ForgottenRecord, Op::Write) => {
                // The buffer is the mirror's own, and is written from its start.
                let first = cx.segments(req.data, req.len.0).next();
                if let Some(first) = first.filter(|first| first.len as usize >= RECORD_AT.end) {
                    cx.ring.bytes_mut(first)[RECORD_AT].fill(0);
                }
            }
            (Breakage::EarlyTable, Op::Flush) => {
                self.owed = !self.owed;
                if self.owed {
                    return Verdict::Up(Status::Ok);
                }
            }
            // What completes a chunk comes from memory of the overlay's own, in one piece.
            (Breakage::IncompleteChunk, Op::Read)
                if req.len == Bytes(4096) && req.offset.is_aligned(4096) =>
            {
                let pieces: Vec<_> = cx.segments(req.data, req.len.0).collect();
                pieces.into_iter().for_each(|piece| cx.ring.bytes_mut(piece).fill(0));
                return Verdict::Up(Status::Ok);
            }
            _ => {}
        }
        Verdict::Down(self.child)
    }

    fn end_io(&mut self, _: Cookie, req: &mut Request, status: Status, _: &mut Cx<'_, R>) -> Verdict {
        let unheard = self.breakage == Breakage::StaleLeg && req.op == Op::Write;
        Verdict::Up(if unheard { Status::Ok } else { status })
    }
}

/// A node above an origin that lets writes past it to its device, now and then.
pub(super) struct PassBy {
    origin: NodeId,
    device: NodeId,
    rng: Rng,
}

impl PassBy {
    pub(super) fn new(origin: NodeId, device: NodeId, rng: Rng) -> PassBy {
        PassBy { origin, device, rng }
    }
}

impl<R: Ring> Node<R> for PassBy {
    fn submit(&mut self, _: Cookie, req: &mut Request, _: &mut Cx<'_, R>) -> Verdict {
        let passes = req.op == Op::Write && self.rng.chance(50);
        Verdict::Down(if passes { self.device } else { self.origin })
    }
}
