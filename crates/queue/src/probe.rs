//! Probe points: the life of a request, for whoever traces it. Off, each costs one untaken branch.

use crate::Nanos;
use block::{Bytes, Op, Request, Status, Tag};

/// What happened to a request. The letters are blktrace's.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Event {
    /// `Q`: it arrived from the front-end.
    Queued,
    /// `X`: it was split; the range is the head's, `rest` is where the remainder begins.
    Split {
        /// Where the remainder begins.
        rest: Bytes,
    },
    /// `G`: it, or a piece of it, is about to go to a backend under this tag.
    Got,
    /// `I`: it is in line for the backend.
    Inserted,
    /// `D`: the backend has it.
    Issued,
    /// `C`: the backend is done with it.
    Completed {
        /// How it ended.
        status: Status,
    },
    /// `R`: the backend had no room; it will be offered again.
    Requeued,
    /// `A`: it was moved to another address on the device below.
    Remapped {
        /// Where it was before.
        from: Bytes,
    },
}

/// One point of a request's life.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Point {
    /// The slot it was in.
    pub tag: Tag,
    /// What it is.
    pub op: Op,
    /// Its range then.
    pub offset: Bytes,
    /// How long.
    pub len: Bytes,
    /// What happened.
    pub event: Event,
}

impl Point {
    /// What happened to `req`, as it stands.
    pub fn new(tag: Tag, req: &Request, event: Event) -> Point {
        Point { tag, op: req.op, offset: req.offset, len: req.len, event }
    }
}

/// Someone who listens. Runs on the queue's thread: it must not wait.
pub trait Probe {
    /// A point was passed at that time.
    fn point(&mut self, at: Nanos, point: Point);
}
