//! SCSI commands in traces of the real binary: which command of which initiator led to a request, and how it
//! ended.

use blockyard_tests::iscsi::initiator::Initiator;
use blockyard_tests::iscsi::{NAME, Target};
use blockyard_tests::server::Sandbox;
use blockyard_tests::tools::{PATIENCE, missing, run, until, wait_within};
use proto::iscsi::initiator::Options;
use serde_json::Value;
use std::fs;
use std::process::{Child, Stdio};

const ONE: &str = "iqn.2026-11.io.blockyard.test:one";
/// WRITE (10) and READ (10) of 8 blocks from block 2488, and one block past the end of the device.
const WRITE: [u8; 10] = [0x2A, 0, 0, 0, 0x09, 0xB8, 0, 0, 8, 0];
const READ: [u8; 10] = [0x28, 0, 0, 0, 0x09, 0xB8, 0, 0, 8, 0];
const BEYOND: [u8; 10] = [0x28, 0, 0x7F, 0, 0, 0, 0, 0, 1, 0];
/// INQUIRY.
const INQUIRY: [u8; 6] = [0x12, 0, 0, 0, 36, 0];
/// COMPARE AND WRITE of block 5.
const COMPARE: [u8; 16] = [0x89, 0, 0, 0, 0, 0, 0, 0, 0, 5, 0, 0, 0, 1, 0, 0];

struct Tracing<'a> {
    sandbox: &'a Sandbox,
    child: Child,
}

