//! A mirror of two or three disks, with these invariants: an acknowledged write is read from each of its
//! devices, requests do not fail because of one device, regions without a mark are equal on all devices after
//! a crash, and all devices are equal when the mirror is in sync.
//!
//! Its administrator follows docs/targets/mirror.md: the next table has `sync` where the log had failed or a
//! device was missing meanwhile. A restart uses the same table, whichever device failed before; where the log
//! has a record of that, the next table may name the devices in any order.

use super::machine::{Machine, Outcomes, Swap};
use crate::simulation::{Outcome, Scenario};
use block::{Bytes, Sectors};
use sim::{Faults, Model, Rng, SECTOR_LEN, Tracer};

/// Requests of one run, unless the scenario says otherwise.
const REQUESTS: u64 = 200;
/// Offset of the bits in a log.
const BITS_AT: u64 = 1024;
/// Offset of the record of failed legs in a log.
const RECORD_AT: u64 = 16;
/// A pause without writes that is long enough for marks to be cleared.
const QUIET_NS: u64 = 300_000_000;
/// Interval and duration of retries of a failed copy, until a device is blamed.
const AGAIN_NS: u64 = 1_000_000_000;
const AGAIN_MAX: u64 = 61;

/// The setup of a run.
#[derive(Clone, Debug)]
pub(super) struct Plan {
    sectors: Sectors,
    region: Sectors,
    /// Offset of the device on each of its disks.
    starts: Vec<Sectors>,
    /// There is an additional disk for the log.
    has_log: bool,
    features: &'static str,
    /// Any disk may have faults, whatever the others have: requests may fail, and acknowledged data must be
    /// present.
    harsh: bool,
}

impl Plan {
    pub(super) fn random(rng: &mut Rng, scenario: Scenario) -> Plan {
        let sectors = Sectors(rng.between(8, 64) * 8 + rng.below(2) * rng.below(8));
        let starts = (0..rng.between(2, 3)).map(|_| Sectors(rng.below(2) * rng.below(20))).collect();
        let mut plan = Plan {
            sectors,
            region: Sectors(*rng.pick(&[8, 8, 16, 64])),
            starts,
            has_log: scenario.seeded_fault.is_some() || rng.chance(600),
            features: rng.pick::<&str>(&["", " 1 handle_errors", " 2 handle_errors keep_log"]),
            harsh: false,
        };
        plan.harsh = plan.has_log && rng.chance(300);
        plan
    }

    pub(super) fn describe(&self) -> String {
        let Plan { sectors, region, starts, has_log, features, harsh } = self;
        let (log, harsh) = (if *has_log { "disk" } else { "core" }, if *harsh { ", harsh" } else { "" });
        format!("mirror of {} sectors, {log} {}, at {starts:?}{features}{harsh}", sectors.0, region.0)
    }

    fn legs(&self) -> usize {
        self.starts.len()
    }

    /// Returns the log's disk.
    fn log(&self) -> Option<usize> {
        self.has_log.then_some(self.legs())
    }
}

/// The state that a mirror reports.
struct MirrorState {
    /// Its disks with all data, and the others.
    good: Vec<usize>,
    bad: Vec<usize>,
    in_sync: bool,
    log_failed: bool,
}

pub(super) struct World {
    machine: Machine,
    plan: Plan,
    /// Its disks in the order of the table.
    order: Vec<usize>,
    /// The active table: its disks in order, and its arguments.
    table: (Vec<usize>, String),
    /// The disk with faults.
    troubled: Option<usize>,
    /// The next table must copy everything.
    copies_all: bool,
}

impl World {
    pub(super) fn new(mut rng: Rng, plan: Plan, scenario: Scenario, tracer: Tracer) -> Result<World, String> {
        let len = |start: &Sectors| Sectors(start.0 + plan.sectors.0).bytes();
        let mut lens: Vec<Bytes> = plan.starts.iter().map(len).collect();
        lens.extend(plan.log().map(|_| Bytes(8192)));
        let mut machine = Machine::new(&mut rng, scenario, &lens, tracer);
        let mut model = Model::new(plan.sectors, false);
        let same = machine.rng.chance(300);
        let all: Vec<(usize, Bytes)> = plan.starts.iter().map(|start| start.bytes()).enumerate().collect();
        machine.fill(&mut model, if same { &all } else { &all[..1] });
        for &(leg, start) in all[1..].iter().filter(|_| !same) {
            machine.put(leg, start, &vec![0x55; (plan.sectors.0 << 9) as usize]);
        }
        let order = (0..plan.legs()).collect();
        let table = (Vec::new(), String::new());
        let mut world = World { machine, plan, order, table, troubled: None, copies_all: !same };
        let words = world.words(same.then_some("nosync"));
        world.show(&words, model)?;
        world.machine.set_calm(false);
        Ok(world)
    }

