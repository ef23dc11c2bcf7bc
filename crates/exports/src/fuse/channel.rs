//! One descriptor of a mount's connection, and how requests are taken from it.

use super::entries::{End, Entries};
use super::parts::Waiting;
use super::shared::{HELD_MAX, HELD_WHOLE_MAX, Shared, TRANSFER_MAX};
use super::{Front, Lane, Pdu, Via};
use crate::Turn;
use block::{Segment, Tag};
use proto::fuse::Header;
use proto::fuse::wire::HEAD_LEN;
use queue::{FileId, FileOp, Patience, QueueId, Ring};
use ring::{KernelRing, Token};
use std::collections::VecDeque;
use std::sync::Arc;

/// Memory for the first part of a request, and behind that for an answer that is put together.
pub(super) const HEAD_ROOM: u32 = 512;
/// Where in that memory answers are put together.
const ANSWER_AT: u32 = 256;
/// Requests taken in before those that ended are answered: few enough that the first does not wait long (4 KiB
/// requests of a file in memory take a microsecond each), enough to share what a turn costs.
const BATCH: usize = 16;

/// What the ring sets aside for this memory: a power of two.
fn room_of(memory: Segment) -> u64 {
    u64::from(memory.len).next_power_of_two()
}

/// Whether the ring tells us of the next request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Watch {
    /// No: we look ourselves.
    No,
    /// It does.
    Yes,
    /// It was asked to stop that.
    Ending,
}

pub(super) struct Channel {
    pub(super) file: FileId,
    pub(super) queue: QueueId,
    pub(super) token: Token,
    pub(super) shared: Arc<Shared>,
    pub(super) head: Segment,
    /// Where the rest of the next request goes. `None`: the last request keeps it, another is to be had.
    pub(super) body: Option<Segment>,
    pub(super) watch: Watch,
    /// There may be more to read at once.
    pub(super) is_hot: bool,
    /// It takes in nothing more.
    pub(super) is_over: bool,
    pub(super) in_stack: u32,
    /// Bytes of memory that requests hold; without what came through io_uring, which has memory of its own.
    held: u64,
    /// The kernel has entries of it that nobody waits for any more.
    pub(super) is_given_up: bool,
    /// Where requests come through io_uring.
    pub(super) entries: Option<Entries>,
    /// Requests that may not begin yet.
    pub(super) waiting: VecDeque<Waiting>,
    /// Where the blocks of a write of parts of blocks are put together. `None`: there was no such write.
    pub(super) part_room: Option<Segment>,
    /// A write has that.
    pub(super) is_putting_together: bool,
}

/// What came of looking for a request.
enum Came {
    /// So many bytes of one.
    Request(usize),
    /// Nothing at present.
    Nothing,
    /// Those that came before hold all the memory there is for them.
    Full,
    /// The mount is gone.
    Unmounted,
}

