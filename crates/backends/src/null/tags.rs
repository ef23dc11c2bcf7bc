//! Limits the number of requests in flight, if an option requires that.

use super::knobs::{Knobs, Sharing};
use queue::{WaitList, Waiter};
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::{Arc, OnceLock};

/// A set of tags, which requests take and return.
#[derive(Debug, Default)]
pub(super) struct Tags {
    used: AtomicU32,
    /// Queues whose requests wait for a tag.
    pub(super) waiting: WaitList,
}

/// The set of tags of all devices with `shared_tags`.
static ALL: OnceLock<Arc<Tags>> = OnceLock::new();

impl Tags {
    /// Returns the tags of a device, if its queues share some.
    pub(super) fn shared(knobs: &Knobs) -> Option<Arc<Tags>> {
        match knobs.sharing {
            Sharing::Queue => None,
            Sharing::Device => Some(Arc::default()),
            Sharing::Process => Some(ALL.get_or_init(Arc::default).clone()),
        }
    }

    /// Takes a tag if fewer than `depth` are taken.
    pub(super) fn take(&self, depth: u32) -> bool {
        self.used.fetch_update(SeqCst, SeqCst, |used| (used < depth).then_some(used + 1)).is_ok()
    }

    /// Returns a tag. `own` is the waiter of the calling queue.
    pub(super) fn give_back(&self, own: Option<&Waiter>) {
        self.used.fetch_sub(1, SeqCst);
        self.waiting.wake(own);
    }
}
