//! A mirror as one hardware queue sees it.
//!
//! A write is held here while its copies are under way. When one of those fails, which one is found by writing again, device
//! by device: the copies do not say.

use super::shared::Shared;
use super::standing::{Grant, Ill};
use block::{Bytes, Cookie, Data, Flags, Op, Request, Segment, Status};
use queue::{ChildKind, Cx, Node, NodeId, Ring, Verdict};
use std::sync::Arc;

/// How long a request waits before it looks again.
const LOOK_NS: u64 = 100_000;
/// How much longer than that, at most, as a power of two.
const LOOKS_SHIFT_MAX: u32 = 6;
/// How often a request that is held for the next table looks, and how often at most: after a minute nobody brings one.
const HOLD_NS: u64 = 20_000_000;
const HOLDS_MAX: u32 = 3000;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Phase {
    /// A read at this leg.
    Read(usize),
    /// A read is tried again soon.
    ReadAgain,
    /// A write waits for its region, the log, or memory. Whether it has entered its region.
    Wait(bool),
    /// The marks go to disk.
    Log,
    /// Copies to all.
    All,
    /// One after the other, at this one.
    Each(usize),
    /// Soon at this one.
    EachAgain(usize),
    /// Done; the log is to say which leg failed before that is acknowledged.
    Record,
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
    /// How often it waited for something that passes.
    waits: u32,
    /// A copy came up for another table to take.
    requeue: bool,
    /// Devices that do not know the operation, as bits.
    unknown: u32,
    buffer: Segment,
}

impl Slot {
    fn new(offset: Bytes, data: Data, flags: Flags) -> Slot {
        Slot {
            phase: Phase::Hold,
            offset,
            data,
            flags,
            legs: 0,
            pieces: 0,
            failed: 0,
            waits: 0,
            requeue: false,
            unknown: 0,
            buffer: Segment::EMPTY,
        }
    }
}

