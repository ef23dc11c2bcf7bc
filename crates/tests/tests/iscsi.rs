//! The life cycle of iSCSI targets: logins, access, LUNs that come, go and grow, and restarts.

use blockyard_tests::iscsi::initiator::Initiator;
use blockyard_tests::iscsi::{NAME, Target, file_stack, free_port};
use blockyard_tests::peer::Peer;
use blockyard_tests::server::Sandbox;
use blockyard_tests::tools::until;
use proto::iscsi::initiator::{Failure, Options};
use proto::iscsi::login::Status;
use proto::iscsi::pdu::{AsyncEvent, Isid, Response};
use proto::nbd::CommandFlags;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

const MIB: u64 = 1 << 20;
const ONE: &str = "iqn.2026-11.io.blockyard.test:one";
const TWO: &str = "iqn.2026-11.io.blockyard.test:two";
/// Long enough for a busy machine.
const TIMEOUT: Duration = Duration::from_secs(60);
/// TEST UNIT READY.
const READY: [u8; 6] = [0; 6];
const CONFLICT: u8 = 0x18;

/// Options of an initiator; `port` distinguishes the initiator ports of one name.
fn options(initiator: &str, port: u8) -> Options {
    Options { isid: Isid([0x80, 0, 0, 0, 0, port]), ..Options::new(initiator, Some(NAME)) }
}

#[track_caller]
fn session(target: &Target, initiator: &str, port: u8) -> Initiator {
    let mut session = Initiator::log_in(target.portal(), options(initiator, port)).expect("a login");
    session.attentions(0);
    session
}

/// Blocks of READ CAPACITY (10).
fn blocks(session: &mut Initiator, lun: u16) -> u64 {
    let data = session.good(lun, &[0x25, 0, 0, 0, 0, 0, 0, 0, 0, 0], &[], 8);
    u64::from(u32::from_be_bytes(data[..4].try_into().expect("four bytes"))) + 1
}

/// The LUNs of REPORT LUNS.
fn luns(session: &mut Initiator) -> Vec<u16> {
    let cdb = [0xA0, 0, 0, 0, 0, 0, 0, 0, 4, 0, 0, 0];
    let data = session.good(0, &cdb, &[], 1024);
    data[8..].chunks(8).map(|lun| u16::from_be_bytes([lun[0] & 0x3F, lun[1]])).collect()
}

/// PERSISTENT RESERVE OUT.
fn reserve_out(session: &mut Initiator, action: u8, kind: u8, key: u64, new: u64, flags: u8) -> u8 {
    let mut list = [0; 24];
    list[..8].copy_from_slice(&key.to_be_bytes());
    list[8..16].copy_from_slice(&new.to_be_bytes());
    list[20] = flags;
    let cdb = [0x5F, action, kind, 0, 0, 0, 0, 0, 24, 0];
    session.command(0, &cdb, &list, 0).expect("an answer").status
}

fn write_first_block(session: &mut Initiator) -> u8 {
    session.command(0, &[0x2A, 0, 0, 0, 0, 0, 0, 0, 1, 0], &[7; 512], 0).expect("an answer").status
}

fn is_logout_request(pdu: &Response) -> bool {
    matches!(pdu, Response::AsyncMessage(it) if matches!(it.event, AsyncEvent::RequestLogout { .. }))
}

#[test]
fn the_ready_line_has_the_uri_and_the_session_is_shown() {
    let sandbox = Sandbox::default();
    let target = Target::serve(&sandbox, "ram:4M", "", &[]);
    let port = target.portal().to_owned();
    assert_eq!(target.url, format!("iscsi://{port}/{NAME}/0"));
    let mut session = session(&target, ONE, 1);
    assert_eq!(blocks(&mut session, 0), 4 * MIB / 512);
    let show = sandbox.run(&["show", "disk"]).ok();
    let line = show.lines().find(|line| line.contains("iscsi session")).expect("the session is listed");
    assert!(line.contains(ONE) && line.contains("digests=header,data"), "{line}");
    assert!(show.contains("(1 client)"), "{show}");
    session.log_out();
    let is_gone = || (!sandbox.run(&["show", "disk"]).ok().contains("iscsi session")).then_some(());
    assert!(until(TIMEOUT, is_gone).is_some());
}

