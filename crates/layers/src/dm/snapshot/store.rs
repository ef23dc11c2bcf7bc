//! An exception store: the chunks of an origin that were copied, and the chunks of the COW device that hold
//! the copies. Shared by all queues of the snapshot and of its origin.
//!
//! A persistent store has the on-disk format of the kernel's dm-snap-persistent. Numbers are little-endian;
//! chunks are counted from the start of the COW device:
//!
//! ```text
//! chunk 0   header: magic "SnAp", valid, version 1, chunk size in sectors; four bytes each
//! chunk 1   first area: pairs of eight bytes, old chunk and new chunk, as many as fit; a new chunk of 0 ends them
//! …         data, as many chunks as an area has pairs, then the next area
//! ```
//!
//! An area is written whole, after the data that it refers to was flushed; before an area fills up, the next
//! one is zeroed. The table in memory is read without a lock: 0 not copied, 1 being copied, else the new
//! chunk plus 2.
//!
//! *Invariant:* each claim of a chunk ends with an exception, with `unclaim`, or with the snapshot invalid.

use block::{Bytes, Flags, Op, Request, Sectors, Status};
use queue::{WaitList, Waiter};
use std::collections::VecDeque;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, fence};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

/// The magic number of a header: `SNAP_MAGIC`.
const MAGIC: u32 = 0x7041_6e53;
const VERSION: u32 = 1;
/// The size of an exception on disk, in bytes.
const PAIR: u64 = 16;
/// Number of entries in a page of the table.
const PAGE: usize = 4096;
/// The number of counters for reads of the origin; a chunk uses counter `chunk % BUCKETS`.
const BUCKETS: usize = 256;

const NONE: u64 = 0;
const CLAIMED: u64 = 1;

/// The kind of an exception store.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum StoreKind {
    /// `P`: the exceptions are on the COW device. With `overflow` (`PO`) a full store overflows when the
    /// snapshot is written, instead of becoming invalid.
    Persistent { overflow: bool },
    /// `N`: the exceptions are in memory only.
    Transient,
}

/// The exceptions that are not on disk yet, and the place of the next ones.
#[derive(Debug)]
struct Meta {
    /// The next free data chunk.
    next_free: u64,
    /// The current area as it will be on disk, its number, and its number of exceptions.
    area: Vec<u8>,
    current: u64,
    committed: u64,
    /// Old and new chunk of exceptions that were copied and are not in an area yet.
    ready: VecDeque<(u64, u64)>,
    /// Old and new chunk of exceptions that are in the area and not on disk yet.
    writing: Vec<(u64, u64)>,
    /// Whether a request is writing the area.
    busy: bool,
}

#[derive(Debug)]
pub(super) struct Store {
    pub(super) kind: StoreKind,
    pub(super) chunk: Sectors,
    /// The size of the COW device in sectors. It may grow when a table becomes active.
    cow_len: AtomicU64,
    pairs: u64,
    table: Box<[OnceLock<Box<[AtomicU64]>>]>,
    meta: Mutex<Meta>,
    readers: Box<[AtomicU32]>,
    valid: AtomicBool,
    /// Whether the header on disk of an invalid store says so, or the store has no header.
    header_written: AtomicBool,
    /// Whether the header could not be written for so long that writes to the origin fail instead of waiting
    /// for it.
    header_failing: AtomicBool,
    /// Whether a table that uses the store is active.
    active: AtomicBool,
    overflowed: AtomicBool,
    pub(super) events: AtomicU32,
    /// The queues with requests that wait for a copy, an area, a reader of the origin or the header.
    pub(super) waiting: WaitList,
}

/// The state of a chunk of the origin.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum ChunkState {
    /// The chunk was not copied: the origin has its data.
    NotCopied,
    /// A request is copying it.
    Copying,
    /// The chunk was copied to this chunk of the COW device.
    Copied(u64),
}

/// The area to write.
#[derive(Debug)]
pub(super) struct AreaWrite {
    pub(super) at: Bytes,
    /// The next area, to be zeroed first; `None`: the area is not full.
    pub(super) next_at: Option<Bytes>,
}

