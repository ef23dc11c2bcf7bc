//! Counts the process's connections to clusters.
//!
//! The end of a process runs the destructors of librbd and librados, which must not meet their threads. Images
//! are closed on threads of their own, so a process waits for the last connection before it ends.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// A number of connections, and the means to wait until it is 0.
pub(super) struct Connections {
    count: Mutex<usize>,
    closed: Condvar,
}

/// All connections of this process.
pub(super) static CONNECTIONS: Connections = Connections::new();

impl Connections {
    const fn new() -> Connections {
        Connections { count: Mutex::new(0), closed: Condvar::new() }
    }

    fn lock(&self) -> MutexGuard<'_, usize> {
        self.count.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts a connection until the result is dropped.
    pub(super) fn open(&'static self) -> Connection {
        *self.lock() += 1;
        Connection(self)
    }

    fn wait_until_closed(&self, limit: Duration) -> bool {
        let waited = self.closed.wait_timeout_while(self.lock(), limit, |count| *count > 0);
        *waited.unwrap_or_else(PoisonError::into_inner).0 == 0
    }
}

/// A connection that is open. It is dropped after librados was shut down.
pub(super) struct Connection(&'static Connections);

impl Drop for Connection {
    fn drop(&mut self) {
        *self.0.lock() -= 1;
        self.0.closed.notify_all();
    }
}

/// Waits until no connection to a cluster is open, for `limit` at most. Returns whether that is so.
pub fn wait_until_closed(limit: Duration) -> bool {
    CONNECTIONS.wait_until_closed(limit)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_end_waits_for_a_connection_that_another_thread_closes() {
        static CONNECTIONS: Connections = Connections::new();
        assert!(CONNECTIONS.wait_until_closed(Duration::ZERO), "there is none");
        let (first, second) = (CONNECTIONS.open(), CONNECTIONS.open());
        drop(first);
        assert!(!CONNECTIONS.wait_until_closed(Duration::from_millis(10)), "one is open");
        let closing = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(50));
            drop(second);
        });
        assert!(CONNECTIONS.wait_until_closed(Duration::from_secs(60)));
        closing.join().unwrap();
    }
}
