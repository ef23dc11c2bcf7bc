//! Checks the refcounts of an image against its tables, and repairs differences.
//!
//! All references are counted before an image is opened for writing, because with refcounts that are too
//! low, allocation would overwrite data. Then low refcounts are raised, `COPIED` flags are corrected, and
//! unreferenced clusters are freed, in such an order that a power cut leaves the image no worse. Images
//! with defects that cannot be repaired safely are refused: invalid entries, and structures that overlap.
//!
//! Clusters are counted in windows, with a pass over all tables for each, so that memory stays bounded.
//! *Invariant:* the check always ends: tables with several references are read once, and the work is bounded
//! by [`WORK_MAX`].

use crate::entry::{COPIED, Entry, Geometry, PLACE};
use crate::header::{AT_AUTOCLEAR, AT_INCOMPATIBLE, BITMAPS_CONSISTENT, DIRTY, Header, half, word};
use crate::open::{read_header, read_words};
use crate::refcounts::{count_at, count_max, with_count};
use crate::{Storage, damaged, snapshots, unsupported};
use std::io;

/// Number of clusters counted in one pass: 32 MiB of counters.
const WINDOW: u64 = 8 << 20;
/// Maximum number of L1 entries of the image and all of its snapshots together: 64 MiB.
const ROOTS_MAX: usize = 4 << 20;
/// Maximum number of bytes of tables that are read.
const WORK_MAX: u64 = 1 << 40;
/// Maximum number of bitmaps of an image.
const BITMAPS_MAX: u32 = 65535;

/// Result of [`check`].
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Report {
    /// Number of clusters whose refcount is lower than their number of references.
    pub too_low: u64,
    /// Number of clusters whose refcount is too high, which wastes space.
    pub leaked: u64,
    /// Number of entries with a wrong `COPIED` flag.
    pub flags: u64,
}

/// Counts all references of an image, without changing it.
///
/// # Errors
/// The image cannot be read, or is damaged in another way.
pub fn check(storage: &dyn Storage) -> io::Result<Report> {
    let header = read_header(storage)?;
    Check::new(storage, &header)?.run(false)
}

/// Repairs an image for writing.
///
/// # Errors
/// The image cannot be repaired.
pub(crate) fn repair(storage: &dyn Storage, header: &mut Header) -> io::Result<()> {
    let mut check = Check::new(storage, header)?;
    let unknown = header.autoclear & !BITMAPS_CONSISTENT;
    if unknown != 0 {
        // Repair counts as a write by a program that does not support these features.
        header.autoclear &= BITMAPS_CONSISTENT;
        storage.write_at(&header.autoclear.to_be_bytes(), AT_AUTOCLEAR as u64)?;
        storage.sync()?;
    }
    check.add_missing_blocks()?;
    let report = check.run(true)?;
    if report != Report::default() {
        tracing::warn!(
            "a qcow2 image was not closed cleanly: {} refcounts were too low, {} clusters leaked, {} flags wrong; \
             repaired where it matters",
            report.too_low,
            report.leaked,
            report.flags
        );
    }
    if header.incompatible & DIRTY != 0 {
        header.incompatible &= !DIRTY;
        storage.write_at(&header.incompatible.to_be_bytes(), AT_INCOMPATIBLE as u64)?;
        storage.sync()?;
    }
    Ok(())
}

/// An L2 table to check.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
struct Root {
    at: u64,
    /// Whether the active L1 table refers to it, so that its `COPIED` flags matter.
    active: bool,
}

struct Check<'a> {
    storage: &'a dyn Storage,
    shape: Geometry,
    order: u32,
    file_len: u64,
    table_at: u64,
    /// The refcount table.
    table: Vec<u64>,
    l1_at: u64,
    l1: Vec<u64>,
    /// L2 tables by offset, once for each reference.
    roots: Vec<Root>,
    /// Bitmap tables: offset, and number of words.
    bitmaps: Vec<(u64, u64)>,
    /// Clusters of structures that nothing else may overlap, as first cluster and count, sorted by offset.
    fixed: Vec<(u64, u64)>,
    /// Whether unreferenced clusters are certainly leaked.
    may_free: bool,
    /// Whether the image is dirty, so that refcounts must be rebuilt exactly.
    dirty: bool,
}

