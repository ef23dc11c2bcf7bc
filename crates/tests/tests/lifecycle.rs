//! Life cycle of devices on the command line: `add`, `list`, `show`, `del`, `stat`, `up`, `check`, and their
//! errors.

use blockyard_tests::peer::Peer;
use blockyard_tests::server::{Sandbox, binary, is_alive, signal};
use blockyard_tests::tools::{PATIENCE, missing, run, until};
use proto::nbd::CommandFlags;
use rustix::process::Signal;
use serde_json::Value;
use std::fs::{DirBuilder, Permissions};
use std::io::{Read, Write};
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;

fn json(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|why| panic!("{why}: {text}"))
}

/// Adds a device in the background; returns the path of its NBD socket.
#[track_caller]
fn add(sandbox: &Sandbox, name: &str, stack: &str) -> PathBuf {
    let socket = sandbox.path(&format!("{name}.nbd"));
    let export = format!("unix:{}", socket.display());
    let printed = sandbox.run(&["add", stack, "--name", name, "--nbd", &export]).ok();
    assert_eq!(printed, format!("{name} nbd nbd+unix:///{name}?socket={}\n", socket.display()));
    socket
}

#[track_caller]
fn names(sandbox: &Sandbox) -> Vec<String> {
    let listed = json(&sandbox.run(&["list", "--json"]).ok());
    let devices = listed.as_array().expect("a list");
    devices.iter().map(|device| device["name"].as_str().unwrap_or_default().to_owned()).collect()
}

/// Checks an error's form: `blockyard: WHAT failed: NAME: why (what to do)`.
#[track_caller]
fn assert_error(stderr: &str, what: &str, name: &str) {
    let lines: Vec<&str> = stderr.lines().collect();
    assert!(!lines.is_empty(), "there is no message");
    for line in lines {
        let start = if name.is_empty() {
            format!("blockyard: {what} failed: ")
        } else {
            format!("blockyard: {what} failed: {name}: ")
        };
        assert!(line.starts_with(&start), "{line}");
        assert!(line.ends_with(')') && line.contains('('), "the message lacks an advice: {line}");
    }
}

#[test]
fn an_unreadable_run_directory_is_reported() {
    let sandbox = Sandbox::default();
    assert_eq!(sandbox.run(&["list"]).ok(), "", "one that is missing is empty");
    // Root can list any folder, unless it gives that up.
    let root = rustix::process::geteuid().is_root();
    if root && missing(&["setpriv"]) {
        return;
    }
    let give_up: &[&str] =
        if root { &["setpriv", "--bounding-set", "-dac_override,-dac_read_search"] } else { &["env"] };
    DirBuilder::new().mode(0o300).create(sandbox.run_dir()).expect("a folder");
    for words in [&["list"][..], &["show", "disk"], &["stat"], &["del", "--all"]] {
        let mut command = sandbox.tool(&[give_up, &[binary().to_str().expect("UTF-8")], words].concat());
        let printed = run(command.env("BLOCKYARD_RUN", sandbox.run_dir())).failed_with(1);
        assert!(
            printed.contains("Permission denied") && printed.contains("cannot be listed"),
            "{words:?}: {printed}"
        );
    }
    std::fs::set_permissions(sandbox.run_dir(), Permissions::from_mode(0o700)).expect("its mode");
    assert_eq!(sandbox.run(&["list"]).ok(), "");
}

#[test]
fn del_takes_several_names_and_ls_and_rm_are_aliases() {
    let sandbox = Sandbox::default();
    for name in ["one", "two", "three", "four"] {
        add(&sandbox, name, "null:8M");
    }
    let names = || -> Vec<String> {
        let listed = sandbox.run(&["ls"]).ok();
        listed.lines().skip(1).filter_map(|line| line.split(' ').next().map(str::to_owned)).collect()
    };
    assert_eq!(names(), ["four", "one", "three", "two"]);
    sandbox.run(&["del", "one", "two", "one"]).ok();
    assert_eq!(names(), ["four", "three"]);
    // A missing device does not prevent the deletion of the others.
    let printed = sandbox.run(&["rm", "three", "nothing", "four"]).failed_with(1);
    assert!(printed.contains("del failed: nothing: there is no such device"), "{printed}");
    assert!(!printed.contains("three") && !printed.contains("four"), "{printed}");
    assert_eq!(sandbox.run(&["ls"]).ok(), sandbox.run(&["list"]).ok());
    assert!(names().is_empty());
    sandbox.run(&["del"]).failed_with(2);
    sandbox.run(&["del", "--all", "one"]).failed_with(2);
}

