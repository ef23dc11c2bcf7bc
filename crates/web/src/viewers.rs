//! Viewers: browsers with an open stream of events. Each event is encoded once and sent to all viewers that
//! want it.
//!
//! *Invariant:* there are at most [`VIEWERS_MAX`] viewers, and at most [`WAITING_MAX`] events wait for each.
//! A viewer that is too slow for that is disconnected; its page connects again.

use hyper::body::Bytes;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::sync::Notify;
use tokio::sync::mpsc::{Receiver, Sender, channel};

/// Largest number of viewers at once: enough for a team and a screen on the wall.
pub(crate) const VIEWERS_MAX: usize = 32;
/// Number of events that may wait for a viewer: those of about four seconds.
const WAITING_MAX: usize = 16;

/// The data that a viewer shows.
#[derive(Clone, Default, PartialEq, Eq, Debug)]
pub(crate) struct Wants {
    /// The device whose details are shown.
    pub(crate) device: Option<String>,
    /// Whether the addresses of that device's requests are shown.
    pub(crate) addresses: bool,
}

struct Viewer {
    wants: Wants,
    sender: Sender<Bytes>,
    /// Notified to close the viewer's connection.
    cut: Arc<Notify>,
}

/// All viewers.
#[derive(Default)]
pub(crate) struct Viewers(Mutex<Vec<Viewer>>);

/// Encodes a server-sent event: a name, and one line of JSON.
pub(crate) fn event(name: &str, json: &str) -> Bytes {
    Bytes::from(format!("event: {name}\ndata: {json}\n\n"))
}

impl Viewers {
    fn lock(&self) -> MutexGuard<'_, Vec<Viewer>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a viewer and sends it `first` at once. Returns `None` if there are too many viewers.
    pub(crate) fn add(&self, wants: Wants, first: &[Bytes], cut: Arc<Notify>) -> Option<Receiver<Bytes>> {
        let mut all = self.lock();
        all.retain(|viewer| !viewer.sender.is_closed());
        if all.len() >= VIEWERS_MAX {
            return None;
        }
        let (sender, receiver) = channel(WAITING_MAX);
        for event in first {
            // The channel is new and has space for these events.
            let _ = sender.try_send(event.clone());
        }
        all.push(Viewer { wants, sender, cut });
        Some(receiver)
    }

    /// Returns the data that the viewers show, each combination once.
    pub(crate) fn wants(&self) -> Vec<Wants> {
        let mut all = self.lock();
        all.retain(|viewer| !viewer.sender.is_closed());
        let mut wants = Vec::new();
        for viewer in all.iter() {
            if !wants.contains(&viewer.wants) {
                wants.push(viewer.wants.clone());
            }
        }
        wants
    }

    /// Sends an event to the viewers for which `whom` returns true; disconnects those that are too slow.
    pub(crate) fn send(&self, event: &Bytes, whom: impl Fn(&Wants) -> bool) {
        self.lock().retain(|viewer| {
            if !whom(&viewer.wants) || viewer.sender.try_send(event.clone()).is_ok() {
                return true;
            }
            viewer.cut.notify_one();
            false
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wants(device: &str) -> Wants {
        Wants { device: Some(device.to_owned()), addresses: false }
    }

    #[test]
    fn a_viewer_gets_the_events_that_it_wants() {
        let viewers = Viewers::default();
        let first = [event("hello", "1")];
        let mut one = viewers.add(wants("a"), &first, Arc::default()).unwrap();
        let mut two = viewers.add(Wants::default(), &first, Arc::default()).unwrap();
        viewers.send(&event("device", "2"), |wants| wants.device.as_deref() == Some("a"));
        assert_eq!(one.try_recv().unwrap(), "event: hello\ndata: 1\n\n");
        assert_eq!(one.try_recv().unwrap(), "event: device\ndata: 2\n\n");
        assert!(two.try_recv().is_ok() && two.try_recv().is_err());
        assert_eq!(viewers.wants(), [wants("a"), Wants::default()]);
        drop(one);
        assert_eq!(viewers.wants(), [Wants::default()]);
    }

    #[test]
    fn a_slow_viewer_is_disconnected_and_does_not_delay_others() {
        let viewers = Viewers::default();
        let cut = Arc::new(Notify::new());
        let slow = viewers.add(wants("slow"), &[], cut.clone()).unwrap();
        let mut quick = viewers.add(wants("quick"), &[], Arc::default()).unwrap();
        for _ in 0..=WAITING_MAX {
            viewers.send(&event("tick", "0"), |_| true);
            assert!(quick.try_recv().is_ok());
        }
        assert_eq!(viewers.wants(), [wants("quick")]);
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(cut.notified());
        drop(slow);
    }

    #[test]
    fn a_viewer_too_many_is_refused() {
        let viewers = Viewers::default();
        let mut all: Vec<_> = (0..VIEWERS_MAX)
            .map(|_| viewers.add(Wants::default(), &[], Arc::default()).expect("there is room"))
            .collect();
        assert!(viewers.add(Wants::default(), &[], Arc::default()).is_none());
        all.pop();
        assert!(viewers.add(Wants::default(), &[], Arc::default()).is_some());
    }
}
