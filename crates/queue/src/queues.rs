//! The hardware queues of one thread, by number, and which of them have work to finish this turn.
//!
//! A thread may host a thousand idle queues: a turn looks only at those that something touched, and at those with blocked
//! requests ([`Verdict::Blocked`](crate::Verdict::Blocked)).
//!
//! *Invariant:* after a turn in which anything happened there is another before the thread sleeps, if requests are blocked:
//! what happened last may have freed what they need. So a thread sleeps with blocked requests only when all of them were
//! offered, in vain, after everything else that it did.

use crate::{Queue, QueueId, Ring};

/// A table of queues.
pub struct Queues<R: Ring> {
    queues: Vec<Option<Queue<R>>>,
    touched: Vec<QueueId>,
    is_touched: Vec<bool>,
    /// Queues of which all parked requests are blocked.
    blocked: Vec<QueueId>,
    /// Something happened since those were offered.
    recheck: bool,
}

impl<R: Ring> Default for Queues<R> {
    fn default() -> Self {
        Queues {
            queues: Vec::new(),
            touched: Vec::new(),
            is_touched: Vec::new(),
            blocked: Vec::new(),
            recheck: false,
        }
    }
}

impl<R: Ring> Queues<R> {
    /// A number that no queue has. It stays free until [`insert`](Queues::insert).
    pub fn vacant(&mut self) -> QueueId {
        let index = self.queues.iter().position(Option::is_none).unwrap_or_else(|| {
            self.queues.push(None);
            self.is_touched.push(false);
            self.queues.len() - 1
        });
        QueueId(index as u16)
    }

    /// Put a queue under its own number, which [`vacant`](Queues::vacant) gave.
    pub fn insert(&mut self, queue: Queue<R>) {
        let id = queue.id();
        self.queues[usize::from(id.0)] = Some(queue);
    }

    /// Take a queue away. It must be drained.
    pub fn remove(&mut self, id: QueueId) -> Option<Queue<R>> {
        self.queues.get_mut(usize::from(id.0))?.take()
    }

    /// A queue, to look at or to take back from: it takes no part in a turn for that.
    ///
    /// # Panics
    /// When there is none: whoever holds a number keeps its queue.
    pub fn get_mut(&mut self, id: QueueId) -> &mut Queue<R> {
        self.queues[usize::from(id.0)].as_mut().expect("a queue is removed only when nobody knows its number")
    }

    /// A queue, to give it work: it takes part in this turn.
    ///
    /// # Panics
    /// When there is none: whoever holds a number keeps its queue.
    #[inline]
    pub fn touch(&mut self, id: QueueId) -> &mut Queue<R> {
        let index = usize::from(id.0);
        if !self.is_touched[index] {
            self.is_touched[index] = true;
            self.recheck = true;
            self.touched.push(id);
        }
        self.queues[index].as_mut().expect("a queue is removed only when nobody knows its number")
    }

    /// Have a queue take part in this turn, if it is still there: for those that may know a number for too long.
    pub fn nudge(&mut self, id: QueueId) {
        if self.queues.get(usize::from(id.0)).is_some_and(Option::is_some) {
            self.touch(id);
        }
    }

    /// Whether a turn has something to do: the thread must not sleep before.
    pub fn any_touched(&self) -> bool {
        !self.touched.is_empty() || self.recheck && !self.blocked.is_empty()
    }

    /// Something happened on this thread that may have freed what blocked requests wait for, beyond what touched a queue:
    /// a front-end gave memory back, for example.
    #[inline]
    pub fn recheck(&mut self) {
        self.recheck = true;
    }

    /// Finishes the turn of the queues that were touched since the last call, and of those with blocked requests; these
    /// queues go to `into`. One that has more to do at once is touched again for the next turn.
    pub fn turn(&mut self, ring: &mut R, into: &mut Vec<QueueId>) {
        into.clear();
        into.append(&mut self.touched);
        self.recheck = false;
        let mut happened = !into.is_empty();
        if !self.blocked.is_empty() {
            let is_touched = &self.is_touched;
            into.extend(self.blocked.drain(..).filter(|id| !is_touched[usize::from(id.0)]));
        }
        for &id in &*into {
            self.is_touched[usize::from(id.0)] = false;
            let Some(queue) = &mut self.queues[usize::from(id.0)] else { continue };
            queue.turn(ring);
            happened |= queue.take_moved();
            if queue.must_turn() {
                self.is_touched[usize::from(id.0)] = true;
                self.touched.push(id);
                happened = true;
            } else if queue.has_parked() {
                self.blocked.push(id);
            }
        }
        self.recheck |= happened;
    }

