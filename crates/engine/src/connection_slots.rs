//! A limit on the connections of an HTTP listener. When it is reached, the oldest connection without an
//! accepted request is closed for a new one.
//!
//! Used by the control socket and the web page, each on its own thread.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::sync::Notify;

/// One connection of the listener.
#[derive(Default, Debug)]
pub struct ConnectionSlot {
    /// A request was accepted: the connection is not closed for others.
    kept: AtomicBool,
    /// Notified when the connection is to be closed.
    evicted: Notify,
}

impl ConnectionSlot {
    /// Marks the connection as legitimate: it is not closed for others from now on.
    pub fn keep(&self) {
        self.kept.store(true, Relaxed);
    }

    /// Resolves when the connection is to be closed for another one.
    pub async fn evicted(&self) {
        self.evicted.notified().await;
    }
}

/// The connections of a listener.
#[derive(Debug)]
pub struct ConnectionSlots {
    max: usize,
    /// Oldest first.
    list: Mutex<VecDeque<Arc<ConnectionSlot>>>,
}

impl ConnectionSlots {
    /// Allows `max` connections at a time.
    pub fn new(max: usize) -> ConnectionSlots {
        ConnectionSlots { max, list: Mutex::default() }
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<Arc<ConnectionSlot>>> {
        self.list.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a slot for a new connection. If none is free, the oldest connection that is not kept is closed.
    /// `None`: all are kept.
    pub fn take(&self) -> Option<Arc<ConnectionSlot>> {
        let mut list = self.lock();
        if list.len() >= self.max {
            let position = list.iter().position(|slot| !slot.kept.load(Relaxed))?;
            if let Some(slot) = list.remove(position) {
                slot.evicted.notify_one();
            }
        }
        let slot = Arc::new(ConnectionSlot::default());
        list.push_back(slot.clone());
        Some(slot)
    }

    /// Frees the slot of a closed connection.
    pub fn release(&self, slot: &Arc<ConnectionSlot>) {
        self.lock().retain(|other| !Arc::ptr_eq(other, slot));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_oldest_connection_that_is_not_kept_is_closed() {
        let slots = ConnectionSlots::new(3);
        let all: Vec<_> = (0..3).map(|_| slots.take().expect("there is room")).collect();
        all[0].keep();
        let new = slots.take().expect("one makes room");
        all[1].evicted().await;
        [&all[2], &new].into_iter().for_each(|slot| slot.keep());
        assert!(slots.take().is_none(), "all are kept");
        slots.release(&all[0]);
        assert!(slots.take().is_some());
    }
}
