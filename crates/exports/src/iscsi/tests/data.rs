//! Tests reads, writes, digests, and data that violates the rules.

use super::client::{FIRST, Options, Session, read10, unit, write10};
use super::rig::{self, Reactor};
use crate::iscsi::EndReason;
use proto::iscsi::parameters::{ConnectionParameters, Parameters};
use proto::iscsi::pdu::{DataOut, R2t, RESERVED_TAG, RejectReason, Request, Residual, Response};

const GOOD: u8 = 0;
const CHECK: u8 = 2;

fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|at| (at % 251) as u8 ^ (at >> 9) as u8).collect()
}

fn with(parameters: Parameters, connection: ConnectionParameters) -> Options {
    Options { parameters, connection, ..Options::default() }
}

#[test]
fn a_small_write_goes_with_its_command_and_is_read_back() {
    let reactor = Reactor::new(rig::Options::default());
    let session = Session::open(&reactor, &[unit()], Options::default());
    let mut client = session.connect(&reactor);
    let data = pattern(4096);
    let ended = client.write(0, &write10(8, 8), &data, 4096);
    assert_eq!((ended.status, ended.residual), (GOOD, Residual::None));
    assert_eq!(reactor.disks[0].bytes(4096, 4096), data);
    let ended = client.read(0, &read10(8, 8), 4096);
    assert_eq!((ended.status, ended.residual), (GOOD, Residual::None));
    assert_eq!(ended.data, data);
    reactor.holds_no_memory();
    let counters: Vec<_> = session.counters.named().into_iter().take(3).collect();
    assert_eq!(counters, [("commands", 2), ("bytes-read", 4096), ("bytes-written", 4096)]);
}

#[test]
fn a_large_write_is_asked_for_in_bursts_and_a_large_read_is_split() {
    // Data segments of more than 320 KiB are received directly into the memory of the write.
    for (header_digest, data_digest, longest) in
        [(false, false, 262_144), (true, true, 262_144), (false, true, 1 << 20), (false, false, 1 << 20)]
    {
        let connection = ConnectionParameters {
            header_digest,
            data_digest,
            max_receive_segment: longest,
            max_send_segment: 8192,
            ..ConnectionParameters::default()
        };
        let parameters =
            Parameters { max_outstanding_r2t: 3, max_burst_length: longest, ..Parameters::default() };
        let reactor = Reactor::new(rig::Options::default());
        let session = Session::open(&reactor, &[unit()], with(parameters, connection));
        let mut client = session.connect(&reactor);
        client.piece = longest as usize;
        let data = pattern(2 << 20);
        for immediate in [0, 4096, 65_536] {
            let ended = client.write(0, &write10(0, 4096), &data, immediate);
            assert_eq!((ended.status, ended.residual), (GOOD, Residual::None), "{immediate}");
        }
        assert_eq!(reactor.disks[0].bytes(0, 2 << 20), data);
        let ended = client.read(0, &read10(0, 4096), 2 << 20);
        assert_eq!(ended.status, GOOD);
        assert_eq!(ended.data, data);
        reactor.holds_no_memory();
    }
}

#[test]
fn several_r2ts_are_outstanding_at_once() {
    let reactor = Reactor::new(rig::Options::default());
    let session = Session::open(&reactor, &[unit()], Options::default());
    let mut client = session.connect(&reactor);
    let data = pattern(600_000 / 512 * 512);
    let itt = client.start_write(0, &write10(0, (data.len() / 512) as u16), data.len() as u32, &[]);
    let mut r2ts: Vec<R2t> = Vec::new();
    for _ in 0..2 {
        match client.receive() {
            Some((Response::R2t(r2t), _)) => r2ts.push(r2t),
            other => panic!("{other:?}"),
        }
    }
    assert_eq!((r2ts[0].offset, r2ts[0].desired_len, r2ts[1].offset), (0, 262_144, 262_144));
    assert_ne!(r2ts[0].ttt, r2ts[1].ttt);
    r2ts.iter().for_each(|r2t| client.answer(r2t, &data, 100_000));
    let Some((Response::R2t(third), _)) = client.receive() else { panic!() };
    client.answer(&third, &data, 100_000);
    let Some((Response::ScsiResponse(pdu), _)) = client.receive() else { panic!() };
    assert_eq!((pdu.itt, pdu.status, pdu.exp_data_sn), (itt, GOOD, 3));
    assert_eq!(reactor.disks[0].bytes(0, data.len()), data);
}

