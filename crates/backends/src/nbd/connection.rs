//! One connection of a node: its session, and the state of both directions.

use super::gaps::Gaps;
use block::{Segment, Status, Tag};
use proto::nbd::Session;
use queue::{Nanos, SocketId};

/// State of the input: what the next bytes from the server are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Input {
    /// A message, whose first bytes may be in the stash.
    Message,
    /// Data of a read.
    Data {
        /// The request.
        tag: Tag,
        /// Position of the next byte, relative to the request's start.
        at: u64,
        /// Number of missing bytes, never 0.
        left: u64,
        /// Result of the command after these bytes; `None` if more messages follow.
        end: Option<Status>,
    },
}

/// State of receiving.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Receiving {
    /// The ring delivers chunks.
    Chunks,
    /// The ring was asked to stop delivering chunks.
    Stopping,
    /// The ring fills this many bytes of a read's memory.
    Filling(u32),
}

pub(super) struct Connection {
    pub(super) socket: SocketId,
    pub(super) session: Session,
    pub(super) input: Input,
    pub(super) receiving: Receiving,
    /// First part of a message that was split between chunks; empty if there is none.
    pub(super) stash: Vec<u8>,
    /// Length and state of a block-status reply's descriptors, until they are copied to the request's
    /// memory.
    pub(super) extents: Vec<(u64, u64)>,
    pub(super) gaps: Gaps,
    /// The current send; its vectors are reused.
    pub(super) batch: Batch,
    /// Time at which the node received the connection.
    pub(super) since: Nanos,
    /// Time at which the server last sent anything.
    pub(super) heard_at: Nanos,
    /// Whether the server has sent anything.
    pub(super) heard: bool,
    /// Whether NBD_CMD_DISC was sent.
    pub(super) said_goodbye: bool,
}

/// Commands that are sent together.
#[derive(Default)]
pub(super) struct Batch {
    /// Memory of the commands' headers; `None` if nothing is being sent.
    pub(super) headers: Option<Segment>,
    pub(super) tags: Vec<Tag>,
    pub(super) segments: Vec<Segment>,
}

impl Batch {
    pub(super) fn is_under_way(&self) -> bool {
        self.headers.is_some()
    }

    /// Adds memory to the send.
    pub(super) fn push(&mut self, segment: Segment) {
        match self.segments.last_mut() {
            // Headers of commands without data are adjacent: extend the segment.
            Some(last)
                if last.region == segment.region && last.offset + u64::from(last.len) == segment.offset =>
            {
                last.len += segment.len;
            }
            _ => self.segments.push(segment),
        }
    }
}

impl Connection {
    pub(super) fn new(socket: SocketId, session: Session, now: Nanos) -> Connection {
        Connection {
            socket,
            session,
            input: Input::Message,
            receiving: Receiving::Chunks,
            stash: Vec::new(),
            extents: Vec::new(),
            gaps: Gaps::default(),
            batch: Batch::default(),
            since: now,
            heard_at: now,
            heard: false,
            said_goodbye: false,
        }
    }
}
