//! Multipath with the real binary: paths that fail, are failed by messages, become unreachable and return,
//! over two real servers.
//!
//! Required: no error that another path could have avoided, no wrong byte, an end to every wait.

use blockyard_tests::peer::Peer;
use blockyard_tests::remote::{Foreign, fio, serve_as, table_as};
use blockyard_tests::server::{Sandbox, Server, is_alive};
use blockyard_tests::tools::{PATIENCE, missing, until, wait_within};
use proto::nbd::{CommandFlags, NbdError};
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;

fn status(sandbox: &Sandbox) -> String {
    sandbox.run(&["status", "m"]).ok().trim_end_matches('\n').to_owned()
}

fn tell(sandbox: &Sandbox, words: &str) {
    let mut all = vec!["message", "m", "0"];
    all.extend(words.split(' '));
    sandbox.run(&all).ok();
}

/// Waits until the status has this number of working paths; returns whether it did.
fn settles_at(sandbox: &Sandbox, working: usize) -> bool {
    until(PATIENCE, || (status(sandbox).matches(" A ").count() == working + 1).then_some(())).is_some()
}

#[test]
fn status_and_messages_are_the_kernels() {
    let sandbox = Sandbox::default();
    sandbox.image("a", MIB);
    let line = "0 2048 multipath 1 queue_if_no_path 0 2 1 queue-length 0 2 1 a 1 ram:1M 1 queue-length 0 1 1 zero:1M 1";
    let server = table_as(&sandbox, "m", line, &["--multipath", "checker=off"]);
    assert_eq!(
        status(&sandbox),
        "0 2048 multipath 2 1 0 0 2 1 E 0 2 1 a A 0 0 ram:1M A 0 0 E 0 1 1 zero:1M A 0 0 "
    );
    let mut peer = Peer::connect(&server.socket(), "m");
    peer.read(0, 512).unwrap();
    tell(&sandbox, "fail_path a");
    assert_eq!(
        status(&sandbox),
        "0 2048 multipath 2 0 0 0 2 1 A 0 2 1 a F 1 0 ram:1M A 0 0 E 0 1 1 zero:1M A 0 0 "
    );
    server.await_log(" warning: m: a path failed; 2 work, path a: failed by a fail_path message\n");
    tell(&sandbox, "disable_group 1");
    peer.read(0, 512).unwrap();
    assert!(status(&sandbox).contains(" 2 2 D 0 2 1 ") && status(&sandbox).contains(" A 0 1 1 zero:1M"));
    tell(&sandbox, "switch_group 1");
    tell(&sandbox, "reinstate_path a");
    peer.read(0, 512).unwrap();
    assert!(status(&sandbox).contains(" 2 1 A 0 2 1 a A 1 0 "), "{}", status(&sandbox));
    tell(&sandbox, "fail_if_no_path");
    assert_eq!(
        sandbox.run(&["table", "m"]).ok(),
        "0 2048 multipath 0 0 2 1 queue-length 0 2 1 a 1 ram:1M 1 queue-length 0 1 1 zero:1M 1 \n"
    );
    for (words, why) in [
        ("fail_path 8:99", "Invalid argument"),
        ("fail_path nope", "there is no device \"nope\" in the table (devices: "),
        ("switch_group 3", "Invalid argument"),
        ("dance", "unknown message \"dance\" (messages: queue_if_no_path, "),
        ("fail_pth a", "unknown message \"fail_pth\" (did you mean fail_path? messages: "),
    ] {
        let mut all = vec!["message", "m", "0"];
        all.extend(words.split(' '));
        let refused = sandbox.run(&all).failed_with(1);
        assert!(refused.contains(&format!("{words}: {why}")), "{refused}");
    }
    sandbox.run(&["suspend", "m", "--noflush"]).ok();
    let refused = sandbox.run(&["message", "m", "0", "fail_if_no_path"]).failed_with(1);
    assert!(refused.contains("Device or resource busy"), "{refused}");
    sandbox.run(&["resume", "m"]).ok();
    peer.disconnect();
}

/// One of two servers of the same disk.
enum Path {
    Ours(Server),
    Nbdkit(Foreign),
}

