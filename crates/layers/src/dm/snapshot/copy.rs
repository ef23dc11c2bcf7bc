//! Copying a chunk of the origin away before it changes: the steps that a snapshot's own node and its origin's share.
//!
//! A request that needs a chunk copied is held here. It claims the chunk, reads it from the origin, writes it to the COW
//! device, and has the exception written to its area: the data is flushed first, then the area is written and made
//! durable. One request at a time writes areas, with the exceptions of all that wait.

use super::store::{AreaWrite, Found, Keeping, Store};
use block::{Bytes, Cookie, Data, Flags, Op, Request, Segment, Status};
use queue::{ChildKind, Cx, NodeId, Ring};
use std::sync::Arc;

/// How long a request waits before it looks again: twice as long each time.
const LOOK_NS_MIN: u64 = 20_000;
const LOOK_NS_MAX: u64 = 2_000_000;

/// What is under way.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Step {
    /// Somebody else has the chunk, the areas or the memory.
    Wait,
    Read,
    Write,
    /// The next area is emptied.
    Empty,
    /// What the area will name is flushed, and the one after it: a full area that is on disk leads there.
    Flush,
    Area,
    /// The area is flushed, where it could not be written with FUA.
    Settle,
}

/// How far a copy is.
#[derive(Clone, Copy, Debug)]
pub(super) struct Copy {
    chunk: u64,
    /// Where it goes; `None`: not claimed yet.
    new: Option<u64>,
    step: Step,
    buffer: Segment,
    look_ns: u64,
    /// Where the area goes, while this request writes it.
    area: Option<(Bytes, Option<Bytes>)>,
}

impl Copy {
    pub(super) const NONE: Copy = Copy {
        chunk: 0,
        new: None,
        step: Step::Wait,
        buffer: Segment::EMPTY,
        look_ns: LOOK_NS_MIN,
        area: None,
    };
}

impl Copy {
    /// It has claimed its chunk, so it is this one that copies it.
    pub(super) fn is_ours(&self) -> bool {
        self.new.is_some()
    }
}

/// What has become of a copy.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Progress {
    /// It is not over.
    Held,
    /// The chunk is an exception now.
    Done,
    /// It was not copied: the snapshot is full or not valid, and this is how its own request ends.
    Failed(Status),
}

/// What a copy needs to know of where it happens.
#[derive(Clone, Debug)]
pub(super) struct Copier {
    pub(super) store: Arc<Store>,
    pub(super) origin: NodeId,
    pub(super) cow: NodeId,
    pub(super) origin_len: Bytes,
    /// The COW device takes FUA.
    pub(super) fua: bool,
    /// For the origin's sake: a snapshot that is full is not valid any more.
    pub(super) for_origin: bool,
}

impl Copier {
    fn chunk_len(&self) -> u64 {
        self.store.chunk.bytes().0
    }

    /// The part of the origin that a chunk covers: the last one may be shorter.
    fn range(&self, chunk: u64) -> (Bytes, u64) {
        let at = chunk * self.chunk_len();
        (Bytes(at), self.chunk_len().min(self.origin_len.0 - at))
    }

    /// Begin to copy a chunk. `write`: a request for the snapshot, whose data belongs into the copy.
    pub(super) fn begin<R: Ring>(
        &self,
        copy: &mut Copy,
        io: Cookie,
        chunk: u64,
        write: Option<&Request>,
        cx: &mut Cx<'_, R>,
    ) -> Progress {
        *copy = Copy { chunk, ..Copy::NONE };
        self.start(copy, io, write, cx)
    }

    fn wait<R: Ring>(&self, copy: &mut Copy, io: Cookie, cx: &mut Cx<'_, R>) -> Progress {
        copy.step = Step::Wait;
        self.later(copy, io, cx)
    }

    /// Look again, at the step that it is at.
    fn later<R: Ring>(&self, copy: &mut Copy, io: Cookie, cx: &mut Cx<'_, R>) -> Progress {
        cx.timer(io, cx.now().after(copy.look_ns));
        copy.look_ns = (2 * copy.look_ns).min(LOOK_NS_MAX);
        Progress::Held
    }

    fn free<R: Ring>(copy: &mut Copy, cx: &mut Cx<'_, R>) {
        let buffer = std::mem::replace(&mut copy.buffer, Segment::EMPTY);
        if buffer.len > 0 {
            cx.ring.free(buffer);
        }
    }

    fn start<R: Ring>(
        &self,
        copy: &mut Copy,
        io: Cookie,
        write: Option<&Request>,
        cx: &mut Cx<'_, R>,
    ) -> Progress {
        if !self.store.is_valid() {
            return Progress::Failed(Status::IoError);
        }
        match self.store.find(copy.chunk) {
            Found::Copied(_) => return Progress::Done,
            Found::Busy => return self.wait(copy, io, cx),
            Found::Origin => {}
        }
        if cx.spare_children() == 0 {
            return self.wait(copy, io, cx);
        }
        let Some(buffer) = cx.ring.allocate(self.chunk_len() as u32) else {
            return self.wait(copy, io, cx);
        };
        copy.buffer = buffer;
        if !self.store.claim(copy.chunk) {
            Copier::free(copy, cx);
            return self.wait(copy, io, cx);
        }
        copy.new = self.store.allocate();
        if copy.new.is_none() {
            self.store.unclaim(copy.chunk);
            Copier::free(copy, cx);
            let stays = matches!(self.store.keeping, Keeping::Persistent { overflow: true });
            if stays && !self.for_origin {
                self.store.overflow();
                return Progress::Failed(Status::IoError);
            }
            return self.invalidate(copy, cx);
        }
        let (at, len) = self.range(copy.chunk);
        if write.is_some_and(|req| req.offset <= at && req.end().0 >= at.0 + len) {
            // Nothing of what the origin has there is needed.
            return self.take(copy, io, Step::Write, write, cx);
        }
        self.take(copy, io, Step::Read, write, cx)
    }