/// Whether a status says nothing of the device: it had no room for the request just then.
fn passes(status: Status) -> bool {
    matches!(status, Status::Again | Status::Resource | Status::DeviceResource)
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
        self.look_again(io, Phase::Wait(entered), cx)
    }

    /// Look again after a while, which grows.
    fn look_again<R: Ring>(&mut self, io: Cookie, phase: Phase, cx: &mut Cx<'_, R>) -> Verdict {
        let slot = self.slot(io);
        slot.phase = phase;
        slot.waits += 1;
        cx.timer(io, cx.now().after(LOOK_NS << (slot.waits - 1).min(LOOKS_SHIFT_MAX)));
        Verdict::Held
    }

    /// Whether what passes is still waited for: for a minute.
    fn is_patient(&mut self, io: Cookie) -> bool {
        u64::from(self.slot(io).waits) * (LOOK_NS << LOOKS_SHIFT_MAX) < u64::from(HOLDS_MAX) * HOLD_NS
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
            self.shared.mark(region, cx.now());
            if !self.shared.is_logged(region) {
                return self.log(io, cx);
            }
        }
        let whole = req.op == Op::Flush || self.shared.is_in_sync(region);
        if req.op != Op::Flush && whole && self.shared.handles_errors && self.shared.has_log_failed() {
            return self.without_log(io, region, cx);
        }
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
        if self.write_log(io, cx) {
            self.slot(io).phase = Phase::Log;
            return Verdict::Held;
        }
        self.wait(io, true, cx)
    }

    /// Write the log as it is to be now. False: somebody else does, or there is no memory.
    fn write_log<R: Ring>(&mut self, io: Cookie, cx: &mut Cx<'_, R>) -> bool {
        let Some(device) = self.shared.log_device.filter(|_| cx.spare_children() > 0) else { return false };
        let len = self.shared.log_len(4096) as u32;
        let Some(buffer) = cx.ring.allocate(len) else { return false };
        if !self.shared.claim_log() {
            cx.ring.free(buffer);
            return false;
        }
        self.shared.encode_log(cx.ring.bytes_mut(buffer));
        let mut write = Request::new(Op::Write, Bytes::ZERO, Bytes(len.into()));
        (write.data, write.flags) = (Data::One(buffer), Flags::FUA);
        self.slot(io).buffer = buffer;
        let spawned = cx.spawn(io, self.below[device], ChildKind::Copy, write);
        debug_assert!(spawned.is_ok(), "a spare child was seen");
        true
    }

    /// A write or flush is done. It is acknowledged once a restart would not take a leg for right that lacks it.
    fn acknowledge<R: Ring>(&mut self, io: Cookie, cx: &mut Cx<'_, R>) -> Verdict {
        match self.shared.grant() {
            Grant::Yes => Verdict::Up(Status::Ok),
            Grant::Recorded if self.write_log(io, cx) => {
                self.slot(io).phase = Phase::Record;
                Verdict::Held
            }
            Grant::Recorded => self.look_again(io, Phase::Record, cx),
            Grant::No if self.shared.handles_errors && !self.shared.keeps_log => self.hold_for_table(io, cx),
            Grant::No => Verdict::Up(Status::IoError),
        }
    }

    /// A write that is to be marked and cannot be: nothing is written until there is a table with a log that can. Regions
    /// that are out of sync have no mark to lose, and are written on.
    fn without_log<R: Ring>(&mut self, io: Cookie, region: u64, cx: &mut Cx<'_, R>) -> Verdict {
        self.shared.leave(region);
        if self.shared.keeps_log {
            return Verdict::Up(Status::IoError);
        }
        self.hold_for_table(io, cx)
    }

    /// Whoever looks after the devices puts another table in this one's place first.
    fn hold_for_table<R: Ring>(&mut self, io: Cookie, cx: &mut Cx<'_, R>) -> Verdict {
        (self.slot(io).phase, self.slot(io).pieces) = (Phase::Hold, 0);
        cx.timer(io, cx.now().after(HOLD_NS));
        Verdict::Held
    }

    /// Find out which of its copies fails.
    fn each<R: Ring>(&mut self, io: Cookie, req: &Request, from: usize, cx: &mut Cx<'_, R>) -> Verdict {
        let Slot { legs, failed, .. } = *self.slot(io);
        let next = (from..self.shared.legs.len()).find(|leg| legs & 1 << leg != 0);
        let Some(leg) = next else { return self.end(io, req, legs & !failed, failed, cx) };
        self.slot(io).phase = Phase::Each(leg);
        let mut copy = self.moved(req, leg);
        copy.flags = copy.flags.without(Flags::NOWAIT);
        if cx.spawn(io, self.child(leg), ChildKind::Copy, copy).is_err() {
            return self.look_again(io, Phase::EachAgain(leg), cx);
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
        let unknown = self.slots[io.tag.index()].unknown;
        let refused = req.op == Op::Discard || req.op == Op::WriteZeroes && unknown != 0;
        if failed != 0 && !flush && (done == 0 || refused) && (done != 0 || failed != unknown) {
            // Some have it, or part of it, and some do not, and no device is to blame.
            shared.copy_again(region);
        }
        if failed != 0 && refused {
            // As in the kernel this is no fault of a device: zeroes are then written by whoever asked.
            shared.leave(region);
            return Verdict::Up(Status::NotSupported);
        }
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
            return self.hold_for_table(io, cx);
        }
        self.acknowledge(io, cx)
    }

    /// Another table is to take the request, whole: some devices may have it and some not until then.
    fn requeue(&mut self, req: &Request, was_sent: bool) -> Verdict {
        if req.op != Op::Flush {
            let region = self.shared.region_of(req.offset);
            if was_sent {
                self.shared.copy_again(region);
            }
            self.shared.leave(region);
        }
        Verdict::Up(Status::Requeue)
    }

    fn hold<R: Ring>(&mut self, io: Cookie, cx: &mut Cx<'_, R>) -> Verdict {
        self.slot(io).pieces += 1;
        if !self.shared.is_suspended() && self.slot(io).pieces < HOLDS_MAX {
            cx.timer(io, cx.now().after(HOLD_NS));
            return Verdict::Held;
        }
        let requeues = self.shared.requeues.load(std::sync::atomic::Ordering::Relaxed);
        let requeues = requeues && self.shared.is_suspended();
        Verdict::Up(if requeues { Status::Requeue } else { Status::IoError })
    }
}

