//! Block status: converts the extents of a backend to the descriptors of one chunk.
//!
//! Rules of "`NBD_REPLY_TYPE_BLOCK_STATUS`" and "`NBD_CMD_BLOCK_STATUS`": adjacent descriptors differ where
//! feasible; with `REQ_ONE` there is exactly one descriptor and it ends within the range; without it only
//! the last may extend past the range; every length is a multiple of the minimum block size. A block with
//! mixed states gets the flags that hold for all of it; 0 is always correct.

use block::Extent;

use super::export::Session;
use super::reply::Style;
use super::request::Request;
use super::wire::{self, CommandFlags, chunk, put};

/// Longest 32-bit descriptor: a multiple of every possible minimum block size.
const COMPACT_MAX: u64 = 0xffff_0000;

/// A block status query. `len` is at least 1 and within the export.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct StatusQuery {
    /// Id of the metadata context.
    pub context: u32,
    /// Start of the range, in bytes.
    pub offset: u64,
    /// Length of the range, in bytes.
    pub len: u64,
    /// Return a single descriptor that does not extend past the range (`REQ_ONE`).
    pub one: bool,
}

impl StatusQuery {
    /// Creates the query of `request` for `len` bytes.
    pub fn new(context: u32, request: &Request, len: u64) -> StatusQuery {
        StatusQuery {
            context,
            offset: request.offset,
            len,
            one: request.flags.contains(CommandFlags::REQ_ONE),
        }
    }
}

/// State of an extent in `base:allocation`.
pub fn allocation_state(extent: &Extent) -> u32 {
    let hole = if extent.hole { wire::STATE_HOLE } else { 0 };
    let zero = if extent.zero { wire::STATE_ZERO } else { 0 };
    hole | zero
}

/// Returns the length in bytes of a reply with this many descriptors.
pub const fn reply_len(style: Style, descriptors: usize) -> usize {
    let (fixed, each) = layout(style);
    style.chunk_header_len() + fixed + each * descriptors
}

/// Returns the payload bytes before the descriptors, and the bytes per descriptor. With extended headers
/// the server always uses the 64-bit chunk.
const fn layout(style: Style) -> (usize, usize) {
    if matches!(style, Style::Extended) { (8, 16) } else { (4, 8) }
}

/// Writes the complete reply to `query` to the front of `out`: a single chunk with as many of `extents` as
/// the rules and `out` allow. `extents` are contiguous, start at `query.offset`, and may end before or
/// after the range.
///
/// Returns `None` if there is no extent: a status MUST have a descriptor, so the request must then fail.
///
/// # Panics
/// If `out` is shorter than [`reply_len`] of one descriptor: a bug of the caller.
pub fn put_block_status(
    out: &mut [u8],
    session: &Session,
    to: &Request,
    query: &StatusQuery,
    extents: impl IntoIterator<Item = Extent>,
) -> Option<usize> {
    let style = session.style;
    let (fixed, each) = layout(style);
    let descriptors_at = style.chunk_header_len() + fixed;
    assert!(out.len() >= descriptors_at + each, "no room for one descriptor");
    let mut list = Descriptors {
        out: &mut out[descriptors_at..],
        wide: style == Style::Extended,
        longest: if style == Style::Extended { u64::MAX } else { COMPACT_MAX },
        count: 0,
        covered: 0,
        last: None,
        wanted: query.len,
        // The status may extend past the range but not past the export, and with REQ_ONE not past the range
        // either.
        limit: if query.one { query.len } else { session.size.saturating_sub(query.offset).max(query.len) },
        max_count: if query.one { 1 } else { usize::MAX },
    };
    let unit = u64::from(session.block_sizes.minimum.max(1));
    collect(&mut list, unit, extents);
    let (count, bytes) = list.finish()?;

    let len = (fixed + bytes) as u64;
    let kind = if style == Style::Extended { chunk::BLOCK_STATUS_EXT } else { chunk::BLOCK_STATUS };
    let at = style.put_chunk_header(out, to, true, kind, len);
    let at = put(out, at, &query.context.to_be_bytes());
    if style == Style::Extended {
        put(out, at, &count.to_be_bytes());
    }
    Some(descriptors_at + bytes)
}

/// Adds `extents` to the list in whole blocks of `unit` bytes.
fn collect(list: &mut Descriptors<'_>, unit: u64, extents: impl IntoIterator<Item = Extent>) {
    // Bytes of the current block covered so far, and the flags that hold for all of them.
    let (mut partial, mut common) = (0, 0);
    for extent in extents {
        let state = allocation_state(&extent);
        let mut left = extent.len.0;
        if partial > 0 {
            let taken = left.min(unit - partial);
            (partial, common, left) = (partial + taken, common & state, left - taken);
            if partial < unit {
                continue;
            }
            if !list.push(unit, common) {
                return;
            }
        }
        (partial, common) = (left % unit, state);
        if left > partial && !list.push(left - partial, state) {
            return;
        }
    }
    if partial > 0 && list.is_empty() {
        // The rest of the only block is unknown: 0 is correct for any state.
        list.push(unit, 0);
    }
}

/// The descriptors of a reply. The last one is held back because it may still grow.
struct Descriptors<'a> {
    out: &'a mut [u8],
    wide: bool,
    /// Longest permitted length of a descriptor, in bytes.
    longest: u64,
    /// Descriptors written to `out`.
    count: u32,
    /// Bytes covered so far, including `last`.
    covered: u64,
    /// Length and state of the descriptor held back; `None` before the first.
    last: Option<(u64, u32)>,
    /// Bytes of the query: once they are covered, no descriptor may follow.
    wanted: u64,
    /// Maximum number of bytes that may be covered.
    limit: u64,
    max_count: usize,
}

impl Descriptors<'_> {
    const fn is_empty(&self) -> bool {
        self.last.is_none()
    }

    fn room(&self) -> bool {
        let each = if self.wide { 16 } else { 8 };
        let taken = self.count as usize + 1;
        taken < self.max_count && self.out.len() >= (taken + 1) * each
    }

    /// Adds an extent; returns `false` once no more are wanted.
    fn push(&mut self, len: u64, state: u32) -> bool {
        let mut left = len.min(self.limit - self.covered);
        while left > 0 {
            match &mut self.last {
                Some((last, same)) if *same == state && *last < self.longest => {
                    let grown = left.min(self.longest - *last);
                    *last += grown;
                    self.covered += grown;
                    left -= grown;
                }
                Some(_) => {
                    if self.covered >= self.wanted || !self.room() {
                        return false;
                    }
                    self.write_last();
                }
                None => {
                    let first = left.min(self.longest);
                    self.last = Some((first, state));
                    self.covered += first;
                    left -= first;
                }
            }
        }
        self.covered < self.limit
    }

    fn write_last(&mut self) {
        let Some((len, state)) = self.last.take() else { return };
        let at = self.count as usize * if self.wide { 16 } else { 8 };
        if self.wide {
            let at = put(self.out, at, &len.to_be_bytes());
            put(self.out, at, &u64::from(state).to_be_bytes());
        } else {
            let at = put(self.out, at, &(len as u32).to_be_bytes());
            put(self.out, at, &state.to_be_bytes());
        }
        self.count += 1;
    }

    /// Returns the number of descriptors and their length in bytes, or `None` if there are none.
    fn finish(mut self) -> Option<(u32, usize)> {
        self.write_last();
        let each = if self.wide { 16 } else { 8 };
        (self.count > 0).then_some((self.count, self.count as usize * each))
    }
}

#[cfg(test)]
mod tests;
