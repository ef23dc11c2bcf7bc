//! Tests the life of sessions: several connections, numbering, pings, text, logout, loss.

use super::client::{FIRST, Options, Session, cdb10, read10, unit, write10};
use super::rig::{self, Reactor};
use crate::iscsi::{EndReason, LunSetup, Pings};
use proto::iscsi::pdu::{
    AsyncEvent, LogoutReason, LogoutResult, NopOut, RESERVED_TAG, RejectReason, Request, Response, Snack,
    TaskAttribute,
};
use queue::{Nanos, QueueId};
use scsi::Lun;
use std::time::Duration;

const GOOD: u8 = 0;

#[test]
fn commands_of_two_connections_are_executed_in_the_order_of_their_numbers() {
    let reactor = Reactor::new(rig::Options::default());
    let session = Session::open(&reactor, &[unit()], Options::default());
    let (mut first, mut second) = (session.connect_as(&reactor, 1), session.connect_as(&reactor, 2));
    // The second command arrives first; the ping shows that it is held.
    second.cmd_sn = FIRST.wrapping_add(1);
    let late = second.start_write(0, &write10(0, 1), 512, &[2; 512]);
    second.ping(b"here");
    assert!(reactor.disks[0].seen().is_empty());
    let early = first.start_write(0, &write10(0, 1), 512, &[1; 512]);
    assert_eq!(first.end_of(early, &[]).status, GOOD);
    assert_eq!(second.end_of(late, &[]).status, GOOD);
    assert_eq!(reactor.disks[0].bytes(0, 1), [2], "the later command wrote last");
}

#[test]
fn unsolicited_data_of_a_command_that_is_held_is_kept() {
    let parameters = proto::iscsi::Parameters { initial_r2t: false, ..Options::default().parameters };
    let reactor = Reactor::new(rig::Options::default());
    let session = Session::open(&reactor, &[unit()], Options { parameters, ..Options::default() });
    let (mut first, mut second) = (session.connect_as(&reactor, 1), session.connect_as(&reactor, 2));
    second.cmd_sn = FIRST.wrapping_add(1);
    let mut command = second.command(0, &write10(0, 32), 16_384, true);
    command.is_final = false;
    second.send(Request::ScsiCommand(command), false, &[3; 4096]);
    let rest = proto::iscsi::pdu::DataOut {
        is_final: true,
        lun: command.lun,
        itt: command.itt,
        ttt: RESERVED_TAG,
        exp_stat_sn: 0,
        data_sn: 0,
        offset: 4096,
    };
    second.send(Request::DataOut(rest), false, &[4; 12_288]);
    second.ping(&[]);
    assert_eq!(first.read(0, &read10(0, 1), 512).status, GOOD);
    assert_eq!(second.end_of(command.itt, &[]).status, GOOD);
    assert_eq!(reactor.disks[0].bytes(4095, 2), [3, 4]);
    reactor.holds_no_memory();
}

#[test]
fn commands_outside_the_window_and_duplicates_are_ignored_with_their_data() {
    let reactor = Reactor::new(rig::Options::default());
    let session = Session::open(&reactor, &[unit()], Options { depth: 4, ..Options::default() });
    let mut client = session.connect(&reactor);
    for cmd_sn in [FIRST.wrapping_add(4), FIRST.wrapping_sub(1), FIRST.wrapping_add(1 << 31)] {
        client.cmd_sn = cmd_sn;
        client.start_write(0, &write10(0, 1), 512, &[9; 512]);
    }
    client.cmd_sn = FIRST;
    assert_eq!(client.read(0, &read10(0, 1), 512).data, [0; 512]);
    client.cmd_sn = FIRST;
    client.start_write(0, &write10(0, 1), 512, &[9; 512]);
    assert_eq!(client.read(0, &read10(0, 1), 512).data, [0; 512], "a duplicate");
    reactor.holds_no_memory();
}

