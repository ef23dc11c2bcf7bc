//! Devices as files and as loop devices: their properties, the requests that reach the backend, removal while
//! they are in use, and recovery after their server was killed.

use blockyard_tests::disk::{Loop, missing_file_system, missing_loop, nothing_mounted, shell};
use blockyard_tests::server::{Engine, Sandbox, Server, noise};
use blockyard_tests::tools::{PATIENCE, missing, until};
use serde_json::Value;
use std::fs::File;
use std::io::ErrorKind;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

const MIB: u64 = 1 << 20;

/// Serves a stack as a file.
#[track_caller]
fn as_file(sandbox: &Sandbox, stack: &str, more: &[&str]) -> (Server, PathBuf) {
    let path = sandbox.path("disk.raw");
    let path_text = path.to_string_lossy().into_owned();
    let mut words = vec!["serve", stack, "--name", "disk", "--fuse", &path_text];
    words.extend(more);
    let server = sandbox.start(&mut sandbox.blockyard(&words), 1);
    assert_eq!(server.ready(), [format!("disk fuse {path_text}")]);
    (server, path)
}

fn open(path: &Path) -> File {
    File::options().read(true).write(true).open(path).expect("the device's file opens")
}

/// Returns how often the device executed an operation.
fn counted(sandbox: &Sandbox, op: &str) -> u64 {
    let socket = sandbox.run_dir().join("disk.control");
    let text = shell("curl -s --unix-socket \"$S\" http://localhost/devices/disk/stats", &[("S", &socket)]);
    let stats: Value = serde_json::from_str(&text.ok()).expect("JSON");
    stats["operations"][op]["ios"].as_u64().unwrap_or_else(|| panic!("no {op} in {stats}"))
}

/// Returns the clients that `list` counts.
fn clients(sandbox: &Sandbox) -> u64 {
    let devices: Value = serde_json::from_str(&sandbox.run(&["list", "--json"]).ok()).expect("JSON");
    let exports = devices[0]["exports"].as_array().expect("the exports of the device");
    exports.iter().map(|export| export["connections"].as_u64().expect("a number")).sum()
}

/// Returns our remaining mounts and loop devices in the sandbox, after pending removals.
fn left_behind(sandbox: &Sandbox) -> Vec<String> {
    let dir = sandbox.path("").to_string_lossy().into_owned();
    let look = || {
        let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
        let mut left: Vec<String> =
            mounts.lines().filter(|line| line.contains(&dir)).map(str::to_owned).collect();
        for entry in std::fs::read_dir("/sys/block").into_iter().flatten().flatten() {
            let file = std::fs::read_to_string(entry.path().join("loop/backing_file")).unwrap_or_default();
            if file.starts_with(&dir) {
                left.push(file);
            }
        }
        left
    };
    until(PATIENCE, || look().is_empty().then_some(()));
    look()
}

#[test]
fn fuse_file_reads_and_writes_the_device_io_uring() {
    fuse_file_reads_and_writes_the_device(Engine::IoUring);
}

#[test]
fn fuse_file_reads_and_writes_the_device_epoll() {
    fuse_file_reads_and_writes_the_device(Engine::Epoll);
}

fn fuse_file_reads_and_writes_the_device(engine: Engine) {
    if missing_loop() {
        return;
    }
    let sandbox = Sandbox::new(engine);
    let image = sandbox.noise("image", 8 << 20);
    let (mut server, path) =
        as_file(&sandbox, &format!("file:{}", image.display()), &["--ring", engine.name()]);
    let before = std::fs::read(&image).expect("the image");
    assert_eq!(std::fs::read(&path).expect("all of it at once"), before);
    let file = open(&path);
    // Any offset and any length, as in a file.
    for (offset, len) in [(0, 1), (1, 511), (4095, 3), (MIB - 7, 2 * MIB as usize + 9), (8 * MIB - 5, 5)] {
        let data = blockyard_tests::server::noise(offset + 1, len);
        file.write_all_at(&data, offset).expect("a write");
        let mut back = vec![0; len];
        file.read_exact_at(&mut back, offset).expect("a read");
        assert!(back == data, "{len} bytes at {offset}");
        let mut stored = vec![0; len];
        File::open(&image).expect("the image").read_exact_at(&mut stored, offset).expect("a read");
        assert!(stored == data, "{len} bytes at {offset} in the image");
    }
    // Access past the end is as with a block device.
    assert_eq!(file.read_at(&mut [0; 16], 8 * MIB).expect("the end"), 0);
    assert_eq!(file.write_at(&[1; 16], 8 * MIB - 8).expect("what fits"), 8);
    assert_eq!(file.write_at(&[1; 16], 8 * MIB).map_err(|why| why.kind()), Err(ErrorKind::StorageFull));
    drop(file);
    server.terminate();
    assert!(!path.exists(), "the file that was made for it goes with it");
}

