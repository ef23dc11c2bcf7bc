//! One queue of a ublk device, or the part of one that this thread serves: the life of its tags.

use super::batch::{Batch, Outcome, Told};
use super::driver::{Driver, LaneMemory};
use super::mode::DataMode;
use super::request::{Asked, Bounds, asked_of, result_of};
use super::tuples::Tuples;
use super::{ClientMemory, LaneConfig, OpenLaneError};
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

/// Tags that wait for memory or for room in the ring.
pub(super) type Waiting = VecDeque<(QueueId, u16)>;

/// An address for a read that failed: the driver wants one, and copies nothing.
const NOWHERE: u64 = 4096;

/// Whose turn it is with a tag.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Stage {
    /// Nobody's: the tag was not fetched yet, or the driver took it back.
    Out,
    /// The driver's: our command ends when there is a request.
    Fetched,
    /// Ours: there is a request, and no memory for it yet, or no room in the ring to fill that.
    Starved,
    /// The driver's: the data of a write comes to our memory, or a request's memory is registered.
    Filling,
    /// The stack's.
    InStack,
    /// Ours: the stack, or the driver, is done with the data, and the integrity data goes to the stack next.
    Between,
    /// Ours: a read is done, and the ring has no room to hand over its data.
    Full,
    /// The driver's: the data of a read goes to the request's memory, or that is unregistered.
    Emptying,
}

/// A tag of the driver's.
#[derive(Clone, Copy, Debug)]
pub(super) struct Slot {
    pub(super) stage: Stage,
    /// The request's memory was registered by command.
    registered: bool,
    /// The data is in memory that the client shares.
    in_client_memory: bool,
    /// There is integrity data to be carried beside the data.
    pub(super) has_tuples: bool,
    /// What the driver is to be told, while that waits for [`Stage::Emptying`].
    pub(super) result: i32,
    /// What was asked for; without meaning while nothing is.
    pub(super) asked: Asked,
    /// Memory that was allocated for it; empty when there is none.
    pub(super) memory: Segment,
}

impl Slot {
    const NEW: Slot = Slot {
        stage: Stage::Out,
        registered: false,
        in_client_memory: false,
        has_tuples: false,
        result: 0,
        asked: Asked::NOTHING,
        memory: Segment::EMPTY,
    };
}

/// The numbers of commands, as this driver knows them.
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

/// A lane.
pub(super) struct Lane {
    pub(super) config: LaneConfig,
    codes: Codes,
    /// A buffer, or a place for its request's memory, for each tag, one behind the other. `None`: memory is taken when
    /// there is a request for it.
    memory: Option<LaneMemory>,
    pub(super) slots: Box<[Slot]>,
    /// Integrity data, where there is any.
    pub(super) tuples: Option<Tuples>,
    /// Tags that are not [`Stage::Out`].
    live: u32,
    /// Every command that the driver gets from here on is asked back at once.
    withdrawn: bool,
    /// Commands for many tags at once, and the memory that they name. `None`: each tag has its own.
    batch: Option<(Batch, LaneMemory)>,
    /// Its front knows that there is something to tell.
    pub(super) is_listed: bool,
}

impl Lane {
    /// Fetch all tags.
    pub(super) fn open<D: Driver>(config: LaneConfig, ring: &mut D) -> Result<Lane, OpenLaneError> {
        let memory = match config.mode {
            DataMode::Copy => {
                let len = config.io_max.0 * u64::from(config.depth);
                Some(ring.reserve(len).ok_or(OpenLaneError::Memory)?)
            }
            DataMode::ZeroCopy | DataMode::AutoZeroCopy => {
                let buffers = ring.reserve_kernel_buffers(config.depth);
                Some(buffers.ok_or(OpenLaneError::KernelBuffers)?)
            }
            DataMode::GetData | DataMode::UserCopy => None,
        };
        let mut lane = Lane {
            codes: Codes::new(config.encoded),
            memory,
            slots: vec![Slot::NEW; config.depth.into()].into(),
            tuples: config.integrity.map(|shape| Tuples::new(shape, config.depth)),
            live: config.depth.into(),
            withdrawn: false,
            batch: None,
            is_listed: false,
            config,
        };
        lane.config.shared.tags.store(lane.live, Relaxed);
        if lane.config.batch {
            if let Err(error) = lane.fetch_all(ring) {
                lane.live = 0;
                // What came with the configuration stays the caller's, as where its own memory cannot be had.
                lane.config.client_memory = None;
                lane.close(ring);
                return Err(error);
            }
            return Ok(lane);
        }
        for tag in 0..lane.config.depth {
            lane.fetch(tag, ring);
        }
        Ok(lane)
    }

