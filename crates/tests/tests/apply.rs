//! `apply`, `up --reload` and `save` with the real binary: changes, refusals, and uninterrupted service of
//! other devices.

use blockyard_tests::disk::missing_loop;
use blockyard_tests::peer::Peer;
use blockyard_tests::server::{Sandbox, Server, noise};
use blockyard_tests::tools::{PATIENCE, until};
use proto::nbd::CommandFlags;
use serde_json::Value;
use std::fs;
use std::io::{Seek, SeekFrom};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

const MIB: u64 = 1 << 20;

/// A server of the topology `lab.toml`.
struct Lab {
    // Dropped, and so ended, before its sandbox.
    server: Server,
    sandbox: Sandbox,
}

impl Lab {
    #[track_caller]
    fn up(sandbox: Sandbox, topology: &str, exports: usize) -> Lab {
        sandbox.text("lab.toml", topology);
        let server = sandbox.start(&mut sandbox.blockyard(&["up", "lab.toml"]), exports);
        Lab { server, sandbox }
    }

    fn write(&self, topology: &str) {
        self.sandbox.text("lab.toml", topology);
    }

    /// Applies a topology; returns the printed actions.
    #[track_caller]
    fn apply(&self, topology: &str) -> Vec<String> {
        self.write(topology);
        self.sandbox.run(&["apply", "lab.toml"]).ok().lines().map(str::to_owned).collect()
    }

    /// Applies a topology that is refused or fails, and returns stderr.
    #[track_caller]
    fn refused(&self, topology: &str) -> String {
        self.write(topology);
        self.sandbox.run(&["apply", "lab.toml"]).failed_with(1)
    }

    fn socket(&self, name: &str) -> PathBuf {
        self.sandbox.path(&format!("{name}.sock"))
    }

    fn show(&self, name: &str) -> Value {
        shown(&self.sandbox, name)
    }

    /// Returns the names of all devices.
    fn names(&self) -> Vec<String> {
        let all: Value =
            serde_json::from_str(&self.sandbox.run(&["list", "--json"]).ok()).expect("list prints JSON");
        let names =
            all.as_array().expect("a list").iter().map(|device| device["name"].as_str().expect("a name"));
        names.map(str::to_owned).collect()
    }
}

#[track_caller]
fn shown(sandbox: &Sandbox, name: &str) -> Value {
    serde_json::from_str(&sandbox.run(&["show", name, "--json"]).ok()).expect("show prints JSON")
}

/// Returns a device that is exported at `NAME.sock` in the file's directory.
fn device(name: &str, keys: &str) -> String {
    format!("[device.{name}]\n{keys}\n[[export]]\ndevice = \"{name}\"\nnbd = \"unix:{name}.sock\"\n")
}

fn ram(name: &str) -> String {
    device(name, "stack = \"ram:1M\"")
}

fn linear(name: &str, lower: &str) -> String {
    device(name, &format!("table = \"0 2048 linear {lower} 0\""))
}

