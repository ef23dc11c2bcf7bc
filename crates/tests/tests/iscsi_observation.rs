//! iSCSI sessions in `show`, `/metrics`, the page, traces and logs, none of which contains a secret.

use blockyard_tests::browser::Browser;
use blockyard_tests::iscsi::initiator::Initiator;
use blockyard_tests::iscsi::{NAME, Target, chap_file, free_port};
use blockyard_tests::server::Sandbox;
use blockyard_tests::tools::{PATIENCE, run, until, wait_within};
use proto::iscsi::initiator::{Failure, Options};
use proto::iscsi::login::{Credentials, Secret, Status};
use proto::iscsi::pdu::Isid;
use serde_json::{Value, json};
use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

const ONE: &str = "iqn.2026-11.io.blockyard.test:one";
const TWO: &str = "iqn.2026-11.io.blockyard.test:two";
const SECRET: &str = "Schnee-von-gestern";
const MUTUAL: &str = "Regen-von-morgen";
const WRITE: [u8; 10] = [0x2A, 0, 0, 0, 0, 0, 0, 0, 8, 0];
/// PERSISTENT RESERVE OUT: REGISTER, and RESERVE (Write Exclusive).
const REGISTER: [u8; 10] = [0x5F, 0, 0, 0, 0, 0, 0, 0, 24, 0];
const RESERVE: [u8; 10] = [0x5F, 1, 1, 0, 0, 0, 0, 0, 24, 0];

fn user(name: &str, secret: &str) -> Option<Credentials> {
    Some(Credentials { name: name.to_owned(), secret: Secret::new(secret) })
}

fn options(initiator: &str, target: &str, mutual: bool) -> Options {
    Options {
        credentials: user("alice", SECRET),
        target_credentials: user("disk", MUTUAL).filter(|_| mutual),
        ..Options::new(initiator, Some(target))
    }
}

fn log_in(target: &Target, options: Options) -> Initiator {
    let mut session = Initiator::log_in(target.portal(), options).expect("a login");
    session.attentions(0);
    session
}

/// Serves a device with CHAP, both ways, and a page. The name of the page comes with it.
fn serve(sandbox: &Sandbox) -> (Target, String) {
    let file = chap_file(sandbox, "alice", SECRET);
    fs::write(&file, format!("alice:{SECRET}\nmutual disk:{MUTUAL}\n")).expect("it is ours");
    let export = format!("tcp:127.0.0.1:{},chap={file},discovery-chap={file}", free_port());
    let words = ["serve", "ram:64M", "--name", "disk", "--iscsi", &export, "--web", "127.0.0.1:0"];
    let more = ["--log", "text,level=debug"];
    let server = sandbox.start(&mut sandbox.blockyard(&[&words[..], &more].concat()), 2);
    let (url, page) = (server.uri_of(0).to_owned(), server.uri_of(1).to_owned());
    (Target { server: Some(server), url }, page)
}