#[test]
fn show_has_read_only_once_and_no_limits_that_are_zero() {
    let sandbox = Sandbox::default();
    sandbox.image("disk.img", 1 << 20);
    let _one = sandbox.serve("file:disk.img", &["--name", "over", "--layer", "cow,file=o.cow,create"]);
    let shown = sandbox.run(&["show", "over"]).ok();
    let of = |key: &str| shown.lines().filter(|line| line.split("  ").next() == Some(key)).count();
    assert_eq!((of("read-only"), of("backend read-only")), (1, 1), "{shown}");
    let limits: Vec<&str> = shown.lines().filter(|line| line.starts_with("limit ")).collect();
    assert!(limits.iter().any(|line| line.starts_with("limit logical_block_size ")), "{shown}");
    assert!(limits.iter().all(|line| !line.ends_with(" 0")), "{shown}");
    assert!(sandbox.run(&["limits", "over"]).ok().contains("virt_boundary_mask"), "limits shows all");
    let report = sandbox.run(&["stat", "-x", "over", "0.1", "2"]).ok();
    assert_eq!(report.lines().filter(|line| line.starts_with("over ")).count(), 2, "{report}");
}

#[test]
fn a_device_is_added_listed_shown_and_deleted() {
    let sandbox = Sandbox::default();
    let image = sandbox.image("image", 8 << 20);
    let socket = add(&sandbox, "disk", &format!("file:{}", image.display()));
    let mut peer = Peer::connect(&socket, "disk");
    peer.write(0, &[1; 4096], CommandFlags::empty()).unwrap();

    let listed = json(&sandbox.run(&["list", "--json"]).ok());
    let device = &listed[0];
    assert_eq!(device["name"], "disk");
    assert_eq!(device["size"], 8 << 20);
    assert_eq!(device["read_only"], false);
    let shown = json(&sandbox.run(&["show", "disk", "--json"]).ok());
    assert_eq!(shown["pid"], device["pid"]);
    assert_eq!(shown["exports"][0]["connections"], 1);
    let engine = shown["queues"][0]["engine"].as_str().expect("it says how it does I/O");
    assert!(["io_uring", "epoll"].contains(&engine), "{engine}");
    assert!(shown["limits"]["logical_block_size"].as_u64() >= Some(512), "{shown}");
    let (list, show) = (sandbox.run(&["list"]).ok(), sandbox.run(&["show", "disk"]).ok());
    for word in ["disk", "8M", &socket.to_string_lossy()] {
        assert!(list.contains(word) && show.contains(word), "{word}: {list}{show}");
    }

    assert_eq!(sandbox.run(&["del", "disk"]).ok(), "");
    assert!(peer.try_receive().is_none(), "the client is let go");
    assert_eq!(std::fs::read(&image).unwrap()[..4096], [1; 4096]);
    assert_eq!(names(&sandbox), Vec::<String>::new());
    assert!(!socket.exists());
    assert_eq!(sandbox.left_behind(), Vec::<String>::new());
    assert_error(&sandbox.run(&["show", "disk"]).failed_with(1), "show", "disk");
}

#[test]
fn a_name_is_used_once() {
    let sandbox = Sandbox::default();
    let socket = add(&sandbox, "disk", "ram:1M");
    let other = format!("unix:{}", sandbox.path("other.nbd").display());
    let refused = sandbox.run(&["add", "ram:2M", "--name", "disk", "--nbd", &other]).failed_with(1);
    assert_error(&refused, "add", "disk");
    assert!(refused.contains("--name"), "{refused}");
    assert!(!sandbox.path("other.nbd").exists());
    assert_eq!(Peer::connect(&socket, "disk").session.size, 1 << 20);
    // A default name gets a number.
    let derived: Vec<String> = (0..3)
        .map(|_| sandbox.run(&["add", "ram:1M"]).ok().split(' ').next().unwrap_or_default().to_owned())
        .collect();
    let mut all = names(&sandbox);
    assert_eq!(all.len(), 4, "{all:?}");
    all.dedup();
    assert_eq!(all.len(), 4, "{all:?}");
    assert!(derived.iter().all(|name| name.starts_with("ram") && all.contains(name)), "{derived:?}");
    sandbox.run(&["del", "--all"]).ok();
    assert_eq!(sandbox.left_behind(), Vec::<String>::new());
}

