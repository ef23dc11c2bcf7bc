//! The kernel's loop driver: binding a file to a loop device, letting it go, and who is in the way.
//!
//! [`attach`], [`detach`] and [`set_capacity`] wait for I/O on the file. When that is a FUSE file of ours they run in
//! a process of their own, never in the one that answers: killed while one of its threads waits for itself, it could
//! neither answer nor die. What is only read from `/sys` and `/proc` waits for nobody.
//!
//! Source: `include/uapi/linux/loop.h`, `drivers/block/loop.c`. *Invariant:* `unsafe` is in `sys.rs`.

#![deny(unsafe_code)]

mod device;
mod sys;
mod users;

pub use device::{
    Bound, LoopError, Request, attach, backing_file, bound_to, check_unused, detach, flush_cache,
    is_available, remove, reread_partitions, set_capacity,
};
pub use users::{User, is_used, users};

/// The path of a loop device.
pub fn path(number: u32) -> std::path::PathBuf {
    format!("/dev/loop{number}").into()
}
