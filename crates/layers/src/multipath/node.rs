//! A hardware queue's part of a multipath device: sends each request down a path, and down another when that fails.
//!
//! While nothing changes, a request reads the shared epoch and asks its selector for a path; it writes
//! nothing that another thread reads. The node itself holds the selector of the group in use; where a
//! selector takes its paths in turn regardless of what is in flight, the node does so without asking it. When
//! the epoch differs, the node asks which group is in use and which of its paths work. Requests that find no
//! path and are to be queued are held here and tried again every 5 ms, so no other thread has to wake a
//! waiting queue; the same alarm retries requests whose path had no resources.
//!
//! *Invariant:* `started` names the path of a request from its `Down` until its `end_io`, and no other request's.

use super::failure::PathFailure;
use super::select::{PATHS_MAX, Selector};
use super::state::{Multipath, Published};
use block::{Cookie, Data, Flags, Request, Status};
use queue::{Cx, Nanos, Node, NodeEvent, NodeId, Ring, Verdict};
use std::sync::Arc;

/// How long kept requests wait before they look for a path again.
const LOOK_AGAIN_NS: u64 = 5_000_000;

/// So many paths are taken in turn without asking their selector.
const TURNS_MAX: usize = 16;

/// A path that requests take in turn with others, and whose turn it is next: a path's number, a place in `turns` and a
/// [`NodeId`], from the lowest bit on, 16 bits each. One number: it is read once for each request.
#[derive(Clone, Copy)]
struct Way(u64);

impl Way {
    fn new(path: u8, next: u16, child: NodeId) -> Way {
        Way(u64::from(path) | u64::from(next) << 16 | u64::from(child.0) << 32)
    }

    #[inline]
    fn path(self) -> u8 {
        self.0 as u8
    }

    #[inline]
    fn next(self) -> u16 {
        (self.0 >> 16) as u16
    }

    #[inline]
    fn child(self) -> NodeId {
        NodeId((self.0 >> 32) as u8)
    }
}

/// Where a request went: the path's number over all groups in the lowest byte; above, for selectors that ask, when, in
/// nanoseconds. Of that the upper byte is lost, so what took two years is taken for less.
#[derive(Clone, Copy)]
struct Went(u64);

impl Went {
    #[inline]
    fn new(path: u8, now: Nanos) -> Went {
        Went(now.0 << 8 | u64::from(path))
    }

    #[inline]
    fn path(self) -> u8 {
        self.0 as u8
    }

    /// How long ago, in nanoseconds.
    #[inline]
    fn ago(self, now: Nanos) -> u64 {
        (now.0 << 8).wrapping_sub(self.0 & !0xff) >> 8
    }
}

/// What is known of a request that was sent.
#[derive(Clone, Copy)]
struct Started {
    /// The memory with which it came: a path may lend its own.
    data: Data,
    went: Went,
}

/// The node.
pub struct MultipathNode {
    shared: Arc<Multipath>,
    /// The epoch for which what follows holds, and with it there is a path; 0: it is to be asked.
    ready_epoch: u64,
    /// Usable paths of the group in use are taken in turn whatever is in flight, and all lie in `turns`.
    in_turn: bool,
    /// Some selector counts what is in flight.
    counted: bool,
    /// What is shown of the group in use changes with requests.
    publishes: bool,
    /// The number of the first path of the group in use.
    first: u8,
    /// How many paths that has; 0: there is none.
    count: u8,
    /// Whose turn it is.
    next: u16,
    started: Box<[Started]>,
    /// That of the group in use, which has left its place among the others to one that nobody asks.
    selector: Selector,
    turns: [Way; TURNS_MAX],
    /// By path, over all groups.
    children: [NodeId; PATHS_MAX],
    /// One for each group.
    selectors: Box<[Selector]>,
    /// The group in use; none has a path.
    group: Option<u16>,
    /// The epoch of the last look.
    epoch: u64,
    /// Requests that wait for a path, in the order they came, and since when.
    kept: Vec<(Cookie, Nanos)>,
    alarm_set: bool,
    /// The group in use has no path yet: requests are kept until that is so, or there is no group.
    waits: bool,
    published: Arc<Published>,
    /// What is shown of groups that are not in use is no longer true.
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
        let mut by_path = [NodeId::TOP; PATHS_MAX];
        by_path.iter_mut().zip(children).for_each(|(by_path, child)| *by_path = *child);
        MultipathNode {
            ready_epoch: 0,
            in_turn: false,
            counted: selectors.iter().any(Selector::counts),
            publishes: false,
            first: 0,
            count: 0,
            next: 0,
            started: Box::default(),
            selector: Selector::nobody(),
            turns: [Way(0); TURNS_MAX],
            children: by_path,
            selectors,
            group: None,
            epoch: 0,
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
        if let Some(group) = self.group.take() {
            std::mem::swap(&mut self.selector, &mut self.selectors[usize::from(group)]);
        }
        self.unpublished = true;
        // Before the rest: what changes while we look is looked at again.
        self.epoch = self.shared.epoch();
        // Before the paths: one is usable for as long as its group is in use.
        let group = self.shared.group().map(|group| group as u16);
        for (group, selector) in self.selectors.iter_mut().enumerate() {
            let (first, _) = self.shared.paths_of(group);
            selector.set_usable(|path| self.shared.is_usable(first + usize::from(path)));
        }
        // A group that was chosen has a path: that is being activated, or was lost since, and the epoch will tell.
        self.group = group.filter(|&group| self.selectors[usize::from(group)].has_usable());
        self.waits = group.is_some() && self.group.is_none() && !self.shared.gives_up();
        (self.next, self.ready_epoch, self.count) = (0, 0, 0);
        (self.in_turn, self.publishes) = (false, false);
        let Some(group) = self.group.map(usize::from) else { return };
        std::mem::swap(&mut self.selector, &mut self.selectors[group]);
        let (first, count) = self.shared.paths_of(group);
        (self.first, self.count, self.ready_epoch) = (first as u8, count as u8, self.epoch);
        let paths = self.selector.turns();
        self.publishes = paths.is_empty();
        self.in_turn = (1..=TURNS_MAX).contains(&paths.len());
        for (number, path) in paths.iter().enumerate().filter(|_| self.in_turn) {
            let next = if number + 1 == paths.len() { 0 } else { number as u16 + 1 };
            let path = self.first + path;
            self.turns[number] = Way::new(path, next, self.children[usize::from(path)]);
        }
    }

