//! The ublk export: tags of a kernel block device's queue, served as requests on one reactor thread.
//!
//! The driver has a table of descriptors, one for each tag of each queue, and ends our command for a tag when a
//! request has come under it. The tag of the driver is the tag of our queue. When the request is done, one command
//! tells the driver so and waits for the next. All commands of a turn go to the kernel with whatever the stack asked
//! for, in one call.
//!
//! *Invariant:* of each tag exactly one of the driver, the stack and this front has something to do: its [`Stage`]
//! says who. So a command's end needs no more name than its tag.
//! *Invariant:* memory that was named to the driver stays until the driver has answered the command that named it.
//!
//! Not here: making devices and their life ([`::ublk`] and the engine), and which nodes a stack has.

mod driver;
mod mode;
mod modelled;
mod request;
#[cfg(test)]
mod tests;

use crate::fronts::{Front as FrontOfTurn, FrontNumber, Turn};
use ::ublk::{AutoBufReg, Descriptors, IoCommand, IoFlags, IoOp, IoResult, user_copy_offset};
use block::{Bytes, Data, Flags, Op, Request, Segment, Status, Tag};
pub use driver::{Driver, KernelBuffers, LaneMemory};
pub use mode::{Choice, Circumstances, DataMode, NotPossible, UnknownMode};
pub use modelled::ModelRing;
use queue::{Done, FileId, FileOp, Owner, QueueId, Queues};
use request::{Bounds, request_of, result_of};
use ring::{Event, KERNEL_BUFFER_SHIFT, Token};
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, AtomicU32, AtomicU64, Ordering::Relaxed};

/// An address for a read that failed: the driver wants one, and copies nothing.
const NOWHERE: u64 = 4096;

/// Whose turn it is with a tag.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Stage {
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
    /// Ours: a read is done, and the ring has no room to hand over its data.
    Full,
    /// The driver's: the data of a read goes to the request's memory, or that is unregistered.
    Emptying,
}

/// A tag of the driver's.
#[derive(Clone, Copy, Debug)]
struct Slot {
    stage: Stage,
    /// The request's memory was registered by command.
    registered: bool,
    /// What the driver is to be told, while that waits for [`Stage::Emptying`].
    result: i32,
    /// What was asked for; without meaning while nothing is.
    req: Request,
    /// Memory that was allocated for it; empty when there is none.
    memory: Segment,
}

impl Slot {
    const NEW: Slot = Slot {
        stage: Stage::Out,
        registered: false,
        result: 0,
        req: Request::flush(),
        memory: Segment::EMPTY,
    };
}

/// What others may know and change of a lane.
#[derive(Debug, Default)]
pub struct LaneShared {
    /// The device's size in bytes: nothing beyond it is let in.
    pub size: AtomicU64,
    /// Tags that the driver has not taken back.
    pub tags: AtomicU32,
    /// The first errno, positive, with which the driver refused a command; 0: it refused none.
    pub refused: AtomicI32,
}

/// A queue of a ublk device, or a part of one, that is to be served.
#[derive(Debug)]
pub struct LaneConfig {
    /// The hardware queue behind it. Its first `depth` tags are left to us.
    pub queue: QueueId,
    /// The character device, a file of this thread's ring.
    pub file: FileId,
    /// The descriptors of the queue.
    pub descriptors: Descriptors,
    /// Which queue of the device.
    pub q_id: u16,
    /// The driver's number for our first tag: 0, unless several threads share the queue.
    pub first_tag: u16,
    /// How many tags.
    pub depth: u16,
    /// The way of data.
    pub mode: DataMode,
    /// A read may be answered by memory of the stack's own.
    pub lends: bool,
    /// The most that a request moves; a multiple of the page size.
    pub io_max: Bytes,
    /// The driver knows ioctl-encoded commands.
    pub encoded: bool,
    /// What others see of it.
    pub shared: Arc<LaneShared>,
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

struct Lane {
    config: LaneConfig,
    codes: Codes,
    /// A buffer, or a place for its request's memory, for each tag, one behind the other. `None`: memory is taken when
    /// there is a request for it.
    memory: Option<LaneMemory>,
    slots: Box<[Slot]>,
    /// Tags that are not [`Stage::Out`].
    live: u32,
}

/// Why a queue cannot be served.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum OpenLaneError {
    /// No address space for its buffers.
    #[error(
        "no address space for the buffers of its tags (raise `ulimit -v`, or give a smaller depth or request)"
    )]
    Memory,
    /// The ring has no table of buffers, or no room in it.
    #[error("the kernel has no room to register the buffers of its tags (choose the data mode copy)")]
    KernelBuffers,
}