#[test]
fn unsolicited_data_follows_the_command_without_r2t() {
    let parameters = Parameters { initial_r2t: false, ..Parameters::default() };
    let reactor = Reactor::new(rig::Options::default());
    let session = Session::open(&reactor, &[unit()], with(parameters, Options::default().connection));
    let mut client = session.connect(&reactor);
    let data = pattern(131_072);
    let mut command = client.command(0, &write10(0, 256), 131_072, true);
    command.is_final = false;
    client.send(Request::ScsiCommand(command), false, &data[..1024]);
    for (number, offset) in (1024..65_536).step_by(10_240).enumerate() {
        let end = (offset + 10_240).min(65_536);
        let pdu = DataOut {
            is_final: end == 65_536,
            lun: command.lun,
            itt: command.itt,
            ttt: RESERVED_TAG,
            exp_stat_sn: 0,
            data_sn: number as u32,
            offset: offset as u32,
        };
        client.send(Request::DataOut(pdu), false, &data[offset..end]);
    }
    let ended = client.end_of(command.itt, &data);
    assert_eq!(ended.status, GOOD);
    assert_eq!(reactor.disks[0].bytes(0, data.len()), data);
}

#[test]
fn unsolicited_data_that_was_not_agreed_on_fails_the_command_only() {
    let reactor = Reactor::new(rig::Options::default());
    let session = Session::open(&reactor, &[unit()], Options::default());
    let mut client = session.connect(&reactor);
    let mut command = client.command(0, &write10(0, 256), 131_072, true);
    command.is_final = false;
    client.send(Request::ScsiCommand(command), false, &[1; 512]);
    let last = DataOut {
        is_final: true,
        lun: command.lun,
        itt: command.itt,
        ttt: RESERVED_TAG,
        exp_stat_sn: 0,
        data_sn: 0,
        offset: 512,
    };
    client.send(Request::DataOut(last), false, &[1; 200_000]);
    let ended = client.end_of(command.itt, &[]);
    assert_eq!((ended.status, ended.sense), (CHECK, (0xB, 0x0C, 0x0C)));
    assert_eq!(ended.residual, Residual::Underflow(131_072));
    assert!(reactor.disks[0].seen().is_empty());
    assert_eq!(client.read(0, &read10(0, 1), 512).status, GOOD);
    reactor.holds_no_memory();
}

#[test]
fn data_sn_out_of_order_fails_the_command_when_its_sequence_has_ended() {
    let reactor = Reactor::new(rig::Options::default());
    let session = Session::open(&reactor, &[unit()], Options::default());
    let mut client = session.connect(&reactor);
    let itt = client.start_write(0, &write10(0, 16), 8192, &[]);
    let Some((Response::R2t(r2t), _)) = client.receive() else { panic!() };
    let mut pdu =
        DataOut { is_final: false, lun: r2t.lun, itt, ttt: r2t.ttt, exp_stat_sn: 0, data_sn: 1, offset: 0 };
    client.send(Request::DataOut(pdu), false, &[1; 4096]);
    let Some((Response::Reject(reject), header)) = client.receive() else { panic!() };
    assert_eq!((reject.reason, header.len()), (RejectReason::ProtocolError, 48));
    (pdu.is_final, pdu.data_sn, pdu.offset) = (true, 2, 4096);
    client.send(Request::DataOut(pdu), false, &[1; 4096]);
    let ended = {
        let (response, sense) = client.receive().unwrap();
        let Response::ScsiResponse(pdu) = response else { panic!("{response:?}") };
        (pdu.itt, pdu.status, super::client::sense_of(&sense))
    };
    assert_eq!(ended, (itt, CHECK, (0xB, 0x47, 0x05)));
    assert!(reactor.disks[0].seen().is_empty(), "nothing was written");
    assert_eq!(client.read(0, &read10(0, 1), 512).status, GOOD);
}

