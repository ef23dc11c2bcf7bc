//! `log-writes <device> <log device>`: everything that is written is logged, in the order in which it became durable.
//!
//! What was written is in the log once a flush that was asked for after its end has ended, a write with FUA at its own
//! end: so the log shows what a power cut at any point may leave, for tools that replay it ([`format`]). The message `mark`
//! puts a name between. Whoever ends a flush or a FUA write carries what is due to the log before it is told, or waits for
//! who does; a mark is written by a [`chore`](super::chore), or goes along with the next request that writes. The kernel's
//! `dm-log-writes-end` at the end of a device is not written: the super block says after each batch how many entries there are.

pub mod format;
mod shared;

use super::chore::Chore;
use super::{Area, Devices, Kind, MessageError, Names, Place, Status, Target, TargetError, stack};
use crate::Layer;
use block::{
    Abilities, Bytes, Cookie, Data, Features, Flags, LimitsError, Op, Profile, Request, Sectors, Segment,
};
use format::{DISCARD, FLUSH, FUA, Head};
use queue::{ChildKind, Cx, Node, NodeId, Ring, Verdict};
use shared::{Entry, Log, Next};
use std::sync::Arc;

/// How soon somebody who waits for the log looks again, in nanoseconds; each time it takes twice as long, so many times.
const LOOK_NS: u64 = 100_000;
const LOOKS_SHIFT_MAX: u32 = 6;
/// How much goes to the log device in one request.
const BATCH: u64 = 256 << 10;

pub(super) fn kind<R: Ring>() -> Kind<R> {
    Kind::new("log-writes", [1, 1, 0], make)
}

/// The shared part. Children: the device, the log device.
#[derive(Debug)]
pub struct LogWrites {
    len: Sectors,
    /// Of the table: entries name sectors of the whole device.
    start: Sectors,
    /// The device does.
    discards: bool,
    log: Arc<Log>,
}

fn make<R: Ring>(
    place: Place,
    words: &[&str],
    devices: &mut dyn Devices,
) -> Result<Arc<dyn Target<R>>, TargetError> {
    let [device, log, ..] = words else { return Err(TargetError::new("Invalid argument count")) };
    let device = devices.open(device).map_err(|why| TargetError::lookup("Device lookup failed", why))?;
    let log = devices.open(log).map_err(|why| TargetError::lookup("Log device lookup failed", why))?;
    LogWrites::new(place, devices.profile(device), devices.profile(log))
        .map(|target| Arc::new(target) as Arc<dyn Target<R>>)
}

