//! Flushes: the data, then the table, then the table onto stable storage. One sync at a time for all queues.
//!
//! A sync takes the bits that are live when it begins, flushes the store so that the data of all of these
//! chunks is on stable storage, writes the table pages with exactly these bits, and flushes again. Pages may
//! reach the disk in any order and in part: each bit is valid independently of the others, and bits are never
//! cleared, so a torn page only names fewer chunks.

use super::format::{PAGE_LEN, TABLE_AT};
use super::{Cow, Phase, RETRY_NS_MIN, State};
use block::{Bytes, Cookie, Data, Op, Request, Status};
use queue::{Cx, Ring, Verdict};
use std::ops::Range;

/// Pages of the table in one write.
const PAGES_MAX: u64 = 16;

/// The stage of a sync.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Stage {
    /// Waits for another request's sync, or for a spare child request.
    Waiting,
    /// Flushes the data in the store. `true`: the table has to be written after that.
    Data(bool),
    /// Writes pages of the table; the value is the next page.
    Pages(u64),
    /// Flushes the table.
    Table,
}

impl Cow {
    pub(super) fn flush<R: Ring>(&mut self, io: Cookie, req: &Request, cx: &mut Cx<'_, R>) -> Verdict {
        let ticket = self.index.syncs.ticket();
        *self.state(io) = State { ticket, ..State::NEW };
        self.sync(io, req, cx)
    }

    /// Syncs, unless another request's sync covers this one or is running.
    pub(super) fn sync<R: Ring>(&mut self, io: Cookie, req: &Request, cx: &mut Cx<'_, R>) -> Verdict {
        let ticket = self.state(io).ticket;
        if self.index.syncs.is_served(ticket) {
            return self.sync_ended(io, req, cx);
        }
        if cx.spare_children() == 0 || !self.index.syncs.begin() {
            return self.wait_for_others(io, Phase::Sync(Stage::Waiting), cx);
        }
        self.state(io).retry_ns = RETRY_NS_MIN;
        let stage = Stage::Data(self.index.begin_sync());
        self.start_stage(io, stage, Request::flush(), cx)
    }

    fn sync_ended<R: Ring>(&mut self, io: Cookie, req: &Request, cx: &mut Cx<'_, R>) -> Verdict {
        let state = self.state(io);
        if !std::mem::take(&mut state.continues) {
            return Verdict::Up(Status::Ok);
        }
        state.retry_ns = RETRY_NS_MIN;
        self.step(io, req, cx)
    }

    fn start_stage<R: Ring>(
        &mut self,
        io: Cookie,
        stage: Stage,
        req: Request,
        cx: &mut Cx<'_, R>,
    ) -> Verdict {
        self.state(io).phase = Phase::Sync(stage);
        if cx.spare_children() == 0 {
            return self.wait_for_others(io, Phase::Sync(stage), cx);
        }
        self.spawn(io, self.store, req, cx);
        Verdict::Held
    }

    /// Continues a held sync.
    pub(super) fn continue_sync<R: Ring>(
        &mut self,
        io: Cookie,
        req: &Request,
        stage: Stage,
        cx: &mut Cx<'_, R>,
    ) -> Verdict {
        match stage {
            Stage::Waiting => self.sync(io, req, cx),
            Stage::Pages(next) => self.write_pages(io, next, cx),
            Stage::Data(_) | Stage::Table => self.start_stage(io, stage, Request::flush(), cx),
        }
    }

    /// Handles the completion of a stage.
    pub(super) fn stage_done<R: Ring>(
        &mut self,
        io: Cookie,
        req: &Request,
        stage: Stage,
        cx: &mut Cx<'_, R>,
    ) -> Verdict {
        self.free(io, cx);
        let status = self.state(io).status;
        if !status.is_ok() {
            // Only the store knows whether a failed flush lost data; if so, the store stays failed.
            self.index.table.put_back();
            self.index.syncs.abandon();
            self.index.waiting.wake(self.held.waiter());
            return Verdict::Up(status);
        }
        match stage {
            Stage::Data(true) => self.write_pages(io, 0, cx),
            Stage::Pages(next) => self.write_pages(io, next, cx),
            Stage::Data(false) | Stage::Table | Stage::Waiting => {
                self.index.end_sync();
                self.index.syncs.succeed();
                self.index.waiting.wake(self.held.waiter());
                self.sync_ended(io, req, cx)
            }
        }
    }

    /// Writes the pages of the table that are due, from page `first` on.
    fn write_pages<R: Ring>(&mut self, io: Cookie, first: u64, cx: &mut Cx<'_, R>) -> Verdict {
        let Some(pages) = self.index.table.next(first, PAGES_MAX) else {
            return self.start_stage(io, Stage::Table, Request::flush(), cx);
        };
        let Some(write) = self.page_write(io, pages.clone(), cx) else {
            let phase = Phase::Sync(Stage::Pages(first));
            return match cx.spare_children() {
                0 => self.wait_for_others(io, phase, cx),
                _ => self.wait_for_memory(io, phase, cx),
            };
        };
        self.start_stage(io, Stage::Pages(pages.end), write, cx)
    }

    /// Returns the write of some pages of the table from a new buffer. `None`: there is no memory or no spare
    /// child request.
    fn page_write<R: Ring>(&mut self, io: Cookie, pages: Range<u64>, cx: &mut Cx<'_, R>) -> Option<Request> {
        let len = ((pages.end - pages.start) * PAGE_LEN) as u32;
        let buffer = if cx.spare_children() > 0 { cx.ring.allocate(len)? } else { return None };
        for (page, bytes) in pages.clone().zip(cx.ring.bytes_mut(buffer).chunks_mut(PAGE_LEN as usize)) {
            self.index.page(page, bytes);
        }
        self.state(io).buffer = buffer;
        let mut write = Request::new(Op::Write, Bytes(TABLE_AT + pages.start * PAGE_LEN), Bytes(len.into()));
        write.data = Data::One(buffer);
        Some(write)
    }
}
