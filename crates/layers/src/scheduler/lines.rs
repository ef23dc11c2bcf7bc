//! The requests that wait, in lines: by the time they came and by where they begin, merged where they touch.
//!
//! What waits is a **group**: one request, or several that follow each other on the device and will go down as one. A
//! group is named by the tag of its first request to come, its *lead*. Everything lies in arrays that were made with
//! the queue. The order of sectors is a sorted array and not a tree: moving the few KiB that a queue's depth comes to
//! costs less than walking pointers.
//!
//! *Invariant:* a tag is in at most one group; a group is in exactly one line.

use super::merge::{Memory, Rules};
use block::{Bytes, Cookie, Data, Flags, Op, Request, Segment, Tag};
use queue::Nanos;

/// No tag: those are below 2^16.
const NONE: u32 = u32::MAX;

/// A request's place in its group, and the group's facts, which are those of its lead.
#[derive(Clone, Copy, Debug)]
struct Entry {
    req: Request,
    generation: u32,
    /// The request behind it in its group.
    next: u32,
    group: Group,
}

/// What is known of a group.
#[derive(Clone, Copy, Debug)]
pub(super) struct Group {
    pub(super) start: u64,
    pub(super) end: u64,
    pub(super) memory: Memory,
    /// 0: it has become part of another.
    pub(super) requests: u32,
    pub(super) arrived: Nanos,
    pub(super) deadline: Nanos,
    first: u32,
    last: u32,
    /// Neighbours by time in their line.
    older: u32,
    younger: u32,
}

impl Entry {
    const VACANT: Entry = Entry {
        req: Request::flush(),
        generation: 0,
        next: NONE,
        group: Group {
            start: 0,
            end: 0,
            memory: Memory::NONE,
            requests: 0,
            arrived: Nanos(0),
            deadline: Nanos(0),
            first: NONE,
            last: NONE,
            older: NONE,
            younger: NONE,
        },
    };
}

/// One line.
#[derive(Debug)]
struct Line {
    oldest: u32,
    youngest: u32,
    /// Where each group begins, and its lead.
    sorted: Vec<(u64, u32)>,
    /// It is left in the order of time.
    in_order: bool,
    /// The group that came last or that something was merged into last, while it waits.
    last: u32,
}

/// With what a request that comes may be merged.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Merging {
    /// With nothing.
    None,
    /// With the group that came last or that something was merged into last, as the kernel's `last_merge`.
    Last,
    /// With all that wait; before them only if `front`.
    All {
        /// To their beginnings, too.
        front: bool,
    },
}

/// How a request came into a line.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Came {
    /// As a group of its own.
    New,
    /// Behind the requests of a group; and what led the group that this one reaches by that, which is part of it now.
    Back(Option<Tag>),
    /// Before them; and what led the group that has become the end of the one before it.
    Front(Option<Tag>),
}

/// Lines of classes, such as reads and writes.
#[derive(Debug)]
pub(super) struct Lines {
    entries: Box<[Entry]>,
    lines: Box<[Line]>,
    rules: Rules,
    waiting: u32,
}

impl Lines {
    /// For requests of that many tags. `in_order`: a line that is not sorted and takes nothing to the front.
    pub(super) fn new(tags: usize, classes: usize, rules: Rules, in_order: impl Fn(usize) -> bool) -> Lines {
        let line = |class| Line {
            oldest: NONE,
            youngest: NONE,
            sorted: Vec::with_capacity(tags),
            in_order: in_order(class),
            last: NONE,
        };
        Lines {
            entries: vec![Entry::VACANT; tags].into(),
            lines: (0..classes).map(line).collect(),
            rules,
            waiting: 0,
        }
    }

    /// Groups that wait.
    pub(super) fn waiting(&self) -> u32 {
        self.waiting
    }

    /// The group that a tag leads.
    pub(super) fn group(&self, lead: Tag) -> &Group {
        &self.entries[lead.index()].group
    }

    /// The cookie of a request that is here.
    pub(super) fn cookie(&self, tag: Tag) -> Cookie {
        Cookie { tag, generation: self.entries[tag.index()].generation }
    }

    /// Remember a request, which need not go into a line at once.
    pub(super) fn note(&mut self, io: Cookie, req: &Request, memory: Memory, now: Nanos) {
        let at = u32::from(io.tag.0);
        self.entries[io.tag.index()] = Entry {
            req: *req,
            generation: io.generation,
            next: NONE,
            group: Group {
                start: req.offset.0,
                end: req.end().0,
                memory,
                requests: 1,
                arrived: now,
                deadline: now,
                first: at,
                last: at,
                older: NONE,
                younger: NONE,
            },
        };
    }

