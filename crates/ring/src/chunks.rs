//! Receive buffers of sockets: one region divided into chunks of equal length.

use crate::config::Chunk;
use crate::memory::Memory;
use crate::sys::Mapping;
use block::{Region, Segment};
use std::io;

/// The chunks of a ring, and which of them the user holds.
pub(crate) struct Chunks {
    region: Region,
    len: u32,
    out: Box<[bool]>,
    /// Chunks known to be available for receiving.
    pub(crate) available: usize,
}

impl Chunks {
    pub(crate) fn new(count: u16, len: u32, memory: &mut Memory) -> io::Result<Chunks> {
        if !(1..=1 << 15).contains(&count) || !(512..=1 << 30).contains(&len) {
            let text = format!(
                "{count} receive buffers of {len} bytes: 1 to 32768 of 512 bytes to 1 GiB are possible"
            );
            return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
        }
        let len = len.next_multiple_of(64);
        let whole = (usize::from(count) * len as usize).next_multiple_of(4096);
        let region = memory.add_own(Mapping::new(whole)?, None)?;
        Ok(Chunks { region, len, out: vec![false; count.into()].into(), available: count.into() })
    }

    pub(crate) fn count(&self) -> u16 {
        self.out.len() as u16
    }

    pub(crate) fn len(&self) -> u32 {
        self.len
    }

    /// The first `len` bytes of a chunk.
    #[inline]
    pub(crate) fn segment(&self, chunk: Chunk, len: u32) -> Segment {
        Segment {
            offset: u64::from(chunk.0) * u64::from(self.len),
            len: len.min(self.len),
            region: self.region,
        }
    }

    /// Marks a filled chunk as held by the user.
    #[inline]
    pub(crate) fn hand_out(&mut self, chunk: Chunk) {
        self.out[usize::from(chunk.0)] = true;
        self.available -= 1;
    }

    /// Marks a chunk as available again.
    ///
    /// # Panics
    /// If the user does not hold it: after a double return two sockets would write to the same memory.
    #[inline]
    pub(crate) fn take_back(&mut self, chunk: Chunk) {
        let out = &mut self.out[usize::from(chunk.0)];
        assert!(std::mem::take(out), "{chunk:?} was given back already");
        self.available += 1;
    }
}
