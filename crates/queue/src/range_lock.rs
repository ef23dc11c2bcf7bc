//! The range lock: keeps read-modify-writes apart from all other writes of a device or file
//! ([ADR 27](../../../docs/adr/0027-sub-block-writes.md)).
//!
//! A write of a part of a block reads the block, modifies it and writes it back. What any other queue or
//! export writes to that block meanwhile would be undone. So writes hold the lock *shared*, and a
//! read-modify-write holds it *exclusively*: it publishes its claim first, then waits until the writes that
//! started before have ended; later ones wait for its release.
//!
//! A range is locked as a set of [`Stripes`]: an exclusive holder does not delay writes elsewhere. Each queue
//! counts its shared holders stripe by stripe in its own [`LockMember`], so a write changes no memory to
//! which another thread writes. Only claims, and requests that have to wait, take a mutex. Waiting queues are
//! woken through a [`WaitList`].
//!
//! Used by devices for sub-block writes of FUSE mounts ([`Queue::guard`](crate::Queue::guard)), and by files
//! that are opened for direct I/O with a block larger than the device's.
//!
//! *Invariant:* a writer counts itself first and checks for claims second; a claim is published first and the
//! counts are summed second. All of this is sequentially consistent, so at least one of the two sees the
//! other.
//! *Invariant:* a writer that can tell beforehand that it has to wait does not count itself. Otherwise its
//! retries would wake the claim, and the claim the writer, without end.
//! *Invariant:* claims are granted in order of arrival, and writers that a claim turned away start before the
//! next claim, if they were reported with [`refused`](RangeLock::refused).

use crate::wait_list::{QueueWaker, WaitList, Waiter, read};
#[cfg(loom)]
use loom::sync::{
    Mutex, MutexGuard,
    atomic::{AtomicU32, AtomicU64},
};
use std::collections::VecDeque;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::{Arc, PoisonError};
#[cfg(not(loom))]
use std::sync::{
    Mutex, MutexGuard,
    atomic::{AtomicU32, AtomicU64},
};

/// Bits of an offset within a stretch of one stripe: 1 MiB, the largest size of most writes.
const STRETCH_BITS: u32 = 20;
/// Stripes of a device. Every 64th MiB belongs to the same one.
const STRIPES: usize = 64;

/// A set of lock stripes, one bit each.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Stripes(u64);

impl Stripes {
    /// No stripe.
    pub const NONE: Stripes = Stripes(0);
    const ALL: Stripes = Stripes(u64::MAX);

    /// The stripes of `len` bytes from `offset`. Length 0 means the whole device.
    #[inline]
    pub fn of(offset: u64, len: u64) -> Stripes {
        let Some(last) = len.checked_sub(1) else { return Stripes::ALL };
        let first = offset >> STRETCH_BITS;
        let count = (offset.saturating_add(last) >> STRETCH_BITS) - first + 1;
        match count {
            1 => Stripes(1 << (first % STRIPES as u64)),
            2..64 => Stripes(((1 << count) - 1u64).rotate_left((first % STRIPES as u64) as u32)),
            _ => Stripes::ALL,
        }
    }

    /// Whether the set is empty.
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }

    fn overlaps(self, others: u64) -> bool {
        self.0 & others != 0
    }

    fn each(self) -> impl Iterator<Item = usize> {
        let mut left = self.0;
        std::iter::from_fn(move || {
            let next = left.trailing_zeros() as usize;
            // Clears the lowest bit.
            left &= left.wrapping_sub(1);
            (next < STRIPES).then_some(next)
        })
    }
}

/// One queue's part of a range lock: its writes in flight by stripe. Only its own thread writes here, so it
/// has cache lines of its own.
#[derive(Debug)]
#[repr(align(128))]
pub struct LockMember {
    writes: [AtomicU32; STRIPES],
    waiter: Arc<Waiter>,
    /// The queue offers its waiting requests again after whatever it did itself, so it is woken for what
    /// others do only.
    retries_itself: bool,
}

impl LockMember {
    pub(crate) fn add(&self, stripes: Stripes) {
        stripes.each().for_each(|stripe| _ = self.writes[stripe].fetch_add(1, SeqCst));
    }

    fn subtract(&self, stripes: Stripes) {
        stripes.each().for_each(|stripe| _ = self.writes[stripe].fetch_sub(1, SeqCst));
    }
}

