//! One partition of what stands below, as a device.

use super::scratch::Scratch;
use super::{Extent, Tree};
use crate::device::DeviceError;
use block::{Bytes, Fact, Features};
use layers::WindowLayer;
use partition::{Disk, SelectError, Selector, Table};
use std::io;
use std::sync::Arc;

/// Why there is no such partition.
#[derive(Debug, thiserror::Error)]
pub enum PartError {
    /// The table could not be read.
    #[error("reading its partition table failed: {0}")]
    Read(#[source] io::Error),
    /// There is none.
    #[error("it has no partition table (leave out part, or partition it first)")]
    NoTable,
    /// No partition is meant.
    #[error(transparent)]
    Select(#[from] SelectError),
    /// The partition cannot be a device of these blocks.
    #[error("partition {0} does not lie on logical blocks of {1} (give the file block={2})")]
    Blocks(u32, Bytes, u32),
    /// It was there when it was opened, and is elsewhere now.
    #[error("the partition began at {from} when it was opened, and begins at {to} now (serve it anew)")]
    Moved {
        /// Where it began.
        from: Bytes,
        /// Where it begins.
        to: Bytes,
    },
    /// Zones and partitions do not go together.
    #[error("a zoned device has no partitions (leave out part)")]
    Zoned,
}

/// A tree as the reader of tables sees it.
struct Readable {
    scratch: Scratch,
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

    /// Tables are read in pieces of 512 bytes; the device is read in whole blocks.
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

/// The partition table of what a tree holds; `None`: it has none.
fn table(tree: &Tree) -> Result<Option<Table>, DeviceError> {
    let block = tree.profile().limits.logical_block_size.0 as u32;
    let mut disk = Readable { scratch: Scratch::new(tree)?, block };
    partition::read(&mut disk).map_err(|error| PartError::Read(error).into())
}

/// Put one partition in the place of the whole.
pub(crate) fn open(below: Tree, selector: &Selector) -> Result<Tree, DeviceError> {
    if below.profile().limits.features.has(Features::ZONED) {
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
    Ok(Tree::over(window, vec![below])?.sized_by(Extent::Partition(selector.clone(), part.start)))
}

/// The name of the fact that there is a table.
pub(crate) const TABLE_FACT: &str = "partition table";

/// What `show` says about the table of a whole tree; nothing when there is none, or none that can be read.
pub(crate) fn table_facts(tree: &Tree) -> Vec<Fact> {
    match table(tree) {
        Ok(table) => table.as_ref().map(describe).unwrap_or_default(),
        Err(error) => vec![(TABLE_FACT, format!("not known: {error}"))],
    }
}

/// What `show` says about a table.
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
