//! Copies the contents of one stack to another, neither of which is served: `blockyard copy`.
//!
//! One thread with a ring and a queue on each side keeps several chunks in flight: a chunk is read into
//! memory of the ring and written from there. The block status of both sides is asked for window by window:
//! holes are not read, and are zeroed in the target unless it reads as zeroes already.
//!
//! *Invariant:* a checkpoint is reported only when everything before it has been written and then flushed, so
//! a copy that was interrupted may continue there.

mod spans;

use crate::device::DeviceError;
use crate::device::tree::{BuiltNodes, RingResources, Tree};
use crate::spec::StackSpec;
use block::{Bytes, Data, Extent, Op, Request, Segment, Status};
use queue::{Done, Owner, Queue, QueueConfig, QueueId, Ring};
use ring::{Event, KernelRing, RingConfig, Wait};
use spans::{Span, spans};
use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Data bytes of one request.
const CHUNK: u64 = 1 << 20;
/// Requests in flight.
const DEPTH: usize = 16;
/// Bytes that are zeroed with one request.
const ZEROES: u64 = 64 << 20;
/// Bytes whose block status is requested at a time.
const WINDOW: u64 = 1 << 30;
/// Most records of one block status reply.
const RECORDS: usize = 1024;
/// Time between checkpoints.
const CHECKPOINT: Duration = Duration::from_secs(2);

/// How to copy.
#[derive(Clone, Copy, Default, Debug)]
pub struct CopyOptions {
    /// Offset to begin at: everything before it was copied earlier.
    pub from: u64,
    /// Bytes of data per second; `None`: as fast as possible.
    pub rate: Option<u64>,
    /// Compare instead of copying.
    pub verify: bool,
}

/// Progress of a copy.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct CopyProgress {
    /// Size of the source.
    pub size: u64,
    /// Everything before this offset has been written.
    pub done: u64,
    /// Everything before this offset is on stable storage.
    pub checkpoint: u64,
    /// Bytes of data that were read.
    pub data: u64,
    /// Bytes of holes of the source.
    pub holes: u64,
}

/// Why a copy failed.
#[derive(Debug, thiserror::Error)]
pub enum CopyError {
    /// A side cannot be opened.
    #[error("{0}: {1}")]
    Open(String, #[source] Box<DeviceError>),
    /// A table is no stack of its own.
    #[error("{0}: a table cannot be copied (serve it over NBD and copy nbd:URI)")]
    Table(String),
    /// The target is too small.
    #[error(
        "the target's size {target} is less than the source's size {source_size} (resize it, or create it with size=)"
    )]
    Small {
        /// The target's size.
        target: Bytes,
        /// The source's size.
        source_size: Bytes,
    },
    /// The target cannot be written.
    #[error("the target is read-only")]
    ReadOnly,
    /// The source does not end on a block of the target.
    #[error("the source's size {size} is not a multiple of the target's logical block size {block}")]
    Unaligned {
        /// Size of the source.
        size: Bytes,
        /// Logical block size of the target.
        block: Bytes,
    },
    /// A request failed.
    #[error("{what} failed at offset {offset}: {error}")]
    Io {
        /// Reading, writing, …
        what: &'static str,
        /// Offset in bytes.
        offset: u64,
        /// The reason.
        error: io::Error,
    },
    /// The sides differ.
    #[error("source and target differ at offset {0} (copy again)")]
    Differs(u64),
    /// The ring failed.
    #[error("{0}")]
    Ring(#[from] io::Error),
}

/// One side: its queue, on the ring that both share.
struct Side {
    tree: Tree,
    queue: Queue<KernelRing>,
    resources: Option<RingResources>,
}

fn open(stack: &StackSpec) -> Result<Tree, CopyError> {
    if matches!(stack, StackSpec::Table(_)) {
        return Err(CopyError::Table(stack.to_string()));
    }
    Tree::alone(stack).map_err(|error| CopyError::Open(stack.to_string(), Box::new(error)))
}

