//! The target of a device whose content migrates to another device while the device is in use.
//!
//! Devices: 0 is the source, 1 the destination, both as long as the target. A region is *copied* or not.
//! Reads go to the source. Writes, discards and zeroes go to the source, and in copied regions to the
//! destination afterwards. [Background work](super::background) copies the other regions, one at a time.
//!
//! The status of a request is the source's, and a request completes only after the source has completed it.
//! An error of the destination ends the migration, and fails no request. Flushes go to the source; the
//! destination is flushed as a whole before a device uses it alone.
//!
//! A region's cell counts its writes in flight, or says that the region is being copied. The two exclude each
//! other, so the state of a region does not become *copied* while a write to it is in flight.
//!
//! *Invariant:* the source has every acknowledged write, at any time.
//! *Invariant:* source and destination are equal in a copied region without writes in flight: writes that
//! overlap are sent one after the other.

use super::background::{BackgroundWork, Disks};
use super::{Area, Names, Status, Target, stack};
use crate::Layer;
use block::{Bytes, Cookie, Data, Fact, Flags, LimitsError, Op, Profile, Request, Sectors, Status as End};
use queue::{Cx, HeldRequests, Nanos, Node, NodeId, Ring, Verdict, WaitList, Waiter};
use std::io;
use std::ops::Range;
use std::sync::atomic::Ordering::{AcqRel, Relaxed, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

/// Length of a region.
pub const REGION: Bytes = Bytes(1 << 20);
/// The cell of a region that is being copied.
const COPYING: u32 = 1 << 31;
/// Number of locks, and of tables of writes in flight; region n uses table n modulo this number.
const STRIPES: usize = 64;
/// Length of the units, in bytes, that are compared with zeroes, so that holes of the source stay holes.
const GRAIN: usize = 64 << 10;

const SOURCE: usize = 0;
const DESTINATION: usize = 1;

/// The state that all queues share with the thread that copies.
#[derive(Debug)]
pub struct Migration {
    len: Sectors,
    /// The destination, for `show`.
    to: String,
    /// Bytes to copy a second; 0: as fast as possible.
    rate: u64,
    cells: Box<[AtomicU32]>,
    /// The byte ranges of writes in flight. Both devices receive overlapping writes in the same order.
    flights: Box<[Mutex<Vec<Range<u64>>>]>,
    copied: Box<[AtomicBool]>,
    copied_count: AtomicU64,
    /// The region at which the search for the next region to copy continues.
    cursor: AtomicU64,
    /// The earliest time of the next copy, on the rings' clock, in nanoseconds.
    due_ns: AtomicU64,
    suspended: AtomicBool,
    /// The reason why the migration cannot be completed.
    failure: OnceLock<String>,
    /// Queues with writes that wait for a region, or for another write.
    waiting: WaitList,
    /// Held while a region is copied.
    background_lock: Mutex<()>,
}

impl Migration {
    /// Creates the state for devices of this length. `to`: the destination's description. `rate`: bytes to
    /// copy a second; `None`: as fast as possible.
    pub fn new(len: Sectors, to: String, rate: Option<u64>) -> Arc<Migration> {
        let regions = len.bytes().0.div_ceil(REGION.0);
        Arc::new(Migration {
            len,
            to,
            rate: rate.unwrap_or(0),
            cells: (0..regions).map(|_| AtomicU32::new(0)).collect(),
            flights: (0..STRIPES).map(|_| Mutex::default()).collect(),
            copied: (0..regions).map(|_| AtomicBool::new(false)).collect(),
            copied_count: AtomicU64::new(0),
            cursor: AtomicU64::new(0),
            due_ns: AtomicU64::new(0),
            suspended: AtomicBool::new(true),
            failure: OnceLock::new(),
            waiting: WaitList::default(),
            background_lock: Mutex::new(()),
        })
    }

    /// Creates the target for the device that is served.
    pub fn target<R: Ring>(self: &Arc<Migration>) -> Arc<dyn Target<R>> {
        Arc::new(MigrationTarget(self.clone()))
    }

    /// Returns the number of bytes that are equal on both devices, and of all bytes.
    pub fn progress(&self) -> (Bytes, Bytes) {
        let all = self.len.bytes().0;
        (Bytes((self.copied_count.load(SeqCst) * REGION.0).min(all)), Bytes(all))
    }

    /// Returns whether both devices are equal, except for writes in flight.
    pub fn is_complete(&self) -> bool {
        self.failure.get().is_none() && self.copied_count.load(SeqCst) == self.cells.len() as u64
    }

    /// Returns the reason why the migration cannot be completed, if it failed.
    pub fn failure(&self) -> Option<&str> {
        self.failure.get().map(String::as_str)
    }

    fn fail(&self, why: String) {
        // Only the first reason is kept.
        let _ = self.failure.set(why);
    }

    fn region_of(&self, offset: Bytes) -> usize {
        (offset.0 / REGION.0) as usize
    }

    fn flights(&self, region: usize) -> MutexGuard<'_, Vec<Range<u64>>> {
        self.flights[region % STRIPES].lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Registers a write. `false`: its region is being copied, or another write to a part of it is in flight.
    fn begin_write(&self, region: usize, range: &Range<u64>) -> bool {
        let cell = &self.cells[region];
        if cell.fetch_update(SeqCst, Relaxed, |count| (count & COPYING == 0).then_some(count + 1)).is_err() {
            return false;
        }
        let mut flights = self.flights(region);
        if flights.iter().any(|other| other.start < range.end && range.start < other.end) {
            cell.fetch_sub(1, SeqCst);
            return false;
        }
        flights.push(range.clone());
        true
    }

    /// Ends a write. `own`: the waiter of the calling queue, which resumes its own requests.
    fn end_write(&self, region: usize, range: &Range<u64>, own: Option<&Waiter>) {
        let mut flights = self.flights(region);
        if let Some(at) = flights.iter().position(|other| other == range) {
            flights.swap_remove(at);
        }
        drop(flights);
        self.cells[region].fetch_sub(1, SeqCst);
        self.waiting.wake(own);
    }

    /// Marks a region to be copied again. The caller has a write in flight there.
    fn copy_again(&self, region: usize) {
        if self.copied[region].swap(false, SeqCst) {
            self.copied_count.fetch_sub(1, SeqCst);
            self.cursor.fetch_min(region as u64, AcqRel);
        }
    }

    /// Claims the next region to copy. Returns `None` if no region is left, or all that are left have writes
    /// in flight.
    fn claim(&self) -> Option<usize> {
        let start = self.cursor.swap(self.cells.len() as u64, AcqRel) as usize;
        let mut first_left = None;
        let mut claimed = None;
        for region in start..self.cells.len() {
            if self.copied[region].load(SeqCst) {
                continue;
            }
            if self.cells[region].compare_exchange(0, COPYING, SeqCst, Relaxed).is_ok() {
                claimed = Some(region);
                break;
            }
            first_left.get_or_insert(region);
        }
        let next = first_left.or(claimed.map(|region| region + 1)).unwrap_or(self.cells.len());
        self.cursor.fetch_min(next as u64, AcqRel);
        claimed
    }

    fn copy(&self, region: usize, disks: &mut dyn Disks) -> Result<u64, String> {
        let start = region as u64 * REGION.0;
        let len = REGION.0.min(self.len.bytes().0 - start);
        let mut data = vec![0; len as usize];
        let at = |what: &str, error: io::Error| format!("{what} at offset {start} failed: {error}");
        disks.read(SOURCE, Bytes(start), &mut data).map_err(|error| at("reading the source", error))?;
        let mut theirs = vec![0; GRAIN.min(data.len())];
        // Neighbouring grains with data are written at once.
        let mut pending = 0..0;
        for (number, grain) in data.chunks(GRAIN).enumerate() {
            let from = number * GRAIN;
            let is_needed = grain.iter().any(|byte| *byte != 0) || {
                let theirs = &mut theirs[..grain.len()];
                let read = disks.read(DESTINATION, Bytes(start + from as u64), theirs);
                read.map_err(|error| at("reading the destination", error))?;
                theirs.iter().any(|byte| *byte != 0)
            };
            if is_needed {
                pending = if pending.is_empty() {
                    from..from + grain.len()
                } else {
                    pending.start..from + grain.len()
                };
            }
            if !pending.is_empty() && (!is_needed || from + grain.len() == data.len()) {
                let written =
                    disks.write(DESTINATION, Bytes(start + pending.start as u64), &data[pending.clone()]);
                written.map_err(|error| at("writing the destination", error))?;
                pending = 0..0;
            }
        }
        Ok(len)
    }

    fn set_suspended(&self, suspended: bool) {
        self.suspended.store(suspended, SeqCst);
        // A copy in progress ends before the next composition uses the devices.
        drop(self.background_lock.lock().unwrap_or_else(PoisonError::into_inner));
    }
}

impl BackgroundWork for Migration {
    fn is_due(&self, now: Nanos) -> bool {
        !self.suspended.load(SeqCst)
            && self.failure.get().is_none()
            && self.copied_count.load(SeqCst) < self.cells.len() as u64
            && now.0 >= self.due_ns.load(Relaxed)
    }

    fn step(&self, now: Nanos, disks: &mut dyn Disks) {
        let _busy = self.background_lock.lock().unwrap_or_else(PoisonError::into_inner);
        if !self.is_due(now) {
            return;
        }
        let Some(region) = self.claim() else {
            // Every region that is not copied yet has a write in flight.
            std::thread::yield_now();
            return;
        };
        match self.copy(region, disks) {
            Ok(len) => {
                if let Some(pause) = (len * 1_000_000_000).checked_div(self.rate) {
                    let due = self.due_ns.load(Relaxed).max(now.0);
                    self.due_ns.store(due + pause, Relaxed);
                }
                self.copied[region].store(true, SeqCst);
                self.copied_count.fetch_add(1, SeqCst);
            }
            Err(why) => self.fail(why),
        }
        self.cells[region].fetch_and(!COPYING, SeqCst);
        self.waiting.wake(None);
    }
}

struct MigrationTarget(Arc<Migration>);

impl<R: Ring> Layer<R> for MigrationTarget {
    fn profile(&self, below: &[Profile]) -> Result<Profile, LimitsError> {
        let mut whole = stack(self.0.len, &Target::<R>::areas(self), below)?;
        // The destination is written from the same buffer, so it must not change meanwhile.
        (whole.zero_copy_reads, whole.bytewise) = (false, false);
        Ok(whole)
    }

    fn accesses_data(&self) -> bool {
        false
    }

    fn describe(&self) -> Vec<Fact> {
        let (done, all) = self.0.progress();
        let text = match self.0.failure() {
            Some(why) => format!("to {} given up: {why}", self.0.to),
            None => format!("{} of {} bytes to {}", done.0, all.0, self.0.to),
        };
        vec![("moving", text)]
    }

    fn node(&self, _: &Profile, below: &[NodeId]) -> Box<dyn Node<R>> {
        Box::new(MigrationNode {
            migration: self.0.clone(),
            below: [below[SOURCE], below[DESTINATION]],
            requests: Box::default(),
            held: HeldRequests::default(),
        })
    }
}

impl<R: Ring> Target<R> for MigrationTarget {
    fn areas(&self) -> Vec<Area> {
        [SOURCE, DESTINATION].map(|device| Area { device, start: Sectors(0), len: self.0.len }).into()
    }

    fn max_io_len(&self) -> Option<Sectors> {
        Some(REGION.sectors())
    }

    fn status(&self, what: Status, names: &Names) -> String {
        let (done, all) = self.0.progress();
        match what {
            Status::Info => format!("{}/{}", done.sectors().0, all.sectors().0),
            Status::Table => format!("{} {}", names.shown(SOURCE), names.shown(DESTINATION)),
        }
    }

    fn presuspend(&self, _: bool) {
        self.0.set_suspended(true);
    }

    fn resume(&self) {
        self.0.set_suspended(false);
    }

    fn background_work(&self) -> Option<Arc<dyn BackgroundWork>> {
        Some(self.0.clone())
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Phase {
    /// The request, a read or a flush, is sent to the source only.
    Alone,
    /// A write waits for its region.
    Wait,
    /// A write is in flight at the source.
    Source,
    /// A write is in flight at the destination.
    Destination,
}

#[derive(Clone, Copy)]
struct RequestState {
    phase: Phase,
    offset: Bytes,
    data: Data,
    flags: Flags,
}

struct MigrationNode {
    migration: Arc<Migration>,
    below: [NodeId; 2],
    requests: Box<[RequestState]>,
    /// Writes that wait for a region.
    held: HeldRequests,
}

impl MigrationNode {
    fn write<R: Ring>(&mut self, io: Cookie, req: &Request, cx: &mut Cx<'_, R>) -> Verdict {
        let region = self.migration.region_of(req.offset);
        if self.migration.begin_write(region, &(req.offset.0..req.end().0)) {
            self.requests[io.tag.index()].phase = Phase::Source;
            return Verdict::Down(self.below[SOURCE]);
        }
        if req.flags.contains(Flags::NOWAIT) {
            return Verdict::Up(End::Again);
        }
        self.requests[io.tag.index()].phase = Phase::Wait;
        self.held.wait(&self.migration.waiting, io, cx)
    }
}

impl MigrationNode {
    fn end_write(&mut self, req: &Request) {
        let region = self.migration.region_of(req.offset);
        self.migration.end_write(region, &(req.offset.0..req.end().0), self.held.waiter());
        self.held.resume_all();
    }
}

impl<R: Ring> Node<R> for MigrationNode {
    fn attach(&mut self, _: NodeId, tags: usize) {
        let idle = RequestState {
            phase: Phase::Alone,
            offset: Bytes::ZERO,
            data: Data::NONE,
            flags: Flags::empty(),
        };
        self.requests = vec![idle; tags].into();
        self.held.reserve(tags);
    }

    fn submit(&mut self, io: Cookie, req: &mut Request, cx: &mut Cx<'_, R>) -> Verdict {
        let (offset, data, flags) = (req.offset, req.data, req.flags);
        self.requests[io.tag.index()] = RequestState { phase: Phase::Alone, offset, data, flags };
        match req.op {
            Op::Read | Op::Prefetch | Op::Extents | Op::Flush => Verdict::Down(self.below[SOURCE]),
            Op::Write | Op::WriteZeroes | Op::Discard => self.write(io, req, cx),
            _ => Verdict::Up(End::NotSupported),
        }
    }

    fn end_io(&mut self, io: Cookie, req: &mut Request, status: End, _: &mut Cx<'_, R>) -> Verdict {
        let RequestState { phase, offset, data, flags } = self.requests[io.tag.index()];
        // Layers below may have changed these fields.
        (req.offset, req.data, req.flags) = (offset, data, flags);
        let region = self.migration.region_of(offset);
        match phase {
            Phase::Alone | Phase::Wait => Verdict::Up(status),
            Phase::Source => {
                let is_copied = self.migration.copied[region].load(SeqCst);
                if is_copied && status.is_ok() && self.migration.failure.get().is_none() {
                    self.requests[io.tag.index()].phase = Phase::Destination;
                    req.flags = flags.difference(Flags::FUA | Flags::NOWAIT);
                    return Verdict::Down(self.below[DESTINATION]);
                }
                if !status.is_ok() {
                    // The source may have a part of the write.
                    self.migration.copy_again(region);
                }
                self.end_write(req);
                Verdict::Up(status)
            }
            Phase::Destination => {
                match status {
                    End::Ok => {}
                    // The region is copied again: as data where zeroes or discards are not supported.
                    End::NotSupported | End::Requeue | End::Again | End::Resource | End::DeviceResource => {
                        self.migration.copy_again(region);
                    }
                    _ => {
                        let error = io::Error::from_raw_os_error(status.errno());
                        self.migration
                            .fail(format!("writing the destination at offset {offset} failed: {error}"));
                    }
                }
                self.end_write(req);
                Verdict::Up(End::Ok)
            }
        }
    }

    fn reap(&mut self, io: Cookie, req: &mut Request, result: i64, cx: &mut Cx<'_, R>) -> Verdict {
        if result < 0 {
            // The request was cancelled while it waited for its region: it has not been sent.
            return Verdict::Up(End::from_result(result, 0));
        }
        self.write(io, req, cx)
    }

    fn commit(&mut self, cx: &mut Cx<'_, R>) {
        self.held.resume_woken(cx);
    }

    fn cancel(&mut self, io: Cookie, cx: &mut Cx<'_, R>) {
        self.held.cancel(io, cx);
    }
}
