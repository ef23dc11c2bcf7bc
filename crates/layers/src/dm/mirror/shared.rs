//! The state shared by the queues of a mirror and its resynchronisation.
//!
//! A region is in sync or out of sync as a whole. Its cell counts the writes in flight in it, or says that
//! the region is being copied: the two exclude each other. With a log on disk a region is marked dirty there
//! before it is written, and the mark is removed when nothing was written for a while: after a crash only
//! dirty regions are copied.
//!
//! *Invariant:* a region with writes in flight is marked dirty on disk, if there is a log device.
//! *Invariant:* a mark is removed only after all legs were flushed, and while each of them has all writes.
//! *Invariant:* `synced` is the number of regions in sync, whenever no change is in progress.

use super::super::TargetError;
use super::super::background::{BackgroundWork, Disks};
use super::args::LogArgs;
use super::legs::{Failure, Leg, LegSets};
use block::{Bytes, Sectors};
use queue::{Nanos, WaitList, Waiter};
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize};
use std::sync::{Mutex, PoisonError};

/// The cell of a region that is being copied.
const COPYING: u32 = 1 << 31;
/// `MIRROR_MAGIC`: `MiRr`.
const MAGIC: u32 = 0x4D69_5272;
const VERSION: u32 = 2;
/// The offset of the bitmap in a log: bits of clean regions.
const BITS_AT: usize = 1024;
/// Longest copy at once, in bytes.
const COPY_BYTES: u64 = 512 << 10;
/// The time without new marks after which marks of idle regions are removed.
const QUIET_NS: u64 = 200_000_000;
/// The time after which copying a torn region is retried.
const TORN_RETRY_NS: u64 = 1_000_000_000;
/// The time for which copying a torn region is retried before the failing leg is marked as failed.
const RETRY_TIMEOUT_NS: u64 = 60_000_000_000;
/// Stands for no region or no time.
const NONE: u64 = u64::MAX;

/// A bit for each region.
#[derive(Debug)]
struct Bits(Box<[AtomicU64]>);

impl Bits {
    fn new(count: u64, value: bool) -> Bits {
        let bits = Bits((0..count.div_ceil(64)).map(|_| AtomicU64::new(0)).collect());
        if value {
            for bit in 0..count {
                bits.set(bit, true);
            }
        }
        bits
    }

    fn get(&self, bit: u64) -> bool {
        self.0[(bit / 64) as usize].load(SeqCst) >> (bit % 64) & 1 == 1
    }

    /// Returns whether the value has changed.
    fn set(&self, bit: u64, value: bool) -> bool {
        let (word, mask) = (&self.0[(bit / 64) as usize], 1 << (bit % 64));
        let before = if value { word.fetch_or(mask, SeqCst) } else { word.fetch_and(!mask, SeqCst) };
        (before & mask != 0) != value
    }
}

#[derive(Debug)]
pub(super) struct Shared {
    pub(super) legs: Box<[Leg]>,
    pub(super) len: Sectors,
    pub(super) log: LogArgs,
    /// The log device, if there is one, and its name in the table.
    pub(super) log_device: Option<usize>,
    pub(super) log_name: String,
    pub(super) leg_sets: LegSets,
    pub(super) handles_errors: bool,
    pub(super) keeps_log: bool,
    cells: Box<[AtomicU32]>,
    sync: Bits,
    synced: AtomicU64,
    /// Torn regions: an unacknowledged write is on some legs and not on others. Any leg may be read, and the
    /// regions are copied to make all legs equal.
    torn: Bits,
    torn_count: AtomicU64,
    /// Clean regions: without a mark.
    clean: Bits,
    /// Regions that may have no mark on disk.
    unmarked: Bits,
    /// The bitmap that is being written to the log.
    written: Bits,
    /// Set once a flush failed, so that earlier writes may be missing: then no mark is removed any more.
    keeps_marks: AtomicBool,
    /// Whether the bitmap has changed since it was last written.
    stale: AtomicBool,
    /// Whether the log is claimed: it is being written.
    log_busy: AtomicBool,
    log_failed: AtomicBool,
    /// The queues with requests that wait for a region being copied, for the log, or for the next table.
    pub(super) waiting: WaitList,
    /// The primary: the leg that serves reads and is copied to the others.
    pub(super) primary: AtomicUsize,
    /// The region at which the search for the next region to copy continues.
    cursor: AtomicU64,
    /// The first torn region whose copying failed with an error that may be temporary, and the time of the
    /// next attempt.
    retry_region: AtomicU64,
    retry_at_ns: AtomicU64,
    /// The time since which all attempts have failed.
    failing_since_ns: AtomicU64,
    suspended: AtomicBool,
    /// Whether held requests end with `Requeue`, for the next table.
    pub(super) requeues: AtomicBool,
    /// Held by background work while it uses the devices.
    background_lock: Mutex<()>,
    pub(super) events: AtomicU32,
    /// The time of the last mark, in nanoseconds of the rings' clock.
    marked_ns: AtomicU64,
}

