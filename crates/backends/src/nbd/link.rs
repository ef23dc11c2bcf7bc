//! How a node comes by its connection: it asks, and is brought one.
//!
//! Connecting, shaking hands and encrypting wait, so the control plane does them. A node that has no connection asks
//! its [`Connector`], which brings one over the node's [`Line`] whenever it has one, and nudges the node's queue. The
//! connector tries again by itself; how long requests wait for it is the node's matter.
//!
//! *Invariant:* a line holds one connection at most, and a node asks again only after it has lost the one it had.

use crate::Fact;
use proto::nbd::Session;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::Acquire, Ordering::Relaxed, Ordering::Release};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A connection on which transmission may start.
#[derive(Debug)]
pub struct Connected<S> {
    /// The stream, in the form in which the ring takes it.
    pub stream: S,
    /// What was agreed on.
    pub session: Session,
}

/// Has a node's queue take a turn. May be called on any thread, at any time.
pub type Nudge = Arc<dyn Fn() + Send + Sync>;

/// Why a node has no connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Loss {
    /// It never had one.
    New,
    /// The server closed it.
    Closed,
    /// The system ended it: a positive errno.
    Failed(i32),
    /// The server left requests unanswered for too long.
    Silent,
    /// The server broke the protocol.
    Nonsense,
    /// The server said that it is shutting down.
    ShuttingDown,
    /// A request had to be given up.
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

/// Whoever connects to the server. It must not wait here.
pub trait Connector<S>: Send + Sync {
    /// The node of this line has no connection: bring it one, as soon as there is one, until the line is closed. The more
    /// attempts have [failed in a row](Line::failures), the longer the connector pauses before the next.
    fn connect(&self, line: Arc<Line<S>>, loss: Loss);

    /// What it is doing at the moment, for `show`.
    fn describe(&self) -> Vec<Fact> {
        Vec::new()
    }
}

/// Between one node and its connector.
pub struct Line<S> {
    brought: Mutex<Option<Connected<S>>>,
    has_brought: AtomicBool,
    closed: AtomicBool,
    failures: AtomicU32,
    nudge: Nudge,
}

impl<S> fmt::Debug for Line<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Line").field("closed", &self.closed).finish_non_exhaustive()
    }
}

impl<S> Line<S> {
    /// A line whose node's queue takes a turn when `nudge` is called.
    pub fn new(nudge: Nudge) -> Line<S> {
        Line {
            brought: Mutex::default(),
            has_brought: AtomicBool::new(false),
            closed: AtomicBool::new(false),
            failures: AtomicU32::new(0),
            nudge,
        }
    }

    fn lock(&self) -> MutexGuard<'_, Option<Connected<S>>> {
        self.brought.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Here is a connection.
    ///
    /// # Errors
    /// The node is gone, or has one that it has not taken: it comes back.
    pub fn bring(&self, connected: Connected<S>) -> Result<(), Connected<S>> {
        let mut brought = self.lock();
        if self.is_closed() || brought.is_some() {
            return Err(connected);
        }
        *brought = Some(connected);
        self.has_brought.store(true, Release);
        drop(brought);
        (self.nudge)();
        Ok(())
    }

    /// Whether nobody waits for a connection any more.
    pub fn is_closed(&self) -> bool {
        self.closed.load(Acquire)
    }

    /// How many attempts failed since the last connection that was of use. A connection that was lost before it had been of
    /// use is such an attempt: a server that accepts and hangs up is no better than one that refuses.
    pub fn failures(&self) -> u32 {
        self.failures.load(Relaxed)
    }

    /// Counts an attempt that failed.
    pub fn count_failure(&self) {
        // Only the node and the one task that connects for it count, one after the other.
        self.failures.store(self.failures().saturating_add(1), Relaxed);
    }

    /// A connection was of use: the next attempt is made at once.
    pub(super) fn forget_failures(&self) {
        self.failures.store(0, Relaxed);
    }

    /// What was brought, if anything was: one load when nothing was.
    #[inline]
    pub(super) fn take(&self) -> Option<Connected<S>> {
        if !self.has_brought.load(Acquire) {
            return None;
        }
        self.has_brought.store(false, Release);
        self.lock().take()
    }

    /// Nothing more is wanted. What was brought and not taken comes back.
    pub(super) fn close(&self) -> Option<Connected<S>> {
        let mut brought = self.lock();
        self.closed.store(true, Release);
        brought.take()
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
    fn what_is_brought_is_taken_once_and_nudges() {
        let nudges = Arc::new(AtomicU32::new(0));
        let counted = nudges.clone();
        let line = Line::new(Arc::new(move || _ = counted.fetch_add(1, Relaxed)));
        assert!(line.take().is_none());
        line.bring(connected(7)).unwrap();
        assert_eq!(line.bring(connected(8)).unwrap_err().stream, 8, "one at a time");
        assert_eq!(line.take().unwrap().stream, 7);
        assert!(line.take().is_none());
        assert_eq!(nudges.load(Relaxed), 1);
    }

    #[test]
    fn a_closed_line_takes_nothing() {
        let line = Line::new(Arc::new(|| {}));
        line.bring(connected(1)).unwrap();
        assert_eq!(line.close().unwrap().stream, 1);
        assert!(line.is_closed() && line.bring(connected(2)).is_err());
    }
}
