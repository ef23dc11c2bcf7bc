//! `ram:`, a disk in memory.
//!
//! One mapping is shared by all queues, and filled as it is written: reading what was never written takes
//! no memory, and discarding gives memory back. Requests are answered in place, by copying between the
//! request's memory and the disk's. A read whose sender takes any memory is *lent* the disk's own pages,
//! once they are registered with the queue's ring: nothing is copied at all. What is lent is live: a later
//! write can change it before it is sent, which a device's reader may see as well while its read is under way.
//!
//! *Invariant:* `pages` says of every page with content that it is populated.

mod memory;
mod pages;
#[cfg(test)]
mod tests;
mod tuples;

pub(crate) use memory::Memory;

use crate::pieces::{Records, each_piece};
use crate::{Backend, Fact, Features};
use block::{
    Bytes, Cookie, Data, Extent, Flags, Integrity, Op, QueueLimits, Region, Request, Segment, Status,
};
use memory::PAGE;
pub(crate) use pages::{Pages, touched, whole};
use queue::{Cx, Node, NodeId, Ring, Verdict};
use ring::ForeignMemory;
use std::io;
use std::sync::Arc;
use tuples::Tuples;

/// What is asked for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RamSpec {
    /// How much: whole sectors.
    pub size: Bytes,
    /// With huge pages: fewer faults and translations, but 2 MiB are taken at the first byte written.
    pub huge: bool,
    /// It keeps integrity data, of that shape.
    pub integrity: Option<Integrity>,
}

/// Why there is no such RAM disk.
#[derive(Debug, thiserror::Error)]
pub enum RamError {
    /// The size is not one that a disk has.
    #[error("a disk of {0} is not possible (give a whole number of 512-byte sectors, above 0)")]
    Size(Bytes),
    /// The address space could not be had.
    #[error("reserving address space of {size} failed (give a smaller size, or raise `ulimit -v`)")]
    Map {
        /// How much was asked for.
        size: Bytes,
        /// What the kernel said.
        source: io::Error,
    },
}

/// A RAM disk: the part that all queues share.
#[derive(Debug)]
pub struct Ram {
    memory: Memory,
    pages: Pages,
    tuples: Option<Tuples>,
    spec: RamSpec,
}

impl Ram {
    /// Make one, empty.
    ///
    /// # Errors
    /// See [`RamError`].
    pub fn new(spec: &RamSpec) -> Result<Arc<Ram>, RamError> {
        let RamSpec { size, huge, integrity } = *spec;
        if size == Bytes::ZERO || !size.is_aligned(512) {
            return Err(RamError::Size(size));
        }
        let map_error = |source| RamError::Map { size, source };
        let len = usize::try_from(size.0).map_err(|_| map_error(io::ErrorKind::OutOfMemory.into()))?;
        let memory = Memory::map(len, huge).map_err(map_error)?;
        let pages = Pages::new((memory.len() / PAGE) as u64);
        let tuples = integrity.map(|shape| Tuples::new(shape, size)).transpose()?;
        Ok(Arc::new(Ram { memory, pages, tuples, spec: *spec }))
    }

    /// Memory that it takes now, not counting 32 KiB of bookkeeping for each GiB of its size.
    pub fn allocated(&self) -> Bytes {
        Bytes(self.pages.populated() * PAGE as u64)
            + self.tuples.as_ref().map_or(Bytes::ZERO, Tuples::allocated)
    }

    /// The shape of the integrity data that it keeps.
    pub fn integrity(&self) -> Option<Integrity> {
        self.tuples.as_ref().map(Tuples::shape)
    }

    /// Its memory, for a ring to register.
    pub fn memory(self: &Arc<Ram>) -> ForeignMemory {
        self.memory.lend(self.clone())
    }

    /// The node of one hardware queue. `region`: what the queue's ring calls this disk's memory, if it was
    /// registered there; reads are then lent where they may be.
    pub fn node(self: &Arc<Ram>, region: Option<Region>) -> RamNode {
        RamNode { ram: Arc::clone(self), region, cleared: Box::default() }
    }

    #[inline]
    fn read(&self, at: u64, into: &mut [u8]) {
        if self.pages.all_set(touched(at, into.len() as u64)) {
            return self.memory.read(at, into);
        }
        self.read_sparse(at, into);
    }

    /// Reads what is populated and zeroes the rest, so that reading never takes memory.
    #[cold]
    fn read_sparse(&self, at: u64, into: &mut [u8]) {
        let end = at + into.len() as u64;
        let mut next = at;
        while next < end {
            let (set, until) = self.run(next, end);
            let piece = &mut into[(next - at) as usize..(until - at) as usize];
            if set {
                self.memory.read(next, piece);
            } else {
                piece.fill(0);
            }
            next = until;
        }
    }

    /// Whether what starts at `next` is populated, and up to which byte it is alike.
    fn run(&self, next: u64, end: u64) -> (bool, u64) {
        let (set, until) = self.pages.run(touched(next, end - next));
        (set, (until * PAGE as u64).min(end))
    }

    #[inline]
    fn write(&self, at: u64, from: &[u8]) {
        self.memory.write(at, from);
        self.pages.set(touched(at, from.len() as u64));
    }