fn start(sandbox: &Sandbox, nbdkit: bool, image: &str) -> Path {
    if nbdkit {
        Path::Nbdkit(Foreign::nbdkit_as(sandbox, "two", &["file", image]))
    } else {
        Path::Ours(serve_as(sandbox, "one", &format!("file:{image},share"), &[]))
    }
}

fn uris(sandbox: &Sandbox) -> [String; 2] {
    [
        format!("nbd:nbd+unix:///one?socket={}", sandbox.path("one.sock").display()),
        format!("nbd:nbd+unix:///?socket={}", sandbox.path("two.sock").display()),
    ]
}

/// Limit for any request while one server or the other is killed, in a long run on a machine of its own. When
/// a server dies, its requests are sent to the other one at once, without a pause. With both unreachable they
/// wait for the path checker, at most a second here, and for the processor.
const STALL_MAX: Duration = Duration::from_secs(10);
/// The limit beside other tests, which use the processor meanwhile: a stuck request does not end at all.
const STALL_MAX_BUSY: Duration = Duration::from_secs(60);

/// Returns the time of the slowest request, from fio's report of all its jobs.
fn longest(report: &std::path::Path) -> Duration {
    let text = std::fs::read_to_string(report).expect("fio wrote a report");
    // fio may print other text before it.
    let json: serde_json::Value = serde_json::from_str(&text[text.find('{').unwrap_or(0)..]).expect("JSON");
    let jobs = json["jobs"].as_array().expect("jobs");
    let times = jobs.iter().flat_map(|job| ["read", "write"].map(|op| job[op]["lat_ns"]["max"].as_u64()));
    let longest = times.flatten().max().filter(|&ns| ns > 0).expect("requests that took some time");
    Duration::from_nanos(longest)
}

/// Two servers are killed with SIGKILL and restarted in turn, under a load that verifies.
/// `BLOCKYARD_SOAK_SECONDS` sets the length, for `./x soak multipath`.
#[test]
fn two_servers_killed_in_turn_cause_no_error_and_no_loss() {
    if missing(&["fio", "nbdkit"]) {
        return;
    }
    let soak = std::env::var("BLOCKYARD_SOAK_SECONDS").ok().and_then(|text| text.parse().ok());
    let (seconds, stall_max) = soak.map_or((3, STALL_MAX_BUSY), |seconds| (seconds, STALL_MAX));
    let sandbox = Sandbox::default();
    let image = sandbox.image("image", 64 * MIB).to_string_lossy().into_owned();
    let mut paths = [start(&sandbox, false, &image), start(&sandbox, true, &image)];
    let [one, two] = uris(&sandbox);
    let line = format!("0 131072 multipath 1 queue_if_no_path 0 1 1 queue-length 0 2 1 {one} 1 {two} 1");
    let server =
        table_as(&sandbox, "m", &line, &["--queues", "2", "--multipath", "checker=100ms,checker_max=1s"]);
    let mut load = fio(&server, "--size=16M --bs=512-64k --iodepth=16 --numjobs=2 --offset_increment=32M");
    let report = sandbox.path("fio.json");
    load.args(["--verify_backlog=64", "--time_based", "--output-format=json"]);
    load.arg(format!("--runtime={seconds}")).arg(format!("--output={}", report.display()));
    let mut load = load.spawn().unwrap();
    let end = Instant::now() + Duration::from_secs(seconds);
    let mut kills = 0;
    while Instant::now() < end || kills < 2 {
        std::thread::sleep(Duration::from_millis(300));
        let which = kills % 2;
        match &mut paths[which] {
            Path::Ours(server) => server.kill(),
            Path::Nbdkit(server) => rustix::process::kill_process(
                rustix::process::Pid::from_raw(server.pid() as i32).expect("a process"),
                rustix::process::Signal::KILL,
            )
            .expect("it exists"),
        }
        std::thread::sleep(Duration::from_millis(100));
        paths[which] = start(&sandbox, which == 1, &image);
        kills += 1;
        // The other path works, or will; the next kill waits for both.
        assert!(settles_at(&sandbox, 2), "a path did not come back: {}\n{}", status(&sandbox), server.log());
    }
    let ended = wait_within(&mut load, PATIENCE).expect("fio ends");
    assert!(ended.success(), "{ended} after {kills} kills: {}", server.log());
    assert!(kills >= 2, "killed {kills} times only");
    let stall = longest(&report);
    println!("{kills} kills in {seconds} s, no error; the slowest request took {stall:?}");
    assert!(stall < stall_max, "a request took {stall:?}");
    server.await_log(": a request failed: its connection was lost\n");
    server.await_log("a path is back");
}