impl Side {
    fn new(tree: Tree, number: u16, ring: &mut KernelRing) -> Result<Side, DeviceError> {
        let waker = ring.waker();
        let waker: queue::QueueWaker = Arc::new(move || waker.wake());
        let depth = 2 * DEPTH as u16;
        let BuiltNodes { stack, resources, .. } = tree.build_nodes(ring, depth, waker.clone())?;
        let config = QueueConfig { id: QueueId(number), depth, segments_per_tag: 1, timeout_ns: None };
        let mut queue = Queue::new(config, stack)?;
        queue.set_waker(waker);
        Ok(Side { tree, queue, resources: Some(resources) })
    }

    /// Submits a request. There are more tags than slots.
    fn submit(&mut self, owner: u32, req: Request, ring: &mut KernelRing) -> Result<(), CopyError> {
        let tag = self.queue.tag().ok_or_else(|| io::Error::other("all tags are in use"))?;
        self.queue.submit(tag, Owner(owner), req, ring);
        Ok(())
    }
}

/// The operation of a slot in flight.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Step {
    Idle,
    Reading,
    Writing,
    Zeroing,
    /// Reads of both sides are in flight; the number that has not completed.
    Comparing(u8),
}

struct Slot {
    step: Step,
    offset: u64,
    len: u64,
    memory: Segment,
    /// The target's data, for comparing.
    other: Segment,
}

/// The owner of requests for block status and flushes, which belong to no slot.
const CONTROL: u32 = u32::MAX;
/// Which side a request was submitted to.
const SOURCE: usize = 0;
const TARGET: usize = 1;

struct Copier<'a> {
    ring: KernelRing,
    sides: [Side; 2],
    slots: Vec<Slot>,
    options: CopyOptions,
    progress: CopyProgress,
    /// Ranges that are known and have not been started.
    pending: VecDeque<Span>,
    /// End of what `pending` and the slots cover.
    known: u64,
    records: Segment,
    /// The answer to a request that belongs to no slot.
    control: Option<Status>,
    started: Instant,
    checked: Instant,
    /// A flush is in flight, after which everything before this offset is on stable storage.
    flushing: Option<u64>,
    report: &'a mut dyn FnMut(CopyProgress),
}

/// Copies, or compares, the whole source. `report` is called often; it need not be fast.
///
/// # Errors
/// A side cannot be opened, the target does not fit, or a request failed: what was reported as checkpoint is
/// copied.
pub fn copy(
    source: &StackSpec,
    target: &StackSpec,
    options: CopyOptions,
    report: &mut dyn FnMut(CopyProgress),
) -> Result<CopyProgress, CopyError> {
    let source = open(&source.for_reading())?;
    let target = open(&if options.verify { target.for_reading() } else { target.clone() })?;
    let (size, room) = (source.profile().size, target.profile().size);
    if target.profile().read_only && !options.verify {
        return Err(CopyError::ReadOnly);
    }
    if room < size {
        return Err(CopyError::Small { target: room, source_size: size });
    }
    let block = target.profile().limits.logical_block_size;
    if !size.is_aligned(block.0) {
        return Err(CopyError::Unaligned { size, block });
    }
    let config = RingConfig { memory_max: 256 << 20, ..RingConfig::default() };
    let mut ring = KernelRing::new(config)?;
    let side = |tree, number, ring: &mut KernelRing| {
        Side::new(tree, number, ring).map_err(|error| CopyError::Ring(io::Error::other(error)))
    };
    let sides = [side(source, 0, &mut ring)?, side(target, 1, &mut ring)?];
    let out_of_memory = || io::Error::from(io::ErrorKind::OutOfMemory);
    let mut slots = Vec::new();
    for _ in 0..DEPTH {
        let memory = ring.allocate(CHUNK as u32).ok_or_else(out_of_memory)?;
        let other = match options.verify {
            true => ring.allocate(CHUNK as u32).ok_or_else(out_of_memory)?,
            false => Segment::EMPTY,
        };
        slots.push(Slot { step: Step::Idle, offset: 0, len: 0, memory, other });
    }
    let records = ring.allocate((RECORDS * Extent::RECORD_LEN) as u32).ok_or_else(out_of_memory)?;
    let from = options.from.min(size.0);
    let progress = CopyProgress { size: size.0, done: from, checkpoint: from, ..CopyProgress::default() };
    let now = Instant::now();
    let mut copier = Copier {
        ring,
        sides,
        slots,
        options,
        progress,
        pending: VecDeque::new(),
        known: from,
        records,
        control: None,
        started: now,
        checked: now,
        flushing: None,
        report,
    };
    let done = copier.run();
    let settled = copier.settle();
    done.and(settled)?;
    Ok(copier.progress)
}