#[test]
fn all_are_deleted_at_once() {
    let sandbox = Sandbox::default();
    let sockets = ["one", "two", "three"].map(|name| add(&sandbox, name, "ram:1M"));
    assert_eq!(names(&sandbox), ["one", "three", "two"]);
    assert_eq!(sandbox.run(&["del", "--all"]).ok(), "");
    assert_eq!(names(&sandbox), Vec::<String>::new());
    assert!(sockets.iter().all(|socket| !socket.exists()));
    assert_eq!(sandbox.left_behind(), Vec::<String>::new());
    // There is nothing to delete, so it succeeds.
    sandbox.run(&["del", "--all"]).ok();
}

#[test]
fn files_of_a_dead_process_are_removed() {
    let sandbox = Sandbox::default();
    let socket = add(&sandbox, "disk", "ram:1M");
    add(&sandbox, "other", "ram:1M");
    let pid = json(&sandbox.run(&["show", "disk", "--json"]).ok())["pid"].as_u64().unwrap() as u32;
    signal(pid, Signal::KILL);
    // Its sockets may be closed one after the other, and rings after them.
    let is_gone = || (!is_alive(pid) && UnixStream::connect(&socket).is_err()).then_some(());
    assert!(until(PATIENCE, is_gone).is_some() && socket.exists(), "killed, it leaves its socket behind");
    assert_eq!(names(&sandbox), ["other"]);
    assert_error(&sandbox.run(&["show", "disk"]).failed_with(1), "show", "disk");
    assert_error(&sandbox.run(&["del", "disk"]).failed_with(1), "del", "disk");
    // The name and the address of the killed server can be used again.
    let socket = add(&sandbox, "disk", "ram:2M");
    assert_eq!(Peer::connect(&socket, "disk").session.size, 2 << 20);
    sandbox.run(&["del", "--all"]).ok();
    assert_eq!(sandbox.left_behind(), Vec::<String>::new());
}

#[test]
fn failed_commands_report_the_reason_and_leave_nothing() {
    let sandbox = Sandbox::default();
    let missing = format!("file:{}", sandbox.path("missing").display());
    let nowhere = format!("unix:{}", sandbox.path("no/such/folder/sock").display());
    for (arguments, what, name) in [
        (vec!["add", &missing, "--name", "disk"], "add", "disk"),
        (vec!["serve", &missing, "--name", "disk"], "serve", "disk"),
        (vec!["add", "ram:1M", "--name", "disk", "--nbd", &nowhere], "add", "disk"),
        (vec!["serve", "ram:1M", "--name", "disk", "--nbd", &nowhere], "serve", "disk"),
        (vec!["show", "nobody"], "show", "nobody"),
        (vec!["del", "nobody"], "del", "nobody"),
        (vec!["stat", "nobody"], "stat", "nobody"),
        (vec!["check", "missing.toml"], "check", ""),
        (vec!["up", "missing.toml"], "up", ""),
    ] {
        let outcome = sandbox.run(&arguments);
        assert_eq!(outcome.stdout, "", "{outcome}");
        assert_error(&outcome.failed_with(1), what, name);
    }
    assert_eq!(sandbox.left_behind(), Vec::<String>::new());
}

#[test]
fn usage_errors_have_exit_status_two() {
    let sandbox = Sandbox::default();
    for arguments in [
        &[][..],
        &["nonsense"],
        &["serve"],
        &["serve", "ram:1M", "--nonsense"],
        &["serve", "ram:1M", "--nbd", "carrier-pigeon:loft"],
        &["serve", "ram:1M", "--name", "a/b"],
        &["serve", "ram:1M", "--layer", "nonsense"],
        &["serve", "ram:1M", "--ublk=x"],
        &["serve", "ram:lots"],
        &["serve", "nonsense:1M"],
        &["serve", "disk.img"],
        &["serve", "ram:1M,nonsense=1"],
        &["serve", "ram:1M", "--tls", "require"],
        &["add", "file:x,offset=lots"],
        &["del"],
        &["del", "disk", "--all"],
        &["show"],
        &["stat", "disk", "one"],
        &["check"],
    ] {
        let outcome = sandbox.run(arguments);
        assert_eq!(outcome.stdout, "", "{outcome}");
        let stderr = outcome.failed_with(2);
        assert!(!stderr.is_empty() && !stderr.contains("panicked"), "{arguments:?}: {stderr}");
    }
    assert_eq!(sandbox.left_behind(), Vec::<String>::new());
}