    /// Whether nothing has changed, and there is a path.
    #[inline]
    fn is_ready(&self) -> bool {
        self.shared.epoch() == self.ready_epoch
    }

    /// The way down for a request, and with it the tag's `started`, where usable paths are taken in turn.
    #[inline]
    fn take_turn(&mut self, io: Cookie, req: &Request) -> Option<NodeId> {
        // Always within: this spares the question.
        let way = self.turns[usize::from(self.next) % TURNS_MAX];
        // There is one for each tag.
        let started = self.started.get_mut(io.tag.index())?;
        self.next = way.next();
        *started = Started { data: req.data, went: Went::new(way.path(), Nanos(0)) };
        Some(way.child())
    }

    /// A request goes down a path of the group in use; `now`: when, for whoever wants to know at its end.
    #[inline]
    fn go(&mut self, io: Cookie, req: &Request, path: u8, now: Nanos) -> Verdict {
        let path = self.first.wrapping_add(path);
        // There is one for each tag.
        if let Some(started) = self.started.get_mut(io.tag.index()) {
            *started = Started { data: req.data, went: Went::new(path, now) };
        }
        Verdict::Down(self.children[usize::from(path)])
    }

    /// A way in any case, once it is known what has changed. None: there is no path.
    fn send(&mut self, io: Cookie, req: &Request, now: Nanos) -> Option<Verdict> {
        if self.shared.epoch() != self.epoch {
            self.look();
        }
        self.group?;
        if self.in_turn {
            return self.take_turn(io, req).map(Verdict::Down);
        }
        let path = self.selector.take(req.len, now)?;
        Some(self.go(io, req, path, now))
    }

    /// Sends a request down the path that the selector of the group in use chooses. What needs a call goes
    /// through `choose`, in tail position, so that no request saves registers here.
    #[inline(never)]
    fn select<R: Ring>(&mut self, io: Cookie, req: &Request, cx: &mut Cx<'_, R>) -> Verdict {
        match self.selector.take_small(req.len) {
            Some(path) => self.go(io, req, path, cx.now()),
            None => self.choose(io, req, cx),
        }
    }

    /// A request that takes the long way down.
    #[inline(never)]
    fn choose<R: Ring>(&mut self, io: Cookie, req: &Request, cx: &mut Cx<'_, R>) -> Verdict {
        match self.send(io, req, cx.now()) {
            Some(verdict) => verdict,
            None => self.without_path(io, req, Status::IoError, cx),
        }
    }

    /// Ends a request whose selector measures how long requests take.
    #[inline(never)]
    fn ended_in_time<R: Ring>(
        &mut self,
        io: Cookie,
        req: &mut Request,
        status: Status,
        cx: &mut Cx<'_, R>,
    ) -> Verdict {
        if !status.is_ok() {
            return self.failed_in_time(io, req, status, cx);
        }
        self.end_in_time(io, cx);
        Verdict::Up(status)
    }