impl<'a> Check<'a> {
    fn new(storage: &'a dyn Storage, header: &Header) -> io::Result<Check<'a>> {
        let shape = Geometry::new(header);
        let l1 = read_words(storage, header.l1_at, header.l1_entries, "its L1 table")?;
        let table_len = header.table_clusters << header.cluster_bits >> 3;
        let table = read_words(storage, header.table_at, table_len, "its refcount table")?;
        let mut check = Check {
            storage,
            shape,
            order: header.refcount_order,
            file_len: storage.len()?,
            table_at: header.table_at,
            table,
            l1_at: header.l1_at,
            roots: Vec::new(),
            bitmaps: Vec::new(),
            fixed: Vec::new(),
            may_free: !header.unknown_extensions,
            dirty: header.incompatible & DIRTY != 0,
            l1,
        };
        check.fix(0, shape.cluster())?;
        check.fix(header.l1_at, header.l1_entries * 8)?;
        check.fix(header.table_at, table_len * 8)?;
        for block in 0..check.table.len() {
            if check.table[block] != 0 {
                check.fix(check.table[block], shape.cluster())?;
            }
        }
        let active = check.l1.clone();
        check.add_roots(&active, true)?;
        check.add_snapshots(header)?;
        check.add_bitmaps(header)?;
        check.roots.sort_unstable();
        check.fixed.sort_unstable();
        if check.fixed.windows(2).any(|pair| pair[0].0 + pair[0].1 > pair[1].0) {
            return Err(damaged("its tables overlap"));
        }
        Ok(check)
    }

    /// Adds a structure that has its own clusters.
    fn fix(&mut self, at: u64, len: u64) -> io::Result<()> {
        let bits = self.shape.cluster_bits;
        if !at.is_multiple_of(self.shape.cluster()) || at.checked_add(len).is_none_or(|end| end > self.end())
        {
            return Err(damaged("one of its tables is unaligned, or past the end of the file"));
        }
        if len > 0 {
            self.fixed.push((at >> bits, len.div_ceil(self.shape.cluster())));
        }
        Ok(())
    }

    /// Returns the end of the file's last cluster.
    fn end(&self) -> u64 {
        self.file_len.next_multiple_of(self.shape.cluster())
    }

    fn add_roots(&mut self, l1: &[u64], active: bool) -> io::Result<()> {
        let places = l1.iter().map(|entry| entry & PLACE).filter(|at| *at != 0);
        let before = self.roots.len();
        self.roots.extend(places.map(|at| Root { at, active }));
        if self.roots.len() > ROOTS_MAX {
            return Err(unsupported("it has too many snapshots to be checked for writing".into()));
        }
        let end = self.end();
        if self.roots[before..]
            .iter()
            .any(|root| !root.at.is_multiple_of(self.shape.cluster()) || root.at >= end)
        {
            return Err(damaged("an L1 entry refers to an offset without a table"));
        }
        Ok(())
    }

    fn add_snapshots(&mut self, header: &Header) -> io::Result<()> {
        let (storage, mut all) = (self.storage, 0);
        let end = snapshots::for_each(storage, header, |snapshot| {
            all += snapshot.l1_entries;
            if all > ROOTS_MAX as u64 {
                return Err(unsupported("it has too many snapshots to be checked for writing".into()));
            }
            let (at, entries) = (snapshot.l1_at, snapshot.l1_entries);
            let l1 = read_words(storage, at, entries, "the L1 table of a snapshot")?;
            self.fix(at, entries * 8)?;
            self.add_roots(&l1, false)
        })?;
        if header.snapshots > 0 { self.fix(header.snapshots_at, end - header.snapshots_at) } else { Ok(()) }
    }

    /// Adds the bitmaps if their extension is valid. Without the autoclear bit they are ignored, so their
    /// clusters are leaked.
    fn add_bitmaps(&mut self, header: &Header) -> io::Result<()> {
        let Some(bitmaps) = header.bitmaps.filter(|_| header.autoclear & BITMAPS_CONSISTENT != 0) else {
            return Ok(());
        };
        if bitmaps.count > BITMAPS_MAX || bitmaps.directory_len > 64 << 20 {
            return Err(damaged("its bitmaps are invalid"));
        }
        self.fix(bitmaps.directory_at, bitmaps.directory_len)?;
        let mut directory = vec![0; bitmaps.directory_len as usize];
        self.storage.read_at(&mut directory, bitmaps.directory_at)?;
        let (mut at, mut words) = (0, 0);
        for _ in 0..bitmaps.count {
            let entry = directory.get(at..).filter(|rest| rest.len() >= 24);
            let entry = entry.ok_or_else(|| damaged("its bitmaps are invalid"))?;
            let (place, count) = (word(entry, 0), u64::from(half(entry, 8)));
            let name = (half(entry, 16) & 0xffff) as usize;
            let extra = half(entry, 20) as usize;
            words += count;
            if words > ROOTS_MAX as u64 {
                return Err(damaged("its bitmaps are invalid"));
            }
            self.fix(place, count * 8)?;
            self.bitmaps.push((place, count));
            at = at.saturating_add((24 + name).saturating_add(extra).next_multiple_of(8));
        }
        Ok(())
    }

    /// Calls `each` with first cluster, cluster count, and number of references, for every reference except
    /// those of fixed structures.
    fn references(&self, mut each: impl FnMut(u64, u64, u32) -> io::Result<()>) -> io::Result<()> {
        let bits = self.shape.cluster_bits;
        for same in self.roots.chunk_by(|a, b| a.at == b.at) {
            let weight = same.len() as u32;
            each(same[0].at >> bits, 1, weight)?;
            self.entries(same[0].at, |_, entry| {
                let (first, count) = self.shape.owned(entry)?;
                if count > 0 { each(first, count, weight) } else { Ok(()) }
            })?;
        }
        for &(at, count) in &self.bitmaps {
            for entry in read_words(self.storage, at, count, "a table of bitmaps")? {
                let at = entry & PLACE;
                if !at.is_multiple_of(self.shape.cluster()) {
                    return Err(damaged("a bitmap is unaligned"));
                }
                if at != 0 {
                    each(at >> bits, 1, 1)?;
                }
            }
        }
        Ok(())
    }

    /// Calls `each` with offset and content of every nonzero entry of an L2 table.
    fn entries(&self, at: u64, mut each: impl FnMut(u64, Entry) -> io::Result<()>) -> io::Result<()> {
        let mut bytes = vec![0; self.shape.cluster() as usize];
        self.storage.read_at(&mut bytes, at)?;
        for start in (0..bytes.len()).step_by(self.shape.entry_len()) {
            let value = word(&bytes, start);
            if value != 0 {
                each(start as u64, Entry { word: value, bitmap: 0 })?;
            }
        }
        Ok(())
    }

    fn per_block(&self) -> u64 {
        1 << (self.shape.cluster_bits + 3 - self.order)
    }

    /// Refuses references past the end or to fixed structures. Returns which refcount blocks are needed.
    fn survey(&self) -> io::Result<Vec<bool>> {
        let end = self.end() >> self.shape.cluster_bits;
        let mut needed = vec![false; self.table.len()];
        let mut need = |cluster: u64| match needed.get_mut((cluster / self.per_block()) as usize) {
            Some(needed) => {
                *needed = true;
                Ok(())
            }
            None => Err(damaged("its refcount table is too short")),
        };
        for &(first, count) in &self.fixed {
            (first..first + count).try_for_each(&mut need)?;
        }
        self.references(|first, count, _| {
            if first >= end {
                return Err(damaged("an entry of its tables refers past the end of the file"));
            }
            let place = self.fixed.partition_point(|(start, _)| *start < first + count);
            if place > 0 && self.fixed[place - 1].0 + self.fixed[place - 1].1 > first {
                return Err(damaged("an entry of its tables refers to another table"));
            }
            (first..first + count).try_for_each(&mut need)
        })?;
        Ok(needed)
    }

    /// Adds missing refcount blocks at the end of the file. Their own refcounts are raised with all others.
    fn add_missing_blocks(&mut self) -> io::Result<()> {
        let mut needed = self.survey()?;
        let bits = self.shape.cluster_bits;
        let mut next = self.end() >> bits;
        let mut added = Vec::new();
        while let Some(block) = (0..needed.len()).find(|block| needed[*block] && self.table[*block] == 0) {
            self.table[block] = next << bits;
            added.push(block);
            self.fixed.push((next, 1));
            let own = needed.get_mut((next / self.per_block()) as usize);
            *own.ok_or_else(|| damaged("its refcount table is too short"))? = true;
            next += 1;
        }
        if added.is_empty() {
            return Ok(());
        }
        self.storage.set_len(next << bits)?;
        self.file_len = next << bits;
        let zeroes = vec![0; 1 << bits];
        added.iter().try_for_each(|block| self.storage.write_at(&zeroes, self.table[*block]))?;
        self.storage.sync()?;
        for block in added {
            self.storage.write_at(&self.table[block].to_be_bytes(), self.table_at + block as u64 * 8)?;
        }
        self.storage.sync()
    }

    fn run(&self, repair: bool) -> io::Result<Report> {
        let mut report = Report::default();
        if !repair {
            let needed = self.survey()?;
            report.too_low +=
                (0..needed.len()).filter(|block| needed[*block] && self.table[*block] == 0).count() as u64;
        }
        let per_window = (WINDOW / self.per_block()).max(1) as usize;
        let windows =
            self.table.chunks(per_window).filter(|blocks| blocks.iter().any(|at| *at != 0)).count() as u64;
        let tables = self.roots.chunk_by(|a, b| a.at == b.at).count() as u64 + 1;
        if (windows * 2).saturating_mul(tables << self.shape.cluster_bits) > WORK_MAX {
            return Err(unsupported("it is too large to be checked for writing".into()));
        }
        for (number, blocks) in self.table.chunks(per_window).enumerate() {
            if blocks.iter().any(|at| *at != 0) {
                let first = (number * per_window) as u64 * self.per_block();
                let mut counts = self.count(first, blocks.len() as u64 * self.per_block())?;
                self.compare(blocks, &mut counts, repair, &mut report)?;
                self.check_flags(first, &counts, repair, &mut report)?;
            }
        }
        Ok(report)
    }

    /// Counts references to the clusters of a window.
    fn count(&self, start: u64, len: u64) -> io::Result<Vec<u32>> {
        let mut counts = vec![0u32; len as usize];
        let mut add = |first: u64, count: u64, weight: u32| {
            for cluster in first.max(start)..(first + count).min(start + len) {
                let count = &mut counts[(cluster - start) as usize];
                *count = count.saturating_add(weight);
            }
        };
        self.fixed.iter().for_each(|&(first, count)| add(first, count, 1));
        self.references(|first, count, weight| {
            add(first, count, weight);
            Ok(())
        })?;
        Ok(counts)
    }

    /// Compares counts with the refcount blocks, and stores the final refcounts on disk in `counts`.
    fn compare(
        &self,
        blocks: &[u64],
        counts: &mut [u32],
        repair: bool,
        report: &mut Report,
    ) -> io::Result<()> {
        let per_block = self.per_block() as usize;
        let mut wrote = false;
        for (&at, counts) in blocks.iter().zip(counts.chunks_mut(per_block)).filter(|(at, _)| **at != 0) {
            let mut bytes = vec![0; self.shape.cluster() as usize];
            self.storage.read_at(&mut bytes, at)?;
            let before = bytes.clone();
            for (index, wanted) in counts.iter_mut().enumerate() {
                let have = count_at(&bytes, index, self.order);
                let want = u64::from(*wanted);
                if want == have {
                    continue;
                }
                report.too_low += u64::from(want > have);
                report.leaked += u64::from(want < have);
                if want > have && (want > count_max(self.order) || want == u64::from(u32::MAX)) {
                    return Err(damaged("a cluster has more references than a refcount can hold"));
                }
                if want > have || self.dirty || (want == 0 && self.may_free) {
                    let (at, with, len) = with_count(&bytes, index, self.order, want);
                    bytes[at..at + len].copy_from_slice(&with[..len]);
                } else {
                    *wanted = u32::try_from(have).unwrap_or(u32::MAX);
                }
            }
            if repair && bytes != before {
                self.storage.write_at(&bytes, at)?;
                wrote = true;
            }
        }
        if wrote { self.storage.sync() } else { Ok(()) }
    }

    /// Checks that active entries have the `COPIED` flag if, and only if, their cluster has one reference.
    fn check_flags(&self, start: u64, counts: &[u32], repair: bool, report: &mut Report) -> io::Result<()> {
        let bits = self.shape.cluster_bits;
        let mut wrote = false;
        let mut look = |entry_at: u64, entry: u64| {
            let count = ((entry & PLACE) >> bits).checked_sub(start).and_then(|at| counts.get(at as usize));
            let Some(count) = count else { return Ok(()) };
            if (*count == 1) == (entry & COPIED != 0) {
                return Ok(());
            }
            report.flags += 1;
            if repair {
                wrote = true;
                self.storage.write_at(&(entry ^ COPIED).to_be_bytes(), entry_at)?;
            }
            Ok(())
        };
        for (index, &entry) in self.l1.iter().enumerate().filter(|(_, entry)| **entry & PLACE != 0) {
            look(self.l1_at + index as u64 * 8, entry)?;
        }
        let active =
            self.roots.chunk_by(|a, b| a.at == b.at).filter(|same| same.iter().any(|root| root.active));
        for same in active {
            self.entries(same[0].at, |start, entry| {
                if Geometry::has_copied_flag(entry) { look(same[0].at + start, entry.word) } else { Ok(()) }
            })?;
        }
        if wrote { self.storage.sync() } else { Ok(()) }
    }
}
