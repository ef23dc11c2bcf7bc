//! Writes records of data in chunks that are not stored, and makes space for them.
//!
//! A new chunk's records are appended after its data is in the store, before its claim is released. An
//! overwrite of a chunk that is live but not stored writes its records to the file before its data: whenever
//! the server is killed, the content of each sector matches a record. No checksum can be computed of memory
//! that only the kernel can access: then a new chunk is read back from the store, and an overwrite waits for
//! a sync that stores the chunk.

use super::format::PAGE_LEN;
use super::records::{BLOCK_LEN, Record, SECTORS};
use super::sync::Stage;
use super::{Cow, Phase, journal::Journal, journal::JournalFull};
use block::{Bytes, Cookie, Data, Op, Request, Segment, Status};
use queue::{Cx, Ring, Verdict};

/// Pages of the journal in one write.
const PAGES_MAX: u64 = 16;
/// The largest step that needs records, in bytes.
pub(super) const STEP_LEN: u64 = 1 << 20;
/// The largest step whose data has to be read back, in bytes.
pub(super) const READ_BACK_LEN: u64 = 64 << 10;
const SECTOR_LEN: usize = 512;

/// The next step of a request once its records are in the file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum After {
    /// The request ends.
    End,
    /// The request overwrites the data.
    Overwrite,
    /// The request tries again to admit its records.
    Step,
}

/// Returns how many records a range of the device takes.
pub(super) fn records(from: u64, to: u64) -> u64 {
    to.div_ceil(BLOCK_LEN) - from / BLOCK_LEN
}

/// Builds the records of a range of the device from its bytes, in order.
struct Recorder<'a> {
    journal: &'a Journal,
    position: u64,
    /// The byte offset on the device up to which the recorder was fed.
    at: u64,
    record: Record,
    /// The checksum of a sector whose bytes arrive in several slices.
    partial: crc32fast::Hasher,
}

impl<'a> Recorder<'a> {
    fn new(journal: &'a Journal, from: u64, to: u64) -> Recorder<'a> {
        let position = journal.append(records(from, to));
        let record = Record { block: from / BLOCK_LEN, ..Record::default() };
        Recorder { journal, position, at: from, record, partial: crc32fast::Hasher::new() }
    }

    fn feed(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let have = (self.at % SECTOR_LEN as u64) as usize;
            let (head, rest) = bytes.split_at(bytes.len().min(SECTOR_LEN - have));
            bytes = rest;
            self.at += head.len() as u64;
            if head.len() == SECTOR_LEN {
                self.sector(crc32fast::hash(head));
                continue;
            }
            self.partial.update(head);
            if have + head.len() == SECTOR_LEN {
                let partial = std::mem::replace(&mut self.partial, crc32fast::Hasher::new());
                self.sector(partial.finalize());
            }
        }
    }

    fn feed_zeroes(&mut self, len: u64) {
        let sum = crc32fast::hash(&[0; SECTOR_LEN]);
        for _ in 0..len / SECTOR_LEN as u64 {
            self.at += SECTOR_LEN as u64;
            self.sector(sum);
        }
    }

    /// Adds the checksum of the sector that ends at `at`.
    fn sector(&mut self, sum: u32) {
        let number = (self.at / SECTOR_LEN as u64 - 1) as usize % SECTORS;
        self.record.mask |= 1 << number;
        self.record.sums[number] = sum;
        if number == SECTORS - 1 {
            self.put();
        }
    }

    fn put(&mut self) {
        self.journal.put(self.position, &self.record);
        self.position += 1;
        self.record = Record { block: self.at.div_ceil(BLOCK_LEN), ..Record::default() };
    }

    /// Ends the range. Returns the position behind its records.
    fn end_write(mut self) -> u64 {
        if self.record.mask != 0 {
            self.put();
        }
        self.position
    }
}

impl Cow {
    /// Returns whether the data of a write is in memory that only the kernel can access.
    pub(super) fn is_opaque<R: Ring>(req: &Request, cx: &Cx<'_, R>) -> bool {
        req.op == Op::Write && cx.segments(req.data, req.len.0).any(|piece| cx.ring.is_opaque(piece))
    }

    /// Appends the admitted records of `from` to `to`. The request has the data from `start` to `end`;
    /// `buffer`, which begins at `from`, has the data on both sides of that.
    pub(super) fn record<R: Ring>(
        &mut self,
        io: Cookie,
        req: &Request,
        (from, to): (u64, u64),
        (start, end): (u64, u64),
        buffer: Segment,
        cx: &Cx<'_, R>,
    ) {
        let mut recorder = Recorder::new(&self.index.journal, from, to);
        if from < start {
            recorder.feed(cx.ring.bytes(buffer.slice(0, (start - from) as u32)));
        }
        if start < end {
            if req.op == Op::Write {
                let data = cx.advance(req.data, start - req.offset.0);
                for piece in cx.segments(data, end - start) {
                    recorder.feed(cx.ring.bytes(piece));
                }
            } else {
                recorder.feed_zeroes(end - start);
            }
        }
        if end < to {
            recorder.feed(cx.ring.bytes(buffer.slice((end - from) as u32, (to - end) as u32)));
        }
        self.states[io.tag.index()].recorded = recorder.end_write();
    }