#[test]
fn devices_are_added_changed_and_removed_while_another_one_is_used() {
    let lab = Lab::up(
        Sandbox::default(),
        &[ram("busy"), ram("old"), device("tuned", "stack = \"null:1M\"")].concat(),
        3,
    );
    let mut peer = Peer::connect(&lab.socket("busy"), "busy");
    let done = AtomicBool::new(false);
    let rounds = std::thread::scope(|scope| {
        let load = scope.spawn(|| {
            let mut rounds = 0;
            while !done.load(Relaxed) {
                let data = noise(rounds, 4096);
                let at = (rounds % 256) * 4096;
                peer.write(at, &data, CommandFlags::empty()).expect("it is served on");
                assert_eq!(peer.read(at, 4096).expect("it is served on"), data);
                rounds += 1;
            }
            rounds
        });
        let after = [
            ram("busy"),
            device("tuned", "stack = \"null:1M\"\nlimits = { max_sectors = 8 }\nscheduler = \"kyber\"\nlayers = [\"delay,read=1ms\"]\nslow = \"2s\""),
            ram("new"),
        ]
        .concat();
        let lines = lab.apply(&after);
        let expected = [
            "remove old".to_owned(),
            "change tuned: layers delay,read=1ms".to_owned(),
            "change tuned: scheduler=kyber".to_owned(),
            "change tuned: limits max_sectors=8".to_owned(),
            "change tuned: slow=2s".to_owned(),
        ];
        assert_eq!(lines[..5], expected);
        assert!(
            lines[5].starts_with("add new: ram:1M, nbd unix:")
                && lines[5].contains(" -> nbd nbd+unix:///new?socket=")
        );
        assert_eq!(lines.len(), 6, "{lines:?}");
        assert_eq!(lab.names(), ["busy", "new", "tuned"]);
        assert_eq!(lab.apply(&after), ["lab.toml: nothing to change"], "a second apply does nothing");
        done.store(true, Relaxed);
        load.join().expect("the client was served throughout")
    });
    assert!(rounds > 1, "the client was idle");
    let tuned = lab.show("tuned");
    assert_eq!(tuned["limits"]["max_sectors"], 8);
    assert_eq!(tuned["layers"], serde_json::json!(["delay,read=1ms", "kyber", "split,max_sectors=8"]));
    let mut new = Peer::connect(&lab.socket("new"), "new");
    new.write(0, &noise(1, 512), CommandFlags::empty()).expect("it is served");
    assert!(!lab.socket("old").exists(), "its socket went with it");
}

#[test]
fn a_dry_run_changes_nothing() {
    let before = [ram("a"), ram("b")].concat();
    let lab = Lab::up(Sandbox::default(), &before, 2);
    let shows = || ["a", "b"].map(|name| (lab.show(name)["size"].clone(), lab.show(name)["exports"].clone()));
    let was = shows();
    lab.write(&[device("a", "stack = \"ram:1M\"\nlimits = \"max_sectors=8\""), ram("c")].concat());
    let dry = lab.sandbox.run(&["apply", "lab.toml", "--dry-run"]).ok();
    assert_eq!(dry.lines().count(), 3, "{dry}");
    assert!(dry.starts_with("remove b\nchange a: limits max_sectors=8\nadd c: ram:1M"), "{dry}");
    assert_eq!(lab.sandbox.run(&["up", "--reload", "lab.toml", "--dry-run"]).ok(), dry);
    let json: Value =
        serde_json::from_str(&lab.sandbox.run(&["apply", "lab.toml", "--dry-run", "--json"]).ok())
            .expect("JSON");
    assert_eq!((&json["ok"], &json["dry_run"]), (&true.into(), &true.into()));
    assert_eq!(
        json["actions"][0],
        serde_json::json!({"action": "remove", "device": "b", "text": "remove b", "outcome": "planned"})
    );
    assert_eq!(shows(), was);
    assert_eq!(lab.names(), ["a", "b"]);
    let reloaded = lab.sandbox.run(&["up", "--reload", "lab.toml"]).ok();
    assert_eq!(reloaded.lines().count(), 3, "{reloaded}");
    assert_eq!(lab.names(), ["a", "c"]);
}

