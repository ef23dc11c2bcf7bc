//! Tests task management, on one reactor and across several.

use super::client::{Client, FIRST, Options, Session, read10, unit, write10};
use super::rig::{self, Reactor};
use crate::iscsi::EndReason;
use proto::iscsi::Parameters;
use proto::iscsi::pdu::{LogoutReason, RESERVED_TAG, RejectReason, Response, TaskFunction, TaskResult};
use scsi::Attention;
use std::time::Duration;

const GOOD: u8 = 0;
const CHECK: u8 = 2;
const TASK_ABORTED: u8 = 0x40;

#[test]
fn aborting_a_task_waits_until_its_request_has_left_the_stack() {
    let reactor = Reactor::new(rig::Options::default());
    let session = Session::open(&reactor, &[unit()], Options::default());
    let mut client = session.connect(&reactor);
    reactor.disks[0].hold(true);
    let task = client.start_read(0, &read10(0, 1), 512);
    let function = client.management(TaskFunction::AbortTask, 0, task, FIRST);
    client.ping(&[]);
    reactor.release(0);
    assert_eq!(client.managed(function), TaskResult::Complete, "and no response of the task before");
    assert_eq!(client.read(0, &read10(0, 1), 512).status, GOOD);
    assert_eq!(client.max_cmd_sn, FIRST.wrapping_add(33), "the window opened for both");
    reactor.holds_no_memory();
}

#[test]
fn aborting_a_write_that_waits_for_data_is_answered_at_once_and_its_data_is_skipped() {
    let reactor = Reactor::new(rig::Options::default());
    let session = Session::open(&reactor, &[unit()], Options::default());
    let mut client = session.connect(&reactor);
    let task = client.start_write(0, &write10(0, 512), 262_144, &[]);
    let Some((Response::R2t(r2t), _)) = client.receive() else { panic!() };
    let function = client.management(TaskFunction::AbortTask, 0, task, FIRST);
    assert_eq!(client.managed(function), TaskResult::Complete);
    client.answer(&r2t, &vec![1; 262_144], 262_144);
    assert_eq!(client.read(0, &read10(0, 1), 512).status, GOOD);
    let writes = reactor.disks[0].seen().iter().filter(|(op, ..)| op.is_write()).count();
    assert_eq!(writes, 0);
    reactor.holds_no_memory();
}

#[test]
fn a_task_that_was_aborted_before_it_arrived_is_skipped() {
    let reactor = Reactor::new(rig::Options::default());
    let session = Session::open(&reactor, &[unit()], Options::default());
    let (mut client, mut other) = (session.connect_as(&reactor, 1), session.connect_as(&reactor, 2));
    // FIRST is still to come on the other connection.
    let late = other.command(0, &write10(0, 1), 512, true);
    client.cmd_sn = FIRST.wrapping_add(2);
    let function = client.management(TaskFunction::AbortTask, 0, late.itt, FIRST);
    assert_eq!(client.managed(function), TaskResult::Complete);
    other.send(proto::iscsi::pdu::Request::ScsiCommand(late), false, &[1; 512]);
    other.ping(&[]);
    let writes = reactor.disks[0].seen().iter().filter(|(op, ..)| op.is_write()).count();
    assert_eq!(writes, 0);
    client.cmd_sn = FIRST.wrapping_add(1);
    assert_eq!(client.read(0, &read10(0, 1), 512).status, GOOD, "the next number is expected");
    let function = client.management(TaskFunction::AbortTask, 0, 12_345, FIRST);
    assert_eq!(client.managed(function), TaskResult::NoTask);
}

#[test]
fn aborting_a_command_that_waits_for_its_turn_opens_the_window_once() {
    let reactor = Reactor::new(rig::Options::default());
    let session = Session::open(&reactor, &[unit()], Options::default());
    let (mut client, mut other) = (session.connect_as(&reactor, 1), session.connect_as(&reactor, 2));
    // FIRST is still to come on the other connection.
    client.cmd_sn = FIRST.wrapping_add(1);
    let task = client.start_read(0, &read10(0, 1), 512);
    let function = client.management(TaskFunction::AbortTask, 0, task, FIRST.wrapping_add(1));
    assert_eq!(client.managed(function), TaskResult::Complete);
    assert_eq!(other.read(0, &read10(0, 1), 512).status, GOOD);
    other.ping(&[]);
    assert_eq!(
        other.max_cmd_sn,
        FIRST.wrapping_add(33),
        "two commands have ended: the window is 32 wide again"
    );
}