#[test]
fn a_ping_returns_its_data_and_too_many_immediate_commands_are_rejected() {
    let reactor = Reactor::new(rig::Options::default());
    let session = Session::open(&reactor, &[unit()], Options::default());
    let mut client = session.connect(&reactor);
    let data: Vec<u8> = (0..70_001).map(|at| at as u8).collect();
    assert_eq!(client.ping(&data), data[..65_536], "as much as the initiator accepts");
    reactor.disks[0].hold(true);
    for _ in 0..super::super::session::IMMEDIATE_MAX {
        let command = client.command(0, &read10(0, 1), 512, false);
        client.cmd_sn = FIRST;
        client.send(Request::ScsiCommand(command), true, &[]);
    }
    let command = client.command(0, &read10(0, 1), 512, false);
    client.cmd_sn = FIRST;
    client.send(Request::ScsiCommand(command), true, &[]);
    let Some((Response::Reject(reject), _)) = client.receive() else { panic!() };
    assert_eq!(reject.reason, RejectReason::ImmediateCommandReject);
    reactor.release(0);
    for _ in 0..super::super::session::IMMEDIATE_MAX {
        let Some((Response::DataIn(pdu), _)) = client.receive() else { panic!() };
        assert_eq!(pdu.status, Some(GOOD));
    }
    reactor.holds_no_memory();
}

#[test]
fn a_snack_and_an_unknown_pdu_are_rejected() {
    let reactor = Reactor::new(rig::Options::default());
    let session = Session::open(&reactor, &[unit()], Options::default());
    let mut client = session.connect(&reactor);
    let snack = Snack { kind: 0, lun: 0, itt: 1, ttt: RESERVED_TAG, exp_stat_sn: 0, first: 0, count: 0 };
    client.send(Request::Snack(snack), false, &[]);
    let Some((Response::Reject(reject), _)) = client.receive() else { panic!() };
    assert_eq!(reject.reason, RejectReason::SnackReject);
    let mut bytes = client.encode(Request::Snack(snack), false, b"data");
    bytes[0] = 0x1E;
    std::io::Write::write_all(&mut client.stream, &bytes).unwrap();
    let Some((Response::Reject(reject), header)) = client.receive() else { panic!() };
    assert_eq!((reject.reason, header[0]), (RejectReason::CommandNotSupported, 0x1E));
    assert_eq!(client.read(0, &read10(0, 1), 512).status, GOOD);
}

#[test]
fn send_targets_is_answered_in_parts_and_the_segment_length_changes() {
    let reactor = Reactor::new(rig::Options::default());
    let session = Session::open(&reactor, &[unit()], Options::default());
    let mut client = session.connect(&reactor);
    let (mut response, mut text) = client.text(RESERVED_TAG, true, false, b"SendTargets=All\0");
    while let Response::Text(pdu) = response
        && pdu.continues
    {
        assert!(!pdu.is_final && pdu.ttt != RESERVED_TAG);
        let (next, more) = client.text(pdu.ttt, true, false, &[]);
        text.extend_from_slice(&more);
        response = next;
    }
    assert_eq!(text, b"TargetName=iqn.2026-11.example:disk\0".repeat(400));
    let Response::Text(pdu) = response else { panic!("{response:?}") };
    assert!(pdu.is_final && pdu.ttt == RESERVED_TAG);
    // The text request is in two parts.
    let (response, _) = client.text(RESERVED_TAG, false, true, b"MaxRecvDataSegmentLength=10");
    let Response::Text(pdu) = response else { panic!("{response:?}") };
    let (_, text) = client.text(pdu.ttt, true, false, b"24\0X-none=1\0HeaderDigest=CRC32C\0");
    assert_eq!(text, b"X-none=NotUnderstood\0HeaderDigest=Reject\0");
    // libiscsi treats a Reject as a failed request; an unknown answer ends its connection.
    let (response, _) = client.text(RESERVED_TAG, true, false, b"SendTargets=other\0");
    let Response::Reject(reject) = response else { panic!("{response:?}") };
    assert_eq!(reject.reason, RejectReason::ProtocolError);
    let itt = client.start_read(0, &read10(0, 4), 2048);
    for _ in 0..2 {
        let Some((Response::DataIn(pdu), data)) = client.receive() else { panic!() };
        assert_eq!((pdu.itt, data.len()), (itt, 1024));
    }
}

