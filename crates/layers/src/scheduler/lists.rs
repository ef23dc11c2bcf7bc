//! The lists of waiting requests, in order of arrival and of sectors. Adjacent requests are merged.
//!
//! An element of a list is a **group**: one request, or several adjacent ones that are dispatched as one. A
//! group is identified by the tag of its first request to arrive, its *lead*. All state is in arrays
//! allocated with the queue. The sector order is a sorted array rather than a tree: moving the few KiB of a
//! whole queue costs less than following pointers.
//!
//! *Invariant:* a tag is in at most one group; a group is in exactly one list.

use super::merge::{Memory, Rules};
use block::{Bytes, Cookie, Data, Flags, Op, Request, Segment, Tag};
use queue::Nanos;

/// The number that stands for no tag: tags are below 2^16.
const NONE: u32 = u32::MAX;

/// A request and its place in its group; for a lead also the state of the group.
#[derive(Clone, Copy, Debug)]
struct Entry {
    req: Request,
    generation: u32,
    /// The next request of the group.
    next: u32,
    group: Group,
}

/// The state of a group.
#[derive(Clone, Copy, Debug)]
pub(super) struct Group {
    pub(super) start: u64,
    pub(super) end: u64,
    pub(super) memory: Memory,
    /// Number of requests; 0: the group was merged into another one.
    pub(super) requests: u32,
    pub(super) arrived: Nanos,
    pub(super) deadline: Nanos,
    first: u32,
    last: u32,
    /// Neighbours in order of arrival.
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

/// The lists of one class: by arrival and by sector (the kernel's `fifo_list` and `sort_list`).
#[derive(Debug)]
struct List {
    oldest: u32,
    youngest: u32,
    /// The first byte and the lead of each group, by first byte.
    sorted: Vec<(u64, u32)>,
    /// Whether groups are dispatched in order of arrival only.
    in_order: bool,
    /// The waiting group that was inserted or merged into last (the kernel's `last_merge`).
    last: u32,
}

/// Which groups an arriving request may be merged with.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Merging {
    /// No group.
    None,
    /// Only the group that was inserted or merged into last.
    Last,
    /// All groups.
    All {
        /// Whether the request may also be merged in front of a group.
        front: bool,
    },
}

/// The place where a request was inserted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Insertion {
    /// As a new group.
    New,
    /// At the end of a group. If that group now reaches another one, the two were merged; the value is the
    /// lead of the one that was absorbed.
    Back(Option<Tag>),
    /// In front of a group. If another group now reaches it, the two were merged, as for `Back`.
    Front(Option<Tag>),
}

/// The lists of all classes, such as reads and writes.
#[derive(Debug)]
pub(super) struct Lists {
    entries: Box<[Entry]>,
    lists: Box<[List]>,
    rules: Rules,
    waiting: u32,
}

impl Lists {
    /// Allocates lists for that many tags. `in_order` chooses classes that keep the order of arrival and have
    /// no front merges.
    pub(super) fn new(tags: usize, classes: usize, rules: Rules, in_order: impl Fn(usize) -> bool) -> Lists {
        let list = |class| List {
            oldest: NONE,
            youngest: NONE,
            sorted: Vec::with_capacity(tags),
            in_order: in_order(class),
            last: NONE,
        };
        Lists {
            entries: vec![Entry::VACANT; tags].into(),
            lists: (0..classes).map(list).collect(),
            rules,
            waiting: 0,
        }
    }

    /// Returns the number of waiting groups.
    pub(super) fn waiting(&self) -> u32 {
        self.waiting
    }

    /// Returns the group that a tag leads.
    pub(super) fn group(&self, lead: Tag) -> &Group {
        &self.entries[lead.index()].group
    }

    /// Returns the cookie of a registered request.
    pub(super) fn cookie(&self, tag: Tag) -> Cookie {
        Cookie { tag, generation: self.entries[tag.index()].generation }
    }

