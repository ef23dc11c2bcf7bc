//! The ring of buffers from which the kernel takes one for each receive.

use crate::chunks::Chunks;
use crate::config::Chunk;
use crate::memory::Memory;
use crate::sys::Mapping;
use io_uring::IoUring;
use io_uring::types::BufRingEntry;
use std::io;
use std::sync::atomic::{AtomicU16, Ordering};

/// The number under which the kernel knows it.
pub(super) const GROUP: u16 = 0;

/// Shared with the kernel: we write entries and the tail, it reads.
pub(super) struct Buffers {
    mapping: Mapping,
    /// Entries less one; a power of two of them.
    mask: u16,
    tail: u16,
}

impl Buffers {
    /// Register the ring and fill it with all chunks. It must outlive the io_uring.
    pub(super) fn new(ring: &IoUring, chunks: &Chunks, memory: &Memory) -> io::Result<Buffers> {
        let entries = chunks.count().next_power_of_two();
        let mapping =
            Mapping::new((usize::from(entries) * size_of::<BufRingEntry>()).next_multiple_of(4096))?;
        // SAFETY: the mapping is page-aligned, holds `entries` entries and lives until the io_uring is gone.
        unsafe {
            ring.submitter().register_buf_ring_with_flags(
                mapping.base().as_ptr().addr() as u64,
                entries,
                GROUP,
                0,
            )
        }
        .map_err(|error| {
            io::Error::new(error.kind(), format!("no ring of receive buffers (5.19): {error}"))
        })?;
        let mut buffers = Buffers { mapping, mask: entries - 1, tail: 0 };
        for number in 0..chunks.count() {
            buffers.give(Chunk(number), chunks, memory);
        }
        Ok(buffers)
    }

    /// Let the kernel have a chunk.
    #[inline]
    pub(super) fn give(&mut self, chunk: Chunk, chunks: &Chunks, memory: &Memory) {
        let base = self.mapping.base().as_ptr().cast::<BufRingEntry>();
        let address = memory.own_pointer(chunks.segment(chunk, chunks.len()));
        // SAFETY: the masked index lies in the mapping. The kernel reads this entry only once the tail is
        // past it, and there are never more entries than chunks, so it has read what was there before.
        let entry = unsafe { &mut *base.add(usize::from(self.tail & self.mask)) };
        entry.set_addr(address.addr() as u64);
        entry.set_len(chunks.len());
        entry.set_bid(chunk.0);
        self.tail = self.tail.wrapping_add(1);
        // SAFETY: the tail is an aligned u16 within the first entry, as the kernel lays it out; setting the
        // fields of that entry leaves it alone.
        let tail = unsafe { AtomicU16::from_ptr(BufRingEntry::tail(base).cast_mut()) };
        tail.store(self.tail, Ordering::Release);
    }
}
