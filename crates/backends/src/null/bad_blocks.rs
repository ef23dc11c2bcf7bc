//! Bad blocks: ranges of sectors that can be neither read nor written, and that may change online.
//!
//! The control plane changes the list. So does a request that reaches a range, if ranges are bad only once.
//! A queue's node keeps a copy, and detects changes by comparing one number.

use block::Sectors;
use std::fmt;
use std::ops::Range;
use std::str::FromStr;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Acquire, Release};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Ranges of sectors, disjoint and sorted.
#[derive(Clone, Default, PartialEq, Eq, Debug)]
pub struct BadRanges(Vec<Range<u64>>);

/// The error for text that is not a range of bad sectors.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{0}")]
pub struct ParseBadError(String);

impl ParseBadError {
    fn new(text: &str) -> ParseBadError {
        ParseBadError(format!("\"{text}\" is not a range of sectors on the device, FIRST-LAST"))
    }

    /// Returns the error for a device that was created without support for bad blocks.
    pub(super) fn unheeded() -> ParseBadError {
        ParseBadError(
            "the device was made without bad blocks (make it with badblocks_once or badblocks=…)".into(),
        )
    }
}

/// Parses `FIRST-LAST`, both inclusive, as null_blk writes ranges.
fn range(text: &str) -> Result<Range<u64>, ParseBadError> {
    let error = || ParseBadError::new(text);
    let (first, last) = text.split_once('-').unwrap_or((text, text));
    let first: u64 = first.parse().map_err(|_| error())?;
    let last: u64 = last.parse().map_err(|_| error())?;
    if first > last || last >= u64::MAX >> 9 { Err(error()) } else { Ok(first..last + 1) }
}

impl FromStr for BadRanges {
    type Err = ParseBadError;

    /// Parses `FIRST-LAST[+FIRST-LAST…]`, each range as in null_blk's `+FIRST-LAST`.
    fn from_str(text: &str) -> Result<BadRanges, ParseBadError> {
        let mut ranges = BadRanges::default();
        let text = text.strip_prefix('+').unwrap_or(text);
        text.split('+').try_for_each(|text| range(text).map(|range| ranges.add(range)))?;
        Ok(ranges)
    }
}

impl fmt::Display for BadRanges {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, range) in self.0.iter().enumerate() {
            write!(f, "{}{}-{}", if index == 0 { "" } else { "+" }, range.start, range.end - 1)?;
        }
        Ok(())
    }
}

impl BadRanges {
    /// Returns whether no sector is bad.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the sector after the last bad one.
    pub(super) fn end(&self) -> Option<Sectors> {
        self.0.last().map(|range| Sectors(range.end))
    }

    fn add(&mut self, new: Range<u64>) {
        let mut new = new;
        self.0.retain(|old| {
            let apart = old.end < new.start || new.end < old.start;
            if !apart {
                new = old.start.min(new.start)..old.end.max(new.end);
            }
            apart
        });
        let at = self.0.partition_point(|old| old.start < new.start);
        self.0.insert(at, new);
    }

    fn remove(&mut self, gone: &Range<u64>) {
        let parts = |old: &Range<u64>| {
            [old.start..old.end.min(gone.start), old.start.max(gone.end)..old.end].into_iter()
        };
        self.0 = self.0.iter().flat_map(parts).filter(|part| !part.is_empty()).collect();
    }

    /// Returns the first bad range that overlaps with these sectors.
    fn first(&self, within: &Range<u64>) -> Option<Range<u64>> {
        let at = self.0.partition_point(|range| range.end <= within.start);
        self.0.get(at).filter(|range| range.start < within.end).cloned()
    }
}

/// The bad blocks of a device, shared by all queues.
#[derive(Debug)]
pub(super) struct BadBlocks {
    list: Mutex<BadRanges>,
    /// Incremented after each change of the list.
    epoch: AtomicU64,
    once: bool,
    pub(super) partial: bool,
}

impl BadBlocks {
    pub(super) fn new(list: BadRanges, once: bool, partial: bool) -> BadBlocks {
        BadBlocks { list: Mutex::new(list), epoch: AtomicU64::new(1), once, partial }
    }

    fn lock(&self) -> MutexGuard<'_, BadRanges> {
        self.list.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn ranges(&self) -> BadRanges {
        self.lock().clone()
    }

    /// Applies `+FIRST-LAST` (mark bad) or `-FIRST-LAST` (mark good), as null_blk's attribute does.
    pub(super) fn change(&self, text: &str, end: Sectors) -> Result<(), ParseBadError> {
        let error = || ParseBadError::new(text);
        let (sign, rest) = text.split_at_checked(1).ok_or_else(error)?;
        let range = range(rest)?;
        if range.end > end.0 {
            return Err(error());
        }
        match sign {
            "+" => self.lock().add(range),
            "-" => self.lock().remove(&range),
            _ => return Err(error()),
        }
        self.epoch.fetch_add(1, Release);
        Ok(())
    }

    /// Marks a range as good after a request has reached it, if ranges are bad only once.
    fn met(&self, range: &Range<u64>) {
        if self.once {
            self.lock().remove(range);
            self.epoch.fetch_add(1, Release);
        }
    }
}

/// A queue's copy of the bad blocks.
#[derive(Debug, Default)]
pub(super) struct KnownBad {
    list: BadRanges,
    epoch: u64,
}

impl KnownBad {
    /// Returns the first bad sector within a range.
    #[inline]
    pub(super) fn find(&mut self, shared: &BadBlocks, within: Range<u64>) -> Option<Sectors> {
        let epoch = shared.epoch.load(Acquire);
        if epoch != self.epoch {
            self.list = shared.ranges();
            self.epoch = epoch;
        }
        if self.list.is_empty() {
            return None;
        }
        let bad = self.list.first(&within)?;
        shared.met(&bad);
        Some(Sectors(bad.start.max(within.start)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_merged_and_split() {
        let bad = BadBlocks::new("8-15+0-1+2-3".parse().unwrap(), false, false);
        assert_eq!(bad.ranges().to_string(), "0-3+8-15");
        bad.change("+4-7", Sectors(100)).unwrap();
        assert_eq!(bad.ranges().to_string(), "0-15");
        bad.change("-5-6", Sectors(100)).unwrap();
        assert_eq!(bad.ranges().to_string(), "0-4+7-15");
        let mut known = KnownBad::default();
        assert_eq!(known.find(&bad, 5..7), None);
        assert_eq!(known.find(&bad, 5..9), Some(Sectors(7)));
        assert_eq!(known.find(&bad, 3..9), Some(Sectors(3)));
        for wrong in ["", "5", "+5-4", "+a-b", "*1-2", "+90-100"] {
            assert!(bad.change(wrong, Sectors(100)).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_range_that_is_bad_once_becomes_good() {
        let bad = BadBlocks::new("8-15+32-40".parse().unwrap(), true, false);
        let mut known = KnownBad::default();
        assert_eq!(known.find(&bad, 0..64), Some(Sectors(8)));
        assert_eq!(known.find(&bad, 0..64), Some(Sectors(32)));
        assert_eq!(known.find(&bad, 0..64), None);
    }
}
