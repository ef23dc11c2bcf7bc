//! Turns FUSE requests into requests of the stack. Answers requests that do not need the stack at once.

use super::entries::End;
use super::shared::TRANSFER_MAX;
use super::{Answer, Front, Pdu, Via};
use crate::{FrontNumber, Turn};
use block::{Bytes, Data, Extent, Flags, Op, Request, Segment, Tag};
use proto::fuse::wire::{CALL_LEN_MAX, HEAD_LEN, IN_HEADER_LEN, falloc, fopen};
use proto::fuse::{self, Agreement, Call, Change, Header, Offer, Seek, Transfer};
use queue::{Owner, Ring, Stripes};

/// Maximum number of background requests in flight: enough for loop devices and writers together.
const BACKGROUND_MAX: u16 = 4096;
/// Bytes of extent records per step of a search: 256 extents.
const EXTENTS_LEN: u32 = 256 * Extent::RECORD_LEN as u32;

/// Next step of a request.
enum Step {
    /// Submit this request to the stack.
    Submit(Pdu, Request),
    /// Complete the request with a status only: 0 or a positive errno.
    End(i32),
    /// Complete the request with the encoded reply of this many bytes.
    Ready(usize),
    /// Complete the request with the encoded reply to INIT.
    Agreed { len: usize, agreement: Agreement },
    /// Send no reply.
    Silence,
}

/// Identifies a FUSE request: its channel, its unique id, and how it arrived.
#[derive(Clone, Copy)]
struct CallId {
    index: usize,
    unique: u64,
    via: Via,
}

impl CallId {
    fn pdu(self, answer: Answer) -> Pdu {
        Pdu { unique: self.unique, via: self.via, answer, memory: Segment::EMPTY, exclusive: Stripes::NONE }
    }

    fn submit(self, answer: Answer, req: Request) -> Step {
        Step::Submit(self.pdu(answer), req)
    }
}

impl Front {
    /// Handles a FUSE request, for which `tag` is reserved.
    pub(super) fn call(
        &mut self,
        index: usize,
        tag: Tag,
        via: Via,
        header: &Header,
        call: Call,
        turn: &mut Turn<'_>,
    ) {
        let asked = CallId { index, unique: header.unique, via };
        let step = match call {
            Call::Read(transfer) => self.read(asked, transfer, turn),
            Call::Write(transfer) => self.write(asked, header, transfer, turn),
            Call::Sync => asked.submit(Answer::Status, Request::flush()),
            Call::Allocate { offset, len, mode } => self.allocate(asked, offset, len, mode),
            Call::Seek { offset, what } => self.seek(asked, offset, what, turn),
            other => self.answer_call(asked, other, turn),
        };
        self.take_step(asked, tag, step, turn);
    }

    fn take_step(&mut self, asked: CallId, tag: Tag, step: Step, turn: &mut Turn<'_>) {
        let CallId { index, unique, via } = asked;
        let Some(channel) = self.channels[index].as_mut() else { return };
        let queue = channel.queue;
        match step {
            Step::Submit(pdu, req) => return self.begin(index, tag, pdu, req, turn),
            Step::End(errno) => channel.end(via, End { unique, errno }, turn.ring),
            Step::Ready(len) => channel.answer_from_room(via, unique, len as u32, turn.ring),
            Step::Agreed { len, agreement } => {
                channel.answer_from_room(via, unique, len as u32, turn.ring);
                // Set this only after the reply: the control plane relies on the kernel having received the
                // reply.
                channel.shared.agree(&agreement);
            }
            // An entry has to be returned to the kernel even without a reply.
            Step::Silence if via != Via::Device => channel.end(via, End { unique, errno: 0 }, turn.ring),
            Step::Silence => {}
        }
        turn.queues.get_mut(queue).release(tag);
    }

    /// Submits a request to the stack.
    #[inline]
    pub(super) fn submit(&mut self, index: usize, tag: Tag, pdu: Pdu, req: Request, turn: &mut Turn<'_>) {
        let Some(Some(channel)) = self.channels.get(index) else { return };
        let queue = channel.queue;
        if let Some(served) = self.served(queue) {
            served.pdus[tag.index()] = pdu;
        }
        let owner = Owner::new(FrontNumber::Fuse as u8, index as u32);
        turn.queues.touch(queue).submit(tag, owner, req, turn.ring);
    }

