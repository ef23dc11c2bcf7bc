//! The FUSE export: presents a device as a single file, on one reactor thread.
//!
//! A [`Channel`] is one file descriptor of a mount's connection. The kernel has one queue of requests per
//! connection, from which every descriptor may read: each reactor that serves the device has a clone, and
//! reads as many requests as it can process. A request is read inline into our memory, the data of a write
//! to where the backend wants it. The request gets a tag of the device's hardware queue; its reply is
//! written inline, with the data from the backend's memory or ours. Nothing is cached, neither here nor in
//! the kernel, because the file is opened for direct I/O.
//!
//! *Invariant:* a channel reads only when a tag is free, so no request waits for a tag after it was read.
//! *Invariant:* every request that was read is answered once, except those without a reply in the protocol.
//!
//! Not here: mounting, `/dev/fuse` itself, and backends.

mod calls;
mod channel;
mod entries;
mod parts;
mod reply;
mod shared;

use crate::{Front as FrontEnd, FrontNumber, Turn};
use block::Segment;
use channel::{Channel, Watch};
use parts::Part;
use queue::{Done, QueueId, Ring, Stripes};
use ring::{Event, Token};
pub use shared::{FileFacts, HELD_MAX, MountState, TRANSFER_MAX};
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// Kind of reply to a request that is in the stack.
#[derive(Clone, Copy, Debug)]
enum Answer {
    /// Read data: `len` bytes, starting at `skip`.
    Data { skip: u32, len: u32 },
    /// Number of bytes written.
    Written(u32),
    /// Number of bytes written, after a flush.
    FlushAfter(u32),
    /// Status only.
    Status,
    /// Offset of the next hole or data; `asked` bytes were searched.
    Found { from: u64, asked: u64, hole: bool },
    /// Number of bytes written, after a read-modify-write.
    Part(Part),
}

/// Path by which a request arrived, and by which its reply returns.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Via {
    /// The request was read from the descriptor.
    Device,
    /// The request arrived through io_uring, in this entry, with this many bytes of data.
    Entry { entry: u16, payload_len: u32 },
}

/// Front-end state of a request that is in the stack.
#[derive(Clone, Copy, Debug)]
struct Pdu {
    unique: u64,
    via: Via,
    answer: Answer,
    /// Memory allocated for the request; empty if there is none.
    memory: Segment,
    /// Stripes of the range lock that the request holds exclusively.
    exclusive: Stripes,
}

impl Pdu {
    const VACANT: Pdu = Pdu {
        unique: 0,
        via: Via::Device,
        answer: Answer::Status,
        memory: Segment::EMPTY,
        exclusive: Stripes::NONE,
    };
}

/// A device that this front-end serves.
struct ServedQueue {
    pdus: Box<[Pdu]>,
    zero_copy_reads: bool,
}

/// The FUSE channels of one reactor.
#[derive(Default)]
pub struct Front {
    channels: Vec<Option<Channel>>,
    queues: Vec<Option<ServedQueue>>,
    /// Indices of channels that were abandoned while the kernel had entries of them. Those entries may
    /// complete at any time, and would be attributed to a new channel with that index.
    given_up: Vec<usize>,
}

impl Front {
    /// Starts serving the device of this queue.
    pub fn add_queue(&mut self, queue: QueueId, depth: u16, zero_copy_reads: bool) {
        let index = usize::from(queue.0);
        if self.queues.len() <= index {
            self.queues.resize_with(index + 1, || None);
        }
        self.queues[index] =
            Some(ServedQueue { pdus: vec![Pdu::VACANT; depth.into()].into(), zero_copy_reads });
    }

    /// Updates whether the device supports zero-copy reads.
    pub fn update_queue(&mut self, queue: QueueId, zero_copy_reads: bool) {
        if let Some(Some(served)) = self.queues.get_mut(usize::from(queue.0)) {
            served.zero_copy_reads = zero_copy_reads;
        }
    }

    /// Returns whether the device of this queue is served.
    pub fn has_queue(&self, queue: QueueId) -> bool {
        self.queues.get(usize::from(queue.0)).is_some_and(Option::is_some)
    }

