//! The driver side of a packed virtqueue.

use super::Used;
use crate::Features;
use crate::memory::GuestMemory;
use crate::ring::notify::{self, EVENT_DISABLE, EVENT_ENABLE, Word};
use crate::ring::{Cursor, Layout, PackedArea, SetupError};
use std::sync::Arc;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;

/// The driver side of a packed virtqueue.
pub(super) struct PackedDriver {
    area: PackedArea,
    has_event_idx: bool,
    /// Free ids; the last is taken next.
    ids: Vec<u16>,
    /// Number of descriptors of the chain with each id; 0 if it is not in flight.
    counts: Box<[u16]>,
    /// Number of free descriptors.
    free: u16,
    /// Next descriptor to make available.
    next: Cursor,
    /// Next descriptor that the device will use.
    used: Cursor,
    /// Index and flags of the first descriptor added since the last batch was published.
    first: Option<(u16, u16)>,
    /// Number of descriptors added since the last batch was published.
    added: u16,
}

impl PackedDriver {
    pub(super) fn new(
        memory: Arc<GuestMemory>,
        layout: &Layout,
        features: Features,
    ) -> Result<PackedDriver, SetupError> {
        let area = PackedArea::find(memory, layout)?;
        let size = area.size();
        Ok(PackedDriver {
            has_event_idx: features.contains(Features::EVENT_IDX),
            ids: (0..size).rev().collect(),
            counts: vec![0; size.into()].into(),
            free: size,
            next: Cursor::START,
            used: Cursor::START,
            first: None,
            added: 0,
            area,
        })
    }

    pub(super) fn free(&self) -> usize {
        self.free.into()
    }

    #[inline]
    pub(super) fn add(&mut self, readable: &[(u64, u32)], writable: &[(u64, u32)]) -> Option<u16> {
        let count = readable.len() + writable.len();
        assert!(count > 0, "a chain has a descriptor");
        if count > self.free() {
            return None;
        }
        let id = self.ids.pop()?;
        self.counts[usize::from(id)] = count as u16;
        for (at, &(address, len)) in readable.iter().chain(writable).enumerate() {
            let flags = if at < readable.len() { 0 } else { WRITE };
            let flags = if at + 1 < count { flags | NEXT } else { flags };
            self.put(address, len, id, flags);
        }
        Some(id)
    }

    #[inline]
    pub(super) fn add_indirect(&mut self, table: u64, descriptors: u32) -> Option<u16> {
        if self.free == 0 {
            return None;
        }
        let id = self.ids.pop()?;
        self.counts[usize::from(id)] = 1;
        self.put(table, descriptors * 16, id, INDIRECT);
        Some(id)
    }

    /// Writes the next descriptor.
    #[inline]
    fn put(&mut self, address: u64, len: u32, id: u16, flags: u16) {
        let at = self.next;
        let flags = flags | notify::available_flags(at.wrap);
        self.area.store_descriptor(at.index, address, len, id);
        match self.first {
            Some(_) => self.area.flags(at.index).set(flags, Relaxed),
            None => self.first = Some((at.index, flags)),
        }
        self.next.advance(1, self.area.size());
        self.free -= 1;
        self.added += 1;
    }

    #[inline]
    pub(super) fn publish(&mut self) -> bool {
        let Some((index, flags)) = self.first.take() else { return false };
        self.area.flags(index).set(flags, Release);
        let added = std::mem::take(&mut self.added);
        notify::is_wanted_packed(self.area.device_event(), self.next, added, self.area.size())
    }

    #[inline]
    pub(super) fn take_used(&mut self) -> Option<Used> {
        let flags = self.area.flags(self.used.index).get(Acquire);
        if !notify::is_used(flags, self.used.wrap) {
            return None;
        }
        let descriptor = self.area.descriptor(self.used.index);
        let id = descriptor.third();
        let count = std::mem::take(&mut self.counts[usize::from(id)]);
        assert!(count > 0, "the device returned chain {id}, which is not in flight");
        self.used.advance(count, self.area.size());
        self.free += count;
        self.ids.push(id);
        Some(Used { id, written: descriptor.len() })
    }

    pub(super) fn suppress_interrupts(&mut self) {
        self.area.driver_event().set(EVENT_DISABLE, Relaxed);
    }

    pub(super) fn enable_interrupts(&mut self) -> bool {
        let event = if self.has_event_idx { notify::event_at(self.used) } else { EVENT_ENABLE };
        let flags = self.area.flags(self.used.index);
        notify::arm_packed(self.area.driver_event(), event, flags, |flags| {
            notify::is_used(flags, self.used.wrap)
        })
    }

    pub(super) fn area(&self) -> &PackedArea {
        &self.area
    }
}
