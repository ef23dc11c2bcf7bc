//! Commands for many tags at once (`BATCH_IO`): one command passes all tags to the driver, a multishot
//! fetch returns the tags of new requests, and one commit per turn passes the completed requests.
//!
//! Completions are gathered in one of two buffers and committed at the end of the turn. While the driver
//! reads that buffer, the other one is filled.
//!
//! *Invariant:* a buffer is not changed while a command refers to it. A tag is in the buffers at most once:
//! it returns to us only after the command that committed its last request has completed, so a buffer has
//! space for all tags.

use super::driver::Driver;
use ::ublk::{BatchFlags, BatchIo, ElementHeader, IoOp};
use block::Segment;
use queue::FileId;
use ring::Token;
use zerocopy::{FromBytes, IntoBytes};

/// Token number of the fetch command, above those of all tags.
const FETCH: u32 = 1 << 16;
/// Token number of commands that refer to the first buffer; that of the second buffer follows.
const COMMIT: u32 = FETCH + 1;

/// Element of a buffer: the completion of one tag.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Element {
    /// The driver's tag.
    pub(super) tag: u16,
    /// Index of the registered buffer for the tag's next request.
    pub(super) buffer: u16,
    /// Result of the request.
    pub(super) result: i32,
    /// Address of the request's buffer.
    pub(super) address: u64,
}

/// Effect of a completed command.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Outcome {
    /// The command succeeded.
    Fine,
    /// The driver refused the command with this errno.
    Refused(i32),
    /// The device is being removed: the driver has aborted every tag in this buffer.
    Gone {
        /// Index of the buffer, which stays unchanged until the next commit.
        half: usize,
        /// Number of tags in the buffer.
        count: u16,
    },
    /// The driver refused one of the tags with this errno.
    RefusedTag(u16, i32),
}

#[derive(Clone, Copy, Default, Debug)]
struct Half {
    /// Number of tags in the buffer.
    count: u16,
    /// Whether a command refers to the buffer.
    committed: bool,
}

/// The batch commands of a served queue.
#[derive(Debug)]
pub(super) struct Batch {
    file: FileId,
    q_id: u16,
    token: Token,
    flags: BatchFlags,
    /// Both buffers, contiguous.
    memory: Segment,
    halves: [Half; 2],
    /// Index of the buffer that is being filled.
    filling: usize,
    /// Whether the tags are being passed to the driver for the first time.
    preparing: bool,
    /// Whether the fetch command is in flight.
    fetching: bool,
    /// Whether the fetch command must not be sent again.
    withdrawn: bool,
}

impl Batch {
    /// Returns the bytes of memory needed for this many tags.
    pub(super) fn memory_len(depth: u16, flags: BatchFlags) -> u64 {
        2 * u64::from(depth) * u64::from(flags.element_len())
    }

    /// Passes all tags to the driver and fetches requests.
    pub(super) fn open<D: Driver>(
        file: FileId,
        q_id: u16,
        token: Token,
        flags: BatchFlags,
        memory: Segment,
        tags: impl Iterator<Item = Element>,
        ring: &mut D,
    ) -> Batch {
        let mut batch = Batch {
            file,
            q_id,
            token,
            flags,
            memory,
            halves: [Half::default(); 2],
            filling: 0,
            preparing: true,
            fetching: false,
            withdrawn: false,
        };
        tags.for_each(|element| batch.add(element, ring));
        batch.commit(IoOp::PrepIoCmds, ring);
        batch.fetch(ring);
        batch
    }

    /// Returns whether a token's number is that of a batch command, not of a tag.
    pub(super) const fn is_command(number: u32) -> bool {
        number >= FETCH
    }

    /// Returns whether the fetch command is in flight.
    pub(super) fn is_fetching(&self) -> bool {
        self.fetching
    }

    /// Returns whether completions are waiting to be committed or being committed.
    pub(super) fn is_committing(&self) -> bool {
        self.halves.iter().any(|half| half.count > 0)
    }

    /// Returns whether completions can be committed now.
    pub(super) fn can_commit(&self) -> bool {
        self.halves[self.filling].count > 0 && !self.halves[self.filling ^ 1].committed
    }

    fn half(&self, index: usize) -> Segment {
        let len = self.memory.len / 2;
        self.memory.slice(index as u32 * len, len)
    }

