//! The grammar of descriptions, in which users describe a part of a device: `kind,key=value,flag`.
//!
//! A description is a text of comma-separated items. A comma that belongs to a path or a value is doubled, as in QEMU:
//! `file:odd,,name.img,ro`. Each driver describes its options with [`OptionRow`]s, parses them with [`Options`], and formats
//! them with [`Escaped`], [`write_flag`] and [`write_choice`] as the shortest text that parses to the same options.
//!
//! Nothing here opens a file.

#![forbid(unsafe_code)]

mod items;
mod nearest;
mod row;
mod time;
mod write;

pub use items::{Escaped, Options, split};
pub use nearest::did_you_mean;
pub use row::{Key, OptionRow};
pub use time::{format_time, parse_time};
pub use write::{write_choice, write_flag};

/// The error for an invalid description: the problem and a correction.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{why} ({fix})")]
pub struct SpecError {
    /// The problem, as a clause.
    pub why: String,
    /// The correction, which the message shows in brackets.
    pub fix: String,
}

impl SpecError {
    /// Creates an error from the problem and a correction.
    pub fn new(why: impl Into<String>, fix: impl Into<String>) -> SpecError {
        SpecError { why: why.into(), fix: fix.into() }
    }
}
