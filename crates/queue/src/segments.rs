//! Iterating over the memory segments of a request.

use block::{Data, Segment};

/// Iterates over the segments of some [`Data`], cut to a length.
#[derive(Clone)]
pub struct Segments<'a> {
    first: Option<Segment>,
    rest: &'a [Segment],
    skip: u32,
    left: u64,
}

impl<'a> Segments<'a> {
    /// Iterates over the first `len` bytes of `data`, whose runs are in `table`.
    pub fn new(table: &'a [Segment], data: Data, len: u64) -> Segments<'a> {
        match data {
            Data::One(segment) => Segments { first: Some(segment), rest: &[], skip: 0, left: len },
            Data::Run { start, count, skip } => {
                let run = &table[start as usize..start as usize + usize::from(count)];
                Segments { first: None, rest: run, skip, left: len }
            }
        }
    }
}

impl Iterator for Segments<'_> {
    type Item = Segment;

    fn next(&mut self) -> Option<Segment> {
        if self.left == 0 {
            return None;
        }
        let whole = match self.first.take() {
            Some(segment) => segment,
            None => {
                let (&first, rest) = self.rest.split_first()?;
                self.rest = rest;
                first.slice(self.skip, first.len - self.skip)
            }
        };
        self.skip = 0;
        let len = self.left.min(u64::from(whole.len)) as u32;
        self.left -= u64::from(len);
        Some(whole.slice(0, len))
    }
}

/// Returns the part of `data` behind its first `skip_bytes` bytes.
pub(crate) fn advance(table: &[Segment], data: Data, mut skip_bytes: u64) -> Data {
    match data {
        Data::One(segment) => {
            let skip = skip_bytes.min(u64::from(segment.len)) as u32;
            Data::One(segment.slice(skip, segment.len - skip))
        }
        Data::Run { mut start, mut count, skip } => {
            skip_bytes += u64::from(skip);
            while count > 1 && skip_bytes >= u64::from(table[start as usize].len) {
                skip_bytes -= u64::from(table[start as usize].len);
                start += 1;
                count -= 1;
            }
            Data::Run { start, count, skip: skip_bytes as u32 }
        }
    }
}

/// Most segments of one file operation. The kernel's limit, `IOV_MAX`, is 1024.
pub(crate) const LIST_MAX: usize = 64;

/// A short list of segments on the stack.
pub(crate) struct SegmentList {
    segments: [Segment; LIST_MAX],
    count: usize,
}

impl SegmentList {
    /// Collects the first [`LIST_MAX`] segments. If there are more, the operation is short, and the node
    /// continues from there.
    pub(crate) fn gather(from: Segments<'_>) -> SegmentList {
        let mut list = SegmentList { segments: [Segment::EMPTY; LIST_MAX], count: 0 };
        for (slot, segment) in list.segments.iter_mut().zip(from) {
            *slot = segment;
            list.count += 1;
        }
        list
    }

    pub(crate) fn as_slice(&self) -> &[Segment] {
        &self.segments[..self.count]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use block::Region;

    fn piece(offset: u64, len: u32) -> Segment {
        Segment { offset, len, region: Region(1) }
    }

    #[test]
    fn a_run_is_cut_at_both_ends() {
        let table = [piece(0, 100), piece(1000, 50), piece(2000, 10)];
        let run = Data::Run { start: 0, count: 3, skip: 90 };
        let got: Vec<_> = Segments::new(&table, run, 65).collect();
        assert_eq!(got, [piece(90, 10), piece(1000, 50), piece(2000, 5)]);
    }

    #[test]
    fn advancing_passes_over_whole_entries() {
        let table = [piece(0, 100), piece(1000, 50), piece(2000, 10)];
        let run = Data::Run { start: 0, count: 3, skip: 10 };
        assert_eq!(advance(&table, run, 89), Data::Run { start: 0, count: 3, skip: 99 });
        assert_eq!(advance(&table, run, 90), Data::Run { start: 1, count: 2, skip: 0 });
        assert_eq!(advance(&table, run, 145), Data::Run { start: 2, count: 1, skip: 5 });
        assert_eq!(advance(&table, Data::One(piece(5, 20)), 7), Data::One(piece(12, 13)));
    }
}
