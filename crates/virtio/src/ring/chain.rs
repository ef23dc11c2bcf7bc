//! A descriptor chain, translated to spans of guest memory.
//!
//! The device-readable spans come first, then the device-writable ones. Their memory is allocated once,
//! with the chain; a queue uses one chain for all requests that it pops, one after the other.

use super::RingError;
use crate::memory::{GuestMemory, Span};

/// Identifies a popped chain, to push it later: plain data.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Head {
    /// Index of the first descriptor (split), or buffer id (packed).
    pub id: u16,
    /// Number of descriptors that the chain occupies in the ring. Only a packed ring needs it; it is 1 in a
    /// split ring.
    pub count: u16,
    /// First entry of the chain in the record of requests in flight (packed, if the ring is tracked).
    pub entry: u16,
}

impl Head {
    /// A value that stands for no chain.
    pub const NONE: Head = Head { id: 0, count: 0, entry: 0 };
}

/// A descriptor chain with its spans.
pub struct Chain {
    head: Head,
    spans: Box<[Span]>,
    /// Spans in use: readable ones up to `writable`, then writable ones up to `end`.
    readable: usize,
    writable: usize,
    end: usize,
}

impl Chain {
    /// Creates an empty chain with space for `spans_max` spans. A descriptor needs one span, and one more
    /// for each end of a region that it crosses.
    pub fn new(spans_max: usize) -> Chain {
        let spans = vec![Span::EMPTY; spans_max].into();
        Chain { head: Head::default(), spans, readable: 0, writable: 0, end: 0 }
    }

    /// Returns the identification of the chain.
    #[inline]
    pub fn head(&self) -> Head {
        self.head
    }

    /// Returns the memory that the device reads.
    #[inline]
    pub fn readable(&self) -> &[Span] {
        &self.spans[self.readable..self.writable]
    }

    /// Returns the memory that the device writes.
    #[inline]
    pub fn writable(&self) -> &[Span] {
        &self.spans[self.writable..self.end]
    }

    #[inline]
    pub(crate) fn start(&mut self) {
        (self.readable, self.writable, self.end) = (0, 0, 0);
    }

    #[inline]
    pub(crate) fn finish(&mut self, head: Head) {
        self.head = head;
    }

    /// Adds the memory of a descriptor. An empty descriptor adds nothing.
    #[inline]
    pub(crate) fn add(
        &mut self,
        memory: &GuestMemory,
        (mut address, mut len): (u64, u32),
        is_writable: bool,
        hint: &mut u16,
    ) -> Result<(), RingError> {
        if !is_writable && self.end != self.writable {
            return Err(RingError::ReadableAfterWritable);
        }
        while len > 0 {
            let span = memory.translate_some(address, len, hint).ok_or(RingError::Address)?;
            *self.spans.get_mut(self.end).ok_or(RingError::TooLong)? = span;
            self.end += 1;
            len -= span.len;
            if len > 0 {
                address = address.checked_add(u64::from(span.len)).ok_or(RingError::Address)?;
            }
        }
        if !is_writable {
            self.writable = self.end;
        }
        Ok(())
    }

    /// Takes the first `len` bytes of the readable memory. Takes nothing and returns `None` if they are not
    /// in one span.
    #[inline]
    pub(crate) fn take_front(&mut self, len: u32) -> Option<Span> {
        let first = self.readable().first().copied()?;
        if first.len < len {
            return None;
        }
        let (front, rest) = first.split_at(len);
        if rest.is_empty() {
            self.readable += 1;
        } else {
            self.spans[self.readable] = rest;
        }
        Some(front)
    }

    /// Copies the first bytes of the readable memory and takes them. Returns `false` if there are too few.
    pub(crate) fn copy_front(&mut self, memory: &GuestMemory, buffer: &mut [u8]) -> bool {
        let mut filled = 0;
        while filled < buffer.len() {
            let Some(&first) = self.readable().first() else { return false };
            let len = first.len.min((buffer.len() - filled) as u32);
            let Some(span) = self.take_front(len) else { return false };
            if !memory.read(span, &mut buffer[filled..filled + len as usize]) {
                return false;
            }
            filled += len as usize;
        }
        true
    }

    /// Takes the last `len` bytes of the writable memory. Takes nothing and returns `None` if they are not
    /// in one span.
    #[inline]
    pub(crate) fn take_last(&mut self, len: u32) -> Option<Span> {
        let last = self.writable().last().copied()?;
        let (rest, taken) = last.split_at(last.len.checked_sub(len)?);
        if rest.is_empty() {
            self.end -= 1;
        } else {
            self.spans[self.end - 1] = rest;
        }
        Some(taken)
    }
}
