//! Copy-on-write: an overlay takes what is written, and what was not written is read from the origin.
//!
//! Two children: the **origin**, which is never written, and the **store**, a file of the format in
//! [`format`]. A device is divided into chunks; the table says which of them the store holds. A request that
//! finds all of its chunks alike goes down as it is to one child, or moved to the other. Others stay held
//! here: reads as pieces, all at once; what changes chunks that the store does not hold yet, step by step in
//! order of address, so that requests which wait for each other's chunks never wait in a circle.
//!
//! A chunk that is written in part is completed from the origin; chunks are small, so that this is rare.
//! The table on disk follows the data: a flush writes first the data, then the bits that were set before, then
//! flushes again ([`sync`]). So whenever the power goes, the table names only chunks that are whole, and every
//! chunk that a flush covered. The journal has checksums of what no flush has covered ([`log`]): a server that is
//! killed loses nothing that it has acknowledged, and nothing is believed whose data did not reach the disk.
//!
//! *Invariant:* whoever claimed chunks lets go of them before its request ends.

pub mod format;
mod index;
mod journal;
mod log;
mod pages;
mod read;
pub mod records;
mod sync;
#[cfg(test)]
mod tests;
mod write;

pub use index::Index;
pub use journal::Room;

use crate::Layer;
use crate::layer::stacked;
use block::{
    Abilities, Bytes, Cookie, Data, Fact, Features, Flags, LimitsError, Op, Profile, Request, Sectors,
    Segment, Status,
};
use queue::{ChildKind, Cx, Nanos, Node, NodeId, Ring, Verdict};
use std::sync::Arc;

/// How long a request waits before it looks again whether a chunk or a sync is free: twice as long each time.
const LOOK_NS_MIN: u64 = 20_000;
const LOOK_NS_MAX: u64 = 10_000_000;

/// The shared part.
#[derive(Debug)]
pub struct CowLayer {
    index: Arc<Index>,
    facts: Vec<Fact>,
}

impl CowLayer {
    /// Over an overlay whose table was read. `facts`: what it is, for `show`.
    pub fn new(index: Arc<Index>, facts: Vec<Fact>) -> CowLayer {
        CowLayer { index, facts }
    }
}

impl<R: Ring> Layer<R> for CowLayer {
    fn name(&self) -> &'static str {
        "cow"
    }

    /// Children: the origin, the store.
    fn profile(&self, below: &[Profile]) -> Result<Profile, LimitsError> {
        let (origin, store) = (&below[0], &below[1]);
        let layout = self.index.layout();
        let mut limits = stacked(&origin.limits, Sectors(0));
        // Reads of both kinds line up with whole chunks; what does not is only slower.
        let _ = limits.stack(&store.limits, layout.data_at().sectors());
        limits.features = limits.features.without(Features::ZONED);
        limits.validate()?;
        let can = store.abilities;
        Ok(Profile {
            size: layout.size,
            read_only: store.read_only,
            abilities: Abilities { rotational: can.rotational || origin.abilities.rotational, ..can },
            limits,
            bytewise: false,
            lends: false,
            in_place: origin.in_place && store.in_place,
            sparse: true,
            opaque: false,
        })
    }

    fn spares(&self, depth: u16) -> u16 {
        depth.saturating_mul(4).clamp(64, 4096)
    }

    /// Only where there is nothing below: that is filled with zeroes here.
    fn looks_at_data(&self) -> bool {
        self.index.origin_size() < self.index.layout().size
    }

    fn node(&self, whole: &Profile, below: &[NodeId]) -> Box<dyn Node<R>> {
        debug_assert_eq!(whole.size, self.index.layout().size);
        Box::new(Cow::new(self.index.clone(), [below[0], below[1]]))
    }

    fn describe(&self) -> Vec<Fact> {
        let layout = self.index.layout();
        let held = Bytes(self.index.chunks_live() * layout.chunk.0);
        let mut facts = self.facts.clone();
        facts.push(("overlay chunk", layout.chunk.to_string()));
        facts.push(("overlay holds", held.to_string()));
        facts
    }
}

