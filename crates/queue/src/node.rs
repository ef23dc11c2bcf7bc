//! Nodes of a stack, and the context that they work in.

use crate::fifo::Fifo;
use crate::segments::{SegmentList, Segments, advance};
use crate::sockets::{NodeEvent, SocketOwner, alarm_cookie};
use crate::{
    Blocking, Event, FileId, FileOp, IoId, Nanos, Point, Probe, QueueId, QueueWaker, Ring, RingFull,
};
use block::{Cookie, Data, Op, Request, Segment, Status, Tag};

/// Number of a node in its stack. The number of a parent is below those of its children.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct NodeId(pub u8);

impl NodeId {
    /// The node that requests enter first.
    pub const TOP: NodeId = NodeId(0);

    pub(crate) const fn index(self) -> usize {
        self.0 as usize
    }
}

/// A node's answer: what happens to the request next.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Verdict {
    /// Submit it in its current state to this child. From `end_io` it is a retry.
    Down(NodeId),
    /// It is complete at this node: return to the nodes above.
    Up(Status),
    /// The node holds it until the kernel, a timer or child requests complete under its cookie, or until it
    /// resumes it.
    Held,
    /// Try again: the request is parked and submitted to this node again in the next turn of the loop, even
    /// if nothing happens until then. For operations that were interrupted and can be repeated at once. A
    /// node that answers this while it waits keeps its thread from sleeping.
    Busy,
    /// Something that it needs is in use. The request is parked and submitted to this node again in each turn
    /// in which its thread is awake anyway. The thread may sleep meanwhile, so whatever ends the wait has to
    /// wake it:
    ///
    /// - Resources of the thread (child requests of this node, entries and memory of the ring) are freed in a
    ///   turn of that thread. The next turn then starts without sleeping, and offers the request again.
    /// - For what other threads hold, the node listens on a [`WaitList`](crate::WaitList) first and checks
    ///   once more second.
    Blocked,
}

/// One element of a stack: a layer or a backend. An instance belongs to one hardware queue, so to one thread.
/// State of requests is in an array of the node, indexed by tag and allocated in `attach`.
///
/// A node that changes a request on the way down restores it before it answers `Up`; debug builds check that.
/// The memory that a request names is valid until its `Up`. A completed zero-copy read may name memory of the
/// backend: a node that submits it again first restores the data with which it arrived. A successful zone
/// append completes with the offset at which the data was written, on the device of the node below.
pub trait Node<R: Ring> {
    /// Called once, before all other methods, with the node's number and the number of tags (of the front-end
    /// and of children), for arrays indexed by tag.
    fn attach(&mut self, id: NodeId, tags: usize) {
        let _ = (id, tags);
    }

    /// Returns how many entries of the queue's segment table the node needs, for runs that it gathers: see
    /// [`Cx::own_segments`].
    fn own_segments(&self) -> u32 {
        0
    }

    /// Processes a new request. Its range is within the device; nothing else is guaranteed.
    fn submit(&mut self, io: Cookie, req: &mut Request, cx: &mut Cx<'_, R>) -> Verdict;

    /// Processes a request that the child named in `Down` completed.
    fn end_io(&mut self, io: Cookie, req: &mut Request, status: Status, cx: &mut Cx<'_, R>) -> Verdict {
        let _ = (io, req, cx);
        Verdict::Up(status)
    }

    /// Processes the completion of an operation for a held request: bytes moved, or a negative errno.
    fn reap(&mut self, io: Cookie, req: &mut Request, result: i64, cx: &mut Cx<'_, R>) -> Verdict {
        let _ = (io, cx);
        let expected = if req.op.moves_data() { req.len.0 } else { 0 };
        Verdict::Up(Status::from_result(result, expected))
    }

    /// Processes the completion of a child request that was spawned for a held request.
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

    /// Called at the end of each turn of the queue: start what was batched.
    fn commit(&mut self, cx: &mut Cx<'_, R>) {
        let _ = cx;
    }

    /// Cancels a held request that has timed out, if possible. It still completes once.
    fn cancel(&mut self, io: Cookie, cx: &mut Cx<'_, R>) {
        cx.cancel(io);
    }

    /// Processes an event of the node itself. Held requests that complete by it are resumed with
    /// [`Cx::resume`].
    fn event(&mut self, event: NodeEvent, cx: &mut Cx<'_, R>) {
        let _ = (event, cx);
    }

    /// Closes the node's sockets and alarm. It holds no request and gets no more. Returns whether all are
    /// closed; called again until then.
    fn close(&mut self, cx: &mut Cx<'_, R>) -> bool {
        let _ = cx;
        true
    }
}

/// How a child request is counted in the device's statistics.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ChildKind {
    /// A part of the parent: the parts are counted, the parent is not (the kernel counts requests after
    /// splitting).
    Piece,
    /// On behalf of the parent, as in a mirror: only the parent is counted.
    Copy,
}

