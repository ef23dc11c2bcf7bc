//! FUSE over io_uring. The kernel has a queue for each processor of the machine. In each queue that a
//! reactor serves, a channel has a few *entries*: memory for one request each, with separate header and
//! payload. A single command commits an entry's request and fetches the next one. It is submitted with all
//! other commands of a turn, so under load a request costs no system call of its own.
//!
//! *Invariant:* each entry is owned either by the kernel, which then has its command, or by this module.
//! *Invariant:* memory registered with an entry stays valid until the kernel has returned the entry.
//!
//! The kernel returns entries only when the mount ends, because these commands cannot be cancelled.

use super::channel::Channel;
use super::shared::{MountState, TRANSFER_MAX};
use super::{Front, Via};
use crate::{FrontNumber, Turn};
use block::{Region, Segment};
use proto::fuse::wire::uring::{COMMIT_AND_FETCH, HEADER_LEN, PARTS, REGISTER};
use proto::fuse::{self, Arrival};
use queue::{FileId, Ring};
use ring::{KernelRing, Token, WideCommand};
use std::collections::VecDeque;
use std::sync::Arc;

/// Bytes of an entry besides its payload: header, list of memory areas, and space for an encoded reply.
const HEAD_ROOM: u64 = 4096;
/// Offset of the list of memory areas.
const LIST_AT: u64 = 320;
/// Offset of the encoded reply.
const ANSWER_AT: u64 = 512;
const ANSWER_ROOM: u32 = 512;
/// Entries per queue for devices whose requests wait for a disk or a network, and so the maximum in flight.
/// Further requests wait in the kernel and are fetched with the completion of another, without a wakeup.
const ENTRIES_WAITING: u16 = 32;
/// Entries per queue for devices that complete requests inline: more entries would only spread requests
/// over more memory than the caches hold. Writes of 1 MiB cost a quarter more with 16.
const ENTRIES_AT_ONCE: u16 = 4;

/// One io_uring entry.
#[derive(Clone, Copy, Debug)]
struct Entry {
    /// Number of the kernel's queue.
    queue: u16,
    /// Id for committing the entry's request; meaningless if it has none.
    commit_id: u64,
}

/// The entries of a channel.
pub(super) struct Entries {
    region: Region,
    /// Bytes of payload per entry.
    payload_len: u32,
    entries: Box<[Entry]>,
    /// Number of entries that the kernel has not returned.
    pub(super) live: u32,
    /// Entries whose requests wait for a tag.
    waiting: VecDeque<u16>,
}

impl Entries {
    /// Allocates entries for these queues.
    fn new(queues: &[u16], each: u16, block: u32, ring: &mut KernelRing) -> std::io::Result<Entries> {
        // A read of partial blocks is extended at both ends.
        let payload_len = TRANSFER_MAX + if block > 1 { (2 * block).next_multiple_of(4096) } else { 0 };
        let entries: Box<[Entry]> =
            queues.iter().flat_map(|&queue| (0..each).map(move |_| Entry { queue, commit_id: 0 })).collect();
        let region = ring.add_memory(entries.len() as u64 * (HEAD_ROOM + u64::from(payload_len)))?;
        Ok(Entries { region, payload_len, live: 0, waiting: VecDeque::with_capacity(entries.len()), entries })
    }

    /// Frees the memory. The kernel must have returned all entries.
    pub(super) fn free(self, ring: &mut KernelRing) {
        ring.remove_memory(self.region);
    }

    fn in_head(&self, entry: u16, at: u64, len: u32) -> Segment {
        Segment { offset: u64::from(entry) * HEAD_ROOM + at, len, region: self.region }
    }

    fn header(&self, entry: u16) -> Segment {
        self.in_head(entry, 0, HEADER_LEN as u32)
    }

    /// Returns the space for an encoded reply.
    pub(super) fn answer_room(&self, entry: u16) -> Segment {
        self.in_head(entry, ANSWER_AT, ANSWER_ROOM)
    }

    /// Returns the memory of a request's data.
    pub(super) fn payload(&self, entry: u16) -> Segment {
        let offset = self.entries.len() as u64 * HEAD_ROOM + u64::from(entry) * u64::from(self.payload_len);
        Segment { offset, len: self.payload_len, region: self.region }
    }

