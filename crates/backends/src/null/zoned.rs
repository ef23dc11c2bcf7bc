//! A zoned `null:` as one hardware queue sees it: every request is held to the rules of [`Zones`], then goes
//! to what keeps data or does not.
//!
//! *Invariant:* data is stored, and memory cleared, by the same thread that changed the zone's state for it.

use super::Content;
use super::zones::{Place, Reset, Zones};
use crate::pieces::{capacity, fill_zeroes, store};
use block::{Cookie, Op, Request, Status, Zone};
use queue::{Cx, NodeId, Ring, Verdict};
use std::sync::Arc;

/// What a request that is held here waits for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Stage {
    /// Nothing of ours: what it stands for is the content's matter.
    Content,
    /// This zone's memory to be cleared.
    Clearing(usize),
    /// A turn, before the zones from this one on are looked at.
    Next(usize),
}

#[derive(Debug)]
pub(super) struct ZonedNode {
    zones: Arc<Zones>,
    content: Content,
    /// Data is kept, so that a reset has something to clear.
    keeps: bool,
    /// By tag.
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
            Op::ReadTuples | Op::WriteTuples => Verdict::Up(Status::NotSupported),
            Op::Read | Op::Flush | Op::Prefetch | Op::Extents => self.content.submit(io, req, cx),
        }
    }

    /// Writes and appends end within their submission: neither content holds one.
    fn write<R: Ring>(&mut self, io: Cookie, req: &mut Request, cx: &mut Cx<'_, R>) -> Verdict {
        let append = req.op == Op::ZoneAppend;
        let at = match self.zones.take(req.offset, req.len, append, self.keeps) {
            Place::At(at) => at,
            Place::No(verdict) => return verdict,
        };
        let mut stored = Request { op: Op::Write, offset: at, ..*req };
        let verdict = self.content.submit(io, &mut stored, cx);
        if self.keeps {
            self.zones.copied(at);
        }
        // For an append this is the answer; a write goes where it said.
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

    /// Start to clear a zone's memory. The RAM disk either does it or holds it.
    fn clear<R: Ring>(&mut self, io: Cookie, index: usize, cx: &mut Cx<'_, R>) -> Verdict {
        self.stages[io.tag.index()] = Stage::Clearing(index);
        let mut req = self.clearing(index);
        let verdict = self.content.submit(io, &mut req, cx);
        self.clear_on(io, index, verdict)
    }

    /// The request that clears a zone's memory.
    fn clearing(&self, index: usize) -> Request {
        let (start, len) = self.zones.range(index);
        Request::new(Op::Discard, start, len)
    }

    /// What the content says about clearing a zone.
    fn clear_on(&mut self, io: Cookie, index: usize, verdict: Verdict) -> Verdict {
        if let Verdict::Up(_) = verdict {
            self.stages[io.tag.index()] = Stage::Content;
            self.zones.cleared(index);
        }
        verdict
    }

    /// Reset the zones from `index` on, as far as that goes this turn. One that cannot be reset is left
    /// alone, and no error.
    fn reset_from<R: Ring>(&mut self, io: Cookie, index: usize, cx: &mut Cx<'_, R>) -> Verdict {
        let (count, conventional) = self.zones.count();
        for index in index.max(conventional)..count {
            match self.zones.reset(index, self.keeps) {
                Reset::Over(_) => {}
                Reset::Busy => return Verdict::Busy,
                Reset::Clear => {
                    let Verdict::Up(_) = self.clear(io, index, cx) else { return Verdict::Held };
                    // Clearing takes time: others have their turn between two zones.
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
