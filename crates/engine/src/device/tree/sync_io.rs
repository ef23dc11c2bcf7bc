//! Synchronous I/O on a tree for the control plane: a ring and a queue of its own, one request at a time.
//!
//! For data that is read or written while a device is created, or to answer a question about it, such as a
//! partition table or the header of an overlay. Its nodes are further nodes on the tree's shared parts, so it
//! may run beside reactors. It blocks its thread for each request, so it never runs on a reactor.

use super::{BuiltNodes, RingResources, Tree};
use crate::device::DeviceError;
use block::{Bytes, Data, Flags, Op, Request, Segment, Status};
use queue::{Owner, Queue, QueueConfig, QueueId, Ring};
use ring::{Choice, Event, KernelRing, RingConfig, Wait};
use std::io;
use std::sync::Arc;

/// Largest request, in bytes.
const REQUEST_LEN: usize = 1 << 20;
/// Memory of the ring, which requests of layers need, too.
const MEMORY_MAX: u64 = 128 << 20;

pub(crate) struct SyncIo {
    ring: KernelRing,
    queue: Queue<KernelRing>,
    /// Empty once released.
    resources: Option<RingResources>,
    memory: Segment,
    size: Bytes,
}

impl SyncIo {
    /// Builds a ring and nodes on it.
    pub(crate) fn new(tree: &Tree) -> Result<SyncIo, DeviceError> {
        // epoll's threads start only when a request would block.
        let config = RingConfig {
            engine: Choice::Epoll,
            receive_buffers: 1,
            receive_buffer_len: 512,
            memory_max: MEMORY_MAX,
            ..RingConfig::default()
        };
        let mut ring = KernelRing::new(config)?;
        let waker = ring.waker();
        let waker: queue::QueueWaker = Arc::new(move || waker.wake());
        let BuiltNodes { stack, resources, .. } = tree.build_nodes(&mut ring, 1, waker.clone())?;
        let config = QueueConfig { id: QueueId(0), depth: 1, segments_per_tag: 1, timeout_ns: None };
        let mut queue = Queue::new(config, stack)?;
        queue.set_waker(waker);
        let memory =
            ring.allocate(REQUEST_LEN as u32).ok_or_else(|| io::Error::from(io::ErrorKind::OutOfMemory))?;
        Ok(SyncIo { ring, queue, resources: Some(resources), memory, size: tree.profile().size })
    }

    /// Size of the tree.
    pub(crate) fn size(&self) -> Bytes {
        self.size
    }

    /// Reads. The range must lie within the device, on its logical blocks.
    pub(crate) fn read(&mut self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        for (index, piece) in into.chunks_mut(REQUEST_LEN).enumerate() {
            let memory = self.memory.slice(0, piece.len() as u32);
            self.run(Op::Read, offset + (index * REQUEST_LEN) as u64, piece.len() as u64, memory)?;
            piece.copy_from_slice(self.ring.bytes(memory));
        }
        Ok(())
    }

    /// Writes. The range must lie within the device, on its logical blocks.
    pub(crate) fn write(&mut self, offset: u64, from: &[u8]) -> io::Result<()> {
        for (index, piece) in from.chunks(REQUEST_LEN).enumerate() {
            let memory = self.memory.slice(0, piece.len() as u32);
            self.ring.bytes_mut(memory).copy_from_slice(piece);
            self.run(Op::Write, offset + (index * REQUEST_LEN) as u64, piece.len() as u64, memory)?;
        }
        Ok(())
    }

    /// Writes and flushes, also if other requests are refused because a sync failed ([`Flags::AFTER_LOSS`]).
    pub(crate) fn record(&mut self, offset: u64, from: &[u8]) -> io::Result<()> {
        for (index, piece) in from.chunks(REQUEST_LEN).enumerate() {
            let memory = self.memory.slice(0, piece.len() as u32);
            self.ring.bytes_mut(memory).copy_from_slice(piece);
            let at = offset + (index * REQUEST_LEN) as u64;
            self.run_with(Flags::AFTER_LOSS, Op::Write, at, piece.len() as u64, memory)?;
        }
        self.run_with(Flags::AFTER_LOSS, Op::Flush, 0, 0, Segment::EMPTY)
    }

    /// Writes zeroes.
    pub(crate) fn write_zeroes(&mut self, offset: u64, len: u64) -> io::Result<()> {
        self.run(Op::WriteZeroes, offset, len, Segment::EMPTY)
    }

    /// Flushes.
    pub(crate) fn flush(&mut self) -> io::Result<()> {
        self.run(Op::Flush, 0, 0, Segment::EMPTY)
    }

    /// Executes one request.
    fn run(&mut self, op: Op, offset: u64, len: u64, memory: Segment) -> io::Result<()> {
        self.run_with(Flags::empty(), op, offset, len, memory)
    }

    fn run_with(&mut self, flags: Flags, op: Op, offset: u64, len: u64, memory: Segment) -> io::Result<()> {
        let mut req = Request::new(op, Bytes(offset), Bytes(len));
        (req.data, req.flags) = (Data::One(memory), flags);
        let tag = self.queue.tag().ok_or_else(|| io::Error::other("a request is in flight"))?;
        self.ring.read_clock();
        self.queue.submit(tag, Owner(0), req, &mut self.ring);
        loop {
            self.queue.turn(&mut self.ring);
            self.queue.account(self.ring.now());
            let done = self.queue.done().next();
            if let Some(done) = done {
                self.queue.release(done.tag);
                return match done.status {
                    Status::Ok => Ok(()),
                    status => Err(io::Error::from_raw_os_error(status.errno())),
                };
            }
            self.wait()?;
        }
    }

    /// Waits for an event and passes it to the queue.
    fn wait(&mut self) -> io::Result<()> {
        let wait = if self.queue.has_parked() { Wait::No } else { Wait::UntilEvent };
        self.ring.turn(wait)?;
        self.ring.read_clock();
        while let Some(event) = self.ring.next_event() {
            if let Event::Io { cookie, result, .. } = event {
                self.queue.complete(cookie, result, &mut self.ring);
            } else if let Some((owner, event)) = event.to_node() {
                self.queue.node_event(owner.node, event, &mut self.ring);
            }
        }
        Ok(())
    }
}

impl Drop for SyncIo {
    fn drop(&mut self) {
        // A request that was in flight after an error keeps its memory until the ring is gone.
        while self.queue.is_drained() && !self.queue.close(&mut self.ring) && self.wait().is_ok() {}
        if let Some(resources) = self.resources.take() {
            resources.release(&mut self.ring);
        }
    }
}
