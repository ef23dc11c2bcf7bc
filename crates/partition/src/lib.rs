//! Partition tables, GPT and MBR, as the kernel's `block/partitions` reads them.
//!
//! [`read`] asks a [`Disk`] for the few blocks that it needs, and answers with a [`Table`]: every partition
//! with its number, place, type, name and PARTUUID. A [`Selector`] picks one, as a user names it.
//!
//! What stands on a disk was written by anyone. All of it is checked before it is used, and whatever a table
//! claims, reading it takes at most [`READS_MAX`] reads and [`ENTRIES_LEN_MAX`] bytes of memory for entries.
//! A table that is damaged in part is used as far as it is sound, and says so in its notes.
//!
//! *Invariant:* no bytes of a disk make anything here panic. A partition of a table lies within its disk.

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

/// Blocks that are tried when the disk's own does not fit: an image does not say for which it was made.
const BLOCKS: [u32; 2] = [512, 4096];
/// The most bytes of GPT entries that are read: 128 entries of 128 bytes is what everyone writes.
pub const ENTRIES_LEN_MAX: u64 = 1 << 20;
/// The most logical partitions: as the kernel, which numbers 256 partitions of a disk.
const LOGICAL_MAX: usize = 252;
/// How often [`read`] reads at most: the first block; for each of three sizes of block three headers, the
/// alternate of the first, and their entries; the chain of logical partitions.
pub const READS_MAX: usize = 1 + 3 * 7 + LOGICAL_MAX;

/// What a table is read from.
pub trait Disk {
    /// What its reads fail with.
    type Error;

    /// How long it is.
    fn size(&self) -> Bytes;

    /// Its logical block, in bytes.
    fn block(&self) -> u32;

    /// Fill `into` from `offset` on. Both lie within the disk.
    ///
    /// # Errors
    /// What keeps the disk from being read.
    fn read(&mut self, offset: u64, into: &mut [u8]) -> Result<(), Self::Error>;
}

/// Which format a table has.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Format {
    /// The UEFI specification's.
    Gpt,
    /// The PC's, with its logical partitions.
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

/// What a partition is for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Type {
    /// GPT's.
    Guid(Guid),
    /// MBR's.
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

/// A GUID as it stands on the disk: its first three parts are little-endian.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct Guid(pub [u8; 16]);

impl fmt::Display for Guid {
    /// In lower case, as the kernel has it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const ORDER: [usize; 16] = [3, 2, 1, 0, 5, 4, 7, 6, 8, 9, 10, 11, 12, 13, 14, 15];
        for (position, byte) in ORDER.into_iter().enumerate() {
            let dash = if matches!(position, 4 | 6 | 8 | 10) { "-" } else { "" };
            write!(f, "{dash}{:02x}", self.0[byte])?;
        }
        Ok(())
    }
}

/// One partition.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Partition {
    /// Its number, as in the kernel's names: 1 and up; logical ones from 5.
    pub number: u32,
    /// Where it begins.
    pub start: Bytes,
    /// How long it is; never 0.
    pub len: Bytes,
    /// What it is for.
    pub kind: Type,
    /// Its name; empty in an MBR, which has none.
    pub name: String,
    /// Its PARTUUID, in lower case.
    pub uuid: String,
    /// It only holds logical partitions.
    pub extended: bool,
}

impl fmt::Display for Partition {
    /// In a few words, for lists: `2 "root" (10G)`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.number)?;
        if !self.name.is_empty() {
            write!(f, " {:?}", self.name)?;
        }
        write!(f, " ({}{})", self.len, if self.extended { ", extended" } else { "" })
    }
}

/// A table.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Table {
    /// Its format.
    pub format: Format,
    /// The block in which it counts, in bytes.
    pub block: u32,
    /// The disk's own identity: a GUID, or an MBR's 32 bits in hexadecimal.
    pub id: String,
    /// Its partitions by number.
    pub partitions: Vec<Partition>,
    /// What is wrong with it, in whole words; nothing when it is sound.
    pub notes: Vec<String>,
}

/// Read the table of a disk. `None`: it has none.
///
/// # Errors
/// What the disk said.
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

/// Read from a disk what lies within it. `None`: it does not.
fn read_within<D: Disk>(disk: &mut D, offset: u64, len: u64) -> Result<Option<Vec<u8>>, D::Error> {
    if offset.checked_add(len).is_none_or(|end| end > disk.size().0) {
        return Ok(None);
    }
    let mut bytes = vec![0; len as usize];
    disk.read(offset, &mut bytes)?;
    Ok(Some(bytes))
}

/// Add a partition, if it lies within the disk; else note that it does not.
fn add(table: &mut Table, disk_len: Bytes, partition: Partition) {
    let end = partition.start.checked_add(partition.len);
    if end.is_some_and(|end| end <= disk_len) {
        table.partitions.push(partition);
    } else {
        table.notes.push(format!("partition {} ends past the device and is left out", partition.number));
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
