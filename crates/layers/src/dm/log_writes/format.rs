//! The log on its device, as the kernel's dm-log-writes writes it and the public replay-log tool reads it.
//!
//! ```text
//! [ super ][ entry ][ data ]…[ entry ][ data ]…
//!   block    block    nr_sectors blocks
//! ```
//!
//! A block is as long as a logical block of the device that is logged, and counts as one sector in all numbers. What is
//! written takes as many blocks of data as it says; a discard has none; the text of a mark lies in its entry's block.
//! All numbers are little-endian.

/// `WRITE_LOG_MAGIC`.
const MAGIC: u64 = 0x006a_7366_7773_6872;
const VERSION: u64 = 1;
/// Where an entry's own text begins.
pub const ENTRY_LEN: usize = 32;
const SUPER_LEN: usize = 28;

/// A flush ended.
pub const FLUSH: u64 = 1;
/// The write was with FUA.
pub const FUA: u64 = 2;
/// A discard.
pub const DISCARD: u64 = 4;
/// A mark.
pub const MARK: u64 = 8;
/// A file system's metadata; nothing here says so of a write.
pub const METADATA: u64 = 16;

/// What a log begins with.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Super {
    /// How many entries there are.
    pub entries: u64,
    /// How long a block is, in bytes: a power of two from 512 on.
    pub block: u32,
}

/// Why it is no log.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum FormatError {
    /// Other bytes.
    #[error("it does not begin as a log of writes")]
    Magic,
    /// Made by something newer.
    #[error("it is of version {0}, and 1 is known")]
    Version(u64),
    /// A block that no device has.
    #[error("its blocks are of {0} bytes, which no device has")]
    Block(u32),
    /// An entry that makes no sense.
    #[error("entry {0} makes no sense")]
    Entry(u64),
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    bytes[at..at + 8].iter().rev().fold(0, |value, byte| value << 8 | u64::from(*byte))
}

impl Super {
    /// As its block begins; the rest of that is zeroes.
    pub fn encode(self) -> [u8; SUPER_LEN] {
        let mut bytes = [0; SUPER_LEN];
        bytes[..8].copy_from_slice(&MAGIC.to_le_bytes());
        bytes[8..16].copy_from_slice(&VERSION.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.entries.to_le_bytes());
        bytes[24..].copy_from_slice(&self.block.to_le_bytes());
        bytes
    }

    /// All of a block.
    pub(super) fn fill(self, block: &mut [u8]) {
        block.fill(0);
        block[..SUPER_LEN].copy_from_slice(&self.encode());
    }

    /// From the first bytes of a log, of which there must be 512.
    ///
    /// # Errors
    /// See [`FormatError`].
    pub fn decode(bytes: &[u8; 512]) -> Result<Super, FormatError> {
        if u64_at(bytes, 0) != MAGIC {
            return Err(FormatError::Magic);
        }
        if u64_at(bytes, 8) != VERSION {
            return Err(FormatError::Version(u64_at(bytes, 8)));
        }
        let block = u64_at(bytes, 24) as u32;
        if !block.is_power_of_two() || !(512..=1 << 20).contains(&block) {
            return Err(FormatError::Block(block));
        }
        Ok(Super { entries: u64_at(bytes, 16), block })
    }
}

/// What an entry says of itself.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Head {
    /// Where it was written, in blocks.
    pub sector: u64,
    /// How many blocks.
    pub sectors: u64,
    /// The constants above.
    pub flags: u64,
    /// How long the text of a mark is, in bytes.
    pub text_len: u64,
}

impl Head {
    /// As its block begins.
    pub fn encode(self) -> [u8; ENTRY_LEN] {
        let mut bytes = [0; ENTRY_LEN];
        for (at, value) in [self.sector, self.sectors, self.flags, self.text_len].into_iter().enumerate() {
            bytes[at * 8..at * 8 + 8].copy_from_slice(&value.to_le_bytes());
        }
        bytes
    }

    /// From a block, entry `number` of a log with blocks of that length.
    ///
    /// # Errors
    /// Numbers that lead nowhere.
    pub fn decode(bytes: &[u8], number: u64) -> Result<Head, FormatError> {
        let field = |at: usize| u64_at(bytes, at * 8);
        let head = Head { sector: field(0), sectors: field(1), flags: field(2), text_len: field(3) };
        let block = bytes.len() as u64;
        let fits = |blocks: u64| blocks.checked_mul(block).is_some_and(|bytes| bytes <= i64::MAX as u64);
        let ends = head.sector.checked_add(head.sectors).is_some_and(fits);
        if ends && head.text_len <= block - ENTRY_LEN as u64 {
            Ok(head)
        } else {
            Err(FormatError::Entry(number))
        }
    }

    /// How many blocks of data follow it.
    pub const fn data_blocks(&self) -> u64 {
        if self.flags & DISCARD == 0 { self.sectors } else { 0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read_again() {
        let first = Super { entries: 7, block: 4096 };
        let mut block = [0; 512];
        block[..SUPER_LEN].copy_from_slice(&first.encode());
        assert_eq!(&block[..8], b"rhswfsj\0", "the magic number, little-endian");
        assert_eq!(Super::decode(&block), Ok(first));
        let head = Head { sector: 1 << 40, sectors: 8, flags: FUA | FLUSH, text_len: 0 };
        let mut block = [0; 4096];
        block[..ENTRY_LEN].copy_from_slice(&head.encode());
        assert_eq!(Head::decode(&block, 0), Ok(head));
    }

    #[test]
    fn what_is_no_log_is_refused() {
        let mut block = [0; 512];
        assert_eq!(Super::decode(&block), Err(FormatError::Magic));
        block[..SUPER_LEN].copy_from_slice(&Super { entries: 1, block: 512 }.encode());
        block[24] = 1;
        assert!(matches!(Super::decode(&block), Err(FormatError::Block(_))));
        block[8] = 2;
        assert_eq!(Super::decode(&block), Err(FormatError::Version(2)));
        let wild = Head { sector: u64::MAX, sectors: 1, flags: 0, text_len: 0 };
        block[..ENTRY_LEN].copy_from_slice(&wild.encode());
        assert_eq!(Head::decode(&block, 3), Err(FormatError::Entry(3)));
    }
}