#[test]
fn fuse_file_has_a_devices_size_and_keeps_it() {
    if missing_loop() {
        return;
    }
    let sandbox = Sandbox::default();
    let (mut server, path) = as_file(&sandbox, "ram:4M", &[]);
    assert_eq!(clients(&sandbox), 0);
    let file = open(&path);
    file.write_all_at(b"kept", 0).expect("a write");
    assert_eq!(clients(&sandbox), 1);
    assert_eq!(file.set_len(1).map_err(|why| why.kind()), Err(ErrorKind::InvalidInput));
    file.set_len(4 * MIB).expect("the size that it has");
    // O_TRUNC is for files; block devices ignore it.
    drop(File::options().write(true).truncate(true).open(&path).expect("it opens"));
    assert_eq!(std::fs::metadata(&path).expect("metadata").len(), 4 * MIB);
    assert_eq!(&std::fs::read(&path).expect("its content")[..4], b"kept");
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o640)).expect("its mode");
    assert_eq!(std::fs::metadata(&path).expect("metadata").mode() & 0o7777, 0o640);
    drop(file);
    // The kernel sends RELEASE when the file is closed, and waits for no answer.
    assert_eq!(until(PATIENCE, || (clients(&sandbox) == 0).then_some(())), Some(()));
    server.terminate();
}

#[test]
fn fuse_file_passes_on_flushes_zeroes_and_holes() {
    if missing_loop() || missing(&["fallocate", "curl"]) {
        return;
    }
    let sandbox = Sandbox::default();
    let image = sandbox.noise("image", 8 << 20);
    let (mut server, path) = as_file(&sandbox, &format!("file:{}", image.display()), &[]);
    let file = open(&path);
    file.write_all_at(&[1; 4096], 0).expect("a write");
    let before = counted(&sandbox, "flush");
    file.sync_all().expect("fsync");
    file.sync_data().expect("fdatasync");
    assert_eq!(counted(&sandbox, "flush"), before + 2);
    let durable = File::options().write(true).custom_flags(0o10000).open(&path).expect("with O_DSYNC");
    durable.write_all_at(&[2; 4096], 4096).expect("a write that lasts");
    let blocks = || std::fs::metadata(&image).expect("the image").blocks();
    let whole = blocks();
    shell("fallocate --punch-hole --offset 1M --length 4M \"$F\"", &[("F", &path)]).ok();
    assert!(blocks() + 8000 <= whole, "4 MiB are given back: {} of {whole} blocks are left", blocks());
    let mut back = vec![9; 4 << 20];
    file.read_exact_at(&mut back, MIB).expect("a read");
    assert!(back.iter().all(|byte| *byte == 0));
    shell("fallocate --zero-range --offset 6M --length 64K \"$F\"", &[("F", &path)]).ok();
    file.read_exact_at(&mut back[..65536], 6 * MIB).expect("a read");
    assert!(back[..65536].iter().all(|byte| *byte == 0));
    assert_eq!(rustix::fs::seek(&file, rustix::fs::SeekFrom::Hole(0)), Ok(MIB));
    assert_eq!(rustix::fs::seek(&file, rustix::fs::SeekFrom::Data(MIB)), Ok(5 * MIB));
    drop((file, durable));
    server.terminate();
}

