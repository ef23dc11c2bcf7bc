//! Names that people give to exports: `nbd://host:port/export` and its kin (`doc/uri.md`).
//!
//! Four schemes: `nbd` and `nbd+unix`, and `nbds` and `nbds+unix` which insist on TLS. What is kept
//! here is decoded; printing encodes it again, so that a printed name reads back as the same.

use std::ffi::OsString;
use std::fmt;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::PathBuf;
use std::str::FromStr;

use super::wire::{DEFAULT_PORT, MAX_STRING};

/// Where a server is.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Server {
    /// At a TCP port.
    Tcp {
        /// A name or an address; an IPv6 address has no brackets here. Never empty.
        host: String,
        /// The port.
        port: u16,
    },
    /// At a Unix socket; a path that starts with a NUL is a name in the abstract namespace.
    Unix(PathBuf),
}

/// The name of an export.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Uri {
    /// Where its server is.
    pub server: Server,
    /// What the server calls it; empty for the default one.
    pub export: String,
    /// The connection has to be encrypted.
    pub tls: bool,
    /// Whom to be towards the server; some ways of TLS need it.
    pub user: Option<String>,
    /// Other parameters in their order: `tls-…` and `x-…`.
    pub params: Vec<(String, String)>,
}

/// Why a text is not the name of an export.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("\"{text}\" is not an NBD URI: {why}")]
pub struct ParseUriError {
    text: String,
    why: &'static str,
}

/// Parameters that are known besides `socket` and those that start with `x-`. What the document does
/// not name is what other clients take; all are kept for whoever sets TLS up.
const KNOWN_PARAMS: [&str; 6] =
    ["tls-type", "tls-hostname", "tls-verify-peer", "tls-certificates", "tls-username", "tls-psk-file"];

impl Uri {
    /// An export at a Unix socket.
    pub fn unix(socket: impl Into<PathBuf>, export: impl Into<String>) -> Uri {
        let server = Server::Unix(socket.into());
        Uri { server, export: export.into(), tls: false, user: None, params: Vec::new() }
    }

    /// An export at a TCP port.
    pub fn tcp(host: impl Into<String>, port: u16, export: impl Into<String>) -> Uri {
        let server = Server::Tcp { host: host.into(), port };
        Uri { server, export: export.into(), tls: false, user: None, params: Vec::new() }
    }

    /// The value of a parameter.
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
    let (scheme, rest) = text.split_once("://").ok_or("there is no \"://\"")?;
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
            return Err("what stands in brackets is not an IPv6 address");
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
        _ => return Err("the port is not a number (an IPv6 address stands in brackets)"),
    };
    let host = decode_text(host)?;
    if host.contains(['\0', '[', ']']) {
        return Err("the host is not a name or an address");
    }
    Ok(Server::Tcp { host: if host.is_empty() { "localhost".to_owned() } else { host }, port })
}

type Params = Vec<(String, String)>;

/// The socket, if there is one, and the other parameters.
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
            return Err("a parameter is not known (socket, tls-… and x-… are)");
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
    String::from_utf8(decode(text)?).map_err(|_| "what is percent-encoded is not UTF-8")
}

/// Bytes as they stand in a URI: those that need no encoding anywhere, and `also`.
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