#[test]
fn a_file_of_secrets_that_others_may_read_is_refused() {
    let sandbox = Sandbox::default();
    let file = sandbox.text("open", "user:0123456789abcdef\n");
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o644);
    std::fs::set_permissions(&file, mode).expect("set");
    let export = format!("tcp:127.0.0.1:{},chap={}", free_port(), file.display());
    let refused = sandbox.run(&["serve", "ram:1M", "--iscsi", &export]).failed();
    assert!(refused.contains("chmod 600") && !refused.contains("0123"), "{refused}");
}

#[test]
fn an_acl_admits_its_initiators_and_protects_from_writing() {
    let sandbox = Sandbox::default();
    let target = Target::serve(&sandbox, "ram:1M", &format!(",acl={ONE},acl-ro={TWO}"), &[]);
    let other = Initiator::log_in(target.portal(), options("iqn.2026-11.io.blockyard.test:x", 1));
    assert_eq!(other.err(), Some(Failure::Refused(Status::AuthorisationFailure)));
    assert_eq!(write_first_block(&mut session(&target, ONE, 1)), 0);
    let mut reader = session(&target, TWO, 1);
    let refused = reader.command(0, &[0x2A, 0, 0, 0, 0, 0, 0, 0, 1, 0], &[7; 512], 0).expect("an answer");
    assert_eq!(refused.sense_code(), Some((7, 0x27, 0)));
    assert_eq!(reader.good(0, &[0x28, 0, 0, 0, 0, 0, 0, 0, 1, 0], &[], 512), [7; 512]);
}

#[test]
fn luns_come_and_go_under_a_session() {
    let sandbox = Sandbox::default();
    let export = format!("\"tcp:127.0.0.1:{},target={NAME}\"", free_port());
    let of = |name: &str, size: u64| {
        format!(
            "[device.{name}]\nstack = \"ram:{size}M\"\n[[export]]\ndevice = \"{name}\"\niscsi = {export}\n"
        )
    };
    let server = sandbox.up(&of("disk", 1), 1);
    let target = Target { url: server.uri().to_owned(), server: Some(server) };
    let mut session = session(&target, ONE, 1);
    assert_eq!(luns(&mut session), [0]);
    let ring = format!("ring = \"{}\"\n", sandbox.engine().name());
    sandbox.text("topology.toml", &(ring + &of("disk", 1) + &of("more", 2)));
    sandbox.run(&["apply", "topology.toml"]).ok();
    assert_eq!(session.attentions(0), [(0x3F, 0x0E)], "REPORTED LUNS DATA HAS CHANGED");
    assert_eq!(luns(&mut session), [0, 1]);
    assert_eq!(blocks(&mut session, 1), 2 * MIB / 512);
    sandbox.run(&["del", "more"]).ok();
    let is_gone = || (luns(&mut session) == [0]).then_some(());
    assert!(until(TIMEOUT, is_gone).is_some());
    let missing = session.command(1, &READY, &[], 0).expect("an answer");
    assert_eq!(missing.sense_code(), Some((5, 0x25, 0)), "LOGICAL UNIT NOT SUPPORTED");
}

#[test]
fn a_session_sees_another_size() {
    let sandbox = Sandbox::default();
    let image = sandbox.image("disk.img", MIB);
    let target = Target::serve(&sandbox, &file_stack(&image), "", &[]);
    let mut session = session(&target, ONE, 1);
    assert_eq!(blocks(&mut session, 0), MIB / 512);
    std::fs::File::options().write(true).open(&image).expect("the image").set_len(3 * MIB).expect("grown");
    sandbox.run(&["resize", "disk"]).ok();
    assert_eq!(session.attentions(0), [(0x2A, 0x09)], "CAPACITY DATA HAS CHANGED");
    assert_eq!(blocks(&mut session, 0), 3 * MIB / 512);
}

