//! A listener for pictures: one of every so many requests of one queue, told when it comes from the front-end.
//!
//! Runs on the queue's thread beside a [`Tracer`](crate::Tracer) or without one. How many requests it passes over is
//! set by whoever empties the lane, so that a picture of a fast device costs no more than that of a slow one.

use crate::{Lane, Record};
use queue::{Event, Nanos, Point, Probe};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

/// The listener.
pub struct Sampler {
    lane: Arc<Lane>,
    /// One of so many is told; 0 and 1: each.
    every: Arc<AtomicU32>,
    /// So many more are passed over.
    left: u32,
}

impl Sampler {
    /// One that writes to `lane`, which this thread alone writes to.
    pub fn new(lane: Arc<Lane>, every: Arc<AtomicU32>) -> Sampler {
        Sampler { lane, every, left: 0 }
    }
}

impl Probe for Sampler {
    fn point(&mut self, at: Nanos, point: Point) {
        if point.event != Event::Queued {
            return;
        }
        let rest = self.every.load(Relaxed).saturating_sub(1);
        // What was set out to pass over while much came is not passed over once little does.
        self.left = self.left.min(rest);
        if self.left > 0 {
            self.left -= 1;
            return;
        }
        self.left = rest;
        self.lane.push(Record::queued(at.0, &point, 0).to_words());
    }
}

/// Two who listen to one queue.
pub struct Both<A, B>(pub A, pub B);

impl<A: Probe, B: Probe> Probe for Both<A, B> {
    fn point(&mut self, at: Nanos, point: Point) {
        self.0.point(at, point);
        self.1.point(at, point);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use block::{Bytes, Op, Request, Status, Tag};
    use queue::NodeId;

    #[test]
    fn one_of_so_many_requests_is_told_and_once_each() {
        let (lane, every) = (Arc::new(Lane::new(64)), Arc::new(AtomicU32::new(3)));
        let mut sampler = Sampler::new(lane.clone(), every.clone());
        let mut pass = |sector: u64| {
            let req = Request::new(Op::Write, Bytes(sector << 9), Bytes(4096));
            for event in [Event::Queued, Event::Issued, Event::Done { status: Status::Ok }] {
                sampler.point(Nanos(5), Point::new(Tag(0), NodeId(0), 0, &req, event));
            }
        };
        (0..7).for_each(&mut pass);
        let mut seen = Vec::new();
        lane.drain_records(64, |record| seen.push(record.offset >> 9));
        assert_eq!(seen, [0, 3, 6]);
        every.store(0, Relaxed);
        (7..12).for_each(&mut pass);
        seen.clear();
        lane.drain_records(64, |record| seen.push(record.offset >> 9));
        assert_eq!(seen, [7, 8, 9, 10, 11], "once each is wanted, the next is told");
    }

    #[test]
    fn a_device_that_turned_quiet_is_told_again_at_once() {
        let (lane, every) = (Arc::new(Lane::new(64)), Arc::new(AtomicU32::new(1_000_000)));
        let mut sampler = Sampler::new(lane.clone(), every.clone());
        let mut ask = || {
            let req = Request::new(Op::Read, Bytes(0), Bytes(4096));
            sampler.point(Nanos(5), Point::new(Tag(0), NodeId(0), 0, &req, Event::Queued));
            let mut seen = 0;
            lane.drain_records(64, |_| seen += 1);
            seen
        };
        assert_eq!([ask(), ask()], [1, 0]);
        every.store(2, Relaxed);
        assert_eq!([ask(), ask(), ask()], [0, 1, 0]);
    }
}