    /// All queues there are.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = &mut Queue<R>> {
        self.queues.iter_mut().flatten()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::verdict::tests::{Disk, TestRing};
    use crate::{Owner, QueueConfig, Stack, Verdict};
    use block::{Bytes, Op, Request, Status};

    /// Two queues of a thread, on disks that answer so.
    fn two(first: &Disk, second: &Disk) -> Queues<TestRing> {
        let mut queues = Queues::default();
        for disk in [first, second] {
            let mut stack = Stack::default();
            stack.backend(Box::new(disk.clone()));
            let id = queues.vacant();
            let config = QueueConfig { id, depth: 4, segments_per_tag: 1, timeout_ns: None };
            queues.insert(Queue::new(config, stack).unwrap());
        }
        queues
    }

    fn submit(queues: &mut Queues<TestRing>, number: u16, ring: &mut TestRing) {
        let queue = queues.touch(QueueId(number));
        let tag = queue.tag().unwrap();
        queue.submit(tag, Owner(0), Request::new(Op::Read, Bytes(0), Bytes(512)), ring);
    }

    /// Turns until the thread may sleep.
    fn turns(queues: &mut Queues<TestRing>, ring: &mut TestRing) -> u32 {
        let mut count = 0;
        while queues.any_touched() {
            queues.turn(ring, &mut Vec::new());
            count += 1;
            assert!(count < 100, "it never sleeps");
        }
        count
    }

    #[test]
    fn a_thread_sleeps_while_requests_are_blocked_and_offers_them_after_whatever_happens() {
        let ring = &mut TestRing::default();
        let blocked = Disk::answering(&[Verdict::Blocked]);
        let other = Disk::answering(&[Verdict::Held]);
        let mut queues = two(&blocked, &other);
        submit(&mut queues, 0, ring);
        assert!(turns(&mut queues, ring) <= 3);
        let offered = blocked.seen().len();
        // The other queue's request ends, and with it, perhaps, the use of what the first waits for.
        submit(&mut queues, 1, ring);
        turns(&mut queues, ring);
        let held = other.held(0);
        queues.touch(QueueId(1)).complete(held, 512, ring);
        assert!(turns(&mut queues, ring) <= 3);
        assert!(blocked.seen().len() > offered);
        // A front-end gave memory back, of which no queue knows.
        let offered = blocked.seen().len();
        queues.recheck();
        assert!(queues.any_touched());
        turns(&mut queues, ring);
        assert_eq!(blocked.seen().len(), offered + 1);
        // Another thread wakes it.
        queues.nudge(QueueId(0));
        turns(&mut queues, ring);
        assert!(blocked.seen().len() > offered + 1);
        assert!(queues.get_mut(QueueId(0)).has_parked());
    }

    #[test]
    fn what_is_freed_behind_a_blocked_request_in_a_turn_is_found_before_the_thread_sleeps() {
        let ring = &mut TestRing::default();
        // Blocked while the other is parked, and offered before it in the same turn.
        let first =
            Disk::answering(&[Verdict::Blocked, Verdict::Blocked, Verdict::Blocked, Verdict::Up(Status::Ok)]);
        let second = Disk::answering(&[Verdict::Blocked, Verdict::Blocked, Verdict::Up(Status::Ok)]);
        let mut queues = two(&first, &second);
        submit(&mut queues, 0, ring);
        submit(&mut queues, 1, ring);
        turns(&mut queues, ring);
        assert!(!queues.get_mut(QueueId(0)).has_parked() && !queues.get_mut(QueueId(1)).has_parked());
    }

    #[test]
    fn what_is_to_be_tried_again_is_without_sleep() {
        let ring = &mut TestRing::default();
        let busy = Disk::answering(&[Verdict::Busy, Verdict::Busy, Verdict::Busy, Verdict::Up(Status::Ok)]);
        let mut queues = two(&busy, &Disk::answering(&[Verdict::Held]));
        submit(&mut queues, 0, ring);
        turns(&mut queues, ring);
        assert_eq!(busy.seen().len(), 4);
    }
}
