//! Devices in the background: add, list, show, stat, del, and cleanup after failures.

mod common;

use common::{Answer, Nbd, Sandbox, signal, wait_for};
use serde_json::Value;
use std::os::unix::net::UnixListener;

fn json(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|why| panic!("{why}: {text}"))
}

fn listed(sandbox: &Sandbox) -> Vec<Value> {
    json(&sandbox.done(&["list", "--json"])).as_array().cloned().unwrap_or_default()
}

fn pid_of(sandbox: &Sandbox, name: &str) -> u32 {
    json(&sandbox.done(&["show", name, "--json"]))["pid"].as_u64().unwrap_or_default() as u32
}

fn missing(name: &str, command: &str) -> Answer {
    let err = format!(
        "blockyard: {command} failed: {name}: there is no such device (blockyard list shows all devices)\n"
    );
    Answer { code: 1, out: String::new(), err }
}

#[test]
fn a_device_is_added_listed_and_deleted() {
    let sandbox = Sandbox::new();
    assert_eq!(sandbox.done(&["list"]), "");
    assert_eq!(sandbox.done(&["list", "--json"]), "[]\n");
    let socket = sandbox.run("ram.sock");
    let ready = sandbox.done(&["add", "ram:64M"]);
    assert_eq!(ready, format!("ram nbd nbd+unix:///ram?socket={}\n", socket.display()));
    let pid = pid_of(&sandbox, "ram");
    let table = sandbox.done(&["list"]);
    let rows: Vec<Vec<&str>> = table.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(rows[0], ["NAME", "SIZE", "BLOCK", "RO", "CLIENTS", "PID", "STACK", "ADDRESS"]);
    let address = format!("nbd+unix:///ram?socket={}", socket.display());
    assert_eq!(rows[1], ["ram", "64M", "512", "0", "0", &pid.to_string(), "ram:64M", &address]);
    let page = sandbox.done(&["show", "ram"]);
    for line in
        ["name ram", "stack ram:64M", "size 64M (67108864 bytes)", "read-only no", "logical block 512"]
    {
        let has = page.lines().any(|got| got.split_whitespace().collect::<Vec<_>>().join(" ") == line);
        assert!(has, "{line}: {page}");
    }
    assert_eq!(sandbox.done(&["del", "ram"]), "");
    assert_eq!(sandbox.ask(&["del", "ram"]), missing("ram", "del"));
    assert_eq!(sandbox.ask(&["show", "ram"]), missing("ram", "show"));
    assert_eq!(sandbox.ask(&["stat", "ram"]), missing("ram", "stat"));
    wait_for("an empty run directory", || sandbox.run_names().is_empty().then_some(()));
}

#[test]
fn add_prints_ready_lines_as_json() {
    let sandbox = Sandbox::new();
    let ready = json(&sandbox.done(&["add", "null:1G", "--json", "--name", "n"]));
    assert_eq!((ready["name"].as_str(), ready["export"].as_str()), (Some("n"), Some("nbd")));
    assert_eq!(ready["pid"].as_u64(), Some(u64::from(pid_of(&sandbox, "n"))));
    assert!(ready["address"].as_str().is_some_and(|uri| uri.starts_with("nbd+unix:///n?socket=")), "{ready}");
}

#[test]
fn derived_names_are_numbered_and_given_names_are_refused_when_taken() {
    let sandbox = Sandbox::new();
    sandbox.done(&["add", "ram:1M"]);
    assert!(sandbox.done(&["add", "ram:1M"]).starts_with("ram-2 nbd nbd+unix:///ram-2?"));
    let taken = sandbox.ask(&["add", "ram:1M", "--name", "ram"]);
    let err = "blockyard: add failed: ram: the name is taken (choose another with --name, or run: blockyard del \
               ram)\n";
    assert_eq!(taken, Answer { code: 1, out: String::new(), err: err.into() });
    assert_eq!(listed(&sandbox).len(), 2);
    sandbox.done(&["del", "--all"]);
    assert!(listed(&sandbox).is_empty());
    sandbox.done(&["del", "--all"]);
}

