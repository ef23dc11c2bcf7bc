//! The server's side: the handshake, and the rules for requests.
//!
//! A [`Handshake`] is fed with bytes and a [`Catalogue`] until it is `Ready`; then [`check`] translates each
//! request to the block layer's terms, or refuses it.

mod handshake;
mod meta;
mod options;
mod rules;

pub use handshake::{
    Closed, Config, Handshake, MAX_HANDSHAKE_BYTES, MAX_OPTION_BYTES, MAX_OPTIONS, Step, TlsMode,
};
pub use rules::{Accepted, Refused, Submission, check, status_query};

use super::export::{ExportId, ExportInfo};

/// The exports that a client can request during a handshake.
///
/// Results reflect the current state: an export may change between an `INFO` and a `GO`.
pub trait Catalogue {
    /// Calls `each` with name and description of every export that may be listed.
    fn list(&self, each: &mut dyn FnMut(&str, &str));

    /// Finds the export with exactly this name.
    fn look_up(&self, name: &str) -> Option<Found>;

    /// Returns the name of the export that the empty name stands for: if there is only one export, that
    /// one.
    fn default_export(&self) -> Option<String>;

    /// Returns why a client may not use an existing export, for example because of a connection limit, or
    /// `None` if it may.
    fn refusal(&self, found: &Found) -> Option<&'static str> {
        let _ = found;
        None
    }

    /// Finds the export for a requested name, which may be empty.
    fn resolve(&self, name: &str) -> Option<Found> {
        self.look_up(name).or_else(|| {
            let default = if name.is_empty() { self.default_export() } else { None };
            self.look_up(&default?)
        })
    }
}

/// An export of a catalogue.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Found {
    /// The export's number in the catalogue.
    pub id: ExportId,
    /// Canonical name.
    pub name: String,
    /// Description of the export.
    pub info: ExportInfo,
}

/// A catalogue in the form of a list. The empty name stands for its only export.
impl Catalogue for Vec<Found> {
    fn list(&self, each: &mut dyn FnMut(&str, &str)) {
        for export in self {
            each(&export.name, &export.info.description);
        }
    }

    fn look_up(&self, name: &str) -> Option<Found> {
        self.iter().find(|export| export.name == name).cloned()
    }

    fn default_export(&self) -> Option<String> {
        match self.as_slice() {
            [only] => Some(only.name.clone()),
            _ => None,
        }
    }
}
