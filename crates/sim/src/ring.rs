//! A ring without a kernel: operations take virtual time, complete in random order, and fail as planned.
//!
//! The driving loop passes the results of [`SimRing::reap`] to [`Queue::complete`](queue::Queue::complete)
//! and advances the clock with [`SimRing::advance`]. An operation takes effect between its start and its
//! completion, possibly in two steps, so memory and disk are accessed late: releasing either too early is
//! detected by the arena, or yields wrong data.

mod fate;

use crate::arena::Arena;
use crate::net::Net;
use crate::{Disk, Faults, Rng, Tracer};
use block::{Cookie, Segment};
use fate::{Fate, total, whole_sectors};
use queue::{Blocking, FileId, FileOp, IoId, Nanos, QueueId, Ring, RingFull};
use std::collections::BTreeMap;

/// Largest number of operations in flight; beyond it the ring is full regardless of the plan.
const OPERATIONS_MAX: usize = 192;
/// Due time of an operation that completes only when it is cancelled.
const NEVER: Nanos = Nanos(u64::MAX);

#[derive(Clone, Debug)]
struct FileWork {
    file: FileId,
    op: FileOp,
    data: Vec<Segment>,
    /// Number of bytes that have taken effect.
    progress: u64,
    /// The sequence number of the disk up to which a sync is effective.
    sync_point: u64,
    fate: Fate,
}

#[derive(Clone, Debug)]
struct Pending {
    id: IoId,
    due: Nanos,
    /// The file operation; `None`: a timer.
    work: Option<FileWork>,
    cancelled: bool,
}

/// The simulated ring.
#[derive(Debug)]
pub struct SimRing {
    pub(crate) now: Nanos,
    pub(crate) rng: Rng,
    faults: Faults,
    /// Faults of single disks, in place of the general ones.
    disk_faults: BTreeMap<u32, Faults>,
    pub(crate) arena: Arena,
    pub(crate) net: Net,
    disks: Vec<Disk>,
    pending: Vec<Pending>,
    pub(crate) tracer: Tracer,
}

impl SimRing {
    /// Creates a ring that takes all random choices from `rng`.
    pub fn new(rng: Rng, faults: Faults, tracer: Tracer) -> SimRing {
        SimRing {
            now: Nanos(1),
            rng,
            faults,
            disk_faults: BTreeMap::new(),
            arena: Arena::default(),
            net: Net::default(),
            disks: Vec::new(),
            pending: Vec::new(),
            tracer,
        }
    }

    /// Adds a disk.
    pub fn add_disk(&mut self, disk: Disk) -> FileId {
        self.disks.push(disk);
        FileId(self.disks.len() as u32 - 1)
    }

    /// Returns a disk for reconfiguration. No operation may be in flight on it.
    pub fn disk_mut(&mut self, file: FileId) -> &mut Disk {
        &mut self.disks[file.0 as usize]
    }

    /// Returns a disk for inspection.
    pub fn disk(&self, file: FileId) -> &Disk {
        &self.disks[file.0 as usize]
    }

    /// Returns whether any disk may have dropped data since the last power cut.
    pub fn has_failed_disk(&self) -> bool {
        self.disks.iter().any(Disk::has_failed)
    }

    /// Sets the faults from now on.
    pub fn set_faults(&mut self, faults: Faults) {
        self.faults = faults;
    }

    /// Sets the faults of one disk from now on; `None`: the general ones. Only faults of file operations
    /// apply to a disk.
    pub fn set_disk_faults(&mut self, file: FileId, faults: Option<Faults>) {
        match faults {
            Some(faults) => self.disk_faults.insert(file.0, faults),
            None => self.disk_faults.remove(&file.0),
        };
    }

    fn faults_of(&self, file: FileId) -> Faults {
        self.disk_faults.get(&file.0).copied().unwrap_or(self.faults)
    }

    /// Returns the number of operations and timers in flight.
    pub fn pending(&self) -> usize {
        self.pending.len()
    }

    /// Returns the number of allocations that were not freed.
    pub fn memory_in_use(&self) -> usize {
        self.arena.live()
    }

    /// Completes a random one of the operations that are due; returns the arguments for
    /// [`Queue::complete`](queue::Queue::complete) of that queue.
    pub fn reap(&mut self) -> Option<(QueueId, Cookie, i64)> {
        let ready = self.pending.iter().filter(|pending| pending.due <= self.now).count() as u64;
        if ready == 0 {
            return None;
        }
        let choice = self.rng.below(ready) as usize;
        let due = self.pending.iter().enumerate().filter(|(_, pending)| pending.due <= self.now);
        let index = due.map(|(index, _)| index).nth(choice)?;
        let mut pending = self.pending.swap_remove(index);
        let result = match &mut pending.work {
            _ if pending.cancelled => -i64::from(libc::ECANCELED),
            Some(work) => self.finish(work),
            None => 0,
        };
        self.unpin(&pending);
        let IoId { queue, cookie } = pending.id;
        let args =
            [("queue", u64::from(queue.0)), ("tag", u64::from(cookie.tag.0)), ("result", result as u64)];
        self.tracer.note(self.now, "reap", &args);
        Some((queue, cookie, result))
    }