#[test]
fn an_address_in_use_is_refused_and_a_dead_one_taken_over() {
    let sandbox = Sandbox::default();
    let mut first = sandbox.serve("ram:1M", &[]);
    let export = format!("unix:{}", sandbox.path("disk.sock").display());
    let refused = sandbox.run(&["serve", "ram:1M", "--name", "second", "--nbd", &export]).failed_with(1);
    assert_error(&refused, "serve", "second");
    let holder = format!("({}) listens there", first.pid());
    assert!(refused.contains(&holder), "{refused}");
    first.check_health("disk");
    // A port is taken by every kind of export and by the page.
    let taken = sandbox
        .start(&mut sandbox.blockyard(&["serve", "ram:1M", "--name", "port", "--nbd", "tcp:127.0.0.1:0"]), 1);
    let address = taken.uri_of(0).trim_start_matches("nbd://").trim_end_matches("/port").to_owned();
    let holder = format!("({}) listens there", taken.pid());
    for listen in
        [["--nbd", &format!("tcp:{address}")], ["--iscsi", &format!("tcp:{address}")], ["--web", &address]]
    {
        let arguments = [&["serve", "ram:1M", "--name", "fourth"][..], &listen].concat();
        let refused = sandbox.run(&arguments).failed_with(1);
        assert!(refused.contains(&holder), "{listen:?}: {refused}");
    }
    first.kill();
    assert!(sandbox.path("disk.sock").exists());
    sandbox.serve("ram:1M", &[]).check_health("disk");
    // A regular file is not removed.
    let file = sandbox.text("precious", "data");
    let export = format!("unix:{}", file.display());
    sandbox.run(&["serve", "ram:1M", "--name", "third", "--nbd", &export]).failed_with(1);
    assert_eq!(std::fs::read_to_string(&file).unwrap(), "data");
}

#[test]
fn sigint_and_sighup_end_the_server_like_sigterm() {
    for each in [Signal::INT, Signal::HUP, Signal::TERM] {
        let sandbox = Sandbox::default();
        let image = sandbox.image("image", 1 << 20);
        let mut server = sandbox.serve(&format!("file:{}", image.display()), &[]);
        Peer::connect(&server.socket(), "disk").write(0, &[3; 4096], CommandFlags::empty()).unwrap();
        server.signal(each);
        assert_eq!(server.wait().code(), Some(0));
        assert_eq!(std::fs::read(&image).unwrap()[..4096], [3; 4096]);
        assert_eq!(sandbox.left_behind(), Vec::<String>::new());
    }
}

#[test]
fn ready_lines_in_json_are_one_object_each() {
    let sandbox = Sandbox::default();
    let (one, two) = (sandbox.path("one.sock"), sandbox.path("two.sock"));
    let exports = [&one, &two].map(|path| format!("unix:{}", path.display()));
    let arguments =
        ["serve", "ram:1M", "--name", "disk", "--nbd", &exports[0], "--nbd", &exports[1], "--json"];
    let server = sandbox.start(&mut sandbox.blockyard(&arguments), 2);
    for (line, path) in server.ready().iter().zip([one, two]) {
        let line = json(line);
        assert_eq!(line["name"], "disk");
        assert_eq!(line["export"], "nbd");
        assert_eq!(line["address"], format!("nbd+unix:///disk?socket={}", path.display()));
        assert_eq!(line["pid"], server.pid());
    }
}

