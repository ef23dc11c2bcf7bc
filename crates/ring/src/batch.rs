//! Inline file operations of a turn, performed by one system call: Linux AIO (io_submit(2)).
//!
//! `io_submit` performs buffered reads and writes of page-cache and tmpfs files within the call, one after
//! the other, as `preadv2` and `pwritev2` would: no worker thread is involved, unlike io_uring for a file
//! whose writes cannot be non-blocking. With a few operations in a turn, a call for each is as fast, and
//! their results need no further turn; so operations are batched while turns have several.
//!
//! Owned by a ring. Knows slots of [`Ops`](crate::ops::Ops), not requests.

use crate::sys;
use queue::{Blocking, FileOp};
use std::io;

/// Most operations of a batch.
const BATCH_MAX: usize = 64;
/// A turn is batched from its first operation if earlier turns had this many, and from the next one if it had
/// this many itself.
const BATCH_MIN: u32 = 4;
/// Longest operation that is batched, in bytes: for longer ones, the cost of a system call does not matter.
/// So a batch moves at most 1 MiB, as one request of maximum size does.
pub(crate) const LEN_MAX: u32 = 16 << 10;

/// `IOCB_CMD_PREAD` and `IOCB_CMD_PWRITE`.
const READ: u16 = 0;
const WRITE: u16 = 1;

/// `struct iocb`, for little-endian and big-endian machines except for `key` and `flags`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Iocb {
    data: u64,
    #[cfg(target_endian = "little")]
    key: u32,
    flags: i32,
    #[cfg(target_endian = "big")]
    key: u32,
    opcode: u16,
    priority: i16,
    fd: u32,
    address: u64,
    len: u64,
    offset: i64,
    reserved: u64,
    iocb_flags: u32,
    event_fd: u32,
}

/// `struct io_event`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct IoEvent {
    data: u64,
    iocb: u64,
    result: i64,
    result2: i64,
}

/// A kernel AIO context.
struct Context(libc::c_ulong);

impl Context {
    fn new() -> io::Result<Context> {
        let mut id: libc::c_ulong = 0;
        // SAFETY: `id` is zero, as the call requires, and a valid destination.
        let result = unsafe { libc::syscall(libc::SYS_io_setup, BATCH_MAX as libc::c_uint, &raw mut id) };
        if result < 0 { Err(io::Error::last_os_error()) } else { Ok(Context(id)) }
    }

    /// Submits operations. Returns how many the kernel accepted, or a negative errno for the first.
    fn submit(&self, list: &[*const Iocb]) -> i64 {
        // SAFETY: the pointers refer to entries that live until the call returns; the memory that the entries
        // name stays until their completion, as with any operation of the ring.
        let result = unsafe { libc::syscall(libc::SYS_io_submit, self.0, list.len(), list.as_ptr()) };
        sys::signed(result as isize)
    }

    /// Waits for the results of as many operations as `events` has entries. Returns how many were filled, or
    /// a negative errno.
    fn wait(&self, events: &mut [IoEvent]) -> i64 {
        let (count, nothing) = (events.len(), std::ptr::null_mut::<libc::timespec>());
        // SAFETY: `events` is writable for `count` entries; no timeout.
        let result = unsafe {
            libc::syscall(libc::SYS_io_getevents, self.0, count, count, events.as_mut_ptr(), nothing)
        };
        sys::signed(result as isize)
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: takes no pointers; waits for operations in flight, of which there are none.
        unsafe { libc::syscall(libc::SYS_io_destroy, self.0) };
    }
}

/// The batch of a ring.
#[derive(Default)]
pub(crate) struct Batch {
    /// Created with the first batch.
    context: Option<Context>,
    /// The kernel has no AIO, or no context is left (`fs.aio-max-nr`).
    unavailable: bool,
    entries: Vec<Iocb>,
    /// Inline operations since the last turn, batched or not.
    count: u32,
    /// Most such operations in a recent turn: halved by each turn that has fewer. Turns of a client with 32
    /// requests in flight may alternate between 31 and one.
    recent: u32,
    /// Results of the last batch, by entry.
    results: Vec<(u32, i64)>,
    /// Duration of the last batch, in nanoseconds.
    took_ns: u64,
}

impl Batch {
    /// Counts an inline operation. Returns whether to batch it.
    #[inline]
    pub(crate) fn admits(&mut self) -> bool {
        self.count += 1;
        (self.recent >= BATCH_MIN || self.count > BATCH_MIN) && !self.unavailable
    }

    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    #[inline]
    pub(crate) fn is_full(&self) -> bool {
        self.entries.len() == BATCH_MAX
    }