    /// The same as fetching each tag, with one command.
    fn fetch_all<D: Driver>(&mut self, ring: &mut D) -> Result<(), OpenLaneError> {
        let flags = match self.config.mode {
            DataMode::Copy => BatchFlags::HAS_BUF_ADDR,
            DataMode::AutoZeroCopy => BatchFlags::AUTO_BUF_REG_FALLBACK,
            _ => BatchFlags::default(),
        };
        let len = Batch::memory_len(self.config.depth, flags);
        let Some(memory) = ring.reserve(len) else { return Err(OpenLaneError::Memory) };
        let LaneMemory::Buffers(all) = memory else { return Err(OpenLaneError::Memory) };
        let all = Segment { len: len as u32, ..all };
        self.slots.iter_mut().for_each(|slot| slot.stage = Stage::Fetched);
        let told: Vec<Told> = (0..self.config.depth)
            .map(|tag| {
                let address = self.buffer(tag, 0).map_or(0, |segment| ring.address(segment));
                self.told(tag, 0, address)
            })
            .collect();
        let (file, q_id) = (self.config.file, self.config.q_id);
        let batch = Batch::open(file, q_id, self.token(0), flags, all, told.into_iter(), ring);
        self.batch = Some((batch, memory));
        Ok(())
    }

    fn told(&self, tag: u16, result: i32, address: u64) -> Told {
        let buffer = match self.memory {
            Some(LaneMemory::Kernel(buffers)) => buffers.first + tag,
            _ => 0,
        };
        Told { tag: self.config.first_tag + tag, buffer, result, address }
    }

    /// Whether the end of the turn has something to tell the driver.
    #[inline]
    pub(super) fn can_tell(&self) -> bool {
        self.config.batch && self.can_tell_batch()
    }

    #[inline(never)]
    fn can_tell_batch(&self) -> bool {
        self.batch.as_ref().is_some_and(|(batch, _)| batch.can_tell())
    }

    /// The end of the turn.
    pub(super) fn flush<D: Driver>(&mut self, ring: &mut D) {
        if let Some((batch, _)) = &mut self.batch {
            batch.flush(ring);
        }
    }

    /// A command for many tags has ended.
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

    /// The same for any command for many tags.
    #[inline(never)]
    pub(super) fn batch_ended<D: Driver>(&mut self, number: u32, result: i64, ring: &mut D) {
        let Some((batch, _)) = &mut self.batch else { return };
        let outcome = batch.ended(number, result, ring);
        let is_over = !batch.is_fetching() && !batch.is_telling();
        if outcome != Outcome::Fine {
            self.batch_refused(outcome, ring);
        }
        if is_over {
            // Whatever the driver has, it does not come back with a request any more.
            for tag in 0..self.config.depth {
                if self.slots[usize::from(tag)].stage == Stage::Fetched {
                    self.taken_back(tag, ring);
                }
            }
        }
    }

    /// Tags that the driver has not taken back.
    pub(super) fn live(&self) -> u32 {
        self.live
    }

    /// No tag has a request.
    pub(super) fn is_idle(&self) -> bool {
        !self.batch.as_ref().is_some_and(|(batch, _)| batch.is_telling())
            && self.slots.iter().all(|slot| matches!(slot.stage, Stage::Out | Stage::Fetched))
    }

    /// Give back what it had of the ring, but for the file, which is returned.
    pub(super) fn close<D: Driver>(self, ring: &mut D) -> FileId {
        debug_assert!(self.live == 0, "{:?} is closed while {} tags are out", self.config.queue, self.live);
        if let Some(memory) = self.memory {
            ring.unreserve(memory);
        }
        if let Some((_, memory)) = self.batch {
            ring.unreserve(memory);
        }
        if let Some(ClientMemory { region, .. }) = self.config.client_memory {
            ring.unreserve(LaneMemory::Buffers(Segment { region, ..Segment::EMPTY }));
        }
        self.config.file
    }

    /// Ask for the tags back: now those for which there is no request, the others when theirs is done.
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

