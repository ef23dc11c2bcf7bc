//! Events on the paths of a multipath under load: messages, a checker, suspensions, other tables.

use super::seeded_fault::SeededFault;
use block::{Cookie, Request, Status};
use layers::multipath::{Config, Multipath, MultipathNode};
use queue::{Cx, Node, NodeEvent, NodeId, Ring, Verdict};
use sim::Rng;
use std::fmt;
use std::sync::Arc;

/// One multipath over two paths.
pub(super) struct Paths {
    line: String,
    /// Requests wait while no path works, unless a message changes that.
    keeps: bool,
    /// Limit for that wait; 0: none.
    timeout_ns: u64,
    /// Empty until it is opened.
    shared: Option<Arc<Multipath>>,
}

impl fmt::Debug for Paths {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "multipath {}, keeps {}, timeout {} ns", self.line, self.keeps, self.timeout_ns)
    }
}

const SELECTORS: [(&str, &str); 5] = [
    ("round-robin", "1"),
    ("queue-length", "1"),
    ("service-time", "1 1"),
    ("historical-service-time", "1"),
    ("io-affinity", "1"),
];

impl Paths {
    /// Draws a multipath; `ends`: waiting has a limit.
    pub(super) fn random(rng: &mut Rng, keeps: bool, ends: bool) -> Paths {
        let features = if keeps { "1 queue_if_no_path" } else { "0" };
        let group = |rng: &mut Rng, devices: &[&str]| {
            let (name, args) = *rng.pick(&SELECTORS);
            let words = args.split(' ').count();
            let paths: Vec<String> = devices.iter().map(|device| format!("{device} {args}")).collect();
            format!("{name} 0 {} {words} {}", devices.len(), paths.join(" "))
        };
        let line = if rng.chance(500) {
            format!("{features} 0 1 1 {}", group(rng, &["a", "b"]))
        } else {
            format!("{features} 0 2 {} {} {}", rng.between(1, 2), group(rng, &["a"]), group(rng, &["b"]))
        };
        let timeout_ns = if ends { rng.between(1_000_000, 100_000_000) } else { 0 };
        Paths { line, keeps, timeout_ns, shared: None }
    }

    fn shared(&self) -> &Arc<Multipath> {
        self.shared.as_ref().expect("it was opened")
    }

    /// Opens it like a loaded table: all paths work.
    pub(super) fn open(&mut self) {
        let words: Vec<&str> = self.line.split(' ').collect();
        let shared = Multipath::new(Config::parse(&words).expect("a line of a table"));
        shared.set_no_path_timeout(self.timeout_ns);
        self.shared = Some(shared);
    }

    /// Creates the node of a queue.
    pub(super) fn node<R: Ring>(
        &self,
        children: &[NodeId],
        seeded_fault: Option<SeededFault>,
        rng: Rng,
    ) -> Box<dyn Node<R>> {
        let inner = MultipathNode::new(self.shared().clone(), children);
        match seeded_fault {
            None => Box::new(inner),
            Some(seeded_fault) => Box::new(Broken { inner, seeded_fault, rng }),
        }
    }

    /// At times changes paths and groups, and reinstates failed paths.
    pub(super) fn random_event(&self, rng: &mut Rng) {
        let shared = self.shared();
        for path in 0..2 {
            if rng.chance(20) && shared.wants_check(path) {
                shared.reinstate_path(path);
            }
        }
        if !rng.chance(10) {
            return;
        }
        let groups = shared.config().groups.len() as u64;
        let group = rng.between(1, groups).to_string();
        let path = *rng.pick(&["a", "b"]);
        let words: &[&str] = match rng.below(9) {
            0 => &["fail_path", path],
            1..=3 => &["reinstate_path", path],
            4 => &["switch_group", &group],
            5 => &["disable_group", &group],
            6 => &["enable_group", &group],
            7 if !self.keeps => &["fail_if_no_path"],
            _ => &["queue_if_no_path"],
        };
        // While it is suspended it answers busy.
        let named = |word: &str| (0..2).filter(|path| ["a", "b"][*path] == word).collect();
        let _ = shared.message(words, named);
    }

    /// Hands back the waiting requests, or fails them if requests may fail.
    pub(super) fn suspend(&self, rng: &mut Rng) {
        self.shared().presuspend(self.keeps || rng.chance(500));
    }

    pub(super) fn resume(&self) {
        self.shared().resume();
    }

    /// Checks that no request is counted as in flight.
    pub(super) fn check_idle(&self) -> Result<(), String> {
        match self.shared().in_flight() {
            (0, 0) => Ok(()),
            (requests, bytes) => {
                Err(format!("{requests} requests of {bytes} bytes are counted as in flight on idle paths"))
            }
        }
    }
}

/// A multipath with a seeded fault.
struct Broken {
    inner: MultipathNode,
    seeded_fault: SeededFault,
    rng: Rng,
}

impl<R: Ring> Node<R> for Broken {
    fn attach(&mut self, id: NodeId, tags: usize) {
        Node::<R>::attach(&mut self.inner, id, tags);
    }

    fn submit(&mut self, io: Cookie, req: &mut Request, cx: &mut Cx<'_, R>) -> Verdict {
        self.inner.submit(io, req, cx)
    }

    fn end_io(&mut self, io: Cookie, req: &mut Request, status: Status, cx: &mut Cx<'_, R>) -> Verdict {
        match self.seeded_fault {
            SeededFault::UncountedEnd if status.is_ok() && self.rng.chance(100) => Verdict::Up(status),
            SeededFault::PathErrorTold if !status.is_ok() => {
                let _ = self.inner.end_io(io, req, Status::Ok, cx);
                Verdict::Up(status)
            }
            _ => self.inner.end_io(io, req, status, cx),
        }
    }

    fn reap(&mut self, io: Cookie, req: &mut Request, result: i64, cx: &mut Cx<'_, R>) -> Verdict {
        self.inner.reap(io, req, result, cx)
    }

    fn event(&mut self, event: NodeEvent, cx: &mut Cx<'_, R>) {
        self.inner.event(event, cx);
    }

    fn commit(&mut self, cx: &mut Cx<'_, R>) {
        self.inner.commit(cx);
    }

    fn cancel(&mut self, io: Cookie, cx: &mut Cx<'_, R>) {
        self.inner.cancel(io, cx);
    }

    fn close(&mut self, cx: &mut Cx<'_, R>) -> bool {
        self.inner.close(cx)
    }
}

/// Fails requests on their way down or up, like a path and unlike a disk.
pub(super) struct FlakyPath {
    child: NodeId,
    rng: Rng,
    chance: u32,
}

impl FlakyPath {
    /// Creates a node that fails `chance` in a thousand requests, on the way down or up.
    pub(super) fn new(child: NodeId, rng: Rng, chance: u32) -> FlakyPath {
        FlakyPath { child, rng, chance }
    }

    fn status(&mut self) -> Status {
        *self.rng.pick(&[Status::IoError, Status::Transport, Status::Resource])
    }
}

impl<R: Ring> Node<R> for FlakyPath {
    fn submit(&mut self, _: Cookie, _: &mut Request, _: &mut Cx<'_, R>) -> Verdict {
        if self.rng.chance(self.chance) { Verdict::Up(self.status()) } else { Verdict::Down(self.child) }
    }

    fn end_io(&mut self, _: Cookie, _: &mut Request, status: Status, _: &mut Cx<'_, R>) -> Verdict {
        Verdict::Up(if self.rng.chance(self.chance) { self.status() } else { status })
    }
}
