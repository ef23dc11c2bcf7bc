//! The verdict loop: one hardware queue.
//!
//! Owner: the thread whose ring it is used with. This module has the slots, the loop that moves requests from
//! verdict to verdict, children, parking, freezing, timeouts, and counting. It never waits. The loop that
//! owns ring and queue calls [`Queue::complete`] for completions of the ring and [`Queue::submit`] for
//! requests of the front-end, then [`Queue::turn`], then takes the completed requests from
//! [`done`](Queue::done), reads the clock and calls [`Queue::account`].

use crate::fifo::Fifo;
use crate::node::Common;
use crate::slow::SlowNotes;
use crate::stats::Ended;
use crate::{
    CommandPoint, Event, Nanos, Node, NodeId, Point, Probe, QueueId, QueueStats, QueueWaker, Ring, Verdict,
};
use bitflags::bitflags;
use block::{Bytes, Cookie, Data, Op, Request, Segment, Status, Tag};
use guard::Guard;
use node_table::{NodeEntry, NodeTable};
use restore_check::RestoreCheck;
use std::collections::VecDeque;
use std::sync::Arc;
pub use timeouts::TimedOut;
use timeouts::Timeouts;

mod carry;
mod guard;
mod node_table;
mod outside;
mod replace;
mod restore_check;
#[cfg(test)]
pub(crate) mod tests;
mod timeouts;

/// Most nodes on the path of a request: layers and a backend.
pub const DEPTH_MAX: usize = 8;
/// Most retries of a request in one turn before it is parked until the next, so that a retry loop cannot
/// starve the queue. A stack of depth 8 that retries each of its paths once stays well below.
const RETRIES_MAX: u32 = 64;

/// Owner of a request, returned when it is done: the front-end of the thread in the top four bits, and a
/// number that the front-end chose.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Owner(pub u32);

impl Owner {
    const INDEX_BITS: u32 = 28;

    /// Returns the owner with number `index`, below 2^28, of front-end `front`, below 16.
    pub const fn new(front: u8, index: u32) -> Owner {
        debug_assert!(front < 16 && index < 1 << Owner::INDEX_BITS);
        Owner((front as u32) << Owner::INDEX_BITS | index)
    }

    /// Returns the number of the front-end.
    pub const fn front(self) -> u8 {
        (self.0 >> Owner::INDEX_BITS) as u8
    }

    /// Returns the number that the front-end chose.
    pub const fn index(self) -> u32 {
        self.0 & ((1 << Owner::INDEX_BITS) - 1)
    }
}

/// A completed request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Done {
    /// Its tag, which the front-end has to [`release`](Queue::release).
    pub tag: Tag,
    /// Owner of the request.
    pub owner: Owner,
    /// Status of the request.
    pub status: Status,
}

/// The sizes of a queue.
#[derive(Clone, Copy, Debug)]
pub struct QueueConfig {
    /// Number among the queues of the thread.
    pub id: QueueId,
    /// Queue depth: most front-end requests in flight, 1 to 4096.
    pub depth: u16,
    /// Most segments of a request's data: entries of the segment table per tag.
    pub segments_per_tag: u16,
    /// Nanoseconds after which requests are cancelled; `None`: never. See [`Queue::set_timeout`].
    pub timeout_ns: Option<u64>,
}

/// Why a stack does not fit a queue.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum StackError {
    /// The stack has no nodes, or more than can be numbered.
    #[error("a stack has 1 to 255 nodes, not {0}")]
    NodeCount(usize),
    /// Front-end tags and child requests together exceed the numbers of tags.
    #[error("queue depth and child requests come to {0}; at most 65536 fit")]
    Tags(usize),
}

/// The nodes of a device, top first, with the number of child requests that each may have in flight.
pub struct Stack<R: Ring> {
    nodes: Vec<(Box<dyn Node<R>>, u16, bool)>,
}

impl<R: Ring> Default for Stack<R> {
    fn default() -> Self {
        Stack { nodes: Vec::new() }
    }
}