impl LogWrites {
    /// Over a device and one for its log.
    ///
    /// # Errors
    /// The log device cannot be written in blocks of the device.
    pub fn new(place: Place, device: &Profile, log: &Profile) -> Result<LogWrites, TargetError> {
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
        let len = super::len_over(self.len, below);
        let mut whole = stack(len, &[self.area()], &below[..1])?;
        let can = below[0].abilities;
        // Zeroes are written as data, so that they are in the log; what cannot be discarded is logged all the same.
        whole.abilities = Abilities { write_zeroes: false, fast_zero: false, discard: true, ..can };
        if can.flush {
            // A flush means something here whatever is below: where nobody sent one, the log would say nothing of an order.
            let fua = if can.fua { Features::FUA } else { Features::NONE };
            whole.limits.features = whole.limits.features.with(Features::WRITE_CACHE).with(fua);
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

    fn spares(&self, _: u16) -> u16 {
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
            slots: Box::default(),
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

    fn chore(&self) -> Option<Arc<dyn Chore>> {
        Some(self.log.clone())
    }

    fn message(&self, words: &[&str], _: &Names) -> Result<Option<String>, MessageError> {
        match words {
            [word, text] if word.eq_ignore_ascii_case("mark") => {
                self.log.mark(text);
                Ok(None)
            }
            _ => Err(MessageError::Invalid),
        }
    }
}

/// What is known of a request.
#[derive(Default)]
struct Slot {
    entry: Option<Entry>,
    /// What ended before this flush was asked for.
    before: Vec<Entry>,
    /// How it ended, while it carries entries to the log or waits for who does.
    ended: Option<block::Status>,
    buffer: Option<Segment>,
    /// It is over when so many entries are in the log.
    due: u64,
    /// What the super block says when what it writes is written; `None`: it writes entries.
    tells: Option<u64>,
    /// How often it looked whether others are done.
    looks: u32,
}

struct LogWritesNode {
    device: NodeId,
    log_device: NodeId,
    /// Of a block, from bytes.
    shift: u32,
    start: Bytes,
    discards: bool,
    log: Arc<Log>,
    /// By tag.
    slots: Box<[Slot]>,
}

impl LogWritesNode {
    fn entry<R: Ring>(&self, req: &Request, cx: &Cx<'_, R>) -> Entry {
        let fua = if req.flags.has(Flags::FUA) { FUA } else { 0 };
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

    /// See to it that the log holds what is due, or wait for who does. The request is held meanwhile.
    fn go_on<R: Ring>(&mut self, io: Cookie, cx: &mut Cx<'_, R>) -> Verdict {
        if self.log.holds(self.slots[io.tag.index()].due) {
            return self.up(io);
        }
        if self.log.claim() { self.carry(io, cx) } else { self.wait(io, cx) }
    }

    /// Write the next of what is due: the claim is ours.
    fn carry<R: Ring>(&mut self, io: Cookie, cx: &mut Cx<'_, R>) -> Verdict {
        let (next, block) = (self.log.next(), 1 << self.shift);
        let len = match next {
            Next::Nothing => return self.up(io),
            Next::Entries(backlog) => backlog.min(BATCH) as u32,
            Next::Super(_) => block,
        };
        let buffer = if cx.spare_children() > 0 { cx.ring.allocate(len) } else { None };
        let Some(buffer) = buffer else {
            self.log.leave();
            return self.wait(io, cx);
        };
        let bytes = cx.ring.bytes_mut(buffer);
        let slot = &mut self.slots[io.tag.index()];
        let at = if let Next::Super(first) = next {
            first.fill(bytes);
            slot.tells = Some(first.entries);
            0
        } else {
            slot.tells = None;
            self.log.fill(bytes)
        };
        slot.buffer = Some(buffer);
        let mut write = Request::new(Op::Write, Bytes(at), Bytes(len.into()));
        write.data = Data::One(buffer);
        let spawned = cx.spawn(io, self.log_device, ChildKind::Copy, write);
        debug_assert!(spawned.is_ok(), "a spare child was seen");
        Verdict::Held
    }

    /// Look again after a while, which grows.
    fn wait<R: Ring>(&mut self, io: Cookie, cx: &mut Cx<'_, R>) -> Verdict {
        let slot = &mut self.slots[io.tag.index()];
        let pause = LOOK_NS << slot.looks.min(LOOKS_SHIFT_MAX);
        slot.looks += 1;
        cx.timer(io, cx.now().after(pause));
        Verdict::Held
    }

    fn up(&mut self, io: Cookie) -> Verdict {
        Verdict::Up(self.slots[io.tag.index()].ended.take().unwrap_or(block::Status::Ok))
    }

    /// It ended below.
    fn ended<R: Ring>(&mut self, io: Cookie, status: block::Status, cx: &mut Cx<'_, R>) -> Verdict {
        let slot = &mut self.slots[io.tag.index()];
        let Some(entry) = slot.entry.take() else { return Verdict::Up(status) };
        let before = std::mem::take(&mut slot.before);
        slot.ended = Some(status);
        if entry.head.flags & (FLUSH | FUA) == 0 {
            self.log.keep(entry);
            // A mark that is on its way need not wait for a flush.
            if !self.log.claim() {
                return self.up(io);
            }
            self.slots[io.tag.index()].due = self.log.entries();
            return self.carry(io, cx);
        }
        self.log.append(before.into_iter().chain([entry]));
        self.slots[io.tag.index()].due = self.log.entries();
        self.go_on(io, cx)
    }
}

impl<R: Ring> Node<R> for LogWritesNode {
    fn attach(&mut self, _: NodeId, tags: usize) {
        self.slots = std::iter::repeat_with(Slot::default).take(tags).collect();
    }

    fn submit(&mut self, io: Cookie, req: &mut Request, cx: &mut Cx<'_, R>) -> Verdict {
        match req.op {
            Op::Write | Op::Discard | Op::Flush if self.log.is_enabled() => {
                let entry = self.entry(req, cx);
                let slot = &mut self.slots[io.tag.index()];
                *slot = Slot { entry: Some(entry), ..Slot::default() };
                if req.op == Op::Flush {
                    slot.before = self.log.take_unflushed();
                }
            }
            Op::WriteZeroes => return Verdict::Up(block::Status::NotSupported),
            op if op.is_special() => return Verdict::Up(block::Status::NotSupported),
            _ => {}
        }
        if req.op == Op::Discard && !self.discards {
            return self.ended(io, block::Status::Ok, cx);
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
        self.ended(io, status, cx)
    }

    fn child_end(
        &mut self,
        io: Cookie,
        _: &mut Request,
        _: &Request,
        status: block::Status,
        cx: &mut Cx<'_, R>,
    ) -> Verdict {
        if let Some(buffer) = self.slots[io.tag.index()].buffer.take() {
            cx.ring.free(buffer);
        }
        let slot = &mut self.slots[io.tag.index()];
        if !status.is_ok() {
            self.log.give_up();
            return self.up(io);
        }
        if let Some(entries) = slot.tells.take() {
            self.log.told(entries);
            if self.log.holds(slot.due) {
                // The rest is for those whose it is: they wait.
                self.log.leave();
                return self.up(io);
            }
        }
        self.carry(io, cx)
    }

    fn reap(&mut self, io: Cookie, _: &mut Request, _: i64, cx: &mut Cx<'_, R>) -> Verdict {
        self.go_on(io, cx)
    }

    /// Children are as old as the request and are asked themselves, and who waits for others has what it asked for done.
    fn cancel(&mut self, _: Cookie, _: &mut Cx<'_, R>) {}
}

#[cfg(test)]
mod tests;