/// The ublk queues of one reactor.
#[derive(Default)]
pub struct Front {
    /// By the number of the hardware queue.
    lanes: Vec<Option<Lane>>,
    /// Tags that wait for memory or room.
    waiting: VecDeque<(QueueId, u16)>,
}

impl Front {
    /// Serve a queue: fetch its tags.
    ///
    /// # Errors
    /// Nothing was begun then.
    pub fn open_lane<D: Driver>(&mut self, config: LaneConfig, ring: &mut D) -> Result<(), OpenLaneError> {
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
        let index = usize::from(config.queue.0);
        if self.lanes.len() <= index {
            self.lanes.resize_with(index + 1, || None);
        }
        let mut lane = Lane {
            codes: Codes::new(config.encoded),
            memory,
            slots: vec![Slot::NEW; config.depth.into()].into(),
            live: config.depth.into(),
            config,
        };
        lane.config.shared.tags.store(lane.live, Relaxed);
        for tag in 0..lane.config.depth {
            lane.fetch(tag, ring);
        }
        self.lanes[index] = Some(lane);
        Ok(())
    }

    /// A command, or a copy, for one of our tags has ended.
    #[inline]
    pub fn ended<D: Driver>(&mut self, token: Token, result: i64, ring: &mut D, queues: &mut Queues<D>) {
        let queue = QueueId(token.index);
        let Some(lane) = self.lanes.get_mut(usize::from(token.index)).and_then(Option::as_mut) else {
            return;
        };
        let tag = token.number as u16;
        let Some(slot) = lane.slots.get(usize::from(tag)) else { return };
        match slot.stage {
            Stage::Fetched => match IoResult::from_result(result as i32) {
                told @ (IoResult::Request | IoResult::NeedGetData) => {
                    lane.arrived(tag, told == IoResult::NeedGetData, ring, queues, &mut self.waiting);
                }
                IoResult::Abort => lane.taken_back(tag, ring),
                IoResult::Refused(errno) => {
                    lane.refused(errno);
                    lane.taken_back(tag, ring);
                }
            },
            Stage::Filling => lane.filled(tag, result, ring, queues),
            Stage::Emptying => lane.emptied(tag, result, ring),
            // The driver answers each command once.
            Stage::Out | Stage::Starved | Stage::InStack | Stage::Full => {
                debug_assert!(false, "{queue:?} tag {tag}: an end in {:?}", slot.stage);
            }
        }
    }

    /// A request that we submitted is over.
    #[inline]
    pub fn request_done<D: Driver>(
        &mut self,
        queue: QueueId,
        done: Done,
        ring: &mut D,
        queues: &mut Queues<D>,
    ) {
        let Some(lane) = self.lanes.get_mut(usize::from(queue.0)).and_then(Option::as_mut) else { return };
        let req = queues.get_mut(queue).request(done.tag);
        lane.done(done.tag.0, req, done.status, ring, &mut self.waiting);
    }

    /// Take up what waited for memory or room.
    pub fn take_up<D: Driver>(&mut self, ring: &mut D, queues: &mut Queues<D>) {
        for _ in 0..self.waiting.len() {
            let Some((queue, tag)) = self.waiting.pop_front() else { return };
            let Some(lane) = self.lanes.get_mut(usize::from(queue.0)).and_then(Option::as_mut) else {
                continue;
            };
            match lane.slots[usize::from(tag)].stage {
                Stage::Starved => lane.provide(tag, ring, queues, &mut self.waiting),
                _ => {
                    let req = *queues.get_mut(queue).request(Tag(tag));
                    lane.hand_over(tag, &req, ring, &mut self.waiting);
                }
            }
        }
    }

