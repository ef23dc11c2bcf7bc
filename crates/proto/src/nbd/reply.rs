//! Encodes replies of a server in the negotiated style.
//!
//! An encoder writes to the caller's memory and returns the number of bytes written. No encoder allocates.
//! The data of a read follows its header on the wire and is left to the caller.
//!
//! *Panics:* if the caller's memory is too short, which is a bug. [`MAX_FIXED`] bytes hold everything except
//! messages and descriptors.

use super::error::NbdError;
use super::request::{Command, Request};
use super::wire::{self, ReplyFlags, chunk, put};

/// Style of replies ("Transmission").
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Style {
    /// A header of 16 bytes and, for a read, its data.
    Simple,
    /// Chunks with headers of 20 bytes; simple replies where there is no payload.
    Structured,
    /// Chunks with headers of 32 bytes, and request headers of the same size; no simple replies.
    Extended,
}

/// Longest header of fixed length: an extended chunk's with its offset, error or hole.
pub const MAX_FIXED: usize = wire::EXTENDED_CHUNK_LEN + 14;

/// Encodes the header of a simple reply.
#[inline]
pub fn simple(cookie: u64, error: Option<NbdError>) -> [u8; wire::SIMPLE_REPLY_LEN] {
    let mut out = [0; wire::SIMPLE_REPLY_LEN];
    put(&mut out, 0, &wire::SIMPLE_REPLY_MAGIC.to_be_bytes());
    put(&mut out, 4, &error.map_or(0, NbdError::code).to_be_bytes());
    put(&mut out, 8, &cookie.to_be_bytes());
    out
}

impl Style {
    /// Returns the bytes of a chunk header. Not meaningful for [`Style::Simple`], whose replies have no
    /// chunks.
    pub const fn chunk_header_len(self) -> usize {
        match self {
            Style::Simple => wire::SIMPLE_REPLY_LEN,
            Style::Structured => wire::CHUNK_LEN,
            Style::Extended => wire::EXTENDED_CHUNK_LEN,
        }
    }

    /// Returns the bytes before the data of a read: the header, and the offset if the style has one.
    pub const fn data_header_len(self) -> usize {
        match self {
            Style::Simple => wire::SIMPLE_REPLY_LEN,
            Style::Structured => wire::CHUNK_LEN + 8,
            Style::Extended => wire::EXTENDED_CHUNK_LEN + 8,
        }
    }

    /// Writes the header of a chunk with `len` bytes of payload. "Extended reply": the header's offset is
    /// the request's, whatever the chunk contains.
    #[inline]
    pub(super) fn put_chunk_header(
        self,
        out: &mut [u8],
        to: &Request,
        done: bool,
        kind: u16,
        len: u64,
    ) -> usize {
        debug_assert!(self != Style::Simple, "a simple reply has no chunks");
        let extended = self == Style::Extended;
        let magic = if extended { wire::EXTENDED_REPLY_MAGIC } else { wire::STRUCTURED_REPLY_MAGIC };
        put(out, 0, &magic.to_be_bytes());
        put(out, 4, &ReplyFlags::empty().with_if(done, ReplyFlags::DONE).bits().to_be_bytes());
        put(out, 6, &kind.to_be_bytes());
        put(out, 8, &to.cookie.to_be_bytes());
        if extended {
            put(out, 16, &to.offset.to_be_bytes());
            put(out, 24, &len.to_be_bytes())
        } else {
            debug_assert!(len <= u64::from(u32::MAX));
            put(out, 16, &(len as u32).to_be_bytes())
        }
    }

    /// Writes the header before `len` bytes of data read from `offset`. `done` marks the last chunk, which is
    /// only allowed once the data is available ("`NBD_CMD_READ`": MUST NOT be set while an error is still
    /// possible). A simple reply must cover the whole read.
    #[inline]
    pub fn put_data_header(self, out: &mut [u8], to: &Request, offset: u64, len: u32, done: bool) -> usize {
        if self == Style::Simple {
            debug_assert!(done && offset == to.offset && u64::from(len) == to.len);
            return put(out, 0, &simple(to.cookie, None));
        }
        let at = self.put_chunk_header(out, to, done, chunk::OFFSET_DATA, 8 + u64::from(len));
        put(out, at, &offset.to_be_bytes())
    }

    /// Writes a hole: a range of a read that is all zeroes, which are not sent. Not permitted in the simple
    /// style, nor for part of a read with `DF`.
    pub fn put_hole(self, out: &mut [u8], to: &Request, offset: u64, len: u32, done: bool) -> usize {
        let at = self.put_chunk_header(out, to, done, chunk::OFFSET_HOLE, 12);
        let at = put(out, at, &offset.to_be_bytes());
        put(out, at, &len.to_be_bytes())
    }

    /// Writes the complete reply to a request without data to send: one that is neither a read nor a block
    /// status query, or one that failed.
    ///
    /// "Simple reply message": with structured replies the reply MAY be simple unless it answers a read,
    /// which saves four bytes; block status queries are always answered in chunks. With extended headers it
    /// MUST NOT be simple.
    #[inline]
    pub fn put_end(self, out: &mut [u8], to: &Request, error: Option<NbdError>) -> usize {
        let chunked = match self {
            Style::Simple => false,
            Style::Structured => matches!(to.command, Command::Read | Command::BlockStatus),
            Style::Extended => true,
        };
        match (chunked, error) {
            (false, _) => put(out, 0, &simple(to.cookie, error)),
            (true, None) => self.put_chunk_header(out, to, true, chunk::NONE, 0),
            (true, Some(error)) => self.put_error(out, to, error, "", None, true),
        }
    }

    /// Writes an error chunk with a human-readable message, and the offset of the error if known. The
    /// message is truncated to [`wire::MAX_STRING`] bytes and to the space in `out`. A simple reply
    /// contains the error number only.
    pub fn put_error(
        self,
        out: &mut [u8],
        to: &Request,
        error: NbdError,
        message: &str,
        offset: Option<u64>,
        done: bool,
    ) -> usize {
        if self == Style::Simple {
            return put(out, 0, &simple(to.cookie, Some(error)));
        }
        let fixed = 6 + if offset.is_some() { 8 } else { 0 };
        let room = out.len().saturating_sub(self.chunk_header_len() + fixed).min(wire::MAX_STRING);
        let message = cut(message, room);
        let kind = if offset.is_some() { chunk::ERROR_OFFSET } else { chunk::ERROR };
        let at = self.put_chunk_header(out, to, done, kind, (fixed + message.len()) as u64);
        let at = put(out, at, &error.code().to_be_bytes());
        let at = put(out, at, &(message.len() as u16).to_be_bytes());
        let at = put(out, at, message.as_bytes());
        match offset {
            Some(offset) => put(out, at, &offset.to_be_bytes()),
            None => at,
        }
    }
}

/// Truncates `message` to whole characters of at most `room` bytes.
fn cut(message: &str, room: usize) -> &str {
    let mut end = message.len().min(room);
    while !message.is_char_boundary(end) {
        end -= 1;
    }
    &message[..end]
}

#[cfg(test)]
mod tests;
