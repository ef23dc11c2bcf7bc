//! An origin and its snapshots, with these invariants: a valid snapshot shows the origin's content of the
//! time of its creation and later writes to the snapshot, and the origin works whatever happens to a store.
//!
//! Stores begin with remains of an older one. A lost store must report that after a power cut, or be correct,
//! also where its header could not be written: then the origin fails writes.

use super::machine::{Machine, Outcomes, Swap};
use crate::simulation::seeded_fault::SeededFault;
use crate::simulation::{Outcome, Scenario};
use block::{Bytes, Sectors};
use sim::{Faults, Model, Rng, SECTOR_LEN, Tracer};
use std::fmt::Write as _;

/// Requests of one run, unless the scenario says otherwise.
const REQUESTS: u64 = 200;
/// The origin's disk, and its role.
const ORIGIN: usize = 0;

/// A place for a snapshot: its store's disk is this number plus one.
#[derive(Clone, Debug)]
struct Store {
    chunk: Sectors,
    keeping: &'static str,
    features: &'static str,
    len: Sectors,
}

/// The setup of a run.
#[derive(Clone, Debug)]
pub(super) struct Plan {
    sectors: Sectors,
    stores: Vec<Store>,
    /// Disks fail at times.
    troubled: bool,
}

impl Plan {
    pub(super) fn random(rng: &mut Rng, scenario: Scenario) -> Plan {
        let most = *rng.pick(&[12, 48]);
        let sectors = Sectors(rng.between(4, most) * 8 + rng.below(2) * rng.below(8));
        let breaks = scenario.seeded_fault.is_some();
        let mut stores = Vec::new();
        for _ in 0..rng.between(1, 2) {
            let chunks: &[u64] = if most == 12 { &[1, 1, 2, 8, 16] } else { &[2, 8, 8, 16, 64] };
            let chunk = *rng.pick(chunks);
            let pairs = chunk * 32;
            let chunks = sectors.0.div_ceil(chunk);
            let all = 2 + chunks + chunks / pairs + 4;
            let lacks = if breaks { 400 } else { 300 };
            let len = if rng.chance(lacks) { rng.between(2, all) } else { all };
            stores.push(Store {
                chunk: Sectors(chunk),
                keeping: if breaks { "P" } else { rng.pick::<&str>(&["P", "P", "P", "PO", "N"]) },
                features: rng.pick::<&str>(&["", "", " 1 discard_zeroes_cow"]),
                len: Sectors(len * chunk + rng.below(chunk)),
            });
        }
        let troubled = match scenario.seeded_fault {
            None => rng.chance(400),
            Some(seeded_fault) => seeded_fault == SeededFault::UnheededHeader,
        };
        Plan { sectors, stores, troubled }
    }

    pub(super) fn describe(&self) -> String {
        let mut text = format!("snapshot-origin of {} sectors", self.sectors.0);
        for Store { chunk, keeping, features, len } in &self.stores {
            let _ = write!(text, "; snapshot {keeping} {}{features} on {} sectors", chunk.0, len.0);
        }
        text + if self.troubled { "; troubled" } else { "" }
    }
}

pub(super) struct World {
    machine: Machine,
    plan: Plan,
    /// A store whose creation was interrupted when the machine went down.
    half_made: Option<usize>,
    /// A disk has faults.
    is_troubled: bool,
}

/// The state of a snapshot when the machine went down.
struct Before {
    store: usize,
    status: String,
    model: Model,
}

