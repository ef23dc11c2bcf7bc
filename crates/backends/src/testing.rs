//! Test harness for backends: a queue of one node over a ring in memory with real files.
//!
//! Time is virtual: it advances to the next timer when nothing else is left to do. File operations are
//! performed when they are reaped, with `std`, unless `faults` has another result for them.

use block::{Bytes, Cookie, Data, Extent, Flags, Op, Region, Request, Segment, Status};
use queue::testing::{TestFiles, TestMemory};
use queue::{
    Blocking, FileId, FileOp, IoId, Nanos, Node, Owner, Queue, QueueConfig, QueueId, Ring, RingFull, Stack,
};
use std::collections::VecDeque;
use std::os::unix::fs::FileExt;

/// Selects the operations to which a fault applies.
pub(crate) type Applies = fn(&FileOp) -> bool;

/// The result of an operation that fails or is truncated.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Fault {
    /// Fails with this errno.
    Errno(i32),
    /// Moves at most this many bytes.
    Short(usize),
}

/// A file operation that a node requested.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Asked {
    pub(crate) op: FileOp,
    /// Whether it was performed inline instead of started.
    pub(crate) now: bool,
}

pub(crate) type TestRing = queue::testing::TestRing<Files>;

/// Real files, with seeded faults.
#[derive(Default)]
pub(crate) struct Files {
    /// Files 0, 1, … of the ring.
    files: Vec<std::fs::File>,
    started: VecDeque<(IoId, FileId, FileOp, Vec<Segment>)>,
    /// Faults; the first one is consumed by an operation for which its function returns `true`.
    pub(crate) faults: VecDeque<(Applies, Fault)>,
    /// Whether operations that must not block cannot be done inline.
    pub(crate) cold: bool,
    pub(crate) asked: Vec<Asked>,
    /// Number of further operations that cannot be started.
    pub(crate) full: usize,
    /// Whether inline operations are batched.
    pub(crate) batches: bool,
    /// Whether operations done inline take 5 ms.
    pub(crate) slow: bool,
    /// Whether only the kernel can access the tests' memory; nodes can access memory that they allocate.
    pub(crate) opaque: bool,
    /// Regions of the tests' memory.
    foreign: Vec<Region>,
}

impl Files {
    fn perform(&mut self, memory: &mut TestMemory, file: FileId, op: FileOp, data: &[Segment]) -> i64 {
        let fault = match self.faults.front() {
            Some((applies, fault)) if applies(&op) => {
                let fault = *fault;
                self.faults.pop_front();
                Some(fault)
            }
            _ => None,
        };
        let most = match fault {
            Some(Fault::Errno(errno)) => return -i64::from(errno),
            Some(Fault::Short(most)) => most,
            None => usize::MAX,
        };
        match self.perform_up_to(memory, file, op, data, most) {
            Ok(count) => count,
            Err(error) => -i64::from(error.raw_os_error().unwrap_or(libc::EIO)),
        }
    }

    fn perform_up_to(
        &mut self,
        memory: &mut TestMemory,
        file: FileId,
        op: FileOp,
        data: &[Segment],
        most: usize,
    ) -> std::io::Result<i64> {
        let file = &self.files[file.0 as usize];
        let total = data.iter().map(|s| s.len as usize).sum::<usize>().min(most);
        match op {
            FileOp::Read { offset } => {
                let mut buffer = Aligned::new(total);
                let count = file.read_at(buffer.bytes(), offset)?;
                let mut done = 0;
                for piece in data {
                    let len = (piece.len as usize).min(count - done);
                    let into = memory.bytes_mut(piece.slice(0, len as u32));
                    into.copy_from_slice(&buffer.bytes()[done..done + len]);
                    done += len;
                }
                Ok(count as i64)
            }
            FileOp::Write { offset, durable } => {
                let all: Vec<u8> = data.iter().flat_map(|&piece| memory.bytes(piece)).copied().collect();
                let mut buffer = Aligned::new(total);
                buffer.bytes().copy_from_slice(&all[..total]);
                let count = file.write_at(buffer.bytes(), offset)?;
                if durable {
                    file.sync_data()?;
                }
                Ok(count as i64)
            }
            FileOp::Sync => file.sync_data().map(|()| 0),
            FileOp::Allocate { mode, offset, len } => {
                crate::file::sys::allocate(file, mode, offset, len).map(|()| 0)
            }
            FileOp::Seek { offset, hole } => crate::file::sys::seek(file, offset, hole).map(|at| at as i64),
            FileOp::Prefetch { .. } => Ok(0),
        }
    }
}

/// A buffer that direct I/O accepts.
struct Aligned {
    memory: Vec<u8>,
    start: usize,
    len: usize,
}

