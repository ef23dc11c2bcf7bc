//! Files and loop devices whose requests arrive through io_uring, where the kernel has it: the tests of
//! `/dev/fuse` once more.
//!
//! It is one test, because it sets the kernel's own switch (`fuse.enable_uring`) and restores it: the kernel
//! reads it once for each mount.

use blockyard_tests::disk::{Loop, missing_file_system, missing_loop, shell};
use blockyard_tests::server::{Engine, Sandbox, Server, noise};
use blockyard_tests::tools::{PATIENCE, PYTHON, command, missing, run, skip, until, wait_within};
use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

const SWITCH: &str = "/sys/module/fuse/parameters/enable_uring";
const MIB: u64 = 1 << 20;

/// The kernel's switch, on; restored when dropped.
struct Switched(String);

impl Switched {
    /// Sets the switch; returns `None` if this kernel has none, or it cannot be set.
    fn on() -> Option<Switched> {
        let before = std::fs::read_to_string(SWITCH).ok()?;
        std::fs::write(SWITCH, "Y").ok()?;
        Some(Switched(before))
    }
}

impl Drop for Switched {
    fn drop(&mut self) {
        let _ = std::fs::write(SWITCH, self.0.trim());
    }
}

#[track_caller]
fn as_file(sandbox: &Sandbox, stack: &str, more: &[&str]) -> (Server, PathBuf) {
    let path = sandbox.path("disk.raw");
    let export = format!("{},uring=on", path.display());
    let mut words = vec!["serve", stack, "--name", "disk", "--fuse", &export];
    words.extend(more);
    (sandbox.start(&mut sandbox.blockyard(&words), 1), path)
}

fn open(path: &Path) -> File {
    File::options().read(true).write(true).open(path).expect("the device's file opens")
}

fn shown(sandbox: &Sandbox) -> String {
    sandbox.run(&["show", "disk"]).ok()
}

#[test]
fn requests_through_io_uring_equal_those_through_dev_fuse() {
    if missing_loop() {
        return;
    }
    let Some(switched) = Switched::on() else {
        return skip("this kernel has no FUSE over io_uring (6.14 and later), or the switch is not ours");
    };
    io_uring_is_refused_where_it_is_impossible();
    any_offset_and_length_is_read_and_written();
    large_blocks_are_read_and_written_in_part();
    without_resources_for_io_uring_requests_use_dev_fuse();
    assert_quick_removal(time_of_forced_removal);
    assert_quick_removal(time_of_removal_with_a_copied_mount);
    a_file_system_survives_a_killed_server();
    drop(switched);
    without_the_module_parameter_show_reports_dev_fuse();
}

fn io_uring_is_refused_where_it_is_impossible() {
    let sandbox = Sandbox::new(Engine::Epoll);
    let export = format!("{},uring=on", sandbox.path("disk.raw").display());
    let refused = sandbox.run(&["serve", "ram:1M", "--fuse", &export, "--ring", "epoll"]);
    let printed = refused.failed();
    assert!(printed.contains("uring=on") && printed.contains("do not run on io_uring"), "{printed}");
}

fn any_offset_and_length_is_read_and_written() {
    for stack in ["file", "ram"] {
        let sandbox = Sandbox::new(Engine::IoUring);
        let image = sandbox.noise("image", 8 << 20);
        let stack = if stack == "ram" { "ram:8M".to_owned() } else { format!("file:{}", image.display()) };
        let (mut server, path) = as_file(&sandbox, &stack, &["--queues", "2"]);
        assert!(shown(&sandbox).contains("through io_uring"), "{}", shown(&sandbox));
        let file = open(&path);
        for (offset, len) in [(0, 1), (1, 511), (4095, 3), (MIB - 7, 2 * MIB as usize + 9), (8 * MIB - 5, 5)]
        {
            let data = noise(offset + 1, len);
            file.write_all_at(&data, offset).expect("a write");
            let mut back = vec![0; len];
            file.read_exact_at(&mut back, offset).expect("a read");
            assert!(back == data, "{len} bytes at {offset}");
        }
        file.sync_all().expect("fsync");
        assert_eq!(file.read_at(&mut [0; 16], 8 * MIB).expect("the end"), 0);
        assert_eq!(file.write_at(&[1; 16], 8 * MIB - 8).expect("what fits"), 8);
        assert!(file.set_len(1).is_err() && file.metadata().expect("metadata").len() == 8 * MIB);
        shell("fallocate --punch-hole --offset 1M --length 4M \"$F\"", &[("F", &path)]).ok();
        let mut back = vec![9; 4 << 20];
        file.read_exact_at(&mut back, MIB).expect("a read");
        assert!(back.iter().all(|byte| *byte == 0));
        assert_eq!(rustix::fs::seek(&file, rustix::fs::SeekFrom::Data(0)), Ok(0));
        drop(file);
        server.terminate();
        assert!(!path.exists(), "the file that was made for it goes with it");
    }
}