    /// Advances the clock to the time at which the next operation is due. Returns `false` if no operation is
    /// pending.
    pub fn advance(&mut self) -> bool {
        let next = self.pending.iter().map(|pending| pending.due).min().unwrap_or(NEVER);
        if next < NEVER {
            self.now = self.now.max(next);
        }
        next < NEVER
    }

    /// Advances the clock as [`advance`](SimRing::advance) does, but by `nanos` nanoseconds at most, for
    /// callers that act while requests wait for a distant timer.
    pub fn advance_within(&mut self, nanos: u64) {
        let latest = self.now.after(nanos);
        if self.pending.iter().all(|pending| pending.due > latest) {
            self.now = latest;
        } else {
            self.advance();
        }
    }

    /// Advances the clock by `nanos` nanoseconds.
    pub fn pass(&mut self, nanos: u64) {
        self.now = self.now.after(nanos);
    }

    /// Cuts the power: operations in flight reach the disks in part, unsynced writes survive at random,
    /// memory and timers are lost. Earlier queues and nodes must not be used again.
    pub fn power_cut(&mut self) {
        self.abandon();
        self.disks.iter_mut().for_each(|disk| disk.power_cut(&mut self.rng));
        self.tracer.note(self.now, "power-cut", &[]);
    }

    /// Kills the process: operations in flight reach the disks in part, memory and timers are lost. Written
    /// data stays, synced or not. Earlier queues and nodes must not be used again.
    pub fn kill(&mut self) {
        self.abandon();
        self.tracer.note(self.now, "kill", &[]);
    }

    fn abandon(&mut self) {
        for mut pending in std::mem::take(&mut self.pending) {
            if let Some(work) = &mut pending.work
                && !pending.cancelled
                && self.rng.chance(700)
            {
                let reached = self.rng.below(total(&work.data) + 1);
                let reached = whole_sectors(work.op, reached);
                self.move_data(work, reached);
            }
        }
        self.arena.clear();
    }

    fn latency(&mut self) -> u64 {
        if self.rng.chance(self.faults.slow) {
            self.rng.between(1_000_000, 500_000_000)
        } else {
            self.rng.between(1_000, 200_000)
        }
    }

    /// Lets a data operation take effect up to `until` bytes; returns how far it got.
    fn move_data(&mut self, work: &mut FileWork, until: u64) -> u64 {
        let (offset, write) = match work.op {
            FileOp::Read { offset } => (offset, false),
            FileOp::Write { offset, .. } => (offset, true),
            _ => return 0,
        };
        let disk = &mut self.disks[work.file.0 as usize];
        let (mut at, mut skip, mut left) =
            (work.progress, work.progress, until.saturating_sub(work.progress));
        // The data is gathered first, so that each sector is written once, whatever the number of segments.
        let mut gathered = Vec::new();
        for &segment in &work.data {
            let from = skip.min(u64::from(segment.len));
            let len = left.min(u64::from(segment.len) - from);
            (skip, left) = (skip - from, left - len);
            let part = segment.slice(from as u32, len as u32);
            if write {
                gathered.extend_from_slice(self.arena.bytes(part));
                continue;
            }
            let got = disk.read(offset + at, self.arena.bytes_mut(part)) as u64;
            at += got;
            if got < len {
                break;
            }
        }
        if write {
            disk.write(offset + at, &gathered, false);
            at += gathered.len() as u64;
        }
        work.progress = at;
        work.progress
    }

    /// Lets an operation take effect, entirely or as far as its fate allows; returns its result.
    fn finish(&mut self, work: &mut FileWork) -> i64 {
        let index = work.file.0 as usize;
        match (work.fate, work.op) {
            (Fate::Fails { errno, reached }, op) => {
                let reached = self.move_data(work, reached);
                let disk = &mut self.disks[index];
                match op {
                    FileOp::Sync if errno == libc::EIO => disk.fail_sync(work.sync_point, &mut self.rng),
                    FileOp::Write { offset, durable: true } if reached > 0 => {
                        disk.fail_durable(offset, reached, &mut self.rng);
                    }
                    _ => {}
                }
                -i64::from(errno)
            }
            (Fate::Moves(len), FileOp::Read { .. }) => self.move_data(work, len) as i64,
            (Fate::Moves(len), FileOp::Write { offset, durable }) => {
                let moved = self.move_data(work, len);
                if durable {
                    self.disks[index].make_stable(offset, moved);
                }
                moved as i64
            }
            (_, FileOp::Sync) => {
                self.disks[index].sync(work.sync_point);
                0
            }
            (_, FileOp::Allocate { mode, offset, len }) => {
                let disk = &mut self.disks[index];
                match mode & !libc::FALLOC_FL_KEEP_SIZE {
                    libc::FALLOC_FL_PUNCH_HOLE => disk.punch(offset, len),
                    libc::FALLOC_FL_ZERO_RANGE => disk.zero(offset, len),
                    _ => disk.allocate(offset, len),
                }
                0
            }
            (_, FileOp::Seek { offset, hole }) => {
                let found = self.disks[index].seek(offset, hole);
                found.map_or(-i64::from(libc::ENXIO), |at| at as i64)
            }
            (_, FileOp::Prefetch { .. }) => 0,
        }
    }