    /// The request that was noted.
    pub(super) fn request(&self, tag: Tag) -> &Request {
        &self.entries[tag.index()].req
    }

    /// Put a request that was noted into a line: behind or before one that is there, if it may be merged with that.
    pub(super) fn insert(&mut self, tag: Tag, class: usize, deadline: Nanos, merging: Merging) -> Came {
        self.entries[tag.index()].group.deadline = deadline;
        let Group { start, end, memory, .. } = self.entries[tag.index()].group;
        let line = &self.lines[class];
        let at = line.sorted.partition_point(|row| row.0 <= start);
        if memory.mergeable && merging != Merging::None {
            let may = |lead| merging != Merging::Last || lead == line.last;
            if at > 0 && may(line.sorted[at - 1].1) && self.joins(line.sorted[at - 1].1, u32::from(tag.0)) {
                let lead = line.sorted[at - 1].1;
                self.join(lead, u32::from(tag.0));
                self.lines[class].last = lead;
                // What was a gap may have been closed.
                let behind = self.lines[class].sorted.get(at).map(|row| row.1);
                let behind = behind.filter(|&behind| self.joins(lead, behind));
                return Came::Back(behind.and_then(|_| self.swallow(class, lead, at)));
            }
            if merging != (Merging::All { front: false }) && !line.in_order && end > start {
                let behind = at + line.sorted[at..].partition_point(|row| row.0 < end);
                if let Some(&(_, lead)) = line.sorted.get(behind)
                    && may(lead)
                    && self.joins(u32::from(tag.0), lead)
                {
                    return Came::Front(self.prepend(class, behind, lead, u32::from(tag.0)));
                }
            }
        }
        self.lines[class].sorted.insert(at, (start, u32::from(tag.0)));
        self.push(class, u32::from(tag.0));
        self.waiting += 1;
        Came::New
    }

    /// Whether the group led by `behind` may follow on that led by `ahead`.
    fn joins(&self, ahead: u32, behind: u32) -> bool {
        let (a, b) = (&self.entries[ahead as usize], &self.entries[behind as usize]);
        a.group.end == b.group.start
            && same_kind(&a.req, &b.req)
            && self.rules.admit(a.req.op, a.group.start, b.group.end, &a.group.memory, &b.group.memory)
    }

    /// Put the requests of `behind` behind those of `ahead`.
    fn join(&mut self, ahead: u32, behind: u32) {
        let Group { first, last, end, memory, .. } = self.entries[behind as usize].group;
        let requests = std::mem::take(&mut self.entries[behind as usize].group.requests);
        let group = &mut self.entries[ahead as usize].group;
        let tail = std::mem::replace(&mut group.last, last);
        group.end = end;
        group.requests += requests;
        group.memory = group.memory.followed_by(&memory);
        self.entries[tail as usize].next = first;
    }

    /// The group at a place of the sorted line becomes the end of `lead`, which waits as long as the older of them.
    fn swallow(&mut self, class: usize, lead: u32, place: usize) -> Option<Tag> {
        let behind = self.lines[class].sorted.remove(place).1;
        self.waiting -= 1;
        let Group { arrived, deadline, .. } = self.entries[behind as usize].group;
        let now = self.entries[lead as usize].group;
        self.join(lead, behind);
        self.lines[class].last = lead;
        let group = &mut self.entries[lead as usize].group;
        group.arrived = now.arrived.min(arrived);
        group.deadline = now.deadline.min(deadline);
        if deadline < now.deadline {
            // It takes the other's place in the line.
            self.unlink(class, lead);
            self.replace(class, behind, lead);
        } else {
            self.unlink(class, behind);
        }
        tag_of(behind)
    }

    /// A request becomes the beginning of the group at a place of the sorted line.
    fn prepend(&mut self, class: usize, place: usize, lead: u32, tag: u32) -> Option<Tag> {
        let Group { start, memory, .. } = self.entries[tag as usize].group;
        self.entries[tag as usize].group.requests = 0;
        let group = &mut self.entries[lead as usize].group;
        let head = std::mem::replace(&mut group.first, tag);
        group.start = start;
        group.requests += 1;
        group.memory = memory.followed_by(&group.memory);
        self.entries[tag as usize].next = head;
        self.lines[class].last = lead;
        let sorted = &mut self.lines[class].sorted;
        sorted.remove(place);
        let place = sorted.partition_point(|row| row.0 <= start);
        sorted.insert(place, (start, lead));
        let before = self.lines[class].sorted[..place].last().map(|row| row.1);
        let before = before.filter(|&before| self.joins(before, lead))?;
        self.swallow(class, before, place)
    }