#[test]
fn logging_out_of_one_connection_keeps_the_others_and_of_the_session_ends_all() {
    let reactor = Reactor::new(rig::Options::default());
    let session = Session::open(&reactor, &[unit()], Options::default());
    let (mut first, mut second) = (session.connect_as(&reactor, 1), session.connect_as(&reactor, 2));
    let mut third = session.connect_as(&reactor, 3);
    let result = |response: (Response, Vec<u8>)| match response.0 {
        Response::Logout(pdu) => pdu.result,
        other => panic!("{other:?}"),
    };
    assert_eq!(result(first.logout(LogoutReason::CloseConnection, 9)), LogoutResult::NoConnection);
    assert_eq!(result(first.logout(LogoutReason::RemoveForRecovery, 2)), LogoutResult::RecoveryNotSupported);
    assert_eq!(result(first.logout(LogoutReason::CloseConnection, 2)), LogoutResult::Closed);
    assert!(second.receive().is_none());
    assert_eq!(result(third.logout(LogoutReason::CloseConnection, 3)), LogoutResult::Closed);
    assert!(third.receive().is_none());
    assert_eq!(first.read(0, &read10(0, 1), 512).status, GOOD);
    let mut fourth = session.connect_as(&reactor, 4);
    assert_eq!(result(first.logout(LogoutReason::CloseSession, 0)), LogoutResult::Closed);
    assert!(first.receive().is_none() && fourth.receive().is_none());
    assert_eq!(session.gone(), EndReason::Logout);
}

#[test]
fn the_last_connection_that_logs_out_ends_the_session() {
    let reactor = Reactor::new(rig::Options::default());
    let session = Session::open(&reactor, &[unit()], Options::default());
    let mut client = session.connect(&reactor);
    client.logout(LogoutReason::CloseConnection, 1);
    assert_eq!(session.gone(), EndReason::Logout);
}

#[test]
fn a_lost_connection_ends_the_session_when_its_requests_have_left_the_stack() {
    let reactor = Reactor::new(rig::Options::default());
    let session = Session::open(&reactor, &[unit()], Options::default());
    let (mut first, mut second) = (session.connect_as(&reactor, 1), session.connect_as(&reactor, 2));
    reactor.disks[0].hold(true);
    first.start_read(0, &read10(0, 8), 4096);
    first.start_write(0, &write10(8, 2048), 1 << 20, &[1; 8192]);
    let Some((Response::R2t(_), _)) = first.receive() else { panic!() };
    drop(first);
    assert!(second.receive().is_none(), "the other connection ends as well");
    assert!(!session.is_gone(), "a request is in the stack");
    reactor.release(0);
    assert_eq!(session.gone(), EndReason::ConnectionLost);
    assert!(reactor.with(
        |front, _| front.tasks.iter().next().is_none() && front.connections.iter().all(Option::is_none)
    ));
}

#[test]
fn a_session_that_is_reinstated_ends_silently_before_it_is_gone() {
    let reactor = Reactor::new(rig::Options::default());
    let session = Session::open(&reactor, &[unit()], Options::default());
    let mut client = session.connect(&reactor);
    reactor.disks[0].hold(true);
    client.start_read(0, &read10(0, 8), 4096);
    client.ping(&[]);
    let id = session.id;
    reactor.with(move |front, turn| front.end_session(id, EndReason::Reinstated, turn));
    assert!(client.receive().is_none(), "no response is sent");
    assert!(!session.is_gone());
    reactor.release(0);
    assert_eq!(session.gone(), EndReason::Reinstated);
}