    fn read(&mut self, asked: CallId, transfer: Transfer, turn: &mut Turn<'_>) -> Step {
        let Some(channel) = self.channels[asked.index].as_ref() else { return Step::Silence };
        let (facts, size) = (&channel.shared.facts, channel.shared.size());
        if transfer.offset >= size || transfer.len == 0 {
            return Step::End(0);
        }
        let len = u64::from(transfer.len).min(size - transfer.offset);
        // Read the whole blocks that contain the requested range.
        let block = u64::from(facts.block_len_min);
        let start = transfer.offset - transfer.offset % block;
        let end = (transfer.offset + len).next_multiple_of(block).min(size);
        let answer = Answer::Data { skip: (transfer.offset - start) as u32, len: len as u32 };
        let mut req = Request::new(Op::Read, Bytes(start), Bytes(end - start));
        // A backend that holds the data in memory may answer with that memory, even if it does not always
        // do so.
        req.flags = Flags::ZERO_COPY;
        let mut pdu = asked.pdu(answer);
        let queue = channel.queue;
        if let (Via::Entry { entry, .. }, Some(entries)) = (asked.via, &channel.entries) {
            let payload = entries.payload(entry);
            if end - start > u64::from(payload.len) {
                return Step::End(libc::EIO);
            }
            (req.flags, req.data) = (Flags::empty(), Data::One(payload.slice(0, (end - start) as u32)));
        } else if !self.served(queue).is_some_and(|served| served.zero_copy_reads) {
            let Some(memory) = turn.ring.allocate((end - start) as u32) else {
                return Step::End(libc::ENOMEM);
            };
            if let Some(channel) = self.channels[asked.index].as_mut() {
                pdu.memory = channel.hold(memory);
            }
            req.data = Data::One(memory);
        }
        Step::Submit(pdu, req)
    }

    fn write(&mut self, asked: CallId, header: &Header, transfer: Transfer, turn: &mut Turn<'_>) -> Step {
        let Some(channel) = self.channels[asked.index].as_mut() else { return Step::Silence };
        let (facts, size) = (channel.shared.facts, channel.shared.size());
        let block = u64::from(facts.block_len_min);
        if facts.read_only {
            return Step::End(libc::EROFS);
        }
        let brought = match asked.via {
            Via::Device => (header.len as usize).saturating_sub(HEAD_LEN),
            Via::Entry { payload_len, .. } => payload_len as usize,
        };
        if brought != transfer.len as usize || transfer.len > TRANSFER_MAX {
            return Step::End(libc::EIO);
        }
        if transfer.len == 0 {
            return Step::End(libc::EINVAL);
        }
        if transfer.offset >= size {
            return Step::End(libc::ENOSPC);
        }
        // As on a block device, only the part that fits is written.
        let len = u64::from(transfer.len).min(size - transfer.offset);
        if !transfer.offset.is_multiple_of(block) || !len.is_multiple_of(block) {
            let pdu = asked.pdu(Answer::Written(len as u32));
            let durable = transfer.is_durable();
            return match channel.part_of_blocks(pdu, transfer.offset, len as u32, durable, turn.ring) {
                Ok((pdu, req)) => Step::Submit(pdu, req),
                Err(errno) => Step::End(errno),
            };
        }
        let mut req = Request::new(Op::Write, Bytes(transfer.offset), Bytes(len));
        let mut memory = Segment::EMPTY;
        let data = match (asked.via, &channel.entries) {
            (Via::Entry { entry, .. }, Some(entries)) => entries.payload(entry),
            _ => {
                let Some(held) = channel.hold_body(len as u32, turn.ring) else {
                    return Step::End(libc::EIO);
                };
                memory = held;
                held
            }
        };
        req.data = Data::One(data.slice(0, len as u32));
        let mut answer = Answer::Written(len as u32);
        if transfer.is_durable() {
            match facts.fua {
                true => req.flags = Flags::FUA,
                false => answer = Answer::FlushAfter(len as u32),
            }
        }
        Step::Submit(Pdu { memory, ..asked.pdu(answer) }, req)
    }

    fn allocate(&mut self, asked: CallId, offset: u64, len: u64, mode: u32) -> Step {
        let Some(channel) = self.channels[asked.index].as_ref() else { return Step::Silence };
        let (facts, size) = (&channel.shared.facts, channel.shared.size());
        if facts.read_only {
            return Step::End(libc::EROFS);
        }
        let flags = match mode & !falloc::KEEP_SIZE {
            falloc::PUNCH_HOLE => Flags::empty(),
            falloc::ZERO_RANGE => Flags::NO_UNMAP,
            // Preallocation is not supported: space on a device is allocated by writes.
            _ => return Step::End(libc::EOPNOTSUPP),
        };
        let Some(end) = offset.checked_add(len) else { return Step::End(libc::EINVAL) };
        if end > size && mode & falloc::KEEP_SIZE == 0 {
            return Step::End(libc::ENOSPC);
        }
        let end = end.min(size);
        if len == 0 || offset >= end {
            return Step::End(0);
        }
        let block = u64::from(facts.block_len_min);
        if !facts.write_zeroes || !offset.is_multiple_of(block) || !end.is_multiple_of(block) {
            return Step::End(libc::EOPNOTSUPP);
        }
        let mut req = Request::new(Op::WriteZeroes, Bytes(offset), Bytes(end - offset));
        req.flags = flags;
        asked.submit(Answer::Status, req)
    }

