//! The ublk front-end's interface to its thread's ring, besides the interface of nodes. It is implemented
//! by the kernel's ring, and by a model of the driver for tests and simulation.

use ::ublk::{BatchIo, IoCommand};
use block::{Region, Segment};
use queue::{FileId, FileOp, Ring, RingFull};
use ring::{KernelRing, Token};

/// Entries in a ring's table of registered buffers, for the memory of ublk requests.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct KernelBuffers {
    /// The region of these entries.
    pub region: Region,
    /// Offset of the first entry in the region, in bytes. Further entries follow at intervals of `1 <<`
    /// [`ring::KERNEL_BUFFER_SHIFT`].
    pub base: u64,
    /// Index of the first entry in the table.
    pub first: u16,
}

/// Memory that a served queue holds as long as it exists.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum QueueMemory {
    /// Private memory. Only the start of the segment is meaningful: the memory may be longer than a
    /// segment's length can express.
    Buffers(Segment),
    /// Registered-buffer entries for the memory of requests.
    Kernel(KernelBuffers),
}

/// A ring whose driver supports commands for many tags at once.
pub trait Batches {
    /// Sends a command for the tags listed in `memory`. It completes with `token`.
    fn commit_batch(&mut self, token: Token, file: FileId, op: u32, command: BatchIo, memory: Segment);

    /// Sends a multishot command that the driver answers with tags. For each tag it completes with result 0
    /// and `token` with the tag as its number, until the command ends with `token` itself. It may end at
    /// any time.
    fn fetch_tags(&mut self, token: Token, file: FileId, op: u32, command: BatchIo);

    /// Cancels the fetch, which still completes once.
    fn withdraw_fetch(&mut self, token: Token);
}

/// A ring that has the character device of a ublk device among its files.
pub trait Driver: Ring + Batches {
    /// Sends a command to the driver. `op` is its number, `address` the `addr` field of the entry. It
    /// completes with `token`.
    fn command(&mut self, token: Token, file: FileId, op: u32, command: IoCommand, address: u64);

    /// Cancels a command that the driver may hold forever. The command still completes once.
    fn withdraw(&mut self, token: Token);

    /// Starts a copy between our memory and a request's memory, through the character device. It completes
    /// with `token`.
    ///
    /// # Errors
    /// [`RingFull`]: nothing was started.
    fn copy(&mut self, token: Token, file: FileId, op: FileOp, memory: Segment) -> Result<(), RingFull>;

    /// Returns the address of a segment, for the driver.
    fn address(&self, segment: Segment) -> u64;

    /// Reserves memory of this length, separate from [`allocate`](Ring::allocate): only address space until
    /// it is written to. Returns `None` if none is left.
    fn reserve(&mut self, len: u64) -> Option<QueueMemory>;

    /// Reserves entries for the memory of `count` requests. Returns `None` if the kernel has no such table,
    /// or it is full.
    fn reserve_kernel_buffers(&mut self, count: u16) -> Option<QueueMemory>;

    /// Releases either kind of memory. No operation may be in flight on it.
    fn unreserve(&mut self, memory: QueueMemory);
}

impl Batches for KernelRing {
    fn commit_batch(&mut self, token: Token, file: FileId, op: u32, command: BatchIo, memory: Segment) {
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

    fn reserve(&mut self, len: u64) -> Option<QueueMemory> {
        let region = self.add_memory(len).ok()?;
        let len = u32::try_from(len).unwrap_or(u32::MAX);
        Some(QueueMemory::Buffers(Segment { offset: 0, len, region }))
    }

    fn reserve_kernel_buffers(&mut self, count: u16) -> Option<QueueMemory> {
        let (region, first) = self.add_kernel_buffers(count).ok()?;
        Some(QueueMemory::Kernel(KernelBuffers { region, base: 0, first }))
    }

    fn unreserve(&mut self, memory: QueueMemory) {
        match memory {
            QueueMemory::Buffers(memory) => self.remove_memory(memory.region),
            QueueMemory::Kernel(buffers) => self.remove_kernel_buffers(buffers.region),
        }
    }
}
