//! The verdict loop: one hardware queue.
//!
//! Owner: the thread whose ring it is used with. What is here: the slots, the loop that carries
//! requests from verdict to verdict, children, parking, freezing, timeouts, and counting. What is not:
//! waiting. The loop that owns ring and queue calls [`Queue::complete`] for what the ring finished,
//! [`Queue::submit`] for what the front-end brings, then [`Queue::turn`], then takes what is
//! [`done`](Queue::done), reads the clock and calls [`Queue::account`].

use crate::node::{Common, Spawn};
use crate::slow::SlowNotes;
use crate::stats::Ended;
use crate::{ChildKind, Cx, Event, Nanos, Node, NodeId, Point, Probe, QueueId, QueueStats, Ring, Verdict};
use block::{Bytes, Cookie, Data, Op, Request, Segment, Status, Tag};
use guard::Guard;
use intact::Intact;
use seats::{Seat, Seats};
use std::collections::VecDeque;
use std::sync::Arc;
pub use timeouts::TimedOut;
use timeouts::Timeouts;

mod guard;
mod intact;
mod outside;
mod replace;
mod seats;
#[cfg(test)]
pub(crate) mod tests;
mod timeouts;

/// The most nodes on one request's path: layers and a backend.
pub const DEPTH_MAX: usize = 8;
/// How often a request may be sent down once more in one carry before it is parked for a turn, so that a retry loop
/// cannot starve the queue. A stack of depth 8 that retries each of its paths once stays well below.
const RETRIES_MAX: u32 = 64;

/// Whom a request belongs to, handed back when it is done: which front-end of the thread in the top four bits, and
/// a number of its own.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Owner(pub u32);

impl Owner {
    const INDEX_BITS: u32 = 28;

    /// Number `index`, below 2^28, of front-end `front`, below 16.
    pub const fn new(front: u8, index: u32) -> Owner {
        debug_assert!(front < 16 && index < 1 << Owner::INDEX_BITS);
        Owner((front as u32) << Owner::INDEX_BITS | index)
    }

    /// Which front-end.
    pub const fn front(self) -> u8 {
        (self.0 >> Owner::INDEX_BITS) as u8
    }

    /// Its own number.
    pub const fn index(self) -> u32 {
        self.0 & ((1 << Owner::INDEX_BITS) - 1)
    }
}

/// A request that is over.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Done {
    /// Its tag, which is the front-end's to [`release`](Queue::release).
    pub tag: Tag,
    /// Whose it was.
    pub owner: Owner,
    /// How it ended.
    pub status: Status,
}

/// The sizes of a queue.
#[derive(Clone, Copy, Debug)]
pub struct QueueConfig {
    /// Its number among the queues of its thread.
    pub id: QueueId,
    /// Front-end requests in flight at most: queue depth, 1…4096.
    pub depth: u16,
    /// Segments that one request's data may have: entries of the segment table for each tag.
    pub segments_per_tag: u16,
    /// Requests that take longer are cancelled; `None`: never. See [`Queue::set_timeout`].
    pub timeout_ns: Option<u64>,
}

/// What is wrong with a stack.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum StackError {
    /// There are no nodes, or more than can be numbered.
    #[error("a stack has 1 to 255 nodes, not {0}")]
    NodeCount(usize),
    /// Front-end tags and children together exceed what a tag can number.
    #[error("queue depth and child requests come to {0}; at most 65536 fit")]
    Tags(usize),
}

/// The nodes of a device, top first, with the child requests that each may have under way.
pub struct Stack<R: Ring> {
    nodes: Vec<(Box<dyn Node<R>>, u16, bool)>,
}

impl<R: Ring> Default for Stack<R> {
    fn default() -> Self {
        Stack { nodes: Vec::new() }
    }
}

impl<R: Ring> Stack<R> {
    /// Add a node below those there are; its number is how many there were. `children`: how many child
    /// requests it may have under way at once, all its requests together.
    pub fn layer(&mut self, node: Box<dyn Node<R>>, children: u16) -> NodeId {
        self.push(node, children, false)
    }

