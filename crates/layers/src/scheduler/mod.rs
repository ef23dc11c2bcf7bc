//! I/O schedulers: the order in which waiting requests are dispatched, and merging
//! ([ADR 26](../../../../docs/adr/0026-schedulers.md)).
//!
//! An arriving request is merged with a waiting one, or inserted into a list ([`lists`]). At the end of a
//! batch (the kernel's unplug) requests are dispatched up to `queue_depth`; each completion dispatches
//! another. [`deadline`] or [`kyber`] chooses the next one. Merged requests go down as one child request and
//! complete with its status.
//!
//! Flushes, prefetches, extent and zone queries and zone management commands bypass the lists: a flush covers
//! only writes that have completed. On a zoned device writes keep their order of arrival.
//!
//! *Invariant:* while requests wait, one is in flight below or the batch has not ended.

mod deadline;
mod kyber;
mod lists;
mod merge;
mod options;
mod shared;
#[cfg(test)]
mod tests;
mod values;

use block::{Cookie, Data, Features, Flags, Op, Profile, Request, Status, Tag};
use lists::{Insertion, Lists, Merging, is_mergeable};
use merge::{Memory, Rules, SEGMENTS_MAX};
use queue::{ChildKind, Cx, Event, Nanos, Node, NodeId, Ring, Verdict};
use std::collections::VecDeque;
use std::sync::Arc;
use values::{Snapshot, Values};

pub use shared::Scheduler;
pub use values::{Choice, Parameter, ParameterError, Policy, is_parameter};

/// The scheduling policy of a node, with its state.
#[derive(Debug)]
enum Chooser {
    Deadline(deadline::Deadline),
    Kyber(Box<kyber::Kyber>),
}

impl Chooser {
    fn class(&self, op: Op) -> usize {
        match self {
            Chooser::Deadline(_) => deadline::class(op),
            Chooser::Kyber(_) => kyber::class(op),
        }
    }
}

/// The state of a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum RequestStage {
    /// The request is not held here, or bypasses the lists.
    Passthrough,
    /// The request waits for admission to the lists: the limit of writes (`async_depth`) is reached.
    Throttled,
    /// The request is in a list, as the lead or a member of a group.
    Queued,
    /// The request was dispatched, on its own or as the lead of a group.
    Dispatched,
    /// The request's group has completed.
    Completed,
}

/// The state of a request besides its entry in the lists.
#[derive(Clone, Copy, Debug)]
struct State {
    stage: RequestStage,
    /// The status with which the request's group completed.
    status: Status,
    class: u8,
    /// The time of dispatch and the area of the segment table, for a dispatched lead.
    started: Nanos,
    area: u16,
}

/// The number that stands for no area of the segment table.
const NO_AREA: u16 = u16::MAX;
const NEW: State = State {
    stage: RequestStage::Passthrough,
    status: Status::Ok,
    class: 0,
    started: Nanos(0),
    area: NO_AREA,
};

/// The node of one hardware queue.
pub struct SchedulerNode {
    child: NodeId,
    values: Arc<Values>,
    chooser: Chooser,
    lists: Lists,
    rules: Rules,
    zoned: bool,
    /// Whether the device answers reads zero-copy; such reads have no memory of their own.
    zero_copy: bool,
    states: Box<[State]>,
    /// Requests of this batch that were not merged on arrival.
    batch: Vec<Tag>,
    /// The number of requests in this batch, and the first one.
    plugged: u32,
    first: Option<Tag>,
    /// Writes that wait for admission, oldest first.
    throttled: VecDeque<Tag>,
    /// Writes in the lists or dispatched.
    writes: u64,
    /// Requests and groups that are dispatched.
    below: u64,
    /// Free areas of the segment table, one for each dispatched group.
    areas: Vec<u16>,
    /// The parameter values of this turn.
    snapshot: Snapshot,
}

impl SchedulerNode {
    fn new(values: Arc<Values>, whole: &Profile, child: NodeId, areas: u16) -> SchedulerNode {
        let chooser = match values.policy() {
            Policy::MqDeadline => Chooser::Deadline(deadline::Deadline::default()),
            Policy::Kyber => Chooser::Kyber(Box::default()),
        };
        let rules = Rules::new(&whole.limits);
        SchedulerNode {
            child,
            snapshot: values.snapshot(),
            values,
            chooser,
            lists: Lists::new(0, 0, rules.clone(), |_| false),
            rules,
            zero_copy: whole.zero_copy_reads,
            zoned: whole.limits.features.contains(Features::ZONED),
            states: Box::default(),
            batch: Vec::new(),
            plugged: 0,
            first: None,
            throttled: VecDeque::new(),
            writes: 0,
            below: 0,
            areas: (0..areas).rev().collect(),
        }
    }