#[test]
fn fuse_file_of_large_blocks_is_read_and_written_at_any_length() {
    if missing_loop() {
        return;
    }
    let sandbox = Sandbox::default();
    let image = sandbox.noise("image", 1 << 20);
    let mut model = std::fs::read(&image).expect("the image");
    let stack = format!("file:{},block=4096", image.display());
    let (mut server, path) = as_file(&sandbox, &stack, &["--layer", "split,max_sectors=64"]);
    let file = open(&path);
    let durable = File::options()
        .write(true)
        .custom_flags(rustix::fs::OFlags::DSYNC.bits() as i32)
        .open(&path)
        .expect("it opens");
    for (offset, len) in [
        (5000usize, 3000usize),
        (0, 1),
        (4095, 2),
        (8192, 4097),
        (100, 700_001),
        (1, (1 << 20) - 2),
        ((1 << 20) - 5, 5),
    ] {
        let data = noise(offset as u64, len);
        let through = if len % 2 == 0 { &durable } else { &file };
        through.write_all_at(&data, offset as u64).expect("a write of any length");
        model[offset..offset + len].copy_from_slice(&data);
        let mut back = vec![0; len + 2];
        let skip = offset.min(1);
        let read = file.read_at(&mut back, (offset - skip) as u64).expect("a read across blocks");
        assert!(back[..read] == model[offset - skip..][..read], "{len} bytes at {offset}");
    }
    assert_eq!(file.write_at(&[1; 16], (1 << 20) - 8).expect("what fits"), 8);
    model[(1 << 20) - 8..].fill(1);
    // Access by programs that know nothing of blocks.
    let program = "printf hello | dd of=\"$F\" bs=1 seek=12345 conv=notrunc status=none && sync \"$F\"";
    shell(program, &[("F", &path)]).ok();
    model[12345..12350].copy_from_slice(b"hello");
    let other = noise(77, 1 << 20);
    assert!(
        std::fs::read(&path).expect("a read") == model && std::fs::read(&image).expect("a read") == model
    );
    std::fs::write(sandbox.path("other"), &other).expect("a file");
    shell("cp \"$O\" \"$F\" && cmp \"$O\" \"$F\"", &[("O", &sandbox.path("other")), ("F", &path)]).ok();
    drop((file, durable));
    server.terminate();
    assert!(std::fs::read(&image).expect("the image") == other);
}

#[test]
fn fuse_file_keeps_writes_concurrent_with_sub_block_writes() {
    if missing_loop() {
        return;
    }
    const ROUNDS: usize = 50;
    let sandbox = Sandbox::default();
    let image = sandbox.image("image", 1 << 20);
    let stack = format!("file:{},block=4096", image.display());
    let (mut server, path) = as_file(&sandbox, &stack, &["--queues", "2"]);
    // Three write parts of one block, each its own, and one writes the whole of it: no write may be lost. Of
    // concurrent writes either may win.
    let part = |index: usize| 1000 * (index + 1)..1000 * (index + 1) + 10 + index;
    for round in 0..ROUNDS {
        let sign = (round % 255) as u8 + 1;
        std::thread::scope(|scope| {
            for index in 0..3 {
                let (path, part) = (&path, part(index));
                scope.spawn(move || {
                    let data = vec![sign; part.len()];
                    open(path).write_all_at(&data, 4096 + part.start as u64).expect("a part");
                });
            }
            scope.spawn(|| open(&path).write_all_at(&[sign; 4096], 4096).expect("a whole block"));
        });
        let mut back = [0; 4096];
        open(&path).read_exact_at(&mut back, 4096).expect("a read");
        let lost = back.iter().position(|byte| *byte != sign);
        assert_eq!(lost, None, "round {round}: a byte is an earlier round's");
    }
    server.terminate();
}

#[test]
fn fuse_file_of_a_read_only_device_cannot_be_written() {
    if missing_loop() {
        return;
    }
    let sandbox = Sandbox::default();
    let image = sandbox.noise("image", 1 << 20);
    let (mut server, path) = as_file(&sandbox, &format!("file:{},ro", image.display()), &[]);
    let refused = File::options().write(true).open(&path).map_err(|why| why.kind()).err();
    assert_eq!(refused, Some(ErrorKind::ReadOnlyFilesystem));
    assert_eq!(std::fs::read(&path).expect("a read"), std::fs::read(&image).expect("the image"));
    server.terminate();
}

