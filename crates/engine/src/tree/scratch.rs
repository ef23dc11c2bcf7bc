//! A tree served to the control plane itself: a ring and a queue of its own, one request at a time.
//!
//! For what has to be read or written while a device is made, or to answer a question about it: a partition
//! table, the head of an overlay. The nodes are further nodes on the tree's shared parts, as a reactor's are,
//! so this may run beside reactors. It waits for each request, so it never runs on a reactor.

use super::{Held, Mounted, Tree};
use crate::device::DeviceError;
use block::{Bytes, Data, Flags, Op, Request, Segment, Status};
use queue::{Owner, Queue, QueueConfig, QueueId, Ring};
use ring::{Choice, Event, KernelRing, RingConfig, Wait};
use std::io;
use std::sync::Arc;

/// Requests are cut to that, in bytes.
const PIECE_LEN: usize = 1 << 20;
/// Memory for them: requests of layers need some too.
const MEMORY_MAX: u64 = 128 << 20;

pub(crate) struct Scratch {
    ring: KernelRing,
    queue: Queue<KernelRing>,
    /// Empty once it was released.
    held: Option<Held>,
    memory: Segment,
    size: Bytes,
}

impl Scratch {
    /// Make nodes and a ring for them.
    pub(crate) fn new(tree: &Tree) -> Result<Scratch, DeviceError> {
        // epoll's threads cost nothing until there is something that waits.
        let config = RingConfig {
            engine: Choice::Epoll,
            receive_buffers: 1,
            receive_buffer_len: 512,
            memory_max: MEMORY_MAX,
            ..RingConfig::default()
        };
        let mut ring = KernelRing::new(config)?;
        let waker = ring.waker();
        let nudge = Arc::new(move || waker.wake());
        let Mounted { stack, held, .. } = tree.mount(&mut ring, 1, nudge)?;
        let config = QueueConfig { id: QueueId(0), depth: 1, segments_per_tag: 1, timeout_ns: None };
        let queue = Queue::new(config, stack)?;
        let memory =
            ring.allocate(PIECE_LEN as u32).ok_or_else(|| io::Error::from(io::ErrorKind::OutOfMemory))?;
        Ok(Scratch { ring, queue, held: Some(held), memory, size: tree.profile().size })
    }

    /// How much there is.
    pub(crate) fn size(&self) -> Bytes {
        self.size
    }

    /// Read. The range must lie within the device, on its logical blocks.
    pub(crate) fn read(&mut self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        for (index, piece) in into.chunks_mut(PIECE_LEN).enumerate() {
            let memory = self.memory.slice(0, piece.len() as u32);
            self.run(Op::Read, offset + (index * PIECE_LEN) as u64, piece.len() as u64, memory)?;
            piece.copy_from_slice(self.ring.bytes(memory));
        }
        Ok(())
    }

    /// Write. The range must lie within the device, on its logical blocks.
    pub(crate) fn write(&mut self, offset: u64, from: &[u8]) -> io::Result<()> {
        for (index, piece) in from.chunks(PIECE_LEN).enumerate() {
            let memory = self.memory.slice(0, piece.len() as u32);
            self.ring.bytes_mut(memory).copy_from_slice(piece);
            self.run(Op::Write, offset + (index * PIECE_LEN) as u64, piece.len() as u64, memory)?;
        }
        Ok(())
    }

    /// Write and flush, also where nothing else is taken because a sync failed ([`Flags::AFTER_LOSS`]).
    pub(crate) fn record(&mut self, offset: u64, from: &[u8]) -> io::Result<()> {
        for (index, piece) in from.chunks(PIECE_LEN).enumerate() {
            let memory = self.memory.slice(0, piece.len() as u32);
            self.ring.bytes_mut(memory).copy_from_slice(piece);
            let at = offset + (index * PIECE_LEN) as u64;
            self.run_with(Flags::AFTER_LOSS, Op::Write, at, piece.len() as u64, memory)?;
        }
        self.run_with(Flags::AFTER_LOSS, Op::Flush, 0, 0, Segment::EMPTY)
    }

    /// Let a range read as zeroes.
    pub(crate) fn write_zeroes(&mut self, offset: u64, len: u64) -> io::Result<()> {
        self.run(Op::WriteZeroes, offset, len, Segment::EMPTY)
    }

    /// Put all of it onto stable storage.
    pub(crate) fn flush(&mut self) -> io::Result<()> {
        self.run(Op::Flush, 0, 0, Segment::EMPTY)
    }

    /// Do one request, to its end.
    fn run(&mut self, op: Op, offset: u64, len: u64, memory: Segment) -> io::Result<()> {
        self.run_with(Flags::NONE, op, offset, len, memory)
    }

    fn run_with(&mut self, flags: Flags, op: Op, offset: u64, len: u64, memory: Segment) -> io::Result<()> {
        let mut req = Request::new(op, Bytes(offset), Bytes(len));
        (req.data, req.flags) = (Data::One(memory), flags);
        let tag = self.queue.tag().ok_or_else(|| io::Error::other("a request is under way"))?;
        self.ring.look_at_clock();
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

    /// Wait for something to happen, and hand it to the queue.
    fn wait(&mut self) -> io::Result<()> {
        let wait = if self.queue.has_parked() { Wait::No } else { Wait::UntilEvent };
        self.ring.turn(wait)?;
        self.ring.look_at_clock();
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

impl Drop for Scratch {
    fn drop(&mut self) {
        // A request that an error left under way has what it needs until the ring is gone.
        while self.queue.is_drained() && !self.queue.close(&mut self.ring) && self.wait().is_ok() {}
        if let Some(held) = self.held.take() {
            held.release(&mut self.ring);
        }
    }
}
