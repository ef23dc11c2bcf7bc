//! Limits on NBD clients: connections per peer and per export.
//!
//! Owned by the host. Used on the control plane's thread, and on a reactor's thread when a connection ends.

use crate::handshakes::Peer;
use engine::log_limit::LogLimit;
use spec::NbdLimits;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

/// The object whose connections are counted.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum Key {
    Peer(Peer),
    /// A device, by its number in this process.
    Device(usize),
}

/// Connection counts of a process.
#[derive(Default)]
pub(crate) struct ConnectionLimits {
    limits: NbdLimits,
    counts: Mutex<HashMap<Key, u32>>,
    log: LogLimit,
}

impl ConnectionLimits {
    pub(crate) fn new(limits: NbdLimits) -> ConnectionLimits {
        ConnectionLimits { limits, ..ConnectionLimits::default() }
    }

    pub(crate) fn limits(&self) -> &NbdLimits {
        &self.limits
    }

    /// Returns the reason why `peer` may not connect to a device now; `None`: it may.
    pub(super) fn refusal(&self, peer: Peer, device: usize) -> Option<&'static str> {
        let counts = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        let count = |key| counts.get(&key).copied().unwrap_or(0);
        if count(Key::Device(device)) >= self.limits.connections {
            Some("the export has as many connections as it may (--nbd-limits connections)")
        } else if count(Key::Peer(peer)) >= self.limits.per_peer {
            Some("this peer has as many connections as it may (--nbd-limits per-peer)")
        } else {
            None
        }
    }

    /// Counts a new connection of `peer` to a device until the permit is dropped. `None`: a limit is reached.
    pub(super) fn admit(self: &Arc<Self>, peer: Peer, device: usize) -> Option<ConnectionPermit> {
        if self.refusal(peer, device).is_some() {
            return None;
        }
        let keys = [Key::Peer(peer), Key::Device(device)];
        let mut counts = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        keys.iter().for_each(|key| *counts.entry(*key).or_default() += 1);
        Some(ConnectionPermit { limits: self.clone(), keys })
    }

    /// Returns the number of refusals since the last log line if another line may be logged now.
    pub(super) fn admit_line(&self) -> Option<u64> {
        self.log.admit_now()
    }
}

/// The count of one connection, until this is dropped.
pub(super) struct ConnectionPermit {
    limits: Arc<ConnectionLimits>,
    keys: [Key; 2],
}

impl Drop for ConnectionPermit {
    fn drop(&mut self) {
        let mut counts = self.limits.counts.lock().unwrap_or_else(PoisonError::into_inner);
        for key in self.keys {
            if let Some(count) = counts.get_mut(&key) {
                *count -= 1;
                if *count == 0 {
                    counts.remove(&key);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_are_counted_by_peer_and_by_device() {
        let limits = NbdLimits { connections: 3, per_peer: 2, ..NbdLimits::default() };
        let limits = Arc::new(ConnectionLimits::new(limits));
        let (one, two) = (Peer::of([10, 0, 0, 1].into()), Peer::User(1000));
        let permits: Vec<_> = (0..2).map(|_| limits.admit(one, 7).expect("there is room")).collect();
        assert!(limits.refusal(one, 8).is_some_and(|why| why.contains("per-peer")), "at any device");
        let other = limits.admit(two, 7).expect("there is room");
        assert!(limits.refusal(two, 7).is_some_and(|why| why.contains("the export")));
        assert!(limits.admit(two, 8).is_some());
        drop(permits);
        assert!(limits.admit(one, 7).is_some());
        drop(other);
        assert!(limits.counts.lock().unwrap().is_empty());
    }
}
