//! Commands for many tags at once (`BATCH_IO`): one that hands all tags to the driver, one that the driver answers
//! with the tags of requests for as long as there are any, and one for each turn with what is done.
//!
//! What is done is gathered in one of two buffers and told at the end of the turn; the driver reads it while the
//! command is under way, and the other buffer is filled meanwhile.
//!
//! *Invariant:* a buffer that a command names is not touched. A tag stands in the buffers once at most: it comes
//! back to us only after the command that told of its last request has ended, so a buffer has room for all tags.

use super::driver::Driver;
use ::ublk::{BatchFlags, BatchIo, ElementHeader, IoOp};
use block::Segment;
use queue::FileId;
use ring::Token;
use zerocopy::{FromBytes, IntoBytes};

/// The number of the command that the driver answers with tags. No tag has it.
const FETCH: u32 = 1 << 16;
/// The numbers of those that tell of the first and of the second buffer.
const TELL: u32 = FETCH + 1;

/// What the driver is told of one tag.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Told {
    /// The driver's tag.
    pub(super) tag: u16,
    /// Where its next request's memory registers itself.
    pub(super) buffer: u16,
    /// How the request ended.
    pub(super) result: i32,
    /// The address of its buffer.
    pub(super) address: u64,
}

/// What came of the end of a command.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Outcome {
    /// What was expected.
    Fine,
    /// The driver refused it with this errno.
    Refused(i32),
    /// The device ends: the driver has taken back every tag that is listed in this buffer.
    Gone {
        /// Which of both buffers. It is not touched before the next telling.
        half: usize,
        /// How many tags.
        count: u16,
    },
    /// It refused one tag of it with this errno.
    RefusedTag(u16, i32),
}

#[derive(Clone, Copy, Default, Debug)]
struct Half {
    /// Tags in it.
    count: u16,
    /// A command names it.
    told: bool,
}

/// A lane's commands.
#[derive(Debug)]
pub(super) struct Batch {
    file: FileId,
    q_id: u16,
    token: Token,
    flags: BatchFlags,
    /// Both buffers, one behind the other.
    memory: Segment,
    halves: [Half; 2],
    /// Which one is being filled.
    filling: usize,
    /// All tags are on their way to the driver for the first time.
    preparing: bool,
    /// The driver may answer with tags.
    fetching: bool,
    /// No command shall fetch any more.
    withdrawn: bool,
}

impl Batch {
    /// How much memory it needs, in bytes, for so many tags.
    pub(super) fn memory_len(depth: u16, flags: BatchFlags) -> u64 {
        2 * u64::from(depth) * u64::from(flags.element_len())
    }

    /// Hand all tags to the driver and ask for requests.
    pub(super) fn open<D: Driver>(
        file: FileId,
        q_id: u16,
        token: Token,
        flags: BatchFlags,
        memory: Segment,
        tags: impl Iterator<Item = Told>,
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
        tags.for_each(|told| batch.add(told, ring));
        batch.tell(IoOp::PrepIoCmds, ring);
        batch.fetch(ring);
        batch
    }

    /// Whether a number is one of its commands', and not a tag.
    pub(super) const fn is_command(number: u32) -> bool {
        number >= FETCH
    }

    /// The driver may still answer with tags.
    pub(super) fn is_fetching(&self) -> bool {
        self.fetching
    }

    /// Something is still to be told, or being told.
    pub(super) fn is_telling(&self) -> bool {
        self.halves.iter().any(|half| half.count > 0)
    }

    /// Something can be told now.
    pub(super) fn can_tell(&self) -> bool {
        self.halves[self.filling].count > 0 && !self.halves[self.filling ^ 1].told
    }

    fn half(&self, index: usize) -> Segment {
        let len = self.memory.len / 2;
        self.memory.slice(index as u32 * len, len)
    }

    /// A tag is done. It is told with the next [`flush`](Batch::flush).
    #[inline]
    pub(super) fn add<D: Driver>(&mut self, told: Told, ring: &mut D) {
        let len = u32::from(self.flags.element_len());
        let half = &mut self.halves[self.filling];
        let at = u32::from(half.count) * len;
        half.count += 1;
        let place = self.half(self.filling).slice(at, len);
        let header = ElementHeader { tag: told.tag, buf_index: told.buffer, result: told.result };
        let (first, second) = ring.bytes_mut(place).split_at_mut(size_of::<ElementHeader>());
        first.copy_from_slice(header.as_bytes());
        if !second.is_empty() {
            second.copy_from_slice(&told.address.to_ne_bytes());
        }
    }

    /// The end of a turn: tell what was gathered, unless the last telling is under way.
    #[inline]
    pub(super) fn flush<D: Driver>(&mut self, ring: &mut D) {
        if self.can_tell() {
            self.tell(IoOp::CommitIoCmds, ring);
        }
    }

    fn tell<D: Driver>(&mut self, op: IoOp, ring: &mut D) {
        let index = self.filling;
        let half = &mut self.halves[index];
        half.told = true;
        let (count, element) = (half.count, self.flags.element_len());
        let memory = self.half(index).slice(0, u32::from(count) * u32::from(element));
        let command = BatchIo {
            q_id: self.q_id,
            flags: self.flags.0,
            nr_elem: count,
            elem_bytes: element,
            ..BatchIo::default()
        };
        let token = Token { number: TELL + index as u32, ..self.token };
        ring.tell(token, self.file, op.code(), command, memory);
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

    /// Have the driver answer no more.
    pub(super) fn withdraw<D: Driver>(&mut self, ring: &mut D) {
        self.withdrawn = true;
        if self.fetching {
            ring.withdraw_fetch(Token { number: FETCH, ..self.token });
        }
    }

    /// One of its commands has ended.
    pub(super) fn ended<D: Driver>(&mut self, number: u32, result: i64, ring: &mut D) -> Outcome {
        if number == FETCH {
            return self.fetch_ended(result as i32, ring);
        }
        let index = (number - TELL) as usize & 1;
        let count = std::mem::take(&mut self.halves[index]).count;
        let len = i64::from(self.flags.element_len());
        if std::mem::take(&mut self.preparing) {
            if result == 0 {
                return Outcome::Fine;
            }
            // Not one tag is the driver's.
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
            self.add(Told { tag, buffer, result, address }, ring);
        }
        Outcome::RefusedTag(refused.tag, if result < 0 { -result as i32 } else { libc::EIO })
    }

    /// One of the tags in a buffer, by the driver's number.
    pub(super) fn tag<D: Driver>(&self, half: usize, at: u16, ring: &D) -> u16 {
        self.element(half, at, ring).0.tag
    }

    /// What a buffer says of one tag.
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
            // The kernel may end it at any time.
            0 | libc::ENOBUFS | libc::EINTR | libc::EAGAIN => {
                self.fetch(ring);
                Outcome::Fine
            }
            errno => Outcome::Refused(errno),
        }
    }
}
