//! The node of a mirror in one hardware queue.
//!
//! A write is held while its copies are in flight to all legs. If one fails, the node writes again leg by leg
//! to find the failed leg, because the completion of a copy does not name its leg.

use super::legs::{Acknowledge, Failure};
use super::shared::Shared;
use block::{Bytes, Cookie, Data, Flags, Op, Request, Segment, Status};
use queue::{ChildKind, Cx, HeldRequests, Nanos, Node, NodeId, Ring, Verdict};
use std::sync::Arc;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::sync::atomic::fence;

/// The delay of a retry after a temporary error of a device or without memory: nothing reports the end of
/// that condition.
const RETRY_NS: u64 = 100_000;
/// The delay doubles with each retry, at most this often.
const RETRY_SHIFT_MAX: u32 = 6;
/// The longest time for which a request is held for the next table, and temporary errors are retried.
const HOLD_NS: u64 = 60_000_000_000;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Phase {
    /// A read is in flight at this leg.
    Read(usize),
    /// A read waits to be retried.
    RetryRead,
    /// A write waits for its region, the log, spare children or memory. The flag: it is registered in its
    /// region.
    Wait(bool),
    /// The marks are being written to the log.
    Log,
    /// Copies are in flight to all legs.
    All,
    /// The write is repeated leg by leg; it is in flight at this leg.
    Each(usize),
    /// The write is repeated leg by leg, and waits to be sent to this leg.
    RetryEach(usize),
    /// The write has completed; a failed leg is recorded in the log before the acknowledgement.
    Record,
    /// Held until the table is suspended, or until this time.
    Hold(Nanos),
}

#[derive(Clone, Copy)]
struct RequestState {
    phase: Phase,
    offset: Bytes,
    data: Data,
    flags: Flags,
    /// The legs that a read has tried, or that a write goes to, as bits.
    legs: u32,
    count: u32,
    /// The legs that failed, as bits; in phase `All` any value but 0 means that some copy failed.
    failed: u32,
    /// The number of retries after temporary errors.
    waits: u32,
    /// Whether a copy ended with `Requeue`.
    requeue: bool,
    /// The legs that do not support the operation, as bits.
    unsupported: u32,
    buffer: Segment,
}

impl RequestState {
    fn new(offset: Bytes, data: Data, flags: Flags) -> RequestState {
        RequestState {
            phase: Phase::Wait(false),
            offset,
            data,
            flags,
            legs: 0,
            count: 0,
            failed: 0,
            waits: 0,
            requeue: false,
            unsupported: 0,
            buffer: Segment::EMPTY,
        }
    }
}

/// Returns whether a status is a temporary lack of resources, not an error of the device.
fn is_temporary(status: Status) -> bool {
    matches!(status, Status::Again | Status::Resource | Status::DeviceResource)
}

pub(super) struct MirrorNode {
    shared: Arc<Shared>,
    below: Box<[NodeId]>,
    requests: Box<[RequestState]>,
    /// Writes that wait for a region, the log or spare children.
    held: HeldRequests,
    /// Writes that wait for the next table. Each has a timer.
    for_table: Vec<Cookie>,
}

impl MirrorNode {
    pub(super) fn new(shared: Arc<Shared>, below: &[NodeId]) -> MirrorNode {
        let (requests, held) = (Box::default(), HeldRequests::default());
        MirrorNode { shared, below: below.into(), requests, held, for_table: Vec::new() }
    }

    fn state(&mut self, io: Cookie) -> &mut RequestState {
        &mut self.requests[io.tag.index()]
    }

    fn child(&self, leg: usize) -> NodeId {
        self.below[self.shared.legs[leg].device]
    }

    fn for_leg(&self, req: &Request, leg: usize) -> Request {
        let offset =
            if req.op == Op::Flush { req.offset } else { req.offset + self.shared.legs[leg].start.bytes() };
        Request { offset, ..*req }
    }

