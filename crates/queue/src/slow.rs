//! Requests that took too long, with where they were meanwhile; and those that are under way.
//!
//! A queue that looks for slow requests compares the time of each one that ends, and notes when one comes to rest in a
//! node and when it goes on. Time passes between turns only, so that is all there is to know of where it went. A queue
//! that does not look for them does none of this, and has no memory for it.
//!
//! *Invariant:* a note is of the request that its tag carries now: it begins with the time when that was submitted.

use crate::{Nanos, NodeId};
use block::{Cookie, Request, Status, Tag};

/// Rests that are told apart, of a request and of its slowest piece; later ones are added to the last.
const VISITS: usize = 6;
/// Requests that one turn tells of.
const FOUND_MAX: usize = 16;

/// A rest of a request in a node.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Visit {
    /// The node that had it.
    pub node: NodeId,
    /// How many nodes down that is, from 1.
    pub depth: u8,
    /// For how long.
    pub ns: u64,
    /// Tells one time that it was handed there from another.
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

/// What is known of the request under a tag.
#[derive(Clone, Copy)]
struct Note {
    /// When it was submitted.
    start: Nanos,
    /// When it last came to rest.
    since: Nanos,
    visits: Visits,
    /// Those of its slowest piece so far, and how many pieces there were.
    below: Visits,
    pieces: u32,
    /// How often there was no room for it.
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

/// A request that took too long.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Slow {
    /// Its tag.
    pub tag: Tag,
    /// The request, as it was submitted.
    pub req: Request,
    /// How it ended.
    pub status: Status,
    /// From its submission to its end.
    pub total_ns: u64,
    /// Where it rested, in order; behind that, where the slowest of what it was cut into did.
    pub visits: Vec<Visit>,
    /// Pieces and copies that were made of it.
    pub pieces: u32,
    /// How often it was handed to another node in the place of one that had it, or to a backend once more.
    pub retries: u32,
    /// How often there was no room for it somewhere.
    pub parks: u32,
}

/// What a queue keeps that looks for slow requests.
pub(crate) struct SlowNotes {
    limit_ns: u64,
    notes: Box<[Note]>,
    found: Vec<Slow>,
    /// Those for which there was no room in `found`.
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

    /// A request comes to rest.
    #[inline(never)]
    pub(crate) fn rest(&mut self, tag: Tag, start: Nanos, now: Nanos, parked: bool) {
        let note = &mut self.notes[tag.index()];
        if note.start != start {
            *note = Note { start, ..Note::NONE };
        }
        note.since = now;
        note.parks += u32::from(parked);
    }

    /// It goes on from a node, `depth` down.
    #[inline(never)]
    pub(crate) fn go_on(&mut self, io: Cookie, start: Nanos, node: NodeId, depth: u8, now: Nanos) {
        let note = &mut self.notes[io.tag.index()];
        if note.start == start {
            let ns = now.since(note.since);
            note.visits.add(Visit { node, depth, ns, generation: io.generation });
        }
    }

    /// A request begins that another one spawned.
    #[inline(never)]
    pub(crate) fn spawned(&mut self, parent: Tag, child: Tag, start: Nanos) {
        self.notes[child.index()] = Note { start, ..Note::NONE };
        self.notes[parent.index()].pieces += 1;
    }

    /// It is over; the parent is `depth` nodes down.
    #[inline(never)]
    pub(crate) fn child_ended(&mut self, parent: Tag, child: Tag, depth: u8) {
        let own = self.notes[child.index()];
        let note = &mut self.notes[parent.index()];
        // A piece of a piece was the slower part of that.
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

    /// A request of the front-end took that long, which is too long.
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

    /// What was found, and how many more there were.
    pub(crate) fn take(&mut self) -> (std::vec::Drain<'_, Slow>, u64) {
        (self.found.drain(..), std::mem::take(&mut self.missed))
    }
}

/// How often a request was in a place where it, or another node for it, had been before: at the same depth, in another
/// node, or at the lowest depth once more.
fn retries(visits: &[Visit]) -> u32 {
    let lowest = visits.iter().map(|visit| visit.depth).max();
    let again = |(n, visit): &(usize, &Visit)| {
        visits[..*n].iter().any(|before| {
            before.depth == visit.depth && (before.node != visit.node || Some(visit.depth) == lowest)
        })
    };
    visits.iter().enumerate().filter(again).count() as u32
}

/// How a request that is under way stands.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Standing {
    /// It waits for a thaw.
    Waiting,
    /// A node has it, or the kernel for that node.
    Held,
    /// The node had no room; it is offered to it again.
    Parked,
}

/// A request that is under way.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct UnderWay {
    /// Its tag.
    pub tag: Tag,
    /// The tag of the one that it is a piece or a copy of.
    pub parent: Option<Tag>,
    /// The request, as it stands.
    pub req: Request,
    /// How it stands.
    pub standing: Standing,
    /// Where it is; none: it is not in the stack yet.
    pub node: Option<NodeId>,
    /// For how long it has been under way.
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
    fn a_request_that_was_tried_on_two_paths_says_so() {
        let mut notes = SlowNotes::new(10, 4);
        let req = Request::new(Op::Read, Bytes(0), Bytes(512));
        notes.rest(Tag(1), Nanos(5), Nanos(5), false);
        notes.go_on(io(1, 2), Nanos(5), NodeId(1), 2, Nanos(25));
        notes.rest(Tag(1), Nanos(5), Nanos(25), true);
        notes.go_on(io(1, 4), Nanos(5), NodeId(2), 2, Nanos(26));
        notes.find(Tag(1), &req, Nanos(5), Status::Ok, 21);
        // Under the same tag another one, which never rested.
        notes.find(Tag(1), &req, Nanos(99), Status::Ok, 10);
        let (found, missed) = notes.take();
        let found: Vec<Slow> = found.collect();
        assert_eq!((found.len(), missed), (2, 0));
        let rests: Vec<_> = found[0].visits.iter().map(|visit| (visit.node.0, visit.ns)).collect();
        assert_eq!((rests, found[0].retries, found[0].parks), (vec![(1, 20), (2, 1)], 1, 1));
        assert!(found[1].visits.is_empty());
    }

    #[test]
    fn of_pieces_the_slowest_is_told() {
        let mut notes = SlowNotes::new(10, 8);
        let start = Nanos(1);
        notes.rest(Tag(0), start, start, false);
        for (tag, end) in [(4, 30), (5, 90), (6, 60)] {
            notes.spawned(Tag(0), Tag(tag), start);
            notes.rest(Tag(tag), start, start, false);
            notes.go_on(io(tag, 2), start, NodeId(1), 1, Nanos(end));
            notes.child_ended(Tag(0), Tag(tag), 1);
        }
        notes.go_on(io(0, 2), start, NodeId(0), 1, Nanos(91));
        notes.find(Tag(0), &Request::flush(), start, Status::Ok, 90);
        let slow = notes.take().0.next().expect("it was found");
        let rests: Vec<_> = slow.visits.iter().map(|visit| (visit.node.0, visit.depth, visit.ns)).collect();
        assert_eq!((rests, slow.pieces, slow.retries), (vec![(0, 1, 90), (1, 2, 89)], 3, 0));
    }

    #[test]
    fn what_finds_no_room_is_counted() {
        let mut notes = SlowNotes::new(0, 1);
        for _ in 0..FOUND_MAX + 3 {
            notes.find(Tag(0), &Request::flush(), Nanos(0), Status::Ok, 1);
        }
        let (found, missed) = notes.take();
        assert_eq!((found.count(), missed), (FOUND_MAX, 3));
    }
}
