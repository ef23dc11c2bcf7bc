//! `--nbd-limits connections=N,per-peer=N,stall=TIME,memory=SIZE`: the resources of a process that NBD clients may use.

use crate::{Bytes, SpecError};
use options::{OptionRow, Options, split};
use options::{format_time, parse_time};
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

/// The options of `--nbd-limits`.
pub const NBD_LIMITS: &[OptionRow] = &[
    OptionRow::value("connections", "N", "1024", "connections to one export"),
    OptionRow::value("per-peer", "N", "512", "connections of one host or one local user to all exports"),
    OptionRow::value(
        "stall",
        "TIME",
        "60s",
        "disconnect a client that stops in the middle of a request for so long; 0: never",
    ),
    OptionRow::value("memory", "SIZE", "1G", "payloads and reply data of all clients together"),
];

/// Limits of NBD clients, for all NBD exports of a process together.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NbdLimits {
    /// Connections to one export at a time. Never 0.
    pub connections: u32,
    /// Connections of one peer to all exports: of an IPv4 address, an IPv6 network of 64 bits, or the user behind a Unix
    /// socket. Never 0.
    pub per_peer: u32,
    /// A client that pauses this long in the middle of a request is disconnected; `None`: never.
    pub stall: Option<Duration>,
    /// Memory for payloads and for the data of replies.
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
        let mut options = Options::new("nbd-limits", NBD_LIMITS, split(text).into_iter())?;
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
    fn limits_parse_back_from_their_text() {
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
