//! The server's half: the handshake, and the rules that a request is held to.
//!
//! A [`Handshake`] is fed with bytes and a [`Catalogue`] until it is `Ready`; then [`check`] says of
//! every request what to do, in the words of the block layer.

mod handshake;
mod meta;
mod options;
mod rules;

pub use handshake::{
    Closed, Config, Handshake, MAX_HANDSHAKE_BYTES, MAX_OPTION_BYTES, MAX_OPTIONS, Step, TlsMode,
};
pub use rules::{Accepted, Order, Refused, check, status_query};

use super::export::{ExportId, ExportInfo};

/// What a server can be asked for during a handshake.
///
/// Implemented by whoever knows the exports. Answers are taken as they are at that moment: an
/// export may change between an `INFO` and a `GO`.
pub trait Catalogue {
    /// Every export that may be listed: its name and description.
    fn list(&self, each: &mut dyn FnMut(&str, &str));

    /// The export of exactly this name.
    fn look_up(&self, name: &str) -> Option<Found>;

    /// The name of the export that the empty name stands for, if any: that of the only one.
    fn default_export(&self) -> Option<String>;

    /// Why a client may not use an export that there is, as when too many do; none: it may.
    fn refusal(&self, found: &Found) -> Option<&'static str> {
        let _ = found;
        None
    }

    /// The export that a client means by `name`.
    fn resolve(&self, name: &str) -> Option<Found> {
        self.look_up(name).or_else(|| {
            let default = if name.is_empty() { self.default_export() } else { None };
            self.look_up(&default?)
        })
    }
}

/// An export that was found.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Found {
    /// The catalogue's number for it.
    pub id: ExportId,
    /// Its canonical name.
    pub name: String,
    /// What it is.
    pub info: ExportInfo,
}

/// A catalogue that is a list. The empty name stands for the only export.
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
