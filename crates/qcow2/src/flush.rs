//! Flushes: writes the changes gathered by [`Meta::plan`] in its order, with a sync after each step.
//!
//! One flush runs at a time. Flushes requested in the meantime share the next one. A *write* that fails
//! makes the flush fail and is retried with the next one. After a failed *sync* the kernel may have dropped
//! data, so no flush and no write succeeds on the disk until it is reopened.

use crate::cache::{Part, SECTOR};
use crate::header::AT_TABLE;
use crate::meta::{Meta, Plan};
use crate::refcounts::with_count;
use crate::{Disk, SeededFault, full, lock};
use std::io;
use std::sync::atomic::Ordering;
use std::sync::{Condvar, Mutex, PoisonError};

/// Serialises flushes. Rounds are numbered from 1.
#[derive(Debug, Default)]
pub(crate) struct Rounds {
    state: Mutex<State>,
    ended: Condvar,
    /// Held by the current round, and by other writers of metadata.
    pub(crate) alone: Mutex<()>,
}

#[derive(Debug, Default)]
struct State {
    begun: u64,
    ended: u64,
    /// The latest round that succeeded, which covers all earlier ones.
    good: u64,
    /// Error of the last failed round.
    error: Option<(io::ErrorKind, Option<i32>)>,
}

/// The failure of a plan.
struct Failure {
    /// Whether it failed in the first step, whose sync did not complete.
    early: bool,
    error: io::Error,
}

impl Disk {
    /// Puts everything written before this call on stable storage.
    ///
    /// # Errors
    /// A write failed, which the next flush retries, or a sync has failed, now or before.
    pub fn flush(&self) -> io::Result<()> {
        if !self.writable {
            return Ok(());
        }
        let rounds = &self.rounds;
        let mut state = lock(&rounds.state);
        // A round in progress may have started before the caller's last write, so wait for the next one.
        let wanted = state.begun + 1;
        loop {
            if state.good >= wanted {
                return Ok(());
            }
            if state.ended >= wanted {
                let (kind, errno) = state.error.unwrap_or((io::ErrorKind::Other, None));
                return Err(errno.map_or_else(|| kind.into(), io::Error::from_raw_os_error));
            }
            if state.begun > state.ended {
                state = rounds.ended.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            }
            state.begun += 1;
            drop(state);
            let result = self.round();
            state = lock(&rounds.state);
            state.ended = state.begun;
            match &result {
                Ok(()) => state.good = state.ended,
                Err(error) => state.error = Some((error.kind(), error.raw_os_error())),
            }
            rounds.ended.notify_all();
            return result;
        }
    }

    /// Stops all writing, because another program has truncated the file.
    pub fn give_up(&self) {
        self.failed.store(true, Ordering::Release);
    }

    pub(crate) fn check_failed(&self) -> io::Result<()> {
        if self.failed.load(Ordering::Acquire) {
            return Err(io::Error::other("a flush of the image failed before"));
        }
        Ok(())
    }

    pub(crate) fn sync(&self) -> io::Result<()> {
        self.check_failed()?;
        self.storage.sync().inspect_err(|_| self.failed.store(true, Ordering::Release))
    }

    fn round(&self) -> io::Result<()> {
        let _alone = lock(&self.rounds.alone);
        self.check_failed()?;
        let mut plan = lock(&self.meta).plan();
        if let Err(failure) = self.execute(&plan) {
            lock(&self.meta).restore(plan, failure.early);
            return Err(failure.error);
        }
        let mut last = Vec::new();
        {
            let mut meta = lock(&self.meta);
            meta.planned();
            meta.free(&*self.storage, &std::mem::take(&mut plan.frees), Some(&mut last));
        }
        if last.is_empty() {
            return Ok(());
        }
        // Punch holes before the clusters can be reused.
        let bits = self.shape.cluster_bits;
        for free in &last {
            self.storage.punch(free.first << bits, free.count << bits);
        }
        lock(&self.meta).free(&*self.storage, &last, None);
        Ok(())
    }