impl<'a> Tracing<'a> {
    /// Starts a trace into files that begin so; returns once every event is recorded.
    fn start(sandbox: &'a Sandbox, output: &str, more: &[&str]) -> Tracing<'a> {
        let path = sandbox.path(output).display().to_string();
        let mut command = sandbox.blockyard(&["trace", "disk", "-o", &path]);
        let child = command.args(more).stderr(Stdio::piped()).spawn().expect("the binary runs");
        let begun = || {
            let mut files = fs::read_dir(sandbox.path("")).ok()?.filter_map(Result::ok);
            files.find(|entry| entry.file_name().to_string_lossy().starts_with(output)).map(|_| ())
        };
        until(PATIENCE, begun).expect("a trace begins");
        Tracing { sandbox, child }
    }

    fn end(mut self) {
        self.sandbox.run(&["trace", "disk", "end"]).ok();
        assert!(wait_within(&mut self.child, PATIENCE).expect("it ends").success());
    }
}

/// A device of 1 GiB, and a session whose unit attentions are gone.
fn serve(sandbox: &Sandbox) -> (Target, Initiator) {
    let target = Target::serve(sandbox, "ram:1G", "", &[]);
    let mut session = Initiator::log_in(target.portal(), Options::new(ONE, Some(NAME))).expect("a login");
    session.attentions(0);
    (target, session)
}

fn commands(session: &mut Initiator) {
    session.good(0, &INQUIRY, &[], 36);
    session.good(0, &WRITE, &[7; 4096], 0);
    session.good(0, &READ, &[], 4096);
    assert_eq!(session.command(0, &BEYOND, &[], 512).expect("an answer").sense_code(), Some((5, 0x21, 0)));
    session.good(0, &COMPARE, &[0; 1024], 0);
    let differs = session.command(0, &COMPARE, &[1; 1024], 0).expect("an answer");
    assert_eq!(differs.sense_code(), Some((0xE, 0x1D, 0)));
}

/// Messages of a text in blkparse's format, and its events by letter, in one list.
fn messages(text: &str) -> Vec<String> {
    let of_line = |line: &str| {
        let words: Vec<&str> = line.split_whitespace().collect();
        match words.get(5) {
            Some(&"m") => Some(words[7..].join(" ")),
            Some(&"Q") => Some(format!("Q {}", words[6..10].join(" "))),
            _ => None,
        }
    };
    text.lines().filter_map(of_line).collect()
}

/// Checks that the list has lines with these beginnings, in this order.
#[track_caller]
fn check_order(lines: &[String], wanted: &[(&str, &str)]) {
    let mut rest = lines.iter();
    for (from, part) in wanted {
        let found = rest.any(|line| line.starts_with(from) && line.contains(part));
        assert!(found, "{from} … {part} is missing in {lines:#?}");
    }
}

/// Returns the expected lines of a trace of [`commands`], in order. The number of a command is not known
/// before.
fn expected(session: &Initiator) -> Vec<(&'static str, String)> {
    let by = format!("session {} {ONE}", session.tsih);
    vec![
        ("scsi", "INQUIRY, cdb 12 00 00 00 24 00, lun 0".to_owned()),
        ("scsi", "INQUIRY ended, GOOD, 36 bytes".to_owned()),
        ("scsi", "WRITE(10), cdb 2a 00 00 00 09 b8 00 00 08 00, lun 0, itt".to_owned()),
        ("scsi", "request write 2488 + 8".to_owned()),
        ("Q W", "2488 + 8".to_owned()),
        ("scsi", "WRITE(10) ended, GOOD, 4096 bytes".to_owned()),
        ("scsi", by),
        ("scsi", "request read 2488 + 8".to_owned()),
        ("Q R", "2488 + 8".to_owned()),
        ("scsi", "READ(10) ended, GOOD, 4096 bytes".to_owned()),
        ("scsi", "READ(10) ended, CHECK CONDITION, sense 5/21/00 (ILLEGAL REQUEST), 0 bytes".to_owned()),
        ("scsi", "COMPARE AND WRITE, cdb 89 00 00 00 00 00 00 00 00 05 00 00 00 01 00 00".to_owned()),
        ("scsi", "request read 5 + 1".to_owned()),
        ("scsi", "request write 5 + 1".to_owned()),
        ("scsi", "COMPARE AND WRITE ended, GOOD".to_owned()),
        ("scsi", "COMPARE AND WRITE ended, CHECK CONDITION, sense e/1d/00 (MISCOMPARE)".to_owned()),
    ]
}

#[test]
fn the_text_of_a_trace_names_each_command_its_initiator_requests_and_status() {
    let sandbox = Sandbox::default();
    let (_target, mut session) = serve(&sandbox);
    let tracing = Tracing::start(&sandbox, "T", &["--format", "text"]);
    commands(&mut session);
    tracing.end();
    let text = fs::read_to_string(sandbox.path("T")).expect("a text");
    let wanted = expected(&session);
    let wanted: Vec<(&str, &str)> = wanted.iter().map(|(from, part)| (*from, &**part)).collect();
    check_order(&messages(&text), &wanted);
}

#[test]
fn blkparse_shows_commands_as_messages() {
    if missing(&["blkparse"]) {
        return;
    }
    let sandbox = Sandbox::default();
    let (_target, mut session) = serve(&sandbox);
    let tracing = Tracing::start(&sandbox, "T", &[]);
    commands(&mut session);
    tracing.end();
    let parsed = run(sandbox.tool(&["blkparse", "-i", "T"]).current_dir(sandbox.path(""))).ok();
    let wanted = expected(&session);
    let wanted: Vec<(&str, &str)> = wanted.iter().map(|(from, part)| (*from, &**part)).collect();
    check_order(&messages(&parsed), &wanted);
}

#[test]
fn a_perfetto_trace_has_a_slice_for_each_command_and_flows_to_its_requests() {
    let sandbox = Sandbox::default();
    let (_target, mut session) = serve(&sandbox);
    let tracing = Tracing::start(&sandbox, "T.json", &["--format", "perfetto"]);
    commands(&mut session);
    tracing.end();
    let text = fs::read_to_string(sandbox.path("T.json")).expect("a trace");
    let events: Vec<Value> = serde_json::from_str(&text).expect("it is JSON");
    let find = |phase: &str, category: &str, name: &str| {
        let is_it = |event: &&Value| {
            event["ph"] == phase
                && event["cat"] == category
                && event["name"].as_str().is_some_and(|own| own.starts_with(name))
        };
        events.iter().find(is_it).unwrap_or_else(|| panic!("{phase} {category} {name}: {text}"))
    };
    let command = find("b", "scsi", "WRITE(10)");
    assert_eq!(command["args"]["cdb"], "2a 00 00 00 09 b8 00 00 08 00");
    assert_eq!(command["args"]["initiator"], ONE);
    assert_eq!(command["args"]["session"], session.tsih);
    let request = find("b", "request", "write 4K");
    assert_eq!((&request["args"]["scsi"], &request["args"]["sector"]), (&"WRITE(10)".into(), &2488.into()));
    assert_eq!(request["bind_id"], find("n", "scsi", "WRITE(10)")["bind_id"]);
    assert_eq!(find("e", "scsi", "WRITE(10)")["args"]["status"], "GOOD");
    let failed = events.iter().filter(|event| event["ph"] == "e" && event["cat"] == "scsi");
    let failed: Vec<&Value> = failed.filter(|event| event["args"]["status"] != "GOOD").collect();
    assert_eq!(failed.len(), 2, "{failed:?}");
    assert_eq!(failed[0]["args"]["status"], "CHECK CONDITION, sense 5/21/00 (ILLEGAL REQUEST)");
}

#[test]
fn a_filter_of_requests_shows_only_their_commands_and_actions_can_leave_commands_out() {
    let sandbox = Sandbox::default();
    let (_target, mut session) = serve(&sandbox);
    let mut traced = |name: &str, more: &[&str]| {
        let tracing = Tracing::start(&sandbox, name, &[&["--format", "text"], more].concat());
        commands(&mut session);
        tracing.end();
        messages(&fs::read_to_string(sandbox.path(name)).expect("a text"))
    };
    let lines = traced("writes", &["--ops", "write", "--sectors", "2488-2495"]);
    let scsi: Vec<&String> = lines.iter().filter(|line| line.starts_with("scsi")).collect();
    assert_eq!(scsi.len(), 3, "beginning, request and end of the WRITE: {lines:?}");
    assert!(scsi[0].contains("WRITE(10), cdb") && scsi[2].contains("ended, GOOD"), "{lines:?}");
    let lines = traced("queued", &["--actions", "Q"]);
    assert!(lines.iter().all(|line| line.starts_with('Q')) && lines.len() >= 4, "{lines:?}");
    let lines = traced("notified", &["--actions", "notify"]);
    assert!(lines.iter().all(|line| line.starts_with("scsi")) && lines.len() >= 14, "{lines:?}");
}

/// Every command that the logical units know has a name in traces.
#[test]
fn every_command_of_the_logical_unit_has_a_name() {
    let sandbox = Sandbox::default();
    let (_target, mut session) = serve(&sandbox);
    // REPORT SUPPORTED OPERATION CODES, all.
    let list = session.good(0, &[0xA3, 0x0C, 0, 0, 0, 0, 0, 0, 0x40, 0, 0, 0], &[], 0x4000);
    let entries = list[4..].chunks_exact(8);
    assert!(entries.len() > 50, "{}", entries.len());
    for entry in entries {
        let (code, action) = (entry[0], entry[3]);
        let name = trace::command::name(code, action);
        assert!(!name.starts_with("command "), "{code:#04x}/{action:#04x}");
    }
}
