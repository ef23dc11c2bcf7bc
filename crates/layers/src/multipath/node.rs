//! A hardware queue's part of a multipath device: sends each request down a path, and down another when that fails.
//!
//! While nothing changes a request costs one look at the shared epoch and what its selector takes; nothing that
//! another thread reads is written. Where paths are taken in turn, whatever is in flight, that is all that there is to
//! it: such requests take the short way through `submit` and `end_io`. When the epoch differs the node asks which group
//! is in use and which of its paths work. Requests that find no path and are to be kept are held here and tried again a few times a second, so
//! nobody has to wake a queue that waits; the same alarm serves those whose path had no resources.
//!
//! *Invariant:* `started` names the path of a request from its `Down` until its `end_io`, and no other request's.

use super::select::Selector;
use super::state::{Multipath, Published};
use block::{Cookie, Data, Flags, Request, Status};
use queue::{Cx, Nanos, Node, NodeEvent, NodeId, Ring, Verdict};
use std::sync::Arc;

/// How long kept requests wait before they look for a path again.
const LOOK_AGAIN_NS: u64 = 5_000_000;

/// So many paths are taken in turn without asking their selector.
const TURNS_MAX: usize = 16;

/// A path: its group in the upper half, and its place within that in the lower. One number, to be moved as one.
#[derive(Clone, Copy)]
struct Place(u32);

impl Place {
    fn new(group: u16, path: u16) -> Place {
        Place(u32::from(group) << 16 | u32::from(path))
    }

    fn group(self) -> u16 {
        (self.0 >> 16) as u16
    }

    fn path(self) -> u16 {
        self.0 as u16
    }
}

/// A path that requests take in turn with others, and whose turn it is next: a [`Place`], a place in `turns` and a
/// [`NodeId`], from the lowest bit on. One number as well: it is read once for each request.
#[derive(Clone, Copy)]
struct Way(u64);

impl Way {
    fn new(place: Place, next: u16, child: NodeId) -> Way {
        Way(u64::from(place.0) | u64::from(next) << 32 | u64::from(child.0) << 48)
    }

    #[inline]
    fn place(self) -> Place {
        Place(self.0 as u32)
    }

    #[inline]
    fn next(self) -> u16 {
        (self.0 >> 32) as u16
    }

    #[inline]
    fn child(self) -> NodeId {
        NodeId((self.0 >> 48) as u8)
    }
}

/// Where a request went.
#[derive(Clone, Copy)]
struct Started {
    /// The memory with which it came: a path may lend its own.
    data: Data,
    place: Place,
}

/// The node.
pub struct MultipathNode {
    shared: Arc<Multipath>,
    /// One for each path, in order over all groups.
    children: Box<[NodeId]>,
    /// One for each group.
    selectors: Box<[Selector]>,
    /// The group in use; none has a path.
    group: Option<u16>,
    epoch: u64,
    /// Usable paths of the group in use, where they are taken in turn whatever is in flight and there are no more.
    turns: [Way; TURNS_MAX],
    /// The epoch for which that holds; 0: it does not, and the selector is asked.
    turns_epoch: u64,
    /// Whose turn it is.
    next: u16,
    /// There is a selector that counts what is in flight.
    counted: bool,
    started: Box<[Started]>,
    /// When each request went, for selectors that ask.
    started_at: Box<[Nanos]>,
    /// Requests that wait for a path, in the order they came, and since when.
    kept: Vec<(Cookie, Nanos)>,
    alarm_set: bool,
    /// The group in use has no path yet: requests are kept until that is so, or there is no group.
    waits: bool,
    published: Arc<Published>,
    /// What is shown of the selectors is no longer true.
    unpublished: bool,
}

impl MultipathNode {
    /// With the child of each path, in order over all groups.
    pub fn new(shared: Arc<Multipath>, children: &[NodeId]) -> MultipathNode {
        let (published, number) = shared.publish();
        let selectors = shared.config().groups.iter().map(|group| {
            let paths: Vec<_> = group.paths.iter().map(|path| path.args.clone()).collect();
            Selector::new(&group.selector, &paths, number)
        });
        let selectors: Box<[Selector]> = selectors.collect();
        MultipathNode {
            counted: selectors.iter().any(Selector::counts),
            turns: [Way(0); TURNS_MAX],
            turns_epoch: 0,
            next: 0,
            selectors,
            children: children.into(),
            group: None,
            epoch: 0,
            started: Box::default(),
            started_at: Box::default(),
            kept: Vec::new(),
            alarm_set: false,
            waits: false,
            published,
            unpublished: false,
            shared,
        }
    }

