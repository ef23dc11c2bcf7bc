//! NBD URIs: `nbd://host:port/export` and the other schemes (`doc/uri.md` of the NBD project).
//!
//! Schemes: `nbd` and `nbd+unix`, and `nbds` and `nbds+unix`, which require TLS. Fields hold decoded text;
//! printing encodes it again, so a printed URI parses to an equal one.

use std::ffi::OsString;
use std::fmt;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::PathBuf;
use std::str::FromStr;

use super::wire::{DEFAULT_PORT, MAX_STRING};

/// Address of a server.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Server {
    /// A TCP port.
    Tcp {
        /// Host name or address; an IPv6 address without brackets. Never empty.
        host: String,
        /// Port number.
        port: u16,
    },
    /// A Unix socket; a path that starts with a NUL is in the abstract namespace.
    Unix(PathBuf),
}

/// An NBD URI.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Uri {
    /// Address of the server.
    pub server: Server,
    /// Name of the export; empty for the default export.
    pub export: String,
    /// TLS is required.
    pub tls: bool,
    /// User name for TLS modes that need one.
    pub user: Option<String>,
    /// Other parameters in their original order: `tls-…` and `x-…`.
    pub params: Vec<(String, String)>,
}

/// The error for text that is not an NBD URI.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("\"{text}\" is not an NBD URI: {why}")]
pub struct ParseUriError {
    text: String,
    why: &'static str,
}

/// Known parameters besides `socket` and those that start with `x-`. Some are not in the document but
/// accepted by other clients; all are kept for the TLS setup.
const KNOWN_PARAMS: [&str; 6] =
    ["tls-type", "tls-hostname", "tls-verify-peer", "tls-certificates", "tls-username", "tls-psk-file"];

impl Uri {
    /// Creates the URI of an export at a Unix socket.
    pub fn unix(socket: impl Into<PathBuf>, export: impl Into<String>) -> Uri {
        let server = Server::Unix(socket.into());
        Uri { server, export: export.into(), tls: false, user: None, params: Vec::new() }
    }

    /// Creates the URI of an export at a TCP port.
    pub fn tcp(host: impl Into<String>, port: u16, export: impl Into<String>) -> Uri {
        let server = Server::Tcp { host: host.into(), port };
        Uri { server, export: export.into(), tls: false, user: None, params: Vec::new() }
    }

    /// Returns the value of a parameter.
    pub fn param(&self, name: &str) -> Option<&str> {
        self.params.iter().find(|(key, _)| key == name).map(|(_, value)| value.as_str())
    }
}

impl FromStr for Uri {
    type Err = ParseUriError;

    fn from_str(text: &str) -> Result<Uri, ParseUriError> {
        parse(text).map_err(|why| ParseUriError { text: text.to_owned(), why })
    }
}

fn parse(text: &str) -> Result<Uri, &'static str> {
    let (scheme, rest) = text.split_once("://").ok_or("it has no \"://\"")?;
    let (tls, unix) = match scheme.to_ascii_lowercase().as_str() {
        "nbd" => (false, false),
        "nbds" => (true, false),
        "nbd+unix" => (false, true),
        "nbds+unix" => (true, true),
        _ => return Err("the scheme is not one of nbd, nbds, nbd+unix, nbds+unix"),
    };
    if rest.contains('#') {
        return Err("it has a fragment; a # in a name is written %23");
    }
    let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
    let (authority, path) = rest.split_once('/').unwrap_or((rest, ""));
    let export = decode_text(path)?;
    if export.len() > MAX_STRING || export.contains('\0') {
        return Err("an export's name has at most 4096 bytes and no NUL");
    }
    let (user, host_port) = match authority.rsplit_once('@') {
        Some((user, host_port)) => (Some(decode_text(user)?), host_port),
        None => (None, authority),
    };
    let (socket, params) = parse_query(query)?;
    let server = if unix {
        if !host_port.is_empty() {
            return Err("a Unix socket has no host: write nbd+unix:///EXPORT?socket=PATH");
        }
        Server::Unix(socket.ok_or("the socket parameter is missing")?)
    } else {
        if socket.is_some() {
            return Err("a socket parameter needs the scheme nbd+unix or nbds+unix");
        }
        parse_host_port(host_port)?
    };
    Ok(Uri { server, export, tls, user, params })
}

