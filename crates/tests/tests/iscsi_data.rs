//! Data transfer, digests and task management of iSCSI sessions, compared with the file behind the target.

use blockyard_tests::iscsi::initiator::Initiator;
use blockyard_tests::iscsi::{NAME, Target, file_stack};
use blockyard_tests::on_both_engines;
use blockyard_tests::server::{Engine, Sandbox};
use proto::iscsi::initiator::Options;
use proto::iscsi::parameters::{DigestOffer, Offer};
use proto::iscsi::pdu::{
    DataOut, RESERVED_TAG, RejectReason, Request, Response, ScsiCommand, TaskFunction, TaskResult,
};
use std::path::{Path, PathBuf};

on_both_engines!(
    a_long_write_is_asked_for_in_several_bursts_at_once,
    data_arrives_as_it_was_sent_in_every_way_of_sending,
    a_wrong_data_digest_fails_its_command_only,
);

const MIB: u64 = 1 << 20;
const ONE: &str = "iqn.2026-11.io.blockyard.test:one";
const TWO: &str = "iqn.2026-11.io.blockyard.test:two";
/// TEST UNIT READY.
const READY: [u8; 6] = [0; 6];

/// READ (10) or WRITE (10), in blocks.
fn cdb(code: u8, block: u32, count: u16) -> [u8; 10] {
    let ([a, b, c, d], [e, f]) = (block.to_be_bytes(), count.to_be_bytes());
    [code, 0, a, b, c, d, 0, e, f, 0]
}

fn read(block: u32, count: u16) -> [u8; 10] {
    cdb(0x28, block, count)
}

fn write(block: u32, count: u16) -> [u8; 10] {
    cdb(0x2A, block, count)
}

/// Logs in with these values, and clears the unit attentions.
#[track_caller]
fn session(target: &Target, initiator: &str, offer: Offer) -> Initiator {
    let options = Options { offer, ..Options::new(initiator, Some(NAME)) };
    let mut session = Initiator::log_in(target.portal(), options).expect("a login");
    session.attentions(0);
    session
}

fn plain() -> Offer {
    Offer { header_digest: DigestOffer::None, data_digest: DigestOffer::None, ..Offer::default() }
}

/// A file of 8 MiB as a target.
fn serve(sandbox: &Sandbox, more: &[&str]) -> (Target, PathBuf) {
    let image = sandbox.image("disk.img", 8 * MIB);
    (Target::serve(sandbox, &file_stack(&image), "", more), image)
}

fn content(path: &Path, offset: usize, len: usize) -> Vec<u8> {
    std::fs::read(path).expect("the image")[offset..offset + len].to_vec()
}

fn noise(sandbox: &Sandbox, len: usize) -> Vec<u8> {
    std::fs::read(sandbox.noise("noise", len)).expect("noise")
}

fn send(session: &mut Initiator, command: ScsiCommand, data: &[u8]) {
    session.send(Request::ScsiCommand(command), false, data).expect("sent");
}

fn a_long_write_is_asked_for_in_several_bursts_at_once(engine: Engine) {
    let sandbox = Sandbox::new(engine);
    let (target, image) = serve(&sandbox, &[]);
    let wanted =
        Offer { max_burst_length: 65_536, max_outstanding_r2t: 4, immediate_data: false, ..Offer::default() };
    let mut session = session(&target, ONE, wanted);
    let parameters = session.parameters;
    assert_eq!((parameters.max_burst_length, parameters.max_outstanding_r2t), (65_536, 4));
    let data = noise(&sandbox, 512 << 10);
    let command = session.scsi(0, &write(16, 1024), 512 << 10, 0);
    send(&mut session, command, &[]);
    let mut r2ts = Vec::new();
    while r2ts.len() < 4 {
        match session.receive().expect("a PDU").0 {
            Response::R2t(r2t) => r2ts.push(r2t),
            other => panic!("{other:?}"),
        }
    }
    let asked = r2ts.iter().map(|r2t| (r2t.r2t_sn, r2t.offset, r2t.desired_len));
    assert_eq!(asked.collect::<Vec<_>>(), [0, 1, 2, 3].map(|n| (n, n * 65_536, 65_536)));
    r2ts.iter().for_each(|r2t| session.send_burst(r2t, &data).expect("sent"));
    assert_eq!(session.finish(command.itt, &data, 0).expect("an end").status, 0);
    assert_eq!(session.r2ts.len(), 4, "the other half of the bursts");
    assert!(content(&image, 8192, 512 << 10) == data);
    assert!(session.good(0, &read(16, 1024), &[], 512 << 10) == data);
}

