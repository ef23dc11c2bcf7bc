//! Tracks a request in flight and checks that its replies are plausible.
//!
//! It counts bytes and does not remember ranges. Content outside the request, too much content and missing
//! content are detected; two chunks that overlap while as many bytes are missing elsewhere are not.

use super::super::error::{Fatal, NbdError};
use super::super::reply::Style;
use super::super::request::{Command, Request};
use super::super::wire::CommandFlags;
use super::replies::Reply;

/// Effect of a message on the request that it answers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Progress {
    /// More messages follow.
    More,
    /// The request has ended, with its error if it failed. After a successful simple reply to a read, the
    /// data follows.
    Ended(Option<NbdError>),
}

/// State of a request in flight.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Track {
    request: Request,
    style: Style,
    /// Id that the metadata context of a status must have.
    context: Option<u32>,
    /// Bytes of content received so far.
    received: u64,
    /// Chunks of content or status received so far.
    chunks: u32,
    /// First error received.
    error: Option<NbdError>,
}

impl Track {
    /// Tracks `request` in a session of this style; `context` is the session's id of `base:allocation`.
    pub const fn new(request: Request, style: Style, context: Option<u32>) -> Track {
        Track { request, style, context, received: 0, chunks: 0, error: None }
    }

    /// Processes a message that answers the request.
    ///
    /// # Errors
    /// [`Fatal::ReplyMismatch`]: the server violated the protocol; the client MAY disconnect.
    pub fn accept(&mut self, reply: &Reply<'_>) -> Result<Progress, Fatal> {
        let mismatch = |why| Err(Fatal::ReplyMismatch { why });
        let done = match *reply {
            Reply::Simple { error, .. } => {
                // "Simple reply message": reads and status queries MUST be answered with chunks once
                // structured replies were negotiated.
                let chunked = matches!(self.request.command, Command::Read | Command::BlockStatus);
                if chunked && self.style != Style::Simple {
                    return mismatch("a simple reply where structured replies were negotiated");
                }
                return Ok(Progress::Ended(error));
            }
            Reply::Data { offset, len, done, .. } => {
                self.content(offset, len)?;
                done
            }
            Reply::Hole { offset, len, done, .. } => {
                self.content(offset, len.into())?;
                done
            }
            Reply::Status { context, descriptors, done, .. } => {
                if self.request.command != Command::BlockStatus || Some(context) != self.context {
                    return mismatch("a status that was not asked for");
                }
                if self.chunks > 0 {
                    return mismatch("a second status for the same context");
                }
                let one = self.request.flags.contains(CommandFlags::REQ_ONE);
                if one && descriptors.count() != 1 {
                    return mismatch("more than one descriptor where one was asked for");
                }
                self.chunks += 1;
                done
            }
            Reply::Error { error, offset, done, .. } => {
                if let Some(offset) = offset {
                    self.check_range(offset, 1)?;
                }
                self.error.get_or_insert(error);
                done
            }
            Reply::End { .. } => true,
        };
        if !done {
            return Ok(Progress::More);
        }
        if self.error.is_none() {
            self.check_whole()?;
        }
        Ok(Progress::Ended(self.error))
    }

    /// Counts content. "`NBD_REPLY_TYPE_OFFSET_DATA`": it MUST lie within the request, and only reads have
    /// content.
    fn content(&mut self, offset: u64, len: u64) -> Result<(), Fatal> {
        if self.request.command != Command::Read {
            return Err(Fatal::ReplyMismatch { why: "data for what is not a read" });
        }
        self.check_range(offset, len)?;
        self.received = self.received.saturating_add(len);
        self.chunks += 1;
        if self.received > self.request.len {
            return Err(Fatal::ReplyMismatch { why: "more data than was asked for" });
        }
        // "`NBD_CMD_READ`": with DF there MUST be at most one chunk of content.
        if self.chunks > 1 && self.request.flags.contains(CommandFlags::DF) {
            return Err(Fatal::ReplyMismatch { why: "fragments where none were allowed" });
        }
        Ok(())
    }

    fn check_range(&self, offset: u64, len: u64) -> Result<(), Fatal> {
        let end = self.request.offset.saturating_add(self.request.len);
        match offset.checked_add(len) {
            Some(last) if offset >= self.request.offset && last <= end => Ok(()),
            _ => Err(Fatal::ReplyMismatch { why: "a chunk lies outside its request" }),
        }
    }

    /// Checks that a successful reply answered the whole request, as it MUST.
    fn check_whole(&self) -> Result<(), Fatal> {
        match self.request.command {
            Command::Read if self.received != self.request.len => {
                Err(Fatal::ReplyMismatch { why: "success, but not all of the data" })
            }
            Command::BlockStatus if self.chunks == 0 => {
                Err(Fatal::ReplyMismatch { why: "success, but no status" })
            }
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests;
