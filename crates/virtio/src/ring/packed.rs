//! The device side of a packed virtqueue (VIRTIO 1.3, 2.8).

use super::area::{DESCRIPTOR_LEN, Table};
use super::area_packed::PackedArea;
use super::notify::{self, EVENT_DISABLE, EVENT_ENABLE, Word};
use super::{Chain, Head, Layout, Position, RingError, SetupError};
use crate::Features;
use crate::inflight::PackedRecord;
use crate::memory::{GuestMemory, Words};
use std::sync::Arc;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;

/// An index of the descriptor ring, and its wrap counter.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Cursor {
    pub(crate) index: u16,
    pub(crate) wrap: bool,
}

impl Cursor {
    pub(crate) const START: Cursor = Cursor { index: 0, wrap: true };

    /// Advances by `count` descriptors, at most once around the ring.
    #[inline]
    pub(crate) fn advance(&mut self, count: u16, size: u16) {
        let next = u32::from(self.index) + u32::from(count);
        let wraps = next >= u32::from(size);
        self.wrap ^= wraps;
        self.index = if wraps { next - u32::from(size) } else { next } as u16;
    }

    /// Returns the index with the wrap counter in bit 15, as event suppression encodes it.
    #[inline]
    pub(crate) fn bits(self) -> u16 {
        self.index | u16::from(self.wrap) << 15
    }
}

/// The device side of a packed virtqueue. One thread owns it.
pub(super) struct PackedRing {
    area: PackedArea,
    /// Next descriptor to pop.
    next: Cursor,
    /// Next descriptor to push to.
    used: Cursor,
    /// Position of `used` when a batch was last published.
    used_published: Cursor,
    /// Index and flags of a batch's first descriptor. They are stored last, so that the driver sees nothing
    /// of the batch before all of it is stored.
    first: Option<(u16, u16)>,
    /// Number of descriptors published since the last check whether the driver wants an interrupt.
    added: u16,
    chain_max: u16,
    has_indirect: bool,
    has_event_idx: bool,
    /// Region in which the last address was found.
    hint: u16,
    /// The record of requests in flight, if they are tracked.
    record: Option<Box<PackedRecord>>,
}

impl PackedRing {
    pub(super) fn new(
        memory: Arc<GuestMemory>,
        layout: &Layout,
        features: Features,
        position: Position,
    ) -> Result<PackedRing, SetupError> {
        let area = PackedArea::find(memory, layout)?;
        if position.available >= area.size() || position.used >= area.size() {
            return Err(SetupError::Position);
        }
        let used = Cursor { index: position.used, wrap: position.used_wrap };
        Ok(PackedRing {
            area,
            next: Cursor { index: position.available, wrap: position.available_wrap },
            used,
            used_published: used,
            first: None,
            added: 0,
            chain_max: layout.chain_max,
            has_indirect: features.contains(Features::INDIRECT_DESC),
            has_event_idx: features.contains(Features::EVENT_IDX),
            hint: 0,
            record: None,
        })
    }

    pub(super) fn memory(&self) -> &Arc<GuestMemory> {
        self.area.memory()
    }

    pub(super) fn replace_memory(
        &mut self,
        memory: Arc<GuestMemory>,
        layout: &Layout,
    ) -> Result<(), SetupError> {
        self.area = PackedArea::find(memory, layout)?;
        Ok(())
    }

    pub(super) fn position(&self) -> Position {
        Position {
            available: self.next.index,
            available_wrap: self.next.wrap,
            used: self.used_published.index,
            used_wrap: self.used_published.wrap,
        }
    }

    /// Records requests from now on, and continues with the chains of an existing record. Returns their
    /// number.
    pub(super) fn track(&mut self, words: Words) -> usize {
        let (record, used) = PackedRecord::open(words, &self.area, self.used);
        let again = record.again();
        // Everything popped earlier is either in flight or used.
        (self.used, self.used_published, self.next) = (used, used, used);
        self.next.advance(record.descriptors(), self.area.size());
        // The process that died may have marked descriptors used, but not the first of its batch, which
        // would have made them visible to the driver. They are restored before a descriptor in front of
        // them is used.
        let mut at = used;
        for _ in 0..record.descriptors() {
            self.area.flags(at.index).set(notify::available_flags(at.wrap), Relaxed);
            at.advance(1, self.area.size());
        }
        self.record = Some(Box::new(record));
        again
    }

    #[inline]
    fn has_again(&self) -> bool {
        self.record.as_ref().is_some_and(|record| record.next_again().is_some())
    }

    /// Reads the next chain to be popped again, from the copies of its descriptors.
    #[cold]
    fn pop_again(&mut self, chain: &mut Chain) -> Result<bool, RingError> {
        let Some(record) = self.record.take() else { return Ok(false) };
        let popped = self.read_copies(&record, chain);
        let record = self.record.insert(record);
        if popped? {
            record.popped_again();
            return Ok(true);
        }
        Ok(false)
    }

