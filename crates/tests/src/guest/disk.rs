//! A kernel block device in tests: its attributes, load on it, file systems on it.

use super::Skip;
use crate::tools::{Outcome, command, run_within, until};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Limit for one tool on one small device. Emulated processors are slow.
const PATIENCE: Duration = Duration::from_secs(120);

/// Folder for images: a file system on a block device, as users have. Files in memory are served in another
/// way.
pub const FOLDER: &str = "/var/disk";

/// Mounts the folder for images, in the guest.
///
/// # Panics
/// If that fails.
pub fn prepare() {
    std::fs::create_dir_all(FOLDER).expect("root may");
    // If the module is built in, its disk has the size of the kernel's configuration.
    tool(&["modprobe", "brd", "rd_nr=1", "rd_size=819200"]).ok();
    tool(&["mkfs.ext4", "-q", "-F", "-O", "^has_journal", "-E", "lazy_itable_init=0", "/dev/ram0"]).ok();
    tool(&["mount", "-o", "discard", "/dev/ram0", FOLDER]).ok();
}

/// A block device.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Disk {
    /// Its node, `/dev/NAME`.
    pub node: PathBuf,
}

impl Disk {
    /// Waits for the device at a node.
    ///
    /// # Panics
    /// If it does not appear.
    #[track_caller]
    pub fn at(node: impl Into<PathBuf>) -> Disk {
        let disk = Disk { node: node.into() };
        let found = until(PATIENCE, || disk.node.exists().then_some(()));
        assert!(found.is_some(), "{}: no such device", disk.node.display());
        disk
    }

    /// Returns its node as text.
    pub fn path(&self) -> &str {
        self.node.to_str().expect("nodes have plain names")
    }

    /// Returns its name, as in sysfs.
    pub fn name(&self) -> &str {
        self.path().trim_start_matches("/dev/")
    }

    /// Returns an attribute: a file below `/sys/block/NAME`.
    ///
    /// # Panics
    /// If there is none.
    #[track_caller]
    pub fn attribute(&self, name: &str) -> String {
        let path = format!("/sys/block/{}/{name}", self.name());
        std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{path}: {error}")).trim().to_owned()
    }

    /// Returns its length in bytes.
    ///
    /// # Panics
    /// If it is removed.
    #[track_caller]
    pub fn len(&self) -> u64 {
        512 * self.attribute("size").parse::<u64>().expect("sectors")
    }

    /// Returns whether its size is 0, as for a device that is not attached.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Writes at random, then reads back and compares, with many requests in flight. `more`: further options
    /// of fio, which override these.
    ///
    /// # Panics
    /// If a request fails or data differs.
    #[track_caller]
    pub fn verify(&self, more: &[&str]) {
        self.load(
            &[&["--rw=randwrite", "--verify=crc32c", "--verify_fatal=1", "--do_verify=1"], more].concat(),
        )
        .ok();
    }

    /// Runs fio on it.
    #[track_caller]
    pub fn load(&self, more: &[&str]) -> Outcome {
        run_within(&mut self.fio(more), PATIENCE)
    }

    /// Returns a fio command for this device: 4 KiB blocks, 16 in flight, direct I/O, on the first 8 MiB,
    /// unless `more` overrides that.
    pub fn fio(&self, more: &[&str]) -> std::process::Command {
        let mut fio =
            command(&["fio", "--name=job", "--ioengine=libaio", "--direct=1", "--bs=4k", "--iodepth=16"]);
        fio.args(["--size=8M", "--output-format=terse", "--terse-version=3", "--randrepeat=0"]);
        // Relative to the test's folder, so nothing is left on the host's disk. If the device disappears
        // before it is opened, fio must not create a file.
        fio.args(["--verify_state_save=0", "--allow_file_create=0"])
            .arg(format!("--filename={}", self.path()));
        fio.args(more);
        fio
    }

    /// Creates a file system.
    ///
    /// # Panics
    /// If that fails.
    #[track_caller]
    pub fn format(&self, kind: &str) {
        let words: &[&str] = match kind {
            "ext4" => &["mkfs.ext4", "-q", "-F", "-E", "lazy_itable_init=0,lazy_journal_init=0"],
            "xfs" => &["mkfs.xfs", "-q", "-f"],
            "btrfs" => &["mkfs.btrfs", "-q", "-f"],
            other => panic!("no such file system here: {other}"),
        };
        tool(&[words, &[self.path()]].concat()).ok();
    }

    /// Checks a file system that is not mounted, without changes.
    ///
    /// # Panics
    /// If it is not clean.
    #[track_caller]
    pub fn check(&self, kind: &str) {
        let words: &[&str] = match kind {
            "ext4" => &["e2fsck", "-f", "-n"],
            "xfs" => &["xfs_repair", "-n"],
            "btrfs" => &["btrfs", "check", "--readonly"],
            other => panic!("no such file system here: {other}"),
        };
        tool(&[words, &[self.path()]].concat()).ok();
    }

    /// Mounts it until the guard is dropped.
    ///
    /// # Panics
    /// If that fails.
    #[track_caller]
    pub fn mount(&self, at: &Path) -> Mounted {
        std::fs::create_dir_all(at).expect("a folder in the sandbox");
        tool(&["mount", self.path(), &at.to_string_lossy()]).ok();
        Mounted { at: at.into() }
    }
}

/// A mounted file system.
pub struct Mounted {
    /// Its path.
    pub at: PathBuf,
}

impl Mounted {
    /// Unmounts it.
    ///
    /// # Panics
    /// If that fails.
    #[track_caller]
    pub fn unmount(self) {
        crate::disk::unmount(&self.at);
        std::mem::forget(self);
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        // The file system is still mounted only after a failure; the runner reports remains.
        let _ = command(&["umount", "-l", &self.at.to_string_lossy()]).output();
    }
}

/// Runs a tool to its end.
///
/// # Panics
/// If it takes too long.
#[track_caller]
pub fn tool(arguments: &[&str]) -> Outcome {
    run_within(&mut command(arguments), PATIENCE)
}

/// Loads a kernel module, with parameters.
///
/// # Errors
/// If this kernel does not have it.
pub fn module(arguments: &[&str]) -> Result<(), Skip> {
    let outcome = tool(&[&["modprobe"], arguments].concat());
    if outcome.status.success() {
        Ok(())
    } else {
        Err(Skip(format!("this kernel has no module {}", arguments[0])))
    }
}

/// Returns the names of existing or attached devices of ublk, nbd and loop.
pub fn attached() -> Vec<String> {
    let entries = std::fs::read_dir("/sys/block").into_iter().flatten().flatten();
    let name = entries.filter_map(|entry| entry.file_name().into_string().ok());
    let is_attached = |name: &String| {
        let has = |file: &str| Path::new("/sys/block").join(name).join(file).exists();
        name.starts_with("ublkb")
            || (name.starts_with("nbd") && has("pid"))
            || (name.starts_with("loop") && has("loop/backing_file"))
    };
    let characters = std::fs::read_dir("/dev").into_iter().flatten().flatten();
    let characters = characters.filter_map(|entry| entry.file_name().into_string().ok());
    let mut names: Vec<String> = name.filter(is_attached).collect();
    names.extend(characters.filter(|name| name.starts_with("ublkc") && *name != "ublk-control"));
    names.sort();
    names
}
