//! A bounded cache of metadata clusters: L2 tables by L1 index, or refcount blocks by their index.
//!
//! The cache is owned by [`crate::meta::Meta`], under its mutex. A table that is dirty, or being written,
//! stays until a flush has made it durable. So the cache may exceed its bound temporarily, and a caller
//! that changes tables flushes first if [`Cache::is_strained`].

use std::collections::HashMap;

/// Unit of writes, in bytes, that a power cut cannot tear.
pub(crate) const SECTOR: usize = 512;

/// A metadata cluster with its current content.
#[derive(Debug)]
pub(crate) struct Table {
    /// Key of the table in the cache.
    pub(crate) index: u64,
    /// Offset in the file, in bytes.
    pub(crate) at: u64,
    pub(crate) bytes: Box<[u8]>,
    /// Bitmap of the sectors changed since the last flush started.
    changed: Box<[u64]>,
    is_changed: bool,
    /// Whether nothing on disk refers to it yet: the next flush writes all of it, before anything that
    /// refers to it.
    pub(crate) fresh: bool,
    /// Whether a flush in progress has taken a copy of its changes.
    flushing: bool,
    used: bool,
}

impl Table {
    pub(crate) fn new(index: u64, at: u64, bytes: Vec<u8>, fresh: bool) -> Table {
        let words = (bytes.len() / SECTOR).div_ceil(64);
        let changed = vec![0; words].into_boxed_slice();
        let bytes = bytes.into_boxed_slice();
        Table { index, at, bytes, changed, is_changed: fresh, fresh, flushing: false, used: true }
    }

    fn is_clean(&self) -> bool {
        !self.is_changed && !self.flushing
    }

    /// Returns runs of changed sectors, as offset in the table and bytes; the whole table if it is fresh.
    fn pieces(&self) -> Vec<(usize, Vec<u8>)> {
        if self.fresh {
            return vec![(0, self.bytes.to_vec())];
        }
        let mut runs: Vec<(usize, Vec<u8>)> = Vec::new();
        for sector in (0..self.bytes.len() / SECTOR).filter(|at| self.changed[at / 64] >> (at % 64) & 1 != 0)
        {
            let bytes = &self.bytes[sector * SECTOR..(sector + 1) * SECTOR];
            match runs.last_mut() {
                Some((at, run)) if *at + run.len() == sector * SECTOR => run.extend_from_slice(bytes),
                _ => runs.push((sector * SECTOR, bytes.to_vec())),
            }
        }
        runs
    }
}

/// The changes of one table that a flush writes.
#[derive(Debug)]
pub(crate) struct Part {
    pub(crate) index: u64,
    pub(crate) fresh: bool,
    pub(crate) at: u64,
    pub(crate) pieces: Vec<(usize, Vec<u8>)>,
}

/// Cached tables, with their slots by key.
#[derive(Debug)]
pub(crate) struct Cache {
    slots: Vec<Table>,
    places: HashMap<u64, usize>,
    hand: usize,
    max: usize,
    changed: usize,
}

impl Cache {
    /// Creates a cache of at most `max` tables, which dirty tables may exceed.
    pub(crate) fn new(max: usize) -> Cache {
        Cache { slots: Vec::new(), places: HashMap::new(), hand: 0, max: max.max(4), changed: 0 }
    }

    /// Returns whether so many tables are dirty that a flush is due.
    pub(crate) fn is_strained(&self) -> bool {
        self.changed * 2 > self.max
    }

    /// Returns whether any table is dirty.
    pub(crate) fn has_changes(&self) -> bool {
        self.changed > 0
    }

    /// Returns the slot of a cached table.
    pub(crate) fn find(&mut self, index: u64) -> Option<usize> {
        let slot = *self.places.get(&index)?;
        self.slots[slot].used = true;
        Some(slot)
    }

    /// Returns whether nothing on disk refers to this table yet.
    pub(crate) fn is_fresh(&self, index: u64) -> bool {
        self.places.get(&index).is_some_and(|slot| self.slots[*slot].fresh)
    }

    pub(crate) fn table(&self, slot: usize) -> &Table {
        &self.slots[slot]
    }