#[test]
fn fuse_passthrough_reads_and_writes_the_image_itself() {
    if missing_loop() || missing(&["curl"]) {
        return;
    }
    let sandbox = Sandbox::default();
    let image = sandbox.noise("image", 4 << 20);
    let path = sandbox.path("disk.raw");
    let export = format!("{},passthrough", path.display());
    let stack = format!("file:{}", image.display());
    let unpinned = sandbox.run(&["serve", &stack, "--fuse", &export]).failed_with(1);
    assert!(unpinned.contains("add format=raw"), "the kernel would write past the check: {unpinned}");
    let words = ["serve", &format!("{stack},format=raw"), "--name", "disk", "--fuse", &export];
    let outcome = until(Duration::ZERO, || {
        let started = std::panic::catch_unwind(|| sandbox.start(&mut sandbox.blockyard(&words), 1));
        Some(started.ok())
    });
    let Some(Some(mut server)) = outcome else {
        return blockyard_tests::tools::skip(
            "this kernel cannot pass FUSE's I/O through (6.9 and later can)",
        );
    };
    let file = open(&path);
    file.write_all_at(&[7; 4096], 8192).expect("a write");
    file.sync_all().expect("fsync");
    assert_eq!(std::fs::read(&image).expect("the image")[8192..12288], [7; 4096]);
    assert_eq!(counted(&sandbox, "write"), 0, "the kernel does it by itself");
    let shown = sandbox.run(&["show", "disk"]).ok();
    assert!(shown.contains("passed through and not counted"), "{shown}");
    drop(file);
    server.terminate();
    let layered = sandbox.run(&["serve", "ram:1M", "--fuse", &export]).failed_with(1);
    assert!(layered.contains("only a whole file"), "{layered}");
}

#[test]
fn fuse_file_is_not_mounted_over_data_and_names_its_users() {
    if missing_loop() {
        return;
    }
    let sandbox = Sandbox::default();
    let image = sandbox.noise("precious", 4096);
    let refused = sandbox.run(&["serve", "ram:1M", "--fuse", &image.to_string_lossy()]).failed_with(1);
    assert!(refused.contains("the file is not empty"), "{refused}");
    let away = sandbox.path("absent/disk.raw");
    let refused = sandbox.run(&["serve", "ram:1M", "--fuse", &away.to_string_lossy()]).failed_with(1);
    assert!(refused.contains("its directory does not exist"), "{refused}");
    // The file of another device is refused as well, although with a length of 0 it looks like an empty file.
    let nothing = sandbox.image("nothing", 0);
    let (mut server, path) = as_file(&sandbox, &format!("file:{}", nothing.display()), &[]);
    let words = ["serve", "ram:1M", "--name", "other", "--fuse", &path.to_string_lossy()];
    let refused = sandbox.run(&words).failed_with(1);
    assert!(refused.contains("the device disk is mounted there"), "{refused}");
    server.terminate();
    assert!(!path.exists());
    let path = sandbox.path("disk.raw");
    sandbox.run(&["add", "ram:1M", "--name", "disk", "--fuse", &path.to_string_lossy()]).ok();
    let user = open(&path);
    let refused = sandbox.run(&["del", "disk"]).failed_with(1);
    assert!(refused.contains(&format!("({})", std::process::id())), "{refused}");
    assert_eq!(user.write_at(&[1; 512], 0).expect("it is still served"), 512);
    sandbox.run(&["del", "disk", "--force"]).ok();
    assert!(user.write_at(&[1; 512], 0).is_err());
    assert_eq!(left_behind(&sandbox), Vec::<String>::new());
}

