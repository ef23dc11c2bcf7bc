//! The dirty log of live migration: a bitmap in memory shared with the front-end, with one bit for each
//! page.
//!
//! Source: "Migration" in vhost-user.rst: page N is bit N % 8 of byte N / 8, set with an atomic operation.

#![expect(unsafe_code, reason = "sets bits in shared memory")]

use super::Mapping;
use std::sync::Arc;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::sync::atomic::{AtomicU8, fence};

/// `VHOST_LOG_PAGE`.
const PAGE_SHIFT: u32 = 12;

/// A dirty log.
#[derive(Debug)]
pub struct DirtyLog {
    mapping: Arc<Mapping>,
    /// Bytes of the bitmap.
    len: u64,
}

impl DirtyLog {
    /// Uses the first `len` bytes of a mapping. Returns `None` if it is shorter.
    pub fn new(mapping: Arc<Mapping>, len: u64) -> Option<Arc<DirtyLog>> {
        (len <= mapping.len()).then(|| Arc::new(DirtyLog { mapping, len }))
    }

    /// Marks the pages of `len` bytes from a guest address. Pages past the end of the bitmap are ignored,
    /// because it covers all memory that is migrated.
    pub fn mark(&self, guest: u64, len: u64) {
        let Some(last) = len.checked_sub(1).map(|more| guest.saturating_add(more) >> PAGE_SHIFT) else {
            return;
        };
        // If the bit is already set, the locked operation is unnecessary. The front-end clears a bit before
        // it copies the page, so a bit that is still set after the page was written means that the copy is
        // yet to come. The fence orders the write before the load.
        fence(SeqCst);
        let end = last.min((self.len * 8).saturating_sub(1));
        for page in guest >> PAGE_SHIFT..=end {
            let (at, bit) = (page / 8, 1u8 << (page % 8));
            if at >= self.len {
                return;
            }
            // SAFETY: the mapping has at least `len` bytes and lives as long as `self`.
            let byte = unsafe { self.mapping.base().0.add(at as usize).cast::<AtomicU8>().as_ref() };
            if byte.load(Relaxed) & bit == 0 {
                byte.fetch_or(bit, SeqCst);
            }
        }
    }
}
