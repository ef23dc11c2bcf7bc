//! Refcounts, and the allocation of clusters.
//!
//! [`crate::meta::Meta`] owns them, under its mutex. *Invariant:* a refcount in memory is at least as high
//! as in any possible state of the disk; it is decremented only after the removal of the reference is
//! durable.

use crate::cache::{Cache, Table};
use crate::storage::Storage;
use crate::{damaged, full};
use std::collections::BTreeSet;
use std::io;

/// Minimum growth of the file in bytes, so that not every allocation extends it.
const GROW_LEN: u64 = 4 << 20;

/// A run of consecutive clusters.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Run {
    pub(crate) first: u64,
    pub(crate) count: u64,
    /// Whether the clusters were never written, so that they read as zeroes.
    pub(crate) blank: bool,
}

/// The refcounts of an image.
#[derive(Debug)]
pub(crate) struct Refcounts {
    cluster_bits: u32,
    order: u32,
    /// The refcount table: offsets of blocks, or 0 if none of a block's clusters is in use.
    pub(crate) table: Vec<u64>,
    pub(crate) table_at: u64,
    /// Sectors of the table that a flush has to write.
    pub(crate) table_changed: BTreeSet<u64>,
    pub(crate) blocks: Cache,
    /// By block: index before which no cluster is free.
    first_free: Vec<u32>,
    /// Index of a block before which no block has a free cluster.
    hint: usize,
    /// First cluster of those that were never written, up to the end.
    blank_from: u64,
    file_len: u64,
}

/// Returns one refcount of a block.
pub(crate) fn count_at(bytes: &[u8], index: usize, order: u32) -> u64 {
    if order < 3 {
        let bit = index << order;
        let mask = (1u8 << (1 << order)) - 1;
        return u64::from(bytes[bit / 8] >> (bit % 8) & mask);
    }
    let len = 1 << (order - 3);
    bytes[index * len..(index + 1) * len].iter().fold(0, |count, byte| count << 8 | u64::from(*byte))
}

/// Returns the bytes of one refcount, changed to `count`: their offset in the block, and how many bytes of
/// the array are used.
pub(crate) fn with_count(bytes: &[u8], index: usize, order: u32, count: u64) -> (usize, [u8; 8], usize) {
    let mut out = [0; 8];
    if order < 3 {
        let bit = index << order;
        let mask = ((1u8 << (1 << order)) - 1) << (bit % 8);
        out[0] = bytes[bit / 8] & !mask | (count as u8) << (bit % 8);
        return (bit / 8, out, 1);
    }
    let len = 1 << (order - 3);
    out[..len].copy_from_slice(&count.to_be_bytes()[8 - len..]);
    (index * len, out, len)
}

/// Returns the largest refcount.
pub(crate) fn count_max(order: u32) -> u64 {
    if order == 6 { u64::MAX } else { (1 << (1 << order)) - 1 }
}

impl Refcounts {
    pub(crate) fn new(
        cluster_bits: u32,
        order: u32,
        table: Vec<u64>,
        table_at: u64,
        file_len: u64,
        cache_len: u64,
    ) -> Refcounts {
        Refcounts {
            cluster_bits,
            order,
            first_free: vec![0; table.len()],
            table,
            table_at,
            table_changed: BTreeSet::new(),
            blocks: Cache::new((cache_len >> cluster_bits) as usize),
            hint: 0,
            blank_from: file_len.div_ceil(1 << cluster_bits),
            file_len,
        }
    }

    /// Returns the number of refcounts per block.
    pub(crate) fn per_block(&self) -> u64 {
        1 << (self.cluster_bits + 3 - self.order)
    }

    /// Returns the number of clusters that the table can count.
    pub(crate) fn capacity(&self) -> u64 {
        self.table.len() as u64 * self.per_block()
    }

    /// Returns the number of bytes of the file that are in use.
    pub(crate) fn used_len(&self) -> u64 {
        self.blank_from << self.cluster_bits
    }

    /// Returns the length of the file in bytes.
    pub(crate) fn file_len(&self) -> u64 {
        self.file_len
    }

    fn block(&mut self, storage: &dyn Storage, index: usize) -> io::Result<usize> {
        if let Some(slot) = self.blocks.find(index as u64) {
            return Ok(slot);
        }
        let at = self.table[index];
        let mut bytes = vec![0; 1 << self.cluster_bits];
        storage.read_at(&mut bytes, at)?;
        Ok(self.blocks.insert(Table::new(index as u64, at, bytes, false)))
    }

    fn locate(&self, cluster: u64) -> (usize, usize) {
        ((cluster / self.per_block()) as usize, (cluster % self.per_block()) as usize)
    }

    /// Returns the refcount of a cluster.
    pub(crate) fn count(&mut self, storage: &dyn Storage, cluster: u64) -> io::Result<u64> {
        let (block, index) = self.locate(cluster);
        if self.table.get(block).is_none_or(|at| *at == 0) {
            return Ok(0);
        }
        let slot = self.block(storage, block)?;
        Ok(count_at(&self.blocks.table(slot).bytes, index, self.order))
    }