    /// Inserts a table, or replaces the one with the same index, which must be clean. The slot is valid
    /// until the next call.
    pub(crate) fn insert(&mut self, table: Table) -> usize {
        self.changed += usize::from(table.is_changed);
        if let Some(&slot) = self.places.get(&table.index) {
            assert!(self.slots[slot].is_clean(), "a table with changes is replaced");
            self.slots[slot] = table;
            return slot;
        }
        let slot = match self.victim() {
            Some(slot) => {
                self.places.remove(&self.slots[slot].index);
                slot
            }
            None => self.slots.len(),
        };
        self.places.insert(table.index, slot);
        if slot == self.slots.len() {
            self.slots.push(table);
        } else {
            self.slots[slot] = table;
        }
        slot
    }

    /// Finds a clean slot to evict, by the second-chance algorithm. Returns `None` if the cache is not
    /// full, or no table is clean.
    fn victim(&mut self) -> Option<usize> {
        if self.slots.len() < self.max {
            return None;
        }
        for _ in 0..2 * self.slots.len() {
            let slot = self.hand;
            self.hand = (self.hand + 1) % self.slots.len();
            let table = &mut self.slots[slot];
            if table.is_clean() && !std::mem::take(&mut table.used) {
                return Some(slot);
            }
        }
        None
    }

    /// Changes bytes of a table, within one sector.
    pub(crate) fn put(&mut self, slot: usize, at: usize, bytes: &[u8]) {
        let table = &mut self.slots[slot];
        table.bytes[at..at + bytes.len()].copy_from_slice(bytes);
        let sector = at / SECTOR;
        table.changed[sector / 64] |= 1 << (sector % 64);
        self.changed += usize::from(!table.is_changed);
        table.is_changed = true;
    }

    /// Copies all changes, for a flush that ends with [`Cache::flushed`] or [`Cache::restore`].
    pub(crate) fn take_changes(&mut self) -> Vec<Part> {
        let mut parts = Vec::new();
        for table in self.slots.iter_mut().filter(|table| table.is_changed) {
            let Table { index, fresh, at, .. } = *table;
            parts.push(Part { index, fresh, at, pieces: table.pieces() });
            table.changed.fill(0);
            (table.is_changed, table.fresh, table.flushing) = (false, false, true);
        }
        self.changed = 0;
        parts
    }

    /// Records that the flush of the taken changes has succeeded.
    pub(crate) fn flushed(&mut self) {
        self.slots.iter_mut().for_each(|table| table.flushing = false);
    }

    /// Records that the flush has failed: marks the changes dirty again. `fresh`: fresh tables are still
    /// fresh.
    pub(crate) fn restore(&mut self, parts: &[Part], fresh: bool) {
        self.flushed();
        for part in parts {
            let slot = self.places[&part.index];
            let table = &mut self.slots[slot];
            table.changed.fill(u64::MAX);
            table.fresh |= part.fresh && fresh;
            self.changed += usize::from(!table.is_changed);
            table.is_changed = true;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(index: u64) -> Table {
        Table::new(index, index << 16, vec![0; 2048], false)
    }

    #[test]
    fn only_clean_tables_are_evicted() {
        let mut cache = Cache::new(4);
        for index in 0..20 {
            let slot = cache.insert(table(index));
            if index % 5 == 0 {
                cache.put(slot, 512, &[7]);
            }
        }
        assert!((0..20).step_by(5).all(|index| cache.find(index).is_some()));
        assert!(cache.slots.len() <= 6 && cache.is_strained());
        let parts = cache.take_changes();
        assert_eq!(parts.len(), 4);
        assert_eq!((parts[0].pieces[0].0, parts[0].pieces[0].1.len()), (512, 512));
        assert!(!cache.is_strained() && cache.victim().is_some_and(|slot| slot > 0));
        cache.flushed();
    }

    #[test]
    fn changes_of_a_failed_flush_are_taken_again() {
        let mut cache = Cache::new(4);
        cache.insert(Table::new(1, 0, vec![1; 1024], true));
        let parts = cache.take_changes();
        assert!(parts[0].fresh && cache.take_changes().is_empty());
        cache.restore(&parts, true);
        assert!(cache.take_changes()[0].fresh);
        cache.restore(&parts, false);
        let again = cache.take_changes();
        assert!(!again[0].fresh && again[0].pieces == [(0, vec![1; 1024])]);
    }
}
