//! A hardware queue's part of a multipath device: sends each request down a path, and down another when that fails.
//!
//! While nothing changes a request costs one look at the shared epoch and what its selector takes; nothing that
//! another thread reads is written. When the epoch differs the node asks which group is in use and which of its paths
//! work. Requests that find no path and are to be kept are held here and tried again a few times a second, so
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

/// Where a request went.
#[derive(Clone, Copy)]
struct Started {
    /// Its group, and its path within that.
    group: u16,
    path: u16,
    at: Nanos,
    /// The memory with which it came: a path may lend its own.
    data: Data,
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
    started: Box<[Started]>,
    /// Requests that wait for a path, in the order they came, and since when.
    kept: Vec<(Cookie, Nanos)>,
    alarm_set: bool,
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
        MultipathNode {
            selectors: selectors.collect(),
            children: children.into(),
            group: None,
            epoch: 0,
            started: Box::default(),
            kept: Vec::new(),
            alarm_set: false,
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
        for (group, selector) in self.selectors.iter_mut().enumerate() {
            let (first, count) = self.shared.paths_of(group);
            selector.set_usable(|path| self.shared.is_active(first + usize::from(path)), count as u16);
        }
        let group = self.shared.group().map(|group| group as u16);
        // It may have lost its last path since.
        self.group = group.filter(|&group| self.selectors[usize::from(group)].has_usable());
    }

    /// The way down for a request, and with it the tag's `started`.
    #[inline]
    fn send(&mut self, io: Cookie, req: &Request, now: Nanos) -> Option<Verdict> {
        if self.shared.epoch() != self.epoch {
            self.look();
        }
        let group = self.group?;
        let selector = &mut self.selectors[usize::from(group)];
        let path = selector.choose(req.len, now)?;
        selector.start(path, req.len);
        self.started[io.tag.index()] = Started { group, path, at: now, data: req.data };
        self.unpublished = true;
        Some(Verdict::Down(self.child(group, path)))
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
        if self.shared.keeps(cx.now()) { self.keep(io, cx) } else { Verdict::Up(status) }
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
        let Started { group, path, data, .. } = self.started[io.tag.index()];
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
        self.shared.fail_path(self.number(group, path));
        match self.send(io, req, cx.now()) {
            Some(verdict) => verdict,
            None => self.without_path(io, req, status, cx),
        }
    }
}

impl<R: Ring> Node<R> for MultipathNode {
    fn attach(&mut self, _: NodeId, tags: usize) {
        let nowhere = Started { group: 0, path: 0, at: Nanos(0), data: Data::NONE };
        self.started = vec![nowhere; tags].into();
        self.kept.reserve(tags);
    }

    #[inline]
    fn submit(&mut self, io: Cookie, req: &mut Request, cx: &mut Cx<'_, R>) -> Verdict {
        match self.send(io, req, cx.now()) {
            Some(verdict) => verdict,
            None => self.without_path(io, req, Status::IoError, cx),
        }
    }

    #[inline]
    fn end_io(&mut self, io: Cookie, req: &mut Request, status: Status, cx: &mut Cx<'_, R>) -> Verdict {
        let Started { group, path, at, .. } = self.started[io.tag.index()];
        self.selectors[usize::from(group)].end(path, req.len, at, cx.now());
        self.unpublished = true;
        if status.is_ok() { Verdict::Up(status) } else { self.failed(io, req, status, cx) }
    }

    /// A request that was kept is tried again, or given up.
    fn reap(&mut self, io: Cookie, req: &mut Request, result: i64, cx: &mut Cx<'_, R>) -> Verdict {
        if result < 0 {
            return Verdict::Up(Status::from_result(result, 0));
        }
        match self.send(io, req, cx.now()) {
            Some(verdict) => verdict,
            None => self.without_path(io, req, Status::IoError, cx),
        }
    }

    fn event(&mut self, event: NodeEvent, cx: &mut Cx<'_, R>) {
        if !matches!(event, NodeEvent::Alarm) {
            return;
        }
        self.alarm_set = false;
        if self.shared.epoch() != self.epoch {
            self.look();
        }
        if self.group.is_some() || self.shared.hands_back() || !self.shared.keeps(cx.now()) {
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

const _: () = assert!(size_of::<Started>() <= 48, "a request's state here is most of a cache line at most");