#[test]
fn stacked_devices_are_added_and_removed_in_order() {
    let lab = Lab::up(Sandbox::default(), &ram("base"), 1);
    let names = |lines: Vec<String>| -> Vec<String> {
        lines.iter().map(|line| line.split([':', ',']).next().unwrap_or("").to_owned()).collect()
    };
    let stacked = [linear("top", "middle"), linear("middle", "base"), ram("base")].concat();
    assert_eq!(names(lab.apply(&stacked)), ["add middle", "add top"]);
    let mut top = Peer::connect(&lab.socket("top"), "top");
    top.write(0, &noise(7, 4096), CommandFlags::empty()).expect("it is served");
    let mut base = Peer::connect(&lab.socket("base"), "base");
    assert_eq!(base.read(0, 4096).expect("it is served"), noise(7, 4096));
    base.disconnect();
    // A device in use keeps the devices below it.
    let why = lab.refused(&ram("base"));
    assert!(
        why.contains("top: a client uses it, so it is not removed") && why.contains("nothing was changed"),
        "{why}"
    );
    assert_eq!(lab.names(), ["base", "middle", "top"]);
    top.write(4096, &noise(8, 4096), CommandFlags::empty()).expect("it is served on");
    top.disconnect();
    until(PATIENCE, || (lab.show("top")["exports"][0]["connections"] == 0).then_some(()))
        .expect("it is let go of");
    assert_eq!(names(lab.apply(&ram("base"))), ["remove top", "remove middle"]);
}

#[test]
fn a_table_is_replaced_while_a_client_is_connected() {
    let lower = [ram("x"), ram("y")].concat();
    let lab = Lab::up(Sandbox::default(), &[lower.clone(), linear("a", "x")].concat(), 3);
    let mut peer = Peer::connect(&lab.socket("a"), "a");
    peer.write(0, &noise(1, 4096), CommandFlags::empty()).expect("it is served");
    assert_eq!(lab.apply(&[lower.clone(), linear("a", "y")].concat()), ["change a: load a table of 1 line"]);
    assert_eq!(peer.read(0, 4096).expect("it is served on"), [0; 4096], "it stands on y now");
    // A device can be removed in the same apply that stops using it.
    let lines = lab.apply(&[ram("x"), linear("a", "x")].concat());
    assert_eq!(lines, ["change a: load a table of 1 line", "remove y"]);
    assert_eq!(peer.read(0, 4096).expect("it is served on"), noise(1, 4096));
    assert_eq!(lab.apply(&[ram("x"), linear("a", "x")].concat()), ["lab.toml: nothing to change"]);
}

#[test]
fn a_cycle_is_refused() {
    let lab = Lab::up(Sandbox::default(), &[ram("base"), linear("a", "base"), linear("b", "a")].concat(), 3);
    let why = lab.refused(&[ram("base"), linear("a", "b"), linear("b", "a")].concat());
    assert!(why.contains("it would use itself: a → b → a"), "{why}");
    // Two devices that swap positions are no cycle.
    let lines = lab.apply(&[ram("base"), linear("b", "base"), linear("a", "b")].concat());
    assert_eq!(lines, ["change b: load a table of 1 line", "change a: load a table of 1 line"]);
}

#[test]
fn a_file_grows_and_does_not_shrink() {
    let sandbox = Sandbox::default();
    let file = |size: &str| device("disk", &format!("stack = \"file:disk.img,size={size},create\""));
    let lab = Lab::up(sandbox, &file("1M"), 1);
    let mut peer = Peer::connect(&lab.socket("disk"), "disk");
    assert_eq!(lab.apply(&file("2M")), ["change disk: size 2M"]);
    peer.session.size = 2 * MIB;
    peer.write(MIB, &noise(1, 4096), CommandFlags::empty()).expect("it has grown");
    assert_eq!(lab.apply(&file("2M")), ["lab.toml: nothing to change"]);
    let why = lab.refused(&file("1M"));
    assert!(why.contains("it would shrink from 2M to 1M") && why.contains("--shrink"), "{why}");
    assert_eq!(lab.show("disk")["size"], 2 * MIB);
}

#[test]
fn apply_reverts_changes_made_by_set() {
    let text =
        device("disk", "stack = \"ram:1M\"\nlayers = [\"throttle,iops=100000\"]\nscheduler = \"kyber\"");
    let lab = Lab::up(Sandbox::default(), &text, 1);
    lab.sandbox.run(&["set", "disk", "throttle.iops=5"]).ok();
    lab.sandbox.run(&["set", "disk", "scheduler=none"]).ok();
    lab.sandbox.run(&["set", "disk", "slow=1s"]).ok();
    lab.sandbox.run(&["limits", "disk", "max_segments=9"]).ok();
    assert_eq!(
        lab.apply(&text),
        [
            "change disk: layers throttle,iops=100000",
            "change disk: scheduler=kyber",
            "change disk: no limits",
            "change disk: slow=off"
        ]
    );
    assert_eq!(lab.show("disk")["layers"], serde_json::json!(["throttle,iops=100000", "kyber"]));
    assert_eq!(lab.apply(&text), ["lab.toml: nothing to change"]);
}

