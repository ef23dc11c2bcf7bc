//! Seeded faults, which simulations must find: they prove that the checks work.

use block::{Bytes, Cookie, Flags, Op, Request, Status};
use queue::{ChildKind, Cx, Node, NodeId, Ring, Verdict};
use sim::Rng;

/// A seeded fault.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SeededFault {
    /// FUA writes are acknowledged before they are stable.
    EarlyFua,
    /// Flushes are acknowledged but not executed.
    SkippedFlush,
    /// The last sector of a write is not written.
    DroppedTail,
    /// A request is split in two, and each half gets the other's data.
    SwappedHalves,
    /// A flush succeeds after one that failed and lost data.
    ForgottenSyncError,
    /// At times a request never completes.
    LostRequest,
    /// At times memory is allocated and never freed.
    LeakedMemory,
    /// Write zeroes is treated as a hint.
    IgnoredZeroes,
    /// A swapped-in stack does not know that a sync has failed.
    ForgetfulSwap,
    /// A write adjacent to the previous one is treated as merged with it, and dropped.
    ForgottenPart,
    /// An overlay's table is not written.
    ForgottenTable,
    /// An overlay's table is written before the data that it describes is on stable storage.
    EarlyTable,
    /// An overlay's chunk is not completed from the origin when it is written in part.
    IncompleteChunk,
    /// An overlay's records are not written.
    ForgottenRecords,
    /// An overlay uses its journal without verifying checksums.
    BelievedRecords,
    /// Multipath does not count that a request has returned from a path.
    UncountedEnd,
    /// A path's error is returned although another path could have executed the request.
    PathErrorTold,
    /// A snapshot's copies are not written.
    ForgottenCopy,
    /// An exception is written before its data is on stable storage.
    EarlyException,
    /// At times a write to an origin is not copied for its snapshots first.
    PassedBy,
    /// The header of a lost snapshot does not record the loss.
    UnrecordedLoss,
    /// The header of a lost snapshot counts as written although its disk has failed.
    UnheededHeader,
    /// Regions are written before the log has their marks.
    ForgottenMark,
    /// Marks are cleared before the data is on stable storage.
    EarlyUnmark,
    /// A mirror ignores that one of its devices has failed a write.
    StaleLeg,
    /// At times a part of a region is not copied.
    HalfCopied,
    /// The log of a mirror does not keep the record of failed legs.
    ForgottenRecord,
}

/// Bytes of a mirror's log with the record of failed legs.
pub(super) const RECORD_AT: std::ops::Range<usize> = 16..512;

impl SeededFault {
    /// Returns whether the fault is below an overlay.
    pub(super) fn is_of_overlays(self) -> bool {
        use SeededFault::{BelievedRecords, EarlyTable, ForgottenRecords, ForgottenTable, IncompleteChunk};
        matches!(self, ForgottenTable | EarlyTable | IncompleteChunk | ForgottenRecords | BelievedRecords)
    }

    /// Returns whether the fault is in a multipath.
    pub(super) fn is_of_paths(self) -> bool {
        matches!(self, SeededFault::UncountedEnd | SeededFault::PathErrorTold)
    }

    /// Returns whether the fault is in a mirror, rather than in a snapshot or its origin.
    pub(super) fn is_of_mirrors(self) -> bool {
        use SeededFault::{EarlyUnmark, ForgottenMark, ForgottenRecord, HalfCopied, StaleLeg};
        matches!(self, ForgottenMark | EarlyUnmark | StaleLeg | HalfCopied | ForgottenRecord)
    }

    /// Faults of targets that keep state.
    pub const OF_TARGETS: [SeededFault; 10] = [
        SeededFault::ForgottenCopy,
        SeededFault::EarlyException,
        SeededFault::PassedBy,
        SeededFault::UnrecordedLoss,
        SeededFault::UnheededHeader,
        SeededFault::ForgottenMark,
        SeededFault::EarlyUnmark,
        SeededFault::StaleLeg,
        SeededFault::HalfCopied,
        SeededFault::ForgottenRecord,
    ];

    /// Faults of stacks.
    pub const ALL: [SeededFault; 17] = [
        SeededFault::EarlyFua,
        SeededFault::SkippedFlush,
        SeededFault::DroppedTail,
        SeededFault::SwappedHalves,
        SeededFault::ForgottenSyncError,
        SeededFault::LostRequest,
        SeededFault::LeakedMemory,
        SeededFault::IgnoredZeroes,
        SeededFault::ForgetfulSwap,
        SeededFault::ForgottenPart,
        SeededFault::ForgottenTable,
        SeededFault::EarlyTable,
        SeededFault::IncompleteChunk,
        SeededFault::ForgottenRecords,
        SeededFault::BelievedRecords,
        SeededFault::UncountedEnd,
        SeededFault::PathErrorTold,
    ];
}

