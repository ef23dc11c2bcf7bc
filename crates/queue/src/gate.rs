//! Writes of parts of blocks, kept from all other writes of a device ([ADR 27](../../../docs/adr/0027-parts-of-blocks.md)).
//!
//! Who writes a part of a block reads the block, changes it and writes all of it back. What anybody else writes there
//! meanwhile, through whichever queue and export, would be undone. So he is *alone*: first he says where, then he waits until
//! those that began before are gone; whoever comes later and finds him there waits, and is nudged when he is done.
//!
//! A device is cut into stretches of 1 MiB, and every 64th of them is one *strip*: one is alone on strips, and writes
//! elsewhere go on. Each queue counts what it has under way strip by strip in memory of its own, so who writes whole blocks
//! writes to no memory that another thread writes to. Locks are for those that want to be alone, and for those that wait.
//!
//! Those that want to be alone come in turn, and those that were turned away by one begin before the next.
//!
//! *Invariant:* counting first and looking second, against saying first and summing second: of a write and one who wants to
//! be alone on its strips that begin together, at least one sees the other.

use std::collections::VecDeque;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::sync::atomic::{AtomicU32, AtomicU64};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Has a queue take a turn. May be called on any thread, at any time.
pub type Nudge = Arc<dyn Fn() + Send + Sync>;

/// Bits of an offset within a stretch: 1 MiB, the most that most writes have.
const STRETCH_BITS: u32 = 20;
const STRIPS: usize = 64;

/// Strips of a device: a bit for each.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Strips(u64);

impl Strips {
    /// None.
    pub const NONE: Strips = Strips(0);
    const ALL: Strips = Strips(u64::MAX);

    /// Those of `len` bytes from `offset` on. What has no length concerns all of the device.
    #[inline]
    pub fn of(offset: u64, len: u64) -> Strips {
        let Some(last) = len.checked_sub(1) else { return Strips::ALL };
        let first = offset >> STRETCH_BITS;
        let count = (offset.saturating_add(last) >> STRETCH_BITS) - first + 1;
        match count {
            1 => Strips(1 << (first % STRIPS as u64)),
            2..64 => Strips(((1 << count) - 1u64).rotate_left((first % STRIPS as u64) as u32)),
            _ => Strips::ALL,
        }
    }

    /// Whether there are none.
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }

    fn meets(self, others: u64) -> bool {
        self.0 & others != 0
    }

    fn each(self) -> impl Iterator<Item = usize> {
        let mut left = self.0;
        std::iter::from_fn(move || {
            let next = left.trailing_zeros() as usize;
            // The lowest goes.
            left &= left.wrapping_sub(1);
            (next < STRIPS).then_some(next)
        })
    }
}

/// What one queue has under way, by strip. No other thread writes here.
#[derive(Debug)]
#[repr(align(128))]
pub(crate) struct Counts([AtomicU32; STRIPS]);

impl Counts {
    fn new() -> Counts {
        Counts([const { AtomicU32::new(0) }; STRIPS])
    }

    pub(crate) fn add(&self, strips: Strips) {
        strips.each().for_each(|strip| _ = self.0[strip].fetch_add(1, SeqCst));
    }

    fn take(&self, strips: Strips) {
        strips.each().for_each(|strip| _ = self.0[strip].fetch_sub(1, SeqCst));
    }
}

/// Those that want to be alone and are not yet, by their places.
#[derive(Debug, Default)]
struct Line {
    places: VecDeque<u64>,
    /// The place of the next who comes.
    next: u64,
}

/// Who writes where on a device.
#[derive(Default)]
pub struct Gate {
    /// Where somebody is alone, or waits for the others to be gone. All read it; who writes parts of blocks writes it.
    alone: AtomicU64,
    /// How many of the others were turned away and wait.
    refused: AtomicU32,
    line: Mutex<Line>,
    queues: Mutex<Vec<(Arc<Counts>, Nudge)>>,
}

