//! The block status of a source and a target, merged into ranges to copy.

use block::Extent;

/// A range of the source.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Span {
    /// Offset in bytes.
    pub(super) offset: u64,
    /// Length in bytes; not 0.
    pub(super) len: u64,
    /// The source reads as zeroes here.
    pub(super) is_hole: bool,
    /// The target reads as zeroes here.
    pub(super) target_is_zero: bool,
}

/// Merges two lists of extents of `offset..offset + len`. What a list does not cover is data.
pub(super) fn spans(offset: u64, len: u64, source: &[Extent], target: &[Extent]) -> Vec<Span> {
    let (end, mut at) = (offset + len, offset);
    let mut sources = Walk { extents: source, end: offset, is_zero: false };
    let mut targets = Walk { extents: target, end: offset, is_zero: false };
    let mut merged: Vec<Span> = Vec::new();
    while at < end {
        sources.seek(at, end);
        targets.seek(at, end);
        let stop = sources.end.min(targets.end).min(end);
        let span = Span {
            offset: at,
            len: stop - at,
            is_hole: sources.is_zero,
            // Of no interest where data is written anyway.
            target_is_zero: sources.is_zero && targets.is_zero,
        };
        match merged.last_mut() {
            Some(last) if last.is_hole == span.is_hole && last.target_is_zero == span.target_is_zero => {
                last.len += span.len;
            }
            _ => merged.push(span),
        }
        at = stop;
    }
    merged
}

/// The extent at an offset.
struct Walk<'a> {
    extents: &'a [Extent],
    /// End of the current extent.
    end: u64,
    is_zero: bool,
}

impl Walk<'_> {
    fn seek(&mut self, at: u64, end: u64) {
        while self.end <= at {
            match self.extents.split_first() {
                Some((extent, rest)) => {
                    (self.extents, self.is_zero) = (rest, extent.zero);
                    self.end = self.end.saturating_add(extent.len.0);
                }
                None => (self.end, self.is_zero) = (end, false),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use block::Bytes;

    fn extent(len: u64, zero: bool) -> Extent {
        Extent { len: Bytes(len), hole: zero, zero }
    }

    fn span(offset: u64, len: u64, is_hole: bool, target_is_zero: bool) -> Span {
        Span { offset, len, is_hole, target_is_zero }
    }

    #[test]
    fn holes_are_split_where_the_target_has_data() {
        let source = [extent(100, false), extent(300, true)];
        let target = [extent(200, true), extent(100, false), extent(100, true)];
        let expected = [
            span(1000, 100, false, false),
            span(1100, 100, true, true),
            span(1200, 100, true, false),
            span(1300, 100, true, true),
        ];
        assert_eq!(spans(1000, 400, &source, &target), expected);
    }

    #[test]
    fn what_a_list_does_not_cover_is_data() {
        assert_eq!(
            spans(0, 100, &[extent(50, true)], &[]),
            [span(0, 50, true, false), span(50, 50, false, false)]
        );
        assert_eq!(spans(0, 100, &[extent(500, true)], &[extent(500, true)]), [span(0, 100, true, true)]);
    }
}
