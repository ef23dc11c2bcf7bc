//! Notification suppression: the protocol by which a publishing side and a sleeping side agree on a
//! notification.
//!
//! The sleeping side states which entry it wants to be notified of, and then checks again for entries. The
//! publishing side publishes, and then reads which notification is wanted. A full fence between the two
//! steps on each side guarantees that at least one side sees the other's store: either the notification is
//! sent, or the entry is found. Both directions, driver to device (kicks) and device to driver
//! (interrupts), use these functions; `models` checks their interleavings with loom.

use super::packed::Cursor;
use std::sync::atomic::Ordering::{self, Acquire, Relaxed, SeqCst};
use std::sync::atomic::{AtomicU16, AtomicU32, fence};

/// A little-endian word that driver and device share.
pub(crate) trait Word<T> {
    fn get(&self, order: Ordering) -> T;
    fn set(&self, value: T, order: Ordering);
    /// Orders all earlier accesses, including those of other words, before all later ones.
    fn full_fence();
}

macro_rules! word {
    ($atomic:ty, $value:ty, $fence:path) => {
        impl Word<$value> for $atomic {
            #[inline]
            fn get(&self, order: Ordering) -> $value {
                <$value>::from_le(self.load(order))
            }

            #[inline]
            fn set(&self, value: $value, order: Ordering) {
                self.store(value.to_le(), order);
            }

            #[inline]
            fn full_fence() {
                $fence(SeqCst);
            }
        }
    };
}

word!(AtomicU16, u16, fence);
word!(AtomicU32, u32, fence);
#[cfg(loom)]
word!(loom::sync::atomic::AtomicU16, u16, loom::sync::atomic::fence);
#[cfg(loom)]
word!(loom::sync::atomic::AtomicU32, u32, loom::sync::atomic::fence);

/// Requests a notification when the index `next` is published. Returns whether it is already published, in
/// which case none may come.
#[inline]
pub(crate) fn arm_at<W: Word<u16>>(event: &W, published: &W, next: u16) -> bool {
    event.set(next, Relaxed);
    W::full_fence();
    published.get(Acquire) != next
}

/// Requests a notification whenever an index is published, by clearing the flag that suppresses it. Returns
/// whether an index other than `next` is already published.
#[inline]
pub(crate) fn arm_flag<W: Word<u16>>(flags: &W, published: &W, next: u16) -> bool {
    flags.set(0, Relaxed);
    W::full_fence();
    published.get(Acquire) != next
}

/// Returns whether the other side wants to be notified of the published indexes from `old` up to but not
/// including `new`.
#[inline]
pub(crate) fn is_wanted_at<W: Word<u16>>(event: &W, old: u16, new: u16) -> bool {
    W::full_fence();
    crosses(event.get(Relaxed), old, new)
}

/// Returns whether the other side allows notifications: it has not set the flag that suppresses them.
#[inline]
pub(crate) fn is_wanted_by_flag<W: Word<u16>>(flags: &W) -> bool {
    W::full_fence();
    flags.get(Relaxed) & SUPPRESS == 0
}

/// `VIRTQ_AVAIL_F_NO_INTERRUPT` and `VIRTQ_USED_F_NO_NOTIFY`.
pub(crate) const SUPPRESS: u16 = 1;

/// Returns whether `event` is one of the indexes from `old` up to but not including `new`
/// (`vring_need_event`).
#[inline]
pub(crate) fn crosses(event: u16, old: u16, new: u16) -> bool {
    new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
}

/// Flag of a packed descriptor: equals the wrap counter once the driver has made it available.
const AVAILABLE: u16 = 1 << 7;
/// Flag of a packed descriptor: equals the wrap counter once the device has used it.
const USED: u16 = 1 << 15;

/// `RING_EVENT_FLAGS_ENABLE`, in the high half of the event suppression structure.
pub(crate) const EVENT_ENABLE: u32 = 0;
/// `RING_EVENT_FLAGS_DISABLE`.
pub(crate) const EVENT_DISABLE: u32 = 1 << 16;
/// `RING_EVENT_FLAGS_DESC`: notify at the descriptor in the low half.
const EVENT_AT: u32 = 2 << 16;
const EVENT_FLAGS: u32 = 3 << 16;

/// Returns whether a packed descriptor is available to a device whose wrap counter is `wrap`.
#[inline]
pub(crate) fn is_available(flags: u16, wrap: bool) -> bool {
    (flags & AVAILABLE != 0) == wrap && (flags & USED != 0) != wrap
}

/// Returns whether a packed descriptor is used, to a driver whose wrap counter is `wrap`.
#[inline]
pub(crate) fn is_used(flags: u16, wrap: bool) -> bool {
    (flags & AVAILABLE != 0) == wrap && (flags & USED != 0) == wrap
}

/// Returns the flags with which a driver makes a descriptor available.
#[inline]
pub(crate) fn available_flags(wrap: bool) -> u16 {
    if wrap { AVAILABLE } else { USED }
}

/// Returns the flags with which a device marks a descriptor used.
#[inline]
pub(crate) fn used_flags(wrap: bool) -> u16 {
    if wrap { AVAILABLE | USED } else { 0 }
}

/// Returns the event suppression that requests a notification at a descriptor.
#[inline]
pub(crate) fn event_at(cursor: Cursor) -> u32 {
    EVENT_AT | u32::from(cursor.bits())
}

/// Requests a notification as specified by `event`. Returns whether the next descriptor, whose flags are
/// given, has already been handed over.
#[inline]
pub(crate) fn arm_packed<E: Word<u32>, F: Word<u16>>(
    suppression: &E,
    event: u32,
    flags: &F,
    is_handed_over: impl FnOnce(u16) -> bool,
) -> bool {
    suppression.set(event, Relaxed);
    E::full_fence();
    is_handed_over(flags.get(Acquire))
}

/// Returns whether the other side wants to be notified of the `added` published descriptors before `next`.
#[inline]
pub(crate) fn is_wanted_packed<E: Word<u32>>(suppression: &E, next: Cursor, added: u16, size: u16) -> bool {
    E::full_fence();
    let event = suppression.get(Relaxed);
    match event & EVENT_FLAGS {
        EVENT_DISABLE => false,
        EVENT_AT => {
            let (index, wrap) = (event as u16 & 0x7fff, event & 0x8000 != 0);
            // An event of the previous lap lies `size` descriptors earlier.
            let index = if wrap == next.wrap { index } else { index.wrapping_sub(size) };
            crosses(index, next.index.wrapping_sub(added), next.index)
        }
        // The reserved value counts as well: an unnecessary notification does no harm.
        _ => true,
    }
}
