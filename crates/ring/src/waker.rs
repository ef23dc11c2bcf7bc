//! Waking a ring from another thread: one eventfd, written to only when nobody has done so since the ring
//! last looked. The I/O threads of the epoll engine use it as well, under another bit.

use crate::sys;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

/// Someone called [`Waker::wake`].
pub(crate) const WOKEN: u32 = 1;
/// An I/O thread has ended something.
pub(crate) const WORKED: u32 = 2;

struct Shared {
    /// Never read: it is watched for edges, and every write is one.
    fd: OwnedFd,
    /// What has happened since the ring last looked.
    bits: AtomicU32,
}

/// Wakes one ring. Any thread may use it, also after the ring is gone.
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

    /// The ring hands out one [`Event::Woken`](crate::Event::Woken) after this, however often it is called
    /// until then. What the caller wrote before is seen by whoever takes that event.
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

    /// Whether anything was raised; no more than a hint.
    #[inline]
    pub(crate) fn is_raised(&self) -> bool {
        self.0.bits.load(Ordering::Relaxed) != 0
    }

    /// Take what was raised. From here on the next one writes again.
    #[inline]
    pub(crate) fn take(&self) -> u32 {
        self.0.bits.swap(0, Ordering::AcqRel)
    }

    pub(crate) fn fd(&self) -> RawFd {
        self.0.fd.as_raw_fd()
    }
}