#[test]
fn an_unreachable_path_does_not_prevent_attaching() {
    let sandbox = Sandbox::default();
    let image = sandbox.image("image", 4 * MIB).to_string_lossy().into_owned();
    let _one = start(&sandbox, false, &image);
    let [one, other] = uris(&sandbox);
    let two = other.replace("two.sock", "late.sock").replace(":///?", ":///late?");
    let line = format!("0 8192 multipath 0 0 1 1 round-robin 0 2 1 {two} 1 {one} 1");
    let server = table_as(&sandbox, "m", &line, &["--multipath", "checker=50ms,checker_max=200ms"]);
    assert!(status(&sandbox).contains(&format!("{two} F 1 ")), "{}", status(&sandbox));
    server.await_log(": unreachable when the table was loaded\n");
    let mut peer = Peer::connect(&server.socket(), "m");
    peer.write(0, &[5; 4096], CommandFlags::empty()).unwrap();
    let _late = serve_as(&sandbox, "late", &format!("file:{image},share"), &[]);
    assert!(settles_at(&sandbox, 2), "{}", status(&sandbox));
    for _ in 0..8 {
        assert_eq!(peer.read(0, 4096).unwrap(), [5; 4096]);
    }
    peer.disconnect();
}

#[test]
fn without_a_path_requests_fail_or_wait_as_configured() {
    let sandbox = Sandbox::default();
    sandbox.image("a", MIB);
    let line = "0 2048 multipath 0 0 1 1 round-robin 0 2 0 a ram:1M";
    let server = table_as(&sandbox, "m", line, &["--multipath", "no_path_timeout=1s"]);
    let mut peer = Peer::connect(&server.socket(), "m");
    tell(&sandbox, "fail_path a");
    tell(&sandbox, "fail_path ram:1M");
    assert_eq!(peer.read(0, 512), Err(NbdError::Io));
    tell(&sandbox, "queue_if_no_path");
    // A check does not reinstate a path that a message failed; the limit on waiting ends it.
    let start = Instant::now();
    assert_eq!(peer.read(0, 512), Err(NbdError::Io));
    let took = start.elapsed();
    assert!(took >= Duration::from_millis(950), "{took:?}");
    // A path that returns within that time ends the wait. On a busy processor the second may be over before:
    // then it is repeated.
    let waited = until(PATIENCE, || {
        tell(&sandbox, "fail_path a");
        tell(&sandbox, "queue_if_no_path");
        let late = reader(&server);
        std::thread::sleep(Duration::from_millis(100));
        let waits = !late.is_finished();
        tell(&sandbox, "reinstate_path a");
        late.join().unwrap().ok().filter(|_| waits)
    });
    assert_eq!(waited.expect("it waits for a path"), [0; 512]);
    let shown = sandbox.run(&["show", "m"]).ok();
    assert!(shown.contains("longest wait for a path"), "{shown}");
    peer.disconnect();
}

#[test]
fn failback_returns_to_the_first_group_only_if_configured() {
    let sandbox = Sandbox::default();
    let line = "0 2048 multipath 0 0 2 1 round-robin 0 1 0 ram:1M round-robin 0 1 0 zero:1M";
    let server = table_as(&sandbox, "m", line, &["--multipath", "failback=immediate"]);
    let mut peer = Peer::connect(&server.socket(), "m");
    peer.write(0, &[9; 512], CommandFlags::empty()).unwrap();
    tell(&sandbox, "fail_path ram:1M");
    assert_eq!(peer.read(0, 512).unwrap(), [0; 512], "the other group's path");
    tell(&sandbox, "reinstate_path ram:1M");
    let back = until(PATIENCE, || (peer.read(0, 512).unwrap() == [9; 512]).then_some(()));
    assert!(back.is_some(), "{}", status(&sandbox));
    peer.disconnect();
}

