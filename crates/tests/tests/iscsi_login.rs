//! Logins at iSCSI targets: CHAP, ACLs, digests, several connections of a session, reinstatement, discovery.

use blockyard_tests::iscsi::initiator::Initiator;
use blockyard_tests::iscsi::{NAME, Target, chap_file, free_port};
use blockyard_tests::server::Sandbox;
use blockyard_tests::tools::{PATIENCE, run, until};
use proto::iscsi::chap::Algorithm;
use proto::iscsi::initiator::{Failure, Options};
use proto::iscsi::login::{Credentials, Secret, Status};
use proto::iscsi::parameters::{DigestOffer, Offer};
use proto::iscsi::pdu::{
    Isid, RESERVED_TAG, Request, Response, TaskFunction, TaskManagement, TaskManagementResponse, TaskResult,
    Text,
};
use std::time::{Duration, Instant};

const ONE: &str = "iqn.2026-11.io.blockyard.test:one";
const TWO: &str = "iqn.2026-11.io.blockyard.test:two";
const SECRET: &str = "0123456789abcdef";
const MUTUAL: &str = "fedcba9876543210";
/// TEST UNIT READY.
const READY: [u8; 6] = [0; 6];
/// WRITE (10) of the first block.
const WRITE: [u8; 10] = [0x2A, 0, 0, 0, 0, 0, 0, 0, 1, 0];

fn options(initiator: &str) -> Options {
    Options::new(initiator, Some(NAME))
}

fn user(name: &str, secret: &str) -> Option<Credentials> {
    Some(Credentials { name: name.to_owned(), secret: Secret::new(secret) })
}

/// Logs in and out; returns the reason if it is refused.
fn attempt(portal: &str, options: Options) -> Option<Failure> {
    Initiator::log_in(portal, options).map(Initiator::log_out).err()
}

/// Serves 1 MiB to users of a file; `mutual`: the target proves itself, too.
fn guarded(sandbox: &Sandbox, mutual: bool) -> Target {
    let file = chap_file(sandbox, "user", SECRET);
    if mutual {
        std::fs::write(&file, format!("user:{SECRET}\nmutual target:{MUTUAL}\n")).expect("it is ours");
    }
    Target::serve(sandbox, "ram:1M", &format!(",chap={file}"), &[])
}

#[test]
fn every_algorithm_authenticates_one_side_and_both() {
    let sandbox = Sandbox::default();
    let target = guarded(&sandbox, true);
    for algorithm in Algorithm::ALL {
        for (base64, mutual) in [(false, false), (false, true), (true, false), (true, true)] {
            let options = Options {
                credentials: user("user", SECRET),
                target_credentials: user("target", MUTUAL).filter(|_| mutual),
                algorithms: vec![algorithm],
                base64,
                ..options(ONE)
            };
            assert_eq!(attempt(target.portal(), options), None, "{algorithm:?} {base64} {mutual}");
        }
    }
}

#[test]
fn wrong_users_and_secrets_are_refused() {
    let sandbox = Sandbox::default();
    let target = guarded(&sandbox, true);
    let refused = Some(Failure::Refused(Status::AuthenticationFailure));
    for algorithm in Algorithm::ALL {
        for credentials in [user("user", "0123456789abcdeX"), user("user", MUTUAL), user("target", MUTUAL)] {
            let options = Options { credentials, algorithms: vec![algorithm], ..options(ONE) };
            assert_eq!(attempt(target.portal(), options), refused, "{algorithm:?}");
        }
    }
    assert_eq!(attempt(target.portal(), options(ONE)), refused, "without CHAP");
    let right = Options { credentials: user("user", SECRET), ..options(ONE) };
    assert_eq!(attempt(target.portal(), right.clone()), None);
    let other = Options { target_credentials: user("target", SECRET), ..right };
    assert_eq!(attempt(target.portal(), other), Some(Failure::TargetNotAuthenticated));
}

