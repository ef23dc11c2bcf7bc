//! Copy-on-write: writes go to an overlay; chunks that were never written are read from the origin (the
//! backing file).
//!
//! Two children: the **origin**, which is never written, and the **store**, an overlay file in the format of
//! [`mod@format`]. The device is divided into chunks; the table has a bit for each chunk that the store holds. A
//! request whose chunks are all in one place goes down unchanged to the origin, or shifted to the store.
//! Others are held: reads run as child requests in parallel; writes to chunks that the store lacks run in
//! steps, in address order, so that requests that wait for each other's chunks cannot deadlock.
//!
//! A partial write to a new chunk copies the rest of the chunk from the origin; chunks are small, so that is
//! rare. The table on disk follows the data: a flush first writes the data, then the bits that were set
//! before, then flushes again ([`sync`]). After a power cut the table therefore names only complete chunks,
//! among them every chunk that a flush covered. The journal has checksums of data that no flush has covered
//! ([`log`]): after a crash of the server every acknowledged write is kept, and data that did not reach the
//! disk is not used.
//!
//! *Invariant:* a request releases its claims on chunks before it ends.

pub mod format;
mod index;
mod journal;
mod log;
mod pages;
mod read;
pub mod records;
mod sync;
mod write;

pub use index::Index;
pub use journal::JournalSize;

use crate::Layer;
use crate::layer::stacked;
use block::{
    Abilities, Bytes, Cookie, Data, Fact, Features, Flags, LimitsError, Op, Profile, Request, Sectors,
    Segment, Status,
};
use queue::{ChildKind, Cx, HeldRequests, Nanos, Node, NodeId, Ring, Verdict};
use std::sync::Arc;

/// The first and the longest interval at which a request tries again to get memory, in nanoseconds. The
/// interval doubles with each attempt.
const RETRY_NS_MIN: u64 = 20_000;
const RETRY_NS_MAX: u64 = 10_000_000;

/// The shared part of a copy-on-write layer: the index of its overlay.
#[derive(Debug)]
pub struct CowLayer {
    index: Arc<Index>,
    facts: Vec<Fact>,
}

impl CowLayer {
    /// Creates a layer for an overlay whose table was read. `facts` describe it in `show`.
    pub fn new(index: Arc<Index>, facts: Vec<Fact>) -> CowLayer {
        CowLayer { index, facts }
    }
}

impl<R: Ring> Layer<R> for CowLayer {
    fn name(&self) -> &'static str {
        "cow"
    }

    /// `below` are the origin and the store.
    fn profile(&self, below: &[Profile]) -> Result<Profile, LimitsError> {
        let (origin, store) = (&below[0], &below[1]);
        let layout = self.index.layout();
        let mut limits = stacked(&origin.limits, Sectors(0));
        // Reads of both children are aligned alike on whole chunks; other requests are only slower.
        let _ = limits.stack(&store.limits, layout.data_at().sectors());
        limits.features = limits.features.difference(Features::ZONED);
        limits.validate()?;
        let can = store.abilities;
        Ok(Profile {
            size: layout.size,
            read_only: store.read_only,
            abilities: Abilities { rotational: can.rotational || origin.abilities.rotational, ..can },
            limits,
            bytewise: false,
            zero_copy_reads: false,
            inline: origin.inline && store.inline,
            sparse: true,
            opaque: false,
        })
    }

    fn child_requests(&self, depth: u16) -> u16 {
        depth.saturating_mul(4).clamp(64, 4096)
    }

    /// Only if the origin is shorter than the device: the node fills the rest of a read with zeroes.
    fn accesses_data(&self) -> bool {
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

/// The phase of a request that is held here or in flight at a child.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Phase {
    /// Sent down unchanged to the origin, or (`true`) shifted to the store.
    Whole(bool),
    /// Child requests of a read are in flight.
    Read,
    /// One step of a write. Its chunks are live, or `claimed` of them become live with it.
    Step { claimed: u64 },
    /// Reads the rest of a partially written chunk from the origin.
    CopyRead,
    /// Writes that chunk with up to three children.
    CopyWrite,
    /// Reads newly written chunks back from the store to compute their checksums.
    ReadBack { claimed: u64 },
    /// Waits because another request has claimed the chunk, no child request is spare, or memory is short.
    Wait,
    /// Runs a sync or waits for one, see [`sync::Stage`].
    Sync(sync::Stage),
    /// Writes records to the journal file up to position `to`; `None`: waits for another request that writes
    /// them.
    Records { after: log::After, to: Option<u64> },
}

/// The state of one request, by tag.
#[derive(Clone, Copy, Debug)]
struct State {
    phase: Phase,
    /// The byte offset on the device up to which the request is done.
    at: u64,
    /// The end of the current step.
    end: u64,
    /// Records that were admitted for the current step and are not appended yet.
    admitted: u64,
    /// The journal position behind the request's last record; 0: it has none.
    recorded: u64,
    /// Child requests in flight.
    children: u32,
    /// The first error, else `Ok`.
    status: Status,
    /// A buffer for a chunk, data that is read back, or pages of the table; empty if there is none.
    buffer: Segment,
    /// A buffer for pages of the journal; empty if there is none.
    records: Segment,
    /// The original length of a request that was sent down shortened.
    len: Bytes,
    retry_ns: u64,
    /// The sync that covers this request.
    ticket: u64,
    /// Whether the request continues with its next step after that sync.
    continues: bool,
}

