//! TLS of an NBD listener.

use crate::SpecError;
use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

/// Whether clients use TLS.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub enum TlsMode {
    /// TLS is not offered.
    #[default]
    Off,
    /// TLS is offered; clients in plaintext are served as well.
    On,
    /// Clients that do not start TLS are refused.
    Require,
}

impl FromStr for TlsMode {
    type Err = SpecError;

    fn from_str(text: &str) -> Result<TlsMode, SpecError> {
        match text {
            "off" => Ok(TlsMode::Off),
            "on" => Ok(TlsMode::On),
            "require" => Ok(TlsMode::Require),
            _ => Err(SpecError::new(format!("TLS cannot be \"{text}\""), "use off, on or require")),
        }
    }
}

impl fmt::Display for TlsMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            TlsMode::Off => "off",
            TlsMode::On => "on",
            TlsMode::Require => "require",
        })
    }
}

/// TLS settings of a listener. The files have the names that nbdkit, qemu-nbd and libvirt use: `server-cert.pem`,
/// `server-key.pem`, `ca-cert.pem`.
#[derive(Clone, Default, PartialEq, Eq, Debug)]
pub struct TlsSpec {
    /// Whether clients may or must use TLS.
    pub mode: TlsMode,
    /// The directory of the certificates; `None` only if the mode is off.
    pub certificates: Option<PathBuf>,
    /// Whether clients need a certificate that `ca-cert.pem` signed.
    pub verify_peer: bool,
}

impl TlsSpec {
    /// Creates settings whose options agree. Certificates and `verify_peer` are useless without TLS, so they imply
    /// [`TlsMode::Require`] where no `mode` is given: no client in plaintext gets past them.
    ///
    /// # Errors
    /// TLS is on without certificates, certificates are given with TLS off, or `verify_peer` is given with [`TlsMode::On`],
    /// which would accept clients in plaintext unverified.
    pub fn new(
        mode: Option<TlsMode>,
        certificates: Option<PathBuf>,
        verify_peer: bool,
    ) -> Result<TlsSpec, SpecError> {
        let implied = if certificates.is_some() || verify_peer { TlsMode::Require } else { TlsMode::Off };
        let mode = mode.unwrap_or(implied);
        match (mode, &certificates) {
            (TlsMode::On | TlsMode::Require, None) => Err(SpecError::new(
                format!("TLS is {mode}, and there are no certificates"),
                "name the directory of server-cert.pem and server-key.pem with tls-certificates",
            )),
            (TlsMode::Off | TlsMode::On, _) if verify_peer => Err(SpecError::new(
                format!("tls-verify-peer with tls {mode} would let clients in that show no certificate"),
                "use tls require, which tls-verify-peer implies, or leave out tls-verify-peer",
            )),
            (TlsMode::Off, Some(_)) => Err(SpecError::new(
                "tls-certificates is given, and TLS is off",
                "leave out tls-certificates, or use tls require or on",
            )),
            _ => Ok(TlsSpec { mode, certificates, verify_peer }),
        }
    }

    /// Returns the paths of the certificate chain, the key, and with `verify_peer` the authority; `None` when TLS is off.
    pub fn files(&self) -> Option<(PathBuf, PathBuf, Option<PathBuf>)> {
        let directory: &Path = self.certificates.as_deref().filter(|_| self.mode != TlsMode::Off)?;
        let authority = self.verify_peer.then(|| directory.join("ca-cert.pem"));
        Some((directory.join("server-cert.pem"), directory.join("server-key.pem"), authority))
    }
}
