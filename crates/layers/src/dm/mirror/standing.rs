//! Which legs of a mirror have what was acknowledged: what fails them, what is recorded of that, what a restart believes
//! ([ADR 34](../../../../../docs/adr/0034-a-mirror-records-legs-that-failed.md)).
//!
//! A leg that failed gets no writes any more, so from then on a write or flush may be acknowledged only when a restart
//! with the same table would not take that leg's data for right: when the log says that it failed, or when everything is
//! copied from another leg.
//!
//! *Invariant:* a leg whose bit is in `recorded` is a failed one in the log on disk.
//! *Invariant:* the primary is alive, unless it failed while it alone had all; then nothing is acknowledged.

use super::super::TargetError;
use super::record::{AT, Entry, Key, Record, Standing};
use super::shared::Shared;
use block::Sectors;
use std::fmt::Write as _;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use std::sync::{Mutex, PoisonError};

/// What was seen of a device, as the kernel's bits have it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Ill {
    Write = 1,
    Flush = 2,
    Sync = 4,
    Read = 8,
}

/// A device of the mirror.
#[derive(Debug)]
pub(super) struct Leg {
    /// The number of its device.
    pub(super) device: usize,
    pub(super) start: Sectors,
    /// As the table names it.
    name: String,
    key: Key,
    ills: AtomicU32,
}

impl Leg {
    pub(super) fn new(device: usize, start: Sectors, name: &str, identity: &str) -> Leg {
        let key = Key::new(name, identity, start.0);
        Leg { device, start, name: name.to_owned(), key, ills: AtomicU32::new(0) }
    }

    pub(super) fn is_alive(&self) -> bool {
        self.ills.load(Acquire) == 0
    }

    /// The kernel's letter for it.
    pub(super) fn letter(&self) -> char {
        let ills = self.ills.load(Acquire);
        let has = |ill: Ill| ills & ill as u32 != 0;
        match ills {
            0 => 'A',
            _ if has(Ill::Flush) => 'F',
            _ if has(Ill::Write) => 'D',
            _ if has(Ill::Sync) => 'S',
            _ => 'R',
        }
    }

    /// What it failed first of, in words.
    fn failed_at(&self) -> &'static str {
        match self.letter() {
            'F' => "a flush failed",
            'D' => "it missed writes",
            'S' => "it could not be copied",
            _ => "a read failed",
        }
    }
}

/// Legs as bits, by what is known of them.
#[derive(Debug, Default)]
pub(super) struct Standings {
    /// Not alive.
    dead: AtomicU32,
    /// Failed ones, in the log on disk.
    recorded: AtomicU32,
    /// Those of the log that is being written.
    going: AtomicU32,
    /// Failed ones that everything is copied to, as the table asks for.
    returning: AtomicU32,
    /// Recorded legs that are not in the table.
    absent: Mutex<Vec<Entry>>,
    /// Held while a leg fails: of two at once the second one sees what became of the first.
    failing: Mutex<()>,
    /// What was reported last: dead, recorded and returning legs.
    reported: Mutex<[u32; 3]>,
}

/// Whether a write may be acknowledged.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Grant {
    Yes,
    /// When the log has been written.
    Recorded,
    /// A restart would take a leg for right that lacks it.
    No,
}

impl Shared {
    /// Whether all that was written may be acknowledged. Reads two numbers while all legs are alive.
    #[inline]
    pub(super) fn grant(&self) -> Grant {
        let dead = self.standings.dead.load(Acquire);
        if dead & !self.standings.recorded.load(Acquire) == 0 { Grant::Yes } else { self.grant_without(dead) }
    }

    #[cold]
    fn grant_without(&self, dead: u32) -> Grant {
        if dead & 1 << self.primary() != 0 {
            return Grant::No;
        }
        if self.log_device.is_some() {
            return if self.has_log_failed() { Grant::No } else { Grant::Recorded };
        }
        // After a restart everything is copied from the first leg, unless the table says that nothing need be.
        let first_has_all = dead & 1 == 0 && self.log.sync != Some(false);
        if first_has_all || self.keeps_log { Grant::Yes } else { Grant::No }
    }

    /// Failed legs, as they are to be recorded. A primary that failed while it alone had all is the one to be copied from
    /// after a restart as well, and nothing was acknowledged since.
    fn to_record(&self) -> u32 {
        let Standings { dead, returning, .. } = &self.standings;
        let dead = dead.load(Acquire);
        (dead | returning.load(Acquire)) & !(1 << self.primary())
    }

