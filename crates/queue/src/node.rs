//! A node of a stack, and what it may touch.

use crate::segments::{SegmentList, Segments, advance};
use crate::sockets::{NodeEvent, SocketOwner, alarm_cookie};
use crate::{Event, FileId, FileOp, IoId, Nanos, Patience, Point, Probe, QueueId, Ring, RingFull};
use block::{Cookie, Data, Op, Request, Segment, Status, Tag};
use std::collections::VecDeque;

/// A node's place in its stack. A parent's number is always below its children's.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct NodeId(pub u8);

impl NodeId {
    /// The node that requests enter by.
    pub const TOP: NodeId = NodeId(0);

    pub(crate) const fn index(self) -> usize {
        self.0 as usize
    }
}

/// What a node wants to happen to a request next.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Verdict {
    /// Hand it, as it now stands, to this child. From `end_io` it is a retry.
    Down(NodeId),
    /// It is over at this node: walk back up.
    Up(Status),
    /// The kernel, a timer or child requests own it, under its cookie.
    Held,
    /// Try again: the request is parked and offered to this node again, as `submit`, in the next turn of the loop, whatever
    /// happens until then. For what was interrupted and can be begun anew at once. A node that answers this while it
    /// waits keeps its thread from sleeping.
    Busy,
    /// Something that it needs is in use. The request is parked and offered to this node again, as `submit`, in each turn
    /// in which its thread is awake anyway, and the thread may sleep meanwhile. So what it waits for must end by something
    /// that wakes the thread:
    ///
    /// - What belongs to the thread (child requests of this node, entries and memory of the ring) is given back in a turn
    ///   of that thread: the next turn begins without sleeping, and offers the request again.
    /// - What other threads hold is waited for by asking to be woken *first* and checking once more *second*; whoever gives
    ///   it back does so first, checks for waiters second, and calls the queue's [`Nudge`](crate::Nudge).
    Blocked,
}

/// One element of a stack: a layer or a backend. An instance belongs to one hardware queue, so to
/// one thread. State per request lives in the node's own array indexed by tag, made at start-up.
///
/// A node that changes the request on the way down restores it before it answers `Up`: debug builds check that.
/// The memory that a request names stays until its `Up`, and not a moment longer. A read that comes up may name memory
/// that was lent: a node that sends it down again first puts back the data with which it arrived. A zone
/// append that ended well comes up with the offset where the data went, on the device of the node below.
pub trait Node<R: Ring> {
    /// Called once, before anything else: its own number, and how many tags there are (front-end
    /// requests and children together), for arrays indexed by tag.
    fn attach(&mut self, id: NodeId, tags: usize) {
        let _ = (id, tags);
    }

    /// How many entries of the queue's segment table it wants for itself, for runs that it puts together: see
    /// [`Cx::room`].
    fn room(&self) -> u32 {
        0
    }

    /// A request arrives. Its range lies within the device; nothing else is promised.
    fn submit(&mut self, io: Cookie, req: &mut Request, cx: &mut Cx<'_, R>) -> Verdict;

    /// The child named in `Down` is done with the request.
    fn end_io(&mut self, io: Cookie, req: &mut Request, status: Status, cx: &mut Cx<'_, R>) -> Verdict {
        let _ = (io, req, cx);
        Verdict::Up(status)
    }

    /// What the ring carried for a request that we hold is over: bytes moved, or a negative errno.
    fn reap(&mut self, io: Cookie, req: &mut Request, result: i64, cx: &mut Cx<'_, R>) -> Verdict {
        let _ = (io, cx);
        let expected = if req.op.moves_data() { req.len.0 } else { 0 };
        Verdict::Up(Status::from_result(result, expected))
    }

    /// A child request that we spawned for a request that we hold is over.
    fn child_end(
        &mut self,
        io: Cookie,
        req: &mut Request,
        child: &Request,
        status: Status,
        cx: &mut Cx<'_, R>,
    ) -> Verdict {
        let _ = (io, req, child, cx);
        Verdict::Up(status)
    }

    /// The batch is over: start what was gathered.
    fn commit(&mut self, cx: &mut Cx<'_, R>) {
        let _ = cx;
    }

    /// The request that we hold has taken too long. Best effort: its end still comes, once.
    fn cancel(&mut self, io: Cookie, cx: &mut Cx<'_, R>) {
        cx.cancel(io);
    }

    /// Something has come for the node itself. Requests that it holds and that end by this it names with
    /// [`Cx::resume`].
    fn event(&mut self, event: NodeEvent, cx: &mut Cx<'_, R>) {
        let _ = (event, cx);
    }

    /// The node holds no request and will be asked for nothing more: let go of what it has at the ring, sockets and
    /// alarm. Whether nothing is left; asked again until then.
    fn close(&mut self, cx: &mut Cx<'_, R>) -> bool {
        let _ = cx;
        true
    }
}

/// How a child request stands to its parent in the device's statistics.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ChildKind {
    /// A piece of it: the pieces are counted, the parent is not (the kernel counts requests after
    /// splitting).
    Piece,
    /// Made on its behalf, as by a mirror: only the parent is counted.
    Copy,
}