    /// Do a step, as soon as there is a child for it.
    fn take<R: Ring>(
        &self,
        copy: &mut Copy,
        io: Cookie,
        step: Step,
        write: Option<&Request>,
        cx: &mut Cx<'_, R>,
    ) -> Progress {
        copy.step = step;
        if cx.spare_children() == 0 {
            return self.later(copy, io, cx);
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
            Step::Empty => {
                cx.ring.bytes_mut(copy.buffer).fill(0);
                let next = copy.area.and_then(|(_, next)| next).unwrap_or(area);
                (self.cow, Request::new(Op::Write, next, Bytes(whole)))
            }
            Step::Area => {
                self.store.copy_area(cx.ring.bytes_mut(copy.buffer));
                let mut req = Request::new(Op::Write, area, Bytes(whole));
                req.flags = if self.fua { Flags::FUA } else { Flags::NONE };
                (self.cow, req)
            }
            Step::Flush | Step::Settle | Step::Wait => (self.cow, Request::flush()),
        };
        if req.op.moves_data() {
            req.data = Data::One(copy.buffer.slice(0, req.len.0 as u32));
        }
        let spawned = cx.spawn(io, node, ChildKind::Copy, req);
        debug_assert!(spawned.is_ok(), "there is a child for each request");
        Progress::Held
    }

    /// What the copy holds beside what was read: zeroes behind the origin's end, and what a write for the snapshot changes.
    fn fill<R: Ring>(&self, copy: &Copy, write: Option<&Request>, cx: &mut Cx<'_, R>) {
        let (at, len) = self.range(copy.chunk);
        let rest = (self.chunk_len() - len) as u32;
        cx.ring.bytes_mut(copy.buffer.slice(len as u32, rest)).fill(0);
        if let Some(req) = write {
            let within = (req.offset.0 - at.0) as u32;
            overlay(req, copy.buffer.slice(within, req.len.0 as u32), cx);
        }
    }

    /// The copy is there: see to it that an area says so.
    fn commit<R: Ring>(&self, copy: &mut Copy, io: Cookie, cx: &mut Cx<'_, R>) -> Progress {
        if let Found::Copied(_) = self.store.find(copy.chunk) {
            Copier::free(copy, cx);
            return Progress::Done;
        }
        if !self.store.is_valid() {
            Copier::free(copy, cx);
            return Progress::Failed(Status::IoError);
        }
        if cx.spare_children() == 0 {
            return self.wait(copy, io, cx);
        }
        let Some(AreaWrite { at, next_at }) = self.store.begin_commit() else {
            return self.wait(copy, io, cx);
        };
        copy.area = Some((at, next_at));
        let step = if next_at.is_some() { Step::Empty } else { Step::Flush };
        self.take(copy, io, step, None, cx)
    }

    /// The snapshot is lost. Its [`Loss`](super::Loss) has its header say so.
    fn invalidate<R: Ring>(&self, copy: &mut Copy, cx: &mut Cx<'_, R>) -> Progress {
        self.store.invalidate();
        Copier::free(copy, cx);
        Progress::Failed(Status::IoError)
    }

    /// A child request ended.
    pub(super) fn child_ended<R: Ring>(
        &self,
        copy: &mut Copy,
        io: Cookie,
        write: Option<&Request>,
        status: Status,
        cx: &mut Cx<'_, R>,
    ) -> Progress {
        match status {
            Status::Ok => {}
            Status::Requeue => return self.give_up(copy, cx),
            // Nothing is wrong with the device: the same again.
            Status::Again | Status::Resource | Status::DeviceResource => return self.later(copy, io, cx),
            _ => return self.failed(copy, cx),
        }
        match copy.step {
            Step::Read => self.take(copy, io, Step::Write, write, cx),
            Step::Write => {
                if let Some(new) = copy.new {
                    self.store.copied(copy.chunk, new);
                }
                self.commit(copy, io, cx)
            }
            Step::Empty => self.take(copy, io, Step::Flush, write, cx),
            Step::Flush => self.take(copy, io, Step::Area, write, cx),
            Step::Area if !self.fua => self.take(copy, io, Step::Settle, write, cx),
            Step::Area | Step::Settle => {
                copy.area = None;
                self.store.end_commit();
                self.commit(copy, io, cx)
            }
            Step::Wait => unreachable!("no child is under way while it waits"),
        }
    }

    /// The table that comes does it, from the beginning.
    fn give_up<R: Ring>(&self, copy: &mut Copy, cx: &mut Cx<'_, R>) -> Progress {
        self.store.abandon(copy.chunk, copy.area.take().is_some());
        Copier::free(copy, cx);
        Progress::Failed(Status::Requeue)
    }

    fn failed<R: Ring>(&self, copy: &mut Copy, cx: &mut Cx<'_, R>) -> Progress {
        if copy.area.take().is_some() {
            self.store.fail_commit();
        }
        self.invalidate(copy, cx)
    }

    /// What a request waited for may be there now.
    pub(super) fn look<R: Ring>(
        &self,
        copy: &mut Copy,
        io: Cookie,
        write: Option<&Request>,
        cx: &mut Cx<'_, R>,
    ) -> Progress {
        match (copy.step, copy.new) {
            (Step::Wait, Some(_)) => self.commit(copy, io, cx),
            (Step::Wait, None) => self.start(copy, io, write, cx),
            (step, _) => self.take(copy, io, step, write, cx),
        }
    }
}

/// A request's data into a buffer of its length.
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
