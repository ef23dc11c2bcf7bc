//! I/O threads of the epoll engine, which run blocking file operations. Up to four are started as work
//! exceeds the idle ones; they end with the ring.

use crate::files;
use crate::waker::{WORKED, Waker};
use queue::FileOp;
use std::collections::VecDeque;
use std::io;
use std::os::fd::RawFd;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

/// Most threads: enough to keep a disk busy, few enough to be cheap.
const THREADS_MAX: usize = 4;

/// An operation for a thread.
struct Job {
    slot: u32,
    fd: RawFd,
    op: FileOp,
    iovecs: *const libc::iovec,
    count: usize,
}

// SAFETY: the list and the memory that it refers to stay until the completion is taken; nobody else uses the
// list meanwhile.
unsafe impl Send for Job {}

#[derive(Default)]
struct State {
    jobs: VecDeque<Job>,
    ended: Vec<(u32, i64)>,
    idle: usize,
    stop: bool,
}

struct Shared {
    state: Mutex<State>,
    work: Condvar,
    waker: Waker,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The threads of one ring.
pub(super) struct Workers {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    taken: Vec<(u32, i64)>,
}

impl Workers {
    pub(super) fn new(waker: Waker) -> Workers {
        let shared = Shared { state: Mutex::default(), work: Condvar::new(), waker };
        Workers { shared: Arc::new(shared), threads: Vec::new(), taken: Vec::new() }
    }

    /// Queues an operation. The list, the memory that it refers to and the descriptor must stay valid until
    /// the slot is returned by [`ended`](Workers::ended), or [`take_back`](Workers::take_back) succeeds.
    ///
    /// # Errors
    /// No thread exists and none can be started: nothing was queued.
    pub(super) fn start(&mut self, slot: u32, fd: RawFd, op: FileOp, list: &[libc::iovec]) -> io::Result<()> {
        let job = Job { slot, fd, op, iovecs: list.as_ptr(), count: list.len() };
        let mut state = self.shared.lock();
        if state.idle <= state.jobs.len() && self.threads.len() < THREADS_MAX {
            let shared = self.shared.clone();
            match std::thread::Builder::new().name("blockyard-io".into()).spawn(move || serve(&shared)) {
                Ok(thread) => self.threads.push(thread),
                Err(error) if self.threads.is_empty() => return Err(error),
                Err(_) => {}
            }
        }
        state.jobs.push_back(job);
        drop(state);
        self.shared.work.notify_one();
        Ok(())
    }

    /// Removes a queued operation that no thread has started. Returns whether it was found.
    pub(super) fn take_back(&mut self, slot: u32) -> bool {
        let mut state = self.shared.lock();
        let before = state.jobs.len();
        state.jobs.retain(|job| job.slot != slot);
        state.jobs.len() < before
    }

    /// Operations completed since the last call: slot and result.
    pub(super) fn ended(&mut self) -> std::vec::Drain<'_, (u32, i64)> {
        std::mem::swap(&mut self.taken, &mut self.shared.lock().ended);
        self.taken.drain(..)
    }
}

impl Drop for Workers {
    /// Waits for running operations: until they end, they use the memory.
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        state.jobs.clear();
        state.stop = true;
        drop(state);
        self.shared.work.notify_all();
        for thread in self.threads.drain(..) {
            // The threads do not panic; if one did, there is nothing left to wait for.
            let _ = thread.join();
        }
    }
}

fn serve(shared: &Shared) {
    block_signals();
    let mut state = shared.lock();
    loop {
        let Some(job) = state.jobs.pop_front() else {
            if state.stop {
                return;
            }
            state.idle += 1;
            state = shared.work.wait(state).unwrap_or_else(PoisonError::into_inner);
            state.idle -= 1;
            continue;
        };
        drop(state);
        let list = match job.count {
            0 => &[],
            // SAFETY: the list stays until we answer, see `start`; `count` is its length.
            count => unsafe { std::slice::from_raw_parts(job.iovecs, count) },
        };
        let result = files::run(job.fd, job.op, list);
        state = shared.lock();
        state.ended.push((job.slot, result));
        if state.ended.len() == 1 {
            shared.waker.raise(WORKED);
        }
    }
}

/// Blocks all signals: they are for the threads that expect them.
fn block_signals() {
    // SAFETY: a set of zeroes is valid to be filled, and only this thread's mask is changed.
    unsafe {
        let mut all: libc::sigset_t = std::mem::zeroed();
        libc::sigfillset(&mut all);
        libc::pthread_sigmask(libc::SIG_BLOCK, &all, std::ptr::null_mut());
    }
}