#[test]
fn an_initiator_whose_target_is_removed_is_asked_to_log_out() {
    let reactor = Reactor::new(rig::Options::default());
    let sessions = [(); 2].map(|()| Session::open(&reactor, &[unit()], Options::default()));
    let mut clients = sessions.each_ref().map(|session| session.connect(&reactor));
    for (session, client) in sessions.iter().zip(&mut clients) {
        let id = session.id;
        reactor.with(move |front, turn| front.end_session(id, EndReason::Removed, turn));
        let Some((Response::AsyncMessage(pdu), _)) = client.receive() else { panic!() };
        assert_eq!(pdu.event, AsyncEvent::RequestLogout { within: 3 });
        assert_eq!(client.read(0, &read10(0, 1), 512).status, GOOD, "it may still finish");
    }
    clients[0].logout(LogoutReason::CloseSession, 0);
    assert_eq!(sessions[0].gone(), EndReason::Logout);
    for second in 1..5 {
        reactor.with(move |front, turn| drop(front.tick(Nanos(second * 1_000_000_000), turn)));
    }
    assert!(clients[1].receive().is_none());
    assert_eq!(sessions[1].gone(), EndReason::Removed);
}

#[test]
fn a_silent_initiator_is_pinged_and_dropped_if_it_does_not_answer() {
    let pings = Some(Pings { after: Duration::from_secs(5), timeout: Duration::from_secs(3) });
    let reactor = Reactor::new(rig::Options::default());
    let session = Session::open(&reactor, &[unit()], Options { pings, ..Options::default() });
    let mut client = session.connect(&reactor);
    let now = std::cell::Cell::new(0_u64);
    let pass = |seconds: u64| {
        let from = now.get();
        now.set(from + seconds);
        reactor.with(move |front, turn| {
            let ticks = (1..=seconds).map(|second| Nanos((from + second) * 1_000_000_000));
            ticks.flat_map(|at| front.tick(at, turn)).map(|dropped| dropped.why).collect::<Vec<_>>()
        })
    };
    for _ in 0..2 {
        assert!(pass(7).is_empty());
        let Some((Response::NopIn(ping), _)) = client.receive() else { panic!() };
        assert_eq!(ping.itt, RESERVED_TAG);
        let answer =
            NopOut { lun: ping.lun, itt: RESERVED_TAG, ttt: ping.ttt, cmd_sn: client.cmd_sn, exp_stat_sn: 0 };
        client.send(Request::NopOut(answer), true, &[]);
        client.ping(&[]);
    }
    assert!(pass(7).is_empty());
    assert!(matches!(client.receive(), Some((Response::NopIn(_), _))));
    assert_eq!(pass(7), [EndReason::Silent]);
    assert!(client.receive().is_none());
    assert_eq!(session.gone(), EndReason::Silent);
}

#[test]
fn an_initiator_that_stops_in_the_middle_of_a_pdu_is_dropped() {
    let reactor = Reactor::new(rig::Options::default());
    let session = Session::open(&reactor, &[unit()], Options::default());
    let mut client = session.connect(&reactor);
    let command = client.command(0, &write10(0, 8), 4096, true);
    let bytes = client.encode(Request::ScsiCommand(command), false, &[1; 4096]);
    std::io::Write::write_all(&mut client.stream, &bytes[..1000]).unwrap();
    let start = std::time::Instant::now();
    while reactor.memory_held() == 0 {
        assert!(start.elapsed() < Duration::from_secs(5));
    }
    reactor
        .with(|front, turn| (1..70).for_each(|second| drop(front.tick(Nanos(second * 1_000_000_000), turn))));
    assert_eq!(session.gone(), EndReason::Silent);
}

