//! The driver side of a virtqueue, split or packed.

use super::packed::PackedDriver;
use super::split::SplitDriver;
use crate::Features;
use crate::memory::GuestMemory;
use crate::ring::notify::Word;
use crate::ring::{Layout, SetupError, release};
use std::sync::Arc;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

/// A chain that the device returned.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Used {
    /// The id that [`Driver::add`] returned.
    pub id: u16,
    /// Bytes that the device wrote.
    pub written: u32,
}

/// The driver side of a virtqueue.
pub struct Driver(Kind);

enum Kind {
    Split(SplitDriver),
    Packed(PackedDriver),
}

/// Calls a method of either kind.
macro_rules! either {
    ($driver:expr, $inner:ident => $call:expr) => {
        match $driver {
            Kind::Split($inner) => $call,
            Kind::Packed($inner) => $call,
        }
    };
}

impl Driver {
    /// Starts a new queue, whose memory is all zeroes.
    ///
    /// # Errors
    /// See [`SetupError`].
    pub fn new(memory: Arc<GuestMemory>, layout: &Layout, features: Features) -> Result<Driver, SetupError> {
        Ok(Driver(match features.contains(Features::RING_PACKED) {
            false => Kind::Split(SplitDriver::new(memory, layout, features)?),
            true => Kind::Packed(PackedDriver::new(memory, layout, features)?),
        }))
    }

    /// Returns the number of free descriptors.
    pub fn free(&self) -> usize {
        either!(&self.0, driver => driver.free())
    }

    /// Adds a chain of ranges (guest address and length) that the device reads, and ranges that it writes.
    /// Returns its id, or `None` if there are not enough free descriptors. The device sees the chain after
    /// [`publish`](Self::publish).
    ///
    /// # Panics
    /// If there is no range.
    #[inline]
    pub fn add(&mut self, readable: &[(u64, u32)], writable: &[(u64, u32)]) -> Option<u16> {
        either!(&mut self.0, driver => driver.add(readable, writable))
    }

    /// Adds a table of indirect descriptors, which [`Forge::write_table`] writes.
    #[inline]
    pub fn add_indirect(&mut self, table: u64, descriptors: u32) -> Option<u16> {
        either!(&mut self.0, driver => driver.add_indirect(table, descriptors))
    }

    /// Makes the added chains visible to the device. Returns whether the device wants a kick.
    #[inline]
    #[must_use]
    pub fn publish(&mut self) -> bool {
        either!(&mut self.0, driver => driver.publish())
    }

    /// Takes the next chain that the device has returned.
    ///
    /// # Panics
    /// If the device returned a chain that is not in flight.
    #[inline]
    pub fn take_used(&mut self) -> Option<Used> {
        either!(&mut self.0, driver => driver.take_used())
    }

    /// Requests that the device does not interrupt.
    pub fn suppress_interrupts(&mut self) {
        either!(&mut self.0, driver => driver.suppress_interrupts());
    }

    /// Requests an interrupt for the next chain that the device returns. Returns `true` if a chain has
    /// already been returned.
    #[must_use]
    pub fn enable_interrupts(&mut self) -> bool {
        either!(&mut self.0, driver => driver.enable_interrupts())
    }

    /// Returns access to the parts of the queue, for values that a correct driver never writes.
    pub fn forge(&mut self) -> Forge<'_> {
        Forge(&self.0)
    }
}

/// Writes parts of a queue with arbitrary values.
pub struct Forge<'a>(&'a Kind);

impl Forge<'_> {
    /// Writes a descriptor; `link` is the next index (split) or the id (packed).
    pub fn descriptor(&self, index: u16, address: u64, len: u32, flags: u16, link: u16) {
        match self.0 {
            Kind::Split(driver) => driver.area().store_descriptor(index, address, len, flags, link),
            Kind::Packed(driver) => {
                driver.area().store_descriptor(index, address, len, link);
                driver.area().flags(index).set(flags, Release);
            }
        }
    }

    /// Writes an entry of the available ring, which only a split queue has.
    pub fn available(&self, at: u16, head: u16) {
        if let Kind::Split(driver) = self.0 {
            driver.area().available_entry(at).set(head, Relaxed);
        }
    }

    /// Writes the index of the available ring, which only a split queue has.
    pub fn available_index(&self, index: u16) {
        if let Kind::Split(driver) = self.0 {
            release(driver.area().available_index(), index);
        }
    }

    /// Reads the index of the used ring. Returns `None` for a packed queue.
    pub fn used_index(&self) -> Option<u16> {
        match self.0 {
            Kind::Split(driver) => Some(driver.area().used_index().get(Acquire)),
            Kind::Packed(_) => None,
        }
    }

    /// Writes a table of indirect descriptors: address, length, flags and link of each. Those outside guest
    /// memory are omitted.
    pub fn write_table(&self, table: u64, descriptors: &[(u64, u32, u16, u16)]) {
        let (memory, is_packed) = match self.0 {
            Kind::Split(driver) => (driver.area().memory(), false),
            Kind::Packed(driver) => (driver.area().memory(), true),
        };
        for (at, &(address, len, flags, link)) in descriptors.iter().enumerate() {
            let [third, fourth] = if is_packed { [link, flags] } else { [flags, link] };
            let word = u64::from(len) | u64::from(third) << 32 | u64::from(fourth) << 48;
            let bytes = (u128::from(address) | u128::from(word) << 64).to_le_bytes();
            if let Some(span) = memory.translate(table + 16 * at as u64, 16) {
                let _ = memory.write(span, &bytes);
            }
        }
    }
}
