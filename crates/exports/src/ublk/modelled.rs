//! A ring with the model of the ublk driver: calls of [`Driver`] go to [`::ublk::Model`], all others to an
//! inner ring. For tests and simulation; requires no kernel feature.
//!
//! The owning thread takes completions with [`next_ended`](ModelRing::next_ended), as a reactor takes
//! events. It reports every completion of the inner ring here before it reports it to a queue: while the
//! inner ring works on memory that only the driver can access, memory of the inner ring stands in for it.
//!
//! *Invariant:* the inner ring uses neither the numbers of this ring's own regions nor that of the
//! character device.

use super::driver::{Batches, Driver, KernelBuffers, QueueMemory};
use ::ublk::model::{CharDevice, RingId, ServerMemory};
use ::ublk::{BatchIo, Descriptors, IoCommand};
use block::{Region, Segment};
use queue::{Blocking, FileId, FileOp, IoId, Nanos, Ring, RingFull};
use ring::{KERNEL_BUFFER_SHIFT, Token};
use std::collections::VecDeque;
use std::io;

/// Region of the registered-buffer table.
const TABLE: Region = Region(u16::MAX);
/// File of the character device.
const DEVICE: FileId = FileId(u32::MAX);
/// Bit position of the region's number in an address. The number is incremented by one, so that no address
/// is 0.
const REGION_SHIFT: u32 = 40;

/// An operation of the inner ring on memory that stands in for a request's memory.
struct Standing {
    id: IoId,
    segment: Segment,
    stand_in: Segment,
    reads: bool,
}

/// A ring with the model of the driver.
pub struct ModelRing<R> {
    /// The ring for all other calls.
    pub inner: R,
    /// Number of copies, from the next one on, that fail with [`RingFull`].
    pub copies_refused: u32,
    /// Number of further calls of [`reserve`](Driver::reserve) that succeed.
    pub reserves_left: u32,
    /// If the next batch is longer than this, only this many of its tags are processed.
    pub refuse_after: Option<u16>,
    device: CharDevice,
    ring: RingId,
    thread: u64,
    /// Completed copies.
    ended: VecDeque<(Token, i64)>,
    standing: Vec<Standing>,
    next_buffer: u16,
}

/// Gives the model access to the inner ring's memory by address.
struct Addressed<'a, R>(&'a mut R);

impl<R: Ring> Addressed<'_, R> {
    fn segment(addr: u64, len: usize) -> Segment {
        let region = Region(((addr >> REGION_SHIFT) - 1) as u16);
        Segment { offset: addr & ((1 << REGION_SHIFT) - 1), len: len as u32, region }
    }
}

impl<R: Ring> ServerMemory for Addressed<'_, R> {
    fn read(&self, addr: u64, into: &mut [u8]) {
        into.copy_from_slice(self.0.bytes(Self::segment(addr, into.len())));
    }

    fn write(&mut self, addr: u64, from: &[u8]) {
        self.0.bytes_mut(Self::segment(addr, from.len())).copy_from_slice(from);
    }
}

impl<R: Ring> ModelRing<R> {
    /// Creates the ring of one thread of a server that has `device` open.
    pub fn new(inner: R, device: CharDevice, thread: u64) -> ModelRing<R> {
        let ring = device.ring();
        ModelRing {
            inner,
            copies_refused: 0,
            reserves_left: u32::MAX,
            refuse_after: None,
            device,
            ring,
            thread,
            ended: VecDeque::new(),
            standing: Vec::new(),
            next_buffer: 0,
        }
    }

    /// Returns the character device, and the number of this ring at the device.
    pub fn device(&self) -> (&CharDevice, RingId) {
        (&self.device, self.ring)
    }

    /// Returns the character device as a file of this ring.
    pub fn file(&self) -> FileId {
        DEVICE
    }

    /// Returns the descriptors of a queue.
    ///
    /// # Errors
    /// The queue does not exist.
    pub fn descriptors(&self, queue: u16) -> io::Result<Descriptors> {
        self.device.descriptors(queue)
    }

    /// Returns the next completed command or copy, which a reactor gets as [`ring::Event::Ended`].
    pub fn next_ended(&mut self) -> Option<(Token, i64)> {
        if let Some(ended) = self.ended.pop_front() {
            return Some(ended);
        }
        let (number, result) = self.device.next_ended(self.ring, &mut Addressed(&mut self.inner))?;
        Some((token_of(number), result.into()))
    }

    /// Reports the completion of an operation of the inner ring.
    pub fn io_ended(&mut self, id: IoId, result: i64) {
        let Some(position) = self.standing.iter().position(|standing| standing.id == id) else { return };
        let Standing { segment, stand_in, reads, .. } = self.standing.swap_remove(position);
        if reads && result > 0 {
            let data = self.inner.bytes(stand_in.slice(0, result as u32)).to_vec();
            self.with_request(segment, |memory| memory[..data.len()].copy_from_slice(&data));
        }
        self.inner.free(stand_in);
    }

    /// Returns the inner ring after the end of the server's process. Its operations in flight are ignored
    /// from then on.
    pub fn into_inner(self) -> R {
        self.inner
    }

    fn with_request(&mut self, segment: Segment, act: impl FnOnce(&mut [u8])) {
        let (entry, skip) =
            (segment.offset >> KERNEL_BUFFER_SHIFT, segment.offset & ((1 << KERNEL_BUFFER_SHIFT) - 1));
        let range = skip as usize..skip as usize + segment.len as usize;
        let found = self.device.with_buffer(self.ring, entry as u16, |data| act(&mut data[range]));
        assert!(found.is_some(), "{segment:?} names a buffer that is not registered");
    }
}