#[test]
fn stat_counts_the_requests_of_clients() {
    let sandbox = Sandbox::default();
    let server = sandbox.serve("ram:1M", &[]);
    let mut peer = Peer::connect(&server.socket(), "disk");
    for turn in 0..10 {
        peer.write(turn * 8192, &[1; 8192], CommandFlags::empty()).unwrap();
    }
    for turn in 0..5 {
        peer.read(turn * 4096, 4096).unwrap();
    }
    peer.flush().unwrap();
    peer.trim(0, 4096).unwrap();
    let stats = json(&http(&sandbox, "/devices/disk/stats"));
    assert_eq!(stats["operations"]["read"]["ios"], 5);
    assert_eq!(stats["operations"]["write"]["ios"], 10);
    assert_eq!(stats["operations"]["write"]["bytes"], 81920);
    assert_eq!(stats["operations"]["flush"]["ios"], 1);
    assert_eq!(stats["operations"]["discard"]["ios"], 1);
    // The kernel's: reads, sectors read, writes, sectors written, discards, flushes.
    let field = |number: usize| stats["stat"][number].as_u64().unwrap();
    assert_eq!([field(0), field(2), field(4), field(6), field(11), field(15)], [5, 40, 10, 160, 1, 1]);
    assert_eq!(stats["in_flight"], 0);
    let metrics = http(&sandbox, "/metrics");
    assert!(metrics.lines().any(|line| line.contains("disk") && line.ends_with(" 10")), "{metrics}");

    let text = sandbox.run(&["stat"]).ok();
    assert!(text.contains("disk") && text.contains("tps"), "{text}");
    let extended = sandbox.run(&["stat", "-x", "disk", "1", "2"]).ok();
    for column in ["r/s", "w/s", "r_await", "w_await", "aqu-sz", "%util"] {
        assert_eq!(extended.matches(column).count(), 2, "{column}: {extended}");
    }
    json(&sandbox.run(&["stat", "-x", "disk", "--json"]).ok());
}