impl State {
    const NEW: State = State {
        phase: Phase::Wait,
        at: 0,
        end: 0,
        admitted: 0,
        recorded: 0,
        children: 0,
        status: Status::Ok,
        buffer: Segment::EMPTY,
        records: Segment::EMPTY,
        len: Bytes::ZERO,
        retry_ns: RETRY_NS_MIN,
        ticket: 0,
        continues: false,
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
    states: Box<[State]>,
    /// Requests that wait for another request's claim, records or sync to end, or for a spare child request.
    held: HeldRequests,
}

impl Cow {
    /// Creates a node over the origin and the store.
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
            states: Box::default(),
            held: HeldRequests::default(),
        }
    }

    fn state(&mut self, io: Cookie) -> &mut State {
        &mut self.states[io.tag.index()]
    }

    /// Returns the chunks that a range of bytes touches.
    fn chunks(&self, from: u64, to: u64) -> std::ops::Range<u64> {
        from / self.chunk..to.div_ceil(self.chunk)
    }

    /// Starts a child request of `io` at a node. At least one child request must be spare.
    fn spawn<R: Ring>(&mut self, io: Cookie, node: NodeId, req: Request, cx: &mut Cx<'_, R>) {
        self.state(io).children += 1;
        let spawned = cx.spawn(io, node, ChildKind::Copy, req);
        debug_assert!(spawned.is_ok(), "a child request is spare");
    }

    /// Returns the part of a request from byte `from` to byte `to`, without FUA.
    fn part<R: Ring>(&self, req: &Request, from: u64, to: u64, cx: &Cx<'_, R>) -> Request {
        let mut part = Request {
            offset: Bytes(from),
            len: Bytes(to - from),
            // FUA is done by one sync at the end of the whole request.
            flags: req.flags.difference(Flags::ZERO_COPY.union(Flags::FUA)),
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

    /// Holds the request in `phase` until another request gives back what it needs.
    fn wait_for_others<R: Ring>(&mut self, io: Cookie, phase: Phase, cx: &Cx<'_, R>) -> Verdict {
        self.state(io).phase = phase;
        self.held.wait(&self.index.waiting, io, cx)
    }

    /// Holds the request in `phase` until a timer expires: nothing reports that memory is free again.
    fn wait_for_memory<R: Ring>(&mut self, io: Cookie, phase: Phase, cx: &mut Cx<'_, R>) -> Verdict {
        let state = self.state(io);
        state.phase = phase;
        let at: Nanos = cx.now().after(state.retry_ns);
        state.retry_ns = (2 * state.retry_ns).min(RETRY_NS_MAX);
        cx.timer(io, at);
        Verdict::Held
    }

    /// Frees the request's buffer, if it has one.
    fn free<R: Ring>(&mut self, io: Cookie, cx: &mut Cx<'_, R>) {
        let buffer = std::mem::replace(&mut self.state(io).buffer, Segment::EMPTY);
        if buffer.len > 0 {
            cx.ring.free(buffer);
        }
    }
}

impl<R: Ring> Node<R> for Cow {
    fn attach(&mut self, _: NodeId, tags: usize) {
        self.states = vec![State::NEW; tags].into();
        self.held.reserve(tags);
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
        let (data_at, state) = (self.data_at, self.states[io.tag.index()]);
        if state.phase == Phase::Whole(true) {
            req.offset = req.offset - data_at;
        }
        req.len = state.len;
        Verdict::Up(status)
    }

    /// Handles the timer of a held request: checks again for what the request waits for.
    fn reap(&mut self, io: Cookie, req: &mut Request, result: i64, cx: &mut Cx<'_, R>) -> Verdict {
        if result < 0 {
            return self.wait_cancelled(io, req, cx);
        }
        match self.state(io).phase {
            Phase::Sync(stage) => self.continue_sync(io, req, stage, cx),
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
        // A child is spare again.
        self.held.resume_all();
        let state = self.state(io);
        state.children -= 1;
        if state.status.is_ok() {
            state.status = status;
        }
        match state.phase {
            Phase::Read => self.child_read(io, req, cx),
            _ if state.children > 0 => Verdict::Held,
            Phase::Step { claimed } => self.step_done(io, req, claimed, cx),
            Phase::CopyRead => self.copy_read(io, req, cx),
            Phase::CopyWrite => self.step_done(io, req, 1, cx),
            Phase::ReadBack { claimed } => self.read_back(io, req, claimed, cx),
            Phase::Sync(stage) => self.stage_done(io, req, stage, cx),
            Phase::Records { after, to } => self.records_written(io, req, (after, to), cx),
            Phase::Whole(_) | Phase::Wait => unreachable!("no child is in flight in {:?}", state.phase),
        }
    }

    /// Cancels a wait. Children have the age of their parent, so the queue cancels them itself.
    fn cancel(&mut self, io: Cookie, cx: &mut Cx<'_, R>) {
        if self.state(io).children == 0 && !self.held.cancel(io, cx) {
            cx.cancel(io);
        }
    }

    fn commit(&mut self, cx: &mut Cx<'_, R>) {
        self.held.resume_woken(cx);
    }
}
