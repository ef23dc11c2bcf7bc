//! Tests of requests over paths that fail and are reinstated: MP-1 to MP-9 as a queue sees them.

use super::*;
use block::{Bytes, Cookie, Op, Request, Status};
use queue::testing::TestRing;
use queue::{Cx, Nanos, Node, NodeId, Owner, Queue, QueueConfig, QueueId, Stack, Verdict};
use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::Arc;

/// A ring without files.
pub(super) type Clock = TestRing;

/// The status that a path answers with, and the operations that it received.
#[derive(Default)]
struct PathLog {
    answer: Option<Status>,
    seen: Vec<Op>,
    held: VecDeque<Cookie>,
}

#[derive(Clone, Default)]
struct Path(Rc<RefCell<PathLog>>);

impl Path {
    /// Sets the status that requests complete with; `None`: hold them.
    fn answers(&self, status: Option<Status>) {
        self.0.borrow_mut().answer = status;
    }
    fn seen(&self) -> usize {
        self.0.borrow().seen.len()
    }
}

impl Node<Clock> for Path {
    fn submit(&mut self, io: Cookie, req: &mut Request, _: &mut Cx<'_, Clock>) -> Verdict {
        let mut log = self.0.borrow_mut();
        log.seen.push(req.op);
        match log.answer {
            Some(status) => Verdict::Up(status),
            None => {
                log.held.push_back(io);
                Verdict::Held
            }
        }
    }
    fn reap(&mut self, _: Cookie, _: &mut Request, result: i64, _: &mut Cx<'_, Clock>) -> Verdict {
        Verdict::Up(Status::from_result(result, 0))
    }
}

pub(super) struct Bench {
    pub(super) queue: Queue<Clock>,
    pub(super) ring: Clock,
    pub(super) shared: Arc<Multipath>,
    paths: Vec<Path>,
}

pub(super) fn bench(line: &str) -> Bench {
    let config = Config::parse(&line.split_whitespace().collect::<Vec<_>>()).unwrap();
    let shared = Multipath::new(config);
    let paths: Vec<Path> = (0..shared.config().path_count()).map(|_| Path::default()).collect();
    let children: Vec<NodeId> = (1..=paths.len() as u8).map(NodeId).collect();
    let mut stack = Stack::default();
    stack.layer(Box::new(MultipathNode::new(shared.clone(), &children)), 0);
    for path in &paths {
        path.answers(Some(Status::Ok));
        stack.backend(Box::new(path.clone()));
    }
    let config = QueueConfig { id: QueueId(0), depth: 8, segments_per_tag: 4, timeout_ns: None };
    let ring = Clock::at(Nanos(1_000));
    Bench { queue: Queue::new(config, stack).unwrap(), ring, shared, paths }
}

impl Bench {
    pub(super) fn submit(&mut self, op: Op) {
        let tag = self.queue.tag().expect("a free tag");
        let len = if op == Op::Flush { 0 } else { 4096 };
        self.queue.submit(tag, Owner(0), Request::new(op, Bytes(0), Bytes(len)), &mut self.ring);
    }
    pub(super) fn done(&mut self) -> Vec<Status> {
        self.queue.turn(&mut self.ring);
        let done: Vec<_> = self.queue.done().collect();
        done.iter().for_each(|done| self.queue.release(done.tag));
        done.into_iter().map(|done| done.status).collect()
    }
    pub(super) fn run(&mut self, op: Op) -> Status {
        self.submit(op);
        let done = self.done();
        assert_eq!(done.len(), 1, "it completes inline");
        done[0]
    }
    /// Advances time to the alarm and runs it.
    pub(super) fn wait(&mut self) {
        let (id, _) = self.ring.end_timer(Nanos(u64::MAX)).expect("an alarm is set");
        self.queue.complete(id.cookie, 0, &mut self.ring);
    }
    pub(super) fn seen(&self) -> Vec<usize> {
        self.paths.iter().map(Path::seen).collect()
    }
    /// Ends the oldest request that a path holds.
    fn end(&mut self, path: usize, status: Status) {
        let cookie = self.paths[path].0.borrow_mut().held.pop_front().expect("a request is held");
        self.queue.complete(cookie, -i64::from(status.errno()), &mut self.ring);
    }
}

const ROUND_ROBIN: &str = "0 0 1 1 round-robin 0 2 1 a 1 b 1";
const QUEUEING: &str = "1 queue_if_no_path 0 1 1 queue-length 0 2 1 a 1 b 1";

#[test]
fn requests_go_down_the_paths_in_turn() {
    let mut bench = bench(ROUND_ROBIN);
    assert!((0..6).all(|_| bench.run(Op::Write).is_ok()));
    assert_eq!(bench.seen(), [3, 3]);
}

#[test]
fn mp_1_a_request_whose_path_fails_goes_down_another() {
    let mut bench = bench(ROUND_ROBIN);
    bench.paths[0].answers(Some(Status::Transport));
    assert!((0..4).all(|_| bench.run(Op::Read).is_ok()));
    assert_eq!(bench.seen(), [1, 4]);
    assert!(!bench.shared.is_active(0));
}

