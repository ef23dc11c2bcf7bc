//! Copies a chunk of the origin to the COW device before the chunk changes. The nodes of the snapshot and of
//! its origin use this.
//!
//! A request that needs a copy is held. It claims the chunk, reads it from the origin, writes it to the COW
//! device, and writes the exception to its area: the data is flushed first, then the area is written durably.
//! One request at a time writes areas, with the exceptions of all waiting requests.

use super::store::{AreaWrite, ChunkState, Store, StoreKind};
use block::{Bytes, Cookie, Data, Flags, Op, Request, Segment, Status};
use queue::{ChildKind, Cx, HeldRequests, NodeId, Ring, Verdict};
use std::sync::Arc;

/// The interval at which a request tries again after a temporary error, or without memory; it doubles each
/// time.
const RETRY_NS_MIN: u64 = 20_000;
const RETRY_NS_MAX: u64 = 2_000_000;

/// The steps of a copy.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Step {
    /// Waits for another request that has claimed the chunk or writes the area, or for memory.
    Wait,
    Read,
    Write,
    /// Zeroes the next area.
    ClearNext,
    /// Flushes the data that the area will refer to, and the zeroed next area, which readers of a full area
    /// read next.
    Flush,
    Area,
    /// Flushes the area, if the COW device has no FUA.
    FlushArea,
}

/// The progress of a copy, kept in the request's state.
#[derive(Clone, Copy, Debug)]
pub(super) struct ChunkCopy {
    chunk: u64,
    /// The chunk of the COW device; `None`: the chunk is not claimed yet.
    new: Option<u64>,
    step: Step,
    buffer: Segment,
    retry_ns: u64,
    /// The offsets of the area and the next one to zero, while this request writes the area.
    area: Option<(Bytes, Option<Bytes>)>,
}

impl ChunkCopy {
    pub(super) const NONE: ChunkCopy = ChunkCopy {
        chunk: 0,
        new: None,
        step: Step::Wait,
        buffer: Segment::EMPTY,
        retry_ns: RETRY_NS_MIN,
        area: None,
    };
}

impl ChunkCopy {
    /// Returns whether this request has claimed the chunk and therefore makes the copy.
    pub(super) fn has_claim(&self) -> bool {
        self.new.is_some()
    }
}

/// The result of a step.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Progress {
    /// The copy is not finished; the request is held.
    Held,
    /// The chunk has an exception now.
    Done,
    /// The chunk was not copied: the snapshot is full or invalid. A request of the snapshot ends with this
    /// status.
    Failed(Status),
}

/// The store and the devices of copies; the methods run their steps.
#[derive(Debug)]
pub(super) struct Copier {
    pub(super) store: Arc<Store>,
    pub(super) origin: NodeId,
    pub(super) cow: NodeId,
    pub(super) origin_len: Bytes,
    /// Whether the COW device supports FUA.
    pub(super) fua: bool,
    /// Whether copies are made for writes to the origin: a full store then makes the snapshot invalid.
    pub(super) for_origin: bool,
    /// Requests of the node that wait for the store, or for a spare child request.
    pub(super) held: HeldRequests,
}

impl Copier {
    fn chunk_len(&self) -> u64 {
        self.store.chunk.bytes().0
    }

    /// Returns the offset and length of a chunk on the origin: the last chunk may be shorter.
    fn range(&self, chunk: u64) -> (Bytes, u64) {
        let at = chunk * self.chunk_len();
        (Bytes(at), self.chunk_len().min(self.origin_len.0 - at))
    }

    /// Starts to copy a chunk. `write`: a write to the snapshot, whose data is merged into the copy.
    pub(super) fn begin<R: Ring>(
        &mut self,
        copy: &mut ChunkCopy,
        io: Cookie,
        chunk: u64,
        write: Option<&Request>,
        cx: &mut Cx<'_, R>,
    ) -> Progress {
        *copy = ChunkCopy { chunk, ..ChunkCopy::NONE };
        self.start(copy, io, write, cx)
    }

    /// Holds the request until the store is changed by another request, or a child request is spare.
    pub(super) fn wait<R: Ring>(&mut self, io: Cookie, cx: &mut Cx<'_, R>) -> Verdict {
        self.held.wait(&self.store.waiting, io, cx)
    }

    fn wait_to_start<R: Ring>(&mut self, copy: &mut ChunkCopy, io: Cookie, cx: &mut Cx<'_, R>) -> Progress {
        copy.step = Step::Wait;
        self.wait(io, cx);
        Progress::Held
    }

    /// Wakes requests of all queues that wait for the store.
    fn wake_waiting(&self) {
        self.store.waiting.wake_fenced(self.held.waiter());
    }

