//! Rules of the transmission phase, as one pure function from a request to its handling.
//!
//! The order of the checks determines the error: violations that make the stream unparseable come first,
//! then flags, command, write protection, bounds, alignment, length. The payload of a refused request is
//! consumed before the reply is sent.

use block::{Bytes, Flags, Op};

use super::super::error::{Fatal, NbdError};
use super::super::export::Session;
use super::super::extents::StatusQuery;
use super::super::request::{Command, Request};
use super::super::wire::{self, CommandFlags, TransmissionFlags};

/// A request in the block layer's terms.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Submission {
    /// The operation.
    pub op: Op,
    /// Modifiers of the operation.
    pub flags: Flags,
    /// Offset on the export.
    pub offset: Bytes,
    /// Length in bytes: at least 1, except for a flush.
    pub len: Bytes,
}

/// How to handle a valid request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Accepted {
    /// Submit this to the device.
    Submit(Submission),
    /// The request has length 0: reply with success.
    Empty,
    /// Reply with the block status of a range.
    Status(StatusQuery),
    /// Read the payload and pass it to [`status_query`].
    StatusPayload,
    /// Complete all requests in flight and close; there is no reply.
    Disconnect,
}

/// How to handle an invalid request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Refused {
    /// Consume its payload and reply with this error.
    Reply(NbdError),
    /// Drop the connection.
    Drop(Fatal),
}

impl From<NbdError> for Refused {
    fn from(error: NbdError) -> Refused {
        Refused::Reply(error)
    }
}

/// Checks `request` against the rules of the session.
///
/// # Errors
/// [`Refused`], with the error that the protocol document specifies.
#[inline]
pub fn check(session: &Session, request: &Request) -> Result<Accepted, Refused> {
    if request.payload_len > 0 {
        check_payload(session, request)?;
    }
    if request.command == Command::Disc {
        // "`NBD_CMD_DISC`": the client MUST send nothing after it, so no other check matters.
        return Ok(Accepted::Disconnect);
    }
    check_flags(session, request)?;
    match request.command {
        Command::Read => {
            check_range(session, request, request.len, NbdError::Invalid)?;
            check_length(session, request)?;
            Ok(submit(Op::Read, request))
        }
        Command::Write => {
            check_writable(session)?;
            check_range(session, request, request.len, NbdError::NoSpace)?;
            check_length(session, request)?;
            Ok(submit(Op::Write, request))
        }
        Command::Flush => {
            need(session, TransmissionFlags::SEND_FLUSH)?;
            // "`NBD_CMD_FLUSH`": length and offset are reserved and MUST be 0.
            if request.offset != 0 || request.len != 0 {
                return Err(NbdError::Invalid.into());
            }
            let (flags, offset, len) = (Flags::empty(), Bytes::ZERO, Bytes::ZERO);
            Ok(Accepted::Submit(Submission { op: Op::Flush, flags, offset, len }))
        }
        Command::Trim => {
            check_writable(session)?;
            need(session, TransmissionFlags::SEND_TRIM)?;
            check_range(session, request, request.len, NbdError::NoSpace)?;
            Ok(submit(Op::Discard, request))
        }
        Command::Cache => {
            need(session, TransmissionFlags::SEND_CACHE)?;
            check_range(session, request, request.len, NbdError::Invalid)?;
            Ok(submit(Op::Prefetch, request))
        }
        Command::WriteZeroes => {
            check_writable(session)?;
            need(session, TransmissionFlags::SEND_WRITE_ZEROES)?;
            check_range(session, request, request.len, NbdError::NoSpace)?;
            Ok(submit(Op::WriteZeroes, request))
        }
        Command::BlockStatus => check_block_status(session, request),
        // "Error values": an unknown command SHOULD get EINVAL.
        Command::Disc | Command::Other(_) => Err(NbdError::Invalid.into()),
    }
}

/// Translates a valid request. The behaviour of a request of length 0 is unspecified, "although the server
/// SHOULD NOT disconnect"; it succeeds.
#[inline]
fn submit(op: Op, request: &Request) -> Accepted {
    if request.len == 0 {
        return Accepted::Empty;
    }
    let mut flags = Flags::empty();
    // "Command flags": FUA is valid with every command and has no effect on those that do not write.
    if request.flags.contains(CommandFlags::FUA) && op.is_write() {
        flags = flags.union(Flags::FUA);
    }
    if request.flags.contains(CommandFlags::NO_HOLE) {
        flags = flags.union(Flags::NO_UNMAP);
    }
    if request.flags.contains(CommandFlags::FAST_ZERO) {
        flags = flags.union(Flags::FAST_ZERO);
    }
    Accepted::Submit(Submission { op, flags, offset: Bytes(request.offset), len: Bytes(request.len) })
}

/// Checks the payload's length. "Request message": with extended headers a server SHOULD disconnect if a
/// payload is longer than the advertised maximum. "Block size constraints": otherwise a payload of up to 32
/// MiB SHOULD NOT be treated as a denial of service, even above the maximum.
fn check_payload(session: &Session, request: &Request) -> Result<(), Refused> {
    let maximum = session.block_sizes.maximum;
    let limit = if session.extended() { maximum } else { maximum.max(wire::PORTABLE_PAYLOAD) };
    if request.payload_len > u64::from(limit) {
        let (len, limit) = (request.payload_len, limit.into());
        return Err(Refused::Drop(Fatal::PayloadTooLong { len, limit }));
    }
    Ok(())
}

