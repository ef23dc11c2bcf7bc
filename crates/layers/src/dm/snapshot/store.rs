//! An exception store: which chunks of an origin were copied, and where to. Shared by all queues of the snapshot and of
//! its origin.
//!
//! On disk, persistent, as the kernel's dm-snap-persistent has it, all numbers little-endian and chunks counted from the
//! beginning of the COW device:
//!
//! ```text
//! chunk 0   header: magic "SnAp", valid, version 1, chunk size in sectors; four bytes each
//! chunk 1   first area: pairs of eight bytes, old chunk and new chunk, as many as fit; a new chunk of 0 ends them
//! …         data, as many chunks as an area has pairs, then the next area
//! ```
//!
//! An area is written whole after the data it names was flushed; the next one is emptied before one is full. The table in
//! memory is read without a lock: 0 not copied, 1 being copied, else the new chunk plus 2.
//!
//! *Invariant:* who claimed a chunk lets go of it, by an exception or by making the snapshot invalid.

use block::{Bytes, Flags, Op, Request, Sectors, Status};
use std::collections::VecDeque;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, fence};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

/// `SNAP_MAGIC`.
const MAGIC: u32 = 0x7041_6e53;
const VERSION: u32 = 1;
/// An exception on disk.
const PAIR: u64 = 16;
/// Entries of a page of the table.
const PAGE: usize = 4096;
/// Reads of the origin are counted by so many remainders of their chunks.
const BUCKETS: usize = 256;

const NONE: u64 = 0;
const CLAIMED: u64 = 1;

/// How a store keeps what it knows.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Keeping {
    /// `P`, and with `O` whether the device may stay, full.
    Persistent { overflow: bool },
    /// `N`: not at all.
    Transient,
}

/// Where the next exceptions go.
#[derive(Debug)]
struct Meta {
    /// The next chunk that data may go to.
    next_free: u64,
    /// The area under way, as it will be on disk, its number, and how many pairs it has.
    area: Vec<u8>,
    current: u64,
    committed: u64,
    /// Copied, and not in an area yet: old, new.
    ready: VecDeque<(u64, u64)>,
    /// In the area, and not on disk yet.
    writing: Vec<(u64, u64)>,
    /// Somebody writes the area.
    busy: bool,
}

#[derive(Debug)]
pub(super) struct Store {
    pub(super) keeping: Keeping,
    pub(super) chunk: Sectors,
    /// In sectors. It may grow when a table is put to use.
    cow_len: AtomicU64,
    pairs: u64,
    table: Box<[OnceLock<Box<[AtomicU64]>>]>,
    meta: Mutex<Meta>,
    readers: Box<[AtomicU32]>,
    valid: AtomicBool,
    /// Once it is not valid: its header says so, or there is none.
    recorded: AtomicBool,
    /// The header could not be written for so long that writes of the origin do not wait for it any more, but fail.
    stuck: AtomicBool,
    /// A table that has it is in use.
    active: AtomicBool,
    overflowed: AtomicBool,
    pub(super) events: AtomicU32,
}

/// What a look at a chunk finds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Found {
    /// It was not copied.
    Origin,
    /// Somebody copies it.
    Busy,
    /// It is this chunk of the COW device.
    Copied(u64),
}

/// A piece of the area to write, and where.
#[derive(Debug)]
pub(super) struct AreaWrite {
    pub(super) at: Bytes,
    /// Empty this one first.
    pub(super) next_at: Option<Bytes>,
}

/// What the first block of a COW device says.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Header {
    pub(super) valid: bool,
    pub(super) chunk: Sectors,
}

impl Header {
    pub(super) fn encode(self) -> [u8; 16] {
        let words = [MAGIC, u32::from(self.valid), VERSION, self.chunk.0 as u32];
        let mut bytes = [0; 16];
        words.iter().zip(bytes.chunks_mut(4)).for_each(|(word, at)| at.copy_from_slice(&word.to_le_bytes()));
        bytes
    }

