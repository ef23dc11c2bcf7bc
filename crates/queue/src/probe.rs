//! Probe points: the life of a request, for whoever traces it. Off, each costs one untaken branch.

use crate::{Nanos, NodeId};
use block::{Bytes, Flags, Op, Request, Status, Tag};

/// What happened to a request. The letters are blktrace's.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Event {
    /// `Q`: it arrived from the front-end.
    Queued,
    /// A layer was handed it.
    Entered,
    /// `X`: it was split; the range is the head's, `rest` is where the remainder begins.
    Split {
        /// Where the remainder begins.
        rest: Bytes,
    },
    /// `P`: the first request of a batch that is held back until the batch is over.
    Plugged,
    /// `U`: it is over.
    Unplugged {
        /// Requests that were held back.
        count: u32,
    },
    /// `M` or `F`: it became the end, or the beginning, of a request that waits.
    Merged {
        /// The beginning.
        front: bool,
    },
    /// `G`: a scheduler has it.
    Got,
    /// `I`: it waits in line.
    Inserted,
    /// `D`: the scheduler hands it on. Where a backend of the same device comes next, that says so itself.
    Dispatched,
    /// `D`: a backend has it. Where nothing in the stack holds requests in line, a tracer shows it as got (`G`),
    /// inserted (`I`) and issued in one step.
    Issued,
    /// `C`: the backend is done with it.
    Completed {
        /// How it ended.
        status: Status,
    },
    /// A layer is done with it.
    Left {
        /// How it ended.
        status: Status,
    },
    /// `R`: the node had no room; it will be offered again.
    Requeued,
    /// It is over, and the front-end's again.
    Done {
        /// How it ended.
        status: Status,
    },
}

/// One point of a request's life.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Point {
    /// The slot it was in.
    pub tag: Tag,
    /// The node that it happened at.
    pub node: NodeId,
    /// How many nodes down it is: 1 at the first that the tag has been handed to.
    pub depth: u8,
    /// What it is.
    pub op: Op,
    /// How it is to be done.
    pub flags: Flags,
    /// Its range then.
    pub offset: Bytes,
    /// How long.
    pub len: Bytes,
    /// What happened.
    pub event: Event,
}

impl Point {
    /// What happened to `req`, as it stands.
    pub fn new(tag: Tag, node: NodeId, depth: u8, req: &Request, event: Event) -> Point {
        Point { tag, node, depth, op: req.op, flags: req.flags, offset: req.offset, len: req.len, event }
    }
}

/// Someone who listens. Runs on the queue's thread: it must not wait.
pub trait Probe {
    /// A point was passed at that time.
    fn point(&mut self, at: Nanos, point: Point);
}
