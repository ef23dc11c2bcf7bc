//! The journal in memory: records on their way to the file, for all queues of an overlay.
//!
//! Positions count records and never decrease. Records below `written` are in the file; `head` is the next
//! free position. Records below `tail` belong to chunks that the table has by now; their space may be reused.
//! A request *admits* its records before it claims or writes anything, so that appending them later never
//! waits. Memory holds the pages from `written` on, up to `window` of them; the file holds `pages` pages,
//! used as a ring.
//!
//! *Invariant:* `tail`, `written` ≤ `head` ≤ `admitted`. *Invariant:* the file has all records from `tail` to
//! `written`.

use super::format::{Layout, PAGE_LEN};
use super::records::{BLOCK_LEN, PER_PAGE, Record, SECTORS, encode_page};
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicU64};

/// 64-bit words of a record in memory: its block, its mask, its checksums.
const WORDS: usize = 2 + SECTORS / 2;
/// The least number of pages in memory, besides those for the records of two chunks.
const WINDOW_MIN: u64 = 32;

/// The capacity of a journal in pages. Each limit must hold the records of the largest step plus one page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct JournalSize {
    /// Pages in the file.
    pub pages: u64,
    /// Pages in memory, at most `pages`.
    pub window: u64,
}

impl JournalSize {
    /// Returns the sizes for an overlay.
    pub fn of(layout: Layout) -> JournalSize {
        let pages = layout.journal_len() / PAGE_LEN;
        let of_a_chunk = (layout.chunk.0 / BLOCK_LEN).div_ceil(PER_PAGE);
        JournalSize { pages, window: (WINDOW_MIN + 2 * of_a_chunk).min(pages) }
    }
}

/// The reason why records were not admitted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum JournalFull {
    /// Memory is full: records have to be written to the file first.
    Memory,
    /// The file is full: a sync has to store their chunks first.
    File,
}

#[derive(Debug)]
pub(super) struct Journal {
    generation: AtomicU64,
    pages: u64,
    window: u64,
    admitted: AtomicU64,
    head: AtomicU64,
    written: AtomicU64,
    tail: AtomicU64,
    /// The value of `head` when the current sync began.
    marked: AtomicU64,
    /// Set while a request writes pages to the file.
    writing: AtomicBool,
    /// For each slot of the window: the position of the record stored there, plus one.
    filled: Box<[AtomicU64]>,
    words: Box<[AtomicU64]>,
}

impl Journal {
    pub(super) fn new(generation: u64, size: JournalSize) -> Journal {
        let JournalSize { pages, window } = size;
        let zeroes = |count: u64| (0..count).map(|_| AtomicU64::new(0)).collect();
        Journal {
            generation: AtomicU64::new(generation),
            pages,
            window,
            admitted: AtomicU64::new(0),
            head: AtomicU64::new(0),
            written: AtomicU64::new(0),
            tail: AtomicU64::new(0),
            marked: AtomicU64::new(0),
            writing: AtomicBool::new(false),
            filled: zeroes(window * PER_PAGE),
            words: zeroes(window * PER_PAGE * WORDS as u64),
        }
    }

    /// Reserves space for `count` records. Each is appended later or given back.
    pub(super) fn admit(&self, count: u64) -> Result<(), JournalFull> {
        let mut now = self.admitted.load(Relaxed);
        loop {
            let end = (now + count).div_ceil(PER_PAGE);
            if end - self.tail.load(Acquire) / PER_PAGE > self.pages {
                return Err(JournalFull::File);
            }
            if end - self.written.load(Acquire) / PER_PAGE > self.window {
                return Err(JournalFull::Memory);
            }
            match self.admitted.compare_exchange_weak(now, now + count, AcqRel, Relaxed) {
                Ok(_) => return Ok(()),
                Err(other) => now = other,
            }
        }
    }

    /// Releases the space of `count` admitted records that are not appended.
    pub(super) fn give_back(&self, count: u64) {
        self.admitted.fetch_sub(count, AcqRel);
    }

    /// Takes the positions of `count` admitted records. Returns the first.
    pub(super) fn append(&self, count: u64) -> u64 {
        // A sync that sees this position also sees chunks that became live before: see `mark`.
        self.head.fetch_add(count, SeqCst)
    }

    /// Stores a record at its position.
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

    /// Returns the next free position. Records before it are appended, but perhaps not filled in yet.
    pub(super) fn head(&self) -> u64 {
        self.head.load(SeqCst)
    }

    /// Returns the position up to which the file has the records.
    pub(super) fn written(&self) -> u64 {
        self.written.load(Acquire)
    }

    /// Returns whether a sync should start, so that no request has to wait for space.
    pub(super) fn is_half_full(&self) -> bool {
        self.head.load(Relaxed) - self.tail.load(Relaxed) > self.pages * PER_PAGE / 2
    }