/// Claims that were not granted yet.
#[derive(Debug, Default)]
struct Line {
    places: VecDeque<u64>,
    /// The place of the next claim to arrive.
    next: u64,
}

/// A reader-writer lock over the stripes of a device or file, where the "readers" are writes of whole blocks.
#[derive(Default)]
pub struct RangeLock {
    /// Stripes that are held exclusively, or whose claim waits for earlier writes to end. Every write reads
    /// it; only claims change it.
    claimed: AtomicU64,
    /// Writers that a claim turned away and that have not started yet.
    refused: AtomicU32,
    line: Mutex<Line>,
    members: Mutex<Vec<Arc<LockMember>>>,
    waiting: WaitList,
}

impl std::fmt::Debug for RangeLock {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RangeLock")
            .field("claimed", &self.claimed)
            .field("refused", &self.refused)
            .finish_non_exhaustive()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl RangeLock {
    /// Adds a queue. `waker` wakes it when requests that had to wait may start.
    pub fn join(&self, waker: QueueWaker) -> Arc<LockMember> {
        self.join_as(waker, false)
    }

    /// Adds a queue in which waiting requests are offered again after whatever the queue does itself (see
    /// [`Verdict::Blocked`](crate::Verdict::Blocked)). It is woken only for what other queues do.
    pub fn join_retrying(&self, waker: QueueWaker) -> Arc<LockMember> {
        self.join_as(waker, true)
    }

    fn join_as(&self, waker: QueueWaker, retries_itself: bool) -> Arc<LockMember> {
        let waiter = self.waiting.join(waker);
        let member = Arc::new(LockMember {
            writes: std::array::from_fn(|_| AtomicU32::new(0)),
            waiter,
            retries_itself,
        });
        let mut members = lock(&self.members);
        members.retain(|member| Arc::strong_count(member) > 1);
        members.push(member.clone());
        member
    }

    /// Removes a queue, of which `waiting` requests were reported as refused and wait no longer.
    pub(crate) fn part(&self, own: &Arc<LockMember>, waiting: u32) {
        lock(&self.members).retain(|member| !Arc::ptr_eq(member, own));
        self.refused.fetch_sub(waiting, SeqCst);
        self.waiting.wake(None);
    }

    /// Takes the lock shared, for a write. `false`: a claim overlaps; the queue is woken when that may have
    /// changed.
    #[inline]
    pub fn enter(&self, own: &LockMember, stripes: Stripes) -> bool {
        self.try_enter(own, stripes) || self.enter_or_wait(own, stripes)
    }

    #[cold]
    fn enter_or_wait(&self, own: &LockMember, stripes: Stripes) -> bool {
        self.waiting.listen(&own.waiter);
        self.try_enter(own, stripes)
    }

    #[inline]
    fn try_enter(&self, own: &LockMember, stripes: Stripes) -> bool {
        if stripes.overlaps(read!(self.claimed)) {
            return false;
        }
        own.add(stripes);
        if !stripes.overlaps(read!(self.claimed)) {
            return true;
        }
        self.leave(own, stripes);
        false
    }

    /// Releases the lock that [`enter`](RangeLock::enter) took.
    #[inline]
    pub fn leave(&self, own: &LockMember, stripes: Stripes) {
        own.subtract(stripes);
        if stripes.overlaps(read!(self.claimed)) {
            self.wake(own);
        }
    }

    /// Reports that a write was turned away and waits.
    pub fn refused(&self) {
        self.refused.fetch_add(1, SeqCst);
    }

    /// Reports that a refused write waits no longer.
    pub fn admitted(&self) {
        if self.refused.fetch_sub(1, SeqCst) == 1 {
            self.waiting.wake(None);
        }
    }

    /// Returns whether the claim holds its stripes exclusively now. Otherwise it waits in line, and the queue
    /// is woken when to call again.
    pub fn acquire(&self, own: &LockMember, claim: &mut Claim) -> bool {
        self.try_acquire(own, claim) || {
            self.waiting.listen(&own.waiter);
            self.try_acquire(own, claim)
        }
    }

    fn try_acquire(&self, own: &LockMember, claim: &mut Claim) -> bool {
        if !claim.is_published {
            claim.is_published = self.publish(own, claim);
        }
        claim.is_published && self.has_no_writes(claim.stripes)
    }

    /// Publishes a claim. `false`: others are before it in line, overlap with it, or turned writers away that
    /// come first.
    fn publish(&self, own: &LockMember, claim: &mut Claim) -> bool {
        let mut line = lock(&self.line);
        let place = *claim.place.get_or_insert_with(|| {
            let place = line.next;
            line.next += 1;
            line.places.push_back(place);
            place
        });
        let is_first = line.places.front() == Some(&place) && read!(self.refused) == 0;
        // Bits are set under the mutex only.
        if !is_first || claim.stripes.overlaps(read!(self.claimed)) {
            return false;
        }
        self.claimed.fetch_or(claim.stripes.0, SeqCst);
        line.places.pop_front();
        claim.place = None;
        let others_wait = !line.places.is_empty();
        drop(line);
        if others_wait {
            self.wake(own);
        }
        true
    }

    fn has_no_writes(&self, stripes: Stripes) -> bool {
        let is_idle = |member: &LockMember| stripes.each().all(|stripe| read!(member.writes[stripe]) == 0);
        lock(&self.members).iter().all(|member| is_idle(member))
    }

    /// Releases stripes that a claim held exclusively.
    pub fn release(&self, own: &LockMember, stripes: Stripes) {
        self.claimed.fetch_and(!stripes.0, SeqCst);
        self.wake(own);
    }

    /// Gives up a claim, whether it was granted, published or still in line.
    pub fn withdraw(&self, own: &LockMember, claim: &Claim) {
        if claim.is_published {
            return self.release(own, claim.stripes);
        }
        if let Some(place) = claim.place {
            lock(&self.line).places.retain(|other| *other != place);
            self.wake(own);
        }
    }

    #[cold]
    fn wake(&self, own: &LockMember) {
        self.waiting.wake(own.retries_itself.then_some(&*own.waiter));
    }
}

/// A claim to hold some stripes exclusively. It has to be [released](RangeLock::release) or
/// [withdrawn](RangeLock::withdraw).
#[derive(Clone, Debug)]
pub struct Claim {
    stripes: Stripes,
    /// Overlapping writes that start from now on have to wait.
    is_published: bool,
    /// Its place in line. `None`: it did not arrive yet, or is published.
    place: Option<u64>,
}

impl Claim {
    /// Returns a claim on these stripes, which is not in line yet.
    pub fn new(stripes: Stripes) -> Claim {
        Claim { stripes, is_published: false, place: None }
    }

