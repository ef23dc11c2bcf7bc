//! The crash laboratory with the real binary: known bugs are found, and correct software survives. `./x soak
//! crash` runs longer proofs.

use blockyard_tests::server::{Sandbox, missing_root};
use blockyard_tests::tools::{Outcome, missing, run_within, skip};
use std::path::Path;
use std::time::Duration;

const PATIENCE: Duration = Duration::from_secs(120);

/// The example journal, run by the system's interpreter.
fn journal() -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/journal/journal.py");
    format!("/usr/bin/python3 -S {}", path.canonicalize().expect("the example").display())
}

/// Returns whether FUSE or the interpreter is missing; then the test is skipped.
fn lacks_needs() -> bool {
    let is_missing = !Path::new("/dev/fuse").exists() || !Path::new("/usr/bin/python3").exists();
    if is_missing {
        skip("/dev/fuse or /usr/bin/python3 is missing");
    }
    is_missing || (missing_root() && missing(&["fusermount3"]))
}

fn crash(sandbox: &Sandbox, arguments: &[&str]) -> Outcome {
    let mut command = sandbox.blockyard(&["crash"]);
    command.args(arguments).current_dir(sandbox.path("."));
    run_within(&mut command, PATIENCE)
}

/// Runs the laboratory on the journal with a bug; returns the summary and the sandbox.
fn with_bug(bug: &str, more: &[&str]) -> (serde_json::Value, Sandbox) {
    let sandbox = Sandbox::default();
    let bug = if bug.is_empty() { String::new() } else { format!(" --bug {bug}") };
    let (workload, check) =
        (format!("{} write $DEV{bug}", journal()), format!("{} verify $DEV{bug}", journal()));
    let mut words =
        vec!["--size", "1M", "--workload", &workload, "--check", &check, "--time", "60s", "--json"];
    words.extend(more);
    let outcome = crash(&sandbox, &words);
    let summary = serde_json::from_str(&outcome.stdout).unwrap_or_else(|why| panic!("{why}: {outcome:?}"));
    assert_eq!(outcome.status.code(), Some(i32::from(!is_empty(&summary))), "{outcome:?}");
    (summary, sandbox)
}

fn is_empty(summary: &serde_json::Value) -> bool {
    summary["findings"].as_array().expect("a list").is_empty()
}

#[test]
fn the_bugs_of_the_journal_are_found_and_minimised() {
    if lacks_needs() {
        return;
    }
    let bugs = [
        ("missing-flush", "page ", 1),
        ("fua-ignored", "was acknowledged, but recovery ended", 1),
        ("checksum-not-checked", "page", 1),
        ("torn-page", "page", 1),
        ("reused-sector", "was acknowledged, but recovery ended", 1),
    ];
    for (bug, output, lost) in bugs {
        let (summary, _) = with_bug(bug, &["--findings", "1"]);
        let finding = &summary["findings"][0];
        assert!(finding["output"].as_str().expect("text").contains(output), "{bug}: {finding:#}");
        assert_eq!(finding["lost"].as_array().expect("a list").len(), lost, "{bug}: {finding:#}");
        let process = finding["lost"][0]["process"].as_str().unwrap_or_default();
        assert!(process.starts_with("python3") || process.starts_with("journal"), "{bug}: {finding:#}");
    }
}

#[test]
fn the_journal_without_bugs_survives() {
    if lacks_needs() {
        return;
    }
    let (summary, _) = with_bug("", &["--states", "150"]);
    assert!(is_empty(&summary), "{summary:#}");
    assert!(summary["checked"].as_u64() > Some(20), "{summary:#}");
    assert_eq!(summary["marks"], 12);
}

