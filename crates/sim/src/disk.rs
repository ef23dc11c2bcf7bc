//! A simulated disk: a file whose writes stay in a volatile cache until they are synced.
//!
//! Each sector has its current content, its content on stable storage, and every content in between: after a
//! power cut it has any of those, independently of other sectors, since write-back may happen at any time and
//! in any order. A sync makes stable what was written before it started. A sync that fails may drop dirty
//! data as Linux does: it is still read back and the next sync succeeds, but it was never written.
//!
//! Time, completion order and the choice of faults are in [`SimRing`](crate::SimRing).

use crate::{Rng, SECTOR_LEN};
use std::collections::BTreeMap;

/// Sectors that are allocated or punched together: a page of a file system.
const PAGE_SECTORS: u64 = 8;
const SECTOR: u64 = SECTOR_LEN as u64;

/// Configuration of a disk.
#[derive(Clone, Copy, Debug)]
pub struct DiskConfig {
    /// Size in bytes.
    pub len: u64,
    /// `fallocate` can punch holes; otherwise `-EOPNOTSUPP`.
    pub punch: bool,
    /// `fallocate` can zero ranges; otherwise `-EOPNOTSUPP`.
    pub zero_range: bool,
    /// Alignment of offsets and lengths; others fail with `-EINVAL`. 1 for buffered files.
    pub align: u64,
    /// Alignment of the address and length of memory.
    pub align_memory: u64,
}

/// Content of a sector that no sync has made stable.
#[derive(Clone, Debug)]
struct Dirty {
    sequence: u64,
    bytes: Box<[u8; SECTOR_LEN]>,
    /// A sync of it failed: it never becomes stable.
    dropped: bool,
}

/// A simulated disk.
#[derive(Clone, Debug)]
pub struct Disk {
    config: DiskConfig,
    now: Vec<u8>,
    stable: Vec<u8>,
    /// Contents of each sector that are not stable, oldest first.
    dirty: BTreeMap<u64, Vec<Dirty>>,
    /// Whether each page is allocated.
    allocated: Vec<bool>,
    sequence: u64,
    /// Whether write-back has failed since power-on: data that is read back may never become stable.
    failed: bool,
}

impl Disk {
    /// Creates an empty disk: all holes.
    pub fn new(config: DiskConfig) -> Disk {
        assert!(config.len.is_multiple_of(SECTOR) && config.align.is_power_of_two());
        let bytes = vec![0; config.len as usize];
        let pages = config.len.div_ceil(SECTOR * PAGE_SECTORS) as usize;
        Disk {
            config,
            stable: bytes.clone(),
            now: bytes,
            dirty: BTreeMap::new(),
            allocated: vec![false; pages],
            sequence: 0,
            failed: false,
        }
    }

    /// Returns the size in bytes.
    pub fn len(&self) -> u64 {
        self.now.len() as u64
    }

    /// Changes the required alignment, as when the file is switched between buffered and direct I/O.
    pub fn realign(&mut self, align: u64, align_memory: u64) {
        (self.config.align, self.config.align_memory) = (align, align_memory);
    }

    /// Returns whether the size is 0.
    pub fn is_empty(&self) -> bool {
        self.now.is_empty()
    }

    /// Returns the configuration of the disk.
    pub fn config(&self) -> DiskConfig {
        self.config
    }

    /// Returns whether data may have been dropped since the last power cut: then the file's readers must not
    /// assume that the data they read is stable.
    pub fn has_failed(&self) -> bool {
        self.failed
    }

    /// Returns whether a range lies in allocated pages only.
    pub fn is_allocated(&self, offset: u64, len: u64) -> bool {
        pages(offset, len).all(|page| self.allocated[page as usize])
    }

    /// Reads into `into` from `offset`. Returns the number of bytes read, which is less at the end of the
    /// disk.
    pub fn read(&self, offset: u64, into: &mut [u8]) -> usize {
        let start = offset.min(self.len()) as usize;
        let len = into.len().min(self.now.len() - start);
        into[..len].copy_from_slice(&self.now[start..start + len]);
        len
    }

    /// Writes `bytes` at `offset`, to stable storage if `durable`.
    ///
    /// # Panics
    /// If the write would grow the disk: a stack must stay within its device.
    pub fn write(&mut self, offset: u64, bytes: &[u8], durable: bool) {
        self.store(offset, bytes.len() as u64, |at, into| {
            into.copy_from_slice(&bytes[at as usize..at as usize + into.len()]);
        });
        pages(offset, bytes.len() as u64).for_each(|page| self.allocated[page as usize] = true);
        if durable {
            self.make_stable(offset, bytes.len() as u64);
        }
    }

    /// Zeroes a range; pages entirely in it become holes.
    pub fn punch(&mut self, offset: u64, len: u64) {
        self.store(offset, len, |_, into| into.fill(0));
        let page_len = SECTOR * PAGE_SECTORS;
        let end =
            if offset + len == self.len() { self.allocated.len() as u64 } else { (offset + len) / page_len };
        (offset.div_ceil(page_len)..end).for_each(|page| self.allocated[page as usize] = false);
    }

