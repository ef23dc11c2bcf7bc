//! Access to a request's memory by segments, and the records of `Extents`.
//!
//! *Invariant:* nothing here allocates: a segment is looked up in the request's data each time.

use block::{Data, Extent, Segment};
use queue::{Cx, Ring};

/// Calls `each` for every segment of the first `len` bytes of `data`, with the number of bytes before it.
#[inline]
pub(crate) fn each_segment<R: Ring>(
    cx: &mut Cx<'_, R>,
    data: Data,
    len: u64,
    mut each: impl FnMut(&mut R, Segment, u64),
) {
    if let Data::One(segment) = data {
        debug_assert!(len <= u64::from(segment.len));
        return each(cx.ring, Segment { len: len as u32, ..segment }, 0);
    }
    let (mut rest, mut done) = (data, 0);
    while done < len {
        let Some(segment) = cx.segments(rest, len - done).next() else { return };
        each(cx.ring, segment, done);
        done += u64::from(segment.len);
        rest = cx.advance(rest, u64::from(segment.len));
    }
}

/// Fills `len` bytes of `data` from `skip` with zeroes. Returns `false` if part of it is memory that only
/// the kernel can access.
pub(crate) fn fill_zeroes<R: Ring>(cx: &mut Cx<'_, R>, data: Data, skip: u64, len: u64) -> bool {
    let mut all = true;
    if len > 0 {
        let data = cx.advance(data, skip);
        each_segment(cx, data, len, |ring, segment, _| all &= ring.clear(segment));
    }
    all
}

/// Returns whether part of the first `len` bytes of `data` is memory whose bytes cannot be accessed.
pub(crate) fn is_opaque<R: Ring>(cx: &Cx<'_, R>, data: Data, len: u64) -> bool {
    match data {
        Data::One(segment) => cx.ring.is_opaque(segment),
        Data::Run { .. } => cx.segments(data, len).any(|segment| cx.ring.is_opaque(segment)),
    }
}

/// Returns the number of bytes of memory that `data` refers to, regardless of the request's length.
pub(crate) fn capacity<R: Ring>(cx: &Cx<'_, R>, data: Data) -> u64 {
    cx.segments(data, u64::MAX).map(|segment| u64::from(segment.len)).sum()
}

/// Writes `bytes` into `data` at `at`. There must be space for them.
pub(crate) fn store<R: Ring>(cx: &mut Cx<'_, R>, data: Data, at: u64, bytes: &[u8]) {
    let data = cx.advance(data, at);
    each_segment(cx, data, bytes.len() as u64, |ring, segment, done| {
        let done = done as usize;
        ring.bytes_mut(segment).copy_from_slice(&bytes[done..done + segment.len as usize]);
    });
}

/// Writer of the records of an `Extents` request. Adjacent ranges of the same kind are merged, records that
/// do not fit are omitted, and the rest of the memory is zeroed, which ends the list.
pub(crate) struct Records {
    data: Data,
    room: u64,
    at: u64,
    last: Option<Extent>,
}

impl Records {
    pub(crate) fn new<R: Ring>(cx: &Cx<'_, R>, data: Data) -> Records {
        Records { data, room: capacity(cx, data), at: 0, last: None }
    }

    /// Adds a range. Returns `false` if it did not fit, so that the list is full.
    pub(crate) fn push<R: Ring>(&mut self, cx: &mut Cx<'_, R>, extent: Extent) -> bool {
        if extent.len.0 == 0 {
            return true;
        }
        match &mut self.last {
            Some(last) if last.hole == extent.hole && last.zero == extent.zero => {
                last.len = last.len + extent.len;
                true
            }
            _ => {
                // The last record may still grow, so space for it stays reserved.
                let pending = u64::from(self.last.is_some());
                if self.room.saturating_sub(self.at) < (pending + 1) * Extent::RECORD_LEN as u64 {
                    return false;
                }
                self.write_last(cx);
                self.last = Some(extent);
                true
            }
        }
    }

    fn write_last<R: Ring>(&mut self, cx: &mut Cx<'_, R>) {
        if let Some(last) = self.last.take() {
            store(cx, self.data, self.at, &last.to_record());
            self.at += Extent::RECORD_LEN as u64;
        }
    }

    /// Writes the last record and ends the list.
    pub(crate) fn finish<R: Ring>(mut self, cx: &mut Cx<'_, R>) {
        self.write_last(cx);
        fill_zeroes(cx, self.data, self.at, self.room - self.at);
    }
}

/// Answers `Extents` with one range.
pub(crate) fn one_extent<R: Ring>(cx: &mut Cx<'_, R>, data: Data, extent: Extent) {
    let mut records = Records::new(cx, data);
    records.push(cx, extent);
    records.finish(cx);
}