    /// Something has changed: which paths are there?
    #[cold]
    fn look(&mut self) {
        // Before the rest: what changes while we look is looked at again.
        self.epoch = self.shared.epoch();
        // Before the paths: one is usable for as long as its group is in use.
        let group = self.shared.group().map(|group| group as u16);
        for (group, selector) in self.selectors.iter_mut().enumerate() {
            let (first, count) = self.shared.paths_of(group);
            selector.set_usable(|path| self.shared.is_usable(first + usize::from(path)), count as u16);
        }
        // A group that was chosen has a path: that is being activated, or was lost since, and the epoch will tell.
        self.group = group.filter(|&group| self.selectors[usize::from(group)].has_usable());
        self.waits = group.is_some() && self.group.is_none() && !self.shared.gives_up();
        (self.next, self.turns_epoch) = (0, 0);
        let Some(group) = self.group else { return };
        let paths = self.selectors[usize::from(group)].turns();
        if (1..=TURNS_MAX).contains(&paths.len()) {
            for (number, &path) in paths.iter().enumerate() {
                let next = if number + 1 == paths.len() { 0 } else { number as u16 + 1 };
                let child = self.children[self.shared.paths_of(usize::from(group)).0 + usize::from(path)];
                self.turns[number] = Way::new(Place::new(group, path), next, child);
            }
            self.turns_epoch = self.epoch;
        }
    }

    /// The way of the path whose turn it is, and with it the tag's `started`: while nothing has changed and paths are
    /// taken in turn.
    #[inline]
    fn take_turn(&mut self, io: Cookie, req: &Request) -> Option<NodeId> {
        if self.shared.epoch() != self.turns_epoch {
            return None;
        }
        // Always within: this spares the question.
        let way = self.turns[usize::from(self.next) % TURNS_MAX];
        // There is one for each tag.
        let started = self.started.get_mut(io.tag.index())?;
        self.next = way.next();
        *started = Started { data: req.data, place: way.place() };
        Some(way.child())
    }

    /// The way down for a request, and with it the tag's `started`.
    fn send(&mut self, io: Cookie, req: &Request, now: Nanos) -> Option<Verdict> {
        if self.shared.epoch() != self.epoch {
            self.look();
        }
        let group = self.group?;
        if let Some(child) = self.take_turn(io, req) {
            return Some(Verdict::Down(child));
        }
        let tag = io.tag.index();
        let selector = &mut self.selectors[usize::from(group)];
        let path = selector.choose(req.len, now)?;
        selector.start(path, req.len);
        self.started[tag] = Started { data: req.data, place: Place::new(group, path) };
        self.started_at[tag] = now;
        self.unpublished = true;
        Some(Verdict::Down(self.child(group, path)))
    }

    /// A request that takes the long way down.
    #[inline(never)]
    fn choose<R: Ring>(&mut self, io: Cookie, req: &Request, cx: &mut Cx<'_, R>) -> Verdict {
        match self.send(io, req, cx.now()) {
            Some(verdict) => verdict,
            None => self.without_path(io, req, Status::IoError, cx),
        }
    }

    /// And the long way up.
    #[inline(never)]
    fn ended<R: Ring>(
        &mut self,
        io: Cookie,
        req: &mut Request,
        status: Status,
        cx: &mut Cx<'_, R>,
    ) -> Verdict {
        let tag = io.tag.index();
        let place = self.started[tag].place;
        let (group, path) = (place.group(), place.path());
        let selector = &mut self.selectors[usize::from(group)];
        if selector.counts() {
            selector.end(path, req.len, self.started_at[tag], cx.now());
            self.unpublished = true;
        }
        if status.is_ok() { Verdict::Up(status) } else { self.failed(io, req, status, cx) }
    }

    #[inline]
    fn child(&self, group: u16, path: u16) -> NodeId {
        self.children[self.number(group, path)]
    }

    #[inline]
    fn number(&self, group: u16, path: u16) -> usize {
        self.shared.paths_of(usize::from(group)).0 + usize::from(path)
    }

    /// There is no path for a request; `status`: how it ended on the last one that it was tried on.
    #[cold]
    fn without_path<R: Ring>(
        &mut self,
        io: Cookie,
        req: &Request,
        status: Status,
        cx: &mut Cx<'_, R>,
    ) -> Verdict {
        if self.shared.hands_back() {
            return Verdict::Up(Status::Requeue);
        }
        if req.flags.has(Flags::NOWAIT) {
            return Verdict::Up(Status::Again);
        }
        if self.waits || self.shared.keeps(cx.now()) { self.keep(io, cx) } else { Verdict::Up(status) }
    }

    fn keep<R: Ring>(&mut self, io: Cookie, cx: &mut Cx<'_, R>) -> Verdict {
        self.kept.push((io, cx.now()));
        self.set_alarm(cx);
        Verdict::Held
    }

