//! The memory that sockets receive into: one region cut into chunks of one length.

use crate::config::Chunk;
use crate::memory::Memory;
use crate::sys::Mapping;
use block::{Region, Segment};
use std::io;

/// The chunks of a ring, and which of them are with the user.
pub(crate) struct Chunks {
    region: Region,
    len: u32,
    out: Box<[bool]>,
    /// How many may be received into, as far as we have been told.
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

    /// It was filled, and goes to the user.
    #[inline]
    pub(crate) fn hand_out(&mut self, chunk: Chunk) {
        self.out[usize::from(chunk.0)] = true;
        self.available -= 1;
    }

    /// # Panics
    /// When the user does not have it: giving back twice would let two sockets write to one place.
    #[inline]
    pub(crate) fn take_back(&mut self, chunk: Chunk) {
        let out = &mut self.out[usize::from(chunk.0)];
        assert!(std::mem::take(out), "{chunk:?} was given back already");
        self.available += 1;
    }
}
