//! What is asked of a file, and why it may not be had.

use block::Bytes;
use std::io;
use std::path::PathBuf;
use std::str::FromStr;

/// Whether to go past the host's page cache.
///
/// `Auto` is direct for block devices, where it works, and buffered for regular files. Who serves a whole
/// disk has a client that caches: a second copy in the host only takes memory. An image is mostly served
/// from the page cache faster than from any disk, its holes and allocations are the file system's to order,
/// and it is what losetup, nbdkit and qemu-nbd do unless told otherwise.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub enum Direct {
    /// Or fail.
    On,
    /// Never.
    Off,
    /// Where it is both possible and likely to be better.
    #[default]
    Auto,
}

impl FromStr for Direct {
    type Err = &'static str;

    fn from_str(word: &str) -> Result<Direct, Self::Err> {
        match word {
            "on" => Ok(Direct::On),
            "off" => Ok(Direct::Off),
            "auto" => Ok(Direct::Auto),
            _ => Err("direct= is on, off or auto"),
        }
    }
}

/// What is asked for.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct FileSpec {
    /// A regular file or a block device.
    pub path: PathBuf,
    /// Whether to go past the page cache.
    pub direct: Direct,
    /// Where in the file the device begins.
    pub offset: Bytes,
    /// How long it is at most; `None` or 0: up to the file's end (LOOP-1).
    pub sizelimit: Option<Bytes>,
    /// Its logical block size: 512 to 65536, a power of two. `None`: 512, or what direct I/O or the block
    /// device needs (LOOP-7).
    pub block: Option<u32>,
    /// Refuse writes, and open the file so.
    pub read_only: bool,
    /// Make the file if there is none; one that is there must have the size asked for, and keeps its content.
    pub create: bool,
    /// How long a file that is made shall be. Only with `create`.
    pub size: Option<Bytes>,
    /// Let others write to it at the same time.
    pub share: bool,
    /// Nobody said that it is a raw disk: refuse it when it begins as an image of another format, and keep clients from
    /// making it one.
    pub stays_raw: bool,
}

impl FileSpec {
    /// The file as it is, all of it, to read and write.
    pub fn new(path: impl Into<PathBuf>) -> FileSpec {
        FileSpec {
            path: path.into(),
            direct: Direct::Auto,
            offset: Bytes::ZERO,
            sizelimit: None,
            block: None,
            read_only: false,
            create: false,
            size: None,
            share: false,
            stays_raw: false,
        }
    }
}

/// Why a file cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// Some call on it failed.
    #[error("{doing} {} failed: {source}{hint}", path.display())]
    Call {
        /// What was being done: `opening`, `creating` …
        doing: &'static str,
        /// The file.
        path: PathBuf,
        /// What the kernel said.
        source: io::Error,
        /// What to do about it, in parentheses, or nothing.
        hint: &'static str,
    },
    /// What was asked for cannot be done with it.
    #[error("{}: {why}", path.display())]
    Refused {
        /// The file.
        path: PathBuf,
        /// Why not, and what to do.
        why: String,
    },
    /// Someone else uses it.
    #[error("{} is in use: {why}", path.display())]
    InUse {
        /// The file.
        path: PathBuf,
        /// By whom as far as is known, and what to do.
        why: &'static str,
    },
}

impl OpenError {
    pub(super) fn call(doing: &'static str, spec: &FileSpec, source: io::Error) -> OpenError {
        let hint = match source.raw_os_error() {
            // What is only read is not made.
            Some(libc::ENOENT) if spec.read_only => " (give the path of a file that is there)",
            Some(libc::ENOENT) if !spec.create => {
                " (give the path of a file that is there, or have it made with create)"
            }
            Some(libc::ENOENT) => " (make its directory first)",
            Some(libc::EACCES | libc::EPERM) if !spec.read_only => " (change its owner or mode, or add ro)",
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
