//! Units as types. A sector always has 512 bytes; the unit of a device is its logical block.

use std::fmt;
use std::str::FromStr;

/// A length or an offset in bytes.
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Bytes(pub u64);

/// A length or an offset in sectors of 512 bytes, whatever the device's logical block size is.
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Sectors(pub u64);

impl Sectors {
    /// `log2` of the bytes in a sector.
    pub const SHIFT: u32 = 9;

    /// Converts to bytes; `None` past 2^64.
    pub fn checked_bytes(self) -> Option<Bytes> {
        self.0.checked_mul(1 << Self::SHIFT).map(Bytes)
    }

    /// Converts to bytes, saturating at the largest whole number of sectors that fits.
    pub fn bytes(self) -> Bytes {
        self.checked_bytes().unwrap_or(Bytes(!511))
    }
}

impl Bytes {
    /// No bytes.
    pub const ZERO: Bytes = Bytes(0);

    /// `n` KiB.
    pub const fn kib(n: u64) -> Bytes {
        Bytes(n << 10)
    }

    /// `n` MiB.
    pub const fn mib(n: u64) -> Bytes {
        Bytes(n << 20)
    }

    /// `n` GiB.
    pub const fn gib(n: u64) -> Bytes {
        Bytes(n << 30)
    }

    /// Converts to whole sectors, rounded down.
    pub const fn sectors(self) -> Sectors {
        Sectors(self.0 >> Sectors::SHIFT)
    }

    /// Whether this is a multiple of `unit`, a power of two.
    pub const fn is_aligned(self, unit: u64) -> bool {
        self.0 & (unit - 1) == 0
    }

    /// The largest multiple of `unit`, a power of two, that is not above this.
    pub const fn align_down(self, unit: u64) -> Bytes {
        Bytes(self.0 & !(unit - 1))
    }

    /// The sum, or `None` past 2^64.
    pub fn checked_add(self, other: Bytes) -> Option<Bytes> {
        self.0.checked_add(other.0).map(Bytes)
    }
}

impl std::ops::Add for Bytes {
    type Output = Bytes;
    fn add(self, other: Bytes) -> Bytes {
        Bytes(self.0 + other.0)
    }
}

impl std::ops::Sub for Bytes {
    type Output = Bytes;
    fn sub(self, other: Bytes) -> Bytes {
        Bytes(self.0 - other.0)
    }
}

/// Why a text is not a size.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("\"{text}\" is not a size: {why}")]
pub struct ParseSizeError {
    text: String,
    why: &'static str,
}

impl FromStr for Bytes {
    type Err = ParseSizeError;

    /// Parses plain bytes, or a number (a decimal fraction is allowed) with a binary suffix `K M G T P E`,
    /// optionally followed by `i`, `iB` or `B`, all in either case: `10G`, `10Gi`, `10GB`, `10Gb` and `10GiB` are
    /// the same size. `s` counts sectors. `b` alone is refused, because dd and find count blocks of 512 bytes with it.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let error = |why| ParseSizeError { text: text.to_owned(), why };
        let digits_end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
        let (number, suffix) = text.split_at(digits_end);
        if number.is_empty() {
            return Err(error("it does not start with a digit"));
        }
        let with_unit = |tail| suffix.strip_suffix(tail).filter(|rest: &&str| !rest.is_empty());
        let bare =
            ["iB", "ib", "IB", "Ib", "B", "b", "i", "I"].into_iter().find_map(with_unit).unwrap_or(suffix);
        let shift = match bare {
            "" | "B" => 0,
            "s" if suffix == "s" => Sectors::SHIFT,
            "k" | "K" => 10,
            "m" | "M" => 20,
            "g" | "G" => 30,
            "t" | "T" => 40,
            "p" | "P" => 50,
            "e" | "E" => 60,
            _ => {
                return Err(error(
                    "the suffix is not one of K M G T P E (binary; Ki, KB and KiB mean the same) or s (sectors)",
                ));
            }
        };
        let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
        let whole: u64 = whole.parse().map_err(|_| error("the number does not fit"))?;
        let whole = whole.checked_mul(1 << shift).ok_or_else(|| error("it is above 2^64 bytes"))?;
        if fraction.is_empty() {
            return if number.contains('.') {
                Err(error("nothing follows the point"))
            } else {
                Ok(Bytes(whole))
            };
        }
        if fraction.len() > 18 || !fraction.bytes().all(|b| b.is_ascii_digit()) {
            return Err(error("the fraction is not a number"));
        }
        let part: u128 = fraction.parse::<u64>().map_err(|_| error("the fraction is not a number"))?.into();
        let scaled = part << shift;
        let unit = 10u128.pow(fraction.len() as u32);
        if !scaled.is_multiple_of(unit) {
            return Err(error("it is not a whole number of bytes"));
        }
        whole.checked_add((scaled / unit) as u64).map(Bytes).ok_or_else(|| error("it is above 2^64 bytes"))
    }
}

impl fmt::Display for Bytes {
    /// The exact value with the largest binary suffix that divides it: `1G`, `1536M`, `513`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const SUFFIXES: [&str; 7] = ["", "K", "M", "G", "T", "P", "E"];
        let power = if self.0 == 0 { 0 } else { (self.0.trailing_zeros() / 10).min(6) };
        write!(f, "{}{}", self.0 >> (10 * power), SUFFIXES[power as usize])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_with_binary_suffixes() {
        for (text, bytes) in [
            ("0", 0),
            ("513", 513),
            ("4k", 4096),
            ("4K", 4096),
            ("4KiB", 4096),
            ("4KB", 4096),
            ("10G", 10 << 30),
            ("10GB", 10 << 30),
            ("10Gb", 10 << 30),
            ("10gb", 10 << 30),
            ("10GiB", 10 << 30),
            ("10Mi", 10 << 20),
            ("10gi", 10 << 30),
            ("10gib", 10 << 30),
            ("512B", 512),
            ("1.5G", 1536 << 20),
            ("8s", 4096),
            ("16E", 0),
        ] {
            if bytes == 0 && text != "0" {
                assert!(text.parse::<Bytes>().is_err(), "{text}");
            } else {
                assert_eq!(text.parse(), Ok(Bytes(bytes)), "{text}");
            }
        }
    }

    #[test]
    fn what_is_not_a_size_is_refused_with_its_reason() {
        for text in [
            "",
            "G",
            "-1",
            "1X",
            "1b",
            "1i",
            "1iB",
            "1ib",
            "1bG",
            "1GBB",
            "1sB",
            "1.",
            "1.3",
            "1..5G",
            "99999999999999999999",
            "1 G",
            "1.5s.",
            "0.1K",
        ] {
            assert!(text.parse::<Bytes>().is_err(), "{text:?}");
        }
    }

    #[test]
    fn display_is_exact_and_reads_back() {
        for bytes in [0, 1, 512, 513, 1024, 1 << 30, 3 << 29, u64::MAX] {
            let text = Bytes(bytes).to_string();
            assert_eq!(text.parse(), Ok(Bytes(bytes)), "{text}");
        }
    }

    #[test]
    fn sectors_do_not_overflow_into_bytes() {
        assert_eq!(Sectors(u64::MAX).checked_bytes(), None);
        assert!(Sectors(u64::MAX).bytes().is_aligned(512));
        assert_eq!(Bytes(1023).sectors(), Sectors(1));
    }
}
