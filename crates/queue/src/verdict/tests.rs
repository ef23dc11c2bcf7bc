//! Tests of the verdict loop with minimal nodes.

use super::*;
use crate::testing::NoFiles;
use crate::{ChildKind, Cx};
use crate::{NoChild, NodeEvent};
use block::{Bytes, Op, Region};
use std::cell::RefCell;
use std::rc::Rc;

mod timeouts;

pub(crate) type TestRing = crate::testing::TestRing<NoFiles>;

/// State of a [`Disk`].
#[derive(Default)]
pub(super) struct Log {
    answers: Vec<Verdict>,
    seen: Vec<(u64, u64)>,
    pub(super) held: Vec<Cookie>,
}

#[derive(Clone, Default)]
pub(crate) struct Disk(pub(super) Rc<RefCell<Log>>);

impl Disk {
    pub(crate) fn answering(answers: &[Verdict]) -> Disk {
        let disk = Disk::default();
        disk.0.borrow_mut().answers = answers.to_vec();
        disk
    }
    pub(crate) fn seen(&self) -> Vec<(u64, u64)> {
        self.0.borrow().seen.clone()
    }
    pub(crate) fn held(&self, index: usize) -> Cookie {
        self.0.borrow().held[index]
    }
}

impl Node<TestRing> for Disk {
    fn submit(&mut self, io: Cookie, req: &mut Request, _: &mut Cx<'_, TestRing>) -> Verdict {
        let mut log = self.0.borrow_mut();
        log.seen.push((req.offset.0, req.len.0));
        let answer = if log.answers.len() > 1 { log.answers.remove(0) } else { log.answers[0] };
        if answer == Verdict::Held {
            log.held.push(io);
        }
        answer
    }
    fn reap(&mut self, _: Cookie, _: &mut Request, result: i64, _: &mut Cx<'_, TestRing>) -> Verdict {
        Verdict::Up(Status::from_result(result, 0))
    }
}

const OK: Verdict = Verdict::Up(Status::Ok);
const FAILED: Verdict = Verdict::Up(Status::Transport);

/// Tries its children in order, `rounds` times.
struct Failover {
    children: Vec<NodeId>,
    next: usize,
    rounds: usize,
}

impl Node<TestRing> for Failover {
    fn submit(&mut self, _: Cookie, _: &mut Request, _: &mut Cx<'_, TestRing>) -> Verdict {
        self.next = 1;
        Verdict::Down(self.children[0])
    }
    fn end_io(&mut self, _: Cookie, _: &mut Request, status: Status, _: &mut Cx<'_, TestRing>) -> Verdict {
        if status.is_ok() || self.next == self.children.len() * self.rounds {
            return Verdict::Up(status);
        }
        self.next += 1;
        Verdict::Down(self.children[(self.next - 1) % self.children.len()])
    }
}

/// Starts `count` adjacent children, as many at once as are spare.
struct Fan {
    child: NodeId,
    count: u64,
    kind: ChildKind,
    /// By tag: children started, children completed, first error.
    state: Vec<(u64, u64, Status)>,
}

impl Fan {
    fn new(child: u8, count: u64, kind: ChildKind) -> Fan {
        Fan { child: NodeId(child), count, kind, state: vec![(0, 0, Status::Ok); 64] }
    }
    fn start(&mut self, io: Cookie, req: &Request, cx: &mut Cx<'_, TestRing>) -> Verdict {
        let state = &mut self.state[io.tag.index()];
        while state.0 < self.count {
            let len = match self.kind {
                ChildKind::Piece => req.len.0 / self.count,
                ChildKind::Copy => req.len.0,
            };
            let offset = if self.kind == ChildKind::Piece { state.0 * len } else { 0 };
            let child = Request { offset: req.offset + Bytes(offset), len: Bytes(len), ..*req };
            match cx.spawn(io, self.child, self.kind, child) {
                Ok(()) => state.0 += 1,
                Err(NoChild) => break,
            }
        }
        if state.0 == state.1 { Verdict::Busy } else { Verdict::Held }
    }
}

