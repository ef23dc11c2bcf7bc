//! Tracks which bytes of a read have arrived if a server sends it in chunks: each byte may arrive only
//! once.
//!
//! Servers send the chunks of a read in order, although the protocol does not require it. So each read only
//! has the end of its highest chunk, and skipped ranges are gaps in one short list per connection.
//!
//! *Invariant:* a byte below `high` has either arrived or is in a gap.

use proto::nbd::Fatal;

/// Progress of a read.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub(super) struct Coverage {
    /// End of the highest chunk so far, in bytes of the export.
    high: u64,
}

impl Coverage {
    /// Creates the progress of a read that starts at `offset`.
    pub(super) const fn new(offset: u64) -> Coverage {
        Coverage { high: offset }
    }
}

/// Maximum number of gaps of a connection. A server that causes more sends chunks in no sensible order.
const GAPS_MAX: usize = 1024;

/// A skipped range: the read, its first byte, and its end.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Gap {
    cookie: u64,
    start: u64,
    end: u64,
}

/// The gaps of one connection.
#[derive(Default, Debug)]
pub(super) struct Gaps {
    list: Vec<Gap>,
}

impl Gaps {
    /// Records a chunk of the read `cookie` within its range.
    ///
    /// # Errors
    /// A part of the chunk had arrived before, or there are too many gaps.
    pub(super) fn fill(
        &mut self,
        cookie: u64,
        coverage: &mut Coverage,
        offset: u64,
        len: u64,
    ) -> Result<(), Fatal> {
        let end = offset + len;
        if offset >= coverage.high {
            if offset > coverage.high {
                self.push(Gap { cookie, start: coverage.high, end: offset })?;
            }
            coverage.high = end;
            return Ok(());
        }
        let holds = |gap: &Gap| gap.cookie == cookie && gap.start <= offset && end <= gap.end;
        let Some(index) = self.list.iter().position(holds) else {
            return Err(Fatal::ReplyMismatch { why: "two chunks overlap" });
        };
        let gap = self.list.swap_remove(index);
        if gap.start < offset {
            self.push(Gap { end: offset, ..gap })?;
        }
        if end < gap.end {
            self.push(Gap { start: end, ..gap })?;
        }
        Ok(())
    }

    fn push(&mut self, gap: Gap) -> Result<(), Fatal> {
        if self.list.len() == GAPS_MAX {
            return Err(Fatal::ReplyMismatch { why: "chunks come in too many pieces" });
        }
        self.list.push(gap);
        Ok(())
    }

    /// Removes the gaps of the read `cookie`, which failed.
    pub(super) fn forget(&mut self, cookie: u64) {
        if !self.list.is_empty() {
            self.list.retain(|gap| gap.cookie != cookie);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_in_any_order_complete_a_read_once() {
        for order in [[0, 1, 2, 3], [3, 2, 1, 0], [1, 3, 0, 2], [2, 0, 3, 1]] {
            let (mut gaps, mut coverage) = (Gaps::default(), Coverage::new(4096));
            for &chunk in &order {
                gaps.fill(9, &mut coverage, 4096 + chunk * 512, 512).unwrap();
            }
            assert!(gaps.list.is_empty(), "{order:?}");
            for chunk in 0..4 {
                assert!(
                    gaps.fill(9, &mut coverage, 4096 + chunk * 512, 1).is_err(),
                    "{order:?}: {chunk} again"
                );
            }
        }
    }

    #[test]
    fn overlaps_are_noticed_at_either_end_of_a_gap() {
        let (mut gaps, mut coverage) = (Gaps::default(), Coverage::new(0));
        gaps.fill(1, &mut coverage, 0, 100).unwrap();
        gaps.fill(1, &mut coverage, 300, 100).unwrap();
        for (offset, len) in [(50, 100), (250, 100), (99, 2), (299, 2), (100, 201), (399, 1)] {
            assert!(gaps.fill(1, &mut coverage, offset, len).is_err(), "{offset}+{len}");
        }
        gaps.fill(1, &mut coverage, 150, 50).unwrap();
        assert!(gaps.fill(2, &mut Coverage { high: 400 }, 100, 50).is_err(), "the gap of another read");
        gaps.fill(1, &mut coverage, 100, 50).unwrap();
        gaps.fill(1, &mut coverage, 200, 100).unwrap();
        assert!(gaps.list.is_empty());
    }

    #[test]
    fn gaps_are_bounded_and_removed_with_their_read() {
        let (mut gaps, mut coverage) = (Gaps::default(), Coverage::new(0));
        let refused = (0..2000u64).find(|chunk| gaps.fill(1, &mut coverage, chunk * 2 + 1, 1).is_err());
        assert_eq!(refused, Some(GAPS_MAX as u64));
        gaps.forget(1);
        assert!(gaps.list.is_empty());
    }
}
