//! Copying a chunk of the origin away before it changes: the steps that a snapshot's own node and its origin's share.
//!
//! A request that needs a chunk copied is held here. It claims the chunk, reads it from the origin, writes it to the COW
//! device, and has the exception written to its area: the data is flushed first, then the area is written and made
//! durable. One request at a time writes areas, with the exceptions of all that wait.

use super::store::{AreaWrite, Found, Header, Keeping, Store};
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
    /// What the area will name is flushed.
    Flush,
    /// The next area is emptied.
    Empty,
    Area,
    /// The area is flushed, where it could not be written with FUA.
    Settle,
    /// The header says that the snapshot is not valid any more.
    Header,
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
        cx.timer(io, cx.now().after(copy.look_ns));
        copy.look_ns = (2 * copy.look_ns).min(LOOK_NS_MAX);
        Progress::Held
    }

    fn spawn<R: Ring>(
        &self,
        copy: &mut Copy,
        io: Cookie,
        step: Step,
        node: NodeId,
        req: Request,
        cx: &mut Cx<'_, R>,
    ) -> Progress {
        copy.step = step;
        let spawned = cx.spawn(io, node, ChildKind::Copy, req);
        debug_assert!(spawned.is_ok(), "there is a child for each request");
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
            return self.invalidate(copy, io, cx);
        }
        let (at, len) = self.range(copy.chunk);
        if write.is_some_and(|req| req.offset <= at && req.end().0 >= at.0 + len) {
            // Nothing of what the origin has there is needed.
            return self.write(copy, io, write, cx);
        }
        let mut read = Request::new(Op::Read, at, Bytes(len));
        read.data = Data::One(copy.buffer.slice(0, len as u32));
        self.spawn(copy, io, Step::Read, self.origin, read, cx)
    }

    /// The chunk goes to the COW device, with what a write for the snapshot has changed in it.
    fn write<R: Ring>(
        &self,
        copy: &mut Copy,
        io: Cookie,
        write: Option<&Request>,
        cx: &mut Cx<'_, R>,
    ) -> Progress {
        let (at, len) = self.range(copy.chunk);
        let whole = self.chunk_len();
        cx.ring.bytes_mut(copy.buffer.slice(len as u32, (whole - len) as u32)).fill(0);
        if let Some(req) = write {
            let within = (req.offset.0 - at.0) as u32;
            overlay(req, copy.buffer.slice(within, req.len.0 as u32), cx);
        }
        let Some(new) = copy.new else { return Progress::Failed(Status::IoError) };
        let mut req = Request::new(Op::Write, Bytes(new * whole), Bytes(whole));
        req.data = Data::One(copy.buffer);
        self.spawn(copy, io, Step::Write, self.cow, req, cx)
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
        self.spawn(copy, io, Step::Flush, self.cow, Request::flush(), cx)
    }

    fn write_area<R: Ring>(&self, copy: &mut Copy, io: Cookie, cx: &mut Cx<'_, R>) -> Progress {
        let Some((at, _)) = copy.area else { return Progress::Failed(Status::IoError) };
        self.store.copy_area(cx.ring.bytes_mut(copy.buffer));
        let mut req = Request::new(Op::Write, at, Bytes(self.chunk_len()));
        req.data = Data::One(copy.buffer);
        req.flags = if self.fua { Flags::FUA } else { Flags::NONE };
        self.spawn(copy, io, Step::Area, self.cow, req, cx)
    }

    /// The snapshot is lost. Its header is to say so.
    fn invalidate<R: Ring>(&self, copy: &mut Copy, io: Cookie, cx: &mut Cx<'_, R>) -> Progress {
        let was = self.store.invalidate();
        let block = 4096.max(copy.buffer.len);
        if !was || self.store.keeping == Keeping::Transient || cx.spare_children() == 0 {
            Copier::free(copy, cx);
            return Progress::Failed(Status::IoError);
        }
        Copier::free(copy, cx);
        let Some(buffer) = cx.ring.allocate(block.min(self.chunk_len() as u32)) else {
            return Progress::Failed(Status::IoError);
        };
        copy.buffer = buffer;
        let bytes = cx.ring.bytes_mut(buffer);
        bytes.fill(0);
        bytes[..16].copy_from_slice(&Header { valid: false, chunk: self.store.chunk }.encode());
        let mut req = Request::new(Op::Write, Bytes::ZERO, Bytes(buffer.len.into()));
        req.data = Data::One(buffer);
        self.spawn(copy, io, Step::Header, self.cow, req, cx)
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
        if !status.is_ok() || copy.step == Step::Header {
            return self.failed(copy, io, cx);
        }
        match copy.step {
            Step::Read => self.write(copy, io, write, cx),
            Step::Write => {
                if let Some(new) = copy.new {
                    self.store.copied(copy.chunk, new);
                }
                self.commit(copy, io, cx)
            }
            Step::Flush => match copy.area {
                Some((_, Some(next_at))) => {
                    cx.ring.bytes_mut(copy.buffer).fill(0);
                    let mut req = Request::new(Op::Write, next_at, Bytes(self.chunk_len()));
                    req.data = Data::One(copy.buffer);
                    self.spawn(copy, io, Step::Empty, self.cow, req, cx)
                }
                _ => self.write_area(copy, io, cx),
            },
            Step::Empty => self.write_area(copy, io, cx),
            Step::Area if !self.fua => self.spawn(copy, io, Step::Settle, self.cow, Request::flush(), cx),
            Step::Area | Step::Settle => {
                copy.area = None;
                self.store.end_commit();
                self.commit(copy, io, cx)
            }
            Step::Wait | Step::Header => unreachable!("no child is under way in {:?}", copy.step),
        }
    }

    fn failed<R: Ring>(&self, copy: &mut Copy, io: Cookie, cx: &mut Cx<'_, R>) -> Progress {
        if copy.step == Step::Header {
            Copier::free(copy, cx);
            return Progress::Failed(Status::IoError);
        }
        if copy.area.take().is_some() {
            self.store.fail_commit();
        }
        self.invalidate(copy, io, cx)
    }

    /// What a request waited for may be there now.
    pub(super) fn look<R: Ring>(
        &self,
        copy: &mut Copy,
        io: Cookie,
        write: Option<&Request>,
        cx: &mut Cx<'_, R>,
    ) -> Progress {
        match copy.new {
            Some(_) => self.commit(copy, io, cx),
            None => self.start(copy, io, write, cx),
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
