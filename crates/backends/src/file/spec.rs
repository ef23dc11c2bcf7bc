//! Options of a file, and reasons why it cannot be served.

use block::Bytes;
use serde::{Deserialize, Serialize};
use std::io;
use std::path::PathBuf;

/// Whether to bypass the host's page cache.
///
/// `Auto` means direct for block devices, if possible, and buffered for regular files. The client of a
/// whole disk has its own cache, and a second copy in the host only takes memory. An image is mostly served
/// faster from the page cache than from any disk, and the file system orders its holes and allocations;
/// losetup, nbdkit and qemu-nbd are also buffered by default.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Direct {
    /// Always bypass it; opening the file fails if that is impossible.
    On,
    /// Never bypass it.
    Off,
    /// Bypass it if that is possible and probably better.
    #[default]
    Auto,
}

/// `file:PATH`: a file or a block device as a raw disk.
#[derive(Clone, Default, PartialEq, Eq, Debug)]
pub struct FileSpec {
    /// A regular file or a block device.
    pub path: PathBuf,
    /// Whether to bypass the page cache.
    pub direct: Direct,
    /// Offset of the device in the file: any byte, as with loop devices.
    pub offset: Bytes,
    /// Maximum length of the device; `None` or 0 means up to the file's end (LOOP-1).
    pub sizelimit: Option<Bytes>,
    /// Logical block size in bytes: a power of two from 512 to 65536. `None` selects 512, or the size that
    /// direct I/O or the block device requires (LOOP-7).
    pub block: Option<u32>,
    /// Whether to refuse writes, and open the file read-only.
    pub ro: bool,
    /// Create the file with this size if it is missing; an existing file must have this size, and keeps its
    /// content.
    pub create: Option<Bytes>,
    /// Whether other programs may write to the file at the same time.
    pub share: bool,
    /// Whether writes are durable when they complete (`O_DSYNC`), so that the device has no volatile write
    /// cache.
    pub sync: bool,
    /// Whether the format is unspecified, so that the file is refused if it begins with the header of
    /// another format, and clients cannot write such a header to it.
    pub stays_raw: bool,
}

impl FileSpec {
    /// Creates options for a whole file, for reading and writing.
    pub fn new(path: impl Into<PathBuf>) -> FileSpec {
        FileSpec { path: path.into(), ..FileSpec::default() }
    }
}

/// Reasons why a file cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// A system call failed.
    #[error("{doing} {} failed: {source}{hint}", path.display())]
    Call {
        /// The failed action: `opening`, `creating` …
        doing: &'static str,
        /// The file.
        path: PathBuf,
        /// Error of the kernel.
        source: io::Error,
        /// Advice for the user, in parentheses, or empty.
        hint: &'static str,
    },
    /// The options do not fit the file.
    #[error("{}: {why}", path.display())]
    Refused {
        /// The file.
        path: PathBuf,
        /// The reason, and what to do.
        why: String,
    },
    /// Another process or device uses the file.
    #[error("{} is in use: {why}", path.display())]
    InUse {
        /// The file.
        path: PathBuf,
        /// The user, if known, and what to do.
        why: &'static str,
    },
}

impl OpenError {
    pub(super) fn call(doing: &'static str, spec: &FileSpec, source: io::Error) -> OpenError {
        let hint = match source.raw_os_error() {
            // With `ro` a missing file is not created.
            Some(libc::ENOENT) if spec.ro => " (give the path of an existing file)",
            Some(libc::ENOENT) if spec.create.is_none() => {
                " (give the path of an existing file, or add create and size)"
            }
            Some(libc::ENOENT) => " (make its directory first)",
            Some(libc::EACCES | libc::EPERM) if !spec.ro => " (change its owner or mode, or add ro)",
            Some(libc::EISDIR) => " (give the path of a regular file or a block device)",
            Some(libc::ENOTDIR) => " (a part of its path is a file: give another)",
            Some(libc::EROFS) => " (add ro)",
            Some(libc::ENOSPC | libc::EDQUOT) => " (free some space)",
            Some(libc::EFBIG) => " (the file system does not hold files of that size)",
            _ => "",
        };
        OpenError::Call { doing, path: spec.path.clone(), source, hint }
    }

    pub(super) fn refused(spec: &FileSpec, why: impl Into<String>) -> OpenError {
        OpenError::Refused { path: spec.path.clone(), why: why.into() }
    }
}
