//! `zero:`, a device that reads as zeroes and discards writes, like dm-zero.
//!
//! Also [`ZeroPages`], the memory for zero-copy reads of this device and of `null`: address space that is
//! never written, so the kernel backs all of it with its single page of zeroes, and reads stay in the
//! processor's cache.

use crate::ram::Memory;
use crate::segments::{fill_zeroes, one_extent};
use crate::{Backend, Fact, Features};
use block::{Bytes, Cookie, Data, Extent, Flags, Op, QueueLimits, Region, Request, Segment, Status};
use queue::{Cx, FileId, FileOp, Node, Ring, Verdict};
use ring::ForeignMemory;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, OnceLock};

/// The part of a zero device that all queues share.
#[derive(Clone, Copy, Debug)]
pub struct Zero {
    size: Bytes,
}

impl Zero {
    /// Creates a device of this size, rounded down to whole sectors.
    pub fn new(size: Bytes) -> Zero {
        Zero { size: size.sectors().bytes() }
    }

    /// Creates the node of one hardware queue. `pages` is the region of [`ZeroPages`] on the queue's ring,
    /// if they are registered there.
    pub fn node(&self, pages: Option<Region>) -> ZeroNode {
        ZeroNode { pages, file: None }
    }
}

impl Backend for Zero {
    fn size(&self) -> Bytes {
        self.size
    }

    fn features(&self) -> Features {
        Features::MEMORY
    }

    fn limits(&self) -> QueueLimits {
        crate::memory_limits()
    }

    fn describe(&self) -> Vec<Fact> {
        vec![("backend", "zero".to_owned()), ("size", self.size.to_string())]
    }
}

/// Zeroes for zero-copy reads. They have to be registered with the ring of each node that uses them.
#[derive(Debug)]
pub struct ZeroPages {
    memory: Memory,
}

impl ZeroPages {
    /// Size in bytes: that of a ring's largest buffer. Longer reads are filled instead.
    pub const LEN: Bytes = Bytes::mib(32);

    /// Reserves the address space.
    ///
    /// # Errors
    /// `mmap` failed.
    pub fn new() -> io::Result<ZeroPages> {
        Ok(ZeroPages { memory: Memory::map(Self::LEN.0 as usize, false)? })
    }

    /// Returns the memory, for a ring to register.
    pub fn memory(self: &Arc<ZeroPages>) -> ForeignMemory {
        self.memory.lend(self.clone())
    }
}

/// Returns `/dev/zero`, opened once for the whole process: reads into memory that only the kernel can access
/// are filled from it.
///
/// # Errors
/// `/dev/zero` cannot be opened.
pub fn zero_file() -> io::Result<Arc<OwnedFd>> {
    static FILE: OnceLock<Arc<OwnedFd>> = OnceLock::new();
    if let Some(file) = FILE.get() {
        return Ok(file.clone());
    }
    let opened: OwnedFd = std::fs::File::open("/dev/zero")?.into();
    Ok(FILE.get_or_init(|| Arc::new(opened)).clone())
}

/// Node that completes reads with zeroes, and everything else inline.
#[derive(Clone, Copy, Debug)]
pub struct ZeroNode {
    pages: Option<Region>,
    /// Number of [`zero_file`] on the queue's ring.
    file: Option<FileId>,
}

impl ZeroNode {
    /// Sets [`zero_file`] on the queue's ring, so that requests may use memory that only the kernel can
    /// access.
    #[must_use]
    pub fn with_file(self, file: FileId) -> ZeroNode {
        ZeroNode { file: Some(file), ..self }
    }

    /// Processes the result of filling a read's memory.
    pub(crate) fn filled(req: &Request, result: i64) -> Verdict {
        // A signal may have interrupted the fill, so repeat it.
        if (0..req.len.0 as i64).contains(&result) || result == -i64::from(libc::EINTR) {
            return Verdict::Busy;
        }
        Verdict::Up(Status::from_result(result, req.len.0))
    }

    /// Executes a request. Waits only for memory that the kernel has to fill; fails only zone operations.
    #[inline]
    fn answer<R: Ring>(&mut self, io: Cookie, req: &mut Request, cx: &mut Cx<'_, R>) -> Verdict {
        match req.op {
            Op::Read => match self.pages {
                Some(region) if req.flags.contains(Flags::ZERO_COPY) && req.len <= ZeroPages::LEN => {
                    req.data = Data::One(Segment { offset: 0, len: req.len.0 as u32, region });
                }
                _ => return self.touch(io, req, cx),
            },
            Op::Extents => return self.touch(io, req, cx),
            Op::Write | Op::Flush | Op::Discard | Op::WriteZeroes | Op::Prefetch => {}
            _ => return Verdict::Up(Status::NotSupported),
        }
        Verdict::Up(Status::Ok)
    }

    /// Executes requests that write to memory. It is a separate function so that other requests need only a
    /// few instructions.
    #[inline(never)]
    fn touch<R: Ring>(&self, io: Cookie, req: &Request, cx: &mut Cx<'_, R>) -> Verdict {
        if req.op == Op::Extents {
            one_extent(cx, req.data, Extent { len: req.len, hole: true, zero: true });
            return Verdict::Up(Status::Ok);
        }
        match self.file {
            _ if fill_zeroes(cx, req.data, 0, req.len.0) => Verdict::Up(Status::Ok),
            Some(file) => match cx.start(io, file, FileOp::Read { offset: 0 }, req.data, req.len.0) {
                Ok(()) => Verdict::Held,
                Err(queue::RingFull) => Verdict::Blocked,
            },
            None => Verdict::Up(Status::NotSupported),
        }
    }
}

impl<R: Ring> Node<R> for ZeroNode {
    #[inline]
    fn submit(&mut self, io: Cookie, req: &mut Request, cx: &mut Cx<'_, R>) -> Verdict {
        self.answer(io, req, cx)
    }

    fn reap(&mut self, _: Cookie, req: &mut Request, result: i64, _: &mut Cx<'_, R>) -> Verdict {
        ZeroNode::filled(req, result)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Harness;

    #[test]
    fn zero_reads_as_zeroes_whatever_was_written() {
        let mut disk = Harness::new(Box::new(Zero::new(Bytes::mib(1)).node(None)));
        assert_eq!(disk.write(4096, &[7; 512], Flags::empty()), Status::Ok);
        assert_eq!(disk.read(4096, 512), (Status::Ok, vec![0; 512]));
        for op in [Op::Flush, Op::Discard, Op::WriteZeroes, Op::Prefetch] {
            assert_eq!(disk.bare(op, 0, 4096), Status::Ok, "{op:?}");
        }
    }

    #[test]
    fn zero_answers_zero_copy_reads_with_its_pages() {
        let mut disk = Harness::new(Box::new(Zero::new(Bytes::mib(1)).node(Some(Region(9)))));
        let (status, data) = disk.read_zero_copy(8192, 4096);
        assert_eq!(status, Status::Ok);
        assert_eq!(data, Data::One(Segment { offset: 0, len: 4096, region: Region(9) }));
        assert_eq!(disk.read(0, 512), (Status::Ok, vec![0; 512]), "not without leave");
    }

    #[test]
    fn zero_is_one_hole() {
        let mut disk = Harness::new(Box::new(Zero::new(Bytes::gib(1)).node(None)));
        let extents = disk.extents(0, 1 << 30, 4);
        assert_eq!(extents, [Extent { len: Bytes::gib(1), hole: true, zero: true }]);
    }
}