    /// Starts reading requests of a mount from this descriptor, which must be non-blocking.
    ///
    /// # Errors
    /// The descriptor cannot be added to the ring, or the ring has no memory left.
    pub fn adopt(
        &mut self,
        fd: OwnedFd,
        queue: QueueId,
        shared: Arc<MountState>,
        turn: &mut Turn<'_>,
    ) -> std::io::Result<()> {
        let index = self.vacancy();
        let number = u16::try_from(index).map_err(|_| std::io::ErrorKind::OutOfMemory)?;
        let head = turn.ring.allocate(channel::HEAD_ROOM).ok_or(std::io::ErrorKind::OutOfMemory)?;
        let file = turn.ring.add_file(Arc::new(fd))?;
        let token = Token { front: FrontNumber::Fuse as u8, index: number, number: 0 };
        shared.joined();
        self.channels[index] = Some(Channel::new(file, queue, token, shared, head));
        Ok(())
    }

    /// Returns a free index for a channel.
    fn vacancy(&mut self) -> usize {
        let mut places = self.channels.iter().enumerate();
        let vacant = places.find(|(index, place)| place.is_none() && !self.given_up.contains(index));
        let vacant = vacant.map(|(index, _)| index);
        vacant.unwrap_or_else(|| {
            self.channels.push(None);
            self.channels.len() - 1
        })
    }

    fn remove_if_idle(&mut self, index: usize, turn: &mut Turn<'_>) {
        let quiet = |channel: &mut Channel| {
            channel.is_over
                && channel.in_stack == 0
                && channel.watch == Watch::No
                && channel.entries_live() == 0
        };
        let Some(channel) = self.channels[index].take_if(quiet) else { return };
        let memory = channel.body.into_iter().chain(channel.part_room).chain([channel.head]);
        memory.for_each(|memory| turn.ring.free(memory));
        if let Some(entries) = channel.entries {
            entries.free(turn.ring);
        }
        if channel.is_given_up {
            self.given_up.push(index);
        }
        turn.ring.remove_file(channel.file);
        channel.shared.left();
    }
}

impl FrontEnd for Front {
    fn event(&mut self, event: Event, turn: &mut Turn<'_>) {
        let Event::Ended { token, result } = event else { return };
        let index = usize::from(token.index);
        if let Some(entry) = token.number.checked_sub(1) {
            return self.entry_ended(index, entry as u16, result, turn);
        }
        if let Some(Some(channel)) = self.channels.get_mut(index) {
            channel.watch = Watch::No;
            self.pump(index, turn);
        }
    }

    fn done(&mut self, queue: QueueId, done: Done, turn: &mut Turn<'_>) {
        self.ended(queue, done, turn);
    }

    fn commit(&mut self, turn: &mut Turn<'_>) {
        for index in 0..self.channels.len() {
            self.take_up_waiting(index, turn);
            self.take_up_entries(index, turn);
            let Some(channel) = &mut self.channels[index] else { continue };
            if channel.is_over {
                if channel.watch == Watch::Yes {
                    channel.watch = Watch::Ending;
                    turn.ring.watch_end(channel.token);
                }
                self.remove_if_idle(index, turn);
            } else if channel.watch == Watch::No {
                self.pump(index, turn);
            }
        }
    }

    fn is_dirty(&self) -> bool {
        self.channels
            .iter()
            .flatten()
            .any(|channel| channel.watch == Watch::No && !channel.is_over && channel.is_hot)
    }

    fn close_queue(&mut self, queue: QueueId, now: bool, _turn: &mut Turn<'_>) {
        // Replies are written at once, so none are pending. `commit` does the rest. The kernel returns
        // entries when the mount ends, which is either before this point or never.
        for channel in self.channels.iter_mut().flatten().filter(|channel| channel.queue == queue) {
            channel.is_over = true;
            if now {
                channel.abandon_entries();
            }
        }
    }

    fn is_open(&self, queue: QueueId) -> bool {
        self.channels.iter().flatten().any(|channel| channel.queue == queue)
    }

    fn remove_queue(&mut self, queue: QueueId, _turn: &mut Turn<'_>) {
        if let Some(served) = self.queues.get_mut(usize::from(queue.0)) {
            *served = None;
        }
    }
}
