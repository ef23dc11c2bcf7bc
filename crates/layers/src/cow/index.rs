//! The chunks that an overlay holds: the state shared by all of its queues.
//!
//! Four bits for each chunk, in memory. **Live**: the overlay holds the chunk; never cleared. **Claimed**: a
//! request is writing the new chunk; other requests for it wait. **Taken**: the chunk was live when the last
//! sync began; the sync writes these bits to the table. **Stored**: the table on disk has the bit, because a
//! sync that took it succeeded.
//!
//! The journal ([`Journal`]) has checksums of data in chunks that are not stored. After a crash of the server
//! the overlay verifies with them which of these chunks were written completely.

use super::format::{Layout, PAGE_LEN};
use super::journal::{Journal, JournalSize};
use super::pages::Pages;
use block::Bytes;
use queue::{SharedSync, WaitList};
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

/// Bits in a page of the table.
const PAGE_BITS: u64 = PAGE_LEN * 8;
const PAGE_WORDS: usize = PAGE_LEN as usize / 8;

pub(super) type Bits = Box<[AtomicU64]>;

pub(super) fn bits(count: u64) -> Bits {
    (0..count.div_ceil(64)).map(|_| AtomicU64::new(0)).collect()
}

pub(super) fn is_set(bits: &Bits, number: u64) -> bool {
    bits[(number / 64) as usize].load(Ordering::Acquire) >> (number % 64) & 1 == 1
}

/// Returns the index of each 64-bit word that a range of bits overlaps, and the mask of its bits there.
pub(super) fn masks(range: Range<u64>) -> impl Iterator<Item = (usize, u64)> {
    let words = range.start / 64..range.end.div_ceil(64);
    words.map(move |word| {
        let from = range.start.saturating_sub(word * 64).min(63);
        let to = (range.end - word * 64).min(64);
        (word as usize, (u64::MAX << from) & (u64::MAX >> (64 - to)))
    })
}

/// Returns whether the first bit of the range is set, and the end of the run of bits equal to it.
fn run(bits: &Bits, range: Range<u64>) -> (bool, u64) {
    let first = is_set(bits, range.start);
    for (word, mask) in masks(range.clone()) {
        let value = bits[word].load(Ordering::Acquire);
        let other = (if first { !value } else { value }) & mask;
        if other != 0 {
            return (first, word as u64 * 64 + u64::from(other.trailing_zeros()));
        }
    }
    (first, range.end)
}

/// The index of one overlay, shared by the nodes of all queues.
#[derive(Debug)]
pub struct Index {
    layout: Layout,
    origin_size: Bytes,
    live: Bits,
    claimed: Bits,
    taken: Bits,
    stored: Bits,
    /// Pages of the table with live bits that no sync has taken yet.
    pub(super) table: Pages,
    pub(super) journal: Journal,
    pub(super) syncs: SharedSync,
    /// Queues whose requests wait for a claim, for journal records or for a sync to end.
    pub(super) waiting: WaitList,
}

impl Index {
    /// Creates an index from the table on disk. `generation` is the one in the header; it has no records yet.
    ///
    /// # Panics
    /// If the table does not have the length that the layout requires.
    pub fn open(layout: Layout, origin_size: Bytes, table: &[u8], generation: u64) -> Index {
        Index::with_journal_size(layout, origin_size, table, generation, JournalSize::of(layout))
    }

    /// Creates an index as [`open`](Index::open) does, with other journal sizes, for simulations.
    ///
    /// # Panics
    /// If the table does not have the length that the layout requires.
    pub fn with_journal_size(
        layout: Layout,
        origin_size: Bytes,
        table: &[u8],
        generation: u64,
        size: JournalSize,
    ) -> Index {
        assert_eq!(table.len() as u64, layout.table_len());
        let mut words: Vec<u64> =
            table.as_chunks::<8>().0.iter().map(|bytes| u64::from_le_bytes(*bytes)).collect();
        // Bits past the last chunk are ignored.
        for (number, word) in words.iter_mut().enumerate() {
            let left = layout.chunks().saturating_sub(number as u64 * 64);
            *word &= if left >= 64 { u64::MAX } else { (1 << left) - 1 };
        }
        let load = || words.iter().map(|&word| AtomicU64::new(word)).collect();
        let pages = layout.table_len() / PAGE_LEN;
        Index {
            layout,
            origin_size,
            live: load(),
            claimed: bits(words.len() as u64 * 64),
            taken: load(),
            stored: load(),
            table: Pages::new(pages),
            journal: Journal::new(generation, size),
            syncs: SharedSync::default(),
            waiting: WaitList::default(),
        }
    }

