//! Parses and encodes request headers, compact and extended.
//!
//! Only headers are parsed. The payload of `payload_len` bytes follows on the wire and is left to the caller,
//! which must read past it even if the request is refused.

use super::error::Fatal;
use super::wire::{self, CommandFlags, put};

/// Command of a request ("Request types").
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Command {
    /// Read data.
    Read,
    /// Write data.
    Write,
    /// End the session; there is no reply.
    Disc,
    /// Flush writes to stable storage.
    Flush,
    /// Discard the range.
    Trim,
    /// Prefetch the range.
    Cache,
    /// Make the range read as zeroes.
    WriteZeroes,
    /// Report the block status of the range.
    BlockStatus,
    /// Unknown command.
    Other(u16),
}

impl Command {
    /// Converts a number from the wire.
    pub const fn from_code(code: u16) -> Command {
        match code {
            0 => Command::Read,
            1 => Command::Write,
            2 => Command::Disc,
            3 => Command::Flush,
            4 => Command::Trim,
            5 => Command::Cache,
            6 => Command::WriteZeroes,
            7 => Command::BlockStatus,
            other => Command::Other(other),
        }
    }

    /// Returns the number on the wire.
    pub const fn code(self) -> u16 {
        match self {
            Command::Read => 0,
            Command::Write => 1,
            Command::Disc => 2,
            Command::Flush => 3,
            Command::Trim => 4,
            Command::Cache => 5,
            Command::WriteZeroes => 6,
            Command::BlockStatus => 7,
            Command::Other(code) => code,
        }
    }
}

/// A request header. Plain data; nothing in it has been checked.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Request {
    /// The command.
    pub command: Command,
    /// Flags of the command.
    pub flags: CommandFlags,
    /// The client's identifier of the request, repeated in every reply.
    pub cookie: u64,
    /// Offset on the export, in bytes.
    pub offset: u64,
    /// The header's length field: bytes of the range, of the payload, or (write) of both.
    pub len: u64,
    /// Bytes of payload that follow the header, to be read past even if the request is refused.
    pub payload_len: u64,
}

/// Bytes of a request header.
pub const fn header_len(extended: bool) -> usize {
    if extended { wire::EXTENDED_REQUEST_LEN } else { wire::REQUEST_LEN }
}

/// Parses the header at the front of `bytes`: the request and the header's length, or `None` while it is
/// incomplete.
///
/// "Request message": a compact request has a payload if it is a write; an extended one if `PAYLOAD_LEN` is
/// set. A wrong magic is detected as soon as its four bytes have arrived.
///
/// # Errors
/// [`Fatal::BadMagic`]: the stream has no meaning.
#[inline]
pub fn parse(bytes: &[u8], extended: bool) -> Result<Option<(Request, usize)>, Fatal> {
    let expected = if extended { wire::EXTENDED_REQUEST_MAGIC } else { wire::REQUEST_MAGIC };
    let Some(found) = wire::u32_at(bytes, 0) else { return Ok(None) };
    if found != expected {
        return Err(Fatal::BadMagic { found: found.into(), expected: expected.into() });
    }
    Ok(if extended { parse_extended(bytes) } else { parse_compact(bytes) })
}

#[inline]
fn parse_compact(bytes: &[u8]) -> Option<(Request, usize)> {
    let header: &[u8; wire::REQUEST_LEN] = bytes.first_chunk()?;
    let (flags, command, cookie, offset) = parse_common(header)?;
    let len = u64::from(wire::u32_at(header, 24)?);
    let payload_len = if command == Command::Write { len } else { 0 };
    Some((Request { command, flags, cookie, offset, len, payload_len }, wire::REQUEST_LEN))
}

#[inline]
fn parse_extended(bytes: &[u8]) -> Option<(Request, usize)> {
    let header: &[u8; wire::EXTENDED_REQUEST_LEN] = bytes.first_chunk()?;
    let (flags, command, cookie, offset) = parse_common(header)?;
    let len = wire::u64_at(header, 24)?;
    let payload_len = if flags.contains(CommandFlags::PAYLOAD_LEN) { len } else { 0 };
    Some((Request { command, flags, cookie, offset, len, payload_len }, wire::EXTENDED_REQUEST_LEN))
}

/// Parses the fields that both layouts have in common.
#[inline]
fn parse_common(header: &[u8]) -> Option<(CommandFlags, Command, u64, u64)> {
    Some((
        CommandFlags::from_bits_retain(wire::u16_at(header, 4)?),
        Command::from_code(wire::u16_at(header, 6)?),
        wire::u64_at(header, 8)?,
        wire::u64_at(header, 16)?,
    ))
}

impl Request {
    /// Creates a request without payload, for a client to encode.
    pub const fn new(command: Command, cookie: u64, offset: u64, len: u64) -> Request {
        Request { command, flags: CommandFlags::empty(), cookie, offset, len, payload_len: 0 }
    }

    /// Creates a write; its `len` bytes of data must follow it.
    pub const fn write(cookie: u64, offset: u64, len: u64) -> Request {
        let flags = CommandFlags::empty();
        Request { command: Command::Write, flags, cookie, offset, len, payload_len: len }
    }

    /// Adds flags to the request.
    #[must_use]
    pub const fn with_flags(self, flags: CommandFlags) -> Request {
        Request { flags: self.flags.union(flags), ..self }
    }

    /// Writes the header to the front of `out` and returns its length. With extended headers, a request with
    /// a payload and any write gets `PAYLOAD_LEN`, as "Request message" demands.
    ///
    /// # Panics
    /// If `out` is shorter than [`header_len`], or `len` does not fit a compact header: a bug of the caller.
    pub fn put(&self, out: &mut [u8], extended: bool) -> usize {
        let has_payload = self.payload_len > 0 || self.command == Command::Write;
        let flags = self.flags.with_if(extended && has_payload, CommandFlags::PAYLOAD_LEN);
        let magic = if extended { wire::EXTENDED_REQUEST_MAGIC } else { wire::REQUEST_MAGIC };
        put(out, 0, &magic.to_be_bytes());
        put(out, 4, &flags.bits().to_be_bytes());
        put(out, 6, &self.command.code().to_be_bytes());
        put(out, 8, &self.cookie.to_be_bytes());
        put(out, 16, &self.offset.to_be_bytes());
        if extended {
            put(out, 24, &self.len.to_be_bytes())
        } else {
            let len = u32::try_from(self.len).expect("a compact request is shorter than 4 GiB");
            put(out, 24, &len.to_be_bytes())
        }
    }
}

#[cfg(test)]
mod tests;
