//! Memory that clients of a device share with its server: a file that both have mapped.
#![allow(unsafe_code)]

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::path::Path;
use std::ptr::NonNull;

/// A file, mapped for the driver to find its pages by: whoever uses its address is the driver. Nobody reads or writes
/// through it here.
#[derive(Debug)]
pub struct SharedFile {
    file: File,
    base: NonNull<libc::c_void>,
    len: u64,
}

// SAFETY: it is an address that is told to the driver and never followed; it is unmapped when its one owner is dropped.
unsafe impl Send for SharedFile {}
// SAFETY: as above.
unsafe impl Sync for SharedFile {}

impl SharedFile {
    /// A place in one has 32 bits.
    const LEN_MAX: u64 = 1 << 32;

    /// Map all of a file.
    ///
    /// # Errors
    /// The operating system's; [`io::ErrorKind::InvalidInput`] when it is empty, longer than 4 GiB or no whole pages.
    pub fn open(path: &Path) -> io::Result<SharedFile> {
        let file = OpenOptions::new().read(true).write(true).open(path)?;
        let len = file.metadata()?.len();
        if len == 0 || len > Self::LEN_MAX || !len.is_multiple_of(4096) {
            let why = format!("it has {len} bytes, where whole pages, and 4 GiB at most, can be shared");
            return Err(io::Error::new(io::ErrorKind::InvalidInput, why));
        }
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_SHARED | libc::MAP_POPULATE;
        let (nowhere, fd) = (std::ptr::null_mut(), file.as_raw_fd());
        // SAFETY: a new mapping, at an address that the kernel chooses; it takes nothing from memory in use.
        let base = unsafe { libc::mmap(nowhere, len as usize, protection, flags, fd, 0) };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let base = NonNull::new(base).ok_or_else(|| io::Error::other("mapped at address 0"))?;
        Ok(SharedFile { file, base, len })
    }

    /// Where the driver finds it.
    pub fn address(&self) -> u64 {
        self.base.as_ptr().addr() as u64
    }

    /// How long it is, in bytes.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether it is empty, which it never is.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

impl AsFd for SharedFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl Drop for SharedFile {
    fn drop(&mut self) {
        // SAFETY: it is our mapping, of that length, and nobody borrows from it.
        unsafe { libc::munmap(self.base.as_ptr(), self.len as usize) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whole_pages_can_be_shared_and_nothing_else() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("memory");
        let file = File::create(&path).unwrap();
        assert_eq!(SharedFile::open(&path).unwrap_err().kind(), io::ErrorKind::InvalidInput);
        file.set_len(4097).unwrap();
        assert_eq!(SharedFile::open(&path).unwrap_err().kind(), io::ErrorKind::InvalidInput);
        file.set_len(8192).unwrap();
        let shared = SharedFile::open(&path).unwrap();
        assert_eq!((shared.len(), shared.address() % 4096, shared.is_empty()), (8192, 0, false));
    }
}
