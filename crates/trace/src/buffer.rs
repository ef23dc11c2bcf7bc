//! A ring buffer of records for one queue: written by the queue's thread, read by one other thread, of a
//! fixed size.

use crate::Record;
use std::sync::atomic::{AtomicU64, Ordering};

/// Number of 64-bit words of a record.
pub(crate) const WORDS: usize = 4;

/// The ring buffer.
#[derive(Debug)]
pub struct TraceBuffer {
    words: Box<[AtomicU64]>,
    /// Capacity in records, a power of two, less one.
    mask: u64,
    /// Number of records written. Only the writer stores it.
    head: Padded,
    /// Number of records read. Only the reader stores it.
    tail: Padded,
    /// Number of records dropped because the buffer was full. Only the writer stores it.
    dropped: AtomicU64,
}

/// A counter on a cache line of its own, to avoid false sharing between writer and reader.
#[derive(Debug, Default)]
#[repr(align(64))]
struct Padded(AtomicU64);

impl TraceBuffer {
    /// Creates a ring buffer for `records` records, rounded up to a power of two.
    pub fn new(records: usize) -> TraceBuffer {
        let records = records.next_power_of_two().max(2);
        TraceBuffer {
            words: (0..records * WORDS).map(|_| AtomicU64::new(0)).collect(),
            mask: records as u64 - 1,
            head: Padded::default(),
            tail: Padded::default(),
            dropped: AtomicU64::new(0),
        }
    }

    /// Appends a record, or counts it as dropped. Only one thread at a time may call this.
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

    /// Removes up to `limit` records, oldest first, and passes each to `each`. Only one thread at a time may
    /// call this. Returns their number.
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

    /// Returns the number of records dropped so far.
    pub fn dropped(&self) -> u64 {
        self.dropped.load(Ordering::Relaxed)
    }

    /// Returns the size in bytes.
    pub fn size(&self) -> usize {
        self.words.len() * size_of::<u64>()
    }
}

/// Returns the number of records that fit into `bytes` bytes.
pub(crate) const fn records_in(bytes: usize) -> usize {
    bytes / (WORDS * size_of::<u64>())
}

impl TraceBuffer {
    /// Creates a ring buffer for the records that fit into `bytes` bytes, rounded down to a power of two.
    pub fn of_size(bytes: usize) -> TraceBuffer {
        TraceBuffer::new(1 << records_in(bytes).max(2).ilog2())
    }

    /// Returns the capacity in records.
    pub fn records(&self) -> usize {
        self.words.len() / WORDS
    }

    /// Removes records as [`drain`](TraceBuffer::drain) does, and passes them decoded.
    pub fn drain_records(&self, limit: usize, mut each: impl FnMut(Record)) -> usize {
        self.drain(limit, |words| each(Record::from_words(words)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    #[test]
    fn a_full_buffer_drops_and_counts_new_records() {
        let buffer = TraceBuffer::new(4);
        (0..7).for_each(|n| buffer.push([n; WORDS]));
        assert_eq!(buffer.dropped(), 3);
        let mut seen = Vec::new();
        assert_eq!(buffer.drain(100, |words| seen.push(words[0])), 4);
        assert_eq!(seen, [0, 1, 2, 3]);
        buffer.push([9; WORDS]);
        assert_eq!(buffer.drain(100, |words| assert_eq!(words, [9; WORDS])), 1);
        assert_eq!(buffer.drain(100, |_| panic!("it is empty")), 0);
    }

    #[test]
    fn a_buffer_stays_within_its_memory_limit() {
        for (bytes, records) in [(4096, 128), (8191, 128), (8192, 256), (600, 16), (1, 2)] {
            assert_eq!(TraceBuffer::of_size(bytes).records(), records, "{bytes}");
        }
    }

    #[test]
    fn a_limited_drain_continues_where_it_ended() {
        let buffer = TraceBuffer::new(8);
        (0..8).for_each(|n| buffer.push([n; WORDS]));
        let mut seen = Vec::new();
        while buffer.drain(3, |words| seen.push(words[0])) > 0 {}
        assert_eq!(seen, [0, 1, 2, 3, 4, 5, 6, 7]);
    }

    #[test]
    fn records_are_read_intact_and_in_order_during_writes() {
        const COUNT: u64 = 200_000;
        let buffer = Arc::new(TraceBuffer::new(1024));
        let writer = {
            let buffer = buffer.clone();
            std::thread::spawn(move || (1..=COUNT).for_each(|n| buffer.push([n, !n, n << 1, n ^ 7])))
        };
        let (mut last, mut count) = (0, 0);
        let mut check = |words: [u64; WORDS]| {
            let n = words[0];
            assert_eq!(words, [n, !n, n << 1, n ^ 7], "a torn record");
            assert!(n > last, "{n} after {last}");
            last = n;
            count += 1;
        };
        while !writer.is_finished() {
            buffer.drain(usize::MAX >> 1, &mut check);
        }
        writer.join().unwrap();
        buffer.drain(usize::MAX >> 1, &mut check);
        assert_eq!(count + buffer.dropped(), COUNT);
    }
}