#[test]
fn the_response_of_a_function_does_not_reach_a_later_connection() {
    let reactor = Reactor::new(rig::Options::default());
    let session = Session::open(&reactor, &[unit()], Options::default());
    let (mut asking, mut busy) = (session.connect_as(&reactor, 1), session.connect_as(&reactor, 2));
    reactor.disks[0].hold(true);
    busy.start_read(0, &read10(0, 1), 512);
    busy.ping(&[]);
    asking.cmd_sn = busy.cmd_sn;
    asking.management(TaskFunction::AbortTaskSet, 0, RESERVED_TAG, 0);
    asking.ping(&[]);
    asking.logout(LogoutReason::CloseConnection, 1);
    assert!(asking.receive().is_none(), "it is closed");
    let connections = || reactor.with(|front, _| front.connections.iter().flatten().count());
    while connections() > 1 {
        std::thread::yield_now();
    }
    let mut later = session.connect_as(&reactor, 3);
    later.cmd_sn = busy.cmd_sn;
    reactor.release(0);
    busy.ping(&[]);
    // Any PDU other than the answer would be a failure.
    later.ping(&[]);
}

#[test]
fn query_asynchronous_event_tells_what_is_pending_from_level_2_on() {
    for (level, expected) in [(2, [0x26, 0x2A, 0x01]), (1, [0; 3])] {
        let reactor = Reactor::new(rig::Options::default());
        let parameters = Parameters { protocol_level: level, ..Options::default().parameters };
        let session = Session::open(&reactor, &[unit()], Options { parameters, ..Options::default() });
        let mut client = session.connect(&reactor);
        let query = |client: &mut Client| {
            let itt = client.management(TaskFunction::QueryAsynchronousEvent, 0, RESERVED_TAG, 0);
            match client.receive() {
                Some((Response::TaskManagement(pdu), _)) if pdu.itt == itt => (pdu.result, pdu.additional),
                other => panic!("unexpected {other:?}"),
            }
        };
        assert_eq!(query(&mut client), (TaskResult::Complete, [0; 3]));
        session.nexuses[0].raise(Attention::MODE_CHANGED);
        session.nexuses[0].raise(Attention::CAPACITY_CHANGED);
        assert_eq!(query(&mut client), (TaskResult::Succeeded, expected));
        assert_eq!(query(&mut client), (TaskResult::Succeeded, expected), "it stays pending");
        assert_eq!(client.read(0, &[0; 16], 0).sense, (6, 0x2A, 0x01));
    }
}

#[test]
fn functions_that_wait_are_limited() {
    let reactor = Reactor::new(rig::Options::default());
    let session = Session::open(&reactor, &[unit()], Options::default());
    let mut client = session.connect(&reactor);
    reactor.disks[0].hold(true);
    client.start_read(0, &read10(0, 1), 512);
    let functions = 200;
    for _ in 0..functions {
        client.management(TaskFunction::AbortTaskSet, 0, RESERVED_TAG, 0);
    }
    let mut rejected = 0;
    while rejected < functions - 32 {
        match client.receive() {
            Some((Response::Reject(pdu), _)) => assert_eq!(pdu.reason, RejectReason::ImmediateCommandReject),
            other => panic!("unexpected {other:?}"),
        }
        rejected += 1;
    }
    assert_eq!(reactor.with(|front, _| front.management.len()), 32);
    reactor.release(0);
    for _ in 0..32 {
        let ended = client.receive();
        assert!(
            matches!(ended, Some((Response::TaskManagement(pdu), _)) if pdu.result == TaskResult::Complete)
        );
    }
    assert_eq!(client.read(0, &read10(0, 1), 512).status, GOOD);
}

#[test]
fn functions_that_are_not_supported_are_answered_as_such() {
    let reactor = Reactor::new(rig::Options::default());
    let session = Session::open(&reactor, &[unit()], Options::default());
    let mut client = session.connect(&reactor);
    for (function, lun, result) in [
        (TaskFunction::TaskReassign, 0, TaskResult::ReassignNotSupported),
        (TaskFunction::ClearAca, 0, TaskResult::NotSupported),
        (TaskFunction::LogicalUnitReset, 7, TaskResult::NoLun),
        (TaskFunction::Other(99), 0, TaskResult::NotSupported),
        (TaskFunction::QueryTask, 0, TaskResult::Complete),
        (TaskFunction::QueryTaskSet, 0, TaskResult::Complete),
    ] {
        let itt = client.management(function, lun, RESERVED_TAG, 0);
        assert_eq!(client.managed(itt), result, "{function:?}");
    }
}

#[test]
fn abort_task_set_ends_the_tasks_of_one_lun_of_this_session() {
    let reactor = Reactor::new(rig::Options { disks: 2, ..rig::Options::default() });
    let session = Session::open(&reactor, &[unit(), unit()], Options::default());
    let mut client = session.connect(&reactor);
    reactor.disks[0].hold(true);
    reactor.disks[1].hold(true);
    for _ in 0..4 {
        client.start_read(0, &read10(0, 1), 512);
    }
    let survivor = client.start_read(1, &read10(0, 1), 512);
    let function = client.management(TaskFunction::AbortTaskSet, 0, RESERVED_TAG, 0);
    client.ping(&[]);
    reactor.release(0);
    assert_eq!(client.managed(function), TaskResult::Complete);
    reactor.release(1);
    assert_eq!(client.end_of(survivor, &[]).status, GOOD);
}

