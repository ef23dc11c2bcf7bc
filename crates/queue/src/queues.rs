//! The hardware queues of one thread, by number, and those of them with work in this turn.
//!
//! A thread may host a thousand idle queues. A turn visits only the queues that were touched, and those with
//! blocked requests ([`Verdict::Blocked`](crate::Verdict::Blocked)).
//!
//! *Invariant:* if requests are blocked, a turn in which anything happened is followed by another before the
//! thread sleeps, as it may have freed what they need. So a thread sleeps with blocked requests only after
//! all of them were offered, in vain, after everything else that it did.

use crate::{Queue, QueueId, Ring};

/// A table of queues.
pub struct Queues<R: Ring> {
    queues: Vec<Option<Queue<R>>>,
    touched: Vec<QueueId>,
    is_touched: Vec<bool>,
    /// Queues whose parked requests are all blocked.
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
    /// Returns a number that no queue has. It stays free until [`insert`](Queues::insert).
    pub fn vacant(&mut self) -> QueueId {
        let index = self.queues.iter().position(Option::is_none).unwrap_or_else(|| {
            self.queues.push(None);
            self.is_touched.push(false);
            self.queues.len() - 1
        });
        QueueId(index as u16)
    }

    /// Adds a queue under its own number, which [`vacant`](Queues::vacant) returned.
    pub fn insert(&mut self, queue: Queue<R>) {
        let id = queue.id();
        self.queues[usize::from(id.0)] = Some(queue);
    }

    /// Removes a queue, which has to be drained.
    pub fn remove(&mut self, id: QueueId) -> Option<Queue<R>> {
        self.queues.get_mut(usize::from(id.0))?.take()
    }

    /// Returns a queue, without making it take part in this turn.
    ///
    /// # Panics
    /// If the queue does not exist.
    pub fn get_mut(&mut self, id: QueueId) -> &mut Queue<R> {
        self.queues[usize::from(id.0)]
            .as_mut()
            .expect("a queue is removed only when its number is not used any more")
    }

    /// Returns a queue that gets work: it takes part in this turn.
    ///
    /// # Panics
    /// If the queue does not exist.
    #[inline]
    pub fn touch(&mut self, id: QueueId) -> &mut Queue<R> {
        let index = usize::from(id.0);
        if !self.is_touched[index] {
            self.is_touched[index] = true;
            self.recheck = true;
            self.touched.push(id);
        }
        self.queues[index].as_mut().expect("a queue is removed only when its number is not used any more")
    }

    /// Makes a queue take part in this turn, if it still exists: for wake-ups from other threads.
    pub fn wake(&mut self, id: QueueId) {
        if self.queues.get(usize::from(id.0)).is_some_and(Option::is_some) {
            self.touch(id);
        }
    }

    /// Whether a turn has work, so that the thread must not sleep.
    pub fn any_touched(&self) -> bool {
        !self.touched.is_empty() || self.recheck && !self.blocked.is_empty()
    }

    /// Reports that something on this thread, other than a touched queue, may have freed what blocked
    /// requests wait for: a front-end freed memory, for example.
    #[inline]
    pub fn recheck(&mut self) {
        self.recheck = true;
    }

    /// Completes the turn of the queues that were touched since the last call and of those with blocked
    /// requests, and lists them in `into`. A queue that has more work at once is touched for the next turn.
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

    /// Iterates over all queues.
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

    /// Returns two queues on these disks.
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

    /// Takes turns until the thread may sleep. Returns how many.
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
    fn a_thread_may_sleep_with_blocked_requests_and_offers_them_after_every_event() {
        let ring = &mut TestRing::default();
        let blocked = Disk::answering(&[Verdict::Blocked]);
        let other = Disk::answering(&[Verdict::Held]);
        let mut queues = two(&blocked, &other);
        submit(&mut queues, 0, ring);
        assert!(turns(&mut queues, ring) <= 3);
        let offered = blocked.seen().len();
        // The other queue's request ends, and may free what the first waits for.
        submit(&mut queues, 1, ring);
        turns(&mut queues, ring);
        let held = other.held(0);
        queues.touch(QueueId(1)).complete(held, 512, ring);
        assert!(turns(&mut queues, ring) <= 3);
        assert!(blocked.seen().len() > offered);
        // A front-end freed memory, which touches no queue.
        let offered = blocked.seen().len();
        queues.recheck();
        assert!(queues.any_touched());
        turns(&mut queues, ring);
        assert_eq!(blocked.seen().len(), offered + 1);
        // Another thread wakes it.
        queues.wake(QueueId(0));
        turns(&mut queues, ring);
        assert!(blocked.seen().len() > offered + 1);
        assert!(queues.get_mut(QueueId(0)).has_parked());
    }

    #[test]
    fn what_is_freed_later_in_a_turn_reaches_blocked_requests_before_the_thread_sleeps() {
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
    fn busy_requests_are_retried_without_sleep() {
        let ring = &mut TestRing::default();
        let busy = Disk::answering(&[Verdict::Busy, Verdict::Busy, Verdict::Busy, Verdict::Up(Status::Ok)]);
        let mut queues = two(&busy, &Disk::answering(&[Verdict::Held]));
        submit(&mut queues, 0, ring);
        turns(&mut queues, ring);
        assert_eq!(busy.seen().len(), 4);
    }
}
