//! A request, and the memory that it refers to.
//!
//! A request never owns memory. It refers to **segments** of **regions** that its thread's ring has
//! registered; only the ring can turn a segment into bytes. So a request is plain data, a layer splits it by
//! arithmetic, and a region can be passed to the kernel by number.

use crate::{Bytes, Flags, Op};

/// Index of a request slot in its hardware queue: the queue's only name for a request.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Tag(pub u16);

impl Tag {
    /// The tag as an array index.
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

/// Identifies a held request to the kernel, a socket or a timer. The generation increases each time the slot
/// is handed over, so a completion that comes late or twice is detected.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Cookie {
    /// The request's slot.
    pub tag: Tag,
    /// Generation of the slot at the hand-over.
    pub generation: u32,
}

/// A memory area registered with a ring, by the ring's own number.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Region(pub u16);

/// Part of a region.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Segment {
    /// Offset in the region, in bytes.
    pub offset: u64,
    /// Length in bytes.
    pub len: u32,
    /// The region.
    pub region: Region,
}

impl Segment {
    /// No memory: the segment of a request without data.
    pub const EMPTY: Segment = Segment { offset: 0, len: 0, region: Region(0) };

    /// The part of `len` bytes that starts `skip` bytes into the segment. It must lie within the segment.
    #[must_use]
    pub fn slice(self, skip: u32, len: u32) -> Segment {
        debug_assert!(u64::from(skip) + u64::from(len) <= u64::from(self.len));
        Segment { offset: self.offset + u64::from(skip), len, region: self.region }
    }

    /// The first `len` bytes and the rest. The segment must have as many.
    #[must_use]
    #[inline]
    pub fn split_at(self, len: u32) -> (Segment, Segment) {
        debug_assert!(len <= self.len);
        let back = Segment { offset: self.offset + u64::from(len), len: self.len - len, region: self.region };
        (Segment { len, ..self }, back)
    }
}

/// The memory of a request: a single segment, or a run of entries in the queue's segment table.
///
/// The first `skip` bytes of a run are left out, and it is as long as the request. So requests split from one
/// request share its run.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Data {
    /// A single segment. Its length is the request's for operations that move data.
    One(Segment),
    /// `count` entries from `start` of the queue's segment table, less the first `skip` bytes.
    Run {
        /// Index of the first entry.
        start: u32,
        /// Number of entries that may be read.
        count: u16,
        /// Bytes to skip at the start of the first entry; less than that entry's length.
        skip: u32,
    },
}

impl Data {
    /// No memory.
    pub const NONE: Data = Data::One(Segment::EMPTY);
}

/// A request to a node. Plain data: a node that changes it on the way down restores it before it answers
/// `Up`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Request {
    /// Offset on the device below, in bytes.
    pub offset: Bytes,
    /// Length in bytes. 0 only for flushes and operations that change a zone's condition.
    pub len: Bytes,
    /// Memory of the data.
    pub data: Data,
    /// Operation.
    pub op: Op,
    /// Modifiers of the operation.
    pub flags: Flags,
}

impl Request {
    /// Creates a request without data.
    pub const fn new(op: Op, offset: Bytes, len: Bytes) -> Request {
        Request { offset, len, data: Data::NONE, op, flags: Flags::empty() }
    }

    /// Creates a flush.
    pub const fn flush() -> Request {
        Request::new(Op::Flush, Bytes::ZERO, Bytes::ZERO)
    }

    /// First byte past the range. The front-end has checked that this does not overflow.
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