#[test]
fn a_target_without_a_mutual_secret_does_not_prove_itself() {
    let sandbox = Sandbox::default();
    let target = guarded(&sandbox, false);
    let wanted = Options {
        credentials: user("user", SECRET),
        target_credentials: user("target", MUTUAL),
        ..options(ONE)
    };
    assert!(attempt(target.portal(), wanted).is_some());
}

#[test]
fn unknown_initiators_and_targets_are_refused() {
    let sandbox = Sandbox::default();
    let target = Target::serve(&sandbox, "ram:1M", &format!(",acl={ONE}"), &[]);
    assert_eq!(attempt(target.portal(), options(ONE)), None);
    let refused = |status| Some(Failure::Refused(status));
    assert_eq!(attempt(target.portal(), options(TWO)), refused(Status::AuthorisationFailure));
    let elsewhere = Options::new(ONE, Some("iqn.2026-11.io.blockyard:other"));
    assert_eq!(attempt(target.portal(), elsewhere), refused(Status::NotFound));
    let log = target.server.as_ref().expect("a server").await_log("iSCSI logins failed");
    assert!(log.contains(&format!("initiator {TWO}, target_name {NAME}")), "{log}");
}

#[test]
fn digests_are_negotiated_as_the_target_is_configured() {
    let sandbox = Sandbox::default();
    let log_in = |target: &Target, digest: DigestOffer| {
        let offer = Offer { header_digest: digest, data_digest: digest, ..Offer::default() };
        let session = Initiator::log_in(target.portal(), Options { offer, ..options(ONE) })?;
        let digests = (session.connection.header_digest, session.connection.data_digest);
        session.log_out();
        Ok::<_, Failure>(digests)
    };
    let (off, on) = (Some((false, false)), Some((true, true)));
    for (option, expected) in [("auto", [off, on]), ("on", [None, on]), ("off", [off, None])] {
        let target = Target::serve(&sandbox, "ram:1M", &format!(",digests={option}"), &[]);
        for (digest, expected) in [DigestOffer::None, DigestOffer::Crc32c].into_iter().zip(expected) {
            assert_eq!(log_in(&target, digest).ok(), expected, "digests={option} with {digest:?}");
        }
    }
}

#[test]
fn connections_join_a_session_and_share_its_commands() {
    let sandbox = Sandbox::default();
    let target = Target::serve(&sandbox, "ram:1M", "", &[]);
    let offer = Offer { max_connections: 2, ..Offer::default() };
    let options = Options { offer, ..options(ONE) };
    let mut first = Initiator::log_in(target.portal(), options.clone()).expect("a login");
    assert_eq!(first.parameters.max_connections, 2);
    first.attentions(0);
    let join = |cid: u16, tsih: u16, cmd_sn: u32| {
        let options = Options { cid, tsih, cmd_sn, ..options.clone() };
        Initiator::log_in(target.portal(), options)
    };
    let mut second = join(1, first.tsih, first.next_number()).expect("it joins");
    assert_eq!(second.tsih, first.tsih);
    assert!(second.room() > 0, "the login response has the window of the session");
    let too_many = join(2, first.tsih, first.next_number()).err();
    assert_eq!(too_many, Some(Failure::Refused(Status::TooManyConnections)));
    let show = sandbox.run(&["show", "disk"]).ok();
    assert!(show.contains("(2 clients)") && show.matches("iscsi session").count() == 1, "{show}");

    // The second connection sends its command first. It waits for the one before it.
    let write = first.scsi(0, &WRITE, 512, 0);
    second.take_number();
    let read = second.scsi(0, &[0x28, 0, 0, 0, 0, 0, 0, 0, 1, 0], 0, 512);
    first.take_number();
    second.send(Request::ScsiCommand(read), false, &[]).expect("sent");
    first.send(Request::ScsiCommand(write), false, &[9; 512]).expect("sent");
    assert_eq!(first.finish(write.itt, &[9; 512], 0).expect("an end").status, 0);
    assert_eq!(second.finish(read.itt, &[], 512).expect("an end").data.len(), 512);

    // At error recovery level 0 a lost connection ends the session.
    drop(second);
    first.wait_for_end();
    assert_eq!(join(1, 1, 1).err(), Some(Failure::Refused(Status::NoSession)));
    assert_eq!(attempt(target.portal(), options.clone()), None);
}