    /// The stripes that it claims.
    pub fn stripes(&self) -> Stripes {
        self.stripes
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU8, Ordering::Relaxed};

    const HERE: Stripes = Stripes(1);
    const THERE: Stripes = Stripes(2);

    fn join(lock: &RangeLock) -> Arc<LockMember> {
        lock.join(Arc::new(|| {}))
    }

    #[test]
    fn stripes_cover_every_mebibyte_of_a_range() {
        let mib = |from: u64, to: u64| Stripes::of(from << 20, (to - from) << 20);
        assert_eq!(Stripes::of(5, 1), Stripes(1));
        assert_eq!(Stripes::of((1 << 20) - 1, 2), Stripes(3));
        assert_eq!(mib(63, 65), Stripes(1 << 63 | 1));
        assert_eq!(mib(64, 66), Stripes(3));
        assert_eq!(mib(1, 64), Stripes(!1));
        assert_eq!(mib(70, 134), Stripes::ALL);
        assert_eq!(Stripes::of(u64::MAX - 1, u64::MAX), Stripes(1 << 63));
        assert_eq!(Stripes::of(0, 0), Stripes::ALL);
        assert_eq!(Stripes(1 << 63 | 5).each().collect::<Vec<_>>(), [0, 2, 63]);
        assert_eq!(Stripes::ALL.each().count(), 64);
    }

