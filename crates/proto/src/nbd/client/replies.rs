//! Parses replies as a client receives them, in all three styles.
//!
//! The data of a read is left to the caller. Every other chunk is returned whole, borrowed from the caller's
//! bytes; it is at most [`MAX_CHUNK_BYTES`] long.

use super::super::error::{Fatal, NbdError};
use super::super::reply::Style;
use super::super::wire::{self, ReplyFlags, chunk};

/// Longest payload of a chunk without data, which is buffered until it is complete.
pub const MAX_CHUNK_BYTES: u64 = wire::PORTABLE_PAYLOAD as u64;

/// One message from the server.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Reply<'a> {
    /// A simple reply. If it answers a read without error, the data follows.
    Simple {
        /// Cookie of the request.
        cookie: u64,
        /// The error, if the request failed.
        error: Option<NbdError>,
    },
    /// Data of a read; `len` bytes follow.
    Data {
        /// Cookie of the request.
        cookie: u64,
        /// Offset on the export, in bytes.
        offset: u64,
        /// Length in bytes, at least 1.
        len: u64,
        /// This is the last chunk.
        done: bool,
    },
    /// A hole in a read: the range reads as zeroes, and no data follows.
    Hole {
        /// Cookie of the request.
        cookie: u64,
        /// Offset on the export, in bytes.
        offset: u64,
        /// Length in bytes, at least 1.
        len: u32,
        /// This is the last chunk.
        done: bool,
    },
    /// The last chunk, without content.
    End {
        /// Cookie of the request.
        cookie: u64,
    },
    /// The request failed, at least in part.
    Error {
        /// Cookie of the request.
        cookie: u64,
        /// The error.
        error: NbdError,
        /// A human-readable message; not checked to be UTF-8.
        message: &'a [u8],
        /// Offset of the error on the export, if given.
        offset: Option<u64>,
        /// This is the last chunk.
        done: bool,
    },
    /// Block status of a range.
    Status {
        /// Cookie of the request.
        cookie: u64,
        /// Id of the metadata context.
        context: u32,
        /// At least one descriptor, none of length 0.
        descriptors: Descriptors<'a>,
        /// This is the last chunk.
        done: bool,
    },
}

impl Reply<'_> {
    /// Returns the cookie of the request that the message answers.
    pub fn cookie(&self) -> u64 {
        match *self {
            Reply::Simple { cookie, .. }
            | Reply::Data { cookie, .. }
            | Reply::Hole { cookie, .. }
            | Reply::End { cookie }
            | Reply::Error { cookie, .. }
            | Reply::Status { cookie, .. } => cookie,
        }
    }
}

/// Block status of part of a range.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Descriptor {
    /// Length in bytes.
    pub len: u64,
    /// Flags that the metadata context defines.
    pub state: u64,
}

/// Iterates over the descriptors of a chunk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Descriptors<'a> {
    bytes: &'a [u8],
    wide: bool,
}

impl Iterator for Descriptors<'_> {
    type Item = Descriptor;

    fn next(&mut self) -> Option<Descriptor> {
        let (descriptor, taken) = if self.wide {
            let (len, state) = (wire::u64_at(self.bytes, 0)?, wire::u64_at(self.bytes, 8)?);
            (Descriptor { len, state }, 16)
        } else {
            let (len, state) = (wire::u32_at(self.bytes, 0)?, wire::u32_at(self.bytes, 4)?);
            (Descriptor { len: len.into(), state: state.into() }, 8)
        };
        self.bytes = &self.bytes[taken..];
        Some(descriptor)
    }
}

/// Fields of a chunk header.
struct Header {
    kind: u16,
    cookie: u64,
    len: u64,
    done: bool,
}

/// Parses the message at the front of `bytes`: the message and its length, or `None` while it is incomplete.
/// The length does not include the data of a read.
///
/// Returns [`Fatal`] where "Structured reply types" says that the client MUST disconnect: the magic of
/// another style, an unknown chunk type that is not an error, or a length that does not fit the type.
#[inline]
pub fn parse_reply(bytes: &[u8], style: Style) -> Result<Option<(Reply<'_>, usize)>, Fatal> {
    let Some(found) = wire::u32_at(bytes, 0) else { return Ok(None) };
    match (style, found) {
        (Style::Simple | Style::Structured, wire::SIMPLE_REPLY_MAGIC) => Ok(parse_simple(bytes)),
        (Style::Structured, wire::STRUCTURED_REPLY_MAGIC) | (Style::Extended, wire::EXTENDED_REPLY_MAGIC) => {
            parse_chunk(bytes, style)
        }
        _ => {
            let expected = match style {
                Style::Simple => wire::SIMPLE_REPLY_MAGIC,
                Style::Structured => wire::STRUCTURED_REPLY_MAGIC,
                Style::Extended => wire::EXTENDED_REPLY_MAGIC,
            };
            Err(Fatal::BadMagic { found: found.into(), expected: expected.into() })
        }
    }
}

#[inline]
fn parse_simple(bytes: &[u8]) -> Option<(Reply<'static>, usize)> {
    let error = NbdError::from_code(wire::u32_at(bytes, 4)?);
    let cookie = wire::u64_at(bytes, 8)?;
    Some((Reply::Simple { cookie, error }, wire::SIMPLE_REPLY_LEN))
}

