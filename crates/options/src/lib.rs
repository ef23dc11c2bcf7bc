//! The grammar in which users describe a part of a device: `kind,key=value,flag`.
//!
//! A description is a text of items with commas between them. A comma that belongs to a path or a value is written twice,
//! as QEMU has it: `file:odd,,name.img,ro`. A driver reads its own options with [`Options`], and writes itself back with
//! [`Escaped`], [`write_flag`] and [`write_choice`] as the shortest text that reads as itself.
//!
//! Nothing here opens or looks at a file.

#![forbid(unsafe_code)]

mod items;
mod nearest;
mod time;
mod write;

pub use items::{Escaped, Options, split};
pub use nearest::nearest;
pub use time::{format_time, parse_time};
pub use write::{write_choice, write_flag};

/// Why a description is refused, and what to write instead.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{why} ({fix})")]
pub struct SpecError {
    /// What is wrong.
    pub why: String,
    /// What to do about it.
    pub fix: String,
}

impl SpecError {
    /// An error from its two halves.
    pub fn new(why: impl Into<String>, fix: impl Into<String>) -> SpecError {
        SpecError { why: why.into(), fix: fix.into() }
    }
}