    #[test]
    fn a_claim_waits_for_writes_of_all_queues_and_turns_new_ones_away() {
        let lock = RangeLock::default();
        let (one, two) = (join(&lock), join(&lock));
        assert!(lock.enter(&one, HERE) && lock.enter(&two, HERE));
        let (mut claim, mut next) = (Claim::new(HERE), Claim::new(HERE));
        assert!(!lock.acquire(&one, &mut claim));
        assert!(!lock.enter(&one, HERE), "no new write starts");
        assert!(!lock.acquire(&two, &mut next), "only one claim at a time");
        lock.leave(&one, HERE);
        assert!(!lock.acquire(&one, &mut claim));
        lock.leave(&two, HERE);
        assert!(lock.acquire(&one, &mut claim) && !lock.enter(&two, HERE) && !lock.acquire(&two, &mut next));
        lock.release(&one, HERE);
        assert!(lock.enter(&one, HERE), "the next claim is not published yet");
        lock.leave(&one, HERE);
        assert!(lock.acquire(&two, &mut next));
    }

    #[test]
    fn a_claim_does_not_delay_writes_to_other_stripes() {
        let lock = RangeLock::default();
        let own = join(&lock);
        let (mut here, mut there) = (Claim::new(HERE), Claim::new(THERE));
        assert!(lock.enter(&own, THERE) && lock.acquire(&own, &mut here), "it does not wait for them");
        assert!(lock.enter(&own, THERE), "nor do they for it");
        lock.leave(&own, THERE);
        lock.leave(&own, THERE);
        assert!(lock.acquire(&own, &mut there), "two claims that do not overlap are held together");
        assert!(!lock.enter(&own, THERE) && !lock.enter(&own, Stripes::ALL));
        lock.release(&own, HERE);
        assert!(lock.enter(&own, HERE) && !lock.enter(&own, THERE));
    }

    #[test]
    fn writes_that_a_claim_refused_start_before_the_next_claim() {
        let lock = RangeLock::default();
        let own = join(&lock);
        let (mut one, mut next) = (Claim::new(HERE), Claim::new(HERE));
        assert!(lock.acquire(&own, &mut one) && !lock.enter(&own, HERE));
        lock.refused();
        lock.release(&own, HERE);
        assert!(!lock.acquire(&own, &mut next), "a write was refused before");
        assert!(lock.enter(&own, HERE));
        lock.admitted();
        assert!(!lock.acquire(&own, &mut next), "it is in flight now");
        lock.leave(&own, HERE);
        assert!(lock.acquire(&own, &mut next));
    }

    #[test]
    fn claims_are_granted_in_order_of_arrival() {
        let lock = RangeLock::default();
        let own = join(&lock);
        let mut claims: VecDeque<Claim> = (0..3).map(|_| Claim::new(HERE)).collect();
        assert_eq!(
            claims.iter_mut().map(|claim| lock.acquire(&own, claim)).collect::<Vec<_>>(),
            [true, false, false]
        );
        for _ in 0..3 {
            lock.release(&own, HERE);
            let mut again = Claim::new(HERE);
            claims.pop_front();
            assert!(
                !lock.acquire(&own, &mut again),
                "the thread that released it asks first, and others wait"
            );
            assert!(!lock.acquire(&own, &mut claims[1]) && lock.acquire(&own, &mut claims[0]));
            claims.push_back(again);
        }
        lock.release(&own, HERE);
        lock.withdraw(&own, &claims[1]);
        assert!(lock.acquire(&own, &mut claims[2]), "a withdrawn claim delays none");
        lock.withdraw(&own, &claims[2]);
        assert!(lock.acquire(&own, &mut Claim::new(HERE)), "nor does one that was granted");
    }

    #[test]
    fn a_queue_that_leaves_takes_its_refused_writes_along() {
        let lock = RangeLock::default();
        let (one, two) = (join(&lock), join(&lock));
        assert!(lock.acquire(&two, &mut Claim::new(HERE)) && !lock.enter(&one, HERE));
        lock.refused();
        lock.release(&two, HERE);
        lock.part(&one, 1);
        assert!(lock.acquire(&two, &mut Claim::new(HERE)) && !lock.enter(&two, HERE));
    }