    /// Zero a range: whole pages are given back unless `keep`, the rest is written.
    fn clear(&self, at: u64, len: u64, keep: bool) {
        if keep {
            self.memory.zero(at, len as usize);
            return self.pages.set(touched(at, len));
        }
        let inner = whole(at, len);
        if inner.is_empty() {
            return self.blank(at, at + len);
        }
        let (start, end) = (inner.start * PAGE as u64, inner.end * PAGE as u64);
        self.blank(at, start);
        if self.pages.clear(inner) {
            self.memory.release(start, (end - start) as usize);
        }
        self.blank(end, at + len);
    }

    /// Zero a part of a page, or of two; a page that holds nothing is left alone.
    fn blank(&self, mut next: u64, end: u64) {
        while next < end {
            let (set, until) = self.run(next, end);
            if set {
                self.memory.zero(next, (until - next) as usize);
            }
            next = until;
        }
    }
}

impl Backend for Ram {
    fn size(&self) -> Bytes {
        self.spec.size
    }

    fn features(&self) -> Features {
        Features::MEMORY
    }

    fn limits(&self) -> QueueLimits {
        crate::memory_limits()
    }

    fn describe(&self) -> Vec<Fact> {
        vec![
            ("backend", "ram".to_owned()),
            ("size", self.spec.size.to_string()),
            ("allocated", self.allocated().to_string()),
            ("integrity", self.integrity().map_or("none".to_owned(), |shape| shape.to_string())),
            ("huge pages", if self.spec.huge { "asked for" } else { "no" }.to_owned()),
        ]
    }
}

/// Clearing more than this is done in steps, with a turn of the loop between: releasing 16 MiB of populated
/// pages, or writing as much, takes 2 to 4 ms.
const CLEAR_STEP: u64 = 16 << 20;

/// A RAM disk as one hardware queue sees it.
#[derive(Debug)]
pub struct RamNode {
    ram: Arc<Ram>,
    region: Option<Region>,
    /// By tag: how much of a discard or write zeroes that we hold is done.
    cleared: Box<[u64]>,
}

impl RamNode {
    fn clear<R: Ring>(&mut self, io: Cookie, req: &Request, cx: &mut Cx<'_, R>) -> Verdict {
        let done = &mut self.cleared[io.tag.index()];
        let keep = req.op == Op::WriteZeroes && req.flags.has(Flags::NO_UNMAP);
        let step = (req.len.0 - *done).min(CLEAR_STEP);
        self.ram.clear(req.offset.0 + *done, step, keep);
        if let Some(tuples) = &self.ram.tuples {
            tuples.forget(req.offset.0 + *done, step);
        }
        *done += step;
        if *done == req.len.0 {
            return Verdict::Up(Status::Ok);
        }
        cx.timer(io, cx.now());
        Verdict::Held
    }

    fn extents<R: Ring>(&self, req: &Request, cx: &mut Cx<'_, R>) {
        let mut records = Records::new(cx, req.data);
        let (mut next, end) = (req.offset.0, req.end().0);
        while next < end {
            let (set, until) = self.ram.run(next, end);
            if !records.push(cx, Extent { len: Bytes(until - next), hole: !set, zero: !set }) {
                break;
            }
            next = until;
        }
        records.finish(cx);
    }
}

impl<R: Ring> Node<R> for RamNode {
    fn attach(&mut self, _id: NodeId, tags: usize) {
        self.cleared = vec![0; tags].into();
    }

    #[inline]
    fn submit(&mut self, io: Cookie, req: &mut Request, cx: &mut Cx<'_, R>) -> Verdict {
        let at = req.offset.0;
        match req.op {
            Op::Read => match self.region {
                Some(region) if req.flags.has(Flags::MAY_LEND) && req.len.0 <= u64::from(u32::MAX) => {
                    req.data = Data::One(Segment { offset: at, len: req.len.0 as u32, region });
                }
                _ => each_piece(cx, req.data, req.len.0, |ring, piece, done| {
                    self.ram.read(at + done, ring.bytes_mut(piece));
                }),
            },
            Op::Write => {
                each_piece(cx, req.data, req.len.0, |ring, piece, done| {
                    self.ram.write(at + done, ring.bytes(piece));
                });
                if let Some(tuples) = &self.ram.tuples {
                    tuples.forget(at, req.len.0);
                }
            }
            Op::ReadTuples | Op::WriteTuples => {
                let tuples = self.ram.tuples.as_ref();
                return Verdict::Up(tuples.map_or(Status::NotSupported, |tuples| tuples.carry(req, cx)));
            }
            Op::Discard | Op::WriteZeroes => {
                self.cleared[io.tag.index()] = 0;
                return self.clear(io, req, cx);
            }
            Op::Extents => self.extents(req, cx),
            Op::Flush | Op::Prefetch => {}
            _ => return Verdict::Up(Status::NotSupported),
        }
        Verdict::Up(Status::Ok)
    }

    /// The turn between two steps of clearing is over.
    fn reap(&mut self, io: Cookie, req: &mut Request, _result: i64, cx: &mut Cx<'_, R>) -> Verdict {
        self.clear(io, req, cx)
    }
}
