//! Writes that begin or end within a block, where the device's blocks are larger than a byte: the blocks at the edges are
//! read, changed and written back, in memory of the request's own.
//!
//! Meanwhile nobody else may write those blocks. Who writes parts of blocks is *alone* on the mount, on all its threads;
//! who writes whole ones is counted, and neither begins while the other is there. What may not begin yet waits in its
//! channel, in the order in which it came, and is woken. Those that want to be alone come in turn, whichever channels they
//! wait in; those that wait for one who is alone begin before the next who is. The memory in which blocks are put together
//! is the channel's: one is enough. So a mount costs an atomic addition for each write, and only where blocks are larger
//! than a byte.
//!
//! Not here: other exports of the device. Who writes the same block through two of them at once is not kept from it, as on
//! any disk that two programs write to.

use super::channel::Channel;
use super::entries::End;
use super::{Answer, Front, Hold, Pdu, TRANSFER_MAX, Via};
use crate::Turn;
use block::{Bytes, Data, Flags, Op, Request, Segment, Tag};
use queue::Ring;
use ring::{KernelRing, Waker};
use std::collections::VecDeque;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Somebody is alone, or waits for the others to be gone. The rest counts those.
const ALONE: u32 = 1 << 31;

/// Who changes the blocks of a mount: one alone, or any number of others.
#[derive(Debug, Default)]
pub(super) struct Gate {
    state: AtomicU32,
    /// How many of the others were turned away and wait.
    refused: AtomicU32,
    /// Who wants to be alone, first come first. Neither this nor the next is looked at where only whole blocks are written.
    line: Mutex<Line>,
    /// The threads that serve the mount.
    threads: Mutex<Vec<Waker>>,
}

/// Those that want to be alone and are not yet, by their places.
#[derive(Debug, Default)]
struct Line {
    places: VecDeque<u64>,
    /// The place of the next who comes.
    next: u64,
}