#[test]
fn a_device_that_cannot_change_is_added_again_unless_it_is_used() {
    let lab = Lab::up(Sandbox::default(), &[ram("disk"), ram("other")].concat(), 2);
    let next = [device("disk", "stack = \"ram:2M\""), ram("other"), ram("more")].concat();
    let mut peer = Peer::connect(&lab.socket("disk"), "disk");
    let why = lab.refused(&next);
    assert!(why.contains("disk: it would have to be removed and added again, as its stack changes"), "{why}");
    assert_eq!(lab.names(), ["disk", "other"], "nothing was begun");
    peer.read(0, 512).expect("it is served on");
    peer.disconnect();
    until(PATIENCE, || (lab.show("disk")["exports"][0]["connections"] == 0).then_some(()))
        .expect("it is let go of");
    let lines = lab.apply(&next);
    assert_eq!(lines[0], "remove disk, to add it again: its stack changes");
    assert_eq!(lines.len(), 3, "{lines:?}");
    assert_eq!(Peer::connect(&lab.socket("disk"), "disk").session.size, 2 * MIB);
}

#[test]
fn the_only_device_can_be_replaced() {
    let mut lab = Lab::up(Sandbox::default(), &ram("a"), 1);
    assert_eq!(lab.apply(&ram("b")).len(), 2);
    assert!(lab.server.is_running());
    assert_eq!(lab.names(), ["b"]);
    let mut peer = Peer::connect(&lab.socket("b"), "b");
    peer.write(0, &noise(1, 512), CommandFlags::empty()).expect("it is served");
    peer.disconnect();
    lab.sandbox.run(&["del", "b"]).ok();
    lab.server.wait();
}

#[test]
fn exports_are_added_and_removed_while_the_device_stays() {
    let with = |exports: &[&str]| {
        let exports = exports
            .iter()
            .map(|socket| format!("[[export]]\ndevice = \"a\"\nnbd = \"unix:{socket}.sock\"\n"));
        format!("[device.a]\nstack = \"ram:1M\"\n{}", exports.collect::<String>())
    };
    let lab = Lab::up(Sandbox::default(), &with(&["one"]), 1);
    let mut peer = Peer::connect(&lab.socket("one"), "a");
    peer.write(0, &noise(5, 512), CommandFlags::empty()).expect("it is served");
    let lines = lab.apply(&with(&["one", "two"]));
    assert!(lines[0].starts_with("add export nbd unix:") && lines.len() == 1, "{lines:?}");
    let mut second = Peer::connect(&lab.socket("two"), "a");
    assert_eq!(second.read(0, 512).expect("it is the same device"), noise(5, 512));
    let why = lab.refused(&with(&["two"]));
    assert!(why.contains("so its export nbd+unix:///a?socket=") && why.contains("is not removed"), "{why}");
    peer.disconnect();
    second.disconnect();
    until(PATIENCE, || (lab.show("a")["exports"][0]["connections"] == 0).then_some(()))
        .expect("it is let go of");
    let lines = lab.apply(&with(&["two"]));
    assert!(lines[0].starts_with("remove export nbd+unix:///a?socket=") && lines.len() == 1, "{lines:?}");
    assert!(!lab.socket("one").exists());
    assert_eq!(Peer::connect(&lab.socket("two"), "a").read(0, 512).expect("it stayed"), noise(5, 512));
}

