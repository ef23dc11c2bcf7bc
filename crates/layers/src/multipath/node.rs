//! The multipath node of one hardware queue: sends each request down a path, and down another one if that
//! fails.
//!
//! While nothing changes, a request reads the shared epoch and asks its selector for a path; it writes
//! nothing that another thread reads. The node holds the selector of the current group; if the selector is
//! round-robin, the node cycles through the paths itself. When the epoch differs, the node reads the current
//! group and its usable paths anew. Requests that find no path and are to be queued are held here and retried
//! every 5 ms, so no other thread has to wake a waiting queue; the same alarm retries requests whose path had
//! no resources.
//!
//! *Invariant:* `sent` holds the path of a request from its `Down` until its `end_io`, and no other
//! request's.

use super::failure::PathFailure;
use super::select::{PATHS_MAX, Selector};
use super::state::{Multipath, Published};
use block::{Cookie, Data, Flags, Request, Status};
use queue::{Cx, Nanos, Node, NodeEvent, NodeId, Ring, Verdict};
use std::sync::Arc;

/// The interval at which queued requests try again, in nanoseconds.
const RETRY_NS: u64 = 5_000_000;

/// Up to this many paths are cycled through without asking the selector.
const CYCLE_MAX: usize = 16;

/// An entry of the round-robin cycle: the path's number, the index of the next entry in `cycle` and the
/// child's [`NodeId`], 16 bits each from the lowest bit on. One number, because it is read once for each
/// request.
#[derive(Clone, Copy)]
struct CycleEntry(u64);

impl CycleEntry {
    fn new(path: u8, next: u16, child: NodeId) -> CycleEntry {
        CycleEntry(u64::from(path) | u64::from(next) << 16 | u64::from(child.0) << 32)
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

/// The path and time of a sent request: the path's number over all groups in the lowest byte; above, for
/// selectors that measure time, the time in nanoseconds without its highest byte (it wraps after two years).
#[derive(Clone, Copy)]
struct PathTime(u64);

impl PathTime {
    #[inline]
    fn new(path: u8, now: Nanos) -> PathTime {
        PathTime(now.0 << 8 | u64::from(path))
    }

    #[inline]
    fn path(self) -> u8 {
        self.0 as u8
    }

    /// Returns the nanoseconds from the request's time to `now`.
    #[inline]
    fn ago(self, now: Nanos) -> u64 {
        (now.0 << 8).wrapping_sub(self.0 & !0xff) >> 8
    }
}

/// The state of a request that was sent.
#[derive(Clone, Copy)]
struct Sent {
    /// The memory that the request arrived with: a path may replace it by its own (zero-copy).
    data: Data,
    path_time: PathTime,
}

/// The node of one hardware queue.
pub struct MultipathNode {
    shared: Arc<Multipath>,
    /// The epoch for which the fields below are valid and a path is usable; 0: refresh first.
    ready_epoch: u64,
    /// Whether the usable paths of the current group are taken round-robin, and all of them are in `cycle`.
    round_robin: bool,
    /// Whether any selector counts requests in flight.
    counted: bool,
    /// Whether the published counts of the current group change with requests.
    publishes: bool,
    /// Number of the current group's first path.
    first: u8,
    /// Number of paths in the current group; 0: no group is current.
    count: u8,
    /// Index of the next entry of `cycle`.
    next: u16,
    sent: Box<[Sent]>,
    /// The current group's selector; its place in `selectors` has an unused one.
    selector: Selector,
    cycle: [CycleEntry; CYCLE_MAX],
    /// The child of each path, by the path's number over all groups.
    children: [NodeId; PATHS_MAX],
    /// The selectors of all groups, by group.
    selectors: Box<[Selector]>,
    /// The current group; `None`: no path is usable.
    group: Option<u16>,
    /// The epoch of the last refresh.
    epoch: u64,
    /// Queued requests in order of arrival, with the time at which each was queued.
    queued: Vec<(Cookie, Nanos)>,
    alarm_set: bool,
    /// Whether requests are queued until a path of the current group is activated.
    waits: bool,
    published: Arc<Published>,
    /// Whether the published counts of other groups are out of date.
    unpublished: bool,
}

impl MultipathNode {
    /// Creates a node with the child of each path, in order over all groups.
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
            round_robin: false,
            counted: selectors.iter().any(Selector::counts),
            publishes: false,
            first: 0,
            count: 0,
            next: 0,
            sent: Box::default(),
            selector: Selector::empty(),
            cycle: [CycleEntry(0); CYCLE_MAX],
            children: by_path,
            selectors,
            group: None,
            epoch: 0,
            queued: Vec::new(),
            alarm_set: false,
            waits: false,
            published,
            unpublished: false,
            shared,
        }
    }

