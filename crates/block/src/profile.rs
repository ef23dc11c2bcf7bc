//! What a node of a stack is to those above it: computed bottom up, on the control plane.

use crate::{Bytes, QueueLimits};

/// One line of what `show` says about a device: a name and its value.
pub type Fact = (&'static str, String);

/// What a node answers with something better than [`Status::NotSupported`](crate::Status::NotSupported).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Abilities {
    /// [`Op::Flush`](crate::Op::Flush).
    pub flush: bool,
    /// [`Flags::FUA`](crate::Flags::FUA) on writes, discards and write zeroes.
    pub fua: bool,
    /// [`Op::Discard`](crate::Op::Discard). It can still turn out at the first one that it cannot.
    pub discard: bool,
    /// [`Op::WriteZeroes`](crate::Op::WriteZeroes).
    pub write_zeroes: bool,
    /// [`Flags::FAST_ZERO`](crate::Flags::FAST_ZERO) is worth asking for.
    pub fast_zero: bool,
    /// Seeks cost: a spinning disk.
    pub rotational: bool,
}

impl Abilities {
    /// Memory, and what does as if: everything, at once.
    pub const MEMORY: Abilities = Abilities {
        flush: true,
        fua: true,
        discard: true,
        write_zeroes: true,
        fast_zero: true,
        rotational: false,
    };
}

/// A backend, or a layer with all that stands below it, as whoever stands above sees it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Profile {
    /// How much it holds: a whole number of its logical blocks.
    pub size: Bytes,
    /// Writes, discards and write zeroes fail.
    pub read_only: bool,
    /// What it can do.
    pub abilities: Abilities,
    /// What it can take, validated.
    pub limits: QueueLimits,
    /// Requests may begin and end at any byte, not only at logical blocks.
    pub bytewise: bool,
    /// Every read that may be lent to answers with memory of its own, so none need be brought.
    pub lends: bool,
    /// A read is mostly done while it is submitted.
    pub in_place: bool,
    /// It knows holes: asking for extents before a large read can spare the read.
    pub sparse: bool,
    /// Nobody looks at the data of requests that keep to the limits: it may be memory that only the kernel can reach.
    pub opaque: bool,
}
