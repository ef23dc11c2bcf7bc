//! Tracks which pages of a RAM disk were written: one bit for each 4 KiB page, shared by all queues.
//!
//! *Invariant:* a page with content other than zeroes has its bit set, from the end of the write on.
//! Writers copy first and then set the bit; a discard first clears the bit and then the page. So the worst
//! outcome of a race is a bit without content, never content without a bit.

use super::memory::PAGE;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

#[derive(Debug)]
pub(crate) struct Pages {
    words: Box<[AtomicU64]>,
    /// Number of set bits; changed only when a bit changes.
    populated: AtomicU64,
}

/// Returns the numbers of the pages that a byte range touches.
#[inline]
pub(crate) fn touched(at: u64, len: u64) -> Range<u64> {
    at / PAGE as u64..(at + len).div_ceil(PAGE as u64)
}

/// Returns the numbers of the pages that are wholly within a byte range.
pub(crate) fn whole(at: u64, len: u64) -> Range<u64> {
    let first = at.div_ceil(PAGE as u64);
    first..((at + len) / PAGE as u64).max(first)
}

/// Iterates over the words that hold the bits of `pages`, each with a mask of those bits.
#[inline]
fn masks(pages: Range<u64>) -> impl Iterator<Item = (usize, u64)> {
    let (mut next, end) = (pages.start, pages.end);
    std::iter::from_fn(move || {
        if next >= end {
            return None;
        }
        let word = next / 64;
        let count = (end - next).min(64 - next % 64);
        let bits = (u64::MAX >> (64 - count)) << (next % 64);
        next += count;
        Some((word as usize, bits))
    })
}

impl Pages {
    pub(crate) fn new(count: u64) -> Pages {
        let words = count.div_ceil(64) as usize;
        Pages { words: (0..words).map(|_| AtomicU64::new(0)).collect(), populated: AtomicU64::new(0) }
    }

    /// Returns the number of populated pages.
    pub(crate) fn populated(&self) -> u64 {
        self.populated.load(Ordering::Relaxed)
    }

    /// Marks pages as populated.
    #[inline]
    pub(crate) fn set(&self, pages: Range<u64>) {
        for (word, bits) in masks(pages) {
            let word = &self.words[word];
            if word.load(Ordering::Relaxed) & bits != bits {
                let before = word.fetch_or(bits, Ordering::AcqRel);
                self.populated.fetch_add(u64::from((bits & !before).count_ones()), Ordering::Relaxed);
            }
        }
    }

    /// Marks pages as empty. Returns whether any was populated.
    pub(crate) fn clear(&self, pages: Range<u64>) -> bool {
        let mut any = false;
        for (word, bits) in masks(pages) {
            let word = &self.words[word];
            if word.load(Ordering::Relaxed) & bits != 0 {
                let before = word.fetch_and(!bits, Ordering::AcqRel);
                self.populated.fetch_sub(u64::from((bits & before).count_ones()), Ordering::Relaxed);
                any = true;
            }
        }
        any
    }

    /// Returns whether all of the pages are populated.
    #[inline]
    pub(crate) fn all_set(&self, pages: Range<u64>) -> bool {
        masks(pages).all(|(word, bits)| self.words[word].load(Ordering::Acquire) & bits == bits)
    }

    /// Returns whether the first of `pages`, which is not empty, is populated, and the first page after it
    /// that differs, or the end.
    pub(crate) fn run(&self, pages: Range<u64>) -> (bool, u64) {
        let word_of = |page: u64| self.words[(page / 64) as usize].load(Ordering::Acquire);
        let set = word_of(pages.start) >> (pages.start % 64) & 1 == 1;
        let mut next = pages.start;
        while next < pages.end {
            let ahead = (if set { !word_of(next) } else { word_of(next) }) >> (next % 64);
            if ahead != 0 {
                return (set, (next + u64::from(ahead.trailing_zeros())).min(pages.end));
            }
            next += 64 - next % 64;
        }
        (set, pages.end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_are_found_across_words() {
        let pages = Pages::new(300);
        pages.set(60..200);
        assert_eq!(pages.run(0..300), (false, 60));
        assert_eq!(pages.run(60..300), (true, 200));
        assert_eq!(pages.run(61..150), (true, 150));
        assert_eq!(pages.run(200..300), (false, 300));
        assert_eq!(pages.populated(), 140);
    }

    #[test]
    fn bits_are_counted_once() {
        let pages = Pages::new(128);
        pages.set(10..70);
        pages.set(0..70);
        assert_eq!(pages.populated(), 70);
        assert!(pages.clear(5..128) && !pages.clear(5..128));
        assert_eq!(pages.populated(), 5);
        assert!(pages.all_set(0..5) && !pages.all_set(0..6));
    }

    #[test]
    fn ranges_are_rounded_to_pages_outwards_and_inwards() {
        assert_eq!(touched(4095, 2), 0..2);
        assert_eq!(whole(4095, 2), 1..1);
        assert_eq!(whole(1, 3 * 4096), 1..3);
        assert_eq!(whole(4096, 4096), 1..2);
    }
}