    /// Ends a request that failed, and whose selector measures how long requests take. A function of its own,
    /// so that `ended_in_time` calls nothing and saves no registers.
    #[cold]
    fn failed_in_time<R: Ring>(
        &mut self,
        io: Cookie,
        req: &mut Request,
        status: Status,
        cx: &mut Cx<'_, R>,
    ) -> Verdict {
        self.end_in_time(io, cx);
        self.failed(io, req, status, cx)
    }

    #[inline]
    fn end_in_time<R: Ring>(&mut self, io: Cookie, cx: &Cx<'_, R>) {
        let went = self.started[io.tag.index()].went;
        if let Selector::Historical(historical) = &mut self.selector {
            historical.end(went.path().wrapping_sub(self.first), went.ago(cx.now()), cx.now());
        }
    }

    /// Ends a request that came back from a path of a group that is no longer in use.
    #[cold]
    fn ended_elsewhere<R: Ring>(
        &mut self,
        io: Cookie,
        req: &mut Request,
        status: Status,
        cx: &mut Cx<'_, R>,
    ) -> Verdict {
        let went = self.started[io.tag.index()].went;
        let group = self.shared.group_of(went.path().into());
        let place = went.path().wrapping_sub(self.shared.paths_of(group).0 as u8);
        self.selectors[group].end(place, req.len, went.ago(cx.now()), cx.now());
        self.unpublished = true;
        if status.is_ok() { Verdict::Up(status) } else { self.failed(io, req, status, cx) }
    }

    /// Show the counts of the group in use, and of others only when something came back there.
    fn publish(&mut self) {
        self.selector.look_after_turns();
        if std::mem::take(&mut self.unpublished) {
            return self.publish_all();
        }
        let first = usize::from(self.first);
        self.selector
            .each_report(self.count, |path, report| self.published.set(first + usize::from(path), report));
    }

    #[cold]
    fn publish_all(&mut self) {
        for group in 0..self.selectors.len() {
            let in_use = self.group == Some(group as u16);
            let selector = if in_use { &self.selector } else { &self.selectors[group] };
            let (first, count) = self.shared.paths_of(group);
            selector.each_report(count as u8, |path, report| {
                self.published.set(first + usize::from(path), report)
            });
        }
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
        let started = self.started[io.tag.index()];
        let nowait = req.flags.has(Flags::NOWAIT) && status == Status::Again;
        // One that makes no sense makes none on any other path: it says nothing of this one.
        if !status.is_path_error() || nowait || status == Status::Invalid || status == Status::Requeue {
            return Verdict::Up(status);
        }
        req.data = started.data;
        if matches!(status, Status::Resource | Status::DeviceResource) {
            // The path is well; it has no room. Later, then.
            return self.keep(io, cx);
        }
        self.shared.fail_path_for(started.went.path().into(), PathFailure::Request(status));
        match self.send(io, req, cx.now()) {
            Some(verdict) => verdict,
            None => self.without_path(io, req, status, cx),
        }
    }
}

impl<R: Ring> Node<R> for MultipathNode {
    fn attach(&mut self, _: NodeId, tags: usize) {
        self.started = vec![Started { data: Data::NONE, went: Went(0) }; tags].into();
        self.kept.reserve(tags);
    }

    #[inline]
    fn submit(&mut self, io: Cookie, req: &mut Request, cx: &mut Cx<'_, R>) -> Verdict {
        if self.is_ready() {
            if self.in_turn
                && let Some(child) = self.take_turn(io, req)
            {
                return Verdict::Down(child);
            }
            return self.select(io, req, cx);
        }
        self.choose(io, req, cx)
    }

    #[inline]
    fn end_io(&mut self, io: Cookie, req: &mut Request, status: Status, cx: &mut Cx<'_, R>) -> Verdict {
        if u8::from(self.counted) | status as u8 == Status::Ok as u8 {
            return Verdict::Up(status);
        }
        // There is one for each tag.
        let Some(&Started { went, .. }) = self.started.get(io.tag.index()) else {
            return Verdict::Up(status);
        };
        let place = went.path().wrapping_sub(self.first);
        if place >= self.count {
            return self.ended_elsewhere(io, req, status, cx);
        }
        match &mut self.selector {
            Selector::QueueLength(fewest) => fewest.end(place),
            Selector::ServiceTime(soonest) => soonest.end(place, req.len.0),
            _ => return self.ended_in_time(io, req, status, cx),
        }
        if status.is_ok() { Verdict::Up(status) } else { self.failed(io, req, status, cx) }
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
        if self.publishes | self.unpublished {
            self.publish();
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
        self.published.clear();
    }
}

const _: () = assert!(size_of::<Started>() <= 32, "a request's state here is half a cache line at most");