impl Shared {
    pub(super) fn new(
        legs: Vec<Leg>,
        len: Sectors,
        log: LogArgs,
        log_device: Option<(usize, &str)>,
        [handles_errors, keeps_log]: [bool; 2],
    ) -> Shared {
        let regions = len.0.div_ceil(log.region.0);
        let in_sync = log.sync == Some(false);
        Shared {
            legs: legs.into(),
            len,
            log_device: log_device.map(|(device, _)| device),
            log_name: log_device.map(|(_, name)| name.to_owned()).unwrap_or_default(),
            leg_sets: LegSets::default(),
            handles_errors,
            keeps_log,
            cells: (0..regions).map(|_| AtomicU32::new(0)).collect(),
            sync: Bits::new(regions, in_sync),
            synced: AtomicU64::new(if in_sync { regions } else { 0 }),
            torn: Bits::new(regions, false),
            torn_count: AtomicU64::new(0),
            clean: Bits::new(regions, in_sync),
            unmarked: Bits::new(regions, true),
            written: Bits::new(regions, true),
            keeps_marks: AtomicBool::new(false),
            log,
            stale: AtomicBool::new(false),
            log_busy: AtomicBool::new(false),
            log_failed: AtomicBool::new(false),
            waiting: WaitList::default(),
            primary: AtomicUsize::new(0),
            cursor: AtomicU64::new(0),
            retry_region: AtomicU64::new(NONE),
            retry_at_ns: AtomicU64::new(0),
            failing_since_ns: AtomicU64::new(NONE),
            suspended: AtomicBool::new(false),
            requeues: AtomicBool::new(false),
            background_lock: Mutex::new(()),
            events: AtomicU32::new(0),
            marked_ns: AtomicU64::new(0),
        }
    }

    fn regions(&self) -> u64 {
        self.cells.len() as u64
    }

    /// Returns the length of the log in bytes, a multiple of `block`.
    pub(super) fn log_len(&self, block: u64) -> usize {
        let bits = (self.regions().next_multiple_of(32) / 8) as usize;
        (BITS_AT + bits).next_multiple_of(block as usize)
    }

    /// Encodes the log to write. A mark that is set meanwhile is either included, or its writer sees in
    /// `unmarked` that it may be missing on disk.
    pub(super) fn encode_log(&self, into: &mut [u8]) {
        into.fill(0);
        into[..4].copy_from_slice(&MAGIC.to_le_bytes());
        into[4..8].copy_from_slice(&VERSION.to_le_bytes());
        into[8..16].copy_from_slice(&self.regions().to_le_bytes());
        for (at, bytes) in (0..self.clean.0.len()).zip(into[BITS_AT..].chunks_mut(8)) {
            let seen = self.clean.0[at].load(SeqCst);
            self.unmarked.0[at].fetch_or(seen, SeqCst);
            let written = seen & self.clean.0[at].load(SeqCst);
            self.written.0[at].store(written, Relaxed);
            bytes.copy_from_slice(&written.to_le_bytes()[..bytes.len()]);
        }
        // The record is encoded after the marks. A leg that fails later is recorded by the write that is to
        // be acknowledged without that leg.
        self.encode_record(into);
    }