    /// Reads the current group and its usable paths after the epoch has changed.
    #[cold]
    fn refresh(&mut self) {
        if let Some(group) = self.group.take() {
            std::mem::swap(&mut self.selector, &mut self.selectors[usize::from(group)]);
        }
        self.unpublished = true;
        // The epoch is read first, so that changes during the refresh cause another one.
        self.epoch = self.shared.epoch();
        // The group is chosen before the paths are read, because a path is usable only while its group is
        // current.
        let group = self.shared.choose_group().map(|group| group as u16);
        for (group, selector) in self.selectors.iter_mut().enumerate() {
            let (first, _) = self.shared.paths_of(group);
            selector.set_usable(|path| self.shared.is_usable(first + usize::from(path)));
        }
        // The chosen group has an active path. If none is usable, it is being activated or has just failed;
        // the epoch will change again.
        self.group = group.filter(|&group| self.selectors[usize::from(group)].has_usable());
        self.waits = group.is_some() && self.group.is_none() && !self.shared.is_being_removed();
        (self.next, self.ready_epoch, self.count) = (0, 0, 0);
        (self.round_robin, self.publishes) = (false, false);
        let Some(group) = self.group.map(usize::from) else { return };
        std::mem::swap(&mut self.selector, &mut self.selectors[group]);
        let (first, count) = self.shared.paths_of(group);
        (self.first, self.count, self.ready_epoch) = (first as u8, count as u8, self.epoch);
        let paths = self.selector.cycle();
        self.publishes = paths.is_empty();
        self.round_robin = (1..=CYCLE_MAX).contains(&paths.len());
        for (number, path) in paths.iter().enumerate().filter(|_| self.round_robin) {
            let next = if number + 1 == paths.len() { 0 } else { number as u16 + 1 };
            let path = self.first + path;
            self.cycle[number] = CycleEntry::new(path, next, self.children[usize::from(path)]);
        }
    }

    /// Returns whether nothing has changed and a path is usable.
    #[inline]
    fn is_ready(&self) -> bool {
        self.shared.epoch() == self.ready_epoch
    }

    /// Returns the child for a request in the round-robin cycle, and records it as sent.
    #[inline]
    fn next_in_cycle(&mut self, io: Cookie, req: &Request) -> Option<NodeId> {
        // The index is always in range; the remainder spares the bounds check.
        let entry = self.cycle[usize::from(self.next) % CYCLE_MAX];
        // There is an entry for each tag.
        let sent = self.sent.get_mut(io.tag.index())?;
        self.next = entry.next();
        *sent = Sent { data: req.data, path_time: PathTime::new(entry.path(), Nanos(0)) };
        Some(entry.child())
    }

    /// Sends a request down a path of the current group; `now` is used by selectors that measure time.
    #[inline]
    fn send_to(&mut self, io: Cookie, req: &Request, path: u8, now: Nanos) -> Verdict {
        let path = self.first.wrapping_add(path);
        // There is an entry for each tag.
        if let Some(sent) = self.sent.get_mut(io.tag.index()) {
            *sent = Sent { data: req.data, path_time: PathTime::new(path, now) };
        }
        Verdict::Down(self.children[usize::from(path)])
    }

