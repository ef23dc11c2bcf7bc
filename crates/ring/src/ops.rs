//! File operations in flight, by slot. The kernel and the I/O threads identify an operation by the number of
//! its slot, so a completion is found by indexing. Lists of segments are kept in the slot until completion.
//!
//! The table is not a [`slab::Slab`]: a free slot keeps the memory of its list for the next operation.

use crate::config::Token;
use queue::{FileId, IoId};

/// Most operations in flight: about as many as fit the completion queue, so that its overflow list is rarely
/// used.
pub(crate) const OPS_MAX: usize = 4096;

/// The submitter of an operation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Origin {
    /// A node, for a request.
    Node(IoId),
    /// A front-end.
    Front(Token),
}

struct Slot {
    id: Origin,
    file: FileId,
    /// Empty when the slot is free.
    started: Option<u64>,
    iovecs: Vec<libc::iovec>,
}

/// All operations.
#[derive(Default)]
pub(crate) struct Ops {
    slots: Vec<Slot>,
    free: Vec<u32>,
}

impl Ops {
    /// Takes a slot. `None`: too many operations are in flight.
    #[inline]
    pub(crate) fn begin(&mut self, id: Origin, file: FileId, started: u64) -> Option<u32> {
        let number = match self.free.pop() {
            Some(number) => number,
            None if self.slots.len() < OPS_MAX => {
                self.slots.push(Slot { id, file, started: None, iovecs: Vec::new() });
                self.slots.len() as u32 - 1
            }
            None => return None,
        };
        let slot = &mut self.slots[number as usize];
        (slot.id, slot.file, slot.started) = (id, file, Some(started));
        Some(number)
    }

    /// Frees a slot; returns the operation's submitter and file.
    ///
    /// # Panics
    /// If the slot is free: an operation completed twice.
    #[inline]
    pub(crate) fn end(&mut self, number: u32) -> (Origin, FileId) {
        let slot = &mut self.slots[number as usize];
        assert!(slot.started.take().is_some(), "an operation ended twice");
        self.free.push(number);
        (slot.id, slot.file)
    }

    /// The segment list of a slot. It must not be changed while the operation is in flight.
    pub(crate) fn iovecs(&mut self, number: u32) -> &mut Vec<libc::iovec> {
        &mut self.slots[number as usize].iovecs
    }

    /// Finds the slot of `id` by a linear search: cancelling is rare.
    pub(crate) fn find(&self, id: Origin) -> Option<u32> {
        let found = self.slots.iter().position(|slot| slot.started.is_some() && slot.id == id)?;
        Some(found as u32)
    }

    /// Number of the oldest operation in flight; `u64::MAX` if there is none.
    pub(crate) fn oldest(&self) -> u64 {
        self.slots.iter().filter_map(|slot| slot.started).min().unwrap_or(u64::MAX)
    }
}
