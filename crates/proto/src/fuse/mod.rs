//! FUSE, for a file system that is one regular file: requests as the kernel sends them, and replies to them.
//!
//! Bytes in, meaning out, and back; who owns `/dev/fuse` carries them. The one inode is the root, a regular
//! file mounted on a file. Operations on names and folders never come for such a root, and are refused like
//! everything else that has no meaning for it.
//!
//! *Invariant:* the structures are the kernel's, so the byte order is the machine's own. Nothing that the
//! kernel sends panics here, and flags that are not known are neither asked for nor minded.

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

/// The root's number, and so that of the file.
pub const ROOT: u64 = 1;