    fn push(&mut self, class: usize, lead: u32) {
        let line = &mut self.lines[class];
        line.last = lead;
        let before = std::mem::replace(&mut line.youngest, lead);
        if before == NONE {
            line.oldest = lead;
        } else {
            self.entries[before as usize].group.younger = lead;
        }
        let group = &mut self.entries[lead as usize].group;
        (group.older, group.younger) = (before, NONE);
    }

    fn unlink(&mut self, class: usize, lead: u32) {
        let Group { older, younger, .. } = self.entries[lead as usize].group;
        self.link(class, older, younger);
    }

    fn replace(&mut self, class: usize, gone: u32, by: u32) {
        let Group { older, younger, .. } = self.entries[gone as usize].group;
        self.link(class, older, by);
        self.link(class, by, younger);
    }

    fn link(&mut self, class: usize, older: u32, younger: u32) {
        match older {
            NONE => self.lines[class].oldest = younger,
            older => self.entries[older as usize].group.younger = younger,
        }
        match younger {
            NONE => self.lines[class].youngest = older,
            younger => self.entries[younger as usize].group.older = older,
        }
    }

    /// The group of a class that has waited longest.
    pub(super) fn oldest(&self, class: usize) -> Option<Tag> {
        tag_of(self.lines[class].oldest)
    }

    /// The group of a class that begins at that byte or is the next to begin behind it; in a line that is left in the
    /// order of time the oldest.
    pub(super) fn next_from(&self, class: usize, from: u64) -> Option<Tag> {
        let line = &self.lines[class];
        if line.in_order {
            return tag_of(line.oldest);
        }
        let at = line.sorted.partition_point(|row| row.0 < from);
        line.sorted.get(at).and_then(|row| tag_of(row.1))
    }

    /// Take a group out of its line.
    pub(super) fn remove(&mut self, class: usize, lead: Tag) {
        let at = u32::from(lead.0);
        let start = self.entries[lead.index()].group.start;
        let sorted = &mut self.lines[class].sorted;
        let mut place = sorted.partition_point(|row| row.0 < start);
        while sorted[place].1 != at {
            place += 1;
        }
        sorted.remove(place);
        if self.lines[class].last == at {
            self.lines[class].last = NONE;
        }
        self.unlink(class, at);
        self.waiting -= 1;
    }

    /// The requests of a group, in the order of sectors.
    pub(super) fn requests(&self, lead: Tag) -> Requests<'_> {
        Requests { entries: &self.entries, next: self.entries[lead.index()].group.first }
    }

    /// The requests of a group are lent their parts of that memory.
    pub(super) fn lend(&mut self, lead: Tag, memory: Segment) {
        let Group { start, first, .. } = self.entries[lead.index()].group;
        let mut next = first;
        while next != NONE {
            let Entry { req, next: behind, .. } = &mut self.entries[next as usize];
            let part = memory.slice((req.offset.0 - start) as u32, req.len.0 as u32);
            req.data = Data::One(part);
            next = *behind;
        }
    }

    /// A group as one request, its memory left out.
    pub(super) fn whole(&self, lead: Tag) -> Request {
        let Entry { req, group, .. } = &self.entries[lead.index()];
        Request {
            offset: Bytes(group.start),
            len: Bytes(group.end - group.start),
            data: Data::NONE,
            op: req.op,
            flags: kind_flags(req).with(if group.memory.lent { Flags::MAY_LEND } else { Flags::NONE }),
        }
    }
}

/// The flags that merged requests have in common; which of them are lent memory is told by that.
fn kind_flags(req: &Request) -> Flags {
    req.flags.without(Flags::MAY_LEND)
}

fn same_kind(a: &Request, b: &Request) -> bool {
    a.op == b.op && kind_flags(a) == kind_flags(b)
}

/// Whether requests of that operation are ever merged, and which flags keep them from it.
pub(super) fn is_mergeable(op: Op, flags: Flags) -> bool {
    matches!(op, Op::Read | Op::Write | Op::Discard) && !flags.has(Flags::FUA) && !flags.has(Flags::NOWAIT)
}

fn tag_of(number: u32) -> Option<Tag> {
    (number != NONE).then_some(Tag(number as u16))
}

/// The requests of a group.
pub(super) struct Requests<'a> {
    entries: &'a [Entry],
    next: u32,
}

impl<'a> Iterator for Requests<'a> {
    type Item = (Cookie, &'a Request);

    fn next(&mut self) -> Option<Self::Item> {
        let tag = tag_of(self.next)?;
        let entry = &self.entries[tag.index()];
        self.next = entry.next;
        Some((Cookie { tag, generation: entry.generation }, &entry.req))
    }
}
