//! `nbd:URI[,timeout=TIME][,reconnect=TIME][,ro]`: an export of an NBD server.

use super::{DeviceName, SpecError};
use options::{Escaped, Options};
use options::{format_time, parse_time};
use proto::nbd::Uri;
use proto::nbd::uri::Server;
use std::fmt;
use std::path::Path;
use std::time::Duration;

/// How long a server may leave requests unanswered when nothing is said: what the kernel grants a disk.
pub const NBD_TIMEOUT_DEFAULT: Duration = Duration::from_secs(30);
/// How long requests wait for another connection when nothing is said.
pub const NBD_RECONNECT_DEFAULT: Duration = Duration::from_secs(30);

/// An export of a server.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct NbdSpec {
    /// Where it is, with what TLS needs.
    pub uri: Uri,
    /// A server that says nothing for so long while requests wait is given up; none: never. Never 0.
    pub timeout: Option<Duration>,
    /// How long requests wait for another connection; 0: they fail at once.
    pub reconnect: Duration,
    /// Not to be written.
    pub ro: bool,
}

impl NbdSpec {
    pub(super) fn parse(what: &str, items: impl Iterator<Item = String>) -> Result<NbdSpec, SpecError> {
        let mut options = Options::new("nbd", &["timeout", "reconnect", "ro"], items)?;
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

    /// A device is called as the export is.
    pub(super) fn derived_name(&self) -> DeviceName {
        DeviceName::nearest(&self.uri.export, "nbd")
    }

    /// A relative socket is taken from `base` on.
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