impl<R: Ring> Stack<R> {
    /// Adds a layer below the existing nodes. Returns its number, which is the number of nodes before.
    /// `children`: most child requests in flight for all its requests together.
    pub fn layer(&mut self, node: Box<dyn Node<R>>, children: u16) -> NodeId {
        self.push(node, children, false)
    }

    /// Adds a node without children: a request that reaches it is *issued*.
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
    /// The request that spawned this one; `None`: the front-end submitted it.
    parent: Option<Cookie>,
    generation: u32,
    owner: Owner,
    path: [NodeId; DEPTH_MAX],
    depth: u8,
    restore_check: RestoreCheck,
    state: State,
    marks: Marks,
    /// How often it was cancelled because its timeout passed; undefined unless `EXPIRED`.
    expired: u8,
    /// When the queue was thawed; undefined unless `HELD_BACK`.
    thawed: Nanos,
}

bitflags! {
    /// Unusual properties of a request. Empty for nearly all, so that one comparison suffices.
    #[derive(Clone, Copy, PartialEq, Eq)]
    struct Marks: u8 {
        /// The statistics do not count it: it is a copy on behalf of another request.
        const UNCOUNTED = 1;
        /// It was split or merged: other requests are counted in its place.
        const REPLACED = 1 << 1;
        /// It, or its parent, was held back while the queue was frozen.
        const HELD_BACK = 1 << 2;
        /// Its timeout has passed.
        const EXPIRED = 1 << 3;
    }
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
        restore_check: RestoreCheck::NEW,
        state: State::Free,
        marks: Marks::empty(),
        expired: 0,
        thawed: Nanos(0),
    };

    /// Returns how often it was cancelled.
    fn times_expired(&self) -> u8 {
        if self.marks.contains(Marks::EXPIRED) { self.expired } else { 0 }
    }

    /// Returns when it entered the stack.
    fn entered(&self) -> Nanos {
        if self.marks.contains(Marks::HELD_BACK) { self.thawed } else { self.start }
    }
}

bitflags! {
    /// Modes that make requests take the slow path through [`Queue::submit`]. Normally empty.
    #[derive(Clone, Copy)]
    struct Modes: u8 {
        /// There is a probe, or slow requests are recorded.
        const WATCHED = 1;
        /// Requests are held back.
        const FROZEN = 1 << 1;
        /// Writes take the device's range lock.
        const GUARDED = 1 << 2;
        /// The probe records commands of the front-end. Only with `WATCHED`.
        const COMMANDS = 1 << 3;
    }
}

/// The attached nodes of a stack, and what a queue needs for them.
struct Built<R: Ring> {
    nodes: NodeTable<R>,
    /// Child tags of each node.
    spare: Box<[Vec<Tag>]>,
    /// Start of each node's entries in the segment table, behind those of tags; `segments`: the length of the
    /// table.
    own_segments: Box<[u32]>,
    segments: usize,
    /// Number of tags: the front-end's, then those of children.
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
        let (mut nodes, mut spare, mut own_segments) = (Vec::new(), Vec::new(), Vec::new());
        let mut segments = tags * usize::from(segments_per_tag);
        for (number, (mut node, children, is_leaf)) in stack.nodes.into_iter().enumerate() {
            node.attach(NodeId(number as u8), tags);
            // 65536 tags with 65535 entries each, and the entries of 255 nodes, stay below 2^32 in practice.
            own_segments.push(segments as u32);
            segments += node.own_segments() as usize;
            nodes.push(NodeEntry::new(node, is_leaf));
            // Wraps only if no tag is left.
            let end = next_child.wrapping_add(children);
            spare.push((0..children).rev().map(|child| Tag(next_child + child)).collect());
            next_child = end;
        }
        Ok(Built {
            nodes: NodeTable::new(nodes),
            spare: spare.into(),
            own_segments: own_segments.into(),
            segments,
            tags,
        })
    }
}

/// A stack that was built for a queue, to which the queue can switch without fail: see [`Queue::prepare`].
pub struct Prepared<R: Ring>(Built<R>);

