//! A request, and the memory that it names.
//!
//! A request never owns memory. It names **segments** of **regions** that its thread's ring has
//! registered: what a segment means in bytes only the ring knows. So a request is plain data, a
//! layer splits it by arithmetic, and the same region can be handed to the kernel by number.

use crate::{Bytes, Flags, Op};

/// Index of a request slot in its hardware queue: the queue's only name for a request.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Tag(pub u16);

impl Tag {
    /// As an array index.
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

/// What the kernel, a socket or a timer carries for us while a request is held. The generation is
/// stepped at each hand-over, so an answer that comes late or twice shows.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Cookie {
    /// The request's slot.
    pub tag: Tag,
    /// Which hand-over of that slot this is.
    pub generation: u32,
}

/// A stretch of memory that a ring has registered. Numbers are the ring's own.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Region(pub u16);

/// A piece of a region.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Segment {
    /// Where it starts in its region, in bytes.
    pub offset: u64,
    /// How long it is, in bytes.
    pub len: u32,
    /// The region.
    pub region: Region,
}

impl Segment {
    /// No memory: what a request without data names.
    pub const EMPTY: Segment = Segment { offset: 0, len: 0, region: Region(0) };

    /// The part that starts `skip` bytes in and is `len` long. Both must lie within it.
    #[must_use]
    pub fn slice(self, skip: u32, len: u32) -> Segment {
        debug_assert!(u64::from(skip) + u64::from(len) <= u64::from(self.len));
        Segment { offset: self.offset + u64::from(skip), len, region: self.region }
    }
}

/// The memory of a request: one segment in place, or a run of the queue's segment table.
///
/// A run is viewed through `skip`: its first `skip` bytes are left out, and it is as long as the
/// request says. So halves of one request share one run.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Data {
    /// All of it lies in one piece. Its length is the request's for data-moving operations.
    One(Segment),
    /// `count` entries from `start` of the queue's segment table, less the first `skip` bytes.
    Run {
        /// Index of the first entry.
        start: u32,
        /// How many entries may be looked at.
        count: u16,
        /// Bytes to pass over at the beginning of the first entry; less than that entry's length.
        skip: u32,
    },
}

impl Data {
    /// No memory.
    pub const NONE: Data = Data::One(Segment::EMPTY);
}

/// What is asked of a node. Plain data: a node that changes it on the way down restores it before
/// it answers `Up`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Request {
    /// Where it starts on the device below.
    pub offset: Bytes,
    /// How much of the device it covers. 0 only for flush and for changes of a zone's condition.
    pub len: Bytes,
    /// The memory.
    pub data: Data,
    /// What to do.
    pub op: Op,
    /// How to do it.
    pub flags: Flags,
}

impl Request {
    /// A request without data, for operations that need none.
    pub const fn new(op: Op, offset: Bytes, len: Bytes) -> Request {
        Request { offset, len, data: Data::NONE, op, flags: Flags::NONE }
    }

    /// A flush.
    pub const fn flush() -> Request {
        Request::new(Op::Flush, Bytes::ZERO, Bytes::ZERO)
    }

    /// The first byte past it. The front-end has checked that this does not overflow.
    pub const fn end(&self) -> Bytes {
        Bytes(self.offset.0 + self.len.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_fits_a_cache_line() {
        assert!(size_of::<Request>() <= 48, "{}", size_of::<Request>());
        assert_eq!(size_of::<Segment>(), 16);
    }

    #[test]
    fn a_slice_of_a_segment_stays_in_its_region() {
        let whole = Segment { offset: 4096, len: 8192, region: Region(3) };
        assert_eq!(whole.slice(512, 1024), Segment { offset: 4608, len: 1024, region: Region(3) });
    }
}