fn parse_host_port(text: &str) -> Result<Server, &'static str> {
    let (host, port) = if let Some(bracketed) = text.strip_prefix('[') {
        let (host, rest) = bracketed.split_once(']').ok_or("a [ has no ]")?;
        if !host.contains(':') {
            return Err("the text in brackets is not an IPv6 address");
        }
        match rest.strip_prefix(':') {
            Some(port) => (host, port),
            None if rest.is_empty() => (host, ""),
            None => return Err("something other than a port follows the ]"),
        }
    } else {
        text.split_once(':').unwrap_or((text, ""))
    };
    let port = match port {
        "" => DEFAULT_PORT,
        digits if digits.bytes().all(|byte| byte.is_ascii_digit()) => {
            digits.parse().map_err(|_| "the port is above 65535")?
        }
        _ => return Err("the port is not a number (an IPv6 address must be in brackets)"),
    };
    let host = decode_text(host)?;
    if host.contains(['\0', '[', ']']) {
        return Err("the host is not a name or an address");
    }
    Ok(Server::Tcp { host: if host.is_empty() { "localhost".to_owned() } else { host }, port })
}

type Params = Vec<(String, String)>;

/// Parses the socket, if present, and the other parameters.
fn parse_query(query: &str) -> Result<(Option<PathBuf>, Params), &'static str> {
    let mut socket = None;
    let mut params = Params::new();
    for pair in query.split('&').filter(|pair| !pair.is_empty()) {
        let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
        let key = decode_text(key)?;
        if key == "socket" {
            let path = PathBuf::from(OsString::from_vec(decode(value)?));
            if path.as_os_str().is_empty() || socket.replace(path).is_some() {
                return Err("the socket parameter is empty, or there are two");
            }
        } else if KNOWN_PARAMS.contains(&key.as_str()) || key.starts_with("x-") {
            params.push((key, decode_text(value)?));
        } else {
            return Err("unknown parameter (known: socket, tls-…, x-…)");
        }
    }
    Ok((socket, params))
}

fn decode(text: &str) -> Result<Vec<u8>, &'static str> {
    let mut bytes = text.bytes();
    let mut decoded = Vec::with_capacity(text.len());
    while let Some(byte) = bytes.next() {
        decoded.push(if byte == b'%' {
            let mut digit = || bytes.next().and_then(|byte| char::from(byte).to_digit(16));
            let (high, low) = digit().zip(digit()).ok_or("a % is not followed by two hex digits")?;
            (high << 4 | low) as u8
        } else {
            byte
        });
    }
    Ok(decoded)
}

fn decode_text(text: &str) -> Result<String, &'static str> {
    String::from_utf8(decode(text)?).map_err(|_| "the percent-encoded text is not UTF-8")
}

/// Percent-encodes all bytes except unreserved characters and those in the second field.
struct Encoded<'a>(&'a [u8], &'static [u8]);

impl fmt::Display for Encoded<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for &byte in self.0 {
            if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) || self.1.contains(&byte) {
                write!(f, "{}", char::from(byte))?;
            } else {
                write!(f, "%{byte:02X}")?;
            }
        }
        Ok(())
    }
}

impl fmt::Display for Uri {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.tls { "nbds" } else { "nbd" })?;
        f.write_str(if matches!(self.server, Server::Unix(_)) { "+unix://" } else { "://" })?;
        if let Some(user) = &self.user {
            write!(f, "{}@", Encoded(user.as_bytes(), b""))?;
        }
        if let Server::Tcp { host, port } = &self.server {
            if host.contains(':') {
                write!(f, "[{}]", Encoded(host.as_bytes(), b":"))?;
            } else {
                write!(f, "{}", Encoded(host.as_bytes(), b""))?;
            }
            if *port != DEFAULT_PORT {
                write!(f, ":{port}")?;
            }
        }
        write!(f, "/{}", Encoded(self.export.as_bytes(), b"/:@"))?;
        let mut separator = '?';
        if let Server::Unix(socket) = &self.server {
            write!(f, "{separator}socket={}", Encoded(socket.as_os_str().as_bytes(), b"/:@"))?;
            separator = '&';
        }
        for (key, value) in &self.params {
            let (key, value) = (Encoded(key.as_bytes(), b""), Encoded(value.as_bytes(), b"/:@"));
            write!(f, "{separator}{key}={value}")?;
            separator = '&';
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
