//! Servers in the foreground: ready lines, signals, service managers, topologies.

mod common;

use common::{Nbd, Sandbox, Served, wait_for};
use serde_json::Value;
use std::os::unix::net::{UnixDatagram, UnixListener};

#[test]
fn a_signal_drains_flushes_and_exits_with_0() {
    for name in ["INT", "TERM", "HUP"] {
        let sandbox = Sandbox::new();
        let server = sandbox.serve(&["serve", "file:disk.img,size=1M,create"], 1);
        let mut client = Nbd::connect(&sandbox.run("disk.sock"), "disk");
        client.write(0, b"kept");
        drop(client);
        server.signal(name);
        assert_eq!(server.end(), (0, String::new()), "SIG{name}");
        assert!(sandbox.run_names().is_empty(), "{:?}", sandbox.run_names());
        assert_eq!(&std::fs::read(sandbox.path().join("disk.img")).unwrap()[..4], b"kept");
    }
}

#[test]
fn a_second_signal_ends_the_server_at_once() {
    let sandbox = Sandbox::new();
    // A request that never completes blocks the drain.
    let server = sandbox.serve(&["serve", "null:1M,irqmode=timer,completion=1000s"], 1);
    let socket = sandbox.run("null.sock");
    let client = std::thread::spawn(move || {
        // The connection is closed before the reply.
        std::panic::catch_unwind(|| Nbd::connect(&socket, "null").read(0, 512)).is_err()
    });
    wait_for("the request", || {
        let stats: Value = serde_json::from_str(&sandbox.done(&["list", "--json"])).ok()?;
        (stats[0]["queues"][0]["in_flight"] == 1).then_some(())
    });
    server.signal("INT");
    // Draining starts when the server stops listening.
    wait_for("the drain", || (!sandbox.run("null.sock").exists()).then_some(()));
    server.signal("TERM");
    assert_eq!(server.end().0, 143);
    assert!(client.join().unwrap(), "the request was answered");
    assert!(sandbox.run_names().is_empty(), "{:?}", sandbox.run_names());
}

#[test]
fn ready_lines_name_every_export() {
    let sandbox = Sandbox::new();
    let arguments =
        ["serve", "ram:1M", "--nbd", "unix:a.sock", "--nbd", "tcp:127.0.0.1:0", "--nbd-name", "x y"];
    let server = sandbox.serve(&arguments, 2);
    let socket = sandbox.path().join("a.sock");
    assert_eq!(server.ready[0], format!("ram nbd nbd+unix:///x%20y?socket={}", socket.display()));
    assert!(server.ready[1].starts_with("ram nbd nbd://127.0.0.1:"), "{:?}", server.ready);
    assert!(!server.ready[1].contains(":0/"), "{:?}", server.ready);
    Nbd::connect(&socket, "x y").read(0, 512);
    server.signal("TERM");
    assert_eq!(server.end().0, 0);
    assert!(!socket.exists());
}

#[test]
fn ready_lines_that_cannot_be_written_are_a_failure() {
    let sandbox = Sandbox::new();
    let full = std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    let mut command = sandbox.command(&["serve", "ram:1M"]);
    let output = command.stdout(full).output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr.starts_with("blockyard: serve failed: stdout: No space left on device"), "{stderr}");
    assert!(sandbox.run_names().is_empty(), "{:?}", sandbox.run_names());
}

#[test]
fn a_service_manager_is_notified() {
    let sandbox = Sandbox::new();
    let path = sandbox.path().join("notify");
    let notify = UnixDatagram::bind(&path).unwrap();
    notify.set_read_timeout(Some(common::PATIENCE)).unwrap();
    let mut command = sandbox.command(&["serve", "ram:1M"]);
    let server = Served::start(
        {
            command.env("NOTIFY_SOCKET", &path);
            command
        },
        1,
    );
    let mut state = [0; 64];
    let len = notify.recv(&mut state).unwrap();
    assert_eq!(&state[..len], b"READY=1\nSTATUS=serving 1 device\n");
    server.signal("TERM");
    let len = notify.recv(&mut state).unwrap();
    assert!(state[..len].starts_with(b"STOPPING=1\n"), "{}", String::from_utf8_lossy(&state[..len]));
    assert_eq!(server.end().0, 0);
}

/// Starts the binary with a listening socket, as a service manager does. The shell passes the socket as descriptor 3;
/// its own process id, in LISTEN_PID, becomes the server's by exec.
fn activated(sandbox: &Sandbox, listener: UnixListener, arguments: &str, lines: usize) -> Served {
    let binary = env!("CARGO_BIN_EXE_blockyard");
    let script = format!("exec 3<&0 </dev/null; LISTEN_PID=$$ LISTEN_FDS=1 exec {binary} {arguments}");
    let mut command = std::process::Command::new("sh");
    command.args(["-c", &script]).current_dir(sandbox.path()).env("BLOCKYARD_RUN", sandbox.run(""));
    command.stdin(std::os::fd::OwnedFd::from(listener));
    Served::start(command, lines)
}