    /// Retries the current step later.
    fn retry_later<R: Ring>(&self, copy: &mut ChunkCopy, io: Cookie, cx: &mut Cx<'_, R>) -> Progress {
        cx.timer(io, cx.now().after(copy.retry_ns));
        copy.retry_ns = (2 * copy.retry_ns).min(RETRY_NS_MAX);
        Progress::Held
    }

    fn free<R: Ring>(copy: &mut ChunkCopy, cx: &mut Cx<'_, R>) {
        let buffer = std::mem::replace(&mut copy.buffer, Segment::EMPTY);
        if buffer.len > 0 {
            cx.ring.free(buffer);
        }
    }

    fn start<R: Ring>(
        &mut self,
        copy: &mut ChunkCopy,
        io: Cookie,
        write: Option<&Request>,
        cx: &mut Cx<'_, R>,
    ) -> Progress {
        if !self.store.is_valid() {
            return Progress::Failed(Status::IoError);
        }
        match self.store.find(copy.chunk) {
            ChunkState::Copied(_) => return Progress::Done,
            ChunkState::Copying => return self.wait_to_start(copy, io, cx),
            ChunkState::NotCopied => {}
        }
        if cx.spare_children() == 0 {
            return self.wait_to_start(copy, io, cx);
        }
        let Some(buffer) = cx.ring.allocate(self.chunk_len() as u32) else {
            return self.retry_later(copy, io, cx);
        };
        copy.buffer = buffer;
        if !self.store.claim(copy.chunk) {
            Copier::free(copy, cx);
            return self.wait_to_start(copy, io, cx);
        }
        copy.new = self.store.allocate();
        if copy.new.is_none() {
            self.store.unclaim(copy.chunk);
            self.wake_waiting();
            Copier::free(copy, cx);
            let keeps_full_store = matches!(self.store.kind, StoreKind::Persistent { overflow: true });
            if keeps_full_store && !self.for_origin {
                self.store.overflow();
                return Progress::Failed(Status::IoError);
            }
            return self.invalidate(copy, cx);
        }
        let (at, len) = self.range(copy.chunk);
        if write.is_some_and(|req| req.offset <= at && req.end().0 >= at.0 + len) {
            // The write covers the chunk: no need to read the origin.
            return self.run_step(copy, io, Step::Write, write, cx);
        }
        self.run_step(copy, io, Step::Read, write, cx)
    }

    /// Starts a step, or waits if no spare child is left.
    fn run_step<R: Ring>(
        &mut self,
        copy: &mut ChunkCopy,
        io: Cookie,
        step: Step,
        write: Option<&Request>,
        cx: &mut Cx<'_, R>,
    ) -> Progress {
        copy.step = step;
        if cx.spare_children() == 0 {
            self.wait(io, cx);
            return Progress::Held;
        }
        let (at, len) = self.range(copy.chunk);
        let (new, area) = (copy.new.unwrap_or_default(), copy.area.map_or(Bytes::ZERO, |(at, _)| at));
        let whole = self.chunk_len();
        let (node, mut req) = match step {
            Step::Read => (self.origin, Request::new(Op::Read, at, Bytes(len))),
            Step::Write => {
                self.fill(copy, write, cx);
                (self.cow, Request::new(Op::Write, Bytes(new * whole), Bytes(whole)))
            }
            Step::ClearNext => {
                cx.ring.bytes_mut(copy.buffer).fill(0);
                let next = copy.area.and_then(|(_, next)| next).unwrap_or(area);
                (self.cow, Request::new(Op::Write, next, Bytes(whole)))
            }
            Step::Area => {
                self.store.copy_area(cx.ring.bytes_mut(copy.buffer));
                let mut req = Request::new(Op::Write, area, Bytes(whole));
                req.flags = if self.fua { Flags::FUA } else { Flags::empty() };
                (self.cow, req)
            }
            Step::Flush | Step::FlushArea | Step::Wait => (self.cow, Request::flush()),
        };
        if req.op.moves_data() {
            req.data = Data::One(copy.buffer.slice(0, req.len.0 as u32));
        }
        let spawned = cx.spawn(io, node, ChildKind::Copy, req);
        debug_assert!(spawned.is_ok(), "the spare children were counted");
        Progress::Held
    }

    /// Adds to the data that was read: zeroes after the end of the origin, and the data of a write to the
    /// snapshot.
    fn fill<R: Ring>(&self, copy: &ChunkCopy, write: Option<&Request>, cx: &mut Cx<'_, R>) {
        let (at, len) = self.range(copy.chunk);
        let rest = (self.chunk_len() - len) as u32;
        cx.ring.bytes_mut(copy.buffer.slice(len as u32, rest)).fill(0);
        if let Some(req) = write {
            let within = (req.offset.0 - at.0) as u32;
            overlay(req, copy.buffer.slice(within, req.len.0 as u32), cx);
        }
    }

