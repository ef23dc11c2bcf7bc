//! Tests that SANITIZE continues without its command and its session.

use super::client::{Client, FIRST, Options, Session, read10, unit};
use super::rig::{self, Reactor};
use proto::iscsi::pdu::{RESERVED_TAG, TaskFunction, TaskResult};
use std::time::{Duration, Instant};

const GOOD: u8 = 0;
const IN_PROGRESS: (u8, u8, u8) = (2, 0x04, 0x1B);
const PATTERN: [u8; 6] = [0x01, 0, 0, 2, 0xAB, 0xCD];

/// Returns SANITIZE with OVERWRITE.
fn overwrite(immediate: bool) -> [u8; 16] {
    let mut cdb = [0; 16];
    [cdb[0], cdb[1], cdb[8]] = [0x48, if immediate { 0x81 } else { 0x01 }, 6];
    cdb
}

fn ready(client: &mut Client) -> (u8, u8, u8) {
    client.read(0, &[0; 16], 0).sense
}

/// Waits until the unit is ready, and checks that it was overwritten completely.
fn finish(client: &mut Client, reactor: &Reactor) {
    let start = Instant::now();
    while ready(client) != (0, 0, 0) {
        assert!(start.elapsed() < Duration::from_secs(20), "it never ends");
    }
    let bytes = reactor.disks[0].bytes(0, (rig::BLOCKS * 512) as usize);
    assert!(bytes.chunks(2).all(|pair| pair == [0xAB, 0xCD]));
}

#[test]
fn sanitize_goes_on_after_aborts_resets_and_the_end_of_its_session() {
    let reactor = Reactor::new(rig::Options::default());
    let unit = unit();
    let session = Session::open(&reactor, std::slice::from_ref(&unit), Options::default());
    let third_party = Options { initiator: "iqn.2026-11.example:other", ..Options::default() };
    let other = Session::open(&reactor, &[unit], third_party);
    let (mut client, mut neighbour) = (session.connect(&reactor), other.connect(&reactor));
    reactor.disks[0].hold(true);
    let task = client.start_write(0, &overwrite(false), 6, &PATTERN);
    client.ping(&[]);
    assert_eq!([ready(&mut client), ready(&mut neighbour)], [IN_PROGRESS; 2]);
    assert_eq!(neighbour.read(0, &read10(0, 1), 512).sense, IN_PROGRESS);
    let function = client.management(TaskFunction::AbortTask, 0, task, FIRST);
    assert_eq!(client.managed(function), TaskResult::Complete, "the command ends at once");
    let function = client.management(TaskFunction::LogicalUnitReset, 0, RESERVED_TAG, 0);
    assert_eq!(client.managed(function), TaskResult::Complete);
    drop(client);
    session.gone();
    assert_eq!((ready(&mut neighbour).0, ready(&mut neighbour)), (6, IN_PROGRESS), "after the reset");
    reactor.release(0);
    finish(&mut neighbour, &reactor);
    reactor.holds_no_memory();
}

#[test]
fn with_immed_the_status_comes_before_the_first_write() {
    let reactor = Reactor::new(rig::Options::default());
    let session = Session::open(&reactor, &[unit()], Options::default());
    let mut client = session.connect(&reactor);
    reactor.disks[0].hold(true);
    let task = client.start_write(0, &overwrite(true), 6, &PATTERN);
    assert_eq!(client.end_of(task, &[]).status, GOOD);
    assert_eq!(ready(&mut client), IN_PROGRESS);
    reactor.release(0);
    finish(&mut client, &reactor);
}

#[test]
fn sanitize_waits_for_tags_and_ends_with_its_device() {
    let reactor = Reactor::new(rig::Options { depth: 2, ..rig::Options::default() });
    let session = Session::open(&reactor, &[unit()], Options::default());
    let mut client = session.connect(&reactor);
    let task = client.start_write(0, &overwrite(false), 6, &PATTERN);
    assert_eq!(client.end_of(task, &PATTERN).status, GOOD, "with two tags for four requests");
    reactor.disks[0].hold(true);
    client.start_write(0, &overwrite(false), 6, &PATTERN);
    client.ping(&[]);
    reactor.with(|front, turn| crate::Front::close_queue(front, queue::QueueId(0), true, turn));
    reactor.release(0);
    client.ping(&[]);
    assert_eq!(session.nexuses[0].unit().sanitize_state().map(|sense| sense.asc), Some(0x31), "it failed");
}