fn data_arrives_as_it_was_sent_in_every_way_of_sending(engine: Engine) {
    let sandbox = Sandbox::new(engine);
    let (target, image) = serve(&sandbox, &[]);
    let noise = noise(&sandbox, 1 << 20);
    let digests = [DigestOffer::None, DigestOffer::Crc32c];
    let ways = digests.into_iter().flat_map(|digest| [1, 8].map(|r2ts| (digest, r2ts)));
    for (digest, r2ts) in ways {
        for (initial_r2t, immediate_data) in [(false, false), (false, true), (true, false), (true, true)] {
            let offer = Offer {
                header_digest: digest,
                data_digest: digest,
                initial_r2t,
                immediate_data,
                max_outstanding_r2t: r2ts,
                first_burst_length: 32_768,
                max_burst_length: 131_072,
                max_recv_data_segment_length: 65_536,
                ..Offer::default()
            };
            let mut session = session(&target, ONE, offer);
            let is_on = digest == DigestOffer::Crc32c;
            assert_eq!((session.connection.header_digest, session.connection.data_digest), (is_on, is_on));
            assert_eq!(
                (session.parameters.initial_r2t, session.parameters.immediate_data),
                (initial_r2t, immediate_data)
            );
            for blocks in [1, 7, 64, 65, 1000] {
                let start = fastrand::usize(..1000) * 512;
                let data = &noise[start..start + blocks * 512];
                session.good(0, &write(3, blocks as u16), data, 0);
                assert!(content(&image, 3 * 512, data.len()) == data, "{blocks} blocks");
                assert!(session.good(0, &read(3, blocks as u16), &[], data.len() as u32) == data);
            }
            if !initial_r2t {
                unsolicited(&mut session, &noise, &image);
            }
            session.log_out();
        }
    }
}

/// Writes with a first burst of unsolicited Data-Out PDUs, and the rest after R2Ts.
fn unsolicited(session: &mut Initiator, noise: &[u8], image: &Path) {
    let data = &noise[512..][..100 * 512];
    let command = ScsiCommand { is_final: false, ..session.scsi(0, &write(2000, 100), data.len() as u32, 0) };
    let immediate = if session.parameters.immediate_data { 4096 } else { 0 };
    send(session, command, &data[..immediate]);
    let burst = &data[immediate..32_768];
    let mut offset = immediate;
    for (data_sn, segment) in (0..).zip(burst.chunks(8192)) {
        let is_final = offset + segment.len() == 32_768;
        let ScsiCommand { lun, itt, exp_stat_sn, .. } = command;
        let pdu =
            DataOut { is_final, lun, itt, ttt: RESERVED_TAG, exp_stat_sn, data_sn, offset: offset as u32 };
        session.send(Request::DataOut(pdu), false, segment).expect("sent");
        offset += segment.len();
    }
    session.r2ts.clear();
    let answer = session.finish(command.itt, data, 0).expect("an end");
    assert_eq!(answer.status, 0, "{answer:?}");
    assert_eq!(
        session.r2ts.iter().map(|r2t| (r2t.offset, r2t.desired_len)).collect::<Vec<_>>(),
        [(32_768, 18_432)]
    );
    assert!(content(image, 2000 * 512, data.len()) == data);
}

fn a_wrong_data_digest_fails_its_command_only(engine: Engine) {
    let sandbox = Sandbox::new(engine);
    let (target, image) = serve(&sandbox, &[]);
    let mut session = session(&target, ONE, Offer::default());
    assert!(session.connection.data_digest);
    let command = session.scsi(0, &write(0, 8), 4096, 0);
    let mut bytes = session.encode(Request::ScsiCommand(command), false, &[1; 4096]);
    bytes[1000] ^= 1;
    session.send_bytes(&bytes).expect("sent");
    let answer = session.finish(command.itt, &[1; 4096], 0).expect("an end");
    assert_eq!(answer.status, 2);
    assert_eq!(answer.sense_code(), Some((0xB, 0x47, 5)), "PROTOCOL SERVICE CRC ERROR");
    let is_digest =
        |pdu: &Response| matches!(pdu, Response::Reject(it) if it.reason == RejectReason::DataDigestError);
    assert!(session.events.iter().any(is_digest), "{:?}", session.events);
    assert_eq!(content(&image, 0, 4096), [0; 4096]);
    session.good(0, &write(0, 8), &[2; 4096], 0);
    assert_eq!(content(&image, 0, 4096), [2; 4096]);
    let show = sandbox.run(&["show", "disk"]).ok();
    assert!(show.contains("digest-errors=1 rejects=1"), "{show}");
}

#[test]
fn a_wrong_header_digest_ends_its_session_only() {
    let sandbox = Sandbox::default();
    let (target, _) = serve(&sandbox, &[]);
    let mut bad = session(&target, ONE, Offer::default());
    let mut neighbour = session(&target, TWO, Offer::default());
    let command = bad.scsi(0, &READY, 0, 0);
    let mut bytes = bad.encode(Request::ScsiCommand(command), false, &[]);
    bytes[33] ^= 1;
    bad.send_bytes(&bytes).expect("sent");
    assert_eq!(bad.wait_for_end(), []);
    assert_eq!(neighbour.command(0, &READY, &[], 0).expect("an answer").status, 0);
    assert_eq!(
        session(&target, ONE, Offer::default()).command(0, &READY, &[], 0).expect("an answer").status,
        0
    );
}

