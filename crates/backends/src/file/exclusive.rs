//! Direct writes that cover a part of a block, kept from all other writes of a file.
//!
//! Such a write reads the block, changes it and writes it back. Meanwhile no other write of any queue may be in flight, or
//! it could be undone. So it *claims* the file: it publishes its key, then waits until the writes that began before are
//! over; those that begin later find the key and wait until it is gone.
//!
//! Each queue counts its writes in a [`Gate`] of its own, so a write changes no memory that another thread writes to. A
//! queue that waits sets its gate's `waits` and is woken by its nudge; one that has not set it is never woken.
//!
//! *Invariant:* no wake-up is lost. All of the following are sequentially consistent. One that waits checks, sets `waits`,
//! and checks once more before its thread may sleep. One that ends what is waited for (a write leaves, a claim is given
//! up) does so first and looks at `waits` second. Of these two, at least one sees the other. `models` tries all orders.
//! What waits for its own queue needs no wake: that queue's thread offers it again after whatever it did.
//!
//! *Invariant:* a write that is turned away does not count itself first if it can tell before. Otherwise one that tries
//! again would wake the claim, and the claim it, without end.

#[cfg(loom)]
use loom::sync::{
    Mutex, MutexGuard,
    atomic::{AtomicBool, AtomicU32, AtomicU64},
};
use queue::Nudge;
use std::sync::Arc;
use std::sync::PoisonError;
use std::sync::atomic::Ordering::SeqCst;
#[cfg(not(loom))]
use std::sync::{
    Mutex, MutexGuard,
    atomic::{AtomicBool, AtomicU32, AtomicU64},
};

/// Reads what is there now. All accesses here are sequentially consistent; loom takes those for acquire and release, which
/// may read what was there before, and knows one order of all threads only for what also writes.
macro_rules! read {
    ($cell:expr) => {{
        #[cfg(loom)]
        let value = $cell.fetch_add(0, SeqCst);
        #[cfg(not(loom))]
        let value = $cell.load(SeqCst);
        value
    }};
}

/// How many writes one queue has in flight: its own cache line, for it alone writes there.
#[derive(Debug)]
#[repr(align(64))]
pub(super) struct Gate {
    writes: AtomicU32,
    /// A request of this queue waits for a claim, or to be alone.
    waits: AtomicBool,
    /// Its number among the gates of the file, from 1.
    pub(super) number: u32,
}

struct Member {
    gate: Arc<Gate>,
    /// None where the queue is never put to sleep while requests wait.
    nudge: Option<Nudge>,
}

/// How a claim stands.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Claim {
    /// It is the only write.
    Alone,
    /// It is next: others have to end first.
    Waiting,
    /// Another write has the file.
    Refused,
}

/// Who has a file for itself.
pub(super) struct Exclusive {
    /// The key of the write that has claimed the file; 0: none. Its gate's number is above bit 16.
    owner: AtomicU64,
    members: Mutex<Vec<Member>>,
}

impl std::fmt::Debug for Exclusive {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Exclusive").field("owner", &self.owner).finish_non_exhaustive()
    }
}

impl Exclusive {
    pub(super) fn new() -> Exclusive {
        Exclusive { owner: AtomicU64::new(0), members: Mutex::new(Vec::new()) }
    }

    fn members(&self) -> MutexGuard<'_, Vec<Member>> {
        self.members.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A gate for one more queue.
    pub(super) fn join(&self) -> Arc<Gate> {
        let mut members = self.members();
        let number = members.len() as u32 + 1;
        let gate = Arc::new(Gate { writes: AtomicU32::new(0), waits: AtomicBool::new(false), number });
        members.push(Member { gate: gate.clone(), nudge: None });
        gate
    }

    /// The queue of this gate is woken so.
    pub(super) fn wake_with(&self, gate: &Gate, nudge: Nudge) {
        let mut members = self.members();
        if let Some(member) = members.get_mut(gate.number as usize - 1) {
            member.nudge = Some(nudge);
        }
    }

    /// Begins a write. `false`: another write has the file for itself; the queue is woken when it has not any more.
    pub(super) fn enter(&self, gate: &Gate, key: u64) -> bool {
        self.try_enter(gate, key) || self.enter_or_wait(gate, key)
    }

    #[cold]
    fn enter_or_wait(&self, gate: &Gate, key: u64) -> bool {
        gate.waits.swap(true, SeqCst);
        self.try_enter(gate, key)
    }

    fn try_enter(&self, gate: &Gate, key: u64) -> bool {
        let is_free = |owner: u64| owner == 0 || owner == key;
        if !is_free(read!(self.owner)) {
            return false;
        }
        gate.writes.fetch_add(1, SeqCst);
        let is_in = is_free(read!(self.owner));
        if !is_in {
            self.leave(gate);
        }
        is_in
    }

    /// A write is over, or did not begin.
    pub(super) fn leave(&self, gate: &Gate) {
        gate.writes.fetch_sub(1, SeqCst);
        let owner = read!(self.owner);
        if owner != 0 {
            self.wake(|other| u64::from(other.number) == owner >> 16 && other.number != gate.number);
        }
    }

    /// Asks for the file, for a write that has entered. New writes are held off from now on. Unless it is alone, its queue
    /// is woken when that may have changed.
    pub(super) fn claim(&self, gate: &Gate, key: u64) -> Claim {
        match self.try_claim(key) {
            Claim::Alone => Claim::Alone,
            Claim::Waiting | Claim::Refused => {
                gate.waits.swap(true, SeqCst);
                self.try_claim(key)
            }
        }
    }

