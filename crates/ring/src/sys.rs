//! System calls as functions that return `io::Result`, and a mapping that unmaps itself.

use queue::Nanos;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::ptr::NonNull;

/// The errno of a system call that answered -1.
pub(crate) fn errno() -> i32 {
    io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO)
}

pub(crate) fn check(result: libc::c_int) -> io::Result<libc::c_int> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

/// A result as rings report it: bytes or a negative errno.
pub(crate) fn signed(result: isize) -> i64 {
    if result < 0 { -i64::from(errno()) } else { result as i64 }
}

/// The monotonic clock.
#[inline]
pub(crate) fn now() -> Nanos {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is a valid place for the answer, and this clock always exists.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut time) };
    Nanos(time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64)
}

/// A descriptor that the kernel just made for us.
pub(crate) fn owned(fd: libc::c_int) -> io::Result<OwnedFd> {
    // SAFETY: a non-negative answer of a call that makes a descriptor is ours alone.
    check(fd).map(|fd| unsafe { OwnedFd::from_raw_fd(fd) })
}

pub(crate) fn eventfd() -> io::Result<OwnedFd> {
    // SAFETY: takes no pointers.
    owned(unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) })
}

pub(crate) fn eventfd_write(fd: RawFd) {
    let one = 1u64;
    // SAFETY: eight readable bytes. Nothing can go wrong that matters: the count never comes near 2^64.
    unsafe { libc::write(fd, (&raw const one).cast(), 8) };
}

/// Set or clear `O_NONBLOCK`.
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

/// Let a Unix socket hold twice as much of what is sent as by default (416 KiB for 208), so that a large send
/// wakes this thread less often: 1 MiB reads cost an NBD server 15 % less CPU so, and more gains nothing. The
/// kernel doubles what it is asked for, and takes this much without a change of `net.core.wmem_max`. TCP sizes
/// its buffers by itself and is left alone.
pub(crate) fn widen_unix_socket(fd: RawFd) {
    let send_buffer: libc::c_int = 208 << 10;
    let (mut domain, mut len) = (0 as libc::c_int, size_of::<libc::c_int>() as libc::socklen_t);
    // SAFETY: both places are valid for an answer of `len` bytes until the call returns.
    let known = unsafe {
        let answer = (&raw mut domain).cast();
        libc::getsockopt(fd, libc::SOL_SOCKET, libc::SO_DOMAIN, answer, &mut len)
    };
    if known == 0 && domain == libc::AF_UNIX {
        let wanted = (&raw const send_buffer).cast();
        // SAFETY: `len` readable bytes. A refusal leaves the socket as it was, which works as well.
        unsafe { libc::setsockopt(fd, libc::SOL_SOCKET, libc::SO_SNDBUF, wanted, len) };
    }
}

/// End both directions of a socket; whatever waits on it wakes up.
pub(crate) fn shutdown(fd: RawFd) {
    // SAFETY: takes no pointers. A socket that is not connected any more is what we want.
    unsafe { libc::shutdown(fd, libc::SHUT_RDWR) };
}

/// Whether this thread has the scheduling policy that threads have by themselves.
pub(crate) fn is_scheduled_plainly() -> bool {
    // SAFETY: takes no pointers; 0 is the calling thread.
    unsafe { libc::sched_getscheduler(0) == libc::SCHED_OTHER }
}

/// Have the scheduler wake this thread with less haste than others, or with as much. A refusal changes nothing.
pub(crate) fn schedule_as_batch(batch: bool) {
    let policy = if batch { libc::SCHED_BATCH } else { libc::SCHED_OTHER };
    let priority = libc::sched_param { sched_priority: 0 };
    // SAFETY: the parameter is read during the call only; 0 is the calling thread.
    unsafe { libc::sched_setscheduler(0, policy, &raw const priority) };
}

/// The soft limit on open files.
pub(crate) fn open_files_max() -> u64 {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: `limit` is a valid place for the answer.
    if unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit) } == 0 { limit.rlim_cur } else { 256 }
}

/// Memory of our own: private and zeroed, not backed by anything until it is touched, unless it is a file's.
pub(crate) struct Mapping {
    base: NonNull<u8>,
    len: usize,
}

impl Mapping {
    /// `len` bytes, a multiple of the page size.
    pub(crate) fn new(len: usize) -> io::Result<Mapping> {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new anonymous mapping, where the kernel likes; nothing of ours is replaced.
        let base = unsafe { libc::mmap(std::ptr::null_mut(), len, protection, flags, -1, 0) };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let base = NonNull::new(base.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Mapping { base, len })
    }

    /// The first `len` bytes of a file, shared with whoever else has it mapped.
    pub(crate) fn of_file(file: BorrowedFd<'_>, len: usize) -> io::Result<Mapping> {
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let (nowhere, file) = (std::ptr::null_mut(), file.as_raw_fd());
        // SAFETY: a new mapping, where the kernel likes; nothing of ours is replaced.
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

    /// Have it taken page by page, whatever the system does otherwise.
    pub(crate) fn without_huge_pages(&self) {
        // SAFETY: our own mapping, whole; this changes nothing but how it is backed. A kernel without huge pages
        // refuses, which is as well.
        unsafe { libc::madvise(self.base.as_ptr().cast(), self.len, libc::MADV_NOHUGEPAGE) };
    }

    /// Gives the memory behind a range back to the system, both ends multiples of the page size. It reads as zeroes next.
    /// Whether the system took it.
    pub(crate) fn discard(&self, offset: usize, len: usize) -> bool {
        assert!(offset <= self.len && len <= self.len - offset);
        // SAFETY: the range lies in our own mapping.
        let start = unsafe { self.base.as_ptr().add(offset) }.cast();
        // SAFETY: the range lies in our own mapping, and nobody relies on its content.
        let advise = |advice| unsafe { libc::madvise(start, len, advice) == 0 };
        // A process that serves the kernel locks its memory (mlockall), and of that MADV_DONTNEED refuses to let go.
        // Before Linux 5.18 locked memory has to be unlocked for that.
        advise(libc::MADV_DONTNEED_LOCKED) || advise(libc::MADV_DONTNEED) || {
            // SAFETY: both change only whether the pages of our own mapping may be swapped out. Where it was not locked,
            // and where it cannot be locked again, the memory works as before.
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
        // SAFETY: our own mapping, whole; whoever owned us has made sure that the kernel is done with it.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.len) };
    }
}
