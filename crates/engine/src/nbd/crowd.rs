//! How many clients there are, by peer and by export, and which handshakes go when there are too many.
//!
//! Owned by the host; used on the control plane's thread, and where a connection ends, on its reactor's.

use crate::log_limit::LogLimit;
use crate::spec::NbdLimits;
use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use tokio::task::AbortHandle;

/// Bits of an IPv6 address that stand for one peer: what a site gives to one network, of which a host has all addresses.
const IPV6_PREFIX: u32 = 64;

/// The client's side of a connection, as far as limits tell clients apart.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(super) enum Peer {
    /// A host: its IPv4 address, or the network of its IPv6 address.
    Host(IpAddr),
    /// A user of this machine, on a Unix socket.
    User(u32),
    /// The operating system does not say.
    Unknown,
}

impl Peer {
    /// The peer of an address.
    pub(super) fn of(address: IpAddr) -> Peer {
        Peer::Host(match address.to_canonical() {
            IpAddr::V6(v6) => Ipv6Addr::from_bits(v6.to_bits() & u128::MAX << (128 - IPV6_PREFIX)).into(),
            v4 => v4,
        })
    }
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Peer::Host(address @ IpAddr::V6(_)) => write!(f, "{address}/{IPV6_PREFIX}"),
            Peer::Host(address) => write!(f, "{address}"),
            Peer::User(uid) => write!(f, "user {uid}"),
            Peer::Unknown => f.write_str("an unknown peer"),
        }
    }
}

/// What connections are counted by.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum Key {
    Peer(Peer),
    /// A device, by its number.
    Device(usize),
}

/// The connections of a process, counted.
#[derive(Default)]
pub(crate) struct Crowd {
    limits: NbdLimits,
    counts: Mutex<HashMap<Key, u32>>,
    said: LogLimit,
}

impl Crowd {
    pub(crate) fn new(limits: NbdLimits) -> Crowd {
        Crowd { limits, ..Crowd::default() }
    }

    pub(crate) fn limits(&self) -> &NbdLimits {
        &self.limits
    }

    /// Why `peer` may not connect to a device now; none: it may.
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

    /// Take a place for a connection of `peer` to a device. `None`: there is none left.
    pub(super) fn enter(self: &Arc<Self>, peer: Peer, device: usize) -> Option<Place> {
        if self.refusal(peer, device).is_some() {
            return None;
        }
        let keys = [Key::Peer(peer), Key::Device(device)];
        let mut counts = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        keys.iter().for_each(|key| *counts.entry(*key).or_default() += 1);
        Some(Place { crowd: self.clone(), keys })
    }

    /// Whether a refusal is to be logged now, and how many there were since the last line.
    pub(super) fn say(&self) -> Option<u64> {
        self.said.say()
    }
}

/// One connection's place, until this is dropped.
pub(super) struct Place {
    crowd: Arc<Crowd>,
    keys: [Key; 2],
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut counts = self.crowd.counts.lock().unwrap_or_else(PoisonError::into_inner);
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

/// A handshake under way.
struct Shaking {
    /// The peer, and the process where that is known.
    peer: (Peer, i32),
    /// The client has sent something.
    spoke: Arc<AtomicBool>,
    task: AbortHandle,
}

/// The handshakes of one listening socket, oldest first.
pub(super) struct Handshakes {
    max: usize,
    list: VecDeque<Shaking>,
    dropped: Arc<AtomicU64>,
    said: LogLimit,
}

impl Handshakes {
    /// At most `max` at a time. Those that are ended for others are counted in `dropped`.
    pub(super) fn new(max: usize, dropped: Arc<AtomicU64>) -> Handshakes {
        Handshakes { max, list: VecDeque::new(), dropped, said: LogLimit::default() }
    }

    pub(super) fn add(&mut self, peer: (Peer, i32), spoke: Arc<AtomicBool>, task: AbortHandle) {
        self.list.push_back(Shaking { peer, spoke, task });
    }

