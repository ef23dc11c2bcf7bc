//! A counter that orders the events of clients and of the file system: every event draws a number from it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

/// The numbers begin at 1 and are unique.
#[derive(Clone, Default)]
pub struct Clock(Arc<AtomicU64>);

impl Clock {
    /// Returns the next number.
    pub fn tick(&self) -> u64 {
        self.0.fetch_add(1, SeqCst) + 1
    }

    /// Returns the last number that was drawn.
    pub fn now(&self) -> u64 {
        self.0.load(SeqCst)
    }
}