    fn work(&mut self, file: FileId, op: FileOp, data: &[Segment]) -> FileWork {
        let sync_point = self.disks[file.0 as usize].sync_point();
        let fate = self.fate(file, op, data);
        FileWork { file, op, data: data.to_vec(), progress: 0, sync_point, fate }
    }

    fn unpin(&mut self, pending: &Pending) {
        let segments = pending.work.iter().flat_map(|work| &work.data);
        segments.for_each(|&segment| self.arena.pin(segment, false));
    }

    fn note(&self, what: &'static str, op: FileOp, len: u64, result: i64) {
        let (name, offset) = match op {
            FileOp::Read { offset } => (0, offset),
            FileOp::Write { offset, durable } => (1 + u64::from(durable), offset),
            FileOp::Sync => (3, 0),
            FileOp::Allocate { offset, .. } => (4, offset),
            FileOp::Seek { offset, .. } => (5, offset),
            FileOp::Prefetch { offset, .. } => (6, offset),
        };
        let args = [("fileop", name), ("offset", offset), ("len", len), ("result", result as u64)];
        self.tracer.note(self.now, what, &args);
    }
}

impl Ring for SimRing {
    fn now(&self) -> Nanos {
        self.now
    }

    fn allocate(&mut self, len: u32) -> Option<Segment> {
        if self.rng.chance(self.faults.no_memory) {
            return None;
        }
        Some(self.arena.allocate(len, &mut self.rng))
    }

    fn free(&mut self, segment: Segment) {
        self.arena.free(segment);
    }

    fn bytes(&self, segment: Segment) -> &[u8] {
        self.arena.bytes(segment)
    }

    fn bytes_mut(&mut self, segment: Segment) -> &mut [u8] {
        self.arena.bytes_mut(segment)
    }

    fn try_now(&mut self, file: FileId, op: FileOp, data: &[Segment], blocking: Blocking) -> Option<i64> {
        let seek = matches!(op, FileOp::Seek { .. });
        let moves = matches!(op, FileOp::Read { .. } | FileOp::Write { .. });
        let refused = blocking == Blocking::Never && !moves || self.rng.chance(self.faults.not_now);
        if refused && !seek {
            self.note("not-now", op, total(data), 0);
            return None;
        }
        let mut work = self.work(file, op, data);
        let result = self.finish(&mut work);
        self.note("now", op, total(data), result);
        Some(result)
    }

    fn start(&mut self, id: IoId, file: FileId, op: FileOp, data: &[Segment]) -> Result<(), RingFull> {
        assert!(!matches!(op, FileOp::Seek { .. }), "a seek can only be done at once");
        assert!(self.pending.iter().all(|pending| pending.id != id), "{id:?} is already in flight");
        // Timers do not count: a node that waits for space with a timer would otherwise block itself.
        let under_way = self.pending.iter().filter(|pending| pending.work.is_some()).count();
        if under_way >= OPERATIONS_MAX || self.rng.chance(self.faults.ring_full) {
            self.note("ring-full", op, total(data), 0);
            return Err(RingFull);
        }
        let mut work = self.work(file, op, data);
        if self.rng.chance(self.faults_of(file).again) {
            work.fate = Fate::Fails { errno: libc::EAGAIN, reached: 0 };
        }
        data.iter().for_each(|&segment| self.arena.pin(segment, true));
        if self.rng.chance(300)
            && let Fate::Moves(len) = work.fate
            && len > 0
        {
            let early = whole_sectors(op, self.rng.below(len));
            self.move_data(&mut work, early);
        }
        let lost = self.rng.chance(self.faults_of(file).lost);
        let due = if lost { NEVER } else { self.now.after(self.latency()) };
        self.note("start", op, total(data), 0);
        self.pending.push(Pending { id, due, work: Some(work), cancelled: false });
        Ok(())
    }

    fn timer(&mut self, id: IoId, at: Nanos) {
        assert!(self.pending.iter().all(|pending| pending.id != id), "{id:?} is already in flight");
        let due = at.after(self.rng.below(50_000));
        self.pending.push(Pending { id, due, work: None, cancelled: false });
    }

    fn cancel(&mut self, id: IoId) {
        let soon = self.now.after(self.rng.below(100_000));
        let cancel = self.rng.chance(600);
        let Some(index) = self.pending.iter().position(|pending| pending.id == id) else { return };
        let pending = &mut self.pending[index];
        pending.due = pending.due.min(soon);
        pending.cancelled = cancel;
        self.tracer.note(self.now, "cancel", &[("tag", u64::from(id.cookie.tag.0))]);
    }
}

#[cfg(test)]
#[path = "ring/tests.rs"]
mod tests;