    #[test]
    fn queues_are_woken_when_what_they_wait_for_is_over_and_not_before() {
        let lock = RangeLock::default();
        let woken: [Arc<AtomicU32>; 2] = Default::default();
        let [one, two] = woken.each_ref().map(|count| {
            let count = count.clone();
            lock.join_retrying(Arc::new(move || _ = count.fetch_add(1, SeqCst)))
        });
        let counts = || woken.each_ref().map(|count| count.load(SeqCst));
        assert!(lock.enter(&two, HERE));
        let mut claim = Claim::new(HERE);
        assert!(!lock.acquire(&one, &mut claim));
        for _ in 0..3 {
            assert!(!lock.enter(&two, HERE), "it waits, and its retries wake nobody");
        }
        assert_eq!(counts(), [0, 0]);
        lock.leave(&two, HERE);
        assert_eq!(counts(), [1, 0], "the claim may be granted now");
        assert!(lock.acquire(&one, &mut claim));
        assert_eq!(counts(), [1, 0], "a queue that retries is not woken for what it did itself");
        assert!(!lock.enter(&two, HERE));
        lock.release(&one, HERE);
        assert_eq!(counts(), [1, 1]);
        assert!(lock.enter(&two, HERE));
        lock.leave(&two, HERE);
        assert_eq!(counts(), [1, 1], "nobody waits any more");
    }

    #[test]
    fn threads_that_write_parts_and_wholes_of_one_block_lose_nothing() {
        const ROUNDS: u8 = 200;
        const PARTS: usize = 3;
        let lock = RangeLock::default();
        // Each thread reads the block, changes its own byte and writes the whole block back.
        let block: [AtomicU8; PARTS + 1] = Default::default();
        let read = |all: &[AtomicU8]| all.iter().map(|byte| byte.load(Relaxed)).collect::<Vec<u8>>();
        std::thread::scope(|scope| {
            for index in 0..PARTS {
                let (block, lock) = (&block, &lock);
                scope.spawn(move || {
                    let own = join(lock);
                    for round in 1..=ROUNDS {
                        let mut claim = Claim::new(HERE);
                        while !lock.acquire(&own, &mut claim) {
                            std::thread::yield_now();
                        }
                        let mut all = read(block);
                        assert_eq!(all[index], round - 1, "the last write of {index} is lost");
                        all[index] = round;
                        std::thread::yield_now();
                        block.iter().zip(all).for_each(|(cell, byte)| cell.store(byte, Relaxed));
                        lock.release(&own, HERE);
                    }
                });
            }
            // The last byte belongs to a queue that writes whole blocks. No read-modify-write restores an
            // older value.
            let (block, lock) = (&block[PARTS], &lock);
            scope.spawn(move || {
                let own = join(lock);
                for round in 1..=ROUNDS {
                    while !lock.enter(&own, HERE) {
                        std::thread::yield_now();
                    }
                    assert_eq!(block.load(Relaxed), round - 1, "a read-modify-write undid a write");
                    block.store(round, Relaxed);
                    lock.leave(&own, HERE);
                }
            });
        });
        assert_eq!(read(&block), [ROUNDS; PARTS + 1]);
    }
}

/// `RUSTFLAGS="--cfg loom" CARGO_TARGET_DIR=target/loom cargo test -p blockyard-queue --lib models`
#[cfg(all(test, loom))]
mod models {
    use super::*;
    use crate::wait_list::models::Sleeper;
    use loom::thread;

    const HERE: Stripes = Stripes(1);

    /// A queue with one write, of a part of a block or of whole blocks. It sleeps while the write may not
    /// start.
    fn write(lock: &RangeLock, own: &LockMember, sleeper: &Sleeper, is_part: bool, inside: &AtomicU32) {
        if is_part {
            let mut claim = Claim::new(HERE);
            while !lock.acquire(own, &mut claim) {
                sleeper.sleep();
            }
            assert_eq!(inside.fetch_add(1, SeqCst), 0, "it holds the lock exclusively");
            inside.fetch_sub(1, SeqCst);
            return lock.release(own, HERE);
        }
        while !lock.enter(own, HERE) {
            sleeper.sleep();
        }
        inside.fetch_add(1, SeqCst);
        inside.fetch_sub(1, SeqCst);
        lock.leave(own, HERE);
    }

    fn both(parts: [bool; 2]) {
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(3);
        model.check(move || {
            let (lock, inside) = (Arc::new(RangeLock::default()), Arc::new(AtomicU32::new(0)));
            let [one, two] = [(); 2].map(|()| {
                let sleeper = Arc::new(Sleeper::default());
                (lock.join_retrying(sleeper.waker()), sleeper)
            });
            let (there, counted) = (lock.clone(), inside.clone());
            let thread = thread::spawn(move || write(&there, &two.0, &two.1, parts[1], &counted));
            write(&lock, &one.0, &one.1, parts[0], &inside);
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