    /// Summarises a request's memory for merging.
    fn memory<R: Ring>(&self, req: &Request, cx: &Cx<'_, R>) -> Memory {
        match (is_mergeable(req.op, req.flags), req.op.moves_data()) {
            (false, _) => Memory::NONE,
            (true, true) if req.data == Data::NONE => {
                match self.zero_copy && req.flags.contains(Flags::ZERO_COPY) {
                    true => Memory::ZERO_COPY,
                    false => Memory::NONE,
                }
            }
            (true, true) => {
                let pieces = cx.segments(req.data, req.len.0);
                self.rules.memory(pieces, |piece| !cx.ring.is_opaque(piece))
            }
            (true, false) => Memory::UNNEEDED,
        }
    }

    /// Inserts an admitted request into its list.
    fn enqueue<R: Ring>(&mut self, tag: Tag, cx: &mut Cx<'_, R>) {
        let req = *self.lists.request(tag);
        let class = usize::from(self.states[tag.index()].class);
        self.writes += u64::from(req.op.is_write());
        self.states[tag.index()].stage = RequestStage::Queued;
        let until = deadline::deadline(class, cx.now(), &self.snapshot);
        let merging = match self.snapshot.get(Parameter::Nomerges) {
            0 => Merging::All { front: self.snapshot.get(Parameter::FrontMerges) != 0 },
            1 => Merging::Last,
            _ => Merging::None,
        };
        let insertion = self.lists.insert(tag, class, until, merging);
        match insertion {
            Insertion::New => {
                cx.probe(tag, &req, Event::Got);
                self.batch.push(tag);
            }
            Insertion::Back(joined) | Insertion::Front(joined) => {
                cx.merged(req.op);
                cx.probe(tag, &req, Event::Merged { front: matches!(insertion, Insertion::Front(_)) });
                if let Some(other) = joined {
                    cx.merged(req.op);
                    cx.probe(other, self.lists.request(other), Event::Merged { front: false });
                }
            }
        }
    }

    /// Ends the batch, as the kernel's unplug does.
    fn unplug<R: Ring>(&mut self, io: Tag, cx: &mut Cx<'_, R>) {
        let count = std::mem::take(&mut self.plugged);
        cx.probe(io, self.lists.request(io), Event::Unplugged { count });
    }

    /// Reports requests of this batch as inserted.
    fn report_inserted<R: Ring>(&mut self, cx: &mut Cx<'_, R>) {
        for tag in self.batch.drain(..) {
            // The request's group may have been merged into another one meanwhile.
            if self.lists.group(tag).requests > 0 {
                cx.probe(tag, &self.lists.whole(tag), Event::Inserted);
            }
        }
    }

    /// Admits waiting writes to the lists.
    fn admit<R: Ring>(&mut self, cx: &mut Cx<'_, R>) {
        while self.writes < self.snapshot.async_depth()
            && let Some(tag) = self.throttled.pop_front()
        {
            self.enqueue(tag, cx);
        }
    }

    /// Dispatches requests while limits allow it.
    fn dispatch<R: Ring>(&mut self, cx: &mut Cx<'_, R>) {
        let now = cx.now();
        while self.below < self.snapshot.get(Parameter::QueueDepth) && self.lists.waiting() > 0 {
            if self.areas.is_empty() || cx.spare_children() == 0 {
                // The next request may be a group, which needs an area. A completion below dispatches again.
                return;
            }
            let next = match &mut self.chooser {
                Chooser::Deadline(deadline) => deadline.next(&self.lists, now, &self.snapshot),
                Chooser::Kyber(kyber) => kyber.next(&self.lists),
            };
            let Some((class, lead)) = next else { return };
            self.start(class, lead, cx);
        }
    }

    fn start<R: Ring>(&mut self, class: usize, lead: Tag, cx: &mut Cx<'_, R>) {
        self.lists.remove(class, lead);
        self.below += 1;
        if let Chooser::Kyber(kyber) = &mut self.chooser {
            kyber.started(class);
        }
        let state = &mut self.states[lead.index()];
        (state.stage, state.started) = (RequestStage::Dispatched, cx.now());
        let (io, whole) = (self.lists.cookie(lead), self.lists.whole(lead));
        cx.probe(lead, &whole, Event::Dispatched);
        if self.lists.group(lead).requests == 1 {
            return cx.resume(io, 0);
        }
        let moves = whole.op.moves_data() && !self.lists.group(lead).memory.zero_copy;
        let data = if moves { self.gather(lead, cx) } else { Data::NONE };
        let spawned = cx.spawn(io, self.child, ChildKind::Piece, Request { data, ..whole });
        debug_assert!(spawned.is_ok(), "a child request is spare");
    }

    /// Returns the memory of a group's requests as one run of segments.
    fn gather<R: Ring>(&mut self, lead: Tag, cx: &mut Cx<'_, R>) -> Data {
        let area = self.areas.pop().expect("a free area was seen");
        self.states[lead.index()].area = area;
        let at = cx.own_segments() + u32::from(area) * SEGMENTS_MAX;
        let mut count = 0;
        for (_, req) in self.lists.requests(lead) {
            count = cx.gather(at, count, req.data, req.len.0);
        }
        Data::Run { start: at, count, skip: 0 }
    }