#[test]
fn a_failed_add_leaves_the_run_directory_empty() {
    let sandbox = Sandbox::new();
    let answer = sandbox.ask(&["add", "file:missing.img"]);
    assert_eq!((answer.code, answer.out.as_str()), (1, ""));
    let path = sandbox.path().join("missing.img");
    assert!(answer.err.starts_with("blockyard: add failed: missing: "), "{}", answer.err);
    assert!(answer.err.contains(&path.display().to_string()), "{}", answer.err);
    assert!(sandbox.run_names().is_empty(), "{:?}", sandbox.run_names());
    let answer = sandbox.ask(&["add", "ram:1M", "--nbd", "unix:no/such/dir.sock"]);
    assert_eq!(answer.code, 1, "{answer:?}");
    assert!(answer.err.starts_with("blockyard: add failed: ram: "), "{}", answer.err);
    assert!(sandbox.run_names().is_empty(), "{:?}", sandbox.run_names());
}

#[test]
fn verbose_reports_the_chosen_export_and_the_reason() {
    let sandbox = Sandbox::new();
    // Options for NBD select NBD even if the kernel has ublk.
    let answer = sandbox.ask(&["add", "ram:1M", "-v", "--nbd-name", "other"]);
    assert_eq!(answer.code, 0);
    assert!(answer.err.contains("options for NBD were given"), "{}", answer.err);
    assert!(answer.out.starts_with("ram nbd "), "{answer:?}");
}

#[test]
fn a_killed_server_is_not_listed_and_its_name_is_free() {
    let sandbox = Sandbox::new();
    sandbox.done(&["add", "ram:1M"]);
    signal(pid_of(&sandbox, "ram"), "KILL");
    // The next command removes files of a dead server.
    wait_for("the removal of its files", || {
        (listed(&sandbox).is_empty() && sandbox.run_names().is_empty()).then_some(())
    });
    sandbox.done(&["add", "ram:1M", "--name", "ram"]);
    signal(pid_of(&sandbox, "ram"), "KILL");
    assert!(
        wait_for("del to fail", || Some(sandbox.ask(&["del", "ram"])).filter(|del| del.code == 1))
            .out
            .is_empty()
    );
    // Its connection may close before the process has exited.
    wait_for("its name to be free", || {
        (sandbox.ask(&["add", "ram:1M", "--name", "ram"]).code == 0).then_some(())
    });
}

#[test]
fn list_reports_a_silent_process_and_shows_the_others() {
    let sandbox = Sandbox::new();
    sandbox.done(&["add", "null:1G", "--name", "seen"]);
    // A listener on a control socket counts as a server; this one closes every connection.
    let mute = UnixListener::bind(sandbox.run("control.1")).expect("the run directory exists");
    let hangs_up = std::thread::spawn(move || mute.incoming().for_each(drop));
    let answer = sandbox.ask(&["list"]);
    assert_eq!(answer.code, 1, "{answer:?}");
    assert!(answer.out.contains("seen"), "{answer:?}");
    assert!(answer.err.contains("control.1: "), "{answer:?}");
    std::fs::remove_file(sandbox.run("control.1")).expect("the socket exists");
    assert!(!hangs_up.is_finished());
    sandbox.done(&["del", "seen"]);
}

#[test]
fn writes_are_counted_and_stored() {
    let sandbox = Sandbox::new();
    sandbox.done(&["add", "file:disk.img,size=1M,create"]);
    let mut client = Nbd::connect(&sandbox.run("disk.sock"), "disk");
    client.write(4096, &[7; 8192]);
    assert_eq!(client.read(8192, 4096), [7; 4096]);
    client.flush();
    assert_eq!(listed(&sandbox)[0]["exports"][0]["connections"], 1);
    let report = json(&sandbox.done(&["stat", "disk", "--json"]));
    assert_eq!((&report["disk"][0]["kB_read"], &report["disk"][0]["kB_wrtn"]), (&4.into(), &8.into()));
    let text = sandbox.done(&["stat", "disk"]);
    let lines: Vec<Vec<&str>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(
        lines[0],
        ["Device", "tps", "kB_read/s", "kB_wrtn/s", "kB_dscd/s", "kB_read", "kB_wrtn", "kB_dscd"]
    );
    assert_eq!((lines[1][0], &lines[1][5..]), ("disk", &["4", "8", "0"][..]));
    drop(client);
    sandbox.done(&["del", "disk"]);
    let content = std::fs::read(sandbox.path().join("disk.img")).unwrap();
    assert!(content.len() == 1 << 20 && content[4096..12288].iter().all(|byte| *byte == 7));
}