    fn read(&mut self, io: Cookie, req: &mut Request) -> Option<Verdict> {
        let RequestState { offset, legs, .. } = *self.state(io);
        let leg = self.shared.readable(self.shared.region_of(offset), legs)?;
        let state = self.state(io);
        state.legs |= 1 << leg;
        state.phase = Phase::Read(leg);
        (req.offset, req.data, req.flags) = (state.offset, state.data, state.flags);
        *req = self.for_leg(req, leg);
        Some(Verdict::Down(self.child(leg)))
    }

    /// Holds a request until a resource that it needs is released. `may_proceed` checks whether that has
    /// happened in the meantime.
    fn hold_until<R: Ring>(
        &mut self,
        io: Cookie,
        phase: Phase,
        cx: &mut Cx<'_, R>,
        may_proceed: impl FnOnce(&Shared) -> bool,
    ) -> Verdict {
        self.state(io).phase = phase;
        self.held.listen(&self.shared.waiting, cx);
        let verdict = self.held.hold(io);
        if may_proceed(&self.shared) {
            self.held.resume_all();
        }
        verdict
    }

    /// Holds a request in `phase`, to be retried after a delay that grows.
    fn retry_later<R: Ring>(&mut self, io: Cookie, phase: Phase, cx: &mut Cx<'_, R>) -> Verdict {
        let state = self.state(io);
        state.phase = phase;
        state.waits += 1;
        cx.timer(io, cx.now().after(RETRY_NS << (state.waits - 1).min(RETRY_SHIFT_MAX)));
        Verdict::Held
    }

    /// Returns whether a temporary error is retried once more. Retries end after about a minute.
    fn may_retry(&mut self, io: Cookie) -> bool {
        u64::from(self.state(io).waits) * (RETRY_NS << RETRY_SHIFT_MAX) < HOLD_NS
    }

    /// Starts a write or flush, or continues it. `entered`: it is registered in its region.
    fn write<R: Ring>(
        &mut self,
        io: Cookie,
        req: &Request,
        mut entered: bool,
        cx: &mut Cx<'_, R>,
    ) -> Verdict {
        let region = self.shared.region_of(req.offset);
        if cx.spare_children() < self.shared.legs.len() {
            // A child of this node is in flight, and resumes the request when it ends.
            return self.hold_until(io, Phase::Wait(entered), cx, |_| false);
        }
        if req.op != Op::Flush {
            entered = entered || self.shared.begin_write(region);
            if !entered {
                return self.hold_until(io, Phase::Wait(false), cx, |shared| !shared.is_copying(region));
            }
            self.shared.mark(region, cx.now());
            if !self.shared.is_logged(region) {
                return self.log_mark(io, cx);
            }
        }
        let whole = req.op == Op::Flush || self.shared.is_in_sync(region);
        if req.op != Op::Flush && whole && self.shared.handles_errors && self.shared.has_log_failed() {
            return self.fail_unmarked(io, region, cx);
        }
        let primary = self.shared.primary();
        let mut legs = 0;
        for (number, leg) in self.shared.legs.iter().enumerate() {
            if leg.is_alive() && (whole || number == primary) {
                legs |= 1 << number;
            }
        }
        if legs == 0 {
            return self.finish(io, req, 0, 0, cx);
        }
        *self.state(io) =
            RequestState { phase: Phase::All, legs, count: legs.count_ones(), failed: 0, ..*self.state(io) };
        for leg in (0..self.shared.legs.len()).filter(|leg| legs & 1 << leg != 0) {
            let spawned = cx.spawn(io, self.child(leg), ChildKind::Copy, self.for_leg(req, leg));
            debug_assert!(spawned.is_ok(), "the spare children were counted");
        }
        Verdict::Held
    }

    /// Writes the mark of a region to the log, before the region is written.
    fn log_mark<R: Ring>(&mut self, io: Cookie, cx: &mut Cx<'_, R>) -> Verdict {
        self.write_log(io, Phase::Log, Phase::Wait(true), cx)
    }

