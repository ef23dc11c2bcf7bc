//! Words in memory shared with a front-end, addressed by offset.

#![expect(unsafe_code, reason = "turns offsets that were checked into references to atomics")]

use super::Mapping;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64};

/// A part of a mapping. Accesses outside it are a bug, and panic.
#[derive(Debug)]
pub(crate) struct Words {
    mapping: Arc<Mapping>,
    start: usize,
    len: usize,
}

macro_rules! word {
    ($name:ident, $atomic:ty) => {
        #[inline]
        pub(crate) fn $name(&self, at: usize) -> &$atomic {
            const LEN: usize = size_of::<$atomic>();
            assert!(at.is_multiple_of(LEN) && at + LEN <= self.len, "a word outside of its part");
            // SAFETY: within the mapping, which lives as long as `self`; the part starts on a multiple of 8.
            unsafe { self.mapping.base().0.add(self.start + at).cast::<$atomic>().as_ref() }
        }
    };
}

impl Words {
    /// Creates the part of `len` bytes from `start`. Returns `None` if it is not within the mapping or not
    /// aligned to 8.
    pub(crate) fn new(mapping: Arc<Mapping>, start: u64, len: u64) -> Option<Words> {
        let is_inside = start.checked_add(len).is_some_and(|end| end <= mapping.len());
        let (start, len) = (usize::try_from(start).ok()?, usize::try_from(len).ok()?);
        let address = mapping.base().0.as_ptr().addr().wrapping_add(start);
        (is_inside && address.is_multiple_of(8)).then_some(Words { mapping, start, len })
    }

    word!(u8, AtomicU8);
    word!(u16, AtomicU16);
    word!(u32, AtomicU32);
    word!(u64, AtomicU64);
}
