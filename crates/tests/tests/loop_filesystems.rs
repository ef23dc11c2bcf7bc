//! Real file systems on loop devices of ours: copying trees, freeing space, killed servers, full hosts and
//! images that are truncated while they are mounted.

use blockyard_tests::disk::{Loop, Mount, check, missing_file_system, missing_loop, shell};
use blockyard_tests::server::Sandbox;
use blockyard_tests::tools::{PATIENCE, command, find, missing, run, skip, until, wait_within};
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;
/// The minimum of mkfs.xfs.
const SIZE: u64 = 304 * MIB;

/// Creates a folder of files to copy: a part of this repository's sources, even while they are edited.
fn tree(sandbox: &Sandbox, part: &str) -> PathBuf {
    let from = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("crates/").join(part);
    let copy = sandbox.path("tree");
    // A file that is removed during the copy fails it.
    let copied = || {
        let script = "rm -rf \"$C\"; cp -a \"$T\" \"$C\"";
        shell(script, &[("T", &from), ("C", &copy)]).status.success().then_some(())
    };
    until(PATIENCE, copied).expect("they are copied");
    copy
}

/// Copies a real tree in and out, and checks it after a new mount; then the file system must have no errors.
#[track_caller]
fn check_with_tree(disk: &Loop<'_>, kind: &str, tree: &Path) {
    disk.format(kind);
    let mount = disk.mount(kind);
    let copy = |mount: &Mount, script: &str| shell(script, &[("M", mount.path()), ("T", tree)]).ok();
    copy(&mount, "cp -a \"$T\" \"$M/tree\"; sync -f \"$M\"; diff -r \"$T\" \"$M/tree\"");
    // Creates and removes many small files, and one large one with holes.
    copy(
        &mount,
        "mkdir \"$M/many\"; for i in $(seq 300); do echo $i > \"$M/many/$i\"; done; rm \"$M\"/many/*[05]; \
         dd if=/dev/urandom of=\"$M/large\" bs=1M count=24 seek=8 oflag=direct status=none; \
         sha256sum \"$M/large\" > \"$M/sum\"; mv \"$M/tree\" \"$M/moved\"",
    );
    mount.unmount();
    disk.check(kind);
    let mount = disk.mount(kind);
    copy(
        &mount,
        "diff -r \"$T\" \"$M/moved\"; test $(ls \"$M/many\" | wc -l) = 240; sha256sum --quiet -c \"$M/sum\"",
    );
    mount.unmount();
}

fn on_every_backend(kind: &str) {
    if missing_loop() || missing_file_system(kind) {
        return;
    }
    let sandbox = Sandbox::default();
    sandbox.image("image", SIZE);
    let shm = tempfile::tempdir_in("/dev/shm").expect("a folder in memory");
    let in_memory = shm.path().join("image");
    File::create(&in_memory).and_then(|file| file.set_len(SIZE)).expect("an image in memory");
    let (ram, null) = (format!("ram:{SIZE}"), format!("null:{SIZE},memory_backed,discard"));
    let (memory, memory_4k) =
        (format!("file:{}", in_memory.display()), format!("file:{},block=4096", in_memory.display()));
    let stacks: [(&str, &[&str]); 6] = [
        (&memory, &[]),
        ("file:image,direct=off", &["--ring", "epoll"]),
        ("file:image,direct=on", &[]),
        (&ram, &["--layer", "split,max_sectors=64"]),
        (&null, &["--queues", "1"]),
        (&memory_4k, &["--limits", "max_sectors=256"]),
    ];
    let tree = tree(&sandbox, "");
    for (stack, more) in stacks {
        let start = Instant::now();
        let mut disk = Loop::serve(&sandbox, "disk", stack, more);
        check_with_tree(&disk, kind, &tree);
        disk.server.terminate();
        println!("{kind} on {stack}: {:?}", start.elapsed());
    }
}

#[test]
fn ext4_on_every_backend() {
    on_every_backend("ext4");
}

#[test]
fn xfs_on_every_backend() {
    on_every_backend("xfs");
}

#[test]
fn btrfs_on_every_backend() {
    on_every_backend("btrfs");
}

