//! The address of the page: `HOST:PORT`, where the host is an address of this machine.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::str::FromStr;

/// An address to listen on. Port 0: any free port.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct WebAddress(pub SocketAddr);

/// The reason why a text is not an address to listen on.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum AddressError {
    /// The text is an address without a port.
    #[error("\"{0}\" has no port (write {host}:PORT{meaning})", host = bracketed(.0), meaning = meaning(.0))]
    NoPort(IpAddr),
    /// The text is not an address.
    #[error("\"{0}\" is not an address to listen on (write PORT, 127.0.0.1:PORT or [::1]:PORT)")]
    Invalid(String),
}

fn bracketed(host: &IpAddr) -> String {
    match host {
        IpAddr::V4(host) => host.to_string(),
        IpAddr::V6(host) => format!("[{host}]"),
    }
}

fn meaning(host: &IpAddr) -> &'static str {
    if host.is_unspecified() {
        ": it listens on all addresses of this machine, which other machines reach"
    } else {
        ""
    }
}

impl WebAddress {
    /// Returns whether the address can be reached from this machine only.
    pub fn is_local(self) -> bool {
        self.0.ip().is_loopback()
    }
}

/// Returns an address at which other machines reach a listening socket. If the socket listens on all
/// addresses, this is the source address of packets to the network, or the loopback address of a machine
/// without a network. If it listens on one address, this is that address.
pub(crate) fn reachable(bound: SocketAddr) -> SocketAddr {
    if !bound.ip().is_unspecified() {
        return bound;
    }
    // Addresses for documentation (RFC 5737, RFC 3849): connecting a UDP socket sends nothing.
    let (any, outside, local): (SocketAddr, SocketAddr, IpAddr) = match bound {
        SocketAddr::V4(_) => {
            ((Ipv4Addr::UNSPECIFIED, 0).into(), ([192, 0, 2, 1], 9).into(), Ipv4Addr::LOCALHOST.into())
        }
        SocketAddr::V6(_) => (
            (Ipv6Addr::UNSPECIFIED, 0).into(),
            (Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1), 9).into(),
            Ipv6Addr::LOCALHOST.into(),
        ),
    };
    let of_route = || {
        let socket = UdpSocket::bind(any)?;
        socket.connect(outside)?;
        socket.local_addr()
    };
    let ip = of_route().map(|address| address.ip()).ok().filter(|ip| !ip.is_unspecified());
    SocketAddr::new(ip.unwrap_or(local), bound.port())
}

impl FromStr for WebAddress {
    type Err = AddressError;

    fn from_str(text: &str) -> Result<WebAddress, AddressError> {
        let host = text.trim_start_matches('[').trim_end_matches(']').parse();
        let refused = || host.map_or_else(|_| AddressError::Invalid(text.to_owned()), AddressError::NoPort);
        // A port without a host stands for the loopback address, never for all addresses.
        let local = |port: &str| Some(SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), port.parse().ok()?));
        let is_port = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
        let port = text.strip_prefix("localhost:").or_else(|| text.strip_prefix(':'));
        let port = port.or_else(|| is_port.then_some(text));
        match port {
            Some(port) => local(port).map(WebAddress).ok_or_else(refused),
            None => text.parse().map(WebAddress).map_err(|_| refused()),
        }
    }
}

impl fmt::Display for WebAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_without_a_host_is_local() {
        for text in ["localhost:80", ":80", "80", "127.0.0.1:80"] {
            let address: WebAddress = text.parse().unwrap();
            assert_eq!((address.to_string(), address.is_local()), ("127.0.0.1:80".to_owned(), true));
        }
        assert!("[::1]:0".parse::<WebAddress>().unwrap().is_local());
        assert!(!"0.0.0.0:80".parse::<WebAddress>().unwrap().is_local());
    }

    #[test]
    fn a_socket_on_all_addresses_is_reached_at_one_of_them() {
        for text in ["0.0.0.0:80", "[::]:80"] {
            let reached = reachable(text.parse().expect("an address"));
            assert!(!reached.ip().is_unspecified() && reached.port() == 80, "{reached}");
        }
        let one = "10.0.0.1:80".parse().expect("an address");
        assert_eq!(reachable(one), one);
    }

    #[test]
    fn other_texts_are_refused() {
        for text in ["", "70000", "+80", "127.0.0.1", ":port", "example.org:80", "127.0.0.1:70000", "::1:80:"]
        {
            assert!(text.parse::<WebAddress>().is_err(), "{text}");
        }
        for (text, why) in [
            ("0.0.0.0", "has no port (write 0.0.0.0:PORT: it listens on all addresses of this machine"),
            ("[::1]", "has no port (write [::1]:PORT)"),
            ("127.0.0.1", "has no port (write 127.0.0.1:PORT)"),
            ("example.org:80", "is not an address to listen on (write PORT, "),
        ] {
            let error = text.parse::<WebAddress>().unwrap_err().to_string();
            assert!(error.contains(why), "{error}");
        }
    }
}
