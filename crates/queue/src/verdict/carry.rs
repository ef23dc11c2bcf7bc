//! The verdict loop itself: moves one request from a verdict until it is held, parked or done.
//!
//! It is inlined where requests enter, where they complete and where children start: a call would cost as
//! much as a step. The parts of the queue that it needs are borrowed once, so the compiler keeps their
//! addresses in registers across calls of nodes.

use super::node_table::{NodeEntry, NodeTable};
use super::{Done, Marks, Modes, Queue, RETRIES_MAX, Slot, State};
use crate::node::{Resumed, Spawn};
use crate::slow::SlowNotes;
use crate::stats::Ended;
use crate::{ChildKind, Cx, Event, Nanos, NodeId, QueueStats, Ring, Verdict};
use block::{Cookie, Status, Tag};
use std::collections::VecDeque;

/// The parts of a [`Queue`] that the loop needs.
pub(super) struct Parts<'a, R: Ring> {
    pub(super) slots: &'a mut [Slot],
    nodes: &'a mut NodeTable<R>,
    slow: &'a mut Option<Box<SlowNotes>>,
    stats: &'a QueueStats,
    parked: &'a mut VecDeque<Tag>,
    waiting: &'a mut VecDeque<Tag>,
    done: &'a mut Vec<Done>,
    ended: &'a mut Vec<Ended>,
    in_flight: &'a mut usize,
    must_retry: &'a mut bool,
    frozen: bool,
}

impl<R: Ring> Queue<R> {
    #[inline(always)]
    pub(super) fn parts<'a>(&'a mut self, ring: &'a mut R) -> (Parts<'a, R>, Cx<'a, R>) {
        let parts = Parts {
            slots: &mut self.slots,
            nodes: &mut self.nodes,
            slow: &mut self.slow,
            stats: &self.stats,
            parked: &mut self.parked,
            waiting: &mut self.waiting,
            done: &mut self.done,
            ended: &mut self.ended,
            in_flight: &mut self.in_flight,
            must_retry: &mut self.must_retry,
            frozen: self.modes.contains(Modes::FROZEN),
        };
        (parts, Cx { common: &mut self.common, node: NodeId::TOP, ring })
    }

    /// Starts the children that nodes have spawned, and those that these spawn.
    #[inline(never)]
    pub(super) fn start_children(&mut self, ring: &mut R) {
        if self.modes.contains(Modes::WATCHED) {
            return self.start_children_observed(ring);
        }
        let (mut parts, mut cx) = self.parts(ring);
        while let Some(spawn) = cx.common.spawned.next() {
            let (tag, node) = (spawn.tag, spawn.node);
            parts.fill(spawn);
            let verdict = parts.begin(tag, node, &mut cx);
            parts.carry::<false>(tag, verdict, &mut cx);
        }
    }

    #[cold]
    fn start_children_observed(&mut self, ring: &mut R) {
        while let Some(&spawn) = self.common.spawned.next() {
            let (mut parts, _) = self.parts(ring);
            let start = parts.fill(&spawn);
            if let Some(slow) = &mut self.slow {
                slow.spawned(spawn.parent.tag, spawn.tag, start);
            }
            self.carry_observed(spawn.tag, Verdict::Down(spawn.node), ring);
        }
    }

    /// Continues the held requests that nodes resumed.
    pub(super) fn resume(&mut self, ring: &mut R) {
        while !self.common.resumed.is_empty() {
            self.moved = true;
            if let Some(cookie) = self.resume_some(ring) {
                self.alarm(cookie, ring);
            }
            if !self.common.spawned.is_empty() {
                self.start_children(ring);
            }
        }
    }

    /// Continues resumed requests until none is left or one starts children. Returns a cookie that is not
    /// held: an alarm.
    #[inline(always)]
    fn resume_some(&mut self, ring: &mut R) -> Option<Cookie> {
        if self.modes.contains(Modes::WATCHED) {
            return self.resume_one_observed(ring);
        }
        let (mut parts, mut cx) = self.parts(ring);
        while let Some(&Resumed { io, result, part }) = cx.common.resumed.next() {
            if !parts.holds(io) {
                return Some(io);
            }
            if part {
                parts.slots[io.tag.index()].marks |= Marks::REPLACED;
            }
            let verdict = parts.reap(io, result, false, &mut cx);
            parts.carry::<false>(io.tag, verdict, &mut cx);
            if !cx.common.spawned.is_empty() {
                break;
            }
        }
        None
    }

    #[cold]
    fn resume_one_observed(&mut self, ring: &mut R) -> Option<Cookie> {
        let &Resumed { io, result, part } = self.common.resumed.next()?;
        let (mut parts, mut cx) = self.parts(ring);
        if !parts.holds(io) {
            return Some(io);
        }
        if part {
            parts.slots[io.tag.index()].marks |= Marks::REPLACED;
        }
        let verdict = parts.reap(io, result, true, &mut cx);
        self.carry_observed(io.tag, verdict, ring);
        None
    }

    /// The loop for requests that were parked or held back, where speed does not matter.
    #[inline(never)]
    pub(super) fn carry(&mut self, tag: Tag, verdict: Verdict, ring: &mut R) {
        let (mut parts, mut cx) = self.parts(ring);
        parts.carry::<false>(tag, verdict, &mut cx);
    }

    /// The loop with a probe, or where slow requests are recorded.
    #[inline(never)]
    pub(super) fn carry_observed(&mut self, tag: Tag, verdict: Verdict, ring: &mut R) {
        let (mut parts, mut cx) = self.parts(ring);
        parts.carry::<true>(tag, verdict, &mut cx);
    }
}