    /// Writes the log in phase `writing`. If that is not possible now, the request waits in phase `waiting`.
    fn write_log<R: Ring>(
        &mut self,
        io: Cookie,
        writing: Phase,
        waiting: Phase,
        cx: &mut Cx<'_, R>,
    ) -> Verdict {
        let Some(device) = self.shared.log_device.filter(|_| cx.spare_children() > 0) else {
            return self.hold_until(io, waiting, cx, |_| false);
        };
        let len = self.shared.log_len(4096) as u32;
        let Some(buffer) = cx.ring.allocate(len) else { return self.retry_later(io, waiting, cx) };
        if !self.shared.claim_log() {
            cx.ring.free(buffer);
            return self.hold_until(io, waiting, cx, |shared| !shared.is_log_claimed());
        }
        self.shared.encode_log(cx.ring.bytes_mut(buffer));
        let mut write = Request::new(Op::Write, Bytes::ZERO, Bytes(len.into()));
        (write.data, write.flags) = (Data::One(buffer), Flags::FUA);
        self.state(io).buffer = buffer;
        let spawned = cx.spawn(io, self.below[device], ChildKind::Copy, write);
        debug_assert!(spawned.is_ok(), "the spare children were counted");
        self.state(io).phase = writing;
        Verdict::Held
    }

    /// Acknowledges a completed write or flush, once a restart would not use a leg without it.
    fn acknowledge<R: Ring>(&mut self, io: Cookie, cx: &mut Cx<'_, R>) -> Verdict {
        match self.shared.may_acknowledge() {
            Acknowledge::Yes => Verdict::Up(Status::Ok),
            Acknowledge::AfterLog => self.write_log(io, Phase::Record, Phase::Record, cx),
            Acknowledge::No if self.shared.handles_errors && !self.shared.keeps_log => {
                self.hold_for_table(io, cx)
            }
            Acknowledge::No => Verdict::Up(Status::IoError),
        }
    }

    /// Ends or holds a write to a region in sync that cannot be marked, as the log device has failed. Writes
    /// to regions out of sync need no mark and continue.
    fn fail_unmarked<R: Ring>(&mut self, io: Cookie, region: u64, cx: &mut Cx<'_, R>) -> Verdict {
        self.shared.end_write(region);
        if self.shared.keeps_log {
            return Verdict::Up(Status::IoError);
        }
        self.hold_for_table(io, cx)
    }

    /// Holds a request until another table is loaded.
    fn hold_for_table<R: Ring>(&mut self, io: Cookie, cx: &mut Cx<'_, R>) -> Verdict {
        self.hold_for_table_until(io, cx.now().after(HOLD_NS), cx)
    }

    fn hold_for_table_until<R: Ring>(&mut self, io: Cookie, end: Nanos, cx: &mut Cx<'_, R>) -> Verdict {
        self.state(io).phase = Phase::Hold(end);
        self.for_table.push(io);
        cx.timer(io, end);
        Verdict::Held
    }

    /// Ends the timers of requests that wait for the next table, if the table is suspended by now.
    #[cold]
    fn check_suspension<R: Ring>(&mut self, cx: &mut Cx<'_, R>) {
        // Listening comes before the check, or else a suspension could be missed.
        self.held.listen(&self.shared.waiting, cx);
        fence(SeqCst);
        if self.shared.is_suspended() {
            self.for_table.drain(..).for_each(|io| cx.cancel(io));
        }
    }

    /// Writes to one leg after the other, to find the leg that fails.
    fn write_each<R: Ring>(&mut self, io: Cookie, req: &Request, from: usize, cx: &mut Cx<'_, R>) -> Verdict {
        let RequestState { legs, failed, .. } = *self.state(io);
        let next = (from..self.shared.legs.len()).find(|leg| legs & 1 << leg != 0);
        let Some(leg) = next else { return self.finish(io, req, legs & !failed, failed, cx) };
        self.state(io).phase = Phase::Each(leg);
        let mut copy = self.for_leg(req, leg);
        copy.flags = copy.flags.difference(Flags::NOWAIT);
        if cx.spawn(io, self.child(leg), ChildKind::Copy, copy).is_err() {
            return self.hold_until(io, Phase::RetryEach(leg), cx, |_| false);
        }
        Verdict::Held
    }