impl Copier<'_> {
    fn run(&mut self) -> Result<(), CopyError> {
        loop {
            if self.pending.is_empty() && self.known < self.progress.size {
                self.learn()?;
            }
            let wait_until = self.start_slots()?;
            let is_idle = self.slots.iter().all(|slot| slot.step == Step::Idle);
            if is_idle && self.pending.is_empty() && self.known == self.progress.size {
                break;
            }
            match wait_until.filter(|_| is_idle) {
                // The checkpoint is reported as soon as its flush completes; the rate catches up.
                Some(_) if self.flushing.is_some() => self.advance()?,
                Some(time) => std::thread::sleep(time),
                // Ranges without work were skipped, and more are pending.
                None if is_idle => {}
                None => self.advance()?,
            }
            self.check_progress()?;
        }
        if !self.options.verify {
            while self.flushing.is_some() {
                self.advance()?;
            }
            self.flush_now()?;
        }
        self.progress.done = self.progress.size;
        self.progress.checkpoint = self.progress.size;
        (self.report)(self.progress);
        Ok(())
    }

    /// Requests the block status of the next window from both sides.
    fn learn(&mut self) -> Result<(), CopyError> {
        let (offset, len) = (self.known, WINDOW.min(self.progress.size - self.known));
        let source = self.extents(SOURCE, offset, len)?;
        let covered = source.iter().map(|extent| extent.len.0).sum::<u64>().min(len);
        let target = self.extents(TARGET, offset, covered)?;
        self.pending.extend(spans(offset, covered, &source, &target));
        self.known += covered;
        Ok(())
    }

    /// Returns the extents from an offset on, at least one; a side without block status is one of data.
    fn extents(&mut self, side: usize, offset: u64, len: u64) -> Result<Vec<Extent>, CopyError> {
        let all_data = vec![Extent { len: Bytes(len), hole: false, zero: false }];
        if !self.sides[side].tree.profile().sparse && !self.sides[side].tree.is_remote() {
            return Ok(all_data);
        }
        let mut req = Request::new(Op::Extents, Bytes(offset), Bytes(len));
        req.data = Data::One(self.records);
        match self.control(side, req)? {
            Status::Ok => {}
            Status::NotSupported => return Ok(all_data),
            status => return Err(failed("reading the block status", offset, status)),
        }
        let bytes = self.ring.bytes(self.records);
        let records = bytes.chunks(Extent::RECORD_LEN).map_while(Extent::from_record);
        let found: Vec<Extent> = records.collect();
        Ok(if found.is_empty() { all_data } else { found })
    }

    /// Executes a request that belongs to no slot.
    fn control(&mut self, side: usize, req: Request) -> Result<Status, CopyError> {
        while self.flushing.is_some() {
            self.advance()?;
        }
        self.ring.read_clock();
        self.sides[side].submit(CONTROL, req, &mut self.ring)?;
        loop {
            if let Some(status) = self.control.take() {
                return Ok(status);
            }
            self.advance()?;
        }
    }

    /// Starts what idle slots can do; returns how long the rate limit wants to wait.
    fn start_slots(&mut self) -> Result<Option<Duration>, CopyError> {
        for index in 0..self.slots.len() {
            if self.slots[index].step != Step::Idle {
                continue;
            }
            let Some(span) = self.pending.front().copied() else { break };
            if let (Some(rate), false) = (self.options.rate, span.is_hole) {
                let due = Duration::from_secs_f64(self.progress.data as f64 / rate.max(1) as f64);
                if let Some(early) = due.checked_sub(self.started.elapsed()) {
                    return Ok(Some(early.min(Duration::from_secs(1))));
                }
            }
            let most = if span.is_hole && !self.options.verify { ZEROES } else { CHUNK };
            let len = span.len.min(most);
            match span.len == len {
                true => drop(self.pending.pop_front()),
                false => {
                    self.pending[0] = Span { offset: span.offset + len, len: span.len - len, ..span };
                }
            }
            if span.is_hole {
                self.progress.holes += len;
            } else {
                self.progress.data += len;
            }
            self.slots[index].offset = span.offset;
            self.slots[index].len = len;
            self.start(index, span)?;
        }
        Ok(None)
    }

    fn start(&mut self, index: usize, span: Span) -> Result<(), CopyError> {
        let slot = &mut self.slots[index];
        let (offset, len) = (Bytes(slot.offset), Bytes(slot.len));
        let part = |memory: Segment| Data::One(memory.slice(0, len.0 as u32));
        if span.is_hole && span.target_is_zero {
            return Ok(());
        }
        let owner = index as u32;
        if self.options.verify {
            slot.step = Step::Comparing(2);
            let reads = [(SOURCE, part(slot.memory)), (TARGET, part(slot.other))];
            for (side, data) in reads {
                let req = Request { data, ..Request::new(Op::Read, offset, len) };
                self.sides[side].submit(owner, req, &mut self.ring)?;
            }
            return Ok(());
        }
        if span.is_hole {
            slot.step = Step::Zeroing;
            return self.sides[TARGET].submit(
                owner,
                Request::new(Op::WriteZeroes, offset, len),
                &mut self.ring,
            );
        }
        slot.step = Step::Reading;
        let req = Request { data: part(slot.memory), ..Request::new(Op::Read, offset, len) };
        self.sides[SOURCE].submit(owner, req, &mut self.ring)
    }

    /// Waits for an event and processes what has completed.
    fn advance(&mut self) -> Result<(), CopyError> {
        self.ring.read_clock();
        let mut done: Vec<(usize, Done)> = Vec::new();
        for (number, side) in self.sides.iter_mut().enumerate() {
            side.queue.turn(&mut self.ring);
            side.queue.account(self.ring.now());
            let ended: Vec<Done> = side.queue.done().collect();
            for end in ended {
                side.queue.release(end.tag);
                done.push((number, end));
            }
        }
        if done.is_empty() {
            let is_parked = self.sides.iter().any(|side| side.queue.must_turn());
            self.ring.turn(if is_parked { Wait::No } else { Wait::UntilEvent })?;
            self.ring.read_clock();
            while let Some(event) = self.ring.next_event() {
                if let Event::Io { queue, cookie, result } = event {
                    self.sides[usize::from(queue.0)].queue.complete(cookie, result, &mut self.ring);
                } else if let Some((owner, event)) = event.to_node() {
                    let queue = &mut self.sides[usize::from(owner.queue.0)].queue;
                    queue.node_event(owner.node, event, &mut self.ring);
                }
            }
        }
        done.into_iter().try_for_each(|(side, end)| self.ended(side, end))
    }

    fn ended(&mut self, side: usize, end: Done) -> Result<(), CopyError> {
        if end.owner == Owner(CONTROL) {
            match self.flushing.take() {
                Some(offset) if end.status.is_ok() => self.progress.checkpoint = offset,
                Some(offset) => return Err(failed("flushing the target", offset, end.status)),
                None => self.control = Some(end.status),
            }
            return Ok(());
        }
        let index = end.owner.0 as usize;
        let Slot { step, offset, len, memory, other } = self.slots[index];
        let what = match (step, side) {
            (Step::Zeroing, _) => "zeroing the target",
            (Step::Writing, _) => "writing the target",
            (_, TARGET) => "reading the target",
            _ => "reading the source",
        };
        if step == Step::Zeroing && end.status == Status::NotSupported {
            return self.write_zeroes(index);
        }
        if !end.status.is_ok() {
            self.slots[index].step = Step::Idle;
            return Err(failed(what, offset, end.status));
        }
        let part = memory.slice(0, (len as u32).min(memory.len));
        match step {
            Step::Reading => {
                self.slots[index].step = Step::Writing;
                let req =
                    Request { data: Data::One(part), ..Request::new(Op::Write, Bytes(offset), Bytes(len)) };
                self.ring.read_clock();
                self.sides[TARGET].submit(index as u32, req, &mut self.ring)?;
            }
            Step::Comparing(2) => self.slots[index].step = Step::Comparing(1),
            Step::Comparing(_) => {
                self.slots[index].step = Step::Idle;
                let (ours, theirs) = (self.ring.bytes(part), self.ring.bytes(other.slice(0, len as u32)));
                if let Some(at) = ours.iter().zip(theirs).position(|(a, b)| a != b) {
                    return Err(CopyError::Differs(offset + at as u64));
                }
            }
            Step::Writing | Step::Zeroing | Step::Idle => self.slots[index].step = Step::Idle,
        }
        Ok(())
    }

    /// Zeroes a range of a target without a write-zeroes operation: writes one chunk of zeroes, and returns
    /// the rest of the range to the pending ranges.
    fn write_zeroes(&mut self, index: usize) -> Result<(), CopyError> {
        let slot = &mut self.slots[index];
        let len = slot.len.min(CHUNK);
        if len < slot.len {
            let (offset, rest) = (slot.offset + len, slot.len - len);
            self.pending.push_front(Span { offset, len: rest, is_hole: true, target_is_zero: false });
            self.progress.holes -= rest;
        }
        (slot.len, slot.step) = (len, Step::Writing);
        let part = slot.memory.slice(0, len as u32);
        let mut req = Request::new(Op::Write, Bytes(slot.offset), Bytes(len));
        req.data = Data::One(part);
        self.ring.bytes_mut(part).fill(0);
        self.ring.read_clock();
        self.sides[TARGET].submit(index as u32, req, &mut self.ring)
    }

    /// Computes what is done, and starts a flush when a checkpoint is due.
    fn check_progress(&mut self) -> Result<(), CopyError> {
        let busy = self.slots.iter().filter(|slot| slot.step != Step::Idle).map(|slot| slot.offset);
        let pending = self.pending.iter().map(|span| span.offset);
        self.progress.done = busy.chain(pending).min().unwrap_or(self.known);
        let is_due = self.checked.elapsed() >= CHECKPOINT && self.progress.done > self.progress.checkpoint;
        if is_due && self.flushing.is_none() && !self.options.verify {
            self.checked = Instant::now();
            self.flushing = Some(self.progress.done);
            self.ring.read_clock();
            self.sides[TARGET].submit(CONTROL, Request::flush(), &mut self.ring)?;
        }
        (self.report)(self.progress);
        Ok(())
    }

    fn flush_now(&mut self) -> Result<(), CopyError> {
        match self.control(TARGET, Request::flush())? {
            Status::Ok | Status::NotSupported => Ok(()),
            status => Err(failed("flushing the target", self.progress.size, status)),
        }
    }

    /// Waits for requests in flight after an error, so that their memory can be released, and closes both
    /// sides.
    fn settle(&mut self) -> Result<(), CopyError> {
        let is_busy = |copier: &Self| copier.sides.iter().any(|side| side.queue.in_flight() > 0);
        while is_busy(self) {
            if let Err(error @ CopyError::Ring(_)) = self.advance() {
                return Err(error);
            }
        }
        loop {
            let mut closed = true;
            for side in &mut self.sides {
                closed &= side.queue.close(&mut self.ring);
            }
            if closed {
                break;
            }
            let _ = self.advance();
        }
        for side in &mut self.sides {
            if let Some(resources) = side.resources.take() {
                resources.release(&mut self.ring);
            }
        }
        Ok(())
    }
}

fn failed(what: &'static str, offset: u64, status: Status) -> CopyError {
    CopyError::Io { what, offset, error: io::Error::from_raw_os_error(status.errno()) }
}
