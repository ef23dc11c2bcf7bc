//! Integrity data of a RAM disk: a second, smaller disk with a tuple for every interval.
//!
//! Data that is written without tuples loses its old tuples: it reads with tuples of ones, which mean "not
//! checked" to checkers, or of zeroes if nothing checks. So data and tuples never contradict each other;
//! only a reader concurrent with a writer of the same blocks may see the data of one state with the tuples
//! of the other.
//!
//! *Invariant:* if ones mean "not checked", the complement of tuples is stored, so that intervals that were
//! never written, and take no memory, read as ones.

use super::{Ram, RamSpec};
use crate::segments::each_segment;
use block::{Bytes, Integrity, Op, Request, Status};
use queue::{Cx, Ring};
use std::sync::Arc;

/// Number of bytes that are complemented at a time.
const STEP: usize = 512;

/// The tuples of a RAM disk.
#[derive(Debug)]
pub(super) struct Tuples {
    shape: Integrity,
    kept: Arc<Ram>,
}

impl Tuples {
    /// Creates the tuples of a disk of this size, all unwritten. Its sectors are whole intervals.
    pub(super) fn new(shape: Integrity, size: Bytes) -> Result<Tuples, super::RamError> {
        let len = Bytes(shape.len_for(size).next_multiple_of(512));
        Ok(Tuples { shape, kept: Ram::new(&RamSpec { size: len, hugepages: false, integrity: None })? })
    }

    pub(super) fn shape(&self) -> Integrity {
        self.shape
    }

    /// Returns the memory in use, in bytes.
    pub(super) fn allocated(&self) -> Bytes {
        self.kept.allocated()
    }

    /// Marks a range as written without tuples.
    #[inline(never)]
    pub(super) fn forget(&self, at: u64, len: u64) {
        // If the range ends within an interval, the tuple of that interval is invalid too.
        let interval = self.shape.interval.0;
        let (first, end) = (at / interval, (at + len).div_ceil(interval));
        let tuple = u64::from(self.shape.tuple);
        self.kept.clear(first * tuple, (end - first) * tuple, false);
    }

    /// Executes a request that reads or writes tuples.
    #[inline(never)]
    pub(super) fn carry<R: Ring>(&self, req: &Request, cx: &mut Cx<'_, R>) -> Status {
        let interval = self.shape.interval.0;
        if !req.offset.is_aligned(interval) || !req.len.is_aligned(interval) {
            return Status::Invalid;
        }
        let (at, len) = (self.shape.len_for(req.offset), self.shape.len_for(req.len));
        if crate::segments::capacity(cx, req.data) < len {
            return Status::Invalid;
        }
        each_segment(cx, req.data, len, |ring, piece, done| match req.op {
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