    /// Sends a request, after a refresh if the epoch has changed. Returns `None` if no path is usable.
    fn send(&mut self, io: Cookie, req: &Request, now: Nanos) -> Option<Verdict> {
        if self.shared.epoch() != self.epoch {
            self.refresh();
        }
        self.group?;
        if self.round_robin {
            return self.next_in_cycle(io, req).map(Verdict::Down);
        }
        let path = self.selector.take(req.len, now)?;
        Some(self.send_to(io, req, path, now))
    }

    /// Sends a request down the path that the current group's selector chooses. Cases that need a call go
    /// through `choose`, in tail position, so that no request saves registers here.
    #[inline(never)]
    fn select<R: Ring>(&mut self, io: Cookie, req: &Request, cx: &mut Cx<'_, R>) -> Verdict {
        match self.selector.take_small(req.len) {
            Some(path) => self.send_to(io, req, path, cx.now()),
            None => self.choose(io, req, cx),
        }
    }

    /// Handles the cases of `submit` that need a refresh or a general choice.
    #[inline(never)]
    fn choose<R: Ring>(&mut self, io: Cookie, req: &Request, cx: &mut Cx<'_, R>) -> Verdict {
        match self.send(io, req, cx.now()) {
            Some(verdict) => verdict,
            None => self.no_path(io, req, Status::IoError, cx),
        }
    }

    /// Ends a request whose selector measures how long requests take.
    #[inline(never)]
    fn ended_timed<R: Ring>(
        &mut self,
        io: Cookie,
        req: &mut Request,
        status: Status,
        cx: &mut Cx<'_, R>,
    ) -> Verdict {
        if !status.is_ok() {
            return self.failed_timed(io, req, status, cx);
        }
        self.end_timed(io, cx);
        Verdict::Up(status)
    }

    /// Ends a request that failed, and whose selector measures how long requests take. This function is
    /// separate so that `ended_timed` calls nothing and saves no registers.
    #[cold]
    fn failed_timed<R: Ring>(
        &mut self,
        io: Cookie,
        req: &mut Request,
        status: Status,
        cx: &mut Cx<'_, R>,
    ) -> Verdict {
        self.end_timed(io, cx);
        self.failed(io, req, status, cx)
    }

    #[inline]
    fn end_timed<R: Ring>(&mut self, io: Cookie, cx: &Cx<'_, R>) {
        let path_time = self.sent[io.tag.index()].path_time;
        if let Selector::Historical(selector) = &mut self.selector {
            selector.end(path_time.path().wrapping_sub(self.first), path_time.ago(cx.now()), cx.now());
        }
    }

    /// Ends a request on a path of a group that is no longer current.
    #[cold]
    fn ended_in_other_group<R: Ring>(
        &mut self,
        io: Cookie,
        req: &mut Request,
        status: Status,
        cx: &mut Cx<'_, R>,
    ) -> Verdict {
        let path_time = self.sent[io.tag.index()].path_time;
        let group = self.shared.group_of(path_time.path().into());
        let place = path_time.path().wrapping_sub(self.shared.paths_of(group).0 as u8);
        self.selectors[group].end(place, req.len, path_time.ago(cx.now()), cx.now());
        self.unpublished = true;
        if status.is_ok() { Verdict::Up(status) } else { self.failed(io, req, status, cx) }
    }