impl Channel {
    pub(super) fn new(
        file: FileId,
        queue: QueueId,
        token: Token,
        shared: Arc<Shared>,
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
            is_putting_together: false,
        }
    }

    /// Where an answer is put together.
    pub(super) fn answer_room(&self, via: Via) -> Segment {
        match (via, &self.entries) {
            (Via::Entry { entry, .. }, Some(entries)) => entries.answer_room(entry),
            _ => self.head.slice(ANSWER_AT, HEAD_ROOM - ANSWER_AT),
        }
    }

    /// Answer with nothing but how it went.
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

    /// Answer with what was put together.
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

    /// Answer with data that was read: `len` bytes of it from `skip` on.
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

    /// A request holds this memory until it is [taken back](Channel::take_back).
    #[inline]
    pub(super) fn hold(&mut self, memory: Segment) -> Segment {
        self.held += room_of(memory);
        memory
    }

    /// Gives a write the memory in which its `len` bytes lie. `None`: they were not read from the descriptor.
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
        // The data stays where it was read; the next request is read elsewhere.
        self.body = None;
        Some(self.hold(body))
    }

    /// Memory of a request is free.
    pub(super) fn take_back(&mut self, memory: Segment, ring: &mut KernelRing) {
        if memory.len == 0 {
            return;
        }
        self.held -= room_of(memory);
        match self.body {
            // The next request is read where this one was: that memory is warm.
            None if memory.len == TRANSFER_MAX => self.body = Some(memory),
            _ => ring.free(memory),
        }
    }

    /// Read one request, if there is one.
    fn take(&mut self, ring: &mut KernelRing) -> Came {
        if self.held + u64::from(TRANSFER_MAX) > HELD_MAX {
            // It might be as large as that. The ends of others bring us back.
            return Came::Full;
        }
        let Some(body) = self.body.or_else(|| ring.allocate(TRANSFER_MAX)) else {
            // Requests in the stack hold all there is; their ends bring us back.
            return Came::Full;
        };
        self.body = Some(body);
        let into = [self.head.slice(0, HEAD_LEN as u32), body];
        loop {
            match ring.try_now(self.file, FileOp::Read { offset: 0 }, &into, Patience::Unbounded) {
                Some(len) if len > 0 => return Came::Request(len as usize),
                // The next request was withdrawn while it was handed to us.
                Some(error) if error == -i64::from(libc::ENOENT) => {}
                Some(error) if error == -i64::from(libc::EAGAIN) => return Came::Nothing,
                None => return Came::Nothing,
                Some(_) => return Came::Unmounted,
            }
        }
    }

    /// Write an answer that lies in these pieces.
    pub(super) fn answer(&mut self, pieces: &[Segment], ring: &mut KernelRing) {
        let op = FileOp::Write { offset: 0, durable: false };
        match ring.try_now(self.file, op, pieces, Patience::Unbounded) {
            Some(len) if len >= 0 => {}
            // Whoever asked was killed and does not wait any more.
            Some(error) if error == -i64::from(libc::ENOENT) => {}
            Some(error) if error == -i64::from(libc::ENODEV) => self.is_over = true,
            // The kernel does not take it, so nobody gets another answer: it must not go missing.
            _ => self.refuse_last(pieces[0], ring),
        }
    }

    /// The answer that begins here was not taken as it is: say that the request failed.
    #[cold]
    fn refuse_last(&mut self, answer: Segment, ring: &mut KernelRing) {
        let bytes = ring.bytes_mut(answer.slice(0, 16));
        let unique = u64::from_ne_bytes(bytes[8..16].try_into().unwrap_or_default());
        let len = proto::fuse::put_end(bytes, unique, libc::EIO, 0);
        let op = FileOp::Write { offset: 0, durable: false };
        ring.try_now(self.file, op, &[answer.slice(0, len as u32)], Patience::Unbounded);
    }
}

impl Front {
    /// Take in requests until there are no more, no tag is free, or enough have gathered.
    pub(super) fn pump(&mut self, index: usize, turn: &mut Turn<'_>) {
        let Some(queue) = self.channels[index].as_ref().map(|channel| channel.queue) else { return };
        for taken in 0..BATCH {
            let Some(channel) = self.channels[index].as_mut() else { return };
            if channel.is_over {
                return;
            }
            let Some(tag) = turn.queues.get_mut(queue).tag() else {
                // An end of a request brings us back.
                channel.is_hot = false;
                return;
            };
            let came = channel.take(turn.ring);
            if !matches!(came, Came::Request(_)) {
                turn.queues.get_mut(queue).release(tag);
            }
            match came {
                Came::Request(len) => {
                    channel.is_hot = true;
                    self.handle(index, tag, len, turn);
                }
                Came::Nothing => {
                    // While what was taken is answered, more may come: look once more before asking to be told.
                    channel.is_hot = taken > 0;
                    if taken == 0 {
                        channel.watch = Watch::Yes;
                        turn.ring.watch(channel.token, channel.file);
                    }
                    return;
                }
                Came::Full => {
                    channel.is_hot = false;
                    return;
                }
                Came::Unmounted => {
                    channel.is_over = true;
                    return;
                }
            }
        }
    }

    /// What the next request asks for is known by its header; without one, nothing can go on.
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

    pub(super) fn lane(&mut self, queue: QueueId) -> Option<&mut Lane> {
        self.lanes.get_mut(usize::from(queue.0))?.as_mut()
    }
}
