//! One queue of a ublk device, or the part of a queue that this thread serves: the life cycle of its tags.

use super::batch::{Batch, Element, Outcome};
use super::driver::{Driver, QueueMemory};
use super::mode::DataMode;
use super::request::{Bounds, ParsedRequest, parse_request, result_of};
use super::tuples::Tuples;
use super::{ClientMemory, OpenQueueError, ServedQueueConfig};
use crate::fronts::FrontNumber;
use ::ublk::{
    AutoBufReg, BatchFlags, IoCommand, IoDescriptor, IoFlags, IoOp, IoResult, shmem_index, shmem_offset,
    user_copy_offset,
};
use block::{Bytes, Data, Flags, Op, Request, Segment, Status, Tag};
use queue::{FileId, FileOp, Owner, QueueId, Queues};
use ring::{KERNEL_BUFFER_SHIFT, Token};
use std::collections::VecDeque;
use std::sync::atomic::Ordering::Relaxed;

/// Tags that wait for memory, for space in the ring, or for their turn to be submitted, with their queues.
pub(super) type Waiting = VecDeque<(QueueId, u16)>;

/// Address to commit for a failed read: the driver requires one, but copies nothing.
const UNUSED_ADDRESS: u64 = 4096;

/// Stage of a tag: its owner, and what it waits for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Stage {
    /// No owner: the tag was not fetched yet, or the driver has aborted it.
    Out,
    /// Owned by the driver: our command completes when a request arrives.
    Fetched,
    /// Owned by the front-end: a request has arrived, but there is no memory for it, or no space in the
    /// ring to fill it.
    Starved,
    /// Owned by the driver: the data of a write is being copied to our memory, or a request's memory is
    /// being registered.
    Filling,
    /// Owned by the stack.
    InStack,
    /// Owned by the front-end: the data is done, and the integrity data is submitted to the stack next.
    Between,
    /// Owned by the front-end: a read is done, but the ring has no space to copy its data out.
    Full,
    /// Owned by the driver: the data of a read is being copied to the request's memory, or that memory is
    /// being unregistered.
    Emptying,
}

/// A tag of the driver.
#[derive(Clone, Copy, Debug)]
pub(super) struct TagSlot {
    pub(super) stage: Stage,
    /// Whether the request's memory was registered by command.
    registered: bool,
    /// Whether the data is in memory shared with the client.
    in_client_memory: bool,
    /// Whether the request has integrity data besides its data.
    pub(super) has_tuples: bool,
    /// Result to commit after [`Stage::Emptying`].
    pub(super) result: i32,
    /// The request; meaningless if there is none.
    pub(super) asked: ParsedRequest,
    /// Memory allocated for the request; empty if there is none.
    pub(super) memory: Segment,
}

impl TagSlot {
    const NEW: TagSlot = TagSlot {
        stage: Stage::Out,
        registered: false,
        in_client_memory: false,
        has_tuples: false,
        result: 0,
        asked: ParsedRequest::NOTHING,
        memory: Segment::EMPTY,
    };
}

/// Command numbers in the encoding of this driver.
#[derive(Clone, Copy, Debug)]
struct Codes {
    fetch: u32,
    commit: u32,
    get_data: u32,
    register: u32,
    unregister: u32,
}

impl Codes {
    fn new(encoded: bool) -> Codes {
        let code = |op: IoOp| match op.legacy_code() {
            Some(legacy) if !encoded => legacy,
            _ => op.code(),
        };
        Codes {
            fetch: code(IoOp::FetchReq),
            commit: code(IoOp::CommitAndFetchReq),
            get_data: code(IoOp::NeedGetData),
            register: code(IoOp::RegisterIoBuf),
            unregister: code(IoOp::UnregisterIoBuf),
        }
    }
}

/// A served queue, or part of one.
pub(super) struct ServedQueue {
    pub(super) config: ServedQueueConfig,
    codes: Codes,
    /// A contiguous array with a buffer, or a buffer table entry for the request's memory, for each tag.
    /// `None`: memory is allocated for each request.
    memory: Option<QueueMemory>,
    pub(super) slots: Box<[TagSlot]>,
    /// Integrity data, if the device has any.
    pub(super) tuples: Option<Tuples>,
    /// Number of tags that are not [`Stage::Out`].
    live: u32,
    /// Whether the queue is withdrawn: every command sent from now on is cancelled at once.
    withdrawn: bool,
    /// Commands for many tags at once, and their memory; `None` if each tag has its own commands.
    batch: Option<(Batch, QueueMemory)>,
    /// Whether the front-end lists this queue among those with completions to commit.
    pub(super) is_listed: bool,
}