    /// Add a node that has no child: the request is *issued* when it gets there.
    pub fn backend(&mut self, node: Box<dyn Node<R>>) -> NodeId {
        self.push(node, 0, true)
    }

    fn push(&mut self, node: Box<dyn Node<R>>, children: u16, leaf: bool) -> NodeId {
        let id = NodeId(self.nodes.len().min(255) as u8);
        self.nodes.push((node, children, leaf));
        id
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    Free,
    Moving,
    Held,
    Parked,
}

#[derive(Clone)]
struct Slot {
    req: Request,
    start: Nanos,
    /// The request that spawned this one; `None` for the front-end's.
    parent: Option<Cookie>,
    generation: u32,
    owner: Owner,
    path: [NodeId; DEPTH_MAX],
    depth: u8,
    intact: Intact,
    state: State,
    /// It, or what it was split into, is a request in the statistics' sense.
    counted: bool,
    /// It was split: its pieces are counted in its place.
    replaced: bool,
    /// How often its timeout has passed, and its holder was asked to give up.
    expired: u8,
    /// It, or what it is a child of, was held back while the queue was frozen, until `entered`.
    was_held_back: bool,
    entered: Nanos,
}

impl Slot {
    const FREE: Slot = Slot {
        req: Request::flush(),
        start: Nanos(0),
        parent: None,
        generation: 0,
        owner: Owner(0),
        path: [NodeId::TOP; DEPTH_MAX],
        depth: 0,
        intact: Intact::NEW,
        state: State::Free,
        counted: true,
        replaced: false,
        expired: 0,
        was_held_back: false,
        entered: Nanos(0),
    };

    /// When it entered the stack.
    fn entered(&self) -> Nanos {
        if self.was_held_back { self.entered } else { self.start }
    }
}

/// A stack's nodes, attached, and what a queue needs for them.
struct Built<R: Ring> {
    seats: Seats<R>,
    /// Child tags of each node.
    spare: Box<[Vec<Tag>]>,
    /// Where in the segment table the entries of each node begin, behind those of tags; and its length.
    rooms: Box<[u32]>,
    segments: usize,
    /// Tags in all: the front-end's, then those of children.
    tags: usize,
}

impl<R: Ring> Built<R> {
    fn new(stack: Stack<R>, depth: u16, segments_per_tag: u16) -> Result<Built<R>, StackError> {
        let count = stack.nodes.len();
        if count == 0 || count > 255 {
            return Err(StackError::NodeCount(count));
        }
        let tags = usize::from(depth) + stack.nodes.iter().map(|n| usize::from(n.1)).sum::<usize>();
        if tags > 1 << 16 {
            return Err(StackError::Tags(tags));
        }
        let mut next_child = depth;
        let (mut seats, mut spare, mut rooms) = (Vec::new(), Vec::new(), Vec::new());
        let mut segments = tags * usize::from(segments_per_tag);
        for (number, (mut node, children, is_leaf)) in stack.nodes.into_iter().enumerate() {
            node.attach(NodeId(number as u8), tags);
            // 65536 tags of 65535 entries, and those of 255 nodes that have some, stay below 2^32 in earnest.
            rooms.push(segments as u32);
            segments += node.room() as usize;
            seats.push(Seat::new(node, is_leaf));
            // Wraps at most where nothing is left to number.
            let end = next_child.wrapping_add(children);
            spare.push((0..children).rev().map(|child| Tag(next_child + child)).collect());
            next_child = end;
        }
        Ok(Built { seats: Seats::new(seats), spare: spare.into(), rooms: rooms.into(), segments, tags })
    }
}

/// A stack that fits a queue, and can be put in the place of the one there is without anything that may fail: see
/// [`Queue::prepare`].
pub struct Prepared<R: Ring>(Built<R>);

/// One hardware queue.
pub struct Queue<R: Ring> {
    slots: Box<[Slot]>,
    seats: Seats<R>,
    common: Common,
    free: Vec<Tag>,
    parked: VecDeque<Tag>,
    /// Submitted while frozen, in order.
    waiting: VecDeque<Tag>,
    done: Vec<Done>,
    ended: Vec<Ended>,
    in_flight: usize,
    /// A parked request is to be offered again in the next turn, even if nothing happens until then.
    must_retry: bool,
    /// A turn got further than offering parked requests in vain: what others wait for may be free.
    moved: bool,
    frozen: bool,
    /// Somebody listens.
    watched: bool,
    /// There is a guard.
    guarded: bool,
    /// Keeps writes from those that write parts of blocks; none: nobody does.
    guard: Option<Box<Guard>>,
    /// What is noted of requests; none: nobody looks for slow ones.
    slow: Option<Box<SlowNotes>>,
    depth: u16,
    /// So many of the first tags are named by the front-end, and never free.
    named: u16,
    segments_per_tag: u16,
    timeouts: Timeouts,
    stats: Arc<QueueStats>,
}

impl<R: Ring> Queue<R> {
    /// A queue over a stack. Everything it will ever need is made here.
    ///
    /// # Errors
    /// [`StackError`] when the numbers do not fit.
    pub fn new(config: QueueConfig, stack: Stack<R>) -> Result<Self, StackError> {
        let Built { seats, spare, rooms, segments, tags } =
            Built::new(stack, config.depth, config.segments_per_tag)?;
        Ok(Queue {
            slots: vec![Slot::FREE; tags].into(),
            seats,
            common: Common {
                queue: config.id,
                segments: vec![Segment::EMPTY; segments].into(),
                spare,
                spawned: VecDeque::with_capacity(tags),
                resumed: VecDeque::new(),
                rooms,
                merges: [0; Op::COUNT],
                merged: false,
                probe: None,
            },
            free: (0..config.depth).rev().map(Tag).collect(),
            parked: VecDeque::with_capacity(tags),
            waiting: VecDeque::with_capacity(config.depth.into()),
            done: Vec::with_capacity(config.depth.into()),
            ended: Vec::with_capacity(tags),
            in_flight: 0,
            must_retry: false,
            moved: false,
            frozen: false,
            watched: false,
            guarded: false,
            guard: None,
            slow: None,
            depth: config.depth,
            named: 0,
            segments_per_tag: config.segments_per_tag,
            timeouts: Timeouts::new(config.timeout_ns),
            stats: Arc::default(),
        })
    }