    /// Adds the completion of a tag, to be committed with the next [`flush`](Batch::flush).
    #[inline]
    pub(super) fn add<D: Driver>(&mut self, element: Element, ring: &mut D) {
        let len = u32::from(self.flags.element_len());
        let half = &mut self.halves[self.filling];
        let at = u32::from(half.count) * len;
        half.count += 1;
        let place = self.half(self.filling).slice(at, len);
        let header = ElementHeader { tag: element.tag, buf_index: element.buffer, result: element.result };
        let (first, second) = ring.bytes_mut(place).split_at_mut(size_of::<ElementHeader>());
        first.copy_from_slice(header.as_bytes());
        if !second.is_empty() {
            second.copy_from_slice(&element.address.to_ne_bytes());
        }
    }

    /// Commits the gathered completions at the end of a turn, unless the last commit is in flight.
    #[inline]
    pub(super) fn flush<D: Driver>(&mut self, ring: &mut D) {
        if self.can_commit() {
            self.commit(IoOp::CommitIoCmds, ring);
        }
    }

    fn commit<D: Driver>(&mut self, op: IoOp, ring: &mut D) {
        let index = self.filling;
        let half = &mut self.halves[index];
        half.committed = true;
        let (count, element) = (half.count, self.flags.element_len());
        let memory = self.half(index).slice(0, u32::from(count) * u32::from(element));
        let command = BatchIo {
            q_id: self.q_id,
            flags: self.flags.0,
            nr_elem: count,
            elem_bytes: element,
            ..BatchIo::default()
        };
        let token = Token { number: COMMIT + index as u32, ..self.token };
        ring.commit_batch(token, self.file, op.code(), command, memory);
        self.filling ^= 1;
    }

    fn fetch<D: Driver>(&mut self, ring: &mut D) {
        self.fetching = true;
        let command = BatchIo { q_id: self.q_id, elem_bytes: 2, ..BatchIo::default() };
        let token = Token { number: FETCH, ..self.token };
        ring.fetch_tags(token, self.file, IoOp::FetchIoCmds.code(), command);
        if self.withdrawn {
            ring.withdraw_fetch(token);
        }
    }

    /// Cancels the fetch command.
    pub(super) fn withdraw<D: Driver>(&mut self, ring: &mut D) {
        self.withdrawn = true;
        if self.fetching {
            ring.withdraw_fetch(Token { number: FETCH, ..self.token });
        }
    }

    /// Handles the completion of one of the batch commands.
    pub(super) fn ended<D: Driver>(&mut self, number: u32, result: i64, ring: &mut D) -> Outcome {
        if number == FETCH {
            return self.fetch_ended(result as i32, ring);
        }
        let index = (number - COMMIT) as usize & 1;
        let count = std::mem::take(&mut self.halves[index]).count;
        let len = i64::from(self.flags.element_len());
        if std::mem::take(&mut self.preparing) {
            if result == 0 {
                return Outcome::Fine;
            }
            // The driver has none of the tags.
            self.withdraw(ring);
            return Outcome::Refused(-result as i32);
        }
        if result == len * i64::from(count) {
            return Outcome::Fine;
        }
        if result == -i64::from(libc::ENODEV) {
            return Outcome::Gone { half: index, count };
        }
        let done = (result.max(0) / len) as u16;
        let (refused, _) = self.element(index, done, ring);
        for at in done + 1..count {
            let (header, address) = self.element(index, at, ring);
            let ElementHeader { tag, buf_index: buffer, result } = header;
            self.add(Element { tag, buffer, result, address }, ring);
        }
        Outcome::RefusedTag(refused.tag, if result < 0 { -result as i32 } else { libc::EIO })
    }

    /// Returns the driver's number of a tag in a buffer.
    pub(super) fn tag<D: Driver>(&self, half: usize, at: u16, ring: &D) -> u16 {
        self.element(half, at, ring).0.tag
    }

    /// Returns an element of a buffer.
    fn element<D: Driver>(&self, index: usize, at: u16, ring: &D) -> (ElementHeader, u64) {
        let len = u32::from(self.flags.element_len());
        let bytes = ring.bytes(self.half(index).slice(u32::from(at) * len, len));
        let (first, second) = bytes.split_at(size_of::<ElementHeader>());
        let address = second.try_into().map_or(0, u64::from_ne_bytes);
        (ElementHeader::read_from_bytes(first).unwrap_or_default(), address)
    }

    fn fetch_ended<D: Driver>(&mut self, result: i32, ring: &mut D) -> Outcome {
        self.fetching = false;
        match -result {
            libc::ENODEV | libc::ECANCELED => Outcome::Fine,
            _ if self.withdrawn => Outcome::Fine,
            // The kernel may end the fetch command at any time.
            0 | libc::ENOBUFS | libc::EINTR | libc::EAGAIN => {
                self.fetch(ring);
                Outcome::Fine
            }
            errno => Outcome::Refused(errno),
        }
    }
}
