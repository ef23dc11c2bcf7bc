//! Devices changed while they are served: nothing is lost, nothing reordered across a flush, and a failed
//! change leaves everything unchanged.

use blockyard_tests::disk::{Loop, missing_loop};
use blockyard_tests::on_both_engines;
use blockyard_tests::peer::Peer;
use blockyard_tests::server::{Engine, Sandbox, missing_root, noise};
use blockyard_tests::tools::{PATIENCE, command, missing, run, skip, until};
use proto::nbd::CommandFlags;
use serde_json::Value;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;

on_both_engines!(
    direct_io_is_switched_under_verified_load,
    a_device_grows_with_its_file_and_on_request,
    requests_to_a_suspended_device_complete_after_resume,
);

fn show(sandbox: &Sandbox) -> Value {
    serde_json::from_str(&sandbox.run(&["show", "disk", "--json"]).ok()).expect("show prints JSON")
}

fn fact<'a>(shown: &'a Value, name: &str) -> &'a str {
    shown["backend"][name].as_str().unwrap_or_default()
}

fn set_len(path: &Path, len: u64) {
    fs::File::options().write(true).open(path).and_then(|file| file.set_len(len)).expect("the file is ours");
}

fn direct_io_is_switched_under_verified_load(engine: Engine) {
    if missing(&["fio"]) {
        return;
    }
    let sandbox = Sandbox::new(engine);
    let image = sandbox.image("disk.img", 64 * MIB);
    let server = sandbox.serve(&format!("file:{},direct=off", image.display()), &["--queues", "2"]);
    let first = sandbox.run(&["set", "disk", "direct=on"]);
    if !first.status.success() {
        return skip(first.stderr.trim());
    }
    let job = [
        "fio",
        "--name=switch",
        "--ioengine=nbd",
        "--rw=randrw",
        "--bsrange=512-64k",
        "--bs_unaligned=0",
        "--size=64m",
        "--io_size=96m",
        "--iodepth=16",
        "--numjobs=1",
        "--verify=crc32c",
        "--verify_fatal=1",
        "--fsync=64",
        "--randrepeat=0",
        "--do_verify=1",
        "--verify_backlog=256",
        "--output-format=terse",
    ];
    let uri = format!("--uri={}", server.uri());
    let done = AtomicBool::new(false);
    let switches = std::thread::scope(|scope| {
        let switcher = scope.spawn(|| {
            let mut count = 0;
            while !done.load(Relaxed) {
                let word = ["direct=off", "direct=on"][count % 2];
                sandbox.run(&["set", "disk", word]).ok();
                count += 1;
            }
            count
        });
        let mut fio = command(&job);
        let outcome = run(fio.arg(&uri).current_dir(sandbox.path("")));
        done.store(true, Relaxed);
        outcome.ok();
        switcher.join().expect("every switch went well")
    });
    assert!(switches > 1, "only {switches} switches while fio ran");
}

fn a_device_grows_with_its_file_and_on_request(engine: Engine) {
    let sandbox = Sandbox::new(engine);
    let image = sandbox.image("disk.img", MIB);
    let server = sandbox.serve(&format!("file:{}", image.display()), &[]);
    let mut early = Peer::connect(&server.socket(), "disk");
    set_len(&image, 2 * MIB);
    assert_eq!(Peer::connect(&server.socket(), "disk").session.size, MIB, "LOOP-4: not by itself");
    sandbox.run(&["resize", "disk"]).ok();
    assert_eq!(Peer::connect(&server.socket(), "disk").session.size, 2 * MIB);
    sandbox.run(&["resize", "disk", "3M"]).ok();
    assert_eq!(fs::metadata(&image).unwrap().len(), 3 * MIB);
    assert_eq!(show(&sandbox)["size"], 3 * MIB);
    // An earlier connection may use the new size as well, if its client learns of it in another way.
    early.session.size = 3 * MIB;
    let data = noise(1, 4096);
    early.write(3 * MIB - 4096, &data, CommandFlags::empty()).expect("it exists");
    let why = sandbox.run(&["resize", "disk", "1M"]).failed_with(1);
    assert!(why.contains("from 3M to 1M") && why.contains("add --shrink"), "{why}");
    sandbox.run(&["resize", "disk", "1M", "--shrink"]).ok();
    assert_eq!(fs::metadata(&image).unwrap().len(), MIB);
    assert!(early.write(2 * MIB, &data, CommandFlags::empty()).is_err(), "past the new end");
    assert_eq!(fs::metadata(&image).unwrap().len(), MIB, "and the file has not grown by it");
    early.write(MIB - 4096, &data, CommandFlags::empty()).expect("what is left is served");
    set_len(&image, MIB / 2);
    let why = sandbox.run(&["resize", "disk"]).failed_with(1);
    assert!(why.contains("add --shrink"), "{why}");
}

