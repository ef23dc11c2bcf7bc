//! FUSE for a file system that is a single regular file: parses requests, encodes replies.
//!
//! This module does no I/O: the owner of `/dev/fuse` reads and writes it. The only inode is the root, a
//! regular file mounted on a file. For such a root the kernel sends no operations on names and directories;
//! these are refused, like all operations that do not apply.
//!
//! *Invariant:* the structures are the kernel's, in native byte order. Nothing that the kernel sends causes a
//! panic, and unknown flags are neither requested nor refused.

mod call;
mod entry;
pub mod fuzzing;
mod init;
mod reply;
pub mod wire;

pub use call::{Call, Change, Header, Malformed, Seek, Transfer};
pub use entry::{Arrival, command, put_answer};
pub use init::{Agreement, Offer, negotiate};
pub use reply::{
    Attributes, INIT_OUT_LEN, REPLY_LEN_MAX, StatFs, put_attributes, put_end, put_init, put_inval_inode,
    put_number, put_open, put_statfs, put_written,
};

/// Inode number of the root, and so of the file.
pub const ROOT: u64 = 1;