/// A layer with one of the faults.
pub(super) struct Broken {
    child: NodeId,
    seeded_fault: SeededFault,
    rng: Rng,
    /// By tag: the request as it arrived.
    before: Vec<Request>,
    /// By tag: halves in flight.
    halves: Vec<u8>,
    /// End of the last write.
    end: Bytes,
}

impl Broken {
    pub(super) fn new(child: NodeId, seeded_fault: SeededFault, rng: Rng) -> Broken {
        Broken { child, seeded_fault, rng, before: Vec::new(), halves: Vec::new(), end: Bytes::ZERO }
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
        match (self.seeded_fault, req.op) {
            (SeededFault::ForgottenPart, Op::Write) if follows => return Verdict::Up(Status::Ok),
            (SeededFault::EarlyFua, Op::Write) => req.flags = req.flags.difference(Flags::FUA),
            (SeededFault::SkippedFlush, Op::Flush) => return Verdict::Up(Status::Ok),
            (SeededFault::IgnoredZeroes, Op::WriteZeroes) => return Verdict::Up(Status::Ok),
            (SeededFault::DroppedTail, Op::Write) if req.len.0 > 512 => req.len = req.len - Bytes(512),
            (SeededFault::SwappedHalves, Op::Write) => return self.swap_halves(io, req, cx),
            (SeededFault::LostRequest, _) if self.rng.chance(20) => return Verdict::Held,
            (SeededFault::LeakedMemory, _) if self.rng.chance(20) => drop(cx.ring.allocate(4096)),
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

/// A node with one of the faults of overlays and of targets, between one and a device of its own.
pub(super) struct BrokenBelow {
    child: NodeId,
    seeded_fault: SeededFault,
    /// Offset of the store's data, or of the forgotten part.
    data_at: Bytes,
    /// The flush before the last was not executed.
    owed: bool,
}

impl BrokenBelow {
    pub(super) fn new(child: NodeId, seeded_fault: SeededFault, data_at: Bytes) -> BrokenBelow {
        BrokenBelow { child, seeded_fault, data_at, owed: false }
    }
}

impl<R: Ring> Node<R> for BrokenBelow {
    fn submit(&mut self, _: Cookie, req: &mut Request, cx: &mut Cx<'_, R>) -> Verdict {
        match (self.seeded_fault, req.op) {
            (SeededFault::ForgottenTable, Op::Write) if req.offset < self.data_at => {
                return Verdict::Up(Status::Ok);
            }
            (SeededFault::ForgottenRecords, Op::Write)
                if (self.data_at.0..self.data_at.0.next_multiple_of(1 << 20)).contains(&req.offset.0) =>
            {
                return Verdict::Up(Status::Ok);
            }
            (SeededFault::ForgottenCopy, Op::Write) if req.offset >= self.data_at => {
                return Verdict::Up(Status::Ok);
            }
            (SeededFault::EarlyException, Op::Flush) | (SeededFault::ForgottenMark, Op::Write) => {
                return Verdict::Up(Status::Ok);
            }
            (SeededFault::ForgottenRecord, Op::Write) => {
                // The buffer is the mirror's own, and is written from its start.
                let first = cx.segments(req.data, req.len.0).next();
                if let Some(first) = first.filter(|first| first.len as usize >= RECORD_AT.end) {
                    cx.ring.bytes_mut(first)[RECORD_AT].fill(0);
                }
            }
            (SeededFault::EarlyTable, Op::Flush) => {
                self.owed = !self.owed;
                if self.owed {
                    return Verdict::Up(Status::Ok);
                }
            }
            // A chunk is completed from memory of the overlay's own, in one segment.
            (SeededFault::IncompleteChunk, Op::Read)
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
        let unheard = self.seeded_fault == SeededFault::StaleLeg && req.op == Op::Write;
        Verdict::Up(if unheard { Status::Ok } else { status })
    }
}

/// A node above an origin that at times lets writes bypass it to its device.
pub(super) struct Bypass {
    origin: NodeId,
    device: NodeId,
    rng: Rng,
}

impl Bypass {
    pub(super) fn new(origin: NodeId, device: NodeId, rng: Rng) -> Bypass {
        Bypass { origin, device, rng }
    }
}

impl<R: Ring> Node<R> for Bypass {
    fn submit(&mut self, _: Cookie, req: &mut Request, _: &mut Cx<'_, R>) -> Verdict {
        let passes = req.op == Op::Write && self.rng.chance(50);
        Verdict::Down(if passes { self.device } else { self.origin })
    }
}
