//! Partition tables, GPT and MBR, as the kernel's `block/partitions` reads them.
//!
//! [`read`] reads the few blocks that it needs from a [`Disk`] and returns a [`Table`]: number, offset, type,
//! name and PARTUUID of every partition. A [`Selector`] is a user's choice of one.
//!
//! The content of a disk is untrusted. All of it is checked before use, and whatever a table claims, reading
//! it takes at most [`READS_MAX`] reads and [`ENTRIES_LEN_MAX`] bytes of memory for entries. A partly damaged
//! table is used as far as it is valid, with a note.
//!
//! *Invariant:* no content of a disk causes a panic. All partitions of a table lie within the disk.

#![forbid(unsafe_code)]

pub mod fuzzing;
mod gpt;
mod mbr;
mod select;
#[cfg(test)]
mod testing;

pub use select::{SelectError, Selector};

use block::Bytes;
use std::fmt;

/// Block sizes tried when the disk's own does not fit: an image does not record for which one it was made.
const BLOCKS: [u32; 2] = [512, 4096];
/// Most bytes of GPT entries that are read; the usual table has 128 entries of 128 bytes.
pub const ENTRIES_LEN_MAX: u64 = 1 << 20;
/// Most logical partitions: as in the kernel, which numbers 256 partitions of a disk.
const LOGICAL_MAX: usize = 252;
/// Most calls of [`Disk::read`] by [`read`]: the first block; for each of three block sizes three headers,
/// the alternate of the first, and their entries; the chain of logical partitions.
pub const READS_MAX: usize = 1 + 3 * 7 + LOGICAL_MAX;

/// A disk with a partition table.
pub trait Disk {
    /// Error of its reads.
    type Error;

    /// Size of the disk.
    fn size(&self) -> Bytes;

    /// Logical block size in bytes.
    fn block(&self) -> u32;

    /// Fills `into` from `offset` on. The range must lie within the disk.
    ///
    /// # Errors
    /// The disk cannot be read.
    fn read(&mut self, offset: u64, into: &mut [u8]) -> Result<(), Self::Error>;
}

/// Format of a table.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Format {
    /// GPT, of the UEFI specification.
    Gpt,
    /// MBR, with logical partitions.
    Mbr,
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Format::Gpt => "gpt",
            Format::Mbr => "mbr",
        })
    }
}

/// Type of a partition.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Type {
    /// Type GUID of GPT.
    Guid(Guid),
    /// Type code of MBR.
    Code(u8),
}

impl fmt::Display for Type {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Type::Guid(guid) => guid.fmt(f),
            Type::Code(code) => write!(f, "0x{code:02x}"),
        }
    }
}

/// A GUID as on disk: its first three parts are little-endian.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct Guid(pub [u8; 16]);

impl fmt::Display for Guid {
    /// In lower case, as the kernel prints it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const ORDER: [usize; 16] = [3, 2, 1, 0, 5, 4, 7, 6, 8, 9, 10, 11, 12, 13, 14, 15];
        for (position, byte) in ORDER.into_iter().enumerate() {
            let dash = if matches!(position, 4 | 6 | 8 | 10) { "-" } else { "" };
            write!(f, "{dash}{:02x}", self.0[byte])?;
        }
        Ok(())
    }
}

/// A partition.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Partition {
    /// Number as in the kernel's device names, from 1; logical partitions from 5.
    pub number: u32,
    /// Offset on the disk.
    pub start: Bytes,
    /// Length; never 0.
    pub len: Bytes,
    /// Type of the partition.
    pub kind: Type,
    /// Name; empty in an MBR, which has no names.
    pub name: String,
    /// PARTUUID, in lower case.
    pub uuid: String,
    /// An extended partition, which contains logical partitions.
    pub extended: bool,
}

impl fmt::Display for Partition {
    /// Short form for lists: `2 "root" (10G)`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.number)?;
        if !self.name.is_empty() {
            write!(f, " {:?}", self.name)?;
        }
        write!(f, " ({}{})", self.len, if self.extended { ", extended" } else { "" })
    }
}

/// A partition table.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Table {
    /// Format of the table.
    pub format: Format,
    /// Block size in bytes that its numbers count.
    pub block: u32,
    /// Id of the disk: a GUID, or the 32 bits of an MBR in hexadecimal.
    pub id: String,
    /// Partitions by number.
    pub partitions: Vec<Partition>,
    /// Defects of the table, as sentences; empty if it is valid.
    pub notes: Vec<String>,
}

/// Reads the partition table of a disk. `None`: it has none.
///
/// # Errors
/// The error of the disk.
pub fn read<D: Disk>(disk: &mut D) -> Result<Option<Table>, D::Error> {
    let mut first = [0; 512];
    if disk.size().0 < first.len() as u64 {
        return Ok(None);
    }
    disk.read(0, &mut first)?;
    let Some(boot) = mbr::parse(&first) else { return Ok(None) };
    if boot.is_protective() {
        let own = disk.block();
        let others = BLOCKS.into_iter().filter(|&block| block != own);
        for block in [own].into_iter().chain(others) {
            if let Some(table) = gpt::read(disk, block)? {
                return Ok(Some(table));
            }
        }
    }
    mbr::read(disk, &boot)
}

/// Reads a range. `None`: it is not within the disk.
fn read_within<D: Disk>(disk: &mut D, offset: u64, len: u64) -> Result<Option<Vec<u8>>, D::Error> {
    if offset.checked_add(len).is_none_or(|end| end > disk.size().0) {
        return Ok(None);
    }
    let mut bytes = vec![0; len as usize];
    disk.read(offset, &mut bytes)?;
    Ok(Some(bytes))
}

/// Adds a partition if it lies within the disk, and a note otherwise.
fn add(table: &mut Table, disk_len: Bytes, partition: Partition) {
    let end = partition.start.checked_add(partition.len);
    if end.is_some_and(|end| end <= disk_len) {
        table.partitions.push(partition);
    } else {
        table.notes.push(format!("partition {} ends past the device and is ignored", partition.number));
    }
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from(u32_at(bytes, at)) | u64::from(u32_at(bytes, at + 4)) << 32
}

#[cfg(test)]
mod tests {
    use super::testing::Image;
    use super::*;

    #[test]
    fn a_disk_without_a_signature_has_no_table() {
        assert_eq!(read(&mut Image::new(1 << 20, 512)), Ok(None));
        assert_eq!(read(&mut Image::new(100, 512)), Ok(None));
    }

    #[test]
    fn a_guid_is_written_as_the_kernel_writes_it() {
        let mut guid = Guid::default();
        for (index, byte) in guid.0.iter_mut().enumerate() {
            *byte = index as u8;
        }
        assert_eq!(guid.to_string(), "03020100-0504-0706-0809-0a0b0c0d0e0f");
    }
}