#[test]
fn a_wrong_data_digest_is_rejected_and_fails_the_command() {
    let connection =
        ConnectionParameters { data_digest: true, header_digest: true, ..Options::default().connection };
    let reactor = Reactor::new(rig::Options::default());
    let session = Session::open(&reactor, &[unit()], with(Parameters::default(), connection));
    let mut client = session.connect(&reactor);
    // The data is in the command, in a single PDU.
    for len in [512, 40_000 / 512 * 512] {
        let command = client.command(0, &write10(0, (len / 512) as u16), len, true);
        let mut bytes = client.encode(Request::ScsiCommand(command), false, &vec![7; len as usize]);
        *bytes.last_mut().unwrap() ^= 1;
        use std::io::Write as _;
        client.stream.write_all(&bytes).unwrap();
        let Some((Response::Reject(reject), _)) = client.receive() else { panic!() };
        assert_eq!(reject.reason, RejectReason::DataDigestError);
        let ended = client.end_of(command.itt, &[]);
        assert_eq!((ended.status, ended.sense), (CHECK, (0xB, 0x47, 0x05)));
    }
    // The data is in a long Data-Out, most of which the kernel writes into the task's memory.
    let itt = client.start_write(0, &write10(0, 512), 262_144, &[]);
    let Some((Response::R2t(r2t), _)) = client.receive() else { panic!() };
    let pdu =
        DataOut { is_final: true, lun: r2t.lun, itt, ttt: r2t.ttt, exp_stat_sn: 0, data_sn: 0, offset: 0 };
    let mut bytes = client.encode(Request::DataOut(pdu), false, &vec![7; 262_144]);
    bytes[200_000] ^= 0x10;
    use std::io::Write as _;
    client.stream.write_all(&bytes).unwrap();
    let Some((Response::Reject(reject), _)) = client.receive() else { panic!() };
    assert_eq!(reject.reason, RejectReason::DataDigestError);
    let Some((Response::ScsiResponse(response), sense)) = client.receive() else { panic!() };
    assert_eq!((response.status, super::client::sense_of(&sense)), (CHECK, (0xB, 0x47, 0x05)));
    assert!(reactor.disks[0].seen().is_empty());
    assert_eq!(client.write(0, &write10(0, 1), &[9; 512], 512).status, GOOD);
    reactor.holds_no_memory();
}

#[test]
fn a_wrong_header_digest_ends_the_session_and_no_other() {
    let connection = ConnectionParameters { header_digest: true, ..Options::default().connection };
    let reactor = Reactor::new(rig::Options::default());
    let unit = unit();
    let bad = Session::open(&reactor, std::slice::from_ref(&unit), with(Parameters::default(), connection));
    let other = Options { initiator: "iqn.2026-11.example:other", ..Options::default() };
    let good = Session::open(&reactor, &[unit], other);
    let (mut client, mut neighbour) = (bad.connect(&reactor), good.connect(&reactor));
    let command = client.command(0, &read10(0, 1), 512, false);
    let mut bytes = client.encode(Request::ScsiCommand(command), false, &[]);
    bytes[40] ^= 1;
    use std::io::Write as _;
    client.stream.write_all(&bytes).unwrap();
    assert!(client.receive().is_none());
    assert_eq!(bad.gone(), EndReason::Protocol);
    assert_eq!(neighbour.read(0, &read10(0, 1), 512).status, GOOD);
}

#[test]
fn lengths_that_disagree_are_reported_as_residuals() {
    let reactor = Reactor::new(rig::Options::default());
    let session = Session::open(&reactor, &[unit()], Options::default());
    let mut client = session.connect(&reactor);
    let ended = client.read(0, &read10(0, 1), 8192);
    assert_eq!((ended.status, ended.residual, ended.data.len()), (GOOD, Residual::Underflow(7680), 512));
    let ended = client.read(0, &read10(0, 16), 512);
    assert_eq!((ended.residual, ended.data.len()), (Residual::Overflow(7680), 512));
    // INQUIRY with an allocation length of 36 bytes; the initiator expects 96.
    let mut inquiry = [0; 16];
    (inquiry[0], inquiry[4]) = (0x12, 36);
    let ended = client.read(0, &inquiry, 96);
    assert_eq!((ended.status, ended.residual, ended.data.len()), (GOOD, Residual::Underflow(60), 36));
}