#[test]
fn initiators_are_asked_to_log_out_when_the_server_ends() {
    let sandbox = Sandbox::default();
    let mut target = Target::serve(&sandbox, "ram:1M", "", &[]);
    let session = session(&target, ONE, 1);
    let server = target.server.as_mut().expect("a server");
    server.signal(rustix::process::Signal::TERM);
    let events = session.wait_for_end();
    assert!(events.iter().any(is_logout_request), "{events:?}");
    assert!(server.wait().success());
}

#[test]
fn a_reservation_is_respected_and_survives_a_restart_with_aptpl() {
    let sandbox = Sandbox::default();
    let image = sandbox.image("disk.img", MIB);
    let port = free_port();
    let serve = || Target::serve_at(&sandbox, port, &file_stack(&image), "", &[]);
    let mut target = serve();
    let mut holder = session(&target, ONE, 1);
    let mut other = session(&target, TWO, 1);
    const APTPL: u8 = 1;
    assert_eq!(reserve_out(&mut holder, 0, 0, 0, 0xABC, APTPL), 0, "REGISTER");
    assert_eq!(reserve_out(&mut holder, 1, 1, 0xABC, 0, 0), 0, "RESERVE, Write Exclusive");
    assert_eq!(write_first_block(&mut holder), 0);
    assert_eq!(write_first_block(&mut other), CONFLICT);
    let show = sandbox.run(&["show", "disk"]).ok();
    assert!(show.contains(&format!("Write Exclusive (type 1), held by {ONE}")), "{show}");
    target.server.take().expect("a server").kill();
    let target = serve();
    assert_eq!(write_first_block(&mut session(&target, TWO, 1)), CONFLICT);
    let mut holder = session(&target, ONE, 1);
    assert_eq!(write_first_block(&mut holder), 0);
    assert_eq!(reserve_out(&mut holder, 3, 0, 0xABC, 0, 0), 0, "CLEAR");
    assert_eq!(write_first_block(&mut session(&target, TWO, 1)), 0);
}

#[test]
fn two_portals_lead_to_one_logical_unit() {
    let sandbox = Sandbox::default();
    let second = format!("tcp:[::1]:{}", free_port());
    let first = format!("tcp:127.0.0.1:{}", free_port());
    let words = ["serve", "ram:1M", "--name", "disk", "--iscsi", &first, "--iscsi", &second];
    let server = sandbox.start(&mut sandbox.blockyard(&words), 2);
    let portal = |number: usize| server.uri_of(number).split('/').nth(2).expect("a portal").to_owned();
    let log_in = |number: usize| {
        let mut session = Initiator::log_in(&portal(number), options(ONE, number as u8)).expect("a login");
        session.attentions(0);
        session
    };
    let (mut one, mut other) = (log_in(0), log_in(1));
    assert_eq!(write_first_block(&mut one), 0);
    assert_eq!(other.good(0, &[0x28, 0, 0, 0, 0, 0, 0, 0, 1, 0], &[], 512), [7; 512]);
    let page_83 = [0x12, 1, 0x83, 1, 0, 0];
    let naa = |session: &mut Initiator| session.good(0, &page_83, &[], 256)[8..24].to_vec();
    assert_eq!(naa(&mut one), naa(&mut other));
    let show = sandbox.run(&["show", "disk"]).ok();
    assert_eq!(show.matches("(1 client)").count(), 2, "{show}");
}