#[test]
fn a_login_of_the_same_initiator_port_replaces_a_session_with_commands_under_way() {
    let sandbox = Sandbox::default();
    let target = Target::serve(&sandbox, "ram:1M", "", &["--layer", "delay,write=1s"]);
    let mut first = Initiator::log_in(target.portal(), options(ONE)).expect("a login");
    let other = Options { isid: Isid([0x80, 0, 0, 0, 0, 2]), ..options(ONE) };
    let mut other = Initiator::log_in(target.portal(), other).expect("a login");
    first.attentions(0);
    other.attentions(0);
    let write = first.scsi(0, &WRITE, 512, 0);
    first.send(Request::ScsiCommand(write), false, &[9; 512]).expect("sent");
    sandbox.await_in_flight("disk", "write");
    let mut second = Initiator::log_in(target.portal(), options(ONE)).expect("a login");
    assert_ne!(first.tsih, second.tsih);
    // The old session's write was aborted: it is not answered, and it is not in flight any more.
    assert_eq!(first.wait_for_end(), []);
    assert!(!sandbox.run(&["inflight", "disk"]).ok().contains("write"));
    second.attentions(0);
    assert_eq!(second.command(0, &READY, &[], 0).expect("an answer").status, 0);
    assert_eq!(second.command(0, &WRITE, &[8; 512], 0).expect("an answer").status, 0);
    assert_eq!(other.command(0, &READY, &[], 0).expect("an answer").status, 0, "another port stays");
}

/// An initiator that closes its connection without a logout, and logs in by another port, is another nexus: the first
/// one's reservation would refuse its commands.
#[test]
fn a_closed_session_has_ended_when_its_initiator_has_logged_in_again() {
    const RESERVE: [u8; 6] = [0x16, 0, 0, 0, 0, 0];
    let sandbox = Sandbox::default();
    let target = Target::serve(&sandbox, "ram:1M", "", &["--queues", "2"]);
    for round in 0..100 {
        let port = Options { isid: Isid([0x80, 0, 0, 0, 1, round]), ..options(ONE) };
        let mut session = Initiator::log_in(target.portal(), port).expect("a login");
        session.attentions(0);
        assert_eq!(session.command(0, &RESERVE, &[], 0).expect("an answer").status, 0, "{round}");
    }
}

#[test]
fn a_session_that_is_lost_with_commands_under_way_is_replaced() {
    let sandbox = Sandbox::default();
    let target = Target::serve(&sandbox, "ram:4M", "", &["--layer", "delay,write=300ms"]);
    let read = [0x28, 0, 0, 0, 0, 0, 0, 0, 8, 0];
    let write = [0x2A, 0, 0, 0, 0, 0, 0, 0, 8, 0];
    for round in 1..=5 {
        let mut session = Initiator::log_in(target.portal(), options(ONE)).expect("a login");
        session.attentions(0);
        session.good(0, &write, &[round; 4096], 0);
        for _ in 0..16 {
            let command = session.scsi(0, &write, 4096, 0);
            session.send(Request::ScsiCommand(command), false, &[round; 4096]).expect("sent");
        }
        drop(session);
        let mut session = Initiator::log_in(target.portal(), options(ONE)).expect("a login");
        assert_eq!(session.good(0, &read, &[], 4096), vec![round; 4096], "an acknowledged write is lost");
        session.log_out();
    }
    let show = || sandbox.run(&["show", "disk"]).ok();
    assert!(until(PATIENCE, || (!show().contains("iscsi session")).then_some(())).is_some(), "{}", show());
}

