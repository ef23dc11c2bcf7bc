//! Turns completed requests into replies.

use super::entries::End;
use super::{Answer, Front, Pdu};
use crate::Turn;
use block::{Data, Extent, Op, Request, Segment, Status};
use proto::fuse;
use queue::{Done, QueueId, Ring};

impl Front {
    /// Handles a completed request: replies, or starts its next step.
    pub(super) fn ended(&mut self, queue_id: QueueId, done: Done, turn: &mut Turn<'_>) {
        let Done { tag, owner, status } = done;
        let index = owner.index() as usize;
        let Some(pdu) = self.served(queue_id).map(|served| served.pdus[tag.index()]) else { return };
        let queue = turn.queues.get_mut(queue_id);
        let req = *queue.request(tag);
        if let Some((pdu, req)) = self.next_step(index, &pdu, &req, status, turn) {
            if let Some(served) = self.served(queue_id) {
                served.pdus[tag.index()] = pdu;
            }
            let queue = turn.queues.touch(queue_id);
            return match pdu.exclusive.is_empty() {
                true => queue.submit(tag, owner, req, turn.ring),
                false => queue.submit_exclusive(tag, owner, req, turn.ring),
            };
        }
        queue_release(queue_id, tag, turn);
        let Some(Some(channel)) = self.channels.get_mut(index) else { return };
        let room = channel.answer_room(pdu.via);
        let data = match req.data {
            Data::One(segment) => segment,
            // Requests are submitted with single segments only.
            Data::Run { .. } => Segment::EMPTY,
        };
        let errno = match pdu.answer {
            // The edges were read, but the write could not continue.
            Answer::Part(_) if status.is_ok() => libc::EIO,
            _ => status.errno(),
        };
        let is_part = !pdu.exclusive.is_empty();
        if is_part {
            channel.part_room_in_use = false;
            turn.queues.get_mut(queue_id).release_claim(pdu.exclusive);
        }
        match pdu.answer {
            Answer::Data { skip, len } if errno == 0 => channel.answer_data(&pdu, data, skip, len, turn.ring),
            Answer::Written(len) | Answer::FlushAfter(len) if errno == 0 => {
                let len = fuse::put_written(turn.ring.bytes_mut(room), pdu.unique, len);
                channel.answer_from_room(pdu.via, pdu.unique, len as u32, turn.ring);
            }
            Answer::Found { from, asked, hole } if errno == 0 => {
                let found = found(turn.ring.bytes(pdu.memory), req.offset.0, asked, from, hole);
                let bytes = turn.ring.bytes_mut(room);
                let at = match found {
                    Found::At(offset) => Some(offset),
                    _ if hole => Some(req.offset.0 + asked),
                    _ => None,
                };
                match at {
                    Some(at) => {
                        let len = fuse::put_number(bytes, pdu.unique, at);
                        channel.answer_from_room(pdu.via, pdu.unique, len as u32, turn.ring);
                    }
                    None => channel.end(pdu.via, End { unique: pdu.unique, errno: libc::ENXIO }, turn.ring),
                }
            }
            _ => channel.end(pdu.via, End { unique: pdu.unique, errno }, turn.ring),
        }
        channel.in_stack -= 1;
        // A sub-block write uses the channel's buffer, which is kept.
        if !is_part {
            channel.take_back(pdu.memory, turn.ring);
        }
    }

    /// Returns the next step of a request with several steps, or `None` if it is complete.
    fn next_step(
        &self,
        index: usize,
        pdu: &Pdu,
        req: &Request,
        status: Status,
        turn: &mut Turn<'_>,
    ) -> Option<(Pdu, Request)> {
        if !status.is_ok() {
            return None;
        }
        match pdu.answer {
            Answer::FlushAfter(len) if req.op == Op::Write => {
                Some((Pdu { answer: Answer::Written(len), ..*pdu }, Request::flush()))
            }
            Answer::Part(part) => self.channels.get(index)?.as_ref()?.part_goes_on(pdu, part, turn.ring),
            Answer::Found { from, asked, hole } => {
                let records = turn.ring.bytes(pdu.memory);
                match found(records, req.offset.0, asked, from, hole) {
                    Found::Behind(from) => Some(self.search(index, pdu, from, hole, pdu.memory)),
                    _ => None,
                }
            }
            _ => None,
        }
    }
}

fn queue_release(id: QueueId, tag: block::Tag, turn: &mut Turn<'_>) {
    turn.queues.get_mut(id).release(tag);
}

/// Result of a search for a hole or data.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Found {
    /// Found at this offset.
    At(u64),
    /// The records end before anything was found: continue at this offset.
    Behind(u64),
    /// Nothing was found before the end.
    No,
}

/// Searches for a hole or for data from `from` on, in records that cover `asked` bytes from `start` on.
fn found(records: &[u8], start: u64, asked: u64, from: u64, hole: bool) -> Found {
    let (mut at, end) = (start, start + asked);
    for extent in records.chunks_exact(Extent::RECORD_LEN).map_while(Extent::from_record) {
        let next = (at + extent.len.0).min(end);
        if extent.zero == hole && next > from {
            return Found::At(at.max(from));
        }
        at = next;
    }
    match at {
        _ if at >= end => Found::No,
        // There is no record: a range of unknown status counts as data.
        _ if at <= from && at == start => {
            if hole {
                Found::No
            } else {
                Found::At(from)
            }
        }
        _ => Found::Behind(at),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use block::Bytes;

    fn records(extents: &[(u64, bool)]) -> Vec<u8> {
        let bytes =
            extents.iter().flat_map(|&(len, zero)| Extent { len: Bytes(len), hole: zero, zero }.to_record());
        bytes.chain([0; Extent::RECORD_LEN]).collect()
    }

    #[test]
    fn a_search_finds_the_next_hole_or_data() {
        let map = records(&[(4096, false), (4096, true), (8192, false)]);
        assert_eq!(found(&map, 0, 16384, 0, false), Found::At(0));
        assert_eq!(found(&map, 0, 16384, 100, true), Found::At(4096));
        assert_eq!(found(&map, 0, 16384, 5000, true), Found::At(5000));
        assert_eq!(found(&map, 0, 16384, 5000, false), Found::At(8192));
        assert_eq!(found(&map, 0, 16384, 9000, true), Found::No);
    }

    #[test]
    fn a_search_continues_where_the_records_end() {
        let map = records(&[(4096, false), (4096, false)]);
        assert_eq!(found(&map, 4096, 1 << 20, 4096, true), Found::Behind(4096 + 8192));
        assert_eq!(found(&records(&[]), 4096, 4096, 4096, false), Found::At(4096));
        assert_eq!(found(&records(&[]), 4096, 4096, 4096, true), Found::No);
    }
}
