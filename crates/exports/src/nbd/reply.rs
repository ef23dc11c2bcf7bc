//! Turns completed requests into replies.
//!
//! A request's tag is released as soon as its reply has been encoded; data stays in place until the ring
//! has sent it.

use super::intake::{DESCRIPTORS_MAX, owed_for};
use super::{Front, Memory, Pdu, Stage, Turn};
use crate::budget::charge_of;
use crate::outbox::NoMemory;
use block::{Bytes, Data, Extent, Flags, Op, Request as BlockRequest, Segment, Status};
use proto::nbd::extents::{put_block_status, reply_len};
use proto::nbd::reply::MAX_FIXED;
use proto::nbd::{Command, NbdError, Request, Style, error_of};
use queue::{Done, QueueId, Ring};
use ring::KernelRing;

impl Front {
    /// Handles a completed request of this queue.
    pub(super) fn answer(&mut self, queue_id: QueueId, done: Done, turn: &mut Turn<'_>) {
        let Done { tag, owner, status } = done;
        let index = owner.index();
        let Some(served) = self.queues[usize::from(queue_id.0)].as_mut() else { return };
        let pdu = served.pdus[tag.index()];
        let zero_copy_reads = served.facts.zero_copy_reads;
        let queue = turn.queues.get_mut(queue_id);
        let data = match queue.request(tag).data {
            Data::One(segment) => segment,
            // Requests are submitted with single segments only.
            Data::Run { .. } => Segment::EMPTY,
        };
        let step = match pdu.stage {
            Stage::Map => self.mapped(index, &pdu, status, zero_copy_reads, turn),
            _ => Step::Reply,
        };
        match step {
            Step::Read(pdu, req) => {
                if let Some(served) = self.queues[usize::from(queue_id.0)].as_mut() {
                    served.pdus[tag.index()] = pdu;
                }
                return turn.queues.touch(queue_id).submit(tag, owner, req, turn.ring);
            }
            Step::Reply => {
                if pdu.reserved > 0 {
                    self.discharge(index, pdu.reserved);
                }
                turn.queues.get_mut(queue_id).release(tag);
                if self.reply(index, &pdu, status, data, turn).is_err() {
                    self.end(index, turn);
                }
            }
        }
        match pdu.memory {
            Memory::Chunk(chunk, _) => self.release_chunk(chunk, turn.ring),
            Memory::Own(memory) => self.free_when_sent(index, memory, turn.ring),
            Memory::None => {}
        }
        if let Stage::Mapped(extents) = pdu.stage {
            self.release(index, extents, turn.ring);
        }
        let Some(connection) = self.connection_mut(index) else { return };
        connection.in_stack -= 1;
        if connection.closed && connection.in_stack == 0 {
            return self.forget(index);
        }
        self.mark(index);
    }

    fn free_when_sent(&mut self, index: u32, memory: Segment, ring: &mut KernelRing) {
        let is_free = match self.connection_mut(index) {
            Some(connection) if !connection.closed => connection.outbox.free_when_sent(memory, ring),
            _ => {
                ring.free(memory);
                true
            }
        };
        if is_free {
            self.discharge(index, charge_of(memory));
        }
    }

    /// Continues a large read whose extents are known: reads the data, unless it is a single hole. If the
    /// query failed, the whole range counts as data.
    fn mapped(
        &mut self,
        index: u32,
        pdu: &Pdu,
        status: Status,
        zero_copy_reads: bool,
        turn: &mut Turn<'_>,
    ) -> Step {
        let Memory::Own(extents) = pdu.memory else { return Step::Reply };
        let len = pdu.request.len;
        if !status.is_ok() {
            turn.ring.bytes_mut(extents).fill(0);
        }
        if is_one_hole(turn.ring.bytes(extents), len) {
            return Step::Reply;
        }
        if self.connection(index).is_none_or(|c| c.closed) {
            return Step::Reply;
        }
        let mut req = BlockRequest::new(Op::Read, Bytes(pdu.request.offset), Bytes(len));
        let mut next = Pdu { stage: Stage::Mapped(extents), memory: Memory::None, reserved: 0, ..*pdu };
        if zero_copy_reads {
            req.flags = Flags::ZERO_COPY;
            self.discharge(index, pdu.reserved);
        } else {
            let Some(memory) = turn.ring.allocate(len as u32) else { return Step::Reply };
            // Nothing was reserved if the device supported zero-copy reads at that time.
            self.charge_anyway(index, len - pdu.reserved);
            next.memory = Memory::Own(memory);
            req.data = Data::One(memory);
        }
        Step::Read(next, req)
    }

