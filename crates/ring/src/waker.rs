//! Wakes a ring from another thread through an eventfd, which is written only if nobody has done so since the
//! ring last checked. The I/O threads of the epoll engine use it as well, with another bit.

use crate::sys;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

/// [`Waker::wake`] was called.
pub(crate) const WOKEN: u32 = 1;
/// An I/O thread has completed an operation.
pub(crate) const WORKED: u32 = 2;

struct Shared {
    /// Never read: it is watched edge-triggered, and every write is an edge.
    fd: OwnedFd,
    /// Bits raised since the ring last checked.
    bits: AtomicU32,
}

/// Wakes one ring. Any thread may use it, even after the ring was dropped.
#[derive(Clone)]
pub struct Waker(Arc<Shared>);

impl std::fmt::Debug for Waker {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Waker").field(&self.0.fd.as_raw_fd()).finish()
    }
}

impl Waker {
    pub(crate) fn new() -> io::Result<Waker> {
        Ok(Waker(Arc::new(Shared { fd: sys::eventfd()?, bits: AtomicU32::new(0) })))
    }

    /// Makes the ring return one [`Event::Woken`](crate::Event::Woken), however often this is called before.
    /// The caller's earlier writes are visible to the receiver of that event.
    #[inline]
    pub fn wake(&self) {
        self.raise(WOKEN);
    }

    #[inline]
    pub(crate) fn raise(&self, bit: u32) {
        if self.0.bits.fetch_or(bit, Ordering::AcqRel) == 0 {
            sys::eventfd_write(self.0.fd.as_raw_fd());
        }
    }

    /// Whether a bit was raised; only a hint.
    #[inline]
    pub(crate) fn is_raised(&self) -> bool {
        self.0.bits.load(Ordering::Relaxed) != 0
    }

    /// Takes the raised bits. The next raise writes to the eventfd again.
    #[inline]
    pub(crate) fn take(&self) -> u32 {
        self.0.bits.swap(0, Ordering::AcqRel)
    }

    pub(crate) fn fd(&self) -> RawFd {
        self.0.fd.as_raw_fd()
    }
}