    pub(super) fn run(mut self, scenario: Scenario) -> Result<Outcome, String> {
        let mut left = if scenario.requests == 0 { REQUESTS } else { scenario.requests };
        while left > 0 {
            let burst = self.machine.rng.between(1, 60).min(left);
            self.load(burst)?;
            left -= burst;
            match self.machine.rng.below(12) {
                0..=1 => self.go_down(true)?,
                2 => self.go_down(false)?,
                3 => self.drain()?,
                4..=5 => self.rest()?,
                6 => self.reload()?,
                _ => self.trouble(),
            }
        }
        self.rest()?;
        self.machine.check_idle()?;
        self.go_down(true)?;
        self.rest()?;
        self.machine.check_idle()?;
        Ok(self.machine.outcome)
    }

    /// Returns a line for its disks in their present order.
    fn words(&self, sync: Option<&str>) -> String {
        let Plan { region, starts, features, .. } = &self.plan;
        let log = self.plan.log();
        let mut args: Vec<String> = log.map(|disk| format!("d{disk}")).into_iter().collect();
        args.push(region.0.to_string());
        args.extend(sync.map(str::to_owned));
        let legs: Vec<String> = self.order.iter().map(|&leg| format!("d{leg} {}", starts[leg].0)).collect();
        let kind = if log.is_some() { "disk" } else { "core" };
        let (count, args) = (args.len(), args.join(" "));
        format!("{kind} {count} {args} {} {}{features}", legs.len(), legs.join(" "))
    }

    fn show(&mut self, words: &str, model: Model) -> Outcomes {
        let made = self.machine.make("mirror", words, self.plan.sectors);
        let shown = made.and_then(|made| self.machine.show(0, made, model));
        let number = shown.map_err(|why| format!("mirror {words}: {why}"))?;
        self.machine.shows[number].rules.can_refuse = true;
        self.machine.shows[number].rules.can_fail = self.plan.harsh;
        self.table = (self.order.clone(), words.to_owned());
        // A mirror does not promise more: of two concurrent writes either may be the last, on each of its
        // devices.
        self.machine.shows[number].is_orderly = true;
        self.copies_all = false;
        Ok(())
    }

    fn health(&self) -> Result<MirrorState, String> {
        let status = self.machine.shows[0].status();
        let words: Vec<&str> = status.split(' ').collect();
        let legs = self.order.len();
        let (Some(progress), Some(letters)) = (words.get(legs + 1), words.get(legs + 3)) else {
            return Err(format!("{status:?} is no status"));
        };
        let (synced, all) = progress.split_once('/').unwrap_or_default();
        let is_good = |at: &usize| letters.as_bytes().get(*at) == Some(&b'A');
        let (good, bad): (Vec<usize>, Vec<usize>) = (0..legs).partition(is_good);
        Ok(MirrorState {
            good: good.into_iter().map(|at| self.order[at]).collect(),
            bad: bad.into_iter().map(|at| self.order[at]).collect(),
            in_sync: synced == all,
            log_failed: words.last() == Some(&"D"),
        })
    }

    /// Executes a step of the machine, and at times checks the mirror's state. Returns false if the machine
    /// went down.
    fn step(&mut self) -> Result<bool, String> {
        self.machine.turn()?;
        self.machine.run_background_work()?;
        if self.machine.is_cut {
            return self.go_down(true).map(|()| false);
        }
        if self.machine.rng.chance(20) {
            let MirrorState { bad, log_failed, .. } = self.health()?;
            if !bad.is_empty() || log_failed {
                return self.reload_after_failure();
            }
        }
        Ok(true)
    }

    fn load(&mut self, count: u64) -> Outcomes {
        self.machine.load = count;
        self.machine.cuts = true;
        while self.machine.load > 0 && self.step()? {}
        Ok(())
    }

    fn drain(&mut self) -> Outcomes {
        self.machine.load = 0;
        while self.machine.is_busy() && self.step()? {}
        Ok(())
    }

