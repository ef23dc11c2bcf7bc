//! Tests that commands wait until reservations that another server may have changed are read.

use super::client::{Client, FIRST, Options, Session, read10, unit, write10};
use super::rig::{self, Reactor};
use proto::iscsi::pdu::{TaskFunction, TaskResult};
use scsi::reservation::Reservations;
use scsi::{AptplStore, LogicalUnit};
use std::io;
use std::sync::{Arc, Mutex};
use std::time::Duration;

const GOOD: u8 = 0x00;
const BUSY: u8 = 0x08;

/// A store of another server's reservations, none of which may be relied on for long.
struct Common {
    /// Reads wait for this lock.
    gate: Mutex<()>,
    valid_for: Duration,
    reads: Mutex<u32>,
    fails: Mutex<bool>,
}

impl Common {
    fn of(unit: &LogicalUnit, valid_for: Duration) -> Arc<Common> {
        let (gate, reads, fails) = Default::default();
        let store = Arc::new(Common { gate, valid_for, reads, fails });
        unit.set_aptpl_store(Some(store.clone()));
        store
    }

    fn reads(&self) -> u32 {
        *self.reads.lock().unwrap()
    }
}

impl AptplStore for Common {
    fn store(&self, _: Option<&str>) -> io::Result<()> {
        Ok(())
    }

    fn valid_for(&self) -> Option<Duration> {
        Some(self.valid_for)
    }

    fn load(&self) -> io::Result<Option<Reservations>> {
        drop(self.gate.lock().unwrap());
        *self.reads.lock().unwrap() += 1;
        if *self.fails.lock().unwrap() { Err(io::ErrorKind::TimedOut.into()) } else { Ok(None) }
    }
}

fn connect(valid_for: Duration) -> (Reactor, Client, Arc<Common>) {
    let reactor = Reactor::new(rig::Options::default());
    let unit = unit();
    let store = Common::of(&unit, valid_for);
    let session = Session::open(&reactor, &[unit], Options::default());
    let client = session.connect(&reactor);
    (reactor, client, store)
}

#[test]
fn commands_wait_until_outdated_reservations_are_read_and_keep_their_data() {
    let (reactor, mut client, store) = connect(Duration::ZERO);
    for immediate in [0, 512, 4096] {
        let data: Vec<u8> = (0..4096_u32).map(|index| (index + immediate as u32) as u8).collect();
        assert_eq!(client.write(0, &write10(8, 8), &data, immediate).status, GOOD);
        let read = client.read(0, &read10(8, 8), 4096);
        assert!((read.status, &read.data[..]) == (GOOD, &data[..]), "{immediate}");
    }
    assert_eq!(store.reads(), 6, "each command");
    reactor.holds_no_memory();
}

#[test]
fn commands_that_arrive_meanwhile_share_the_next_read() {
    let (reactor, mut client, store) = connect(Duration::ZERO);
    let gate = store.gate.lock().unwrap();
    let tasks: Vec<u32> = (0..8).map(|block| client.start_read(0, &read10(block, 1), 512)).collect();
    client.ping(&[]);
    assert!(reactor.disks[0].seen().is_empty(), "none has begun");
    drop(gate);
    for task in tasks {
        assert_eq!(client.end_of(task, &[]).status, GOOD);
    }
    assert!((1..=2).contains(&store.reads()), "{} reads", store.reads());
}

#[test]
fn reservations_that_are_still_valid_are_not_read_again() {
    let (_reactor, mut client, store) = connect(Duration::from_secs(3600));
    for block in 0..4 {
        assert_eq!(client.read(0, &read10(block, 1), 512).status, GOOD);
    }
    assert_eq!(store.reads(), 1);
}

#[test]
fn commands_end_with_busy_when_reservations_cannot_be_read() {
    let (reactor, mut client, store) = connect(Duration::ZERO);
    *store.fails.lock().unwrap() = true;
    assert_eq!(client.write(0, &write10(0, 1), &[1; 512], 512).status, BUSY);
    assert_eq!(client.read(0, &read10(0, 1), 512).status, BUSY);
    assert!(reactor.disks[0].seen().is_empty());
    *store.fails.lock().unwrap() = false;
    assert_eq!(client.read(0, &read10(0, 1), 512).status, GOOD);
    reactor.holds_no_memory();
}

#[test]
fn a_command_that_waits_for_reservations_is_aborted_at_once() {
    let (reactor, mut client, store) = connect(Duration::ZERO);
    let gate = store.gate.lock().unwrap();
    let task = client.start_write(0, &write10(0, 1), 512, &[1; 512]);
    let function = client.management(TaskFunction::AbortTask, 0, task, FIRST);
    assert_eq!(client.managed(function), TaskResult::Complete);
    drop(gate);
    assert_eq!(client.read(0, &read10(0, 1), 512).status, GOOD);
    assert!(reactor.disks[0].seen().iter().all(|(op, ..)| !op.is_write()));
    reactor.holds_no_memory();
}
