//! Waking queues whose requests wait for something that a request of another queue, or another thread, has.
//!
//! A [`WaitList`] belongs to what is waited for: a lock, a sync, a log. Each queue (or each node of a queue)
//! has a [`Waiter`] on it. The protocol has two sides:
//!
//! - To wait: [`listen`](WaitList::listen) first, then check once more, and only then stop trying.
//! - To end a wait: change the state first (for example, release the lock), then [`wake`](WaitList::wake).
//!
//! *Invariant:* no wake-up is lost. Both sides are sequentially consistent, so either the second check sees
//! the change or `wake` sees the waiter. `models` tries every order. A waiter may be woken although it still
//! has to wait; it then listens again.
//!
//! Nothing here polls, and where nobody waits `wake` costs one load. [`HeldRequests`] is the part for a node
//! that holds the requests that wait.

use crate::{Cx, Ring, Verdict};
use block::Cookie;
#[cfg(loom)]
use loom::sync::{Mutex, atomic::AtomicBool, atomic::fence};
use std::sync::atomic::Ordering::SeqCst;
use std::sync::{Arc, PoisonError};
#[cfg(not(loom))]
use std::sync::{Mutex, atomic::AtomicBool, atomic::fence};

/// Wakes the thread of one queue and makes the queue take a turn. May be called on any thread, at any time.
pub type QueueWaker = Arc<dyn Fn() + Send + Sync>;

/// Reads the current value. All accesses are sequentially consistent; loom treats such a load as an acquire
/// load, which may return an older value, and knows one order of all threads for read-modify-writes only.
macro_rules! read {
    ($cell:expr) => {{
        #[cfg(loom)]
        let value = $cell.fetch_add(0, SeqCst);
        #[cfg(not(loom))]
        let value = $cell.load(SeqCst);
        value
    }};
}
pub(crate) use read;

/// Reads the current value of a flag: see [`read`].
fn is_set(flag: &AtomicBool) -> bool {
    #[cfg(loom)]
    let value = flag.fetch_or(false, SeqCst);
    #[cfg(not(loom))]
    let value = flag.load(SeqCst);
    value
}

/// One queue on a wait list.
#[derive(Debug)]
pub struct Waiter {
    /// It asked to be woken and was not since.
    listens: AtomicBool,
}

/// The queues that wait for one thing.
#[derive(Default)]
pub struct WaitList {
    /// A waiter may listen. Cleared by `wake` before it visits the waiters.
    any: AtomicBool,
    waiters: Mutex<Vec<(Arc<Waiter>, QueueWaker)>>,
}

impl std::fmt::Debug for WaitList {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("WaitList").field("any", &self.any).finish_non_exhaustive()
    }
}

impl WaitList {
    /// Adds a queue, which `waker` wakes. It leaves when the waiter is dropped.
    pub fn join(&self, waker: QueueWaker) -> Arc<Waiter> {
        let waiter = Arc::new(Waiter { listens: AtomicBool::new(false) });
        let mut waiters = self.waiters.lock().unwrap_or_else(PoisonError::into_inner);
        waiters.retain(|(waiter, _)| Arc::strong_count(waiter) > 1);
        waiters.push((waiter.clone(), waker));
        waiter
    }

    /// Makes the next [`wake`](WaitList::wake) wake this waiter. The caller checks once more afterwards
    /// whether it still has to wait. Returns whether the waiter listened already.
    pub fn listen(&self, waiter: &Waiter) -> bool {
        let listened = waiter.listens.swap(true, SeqCst);
        self.any.swap(true, SeqCst);
        listened
    }

    /// Wakes every waiter that listens. `own`: the waiter of the calling queue; it stops listening without
    /// being woken, because its queue checks again at the end of this turn.
    #[inline]
    pub fn wake(&self, own: Option<&Waiter>) {
        if is_set(&self.any) {
            self.wake_waiters(own);
        }
    }

