//! Where and how a device is shown: `--nbd unix:PATH | tcp:HOST:PORT`, TLS.

use super::SpecError;
use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

/// NBD's port, as IANA assigned it.
pub const NBD_PORT: u16 = 10809;

/// Where an NBD listener listens.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub enum NbdAddress {
    /// A Unix socket.
    Unix(PathBuf),
    /// TCP.
    Tcp {
        /// A name or an address, without the brackets of IPv6. Empty: every address of this host.
        host: String,
        /// The port; 0: any that is free.
        port: u16,
    },
}

impl FromStr for NbdAddress {
    type Err = SpecError;

    /// `unix:PATH`, `tcp:HOST:PORT`, `tcp:HOST`, `tcp::PORT`, `tcp:[::1]:PORT`.
    fn from_str(text: &str) -> Result<NbdAddress, SpecError> {
        if let Some(path) = text.strip_prefix("unix:") {
            return parse_unix(path);
        }
        let Some(address) = text.strip_prefix("tcp:") else {
            return Err(SpecError::new(
                format!("\"{text}\" is not where an NBD server listens"),
                "write unix:PATH or tcp:HOST:PORT",
            ));
        };
        let (host, port) = match address.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
            Some((host, "")) => (host, None),
            Some((host, rest)) => (host, rest.strip_prefix(':').or(Some(rest))),
            None => match address.rsplit_once(':') {
                Some((host, _)) if host.contains(':') => {
                    return Err(SpecError::new(
                        format!("\"{address}\": an IPv6 address and its port cannot be told apart"),
                        "write tcp:[ADDRESS]:PORT",
                    ));
                }
                Some((host, port)) => (host, Some(port)),
                None => (address, None),
            },
        };
        let port = match port {
            None => NBD_PORT,
            Some(port) => port.parse().map_err(|_| {
                SpecError::new(format!("\"{port}\" is not a port"), format!("for example {NBD_PORT}"))
            })?,
        };
        if host.contains(['/', ' ', '[', ']']) {
            return Err(SpecError::new(
                format!("\"{host}\" is not a host"),
                "write a name, an IPv4 address or an [IPv6 address]; for a path, unix:PATH",
            ));
        }
        Ok(NbdAddress::Tcp { host: host.to_owned(), port })
    }
}

fn parse_unix(path: &str) -> Result<NbdAddress, SpecError> {
    // sun_path holds 108 bytes, the last one 0.
    const PATH_MAX: usize = 107;
    match path.len() {
        0 => Err(SpecError::new("the socket has no path", "write unix:PATH")),
        1..=PATH_MAX => Ok(NbdAddress::Unix(PathBuf::from(path))),
        len => Err(SpecError::new(
            format!("the path has {len} bytes; a Unix socket's may have {PATH_MAX}"),
            "use a shorter path",
        )),
    }
}

impl fmt::Display for NbdAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            NbdAddress::Unix(path) => write!(f, "unix:{}", path.display()),
            NbdAddress::Tcp { host, port } => write!(f, "tcp:{}:{port}", bracketed(host)),
        }
    }
}

fn bracketed(host: &str) -> String {
    if host.contains(':') { format!("[{host}]") } else { host.to_owned() }
}

/// The URI under which a client finds an export: `nbd+unix:///disk?socket=/run/disk.sock`,
/// `nbd://localhost:10809/disk`; with `nbds` when TLS is required.
pub fn nbd_uri(address: &NbdAddress, export: &str, tls: TlsMode) -> String {
    let scheme = if tls == TlsMode::Require { "nbds" } else { "nbd" };
    let export = percent_encoded(export);
    match address {
        NbdAddress::Unix(path) => {
            format!("{scheme}+unix:///{export}?socket={}", percent_encoded(&path.to_string_lossy()))
        }
        NbdAddress::Tcp { host, port } => {
            let host = if host.is_empty() { "localhost".to_owned() } else { bracketed(host) };
            format!("{scheme}://{host}:{port}/{export}")
        }
    }
}

/// RFC 3986: unreserved characters and the `/` and `:` that path and query allow stay.
fn percent_encoded(text: &str) -> String {
    let mut encoded = String::with_capacity(text.len());
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() || b"-._~/:@+,".contains(&byte) {
            encoded.push(byte as char);
        } else {
            encoded.push_str(&format!("%{byte:02X}"));
        }
    }
    encoded
}

/// Whether clients use TLS.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub enum TlsMode {
    /// Never offered.
    #[default]
    Off,
    /// Offered; a client in plaintext is served as well.
    On,
    /// A client that does not start TLS is refused.
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

/// TLS of a listener. The files have the names that nbdkit, qemu-nbd and libvirt use:
/// `server-cert.pem`, `server-key.pem`, `ca-cert.pem`.
#[derive(Clone, Default, PartialEq, Eq, Debug)]
pub struct TlsSpec {
    /// Whether clients use it.
    pub mode: TlsMode,
    /// The directory of the certificates. Always there unless the mode is off.
    pub certificates: Option<PathBuf>,
    /// Clients must show a certificate that `ca-cert.pem` signed.
    pub verify_peer: bool,
}

impl TlsSpec {
    /// Checks that the options agree. Certificates and `verify_peer` make sense with TLS only, so without a `mode` they
    /// mean [`TlsMode::Require`]: no client in plaintext gets past them.
    ///
    /// # Errors
    /// TLS without certificates; certificates with TLS off; or clients to be verified, of which a `mode` of
    /// [`TlsMode::On`] would let those in plaintext in unverified.
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

    /// The certificate chain, the key, and with `verify_peer` the authority; none when TLS is off.
    pub fn files(&self) -> Option<(PathBuf, PathBuf, Option<PathBuf>)> {
        let directory: &Path = self.certificates.as_deref().filter(|_| self.mode != TlsMode::Off)?;
        let authority = self.verify_peer.then(|| directory.join("ca-cert.pem"));
        Some((directory.join("server-cert.pem"), directory.join("server-key.pem"), authority))
    }
}
