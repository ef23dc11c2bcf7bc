//! The memory of a virtqueue: its parts, located once and accessed by index.
//!
//! *Invariant:* an area keeps alive the memory table in which its parts were found. Every part is aligned
//! and within one region, and indexes are reduced to the size of the queue, so every access is within the
//! part.

#![expect(unsafe_code, reason = "turns indexes that were reduced into references to atomics")]

use super::{Layout, SetupError};
use crate::memory::{GuestMemory, Span, load_pair};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::Ordering::{Relaxed, Release};
use std::sync::atomic::{AtomicU16, AtomicU32, AtomicU64};

/// Bytes of a descriptor of either kind.
pub(crate) const DESCRIPTOR_LEN: u32 = 16;
/// Maximum number of descriptors of a queue of either kind.
pub(super) const SIZE_MAX: u16 = 1 << 15;

/// A descriptor, loaded exactly once: the address, and a word with the length in its low half. The high
/// half has flags and next index (split), or id and flags (packed).
#[derive(Clone, Copy)]
pub(crate) struct Descriptor {
    pub(crate) address: u64,
    word: u64,
}

impl Descriptor {
    pub(crate) fn from_words([address, word]: [u64; 2]) -> Descriptor {
        Descriptor { address, word }
    }

    #[inline]
    pub(crate) fn len(self) -> u32 {
        self.word as u32
    }

    /// Returns the flags of a split descriptor, or the id of a packed one.
    #[inline]
    pub(crate) fn third(self) -> u16 {
        (self.word >> 32) as u16
    }

    /// Returns the next index of a split descriptor, or the flags of a packed one.
    #[inline]
    pub(crate) fn fourth(self) -> u16 {
        (self.word >> 48) as u16
    }
}

/// A part of a queue.
pub(super) struct Part {
    pub(super) base: NonNull<u8>,
    /// Span of the part, for the dirty log.
    pub(super) span: Span,
}

/// Finds `len` bytes at a front-end's address, aligned to `align`.
pub(super) fn part(memory: &GuestMemory, user: u64, len: u32, align: u64) -> Option<Part> {
    let span = memory.translate_user(user, len)?;
    let base = memory.address(span)?;
    base.as_ptr().addr().is_multiple_of(align as usize).then_some(Part { base, span })
}

/// Memory of a split virtqueue.
pub(crate) struct SplitArea {
    memory: Arc<GuestMemory>,
    descriptors: NonNull<u8>,
    /// flags, idx, ring[size], used_event.
    available: NonNull<AtomicU16>,
    /// flags, idx, ring[size] of id and length, avail_event.
    used: Part,
    /// Size minus one; the size is a power of two.
    mask: u16,
}

// SAFETY: addresses into memory that `memory` keeps mapped; all accesses are atomic.
unsafe impl Send for SplitArea {}

impl SplitArea {
    pub(crate) fn find(memory: Arc<GuestMemory>, layout: &Layout) -> Result<SplitArea, SetupError> {
        let size = layout.size;
        // 2.7: "Queue Size value is always a power of 2. The maximum Queue Size value is 32768."
        if !size.is_power_of_two() || size > SIZE_MAX {
            return Err(SetupError::Size(size));
        }
        let count = u32::from(size);
        let descriptors = part(&memory, layout.descriptors, DESCRIPTOR_LEN * count, 16);
        let available = part(&memory, layout.driver, 6 + 2 * count, 2);
        let used = part(&memory, layout.device, 6 + 8 * count, 4);
        Ok(SplitArea {
            descriptors: descriptors.ok_or(SetupError::Descriptors)?.base,
            available: available.ok_or(SetupError::Driver)?.base.cast(),
            used: used.ok_or(SetupError::Device)?,
            mask: size - 1,
            memory,
        })
    }

    pub(crate) fn memory(&self) -> &Arc<GuestMemory> {
        &self.memory
    }

    pub(crate) fn size(&self) -> u16 {
        self.mask + 1
    }

    #[inline]
    fn words(&self, index: u16) -> (&AtomicU64, &AtomicU64) {
        let at = usize::from(index & self.mask) * 2;
        let words = self.descriptors.cast::<AtomicU64>();
        // SAFETY: `size` descriptors of two words start there, aligned to 16.
        unsafe { (words.add(at).as_ref(), words.add(at + 1).as_ref()) }
    }

    /// Loads a descriptor.
    #[inline]
    pub(crate) fn descriptor(&self, index: u16) -> Descriptor {
        let (address, word) = self.words(index);
        Descriptor::from_words([address, word].map(|half| u64::from_le(half.load(Relaxed))))
    }

    /// Stores a descriptor, as the driver does.
    pub(crate) fn store_descriptor(&self, index: u16, address: u64, len: u32, flags: u16, next: u16) {
        let (first, second) = self.words(index);
        let word = u64::from(len) | u64::from(flags) << 32 | u64::from(next) << 48;
        first.store(address.to_le(), Relaxed);
        second.store(word.to_le(), Relaxed);
    }

