//! A mirror as one hardware queue sees it.
//!
//! A write is held here while its copies are under way. When one of those fails, which one is found by writing again, device
//! by device: the copies do not say.

use super::shared::{Ill, Shared};
use block::{Bytes, Cookie, Data, Flags, Op, Request, Segment, Status};
use queue::{ChildKind, Cx, Node, NodeId, Ring, Verdict};
use std::sync::Arc;

/// How long a request waits before it looks again.
const LOOK_NS: u64 = 100_000;
/// How often a request that is held for the next table looks, and how often at most: after a minute nobody brings one.
const HOLD_NS: u64 = 20_000_000;
const HOLDS_MAX: u32 = 3000;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Phase {
    /// A read at this leg.
    Read(usize),
    /// A write waits for its region, the log, or memory. Whether it has entered its region.
    Wait(bool),
    /// The marks go to disk.
    Log,
    /// Copies to all.
    All,
    /// One after the other, at this one.
    Each(usize),
    /// Held for the table that comes.
    Hold,
}

#[derive(Clone, Copy)]
struct Slot {
    phase: Phase,
    offset: Bytes,
    data: Data,
    flags: Flags,
    /// Legs that were tried, or that the write is for, as bits.
    legs: u32,
    pieces: u32,
    /// Legs that failed, as bits; anything at all while copies do not say which.
    failed: u32,
    buffer: Segment,
}

pub(super) struct MirrorNode {
    shared: Arc<Shared>,
    below: Box<[NodeId]>,
    slots: Box<[Slot]>,
}

impl MirrorNode {
    pub(super) fn new(shared: Arc<Shared>, below: &[NodeId]) -> MirrorNode {
        MirrorNode { shared, below: below.into(), slots: Box::default() }
    }

    fn slot(&mut self, io: Cookie) -> &mut Slot {
        &mut self.slots[io.tag.index()]
    }

    fn child(&self, leg: usize) -> NodeId {
        self.below[self.shared.legs[leg].device]
    }

    fn moved(&self, req: &Request, leg: usize) -> Request {
        let offset =
            if req.op == Op::Flush { req.offset } else { req.offset + self.shared.legs[leg].start.bytes() };
        Request { offset, ..*req }
    }

    fn read(&mut self, io: Cookie, req: &mut Request) -> Option<Verdict> {
        let Slot { offset, legs, .. } = *self.slot(io);
        let leg = self.shared.readable(self.shared.region_of(offset), legs)?;
        let slot = self.slot(io);
        slot.legs |= 1 << leg;
        slot.phase = Phase::Read(leg);
        (req.offset, req.data, req.flags) = (slot.offset, slot.data, slot.flags);
        *req = self.moved(req, leg);
        Some(Verdict::Down(self.child(leg)))
    }

    fn wait<R: Ring>(&mut self, io: Cookie, entered: bool, cx: &mut Cx<'_, R>) -> Verdict {
        self.slot(io).phase = Phase::Wait(entered);
        cx.timer(io, cx.now().after(LOOK_NS));
        Verdict::Held
    }

    /// A write, from where it stands.
    fn write<R: Ring>(
        &mut self,
        io: Cookie,
        req: &Request,
        mut entered: bool,
        cx: &mut Cx<'_, R>,
    ) -> Verdict {
        let region = self.shared.region_of(req.offset);
        if cx.spare_children() < self.shared.legs.len() {
            return self.wait(io, entered, cx);
        }
        if req.op != Op::Flush {
            entered = entered || self.shared.enter(region);
            if !entered {
                return self.wait(io, false, cx);
            }
            self.shared.mark(region);
            if !self.shared.is_logged(region) {
                return self.log(io, cx);
            }
        }
        let whole = req.op == Op::Flush || self.shared.is_in_sync(region);
        let primary = self.shared.primary();
        let mut legs = 0;
        for (number, leg) in self.shared.legs.iter().enumerate() {
            if leg.is_alive() && (whole || number == primary) {
                legs |= 1 << number;
            }
        }
        if legs == 0 {
            return self.end(io, req, 0, 0, cx);
        }
        *self.slot(io) =
            Slot { phase: Phase::All, legs, pieces: legs.count_ones(), failed: 0, ..*self.slot(io) };
        for leg in (0..self.shared.legs.len()).filter(|leg| legs & 1 << leg != 0) {
            let spawned = cx.spawn(io, self.child(leg), ChildKind::Copy, self.moved(req, leg));
            debug_assert!(spawned.is_ok(), "spare children were seen");
        }
        Verdict::Held
    }

    /// The marks are to be on disk first.
    fn log<R: Ring>(&mut self, io: Cookie, cx: &mut Cx<'_, R>) -> Verdict {
        let Some(device) = self.shared.log_device else { return self.wait(io, true, cx) };
        let len = self.shared.log_len(4096) as u32;
        let Some(buffer) = cx.ring.allocate(len) else { return self.wait(io, true, cx) };
        if !self.shared.claim_log() {
            cx.ring.free(buffer);
            return self.wait(io, true, cx);
        }
        self.shared.encode_log(cx.ring.bytes_mut(buffer));
        let mut write = Request::new(Op::Write, Bytes::ZERO, Bytes(len.into()));
        (write.data, write.flags) = (Data::One(buffer), Flags::FUA);
        (self.slot(io).phase, self.slot(io).buffer) = (Phase::Log, buffer);
        let spawned = cx.spawn(io, self.below[device], ChildKind::Copy, write);
        debug_assert!(spawned.is_ok(), "spare children were seen");
        Verdict::Held
    }