fn requests_to_a_suspended_device_complete_after_resume(engine: Engine) {
    let sandbox = Sandbox::new(engine);
    let image = sandbox.image("disk.img", MIB);
    let server = sandbox.serve(&format!("file:{}", image.display()), &["--queues", "1"]);
    let mut peer = Peer::connect(&server.socket(), "disk");
    let data = noise(2, 8192);
    peer.write(0, &data, CommandFlags::empty()).expect("it is served");
    for flags in [&["suspend", "disk"][..], &["suspend", "disk", "--noflush"]] {
        sandbox.run(flags).ok();
        sandbox.run(flags).ok();
        assert!(fact(&show(&sandbox), "suspended").starts_with("yes"));
        let listed = sandbox.run(&["list"]).ok();
        assert!(listed.contains(" (suspended) "), "{listed}");
        let socket = server.socket();
        let reader = std::thread::spawn(move || {
            let mut late = Peer::connect(&socket, "disk");
            (late.read(0, 8192), Instant::now())
        });
        std::thread::sleep(Duration::from_millis(200));
        assert!(!reader.is_finished(), "it waits");
        let resumed = Instant::now();
        sandbox.run(&["resume", "disk"]).ok();
        let (read, at) = reader.join().expect("it is answered");
        assert_eq!(read.expect("it is read"), data);
        assert!(at > resumed);
        assert_eq!(fact(&show(&sandbox), "suspended"), "");
    }
    // A suspended device can be changed, and removed.
    sandbox.run(&["suspend", "disk"]).ok();
    set_len(&image, 2 * MIB);
    sandbox.run(&["resize", "disk"]).ok();
    assert!(fact(&show(&sandbox), "suspended").starts_with("yes"));
    let mut server = server;
    sandbox.run(&["del", "disk"]).ok();
    assert!(server.wait().success());
}

#[test]
fn loop_change_fd_replaces_a_read_only_file_by_one_of_its_size() {
    let sandbox = Sandbox::default();
    let (one, two) = (sandbox.noise("one.img", 1 << 20), sandbox.path("two.img"));
    let other = noise(77, 1 << 20);
    fs::write(&two, &other).unwrap();
    let server = sandbox.serve(&format!("file:{},ro", one.display()), &[]);
    let mut peer = Peer::connect(&server.socket(), "disk");
    assert_ne!(peer.read(4096, 4096).unwrap(), other[4096..8192]);
    sandbox.run(&["set", "disk", "file=two.img"]).ok();
    assert_eq!(peer.read(4096, 4096).unwrap(), other[4096..8192], "the client that was there sees it too");
    let shown = show(&sandbox);
    assert_eq!(fact(&shown, "backing_file"), two.canonicalize().unwrap().to_string_lossy());
    assert!(shown["stack"].as_str().unwrap().contains("two.img"), "{shown}");
    let short = sandbox.noise("short.img", 1 << 19);
    for (file, words) in [(short.as_path(), "give a file of equal size"), (Path::new("absent"), "opening ")] {
        let why = sandbox.run(&["set", "disk", &format!("file={}", file.display())]).failed_with(1);
        assert!(why.contains(words), "{why}");
        assert_eq!(peer.read(4096, 4096).unwrap(), other[4096..8192], "as it was");
    }
    // The first file is closed.
    let second = sandbox.run(&["add", &format!("file:{}", one.display()), "--name", "again"]);
    second.ok();
    sandbox.run(&["del", "again"]).ok();
}