    /// Whether another one may begin.
    pub(super) fn has_room(&mut self) -> bool {
        if self.list.len() >= self.max {
            self.list.retain(|shaking| !shaking.task.is_finished());
        }
        self.list.len() < self.max
    }

    /// End the oldest handshake of the peer that has most of them, if there is one in which the client has said nothing
    /// yet; with `any`, also another. Whether one was ended.
    pub(super) fn end_one(&mut self, any: bool) -> bool {
        let mut by_peer: HashMap<(Peer, i32), usize> = HashMap::new();
        for shaking in &self.list {
            *by_peer.entry(shaking.peer).or_default() += 1;
        }
        let Some((crowded, _)) = by_peer.into_iter().max_by_key(|(_, count)| *count) else { return false };
        let mut of_peer = self.list.iter().enumerate().filter(|(_, shaking)| shaking.peer == crowded);
        let silent = of_peer.clone().find(|(_, shaking)| !shaking.spoke.load(Relaxed));
        let Some((position, _)) = silent.or_else(|| if any { of_peer.next() } else { None }) else {
            return false;
        };
        if let Some(shaking) = self.list.remove(position) {
            shaking.task.abort();
            self.dropped.fetch_add(1, Relaxed);
            if let Some(count) = self.said.say() {
                tracing::warn!(
                    "{count} handshakes were ended, the last of {}, as {} are under way (is it an attack, or a broken client?)",
                    crowded.0,
                    self.max
                );
            }
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_counted_by_peer_and_by_device() {
        let limits = NbdLimits { connections: 3, per_peer: 2, ..NbdLimits::default() };
        let crowd = Arc::new(Crowd::new(limits));
        let (one, two) = (Peer::of([10, 0, 0, 1].into()), Peer::User(1000));
        let places: Vec<_> = (0..2).map(|_| crowd.enter(one, 7).expect("there is room")).collect();
        assert!(crowd.refusal(one, 8).is_some_and(|why| why.contains("per-peer")), "at any device");
        let other = crowd.enter(two, 7).expect("there is room");
        assert!(crowd.refusal(two, 7).is_some_and(|why| why.contains("the export")));
        assert!(crowd.enter(two, 8).is_some());
        drop(places);
        assert!(crowd.enter(one, 7).is_some());
        drop(other);
        assert!(crowd.counts.lock().unwrap().is_empty());
    }

    #[test]
    fn addresses_of_one_ipv6_network_are_one_peer_and_mapped_ones_are_ipv4() {
        let peer = |text: &str| Peer::of(text.parse().unwrap());
        assert_eq!(peer("2001:db8:1:2::1"), peer("2001:db8:1:2:ffff::9"));
        assert_ne!(peer("2001:db8:1:2::1"), peer("2001:db8:1:3::1"));
        assert_eq!(peer("::ffff:10.1.2.3"), peer("10.1.2.3"));
        assert_eq!(peer("2001:db8:1:2::1").to_string(), "2001:db8:1:2::/64");
    }

    #[tokio::test]
    async fn silent_handshakes_of_the_peer_with_most_go_first() {
        let mut handshakes = Handshakes::new(4, Arc::default());
        let (crowd, honest) = ((Peer::User(1), 5), (Peer::User(1), 6));
        let mut tasks = Vec::new();
        for (peer, spoke) in [(honest, false), (crowd, true), (crowd, false), (crowd, false)] {
            assert!(handshakes.has_room());
            let task = tokio::spawn(std::future::pending::<()>());
            handshakes.add(peer, Arc::new(AtomicBool::new(spoke)), task.abort_handle());
            tasks.push(task);
        }
        assert!(!handshakes.has_room());
        assert!(handshakes.end_one(false));
        assert!((&mut tasks[2]).await.unwrap_err().is_cancelled());
        assert!(handshakes.has_room());
        assert!(handshakes.end_one(false));
        // One each is left: the one that said nothing goes, and then only if need be one that did.
        assert!(handshakes.end_one(true));
        assert_eq!(handshakes.dropped.load(Relaxed), 3);
    }
}