    /// Reads the log and initialises regions and legs from it.
    ///
    /// # Errors
    /// If the log cannot be read, or its record does not say which leg has all writes.
    pub(super) fn read_log(&self, device: usize, disks: &mut dyn Disks) -> Result<(), TargetError> {
        let mut bytes = vec![0; self.log_len(4096)];
        if let Err(why) = disks.read(device, Bytes::ZERO, &mut bytes) {
            return Err(self.refuse(&format!("it cannot be read ({why}), and may record that a leg failed")));
        }
        self.load_record(&bytes)?;
        self.decode_log(&bytes);
        self.encode_log(&mut bytes);
        let result = disks.write(device, Bytes::ZERO, &bytes).and_then(|()| disks.flush(device));
        self.log_written(result.is_ok(), None);
        Ok(())
    }

    /// Returns whether the bytes are a log, written by this program or by the kernel.
    pub(super) fn is_log(bytes: &[u8]) -> bool {
        bytes[..4] == MAGIC.to_le_bytes() && bytes[4..8] == VERSION.to_le_bytes()
    }

    /// Decodes a log: regions without a mark are in sync. Without a valid header all regions are out of sync.
    pub(super) fn decode_log(&self, bytes: &[u8]) {
        let known = if Shared::is_log(bytes) {
            bytes[8..16].iter().rev().fold(0u64, |count, byte| count << 8 | u64::from(*byte))
        } else {
            0
        };
        for region in 0..self.regions() {
            let clean = match self.log.sync {
                Some(sync) => !sync,
                None => {
                    let byte = bytes.get(BITS_AT + (region / 8) as usize).copied().unwrap_or(0);
                    region < known && byte >> (region % 8) & 1 == 1
                }
            };
            self.clean.set(region, clean);
            self.set_sync(region, clean);
        }
    }

    pub(super) fn region_of(&self, offset: Bytes) -> u64 {
        offset.0 / self.log.region.bytes().0
    }

    pub(super) fn is_in_sync(&self, region: u64) -> bool {
        self.sync.get(region)
    }

    /// Returns whether the value has changed.
    fn set_sync(&self, region: u64, value: bool) -> bool {
        let changed = self.sync.set(region, value);
        if changed {
            if value {
                self.synced.fetch_add(1, AcqRel)
            } else {
                self.synced.fetch_sub(1, AcqRel)
            };
        }
        changed
    }

    /// Registers a write in its region. Returns `false` if the region is being copied.
    pub(super) fn begin_write(&self, region: u64) -> bool {
        let cell = &self.cells[region as usize];
        cell.fetch_update(AcqRel, Relaxed, |count| (count & COPYING == 0).then_some(count + 1)).is_ok()
    }

    /// Returns whether a region is being copied: then no write may begin in it.
    pub(super) fn is_copying(&self, region: u64) -> bool {
        self.cells[region as usize].load(SeqCst) & COPYING != 0
    }

    /// Ends the copying of a region and wakes the writes that wait for it.
    fn end_copying(&self, region: u64) {
        self.cells[region as usize].fetch_and(!COPYING, SeqCst);
        self.waiting.wake(None);
    }

    pub(super) fn end_write(&self, region: u64) {
        self.cells[region as usize].fetch_sub(1, AcqRel);
    }

    /// Marks a region dirty in memory, before it is written.
    pub(super) fn mark(&self, region: u64, now: Nanos) {
        if self.clean.set(region, false) {
            self.stale.store(true, Release);
            self.marked_ns.store(now.0, Release);
        }
    }

    /// Returns whether a marked region has its mark on disk, or no log device works.
    pub(super) fn is_logged(&self, region: u64) -> bool {
        self.log_device.is_none() || self.has_log_failed() || !self.unmarked.get(region)
    }

    /// Claims the log. Returns `true` if the caller must write it.
    pub(super) fn claim_log(&self) -> bool {
        let is_mine = !self.log_busy.swap(true, AcqRel);
        if is_mine {
            self.stale.store(false, Release);
        }
        is_mine
    }