#[test]
fn loop_change_fd_reaches_users_of_the_loop_device() {
    if missing_loop() {
        return;
    }
    let sandbox = Sandbox::default();
    let (one, two) = (sandbox.noise("one.img", 1 << 20), sandbox.path("two.img"));
    let other = noise(78, 1 << 20);
    fs::write(&two, &other).unwrap();
    let disk = Loop::serve(&sandbox, "disk", &format!("file:{},ro", one.display()), &[]);
    // While it is open the kernel keeps its cache.
    let _held = fs::File::open(&disk.device).unwrap();
    assert!(fs::read(&disk.device).unwrap() == fs::read(&one).unwrap());
    sandbox.run(&["set", "disk", "file=two.img"]).ok();
    assert!(fs::read(&disk.device).unwrap() == other, "what was cached of the first file is still read");
    // The change does not wait for the exports: they drop their caches at the resume.
    sandbox.run(&["suspend", "disk"]).ok();
    sandbox.run(&["set", "disk", "file=one.img"]).ok();
    sandbox.run(&["resume", "disk"]).ok();
    assert!(fs::read(&disk.device).unwrap() == fs::read(&one).unwrap(), "and so after a suspension");
}

#[test]
fn loop_change_fd_reaches_users_of_a_partition() {
    if missing_loop() || missing(&["addpart"]) {
        return;
    }
    let sandbox = Sandbox::default();
    let (one, two) = (sandbox.noise("one.img", 1 << 20), sandbox.path("two.img"));
    let other = noise(79, 1 << 20);
    fs::write(&two, &other).unwrap();
    let disk = Loop::serve(&sandbox, "disk", &format!("file:{},ro,partscan", one.display()), &[]);
    run(&mut command(&["addpart", disk.path(), "1", "1024", "512"])).ok();
    let part = format!("{}p1", disk.path());
    let Some(held) = until(PATIENCE, || fs::File::open(&part).ok()) else {
        return skip(format_args!("nobody makes {part} here"));
    };
    let middle = 1 << 19..(1 << 19) + (1 << 18);
    assert!(fs::read(&part).unwrap() == fs::read(&one).unwrap()[middle.clone()]);
    sandbox.run(&["set", "disk", "file=two.img"]).ok();
    assert!(fs::read(&part).unwrap() == other[middle], "a partition has a cache of its own");
    drop(held);
}

/// Prints whether a mapped file is the first one, and after a line whether it is the second one.
const MAPPED: &str = "
import mmap, sys
file = open(sys.argv[1], 'rb')
mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
for name in sys.argv[2:]:
    print(mapped[:] == open(name, 'rb').read(), flush=True)
    sys.stdin.readline()
";

#[test]
fn loop_change_fd_reaches_processes_that_map_the_file() {
    if missing_loop() || missing(&["python3"]) {
        return;
    }
    let sandbox = Sandbox::default();
    let (one, two) = (sandbox.noise("one.img", 1 << 20), sandbox.path("two.img"));
    fs::write(&two, noise(80, 1 << 20)).unwrap();
    let shown = sandbox.path("disk.raw");
    let stack = format!("file:{},ro", one.display());
    let words = ["serve", &stack, "--name", "disk", "--fuse", shown.to_str().unwrap()];
    let mut server = sandbox.start(&mut sandbox.blockyard(&words), 1);
    let mut reader = Command::new("python3")
        .args(["-c", MAPPED])
        .args([&shown, &one, &two])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("it starts");
    let mut lines = BufReader::new(reader.stdout.take().expect("a pipe")).lines().map_while(Result::ok);
    let first = lines.next();
    sandbox.run(&["set", "disk", "file=two.img"]).ok();
    // The program waits for two lines; then its input ends.
    reader.stdin.take().expect("a pipe").write_all(b"\n").expect("it reads");
    let second = lines.next();
    assert!(reader.wait().expect("it ends").success());
    assert_eq!([first.as_deref(), second.as_deref()], [Some("True"); 2]);
    server.terminate();
}

