//! The connections of a listener for HTTP: so many and no more, and those on which nobody has said anything worth hearing make
//! room for new ones.
//!
//! Used by the control socket and the page, each on its own thread.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::sync::Notify;

/// One connection's place.
#[derive(Default, Debug)]
pub struct Place {
    known: AtomicBool,
    /// Notified when the connection is to be closed.
    cut: Notify,
}

impl Place {
    /// Its client may be here: it is not closed for others from now on.
    pub fn keep(&self) {
        self.known.store(true, Relaxed);
    }

    /// Ends when the connection is to be closed for another one.
    pub async fn cut(&self) {
        self.cut.notified().await;
    }
}

/// The places of a listener.
#[derive(Debug)]
pub struct Places {
    max: usize,
    /// Oldest first.
    list: Mutex<VecDeque<Arc<Place>>>,
}

impl Places {
    /// For so many connections at a time.
    pub fn new(max: usize) -> Places {
        Places { max, list: Mutex::default() }
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<Arc<Place>>> {
        self.list.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A place for a new connection. Where none is free, the oldest connection that is not to be kept is closed. `None`: all
    /// are to be kept.
    pub fn enter(&self) -> Option<Arc<Place>> {
        let mut list = self.lock();
        if list.len() >= self.max {
            let position = list.iter().position(|place| !place.known.load(Relaxed))?;
            if let Some(place) = list.remove(position) {
                place.cut.notify_one();
            }
        }
        let place = Arc::new(Place::default());
        list.push_back(place.clone());
        Some(place)
    }

    /// The connection is over.
    pub fn leave(&self, place: &Arc<Place>) {
        self.lock().retain(|other| !Arc::ptr_eq(other, place));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_oldest_that_said_nothing_makes_room() {
        let places = Places::new(3);
        let all: Vec<_> = (0..3).map(|_| places.enter().expect("there is room")).collect();
        all[0].keep();
        let new = places.enter().expect("one makes room");
        all[1].cut().await;
        [&all[2], &new].into_iter().for_each(|place| place.keep());
        assert!(places.enter().is_none(), "all are kept");
        places.leave(&all[0]);
        assert!(places.enter().is_some());
    }
}