/// All child requests of this node are in use: answer [`Verdict::Blocked`], or wait until one completes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NoChild;

#[derive(Clone, Copy)]
pub(crate) struct Spawn {
    pub(crate) tag: Tag,
    pub(crate) parent: Cookie,
    pub(crate) node: NodeId,
    pub(crate) kind: ChildKind,
    pub(crate) req: Request,
}

/// A held request that its node resumed.
#[derive(Clone, Copy)]
pub(crate) struct Resumed {
    pub(crate) io: Cookie,
    pub(crate) result: i64,
    /// It was merged into another request, which is counted in its place.
    pub(crate) part: bool,
}

/// State of a queue that nodes access through [`Cx`].
pub(crate) struct Common {
    pub(crate) queue: QueueId,
    pub(crate) segments: Box<[Segment]>,
    /// Spare child tags of each node, so that a layer can never take those that a layer below it needs.
    pub(crate) spare: Box<[Vec<Tag>]>,
    /// Children to start, in order. At most as many as child tags.
    pub(crate) spawned: Fifo<Spawn>,
    /// Held requests that their nodes resumed, with their results. At most as many as tags.
    pub(crate) resumed: Fifo<Resumed>,
    /// Start of each node's entries in the segment table.
    pub(crate) own_segments: Box<[u32]>,
    /// Merges that are not counted yet, by operation; `merged`: whether there are any.
    pub(crate) merges: [u64; Op::COUNT],
    pub(crate) merged: bool,
    pub(crate) probe: Option<Box<dyn Probe>>,
    pub(crate) waker: QueueWaker,
}

/// The context of a node: everything it may access besides itself and the request.
pub struct Cx<'a, R> {
    pub(crate) common: &'a mut Common,
    pub(crate) node: NodeId,
    /// The ring, for memory and files.
    pub ring: &'a mut R,
}

