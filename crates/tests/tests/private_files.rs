//! Files of one user: the run directory, sockets and traces, and the host information that clients see.

use blockyard_tests::peer::Peer;
use blockyard_tests::server::Sandbox;
use blockyard_tests::tools::{missing, run};
use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::os::unix::net::{UnixListener, UnixStream};

#[test]
fn a_run_directory_writable_by_others_is_refused_by_every_command() {
    let sandbox = Sandbox::default();
    let run_dir = sandbox.run_dir();
    fs::create_dir_all(&run_dir).expect("a folder");
    fs::set_permissions(&run_dir, Permissions::from_mode(0o777)).expect("a mode");
    for words in [&["serve", "zero:1M"][..], &["list"], &["show", "disk"], &["del", "disk"]] {
        let printed = sandbox.run(words).failed_with(1);
        assert!(
            printed.contains("others may write to it, its mode is 0777 (chmod 700"),
            "{words:?}: {printed}"
        );
    }
    fs::set_permissions(&run_dir, Permissions::from_mode(0o700)).expect("a mode");
    sandbox.run(&["list"]).ok();
}

#[test]
fn a_stopping_server_keeps_another_servers_socket() {
    let sandbox = Sandbox::default();
    let path = sandbox.path("s");
    let address = format!("unix:{}", path.display());
    let mut first = sandbox.serve("zero:1M", &["--name", "one", "--nbd", &address]);
    fs::remove_file(&path).expect("a socket");
    let second = UnixListener::bind(&path).expect("a socket");
    first.terminate();
    assert!(UnixStream::connect(&path).is_ok(), "it is another program's");
    drop(second);
}

#[test]
fn trace_files_are_private_and_follow_no_link() {
    let sandbox = Sandbox::default();
    let server = sandbox.serve("ram:1M", &["--name", "disk"]);
    let mut peer = Peer::connect(&server.socket(), "disk");
    let trace = |more: &[&str]| sandbox.run(&[&["trace", "disk", "-w", "0.2"], more].concat());
    let mode = |name: &str| fs::metadata(sandbox.path(name)).expect("a file").permissions().mode() & 0o777;
    peer.read(0, 512).expect("a read");
    trace(&["-o", "prefix", "--format", "blktrace"]).ok();
    assert_eq!(mode("prefix.blktrace.0"), 0o600);
    trace(&["-o", "lines", "--format", "text"]).ok();
    assert_eq!(mode("lines"), 0o600);
    sandbox.text("precious", "text");
    symlink(sandbox.path("precious"), sandbox.path("link")).expect("a link");
    symlink(sandbox.path("precious"), sandbox.path("late.blktrace.0")).expect("a link");
    for words in [["-o", "link", "--format", "text"], ["-o", "late", "--format", "blktrace"]] {
        let printed = trace(&words).failed();
        assert!(printed.contains("it is a symbolic link"), "{printed}");
    }
    assert_eq!(fs::read_to_string(sandbox.path("precious")).expect("a file"), "text");
}

#[test]
fn clients_do_not_see_paths_of_the_host() {
    if missing(&["nbdinfo"]) {
        return;
    }
    let sandbox = Sandbox::default();
    let path = sandbox.image("secret-name.img", 1 << 20);
    sandbox.text("table", &format!("0 2048 linear {} 0", path.display()));
    let stack = format!("file:{}", path.display());
    for words in [vec!["serve", stack.as_str()], vec!["serve", "--table", "table"]] {
        let words = [words, vec!["--name", "disk"]].concat();
        let server = sandbox.start(&mut sandbox.blockyard(&words), 1);
        for how in [&["nbdinfo", server.uri()][..], &["nbdinfo", "--list", server.uri()]] {
            let reported = run(&mut sandbox.tool(how)).ok();
            // The client knows the name of the socket already.
            let reported: Vec<&str> = reported.lines().filter(|line| line.contains("description")).collect();
            assert!(!reported.is_empty() && !reported.concat().contains('/'), "{reported:?}");
        }
    }
}