fn large_blocks_are_read_and_written_in_part() {
    let sandbox = Sandbox::new(Engine::IoUring);
    let image = sandbox.noise("image", 4 << 20);
    let mut content = std::fs::read(&image).expect("the image");
    let stack = format!("file:{},block=4096", image.display());
    let (mut server, path) = as_file(&sandbox, &stack, &["--layer", "split,max_sectors=64"]);
    let file = open(&path);
    for (offset, len) in [(1u64, 3usize), (4000, 200), (4097, 2 << 20)] {
        let mut back = vec![0; len];
        file.read_exact_at(&mut back, offset).expect("a read");
        assert!(back == content[offset as usize..][..len], "{len} bytes at {offset}");
        let data = noise(offset, len);
        file.write_all_at(&data, offset).expect("a write");
        content[offset as usize..][..len].copy_from_slice(&data);
    }
    drop(file);
    server.terminate();
    assert!(std::fs::read(&image).expect("the image") == content);
}

/// Fails `mmap` calls of a range of lengths with ENOMEM, then executes the program in its arguments.
const NO_ROOM: &str = r#"
import ctypes, os, struct, sys
libc = ctypes.CDLL(None, use_errno=True)
def code(op, jump_true, jump_false, k):
    return struct.pack("HBBI", op, jump_true, jump_false, k)
program = (code(0x20, 0, 0, 0)                      # load the number of the system call
           + code(0x15, 0, 4, int(sys.argv[1]))     # if it is mmap
           + code(0x20, 0, 0, 24)                   # load the low half of its second argument
           + code(0x35, 0, 2, int(sys.argv[2]))     # if it is that length or more
           + code(0x25, 1, 0, int(sys.argv[3]))     # and not more than that
           + code(0x06, 0, 0, 0x00050000 | 12)      # answer ENOMEM
           + code(0x06, 0, 0, 0x7fff0000))          # else allow it
instructions = ctypes.create_string_buffer(program, len(program))
class Filter(ctypes.Structure):
    _fields_ = [("len", ctypes.c_ushort), ("filter", ctypes.c_void_p)]
filter = Filter(7, ctypes.cast(instructions, ctypes.c_void_p))
if libc.prctl(38, 1, 0, 0, 0) or libc.prctl(22, 2, ctypes.byref(filter)):
    sys.exit("seccomp: " + os.strerror(ctypes.get_errno()))
os.execv(sys.argv[4], sys.argv[4:])
"#;

fn without_resources_for_io_uring_requests_use_dev_fuse() {
    if missing(&[PYTHON]) {
        return;
    }
    let possible = std::fs::read_to_string("/sys/devices/system/cpu/possible").unwrap_or_default();
    let queues =
        possible.trim().rsplit('-').next().and_then(|last| last.parse::<u64>().ok()).unwrap_or(0) + 1;
    // The approximate need of one thread for memory that answers at once: four entries a queue, of a little
    // more than 1 MiB.
    let len = queues * 4 * MIB;
    let (from, to) = ((len - len / 8).to_string(), (len + len / 4).to_string());
    let sandbox = Sandbox::new(Engine::IoUring);
    let path = sandbox.path("disk.raw");
    let mmap = if cfg!(target_arch = "x86_64") { "9" } else { "222" };
    for way in ["on", "auto"] {
        let export = format!("{},uring={way}", path.display());
        let mut serve = sandbox.command(PYTHON);
        serve.args(["-c", NO_ROOM, mmap, &from, &to]).arg(blockyard_tests::server::binary());
        serve.args(["serve", "ram:4M", "--name", "disk", "--queues", "1", "--fuse", &export]);
        if way == "on" {
            let refused = run(&mut serve).failed();
            assert!(refused.contains("cannot be taken through io_uring"), "{refused}");
            continue;
        }
        let mut server = sandbox.start(&mut serve, 1);
        let printed = shown(&sandbox);
        assert!(printed.contains("through /dev/fuse (they cannot be taken through io_uring"), "{printed}");
        let file = open(&path);
        file.write_all_at(&[7; 5000], 3).expect("a write");
        let mut back = [0; 5000];
        file.read_exact_at(&mut back, 3).expect("a read");
        assert_eq!(back, [7; 5000]);
        drop(file);
        server.terminate();
        assert!(!path.exists(), "nothing is left of either mount");
    }
}