#[test]
fn the_first_failure_stops_the_plan_and_removes_the_incomplete_device() {
    let lab = Lab::up(Sandbox::default(), &ram("a"), 1);
    // A regular file at the socket's path makes the second export fail.
    let taken = lab.sandbox.text("taken.sock", "not a socket");
    let half = format!(
        "[device.half]\nstack = \"ram:1M\"\n[[export]]\ndevice = \"half\"\nnbd = \"unix:half.sock\"\n\
         [[export]]\ndevice = \"half\"\nnbd = \"unix:{}\"\n",
        taken.display()
    );
    let next = [device("a", "stack = \"ram:1M\"\nlimits = \"max_sectors=8\""), half, ram("late")].concat();
    lab.write(&next);
    let outcome = lab.sandbox.run(&["apply", "lab.toml"]);
    assert_eq!(outcome.stdout, "change a: limits max_sectors=8\n", "what was done is reported");
    let why = outcome.failed_with(1);
    assert!(why.contains("apply failed: half: ") && why.contains("taken.sock"), "{why}");
    assert!(why.contains("apply failed: not done: add late: ram:1M"), "{why}");
    assert_eq!(lab.names(), ["a"]);
    assert!(!lab.socket("half").exists(), "its first export went with it");
    assert_eq!(lab.show("a")["limits"]["max_sectors"], 8, "what was done stays");
    let json = lab.sandbox.run(&["apply", "lab.toml", "--json"]);
    assert_eq!(json.status.code(), Some(1));
    let json: Value = serde_json::from_str(&json.stdout).expect("JSON");
    assert_eq!(
        (&json["actions"][0]["outcome"], &json["actions"][1]["outcome"]),
        (&"failed".into(), &"not-done".into())
    );
    fs::remove_file(&taken).expect("it exists");
    assert_eq!(lab.apply(&next).len(), 2, "the rest is done once nothing is in the way");
    assert_eq!(lab.names(), ["a", "half", "late"]);
}

#[test]
fn missing_files_are_reported_before_any_change() {
    let lab = Lab::up(Sandbox::default(), &ram("a"), 1);
    let why = lab.refused(&[ram("b"), device("c", "stack = \"file:missing.img\"")].concat());
    assert!(why.contains("device.c.stack: ") && why.contains("there is no such file"), "{why}");
    assert_eq!(lab.names(), ["a"]);
    let dry = lab.sandbox.run(&["apply", "lab.toml", "--dry-run"]);
    assert_eq!(dry.stdout.lines().count(), 3, "{dry}");
    dry.failed_with(1);
    let why = lab.refused("[device.a]\nstack = \"ram:1M\"\nsize = 3\n");
    assert!(why.contains("lab.toml:3:device.a.size"), "{why}");
    let why = lab.refused(&["queues = 7\n".to_owned(), ram("a")].concat());
    assert!(why.contains("queues: the process was started with"), "{why}");
}

#[test]
fn a_file_that_no_process_serves_is_refused_with_a_fix() {
    let sandbox = Sandbox::default();
    sandbox.text("lab.toml", &ram("a"));
    let why = sandbox.run(&["apply", "lab.toml"]).failed_with(1);
    assert!(why.contains("no process serves it (start it with: blockyard up lab.toml)"), "{why}");
    let server = sandbox.serve("ram:1M", &["--name", "a"]);
    let why = sandbox.run(&["apply", "lab.toml"]).failed_with(1);
    let pid = server.pid();
    assert!(why.contains(&format!("process {pid}, which serves a, was not started with this file")), "{why}");
    let why = sandbox.run(&["apply", "none.toml"]).failed_with(1);
    assert!(why.contains("none.toml: No such file"), "{why}");
}

#[test]
fn a_file_is_found_by_any_path() {
    let lab = Lab::up(Sandbox::default(), &ram("a"), 1);
    let link = lab.sandbox.path("link.toml");
    std::os::unix::fs::symlink("lab.toml", &link).expect("a link");
    let output = lab.sandbox.run(&["apply", link.to_str().expect("a path")]).ok();
    assert!(output.ends_with("link.toml: nothing to change\n"), "{output}");
}