    /// Returns the sizes of the overlay.
    pub fn layout(&self) -> Layout {
        self.layout
    }

    /// Returns the size of the origin.
    pub fn origin_size(&self) -> Bytes {
        self.origin_size
    }

    /// Returns how many chunks the overlay holds.
    pub fn chunks_live(&self) -> u64 {
        self.live.iter().map(|word| u64::from(word.load(Ordering::Relaxed).count_ones())).sum()
    }

    /// Returns the first run of live chunks from `from` on.
    pub fn next_live(&self, from: u64) -> Option<Range<u64>> {
        let end = self.layout.chunks();
        if from >= end {
            return None;
        }
        let start = match self.run(from..end) {
            (true, _) => from,
            (false, start) if start < end => start,
            _ => return None,
        };
        Some(start..self.run(start..end).1)
    }

    /// Starts a new generation of the journal, which the header already names. No request may be in flight.
    pub fn restart(&self, generation: u64) {
        self.journal.restart(generation);
    }

    pub(super) fn is_live(&self, chunk: u64) -> bool {
        is_set(&self.live, chunk)
    }

    /// Returns whether the first chunk of the range is live, and the end of the run of chunks in the same
    /// state.
    pub(super) fn run(&self, range: Range<u64>) -> (bool, u64) {
        run(&self.live, range)
    }

    /// Claims chunks from the first on, up to one that is live or claimed. Returns how many were claimed.
    pub(super) fn claim(&self, range: Range<u64>) -> u64 {
        for chunk in range.clone() {
            let (word, bit) = ((chunk / 64) as usize, 1 << (chunk % 64));
            if self.claimed[word].fetch_or(bit, Ordering::AcqRel) & bit != 0 {
                return chunk - range.start;
            }
            // A previous owner of the claim may have made the chunk live.
            if self.is_live(chunk) {
                self.release(chunk..chunk + 1);
                return chunk - range.start;
            }
        }
        range.end - range.start
    }

    /// Releases claims.
    pub(super) fn release(&self, range: Range<u64>) {
        for (word, mask) in masks(range) {
            self.claimed[word].fetch_and(!mask, Ordering::AcqRel);
        }
    }

    /// Marks chunks as live.
    pub(super) fn set_live(&self, range: Range<u64>) {
        for (word, mask) in masks(range.clone()) {
            self.live[word].fetch_or(mask, Ordering::AcqRel);
        }
        // The pages are marked after the bits are set: a sync that misses a mark leaves it for the next one.
        let pages = range.start / PAGE_BITS..range.end.div_ceil(PAGE_BITS);
        self.table.mark(pages);
    }

    /// Returns whether any of these chunks is claimed.
    pub(super) fn is_claimed(&self, range: Range<u64>) -> bool {
        masks(range).any(|(word, mask)| self.claimed[word].load(Ordering::Acquire) & mask != 0)
    }

    /// Returns whether the first chunk of the range is stored, and the end of the run of chunks in the same
    /// state.
    pub(super) fn stored_run(&self, range: Range<u64>) -> (bool, u64) {
        run(&self.stored, range)
    }

    /// Returns whether all of these chunks are stored. Stored chunks stay stored.
    pub(super) fn is_stored(&self, range: Range<u64>) -> bool {
        masks(range).all(|(word, mask)| self.stored[word].load(Ordering::Acquire) & mask == mask)
    }

    /// Starts a sync: takes the bits that are live now. Returns whether there is anything to write.
    pub(super) fn begin_sync(&self) -> bool {
        // This comes before the bits are read, because chunks become live before their records are appended.
        self.journal.mark();
        let any = self.table.take();
        self.copy_pages(&self.live, &self.taken);
        any
    }

    /// Ends a sync that succeeded: the chunks that it took are stored.
    pub(super) fn end_sync(&self) {
        self.copy_pages(&self.taken, &self.stored);
        self.journal.release_marked();
    }

