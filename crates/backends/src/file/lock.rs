//! Locks that keep other writers off a file.
//!
//! Regular files are locked byte by byte as QEMU locks its images (`block/file-posix.c`), so that we and
//! QEMU exclude each other too. A lock on byte 100 + n means that its owner performs operation n. A lock on
//! byte 200 + n means that no other program may perform operation n. A program takes its own locks first
//! and then checks those of others, so of two that start together at least one sees the other. Nothing
//! blocks, and closing the file releases the locks.
//!
//! The kernel's loop driver takes no locks, so its use of a file is read from sysfs.
//!
//! Block devices are opened with `O_EXCL`, which also excludes mounts.

use super::FileSpec;
use super::spec::OpenError;
use super::sys;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::time::{Duration, Instant};

const DOES: i64 = 100;
pub(super) const DENIES: i64 = 200;
const READ: i64 = 0;
pub(super) const WRITE: i64 = 1;
const RESIZE: i64 = 3;
/// Time for which to retry a lock. After a program was killed, the kernel takes a moment to end its rings,
/// longer on a busy processor, and the program's files stay locked until then.
const RETRY_TIME: Duration = Duration::from_millis(if cfg!(test) { 400 } else { 2000 });
/// Time between retries.
const RETRY_INTERVAL: Duration = Duration::from_millis(20);

/// State of the file's locks, for `show`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Locked {
    Yes,
    Shared,
    /// The file system does not support locks.
    Impossible,
}

impl Locked {
    pub(super) fn describe(self) -> &'static str {
        match self {
            Locked::Yes => "against other writers",
            Locked::Shared => "no: share was given",
            Locked::Impossible => "no: the file system has no locks",
        }
    }
}

/// Locks an open regular file.
pub(super) fn lock(file: &File, spec: &FileSpec) -> Result<Locked, OpenError> {
    let does: &[i64] = if spec.ro { &[READ] } else { &[READ, WRITE] };
    let denies: &[i64] = if spec.share { &[] } else { &[WRITE, RESIZE] };
    if !spec.share && is_behind_a_loop_device(file, spec.ro) {
        let why = "a loop device of the kernel's is on it (losetup -j names it: detach it, or add share)";
        return Err(OpenError::InUse { path: spec.path.clone(), why });
    }
    let begun = Instant::now();
    let mut result = conflict(file, does, denies);
    while matches!(result, Ok(Some(_))) && begun.elapsed() < RETRY_TIME {
        std::thread::sleep(RETRY_INTERVAL);
        result = conflict(file, does, denies);
    }
    match result {
        Ok(None) => Ok(if spec.share { Locked::Shared } else { Locked::Yes }),
        Ok(Some(why)) => Err(OpenError::InUse { path: spec.path.clone(), why }),
        Err(error) if is_unsupported(&error) => Ok(Locked::Impossible),
        Err(error) => Err(OpenError::call("locking", spec, error)),
    }
}

/// Releases the locks that exclude writers, for a writer of our own.
pub(super) fn allow_writers(file: &File, locked: Locked) -> io::Result<()> {
    for n in denied(locked) {
        sys::let_go_of_byte(file, DENIES + n)?;
    }
    Ok(())
}

/// Takes those locks again.
pub(super) fn deny_writers(file: &File, locked: Locked) -> io::Result<()> {
    for n in denied(locked) {
        sys::hold_byte(file, DENIES + n)?;
    }
    Ok(())
}

fn denied(locked: Locked) -> impl Iterator<Item = i64> {
    let all: &[i64] = if locked == Locked::Yes { &[WRITE, RESIZE] } else { &[] };
    all.iter().copied()
}

/// Returns whether the kernel's loop driver, which takes no locks, has the file open in a conflicting way.
/// Two readers do not conflict.
fn is_behind_a_loop_device(file: &File, read_only: bool) -> bool {
    let Ok(meta) = file.metadata() else { return false };
    let disks = fs::read_dir("/sys/block").into_iter().flatten().flatten();
    let mut loops = disks.filter(|entry| entry.file_name().as_encoded_bytes().starts_with(b"loop"));
    loops.any(|entry| {
        let text = |name: &str| fs::read_to_string(entry.path().join(name)).ok();
        let Some(path) = text("loop/backing_file") else { return false };
        let Ok(other) = fs::metadata(path.trim_end_matches('\n')) else { return false };
        let same = (other.dev(), other.ino()) == (meta.dev(), meta.ino());
        same && !(read_only && text("ro").is_some_and(|ro| ro.trim() == "1"))
    })
}

fn is_unsupported(error: &io::Error) -> bool {
    let errno = error.raw_os_error();
    matches!(errno, Some(libc::EINVAL | libc::ENOLCK | libc::EOPNOTSUPP | libc::ENOSYS))
}

fn conflict(file: &File, does: &[i64], denies: &[i64]) -> io::Result<Option<&'static str>> {
    for byte in does.iter().map(|n| DOES + n).chain(denies.iter().map(|n| DENIES + n)) {
        match sys::hold_byte(file, byte) {
            Ok(()) => {}
            // Unlike QEMU, that program locks the whole file for writing.
            Err(error) if matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EACCES)) => {
                return Ok(Some("another program locks it for writing (stop it)"));
            }
            Err(error) => return Err(error),
        }
    }
    for n in does {
        if sys::byte_is_held(file, DENIES + n)? {
            return Ok(Some(
                "another program uses it and locked it against changes (stop it, or add share to both)",
            ));
        }
    }
    for n in denies {
        if sys::byte_is_held(file, DOES + n)? {
            return Ok(Some("another program writes to it (stop it, or add share to both)"));
        }
    }
    Ok(None)
}