impl std::fmt::Debug for Gate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Gate")
            .field("alone", &self.alone)
            .field("refused", &self.refused)
            .finish_non_exhaustive()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Gate {
    /// A queue more writes to the device, and is nudged when somebody may begin who could not before.
    pub(crate) fn join(&self, nudge: Nudge) -> Arc<Counts> {
        let counts = Arc::new(Counts::new());
        lock(&self.queues).push((counts.clone(), nudge));
        counts
    }

    /// It does not any more, and `waiting` of its requests wait no longer.
    pub(crate) fn part(&self, own: &Arc<Counts>, waiting: u32) {
        lock(&self.queues).retain(|(counts, _)| !Arc::ptr_eq(counts, own));
        self.refused.fetch_sub(waiting, SeqCst);
        self.nudge();
    }

    /// Begin a write. `false`: somebody is alone there.
    #[inline]
    pub(crate) fn enter(&self, own: &Counts, strips: Strips) -> bool {
        // Who would have to go back at once does not come in: he would keep the other waiting.
        if strips.meets(self.alone.load(Relaxed)) {
            return false;
        }
        own.add(strips);
        if !strips.meets(self.alone.load(SeqCst)) {
            return true;
        }
        self.leave(own, strips);
        false
    }

    /// A write is over.
    #[inline]
    pub(crate) fn leave(&self, own: &Counts, strips: Strips) {
        own.take(strips);
        if strips.meets(self.alone.load(SeqCst)) {
            self.nudge();
        }
    }

    /// One was turned away and waits.
    pub(crate) fn refused(&self) {
        self.refused.fetch_add(1, SeqCst);
    }

    /// One of those does not wait any more.
    pub(crate) fn admitted(&self) {
        if self.refused.fetch_sub(1, SeqCst) == 1 {
            self.nudge();
        }
    }

    /// Whether one who wants to be alone is. Asked again after each nudge until then.
    pub fn may_begin(&self, wish: &mut Wish) -> bool {
        if !wish.claimed {
            wish.claimed = self.claim(wish);
        }
        wish.claimed && self.is_empty(wish.strips)
    }

    /// Be the next who is alone there. `false`: somebody is already or came before, or others wait for one who was.
    fn claim(&self, wish: &mut Wish) -> bool {
        let mut line = lock(&self.line);
        let own = *wish.place.get_or_insert_with(|| {
            let own = line.next;
            line.next += 1;
            line.places.push_back(own);
            own
        });
        let is_first = line.places.front() == Some(&own) && self.refused.load(SeqCst) == 0;
        // Bits are set under the lock only.
        if !is_first || wish.strips.meets(self.alone.load(SeqCst)) {
            return false;
        }
        self.alone.fetch_or(wish.strips.0, SeqCst);
        line.places.pop_front();
        wish.place = None;
        let others_wait = !line.places.is_empty();
        drop(line);
        if others_wait {
            self.nudge();
        }
        true
    }

    /// Whether nothing is under way there.
    fn is_empty(&self, strips: Strips) -> bool {
        let is_quiet = |counts: &Counts| strips.each().all(|strip| counts.0[strip].load(SeqCst) == 0);
        lock(&self.queues).iter().all(|(counts, _)| is_quiet(counts))
    }

    /// He who was alone there is not any more.
    pub fn release(&self, strips: Strips) {
        self.alone.fetch_and(!strips.0, SeqCst);
        self.nudge();
    }

    /// He who wished this does not any more.
    pub fn give_up(&self, wish: &Wish) {
        if wish.claimed {
            return self.release(wish.strips);
        }
        if let Some(place) = wish.place {
            lock(&self.line).places.retain(|other| *other != place);
            self.nudge();
        }
    }

    #[cold]
    fn nudge(&self) {
        lock(&self.queues).iter().for_each(|(_, nudge)| nudge());
    }
}

/// To be alone on some strips.
#[derive(Debug)]
pub struct Wish {
    strips: Strips,
    /// It is the next there.
    claimed: bool,
    /// Where it stands in line; none when it does not, or is the next.
    place: Option<u64>,
}

impl Wish {
    /// To be alone there.
    pub fn new(strips: Strips) -> Wish {
        Wish { strips, claimed: false, place: None }
    }