impl World {
    pub(super) fn new(mut rng: Rng, plan: Plan, scenario: Scenario, tracer: Tracer) -> Result<World, String> {
        let mut lens = vec![plan.sectors.bytes()];
        lens.extend(plan.stores.iter().map(|store| store.len.bytes()));
        let mut machine = Machine::new(&mut rng, scenario, &lens, tracer);
        let mut model = Model::new(plan.sectors, false);
        machine.fill(&mut model, &[(ORIGIN, Bytes::ZERO)]);
        for (number, store) in plan.stores.iter().enumerate() {
            let old = leavings(&mut machine.rng, plan.sectors.0.div_ceil(store.chunk.0), store.len.bytes());
            machine.put(number + 1, Bytes::ZERO, &old);
        }
        let mut world = World { machine, plan, half_made: None, is_troubled: false };
        for store in 0..world.plan.stores.len() {
            world.attach(store, model.copy())?;
        }
        world.show_origin(model)?;
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
                3..=4 => self.drain()?,
                5..=6 => self.reload()?,
                7..=8 => self.add()?,
                9 => self.drop_one()?,
                _ if self.plan.troubled => self.trouble(),
                _ => {}
            }
        }
        self.drain()?;
        while self.machine.has_background_work() {
            self.machine.run_background_work()?;
            if self.machine.is_cut {
                self.go_down(true)?;
            }
        }
        self.machine.check_idle()?;
        self.go_down(true)?;
        self.machine.check_idle()?;
        Ok(self.machine.outcome)
    }

    fn words(&self, store: usize) -> String {
        let Store { chunk, keeping, features, .. } = &self.plan.stores[store];
        format!("d{ORIGIN} d{} {keeping} {}{features}", store + 1, chunk.0)
    }

    /// Attaches a snapshot on that store.
    fn attach(&mut self, store: usize, model: Model) -> Outcomes {
        let words = self.words(store);
        let made = self.machine.make("snapshot", &words, self.plan.sectors);
        self.machine.check()?;
        if self.machine.is_cut {
            self.half_made = Some(store);
            return Ok(());
        }
        let made = made.map_err(|why| format!("snapshot {words}: {why}"))?;
        let shown = self.machine.show(store + 1, made, model);
        let number = shown.map_err(|why| format!("snapshot {words}: {why}"))?;
        self.machine.shows[number].rules.can_refuse = true;
        Ok(())
    }

    fn show_origin(&mut self, model: Model) -> Outcomes {
        let made = self.machine.make("snapshot-origin", &format!("d{ORIGIN}"), self.plan.sectors);
        let shown = made.and_then(|made| self.machine.show(ORIGIN, made, model));
        shown.map(drop).map_err(|why| format!("snapshot-origin: {why}"))
    }

    fn load(&mut self, count: u64) -> Outcomes {
        self.machine.load = count;
        self.machine.cuts = true;
        while self.machine.load > 0 {
            self.machine.turn()?;
            self.machine.run_background_work()?;
            if self.machine.is_cut {
                return self.go_down(true);
            }
        }
        Ok(())
    }

    fn drain(&mut self) -> Outcomes {
        self.machine.load = 0;
        while self.machine.is_busy() {
            self.machine.turn()?;
            self.machine.run_background_work()?;
            if self.machine.is_cut {
                return self.go_down(true);
            }
        }
        Ok(())
    }

    /// Loads the same table again, or the origin's with the present snapshots.
    fn reload(&mut self) -> Outcomes {
        let number = self.machine.rng.below(self.machine.shows.len() as u64) as usize;
        self.machine.load = self.machine.rng.below(20);
        self.reload_one(number)
    }

    fn reload_one(&mut self, number: usize) -> Outcomes {
        let (kind, words) = match self.machine.shows[number].role {
            ORIGIN => ("snapshot-origin", format!("d{ORIGIN}")),
            role => ("snapshot", self.words(role - 1)),
        };
        let made = self.machine.make(kind, &words, self.plan.sectors);
        self.machine.check()?;
        if !self.machine.is_cut {
            let made = made.map_err(|why| format!("{kind} {words}: {why}"))?;
            if let Swap::Refused(why) = self.machine.swap(number, made)? {
                return Err(format!("a table cannot be put to use: {why}"));
            }
        }
        if self.machine.is_cut { self.go_down(true) } else { Ok(()) }
    }

    /// Creates another snapshot of the origin's present content.
    fn add(&mut self) -> Outcomes {
        let free = (0..self.plan.stores.len()).find(|store| self.machine.find(store + 1).is_none());
        let Some(store) = free else { return Ok(()) };
        self.drain()?;
        if self.is_troubled || self.machine.find(store + 1).is_some() {
            return Ok(());
        }
        if self.half_made != Some(store) {
            // As an administrator empties a store: only its header is cleared.
            self.machine.put(store + 1, Bytes::ZERO, &[0; SECTOR_LEN]);
        }
        self.half_made = None;
        self.machine.set_calm(true);
        let origin = self.machine.find(ORIGIN).ok_or("there is always an origin")?;
        if !self.machine.flush(origin)? {
            self.machine.set_calm(false);
            return Ok(());
        }
        self.machine.settle(origin, true)?;
        let model = self.machine.shows[origin].model.copy();
        self.machine.set_calm(false);
        self.attach(store, model)?;
        if self.machine.is_cut {
            return self.go_down(true);
        }
        // Without this reload the snapshot is invalid with the next write.
        if self.machine.rng.chance(850) { self.reload_one(origin) } else { Ok(()) }
    }

    fn drop_one(&mut self) -> Outcomes {
        let snapshots = self.machine.shows.iter().filter(|show| show.role != ORIGIN);
        let roles: Vec<usize> = snapshots.map(|show| show.role).collect();
        if roles.is_empty() {
            return Ok(());
        }
        let role = *self.machine.rng.pick(&roles);
        self.drain()?;
        if let Some(number) = self.machine.find(role) {
            self.machine.remove(number);
        }
        Ok(())
    }

    /// Gives a disk faults until the machine is restarted.
    fn trouble(&mut self) {
        let fails_stores = self.machine.seeded_fault == Some(SeededFault::UnheededHeader);
        let rng = &mut self.machine.rng;
        let disk = rng.between(fails_stores.into(), self.plan.stores.len() as u64) as usize;
        let faults = Faults {
            // 1000: no request succeeds, so even the header of a lost store cannot be written.
            io_error: if fails_stores { 1000 } else { *rng.pick(&[0, 50, 300, 1000]) },
            again: *rng.pick(&[0, 100]),
            no_space: *rng.pick(&[0, 100]),
            sync_error: *rng.pick(&[0, 0, 300]),
            ..Faults::NONE
        };
        self.machine.set_faults(disk, Some(faults));
        self.is_troubled = true;
        // A store's faults do not affect the origin.
        for show in self.machine.shows.iter_mut().filter(|show| disk == ORIGIN || show.role == disk) {
            show.rules.can_fail = true;
        }
    }

    /// Ends the machine and starts it again.
    fn go_down(&mut self, power: bool) -> Outcomes {
        // Data that can be read but will never be stable is only lost with the power.
        let power = power || self.machine.ring.has_failed_disk();
        let (mut origin, mut snapshots) = (None, Vec::new());
        for show in self.machine.go_down(power) {
            let status = show.status();
            match show.role {
                ORIGIN => origin = Some(show.model),
                role => snapshots.push(Before { store: role - 1, status, model: show.model }),
            }
        }
        self.machine.load = 0;
        (self.machine.cuts, self.is_troubled) = (false, false);
        self.machine.set_calm(true);
        for before in snapshots {
            self.come_back(before)?;
        }
        self.show_origin(origin.ok_or("there is always an origin")?)?;
        for number in 0..self.machine.shows.len() {
            self.machine.settle(number, power)?;
        }
        self.machine.set_calm(false);
        self.machine.cuts = true;
        Ok(())
    }

    fn come_back(&mut self, before: Before) -> Outcomes {
        let Before { store, status, model } = before;
        if self.plan.stores[store].keeping == "N" {
            return Ok(());
        }
        let words = self.words(store);
        let made = self.machine.make("snapshot", &words, self.plan.sectors);
        let made = made.map_err(|why| format!("snapshot {words}, with status {status}: {why}"))?;
        let shown = self.machine.show(store + 1, made, model);
        let number = shown.map_err(|why| format!("snapshot {words}: {why}"))?;
        self.machine.shows[number].rules.can_refuse = true;
        let now = self.machine.shows[number].status();
        if now == "Invalid" {
            self.machine.remove(number);
            if status != "Invalid" {
                return Err(format!(
                    "snapshot {words} had status {status}, and has {now} when it is loaded again"
                ));
            }
        }
        Ok(())
    }
}

/// Returns remains of an older store without its header: exceptions that are not those of the new one.
fn leavings(rng: &mut Rng, chunks: u64, len: Bytes) -> Vec<u8> {
    let mut bytes = vec![0; len.0 as usize];
    for pair in bytes[SECTOR_LEN..].chunks_exact_mut(16) {
        pair[..8].copy_from_slice(&rng.below(chunks).to_le_bytes());
        pair[8..].copy_from_slice(&rng.between(2, chunks + 2).to_le_bytes());
    }
    bytes
}
