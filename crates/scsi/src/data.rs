//! Commands that read and write the medium: SBC-4 chapter 5.

mod atomic;
mod fill;
mod lba_status;
mod range;
mod transfer;
mod verify;

pub(crate) use atomic::{compare_and_write, or_write};
pub(crate) use fill::{unmap, unmap_begin, write_same};
pub(crate) use lba_status::lba_status;
pub(crate) use range::failed_at;
pub(crate) use transfer::{fast, prefetch, read, seek, synchronize, write};
pub(crate) use verify::{verify, write_verify};
