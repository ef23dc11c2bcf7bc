//! A request's memory, piece by piece, for nodes that look at it; and the records of `Extents`.
//!
//! *Invariant:* nothing here allocates: a piece is found anew from the request's data each time.

use block::{Data, Extent, Segment};
use queue::{Cx, Ring};

/// Call `each` for every piece of the first `len` bytes of `data`, with how many bytes came before it.
#[inline]
pub(crate) fn each_piece<R: Ring>(
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
        let Some(piece) = cx.segments(rest, len - done).next() else { return };
        each(cx.ring, piece, done);
        done += u64::from(piece.len);
        rest = cx.advance(rest, u64::from(piece.len));
    }
}

/// Fill `len` bytes from `skip` of `data` with zeroes.
pub(crate) fn fill_zeroes<R: Ring>(cx: &mut Cx<'_, R>, data: Data, skip: u64, len: u64) {
    if len > 0 {
        let data = cx.advance(data, skip);
        each_piece(cx, data, len, |ring, piece, _| ring.bytes_mut(piece).fill(0));
    }
}

/// Bytes of memory that `data` names, whatever the request's length.
pub(crate) fn capacity<R: Ring>(cx: &Cx<'_, R>, data: Data) -> u64 {
    cx.segments(data, u64::MAX).map(|piece| u64::from(piece.len)).sum()
}

/// Write `bytes` into `data` from `at` on. There must be room.
pub(crate) fn store<R: Ring>(cx: &mut Cx<'_, R>, data: Data, at: u64, bytes: &[u8]) {
    let data = cx.advance(data, at);
    each_piece(cx, data, bytes.len() as u64, |ring, piece, done| {
        let done = done as usize;
        ring.bytes_mut(piece).copy_from_slice(&bytes[done..done + piece.len as usize]);
    });
}

/// The records of an `Extents` request as they are found: neighbours that are alike become one, what
/// does not fit is left out, and what is left of the memory is zeroed, which ends the list.
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

    /// Add a stretch. `false`: it did not fit, the list is full.
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
                // A record is held back until its successor differs, so one slot must be left for it.
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

    /// Write what was held back and end the list.
    pub(crate) fn finish<R: Ring>(mut self, cx: &mut Cx<'_, R>) {
        self.write_last(cx);
        fill_zeroes(cx, self.data, self.at, self.room - self.at);
    }
}

/// Answer `Extents` with one stretch.
pub(crate) fn one_extent<R: Ring>(cx: &mut Cx<'_, R>, data: Data, extent: Extent) {
    let mut records = Records::new(cx, data);
    records.push(cx, extent);
    records.finish(cx);
}