#[test]
fn ext4_on_an_overlay_an_image_and_the_export_of_another_server() {
    if missing_loop() || missing_file_system("ext4") {
        return;
    }
    const LEN: u64 = 96 * MIB;
    let sandbox = Sandbox::default();
    let base = sandbox.image("base", LEN);
    let taken = || std::fs::metadata(&base).expect("the base").blocks();
    let before = taken();
    let tree = tree(&sandbox, "tests");
    let overlay = format!("cow,file={},create", sandbox.path("overlay").display());
    let below = sandbox.serve(&format!("ram:{LEN}"), &["--name", "below"]);
    let mut stacks = vec![
        ("file:base,ro".to_owned(), vec!["--layer", &overlay]),
        (format!("nbd:{}", below.uri()), Vec::new()),
    ];
    if !missing(&["qemu-img"]) {
        let words = ["qemu-img", "create", "-q", "-f", "qcow2", "image.qcow2", &LEN.to_string()];
        run(&mut sandbox.tool(&words)).ok();
        stacks.push(("file:image.qcow2,format=qcow2".to_owned(), Vec::new()));
    }
    for (stack, more) in stacks {
        let start = Instant::now();
        let mut disk = Loop::serve(&sandbox, "disk", &stack, &more);
        check_with_tree(&disk, "ext4", &tree);
        disk.server.terminate();
        println!("ext4 on {stack}: {:?}", start.elapsed());
    }
    assert_eq!(taken(), before, "an overlay's origin is only read");
}

#[test]
fn fstrim_frees_space_of_the_image() {
    if missing_loop() || missing(&["fstrim"]) {
        return;
    }
    for kind in ["ext4", "xfs", "btrfs"] {
        if missing_file_system(kind) {
            continue;
        }
        let sandbox = Sandbox::default();
        let image = sandbox.image("image", SIZE);
        let mut disk = Loop::serve(&sandbox, "disk", "file:image", &[]);
        disk.format(kind);
        let mount = disk.mount(kind);
        mount.shell("dd if=/dev/urandom of=\"$M/large\" bs=1M count=64 status=none; sync -f \"$M\"").ok();
        let taken = || std::fs::metadata(&image).expect("the image").blocks() * 512;
        let full = taken();
        mount.shell("rm \"$M/large\"; sync -f \"$M\"").ok();
        // XFS frees a removed file's blocks in the background, some time after the removal.
        let mut given_back = 0;
        until(PATIENCE, || {
            mount.shell("fstrim \"$M\"").ok();
            given_back = full.saturating_sub(taken());
            (given_back >= 60 * MIB).then_some(())
        });
        assert!(given_back >= 60 * MIB, "{kind}: {full} bytes before, {given_back} given back");
        mount.unmount();
        disk.check(kind);
        disk.server.terminate();
    }
}

#[test]
fn two_file_systems_on_the_partitions_of_one_image() {
    if missing_loop() || missing(&["sfdisk"]) || missing_file_system("ext4") || missing_file_system("btrfs") {
        return;
    }
    let sandbox = Sandbox::default();
    let image = sandbox.image("image", 256 * MIB);
    let script = sandbox.text("table", "label: gpt\nsize=64M, name=boot\nsize=160M, name=root\n");
    shell("sfdisk -q \"$I\" < \"$S\"", &[("I", &image), ("S", &script)]).ok();
    let mut boot = Loop::serve(&sandbox, "boot", "file:image,part=boot,share", &[]);
    let mut root = Loop::serve(&sandbox, "root", "file:image,part=2,share", &[]);
    for (disk, kind) in [(&boot, "ext4"), (&root, "btrfs")] {
        disk.format(kind);
    }
    let (on_boot, on_root) = (boot.mount("ext4"), root.mount("btrfs"));
    on_boot.shell("dd if=/dev/urandom of=\"$M/kernel\" bs=1M count=20 status=none").ok();
    on_root.shell("for i in 1 2 3; do dd if=/dev/urandom of=\"$M/$i\" bs=1M count=8 status=none; done").ok();
    on_boot.unmount();
    on_root.unmount();
    boot.check("ext4");
    root.check("btrfs");
    boot.server.terminate();
    root.server.terminate();
    // Neither has written past its end.
    shell("sfdisk --verify \"$I\"", &[("I", &image)]).ok();
}

#[test]
fn a_loop_device_on_a_loop_device() {
    if missing_loop() || missing_file_system("ext4") || missing_file_system("xfs") {
        return;
    }
    let sandbox = Sandbox::default();
    sandbox.image("image", 2 * SIZE);
    let tree = tree(&sandbox, "");
    let mut lower = Loop::serve(&sandbox, "lower", "file:image", &[]);
    // Over the device itself, and over a file on a file system on it.
    let stack = format!("file:{}", lower.path());
    let mut upper = Loop::serve(&sandbox, "upper", &stack, &[]);
    check_with_tree(&upper, "xfs", &tree);
    upper.server.terminate();
    drop(upper);
    lower.format("ext4");
    let mount = lower.mount("ext4");
    let inner = mount.path().join("inner");
    File::create(&inner).and_then(|file| file.set_len(SIZE)).expect("an image on it");
    let mut upper = Loop::serve(&sandbox, "upper", &format!("file:{}", inner.display()), &[]);
    check_with_tree(&upper, "xfs", &tree);
    upper.server.terminate();
    drop(upper);
    mount.unmount();
    lower.check("ext4");
    lower.server.terminate();
}