    /// A command, or a copy, for a tag has ended.
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
                told @ (IoResult::Request | IoResult::NeedGetData) => {
                    self.arrived(tag, told == IoResult::NeedGetData, ring, queues, waiting);
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
            // The driver answers each command once.
            Stage::Out | Stage::Starved | Stage::InStack | Stage::Between | Stage::Full => {
                debug_assert!(false, "{:?} tag {tag}: an end in {:?}", self.config.queue, slot.stage);
            }
        }
    }

    /// A tag that waits may have what it waits for.
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

    /// A command about a tag. `value`: what its last field says.
    #[inline]
    fn command<D: Driver>(&self, tag: u16, op: u32, result: i32, value: u64, ring: &mut D) {
        let command =
            IoCommand { q_id: self.config.q_id, tag: self.config.first_tag + tag, result, addr: value };
        let address = match self.memory {
            Some(LaneMemory::Kernel(buffers)) if self.config.mode == DataMode::AutoZeroCopy => {
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

    /// The buffer of a tag, where each has its own.
    #[inline]
    fn buffer(&self, tag: u16, len: u32) -> Option<Segment> {
        match self.memory {
            Some(LaneMemory::Buffers(all)) => Some(Segment {
                offset: all.offset + u64::from(tag) * self.config.io_max.0,
                len,
                region: all.region,
            }),
            _ => None,
        }
    }

    /// The driver has a request for us.
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
        match asked_of(&descriptor, bounds) {
            Ok(asked) => slot.asked = asked,
            Err(status) if wants_buffer => {
                // The driver takes no answer before it has named its buffer and got the data there.
                slot.asked = Asked::of(Request::new(Op::Write, Bytes::ZERO, bounds.io_max));
                slot.result = -status.errno();
            }
            Err(status) => {
                slot.asked = Asked::NOTHING;
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

    /// The same for one whose data is where its client and we both have it.
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
            slot.asked = Asked::NOTHING;
            return self.commit(tag, -libc::EIO, ring);
        };
        slot.in_client_memory = true;
        let count = &self.config.shared.in_client_memory;
        count.store(count.load(Relaxed) + 1, Relaxed);
        self.submit(tag, Data::One(Segment { offset, len, region: memory.region }), ring, queues);
    }

    /// Whether reads may be answered by memory of the stack's own, from now on.
    pub(super) fn lend(&mut self, lends: bool) {
        self.config.lends = lends;
    }

    /// Give a request the memory that it needs.
    fn provide<D: Driver>(&mut self, tag: u16, ring: &mut D, queues: &mut Queues<D>, waiting: &mut Waiting) {
        if self.slots[usize::from(tag)].has_tuples && !self.provide_tuples(tag, ring) {
            self.slots[usize::from(tag)].stage = Stage::Starved;
            return waiting.push_back((self.config.queue, tag));
        }
        let slot = &mut self.slots[usize::from(tag)];
        let Asked { req, data_len: len } = slot.asked;
        match self.memory {
            _ if len == 0 => self.submit(tag, Data::NONE, ring, queues),
            Some(LaneMemory::Buffers(_)) => {
                let data = self.buffer(tag, len).map_or(Data::NONE, Data::One);
                self.submit(tag, data, ring, queues)
            }
            Some(LaneMemory::Kernel(_)) => self.submit(tag, self.kernel_buffer(tag, len), ring, queues),
            None if req.op == Op::Read && self.config.lends => {
                slot.asked.req.flags = req.flags.with(Flags::MAY_LEND);
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

    /// Have the data of a write brought. `false`: the ring has no room.
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
            Some(LaneMemory::Kernel(buffers)) => {
                let offset = buffers.base + (u64::from(tag) << KERNEL_BUFFER_SHIFT);
                Data::One(Segment { offset, len, region: buffers.region })
            }
            _ => Data::NONE,
        }
    }

    fn register<D: Driver>(&mut self, tag: u16, ring: &mut D) {
        let Some(LaneMemory::Kernel(buffers)) = self.memory else { return };
        self.slots[usize::from(tag)].stage = Stage::Filling;
        self.command(tag, self.codes.register, 0, (buffers.first + tag).into(), ring);
    }

    /// What was begun to give a request its memory is over.
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

    /// What was begun to give a request its memory has failed, or fell short.
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

    /// The stack is done with a request, which is as it left it.
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
            let Some(LaneMemory::Kernel(buffers)) = self.memory else { return };
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
                // The one mode of zoned devices.
                let place = if appended { req.offset.sectors().0 } else { 0 };
                self.commit_at(tag, result, place, ring);
            }
            DataMode::GetData if takes_data => {
                let address = match req.data {
                    Data::One(segment) if status.is_ok() && segment.len > 0 => ring.address(segment),
                    _ => NOWHERE,
                };
                self.commit_at(tag, result, address, ring);
            }
            _ => self.commit(tag, result, ring),
        }
    }

    /// Copy what was read to where the kernel wants it.
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

    /// A read's data is where it belongs, or a request's memory is no longer ours.
    fn emptied<D: Driver>(&mut self, tag: u16, result: i64, ring: &mut D, waiting: &mut Waiting) {
        let slot = &mut self.slots[usize::from(tag)];
        let told = if slot.has_tuples {
            match self.emptied_with_tuples(tag, result, waiting) {
                Some(told) => told,
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
        self.commit(tag, told, ring);
    }

    /// Tell the driver how a request ended, and wait for the next under its tag.
    #[inline]
    fn commit<D: Driver>(&mut self, tag: u16, result: i32, ring: &mut D) {
        let address = match self.config.mode {
            DataMode::Copy => self.buffer(tag, 0).map_or(NOWHERE, |segment| ring.address(segment)),
            DataMode::GetData => NOWHERE,
            _ => 0,
        };
        self.commit_at(tag, result, address, ring);
    }

    #[inline]
    fn commit_at<D: Driver>(&mut self, tag: u16, result: i32, address: u64, ring: &mut D) {
        self.slots[usize::from(tag)].stage = Stage::Fetched;
        if self.config.batch {
            let told = self.told(tag, result, address);
            return self.batch.iter_mut().for_each(|(batch, _)| batch.add(told, ring));
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

    /// The driver wants nothing more of us under this tag.
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