/// mptest's end: an error table, without flush, and removal of the device.
#[test]
fn an_error_table_fails_requests_that_wait_for_a_path() {
    let sandbox = Sandbox::default();
    sandbox.image("a", MIB);
    let line = "0 2048 multipath 1 queue_if_no_path 0 1 1 round-robin 0 1 0 a";
    let server = table_as(&sandbox, "m", line, &[]);
    tell(&sandbox, "fail_path a");
    let socket = server.socket();
    let reader = std::thread::spawn(move || {
        let mut peer = Peer::connect(&socket, "m");
        let read = peer.read(0, 512);
        peer.disconnect();
        read
    });
    std::thread::sleep(Duration::from_millis(100));
    assert!(!reader.is_finished());
    let table = sandbox.text("error.table", "0 2048 error");
    sandbox.run(&["table", "m", "--load", &table.to_string_lossy()]).ok();
    sandbox.run(&["suspend", "m", "--noflush"]).ok();
    sandbox.run(&["resume", "m"]).ok();
    assert_eq!(reader.join().unwrap(), Err(NbdError::Io));
    assert_eq!(sandbox.run(&["table", "m"]).ok(), "0 2048 error \n");
    drop(server);
}

/// MP-11: queues and depth are the process's.
#[test]
fn mp_11_queues_and_depth_are_as_configured() {
    let sandbox = Sandbox::default();
    let line = "0 2048 multipath 2 queue_mode mq 0 1 1 round-robin 0 1 0 zero:1M";
    let server = table_as(&sandbox, "m", line, &["--queues", "3", "--depth", "2048"]);
    let mut peers: Vec<Peer> = (0..3).map(|_| Peer::connect(&server.socket(), "m")).collect();
    peers.iter_mut().for_each(|peer| drop(peer.read(0, 512).unwrap()));
    let shown = sandbox.run(&["show", "m"]).ok();
    assert_eq!(shown.matches("2048 deep").count() + shown.matches("depth 2048").count(), 3, "{shown}");
    peers.into_iter().for_each(Peer::disconnect);
}

/// MP-10: a path may be longer than the device, for which the kernel then passes no ioctls on (ours has
/// none). A shorter one is refused.
#[test]
fn mp_10_a_path_may_be_longer_than_the_device_and_not_shorter() {
    let sandbox = Sandbox::default();
    let server = table_as(&sandbox, "m", "0 1024 multipath 0 0 1 1 round-robin 0 1 0 zero:1M", &[]);
    let mut peer = Peer::connect(&server.socket(), "m");
    assert_eq!(peer.read(1023 * 512, 512).unwrap(), [0; 512]);
    assert!(peer.read(1024 * 512, 512).is_err(), "the device ends where the table says");
    peer.disconnect();
    let table = sandbox.text("long.table", "0 4096 multipath 0 0 1 1 round-robin 0 1 0 zero:1M");
    let refused = sandbox.run(&["table", "m", "--load", &table.to_string_lossy()]).failed_with(1);
    assert!(refused.contains("too small for target: start=0, len=4096, dev_size=2048"), "{refused}");
}

/// Creates a program that activates paths: it records its arguments and its process, waits for the file `go`,
/// and fails for a group with a file `bad`. Another process writes it: a file that this one could have open
/// for writing cannot be executed.
fn activator(sandbox: &Sandbox) -> String {
    let program = sandbox.path("activate").to_string_lossy().into_owned();
    let script = "#!/bin/sh\ncd \"${0%/*}\"\necho \"$$ $1 $2 $3\" >> called\n\
                  until test -e go; do sleep 0.02; done\ntest ! -e bad$2 || exit 3\n";
    let write = "printf %s \"$1\" > \"$0\" && chmod 755 \"$0\"";
    let written = sandbox.command("sh").args(["-c", write, &program, script]).status();
    assert!(written.expect("a shell").success());
    program
}

