//! The tables of an open image: L1 and L2, refcounts, and clusters that wait to be freed. They are
//! protected by one mutex of [`crate::Disk`], which is held for look-ups and changes in memory, and while a
//! table is read that is not cached.
//!
//! Changes are made in memory first. [`Meta::plan`] gives a flush copies of all changes, in the order in
//! which they must reach the disk:
//!
//! 1. `early`: refcounts, and tables and blocks that nothing on disk refers to yet. One sync makes
//!    written data durable as well.
//! 2. `table`: entries of the refcount table, for new blocks.
//! 3. `late`: entries of L2 tables in use, and of the L1 table.
//! 4. `frees`: clusters that the new entries no longer refer to. Their refcounts can now be decremented, so
//!    that they may be reused.
//!
//! Each step is durable before the next begins, and each sector of a step may or may not be written by a
//! power cut: an entry never refers to data that is not durable, or to clusters counted as free. So every
//! power cut leaves a consistent image; at worst, clusters are leaked.

use crate::cache::{Cache, Part, SECTOR, Table};
use crate::damaged;
use crate::entry::{COPIED, Entry, Geometry, Kind, PLACE};
use crate::header::word;
use crate::refcounts::{Refcounts, Run};
use crate::storage::Storage;
use std::collections::BTreeSet;
use std::io;

/// Clusters whose last reference on disk is about to be removed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Free {
    pub(crate) first: u64,
    pub(crate) count: u64,
}

/// An offset, and the bytes to write there.
pub(crate) type Piece = (u64, Vec<u8>);

/// The changes that one flush writes.
#[derive(Debug)]
pub(crate) struct Plan {
    pub(crate) blocks: Vec<Part>,
    pub(crate) tables: Vec<Part>,
    table_sectors: BTreeSet<u64>,
    pub(crate) table: Vec<Piece>,
    l1_sectors: BTreeSet<u64>,
    pub(crate) l1: Vec<Piece>,
    pub(crate) frees: Vec<Free>,
}

/// Next step of a write.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Step {
    /// Write this many bytes in place.
    InPlace { at: u64, len: u64 },
    /// Write these newly allocated clusters, then publish them.
    New(Run),
    /// Grow the refcount table, then retry.
    GrowTable,
}

/// The tables of an open image.
#[derive(Debug)]
pub(crate) struct Meta {
    pub(crate) shape: Geometry,
    l1: Vec<u64>,
    l1_at: u64,
    l1_changed: BTreeSet<u64>,
    l2: Cache,
    pub(crate) refs: Refcounts,
    frees: Vec<Free>,
}

impl Meta {
    pub(crate) fn new(shape: Geometry, l1: Vec<u64>, l1_at: u64, l2_cache_len: u64, refs: Refcounts) -> Meta {
        let l2 = Cache::new((l2_cache_len >> shape.cluster_bits) as usize);
        Meta { shape, l1, l1_at, l1_changed: BTreeSet::new(), l2, refs, frees: Vec::new() }
    }

    /// Returns whether so many changes are cached that a flush must precede any more.
    pub(crate) fn is_strained(&self) -> bool {
        self.l2.is_strained() || self.refs.blocks.is_strained()
    }

    fn split(&self, offset: u64) -> (usize, u64) {
        let cluster = offset >> self.shape.cluster_bits;
        ((cluster / self.shape.l2_entries()) as usize, cluster % self.shape.l2_entries())
    }

    /// Returns the slot of the L2 table for an index of the L1 table, or `None` if there is no table.
    fn table(&mut self, storage: &dyn Storage, index: usize) -> io::Result<Option<usize>> {
        if let Some(slot) = self.l2.find(index as u64) {
            return Ok(Some(slot));
        }
        let at = self.l1.get(index).copied().unwrap_or(0) & PLACE;
        if at == 0 {
            return Ok(None);
        }
        if !at.is_multiple_of(self.shape.cluster()) {
            return Err(damaged("an L1 entry has an unaligned offset"));
        }
        let mut bytes = vec![0; self.shape.cluster() as usize];
        storage.read_at(&mut bytes, at)?;
        Ok(Some(self.l2.insert(Table::new(index as u64, at, bytes, false))))
    }