/// A program that writes file after file, each synced with its folder before its number is printed.
const WRITER: &str = "
import hashlib, os, sys
folder, number = sys.argv[1], 0
while True:
    data = hashlib.sha256(str(number).encode()).digest() * 700
    path = os.path.join(folder, str(number))
    f = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
    os.write(f, data)
    os.fsync(f)
    os.close(f)
    d = os.open(folder, os.O_RDONLY)
    os.fsync(d)
    os.close(d)
    print(number, flush=True)
    number += 1
";

const READER: &str = "
import hashlib, sys
for number in range(int(sys.argv[2])):
    want = hashlib.sha256(str(number).encode()).digest() * 700
    assert open('%s/%d' % (sys.argv[1], number), 'rb').read() == want, number
";

/// Kills the server while files are written and synced: synced files must exist afterwards.
fn killed_amid_writes(kind: &str, stack: &str) {
    if missing_loop() || missing_file_system(kind) || missing(&["python3"]) {
        return;
    }
    let sandbox = Sandbox::default();
    sandbox.image("image", SIZE);
    let mut disk = Loop::serve(&sandbox, "disk", stack, &[]);
    disk.format(kind);
    let mount = disk.mount(kind);
    let mut writer = Command::new("python3")
        .args(["-c", WRITER])
        .arg(mount.path())
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .expect("it starts");
    let mut lines = BufReader::new(writer.stdout.take().expect("a pipe")).lines();
    // Enough writes for the log to have wrapped around.
    let mut synced = lines.by_ref().take(20).map_while(Result::ok).count();
    disk.server.kill();
    // It gets an error rather than waiting for ever.
    let ended = wait_within(&mut writer, PATIENCE);
    assert!(ended.is_some_and(|status| !status.success()), "the writer: {ended:?}");
    synced += lines.map_while(Result::ok).count();
    assert!(synced >= 20, "it ended after {synced} files");
    mount.unmount();
    drop(disk);
    let mut disk = Loop::serve(&sandbox, "disk", stack, &[]);
    // Mounting replays the log, which repairs the crash.
    let mount = disk.mount(kind);
    run(command(&["python3", "-c", READER]).arg(mount.path()).arg(synced.to_string())).ok();
    mount.unmount();
    disk.check(kind);
    disk.server.terminate();
}

#[test]
fn every_synced_file_survives_a_killed_server_on_ext4() {
    killed_amid_writes("ext4", "file:image");
}

#[test]
fn every_synced_file_survives_a_killed_server_on_xfs() {
    killed_amid_writes("xfs", "file:image,direct=off");
}

#[test]
fn every_synced_file_survives_a_killed_server_on_btrfs() {
    killed_amid_writes("btrfs", "file:image");
}

/// All tests of file systems on loop devices, repeatedly: `./x soak loop`.
#[test]
#[ignore = "runs for a given time: ./x soak loop"]
fn soak() {
    let minutes =
        std::env::var("BLOCKYARD_SOAK_MINUTES").ok().and_then(|text| text.parse().ok()).unwrap_or(60);
    let end = Instant::now() + Duration::from_secs(60 * minutes);
    for round in 1.. {
        for kind in ["ext4", "xfs", "btrfs"] {
            for stack in ["file:image", "file:image,direct=on", "file:image,direct=off"] {
                killed_amid_writes(kind, stack);
            }
            on_every_backend(kind);
        }
        a_file_system_survives_stress();
        for kind in ["ext4", "xfs", "btrfs"] {
            fsx_on(kind, "file:image,direct=on", 20000);
        }
        println!("round {round} held");
        if Instant::now() >= end {
            return;
        }
    }
}

