//! Behaviour of a queue with difficult nodes, one test each.

use super::*;
use crate::{Disk, DiskConfig, Faults, SimRing, Tracer};
use block::Tag;
use queue::{Done, FileId, Owner, Queue, QueueConfig, QueueId, Stack};

const TIMEOUT_NS: u64 = 1_000_000;

/// A queue over `layers`, with `files` files below them: node numbers of files follow those of layers.
fn machine(faults: Faults, layers: Vec<Box<dyn Node<SimRing>>>, files: u32) -> (Queue<SimRing>, SimRing) {
    let mut ring = SimRing::new(Rng::new(11), faults, Tracer::default());
    let mut stack = Stack::default();
    for layer in layers {
        stack.layer(layer, 8);
    }
    for number in 0..files {
        let config = DiskConfig { len: 1 << 20, punch: true, zero_range: true, align: 1, align_memory: 1 };
        assert_eq!(ring.add_disk(Disk::new(config)), FileId(number));
        stack.backend(Box::new(PlainFile::new(FileId(number), None)));
    }
    let config = QueueConfig { id: QueueId(0), depth: 4, segments_per_tag: 2, timeout_ns: Some(TIMEOUT_NS) };
    (Queue::new(config, stack).expect("the numbers fit"), ring)
}

/// Performs a turn with everything that is due; returns the completed requests.
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
fn a_request_stuck_again_after_its_timeout_is_cancelled_again() {
    let lost = Faults { lost: 1000, ..Faults::NONE };
    let (mut queue, mut ring) = machine(lost, vec![Box::new(Retry::new(NodeId(1), 3))], 1);
    // A discard, because everything except flushes is retried.
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

#[test]
fn a_request_resent_after_its_children_failed_is_counted_at_the_new_child() {
    let rng = |seed| Rng::new(seed);
    let (mut queue, mut ring) = machine(
        Faults::NONE,
        vec![
            Box::new(Mirror::new([NodeId(1), NodeId(4)], rng(1))),
            Box::new(Chop::new(NodeId(2), rng(2))),
            Box::new(Flaky::new(NodeId(3), rng(3), 1000)),
        ],
        2,
    );
    let mut seen = [0; 8];
    let mut before = 0;
    for _ in 0..100 {
        let memory = ring.allocate(4096).expect("memory");
        let tag = queue.tag().expect("a tag is free");
        let data = queue.run(tag, &[memory]).expect("one segment");
        let req = Request { data, ..Request::new(Op::Read, Bytes(0), Bytes(4096)) };
        queue.submit(tag, Owner(7), req, &mut ring);
        let done = loop {
            if let Some(done) = turn(&mut queue, &mut ring).first() {
                break *done;
            }
            ring.advance();
        };
        queue.account(ring.now());
        queue.release(tag);
        ring.free(memory);
        let ios = queue.stats().snapshot(ring.now()).ops[Op::Read as usize].ios;
        // A medium error is not retried on the other path; the second file answers all others.
        if done.status != Status::Medium {
            assert_eq!(done.status, Status::Ok);
            seen[(ios - before) as usize] += 1;
        }
        before = ios;
    }
    // Reads that stay whole on either side: 1. Reads of two to four children that fail and are then read
    // whole: 3 to 5.
    assert_eq!((seen[0], seen[2]), (0, 0), "{seen:?}");
    assert!(seen[1] > 0 && seen[3] > 0 && seen[4] > 0 && seen[5] > 0, "{seen:?}");
}