    fn entry(&self, slot: usize, index: u64) -> Entry {
        let bytes = &self.l2.table(slot).bytes;
        let at = index as usize * self.shape.entry_len();
        Entry { word: word(bytes, at), bitmap: if self.shape.extended { word(bytes, at + 8) } else { 0 } }
    }

    /// Returns the content at `offset`, and the number of bytes, up to `len` and at least one, that
    /// continue it.
    ///
    /// # Errors
    /// A table cannot be read, or is invalid.
    pub(crate) fn lookup(&mut self, storage: &dyn Storage, offset: u64, len: u64) -> io::Result<(Kind, u64)> {
        let (table, first) = self.split(offset);
        let cluster = self.shape.cluster();
        let skip = offset % cluster;
        let len = len.min((self.shape.l2_entries() - first) * cluster - skip);
        let Some(slot) = self.table(storage, table)? else { return Ok((Kind::Unallocated, len)) };
        let (kind, mut run) = self.shape.kind(self.entry(slot, first), skip, len.min(cluster - skip))?;
        if matches!(kind, Kind::Compressed { .. }) {
            return Ok((kind, run));
        }
        while run < len && (skip + run).is_multiple_of(cluster) {
            let entry = self.entry(slot, first + (skip + run) / cluster);
            let Ok((next, more)) = self.shape.kind(entry, 0, cluster.min(len - run)) else { break };
            let goes_on = match (kind, next) {
                (Kind::Data { at }, Kind::Data { at: next }) => at + run == next,
                (kind, next) => kind == next,
            };
            if !goes_on {
                break;
            }
            run += more;
        }
        Ok((kind, run))
    }

    /// Returns the file offset at which `offset` can be written in place, and the number of bytes, up to
    /// `len`, that can be.
    ///
    /// # Errors
    /// See [`Meta::lookup`].
    pub(crate) fn in_place(
        &mut self,
        storage: &dyn Storage,
        offset: u64,
        len: u64,
    ) -> io::Result<Option<(u64, u64)>> {
        let (table, first) = self.split(offset);
        let cluster = self.shape.cluster();
        let skip = offset % cluster;
        let Some(slot) = self.table(storage, table)? else { return Ok(None) };
        if self.l1[table] & COPIED == 0 {
            return Ok(None);
        }
        let len = len.min((self.shape.l2_entries() - first) * cluster - skip);
        let mut found: Option<(u64, u64)> = None;
        loop {
            let run = found.map_or(0, |(_, run)| run);
            let (index, skip) = (first + (skip + run) / cluster, (skip + run) % cluster);
            if run == len || (run > 0 && skip != 0) {
                return Ok(found);
            }
            let entry = self.entry(slot, index);
            let piece = self.shape.kind(entry, skip, (cluster - skip).min(len - run));
            match (found, piece) {
                (None, Err(error)) => return Err(error),
                (None, Ok((Kind::Data { at }, more))) if entry.word & COPIED != 0 => found = Some((at, more)),
                (Some((at, run)), Ok((Kind::Data { at: next }, more)))
                    if entry.word & COPIED != 0 && at + run == next =>
                {
                    found = Some((at, run + more));
                }
                _ => return Ok(found),
            }
        }
    }

    /// Returns the first step of a write of `len` bytes at `offset`. The caller holds the range
    /// exclusively.
    ///
    /// # Errors
    /// A table cannot be read, or there is no space.
    pub(crate) fn next_step(
        &mut self,
        storage: &dyn Storage,
        offset: u64,
        len: u64,
        clusters_max: u64,
    ) -> io::Result<Step> {
        if let Some((at, len)) = self.in_place(storage, offset, len)? {
            return Ok(Step::InPlace { at, len });
        }
        let (table, first) = self.split(offset);
        let Some(slot) = self.writable_table(storage, table)? else { return Ok(Step::GrowTable) };
        let cluster = self.shape.cluster();
        let spanned = (offset % cluster + len).div_ceil(cluster);
        let most = spanned.min(self.shape.l2_entries() - first).min(clusters_max).max(1);
        let mut wanted = 1;
        // Clusters that can be written in place are not replaced.
        while wanted < most {
            let entry = self.entry(slot, first + wanted);
            let left = (offset % cluster + len - wanted * cluster).min(cluster);
            let stays = entry.word & COPIED != 0
                && matches!(self.shape.kind(entry, 0, left)?, (Kind::Data { .. }, whole) if whole == left);
            if stays {
                break;
            }
            wanted += 1;
        }
        Ok(self.refs.allocate(storage, wanted)?.map_or(Step::GrowTable, Step::New))
    }