impl Node<TestRing> for Fan {
    fn submit(&mut self, io: Cookie, req: &mut Request, cx: &mut Cx<'_, TestRing>) -> Verdict {
        self.state[io.tag.index()] = (0, 0, Status::Ok);
        self.start(io, req, cx)
    }
    fn child_end(
        &mut self,
        io: Cookie,
        req: &mut Request,
        _: &Request,
        status: Status,
        cx: &mut Cx<'_, TestRing>,
    ) -> Verdict {
        let state = &mut self.state[io.tag.index()];
        state.1 += 1;
        if state.2.is_ok() {
            state.2 = status;
        }
        if state.1 == self.count { Verdict::Up(state.2) } else { self.start(io, req, cx) }
    }
    fn cancel(&mut self, _: Cookie, _: &mut Cx<'_, TestRing>) {}
}

struct Bench {
    queue: Queue<TestRing>,
    ring: TestRing,
}

impl Bench {
    fn new(build: impl FnOnce(&mut Stack<TestRing>)) -> Bench {
        let mut stack = Stack::default();
        build(&mut stack);
        let config = QueueConfig { id: QueueId(3), depth: 4, segments_per_tag: 4, timeout_ns: Some(1000) };
        let ring = TestRing::at(Nanos(100));
        Bench { queue: Queue::new(config, stack).expect("a stack that fits"), ring }
    }
    fn submit_at(&mut self, offset: u64, len: u64) -> Tag {
        let tag = self.queue.tag().expect("a free tag");
        let req = Request::new(Op::Write, Bytes(offset), Bytes(len));
        self.queue.submit(tag, Owner(offset as u32), req, &mut self.ring);
        tag
    }
    fn submit(&mut self) -> Tag {
        self.submit_at(0, 8192)
    }
    fn complete(&mut self, cookie: Cookie, status: Status) {
        self.queue.complete(cookie, -i64::from(status.errno()), &mut self.ring);
    }
    fn done(&mut self) -> Vec<(u32, Status)> {
        let done: Vec<_> = self.queue.done().collect();
        done.iter().for_each(|done| self.queue.release(done.tag));
        done.iter().map(|done| (done.owner.0, done.status)).collect()
    }
    fn statuses(&mut self) -> Vec<Status> {
        self.done().into_iter().map(|done| done.1).collect()
    }
    fn writes(&mut self) -> u64 {
        self.queue.account(self.ring.now);
        self.queue.stats().snapshot(self.ring.now).ops[Op::Write as usize].ios
    }
}

fn over_one(layer: impl Node<TestRing> + 'static, children: u16, disk: &Disk) -> Bench {
    let disk = disk.clone();
    Bench::new(|stack| {
        stack.layer(Box::new(layer), children);
        stack.backend(Box::new(disk));
    })
}

fn alone(disk: &Disk) -> Bench {
    let disk = disk.clone();
    Bench::new(|stack| {
        stack.backend(Box::new(disk));
    })
}

#[test]
fn a_request_fails_over_to_the_path_that_works() {
    let (bad, good) = (Disk::answering(&[FAILED]), Disk::answering(&[OK]));
    let mut bench = Bench::new(|stack| {
        let children = vec![NodeId(1), NodeId(2)];
        stack.layer(Box::new(Failover { children, next: 0, rounds: 1 }), 0);
        stack.backend(Box::new(bad.clone()));
        stack.backend(Box::new(good.clone()));
    });
    bench.submit();
    assert_eq!(bench.statuses(), [Status::Ok]);
    assert_eq!((bad.seen(), good.seen()), (vec![(0, 8192)], vec![(0, 8192)]));
}

#[test]
fn a_mirror_ends_when_its_last_copy_has() {
    let disk = Disk::answering(&[Verdict::Held]);
    let mut bench = over_one(Fan::new(1, 2, ChildKind::Copy), 8, &disk);
    bench.submit();
    bench.complete(disk.held(0), Status::Medium);
    assert_eq!(bench.statuses(), []);
    bench.complete(disk.held(1), Status::Ok);
    assert_eq!(bench.statuses(), [Status::Medium]);
    assert_eq!(disk.seen(), [(0, 8192), (0, 8192)]);
}

#[test]
fn copies_are_not_counted_but_their_parent_is() {
    let disk = Disk::answering(&[OK]);
    let mut bench = over_one(Fan::new(1, 3, ChildKind::Copy), 8, &disk);
    bench.submit();
    assert_eq!((bench.writes(), disk.seen().len()), (1, 3));
}

#[test]
fn children_are_counted_but_their_parent_is_not() {
    let disk = Disk::answering(&[OK]);
    let mut bench = over_one(Fan::new(1, 4, ChildKind::Piece), 8, &disk);
    bench.submit();
    assert_eq!(bench.writes(), 4);
    let snapshot = bench.queue.stats().snapshot(bench.ring.now);
    assert_eq!(snapshot.ops[Op::Write as usize].bytes, 8192);
}

#[test]
fn children_of_a_copy_are_not_counted() {
    let disk = Disk::answering(&[OK]);
    let mut bench = Bench::new(|stack| {
        stack.layer(Box::new(Fan::new(1, 2, ChildKind::Copy)), 8);
        stack.layer(Box::new(Fan::new(2, 2, ChildKind::Piece)), 8);
        stack.backend(Box::new(disk.clone()));
    });
    bench.submit();
    assert_eq!((bench.writes(), disk.seen().len()), (1, 4));
}

#[test]
#[should_panic(expected = "late or double end")]
fn a_second_completion_panics() {
    let disk = Disk::answering(&[Verdict::Held]);
    let mut bench = alone(&disk);
    bench.submit();
    bench.complete(disk.held(0), Status::Ok);
    bench.complete(disk.held(0), Status::Ok);
}

#[test]
#[should_panic(expected = "late or double end")]
fn a_completion_of_an_earlier_request_under_the_same_tag_panics() {
    let disk = Disk::answering(&[Verdict::Held]);
    let mut bench = alone(&disk);
    let first = bench.submit();
    bench.complete(disk.held(0), Status::Ok);
    bench.done();
    assert_eq!(bench.submit(), first);
    bench.complete(disk.held(0), Status::Ok);
}

#[test]
#[should_panic(expected = "is in use")]
fn submitting_under_a_tag_that_is_in_use_panics() {
    let disk = Disk::answering(&[Verdict::Held]);
    let mut bench = alone(&disk);
    let tag = bench.submit();
    bench.queue.submit(tag, Owner(0), Request::flush(), &mut bench.ring);
}

#[test]
fn a_retry_loop_is_parked_after_64_retries_and_continues_next_turn() {
    let disk = Disk::answering(&[FAILED]);
    let layer = Failover { children: vec![NodeId(1)], next: 0, rounds: 100 };
    let mut bench = over_one(layer, 0, &disk);
    bench.submit();
    assert!(bench.queue.has_parked());
    assert_eq!(disk.seen().len(), RETRIES_MAX as usize + 1, "the first time is no retry");
    bench.queue.turn(&mut bench.ring);
    assert_eq!(disk.seen().len(), 100);
    assert_eq!(bench.statuses(), [Status::Transport]);
}

#[test]
fn busy_requests_are_offered_again_once_a_turn_in_order() {
    let disk = Disk::answering(&[Verdict::Busy, Verdict::Busy, Verdict::Busy, OK]);
    let mut bench = alone(&disk);
    bench.submit_at(0, 512);
    bench.submit_at(1, 512);
    assert_eq!(bench.statuses(), []);
    bench.queue.turn(&mut bench.ring);
    assert_eq!(bench.done(), [(1, Status::Ok)]);
    assert!(bench.queue.has_parked());
    bench.queue.turn(&mut bench.ring);
    assert_eq!(bench.done(), [(0, Status::Ok)]);
    assert_eq!(disk.seen(), [(0, 512), (1, 512), (0, 512), (1, 512), (0, 512)]);
    assert!(!bench.queue.has_parked());
}

#[test]
fn a_frozen_queue_holds_requests_back_and_submits_them_in_order() {
    let disk = Disk::answering(&[OK]);
    let mut bench = alone(&disk);
    bench.queue.freeze();
    for n in 0..3 {
        bench.submit_at(n, 512);
    }
    bench.queue.turn(&mut bench.ring);
    assert_eq!((bench.statuses().len(), disk.seen().len()), (0, 0));
    assert_eq!(bench.queue.in_flight(), 3);
    bench.queue.thaw(Bytes(u64::MAX), &mut bench.ring);
    assert_eq!(bench.done(), [(0, Status::Ok), (1, Status::Ok), (2, Status::Ok)]);
}

#[test]
fn a_held_back_request_beyond_the_new_end_of_the_device_fails() {
    let disk = Disk::answering(&[OK]);
    let mut bench = alone(&disk);
    bench.queue.freeze();
    bench.submit_at(0, 512);
    bench.submit_at(512, 512);
    bench.submit_at(1024, 512);
    bench.queue.thaw(Bytes(1024), &mut bench.ring);
    assert_eq!(bench.done(), [(0, Status::Ok), (512, Status::Ok), (1024, Status::IoError)]);
    assert_eq!((disk.seen(), bench.queue.in_flight()), (vec![(0, 512), (512, 512)], 0));
}

#[test]
fn a_queue_is_drained_when_only_held_back_requests_are_left() {
    let disk = Disk::answering(&[Verdict::Held, Verdict::Busy, OK]);
    let mut bench = alone(&disk);
    assert!(bench.queue.is_drained());
    bench.submit();
    bench.submit();
    bench.queue.freeze();
    bench.submit();
    assert!(!bench.queue.is_drained());
    bench.queue.turn(&mut bench.ring);
    assert!(!bench.queue.is_drained(), "the parked request completed, one is held");
    bench.complete(disk.held(0), Status::Ok);
    assert!(bench.queue.is_drained());
    assert_eq!(bench.queue.in_flight(), 1);
}

#[test]
fn a_requeued_request_waits_with_those_held_back() {
    const REQUEUE: Verdict = Verdict::Up(Status::Requeue);
    let disk = Disk::answering(&[REQUEUE, Verdict::Held, OK]);
    let mut bench = alone(&disk);
    bench.submit();
    assert!(bench.statuses().is_empty() && bench.queue.has_parked(), "it is offered again next turn");
    bench.queue.turn(&mut bench.ring);
    bench.queue.freeze();
    bench.complete(disk.held(0), Status::Requeue);
    assert!(bench.queue.is_drained() && bench.queue.in_flight() == 1);
    bench.queue.thaw(Bytes(u64::MAX), &mut bench.ring);
    assert_eq!(bench.statuses(), [Status::Ok]);
    assert_eq!(bench.writes(), 1);
}

#[test]
fn a_new_stack_takes_over_held_back_requests_and_the_old_one_is_returned() {
    let (old, new) = (Disk::answering(&[Verdict::Held]), Disk::answering(&[OK]));
    let mut bench = alone(&old);
    bench.submit_at(0, 512);
    bench.queue.freeze();
    bench.submit_at(512, 512);
    assert!(!bench.queue.is_drained());
    bench.complete(old.held(0), Status::Ok);
    assert!(bench.queue.is_drained());
    // A layer with children needs more tags; requests of the front-end keep theirs.
    let mut stack = Stack::default();
    stack.layer(Box::new(Fan::new(1, 2, ChildKind::Piece)), 2);
    stack.backend(Box::new(new.clone()));
    let back = bench.queue.replace(stack).unwrap();
    bench.queue.thaw(Bytes(u64::MAX), &mut bench.ring);
    assert_eq!(bench.statuses(), [Status::Ok, Status::Ok]);
    assert_eq!((old.seen(), new.seen().len()), (vec![(0, 512)], 2));
    bench.queue.freeze();
    bench.queue.account(Nanos(5));
    let entered = |bench: &Bench| bench.queue.stats().snapshot(Nanos(5)).nodes.map(|node| node.ios);
    let before = entered(&bench);
    drop(bench.queue.replace_like(back, |node| node == 0).unwrap());
    bench.queue.account(Nanos(5));
    let after = entered(&bench);
    assert!(before[0] > 0 && before[1] > 0);
    assert_eq!((after[0], after[1]), (before[0], 0), "counters of a node that did not change continue");
    bench.queue.thaw(Bytes(u64::MAX), &mut bench.ring);
    bench.submit_at(1024, 512);
    assert_eq!(old.seen(), [(0, 512), (1024, 512)]);
}

#[test]
fn a_stack_that_does_not_fit_leaves_the_queue_as_it_was() {
    let disk = Disk::answering(&[OK]);
    let mut bench = alone(&disk);
    bench.queue.freeze();
    assert_eq!(bench.queue.replace(Stack::default()).err(), Some(StackError::NodeCount(0)));
    bench.queue.thaw(Bytes(u64::MAX), &mut bench.ring);
    bench.submit();
    assert_eq!(bench.statuses(), [Status::Ok]);
}

#[test]
#[should_panic(expected = "only while nothing moves")]
fn replacing_a_stack_that_holds_a_request_panics() {
    let disk = Disk::answering(&[Verdict::Held]);
    let mut bench = alone(&disk);
    bench.submit();
    bench.queue.freeze();
    let mut stack = Stack::default();
    stack.backend(Box::new(disk.clone()));
    let _ = bench.queue.replace(stack);
}

#[test]
fn two_layers_with_one_child_each_do_not_deadlock() {
    let disk = Disk::answering(&[Verdict::Held]);
    let mut bench = Bench::new(|stack| {
        stack.layer(Box::new(Fan::new(1, 2, ChildKind::Piece)), 1);
        stack.layer(Box::new(Fan::new(2, 2, ChildKind::Piece)), 1);
        stack.backend(Box::new(disk.clone()));
    });
    for n in 0..3 {
        bench.submit_at(n * 8192, 8192);
    }
    let mut ended = Vec::new();
    for index in 0..12 {
        bench.queue.turn(&mut bench.ring);
        bench.complete(disk.held(index), Status::Ok);
        ended.extend(bench.done());
    }
    ended.sort_unstable_by_key(|done| done.0);
    assert_eq!(ended, [(0, Status::Ok), (8192, Status::Ok), (16384, Status::Ok)]);
    let mut seen = disk.seen();
    seen.sort_unstable();
    assert_eq!(seen, (0..12).map(|n| (n * 2048, 2048)).collect::<Vec<_>>());
}

#[test]
fn many_more_parts_than_children_do_not_grow_lists() {
    let disk = Disk::answering(&[OK]);
    let mut bench = over_one(Fan::new(1, 4096, ChildKind::Piece), 2, &disk);
    let capacity = |queue: &Queue<TestRing>| (queue.common.spawned.capacity(), queue.ended.capacity());
    let before = capacity(&bench.queue);
    bench.submit();
    assert_eq!((bench.statuses(), disk.seen().len()), (vec![Status::Ok], 4096));
    assert_eq!(capacity(&bench.queue), before);
    assert_eq!(bench.writes(), 4096);
}

/// Starts a child for each held request at the end of the batch.
struct Late(Vec<Cookie>);

impl Node<TestRing> for Late {
    fn submit(&mut self, io: Cookie, _: &mut Request, _: &mut Cx<'_, TestRing>) -> Verdict {
        self.0.push(io);
        Verdict::Held
    }
    fn commit(&mut self, cx: &mut Cx<'_, TestRing>) {
        for io in self.0.drain(..) {
            let spawned = cx.spawn(io, NodeId(1), ChildKind::Copy, Request::flush());
            assert_eq!(spawned, Ok(()));
        }
    }
}

#[test]
fn children_started_in_commit_are_submitted_in_the_same_turn() {
    let disk = Disk::answering(&[OK]);
    let mut bench = over_one(Late(Vec::new()), 4, &disk);
    bench.submit();
    bench.submit();
    bench.queue.turn(&mut bench.ring);
    assert_eq!(bench.statuses(), [Status::Ok, Status::Ok]);
}

#[derive(Clone, Default)]
struct Letters(Rc<RefCell<String>>);

impl Probe for Letters {
    fn point(&mut self, _: Nanos, point: Point) {
        self.0.borrow_mut().push(match point.event {
            Event::Queued => 'Q',
            Event::Entered => '>',
            Event::Split { .. } => 'X',
            Event::Issued => 'D',
            Event::Completed { .. } => 'C',
            Event::Left { .. } => '<',
            Event::Requeued => 'R',
            Event::Plugged => 'P',
            Event::Unplugged { .. } => 'U',
            Event::Merged { front } => {
                if front {
                    'F'
                } else {
                    'M'
                }
            }
            Event::Got => 'G',
            Event::Inserted => 'I',
            Event::Dispatched => 'd',
            Event::Done { .. } => '.',
        });
    }
}

#[test]
fn events_of_a_request_are_reported_in_order() {
    let disk = Disk::answering(&[Verdict::Busy, OK]);
    let mut bench = over_one(Failover { children: vec![NodeId(1)], next: 0, rounds: 1 }, 0, &disk);
    let letters = Letters::default();
    bench.queue.set_probe(Some(Box::new(letters.clone())));
    bench.submit();
    bench.queue.turn(&mut bench.ring);
    assert_eq!(*letters.0.borrow(), "Q>DRDC<.", "parking is reported after the request entered the node");
}

#[test]
fn every_node_counts_completed_requests_and_their_time() {
    let disk = Disk::answering(&[Verdict::Busy, Verdict::Held, OK]);
    let mut bench = over_one(Failover { children: vec![NodeId(1)], next: 0, rounds: 1 }, 0, &disk);
    bench.submit();
    let look = |bench: &mut Bench| {
        let now = bench.ring.now();
        bench.queue.account(now);
        let nodes = bench.queue.stats().snapshot(now).nodes;
        [nodes[0], nodes[1]].map(|node| (node.ios, node.ticks_ns, node.in_flight))
    };
    bench.ring.now.0 += 100;
    assert_eq!(look(&mut bench), [(0, 100, 1), (0, 0, 0)], "a parked request has not entered the disk");
    bench.queue.turn(&mut bench.ring);
    bench.ring.now.0 += 20;
    assert_eq!(look(&mut bench), [(0, 120, 1), (0, 20, 1)]);
    bench.ring.now.0 += 3;
    let held = disk.held(0);
    bench.queue.complete(held, 0, &mut bench.ring);
    bench.ring.now.0 += 1000;
    assert_eq!(look(&mut bench), [(1, 123, 0), (1, 23, 0)]);
}

#[test]
fn segments_of_a_request_stay_while_its_tag_is_in_use() {
    let mut bench = alone(&Disk::answering(&[OK]));
    let (a, b) = (bench.queue.tag().expect("free"), bench.queue.tag().expect("free"));
    let piece = |offset| Segment { offset, len: 512, region: Region(1) };
    let of_a = bench.queue.run(a, &[piece(0), piece(4096)]).expect("room");
    let of_b = bench.queue.run(b, &[piece(512), piece(1024), piece(8192)]).expect("room");
    assert_eq!(bench.queue.segments(of_a, 1024).collect::<Vec<_>>(), [piece(0), piece(4096)]);
    assert_eq!(bench.queue.segments(of_b, 1536).count(), 3);
    assert_eq!(bench.queue.run(a, &[piece(0); 5]), None, "more than segments_per_tag");
    assert_eq!(bench.queue.run(a, &[piece(7)]), Some(Data::One(piece(7))));
}

#[test]
fn a_stack_that_cannot_be_numbered_is_refused() {
    let config = QueueConfig { id: QueueId(0), depth: 4, segments_per_tag: 1, timeout_ns: None };
    let refusal = |stack| Queue::<TestRing>::new(config, stack).err();
    assert_eq!(refusal(Stack::default()), Some(StackError::NodeCount(0)));
    let mut stack = Stack::default();
    stack.layer(Box::new(Late(Vec::new())), u16::MAX);
    assert_eq!(refusal(stack), Some(StackError::Tags(65539)));
}

#[test]
fn a_full_queue_has_no_tag_until_one_is_released() {
    let disk = Disk::answering(&[OK]);
    let mut bench = alone(&disk);
    for _ in 0..4 {
        bench.submit();
    }
    assert_eq!(bench.queue.tag(), None);
    assert_eq!(bench.done().len(), 4);
    assert!(bench.queue.tag().is_some());
}

#[test]
fn reserved_tags_are_never_returned_by_tag() {
    let disk = Disk::answering(&[OK]);
    let mut bench = alone(&disk);
    bench.queue.reserve_tags(3);
    for _ in 0..2 {
        bench.queue.submit(Tag(1), Owner(7), Request::flush(), &mut bench.ring);
        assert_eq!(bench.queue.done().map(|done| done.tag).collect::<Vec<_>>(), [Tag(1)]);
    }
    assert_eq!(bench.queue.tag(), Some(Tag(3)));
    assert_eq!(bench.queue.tag(), None);
}

/// Holds requests until a socket event or its alarm. Closes at the second call.
#[derive(Default)]
struct Remote {
    pub(super) held: Vec<Cookie>,
    gathered: usize,
    committed: Rc<RefCell<Vec<usize>>>,
    /// Resumes held requests in `commit` rather than at an event.
    at_commit: bool,
    asked_to_close: u32,
}

impl Node<TestRing> for Remote {
    fn submit(&mut self, io: Cookie, _: &mut Request, _: &mut Cx<'_, TestRing>) -> Verdict {
        self.held.push(io);
        self.gathered += 1;
        Verdict::Held
    }
    fn commit(&mut self, cx: &mut Cx<'_, TestRing>) {
        self.committed.borrow_mut().push(std::mem::take(&mut self.gathered));
        if self.at_commit {
            self.held.drain(..).for_each(|io| cx.resume(io, -i64::from(Status::Transport.errno())));
        }
    }
    fn event(&mut self, event: NodeEvent, cx: &mut Cx<'_, TestRing>) {
        let result = if event == NodeEvent::Alarm { -i64::from(Status::Timeout.errno()) } else { 0 };
        self.held.drain(..).for_each(|io| cx.resume(io, result));
    }
    fn close(&mut self, _: &mut Cx<'_, TestRing>) -> bool {
        self.asked_to_close += 1;
        self.asked_to_close == 2
    }
}

#[test]
fn a_socket_event_completes_the_requests_that_its_node_resumes() {
    let mut bench = Bench::new(|stack| _ = stack.backend(Box::new(Remote::default())));
    bench.submit_at(0, 0);
    bench.submit_at(512, 0);
    assert!(bench.done().is_empty());
    let event = NodeEvent::Socket(crate::SocketId(1), crate::SocketEvent::Sent(5));
    bench.queue.node_event(NodeId(0), event, &mut bench.ring);
    assert_eq!(bench.done().iter().map(|done| done.1).collect::<Vec<_>>(), [Status::Ok; 2]);
}

#[test]
fn an_alarm_reaches_its_node_and_no_request() {
    let mut bench = Bench::new(|stack| {
        stack.layer(Box::new(Failover { children: vec![NodeId(1)], next: 0, rounds: 1 }), 0);
        stack.backend(Box::new(Remote::default()));
    });
    bench.submit_at(0, 0);
    bench.queue.complete(crate::sockets::alarm_cookie(NodeId(1)), 0, &mut bench.ring);
    assert_eq!(bench.done()[0].1, Status::Timeout);
    // Also without any held request.
    bench.queue.complete(crate::sockets::alarm_cookie(NodeId(1)), 0, &mut bench.ring);
}

#[test]
fn retries_after_commit_belong_to_the_same_turn_up_to_a_bound() {
    for (rounds, commits, parked) in [(2, 3, false), (100, 17, true)] {
        let committed = <Rc<RefCell<Vec<usize>>>>::default();
        let mut bench = Bench::new(|stack| {
            stack.layer(Box::new(Failover { children: vec![NodeId(1)], next: 0, rounds }), 0);
            let remote = Remote { at_commit: true, committed: Rc::clone(&committed), ..Remote::default() };
            stack.backend(Box::new(remote));
        });
        bench.submit_at(0, 0);
        bench.queue.turn(&mut bench.ring);
        assert_eq!(committed.borrow()[..2], [1, 1], "the second try was started within the same turn");
        assert_eq!(committed.borrow().len(), commits);
        assert_eq!(bench.queue.has_parked(), parked, "requests that are left are not forgotten");
        while bench.queue.has_parked() {
            bench.queue.turn(&mut bench.ring);
        }
        assert_eq!(bench.done()[0].1, Status::Transport);
    }
}

#[test]
fn children_started_in_commit_pass_a_batching_node_below_in_the_same_turn() {
    let committed = <Rc<RefCell<Vec<usize>>>>::default();
    let mut bench = Bench::new(|stack| {
        stack.layer(Box::new(Late(Vec::new())), 4);
        let remote = Remote { at_commit: true, committed: Rc::clone(&committed), ..Remote::default() };
        stack.backend(Box::new(remote));
    });
    bench.submit();
    bench.submit();
    bench.queue.turn(&mut bench.ring);
    assert_eq!(
        *committed.borrow(),
        [0, 2, 0],
        "commit is called again after children were submitted, and after they completed"
    );
    assert_eq!(bench.statuses(), [Status::Transport; 2]);
    assert!(!bench.queue.has_parked());
}

/// Starts a child for each held request in `commit`, that many in total, one after the other.
struct Endless(Vec<Cookie>, usize);

impl Node<TestRing> for Endless {
    fn submit(&mut self, io: Cookie, _: &mut Request, _: &mut Cx<'_, TestRing>) -> Verdict {
        self.0.push(io);
        Verdict::Held
    }
    fn commit(&mut self, cx: &mut Cx<'_, TestRing>) {
        for io in self.0.drain(..) {
            assert_eq!(cx.spawn(io, NodeId(1), ChildKind::Copy, Request::flush()), Ok(()));
        }
    }
    fn child_end(
        &mut self,
        io: Cookie,
        _: &mut Request,
        _: &Request,
        status: Status,
        _: &mut Cx<'_, TestRing>,
    ) -> Verdict {
        self.1 -= 1;
        if self.1 == 0 {
            return Verdict::Up(status);
        }
        self.0.push(io);
        Verdict::Held
    }
}

#[test]
fn children_left_after_many_commits_are_submitted_in_the_next_turn() {
    let disk = Disk::answering(&[OK]);
    let mut bench = over_one(Endless(Vec::new(), 40), 1, &disk);
    bench.submit();
    bench.queue.turn(&mut bench.ring);
    assert_eq!((disk.seen().len(), bench.queue.has_parked()), (16, true));
    bench.queue.turn(&mut bench.ring);
    assert!(bench.queue.has_parked());
    bench.queue.turn(&mut bench.ring);
    assert_eq!((bench.statuses(), disk.seen().len()), (vec![Status::Ok], 40));
    assert!(!bench.queue.has_parked());
}

#[test]
fn a_stack_is_closed_when_all_nodes_are() {
    let mut bench = Bench::new(|stack| _ = stack.backend(Box::new(Remote::default())));
    assert!(!bench.queue.close(&mut bench.ring));
    assert!(bench.queue.close(&mut bench.ring));
}