/// One hardware queue.
pub struct Queue<R: Ring> {
    slots: Box<[Slot]>,
    nodes: NodeTable<R>,
    common: Common,
    free: Vec<Tag>,
    parked: VecDeque<Tag>,
    /// Submitted while frozen, in order.
    waiting: VecDeque<Tag>,
    done: Vec<Done>,
    ended: Vec<Ended>,
    in_flight: usize,
    /// A parked request has to be offered again in the next turn, even if nothing happens until then.
    must_retry: bool,
    /// Something other than offering parked requests in vain happened: other requests may proceed.
    moved: bool,
    modes: Modes,
    /// The device's range lock. `None`: the device receives no sub-block writes.
    guard: Option<Box<Guard>>,
    /// Notes on slow requests. `None`: they are not recorded.
    slow: Option<Box<SlowNotes>>,
    depth: u16,
    /// Number of first tags that a front-end assigns itself; they are never free.
    reserved: u16,
    segments_per_tag: u16,
    timeouts: Timeouts,
    stats: Arc<QueueStats>,
}

impl<R: Ring> Queue<R> {
    /// Builds a queue over a stack, and allocates everything that it will need.
    ///
    /// # Errors
    /// [`StackError`] if the stack does not fit.
    pub fn new(config: QueueConfig, stack: Stack<R>) -> Result<Self, StackError> {
        let Built { nodes, spare, own_segments, segments, tags } =
            Built::new(stack, config.depth, config.segments_per_tag)?;
        Ok(Queue {
            slots: vec![Slot::FREE; tags].into(),
            nodes,
            common: Common {
                queue: config.id,
                segments: vec![Segment::EMPTY; segments].into(),
                spare,
                spawned: Fifo::with_capacity(tags),
                resumed: Fifo::with_capacity(tags),
                own_segments,
                merges: [0; Op::COUNT],
                merged: false,
                probe: None,
                waker: Arc::new(|| {}),
            },
            free: (0..config.depth).rev().map(Tag).collect(),
            parked: VecDeque::with_capacity(tags),
            waiting: VecDeque::with_capacity(config.depth.into()),
            done: Vec::with_capacity(config.depth.into()),
            ended: Vec::with_capacity(tags),
            in_flight: 0,
            must_retry: false,
            moved: false,
            modes: Modes::empty(),
            guard: None,
            slow: None,
            depth: config.depth,
            reserved: 0,
            segments_per_tag: config.segments_per_tag,
            timeouts: Timeouts::new(config.timeout_ns),
            stats: Arc::default(),
        })
    }

    /// Returns the number among the queues of the thread.
    pub fn id(&self) -> QueueId {
        self.common.queue
    }

    /// Returns the counters, which any thread may read.
    pub fn stats(&self) -> &Arc<QueueStats> {
        &self.stats
    }

    /// Sets how other threads wake this queue when its requests wait for them: `waker` makes the queue take a
    /// turn, and wakes its thread if it sleeps. Without one, the owner has to take turns by itself while
    /// requests are held. Set it before the first request.
    pub fn set_waker(&mut self, waker: QueueWaker) {
        self.common.waker = waker;
    }

    /// Returns the number of front-end requests that are in flight or held back.
    pub fn in_flight(&self) -> usize {
        self.in_flight
    }

    /// Sets or removes the probe that observes requests.
    pub fn set_probe(&mut self, probe: Option<Box<dyn Probe>>) {
        self.modes.set(Modes::COMMANDS, probe.as_ref().is_some_and(|probe| probe.wants_commands()));
        self.common.probe = probe;
        self.modes.set(Modes::WATCHED, self.common.probe.is_some() || self.slow.is_some());
    }

    /// Whether commands of the front-end are to be reported: [`command`](Queue::command).
    #[inline]
    pub fn wants_commands(&self) -> bool {
        self.modes.contains(Modes::COMMANDS)
    }

    /// Reports an event of a command of the front-end to the probe.
    #[cold]
    pub fn command(&mut self, point: &CommandPoint, ring: &R) {
        if let Some(probe) = &mut self.common.probe {
            probe.command(ring.now(), point);
        }
    }