    /// Returns an L2 table that can be changed: a new one if there is none, or a copy if a snapshot shares
    /// it. Returns `None` if the refcount table has to grow first.
    fn writable_table(&mut self, storage: &dyn Storage, index: usize) -> io::Result<Option<usize>> {
        let slot = self.table(storage, index)?;
        if let Some(slot) = slot.filter(|_| self.l1[index] & COPIED != 0) {
            return Ok(Some(slot));
        }
        let bytes = match slot {
            Some(slot) => self.l2.table(slot).bytes.to_vec(),
            None => vec![0; self.shape.cluster() as usize],
        };
        let Some(run) = self.refs.allocate(storage, 1)? else { return Ok(None) };
        let at = run.first << self.shape.cluster_bits;
        let old = std::mem::replace(&mut self.l1[index], at | COPIED) & PLACE;
        self.l1_changed.insert(index as u64 / 64);
        if old != 0 {
            self.frees.push(Free { first: old >> self.shape.cluster_bits, count: 1 });
        }
        Ok(Some(self.l2.insert(Table::new(index as u64, at, bytes, true))))
    }

    fn set_entry(&mut self, slot: usize, index: u64, entry: Entry) -> io::Result<()> {
        let (first, count) = self.shape.owned(self.entry(slot, index))?;
        match self.frees.last_mut() {
            _ if count == 0 => {}
            Some(last) if last.first + last.count == first => last.count += count,
            _ => self.frees.push(Free { first, count }),
        }
        let at = index as usize * self.shape.entry_len();
        self.l2.put(slot, at, &entry.word.to_be_bytes());
        if self.shape.extended {
            self.l2.put(slot, at + 8, &entry.bitmap.to_be_bytes());
        }
        Ok(())
    }

    /// Publishes clusters that [`Meta::next_step`] allocated for `offset`, after they were written.
    ///
    /// # Errors
    /// The table cannot be read; nothing has changed.
    pub(crate) fn publish(&mut self, storage: &dyn Storage, offset: u64, run: Run) -> io::Result<()> {
        let (table, first) = self.split(offset);
        let slot = self.writable_table(storage, table)?.ok_or_else(|| damaged("an L2 table is missing"))?;
        // Publish all clusters or none: the caller releases unpublished clusters.
        (0..run.count).try_for_each(|number| self.shape.owned(self.entry(slot, first + number)).map(drop))?;
        for number in 0..run.count {
            let at = (run.first + number) << self.shape.cluster_bits;
            self.set_entry(slot, first + number, self.shape.data_entry(at))?;
        }
        Ok(())
    }

    /// Releases clusters that were never published.
    pub(crate) fn give_back(&mut self, storage: &dyn Storage, run: Run) {
        for cluster in run.first..run.first + run.count {
            // Clusters that cannot be released are leaked.
            let _ = self.refs.release(storage, cluster);
        }
    }

