//! The kernel side of FUSE: opening `/dev/fuse`, mounting it on a file, and finding such mounts again.
//!
//! Our file systems are single regular files, so their mount points are files, too. As root we mount
//! directly; other users run `fusermount3`, which mounts on a file of theirs. Requests are read from the
//! descriptor of a mount, or clones of it; that is not done here.
//!
//! Used by the control plane, on any thread. *Invariant:* `unsafe` is in `sys.rs`, with the three calls of
//! `ioctl`.

#![deny(unsafe_code)]

mod abort;
mod fusermount;
mod mount;
mod mounts;
mod sys;

pub use abort::{abort, can_abort};
pub use mount::{Mount, MountError, MountOptions, is_covered, is_dead, unmount};
pub use mounts::{FS_TYPE, Mounted, SOURCE_PREFIX, mounts, parse_mountinfo};
pub use sys::{backing_close, backing_open, clone_descriptor};

/// The FUSE device.
pub const DEVICE: &str = "/dev/fuse";
