//! `ram:`, a disk in memory.
//!
//! All queues share one mapping, which is populated as it is written: reading pages that were never written
//! takes no memory, and a discard frees memory. Data is copied between the request's memory and the disk's.
//! Short copies are done at the end of the turn, so that the memory for the next copy is loaded during the
//! current one.
//!
//! A zero-copy read returns the disk's own pages, if they are registered with the queue's ring, and copies
//! nothing. Such pages are live: a later write can change them before they are sent, which is permitted for
//! any read that is in flight.
//!
//! *Invariant:* `pages` marks every page with content as populated.

mod memory;
mod pages;
#[cfg(test)]
mod tests;
mod tuples;

pub(crate) use memory::Memory;

use crate::segments::{Records, each_segment};
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

/// Options of a RAM disk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RamSpec {
    /// Size in bytes: whole sectors.
    pub size: Bytes,
    /// Whether to use huge pages: fewer faults and TLB misses, but 2 MiB are allocated at the first byte
    /// written.
    pub hugepages: bool,
    /// Shape of the integrity data to store; `None` for none.
    pub integrity: Option<Integrity>,
}

/// Reasons why a RAM disk could not be created.
#[derive(Debug, thiserror::Error)]
pub enum RamError {
    /// The size is not a valid size of a disk.
    #[error("the size {0} is not possible (give a multiple of 512 bytes, above 0)")]
    Size(Bytes),
    /// The address space could not be reserved.
    #[error("reserving address space of {size} failed (give a smaller size, or raise `ulimit -v`)")]
    Map {
        /// Requested size.
        size: Bytes,
        /// Error of the kernel.
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
    /// Creates an empty disk.
    ///
    /// # Errors
    /// See [`RamError`].
    pub fn new(spec: &RamSpec) -> Result<Arc<Ram>, RamError> {
        let RamSpec { size, hugepages, integrity } = *spec;
        if size == Bytes::ZERO || !size.is_aligned(512) {
            return Err(RamError::Size(size));
        }
        let map_error = |source| RamError::Map { size, source };
        let len = usize::try_from(size.0).map_err(|_| map_error(io::ErrorKind::OutOfMemory.into()))?;
        let memory = Memory::map(len, hugepages).map_err(map_error)?;
        let pages = Pages::new((memory.len() / PAGE) as u64);
        let tuples = integrity.map(|shape| Tuples::new(shape, size)).transpose()?;
        Ok(Arc::new(Ram { memory, pages, tuples, spec: *spec }))
    }

    /// Returns the memory in use, in bytes, without the bookkeeping of 32 KiB per GiB of the disk's size.
    pub fn allocated(&self) -> Bytes {
        Bytes(self.pages.populated() * PAGE as u64)
            + self.tuples.as_ref().map_or(Bytes::ZERO, Tuples::allocated)
    }

    /// Returns the shape of the integrity data that the disk stores.
    pub fn integrity(&self) -> Option<Integrity> {
        self.tuples.as_ref().map(Tuples::shape)
    }

    /// Returns the memory, for a ring to register.
    pub fn memory(self: &Arc<Ram>) -> ForeignMemory {
        self.memory.lend(self.clone())
    }

    /// Creates the node of one hardware queue. `region` is this disk's memory as registered with the
    /// queue's ring; reads are then zero-copy if their submitter allows it.
    pub fn node(self: &Arc<Ram>, region: Option<Region>) -> RamNode {
        self.node_of(region, GATHER_MAX)
    }

    /// Creates a node for a backend that keeps its data here: unlike [`node`](Ram::node), each copy is done
    /// within `submit`.
    pub(crate) fn inline_node(self: &Arc<Ram>, region: Option<Region>) -> RamNode {
        self.node_of(region, 0)
    }

    fn node_of(self: &Arc<Ram>, region: Option<Region>, gather_max: u64) -> RamNode {
        let ram = Arc::clone(self);
        RamNode { ram, region, cleared: Box::default(), gather_max, gathered: Vec::new(), ahead: Vec::new() }
    }

    #[inline]
    fn read(&self, at: u64, into: &mut [u8]) {
        if self.pages.all_set(touched(at, into.len() as u64)) {
            return self.memory.read(at, into);
        }
        self.read_sparse(at, into);
    }

    /// Reads populated pages and zeroes the rest, so that reading never allocates memory.
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

    /// Returns whether the byte at `next` is populated, and the end of the range for which that holds.
    fn run(&self, next: u64, end: u64) -> (bool, u64) {
        let (set, until) = self.pages.run(touched(next, end - next));
        (set, (until * PAGE as u64).min(end))
    }

    #[inline]
    fn write(&self, at: u64, from: &[u8]) {
        self.memory.write(at, from);
        self.pages.set(touched(at, from.len() as u64));
    }

    /// Zeroes a range: frees whole pages unless `keep`, and writes the rest.
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

    /// Zeroes part of one or two pages. Unpopulated pages stay unpopulated.
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
            ("huge pages", if self.spec.hugepages { "asked for" } else { "no" }.to_owned()),
        ]
    }
}