    pub(super) fn is_log_claimed(&self) -> bool {
        self.log_busy.load(SeqCst)
    }

    /// Releases the log after a write to it; `ok`: the write succeeded. `own`: the waiter of the calling
    /// queue.
    pub(super) fn log_written(&self, ok: bool, own: Option<&Waiter>) {
        if ok {
            for (unmarked, written) in self.unmarked.0.iter().zip(&self.written.0) {
                unmarked.store(written.load(Relaxed), SeqCst);
            }
            self.record_written();
        } else if !self.log_failed.swap(true, AcqRel) {
            self.events.fetch_add(1, Relaxed);
        }
        self.release_log(own);
    }

    /// Releases the log without a write; the next claimant writes it. `own`: the waiter of the calling queue.
    pub(super) fn log_not_written(&self, own: Option<&Waiter>) {
        self.stale.store(true, Release);
        self.release_log(own);
    }

    fn release_log(&self, own: Option<&Waiter>) {
        self.log_busy.swap(false, SeqCst);
        self.waiting.wake(own);
    }

    pub(super) fn has_log_failed(&self) -> bool {
        self.log_failed.load(Acquire)
    }

    pub(super) fn primary(&self) -> usize {
        self.primary.load(Acquire)
    }

    /// Returns a leg to read a region from, except the legs in `tried`.
    pub(super) fn readable(&self, region: u64, tried: u32) -> Option<usize> {
        let primary = self.primary();
        if tried & 1 << primary == 0 && self.legs[primary].is_alive() {
            return Some(primary);
        }
        if !self.is_in_sync(region) {
            return None;
        }
        (0..self.legs.len()).find(|&leg| tried & 1 << leg == 0 && self.legs[leg].is_alive())
    }

    /// Keeps all current marks from now on.
    pub(super) fn keep_marks(&self) {
        self.keeps_marks.store(true, Release);
    }

    /// Marks a region out of sync after a write that some legs missed. Those legs were marked as failed
    /// before, so that the primary is a leg that has it.
    pub(super) fn lose_sync(&self, region: u64) {
        self.set_sync(region, false);
    }

    /// Marks a region as torn: an unacknowledged write is on some legs only, and none of them is marked as
    /// failed.
    pub(super) fn mark_torn(&self, region: u64) {
        if self.torn.set(region, true) {
            self.torn_count.fetch_add(1, AcqRel);
        }
        // After the bit is set: a search in progress took the cursor before, and puts back a region that is
        // no greater.
        self.cursor.fetch_min(region, AcqRel);
    }

    /// Returns whether all legs are equal in a region.
    fn is_equal(&self, region: u64) -> bool {
        self.is_in_sync(region) && !self.torn.get(region)
    }

    pub(super) fn suspend(&self, noflush: bool) {
        self.requeues.store(noflush, Relaxed);
        self.suspended.store(true, Release);
        self.waiting.wake_fenced(None);
        // The next table may use the devices after this, so this waits for background work in progress, which
        // ends after one step.
        drop(self.background_lock.lock().unwrap_or_else(PoisonError::into_inner));
    }

    pub(super) fn is_suspended(&self) -> bool {
        self.suspended.load(Acquire)
    }

    pub(super) fn resume(&self) {
        self.cursor.store(0, Relaxed);
        self.retry_region.store(NONE, Relaxed);
        self.failing_since_ns.store(NONE, Relaxed);
        self.suspended.store(false, Relaxed);
    }

    pub(super) fn is_all_in_sync(&self) -> bool {
        self.synced.load(Acquire) == self.regions()
    }

    /// Returns the number of regions in sync, and of all regions.
    pub(super) fn progress(&self) -> (u64, u64) {
        (self.synced.load(Acquire), self.regions())
    }

    /// Takes the search position. A region that becomes torn meanwhile sets a new one.
    pub(super) fn take_cursor(&self) -> u64 {
        self.cursor.swap(self.regions(), AcqRel)
    }

