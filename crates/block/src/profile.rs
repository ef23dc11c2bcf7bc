//! Profile of a node: what the nodes above may rely on. Computed bottom up by the control plane.

use crate::{Bytes, QueueLimits};

/// One line of `blockyard show`: a name and its value.
pub type Fact = (&'static str, String);

/// Operations that a node supports, that is, completes with something other than
/// [`Status::NotSupported`](crate::Status::NotSupported).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Abilities {
    /// [`Op::Flush`](crate::Op::Flush).
    pub flush: bool,
    /// [`Flags::FUA`](crate::Flags::FUA) on writes, discards and write zeroes.
    pub fua: bool,
    /// [`Op::Discard`](crate::Op::Discard). The first discard may still reveal that the backing store does
    /// not support it.
    pub discard: bool,
    /// [`Op::WriteZeroes`](crate::Op::WriteZeroes).
    pub write_zeroes: bool,
    /// [`Flags::FAST_ZERO`](crate::Flags::FAST_ZERO) is supported.
    pub fast_zero: bool,
    /// Seeks are slow: a spinning disk.
    pub rotational: bool,
}

impl Abilities {
    /// Memory and similar backends: everything is supported and fast.
    pub const MEMORY: Abilities = Abilities {
        flush: true,
        fua: true,
        discard: true,
        write_zeroes: true,
        fast_zero: true,
        rotational: false,
    };
}

/// Profile of a backend, or of a layer with the nodes below it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Profile {
    /// Size in bytes: a whole number of logical blocks.
    pub size: Bytes,
    /// Writes, discards and write-zeroes requests fail.
    pub read_only: bool,
    /// Supported operations.
    pub abilities: Abilities,
    /// Queue limits, validated.
    pub limits: QueueLimits,
    /// Requests may start and end at any byte, not only at logical blocks.
    pub bytewise: bool,
    /// Every read with [`Flags::ZERO_COPY`](crate::Flags::ZERO_COPY) is answered from the backend's own memory,
    /// so the submitter needs no buffer.
    pub zero_copy_reads: bool,
    /// Most reads complete inline, within submission.
    pub inline: bool,
    /// The backend knows holes: asking for extents before a large read can save the read.
    pub sparse: bool,
    /// No node accesses the data of requests within the limits, so it may be memory that only the kernel can
    /// access.
    pub opaque: bool,
}