    /// Copies the pages that the sync writes from one set of bits to another.
    fn copy_pages(&self, from: &Bits, to: &Bits) {
        for page in self.table.taken() {
            for word in page as usize * PAGE_WORDS..(page as usize + 1) * PAGE_WORDS {
                to[word].store(from[word].load(Ordering::Acquire), Ordering::Release);
            }
        }
    }

    /// Encodes a page of the table for the current sync.
    pub(super) fn page(&self, page: u64, into: &mut [u8]) {
        let words = &self.taken[page as usize * PAGE_WORDS..][..PAGE_WORDS];
        for (bytes, word) in into.as_chunks_mut::<8>().0.iter_mut().zip(words) {
            *bytes = word.load(Ordering::Acquire).to_le_bytes();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn index(chunks: u64) -> Index {
        let layout = Layout::new(Bytes(chunks * 4096), Some(Bytes(4096))).unwrap();
        Index::open(layout, layout.size, &vec![0; layout.table_len() as usize], 1)
    }

    #[test]
    fn runs_end_where_chunks_differ() {
        let index = index(1000);
        index.set_live(60..200);
        assert_eq!(index.run(0..1000), (false, 60));
        assert_eq!(index.run(60..1000), (true, 200));
        assert_eq!(index.run(70..100), (true, 100));
        assert_eq!(index.run(200..1000), (false, 1000));
        assert_eq!(index.chunks_live(), 140);
        index.set_live(999..1000);
        assert_eq!(index.next_live(0), Some(60..200));
        assert_eq!(index.next_live(100), Some(100..200));
        assert_eq!(index.next_live(200), Some(999..1000));
        assert_eq!(index.next_live(1000), None);
    }

    #[test]
    fn a_chunk_is_claimed_once_and_not_after_it_is_live() {
        let index = index(100);
        assert_eq!(index.claim(10..14), 4);
        assert_eq!(index.claim(8..20), 2);
        index.release(8..10);
        index.set_live(10..14);
        index.release(10..14);
        assert_eq!(index.claim(10..11), 0);
        assert_eq!(index.claim(9..20), 1);
    }

    #[test]
    fn a_sync_writes_the_chunks_that_were_live_when_it_began() {
        let index = index(PAGE_BITS * 3);
        index.set_live(5..7);
        index.set_live(PAGE_BITS * 2..PAGE_BITS * 2 + 1);
        assert!(!index.is_stored(5..6));
        assert!(index.syncs.begin() && index.begin_sync());
        index.set_live(8..9);
        let mut page = [0; PAGE_LEN as usize];
        index.page(0, &mut page);
        assert_eq!(page[..3], [0b0110_0000, 0, 0], "chunk 8 became live after the sync began");
        assert_eq!(index.table.next(0, 16), Some(0..1));
        assert_eq!(index.table.next(1, 16), Some(2..3));
        assert_eq!(index.table.next(3, 16), None);
        assert!(!index.is_stored(5..7), "the sync has not ended");
        index.end_sync();
        assert!(index.is_stored(PAGE_BITS * 2..PAGE_BITS * 2 + 1) && index.is_stored(5..7));
        assert!(!index.is_stored(7..9), "chunk 8 waits for the next sync");
        assert!(index.begin_sync());
        assert_eq!(index.table.next(0, 16), Some(0..1));
    }

    #[test]
    fn chunks_of_a_failed_sync_are_taken_again() {
        let index = index(1000);
        index.set_live(5..7);
        assert!(index.begin_sync());
        index.table.put_back();
        assert!(!index.is_stored(5..7) && index.begin_sync());
        index.end_sync();
        assert!(index.is_stored(5..7) && !index.begin_sync());
    }

    #[test]
    fn a_table_is_loaded_and_bits_past_the_end_are_ignored() {
        let layout = Layout::new(Bytes(70 * 4096), Some(Bytes(4096))).unwrap();
        let mut table = vec![0; layout.table_len() as usize];
        table[0] = 0b101;
        table[8] = 0xff;
        let index = Index::open(layout, layout.size, &table, 1);
        assert_eq!(index.chunks_live(), 2 + 6);
        assert!(index.is_live(2) && index.is_stored(2..3) && !index.is_live(1));
    }
}