    /// Zeroes a range; its pages are allocated.
    pub fn zero(&mut self, offset: u64, len: u64) {
        self.store(offset, len, |_, into| into.fill(0));
        pages(offset, len).for_each(|page| self.allocated[page as usize] = true);
    }

    /// Allocates the holes in a range.
    pub fn allocate(&mut self, offset: u64, len: u64) {
        assert!(
            offset + len <= self.len(),
            "an allocation of {offset}+{len} leaves a disk of {}",
            self.len()
        );
        pages(offset, len).for_each(|page| self.allocated[page as usize] = true);
    }

    /// Returns the first offset from `offset` on that is data (or a hole). Returns `None` past the end, or if
    /// no data follows. The end of the disk counts as a hole.
    pub fn seek(&self, offset: u64, hole: bool) -> Option<u64> {
        if offset >= self.len() {
            return None;
        }
        let page_len = SECTOR * PAGE_SECTORS;
        let found = (offset / page_len..self.allocated.len() as u64)
            .find(|&page| self.allocated[page as usize] != hole)
            .map(|page| (page * page_len).max(offset));
        if hole { Some(found.unwrap_or(self.len()).min(self.len())) } else { found }
    }

    /// Returns the sequence number up to which a sync that starts now is effective.
    pub fn sync_point(&self) -> u64 {
        self.sequence
    }

    /// Makes stable everything written up to `point`.
    pub fn sync(&mut self, point: u64) {
        let stable = &mut self.stable;
        self.dirty.retain(|sector, contents| {
            let reached = contents.partition_point(|content| content.sequence <= point);
            if let Some(last) = contents[..reached].iter().rfind(|content| !content.dropped) {
                stable[sector_range(*sector)].copy_from_slice(&last.bytes[..]);
            }
            contents.drain(..reached);
            !contents.is_empty()
        });
    }

    /// Fails a sync up to `point`: some dirty data is written, some is still dirty, and some is marked clean
    /// without having been written.
    pub fn fail_sync(&mut self, point: u64, rng: &mut Rng) {
        self.fail_write_back(0..self.len() / SECTOR, point, rng);
    }

    /// Fails a durable write after its data reached the cache. The pages of its range are affected as by a
    /// failed sync.
    pub fn fail_durable(&mut self, offset: u64, len: u64, rng: &mut Rng) {
        let touched = pages(offset, len);
        let sectors = touched.start * PAGE_SECTORS..touched.end * PAGE_SECTORS;
        self.fail_write_back(sectors, self.sequence, rng);
    }

    fn fail_write_back(&mut self, sectors: std::ops::Range<u64>, point: u64, rng: &mut Rng) {
        self.failed = true;
        let stable = &mut self.stable;
        for (sector, contents) in self.dirty.range_mut(sectors) {
            let reached = contents.partition_point(|content| content.sequence <= point);
            match (rng.below(3), contents[..reached].iter().rfind(|content| !content.dropped)) {
                (0, Some(last)) => stable[sector_range(*sector)].copy_from_slice(&last.bytes[..]),
                (1, _) => contents[..reached].iter_mut().for_each(|content| content.dropped = true),
                _ => {}
            }
        }
    }

    /// Cuts the power: each sector then has its stable content or any later one.
    pub fn power_cut(&mut self, rng: &mut Rng) {
        for (sector, contents) in std::mem::take(&mut self.dirty) {
            let choice = rng.below(contents.len() as u64 + 1) as usize;
            if let Some(content) = choice.checked_sub(1).map(|index| &contents[index]) {
                self.stable[sector_range(sector)].copy_from_slice(&content.bytes[..]);
            }
        }
        self.now.copy_from_slice(&self.stable);
        self.failed = false;
        // A punched page has its old blocks again if its old content is back.
        for (page, content) in self.now.chunks(PAGE_SECTORS as usize * SECTOR_LEN).enumerate() {
            let zeroes = &[0; PAGE_SECTORS as usize * SECTOR_LEN][..content.len()];
            self.allocated[page] |= content != zeroes;
        }
    }

    /// Makes the current content of a range stable, because a durable write has completed.
    pub(crate) fn make_stable(&mut self, offset: u64, len: u64) {
        for sector in sectors(offset, len) {
            self.dirty.remove(&sector);
            self.stable[sector_range(sector)].copy_from_slice(&self.now[sector_range(sector)]);
        }
    }

    /// Changes a range sector by sector; `fill` gets the offset in the range.
    fn store(&mut self, offset: u64, len: u64, mut fill: impl FnMut(u64, &mut [u8])) {
        assert!(offset + len <= self.len(), "a write to {offset}+{len} leaves a disk of {}", self.len());
        for sector in sectors(offset, len) {
            let range = sector_range(sector);
            let start = (sector * SECTOR).max(offset);
            let end = (sector * SECTOR + SECTOR).min(offset + len);
            fill(start - offset, &mut self.now[start as usize..end as usize]);
            let mut bytes = Box::new([0; SECTOR_LEN]);
            bytes.copy_from_slice(&self.now[range]);
            self.sequence += 1;
            let content = Dirty { sequence: self.sequence, bytes, dropped: false };
            self.dirty.entry(sector).or_default().push(content);
        }
    }
}

