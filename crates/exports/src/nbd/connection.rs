//! An NBD connection in its transmission phase: its input, and its unanswered requests.

use crate::outbox::{Outbox, Owed};
use block::Segment;
use proto::nbd::server::Submission;
use proto::nbd::{NbdError, Request, Session};
use queue::QueueId;
use ring::SocketId;
use std::collections::VecDeque;
use std::time::Duration;

/// Maximum number of a connection's requests whose replies have not been sent.
pub const UNANSWERED_MAX: u32 = 256;
/// Maximum number of bytes that those requests may move, which bounds the memory of a connection. It is
/// twice the largest request, so that one can be received while another is written.
pub const HELD_MAX: u64 = 64 << 20;

/// Counterpart of [`HELD_MAX`] for reads that complete inline: more data would leave the processor's cache
/// before it is sent. 1 MiB reads of a file in memory cost 1.5 times as much if 16 of them are read before
/// the first is sent.
pub(super) const READ_AHEAD_MAX: u64 = 1 << 20;

/// State of the input: what the next bytes from the client are.
#[derive(Debug)]
pub(super) enum Input {
    /// A request header, of which the first `have` bytes have arrived.
    Header {
        /// Space for the longest header.
        stash: [u8; 32],
        /// Bytes of the header received so far.
        have: u8,
    },
    /// Nothing is parsed, because this request waits for memory or a tag.
    Waiting(Request),
    /// The payload of a request, of which the first `filled` bytes are in `memory`.
    Payload {
        /// The request.
        request: Request,
        /// The request in the block layer's terms; `None` if the payload determines it (block status).
        submission: Option<Submission>,
        /// Address space in the arena for the whole payload.
        memory: Segment,
        /// Bytes received so far.
        filled: u32,
        /// Bytes charged to the connection for this memory.
        charged: u32,
    },
    /// The payload of a refused request; it is discarded, and then the error is sent.
    Refused {
        /// Bytes still to come.
        left: u64,
        /// The request.
        request: Request,
        /// The error.
        error: NbdError,
    },
    /// Input is ignored, because the connection is being closed.
    Over,
}

impl Input {
    pub(super) const START: Input = Input::Header { stash: [0; 32], have: 0 };
}

/// State of receiving.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Receiving {
    /// Not receiving.
    No,
    /// The ring delivers chunks.
    Chunks,
    /// Receiving chunks is being stopped.
    Stopping,
    /// The ring fills the memory of a payload, or of a single header.
    Filling,
}

pub(super) struct Connection {
    pub(super) socket: SocketId,
    pub(super) queue: QueueId,
    pub(super) session: Session,
    pub(super) input: Input,
    pub(super) receiving: Receiving,
    /// Number of bytes requested from the ring while it fills memory.
    pub(super) asked: u32,
    /// Whether large payloads follow each other, so that headers are received separately.
    pub(super) bulk: bool,
    /// Memory for separate headers; empty unless `bulk`.
    pub(super) header: Option<Segment>,
    /// Bytes received but not processed, because an earlier request is waiting; in order of arrival.
    pub(super) backlog: VecDeque<Segment>,
    /// Whether a request is waiting, so that arriving bytes go to the backlog.
    pub(super) paused: bool,
    pub(super) outbox: Outbox,
    /// Number of requests in the stack.
    pub(super) in_stack: u32,
    /// Accepted requests whose replies have not been sent.
    pub(super) owed: Owed,
    /// Bytes of the arena charged to the connection.
    pub(super) held: u64,
    /// Whether the connection waits for memory in the budget's queue.
    pub(super) awaits_memory: bool,
    /// Whether the connection was at the head of that queue, and tries again.
    pub(super) resumed: bool,
    /// Whether bytes were received or sent since the last check.
    pub(super) moved: bool,
    /// Time without progress, as found by checks, although it was the client's turn.
    pub(super) still: Duration,
    /// Whether the last step of a payload took longer than the interval between two checks, or there was
    /// none yet.
    pub(super) slow: bool,
    /// Whether the connection accepts no more requests; it is closed once its replies are sent.
    pub(super) ending: bool,
    /// Whether the ring was asked to close the socket.
    pub(super) closed: bool,
    /// Whether the connection is in the list of those with something to send or to continue.
    pub(super) dirty: bool,
    /// Called when the connection is gone.
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
            awaits_memory: false,
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

    /// Returns whether a request that moves `len` bytes may be accepted if all unanswered requests may move
    /// `held_max` bytes in total. A single request is always accepted.
    pub(super) fn has_room(&self, len: u64, held_max: u64) -> bool {
        // The client chose the length: the sum must not wrap.
        let held = self.owed.bytes.saturating_add(len);
        self.owed.replies == 0 || (self.owed.replies < UNANSWERED_MAX && held <= held_max)
    }

    /// Returns whether the client has sent part of a request and owes the rest.
    pub(super) fn is_owed_input(&self) -> bool {
        let partial = match self.input {
            Input::Header { have, .. } => have > 0,
            Input::Payload { .. } | Input::Refused { .. } => true,
            Input::Waiting(_) | Input::Over => false,
        };
        partial && !self.paused && !self.awaits_memory && !self.ending
    }

    /// Returns whether the connection has nothing in flight.
    pub(super) fn is_idle(&self) -> bool {
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
    fn a_length_whose_sum_would_wrap_is_refused() {
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
        assert!(
            connection.has_room(u64::MAX, HELD_MAX),
            "a single request is always accepted, to be checked and refused later"
        );
        connection.owed.add(Owed { replies: 1, bytes: 4096 });
        assert!(connection.has_room(HELD_MAX - 4096, HELD_MAX));
        assert!(!connection.has_room(u64::MAX - 4095, HELD_MAX), "the sum wraps to 0");
    }
}