#[test]
fn a_write_under_way_is_aborted_and_not_answered() {
    let sandbox = Sandbox::default();
    let (target, _) = serve(&sandbox, &["--layer", "delay,write=500ms"]);
    let mut session = session(&target, ONE, plain());
    let command = session.scsi(0, &write(0, 8), 4096, 0);
    send(&mut session, command, &[1; 4096]);
    sandbox.await_in_flight("disk", "write");
    assert_eq!(
        session.manage(TaskFunction::AbortTask, 0, Some(&command)).expect("an answer"),
        TaskResult::Complete
    );
    assert!(!sandbox.run(&["inflight", "disk"]).ok().contains("write"), "it has left the device");
    assert_eq!(session.command(0, &READY, &[], 0).expect("an answer").status, 0);
    assert_eq!(session.events, [], "an aborted command has no response");
    let gone = session.manage(TaskFunction::AbortTask, 0, Some(&command)).expect("an answer");
    assert_eq!(gone, TaskResult::NoTask);
    // A write that waits for data.
    let waiting = session.scsi(0, &write(8, 8), 4096, 0);
    send(&mut session, waiting, &[]);
    assert!(matches!(session.receive().expect("a PDU").0, Response::R2t(_)));
    assert_eq!(
        session.manage(TaskFunction::AbortTask, 0, Some(&waiting)).expect("an answer"),
        TaskResult::Complete
    );
    session.good(0, &write(8, 8), &[3; 4096], 0);
    assert_eq!(session.good(0, &read(8, 8), &[], 4096), [3; 4096]);
}

#[test]
fn a_reset_of_a_unit_aborts_the_commands_of_all_sessions() {
    let sandbox = Sandbox::default();
    let (target, _) = serve(&sandbox, &["--layer", "delay,write=500ms"]);
    let mut own = session(&target, ONE, plain());
    let mut other = session(&target, TWO, plain());
    let command = other.scsi(0, &write(0, 8), 4096, 0);
    send(&mut other, command, &[1; 4096]);
    sandbox.await_in_flight("disk", "write");
    let missing = own.manage(TaskFunction::LogicalUnitReset, 7, None).expect("an answer");
    assert_eq!(missing, TaskResult::NoLun);
    assert_eq!(own.manage(TaskFunction::LogicalUnitReset, 0, None).expect("an answer"), TaskResult::Complete);
    let attentions = other.attentions(0);
    assert!(attentions.iter().any(|(code, _)| *code == 0x29), "{attentions:02x?}");
    const TASK_ABORTED: u8 = 0x40;
    let is_end = |pdu: &Response| matches!(pdu, Response::ScsiResponse(end) if end.itt == command.itt && end.status == TASK_ABORTED);
    assert!(other.events.iter().any(is_end), "{:?}", other.events);
    other.good(0, &write(0, 8), &[2; 4096], 0);
}

#[test]
fn a_cold_reset_ends_the_sessions_of_the_target() {
    let sandbox = Sandbox::default();
    let (target, _) = serve(&sandbox, &[]);
    let mut own = session(&target, ONE, plain());
    let other = session(&target, TWO, plain());
    assert_eq!(own.manage(TaskFunction::TargetColdReset, 0, None).expect("an answer"), TaskResult::Complete);
    own.wait_for_end();
    other.wait_for_end();
    session(&target, ONE, plain()).good(0, &READY, &[], 0);
}

#[test]
fn blocks_of_4_kib_are_served_as_such() {
    let sandbox = Sandbox::default();
    let image = sandbox.image("disk.img", 8 * MIB);
    let target = Target::serve(&sandbox, &format!("{},block=4K", file_stack(&image)), "", &[]);
    let mut session = session(&target, ONE, plain());
    let capacity = session.good(0, &[0x9E, 0x10, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 32, 0, 0], &[], 32);
    assert_eq!(capacity[..8], 2047u64.to_be_bytes());
    assert_eq!(capacity[8..12], 4096u32.to_be_bytes());
    assert_eq!(capacity[13] & 0xF, 0, "a physical block is a logical one");
    session.good(0, &write(5, 2), &[7; 8192], 0);
    assert_eq!(content(&image, 5 * 4096, 8192), [7; 8192]);
    let beyond = session.command(0, &write(2047, 2), &[7; 8192], 0).expect("an answer");
    assert_eq!(beyond.sense_code(), Some((5, 0x21, 0)));
}

#[test]
fn a_read_only_lun_refuses_writes() {
    let sandbox = Sandbox::default();
    let image = sandbox.image("disk.img", 8 * MIB);
    for (stack, options) in [(file_stack(&image), ",ro"), (format!("{},ro", file_stack(&image)), "")] {
        let target = Target::serve(&sandbox, &stack, options, &[]);
        let mut session = session(&target, ONE, plain());
        let refused = session.command(0, &write(0, 1), &[7; 512], 0).expect("an answer");
        assert_eq!(refused.sense_code(), Some((7, 0x27, 0)), "WRITE PROTECTED: {stack} {options}");
        assert_eq!(session.good(0, &read(0, 1), &[], 512), [0; 512]);
        let mode = session.good(0, &[0x1A, 0, 0x3F, 0, 192, 0], &[], 192);
        assert_eq!(mode[2] & 0x80, 0x80, "the WP bit of the mode parameter header");
    }
}