    /// Whether something waits for memory or room.
    pub fn has_waiting(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// Whether the driver has not taken back all tags of the device behind this queue.
    pub fn has_tags(&self, queue: QueueId) -> bool {
        let lane = self.lanes.get(usize::from(queue.0)).and_then(Option::as_ref);
        lane.is_some_and(|lane| lane.live > 0)
    }

    /// Have the driver give back the tags for which it has no request, as if we had died: the device fails or holds
    /// back what is asked for from then on.
    pub fn withdraw<D: Driver>(&mut self, queue: QueueId, ring: &mut D) {
        let Some(lane) = self.lanes.get_mut(usize::from(queue.0)).and_then(Option::as_mut) else { return };
        for (tag, slot) in lane.slots.iter().enumerate() {
            if slot.stage == Stage::Fetched {
                ring.withdraw(lane.token(tag as u16));
            }
        }
    }

    /// Forget a queue of which the driver has taken back all tags. The file is given back.
    pub fn close<D: Driver>(&mut self, queue: QueueId, ring: &mut D) -> Option<FileId> {
        let lane = self.lanes.get_mut(usize::from(queue.0))?.take()?;
        debug_assert!(lane.live == 0, "{queue:?} is closed while the driver has {} tags", lane.live);
        if let Some(memory) = lane.memory {
            ring.unreserve(memory);
        }
        Some(lane.config.file)
    }
}

impl Lane {
    fn token(&self, tag: u16) -> Token {
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
        waiting: &mut VecDeque<(QueueId, u16)>,
    ) {
        self.free_memory(tag, ring);
        let descriptor = self.config.descriptors.read(self.config.first_tag + tag);
        let bounds =
            Bounds { size: Bytes(self.config.shared.size.load(Relaxed)), io_max: self.config.io_max };
        let slot = &mut self.slots[usize::from(tag)];
        slot.registered = false;
        slot.result = 0;
        match request_of(&descriptor, bounds) {
            Ok(req) => slot.req = req,
            Err(status) if wants_buffer => {
                // The driver takes no answer before it has named its buffer and got the data there.
                slot.req = Request::new(Op::Write, Bytes::ZERO, bounds.io_max);
                slot.result = -status.errno();
            }
            Err(status) => {
                slot.req = Request::flush();
                return self.commit(tag, -status.errno(), ring);
            }
        }
        let unregistered = self.config.mode == DataMode::ZeroCopy
            || self.config.mode == DataMode::AutoZeroCopy && descriptor.flags().has(IoFlags::NEED_REG_BUF);
        if unregistered && slot.req.op.moves_data() {
            return self.register(tag, ring);
        }
        self.provide(tag, ring, queues, waiting);
    }