    /// Completes a write or flush. `done`, `failed`: legs, as bits.
    fn finish<R: Ring>(
        &mut self,
        io: Cookie,
        req: &Request,
        done: u32,
        failed: u32,
        cx: &mut Cx<'_, R>,
    ) -> Verdict {
        let (flush, shared) = (req.op == Op::Flush, &self.shared);
        let region = shared.region_of(req.offset);
        let unsupported = self.requests[io.tag.index()].unsupported;
        let refused = req.op == Op::Discard || req.op == Op::WriteZeroes && unsupported != 0;
        if failed != 0 && !flush && (done == 0 || refused) && (done != 0 || failed != unsupported) {
            // Some legs may have the write, or a part of it, and none is marked as failed.
            shared.mark_torn(region);
        }
        if failed != 0 && refused {
            // As in the kernel this does not fail a leg; the client writes zeroes as data then.
            shared.end_write(region);
            return Verdict::Up(Status::NotSupported);
        }
        if failed != 0 && done != 0 {
            // Legs fail before the region loses sync: the new primary has to be chosen while the region still
            // counts as in sync.
            let failure = if flush { Failure::Flush } else { Failure::Write };
            (0..shared.legs.len())
                .filter(|leg| failed & 1 << leg != 0)
                .for_each(|leg| shared.fail(leg, failure));
            if !flush {
                shared.lose_sync(region);
            }
        } else if failed != 0 && flush {
            shared.keep_marks();
        }
        if !flush {
            shared.end_write(region);
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

    /// Returns the whole request to the queue, for the next table. Until then some legs may have the write
    /// and others not.
    fn requeue(&mut self, req: &Request, was_sent: bool) -> Verdict {
        if req.op != Op::Flush {
            let region = self.shared.region_of(req.offset);
            if was_sent {
                self.shared.mark_torn(region);
            }
            self.shared.end_write(region);
        }
        Verdict::Up(Status::Requeue)
    }

    /// Handles the end of a held request's timer: the table is suspended, or the longest hold time is over.
    fn end_hold<R: Ring>(&mut self, io: Cookie, end: Nanos, cx: &mut Cx<'_, R>) -> Verdict {
        self.for_table.retain(|held| *held != io);
        if !self.shared.is_suspended() && cx.now() < end {
            return self.hold_for_table_until(io, end, cx);
        }
        let requeues = self.shared.requeues.load(Relaxed);
        let requeues = requeues && self.shared.is_suspended();
        Verdict::Up(if requeues { Status::Requeue } else { Status::IoError })
    }
}

impl<R: Ring> Node<R> for MirrorNode {
    fn attach(&mut self, _: NodeId, tags: usize) {
        self.requests = vec![RequestState::new(Bytes::ZERO, Data::NONE, Flags::empty()); tags].into();
        self.held.reserve(tags);
        self.for_table.reserve(tags);
    }

    fn submit(&mut self, io: Cookie, req: &mut Request, cx: &mut Cx<'_, R>) -> Verdict {
        *self.state(io) = RequestState::new(req.offset, req.data, req.flags);
        match req.op {
            Op::Read | Op::Prefetch => self.read(io, req).unwrap_or(Verdict::Up(Status::IoError)),
            Op::Write | Op::WriteZeroes | Op::Discard | Op::Flush => self.write(io, req, false, cx),
            _ => Verdict::Up(Status::NotSupported),
        }
    }

    fn end_io(&mut self, io: Cookie, req: &mut Request, status: Status, cx: &mut Cx<'_, R>) -> Verdict {
        let RequestState { phase, offset, flags, .. } = *self.state(io);
        let nowait = flags.contains(Flags::NOWAIT);
        // Restores the original fields, whether the request is held, resubmitted or completed.
        (req.offset, req.flags) = (offset, flags);
        if let (Phase::Read(leg), Op::Read) = (phase, req.op) {
            match status {
                Status::Ok | Status::Requeue | Status::NotSupported | Status::Invalid => {}
                _ if is_temporary(status) => {
                    if !nowait && self.may_retry(io) {
                        self.state(io).legs &= !(1 << leg);
                        return self.retry_later(io, Phase::RetryRead, cx);
                    }
                }
                _ => {
                    self.shared.fail(leg, Failure::Read);
                    if let Some(again) = self.read(io, req) {
                        return again;
                    }
                }
            }
        }
        Verdict::Up(status)
    }

    fn reap(&mut self, io: Cookie, req: &mut Request, _: i64, cx: &mut Cx<'_, R>) -> Verdict {
        match self.state(io).phase {
            Phase::Wait(entered) => self.write(io, req, entered, cx),
            Phase::RetryRead => self.read(io, req).unwrap_or(Verdict::Up(Status::IoError)),
            Phase::RetryEach(leg) => self.write_each(io, req, leg, cx),
            Phase::Record => self.acknowledge(io, cx),
            Phase::Hold(end) => self.end_hold(io, end, cx),
            phase => unreachable!("no timer is set in {phase:?}"),
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
        // A child is spare again.
        self.held.resume_all();
        match self.state(io).phase {
            Phase::Log => {
                cx.ring.free(self.state(io).buffer);
                if status == Status::Requeue || is_temporary(status) && self.may_retry(io) {
                    self.shared.log_not_written(self.held.waiter());
                    return match status {
                        Status::Requeue => self.requeue(req, false),
                        _ => self.retry_later(io, Phase::Wait(true), cx),
                    };
                }
                self.shared.log_written(status.is_ok(), self.held.waiter());
                self.write(io, req, true, cx)
            }
            Phase::Record => {
                cx.ring.free(self.state(io).buffer);
                match status {
                    Status::Requeue => {
                        self.shared.log_not_written(self.held.waiter());
                        // The write is no longer registered in its region: the whole request is repeated.
                        return Verdict::Up(Status::Requeue);
                    }
                    _ if is_temporary(status) && self.may_retry(io) => {
                        self.shared.log_not_written(self.held.waiter())
                    }
                    _ => {
                        self.shared.log_written(status.is_ok(), self.held.waiter());
                        return self.acknowledge(io, cx);
                    }
                }
                self.retry_later(io, Phase::Record, cx)
            }
            Phase::Each(_) if status == Status::Requeue => self.requeue(req, true),
            Phase::Each(leg) => {
                if is_temporary(status) && self.may_retry(io) {
                    return self.retry_later(io, Phase::RetryEach(leg), cx);
                }
                let state = self.state(io);
                state.failed |= u32::from(!status.is_ok()) << leg;
                state.unsupported |= u32::from(status == Status::NotSupported) << leg;
                self.write_each(io, req, leg + 1, cx)
            }
            _ => {
                let state = self.state(io);
                state.count -= 1;
                state.failed |= u32::from(!status.is_ok());
                state.requeue |= status == Status::Requeue;
                match (state.count, state.failed, state.legs) {
                    (0, ..) if state.requeue => self.requeue(req, true),
                    (0, 0, legs) => self.finish(io, req, legs, 0, cx),
                    (0, _, _) => {
                        state.failed = 0;
                        self.write_each(io, req, 0, cx)
                    }
                    _ => Verdict::Held,
                }
            }
        }
    }

    fn commit(&mut self, cx: &mut Cx<'_, R>) {
        if !self.for_table.is_empty() {
            self.check_suspension(cx);
        }
        self.held.resume_woken(cx);
    }

    /// Does nothing: waits are short, and a write that is registered in its region must continue.
    fn cancel(&mut self, _: Cookie, _: &mut Cx<'_, R>) {}
}
