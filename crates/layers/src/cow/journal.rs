//! The journal in memory: records on their way to the file, for all queues of an overlay.
//!
//! Positions count records and never go back. Those below `told` are in the file; `head` is where the next one goes.
//! Those below `tail` are of chunks that the table names by now, and their place may be used again. A request first has
//! its records *admitted*, before it claims or writes anything, so that appending them later never has to wait.
//! Memory holds the pages from `told` on, up to `window` of them; the file holds `pages` pages, used in turn.
//!
//! *Invariant:* `tail`, `told` ≤ `head` ≤ `admitted`. *Invariant:* the file has all records from `tail` to `told`.

use super::format::{Layout, PAGE_LEN};
use super::records::{BLOCK_LEN, PER_PAGE, Record, SECTORS, encode_page};
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicU64};

/// Words of a record in memory: its block, its mask, its checksums.
const WORDS: usize = 2 + SECTORS / 2;
/// Pages in memory at least, besides those that one chunk may take.
const WINDOW_MIN: u64 = 32;

/// How many pages of records there may be. Either has to take the records of the largest step, and a page more.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Room {
    /// In the file.
    pub pages: u64,
    /// In memory: not more.
    pub window: u64,
}

impl Room {
    /// What an overlay's journal has.
    pub fn of(layout: Layout) -> Room {
        let pages = layout.journal_len() / PAGE_LEN;
        let of_a_chunk = (layout.chunk.0 / BLOCK_LEN).div_ceil(PER_PAGE);
        Room { pages, window: (WINDOW_MIN + 2 * of_a_chunk).min(pages) }
    }
}

/// Why records are not admitted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum NoRoom {
    /// Too many are in memory: they have to be written to the file.
    Memory,
    /// Too many are in the file: a sync has to bring their chunks into the table.
    File,
}

#[derive(Debug)]
pub(super) struct Journal {
    life: AtomicU64,
    pages: u64,
    window: u64,
    admitted: AtomicU64,
    head: AtomicU64,
    told: AtomicU64,
    tail: AtomicU64,
    /// Where `head` was when the sync under way began.
    marked: AtomicU64,
    /// Somebody writes pages to the file.
    writing: AtomicBool,
    /// By position in the window: one more than the position of the record that is there.
    filled: Box<[AtomicU64]>,
    words: Box<[AtomicU64]>,
}

impl Journal {
    pub(super) fn new(life: u64, room: Room) -> Journal {
        let Room { pages, window } = room;
        let zeroes = |count: u64| (0..count).map(|_| AtomicU64::new(0)).collect();
        Journal {
            life: AtomicU64::new(life),
            pages,
            window,
            admitted: AtomicU64::new(0),
            head: AtomicU64::new(0),
            told: AtomicU64::new(0),
            tail: AtomicU64::new(0),
            marked: AtomicU64::new(0),
            writing: AtomicBool::new(false),
            filled: zeroes(window * PER_PAGE),
            words: zeroes(window * PER_PAGE * WORDS as u64),
        }
    }

    /// Make sure of room for `count` records. Each is appended later, or given back.
    pub(super) fn admit(&self, count: u64) -> Result<(), NoRoom> {
        let mut now = self.admitted.load(Relaxed);
        loop {
            let end = (now + count).div_ceil(PER_PAGE);
            if end - self.tail.load(Acquire) / PER_PAGE > self.pages {
                return Err(NoRoom::File);
            }
            if end - self.told.load(Acquire) / PER_PAGE > self.window {
                return Err(NoRoom::Memory);
            }
            match self.admitted.compare_exchange_weak(now, now + count, AcqRel, Relaxed) {
                Ok(_) => return Ok(()),
                Err(other) => now = other,
            }
        }
    }

    /// So many that were admitted are not appended.
    pub(super) fn give_back(&self, count: u64) {
        self.admitted.fetch_sub(count, AcqRel);
    }

    /// The place of the first of so many records that were admitted.
    pub(super) fn append(&self, count: u64) -> u64 {
        // What was live before is seen by a sync that sees these: see `mark`.
        self.head.fetch_add(count, SeqCst)
    }

    /// Fill a place.
    pub(super) fn put(&self, position: u64, record: &Record) {
        let slot = (position % (self.window * PER_PAGE)) as usize;
        let words = &self.words[slot * WORDS..][..WORDS];
        words[0].store(record.block, Relaxed);
        words[1].store(record.mask.into(), Relaxed);
        for (word, sums) in words[2..].iter().zip(record.sums.as_chunks::<2>().0) {
            word.store(u64::from(sums[0]) | u64::from(sums[1]) << 32, Relaxed);
        }
        self.filled[slot].store(position + 1, Release);
    }

    fn get(&self, position: u64) -> Record {
        let slot = (position % (self.window * PER_PAGE)) as usize;
        let words = &self.words[slot * WORDS..][..WORDS];
        let mut sums = [0; SECTORS];
        for (sums, word) in sums.as_chunks_mut::<2>().0.iter_mut().zip(&words[2..]) {
            let word = word.load(Relaxed);
            *sums = [word as u32, (word >> 32) as u32];
        }
        Record { block: words[0].load(Relaxed), mask: words[1].load(Relaxed) as u8, sums }
    }

