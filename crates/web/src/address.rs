//! Where the page is: `HOST:PORT`, of which the host is an address of this machine.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::str::FromStr;

/// Where to listen. Port 0: any that is free.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct WebAddress(pub SocketAddr);

/// It is no such thing.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("\"{0}\" is no address to listen on (write 127.0.0.1:PORT, or [::1]:PORT)")]
pub struct AddressError(String);

impl WebAddress {
    /// Whether only this machine reaches it.
    pub fn is_local(self) -> bool {
        self.0.ip().is_loopback()
    }
}

impl FromStr for WebAddress {
    type Err = AddressError;

    fn from_str(text: &str) -> Result<WebAddress, AddressError> {
        let refused = || AddressError(text.to_owned());
        // What is meant without an address is never the whole network.
        let local = |port: &str| Some(SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), port.parse().ok()?));
        let port = text.strip_prefix("localhost:").or_else(|| text.strip_prefix(':'));
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
        for text in ["localhost:80", ":80", "127.0.0.1:80"] {
            let address: WebAddress = text.parse().unwrap();
            assert_eq!((address.to_string(), address.is_local()), ("127.0.0.1:80".to_owned(), true));
        }
        assert!("[::1]:0".parse::<WebAddress>().unwrap().is_local());
        assert!(!"0.0.0.0:80".parse::<WebAddress>().unwrap().is_local());
    }

    #[test]
    fn what_is_no_address_is_refused() {
        for text in ["", "80", "127.0.0.1", ":port", "example.org:80", "127.0.0.1:70000", "::1:80:"] {
            assert!(text.parse::<WebAddress>().is_err(), "{text}");
        }
    }
}
