//! The threads of an image, and the transfer of requests between them and the nodes.

use crate::Access;
use crate::work;
use block::{Bytes, Cookie, Flags, Op};
use queue::QueueWaker;
use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

/// Threads per image: enough for a few disks at the same time, and cheap when idle.
pub(crate) const THREADS: usize = 4;

/// Time without requests after which an image is flushed.
const WRITE_BACK_AFTER: Duration = Duration::from_secs(5);

/// A request with its own copy of the data.
pub(crate) struct Job {
    pub(crate) io: Cookie,
    pub(crate) op: Op,
    pub(crate) flags: Flags,
    pub(crate) offset: Bytes,
    pub(crate) len: Bytes,
    /// Data to write, or space for data to read: exactly as long as the request.
    pub(crate) memory: Vec<u8>,
    /// The list of completed requests to which the thread returns this one.
    pub(crate) back: Arc<Returns>,
}

/// Completed requests of a node.
pub(crate) struct Returns {
    done: Mutex<Vec<(Cookie, i64, Vec<u8>)>>,
    waker: QueueWaker,
}

impl Returns {
    pub(crate) fn new(waker: QueueWaker) -> Returns {
        Returns { done: Mutex::default(), waker }
    }

    /// Takes all completed requests, in exchange for an empty list.
    pub(crate) fn take(&self, into: &mut Vec<(Cookie, i64, Vec<u8>)>) {
        std::mem::swap(&mut *lock(&self.done), into);
    }

    fn put(&self, io: Cookie, result: i64, memory: Vec<u8>) {
        let mut done = lock(&self.done);
        done.push((io, result, memory));
        let first = done.len() == 1;
        drop(done);
        if first {
            (self.waker)();
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[derive(Default)]
struct State {
    jobs: VecDeque<Job>,
    idle: usize,
    stop: bool,
}

struct Shared {
    state: Mutex<State>,
    work: Condvar,
}

/// Handle to the threads. They exit when the last handle is dropped, after the requests that were submitted
/// before. Dropping the handle waits for them, so that the image is closed and unlocked afterwards.
#[derive(Clone)]
pub(crate) struct Pool(Arc<Stopper>);

struct Stopper {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

impl Drop for Stopper {
    fn drop(&mut self) {
        lock(&self.shared.state).stop = true;
        self.shared.work.notify_all();
        for thread in self.threads.drain(..) {
            // An error means that the thread panicked; nothing remains to be done for it.
            let _ = thread.join();
        }
    }
}

impl Pool {
    /// Starts the threads.
    pub(crate) fn start(access: Arc<Access>) -> io::Result<Pool> {
        let shared = Arc::new(Shared { state: Mutex::default(), work: Condvar::new() });
        // Dropped on an error, this stops the threads that were started.
        let mut stopper = Stopper { shared: shared.clone(), threads: Vec::new() };
        for _ in 0..THREADS {
            let (shared, access) = (shared.clone(), access.clone());
            let thread = std::thread::Builder::new().name("image".into());
            stopper.threads.push(thread.spawn(move || serve(&shared, &access))?);
        }
        Ok(Pool(Arc::new(stopper)))
    }

    /// Submits all requests in `jobs`, and leaves it empty.
    pub(crate) fn submit(&self, jobs: &mut Vec<Job>) {
        let shared = &self.0.shared;
        let mut state = lock(&shared.state);
        let wake = state.idle.min(jobs.len());
        state.jobs.extend(jobs.drain(..));
        drop(state);
        (0..wake).for_each(|_| shared.work.notify_one());
    }
}

fn serve(shared: &Shared, access: &Access) {
    let mut state = lock(&shared.state);
    loop {
        let Some(mut job) = state.jobs.pop_front() else {
            if state.stop {
                return;
            }
            state.idle += 1;
            // The last thread to become idle writes back tables that would be lost with this process.
            let keeps = state.idle == THREADS && access.has_changes();
            let rested;
            (state, rested) = if keeps {
                let waited = shared.work.wait_timeout(state, WRITE_BACK_AFTER);
                let (state, timeout) = waited.unwrap_or_else(PoisonError::into_inner);
                (state, timeout.timed_out())
            } else {
                (shared.work.wait(state).unwrap_or_else(PoisonError::into_inner), false)
            };
            state.idle -= 1;
            if rested && state.jobs.is_empty() {
                drop(state);
                access.write_back();
                state = lock(&shared.state);
            }
            continue;
        };
        drop(state);
        let result = work::run(access, &mut job);
        job.back.put(job.io, result, job.memory);
        state = lock(&shared.state);
    }
}
