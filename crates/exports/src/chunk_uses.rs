//! Counts a front-end's uses of the ring's receive chunks; a chunk is returned when its last use ends.

use ring::{Chunk, KernelRing};

/// Requests that still use each chunk, plus one while it is being parsed.
#[derive(Default)]
pub(super) struct ChunkUses(Vec<u32>);

impl ChunkUses {
    /// Starts the first use of a chunk that was received.
    #[inline]
    pub(super) fn received(&mut self, chunk: Chunk) {
        if self.0.len() <= chunk.index() {
            self.0.resize(chunk.index() + 1, 0);
        }
        self.0[chunk.index()] = 1;
    }

    /// Adds a use of a chunk that is already in use.
    #[inline]
    pub(super) fn hold(&mut self, chunk: Chunk) {
        self.0[chunk.index()] += 1;
    }

    /// Ends a use, and returns the chunk to the ring after the last one.
    #[inline]
    pub(super) fn release(&mut self, chunk: Chunk, ring: &mut KernelRing) {
        let uses = &mut self.0[chunk.index()];
        *uses -= 1;
        if *uses == 0 {
            ring.give_back(chunk);
        }
    }
}
