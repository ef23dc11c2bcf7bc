//! One queue's ring of records: written by the queue's thread, read by one other, of a fixed size.

use crate::Record;
use std::sync::atomic::{AtomicU64, Ordering};

/// Words of a record.
pub(crate) const WORDS: usize = 4;

/// The ring.
#[derive(Debug)]
pub struct Lane {
    words: Box<[AtomicU64]>,
    /// Records, less one: their number is a power of two.
    mask: u64,
    /// Records ever written. Only the writer stores it.
    head: Padded,
    /// Records ever read. Only the reader stores it.
    tail: Padded,
    /// Records that found no room. Only the writer stores it.
    dropped: AtomicU64,
}

/// A counter on a cache line of its own, so that writer and reader do not pull at one.
#[derive(Debug, Default)]
#[repr(align(64))]
struct Padded(AtomicU64);

impl Lane {
    /// Room for `records`, rounded up to a power of two.
    pub fn new(records: usize) -> Lane {
        let records = records.next_power_of_two().max(2);
        Lane {
            words: (0..records * WORDS).map(|_| AtomicU64::new(0)).collect(),
            mask: records as u64 - 1,
            head: Padded::default(),
            tail: Padded::default(),
            dropped: AtomicU64::new(0),
        }
    }

    /// Put a record in, or count it as dropped. Only one thread at a time may.
    #[inline]
    pub fn push(&self, record: [u64; WORDS]) {
        let head = self.head.0.load(Ordering::Relaxed);
        if head - self.tail.0.load(Ordering::Acquire) > self.mask {
            let dropped = self.dropped.load(Ordering::Relaxed) + 1;
            return self.dropped.store(dropped, Ordering::Relaxed);
        }
        let at = (head & self.mask) as usize * WORDS;
        for (slot, word) in self.words[at..at + WORDS].iter().zip(record) {
            slot.store(word, Ordering::Relaxed);
        }
        self.head.0.store(head + 1, Ordering::Release);
    }

    /// Take out up to `limit` records, oldest first, and hand each to `each`. Only one thread at a time may. How many
    /// there were.
    pub fn drain(&self, limit: usize, mut each: impl FnMut([u64; WORDS])) -> usize {
        let tail = self.tail.0.load(Ordering::Relaxed);
        let head = self.head.0.load(Ordering::Acquire);
        let end = head.min(tail + limit as u64);
        for number in tail..end {
            let at = (number & self.mask) as usize * WORDS;
            each(std::array::from_fn(|word| self.words[at + word].load(Ordering::Relaxed)));
        }
        self.tail.0.store(end, Ordering::Release);
        (end - tail) as usize
    }

    /// Records that found no room so far.
    pub fn dropped(&self) -> u64 {
        self.dropped.load(Ordering::Relaxed)
    }

    /// The bytes that it holds.
    pub fn size(&self) -> usize {
        self.words.len() * size_of::<u64>()
    }
}

/// How many records fit into so many bytes.
pub(crate) const fn records_in(bytes: usize) -> usize {
    bytes / (WORDS * size_of::<u64>())
}

impl Lane {
    /// As many records as fit into so many bytes, rounded down to a power of two.
    pub fn of_size(bytes: usize) -> Lane {
        Lane::new(1 << records_in(bytes).max(2).ilog2())
    }

    /// The records that it holds at most.
    pub fn records(&self) -> usize {
        self.words.len() / WORDS
    }

    /// The same as [`drain`](Lane::drain), as records.
    pub fn drain_records(&self, limit: usize, mut each: impl FnMut(Record)) -> usize {
        self.drain(limit, |words| each(Record::from_words(words)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    #[test]
    fn what_finds_no_room_is_dropped_and_counted_and_what_is_there_stays() {
        let lane = Lane::new(4);
        (0..7).for_each(|n| lane.push([n; WORDS]));
        assert_eq!(lane.dropped(), 3);
        let mut seen = Vec::new();
        assert_eq!(lane.drain(100, |words| seen.push(words[0])), 4);
        assert_eq!(seen, [0, 1, 2, 3]);
        lane.push([9; WORDS]);
        assert_eq!(lane.drain(100, |words| assert_eq!(words, [9; WORDS])), 1);
        assert_eq!(lane.drain(100, |_| panic!("it is empty")), 0);
    }

    #[test]
    fn a_lane_takes_no_more_memory_than_it_may() {
        for (bytes, records) in [(4096, 128), (8191, 128), (8192, 256), (600, 16), (1, 2)] {
            assert_eq!(Lane::of_size(bytes).records(), records, "{bytes}");
        }
    }

    #[test]
    fn a_limited_drain_goes_on_where_it_ended() {
        let lane = Lane::new(8);
        (0..8).for_each(|n| lane.push([n; WORDS]));
        let mut seen = Vec::new();
        while lane.drain(3, |words| seen.push(words[0])) > 0 {}
        assert_eq!(seen, [0, 1, 2, 3, 4, 5, 6, 7]);
    }

    #[test]
    fn records_arrive_whole_and_in_order_while_they_are_written() {
        const COUNT: u64 = 200_000;
        let lane = Arc::new(Lane::new(1024));
        let writer = {
            let lane = lane.clone();
            std::thread::spawn(move || (1..=COUNT).for_each(|n| lane.push([n, !n, n << 1, n ^ 7])))
        };
        let (mut last, mut count) = (0, 0);
        let mut check = |words: [u64; WORDS]| {
            let n = words[0];
            assert_eq!(words, [n, !n, n << 1, n ^ 7], "a record in pieces");
            assert!(n > last, "{n} after {last}");
            last = n;
            count += 1;
        };
        while !writer.is_finished() {
            lane.drain(usize::MAX >> 1, &mut check);
        }
        writer.join().unwrap();
        lane.drain(usize::MAX >> 1, &mut check);
        assert_eq!(count + lane.dropped(), COUNT);
    }
}