    /// `Ok(None)`: the device holds nothing yet.
    pub(super) fn decode(bytes: &[u8]) -> Result<Option<Header>, ()> {
        let word = |at: usize| bytes[at * 4..at * 4 + 4].iter().rev().fold(0, |w, b| w << 8 | u32::from(*b));
        match word(0) {
            0 => Ok(None),
            MAGIC if word(2) == VERSION => {
                Ok(Some(Header { valid: word(1) != 0, chunk: Sectors(word(3).into()) }))
            }
            _ => Err(()),
        }
    }
}

impl Store {
    /// Empty. `chunk`: a power of two.
    pub(super) fn new(keeping: Keeping, chunk: Sectors, cow_len: Sectors, origin_len: Sectors) -> Store {
        let pairs = chunk.bytes().0 / PAIR;
        let pages = origin_len.0.div_ceil(chunk.0).div_ceil(PAGE as u64);
        let persistent = keeping != Keeping::Transient;
        let meta = Meta {
            next_free: if persistent { 2 } else { 0 },
            area: if persistent { vec![0; chunk.bytes().0 as usize] } else { Vec::new() },
            current: 0,
            committed: 0,
            ready: VecDeque::new(),
            writing: Vec::new(),
            busy: false,
        };
        Store {
            keeping,
            chunk,
            cow_len: AtomicU64::new(cow_len.0),
            pairs,
            table: (0..pages).map(|_| OnceLock::new()).collect(),
            meta: Mutex::new(meta),
            readers: (0..BUCKETS).map(|_| AtomicU32::new(0)).collect(),
            valid: AtomicBool::new(true),
            recorded: AtomicBool::new(!persistent),
            stuck: AtomicBool::new(false),
            active: AtomicBool::new(false),
            overflowed: AtomicBool::new(false),
            events: AtomicU32::new(0),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Meta> {
        self.meta.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Where an area lies.
    pub(super) fn area_at(&self, area: u64) -> Bytes {
        Sectors((1 + (self.pairs + 1) * area) * self.chunk.0).bytes()
    }

    /// Chunks that fit the COW device.
    fn chunks(&self) -> u64 {
        self.cow_len.load(Acquire) / self.chunk.0
    }

    /// Its COW device is that long by now.
    pub(super) fn set_cow_len(&self, len: Sectors) {
        self.cow_len.store(len.0, Release);
    }

    /// A table that has it is put to use. Whether that is the first one.
    pub(super) fn activate(&self) -> bool {
        !self.active.swap(true, AcqRel)
    }

    /// No table has it any more.
    pub(super) fn retire(&self) {
        self.active.store(false, Release);
    }

    /// Whether its origin has to copy for it, or wait for it.
    pub(super) fn is_active(&self) -> bool {
        self.active.load(Acquire)
    }

    /// It is not valid, and its header does not say so yet: until then no write may pass it by.
    pub(super) fn is_settling(&self) -> bool {
        !self.is_valid() && !self.is_recorded() && self.is_active()
    }

    /// Its header says that it is not valid.
    pub(super) fn recorded(&self) {
        self.recorded.store(true, Release);
    }

    /// Whether the header of a store that is not valid says so, or it has none.
    pub(super) fn is_recorded(&self) -> bool {
        self.recorded.load(Acquire)
    }

    /// Writes that would have to wait for its header fail from now on, until that is written.
    pub(super) fn stick(&self) {
        self.stuck.store(true, Release);
    }

    /// Whether a write that would make it wrong fails now.
    pub(super) fn is_stuck(&self) -> bool {
        self.stuck.load(Acquire) && self.is_settling()
    }

    /// The next data chunk is never one of an area.
    fn skip_area(&self, meta: &mut Meta) {
        if meta.next_free % (self.pairs + 1) == 1 {
            meta.next_free += 1;
        }
    }

    /// Take in an area that was read, the next in order. Whether another one follows it.
    pub(super) fn take_area(&self, bytes: &[u8]) -> Result<bool, ()> {
        let mut meta = self.lock();
        let number = |at: usize| bytes[at..at + 8].iter().rev().fold(0u64, |n, b| n << 8 | u64::from(*b));
        for pair in 0..self.pairs as usize {
            let (old, new) = (number(pair * 16), number(pair * 16 + 8));
            if new == 0 {
                meta.committed = pair as u64;
                let used = pair * 16;
                meta.area[..used].copy_from_slice(&bytes[..used]);
                self.skip_area(&mut meta);
                return Ok(false);
            }
            if new >= self.chunks() || new % (self.pairs + 1) == 1 {
                return Err(());
            }
            meta.next_free = meta.next_free.max(new + 1);
            if let Some(cell) = self.cell(old) {
                cell.store(new + 2, Relaxed);
            }
        }
        meta.current += 1;
        self.skip_area(&mut meta);
        Ok(true)
    }

    /// Whether an area has exceptions: the first pair has a new chunk.
    pub(super) fn has_exceptions(&self, area: &[u8]) -> bool {
        area[8..PAIR as usize].iter().any(|&byte| byte != 0)
    }

    /// The cell of a chunk; `None`: it lies beyond the origin.
    fn cell(&self, chunk: u64) -> Option<&AtomicU64> {
        let page = self.table.get(usize::try_from(chunk).ok()? / PAGE)?;
        let page = page.get_or_init(|| (0..PAGE).map(|_| AtomicU64::new(NONE)).collect());
        Some(&page[chunk as usize % PAGE])
    }

    /// What there is of a chunk.
    #[inline]
    pub(super) fn find(&self, chunk: u64) -> Found {
        let page = self.table.get(chunk as usize / PAGE).and_then(OnceLock::get);
        match page.map_or(NONE, |page| page[chunk as usize % PAGE].load(Acquire)) {
            NONE => Found::Origin,
            CLAIMED => Found::Busy,
            copied => Found::Copied(copied - 2),
        }
    }

    /// A chunk that was not copied is the caller's to copy.
    pub(super) fn claim(&self, chunk: u64) -> bool {
        let cell = self.cell(chunk);
        cell.is_some_and(|cell| cell.compare_exchange(NONE, CLAIMED, AcqRel, Relaxed).is_ok())
    }

    /// It is not copied after all.
    pub(super) fn unclaim(&self, chunk: u64) {
        if let Some(cell) = self.cell(chunk) {
            cell.store(NONE, Release);
        }
    }

    /// A place for a copy. `None`: there is none left.
    pub(super) fn allocate(&self) -> Option<u64> {
        let mut meta = self.lock();
        let new = meta.next_free;
        if new >= self.chunks() {
            return None;
        }
        meta.next_free += 1;
        if self.keeping != Keeping::Transient {
            self.skip_area(&mut meta);
        }
        Some(new)
    }

    /// A copy is there: an exception at once, or when an area says so.
    pub(super) fn copied(&self, old: u64, new: u64) {
        match self.keeping {
            Keeping::Transient => self.publish(old, new),
            Keeping::Persistent { .. } => self.lock().ready.push_back((old, new)),
        }
    }

    fn publish(&self, old: u64, new: u64) {
        if let Some(cell) = self.cell(old) {
            cell.store(new + 2, Release);
        }
    }

    /// Put what is ready into the area, as much as fits, and write it. `None`: somebody else does, nothing is ready, or the
    /// store is lost.
    pub(super) fn begin_commit(&self) -> Option<AreaWrite> {
        let mut meta = self.lock();
        if meta.busy || meta.ready.is_empty() || !self.is_valid() {
            return None;
        }
        while meta.committed < self.pairs {
            let Some((old, new)) = meta.ready.pop_front() else { break };
            let at = (meta.committed * PAIR) as usize;
            meta.area[at..at + 8].copy_from_slice(&old.to_le_bytes());
            meta.area[at + 8..at + 16].copy_from_slice(&new.to_le_bytes());
            meta.committed += 1;
            meta.writing.push((old, new));
        }
        meta.busy = true;
        // An area behind the end of the device holds nothing: the store is full.
        let next_chunk = 1 + (self.pairs + 1) * (meta.current + 1);
        let is_next = meta.committed == self.pairs && next_chunk < self.chunks();
        let next_at = is_next.then(|| self.area_at(meta.current + 1));
        Some(AreaWrite { at: self.area_at(meta.current), next_at })
    }

    /// The area as it is to be written.
    pub(super) fn copy_area(&self, into: &mut [u8]) {
        into.copy_from_slice(&self.lock().area);
    }

    /// It is on disk: what it names is copied from now on.
    pub(super) fn end_commit(&self) {
        let mut meta = self.lock();
        for (old, new) in std::mem::take(&mut meta.writing) {
            self.publish(old, new);
        }
        if meta.committed == self.pairs {
            meta.committed = 0;
            meta.current += 1;
            meta.area.fill(0);
        }
        meta.busy = false;
    }

    /// A copy that was begun is not made now. `commits`: nor is the area written that its request wrote; what others have in
    /// it is theirs to write again.
    pub(super) fn abandon(&self, old: u64, commits: bool) {
        let mut meta = self.lock();
        if commits {
            let back = std::mem::take(&mut meta.writing);
            let end = (meta.committed * PAIR) as usize;
            meta.committed -= back.len() as u64;
            let begin = (meta.committed * PAIR) as usize;
            meta.area[begin..end].fill(0);
            back.into_iter().rev().for_each(|pair| meta.ready.push_front(pair));
            meta.busy = false;
        }
        meta.ready.retain(|&(ready, _)| ready != old);
        drop(meta);
        self.unclaim(old);
    }

    /// The area could not be written: the store is lost, before anyone else writes the area with what it has now.
    pub(super) fn fail_commit(&self) {
        self.invalidate();
        let mut meta = self.lock();
        meta.busy = false;
        meta.writing.clear();
        meta.ready.clear();
    }

    /// Nothing that the snapshot says can be believed any more.
    pub(super) fn invalidate(&self) {
        if self.valid.swap(false, AcqRel) {
            self.events.fetch_add(1, Relaxed);
        }
    }

    /// A client's request has failed. One that was to make data durable may have lost data of copies that are not named by
    /// an area yet, and a later sync would not say so: no area is written after it.
    #[cold]
    pub(super) fn ended_badly(&self, req: &Request, status: Status) {
        let syncs = req.op == Op::Flush || req.op.is_write() && req.flags.has(Flags::FUA);
        let is_harmless = match status {
            Status::Requeue | Status::Again | Status::Resource | Status::DeviceResource => true,
            // A write that found no room has lost nothing; a sync may have.
            Status::NoSpace => req.op != Op::Flush,
            Status::NotSupported | Status::Invalid | Status::NotPermitted => true,
            _ => false,
        };
        if syncs && !is_harmless && self.keeping != Keeping::Transient {
            self.invalidate();
        }
    }

    /// It is full, and stays as it is.
    pub(super) fn overflow(&self) {
        if !self.overflowed.swap(true, AcqRel) {
            self.events.fetch_add(1, Relaxed);
        }
    }

    pub(super) fn is_valid(&self) -> bool {
        self.valid.load(Acquire)
    }

    pub(super) fn is_overflowed(&self) -> bool {
        self.overflowed.load(Acquire)
    }

    fn bucket(&self, chunk: u64) -> &AtomicU32 {
        &self.readers[chunk as usize % BUCKETS]
    }

    /// The origin is read for a chunk: who writes it waits.
    pub(super) fn read_begins(&self, chunk: u64) {
        self.bucket(chunk).fetch_add(1, AcqRel);
        // Either it finds the copy next, or who made the copy finds it here.
        fence(SeqCst);
    }

    pub(super) fn read_ends(&self, chunk: u64) {
        self.bucket(chunk).fetch_sub(1, AcqRel);
    }

    pub(super) fn is_read(&self, chunk: u64) -> bool {
        fence(SeqCst);
        self.bucket(chunk).load(Acquire) > 0
    }

    /// Sectors in use, all there are, and those of header and areas.
    pub(super) fn usage(&self) -> (u64, u64, u64) {
        let meta = self.lock();
        let areas = match self.keeping {
            Keeping::Persistent { .. } => (meta.current + 2) * self.chunk.0,
            Keeping::Transient => 0,
        };
        let all = self.cow_len.load(Acquire);
        ((meta.next_free * self.chunk.0).min(all), all, areas)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn store() -> Store {
        // 32 pairs in an area.
        let keeping = Keeping::Persistent { overflow: false };
        Store::new(keeping, Sectors(1), Sectors(200), Sectors(1000))
    }

    #[test]
    fn data_chunks_are_never_those_of_areas() {
        let store = store();
        let taken: Vec<u64> = std::iter::from_fn(|| store.allocate()).collect();
        assert_eq!((taken[0], taken[31], taken[32]), (2, 33, 35));
        assert!(taken.iter().all(|chunk| chunk % 33 != 1 && (2..200).contains(chunk)));
        assert_eq!(store.area_at(1), Sectors(34).bytes());
    }

    #[test]
    fn a_header_is_written_as_the_kernel_does() {
        let header = Header { valid: true, chunk: Sectors(16) };
        assert_eq!(&header.encode()[..4], b"SnAp");
        assert_eq!(Header::decode(&header.encode()), Ok(Some(header)));
        assert_eq!(Header::decode(&[0; 16]), Ok(None));
        assert_eq!(Header::decode(&[1; 16]), Err(()));
    }

    #[test]
    fn exceptions_count_once_their_area_is_on_disk() {
        let store = store();
        assert!(store.claim(7) && !store.claim(7));
        assert_eq!(store.find(7), Found::Busy);
        let new = store.allocate().unwrap();
        store.copied(7, new);
        let write = store.begin_commit().unwrap();
        assert_eq!((write.at, write.next_at), (Sectors(1).bytes(), None));
        assert!(store.begin_commit().is_none());
        assert_eq!(store.find(7), Found::Busy);
        store.end_commit();
        assert_eq!(store.find(7), Found::Copied(2));
        let mut area = vec![0; 512];
        store.copy_area(&mut area);
        assert_eq!((area[0], area[8], area[16]), (7, 2, 0));
        let again = self::store();
        assert_eq!(again.take_area(&area), Ok(false));
        assert_eq!((again.find(7), again.allocate()), (Found::Copied(2), Some(3)));
    }

    #[test]
    fn a_full_area_is_followed_by_an_empty_one() {
        let store = store();
        for old in 0..40 {
            assert!(store.claim(old));
            let new = store.allocate().unwrap();
            store.copied(old, new);
        }
        let write = store.begin_commit().unwrap();
        assert_eq!(write.next_at, Some(Sectors(34).bytes()));
        let mut area = vec![0; 512];
        store.copy_area(&mut area);
        store.end_commit();
        assert_eq!((store.find(31), store.find(32)), (Found::Copied(33), Found::Busy));
        let again = self::store();
        assert_eq!(again.take_area(&area), Ok(true));
        assert_eq!(again.take_area(&[0; 512]), Ok(false));
        assert_eq!(again.allocate(), Some(35));
        assert_eq!(store.begin_commit().unwrap().at, Sectors(34).bytes());
    }

    #[test]
    fn no_area_is_written_after_one_that_failed() {
        let store = store();
        let copy = |old| {
            assert!(store.claim(old));
            let new = store.allocate().unwrap();
            store.copied(old, new);
        };
        copy(7);
        assert!(store.begin_commit().is_some());
        store.fail_commit();
        copy(8);
        assert!(store.begin_commit().is_none(), "the area names chunk 7, which may not be on disk");
        assert!(!store.is_valid());
    }

    #[test]
    fn nonsense_on_disk_is_refused() {
        let mut area = [0; 512];
        area[8] = 34;
        assert_eq!(store().take_area(&area), Err(()), "a chunk that is an area");
        area[9] = 1;
        assert_eq!(store().take_area(&area), Err(()), "beyond the device");
    }
}