    fn set_alarm<R: Ring>(&mut self, cx: &mut Cx<'_, R>) {
        if !std::mem::replace(&mut self.alarm_set, true) {
            cx.alarm(cx.now().after(LOOK_AGAIN_NS));
        }
    }

    /// A path failed a request: another one is tried, if there is one.
    #[cold]
    fn failed<R: Ring>(
        &mut self,
        io: Cookie,
        req: &mut Request,
        status: Status,
        cx: &mut Cx<'_, R>,
    ) -> Verdict {
        let Started { place, data } = self.started[io.tag.index()];
        let nowait = req.flags.has(Flags::NOWAIT) && status == Status::Again;
        // One that makes no sense makes none on any other path: it says nothing of this one.
        if !status.is_path_error() || nowait || status == Status::Invalid || status == Status::Requeue {
            return Verdict::Up(status);
        }
        req.data = data;
        if matches!(status, Status::Resource | Status::DeviceResource) {
            // The path is well; it has no room. Later, then.
            return self.keep(io, cx);
        }
        self.shared.fail_path(self.number(place.group(), place.path()));
        match self.send(io, req, cx.now()) {
            Some(verdict) => verdict,
            None => self.without_path(io, req, status, cx),
        }
    }
}

impl<R: Ring> Node<R> for MultipathNode {
    fn attach(&mut self, _: NodeId, tags: usize) {
        let nowhere = Started { data: Data::NONE, place: Place::new(0, 0) };
        self.started = vec![nowhere; tags].into();
        self.started_at = vec![Nanos(0); tags].into();
        self.kept.reserve(tags);
    }

    #[inline]
    fn submit(&mut self, io: Cookie, req: &mut Request, cx: &mut Cx<'_, R>) -> Verdict {
        match self.take_turn(io, req) {
            Some(child) => Verdict::Down(child),
            None => self.choose(io, req, cx),
        }
    }

    #[inline]
    fn end_io(&mut self, io: Cookie, req: &mut Request, status: Status, cx: &mut Cx<'_, R>) -> Verdict {
        if u8::from(self.counted) | status as u8 != Status::Ok as u8 {
            return self.ended(io, req, status, cx);
        }
        Verdict::Up(status)
    }

    /// A request that was kept is tried again, or given up.
    fn reap(&mut self, io: Cookie, req: &mut Request, result: i64, cx: &mut Cx<'_, R>) -> Verdict {
        if result < 0 {
            return Verdict::Up(Status::from_result(result, 0));
        }
        self.choose(io, req, cx)
    }

    fn event(&mut self, event: NodeEvent, cx: &mut Cx<'_, R>) {
        if !matches!(event, NodeEvent::Alarm) {
            return;
        }
        self.alarm_set = false;
        if self.shared.epoch() != self.epoch {
            self.look();
        }
        let waits = |node: &Self, now| node.waits || node.shared.keeps(now);
        if self.group.is_some() || self.shared.hands_back() || !waits(self, cx.now()) {
            if let Some((_, since)) = self.kept.first() {
                self.shared.waited(cx.now().since(*since));
            }
            self.kept.drain(..).for_each(|(io, _)| cx.resume(io, 0));
        }
        if !self.kept.is_empty() {
            self.set_alarm(cx);
        }
    }

    fn commit(&mut self, _: &mut Cx<'_, R>) {
        if !std::mem::replace(&mut self.unpublished, false) {
            return;
        }
        for (group, selector) in self.selectors.iter().enumerate().filter(|(_, selector)| selector.reports())
        {
            let (first, count) = self.shared.paths_of(group);
            for path in 0..count {
                self.published.set(first + path, selector.report(path as u16));
            }
        }
    }

    fn cancel(&mut self, io: Cookie, cx: &mut Cx<'_, R>) {
        // Whoever holds it below is asked by the queue itself; what is held here waits for a path.
        if let Some(place) = self.kept.iter().position(|&(kept, _)| kept == io) {
            self.kept.remove(place);
            cx.resume(io, -i64::from(Status::Timeout.errno()));
        }
    }

    fn close(&mut self, cx: &mut Cx<'_, R>) -> bool {
        if self.alarm_set {
            cx.cancel_alarm();
        }
        !self.alarm_set
    }
}

/// Nothing of a request's own length is in flight: what was published goes with the queue.
impl Drop for MultipathNode {
    fn drop(&mut self) {
        for path in 0..self.children.len() {
            self.published.set(path, Default::default());
        }
    }
}

const _: () = assert!(size_of::<Started>() <= 32, "a request's state here is half a cache line at most");
