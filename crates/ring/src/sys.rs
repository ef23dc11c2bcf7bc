//! System calls as functions that return `io::Result`, and an owned memory mapping.

use queue::Nanos;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::ptr::NonNull;

/// The errno of a failed system call.
pub(crate) fn errno() -> i32 {
    io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO)
}

pub(crate) fn check(result: libc::c_int) -> io::Result<libc::c_int> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

/// Converts a result to the convention of rings: bytes or a negative errno.
pub(crate) fn signed(result: isize) -> i64 {
    if result < 0 { -i64::from(errno()) } else { result as i64 }
}

/// The monotonic clock.
#[inline]
pub(crate) fn now() -> Nanos {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is a valid destination, and this clock always exists.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut time) };
    Nanos(time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64)
}

/// Takes ownership of a descriptor that a system call has created.
pub(crate) fn owned(fd: libc::c_int) -> io::Result<OwnedFd> {
    // SAFETY: a non-negative result of a call that creates a descriptor is owned by us alone.
    check(fd).map(|fd| unsafe { OwnedFd::from_raw_fd(fd) })
}

pub(crate) fn eventfd() -> io::Result<OwnedFd> {
    // SAFETY: takes no pointers.
    owned(unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) })
}

pub(crate) fn eventfd_write(fd: RawFd) {
    let one = 1u64;
    // SAFETY: eight readable bytes. The call cannot fail in practice: the count never comes near 2^64.
    unsafe { libc::write(fd, (&raw const one).cast(), 8) };
}

/// Whether `O_NONBLOCK` is set.
pub(crate) fn is_nonblocking(fd: RawFd) -> bool {
    // SAFETY: takes no pointers.
    check(unsafe { libc::fcntl(fd, libc::F_GETFL) }).is_ok_and(|flags| flags & libc::O_NONBLOCK != 0)
}

/// Whether a write to an eventfd would not wait now.
pub(crate) fn is_writable(fd: RawFd) -> bool {
    let mut poll = libc::pollfd { fd, events: libc::POLLOUT, revents: 0 };
    // SAFETY: one structure to read and write until the call returns, which is at once.
    unsafe { libc::poll(&mut poll, 1, 0) == 1 && poll.revents & libc::POLLOUT != 0 }
}

/// Sets or clears `O_NONBLOCK`.
pub(crate) fn set_nonblocking(fd: RawFd, on: bool) -> io::Result<()> {
    // SAFETY: takes no pointers.
    let flags = check(unsafe { libc::fcntl(fd, libc::F_GETFL) })?;
    let wanted = if on { flags | libc::O_NONBLOCK } else { flags & !libc::O_NONBLOCK };
    if wanted != flags {
        // SAFETY: takes no pointers.
        check(unsafe { libc::fcntl(fd, libc::F_SETFL, wanted) })?;
    }
    Ok(())
}

/// Doubles the send buffer of a Unix socket (416 KiB instead of 208), so that a large send wakes this thread
/// less often: NBD reads of 1 MiB cost the server 15 % less CPU, and more gains nothing. The kernel doubles
/// the requested value, and grants this much without a change of `net.core.wmem_max`. TCP tunes its buffers
/// by itself and is left alone.
pub(crate) fn widen_unix_socket(fd: RawFd) {
    let send_buffer: libc::c_int = 208 << 10;
    let (mut domain, mut len) = (0 as libc::c_int, size_of::<libc::c_int>() as libc::socklen_t);
    // SAFETY: both destinations are valid for a result of `len` bytes until the call returns.
    let known = unsafe {
        let answer = (&raw mut domain).cast();
        libc::getsockopt(fd, libc::SOL_SOCKET, libc::SO_DOMAIN, answer, &mut len)
    };
    if known == 0 && domain == libc::AF_UNIX {
        let wanted = (&raw const send_buffer).cast();
        // SAFETY: `len` readable bytes. If it is refused, the default buffer works as well.
        unsafe { libc::setsockopt(fd, libc::SOL_SOCKET, libc::SO_SNDBUF, wanted, len) };
    }
}