impl Gate {
    /// This thread has a channel more, and is to be woken when somebody may begin who could not before.
    pub(super) fn join(&self, thread: Waker) {
        let mut threads = self.threads.lock().unwrap_or_else(PoisonError::into_inner);
        threads.push(thread);
        // Only the first who waits in a channel stands in line: it never grows while there are requests.
        self.line().places.reserve(threads.len());
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

    /// Be the next who is alone, once the others are gone. `false`: somebody is already or came before, or others wait for one
    /// who was; `place` is to be shown the next time then.
    fn claim(&self, place: &mut Option<u64>) -> bool {
        let mut line = self.line();
        let own = *place.get_or_insert_with(|| {
            let own = line.next;
            line.next += 1;
            line.places.push_back(own);
            own
        });
        let is_first = line.places.front() == Some(&own) && self.refused.load(Acquire) == 0;
        let claimed = is_first && self.state.fetch_or(ALONE, AcqRel) & ALONE == 0;
        if claimed {
            line.places.pop_front();
            *place = None;
        }
        claimed
    }

    /// Who had this place does not want to be alone any more.
    fn step_out(&self, place: u64) {
        self.line().places.retain(|other| *other != place);
        self.wake();
    }

    fn line(&self) -> MutexGuard<'_, Line> {
        self.line.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the others are gone.
    fn is_empty(&self) -> bool {
        self.state.load(Acquire) & !ALONE == 0
    }

    fn release(&self) {
        self.state.fetch_and(!ALONE, Release);
        self.wake();
    }

    /// One of the others who was turned away does not wait any more.
    fn admitted(&self) {
        if self.refused.fetch_sub(1, AcqRel) == 1 {
            self.wake();
        }
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
    /// Where it stands among those that want to be; none when it does not, or is the next.
    place: Option<u64>,
    /// It was turned away, and is counted so.
    refused: bool,
}

impl Waiting {
    pub(super) fn new(tag: Tag, pdu: Pdu, req: Request) -> Waiting {
        Waiting { tag, pdu, req, claimed: false, place: None, refused: false }
    }

    /// Whether it may begin, from here on with what it holds.
    #[inline]
    fn may_begin(&mut self, gate: &Gate) -> bool {
        match self.pdu.hold {
            Hold::Nothing => true,
            Hold::Whole => {
                let entered = gate.enter();
                if entered == self.refused {
                    self.refused = !entered;
                    match entered {
                        true => gate.admitted(),
                        false => _ = gate.refused.fetch_add(1, AcqRel),
                    }
                }
                entered
            }
            Hold::Alone => {
                self.claimed = self.claimed || gate.claim(&mut self.place);
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
            // The next request is read elsewhere.
            Via::Device => self.body.take().ok_or(libc::EIO)?,
            Via::Entry { .. } => Segment::EMPTY,
        };
        let pdu = Pdu { answer: Answer::Part(part), memory, hold: Hold::Alone, ..pdu };
        Ok((pdu, part.reading(room)))
    }

    /// A request may begin. One of parts of blocks has its data put where its blocks are put together, which is nobody
    /// else's while it is alone.
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

    /// Memory of a request is free.
    pub(super) fn take_back(&mut self, memory: Segment, ring: &mut KernelRing) {
        match self.body {
            _ if memory.len == 0 => {}
            // The next request is read where this one was: that memory is warm.
            None if memory.len == TRANSFER_MAX => self.body = Some(memory),
            _ => ring.free(memory),
        }
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
        let is_next = waiting.pdu.hold == Hold::Nothing || channel.waiting.is_empty();
        if is_next && waiting.may_begin(&channel.shared.gate) {
            channel.prepare(&mut waiting, turn.ring);
            self.submit(index, waiting.tag, waiting.pdu, waiting.req, turn);
        } else {
            channel.waiting.push_back(waiting);
        }
    }

    /// Take up those that may begin by now, in order.
    pub(super) fn take_up_waiting(&mut self, index: usize, turn: &mut Turn<'_>) {
        while let Some(Some(channel)) = self.channels.get_mut(index) {
            let Some(next) = channel.waiting.front_mut() else { return };
            let end = next.req.offset.0.saturating_add(next.req.len.0);
            let is_gone = channel.is_over || end > channel.shared.size();
            if !is_gone && !next.may_begin(&channel.shared.gate) {
                return;
            }
            let Some(mut waiting) = channel.waiting.pop_front() else { return };
            if is_gone {
                self.give_up(index, &waiting, turn);
            } else {
                channel.prepare(&mut waiting, turn.ring);
                self.submit(index, waiting.tag, waiting.pdu, waiting.req, turn);
            }
        }
    }

    /// It cannot begin any more.
    fn give_up(&mut self, index: usize, waiting: &Waiting, turn: &mut Turn<'_>) {
        let Waiting { tag, pdu, claimed, place, refused, .. } = waiting;
        let Some(Some(channel)) = self.channels.get_mut(index) else { return };
        if *claimed {
            channel.shared.gate.release();
        }
        place.iter().for_each(|place| channel.shared.gate.step_out(*place));
        if *refused {
            channel.shared.gate.admitted();
        }
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
    use std::sync::atomic::AtomicU8;

    const BLOCK: u32 = 512;

    #[test]
    fn who_is_alone_waits_for_the_others_and_they_for_him() {
        let gate = Gate::default();
        assert!(gate.enter() && gate.enter());
        assert!(gate.claim(&mut None) && !gate.is_empty());
        assert!(!gate.enter(), "nobody comes in any more");
        assert!(!gate.claim(&mut None), "and nobody else is the next");
        gate.let_go(Hold::Whole);
        assert!(!gate.is_empty());
        gate.let_go(Hold::Whole);
        assert!(gate.is_empty() && !gate.enter());
        gate.let_go(Hold::Alone);
        assert!(gate.enter());
    }

    fn waiting(hold: Hold) -> Waiting {
        Waiting::new(Tag(0), Pdu { hold, ..Pdu::VACANT }, Request::flush())
    }

    #[test]
    fn who_waited_for_one_who_is_alone_begins_before_the_next_who_is() {
        let gate = Gate::default();
        let (mut one, mut next, mut other) =
            (waiting(Hold::Alone), waiting(Hold::Alone), waiting(Hold::Whole));
        assert!(one.may_begin(&gate) && !other.may_begin(&gate) && !other.may_begin(&gate));
        gate.let_go(Hold::Alone);
        assert!(!next.may_begin(&gate), "somebody was turned away before");
        assert!(other.may_begin(&gate) && !next.may_begin(&gate), "it is there now");
        gate.let_go(Hold::Whole);
        assert!(next.may_begin(&gate));
    }

    #[test]
    fn who_wants_to_be_alone_is_not_overtaken_by_a_channel_that_goes_on_and_on() {
        let gate = Gate::default();
        let (mut one, mut two, mut three) =
            (waiting(Hold::Alone), waiting(Hold::Alone), waiting(Hold::Alone));
        assert!(one.may_begin(&gate) && !two.may_begin(&gate) && !three.may_begin(&gate));
        for _ in 0..3 {
            gate.let_go(Hold::Alone);
            let mut again = waiting(Hold::Alone);
            assert!(!again.may_begin(&gate), "the thread that was alone looks first, and others wait");
            assert!(!three.may_begin(&gate) && two.may_begin(&gate), "they come in turn");
            (two, three) = (three, again);
        }
        gate.let_go(Hold::Alone);
        two.place.into_iter().for_each(|place| gate.step_out(place));
        assert!(three.may_begin(&gate), "who went away keeps nobody");
    }

    #[test]
    fn threads_that_write_parts_and_wholes_of_one_block_lose_nothing() {
        const ROUNDS: u8 = 100;
        const PARTS: usize = 3;
        let gate = Gate::default();
        // Each reads the block, changes a byte of its own and writes all of it back, as a channel does.
        let block: [AtomicU8; PARTS] = Default::default();
        let until_it_may = |waiting: &mut Waiting| {
            while !waiting.may_begin(&gate) {
                std::thread::yield_now();
            }
        };
        std::thread::scope(|scope| {
            for own in 0..PARTS {
                let (block, gate, until_it_may) = (&block, &gate, &until_it_may);
                scope.spawn(move || {
                    for round in 1..=ROUNDS {
                        until_it_may(&mut waiting(Hold::Alone));
                        let mut read = [0; PARTS];
                        read.iter_mut().zip(block).for_each(|(byte, cell)| *byte = cell.load(Relaxed));
                        assert_eq!(read[own], round - 1, "what {own} wrote before is lost");
                        read[own] = round;
                        std::thread::yield_now();
                        block.iter().zip(read).for_each(|(cell, byte)| cell.store(byte, Relaxed));
                        gate.let_go(Hold::Alone);
                    }
                });
            }
            scope.spawn(|| {
                for _ in 0..ROUNDS {
                    until_it_may(&mut waiting(Hold::Whole));
                    gate.let_go(Hold::Whole);
                }
            });
        });
        assert!(block.iter().all(|cell| cell.load(Relaxed) == ROUNDS));
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
