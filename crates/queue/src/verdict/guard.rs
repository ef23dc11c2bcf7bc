//! A queue at the gate of its device: writes begin where nobody is alone, and leave when they are told to be done.
//!
//! Only a queue of a device of which somebody writes parts of blocks has a guard. Who was turned away has entered no node,
//! is drained, and begins when the queue is nudged and not frozen.

use super::{Done, Owner, Queue, State};
use crate::Ring;
use crate::gate::{Counts, Gate, Nudge, Strips};
use block::{Request, Tag};
use std::collections::VecDeque;
use std::sync::Arc;

/// What a request is to the gate.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Pass {
    /// Nothing: it is not there, or writes nothing.
    No,
    /// It is counted there.
    Counted(Strips),
    /// Its owner is alone.
    Alone,
}

/// The gate, and what of the queue is there.
pub(super) struct Guard {
    gate: Arc<Gate>,
    own: Arc<Counts>,
    /// By tag of the front-end.
    passes: Box<[Pass]>,
    /// Those that were turned away.
    waiting: VecDeque<Tag>,
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.gate.part(&self.own, self.waiting.len() as u32);
    }
}

impl Guard {
    /// Whether a request may enter the stack; it is counted then.
    fn admits(&mut self, tag: Tag, req: &Request) -> bool {
        let pass = &mut self.passes[tag.index()];
        if !req.op.is_write() || *pass != Pass::No {
            return true;
        }
        let strips = Strips::of(req.offset.0, req.len.0);
        let entered = self.gate.enter(&self.own, strips);
        if entered {
            *pass = Pass::Counted(strips);
        }
        entered
    }

    /// A request is over.
    fn left(&mut self, tag: Tag) {
        if let Pass::Counted(strips) = std::mem::replace(&mut self.passes[tag.index()], Pass::No) {
            self.gate.leave(&self.own, strips);
        }
    }

    /// How many were turned away and wait.
    pub(super) fn waiting(&self) -> usize {
        self.waiting.len()
    }
}

impl<R: Ring> Queue<R> {
    /// Have what is written from now on, and is being written, wait for those that are alone at the gate, and counted there.
    /// `nudge` has this queue take a turn. What was done already is not done again.
    pub fn guard(&mut self, gate: &Arc<Gate>, nudge: Nudge) {
        if self.guard.is_some() {
            return;
        }
        let own = gate.join(nudge);
        let mut passes = vec![Pass::No; usize::from(self.depth)];
        for (index, pass) in passes.iter_mut().enumerate() {
            let slot = &self.slots[index];
            let is_held_back = self.waiting.contains(&Tag(index as u16));
            if slot.state != State::Free && slot.req.op.is_write() && !is_held_back {
                let strips = Strips::of(slot.req.offset.0, slot.req.len.0);
                own.add(strips);
                *pass = Pass::Counted(strips);
            }
        }
        // As many as there are tags, so that it never grows.
        let waiting = VecDeque::with_capacity(self.depth.into());
        self.guard = Some(Box::new(Guard { gate: gate.clone(), own, passes: passes.into(), waiting }));
        self.guarded = true;
    }

    /// [`submit`](Queue::submit) for one who is alone at the gate where this request writes.
    ///
    /// # Panics
    /// When the tag is in use.
    pub fn submit_alone(&mut self, tag: Tag, owner: Owner, req: Request, ring: &mut R) {
        if let Some(guard) = &mut self.guard {
            guard.passes[tag.index()] = Pass::Alone;
        }
        self.submit(tag, owner, req, ring);
    }

    /// Whether a request may enter the stack. Else it waits at the gate.
    pub(super) fn may_enter(&mut self, tag: Tag) -> bool {
        let (Some(guard), slot) = (&mut self.guard, &mut self.slots[tag.index()]) else { return true };
        if guard.admits(tag, &slot.req) {
            return true;
        }
        slot.state = State::Parked;
        guard.gate.refused();
        guard.waiting.push_back(tag);
        false
    }

