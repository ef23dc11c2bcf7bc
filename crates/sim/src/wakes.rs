//! Wake-ups between queues of a simulation, which has no threads that sleep.

use queue::{QueueId, QueueWaker, Queues, Ring};
use std::sync::{Arc, Mutex, PoisonError};

/// The queues that were woken and have not taken a turn since.
///
/// A queue takes no turn unless something touches it, so a wake-up that is lost shows as a request that never
/// ends.
#[derive(Clone, Debug, Default)]
pub struct Wakes(Arc<Mutex<Vec<QueueId>>>);

impl Wakes {
    /// Returns what wakes a queue: for [`Queue::set_waker`](queue::Queue::set_waker).
    pub fn waker(&self, queue: QueueId) -> QueueWaker {
        let woken = self.0.clone();
        Arc::new(move || woken.lock().unwrap_or_else(PoisonError::into_inner).push(queue))
    }

    /// Touches the queues that were woken. Returns whether there were any.
    pub fn deliver<R: Ring>(&self, queues: &mut Queues<R>) -> bool {
        let woken = std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner));
        woken.iter().for_each(|&id| queues.wake(id));
        !woken.is_empty()
    }
}
