//! The state of a mirror's legs: failures, their record in the log, and what a restart reads from it
//! ([ADR 34](../../../../../docs/adr/0034-a-mirror-records-legs-that-failed.md)).
//!
//! A failed leg gets no more writes. From then on a write or flush may be acknowledged only if a restart with
//! the same table would not use that leg's data: if the log records the failure, or if a restart copies
//! everything from another leg.
//!
//! *Invariant:* a leg whose bit is set in `recorded` is recorded as failed in the log on disk.
//! *Invariant:* the primary is alive, unless it failed as the only leg with all data; then nothing is
//! acknowledged.

use super::super::TargetError;
use super::record::{AT, Entry, Key, LegState, Record};
use super::shared::Shared;
use block::Sectors;
use std::fmt::Write as _;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use std::sync::{Mutex, PoisonError};

/// The kinds of failure of a leg: the kernel's error bits.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Failure {
    Write = 1,
    Flush = 2,
    Sync = 4,
    Read = 8,
}

/// A leg: a device of the mirror.
#[derive(Debug)]
pub(super) struct Leg {
    /// Device number of the leg.
    pub(super) device: usize,
    pub(super) start: Sectors,
    /// The device's name in the table.
    name: String,
    key: Key,
    failures: AtomicU32,
}

impl Leg {
    pub(super) fn new(device: usize, start: Sectors, name: &str, identity: &str) -> Leg {
        let key = Key::new(name, identity, start.0);
        Leg { device, start, name: name.to_owned(), key, failures: AtomicU32::new(0) }
    }

    pub(super) fn is_alive(&self) -> bool {
        self.failures.load(Acquire) == 0
    }

    /// Returns the kernel's status letter.
    pub(super) fn letter(&self) -> char {
        let failures = self.failures.load(Acquire);
        let has = |failure: Failure| failures & failure as u32 != 0;
        match failures {
            0 => 'A',
            _ if has(Failure::Flush) => 'F',
            _ if has(Failure::Write) => 'D',
            _ if has(Failure::Sync) => 'S',
            _ => 'R',
        }
    }

    /// Returns the failure that the status letter stands for, in words.
    fn failed_at(&self) -> &'static str {
        match self.letter() {
            'F' => "a flush failed",
            'D' => "it missed writes",
            'S' => "it could not be copied",
            _ => "a read failed",
        }
    }
}

/// Sets of legs, as bits.
#[derive(Debug, Default)]
pub(super) struct LegSets {
    /// Legs that failed.
    dead: AtomicU32,
    /// Legs that the log on disk records as failed.
    recorded: AtomicU32,
    /// Legs that the log now being written records as failed.
    written_record: AtomicU32,
    /// Recorded legs that are resynchronised because the table has `sync`.
    returning: AtomicU32,
    /// Entries of recorded legs that are not in the table.
    absent: Mutex<Vec<Entry>>,
    /// Serialises failures, so that the second of two sees the effects of the first.
    failing: Mutex<()>,
    /// The sets reported last: dead, recorded and returning legs.
    reported: Mutex<[u32; 3]>,
}

/// The decision whether a write may be acknowledged.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Acknowledge {
    Yes,
    /// Yes, once the log is written.
    AfterLog,
    /// No: a restart would use a leg without the write.
    No,
}

impl Shared {
    /// Returns whether completed writes may be acknowledged. This takes two atomic loads while all legs are
    /// alive.
    #[inline]
    pub(super) fn may_acknowledge(&self) -> Acknowledge {
        let dead = self.leg_sets.dead.load(Acquire);
        if dead & !self.leg_sets.recorded.load(Acquire) == 0 {
            Acknowledge::Yes
        } else {
            self.may_acknowledge_without(dead)
        }
    }