    /// As [`wake`](WaitList::wake), after changes that were weaker than sequentially consistent.
    pub fn wake_fenced(&self, own: Option<&Waiter>) {
        fence(SeqCst);
        self.wake(own);
    }

    #[cold]
    fn wake_waiters(&self, own: Option<&Waiter>) {
        self.any.swap(false, SeqCst);
        let waiters = self.waiters.lock().unwrap_or_else(PoisonError::into_inner);
        for (waiter, waker) in &*waiters {
            let is_own = own.is_some_and(|own| std::ptr::eq(own, &raw const **waiter));
            if waiter.listens.swap(false, SeqCst) && !is_own {
                waker();
            }
        }
    }
}

/// The requests that one node holds until something is given back, by a request of this queue or of another.
///
/// To hold a request: [`wait`](HeldRequests::wait); or [`listen`](HeldRequests::listen), check once more,
/// [`hold`](HeldRequests::hold). It comes back to the node's `reap` with result 0 once the list was woken,
/// and with `-ECANCELED` if it is cancelled. The node calls [`resume_woken`](HeldRequests::resume_woken) from
/// its `commit` and [`cancel`](HeldRequests::cancel) from its `cancel`.
#[derive(Debug, Default)]
pub struct HeldRequests {
    /// On the list. `None`: no request of this node ever waited.
    waiter: Option<Arc<Waiter>>,
    held: Vec<Cookie>,
    /// The list was woken since one of `held` was held.
    is_due: bool,
}

/// `ECANCELED` of Linux, as a result.
const CANCELED: i64 = -125;

impl HeldRequests {
    /// Reserves memory for `tags` requests, so that holding one never allocates.
    pub fn reserve(&mut self, tags: usize) {
        self.held.reserve(tags);
    }

    /// This node's place on the list: for [`WaitList::wake`].
    pub fn waiter(&self) -> Option<&Waiter> {
        self.waiter.as_deref()
    }

    /// Asks to be woken when `list` is. It is always the same list for one `HeldRequests`.
    pub fn listen<R: Ring>(&mut self, list: &WaitList, cx: &Cx<'_, R>) {
        self.start_listening(list, cx);
    }

    /// Returns whether it listened already.
    fn start_listening<R: Ring>(&mut self, list: &WaitList, cx: &Cx<'_, R>) -> bool {
        let waiter = self.waiter.get_or_insert_with(|| list.join(cx.waker().clone()));
        let listened = list.listen(waiter);
        // Woken, but `commit` has not come yet: those that are held are not to miss it.
        self.is_due |= !listened && !self.held.is_empty();
        listened
    }

    /// Holds a request that found that it has to wait until `list` is woken. If this node did not listen
    /// while the request checked, the request comes back once more at the end of this turn, to check again
    /// while the node listens.
    pub fn wait<R: Ring>(&mut self, list: &WaitList, io: Cookie, cx: &Cx<'_, R>) -> Verdict {
        if !self.start_listening(list, cx) {
            // Orders the check that follows after the listening.
            fence(SeqCst);
            self.is_due = true;
        }
        self.hold(io)
    }

    /// Returns whether no request is held.
    pub fn is_empty(&self) -> bool {
        self.held.is_empty()
    }

    /// Holds a request until the list is woken.
    pub fn hold(&mut self, io: Cookie) -> Verdict {
        self.held.push(io);
        Verdict::Held
    }

    /// Makes all held requests come back at the end of this turn: for what this queue itself gave back.
    pub fn resume_all(&mut self) {
        self.is_due = !self.held.is_empty();
    }

    /// Resumes the held requests if the list was woken.
    #[inline]
    pub fn resume_woken<R: Ring>(&mut self, cx: &mut Cx<'_, R>) {
        if !self.held.is_empty()
            && (self.is_due || self.waiter.as_ref().is_some_and(|own| !is_set(&own.listens)))
        {
            self.is_due = false;
            self.held.drain(..).for_each(|io| cx.resume(io, 0));
        }
    }