#[test]
fn stat_repeats_and_later_reports_cover_the_interval() {
    let sandbox = Sandbox::new();
    sandbox.done(&["add", "ram:1M"]);
    let mut client = Nbd::connect(&sandbox.run("ram.sock"), "ram");
    client.write(0, &[1; 4096]);
    let text = sandbox.done(&["stat", "-x", "1", "2"]);
    let rows: Vec<Vec<&str>> = text
        .lines()
        .filter(|line| line.starts_with("ram"))
        .map(|line| line.split_whitespace().collect())
        .collect();
    assert_eq!(text.lines().filter(|line| line.starts_with("Device ")).count(), 2);
    assert_eq!((rows.len(), rows[0].len()), (2, 23), "{text}");
    // w/s: something since it was added, nothing within the last second.
    assert!(rows[0][7] != "0.00" && rows[1][7] == "0.00", "{text}");
}

#[test]
fn curl_reads_devices_and_metrics() {
    let sandbox = Sandbox::new();
    sandbox.done(&["add", "ram:1M"]);
    let mut client = Nbd::connect(&sandbox.run("ram.sock"), "ram");
    for block in 0..10 {
        client.write(block * 4096, &[1; 4096]);
    }
    let socket = sandbox.run("ram.control");
    let curl = |path: &str| {
        let output = std::process::Command::new("curl")
            .args(["-s", "--unix-socket", &socket.display().to_string(), &format!("http://localhost{path}")])
            .output();
        output.map(|output| String::from_utf8_lossy(&output.stdout).into_owned())
    };
    let device = match curl("/devices/ram") {
        Ok(device) => json(&device),
        Err(why) => return println!("skipped: curl: {why}"),
    };
    assert_eq!((device["name"].as_str(), device["size"].as_u64()), (Some("ram"), Some(1 << 20)));
    assert_eq!(device["queues"].as_array().map(Vec::len), Some(1), "one connection, one queue");
    let metrics = curl("/metrics").unwrap();
    assert!(metrics.contains("blockyard_requests_total{device=\"ram\",op=\"write\"} 10\n"), "{metrics}");
    // Buckets are cumulative: they never fall, and the last one has everything.
    let counts: Vec<u64> = metrics
        .lines()
        .filter(|line| {
            line.starts_with("blockyard_request_duration_seconds_bucket{") && line.contains("\"write\"")
        })
        .filter_map(|line| line.rsplit(' ').next()?.parse().ok())
        .collect();
    assert!(counts.len() > 20 && counts.is_sorted() && counts.last() == Some(&10), "{counts:?}");
}

#[test]
fn the_callers_descriptors_are_not_inherited() {
    let sandbox = Sandbox::new();
    let (mut reader, writer) = std::io::pipe().unwrap();
    // The shell passes the pipe on as descriptor 9, which the server must not inherit.
    let script = format!("exec 9>&1 >/dev/null; exec {} add ram:1M", env!("CARGO_BIN_EXE_blockyard"));
    let mut command = std::process::Command::new("sh");
    command.args(["-c", &script]).env("BLOCKYARD_RUN", sandbox.run("")).stdout(writer);
    assert!(command.status().unwrap().success());
    drop(command);
    let mut rest = Vec::new();
    let ended = std::thread::spawn(move || std::io::Read::read_to_end(&mut reader, &mut rest).map(|_| rest));
    wait_for("the pipe's end", || ended.is_finished().then_some(()));
    assert_eq!(ended.join().unwrap().unwrap(), b"");
    assert_eq!(listed(&sandbox).len(), 1);
}
