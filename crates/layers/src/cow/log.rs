//! Records of what is written to chunks that are not stored, and the room for them.
//!
//! A chunk that is brought in has its records appended when its data is in the store, before it is let go of. An
//! overwrite of a chunk that is live and not stored has its records in the file before its data goes down: whenever
//! the server is killed, each sector has a content that is recorded. Memory that only the kernel can reach has no
//! checksum: a chunk is read back from the store then, and an overwrite first has the chunk stored by a sync.

use super::format::PAGE_LEN;
use super::records::{BLOCK_LEN, Record, SECTORS};
use super::sync::Stage;
use super::{Cow, Phase, journal::Journal, journal::NoRoom};
use block::{Bytes, Cookie, Data, Op, Request, Segment, Status};
use queue::{Cx, Ring, Verdict};

/// Pages of the journal that are written at once.
const PAGES_MAX: u64 = 16;
/// What is brought in or overwritten in one step, in bytes, where records are needed.
pub(super) const STEP_LEN: u64 = 1 << 20;
/// The same, where it has to be read back for that.
pub(super) const BACK_LEN: u64 = 64 << 10;
const SECTOR_LEN: usize = 512;

/// What a request goes on with when its records are in the file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum After {
    /// It ends.
    End,
    /// Its data is written over what is there.
    Overwrite,
    /// It tries again to have its records admitted.
    Step,
}

/// How many records a range of the device takes.
pub(super) fn records(from: u64, to: u64) -> u64 {
    to.div_ceil(BLOCK_LEN) - from / BLOCK_LEN
}

/// Puts together the records of a range of the device from its bytes, in order.
struct Recorder<'a> {
    journal: &'a Journal,
    position: u64,
    /// Up to where it is recorded, in the device.
    at: u64,
    record: Record,
    /// The checksum of a sector whose bytes come in pieces.
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

    /// The sector that ends where we are.
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

    /// All of the range was fed. The position behind its records.
    fn finish(mut self) -> u64 {
        if self.record.mask != 0 {
            self.put();
        }
        self.position
    }
}

impl Cow {
    /// Whether only the kernel can reach the data of a write.
    pub(super) fn is_opaque<R: Ring>(req: &Request, cx: &Cx<'_, R>) -> bool {
        req.op == Op::Write && cx.segments(req.data, req.len.0).any(|piece| cx.ring.is_opaque(piece))
    }

    /// Append the records of `from` to `to`, which were admitted: what the request writes from `body.0` to `body.1`, and
    /// on both sides of that what `buffer` has, which begins at `from`.
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
        self.slots[io.tag.index()].recorded = recorder.finish();
    }

    /// Records are not admitted: see to it that there is room, and try again.
    pub(super) fn make_room<R: Ring>(
        &mut self,
        io: Cookie,
        req: &Request,
        why: NoRoom,
        cx: &mut Cx<'_, R>,
    ) -> Verdict {
        let head = self.index.journal.head();
        match why {
            NoRoom::File => self.store_first(io, req, cx),
            NoRoom::Memory if self.index.journal.told() < head => {
                self.slot(io).recorded = head;
                self.write_records(io, req, After::Step, cx)
            }
            // Others have been admitted, and their data is under way.
            NoRoom::Memory => self.wait(io, Phase::Wait, cx),
        }
    }

    /// Have a sync bring all chunks that are live into the table, then go on.
    pub(super) fn store_first<R: Ring>(&mut self, io: Cookie, req: &Request, cx: &mut Cx<'_, R>) -> Verdict {
        let promise = self.index.syncs.promise();
        let slot = self.slot(io);
        (slot.promise, slot.goes_on) = (promise, true);
        self.sync(io, req, cx)
    }

    /// See to it that the file has the records of a request before it goes on.
    pub(super) fn write_records<R: Ring>(
        &mut self,
        io: Cookie,
        req: &Request,
        after: After,
        cx: &mut Cx<'_, R>,
    ) -> Verdict {
        let journal = &self.index.journal;
        if journal.told() >= self.slots[io.tag.index()].recorded {
            return match after {
                After::End => Verdict::Up(Status::Ok),
                After::Overwrite if cx.spare_children() == 0 => {
                    self.wait(io, Phase::Records { after, to: None }, cx)
                }
                After::Overwrite => self.start_step(io, req, self.slots[io.tag.index()].end, 0, cx),
                After::Step => self.step(io, req, cx),
            };
        }
        if cx.spare_children() == 0 || !journal.begin() {
            return self.wait(io, Phase::Records { after, to: None }, cx);
        }
        let due = journal.due(PAGES_MAX);
        let buffer = due.and_then(|(_, count, _)| cx.ring.allocate((count * PAGE_LEN) as u32));
        let (Some((first, _, to)), Some(buffer)) = (due, buffer) else {
            // Another request is about to fill its records in, or there is no memory.
            journal.end();
            return self.wait(io, Phase::Records { after, to: None }, cx);
        };
        for (page, bytes) in (first..).zip(cx.ring.bytes_mut(buffer).chunks_mut(PAGE_LEN as usize)) {
            journal.encode(page, to, bytes);
        }
        let at = self.index.layout().journal_at() + Bytes(journal.place(first) * PAGE_LEN);
        let mut write = Request::new(Op::Write, at, Bytes(buffer.len.into()));
        write.data = Data::One(buffer);
        let slot = self.slot(io);
        (slot.phase, slot.records) = (Phase::Records { after, to: Some(to) }, buffer);
        self.spawn(io, self.store, write, cx);
        Verdict::Held
    }

    /// Pages of the journal are written, up to a position.
    pub(super) fn records_written<R: Ring>(
        &mut self,
        io: Cookie,
        req: &Request,
        (after, to): (After, Option<u64>),
        cx: &mut Cx<'_, R>,
    ) -> Verdict {
        let slot = self.slot(io);
        let (status, buffer) = (slot.status, std::mem::replace(&mut slot.records, Segment::EMPTY));
        cx.ring.free(buffer);
        if let (true, Some(to)) = (status.is_ok(), to) {
            self.index.journal.set_told(to);
        }
        self.index.journal.end();
        match status {
            Status::Ok => self.write_records(io, req, after, cx),
            status => Verdict::Up(status),
        }
    }

    /// A request that has changed something is done, but for the records of what it brought in.
    pub(super) fn finish<R: Ring>(&mut self, io: Cookie, req: &Request, cx: &mut Cx<'_, R>) -> Verdict {
        let is_due = self.index.journal.is_half_full() && !self.index.syncs.is_under_way();
        if self.slots[io.tag.index()].recorded > 0 && is_due {
            // One request waits for a sync, so that the others do not have to when the journal is full.
            return self.flush(io, req, cx);
        }
        self.write_records(io, req, After::End, cx)
    }

    /// Waiting was cancelled.
    pub(super) fn give_up<R: Ring>(&mut self, io: Cookie, req: &Request, cx: &mut Cx<'_, R>) -> Verdict {
        self.free(io, cx);
        match self.slot(io).phase {
            Phase::Sync(Stage::Await) | Phase::Records { .. } | Phase::Wait => Verdict::Up(Status::IoError),
            // What was begun for all queues is not given up half done: it looks again, out of turn.
            Phase::Sync(stage) => self.go_on_syncing(io, req, stage, cx),
            other => unreachable!("nothing is waited for in {other:?}"),
        }
    }
}
