//! The device side of a split virtqueue (VIRTIO 1.3, 2.7).

use super::area::{DESCRIPTOR_LEN, Descriptor, SplitArea, Table, release};
use super::notify::{self, SUPPRESS, Word};
use super::{Chain, Head, Layout, Position, RingError, SetupError};
use crate::Features;
use crate::inflight::SplitRecord;
use crate::memory::{GuestMemory, Words};
use std::sync::Arc;
use std::sync::atomic::Ordering::{Acquire, Relaxed};

const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;

/// The device side of a split virtqueue. One thread owns it.
pub(super) struct SplitRing {
    area: SplitArea,
    /// Next index of the available ring.
    next: u16,
    /// Value of `avail->idx` as last loaded: entries before it may be read.
    published: u16,
    /// Next index of the used ring.
    used: u16,
    /// Value of `used->idx` as last stored.
    used_published: u16,
    /// Value of `used->idx` at the last check whether the driver wants an interrupt.
    asked: u16,
    /// Maximum number of descriptors of a chain, including those of an indirect table.
    chain_max: u16,
    has_indirect: bool,
    has_event_idx: bool,
    /// Region in which the last address was found.
    hint: u16,
    /// The record of requests in flight, if they are tracked.
    record: Option<Box<SplitRecord>>,
}