    /// Where.
    pub fn strips(&self) -> Strips {
        self.strips
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicU8;

    const HERE: Strips = Strips(1);
    const THERE: Strips = Strips(2);

    fn join(gate: &Gate) -> Arc<Counts> {
        gate.join(Arc::new(|| {}))
    }

    #[test]
    fn strips_are_those_that_a_range_touches() {
        let mib = |from: u64, to: u64| Strips::of(from << 20, (to - from) << 20);
        assert_eq!(Strips::of(5, 1), Strips(1));
        assert_eq!(Strips::of((1 << 20) - 1, 2), Strips(3));
        assert_eq!(mib(63, 65), Strips(1 << 63 | 1));
        assert_eq!(mib(64, 66), Strips(3));
        assert_eq!(mib(1, 64), Strips(!1));
        assert_eq!(mib(70, 134), Strips::ALL);
        assert_eq!(Strips::of(u64::MAX - 1, u64::MAX), Strips(1 << 63));
        assert_eq!(Strips::of(0, 0), Strips::ALL);
        assert_eq!(Strips(1 << 63 | 5).each().collect::<Vec<_>>(), [0, 2, 63]);
        assert_eq!(Strips::ALL.each().count(), 64);
    }

    #[test]
    fn who_is_alone_waits_for_the_others_of_all_queues_and_they_for_him() {
        let gate = Gate::default();
        let (one, two) = (join(&gate), join(&gate));
        assert!(gate.enter(&one, HERE) && gate.enter(&two, HERE));
        let (mut wish, mut next) = (Wish::new(HERE), Wish::new(HERE));
        assert!(!gate.may_begin(&mut wish));
        assert!(!gate.enter(&one, HERE), "nobody comes in any more");
        assert!(!gate.may_begin(&mut next), "and nobody else is the next");
        gate.leave(&one, HERE);
        assert!(!gate.may_begin(&mut wish));
        gate.leave(&two, HERE);
        assert!(gate.may_begin(&mut wish) && !gate.enter(&two, HERE) && !gate.may_begin(&mut next));
        gate.release(HERE);
        assert!(gate.enter(&one, HERE), "somebody else was first");
        gate.leave(&one, HERE);
        assert!(gate.may_begin(&mut next));
    }

    #[test]
    fn writes_elsewhere_go_on() {
        let gate = Gate::default();
        let own = join(&gate);
        let (mut here, mut there) = (Wish::new(HERE), Wish::new(THERE));
        assert!(gate.enter(&own, THERE) && gate.may_begin(&mut here), "what is elsewhere is not waited for");
        assert!(gate.enter(&own, THERE), "nor kept off");
        gate.leave(&own, THERE);
        gate.leave(&own, THERE);
        assert!(gate.may_begin(&mut there), "two are alone, each for himself");
        assert!(!gate.enter(&own, THERE) && !gate.enter(&own, Strips::ALL));
        gate.release(HERE);
        assert!(gate.enter(&own, HERE) && !gate.enter(&own, THERE));
    }

    #[test]
    fn who_waited_for_one_who_is_alone_begins_before_the_next_who_is() {
        let gate = Gate::default();
        let own = join(&gate);
        let (mut one, mut next) = (Wish::new(HERE), Wish::new(HERE));
        assert!(gate.may_begin(&mut one) && !gate.enter(&own, HERE));
        gate.refused();
        gate.release(HERE);
        assert!(!gate.may_begin(&mut next), "somebody was turned away before");
        assert!(gate.enter(&own, HERE));
        gate.admitted();
        assert!(!gate.may_begin(&mut next), "it is there now");
        gate.leave(&own, HERE);
        assert!(gate.may_begin(&mut next));
    }

    #[test]
    fn who_wants_to_be_alone_is_not_overtaken_by_one_that_goes_on_and_on() {
        let gate = Gate::default();
        let mut wishes: VecDeque<Wish> = (0..3).map(|_| Wish::new(HERE)).collect();
        assert_eq!(
            wishes.iter_mut().map(|wish| gate.may_begin(wish)).collect::<Vec<_>>(),
            [true, false, false]
        );
        for _ in 0..3 {
            gate.release(HERE);
            let mut again = Wish::new(HERE);
            wishes.pop_front();
            assert!(!gate.may_begin(&mut again), "the thread that was alone looks first, and others wait");
            assert!(!gate.may_begin(&mut wishes[1]) && gate.may_begin(&mut wishes[0]), "they come in turn");
            wishes.push_back(again);
        }
        gate.release(HERE);
        gate.give_up(&wishes[1]);
        assert!(gate.may_begin(&mut wishes[2]), "who went away keeps nobody");
        gate.give_up(&wishes[2]);
        assert!(gate.may_begin(&mut Wish::new(HERE)), "nor does one who had begun to be alone");
    }

    #[test]
    fn a_queue_that_goes_takes_what_waited_in_it_along() {
        let gate = Gate::default();
        let (one, two) = (join(&gate), join(&gate));
        assert!(gate.may_begin(&mut Wish::new(HERE)) && !gate.enter(&one, HERE));
        gate.refused();
        gate.release(HERE);
        gate.part(&one, 1);
        assert!(gate.may_begin(&mut Wish::new(HERE)) && !gate.enter(&two, HERE));
    }

    #[test]
    fn threads_that_write_parts_and_wholes_of_one_block_lose_nothing() {
        const ROUNDS: u8 = 200;
        const PARTS: usize = 3;
        let gate = Gate::default();
        // Each reads the block, changes a byte of its own and writes all of it back; those that write whole blocks have
        // counted before which they write, and find no older one there.
        let block: [AtomicU8; PARTS + 1] = Default::default();
        let read = |all: &[AtomicU8]| all.iter().map(|byte| byte.load(Relaxed)).collect::<Vec<u8>>();
        std::thread::scope(|scope| {
            for own in 0..PARTS {
                let (block, gate) = (&block, &gate);
                scope.spawn(move || {
                    for round in 1..=ROUNDS {
                        let mut wish = Wish::new(HERE);
                        while !gate.may_begin(&mut wish) {
                            std::thread::yield_now();
                        }
                        let mut all = read(block);
                        assert_eq!(all[own], round - 1, "what {own} wrote before is lost");
                        all[own] = round;
                        std::thread::yield_now();
                        block.iter().zip(all).for_each(|(cell, byte)| cell.store(byte, Relaxed));
                        gate.release(HERE);
                    }
                });
            }
            // The last byte is of a queue that writes whole blocks: nobody's part writes an older one back.
            let (block, gate) = (&block[PARTS], &gate);
            scope.spawn(move || {
                let own = join(gate);
                for round in 1..=ROUNDS {
                    while !gate.enter(&own, HERE) {
                        std::thread::yield_now();
                    }
                    assert_eq!(block.load(Relaxed), round - 1, "a part of a block undid a whole one");
                    block.store(round, Relaxed);
                    gate.leave(&own, HERE);
                }
            });
        });
        assert_eq!(read(&block), [ROUNDS; PARTS + 1]);
    }
}
