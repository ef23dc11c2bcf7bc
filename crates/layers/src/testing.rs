//! A stack of one layer over a recording backend, for the tests of layers.

use block::{Cookie, Data, Request, Segment, Status};
use queue::testing::TestRing;
use queue::{
    Cx, Done, Nanos, Node, NodeId, Owner, Point, Probe, Queue, QueueConfig, QueueId, Snapshot, Stack, Verdict,
};
use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::Rc;

/// A ring without files.
pub(crate) type Clock = TestRing;

/// The log of a recording backend: the requests that it received, and the statuses that it answers with.
#[derive(Default)]
pub(crate) struct Log {
    /// Requests in the order they arrived, with their memory segments.
    pub(crate) seen: Vec<(Request, Vec<Segment>)>,
    /// Held requests, oldest first.
    pub(crate) held: VecDeque<Cookie>,
    /// The memory that zero-copy reads are answered with.
    pub(crate) zero_copy_reads: Option<Segment>,
    /// Holds requests instead of completing them inline.
    pub(crate) holds: bool,
    /// Statuses of the next requests; `Ok` once they are used up.
    pub(crate) answers: VecDeque<Status>,
    /// Held requests for which `cancel` was called.
    pub(crate) cancelled: Vec<Cookie>,
    pub(crate) points: Vec<Point>,
}

struct Recorder(Rc<RefCell<Log>>);

impl Node<Clock> for Recorder {
    fn submit(&mut self, io: Cookie, req: &mut Request, cx: &mut Cx<'_, Clock>) -> Verdict {
        let mut log = self.0.borrow_mut();
        let memory =
            if req.data == Data::NONE { Vec::new() } else { cx.segments(req.data, req.len.0).collect() };
        log.seen.push((*req, memory));
        if let (Some(pages), true) = (log.zero_copy_reads, req.flags.contains(block::Flags::ZERO_COPY)) {
            req.data = Data::One(pages);
        }
        if log.holds {
            log.held.push_back(io);
            return Verdict::Held;
        }
        Verdict::Up(log.answers.pop_front().unwrap_or(Status::Ok))
    }

    fn reap(&mut self, _: Cookie, _: &mut Request, result: i64, _: &mut Cx<'_, Clock>) -> Verdict {
        Verdict::Up(Status::from_result(result, 0))
    }

    fn cancel(&mut self, io: Cookie, _: &mut Cx<'_, Clock>) {
        self.0.borrow_mut().cancelled.push(io);
    }
}

struct Listener(Rc<RefCell<Log>>);

impl Probe for Listener {
    fn point(&mut self, _: Nanos, point: Point) {
        self.0.borrow_mut().points.push(point);
    }
}

/// One layer over a recording backend.
pub(crate) struct Bench {
    pub(crate) queue: Queue<Clock>,
    pub(crate) ring: Clock,
    pub(crate) log: Rc<RefCell<Log>>,
}

impl Bench {
    /// Creates a queue of depth 4. `layer` gets the node id of its child.
    pub(crate) fn new<N: Node<Clock> + 'static>(children: u16, layer: impl FnOnce(NodeId) -> N) -> Bench {
        Bench::stack(4, children, vec![Box::new(layer(NodeId(1)))])
    }

    /// Creates a queue of that depth over a layer with child 1.
    pub(crate) fn deep(depth: u16, children: u16, layer: Box<dyn Node<Clock>>) -> Bench {
        Bench::stack(depth, children, vec![layer])
    }

    /// Creates a queue of depth 4 over two layers.
    pub(crate) fn over<N: Node<Clock> + 'static, M: Node<Clock> + 'static>(
        children: u16,
        upper: impl FnOnce(NodeId) -> N,
        lower: impl FnOnce(NodeId) -> M,
    ) -> Bench {
        Bench::stack(4, children, vec![Box::new(upper(NodeId(1))), Box::new(lower(NodeId(2)))])
    }

    fn stack(depth: u16, children: u16, layers: Vec<Box<dyn Node<Clock>>>) -> Bench {
        let log = Rc::<RefCell<Log>>::default();
        let mut stack = Stack::default();
        for layer in layers {
            stack.layer(layer, children);
        }
        stack.backend(Box::new(Recorder(log.clone())));
        let config = QueueConfig { id: QueueId(0), depth, segments_per_tag: 64, timeout_ns: None };
        let mut queue = Queue::new(config, stack).expect("a stack that fits");
        queue.set_probe(Some(Box::new(Listener(log.clone()))));
        Bench { queue, ring: Clock::at(Nanos(1)), log }
    }

    /// Submits a request with this memory. [`Bench::done`] returns its status.
    pub(crate) fn submit(&mut self, mut req: Request, memory: &[Segment]) {
        let tag = self.queue.tag().expect("a free tag");
        req.data = self.queue.run(tag, memory).expect("few segments");
        self.queue.submit(tag, Owner(0), req, &mut self.ring);
    }

    /// Ends the oldest request that the backend holds.
    pub(crate) fn end_oldest(&mut self, status: Status) {
        let cookie = self.log.borrow_mut().held.pop_front().expect("something is held");
        self.queue.complete(cookie, -i64::from(status.errno()), &mut self.ring);
    }

    /// Advances time to `end`: timers that are due expire, in order.
    pub(crate) fn pass_until(&mut self, end: Nanos) {
        while let Some((id, result)) = self.ring.end_timer(end) {
            self.queue.complete(id.cookie, result, &mut self.ring);
        }
        self.ring.now = end;
    }

    /// Returns the statuses of requests that completed since the last call.
    pub(crate) fn done(&mut self) -> Vec<Status> {
        let done: Vec<Done> = self.queue.done().collect();
        for done in &done {
            self.queue.release(done.tag);
        }
        done.into_iter().map(|done| done.status).collect()
    }

    /// Submits a request that completes inline. Returns its status, and the requests that the backend
    /// received.
    pub(crate) fn run(&mut self, req: Request, memory: &[Segment]) -> (Status, Vec<(Request, Vec<Segment>)>) {
        self.submit(req, memory);
        let done = self.done();
        assert_eq!(done.len(), 1, "it completes inline");
        (done[0], std::mem::take(&mut self.log.borrow_mut().seen))
    }

    pub(crate) fn counted(&mut self) -> Snapshot {
        self.queue.account(self.ring.now);
        self.queue.stats().snapshot(self.ring.now)
    }
}
