//! Memory that several threads copy to and from concurrently: the only unsafe part of `ram`.
//!
//! It behaves like the memory of a device: a read that overlaps a write sees any mixture of old and new
//! bytes, and a caller that needs an order waits for one request before it sends the next. No reference
//! into the mapping is ever created, only copies, so no two references alias.
//!
//! *Invariant:* every access is checked against the mapping's length.
#![allow(unsafe_code)]

use ring::ForeignMemory;
use rustix::process::getpid;
use rustix::thread::{sched_getaffinity, sched_setaffinity};
use std::any::Any;
use std::io;
use std::ptr::NonNull;
use std::sync::Arc;

/// Granularity of `madvise`. The kernel's pages are 4 KiB on x86-64; if they are larger, freeing fails and
/// zeroes are written instead.
pub(crate) const PAGE: usize = 4096;

/// Bytes of a cache line.
#[cfg(target_arch = "x86_64")]
const LINE: usize = 64;
/// Number of lines that [`Memory::prefetch`] loads. With fewer, the copy that follows waits for lines before
/// the processor has detected the sequential access; measured with 1 to 64.
#[cfg(target_arch = "x86_64")]
const PREFETCH_LINES: usize = 16;

/// An anonymous mapping, initially zero and without backing until it is written.
#[derive(Debug)]
pub(crate) struct Memory {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: the mapping belongs to the process, not to a thread, and is unmapped only on drop.
unsafe impl Send for Memory {}
// SAFETY: shared access only copies bytes in and out by raw pointer, as the header says.
unsafe impl Sync for Memory {}

impl Memory {
    /// Maps `len` bytes, rounded up to whole pages. `huge`: with huge pages if possible.
    pub(crate) fn map(len: usize, huge: bool) -> io::Result<Memory> {
        let len = len.checked_next_multiple_of(PAGE).ok_or(io::ErrorKind::OutOfMemory)?;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: a new anonymous mapping at an address of the kernel's choice touches nothing of ours.
        let base = unsafe {
            libc::mmap(std::ptr::null_mut(), len, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0)
        };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let Some(base) = NonNull::new(base.cast::<u8>()) else {
            return Err(io::ErrorKind::OutOfMemory.into());
        };
        let memory = Memory { base, len };
        // Use small pages by default: with huge ones a small write would take 2 MiB.
        let advice = if huge { libc::MADV_HUGEPAGE } else { libc::MADV_NOHUGEPAGE };
        // SAFETY: the range is the new mapping. A kernel without huge pages refuses, which has no effect.
        unsafe { libc::madvise(memory.base.as_ptr().cast(), len, advice) };
        Ok(memory)
    }

