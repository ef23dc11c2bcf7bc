//! Memory that is shared with another process: a memfd, mapped here for as long as a ring holds it.
//!
//! The process that shares the memory may write to it at any time, so its bytes are never accessed as such: a
//! ring copies from and to it, as it does with a guest's memory.

use crate::ForeignMemory;
use std::any::Any;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;

/// A memfd and its mapping. It is zero at first, and a page takes memory once it is written.
#[derive(Debug)]
pub struct SharedMemory {
    file: OwnedFd,
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: the mapping belongs to the process, not to a thread, and is unmapped only on drop.
unsafe impl Send for SharedMemory {}
// SAFETY: no method accesses its bytes.
unsafe impl Sync for SharedMemory {}

impl SharedMemory {
    /// Creates memory of `len` bytes, a positive number of whole pages. Its length is sealed, so that no
    /// process can truncate it under another.
    ///
    /// # Errors
    /// The system is out of memory, descriptors or addresses.
    pub fn create(len: usize) -> io::Result<Arc<SharedMemory>> {
        // SAFETY: the name is a string with a terminating zero.
        let file =
            unsafe { libc::memfd_create(c"blockyard".as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING) };
        if file < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the descriptor is new, and belongs to nobody else.
        let file = unsafe { OwnedFd::from_raw_fd(file) };
        let size = libc::off_t::try_from(len).map_err(|_| io::ErrorKind::InvalidInput)?;
        let seals = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;
        // SAFETY: both calls change a file that only this function knows.
        let is_sized = unsafe {
            libc::ftruncate(file.as_raw_fd(), size) == 0
                && libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, seals) == 0
        };
        if !is_sized {
            return Err(io::Error::last_os_error());
        }
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: the kernel chooses a free range of addresses.
        let base = unsafe {
            libc::mmap(std::ptr::null_mut(), len, protection, libc::MAP_SHARED, file.as_raw_fd(), 0)
        };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let base = NonNull::new(base.cast::<u8>()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Arc::new(SharedMemory { file, base, len }))
    }

    /// Length in bytes.
    pub fn len(&self) -> u64 {
        self.len as u64
    }

    /// Whether its length is 0; always false.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Describes the mapping for a ring: see
    /// [`KernelRing::add_guest_memory`](crate::KernelRing::add_guest_memory).
    pub fn lend(self: &Arc<Self>) -> ForeignMemory {
        let keep = Arc::clone(self) as Arc<dyn Any + Send + Sync>;
        // SAFETY: the kernel maps on page boundaries; the range stays mapped while `keep` lives, and no
        // reference to its bytes is ever formed.
        unsafe { ForeignMemory::new(self.base, self.len, keep) }
    }
}

impl AsFd for SharedMemory {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl Drop for SharedMemory {
    fn drop(&mut self) {
        // SAFETY: base and length are those of the mapping, and no ring holds it any more.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.len) };
    }
}
