//! `cache_size`: tracks which pages of a memory-backed device are in its volatile cache.
//!
//! null_blk keeps such pages twice: in its cache and, once they are evicted or flushed, in its medium. Both
//! are lost with the process, so no one can tell which copy is newer. Here only one copy is kept, and the
//! cache tracks the pages that it alone would have. Writes add pages, flushes remove all, FUA and discards
//! bypass the cache, and pages that do not fit evict others, round robin.

use crate::ram::{Pages, touched, whole};
use block::Bytes;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

const PAGE: u64 = 4096;

#[derive(Debug)]
pub(super) struct Cache {
    pages: Pages,
    count: u64,
    most: u64,
    /// Position at which the search for the next page to evict starts.
    hand: AtomicU64,
}

impl Cache {
    pub(super) fn new(device: Bytes, size: Bytes) -> Cache {
        let count = device.0.div_ceil(PAGE);
        Cache { pages: Pages::new(count), count, most: size.0 / PAGE, hand: AtomicU64::new(0) }
    }

    /// Returns the number of bytes that only the cache has.
    pub(super) fn held(&self) -> Bytes {
        Bytes(self.pages.populated() * PAGE)
    }

    /// Adds a written range.
    pub(super) fn written(&self, at: u64, len: u64) {
        self.pages.set(touched(at, len));
        while self.pages.populated() > self.most {
            self.evict();
        }
    }

    fn evict(&self) {
        let from = self.hand.load(Relaxed) % self.count;
        let found = match self.pages.run(from..self.count) {
            (true, _) => from,
            (false, next) if next < self.count => next,
            _ => match self.pages.run(0..self.count) {
                (true, _) => 0,
                (false, next) => next,
            },
        };
        if found < self.count {
            self.pages.clear(found..found + 1);
        }
        self.hand.store(found + 1, Relaxed);
    }

    /// Removes a range that is on the medium, or was discarded.
    pub(super) fn passed_by(&self, at: u64, len: u64) {
        self.pages.clear(whole(at, len));
    }

    pub(super) fn flush(&self) {
        self.pages.clear(0..self.count);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cache_holds_no_more_than_its_size() {
        let cache = Cache::new(Bytes::mib(1), Bytes(3 * PAGE));
        cache.written(0, 2 * PAGE);
        cache.written(PAGE, PAGE);
        assert_eq!(cache.held(), Bytes(2 * PAGE));
        cache.written(10 * PAGE, 5 * PAGE);
        assert_eq!(cache.held(), Bytes(3 * PAGE));
        assert!(cache.pages.all_set(12 * PAGE / PAGE..15), "the oldest went");
        cache.passed_by(14 * PAGE, PAGE);
        assert_eq!(cache.held(), Bytes(2 * PAGE));
        cache.flush();
        assert_eq!(cache.held(), Bytes::ZERO);
        cache.written(255 * PAGE, PAGE);
        cache.written(0, 4 * PAGE);
        assert_eq!(cache.held(), Bytes(3 * PAGE), "the hand goes round");
    }
}
