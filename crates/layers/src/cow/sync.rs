//! Flushes: the data, then the table, then the table onto stable storage. One at a time for all queues.
//!
//! A sync takes over the bits that are live when it begins, flushes the store, so that the data of all of them
//! is on stable storage, writes the pages of the table with those bits and no others, and flushes again. Pages
//! may reach the disk in any order and in part: each bit only says that a chunk is there which is, and bits are
//! never cleared, so a page of which some sectors are old names fewer chunks, and none wrongly.

use super::format::{PAGE_LEN, TABLE_AT};
use super::{Cow, LOOK_NS_MIN, Phase, Slot};
use block::{Bytes, Cookie, Data, Op, Request, Status};
use queue::{Cx, Ring, Verdict};
use std::ops::Range;

/// Pages of the table that are written at once.
const PAGES_MAX: u64 = 16;

/// How far a sync is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Stage {
    /// Another request's sync is under way, or no child request is spare.
    Await,
    /// The store is flushed; whether the table has to be written after that.
    Data(bool),
    /// Pages of the table are written; which comes next.
    Pages(u64),
    /// The store is flushed again.
    Table,
}

impl Cow {
    pub(super) fn flush<R: Ring>(&mut self, io: Cookie, req: &Request, cx: &mut Cx<'_, R>) -> Verdict {
        let promise = self.index.syncs.promise();
        *self.slot(io) = Slot { promise, ..Slot::NEW };
        self.sync(io, req, cx)
    }

    /// Sync, unless another request's sync has done it or is under way.
    pub(super) fn sync<R: Ring>(&mut self, io: Cookie, req: &Request, cx: &mut Cx<'_, R>) -> Verdict {
        let promise = self.slot(io).promise;
        if self.index.syncs.is_kept(promise) {
            return self.sync_ended(io, req, cx);
        }
        if cx.spare_children() == 0 || !self.index.syncs.begin() {
            return self.wait(io, Phase::Sync(Stage::Await), cx);
        }
        self.slot(io).look_ns = LOOK_NS_MIN;
        let stage = Stage::Data(self.index.take());
        self.start_stage(io, stage, Request::flush(), cx)
    }

    fn sync_ended<R: Ring>(&mut self, io: Cookie, req: &Request, cx: &mut Cx<'_, R>) -> Verdict {
        let slot = self.slot(io);
        if !std::mem::take(&mut slot.goes_on) {
            return Verdict::Up(Status::Ok);
        }
        slot.look_ns = LOOK_NS_MIN;
        self.step(io, req, cx)
    }

    fn start_stage<R: Ring>(
        &mut self,
        io: Cookie,
        stage: Stage,
        req: Request,
        cx: &mut Cx<'_, R>,
    ) -> Verdict {
        self.slot(io).phase = Phase::Sync(stage);
        if cx.spare_children() == 0 {
            return self.wait(io, Phase::Sync(stage), cx);
        }
        self.spawn(io, self.store, req, cx);
        Verdict::Held
    }

    /// What a sync waited for may be there now.
    pub(super) fn go_on_syncing<R: Ring>(
        &mut self,
        io: Cookie,
        req: &Request,
        stage: Stage,
        cx: &mut Cx<'_, R>,
    ) -> Verdict {
        match stage {
            Stage::Await => self.sync(io, req, cx),
            Stage::Pages(next) => self.write_pages(io, next, cx),
            Stage::Data(_) | Stage::Table => self.start_stage(io, stage, Request::flush(), cx),
        }
    }

    /// A stage is over.
    pub(super) fn synced<R: Ring>(
        &mut self,
        io: Cookie,
        req: &Request,
        stage: Stage,
        cx: &mut Cx<'_, R>,
    ) -> Verdict {
        self.free(io, cx);
        let status = self.slot(io).status;
        if !status.is_ok() {
            // Whether what a flush lost can be had again is for the store to say: it stays failed if not.
            self.index.table.put_back();
            self.index.syncs.withdraw();
            return Verdict::Up(status);
        }
        match stage {
            Stage::Data(true) => self.write_pages(io, 0, cx),
            Stage::Pages(next) => self.write_pages(io, next, cx),
            Stage::Data(false) | Stage::Table | Stage::Await => {
                self.index.store_taken();
                self.index.syncs.end();
                self.sync_ended(io, req, cx)
            }
        }
    }

    /// Write what is due of the table from page `first` on.
    fn write_pages<R: Ring>(&mut self, io: Cookie, first: u64, cx: &mut Cx<'_, R>) -> Verdict {
        let Some(pages) = self.index.table.next(first, PAGES_MAX) else {
            return self.start_stage(io, Stage::Table, Request::flush(), cx);
        };
        let Some(write) = self.page_write(io, pages.clone(), cx) else {
            return self.wait(io, Phase::Sync(Stage::Pages(first)), cx);
        };
        self.start_stage(io, Stage::Pages(pages.end), write, cx)
    }

    /// The write of some pages of the table, from a buffer. `None`: there is no memory, or no
    /// spare child request.
    fn page_write<R: Ring>(&mut self, io: Cookie, pages: Range<u64>, cx: &mut Cx<'_, R>) -> Option<Request> {
        let len = ((pages.end - pages.start) * PAGE_LEN) as u32;
        let buffer = if cx.spare_children() > 0 { cx.ring.allocate(len)? } else { return None };
        for (page, bytes) in pages.clone().zip(cx.ring.bytes_mut(buffer).chunks_mut(PAGE_LEN as usize)) {
            self.index.page(page, bytes);
        }
        self.slot(io).buffer = buffer;
        let mut write = Request::new(Op::Write, Bytes(TABLE_AT + pages.start * PAGE_LEN), Bytes(len.into()));
        write.data = Data::One(buffer);
        Some(write)
    }
}