impl ServedQueue {
    /// Starts serving a queue: fetches all of its tags.
    pub(super) fn open<D: Driver>(
        config: ServedQueueConfig,
        ring: &mut D,
    ) -> Result<ServedQueue, OpenQueueError> {
        let memory = match config.mode {
            DataMode::Copy => {
                let len = config.io_max.0 * u64::from(config.depth);
                Some(ring.reserve(len).ok_or(OpenQueueError::Memory)?)
            }
            DataMode::ZeroCopy | DataMode::AutoZeroCopy => {
                let buffers = ring.reserve_kernel_buffers(config.depth);
                Some(buffers.ok_or(OpenQueueError::KernelBuffers)?)
            }
            DataMode::GetData | DataMode::UserCopy => None,
        };
        let mut served = ServedQueue {
            codes: Codes::new(config.encoded),
            memory,
            slots: vec![TagSlot::NEW; config.depth.into()].into(),
            tuples: config.integrity.map(|shape| Tuples::new(shape, config.depth)),
            live: config.depth.into(),
            withdrawn: false,
            batch: None,
            is_listed: false,
            config,
        };
        served.config.shared.tags.store(served.live, Relaxed);
        if served.config.batch {
            if let Err(error) = served.fetch_all(ring) {
                served.live = 0;
                // On error the client memory still belongs to the caller.
                served.config.client_memory = None;
                served.close(ring);
                return Err(error);
            }
            return Ok(served);
        }
        for tag in 0..served.config.depth {
            served.fetch(tag, ring);
        }
        Ok(served)
    }

    /// Fetches all tags with one command.
    fn fetch_all<D: Driver>(&mut self, ring: &mut D) -> Result<(), OpenQueueError> {
        let flags = match self.config.mode {
            DataMode::Copy => BatchFlags::HAS_BUF_ADDR,
            DataMode::AutoZeroCopy => BatchFlags::AUTO_BUF_REG_FALLBACK,
            _ => BatchFlags::default(),
        };
        let len = Batch::memory_len(self.config.depth, flags);
        let Some(memory) = ring.reserve(len) else { return Err(OpenQueueError::Memory) };
        let QueueMemory::Buffers(all) = memory else { return Err(OpenQueueError::Memory) };
        let all = Segment { len: len as u32, ..all };
        self.slots.iter_mut().for_each(|slot| slot.stage = Stage::Fetched);
        let element: Vec<Element> = (0..self.config.depth)
            .map(|tag| {
                let address = self.buffer(tag, 0).map_or(0, |segment| ring.address(segment));
                self.element(tag, 0, address)
            })
            .collect();
        let (file, q_id) = (self.config.file, self.config.q_id);
        let batch = Batch::open(file, q_id, self.token(0), flags, all, element.into_iter(), ring);
        self.batch = Some((batch, memory));
        Ok(())
    }

    fn element(&self, tag: u16, result: i32, address: u64) -> Element {
        let buffer = match self.memory {
            Some(QueueMemory::Kernel(buffers)) => buffers.first + tag,
            _ => 0,
        };
        Element { tag: self.config.first_tag + tag, buffer, result, address }
    }

    /// Returns whether there are completions to commit at the end of the turn.
    #[inline]
    pub(super) fn can_commit(&self) -> bool {
        self.config.batch && self.can_commit_batch()
    }

    #[inline(never)]
    fn can_commit_batch(&self) -> bool {
        self.batch.as_ref().is_some_and(|(batch, _)| batch.can_commit())
    }

    /// Commits completions at the end of the turn.
    pub(super) fn flush<D: Driver>(&mut self, ring: &mut D) {
        if let Some((batch, _)) = &mut self.batch {
            batch.flush(ring);
        }
    }