    #[cold]
    fn may_acknowledge_without(&self, dead: u32) -> Acknowledge {
        if dead & 1 << self.primary() != 0 {
            return Acknowledge::No;
        }
        if self.log_device.is_some() {
            return if self.has_log_failed() { Acknowledge::No } else { Acknowledge::AfterLog };
        }
        // A restart copies everything from the first leg, unless the table has `nosync`.
        let first_has_all = dead & 1 == 0 && self.log.sync != Some(false);
        if first_has_all || self.keeps_log { Acknowledge::Yes } else { Acknowledge::No }
    }

    /// Returns the failed legs that have to be recorded. The primary is not one of them: if it failed as the
    /// only leg with all data, it remains the source after a restart, and nothing was acknowledged since.
    fn to_record(&self) -> u32 {
        let LegSets { dead, returning, .. } = &self.leg_sets;
        let dead = dead.load(Acquire);
        (dead | returning.load(Acquire)) & !(1 << self.primary())
    }

    /// Encodes the record to write. The caller has claimed the log.
    pub(super) fn encode_record(&self, into: &mut [u8]) {
        let failed = self.to_record();
        self.leg_sets.written_record.store(failed, Relaxed);
        let absent = self.leg_sets.absent.lock().unwrap_or_else(PoisonError::into_inner);
        if failed == 0 && absent.is_empty() {
            return;
        }
        let primary = self.primary();
        let legs = self.legs.iter().enumerate().map(|(number, leg)| Entry {
            key: leg.key,
            failed: failed & 1 << number != 0,
            source: number == primary,
        });
        Record(legs.chain(absent.iter().copied()).collect()).encode(&mut into[AT]);
    }

    /// Handles the completion of a write of the log: the record is on disk.
    pub(super) fn record_written(&self) {
        self.leg_sets.recorded.store(self.leg_sets.written_record.load(Relaxed), Release);
    }

    /// Returns whether the record on disk differs from the failed legs.
    pub(super) fn wants_record(&self) -> bool {
        self.to_record() != self.leg_sets.recorded.load(Acquire)
    }

    /// Initialises the state of the legs from the record of a log.
    ///
    /// # Errors
    /// If no leg is known to have all writes: the table must not become active.
    pub(super) fn load_record(&self, log: &[u8]) -> Result<(), TargetError> {
        let nothing = [0; AT.end - AT.start];
        let record = Record::decode(if Shared::is_log(log) { &log[AT] } else { &nothing }).map_err(|()| {
            self.refuse("its record of failed legs is damaged, so no leg is known to have all writes")
        })?;
        let keys: Vec<Key> = self.legs.iter().map(|leg| leg.key).collect();
        let state = |key: &Key| match record.0.as_slice() {
            [] => LegState::Good,
            _ => record.state_of(*key),
        };
        let leg_sets: Vec<LegState> = keys.iter().map(state).collect();
        let source = match record.0.iter().any(|entry| entry.source) {
            true => leg_sets.iter().position(|state| *state == LegState::Source),
            false => leg_sets.iter().position(|state| *state == LegState::Good),
        };
        let Some(source) = source else {
            return Err(self.refuse("no leg of this table is recorded as having all writes"));
        };
        let bits = |what: fn(LegState) -> bool| {
            let bit = |(number, state): (usize, &LegState)| u32::from(what(*state)) << number;
            leg_sets.iter().enumerate().map(bit).fold(0, |bits, bit| bits | bit)
        };
        let failed = bits(|state| state == LegState::Failed);
        let lacking = failed | bits(|state| state == LegState::Unknown);
        // `sync` resynchronises all legs, the recorded ones included.
        let returns = self.log.sync == Some(true);
        for (number, leg) in self.legs.iter().enumerate() {
            let is_out = lacking & 1 << number != 0 && !returns;
            leg.failures.store(if is_out { Failure::Write as u32 } else { 0 }, Release);
        }
        self.primary.store(source, Release);
        let LegSets { dead, recorded, returning, absent, .. } = &self.leg_sets;
        dead.store(if returns { 0 } else { lacking }, Release);
        returning.store(if returns { lacking } else { 0 }, Release);
        recorded.store(failed, Release);
        *absent.lock().unwrap_or_else(PoisonError::into_inner) = record.absent(&keys);
        Ok(())
    }

