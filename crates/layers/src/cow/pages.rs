//! The pages of a table that have to be written.

use super::index::{Bits, bits, is_set, masks};
use std::ops::Range;
use std::sync::atomic::Ordering;

/// Two bits for each page: due, which any queue sets, and being written, which only the request that runs the
/// sync reads and writes.
#[derive(Debug)]
pub(super) struct Pages {
    due: Bits,
    writing: Bits,
    count: u64,
}

impl Pages {
    pub(super) fn new(count: u64) -> Pages {
        Pages { due: bits(count), writing: bits(count), count }
    }

    /// Marks pages as due.
    pub(super) fn mark(&self, pages: Range<u64>) {
        for (word, mask) in masks(pages) {
            self.due[word].fetch_or(mask, Ordering::SeqCst);
        }
    }

    /// Starts a sync: takes the pages that are due. Returns whether there are any.
    pub(super) fn take(&self) -> bool {
        let mut any = false;
        for (due, writing) in self.due.iter().zip(&self.writing) {
            let pages = due.swap(0, Ordering::SeqCst);
            writing.store(pages, Ordering::Relaxed);
            any |= pages != 0;
        }
        any
    }

    /// Marks the pages of a failed sync as due again.
    pub(super) fn put_back(&self) {
        for (due, writing) in self.due.iter().zip(&self.writing) {
            due.fetch_or(writing.swap(0, Ordering::Relaxed), Ordering::SeqCst);
        }
    }

    /// Returns the pages that the sync writes.
    pub(super) fn taken(&self) -> impl Iterator<Item = u64> {
        self.writing.iter().enumerate().flat_map(|(word, pages)| {
            let pages = pages.load(Ordering::Relaxed);
            (0..64).filter(move |bit| pages >> bit & 1 == 1).map(move |bit| word as u64 * 64 + bit)
        })
    }

    /// Returns the next run of these pages from `first` on, at most `most`.
    pub(super) fn next(&self, first: u64, most: u64) -> Option<Range<u64>> {
        let first = (first..self.count).find(|&page| is_set(&self.writing, page))?;
        let limit = self.count.min(first + most);
        let end = (first + 1..limit).find(|&page| !is_set(&self.writing, page));
        Some(first..end.unwrap_or(limit))
    }
}