fn sectors(offset: u64, len: u64) -> std::ops::Range<u64> {
    offset / SECTOR..(offset + len).div_ceil(SECTOR)
}

fn pages(offset: u64, len: u64) -> std::ops::Range<u64> {
    let page_len = SECTOR * PAGE_SECTORS;
    offset / page_len..(offset + len).div_ceil(page_len)
}

fn sector_range(sector: u64) -> std::ops::Range<usize> {
    let start = sector as usize * SECTOR_LEN;
    start..start + SECTOR_LEN
}

#[cfg(test)]
mod tests {
    use super::*;

    fn disk() -> Disk {
        Disk::new(DiskConfig { len: 64 << 10, punch: true, zero_range: true, align: 1, align_memory: 1 })
    }

    /// Possible values of byte `at` after a power cut.
    fn after_cut(disk: &Disk, at: u64) -> Vec<u8> {
        let mut seen: Vec<u8> = (0..200)
            .map(|seed| {
                let (mut disk, mut byte) = (disk.clone(), [0]);
                disk.power_cut(&mut Rng::new(seed));
                disk.read(at, &mut byte);
                byte[0]
            })
            .collect();
        seen.sort_unstable();
        seen.dedup();
        seen
    }

    #[test]
    fn unsynced_writes_may_or_may_not_survive_a_power_cut() {
        let mut disk = disk();
        disk.write(0, &[1; 512], false);
        disk.write(0, &[2; 512], false);
        assert_eq!(after_cut(&disk, 0), [0, 1, 2]);
    }

    #[test]
    fn synced_and_durable_writes_survive() {
        let mut disk = disk();
        disk.write(0, &[1; 512], false);
        disk.write(0, &[2; 512], false);
        let point = disk.sync_point();
        disk.write(512, &[3; 512], false);
        disk.sync(point);
        disk.write(1024, &[4; 512], true);
        assert_eq!(after_cut(&disk, 0), [2]);
        assert_eq!(after_cut(&disk, 512), [0, 3], "written after the sync began");
        assert_eq!(after_cut(&disk, 1024), [4]);
    }

    #[test]
    fn a_sync_after_a_failed_one_does_not_restore_dropped_data() {
        let mut lost = 0;
        for seed in 0..50 {
            let mut disk = disk();
            disk.write(0, &[1; 512], false);
            disk.fail_sync(disk.sync_point(), &mut Rng::new(seed));
            let mut byte = [0];
            disk.read(0, &mut byte);
            assert_eq!(byte, [1], "it still reads back");
            disk.sync(disk.sync_point());
            lost += usize::from(after_cut(&disk, 0) == [0]);
        }
        assert!((5..45).contains(&lost), "{lost}");
    }

    #[test]
    fn a_partial_sector_keeps_its_rest() {
        let mut disk = disk();
        disk.write(0, &[1; 1024], true);
        disk.write(500, &[2; 24], false);
        let mut bytes = [0; 1024];
        assert_eq!(disk.read(0, &mut bytes), 1024);
        assert!(bytes.iter().enumerate().all(|(at, &byte)| byte == 1 + u8::from((500..524).contains(&at))));
        assert_eq!(disk.read(disk.len() - 100, &mut bytes), 100);
    }

    #[test]
    fn holes_and_data_are_found() {
        let mut disk = disk();
        assert_eq!((disk.seek(0, false), disk.seek(0, true)), (None, Some(0)));
        disk.write(8192, &[1; 8192], false);
        assert_eq!((disk.seek(0, false), disk.seek(9000, true)), (Some(8192), Some(16384)));
        assert_eq!((disk.seek(9000, false), disk.seek(64 << 10, true)), (Some(9000), None));
        disk.punch(8192 + 100, 8192 - 100);
        assert_eq!(disk.seek(8192, true), Some(12288));
        disk.zero(12288, 52 << 10);
        assert_eq!(disk.seek(8192, true), Some(64 << 10));
        assert!(disk.is_allocated(8192, 56 << 10) && !disk.is_allocated(0, 8193));
    }

    #[test]
    fn data_restored_by_a_power_cut_is_no_hole() {
        let brought_back = (0..50).any(|seed| {
            let mut disk = disk();
            disk.write(0, &[1; 4096], true);
            disk.punch(0, 4096);
            disk.power_cut(&mut Rng::new(seed));
            let mut bytes = [0; 4096];
            disk.read(0, &mut bytes);
            assert!(disk.is_allocated(0, 4096) || bytes == [0; 4096]);
            bytes != [0; 4096]
        });
        assert!(brought_back);
    }

    #[test]
    #[should_panic(expected = "leaves a disk")]
    fn a_write_past_the_end_panics() {
        disk().write((64 << 10) - 1, &[0; 2], false);
    }
}