#[test]
fn mp_2_a_path_that_is_reinstated_is_used_again() {
    let mut bench = bench(ROUND_ROBIN);
    bench.shared.fail_path(0);
    assert!((0..2).all(|_| bench.run(Op::Read).is_ok()));
    bench.shared.reinstate_path(0);
    assert!((0..4).all(|_| bench.run(Op::Read).is_ok()));
    assert_eq!(bench.seen(), [2, 4]);
}

#[test]
fn mp_3_the_next_group_takes_over_when_the_last_path_of_one_fails() {
    let mut bench = bench("0 0 2 1 round-robin 0 1 1 a 1 round-robin 0 1 1 b 1");
    assert!(bench.run(Op::Write).is_ok());
    bench.paths[0].answers(Some(Status::IoError));
    assert!(bench.run(Op::Write).is_ok());
    assert_eq!(bench.seen(), [2, 1]);
}

#[test]
fn mp_4_requests_without_a_path_are_queued_or_failed_as_configured() {
    let mut bench = bench(QUEUEING);
    for path in 0..2 {
        bench.shared.fail_path(path);
    }
    bench.submit(Op::Write);
    bench.submit(Op::Flush);
    bench.wait();
    assert!(bench.done().is_empty());
    bench.shared.reinstate_path(1);
    bench.wait();
    assert_eq!(bench.done(), [Status::Ok; 2]);
    bench.shared.fail_path(1);
    bench.submit(Op::Write);
    bench.shared.message(&["fail_if_no_path"], |_| Vec::new()).unwrap();
    bench.wait();
    assert_eq!(bench.done(), [Status::IoError]);
    assert_eq!(bench.run(Op::Read), Status::IoError);
}

#[test]
fn mp_4_queued_requests_fail_after_the_timeout() {
    let mut bench = bench(QUEUEING);
    bench.shared.set_no_path_timeout(20_000_000);
    bench.paths.iter().for_each(|path| path.answers(Some(Status::Transport)));
    bench.submit(Op::Write);
    for _ in 0..3 {
        bench.wait();
        assert!(bench.done().is_empty());
    }
    bench.wait();
    assert_eq!(bench.done(), [Status::IoError]);
    assert!(bench.ring.timers() == 0, "no request waits");
}

#[test]
fn mp_5_errors_of_the_target_are_returned_and_fail_no_path() {
    for status in [
        Status::NotSupported,
        Status::NoSpace,
        Status::Target,
        Status::ReservationConflict,
        Status::Medium,
        Status::Protection,
        Status::Invalid,
    ] {
        let mut bench = bench(ROUND_ROBIN);
        bench.paths[0].answers(Some(status));
        assert_eq!(bench.run(Op::Write), status);
        assert_eq!((bench.shared.valid_paths(), bench.seen()), (2, vec![1, 0]), "{status:?}");
    }
}

#[test]
fn mp_5_a_path_without_resources_is_tried_again_later() {
    let mut bench = bench("0 0 1 1 round-robin 0 1 1 a 1");
    bench.paths[0].answers(Some(Status::Resource));
    bench.submit(Op::Write);
    assert!(bench.done().is_empty());
    bench.paths[0].answers(Some(Status::Ok));
    bench.wait();
    assert_eq!((bench.done(), bench.shared.valid_paths()), (vec![Status::Ok], 1));
}

#[test]
fn mp_5_without_another_path_the_original_error_is_returned() {
    let mut bench = bench("0 0 1 1 round-robin 0 1 1 a 1");
    bench.paths[0].answers(Some(Status::Timeout));
    assert_eq!(bench.run(Op::Write), Status::Timeout);
    assert_eq!(bench.run(Op::Write), Status::IoError);
}

/// MP-8: the kernel's ioctl that probes paths reads from failed paths. Here the path checker reads from paths
/// that failed by themselves until they answer, but not from paths that a message has failed.
#[test]
fn mp_8_paths_that_failed_by_themselves_are_probed() {
    let mut bench = bench("0 0 1 1 round-robin 0 3 0 a b c");
    bench.paths[0].answers(Some(Status::Transport));
    bench.shared.message(&["fail_path", "b"], |_| vec![1]).unwrap();
    assert!((0..3).all(|_| bench.run(Op::Read).is_ok()));
    assert_eq!([0, 1, 2].map(|path| bench.shared.wants_check(path)), [true, false, false]);
    bench.paths[0].answers(Some(Status::Ok));
    assert!(bench.shared.reinstate_path(0) && !bench.shared.wants_check(0));
}