    /// Its number among the queues of its thread.
    pub fn id(&self) -> QueueId {
        self.common.queue
    }

    /// Its counters, for whoever reads them.
    pub fn stats(&self) -> &Arc<QueueStats> {
        &self.stats
    }

    /// Requests of the front-end that are under way or wait for a thaw.
    pub fn in_flight(&self) -> usize {
        self.in_flight
    }

    /// Let someone listen to the life of requests, or nobody.
    pub fn set_probe(&mut self, probe: Option<Box<dyn Probe>>) {
        self.watched = probe.is_some();
        self.common.probe = probe;
    }

    /// Leave the first `count` tags to a front-end that names requests itself, as a host's driver does: they are
    /// submitted under without being taken, once they are done, and are never released. Call it on a queue that
    /// is new; [`tag`](Queue::tag) gives out the others.
    ///
    /// # Panics
    /// When the queue has fewer tags.
    pub fn leave_tags(&mut self, count: u16) {
        assert!(count <= self.depth, "{count} tags of {} cannot be left to a front-end", self.depth);
        self.free.retain(|tag| tag.0 >= count);
        self.named = count;
    }

    /// Take a free tag. `None`: the queue is full.
    #[inline]
    pub fn tag(&mut self) -> Option<Tag> {
        self.free.pop()
    }

    /// Give back a tag that is done, or that was taken and not used.
    #[inline]
    pub fn release(&mut self, tag: Tag) {
        debug_assert!(tag.0 < self.depth && self.slots[tag.index()].state == State::Free);
        debug_assert!(tag.0 >= self.named, "tag {tag:?} is the front-end's own");
        self.free.push(tag);
    }

    /// The request that a tag last carried, as the front-end submitted it save for data that was lent, and
    /// for the offset of a zone append that ended well, which is where the data went.
    #[inline]
    pub fn request(&self, tag: Tag) -> &Request {
        &self.slots[tag.index()].req
    }

