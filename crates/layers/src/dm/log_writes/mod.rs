//! The target `log-writes <device> <log device>`: logs all writes in the order in which they became durable.
//!
//! A write is logged with the first flush that was submitted after the write completed; a FUA write when it
//! completes itself. So each position in the log is a state that a power cut may leave, for tools that replay
//! it ([`mod@format`]). The message `mark` adds a named entry. A flush or FUA write first writes the pending
//! entries to the log device, or waits for the request that does, and then completes. A mark is written by
//! [background work](super::background) or with the next request that writes. There is no final
//! `dm-log-writes-end` mark as in the kernel: the super block is updated after each batch.

pub mod format;
mod shared;

use super::background::BackgroundWork;
use super::{
    Area, Devices, MessageError, Names, Simulated, Status, Target, TargetError, TargetRange, TargetRow, stack,
};
use crate::Layer;
use block::{
    Abilities, Bytes, Cookie, Data, Features, Flags, LimitsError, Op, Profile, Request, Sectors, Segment,
};
use format::{DISCARD, FLUSH, FUA, Head};
use queue::{ChildKind, Cx, HeldRequests, Node, NodeId, Ring, Verdict};
use shared::{Entry, Log, Next};
use std::sync::Arc;

/// The first interval at which a request that lacks memory tries again, in nanoseconds; it doubles up to
/// [`RETRIES_SHIFT_MAX`] times.
const RETRY_NS: u64 = 100_000;
const RETRIES_SHIFT_MAX: u32 = 6;
/// Longest write of one request to the log device, in bytes.
const BATCH_BYTES: u64 = 256 << 10;

pub(super) const ROW: TargetRow = TargetRow {
    name: "log-writes",
    version: [1, 1, 0],
    usage: "log-writes <device> <log device>",
    about: "logs all writes, to replay them up to any point",
    example: "0 2097152 log-writes disk.img writes.log",
    singleton: false,
    immutable: false,
    simulated: Simulated::Apart,
};

/// The shared part of the target or layer. Children: the device, the log device.
#[derive(Debug)]
pub struct LogWrites {
    len: Sectors,
    /// The target's start in its table: entries name sectors of the whole table.
    start: Sectors,
    /// Whether the device supports discards.
    discards: bool,
    log: Arc<Log>,
}

pub(super) fn construct<R: Ring>(
    place: TargetRange,
    args: &[&str],
    devices: &mut dyn Devices,
) -> Result<Arc<dyn Target<R>>, TargetError> {
    let [device, log, ..] = args else { return Err(TargetError::new("Invalid argument count")) };
    let device = devices.open(device).map_err(|why| TargetError::lookup("Device lookup failed", why))?;
    let log = devices.open(log).map_err(|why| TargetError::lookup("Log device lookup failed", why))?;
    LogWrites::new(place, devices.profile(device), devices.profile(log))
        .map(|target| Arc::new(target) as Arc<dyn Target<R>>)
}

impl LogWrites {
    /// Creates the target from the profiles of the device and the log device.
    ///
    /// # Errors
    /// The log device has larger logical blocks than the device.
    pub fn new(place: TargetRange, device: &Profile, log: &Profile) -> Result<LogWrites, TargetError> {
        let block = device.limits.logical_block_size;
        if log.limits.logical_block_size > block {
            return Err(TargetError::new("Log device has larger blocks than the device"));
        }
        let log = Arc::new(Log::new(block.0 as u32, log.size.sectors()));
        let discards = device.abilities.discard;
        Ok(LogWrites { len: place.len, start: place.start, discards, log })
    }

    fn area(&self) -> Area {
        Area { device: 0, start: Sectors(0), len: self.len }
    }
}

impl<R: Ring> Layer<R> for LogWrites {
    fn name(&self) -> &'static str {
        "log-writes"
    }

    fn profile(&self, below: &[Profile]) -> Result<Profile, LimitsError> {
        let len = super::len_or_device(self.len, below);
        let mut whole = stack(len, &[self.area()], &below[..1])?;
        let can = below[0].abilities;
        // Zeroes have to arrive as data to be logged; discards are logged even if the device does not support
        // them.
        whole.abilities = Abilities { write_zeroes: false, fast_zero: false, discard: true, ..can };
        if can.flush {
            // Without a write cache below no flush would be sent, and without flushes the log would have no
            // order.
            let fua = if can.fua { Features::FUA } else { Features::empty() };
            whole.limits.features = whole.limits.features.union(Features::WRITE_CACHE).union(fua);
        }
        if !can.discard {
            whole.limits.discard_granularity = whole.limits.logical_block_size;
            whole.limits.max_hw_discard_sectors = Sectors(u64::from(u32::MAX) >> 9);
        }
        whole.limits.max_write_zeroes_sectors = Sectors(0);
        whole.limits.max_hw_wzeroes_unmap_sectors = Sectors(0);
        whole.limits.validate()?;
        (whole.bytewise, whole.opaque) = (false, false);
        Ok(whole)
    }

    fn child_requests(&self, _: u16) -> u16 {
        2
    }

    fn node(&self, _: &Profile, below: &[NodeId]) -> Box<dyn Node<R>> {
        Box::new(LogWritesNode {
            device: below[0],
            log_device: below[1],
            shift: self.log.block().trailing_zeros(),
            start: self.start.bytes(),
            discards: self.discards,
            log: self.log.clone(),
            requests: Box::default(),
            held: HeldRequests::default(),
        })
    }
}

