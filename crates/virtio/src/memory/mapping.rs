//! Shared mappings of files, for memory that a front-end passes as a file descriptor.
//!
//! Other processes may write these bytes at any time, so no Rust reference to them is ever created;
//! `access` has the only loads, stores and copies.

#![expect(unsafe_code, reason = "maps files, and hands their addresses to the ring")]

use ring::ForeignMemory;
use rustix::mm::{Advice, MapFlags, ProtFlags};
use std::any::Any;
use std::io;
use std::os::fd::AsFd;
use std::ptr::NonNull;
use std::sync::Arc;

/// Alignment of the start of a mapping, and of a file's offset.
const PAGE: u64 = 4096;
/// `HUGETLBFS_MAGIC`. On hugetlbfs, offsets and lengths of mappings are multiples of the file system's
/// block size.
const HUGETLBFS: u64 = 0x9584_58f6;

/// A range of a file, or anonymous memory, mapped readable and writable.
#[derive(Debug)]
pub struct Mapping {
    /// Start of the mapping, on a page boundary.
    base: NonNull<u8>,
    /// Length of the mapping in bytes.
    mapped: usize,
    /// Bytes before the first requested byte.
    skip: usize,
    /// Whether the memory came from the allocator instead of `mmap`.
    is_heap: bool,
}

// SAFETY: a `Mapping` is an address and a length. All accesses to its bytes are atomic or raw copies.
unsafe impl Send for Mapping {}
// SAFETY: as above; no method needs exclusive access.
unsafe impl Sync for Mapping {}

/// Address of mapped bytes, which several threads may use.
#[derive(Clone, Copy)]
pub(super) struct Base(pub(super) NonNull<u8>);

// SAFETY: as for `Mapping`: it is an address, and accesses to what it points at are atomic or raw copies.
unsafe impl Send for Base {}
// SAFETY: as above.
unsafe impl Sync for Base {}

impl Mapping {
    /// Maps `len` bytes from `offset` of a file, shared with all other processes that map it. Neither needs
    /// to be a multiple of the page size, but guest memory keeps its alignment only if `offset` is one.
    ///
    /// If another process later truncates the file, this process ends with `SIGBUS`. Only the front-end can
    /// do that, never its guest.
    ///
    /// # Errors
    /// The range is empty, overflows or is longer than the file, or `mmap` fails.
    pub fn of_file(file: impl AsFd, offset: u64, len: u64) -> io::Result<Arc<Mapping>> {
        let invalid = |what: &str| io::Error::new(io::ErrorKind::InvalidInput, what.to_owned());
        let end = offset.checked_add(len).ok_or_else(|| invalid("the range overflows"))?;
        if len == 0 {
            return Err(invalid("the range is empty"));
        }
        if rustix::fs::fstat(&file)?.st_size.cast_unsigned() < end {
            return Err(invalid("the range ends past the end of the file"));
        }
        let kind = rustix::fs::fstatfs(&file)?;
        let page = if kind.f_type as u64 == HUGETLBFS { kind.f_bsize as u64 } else { PAGE };
        let start = offset - offset % page;
        let mapped = (end - start).checked_next_multiple_of(page).and_then(|len| usize::try_from(len).ok());
        let mapped = mapped.ok_or_else(|| invalid("the range is too long"))?;
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: the kernel chooses a free range of addresses.
        let base = unsafe {
            rustix::mm::mmap(std::ptr::null_mut(), mapped, protection, MapFlags::SHARED, file.as_fd(), start)
        }?;
        // A core dump must not have the memory of guests. An old kernel that refuses is no reason to fail.
        // SAFETY: the range was just mapped, and the advice changes no byte.
        let _ = unsafe { rustix::mm::madvise(base, mapped, Advice::LinuxDontDump) };
        let base = NonNull::new(base.cast()).ok_or_else(|| invalid("mapped at address 0"))?;
        Ok(Arc::new(Mapping { base, mapped, skip: (offset - start) as usize, is_heap: false }))
    }

    /// Allocates `len` bytes of zeroes, at least one, which only this process accesses.
    pub fn zeroed(len: usize) -> Arc<Mapping> {
        let layout = heap_layout(len.max(1));
        // SAFETY: the layout is not empty.
        let base = unsafe { std::alloc::alloc_zeroed(layout) };
        let base = NonNull::new(base).unwrap_or_else(|| std::alloc::handle_alloc_error(layout));
        Arc::new(Mapping { base, mapped: len.max(1), skip: 0, is_heap: true })
    }

    /// Returns the length of the requested range in bytes.
    pub fn len(&self) -> u64 {
        (self.mapped - self.skip) as u64
    }

    /// Returns whether the range is empty, which it never is.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the number of bytes between the start of the memory that [`lend`](Self::lend) returns and
    /// the first byte of the range.
    pub fn skip(&self) -> u64 {
        self.skip as u64
    }

    /// Returns the address of the first byte of the range.
    pub(super) fn base(&self) -> Base {
        // SAFETY: `skip` is less than the length of the mapping.
        Base(unsafe { self.base.add(self.skip) })
    }

    /// Returns the mapping as memory that a ring can register and hand to the kernel.
    pub fn lend(self: &Arc<Self>) -> ForeignMemory {
        // SAFETY: the range stays mapped while this mapping lives, which the clone prolongs; it is on a page
        // boundary, and nobody forms references to its bytes.
        unsafe { ForeignMemory::new(self.base, self.mapped, Arc::clone(self) as Arc<dyn Any + Send + Sync>) }
    }
}

fn heap_layout(len: usize) -> std::alloc::Layout {
    std::alloc::Layout::from_size_align(len, PAGE as usize).expect("a length that the caller can allocate")
}

impl Drop for Mapping {
    fn drop(&mut self) {
        if self.is_heap {
            // SAFETY: allocated with this layout in `zeroed`, and nothing refers to it any more.
            unsafe { std::alloc::dealloc(self.base.as_ptr(), heap_layout(self.mapped)) };
        } else {
            // SAFETY: mapped in `of_file` with this length, and nothing refers to it any more.
            let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.mapped) };
        }
    }
}