#[test]
fn loop_change_fd_does_not_wait_for_suspended_devices_above() {
    if missing_loop() || missing(&["dd"]) {
        return;
    }
    let sandbox = Sandbox::default();
    let (_, two) = (sandbox.noise("one.img", 1 << 20), sandbox.path("two.img"));
    let mut model = noise(81, 1 << 20);
    fs::write(&two, &model).unwrap();
    sandbox.image("cow.img", 4 * MIB);
    let topology = "[device.base]\nstack = \"file:one.img,ro\"\n\
                    [device.top]\ntable = \"0 2048 snapshot base cow.img P 16\"\n\
                    [[export]]\ndevice = \"top\"\nloop = \"\"\n\
                    [[export]]\ndevice = \"base\"\nnbd = \"unix:y.sock\"\n";
    let mut server = sandbox.up(topology, 2);
    let node = server.uri();
    let held = fs::File::options().read(true).write(true).open(node).expect("it exists");
    assert_eq!(fs::read(node).unwrap().len(), 1 << 20);
    sandbox.run(&["suspend", "top"]).ok();
    // Whole pages that are cached already: they are written back later.
    let data = noise(82, 8192);
    held.write_all_at(&data, 64 << 10).expect("the kernel keeps it");
    model[64 << 10..][..8192].copy_from_slice(&data);
    sandbox.run(&["set", "base", "file=two.img"]).ok();
    sandbox.run(&["resume", "top"]).ok();
    assert!(fs::read(node).unwrap() == model, "the other file, and what was written over it");
    drop(held);
    server.terminate();
}

#[test]
fn a_refused_change_reports_the_reason_and_changes_nothing() {
    let sandbox = Sandbox::default();
    let image = sandbox.image("disk.img", MIB);
    let server = sandbox.serve(&format!("file:{},offset=512", image.display()), &[]);
    for (words, code, expected) in [
        (&["set", "disk", "direct=maybe"][..], 2, "direct cannot be \"maybe\" (write on, off or auto)"),
        (&["set", "disk", "depth=3"], 2, "unknown setting \"depth"),
        (&["set", "disk", "file=other.img"], 1, "only a device with ro can change its file"),
        (&["resize", "disk", "1100000"], 1, "give a multiple"),
        (&["resize", "disk", "x"], 2, "is not a size"),
        (&["resize", "absent"], 1, "there is no such device"),
        (&["suspend", "absent"], 1, "there is no such device"),
        (&["resume", "absent"], 1, "there is no such device"),
    ] {
        let why = sandbox.run(words).failed_with(code);
        assert!(why.starts_with("blockyard: ") && why.contains(expected), "{words:?}: {why}");
    }
    assert_eq!(show(&sandbox)["size"], MIB - 512);
    drop(server);
    let server = sandbox.serve("ram:1M", &[]);
    for (words, expected) in [
        (
            &["set", "disk", "direct=on"][..],
            "it is ram:1M, and only a device on raw files can be changed this way",
        ),
        (
            &["set", "disk", "file=other.img"],
            "it is ram:1M, and only a device on raw files can be changed this way",
        ),
        (&["resize", "disk"], "it is ram:1M, whose size is fixed"),
        (&["resize", "disk", "2M"], "it is ram:1M, whose size is fixed"),
    ] {
        let why = sandbox.run(words).failed_with(1);
        assert!(why.contains(expected), "{words:?}: {why}");
    }
    drop(server);
}