#[test]
fn giant_lengths_get_no_memory() {
    let reactor = Reactor::new(rig::Options::default());
    let session = Session::open(&reactor, &[unit()], Options::default());
    let mut client = session.connect(&reactor);
    // READ(16) of 4 G blocks; the initiator expects 4 GiB.
    let mut cdb = [0; 16];
    cdb[0] = 0x88;
    cdb[10..14].fill(0xFF);
    let ended = client.read(0, &cdb, u32::MAX);
    assert_eq!(ended.status, CHECK);
    cdb[0] = 0x8A;
    let itt = client.start_write(0, &cdb, u32::MAX, &[1; 512]);
    let ended = client.end_of(itt, &[]);
    assert_eq!(ended.status, CHECK);
    // The command takes one block, although 4 GiB are announced: the R2T requests one block.
    let itt = client.start_write(0, &write10(3, 1), u32::MAX, &[]);
    let Some((Response::R2t(r2t), _)) = client.receive() else { panic!("no R2T") };
    assert_eq!(r2t.desired_len, 512);
    client.answer(&r2t, &[5; 512], 512);
    let Some((Response::ScsiResponse(response), _)) = client.receive() else { panic!() };
    assert_eq!((response.itt, response.residual), (itt, Residual::Underflow(u32::MAX - 512)));
    reactor.holds_no_memory();
}

#[test]
fn a_data_segment_longer_than_declared_ends_the_session() {
    let connection = ConnectionParameters { max_receive_segment: 8192, ..Options::default().connection };
    let reactor = Reactor::new(rig::Options::default());
    let session = Session::open(&reactor, &[unit()], with(Parameters::default(), connection));
    let mut client = session.connect(&reactor);
    client.start_write(0, &write10(0, 32), 16_384, &[1; 16_384]);
    let Some((Response::Reject(reject), _)) = client.receive() else { panic!() };
    assert_eq!(reject.reason, RejectReason::ProtocolError);
    assert!(client.receive().is_none());
    assert_eq!(session.gone(), EndReason::Protocol);
}

#[test]
fn a_failed_request_ends_with_sense_data() {
    let reactor = Reactor::new(rig::Options::default());
    let session = Session::open(&reactor, &[unit()], Options::default());
    let mut client = session.connect(&reactor);
    reactor.disks[0].fail(Some(block::Status::Medium));
    let ended = client.read(0, &read10(0, 1), 512);
    assert_eq!((ended.status, ended.sense.0), (CHECK, 3));
    reactor.disks[0].fail(None);
    assert_eq!(client.read(0, &read10(0, 1), 512).status, GOOD);
}

#[test]
fn a_lun_that_does_not_exist_is_reported_as_such() {
    let reactor = Reactor::new(rig::Options::default());
    let session = Session::open(&reactor, &[unit()], Options::default());
    let mut client = session.connect(&reactor);
    let ended = client.read(5, &read10(0, 1), 512);
    assert_eq!((ended.status, ended.sense), (CHECK, (5, 0x25, 0)));
    let mut report = [0; 16];
    (report[0], report[8], report[9]) = (0xA0, 1, 0);
    let ended = client.read(5, &report, 256);
    assert_eq!((ended.status, &ended.data[..4]), (GOOD, &[0, 0, 0, 8][..]));
}

#[test]
fn more_commands_than_tags_are_all_answered_and_the_window_waits_for_them() {
    let reactor = Reactor::new(rig::Options { depth: 2, ..rig::Options::default() });
    let session = Session::open(&reactor, &[unit()], Options::default());
    let mut client = session.connect(&reactor);
    reactor.disks[0].hold(true);
    for number in 0..32 {
        client.start_write(0, &write10(number, 1), 512, &[number as u8; 512]);
    }
    // A later PDU shows that they have arrived, and that the window is closed.
    client.ping(&[]);
    assert_eq!(client.max_cmd_sn, FIRST.wrapping_add(31));
    assert_eq!(reactor.disks[0].held(), 2);
    reactor.release(0);
    for _ in 0..32 {
        let Some((Response::ScsiResponse(response), _)) = client.receive() else { panic!() };
        assert_eq!(response.status, GOOD);
    }
    assert_eq!(client.max_cmd_sn, FIRST.wrapping_add(63), "it is open again");
    for number in 0..32 {
        assert_eq!(reactor.disks[0].bytes(number * 512, 512), vec![number as u8; 512]);
    }
    reactor.holds_no_memory();
}

