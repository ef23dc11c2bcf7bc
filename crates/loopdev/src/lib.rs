//! The kernel's loop driver: binding files to loop devices, unbinding them, and finding users of a device.
//!
//! [`attach`], [`detach`] and [`set_capacity`] wait for I/O on the file. When that is a FUSE file of ours,
//! they run in a separate process, never in the one that serves the file: if that were killed while one of
//! its threads waits for itself, it could neither serve nor die. Functions that only read `/sys` and `/proc`
//! do not wait.
//!
//! Source: `include/uapi/linux/loop.h`, `drivers/block/loop.c`. *Invariant:* `unsafe` is in `sys.rs`.

#![deny(unsafe_code)]

mod device;
mod sys;
mod users;

pub use device::{
    Bound, CONTROL, LoopError, Request, attach, backing_file, bound_to, check_unused, detach, flush_cache,
    remove, reread_partitions, set_capacity,
};
pub use users::{User, is_used, stacked_on, users};

/// The path of a loop device.
pub fn path(number: u32) -> std::path::PathBuf {
    format!("/dev/loop{number}").into()
}