    /// Handles the completion of a dispatched request or group.
    fn ended(&mut self, lead: Tag, op: Op, requests: u32, now: Nanos) {
        let State { started, area, class, .. } = self.states[lead.index()];
        self.states[lead.index()] = NEW;
        self.below -= 1;
        if op.is_write() {
            self.writes -= u64::from(requests);
        }
        if area != NO_AREA {
            self.areas.push(area);
        }
        if let Chooser::Kyber(kyber) = &mut self.chooser {
            kyber.ended(class.into(), self.lists.group(lead).arrived, started, now, &self.snapshot);
        }
    }
}

/// Returns whether requests of that operation go through the lists.
fn is_scheduled(op: Op) -> bool {
    matches!(op, Op::Read | Op::Write | Op::Discard | Op::WriteZeroes | Op::ZoneAppend)
}

impl<R: Ring> Node<R> for SchedulerNode {
    fn attach(&mut self, _: NodeId, tags: usize) {
        let classes = match self.chooser {
            Chooser::Deadline(_) => 2,
            Chooser::Kyber(_) => kyber::DOMAINS,
        };
        let zoned = self.zoned;
        self.lists = Lists::new(tags, classes, self.rules.clone(), |class| zoned && class != deadline::READ);
        self.states = vec![NEW; tags].into();
        self.batch.reserve(tags);
        self.throttled.reserve(tags);
    }

    fn own_segments(&self) -> u32 {
        self.areas.len() as u32 * SEGMENTS_MAX
    }

    fn submit(&mut self, io: Cookie, req: &mut Request, cx: &mut Cx<'_, R>) -> Verdict {
        if !is_scheduled(req.op) {
            cx.probe(io.tag, req, Event::Got);
            cx.probe(io.tag, req, Event::Inserted);
            self.states[io.tag.index()] = NEW;
            cx.probe(io.tag, req, Event::Dispatched);
            return Verdict::Down(self.child);
        }
        if self.plugged == 0 {
            self.snapshot = self.values.snapshot();
            self.first = Some(io.tag);
            cx.probe(io.tag, req, Event::Plugged);
        }
        self.plugged += 1;
        let memory = self.memory(req, cx);
        self.lists.register(io, req, memory, cx.now());
        let class = self.chooser.class(req.op) as u8;
        self.states[io.tag.index()] = State { stage: RequestStage::Throttled, class, ..NEW };
        if req.op.is_write() && (self.writes >= self.snapshot.async_depth() || !self.throttled.is_empty()) {
            self.throttled.push_back(io.tag);
        } else {
            self.enqueue(io.tag, cx);
        }
        Verdict::Held
    }

    fn commit(&mut self, cx: &mut Cx<'_, R>) {
        if let Some(first) = self.first.take() {
            self.unplug(first, cx);
        }
        if self.lists.waiting() == 0 && self.throttled.is_empty() {
            return;
        }
        self.snapshot = self.values.snapshot();
        if let Chooser::Kyber(kyber) = &mut self.chooser {
            kyber.evaluate(cx.now());
        }
        self.admit(cx);
        self.report_inserted(cx);
        self.dispatch(cx);
    }

    fn reap(&mut self, io: Cookie, req: &mut Request, _: i64, _: &mut Cx<'_, R>) -> Verdict {
        let state = self.states[io.tag.index()];
        if state.stage == RequestStage::Completed {
            // The group's child has given a zero-copy read its memory.
            req.data = self.lists.request(io.tag).data;
            self.states[io.tag.index()] = NEW;
            return Verdict::Up(state.status);
        }
        Verdict::Down(self.child)
    }

    fn end_io(&mut self, io: Cookie, req: &mut Request, status: Status, cx: &mut Cx<'_, R>) -> Verdict {
        if self.states[io.tag.index()].stage == RequestStage::Dispatched {
            self.ended(io.tag, req.op, 1, cx.now());
        }
        Verdict::Up(status)
    }

    fn child_end(
        &mut self,
        io: Cookie,
        req: &mut Request,
        child: &Request,
        mut status: Status,
        cx: &mut Cx<'_, R>,
    ) -> Verdict {
        if status.is_ok() && self.lists.group(io.tag).memory.zero_copy {
            match child.data {
                Data::One(memory) if u64::from(memory.len) >= child.len.0 => {
                    self.lists.assign_memory(io.tag, memory)
                }
                // A zero-copy backend always answers with all of the data.
                _ => status = Status::IoError,
            }
            req.data = self.lists.request(io.tag).data;
        }
        for (part, _) in self.lists.requests(io.tag) {
            if part.tag != io.tag {
                self.states[part.tag.index()] = State { stage: RequestStage::Completed, status, ..NEW };
                cx.resume_part(part);
            }
        }
        self.ended(io.tag, req.op, self.lists.group(io.tag).requests, cx.now());
        Verdict::Up(status)
    }

    /// Does nothing: waiting requests are dispatched soon, and dispatched ones are cancelled below.
    fn cancel(&mut self, _: Cookie, _: &mut Cx<'_, R>) {}
}
