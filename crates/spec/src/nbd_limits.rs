//! What NBD clients may take of a process: `connections=N,per-peer=N,stall=TIME,memory=SIZE`.

use super::{Bytes, SpecError};
use options::{Options, split};
use options::{format_time, parse_time};
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

/// Limits of NBD clients. They hold for every NBD export of a process.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NbdLimits {
    /// Connections to one export at a time. Never 0.
    pub connections: u32,
    /// Connections of one peer to all exports: of an IPv4 address, an IPv6 network of 64 bits, or the user behind a Unix
    /// socket. Never 0.
    pub per_peer: u32,
    /// A client that has sent part of a request and nothing more for so long is disconnected; none: never.
    pub stall: Option<Duration>,
    /// Memory for payloads and for data of replies, in bytes.
    pub memory: Bytes,
}

impl Default for NbdLimits {
    fn default() -> Self {
        let (connections, per_peer) = (1024, 512);
        NbdLimits { connections, per_peer, stall: Some(Duration::from_secs(60)), memory: Bytes(1 << 30) }
    }
}

impl FromStr for NbdLimits {
    type Err = SpecError;

    fn from_str(text: &str) -> Result<NbdLimits, SpecError> {
        let keys = &["connections", "per-peer", "stall", "memory"];
        let mut options = Options::new("nbd-limits", keys, split(text).into_iter())?;
        let mut limits = NbdLimits::default();
        for (key, place) in [("connections", &mut limits.connections), ("per-peer", &mut limits.per_peer)] {
            if let Some(number) = options.text(key)? {
                let why =
                    || SpecError::new(format!("{key} cannot be \"{number}\""), "use a number from 1 on");
                *place = number.parse().ok().filter(|number| *number > 0).ok_or_else(why)?;
            }
        }
        if let Some(time) = options.text("stall")? {
            limits.stall = Some(parse_time(&time)?).filter(|time| !time.is_zero());
        }
        if let Some(size) = options.text("memory")? {
            let why = || SpecError::new(format!("memory cannot be \"{size}\""), "use a size such as 512M");
            limits.memory = size.parse().ok().filter(|size| *size > Bytes::ZERO).ok_or_else(why)?;
        }
        Ok(limits)
    }
}

impl fmt::Display for NbdLimits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let stall = format_time(self.stall.unwrap_or_default());
        write!(f, "connections={},per-peer={}", self.connections, self.per_peer)?;
        write!(f, ",stall={stall},memory={}", self.memory)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_are_read_back_as_they_are_written() {
        let text = "connections=5,per-peer=2,stall=1500ms,memory=64M";
        let limits: NbdLimits = text.parse().unwrap();
        assert_eq!((limits.connections, limits.per_peer, limits.memory), (5, 2, Bytes(64 << 20)));
        assert_eq!(limits.to_string(), text);
        let never: NbdLimits = "stall=0".parse().unwrap();
        assert_eq!(never, NbdLimits { stall: None, ..NbdLimits::default() });
        for wrong in ["connections=0", "per-peer=x", "stall=5", "memory=0", "clients=5", "stall"] {
            assert!(wrong.parse::<NbdLimits>().is_err(), "{wrong}");
        }
    }
}