    fn try_claim(&self, key: u64) -> Claim {
        match self.owner.compare_exchange(0, key, SeqCst, SeqCst) {
            Err(owner) if owner != key => return Claim::Refused,
            _ => {}
        }
        let writes: u32 = self.members().iter().map(|member| read!(member.gate.writes)).sum();
        if writes == 1 { Claim::Alone } else { Claim::Waiting }
    }

    /// Others may write again.
    pub(super) fn disclaim(&self, gate: &Gate, key: u64) {
        if self.owner.compare_exchange(key, 0, SeqCst, SeqCst).is_ok() {
            self.wake(|other| other.number != gate.number);
        }
    }

    /// Wakes those of these queues that wait.
    #[cold]
    fn wake(&self, is_meant: impl Fn(&Gate) -> bool) {
        let members = self.members();
        for Member { gate, nudge } in members.iter().filter(|member| is_meant(&member.gate)) {
            if gate.waits.swap(false, SeqCst)
                && let Some(nudge) = nudge
            {
                nudge();
            }
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_rewrite_waits_for_writes_of_all_queues_and_holds_off_new_ones() {
        let file = Exclusive::new();
        let (one, two) = (file.join(), file.join());
        let (first, second) = (1 << 16, 2 << 16);
        assert!(file.enter(&one, first) && file.enter(&two, second));
        assert_eq!(file.claim(&one, first), Claim::Waiting);
        assert_eq!(file.claim(&two, second), Claim::Refused);
        file.leave(&two);
        assert!(!file.enter(&two, second));
        assert_eq!(file.claim(&one, first), Claim::Alone);
        file.disclaim(&one, first);
        assert!(file.enter(&two, second));
    }

    #[test]
    fn queues_are_woken_when_what_they_wait_for_is_over_and_not_before() {
        let file = Exclusive::new();
        let (one, two) = (file.join(), file.join());
        let (first, second) = (1 << 16, 2 << 16);
        let woken: [Arc<AtomicU32>; 2] = Default::default();
        for (gate, count) in [&one, &two].into_iter().zip(&woken) {
            let count = count.clone();
            file.wake_with(gate, Arc::new(move || _ = count.fetch_add(1, SeqCst)));
        }
        let counts = || woken.each_ref().map(|count| count.load(SeqCst));
        assert!(file.enter(&one, first) && file.enter(&two, second));
        assert_eq!(file.claim(&one, first), Claim::Waiting);
        for _ in 0..3 {
            assert!(!file.enter(&two, second), "it waits, and disturbs nobody when it tries again");
        }
        assert_eq!(counts(), [0, 0]);
        file.leave(&two);
        assert_eq!(counts(), [1, 0], "the claim may be alone now");
        assert_eq!(file.claim(&one, first), Claim::Alone);
        file.leave(&one);
        assert_eq!(counts(), [1, 0], "nobody is woken for what its own queue did");
        file.disclaim(&one, first);
        assert_eq!(counts(), [1, 1]);
        assert!(file.enter(&two, second));
        file.leave(&two);
        assert_eq!(counts(), [1, 1], "nobody waits any more");
    }
}

/// `RUSTFLAGS="--cfg loom" CARGO_TARGET_DIR=target/loom cargo test -p blockyard-backends --lib models`
#[cfg(all(test, loom))]
mod models {
    use super::*;
    use loom::sync::{Condvar, Mutex};
    use loom::thread;

    /// What puts a queue's thread to sleep and wakes it: the ring's waker, which remembers a wake that comes first.
    #[derive(Default)]
    struct Waker(Mutex<bool>, Condvar);

    impl Waker {
        fn sleep(&self) {
            let mut woken = self.0.lock().unwrap();
            while !*woken {
                // With nobody left to wake it, loom reports a deadlock here: that is a lost wake-up.
                woken = self.1.wait(woken).unwrap();
            }
            *woken = false;
        }
    }

    /// A queue with a request that writes parts of a block, or whole ones, and sleeps while it may not.
    fn write(file: &Exclusive, gate: &Gate, waker: &Waker, is_part: bool, inside: &AtomicU32) {
        let key = u64::from(gate.number) << 16;
        loop {
            if file.enter(gate, key) {
                if !is_part || file.claim(gate, key) == Claim::Alone {
                    break;
                }
                // As when a blocked request gives back what it has taken.
                file.leave(gate);
            }
            waker.sleep();
        }
        if is_part {
            assert_eq!(inside.fetch_add(1, SeqCst), 0, "it is alone");
            inside.fetch_sub(1, SeqCst);
            file.disclaim(gate, key);
        }
        file.leave(gate);
    }

    fn both(parts: [bool; 2]) {
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(3);
        model.check(move || {
            let file = Arc::new(Exclusive::new());
            let inside = Arc::new(AtomicU32::new(0));
            let queues: Vec<_> = (0..2)
                .map(|_| {
                    let (gate, waker) = (file.join(), Arc::new(Waker::default()));
                    let other = waker.clone();
                    file.wake_with(
                        &gate,
                        Arc::new(move || {
                            *other.0.lock().unwrap() = true;
                            other.1.notify_one();
                        }),
                    );
                    (gate, waker)
                })
                .collect();
            let (gate, waker) = queues[1].clone();
            let (there, counted) = (file.clone(), inside.clone());
            let thread = thread::spawn(move || write(&there, &gate, &waker, parts[1], &counted));
            write(&file, &queues[0].0, &queues[0].1, parts[0], &inside);
            thread.join().unwrap();
        });
    }

    #[test]
    fn a_part_and_a_whole_write_wake_each_other() {
        both([true, false]);
    }

    #[test]
    fn two_parts_wake_each_other() {
        both([true, true]);
    }
}
