//! Schedulers: which of the requests that wait goes down next, and which go down as one
//! ([ADR 26](../../../../docs/adr/0026-schedulers.md)).
//!
//! A request that comes is merged with what waits, or stands in line ([`lines`]). When the batch is over, which is the
//! kernel's unplugging, as many go down as the device below is given at once; each that ends lets another go. Which one
//! is the matter of [`deadline`] or [`kyber`]. Merged requests go down as one child request, and end as it does.
//!
//! Flushes, prefetches, questions and what zones are told pass at once: a flush is about writes that have ended.
//! On a zoned device writes keep the order in which they came.
//!
//! *Invariant:* while something waits, something is under way below or the batch is not over.

mod deadline;
mod kyber;
mod lines;
mod merge;
mod shared;
#[cfg(test)]
mod tests;
mod values;

use block::{Cookie, Data, Features, Flags, Op, Profile, Request, Status, Tag};
use lines::{Came, Lines, Merging, is_mergeable};
use merge::{Memory, PIECES_MAX, Rules};
use queue::{ChildKind, Cx, Event, Nanos, Node, NodeId, Ring, Verdict};
use std::collections::VecDeque;
use std::sync::Arc;
use values::{Now, Values};

pub use shared::Scheduler;
pub use values::{Choice, Parameter, ParameterError, Policy, is_parameter};

/// What chooses.
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

/// Where a request is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Place {
    /// Not here, or it only passes.
    Elsewhere,
    /// Before the lines: too many writes are here already.
    Before,
    /// In line, as part of a group or as its lead.
    Waiting,
    /// It goes down, or is there, as itself or as the lead of a group.
    Below,
    /// It is over.
    Over,
}

/// What is known of a request besides what lines know.
#[derive(Clone, Copy, Debug)]
struct State {
    place: Place,
    /// How the request ended that it was part of.
    status: Status,
    class: u8,
    /// Of a lead that is below: when it went, and the room that the group's memory has.
    started: Nanos,
    room: u16,
}

/// No room is taken.
const NO_ROOM: u16 = u16::MAX;
const NEW: State =
    State { place: Place::Elsewhere, status: Status::Ok, class: 0, started: Nanos(0), room: NO_ROOM };

/// The node.
pub struct SchedulerNode {
    child: NodeId,
    values: Arc<Values>,
    chooser: Chooser,
    lines: Lines,
    rules: Rules,
    zoned: bool,
    /// What is to be lent memory has none of its own.
    lends: bool,
    states: Box<[State]>,
    /// Requests of this batch that were not merged into others when they came.
    batch: Vec<Tag>,
    /// Requests of this batch, and the first of them.
    plugged: u32,
    first: Option<Tag>,
    /// Writes for which there is no place in the lines, oldest first.
    before: VecDeque<Tag>,
    /// Writes that are here or below, but for those.
    writes: u64,
    /// Requests and groups below.
    below: u64,
    /// Numbers of rooms for the memory of groups.
    rooms: Vec<u16>,
    /// As of this turn.
    now: Now,
}

impl SchedulerNode {
    fn new(values: Arc<Values>, whole: &Profile, child: NodeId, rooms: u16) -> SchedulerNode {
        let chooser = match values.policy() {
            Policy::MqDeadline => Chooser::Deadline(deadline::Deadline::default()),
            Policy::Kyber => Chooser::Kyber(Box::default()),
        };
        let rules = Rules::new(&whole.limits);
        SchedulerNode {
            child,
            now: values.now(),
            values,
            chooser,
            lines: Lines::new(0, 0, rules.clone(), |_| false),
            rules,
            lends: whole.lends,
            zoned: whole.limits.features.has(Features::ZONED),
            states: Box::default(),
            batch: Vec::new(),
            plugged: 0,
            first: None,
            before: VecDeque::new(),
            writes: 0,
            below: 0,
            rooms: (0..rooms).rev().collect(),
        }
    }