    fn read_copies(&mut self, record: &PackedRecord, chain: &mut Chain) -> Result<bool, RingError> {
        let Some(entry) = record.next_again() else { return Ok(false) };
        let mut last = 0;
        chain.start();
        for (address, len, flags, id) in record.copied(entry) {
            last = id;
            if flags & INDIRECT != 0 {
                self.read_table((address, len), flags, chain)?;
            } else {
                chain.add(self.area.memory(), (address, len), flags & WRITE != 0, &mut self.hint)?;
            }
        }
        chain.finish(Head { id: last, count: record.count(entry), entry });
        Ok(true)
    }

    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        !self.has_again()
            && !notify::is_available(self.area.flags(self.next.index).get(Acquire), self.next.wrap)
    }

    #[inline]
    pub(super) fn pop(&mut self, chain: &mut Chain) -> Result<bool, RingError> {
        if self.has_again() {
            return self.pop_again(chain);
        }
        let first = self.area.flags(self.next.index).get(Acquire);
        if !notify::is_available(first, self.next.wrap) {
            return Ok(false);
        }
        let size = self.area.size();
        let (mut index, mut count, mut flags) = (self.next.index, 1, first);
        let mut descriptor = self.area.descriptor(index);
        chain.start();
        if flags & INDIRECT != 0 {
            self.read_table((descriptor.address, descriptor.len()), flags, chain)?;
        } else {
            loop {
                let range = (descriptor.address, descriptor.len());
                chain.add(self.area.memory(), range, flags & WRITE != 0, &mut self.hint)?;
                if flags & NEXT == 0 {
                    break;
                }
                if count == self.chain_max.min(size) {
                    return Err(RingError::TooLong);
                }
                count += 1;
                index = if index + 1 == size { 0 } else { index + 1 };
                descriptor = self.area.descriptor(index);
                flags = descriptor.fourth();
                // 2.8.19: a list must not contain indirect descriptors.
                if flags & INDIRECT != 0 {
                    return Err(RingError::Indirect);
                }
            }
        }
        let entry = self.record_chain(count)?;
        chain.finish(Head { id: descriptor.third(), count, entry });
        self.next.advance(count, size);
        Ok(true)
    }

    /// Records a chain of `count` descriptors. Returns its entry.
    #[inline]
    fn record_chain(&mut self, count: u16) -> Result<u16, RingError> {
        let Some(record) = &mut self.record else { return Ok(0) };
        if !record.has_room(count) {
            return Err(RingError::Index);
        }
        let (area, mut at) = (&self.area, self.next);
        // The guest may have changed them in the meantime; the next process checks them as this one does.
        let descriptors = (0..count).map(|_| {
            let descriptor = area.descriptor(at.index);
            at.advance(1, area.size());
            descriptor
        });
        record.popped(descriptors).ok_or(RingError::Index)
    }

    /// Reads a table of indirect descriptors, all of which belong to the chain. In it, all flags except the
    /// one for writable memory are ignored (2.8.7).
    #[inline]
    fn read_table(
        &mut self,
        (address, len): (u64, u32),
        flags: u16,
        chain: &mut Chain,
    ) -> Result<(), RingError> {
        if !self.has_indirect || flags & NEXT != 0 {
            return Err(RingError::Indirect);
        }
        if len == 0 || !len.is_multiple_of(DESCRIPTOR_LEN) {
            return Err(RingError::TableLength);
        }
        let memory = self.area.memory();
        let table = Table::find(memory, address, len, &mut self.hint).ok_or(RingError::Address)?;
        if table.count > self.chain_max.into() {
            return Err(RingError::TooLong);
        }
        for index in 0..table.count {
            let descriptor = table.descriptor(index).ok_or(RingError::Address)?;
            let range = (descriptor.address, descriptor.len());
            chain.add(memory, range, descriptor.fourth() & WRITE != 0, &mut self.hint)?;
        }
        Ok(())
    }

    #[inline]
    pub(super) fn push(&mut self, head: Head, written: u32) {
        let at = self.used;
        let flags = notify::used_flags(at.wrap) | if written > 0 { WRITE } else { 0 };
        self.area.store_used(at.index, written, head.id);
        match self.first {
            Some(_) => self.area.flags(at.index).set(flags, Relaxed),
            None => self.first = Some((at.index, flags)),
        }
        self.area.log_descriptor(at.index);
        if let Some(record) = &mut self.record {
            record.pushed(head.entry);
        }
        self.used.advance(head.count, self.area.size());
        self.added = self.added.saturating_add(head.count);
    }

    #[inline]
    pub(super) fn publish(&mut self) {
        let Some((index, flags)) = self.first.take() else { return };
        if let Some(record) = &mut self.record {
            record.publishing(self.used);
        }
        self.area.flags(index).set(flags, Release);
        self.area.log_descriptor(index);
        if let Some(record) = &mut self.record {
            record.published();
        }
        self.used_published = self.used;
    }

    #[inline]
    pub(super) fn should_interrupt(&mut self) -> bool {
        if self.first.is_some() || self.added == 0 {
            return false;
        }
        let added = std::mem::take(&mut self.added);
        notify::is_wanted_packed(self.area.driver_event(), self.used, added, self.area.size())
    }

    #[inline]
    pub(super) fn suppress_kicks(&mut self) {
        self.area.device_event().set(EVENT_DISABLE, Relaxed);
        self.area.log_event();
    }

    #[inline]
    pub(super) fn enable_kicks(&mut self) -> bool {
        let event = if self.has_event_idx { notify::event_at(self.next) } else { EVENT_ENABLE };
        let flags = self.area.flags(self.next.index);
        self.area.log_event();
        notify::arm_packed(self.area.device_event(), event, flags, |flags| {
            notify::is_available(flags, self.next.wrap)
        }) || self.has_again()
    }
}