    /// Where the next record goes: those before are appended, if maybe not filled in yet.
    pub(super) fn head(&self) -> u64 {
        self.head.load(SeqCst)
    }

    /// The records before are in the file.
    pub(super) fn told(&self) -> u64 {
        self.told.load(Acquire)
    }

    /// Whether a sync is due, so that nobody has to wait for one.
    pub(super) fn is_half_full(&self) -> bool {
        self.head.load(Relaxed) - self.tail.load(Relaxed) > self.pages * PER_PAGE / 2
    }

    /// Begin to write, unless somebody writes.
    pub(super) fn begin(&self) -> bool {
        !self.writing.load(Relaxed) && !self.writing.swap(true, AcqRel)
    }

    /// Writing is over, done or not.
    pub(super) fn end(&self) {
        self.writing.store(false, Release);
    }

    /// What is to be written next: the first page, how many pages, at most `most`, all in a row in the file, and the
    /// position that they reach. For whoever has begun.
    pub(super) fn due(&self, most: u64) -> Option<(u64, u64, u64)> {
        let from = self.told();
        let first = from / PER_PAGE;
        // The file ends, and begins again.
        let most = most.min(self.pages - first % self.pages);
        let stop = self.head().min((first + most) * PER_PAGE);
        let is_filled = |position: u64| {
            let slot = (position % (self.window * PER_PAGE)) as usize;
            self.filled[slot].load(Acquire) == position + 1
        };
        let to = (from..stop).find(|&position| !is_filled(position)).unwrap_or(stop);
        (to > from).then(|| (first, to.div_ceil(PER_PAGE) - first, to))
    }

    /// The page of the file that a page of the journal goes to.
    pub(super) fn place(&self, page: u64) -> u64 {
        page % self.pages
    }

    /// Encode a page with its records up to a position.
    pub(super) fn encode(&self, page: u64, to: u64, into: &mut [u8]) {
        let end = to.min((page + 1) * PER_PAGE);
        let records = (page * PER_PAGE..end).map(|position| self.get(position));
        encode_page(self.life.load(Relaxed), records, into);
    }

    /// The file has the records up to there.
    pub(super) fn set_told(&self, to: u64) {
        self.told.store(to, Release);
    }

    /// A sync begins, and takes what is live after this: all whose records are appended now.
    pub(super) fn mark(&self) {
        self.marked.store(self.head(), Relaxed);
    }

    /// The sync has succeeded.
    pub(super) fn release_marked(&self) {
        // Records that never got to the file are not needed there any more.
        self.tail.store(self.marked.load(Relaxed), Release);
    }

    /// Begin another life on a page of its own: what is in the file means nothing. While nothing is under way.
    pub(super) fn restart(&self, life: u64) {
        let start = self.admitted.load(Relaxed).next_multiple_of(PER_PAGE);
        for position in [&self.admitted, &self.head, &self.told, &self.tail, &self.marked] {
            position.store(start, SeqCst);
        }
        self.life.store(life, SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn append(journal: &Journal, count: u64) -> u64 {
        let at = journal.append(count);
        (at..at + count).for_each(|at| journal.put(at, &Record { block: at, mask: 1, sums: [7; SECTORS] }));
        at + count
    }

    #[test]
    fn what_is_not_filled_in_waits_and_what_is_written_makes_room() {
        let journal = Journal::new(1, Room { pages: 40, window: 34 });
        assert_eq!(journal.due(8), None);
        journal.admit(3).unwrap();
        assert_eq!(append(&journal, 1), 1);
        let hole = journal.append(1);
        append(&journal, 1);
        assert!(journal.begin() && !journal.begin());
        assert_eq!(journal.due(8), Some((0, 1, 1)), "the second is not there yet");
        journal.put(hole, &Record::default());
        assert_eq!(journal.due(8), Some((0, 1, 3)));
        journal.set_told(3);
        journal.end();
        assert_eq!((journal.due(8), journal.told()), (None, 3));
    }

    #[test]
    fn the_window_is_free_again_once_written_and_the_file_once_synced() {
        let journal = Journal::new(1, Room { pages: 40, window: 34 });
        let mut admitted = 0;
        let refused = loop {
            match journal.admit(10) {
                Ok(()) => admitted += 10,
                Err(why) => break why,
            }
        };
        assert_eq!((refused, admitted), (NoRoom::Memory, 34 * PER_PAGE));
        append(&journal, admitted);
        while let Some((_, _, to)) = journal.due(16) {
            journal.set_told(to);
        }
        while journal.admit(10).is_ok() {
            append(&journal, 10);
        }
        assert_eq!(journal.admit(10), Err(NoRoom::File));
        assert!(journal.is_half_full());
        journal.mark();
        journal.release_marked();
        assert!(!journal.is_half_full());
        for _ in 0..200 {
            journal.admit(10).unwrap();
            append(&journal, 10);
            while let Some((first, count, to)) = journal.due(16) {
                assert!(journal.place(first) + count <= 40, "the file has an end");
                journal.set_told(to);
            }
        }
        journal.admit(10).unwrap();
        journal.give_back(10);
        journal.restart(2);
        assert!(journal.head().is_multiple_of(PER_PAGE) && journal.due(8).is_none());
    }
}