    /// What of a request's memory matters to merging.
    fn memory<R: Ring>(&self, req: &Request, cx: &Cx<'_, R>) -> Memory {
        match (is_mergeable(req.op, req.flags), req.op.moves_data()) {
            (false, _) => Memory::NONE,
            (true, true) if req.data == Data::NONE => match self.lends && req.flags.has(Flags::MAY_LEND) {
                true => Memory::LENT,
                false => Memory::NONE,
            },
            (true, true) => {
                let pieces = cx.segments(req.data, req.len.0);
                self.rules.memory(pieces, |piece| !cx.ring.is_opaque(piece))
            }
            (true, false) => Memory::UNNEEDED,
        }
    }

    /// Put a request that was noted into its line.
    fn line_up<R: Ring>(&mut self, tag: Tag, cx: &mut Cx<'_, R>) {
        let req = *self.lines.request(tag);
        let class = usize::from(self.states[tag.index()].class);
        self.writes += u64::from(req.op.is_write());
        self.states[tag.index()].place = Place::Waiting;
        let until = deadline::deadline(class, cx.now(), &self.now);
        let merging = match self.now.get(Parameter::Nomerges) {
            0 => Merging::All { front: self.now.get(Parameter::FrontMerges) != 0 },
            1 => Merging::Last,
            _ => Merging::None,
        };
        let came = self.lines.insert(tag, class, until, merging);
        match came {
            Came::New => {
                cx.probe(tag, &req, Event::Got);
                self.batch.push(tag);
            }
            Came::Back(joined) | Came::Front(joined) => {
                cx.merged(req.op);
                cx.probe(tag, &req, Event::Merged { front: matches!(came, Came::Front(_)) });
                if let Some(other) = joined {
                    cx.merged(req.op);
                    cx.probe(other, self.lines.request(other), Event::Merged { front: false });
                }
            }
        }
    }

    /// The batch is over.
    fn unplug<R: Ring>(&mut self, io: Tag, cx: &mut Cx<'_, R>) {
        let count = std::mem::take(&mut self.plugged);
        cx.probe(io, self.lines.request(io), Event::Unplugged { count });
    }

    /// What came into the lines since stands there now.
    fn tell_inserted<R: Ring>(&mut self, cx: &mut Cx<'_, R>) {
        for tag in self.batch.drain(..) {
            // Others may have taken it in meanwhile.
            if self.lines.group(tag).requests > 0 {
                cx.probe(tag, &self.lines.whole(tag), Event::Inserted);
            }
        }
    }

    /// Let writes into the lines that stand before them.
    fn admit<R: Ring>(&mut self, cx: &mut Cx<'_, R>) {
        while self.writes < self.now.async_depth()
            && let Some(tag) = self.before.pop_front()
        {
            self.line_up(tag, cx);
        }
    }

    /// Have go down what may.
    fn dispatch<R: Ring>(&mut self, cx: &mut Cx<'_, R>) {
        let now = cx.now();
        while self.below < self.now.get(Parameter::QueueDepth) && self.lines.waiting() > 0 {
            if self.rooms.is_empty() || cx.spare_children() == 0 {
                // A group may be next. One that is below will end.
                return;
            }
            let next = match &mut self.chooser {
                Chooser::Deadline(deadline) => deadline.next(&self.lines, now, &self.now),
                Chooser::Kyber(kyber) => kyber.next(&self.lines),
            };
            let Some((class, lead)) = next else { return };
            self.start(class, lead, cx);
        }
    }

    fn start<R: Ring>(&mut self, class: usize, lead: Tag, cx: &mut Cx<'_, R>) {
        self.lines.remove(class, lead);
        self.below += 1;
        if let Chooser::Kyber(kyber) = &mut self.chooser {
            kyber.started(class);
        }
        let state = &mut self.states[lead.index()];
        (state.place, state.started) = (Place::Below, cx.now());
        let (io, whole) = (self.lines.cookie(lead), self.lines.whole(lead));
        cx.probe(lead, &whole, Event::Dispatched);
        if self.lines.group(lead).requests == 1 {
            return cx.resume(io, 0);
        }
        let moves = whole.op.moves_data() && !self.lines.group(lead).memory.lent;
        let data = if moves { self.gather(lead, cx) } else { Data::NONE };
        let spawned = cx.spawn(io, self.child, ChildKind::Piece, Request { data, ..whole });
        debug_assert!(spawned.is_ok(), "a spare child was seen");
    }