    /// Makes space for records that were not admitted, and tries again.
    pub(super) fn make_space<R: Ring>(
        &mut self,
        io: Cookie,
        req: &Request,
        why: JournalFull,
        cx: &mut Cx<'_, R>,
    ) -> Verdict {
        let head = self.index.journal.head();
        match why {
            JournalFull::File => self.sync_first(io, req, cx),
            JournalFull::Memory if self.index.journal.written() < head => {
                self.state(io).recorded = head;
                self.write_records(io, req, After::Step, cx)
            }
            // The records of other requests are admitted, but their data is still in flight.
            JournalFull::Memory => self.wait_for_others(io, Phase::Wait, cx),
        }
    }

    /// Holds the request until a sync has stored all live chunks, then continues it.
    pub(super) fn sync_first<R: Ring>(&mut self, io: Cookie, req: &Request, cx: &mut Cx<'_, R>) -> Verdict {
        let ticket = self.index.syncs.ticket();
        let state = self.state(io);
        (state.ticket, state.continues) = (ticket, true);
        self.sync(io, req, cx)
    }

    /// Continues a request once the file has its records; writes them if no other request does.
    pub(super) fn write_records<R: Ring>(
        &mut self,
        io: Cookie,
        req: &Request,
        after: After,
        cx: &mut Cx<'_, R>,
    ) -> Verdict {
        let journal = &self.index.journal;
        if journal.written() >= self.states[io.tag.index()].recorded {
            return match after {
                After::End => Verdict::Up(Status::Ok),
                After::Overwrite if cx.spare_children() == 0 => {
                    self.wait_for_others(io, Phase::Records { after, to: None }, cx)
                }
                After::Overwrite => self.start_step(io, req, self.states[io.tag.index()].end, 0, cx),
                After::Step => self.step(io, req, cx),
            };
        }
        if cx.spare_children() == 0 || !journal.begin() {
            return self.wait_for_others(io, Phase::Records { after, to: None }, cx);
        }
        let due = journal.due(PAGES_MAX);
        let buffer = due.and_then(|(_, count, _)| cx.ring.allocate((count * PAGE_LEN) as u32));
        let (Some((first, _, to)), Some(buffer)) = (due, buffer) else {
            journal.end();
            self.index.waiting.wake_fenced(self.held.waiter());
            let phase = Phase::Records { after, to: None };
            return match due {
                // Another request is about to fill in its records.
                None => self.wait_for_others(io, phase, cx),
                Some(_) => self.wait_for_memory(io, phase, cx),
            };
        };
        for (page, bytes) in (first..).zip(cx.ring.bytes_mut(buffer).chunks_mut(PAGE_LEN as usize)) {
            journal.encode(page, to, bytes);
        }
        let at = self.index.layout().journal_at() + Bytes(journal.place(first) * PAGE_LEN);
        let mut write = Request::new(Op::Write, at, Bytes(buffer.len.into()));
        write.data = Data::One(buffer);
        let state = self.state(io);
        (state.phase, state.records) = (Phase::Records { after, to: Some(to) }, buffer);
        self.spawn(io, self.store, write, cx);
        Verdict::Held
    }

    /// Handles the completion of a write of journal pages.
    pub(super) fn records_written<R: Ring>(
        &mut self,
        io: Cookie,
        req: &Request,
        (after, to): (After, Option<u64>),
        cx: &mut Cx<'_, R>,
    ) -> Verdict {
        let state = self.state(io);
        let (status, buffer) = (state.status, std::mem::replace(&mut state.records, Segment::EMPTY));
        cx.ring.free(buffer);
        if let (true, Some(to)) = (status.is_ok(), to) {
            self.index.journal.set_written(to);
        }
        self.index.journal.end();
        self.index.waiting.wake_fenced(self.held.waiter());
        match status {
            Status::Ok => self.write_records(io, req, after, cx),
            status => Verdict::Up(status),
        }
    }

    /// Ends a write once the records of its new chunks are in the file.
    pub(super) fn end_write<R: Ring>(&mut self, io: Cookie, req: &Request, cx: &mut Cx<'_, R>) -> Verdict {
        let is_due = self.index.journal.is_half_full() && !self.index.syncs.is_running();
        if self.states[io.tag.index()].recorded > 0 && is_due {
            // This request runs a sync early, so that others do not wait for one once the journal is full.
            return self.flush(io, req, cx);
        }
        self.write_records(io, req, After::End, cx)
    }

    /// Handles a cancelled wait.
    pub(super) fn wait_cancelled<R: Ring>(
        &mut self,
        io: Cookie,
        req: &Request,
        cx: &mut Cx<'_, R>,
    ) -> Verdict {
        self.free(io, cx);
        match self.state(io).phase {
            Phase::Sync(Stage::Waiting) | Phase::Records { .. } | Phase::Wait => Verdict::Up(Status::IoError),
            // A stage that all queues depend on is not abandoned half done: it continues at once.
            Phase::Sync(stage) => self.continue_sync(io, req, stage, cx),
            other => unreachable!("nothing is waited for in {other:?}"),
        }
    }
}