/// Returns an answer of the control socket of `disk`.
#[track_caller]
fn http(sandbox: &Sandbox, path: &str) -> String {
    let mut stream = UnixStream::connect(sandbox.run_dir().join("disk.control")).expect("a control socket");
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    write!(stream, "GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("an answer");
    assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
    answer.split_once("\r\n\r\n").expect("a body").1.to_owned()
}

#[test]
fn a_topology_is_checked_without_being_served() {
    let sandbox = Sandbox::default();
    sandbox.image("disk.img", 1 << 20);
    let good =
        "[device.disk]\nstack = \"file:disk.img\"\n[[export]]\ndevice = \"disk\"\nnbd = \"unix:sock\"\n";
    sandbox.text("good.toml", good);
    sandbox.run(&["check", "good.toml"]).ok();
    assert_eq!(json(&sandbox.run(&["check", "good.toml", "--json"]).ok())["ok"], true);
    assert!(!sandbox.path("sock").exists());

    let bad = "[device.disk]\nstack = \"file:nowhere.img\"\nlayers = [\"nonsense\"]\ncolour = \"red\"\n\
               [[export]]\ndevice = \"dusk\"\nnbd = \"unix:sock\"\n";
    sandbox.text("bad.toml", bad);
    let outcome = sandbox.run(&["check", "bad.toml"]);
    let stderr = outcome.failed_with(1);
    // All errors at once, with their lines.
    for line in [3, 4, 5] {
        assert!(stderr.contains(&format!("bad.toml:{line}:")), "line {line}: {stderr}");
    }
    let outcome = sandbox.run(&["check", "bad.toml", "--json"]);
    assert_eq!(outcome.status.code(), Some(1));
    let reported = json(&outcome.stdout);
    assert_eq!(reported["ok"], false);
    assert!(reported["problems"].as_array().is_some_and(|problems| problems.len() >= 3), "{reported}");
    sandbox.run(&["up", "bad.toml"]).failed_with(1);
    sandbox.text("missing.toml", "[device.disk]\nstack = \"file:nowhere.img\"\n");
    let stderr = sandbox.run(&["check", "missing.toml"]).failed_with(1);
    assert!(stderr.contains("missing.toml:1:"), "{stderr}");
    sandbox.text("not.toml", "this is not TOML");
    sandbox.run(&["check", "not.toml"]).failed_with(1);
    assert_eq!(sandbox.left_behind(), Vec::<String>::new());
}

#[test]
fn a_topology_ends_with_its_last_device() {
    let sandbox = Sandbox::default();
    let socket = sandbox.path("all.sock");
    let mut text = String::new();
    for name in ["one", "two"] {
        text += &format!("[device.{name}]\nstack = \"ram:1M\"\n");
        text += &format!("[[export]]\ndevice = \"{name}\"\nnbd = \"unix:{}\"\n", socket.display());
    }
    let mut server = sandbox.up(&text, 2);
    assert_eq!(names(&sandbox), ["one", "two"]);
    sandbox.run(&["del", "one"]).ok();
    assert_eq!(names(&sandbox), ["two"]);
    server.check_health("two");
    assert!(Peer::with(&socket, proto::nbd::client::HandshakeOptions::new("one")).is_err());
    sandbox.run(&["del", "two"]).ok();
    assert_eq!(server.wait().code(), Some(0));
    assert!(!socket.exists());
    assert_eq!(sandbox.left_behind(), Vec::<String>::new());
}

#[test]
fn the_default_export_is_a_socket_in_the_run_directory() {
    let sandbox = Sandbox::default();
    let printed = sandbox.run(&["add", "ram:1M", "--name", "disk"]).ok();
    let socket = sandbox.run_dir().join("disk.sock");
    assert_eq!(printed, format!("disk nbd nbd+unix:///disk?socket={}\n", socket.display()));
    assert_eq!(Peer::connect(&socket, "disk").session.size, 1 << 20);
    sandbox.run(&["del", "disk"]).ok();
    assert_eq!(sandbox.left_behind(), Vec::<String>::new());
}

#[test]
fn the_manual_and_completions_have_every_command() {
    let sandbox = Sandbox::default();
    let man = sandbox.run(&["man"]).ok();
    assert!(sandbox.run(&["completions", "bash"]).ok().contains("complete"));
    let help = sandbox.run(&["--help"]).ok();
    for command in ["serve", "add", "up", "check", "list", "show", "del", "stat"] {
        for text in [&man, &help] {
            assert!(text.contains(command), "{command}: {text}");
        }
        assert!(sandbox.run(&[command, "--help"]).ok().contains("Usage"));
    }
    assert!(sandbox.run(&["--version"]).ok().starts_with("blockyard "));
}

#[test]
fn commands_report_a_stopped_server_and_send_it_nothing() {
    let sandbox = Sandbox::default();
    let mut server = sandbox.serve("ram:1M", &[]);
    let pid = server.pid().to_string();
    server.freeze();
    let commands: [&[&str]; 8] = [
        &["list"],
        &["show", "disk"],
        &["stat", "disk"],
        &["resize", "disk", "2M"],
        &["suspend", "disk"],
        &["set", "disk", "slow=50ms"],
        &["del", "disk"],
        &["del", "--all"],
    ];
    std::thread::scope(|scope| {
        for words in commands {
            let (sandbox, pid) = (&sandbox, &pid);
            scope.spawn(move || {
                let begun = std::time::Instant::now();
                let printed = sandbox.run(words).failed_with(1);
                assert!(printed.contains(&format!("process {pid}, is stopped")), "{words:?}: {printed}");
                assert!(printed.contains(&format!("kill -CONT {pid}")), "{words:?}: {printed}");
                assert!(begun.elapsed().as_secs() < 10, "{words:?} took {:?}", begun.elapsed());
            });
        }
    });
    server.signal(Signal::CONT);
    // A command to a stopped server is not executed later.
    assert_eq!(names(&sandbox), ["disk"]);
    assert_eq!(json(&sandbox.run(&["show", "disk", "--json"]).ok())["size"], 1 << 20);
    server.terminate();
}

#[test]
fn a_file_deleted_while_it_is_served_is_reported() {
    let sandbox = Sandbox::default();
    let (base, over) = (sandbox.image("base.img", 1 << 20), sandbox.path("over.cow"));
    let layer = format!("cow,file={},create", over.display());
    let server = sandbox.serve(&format!("file:{}", base.display()), &["--layer", &layer]);
    assert!(json(&sandbox.run(&["show", "disk", "--json"]).ok())["backend"]["deleted"].is_null());
    std::fs::remove_file(&over).expect("it was there");
    let shown = sandbox.run(&["show", "disk"]).ok();
    assert!(shown.contains("over.cow (copy the device before its server ends)"), "{shown}");
    assert!(sandbox.run(&["list"]).ok().contains(" (deleted)"));
    until(PATIENCE, || server.log().contains("over.cow was deleted while it is served").then_some(()))
        .expect("a warning");
    std::fs::remove_file(&base).expect("it was there");
    until(PATIENCE, || server.log().contains("base.img was deleted").then_some(())).expect("a warning");
    std::thread::sleep(std::time::Duration::from_secs(5));
    assert_eq!(server.log().matches("was deleted").count(), 2, "each once: {}", server.log());
}