fn read_all(mut stream: impl Read) -> String {
    let mut bytes = Vec::new();
    let _ = stream.read_to_end(&mut bytes);
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Returns the answer of the control socket of a device.
fn control(socket: &Path, path: &str) -> String {
    let mut stream = UnixStream::connect(socket).expect("a control socket");
    stream.set_read_timeout(Some(PATIENCE)).expect("a timeout");
    write!(stream, "GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").expect("sent");
    read_all(stream)
}

/// Returns the answer of the page; of a stream of events, the first three seconds.
fn page_answer(page: &str, path: &str) -> String {
    let (address, token) =
        page.strip_prefix("http://").and_then(|rest| rest.split_once("/?token=")).expect("an address");
    let mut stream = TcpStream::connect(address).expect("the page");
    stream.set_read_timeout(Some(Duration::from_secs(1))).expect("a timeout");
    write!(
        stream,
        "GET {path} HTTP/1.1\r\nHost: {address}\r\nAuthorization: Bearer {token}\r\nConnection: close\r\n\r\n"
    )
    .expect("sent");
    let (mut bytes, begun, mut part) = (Vec::new(), Instant::now(), [0; 4096]);
    while begun.elapsed() < Duration::from_secs(3) {
        match stream.read(&mut part) {
            Ok(0) => break,
            Ok(count) => bytes.extend(&part[..count]),
            // A stream without news.
            Err(_) => {}
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

/// The value of a metric's only line with these labels.
#[track_caller]
fn metric(text: &str, name: &str, labels: &[&str]) -> f64 {
    let is_it =
        |line: &&str| line.starts_with(&format!("{name}{{")) && labels.iter().all(|one| line.contains(one));
    let lines: Vec<&str> = text.lines().filter(is_it).collect();
    let [line] = lines[..] else { panic!("{name} {labels:?} has {} lines: {text}", lines.len()) };
    line.rsplit_once(' ').and_then(|(_, value)| value.parse().ok()).expect("a number")
}

#[test]
fn sessions_are_described_in_show_and_metrics_and_on_the_page() {
    let sandbox = Sandbox::default();
    let (target, page) = serve(&sandbox);
    let mut holder = log_in(&target, options(ONE, NAME, true));
    let other = log_in(&target, Options { isid: Isid([0, 2, 0x3D, 0, 0, 9]), ..options(TWO, NAME, false) });
    holder.good(0, &WRITE, &[7; 4096], 0);
    let key = 0xABC_u64.to_be_bytes();
    holder.good(0, &REGISTER, &[&[0; 8], &key[..], &[0; 8]].concat(), 0);
    holder.good(0, &RESERVE, &[&key[..], &[0; 16]].concat(), 0);
    let portal = target.portal();

    let show = sandbox.run(&["show", "disk"]).ok();
    let line =
        show.lines().find(|line| line.contains("iscsi session") && line.contains(ONE)).expect("a session");
    for part in
        [&format!("@{portal} user=alice"), "digests=header,data", "written=4", "errors=", "in-progress=0"]
    {
        assert!(line.contains(part), "{part}: {line}");
    }
    assert!(show.contains(&format!("Write Exclusive (type 1), held by {ONE}")), "{show}");

    let shown: Value = serde_json::from_str(&sandbox.run(&["show", "disk", "--json"]).ok()).expect("JSON");
    let sessions = shown["exports"][0]["sessions"].as_array().expect("sessions");
    let of = |initiator: &str| sessions.iter().find(|one| one["initiator"] == initiator).expect("a session");
    let one = of(ONE);
    assert_eq!((&one["number"], &one["target"]), (&json!(holder.tsih), &json!(NAME)));
    assert_eq!((&one["user"], &one["digests"]), (&json!("alice"), &json!("header,data")));
    assert_eq!((&one["has_reservation"], &one["is_registered"]), (&json!(true), &json!(true)));
    assert_eq!(one["connections"][0]["portal"], portal);
    assert!(one["counts"]["bytes-written"].as_u64() >= Some(4096), "{one}");
    assert_eq!((&of(TWO)["has_reservation"], &of(TWO)["is_registered"]), (&json!(false), &json!(false)));

    let metrics = control(&sandbox.run_dir().join("disk.control"), "/metrics");
    let (by_one, by_two) = (format!("initiator=\"{ONE}\""), format!("initiator=\"{TWO}\""));
    let info = ["user=\"alice\"", "digests=\"header,data\"", &format!("portal=\"{portal}\""), &by_one];
    assert_eq!(metric(&metrics, "blockyard_iscsi_session_info", &info), 1.0);
    assert_eq!(metric(&metrics, "blockyard_iscsi_session_connections", &[&by_one]), 1.0);
    assert!(metric(&metrics, "blockyard_iscsi_commands_total", &[&by_one]) >= 3.0);
    assert!(metric(&metrics, "blockyard_iscsi_written_bytes_total", &[&by_one]) >= 4096.0);
    let of_device = |name: &str, by: &str| metric(&metrics, name, &["device=\"disk\"", by]);
    assert_eq!(of_device("blockyard_iscsi_session_reservation", &by_one), 1.0);
    assert_eq!(of_device("blockyard_iscsi_session_registered", &by_two), 0.0);
    assert_eq!(metric(&metrics, "blockyard_iscsi_sessions", &["device=\"disk\""]), 2.0);

    if let Some(mut browser) = Browser::start(&sandbox) {
        browser.set_window(1280, 800, "light");
        browser.open(&page);
        browser.wait_for("document.querySelector('.rows a.name')");
        browser.click(".rows a.name");
        browser.wait_for("document.querySelector('#tab-details')");
        browser.click("#tab-details");
        let text = "document.querySelector('[aria-label=Sessions]')?.innerText ?? ''";
        for part in [ONE, TWO, "holds the reservation", "CHAP user alice", "header,data", portal] {
            browser.wait_for(&format!("({text}).includes({part:?})"));
        }
    }
    other.log_out();
    holder.log_out();
    let is_gone = || {
        let metrics = control(&sandbox.run_dir().join("disk.control"), "/metrics");
        (!metrics.contains("initiator=")).then_some(())
    };
    until(PATIENCE, is_gone).expect("the sessions are gone");
}

/// Checks that a text has no secret, in any of the forms that CHAP or JSON could give it.
#[track_caller]
fn check(place: &str, text: &str) {
    for secret in [SECRET, MUTUAL] {
        let hex: String = secret.bytes().map(|byte| format!("{byte:02x}")).collect();
        let found = text.contains(secret) || text.to_lowercase().contains(&hex);
        assert!(!found, "{place} has a secret");
    }
    assert!(!text.is_empty(), "{place} has nothing at all");
}

/// Checks the process's arguments and environment, and every file in the sandbox except those `except`.
#[track_caller]
fn check_process_and_files(sandbox: &Sandbox, pid: u32, except: &[PathBuf]) {
    for name in ["cmdline", "environ"] {
        let bytes = fs::read(format!("/proc/{pid}/{name}")).expect("a process of ours");
        check(&format!("/proc/PID/{name}"), &format!(" {}", String::from_utf8_lossy(&bytes)));
    }
    let mut folders = vec![sandbox.path("")];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).expect("a folder").filter_map(Result::ok) {
            let kind = entry.file_type().expect("a type");
            if kind.is_dir() {
                folders.push(entry.path());
            } else if kind.is_file() && !except.contains(&entry.path()) {
                let bytes = fs::read(entry.path()).unwrap_or_default();
                check(&entry.path().display().to_string(), &format!(" {}", String::from_utf8_lossy(&bytes)));
            }
        }
    }
}

/// A trace of a device while `during` runs.
fn traced(sandbox: &Sandbox, device: &str, format: &str, during: impl FnOnce()) -> String {
    let file = sandbox.path(&format!("trace-{format}.json"));
    let path = file.display().to_string();
    let mut trace = sandbox.blockyard(&["trace", device, "-o", &path, "--format", format]);
    let mut child = trace.spawn().expect("the binary runs");
    until(PATIENCE, || file.exists().then_some(())).expect("a trace begins");
    during();
    sandbox.run(&["trace", device, "end"]).ok();
    assert!(wait_within(&mut child, PATIENCE).expect("it ends").success());
    fs::read_to_string(file).expect("a trace")
}

/// Logs in with one-way and mutual CHAP, writes, and is refused with a wrong secret.
fn use_target(target: &Target, name: &str) {
    for mutual in [false, true] {
        let mut session = log_in(target, options(ONE, name, mutual));
        session.good(0, &WRITE, &[7; 4096], 0);
        session.log_out();
    }
    let wrong = Options { credentials: user("alice", "another-secret"), ..options(ONE, name, false) };
    let refused = Some(Failure::Refused(Status::AuthenticationFailure));
    assert_eq!(Initiator::log_in(target.portal(), wrong).map(Initiator::log_out).err(), refused);
}

/// Checks that no command or socket that describes a device shows a secret.
fn check_answers(sandbox: &Sandbox, device: &str) {
    for words in [
        &["show", device][..],
        &["show", device, "--json"],
        &["list"],
        &["list", "--json"],
        &["stat", "--json", device],
        &["inflight", device],
        &["save"],
        &["top", "-b", "-n", "1"],
    ] {
        check(&words.join(" "), &format!(" {}", sandbox.run(words).ok()));
    }
    let socket = sandbox.run_dir().join(format!("{device}.control"));
    for path in ["/metrics", "/devices", &format!("/devices/{device}")] {
        check(path, &control(&socket, path));
    }
}

#[test]
fn secrets_of_a_served_target_are_nowhere_but_in_their_private_file() {
    let sandbox = Sandbox::default();
    let (target, page) = serve(&sandbox);
    let secrets = sandbox.path("chap");
    for format in ["text", "perfetto"] {
        check(format, &traced(&sandbox, "disk", format, || use_target(&target, NAME)));
    }
    let session = log_in(&target, options(ONE, NAME, true));
    check_answers(&sandbox, "disk");
    for path in ["/devices", "/metrics"] {
        check(path, &page_answer(&page, path));
    }
    let events = page_answer(&page, "/events?device=disk&addresses");
    check("the page's events", &events);
    assert!(events.contains(ONE), "the page describes sessions: {events}");
    let server = target.server.as_ref().expect("a server");
    let log = server.log();
    assert!(log.contains("an iSCSI session began"), "the log is at the most detailed level: {log}");
    check("the log", &log);
    check_process_and_files(&sandbox, server.pid(), std::slice::from_ref(&secrets));
    assert_eq!(fs::metadata(&secrets).expect("a file").permissions().mode() & 0o777, 0o600);
    session.log_out();
}

#[test]
fn secrets_of_targetclis_configuration_are_nowhere_but_in_private_files() {
    let sandbox = Sandbox::default();
    let (name, port) = ("iqn.2026-11.io.blockyard.test:lio", free_port());
    let acl = json!({
        "node_wwn": ONE,
        "chap_userid": "alice",
        "chap_password": SECRET,
        "chap_mutual_userid": "disk",
        "chap_mutual_password": MUTUAL,
        "mapped_luns": [{ "index": 0, "tpg_lun": 0, "write_protect": false }],
    });
    let group = json!({
        "tag": 1,
        "enable": true,
        "attributes": { "authentication": 1 },
        "luns": [{ "index": 0, "storage_object": "/backstores/ramdisk/fast" }],
        "node_acls": [acl],
        "portals": [{ "ip_address": "127.0.0.1", "port": port, "iser": false, "offload": false }],
    });
    let configuration = json!({
        "storage_objects": [{ "name": "fast", "plugin": "ramdisk", "size": 1 << 20 }],
        "targets": [{ "fabric": "iscsi", "wwn": name, "tpgs": [group] }],
    });
    let from = sandbox.text("from.json", &configuration.to_string());
    fs::set_permissions(&from, PermissionsExt::from_mode(0o600)).expect("it is ours");
    let saved = sandbox.path("etc/saveconfig.json");
    let targetcli = |arguments: &[&str]| {
        let mut command = sandbox.blockyard(&[&["targetcli"], arguments].concat());
        command.env("BLOCKYARD_SAVECONFIG", &saved).env("TARGETCLI_HOME", sandbox.path("home"));
        run(&mut command)
    };
    let restored = targetcli(&["restoreconfig", &from.display().to_string()]).ok();
    check("restoreconfig", &format!(" {restored}"));
    let target = Target { server: None, url: format!("iscsi://127.0.0.1:{port}/{name}/0") };
    let device = "ramdisk-fast";
    check("a trace", &traced(&sandbox, device, "text", || use_target(&target, name)));
    let session = log_in(&target, options(ONE, name, true));
    check_answers(&sandbox, device);
    for words in
        [&["ls", "/"][..], &["sessions", "detail"], &[&format!("/iscsi/{name}/tpg1/acls/{ONE}"), "info"]]
    {
        check(&words.join(" "), &targetcli(words).ok());
    }
    let acl = format!("/iscsi/{name}/tpg1/acls/{ONE}");
    let shown = targetcli(&[&acl, "get", "auth"]).ok();
    assert!(shown.contains("alice"), "{shown}");
    check("get auth", &shown);
    targetcli(&["saveconfig"]).ok();
    assert_eq!(fs::metadata(&saved).expect("a file").permissions().mode() & 0o777, 0o600);
    assert!(fs::read_to_string(&saved).expect("a text").contains(SECRET), "it has what restores the target");
    let control = fs::read_link(sandbox.run_dir().join("targetcli.control")).expect("its process");
    let pid =
        control.to_str().and_then(|name| name.strip_prefix("control.")?.parse().ok()).expect("a number");
    // Earlier files are kept as backups, which are private as well.
    let mut private = vec![from, saved.clone()];
    let backups = sandbox.path("etc/backup");
    for entry in fs::read_dir(backups).into_iter().flatten().filter_map(Result::ok) {
        assert_eq!(entry.metadata().expect("a file").permissions().mode() & 0o777, 0o600, "{entry:?}");
        private.push(entry.path());
    }
    check_process_and_files(&sandbox, pid, &private);
    session.log_out();
    targetcli(&["clearconfig", "confirm=True"]).ok();
}