    /// Resumes a request with `-ECANCELED` if it is held. Returns whether it was.
    pub fn cancel<R: Ring>(&mut self, io: Cookie, cx: &mut Cx<'_, R>) -> bool {
        let Some(index) = self.held.iter().position(|held| *held == io) else { return false };
        self.held.remove(index);
        cx.resume(io, CANCELED);
        true
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicU32;

    #[test]
    fn only_listening_waiters_are_woken_and_only_once() {
        let (list, woken) = (WaitList::default(), Arc::new(AtomicU32::new(0)));
        let join = || {
            let woken = woken.clone();
            list.join(Arc::new(move || _ = woken.fetch_add(1, SeqCst)))
        };
        let (one, two) = (join(), join());
        list.wake(None);
        assert_eq!(woken.load(SeqCst), 0);
        assert!(!list.listen(&one) && list.listen(&one));
        list.wake(None);
        list.wake(None);
        assert_eq!(woken.load(SeqCst), 1);
        list.listen(&one);
        list.listen(&two);
        list.wake(Some(&two));
        assert_eq!(woken.load(SeqCst), 2, "the caller's own queue is not woken");
        assert!(!list.listen(&two), "but does not listen any more");
    }

    #[test]
    fn a_dropped_waiter_leaves_the_list() {
        let list = WaitList::default();
        drop(list.join(Arc::new(|| panic!("it is gone"))));
        let _other = list.join(Arc::new(|| {}));
        assert_eq!(list.waiters.lock().unwrap().len(), 1);
    }
}

/// `RUSTFLAGS="--cfg loom" CARGO_TARGET_DIR=target/loom cargo test -p blockyard-queue --lib models`
#[cfg(all(test, loom))]
pub(crate) mod models {
    use super::*;
    use loom::sync::atomic::AtomicU32;
    use loom::sync::{Condvar, Mutex};
    use loom::thread;

    /// A thread that can be put to sleep. Like the ring's waker it remembers a wake-up that comes first.
    #[derive(Default)]
    pub(crate) struct Sleeper(Mutex<bool>, Condvar);

    impl Sleeper {
        /// If nothing is left that could wake it, loom reports a deadlock here: a lost wake-up.
        pub(crate) fn sleep(&self) {
            let mut woken = self.0.lock().unwrap();
            while !*woken {
                woken = self.1.wait(woken).unwrap();
            }
            *woken = false;
        }

        pub(crate) fn waker(self: &Arc<Self>) -> QueueWaker {
            let sleeper = self.clone();
            Arc::new(move || {
                *sleeper.0.lock().unwrap() = true;
                sleeper.1.notify_one();
            })
        }
    }

    /// Two threads take something in turn, each giving it back.
    #[test]
    fn what_is_given_back_wakes_the_thread_that_waits_for_it() {
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(3);
        model.check(|| {
            let (list, taken) = (Arc::new(WaitList::default()), Arc::new(AtomicU32::new(0)));
            let run =
                |list: Arc<WaitList>, taken: Arc<AtomicU32>, own: Arc<Waiter>, sleeper: Arc<Sleeper>| {
                    let take = || taken.compare_exchange(0, 1, SeqCst, SeqCst).is_ok();
                    while !take() {
                        list.listen(&own);
                        if take() {
                            break;
                        }
                        sleeper.sleep();
                    }
                    taken.swap(0, SeqCst);
                    list.wake(Some(&own));
                };
            let [one, two] = [(); 2].map(|()| {
                let sleeper = Arc::new(Sleeper::default());
                (list.join(sleeper.waker()), sleeper)
            });
            let (there, other) = (list.clone(), taken.clone());
            let thread = thread::spawn(move || run(there, other, two.0, two.1));
            run(list, taken, one.0, one.1);
            thread.join().unwrap();
        });
    }
}
