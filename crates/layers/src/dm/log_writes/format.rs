//! The on-disk format of the log, which is the kernel's dm-log-writes format. The public replay-log tool
//! reads it.
//!
//! ```text
//! [ super ][ entry ][ data ]…[ entry ][ data ]…
//!   block    block    nr_sectors blocks
//! ```
//!
//! A block has the size of a logical block of the logged device, and counts as one sector in all numbers. The
//! entry of a write is followed by its data; a discard has no data; the text of a mark is in its entry's
//! block. All numbers are little-endian.

/// `WRITE_LOG_MAGIC`.
const MAGIC: u64 = 0x006a_7366_7773_6872;
const VERSION: u64 = 1;
/// The length of an entry in bytes; the text of a mark follows it.
pub const ENTRY_LEN: usize = 32;
const SUPER_LEN: usize = 28;

/// Entry flag: a flush completed.
pub const FLUSH: u64 = 1;
/// Entry flag: a FUA write.
pub const FUA: u64 = 2;
/// Entry flag: a discard.
pub const DISCARD: u64 = 4;
/// Entry flag: a mark.
pub const MARK: u64 = 8;
/// Entry flag: a file system's metadata. The kernel sets it; this target never does.
pub const METADATA: u64 = 16;

/// The super block of a log.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Super {
    /// The number of entries.
    pub entries: u64,
    /// The block size in bytes: a power of two, 512 or more.
    pub block: u32,
}

/// The reason why a log cannot be read.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum FormatError {
    /// The magic number is missing.
    #[error("not a dm-log-writes log: its magic number is missing")]
    Magic,
    /// The version is unknown.
    #[error("its version is {0}; only version 1 is supported")]
    Version(u64),
    /// The block size, in bytes, is not a power of two or too small or too large.
    #[error("its block size of {0} bytes is not a power of two from 512 to 1 MiB")]
    Block(u32),
    /// The entry with this index has impossible numbers.
    #[error("entry {0} is damaged")]
    Entry(u64),
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    bytes[at..at + 8].iter().rev().fold(0, |value, byte| value << 8 | u64::from(*byte))
}

impl Super {
    /// Encodes the super block. The rest of its block is zeroes.
    pub fn encode(self) -> [u8; SUPER_LEN] {
        let mut bytes = [0; SUPER_LEN];
        bytes[..8].copy_from_slice(&MAGIC.to_le_bytes());
        bytes[8..16].copy_from_slice(&VERSION.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.entries.to_le_bytes());
        bytes[24..].copy_from_slice(&self.block.to_le_bytes());
        bytes
    }

    /// Fills `block` with the super block and zeroes.
    pub(super) fn fill(self, block: &mut [u8]) {
        block.fill(0);
        block[..SUPER_LEN].copy_from_slice(&self.encode());
    }

    /// Decodes the first 512 bytes of a log.
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

/// The header of an entry.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Head {
    /// The first block that was written.
    pub sector: u64,
    /// The number of blocks.
    pub sectors: u64,
    /// The entry flags, such as [`FLUSH`].
    pub flags: u64,
    /// The length of a mark's text in bytes.
    pub text_len: u64,
}

impl Head {
    /// Encodes the header, which is at the start of the entry's block.
    pub fn encode(self) -> [u8; ENTRY_LEN] {
        let mut bytes = [0; ENTRY_LEN];
        for (at, value) in [self.sector, self.sectors, self.flags, self.text_len].into_iter().enumerate() {
            bytes[at * 8..at * 8 + 8].copy_from_slice(&value.to_le_bytes());
        }
        bytes
    }

    /// Decodes the block of entry `number`; the length of `bytes` is the block size.
    ///
    /// # Errors
    /// [`FormatError::Entry`] for a range beyond any device, or a text longer than its block.
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

    /// Returns the number of data blocks that follow the entry.
    pub const fn data_blocks(&self) -> u64 {
        if self.flags & DISCARD == 0 { self.sectors } else { 0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_super_block_and_entries_round_trip() {
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
    fn damaged_logs_are_refused() {
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
