//! Link between a node and the control plane, which provides its connection.
//!
//! Connecting, the handshake and TLS can block, so the control plane does them. A node without a connection
//! asks its [`Connector`], which passes a connection over the node's [`ConnectionChannel`] as soon as it has
//! one, and wakes the node's queue. The connector retries by itself; the node decides how long requests wait.
//!
//! *Invariant:* a channel holds at most one connection, and a node asks again only after it has lost the
//! previous one.

use crate::Fact;
use proto::nbd::Session;
use queue::QueueWaker;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::Acquire, Ordering::Relaxed, Ordering::Release};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A connection in the transmission phase. `E` is the type of the negotiated session.
#[derive(Debug)]
pub struct Connected<S, E = Session> {
    /// The stream, in the form that the ring accepts.
    pub stream: S,
    /// The negotiated session.
    pub session: E,
}

/// Reasons why a node has no connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Loss {
    /// No connection was established yet.
    New,
    /// The server closed it.
    Closed,
    /// The system closed it, with a positive errno.
    Failed(i32),
    /// The server left requests unanswered for too long.
    Silent,
    /// The server violated the protocol.
    Nonsense,
    /// The server reported that it is shutting down.
    ShuttingDown,
    /// A request timed out.
    Cancelled,
}

impl fmt::Display for Loss {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Loss::New => f.write_str("there was none yet"),
            Loss::Closed => f.write_str("the server closed it"),
            Loss::Failed(errno) => write!(f, "{}", std::io::Error::from_raw_os_error(*errno)),
            Loss::Silent => f.write_str("the server did not answer in time"),
            Loss::Nonsense => f.write_str("the server broke the protocol"),
            Loss::ShuttingDown => f.write_str("the server is shutting down"),
            Loss::Cancelled => f.write_str("a request was given up"),
        }
    }
}

/// Connects to the server, without blocking the caller.
pub trait Connector<S, E = Session>: Send + Sync {
    /// Requests a connection for the node of this channel, until the channel is closed. The more attempts
    /// have [failed in a row](ConnectionChannel::failures), the longer the connector waits before the next.
    fn connect(&self, channel: Arc<ConnectionChannel<S, E>>, loss: Loss);

    /// Describes the connector's current activity, for `show`.
    fn describe(&self) -> Vec<Fact> {
        Vec::new()
    }
}

/// The channel between one node and its connector.
pub struct ConnectionChannel<S, E = Session> {
    delivered: Mutex<Option<Connected<S, E>>>,
    has_delivered: AtomicBool,
    closed: AtomicBool,
    failures: AtomicU32,
    /// Whether the last attempt found that nothing listens at the server's address.
    refused: AtomicBool,
    waker: QueueWaker,
}

impl<S, E> fmt::Debug for ConnectionChannel<S, E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ConnectionChannel").field("closed", &self.closed).finish_non_exhaustive()
    }
}

impl<S, E> ConnectionChannel<S, E> {
    /// Creates a channel. `waker` wakes the node's queue.
    pub fn new(waker: QueueWaker) -> ConnectionChannel<S, E> {
        ConnectionChannel {
            delivered: Mutex::default(),
            has_delivered: AtomicBool::new(false),
            closed: AtomicBool::new(false),
            failures: AtomicU32::new(0),
            refused: AtomicBool::new(false),
            waker,
        }
    }

    fn lock(&self) -> MutexGuard<'_, Option<Connected<S, E>>> {
        self.delivered.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Passes a connection to the node.
    ///
    /// # Errors
    /// The node is gone, or has not taken the previous connection; the connection is returned.
    pub fn deliver(&self, connected: Connected<S, E>) -> Result<(), Connected<S, E>> {
        let mut delivered = self.lock();
        if self.is_closed() || delivered.is_some() {
            return Err(connected);
        }
        *delivered = Some(connected);
        self.has_delivered.store(true, Release);
        drop(delivered);
        (self.waker)();
        Ok(())
    }

    /// Returns whether the node no longer waits for a connection.
    pub fn is_closed(&self) -> bool {
        self.closed.load(Acquire)
    }

    /// Returns the number of failed attempts since the last useful connection. A connection that was lost
    /// before it was useful counts as a failed attempt: a server that accepts and closes connections is no
    /// better than one that refuses them.
    pub fn failures(&self) -> u32 {
        self.failures.load(Relaxed)
    }

    /// Counts a failed attempt.
    pub fn count_failure(&self) {
        // Only the node and the task that connects for it count, and never at the same time.
        self.failures.store(self.failures().saturating_add(1), Relaxed);
    }

    /// Reports that nothing listens at the server's address, and wakes the node, which need not wait for
    /// the first connection then.
    pub fn report_refused(&self) {
        if !self.refused.swap(true, Release) {
            (self.waker)();
        }
    }

    /// Returns whether an attempt found that nothing listens at the server's address.
    pub(crate) fn is_refused(&self) -> bool {
        self.refused.load(Acquire)
    }

    /// Resets the count of failures after a useful connection, so that the next attempt is made at once.
    pub(crate) fn forget_failures(&self) {
        self.failures.store(0, Relaxed);
    }

    /// Takes the connection that was passed, if there is one; otherwise costs one atomic load.
    #[inline]
    pub(crate) fn take(&self) -> Option<Connected<S, E>> {
        if !self.has_delivered.load(Acquire) {
            return None;
        }
        self.has_delivered.store(false, Release);
        self.lock().take()
    }

    /// Closes the channel. Returns a connection that was passed but not taken.
    pub(crate) fn close(&self) -> Option<Connected<S, E>> {
        let mut delivered = self.lock();
        self.closed.store(true, Release);
        delivered.take()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

    fn connected(stream: u32) -> Connected<u32> {
        Connected { stream, session: super::super::testing::session(1 << 20) }
    }

    #[test]
    fn a_connection_is_taken_once_and_wakes_the_queue() {
        let wakes = Arc::new(AtomicU32::new(0));
        let counted = wakes.clone();
        let channel = ConnectionChannel::new(Arc::new(move || _ = counted.fetch_add(1, Relaxed)));
        assert!(channel.take().is_none());
        channel.deliver(connected(7)).unwrap();
        assert_eq!(channel.deliver(connected(8)).unwrap_err().stream, 8, "one at a time");
        assert_eq!(channel.take().unwrap().stream, 7);
        assert!(channel.take().is_none());
        assert_eq!(wakes.load(Relaxed), 1);
    }

    #[test]
    fn a_closed_line_accepts_no_connection() {
        let channel = ConnectionChannel::new(Arc::new(|| {}));
        channel.deliver(connected(1)).unwrap();
        assert_eq!(channel.close().unwrap().stream, 1);
        assert!(channel.is_closed() && channel.deliver(connected(2)).is_err());
    }
}
