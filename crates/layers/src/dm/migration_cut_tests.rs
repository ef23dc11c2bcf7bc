//! Tests of moves that end at any operation of a disk: the process is killed, or the power fails.
//!
//! A run is determined by its seed: writes, zeroes, flushes and copies, then the switch as the engine makes
//! it (flush the destination, record it, write it alone), then more writes. It is repeated with a cut before
//! each of its disk operations. After a kill a disk has all writes; after a power cut any part of those since
//! its last flush is lost. The device that the record names must have every acknowledged write, or every
//! flushed one. Disks answer inline, so one request is in flight at a cut. Seeded faults show that the check
//! can fail.

use super::background::{BackgroundWork, Disks};
use super::harness::{Harness, Memory};
use super::migration::{Migration, REGION};
use block::{Bytes, Data, Flags, Op, Request, Sectors, Status as End};
use queue::{Nanos, Ring};

const SECTOR: usize = 512;
/// One region and a part of the next one, so that requests are split.
const LEN: Sectors = Sectors(REGION.0 / 512 + 16);
/// Long after all writes.
const LATER: Nanos = Nanos(1 << 60);
/// Requests use this many sectors at the border of the regions, so that they overlap often.
const USED: u64 = 48;
const FIRST: u64 = LEN.0 - USED;
/// More operations than a run has.
const NEVER: u64 = 1 << 40;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Cut {
    Kill,
    Power,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Fault {
    None,
    /// The destination is recorded without a flush.
    NoFlush,
    /// The destination is recorded before all regions are copied.
    NotComplete,
}

/// The values that a sector may have after a cut: the last one that a flush stored, or any written after it.
struct Model {
    allowed: Vec<Vec<u8>>,
    cut: Cut,
}

impl Model {
    fn begin(&mut self, sector: u64, sectors: u64, value: u8) {
        (sector..sector + sectors).for_each(|at| self.allowed[(at - FIRST) as usize].push(value));
    }

    /// A write is acknowledged. `stable`: with FUA.
    fn acknowledge(&mut self, sector: u64, sectors: u64, stable: bool) {
        if stable || self.cut == Cut::Kill {
            self.keep_last((sector - FIRST) as usize..(sector - FIRST + sectors) as usize);
        }
    }

    fn keep_last(&mut self, sectors: std::ops::Range<usize>) {
        for values in &mut self.allowed[sectors] {
            values.drain(..values.len() - 1);
        }
    }
}

/// One run: the load, and where it was cut.
struct Run {
    harness: Harness,
    model: Model,
    random: fastrand::Rng,
    is_recorded: bool,
}

impl Run {
    fn new(seed: u64, cut: Cut, at: u64, migration: &std::sync::Arc<Migration>) -> Run {
        let harness = Harness::of_two_disks(migration.target::<Memory>());
        harness.power_off_after(at);
        let model = Model { allowed: vec![vec![0]; USED as usize], cut };
        Run { harness, model, random: fastrand::Rng::with_seed(seed), is_recorded: false }
    }

    /// Sends a random write, zeroes or a flush to the device that moves, or afterwards to its destination.
    fn request(&mut self, value: u8) {
        if self.random.u8(..6) == 0 {
            let is_ok = match self.is_recorded {
                true => self.harness.test_disks().flush(1).is_ok(),
                false => self.send(Request::flush()),
            };
            if is_ok {
                self.model.keep_last(0..USED as usize);
            }
            return;
        }
        let sectors = self.random.u64(1..=12);
        let sector = self.random.u64(FIRST..=LEN.0 - sectors);
        let (zeroes, stable) = (self.random.u8(..5) == 0, self.random.u8(..4) == 0);
        let value = if zeroes { 0 } else { value };
        let len = sectors as usize * SECTOR;
        if !self.harness.has_power() {
            return;
        }
        self.model.begin(sector, sectors, value);
        let is_ok = if self.is_recorded {
            let mut disks = self.harness.test_disks();
            let at = Sectors(sector).bytes();
            disks.write(1, at, &vec![value; len]).is_ok() && (!stable || disks.flush(1).is_ok())
        } else {
            let op = if zeroes { Op::WriteZeroes } else { Op::Write };
            let mut req = Request::new(op, Sectors(sector).bytes(), Bytes(len as u64));
            if !zeroes {
                let segment = self.harness.ring.memory.own(len as u32);
                self.harness.ring.bytes_mut(segment).fill(value);
                req.data = Data::One(segment);
            }
            if stable {
                req.flags = Flags::FUA;
            }
            self.send(req)
        };
        if is_ok {
            self.model.acknowledge(sector, sectors, stable);
        }
    }

    /// Returns whether the request was acknowledged before the cut.
    fn send(&mut self, req: Request) -> bool {
        self.harness.submit(req);
        self.harness.drain() == [End::Ok] && self.harness.has_power()
    }

    /// Flushes and records the destination. The record is stored at once, or not at all.
    fn switch(&mut self, fault: Fault) {
        let is_flushed = fault == Fault::NoFlush || self.harness.test_disks().flush(1).is_ok();
        self.is_recorded = is_flushed && self.harness.use_power();
    }

    /// Cuts, and compares the device that a takeover uses with the model.
    fn check(mut self, at: u64) -> Result<(), String> {
        if self.model.cut == Cut::Power {
            self.harness.lose_unflushed(&mut self.random);
        }
        let device = usize::from(self.is_recorded);
        let content = self.harness.content(device, FIRST, USED as usize * SECTOR);
        for (number, (found, allowed)) in content.chunks(SECTOR).zip(&self.model.allowed).enumerate() {
            if !allowed.contains(&found[0]) || found.iter().any(|byte| *byte != found[0]) {
                let sector = FIRST + number as u64;
                return Err(format!(
                    "cut {at}, disk {device}, sector {sector}: {} is none of {allowed:?}",
                    found[0]
                ));
            }
        }
        Ok(())
    }
}

/// Runs a seed with a cut before operation `at`. Returns the number of operations of an uncut run.
fn run(seed: u64, cut: Cut, at: u64, fault: Fault) -> Result<u64, String> {
    let migration = Migration::new(LEN, "elsewhere".into(), None);
    let mut run = Run::new(seed, cut, at, &migration);
    let mut disks = run.harness.test_disks();
    for value in 1..=40 {
        // With that fault one region stays uncopied.
        let may_copy = fault != Fault::NotComplete || migration.progress().0 == Bytes(0);
        if run.random.u8(..8) == 0 && may_copy {
            migration.step(LATER, &mut disks);
        }
        run.request(value);
    }
    while fault != Fault::NotComplete && migration.is_due(LATER) {
        migration.step(LATER, &mut disks);
        run.request(41);
    }
    for value in 50..70 {
        run.request(value);
    }
    // After a cut the migration has failed, and nobody would switch.
    if fault == Fault::NotComplete || migration.is_complete() {
        run.switch(fault);
    }
    for value in 70..90 {
        run.request(value);
    }
    assert!(at < NEVER || run.is_recorded, "seed {seed}: an uncut run switches");
    let operations = run.harness.operations();
    run.check(at)?;
    Ok(operations)
}

fn cut_everywhere(seed: u64, cut: Cut, fault: Fault) -> Result<(), String> {
    let operations = run(seed, cut, NEVER, fault)?;
    assert!(operations > 50, "seed {seed}: {operations} operations are no load");
    for at in 0..operations {
        run(seed, cut, at, fault).map_err(|why| format!("seed {seed}, {cut:?}: {why}"))?;
    }
    Ok(())
}

#[test]
fn a_kill_at_any_operation_loses_no_acknowledged_write() {
    for seed in 0..2 {
        cut_everywhere(seed, Cut::Kill, Fault::None).unwrap();
    }
}

#[test]
fn a_power_cut_at_any_operation_loses_no_flushed_write() {
    for seed in 10..12 {
        cut_everywhere(seed, Cut::Power, Fault::None).unwrap();
    }
}

#[test]
fn a_switch_without_a_flush_is_found() {
    let found = (20..30).any(|seed| cut_everywhere(seed, Cut::Power, Fault::NoFlush).is_err());
    assert!(found, "the check cannot fail");
}

#[test]
fn a_switch_before_the_copy_is_complete_is_found() {
    let found = (20..30).any(|seed| cut_everywhere(seed, Cut::Kill, Fault::NotComplete).is_err());
    assert!(found, "the check cannot fail");
}
