//! What the queues of a mirror and the thread that resynchronises it know in common.
//!
//! A region is a stretch of the device that is in sync or not as a whole. Its cell says how many writes are under way in it, or
//! that it is being copied: neither begins while there is the other. With a log on disk a region is marked there before
//! it is written, and the mark goes when nothing was written to it for a while: after a crash only regions with a
//! mark are copied.
//!
//! *Invariant:* a region that is written has its mark on disk, if there is a log.
//! *Invariant:* a mark goes only after all devices were flushed, and while each of them has all that was written.
//! *Invariant:* `synced` is the number of regions that are in sync, whenever no change is under way.

use super::super::TargetError;
use super::super::chore::{Chore, Disks};
use super::standing::{Ill, Leg, Standings};
use super::words::LogWords;
use block::{Bytes, Sectors};
use queue::Nanos;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize};
use std::sync::{Mutex, PoisonError};

/// A region that is being copied.
const COPYING: u32 = 1 << 31;
/// `MIRROR_MAGIC`: `MiRr`.
const MAGIC: u32 = 0x4D69_5272;
const VERSION: u32 = 2;
/// Where the bits of a log begin.
const BITS_AT: usize = 1024;
/// How much is copied in one go.
const PIECE: u64 = 512 << 10;
/// How long nothing is written to regions before their marks go.
const QUIET_NS: u64 = 200_000_000;
/// How long a region that could not be made equal again is left as it is, before that is tried again.
const AGAIN_NS: u64 = 1_000_000_000;
/// For how long it is tried, before the device that fails is taken for a bad one.
const AGAIN_NS_MAX: u64 = 60_000_000_000;
/// No region, or no time.
const NONE: u64 = u64::MAX;

/// Bits of regions.
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

    /// Whether it was the other before.
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
    pub(super) log: LogWords,
    /// The log's device, if it is on disk, and what the table calls it.
    pub(super) log_device: Option<usize>,
    pub(super) log_name: String,
    pub(super) standings: Standings,
    pub(super) handles_errors: bool,
    pub(super) keeps_log: bool,
    cells: Box<[AtomicU32]>,
    sync: Bits,
    synced: AtomicU64,
    /// Regions in which what was not acknowledged is on some devices and not on others: any device will do to read
    /// them, and they are copied so that it does not matter which.
    torn: Bits,
    torn_count: AtomicU64,
    /// Regions without a mark: those are clean.
    clean: Bits,
    /// Regions that may be without a mark on disk.
    unmarked: Bits,
    /// What is being written to the log, by whoever claimed it.
    going: Bits,
    /// A flush failed: what was written before may be missing, so no mark goes any more.
    keeps_marks: AtomicBool,
    /// The bits changed since they were last written.
    stale: AtomicBool,
    /// Somebody writes the log.
    log_busy: AtomicBool,
    log_failed: AtomicBool,
    /// The leg that is read, and that others are copied from.
    pub(super) primary: AtomicUsize,
    /// Where the search for what is to be copied goes on.
    cursor: AtomicU64,
    /// The first of the regions that are in sync and could not be made equal, for a reason that may pass, and when to try again.
    again: AtomicU64,
    again_ns: AtomicU64,
    /// Since when none could.
    failing_since_ns: AtomicU64,
    suspended: AtomicBool,
    /// What is held comes up for the table that comes.
    pub(super) requeues: AtomicBool,
    /// Held while something is copied or written to the log by itself.
    working: Mutex<()>,
    pub(super) events: AtomicU32,
    /// When a region was last marked, in nanoseconds of the rings' clock.
    marked_ns: AtomicU64,
}