impl Aligned {
    fn new(len: usize) -> Aligned {
        let memory = vec![0u8; len + 4096];
        let start = memory.as_ptr().align_offset(4096);
        Aligned { memory, start, len }
    }

    fn bytes(&mut self) -> &mut [u8] {
        &mut self.memory[self.start..self.start + self.len]
    }
}

impl TestFiles for Files {
    fn try_now(
        &mut self,
        memory: &mut TestMemory,
        file: FileId,
        op: FileOp,
        data: &[Segment],
        blocking: Blocking,
    ) -> Option<i64> {
        if blocking == Blocking::Never && self.cold && !matches!(op, FileOp::Seek { .. }) {
            return None;
        }
        self.asked.push(Asked { op, now: true });
        if self.slow {
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        Some(self.perform(memory, file, op, data))
    }

    fn try_batched(&mut self, id: IoId, file: FileId, op: FileOp, data: &[Segment], _: Blocking) -> bool {
        if self.batches {
            self.asked.push(Asked { op, now: true });
            self.started.push_back((id, file, op, data.to_vec()));
        }
        self.batches
    }

    fn batch_ns(&self) -> u64 {
        if self.slow { 5_000_000 } else { 0 }
    }

    fn start(&mut self, id: IoId, file: FileId, op: FileOp, data: &[Segment]) -> Result<(), RingFull> {
        if self.full > 0 {
            self.full -= 1;
            return Err(RingFull);
        }
        self.asked.push(Asked { op, now: false });
        self.started.push_back((id, file, op, data.to_vec()));
        Ok(())
    }

    fn is_opaque(&self, segment: Segment) -> bool {
        self.opaque && self.foreign.contains(&segment.region)
    }
}

/// A queue of one node.
pub(crate) struct Harness {
    pub(crate) ring: TestRing,
    queue: Queue<TestRing>,
}

impl Harness {
    pub(crate) fn new(node: Box<dyn Node<TestRing>>) -> Harness {
        Harness::with_files(node, Vec::new())
    }

    /// Creates a queue on the node; `files` are files 0, 1, … of the ring.
    pub(crate) fn with_files(node: Box<dyn Node<TestRing>>, files: Vec<std::fs::File>) -> Harness {
        let mut stack = Stack::default();
        stack.backend(node);
        let config = QueueConfig { id: QueueId(0), depth: 16, segments_per_tag: 128, timeout_ns: None };
        let files = Files { files, ..Files::default() };
        let mut ring = TestRing::at(Nanos(1_000_000));
        ring.files = files;
        Harness { ring, queue: Queue::new(config, stack).unwrap() }
    }

    /// Submits a request.
    pub(crate) fn submit(&mut self, mut req: Request, pieces: &[Segment]) {
        let tag = self.queue.tag().unwrap();
        if !pieces.is_empty() {
            req.data = self.queue.run(tag, pieces).unwrap();
        }
        self.queue.submit(tag, Owner(u32::from(tag.0)), req, &mut self.ring);
    }

    fn complete(&mut self, cookie: Cookie, result: i64) {
        self.queue.complete(cookie, result, &mut self.ring);
    }

    /// Runs turns until nothing is in flight. Returns statuses in the order of completion, with the data of
    /// each request.
    pub(crate) fn drain(&mut self) -> Vec<(Status, Data)> {
        self.drain_requests().into_iter().map(|(status, req)| (status, req.data)).collect()
    }

    fn drain_requests(&mut self) -> Vec<(Status, Request)> {
        let mut ends = Vec::new();
        for _ in 0..10_000 {
            let done: Vec<_> = self.queue.done().collect();
            for end in done {
                ends.push((end.status, *self.queue.request(end.tag)));
                self.queue.release(end.tag);
            }
            if self.queue.in_flight() == 0 {
                return ends;
            }
            if let Some((id, file, op, data)) = self.ring.files.started.pop_front() {
                let TestRing { files, memory, .. } = &mut self.ring;
                let result = files.perform(memory, file, op, &data);
                self.complete(id.cookie, result);
            } else if let Some((id, result)) = self.ring.end_timer(Nanos(u64::MAX)) {
                self.complete(id.cookie, result);
            }
            self.queue.turn(&mut self.ring);
        }
        panic!("{} requests never end", self.queue.in_flight());
    }

    pub(crate) fn one(&mut self, req: Request, pieces: &[Segment]) -> (Status, Data) {
        self.submit(req, pieces);
        let ends = self.drain();
        assert_eq!(ends.len(), 1);
        ends[0]
    }

    /// Runs a request without data. Returns its status.
    pub(crate) fn bare(&mut self, op: Op, offset: u64, len: u64) -> Status {
        self.with(op, offset, len, Flags::empty())
    }

