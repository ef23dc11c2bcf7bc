//! Sends virtio-blk requests from a number of slots, each with a header, a status byte and memory for data.

use super::{AddressAllocator, Driver};
use crate::blk::{HEADER_LEN, Kind};
use crate::memory::{GuestMemory, Span};
use std::sync::Arc;

/// Status byte of a request that the device has not completed.
const PENDING: u8 = 0xff;

/// A slot: the addresses of its parts, and the spans to access them.
struct Slot {
    header: (u64, Span),
    data: (u64, Span),
    /// The sector that a zone append reports, and the status byte behind it.
    tail: (u64, Span),
    status: (u64, Span),
}

/// Bytes of `append_sector`.
const SECTOR_LEN: u32 = 8;

/// The driver of a virtio block device on one queue.
pub struct Disk {
    driver: Driver,
    memory: Arc<GuestMemory>,
    slots: Box<[Slot]>,
    /// Slot of each chain in flight, by its id.
    owners: Box<[u16]>,
}

impl Disk {
    /// Creates `slots` slots with `data_len` bytes of data each. Returns `None` if there is not enough
    /// memory.
    pub fn new(
        driver: Driver,
        memory: Arc<GuestMemory>,
        allocator: &mut AddressAllocator,
        slots: u16,
        data_len: u32,
    ) -> Option<Disk> {
        let part = |allocator: &mut AddressAllocator, len: u32, align: u64| {
            let address = allocator.take(len.into(), align);
            Some((address, memory.translate(address, len)?))
        };
        let slots: Option<Box<[Slot]>> = (0..slots)
            .map(|_| {
                let header = part(allocator, HEADER_LEN, 64)?;
                let tail = part(allocator, SECTOR_LEN + 1, 8)?;
                let status = tail.0 + u64::from(SECTOR_LEN);
                Some(Slot {
                    header,
                    tail,
                    status: (status, memory.translate(status, 1)?),
                    data: part(allocator, data_len, 4096)?,
                })
            })
            .collect();
        // An id is the index of a descriptor, of which a queue has at most 32768.
        Some(Disk { driver, slots: slots?, owners: vec![0; 1 << 15].into(), memory })
    }

    /// Returns the queue's driver.
    pub fn driver(&mut self) -> &mut Driver {
        &mut self.driver
    }

    /// Returns the memory of a slot's data.
    pub fn data(&self, slot: u16) -> Span {
        self.slots[usize::from(slot)].data.1
    }

    /// Guest address of a slot's data.
    pub fn data_address(&self, slot: u16) -> u64 {
        self.slots[usize::from(slot)].data.0
    }

    /// Guest address of a slot's status byte.
    pub fn status_address(&self, slot: u16) -> u64 {
        self.slots[usize::from(slot)].status.0
    }

    /// Sector at which a completed zone append wrote.
    pub fn append_sector(&self, slot: u16) -> u64 {
        let mut bytes = [0; SECTOR_LEN as usize];
        let is_read = self.memory.read(self.slots[usize::from(slot)].tail.1, &mut bytes);
        assert!(is_read, "the span is of this memory");
        u64::from_le_bytes(bytes)
    }

    /// Adds a request with the first `len` bytes of the slot's data. Returns false if the queue is full.
    ///
    /// # Panics
    /// If the slot has less memory.
    #[inline]
    pub fn add(&mut self, slot: u16, kind: Kind, sector: u64, len: u32) -> bool {
        let parts = &self.slots[usize::from(slot)];
        let mut header = [0; HEADER_LEN as usize];
        header[..4].copy_from_slice(&kind.number().to_le_bytes());
        header[8..].copy_from_slice(&sector.to_le_bytes());
        assert!(len <= parts.data.1.len(), "a slot has {} bytes", parts.data.1.len());
        let is_written =
            self.memory.write(parts.header.1, &header) && self.memory.store_byte(parts.status.1, PENDING);
        assert!(is_written, "the spans are of this memory");
        let (header, data, status) = ((parts.header.0, HEADER_LEN), (parts.data.0, len), (parts.status.0, 1));
        let tail = (parts.tail.0, SECTOR_LEN + 1);
        let id = match (len, kind) {
            (1.., Kind::ZoneAppend) => self.driver.add(&[header, data], &[tail]),
            (0, _) => self.driver.add(&[header], &[status]),
            (_, Kind::Read | Kind::GetId | Kind::ZoneReport) => self.driver.add(&[header], &[data, status]),
            _ => self.driver.add(&[header, data], &[status]),
        };
        let Some(id) = id else { return false };
        self.owners[usize::from(id)] = slot;
        true
    }

    /// Makes the added requests visible to the device. Returns whether the device wants a kick.
    #[must_use]
    pub fn publish(&mut self) -> bool {
        self.driver.publish()
    }

    /// Takes the next request that the device has completed: its slot and its status byte.
    #[inline]
    pub fn take_completed(&mut self) -> Option<(u16, u8)> {
        let used = self.driver.take_used()?;
        let slot = self.owners[usize::from(used.id)];
        let mut status = [PENDING];
        let is_read = self.memory.read(self.slots[usize::from(slot)].status.1, &mut status);
        assert!(is_read, "the span is of this memory");
        Some((slot, status[0]))
    }
}
