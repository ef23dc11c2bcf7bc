//! The error of a measurement.

use std::path::Path;

/// An error message for the user.
#[derive(Debug)]
pub(crate) struct Error(pub(crate) String);

pub(crate) type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// Adds the path to an I/O error.
    pub(crate) fn at(what: &Path) -> impl FnOnce(std::io::Error) -> Self + use<> {
        let what = what.display().to_string();
        move |error| Self(format!("{what}: {error}"))
    }
}