impl<R: Ring> Parts<'_, R> {
    /// Submits a new request to its first node. Returns the verdict.
    #[inline(always)]
    pub(super) fn begin(&mut self, tag: Tag, node: NodeId, cx: &mut Cx<'_, R>) -> Verdict {
        let slot = &mut self.slots[tag.index()];
        debug_assert!(slot.depth == 0 && !slot.marks.contains(Marks::REPLACED));
        slot.path[0] = node;
        slot.depth = 1;
        slot.restore_check.enters(0, &slot.req);
        // Odd generations are alarms of nodes.
        slot.generation = slot.generation.wrapping_add(2);
        let io = Cookie { tag, generation: slot.generation };
        cx.node = node;
        let entry = &mut self.nodes[node];
        entry.entered += 1;
        entry.node.submit(io, &mut slot.req, cx)
    }

    /// Stores a child request in its slot. Returns when its parent was submitted.
    #[inline(always)]
    fn fill(&mut self, &Spawn { tag, parent, kind, ref req, .. }: &Spawn) -> Nanos {
        let above = &mut self.slots[parent.tag.index()];
        debug_assert!(above.state == State::Held && above.generation == parent.generation);
        let (start, thawed) = (above.start, above.thawed);
        let mut marks = above.marks & Marks::UNCOUNTED.union(Marks::HELD_BACK);
        match kind {
            ChildKind::Piece => above.marks |= Marks::REPLACED,
            ChildKind::Copy => marks |= Marks::UNCOUNTED,
        }
        let slot = &mut self.slots[tag.index()];
        debug_assert!(slot.state == State::Free);
        slot.req = *req;
        slot.start = start;
        slot.thawed = thawed;
        slot.parent = Some(parent);
        slot.marks = marks;
        slot.state = State::Moving;
        start
    }

    /// Whether a request is held under that cookie.
    #[inline(always)]
    pub(super) fn holds(&self, io: Cookie) -> bool {
        let slot = &self.slots[io.tag.index()];
        slot.state == State::Held && slot.generation == io.generation
    }

    /// Passes a result to the node that holds the request. Returns the verdict.
    #[inline(always)]
    pub(super) fn reap(&mut self, io: Cookie, result: i64, is_watched: bool, cx: &mut Cx<'_, R>) -> Verdict {
        let slot = &mut self.slots[io.tag.index()];
        slot.state = State::Moving;
        let path = &slot.path[..usize::from(slot.depth)];
        self.nodes.proceed(path, cx.now());
        let holder = path[path.len() - 1];
        if is_watched && let Some(slow) = self.slow {
            slow.proceed(io, slot.start, holder, slot.depth, cx.now());
        }
        cx.node = holder;
        self.nodes[holder].node.reap(io, &mut slot.req, result, cx)
    }

    /// Moves a request until it is held, parked or done. `OBSERVED`: there is a probe, or slow requests are
    /// recorded; a queue without them has nothing to check at each step.
    #[inline(always)]
    pub(super) fn carry<const OBSERVED: bool>(
        &mut self,
        mut tag: Tag,
        mut verdict: Verdict,
        cx: &mut Cx<'_, R>,
    ) {
        let mut slot = &mut self.slots[tag.index()];
        let mut retries_left = RETRIES_MAX;
        loop {
            // Compared in this order: a jump table would take longer than most nodes do.
            verdict = if let Verdict::Up(status) = verdict {
                let depth = usize::from(slot.depth);
                slot.depth -= 1;
                slot.restore_check.leaves(slot.depth, &slot.req, status, &slot.path);
                if OBSERVED {
                    cx.node = slot.path[usize::from(slot.depth)];
                    let event = if self.nodes[cx.node].leaf {
                        Event::Completed { status }
                    } else {
                        Event::Left { status }
                    };
                    cx.probe_at(tag, slot.depth + 1, &slot.req, event);
                }
                // Empty for the first node.
                if let Some(&above) = slot.path.get(depth.wrapping_sub(2)) {
                    cx.node = above;
                    let io = Cookie { tag, generation: slot.generation };
                    match self.nodes[above].node.end_io(io, &mut slot.req, status, cx) {
                        Verdict::Up(status) => Verdict::Up(status),
                        other => slot.retry(other, self.nodes, &mut retries_left),
                    }
                } else {
                    if status == Status::Requeue && slot.parent.is_none() {
                        // A node requests that the whole request is submitted again: with those that are held
                        // back if the queue is frozen, otherwise in the next turn.
                        slot.state = State::Parked;
                        if self.frozen {
                            return self.waiting.push_back(tag);
                        }
                        // Parked at the top, so that it is offered there again.
                        slot.path[0] = NodeId::TOP;
                        slot.depth = 1;
                        *self.must_retry = true;
                        return self.parked.push_back(tag);
                    }
                    if self.ended.len() == self.ended.capacity() {
                        count_early(self.stats, self.ended, cx.now());
                    }
                    let status = slot.end(status, self.ended);
                    let Some(parent) = slot.parent.take() else {
                        *self.in_flight -= 1;
                        if OBSERVED {
                            cx.node = NodeId::TOP;
                            cx.probe_at(tag, 0, &slot.req, Event::Done { status });
                        }
                        return self.done.push(Done { tag, owner: slot.owner, status });
                    };
                    let child = slot.req;
                    slot = &mut self.slots[parent.tag.index()];
                    cx.node = slot.take_child_end(parent);
                    if OBSERVED && let Some(slow) = self.slow {
                        slow.child_ended(parent.tag, tag, slot.depth);
                        slow.proceed(parent, slot.start, cx.node, slot.depth, cx.now());
                        // If the node keeps holding it, this starts a new period.
                        slow.hold(parent.tag, slot.start, cx.now(), false);
                    }
                    cx.common.spare[cx.node.index()].push(tag);
                    tag = parent.tag;
                    let entry = &mut self.nodes[cx.node];
                    let verdict = entry.node.child_end(parent, &mut slot.req, &child, status, cx);
                    // It waits for other children.
                    if verdict == Verdict::Held {
                        return;
                    }
                    slot.state = State::Moving;
                    self.nodes.proceed(&slot.path[..usize::from(slot.depth)], cx.now());
                    match verdict {
                        Verdict::Up(status) => Verdict::Up(status),
                        other => slot.retry(other, self.nodes, &mut retries_left),
                    }
                }
            } else if let Verdict::Down(node) = verdict {
                let entry = slot.enter(node, self.nodes);
                slot.generation = slot.generation.wrapping_add(2);
                let io = Cookie { tag, generation: slot.generation };
                cx.node = node;
                if OBSERVED {
                    let event = if entry.leaf { Event::Issued } else { Event::Entered };
                    let parent = slot.parent.map(|parent| parent.tag);
                    cx.probe_entry(tag, parent, slot.depth, &slot.req, event);
                }
                entry.node.submit(io, &mut slot.req, cx)
            } else {
                if let Verdict::Held = verdict {
                    slot.state = State::Held;
                    self.nodes.hold(&slot.path[..usize::from(slot.depth)], cx.now());
                    if OBSERVED && let Some(slow) = self.slow {
                        slow.hold(tag, slot.start, cx.now(), false);
                    }
                    return;
                }
                slot.state = State::Parked;
                *self.must_retry |= verdict == Verdict::Busy;
                cx.node = slot.path[usize::from(slot.depth) - 1];
                // A parked request does not count as entered: it is offered again.
                self.nodes[cx.node].entered -= 1;
                self.nodes.hold(&slot.path[..usize::from(slot.depth) - 1], cx.now());
                if OBSERVED && let Some(slow) = self.slow {
                    slow.hold(tag, slot.start, cx.now(), true);
                }
                cx.probe_at(tag, slot.depth, &slot.req, Event::Requeued);
                return self.parked.push_back(tag);
            };
        }
    }
}