/// What is being done for a request that is held, or that a child has.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Phase {
    /// It went down as it is, or moved (`true`) into the store.
    Whole(bool),
    /// Pieces of a read.
    Pieces,
    /// A step of a change, over chunks that are live or, if so many are claimed, soon will be.
    Step { claimed: u64 },
    /// The origin's part of a chunk is read.
    CopyRead,
    /// The chunk is written, in up to three pieces.
    CopyWrite,
    /// What was brought in is read back from the store, for its checksums.
    ReadBack { claimed: u64 },
    /// Nothing: someone else has the chunk, or there is no memory.
    Wait,
    /// A sync: see there.
    Sync(sync::Stage),
    /// Records are written to the journal's file up to a position; `None`: another request writes them.
    Records { after: log::After, to: Option<u64> },
}

/// What we know of a request between its submit and its end.
#[derive(Clone, Copy, Debug)]
struct Slot {
    phase: Phase,
    /// How far it is done, or under way: an offset of the device.
    at: u64,
    /// Where the step under way ends.
    end: u64,
    /// Records that were admitted for the step under way, and are not appended yet.
    admitted: u64,
    /// The position behind its last record; 0: it has none.
    recorded: u64,
    /// Child requests under way.
    pieces: u32,
    /// The first error, else `Ok`.
    status: Status,
    /// A chunk, what is read back, or pages of the table; empty when there is none.
    buffer: Segment,
    /// Pages of the journal; empty when there are none.
    records: Segment,
    /// What a request that was cut covers in all.
    len: Bytes,
    look_ns: u64,
    /// Which sync will serve it.
    promise: u64,
    /// It goes on when that is over.
    goes_on: bool,
}

impl Slot {
    const NEW: Slot = Slot {
        phase: Phase::Wait,
        at: 0,
        end: 0,
        admitted: 0,
        recorded: 0,
        pieces: 0,
        status: Status::Ok,
        buffer: Segment::EMPTY,
        records: Segment::EMPTY,
        len: Bytes::ZERO,
        look_ns: LOOK_NS_MIN,
        promise: 0,
        goes_on: false,
    };
}

/// The node of one hardware queue.
#[derive(Debug)]
pub struct Cow {
    index: Arc<Index>,
    origin: NodeId,
    store: NodeId,
    chunk: u64,
    size: u64,
    origin_size: u64,
    data_at: Bytes,
    slots: Box<[Slot]>,
}

impl Cow {
    /// Over the origin and the store.
    pub fn new(index: Arc<Index>, [origin, store]: [NodeId; 2]) -> Cow {
        let (layout, origin_size) = (index.layout(), index.origin_size());
        Cow {
            index,
            origin,
            store,
            chunk: layout.chunk.0,
            size: layout.size.0,
            origin_size: origin_size.0,
            data_at: layout.data_at(),
            slots: Box::default(),
        }
    }

    fn slot(&mut self, io: Cookie) -> &mut Slot {
        &mut self.slots[io.tag.index()]
    }

    /// The chunks that a range touches.
    fn chunks(&self, from: u64, to: u64) -> std::ops::Range<u64> {
        from / self.chunk..to.div_ceil(self.chunk)
    }

    /// Start a part of a request as a child of its own: `from` to `to` of the device, on that child. There
    /// must be a spare one.
    fn spawn<R: Ring>(&mut self, io: Cookie, node: NodeId, req: Request, cx: &mut Cx<'_, R>) {
        self.slot(io).pieces += 1;
        let spawned = cx.spawn(io, node, ChildKind::Copy, req);
        debug_assert!(spawned.is_ok(), "a spare child was seen");
    }

