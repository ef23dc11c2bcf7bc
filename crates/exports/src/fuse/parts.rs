//! Writes that begin or end within a block, where the device's blocks are larger than a byte: the blocks at the edges are
//! read, changed and written back, in memory of the request's own.
//!
//! Meanwhile nobody else may write those blocks, through whichever export of the device: who writes parts of blocks is alone
//! there at the device's [`Gate`], which the queues of whole blocks heed. What may not begin yet waits in its channel, in the
//! order in which it came. The memory in which blocks are put together is the channel's: one is enough.
//!
//! Not here: other devices that stand on the same blocks, and other programs that write to the same file.

use super::channel::Channel;
use super::entries::End;
use super::{Answer, Front, Pdu, TRANSFER_MAX, Via};
use crate::Turn;
use block::{Bytes, Data, Flags, Op, Request, Segment, Tag};
use queue::{Ring, Strips, Wish};
use ring::KernelRing;

/// A request that may not begin yet.
pub(super) struct Waiting {
    tag: Tag,
    pdu: Pdu,
    req: Request,
    /// To be alone where its blocks are.
    wish: Wish,
}

/// Which block at an edge is being read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Edge {
    First,
    Last,
}

/// A write of which the edges are being read. Its memory has the blocks, with the data in its place, and behind them room for
/// one more, into which edges are read.
#[derive(Clone, Copy, Debug)]
pub(super) struct Part {
    /// Where its first block begins on the device.
    start: u64,
    /// Where the data begins in that.
    skip: u32,
    /// Of the data.
    len: u32,
    /// Of a block.
    block: u32,
    durable: bool,
    edge: Edge,
}

impl Part {
    /// Of its blocks.
    fn whole(&self) -> u32 {
        (self.skip + self.len).next_multiple_of(self.block)
    }

    fn end(&self) -> u64 {
        self.start + u64::from(self.whole())
    }

    /// Whether the last block is another than the first, and is not written as a whole.
    fn has_last(&self) -> bool {
        self.whole() > self.block && self.skip + self.len < self.whole()
    }

    fn has_first(&self) -> bool {
        self.skip > 0 || self.len < self.block
    }

    /// Read the block at the edge.
    fn reading(&self, memory: Segment) -> Request {
        let at = match self.edge {
            Edge::First => 0,
            Edge::Last => self.whole() - self.block,
        };
        let mut req = Request::new(Op::Read, Bytes(self.start + u64::from(at)), Bytes(u64::from(self.block)));
        req.data = Data::One(memory.slice(self.whole(), self.block));
        req
    }

    /// Put what was read of the block at the edge around the data.
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
    /// A write of `len` bytes that are not whole blocks. Its data stays where it is until it begins.
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
            // The blocks of the largest write, with one more for edges.
            None => ring.allocate(TRANSFER_MAX + 3 * block).ok_or(libc::ENOMEM)?,
        };
        self.part_room = Some(room);
        let memory = match pdu.via {
            Via::Device => self.hold_body(len, ring).ok_or(libc::EIO)?,
            Via::Entry { .. } => Segment::EMPTY,
        };
        let alone = Strips::of(part.start, part.whole().into());
        let pdu = Pdu { answer: Answer::Part(part), memory, alone, ..pdu };
        Ok((pdu, part.reading(room)))
    }

    /// A request may begin: its data is put where its blocks are put together.
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

    /// An edge has been read: the other, or the write itself. `None`: the device has become shorter.
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
    /// Begin a request, or let it wait until it may.
    #[inline]
    pub(super) fn begin(&mut self, index: usize, tag: Tag, pdu: Pdu, req: Request, turn: &mut Turn<'_>) {
        let Some(Some(channel)) = self.channels.get_mut(index) else { return };
        channel.in_stack += 1;
        if pdu.alone.is_empty() {
            return self.submit(index, tag, pdu, req, turn);
        }
        channel.waiting.push_back(Waiting { tag, pdu, req, wish: Wish::new(pdu.alone) });
        self.take_up_waiting(index, turn);
    }

    /// Take up those that may begin by now, in order.
    pub(super) fn take_up_waiting(&mut self, index: usize, turn: &mut Turn<'_>) {
        while let Some(Some(channel)) = self.channels.get_mut(index) {
            let Some(next) = channel.waiting.front_mut() else { return };
            let end = next.req.offset.0.saturating_add(next.req.len.0);
            let is_gone = channel.is_over || end > channel.shared.size();
            // The memory in which its blocks are put together may be another's still.
            if !is_gone && (channel.is_putting_together || !channel.shared.gate.may_begin(&mut next.wish)) {
                return;
            }
            let Some(mut waiting) = channel.waiting.pop_front() else { return };
            if is_gone {
                self.give_up(index, &waiting, turn);
            } else {
                channel.is_putting_together = true;
                channel.prepare(&mut waiting, turn.ring);
                self.submit(index, waiting.tag, waiting.pdu, waiting.req, turn);
            }
        }
    }

    /// It cannot begin any more.
    fn give_up(&mut self, index: usize, waiting: &Waiting, turn: &mut Turn<'_>) {
        let Waiting { tag, pdu, wish, .. } = waiting;
        let Some(Some(channel)) = self.channels.get_mut(index) else { return };
        channel.shared.gate.give_up(wish);
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

    /// What a write of `len` bytes at `offset` makes of a device whose byte n is n % 251.
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
    fn what_lies_around_the_data_stays() {
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
