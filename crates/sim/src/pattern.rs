//! What test data looks like: every sector says which sector it is and which write put it there, and
//! is a checksum of that throughout, so that lost, torn and misdirected data show.

use crate::rng::splitmix;

/// Bytes in a sector.
pub const SECTOR_LEN: usize = 512;

/// What a sector turned out to hold.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Content {
    /// Nothing but zeroes.
    Zero,
    /// What write number `version` put into sector `sector`.
    Data {
        /// The sector for which it was meant.
        sector: u64,
        /// The number of the write.
        version: u64,
    },
    /// Neither: torn within a sector, poison, or bytes never written. The first eight.
    Garbage(u64),
}

/// Fill `bytes`, one sector long, with what write `version` puts into `sector`.
pub fn fill_sector(bytes: &mut [u8], sector: u64, version: u64) {
    debug_assert_eq!(bytes.len(), SECTOR_LEN);
    let mut state = sector.rotate_left(32) ^ version;
    for (number, word) in bytes.chunks_exact_mut(8).enumerate() {
        let value = match number {
            0 => sector,
            1 => version,
            _ => splitmix(&mut state),
        };
        word.copy_from_slice(&value.to_le_bytes());
    }
}

/// What `bytes`, one sector long, hold.
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
    fn a_sector_reads_back_as_what_it_was_filled_with() {
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