    /// Whether an operation waits for the next turn.
    pub(crate) fn contains(&self, slot: u32) -> bool {
        self.entries.iter().any(|entry| entry.data == u64::from(slot))
    }

    #[inline]
    pub(crate) fn took_ns(&self) -> u64 {
        self.took_ns
    }

    /// Ends a turn: how many operations it had is considered for the next ones.
    #[inline]
    pub(crate) fn end_turn(&mut self) {
        if self.count > 0 {
            self.recent = std::mem::take(&mut self.count).max(self.recent / 2);
        }
    }

    /// Prepares the context. Returns `false` if there is none.
    pub(crate) fn prepare(&mut self) -> bool {
        if self.context.is_none() {
            match Context::new() {
                Ok(context) => self.context = Some(context),
                Err(_) => self.unavailable = true,
            }
        }
        self.context.is_some()
    }

    /// Adds a read or write.
    #[inline]
    pub(crate) fn push(
        &mut self,
        slot: u32,
        fd: i32,
        op: FileOp,
        (address, len): (*mut u8, u32),
        blocking: Blocking,
    ) {
        let (opcode, offset) = match op {
            FileOp::Read { offset } => (READ, offset),
            FileOp::Write { offset, .. } => (WRITE, offset),
            _ => unreachable!("only reads and writes are batched"),
        };
        self.entries.push(Iocb {
            data: slot.into(),
            key: 0,
            flags: if blocking == Blocking::Never { libc::RWF_NOWAIT } else { 0 },
            opcode,
            priority: 0,
            fd: fd as u32,
            address: address.expose_provenance() as u64,
            len: len.into(),
            offset: offset as i64,
            reserved: 0,
            iocb_flags: 0,
            event_fd: 0,
        });
    }

    /// Performs the batch. [`result`](Batch::result) returns the results.
    pub(crate) fn run(&mut self) {
        let start = sys::now();
        let Some(context) = &self.context else { return };
        let list: [*const Iocb; BATCH_MAX] =
            std::array::from_fn(|at| self.entries.get(at).map_or(std::ptr::null(), std::ptr::from_ref));
        let list = &list[..self.entries.len()];
        let (mut at, mut accepted) = (0, 0);
        while at < list.len() {
            match context.submit(&list[at..]) {
                count if count > 0 => {
                    at += count as usize;
                    accepted += count as usize;
                }
                // The kernel refuses this operation, and has not seen those behind it. Its submitter starts
                // it on the engine, which gives the proper result.
                _ => {
                    self.results.push((self.entries[at].data as u32, -i64::from(libc::EAGAIN)));
                    self.unavailable = true;
                    at += 1;
                }
            }
        }
        let mut events = [IoEvent::default(); BATCH_MAX];
        let mut filled = 0;
        while filled < accepted {
            match context.wait(&mut events[filled..accepted]) {
                count if count >= 0 => filled += count as usize,
                error if error == -i64::from(libc::EINTR) => {}
                error => panic!("io_getevents: errno {}", -error),
            }
        }
        self.results.extend(events[..filled].iter().map(|event| (event.data as u32, event.result)));
        self.entries.clear();
        self.took_ns = sys::now().since(start);
    }

    /// Removes and returns a slot with its result.
    pub(crate) fn result(&mut self) -> Option<(u32, i64)> {
        self.results.pop()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// System calls for turns with these numbers of operations, `rounds` times.
    fn calls(turns: &[u32], rounds: u32) -> u32 {
        let mut batch = Batch::default();
        let mut calls = 0;
        for &operations in turns.iter().cycle().take(turns.len() * rounds as usize) {
            let batched = (0..operations).filter(|_| batch.admits()).count() as u32;
            // Submission and results of a batch.
            calls += operations - batched + if batched > 0 { 2 } else { 0 };
            batch.end_turn();
        }
        calls
    }

    #[test]
    fn turns_with_many_operations_take_two_calls() {
        assert!(calls(&[32], 100) <= 2 * 100 + 4);
        assert!(calls(&[31, 1], 100) <= 4 * 100 + 4, "even if every other one has few");
        assert!(calls(&[16, 1, 1, 1, 1, 1], 100) <= 20 * 100);
    }

    #[test]
    fn a_call_each_is_made_while_turns_have_few_operations() {
        assert_eq!(calls(&[1], 100), 100);
        assert_eq!(calls(&[3, 2], 100), 500);
    }

    #[test]
    fn the_rest_of_a_first_large_turn_is_batched() {
        assert_eq!(calls(&[64], 1), BATCH_MIN + 2);
    }
}