    /// Leaves it idle for a while: then all is copied, marks are cleared, and all disks are equal.
    fn rest(&mut self) -> Outcomes {
        self.drain()?;
        self.machine.ring.pass(QUIET_NS);
        while self.machine.has_background_work() && self.step()? {}
        for _ in 0..AGAIN_MAX {
            self.machine.ring.pass(AGAIN_NS);
            while self.machine.has_background_work() && self.step()? {}
        }
        let MirrorState { in_sync, bad, .. } = self.health()?;
        if in_sync && bad.is_empty() && !self.machine.is_busy() {
            self.compare(0, self.plan.sectors.0, "all is in sync")?;
        }
        Ok(())
    }

    /// Checks that sectors are equal on all disks of the table.
    fn compare(&self, first: u64, count: u64, when: &str) -> Outcomes {
        let content = |&leg: &usize| {
            let at = Sectors(self.plan.starts[leg].0 + first).bytes();
            self.machine.content(leg, at, count << 9)
        };
        let contents: Vec<Vec<u8>> = self.order.iter().map(content).collect();
        for other in &contents[1..] {
            let pairs = contents[0].chunks(SECTOR_LEN).zip(other.chunks(SECTOR_LEN));
            if let Some(sector) = (first..).zip(pairs).find(|(_, (a, b))| a != b).map(|found| found.0) {
                return Err(format!("sector {sector} differs among disks {:?} although {when}", self.order));
            }
        }
        Ok(())
    }

    /// Gives one of the disks faults for a while: one that is not needed, unless any result is allowed.
    fn trouble(&mut self) {
        let Ok(MirrorState { in_sync, bad, log_failed, .. }) = self.health() else { return };
        let is_degraded = !bad.is_empty() || log_failed;
        if self.troubled.is_some() || is_degraded && !self.plan.harsh || self.machine.shows.is_empty() {
            return;
        }
        if self.has_record() && !in_sync && !self.plan.harsh {
            // The log determines the source of the copy.
            return;
        }
        // Until the others have all data, the first must not fail.
        let spared = usize::from(!in_sync && !self.plan.harsh);
        let mut disks: Vec<usize> = self.order[spared..].to_vec();
        disks.extend(self.plan.log());
        let disk = *self.machine.rng.pick(&disks);
        // Data lost by a failed sync of the only complete disk cannot be restored.
        let is_needed = is_degraded || !in_sync;
        let rng = &mut self.machine.rng;
        let faults = Faults {
            io_error: *rng.pick(&[50, 300, 1000]),
            again: *rng.pick(&[0, 100]),
            no_space: *rng.pick(&[0, 100]),
            sync_error: if is_needed { 0 } else { *rng.pick(&[0, 300]) },
            ..Faults::NONE
        };
        self.machine.set_faults(disk, Some(faults));
        self.troubled = Some(disk);
        // Without a log on disk a failure of the first leg, and with `nosync` of any, must reach the client.
        let keeps_log = self.plan.features.contains("keep_log");
        let is_told = match self.plan.log() {
            Some(log) => disk == log && keeps_log,
            None => !keeps_log && (disk == self.order[0] || self.table.1.contains("nosync")),
        };
        self.machine.shows[0].rules.can_fail |= is_told;
    }

    fn shuffle(&mut self) {
        let rng = &mut self.machine.rng;
        self.order.sort_by_cached_key(|_| rng.word());
    }

    /// Returns whether the log on disk records a failed leg.
    fn has_record(&self) -> bool {
        self.plan.log().is_some_and(|log| self.machine.content(log, Bytes(RECORD_AT), 8) != [0; 8])
    }

    /// Loads the next table after a failure. Returns false if the machine went down.
    fn reload_after_failure(&mut self) -> Result<bool, String> {
        let MirrorState { good, bad, log_failed, in_sync } = self.health()?;
        if good.is_empty() && !self.plan.harsh {
            return Err("all disks have failed, though one had troubles at most".to_owned());
        }
        let waits = !log_failed && !self.plan.features.ends_with("handle_errors");
        if waits && self.machine.rng.chance(500) {
            // It continues without the leg.
            return Ok(true);
        }
        if let Some(disk) = self.troubled.filter(|_| self.machine.rng.chance(600)) {
            self.machine.set_faults(disk, None);
            self.machine.plug_again(disk);
            self.troubled = None;
        }
        self.copies_all |= log_failed || self.has_record() && self.machine.rng.chance(500);
        match self.machine.rng.below(3) {
            // Any order is valid: data missing on a leg was not acknowledged, unless that is recorded.
            _ if self.plan.harsh && !self.has_record() && !in_sync => {}
            0 if self.plan.has_log && (self.has_record() || self.troubled.is_none()) => {}
            1 if self.has_record() => self.shuffle(),
            _ => {
                self.order = [good, bad].concat();
                if self.order.len() > 2 && self.machine.rng.chance(300) {
                    self.order.truncate(2);
                }
            }
        }
        self.put_to_use()
    }

