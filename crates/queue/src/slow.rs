//! Slow requests, with the time that they spent in each node; and requests in flight.
//!
//! A queue with a limit compares the duration of each completed request with it, and notes when a node starts
//! and stops holding a request. Time advances between turns only, so these notes are complete. A queue
//! without a limit does none of this and has no memory for it.
//!
//! *Invariant:* a note belongs to the current request of its tag: it starts with the time of that request's
//! submission.

use crate::{Nanos, NodeId};
use block::{Cookie, Request, Status, Tag};

/// Visits kept for a request, and for its slowest child. Later ones are added to the last.
const VISITS: usize = 6;
/// Slow requests that one turn can report.
const FOUND_MAX: usize = 16;

/// A period during which a node held a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Visit {
    /// The node.
    pub node: NodeId,
    /// Depth of the node on the request's path, from 1.
    pub depth: u8,
    /// Duration in nanoseconds.
    pub ns: u64,
    /// Distinguishes repeated visits of the same node.
    generation: u32,
}

impl Visit {
    const NONE: Visit = Visit { node: NodeId::TOP, depth: 0, ns: 0, generation: 0 };
}

#[derive(Clone, Copy)]
struct Visits {
    list: [Visit; VISITS],
    count: u8,
}

impl Visits {
    const NONE: Visits = Visits { list: [Visit::NONE; VISITS], count: 0 };

    fn as_slice(&self) -> &[Visit] {
        &self.list[..usize::from(self.count)]
    }

    fn add(&mut self, visit: Visit) {
        let count = usize::from(self.count);
        let last = self.list[..count].last_mut();
        match last {
            Some(last) if (last.node, last.generation) == (visit.node, visit.generation) => {
                last.ns += visit.ns;
            }
            Some(last) if count == VISITS => last.ns += visit.ns,
            _ => {
                self.list[count] = visit;
                self.count += 1;
            }
        }
    }

    fn total(&self) -> u64 {
        self.as_slice().iter().map(|visit| visit.ns).sum()
    }
}

/// Notes on the request of a tag.
#[derive(Clone, Copy)]
struct Note {
    /// Time of submission.
    start: Nanos,
    /// Time since which a node holds it.
    since: Nanos,
    visits: Visits,
    /// Visits of its slowest child so far, and the number of children.
    below: Visits,
    pieces: u32,
    /// How often it was parked.
    parks: u32,
}

impl Note {
    const NONE: Note = Note {
        start: Nanos(u64::MAX),
        since: Nanos(0),
        visits: Visits::NONE,
        below: Visits::NONE,
        pieces: 0,
        parks: 0,
    };
}

/// A request that took longer than the limit.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Slow {
    /// Tag of the request.
    pub tag: Tag,
    /// The request as it was submitted.
    pub req: Request,
    /// Status of the request.
    pub status: Status,
    /// Time from submission to completion, in nanoseconds.
    pub total_ns: u64,
    /// Nodes that held it, in order, followed by those that held its slowest child.
    pub visits: Vec<Visit>,
    /// Number of its child requests.
    pub pieces: u32,
    /// How often it was sent to another node at the same depth, or to the same backend again.
    pub retries: u32,
    /// How often it was parked because a node could not accept it.
    pub parks: u32,
}

/// Notes of a queue with a limit for slow requests.
pub(crate) struct SlowNotes {
    limit_ns: u64,
    notes: Box<[Note]>,
    found: Vec<Slow>,
    /// Slow requests that did not fit into `found`.
    missed: u64,
}

impl SlowNotes {
    pub(crate) fn new(limit_ns: u64, tags: usize) -> SlowNotes {
        let notes = vec![Note::NONE; tags].into();
        SlowNotes { limit_ns, notes, found: Vec::with_capacity(FOUND_MAX), missed: 0 }
    }

    pub(crate) fn limit_ns(&self) -> u64 {
        self.limit_ns
    }

    /// Notes that a node holds a request from now on.
    #[inline(never)]
    pub(crate) fn hold(&mut self, tag: Tag, start: Nanos, now: Nanos, parked: bool) {
        let note = &mut self.notes[tag.index()];
        if note.start != start {
            *note = Note { start, ..Note::NONE };
        }
        note.since = now;
        note.parks += u32::from(parked);
    }

    /// Notes that a node, at that depth, stopped holding a request.
    #[inline(never)]
    pub(crate) fn proceed(&mut self, io: Cookie, start: Nanos, node: NodeId, depth: u8, now: Nanos) {
        let note = &mut self.notes[io.tag.index()];
        if note.start == start {
            let ns = now.since(note.since);
            note.visits.add(Visit { node, depth, ns, generation: io.generation });
        }
    }

    /// Notes a new child request.
    #[inline(never)]
    pub(crate) fn spawned(&mut self, parent: Tag, child: Tag, start: Nanos) {
        self.notes[child.index()] = Note { start, ..Note::NONE };
        self.notes[parent.index()].pieces += 1;
    }

    /// Notes that a child completed. `depth`: that of the node that holds the parent.
    #[inline(never)]
    pub(crate) fn child_ended(&mut self, parent: Tag, child: Tag, depth: u8) {
        let own = self.notes[child.index()];
        let note = &mut self.notes[parent.index()];
        // The child's own visits include the time of its children.
        let total = own.visits.total();
        if note.start != own.start || total < note.below.total() {
            return;
        }
        note.below = Visits::NONE;
        for visit in own.visits.as_slice().iter().chain(own.below.as_slice()) {
            note.below.add(Visit { depth: visit.depth + depth, ..*visit });
        }
        self.notes[child.index()] = Note::NONE;
    }

