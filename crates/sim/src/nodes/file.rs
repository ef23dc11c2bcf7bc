//! The smallest correct backend: a file, with every operation through the ring.

use block::{Bytes, Cookie, Extent, Flags, Op, Request, Segment, Status};
use queue::{Blocking, Cx, FileId, FileOp, Node, NodeId, Ring, RingFull, Verdict};
use std::cell::Cell;
use std::rc::Rc;

/// State of a request.
#[derive(Clone, Copy, Default)]
struct State {
    /// Bytes transferred so far.
    moved: u64,
    /// The data is written; the operation in flight is the sync for FUA.
    syncing: bool,
}

/// A backend that serves a whole file.
pub struct PlainFile {
    file: FileId,
    /// Set once a sync has failed: nothing is durable any more until the file is reopened. Shared by the
    /// queues that have the file open. `None`: such failures are ignored, a seeded fault (see the canaries).
    failed: Option<Rc<Cell<bool>>>,
    states: Vec<State>,
}

impl PlainFile {
    /// Creates the node; `failed` is shared by its instances.
    pub fn new(file: FileId, failed: Option<Rc<Cell<bool>>>) -> PlainFile {
        PlainFile { file, failed, states: Vec::new() }
    }

    fn operation(&self, io: Cookie, req: &Request) -> FileOp {
        let State { moved, syncing } = self.states[io.tag.index()];
        let (offset, len) = (req.offset.0 + moved, req.len.0);
        match req.op {
            _ if syncing => FileOp::Sync,
            Op::Read => FileOp::Read { offset },
            Op::Write => FileOp::Write { offset, durable: req.flags.contains(Flags::FUA) },
            Op::Discard => {
                let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
                FileOp::Allocate { mode, offset, len }
            }
            Op::WriteZeroes => {
                let mode = libc::FALLOC_FL_ZERO_RANGE | libc::FALLOC_FL_KEEP_SIZE;
                FileOp::Allocate { mode, offset, len }
            }
            Op::Prefetch => FileOp::Prefetch { offset, len },
            // The remaining operations never get here.
            _ => FileOp::Sync,
        }
    }

    fn start<R: Ring>(&mut self, io: Cookie, req: &Request, cx: &mut Cx<'_, R>) -> Verdict {
        let moved = self.states[io.tag.index()].moved;
        let operation = self.operation(io, req);
        let (data, len) = match operation {
            FileOp::Read { .. } | FileOp::Write { .. } => (cx.advance(req.data, moved), req.len.0 - moved),
            _ => (block::Data::NONE, 0),
        };
        if req.flags.contains(Flags::NOWAIT) && req.op.moves_data() {
            return match cx.try_now(self.file, operation, data, len, Blocking::Never) {
                Some(result) => self.ended(io, req, result, cx),
                None => Verdict::Up(Status::Again),
            };
        }
        match cx.start(io, self.file, operation, data, len) {
            Ok(()) => Verdict::Held,
            Err(RingFull) => Verdict::Busy,
        }
    }

    fn ended<R: Ring>(&mut self, io: Cookie, req: &Request, result: i64, cx: &mut Cx<'_, R>) -> Verdict {
        let fua = req.flags.contains(Flags::FUA);
        let state = &mut self.states[io.tag.index()];
        if result < 0 {
            let syncs = state.syncing || req.op == Op::Flush || (req.op == Op::Write && fua);
            // A cancelled sync has lost nothing: the data is still dirty.
            let loses = syncs && result != -i64::from(libc::ECANCELED);
            if let Some(failed) = self.failed.as_ref().filter(|_| loses) {
                failed.set(true);
            }
            let status = Status::from_result(result, 0);
            return Verdict::Up(if req.op == Op::Prefetch { Status::Ok } else { status });
        }
        if req.op.moves_data() {
            state.moved += result as u64;
            return match result {
                _ if state.moved == req.len.0 => Verdict::Up(Status::Ok),
                0 => Verdict::Up(Status::IoError),
                _ => self.start(io, req, cx),
            };
        }
        if fua && req.op.is_write() && !state.syncing {
            state.syncing = true;
            return self.start(io, req, cx);
        }
        let broken = self.failed.as_ref().is_some_and(|failed| failed.get());
        let promises = state.syncing || req.op == Op::Flush;
        Verdict::Up(if broken && promises { Status::IoError } else { Status::Ok })
    }

    /// Reports extents: as many records as fit into the memory.
    fn extents<R: Ring>(&self, req: &Request, cx: &mut Cx<'_, R>) -> Option<Status> {
        let block::Data::One(memory) = req.data else { return Some(Status::Invalid) };
        let (mut at, end, mut used) = (req.offset.0, req.end().0, 0);
        while at < end && used + Extent::RECORD_LEN as u32 <= memory.len {
            let mut seek = |hole| {
                let operation = FileOp::Seek { offset: at, hole };
                cx.try_now(self.file, operation, block::Data::NONE, 0, Blocking::Allowed)
            };
            let data = seek(false)?;
            // After the last data there is a hole to the end; ranges of unknown status count as data.
            let hole = data > at as i64 || data == -i64::from(libc::ENXIO);
            let until = match data {
                _ if hole => data,
                _ if data >= 0 => seek(true)?,
                error => error,
            };
            let until = u64::try_from(until).unwrap_or(end);
            let extent = Extent { len: Bytes(until.min(end) - at), hole, zero: hole };
            let place: Segment = memory.slice(used, Extent::RECORD_LEN as u32);
            cx.ring.bytes_mut(place).copy_from_slice(&extent.to_record());
            used += Extent::RECORD_LEN as u32;
            at += extent.len.0;
        }
        // A repeated answer may be shorter than the first one, whose records must not stay.
        cx.ring.bytes_mut(memory.slice(used, memory.len - used)).fill(0);
        Some(Status::Ok)
    }
}

impl<R: Ring> Node<R> for PlainFile {
    fn attach(&mut self, _: NodeId, tags: usize) {
        self.states = vec![State::default(); tags];
    }

    fn submit(&mut self, io: Cookie, req: &mut Request, cx: &mut Cx<'_, R>) -> Verdict {
        self.states[io.tag.index()] = State::default();
        match req.op {
            Op::Extents => Verdict::Up(self.extents(req, cx).unwrap_or(Status::IoError)),
            Op::WriteZeroes if req.flags.contains(Flags::FAST_ZERO) => Verdict::Up(Status::NotSupported),
            op if op.is_special() => Verdict::Up(Status::NotSupported),
            _ => self.start(io, req, cx),
        }
    }

    fn reap(&mut self, io: Cookie, req: &mut Request, result: i64, cx: &mut Cx<'_, R>) -> Verdict {
        self.ended(io, req, result, cx)
    }
}