    /// Registers a request, which is inserted now or later.
    pub(super) fn register(&mut self, io: Cookie, req: &Request, memory: Memory, now: Nanos) {
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

    /// Returns a registered request.
    pub(super) fn request(&self, tag: Tag) -> &Request {
        &self.entries[tag.index()].req
    }

    /// Inserts a registered request: merges it with a group if possible, else adds a group.
    pub(super) fn insert(&mut self, tag: Tag, class: usize, deadline: Nanos, merging: Merging) -> Insertion {
        self.entries[tag.index()].group.deadline = deadline;
        let Group { start, end, memory, .. } = self.entries[tag.index()].group;
        let list = &self.lists[class];
        let at = list.sorted.partition_point(|row| row.0 <= start);
        if memory.mergeable && merging != Merging::None {
            let may = |lead| merging != Merging::Last || lead == list.last;
            if at > 0 && may(list.sorted[at - 1].1) && self.joins(list.sorted[at - 1].1, u32::from(tag.0)) {
                let lead = list.sorted[at - 1].1;
                self.join(lead, u32::from(tag.0));
                self.lists[class].last = lead;
                // The request may have closed the gap to the next group.
                let behind = self.lists[class].sorted.get(at).map(|row| row.1);
                let behind = behind.filter(|&behind| self.joins(lead, behind));
                return Insertion::Back(behind.and_then(|_| self.absorb(class, lead, at)));
            }
            if merging != (Merging::All { front: false }) && !list.in_order && end > start {
                let behind = at + list.sorted[at..].partition_point(|row| row.0 < end);
                if let Some(&(_, lead)) = list.sorted.get(behind)
                    && may(lead)
                    && self.joins(u32::from(tag.0), lead)
                {
                    return Insertion::Front(self.prepend(class, behind, lead, u32::from(tag.0)));
                }
            }
        }
        self.lists[class].sorted.insert(at, (start, u32::from(tag.0)));
        self.push(class, u32::from(tag.0));
        self.waiting += 1;
        Insertion::New
    }

    /// Returns whether the group of `behind` may be merged to the end of the group of `ahead`.
    fn joins(&self, ahead: u32, behind: u32) -> bool {
        let (a, b) = (&self.entries[ahead as usize], &self.entries[behind as usize]);
        a.group.end == b.group.start
            && same_kind(&a.req, &b.req)
            && self.rules.admit(a.req.op, a.group.start, b.group.end, &a.group.memory, &b.group.memory)
    }

    /// Appends the requests of `behind` to the group of `ahead`.
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

    /// Merges the group at a place of the sorted list into `lead`, which keeps the earlier of the two
    /// deadlines.
    fn absorb(&mut self, class: usize, lead: u32, place: usize) -> Option<Tag> {
        let behind = self.lists[class].sorted.remove(place).1;
        self.waiting -= 1;
        let Group { arrived, deadline, .. } = self.entries[behind as usize].group;
        let now = self.entries[lead as usize].group;
        self.join(lead, behind);
        self.lists[class].last = lead;
        let group = &mut self.entries[lead as usize].group;
        group.arrived = now.arrived.min(arrived);
        group.deadline = now.deadline.min(deadline);
        if deadline < now.deadline {
            // The merged group takes the older group's place in order of arrival.
            self.unlink(class, lead);
            self.replace(class, behind, lead);
        } else {
            self.unlink(class, behind);
        }
        tag_of(behind)
    }

    /// Puts a request in front of the group at a place of the sorted list.
    fn prepend(&mut self, class: usize, place: usize, lead: u32, tag: u32) -> Option<Tag> {
        let Group { start, memory, .. } = self.entries[tag as usize].group;
        self.entries[tag as usize].group.requests = 0;
        let group = &mut self.entries[lead as usize].group;
        let head = std::mem::replace(&mut group.first, tag);
        group.start = start;
        group.requests += 1;
        group.memory = memory.followed_by(&group.memory);
        self.entries[tag as usize].next = head;
        self.lists[class].last = lead;
        let sorted = &mut self.lists[class].sorted;
        sorted.remove(place);
        let place = sorted.partition_point(|row| row.0 <= start);
        sorted.insert(place, (start, lead));
        let before = self.lists[class].sorted[..place].last().map(|row| row.1);
        let before = before.filter(|&before| self.joins(before, lead))?;
        self.absorb(class, before, place)
    }

    fn push(&mut self, class: usize, lead: u32) {
        let list = &mut self.lists[class];
        list.last = lead;
        let before = std::mem::replace(&mut list.youngest, lead);
        if before == NONE {
            list.oldest = lead;
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
            NONE => self.lists[class].oldest = younger,
            older => self.entries[older as usize].group.younger = younger,
        }
        match younger {
            NONE => self.lists[class].youngest = older,
            younger => self.entries[younger as usize].group.older = older,
        }
    }

    /// Returns the group of a class that arrived first.
    pub(super) fn oldest(&self, class: usize) -> Option<Tag> {
        tag_of(self.lists[class].oldest)
    }

    /// Returns the first group of a class that begins at or behind byte `from`; in a list in order of
    /// arrival, the oldest.
    pub(super) fn next_from(&self, class: usize, from: u64) -> Option<Tag> {
        let list = &self.lists[class];
        if list.in_order {
            return tag_of(list.oldest);
        }
        let at = list.sorted.partition_point(|row| row.0 < from);
        list.sorted.get(at).and_then(|row| tag_of(row.1))
    }

    /// Removes a group from its lists.
    pub(super) fn remove(&mut self, class: usize, lead: Tag) {
        let at = u32::from(lead.0);
        let start = self.entries[lead.index()].group.start;
        let sorted = &mut self.lists[class].sorted;
        let mut place = sorted.partition_point(|row| row.0 < start);
        while sorted[place].1 != at {
            place += 1;
        }
        sorted.remove(place);
        if self.lists[class].last == at {
            self.lists[class].last = NONE;
        }
        self.unlink(class, at);
        self.waiting -= 1;
    }

    /// Returns the requests of a group in sector order.
    pub(super) fn requests(&self, lead: Tag) -> Requests<'_> {
        Requests { entries: &self.entries, next: self.entries[lead.index()].group.first }
    }