impl<R: Ring> Target<R> for LogWrites {
    fn areas(&self) -> Vec<Area> {
        vec![self.area()]
    }

    fn status(&self, what: Status, names: &Names) -> String {
        match what {
            Status::Info => {
                let (entries, last, enabled) = self.log.status();
                format!("{entries} {last}{}", if enabled { "" } else { " logging_disabled" })
            }
            Status::Table => format!("{} {}", names.shown(0), names.shown(1)),
        }
    }

    fn background_work(&self) -> Option<Arc<dyn BackgroundWork>> {
        Some(self.log.clone())
    }

    fn messages(&self) -> &'static [&'static str] {
        &["mark"]
    }

    fn message(&self, message: &[&str], _: &Names) -> Result<Option<String>, MessageError> {
        match message {
            [command, text] if command.eq_ignore_ascii_case("mark") => {
                self.log.mark(text);
                Ok(None)
            }
            _ => Err(MessageError::Invalid),
        }
    }
}

/// The state of a request, by tag.
#[derive(Default)]
struct RequestState {
    entry: Option<Entry>,
    /// The writes that completed before this flush was submitted.
    unflushed: Vec<Entry>,
    /// The status from the device, while the request writes the log or waits for it.
    ended: Option<block::Status>,
    buffer: Option<Segment>,
    /// The number of entries that the log must contain before the request completes.
    due: u64,
    /// The entry count of the super block that the request is writing; `None`: it is writing entries.
    super_entries: Option<u64>,
    /// Number of attempts to get memory.
    retries: u32,
}

struct LogWritesNode {
    device: NodeId,
    log_device: NodeId,
    /// The block size as a power of two: a shift that converts bytes to blocks.
    shift: u32,
    start: Bytes,
    discards: bool,
    log: Arc<Log>,
    requests: Box<[RequestState]>,
    /// Requests that wait for another request, or background work, to write the log.
    held: HeldRequests,
}

impl LogWritesNode {
    fn entry<R: Ring>(&self, req: &Request, cx: &Cx<'_, R>) -> Entry {
        let fua = if req.flags.contains(Flags::FUA) { FUA } else { 0 };
        let flags = match req.op {
            Op::Flush => FLUSH,
            Op::Discard => DISCARD | fua,
            _ => fua,
        };
        let mut head = Head { sector: 0, sectors: 0, flags, text_len: 0 };
        if req.op != Op::Flush {
            (head.sector, head.sectors) =
                ((req.offset + self.start).0 >> self.shift, req.len.0 >> self.shift);
        }
        let mut data = Vec::new();
        if req.op == Op::Write {
            data.reserve_exact(req.len.0 as usize);
            cx.segments(req.data, req.len.0).for_each(|piece| data.extend_from_slice(cx.ring.bytes(piece)));
        }
        Entry { head, data: data.into() }
    }

    /// Holds the request until the log contains its entries: writes them, or waits for the request that does.
    fn wait_for_log<R: Ring>(&mut self, io: Cookie, cx: &mut Cx<'_, R>) -> Verdict {
        if self.log.holds(self.requests[io.tag.index()].due) {
            return self.complete(io);
        }
        if self.log.claim() { self.write_next(io, cx) } else { self.held.wait(&self.log.waiting, io, cx) }
    }

    /// Writes the next batch of entries or the super block. The caller has the claim to the log.
    fn write_next<R: Ring>(&mut self, io: Cookie, cx: &mut Cx<'_, R>) -> Verdict {
        let (next, block) = (self.log.next(), 1 << self.shift);
        let len = match next {
            Next::Nothing => {
                self.log.waiting.wake(self.held.waiter());
                return self.complete(io);
            }
            Next::Entries(backlog) => backlog.min(BATCH_BYTES) as u32,
            Next::Super(_) => block,
        };
        let buffer = if cx.spare_children() > 0 { cx.ring.allocate(len) } else { None };
        let Some(buffer) = buffer else {
            self.log.release();
            self.log.waiting.wake(self.held.waiter());
            return self.retry_later(io, cx);
        };
        let bytes = cx.ring.bytes_mut(buffer);
        let request = &mut self.requests[io.tag.index()];
        let at = if let Next::Super(first) = next {
            first.fill(bytes);
            request.super_entries = Some(first.entries);
            0
        } else {
            request.super_entries = None;
            self.log.fill(bytes)
        };
        request.buffer = Some(buffer);
        let mut write = Request::new(Op::Write, Bytes(at), Bytes(len.into()));
        write.data = Data::One(buffer);
        let spawned = cx.spawn(io, self.log_device, ChildKind::Copy, write);
        debug_assert!(spawned.is_ok(), "the spare children were counted");
        Verdict::Held
    }

