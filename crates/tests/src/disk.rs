//! Devices that the kernel knows as files or block devices, for tests that mount them.
//!
//! *Invariant:* even after a failed test nothing stays mounted or bound: a [`Loop`] removes its device by
//! force, and a [`Mount`] unmounts before that.

use crate::server::{Sandbox, Server};
use crate::tools::{Outcome, PATIENCE, command, find, run, skip, until};
use rustix::fs::{Mode, OFlags};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// Error messages for a file whose FUSE server has ended or is ending.
const GONE: [&str; 2] = ["Transport endpoint is not connected", "Software caused connection abort"];

/// Returns whether loop devices over our files are impossible here; then the calling test is skipped.
pub fn missing_loop() -> bool {
    if crate::server::missing_root() {
        return true;
    }
    for (device, module) in [("/dev/fuse", "FUSE"), ("/dev/loop-control", "the loop driver")] {
        if let Err(why) = std::fs::File::options().read(true).write(true).open(device) {
            skip(format_args!("no {module} here: {device}: {why}"));
            return true;
        }
    }
    false
}

/// Returns whether the kernel lacks the file system or the distribution lacks its tools; then the test is
/// skipped.
pub fn missing_file_system(kind: &str) -> bool {
    if crate::tools::missing(&[&format!("mkfs.{kind}")]) {
        return true;
    }
    let known = std::fs::read_to_string("/proc/filesystems").unwrap_or_default();
    let there = known.lines().any(|line| line.trim_start_matches("nodev").trim() == kind)
        || find("modprobe").is_some() && run(&mut command(&["modprobe", kind])).status.success();
    if !there {
        skip(format_args!("this kernel has no {kind}"));
    }
    !there
}

/// A server and its loop device.
pub struct Loop<'a> {
    sandbox: &'a Sandbox,
    /// The server; taken out by a test that ends it itself.
    pub server: Server,
    /// The block device.
    pub device: PathBuf,
    name: String,
}

impl<'a> Loop<'a> {
    /// Serves a stack as a loop device.
    ///
    /// # Panics
    /// If it does not start.
    #[track_caller]
    pub fn serve(sandbox: &'a Sandbox, name: &str, stack: &str, more: &[&str]) -> Loop<'a> {
        let mut words = vec!["serve", stack, "--name", name, "--loop"];
        words.extend(more);
        let server = sandbox.start(&mut sandbox.blockyard(&words), 1);
        let device = PathBuf::from(server.uri());
        assert!(server.ready()[0].starts_with(&format!("{name} loop /dev/loop")), "{:?}", server.ready());
        Loop { sandbox, server, device, name: name.to_owned() }
    }

    /// Returns its path as text.
    pub fn path(&self) -> &str {
        self.device.to_str().expect("a path in /dev")
    }

    /// Creates a file system on it.
    ///
    /// # Panics
    /// If that fails.
    #[track_caller]
    pub fn format(&self, kind: &str) {
        let tool = format!("mkfs.{kind}");
        let force = if kind == "ext4" { "-F" } else { "-f" };
        beside_others(&[&tool, "-q", force, self.path()]).ok();
    }

    /// Mounts its file system.
    ///
    /// # Panics
    /// If that fails.
    #[track_caller]
    pub fn mount(&self, kind: &str) -> Mount {
        Mount::new(self.sandbox, self.path(), kind)
    }

    /// Checks its file system, which is not mounted.
    ///
    /// # Panics
    /// If it has errors.
    #[track_caller]
    pub fn check(&self, kind: &str) {
        check(self.path(), kind);
    }
}

/// Waits until no mount namespace has the device mounted any more. A namespace that another test created while it was
/// mounted keeps it mounted after it was unmounted here.
///
/// # Panics
/// If it stays mounted.
#[track_caller]
pub fn await_unmounted(device: &str) {
    // The kernel refuses to open a block device exclusively while a file system is mounted on it.
    let free =
        || rustix::fs::open(device, OFlags::RDONLY | OFlags::EXCL | OFlags::CLOEXEC, Mode::empty()).ok();
    drop(until(PATIENCE, free).unwrap_or_else(|| panic!("{device} is still mounted somewhere")));
}

/// Checks a file system that is not mounted.
///
/// # Panics
/// If it has errors, or stays mounted in another namespace.
#[track_caller]
pub fn check(device: &str, kind: &str) {
    await_unmounted(device);
    let words: &[&str] = match kind {
        "ext4" => &["e2fsck", "-f", "-n", device],
        "xfs" => &["xfs_repair", "-n", device],
        "btrfs" => &["btrfs", "check", "--readonly", device],
        other => panic!("no check for {other}"),
    };
    beside_others(words).ok();
}

/// Runs a file system tool. Some tools read all mounted loop devices, and fail at one whose server was just
/// killed by a concurrent test: they are run again.
fn beside_others(arguments: &[&str]) -> Outcome {
    let attempt = || run(&mut command(arguments));
    let settled = || Some(attempt()).filter(|outcome| !GONE.iter().any(|why| outcome.stderr.contains(why)));
    until(PATIENCE, settled).unwrap_or_else(attempt)
}

impl Drop for Loop<'_> {
    fn drop(&mut self) {
        // Nothing remains after a test that passed; a failed test may have left a mount or a device.
        for words in [["del", &self.name, "--force"], ["del", &self.name, "--force"]] {
            let _ = self.sandbox.run(&words);
        }
    }
}