#[test]
fn writes_wait_for_memory_before_they_ask_for_data() {
    let reactor = Reactor::new(rig::Options { memory: 2 << 20, ..rig::Options::default() });
    let session = Session::open(&reactor, &[unit()], Options::default());
    let mut client = session.connect(&reactor);
    reactor.disks[0].hold(true);
    let data = pattern(1 << 20);
    let tasks: Vec<u32> =
        (0..8).map(|number| client.start_write(0, &write10(number * 2048, 2048), 1 << 20, &[])).collect();
    client.ping_ignoring_r2ts();
    assert!(reactor.memory_held() <= 4 << 20, "{}", reactor.memory_held());
    reactor.release(0);
    client.finish_all(&tasks, &data);
    for number in 0..8 {
        assert_eq!(reactor.disks[0].bytes(number << 20, 1 << 20), data);
    }
    reactor.holds_no_memory();
}

#[test]
fn large_reads_that_complete_inline_are_read_as_far_as_they_are_sent() {
    let reactor = Reactor::new(rig::Options { inline: true, ..rig::Options::default() });
    let session = Session::open(&reactor, &[unit()], Options::default());
    let mut client = session.connect(&reactor);
    reactor.disks[0].fill(0, &pattern(2 << 20));
    let tasks: Vec<u32> = (0..16).map(|_| client.start_read(0, &read10(0, 4096), 2 << 20)).collect();
    while reactor.memory_held() == 0 {}
    for _ in 0..50 {
        let held = reactor.memory_held();
        assert!(held <= 4 << 20, "{held} bytes are held for reads");
    }
    for task in tasks {
        let ended = client.end_of(task, &[]);
        assert_eq!((ended.status, ended.data == pattern(2 << 20)), (GOOD, true));
    }
    reactor.holds_no_memory();
}

#[test]
fn a_header_with_additional_segments_is_received_in_pieces() {
    let connection =
        ConnectionParameters { header_digest: true, data_digest: true, ..Options::default().connection };
    let reactor = Reactor::new(rig::Options::default());
    let session =
        Session::open(&reactor, std::slice::from_ref(&unit()), with(Parameters::default(), connection));
    let mut client = session.connect(&reactor);
    // A CDB of 32 bytes with a service action that no device supports.
    let mut cdb = [0; 16];
    (cdb[0], cdb[7], cdb[8]) = (0x7F, 24, 0x7F);
    let command = client.command(0, &cdb, 512, false);
    let mut bhs = [0; 48];
    let header = proto::iscsi::pdu::Header {
        pdu: Request::ScsiCommand(command),
        immediate: false,
        ahs_len: 20,
        data_len: 0,
    };
    header.encode(&mut bhs);
    let mut bytes = bhs.to_vec();
    proto::iscsi::pdu::Ahs::put_extended_cdb(&mut bytes, &[0; 16]);
    assert_eq!(bytes.len(), 68);
    let digest = proto::iscsi::digest::of(&bytes);
    bytes.extend_from_slice(&digest);
    // The last chunk contains another command.
    let read = client.command(0, &read10(0, 1), 512, false);
    bytes.extend_from_slice(&client.encode(Request::ScsiCommand(read), false, &[]));
    for piece in bytes.chunks(23) {
        use std::io::Write as _;
        client.stream.write_all(piece).unwrap();
        reactor.memory_held();
    }
    let ended = client.end_of(command.itt, &[]);
    assert_eq!((ended.status, ended.sense.0), (CHECK, 5));
    assert_eq!(client.end_of(read.itt, &[]).status, GOOD);
}
