//! What a queue must do with nodes that make it hard, one behaviour each.

use super::*;
use crate::{Disk, DiskConfig, Faults, SimRing, Tracer};
use block::Tag;
use queue::{Done, FileId, Owner, Queue, QueueConfig, QueueId, Stack};

const TIMEOUT_NS: u64 = 1_000_000;

fn machine(
    faults: Faults,
    layer: impl FnOnce(NodeId) -> Box<dyn Node<SimRing>>,
) -> (Queue<SimRing>, SimRing) {
    let mut ring = SimRing::new(Rng::new(11), faults, Tracer::default());
    let config = DiskConfig { len: 1 << 20, punch: true, zero_range: true, align: 1, align_memory: 1 };
    let file: FileId = ring.add_disk(Disk::new(config));
    let mut stack = Stack::default();
    stack.layer(layer(NodeId(1)), 8);
    stack.backend(Box::new(PlainFile::new(file, None)));
    let config = QueueConfig { id: QueueId(0), depth: 4, segments_per_tag: 2, timeout_ns: Some(TIMEOUT_NS) };
    (Queue::new(config, stack).expect("the numbers fit"), ring)
}

/// Turn once with all that is due: what ended.
fn turn(queue: &mut Queue<SimRing>, ring: &mut SimRing) -> Vec<Done> {
    while let Some((_, cookie, result)) = ring.reap() {
        queue.complete(cookie, result, ring);
    }
    queue.turn(ring);
    queue.done().collect()
}

fn submit(queue: &mut Queue<SimRing>, ring: &mut SimRing, req: Request) -> Tag {
    let tag = queue.tag().expect("a tag is free");
    queue.submit(tag, Owner(7), req, ring);
    tag
}

#[test]
fn a_request_that_is_stuck_again_after_its_timeout_is_cancelled_again() {
    let lost = Faults { lost: 1000, ..Faults::NONE };
    let (mut queue, mut ring) = machine(lost, |child| Box::new(Retry::new(child, 3)));
    // A discard, since only flushes are not tried again.
    let tag = submit(&mut queue, &mut ring, Request::new(Op::Discard, Bytes(0), Bytes(4096)));
    let mut asked = 0;
    for _ in 0..40 {
        ring.pass(TIMEOUT_NS);
        asked += queue.expire(&mut ring);
        ring.advance();
        let done = turn(&mut queue, &mut ring);
        if let Some(done) = done.first() {
            let ended_as_itself = done.status == Status::Ok;
            assert_eq!(done.tag, tag);
            assert!(done.status == Status::Timeout || ended_as_itself);
            assert!(asked > 1, "the first cancel ended it: choose another seed");
            return;
        }
    }
    panic!("it was asked {asked} times to end, and is still held");
}
