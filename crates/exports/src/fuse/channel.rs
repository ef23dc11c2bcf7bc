//! One file descriptor of a mount's connection, and how requests are read from it.

use super::entries::{End, Entries};
use super::parts::Waiting;
use super::shared::{HELD_MAX, HELD_WHOLE_MAX, MountState, TRANSFER_MAX};
use super::{Front, Pdu, ServedQueue, Via};
use crate::Turn;
use block::{Segment, Tag};
use proto::fuse::Header;
use proto::fuse::wire::HEAD_LEN;
use queue::{Blocking, FileId, FileOp, QueueId, Ring};
use ring::{KernelRing, Token};
use std::collections::VecDeque;
use std::sync::Arc;

/// Bytes for the head of a request, followed by space for an encoded reply.
pub(super) const HEAD_ROOM: u32 = 512;
/// Offset of the encoded reply.
const ANSWER_AT: u32 = 256;
/// Number of requests read before completed ones are answered: few enough that the first does not wait long
/// (4 KiB requests of a file in memory take a microsecond each), and enough to spread the cost of a turn.
const BATCH: usize = 16;

/// Returns how many bytes the ring allocates for this memory: a power of two.
fn room_of(memory: Segment) -> u64 {
    u64::from(memory.len).next_power_of_two()
}

/// Whether the ring notifies the channel of its next request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Watch {
    /// No notification: the channel is polled.
    No,
    /// The ring watches the descriptor.
    Yes,
    /// The watch is being cancelled.
    Ending,
}

pub(super) struct Channel {
    pub(super) file: FileId,
    pub(super) queue: QueueId,
    pub(super) token: Token,
    pub(super) shared: Arc<MountState>,
    pub(super) head: Segment,
    /// Memory for the rest of the next request. `None`: the last request keeps that memory, so allocate
    /// another.
    pub(super) body: Option<Segment>,
    pub(super) watch: Watch,
    /// Whether the descriptor may have more requests.
    pub(super) is_hot: bool,
    /// Whether the channel has ended: it reads no more requests.
    pub(super) is_over: bool,
    pub(super) in_stack: u32,
    /// Bytes of memory held by requests, without those of io_uring entries, which have their own memory.
    held: u64,
    /// Whether the channel was abandoned while the kernel still had entries of it.
    pub(super) is_given_up: bool,
    /// The io_uring entries, if requests arrive that way.
    pub(super) entries: Option<Entries>,
    /// Requests that may not start yet.
    pub(super) waiting: VecDeque<Waiting>,
    /// Buffer for read-modify-write; `None` before the first sub-block write.
    pub(super) part_room: Option<Segment>,
    /// Whether a write is using that buffer.
    pub(super) part_room_in_use: bool,
}

/// Result of reading a request.
enum Intake {
    /// A request of this many bytes was read.
    Request(usize),
    /// No request is pending.
    Nothing,
    /// The requests in flight hold all the memory that the channel may use.
    Full,
    /// The file system was unmounted.
    Unmounted,
}

impl Channel {
    pub(super) fn new(
        file: FileId,
        queue: QueueId,
        token: Token,
        shared: Arc<MountState>,
        head: Segment,
    ) -> Channel {
        Channel {
            file,
            queue,
            token,
            shared,
            head,
            body: None,
            watch: Watch::No,
            is_hot: true,
            is_over: false,
            in_stack: 0,
            held: 0,
            is_given_up: false,
            entries: None,
            waiting: VecDeque::new(),
            part_room: None,
            part_room_in_use: false,
        }
    }

    /// Returns the space for an encoded reply.
    pub(super) fn answer_room(&self, via: Via) -> Segment {
        match (via, &self.entries) {
            (Via::Entry { entry, .. }, Some(entries)) => entries.answer_room(entry),
            _ => self.head.slice(ANSWER_AT, HEAD_ROOM - ANSWER_AT),
        }
    }

    /// Sends a reply with only a status.
    pub(super) fn end(&mut self, via: Via, end: End, ring: &mut KernelRing) {
        match via {
            Via::Entry { entry, .. } => self.answer_entry(entry, end, 0, ring),
            Via::Device => {
                let room = self.answer_room(via);
                let len = proto::fuse::put_end(ring.bytes_mut(room), end.unique, end.errno, 0);
                self.answer(&[room.slice(0, len as u32)], ring);
            }
        }
    }

    /// Sends the encoded reply.
    pub(super) fn answer_from_room(&mut self, via: Via, unique: u64, len: u32, ring: &mut KernelRing) {
        match via {
            Via::Entry { entry, .. } => {
                self.answer_entry_from_room(entry, End { unique, errno: 0 }, len, ring)
            }
            Via::Device => {
                let room = self.answer_room(via);
                self.answer(&[room.slice(0, len)], ring);
            }
        }
    }

    /// Sends a reply with `len` bytes of read data, starting at `skip`.
    pub(super) fn answer_data(
        &mut self,
        pdu: &Pdu,
        data: Segment,
        skip: u32,
        len: u32,
        ring: &mut KernelRing,
    ) {
        match pdu.via {
            Via::Entry { entry, .. } => {
                if skip > 0 {
                    ring.copy(data.slice(skip, len), data.slice(0, len));
                }
                self.answer_entry(entry, End { unique: pdu.unique, errno: 0 }, len, ring);
            }
            Via::Device => {
                let room = self.answer_room(pdu.via);
                let header = proto::fuse::put_end(ring.bytes_mut(room), pdu.unique, 0, len);
                self.answer(&[room.slice(0, header as u32), data.slice(skip, len)], ring);
            }
        }
    }

    /// Charges memory to a request until it is [returned](Channel::take_back).
    #[inline]
    pub(super) fn hold(&mut self, memory: Segment) -> Segment {
        self.held += room_of(memory);
        memory
    }