#[test]
fn a_full_host_fails_only_the_writer() {
    if missing_loop() || missing_file_system("ext4") {
        return;
    }
    let sandbox = Sandbox::default();
    let host = sandbox.path("host");
    std::fs::create_dir(&host).expect("a folder");
    shell("mount -t tmpfs -o size=48M tmpfs \"$H\"", &[("H", &host)]).ok();
    let guard = Unmounted(host.clone());
    let image = host.join("image");
    File::create(&image).and_then(|file| file.set_len(SIZE)).expect("a sparse image");
    let mut disk = Loop::serve(&sandbox, "disk", &format!("file:{}", image.display()), &[]);
    disk.format("ext4");
    let mount = disk.mount("ext4");
    mount.shell("dd if=/dev/urandom of=\"$M/before\" bs=1M count=8 status=none; sync -f \"$M\"; cp \"$M/before\" \"$M/../sum\"").ok();
    let outcome = mount.shell("dd if=/dev/zero of=\"$M/large\" bs=1M count=128 oflag=direct").failed();
    assert!(outcome.contains("No space left") || outcome.contains("Input/output error"), "{outcome}");
    // Earlier data is unchanged, and with free space the device works again. A file system that could not
    // write its log may be read-only: then nothing can be removed.
    mount.shell("cmp \"$M/before\" \"$M/../sum\"; rm -f \"$M/large\" || true; sync -f \"$M\" || true").ok();
    mount.unmount();
    shell("mount -o remount,size=512M \"$H\"", &[("H", &host)]).ok();
    blockyard_tests::disk::await_unmounted(disk.path());
    let mended = run(&mut command(&["e2fsck", "-f", "-y", disk.path()]));
    assert!(mended.status.code().is_some_and(|code| code < 4), "{mended}");
    let mount = disk.mount("ext4");
    mount.shell("cmp \"$M/before\" \"$M/../sum\"; dd if=/dev/zero of=\"$M/more\" bs=1M count=64 oflag=direct status=none").ok();
    mount.unmount();
    disk.check("ext4");
    disk.server.terminate();
    drop(disk);
    drop(guard);
}

struct Unmounted(PathBuf);

impl Drop for Unmounted {
    fn drop(&mut self) {
        let _ = run(command(&["umount", "-l"]).arg(&self.0));
    }
}

#[test]
fn a_mounted_image_that_is_truncated_loses_only_its_tail() {
    if missing_loop() || missing_file_system("ext4") {
        return;
    }
    let sandbox = Sandbox::default();
    let image = sandbox.image("image", SIZE);
    let mut disk = Loop::serve(&sandbox, "disk", "file:image", &[]);
    disk.format("ext4");
    let mount = disk.mount("ext4");
    mount.shell("echo first > \"$M/first\"; dd if=/dev/urandom of=\"$M/large\" bs=1M count=200 oflag=direct status=none; sync -f \"$M\"").ok();
    File::options().write(true).open(&image).and_then(|file| file.set_len(64 * MIB)).expect("it is cut");
    // Reads of the missing part fail at once; the rest is readable.
    let outcome = mount.shell("dd if=\"$M/large\" of=/dev/null bs=1M iflag=direct").failed();
    assert!(outcome.contains("Input/output error"), "{outcome}");
    mount.shell("cat \"$M/first\"").ok();
    let health = sandbox.run(&["show", "disk"]).ok();
    assert!(health.contains("loop"), "{health}");
    mount.unmount();
    disk.server.signal(rustix::process::Signal::TERM);
    disk.server.wait();
}

/// Runs fsx: reads, writes, maps, truncates and punches one file at random, and compares it with the expected
/// content.
fn fsx_on(kind: &str, stack: &str, operations: u32) {
    let Some(fsx) = find("fsx") else { return skip("there is no fsx here (./x soak loop builds it)") };
    if missing_loop() || missing_file_system(kind) {
        return;
    }
    let sandbox = Sandbox::default();
    sandbox.image("image", SIZE);
    let mut disk = Loop::serve(&sandbox, "disk", stack, &[]);
    disk.format(kind);
    let mount = disk.mount(kind);
    let mut exercise = Command::new(&fsx);
    exercise.args(["-q", "-N", &operations.to_string(), "-S", "7", "-P"]).arg(sandbox.path(""));
    run(exercise.arg(mount.path().join("file"))).ok();
    mount.unmount();
    disk.check(kind);
    disk.server.terminate();
}

#[test]
fn fsx_finds_no_difference() {
    for kind in ["ext4", "xfs", "btrfs"] {
        fsx_on(kind, "file:image", 1500);
    }
}

#[test]
fn a_file_system_survives_stress() {
    if missing_loop() || missing_file_system("ext4") || missing(&["stress-ng"]) {
        return;
    }
    let sandbox = Sandbox::default();
    sandbox.image("image", SIZE);
    let mut disk = Loop::serve(&sandbox, "disk", "file:image", &[]);
    disk.format("ext4");
    let mount = disk.mount("ext4");
    let stress = "cd \"$M\"; stress-ng --quiet --hdd 2 --hdd-bytes 16m --hdd-opts wr-rnd,rd-rnd,direct,fsync \
                  --fallocate 1 --fallocate-bytes 16m --dentry 1 --rename 1 --verify --timeout 3s";
    mount.shell(stress).ok();
    mount.unmount();
    disk.check("ext4");
    disk.server.terminate();
    check(&sandbox.path("image").to_string_lossy(), "ext4");
}
