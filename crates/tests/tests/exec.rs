//! `exec:` and `nbdkit:` devices: real programs that die, hang, and violate the protocol.
//!
//! Required: no wrong byte, no lost request, an end to every wait, no process left behind.

use blockyard_tests::on_both_engines;
use blockyard_tests::peer::Peer;
use blockyard_tests::remote::{fio_verify, serve_as};
use blockyard_tests::server::{Engine, Sandbox, is_alive, noise};
use blockyard_tests::tools::{PATIENCE, missing, until};
use proto::nbd::{CommandFlags, NbdError};
use rustix::process::Signal;
use std::path::PathBuf;
use std::time::Instant;

on_both_engines!(
    the_example_stores_what_is_written,
    requests_are_sent_again_to_a_program_that_is_restarted,
    a_program_that_hangs_is_ended_and_the_request_fails,
);

/// A driver over a file, whose behaviour arguments change: `FILE [hang|garbage|shrink|deadly]`.
const DRIVER: &str = r#"
import mmap, os, signal, socket, struct, sys, threading
path, mode = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else ""
fd, size = os.open(path, os.O_RDWR), os.path.getsize(path)
control = socket.socket(fileno=0)
control.recv(64)
if mode == "silent": threading.Event().wait()
if mode == "refuse": sys.exit("this disk is not mine")
if mode == "shrink" and os.path.exists(path + ".ran"): size = 4096
open(path + ".ran", "w").close()
control.send(struct.pack("<8sIIQIII12x", b"BLKYEXEC", 1, 2 | 64, size, 512, 65536, 8))
def serve(s, m):
    f = s.makefile("rb")
    while len(r := f.read(32)) == 32:
        tag, op, flags, length, offset, place = struct.unpack("<QHHIQQ", r)
        if mode == "hang" and offset == 65536: threading.Event().wait()
        if mode == "deadly" and offset == 65536: os._exit(3)
        if op == 0: m[place:place+length] = os.pread(fd, length, offset)
        if op == 1: os.pwrite(fd, m[place:place+length], offset)
        s.sendall(struct.pack("<QII", tag + (mode == "garbage" and offset == 65536), 0, 0))
while True:
    message, fds, _, _ = socket.recv_fds(control, 64, 2)
    if not message: os._exit(0)
    s, m = socket.socket(fileno=fds[0]), mmap.mmap(fds[1], struct.unpack("<IIQ", message)[2])
    threading.Thread(target=serve, args=(s, m), daemon=True).start()
"#;

const MIB: u64 = 1 << 20;

fn example() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../docs/examples/memory.py")
}

/// Returns the stack of the driver over a file of 16 MiB.
fn driver(sandbox: &Sandbox, mode: &str, options: &str) -> String {
    let program = sandbox.text("driver.py", DRIVER);
    let image = sandbox.image("image", 16 * MIB);
    format!("exec:python3 {} {} {mode}{options}", program.display(), image.display())
}

fn shown(sandbox: &Sandbox, name: &str) -> String {
    let text = sandbox.run(&["show", "front"]).ok();
    let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix("  "));
    line.unwrap_or_else(|| panic!("{name}: {text}")).trim().to_owned()
}

/// Returns the process of the program, once one runs.
fn program(sandbox: &Sandbox) -> u32 {
    until(PATIENCE, || shown(sandbox, "program").parse().ok()).expect("the program runs")
}

/// Stops a process, and waits until all of its threads are stopped: they run until one of them has taken the
/// signal.
fn freeze(pid: u32) {
    blockyard_tests::server::signal(pid, Signal::STOP);
    let is_stopped = |task: std::fs::DirEntry| {
        let stat = std::fs::read_to_string(task.path().join("stat")).unwrap_or_default();
        stat.rsplit(')').next().is_some_and(|rest| rest.trim_start().starts_with('T'))
    };
    let all =
        || std::fs::read_dir(format!("/proc/{pid}/task")).unwrap().all(|task| is_stopped(task.unwrap()));
    until(PATIENCE, || all().then_some(())).expect("it stops");
}

fn the_example_stores_what_is_written(engine: Engine) {
    if missing(&["python3", "fio"]) {
        return;
    }
    let sandbox = Sandbox::new(engine);
    let mut front = serve_as(&sandbox, "front", &format!("exec:{} 32M", example().display()), &[]);
    let pid = program(&sandbox);
    fio_verify(&front, "--size=16M --bs=512-2m --iodepth=16");
    let mut peer = Peer::connect(&front.socket(), "front");
    let data = noise(5, 70_001);
    peer.write(12_345, &data, CommandFlags::FUA).unwrap();
    peer.zero(20_000, 1000, CommandFlags::empty()).unwrap();
    let mut expected = data.clone();
    expected[20_000 - 12_345..21_000 - 12_345].fill(0);
    assert_eq!(peer.read(12_345, 70_001).unwrap(), expected);
    peer.disconnect();
    front.terminate();
    assert!(until(PATIENCE, || (!is_alive(pid)).then_some(())).is_some(), "the program outlives its device");
}