    /// Handles the failure of a command for many tags.
    #[cold]
    fn batch_refused<D: Driver>(&mut self, outcome: Outcome, ring: &mut D) {
        match outcome {
            Outcome::Fine => {}
            Outcome::Refused(errno) => self.refused(errno),
            Outcome::Gone { half, count } => {
                for at in 0..count {
                    let tag = self.batch.as_ref().map_or(0, |(batch, _)| batch.tag(half, at, ring));
                    let tag = tag.wrapping_sub(self.config.first_tag);
                    let slot = self.slots.get(usize::from(tag));
                    if slot.is_some_and(|slot| slot.stage == Stage::Fetched) {
                        self.taken_back(tag, ring);
                    }
                }
            }
            Outcome::RefusedTag(tag, errno) => {
                self.refused(errno);
                if let Some(slot) = self.slots.get_mut(usize::from(tag - self.config.first_tag)) {
                    slot.stage = Stage::Out;
                    self.live -= 1;
                    self.config.shared.tags.store(self.live, Relaxed);
                }
            }
        }
    }

    /// Handles the completion of a command for many tags.
    #[inline(never)]
    pub(super) fn batch_ended<D: Driver>(&mut self, number: u32, result: i64, ring: &mut D) {
        let Some((batch, _)) = &mut self.batch else { return };
        let outcome = batch.ended(number, result, ring);
        let is_over = !batch.is_fetching() && !batch.is_committing();
        if outcome != Outcome::Fine {
            self.batch_refused(outcome, ring);
        }
        if is_over {
            // The tags that the driver still has get no more requests.
            for tag in 0..self.config.depth {
                if self.slots[usize::from(tag)].stage == Stage::Fetched {
                    self.taken_back(tag, ring);
                }
            }
        }
    }

    /// Returns the number of tags that the driver has not aborted.
    pub(super) fn live(&self) -> u32 {
        self.live
    }

    /// Returns whether no tag has a request.
    pub(super) fn is_idle(&self) -> bool {
        !self.batch.as_ref().is_some_and(|(batch, _)| batch.is_committing())
            && self.slots.iter().all(|slot| matches!(slot.stage, Stage::Out | Stage::Fetched))
    }

    /// Releases the queue's memory, and returns its file, which the caller must remove.
    pub(super) fn close<D: Driver>(self, ring: &mut D) -> FileId {
        debug_assert!(self.live == 0, "{:?} is closed while {} tags are out", self.config.queue, self.live);
        if let Some(memory) = self.memory {
            ring.unreserve(memory);
        }
        if let Some((_, memory)) = self.batch {
            ring.unreserve(memory);
        }
        if let Some(ClientMemory { region, .. }) = self.config.client_memory {
            ring.unreserve(QueueMemory::Buffers(Segment { region, ..Segment::EMPTY }));
        }
        self.config.file
    }

    /// Cancels the commands of tags without a request at once, and of all other tags when their request is
    /// done.
    pub(super) fn withdraw<D: Driver>(&mut self, ring: &mut D) {
        self.withdrawn = true;
        if let Some((batch, _)) = &mut self.batch {
            return batch.withdraw(ring);
        }
        for (tag, slot) in self.slots.iter().enumerate() {
            if slot.stage == Stage::Fetched {
                ring.withdraw(self.token(tag as u16));
            }
        }
    }

    /// Handles the completion of a tag's command or copy.
    #[inline]
    pub(super) fn ended<D: Driver>(
        &mut self,
        tag: u16,
        result: i64,
        ring: &mut D,
        queues: &mut Queues<D>,
        waiting: &mut Waiting,
    ) {
        let Some(slot) = self.slots.get(usize::from(tag)) else { return };
        match slot.stage {
            Stage::Fetched => match IoResult::from_result(result as i32) {
                element @ (IoResult::Request | IoResult::NeedGetData) => {
                    self.arrived(tag, element == IoResult::NeedGetData, ring, queues, waiting);
                }
                IoResult::Abort => self.taken_back(tag, ring),
                IoResult::Refused(errno) => {
                    self.refused(errno);
                    self.taken_back(tag, ring);
                }
            },
            Stage::Filling if slot.has_tuples => self.filled_with_tuples(tag, result, ring, queues, waiting),
            Stage::Filling => self.filled(tag, result, ring, queues),
            Stage::Emptying => self.emptied(tag, result, ring, waiting),
            // The driver completes each command only once.
            Stage::Out | Stage::Starved | Stage::InStack | Stage::Between | Stage::Full => {
                debug_assert!(false, "{:?} tag {tag}: an end in {:?}", self.config.queue, slot.stage);
            }
        }
    }

