//! User-mode Linux on a vhost-user export: its `virtio_uml` is a front-end that shares no code with QEMU's.
//!
//! `./x user-mode-linux` fetches the kernel to `target/foreign/user-mode-linux`, as `./x test full` does. Its
//! root file system is the machine's own, read-only by hostfs, so that it has the programs of the tests.

use blockyard_tests::server::{Engine, Sandbox, noise};
use blockyard_tests::tools::{PATIENCE, command, missing, run, skip, until};
use rustix::process::{Pid, Signal, kill_process_group};
use std::fs::File;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

/// Names a directory with the kernel instead of the one that `./x test full` fetches.
const FOLDER: &str = "BLOCKYARD_USER_MODE_LINUX";
const MIB: u64 = 1 << 20;
/// Length of the device at first, and after it was resized.
const LEN: u64 = 64 * MIB;
const LEN_RESIZED: u64 = 96 * MIB;
/// Length of a file that stays.
const KEPT: usize = 8 << 20;
/// What the programs of [`INIT`] are called here.
const TOOLS: &[&str] =
    &["mkfs.ext4", "resize2fs", "e2fsck", "debugfs", "fstrim", "mount", "busybox", "fio", "sha256sum"];
/// Words of messages that no test may cause.
const PROBLEMS: &[&str] = &["BUG: ", "WARNING: ", "Oops", "EXT4-fs error", "EXT4-fs warning", "I/O error"];

/// The first program of the kernel. `$files` and `$kept` are set before it.
const INIT: &str = r#"
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/ LC_ALL=C
rest() { while :; do sleep 1; done }
step() { echo "step: $*"; "$@" || { echo "failed: $*"; rest; } }
sums() { (cd /mnt/disk && sha256sum "$@") }
await_size() { for _ in $(seq 600); do [ "$(cat /sys/block/vda/size)" = "$1" ] && return; sleep 0.1; done; false; }
drop_caches() { echo 3 >/proc/sys/vm/drop_caches; }

step mount -t proc none /proc
step mount -t sysfs none /sys
step mount -t tmpfs none /mnt
step mkdir /mnt/disk
step busybox insmod "$files/virtio_blk.ko"
step await_size 131072
step mkfs.ext4 -q -E nodiscard /dev/vda
step mount /dev/vda /mnt/disk
step cp "$kept" /mnt/disk/kept
step cp /mnt/disk/kept /mnt/disk/copy
step sums kept copy
sums kept copy >/mnt/sums
step umount /mnt/disk
step drop_caches
step mount /dev/vda /mnt/disk
step sums -c /mnt/sums
step fio --name=load --directory=/mnt/disk --size=24M --rw=randwrite --bsrange=4k-64k --blockalign=4k --verify=crc32c \
    --verify_fatal=1 --verify_state_save=0 --direct=1 --ioengine=libaio --iodepth=16 --thread --fsync=64 --eta=never \
    --output=/mnt/fio
step grep -E '(READ|WRITE): ' /mnt/fio
step rm /mnt/disk/load.0.0
step sync
step fstrim -v /mnt/disk
step await_size 196608
step resize2fs /dev/vda
step cp /mnt/disk/kept /mnt/disk/later
step sync
step drop_caches
step sums -c /mnt/sums
step cmp /mnt/disk/kept /mnt/disk/later
step umount /mnt/disk
echo "device: $(sha256sum </dev/vda)"
echo "the end"
rest
"#;

/// Returns the directory of the kernel; `None`: it is missing, and the calling test is skipped.
fn files() -> Option<PathBuf> {
    let folder = std::env::var_os(FOLDER).map(PathBuf::from).or_else(|| {
        // This program is target/PROFILE/deps/NAME.
        let own = std::env::current_exe().ok()?;
        Some(own.ancestors().nth(3)?.join("foreign/user-mode-linux"))
    });
    let found = folder.filter(|folder| folder.join("linux").is_file());
    if found.is_none() {
        skip("no user-mode Linux (./x user-mode-linux fetches it)");
    }
    found
}

/// A running kernel, in a process group of its own. It is killed: it ignores SIGTERM when its device hangs.
struct Kernel {
    child: Child,
    console: PathBuf,
}

impl Kernel {
    /// Starts it with a disk on this socket.
    fn start(files: &Path, sandbox: &Sandbox, socket: &Path) -> Kernel {
        let set =
            format!("#!/bin/sh\nfiles='{}'\nkept='{}'\n", files.display(), sandbox.path("kept").display());
        let init = sandbox.text("init", &(set + INIT));
        std::fs::set_permissions(&init, PermissionsExt::from_mode(0o755)).expect("an executable script");
        let console = sandbox.path("console");
        let output = File::create(&console).expect("a file in the sandbox");
        let errors = output.try_clone().expect("a file");
        let mut linux = Command::new("./linux");
        linux.current_dir(files).env("LD_LIBRARY_PATH", files).env("HOME", sandbox.path(""));
        linux.args(["mem=256M", "seccomp=on", "umid=disk", "con=null", "con0=fd:0,fd:1", "ro"]);
        linux.args(["root=/dev/root", "rootfstype=hostfs", "rootflags=/"]);
        linux.arg(format!("uml_dir={}", sandbox.path("uml").display()));
        linux.arg(format!("init={}", init.display()));
        linux.arg(format!("virtio_uml.device={}:2", socket.display()));
        linux.process_group(0).stdin(Stdio::null()).stdout(output).stderr(errors);
        let child = linux.spawn().unwrap_or_else(|why| panic!("{}: {why}", files.join("linux").display()));
        Kernel { child, console }
    }