/// Encodes a token for the model.
fn number_of(token: Token) -> u64 {
    u64::from(token.front) << 48 | u64::from(token.index) << 32 | u64::from(token.number)
}

fn token_of(number: u64) -> Token {
    Token { front: (number >> 48) as u8, index: (number >> 32) as u16, number: number as u32 }
}

impl<R: Ring> Batches for ModelRing<R> {
    fn commit_batch(&mut self, token: Token, file: FileId, op: u32, command: BatchIo, memory: Segment) {
        assert_eq!(file, DEVICE, "a command for another file");
        let (mut command, mut memory) = (command, memory);
        if let Some(most) = self.refuse_after.take_if(|most| *most < command.nr_elem) {
            command.nr_elem = most;
            memory.len = u32::from(most) * u32::from(command.elem_bytes);
        }
        let elements = self.inner.bytes(memory).to_vec();
        let whose = (self.ring, self.thread, number_of(token));
        self.device.batch(whose, op, command, &elements, &mut Addressed(&mut self.inner));
    }

    fn fetch_tags(&mut self, token: Token, file: FileId, op: u32, command: BatchIo) {
        assert_eq!(file, DEVICE, "a command for another file");
        let whose = (self.ring, self.thread, number_of(token));
        self.device.batch(whose, op, command, &[], &mut Addressed(&mut self.inner));
    }

    /// Has no effect; see [`withdraw`](Driver::withdraw).
    fn withdraw_fetch(&mut self, _: Token) {}
}

impl<R: Ring> Driver for ModelRing<R> {
    fn command(&mut self, token: Token, file: FileId, op: u32, command: IoCommand, address: u64) {
        assert_eq!(file, DEVICE, "a command for another file");
        let whose = (self.ring, self.thread, number_of(token));
        self.device.command(whose, op, command, address, &mut Addressed(&mut self.inner));
    }

    /// Has no effect: the model completes every command when it is stopped, or when its server dies.
    fn withdraw(&mut self, _: Token) {}

    fn copy(&mut self, token: Token, file: FileId, op: FileOp, memory: Segment) -> Result<(), RingFull> {
        assert_eq!(file, DEVICE, "a copy with another file");
        if self.copies_refused > 0 {
            self.copies_refused -= 1;
            return Err(RingFull);
        }
        let result = match op {
            FileOp::Read { offset } => self.device.read_at(offset, self.inner.bytes_mut(memory)),
            FileOp::Write { offset, .. } => self.device.write_at(offset, self.inner.bytes(memory)),
            _ => -i64::from(libc::EINVAL),
        };
        self.ended.push_back((token, result));
        Ok(())
    }

    fn address(&self, segment: Segment) -> u64 {
        u64::from(segment.region.0 + 1) << REGION_SHIFT | segment.offset
    }

    fn reserve(&mut self, len: u64) -> Option<QueueMemory> {
        self.reserves_left = self.reserves_left.checked_sub(1)?;
        self.inner.allocate(u32::try_from(len).ok()?).map(QueueMemory::Buffers)
    }

    fn reserve_kernel_buffers(&mut self, count: u16) -> Option<QueueMemory> {
        let first = self.next_buffer;
        self.next_buffer = first.checked_add(count)?;
        let base = u64::from(first) << KERNEL_BUFFER_SHIFT;
        Some(QueueMemory::Kernel(KernelBuffers { region: TABLE, first, base }))
    }

    /// Entries of the table are not reused: no test needs that many.
    fn unreserve(&mut self, memory: QueueMemory) {
        if let QueueMemory::Buffers(memory) = memory {
            self.inner.free(memory);
        }
    }
}

impl<R: Ring> Ring for ModelRing<R> {
    fn now(&self) -> Nanos {
        self.inner.now()
    }

    fn allocate(&mut self, len: u32) -> Option<Segment> {
        self.inner.allocate(len)
    }

    fn free(&mut self, segment: Segment) {
        self.inner.free(segment);
    }

    fn bytes(&self, segment: Segment) -> &[u8] {
        self.inner.bytes(segment)
    }

    fn bytes_mut(&mut self, segment: Segment) -> &mut [u8] {
        self.inner.bytes_mut(segment)
    }

    fn is_opaque(&self, segment: Segment) -> bool {
        segment.region == TABLE && segment.len > 0
    }

    fn try_now(&mut self, file: FileId, op: FileOp, data: &[Segment], blocking: Blocking) -> Option<i64> {
        if data.iter().any(|&segment| self.is_opaque(segment)) {
            return None;
        }
        self.inner.try_now(file, op, data, blocking)
    }

    fn start(&mut self, id: IoId, file: FileId, op: FileOp, data: &[Segment]) -> Result<(), RingFull> {
        let &[segment] = data else { return self.inner.start(id, file, op, data) };
        if !self.is_opaque(segment) {
            return self.inner.start(id, file, op, data);
        }
        // The memory is page-aligned, as the memory of requests is.
        let whole = self.inner.allocate(segment.len.max(4096)).ok_or(RingFull)?;
        let stand_in = whole.slice(0, segment.len);
        let reads = matches!(op, FileOp::Read { .. });
        if !reads {
            let mut bytes = vec![0; segment.len as usize];
            self.with_request(segment, |data| bytes.copy_from_slice(data));
            self.inner.bytes_mut(stand_in).copy_from_slice(&bytes);
        }
        let started = self.inner.start(id, file, op, &[stand_in]);
        match started {
            Ok(()) => self.standing.push(Standing { id, segment, stand_in: whole, reads }),
            Err(RingFull) => self.inner.free(whole),
        }
        started
    }

    fn timer(&mut self, id: IoId, at: Nanos) {
        self.inner.timer(id, at);
    }

    fn cancel(&mut self, id: IoId) {
        self.inner.cancel(id);
    }
}