    /// Returns the next region to copy, claimed.
    pub(super) fn next_region(&self, from: u64) -> Option<u64> {
        let region = (from..self.regions()).find(|&region| !self.is_equal(region))?;
        let claimed = self.cells[region as usize].compare_exchange(0, COPYING, AcqRel, Relaxed).is_ok();
        self.cursor.fetch_min(region + u64::from(claimed), AcqRel);
        claimed.then_some(region)
    }

    fn copy_region(&self, region: u64, now: Nanos, disks: &mut dyn Disks) {
        let whole = match self.copy_to_legs(region, disks) {
            Ok(whole) => whole,
            Err(leg) => {
                if self.is_in_sync(region) && self.keeps_retrying(now) {
                    self.retry_region.fetch_min(region, Relaxed);
                    self.retry_at_ns.store(now.after(TORN_RETRY_NS).0, Relaxed);
                } else {
                    self.fail(leg, Failure::Sync);
                }
                false
            }
        };
        let is_copied = whole && self.flush_legs(disks);
        let was_last = is_copied && self.set_sync(region, true) && self.is_all_in_sync();
        if was_last {
            self.end_returning();
        }
        if is_copied {
            if self.torn.set(region, false) {
                self.torn_count.fetch_sub(1, AcqRel);
                self.failing_since_ns.store(NONE, Relaxed);
            }
            if self.clean.set(region, true) {
                self.stale.store(true, Relaxed);
            }
        }
        self.end_copying(region);
        self.events.fetch_add(was_last.into(), Relaxed);
    }

    /// Returns whether to retry a torn region that could not be copied, rather than mark a leg as failed: all
    /// legs failed when it was torn, and may recover at different times.
    fn keeps_retrying(&self, now: Nanos) -> bool {
        let since = self.failing_since_ns.fetch_min(now.0, Relaxed).min(now.0);
        now.since(Nanos(since)) < RETRY_TIMEOUT_NS
    }

    /// Copies a region to all legs. Returns whether all legs have it now. `Err`: the leg that failed.
    fn copy_to_legs(&self, region: u64, disks: &mut dyn Disks) -> Result<bool, usize> {
        let start = region * self.log.region.0;
        let len = self.log.region.0.min(self.len.0 - start);
        let (mut at, end) = (Sectors(start).bytes().0, Sectors(start + len).bytes().0);
        let mut buffer = vec![0; COPY_BYTES.min(end - at) as usize];
        let primary = self.primary();
        let mut whole = true;
        while at < end && whole {
            if self.is_suspended() {
                self.cursor.fetch_min(region, AcqRel);
                return Ok(false);
            }
            let buffer = &mut buffer[..COPY_BYTES.min(end - at) as usize];
            let from = self.legs[primary].start.bytes() + Bytes(at);
            disks.read(self.legs[primary].device, from, buffer).map_err(|_| primary)?;
            if !self.legs[primary].is_alive() {
                // The data of a failed leg may be outdated.
                return Ok(false);
            }
            for (number, leg) in self.legs.iter().enumerate().filter(|(number, _)| *number != primary) {
                if leg.is_alive() {
                    disks.write(leg.device, leg.start.bytes() + Bytes(at), buffer).map_err(|_| number)?;
                }
                whole &= leg.is_alive();
            }
            at += buffer.len() as u64;
        }
        Ok(whole)
    }

    /// Flushes all legs. Returns whether all writes are on stable storage on each leg. If all flushes fail,
    /// no leg is marked as failed.
    fn flush_legs(&self, disks: &mut dyn Disks) -> bool {
        let alive = self.legs.iter().enumerate().filter(|(_, leg)| leg.is_alive());
        let (done, failed): (Vec<usize>, Vec<usize>) = alive
            .map(|(number, _)| number)
            .partition(|&number| disks.flush(self.legs[number].device).is_ok());
        if done.is_empty() {
            self.keep_marks();
        } else {
            failed.into_iter().for_each(|number| self.fail(number, Failure::Flush));
        }
        self.may_clear_marks()
    }