    fn seek(&mut self, asked: CallId, offset: u64, what: Seek, turn: &mut Turn<'_>) -> Step {
        let Some(channel) = self.channels[asked.index].as_ref() else { return Step::Silence };
        let hole = match what {
            Seek::Data => false,
            Seek::Hole => true,
            Seek::Other => return Step::End(libc::EINVAL),
        };
        if offset >= channel.shared.size() {
            return Step::End(libc::ENXIO);
        }
        match turn.ring.allocate(EXTENTS_LEN) {
            Some(memory) => {
                if let Some(channel) = self.channels[asked.index].as_mut() {
                    channel.hold(memory);
                }
                let (pdu, req) = self.search(asked.index, &asked.pdu(Answer::Status), offset, hole, memory);
                Step::Submit(pdu, req)
            }
            None => Step::End(libc::ENOMEM),
        }
    }

    /// Returns the request for the extents from `from` on.
    pub(super) fn search(
        &self,
        index: usize,
        pdu: &Pdu,
        from: u64,
        hole: bool,
        memory: Segment,
    ) -> (Pdu, Request) {
        let shared = self.channels[index].as_ref().map(|channel| &channel.shared);
        let (size, block) = shared.map_or((0, 1), |s| (s.size(), u64::from(s.facts.block_len_min)));
        let start = from - from % block;
        let asked = size.saturating_sub(start);
        let mut req = Request::new(Op::Extents, Bytes(start), Bytes(asked));
        req.data = Data::One(memory);
        (Pdu { answer: Answer::Found { from, asked, hole }, memory, ..*pdu }, req)
    }

    /// Handles requests, if they do not need the stack.
    fn answer_call(&mut self, asked: CallId, call: Call, turn: &mut Turn<'_>) -> Step {
        let Some(channel) = self.channels[asked.index].as_ref() else { return Step::Silence };
        let shared = &channel.shared;
        let unique = asked.unique;
        let room = turn.ring.bytes_mut(channel.answer_room(asked.via));
        match call {
            Call::GetAttr => Step::Ready(fuse::put_attributes(room, unique, &shared.attributes())),
            Call::SetAttr(change) => match changed(shared, &change) {
                Ok(()) => Step::Ready(fuse::put_attributes(room, unique, &shared.attributes())),
                Err(errno) => Step::End(errno),
            },
            Call::Open => {
                let mut flags = fopen::DIRECT_IO | fopen::PARALLEL_DIRECT_WRITES | fopen::NOFLUSH;
                if shared.backing().is_some() {
                    flags = fopen::PASSTHROUGH | fopen::NOFLUSH;
                }
                shared.opened();
                Step::Ready(fuse::put_open(room, unique, flags, shared.backing().unwrap_or(0)))
            }
            Call::StatFs => Step::Ready(fuse::put_statfs(room, unique, &shared.statfs())),
            Call::Release => {
                shared.released();
                Step::End(0)
            }
            Call::Destroy => Step::End(0),
            Call::Init { major, minor, max_readahead, flags } => {
                let offer = Offer {
                    transfer_max: TRANSFER_MAX,
                    background_max: BACKGROUND_MAX,
                    passthrough: shared.facts.passthrough,
                    over_io_uring: shared.facts.over_io_uring,
                };
                match fuse::negotiate(&offer, major, minor, max_readahead, flags) {
                    Some(agreement) => {
                        Step::Agreed { len: fuse::put_init(room, unique, &agreement), agreement }
                    }
                    None => Step::End(libc::EPROTO),
                }
            }
            Call::Unanswered => Step::Silence,
            _ => Step::End(libc::ENOSYS),
        }
    }
}

/// Parses a request whose head and rest are in two segments.
#[inline]
pub(super) fn read_call(header: &Header, head: Segment, body: Option<Segment>, turn: &Turn<'_>) -> Call {
    let len = header.len as usize;
    let is_write = header.opcode == fuse::wire::opcode::WRITE;
    let first = turn.ring.bytes(head.slice(0, len.min(HEAD_LEN) as u32));
    let body = match body {
        Some(body) if len > HEAD_LEN && !is_write => body,
        _ => return Call::parse(header, &first[IN_HEADER_LEN..]),
    };
    let mut whole = [0; CALL_LEN_MAX];
    let more = (len - HEAD_LEN).min(CALL_LEN_MAX - HEAD_LEN);
    whole[..HEAD_LEN].copy_from_slice(first);
    whole[HEAD_LEN..HEAD_LEN + more].copy_from_slice(turn.ring.bytes(body.slice(0, more as u32)));
    Call::parse(header, &whole[IN_HEADER_LEN..HEAD_LEN + more])
}

/// Applies SETATTR: either all of the changes or none.
fn changed(shared: &super::MountState, change: &Change) -> Result<(), i32> {
    match change.size {
        Some(size) if size == shared.size() => {}
        // As a block device does, ignore O_TRUNC.
        Some(0) if !change.of_open_file => {}
        // Users cannot change the size of a device.
        Some(_) => return Err(libc::EINVAL),
        None => {}
    }
    change.mode.into_iter().for_each(|mode| shared.set_mode(mode));
    shared.set_owner(change.uid, change.gid);
    Ok(())
}