    fn output(&self) -> String {
        String::from_utf8_lossy(&std::fs::read(&self.console).unwrap_or_default()).into_owned()
    }

    /// Waits until it prints a line that begins with these words. An `Err` says what it lacks here, such as
    /// seccomp.
    ///
    /// # Panics
    /// If it does not get that far for another reason.
    #[track_caller]
    fn await_line(&mut self, words: &str) -> Result<String, String> {
        let found = until(PATIENCE, || {
            let ended = self.child.try_wait().expect("the status of a child");
            let text = self.output();
            if let Some(line) = text.lines().find(|line| line.starts_with(words)) {
                return Some(Ok(line.to_owned()));
            }
            assert!(!text.contains("\nfailed: ") && !text.contains("Kernel panic"), "{text}");
            ended.map(|status| Err(format!("{status}: {}", text.lines().last().unwrap_or_default())))
        });
        let found = found.unwrap_or_else(|| panic!("no line '{words}':\n{}", self.output()));
        let output = self.output();
        // It tries what it needs, such as seccomp, before it names its version.
        let is_refused = output.contains("Checking ") && !output.contains("Linux version");
        assert!(found.is_ok() || is_refused, "it ended:\n{output}");
        found
    }
}

impl Drop for Kernel {
    fn drop(&mut self) {
        if let Some(group) = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw) {
            // It may have ended by itself.
            let _ = kill_process_group(group, Signal::KILL);
        }
        let _ = self.child.wait();
    }
}

#[test]
fn user_mode_linux_uses_an_export() {
    let Some(files) = files() else { return };
    if missing(TOOLS) {
        return;
    }
    let sandbox = Sandbox::new(Engine::Auto);
    let kept = noise(1, KEPT);
    std::fs::write(sandbox.path("kept"), &kept).expect("a file in the sandbox");
    let (image, socket) = (sandbox.image("disk.img", LEN), sandbox.path("vm.sock"));
    let export = format!("unix:{},packed=off", socket.display());
    let words = ["serve", "file:disk.img,format=raw", "--vhost-user", &export, "--name", "disk"];
    let _server = sandbox.start(&mut sandbox.blockyard(&words), 1);
    let mut kernel = Kernel::start(&files, &sandbox, &socket);
    if let Err(refusal) = kernel.await_line("step: ") {
        skip(format_args!("user-mode Linux does not run here ({refusal})"));
        return;
    }
    let reached = |words: &str, kernel: &mut Kernel| kernel.await_line(words).expect("it runs");
    reached("step: await_size 196608", &mut kernel);
    let allocated = image.metadata().expect("the file").blocks() * 512;
    assert!(allocated < 2 * KEPT as u64 + 12 * MIB, "{allocated} bytes are allocated after fstrim");
    sandbox.run(&["resize", "disk", "96M"]).ok();
    let device = reached("device: ", &mut kernel);
    reached("the end", &mut kernel);
    let output = kernel.output();
    for problem in PROBLEMS {
        assert!(!output.contains(problem), "{problem}:\n{output}");
    }
    assert_eq!(counter(&sandbox, "copied"), 0, "guest memory is the memory of the file's requests");
    assert!(counter(&sandbox, "kicks") > 100);
    // The load was read back.
    assert!(output.contains(" READ: ") && output.contains(" WRITE: "), "{output}");
    drop(kernel);

    // What the kernel saw is in the file.
    assert_eq!(image.metadata().expect("the file").len(), LEN_RESIZED);
    let sum = run(command(&["sha256sum"]).arg(&image)).ok();
    assert_eq!(device.split(' ').nth(1), sum.split(' ').next());
    run(command(&["e2fsck", "-f", "-n"]).arg(&image)).ok();
    for name in ["kept", "copy", "later"] {
        let copy = sandbox.path("dumped");
        let dump = format!("dump /{name} {}", copy.display());
        run(command(&["debugfs", "-R", &dump]).arg(&image)).ok();
        assert!(std::fs::read(&copy).expect("a copy of the file") == kept, "{name} has other content");
    }
}

/// A counter of the export.
fn counter(sandbox: &Sandbox, name: &str) -> u64 {
    let text = sandbox.run(&["show", "disk", "--json"]).ok();
    let key = format!("\"{name}\":");
    let (_, after) = text.split_once(&key).unwrap_or_else(|| panic!("no {name} in {text}"));
    let number: String = after.trim_start().chars().take_while(char::is_ascii_digit).collect();
    number.parse().expect("a number")
}