    /// Gives each request of a group its part of the memory that a zero-copy backend answered with.
    pub(super) fn assign_memory(&mut self, lead: Tag, memory: Segment) {
        let Group { start, first, .. } = self.entries[lead.index()].group;
        let mut next = first;
        while next != NONE {
            let Entry { req, next: behind, .. } = &mut self.entries[next as usize];
            let part = memory.slice((req.offset.0 - start) as u32, req.len.0 as u32);
            req.data = Data::One(part);
            next = *behind;
        }
    }

    /// Returns a group as one request without memory.
    pub(super) fn whole(&self, lead: Tag) -> Request {
        let Entry { req, group, .. } = &self.entries[lead.index()];
        Request {
            offset: Bytes(group.start),
            len: Bytes(group.end - group.start),
            data: Data::NONE,
            op: req.op,
            flags: kind_flags(req).union(if group.memory.zero_copy {
                Flags::ZERO_COPY
            } else {
                Flags::empty()
            }),
        }
    }
}

/// Returns the flags that requests must share to be merged. ZERO_COPY is covered by [`Memory`].
fn kind_flags(req: &Request) -> Flags {
    req.flags.difference(Flags::ZERO_COPY)
}

fn same_kind(a: &Request, b: &Request) -> bool {
    a.op == b.op && kind_flags(a) == kind_flags(b)
}

/// Returns whether requests with that operation and flags may be merged at all.
pub(super) fn is_mergeable(op: Op, flags: Flags) -> bool {
    matches!(op, Op::Read | Op::Write | Op::Discard)
        && !flags.contains(Flags::FUA)
        && !flags.contains(Flags::NOWAIT)
}

fn tag_of(number: u32) -> Option<Tag> {
    (number != NONE).then_some(Tag(number as u16))
}

/// An iterator over the requests of a group.
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
