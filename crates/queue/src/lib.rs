//! Hardware queues: how a request moves through a stack of nodes.
//!
//! A [`Queue`] belongs to one thread. It owns every request slot, indexed by tag, and one instance of
//! every node of a device's stack. Nodes never call each other: they answer with a [`Verdict`], and one
//! loop carries the request. There is no recursion, allocation, lock, clock or system call here:
//! [`Ring`] brings time, memory and I/O, and a simulation brings another ring.
//!
//! *Invariant:* a tag is in exactly one place: free, moving (inside the loop), held, or parked.
//! *Invariant:* which nodes exist is not known here.

#![forbid(unsafe_code)]

mod busy;
mod gate;
mod histogram;
mod node;
mod probe;
mod queues;
mod rounds;
mod seam;
mod segments;
mod slow;
mod sockets;
mod stats;
mod verdict;

pub use busy::BusyTogether;
pub use gate::{Gate, Nudge, Strips, Wish};
pub use histogram::{BUCKETS, Counts, bucket_floor};
pub use node::{ChildKind, Cx, NoChild, Node, NodeId, Verdict};
pub use probe::{Event, Point, Probe};
pub use queues::Queues;
pub use rounds::Rounds;
pub use seam::{FileId, FileOp, IoId, Nanos, Patience, QueueId, Ring, RingFull};
pub use segments::Segments;
pub use slow::{Slow, Standing, UnderWay, Visit};
pub use sockets::{Chunk, NodeEvent, ReceiveEnd, SocketEvent, SocketId, SocketOwner, Sockets};
pub use stats::{NodeCounts, OpCounts, QueueStats, SIZES, Snapshot};
pub use verdict::{DEPTH_MAX, Done, Owner, Prepared, Queue, QueueConfig, Stack, StackError, TimedOut};
