//! A connection of an iSCSI session: its input, its replies, and its share of the sequence numbers.

use super::setup::ConnectionSetup;
use super::task::TaskId;
use crate::outbox::{Outbox, Owed};
use block::Segment;
use proto::iscsi::digest::Digest;
use proto::iscsi::pdu::{BHS_LEN, Bhs, DIGEST_LEN, MAX_AHS_LEN, Request};
use proto::iscsi::sequence::StatusCounter;
use ring::SocketId;
use std::collections::VecDeque;
use std::time::Duration;

/// Number of PDUs waiting to be sent at which a connection is no longer read. It bounds the memory of a
/// peer that sends pings and never reads.
pub(super) const UNSENT_MAX: u32 = 512;
/// Maximum number of bytes waiting to be sent for reads that complete inline: more would leave the
/// processor's cache before they are sent. A single read is always allowed.
pub(super) const READ_AHEAD_MAX: u64 = 1 << 20;
/// Bytes of the longest header: BHS, additional headers and digest.
const HEADER_MAX: usize = BHS_LEN + MAX_AHS_LEN as usize + DIGEST_LEN;

/// Destination of a data segment that arrives in parts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Sink {
    /// The data is skipped.
    Discard,
    /// The memory of a task, starting at this offset.
    Task(TaskId, u32),
    /// Memory of the connection.
    Own(Segment),
}

/// A data segment that arrives in parts.
#[derive(Clone, Copy, Debug)]
pub(super) struct DataInput {
    /// The PDU; `None` if it was refused and its data is skipped.
    pub(super) pdu: Option<Request>,
    pub(super) immediate: bool,
    pub(super) sink: Sink,
    /// Bytes of the data segment.
    pub(super) len: u32,
    /// Bytes of the data segment received so far.
    pub(super) filled: u32,
    /// Digest of those bytes; undefined unless data digests are on.
    pub(super) digest: Digest,
    /// Padding and digest after the data.
    pub(super) trailer: [u8; 8],
    pub(super) trailer_len: u8,
    pub(super) trailer_filled: u8,
}

impl DataInput {
    /// Returns whether the whole segment has arrived.
    pub(super) fn is_whole(&self) -> bool {
        self.filled == self.len && self.trailer_filled == self.trailer_len
    }
}

/// State of the input: what the next bytes from the initiator are.
#[derive(Debug)]
pub(super) enum Input {
    /// A header, of which `stash_len` bytes have arrived.
    Header,
    /// The data segment of a PDU.
    Data(DataInput),
    /// Input is ignored, because the connection is being closed.
    Over,
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
    /// The ring fills this memory of a data segment.
    Data(Segment),
    /// The ring fills the memory of a header.
    Header,
}

pub(super) struct Connection {
    pub(super) socket: SocketId,
    pub(super) session: u32,
    pub(super) cid: u16,
    pub(super) header_digest: bool,
    pub(super) data_digest: bool,
    /// Longest data segment that the initiator may send, in bytes.
    pub(super) receive_max: u32,
    /// Longest data segment that the initiator accepts, in bytes.
    pub(super) send_max: u32,
    /// Upper bound of `send_max`.
    pub(super) send_limit: u32,
    pub(super) status: StatusCounter,
    pub(super) input: Input,
    /// Bytes of a header that has not arrived completely.
    pub(super) stash: Box<[u8; HEADER_MAX]>,
    pub(super) stash_len: u16,
    /// The header of the PDU whose data segment is arriving; a Reject returns it.
    pub(super) bhs: Bhs,
    pub(super) receiving: Receiving,
    /// Whether large data segments follow each other, so that headers are received separately.
    pub(super) bulk: bool,
    /// Memory for separate headers; empty unless `bulk`.
    pub(super) header: Option<Segment>,
    /// Bytes received but not processed, because too many PDUs are waiting to be sent.
    pub(super) backlog: VecDeque<Segment>,
    /// Whether arriving bytes go to the backlog.
    pub(super) paused: bool,
    pub(super) outbox: Outbox,
    /// PDUs that have not been sent yet.
    pub(super) unsent: Owed,
    /// Bytes of reads in the stack that complete inline.
    pub(super) reading: u64,
    /// Reads that wait until others have been sent.
    pub(super) room: VecDeque<super::task::TaskId>,
    /// Bytes of the arena charged to the connection.
    pub(super) held: u64,
    /// Whether bytes were received or sent since the last check.
    pub(super) moved: bool,
    /// Time without progress, as found by checks, although it was the initiator's turn.
    pub(super) still: Duration,
    /// Whether the last step of a data segment took longer than the interval between two checks, or there
    /// was none.
    pub(super) slow: bool,
    /// Time since the last byte was received, as of the last check.
    pub(super) silent: Duration,
    /// Whether bytes were received since the last check.
    pub(super) heard: bool,
    /// Whether a NOP-In waits for its answer.
    pub(super) pinged: bool,
    /// Text exchange: parts of a request, and of the answer that the initiator fetches part by part.
    pub(super) text: Option<Box<super::text::TextExchange>>,
    /// Whether the connection accepts no more PDUs; it is closed once its replies are sent.
    pub(super) ending: bool,
    /// Whether the ring was asked to close the socket.
    pub(super) closed: bool,
    /// Whether the ring has closed the socket: the connection is removed with its last task.
    pub(super) gone: bool,
    /// The latest task that announced unsolicited data.
    pub(super) unsolicited: Option<super::task::TaskId>,
    /// Number of tasks whose commands came on this connection.
    pub(super) tasks: u32,
    /// Whether the connection is in the list of those with something to send or to continue.
    pub(super) dirty: bool,
    /// Called when the connection is removed.
    pub(super) when_gone: Option<Box<dyn FnOnce() + Send>>,
}

impl Connection {
    pub(super) fn new(socket: SocketId, session: u32, setup: ConnectionSetup) -> Connection {
        Connection {
            socket,
            session,
            cid: setup.cid,
            header_digest: setup.parameters.header_digest,
            data_digest: setup.parameters.data_digest,
            send_limit: setup.parameters.send_segment_limit.max(512),
            send_max: setup.parameters.max_send_segment.max(512),
            status: StatusCounter::new(setup.stat_sn),
            receive_max: setup.parameters.max_receive_segment,
            input: Input::Header,
            stash: Box::new([0; HEADER_MAX]),
            stash_len: 0,
            bhs: [0; BHS_LEN],
            receiving: Receiving::No,
            bulk: false,
            header: None,
            backlog: VecDeque::new(),
            paused: false,
            outbox: Outbox::default(),
            unsent: Owed::default(),
            reading: 0,
            room: VecDeque::new(),
            held: 0,
            moved: true,
            still: Duration::ZERO,
            slow: true,
            silent: Duration::ZERO,
            heard: true,
            pinged: false,
            text: None,
            ending: false,
            closed: false,
            gone: false,
            unsolicited: None,
            tasks: 0,
            dirty: false,
            when_gone: setup.when_gone,
        }
    }

    /// Returns whether the initiator has sent part of a PDU and owes the rest.
    pub(super) fn is_inside_pdu(&self) -> bool {
        let partial = match self.input {
            Input::Header => self.stash_len > 0,
            Input::Data(_) => true,
            Input::Over => false,
        };
        partial && !self.paused && !self.ending
    }
}
