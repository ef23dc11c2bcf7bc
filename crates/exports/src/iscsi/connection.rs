//! A connection of an iSCSI session: its input, its replies, and its part of the sequence numbers.

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

/// Most PDUs that wait to be sent on a connection before it is not read from: a peer that pings and never
/// reads is bounded by this.
pub(super) const UNSENT_MAX: u32 = 512;
/// Most bytes that reads which complete inline may have waiting to be sent: more would leave the processor's
/// cache before it is sent. A single read always may.
pub(super) const READ_AHEAD_MAX: u64 = 1 << 20;
/// Bytes of the longest header: BHS, additional headers and digest.
const HEADER_MAX: usize = BHS_LEN + MAX_AHS_LEN as usize + DIGEST_LEN;

/// Destination of a data segment that arrives in parts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Sink {
    /// It is skipped.
    Discard,
    /// The memory of a task, from this offset on.
    Task(TaskId, u32),
    /// Memory of the connection.
    Own(Segment),
}

/// A data segment that arrives in parts.
#[derive(Clone, Copy, Debug)]
pub(super) struct DataInput {
    /// The PDU; `None`: it was refused, and is skipped.
    pub(super) pdu: Option<Request>,
    pub(super) immediate: bool,
    pub(super) sink: Sink,
    /// Bytes of the data segment.
    pub(super) len: u32,
    /// Bytes of it received so far.
    pub(super) filled: u32,
    /// Digest of those; undefined unless data digests are on.
    pub(super) digest: Digest,
    /// Padding and digest behind the data.
    pub(super) trailer: [u8; 8],
    pub(super) trailer_len: u8,
    pub(super) trailer_filled: u8,
}

impl DataInput {
    /// Whether everything has arrived.
    pub(super) fn is_whole(&self) -> bool {
        self.filled == self.len && self.trailer_filled == self.trailer_len
    }
}

/// What the next bytes from the initiator are.
#[derive(Debug)]
pub(super) enum Input {
    /// A header, of which `stash_len` bytes have arrived.
    Header,
    /// The data segment of a PDU.
    Data(DataInput),
    /// Ignored: the connection is being closed.
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
    /// Most that `send_max` may become.
    pub(super) send_limit: u32,
    pub(super) status: StatusCounter,
    pub(super) input: Input,
    /// Bytes of a header that has not arrived completely.
    pub(super) stash: Box<[u8; HEADER_MAX]>,
    pub(super) stash_len: u16,
    /// The header of the PDU whose data segment arrives, for a Reject.
    pub(super) bhs: Bhs,
    pub(super) receiving: Receiving,
    /// Large data segments follow each other: headers are received separately.
    pub(super) bulk: bool,
    /// Memory for separate headers; empty unless `bulk`.
    pub(super) header: Option<Segment>,
    /// Bytes received but not processed, because too much is waiting to be sent.
    pub(super) backlog: VecDeque<Segment>,
    /// Arriving bytes go to the backlog.
    pub(super) paused: bool,
    pub(super) outbox: Outbox,
    /// PDUs that were not sent yet.
    pub(super) unsent: Owed,
    /// Bytes of reads in the stack that complete inline.
    pub(super) reading: u64,
    /// Reads that wait until others have been sent.
    pub(super) room: VecDeque<super::task::TaskId>,
    /// Bytes of the arena charged to the connection.
    pub(super) held: u64,
    /// Bytes were received or sent since the last check.
    pub(super) moved: bool,
    /// How long checks found no progress although it was the initiator's turn.
    pub(super) still: Duration,
    /// The last step of a data segment took longer than the interval between two checks, or there was none.
    pub(super) slow: bool,
    /// How long nothing was received, as of the last check.
    pub(super) silent: Duration,
    /// Bytes were received since the last check.
    pub(super) heard: bool,
    /// A NOP-In waits for its answer.
    pub(super) pinged: bool,
    /// Parts of a text request, and of the answer that is fetched part by part.
    pub(super) text: Option<Box<super::text::TextExchange>>,
    /// Accepts no more PDUs; closed once its replies are sent.
    pub(super) ending: bool,
    /// The ring was asked to close the socket.
    pub(super) closed: bool,
    /// The ring has closed it: the connection is removed with its last task.
    pub(super) gone: bool,
    /// The latest task that announced unsolicited data.
    pub(super) unsolicited: Option<super::task::TaskId>,
    /// Tasks whose commands came on this connection.
    pub(super) tasks: u32,
    /// In the list of connections with something to send or to continue.
    pub(super) dirty: bool,
    /// Called when the connection is gone.
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

    /// Whether the initiator has sent part of a PDU and owes the rest.
    pub(super) fn is_inside_pdu(&self) -> bool {
        let partial = match self.input {
            Input::Header => self.stash_len > 0,
            Input::Data(_) => true,
            Input::Over => false,
        };
        partial && !self.paused && !self.ending
    }
}
