//! What the front asks of its thread's ring besides what nodes ask of it. The kernel's ring does it for real; a
//! model of the driver does it in tests and in the simulation.

use ::ublk::IoCommand;
use block::{Region, Segment};
use queue::{FileId, FileOp, Ring, RingFull};
use ring::{KernelRing, Token};

/// A place in a ring's table of registered buffers where the driver puts the memory of requests.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct KernelBuffers {
    /// The region that names it: entry `n` from its first starts `n <<` [`ring::KERNEL_BUFFER_SHIFT`] bytes in.
    pub region: Region,
    /// The number of its first entry in the table.
    pub first: u16,
}

/// A ring, and behind it the driver whose character device is one of its files.
pub trait Driver: Ring {
    /// Hand a command to the driver. `op` is its number, `address` what the entry carries beside it. It ends under
    /// `token`.
    fn command(&mut self, token: Token, file: FileId, op: u32, command: IoCommand, address: u64);

    /// Start copying between our memory and a request's, through the character device. It ends under `token`.
    ///
    /// # Errors
    /// [`RingFull`]: nothing was started.
    fn copy(&mut self, token: Token, file: FileId, op: FileOp, memory: Segment) -> Result<(), RingFull>;

    /// Where the driver finds a segment.
    fn address(&self, segment: Segment) -> u64;

    /// A region of our own memory of that length, not taken from what [`allocate`](Ring::allocate) gives: address
    /// space until it is written to. `None`: it cannot be had.
    fn reserve(&mut self, len: u64) -> Option<Region>;

    /// Give back what [`reserve`](Driver::reserve) gave. Nothing may be under way with it.
    fn unreserve(&mut self, region: Region);

    /// Places for the memory of `count` requests. `None`: the kernel has no such table, or it is full.
    fn reserve_kernel_buffers(&mut self, count: u16) -> Option<KernelBuffers>;

    /// Give them back. Nothing may be under way with them.
    fn unreserve_kernel_buffers(&mut self, buffers: KernelBuffers);
}

impl Driver for KernelRing {
    #[inline]
    fn command(&mut self, token: Token, file: FileId, op: u32, command: IoCommand, address: u64) {
        self.command_at(token, file, op, zerocopy::transmute!(command), address);
    }

    #[inline]
    fn copy(&mut self, token: Token, file: FileId, op: FileOp, memory: Segment) -> Result<(), RingFull> {
        self.start_for(token, file, op, &[memory])
    }

    #[inline]
    fn address(&self, segment: Segment) -> u64 {
        KernelRing::address(self, segment)
    }

    fn reserve(&mut self, len: u64) -> Option<Region> {
        self.add_memory(len).ok()
    }

    fn unreserve(&mut self, region: Region) {
        self.remove_memory(region);
    }

    fn reserve_kernel_buffers(&mut self, count: u16) -> Option<KernelBuffers> {
        let (region, first) = self.add_kernel_buffers(count).ok()?;
        Some(KernelBuffers { region, first })
    }

    fn unreserve_kernel_buffers(&mut self, buffers: KernelBuffers) {
        self.remove_kernel_buffers(buffers.region);
    }
}
