//! Which chunks the overlay holds: what all queues of an overlay share.
//!
//! Four bits a chunk, in memory. **Live**: the overlay holds it; set once, never cleared. **Claimed**: a
//! request is bringing it there; whoever else wants to waits. **Taken**: it was live when the last sync began,
//! which writes these and no others. **Stored**: the table on disk says so, because a sync that took it has
//! succeeded.
//!
//! The journal ([`Journal`]) has checksums of what is written to chunks that are not stored: by these the overlay
//! knows again, after its server was killed, what is whole of them.

use super::format::{Layout, PAGE_LEN};
use super::journal::{Journal, Room};
use super::pages::Pages;
use block::Bytes;
use queue::Rounds;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

/// Bits of a page of the table.
const PAGE_BITS: u64 = PAGE_LEN * 8;
const PAGE_WORDS: usize = PAGE_LEN as usize / 8;

pub(super) type Bits = Box<[AtomicU64]>;

pub(super) fn bits(count: u64) -> Bits {
    (0..count.div_ceil(64)).map(|_| AtomicU64::new(0)).collect()
}

pub(super) fn is_set(bits: &Bits, number: u64) -> bool {
    bits[(number / 64) as usize].load(Ordering::Acquire) >> (number % 64) & 1 == 1
}

/// The bits of each word that lie in a range: word index and mask.
pub(super) fn masks(range: Range<u64>) -> impl Iterator<Item = (usize, u64)> {
    let words = range.start / 64..range.end.div_ceil(64);
    words.map(move |word| {
        let from = range.start.saturating_sub(word * 64).min(63);
        let to = (range.end - word * 64).min(64);
        (word as usize, (u64::MAX << from) & (u64::MAX >> (64 - to)))
    })
}

/// Where the run of equal bits ends that begins with the range: whether they are set.
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

/// The shared part that nodes see.
#[derive(Debug)]
pub struct Index {
    layout: Layout,
    origin_size: Bytes,
    live: Bits,
    claimed: Bits,
    taken: Bits,
    stored: Bits,
    /// Pages of the table that may have live bits which no sync has taken.
    pub(super) table: Pages,
    pub(super) journal: Journal,
    pub(super) syncs: Rounds,
}

impl Index {
    /// From the table on disk. `life`: the one that the header names, in which no record was written yet.
    ///
    /// # Panics
    /// When the table is not as long as the layout says.
    pub fn open(layout: Layout, origin_size: Bytes, table: &[u8], life: u64) -> Index {
        Index::with_room(layout, origin_size, table, life, Room::of(layout))
    }

