//! Test data: every sector contains its number, the number of the write, and a checksum of both throughout,
//! so that lost, torn and misdirected data is detected.

use rand_xoshiro::SplitMix64;
use rand_xoshiro::rand_core::{Rng as _, SeedableRng};

/// Bytes in a sector.
pub const SECTOR_LEN: usize = 512;

/// Content of a sector.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Content {
    /// All zeroes.
    Zero,
    /// Written by write number `version` to sector `sector`.
    Data {
        /// Sector that the data was written for.
        sector: u64,
        /// Number of the write.
        version: u64,
    },
    /// Any other content, with its first eight bytes: torn within a sector, poison, or never written.
    Garbage(u64),
}

/// Fills `bytes`, one sector long, with the content of write `version` to `sector`.
pub fn fill_sector(bytes: &mut [u8], sector: u64, version: u64) {
    debug_assert_eq!(bytes.len(), SECTOR_LEN);
    let mut words = SplitMix64::seed_from_u64(sector.rotate_left(32) ^ version);
    for (number, word) in bytes.chunks_exact_mut(8).enumerate() {
        let value = match number {
            0 => sector,
            1 => version,
            _ => words.next_u64(),
        };
        word.copy_from_slice(&value.to_le_bytes());
    }
}

/// Decodes `bytes`, one sector long.
pub fn read_sector(bytes: &[u8]) -> Content {
    debug_assert_eq!(bytes.len(), SECTOR_LEN);
    if *bytes == [0; SECTOR_LEN] {
        return Content::Zero;
    }
    let word = |number: usize| {
        let mut word = [0; 8];
        word.copy_from_slice(&bytes[number * 8..number * 8 + 8]);
        u64::from_le_bytes(word)
    };
    let (sector, version) = (word(0), word(1));
    let mut expected = [0; SECTOR_LEN];
    fill_sector(&mut expected, sector, version);
    if expected[..] == *bytes { Content::Data { sector, version } } else { Content::Garbage(sector) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_filled_sector_decodes_to_its_content() {
        let mut bytes = [0; SECTOR_LEN];
        assert_eq!(read_sector(&bytes), Content::Zero);
        fill_sector(&mut bytes, 0, 0);
        assert_eq!(read_sector(&bytes), Content::Data { sector: 0, version: 0 });
        fill_sector(&mut bytes, 77, 1 << 40);
        assert_eq!(read_sector(&bytes), Content::Data { sector: 77, version: 1 << 40 });
    }

    #[test]
    fn a_torn_sector_is_garbage() {
        let (mut old, mut new) = ([0; SECTOR_LEN], [0; SECTOR_LEN]);
        fill_sector(&mut old, 5, 1);
        fill_sector(&mut new, 5, 2);
        for cut in [16, 100, 511] {
            let mut torn = new;
            torn[cut..].copy_from_slice(&old[cut..]);
            assert!(matches!(read_sector(&torn), Content::Garbage(_)), "{cut}");
        }
    }
}