    /// Continues a tag that waited for memory or space in the ring.
    pub(super) fn take_up<D: Driver>(
        &mut self,
        tag: u16,
        ring: &mut D,
        queues: &mut Queues<D>,
        waiting: &mut Waiting,
    ) {
        let slot = &self.slots[usize::from(tag)];
        let past_data = slot.has_tuples && self.is_past_data(tag);
        match slot.stage {
            Stage::Between => self.submit_tuples(tag, ring, queues),
            Stage::Starved if past_data => self.fill_tuples(tag, ring, waiting),
            Stage::Full if past_data => self.hand_over_tuples(tag, ring, waiting),
            Stage::Starved => self.provide(tag, ring, queues, waiting),
            Stage::Full => {
                let data = queues.get_mut(self.config.queue).request(Tag(tag)).data;
                self.hand_over(tag, data, ring, waiting);
            }
            stage => debug_assert!(false, "{:?} tag {tag}: it waits in {stage:?}", self.config.queue),
        }
    }

    pub(super) fn token(&self, tag: u16) -> Token {
        Token { front: FrontNumber::Ublk as u8, index: self.config.queue.0, number: tag.into() }
    }

    /// Sends a command for a tag. `value` is the command's last field.
    #[inline]
    fn command<D: Driver>(&self, tag: u16, op: u32, result: i32, value: u64, ring: &mut D) {
        let command =
            IoCommand { q_id: self.config.q_id, tag: self.config.first_tag + tag, result, addr: value };
        let address = match self.memory {
            Some(QueueMemory::Kernel(buffers)) if self.config.mode == DataMode::AutoZeroCopy => {
                let index = buffers.first + tag;
                AutoBufReg { index, flags: AutoBufReg::FALLBACK, ..AutoBufReg::default() }.to_sqe_addr()
            }
            _ => 0,
        };
        ring.command(self.token(tag), self.config.file, op, command, address);
    }

    fn fetch<D: Driver>(&mut self, tag: u16, ring: &mut D) {
        let buffer = self.buffer(tag, 0).map_or(0, |segment| ring.address(segment));
        self.slots[usize::from(tag)].stage = Stage::Fetched;
        self.command(tag, self.codes.fetch, 0, buffer, ring);
    }

    /// Returns the buffer of a tag, if each tag has one.
    #[inline]
    fn buffer(&self, tag: u16, len: u32) -> Option<Segment> {
        match self.memory {
            Some(QueueMemory::Buffers(all)) => Some(Segment {
                offset: all.offset + u64::from(tag) * self.config.io_max.0,
                len,
                region: all.region,
            }),
            _ => None,
        }
    }

    /// Handles a request that the driver has passed.
    #[inline]
    fn arrived<D: Driver>(
        &mut self,
        tag: u16,
        wants_buffer: bool,
        ring: &mut D,
        queues: &mut Queues<D>,
        waiting: &mut Waiting,
    ) {
        self.free_memory(tag, ring);
        let descriptor = self.config.descriptors.read(self.config.first_tag + tag);
        let bounds =
            Bounds { size: Bytes(self.config.shared.size.load(Relaxed)), io_max: self.config.io_max };
        let slot = &mut self.slots[usize::from(tag)];
        (slot.registered, slot.in_client_memory, slot.has_tuples) = (false, false, false);
        slot.result = 0;
        match parse_request(&descriptor, bounds) {
            Ok(asked) => slot.asked = asked,
            Err(status) if wants_buffer => {
                // The driver accepts no completion before a buffer has been provided and filled.
                slot.asked = ParsedRequest::of(Request::new(Op::Write, Bytes::ZERO, bounds.io_max));
                slot.result = -status.errno();
            }
            Err(status) => {
                slot.asked = ParsedRequest::NOTHING;
                return self.commit(tag, -status.errno(), ring);
            }
        }
        let comes_with_tuples = descriptor.flags().has(IoFlags::INTEGRITY) && slot.asked.data_len > 0;
        if comes_with_tuples && !self.expect_tuples(tag) {
            return self.commit(tag, -libc::EIO, ring);
        }
        let slot = &mut self.slots[usize::from(tag)];
        if descriptor.flags().has(IoFlags::SHMEM_ZC) && slot.asked.data_len > 0 {
            return self.arrived_in_client_memory(tag, &descriptor, ring, queues);
        }
        let unregistered = self.config.mode == DataMode::ZeroCopy
            || self.config.mode == DataMode::AutoZeroCopy && descriptor.flags().has(IoFlags::NEED_REG_BUF);
        if unregistered && slot.asked.data_len > 0 {
            return self.register(tag, ring);
        }
        self.provide(tag, ring, queues, waiting);
    }

