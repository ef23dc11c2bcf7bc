//! Probe points: events of a request, for tracing. Without a probe, each costs one branch that is not taken.

use crate::{Nanos, NodeId};
use block::{Bytes, Flags, Op, Request, Status, Tag};

/// An event of a request. The letters are those of blktrace.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Event {
    /// `Q`: it arrived from the front-end.
    Queued,
    /// A layer received it.
    Entered,
    /// `X`: it was split. The range is that of the head; `rest` is where the remainder begins.
    Split {
        /// Offset of the remainder.
        rest: Bytes,
    },
    /// `P`: it is the first request of a batch that is held back until the batch is complete.
    Plugged,
    /// `U`: the batch is complete.
    Unplugged {
        /// Requests in the batch.
        count: u32,
    },
    /// `M` or `F`: it was merged into the back or the front of a waiting request.
    Merged {
        /// Merged into the front.
        front: bool,
    },
    /// `G`: a scheduler received it.
    Got,
    /// `I`: it was inserted into the scheduler's queue.
    Inserted,
    /// `D`: the scheduler dispatched it. If the next node is a backend of the same device, `Issued` follows.
    Dispatched,
    /// `D`: a backend received it. If the stack has no scheduler, a tracer shows it as got (`G`), inserted
    /// (`I`) and issued in one step.
    Issued,
    /// `C`: the backend completed it.
    Completed {
        /// Status of the request.
        status: Status,
    },
    /// A layer completed it.
    Left {
        /// Status of the request.
        status: Status,
    },
    /// `R`: the node could not accept it; it will be offered again.
    Requeued,
    /// It is complete; the tag belongs to the front-end again.
    Done {
        /// Status of the request.
        status: Status,
    },
}

/// An event with the request at that moment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Point {
    /// Tag of the request.
    pub tag: Tag,
    /// Node at which the event occurred.
    pub node: NodeId,
    /// Depth of the node on the request's path: 1 for the first node.
    pub depth: u8,
    /// Parent of a child request: only with [`Event::Entered`] and [`Event::Issued`].
    pub parent: Option<Tag>,
    /// Operation.
    pub op: Op,
    /// Flags of the request.
    pub flags: Flags,
    /// First byte of its range at that moment.
    pub offset: Bytes,
    /// Length of its range.
    pub len: Bytes,
    /// The event.
    pub event: Event,
}

impl Point {
    /// Returns the point of an event of `req` in its current state.
    pub fn new(tag: Tag, node: NodeId, depth: u8, req: &Request, event: Event) -> Point {
        let parent = None;
        Point {
            tag,
            node,
            depth,
            parent,
            op: req.op,
            flags: req.flags,
            offset: req.offset,
            len: req.len,
            event,
        }
    }
}

/// Longest command descriptor block that a [`CommandPoint`] holds, in bytes.
pub const CDB_MAX: usize = 32;

/// An event of a command of the front-end's protocol (a SCSI command), of which block requests are parts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CommandPoint {
    /// Number of the command among those of its thread, in order of arrival.
    pub number: u32,
    /// Number of its session.
    pub session: u16,
    /// Logical unit number, as the initiator uses it.
    pub lun: u16,
    /// Tag that the initiator gave it.
    pub task: u32,
    /// Command descriptor block.
    pub cdb: [u8; CDB_MAX],
    /// Its length in bytes.
    pub cdb_len: u8,
    /// The event.
    pub event: CommandEvent,
}

/// What happened to a command.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CommandEvent {
    /// The logical unit decided what it does.
    Begun,
    /// A block request of it is submitted next.
    Request {
        /// Tag of the request.
        tag: Tag,
        /// Operation.
        op: Op,
        /// First byte.
        offset: Bytes,
        /// Length.
        len: Bytes,
        /// The command came through another device, in whose trace it begins and ends.
        is_foreign: bool,
    },
    /// It ended.
    Ended {
        /// SCSI status.
        status: u8,
        /// Sense key, additional sense code and qualifier; zeros without sense data.
        sense: [u8; 3],
        /// It ended without a response: it was aborted.
        is_silent: bool,
        /// Bytes of data moved.
        bytes: u64,
    },
}

/// A tracer. Runs on the queue's thread, so it must not block.
pub trait Probe {
    /// Records an event.
    fn point(&mut self, at: Nanos, point: Point);

    /// Whether [`command`](Probe::command) records anything.
    fn wants_commands(&self) -> bool {
        false
    }

    /// Records an event of a command.
    fn command(&mut self, at: Nanos, point: &CommandPoint) {
        let _ = (at, point);
    }
}