/// Length in bytes above which a copy is done within `submit`: loading its first lines takes only a small
/// part of the time.
const GATHER_MAX: u64 = 16 << 10;

/// Length in bytes above which a range is cleared in steps, one per turn: freeing 16 MiB of populated
/// pages, or writing as much, takes 2 to 4 ms.
const CLEAR_STEP: u64 = 16 << 20;

/// A RAM disk in one hardware queue.
#[derive(Debug)]
pub struct RamNode {
    ram: Arc<Ram>,
    region: Option<Region>,
    /// By tag: number of bytes that are done of a held discard or write zeroes.
    cleared: Box<[u64]>,
    /// Maximum length in bytes of copies that are done at the end of the turn; 0 for none.
    gather_max: u64,
    /// Requests of this turn that are copied at its end, with their offsets. At most one per tag.
    gathered: Vec<(Cookie, u64)>,
    /// Offsets of the copies at the end of this turn, in reverse order: the next one is the last element.
    ahead: Vec<u64>,
}

impl RamNode {
    /// Holds a copy until the end of the turn, when the next one is known and its memory can be prefetched.
    #[inline]
    fn gather(&mut self, io: Cookie, at: u64) -> Verdict {
        self.gathered.push((io, at));
        Verdict::Held
    }

    /// Copies a read's data out, or a write's data in.
    #[inline]
    fn copy<R: Ring>(&self, req: &Request, cx: &mut Cx<'_, R>) {
        let at = req.offset.0;
        if req.op == Op::Read {
            return each_segment(cx, req.data, req.len.0, |ring, piece, done| {
                self.ram.read(at + done, ring.bytes_mut(piece));
            });
        }
        each_segment(cx, req.data, req.len.0, |ring, piece, done| {
            self.ram.write(at + done, ring.bytes(piece));
        });
        if let Some(tuples) = &self.ram.tuples {
            tuples.forget(at, req.len.0);
        }
    }

    fn clear<R: Ring>(&mut self, io: Cookie, req: &Request, cx: &mut Cx<'_, R>) -> Verdict {
        let done = &mut self.cleared[io.tag.index()];
        let keep = req.op == Op::WriteZeroes && req.flags.contains(Flags::NO_UNMAP);
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
        self.gathered.reserve(tags);
        self.ahead.reserve(tags);
    }

    #[inline]
    fn submit(&mut self, io: Cookie, req: &mut Request, cx: &mut Cx<'_, R>) -> Verdict {
        let at = req.offset.0;
        match req.op {
            Op::Read => match self.region {
                Some(region) if req.flags.contains(Flags::ZERO_COPY) && req.len.0 <= u64::from(u32::MAX) => {
                    req.data = Data::One(Segment { offset: at, len: req.len.0 as u32, region });
                }
                _ if req.len.0 <= self.gather_max => return self.gather(io, at),
                _ => self.copy(req, cx),
            },
            Op::Write if req.len.0 <= self.gather_max => return self.gather(io, at),
            Op::Write => self.copy(req, cx),
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

    /// Executes a copy at the end of the turn, or continues clearing after one.
    #[inline]
    fn reap(&mut self, io: Cookie, req: &mut Request, _result: i64, cx: &mut Cx<'_, R>) -> Verdict {
        if req.op.moves_data() {
            self.ahead.pop();
            if let Some(next) = self.ahead.last() {
                self.ram.memory.prefetch(*next);
            }
            self.copy(req, cx);
            return Verdict::Up(Status::Ok);
        }
        self.clear(io, req, cx)
    }

    #[inline]
    fn commit(&mut self, cx: &mut Cx<'_, R>) {
        self.ahead.clear();
        self.ahead.extend(self.gathered.iter().rev().map(|(_, at)| *at));
        self.gathered.drain(..).for_each(|(io, _)| cx.resume(io, 0));
    }
}