impl SplitRing {
    /// Starts at a position in the available ring; the used ring continues at its own index.
    pub(super) fn new(
        memory: Arc<GuestMemory>,
        layout: &Layout,
        features: Features,
        position: Position,
    ) -> Result<SplitRing, SetupError> {
        let area = SplitArea::find(memory, layout)?;
        let used = area.used_index().get(Relaxed);
        Ok(SplitRing {
            next: position.available,
            published: position.available,
            used,
            used_published: used,
            asked: used,
            chain_max: layout.chain_max,
            has_indirect: features.contains(Features::INDIRECT_DESC),
            has_event_idx: features.contains(Features::EVENT_IDX),
            hint: 0,
            record: None,
            area,
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
        self.area = SplitArea::find(memory, layout)?;
        Ok(())
    }

    pub(super) fn position(&self) -> Position {
        Position { available: self.next, available_wrap: false, used: self.used_published, used_wrap: false }
    }

    /// Loads the driver's index. Returns the number of chains that can be popped.
    #[inline]
    fn poll(&mut self) -> Result<u16, RingError> {
        self.published = self.area.available_index().get(Acquire);
        let count = self.published.wrapping_sub(self.next);
        if count > self.area.size() {
            self.published = self.next;
            return Err(RingError::Index);
        }
        Ok(count)
    }

    /// Records requests from now on, and continues with the chains of an existing record. Returns their
    /// number.
    pub(super) fn track(&mut self, words: Words) -> usize {
        let record = SplitRecord::open(words, self.area.size(), self.used);
        let again = record.again();
        // Everything popped earlier is either in flight or used.
        self.next = self.used.wrapping_add(again as u16);
        self.published = self.next;
        self.record = Some(Box::new(record));
        again
    }

    #[inline]
    fn has_again(&self) -> bool {
        self.record.as_ref().is_some_and(|record| record.next_again().is_some())
    }

    /// Reads the next chain to be popped again.
    #[cold]
    fn pop_again(&mut self, chain: &mut Chain) -> Result<bool, RingError> {
        let Some(head) = self.record.as_ref().and_then(|record| record.next_again()) else {
            return Ok(false);
        };
        self.read_chain(head, chain)?;
        self.record.iter_mut().for_each(|record| record.popped_again());
        Ok(true)
    }

    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        !self.has_again()
            && self.next == self.published
            && self.area.available_index().get(Acquire) == self.next
    }

    #[inline]
    pub(super) fn pop(&mut self, chain: &mut Chain) -> Result<bool, RingError> {
        if self.has_again() {
            return self.pop_again(chain);
        }
        if self.next == self.published && self.poll()? == 0 {
            return Ok(false);
        }
        let head = self.area.available_entry(self.next).get(Relaxed);
        self.read_chain(head, chain)?;
        if let Some(record) = &mut self.record {
            record.popped(head);
        }
        self.next = self.next.wrapping_add(1);
        Ok(true)
    }

    /// Reads the chain that starts at a descriptor.
    #[inline]
    pub(super) fn read_chain(&mut self, head: u16, chain: &mut Chain) -> Result<(), RingError> {
        let size = self.area.size();
        let (mut index, mut left) = (head, self.chain_max.min(size));
        chain.start();
        loop {
            if index >= size {
                return Err(RingError::Descriptor);
            }
            let descriptor = self.area.descriptor(index);
            let flags = descriptor.third();
            if flags & INDIRECT != 0 {
                self.read_table(descriptor, chain)?;
                break;
            }
            let range = (descriptor.address, descriptor.len());
            chain.add(self.area.memory(), range, flags & WRITE != 0, &mut self.hint)?;
            if flags & NEXT == 0 {
                break;
            }
            left -= 1;
            if left == 0 {
                return Err(RingError::TooLong);
            }
            index = descriptor.fourth();
        }
        chain.finish(Head { id: head, count: 1, entry: 0 });
        Ok(())
    }

    /// Reads the chain in a table of indirect descriptors. 2.7.5.3.1: an indirect descriptor must not have
    /// a next descriptor, and a table must not contain another table. 2.7.5.3.2: direct descriptors may
    /// precede it.
    #[inline]
    fn read_table(&mut self, descriptor: Descriptor, chain: &mut Chain) -> Result<(), RingError> {
        let len = descriptor.len();
        if !self.has_indirect || descriptor.third() & NEXT != 0 {
            return Err(RingError::Indirect);
        }
        if len == 0 || !len.is_multiple_of(DESCRIPTOR_LEN) {
            return Err(RingError::TableLength);
        }
        let memory = self.area.memory();
        let table = Table::find(memory, descriptor.address, len, &mut self.hint).ok_or(RingError::Address)?;
        let (mut index, mut left) = (0, self.chain_max);
        loop {
            if index >= table.count {
                return Err(RingError::Descriptor);
            }
            let descriptor = table.descriptor(index).ok_or(RingError::Address)?;
            let flags = descriptor.third();
            if flags & INDIRECT != 0 {
                return Err(RingError::Indirect);
            }
            let range = (descriptor.address, descriptor.len());
            chain.add(memory, range, flags & WRITE != 0, &mut self.hint)?;
            if flags & NEXT == 0 {
                return Ok(());
            }
            left -= 1;
            if left == 0 {
                return Err(RingError::TooLong);
            }
            index = descriptor.fourth().into();
        }
    }

    #[inline]
    pub(super) fn push(&mut self, head: Head, written: u32) {
        let (id, len) = self.area.used_entry(self.used);
        id.set(head.id.into(), Relaxed);
        len.set(written, Relaxed);
        if let Some(record) = &mut self.record {
            record.pushed(head.id);
        }
        self.area.log_used(4 + u32::from(self.used & (self.area.size() - 1)) * 8, 8);
        self.used = self.used.wrapping_add(1);
    }

    #[inline]
    pub(super) fn publish(&mut self) {
        release(self.area.used_index(), self.used);
        self.area.log_used(2, 2);
        self.used_published = self.used;
        if let Some(record) = &mut self.record {
            record.published(self.used);
        }
    }

    #[inline]
    pub(super) fn should_interrupt(&mut self) -> bool {
        let (old, new) = (self.asked, self.used_published);
        if old == new {
            return false;
        }
        self.asked = new;
        match self.has_event_idx {
            true => notify::is_wanted_at(self.area.used_event(), old, new),
            false => notify::is_wanted_by_flag(self.area.available_flags()),
        }
    }

    #[inline]
    pub(super) fn suppress_kicks(&mut self) {
        match self.has_event_idx {
            // The driver kicks when it publishes exactly this index, which is the last one that it reaches.
            true => self.area.available_event().set(self.next.wrapping_sub(1), Relaxed),
            false => self.area.used_flags().set(SUPPRESS, Relaxed),
        }
        self.log_suppression();
    }

    #[inline]
    pub(super) fn enable_kicks(&mut self) -> bool {
        let area = &self.area;
        self.log_suppression();
        match self.has_event_idx {
            true => {
                notify::arm_at(area.available_event(), area.available_index(), self.next) || self.has_again()
            }
            false => {
                notify::arm_flag(area.used_flags(), area.available_index(), self.next) || self.has_again()
            }
        }
    }

    /// Records in the dirty log that `avail_event` or the flags were written.
    #[inline]
    fn log_suppression(&self) {
        match self.has_event_idx {
            true => self.area.log_used(4 + u32::from(self.area.size()) * 8, 2),
            false => self.area.log_used(0, 2),
        }
    }
}