#[test]
fn a_reset_of_a_unit_ends_the_tasks_of_all_sessions_on_all_reactors() {
    let here = Reactor::new(rig::Options::default());
    let there = Reactor::on(rig::Options::default(), here.disks.clone());
    let unit = unit();
    unit.set_attribute("emulate_tas", 0).unwrap();
    let own = Options::default();
    let third_party = Options { initiator: "iqn.2026-11.example:other", ..own.clone() };
    let session = Session::open(&here, std::slice::from_ref(&unit), own);
    let other = Session::open(&there, std::slice::from_ref(&unit), third_party);
    let (mut client, mut neighbour) = (session.connect(&here), other.connect(&there));
    here.disks[0].hold(true);
    client.start_read(0, &read10(0, 1), 512);
    client.ping(&[]);
    let mine = here.disks[0].take_held();
    neighbour.start_read(0, &read10(0, 1), 512);
    neighbour.ping(&[]);
    let theirs = here.disks[0].take_held();
    here.disks[0].hold(false);
    let function = client.management(TaskFunction::LogicalUnitReset, 0, RESERVED_TAG, 0);
    client.ping(&[]);
    here.complete(mine);
    client.ping(&[]);
    client.stream.set_read_timeout(Some(Duration::from_millis(50))).unwrap();
    let mut byte = [0; 1];
    assert!(std::io::Read::read(&mut client.stream, &mut byte).is_err(), "it waits for the other reactor");
    client.stream.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
    there.complete(theirs);
    assert_eq!(client.managed(function), TaskResult::Complete);
    for client in [&mut client, &mut neighbour] {
        let ended = client.read(0, &read10(0, 1), 512);
        assert_eq!((ended.status, ended.sense.0, ended.sense.1), (CHECK, 6, 0x29), "a unit attention");
        assert_eq!(client.read(0, &read10(0, 1), 512).status, GOOD);
    }
}

#[test]
fn tasks_aborted_by_another_session_end_with_task_aborted_by_default() {
    let reactor = Reactor::new(rig::Options::default());
    let unit = unit();
    let session = Session::open(&reactor, std::slice::from_ref(&unit), Options::default());
    let third_party = Options { initiator: "iqn.2026-11.example:other", ..Options::default() };
    let other = Session::open(&reactor, std::slice::from_ref(&unit), third_party);
    let (mut client, mut neighbour) = (session.connect(&reactor), other.connect(&reactor));
    reactor.disks[0].hold(true);
    let task = neighbour.start_read(0, &read10(0, 1), 512);
    neighbour.ping(&[]);
    let function = client.management(TaskFunction::ClearTaskSet, 0, RESERVED_TAG, 0);
    client.ping(&[]);
    reactor.release(0);
    assert_eq!(client.managed(function), TaskResult::Complete);
    assert_eq!(neighbour.end_of(task, &[]).status, TASK_ABORTED);
}

#[test]
fn a_cold_reset_is_answered_and_ends_the_sessions_of_the_target() {
    let reactor = Reactor::new(rig::Options::default());
    let unit = unit();
    let session = Session::open(&reactor, std::slice::from_ref(&unit), Options::default());
    let elsewhere = Options { target: "iqn.2026-11.example:second", ..Options::default() };
    let other = Session::open(&reactor, &[unit], elsewhere);
    let (mut client, mut neighbour) = (session.connect(&reactor), other.connect(&reactor));
    let function = client.management(TaskFunction::TargetColdReset, 0, RESERVED_TAG, 0);
    assert_eq!(client.managed(function), TaskResult::Complete);
    assert!(client.receive().is_none());
    assert_eq!(session.gone(), EndReason::ColdReset);
    assert_eq!(neighbour.read(0, &read10(0, 1), 512).sense.0, 6, "its unit was reset");
    assert!(!other.is_gone());
}

#[test]
fn an_immediate_reset_waits_for_the_commands_before_it() {
    let reactor = Reactor::new(rig::Options::default());
    let session = Session::open(&reactor, &[unit()], Options::default());
    let (mut client, mut other) = (session.connect_as(&reactor, 1), session.connect_as(&reactor, 2));
    client.cmd_sn = FIRST.wrapping_add(1);
    let function = client.management(TaskFunction::AbortTaskSet, 0, RESERVED_TAG, 0);
    client.ping(&[]);
    reactor.disks[0].hold(true);
    other.start_read(0, &read10(0, 1), 512);
    other.ping(&[]);
    reactor.release(0);
    assert_eq!(client.managed(function), TaskResult::Complete);
    other.cmd_sn = FIRST.wrapping_add(1);
    assert_eq!(other.read(0, &read10(0, 1), 512).status, GOOD, "the aborted command had no response");
}
