//! Hardware queues: how a request moves through a stack of nodes.
//!
//! A [`Queue`] belongs to one thread. It owns every request slot, indexed by tag, and one instance of
//! every node of a device's stack. Nodes never call each other: they answer with a [`Verdict`], and one
//! loop moves the request accordingly. It does no recursion, allocation, locking, clock read or system call:
//! [`Ring`] provides time, memory and I/O, and a simulation provides another ring.
//!
//! *Invariant:* a tag is in exactly one place: free, moving (inside the loop), held, or parked.
//! *Invariant:* this crate knows no particular node.

#![forbid(unsafe_code)]

mod busy;
mod fifo;
mod histogram;
mod node;
mod probe;
mod queues;
mod range_lock;
mod seam;
mod segments;
mod shared_sync;
mod slow;
mod sockets;
mod stats;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
mod verdict;
mod wait_list;

pub use busy::BusyTogether;
pub use histogram::{BUCKETS, Counts, bucket_floor};
pub use node::{ChildKind, Cx, NoChild, Node, NodeId, Verdict};
pub use probe::{CDB_MAX, CommandEvent, CommandPoint, Event, Point, Probe};
pub use queues::Queues;
pub use range_lock::{Claim, LockMember, RangeLock, Stripes};
pub use seam::{Blocking, FileId, FileOp, IoId, Nanos, QueueId, Ring, RingFull};
pub use segments::Segments;
pub use shared_sync::SharedSync;
pub use slow::{InFlight, InFlightState, Slow, Visit};
pub use sockets::{Chunk, NodeEvent, ReceiveEnd, SocketEvent, SocketId, SocketOwner, Sockets};
pub use stats::{NodeCounts, OpCounts, QueueStats, SIZES, Snapshot};
pub use verdict::{DEPTH_MAX, Done, Owner, Prepared, Queue, QueueConfig, Stack, StackError, TimedOut};
pub use wait_list::{HeldRequests, QueueWaker, WaitList, Waiter};