impl<R: Ring> Cx<'_, R> {
    /// Returns the time of this turn.
    pub fn now(&self) -> Nanos {
        self.ring.now()
    }

    /// The queue's waker: for a [`WaitList`](crate::WaitList), and for other threads that bring something to
    /// this node.
    pub fn waker(&self) -> &QueueWaker {
        &self.common.waker
    }

    /// Starts a child request of `parent`, for which the node has to answer `Held`. Its completion is passed
    /// to `child_end`. Children start after the node's verdict, in the order in which they were spawned.
    ///
    /// # Errors
    /// [`NoChild`] if none of the node's child requests is spare. Children that were spawned before are not
    /// affected.
    pub fn spawn(
        &mut self,
        parent: Cookie,
        node: NodeId,
        kind: ChildKind,
        req: Request,
    ) -> Result<(), NoChild> {
        let tag = self.common.spare[self.node.index()].pop().ok_or(NoChild)?;
        self.common.spawned.push(Spawn { tag, parent, node, kind, req });
        Ok(())
    }

    /// Returns the number of spare child requests of this node.
    pub fn spare_children(&self) -> usize {
        self.common.spare[self.node.index()].len()
    }

    /// Iterates over the memory that `data` names, `len` bytes in total.
    pub fn segments(&self, data: Data, len: u64) -> Segments<'_> {
        Segments::new(&self.common.segments, data, len)
    }

    /// Returns the part of `data` behind its first `skip_bytes` bytes.
    pub fn advance(&self, data: Data, skip_bytes: u64) -> Data {
        advance(&self.common.segments, data, skip_bytes)
    }

    /// Performs a file operation inline if it need not wait: see [`Ring::try_now`]. `data` with `len` bytes
    /// names the memory.
    pub fn try_now(
        &mut self,
        file: FileId,
        op: FileOp,
        data: Data,
        len: u64,
        blocking: Blocking,
    ) -> Option<i64> {
        match data {
            Data::One(segment) => {
                let segment = Segment { len: len as u32, ..segment };
                self.ring.try_now(file, op, one_or_none(&segment), blocking)
            }
            Data::Run { .. } => {
                let list = SegmentList::gather(self.segments(data, len));
                self.ring.try_now(file, op, list.as_slice(), blocking)
            }
        }
    }

    /// Batches a file operation for a held request: see [`Ring::try_batched`]. Data in several segments is not
    /// batched.
    pub fn try_batched(
        &mut self,
        io: Cookie,
        file: FileId,
        op: FileOp,
        data: Data,
        len: u64,
        blocking: Blocking,
    ) -> bool {
        let Data::One(segment) = data else { return false };
        let id = IoId { queue: self.common.queue, cookie: io };
        let segment = Segment { len: len as u32, ..segment };
        self.ring.try_batched(id, file, op, one_or_none(&segment), blocking)
    }

    /// Returns the duration of the last batch, in nanoseconds: see [`Ring::batch_ns`].
    pub fn batch_ns(&self) -> u64 {
        self.ring.batch_ns()
    }

    /// Starts a file operation for a held request: see [`Ring::start`].
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

    /// Sets a timer that completes the held request `io` with result 0 at that time.
    pub fn timer(&mut self, io: Cookie, at: Nanos) {
        self.ring.timer(IoId { queue: self.common.queue, cookie: io }, at);
    }

    /// Resumes the held request `io` of this node without an operation of the ring: `reap` is called with
    /// this result after the current call.
    pub fn resume(&mut self, io: Cookie, result: i64) {
        self.common.resumed.push(Resumed { io, result, part: false });
    }

    /// Resumes a request that was merged into another, with result 0. It is not counted, because the other
    /// one was.
    pub fn resume_part(&mut self, io: Cookie) {
        self.common.resumed.push(Resumed { io, result: 0, part: true });
    }

    /// Counts a merge of a request of that operation.
    pub fn merged(&mut self, op: Op) {
        self.common.merges[op as usize] += 1;
        self.common.merged = true;
    }

    /// Returns the start of the node's entries in the segment table, which it requested with
    /// [`Node::own_segments`].
    pub fn own_segments(&self) -> u32 {
        self.common.own_segments[self.node.index()]
    }

    /// Appends the memory that `data` names, `len` bytes in total, to the run of `count` entries at `at` in
    /// the node's part of the segment table. Memory that is adjacent to the last entry is merged into it.
    /// Returns the new number of entries.
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

    /// Sets the node's alarm: [`NodeEvent::Alarm`] comes at that time. Each node has one alarm.
    pub fn alarm(&mut self, at: Nanos) {
        self.ring.timer(IoId { queue: self.common.queue, cookie: alarm_cookie(self.node) }, at);
    }

    /// Makes the alarm that was set come now.
    pub fn cancel_alarm(&mut self) {
        self.ring.cancel(IoId { queue: self.common.queue, cookie: alarm_cookie(self.node) });
    }

    /// Returns the owner to add the node's sockets with.
    pub fn socket_owner(&self) -> SocketOwner {
        SocketOwner { queue: self.common.queue, node: self.node }
    }

    /// Cancels the operation or timer of `io`: see [`Ring::cancel`].
    pub fn cancel(&mut self, io: Cookie) {
        self.ring.cancel(IoId { queue: self.common.queue, cookie: io });
    }

    /// Reports an event of the request under `tag` at this node, if there is a probe.
    #[inline]
    pub fn probe(&mut self, tag: Tag, req: &Request, event: Event) {
        self.probe_at(tag, 0, req, event);
    }

    /// Reports an event at that depth of the request's path.
    #[inline]
    pub(crate) fn probe_at(&mut self, tag: Tag, depth: u8, req: &Request, event: Event) {
        if let Some(probe) = &mut self.common.probe {
            probe.point(self.ring.now(), Point::new(tag, self.node, depth, req, event));
        }
    }

    /// Reports a request that this node was handed, with the request that it is a child of.
    #[inline]
    pub(crate) fn probe_entry(
        &mut self,
        tag: Tag,
        parent: Option<Tag>,
        depth: u8,
        req: &Request,
        event: Event,
    ) {
        if let Some(probe) = &mut self.common.probe {
            let point = Point::new(tag, self.node, depth, req, event);
            probe.point(self.ring.now(), Point { parent, ..point });
        }
    }
}

/// Returns a segment as a list, which is empty for an empty segment.
fn one_or_none(segment: &Segment) -> &[Segment] {
    if segment.len == 0 { &[] } else { std::slice::from_ref(segment) }
}
