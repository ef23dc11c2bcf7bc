//! Sub-block writes: writes that begin or end within a block, where blocks are larger than a byte. The blocks
//! at the edges are read, modified and written back (read-modify-write).
//!
//! During that time nothing else may write those blocks, through any export of the device: the write holds
//! its stripes of the device's range lock ([`RangeLock`](queue::RangeLock)) exclusively, and queues check
//! that lock before whole-block writes. Requests that may not start yet wait in their channel, in order of
//! arrival. A channel has one buffer for read-modify-write.
//!
//! Not covered: other devices on the same blocks, and other programs that write to the same file.

use super::channel::Channel;
use super::entries::End;
use super::{Answer, Front, Pdu, TRANSFER_MAX, Via};
use crate::Turn;
use block::{Bytes, Data, Flags, Op, Request, Segment, Tag};
use queue::{Claim, Ring, Stripes};
use ring::KernelRing;

/// A request that may not start yet.
pub(super) struct Waiting {
    tag: Tag,
    pdu: Pdu,
    req: Request,
    /// The request's claim on its stripes.
    claim: Claim,
}

/// Edge of the write whose block is being read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Edge {
    First,
    Last,
}

/// A sub-block write whose edges are being read. Its memory holds the blocks, with the data at its place in
/// them, followed by space for one more block, to which edges are read.
#[derive(Clone, Copy, Debug)]
pub(super) struct Part {
    /// Offset of the first block on the device.
    start: u64,
    /// Offset of the data in the first block.
    skip: u32,
    /// Bytes of data.
    len: u32,
    /// Bytes of a block.
    block: u32,
    durable: bool,
    edge: Edge,
}

impl Part {
    /// Returns the bytes of all blocks that the write touches.
    fn whole(&self) -> u32 {
        (self.skip + self.len).next_multiple_of(self.block)
    }

    fn end(&self) -> u64 {
        self.start + u64::from(self.whole())
    }

    /// Returns whether the last block differs from the first, and is only partly written.
    fn has_last(&self) -> bool {
        self.whole() > self.block && self.skip + self.len < self.whole()
    }

    fn has_first(&self) -> bool {
        self.skip > 0 || self.len < self.block
    }

    /// Returns the request that reads the block at the edge.
    fn reading(&self, memory: Segment) -> Request {
        let at = match self.edge {
            Edge::First => 0,
            Edge::Last => self.whole() - self.block,
        };
        let mut req = Request::new(Op::Read, Bytes(self.start + u64::from(at)), Bytes(u64::from(self.block)));
        req.data = Data::One(memory.slice(self.whole(), self.block));
        req
    }

    /// Copies the bytes that surround the data from the edge block that was read.
    fn complete(&self, memory: Segment, ring: &mut KernelRing) {
        let (whole, end) = (self.whole(), self.skip + self.len);
        let read = memory.slice(whole, self.block);
        if self.edge == Edge::First && self.skip > 0 {
            ring.copy(read.slice(0, self.skip), memory.slice(0, self.skip));
        }
        if end < whole && (self.edge == Edge::Last || whole == self.block) {
            let left = whole - end;
            ring.copy(read.slice(self.block - left, left), memory.slice(end, left));
        }
    }
}

impl Channel {
    /// Starts a write of `len` bytes that are not whole blocks. Its data stays in place until the write may
    /// start.
    ///
    /// # Errors
    /// A positive errno.
    pub(super) fn part_of_blocks(
        &mut self,
        pdu: Pdu,
        offset: u64,
        len: u32,
        durable: bool,
        ring: &mut KernelRing,
    ) -> Result<(Pdu, Request), i32> {
        let block = self.shared.facts.block_len_min;
        let skip = (offset % u64::from(block)) as u32;
        let start = offset - u64::from(skip);
        let mut part = Part { start, skip, len, block, durable, edge: Edge::First };
        if part.end() > self.shared.size() {
            return Err(libc::EINVAL);
        }
        if !part.has_first() {
            part.edge = Edge::Last;
        }
        let room = match self.part_room {
            Some(room) => room,
            // Space for the blocks of the largest write, and for one more block to read edges to.
            None => ring.allocate(TRANSFER_MAX + 3 * block).ok_or(libc::ENOMEM)?,
        };
        self.part_room = Some(room);
        let memory = match pdu.via {
            Via::Device => self.hold_body(len, ring).ok_or(libc::EIO)?,
            Via::Entry { .. } => Segment::EMPTY,
        };
        let exclusive = Stripes::of(part.start, part.whole().into());
        let pdu = Pdu { answer: Answer::Part(part), memory, exclusive, ..pdu };
        Ok((pdu, part.reading(room)))
    }

    /// Copies the data of a request that may start to the read-modify-write buffer.
    #[inline]
    fn prepare(&mut self, waiting: &mut Waiting, ring: &mut KernelRing) {
        let pdu = &mut waiting.pdu;
        let (Answer::Part(part), Some(room)) = (pdu.answer, self.part_room) else { return };
        let data = match (pdu.via, &self.entries) {
            (Via::Entry { entry, .. }, Some(entries)) => entries.payload(entry),
            _ => pdu.memory,
        };
        ring.copy(data.slice(0, part.len), room.slice(part.skip, part.len));
        self.take_back(std::mem::replace(&mut pdu.memory, room), ring);
    }

