//! Inline reads and writes that the ring batches: see [`Ring::try_batched`].

use super::node::{FileNode, Phase};
use block::{Cookie, Op, Request};
use queue::{Blocking, Cx, FileOp, Nanos, Ring, Verdict};

impl FileNode {
    /// Returns whether an inline read or write may block; `None`: it is started on the ring.
    pub(super) fn blocking(&self, op: FileOp, now: Nanos) -> Option<Blocking> {
        let facts = &self.shared.facts;
        match op {
            _ if facts.memory => Some(Blocking::Allowed),
            _ if facts.direct.is_some() => None,
            FileOp::Read { .. } => facts.nowait_reads.then_some(Blocking::Never),
            FileOp::Write { durable: true, .. } => None,
            _ if facts.nowait_writes => Some(Blocking::Never),
            _ => self.is_timed(op, now).then_some(Blocking::Allowed),
        }
    }

    /// Returns whether an operation is a write to the page cache that may block, as the last ones were fast.
    pub(super) fn is_timed(&self, op: FileOp, now: Nanos) -> bool {
        let facts = &self.shared.facts;
        matches!(op, FileOp::Write { durable: false, .. }) && facts.timed_writes && self.pace.is_fast(now)
    }

    /// Processes the result of a batched read or write.
    pub(super) fn batch_moved<R: Ring>(
        &mut self,
        io: Cookie,
        req: &Request,
        result: i64,
        cx: &mut Cx<'_, R>,
    ) -> Verdict {
        let facts = &self.shared.facts;
        let now = cx.now();
        // Of the writes of one batch, only the first is counted.
        if req.op == Op::Write && !facts.memory && !facts.nowait_writes && self.pace.is_fast(now) {
            self.pace.took(now, cx.batch_ns());
        }
        if result == -i64::from(libc::EAGAIN) {
            // It would have to wait: start it on the ring.
            let op = self.op(io, req);
            return self.start(io, Phase::Move, op, req.data, req.len.0, cx);
        }
        match self.moved(io, req, result, cx) {
            Some(verdict) => verdict,
            None => self.transfer(io, req, cx),
        }
    }
}
