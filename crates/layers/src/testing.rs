//! A stack of one layer over a recording backend, for the tests of layers.

use block::{Cookie, Data, Request, Segment, Status};
use queue::{
    Cx, Done, FileId, FileOp, IoId, Nanos, Node, NodeId, Owner, Patience, Point, Probe, Queue, QueueConfig,
    QueueId, Ring, RingFull, Snapshot, Stack, Verdict,
};
use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::Rc;

/// A ring that carries nothing but the time: what it is, and timers.
pub(crate) struct Clock {
    pub(crate) now: Nanos,
    timers: Vec<(Nanos, IoId)>,
}

impl Ring for Clock {
    fn now(&self) -> Nanos {
        self.now
    }

    fn allocate(&mut self, _: u32) -> Option<Segment> {
        None
    }

    fn free(&mut self, segment: Segment) {
        unreachable!("{segment:?} was not allocated here")
    }

    fn bytes(&self, _: Segment) -> &[u8] {
        &[]
    }

    fn bytes_mut(&mut self, _: Segment) -> &mut [u8] {
        &mut []
    }

    fn try_now(&mut self, _: FileId, _: FileOp, _: &[Segment], _: Patience) -> Option<i64> {
        None
    }

    fn start(&mut self, _: IoId, _: FileId, _: FileOp, _: &[Segment]) -> Result<(), RingFull> {
        Err(RingFull)
    }

    fn timer(&mut self, id: IoId, at: Nanos) {
        self.timers.push((at, id));
    }

    fn cancel(&mut self, id: IoId) {
        self.timers.iter_mut().filter(|timer| timer.1 == id).for_each(|timer| timer.0 = Nanos(0));
    }
}

/// What the backend saw, and what it is to answer.
#[derive(Default)]
pub(crate) struct Log {
    /// Requests in the order they arrived, with their memory piece by piece.
    pub(crate) seen: Vec<(Request, Vec<Segment>)>,
    /// Held, oldest first.
    pub(crate) held: VecDeque<Cookie>,
    /// What reads that may be lent to are lent.
    pub(crate) lends: Option<Segment>,
    /// Hold requests rather than answer at once.
    pub(crate) holds: bool,
    /// Answers in order; `Ok` when there are no more.
    pub(crate) answers: VecDeque<Status>,
    /// Held requests that were asked to give up.
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
        if let (Some(lent), true) = (log.lends, req.flags.has(block::Flags::MAY_LEND)) {
            req.data = Data::One(lent);
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
    /// `layer` is given its child's number.
    pub(crate) fn new<N: Node<Clock> + 'static>(children: u16, layer: impl FnOnce(NodeId) -> N) -> Bench {
        Bench::stack(4, children, vec![Box::new(layer(NodeId(1)))])
    }

    /// The same in a queue of so many requests.
    pub(crate) fn deep(depth: u16, children: u16, layer: Box<dyn Node<Clock>>) -> Bench {
        Bench::stack(depth, children, vec![layer])
    }

    /// Two layers.
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
        Bench { queue, ring: Clock { now: Nanos(1), timers: Vec::new() }, log }
    }

    /// Submit with this memory. What is done is told by [`Bench::done`].
    pub(crate) fn submit(&mut self, mut req: Request, memory: &[Segment]) {
        let tag = self.queue.tag().expect("a free tag");
        req.data = self.queue.run(tag, memory).expect("few segments");
        self.queue.submit(tag, Owner(0), req, &mut self.ring);
    }

    /// End the request that the backend has held longest.
    pub(crate) fn end_oldest(&mut self, status: Status) {
        let cookie = self.log.borrow_mut().held.pop_front().expect("something is held");
        self.queue.complete(cookie, -i64::from(status.errno()), &mut self.ring);
    }

    /// Let time pass until then: timers that are due end, in order.
    pub(crate) fn pass_until(&mut self, end: Nanos) {
        loop {
            self.ring.timers.sort_by_key(|timer| timer.0);
            let Some(&(at, id)) = self.ring.timers.first().filter(|timer| timer.0 <= end) else { break };
            self.ring.timers.remove(0);
            self.ring.now = self.ring.now.max(at);
            // 0: it was cancelled.
            let result = if at == Nanos(0) { -i64::from(libc::ECANCELED) } else { 0 };
            self.queue.complete(id.cookie, result, &mut self.ring);
        }
        self.ring.now = end;
    }

    /// Statuses of what is done since the last call.
    pub(crate) fn done(&mut self) -> Vec<Status> {
        let done: Vec<Done> = self.queue.done().collect();
        for done in &done {
            self.queue.release(done.tag);
        }
        done.into_iter().map(|done| done.status).collect()
    }

    /// Submit and run to the end: the status, and what the backend saw.
    pub(crate) fn run(&mut self, req: Request, memory: &[Segment]) -> (Status, Vec<(Request, Vec<Segment>)>) {
        self.submit(req, memory);
        let done = self.done();
        assert_eq!(done.len(), 1, "it is done at once");
        (done[0], std::mem::take(&mut self.log.borrow_mut().seen))
    }

    pub(crate) fn counted(&mut self) -> Snapshot {
        self.queue.account(self.ring.now);
        self.queue.stats().snapshot(self.ring.now)
    }
}
