//! Loads, stores and copies of bytes that other processes may write at the same time.
//!
//! Words are atomic, so that each is loaded once and never torn. Copies of data are raw: a guest that
//! changes data during a transfer gets a mixture of old and new data, as with any device that accesses
//! memory directly.

#![expect(unsafe_code, reason = "turns addresses that were checked into loads and stores")]

use super::{GuestMemory, Span};
use std::ptr::NonNull;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicU8, AtomicU64};

impl GuestMemory {
    /// Returns the address of the first byte of a span, or `None` unless the whole span is in its region.
    #[inline]
    pub(crate) fn address(&self, span: Span) -> Option<NonNull<u8>> {
        let region = self.regions.get(usize::from(span.slot))?;
        // Wraps to a large number if the span belongs to another table and starts before the region.
        let inside = span.offset.wrapping_sub(region.skip);
        if inside > region.len || region.len - inside < u64::from(span.len) {
            return None;
        }
        // SAFETY: the span's bytes are within the mapping, which `described` keeps alive.
        Some(unsafe { region.base.0.add(inside as usize) })
    }

    /// Copies the first bytes of a span. Returns false, and copies nothing, if the span is shorter than the
    /// buffer or belongs to another memory table.
    #[must_use]
    #[inline]
    pub fn read(&self, span: Span, buffer: &mut [u8]) -> bool {
        let Some(from) = self.address(span).filter(|_| buffer.len() <= span.len as usize) else {
            return false;
        };
        // SAFETY: `address` checked that the span's bytes are mapped; the buffer is Rust memory, so they do
        // not overlap.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), buffer.as_mut_ptr(), buffer.len()) };
        true
    }

    /// Copies bytes to the start of a span. Returns false, and copies nothing, if the span is shorter than the
    /// bytes or belongs to another memory table.
    #[must_use]
    #[inline]
    pub fn write(&self, span: Span, bytes: &[u8]) -> bool {
        let Some(to) = self.address(span).filter(|_| bytes.len() <= span.len as usize) else {
            return false;
        };
        // SAFETY: as in `read`; the region is mapped writable.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to.as_ptr(), bytes.len()) };
        self.mark_written(Span { len: bytes.len() as u32, ..span });
        true
    }

    /// Fills a span with a byte. Returns false if the span belongs to another memory table.
    #[must_use]
    pub fn fill(&self, span: Span, byte: u8) -> bool {
        let Some(to) = self.address(span) else { return false };
        // SAFETY: as in `write`.
        unsafe { std::ptr::write_bytes(to.as_ptr(), byte, span.len as usize) };
        self.mark_written(span);
        true
    }

    /// Stores a byte: the status of a request. Returns false if the span is empty or belongs to another memory
    /// table.
    #[must_use]
    #[inline]
    pub fn store_byte(&self, span: Span, byte: u8) -> bool {
        let Some(to) = self.address(span).filter(|_| span.len > 0) else { return false };
        // SAFETY: the byte is mapped, and `AtomicU8` has its size and alignment.
        unsafe { to.cast::<AtomicU8>().as_ref() }.store(byte, Relaxed);
        self.mark_written(Span { len: 1, ..span });
        true
    }

    /// Loads two little-endian words at the start of a span of at least 16 bytes, each byte exactly once.
    /// The words are loaded atomically if the address is aligned to them; a driver need not align tables or
    /// headers.
    #[inline]
    pub(crate) fn load_pair(&self, span: Span) -> Option<[u64; 2]> {
        let from = self.address(span).filter(|_| span.len >= 16)?;
        // SAFETY: 16 mapped bytes start there.
        Some(unsafe { load_pair(from) })
    }
}

/// Loads two little-endian words, each byte exactly once.
///
/// # Safety
/// 16 bytes from there are mapped readable.
#[inline]
pub(crate) unsafe fn load_pair(from: NonNull<u8>) -> [u64; 2] {
    if from.cast::<u64>().is_aligned() {
        let words = from.cast::<AtomicU64>();
        // SAFETY: both words are mapped, the caller promises, and aligned.
        let (first, second) = unsafe { (words.as_ref(), words.add(1).as_ref()) };
        return [u64::from_le(first.load(Relaxed)), u64::from_le(second.load(Relaxed))];
    }
    // SAFETY: the caller's promise is that of `load_bytes`.
    unsafe { load_bytes(from) }
}

/// Loads two words byte by byte, from an address that is not aligned.
///
/// # Safety
/// 16 bytes from there are mapped readable.
#[cold]
unsafe fn load_bytes(from: NonNull<u8>) -> [u64; 2] {
    // SAFETY: the caller promises 16 mapped bytes.
    let byte = |at: usize| unsafe { from.add(at).cast::<AtomicU8>().as_ref() }.load(Relaxed);
    let word = |at: usize| u64::from_le_bytes(std::array::from_fn(|byte_at| byte(at + byte_at)));
    [word(0), word(8)]
}