#[test]
fn a_device_with_layers_changes_like_one_without() {
    let sandbox = Sandbox::default();
    let image = sandbox.image("disk.img", MIB);
    let layers =
        ["--layer", "split,max_sectors=64", "--layer", "split,max_sectors=16", "--limits", "max_segments=4"];
    let server = sandbox.serve(&format!("file:{},direct=off,autosize", image.display()), &layers);
    set_len(&image, 2 * MIB);
    until(PATIENCE, || (show(&sandbox)["size"] == 2 * MIB).then_some(())).expect("autosize follows");
    sandbox.run(&["resize", "disk", "3M"]).ok();
    let mut peer = Peer::connect(&server.socket(), "disk");
    let data = noise(5, 65536);
    peer.write(3 * MIB - 65536, &data, CommandFlags::empty()).expect("it exists");
    if sandbox.run(&["set", "disk", "direct=on"]).status.success() {
        assert_eq!(fact(&show(&sandbox), "dio"), "1");
    } else {
        skip("direct I/O cannot be had here");
    }
    assert_eq!(peer.read(3 * MIB - 65536, 65536).expect("it is read"), data);
    let why = sandbox.run(&["resize", "disk", "2M"]).failed_with(1);
    assert!(why.contains("from 3M to 2M") && why.contains("add --shrink"), "{why}");
}

#[test]
fn a_partition_that_grew_in_its_table_grows_and_one_that_moved_does_not() {
    if missing(&["sfdisk"]) {
        return;
    }
    let sandbox = Sandbox::default();
    let image = sandbox.image("disk.img", 8 * MIB);
    let partition = |script: &str| {
        let script = fs::File::open(sandbox.text("script", script)).unwrap();
        let mut sfdisk = command(&["sfdisk", "--quiet", "--force", "--no-reread", "--wipe=never"]);
        assert!(sfdisk.arg(&image).stdin(script).status().expect("sfdisk runs").success());
    };
    partition("label: gpt\nstart=2048, size=4096, name=root\n");
    let stack = format!("file:{},part=root,share", image.display());
    let server = sandbox.serve(&stack, &["--name", "disk", "--layer", "split,max_sectors=8"]);
    let mut peer = Peer::connect(&server.socket(), "disk");
    let data = noise(6, 4096);
    peer.write(2 * MIB - 4096, &data, CommandFlags::empty()).expect("its last block");
    let why = sandbox.run(&["resize", "disk", "4M"]).failed_with(1);
    assert!(why.contains("its size is that of its partition"), "{why}");
    // The file is longer, the partition is not.
    set_len(&image, 16 * MIB);
    sandbox.run(&["resize", "disk"]).ok();
    assert_eq!(show(&sandbox)["size"], 2 * MIB);
    partition("label: gpt\nstart=2048, size=20480, name=root\n");
    sandbox.run(&["resize", "disk"]).ok();
    assert_eq!(show(&sandbox)["size"], 10 * MIB);
    let mut peer = Peer::connect(&server.socket(), "disk");
    assert_eq!(peer.read(2 * MIB - 4096, 4096).expect("it is read"), data);
    peer.write(10 * MIB - 4096, &data, CommandFlags::FUA).expect("what is new");
    assert_eq!(fs::read(&image).unwrap()[(11 << 20) - 4096..11 << 20], data, "in its place in the file");
    partition("label: gpt\nstart=2048, size=2048, name=root\n");
    let why = sandbox.run(&["resize", "disk"]).failed_with(1);
    assert!(why.contains("from 10M to 1M") && why.contains("add --shrink"), "{why}");
    sandbox.run(&["resize", "disk", "--shrink"]).ok();
    assert_eq!(show(&sandbox)["size"], MIB);
    for (script, expected) in [
        (
            "label: gpt\nstart=4096, size=8192, name=root\n",
            "the partition started at 1M when it was opened, and starts at 2M now",
        ),
        ("label: gpt\nstart=2048, size=8192, name=other\n", "there are 1 \"other\" (4M)"),
    ] {
        partition(script);
        let why = sandbox.run(&["resize", "disk"]).failed_with(1);
        assert!(why.contains(expected), "{why}");
        assert_eq!(show(&sandbox)["size"], MIB, "as it was");
    }
    peer.read(0, 4096).expect("and served");
}