fn requests_are_sent_again_to_a_program_that_is_restarted(engine: Engine) {
    if missing(&["python3"]) {
        return;
    }
    let sandbox = Sandbox::new(engine);
    let front = serve_as(&sandbox, "front", &driver(&sandbox, "", ""), &["--queues", "2"]);
    let mut peer = Peer::connect(&front.socket(), "front");
    for round in 0..3 {
        let (first, second) = (noise(round, 300_032), noise(round + 100, 300_032));
        peer.write(0, &first, CommandFlags::empty()).unwrap();
        let pid = program(&sandbox);
        freeze(pid);
        // This write is in flight when the program dies.
        let write = std::thread::scope(|scope| {
            let write = scope.spawn(|| peer.write(1024, &second, CommandFlags::empty()));
            sandbox.await_in_flight("front", "exec");
            blockyard_tests::server::signal(pid, Signal::KILL);
            write.join().expect("it ends")
        });
        assert_eq!(write, Ok(()), "{}", front.log());
        assert_eq!(peer.read(1024, 300_032).unwrap(), second);
        assert_eq!(peer.read(0, 1024).unwrap(), first[..1024]);
    }
    assert_eq!(shown(&sandbox, "starts"), "4");
    assert!(shown(&sandbox, "last end").contains("SIGKILL"), "{}", shown(&sandbox, "last end"));
    assert!(shown(&sandbox, "requests replayed").parse::<u64>().unwrap() >= 3);
}

fn a_program_that_hangs_is_ended_and_the_request_fails(engine: Engine) {
    if missing(&["python3"]) {
        return;
    }
    let sandbox = Sandbox::new(engine);
    let stack = driver(&sandbox, "hang", ",timeout=400ms,restart=off,reconnect=0");
    let mut front = serve_as(&sandbox, "front", &stack, &[]);
    let mut peer = Peer::connect(&front.socket(), "front");
    assert_eq!(peer.read(0, 512).unwrap(), [0; 512]);
    let started = Instant::now();
    assert_eq!(peer.read(65536, 512), Err(NbdError::Io));
    assert!(started.elapsed().as_millis() >= 350, "{:?}", started.elapsed());
    let end = shown(&sandbox, "last end");
    assert!(end.contains("it left a request unanswered for too long"), "{end}");
    let trouble = || shown(&sandbox, "trouble").contains("restart=off").then_some(());
    assert!(until(PATIENCE, trouble).is_some(), "{}", shown(&sandbox, "trouble"));
    assert_eq!(shown(&sandbox, "program"), "none");
    front.terminate_after_failed_flush("front");
}

#[test]
fn a_request_that_the_program_dies_of_fails_and_others_do_not() {
    if missing(&["python3"]) {
        return;
    }
    let sandbox = Sandbox::new(Engine::Auto);
    let front = serve_as(&sandbox, "front", &driver(&sandbox, "deadly", ""), &[]);
    let mut peer = Peer::connect(&front.socket(), "front");
    assert_eq!(peer.read(65536, 512), Err(NbdError::Io));
    assert!(shown(&sandbox, "last end").contains("exit status: 3"), "{}", shown(&sandbox, "last end"));
    assert_eq!(shown(&sandbox, "requests given up"), "1");
    assert_eq!(peer.read(0, 512).unwrap(), [0; 512]);
}

#[test]
fn a_reply_to_no_request_ends_the_program() {
    if missing(&["python3"]) {
        return;
    }
    let sandbox = Sandbox::new(Engine::Auto);
    let stack = driver(&sandbox, "garbage", ",restart=off,reconnect=0");
    let mut front = serve_as(&sandbox, "front", &stack, &[]);
    let mut peer = Peer::connect(&front.socket(), "front");
    assert_eq!(peer.read(65536, 512), Err(NbdError::Io));
    assert!(shown(&sandbox, "last end").contains("it broke the protocol"), "{}", shown(&sandbox, "last end"));
    front.terminate_after_failed_flush("front");
}

#[test]
fn a_disk_that_comes_back_smaller_is_refused() {
    if missing(&["python3"]) {
        return;
    }
    let sandbox = Sandbox::new(Engine::Auto);
    let mut front = serve_as(&sandbox, "front", &driver(&sandbox, "shrink", ",reconnect=1s"), &[]);
    let mut peer = Peer::connect(&front.socket(), "front");
    peer.write(MIB, &[7; 512], CommandFlags::empty()).unwrap();
    blockyard_tests::server::signal(program(&sandbox), Signal::KILL);
    assert_eq!(peer.read(MIB, 512), Err(NbdError::Io));
    let trouble = shown(&sandbox, "trouble");
    assert!(trouble.contains("its disk has shrunk from 16777216 to 4096 bytes"), "{trouble}");
    front.terminate_after_failed_flush("front");
}