#[test]
fn mounts_of_a_killed_server_are_removed_by_del_and_by_add() {
    if missing_loop() {
        return;
    }
    let sandbox = Sandbox::default();
    let path = sandbox.path("disk.raw");
    // A file without a server is found by its device's name, by any command that removes a device of that
    // name, also of other tests if it were one of theirs.
    let name = "killed-below-a-file";
    for _ in 0..2 {
        let words = ["serve", "ram:1M", "--name", name, "--fuse", &path.to_string_lossy()];
        let mut server = sandbox.start(&mut sandbox.blockyard(&words), 1);
        assert_eq!(std::fs::metadata(&path).expect("it answers").len(), MIB);
        server.kill();
        assert!(File::open(&path).is_err());
    }
    sandbox.run(&["del", name]).ok();
    assert_eq!(left_behind(&sandbox), Vec::<String>::new());
    sandbox.run(&["del", name]).failed_with(1);
    assert!(!path.exists(), "the file that was made for it goes with it");
    // The file is also removed with a device that was served again.
    let words = ["serve", "ram:1M", "--name", name, "--fuse", &path.to_string_lossy()];
    sandbox.start(&mut sandbox.blockyard(&words), 1).kill();
    sandbox.start(&mut sandbox.blockyard(&words), 1).terminate();
    assert!(!path.exists(), "the file that was made for the first goes with the last");
}

#[test]
fn loop_device_is_direct_and_has_the_devices_blocks() {
    if missing_loop() || missing(&["blockdev", "losetup"]) {
        return;
    }
    let sandbox = Sandbox::default();
    for (stack, block, ro) in [("ram:16M", "512", "0"), ("ram:16M", "4096", "0"), ("image,ro", "512", "1")] {
        sandbox.image("image", 16 * MIB);
        let stack = if stack.starts_with("image") { format!("file:{stack}") } else { stack.to_owned() };
        let limits = format!("logical_block_size={block}");
        let mut disk = Loop::serve(&sandbox, "disk", &stack, &["--limits", &limits]);
        let facts = shell(
            "blockdev --getss --getsize64 --getro \"$D\"; losetup -nO DIO \"$D\"",
            &[("D", &disk.device)],
        );
        assert_eq!(facts.ok().split_whitespace().collect::<Vec<_>>(), [block, "16777216", ro, "1"]);
        disk.server.terminate();
        assert_eq!(left_behind(&sandbox), Vec::<String>::new());
    }
}

/// A loop device of a test, removed when dropped, whatever the test's result.
struct Removed<'a> {
    sandbox: &'a Sandbox,
    node: String,
}

impl Drop for Removed<'_> {
    fn drop(&mut self) {
        let disk = Path::new("/sys/block").join(&self.node[5..]);
        until(PATIENCE, || {
            // If a test failed its server was killed, and has left it bound.
            let file = std::fs::read_to_string(disk.join("loop/backing_file")).unwrap_or_default();
            if Path::new(&file).starts_with(self.sandbox.path("")) {
                let _ = self.sandbox.run(&["losetup", "--detach", &self.node]);
            }
            let _ = self.sandbox.run(&["losetup", "--remove", &self.node]);
            (!disk.exists()).then_some(())
        });
    }
}

#[test]
fn a_loop_number_can_be_chosen_and_a_used_one_is_refused() {
    if missing_loop() {
        return;
    }
    let sandbox = Sandbox::default();
    // A number that no concurrent run uses.
    let number = 700 + std::process::id() % 6000;
    let (option, node) = (format!("--loop={number}"), format!("/dev/loop{number}"));
    let _taken_away = Removed { sandbox: &sandbox, node: node.clone() };
    let server =
        |name: &str| sandbox.start(&mut sandbox.blockyard(&["serve", "ram:1M", "--name", name, &option]), 1);
    let mut first = server("one");
    assert_eq!(first.uri(), node);
    let refused = sandbox.run(&["serve", "ram:1M", "--name", "two", &option]).failed_with(1);
    assert!(refused.contains(&node) && refused.contains("another"), "{refused}");
    first.terminate();
    assert_eq!(left_behind(&sandbox), Vec::<String>::new());
}