    /// Starts writing to the file, unless another request is writing. Returns whether it started.
    pub(super) fn begin(&self) -> bool {
        !self.writing.load(Relaxed) && !self.writing.swap(true, AcqRel)
    }

    /// Ends writing, whether it succeeded or not.
    pub(super) fn end(&self) {
        self.writing.store(false, Release);
    }

    /// Returns the pages to write next: the first, how many (at most `most`, contiguous in the file), and the
    /// position that they reach. Only for the request that called [`begin`](Journal::begin).
    pub(super) fn due(&self, most: u64) -> Option<(u64, u64, u64)> {
        let from = self.written();
        let first = from / PER_PAGE;
        // Pages are contiguous up to the end of the file.
        let most = most.min(self.pages - first % self.pages);
        let stop = self.head().min((first + most) * PER_PAGE);
        let is_filled = |position: u64| {
            let slot = (position % (self.window * PER_PAGE)) as usize;
            self.filled[slot].load(Acquire) == position + 1
        };
        let to = (from..stop).find(|&position| !is_filled(position)).unwrap_or(stop);
        (to > from).then(|| (first, to.div_ceil(PER_PAGE) - first, to))
    }

    /// Returns the page of the file that stores a page of the journal: the file is a ring.
    pub(super) fn place(&self, page: u64) -> u64 {
        page % self.pages
    }

    /// Encodes a page with its records up to a position.
    pub(super) fn encode(&self, page: u64, to: u64, into: &mut [u8]) {
        let end = to.min((page + 1) * PER_PAGE);
        let records = (page * PER_PAGE..end).map(|position| self.get(position));
        encode_page(self.generation.load(Relaxed), records, into);
    }

    /// Sets the position up to which the file has the records.
    pub(super) fn set_written(&self, to: u64) {
        self.written.store(to, Release);
    }

    /// Starts a sync: it covers all records that are appended now.
    pub(super) fn mark(&self) {
        self.marked.store(self.head(), Relaxed);
    }

    /// Ends a sync that succeeded: releases the space of the records that it covered.
    pub(super) fn release_marked(&self) {
        // Covered records that were not written yet need not be written any more.
        self.tail.store(self.marked.load(Relaxed), Release);
    }

    /// Starts a new generation on a new page; the contents of the file become invalid. No request may be in
    /// flight.
    pub(super) fn restart(&self, generation: u64) {
        let start = self.admitted.load(Relaxed).next_multiple_of(PER_PAGE);
        for position in [&self.admitted, &self.head, &self.written, &self.tail, &self.marked] {
            position.store(start, SeqCst);
        }
        self.generation.store(generation, SeqCst);
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
    fn records_are_written_up_to_the_first_unfilled_one() {
        let journal = Journal::new(1, JournalSize { pages: 40, window: 34 });
        assert_eq!(journal.due(8), None);
        journal.admit(3).unwrap();
        assert_eq!(append(&journal, 1), 1);
        let hole = journal.append(1);
        append(&journal, 1);
        assert!(journal.begin() && !journal.begin());
        assert_eq!(journal.due(8), Some((0, 1, 1)), "the second one is not filled in yet");
        journal.put(hole, &Record::default());
        assert_eq!(journal.due(8), Some((0, 1, 3)));
        journal.set_written(3);
        journal.end();
        assert_eq!((journal.due(8), journal.written()), (None, 3));
    }

    #[test]
    fn memory_is_freed_by_a_write_and_the_file_by_a_sync() {
        let journal = Journal::new(1, JournalSize { pages: 40, window: 34 });
        let mut admitted = 0;
        let refused = loop {
            match journal.admit(10) {
                Ok(()) => admitted += 10,
                Err(why) => break why,
            }
        };
        assert_eq!((refused, admitted), (JournalFull::Memory, 34 * PER_PAGE));
        append(&journal, admitted);
        while let Some((_, _, to)) = journal.due(16) {
            journal.set_written(to);
        }
        while journal.admit(10).is_ok() {
            append(&journal, 10);
        }
        assert_eq!(journal.admit(10), Err(JournalFull::File));
        assert!(journal.is_half_full());
        journal.mark();
        journal.release_marked();
        assert!(!journal.is_half_full());
        for _ in 0..200 {
            journal.admit(10).unwrap();
            append(&journal, 10);
            while let Some((first, count, to)) = journal.due(16) {
                assert!(journal.place(first) + count <= 40, "pages are contiguous in the file");
                journal.set_written(to);
            }
        }
        journal.admit(10).unwrap();
        journal.give_back(10);
        journal.restart(2);
        assert!(journal.head().is_multiple_of(PER_PAGE) && journal.due(8).is_none());
    }
}