#[test]
fn an_overlay_is_switched_with_its_origin_and_keeps_its_size() {
    let sandbox = Sandbox::default();
    let origin = sandbox.noise("origin.img", 1 << 20);
    let mut model = fs::read(&origin).unwrap();
    let layer = format!("cow,file={},create,direct=off", sandbox.path("overlay.img").display());
    let server = sandbox.serve(&format!("file:{},direct=off", origin.display()), &["--layer", &layer]);
    let mut peer = Peer::connect(&server.socket(), "disk");
    for (number, word) in ["direct=on", "direct=off", "direct=auto"].into_iter().enumerate() {
        let data = noise(number as u64, 1536);
        let at = 4096 * 5 * number + 512;
        peer.write(at as u64, &data, CommandFlags::empty()).expect("it is written");
        model[at..at + 1536].copy_from_slice(&data);
        let outcome = sandbox.run(&["set", "disk", word]);
        if !outcome.status.success() {
            return skip(outcome.stderr.trim());
        }
        let shown = show(&sandbox);
        let words = format!("{} {}", shown["stack"], shown["layers"]);
        let times = if word == "direct=auto" { 0 } else { 2 };
        assert_eq!(words.matches(word).count(), times, "both files: {words}");
        assert!(peer.read(0, MIB).expect("it is read") == model, "after {word}");
    }
    for (words, expected) in [
        (&["resize", "disk"][..], "the size of an overlay is fixed"),
        (&["resize", "disk", "2M"], "the size of an overlay is fixed"),
        (&["set", "disk", "file=origin.img"], "it has 2 files"),
    ] {
        let why = sandbox.run(words).failed_with(1);
        assert!(why.contains(expected), "{words:?}: {why}");
    }
    let stack = format!("file:{},autosize", origin.display());
    let words = ["serve", &stack, "--layer", &layer, "--nbd", "unix:other.sock"];
    let why = sandbox.run(&words).failed_with(2);
    assert!(why.contains("leave autosize out"), "{why}");
}

#[test]
fn autosize_follows_the_files_growth() {
    let sandbox = Sandbox::default();
    let image = sandbox.image("disk.img", MIB);
    let server = sandbox.serve(&format!("file:{},autosize", image.display()), &[]);
    set_len(&image, 5 * MIB);
    let grown = until(PATIENCE, || (show(&sandbox)["size"] == 5 * MIB).then_some(()));
    assert!(grown.is_some(), "{}", server.log());
    set_len(&image, MIB);
    std::thread::sleep(Duration::from_millis(600));
    assert_eq!(show(&sandbox)["size"], 5 * MIB, "it does not shrink by itself");
}

#[test]
fn loop_14_autoclear_removes_the_device_with_its_last_client() {
    let sandbox = Sandbox::default();
    let image = sandbox.image("disk.img", MIB);
    let mut server = sandbox.serve(&format!("file:{},autoclear", image.display()), &[]);
    std::thread::sleep(Duration::from_millis(600));
    assert!(server.is_running(), "it waits for its first client");
    let (one, two) = (Peer::connect(&server.socket(), "disk"), Peer::connect(&server.socket(), "disk"));
    std::thread::sleep(Duration::from_millis(600));
    one.disconnect();
    std::thread::sleep(Duration::from_millis(600));
    assert!(server.is_running(), "one is left");
    two.disconnect();
    assert!(server.wait().success());
}