/// Returns the output of `show` without values that differ between processes.
fn lasting(sandbox: &Sandbox, name: &str) -> Value {
    let mut shown = shown(sandbox, name);
    for key in ["pid", "uptime_ms", "queues"] {
        shown.as_object_mut().expect("an object").remove(key);
    }
    shown
}

#[test]
fn a_saved_topology_restores_the_same_devices() {
    let sandbox = Sandbox::default();
    sandbox.image("disk.img", 4 * MIB);
    let topology = [
        "queues = 2\n".to_owned(),
        device("disk", "stack = \"file:disk.img,direct=off\"\nlayers = [\"delay,read=1ms\"]\nlimits = { max_sectors = 8 }"),
        device("thin", "stack = \"null:1M\"\nscheduler = \"mq-deadline,fifo_batch=4\"\nio_timeout = \"5s\"\ndepth = 16"),
        ram("base"),
        linear("top", "base"),
        device("relative", "table = \"0 2048 linear file:disk.img,ro,share 0\""),
    ]
    .concat()
    .replace("file:disk.img,direct=off", "file:disk.img,direct=off,ro,share");
    let mut lab = Lab::up(sandbox, &topology, 5);
    let names = ["base", "disk", "relative", "thin", "top"];
    lab.sandbox.run(&["set", "disk", "slow=20ms"]).ok();
    lab.sandbox.run(&["set", "disk", "delay.read=2ms"]).ok();
    let before = names.map(|name| lasting(&lab.sandbox, name));
    let saved = lab.sandbox.path("saved/lab.toml");
    fs::create_dir(lab.sandbox.path("saved")).expect("a folder");
    let outcome = lab.sandbox.run(&["save", "-o", saved.to_str().expect("a path")]);
    assert_eq!(outcome.stderr, "");
    outcome.ok();
    let text = fs::read_to_string(&saved).expect("it was written");
    assert_eq!(lab.sandbox.run(&["save"]).ok(), text, "stdout gets the same");
    assert!(
        lab.sandbox.run(&["check", saved.to_str().expect("a path")]).ok().contains("5 devices, 5 exports")
    );
    let one = lab.sandbox.run(&["save", "top", "base"]).ok();
    assert_eq!(one.matches("[device.").count(), 2, "{one}");
    lab.server.terminate();
    let mut command = lab.sandbox.blockyard(&["up", saved.to_str().expect("a path")]);
    let _again = lab.sandbox.start(&mut command, 5);
    assert_eq!(names.map(|name| lasting(&lab.sandbox, name)), before, "{text}");
    assert_eq!(lab.sandbox.run(&["save"]).ok(), text, "what is saved does not drift");
    let output = lab.sandbox.run(&["apply", saved.to_str().expect("a path")]).ok();
    assert!(output.ends_with(": nothing to change\n"), "{output}");
}

#[test]
fn settings_that_cannot_be_saved_are_reported() {
    let sandbox = Sandbox::default();
    let why = sandbox.run(&["save"]).failed_with(1);
    assert!(why.contains("there is no device to save"), "{why}");
    let why = sandbox.run(&["save", "nothing"]).failed_with(1);
    assert!(why.contains("nothing: there is no such device"), "{why}");
    let _server = sandbox.serve("ram:1M", &[]);
    sandbox.run(&["suspend", "disk"]).ok();
    let outcome = sandbox.run(&["save"]);
    assert!(outcome.stderr.contains("save: left out: disk: its suspension"), "{outcome}");
    assert!(outcome.stdout.starts_with("# left out: disk: its suspension"), "{outcome}");
    sandbox.run(&["resume", "disk"]).ok();
}

