//! FUSE's door to the kernel: opening `/dev/fuse`, mounting it on a file, and finding such mounts again.
//!
//! A file system of ours is one regular file, so its mount point is one, too. As root we mount it ourselves;
//! others ask `fusermount3`, which may do so for them on a file of theirs. Who serves a mount reads from and
//! writes to the descriptor that came of it, or clones of it; that is not done here.
//!
//! Used by the control plane, on any thread. *Invariant:* `unsafe` is in `sys.rs`, where the three calls to
//! `ioctl` are.

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

/// The file through which FUSE is spoken.
pub const DEVICE: &str = "/dev/fuse";
