//! `file:`, a regular file or a block device.
//!
//! [`File`] opens it, finds out what it is, and keeps others from writing to it. [`FileNode`] serves one
//! hardware queue. Where a request is done depends on what the file is:
//!
//! | file | reads | writes |
//! |---|---|---|
//! | memory (tmpfs, ramfs, hugetlbfs) | in place | in place |
//! | buffered | in place when cached, else the ring | in place while they return at once, else the ring |
//! | direct | the ring | the ring |
//!
//! *Invariant:* after a flush that failed, no flush and no write succeeds on this [`Shared`].
//! *Invariant:* a request ends `Ok` only when all of its bytes were moved: short transfers are finished.

mod change;
mod clear;
mod container;
mod direct;
mod exclusive;
mod extents;
mod facts;
mod head;
mod limits;
mod lock;
mod node;
mod open;
mod pace;
mod spec;
pub(crate) mod sys;
#[cfg(test)]
mod tests;

pub use container::{Content, HEAD_LEN, container, content, instead_of_image};
pub use facts::{Alignment, Facts, Shared};
pub use node::FileNode;
pub use open::File;
pub use spec::{Direct, FileSpec, OpenError};