    /// Records a request of the front-end that took longer than the limit.
    #[cold]
    pub(crate) fn find(&mut self, tag: Tag, req: &Request, start: Nanos, status: Status, total_ns: u64) {
        if self.found.len() == FOUND_MAX {
            self.missed += 1;
            return;
        }
        let note = &self.notes[tag.index()];
        let note = if note.start == start { note } else { &Note::NONE };
        let visits: Vec<Visit> =
            note.visits.as_slice().iter().chain(note.below.as_slice()).copied().collect();
        let retries = retries(note.visits.as_slice()) + retries(note.below.as_slice());
        let (pieces, parks) = (note.pieces, note.parks);
        self.found.push(Slow { tag, req: *req, status, total_ns, visits, pieces, retries, parks });
    }

    /// Takes the recorded requests, and the number of those that did not fit.
    pub(crate) fn take(&mut self) -> (std::vec::Drain<'_, Slow>, u64) {
        (self.found.drain(..), std::mem::take(&mut self.missed))
    }
}

/// Counts visits at a depth that another node visited before, and repeated visits at the lowest depth.
fn retries(visits: &[Visit]) -> u32 {
    let lowest = visits.iter().map(|visit| visit.depth).max();
    let again = |(n, visit): &(usize, &Visit)| {
        visits[..*n].iter().any(|before| {
            before.depth == visit.depth && (before.node != visit.node || Some(visit.depth) == lowest)
        })
    };
    visits.iter().enumerate().filter(again).count() as u32
}

/// State of a request in flight.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum InFlightState {
    /// It is held back by a frozen queue.
    Waiting,
    /// A node holds it, waiting for the kernel or a timer, for example.
    Held,
    /// The node could not accept it; it is offered again.
    Parked,
}

/// A request in flight.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct InFlight {
    /// Tag of the request.
    pub tag: Tag,
    /// Tag of the request that it is a child of.
    pub parent: Option<Tag>,
    /// The request in its current state.
    pub req: Request,
    /// State of the request.
    pub state: InFlightState,
    /// The node that holds it. `None`: it has not entered the stack.
    pub node: Option<NodeId>,
    /// Time since its submission, in nanoseconds.
    pub age_ns: u64,
}

#[cfg(test)]
mod tests {
    use super::*;
    use block::{Bytes, Op};

    fn io(tag: u16, generation: u32) -> Cookie {
        Cookie { tag: Tag(tag), generation }
    }

    #[test]
    fn a_request_tried_on_two_paths_reports_a_retry() {
        let mut notes = SlowNotes::new(10, 4);
        let req = Request::new(Op::Read, Bytes(0), Bytes(512));
        notes.hold(Tag(1), Nanos(5), Nanos(5), false);
        notes.proceed(io(1, 2), Nanos(5), NodeId(1), 2, Nanos(25));
        notes.hold(Tag(1), Nanos(5), Nanos(25), true);
        notes.proceed(io(1, 4), Nanos(5), NodeId(2), 2, Nanos(26));
        notes.find(Tag(1), &req, Nanos(5), Status::Ok, 21);
        // Another request under the same tag, which no node held.
        notes.find(Tag(1), &req, Nanos(99), Status::Ok, 10);
        let (found, missed) = notes.take();
        let found: Vec<Slow> = found.collect();
        assert_eq!((found.len(), missed), (2, 0));
        let holds: Vec<_> = found[0].visits.iter().map(|visit| (visit.node.0, visit.ns)).collect();
        assert_eq!((holds, found[0].retries, found[0].parks), (vec![(1, 20), (2, 1)], 1, 1));
        assert!(found[1].visits.is_empty());
    }

    #[test]
    fn the_slowest_child_is_reported() {
        let mut notes = SlowNotes::new(10, 8);
        let start = Nanos(1);
        notes.hold(Tag(0), start, start, false);
        for (tag, end) in [(4, 30), (5, 90), (6, 60)] {
            notes.spawned(Tag(0), Tag(tag), start);
            notes.hold(Tag(tag), start, start, false);
            notes.proceed(io(tag, 2), start, NodeId(1), 1, Nanos(end));
            notes.child_ended(Tag(0), Tag(tag), 1);
        }
        notes.proceed(io(0, 2), start, NodeId(0), 1, Nanos(91));
        notes.find(Tag(0), &Request::flush(), start, Status::Ok, 90);
        let slow = notes.take().0.next().expect("it was found");
        let holds: Vec<_> = slow.visits.iter().map(|visit| (visit.node.0, visit.depth, visit.ns)).collect();
        assert_eq!((holds, slow.pieces, slow.retries), (vec![(0, 1, 90), (1, 2, 89)], 3, 0));
    }

    #[test]
    fn slow_requests_that_do_not_fit_are_counted() {
        let mut notes = SlowNotes::new(0, 1);
        for _ in 0..FOUND_MAX + 3 {
            notes.find(Tag(0), &Request::flush(), Nanos(0), Status::Ok, 1);
        }
        let (found, missed) = notes.take();
        assert_eq!((found.count(), missed), (FOUND_MAX, 3));
    }
}
