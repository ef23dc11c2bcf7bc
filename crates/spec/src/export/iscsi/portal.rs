//! Addresses at which an iSCSI target listens.

use super::super::nbd::{bracketed, parse_tcp};
use crate::SpecError;
use std::fmt;
use std::str::FromStr;

/// iSCSI's port, as IANA assigned it.
pub const ISCSI_PORT: u16 = 3260;

/// The address of an iSCSI portal.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct PortalAddress {
    /// A host name or an IP address, without the brackets of IPv6. Empty: every address of this host.
    pub host: String,
    /// The port; 0: any free port.
    pub port: u16,
}

impl FromStr for PortalAddress {
    type Err = SpecError;

    /// Parses `tcp:HOST:PORT`, `tcp:HOST`, `tcp::PORT`, `tcp:[::1]:PORT`.
    fn from_str(text: &str) -> Result<PortalAddress, SpecError> {
        let address = text.strip_prefix("tcp:").ok_or_else(|| {
            SpecError::new(
                format!("\"{text}\" is not where an iSCSI target listens"),
                "write tcp:HOST:PORT, for example tcp:0.0.0.0:3260",
            )
        })?;
        let (host, port) = parse_tcp(address, ISCSI_PORT)?;
        Ok(PortalAddress { host, port })
    }
}

impl PortalAddress {
    /// Formats host and port: `[::1]:3260`. A host that stands for every address is replaced by one at
    /// which a client of this machine reaches the target.
    pub fn authority(&self) -> String {
        let host = match self.host.as_str() {
            "" | "::" | "::0" => "localhost".to_owned(),
            "0.0.0.0" => "127.0.0.1".to_owned(),
            host => bracketed(host),
        };
        format!("{host}:{}", self.port)
    }

    /// Returns the URI of a logical unit as libiscsi and QEMU take it: `iscsi://HOST:PORT/TARGET/LUN`.
    pub fn uri(&self, target: &super::IscsiName, lun: u16) -> String {
        format!("iscsi://{}/{target}/{lun}", self.authority())
    }
}

impl fmt::Display for PortalAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "tcp:{}:{}", bracketed(&self.host), self.port)
    }
}
