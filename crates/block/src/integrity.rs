//! Integrity data: a few bytes that a device keeps beside every stretch of data, and brings along with it.
//!
//! The kernel calls one piece of it a tuple, whatever it is made of. What a tuple says is a matter between those who
//! write and those who read: nothing here makes or checks one.

use crate::Bytes;
use std::fmt;
use std::str::FromStr;

/// What tuples are made of.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Guard {
    /// Whatever their users like.
    None,
    /// T10's: the IP checksum, an application tag, and the place.
    Ip,
    /// T10's: CRC-16, an application tag, and the place.
    Crc16,
    /// NVMe's: CRC-64, an application tag, and the place.
    Crc64,
}

/// The shape of a device's integrity data.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Integrity {
    /// What a tuple is made of.
    pub guard: Guard,
    /// How long it is, in bytes; not 0.
    pub tuple: u8,
    /// How much data it stands beside: a power of two, at most a logical block.
    pub interval: Bytes,
}

/// There is no such integrity data.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("\"{0}\" is no integrity data (t10, ip, nvme, or a number of bytes from 1 to 255)")]
pub struct UnknownIntegrity(String);

impl Integrity {
    /// What tuples stand beside, unless something else is said.
    const INTERVAL: Bytes = Bytes(512);

    /// Bytes of integrity data for so much data: a whole number of intervals.
    pub const fn len_for(&self, data: Bytes) -> u64 {
        data.0 / self.interval.0 * self.tuple as u64
    }

    /// Whether a tuple of ones says that there is nothing to be checked.
    pub const fn has_escape(&self) -> bool {
        !matches!(self.guard, Guard::None)
    }
}

impl FromStr for Integrity {
    type Err = UnknownIntegrity;

    fn from_str(word: &str) -> Result<Integrity, UnknownIntegrity> {
        let (guard, tuple) = match word {
            "t10" => (Guard::Crc16, 8),
            "ip" => (Guard::Ip, 8),
            "nvme" => (Guard::Crc64, 16),
            _ => {
                let tuple = word.parse().ok().filter(|&tuple: &u8| tuple > 0);
                (Guard::None, tuple.ok_or_else(|| UnknownIntegrity(word.to_owned()))?)
            }
        };
        Ok(Integrity { guard, tuple, interval: Integrity::INTERVAL })
    }
}

/// The word that it is made from.
impl fmt::Display for Integrity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.guard {
            Guard::None => self.tuple.fmt(f),
            Guard::Ip => f.write_str("ip"),
            Guard::Crc16 => f.write_str("t10"),
            Guard::Crc64 => f.write_str("nvme"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_for_integrity_read_back() {
        for word in ["t10", "ip", "nvme", "1", "64", "255"] {
            assert_eq!(word.parse::<Integrity>().unwrap().to_string(), word);
        }
        for word in ["", "0", "256", "crc", "-1"] {
            assert!(word.parse::<Integrity>().unwrap_err().to_string().contains("1 to 255"), "{word}");
        }
    }

    #[test]
    fn every_interval_has_a_tuple() {
        let nvme: Integrity = "nvme".parse().unwrap();
        assert_eq!((nvme.len_for(Bytes(4096)), nvme.has_escape()), (128, true));
        assert!(!"9".parse::<Integrity>().unwrap().has_escape());
    }
}