/// Counts in the first block by COMPARE AND WRITE, and returns how often that succeeded.
fn count_up(session: &mut Initiator, end: &AtomicBool) -> u32 {
    let mut successes = 0;
    while !end.load(Relaxed) {
        let old = session.good(0, &[0x28, 0, 0, 0, 0, 0, 0, 0, 1, 0], &[], 512);
        let mut new = old.clone();
        let count = u64::from_le_bytes(old[8..16].try_into().expect("eight bytes")) + 1;
        new[8..16].copy_from_slice(&count.to_le_bytes());
        let mut cdb = [0; 16];
        (cdb[0], cdb[13]) = (0x89, 1);
        let answer = session.command(0, &cdb, &[old, new].concat(), 0).expect("an answer");
        match answer.sense_code() {
            None => successes += 1,
            Some(code) => assert_eq!(code, (0xE, 0x1D, 0), "MISCOMPARE"),
        }
    }
    successes
}

/// A device with an NBD export gets a LUN while it is served. COMPARE AND WRITE reads and then writes for 5
/// ms: an NBD write between the two would be overwritten.
#[test]
fn compare_and_write_excludes_the_writes_of_an_nbd_export() {
    let sandbox = Sandbox::default();
    let socket = sandbox.path("disk.sock");
    let nbd = format!(
        "[device.disk]\nstack = \"ram:1M\"\nlayers = [\"delay,write=5ms\"]\n\
         [[export]]\ndevice = \"disk\"\nnbd = \"unix:{}\"\n",
        socket.display()
    );
    let server = sandbox.up(&nbd, 1);
    let mut peer = Peer::connect(&socket, "disk");
    peer.write(0, &[0; 512], CommandFlags::empty()).expect("written");
    let port = free_port();
    let both = format!("{nbd}[[export]]\ndevice = \"disk\"\niscsi = \"tcp:127.0.0.1:{port}\"\n");
    sandbox.text("topology.toml", &format!("ring = \"{}\"\n{both}", sandbox.engine().name()));
    sandbox.run(&["apply", "topology.toml"]).ok();
    let target = Target { url: format!("iscsi://127.0.0.1:{port}/{NAME}/0"), server: Some(server) };
    let end = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let counters = [1, 2].map(|number| {
            let mut session = session(&target, ONE, number);
            let end = &end;
            scope.spawn(move || count_up(&mut session, end))
        });
        let mut counted = 0;
        for round in 1..=100u64 {
            let mut block = vec![0; 512];
            block[..8].copy_from_slice(&round.to_le_bytes());
            peer.write(0, &block, CommandFlags::empty()).expect("written");
            std::thread::sleep(Duration::from_millis(round % 13));
            let now = peer.read(0, 512).expect("read");
            let is_kept = now[..8] == block[..8];
            end.fetch_or(!is_kept, Relaxed);
            assert!(is_kept, "a write of the NBD client was overwritten");
            counted += u32::from(now[8..16] != [0; 8]);
        }
        end.store(true, Relaxed);
        let successes: u32 = counters.into_iter().map(|one| one.join().expect("it ends")).sum();
        assert!(counted > 5 && successes > 20, "the sessions hardly wrote: {counted}, {successes}");
    });
}

#[test]
fn a_device_that_is_deleted_under_a_session_ends_it() {
    let sandbox = Sandbox::default();
    let export = format!("tcp:127.0.0.1:{}", free_port());
    let image = sandbox.image("disk.img", MIB);
    let ready = sandbox.run(&["add", &file_stack(&image), "--name", "disk", "--iscsi", &export]).ok();
    let url = ready.split_whitespace().nth(2).expect("an address").to_owned();
    let target = Target { url, server: None };
    let mut session = session(&target, ONE, 1);
    assert_eq!(write_first_block(&mut session), 0);
    sandbox.run(&["resize", "disk", "3M"]).ok();
    assert_eq!(session.attentions(0), [(0x2A, 0x09)], "CAPACITY DATA HAS CHANGED");
    assert_eq!(blocks(&mut session, 0), 3 * MIB / 512);
    assert_eq!(session.good(0, &[0x28, 0, 0, 0, 0, 0, 0, 0, 1, 0], &[], 512), [7; 512]);
    sandbox.run(&["del", "disk"]).ok();
    let events = session.wait_for_end();
    assert!(events.iter().any(is_logout_request), "{events:?}");
}