impl<R: Ring> Node<R> for MirrorNode {
    fn attach(&mut self, _: NodeId, tags: usize) {
        self.slots = vec![Slot::new(Bytes::ZERO, Data::NONE, Flags::NONE); tags].into();
    }

    fn submit(&mut self, io: Cookie, req: &mut Request, cx: &mut Cx<'_, R>) -> Verdict {
        *self.slot(io) = Slot::new(req.offset, req.data, req.flags);
        match req.op {
            Op::Read | Op::Prefetch => self.read(io, req).unwrap_or(Verdict::Up(Status::IoError)),
            Op::Write | Op::WriteZeroes | Op::Discard | Op::Flush => self.write(io, req, false, cx),
            _ => Verdict::Up(Status::NotSupported),
        }
    }

    fn end_io(&mut self, io: Cookie, req: &mut Request, status: Status, cx: &mut Cx<'_, R>) -> Verdict {
        let Slot { phase, offset, flags, .. } = *self.slot(io);
        let nowait = flags.has(Flags::NOWAIT);
        // As it arrived, from here on: whether it is held, sent to another leg or goes up.
        (req.offset, req.flags) = (offset, flags);
        if let (Phase::Read(leg), Op::Read) = (phase, req.op) {
            match status {
                Status::Ok | Status::Requeue | Status::NotSupported | Status::Invalid => {}
                _ if passes(status) => {
                    if !nowait && self.is_patient(io) {
                        self.slot(io).legs &= !(1 << leg);
                        return self.look_again(io, Phase::ReadAgain, cx);
                    }
                }
                _ => {
                    self.shared.fail(leg, Ill::Read);
                    if let Some(again) = self.read(io, req) {
                        return again;
                    }
                }
            }
        }
        Verdict::Up(status)
    }

    fn reap(&mut self, io: Cookie, req: &mut Request, _: i64, cx: &mut Cx<'_, R>) -> Verdict {
        match self.slot(io).phase {
            Phase::Wait(entered) => self.write(io, req, entered, cx),
            Phase::ReadAgain => self.read(io, req).unwrap_or(Verdict::Up(Status::IoError)),
            Phase::EachAgain(leg) => self.each(io, req, leg, cx),
            Phase::Record => self.acknowledge(io, cx),
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
                if status == Status::Requeue || passes(status) && self.is_patient(io) {
                    self.shared.log_stays();
                    return match status {
                        Status::Requeue => self.requeue(req, false),
                        _ => self.wait(io, true, cx),
                    };
                }
                self.shared.log_ends(status.is_ok());
                self.write(io, req, true, cx)
            }
            Phase::Record => {
                cx.ring.free(self.slot(io).buffer);
                match status {
                    Status::Requeue => {
                        self.shared.log_stays();
                        // The region was left: the whole request is carried out again.
                        return Verdict::Up(Status::Requeue);
                    }
                    _ if passes(status) && self.is_patient(io) => self.shared.log_stays(),
                    _ => {
                        self.shared.log_ends(status.is_ok());
                        return self.acknowledge(io, cx);
                    }
                }
                self.look_again(io, Phase::Record, cx)
            }
            Phase::Each(_) if status == Status::Requeue => self.requeue(req, true),
            Phase::Each(leg) => {
                if passes(status) && self.is_patient(io) {
                    return self.look_again(io, Phase::EachAgain(leg), cx);
                }
                let slot = self.slot(io);
                slot.failed |= u32::from(!status.is_ok()) << leg;
                slot.unknown |= u32::from(status == Status::NotSupported) << leg;
                self.each(io, req, leg + 1, cx)
            }
            _ => {
                let slot = self.slot(io);
                slot.pieces -= 1;
                slot.failed |= u32::from(!status.is_ok());
                slot.requeue |= status == Status::Requeue;
                match (slot.pieces, slot.failed, slot.legs) {
                    (0, ..) if slot.requeue => self.requeue(req, true),
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
