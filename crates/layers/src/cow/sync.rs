//! Flushes: the data, then the table, then the table onto stable storage; and the tally. One of each at a time
//! for all queues.
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
    pub(super) fn flush<R: Ring>(&mut self, io: Cookie, cx: &mut Cx<'_, R>) -> Verdict {
        let promise = self.index.syncs.promise();
        *self.slot(io) = Slot { promise, ..Slot::NEW };
        self.sync(io, cx)
    }

    /// Sync, unless another request's sync has done it or is under way.
    fn sync<R: Ring>(&mut self, io: Cookie, cx: &mut Cx<'_, R>) -> Verdict {
        let promise = self.slot(io).promise;
        if self.index.syncs.is_kept(promise) {
            return Verdict::Up(Status::Ok);
        }
        if cx.spare_children() == 0 || !self.index.syncs.begin() {
            return self.wait(io, Phase::Sync(Stage::Await), cx);
        }
        self.slot(io).look_ns = LOOK_NS_MIN;
        let stage = Stage::Data(self.index.take());
        self.start_stage(io, stage, Request::flush(), cx)
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
    pub(super) fn go_on_syncing<R: Ring>(&mut self, io: Cookie, stage: Stage, cx: &mut Cx<'_, R>) -> Verdict {
        match stage {
            Stage::Await => self.sync(io, cx),
            Stage::Pages(next) => self.write_pages(io, next, cx),
            Stage::Data(_) | Stage::Table => self.start_stage(io, stage, Request::flush(), cx),
        }
    }

    /// A stage is over.
    pub(super) fn synced<R: Ring>(&mut self, io: Cookie, stage: Stage, cx: &mut Cx<'_, R>) -> Verdict {
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
                Verdict::Up(Status::Ok)
            }
        }
    }

    /// Write what is due of the table from page `first` on.
    fn write_pages<R: Ring>(&mut self, io: Cookie, first: u64, cx: &mut Cx<'_, R>) -> Verdict {
        let Some(pages) = self.index.table.next(first, PAGES_MAX) else {
            return self.start_stage(io, Stage::Table, Request::flush(), cx);
        };
        let Some(write) = self.page_write(io, pages.clone(), false, cx) else {
            return self.wait(io, Phase::Sync(Stage::Pages(first)), cx);
        };
        self.start_stage(io, Stage::Pages(pages.end), write, cx)
    }

    /// The write of some pages of the table, or of the tally, from a buffer. `None`: there is no memory, or no
    /// spare child request.
    fn page_write<R: Ring>(
        &mut self,
        io: Cookie,
        pages: Range<u64>,
        tally: bool,
        cx: &mut Cx<'_, R>,
    ) -> Option<Request> {
        let len = ((pages.end - pages.start) * PAGE_LEN) as u32;
        let buffer = if cx.spare_children() > 0 { cx.ring.allocate(len)? } else { return None };
        for (page, bytes) in pages.clone().zip(cx.ring.bytes_mut(buffer).chunks_mut(PAGE_LEN as usize)) {
            self.index.page(page, tally, bytes);
        }
        self.slot(io).buffer = buffer;
        let table = if tally { self.index.layout().tally_at() } else { Bytes(TABLE_AT) };
        let mut write = Request::new(Op::Write, table + Bytes(pages.start * PAGE_LEN), Bytes(len.into()));
        write.data = Data::One(buffer);
        Some(write)
    }

    /// Chunks have become live for a request: see to it that the tally says so before it ends.
    pub(super) fn tally<R: Ring>(&mut self, io: Cookie, req: &Request, cx: &mut Cx<'_, R>) -> Verdict {
        let promise = self.index.tallies.promise();
        *self.slot(io) = Slot { promise, at: req.end().0, ..Slot::NEW };
        self.go_on_tallying(io, None, cx)
    }

    /// `next`: the page from which a round that is ours goes on.
    pub(super) fn go_on_tallying<R: Ring>(
        &mut self,
        io: Cookie,
        next: Option<u64>,
        cx: &mut Cx<'_, R>,
    ) -> Verdict {
        let first = match next {
            Some(next) => next,
            None if self.index.tallies.is_kept(self.slots[io.tag.index()].promise) => {
                return Verdict::Up(Status::Ok);
            }
            None if cx.spare_children() == 0 || !self.index.tallies.begin() => {
                return self.wait(io, Phase::Tally(None), cx);
            }
            None => {
                self.index.tally.take();
                0
            }
        };
        let Some(pages) = self.index.tally.next(first, PAGES_MAX) else {
            self.index.tallies.end();
            return Verdict::Up(Status::Ok);
        };
        let Some(write) = self.page_write(io, pages.clone(), true, cx) else {
            return self.wait(io, Phase::Tally(Some(first)), cx);
        };
        self.slot(io).phase = Phase::Tally(Some(pages.end));
        self.spawn(io, self.store, write, cx);
        Verdict::Held
    }

    /// Pages of the tally are written.
    pub(super) fn tallied<R: Ring>(&mut self, io: Cookie, next: Option<u64>, cx: &mut Cx<'_, R>) -> Verdict {
        let Slot { status, buffer, .. } = *self.slot(io);
        if let (true, Some(end)) = (status.is_ok(), next) {
            let written = cx.ring.bytes(buffer);
            self.index.tallied(end - written.len() as u64 / PAGE_LEN, written);
        }
        self.free(io, cx);
        if status.is_ok() {
            return self.go_on_tallying(io, next, cx);
        }
        self.index.tally.put_back();
        self.index.tallies.withdraw();
        Verdict::Up(status)
    }

    /// Waiting was cancelled.
    pub(super) fn give_up<R: Ring>(&mut self, io: Cookie, cx: &mut Cx<'_, R>) -> Verdict {
        self.free(io, cx);
        match self.slot(io).phase {
            Phase::Sync(Stage::Await) | Phase::Tally(None) | Phase::Wait => Verdict::Up(Status::IoError),
            // What was begun for all queues is not given up half done: it looks again, out of turn.
            Phase::Sync(stage) => self.go_on_syncing(io, stage, cx),
            Phase::Tally(next) => self.go_on_tallying(io, next, cx),
            other => unreachable!("nothing is waited for in {other:?}"),
        }
    }
}
