//! What ends a measurement.

use std::path::Path;

/// What went wrong, in words for the person at the terminal.
#[derive(Debug)]
pub(crate) struct Error(pub(crate) String);

pub(crate) type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// Names the thing that an I/O error is about.
    pub(crate) fn at(what: &Path) -> impl FnOnce(std::io::Error) -> Self + use<> {
        let what = what.display().to_string();
        move |error| Self(format!("{what}: {error}"))
    }
}