    /// Returns whether marks may be removed: not while a leg has missed writes, because it may be used again
    /// after a crash.
    fn may_clear_marks(&self) -> bool {
        !self.keeps_marks.load(Acquire) && self.legs.iter().all(Leg::is_alive)
    }

    /// Removes the marks of idle regions and returns these regions. The caller has claimed the log.
    fn clear_marks(&self) -> Vec<u64> {
        let mut cleared = Vec::new();
        for region in (0..self.regions()).filter(|_| self.may_clear_marks()) {
            let idle = self.cells[region as usize].load(Acquire) == 0;
            if idle && self.is_equal(region) && !self.clean.get(region) {
                // A write that begins now waits for the cell, and marks the region again after this.
                let cell = &self.cells[region as usize];
                if cell.compare_exchange(0, COPYING, AcqRel, Relaxed).is_ok() {
                    self.clean.set(region, true);
                    cleared.push(region);
                    self.end_copying(region);
                }
            }
        }
        cleared
    }

    /// Returns whether a mark could be removed.
    fn has_old_marks(&self) -> bool {
        let old = |region: u64| {
            !self.clean.get(region) && self.is_equal(region) && self.cells[region as usize].load(Acquire) == 0
        };
        self.may_clear_marks() && (0..self.regions()).any(old)
    }

    fn is_quiet(&self, now: Nanos) -> bool {
        now.since(Nanos(self.marked_ns.load(Acquire))) >= QUIET_NS
    }

    fn wants_copies(&self, now: Nanos) -> bool {
        let (synced, all) = self.progress();
        (synced < all || self.torn_count.load(Acquire) > 0)
            && (self.cursor.load(Relaxed) < all || self.is_retry_due(now))
            && self.legs[self.primary()].is_alive()
            && self.legs.iter().filter(|leg| leg.is_alive()).count() > 1
    }

    /// Returns whether the retry of a torn region is due.
    fn is_retry_due(&self, now: Nanos) -> bool {
        self.retry_region.load(Relaxed) != NONE && now.0 >= self.retry_at_ns.load(Relaxed)
    }

    /// Returns whether background work should write the log.
    fn wants_log(&self, now: Nanos) -> bool {
        let old = || self.is_quiet(now) && (self.stale.load(Acquire) || self.has_old_marks());
        let is_free = !self.has_log_failed() && !self.log_busy.load(Relaxed);
        self.log_device.is_some() && is_free && (self.wants_record() || old())
    }

    /// Removes old marks and writes the log. Without its mark a region is not copied after a crash, so its
    /// writes are flushed first. Writes that need a mark meanwhile wait for the log.
    fn write_log(&self, device: usize, disks: &mut dyn Disks) {
        if !self.claim_log() {
            return;
        }
        let cleared = self.clear_marks();
        if !cleared.is_empty() && !self.flush_legs(disks) {
            cleared.iter().for_each(|&region| _ = self.clean.set(region, false));
        }
        let mut bytes = vec![0; self.log_len(4096)];
        self.encode_log(&mut bytes);
        let ok = disks.write(device, Bytes::ZERO, &bytes).and_then(|()| disks.flush(device)).is_ok();
        self.log_written(ok, None);
    }
}

impl BackgroundWork for Shared {
    fn is_due(&self, now: Nanos) -> bool {
        !self.is_suspended() && (self.wants_copies(now) || self.wants_log(now))
    }

    fn step(&self, now: Nanos, disks: &mut dyn Disks) {
        let _working = self.background_lock.lock().unwrap_or_else(PoisonError::into_inner);
        if self.is_suspended() {
            return;
        }
        if self.wants_copies(now) {
            if self.is_retry_due(now) {
                self.cursor.fetch_min(self.retry_region.swap(NONE, Relaxed), AcqRel);
            }
            if let Some(region) = self.next_region(self.take_cursor()) {
                self.copy_region(region, now, disks);
            }
        }
        if let Some(device) = self.log_device
            && !self.is_suspended()
            && self.wants_log(now)
        {
            self.write_log(device, disks);
        }
    }
}