#[test]
fn redb_needs_durability() {
    if lacks_needs() {
        return;
    }
    let run = |how: &str, more: &[&str]| {
        let sandbox = Sandbox::default();
        let program = env!("CARGO_BIN_EXE_use_redb");
        let (workload, check) = (format!("{program} write $DEV {how}"), format!("{program} verify $DEV"));
        let words = ["--size", "8M", "--workload", &workload, "--check", &check, "--json"];
        let outcome = crash(&sandbox, &[&words[..], more].concat());
        serde_json::from_str::<serde_json::Value>(&outcome.stdout)
            .unwrap_or_else(|why| panic!("{why}: {outcome:?}"))
    };
    let summary = run("", &["--states", "300"]);
    assert!(is_empty(&summary) && summary["checked"].as_u64() > Some(20), "{summary:#}");
    for (how, output) in [("none", "was acknowledged"), ("nosync", "")] {
        let summary = run(how, &["--findings", "1"]);
        let found = summary["findings"][0]["output"].as_str();
        assert!(found.is_some_and(|found| found.contains(output)), "{how}: {summary:#}");
    }
}

#[test]
fn a_finding_is_reproduced_and_attached() {
    if lacks_needs() {
        return;
    }
    let (summary, sandbox) = with_bug("fua-ignored", &["--findings", "1"]);
    let id = summary["findings"][0]["id"].as_str().expect("a name").to_owned();
    let (run, number) = id.split_once('-').expect("a run and a number");
    let dir = sandbox.path("crash").join(run).join(number);
    for file in ["finding.json", "finding.txt", "output.txt", "timeline.html", "reproduce.sh"] {
        assert!(dir.join(file).exists(), "{file}");
    }
    // The script changes to the run's directory; the check runs where it ran.
    let run_json =
        std::fs::read_to_string(sandbox.path("crash").join(run).join("run.json")).expect("options");
    assert!(run_json.contains("\"dir\""), "{run_json}");
    let mut script = sandbox.command(dir.join("reproduce.sh"));
    script.env("BLOCKYARD", blockyard_tests::server::binary());
    let again = run_within(&mut script, PATIENCE);
    assert_eq!(again.status.code(), Some(1), "{again:?}");
    assert!(again.stdout.contains("recovery ended"), "{again:?}");
    // The checker's own writes do not change the state.
    let erase =
        "dd if=/dev/zero of=$DEV bs=4096 count=3 conv=notrunc status=none; cmp -n 12288 $DEV /dev/zero";
    assert!(crash(&sandbox, &["replay", &id, "--check", erase]).status.success());
    assert_eq!(
        crash(&sandbox, &["replay", &id, "--check", "pwd"]).ok().trim(),
        sandbox.path(".").canonicalize().expect("it exists").display().to_string()
    );
    assert_eq!(crash(&sandbox, &["replay", &id, "--again"]).status.code(), Some(1));
    let unknown = crash(&sandbox, &["replay", &format!("{run}-99"), "--again"]).failed();
    assert!(unknown.contains("it has no finding"), "{unknown}");
}

#[test]
fn marks_by_command_reach_the_check() {
    if lacks_needs() {
        return;
    }
    let sandbox = Sandbox::default();
    let mark = format!("{} crash mark", blockyard_tests::server::binary().display());
    let workload =
        format!("echo one | dd of=$DEV conv=notrunc,fsync status=none; {mark} 'first of all'; echo two >&3");
    let check = "test -z \"$CRASH_MARK\" || { grep -qx 'first of all' $CRASH_MARKS_FILE && \
                 echo \"$CRASH_MARKS\" | grep -qx 'first of all' && head -c 3 $DEV | grep -q one; }";
    let words = ["--size", "64K", "--workload", &workload, "--check", check, "--json"];
    let summary: serde_json::Value = serde_json::from_str(&crash(&sandbox, &words).ok()).expect("JSON");
    assert_eq!((&summary["marks"], is_empty(&summary)), (&2.into(), true), "{summary:#}");
    let outside = sandbox.run(&["crash", "mark", "x"]).failed();
    assert!(outside.contains("CRASH_SOCKET is not set"), "{outside}");
}