    /// Makes whole clusters read as zeroes, from the start of a cluster: as many of `count` as are in one
    /// table. Returns their number, or `None` if the refcount table has to grow first. `bare`: unallocated
    /// clusters already read as zeroes.
    ///
    /// # Errors
    /// A table cannot be read, or there is no space for one; some clusters may already be done.
    pub(crate) fn zero(
        &mut self,
        storage: &dyn Storage,
        offset: u64,
        count: u64,
        bare: bool,
    ) -> io::Result<Option<u64>> {
        let (table, first) = self.split(offset);
        let count = count.min(self.shape.l2_entries() - first);
        if bare && self.table(storage, table)?.is_none() {
            return Ok(Some(count));
        }
        let entry = self.shape.zero_entry();
        let Some(slot) = self.writable_table(storage, table)? else { return Ok(None) };
        for index in first..first + count {
            let old = self.entry(slot, index);
            if old != entry && !(bare && old == Entry::default()) {
                self.set_entry(slot, index, entry)?;
            }
        }
        Ok(Some(count))
    }

    /// Copies all changes, in the order in which they must be written.
    pub(crate) fn plan(&mut self) -> Plan {
        let table_sectors = std::mem::take(&mut self.refs.table_changed);
        let table = pieces(&table_sectors, &self.refs.table, self.refs.table_at);
        let l1_sectors = std::mem::take(&mut self.l1_changed);
        let l1 = pieces(&l1_sectors, &self.l1, self.l1_at);
        Plan {
            blocks: self.refs.blocks.take_changes(),
            tables: self.l2.take_changes(),
            table_sectors,
            table,
            l1_sectors,
            l1,
            frees: std::mem::take(&mut self.frees),
        }
    }

    /// Records that a plan was executed. [`Meta::free`] frees its clusters.
    pub(crate) fn planned(&mut self) {
        self.refs.blocks.flushed();
        self.l2.flushed();
    }

    /// Records that a plan has failed, so that all of it must be repeated. `early`: its first step did not
    /// complete, so that nothing on disk refers to fresh tables.
    pub(crate) fn restore(&mut self, mut plan: Plan, early: bool) {
        self.refs.blocks.restore(&plan.blocks, early);
        self.l2.restore(&plan.tables, early);
        self.refs.table_changed.append(&mut plan.table_sectors);
        self.l1_changed.append(&mut plan.l1_sectors);
        self.frees.append(&mut plan.frees);
    }

    /// Decrements the refcounts of clusters that nothing on disk refers to any more. If `last` is given,
    /// clusters with a refcount of one are pushed to it instead.
    pub(crate) fn free(&mut self, storage: &dyn Storage, frees: &[Free], mut last: Option<&mut Vec<Free>>) {
        for cluster in frees.iter().flat_map(|free| free.first..free.first + free.count) {
            if let Some(last) =
                last.as_mut().filter(|_| self.refs.count(storage, cluster).is_ok_and(|have| have == 1))
            {
                match last.last_mut() {
                    Some(run) if run.first + run.count == cluster => run.count += 1,
                    _ => last.push(Free { first: cluster, count: 1 }),
                }
            } else if let Err(error) = self.refs.release(storage, cluster) {
                tracing::warn!("cluster {cluster} of a qcow2 image is leaked: {error}");
            }
        }
    }

    /// Frees clusters at once, as a seeded fault.
    pub(crate) fn free_at_once(&mut self, storage: &dyn Storage) {
        let frees = std::mem::take(&mut self.frees);
        self.free(storage, &frees, None);
    }

    /// Returns whether a flush would write any changes of these tables.
    pub(crate) fn has_changes(&self) -> bool {
        self.l2.has_changes() || self.refs.blocks.has_changes() || !self.l1_changed.is_empty()
    }
}

/// Converts changed sectors of a table to bytes with file offsets; adjacent sectors are merged.
fn pieces(sectors: &BTreeSet<u64>, arguments: &[u64], at: u64) -> Vec<Piece> {
    let per_sector = SECTOR / 8;
    let mut pieces: Vec<Piece> = Vec::new();
    for &sector in sectors {
        let start = sector as usize * per_sector;
        let bytes = arguments[start..arguments.len().min(start + per_sector)]
            .iter()
            .flat_map(|word| word.to_be_bytes());
        let place = at + sector * SECTOR as u64;
        match pieces.last_mut() {
            Some((at, piece)) if *at + piece.len() as u64 == place => piece.extend(bytes),
            _ => pieces.push((place, bytes.collect())),
        }
    }
    pieces
}