    /// Registers an entry's memory and fetches the first request.
    fn register(&mut self, entry: u16, token: Token, file: FileId, ring: &mut KernelRing) {
        let list = self.in_head(entry, LIST_AT, PARTS * 16);
        let parts = [self.header(entry), self.payload(entry)];
        let words = parts.map(|part| [ring.address(part), u64::from(part.len)]);
        for (room, word) in ring.bytes_mut(list).chunks_exact_mut(8).zip(words.as_flattened()) {
            room.copy_from_slice(&word.to_ne_bytes());
        }
        let argument = fuse::command(0, self.entries[usize::from(entry)].queue);
        let command = WideCommand { op: REGISTER, argument, address: ring.address(list), len: PARTS };
        self.live += 1;
        ring.command_wide(token, file, &command);
    }

    /// Commits an entry's request, whose payload is ready, and fetches the next.
    fn commit(
        &mut self,
        entry: u16,
        end: End,
        payload_len: u32,
        token: Token,
        file: FileId,
        ring: &mut KernelRing,
    ) {
        fuse::put_answer(ring.bytes_mut(self.header(entry)), end.unique, end.errno, payload_len);
        let Entry { queue, commit_id } = self.entries[usize::from(entry)];
        let argument = fuse::command(commit_id, queue);
        ring.command_wide(token, file, &WideCommand { op: COMMIT_AND_FETCH, argument, address: 0, len: 0 });
    }
}

/// Result of a request: 0 or a positive errno.
#[derive(Clone, Copy, Debug)]
pub(super) struct End {
    pub(super) unique: u64,
    pub(super) errno: i32,
}

impl Channel {
    fn entry_token(&self, entry: u16) -> Token {
        Token { front: FrontNumber::Fuse as u8, index: self.token.index, number: u32::from(entry) + 1 }
    }

    /// Returns the number of entries that the kernel has not returned.
    pub(super) fn entries_live(&self) -> u32 {
        self.entries.as_ref().map_or(0, |entries| entries.live)
    }

    /// Abandons the entries. The kernel may still write to their memory and complete their commands, so the
    /// memory stays as long as the ring, and the channel's index is not reused.
    pub(super) fn abandon_entries(&mut self) {
        if self.entries_live() > 0 {
            self.entries = None;
            self.is_given_up = true;
        }
    }

    /// Commits an entry's request with the reply encoded in its answer space. `len` includes the header
    /// that a reply through the descriptor has.
    pub(super) fn answer_entry_from_room(&mut self, entry: u16, end: End, len: u32, ring: &mut KernelRing) {
        let Some(entries) = &self.entries else { return };
        let body = len.saturating_sub(16);
        if body > 0 {
            let room = entries.answer_room(entry).slice(16, body);
            ring.copy(room, entries.payload(entry).slice(0, body));
        }
        self.answer_entry(entry, end, body, ring);
    }

    /// Commits an entry's request with this many bytes of payload.
    pub(super) fn answer_entry(&mut self, entry: u16, end: End, payload_len: u32, ring: &mut KernelRing) {
        let (token, file) = (self.entry_token(entry), self.file);
        if let Some(entries) = &mut self.entries {
            entries.commit(entry, end, payload_len, token, file, ring);
        }
    }
}

impl Front {
    /// Starts FUSE over io_uring for these queues of a mount that has negotiated it. `at_once`: the device
    /// completes requests inline.
    ///
    /// # Errors
    /// The process has no address space left, or this thread has no channel of the mount; the kernel then
    /// waits for entries of these queues in vain. If the kernel refuses the entries,
    /// [`MountState::over_io_uring`] reports that.
    pub fn enlist(
        &mut self,
        shared: &Arc<MountState>,
        queues: &[u16],
        at_once: bool,
        turn: &mut Turn<'_>,
    ) -> std::io::Result<()> {
        let ours = |channel: &&mut Channel| Arc::ptr_eq(&channel.shared, shared) && channel.entries.is_none();
        let Some(channel) = self.channels.iter_mut().flatten().find(ours) else {
            return Err(std::io::Error::other("this thread has no channel of the mount"));
        };
        let each = if at_once { ENTRIES_AT_ONCE } else { ENTRIES_WAITING };
        let mut entries = Entries::new(queues, each, shared.facts.block_len_min, turn.ring)?;
        for entry in 0..entries.entries.len() as u16 {
            entries.register(entry, channel.entry_token(entry), channel.file, turn.ring);
        }
        channel.entries = Some(entries);
        Ok(())
    }