    fn execute(&self, plan: &Plan) -> Result<(), Failure> {
        let early = |error| Failure { early: true, error };
        let late = |error| Failure { early: false, error };
        let is_fresh = |part: &&Part| part.fresh;
        plan.blocks
            .iter()
            .chain(plan.tables.iter().filter(is_fresh))
            .try_for_each(|part| self.write_part(part))
            .map_err(early)?;
        if !self.has_fault(SeededFault::NoEarlySync) {
            self.sync().map_err(early)?;
        }
        if !plan.table.is_empty() {
            plan.table.iter().try_for_each(|(at, bytes)| self.storage.write_at(bytes, *at)).map_err(late)?;
            self.sync().map_err(late)?;
        }
        let mut tables = plan.tables.iter().filter(|part| !part.fresh).peekable();
        if tables.peek().is_none() && plan.l1.is_empty() {
            return Ok(());
        }
        tables.try_for_each(|part| self.write_part(part)).map_err(late)?;
        plan.l1.iter().try_for_each(|(at, bytes)| self.storage.write_at(bytes, *at)).map_err(late)?;
        self.sync().map_err(late)
    }

    fn write_part(&self, part: &Part) -> io::Result<()> {
        part.pieces.iter().try_for_each(|(at, bytes)| self.storage.write_at(bytes, part.at + *at as u64))
    }

    /// Grows the refcount table: moves it to a larger area at the end of the clusters that it can count,
    /// with blocks that count that area.
    ///
    /// # Errors
    /// There is no space, or a write failed; the old table remains in use.
    pub(crate) fn grow_table(&self) -> io::Result<()> {
        let _alone = lock(&self.rounds.alone);
        self.check_failed()?;
        let mut meta = lock(&self.meta);
        let meta = &mut *meta;
        let bits = self.shape.cluster_bits;
        let (start, per_block) = (meta.refs.capacity(), meta.refs.per_block());
        let per_cluster = self.shape.cluster() / 8;
        let old = meta.refs.table.len() as u64 / per_cluster;
        // The new blocks count themselves and a table of `clusters` clusters, which needs entries for them.
        let mut clusters = old + old.div_ceil(2);
        let mut blocks = 1;
        while blocks * per_block < blocks + clusters || clusters * per_cluster < old * per_cluster + blocks {
            if blocks * per_block < blocks + clusters { blocks += 1 } else { clusters += 1 }
        }
        if clusters << bits > (8 << 20) {
            return Err(full());
        }
        meta.refs.cover(&*self.storage, start + blocks + clusters)?;
        self.write_grown(meta, start, blocks, clusters)?;
        let old_at = meta.refs.table_at;
        let table_at = (start + blocks) << bits;
        let mut entry = [0; 12];
        entry[..8].copy_from_slice(&table_at.to_be_bytes());
        entry[8..].copy_from_slice(&(clusters as u32).to_be_bytes());
        let mut table = meta.refs.table.clone();
        table.extend((0..blocks).map(|number| (start + number) << bits));
        table.resize((clusters * per_cluster) as usize, 0);
        // The entry is within a single sector, so the header refers to either the old or the new table.
        // After an error either may be on disk, so nothing is written any more.
        let switched = self.storage.write_at(&entry, AT_TABLE as u64).and_then(|()| self.storage.sync());
        switched.inspect_err(|_| self.failed.store(true, Ordering::Release))?;
        meta.refs.moved(table, table_at);
        if self.has_fault(SeededFault::ForgetTable) {
            meta.refs.table_changed.clear();
        }
        for cluster in 0..old {
            let _ = meta.refs.release(&*self.storage, (old_at >> bits) + cluster);
        }
        Ok(())
    }

    /// Writes the new table and its blocks durably. Nothing refers to them yet.
    fn write_grown(&self, meta: &mut Meta, start: u64, blocks: u64, clusters: u64) -> io::Result<()> {
        let (bits, order, per_block) = (self.shape.cluster_bits, self.order, meta.refs.per_block());
        for block in 0..blocks {
            let mut bytes = vec![0; 1 << bits];
            let taken = (blocks + clusters).saturating_sub(block * per_block).min(per_block);
            for index in 0..taken as usize {
                let (at, with, len) = with_count(&bytes, index, order, 1);
                bytes[at..at + len].copy_from_slice(&with[..len]);
            }
            self.storage.write_at(&bytes, (start + block) << bits)?;
        }
        let mut table: Vec<u8> = Vec::with_capacity((clusters << bits) as usize);
        for (index, at) in meta.refs.table.iter().enumerate() {
            // Blocks that nothing on disk refers to have not been written yet.
            let at = if meta.refs.blocks.is_fresh(index as u64) { 0 } else { *at };
            table.extend(at.to_be_bytes());
        }
        table.extend((0..blocks).flat_map(|number| ((start + number) << bits).to_be_bytes()));
        table.resize((clusters << bits) as usize, 0);
        debug_assert!(table.len().is_multiple_of(SECTOR));
        self.storage.write_at(&table, (start + blocks) << bits)?;
        self.sync()
    }
}
