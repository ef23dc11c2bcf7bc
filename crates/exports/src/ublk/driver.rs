//! What the front asks of its thread's ring besides what nodes ask of it. The kernel's ring does it for real; a
//! model of the driver does it in tests and in the simulation.

use ::ublk::{BatchIo, IoCommand};
use block::{Region, Segment};
use queue::{FileId, FileOp, Ring, RingFull};
use ring::{KernelRing, Token};

/// A place in a ring's table of registered buffers where the driver puts the memory of requests.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct KernelBuffers {
    /// The region that names them.
    pub region: Region,
    /// Where in it the first one starts, in bytes. The others follow, [`ring::KERNEL_BUFFER_SHIFT`] apart.
    pub base: u64,
    /// The number of its first entry in the table.
    pub first: u16,
}

/// What a lane has of a ring for as long as it lasts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum LaneMemory {
    /// Memory of our own. The segment tells where it starts; it may be longer than a segment can say.
    Buffers(Segment),
    /// Places for the memory of requests.
    Kernel(KernelBuffers),
}

/// A ring, behind which is a driver that takes commands for many tags at once.
pub trait Batches {
    /// Hand the driver a command about the tags that `memory` lists. It ends under `token`.
    fn tell(&mut self, token: Token, file: FileId, op: u32, command: BatchIo, memory: Segment);

    /// Have the driver answer with tags, each of which ends with result 0 under `token` with the tag for its number,
    /// until the command ends under `token`. It may end at any time.
    fn fetch_tags(&mut self, token: Token, file: FileId, op: u32, command: BatchIo);

    /// Take that back. It ends all the same, once.
    fn withdraw_fetch(&mut self, token: Token);
}

/// A ring, and behind it the driver whose character device is one of its files.
pub trait Driver: Ring + Batches {
    /// Hand a command to the driver. `op` is its number, `address` what the entry carries beside it. It ends under
    /// `token`.
    fn command(&mut self, token: Token, file: FileId, op: u32, command: IoCommand, address: u64);

    /// Take back a command that the driver has and that may never end by itself. It ends all the same, once.
    fn withdraw(&mut self, token: Token);

    /// Start copying between our memory and a request's, through the character device. It ends under `token`.
    ///
    /// # Errors
    /// [`RingFull`]: nothing was started.
    fn copy(&mut self, token: Token, file: FileId, op: FileOp, memory: Segment) -> Result<(), RingFull>;

    /// Where the driver finds a segment.
    fn address(&self, segment: Segment) -> u64;

    /// Memory of our own of that length, not taken from what [`allocate`](Ring::allocate) gives: address
    /// space until it is written to. `None`: it cannot be had.
    fn reserve(&mut self, len: u64) -> Option<LaneMemory>;

    /// Places for the memory of `count` requests. `None`: the kernel has no such table, or it is full.
    fn reserve_kernel_buffers(&mut self, count: u16) -> Option<LaneMemory>;

    /// Give either back. Nothing may be under way with it.
    fn unreserve(&mut self, memory: LaneMemory);
}

impl Batches for KernelRing {
    fn tell(&mut self, token: Token, file: FileId, op: u32, command: BatchIo, memory: Segment) {
        self.command_from(token, file, op, zerocopy::transmute!(command), memory);
    }

    fn fetch_tags(&mut self, token: Token, file: FileId, op: u32, command: BatchIo) {
        self.command_numbers(token, file, op, zerocopy::transmute!(command));
    }

    fn withdraw_fetch(&mut self, token: Token) {
        self.cancel_numbers(token);
    }
}

impl Driver for KernelRing {
    #[inline]
    fn command(&mut self, token: Token, file: FileId, op: u32, command: IoCommand, address: u64) {
        self.command_at(token, file, op, zerocopy::transmute!(command), address);
    }

    fn withdraw(&mut self, token: Token) {
        self.cancel_command(token);
    }

    #[inline]
    fn copy(&mut self, token: Token, file: FileId, op: FileOp, memory: Segment) -> Result<(), RingFull> {
        self.start_for(token, file, op, &[memory])
    }

    #[inline]
    fn address(&self, segment: Segment) -> u64 {
        KernelRing::address(self, segment)
    }

    fn reserve(&mut self, len: u64) -> Option<LaneMemory> {
        let region = self.add_memory(len).ok()?;
        let len = u32::try_from(len).unwrap_or(u32::MAX);
        Some(LaneMemory::Buffers(Segment { offset: 0, len, region }))
    }

    fn reserve_kernel_buffers(&mut self, count: u16) -> Option<LaneMemory> {
        let (region, first) = self.add_kernel_buffers(count).ok()?;
        Some(LaneMemory::Kernel(KernelBuffers { region, base: 0, first }))
    }

    fn unreserve(&mut self, memory: LaneMemory) {
        match memory {
            LaneMemory::Buffers(memory) => self.remove_memory(memory.region),
            LaneMemory::Kernel(buffers) => self.remove_kernel_buffers(buffers.region),
        }
    }
}