    /// Give a request the memory that it needs.
    fn provide<D: Driver>(
        &mut self,
        tag: u16,
        ring: &mut D,
        queues: &mut Queues<D>,
        waiting: &mut VecDeque<(QueueId, u16)>,
    ) {
        let slot = &mut self.slots[usize::from(tag)];
        let len = slot.req.len.0 as u32;
        if !slot.req.op.moves_data() {
            return self.submit(tag, Data::NONE, ring, queues);
        }
        match self.memory {
            Some(LaneMemory::Buffers(_)) => {
                let data = self.buffer(tag, len).map_or(Data::NONE, Data::One);
                self.submit(tag, data, ring, queues)
            }
            Some(LaneMemory::Kernel(_)) => self.submit(tag, self.kernel_buffer(tag, len), ring, queues),
            None if slot.req.op == Op::Read && self.config.lends => {
                slot.req.flags = slot.req.flags.with(Flags::MAY_LEND);
                self.submit(tag, Data::NONE, ring, queues)
            }
            None => {
                if slot.memory.len == 0 {
                    slot.memory = ring.allocate(len).unwrap_or(Segment::EMPTY);
                }
                let memory = slot.memory;
                if memory.len == 0 || slot.req.op == Op::Write && !self.fill(tag, memory, ring) {
                    self.slots[usize::from(tag)].stage = Stage::Starved;
                    return waiting.push_back((self.config.queue, tag));
                }
                if self.slots[usize::from(tag)].req.op == Op::Read {
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
        let len = slot.req.len.0;
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
            DataMode::UserCopy if result == len as i64 => {
                let data = Data::One(slot.memory);
                self.submit(tag, data, ring, queues);
            }
            DataMode::ZeroCopy | DataMode::AutoZeroCopy if result == 0 => {
                slot.registered = true;
                self.submit(tag, self.kernel_buffer(tag, len as u32), ring, queues);
            }
            _ => {
                self.free_memory(tag, ring);
                let errno = i32::try_from(-result).ok().filter(|&errno| errno > 0).unwrap_or(libc::EIO);
                self.commit(tag, -errno, ring);
            }
        }
    }

    #[inline]
    fn submit<D: Driver>(&mut self, tag: u16, data: Data, ring: &mut D, queues: &mut Queues<D>) {
        let slot = &mut self.slots[usize::from(tag)];
        slot.stage = Stage::InStack;
        let req = Request { data, ..slot.req };
        let owner = Owner::new(FrontNumber::Ublk as u8, tag.into());
        queues.touch(self.config.queue).submit(Tag(tag), owner, req, ring);
    }

    /// The stack is done with a request.
    #[inline]
    fn done<D: Driver>(
        &mut self,
        tag: u16,
        req: &Request,
        status: Status,
        ring: &mut D,
        waiting: &mut VecDeque<(QueueId, u16)>,
    ) {
        let slot = &mut self.slots[usize::from(tag)];
        let result = result_of(status, &slot.req);
        if slot.registered {
            slot.result = result;
            slot.stage = Stage::Emptying;
            let Some(LaneMemory::Kernel(buffers)) = self.memory else { return };
            return self.command(tag, self.codes.unregister, 0, (buffers.first + tag).into(), ring);
        }
        match self.config.mode {
            DataMode::UserCopy if req.op == Op::Read && status.is_ok() => {
                slot.result = result;
                self.hand_over(tag, req, ring, waiting);
            }
            DataMode::UserCopy => {
                self.free_memory(tag, ring);
                self.commit(tag, result, ring);
            }
            DataMode::GetData if req.op == Op::Read => {
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
    fn hand_over<D: Driver>(
        &mut self,
        tag: u16,
        req: &Request,
        ring: &mut D,
        waiting: &mut VecDeque<(QueueId, u16)>,
    ) {
        let Data::One(memory) = req.data else { return self.commit(tag, -libc::EIO, ring) };
        let memory = Segment { len: req.len.0 as u32, ..memory };
        let offset = user_copy_offset(self.config.q_id, self.config.first_tag + tag, 0);
        let op = FileOp::Write { offset, durable: false };
        let started = ring.copy(self.token(tag), self.config.file, op, memory).is_ok();
        self.slots[usize::from(tag)].stage = if started { Stage::Emptying } else { Stage::Full };
        if !started {
            waiting.push_back((self.config.queue, tag));
        }
    }

    /// A read's data is where it belongs, or a request's memory is no longer ours.
    fn emptied<D: Driver>(&mut self, tag: u16, result: i64, ring: &mut D) {
        let slot = &mut self.slots[usize::from(tag)];
        let told = if slot.registered {
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
        self.command(tag, self.codes.commit, result, address, ring);
    }

    #[inline]
    fn free_memory<D: Driver>(&mut self, tag: u16, ring: &mut D) {
        let slot = &mut self.slots[usize::from(tag)];
        if slot.memory.len > 0 {
            ring.free(std::mem::replace(&mut slot.memory, Segment::EMPTY));
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

impl FrontOfTurn for Front {
    #[inline]
    fn event(&mut self, event: Event, turn: &mut Turn<'_>) {
        if let Event::Ended { token, result } = event {
            self.ended(token, result, turn.ring, turn.queues);
        }
    }

    #[inline]
    fn done(&mut self, queue: QueueId, done: Done, turn: &mut Turn<'_>) {
        self.request_done(queue, done, turn.ring, turn.queues);
    }

    fn commit(&mut self, turn: &mut Turn<'_>) {
        if self.has_waiting() {
            self.take_up(turn.ring, turn.queues);
        }
    }

    fn is_dirty(&self) -> bool {
        self.has_waiting()
    }

    /// It is the driver that takes tags back, once the device is stopped. When that does not come about, they are
    /// withdrawn.
    fn close_lane(&mut self, queue: QueueId, now: bool, turn: &mut Turn<'_>) {
        if now {
            self.withdraw(queue, turn.ring);
        }
    }

    fn is_open(&self, queue: QueueId) -> bool {
        self.has_tags(queue)
    }

    fn drop_lane(&mut self, queue: QueueId, turn: &mut Turn<'_>) {
        if let Some(file) = self.close(queue, turn.ring) {
            turn.ring.remove_file(file);
        }
    }
}
