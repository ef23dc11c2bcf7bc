//! Memory shared between clients of a device and its server, as a file that both map.
#![allow(unsafe_code)]

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::path::Path;
use std::ptr::NonNull;

/// A mapped file whose address is passed to the driver, which looks up its pages. The contents are not
/// accessed here.
#[derive(Debug)]
pub struct SharedFile {
    file: File,
    base: NonNull<libc::c_void>,
    len: u64,
}

// SAFETY: the address is passed to the driver and never dereferenced; it is unmapped when its one owner is
// dropped.
unsafe impl Send for SharedFile {}
// SAFETY: as above.
unsafe impl Sync for SharedFile {}

impl SharedFile {
    /// Maximum length in bytes: offsets in shared memory have 32 bits.
    const LEN_MAX: u64 = 1 << 32;

    /// Maps a whole file.
    ///
    /// # Errors
    /// An error of the operating system; [`io::ErrorKind::InvalidInput`] if the file is empty, longer than
    /// 4 GiB or not a multiple of the page size.
    pub fn open(path: &Path) -> io::Result<SharedFile> {
        let file = OpenOptions::new().read(true).write(true).open(path)?;
        let len = file.metadata()?.len();
        if len == 0 || len > Self::LEN_MAX || !len.is_multiple_of(4096) {
            let why = format!("its size of {len} bytes is not a multiple of 4096 up to 4 GiB");
            return Err(io::Error::new(io::ErrorKind::InvalidInput, why));
        }
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_SHARED | libc::MAP_POPULATE;
        let (nowhere, fd) = (std::ptr::null_mut(), file.as_raw_fd());
        // SAFETY: a new mapping at an address of the kernel's choice; it replaces no other mapping.
        let base = unsafe { libc::mmap(nowhere, len as usize, protection, flags, fd, 0) };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let base = NonNull::new(base).ok_or_else(|| io::Error::other("mapped at address 0"))?;
        Ok(SharedFile { file, base, len })
    }

    /// Returns the address of the mapping.
    pub fn address(&self) -> u64 {
        self.base.as_ptr().addr() as u64
    }

    /// Returns the length in bytes.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Returns whether the file is empty, which is never true.
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
    fn only_whole_pages_can_be_shared() {
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