/// The target names and addresses of SendTargets=All.
fn discover(portal: &str, options: Options) -> Result<Vec<String>, Failure> {
    let mut session = Initiator::log_in(portal, Options { target: None, ..options })?;
    let (itt, cmd_sn) = (session.tag(), session.take_number());
    let pdu =
        Text { is_final: true, continues: false, lun: 0, itt, ttt: RESERVED_TAG, cmd_sn, exp_stat_sn: 0 };
    session.send(Request::Text(pdu), false, b"SendTargets=All\0").expect("sent");
    let (response, data) = session.receive().expect("an answer");
    assert!(matches!(response, Response::Text(_)), "{response:?}");
    let lines = data.split(|byte| *byte == 0).filter(|line| !line.is_empty());
    Ok(lines.map(|line| String::from_utf8(line.to_vec()).expect("text")).collect())
}

#[test]
fn several_targets_of_a_process_share_a_portal_and_are_listed() {
    let sandbox = Sandbox::default();
    let port = free_port();
    let export = |name: &str, size: u64| {
        format!(
            "[device.{name}]\nstack = \"ram:{size}M\"\n[[export]]\ndevice = \"{name}\"\n\
             iscsi = \"tcp:127.0.0.1:{port}\"\n"
        )
    };
    let _server = sandbox.up(&(export("a", 1) + &export("b", 2)), 2);
    let portal = format!("127.0.0.1:{port}");
    let name = |device: &str| format!("iqn.2026-11.io.blockyard:{device}");
    let listed = discover(&portal, Options::new(ONE, None)).expect("discovery");
    let address = format!("TargetAddress={portal},1");
    let expected = ["a", "b"].map(|device| [format!("TargetName={}", name(device)), address.clone()]);
    assert_eq!(listed, expected.concat());
    for (device, blocks) in [("a", 2048), ("b", 4096)] {
        let mut session =
            Initiator::log_in(&portal, Options::new(ONE, Some(&name(device)))).expect("a login");
        let capacity = session.good(0, &[0x25, 0, 0, 0, 0, 0, 0, 0, 0, 0], &[], 8);
        assert_eq!(capacity[..4], u32::to_be_bytes(blocks - 1), "{device}");
    }
}

#[test]
fn discovery_needs_its_own_secret() {
    let sandbox = Sandbox::default();
    let file = chap_file(&sandbox, "lister", SECRET);
    let target = Target::serve(&sandbox, "ram:1M", &format!(",discovery-chap={file}"), &[]);
    let refused = Failure::Refused(Status::AuthenticationFailure);
    assert_eq!(discover(target.portal(), options(ONE)), Err(refused));
    let credentials = user("lister", SECRET);
    let listed = discover(target.portal(), Options { credentials, ..options(ONE) }).expect("discovery");
    assert_eq!(listed[0], format!("TargetName={NAME}"));
    assert_eq!(attempt(target.portal(), options(ONE)), None, "sessions need none");
}

#[test]
fn an_initiator_that_does_not_answer_pings_is_dropped() {
    let sandbox = Sandbox::default();
    let port = free_port();
    let text = format!(
        r#"{{"fabric_modules": [],
          "storage_objects": [{{"name": "disk", "plugin": "ramdisk", "size": 1048576, "wwn": "a"}}],
          "targets": [{{"fabric": "iscsi", "wwn": "{NAME}", "tpgs": [{{"tag": 1, "enable": true,
              "attributes": {{"authentication": 0}}, "luns": [{{"index": 0, "storage_object": "/backstores/ramdisk/disk"}}],
              "portals": [{{"ip_address": "127.0.0.1", "port": {port}, "iser": false}}],
              "node_acls": [{{"node_wwn": "{ONE}", "mapped_luns": [{{"index": 0, "tpg_lun": 0, "write_protect": false}}],
                  "attributes": {{"nopin_timeout": 3, "nopin_response_timeout": 3}}}}]}}]}}]}}"#
    );
    let targetcli = |arguments: &[&str]| {
        let mut command = sandbox.blockyard(&[&["targetcli"], arguments].concat());
        command.env("BLOCKYARD_SAVECONFIG", sandbox.path("etc/saveconfig.json"));
        run(command.env("TARGETCLI_HOME", sandbox.path("home"))).ok();
    };
    sandbox.text("lio.json", &text);
    targetcli(&["restoreconfig", "lio.json"]);
    let start = Instant::now();
    let mut session = Initiator::log_in(&format!("127.0.0.1:{port}"), options(ONE)).expect("a login");
    assert_eq!(session.ping(b"hello").expect("an answer"), b"hello");
    let events = session.wait_for_end();
    let is_ping = |pdu: &Response| matches!(pdu, Response::NopIn(ping) if ping.ttt != RESERVED_TAG);
    assert!(events.iter().any(is_ping), "{events:?}");
    let lasted = start.elapsed();
    assert!(lasted > Duration::from_secs(5), "{lasted:?}");
    targetcli(&["clearconfig", "confirm=True"]);
}