#[test]
fn a_peer_that_never_reads_is_not_read_from_without_end() {
    let reactor = Reactor::new(rig::Options::default());
    let session = Session::open(&reactor, &[unit()], Options::default());
    let mut client = session.connect(&reactor);
    client.stream.set_write_timeout(Some(Duration::from_millis(300))).unwrap();
    let ping = NopOut { lun: 0, itt: 1, ttt: RESERVED_TAG, cmd_sn: FIRST, exp_stat_sn: 0 };
    let bytes = client.encode(Request::NopOut(ping), true, &[7; 4096]).repeat(64);
    let mut sent = 0_usize;
    while sent < 64 << 20 && std::io::Write::write_all(&mut client.stream, &bytes).is_ok() {
        sent += bytes.len();
    }
    assert!(sent < 64 << 20, "{sent} bytes were accepted");
    assert!(reactor.memory_held() < 8 << 20, "{}", reactor.memory_held());
    drop(client);
    assert_eq!(session.gone(), EndReason::ConnectionLost);
}

#[test]
fn long_pings_of_a_peer_that_never_reads_take_no_more_memory_than_short_ones() {
    let reactor = Reactor::new(rig::Options::default());
    let session = Session::open(&reactor, &[unit()], Options::default());
    let mut client = session.connect(&reactor);
    client.stream.set_write_timeout(Some(Duration::from_millis(300))).unwrap();
    let ping = NopOut { lun: 0, itt: 1, ttt: RESERVED_TAG, cmd_sn: FIRST, exp_stat_sn: 0 };
    let bytes = client.encode(Request::NopOut(ping), true, &[7; 65_536]);
    let mut sent = 0_usize;
    while sent < 64 << 20 && std::io::Write::write_all(&mut client.stream, &bytes).is_ok() {
        sent += bytes.len();
    }
    assert!(sent < 64 << 20, "{sent} bytes were accepted");
    assert!(reactor.memory_held() < 8 << 20, "{}", reactor.memory_held());
    drop(client);
    assert_eq!(session.gone(), EndReason::ConnectionLost);
}

#[test]
fn luns_are_added_and_removed_while_commands_run() {
    let reactor = Reactor::new(rig::Options { disks: 2, ..rig::Options::default() });
    let (first, second) = (unit(), unit());
    let session = Session::open(&reactor, &[first.clone(), second], Options::default());
    let mut client = session.connect(&reactor);
    reactor.disks[1].hold(true);
    let running = client.start_read(1, &read10(0, 1), 512);
    client.ping(&[]);
    let (id, keep) = (session.id, session.nexuses[0].clone());
    let luns = vec![LunSetup { lun: Lun::new(0), queue: QueueId(0), nexus: keep }];
    reactor.with(move |front, _| front.change_luns(id, luns));
    let ended = client.read(1, &read10(0, 1), 512);
    assert_eq!(ended.sense, (5, 0x25, 0), "later commands find no LUN");
    reactor.release(1);
    assert_eq!(client.end_of(running, &[]).status, GOOD, "the one before it ends as usual");
    assert_eq!(client.read(0, &read10(0, 1), 512).status, GOOD);
}

#[test]
fn a_device_that_is_removed_waits_for_its_commands() {
    use crate::Front as _;
    let reactor = Reactor::new(rig::Options::default());
    let session = Session::open(&reactor, &[unit()], Options::default());
    let mut client = session.connect(&reactor);
    reactor.disks[0].hold(true);
    let running = client.start_read(0, &read10(0, 1), 512);
    client.ping(&[]);
    assert!(reactor.with(|front, turn| {
        front.close_queue(QueueId(0), false, turn);
        front.is_open(QueueId(0))
    }));
    reactor.release(0);
    assert_eq!(client.end_of(running, &[]).status, GOOD);
    assert!(!reactor.with(|front, _| front.is_open(QueueId(0))));
    assert_eq!(client.read(0, &read10(0, 1), 512).sense, (5, 0x25, 0));
}