    /// Encodes the reply to a completed request.
    fn reply(
        &mut self,
        index: u32,
        pdu: &Pdu,
        status: Status,
        data: Segment,
        turn: &mut Turn<'_>,
    ) -> Result<(), NoMemory> {
        let Some(connection) = self.connections.get_mut(index as usize).and_then(Option::as_mut) else {
            return Ok(());
        };
        let (request, ring) = (&pdu.request, &mut *turn.ring);
        let owed = owed_for(request);
        if connection.closed {
            connection.owed.pay(owed);
            return Ok(());
        }
        let outbox = &mut connection.outbox;
        let style = connection.session.style;
        let mut header = [0; MAX_FIXED];
        // A failed query of extents does not fail the read.
        let status = if matches!(pdu.stage, Stage::Map) { Status::Ok } else { status };
        let error = error_of(status, request.flags);
        match (request.command, pdu.stage, error) {
            (Command::Read, Stage::Only, None) => {
                let len = request.len as u32;
                let at = style.put_data_header(&mut header, request, request.offset, len, true);
                outbox.push(&header[..at], Some(data.slice(0, len)), ring)?;
            }
            (Command::Read, Stage::Map, None) => match pdu.memory {
                Memory::Own(extents) if is_one_hole(ring.bytes(extents), request.len) => {
                    let at = style.put_hole(&mut header, request, request.offset, request.len as u32, true);
                    outbox.push(&header[..at], None, ring)?;
                }
                _ => {
                    let at = style.put_end(&mut header, request, Some(NbdError::NoMem));
                    outbox.push(&header[..at], None, ring)?;
                }
            },
            (Command::Read, Stage::Mapped(extents), None) => {
                let mut pieces = [(0, 0, false); PIECES_MAX];
                let count = pieces_of(ring.bytes(extents), request.len as u32, &mut pieces);
                for (number, &(skip, len, hole)) in pieces[..count].iter().enumerate() {
                    let (offset, last) = (request.offset + u64::from(skip), number + 1 == count);
                    let at = if hole {
                        style.put_hole(&mut header, request, offset, len, last)
                    } else {
                        style.put_data_header(&mut header, request, offset, len, last)
                    };
                    outbox.push(&header[..at], (!hole).then(|| data.slice(skip, len)), ring)?;
                }
            }
            (Command::BlockStatus, _, None) => {
                let out = &mut self.status_reply;
                out.resize(reply_len(Style::Extended, DESCRIPTORS_MAX), 0);
                let put = pdu.query.and_then(|query| {
                    let extents = records(ring.bytes(data));
                    put_block_status(out, &connection.session, request, &query, extents)
                });
                let len = put.unwrap_or_else(|| style.put_end(out, request, Some(NbdError::Io)));
                outbox.push(&out[..len], None, ring)?;
            }
            _ => {
                let at = style.put_end(&mut header, request, error);
                outbox.push(&header[..at], None, ring)?;
            }
        }
        outbox.answered(owed.bytes);
        Ok(())
    }

    /// Answers a request that does not need the stack.
    pub(super) fn answer_at_once(
        &mut self,
        index: u32,
        request: &Request,
        error: Option<NbdError>,
        turn: &mut Turn<'_>,
    ) {
        let Some(connection) = self.connection_mut(index) else { return };
        let mut header = [0; MAX_FIXED];
        let at = connection.session.style.put_end(&mut header, request, error);
        connection.owed.replies += 1;
        match connection.outbox.push(&header[..at], None, turn.ring) {
            Ok(()) => {
                connection.outbox.answered(0);
                self.mark(index);
            }
            Err(NoMemory) => {
                connection.owed.replies -= 1;
                self.end(index, turn);
            }
        }
    }
}

/// Next step of a request.
enum Step {
    Reply,
    Read(Pdu, BlockRequest),
}

/// Maximum number of chunks in the reply to a mapped read.
const PIECES_MAX: usize = 33;

/// Iterates over the extent records in a request's data, up to the first invalid one.
fn records(bytes: &[u8]) -> impl Iterator<Item = Extent> + '_ {
    bytes.chunks_exact(Extent::RECORD_LEN).map_while(Extent::from_record)
}

/// Returns whether the first extent covers all of `len` bytes with zeroes.
fn is_one_hole(extents: &[u8], len: u64) -> bool {
    records(extents).next().is_some_and(|extent| extent.zero && extent.len.0 >= len)
}

/// Divides a read of `len` bytes into (offset, length, hole): equal neighbours are merged, and ranges
/// without a record count as data.
fn pieces_of(extents: &[u8], len: u32, pieces: &mut [(u32, u32, bool); PIECES_MAX]) -> usize {
    let (mut at, mut count) = (0u32, 0usize);
    let tail = Extent { len: Bytes(u64::from(len)), hole: false, zero: false };
    for extent in records(extents).take(PIECES_MAX - 1).chain(std::iter::once(tail)) {
        let part = extent.len.0.min(u64::from(len - at)) as u32;
        if part == 0 {
            break;
        }
        match count.checked_sub(1).map(|last| &mut pieces[last]) {
            Some(last) if last.2 == extent.zero => last.1 += part,
            _ => {
                pieces[count] = (at, part, extent.zero);
                count += 1;
            }
        }
        at += part;
    }
    count
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes_of(extents: &[(u64, bool)]) -> Vec<u8> {
        extents
            .iter()
            .flat_map(|&(len, zero)| Extent { len: Bytes(len), hole: zero, zero }.to_record())
            .chain([0; 16])
            .collect()
    }

    fn cut(extents: &[(u64, bool)], len: u32) -> Vec<(u32, u32, bool)> {
        let mut pieces = [(0, 0, false); PIECES_MAX];
        let count = pieces_of(&bytes_of(extents), len, &mut pieces);
        pieces[..count].to_vec()
    }

    #[test]
    fn a_hole_that_ends_early_does_not_cover_the_read() {
        assert!(is_one_hole(&bytes_of(&[(8192, true)]), 8192));
        assert!(!is_one_hole(&bytes_of(&[(4096, true), (4096, false)]), 8192));
        assert!(!is_one_hole(&bytes_of(&[(8192, false)]), 8192));
        assert!(!is_one_hole(&bytes_of(&[]), 8192));
    }

    #[test]
    fn equal_neighbours_are_merged() {
        let got = cut(&[(4096, false), (4096, false), (8192, true)], 16384);
        assert_eq!(got, [(0, 8192, false), (8192, 8192, true)]);
    }

    #[test]
    fn an_extent_past_the_read_is_truncated_and_ranges_without_a_record_are_data() {
        assert_eq!(cut(&[(1 << 40, true)], 4096), [(0, 4096, true)]);
        assert_eq!(cut(&[(512, true)], 4096), [(0, 512, true), (512, 3584, false)]);
        assert_eq!(cut(&[], 4096), [(0, 4096, false)]);
    }
}