    #[inline]
    fn available_at(&self, at: usize) -> &AtomicU16 {
        debug_assert!(at < usize::from(self.mask) + 4);
        // SAFETY: the callers pass an index below size + 3, the number of words, aligned to 2.
        unsafe { self.available.add(at).as_ref() }
    }

    /// Returns `avail->flags`.
    #[inline]
    pub(crate) fn available_flags(&self) -> &AtomicU16 {
        self.available_at(0)
    }

    /// Returns `avail->idx`.
    #[inline]
    pub(crate) fn available_index(&self) -> &AtomicU16 {
        self.available_at(1)
    }

    /// Returns the entry of the available ring at a free-running index.
    #[inline]
    pub(crate) fn available_entry(&self, index: u16) -> &AtomicU16 {
        self.available_at(2 + usize::from(index & self.mask))
    }

    /// Returns `used_event`, after the available ring.
    #[inline]
    pub(crate) fn used_event(&self) -> &AtomicU16 {
        self.available_at(usize::from(self.mask) + 3)
    }

    #[inline]
    fn used_at<T>(&self, at: usize) -> &T {
        debug_assert!(at + size_of::<T>() <= usize::from(self.mask) * 8 + 14);
        // SAFETY: the callers pass offsets of words within the used ring, which is aligned to 4, with the type
        // of the word: an atomic integer.
        unsafe { self.used.base.add(at).cast::<T>().as_ref() }
    }

    /// Returns `used->flags`.
    #[inline]
    pub(crate) fn used_flags(&self) -> &AtomicU16 {
        self.used_at(0)
    }

    /// Returns `used->idx`.
    #[inline]
    pub(crate) fn used_index(&self) -> &AtomicU16 {
        self.used_at(2)
    }

    /// Returns id and length in the entry of the used ring at a free-running index.
    #[inline]
    pub(crate) fn used_entry(&self, index: u16) -> (&AtomicU32, &AtomicU32) {
        let at = 4 + usize::from(index & self.mask) * 8;
        (self.used_at(at), self.used_at(at + 4))
    }

    /// Returns `avail_event`, after the used ring.
    #[inline]
    pub(crate) fn available_event(&self) -> &AtomicU16 {
        self.used_at(4 + (usize::from(self.mask) + 1) * 8)
    }

    /// Records in the dirty log that `len` bytes at an offset of the used ring were written.
    #[inline]
    pub(crate) fn log_used(&self, at: u32, len: u32) {
        if self.memory.log().is_some() {
            self.memory.mark_written(self.used.span.split_at(at).1.split_at(len).0);
        }
    }
}

/// A table of indirect descriptors.
pub(crate) struct Table<'a> {
    memory: &'a GuestMemory,
    address: u64,
    /// Address of the first byte; `None` if the driver placed the table across two regions.
    base: Option<NonNull<u8>>,
    /// Number of descriptors.
    pub(crate) count: u32,
}

impl<'a> Table<'a> {
    /// Finds the table of `len` bytes, a multiple of the descriptor length.
    #[inline]
    pub(crate) fn find(memory: &'a GuestMemory, address: u64, len: u32, hint: &mut u16) -> Option<Table<'a>> {
        let span = memory.translate_some(address, len, hint)?;
        let base = if span.len == len { memory.address(span) } else { None };
        Some(Table { memory, address, base, count: len / DESCRIPTOR_LEN })
    }

    /// Loads a descriptor. Returns `None` if it is past the end, or outside guest memory.
    #[inline]
    pub(crate) fn descriptor(&self, index: u32) -> Option<Descriptor> {
        if index >= self.count {
            return None;
        }
        let Some(base) = self.base else { return self.descriptor_across(index) };
        // SAFETY: `count` descriptors start at `base`, in memory that outlives `self`.
        Some(Descriptor::from_words(unsafe { load_pair(base.add((index * DESCRIPTOR_LEN) as usize)) }))
    }

    /// Loads a descriptor of a table that crosses the end of a region.
    #[cold]
    fn descriptor_across(&self, index: u32) -> Option<Descriptor> {
        let address = self.address.checked_add(u64::from(index * DESCRIPTOR_LEN))?;
        let mut bytes = [0; DESCRIPTOR_LEN as usize];
        for (at, byte) in bytes.iter_mut().enumerate() {
            let span = self.memory.translate(address.checked_add(at as u64)?, 1)?;
            self.memory.read(span, std::slice::from_mut(byte)).then_some(())?;
        }
        let words = bytes.as_chunks::<8>().0;
        Some(Descriptor::from_words([u64::from_le_bytes(words[0]), u64::from_le_bytes(words[1])]))
    }
}

/// Stores an index, ordered after all earlier stores.
#[inline]
pub(crate) fn release(index: &AtomicU16, value: u16) {
    index.store(value.to_le(), Release);
}
