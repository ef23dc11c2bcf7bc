//! File operations under way, by slot. What the kernel or an I/O thread carries is the slot's number, so an
//! end is found by indexing. Lists of segments live in the slot until the end.

use crate::config::Token;
use queue::{FileId, IoId};

/// The most operations under way at a time; as many as fit one CQ without its overflow list being the rule.
pub(crate) const OPS_MAX: usize = 4096;

/// Who asked for an operation.
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

/// All of them.
#[derive(Default)]
pub(crate) struct Ops {
    slots: Vec<Slot>,
    free: Vec<u32>,
}

impl Ops {
    /// Take a slot. `None`: too many are under way.
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

    /// Give a slot back: whose operation it was, and on what.
    ///
    /// # Panics
    /// When it is free: an end came twice.
    #[inline]
    pub(crate) fn end(&mut self, number: u32) -> (Origin, FileId) {
        let slot = &mut self.slots[number as usize];
        assert!(slot.started.take().is_some(), "an operation ended twice");
        self.free.push(number);
        (slot.id, slot.file)
    }

    /// Where the list of a slot is built. It may not be touched while the operation is under way.
    pub(crate) fn iovecs(&mut self, number: u32) -> &mut Vec<libc::iovec> {
        &mut self.slots[number as usize].iovecs
    }

    /// The slot that carries `id`. Looks at all of them: cancelling is rare.
    pub(crate) fn find(&self, id: Origin) -> Option<u32> {
        let found = self.slots.iter().position(|slot| slot.started.is_some() && slot.id == id)?;
        Some(found as u32)
    }

    /// When the oldest of those under way was started.
    pub(crate) fn oldest(&self) -> u64 {
        self.slots.iter().filter_map(|slot| slot.started).min().unwrap_or(u64::MAX)
    }
}
