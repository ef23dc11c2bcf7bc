//! How many requests are under way at once, where a knob says so.

use super::knobs::{Knobs, Sharing};
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::{AcqRel, Relaxed};
use std::sync::{Arc, OnceLock};

/// Tags that are taken and given back.
#[derive(Debug)]
pub(super) struct Tags {
    used: AtomicU32,
}

/// Those of all devices with `shared_tags`.
static ALL: OnceLock<Arc<Tags>> = OnceLock::new();

impl Tags {
    /// Those of a device, if its queues share some.
    pub(super) fn shared(knobs: &Knobs) -> Option<Arc<Tags>> {
        let new = || Arc::new(Tags { used: AtomicU32::new(0) });
        match knobs.sharing {
            Sharing::Queue => None,
            Sharing::Device => Some(new()),
            Sharing::Process => Some(ALL.get_or_init(new).clone()),
        }
    }

    /// Those of one queue.
    pub(super) fn own() -> Arc<Tags> {
        Arc::new(Tags { used: AtomicU32::new(0) })
    }

    /// Take one, if fewer than that many are taken.
    pub(super) fn take(&self, depth: u32) -> bool {
        self.used.fetch_update(AcqRel, Relaxed, |used| (used < depth).then_some(used + 1)).is_ok()
    }

    pub(super) fn give_back(&self) {
        self.used.fetch_sub(1, AcqRel);
    }
}