    /// Loads a table for the disks in their present order, and for those that were missing.
    fn reload(&mut self) -> Outcomes {
        let MirrorState { in_sync, bad, .. } = self.health()?;
        if self.order.len() < self.plan.legs() && self.troubled.is_none() {
            let missing = (0..self.plan.legs()).filter(|leg| !self.order.contains(leg));
            self.order.extend(missing.collect::<Vec<_>>());
            self.copies_all = true;
        } else if in_sync && bad.is_empty() && self.troubled.is_none() {
            self.order.rotate_left(1);
        }
        // A disk with known faults is never the source of a copy.
        let unrecorded = !self.has_record() && (self.troubled.is_some() || !self.plan.has_log);
        if unrecorded && in_sync {
            self.order.sort_by_key(|&leg| self.troubled == Some(leg));
        } else if unrecorded && !self.plan.harsh {
            self.order.sort_by_key(|leg| bad.contains(leg));
        }
        self.machine.load = self.machine.rng.below(20);
        self.put_to_use().map(drop)
    }

    fn put_to_use(&mut self) -> Result<bool, String> {
        let words = self.words(self.copies_all.then_some("sync"));
        let made = self.machine.make("mirror", &words, self.plan.sectors);
        let made = made.map_err(|why| format!("mirror {words}: {why}"))?;
        match self.machine.swap(0, made)? {
            Swap::Done => {
                self.table = (self.order.clone(), words);
                self.copies_all = false;
                Ok(true)
            }
            Swap::Cut => self.go_down(true).map(|()| false),
            Swap::Refused(why) if self.troubled == self.plan.log() && self.plan.has_log => {
                // An unreadable log is repaired first.
                self.machine.note("refused", &[]);
                let log = self.troubled.take().ok_or(why)?;
                self.machine.set_faults(log, None);
                self.machine.plug_again(log);
                self.order.clone_from(&self.table.0);
                Ok(true)
            }
            Swap::Refused(why) if self.plan.harsh && why.contains("no leg of this table") => {
                self.order.clone_from(&self.table.0);
                Ok(true)
            }
            Swap::Refused(why) => Err(format!("mirror {words} is refused: {why}")),
        }
    }

    /// Ends the machine and starts it again.
    fn go_down(&mut self, power: bool) -> Outcomes {
        // Data that can be read but will never be stable is only lost with the power.
        let power = power || self.machine.ring.has_failed_disk();
        let MirrorState { good, bad, log_failed, in_sync } = self.health()?;
        let model = self.machine.go_down(power).pop().ok_or("there is always a mirror")?.model;
        (self.troubled, self.machine.load, self.machine.cuts) = (None, 0, false);
        self.machine.set_calm(true);
        self.copies_all |= log_failed;
        self.order.clone_from(&self.table.0);
        let mut words = self.table.1.clone();
        let any_order = self.has_record() || in_sync && bad.is_empty() && !log_failed;
        if !self.plan.has_log && self.plan.features.contains("keep_log") {
            // As configured, it acknowledged data that only some disks have.
            self.order = [good, bad].concat();
        } else if self.plan.has_log && any_order && self.machine.rng.chance(300) {
            self.shuffle();
            words = self.words(None);
        }
        // `nosync` was true when the table was loaded.
        if !self.plan.has_log || self.copies_all || words.contains("nosync") {
            words = self.words(self.copies_all.then_some("sync"));
        }
        if !self.copies_all {
            self.check_log()?;
        }
        self.show(&words, model)?;
        self.machine.settle(0, power)?;
        self.machine.set_calm(false);
        self.machine.cuts = true;
        Ok(())
    }

    /// Checks that regions without a mark in the log are equal on all disks.
    fn check_log(&self) -> Outcomes {
        let Some(log) = self.plan.log() else { return Ok(()) };
        let regions = self.plan.sectors.0.div_ceil(self.plan.region.0);
        let bits = self.machine.content(log, Bytes(BITS_AT), regions.div_ceil(8));
        for region in (0..regions).filter(|region| bits[(region / 8) as usize] >> (region % 8) & 1 == 1) {
            let first = region * self.plan.region.0;
            let count = self.plan.region.0.min(self.plan.sectors.0 - first);
            self.compare(first, count, "no mark says so")?;
        }
        Ok(())
    }
}