    pub(crate) fn with(&mut self, op: Op, offset: u64, len: u64, flags: Flags) -> Status {
        self.one(Request { flags, ..Request::new(op, Bytes(offset), Bytes(len)) }, &[]).0
    }

    /// Allocates memory whose first byte is `skew` bytes into its region.
    pub(crate) fn memory(&mut self, len: u32, skew: u32) -> Segment {
        let memory = self.ring.memory.own(len + skew).slice(skew, len);
        self.ring.files.foreign.push(memory.region);
        memory
    }

    pub(crate) fn write(&mut self, offset: u64, data: &[u8], flags: Flags) -> Status {
        self.write_skewed(offset, data, flags, 0)
    }

    pub(crate) fn write_skewed(&mut self, offset: u64, data: &[u8], flags: Flags, skew: u32) -> Status {
        let memory = self.memory(data.len() as u32, skew);
        self.ring.bytes_mut(memory).copy_from_slice(data);
        let req = Request::new(Op::Write, Bytes(offset), Bytes(data.len() as u64));
        self.one(Request { flags, ..req }, &[memory]).0
    }

    pub(crate) fn read(&mut self, offset: u64, len: u32) -> (Status, Vec<u8>) {
        self.read_skewed(offset, len, 0)
    }

    pub(crate) fn read_skewed(&mut self, offset: u64, len: u32, skew: u32) -> (Status, Vec<u8>) {
        let memory = self.memory(len, skew);
        let (status, _) = self.one(Request::new(Op::Read, Bytes(offset), Bytes(len.into())), &[memory]);
        (status, self.ring.bytes(memory).to_vec())
    }

    /// Runs a zero-copy read. Returns its status, and its data as the node set it.
    pub(crate) fn read_zero_copy(&mut self, offset: u64, len: u32) -> (Status, Data) {
        let memory = self.memory(len, 0);
        let req = Request::new(Op::Read, Bytes(offset), Bytes(len.into()));
        self.one(Request { flags: Flags::ZERO_COPY, ..req }, &[memory])
    }

    /// Runs a zone append. Returns its status and the offset of its data.
    pub(crate) fn append(&mut self, offset: u64, data: &[u8]) -> (Status, u64) {
        let memory = self.memory(data.len() as u32, 0);
        self.ring.bytes_mut(memory).copy_from_slice(data);
        self.submit(Request::new(Op::ZoneAppend, Bytes(offset), Bytes(data.len() as u64)), &[memory]);
        let (status, req) = self.drain_requests()[0];
        (status, req.offset.0)
    }

    /// Runs a request that returns records. Returns their first `room` bytes.
    pub(crate) fn answer(&mut self, op: Op, offset: u64, len: u64, room: usize) -> Vec<u8> {
        let memory = self.memory(room as u32, 0);
        let (status, _) = self.one(Request::new(op, Bytes(offset), Bytes(len)), &[memory]);
        assert_eq!(status, Status::Ok);
        self.ring.bytes(memory).to_vec()
    }

    pub(crate) fn write_segments(&mut self, offset: u64, data: &[u8], lens: &[u32]) -> Status {
        let mut rest = data;
        let pieces: Vec<Segment> = lens
            .iter()
            .map(|&len| {
                let (head, tail) = rest.split_at(len as usize);
                rest = tail;
                let memory = self.memory(len, 0);
                self.ring.bytes_mut(memory).copy_from_slice(head);
                memory
            })
            .collect();
        self.one(Request::new(Op::Write, Bytes(offset), Bytes(data.len() as u64)), &pieces).0
    }

    pub(crate) fn read_segments(&mut self, offset: u64, lens: &[u32]) -> (Status, Vec<u8>) {
        let pieces: Vec<Segment> = lens.iter().map(|&len| self.memory(len, 0)).collect();
        let total = lens.iter().map(|&len| u64::from(len)).sum();
        let (status, _) = self.one(Request::new(Op::Read, Bytes(offset), Bytes(total)), &pieces);
        (status, pieces.iter().flat_map(|&piece| self.ring.bytes(piece)).copied().collect())
    }

    /// Returns the extents of a range, using a buffer for `most` records in two segments of odd length.
    pub(crate) fn extents(&mut self, offset: u64, len: u64, most: usize) -> Vec<Extent> {
        let bytes = (most * Extent::RECORD_LEN) as u32;
        let pieces = [self.memory(9, 0), self.memory(bytes - 9, 0)];
        let (status, _) = self.one(Request::new(Op::Extents, Bytes(offset), Bytes(len)), &pieces);
        assert_eq!(status, Status::Ok);
        let all: Vec<u8> = pieces.iter().flat_map(|&piece| self.ring.bytes(piece)).copied().collect();
        all.chunks(Extent::RECORD_LEN).map_while(Extent::from_record).collect()
    }
}