#[test]
fn a_file_system_survives_changes_under_load_and_grows_with_its_device() {
    if missing(&["mkfs.ext4", "resize2fs", "fsck.ext4", "mount"]) || missing_root() {
        return;
    }
    if let Some(path) = ["/dev/loop-control", "/dev/fuse"].into_iter().find(|path| !Path::new(path).exists())
    {
        return skip(format_args!("there is no {path} here"));
    }
    let sandbox = Sandbox::default();
    let image = sandbox.image("disk.img", 64 * MIB);
    let node = sandbox.run(&["losetup", "-f", "--show", image.to_str().unwrap()]).ok();
    let (node, mount) = (node.trim(), sandbox.path("mnt"));
    let target = mount.to_str().unwrap();
    fs::create_dir(&mount).unwrap();
    let tool = |arguments: &[&str]| run(&mut command(arguments));
    tool(&["mkfs.ext4", "-q", node]).ok();
    tool(&["mount", node, target]).ok();
    let (file, data) = (mount.join("file"), noise(9, 24 << 20));
    let worked = std::panic::catch_unwind(|| {
        std::thread::scope(|scope| {
            let writer = scope.spawn(|| {
                use std::io::Write;
                let mut out = fs::File::create(&file)?;
                data.chunks(1 << 20).try_for_each(|chunk| out.write_all(chunk).and_then(|()| out.sync_data()))
            });
            while !writer.is_finished() {
                for word in ["direct=on", "direct=off"] {
                    let outcome = sandbox.run(&["set", "disk", word]);
                    assert!(outcome.status.success() || outcome.stderr.contains("not possible"), "{outcome}");
                }
            }
            writer.join().expect("it ends").expect("all is written");
        });
        let why = sandbox.run(&["losetup", "-d", node]).failed_with(1);
        assert!(why.contains("is in use by the file system on"), "{why}");
        set_len(&image, 128 * MIB);
        sandbox.run(&["resize", "disk"]).ok();
        // Growing it while it is mounted needs CAP_SYS_RESOURCE, which root in a container may lack.
        tool(&["umount", target]).ok();
        blockyard_tests::disk::await_unmounted(node);
        tool(&["fsck.ext4", "-fn", node]).ok();
        // resize2fs needs a check of the file system that is newer than the mount.
        tool(&["fsck.ext4", "-fy", node]).ok();
        tool(&["resize2fs", node]).ok();
        tool(&["fsck.ext4", "-fn", node]).ok();
        tool(&["mount", node, target]).ok();
        let grown = rustix::fs::statvfs(&mount).expect("it is mounted");
        assert!(grown.f_blocks * grown.f_frsize > 100 * MIB, "{} blocks", grown.f_blocks);
        assert!(
            fs::read(&file).unwrap() == data,
            "the file differs from what was written during the changes"
        );
    });
    let unmounted = tool(&["umount", target]);
    let detached = sandbox.run(&["losetup", "-d", node]);
    worked.unwrap();
    unmounted.ok();
    detached.ok();
}

#[test]
fn a_removal_refused_by_one_of_two_exports_changes_nothing() {
    if missing_root() {
        return;
    }
    if let Err(why) = fs::File::options().read(true).write(true).open("/dev/fuse") {
        return skip(format_args!("no FUSE here: /dev/fuse: {why}"));
    }
    let sandbox = Sandbox::default();
    let [one, two] = ["one", "two"].map(|name| sandbox.path(name));
    let [first, second] = [&one, &two].map(|path| path.to_string_lossy().into_owned());
    let words = ["serve", "ram:4M", "--name", "disk", "--fuse", &first, "--fuse", &second];
    let mut server = sandbox.start(&mut sandbox.blockyard(&words), 2);
    let file = fs::File::options().write(true).open(&one).expect("it is served");
    file.write_all_at(&[7; 4096], 0).expect("it is served");
    drop(file);
    sandbox.run(&["suspend", "disk"]).ok();
    let user = fs::File::open(&two).expect("an open needs no block");
    let refused = sandbox.run(&["del", "disk"]).failed_with(1);
    assert!(refused.contains(&second), "{refused}");
    let shown = show(&sandbox);
    assert_eq!(shown["exports"].as_array().map(Vec::len), Some(2), "{shown}");
    // A new request is still held back, also through the export that did not refuse.
    let path = one.clone();
    let read = std::thread::spawn(move || {
        let mut bytes = [0; 4096];
        fs::File::options()
            .read(true)
            .open(path)
            .and_then(|file| file.read_exact_at(&mut bytes, 8192))
            .map(|()| bytes)
    });
    std::thread::sleep(Duration::from_millis(300));
    assert!(!read.is_finished(), "the device continues, although del refused");
    sandbox.run(&["resume", "disk"]).ok();
    assert_eq!(read.join().unwrap().expect("its file is still mounted"), [0; 4096]);
    assert_eq!(fs::read(&one).expect("its file is still mounted")[..4096], [7; 4096]);
    drop(user);
    sandbox.run(&["del", "disk"]).ok();
    assert!(server.wait().success(), "{}", server.log());
}
