//! One connection of a node: its session, what is on its way in either direction.

use super::gaps::Gaps;
use block::{Segment, Status, Tag};
use proto::nbd::Session;
use queue::{Nanos, SocketId};

/// What the next bytes from the server are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Input {
    /// A message; its first bytes may lie in the stash.
    Message,
    /// Data of a read.
    Data {
        /// Whose.
        tag: Tag,
        /// Where it goes, in bytes from the request's beginning.
        at: u64,
        /// Bytes still to come. Never 0.
        left: u64,
        /// How the command ends with them; empty when more messages follow.
        end: Option<Status>,
    },
}

/// Who reads from the socket into what.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Receiving {
    /// The ring delivers chunks.
    Chunks,
    /// The ring was asked to stop that.
    Stopping,
    /// The ring fills so many bytes of a read's own memory.
    Filling(u32),
}

pub(super) struct Connection {
    pub(super) socket: SocketId,
    pub(super) session: Session,
    pub(super) input: Input,
    pub(super) receiving: Receiving,
    /// The beginning of a message that came in two chunks; empty when there is none.
    pub(super) stash: Vec<u8>,
    /// Stretches that a status message told of, length and state, on their way to a request's memory.
    pub(super) told: Vec<(u64, u64)>,
    pub(super) gaps: Gaps,
    /// What is being sent; the vectors are kept from one send to the next.
    pub(super) batch: Batch,
    /// When the node got it.
    pub(super) since: Nanos,
    /// When something last came from the server.
    pub(super) heard_at: Nanos,
    /// Something did.
    pub(super) heard: bool,
    /// The server was told that the session is over.
    pub(super) said_goodbye: bool,
}

/// Commands that are sent at once.
#[derive(Default)]
pub(super) struct Batch {
    /// Memory of their headers; empty when nothing is being sent.
    pub(super) headers: Option<Segment>,
    pub(super) tags: Vec<Tag>,
    pub(super) pieces: Vec<Segment>,
}

impl Batch {
    pub(super) fn is_under_way(&self) -> bool {
        self.headers.is_some()
    }

    /// Add memory behind what there is.
    pub(super) fn push(&mut self, piece: Segment) {
        match self.pieces.last_mut() {
            // Headers of commands without data lie one behind the other: one piece.
            Some(last)
                if last.region == piece.region && last.offset + u64::from(last.len) == piece.offset =>
            {
                last.len += piece.len;
            }
            _ => self.pieces.push(piece),
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
            told: Vec::new(),
            gaps: Gaps::default(),
            batch: Batch::default(),
            since: now,
            heard_at: now,
            heard: false,
            said_goodbye: false,
        }
    }
}