    /// Handles a request whose data is in memory shared with the client.
    #[inline(never)]
    fn arrived_in_client_memory<D: Driver>(
        &mut self,
        tag: u16,
        descriptor: &IoDescriptor,
        ring: &mut D,
        queues: &mut Queues<D>,
    ) {
        let slot = &mut self.slots[usize::from(tag)];
        let len = slot.asked.data_len;
        let offset = u64::from(shmem_offset(descriptor.addr));
        let fits = |memory: &ClientMemory| {
            shmem_index(descriptor.addr) == memory.index && offset + u64::from(len) <= memory.len
        };
        let Some(memory) = self.config.client_memory.filter(fits) else {
            slot.asked = ParsedRequest::NOTHING;
            return self.commit(tag, -libc::EIO, ring);
        };
        slot.in_client_memory = true;
        let count = &self.config.shared.in_client_memory;
        count.store(count.load(Relaxed) + 1, Relaxed);
        self.submit(tag, Data::One(Segment { offset, len, region: memory.region }), ring, queues);
    }

    /// Updates whether zero-copy reads are possible.
    pub(super) fn lend(&mut self, zero_copy_reads: bool) {
        self.config.zero_copy_reads = zero_copy_reads;
    }

    /// Allocates the memory that a request needs, and submits it.
    fn provide<D: Driver>(&mut self, tag: u16, ring: &mut D, queues: &mut Queues<D>, waiting: &mut Waiting) {
        if self.slots[usize::from(tag)].has_tuples && !self.provide_tuples(tag, ring) {
            self.slots[usize::from(tag)].stage = Stage::Starved;
            return waiting.push_back((self.config.queue, tag));
        }
        let slot = &mut self.slots[usize::from(tag)];
        let ParsedRequest { req, data_len: len } = slot.asked;
        match self.memory {
            _ if len == 0 => self.submit(tag, Data::NONE, ring, queues),
            Some(QueueMemory::Buffers(_)) => {
                let data = self.buffer(tag, len).map_or(Data::NONE, Data::One);
                self.submit(tag, data, ring, queues)
            }
            Some(QueueMemory::Kernel(_)) => self.submit(tag, self.kernel_buffer(tag, len), ring, queues),
            None if req.op == Op::Read && self.config.zero_copy_reads => {
                slot.asked.req.flags = req.flags.union(Flags::ZERO_COPY);
                self.submit(tag, Data::NONE, ring, queues)
            }
            None => {
                if slot.memory.len == 0 {
                    slot.memory = ring.allocate(len).unwrap_or(Segment::EMPTY);
                }
                let memory = slot.memory;
                if memory.len == 0 || slot.asked.brings_data() && !self.fill(tag, memory, ring) {
                    self.slots[usize::from(tag)].stage = Stage::Starved;
                    return waiting.push_back((self.config.queue, tag));
                }
                if !self.slots[usize::from(tag)].asked.brings_data() {
                    self.submit(tag, Data::One(memory), ring, queues);
                }
            }
        }
    }