/// Counts completed requests early, if a turn has more of them than tags: children of split requests.
#[cold]
fn count_early(stats: &QueueStats, ended: &mut Vec<Ended>, now: Nanos) {
    stats.count(ended, now);
    ended.clear();
}

impl Slot {
    /// Enters a request into a node below.
    #[inline]
    fn enter<'a, R: Ring>(&mut self, node: NodeId, nodes: &'a mut NodeTable<R>) -> &'a mut NodeEntry<R> {
        self.path[usize::from(self.depth)] = node;
        self.restore_check.enters(self.depth, &self.req);
        self.depth += 1;
        // It counts itself now, unless it is split again.
        self.marks.remove(Marks::REPLACED);
        let entry = &mut nodes[node];
        entry.entered += 1;
        entry
    }

    /// Processes the verdict of a node that had the request before. `Down` is a retry; after too many of them
    /// in one turn the request waits for the next.
    #[inline(never)]
    fn retry<R: Ring>(
        &mut self,
        verdict: Verdict,
        nodes: &mut NodeTable<R>,
        retries_left: &mut u32,
    ) -> Verdict {
        let Verdict::Down(node) = verdict else { return verdict };
        if let Some(left) = retries_left.checked_sub(1) {
            *retries_left = left;
            return verdict;
        }
        self.enter(node, nodes);
        Verdict::Busy
    }

    /// Frees the slot of a completed request and records it for the statistics. Returns the status for its
    /// owner.
    #[inline]
    pub(super) fn end(&mut self, status: Status, ended: &mut Vec<Ended>) -> Status {
        self.state = State::Free;
        let mut status = status;
        if self.marks.intersects(Marks::UNCOUNTED.union(Marks::REPLACED).union(Marks::EXPIRED)) {
            if self.marks.contains(Marks::EXPIRED) && !status.is_ok() {
                status = Status::Timeout;
            }
            if self.marks.intersects(Marks::UNCOUNTED.union(Marks::REPLACED)) {
                return status;
            }
        }
        ended.push(Ended {
            start: self.start,
            len: self.req.len.0,
            op: self.req.op,
            failed: !status.is_ok(),
        });
        status
    }

    /// Returns the node that holds the request of which a child completed.
    #[inline]
    fn take_child_end(&self, io: Cookie) -> NodeId {
        assert!(self.state == State::Held && self.generation == io.generation, "a child outlived {io:?}");
        self.path[usize::from(self.depth) - 1]
    }
}
