//! The record of a split queue (`QueueRegionSplit`).

use super::VERSION;
use crate::memory::Words;
use crate::ring::notify::Word;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

/// Bytes before the first entry: features, version, `desc_num`, `last_batch_head`, `used_idx`.
pub(super) const HEADER: usize = 16;
/// Bytes of a `DescStateSplit`: inflight, padding, next, counter.
pub(super) const ENTRY: usize = 16;

const VERSION_AT: usize = 8;
const DESC_NUM_AT: usize = 10;
const LAST_BATCH_HEAD_AT: usize = 12;
const USED_IDX_AT: usize = 14;

/// The record of a split queue.
pub(crate) struct SplitRecord {
    words: Words,
    size: u16,
    counter: u64,
    /// Heads that were pushed and not yet published.
    batch: Vec<u16>,
    /// Heads to be popped again, in reverse order.
    again: Vec<u16>,
}

fn entry(head: u16) -> usize {
    HEADER + ENTRY * usize::from(head)
}

impl SplitRecord {
    /// Continues a record, or starts one that is all zeroes. `used_index` is the index of the used ring.
    pub(crate) fn open(words: Words, size: u16, used_index: u16) -> SplitRecord {
        let mut record = SplitRecord {
            words,
            size,
            counter: 0,
            batch: Vec::with_capacity(size.into()),
            again: Vec::new(),
        };
        match record.words.u16(VERSION_AT).get(Acquire) {
            VERSION => record.recover(used_index),
            _ => {
                record.words.u16(DESC_NUM_AT).set(size, Relaxed);
                record.words.u16(USED_IDX_AT).set(used_index, Relaxed);
                record.words.u16(VERSION_AT).set(VERSION, Release);
            }
        }
        record
    }

    fn inflight(&self, head: u16) -> &std::sync::atomic::AtomicU8 {
        self.words.u8(entry(head))
    }

    fn recover(&mut self, used_index: u16) {
        // The last batch was published, but its entries may not have been cleared.
        let mut left = used_index.wrapping_sub(self.words.u16(USED_IDX_AT).get(Relaxed));
        let mut head = self.words.u16(LAST_BATCH_HEAD_AT).get(Relaxed);
        while left > 0 && left <= self.size && head < self.size {
            self.inflight(head).store(0, Relaxed);
            head = self.words.u16(entry(head) + 6).get(Relaxed);
            left -= 1;
        }
        self.words.u16(USED_IDX_AT).set(used_index, Release);
        let counter = |head: u16| self.words.u64(entry(head) + 8).load(Relaxed);
        let mut again: Vec<u16> =
            (0..self.size).filter(|&head| self.inflight(head).load(Relaxed) != 0).collect();
        again.sort_by_key(|&head| std::cmp::Reverse(counter(head)));
        self.counter = again.first().map_or(0, |&head| counter(head).wrapping_add(1));
        self.again = again;
    }

    /// Returns the number of chains to be popped again.
    pub(crate) fn again(&self) -> usize {
        self.again.len()
    }

    /// Returns the next chain to be popped again.
    #[inline]
    pub(crate) fn next_again(&self) -> Option<u16> {
        self.again.last().copied()
    }

    /// Removes the next chain to be popped again, after it was popped.
    pub(crate) fn popped_again(&mut self) {
        self.again.pop();
    }

    /// Records a chain that is popped.
    #[inline]
    pub(crate) fn popped(&mut self, head: u16) {
        self.words.u64(entry(head) + 8).store(self.counter, Relaxed);
        self.counter = self.counter.wrapping_add(1);
        self.inflight(head).store(1, Release);
    }

    /// Adds a chain to the batch that is published next.
    #[inline]
    pub(crate) fn pushed(&mut self, head: u16) {
        let last = self.words.u16(LAST_BATCH_HEAD_AT);
        self.words.u16(entry(head) + 6).set(last.get(Relaxed), Relaxed);
        last.set(head, Release);
        self.batch.push(head);
    }

    /// Removes the batch from the record: the used ring contains it, up to this index.
    #[inline]
    pub(crate) fn published(&mut self, used_index: u16) {
        for &head in &self.batch {
            self.inflight(head).store(0, Release);
        }
        self.batch.clear();
        self.words.u16(USED_IDX_AT).set(used_index, Release);
    }
}