    /// Let those begin that waited at the gate and may by now.
    #[cold]
    pub(super) fn offer_guarded(&mut self, ring: &mut R) {
        if self.frozen {
            return;
        }
        for _ in 0..self.guard.as_ref().map_or(0, |guard| guard.waiting.len()) {
            let Some(guard) = &mut self.guard else { return };
            let Some(tag) = guard.waiting.pop_front() else { return };
            let slot = &mut self.slots[tag.index()];
            if !guard.admits(tag, &slot.req) {
                guard.waiting.push_back(tag);
                continue;
            }
            guard.gate.admitted();
            slot.state = State::Moving;
            self.advance(tag, crate::Verdict::Down(crate::NodeId::TOP), ring);
        }
    }

    /// The device is so long from now on: those that wait at the gate and reach further end.
    pub(super) fn refuse_guarded(&mut self, size: u64, ring: &mut R) {
        for _ in 0..self.guard.as_ref().map_or(0, |guard| guard.waiting.len()) {
            let Some(guard) = &mut self.guard else { return };
            let Some(tag) = guard.waiting.pop_front() else { return };
            let req = &self.slots[tag.index()].req;
            if req.offset.0.saturating_add(req.len.0) <= size {
                guard.waiting.push_back(tag);
                continue;
            }
            guard.gate.admitted();
            self.refuse(tag, ring);
        }
    }