    /// Tries again later, at growing intervals: nothing reports that memory is free again.
    fn retry_later<R: Ring>(&mut self, io: Cookie, cx: &mut Cx<'_, R>) -> Verdict {
        let request = &mut self.requests[io.tag.index()];
        let pause = RETRY_NS << request.retries.min(RETRIES_SHIFT_MAX);
        request.retries += 1;
        cx.timer(io, cx.now().after(pause));
        Verdict::Held
    }

    fn complete(&mut self, io: Cookie) -> Verdict {
        Verdict::Up(self.requests[io.tag.index()].ended.take().unwrap_or(block::Status::Ok))
    }

    /// Logs a request that the device has completed.
    fn completed_below<R: Ring>(&mut self, io: Cookie, status: block::Status, cx: &mut Cx<'_, R>) -> Verdict {
        let request = &mut self.requests[io.tag.index()];
        let Some(entry) = request.entry.take() else { return Verdict::Up(status) };
        let before = std::mem::take(&mut request.unflushed);
        request.ended = Some(status);
        if entry.head.flags & (FLUSH | FUA) == 0 {
            self.log.add_unflushed(entry);
            // A pending mark need not wait for a flush.
            if !self.log.claim() {
                return self.complete(io);
            }
            self.requests[io.tag.index()].due = self.log.entries();
            return self.write_next(io, cx);
        }
        self.log.append(before.into_iter().chain([entry]));
        self.requests[io.tag.index()].due = self.log.entries();
        self.wait_for_log(io, cx)
    }
}

impl<R: Ring> Node<R> for LogWritesNode {
    fn attach(&mut self, _: NodeId, tags: usize) {
        self.requests = std::iter::repeat_with(RequestState::default).take(tags).collect();
        self.held.reserve(tags);
    }

    fn submit(&mut self, io: Cookie, req: &mut Request, cx: &mut Cx<'_, R>) -> Verdict {
        match req.op {
            Op::Write | Op::Discard | Op::Flush if self.log.is_enabled() => {
                let entry = self.entry(req, cx);
                let request = &mut self.requests[io.tag.index()];
                *request = RequestState { entry: Some(entry), ..RequestState::default() };
                if req.op == Op::Flush {
                    request.unflushed = self.log.take_unflushed();
                }
            }
            Op::WriteZeroes => return Verdict::Up(block::Status::NotSupported),
            op if op.is_special() => return Verdict::Up(block::Status::NotSupported),
            _ => {}
        }
        if req.op == Op::Discard && !self.discards {
            return self.completed_below(io, block::Status::Ok, cx);
        }
        Verdict::Down(self.device)
    }

    fn end_io(
        &mut self,
        io: Cookie,
        req: &mut Request,
        status: block::Status,
        cx: &mut Cx<'_, R>,
    ) -> Verdict {
        if !(req.op.is_write() || req.op == Op::Flush) {
            return Verdict::Up(status);
        }
        self.completed_below(io, status, cx)
    }

    fn child_end(
        &mut self,
        io: Cookie,
        _: &mut Request,
        _: &Request,
        status: block::Status,
        cx: &mut Cx<'_, R>,
    ) -> Verdict {
        if let Some(buffer) = self.requests[io.tag.index()].buffer.take() {
            cx.ring.free(buffer);
        }
        let request = &mut self.requests[io.tag.index()];
        if !status.is_ok() {
            self.log.disable();
            self.log.waiting.wake(self.held.waiter());
            return self.complete(io);
        }
        if let Some(entries) = request.super_entries.take() {
            self.log.super_written(entries);
            if self.log.holds(request.due) {
                // The requests that wait for the remaining entries write them.
                self.log.release();
                self.log.waiting.wake(self.held.waiter());
                return self.complete(io);
            }
        }
        self.write_next(io, cx)
    }

    fn reap(&mut self, io: Cookie, _: &mut Request, _: i64, cx: &mut Cx<'_, R>) -> Verdict {
        self.wait_for_log(io, cx)
    }

    /// Does nothing: child requests have the request's age, so the queue cancels them itself; a request that
    /// only waits for the log has completed on the device already.
    fn cancel(&mut self, _: Cookie, _: &mut Cx<'_, R>) {}

    fn commit(&mut self, cx: &mut Cx<'_, R>) {
        self.held.resume_woken(cx);
    }
}

#[cfg(test)]
mod tests;