/// No child request of this node is spare: answer [`Verdict::Blocked`], or wait for a child to end.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NoChild;

pub(crate) struct Spawn {
    pub(crate) tag: Tag,
    pub(crate) parent: Cookie,
    pub(crate) node: NodeId,
    pub(crate) kind: ChildKind,
    pub(crate) req: Request,
}

/// A held request that is over.
pub(crate) struct Resumed {
    pub(crate) io: Cookie,
    pub(crate) result: i64,
    /// It was carried out as part of another, which is counted in its place.
    pub(crate) part: bool,
}

/// What belongs to a queue rather than to a request, and is lent to nodes through [`Cx`].
pub(crate) struct Common {
    pub(crate) queue: QueueId,
    pub(crate) segments: Box<[Segment]>,
    /// Spare child tags of each node: a layer can never take those that a layer below it needs.
    pub(crate) spare: Box<[Vec<Tag>]>,
    /// To be started, in order. Each holds a child tag, so it never outgrows those.
    pub(crate) spawned: VecDeque<Spawn>,
    /// Held requests that their nodes named as over, with what they are told. Each holds a tag.
    pub(crate) resumed: VecDeque<Resumed>,
    /// Where in the segment table the entries of each node begin.
    pub(crate) rooms: Box<[u32]>,
    /// Requests that were merged into others and are not counted yet, by operation; and whether there are any.
    pub(crate) merges: [u64; Op::COUNT],
    pub(crate) merged: bool,
    pub(crate) probe: Option<Box<dyn Probe>>,
}

/// What a node may touch besides itself and the request.
pub struct Cx<'a, R> {
    pub(crate) common: &'a mut Common,
    pub(crate) node: NodeId,
    /// Memory, for nodes that look at data.
    pub ring: &'a mut R,
}