#[test]
fn del_of_a_mounted_loop_device_names_the_mount_and_changes_nothing() {
    if missing_loop() || missing_file_system("ext4") {
        return;
    }
    let sandbox = Sandbox::default();
    let mut disk = Loop::serve(&sandbox, "disk", "ram:32M", &[]);
    disk.format("ext4");
    assert_eq!(clients(&sandbox), 0);
    let mount = disk.mount("ext4");
    assert_eq!(clients(&sandbox), 1);
    mount.shell("echo before > \"$M/file\"; sync -f \"$M\"").ok();
    let refused = sandbox.run(&["del", "disk"]).failed_with(1);
    assert!(refused.contains(&mount.path().to_string_lossy().into_owned()), "{refused}");
    mount.shell("echo after >> \"$M/file\"; sync -f \"$M\"; grep -q before \"$M/file\"").ok();
    mount.unmount();
    sandbox.run(&["del", "disk"]).ok();
    disk.server.wait();
    assert_eq!(left_behind(&sandbox), Vec::<String>::new());
}

#[test]
fn a_terminated_server_waits_for_the_mounted_file_system() {
    if missing_loop() || missing_file_system("ext4") {
        return;
    }
    let sandbox = Sandbox::default();
    let image = sandbox.image("image", 32 * MIB);
    let mut disk = Loop::serve(&sandbox, "disk", &format!("file:{}", image.display()), &[]);
    disk.format("ext4");
    let mount = disk.mount("ext4");
    disk.server.signal(rustix::process::Signal::TERM);
    until(PATIENCE, || disk.server.log().contains("in use").then_some(()))
        .expect("it says what it waits for");
    mount.shell("echo late > \"$M/file\"; sync -f \"$M\"").ok();
    mount.unmount();
    assert!(disk.server.wait().success());
    blockyard_tests::disk::check(&image.to_string_lossy(), "ext4");
    let kept = shell("debugfs -R 'cat /file' \"$I\"", &[("I", &image)]).ok();
    assert_eq!(kept.trim(), "late");
}

#[test]
fn del_force_fails_users_and_leaves_nothing() {
    if missing_loop() || missing_file_system("ext4") {
        return;
    }
    let sandbox = Sandbox::default();
    let mut disk = Loop::serve(&sandbox, "disk", "ram:32M", &[]);
    disk.format("ext4");
    let mount = disk.mount("ext4");
    mount.shell("echo x > \"$M/file\"; sync -f \"$M\"").ok();
    sandbox.run(&["del", "disk", "--force"]).ok();
    assert!(disk.server.wait().success());
    mount.shell("echo y > \"$M/other\"; sync -f \"$M\"").failed();
    mount.unmount();
    assert_eq!(left_behind(&sandbox), Vec::<String>::new());
}

#[test]
fn a_loop_device_of_a_killed_server_is_removed_and_served_again() {
    if missing_loop() || missing_file_system("ext4") {
        return;
    }
    let sandbox = Sandbox::default();
    let name = "killed-below-ext4";
    let image = sandbox.image("image", 64 * MIB);
    let stack = format!("file:{}", image.display());
    let mut disk = Loop::serve(&sandbox, name, &stack, &[]);
    disk.format("ext4");
    let mount = disk.mount("ext4");
    mount.shell("echo kept > \"$M/file\"; sync -f \"$M\"").ok();
    disk.server.kill();
    mount.shell("echo lost > \"$M/other\"; sync -f \"$M\"").failed();
    for word in ["show", "recover"] {
        let reported = sandbox.run(&[word, name]).failed_with(1);
        assert!(reported.contains("its server died (add it again"), "{reported}");
    }
    // A name belongs to its run directory only.
    let elsewhere = Sandbox::default();
    for word in ["show", "del"] {
        let reported = elsewhere.run(&[word, name]).failed_with(1);
        assert!(reported.contains("there is no such device"), "{reported}");
    }
    let reported = sandbox.run(&["del", name]).failed_with(1);
    assert!(reported.contains(&mount.path().to_string_lossy().into_owned()), "{reported}");
    // The name can be used again at once, even while the dead server's device is in use.
    let mut again = Loop::serve(&sandbox, name, &stack, &[]);
    mount.unmount();
    let mount = again.mount("ext4");
    mount.shell("test \"$(cat \"$M/file\")\" = kept").ok();
    mount.unmount();
    again.check("ext4");
    again.server.terminate();
    assert_eq!(left_behind(&sandbox), Vec::<String>::new());
}

