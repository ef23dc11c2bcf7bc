//! Which parts of a file are holes, found with `lseek`.

use super::node::FileNode;
use crate::pieces::{Records, one_extent};
use block::{Bytes, Extent, Request, Status};
use queue::{Cx, FileOp, Patience, Ring, Verdict};

impl FileNode {
    /// Describe the range, as far as its records fit.
    pub(super) fn extents<R: Ring>(&mut self, req: &Request, cx: &mut Cx<'_, R>) -> Verdict {
        let facts = self.shared.facts;
        let whole = Extent { len: req.len, hole: false, zero: false };
        if facts.block_device {
            one_extent(cx, req.data, whole);
            return Verdict::Up(Status::Ok);
        }
        let mut records = Records::new(cx, req.data);
        let (mut next, end) = (facts.start.0 + req.offset.0, facts.start.0 + req.end().0);
        // Every other answer is a hole: two looks a record, and none can be repeated without an advance.
        while next < end {
            let data = self.seek(next, end, false, cx);
            let hole = Extent { len: Bytes(data - next), hole: true, zero: true };
            if !records.push(cx, hole) {
                break;
            }
            if data == end {
                break;
            }
            next = self.seek(data, end, true, cx).max(data + 1);
            if !records.push(cx, Extent { len: Bytes(next - data), ..whole }) {
                break;
            }
        }
        records.finish(cx);
        Verdict::Up(Status::Ok)
    }

    /// The next hole or data from `from` on, at most `end`. A file system that cannot tell has data there.
    fn seek<R: Ring>(&self, from: u64, end: u64, hole: bool, cx: &mut Cx<'_, R>) -> u64 {
        let op = FileOp::Seek { offset: from, hole };
        match cx.try_now(self.file, op, block::Data::NONE, 0, Patience::Unbounded) {
            Some(at) if at >= 0 => (at as u64).clamp(from, end),
            // Past the last data: nothing but a hole.
            Some(errno) if errno == -i64::from(libc::ENXIO) && !hole => end,
            _ if hole => end,
            _ => from,
        }
    }
}
