//! Memory that driver and device share, and the placement of a queue's parts in it.

use crate::Features;
use crate::memory::{GuestMemory, GuestRegion, Mapping, MemoryError};
use crate::ring::Layout;
use block::Region;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

/// Guest memory without a guest, in a memfd.
#[derive(Debug)]
pub struct SharedMemory {
    file: OwnedFd,
    mapping: Arc<Mapping>,
}

impl SharedMemory {
    /// Creates `len` bytes of shared memory.
    ///
    /// # Errors
    /// The memory cannot be created or mapped.
    pub fn create(len: u64) -> io::Result<SharedMemory> {
        let file = rustix::fs::memfd_create("guest", rustix::fs::MemfdFlags::CLOEXEC)?;
        rustix::fs::ftruncate(&file, len)?;
        let mapping = Mapping::of_file(&file, 0, len)?;
        Ok(SharedMemory { file, mapping })
    }

    /// Returns the file, to be sent to a back-end.
    pub fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// Returns the driver's mapping of the memory.
    pub fn mapping(&self) -> &Arc<Mapping> {
        &self.mapping
    }

    /// Describes the whole memory as one region, with the guest's and the front-end's addresses.
    ///
    /// # Errors
    /// The addresses overflow.
    pub fn table(&self, guest: u64, user: u64) -> Result<Arc<GuestMemory>, MemoryError> {
        table(&self.mapping, guest, user)
    }
}

/// Describes a mapping as one region.
fn table(mapping: &Arc<Mapping>, guest: u64, user: u64) -> Result<Arc<GuestMemory>, MemoryError> {
    let (len, mapping) = (mapping.len(), mapping.clone());
    let region = GuestRegion { guest, user, len, mapping, region: Region(0) };
    GuestMemory::new(vec![region], None).map(Arc::new)
}

/// Allocates consecutive ranges of addresses.
#[derive(Clone, Copy, Debug)]
pub struct AddressAllocator {
    next: u64,
}

impl AddressAllocator {
    /// Starts at an address.
    pub fn at(start: u64) -> AddressAllocator {
        AddressAllocator { next: start }
    }

    /// Allocates `len` bytes, aligned to a power of two.
    pub fn take(&mut self, len: u64, align: u64) -> u64 {
        let start = self.next.next_multiple_of(align);
        self.next = start + len;
        start
    }

    /// Allocates the parts of a queue of `size` descriptors. Driver and device areas are on separate cache
    /// lines.
    pub fn queue(&mut self, size: u16, features: Features, chain_max: u16) -> Layout {
        let count = u64::from(size);
        let (driver, device) = match features.contains(Features::RING_PACKED) {
            true => (4, 4),
            false => (6 + 2 * count, 6 + 8 * count),
        };
        Layout {
            size,
            descriptors: self.take(16 * count, 64),
            driver: self.take(driver, 64),
            device: self.take(device, 64),
            chain_max,
        }
    }
}
