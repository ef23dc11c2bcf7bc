//! Translates a held request into commands to the program: the next command, and the effect of its answer.
//!
//! Most requests are one command. A request that is longer than a slot is sent in parts, one after the
//! other. A durable write to a program without FUA is a write followed by a flush.

use super::shared::Shared;
use block::{Cookie, Flags, Op, Request, Status};
use proto::exec::{FUA, Features, NO_UNMAP, Operation, Request as Wire};
use queue::Nanos;

/// Number of lost connections after which a request fails that the program had each time: it may be the
/// cause of the program's crashes.
pub(super) const LOSSES_MAX: u16 = 8;

/// Longest discard in bytes: lengths have 32 bits, and this is a multiple of every block size.
const CLEAR_MAX: u64 = (u32::MAX as u64 >> 16) << 16;

/// State of a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum State {
    /// The request waits for a connection or a slot.
    Waiting,
    /// The program has the request's command, whose data is in this slot.
    Sent(u16),
}

/// Decision on how to process a request.
pub(super) enum Plan {
    /// It completes with this status, without a command.
    Over(Status),
    /// The whole range is reported as data.
    AllData,
    /// The request is sent to the program.
    Send,
}

/// A request in flight.
#[derive(Clone, Copy, Debug)]
pub(super) struct Flight {
    pub(super) io: Cookie,
    /// The request as it arrived.
    pub(super) req: Request,
    pub(super) state: State,
    /// Bytes of the range that are done.
    pub(super) done: u64,
    /// Length of the current or next command in bytes.
    pub(super) len: u64,
    /// Number of commands sent so far for this request.
    part: u16,
    flushing: bool,
    pub(super) sent_at: Nanos,
    losses: u16,
    /// Position in the order of sending, which the request keeps when it is sent again.
    pub(super) serial: u64,
    /// Whether the request is to be cancelled as soon as the program has lost its connection.
    pub(super) cancelled: bool,
}

impl Flight {
    pub(super) fn new(io: Cookie, req: Request, serial: u64) -> Flight {
        let (state, sent_at) = (State::Waiting, Nanos(0));
        Flight {
            io,
            req,
            state,
            done: 0,
            len: 0,
            part: 0,
            flushing: false,
            sent_at,
            losses: 0,
            serial,
            cancelled: false,
        }
    }

    /// Returns the command's tag on the wire. It does not repeat for a long time, so that duplicate replies
    /// match no request.
    pub(super) fn wire_tag(&self) -> u64 {
        u64::from(self.io.generation) << 32 | u64::from(self.part) << 16 | u64::from(self.io.tag.0)
    }

    /// Returns the index of a wire tag in the array of requests.
    pub(super) const fn index_of(wire_tag: u64) -> usize {
        wire_tag as usize & 0xffff
    }

    /// Returns the next command, which is about to be sent with its data in the slot that starts at
    /// `place`.
    pub(super) fn command(&mut self, shared: &Shared, slot: u16, place: u64) -> Wire {
        let (offset, left) = (self.req.offset.0 + self.done, self.req.len.0 - self.done);
        self.part = self.part.wrapping_add(1);
        let transfer = u64::from(shared.ready.transfer_max);
        let (operation, most) = match self.req.op {
            _ if self.flushing => (Operation::Flush, 0),
            Op::Read => (Operation::Read, transfer),
            Op::Write => (Operation::Write, transfer),
            Op::Discard => (Operation::Discard, CLEAR_MAX),
            Op::WriteZeroes => (Operation::WriteZeroes, CLEAR_MAX),
            _ => (Operation::Flush, 0),
        };
        self.len = left.min(most);
        self.state = State::Sent(slot);
        let through = self.req.op.is_write() && self.req.flags.contains(Flags::FUA);
        let fua = if through && !self.flushing && shared.has(Features::FUA) { FUA } else { 0 };
        let keeps = operation == Operation::WriteZeroes && self.req.flags.contains(Flags::NO_UNMAP);
        let flags = fua | if keeps { NO_UNMAP } else { 0 };
        let offset = if operation == Operation::Flush { 0 } else { offset };
        let place = if self.moves_data() { place } else { 0 };
        Wire { tag: self.wire_tag(), operation, flags, len: self.len as u32, offset, place }
    }

    /// Returns whether the command has data in its slot.
    pub(super) fn moves_data(&self) -> bool {
        !self.flushing && matches!(self.req.op, Op::Read | Op::Write)
    }

    /// Counts a loss of the connection while the program had the request. Returns whether the request must
    /// now fail.
    pub(super) fn is_lost(&mut self) -> bool {
        self.losses = self.losses.saturating_add(1);
        self.losses >= LOSSES_MAX
    }

    /// Processes the end of a command. Returns the request's status, or `None` if its next command must be
    /// sent.
    pub(super) fn ended(&mut self, status: Status, shared: &Shared) -> Option<Status> {
        self.losses = 0;
        if !status.is_ok() {
            return Some(status);
        }
        if !self.flushing {
            self.done += self.len;
            if self.done < self.req.len.0 {
                return None;
            }
            let through = self.req.op.is_write() && self.req.flags.contains(Flags::FUA);
            if through && !shared.has(Features::FUA) && shared.has(Features::FLUSH) {
                self.flushing = true;
                return None;
            }
        }
        Some(Status::Ok)
    }
}

/// Determines how to process a request.
pub(super) fn plan(req: &Request, shared: &Shared) -> Plan {
    if req.op.is_write() && shared.read_only {
        return Plan::Over(Status::IoError);
    }
    match req.op {
        Op::Read | Op::Write if req.len.0 == 0 => Plan::Over(Status::Ok),
        Op::Read | Op::Write => Plan::Send,
        Op::Flush if shared.has(Features::FLUSH) && !shared.read_only => Plan::Send,
        // Written data is always durable.
        Op::Flush | Op::Prefetch => Plan::Over(Status::Ok),
        Op::Discard if shared.has(Features::DISCARD) => Plan::Send,
        Op::WriteZeroes if req.flags.contains(Flags::FAST_ZERO) => Plan::Over(Status::NotSupported),
        Op::WriteZeroes if shared.has(Features::WRITE_ZEROES) => Plan::Send,
        Op::Extents => Plan::AllData,
        _ => Plan::Over(Status::NotSupported),
    }
}
