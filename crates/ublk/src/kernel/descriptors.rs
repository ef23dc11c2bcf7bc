//! Request descriptors of a queue: memory that the driver writes and the server reads.
//!
//! The kernel maps one read-only array per queue; the model uses shared memory instead. The server owns an
//! entry from the completion that announces it until its commit, and a completion is read with acquire
//! semantics, so plain atomic loads see the whole entry.
#![allow(unsafe_code)]

use crate::abi::{IoDescriptor, descriptors_len, descriptors_offset};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use zerocopy::{FromBytes, IntoBytes};

/// Words of an entry.
const WORDS: usize = size_of::<IoDescriptor>() / size_of::<u64>();

/// The descriptors of a queue.
#[derive(Debug)]
pub struct Descriptors {
    memory: Memory,
    depth: u16,
}

#[derive(Debug)]
enum Memory {
    /// Memory of `len` bytes that is mapped from the kernel.
    Mapped { base: NonNull<AtomicU64>, len: usize },
    /// Memory of the model.
    Shared(Arc<[AtomicU64]>),
}

// SAFETY: the memory is only read, by atomic loads, from any thread; it is unmapped when its one owner is dropped.
unsafe impl Send for Descriptors {}
// SAFETY: as above.
unsafe impl Sync for Descriptors {}

impl Descriptors {
    /// Maps the descriptors of a queue of a character device. Only the process that has it open may do so.
    ///
    /// # Errors
    /// `mmap` failed.
    pub fn map(device: BorrowedFd<'_>, queue: u16, depth: u16) -> io::Result<Descriptors> {
        // SAFETY: it returns a number and accesses no memory.
        let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) } as u64;
        let len = descriptors_len(depth, page) as usize;
        let offset = descriptors_offset(queue, page) as libc::off_t;
        let flags = libc::MAP_SHARED | libc::MAP_POPULATE;
        // SAFETY: a new mapping at an address of the kernel's choice; it replaces no other mapping.
        let base = unsafe {
            libc::mmap(std::ptr::null_mut(), len, libc::PROT_READ, flags, device.as_raw_fd(), offset)
        };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let base = NonNull::new(base.cast()).ok_or_else(|| io::Error::other("mapped at address 0"))?;
        Ok(Descriptors { memory: Memory::Mapped { base, len }, depth })
    }

    /// Copies a tag's entry. It is meaningful once a command for the tag has completed with a request.
    ///
    /// # Panics
    /// If the queue does not have this tag.
    #[inline]
    #[track_caller]
    pub fn read(&self, tag: u16) -> IoDescriptor {
        assert!(tag < self.depth, "tag {tag} of a queue of {}", self.depth);
        let all = match &self.memory {
            Memory::Shared(words) => &words[..],
            // SAFETY: the mapping is at least `depth` entries long, is 8-byte aligned as a page is, and lives
            // as long as `self`. The kernel may write to it concurrently, so it is read with atomic loads.
            Memory::Mapped { base, .. } => unsafe {
                std::slice::from_raw_parts(base.as_ptr(), usize::from(self.depth) * WORDS)
            },
        };
        let entry = &all[usize::from(tag) * WORDS..][..WORDS];
        let words: [u64; WORDS] = std::array::from_fn(|i| entry[i].load(Relaxed));
        IoDescriptor::read_from_bytes(words.as_bytes()).unwrap_or_default()
    }

    /// Returns the number of tags.
    pub fn depth(&self) -> u16 {
        self.depth
    }
}

impl Drop for Descriptors {
    fn drop(&mut self) {
        if let Memory::Mapped { base, len } = self.memory {
            // SAFETY: it is our mapping, of that length, and nobody borrows from it any more.
            unsafe { libc::munmap(base.as_ptr().cast(), len) };
        }
    }
}

/// The writing end of the model's descriptors.
#[derive(Clone, Debug)]
pub struct SharedDescriptors(Arc<[AtomicU64]>);

impl SharedDescriptors {
    /// Creates descriptors for `depth` tags.
    pub fn new(depth: u16) -> SharedDescriptors {
        SharedDescriptors((0..usize::from(depth) * WORDS).map(|_| AtomicU64::new(0)).collect())
    }

    /// Stores a tag's descriptor. The server must not have been notified of it yet.
    ///
    /// # Panics
    /// If the queue does not have this tag.
    #[track_caller]
    pub fn store(&self, tag: u16, descriptor: &IoDescriptor) {
        let entry = &self.0[usize::from(tag) * WORDS..][..WORDS];
        for (word, bytes) in entry.iter().zip(descriptor.as_bytes().chunks_exact(size_of::<u64>())) {
            word.store(u64::from_ne_bytes(bytes.try_into().unwrap_or_default()), Relaxed);
        }
    }

    /// Returns the reading end, for the server.
    pub fn reader(&self) -> Descriptors {
        let depth = (self.0.len() / WORDS) as u16;
        Descriptors { memory: Memory::Shared(self.0.clone()), depth }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stored_descriptors_are_read_by_tag() {
        let shared = SharedDescriptors::new(4);
        let entry =
            IoDescriptor { op_flags: 0x2001, nr_sectors: 8, start_sector: 1 << 40, addr: 0xdead_beef };
        shared.store(2, &entry);
        let read = shared.reader();
        assert_eq!((read.depth(), read.read(2)), (4, entry));
        assert_eq!(read.read(1), IoDescriptor::default());
    }

    #[test]
    fn a_file_that_cannot_be_mapped_is_an_error() {
        use std::os::fd::AsFd;
        let folder = std::fs::File::open("/").unwrap();
        assert!(Descriptors::map(folder.as_fd(), 0, 8).is_err());
    }
}