    /// Continues after an edge was read: returns the read of the other edge, or the write. Returns `None`
    /// if the device has shrunk.
    pub(super) fn part_goes_on(
        &self,
        pdu: &Pdu,
        part: Part,
        ring: &mut KernelRing,
    ) -> Option<(Pdu, Request)> {
        if part.end() > self.shared.size() {
            return None;
        }
        part.complete(pdu.memory, ring);
        if part.edge == Edge::First && part.has_last() {
            let last = Part { edge: Edge::Last, ..part };
            return Some((Pdu { answer: Answer::Part(last), ..*pdu }, last.reading(pdu.memory)));
        }
        let mut req = Request::new(Op::Write, Bytes(part.start), Bytes(u64::from(part.whole())));
        req.data = Data::One(pdu.memory.slice(0, part.whole()));
        let answer = match part.durable {
            true if self.shared.facts.fua => {
                req.flags = Flags::FUA;
                Answer::Written(part.len)
            }
            true => Answer::FlushAfter(part.len),
            false => Answer::Written(part.len),
        };
        Some((Pdu { answer, ..*pdu }, req))
    }
}

impl Front {
    /// Starts a request, or queues it until it may start.
    #[inline]
    pub(super) fn begin(&mut self, index: usize, tag: Tag, pdu: Pdu, req: Request, turn: &mut Turn<'_>) {
        let Some(Some(channel)) = self.channels.get_mut(index) else { return };
        channel.in_stack += 1;
        if pdu.exclusive.is_empty() {
            return self.submit(index, tag, pdu, req, turn);
        }
        channel.waiting.push_back(Waiting { tag, pdu, req, claim: Claim::new(pdu.exclusive) });
        self.take_up_waiting(index, turn);
    }

    /// Starts queued requests that may start now, in order.
    pub(super) fn take_up_waiting(&mut self, index: usize, turn: &mut Turn<'_>) {
        while let Some(Some(channel)) = self.channels.get_mut(index) {
            let Some(next) = channel.waiting.front_mut() else { return };
            let end = next.req.offset.0.saturating_add(next.req.len.0);
            let is_gone = channel.is_over || end > channel.shared.size();
            // Another write may still use the read-modify-write buffer.
            let queue = turn.queues.get_mut(channel.queue);
            if !is_gone && (channel.part_room_in_use || !queue.acquire(&mut next.claim)) {
                return;
            }
            let Some(mut waiting) = channel.waiting.pop_front() else { return };
            if is_gone {
                self.give_up(index, &waiting, turn);
            } else {
                channel.part_room_in_use = true;
                channel.prepare(&mut waiting, turn.ring);
                self.submit(index, waiting.tag, waiting.pdu, waiting.req, turn);
            }
        }
    }

    /// Fails a request that can no longer start.
    fn give_up(&mut self, index: usize, waiting: &Waiting, turn: &mut Turn<'_>) {
        let Waiting { tag, pdu, claim, .. } = waiting;
        let Some(Some(channel)) = self.channels.get_mut(index) else { return };
        turn.queues.get_mut(channel.queue).withdraw_claim(claim);
        channel.end(pdu.via, End { unique: pdu.unique, errno: libc::EIO }, turn.ring);
        channel.in_stack -= 1;
        channel.take_back(pdu.memory, turn.ring);
        turn.queues.get_mut(channel.queue).release(*tag);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ring::{Choice, RingConfig};

    const BLOCK: u32 = 512;

    /// Returns the content after a write of `len` bytes at `offset` to a device whose byte n is n % 251.
    fn written(offset: u64, len: u32) -> Vec<u8> {
        let config = RingConfig { engine: Choice::Epoll, ..RingConfig::default() };
        let mut ring = KernelRing::new(config).unwrap();
        let mut device: Vec<u8> = (0..8 * BLOCK).map(|n| (n % 251) as u8).collect();
        let skip = (offset % u64::from(BLOCK)) as u32;
        let start = offset - u64::from(skip);
        let mut part = Part { start, skip, len, block: BLOCK, durable: false, edge: Edge::First };
        let memory = ring.allocate(part.whole() + BLOCK).unwrap();
        ring.bytes_mut(memory.slice(skip, len)).fill(255);
        let mut edges = Vec::new();
        edges.extend(part.has_first().then_some(Edge::First));
        edges.extend(part.has_last().then_some(Edge::Last));
        for edge in edges {
            part.edge = edge;
            let req = part.reading(memory);
            let Data::One(into) = req.data else { panic!("one piece") };
            let from = &device[req.offset.0 as usize..][..req.len.0 as usize];
            ring.bytes_mut(into).copy_from_slice(from);
            part.complete(memory, &mut ring);
        }
        let whole = ring.bytes(memory.slice(0, part.whole()));
        device[start as usize..][..whole.len()].copy_from_slice(whole);
        device
    }

    #[test]
    fn bytes_around_the_data_are_preserved() {
        let before = written(0, BLOCK)[BLOCK as usize..].to_vec();
        assert!(before.iter().zip(BLOCK..).all(|(byte, n)| u32::from(*byte) == n % 251));
        for offset in [0u64, 1, 511, 512, 513, 1000] {
            for len in [1u32, 2, 511, 512, 513, 1024, 1535, 1537] {
                for (at, byte) in written(offset, len).into_iter().enumerate() {
                    let is_data = (offset as usize..offset as usize + len as usize).contains(&at);
                    let want = if is_data { 255 } else { (at % 251) as u8 };
                    assert_eq!(byte, want, "{len} bytes at {offset}: byte {at}");
                }
            }
        }
    }
}