    /// Name several segments as one request's data. They stay while the tag is in use. `None` when there
    /// are more than the queue was made for.
    pub fn run(&mut self, tag: Tag, segments: &[Segment]) -> Option<Data> {
        let room = usize::from(self.segments_per_tag);
        let start = tag.index() * room;
        match segments {
            [] => Some(Data::NONE),
            [one] => Some(Data::One(*one)),
            _ if segments.len() > room => None,
            _ => {
                self.common.segments[start..start + segments.len()].copy_from_slice(segments);
                Some(Data::Run { start: start as u32, count: segments.len() as u16, skip: 0 })
            }
        }
    }

    /// The memory that a request's data names, piece by piece.
    pub fn segments(&self, data: Data, len: u64) -> crate::Segments<'_> {
        crate::Segments::new(&self.common.segments, data, len)
    }

    /// Start a request under a tag that was taken. Its range must lie within the device.
    ///
    /// # Panics
    /// When the tag is in use: that is our own bug.
    #[inline]
    pub fn submit(&mut self, tag: Tag, owner: Owner, req: Request, ring: &mut R) {
        let slot = &mut self.slots[tag.index()];
        assert!(slot.state == State::Free, "tag {tag:?} is in use");
        slot.req = req;
        slot.owner = owner;
        slot.start = ring.now();
        // It counts and has no parent: its tag is never a child's.
        slot.expired = 0;
        slot.was_held_back = false;
        slot.state = State::Moving;
        if self.in_flight == 0 {
            self.stats.in_flight(1, slot.start);
            self.timeouts.begins();
        }
        self.in_flight += 1;
        if self.watched | self.frozen | self.guarded {
            return self.submit_unusual(tag, ring);
        }
        self.carry_probed::<false>(tag, Verdict::Down(NodeId::TOP), ring);
        if !self.common.spawned.is_empty() {
            self.start_children(ring);
        }
    }

    /// The same where somebody listens or writes may have to wait, or while requests are held back.
    #[cold]
    fn submit_unusual(&mut self, tag: Tag, ring: &mut R) {
        let slot = &mut self.slots[tag.index()];
        if let Some(probe) = &mut self.common.probe {
            probe.point(ring.now(), Point::new(tag, NodeId::TOP, 0, &slot.req, Event::Queued));
        }
        if self.frozen {
            slot.state = State::Parked;
            self.waiting.push_back(tag);
            return;
        }
        if self.may_enter(tag) {
            self.advance(tag, Verdict::Down(NodeId::TOP), ring);
        }
    }

    /// What the ring carried under `cookie` is over: bytes moved, or a negative errno.
    ///
    /// # Panics
    /// When the cookie is not that of a held request: an answer came late or twice, and memory may
    /// already belong to another request.
    #[inline]
    pub fn complete(&mut self, cookie: Cookie, result: i64, ring: &mut R) {
        let slot = &mut self.slots[cookie.tag.index()];
        if slot.state != State::Held || slot.generation != cookie.generation {
            return self.alarm(cookie, ring);
        }
        slot.state = State::Moving;
        self.seats.go_on(&slot.path[..usize::from(slot.depth)], ring.now());
        let holder = slot.path[usize::from(slot.depth) - 1];
        if let Some(slow) = &mut self.slow {
            slow.go_on(cookie, slot.start, holder, slot.depth, ring.now());
        }
        let mut cx = Cx { common: &mut self.common, node: holder, ring };
        let verdict = self.seats[holder].node.reap(cookie, &mut slot.req, result, &mut cx);
        self.advance(cookie.tag, verdict, ring);
    }

