//! Provided buffer rings, from which the kernel takes a buffer for each completion with data.

use super::setup::WideRing;
use crate::chunks::Chunks;
use crate::config::Chunk;
use crate::memory::Memory;
use crate::sys::Mapping;
use io_uring::types::BufRingEntry;
use std::io;
use std::sync::atomic::{AtomicU16, Ordering};

/// Buffer group of receives.
pub(super) const GROUP: u16 = 0;

/// A ring of buffers shared with the kernel: we write entries and the tail, the kernel reads them.
pub(super) struct BufferRing {
    mapping: Mapping,
    /// Number of entries, a power of two, less one.
    mask: u16,
    tail: u16,
}

impl BufferRing {
    /// Registers an empty ring for at most `buffers` buffers. It must outlive the io_uring.
    pub(super) fn new(ring: &WideRing, buffers: u16, group: u16) -> io::Result<BufferRing> {
        let entries = buffers.next_power_of_two();
        let mapping =
            Mapping::new((usize::from(entries) * size_of::<BufRingEntry>()).next_multiple_of(4096))?;
        let address = mapping.base().as_ptr().addr() as u64;
        // SAFETY: the mapping is page-aligned, holds `entries` entries and lives until the io_uring is gone.
        unsafe { ring.submitter().register_buf_ring_with_flags(address, entries, group, 0) }?;
        Ok(BufferRing { mapping, mask: entries - 1, tail: 0 })
    }

    /// Gives the kernel a buffer, which must stay valid and which it must not have already.
    #[inline]
    pub(super) fn give(&mut self, number: u16, address: *mut u8, len: u32) {
        let base = self.mapping.base().as_ptr().cast::<BufRingEntry>();
        // SAFETY: the masked index lies in the mapping. The kernel reads this entry only once the tail is
        // past it, and there are never more entries than buffers, so it has read what was there before.
        let entry = unsafe { &mut *base.add(usize::from(self.tail & self.mask)) };
        entry.set_addr(address.addr() as u64);
        entry.set_len(len);
        entry.set_bid(number);
        self.tail = self.tail.wrapping_add(1);
        // SAFETY: the tail is an aligned u16 within the first entry, as in the kernel's layout; setting the
        // fields of that entry does not touch it.
        let tail = unsafe { AtomicU16::from_ptr(BufRingEntry::tail(base).cast_mut()) };
        tail.store(self.tail, Ordering::Release);
    }
}

/// The buffer ring of receives: the chunks of a ring.
pub(super) struct Buffers(BufferRing);

impl Buffers {
    /// Registers the ring and fills it with all chunks. It must outlive the io_uring.
    pub(super) fn new(ring: &WideRing, chunks: &Chunks, memory: &Memory) -> io::Result<Buffers> {
        let made = BufferRing::new(ring, chunks.count(), GROUP);
        let mut buffers = Buffers(made.map_err(|error| {
            io::Error::new(error.kind(), format!("no ring of receive buffers (5.19): {error}"))
        })?);
        for number in 0..chunks.count() {
            buffers.give(Chunk(number), chunks, memory);
        }
        Ok(buffers)
    }

    /// Gives the kernel a chunk.
    #[inline]
    pub(super) fn give(&mut self, chunk: Chunk, chunks: &Chunks, memory: &Memory) {
        let address = memory.own_pointer(chunks.segment(chunk, chunks.len()));
        self.0.give(chunk.0, address, chunks.len());
    }
}
