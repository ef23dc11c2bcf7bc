//! Wake-ups between the queues of a simulation. Its queues share one thread, so a wake-up is recorded and
//! delivered later.

use queue::{QueueId, QueueWaker, Queues, Ring};
use std::sync::{Arc, Mutex, PoisonError};

/// The queues that were woken and have not taken a turn since.
///
/// A queue takes no turn unless it has an event, so a lost wake-up shows as a request that never completes.
#[derive(Clone, Debug, Default)]
pub struct Wakes(Arc<Mutex<Vec<QueueId>>>);

impl Wakes {
    /// Returns the waker of a queue, for [`Queue::set_waker`](queue::Queue::set_waker).
    pub fn waker(&self, queue: QueueId) -> QueueWaker {
        let woken = self.0.clone();
        Arc::new(move || woken.lock().unwrap_or_else(PoisonError::into_inner).push(queue))
    }

    /// Wakes the recorded queues. Returns whether there were any.
    pub fn deliver<R: Ring>(&self, queues: &mut Queues<R>) -> bool {
        let woken = std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner));
        woken.iter().for_each(|&id| queues.wake(id));
        !woken.is_empty()
    }
}
