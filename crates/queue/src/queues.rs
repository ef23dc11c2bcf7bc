//! The hardware queues of one thread, by number, and which of them have work to finish this turn.
//!
//! A thread may host a thousand idle queues: a turn looks only at those that something touched.

use crate::{Queue, QueueId, Ring};

/// A table of queues.
pub struct Queues<R: Ring> {
    queues: Vec<Option<Queue<R>>>,
    touched: Vec<QueueId>,
    is_touched: Vec<bool>,
}

impl<R: Ring> Default for Queues<R> {
    fn default() -> Self {
        Queues { queues: Vec::new(), touched: Vec::new(), is_touched: Vec::new() }
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

    /// Whether a turn has something to do.
    pub fn any_touched(&self) -> bool {
        !self.touched.is_empty()
    }

    /// The queues that were touched since the last call. One that still has parked requests is touched
    /// again for the next turn.
    pub fn turn(&mut self, ring: &mut R, into: &mut Vec<QueueId>) {
        into.clear();
        into.append(&mut self.touched);
        for &id in &*into {
            self.is_touched[usize::from(id.0)] = false;
            let Some(queue) = &mut self.queues[usize::from(id.0)] else { continue };
            queue.turn(ring);
            if queue.has_parked() {
                self.is_touched[usize::from(id.0)] = true;
                self.touched.push(id);
            }
        }
    }

    /// All queues there are.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = &mut Queue<R>> {
        self.queues.iter_mut().flatten()
    }
}
