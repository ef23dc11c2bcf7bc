//! The device side of virtqueues, split and packed.
//!
//! A hardware queue pops descriptor chains ([`Ring::pop`]), pushes them when their requests complete
//! ([`Ring::push`]), publishes a batch of them with one store ([`Ring::publish`]), and checks once for each
//! batch whether the driver wants an interrupt ([`Ring::should_interrupt`]). While it is busy it suppresses
//! the driver's kicks ([`Ring::suppress_kicks`]); before it sleeps it enables them and checks again
//! ([`Ring::enable_kicks`]).
//!
//! An error means that the driver violates the specification, so the position of the next chain is unknown.
//! The ring stays unchanged; the caller stops it, and the device needs a reset.

mod area;
mod area_packed;
mod chain;
#[cfg(all(test, loom))]
mod models;
pub(crate) mod notify;
mod packed;
mod split;
#[cfg(all(test, not(loom)))]
mod tests;

pub(crate) use area::{Descriptor, SplitArea, release};
pub(crate) use area_packed::PackedArea;
pub use chain::{Chain, Head};
pub(crate) use packed::Cursor;
use packed::PackedRing;
use split::SplitRing;

use crate::Features;
use crate::blk::{S_OK, Ticket};
use crate::inflight::Inflight;
use crate::memory::GuestMemory;
use std::fmt;
use std::sync::Arc;

/// Addresses of a virtqueue's parts, and limits of its chains.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Layout {
    /// Number of descriptors.
    pub size: u16,
    /// Front-end's address of the descriptor table or ring.
    pub descriptors: u64,
    /// Front-end's address of the driver area: the available ring, or the driver's event suppression.
    pub driver: u64,
    /// Front-end's address of the device area: the used ring, or the device's event suppression.
    pub device: u64,
    /// Maximum number of descriptors of a chain, including those of an indirect table: `seg_max` plus two
    /// for header and status.
    pub chain_max: u16,
}

/// Position of a ring, as `GET_VRING_BASE` and `SET_VRING_BASE` transfer it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Position {
    /// Next index to pop.
    pub available: u16,
    /// Wrap counter of `available` (packed).
    pub available_wrap: bool,
    /// Next index to push. A split ring reads it from its used ring, and ignores this one.
    pub used: u16,
    /// Wrap counter of `used` (packed).
    pub used_wrap: bool,
}

impl Position {
    /// Position of a new ring.
    pub const START: Position = Position { available: 0, available_wrap: true, used: 0, used_wrap: true };

    /// Decodes the `num` of `SET_VRING_BASE`: the index (split), or 15-bit indexes with their wrap counters
    /// (packed).
    pub fn from_base(base: u32, features: Features) -> Position {
        if !features.contains(Features::RING_PACKED) {
            return Position { available: base as u16, ..Position::START };
        }
        let half = |half: u32| ((half & 0x7fff) as u16, half & 0x8000 != 0);
        let ((available, available_wrap), (used, used_wrap)) = (half(base), half(base >> 16));
        Position { available, available_wrap, used, used_wrap }
    }

    /// Encodes the `num` of `GET_VRING_BASE`.
    pub fn to_base(self, features: Features) -> u32 {
        if !features.contains(Features::RING_PACKED) {
            return self.available.into();
        }
        let half = |index: u16, wrap: bool| u32::from(index & 0x7fff) | u32::from(wrap) << 15;
        half(self.available, self.available_wrap) | half(self.used, self.used_wrap) << 16
    }
}

/// Reason why a ring cannot start.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum SetupError {
    /// The size is 0, above 32768, or not a power of two for a split ring.
    #[error("a queue of {0} descriptors")]
    Size(u16),
    /// The descriptor table or ring is not aligned or not in one region of guest memory.
    #[error("the descriptor area is misaligned or outside of guest memory")]
    Descriptors,
    /// The driver area is not aligned or not in one region of guest memory.
    #[error("the driver area is misaligned or outside of guest memory")]
    Driver,
    /// The device area is not aligned or not in one region of guest memory.
    #[error("the device area is misaligned or outside of guest memory")]
    Device,
    /// The position is outside of the ring.
    #[error("the ring would start outside of the descriptor area")]
    Position,
    /// The record of requests in flight is for another kind of ring, or for a smaller one.
    #[error("the record of requests in flight does not fit the ring")]
    Record,
}

/// Violation of the specification by the driver: the device needs a reset.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum RingError {
    /// The driver made more entries available than the queue has descriptors.
    #[error("more made available than the queue has descriptors")]
    Index,
    /// A descriptor index is not less than the number of descriptors.
    #[error("a descriptor index past the end of its table")]
    Descriptor,
    /// A chain loops, or has more descriptors than the limit or more spans than the [`Chain`] has space
    /// for.
    #[error("a descriptor chain that is too long or loops")]
    TooLong,
    /// A descriptor refers to an address outside guest memory, or its range overflows.
    #[error("a descriptor outside of guest memory")]
    Address,
    /// A device-readable descriptor follows a device-writable one.
    #[error("a readable descriptor after a writable one")]
    ReadableAfterWritable,
    /// An indirect descriptor was not negotiated, has a next descriptor, or is in an indirect table.
    #[error("an indirect descriptor where none is allowed")]
    Indirect,
    /// The length of an indirect table is 0 or not a multiple of 16.
    #[error("an indirect table whose length is no positive multiple of 16")]
    TableLength,
}