/// MP-12: where the kernel's request mode returns busy, the node holds the request, and the queue continues
/// with others.
#[test]
fn mp_12_a_request_without_resources_waits_and_others_continue() {
    let mut bench = bench("1 queue_if_no_path 0 1 1 round-robin 0 2 0 a b");
    bench.paths[0].answers(Some(Status::Resource));
    bench.submit(Op::Write);
    assert!(bench.done().is_empty() && !bench.queue.has_parked(), "it is held here, not parked");
    assert!(bench.run(Op::Read).is_ok(), "on the other path");
    bench.paths[0].answers(Some(Status::Ok));
    bench.wait();
    assert_eq!((bench.done(), bench.shared.valid_paths()), (vec![Status::Ok], 2));
    (0..2).for_each(|path| assert!(bench.shared.fail_path(path)));
    bench.submit(Op::Write);
    assert!(bench.done().is_empty() && !bench.queue.has_parked(), "a request without a path is held, too");
}

/// The fast path writes nothing that queues share: the shared values do not change over many requests.
/// (`blockyard-bench multipath --stores` shows that there are no stores at all.)
#[test]
fn round_robin_requests_change_no_shared_state() {
    let mut bench = bench("0 0 1 1 round-robin 0 4 0 a b c d");
    assert!(bench.run(Op::Write).is_ok());
    let before = bench.shared.all_shared();
    assert!((0..10_000).all(|_| bench.run(Op::Read).is_ok()));
    assert_eq!(bench.shared.all_shared(), before);
    bench.shared.fail_path(2);
    assert_ne!(bench.shared.all_shared(), before, "a failed path changes it");
}

#[test]
fn mp_9_a_flush_or_a_discard_goes_down_one_path_once() {
    let mut bench = bench(ROUND_ROBIN);
    for op in [Op::Flush, Op::Discard, Op::WriteZeroes] {
        let before: usize = bench.seen().iter().sum();
        assert!(bench.run(op).is_ok());
        assert_eq!(bench.seen().iter().sum::<usize>(), before + 1);
    }
}

#[test]
fn in_flight_counts_balance_over_failures_in_the_status() {
    let mut bench = bench(QUEUEING);
    bench.paths.iter().for_each(|path| path.answers(None));
    (0..5).for_each(|_| bench.submit(Op::Write));
    bench.done();
    let name = |path: usize| ["a", "b"][path].to_owned();
    assert_eq!(bench.shared.status(name), "2 0 0 0 1 1 A 0 2 1 a A 0 3 b A 0 2 ");
    // Requests on the first path fail over to the second.
    (0..3).for_each(|_| bench.end(0, Status::Transport));
    bench.done();
    assert_eq!(bench.shared.status(name), "2 0 0 0 1 1 A 0 2 1 a F 1 0 b A 0 5 ");
    (0..5).for_each(|_| bench.end(1, Status::Ok));
    assert_eq!(bench.done(), [Status::Ok; 5]);
    assert_eq!(bench.shared.status(name), "2 0 0 0 1 1 A 0 2 1 a F 1 0 b A 0 0 ");
}

#[test]
fn a_suspension_without_flush_pushes_back_queued_requests() {
    let mut bench = bench(QUEUEING);
    bench.paths.iter().for_each(|path| path.answers(Some(Status::Transport)));
    bench.submit(Op::Write);
    assert!(bench.done().is_empty());
    bench.queue.freeze();
    bench.shared.presuspend(true);
    bench.wait();
    assert!(bench.queue.is_drained() && bench.done().is_empty());
    bench.paths.iter().for_each(|path| path.answers(Some(Status::Ok)));
    (0..2).for_each(|path| assert!(bench.shared.reinstate_path(path)));
    bench.shared.resume();
    bench.queue.thaw(Bytes(u64::MAX), &mut bench.ring);
    assert_eq!(bench.done(), [Status::Ok]);
}

#[test]
fn a_request_that_waits_for_a_path_can_time_out() {
    let mut bench = bench(QUEUEING);
    (0..2).for_each(|path| assert!(bench.shared.fail_path(path)));
    bench.submit(Op::Write);
    bench.ring.now = bench.ring.now.after(2_000_000);
    bench.queue.set_timeout(Some(1_000_000));
    assert_eq!(bench.queue.expire(&mut bench.ring), 1);
    bench.queue.set_timeout(None);
    assert_eq!(bench.done(), [Status::Timeout]);
}

#[test]
fn a_map_without_groups_has_no_path() {
    let mut none = bench("0 0 0 0");
    assert_eq!(none.run(Op::Read), Status::IoError);
    assert_eq!(none.shared.status(|_| String::new()), "2 0 0 0 0 0 ");
}

#[test]
fn the_counts_of_a_dropped_queue_are_removed() {
    let mut bench = bench(QUEUEING);
    (0..2).for_each(|path| assert!(bench.shared.fail_path(path)));
    bench.submit(Op::Write);
    bench.shared.message(&["fail_if_no_path"], |_| Vec::new()).unwrap();
    bench.wait();
    assert_eq!(bench.done(), [Status::IoError]);
    bench.queue.freeze();
    assert!(bench.queue.close(&mut bench.ring));
    let shared = bench.shared.clone();
    drop(bench);
    assert_eq!(shared.status(|_| "p".into()), "2 0 0 0 1 1 E 0 2 1 p F 1 0 p F 1 0 ");
}