    /// Reserves the first `count` tags for a front-end that assigns tags itself, as a host's driver does.
    /// They are neither taken nor released. Call it on a new queue; [`tag`](Queue::tag) returns the others.
    ///
    /// # Panics
    /// If the queue has fewer tags.
    pub fn reserve_tags(&mut self, count: u16) {
        assert!(count <= self.depth, "{count} tags of {} cannot be reserved for a front-end", self.depth);
        self.free.retain(|tag| tag.0 >= count);
        self.reserved = count;
    }

    /// Takes a free tag. `None`: the queue is full.
    #[inline]
    pub fn tag(&mut self) -> Option<Tag> {
        self.free.pop()
    }

    /// Releases the tag of a completed request, or one that was not used.
    #[inline]
    pub fn release(&mut self, tag: Tag) {
        debug_assert!(tag.0 < self.depth && self.slots[tag.index()].state == State::Free);
        debug_assert!(tag.0 >= self.reserved, "tag {tag:?} is the front-end's own");
        self.free.push(tag);
    }

    /// Returns the last request of a tag as the front-end submitted it, except for the data of a zero-copy
    /// read and the offset of a successful zone append, which is where the data was written.
    #[inline]
    pub fn request(&self, tag: Tag) -> &Request {
        &self.slots[tag.index()].req
    }

    /// Stores segments as the data of one request, for as long as the tag is in use. `None`: there are more
    /// than [`segments_per_tag`](QueueConfig::segments_per_tag).
    pub fn run(&mut self, tag: Tag, segments: &[Segment]) -> Option<Data> {
        let segments_max = usize::from(self.segments_per_tag);
        let start = tag.index() * segments_max;
        match segments {
            [] => Some(Data::NONE),
            [one] => Some(Data::One(*one)),
            _ if segments.len() > segments_max => None,
            _ => {
                self.common.segments[start..start + segments.len()].copy_from_slice(segments);
                Some(Data::Run { start: start as u32, count: segments.len() as u16, skip: 0 })
            }
        }
    }

