//! Writes that begin or end within a block, where the device's blocks are larger than a byte: the blocks at the edges are
//! read, changed and written back, in memory of the request's own.
//!
//! Meanwhile nobody else may write those blocks. Who writes parts of blocks is *alone* on the mount, on all its threads;
//! who writes whole ones is counted, and neither begins while the other is there. What may not begin yet waits in its
//! channel and is woken. So a mount costs an atomic addition for each write, and only where blocks are larger than a byte.
//!
//! Not here: other exports of the device. Who writes the same block through two of them at once is not kept from it, as on
//! any disk that two programs write to.

use super::channel::Channel;
use super::entries::End;
use super::{Answer, Front, Hold, Pdu};
use crate::Turn;
use block::{Bytes, Data, Flags, Op, Request, Segment, Tag};
use queue::Ring;
use ring::{KernelRing, Waker};
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use std::sync::{Mutex, PoisonError};

/// Somebody is alone, or waits for the others to be gone. The rest counts those.
const ALONE: u32 = 1 << 31;

/// Who changes the blocks of a mount: one alone, or any number of others.
#[derive(Debug, Default)]
pub(super) struct Gate {
    state: AtomicU32,
    /// The threads that serve the mount. Not looked at where only whole blocks are written.
    threads: Mutex<Vec<Waker>>,
}

impl Gate {
    /// This thread is to be woken when somebody may begin who could not before.
    pub(super) fn join(&self, thread: Waker) {
        self.threads.lock().unwrap_or_else(PoisonError::into_inner).push(thread);
    }

    /// Be one of the others. `false`: somebody is alone.
    #[inline]
    fn enter(&self) -> bool {
        // Who would have to go back at once does not come in: he would keep the other waiting.
        if self.state.load(Relaxed) & ALONE != 0 {
            return false;
        }
        if self.state.fetch_add(1, Acquire) & ALONE == 0 {
            return true;
        }
        self.leave();
        false
    }

    #[inline]
    fn leave(&self) {
        if self.state.fetch_sub(1, Release) == ALONE | 1 {
            self.wake();
        }
    }

    /// Be the next who is alone, once the others are gone. `false`: somebody is already.
    fn claim(&self) -> bool {
        self.state.fetch_or(ALONE, AcqRel) & ALONE == 0
    }

    /// Whether the others are gone.
    fn is_empty(&self) -> bool {
        self.state.load(Acquire) & !ALONE == 0
    }

    fn release(&self) {
        self.state.fetch_and(!ALONE, Release);
        self.wake();
    }

    #[cold]
    fn wake(&self) {
        self.threads.lock().unwrap_or_else(PoisonError::into_inner).iter().for_each(Waker::wake);
    }

    /// What a request held is free again.
    #[inline]
    pub(super) fn let_go(&self, hold: Hold) {
        match hold {
            Hold::Nothing => {}
            Hold::Whole => self.leave(),
            Hold::Alone => self.release(),
        }
    }
}

/// A request that may not begin yet.
pub(super) struct Waiting {
    tag: Tag,
    pdu: Pdu,
    req: Request,
    /// It is the next to be alone.
    claimed: bool,
}

impl Waiting {
    pub(super) fn new(tag: Tag, pdu: Pdu, req: Request) -> Waiting {
        Waiting { tag, pdu, req, claimed: false }
    }

    /// Whether it may begin, from here on with what it holds.
    #[inline]
    fn may_begin(&mut self, gate: &Gate) -> bool {
        match self.pdu.hold {
            Hold::Nothing => true,
            Hold::Whole => gate.enter(),
            Hold::Alone => {
                self.claimed = self.claimed || gate.claim();
                self.claimed && gate.is_empty()
            }
        }
    }
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
    /// Begin a write that is not of whole blocks, of data that lies here.
    ///
    /// # Errors
    /// A positive errno.
    pub(super) fn part_of_blocks(
        &self,
        pdu: Pdu,
        offset: u64,
        data: Segment,
        durable: bool,
        ring: &mut KernelRing,
    ) -> Result<(Pdu, Request), i32> {
        let block = self.shared.facts.block_len_min;
        let skip = (offset % u64::from(block)) as u32;
        let start = offset - u64::from(skip);
        let mut part = Part { start, skip, len: data.len, block, durable, edge: Edge::First };
        if part.end() > self.shared.size() {
            return Err(libc::EINVAL);
        }
        if !part.has_first() {
            part.edge = Edge::Last;
        }
        let memory = ring.allocate(part.whole() + block).ok_or(libc::ENOMEM)?;
        ring.copy(data, memory.slice(skip, data.len));
        let pdu = Pdu { answer: Answer::Part(part), memory, hold: Hold::Alone, ..pdu };
        Ok((pdu, part.reading(memory)))
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
    pub(super) fn begin(&mut self, index: usize, mut waiting: Waiting, turn: &mut Turn<'_>) {
        let Some(Some(channel)) = self.channels.get_mut(index) else { return };
        channel.in_stack += 1;
        if waiting.may_begin(&channel.shared.gate) {
            self.submit(index, waiting.tag, waiting.pdu, waiting.req, turn);
        } else {
            channel.waiting.push_back(waiting);
        }
    }

    /// Take up those that may begin by now.
    pub(super) fn take_up_waiting(&mut self, index: usize, turn: &mut Turn<'_>) {
        let count = self.channels[index].as_ref().map_or(0, |channel| channel.waiting.len());
        for _ in 0..count {
            let Some(Some(channel)) = self.channels.get_mut(index) else { return };
            let Some(mut waiting) = channel.waiting.pop_front() else { return };
            let end = waiting.req.offset.0.saturating_add(waiting.req.len.0);
            if channel.is_over || end > channel.shared.size() {
                self.give_up(index, &waiting, turn);
            } else if waiting.may_begin(&channel.shared.gate) {
                self.submit(index, waiting.tag, waiting.pdu, waiting.req, turn);
            } else {
                channel.waiting.push_back(waiting);
            }
        }
    }

    /// It cannot begin any more.
    fn give_up(&mut self, index: usize, waiting: &Waiting, turn: &mut Turn<'_>) {
        let Waiting { tag, pdu, claimed, .. } = waiting;
        let Some(Some(channel)) = self.channels.get_mut(index) else { return };
        if *claimed {
            channel.shared.gate.release();
        }
        channel.end(pdu.via, End { unique: pdu.unique, errno: libc::EIO }, turn.ring);
        channel.in_stack -= 1;
        if pdu.memory.len > 0 {
            turn.ring.free(pdu.memory);
        }
        turn.queues.get_mut(channel.queue).release(*tag);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ring::{Choice, RingConfig};

    const BLOCK: u32 = 512;

    #[test]
    fn who_is_alone_waits_for_the_others_and_they_for_him() {
        let gate = Gate::default();
        assert!(gate.enter() && gate.enter());
        assert!(gate.claim() && !gate.is_empty());
        assert!(!gate.enter(), "nobody comes in any more");
        assert!(!gate.claim(), "and nobody else is the next");
        gate.let_go(Hold::Whole);
        assert!(!gate.is_empty());
        gate.let_go(Hold::Whole);
        assert!(gate.is_empty() && !gate.enter());
        gate.let_go(Hold::Alone);
        assert!(gate.enter());
    }

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