    /// Handles an entry that the kernel has returned, with a request or for good.
    pub(super) fn entry_ended(&mut self, index: usize, entry: u16, result: i64, turn: &mut Turn<'_>) {
        let Some(Some(channel)) = self.channels.get_mut(index) else { return };
        let Some(entries) = &mut channel.entries else { return };
        if result < 0 {
            entries.live -= 1;
            channel.shared.entry_ended(-result as i32);
            return;
        }
        let queue = channel.queue;
        match turn.queues.get_mut(queue).tag() {
            Some(tag) => self.process_entry(index, entry, tag, turn),
            None => entries.waiting.push_back(entry),
        }
    }

    /// Processes requests that waited for a tag.
    pub(super) fn take_up_entries(&mut self, index: usize, turn: &mut Turn<'_>) {
        loop {
            let Some(Some(channel)) = self.channels.get_mut(index) else { return };
            let Some(entries) = channel.entries.as_mut().filter(|entries| !entries.waiting.is_empty()) else {
                return;
            };
            let Some(tag) = turn.queues.get_mut(channel.queue).tag() else { return };
            let Some(entry) = entries.waiting.pop_front() else { return };
            self.process_entry(index, entry, tag, turn);
        }
    }

    fn process_entry(&mut self, index: usize, entry: u16, tag: block::Tag, turn: &mut Turn<'_>) {
        let Some(Some(channel)) = self.channels.get_mut(index) else { return };
        let Some(entries) = &mut channel.entries else { return };
        match Arrival::parse(turn.ring.bytes(entries.header(entry))) {
            Ok(arrival) => {
                entries.entries[usize::from(entry)].commit_id = arrival.commit_id;
                let via = Via::Entry { entry, payload_len: arrival.payload_len };
                self.call(index, tag, via, &arrival.header, arrival.call, turn);
            }
            Err(_) => {
                turn.queues.get_mut(channel.queue).release(tag);
                channel.is_over = true;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Front as _;
    use crate::fuse::FileFacts;
    use queue::{QueueId, Queues};
    use ring::{Choice, Event, RingConfig};
    use std::os::unix::net::UnixStream;

    const QUEUE: QueueId = QueueId(0);

    fn shared() -> Arc<MountState> {
        let facts = FileFacts {
            size: 1 << 20,
            read_only: false,
            block_len_min: 512,
            block_len_preferred: 4096,
            fua: false,
            write_zeroes: false,
            passthrough: false,
            over_io_uring: true,
            owner: (0, 0),
        };
        Arc::new(MountState::new(facts))
    }

    /// Creates a mount with one entry, which the kernel owns if `live` is 1.
    fn adopt(front: &mut Front, live: u32, shared: &Arc<MountState>, turn: &mut Turn<'_>) {
        let (ours, _) = UnixStream::pair().unwrap();
        front.adopt(ours.into(), QUEUE, shared.clone(), turn).unwrap();
        let entries = Entries { live, ..Entries::new(&[0], 1, 512, turn.ring).unwrap() };
        let ours = |channel: &&mut Channel| Arc::ptr_eq(&channel.shared, shared);
        front.channels.iter_mut().flatten().find(ours).unwrap().entries = Some(entries);
    }

    #[test]
    fn completions_of_abandoned_entries_are_ignored() {
        let config = RingConfig { engine: Choice::Epoll, ..RingConfig::default() };
        let (mut ring, mut queues) = (KernelRing::new(config).unwrap(), Queues::default());
        let turn = &mut Turn { ring: &mut ring, queues: &mut queues };
        let mut front = Front::default();
        for (round, live) in [0, 1, 0, 1].into_iter().enumerate() {
            let first = shared();
            adopt(&mut front, live, &first, turn);
            let place = front.channels.iter().position(Option::is_some).unwrap();
            front.close_queue(QUEUE, true, turn);
            front.commit(turn);
            assert_eq!(first.channels(), 0, "{round}: it is gone");
            let second = shared();
            adopt(&mut front, 1, &second, turn);
            let now = front.channels.iter().position(Option::is_some).unwrap();
            assert_eq!(
                now == place,
                live == 0,
                "{round}: an index is reused unless the kernel has its entries"
            );
            if live > 0 {
                let token = Token { front: FrontNumber::Fuse as u8, index: place as u16, number: 1 };
                front.event(Event::Ended { token, result: -i64::from(libc::ENOTCONN) }, turn);
            }
            let channel = front.channels[now].as_mut().unwrap();
            assert_eq!(
                channel.entries_live(),
                1,
                "{round}: the entry of the other channel is still with the kernel"
            );
            // For the next round, pretend that the kernel has returned the entry.
            channel.entries.as_mut().unwrap().live = 0;
            front.close_queue(QUEUE, true, turn);
            front.commit(turn);
            assert_eq!(second.channels(), 0, "{round}");
        }
    }
}