    /// Starts copying the data of a write. Returns `false` if the ring has no space.
    fn fill<D: Driver>(&mut self, tag: u16, memory: Segment, ring: &mut D) -> bool {
        match self.config.mode {
            DataMode::GetData => self.command(tag, self.codes.get_data, 0, ring.address(memory), ring),
            _ => {
                let offset = user_copy_offset(self.config.q_id, self.config.first_tag + tag, 0);
                let op = FileOp::Read { offset };
                if ring.copy(self.token(tag), self.config.file, op, memory).is_err() {
                    return false;
                }
            }
        }
        self.slots[usize::from(tag)].stage = Stage::Filling;
        true
    }

    fn kernel_buffer(&self, tag: u16, len: u32) -> Data {
        match self.memory {
            Some(QueueMemory::Kernel(buffers)) => {
                let offset = buffers.base + (u64::from(tag) << KERNEL_BUFFER_SHIFT);
                Data::One(Segment { offset, len, region: buffers.region })
            }
            _ => Data::NONE,
        }
    }

    fn register<D: Driver>(&mut self, tag: u16, ring: &mut D) {
        let Some(QueueMemory::Kernel(buffers)) = self.memory else { return };
        self.slots[usize::from(tag)].stage = Stage::Filling;
        self.command(tag, self.codes.register, 0, (buffers.first + tag).into(), ring);
    }

    /// Handles the end of filling a request's memory.
    fn filled<D: Driver>(&mut self, tag: u16, result: i64, ring: &mut D, queues: &mut Queues<D>) {
        let slot = &mut self.slots[usize::from(tag)];
        let len = slot.asked.data_len;
        match self.config.mode {
            DataMode::GetData if slot.result < 0 && result == 0 => {
                let refusal = slot.result;
                self.commit(tag, refusal, ring);
            }
            DataMode::GetData => match IoResult::from_result(result as i32) {
                IoResult::Request => {
                    self.submit(tag, Data::One(self.slots[usize::from(tag)].memory), ring, queues)
                }
                IoResult::Abort => self.taken_back(tag, ring),
                other => {
                    self.refused(-other.to_result());
                    self.taken_back(tag, ring);
                }
            },
            DataMode::UserCopy if result == i64::from(len) => {
                let data = Data::One(slot.memory);
                self.submit(tag, data, ring, queues);
            }
            DataMode::ZeroCopy | DataMode::AutoZeroCopy if result == 0 => {
                slot.registered = true;
                self.submit(tag, self.kernel_buffer(tag, len), ring, queues);
            }
            _ => self.not_filled(tag, result, ring),
        }
    }

    /// Handles a failed or short fill of a request's memory.
    #[cold]
    pub(super) fn not_filled<D: Driver>(&mut self, tag: u16, result: i64, ring: &mut D) {
        self.free_memory(tag, ring);
        let errno = i32::try_from(-result).ok().filter(|&errno| errno > 0).unwrap_or(libc::EIO);
        self.commit(tag, -errno, ring);
    }

    #[inline]
    pub(super) fn submit<D: Driver>(&mut self, tag: u16, data: Data, ring: &mut D, queues: &mut Queues<D>) {
        let slot = &mut self.slots[usize::from(tag)];
        slot.stage = Stage::InStack;
        let req = Request { data, ..slot.asked.req };
        let owner = Owner::new(FrontNumber::Ublk as u8, tag.into());
        queues.touch(self.config.queue).submit(Tag(tag), owner, req, ring);
    }

    /// Handles a request that the stack has completed; `req` is in its final state.
    #[inline]
    pub(super) fn done<D: Driver>(
        &mut self,
        tag: u16,
        req: &Request,
        status: Status,
        ring: &mut D,
        waiting: &mut Waiting,
    ) {
        let slot = &mut self.slots[usize::from(tag)];
        let result = result_of(status, &slot.asked);
        if slot.registered {
            slot.result = result;
            slot.stage = Stage::Emptying;
            let Some(QueueMemory::Kernel(buffers)) = self.memory else { return };
            return self.command(tag, self.codes.unregister, 0, (buffers.first + tag).into(), ring);
        }
        if slot.in_client_memory {
            return self.commit(tag, result, ring);
        }
        let takes_data = slot.asked.takes_data();
        if slot.has_tuples {
            slot.result = result;
            if !self.done_with_tuples(tag, (req.data, status), ring, waiting) {
                return;
            }
        }
        let slot = &mut self.slots[usize::from(tag)];
        match self.config.mode {
            DataMode::UserCopy if takes_data && status.is_ok() => {
                slot.result = result;
                self.hand_over(tag, req.data, ring, waiting);
            }
            DataMode::UserCopy => {
                let appended = req.op == Op::ZoneAppend && status.is_ok();
                self.free_memory(tag, ring);
                // Zoned devices always use user copy.
                let place = if appended { req.offset.sectors().0 } else { 0 };
                self.commit_at(tag, result, place, ring);
            }
            DataMode::GetData if takes_data => {
                let address = match req.data {
                    Data::One(segment) if status.is_ok() && segment.len > 0 => ring.address(segment),
                    _ => UNUSED_ADDRESS,
                };
                self.commit_at(tag, result, address, ring);
            }
            _ => self.commit(tag, result, ring),
        }
    }