/// Returns each call of the program so far: the process, and its arguments.
fn calls(sandbox: &Sandbox) -> Vec<(u32, String)> {
    let text = std::fs::read_to_string(sandbox.path("called")).unwrap_or_default();
    let call = |line: &str| line.split_once(' ').map(|(pid, words)| (pid.parse().unwrap(), words.to_owned()));
    text.lines().filter_map(call).collect()
}

fn words(calls: &[(u32, String)]) -> Vec<&str> {
    calls.iter().map(|(_, words)| words.as_str()).collect()
}

/// Reads the first block on a connection of its own.
fn reader(server: &Server) -> std::thread::JoinHandle<Result<Vec<u8>, NbdError>> {
    let socket = server.socket();
    std::thread::spawn(move || {
        let mut peer = Peer::connect(&socket, "m");
        let read = peer.read(0, 512);
        peer.disconnect();
        read
    })
}

/// MP-6: a program activates the paths of a group when that is selected, and requests wait for it.
#[test]
fn mp_6_requests_wait_until_a_program_has_activated_the_paths() {
    let sandbox = Sandbox::default();
    let program = activator(&sandbox);
    let groups = "2 1 round-robin 0 1 0 ram:1M round-robin 0 1 0 zero:1M";
    let line = format!("0 2048 multipath 0 2 exec {program} {groups}");
    let server = table_as(&sandbox, "m", &line, &["--multipath", "checker=off"]);
    let table = sandbox.run(&["table", "m"]).ok();
    assert!(table.starts_with(&format!("0 2048 multipath 0 2 exec {program} 2 1 ")), "{table}");
    let called = |count| {
        until(PATIENCE, || Some(calls(&sandbox)).filter(|calls| calls.len() >= count)).expect("called")
    };
    assert!(calls(&sandbox).is_empty(), "nobody uses it yet");

    let first = reader(&server);
    assert_eq!(words(&called(1)), ["m 1 ram:1M"]);
    std::thread::sleep(Duration::from_millis(100));
    assert!(!first.is_finished(), "it waits");
    assert!(status(&sandbox).starts_with("0 2048 multipath 2 1 1 0 2 1 A "), "{}", status(&sandbox));
    sandbox.text("go", "");
    assert_eq!(first.join().unwrap().unwrap(), [0; 512]);
    assert!(status(&sandbox).starts_with("0 2048 multipath 2 0 1 0 2 1 A "), "{}", status(&sandbox));
    let mut peer = Peer::connect(&server.socket(), "m");
    peer.write(0, &[9; 512], CommandFlags::empty()).unwrap();

    // A failure in one group leads to the other, whose paths are activated again.
    sandbox.text("bad2", "");
    tell(&sandbox, "switch_group 2");
    assert_eq!(peer.read(0, 512).unwrap(), [9; 512]);
    assert_eq!(words(&called(3)), ["m 1 ram:1M", "m 2 zero:1M", "m 1 ram:1M"]);
    assert!(status(&sandbox).contains("zero:1M F 1 "), "{}", status(&sandbox));
    peer.disconnect();

    // Loading another table does not wait for it, and leaves no program behind.
    std::fs::remove_file(sandbox.path("go")).unwrap();
    tell(&sandbox, "reinstate_path zero:1M");
    tell(&sandbox, "switch_group 2");
    let held = reader(&server);
    let (pid, _) = called(4)[3].clone();
    assert!(is_alive(pid) && !held.is_finished());
    let table = sandbox.text("error.table", "0 2048 error");
    sandbox.run(&["table", "m", "--load", &table.to_string_lossy()]).ok();
    sandbox.run(&["suspend", "m", "--noflush"]).ok();
    sandbox.run(&["resume", "m"]).ok();
    assert_eq!(held.join().unwrap(), Err(NbdError::Io));
    assert!(until(PATIENCE, || (!is_alive(pid)).then_some(())).is_some(), "it is ended with its table");
    server.await_log("a path could not be activated: ");
    server.await_log("exit status: 3");
}