    fn set(&mut self, slot: usize, index: usize, count: u64) {
        let (at, bytes, len) = with_count(&self.blocks.table(slot).bytes, index, self.order, count);
        self.blocks.put(slot, at, &bytes[..len]);
    }

    /// Decrements a refcount. Call it *only* for a reference whose removal is durable, or that was never on
    /// disk.
    pub(crate) fn release(&mut self, storage: &dyn Storage, cluster: u64) -> io::Result<()> {
        let count = self.count(storage, cluster)?;
        let (block, index) = self.locate(cluster);
        if count == 0 {
            return Err(damaged("a cluster in use has no refcount"));
        }
        let slot = self.block(storage, block)?;
        self.set(slot, index, count - 1);
        if count == 1 {
            self.first_free[block] = self.first_free[block].min(index as u32);
            self.hint = self.hint.min(block);
        }
        Ok(())
    }

    /// Allocates up to `wanted` consecutive clusters. Returns `None` if the refcount table has to grow
    /// first.
    ///
    /// # Errors
    /// A block cannot be read, or the file cannot be extended; nothing is allocated.
    pub(crate) fn allocate(&mut self, storage: &dyn Storage, wanted: u64) -> io::Result<Option<Run>> {
        let per_block = self.per_block() as usize;
        for block in self.hint..self.table.len() {
            if self.first_free[block] as usize >= per_block {
                continue;
            }
            let slot = if self.table[block] == 0 {
                self.add_block(storage, block)?
            } else {
                self.block(storage, block)?
            };
            let bytes = &self.blocks.table(slot).bytes;
            let is_free = |index: &usize| count_at(bytes, *index, self.order) == 0;
            let Some(start) = (self.first_free[block] as usize..per_block).find(is_free) else {
                self.first_free[block] = per_block as u32;
                continue;
            };
            let first = (block * per_block + start) as u64;
            let blank = first >= self.blank_from;
            // A run is either blank entirely, or not at all.
            let most = if blank { wanted } else { wanted.min(self.blank_from - first) };
            let most = most.min((per_block - start) as u64) as usize;
            let count = (start..start + most).take_while(is_free).count();
            self.cover(storage, first + count as u64)?;
            (start..start + count).for_each(|index| self.set(slot, index, 1));
            self.first_free[block] = (start + count) as u32;
            self.hint = block;
            return Ok(Some(Run { first, count: count as u64, blank }));
        }
        Ok(None)
    }

    /// Adds a missing block, stored in the first cluster that it counts.
    fn add_block(&mut self, storage: &dyn Storage, block: usize) -> io::Result<usize> {
        let cluster = block as u64 * self.per_block();
        self.cover(storage, cluster + 1)?;
        let at = cluster << self.cluster_bits;
        let table = Table::new(block as u64, at, vec![0; 1 << self.cluster_bits], true);
        let slot = self.blocks.insert(table);
        self.set(slot, 0, 1);
        self.table[block] = at;
        self.table_changed.insert(block as u64 / 64);
        self.first_free[block] = 1;
        Ok(slot)
    }

    /// Extends the file for clusters up to `end`, and marks them as written.
    pub(crate) fn cover(&mut self, storage: &dyn Storage, end: u64) -> io::Result<()> {
        let len =
            end.checked_mul(1 << self.cluster_bits).filter(|len| *len <= i64::MAX as u64).ok_or_else(full)?;
        if len > self.file_len {
            // Extend it only as much as needed if a limit is near.
            let roomy = len.next_multiple_of(GROW_LEN);
            let grown =
                storage.set_len(roomy).map(|()| roomy).or_else(|_| storage.set_len(len).map(|()| len))?;
            self.file_len = grown;
        }
        self.blank_from = self.blank_from.max(end);
        Ok(())
    }

    /// Records that the table was moved and has more entries. Its pending changes are written at the new
    /// offset.
    pub(crate) fn moved(&mut self, table: Vec<u64>, table_at: u64) {
        self.first_free.resize(table.len(), 0);
        (self.table, self.table_at) = (table, table_at);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_of_every_width_are_stored_and_read() {
        for order in 0..=6 {
            let mut bytes = vec![0xa5; 512];
            let (at, with, len) = with_count(&bytes, 9, order, 1);
            bytes[at..at + len].copy_from_slice(&with[..len]);
            assert_eq!(count_at(&bytes, 9, order), 1, "order {order}");
            let most = count_max(order);
            let (at, with, len) = with_count(&bytes, 8, order, most);
            bytes[at..at + len].copy_from_slice(&with[..len]);
            assert_eq!((count_at(&bytes, 8, order), count_at(&bytes, 9, order)), (most, 1), "order {order}");
        }
        // The first of several refcounts in a byte is in the lowest bits; refcounts of several bytes are
        // big-endian.
        assert_eq!(count_at(&[0b0000_0010], 1, 0), 1);
        assert_eq!(count_at(&[1, 2], 0, 4), 0x102);
    }
}