    /// The record as it is to be on disk. The log is claimed.
    pub(super) fn encode_record(&self, into: &mut [u8]) {
        let failed = self.to_record();
        self.standings.going.store(failed, Relaxed);
        let absent = self.standings.absent.lock().unwrap_or_else(PoisonError::into_inner);
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

    /// The log was written.
    pub(super) fn record_ends(&self) {
        self.standings.recorded.store(self.standings.going.load(Relaxed), Release);
    }

    /// Whether a leg failed and the log does not say so, or says so of one that has all again.
    pub(super) fn wants_record(&self) -> bool {
        self.to_record() != self.standings.recorded.load(Acquire)
    }

    /// Begin with what a log says of the legs.
    ///
    /// # Errors
    /// Nobody knows which leg has all: the table is not to be used.
    pub(super) fn take_record(&self, log: &[u8]) -> Result<(), TargetError> {
        let nothing = [0; AT.end - AT.start];
        let record = Record::decode(if Shared::is_log(log) { &log[AT] } else { &nothing }).map_err(|()| {
            self.refused("its record of failed legs is damaged, so none of them is known to be right")
        })?;
        let keys: Vec<Key> = self.legs.iter().map(|leg| leg.key).collect();
        let standing = |key: &Key| match record.0.as_slice() {
            [] => Standing::Good,
            _ => record.standing(*key),
        };
        let standings: Vec<Standing> = keys.iter().map(standing).collect();
        let source = match record.0.iter().any(|entry| entry.source) {
            true => standings.iter().position(|standing| *standing == Standing::Source),
            false => standings.iter().position(|standing| *standing == Standing::Good),
        };
        let Some(source) = source else {
            return Err(
                self.refused("none of the legs of this table is recorded as the one that has all writes")
            );
        };
        let bits = |what: fn(Standing) -> bool| {
            let bit = |(number, standing): (usize, &Standing)| u32::from(what(*standing)) << number;
            standings.iter().enumerate().map(bit).fold(0, |bits, bit| bits | bit)
        };
        let failed = bits(|standing| standing == Standing::Failed);
        let lacking = failed | bits(|standing| standing == Standing::Unknown);
        // `sync` asks for everything to be copied, to them as well.
        let returns = self.log.sync == Some(true);
        for (number, leg) in self.legs.iter().enumerate() {
            let is_out = lacking & 1 << number != 0 && !returns;
            leg.ills.store(if is_out { Ill::Write as u32 } else { 0 }, Release);
        }
        self.primary.store(source, Release);
        let Standings { dead, recorded, returning, absent, .. } = &self.standings;
        dead.store(if returns { 0 } else { lacking }, Release);
        returning.store(if returns { lacking } else { 0 }, Release);
        recorded.store(failed, Release);
        *absent.lock().unwrap_or_else(PoisonError::into_inner) = record.absent(&keys);
        Ok(())
    }

    /// Why a table cannot be used, and what to do about it.
    pub(super) fn refused(&self, why: &str) -> TargetError {
        let legs: Vec<&str> = self.legs.iter().map(|leg| leg.name.as_str()).collect();
        let (log, legs) = (&self.log_name, legs.join(", "));
        TargetError::of(format!(
            "log {log}: {why} (legs {legs}; give the mirror another log, and the leg that is right first)"
        ))
        .with_errno(libc::EIO)
    }

    /// A device failed something.
    pub(super) fn fail(&self, leg: usize, ill: Ill) {
        let _one_at_a_time = self.standings.failing.lock().unwrap_or_else(PoisonError::into_inner);
        // Another takes its place only if that has all. Before anyone sees that this one is dead.
        if leg == self.primary()
            && self.is_all_in_sync()
            && let Some(next) = (0..self.legs.len()).find(|&next| next != leg && self.legs[next].is_alive())
        {
            self.primary.store(next, Release);
        }
        let before = self.legs[leg].ills.fetch_or(ill as u32, AcqRel);
        self.standings.dead.fetch_or(1 << leg, AcqRel);
        if before & ill as u32 == 0 {
            self.events.fetch_add(1, Relaxed);
        }
        if ill == Ill::Flush {
            self.keep_marks();
        }
    }

    /// Everything was copied to the legs that return.
    pub(super) fn have_returned(&self) {
        self.standings.returning.store(0, Release);
    }

    pub(super) fn letters(&self) -> String {
        self.legs.iter().map(Leg::letter).collect()
    }

    /// What of each leg that is not used, or not yet trusted.
    fn told_of(&self, leg: usize) -> Option<String> {
        let Standings { dead, recorded, returning, .. } = &self.standings;
        let has = |bits: &AtomicU32| bits.load(Acquire) & 1 << leg != 0;
        let name = &self.legs[leg].name;
        let mut text = match (has(dead), has(returning)) {
            (true, _) => format!("{name} is left out: {}", self.legs[leg].failed_at()),
            (false, true) => format!("{name} is copied to, as it missed writes"),
            _ => return None,
        };
        if has(recorded) {
            let _ = write!(text, "; recorded in {}", self.log_name);
        } else if has(dead) && leg == self.primary() {
            text.push_str("; no other has all, so writes fail until the next table");
        } else if self.log_device.is_none() {
            text.push_str(
                "; nothing records that, as the log is in memory (put a device that has all first)",
            );
        } else if self.has_log_failed() {
            let _ = write!(text, "; log {} failed before that was recorded, so writes fail", self.log_name);
        }
        Some(text)
    }

    /// What `show` says: legs that are left out, and why.
    pub(super) fn told(&self) -> Vec<String> {
        (0..self.legs.len()).filter_map(|leg| self.told_of(leg)).collect()
    }

    /// What changed since it was asked last, for the log of the process.
    pub(super) fn notices(&self) -> Vec<String> {
        let Standings { dead, recorded, returning, reported, .. } = &self.standings;
        let now = [dead, recorded, returning].map(|bits| bits.load(Acquire));
        let before = std::mem::replace(&mut *reported.lock().unwrap_or_else(PoisonError::into_inner), now);
        let changed = (0..3).fold(0, |changed, at| changed | (before[at] ^ now[at]));
        let changed = (0..self.legs.len()).filter(|leg| changed & 1 << leg != 0);
        let tell = |leg| {
            self.told_of(leg)
                .unwrap_or_else(|| format!("{} is in use: it has all writes", self.legs[leg].name))
        };
        changed.map(tell).collect()
    }
}