/// RFC 7144: iSCSIProtocolLevel 2 permits a command priority, and the functions of SAM-4 and SAM-5.
#[test]
fn the_features_of_rfc_7144_are_negotiated_and_work() {
    let sandbox = Sandbox::default();
    let target = Target::serve(&sandbox, "ram:1M", "", &[]);
    for (offered, agreed) in [(1, 1), (2, 2), (31, 2)] {
        let offer = Offer {
            header_digest: DigestOffer::None,
            data_digest: DigestOffer::None,
            protocol_level: offered,
            ..Offer::default()
        };
        let options = Options { offer, ..options(ONE) };
        let mut session = Initiator::log_in(target.portal(), options).expect("a login");
        assert_eq!(session.parameters.protocol_level, agreed, "{offered} was offered");
        // The first unit attention of a session: POWER ON, RESET OR BUS DEVICE RESET OCCURRED, or I_T NEXUS
        // LOSS.
        let pending = query(&mut session, TaskFunction::QueryAsynchronousEvent);
        assert_eq!(pending.result, TaskResult::Succeeded);
        let is_told = agreed >= 2;
        assert_eq!(
            (pending.additional[0], pending.additional[1]),
            if is_told { (0x16, 0x29) } else { (0, 0) }
        );
        session.attentions(0);
        for function in
            [TaskFunction::QueryAsynchronousEvent, TaskFunction::QueryTask, TaskFunction::QueryTaskSet]
        {
            assert_eq!(query(&mut session, function).result, TaskResult::Complete, "{function:?}");
        }
        // A command with each priority (the lowest four bits of byte 2) is done as one without.
        for priority in 0..16 {
            let command = session.scsi(0, &WRITE, 512, 0);
            let itt = command.itt;
            let mut bytes = session.encode(Request::ScsiCommand(command), false, &[priority; 512]);
            bytes[2] = priority;
            session.send_bytes(&bytes).expect("sent");
            assert_eq!(session.finish(itt, &[], 0).expect("an answer").status, 0, "priority {priority}");
        }
        assert_eq!(session.good(0, &[0x28, 0, 0, 0, 0, 0, 0, 0, 1, 0], &[], 512), [15; 512]);
        assert_eq!(query(&mut session, TaskFunction::ItNexusReset).result, TaskResult::Complete);
        session.log_out();
    }
}

/// Sends a task management function to LUN 0, and returns its response.
fn query(session: &mut Initiator, function: TaskFunction) -> TaskManagementResponse {
    let (itt, cmd_sn) = (session.tag(), session.next_number());
    let pdu = TaskManagement {
        function,
        lun: 0,
        itt,
        referenced_itt: RESERVED_TAG,
        cmd_sn,
        exp_stat_sn: 0,
        ref_cmd_sn: 0,
        exp_data_sn: 0,
    };
    session.send(Request::TaskManagement(pdu), true, &[]).expect("sent");
    loop {
        if let (Response::TaskManagement(pdu), _) = session.receive().expect("an answer") {
            return pdu;
        }
    }
}