impl Shared {
    pub(super) fn new(
        legs: Vec<Leg>,
        len: Sectors,
        log: LogWords,
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
            standings: Standings::default(),
            handles_errors,
            keeps_log,
            cells: (0..regions).map(|_| AtomicU32::new(0)).collect(),
            sync: Bits::new(regions, in_sync),
            synced: AtomicU64::new(if in_sync { regions } else { 0 }),
            torn: Bits::new(regions, false),
            torn_count: AtomicU64::new(0),
            clean: Bits::new(regions, in_sync),
            unmarked: Bits::new(regions, true),
            going: Bits::new(regions, true),
            keeps_marks: AtomicBool::new(false),
            log,
            stale: AtomicBool::new(false),
            log_busy: AtomicBool::new(false),
            log_failed: AtomicBool::new(false),
            primary: AtomicUsize::new(0),
            cursor: AtomicU64::new(0),
            again: AtomicU64::new(NONE),
            again_ns: AtomicU64::new(0),
            failing_since_ns: AtomicU64::new(NONE),
            suspended: AtomicBool::new(false),
            requeues: AtomicBool::new(false),
            working: Mutex::new(()),
            events: AtomicU32::new(0),
            marked_ns: AtomicU64::new(0),
        }
    }

    fn regions(&self) -> u64 {
        self.cells.len() as u64
    }

    /// How long the log is on its device, in blocks of that length.
    pub(super) fn log_len(&self, block: u64) -> usize {
        let bits = (self.regions().next_multiple_of(32) / 8) as usize;
        (BITS_AT + bits).next_multiple_of(block as usize)
    }

    /// The log as it is to be on disk. Whoever marks a region meanwhile is seen here, or sees that its mark may be missing.
    pub(super) fn encode_log(&self, into: &mut [u8]) {
        into.fill(0);
        into[..4].copy_from_slice(&MAGIC.to_le_bytes());
        into[4..8].copy_from_slice(&VERSION.to_le_bytes());
        into[8..16].copy_from_slice(&self.regions().to_le_bytes());
        for (at, bytes) in (0..self.clean.0.len()).zip(into[BITS_AT..].chunks_mut(8)) {
            let seen = self.clean.0[at].load(SeqCst);
            self.unmarked.0[at].fetch_or(seen, SeqCst);
            let going = seen & self.clean.0[at].load(SeqCst);
            self.going.0[at].store(going, Relaxed);
            bytes.copy_from_slice(&going.to_le_bytes()[..bytes.len()]);
        }
        // After the marks: a leg that fails meanwhile is recorded by whoever is to acknowledge a write without it.
        self.encode_record(into);
    }

    /// Begin with what the log says.
    ///
    /// # Errors
    /// It cannot be read, or its record refuses the table: nobody knows which leg has all.
    pub(super) fn read_log(&self, device: usize, disks: &mut dyn Disks) -> Result<(), TargetError> {
        let mut bytes = vec![0; self.log_len(4096)];
        if let Err(why) = disks.read(device, Bytes::ZERO, &mut bytes) {
            return Err(self.refused(&format!("it cannot be read ({why}), and may record that a leg failed")));
        }
        self.take_record(&bytes)?;
        self.decode_log(&bytes);
        self.encode_log(&mut bytes);
        let written = disks.write(device, Bytes::ZERO, &bytes).and_then(|()| disks.flush(device));
        self.log_ends(written.is_ok());
        Ok(())
    }

    /// Whether what was read is a log, ours or the kernel's.
    pub(super) fn is_log(bytes: &[u8]) -> bool {
        bytes[..4] == MAGIC.to_le_bytes() && bytes[4..8] == VERSION.to_le_bytes()
    }

    /// Take in a log that was read: regions without a mark are in sync. What is no log of ours is none at all.
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

    /// Whether it was the other before.
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

    /// A write begins. Whether it may: not while its region is copied.
    pub(super) fn enter(&self, region: u64) -> bool {
        let cell = &self.cells[region as usize];
        cell.fetch_update(AcqRel, Relaxed, |count| (count & COPYING == 0).then_some(count + 1)).is_ok()
    }

    pub(super) fn leave(&self, region: u64) {
        self.cells[region as usize].fetch_sub(1, AcqRel);
    }

    /// A region is about to be written.
    pub(super) fn mark(&self, region: u64, now: Nanos) {
        if self.clean.set(region, false) {
            self.stale.store(true, Release);
            self.marked_ns.store(now.0, Release);
        }
    }

    /// Whether a region that was marked has its mark on disk, as far as there is a log that takes it.
    pub(super) fn is_logged(&self, region: u64) -> bool {
        self.log_device.is_none() || self.has_log_failed() || !self.unmarked.get(region)
    }

    /// Whether the log is the caller's to write: it says what there is from now on.
    pub(super) fn claim_log(&self) -> bool {
        let is_mine = !self.log_busy.swap(true, AcqRel);
        if is_mine {
            self.stale.store(false, Release);
        }
        is_mine
    }

    pub(super) fn log_ends(&self, ok: bool) {
        if ok {
            for (unmarked, going) in self.unmarked.0.iter().zip(&self.going.0) {
                unmarked.store(going.load(Relaxed), SeqCst);
            }
            self.record_ends();
        } else if !self.log_failed.swap(true, AcqRel) {
            self.events.fetch_add(1, Relaxed);
        }
        self.log_busy.store(false, Release);
    }

    /// The log was not written and is to be, by whoever claims it next.
    pub(super) fn log_stays(&self) {
        self.stale.store(true, Release);
        self.log_busy.store(false, Release);
    }

    pub(super) fn has_log_failed(&self) -> bool {
        self.log_failed.load(Acquire)
    }

    pub(super) fn primary(&self) -> usize {
        self.primary.load(Acquire)
    }

    /// A leg to read a region from, other than those that failed.
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

    /// What is marked now stays so.
    pub(super) fn keep_marks(&self) {
        self.keeps_marks.store(true, Release);
    }

    /// Some of its devices have it and some do not. Those that do not failed before: another may have become the first.
    pub(super) fn lose_sync(&self, region: u64) {
        self.set_sync(region, false);
    }

    /// What was left halfway is on some devices and not on others, and none is to blame.
    pub(super) fn copy_again(&self, region: u64) {
        if self.torn.set(region, true) {
            self.torn_count.fetch_add(1, AcqRel);
        }
        // After the bit: whoever searches has taken the place away before, and puts back one that is no greater.
        self.cursor.fetch_min(region, AcqRel);
    }

    /// All devices have the same there, and all of it.
    fn is_same(&self, region: u64) -> bool {
        self.is_in_sync(region) && !self.torn.get(region)
    }

    pub(super) fn suspend(&self, noflush: bool) {
        self.requeues.store(noflush, Relaxed);
        self.suspended.store(true, Release);
        // The next table may use the devices from here on: what is on its way to them ends first, a piece at most.
        drop(self.working.lock().unwrap_or_else(PoisonError::into_inner));
    }

    pub(super) fn is_suspended(&self) -> bool {
        self.suspended.load(Acquire)
    }

    pub(super) fn resume(&self) {
        self.cursor.store(0, Relaxed);
        self.again.store(NONE, Relaxed);
        self.failing_since_ns.store(NONE, Relaxed);
        self.suspended.store(false, Relaxed);
    }

    pub(super) fn is_all_in_sync(&self) -> bool {
        self.synced.load(Acquire) == self.regions()
    }

    /// Regions in sync, and all.
    pub(super) fn progress(&self) -> (u64, u64) {
        (self.synced.load(Acquire), self.regions())
    }

    /// Where to search. It is the caller's from here on: whoever has something copied again meanwhile leaves its own place.
    pub(super) fn take_cursor(&self) -> u64 {
        self.cursor.swap(self.regions(), AcqRel)
    }

    /// The next region to copy, claimed.
    pub(super) fn next_region(&self, from: u64) -> Option<u64> {
        let region = (from..self.regions()).find(|&region| !self.is_same(region))?;
        let claimed = self.cells[region as usize].compare_exchange(0, COPYING, AcqRel, Relaxed).is_ok();
        self.cursor.fetch_min(region + u64::from(claimed), AcqRel);
        claimed.then_some(region)
    }

    fn copy_region(&self, region: u64, now: Nanos, disks: &mut dyn Disks) {
        let whole = match self.copy_pieces(region, disks) {
            Ok(whole) => whole,
            Err(leg) => {
                if self.is_in_sync(region) && self.is_lenient(now) {
                    self.again.fetch_min(region, Relaxed);
                    self.again_ns.store(now.after(AGAIN_NS).0, Relaxed);
                } else {
                    self.fail(leg, Ill::Sync);
                }
                false
            }
        };
        let is_copied = whole && self.flush_legs(disks);
        let was_last = is_copied && self.set_sync(region, true) && self.is_all_in_sync();
        if was_last {
            self.have_returned();
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
        self.cells[region as usize].fetch_and(!COPYING, AcqRel);
        self.events.fetch_add(was_last.into(), Relaxed);
    }

    /// A region that is torn could not be copied. Whether no device is to blame for that yet: all of them failed when it was
    /// torn, and they need not be back at the same time.
    fn is_lenient(&self, now: Nanos) -> bool {
        let since = self.failing_since_ns.fetch_min(now.0, Relaxed).min(now.0);
        now.since(Nanos(since)) < AGAIN_NS_MAX
    }

    /// Whether all devices have the region now. A leg: that failed.
    fn copy_pieces(&self, region: u64, disks: &mut dyn Disks) -> Result<bool, usize> {
        let start = region * self.log.region.0;
        let len = self.log.region.0.min(self.len.0 - start);
        let (mut at, end) = (Sectors(start).bytes().0, Sectors(start + len).bytes().0);
        let mut piece = vec![0; PIECE.min(end - at) as usize];
        let primary = self.primary();
        let mut whole = true;
        while at < end && whole {
            if self.is_suspended() {
                self.cursor.fetch_min(region, AcqRel);
                return Ok(false);
            }
            let piece = &mut piece[..PIECE.min(end - at) as usize];
            let from = self.legs[primary].start.bytes() + Bytes(at);
            disks.read(self.legs[primary].device, from, piece).map_err(|_| primary)?;
            if !self.legs[primary].is_alive() {
                // What a device that failed has may be old.
                return Ok(false);
            }
            for (number, leg) in self.legs.iter().enumerate().filter(|(number, _)| *number != primary) {
                if leg.is_alive() {
                    disks.write(leg.device, leg.start.bytes() + Bytes(at), piece).map_err(|_| number)?;
                }
                whole &= leg.is_alive();
            }
            at += piece.len() as u64;
        }
        Ok(whole)
    }

    /// Whether all that was written is on stable storage, on each device. Where none can say so, none is to blame.
    fn flush_legs(&self, disks: &mut dyn Disks) -> bool {
        let alive = self.legs.iter().enumerate().filter(|(_, leg)| leg.is_alive());
        let (done, failed): (Vec<usize>, Vec<usize>) = alive
            .map(|(number, _)| number)
            .partition(|&number| disks.flush(self.legs[number].device).is_ok());
        if done.is_empty() {
            self.keep_marks();
        } else {
            failed.into_iter().for_each(|number| self.fail(number, Ill::Flush));
        }
        self.marks_may_go()
    }

    /// Not while a device lacks what was written since it failed: it may be there again after a crash.
    fn marks_may_go(&self) -> bool {
        !self.keeps_marks.load(Acquire) && self.legs.iter().all(Leg::is_alive)
    }

    /// Take the marks of regions to which nothing was written for a while. The log is claimed.
    fn clean_up(&self) -> Vec<u64> {
        let mut gone = Vec::new();
        for region in (0..self.regions()).filter(|_| self.marks_may_go()) {
            let idle = self.cells[region as usize].load(Acquire) == 0;
            if idle && self.is_same(region) && !self.clean.get(region) {
                // A write that begins now marks it again after this, or waits for us.
                let cell = &self.cells[region as usize];
                if cell.compare_exchange(0, COPYING, AcqRel, Relaxed).is_ok() {
                    self.clean.set(region, true);
                    gone.push(region);
                    cell.fetch_and(!COPYING, AcqRel);
                }
            }
        }
        gone
    }

    /// Whether a mark could go.
    fn has_old_marks(&self) -> bool {
        let old = |region: u64| {
            !self.clean.get(region) && self.is_same(region) && self.cells[region as usize].load(Acquire) == 0
        };
        self.marks_may_go() && (0..self.regions()).any(old)
    }

    fn is_quiet(&self, now: Nanos) -> bool {
        now.since(Nanos(self.marked_ns.load(Acquire))) >= QUIET_NS
    }

    fn wants_copies(&self, now: Nanos) -> bool {
        let (synced, all) = self.progress();
        (synced < all || self.torn_count.load(Acquire) > 0)
            && (self.cursor.load(Relaxed) < all || self.wants_again(now))
            && self.legs[self.primary()].is_alive()
            && self.legs.iter().filter(|leg| leg.is_alive()).count() > 1
    }

    /// Whether it is time to try a region again.
    fn wants_again(&self, now: Nanos) -> bool {
        self.again.load(Relaxed) != NONE && now.0 >= self.again_ns.load(Relaxed)
    }

    /// Whether the log is to be written although no request waits for that.
    fn wants_log(&self, now: Nanos) -> bool {
        let old = || self.is_quiet(now) && (self.stale.load(Acquire) || self.has_old_marks());
        let is_free = !self.has_log_failed() && !self.log_busy.load(Relaxed);
        self.log_device.is_some() && is_free && (self.wants_record() || old())
    }

    /// Old marks go, and what changed is written. A mark that goes means that after a crash nothing of the region is copied:
    /// so what was written to it is flushed first. Writes that need a mark meanwhile wait for the log.
    fn write_log(&self, device: usize, disks: &mut dyn Disks) {
        if !self.claim_log() {
            return;
        }
        let gone = self.clean_up();
        if !gone.is_empty() && !self.flush_legs(disks) {
            gone.iter().for_each(|&region| _ = self.clean.set(region, false));
        }
        let mut bytes = vec![0; self.log_len(4096)];
        self.encode_log(&mut bytes);
        let ok = disks.write(device, Bytes::ZERO, &bytes).and_then(|()| disks.flush(device)).is_ok();
        self.log_ends(ok);
    }
}

impl Chore for Shared {
    fn is_due(&self, now: Nanos) -> bool {
        !self.is_suspended() && (self.wants_copies(now) || self.wants_log(now))
    }

    fn step(&self, now: Nanos, disks: &mut dyn Disks) {
        let _working = self.working.lock().unwrap_or_else(PoisonError::into_inner);
        if self.is_suspended() {
            return;
        }
        if self.wants_copies(now) {
            if self.wants_again(now) {
                self.cursor.fetch_min(self.again.swap(NONE, Relaxed), AcqRel);
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
