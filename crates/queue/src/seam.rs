//! The seam: time, memory and I/O as nodes see them. A simulation replaces this and nothing else.
//!
//! One [`Ring`] serves all hardware queues of a thread. What it carries for a request is named by an
//! [`IoId`]: the queue, and the request's cookie there. A ring never calls back: what has ended is
//! handed to [`Queue::complete`](crate::Queue::complete) by the loop that owns both.

use block::{Cookie, Segment};

/// A hardware queue among those of its thread.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct QueueId(pub u16);

/// The name under which a ring carries something for a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct IoId {
    /// Whose request it is.
    pub queue: QueueId,
    /// Which request, and which hand-over of it.
    pub cookie: Cookie,
}

/// A file that a ring has registered. Numbers are the ring's own.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct FileId(pub u32);

/// Nanoseconds on a monotonic clock of unstated origin.
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Nanos(pub u64);

impl Nanos {
    /// The time that is `nanos` later.
    #[must_use]
    pub fn after(self, nanos: u64) -> Nanos {
        Nanos(self.0.saturating_add(nanos))
    }

    /// Nanoseconds since `earlier`; 0 when that lies ahead.
    pub fn since(self, earlier: Nanos) -> u64 {
        self.0.saturating_sub(earlier.0)
    }
}

/// An operation on a file. Offsets and lengths are in bytes. Memory is passed beside it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FileOp {
    /// `preadv2`: ends with the bytes read, fewer at the end of the file.
    Read {
        /// Where in the file.
        offset: u64,
    },
    /// `pwritev2`: ends with the bytes written.
    Write {
        /// Where in the file.
        offset: u64,
        /// On stable storage before it ends (`RWF_DSYNC`).
        durable: bool,
    },
    /// `fdatasync`.
    Sync,
    /// `fallocate` with the kernel's mode bits.
    Allocate {
        /// `FALLOC_FL_*`.
        mode: i32,
        /// Where in the file.
        offset: u64,
        /// How much.
        len: u64,
    },
    /// `lseek` with `SEEK_HOLE` or `SEEK_DATA`: ends with the offset found; `-ENXIO` past the last data.
    /// Only for [`Ring::try_now`], which always answers it.
    Seek {
        /// Where to start looking.
        offset: u64,
        /// Look for a hole rather than for data.
        hole: bool,
    },
    /// `posix_fadvise(POSIX_FADV_WILLNEED)`.
    Prefetch {
        /// Where in the file.
        offset: u64,
        /// How much.
        len: u64,
    },
}

/// How long a ring may take over an operation that it does in place.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Patience {
    /// Not at all: what would wait is not done (`RWF_NOWAIT`). Only reads and writes.
    None,
    /// As long as it takes: for files that are memory.
    Unbounded,
}

/// Nothing more fits into the ring now: answer [`Verdict::Blocked`](crate::Verdict::Blocked).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RingFull;

/// Time, memory and I/O.
pub trait Ring {
    /// The time as of the last look at the clock, which the loop takes once or twice a turn.
    fn now(&self) -> Nanos;

    /// Memory for `len` bytes, at most 32 MiB, page-aligned from 4 KiB on, content unspecified. `None`:
    /// no more is to be had now. Regions start on a page boundary, so a segment's offset tells its
    /// alignment.
    fn allocate(&mut self, len: u32) -> Option<Segment>;

    /// Give back what [`allocate`](Ring::allocate) gave, whole.
    fn free(&mut self, segment: Segment);

    /// The bytes of a segment of the ring's own memory.
    ///
    /// # Panics
    /// When the segment does not lie in one of its regions: a request may only name what exists.
    fn bytes(&self, segment: Segment) -> &[u8];

    /// The same, to write to.
    fn bytes_mut(&mut self, segment: Segment) -> &mut [u8];

    /// Whether only the kernel can reach this memory: it may be named in operations on files, whole or in part, and
    /// not be looked at.
    fn is_opaque(&self, segment: Segment) -> bool {
        let _ = segment;
        false
    }

    /// Do the operation here and now: bytes moved or a negative errno. `None`: it would have had to
    /// wait (or the ring cannot tell), nothing was done, [`start`](Ring::start) it.
    fn try_now(&mut self, file: FileId, op: FileOp, data: &[Segment], patience: Patience) -> Option<i64>;

    /// Start the operation. It ends as a completion under `id` with the bytes moved or a negative
    /// errno. `data` itself may go away at once; the memory it names may not until then.
    fn start(&mut self, id: IoId, file: FileId, op: FileOp, data: &[Segment]) -> Result<(), RingFull>;

    /// End `id` with result 0 at that time, or soon after.
    fn timer(&mut self, id: IoId, at: Nanos);

    /// Ask for what `id` carries to end soon. It still ends exactly once, as itself or with `-ECANCELED`.
    fn cancel(&mut self, id: IoId);
}
