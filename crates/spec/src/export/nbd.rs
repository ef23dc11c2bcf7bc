//! `--nbd unix:PATH | tcp:HOST:PORT`: an export to NBD clients.

use super::{Conflict, ExportFile, ExportOptions, ExportRow, FileAccess, TlsMode, TlsSpec};
use crate::{DeviceName, SpecError};
use options::OptionRow;
use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

/// NBD's port, as IANA assigned it.
pub const NBD_PORT: u16 = 10809;

/// The address of an NBD listener.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub enum NbdAddress {
    /// A Unix socket.
    Unix(PathBuf),
    /// A TCP address.
    Tcp {
        /// A host name or an IP address, without the brackets of IPv6. Empty: every address of this host.
        host: String,
        /// The port; 0: any free port.
        port: u16,
    },
}

impl FromStr for NbdAddress {
    type Err = SpecError;

    /// Parses `unix:PATH`, `tcp:HOST:PORT`, `tcp:HOST`, `tcp::PORT`, `tcp:[::1]:PORT`.
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
        let (host, port) = parse_tcp(address, NBD_PORT)?;
        Ok(NbdAddress::Tcp { host, port })
    }
}

/// Parses `HOST:PORT`, `HOST`, `:PORT`, `[::1]:PORT`, `[::1]`. The host is returned without brackets.
pub(super) fn parse_tcp(address: &str, port_default: u16) -> Result<(String, u16), SpecError> {
    let (host, port) = match address.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        Some((host, "")) => (host, None),
        Some((host, rest)) => (host, rest.strip_prefix(':').or(Some(rest))),
        None => match address.rsplit_once(':') {
            Some((host, _)) if host.contains(':') => {
                return Err(SpecError::new(
                    format!("\"{address}\": an IPv6 address and its port cannot be distinguished"),
                    "write tcp:[ADDRESS]:PORT",
                ));
            }
            Some((host, port)) => (host, Some(port)),
            None => (address, None),
        },
    };
    let port = match port {
        None => port_default,
        Some(port) => port.parse().map_err(|_| {
            SpecError::new(format!("\"{port}\" is not a port"), format!("for example {port_default}"))
        })?,
    };
    if host.contains(['/', ' ', '[', ']']) {
        return Err(SpecError::new(
            format!("\"{host}\" is not a host"),
            "write a name, an IPv4 address or an [IPv6 address]; for a path, unix:PATH",
        ));
    }
    Ok((host.to_owned(), port))
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

pub(super) fn bracketed(host: &str) -> String {
    if host.contains(':') { format!("[{host}]") } else { host.to_owned() }
}

/// Returns the URI of an export: `nbd+unix:///disk?socket=/run/disk.sock`, `nbd://localhost:10809/disk`; with the scheme
/// `nbds` when TLS is required.
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

/// Percent-encodes a path or query (RFC 3986): unreserved characters, `/`, `:`, `@`, `+` and `,` stay.
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

/// Keys of an NBD export beside its address, as topologies name them. On a command line they are `--nbd-name`, `--tls`,
/// `--tls-certificates` and `--tls-verify-peer`.
pub const NBD_EXPORT_KEYS: &[OptionRow] = &[
    OptionRow::value("name", "NAME", "the device's", "the export name that clients ask for"),
    OptionRow::value(
        "tls",
        "off|on|require",
        "off; require with certificates",
        "whether clients use TLS; on also serves clients in plaintext",
    ),
    OptionRow::value(
        "tls-certificates",
        "DIR",
        "",
        "the directory of server-cert.pem, server-key.pem and ca-cert.pem; only its owner may read the key",
    ),
    OptionRow::flag("tls-verify-peer", "accept only clients with a certificate that ca-cert.pem signed"),
];

/// The options of an export that every transport to NBD clients has.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct NbdOptions {
    /// The export name that clients request.
    pub name: String,
    /// The TLS settings.
    pub tls: TlsSpec,
}

impl NbdOptions {
    /// Renames the export if its name is that of the device.
    pub fn device_renamed(&mut self, from: &DeviceName, to: &DeviceName) {
        if self.name == from.as_str() {
            self.name = to.to_string();
        }
    }

    /// Returns the certificate files, if TLS is on.
    pub fn files(&self) -> Vec<ExportFile> {
        let Some((chain, key, authority)) = self.tls.files() else { return Vec::new() };
        let file = |path, access| ExportFile { key: "tls-certificates", path, access };
        let mut files = vec![file(chain, FileAccess::Read), file(key, FileAccess::ReadKey)];
        files.extend(authority.map(|path| file(path, FileAccess::Read)));
        files
    }
}

/// An export to NBD clients.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct NbdExportSpec {
    /// The address at which the server listens.
    pub address: NbdAddress,
    /// The export name and TLS.
    pub options: NbdOptions,
}

impl fmt::Display for NbdExportSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.address)
    }
}

impl ExportOptions for NbdExportSpec {
    const ROW: ExportRow = ExportRow {
        kind: "nbd",
        value_name: "ADDRESS",
        value_optional: false,
        repeats: true,
        summary: "An NBD server at unix:PATH or tcp:HOST:PORT",
        usage: "--nbd unix:PATH | tcp:HOST:PORT",
        about: "an NBD server; several addresses may be given, and sockets that systemd passes are served, too. \
                --nbd-name, --tls, --tls-certificates, --tls-verify-peer and --nbd-limits belong to it",
        example: "blockyard serve file:disk.img --nbd unix:/tmp/disk.sock",
        options: &[],
        is_kernel_device: false,
        page: "nbd-server.md",
    };
    /// The export that is always possible comes last.
    const DEFAULT_RANK: Option<u8> = Some(2);

    fn parse(text: &str, nbd: &NbdOptions) -> Result<NbdExportSpec, SpecError> {
        Ok(NbdExportSpec { address: text.parse()?, options: nbd.clone() })
    }

    fn rooted(self, base: &Path) -> NbdExportSpec {
        let address = match self.address {
            NbdAddress::Unix(path) => NbdAddress::Unix(base.join(path)),
            tcp @ NbdAddress::Tcp { .. } => tcp,
        };
        NbdExportSpec { address, ..self }
    }

    fn address(&self) -> Option<String> {
        match &self.address {
            NbdAddress::Tcp { port: 0, .. } => None,
            address => Some(nbd_uri(address, &self.options.name, self.options.tls.mode)),
        }
    }

    fn device_renamed(&mut self, from: &DeviceName, to: &DeviceName) {
        self.options.device_renamed(from, to);
    }

    fn conflicts(&self, earlier: &NbdExportSpec, _is_same_device: bool) -> Vec<Conflict> {
        let NbdExportSpec { address, options } = self;
        let mut conflicts = Vec::new();
        if earlier.address != *address {
            return conflicts;
        }
        if earlier.options.name == options.name {
            let why = format!("{address} has an export \"{}\" already (give one another name)", options.name);
            conflicts.push(Conflict { key: "name", why });
        }
        if earlier.options.tls != options.tls {
            let why = format!("another export at {address} has other TLS settings (make them the same)");
            conflicts.push(Conflict { key: "tls", why });
        }
        conflicts
    }

    fn files(&self) -> Vec<ExportFile> {
        let socket = match &self.address {
            NbdAddress::Unix(path) => Some(path.clone()),
            NbdAddress::Tcp { .. } => None,
        };
        let socket = socket.map(|path| ExportFile { key: "nbd", path, access: FileAccess::Create });
        socket.into_iter().chain(self.options.files()).collect()
    }
}