    /// Handles the completion of the data's write to the COW device: writes the chunk's area, or waits for
    /// the request that does.
    fn commit<R: Ring>(&mut self, copy: &mut ChunkCopy, io: Cookie, cx: &mut Cx<'_, R>) -> Progress {
        if let ChunkState::Copied(_) = self.store.find(copy.chunk) {
            Copier::free(copy, cx);
            return Progress::Done;
        }
        if !self.store.is_valid() {
            Copier::free(copy, cx);
            return Progress::Failed(Status::IoError);
        }
        if cx.spare_children() == 0 {
            return self.wait_to_start(copy, io, cx);
        }
        let Some(AreaWrite { at, next_at }) = self.store.begin_commit() else {
            return self.wait_to_start(copy, io, cx);
        };
        copy.area = Some((at, next_at));
        let step = if next_at.is_some() { Step::ClearNext } else { Step::Flush };
        self.run_step(copy, io, step, None, cx)
    }

    /// Makes the snapshot invalid; [`Invalidation`](super::Invalidation) then writes the header.
    fn invalidate<R: Ring>(&self, copy: &mut ChunkCopy, cx: &mut Cx<'_, R>) -> Progress {
        self.store.invalidate();
        Copier::free(copy, cx);
        Progress::Failed(Status::IoError)
    }

    /// Continues after a child request.
    pub(super) fn child_ended<R: Ring>(
        &mut self,
        copy: &mut ChunkCopy,
        io: Cookie,
        write: Option<&Request>,
        status: Status,
        cx: &mut Cx<'_, R>,
    ) -> Progress {
        match status {
            Status::Ok => {}
            Status::Requeue => return self.requeue(copy, cx),
            // A temporary condition, not an error of the device: retry.
            Status::Again | Status::Resource | Status::DeviceResource => {
                return self.retry_later(copy, io, cx);
            }
            _ => return self.failed(copy, cx),
        }
        match copy.step {
            Step::Read => self.run_step(copy, io, Step::Write, write, cx),
            Step::Write => {
                if let Some(new) = copy.new {
                    self.store.copied(copy.chunk, new);
                    self.wake_waiting();
                }
                self.commit(copy, io, cx)
            }
            Step::ClearNext => self.run_step(copy, io, Step::Flush, write, cx),
            Step::Flush => self.run_step(copy, io, Step::Area, write, cx),
            Step::Area if !self.fua => self.run_step(copy, io, Step::FlushArea, write, cx),
            Step::Area | Step::FlushArea => {
                copy.area = None;
                self.store.end_commit();
                self.wake_waiting();
                self.commit(copy, io, cx)
            }
            Step::Wait => unreachable!("no child is in flight while it waits"),
        }
    }

    /// Returns the request to the queue: the next table starts it again.
    fn requeue<R: Ring>(&self, copy: &mut ChunkCopy, cx: &mut Cx<'_, R>) -> Progress {
        self.store.abandon(copy.chunk, copy.area.take().is_some());
        self.wake_waiting();
        Copier::free(copy, cx);
        Progress::Failed(Status::Requeue)
    }

    fn failed<R: Ring>(&self, copy: &mut ChunkCopy, cx: &mut Cx<'_, R>) -> Progress {
        if copy.area.take().is_some() {
            self.store.fail_commit();
            self.wake_waiting();
        }
        self.invalidate(copy, cx)
    }

    /// Continues a held request.
    pub(super) fn retry<R: Ring>(
        &mut self,
        copy: &mut ChunkCopy,
        io: Cookie,
        write: Option<&Request>,
        cx: &mut Cx<'_, R>,
    ) -> Progress {
        match (copy.step, copy.new) {
            (Step::Wait, Some(_)) => self.commit(copy, io, cx),
            (Step::Wait, None) => self.start(copy, io, write, cx),
            (step, _) => self.run_step(copy, io, step, write, cx),
        }
    }
}

/// Copies a request's data into a buffer of its length.
fn overlay<R: Ring>(req: &Request, buffer: Segment, cx: &mut Cx<'_, R>) {
    let (mut at, mut rest) = (0, req.data);
    while at < req.len.0 {
        let Some(piece) = cx.segments(rest, req.len.0 - at).next() else { return };
        let bytes = cx.ring.bytes(piece).to_vec();
        cx.ring.bytes_mut(buffer.slice(at as u32, piece.len)).copy_from_slice(&bytes);
        at += u64::from(piece.len);
        rest = cx.advance(req.data, at);
    }
}
