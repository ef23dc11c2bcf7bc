//! The rules of loop devices, LOOP-1 to LOOP-17, each by name: ours compared with the kernel's own loop
//! driver where that is available. docs/loop.md lists the differences and their reasons.
//!
//! Rules that need faults of a file system are tested beside the `file` backend; the table names these tests.

use blockyard_tests::disk::unmount;
use blockyard_tests::peer::Peer;
use blockyard_tests::server::{Sandbox, missing_root, noise};
use blockyard_tests::tools::{PATIENCE, command, find, missing, run, skip, until};
use proto::nbd::CommandFlags;
use serde_json::Value;
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;

/// A loop device that is removed when dropped: the kernel's own, or ours.
struct Loop<'a> {
    sandbox: &'a Sandbox,
    ours: bool,
    node: String,
}

impl<'a> Loop<'a> {
    fn set_up(sandbox: &'a Sandbox, ours: bool, arguments: &[&str]) -> Result<Loop<'a>, String> {
        let all = [&["--find", "--show"], arguments].concat();
        let made = if ours {
            sandbox.run(&[&["losetup"], &all[..]].concat())
        } else {
            run(&mut command(&[&["losetup"], &all[..]].concat()))
        };
        match made.status.success() {
            true => Ok(Loop { sandbox, ours, node: made.stdout.trim().to_owned() }),
            false => Err(made.stderr),
        }
    }

    #[track_caller]
    fn new(sandbox: &'a Sandbox, ours: bool, arguments: &[&str]) -> Loop<'a> {
        Loop::set_up(sandbox, ours, arguments).unwrap_or_else(|why| panic!("ours: {ours}: {why}"))
    }

    fn losetup(&self, arguments: &[&str]) -> blockyard_tests::tools::Outcome {
        match self.ours {
            true => self.sandbox.run(&[&["losetup"], arguments].concat()),
            false => run(&mut command(&[&["losetup"], arguments].concat())),
        }
    }

    fn attribute(&self, name: &str) -> String {
        let disk = &self.node["/dev/".len()..];
        fs::read_to_string(format!("/sys/block/{disk}/{name}")).unwrap_or_default().trim().to_owned()
    }

    fn size(&self) -> u64 {
        self.attribute("size").parse::<u64>().expect("a number of sectors") * 512
    }

    fn column(&self, name: &str) -> String {
        self.losetup(&["-l", "-n", "-O", name, &self.node]).ok().trim().to_owned()
    }

    /// Copies a block to or from the device by direct I/O.
    fn copies(&self, from: &str, to: &str, at: u64) -> bool {
        let (skip, seek) = if from == self.node { (at, 0) } else { (0, at) };
        let words =
            [format!("if={from}"), format!("of={to}"), format!("skip={skip}"), format!("seek={seek}")];
        let flag = if from == self.node { "iflag=direct" } else { "oflag=direct" };
        let mut dd = command(&["dd", "bs=4096", "count=1", "conv=notrunc", flag]);
        run(dd.args(words)).status.success()
    }

    fn reads(&self, at: u64) -> bool {
        self.copies(&self.node, "/dev/null", at)
    }

    fn writes(&self, at: u64) -> bool {
        self.copies("/dev/zero", &self.node, at)
    }
}

impl Drop for Loop<'_> {
    fn drop(&mut self) {
        let outcome = self.losetup(&["-d", &self.node]);
        if !outcome.status.success() && !std::thread::panicking() {
            eprintln!("{outcome}");
        }
    }
}

/// Returns whether loop devices are impossible here, and reports that.
fn no_loops() -> bool {
    if missing(&["losetup", "dd"]) || missing_root() {
        return true;
    }
    let lacking = ["/dev/loop-control", "/dev/fuse"].into_iter().find(|path| !Path::new(path).exists());
    if let Some(path) = lacking {
        skip(format_args!("there is no {path} here"));
    }
    lacking.is_some()
}

fn show(sandbox: &Sandbox, name: &str) -> Value {
    serde_json::from_str(&sandbox.run(&["show", name, "--json"]).ok()).expect("show prints JSON")
}

fn set_len(path: &Path, len: u64) {
    fs::File::options().write(true).open(path).and_then(|file| file.set_len(len)).expect("the file is ours");
}

#[test]
fn loop_1_the_size_is_the_file_past_the_offset_up_to_the_limit_in_whole_sectors() {
    if no_loops() {
        return;
    }
    let sandbox = Sandbox::default();
    for (len, words) in [
        (MIB + 700, &[][..]),
        (MIB, &["-o", "4096"]),
        (MIB, &["-o", "1"]),
        (MIB, &["--sizelimit", "1000"]),
        (MIB, &["-o", "1000K", "--sizelimit", "1M"]),
    ] {
        let size = |ours: bool| {
            let image = sandbox.image(if ours { "ours.img" } else { "theirs.img" }, len);
            Loop::new(&sandbox, ours, &[words, &[image.to_str().unwrap()]].concat()).size()
        };
        assert_eq!(size(true), size(false), "{len} bytes, {words:?}");
    }
}

#[test]
fn loop_2_a_read_only_device_refuses_writes() {
    if no_loops() {
        return;
    }
    let sandbox = Sandbox::default();
    for ours in [false, true] {
        let image = sandbox.image(if ours { "ours.img" } else { "theirs.img" }, MIB);
        let device = Loop::new(&sandbox, ours, &["-r", image.to_str().unwrap()]);
        assert_eq!((device.attribute("ro"), device.column("RO")), ("1".to_owned(), "1".to_owned()));
        assert!(device.reads(0) && !device.writes(0), "ours: {ours}");
    }
}

#[test]
fn loop_3_and_4_a_file_that_grows_or_shrinks_changes_the_device_on_request() {
    if no_loops() {
        return;
    }
    let sandbox = Sandbox::default();
    for ours in [false, true] {
        let image = sandbox.noise(if ours { "ours.img" } else { "theirs.img" }, MIB as usize);
        let device = Loop::new(&sandbox, ours, &[image.to_str().unwrap()]);
        set_len(&image, 2 * MIB);
        assert_eq!(device.size(), MIB, "ours: {ours}: not by itself");
        device.losetup(&["-c", &device.node]).ok();
        assert_eq!(device.size(), 2 * MIB, "ours: {ours}");
        assert!(device.writes(511));
        // A missing part is an error, never zeroes in place of data.
        set_len(&image, MIB / 2);
        assert!(device.reads(0), "ours: {ours}: what is left is served");
        assert!(!device.reads(300), "ours: {ours}: what is gone is an error");
        assert_eq!(device.size(), 2 * MIB, "ours: {ours}");
        device.losetup(&["-c", &device.node]).ok();
        assert_eq!(device.size(), MIB / 2, "ours: {ours}");
    }
}

#[test]
fn loop_5_and_6_impossible_direct_io_is_refused_where_the_kernel_drops_it_silently() {
    if no_loops() {
        return;
    }
    let sandbox = Sandbox::default();
    let (theirs, ours) = (sandbox.image("theirs.img", MIB), sandbox.image("ours.img", MIB));
    let words = |path: &'static str| ["--direct-io=on", "-o", "1", path];
    let (theirs, ours) = (theirs.to_str().unwrap().to_owned(), ours.to_str().unwrap().to_owned());
    let kernels = Loop::set_up(&sandbox, false, &words(theirs.leak()));
    if let Ok(device) = &kernels {
        assert_eq!(device.column("DIO"), "0", "the kernel says yes and does not do it");
    }
    let why = Loop::set_up(&sandbox, true, &words(ours.leak())).err().expect("refused");
    assert!(why.contains("direct=on is not possible: direct I/O needs an offset"), "{why}");
    assert!(sandbox.run(&["list"]).ok().is_empty(), "nothing is half done");
}

#[test]
fn loop_7_the_default_block_size_is_that_of_direct_io() {
    if no_loops() {
        return;
    }
    let sandbox = Sandbox::default();
    for ours in [false, true] {
        let image = sandbox.image(if ours { "ours.img" } else { "theirs.img" }, MIB);
        let image = image.to_str().unwrap();
        for (words, block) in [(&["-b", "4096"][..], "4096"), (&[], "512")] {
            let device = Loop::new(&sandbox, ours, &[words, &[image]].concat());
            assert_eq!(device.attribute("queue/logical_block_size"), block, "ours: {ours}");
            assert_eq!(device.column("LOG-SEC"), block);
        }
        assert!(Loop::set_up(&sandbox, ours, &["-b", "1000", image]).is_err());
    }
}

#[test]
fn loop_8_direct_io_goes_through_the_ring_and_show_reports_it() {
    let sandbox = Sandbox::default();
    let image = sandbox.noise("disk.img", MIB as usize);
    let mut direct = sandbox.blockyard(&["serve", &format!("file:{},direct=on", image.display())]);
    let socket = sandbox.path("disk.sock");
    direct.args(["--name", "disk", "--nbd", &format!("unix:{}", socket.display())]);
    if let Some(why) = probe_direct(&sandbox, &image) {
        return skip(why);
    }
    let server = sandbox.start(&mut direct, 1);
    let shown = show(&sandbox, "disk");
    assert_eq!(
        (&shown["backend"]["dio"], &shown["backend"]["served"]),
        (&"1".into(), &"all through the ring".into())
    );
    let mut peer = Peer::connect(&server.socket(), "disk");
    let data = noise(3, 65536);
    peer.write(4096, &data, CommandFlags::FUA).expect("it is written");
    assert_eq!(fs::read(&image).unwrap()[4096..4096 + 65536], data);
}

/// Returns the reason why direct I/O is impossible on a file here.
fn probe_direct(sandbox: &Sandbox, image: &Path) -> Option<String> {
    let server = sandbox.serve(&format!("file:{}", image.display()), &[]);
    let tried = sandbox.run(&["set", "disk", "direct=on"]);
    drop(server);
    (!tried.status.success()).then(|| tried.stderr.trim().to_owned())
}

/// Duration of requests on the disk of `loop_16_…`, and their number.
const SLOW: Duration = Duration::from_millis(100);
const AT_ONCE: u64 = 8;

/// Serves a disk of 1 MiB as a file, on which every request takes [`SLOW`], however many there are.
fn slow_file(sandbox: &Sandbox) -> (blockyard_tests::server::Server, std::path::PathBuf) {
    let file = sandbox.path("slow.file");
    let stack = "null:1M,irqmode=timer,completion=100ms";
    let mut serve = sandbox.blockyard(&["serve", stack, "--name", "slow", "--queues", "1", "--fuse"]);
    (sandbox.start(serve.arg(&file), 1), file)
}

#[test]
fn loop_16_requests_run_in_parallel_where_the_kernel_has_one_worker() {
    if no_loops() {
        return;
    }
    // On a busy processor starting so many programs takes longer; sequential requests never take less.
    let side_by_side = until(PATIENCE, || {
        let taken = [false, true].map(time_at_once);
        println!("the kernel's, ours: {taken:?}");
        (taken[1] < SLOW * (AT_ONCE as u32 - 2) && taken[1] < taken[0]).then_some(())
    });
    assert!(side_by_side.is_some(), "one after the other, or the kernel's is faster");
}

/// Returns the time of this number of reads that start at once.
fn time_at_once(ours: bool) -> Duration {
    // Each has a disk of its own, or the second would find the first one's data in the page cache.
    let sandbox = Sandbox::default();
    let (mut slow, file) = slow_file(&sandbox);
    let device = Loop::new(&sandbox, ours, &["-r", file.to_str().unwrap()]);
    let start = Instant::now();
    std::thread::scope(|scope| {
        for block in 0..AT_ONCE {
            let device = &device;
            scope.spawn(move || assert!(device.reads(block * 32), "ours: {ours}"));
        }
    });
    let taken = start.elapsed();
    drop(device);
    slow.terminate();
    taken
}

#[test]
fn loop_10_a_discard_that_the_file_system_refuses_is_withdrawn() {
    if missing_root() || find("mount").is_none() {
        return;
    }
    let sandbox = Sandbox::default();
    let mount = sandbox.path("ramfs");
    fs::create_dir(&mount).unwrap();
    let mounted = run(command(&["mount", "-t", "ramfs", "none"]).arg(&mount));
    if !mounted.status.success() {
        return skip(format_args!("ramfs cannot be mounted: {}", mounted.stderr.trim()));
    }
    let result = std::panic::catch_unwind(|| {
        let image = mount.join("disk.img");
        fs::write(&image, noise(4, MIB as usize)).unwrap();
        let server = sandbox.serve(&format!("file:{}", image.display()), &[]);
        let mut peer = Peer::connect(&server.socket(), "disk");
        assert!(peer.trim(0, 65536).is_err(), "ramfs punches no holes");
        peer.zero(65536, 65536, CommandFlags::empty()).expect("zeroes are written instead");
        assert_eq!(peer.read(65536, 65536).unwrap(), vec![0; 65536]);
        let shown = show(&sandbox, "disk");
        assert_eq!(shown["limits"]["max_discard_sectors"], 0, "{shown}");
        assert_eq!(shown["limits"]["discard_granularity"], 0);
        assert!(shown["backend"]["withdrawn"].as_str().unwrap_or_default().starts_with("discard"), "{shown}");
        let next = Peer::connect(&server.socket(), "disk");
        assert!(
            !next.session.flags.contains(proto::nbd::TransmissionFlags::SEND_TRIM),
            "and not offered again"
        );
    });
    unmount(&mount);
    result.unwrap();
}

#[test]
fn loop_12_and_17_a_detached_device_serves_no_client() {
    if no_loops() {
        return;
    }
    let sandbox = Sandbox::default();
    let image = sandbox.image("disk.img", MIB);
    let device = Loop::new(&sandbox, true, &[image.to_str().unwrap()]);
    let node = device.node.clone();
    assert!(device.reads(0));
    drop(device);
    // Another test may have the number by now; then the node is another one.
    let backing = || fs::read_to_string(format!("/sys/block/{}/loop/backing_file", &node["/dev/".len()..]));
    assert!(!backing().is_ok_and(|path| path.contains(sandbox.run_dir().to_str().unwrap())));
    assert!(sandbox.run(&["list"]).ok().is_empty());
    let why = sandbox.run(&["losetup", "-d", "disk"]).failed_with(1);
    assert_eq!(why, "losetup: disk: failed to use device: No such device\n");
}

#[test]
fn loop_13_partitions_are_scanned_on_request() {
    if no_loops() || missing(&["sfdisk"]) {
        return;
    }
    let sandbox = Sandbox::default();
    let mut found = Vec::new();
    for ours in [false, true] {
        let image = sandbox.image(if ours { "ours.img" } else { "theirs.img" }, 8 * MIB);
        let table = sandbox.text("table", "label: gpt\nsize=2M\nsize=2M\n");
        let script = fs::File::open(table).unwrap();
        let mut sfdisk = command(&["sfdisk", "--quiet", image.to_str().unwrap()]);
        assert!(sfdisk.stdin(script).status().expect("sfdisk runs").success());
        for flag in [&["-P"][..], &[]] {
            let device = Loop::new(&sandbox, ours, &[flag, &[image.to_str().unwrap()]].concat());
            let disk = device.node["/dev/".len()..].to_owned();
            let parts = || {
                let entries = fs::read_dir(format!("/sys/block/{disk}")).into_iter().flatten().flatten();
                let names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
                names.filter(|name| name.starts_with(&format!("{disk}p"))).count()
            };
            let wanted = if flag.is_empty() { 0 } else { 2 };
            // A kernel that reads no tables is not waited for twice.
            let limit = match (ours, found.first()) {
                (true, Some(0)) => Duration::ZERO,
                (true, _) => PATIENCE,
                _ => Duration::from_secs(5),
            };
            until(limit, || (parts() == wanted).then_some(()));
            found.push(parts());
            assert_eq!(device.column("PARTSCAN"), u8::from(!flag.is_empty()).to_string(), "ours: {ours}");
        }
    }
    assert_eq!(found[2..], found[..2], "ours as the kernel's own");
    if found[0] == 0 {
        skip("this kernel reads no partition tables: only the flag was compared");
    }
    let why = sandbox.run(&["serve", "file:disk.img,partscan", "--nbd", "unix:s"]).failed_with(2);
    assert!(why.contains("partscan needs a kernel block device"), "{why}");
}

#[test]
fn loop_14_a_busy_device_is_not_detached() {
    if no_loops() {
        return;
    }
    let sandbox = Sandbox::default();
    let image = sandbox.image("disk.img", MIB);
    let device = Loop::new(&sandbox, true, &[image.to_str().unwrap()]);
    let held = fs::File::open(&device.node).unwrap();
    let why = device.losetup(&["-d", &device.node]).failed_with(1);
    assert!(why.starts_with(&format!("losetup: {}: detach failed: ", device.node)), "{why}");
    assert!(device.reads(0), "it is served on");
    drop(held);
}

#[test]
fn loop_14_autoclear_removes_a_loop_device_after_its_last_user() {
    if no_loops() {
        return;
    }
    let sandbox = Sandbox::default();
    let image = sandbox.image("disk.img", MIB);
    let stack = format!("file:{},autoclear", image.display());
    let ready = sandbox.run(&["add", &stack, "--loop"]).ok();
    let node = ready.split_whitespace().nth(2).expect("NAME loop /dev/loopN").to_owned();
    let held = fs::File::open(&node).unwrap();
    std::thread::sleep(Duration::from_millis(900));
    assert!(!sandbox.run(&["list"]).ok().is_empty(), "it is in use");
    drop(held);
    until(PATIENCE, || sandbox.run(&["list"]).ok().is_empty().then_some(())).expect("it goes by itself");
    // It is no longer listed while it is being removed.
    assert_eq!(sandbox.left_behind(), Vec::<String>::new());
}

#[test]
fn loop_15_loops_stack_but_never_in_a_cycle() {
    if no_loops() {
        return;
    }
    let sandbox = Sandbox::default();
    let image = sandbox.noise("disk.img", MIB as usize);
    let lower = Loop::new(&sandbox, true, &["-r", image.to_str().unwrap()]);
    let upper = Loop::new(&sandbox, true, &["-r", &lower.node]);
    assert!(upper.reads(0));
    assert_eq!(fs::read(&upper.node).unwrap(), noise(MIB, MIB as usize), "through both");
    // Its file cannot be a device above it, whatever is between.
    for file in [&lower.node, &upper.node] {
        let why = sandbox.run(&["set", "disk", &format!("file={file}")]).failed_with(1);
        assert!(why.contains("it would use itself, by ") && why.contains("> disk"), "{why}");
    }
    let why = sandbox.run(&["serve", "file:/dev/loop77", "--loop=77"]).failed_with(2);
    assert!(why.contains("the loop device would use itself"), "{why}");
    drop(upper);
    drop(lower);
}

#[test]
fn loop_15_a_file_that_the_kernels_loop_driver_uses_is_not_written_by_two() {
    if no_loops() {
        return;
    }
    let sandbox = Sandbox::default();
    let image = sandbox.image("disk.img", MIB);
    let path = image.to_str().unwrap();
    let kernels = Loop::new(&sandbox, false, &[path]);
    let why = Loop::set_up(&sandbox, true, &[path]).err().expect("refused");
    assert!(why.contains("is in use: a loop device of the kernel's is on it"), "{why}");
    let overlapping = sandbox.run(&["losetup", "-f", "--show", "-L", "-o", "4096", path]).failed_with(1);
    assert_eq!(overlapping, format!("losetup: {path}: overlapping loop device exists\n"));
    assert_eq!(sandbox.run(&["losetup", "-f", "--show", "-L", path]).ok().trim(), kernels.node);
    drop(kernels);
    drop(Loop::new(&sandbox, true, &[path]));
}

#[test]
fn nooverlap_reuses_an_identical_device() {
    if no_loops() {
        return;
    }
    let sandbox = Sandbox::default();
    let image = sandbox.image("disk.img", MIB);
    let path = image.to_str().unwrap();
    let device = Loop::new(&sandbox, true, &["-o", "4096", path]);
    let again = sandbox.run(&["losetup", "-f", "--show", "-L", "-o", "4096", path]).ok();
    assert_eq!(again.trim(), device.node);
    let why = sandbox.run(&["losetup", "-f", "--show", "-L", "-o", "8192", path]).failed_with(1);
    assert_eq!(why, format!("losetup: {path}: overlapping loop device exists\n"));
}

#[test]
fn the_facts_of_sysfs_are_in_show() {
    let sandbox = Sandbox::default();
    let image = sandbox.image("disk.img", 4 * MIB);
    let stack = format!("file:{},offset=1M,sizelimit=2M,direct=off,autosize", image.display());
    let _server = sandbox.serve(&stack, &[]);
    let shown = show(&sandbox, "disk");
    let path = image.canonicalize().unwrap();
    for (name, value) in [
        ("backing_file", path.to_str().unwrap()),
        ("offset", "1048576"),
        ("sizelimit", "2097152"),
        ("autoclear", "0"),
        ("partscan", "0"),
        ("dio", "0"),
        ("autosize", "yes"),
    ] {
        assert_eq!(shown["backend"][name], value, "{name}");
    }
    fs::remove_file(&image).unwrap();
    let deleted = show(&sandbox, "disk");
    assert_eq!(deleted["backend"]["backing_file"], format!("{} (deleted)", path.display()));
}
