//! A probe for charts: samples one of every N requests of a queue, when it arrives from the front-end.
//!
//! Runs on the queue's thread, beside a [`Tracer`](crate::Tracer) or without one. N is set by the reader of
//! the buffer, so that a chart of a fast device costs no more than that of a slow one.

use crate::{Record, TraceBuffer};
use queue::{CommandPoint, Event, Nanos, Point, Probe};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

/// The sampling probe of one queue.
pub struct Sampler {
    buffer: Arc<TraceBuffer>,
    /// One of this many requests is sampled; 0 and 1: all requests.
    every: Arc<AtomicU32>,
    /// Number of requests to skip before the next sample.
    left: u32,
}

impl Sampler {
    /// Creates a sampler that writes to `buffer`. No other thread may write to it.
    pub fn new(buffer: Arc<TraceBuffer>, every: Arc<AtomicU32>) -> Sampler {
        Sampler { buffer, every, left: 0 }
    }
}

impl Probe for Sampler {
    fn point(&mut self, at: Nanos, point: Point) {
        if point.event != Event::Queued {
            return;
        }
        let rest = self.every.load(Relaxed).saturating_sub(1);
        // A count set under high load must not skip requests once load is low.
        self.left = self.left.min(rest);
        if self.left > 0 {
            self.left -= 1;
            return;
        }
        self.left = rest;
        self.buffer.push(Record::queued(at.0, &point, 0).to_words());
    }
}

/// Two probes on one queue, as one probe.
pub struct Both<A, B>(pub A, pub B);

impl<A: Probe, B: Probe> Probe for Both<A, B> {
    fn point(&mut self, at: Nanos, point: Point) {
        self.0.point(at, point);
        self.1.point(at, point);
    }

    fn wants_commands(&self) -> bool {
        self.0.wants_commands() || self.1.wants_commands()
    }

    fn command(&mut self, at: Nanos, point: &CommandPoint) {
        self.0.command(at, point);
        self.1.command(at, point);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use block::{Bytes, Op, Request, Status, Tag};
    use queue::NodeId;

    #[test]
    fn one_of_n_requests_is_sampled() {
        let (buffer, every) = (Arc::new(TraceBuffer::new(64)), Arc::new(AtomicU32::new(3)));
        let mut sampler = Sampler::new(buffer.clone(), every.clone());
        let mut pass = |sector: u64| {
            let req = Request::new(Op::Write, Bytes(sector << 9), Bytes(4096));
            for event in [Event::Queued, Event::Issued, Event::Done { status: Status::Ok }] {
                sampler.point(Nanos(5), Point::new(Tag(0), NodeId(0), 0, &req, event));
            }
        };
        (0..7).for_each(&mut pass);
        let mut seen = Vec::new();
        buffer.drain_records(64, |record| seen.push(record.offset >> 9));
        assert_eq!(seen, [0, 3, 6]);
        every.store(0, Relaxed);
        (7..12).for_each(&mut pass);
        seen.clear();
        buffer.drain_records(64, |record| seen.push(record.offset >> 9));
        assert_eq!(seen, [7, 8, 9, 10, 11], "once all are selected, the next is sampled");
    }

    #[test]
    fn a_device_is_sampled_again_at_once_after_load_drops() {
        let (buffer, every) = (Arc::new(TraceBuffer::new(64)), Arc::new(AtomicU32::new(1_000_000)));
        let mut sampler = Sampler::new(buffer.clone(), every.clone());
        let mut ask = || {
            let req = Request::new(Op::Read, Bytes(0), Bytes(4096));
            sampler.point(Nanos(5), Point::new(Tag(0), NodeId(0), 0, &req, Event::Queued));
            let mut seen = 0;
            buffer.drain_records(64, |_| seen += 1);
            seen
        };
        assert_eq!([ask(), ask()], [1, 0]);
        every.store(2, Relaxed);
        assert_eq!([ask(), ask(), ask()], [0, 1, 0]);
    }
}
