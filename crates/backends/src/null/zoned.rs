//! A zoned `null:` in one hardware queue: checks requests against the rules of [`Zones`], then passes them to
//! the backend for data.
//!
//! *Invariant:* the thread that changes a zone's state also stores the data or clears the memory for it.

use super::Content;
use super::zones::{Reset, ZoneWrite, Zones};
use crate::segments::{capacity, fill_zeroes, store};
use block::{Cookie, Op, Request, Status, Zone};
use queue::{Cx, NodeId, Ring, Verdict};
use std::sync::Arc;

/// State of a held request: what it waits for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Stage {
    /// It waits for the backend with the data.
    Content,
    /// It waits for the memory of this zone to be cleared.
    Clearing(usize),
    /// It waits for the next turn, to reset the zones from this one on.
    Next(usize),
}

#[derive(Debug)]
pub(super) struct ZonedNode {
    zones: Arc<Zones>,
    content: Content,
    /// Whether data is stored, so that a reset has to clear memory.
    keeps: bool,
    /// State of held requests, by tag.
    stages: Box<[Stage]>,
}

impl ZonedNode {
    pub(super) fn new(zones: Arc<Zones>, content: Content) -> ZonedNode {
        let keeps = matches!(content, Content::Kept(_));
        ZonedNode { zones, content, keeps, stages: Box::default() }
    }

    pub(super) fn attach<R: Ring>(&mut self, id: NodeId, tags: usize) {
        self.stages = vec![Stage::Content; tags].into();
        self.content.attach::<R>(id, tags);
    }

    pub(super) fn submit<R: Ring>(&mut self, io: Cookie, req: &mut Request, cx: &mut Cx<'_, R>) -> Verdict {
        self.stages[io.tag.index()] = Stage::Content;
        match req.op {
            Op::Write | Op::ZoneAppend => self.write(io, req, cx),
            Op::Read if !self.zones.readable(req.offset, req.len) => Verdict::Up(Status::IoError),
            Op::Discard | Op::WriteZeroes => Verdict::Up(Status::NotSupported),
            Op::ReportZones => self.report(req, cx),
            Op::ZoneOpen | Op::ZoneClose | Op::ZoneFinish => self.zones.manage(req.op, req.offset),
            Op::ZoneReset => self.reset(io, self.zones.index_of(req.offset), cx),
            Op::ZoneResetAll => self.reset_from(io, 0, cx),
            Op::ReadTuples | Op::WriteTuples | Op::CompareAndWrite => Verdict::Up(Status::NotSupported),
            Op::Read | Op::Flush | Op::Prefetch | Op::Extents => self.content.submit(io, req, cx),
        }
    }

    /// Executes a write or append. They complete within submission, because neither backend holds one.
    fn write<R: Ring>(&mut self, io: Cookie, req: &mut Request, cx: &mut Cx<'_, R>) -> Verdict {
        let append = req.op == Op::ZoneAppend;
        let at = match self.zones.take(req.offset, req.len, append, self.keeps) {
            ZoneWrite::At(at) => at,
            ZoneWrite::No(verdict) => return verdict,
        };
        let mut stored = Request { op: Op::Write, offset: at, ..*req };
        let verdict = self.content.submit(io, &mut stored, cx);
        if self.keeps {
            self.zones.copied(at);
        }
        // For an append this is the result; for a write the offset is unchanged.
        req.offset = at;
        verdict
    }

    fn report<R: Ring>(&self, req: &Request, cx: &mut Cx<'_, R>) -> Verdict {
        let room = capacity(cx, req.data);
        let mut filled = 0;
        let mut index = self.zones.index_of(req.offset);
        let count = self.zones.count().0;
        while index < count
            && self.zones.range(index).0 < req.end()
            && room - filled >= Zone::RECORD_LEN as u64
        {
            store(cx, req.data, filled, &self.zones.report(index).to_record());
            filled += Zone::RECORD_LEN as u64;
            index += 1;
        }
        fill_zeroes(cx, req.data, filled, room - filled);
        Verdict::Up(Status::Ok)
    }

    fn reset<R: Ring>(&mut self, io: Cookie, index: usize, cx: &mut Cx<'_, R>) -> Verdict {
        match self.zones.reset(index, self.keeps) {
            Reset::Over(status) => Verdict::Up(status),
            Reset::Busy => Verdict::Busy,
            Reset::Clear => self.clear(io, index, cx),
        }
    }

    /// Starts to clear a zone's memory. The RAM disk either completes or holds the request.
    fn clear<R: Ring>(&mut self, io: Cookie, index: usize, cx: &mut Cx<'_, R>) -> Verdict {
        self.stages[io.tag.index()] = Stage::Clearing(index);
        let mut req = self.clearing(index);
        let verdict = self.content.submit(io, &mut req, cx);
        self.clear_on(io, index, verdict)
    }

    /// Returns the request that clears a zone's memory.
    fn clearing(&self, index: usize) -> Request {
        let (start, len) = self.zones.range(index);
        Request::new(Op::Discard, start, len)
    }

    /// Processes the verdict on clearing a zone.
    fn clear_on(&mut self, io: Cookie, index: usize, verdict: Verdict) -> Verdict {
        if let Verdict::Up(_) = verdict {
            self.stages[io.tag.index()] = Stage::Content;
            self.zones.cleared(index);
        }
        verdict
    }

    /// Resets the zones from `index` on, as far as possible in this turn. Skips zones that cannot be reset.
    fn reset_from<R: Ring>(&mut self, io: Cookie, index: usize, cx: &mut Cx<'_, R>) -> Verdict {
        let (count, conventional) = self.zones.count();
        for index in index.max(conventional)..count {
            match self.zones.reset(index, self.keeps) {
                Reset::Over(_) => {}
                Reset::Busy => return Verdict::Busy,
                Reset::Clear => {
                    let Verdict::Up(_) = self.clear(io, index, cx) else { return Verdict::Held };
                    // Clearing takes time, so other requests get a turn between two zones.
                    self.stages[io.tag.index()] = Stage::Next(index + 1);
                    cx.timer(io, cx.now());
                    return Verdict::Held;
                }
            }
        }
        Verdict::Up(Status::Ok)
    }

    pub(super) fn reap<R: Ring>(
        &mut self,
        io: Cookie,
        req: &mut Request,
        result: i64,
        cx: &mut Cx<'_, R>,
    ) -> Verdict {
        match self.stages[io.tag.index()] {
            Stage::Content => self.content.reap(io, req, result, cx),
            Stage::Next(index) => self.reset_from(io, index, cx),
            Stage::Clearing(index) => {
                let mut clearing = self.clearing(index);
                let verdict = self.content.reap(io, &mut clearing, result, cx);
                match (self.clear_on(io, index, verdict), req.op) {
                    (Verdict::Up(_), Op::ZoneResetAll) => self.reset_from(io, index + 1, cx),
                    (verdict, _) => verdict,
                }
            }
        }
    }
}
