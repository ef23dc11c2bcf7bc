//! Translates a held request into commands to the server: the next command, and the effect of its answer.
//!
//! Most requests are one command. A request that is longer than the server supports is sent in parts, one
//! after the other. A durable write to a server without FUA is a write followed by a flush.

use super::gaps::Coverage;
use super::shared::{Export, payload_max};
use block::{Cookie, Flags, Op, Request, Status};
use proto::nbd::client::Track;
use proto::nbd::{Command, CommandFlags, Request as Wire, Session, Style, TransmissionFlags};
use queue::Nanos;

/// State of a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum State {
    /// The request waits to be sent.
    Waiting,
    /// The ring is sending the request's command, so its memory must stay valid.
    Sending,
    /// The server has the request's command.
    Sent,
}

/// Number of lost connections after which a request fails that the server had each time: it may be the
/// cause of the server's crashes.
const LOSSES_MAX: u16 = 8;

/// Longest command with compact headers, in bytes: they cannot express 4 GiB, and this is the largest
/// multiple of every block size below that.
const COMPACT_MAX: u64 = (u32::MAX as u64 >> 16) << 16;

/// Decision on how to process a request.
pub(super) enum Plan {
    /// The request completes without a command.
    Over(Status),
    /// The whole range is reported as data, because the server does not support block status.
    AllData,
    /// A command is sent.
    Send,
}

/// A request in flight.
#[derive(Clone, Copy, Debug)]
pub(super) struct Flight {
    /// Cookie of the request in the queue.
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
    /// Whether all data is written and only a flush remains.
    pub(super) flushing: bool,
    /// Result of a command that was answered before its send completed.
    pub(super) answered: Option<Status>,
    /// Checks the server's replies to the command.
    pub(super) track: Track,
    /// Parts of a read that have arrived.
    pub(super) coverage: Coverage,
    /// Time at which the command was passed to the ring.
    pub(super) sent_at: Nanos,
    /// Time at which a command for the same part of the request was first passed to the ring; `None` if
    /// none was, or if it was answered.
    pub(super) tried_since: Option<Nanos>,
    /// Number of connections that were lost with a command for the same part of the request.
    losses: u16,
    /// Position in the order of sending, which the request keeps when it is sent again.
    pub(super) serial: u64,
    /// Whether the request is to be cancelled as soon as its memory may be released.
    pub(super) cancelled: bool,
}

const NO_TRACK: Track = Track::new(Wire::new(Command::Flush, 0, 0, 0), Style::Simple, None);

impl Flight {
    pub(super) fn new(io: Cookie, req: Request, serial: u64) -> Flight {
        Flight {
            io,
            req,
            state: State::Waiting,
            done: 0,
            len: 0,
            part: 0,
            flushing: false,
            answered: None,
            track: NO_TRACK,
            coverage: Coverage::default(),
            sent_at: Nanos(0),
            tried_since: None,
            losses: 0,
            serial,
            cancelled: false,
        }
    }

    /// Returns the command's cookie on the wire. It does not repeat for a long time, so that late or
    /// duplicate answers match no request.
    pub(super) fn cookie(&self) -> u64 {
        u64::from(self.io.generation) << 32 | u64::from(self.part) << 16 | u64::from(self.io.tag.0)
    }

    /// Returns the index of a wire cookie in the array of requests.
    pub(super) const fn slot_of(cookie: u64) -> usize {
        cookie as usize & 0xffff
    }

    /// Returns the next command, which is about to be sent in this session.
    pub(super) fn command(&mut self, session: &Session) -> Wire {
        let (offset, left) = (self.req.offset.0 + self.done, self.req.len.0 - self.done);
        let clear_max = if session.extended() { u64::MAX } else { COMPACT_MAX };
        self.part = self.part.wrapping_add(1);
        let (command, most) = match self.req.op {
            _ if self.flushing => (Command::Flush, 0),
            Op::Read => (Command::Read, payload_max(&session.block_sizes)),
            Op::Write => (Command::Write, payload_max(&session.block_sizes)),
            Op::Discard => (Command::Trim, clear_max),
            Op::WriteZeroes => (Command::WriteZeroes, clear_max),
            Op::Prefetch => (Command::Cache, clear_max),
            Op::Extents => (Command::BlockStatus, clear_max),
            _ => (Command::Flush, 0),
        };
        self.len = left.min(most);
        let wire = match command {
            Command::Flush => Wire::new(command, self.cookie(), 0, 0),
            Command::Write => Wire::write(self.cookie(), offset, self.len),
            _ => Wire::new(command, self.cookie(), offset, self.len),
        };
        let wire = if self.flushing { wire } else { wire.with_flags(self.flags(session)) };
        self.track = Track::new(wire, session.style, session.base_allocation);
        self.coverage = Coverage::new(offset);
        (self.answered, self.state) = (None, State::Sending);
        wire
    }

    /// Returns whether the reply to the command has data.
    pub(super) fn reads(&self) -> bool {
        self.req.op == Op::Read
    }