    /// The part of a request from `from` to `to`, as the store is to be asked for it.
    fn part<R: Ring>(&self, req: &Request, from: u64, to: u64, cx: &Cx<'_, R>) -> Request {
        let mut part = Request {
            offset: Bytes(from),
            len: Bytes(to - from),
            // The end of the whole is made durable at once.
            flags: req.flags.without(Flags::MAY_LEND.with(Flags::FUA)),
            ..*req
        };
        if req.op.moves_data() {
            part.data = cx.advance(req.data, from - req.offset.0);
            if let Data::One(segment) = part.data {
                part.data = Data::One(segment.slice(0, part.len.0 as u32));
            }
        }
        part
    }

    /// Look again after a while.
    fn wait<R: Ring>(&mut self, io: Cookie, phase: Phase, cx: &mut Cx<'_, R>) -> Verdict {
        let slot = self.slot(io);
        slot.phase = phase;
        let at: Nanos = cx.now().after(slot.look_ns);
        slot.look_ns = (2 * slot.look_ns).min(LOOK_NS_MAX);
        cx.timer(io, at);
        Verdict::Held
    }

    /// Give a buffer back.
    fn free<R: Ring>(&mut self, io: Cookie, cx: &mut Cx<'_, R>) {
        let buffer = std::mem::replace(&mut self.slot(io).buffer, Segment::EMPTY);
        if buffer.len > 0 {
            cx.ring.free(buffer);
        }
    }
}

impl<R: Ring> Node<R> for Cow {
    fn attach(&mut self, _: NodeId, tags: usize) {
        self.slots = vec![Slot::NEW; tags].into();
    }

    fn submit(&mut self, io: Cookie, req: &mut Request, cx: &mut Cx<'_, R>) -> Verdict {
        match req.op {
            Op::Read => self.read(io, req, cx),
            Op::Write | Op::WriteZeroes | Op::Discard => self.change(io, req, cx),
            Op::Flush => self.flush(io, req, cx),
            Op::Extents => self.extents(io, req, cx),
            Op::Prefetch => self.prefetch(io, req),
            _ => Verdict::Up(Status::NotSupported),
        }
    }

    fn end_io(&mut self, io: Cookie, req: &mut Request, status: Status, _: &mut Cx<'_, R>) -> Verdict {
        let (data_at, slot) = (self.data_at, self.slots[io.tag.index()]);
        if slot.phase == Phase::Whole(true) {
            req.offset = req.offset - data_at;
        }
        req.len = slot.len;
        Verdict::Up(status)
    }

    /// What we waited for may be there now.
    fn reap(&mut self, io: Cookie, req: &mut Request, result: i64, cx: &mut Cx<'_, R>) -> Verdict {
        if result < 0 {
            return self.give_up(io, req, cx);
        }
        match self.slot(io).phase {
            Phase::Sync(stage) => self.go_on_syncing(io, req, stage, cx),
            Phase::Records { after, .. } => self.write_records(io, req, after, cx),
            _ => self.step(io, req, cx),
        }
    }

    fn child_end(
        &mut self,
        io: Cookie,
        req: &mut Request,
        _: &Request,
        status: Status,
        cx: &mut Cx<'_, R>,
    ) -> Verdict {
        let slot = self.slot(io);
        slot.pieces -= 1;
        if slot.status.is_ok() {
            slot.status = status;
        }
        match slot.phase {
            Phase::Pieces => self.piece_read(io, req, cx),
            _ if slot.pieces > 0 => Verdict::Held,
            Phase::Step { claimed } => self.step_done(io, req, claimed, cx),
            Phase::CopyRead => self.copy_read(io, req, cx),
            Phase::CopyWrite => self.step_done(io, req, 1, cx),
            Phase::ReadBack { claimed } => self.read_back(io, req, claimed, cx),
            Phase::Sync(stage) => self.synced(io, req, stage, cx),
            Phase::Records { after, to } => self.records_written(io, req, (after, to), cx),
            Phase::Whole(_) | Phase::Wait => unreachable!("no child is under way in {:?}", slot.phase),
        }
    }

    /// Only waiting is ours to end; children are as old as the request and are asked themselves.
    fn cancel(&mut self, io: Cookie, cx: &mut Cx<'_, R>) {
        if self.slot(io).pieces == 0 {
            cx.cancel(io);
        }
    }
}
