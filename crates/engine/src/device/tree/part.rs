//! One partition of a tree, as a device.

use super::sync_io::SyncIo;
use super::{Extent, Tree};
use crate::device::DeviceError;
use block::{Bytes, Fact, Features};
use layers::WindowLayer;
use partition::{Disk, SelectError, Selector, Table};
use std::io;
use std::sync::Arc;

/// Why a partition cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum PartError {
    /// The table could not be read.
    #[error("reading its partition table failed: {0}")]
    Read(#[source] io::Error),
    /// There is no partition table.
    #[error("there is no partition table (leave out part, or partition the disk first)")]
    NoTable,
    /// The selector matches no partition, or several.
    #[error(transparent)]
    Select(#[from] SelectError),
    /// The partition is not aligned to logical blocks.
    #[error("partition {0} is not aligned to logical blocks of {1} (give the file block={2})")]
    Blocks(u32, Bytes, u32),
    /// The partition has moved since it was opened.
    #[error(
        "the partition started at {from} when it was opened, and starts at {to} now (remove the device and add it again)"
    )]
    Moved {
        /// Start of the partition when it was opened.
        from: Bytes,
        /// Start of the partition now.
        to: Bytes,
    },
    /// Zoned devices have no partitions.
    #[error("a zoned device has no partitions (leave out part)")]
    Zoned,
}

/// A tree, for the partition parser.
struct Readable {
    scratch: SyncIo,
    block: u32,
}

impl Disk for Readable {
    type Error = io::Error;

    fn size(&self) -> Bytes {
        self.scratch.size()
    }

    fn block(&self) -> u32 {
        self.block
    }

    /// Reads bytes: tables are read in units of 512 bytes, the device in whole blocks.
    fn read(&mut self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        let block = u64::from(self.block);
        let start = Bytes(offset).align_down(block).0;
        let end = (offset + into.len() as u64).next_multiple_of(block).min(self.size().0);
        let mut whole = vec![0; (end - start) as usize];
        self.scratch.read(start, &mut whole)?;
        let skip = (offset - start) as usize;
        into.copy_from_slice(&whole[skip..skip + into.len()]);
        Ok(())
    }
}

/// Reads the partition table of a tree; `None`: there is none.
fn table(tree: &Tree) -> Result<Option<Table>, DeviceError> {
    let block = tree.profile().limits.logical_block_size.0 as u32;
    let mut disk = Readable { scratch: SyncIo::new(tree)?, block };
    partition::read(&mut disk).map_err(|error| PartError::Read(error).into())
}

/// Opens one partition of a tree.
pub(crate) fn open(below: Tree, selector: &Selector) -> Result<Tree, DeviceError> {
    if below.profile().limits.features.contains(Features::ZONED) {
        return Err(PartError::Zoned.into());
    }
    let table = table(&below)?.ok_or(PartError::NoTable)?;
    let part = table.select(selector).map_err(PartError::Select)?;
    let block = below.profile().limits.logical_block_size;
    if !part.start.is_aligned(block.0) || !part.len.is_aligned(block.0) {
        return Err(PartError::Blocks(part.number, block, table.block).into());
    }
    let mut facts: Vec<Fact> = vec![
        ("partition", part.to_string()),
        ("partition type", part.kind.to_string()),
        ("PARTUUID", part.uuid.clone()),
        ("partition start", part.start.0.to_string()),
    ];
    facts.extend(describe(&table));
    let window = Arc::new(WindowLayer::new(part.start, part.len, facts));
    Ok(Tree::over(window, vec![below])?.with_extent(Extent::Partition(selector.clone(), part.start)))
}

/// Name of the fact that there is a table.
pub(crate) const TABLE_FACT: &str = "partition table";

/// Describes the partition table of a tree, for `show`; empty if there is none or it cannot be read.
pub(crate) fn table_facts(tree: &Tree) -> Vec<Fact> {
    match table(tree) {
        Ok(table) => table.as_ref().map(describe).unwrap_or_default(),
        Err(error) => vec![(TABLE_FACT, format!("not known: {error}"))],
    }
}

/// Describes a partition table, for `show`.
fn describe(table: &Table) -> Vec<Fact> {
    let mut all: Vec<String> = table.partitions.iter().map(ToString::to_string).collect();
    if all.is_empty() {
        all.push("none".to_owned());
    }
    let mut facts = vec![
        (TABLE_FACT, format!("{}, blocks of {}, id {}", table.format, table.block, table.id)),
        ("partitions", all.join(", ")),
    ];
    if !table.notes.is_empty() {
        facts.push(("partition table notes", table.notes.join("; ")));
    }
    facts
}
