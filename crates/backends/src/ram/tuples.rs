//! The integrity data of a RAM disk: a smaller one beside it, with a tuple for every interval.
//!
//! Data that is written without tuples loses those that it had: it reads with tuples of ones, which tell whoever
//! checks that there is nothing to be checked, or of zeroes where nobody checks. So the two never disagree, however
//! the data was written; only a reader beside a writer of the same blocks may find the data of one with the tuples of
//! another.
//!
//! *Invariant:* what is kept is the tuples' complement where ones mean "not checked", so that what was never written,
//! and takes no memory, reads as that.

use super::{Ram, RamSpec};
use crate::pieces::each_piece;
use block::{Bytes, Integrity, Op, Request, Status};
use queue::{Cx, Ring};
use std::sync::Arc;

/// How much is turned into its complement at a time.
const STEP: usize = 512;

/// The tuples of a RAM disk.
#[derive(Debug)]
pub(super) struct Tuples {
    shape: Integrity,
    kept: Arc<Ram>,
}

impl Tuples {
    /// For a disk of that size, whose sectors are whole intervals; all of them unwritten.
    pub(super) fn new(shape: Integrity, size: Bytes) -> Result<Tuples, super::RamError> {
        let len = Bytes(shape.len_for(size).next_multiple_of(512));
        Ok(Tuples { shape, kept: Ram::new(&RamSpec { size: len, huge: false, integrity: None })? })
    }

    pub(super) fn shape(&self) -> Integrity {
        self.shape
    }

    /// Memory that they take now.
    pub(super) fn allocated(&self) -> Bytes {
        self.kept.allocated()
    }

    /// The data of a range is written without them.
    #[inline(never)]
    pub(super) fn forget(&self, at: u64, len: u64) {
        // Of data that ends within an interval none is left, as what stood there guarded the whole.
        let interval = self.shape.interval.0;
        let (first, end) = (at / interval, (at + len).div_ceil(interval));
        let tuple = u64::from(self.shape.tuple);
        self.kept.clear(first * tuple, (end - first) * tuple, false);
    }

    /// A request for them, or with them.
    #[inline(never)]
    pub(super) fn carry<R: Ring>(&self, req: &Request, cx: &mut Cx<'_, R>) -> Status {
        let interval = self.shape.interval.0;
        if !req.offset.is_aligned(interval) || !req.len.is_aligned(interval) {
            return Status::Invalid;
        }
        let (at, len) = (self.shape.len_for(req.offset), self.shape.len_for(req.len));
        if crate::pieces::capacity(cx, req.data) < len {
            return Status::Invalid;
        }
        each_piece(cx, req.data, len, |ring, piece, done| match req.op {
            Op::ReadTuples => self.read(at + done, ring.bytes_mut(piece)),
            _ => self.write(at + done, ring.bytes(piece)),
        });
        Status::Ok
    }

    fn read(&self, at: u64, into: &mut [u8]) {
        self.kept.read(at, into);
        if self.shape.has_escape() {
            into.iter_mut().for_each(|byte| *byte = !*byte);
        }
    }

    fn write(&self, at: u64, from: &[u8]) {
        if !self.shape.has_escape() {
            return self.kept.write(at, from);
        }
        let mut turned = [0; STEP];
        for (index, step) in from.chunks(STEP).enumerate() {
            let turned = &mut turned[..step.len()];
            turned.iter_mut().zip(step).for_each(|(to, from)| *to = !from);
            self.kept.write(at + (index * STEP) as u64, turned);
        }
    }
}