    /// Copies read data to the request's memory.
    pub(super) fn hand_over<D: Driver>(&mut self, tag: u16, data: Data, ring: &mut D, waiting: &mut Waiting) {
        let Data::One(memory) = data else { return self.commit(tag, -libc::EIO, ring) };
        let memory = Segment { len: self.slots[usize::from(tag)].asked.data_len, ..memory };
        let offset = user_copy_offset(self.config.q_id, self.config.first_tag + tag, 0);
        let op = FileOp::Write { offset, durable: false };
        let started = ring.copy(self.token(tag), self.config.file, op, memory).is_ok();
        self.slots[usize::from(tag)].stage = if started { Stage::Emptying } else { Stage::Full };
        if !started {
            waiting.push_back((self.config.queue, tag));
        }
    }

    /// Handles the end of the copy of a read's data, or of the unregistration of a request's memory.
    fn emptied<D: Driver>(&mut self, tag: u16, result: i64, ring: &mut D, waiting: &mut Waiting) {
        let slot = &mut self.slots[usize::from(tag)];
        let element = if slot.has_tuples {
            match self.emptied_with_tuples(tag, result, waiting) {
                Some(element) => element,
                None => return,
            }
        } else if slot.registered {
            if result < 0 {
                self.refused(-result as i32);
            }
            self.slots[usize::from(tag)].result
        } else if result == i64::from(slot.result) {
            slot.result
        } else {
            -libc::EIO
        };
        self.free_memory(tag, ring);
        self.commit(tag, element, ring);
    }

    /// Commits the result of a request, and fetches the next one of its tag.
    #[inline]
    fn commit<D: Driver>(&mut self, tag: u16, result: i32, ring: &mut D) {
        let address = match self.config.mode {
            DataMode::Copy => self.buffer(tag, 0).map_or(UNUSED_ADDRESS, |segment| ring.address(segment)),
            DataMode::GetData => UNUSED_ADDRESS,
            _ => 0,
        };
        self.commit_at(tag, result, address, ring);
    }

    #[inline]
    fn commit_at<D: Driver>(&mut self, tag: u16, result: i32, address: u64, ring: &mut D) {
        self.slots[usize::from(tag)].stage = Stage::Fetched;
        if self.config.batch {
            let element = self.element(tag, result, address);
            return self.batch.iter_mut().for_each(|(batch, _)| batch.add(element, ring));
        }
        self.command(tag, self.codes.commit, result, address, ring);
        if self.withdrawn {
            ring.withdraw(self.token(tag));
        }
    }

    #[inline]
    fn free_memory<D: Driver>(&mut self, tag: u16, ring: &mut D) {
        let slot = &mut self.slots[usize::from(tag)];
        if slot.memory.len > 0 {
            ring.free(std::mem::replace(&mut slot.memory, Segment::EMPTY));
        }
        if slot.has_tuples {
            self.free_tuples(tag, ring);
        }
    }

    /// Handles a tag that the driver has aborted.
    #[cold]
    fn taken_back<D: Driver>(&mut self, tag: u16, ring: &mut D) {
        self.free_memory(tag, ring);
        self.slots[usize::from(tag)].stage = Stage::Out;
        self.live -= 1;
        self.config.shared.tags.store(self.live, Relaxed);
    }

    #[cold]
    fn refused(&self, errno: i32) {
        let _ = self.config.shared.refused.compare_exchange(0, errno, Relaxed, Relaxed);
    }
}
