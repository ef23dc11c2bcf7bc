//! The record of a packed queue (`QueueRegionPacked`). It has copies of the descriptors in flight, because
//! used descriptors overwrite them in the ring.
//!
//! According to the specification's text, a popped chain takes entries that the batch's pushed chains have
//! freed. Here chains may be popped between push and publish, so pushed entries join the free list only
//! when the batch is published.
//!
//! The links of the free list are also kept in private memory, so that a front-end that changes the record
//! misleads only the next process, which checks them.

use super::VERSION;
use crate::memory::Words;
use crate::ring::notify::{self, Word};
use crate::ring::{Cursor, Descriptor, PackedArea};
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

/// Bytes before the first entry.
pub(super) const HEADER: usize = 32;
/// Bytes of a `DescStatePacked`.
pub(super) const ENTRY: usize = 32;

const VERSION_AT: usize = 8;
const DESC_NUM_AT: usize = 10;
const FREE_HEAD_AT: usize = 12;
const OLD_FREE_HEAD_AT: usize = 14;
const USED_IDX_AT: usize = 16;
const OLD_USED_IDX_AT: usize = 18;
const USED_WRAP_AT: usize = 20;
const OLD_USED_WRAP_AT: usize = 21;

// Offsets in an entry.
const INFLIGHT: usize = 0;
const LINK: usize = 2;
const LAST: usize = 4;
const NUM: usize = 6;
const COUNTER: usize = 8;
const ID: usize = 16;
const FLAGS: usize = 18;
const LEN: usize = 20;
const ADDRESS: usize = 24;

/// The record of a packed queue.
pub(crate) struct PackedRecord {
    words: Words,
    size: u16,
    counter: u64,
    /// First free entry, or at least `size` if there is none.
    free_head: u16,
    free: u16,
    /// By entry: the next entry of its chain or of the free list.
    links: Box<[u16]>,
    /// By first entry of a chain in flight: its last entry, and the number of its descriptors.
    chains: Box<[(u16, u16)]>,
    /// First entries of chains that were pushed and not yet published.
    batch: Vec<u16>,
    /// First entries of chains to be popped again, in reverse order.
    again: Vec<u16>,
}

/// Address, length, flags and id of a descriptor in a chain to be popped again.
pub(crate) type Copied = (u64, u32, u16, u16);

fn entry(index: u16, field: usize) -> usize {
    HEADER + ENTRY * usize::from(index) + field
}

impl PackedRecord {
    /// Continues a record, or starts one that is all zeroes. `used` is the position at which the ring would
    /// start; returns the position at which it must start.
    pub(crate) fn open(words: Words, area: &PackedArea, used: Cursor) -> (PackedRecord, Cursor) {
        let size = area.size();
        let mut record = PackedRecord {
            words,
            size,
            counter: 0,
            free_head: 0,
            free: size,
            links: (1..=size).collect(),
            chains: vec![(0, 0); size.into()].into(),
            batch: Vec::with_capacity(size.into()),
            again: Vec::new(),
        };
        if record.words.u16(VERSION_AT).get(Acquire) == VERSION {
            let used = record.recover(area);
            return (record, used);
        }
        for index in 0..size {
            record.words.u16(entry(index, LINK)).set(index + 1, Relaxed);
        }
        record.store_used(used);
        record.words.u16(DESC_NUM_AT).set(size, Relaxed);
        record.commit();
        record.words.u16(VERSION_AT).set(VERSION, Release);
        (record, used)
    }

    fn store_used(&self, used: Cursor) {
        self.words.u16(USED_IDX_AT).set(used.index, Relaxed);
        self.words.u8(USED_WRAP_AT).store(used.wrap.into(), Release);
    }

    /// Copies the fields of the free list and the used index to their `old` counterparts.
    fn commit(&self) {
        let words = &self.words;
        words.u16(OLD_FREE_HEAD_AT).set(words.u16(FREE_HEAD_AT).get(Relaxed), Release);
        words.u16(OLD_USED_IDX_AT).set(words.u16(USED_IDX_AT).get(Relaxed), Release);
        words.u8(OLD_USED_WRAP_AT).store(words.u8(USED_WRAP_AT).load(Relaxed), Release);
    }

    /// Commits the last batch if the driver can have seen it, otherwise rolls it back, and finds the chains
    /// in flight.
    fn recover(&mut self, area: &PackedArea) -> Cursor {
        let words = &self.words;
        let number = |at: usize| words.u16(at).get(Relaxed);
        let old = Cursor {
            index: number(OLD_USED_IDX_AT) % self.size,
            wrap: words.u8(OLD_USED_WRAP_AT).load(Relaxed) != 0,
        };
        // A batch of a whole lap changes only the wrap counter, which the specification's text omits.
        let is_moved = number(USED_IDX_AT) != number(OLD_USED_IDX_AT)
            || words.u8(USED_WRAP_AT).load(Relaxed) != words.u8(OLD_USED_WRAP_AT).load(Relaxed);
        if is_moved && !notify::is_available(area.flags(old.index).get(Acquire), old.wrap) {
            self.commit();
        }
        words.u16(FREE_HEAD_AT).set(number(OLD_FREE_HEAD_AT), Release);
        words.u16(USED_IDX_AT).set(number(OLD_USED_IDX_AT), Release);
        words.u8(USED_WRAP_AT).store(words.u8(OLD_USED_WRAP_AT).load(Relaxed), Release);
        let used = Cursor {
            index: number(USED_IDX_AT) % self.size,
            wrap: words.u8(USED_WRAP_AT).load(Relaxed) != 0,
        };
        for (index, link) in self.links.iter_mut().enumerate() {
            *link = number(entry(index as u16, LINK));
        }
        // Entries of the free list are not in flight, whatever their fields say.
        let mut taken = vec![true; self.size.into()];
        let mut index = number(FREE_HEAD_AT);
        self.free_head = index;
        while let Some(is_taken) = taken.get_mut(usize::from(index)).filter(|is_taken| **is_taken) {
            *is_taken = false;
            words.u8(entry(index, INFLIGHT)).store(0, Relaxed);
            index = self.links[usize::from(index)];
        }
        let is_inflight =
            |&index: &u16| taken[usize::from(index)] && words.u8(entry(index, INFLIGHT)).load(Relaxed) != 0;
        let counter = |index: u16| words.u64(entry(index, COUNTER)).load(Relaxed);
        let mut again: Vec<u16> = (0..self.size).filter(is_inflight).collect();
        again.sort_by_key(|&index| std::cmp::Reverse(counter(index)));
        let mut free = self.size;
        for &index in &again {
            let count = number(entry(index, NUM)).clamp(1, self.size);
            self.chains[usize::from(index)] = (number(entry(index, LAST)), count);
            free = free.saturating_sub(count);
        }
        self.free = free;
        self.counter = again.first().map_or(0, |&index| counter(index).wrapping_add(1));
        self.again = again;
        used
    }