    /// The end of a batch: offer what was parked again, once each, and let nodes start what they gathered.
    pub fn turn(&mut self, ring: &mut R) {
        self.must_retry = false;
        for _ in 0..self.parked.len() {
            let Some(tag) = self.parked.pop_front() else { break };
            let slot = &mut self.slots[tag.index()];
            slot.depth -= 1;
            slot.state = State::Moving;
            self.seats.go_on(&slot.path[..usize::from(slot.depth)], ring.now());
            let node = slot.path[usize::from(slot.depth)];
            if let Some(slow) = &mut self.slow {
                let io = Cookie { tag, generation: slot.generation };
                slow.go_on(io, slot.start, node, slot.depth + 1, ring.now());
            }
            self.advance(tag, Verdict::Down(node), ring);
            self.moved |= self.slots[tag.index()].state != State::Parked;
        }
        if self.guarded {
            self.offer_guarded(ring);
        }
        if self.timeouts.is_to_be_armed {
            self.arm_timeouts(ring);
        }
        self.resume(ring);
        self.commit(ring);
        if !self.common.spawned.is_empty() || !self.common.resumed.is_empty() {
            self.resume_and_commit(ring);
        }
    }

    /// Requests that are over, each told once.
    pub fn done(&mut self) -> std::vec::Drain<'_, Done> {
        Queue::<R>::leave_guarded(&mut self.guard, &self.done);
        self.done.drain(..)
    }

    /// The same, all at once: what is over changes place with `into`, which must be empty.
    pub fn swap_done(&mut self, into: &mut Vec<Done>) {
        debug_assert!(into.is_empty());
        if self.guarded {
            Queue::<R>::leave_guarded(&mut self.guard, &self.done);
        }
        std::mem::swap(&mut self.done, into);
    }

    /// Whether [`turn`](Queue::turn) has something to offer again.
    pub fn has_parked(&self) -> bool {
        !self.parked.is_empty() || !self.common.resumed.is_empty() || !self.common.spawned.is_empty()
    }

    /// Count what ended since the last call, as having ended `now`.
    pub fn account(&mut self, now: Nanos) {
        if !self.ended.is_empty() {
            self.stats.count(&self.ended, now);
            self.ended.clear();
        }
        if std::mem::take(&mut self.common.merged) {
            self.stats.count_merges(&mut self.common.merges);
        }
        if self.slow.is_some() {
            self.find_slow(now);
        }
        self.stats.in_flight(self.in_flight, now);
        for (seat, counts) in self.seats.iter().zip(self.stats.nodes()) {
            counts.store(seat.counts(now));
        }
    }

    /// Hold back requests from now on. What is under way goes on: see [`is_drained`](Queue::is_drained).
    pub fn freeze(&mut self) {
        self.frozen = true;
    }

    /// Nothing is under way in the stack: it may be swapped, flushed or dropped.
    pub fn is_drained(&self) -> bool {
        self.in_flight == self.waiting.len() + self.guard.as_ref().map_or(0, |guard| guard.waiting())
    }

    /// Let go of those that were held back, in order. What the device is no longer long enough for ends with
    /// [`Status::IoError`]: whoever sent it was told of another size, and no node below looks at the end again.
    pub fn thaw(&mut self, size: Bytes, ring: &mut R) {
        self.frozen = false;
        if self.in_flight > 0 {
            self.timeouts.begins();
        }
        while let Some(tag) = self.waiting.pop_front() {
            let slot = &mut self.slots[tag.index()];
            (slot.was_held_back, slot.entered) = (true, ring.now());
            if slot.req.offset.0.saturating_add(slot.req.len.0) > size.0 {
                self.refuse(tag, ring);
                continue;
            }
            slot.state = State::Moving;
            if self.may_enter(tag) {
                self.advance(tag, Verdict::Down(NodeId::TOP), ring);
            }
        }
        self.refuse_guarded(size.0, ring);
    }

    /// A request that is held back ends before it enters the stack.
    #[cold]
    fn refuse(&mut self, tag: Tag, ring: &mut R) {
        let slot = &mut self.slots[tag.index()];
        let status = slot.end(Status::IoError, &mut self.ended);
        if let Some(probe) = &mut self.common.probe {
            probe.point(ring.now(), Point::new(tag, NodeId::TOP, 0, &slot.req, Event::Done { status }));
        }
        self.in_flight -= 1;
        self.done.push(Done { tag, owner: slot.owner, status });
    }

    /// Carry a request, and the children that it and they start, until each is held, parked or done.
    #[inline]
    fn advance(&mut self, tag: Tag, verdict: Verdict, ring: &mut R) {
        self.carry(tag, verdict, ring);
        if !self.common.spawned.is_empty() {
            self.start_children(ring);
        }
    }

    fn start_children(&mut self, ring: &mut R) {
        while let Some(Spawn { tag, parent, node, kind, req }) = self.common.spawned.pop_front() {
            let above = &mut self.slots[parent.tag.index()];
            debug_assert!(above.state == State::Held && above.generation == parent.generation);
            let (start, counted) = (above.start, above.counted && kind == ChildKind::Piece);
            let (was_held_back, entered) = (above.was_held_back, above.entered);
            above.replaced |= kind == ChildKind::Piece;
            let slot = &mut self.slots[tag.index()];
            debug_assert!(slot.state == State::Free);
            slot.req = req;
            slot.start = start;
            (slot.was_held_back, slot.entered) = (was_held_back, entered);
            slot.parent = Some(parent);
            slot.counted = counted;
            slot.replaced = false;
            slot.expired = 0;
            slot.state = State::Moving;
            if let Some(slow) = &mut self.slow {
                slow.spawned(parent.tag, tag, start);
            }
            self.carry(tag, Verdict::Down(node), ring);
        }
    }

    #[inline]
    fn carry(&mut self, tag: Tag, verdict: Verdict, ring: &mut R) {
        if !self.watched {
            self.carry_probed::<false>(tag, verdict, ring);
        } else {
            self.carry_probed::<true>(tag, verdict, ring);
        }
    }

    /// `PROBED`: whether someone listens, so that nobody who does not has to ask at every step.
    fn carry_probed<const PROBED: bool>(&mut self, mut tag: Tag, mut verdict: Verdict, ring: &mut R) {
        let mut slot = &mut self.slots[tag.index()];
        let mut cx = Cx { common: &mut self.common, node: NodeId::TOP, ring };
        let mut retries_left = RETRIES_MAX;
        loop {
            // By hand in this order: a table of jumps would take longer than most nodes do.
            verdict = if let Verdict::Up(status) = verdict {
                let depth = usize::from(slot.depth);
                slot.depth -= 1;
                slot.intact.leaves(slot.depth, &slot.req, status, slot.path[usize::from(slot.depth)]);
                if PROBED {
                    cx.node = slot.path[usize::from(slot.depth)];
                    let event = if self.seats[cx.node].leaf {
                        Event::Completed { status }
                    } else {
                        Event::Left { status }
                    };
                    cx.probe_at(tag, slot.depth + 1, &slot.req, event);
                }
                // None is above the first.
                if let Some(&above) = slot.path.get(depth.wrapping_sub(2)) {
                    cx.node = above;
                    let io = Cookie { tag, generation: slot.generation };
                    match self.seats[above].node.end_io(io, &mut slot.req, status, &mut cx) {
                        Verdict::Up(status) => Verdict::Up(status),
                        other => slot.retry(other, &mut self.seats, &mut retries_left),
                    }
                } else {
                    if self.ended.len() == self.ended.capacity() {
                        count_early(&self.stats, &mut self.ended, cx.now());
                    }
                    if status == Status::Requeue && slot.parent.is_none() {
                        return self.take_back(tag);
                    }
                    let status = slot.end(status, &mut self.ended);
                    let Some(parent) = slot.parent.take() else {
                        self.in_flight -= 1;
                        if PROBED {
                            cx.node = NodeId::TOP;
                            cx.probe_at(tag, 0, &slot.req, Event::Done { status });
                        }
                        return self.done.push(Done { tag, owner: slot.owner, status });
                    };
                    let child = slot.req;
                    slot = &mut self.slots[parent.tag.index()];
                    cx.node = slot.take_child_end(parent);
                    self.seats.go_on(&slot.path[..usize::from(slot.depth)], cx.now());
                    if let Some(slow) = &mut self.slow {
                        slow.child_ended(parent.tag, tag, slot.depth);
                        slow.go_on(parent, slot.start, cx.node, slot.depth, cx.now());
                        // Where it stays, it goes on resting from now.
                        slow.rest(parent.tag, slot.start, cx.now(), false);
                    }
                    cx.common.spare[cx.node.index()].push(tag);
                    tag = parent.tag;
                    let seat = &mut self.seats[cx.node];
                    let verdict = seat.node.child_end(parent, &mut slot.req, &child, status, &mut cx);
                    slot.retry(verdict, &mut self.seats, &mut retries_left)
                }
            } else if let Verdict::Down(node) = verdict {
                let seat = slot.enter(node, &mut self.seats);
                // Odd ones are alarms of nodes.
                slot.generation = slot.generation.wrapping_add(2);
                let io = Cookie { tag, generation: slot.generation };
                cx.node = node;
                if PROBED {
                    let event = if seat.leaf { Event::Issued } else { Event::Entered };
                    cx.probe_at(tag, slot.depth, &slot.req, event);
                }
                seat.node.submit(io, &mut slot.req, &mut cx)
            } else {
                if let Verdict::Held = verdict {
                    slot.state = State::Held;
                    self.seats.rest(&slot.path[..usize::from(slot.depth)], cx.now());
                    if let Some(slow) = &mut self.slow {
                        slow.rest(tag, slot.start, cx.now(), false);
                    }
                    return;
                }
                slot.state = State::Parked;
                self.must_retry |= verdict == Verdict::Busy;
                cx.node = slot.path[usize::from(slot.depth) - 1];
                // While it is parked it is not there: it will come again.
                self.seats[cx.node].entered -= 1;
                self.seats.rest(&slot.path[..usize::from(slot.depth) - 1], cx.now());
                if let Some(slow) = &mut self.slow {
                    slow.rest(tag, slot.start, cx.now(), true);
                }
                cx.probe_at(tag, slot.depth, &slot.req, Event::Requeued);
                return self.parked.push_back(tag);
            };
        }
    }
}

