//! Record of requests in flight, in memory that the front-end keeps when this process dies.
//!
//! A ring that is tracked ([`Ring::track`](crate::ring::Ring::track)) records each chain when it is popped,
//! and removes it when it is published. A new process continues with the same memory: it first pops the
//! chains that were in flight again, in order, but none that the driver has seen as used.
//!
//! The process may die between any two stores. The stores of each step are in the order of the
//! specification; stores that commit a step are releases, so that the compiler preserves that order too.
//!
//! Source: "Inflight I/O tracking" in vhost-user.rst, with the same field names.

mod packed;
mod split;
#[cfg(all(test, not(loom)))]
mod tests;

pub(crate) use packed::PackedRecord;
pub(crate) use split::SplitRecord;

use crate::Features;
use crate::memory::{Mapping, Words};
use std::sync::Arc;

/// Alignment of each queue's part, as in other back-ends.
const ALIGN: u64 = 64;
/// Version of both layouts; 0 in memory that is not initialised.
const VERSION: u16 = 1;

/// Returns the bytes of the record of one queue.
pub fn queue_len(size: u16, features: Features) -> u64 {
    let (header, entry) = match features.contains(Features::RING_PACKED) {
        false => (split::HEADER, split::ENTRY),
        true => (packed::HEADER, packed::ENTRY),
    };
    ((header + entry * usize::from(size)) as u64).next_multiple_of(ALIGN)
}

/// The record of one queue.
#[derive(Debug)]
pub struct Inflight {
    words: Words,
    size: u16,
    is_packed: bool,
}

impl Inflight {
    /// Finds the record of a queue in the memory of all queues, each of which has at most `size`
    /// descriptors. Returns `None` if it is not within the mapping.
    pub fn of_queue(mapping: Arc<Mapping>, queue: u16, size: u16, features: Features) -> Option<Inflight> {
        let len = queue_len(size, features);
        let words = Words::new(mapping, len * u64::from(queue), len)?;
        Some(Inflight { words, size, is_packed: features.contains(Features::RING_PACKED) })
    }

    /// Returns the words if the record is of this kind and has space for a queue of `size` descriptors.
    pub(crate) fn words(self, size: u16, is_packed: bool) -> Option<Words> {
        (self.is_packed == is_packed && self.size >= size).then_some(self.words)
    }
}