enum Kind {
    Split(SplitRing),
    Packed(PackedRing),
}

/// The device side of a virtqueue of either kind.
pub struct Ring {
    kind: Kind,
    layout: Layout,
    features: Features,
}

/// Calls a method of either kind.
macro_rules! either {
    ($ring:expr, $inner:ident => $call:expr) => {
        match $ring {
            Kind::Split($inner) => $call,
            Kind::Packed($inner) => $call,
        }
    };
}

impl Ring {
    /// Starts a ring at a position. `features` are those that the driver acknowledged.
    ///
    /// # Errors
    /// The size is not valid for this kind of ring, a part of it is misaligned or outside guest memory, or
    /// the position is outside the ring.
    pub fn new(
        memory: Arc<GuestMemory>,
        layout: Layout,
        features: Features,
        position: Position,
    ) -> Result<Ring, SetupError> {
        let kind = match features.contains(Features::RING_PACKED) {
            false => Kind::Split(SplitRing::new(memory, &layout, features, position)?),
            true => Kind::Packed(PackedRing::new(memory, &layout, features, position)?),
        };
        Ok(Ring { kind, layout, features })
    }

    /// Returns the memory table that descriptor addresses refer to.
    #[inline]
    pub fn memory(&self) -> &Arc<GuestMemory> {
        either!(&self.kind, ring => ring.memory())
    }

    /// Returns the features that the ring was started with.
    pub fn features(&self) -> Features {
        self.features
    }

    /// Returns the addresses of the ring's parts.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Replaces the memory table. Spans of the old table are invalid in the new one, unless that only has
    /// additional regions or another dirty log.
    ///
    /// # Errors
    /// A part of the ring is not in the new table; the ring keeps the old one.
    pub fn replace_memory(&mut self, memory: Arc<GuestMemory>) -> Result<(), SetupError> {
        let layout = self.layout;
        either!(&mut self.kind, ring => ring.replace_memory(memory, &layout))
    }

    /// Records requests in flight; call it before the first chain is popped. If the record was written by
    /// another process, the ring continues where that process ended, regardless of its start position:
    /// [`pop`](Self::pop) first returns the chains that were in flight, in their order. Returns their
    /// number.
    ///
    /// # Errors
    /// The record is for another kind of ring, or for a smaller one.
    pub fn track(&mut self, inflight: Inflight) -> Result<usize, SetupError> {
        let is_packed = matches!(self.kind, Kind::Packed(_));
        let words = inflight.words(self.layout.size, is_packed).ok_or(SetupError::Record)?;
        Ok(either!(&mut self.kind, ring => ring.track(words)))
    }

    /// Returns the position at which the ring would continue. Chains that were popped and not pushed are
    /// lost there.
    pub fn position(&self) -> Position {
        either!(&self.kind, ring => ring.position())
    }

    /// Returns whether no chain can be popped now.
    #[inline]
    pub fn is_empty(&self) -> bool {
        either!(&self.kind, ring => ring.is_empty())
    }

    /// Reads the next chain that the driver made available. Returns `false` if there is none.
    ///
    /// # Errors
    /// The driver violates the specification. The ring does not advance: calling again fails again.
    #[inline]
    pub fn pop(&mut self, chain: &mut Chain) -> Result<bool, RingError> {
        either!(&mut self.kind, ring => ring.pop(chain))
    }

    /// Returns a chain to the driver, with the number of bytes written to its writable memory. The driver
    /// sees it after [`publish`](Self::publish).
    #[inline]
    pub fn push(&mut self, head: Head, written: u32) {
        either!(&mut self.kind, ring => ring.push(head, written));
    }

    /// Stores the status of a virtio-blk request and returns its chain to the driver.
    #[inline]
    pub fn complete(&mut self, ticket: &Ticket, status: u8) {
        // The store can only be refused because the span belongs to another table.
        let _ = self.memory().store_byte(ticket.status, status);
        let written = match (status, ticket.has_data) {
            (S_OK, _) => ticket.written,
            (_, true) => 0,
            (_, false) => 1,
        };
        self.push(ticket.head, written);
    }

    /// Makes the pushed chains visible to the driver, with one store.
    #[inline]
    pub fn publish(&mut self) {
        either!(&mut self.kind, ring => ring.publish());
    }

    /// Returns whether the driver wants an interrupt for the chains published since the last call. Call it
    /// once after each published batch: it costs a memory fence.
    #[inline]
    #[must_use]
    pub fn should_interrupt(&mut self) -> bool {
        either!(&mut self.kind, ring => ring.should_interrupt())
    }

    /// Requests that the driver does not kick, because the queue is polled. A kick may still come.
    #[inline]
    pub fn suppress_kicks(&mut self) {
        either!(&mut self.kind, ring => ring.suppress_kicks());
    }

    /// Requests a kick when the driver makes the next chain available. Returns `true` if a chain is already
    /// available: its kick may never come, so the caller must pop again before it sleeps.
    #[inline]
    #[must_use]
    pub fn enable_kicks(&mut self) -> bool {
        either!(&mut self.kind, ring => ring.enable_kicks())
    }
}

impl fmt::Debug for Ring {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ring").field("layout", &self.layout).field("position", &self.position()).finish()
    }
}