/// Checks the command's flags. A flag SHOULD get EINVAL if it is unknown or not documented for the command
/// ("Error values"), or if it was not negotiated ("Command flags").
#[inline]
fn check_flags(session: &Session, request: &Request) -> Result<(), NbdError> {
    let flags = session.flags;
    let fua = CommandFlags::empty().with_if(flags.contains(TransmissionFlags::SEND_FUA), CommandFlags::FUA);
    let allowed = match request.command {
        Command::Read => {
            fua.with_if(session.structured() && flags.contains(TransmissionFlags::SEND_DF), CommandFlags::DF)
        }
        Command::Write => fua.with_if(session.extended(), CommandFlags::PAYLOAD_LEN),
        Command::WriteZeroes => fua
            .union(CommandFlags::NO_HOLE)
            .with_if(flags.contains(TransmissionFlags::SEND_FAST_ZERO), CommandFlags::FAST_ZERO),
        Command::BlockStatus => fua.union(CommandFlags::REQ_ONE).with_if(
            session.extended() && flags.contains(TransmissionFlags::BLOCK_STATUS_PAYLOAD),
            CommandFlags::PAYLOAD_LEN,
        ),
        Command::Flush | Command::Trim | Command::Cache | Command::Disc | Command::Other(_) => fua,
    };
    if !request.flags.difference(allowed).is_empty() {
        return Err(NbdError::Invalid);
    }
    // "Request message": a write MUST have PAYLOAD_LEN with extended headers.
    if request.command == Command::Write
        && session.extended()
        && !request.flags.contains(CommandFlags::PAYLOAD_LEN)
    {
        return Err(NbdError::Invalid);
    }
    Ok(())
}

/// Checks that the export is writable. "Error values": a write to a read-only export SHOULD get EPERM.
#[inline]
fn check_writable(session: &Session) -> Result<(), NbdError> {
    if session.flags.contains(TransmissionFlags::READ_ONLY) { Err(NbdError::Perm) } else { Ok(()) }
}

/// Checks that a command was advertised. "Request types": a client MUST NOT send commands that were not;
/// some send `CACHE` nevertheless and tolerate an error.
#[inline]
fn need(session: &Session, flag: TransmissionFlags) -> Result<(), NbdError> {
    if session.flags.contains(flag) { Ok(()) } else { Err(NbdError::Invalid) }
}

/// Checks that the range lies within the export, or fails with `past_end` ("Error values": ENOSPC for
/// writes, EINVAL for others), and that it is aligned ("Block size constraints": SHOULD be EINVAL).
#[inline]
fn check_range(session: &Session, request: &Request, len: u64, past_end: NbdError) -> Result<(), NbdError> {
    match request.offset.checked_add(len) {
        Some(end) if end <= session.size => {}
        _ => return Err(past_end),
    }
    let below_minimum = u64::from(session.block_sizes.minimum.max(1)) - 1;
    if (request.offset | len) & below_minimum != 0 {
        return Err(NbdError::Invalid);
    }
    Ok(())
}

/// Checks the length of a read's or write's data against the maximum ("Block size constraints": SHOULD be
/// EINVAL; "`NBD_CMD_READ`": EOVERFLOW if the reply must not be fragmented).
#[inline]
fn check_length(session: &Session, request: &Request) -> Result<(), NbdError> {
    if request.len <= u64::from(session.block_sizes.maximum) {
        return Ok(());
    }
    Err(if request.flags.contains(CommandFlags::DF) { NbdError::Overflow } else { NbdError::Invalid })
}

/// Bytes of a status payload with one context: the length of the range and the id.
const STATUS_PAYLOAD_LEN: u64 = 12;

fn check_block_status(session: &Session, request: &Request) -> Result<Accepted, Refused> {
    // "Metadata querying": without a selected context the query SHOULD get EINVAL.
    let context = session.base_allocation.ok_or(NbdError::Invalid)?;
    if request.flags.contains(CommandFlags::PAYLOAD_LEN) {
        // There is only one context: a payload of any other length contains none, a duplicate, or an
        // unknown one.
        if request.payload_len != STATUS_PAYLOAD_LEN {
            return Err(NbdError::Invalid.into());
        }
        return Ok(Accepted::StatusPayload);
    }
    query(session, context, request, request.len).map(Accepted::Status).map_err(Refused::from)
}

/// Creates a query. A status MUST have a descriptor, and its length cannot be 0, so queries of length 0 are
/// refused.
fn query(session: &Session, context: u32, request: &Request, len: u64) -> Result<StatusQuery, NbdError> {
    check_range(session, request, len, NbdError::Invalid)?;
    if len == 0 {
        return Err(NbdError::Invalid);
    }
    Ok(StatusQuery::new(context, request, len))
}

/// Parses the payload of a block status request ("`NBD_CMD_BLOCK_STATUS`").
///
/// # Errors
/// EINVAL, which MUST answer a context that was not selected or is repeated, once the payload is consumed.
pub fn status_query(session: &Session, request: &Request, payload: &[u8]) -> Result<StatusQuery, NbdError> {
    let selected = session.base_allocation.ok_or(NbdError::Invalid)?;
    let len = wire::u64_at(payload, 0).ok_or(NbdError::Invalid)?;
    let context = wire::u32_at(payload, 8).ok_or(NbdError::Invalid)?;
    if payload.len() as u64 != STATUS_PAYLOAD_LEN || context != selected {
        return Err(NbdError::Invalid);
    }
    query(session, context, request, len)
}

#[cfg(test)]
mod tests;
