//! `nbd:URI[,timeout=TIME][,reconnect=TIME][,ro]`: an export of an NBD server.

use super::{DeviceName, SpecError};
use options::{Escaped, OptionRow, Options};
use options::{format_time, parse_time};
use proto::nbd::Uri;
use proto::nbd::uri::Server;
use std::fmt;
use std::path::Path;
use std::time::Duration;

/// The default of `timeout`: the kernel's timeout of a disk request.
pub const NBD_TIMEOUT_DEFAULT: Duration = Duration::from_secs(30);
/// The default of `reconnect`.
pub const NBD_RECONNECT_DEFAULT: Duration = Duration::from_secs(30);

/// An export of an NBD server, as a backend.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct NbdSpec {
    /// The URI of the export, with the parameters of TLS.
    pub uri: Uri,
    /// How long a server may stay silent while requests are in flight before its connection is closed; `None`: without end.
    /// Never 0.
    pub timeout: Option<Duration>,
    /// How long requests wait for a new connection; 0: they fail at once.
    pub reconnect: Duration,
    /// Whether the device is read-only.
    pub ro: bool,
}

/// The options of `nbd:`.
pub(super) const OPTIONS: &[OptionRow] = &[
    OptionRow::value(
        "timeout",
        "TIME",
        "30s",
        "close a connection whose server leaves requests unanswered for so long; 0: never",
    ),
    OptionRow::value(
        "reconnect",
        "TIME",
        "30s",
        "how long requests wait for a new connection, on which they are sent again; 0: they fail",
    ),
    OptionRow::flag("ro", "read-only"),
];

impl NbdSpec {
    pub(super) fn parse(what: &str, items: impl Iterator<Item = String>) -> Result<NbdSpec, SpecError> {
        let mut options = Options::new("nbd", OPTIONS, items)?;
        let fix = "write nbd:nbd+unix:///EXPORT?socket=PATH or nbd:nbd://HOST:PORT/EXPORT; nbds for TLS";
        let uri: Uri = what.parse().map_err(|why| SpecError::new(format!("{why}"), fix))?;
        if uri.user.is_some() {
            return Err(SpecError::new("a user is for keys that both sides know", "leave it out of the URI"));
        }
        if let Some((name, _)) = uri.params.iter().find(|(name, _)| name.starts_with("tls-") && !uri.tls) {
            let why = format!("{name} needs TLS, and the URI's scheme has none");
            return Err(SpecError::new(why, "write nbds: or nbds+unix:, or leave it out"));
        }
        let time = |text: Option<String>| text.map(|text| parse_time(&text)).transpose();
        let timeout = time(options.text("timeout")?)?.unwrap_or(NBD_TIMEOUT_DEFAULT);
        Ok(NbdSpec {
            uri,
            timeout: Some(timeout).filter(|time| !time.is_zero()),
            reconnect: time(options.text("reconnect")?)?.unwrap_or(NBD_RECONNECT_DEFAULT),
            ro: options.flag("ro")?,
        })
    }

    /// Returns the name for a device without a given one: the name of the export.
    pub(super) fn derived_name(&self) -> DeviceName {
        DeviceName::nearest(&self.uri.export, "nbd")
    }

    /// Resolves a relative socket path against `base`.
    pub(super) fn rooted(&mut self, base: &Path) {
        if let Server::Unix(path) = &mut self.uri.server
            && !path.as_os_str().as_encoded_bytes().starts_with(b"\0")
        {
            *path = base.join(&path);
        }
    }
}

impl fmt::Display for NbdSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "nbd:{}", Escaped(&self.uri.to_string()))?;
        if self.timeout != Some(NBD_TIMEOUT_DEFAULT) {
            write!(f, ",timeout={}", format_time(self.timeout.unwrap_or_default()))?;
        }
        if self.reconnect != NBD_RECONNECT_DEFAULT {
            write!(f, ",reconnect={}", format_time(self.reconnect))?;
        }
        f.write_str(if self.ro { ",ro" } else { "" })
    }
}
