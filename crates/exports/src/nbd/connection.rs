//! One NBD connection in its transmission phase: what it has read and not yet done, what it owes.

use super::outbox::{Outbox, Owed};
use block::Segment;
use proto::nbd::server::Order;
use proto::nbd::{NbdError, Request, Session};
use queue::QueueId;
use ring::SocketId;
use std::collections::VecDeque;
use std::time::Duration;

/// Requests of one connection that were taken in and whose replies are not yet sent.
pub const UNANSWERED_MAX: u32 = 256;
/// Bytes that those may move: what one connection holds of memory is at most this. Twice the largest request, so
/// that one can be read while another is written.
pub const HELD_MAX: u64 = 64 << 20;

/// The same for reads that are done in place: more would leave the processor's cache before it is sent.
/// 1 MiB reads of a file in memory cost 1.5 times as much with 16 of them read before the first is sent.
pub(super) const READ_AHEAD_MAX: u64 = 1 << 20;

/// What the next bytes from the client are.
#[derive(Debug)]
pub(super) enum Input {
    /// A request header, of which the first `have` bytes are here.
    Header {
        /// Room for the longest header.
        stash: [u8; 32],
        /// Bytes of it that have come.
        have: u8,
    },
    /// Nothing yet: this request waits until there is room for it.
    Waiting(Request),
    /// The payload of a request, of which the first `filled` bytes lie in `memory`.
    Payload {
        /// The request.
        request: Request,
        /// What it stands for; `None`: only its payload tells (block status).
        order: Option<Order>,
        /// Address space of the arena for all of it.
        memory: Segment,
        /// Bytes of it that have come.
        filled: u32,
        /// Bytes of it that may lie in memory already, with which the connection is charged.
        charged: u32,
    },
    /// Payload of a request that was refused: to be thrown away, then answered.
    Refused {
        /// Bytes still to come.
        left: u64,
        /// The request.
        request: Request,
        /// Why.
        error: NbdError,
    },
    /// Whatever comes is ignored: the connection is being closed.
    Over,
}

impl Input {
    pub(super) const START: Input = Input::Header { stash: [0; 32], have: 0 };
}

/// Who reads from the socket into what.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Receiving {
    /// Nobody.
    No,
    /// The ring delivers chunks.
    Chunks,
    /// The ring was asked to stop that.
    Stopping,
    /// The ring fills the memory of a payload, or of a header that comes alone.
    Filling,
}

pub(super) struct Connection {
    pub(super) socket: SocketId,
    pub(super) queue: QueueId,
    pub(super) session: Session,
    pub(super) input: Input,
    pub(super) receiving: Receiving,
    /// Bytes that the ring was asked for while it fills memory.
    pub(super) asked: u32,
    /// Large payloads follow each other: headers are received alone.
    pub(super) bulk: bool,
    /// Where headers are received alone; empty unless `bulk`.
    pub(super) header: Option<Segment>,
    /// Received and not looked at, because there was no room for what came before. In order.
    pub(super) backlog: VecDeque<Segment>,
    /// There was no room; what arrives goes to the backlog.
    pub(super) paused: bool,
    pub(super) outbox: Outbox,
    /// Requests that are in the stack.
    pub(super) in_stack: u32,
    /// Requests taken in whose reply has not been sent.
    pub(super) owed: Owed,
    /// Bytes of the arena with which the reactor's budget charges it.
    pub(super) held: u64,
    /// It waits in the budget's line for memory.
    pub(super) hungry: bool,
    /// It was at the head of that line, and asks again.
    pub(super) resumed: bool,
    /// Bytes came or went since the budget last looked at it.
    pub(super) moved: bool,
    /// For how long that was found to be otherwise, although it was the client's turn.
    pub(super) still: Duration,
    /// The last step of a payload took longer than the time between two looks, or there was none yet.
    pub(super) slow: bool,
    /// It takes in nothing more, pays what it owes and is then closed.
    pub(super) ending: bool,
    /// The ring was told to close the socket.
    pub(super) closed: bool,
    /// It is in the list of those that have something to send or take up again.
    pub(super) dirty: bool,
    /// Called when it is over; `None` when nobody asked for that.
    pub(super) when_gone: Option<Box<dyn FnOnce() + Send>>,
}

impl Connection {
    pub(super) fn new(socket: SocketId, queue: QueueId, session: Session) -> Connection {
        Connection {
            socket,
            queue,
            session,
            input: Input::START,
            receiving: Receiving::No,
            asked: 0,
            bulk: false,
            header: None,
            backlog: VecDeque::new(),
            paused: false,
            outbox: Outbox::default(),
            in_stack: 0,
            owed: Owed::default(),
            held: 0,
            hungry: false,
            resumed: false,
            moved: true,
            still: Duration::ZERO,
            slow: true,
            ending: false,
            closed: false,
            dirty: false,
            when_gone: None,
        }
    }

    /// Whether another request that moves `len` bytes may be taken in, when those that were may come to
    /// `held_max` with it. One always may.
    pub(super) fn has_room(&self, len: u64, held_max: u64) -> bool {
        // A length that a client chose: the sum must not wrap.
        let held = self.owed.bytes.saturating_add(len);
        self.owed.replies == 0 || (self.owed.replies < UNANSWERED_MAX && held <= held_max)
    }

    /// Whether the client has sent part of a request, and the rest of it is waited for.
    pub(super) fn is_owed_input(&self) -> bool {
        let partial = match self.input {
            Input::Header { have, .. } => have > 0,
            Input::Payload { .. } | Input::Refused { .. } => true,
            Input::Waiting(_) | Input::Over => false,
        };
        partial && !self.paused && !self.hungry && !self.ending
    }

    /// Whether nothing of it is under way any more.
    pub(super) fn is_quiet(&self) -> bool {
        self.in_stack == 0
            && self.outbox.is_empty()
            && !matches!(self.receiving, Receiving::Stopping | Receiving::Filling)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proto::nbd::{ExportId, ExportInfo, Style};
    use ring::{Choice, KernelRing, RingConfig};
    use std::os::unix::net::UnixStream;

    #[test]
    fn a_length_that_would_wrap_finds_no_room() {
        let info = ExportInfo::new(1 << 20);
        let session = Session {
            export: ExportId(0),
            name: String::new(),
            size: info.size,
            flags: info.transmission_flags(Style::Extended, false),
            style: Style::Extended,
            block_sizes: info.block_sizes,
            block_sizes_agreed: false,
            base_allocation: None,
            tls: false,
        };
        let config = RingConfig { engine: Choice::Epoll, ..RingConfig::default() };
        let mut ring = KernelRing::new(config).unwrap();
        let (ours, _theirs) = UnixStream::pair().unwrap();
        let socket = ring.add_socket(ours.into(), 0).unwrap();
        let mut connection = Connection::new(socket, QueueId(0), session);
        assert!(connection.has_room(u64::MAX, HELD_MAX), "one request is always let in, to be refused");
        connection.owed.add(Owed { replies: 1, bytes: 4096 });
        assert!(connection.has_room(HELD_MAX - 4096, HELD_MAX));
        assert!(!connection.has_room(u64::MAX - 4095, HELD_MAX), "the sum wraps to 0");
    }
}