    /// Iterates over the memory that a request's data names.
    pub fn segments(&self, data: Data, len: u64) -> crate::Segments<'_> {
        crate::Segments::new(&self.common.segments, data, len)
    }

    /// Submits a request under a tag that was taken. Its range has to be within the device.
    ///
    /// # Panics
    /// If the tag is in use, which is a bug of the caller.
    #[inline(never)]
    pub fn submit(&mut self, tag: Tag, owner: Owner, req: Request, ring: &mut R) {
        let start = ring.now();
        if self.in_flight == 0 {
            self.stats.in_flight(1, start);
            self.timeouts.begins();
        }
        self.in_flight += 1;
        let modes = self.modes;
        let (mut parts, mut cx) = self.parts(ring);
        let slot = &mut parts.slots[tag.index()];
        assert!(slot.state == State::Free, "tag {tag:?} is in use");
        slot.req = req;
        slot.owner = owner;
        slot.start = start;
        // `parent` is empty: a front-end's tag is never a child's.
        slot.marks = Marks::empty();
        slot.state = State::Moving;
        if !modes.is_empty() {
            return self.submit_unusual(tag, ring);
        }
        let verdict = parts.begin(tag, NodeId::TOP, &mut cx);
        parts.carry::<false>(tag, verdict, &mut cx);
        if !self.common.spawned.is_empty() {
            self.start_children(ring);
        }
    }

    /// Continues `submit` in any of the [`Modes`].
    #[cold]
    fn submit_unusual(&mut self, tag: Tag, ring: &mut R) {
        let slot = &mut self.slots[tag.index()];
        if let Some(probe) = &mut self.common.probe {
            probe.point(ring.now(), Point::new(tag, NodeId::TOP, 0, &slot.req, Event::Queued));
        }
        if self.modes.contains(Modes::FROZEN) {
            slot.state = State::Parked;
            self.waiting.push_back(tag);
            return;
        }
        if self.may_enter(tag) {
            self.advance(tag, Verdict::Down(NodeId::TOP), ring);
        }
    }

    /// Passes on a completion of the ring: bytes moved, or a negative errno.
    ///
    /// # Panics
    /// If no request is held under that cookie: the completion is late or a duplicate, and its memory may
    /// already belong to another request.
    pub fn complete(&mut self, cookie: Cookie, result: i64, ring: &mut R) {
        let is_watched = self.modes.contains(Modes::WATCHED);
        let (mut parts, mut cx) = self.parts(ring);
        if !parts.holds(cookie) {
            return self.alarm(cookie, ring);
        }
        let verdict = parts.reap(cookie, result, is_watched, &mut cx);
        if is_watched {
            self.carry_observed(cookie.tag, verdict, ring);
        } else {
            parts.carry::<false>(cookie.tag, verdict, &mut cx);
        }
        if !self.common.spawned.is_empty() {
            self.start_children(ring);
        }
    }

    /// Ends a batch: offers parked requests again, once each, and lets nodes start what they batched.
    pub fn turn(&mut self, ring: &mut R) {
        self.must_retry = false;
        for _ in 0..self.parked.len() {
            let Some(tag) = self.parked.pop_front() else { break };
            let slot = &mut self.slots[tag.index()];
            slot.depth -= 1;
            slot.state = State::Moving;
            self.nodes.proceed(&slot.path[..usize::from(slot.depth)], ring.now());
            let node = slot.path[usize::from(slot.depth)];
            if let Some(slow) = &mut self.slow {
                let io = Cookie { tag, generation: slot.generation };
                slow.proceed(io, slot.start, node, slot.depth + 1, ring.now());
            }
            self.advance(tag, Verdict::Down(node), ring);
            self.moved |= self.slots[tag.index()].state != State::Parked;
        }
        if self.modes.contains(Modes::GUARDED) {
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

    /// Takes the completed requests.
    pub fn done(&mut self) -> std::vec::Drain<'_, Done> {
        Queue::<R>::leave_guarded(&mut self.guard, &self.done);
        self.done.drain(..)
    }

    /// Takes the completed requests by swapping their list with `into`, which has to be empty.
    pub fn swap_done(&mut self, into: &mut Vec<Done>) {
        debug_assert!(into.is_empty());
        if self.modes.contains(Modes::GUARDED) {
            Queue::<R>::leave_guarded(&mut self.guard, &self.done);
        }
        std::mem::swap(&mut self.done, into);
    }

    /// Whether [`turn`](Queue::turn) has requests to offer again.
    pub fn has_parked(&self) -> bool {
        !self.parked.is_empty() || !self.common.resumed.is_empty() || !self.common.spawned.is_empty()
    }

    /// Counts the requests that completed since the last call, as completed at `now`.
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
        for (entry, counts) in self.nodes.iter().zip(self.stats.nodes()) {
            counts.store(entry.counts(now));
        }
    }

    /// Holds back new requests from now on. Those in flight continue: see [`is_drained`](Queue::is_drained).
    pub fn freeze(&mut self) {
        self.modes.insert(Modes::FROZEN);
    }

    /// Whether no request is in the stack, so that it may be replaced, flushed or dropped.
    pub fn is_drained(&self) -> bool {
        self.in_flight == self.waiting.len() + self.guard.as_ref().map_or(0, |guard| guard.waiting())
    }

    /// Submits the requests that were held back, in order. Requests beyond `size`, the device's length now,
    /// fail with [`Status::IoError`]: no node checks the range again.
    pub fn thaw(&mut self, size: Bytes, ring: &mut R) {
        self.modes.remove(Modes::FROZEN);
        if self.in_flight > 0 {
            self.timeouts.begins();
        }
        while let Some(tag) = self.waiting.pop_front() {
            let slot = &mut self.slots[tag.index()];
            slot.thawed = ring.now();
            slot.marks |= Marks::HELD_BACK;
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

    /// Fails a request that is held back.
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

    /// Moves a request, and the children that it and they start, until each is held, parked or done.
    #[inline]
    fn advance(&mut self, tag: Tag, verdict: Verdict, ring: &mut R) {
        if self.modes.contains(Modes::WATCHED) {
            self.carry_observed(tag, verdict, ring);
        } else {
            self.carry(tag, verdict, ring);
        }
        if !self.common.spawned.is_empty() {
            self.start_children(ring);
        }
    }
}