impl<R: Ring> Cx<'_, R> {
    /// The time, as of this turn.
    pub fn now(&self) -> Nanos {
        self.ring.now()
    }

    /// Start a child request of `parent`, which must end up held. It ends as the parent's `child_end`.
    /// Children start after the verdict that follows, in the order they were spawned.
    ///
    /// # Errors
    /// [`NoChild`] when none of those reserved at start-up is spare. Those spawned before stay.
    pub fn spawn(
        &mut self,
        parent: Cookie,
        node: NodeId,
        kind: ChildKind,
        req: Request,
    ) -> Result<(), NoChild> {
        let tag = self.common.spare[self.node.index()].pop().ok_or(NoChild)?;
        self.common.spawned.push_back(Spawn { tag, parent, node, kind, req });
        Ok(())
    }

    /// How many child requests this node has spare.
    pub fn spare_children(&self) -> usize {
        self.common.spare[self.node.index()].len()
    }

    /// The memory that `data` names, `len` bytes in all, piece by piece.
    pub fn segments(&self, data: Data, len: u64) -> Segments<'_> {
        Segments::new(&self.common.segments, data, len)
    }

    /// The part of `data` that starts `skip_bytes` in.
    pub fn advance(&self, data: Data, skip_bytes: u64) -> Data {
        advance(&self.common.segments, data, skip_bytes)
    }

    /// Do an operation on a file here and now, if it need not wait: see [`Ring::try_now`].
    /// `data` with `len` bytes names the memory.
    pub fn try_now(
        &mut self,
        file: FileId,
        op: FileOp,
        data: Data,
        len: u64,
        patience: Patience,
    ) -> Option<i64> {
        match data {
            Data::One(segment) => {
                let segment = Segment { len: len as u32, ..segment };
                self.ring.try_now(file, op, one_or_none(&segment), patience)
            }
            Data::Run { .. } => {
                let list = SegmentList::gather(self.segments(data, len));
                self.ring.try_now(file, op, list.as_slice(), patience)
            }
        }
    }

    /// Start an operation on a file: see [`Ring::start`].
    ///
    /// # Errors
    /// [`RingFull`]: nothing was started.
    pub fn start(
        &mut self,
        io: Cookie,
        file: FileId,
        op: FileOp,
        data: Data,
        len: u64,
    ) -> Result<(), RingFull> {
        let id = IoId { queue: self.common.queue, cookie: io };
        match data {
            Data::One(segment) => {
                let segment = Segment { len: len as u32, ..segment };
                self.ring.start(id, file, op, one_or_none(&segment))
            }
            Data::Run { .. } => {
                let list = SegmentList::gather(self.segments(data, len));
                self.ring.start(id, file, op, list.as_slice())
            }
        }
    }

    /// End the held request `io` with result 0 at that time.
    pub fn timer(&mut self, io: Cookie, at: Nanos) {
        self.ring.timer(IoId { queue: self.common.queue, cookie: io }, at);
    }

    /// The held request `io` of this node is over, by something that the ring did not carry for it: it comes back as
    /// `reap` with this result once what the node is being told has been told.
    pub fn resume(&mut self, io: Cookie, result: i64) {
        self.common.resumed.push_back(Resumed { io, result, part: false });
    }

    /// The same with result 0 for a request that was carried out as part of another: it is not counted, as the other was.
    pub fn resume_part(&mut self, io: Cookie) {
        self.common.resumed.push_back(Resumed { io, result: 0, part: true });
    }

    /// A request of that kind is part of another from now on: count a merge.
    pub fn merged(&mut self, op: Op) {
        self.common.merges[op as usize] += 1;
        self.common.merged = true;
    }

    /// Where in the segment table the entries begin that the node asked for with [`Node::room`].
    pub fn room(&self) -> u32 {
        self.common.rooms[self.node.index()]
    }

    /// Put what `data` names, `len` bytes in all, into the node's entries from `at` on, the first `count` of which
    /// are a run that it goes on: memory that follows on the last entry becomes part of it. How many the run has now.
    pub fn gather(&mut self, at: u32, count: u16, data: Data, len: u64) -> u16 {
        match data {
            Data::One(segment) => self.gather_one(at, count, Segment { len: len as u32, ..segment }),
            Data::Run { .. } => {
                let list = SegmentList::gather(self.segments(data, len));
                list.as_slice().iter().fold(count, |count, segment| self.gather_one(at, count, *segment))
            }
        }
    }

    fn gather_one(&mut self, at: u32, count: u16, segment: Segment) -> u16 {
        let end = at as usize + usize::from(count);
        if count > 0 {
            let last = &mut self.common.segments[end - 1];
            let follows =
                last.region == segment.region && last.offset + u64::from(last.len) == segment.offset;
            if let (true, Some(len)) = (follows, last.len.checked_add(segment.len)) {
                last.len = len;
                return count;
            }
        }
        self.common.segments[end] = segment;
        count + 1
    }

    /// Have [`NodeEvent::Alarm`] come at that time. One at a time for each node.
    pub fn alarm(&mut self, at: Nanos) {
        self.ring.timer(IoId { queue: self.common.queue, cookie: alarm_cookie(self.node) }, at);
    }

    /// Have the alarm that was set come now.
    pub fn cancel_alarm(&mut self) {
        self.ring.cancel(IoId { queue: self.common.queue, cookie: alarm_cookie(self.node) });
    }

    /// What the node's sockets are added with.
    pub fn socket_owner(&self) -> SocketOwner {
        SocketOwner { queue: self.common.queue, node: self.node }
    }

    /// Ask the ring to end what it carries for `io`.
    pub fn cancel(&mut self, io: Cookie) {
        self.ring.cancel(IoId { queue: self.common.queue, cookie: io });
    }

    /// Say that something happened at this node to the request under `tag`, as it stands, if anyone listens.
    #[inline]
    pub fn probe(&mut self, tag: Tag, req: &Request, event: Event) {
        self.probe_at(tag, 0, req, event);
    }

    /// The same `depth` nodes down.
    #[inline]
    pub(crate) fn probe_at(&mut self, tag: Tag, depth: u8, req: &Request, event: Event) {
        if let Some(probe) = &mut self.common.probe {
            probe.point(self.ring.now(), Point::new(tag, self.node, depth, req, event));
        }
    }
}

/// A segment as a list: an empty one, as of a request without data, names no memory at all.
fn one_or_none(segment: &Segment) -> &[Segment] {
    if segment.len == 0 { &[] } else { std::slice::from_ref(segment) }
}
