//! A layer that panics at requests beyond queue limits: it is below a layer that enforces them.

use block::{Cookie, Op, QueueLimits, Request};
use queue::{Cx, Node, NodeId, Ring, Verdict};

/// Panics at the first request that is too large for `limits`, counted its own way.
pub(super) struct Within {
    child: NodeId,
    limits: QueueLimits,
}

impl Within {
    pub(super) fn new(child: NodeId, limits: QueueLimits) -> Within {
        Within { child, limits }
    }

    fn check<R: Ring>(&self, req: &Request, cx: &Cx<'_, R>) {
        let limits = &self.limits;
        let most = match req.op {
            Op::Read | Op::Write => limits.max_sectors.bytes().0,
            // A discard cannot be split below its granularity. A smaller limit is not enforced, as in the
            // kernel.
            Op::Discard => limits.max_discard_sectors.bytes().align_down(limits.discard_granularity.0).0,
            Op::WriteZeroes => limits.max_write_zeroes_sectors.bytes().0,
            Op::ZoneAppend => limits.max_zone_append_sectors.bytes().0,
            _ => 0,
        };
        assert!(most == 0 || req.len.0 <= most, "{req:?} is longer than {most}");
        if !req.op.moves_data() {
            return;
        }
        let chunk = limits.chunk_sectors.bytes().0;
        let place = req.offset.0.checked_rem(chunk).unwrap_or(0);
        assert!(chunk == 0 || place + req.len.0 <= chunk, "{req:?} crosses a chunk of {chunk}");
        let (mut count, mut last_end) = (0, None);
        for segment in cx.segments(req.data, req.len.0) {
            let (start, end) = (segment.offset, segment.offset + u64::from(segment.len));
            let gap = last_end.is_some_and(|last: u64| (last | start) & limits.virt_boundary_mask != 0);
            assert!(!gap, "{req:?} has a gap");
            last_end = Some(end);
            // Counts segments block by block, independently of the layer under test.
            let (mut at, mut left) = (start, limits.max_segment_size.0);
            count += 1;
            while at < end {
                let boundary = (at | limits.seg_boundary_mask) + 1;
                let step = (end - at).min(left).min(boundary - at);
                at += step;
                left -= step;
                if at < end && (left == 0 || at == boundary) {
                    count += 1;
                    left = limits.max_segment_size.0;
                }
            }
        }
        assert!(count <= limits.max_segments, "{req:?} has {count} segments, {} fit", limits.max_segments);
    }
}

impl<R: Ring> Node<R> for Within {
    fn submit(&mut self, _: Cookie, req: &mut Request, cx: &mut Cx<'_, R>) -> Verdict {
        self.check(req, cx);
        Verdict::Down(self.child)
    }
}
