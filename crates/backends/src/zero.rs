//! `zero:`, a device that reads as zeroes and forgets what is written, as dm-zero does.
//!
//! Also [`ZeroPages`], the zeroes that it and `null` lend: address space that is never written, so the
//! kernel backs all of it with its one page of zeroes, and reading it stays in the processor's cache.

use crate::pieces::{fill_zeroes, one_extent};
use crate::ram::Memory;
use crate::{Backend, Fact, Features};
use block::{Bytes, Cookie, Data, Extent, Flags, Op, QueueLimits, Region, Request, Segment, Status};
use queue::{Cx, FileId, FileOp, Node, Ring, Verdict};
use ring::ForeignMemory;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, OnceLock};

/// The shared part: a size.
#[derive(Clone, Copy, Debug)]
pub struct Zero {
    size: Bytes,
}

impl Zero {
    /// A device of that size, cut to whole sectors.
    pub fn new(size: Bytes) -> Zero {
        Zero { size: size.sectors().bytes() }
    }

    /// The node of one hardware queue. `pages`: where the queue's ring knows [`ZeroPages`], if it does.
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

/// Zeroes to lend. Register its memory with each ring whose nodes shall lend rather than fill.
#[derive(Debug)]
pub struct ZeroPages {
    memory: Memory,
}

impl ZeroPages {
    /// How much there is: as much as a ring gives for one buffer. A longer read is filled, not lent.
    pub const LEN: Bytes = Bytes::mib(32);

    /// Reserve the address space.
    ///
    /// # Errors
    /// What `mmap` said.
    pub fn new() -> io::Result<ZeroPages> {
        Ok(ZeroPages { memory: Memory::map(Self::LEN.0 as usize, false)? })
    }

    /// Its memory, for a ring to register.
    pub fn memory(self: &Arc<ZeroPages>) -> ForeignMemory {
        self.memory.lend(self.clone())
    }
}

/// `/dev/zero`, opened once for the whole process: what a read is filled from whose memory only the kernel can reach.
///
/// # Errors
/// The system's.
pub fn zero_file() -> io::Result<Arc<OwnedFd>> {
    static FILE: OnceLock<Arc<OwnedFd>> = OnceLock::new();
    if let Some(file) = FILE.get() {
        return Ok(file.clone());
    }
    let opened: OwnedFd = std::fs::File::open("/dev/zero")?.into();
    Ok(FILE.get_or_init(|| Arc::new(opened)).clone())
}

/// Reads are zeroes, and everything else is done at once.
#[derive(Clone, Copy, Debug)]
pub struct ZeroNode {
    pages: Option<Region>,
    /// [`zero_file`], where the queue's ring knows it.
    file: Option<FileId>,
}

impl ZeroNode {
    /// With [`zero_file`], as the queue's ring knows it: then requests may bring memory that only the kernel can reach.
    #[must_use]
    pub fn with_file(self, file: FileId) -> ZeroNode {
        ZeroNode { file: Some(file), ..self }
    }

    /// The ring has filled the memory of a read.
    pub(crate) fn filled(req: &Request, result: i64) -> Verdict {
        // A signal may cut it short: then it is begun again.
        if (0..req.len.0 as i64).contains(&result) || result == -i64::from(libc::EINTR) {
            return Verdict::Busy;
        }
        Verdict::Up(Status::from_result(result, req.len.0))
    }

    /// Do it. Waits for nothing but memory that has to be filled by the kernel; fails only what is for zoned devices.
    #[inline]
    fn answer<R: Ring>(&mut self, io: Cookie, req: &mut Request, cx: &mut Cx<'_, R>) -> Verdict {
        match req.op {
            Op::Read => match self.pages {
                Some(region) if req.flags.has(Flags::MAY_LEND) && req.len <= ZeroPages::LEN => {
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

    /// What writes to the request's memory; kept apart so that what does not stays a few instructions.
    #[inline(never)]
    fn touch<R: Ring>(&self, io: Cookie, req: &Request, cx: &mut Cx<'_, R>) -> Verdict {
        if req.op == Op::Extents {
            one_extent(cx, req.data, Extent { len: req.len, hole: true, zero: true });
            return Verdict::Up(Status::Ok);
        }
        if let (Some(file), Data::One(segment)) = (self.file, req.data)
            && cx.ring.is_opaque(segment)
        {
            let started = cx.start(io, file, FileOp::Read { offset: 0 }, req.data, req.len.0);
            return if started.is_ok() { Verdict::Held } else { Verdict::Blocked };
        }
        fill_zeroes(cx, req.data, 0, req.len.0);
        Verdict::Up(Status::Ok)
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
        assert_eq!(disk.write(4096, &[7; 512], Flags::NONE), Status::Ok);
        assert_eq!(disk.read(4096, 512), (Status::Ok, vec![0; 512]));
        for op in [Op::Flush, Op::Discard, Op::WriteZeroes, Op::Prefetch] {
            assert_eq!(disk.bare(op, 0, 4096), Status::Ok, "{op:?}");
        }
    }

    #[test]
    fn zero_lends_its_pages_when_it_may() {
        let mut disk = Harness::new(Box::new(Zero::new(Bytes::mib(1)).node(Some(Region(9)))));
        let (status, data) = disk.read_lent(8192, 4096);
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