#[test]
fn a_loop_device_of_a_killed_server_is_detached_with_its_remains() {
    if missing_loop() {
        return;
    }
    let sandbox = Sandbox::default();
    let name = "killed-and-detached";
    let mut disk = Loop::serve(&sandbox, name, "ram:8M", &[]);
    let users = File::open(&disk.device).expect("the device opens");
    disk.server.kill();
    let reported = sandbox.run(&["losetup", "-d", disk.path()]).failed_with(1);
    let why = format!("losetup: {0}: detach failed: {0} has lost its server and is in use by ", disk.path());
    assert!(
        reported.starts_with(&why) && reported.contains(&format!("pid {})", std::process::id())),
        "{reported}"
    );
    drop(users);
    let mut disk = Loop::serve(&sandbox, name, "ram:8M", &[]);
    disk.server.kill();
    sandbox.run(&["losetup", "-d", disk.path()]).ok();
    assert_eq!(left_behind(&sandbox), Vec::<String>::new());
    let reported = sandbox.run(&["show", name]).failed_with(1);
    assert!(reported.contains("there is no such device"), "{reported}");
}

#[test]
fn loop_device_follows_the_size_of_its_device() {
    if missing_loop() || missing(&["blockdev"]) {
        return;
    }
    let sandbox = Sandbox::default();
    let image = sandbox.image("image", 16 * MIB);
    let mut disk = Loop::serve(&sandbox, "disk", &format!("file:{}", image.display()), &[]);
    let size = || shell("blockdev --getsize64 \"$D\"", &[("D", &disk.device)]).ok().trim().to_owned();
    assert_eq!(size(), "16777216");
    sandbox.run(&["resize", "disk", "24M"]).ok();
    assert_eq!(size(), "25165824");
    disk.server.terminate();
}

#[test]
fn reads_of_a_file_in_memory_fill_no_holes_and_fail_past_a_truncation() {
    if missing_loop() {
        return;
    }
    let sandbox = Sandbox::default();
    let shm = tempfile::tempdir_in("/dev/shm").expect("a folder in memory");
    let image = shm.path().join("image");
    let stored = File::create(&image).expect("an image");
    stored.set_len(32 * MIB).expect("an image");
    for at in [1, 9, 20] {
        stored.write_all_at(&blockyard_tests::server::noise(at, 3 << 20), at * MIB).expect("a write");
    }
    let (mut server, path) = as_file(&sandbox, &format!("file:{}", image.display()), &[]);
    let before = std::fs::metadata(&image).expect("the image").blocks();
    let file = open(&path);
    let whole = std::fs::read(&image).expect("the image");
    // In segments of several sizes, so that some are all data, some all holes, and some both.
    for len in [4096usize, 1 << 20, 3000] {
        let mut back = vec![0; len];
        for at in (0..whole.len() - len).step_by(len * 7) {
            file.read_exact_at(&mut back, at as u64).expect("a read");
            assert!(back == whole[at..at + len], "{len} bytes at {at}");
        }
    }
    assert_eq!(std::fs::metadata(&image).expect("the image").blocks(), before, "holes stay holes");
    file.write_all_at(&[9; 4096], 20 * MIB).expect("a write");
    let mut back = [0; 4096];
    file.read_exact_at(&mut back, 20 * MIB).expect("a read");
    assert_eq!(back, [9; 4096]);
    stored.set_len(20 * MIB + 8192).expect("it is cut");
    file.read_exact_at(&mut back, 20 * MIB).expect("what is left");
    assert!(file.read_exact_at(&mut back, 21 * MIB).is_err());
    assert!(file.read_exact_at(&mut back, 20 * MIB + 8192).is_err());
    drop(file);
    server.signal(rustix::process::Signal::TERM);
    server.wait();
}