    /// These requests are over: they leave the gate.
    #[cold]
    pub(super) fn leave_guarded(guard: &mut Option<Box<Guard>>, done: &[Done]) {
        if let Some(guard) = guard {
            done.iter().for_each(|done| guard.left(done.tag));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{Disk, TestRing};
    use super::*;
    use crate::gate::Wish;
    use crate::{QueueConfig, QueueId, Stack, Verdict};
    use block::{Bytes, Op, Status};
    use std::sync::atomic::AtomicUsize;
    use std::sync::atomic::Ordering::Relaxed;

    const BLOCK: usize = 4;
    const BLOCKS: usize = 3;

    fn queue(depth: u16) -> (Queue<TestRing>, Disk) {
        let (mut stack, disk) = (Stack::default(), Disk::answering(&[Verdict::Held]));
        stack.backend(Box::new(disk.clone()));
        let config = QueueConfig { id: QueueId(0), depth, segments_per_tag: 1, timeout_ns: None };
        (Queue::new(config, stack).unwrap(), disk)
    }

    fn write(queue: &mut Queue<TestRing>, ring: &mut TestRing, offset: u64) -> Tag {
        let tag = queue.tag().expect("a tag");
        queue.submit(tag, Owner(0), Request::new(Op::Write, Bytes(offset), Bytes(512)), ring);
        tag
    }

    fn finish(queue: &mut Queue<TestRing>, disk: &Disk, ring: &mut TestRing) -> Vec<Done> {
        let held = std::mem::take(&mut disk.0.borrow_mut().held);
        held.into_iter().for_each(|io| queue.complete(io, 512, ring));
        queue.done().collect()
    }

    #[test]
    fn a_write_waits_for_one_who_is_alone_and_begins_when_its_queue_is_nudged() {
        let (gate, nudges) = (Arc::new(Gate::default()), Arc::new(AtomicUsize::new(0)));
        let (mut queue, disk) = queue(8);
        let ring = &mut TestRing::default();
        // It began before the queue was guarded, and is waited for all the same.
        write(&mut queue, ring, 0);
        let counted = nudges.clone();
        queue.guard(&gate, Arc::new(move || _ = counted.fetch_add(1, Relaxed)));
        let mut wish = Wish::new(Strips::of(0, 512));
        assert!(!gate.may_begin(&mut wish));
        assert_eq!(finish(&mut queue, &disk, ring).len(), 1);
        assert_eq!(nudges.load(Relaxed), 1, "whoever waits for it looks again");
        assert!(gate.may_begin(&mut wish));
        let late = write(&mut queue, ring, 0);
        let elsewhere = write(&mut queue, ring, 2 << 20);
        let reads = queue.tag().unwrap();
        queue.submit(reads, Owner(0), Request::new(Op::Read, Bytes(0), Bytes(512)), ring);
        queue.turn(ring);
        let ended: Vec<Tag> = finish(&mut queue, &disk, ring).into_iter().map(|done| done.tag).collect();
        assert_eq!(ended, [elsewhere, reads], "reads and writes elsewhere go on");
        assert!(queue.in_flight() == 1 && queue.is_drained(), "what waits has entered no node");
        gate.release(wish.strips());
        assert_eq!(nudges.load(Relaxed), 2);
        queue.freeze();
        queue.turn(ring);
        assert!(queue.is_drained(), "a frozen queue begins nothing");
        queue.thaw(Bytes(1 << 30), ring);
        queue.turn(ring);
        assert_eq!(finish(&mut queue, &disk, ring)[0].tag, late);
        assert!(gate.may_begin(&mut Wish::new(Strips::of(0, 512))), "all have left");
    }

    #[test]
    fn what_waits_where_the_device_ends_no_more_is_refused() {
        let gate = Arc::new(Gate::default());
        let (mut queue, disk) = queue(8);
        let ring = &mut TestRing::default();
        queue.guard(&gate, Arc::new(|| {}));
        let mut wish = Wish::new(Strips::of(0, 512));
        assert!(gate.may_begin(&mut wish));
        let (kept, gone) = (write(&mut queue, ring, 0), write(&mut queue, ring, 4096));
        queue.freeze();
        queue.thaw(Bytes(4096), ring);
        let done: Vec<Done> = queue.done().collect();
        assert_eq!(
            done.iter().map(|end| (end.tag, end.status)).collect::<Vec<_>>(),
            [(gone, Status::IoError)]
        );
        gate.release(wish.strips());
        queue.turn(ring);
        assert_eq!(finish(&mut queue, &disk, ring)[0].tag, kept);
        let mut next = Wish::new(Strips::of(0, 512));
        assert!(gate.may_begin(&mut next), "nobody is counted who is not there");
    }

    /// What somebody writes.
    struct Actor {
        queue: usize,
        tag: Tag,
        bytes: std::ops::Range<usize>,
        /// Number of the write.
        number: usize,
        step: Step,
    }

    enum Step {
        Whole,
        Waits(Wish),
        /// The edges.
        Reads(Strips),
        Writes(Strips, Vec<usize>),
    }

    /// Writers of whole blocks and of parts, on several queues of a device that ends requests in any order. By byte, the
    /// number of the write that is there; by number, when it began and was answered.
    struct World {
        random: fastrand::Rng,
        now: usize,
        queues: Vec<(Queue<TestRing>, Disk)>,
        memory: Vec<usize>,
        writes: Vec<(usize, usize, std::ops::Range<usize>)>,
        actors: Vec<Actor>,
        gate: Arc<Gate>,
    }

    impl World {
        fn new(seed: u64, guarded: bool) -> World {
            let gate = Arc::new(Gate::default());
            let mut queues: Vec<_> = (0..3).map(|_| queue(8)).collect();
            if guarded {
                queues.iter_mut().for_each(|(queue, _)| queue.guard(&gate, Arc::new(|| {})));
            }
            let writes = vec![(0, 0, 0..BLOCK * BLOCKS)];
            let memory = vec![0; BLOCK * BLOCKS];
            World {
                random: fastrand::Rng::with_seed(seed),
                now: 0,
                queues,
                memory,
                writes,
                actors: Vec::new(),
                gate,
            }
        }

        fn random(&mut self, below: usize) -> usize {
            self.random.usize(..below)
        }

        fn begin(&mut self, ring: &mut TestRing) {
            let (number, at) = (self.random(self.queues.len()), BLOCK * self.random(BLOCKS));
            let Some(tag) = self.queues[number].0.tag() else { return };
            let is_whole = self.random(2) == 0;
            let skip = if is_whole { 0 } else { self.random(BLOCK) };
            let bytes = at + skip..if is_whole { at + BLOCK } else { at + skip + 1 };
            self.writes.push((self.now, usize::MAX, bytes.clone()));
            let step = if is_whole {
                let req = Request::new(Op::Write, Bytes(at as u64), Bytes(BLOCK as u64));
                self.queues[number].0.submit(tag, Owner(0), req, ring);
                Step::Whole
            } else {
                Step::Waits(Wish::new(Strips::of(at as u64, BLOCK as u64)))
            };
            self.actors.push(Actor { queue: number, tag, bytes, number: self.writes.len() - 1, step });
        }

        /// Those that want to be alone look whether they are.
        fn look(&mut self, guarded: bool, ring: &mut TestRing) {
            for actor in &mut self.actors {
                let Step::Waits(wish) = &mut actor.step else { continue };
                if guarded && !self.gate.may_begin(wish) {
                    continue;
                }
                let at = (actor.bytes.start / BLOCK * BLOCK) as u64;
                actor.step = Step::Reads(wish.strips());
                let req = Request::new(Op::Read, Bytes(at), Bytes(BLOCK as u64));
                self.queues[actor.queue].0.submit(actor.tag, Owner(0), req, ring);
            }
        }

        /// The device ends one of what it holds.
        fn end_one(&mut self, ring: &mut TestRing) {
            let number = self.random(self.queues.len());
            let count = self.queues[number].1.0.borrow().held.len();
            if count == 0 {
                return;
            }
            let chosen = self.random(count);
            let (queue, disk) = &mut self.queues[number];
            let io = disk.0.borrow_mut().held.swap_remove(chosen);
            let index = self.actors.iter().position(|one| one.queue == number && one.tag == io.tag);
            let actor = &mut self.actors[index.expect("somebody's")];
            let at = actor.bytes.start / BLOCK * BLOCK;
            let block = at..at + BLOCK;
            let strips = match &actor.step {
                Step::Whole => {
                    self.memory[block].fill(actor.number);
                    None
                }
                Step::Reads(strips) => {
                    let mut read = self.memory[block].to_vec();
                    read[actor.bytes.start - at..actor.bytes.end - at].fill(actor.number);
                    actor.step = Step::Writes(*strips, read);
                    queue.complete(io, BLOCK as i64, ring);
                    assert_eq!(queue.done().count(), 1);
                    let req = Request::new(Op::Write, Bytes(at as u64), Bytes(BLOCK as u64));
                    return queue.submit_alone(io.tag, Owner(0), req, ring);
                }
                Step::Writes(strips, bytes) => {
                    self.memory[block].copy_from_slice(bytes);
                    Some(*strips)
                }
                Step::Waits(_) => unreachable!("it has nothing under way"),
            };
            queue.complete(io, BLOCK as i64, ring);
            assert_eq!(queue.done().count(), 1);
            queue.release(io.tag);
            self.writes[actor.number].1 = self.now;
            self.actors.swap_remove(index.unwrap_or_default());
            strips.into_iter().for_each(|strips| self.gate.release(strips));
        }

        /// The first byte that a write lost which was over before the one that is there began; none when all is well.
        fn lost(&self) -> Option<usize> {
            (0..self.memory.len()).find(|&byte| {
                let (_, ended, _) = self.writes[self.memory[byte]];
                self.writes.iter().any(|(began, _, bytes)| bytes.contains(&byte) && *began > ended)
            })
        }

        fn run(mut self, guarded: bool) -> Option<usize> {
            let ring = &mut TestRing::default();
            for _ in 0..2000 {
                self.now += 1;
                match self.random(8) {
                    0 | 1 => self.begin(ring),
                    2 => self.look(guarded, ring),
                    3 => {
                        let number = self.random(3);
                        self.queues[number].0.turn(ring);
                    }
                    4 if self.random(20) == 0 => {
                        let number = self.random(3);
                        self.queues[number].0.freeze();
                    }
                    5 => {
                        let number = self.random(3);
                        self.queues[number].0.thaw(Bytes(1 << 20), ring);
                    }
                    _ => self.end_one(ring),
                }
            }
            for turn in 0.. {
                if self.actors.is_empty() {
                    return self.lost();
                }
                assert!(turn < 100_000, "somebody waits for ever");
                self.now += 1;
                self.look(guarded, ring);
                for (queue, _) in &mut self.queues {
                    queue.thaw(Bytes(1 << 20), ring);
                    queue.turn(ring);
                }
                self.end_one(ring);
            }
            None
        }
    }

    #[test]
    fn no_order_of_parts_and_wholes_loses_a_write() {
        let mut found = 0;
        for seed in 0..300 {
            assert_eq!(World::new(seed, true).run(true), None, "seed {seed}");
            found += u32::from(World::new(seed, false).run(false).is_some());
        }
        assert!(found > 100, "without a gate they are lost, and it is seen: {found} of 300");
    }
}