    /// As [`open`](Index::open), with another room for the journal, as a simulation has it.
    ///
    /// # Panics
    /// When the table is not as long as the layout says.
    pub fn with_room(layout: Layout, origin_size: Bytes, table: &[u8], life: u64, room: Room) -> Index {
        assert_eq!(table.len() as u64, layout.table_len());
        let mut words: Vec<u64> =
            table.as_chunks::<8>().0.iter().map(|bytes| u64::from_le_bytes(*bytes)).collect();
        // Bits past the last chunk mean nothing.
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
            journal: Journal::new(life, room),
            syncs: Rounds::default(),
        }
    }

    /// The sizes of the overlay.
    pub fn layout(&self) -> Layout {
        self.layout
    }

    /// How long the origin is.
    pub fn origin_size(&self) -> Bytes {
        self.origin_size
    }

    /// How many chunks the overlay holds.
    pub fn chunks_live(&self) -> u64 {
        self.live.iter().map(|word| u64::from(word.load(Ordering::Relaxed).count_ones())).sum()
    }

    /// The first run of chunks from there on that the overlay holds.
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

    /// Begin another life of the journal, which the header names by now. While no request is under way.
    pub fn restart(&self, life: u64) {
        self.journal.restart(life);
    }

    pub(super) fn is_live(&self, chunk: u64) -> bool {
        is_set(&self.live, chunk)
    }

    /// Where the run of chunks that are alike ends that begins with the range: whether they are live.
    pub(super) fn run(&self, range: Range<u64>) -> (bool, u64) {
        run(&self.live, range)
    }

    /// Claim chunks that are not live from the first on: how many. Fewer where one is live or claimed.
    pub(super) fn claim(&self, range: Range<u64>) -> u64 {
        for chunk in range.clone() {
            let (word, bit) = ((chunk / 64) as usize, 1 << (chunk % 64));
            if self.claimed[word].fetch_or(bit, Ordering::AcqRel) & bit != 0 {
                return chunk - range.start;
            }
            // Whoever had it before may have brought it there.
            if self.is_live(chunk) {
                self.disclaim(chunk..chunk + 1);
                return chunk - range.start;
            }
        }
        range.end - range.start
    }

    /// Let go of chunks, live by now or not.
    pub(super) fn disclaim(&self, range: Range<u64>) {
        for (word, mask) in masks(range) {
            self.claimed[word].fetch_and(!mask, Ordering::AcqRel);
        }
    }

    /// The overlay holds these from now on.
    pub(super) fn set_live(&self, range: Range<u64>) {
        for (word, mask) in masks(range.clone()) {
            self.live[word].fetch_or(mask, Ordering::AcqRel);
        }
        // After the bits: a round that misses this finds it the next time.
        let pages = range.start / PAGE_BITS..range.end.div_ceil(PAGE_BITS);
        self.table.mark(pages);
    }

    /// Whether any of these chunks is claimed.
    pub(super) fn is_claimed(&self, range: Range<u64>) -> bool {
        masks(range).any(|(word, mask)| self.claimed[word].load(Ordering::Acquire) & mask != 0)
    }

    /// Where the run of chunks ends that begins with the range and that the table on disk all has, or all lacks: whether
    /// it has them.
    pub(super) fn stored_run(&self, range: Range<u64>) -> (bool, u64) {
        run(&self.stored, range)
    }

    /// Whether the table on disk has these chunks, for good.
    pub(super) fn is_stored(&self, range: Range<u64>) -> bool {
        masks(range).all(|(word, mask)| self.stored[word].load(Ordering::Acquire) & mask == mask)
    }

    /// A sync has begun: take what is live now. Whether there is anything to write.
    pub(super) fn take(&self) -> bool {
        // Before the bits: chunks are live before their records are appended.
        self.journal.mark();
        let any = self.table.take();
        self.copy_pages(&self.live, &self.taken);
        any
    }

    /// The sync that took them has succeeded.
    pub(super) fn store_taken(&self) {
        self.copy_pages(&self.taken, &self.stored);
        self.journal.release_marked();
    }

    /// Copy the pages that are written from one set of bits to another.
    fn copy_pages(&self, from: &Bits, to: &Bits) {
        for page in self.table.taken() {
            for word in page as usize * PAGE_WORDS..(page as usize + 1) * PAGE_WORDS {
                to[word].store(from[word].load(Ordering::Acquire), Ordering::Release);
            }
        }
    }

    /// What a page of the table is to say.
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
    fn a_chunk_is_claimed_by_one_at_a_time_and_not_once_it_is_live() {
        let index = index(100);
        assert_eq!(index.claim(10..14), 4);
        assert_eq!(index.claim(8..20), 2);
        index.disclaim(8..10);
        index.set_live(10..14);
        index.disclaim(10..14);
        assert_eq!(index.claim(10..11), 0);
        assert_eq!(index.claim(9..20), 1);
    }

    #[test]
    fn a_sync_writes_what_was_live_when_it_began() {
        let index = index(PAGE_BITS * 3);
        index.set_live(5..7);
        index.set_live(PAGE_BITS * 2..PAGE_BITS * 2 + 1);
        assert!(!index.is_stored(5..6));
        assert!(index.syncs.begin() && index.take());
        index.set_live(8..9);
        let mut page = [0; PAGE_LEN as usize];
        index.page(0, &mut page);
        assert_eq!(page[..3], [0b0110_0000, 0, 0], "chunk 8 came too late");
        assert_eq!(index.table.next(0, 16), Some(0..1));
        assert_eq!(index.table.next(1, 16), Some(2..3));
        assert_eq!(index.table.next(3, 16), None);
        assert!(!index.is_stored(5..7), "it is under way");
        index.store_taken();
        assert!(index.is_stored(PAGE_BITS * 2..PAGE_BITS * 2 + 1) && index.is_stored(5..7));
        assert!(!index.is_stored(7..9), "it waits for the next sync");
        assert!(index.take());
        assert_eq!(index.table.next(0, 16), Some(0..1));
    }

    #[test]
    fn what_a_failed_sync_took_is_taken_again() {
        let index = index(1000);
        index.set_live(5..7);
        assert!(index.take());
        index.table.put_back();
        assert!(!index.is_stored(5..7) && index.take());
        index.store_taken();
        assert!(index.is_stored(5..7) && !index.take());
    }

    #[test]
    fn a_table_reads_back_and_bits_past_the_end_mean_nothing() {
        let layout = Layout::new(Bytes(70 * 4096), Some(Bytes(4096))).unwrap();
        let mut table = vec![0; layout.table_len() as usize];
        table[0] = 0b101;
        table[8] = 0xff;
        let index = Index::open(layout, layout.size, &table, 1);
        assert_eq!(index.chunks_live(), 2 + 6);
        assert!(index.is_live(2) && index.is_stored(2..3) && !index.is_live(1));
    }
}