fn header(bytes: &[u8], style: Style) -> Option<Header> {
    let flags = ReplyFlags::from_bits_retain(wire::u16_at(bytes, 4)?);
    let kind = wire::u16_at(bytes, 6)?;
    let cookie = wire::u64_at(bytes, 8)?;
    let len =
        if style == Style::Extended { wire::u64_at(bytes, 24)? } else { u64::from(wire::u32_at(bytes, 16)?) };
    // The client MUST ignore unknown flags.
    Some(Header { kind, cookie, len, done: flags.contains(ReplyFlags::DONE) })
}

fn parse_chunk(bytes: &[u8], style: Style) -> Result<Option<(Reply<'_>, usize)>, Fatal> {
    let Some(header) = header(bytes, style) else { return Ok(None) };
    check_length(&header, style)?;
    let Header { kind, cookie, len, done } = header;
    let body = &bytes[style.chunk_header_len()..];
    if kind == chunk::OFFSET_DATA {
        let Some(offset) = wire::u64_at(body, 0) else { return Ok(None) };
        let reply = Reply::Data { cookie, offset, len: len - 8, done };
        return Ok(Some((reply, style.data_header_len())));
    }
    let len = len as usize;
    let Some(body) = body.get(..len) else { return Ok(None) };
    let reply = match kind {
        chunk::NONE => Reply::End { cookie },
        chunk::OFFSET_HOLE => hole(&header, body)?,
        chunk::BLOCK_STATUS | chunk::BLOCK_STATUS_EXT => status(&header, body)?,
        _ => error(&header, body)?,
    };
    Ok(Some((reply, style.chunk_header_len() + len)))
}

/// Checks the length of a chunk against its type, as far as the header alone allows.
fn check_length(header: &Header, style: Style) -> Result<(), Fatal> {
    let &Header { kind, len, done, .. } = header;
    let unexpected = Fatal::UnexpectedChunk { kind };
    let fits = match kind {
        // A NONE chunk MUST be the last one, and empty.
        chunk::NONE if !done => return Err(unexpected),
        chunk::NONE => len == 0,
        chunk::OFFSET_DATA => return if len >= 9 { Ok(()) } else { Err(Fatal::ChunkLength { kind, len }) },
        chunk::OFFSET_HOLE => len == 12,
        chunk::BLOCK_STATUS => len >= 12 && (len - 4).is_multiple_of(8),
        // BLOCK_STATUS_EXT MUST NOT be used without extended headers.
        chunk::BLOCK_STATUS_EXT if style != Style::Extended => return Err(unexpected),
        chunk::BLOCK_STATUS_EXT => len >= 24 && (len - 8).is_multiple_of(16),
        chunk::ERROR_OFFSET => len >= 14,
        _ if kind & chunk::ERR != 0 => len >= 6,
        _ => return Err(unexpected),
    };
    if !fits {
        return Err(Fatal::ChunkLength { kind, len });
    }
    if len > MAX_CHUNK_BYTES {
        return Err(Fatal::PayloadTooLong { len, limit: MAX_CHUNK_BYTES });
    }
    Ok(())
}

fn hole(header: &Header, body: &[u8]) -> Result<Reply<'static>, Fatal> {
    let malformed = Fatal::ChunkLength { kind: header.kind, len: header.len };
    let offset = wire::u64_at(body, 0).ok_or(malformed)?;
    let len = wire::u32_at(body, 8).ok_or(malformed)?;
    if len == 0 {
        return Err(Fatal::ReplyMismatch { why: "a hole has no length" });
    }
    Ok(Reply::Hole { cookie: header.cookie, offset, len, done: header.done })
}

fn status<'a>(header: &Header, body: &'a [u8]) -> Result<Reply<'a>, Fatal> {
    let malformed = Fatal::ChunkLength { kind: header.kind, len: header.len };
    let context = wire::u32_at(body, 0).ok_or(malformed)?;
    let wide = header.kind == chunk::BLOCK_STATUS_EXT;
    let bytes = if wide {
        let bytes = body.get(8..).ok_or(malformed)?;
        // The count may be 0; otherwise it MUST match the length.
        let count = wire::u32_at(body, 4).ok_or(malformed)?;
        if count != 0 && u64::from(count) * 16 != bytes.len() as u64 {
            return Err(malformed);
        }
        bytes
    } else {
        body.get(4..).ok_or(malformed)?
    };
    let mut descriptors = Descriptors { bytes, wide };
    if descriptors.any(|descriptor| descriptor.len == 0) {
        return Err(Fatal::ReplyMismatch { why: "a status descriptor has no length" });
    }
    let descriptors = Descriptors { bytes, wide };
    Ok(Reply::Status { cookie: header.cookie, context, descriptors, done: header.done })
}

/// Parses an error chunk. Unknown error types have the layout of known ones. The message MUST fit into the
/// chunk.
fn error<'a>(header: &Header, body: &'a [u8]) -> Result<Reply<'a>, Fatal> {
    let malformed = Fatal::ChunkLength { kind: header.kind, len: header.len };
    let code = wire::u32_at(body, 0).ok_or(malformed)?;
    let len = usize::from(wire::u16_at(body, 4).ok_or(malformed)?);
    let (message, rest) = body[6..].split_at_checked(len).ok_or(malformed)?;
    let offset = match header.kind {
        chunk::ERROR_OFFSET => Some(wire::u64_at(rest, 0).ok_or(malformed)?),
        _ => None,
    };
    // The code MUST NOT be 0; if it is, the chunk is treated as an error all the same.
    let error = NbdError::from_code(code).unwrap_or(NbdError::Invalid);
    Ok(Reply::Error { cookie: header.cookie, error, message, offset, done: header.done })
}

#[cfg(test)]
mod tests;