/// Checks the time of a removal: well under the ten seconds for which a reactor would wait for the kernel's
/// entries. A busy machine may exceed that by chance, and then it is repeated; a real wait takes that long
/// each time.
fn assert_quick_removal(removal_time: fn() -> Duration) {
    let times: Vec<Duration> =
        (0..5).map(|_| removal_time()).take_while(|time| time.as_secs() >= 8).collect();
    assert!(times.len() < 5, "it took {times:?}");
}

fn time_of_forced_removal() -> Duration {
    let sandbox = Sandbox::new(Engine::IoUring);
    let path = sandbox.path("disk.raw");
    let export = format!("{},uring=on", path.display());
    sandbox.run(&["add", "ram:4M", "--name", "disk", "--fuse", &export]).ok();
    let file = open(&path);
    file.write_all_at(&[1; 4096], 0).expect("a write");
    let start = Instant::now();
    let printed = sandbox.run(&["del", "disk"]).failed();
    assert!(printed.contains("in use"), "{printed}");
    sandbox.run(&["del", "disk", "--force"]).ok();
    let taken = start.elapsed();
    assert!(file.read_at(&mut [0; 512], 0).is_err(), "who still has it gets errors");
    taken
}

fn time_of_removal_with_a_copied_mount() -> Duration {
    let sandbox = Sandbox::new(Engine::IoUring);
    let path = sandbox.path("disk.raw");
    // The process continues for the other device: its end would notify everyone, too.
    let topology = format!(
        "[device.disk]\nstack = \"ram:4M\"\n[device.other]\nstack = \"ram:4M\"\n\
         [[export]]\ndevice = \"disk\"\nfuse = \"{},uring=on\"\n\
         [[export]]\ndevice = \"other\"\nnbd = \"unix:{}\"\n",
        path.display(),
        sandbox.path("other.sock").display()
    );
    let mut server = sandbox.up(&topology, 2);
    let program =
        "exec 3<\"$0\"; echo open; read go; ! dd if=/dev/fd/3 of=/dev/null iflag=direct bs=4096 count=1";
    let mut elsewhere = command(&["unshare", "-m", "--propagation", "private", "sh", "-c", program]);
    elsewhere.arg(&path).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut elsewhere = elsewhere.spawn().expect("unshare starts");
    let mut line = [0; 5];
    elsewhere.stdout.take().expect("a pipe").read_exact(&mut line).expect("it opens the file");
    let start = Instant::now();
    sandbox.run(&["del", "disk"]).ok();
    let taken = start.elapsed();
    elsewhere.stdin.take().expect("a pipe").write_all(b"go\n").expect("it listens");
    let status = wait_within(&mut elsewhere, PATIENCE).expect("the other user gets an error");
    assert!(status.success(), "and gets an error");
    server.terminate();
    taken
}

fn a_file_system_survives_a_killed_server() {
    if missing_file_system("ext4") {
        return;
    }
    let sandbox = Sandbox::new(Engine::IoUring);
    let image = sandbox.image("image", 64 << 20);
    let stack = format!("file:{}", image.display());
    {
        let mut disk = Loop::serve(&sandbox, "disk", &stack, &[]);
        assert!(shown(&sandbox).contains("through io_uring"), "auto takes it where it is offered");
        disk.format("ext4");
        let mount = disk.mount("ext4");
        mount
            .shell("cd \"$M\" && dd if=/dev/urandom of=kept bs=1M count=8 conv=fsync && sha256sum kept > sum && sync")
            .ok();
        disk.server.kill();
        let failing = until(PATIENCE, || {
            File::create(mount.path().join("later")).and_then(|file| file.sync_all()).is_err().then_some(())
        });
        assert!(failing.is_some(), "the writer gets no error");
        mount.unmount();
    }
    let disk = Loop::serve(&sandbox, "disk", &stack, &[]);
    let mount = disk.mount("ext4");
    mount.shell("cd \"$M\" && sha256sum -c sum").ok();
    mount.unmount();
    disk.check("ext4");
}

fn without_the_module_parameter_show_reports_dev_fuse() {
    if std::fs::read_to_string(SWITCH).is_ok_and(|text| text.trim() == "Y") {
        return;
    }
    let sandbox = Sandbox::new(Engine::IoUring);
    let export = format!("{},uring=on", sandbox.path("disk.raw").display());
    let printed = sandbox.run(&["serve", "ram:1M", "--fuse", &export]).failed();
    assert!(printed.contains("FUSE over io_uring is disabled"), "{printed}");
    let export = sandbox.path("disk.raw").display().to_string();
    let words = ["serve", "ram:1M", "--name", "disk", "--fuse", &export];
    let mut server = sandbox.start(&mut sandbox.blockyard(&words), 1);
    assert!(shown(&sandbox).contains("FUSE over io_uring is disabled"), "{}", shown(&sandbox));
    server.terminate();
}