    /// Find out which of its copies fails.
    fn each<R: Ring>(&mut self, io: Cookie, req: &Request, from: usize, cx: &mut Cx<'_, R>) -> Verdict {
        let Slot { legs, failed, .. } = *self.slot(io);
        let next = (from..self.shared.legs.len()).find(|leg| legs & 1 << leg != 0);
        let Some(leg) = next else { return self.end(io, req, legs & !failed, failed, cx) };
        self.slot(io).phase = Phase::Each(leg);
        let spawned = cx.spawn(io, self.child(leg), ChildKind::Copy, self.moved(req, leg));
        if spawned.is_err() {
            return self.end(io, req, 0, 0, cx);
        }
        Verdict::Held
    }

    /// A write or a flush is over. `done`, `failed`: legs.
    fn end<R: Ring>(
        &mut self,
        io: Cookie,
        req: &Request,
        done: u32,
        failed: u32,
        cx: &mut Cx<'_, R>,
    ) -> Verdict {
        let (flush, shared) = (req.op == Op::Flush, &self.shared);
        let region = shared.region_of(req.offset);
        if failed != 0 && done != 0 {
            // In this order: another is to be the first one while that has all.
            let ill = if flush { Ill::Flush } else { Ill::Write };
            (0..shared.legs.len()).filter(|leg| failed & 1 << leg != 0).for_each(|leg| shared.fail(leg, ill));
            if !flush {
                shared.lose_sync(region);
            }
        } else if failed != 0 && flush {
            shared.keep_marks();
        }
        if !flush {
            shared.leave(region);
        }
        let lost_log = shared.keeps_log && shared.has_log_failed();
        if done == 0 || lost_log {
            return Verdict::Up(Status::IoError);
        }
        if failed != 0 && shared.handles_errors && !shared.keeps_log {
            // Whoever looks after the device puts another table in its place first.
            (self.slot(io).phase, self.slot(io).pieces) = (Phase::Hold, 0);
            cx.timer(io, cx.now().after(HOLD_NS));
            return Verdict::Held;
        }
        Verdict::Up(Status::Ok)
    }

    fn hold<R: Ring>(&mut self, io: Cookie, cx: &mut Cx<'_, R>) -> Verdict {
        self.slot(io).pieces += 1;
        if !self.shared.is_suspended() && self.slot(io).pieces < HOLDS_MAX {
            cx.timer(io, cx.now().after(HOLD_NS));
            return Verdict::Held;
        }
        let requeues = self.shared.requeues.load(std::sync::atomic::Ordering::Relaxed);
        let _ = io;
        let requeues = requeues && self.shared.is_suspended();
        Verdict::Up(if requeues { Status::Requeue } else { Status::IoError })
    }
}

impl<R: Ring> Node<R> for MirrorNode {
    fn attach(&mut self, _: NodeId, tags: usize) {
        let none = Slot {
            phase: Phase::Hold,
            offset: Bytes::ZERO,
            data: Data::NONE,
            flags: Flags::NONE,
            legs: 0,
            pieces: 0,
            failed: 0,
            buffer: Segment::EMPTY,
        };
        self.slots = vec![none; tags].into();
    }

    fn submit(&mut self, io: Cookie, req: &mut Request, cx: &mut Cx<'_, R>) -> Verdict {
        let (offset, data, flags) = (req.offset, req.data, req.flags);
        *self.slot(io) = Slot {
            phase: Phase::Hold,
            offset,
            data,
            flags,
            legs: 0,
            pieces: 0,
            failed: 0,
            buffer: Segment::EMPTY,
        };
        match req.op {
            Op::Read | Op::Prefetch => self.read(io, req).unwrap_or(Verdict::Up(Status::IoError)),
            Op::Write | Op::WriteZeroes | Op::Discard | Op::Flush => self.write(io, req, false, cx),
            _ => Verdict::Up(Status::NotSupported),
        }
    }

    fn end_io(&mut self, io: Cookie, req: &mut Request, status: Status, _: &mut Cx<'_, R>) -> Verdict {
        let Slot { phase, offset, flags, .. } = *self.slot(io);
        if let (Phase::Read(leg), Op::Read, true) = (phase, req.op, status.is_path_error()) {
            self.shared.fail(leg, Ill::Read);
            if let Some(again) = self.read(io, req) {
                return again;
            }
        }
        (req.offset, req.flags) = (offset, flags);
        Verdict::Up(status)
    }

    fn reap(&mut self, io: Cookie, req: &mut Request, _: i64, cx: &mut Cx<'_, R>) -> Verdict {
        match self.slot(io).phase {
            Phase::Wait(entered) => self.write(io, req, entered, cx),
            _ => self.hold(io, cx),
        }
    }

    fn child_end(
        &mut self,
        io: Cookie,
        req: &mut Request,
        _: &Request,
        status: Status,
        cx: &mut Cx<'_, R>,
    ) -> Verdict {
        match self.slot(io).phase {
            Phase::Log => {
                cx.ring.free(self.slot(io).buffer);
                self.shared.log_ends(status.is_ok());
                self.write(io, req, true, cx)
            }
            Phase::Each(leg) => {
                if !status.is_ok() {
                    self.slot(io).failed |= 1 << leg;
                }
                self.each(io, req, leg + 1, cx)
            }
            _ => {
                let slot = self.slot(io);
                slot.pieces -= 1;
                slot.failed |= u32::from(!status.is_ok());
                match (slot.pieces, slot.failed, slot.legs) {
                    (0, 0, legs) => self.end(io, req, legs, 0, cx),
                    (0, _, _) => {
                        slot.failed = 0;
                        self.each(io, req, 0, cx)
                    }
                    _ => Verdict::Held,
                }
            }
        }
    }

    /// Only waiting is ours to end, and a write that has entered its region goes on soon.
    fn cancel(&mut self, _: Cookie, _: &mut Cx<'_, R>) {}
}