#[test]
fn an_ordered_command_waits_for_earlier_ones_and_later_ones_for_it() {
    let reactor = Reactor::new(rig::Options::default());
    let session = Session::open(&reactor, &[unit()], Options::default());
    let mut client = session.connect(&reactor);
    reactor.disks[0].hold(true);
    let simple = client.start_write(0, &write10(0, 1), 512, &[1; 512]);
    let mut command = client.command(0, &cdb10(0x2A, 1, 1), 512, true);
    command.attribute = TaskAttribute::Ordered;
    client.send(Request::ScsiCommand(command), false, &[2; 512]);
    let later = client.start_write(0, &write10(2, 1), 512, &[3; 512]);
    let mut head = client.command(0, &cdb10(0x2A, 3, 1), 512, true);
    head.attribute = TaskAttribute::HeadOfQueue;
    client.send(Request::ScsiCommand(head), false, &[4; 512]);
    client.ping(&[]);
    assert_eq!(reactor.disks[0].held(), 2, "the simple one, and the head of the queue");
    reactor.release(0);
    let order: Vec<u32> = (0..4)
        .map(|_| match client.receive() {
            Some((Response::ScsiResponse(pdu), _)) => pdu.itt,
            other => panic!("{other:?}"),
        })
        .collect();
    assert_eq!(order, [simple, head.itt, command.itt, later]);
    let seen: Vec<u64> = reactor.disks[0].seen().iter().map(|(_, offset, _)| offset / 512).collect();
    assert_eq!(seen, [0, 3, 1, 2]);
}

#[test]
fn a_connection_that_is_reinstated_takes_its_tasks_with_it_and_leaves_the_session() {
    let reactor = Reactor::new(rig::Options::default());
    let session = Session::open(&reactor, &[unit()], Options::default());
    let (mut first, mut second) = (session.connect_as(&reactor, 1), session.connect_as(&reactor, 2));
    reactor.disks[0].hold(true);
    second.start_read(0, &read10(0, 1), 512);
    second.ping(&[]);
    let id = session.id;
    assert!(reactor.with(move |front, turn| front.end_connection(id, 2, turn)));
    assert!(!reactor.with(move |front, turn| front.end_connection(id, 7, turn)));
    assert!(second.receive().is_none());
    reactor.release(0);
    first.cmd_sn = FIRST.wrapping_add(1);
    assert_eq!(first.read(0, &read10(0, 1), 512).status, GOOD);
}

#[test]
fn pings_that_are_sent_before_their_turn_hold_a_bounded_amount_of_memory() {
    let reactor = Reactor::new(rig::Options::default());
    let session = Session::open(&reactor, &[unit()], Options::default());
    let mut client = session.connect(&reactor);
    for number in 1..32 {
        let cmd_sn = FIRST.wrapping_add(number);
        let ping = NopOut { lun: 0, itt: number, ttt: RESERVED_TAG, cmd_sn, exp_stat_sn: 0 };
        let bytes = client.encode(Request::NopOut(ping), false, &vec![7; 100_000]);
        if std::io::Write::write_all(&mut client.stream, &bytes).is_err() {
            break;
        }
    }
    assert_eq!(session.gone(), EndReason::Evicted);
}

#[test]
fn a_numbered_ping_that_is_early_is_answered_when_it_is_its_turn() {
    let reactor = Reactor::new(rig::Options::default());
    let session = Session::open(&reactor, &[unit()], Options::default());
    let mut client = session.connect(&reactor);
    let cmd_sn = FIRST.wrapping_add(1);
    let ping = NopOut { lun: 0, itt: 77, ttt: RESERVED_TAG, cmd_sn, exp_stat_sn: 0 };
    client.send(Request::NopOut(ping), false, b"early");
    let read = client.start_read(0, &read10(0, 1), 512);
    let (mut answers, mut pings) = (0, 0);
    while answers + pings < 2 {
        match client.receive() {
            Some((Response::NopIn(pdu), data)) => {
                assert_eq!((pdu.itt, &data[..]), (77, &b"early"[..]));
                pings += 1;
            }
            Some((Response::DataIn(pdu), _)) => {
                assert_eq!(pdu.itt, read);
                answers += 1;
            }
            other => panic!("{other:?}"),
        }
    }
    reactor.holds_no_memory();
}
