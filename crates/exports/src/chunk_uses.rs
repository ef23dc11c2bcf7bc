//! Uses of the ring's receive chunks by a front-end: a chunk is given back when its last use ends.

use ring::{Chunk, KernelRing};

/// Requests that still use each chunk, plus one while it is being parsed.
#[derive(Default)]
pub(super) struct ChunkUses(Vec<u32>);

impl ChunkUses {
    /// A chunk was received: its first use begins.
    #[inline]
    pub(super) fn received(&mut self, chunk: Chunk) {
        if self.0.len() <= chunk.index() {
            self.0.resize(chunk.index() + 1, 0);
        }
        self.0[chunk.index()] = 1;
    }

    /// One more use of a chunk that is in use begins.
    #[inline]
    pub(super) fn hold(&mut self, chunk: Chunk) {
        self.0[chunk.index()] += 1;
    }

    /// A use ends.
    #[inline]
    pub(super) fn release(&mut self, chunk: Chunk, ring: &mut KernelRing) {
        let uses = &mut self.0[chunk.index()];
        *uses -= 1;
        if *uses == 0 {
            ring.give_back(chunk);
        }
    }
}