/// Shuts down both directions of a socket, which ends operations waiting on it.
pub(crate) fn shutdown(fd: RawFd) {
    // SAFETY: takes no pointers. Failure means that the socket is no longer connected, which is fine.
    unsafe { libc::shutdown(fd, libc::SHUT_RDWR) };
}

/// Whether this thread has the default scheduling policy.
pub(crate) fn is_scheduled_plainly() -> bool {
    // SAFETY: takes no pointers; 0 is the calling thread.
    unsafe { libc::sched_getscheduler(0) == libc::SCHED_OTHER }
}

/// Selects `SCHED_BATCH` or the default policy for this thread. A refusal changes nothing.
pub(crate) fn schedule_as_batch(batch: bool) {
    let policy = if batch { libc::SCHED_BATCH } else { libc::SCHED_OTHER };
    // SAFETY: all zeroes are a valid value of the structure, which has more fields in some C libraries.
    let priority: libc::sched_param = unsafe { std::mem::zeroed() };
    // SAFETY: the parameter is read during the call only; 0 is the calling thread.
    unsafe { libc::sched_setscheduler(0, policy, &raw const priority) };
}

/// The soft limit on open files.
pub(crate) fn open_files_max() -> u64 {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: `limit` is a valid destination.
    if unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit) } == 0 { limit.rlim_cur } else { 256 }
}

/// A memory mapping: private and zeroed, with pages allocated on first access, or shared with a file.
pub(crate) struct Mapping {
    base: NonNull<u8>,
    len: usize,
}

impl Mapping {
    /// Maps `len` bytes, a multiple of the page size.
    pub(crate) fn new(len: usize) -> io::Result<Mapping> {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new anonymous mapping at an address of the kernel's choice; it replaces no other mapping.
        let base = unsafe { libc::mmap(std::ptr::null_mut(), len, protection, flags, -1, 0) };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let base = NonNull::new(base.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Mapping { base, len })
    }

    /// Maps the first `len` bytes of a file, shared with other processes.
    pub(crate) fn of_file(file: BorrowedFd<'_>, len: usize) -> io::Result<Mapping> {
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let (nowhere, file) = (std::ptr::null_mut(), file.as_raw_fd());
        // SAFETY: a new mapping at an address of the kernel's choice; it replaces no other mapping.
        let base = unsafe { libc::mmap(nowhere, len, protection, libc::MAP_SHARED, file, 0) };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let base = NonNull::new(base.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Mapping { base, len })
    }

    pub(crate) fn base(&self) -> NonNull<u8> {
        self.base
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Disables transparent huge pages for the mapping.
    pub(crate) fn without_huge_pages(&self) {
        // SAFETY: the whole of our own mapping; only its page size changes. A kernel without huge pages
        // refuses, which is fine.
        unsafe { libc::madvise(self.base.as_ptr().cast(), self.len, libc::MADV_NOHUGEPAGE) };
    }

    /// Returns the memory of a page-aligned range to the system; it reads as zeroes then. Returns whether the
    /// system accepted.
    pub(crate) fn discard(&self, offset: usize, len: usize) -> bool {
        assert!(offset <= self.len && len <= self.len - offset);
        // SAFETY: the range lies in our own mapping.
        let start = unsafe { self.base.as_ptr().add(offset) }.cast();
        // SAFETY: the range lies in our own mapping, and its content is no longer needed.
        let advise = |advice| unsafe { libc::madvise(start, len, advice) == 0 };
        // A process that serves the kernel locks its memory (mlockall), which MADV_DONTNEED refuses to
        // release. Before Linux 5.18, which brought MADV_DONTNEED_LOCKED, it must be unlocked first.
        advise(libc::MADV_DONTNEED_LOCKED) || advise(libc::MADV_DONTNEED) || {
            // SAFETY: both calls only change whether pages of our own mapping may be swapped out. Where it
            // was not locked, or cannot be locked again, the memory works as before.
            unsafe { libc::munlock(start, len) };
            let is_gone = advise(libc::MADV_DONTNEED);
            // SAFETY: as above.
            unsafe { libc::mlock2(start, len, libc::MLOCK_ONFAULT as libc::c_uint) };
            is_gone
        }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the whole of our own mapping; the owner has made sure that the kernel no longer uses it.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.len) };
    }
}