#[test]
fn a_program_that_cannot_serve_says_why() {
    if missing(&["python3"]) {
        return;
    }
    let sandbox = Sandbox::new(Engine::Auto);
    for (stack, why) in [
        (
            driver(&sandbox, "refuse", ""),
            "it ended before it answered (exit status: 1: this disk is not mine)",
        ),
        ("exec:./no-such-driver".to_owned(), "it cannot be started: No such file or directory"),
    ] {
        let refused = sandbox.run(&["serve", &stack, "--name", "front"]).failed();
        assert!(refused.contains(why), "{refused}");
    }
}

#[test]
fn the_example_conforms_and_a_driver_that_does_not_is_named() {
    if missing(&["python3"]) {
        return;
    }
    let sandbox = Sandbox::new(Engine::Auto);
    let command = format!("{} 8M", example().display());
    let report = sandbox.run(&["exec-test", &command]).ok();
    assert_eq!(report.matches("ok  ").count(), 14, "{report}");
    // The driver checks neither the end of the disk nor unknown operations.
    let report = sandbox.run(&["exec-test", &driver(&sandbox, "", "")]);
    let text = format!("{report:?}");
    assert!(text.contains("FAILED   a request past the end fails"), "{text}");
    assert!(text.contains("FAILED   an unknown operation fails"), "{text}");
    assert!(text.contains("ok       several connections see each other's writes"), "{text}");
    report.failed_with(1);
}

#[test]
fn nbdkit_is_started_restarted_and_ended() {
    if missing(&["nbdkit", "fio"]) {
        return;
    }
    let sandbox = Sandbox::new(Engine::Auto);
    let image = sandbox.image("image", 32 * MIB);
    let stack = format!("nbdkit:file {}", image.display());
    let mut front = serve_as(&sandbox, "front", &stack, &["--queues", "2"]);
    fio_verify(&front, "--size=16M --bs=512-256k --iodepth=16");
    let mut peer = Peer::connect(&front.socket(), "front");
    let data = noise(9, 65536);
    peer.write(MIB, &data, CommandFlags::empty()).unwrap();
    let pid = program(&sandbox);
    blockyard_tests::server::signal(pid, Signal::KILL);
    assert_eq!(peer.read(MIB, 65536).unwrap(), data, "{}", front.log());
    assert_eq!(shown(&sandbox, "starts"), "2");
    assert!(shown(&sandbox, "last end").contains("SIGKILL"));
    let pid = program(&sandbox);
    peer.disconnect();
    front.terminate();
    assert!(until(PATIENCE, || (!is_alive(pid)).then_some(())).is_some(), "nbdkit outlives its device");
}

#[test]
fn nbdkit_dies_with_a_server_that_is_killed_and_leaves_no_file() {
    if missing(&["nbdkit"]) {
        return;
    }
    let sandbox = Sandbox::new(Engine::Auto);
    let temporary = sandbox.path("temporary");
    std::fs::create_dir(&temporary).unwrap();
    let files =
        || std::fs::read_dir(&temporary).unwrap().map(|entry| entry.unwrap().path()).collect::<Vec<_>>();
    let export = format!("unix:{}", sandbox.path("front.sock").display());
    let mut serve = sandbox.blockyard(&["serve", "nbdkit:memory 16M", "--name", "front", "--nbd", &export]);
    let mut front = sandbox.start(serve.env("TMPDIR", &temporary), 1);
    let pid = program(&sandbox);
    let mut peer = Peer::connect(&front.socket(), "front");
    assert_eq!(peer.read(0, 512).unwrap(), [0; 512]);
    assert_eq!(files(), Vec::<PathBuf>::new(), "while it is served");
    front.kill();
    assert!(until(PATIENCE, || (!is_alive(pid)).then_some(())).is_some(), "nbdkit outlives its server");
    assert_eq!(files(), Vec::<PathBuf>::new(), "after the server was killed");
}

#[test]
fn an_nbdkit_that_cannot_serve_is_reported_with_its_reason() {
    if missing(&["nbdkit"]) {
        return;
    }
    let sandbox = Sandbox::new(Engine::Auto);
    let temporary = sandbox.path("temporary");
    std::fs::create_dir(&temporary).unwrap();
    for (stack, why) in [
        ("nbdkit:no-such-plugin", "no-such-plugin"),
        ("nbdkit:file /nonexistent", "/nonexistent"),
        // Its own socket would be another one.
        ("nbdkit:--port 10809 memory 1M", "nbdkit ended before it served"),
        ("nbdkit:memory 1M,dir=/nonexistent", "dir=/nonexistent is no folder"),
    ] {
        let mut serve = sandbox.blockyard(&["serve", stack, "--name", "other"]);
        let output = serve.env("TMPDIR", &temporary).output().unwrap();
        let refused = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && refused.contains(why), "{stack}: {refused}");
        assert_eq!(std::fs::read_dir(&temporary).unwrap().count(), 0, "{stack} leaves files");
    }
}