    /// Gives a write the memory that holds its `len` bytes. Returns `None` if they were not read from the
    /// descriptor.
    #[inline]
    pub(super) fn hold_body(&mut self, len: u32, ring: &mut KernelRing) -> Option<Segment> {
        let body = self.body?;
        if self.held >= HELD_WHOLE_MAX
            && len <= TRANSFER_MAX / 2
            && let Some(fitting) = ring.allocate(len)
        {
            ring.copy(body.slice(0, len), fitting);
            return Some(self.hold(fitting));
        }
        // The data stays in the buffer that it was read into; the next request is read into another one.
        self.body = None;
        Some(self.hold(body))
    }

    /// Frees a request's memory.
    pub(super) fn take_back(&mut self, memory: Segment, ring: &mut KernelRing) {
        if memory.len == 0 {
            return;
        }
        self.held -= room_of(memory);
        match self.body {
            // Read the next request into this memory, which is in the cache.
            None if memory.len == TRANSFER_MAX => self.body = Some(memory),
            _ => ring.free(memory),
        }
    }

    /// Reads one request, if one is pending.
    fn take(&mut self, ring: &mut KernelRing) -> Intake {
        if self.held + u64::from(TRANSFER_MAX) > HELD_MAX {
            // The next request might be that large. Completions resume the channel.
            return Intake::Full;
        }
        let Some(body) = self.body.or_else(|| ring.allocate(TRANSFER_MAX)) else {
            // Requests in the stack hold all memory; their completions resume the channel.
            return Intake::Full;
        };
        self.body = Some(body);
        let into = [self.head.slice(0, HEAD_LEN as u32), body];
        loop {
            match ring.try_now(self.file, FileOp::Read { offset: 0 }, &into, Blocking::Allowed) {
                Some(len) if len > 0 => return Intake::Request(len as usize),
                // The kernel withdrew the next request while it was being read.
                Some(error) if error == -i64::from(libc::ENOENT) => {}
                Some(error) if error == -i64::from(libc::EAGAIN) => return Intake::Nothing,
                None => return Intake::Nothing,
                Some(_) => return Intake::Unmounted,
            }
        }
    }

    /// Writes a reply that consists of these segments.
    pub(super) fn answer(&mut self, pieces: &[Segment], ring: &mut KernelRing) {
        let op = FileOp::Write { offset: 0, durable: false };
        match ring.try_now(self.file, op, pieces, Blocking::Allowed) {
            Some(len) if len >= 0 => {}
            // The calling process was killed and no longer waits.
            Some(error) if error == -i64::from(libc::ENOENT) => {}
            Some(error) if error == -i64::from(libc::ENODEV) => self.is_over = true,
            // The kernel refuses the reply, so the calling process would wait forever: fail the request.
            _ => self.refuse_last(pieces[0], ring),
        }
    }

    /// Replies with EIO in place of the reply that starts here, which the kernel refused.
    #[cold]
    fn refuse_last(&mut self, answer: Segment, ring: &mut KernelRing) {
        let bytes = ring.bytes_mut(answer.slice(0, 16));
        let unique = u64::from_ne_bytes(bytes[8..16].try_into().unwrap_or_default());
        let len = proto::fuse::put_end(bytes, unique, libc::EIO, 0);
        let op = FileOp::Write { offset: 0, durable: false };
        ring.try_now(self.file, op, &[answer.slice(0, len as u32)], Blocking::Allowed);
    }
}

impl Front {
    /// Reads requests until there are no more, no tag is free, or a batch is complete.
    pub(super) fn pump(&mut self, index: usize, turn: &mut Turn<'_>) {
        let Some(queue) = self.channels[index].as_ref().map(|channel| channel.queue) else { return };
        for taken in 0..BATCH {
            let Some(channel) = self.channels[index].as_mut() else { return };
            if channel.is_over {
                return;
            }
            let Some(tag) = turn.queues.get_mut(queue).tag() else {
                // The completion of a request resumes the channel.
                channel.is_hot = false;
                return;
            };
            let intake = channel.take(turn.ring);
            if !matches!(intake, Intake::Request(_)) {
                turn.queues.get_mut(queue).release(tag);
            }
            match intake {
                Intake::Request(len) => {
                    channel.is_hot = true;
                    self.handle(index, tag, len, turn);
                }
                Intake::Nothing => {
                    // More requests may arrive while these are answered: read again before requesting a
                    // notification.
                    channel.is_hot = taken > 0;
                    if taken == 0 {
                        channel.watch = Watch::Yes;
                        turn.ring.watch(channel.token, channel.file);
                    }
                    return;
                }
                Intake::Full => {
                    channel.is_hot = false;
                    return;
                }
                Intake::Unmounted => {
                    channel.is_over = true;
                    return;
                }
            }
        }
    }

    /// Handles a request that was read. Without a valid header, the connection cannot continue.
    fn handle(&mut self, index: usize, tag: Tag, len: usize, turn: &mut Turn<'_>) {
        let Some(channel) = self.channels[index].as_mut() else { return };
        let head = turn.ring.bytes(channel.head.slice(0, HEAD_LEN.min(len) as u32));
        match Header::parse(head, len) {
            Ok(header) => {
                let call = super::calls::read_call(&header, channel.head, channel.body, turn);
                self.call(index, tag, Via::Device, &header, call, turn);
            }
            Err(_) => {
                turn.queues.get_mut(channel.queue).release(tag);
                channel.is_over = true;
            }
        }
    }

    pub(super) fn served(&mut self, queue: QueueId) -> Option<&mut ServedQueue> {
        self.queues.get_mut(usize::from(queue.0))?.as_mut()
    }
}