    fn flags(&self, session: &Session) -> CommandFlags {
        let Request { op, flags, .. } = self.req;
        let zeroes = op == Op::WriteZeroes;
        let fua = op.is_write()
            && flags.contains(Flags::FUA)
            && session.flags.contains(TransmissionFlags::SEND_FUA);
        CommandFlags::empty()
            .with_if(fua, CommandFlags::FUA)
            .with_if(zeroes && flags.contains(Flags::NO_UNMAP), CommandFlags::NO_HOLE)
            .with_if(zeroes && flags.contains(Flags::FAST_ZERO), CommandFlags::FAST_ZERO)
    }

    /// Processes the loss of a connection on which the command was sent, in whole or in part. Returns whether
    /// it was tried long enough: for `tries_ns` nanoseconds, and on two connections, or on [`LOSSES_MAX`] if
    /// this one received anything (`heard`).
    pub(super) fn is_lost(&mut self, now: Nanos, tries_ns: u64, heard: bool) -> bool {
        self.losses = self.losses.saturating_add(1);
        let is_hopeless = if heard { self.losses >= LOSSES_MAX } else { self.losses > 1 };
        is_hopeless && self.tried_since.is_some_and(|since| now.since(since) >= tries_ns)
    }

    /// Processes the end of a command. Returns the request's status, or `None` if its next command must be
    /// sent.
    pub(super) fn ended(&mut self, status: Status, export: &Export) -> Option<Status> {
        (self.tried_since, self.losses) = (None, 0);
        if !status.is_ok() {
            // A prefetch is a hint and never fails.
            return Some(if self.req.op == Op::Prefetch { Status::Ok } else { status });
        }
        if !self.flushing {
            self.done += self.len;
            if self.done < self.req.len.0 && self.req.op != Op::Extents {
                return None;
            }
            let through = self.req.op.is_write() && self.req.flags.contains(Flags::FUA);
            if through && !export.flags.contains(TransmissionFlags::SEND_FUA) && can_flush(export) {
                self.flushing = true;
                return None;
            }
        }
        Some(Status::Ok)
    }
}

fn can_flush(export: &Export) -> bool {
    export.flags.contains(TransmissionFlags::SEND_FLUSH)
}

/// Determines how to process a request. `allocation`: the session supports block status, as far as is
/// known.
pub(super) fn plan(req: &Request, export: &Export, allocation: bool) -> Plan {
    let has = |flag| export.flags.contains(flag);
    if req.op.is_write() && export.read_only {
        return Plan::Over(Status::IoError);
    }
    match req.op {
        Op::Read | Op::Write => Plan::Send,
        Op::Flush if can_flush(export) && !export.read_only => Plan::Send,
        // Written data is always durable.
        Op::Flush => Plan::Over(Status::Ok),
        Op::Discard if has(TransmissionFlags::SEND_TRIM) => Plan::Send,
        Op::WriteZeroes
            if req.flags.contains(Flags::FAST_ZERO) && !has(TransmissionFlags::SEND_FAST_ZERO) =>
        {
            Plan::Over(Status::NotSupported)
        }
        Op::WriteZeroes if has(TransmissionFlags::SEND_WRITE_ZEROES) => Plan::Send,
        Op::Prefetch if has(TransmissionFlags::SEND_CACHE) => Plan::Send,
        Op::Prefetch => Plan::Over(Status::Ok),
        Op::Extents if allocation => Plan::Send,
        Op::Extents => Plan::AllData,
        _ => Plan::Over(Status::NotSupported),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use block::{Bytes, Tag};

    const SECOND: u64 = 1_000_000_000;

    fn sent(at: u64) -> Flight {
        let io = Cookie { tag: Tag(0), generation: 2 };
        let mut flight = Flight::new(io, Request::new(Op::Discard, Bytes::ZERO, Bytes(4096)), 1);
        flight.tried_since = Some(Nanos(at * SECOND));
        flight
    }

    #[test]
    fn a_request_delayed_by_a_busy_server_is_sent_again() {
        let mut flight = sent(0);
        assert!(!flight.is_lost(Nanos(100 * SECOND), 40 * SECOND, true), "it was sent once");
        assert!(!flight.is_lost(Nanos(200 * SECOND), 40 * SECOND, true), "others are answered");
        assert!(
            !sent(0).is_lost(Nanos(100 * SECOND), 40 * SECOND, false),
            "sent once, and nothing is answered"
        );
    }

    #[test]
    fn a_server_that_never_answers_is_given_up() {
        let mut flight = sent(0);
        assert!(!flight.is_lost(Nanos(30 * SECOND), 40 * SECOND, false));
        assert!(flight.is_lost(Nanos(60 * SECOND), 40 * SECOND, false));
        let mut deadly = sent(0);
        let losses = (1..100).find(|second| deadly.is_lost(Nanos(second * 10 * SECOND), 40 * SECOND, true));
        assert_eq!(losses, Some(u64::from(LOSSES_MAX)), "others are answered, this one it dies of");
        let mut quick = sent(0);
        assert!((1..100).all(|_| !quick.is_lost(Nanos(SECOND), 40 * SECOND, false)), "there is time left");
    }
}
