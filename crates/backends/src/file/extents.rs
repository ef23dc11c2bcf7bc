//! Finds holes of a file with `lseek`.
//!
//! A file system without an extent list searches for the next hole page by page: on tmpfs that takes about
//! 10 ms for a file of 1 GiB without holes. So the last range of data is remembered. It can only err by
//! reporting a hole as data, which is always a correct answer. Discards and write zeroes of any of our
//! queues invalidate it.
//!
//! A range beyond the end of a truncated file is not a hole: reads there must fail (LOOP-4), so it is
//! reported as data.

use super::node::FileNode;
use crate::segments::{Records, one_extent};
use block::{Bytes, Data, Extent, Request, Segment, Status};
use queue::{Blocking, Cx, FileOp, Ring, Verdict};
use std::sync::atomic::Ordering::Acquire;

/// Minimum time, in nanoseconds, between searches for data for zero-copy reads: a search takes 10 ms per
/// GiB of data.
const SEARCH_INTERVAL_NS: u64 = 1_000_000_000;

/// The last range of data that was found, in bytes of the file.
#[derive(Clone, Copy, Debug)]
pub(super) struct KnownData {
    from: u64,
    /// End of the range, exclusive; `from` if nothing is known.
    end: u64,
    /// Value of `FileState::cleared` before the search.
    cleared: u64,
}

impl KnownData {
    pub(super) const NONE: KnownData = KnownData { from: 0, end: 0, cleared: 0 };
}

impl FileNode {
    /// Describes a range, up to the number of records that fit.
    pub(super) fn extents<R: Ring>(&mut self, req: &Request, cx: &mut Cx<'_, R>) -> Verdict {
        let facts = self.shared.facts;
        let whole = Extent { len: req.len, hole: false, zero: false };
        if facts.block_device {
            one_extent(cx, req.data, whole);
            return Verdict::Up(Status::Ok);
        }
        let mut records = Records::new(cx, req.data);
        let (mut next, end) = (facts.start.0 + req.offset.0, facts.start.0 + req.end().0);
        // Data and holes alternate: each record takes two searches, and each search makes progress.
        while next < end {
            let data = self.next_data(next, end, cx);
            let hole = Extent { len: Bytes(data - next), hole: true, zero: true };
            if !records.push(cx, hole) {
                break;
            }
            if data == end {
                break;
            }
            next = self.data_end(data, cx).clamp(data + 1, end);
            if !records.push(cx, Extent { len: Bytes(next - data), ..whole }) {
                break;
            }
        }
        records.finish(cx);
        Verdict::Up(Status::Ok)
    }

    /// Answers a read from the file's own memory, if the whole range is data: reading a hole there would
    /// allocate pages for it. Searches are slow and therefore rare; unknown ranges are copied.
    pub(super) fn lend<R: Ring>(&mut self, req: &mut Request, cx: &mut Cx<'_, R>) -> bool {
        let Some((region, looked)) = self.own else { return false };
        let (from, end) = (self.shared.facts.start.0 + req.offset.0, self.shared.facts.start.0 + req.end().0);
        let is_known = |known: &KnownData, cleared: u64| {
            known.from <= from && end <= known.end && known.cleared == cleared
        };
        let cleared = self.shared.cleared.load(Acquire);
        if !is_known(&self.known, cleared) {
            if cx.now().since(looked) < SEARCH_INTERVAL_NS {
                return false;
            }
            self.own = Some((region, cx.now()));
            if self.next_data(from, end, cx) != from {
                return false;
            }
            self.data_end(from, cx);
            if !is_known(&self.known, cleared) {
                return false;
            }
        }
        req.data = Data::One(Segment { offset: from, len: req.len.0 as u32, region });
        true
    }

    /// Returns the start of the next data from `from` on, or `end` if there is none before it.
    fn next_data<R: Ring>(&mut self, from: u64, end: u64, cx: &mut Cx<'_, R>) -> u64 {
        let known = self.known;
        if (known.from..known.end).contains(&from) && known.cleared == self.shared.cleared.load(Acquire) {
            return from;
        }
        match self.seek(from, false, cx) {
            Some(at) if at >= 0 => (at as u64).clamp(from, end),
            // The range follows the last data, so it is a hole, if the file still extends that far.
            Some(errno) if errno == -i64::from(libc::ENXIO) && self.reaches(end, cx) => end,
            // Without file system support the range counts as data.
            _ => from,
        }
    }

    /// Returns whether the file extends to `end`.
    fn reaches<R: Ring>(&self, end: u64, cx: &mut Cx<'_, R>) -> bool {
        self.seek(end.saturating_sub(1), true, cx) != Some(-i64::from(libc::ENXIO))
    }

    /// Returns the end of the data at `from`.
    fn data_end<R: Ring>(&mut self, from: u64, cx: &mut Cx<'_, R>) -> u64 {
        let cleared = self.shared.cleared.load(Acquire);
        if (self.known.from..self.known.end).contains(&from) && self.known.cleared == cleared {
            return self.known.end;
        }
        let end = match self.seek(from, true, cx) {
            Some(at) if at as u64 > from && at > 0 => at as u64,
            // The file was truncated, or the data cleared since it was found; the result is not remembered,
            // because that may change again.
            Some(at) if at >= 0 || at == -i64::from(libc::ENXIO) => return u64::MAX,
            _ => u64::MAX,
        };
        self.known = KnownData { from, end, cleared };
        end
    }

    fn seek<R: Ring>(&self, offset: u64, hole: bool, cx: &mut Cx<'_, R>) -> Option<i64> {
        let op = FileOp::Seek { offset, hole };
        cx.try_now(self.file, op, block::Data::NONE, 0, Blocking::Allowed)
    }
}
