//! Integrity data (T10 DIF/DIX, NVMe protection information): a few bytes that a device stores beside each
//! interval of data.
//!
//! The kernel calls the integrity data of one interval a tuple, whatever its format. Tuples are generated and
//! verified by the users of the device; nothing in this crate does either.

use crate::Bytes;
use std::fmt;
use std::str::FromStr;

/// Format of a tuple: which checksum guards the data.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Guard {
    /// No checksum: the format is defined by the device's users.
    None,
    /// T10 PI with the IP checksum: guard tag, application tag and reference tag.
    Ip,
    /// T10 PI with CRC-16: guard tag, application tag and reference tag.
    Crc16,
    /// NVMe protection information with CRC-64: guard tag, application tag and reference tag.
    Crc64,
}

/// The integrity format of a device.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Integrity {
    /// Format of a tuple.
    pub guard: Guard,
    /// Bytes of a tuple; not 0.
    pub tuple: u8,
    /// Bytes of data that one tuple protects: a power of two, at most a logical block.
    pub interval: Bytes,
}

/// The text names no known integrity format.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("\"{0}\" is not an integrity format (t10, ip, nvme, or a number of bytes from 1 to 255)")]
pub struct UnknownIntegrity(String);

impl Integrity {
    /// Data per tuple: the only interval that can be configured so far.
    const INTERVAL: Bytes = Bytes(512);

    /// Bytes of integrity data for `data` bytes of data, which must be a whole number of intervals.
    pub const fn len_for(&self, data: Bytes) -> u64 {
        data.0 / self.interval.0 * self.tuple as u64
    }

    /// Whether a tuple of all ones is the escape value, which disables checking (T10 PI and NVMe).
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

/// The text that [`FromStr`] parses to this format.
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
    fn integrity_formats_parse_and_display() {
        for word in ["t10", "ip", "nvme", "1", "64", "255"] {
            assert_eq!(word.parse::<Integrity>().unwrap().to_string(), word);
        }
        for word in ["", "0", "256", "crc", "-1"] {
            assert!(word.parse::<Integrity>().unwrap_err().to_string().contains("1 to 255"), "{word}");
        }
    }

    #[test]
    fn length_counts_one_tuple_per_interval() {
        let nvme: Integrity = "nvme".parse().unwrap();
        assert_eq!((nvme.len_for(Bytes(4096)), nvme.has_escape()), (128, true));
        assert!(!"9".parse::<Integrity>().unwrap().has_escape());
    }
}