    /// Returns the number of chains to be popped again.
    pub(crate) fn again(&self) -> usize {
        self.again.len()
    }

    /// Returns the number of descriptors in flight.
    pub(crate) fn descriptors(&self) -> u16 {
        self.size - self.free
    }

    /// Returns the first entry of the next chain to be popped again.
    #[inline]
    pub(crate) fn next_again(&self) -> Option<u16> {
        self.again.last().copied()
    }

    /// Removes the next chain to be popped again, after it was popped.
    pub(crate) fn popped_again(&mut self) {
        self.again.pop();
    }

    /// Iterates over the descriptors of a chain, from its first entry.
    pub(crate) fn copied(&self, first: u16) -> impl Iterator<Item = Copied> {
        let mut index = first;
        let count = self.count(first);
        (0..count).map_while(move |_| {
            let at = index;
            index = *self.links.get(usize::from(at))?;
            let words = &self.words;
            Some((
                u64::from_le(words.u64(entry(at, ADDRESS)).load(Relaxed)),
                words.u32(entry(at, LEN)).get(Relaxed),
                words.u16(entry(at, FLAGS)).get(Relaxed),
                words.u16(entry(at, ID)).get(Relaxed),
            ))
        })
    }

    /// Returns the number of descriptors of a chain in flight.
    #[inline]
    pub(crate) fn count(&self, first: u16) -> u16 {
        self.chains[usize::from(first)].1
    }

    /// Returns whether a chain of this many descriptors can be recorded. A driver that follows the
    /// specification has no more in flight than the queue has.
    #[inline]
    pub(crate) fn has_room(&self, count: u16) -> bool {
        count <= self.free
    }

    /// Records a chain that is popped. Returns its first entry, or `None` if there are too few free
    /// entries, as in a record that was changed.
    pub(crate) fn popped(&mut self, descriptors: impl Iterator<Item = Descriptor>) -> Option<u16> {
        let (first, words) = (self.free_head, &self.words);
        let (mut last, mut next, mut count) = (first, first, 0);
        for descriptor in descriptors {
            let link = *self.links.get(usize::from(next))?;
            last = next;
            words.u64(entry(last, ADDRESS)).store(descriptor.address.to_le(), Relaxed);
            words.u32(entry(last, LEN)).set(descriptor.len(), Relaxed);
            words.u16(entry(last, FLAGS)).set(descriptor.fourth(), Relaxed);
            words.u16(entry(last, ID)).set(descriptor.third(), Relaxed);
            (next, count) = (link, count + 1);
        }
        *self.chains.get_mut(usize::from(first))? = (last, count);
        words.u16(entry(first, NUM)).set(count, Relaxed);
        words.u16(entry(first, LAST)).set(last, Relaxed);
        words.u64(entry(first, COUNTER)).store(self.counter, Relaxed);
        words.u8(entry(first, INFLIGHT)).store(1, Relaxed);
        self.counter = self.counter.wrapping_add(1);
        self.free_head = next;
        self.free -= count;
        words.u16(FREE_HEAD_AT).set(next, Release);
        // The chain is in flight from here on; before this store its entries are free.
        words.u16(OLD_FREE_HEAD_AT).set(next, Release);
        Some(first)
    }

    /// Adds a chain to the batch that is published next.
    #[inline]
    pub(crate) fn pushed(&mut self, first: u16) {
        self.batch.push(first);
    }

    /// Prepares the batch: `used` is the position at which the ring continues after it. Must be called
    /// before the driver can see the batch.
    pub(crate) fn publishing(&mut self, used: Cursor) {
        for &first in &self.batch {
            let (last, count) = self.chains[usize::from(first)];
            if let Some(link) = self.links.get_mut(usize::from(last)) {
                *link = self.free_head;
                self.words.u16(entry(last, LINK)).set(self.free_head, Relaxed);
            }
            self.free_head = first;
            self.free = self.free.saturating_add(count).min(self.size);
        }
        self.words.u16(FREE_HEAD_AT).set(self.free_head, Release);
        self.store_used(used);
    }

    /// Removes the batch from the record, after it became visible to the driver.
    pub(crate) fn published(&mut self) {
        for &first in &self.batch {
            self.words.u8(entry(first, INFLIGHT)).store(0, Release);
        }
        self.batch.clear();
        self.commit();
    }
}