/// The header of a persistent store.
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

    /// Decodes the first bytes of a COW device. `Ok(None)`: they are zero, so the device has no store yet.
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
    /// Creates an empty store. `chunk`: a power of two.
    pub(super) fn new(kind: StoreKind, chunk: Sectors, cow_len: Sectors, origin_len: Sectors) -> Store {
        let pairs = chunk.bytes().0 / PAIR;
        let pages = origin_len.0.div_ceil(chunk.0).div_ceil(PAGE as u64);
        let persistent = kind != StoreKind::Transient;
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
            kind,
            chunk,
            cow_len: AtomicU64::new(cow_len.0),
            pairs,
            table: (0..pages).map(|_| OnceLock::new()).collect(),
            meta: Mutex::new(meta),
            readers: (0..BUCKETS).map(|_| AtomicU32::new(0)).collect(),
            valid: AtomicBool::new(true),
            header_written: AtomicBool::new(!persistent),
            header_failing: AtomicBool::new(false),
            active: AtomicBool::new(false),
            overflowed: AtomicBool::new(false),
            events: AtomicU32::new(0),
            waiting: WaitList::default(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Meta> {
        self.meta.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the offset of an area on the COW device.
    pub(super) fn area_at(&self, area: u64) -> Bytes {
        Sectors((1 + (self.pairs + 1) * area) * self.chunk.0).bytes()
    }

    /// Returns the number of chunks of the COW device.
    fn chunks(&self) -> u64 {
        self.cow_len.load(Acquire) / self.chunk.0
    }

    /// Sets the size of the COW device, which may have grown.
    pub(super) fn set_cow_len(&self, len: Sectors) {
        self.cow_len.store(len.0, Release);
    }

    /// Marks the store as used by an active table. Returns whether no active table used it before.
    pub(super) fn activate(&self) -> bool {
        !self.active.swap(true, AcqRel)
    }

    /// Marks the store as unused, after the last table that used it was removed.
    pub(super) fn deactivate(&self) {
        self.active.store(false, Release);
        self.waiting.wake_fenced(None);
    }

    /// Returns whether the origin has to copy for this store.
    pub(super) fn is_active(&self) -> bool {
        self.active.load(Acquire)
    }

    /// Returns whether the store is invalid and its header does not say so yet. While that is so, the origin
    /// must not be changed without a copy.
    pub(super) fn is_header_pending(&self) -> bool {
        !self.is_valid() && !self.is_header_written() && self.is_active()
    }

    /// Records that the header on disk says that the store is invalid.
    pub(super) fn set_header_written(&self) {
        self.header_written.store(true, Release);
        self.waiting.wake_fenced(None);
    }

    /// Returns whether the header of an invalid store says so, or the store has no header.
    pub(super) fn is_header_written(&self) -> bool {
        self.header_written.load(Acquire)
    }

    /// Makes writes to the origin that would wait for the header fail, until the header is written.
    pub(super) fn set_header_failing(&self) {
        self.header_failing.store(true, Release);
        self.waiting.wake_fenced(None);
    }

    /// Returns whether writes to the origin that need a copy fail now.
    pub(super) fn is_header_failing(&self) -> bool {
        self.header_failing.load(Acquire) && self.is_header_pending()
    }

    /// Advances the next free chunk past the chunk of an area, which never holds data.
    fn skip_area(&self, meta: &mut Meta) {
        if meta.next_free % (self.pairs + 1) == 1 {
            meta.next_free += 1;
        }
    }

    /// Loads the next area, in order. Returns whether it is full, so that another one follows.
    pub(super) fn load_area(&self, bytes: &[u8]) -> Result<bool, ()> {
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

    /// Returns whether an area has exceptions: the new chunk of its first pair is not 0.
    pub(super) fn has_exceptions(&self, area: &[u8]) -> bool {
        area[8..PAIR as usize].iter().any(|&byte| byte != 0)
    }

    /// Returns the table entry of a chunk; `None`: the chunk is beyond the end of the origin.
    fn cell(&self, chunk: u64) -> Option<&AtomicU64> {
        let page = self.table.get(usize::try_from(chunk).ok()? / PAGE)?;
        let page = page.get_or_init(|| (0..PAGE).map(|_| AtomicU64::new(NONE)).collect());
        Some(&page[chunk as usize % PAGE])
    }

    /// Returns the state of a chunk.
    #[inline]
    pub(super) fn find(&self, chunk: u64) -> ChunkState {
        let page = self.table.get(chunk as usize / PAGE).and_then(OnceLock::get);
        match page.map_or(NONE, |page| page[chunk as usize % PAGE].load(Acquire)) {
            NONE => ChunkState::NotCopied,
            CLAIMED => ChunkState::Copying,
            copied => ChunkState::Copied(copied - 2),
        }
    }

    /// Claims a chunk. Returns `true` if it was not copied, so that the caller must copy it.
    pub(super) fn claim(&self, chunk: u64) -> bool {
        let cell = self.cell(chunk);
        cell.is_some_and(|cell| cell.compare_exchange(NONE, CLAIMED, AcqRel, Relaxed).is_ok())
    }

    /// Releases a claim without a copy.
    pub(super) fn unclaim(&self, chunk: u64) {
        if let Some(cell) = self.cell(chunk) {
            cell.store(NONE, Release);
        }
    }

    /// Allocates a chunk of the COW device. Returns `None` if the store is full.
    pub(super) fn allocate(&self) -> Option<u64> {
        let mut meta = self.lock();
        let new = meta.next_free;
        if new >= self.chunks() {
            return None;
        }
        meta.next_free += 1;
        if self.kind != StoreKind::Transient {
            self.skip_area(&mut meta);
        }
        Some(new)
    }

    /// Records a finished copy. It becomes an exception at once, or once its area is on disk.
    pub(super) fn copied(&self, old: u64, new: u64) {
        match self.kind {
            StoreKind::Transient => self.publish(old, new),
            StoreKind::Persistent { .. } => self.lock().ready.push_back((old, new)),
        }
    }

    fn publish(&self, old: u64, new: u64) {
        if let Some(cell) = self.cell(old) {
            cell.store(new + 2, Release);
        }
    }

    /// Adds finished copies to the area, as many as fit; the caller must write the area. `None`: another
    /// request is writing it, nothing is ready, or the store is invalid.
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
        // If the next area is beyond the end of the device, the store is full.
        let next_chunk = 1 + (self.pairs + 1) * (meta.current + 1);
        let is_next = meta.committed == self.pairs && next_chunk < self.chunks();
        let next_at = is_next.then(|| self.area_at(meta.current + 1));
        Some(AreaWrite { at: self.area_at(meta.current), next_at })
    }

    /// Copies the current area into a buffer.
    pub(super) fn copy_area(&self, into: &mut [u8]) {
        into.copy_from_slice(&self.lock().area);
    }

    /// Publishes the exceptions of the area, which is on disk now.
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

    /// Abandons a copy. `commits`: the request was writing the area; the exceptions of other requests in it
    /// go back to `ready`, for those to write.
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

    /// Invalidates the store because the area could not be written, before another request writes the area
    /// again.
    pub(super) fn fail_commit(&self) {
        self.invalidate();
        let mut meta = self.lock();
        meta.busy = false;
        meta.writing.clear();
        meta.ready.clear();
    }

    /// Makes the snapshot invalid.
    pub(super) fn invalidate(&self) {
        if self.valid.swap(false, AcqRel) {
            self.events.fetch_add(1, Relaxed);
            self.waiting.wake_fenced(None);
        }
    }

    /// Notes that a request of a client failed. A failed flush or FUA write may have lost copied data that no
    /// area refers to yet, and a later flush would not report that, so it makes a persistent snapshot
    /// invalid.
    #[cold]
    pub(super) fn note_failure(&self, req: &Request, status: Status) {
        let syncs = req.op == Op::Flush || req.op.is_write() && req.flags.contains(Flags::FUA);
        let is_harmless = match status {
            Status::Requeue | Status::Again | Status::Resource | Status::DeviceResource => true,
            // A write that found no space has lost nothing; a flush may have.
            Status::NoSpace => req.op != Op::Flush,
            Status::NotSupported | Status::Invalid | Status::NotPermitted => true,
            _ => false,
        };
        if syncs && !is_harmless && self.kind != StoreKind::Transient {
            self.invalidate();
        }
    }

    /// Marks the store as full. The snapshot stays readable.
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

    /// Counts a read of the origin for a chunk; writes of that chunk to the origin wait for it.
    pub(super) fn read_begins(&self, chunk: u64) {
        self.bucket(chunk).fetch_add(1, AcqRel);
        // Pairs with the fence in `is_read`: either this read sees the copy, or the copier sees this reader.
        fence(SeqCst);
    }

    /// Ends a read that [`read_begins`](Store::read_begins) counted. `own`: the waiter of the calling node.
    pub(super) fn read_ends(&self, chunk: u64, own: Option<&Waiter>) {
        self.bucket(chunk).fetch_sub(1, SeqCst);
        self.waiting.wake(own);
    }

    pub(super) fn is_read(&self, chunk: u64) -> bool {
        fence(SeqCst);
        self.bucket(chunk).load(Acquire) > 0
    }

    /// Returns the sectors in use, the size of the COW device, and the sectors of header and areas.
    pub(super) fn usage(&self) -> (u64, u64, u64) {
        let meta = self.lock();
        let areas = match self.kind {
            StoreKind::Persistent { .. } => (meta.current + 2) * self.chunk.0,
            StoreKind::Transient => 0,
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
        let kind = StoreKind::Persistent { overflow: false };
        Store::new(kind, Sectors(1), Sectors(200), Sectors(1000))
    }

    #[test]
    fn data_chunks_skip_the_chunks_of_areas() {
        let store = store();
        let taken: Vec<u64> = std::iter::from_fn(|| store.allocate()).collect();
        assert_eq!((taken[0], taken[31], taken[32]), (2, 33, 35));
        assert!(taken.iter().all(|chunk| chunk % 33 != 1 && (2..200).contains(chunk)));
        assert_eq!(store.area_at(1), Sectors(34).bytes());
    }

    #[test]
    fn a_header_has_the_kernels_format() {
        let header = Header { valid: true, chunk: Sectors(16) };
        assert_eq!(&header.encode()[..4], b"SnAp");
        assert_eq!(Header::decode(&header.encode()), Ok(Some(header)));
        assert_eq!(Header::decode(&[0; 16]), Ok(None));
        assert_eq!(Header::decode(&[1; 16]), Err(()));
    }

    #[test]
    fn exceptions_are_published_once_their_area_is_on_disk() {
        let store = store();
        assert!(store.claim(7) && !store.claim(7));
        assert_eq!(store.find(7), ChunkState::Copying);
        let new = store.allocate().unwrap();
        store.copied(7, new);
        let write = store.begin_commit().unwrap();
        assert_eq!((write.at, write.next_at), (Sectors(1).bytes(), None));
        assert!(store.begin_commit().is_none());
        assert_eq!(store.find(7), ChunkState::Copying);
        store.end_commit();
        assert_eq!(store.find(7), ChunkState::Copied(2));
        let mut area = vec![0; 512];
        store.copy_area(&mut area);
        assert_eq!((area[0], area[8], area[16]), (7, 2, 0));
        let again = self::store();
        assert_eq!(again.load_area(&area), Ok(false));
        assert_eq!((again.find(7), again.allocate()), (ChunkState::Copied(2), Some(3)));
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
        assert_eq!((store.find(31), store.find(32)), (ChunkState::Copied(33), ChunkState::Copying));
        let again = self::store();
        assert_eq!(again.load_area(&area), Ok(true));
        assert_eq!(again.load_area(&[0; 512]), Ok(false));
        assert_eq!(again.allocate(), Some(35));
        assert_eq!(store.begin_commit().unwrap().at, Sectors(34).bytes());
    }

    #[test]
    fn no_area_is_written_after_a_failed_one() {
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
    fn an_area_with_impossible_chunks_is_refused() {
        let mut area = [0; 512];
        area[8] = 34;
        assert_eq!(store().load_area(&area), Err(()), "a chunk that is an area");
        area[9] = 1;
        assert_eq!(store().load_area(&area), Err(()), "beyond the device");
    }
}
