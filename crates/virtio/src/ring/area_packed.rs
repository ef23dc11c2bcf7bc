//! The memory of a packed virtqueue, with the same invariant as `area`.

#![expect(unsafe_code, reason = "turns indexes that were checked into references to atomics")]

use super::area::{DESCRIPTOR_LEN, Descriptor, Part, SIZE_MAX, part};
use super::notify::Word;
use super::{Layout, SetupError};
use crate::memory::GuestMemory;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicU16, AtomicU32, AtomicU64};

/// Memory of a packed virtqueue.
pub(crate) struct PackedArea {
    memory: Arc<GuestMemory>,
    descriptors: Part,
    /// Event suppression of the driver: offset and wrap counter in the low half, flags in the high half.
    driver: Part,
    /// Event suppression of the device.
    device: Part,
    size: u16,
}

// SAFETY: addresses into memory that `memory` keeps mapped; all accesses are atomic.
unsafe impl Send for PackedArea {}

impl PackedArea {
    pub(crate) fn find(memory: Arc<GuestMemory>, layout: &Layout) -> Result<PackedArea, SetupError> {
        let size = layout.size;
        if size == 0 || size > SIZE_MAX {
            return Err(SetupError::Size(size));
        }
        let descriptors = part(&memory, layout.descriptors, DESCRIPTOR_LEN * u32::from(size), 16);
        Ok(PackedArea {
            descriptors: descriptors.ok_or(SetupError::Descriptors)?,
            driver: part(&memory, layout.driver, 4, 4).ok_or(SetupError::Driver)?,
            device: part(&memory, layout.device, 4, 4).ok_or(SetupError::Device)?,
            size,
            memory,
        })
    }

    pub(crate) fn memory(&self) -> &Arc<GuestMemory> {
        &self.memory
    }

    pub(crate) fn size(&self) -> u16 {
        self.size
    }

    /// Returns a word of a descriptor, `at` bytes from its start.
    #[inline]
    fn word<T>(&self, index: u16, at: usize) -> &T {
        assert!(index < self.size, "the callers keep indexes below the size");
        // SAFETY: `size` descriptors of 16 bytes start there, aligned to 16; the callers pass the offset of an
        // atomic integer within a descriptor.
        unsafe { self.descriptors.base.add(usize::from(index) * 16 + at).cast::<T>().as_ref() }
    }

    /// Loads a descriptor.
    #[inline]
    pub(crate) fn descriptor(&self, index: u16) -> Descriptor {
        let words = [self.word::<AtomicU64>(index, 0), self.word::<AtomicU64>(index, 8)];
        Descriptor::from_words(words.map(|word| u64::from_le(word.load(Relaxed))))
    }

    /// Returns the flags of a descriptor, which transfer it to the other side.
    #[inline]
    pub(crate) fn flags(&self, index: u16) -> &AtomicU16 {
        self.word(index, 14)
    }

    /// Stores all fields of a descriptor except its flags.
    #[inline]
    pub(crate) fn store_descriptor(&self, index: u16, address: u64, len: u32, id: u16) {
        self.word::<AtomicU64>(index, 0).store(address.to_le(), Relaxed);
        self.store_used(index, len, id);
    }

    /// Stores length and id of a used descriptor.
    #[inline]
    pub(crate) fn store_used(&self, index: u16, len: u32, id: u16) {
        self.word::<AtomicU32>(index, 8).set(len, Relaxed);
        self.word::<AtomicU16>(index, 12).set(id, Relaxed);
    }

    /// Returns the event suppression of the driver, which the device reads.
    #[inline]
    pub(crate) fn driver_event(&self) -> &AtomicU32 {
        // SAFETY: four bytes that are mapped and aligned.
        unsafe { self.driver.base.cast().as_ref() }
    }

    /// Returns the event suppression of the device, which the driver reads.
    #[inline]
    pub(crate) fn device_event(&self) -> &AtomicU32 {
        // SAFETY: as above.
        unsafe { self.device.base.cast().as_ref() }
    }

    /// Records in the dirty log that a descriptor was written.
    #[inline]
    pub(crate) fn log_descriptor(&self, index: u16) {
        if self.memory.log().is_some() {
            let from = self.descriptors.span.split_at(u32::from(index) * DESCRIPTOR_LEN).1;
            self.memory.mark_written(from.split_at(DESCRIPTOR_LEN).0);
        }
    }

    /// Records in the dirty log that the device's event suppression was written.
    #[inline]
    pub(crate) fn log_event(&self) {
        self.memory.mark_written(self.device.span);
    }
}