/// Unmounts a path. It may be busy for a moment: the kernel closes files of a process that has ended.
///
/// # Panics
/// If it stays busy, or is not mounted.
#[track_caller]
pub fn unmount(at: &Path) {
    let attempt = || run(command(&["umount"]).arg(at));
    let settled = || Some(attempt()).filter(|outcome| !outcome.stderr.contains("busy"));
    until(PATIENCE, settled).unwrap_or_else(attempt).ok();
}

/// Number of file systems that this program has mounted.
static MOUNTS: Mutex<usize> = Mutex::new(0);
/// Notified when the number decreases.
static UNMOUNTED: Condvar = Condvar::new();

fn mounts() -> MutexGuard<'static, usize> {
    MOUNTS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Waits until this program has no file system mounted; it mounts none until the guard is dropped. A new
/// mount namespace needs that: it begins with a copy of every mount, and the copy keeps a device busy after
/// it was unmounted here.
pub fn nothing_mounted() -> MutexGuard<'static, usize> {
    UNMOUNTED.wait_while(mounts(), |count| *count > 0).unwrap_or_else(PoisonError::into_inner)
}

/// A mounted file system.
pub struct Mount {
    path: PathBuf,
    is_mounted: bool,
}

impl Mount {
    /// Mounts a device in the sandbox.
    ///
    /// # Panics
    /// If that fails.
    #[track_caller]
    pub fn new(sandbox: &Sandbox, device: &str, kind: &str) -> Mount {
        let name = format!("mnt-{}", device.trim_start_matches("/dev/").replace('/', "-"));
        let path = sandbox.path(&name);
        std::fs::create_dir_all(&path).expect("a folder in the sandbox");
        *mounts() += 1;
        let mount = Mount { path, is_mounted: true };
        run(command(&["mount", "-t", kind, device]).arg(&mount.path)).ok();
        mount
    }

    /// Returns its path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Unmounts it.
    ///
    /// # Panics
    /// If it is busy.
    #[track_caller]
    pub fn unmount(mut self) {
        unmount(&self.path);
        self.is_mounted = false;
    }

    /// Runs a shell script in it, which stops at the first error.
    ///
    /// # Panics
    /// If it takes too long.
    #[track_caller]
    pub fn shell(&self, script: &str) -> Outcome {
        shell(script, &[("M", &self.path)])
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        if self.is_mounted {
            let _ = run(command(&["umount", "-l"]).arg(&self.path));
        }
        *mounts() -= 1;
        UNMOUNTED.notify_all();
    }
}

/// Runs a shell script with these paths as its variables, which stops at the first error.
///
/// # Panics
/// If it takes too long.
#[track_caller]
pub fn shell(script: &str, paths: &[(&str, &Path)]) -> Outcome {
    let mut bash = Command::new("bash");
    bash.args(["-euo", "pipefail", "-c", script]);
    for (name, path) in paths {
        bash.env(name, path);
    }
    run(&mut bash)
}