    /// Describes the mapping for a ring that sends from it. `keep` owns the mapping, which stays as long as
    /// any clone of `keep` exists.
    pub(crate) fn lend(&self, keep: Arc<dyn Any + Send + Sync>) -> ForeignMemory {
        // SAFETY: the mapping is page-aligned, `len` bytes long, and unmapped only when `keep` drops it.
        // A ring accesses it only by passing it to the kernel.
        unsafe { ForeignMemory::new(self.base, self.len, keep) }
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    #[inline]
    fn check(&self, at: u64, len: usize) -> *mut u8 {
        let fits = usize::try_from(at).is_ok_and(|at| at <= self.len && len <= self.len - at);
        assert!(fits, "{len} bytes at {at} do not lie in memory of {}", self.len);
        // SAFETY: `at` is at most the mapping's length, so the pointer stays in it or one past its end.
        unsafe { self.base.as_ptr().add(at as usize) }
    }

    /// Starts to load the first lines from `at` on, and the page's translation, into the processor's
    /// caches. This is only a hint; nothing is read or written.
    #[inline]
    pub(crate) fn prefetch(&self, at: u64) {
        #[cfg(target_arch = "x86_64")]
        if at.saturating_add((PREFETCH_LINES * LINE) as u64) <= self.len as u64 {
            use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
            for line in 0..PREFETCH_LINES {
                // SAFETY: the line lies in the mapping, and a prefetch changes no memory.
                unsafe {
                    _mm_prefetch::<_MM_HINT_T0>(self.base.as_ptr().add(at as usize + line * LINE).cast())
                };
            }
        }
        #[cfg(not(target_arch = "x86_64"))]
        let _ = at;
    }

    /// Copies bytes out of the mapping, from `at` on.
    #[inline]
    pub(crate) fn read(&self, at: u64, into: &mut [u8]) {
        let from = self.check(at, into.len());
        // SAFETY: `check` found the range in the mapping; `into` is exclusive and no part of the mapping,
        // of which no reference exists. Bytes have no invalid values, so a concurrent write is benign.
        unsafe { std::ptr::copy_nonoverlapping(from, into.as_mut_ptr(), into.len()) }
    }

    /// Copies bytes into the mapping at `at`.
    #[inline]
    pub(crate) fn write(&self, at: u64, from: &[u8]) {
        let into = self.check(at, from.len());
        // SAFETY: as in `read`, in the other direction.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), into, from.len()) }
    }

    /// Writes `len` zeroes at `at`.
    pub(crate) fn zero(&self, at: u64, len: usize) {
        let into = self.check(at, len);
        // SAFETY: `check` found the range in the mapping, and no reference into it exists.
        unsafe { std::ptr::write_bytes(into, 0, len) }
    }

    /// Returns whole pages to the system; they read as zeroes afterwards.
    pub(crate) fn release(&self, at: u64, len: usize) {
        let start = self.check(at, len);
        debug_assert!(at.is_multiple_of(PAGE as u64) && len.is_multiple_of(PAGE));
        // SAFETY: the range lies in our private anonymous mapping, whose pages may vanish at any time as
        // far as its users are concerned: they hold no references.
        if unsafe { libc::madvise(start.cast(), len, libc::MADV_DONTNEED) } != 0 {
            self.zero(at, len);
        }
    }
}

/// Length in bytes up to which a mapping is unmapped at once. Larger ones are unmapped on a separate
/// thread: for every GiB of small pages the kernel takes about 90 ms, for which the thread that removes a
/// disk need not wait.
const AT_ONCE_MAX: usize = 8 << 20;

/// Lets this thread run on the CPUs of the process's first thread. The last owner of a memory may be an I/O
/// thread that is pinned to one CPU, which the new thread would inherit. A failure has no effect.
fn leave_cpu() {
    if let Ok(set) = sched_getaffinity(Some(getpid())) {
        let _ = sched_setaffinity(None, &set);
    }
}

/// A mapping to unmap.
struct Mapping {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: the mapping belongs to the process, and no one accesses it any more.
unsafe impl Send for Mapping {}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: base and length are those of the mapping, and no one accesses it any more.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.len) };
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        let mapping = Mapping { base: self.base, len: self.len };
        if self.len > AT_ONCE_MAX {
            // If no thread can be started, the closure, and so the mapping, is dropped here.
            let _ = std::thread::Builder::new().name("give-back".to_owned()).spawn(move || {
                leave_cpu();
                drop(mapping);
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::thread::CpuSet;

    fn cpus() -> Vec<usize> {
        let set = sched_getaffinity(None).expect("the kernel reports the affinity");
        (0..CpuSet::MAX_CPU).filter(|cpu| set.is_set(*cpu)).collect()
    }

    #[test]
    fn a_thread_that_frees_memory_is_not_pinned() {
        let before = cpus();
        let first = before[0];
        let kept = std::thread::spawn(move || {
            let mut one = CpuSet::new();
            one.set(first);
            sched_setaffinity(None, &one).expect("one of those that this thread has");
            assert_eq!(cpus(), [first]);
            let giving_back = std::thread::spawn(|| {
                leave_cpu();
                cpus()
            });
            giving_back.join().expect("it ends")
        });
        assert_eq!(kept.join().expect("it ends"), before);
    }
}
