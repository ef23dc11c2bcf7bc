//! The driver side of a split virtqueue.

use super::Used;
use crate::Features;
use crate::memory::GuestMemory;
use crate::ring::notify::{self, SUPPRESS, Word};
use crate::ring::{Layout, SetupError, SplitArea, release};
use std::sync::Arc;
use std::sync::atomic::Ordering::{Acquire, Relaxed};

const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;

/// The driver side of a split virtqueue.
pub(super) struct SplitDriver {
    area: SplitArea,
    has_event_idx: bool,
    /// Free descriptors; the last is taken next.
    free: Vec<u16>,
    /// By first descriptor of each chain in flight: the number of its descriptors; 0 for all others.
    counts: Box<[u16]>,
    /// By descriptor in flight: the next descriptor of its chain.
    links: Box<[u16]>,
    /// Next index of the available ring.
    next: u16,
    /// Value of `avail->idx` as last stored.
    published: u16,
    /// Next index of the used ring to read.
    used: u16,
}

impl SplitDriver {
    pub(super) fn new(
        memory: Arc<GuestMemory>,
        layout: &Layout,
        features: Features,
    ) -> Result<SplitDriver, SetupError> {
        let area = SplitArea::find(memory, layout)?;
        let size = area.size();
        Ok(SplitDriver {
            has_event_idx: features.contains(Features::EVENT_IDX),
            free: (0..size).rev().collect(),
            counts: vec![0; size.into()].into(),
            links: vec![0; size.into()].into(),
            next: 0,
            published: 0,
            used: 0,
            area,
        })
    }

    pub(super) fn free(&self) -> usize {
        self.free.len()
    }

    #[inline]
    pub(super) fn add(&mut self, readable: &[(u64, u32)], writable: &[(u64, u32)]) -> Option<u16> {
        let count = readable.len() + writable.len();
        assert!(count > 0, "a chain has a descriptor");
        let start = self.free.len().checked_sub(count)?;
        // Take free descriptors from the end of the list.
        for (at, &(address, len)) in readable.iter().chain(writable).enumerate() {
            let index = self.free[self.free.len() - 1 - at];
            let flags = if at < readable.len() { 0 } else { WRITE };
            if at + 1 < count {
                let next = self.free[self.free.len() - 2 - at];
                self.links[usize::from(index)] = next;
                self.area.store_descriptor(index, address, len, flags | NEXT, next);
            } else {
                self.area.store_descriptor(index, address, len, flags, 0);
            }
        }
        let head = self.free[self.free.len() - 1];
        self.free.truncate(start);
        self.counts[usize::from(head)] = count as u16;
        self.make_available(head);
        Some(head)
    }

    #[inline]
    pub(super) fn add_indirect(&mut self, table: u64, descriptors: u32) -> Option<u16> {
        let head = self.free.pop()?;
        self.counts[usize::from(head)] = 1;
        self.area.store_descriptor(head, table, descriptors * 16, INDIRECT, 0);
        self.make_available(head);
        Some(head)
    }

    #[inline]
    fn make_available(&mut self, head: u16) {
        self.area.available_entry(self.next).set(head, Relaxed);
        self.next = self.next.wrapping_add(1);
    }

    #[inline]
    #[must_use]
    pub(super) fn publish(&mut self) -> bool {
        let (old, new) = (self.published, self.next);
        if old == new {
            return false;
        }
        release(self.area.available_index(), new);
        self.published = new;
        match self.has_event_idx {
            true => notify::is_wanted_at(self.area.available_event(), old, new),
            false => notify::is_wanted_by_flag(self.area.used_flags()),
        }
    }

    #[inline]
    pub(super) fn take_used(&mut self) -> Option<Used> {
        if self.area.used_index().get(Acquire) == self.used {
            return None;
        }
        let (id, written) = self.area.used_entry(self.used);
        let (id, written) = (id.get(Relaxed) as u16, written.get(Relaxed));
        self.used = self.used.wrapping_add(1);
        let count = std::mem::take(&mut self.counts[usize::from(id)]);
        assert!(count > 0, "the device returned chain {id}, which is not in flight");
        let mut index = id;
        for _ in 0..count {
            self.free.push(index);
            index = self.links[usize::from(index)];
        }
        Some(Used { id, written })
    }

    pub(super) fn suppress_interrupts(&mut self) {
        match self.has_event_idx {
            true => self.area.used_event().set(self.used.wrapping_sub(1), Relaxed),
            false => self.area.available_flags().set(SUPPRESS, Relaxed),
        }
    }

    #[must_use]
    pub(super) fn enable_interrupts(&mut self) -> bool {
        let area = &self.area;
        match self.has_event_idx {
            true => notify::arm_at(area.used_event(), area.used_index(), self.used),
            false => notify::arm_flag(area.available_flags(), area.used_index(), self.used),
        }
    }

    pub(super) fn area(&self) -> &SplitArea {
        &self.area
    }
}