    /// The memory of a group as one run.
    fn gather<R: Ring>(&mut self, lead: Tag, cx: &mut Cx<'_, R>) -> Data {
        let room = self.rooms.pop().expect("a room was seen");
        self.states[lead.index()].room = room;
        let at = cx.room() + u32::from(room) * PIECES_MAX;
        let mut count = 0;
        for (_, req) in self.lines.requests(lead) {
            count = cx.gather(at, count, req.data, req.len.0);
        }
        Data::Run { start: at, count, skip: 0 }
    }

    /// A request or a group is over below.
    fn ended(&mut self, lead: Tag, op: Op, requests: u32, now: Nanos) {
        let State { started, room, class, .. } = self.states[lead.index()];
        self.states[lead.index()] = NEW;
        self.below -= 1;
        if op.is_write() {
            self.writes -= u64::from(requests);
        }
        if room != NO_ROOM {
            self.rooms.push(room);
        }
        if let Chooser::Kyber(kyber) = &mut self.chooser {
            kyber.ended(class.into(), self.lines.group(lead).arrived, started, now, &self.now);
        }
    }
}

/// Whether requests of that operation stand in line.
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
        self.lines = Lines::new(tags, classes, self.rules.clone(), |class| zoned && class != deadline::READ);
        self.states = vec![NEW; tags].into();
        self.batch.reserve(tags);
        self.before.reserve(tags);
    }

    fn room(&self) -> u32 {
        self.rooms.len() as u32 * PIECES_MAX
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
            self.now = self.values.now();
            self.first = Some(io.tag);
            cx.probe(io.tag, req, Event::Plugged);
        }
        self.plugged += 1;
        let memory = self.memory(req, cx);
        self.lines.note(io, req, memory, cx.now());
        let class = self.chooser.class(req.op) as u8;
        self.states[io.tag.index()] = State { place: Place::Before, class, ..NEW };
        if req.op.is_write() && (self.writes >= self.now.async_depth() || !self.before.is_empty()) {
            self.before.push_back(io.tag);
        } else {
            self.line_up(io.tag, cx);
        }
        Verdict::Held
    }

    fn commit(&mut self, cx: &mut Cx<'_, R>) {
        if let Some(first) = self.first.take() {
            self.unplug(first, cx);
        }
        if self.lines.waiting() == 0 && self.before.is_empty() {
            return;
        }
        self.now = self.values.now();
        if let Chooser::Kyber(kyber) = &mut self.chooser {
            kyber.look(cx.now());
        }
        self.admit(cx);
        self.tell_inserted(cx);
        self.dispatch(cx);
    }

    fn reap(&mut self, io: Cookie, req: &mut Request, _: i64, _: &mut Cx<'_, R>) -> Verdict {
        let state = self.states[io.tag.index()];
        if state.place == Place::Over {
            // It may have been lent some.
            req.data = self.lines.request(io.tag).data;
            self.states[io.tag.index()] = NEW;
            return Verdict::Up(state.status);
        }
        Verdict::Down(self.child)
    }

    fn end_io(&mut self, io: Cookie, req: &mut Request, status: Status, cx: &mut Cx<'_, R>) -> Verdict {
        if self.states[io.tag.index()].place == Place::Below {
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
        if status.is_ok() && self.lines.group(io.tag).memory.lent {
            match child.data {
                Data::One(memory) if u64::from(memory.len) >= child.len.0 => self.lines.lend(io.tag, memory),
                // What lends always lends it whole.
                _ => status = Status::IoError,
            }
            req.data = self.lines.request(io.tag).data;
        }
        for (part, _) in self.lines.requests(io.tag) {
            if part.tag != io.tag {
                self.states[part.tag.index()] = State { place: Place::Over, status, ..NEW };
                cx.resume_part(part);
            }
        }
        self.ended(io.tag, req.op, self.lines.group(io.tag).requests, cx.now());
        Verdict::Up(status)
    }

    /// What waits here will go; what went is asked itself.
    fn cancel(&mut self, _: Cookie, _: &mut Cx<'_, R>) {}
}