#[test]
fn a_saved_file_with_paths_of_keys_is_private() {
    let sandbox = Sandbox::default();
    let folder = blockyard_tests::certificates::certificates(&sandbox, "pki");
    let more = ["--tls", "require", "--tls-certificates", folder.to_str().expect("a path")];
    let _server = sandbox.serve("ram:1M", &more);
    let mode =
        |name: &str| fs::metadata(sandbox.path(name)).expect("it was written").permissions().mode() & 0o777;
    sandbox.run(&["save", "-o", "secret.toml"]).ok();
    assert_eq!(mode("secret.toml"), 0o600);
    let text = fs::read_to_string(sandbox.path("secret.toml")).expect("it was written");
    assert!(
        text.contains("tls = \"require\"")
            && text.contains(&format!("tls-certificates = \"{}\"", folder.display()))
    );
}

#[test]
fn fuse_and_loop_exports_are_added_kept_and_removed() {
    if missing_loop() {
        return;
    }
    let lab = Lab::up(Sandbox::default(), &ram("a"), 1);
    let with_file = |name: &str, value: &str| {
        format!("[device.{name}]\nstack = \"ram:1M\"\n[[export]]\ndevice = \"{name}\"\nfuse = \"{value}\"\n")
    };
    let file = [ram("a"), with_file("f", "f.raw")].concat();
    let lines = lab.apply(&file);
    assert!(lines.len() == 1 && lines[0].starts_with("add f: ram:1M, fuse "), "{lines:?}");
    assert_eq!(lab.apply(&file), ["lab.toml: nothing to change"]);
    let path = lab.sandbox.path("f.raw");
    let open = fs::File::options().read(true).write(true).open(&path).expect("the device's file");
    open.write_all_at(&noise(3, 4096), 0).expect("it is served");
    let why = lab.refused(&ram("a"));
    assert!(why.contains("f: ") && why.contains("nothing was changed"), "{why}");
    drop(open);
    until(PATIENCE, || lab.sandbox.run(&["apply", "lab.toml"]).status.success().then_some(()))
        .expect("it is removed once nobody has it open");
    assert_eq!(lab.names(), ["a"]);
    assert_eq!(fs::metadata(&path).map_or(0, |file| file.len()), 0, "the mount is gone");
    let with_loop = [ram("a"), "[[export]]\ndevice = \"a\"\nloop = true\n".to_owned()].concat();
    let lines = lab.apply(&with_loop);
    assert!(lines.len() == 1 && lines[0].starts_with("add export loop of a -> loop /dev/loop"), "{lines:?}");
    let node = PathBuf::from(lines[0].rsplit(' ').next().expect("a path"));
    let data = noise(9, 4096);
    Peer::connect(&lab.socket("a"), "a").write(0, &data, CommandFlags::empty()).expect("it is served");
    let mut read = vec![0; 4096];
    fs::File::open(&node).expect("a block device").read_exact_at(&mut read, 0).expect("it is readable");
    assert_eq!(read, data);
    assert_eq!(lab.apply(&with_loop), ["lab.toml: nothing to change"], "the number was chosen before");
    until(PATIENCE, || {
        lab.write(&ram("a"));
        lab.sandbox.run(&["apply", "lab.toml"]).status.success().then_some(())
    })
    .expect("its loop device is removed");
    assert_eq!(lab.show("a")["exports"].as_array().map(Vec::len), Some(1));
    assert_eq!(fs::File::open(&node).map_or(0, |mut node| node.seek(SeekFrom::End(0)).expect("a size")), 0);
}

#[test]
fn a_device_that_comes_later_follows_its_files_growth() {
    let lab = Lab::up(Sandbox::default(), &ram("first"), 1);
    let image = lab.sandbox.image("disk.img", MIB);
    lab.apply(&[ram("first"), device("disk", "stack = \"file:disk.img,autosize\"")].concat());
    fs::OpenOptions::new().write(true).open(&image).unwrap().set_len(5 * MIB).unwrap();
    let grown = until(PATIENCE, || (lab.show("disk")["size"] == 5 * MIB).then_some(()));
    assert!(grown.is_some(), "{}", lab.server.log());
}
