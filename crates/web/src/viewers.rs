//! Everybody who watches: one text a second, made once, is sent to all of them.
//!
//! *Invariant:* at most [`VIEWERS_MAX`] watch, and at most [`WAITING_MAX`] texts wait for each; for whom more would, is
//! slower than the seconds pass, and is cut off. A page that was cut off connects again.

use hyper::body::Bytes;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::sync::Notify;
use tokio::sync::mpsc::{Receiver, Sender, channel};

/// So many watch at once: a team, and a screen on the wall.
pub(crate) const VIEWERS_MAX: usize = 32;
/// Texts that may wait for one: what comes in four seconds.
const WAITING_MAX: usize = 16;

/// What of all there is somebody watches.
#[derive(Clone, Default, PartialEq, Eq, Debug)]
pub(crate) struct Wants {
    /// The device that is looked at closely.
    pub(crate) device: Option<String>,
    /// Also where its requests go.
    pub(crate) addresses: bool,
}

struct Viewer {
    wants: Wants,
    sender: Sender<Bytes>,
    /// Told to have its connection closed, whatever is under way on it.
    cut: Arc<Notify>,
}

/// All of them.
#[derive(Default)]
pub(crate) struct Viewers(Mutex<Vec<Viewer>>);

/// One event as it is sent: a name, and one line of JSON.
pub(crate) fn event(name: &str, json: &str) -> Bytes {
    Bytes::from(format!("event: {name}\ndata: {json}\n\n"))
}

impl Viewers {
    fn lock(&self) -> MutexGuard<'_, Vec<Viewer>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// One more, who is sent `first` at once. `None`: there are too many.
    pub(crate) fn add(&self, wants: Wants, first: &[Bytes], cut: Arc<Notify>) -> Option<Receiver<Bytes>> {
        let mut all = self.lock();
        all.retain(|viewer| !viewer.sender.is_closed());
        if all.len() >= VIEWERS_MAX {
            return None;
        }
        let (sender, receiver) = channel(WAITING_MAX);
        for event in first {
            // They fit: it is new.
            let _ = sender.try_send(event.clone());
        }
        all.push(Viewer { wants, sender, cut });
        Some(receiver)
    }

    /// What those who are there want.
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

    /// Send something to those whom it is for.
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
    fn a_viewer_is_sent_what_it_watches() {
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
    fn a_slow_viewer_is_cut_off_and_keeps_nobody_waiting() {
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
    fn there_are_so_many_viewers_and_no_more() {
        let viewers = Viewers::default();
        let mut all: Vec<_> = (0..VIEWERS_MAX)
            .map(|_| viewers.add(Wants::default(), &[], Arc::default()).expect("there is room"))
            .collect();
        assert!(viewers.add(Wants::default(), &[], Arc::default()).is_none());
        all.pop();
        assert!(viewers.add(Wants::default(), &[], Arc::default()).is_some());
    }
}