#[test]
fn a_fuse_file_is_mounted_for_ordinary_users() {
    if missing_loop() || missing(&["fusermount3", "setpriv", "unshare", "mknod"]) {
        return;
    }
    let sandbox = Sandbox::default();
    let home = sandbox.path("home");
    std::fs::create_dir(&home).expect("a folder");
    // This user may not access the folders of the binary.
    std::fs::copy(blockyard_tests::server::binary(), home.join("blockyard")).expect("a copy");
    let script = "
        mknod -m 666 \"$H/fuse\" c 10 229; chmod 755 \"$H/..\" \"$H/blockyard\"; chown -R nobody \"$H\"
        exec unshare --mount bash -euc '
            mount --bind \"$H/fuse\" /dev/fuse
            exec setpriv --reuid=65534 --regid=65534 --clear-groups bash -euc \"
                cd \\\"$H\\\"; export BLOCKYARD_RUN=$H/run
                ./blockyard add ram:4M --name mine --fuse disk.raw
                head -c 1000000 blockyard > part; dd if=part of=disk.raw conv=notrunc,fsync status=none
                cmp -n 1000000 part disk.raw; stat -c %s disk.raw
                ./blockyard del mine; test ! -e disk.raw\"'";
    let alone = nothing_mounted();
    let printed = shell(script, &[("H", &home)]).ok();
    drop(alone);
    assert!(printed.contains("mine fuse ") && printed.contains("4194304"), "{printed}");
}

#[test]
fn a_process_that_only_probes_a_device_does_not_block_del() {
    if missing_loop() {
        return;
    }
    let sandbox = Sandbox::default();
    let disk = Loop::serve(&sandbox, "disk", "ram:8M", &[]);
    let is_deleted = || {
        // As udev does after mkfs.
        let looking = File::open(&disk.device).expect("the device opens");
        let looker = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(150));
            drop(looking);
        });
        let deleted = sandbox.run(&["del", "disk"]);
        looker.join().expect("it ends");
        deleted.status.success().then_some(())
    };
    // On a busy machine a moment may exceed the two seconds of the limit.
    until(PATIENCE, is_deleted).expect("it is not kept");
    assert_eq!(left_behind(&sandbox), Vec::<String>::new());
}

#[test]
fn direct_from_end_to_end_leaves_nothing_in_the_page_cache() {
    if missing_loop() || missing_file_system("ext4") || missing(&["fincore"]) {
        return;
    }
    let sandbox = Sandbox::default();
    // A file system with a page cache of its own, whatever the sandbox is on.
    let below = Loop::serve(&sandbox, "below", "ram:128M", &[]);
    below.format("ext4");
    let mount = below.mount("ext4");
    let image = mount.path().join("image");
    File::create(&image).and_then(|file| file.set_len(64 << 20)).expect("the image");
    let cached = |path: &Path| -> u64 {
        let text = shell("fincore --bytes --noheadings --output RES \"$F\"", &[("F", path)]).ok();
        text.trim().parse().expect("a number")
    };
    for (direct, most, least) in [("on", 1 << 20, 0), ("off", u64::MAX, 16 << 20)] {
        let stack = format!("file:{},direct={direct}", image.display());
        let disk = Loop::serve(&sandbox, "disk", &stack, &[]);
        let before = cached(&image);
        let script = "dd if=/dev/zero of=\"$D\" bs=1M count=32 oflag=direct conv=notrunc,fsync && \
                      dd if=\"$D\" of=/dev/null bs=1M count=32 iflag=direct";
        shell(script, &[("D", &disk.device)]).ok();
        let grown = cached(&image).saturating_sub(before);
        assert!(
            (least..=most).contains(&grown),
            "direct={direct}: {grown} bytes of the image came into the cache"
        );
        // Nor is the file between the loop device and the server cached, whatever is below.
        let between = sandbox.run_dir().join("disk.fuse");
        assert_eq!(cached(&between), 0, "direct={direct}: the file under the loop device is cached");
        sandbox.run(&["del", "disk"]).ok();
    }
    mount.unmount();
}
