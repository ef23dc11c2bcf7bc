//! `file:`, a regular file or a block device as a backend.
//!
//! [`File`] opens it, determines its properties, and locks it against other writers. [`FileNode`] serves
//! one hardware queue. The kind of file determines where an operation is done:
//!
//! | file | reads | writes |
//! |---|---|---|
//! | memory (tmpfs, ramfs, hugetlbfs) | inline | inline |
//! | buffered | inline when cached, otherwise the ring | inline while they return at once, otherwise the ring |
//! | direct | the ring | the ring |
//!
//! *Invariant:* after a failed flush, no flush and no write succeeds on this [`FileState`].
//! *Invariant:* a request succeeds only when all of its bytes were moved; short transfers are continued.

mod batched;
mod change;
mod clear;
mod container;
mod direct;
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
pub use facts::{Alignment, Facts, FileState};
pub use node::FileNode;
pub use open::File;
pub use spec::{Direct, FileSpec, OpenError};