#[test]
fn sockets_of_a_service_manager_are_served() {
    let sandbox = Sandbox::new();
    let path = sandbox.path().join("s.sock");
    let server = activated(&sandbox, UnixListener::bind(&path).unwrap(), "serve ram:1M --nbd unix:b.sock", 2);
    let uri = |path: &std::path::Path| format!("ram nbd nbd+unix:///ram?socket={}", path.display());
    assert_eq!(server.ready, [uri(&sandbox.path().join("b.sock")), uri(&path)]);
    Nbd::connect(&path, "ram").read(0, 512);
    server.signal("TERM");
    assert_eq!(server.end().0, 0);
    assert!(path.exists(), "the file is the service manager's");
}

#[test]
fn a_topology_shares_the_sockets_of_a_service_manager() {
    let sandbox = Sandbox::new();
    let path = sandbox.path().join("s.sock");
    sandbox.write("two.toml", "[device.a]\nstack = \"ram:1M\"\n[device.b]\nstack = \"ram:2M\"\n");
    let server = activated(&sandbox, UnixListener::bind(&path).unwrap(), "up two.toml", 2);
    let uri = |name: &str| format!("{name} nbd nbd+unix:///{name}?socket={}", path.display());
    assert_eq!(server.ready, [uri("a"), uri("b")]);
    Nbd::connect(&path, "b").read((1 << 20) + 4096, 512);
    server.signal("TERM");
    assert_eq!(server.end().0, 0);
}

const TOPOLOGY: &str = r#"
[device.disk]
stack = "file:disk.img,size=1M,create"
layers = ["split,max_sectors=8"]

[device.spare]
stack = "ram:2M"

[[export]]
device = "disk"
nbd = "unix:disk.sock"
name = "backup"

[[export]]
device = "spare"
nbd = "unix:disk.sock"
"#;

#[test]
fn a_topology_is_served_by_one_process() {
    let sandbox = Sandbox::new();
    let file = sandbox.write("yard.toml", TOPOLOGY).display().to_string();
    assert_eq!(sandbox.done(&["check", &file]), format!("{file}: 2 devices, 2 exports\n"));
    assert!(!sandbox.path().join("disk.img").exists(), "check creates nothing");
    let server = sandbox.serve(&["up", &file], 2);
    let socket = sandbox.path().join("disk.sock");
    let uri = |name: &str| format!("nbd nbd+unix:///{name}?socket={}", socket.display());
    assert_eq!(server.ready, [format!("disk {}", uri("backup")), format!("spare {}", uri("spare"))]);
    let mut client = Nbd::connect(&socket, "backup");
    client.write(0, &[3; 16384]);
    let stats: Value = serde_json::from_str(&sandbox.done(&["stat", "disk", "-x", "--json"])).unwrap();
    assert_eq!(stats["disk"][0]["wareq-sz"], 4.0, "the layer splits: {stats}");
    assert_eq!(Nbd::connect(&socket, "spare").read(0, 4), [0; 4]);
    drop(client);
    let pid = server.pid().to_string();
    assert_eq!(sandbox.done(&["list"]).matches(&pid).count(), 2);
    sandbox.done(&["del", "disk"]);
    assert_eq!(sandbox.done(&["list"]).lines().count(), 2);
    assert_eq!(Nbd::connect(&socket, "spare").read(0, 4), [0; 4]);
    sandbox.done(&["del", "spare"]);
    assert_eq!(server.end(), (0, String::new()));
    assert!(sandbox.run_names().is_empty(), "{:?}", sandbox.run_names());
}

#[test]
fn a_topology_with_errors_starts_nothing_and_reports_all_of_them() {
    let sandbox = Sandbox::new();
    let file = sandbox.write("bad.toml", "[device.a]\nstack = \"ram:x\"\n[device.b]\ndepth = 0\n");
    let file = file.display().to_string();
    for command in ["up", "check"] {
        let answer = sandbox.ask(&[command, &file]);
        let lines: Vec<&str> = answer.err.lines().collect();
        assert_eq!((answer.code, answer.out.as_str(), lines.len()), (1, "", 3), "{answer:?}");
        assert!(lines[0].starts_with(&format!("blockyard: {command} failed: {file}:2:device.a.stack: ")));
        assert!(
            lines[1].starts_with(&format!("blockyard: {command} failed: {file}:3:device.b: it has no stack"))
        );
        assert!(lines[2].starts_with(&format!("blockyard: {command} failed: {file}:4:device.b.depth: ")));
    }
    let answer = sandbox.ask(&["check", "--json", &file]);
    let problems: Value = serde_json::from_str(&answer.out).unwrap();
    assert_eq!((answer.code, problems["ok"].as_bool()), (1, Some(false)));
    assert_eq!(problems["problems"][0]["line"], 2);
    assert!(sandbox.run_names().is_empty());
}

#[test]
fn a_device_that_fails_stops_its_topology() {
    let sandbox = Sandbox::new();
    let text = "[device.a]\nstack = \"ram:1M\"\n[device.b]\nstack = \"file:missing.img\"\n";
    let file = sandbox.write("half.toml", text).display().to_string();
    let answer = sandbox.ask(&["up", &file]);
    assert_eq!((answer.code, answer.out.as_str()), (1, ""));
    assert!(answer.err.starts_with("blockyard: up failed: b: "), "{}", answer.err);
    assert!(sandbox.run_names().is_empty(), "{:?}", sandbox.run_names());
    let answer = sandbox.ask(&["check", &file]);
    assert!(answer.err.contains("half.toml:3:device.b.stack: "), "{}", answer.err);
}