    /// Publishes the counts of the current group; those of other groups only if a request has ended there.
    fn publish(&mut self) {
        self.selector.renumber_stamps();
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

    /// Handles a request without a usable path; `status` is its result on the path that was tried last.
    #[cold]
    fn no_path<R: Ring>(&mut self, io: Cookie, req: &Request, status: Status, cx: &mut Cx<'_, R>) -> Verdict {
        if self.shared.must_push_back() {
            return Verdict::Up(Status::Requeue);
        }
        if req.flags.contains(Flags::NOWAIT) {
            return Verdict::Up(Status::Again);
        }
        if self.waits || self.shared.may_queue(cx.now()) { self.enqueue(io, cx) } else { Verdict::Up(status) }
    }

    fn enqueue<R: Ring>(&mut self, io: Cookie, cx: &mut Cx<'_, R>) -> Verdict {
        self.queued.push((io, cx.now()));
        self.set_alarm(cx);
        Verdict::Held
    }

    fn set_alarm<R: Ring>(&mut self, cx: &mut Cx<'_, R>) {
        if !std::mem::replace(&mut self.alarm_set, true) {
            cx.alarm(cx.now().after(RETRY_NS));
        }
    }

    /// Handles a failed request: retries it on another path if the error is the path's.
    #[cold]
    fn failed<R: Ring>(
        &mut self,
        io: Cookie,
        req: &mut Request,
        status: Status,
        cx: &mut Cx<'_, R>,
    ) -> Verdict {
        let sent = self.sent[io.tag.index()];
        let nowait = req.flags.contains(Flags::NOWAIT) && status == Status::Again;
        // An invalid request is invalid on every path, so it does not fail the path.
        if !status.is_path_error() || nowait || status == Status::Invalid || status == Status::Requeue {
            return Verdict::Up(status);
        }
        req.data = sent.data;
        if matches!(status, Status::Resource | Status::DeviceResource) {
            // The path works, but has no resources: retry later.
            return self.enqueue(io, cx);
        }
        self.shared.fail_path_for(sent.path_time.path().into(), PathFailure::Request(status));
        match self.send(io, req, cx.now()) {
            Some(verdict) => verdict,
            None => self.no_path(io, req, status, cx),
        }
    }
}

impl<R: Ring> Node<R> for MultipathNode {
    fn attach(&mut self, _: NodeId, tags: usize) {
        self.sent = vec![Sent { data: Data::NONE, path_time: PathTime(0) }; tags].into();
        self.queued.reserve(tags);
    }

    #[inline]
    fn submit(&mut self, io: Cookie, req: &mut Request, cx: &mut Cx<'_, R>) -> Verdict {
        if self.is_ready() {
            if self.round_robin
                && let Some(child) = self.next_in_cycle(io, req)
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
        // There is an entry for each tag.
        let Some(&Sent { path_time, .. }) = self.sent.get(io.tag.index()) else {
            return Verdict::Up(status);
        };
        let place = path_time.path().wrapping_sub(self.first);
        if place >= self.count {
            return self.ended_in_other_group(io, req, status, cx);
        }
        match &mut self.selector {
            Selector::QueueLength(selector) => selector.end(place),
            Selector::ServiceTime(selector) => selector.end(place, req.len.0),
            _ => return self.ended_timed(io, req, status, cx),
        }
        if status.is_ok() { Verdict::Up(status) } else { self.failed(io, req, status, cx) }
    }

    /// Retries or cancels a queued request.
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
            self.refresh();
        }
        let waits = |node: &Self, now| node.waits || node.shared.may_queue(now);
        if self.group.is_some() || self.shared.must_push_back() || !waits(self, cx.now()) {
            if let Some((_, since)) = self.queued.first() {
                self.shared.record_wait(cx.now().since(*since));
            }
            self.queued.drain(..).for_each(|(io, _)| cx.resume(io, 0));
        }
        if !self.queued.is_empty() {
            self.set_alarm(cx);
        }
    }

    fn commit(&mut self, _: &mut Cx<'_, R>) {
        if self.publishes | self.unpublished {
            self.publish();
        }
    }

    fn cancel(&mut self, io: Cookie, cx: &mut Cx<'_, R>) {
        // The queue itself cancels a request that is held below; a request held here waits for a path.
        if let Some(place) = self.queued.iter().position(|&(queued, _)| queued == io) {
            self.queued.remove(place);
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

/// The queue has ended, so no request is in flight: its published counts are reset.
impl Drop for MultipathNode {
    fn drop(&mut self) {
        self.published.clear();
    }
}

const _: () = assert!(size_of::<Sent>() <= 32, "a request's state here is half a cache line at most");
