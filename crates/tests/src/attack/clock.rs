//! One order for what clients and the file system do: a counter that every event draws from.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

/// Ticks from 1 on; no two events have the same.
#[derive(Clone, Default)]
pub struct Clock(Arc<AtomicU64>);

impl Clock {
    /// The next tick.
    pub fn tick(&self) -> u64 {
        self.0.fetch_add(1, SeqCst) + 1
    }

    /// The last tick that was drawn.
    pub fn now(&self) -> u64 {
        self.0.load(SeqCst)
    }
}