#[test]
fn a_log_of_dm_log_writes_is_explored() {
    if lacks_needs() {
        return;
    }
    let sandbox = Sandbox::default();
    sandbox.image("disk.img", 1 << 20);
    let stack = sandbox.path("disk.img");
    let layer = format!("log,file={},size=16M,create", sandbox.path("writes.log").display());
    let mut server = sandbox.serve(&format!("file:{}", stack.display()), &["--layer", &layer]);
    let mut peer = blockyard_tests::peer::Peer::connect(&server.socket(), "disk");
    let plain = proto::nbd::CommandFlags::empty();
    peer.write(0, &[1; 4096], plain).expect("a write");
    peer.write(8192, &[2; 4096], plain).expect("a write");
    peer.flush().expect("a flush");
    peer.disconnect();
    server.terminate();
    // Fails on states with the second block but without the first.
    let check = "a=$(head -c 1 $DEV | tr -d '\\0'); b=$(tail -c +8193 $DEV | head -c 1 | tr -d '\\0'); \
                 test -n \"$a\" || test -z \"$b\"";
    let log = sandbox.path("writes.log");
    let log = log.to_str().expect("UTF-8");
    let words = ["--log", log, "--size", "1M", "--check", check, "--json"];
    let outcome = crash(&sandbox, &words);
    let summary: serde_json::Value = serde_json::from_str(&outcome.stdout).expect("JSON");
    let lost = &summary["findings"][0]["lost"];
    assert_eq!((&lost[0]["offset"], lost.as_array().map(Vec::len)), (&0.into(), Some(1)), "{outcome:?}");
    // With writes in the order of submission, every state is legal.
    let words = [&words[..], &["--model", "prefix"]].concat();
    crash(&sandbox, &words).ok();
}

#[test]
fn a_check_that_is_late_once_is_no_finding_and_one_that_hangs_is() {
    if lacks_needs() {
        return;
    }
    let sandbox = Sandbox::default();
    let explore = |check: &str| {
        let words = ["--size", "64K", "--workload", "echo one > $DEV", "--check", check, "--jobs", "1"];
        let outcome =
            crash(&sandbox, &[&words[..], &["--deadline", "1s", "--states", "2", "--json"]].concat());
        serde_json::from_str::<serde_json::Value>(&outcome.stdout)
            .unwrap_or_else(|why| panic!("{why}: {outcome:?}"))
    };
    let slow = explore("test -e late || { touch late; sleep 1.5; }");
    assert_eq!((&slow["slow"], is_empty(&slow)), (&1.into(), true), "{slow:#}");
    // Only a state with the data hangs, so the other check is quick.
    let hangs = explore("test ! -s $DEV || ! grep -q one $DEV || sleep 60");
    let outcome = &hangs["findings"][0]["outcome"];
    assert_eq!(outcome, "did not end before its deadline", "{hangs:#}");
}

#[test]
fn bad_input_is_refused() {
    let sandbox = Sandbox::default();
    let refused = |arguments: &[&str]| crash(&sandbox, arguments).failed();
    assert!(refused(&["--check", "true"]).contains("neither --workload nor --log"));
    assert!(refused(&["--workload", "true"]).contains("--check is missing"));
    sandbox.image("no.log", 8192);
    let log = sandbox.path("no.log");
    let words = ["--log", log.to_str().expect("UTF-8"), "--check", "true"];
    assert!(refused(&words).contains("it is not a log"), "{}", refused(&words));
    assert!(refused(&["--guest", "6.1", "--log", "x", "--check", "true"]).contains("cannot be used with"));
    assert!(refused(&["--with", "x", "--workload", "true", "--check", "true"]).contains("--guest"));
    if !lacks_needs() {
        let why = refused(&["--size", "64K", "--workload", "exit 3", "--check", "true"]);
        assert!(why.contains("the workload failed with status 3"), "{why}");
        let why = refused(&["--size", "64K", "--workload", "true", "--check", "true"]);
        assert!(why.contains("the log has no writes"), "{why}");
    }
}
