//! One connection of a node: its session, and the state of both directions.

use super::gaps::Gaps;
use block::{Segment, Status, Tag};
use proto::nbd::Session;
use queue::{Nanos, SocketId};

/// Meaning of the next bytes from the server.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Input {
    /// A message; its first bytes may be in the stash.
    Message,
    /// Data of a read.
    Data {
        /// The request.
        tag: Tag,
        /// Position of the next byte, from the request's beginning.
        at: u64,
        /// Missing bytes, never 0.
        left: u64,
        /// Result of the command after these bytes; empty if more messages follow.
        end: Option<Status>,
    },
}

/// How the socket is being read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Receiving {
    /// The ring delivers chunks.
    Chunks,
    /// The ring was asked to stop that.
    Stopping,
    /// The ring fills that many bytes of a read's memory.
    Filling(u32),
}

pub(super) struct Connection {
    pub(super) socket: SocketId,
    pub(super) session: Session,
    pub(super) input: Input,
    pub(super) receiving: Receiving,
    /// First part of a message that was split between chunks; empty if there is none.
    pub(super) stash: Vec<u8>,
    /// Descriptors of a block-status reply, length and state, until they are copied to the request's memory.
    pub(super) extents: Vec<(u64, u64)>,
    pub(super) gaps: Gaps,
    /// The current send; its vectors are reused.
    pub(super) batch: Batch,
    /// When the node received the connection.
    pub(super) since: Nanos,
    /// When the server last sent something.
    pub(super) heard_at: Nanos,
    /// The server has sent something.
    pub(super) heard: bool,
    /// NBD_CMD_DISC was sent.
    pub(super) said_goodbye: bool,
}

/// Commands that are sent together.
#[derive(Default)]
pub(super) struct Batch {
    /// Memory of their headers; empty if nothing is being sent.
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
            // Headers of commands without data are adjacent: one segment.
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
