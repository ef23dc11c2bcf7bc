//! The seam: time, memory and I/O as nodes see them. A simulation replaces this and nothing else.
//!
//! One [`Ring`] serves all hardware queues of a thread. An operation is identified by an [`IoId`]: the queue
//! and the cookie of the request that it is for. A ring never calls back: the loop that owns ring and queues
//! passes completions to [`Queue::complete`](crate::Queue::complete).

use block::{Cookie, Segment};

/// Number of a hardware queue on its thread.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct QueueId(pub u16);

/// Identifies an operation of a ring.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct IoId {
    /// The queue of the request.
    pub queue: QueueId,
    /// The request, and which of its submissions to a node.
    pub cookie: Cookie,
}

/// A file that was registered with a ring, by a number that the ring chose.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct FileId(pub u32);

/// Nanoseconds on a monotonic clock with an unspecified origin.
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Nanos(pub u64);

impl Nanos {
    /// Returns the time `nanos` nanoseconds later.
    #[must_use]
    pub fn after(self, nanos: u64) -> Nanos {
        Nanos(self.0.saturating_add(nanos))
    }

    /// Returns the nanoseconds since `earlier`; 0 if that is later.
    pub fn since(self, earlier: Nanos) -> u64 {
        self.0.saturating_sub(earlier.0)
    }
}

/// A file operation. Offsets and lengths are in bytes. Memory is passed separately.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FileOp {
    /// `preadv2`. The result is the number of bytes read, fewer at the end of the file.
    Read {
        /// Offset in the file.
        offset: u64,
    },
    /// `pwritev2`. The result is the number of bytes written.
    Write {
        /// Offset in the file.
        offset: u64,
        /// The data is on stable storage when it completes (`RWF_DSYNC`).
        durable: bool,
    },
    /// `fdatasync`.
    Sync,
    /// `fallocate` with the kernel's mode bits.
    Allocate {
        /// `FALLOC_FL_*`.
        mode: i32,
        /// Offset in the file.
        offset: u64,
        /// Length.
        len: u64,
    },
    /// `lseek` with `SEEK_HOLE` or `SEEK_DATA`. The result is the offset found; `-ENXIO` behind the last
    /// data. Only for [`Ring::try_now`], which always performs it.
    Seek {
        /// Offset to start from.
        offset: u64,
        /// Find a hole rather than data.
        hole: bool,
    },
    /// `posix_fadvise(POSIX_FADV_WILLNEED)`.
    Prefetch {
        /// Offset in the file.
        offset: u64,
        /// Length.
        len: u64,
    },
}

/// Whether an inline operation may block the thread.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Blocking {
    /// The operation must not block (`RWF_NOWAIT`). Only for reads and writes.
    Never,
    /// The operation may take as long as it needs: for files that are memory.
    Allowed,
}

/// The ring is full: answer [`Verdict::Blocked`](crate::Verdict::Blocked).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RingFull;

/// Time, memory and I/O.
pub trait Ring {
    /// Returns the time of the last clock read. The loop reads the clock once or twice a turn.
    fn now(&self) -> Nanos;

    /// Allocates memory of `len` bytes, at most 32 MiB, page-aligned from 4 KiB, with unspecified content.
    /// `None`: no memory is available now. Regions start on a page boundary, so a segment's offset gives its
    /// alignment.
    fn allocate(&mut self, len: u32) -> Option<Segment>;

    /// Frees a segment that [`allocate`](Ring::allocate) returned, as a whole.
    fn free(&mut self, segment: Segment);

    /// Returns the bytes of a segment of the ring's own memory.
    ///
    /// # Panics
    /// If the segment is not within one of its regions.
    fn bytes(&self, segment: Segment) -> &[u8];

    /// Returns the bytes of a segment, mutably. Panics as [`bytes`](Ring::bytes) does.
    fn bytes_mut(&mut self, segment: Segment) -> &mut [u8];

    /// Whether only the kernel can access this memory. It may then be used in file operations, whole or in
    /// part, but not read or written here.
    fn is_opaque(&self, segment: Segment) -> bool {
        let _ = segment;
        false
    }

    /// Fills a segment with zeroes. `false`: it is memory that only the kernel can access, and has no
    /// address.
    fn clear(&mut self, segment: Segment) -> bool {
        let is_opaque = self.is_opaque(segment);
        if !is_opaque {
            self.bytes_mut(segment).fill(0);
        }
        !is_opaque
    }

    /// Performs the operation inline. Returns the bytes moved or a negative errno. `None`: it would have to
    /// wait, or the ring cannot tell. Then nothing was done; [`start`](Ring::start) it.
    fn try_now(&mut self, file: FileId, op: FileOp, data: &[Segment], blocking: Blocking) -> Option<i64>;

    /// Batches a read or write that [`try_now`](Ring::try_now) would perform, if this turn has several: one
    /// system call performs all of them in the next turn. It completes under `id` as one that was
    /// [started](Ring::start) does, with `-EAGAIN` if it would block and `blocking` is [`Blocking::Never`]. `false`:
    /// nothing was done; call `try_now`.
    fn try_batched(
        &mut self,
        id: IoId,
        file: FileId,
        op: FileOp,
        data: &[Segment],
        blocking: Blocking,
    ) -> bool {
        let _ = (id, file, op, data, blocking);
        false
    }

    /// Returns the duration of the last such system call, in nanoseconds.
    fn batch_ns(&self) -> u64 {
        0
    }

    /// Starts the operation. It completes under `id` with the bytes moved or a negative errno. `data` itself
    /// is not used after this call; the memory that it names has to stay until the completion.
    ///
    /// # Errors
    /// [`RingFull`]: nothing was started.
    fn start(&mut self, id: IoId, file: FileId, op: FileOp, data: &[Segment]) -> Result<(), RingFull>;

    /// Completes `id` with result 0 at that time, or soon after.
    fn timer(&mut self, id: IoId, at: Nanos);

    /// Cancels the operation or timer `id`. It still completes exactly once, with its result or with
    /// `-ECANCELED`.
    fn cancel(&mut self, id: IoId);
}