/// More ended in one turn than there are tags: pieces of requests that are cut.
#[cold]
fn count_early(stats: &QueueStats, ended: &mut Vec<Ended>, now: Nanos) {
    stats.count(ended, now);
    ended.clear();
}

impl Slot {
    /// The request goes down to a node.
    #[inline]
    fn enter<'a, R: Ring>(&mut self, node: NodeId, seats: &'a mut Seats<R>) -> &'a mut Seat<R> {
        self.path[usize::from(self.depth)] = node;
        self.intact.enters(self.depth, &self.req);
        self.depth += 1;
        // Where it goes now it counts itself, unless it is cut again there.
        self.replaced = false;
        let seat = &mut seats[node];
        seat.entered += 1;
        seat
    }

    /// What a node answers that has had it already: it may send it down once more. When it has done so too often in one
    /// go, the request waits there for the next turn.
    #[inline(never)]
    fn retry<R: Ring>(&mut self, verdict: Verdict, seats: &mut Seats<R>, retries_left: &mut u32) -> Verdict {
        let Verdict::Down(node) = verdict else { return verdict };
        if let Some(left) = retries_left.checked_sub(1) {
            *retries_left = left;
            return verdict;
        }
        self.enter(node, seats);
        Verdict::Busy
    }

    /// The request is over: free the slot and note it for the statistics. The status as its owner sees it.
    #[inline]
    fn end(&mut self, status: Status, ended: &mut Vec<Ended>) -> Status {
        let status = if self.expired > 0 && !status.is_ok() { Status::Timeout } else { status };
        self.state = State::Free;
        if self.counted && !self.replaced {
            ended.push(Ended {
                start: self.start,
                len: self.req.len.0,
                op: self.req.op,
                failed: !status.is_ok(),
            });
        }
        status
    }

    /// A child of the request that is held here has ended: take it up again. Who holds it.
    #[inline]
    fn take_child_end(&mut self, io: Cookie) -> NodeId {
        assert!(self.state == State::Held && self.generation == io.generation, "a child outlived {io:?}");
        self.state = State::Moving;
        self.path[usize::from(self.depth) - 1]
    }
}
