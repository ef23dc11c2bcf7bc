//! Logical unit numbers: SAM-6 section 4.7.

use std::fmt;

/// A logical unit number of eight bytes, as on the wire.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Lun(pub [u8; 8]);

impl Lun {
    /// The largest number of the flat space addressing method.
    pub const NUMBER_MAX: u16 = 0x3FFF;
    /// The well-known logical unit REPORT LUNS: SAM-6 section 4.7.11.2.
    pub const REPORT_LUNS: Lun = Lun([0xC1, 0x01, 0, 0, 0, 0, 0, 0]);

    /// Encodes a number up to [`NUMBER_MAX`](Lun::NUMBER_MAX): peripheral device addressing below 256, flat
    /// space addressing above, as LIO and the Linux initiator do.
    pub const fn new(number: u16) -> Lun {
        let number = number & Lun::NUMBER_MAX;
        let method = if number < 256 { 0 } else { 0x40 };
        Lun([method | (number >> 8) as u8, number as u8, 0, 0, 0, 0, 0, 0])
    }

    /// Decodes a LUN of a single level: peripheral device addressing on bus 0, or flat space addressing.
    /// Returns `None` for any other method, or for several levels.
    pub const fn number(self) -> Option<u16> {
        let [first, second, 0, 0, 0, 0, 0, 0] = self.0 else { return None };
        match first {
            0 => Some(second as u16),
            0x40..=0x7F => Some(((first & 0x3F) as u16) << 8 | second as u16),
            _ => None,
        }
    }
}

impl fmt::Display for Lun {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.number() {
            Some(number) => write!(f, "{number}"),
            None => write!(f, "0x{:016x}", u64::from_be_bytes(self.0)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_both_addressing_methods_come_back() {
        for number in [0, 1, 255, 256, 257, Lun::NUMBER_MAX] {
            assert_eq!(Lun::new(number).number(), Some(number));
        }
        assert_eq!(
            Lun([0x40, 5, 0, 0, 0, 0, 0, 0]).number(),
            Some(5),
            "flat space addressing of a small number"
        );
        assert_eq!(Lun::REPORT_LUNS.number(), None);
        assert_eq!(Lun([0, 5, 0, 1, 0, 0, 0, 0]).number(), None, "two levels");
        assert_eq!(Lun([1, 5, 0, 0, 0, 0, 0, 0]).number(), None, "bus 1");
    }
}