    /// Returns the error of a table that cannot become active, with advice.
    pub(super) fn refuse(&self, why: &str) -> TargetError {
        let legs: Vec<&str> = self.legs.iter().map(|leg| leg.name.as_str()).collect();
        let (log, legs) = (&self.log_name, legs.join(", "));
        TargetError::of(format!(
            "log {log}: {why} (legs {legs}; to go on, use a new log device and put the leg with the right data first)"
        ))
        .with_errno(libc::EIO)
    }

    /// Marks a leg as failed.
    pub(super) fn fail(&self, leg: usize, failure: Failure) {
        let _one_at_a_time = self.leg_sets.failing.lock().unwrap_or_else(PoisonError::into_inner);
        // Another leg becomes the primary only if it has all data, and before the failure becomes visible.
        if leg == self.primary()
            && self.is_all_in_sync()
            && let Some(next) = (0..self.legs.len()).find(|&next| next != leg && self.legs[next].is_alive())
        {
            self.primary.store(next, Release);
        }
        let before = self.legs[leg].failures.fetch_or(failure as u32, AcqRel);
        self.leg_sets.dead.fetch_or(1 << leg, AcqRel);
        if before & failure as u32 == 0 {
            self.events.fetch_add(1, Relaxed);
        }
        if failure == Failure::Flush {
            self.keep_marks();
        }
    }

    /// Ends the resynchronisation of returning legs: everything was copied to them.
    pub(super) fn end_returning(&self) {
        self.leg_sets.returning.store(0, Release);
    }

    pub(super) fn letters(&self) -> String {
        self.legs.iter().map(Leg::letter).collect()
    }

    /// Returns the sentence about a leg that failed or is being resynchronised.
    fn describe_leg(&self, leg: usize) -> Option<String> {
        let LegSets { dead, recorded, returning, .. } = &self.leg_sets;
        let has = |bits: &AtomicU32| bits.load(Acquire) & 1 << leg != 0;
        let name = &self.legs[leg].name;
        let mut text = match (has(dead), has(returning)) {
            (true, _) => format!("{name} is not used: {}", self.legs[leg].failed_at()),
            (false, true) => format!("{name} is being resynchronised, as it missed writes"),
            _ => return None,
        };
        if has(recorded) {
            let _ = write!(text, "; recorded in {}", self.log_name);
        } else if has(dead) && leg == self.primary() {
            text.push_str("; no other leg has all data, so writes fail until the next table is loaded");
        } else if self.log_device.is_none() {
            text.push_str(
                "; not recorded, as the log is in memory (before a restart put a leg with all data first)",
            );
        } else if self.has_log_failed() {
            let _ = write!(text, "; not recorded, as log {} failed, so writes fail", self.log_name);
        }
        Some(text)
    }

    /// Returns the lines of `show` about legs that are not used, with the reasons.
    pub(super) fn describe_legs(&self) -> Vec<String> {
        (0..self.legs.len()).filter_map(|leg| self.describe_leg(leg)).collect()
    }

    /// Returns messages about changes since the last call, for the log of the process.
    pub(super) fn notices(&self) -> Vec<String> {
        let LegSets { dead, recorded, returning, reported, .. } = &self.leg_sets;
        let now = [dead, recorded, returning].map(|bits| bits.load(Acquire));
        let before = std::mem::replace(&mut *reported.lock().unwrap_or_else(PoisonError::into_inner), now);
        let changed = (0..3).fold(0, |changed, at| changed | (before[at] ^ now[at]));
        let changed = (0..self.legs.len()).filter(|leg| changed & 1 << leg != 0);
        let describe = |leg| {
            self.describe_leg(leg)
                .unwrap_or_else(|| format!("{} is in use again: it has all writes", self.legs[leg].name))
        };
        changed.map(describe).collect()
    }
}
