//! Peers of listeners, and which of their handshakes are dropped when there are too many.
//!
//! A listener of NBD or iSCSI owns its [`Handshakes`], on the control plane's thread.

use engine::log_limit::LogLimit;
use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::Duration;
use tokio::task::AbortHandle;

/// Most concurrent handshakes on one socket, unless a quarter of the process's descriptor limit is less. At
/// 2,500 new connections a second from one peer, a client may be silent for 1.6 s.
const HANDSHAKES_MAX: usize = 4096;
/// How long accept waits for a handshake to end when the limit is reached and all clients have sent
/// something.
const FULL_PAUSE: Duration = Duration::from_millis(50);
/// Prefix length that stands for one IPv6 peer: what a site assigns to one network, of which a host may use
/// all addresses.
const IPV6_PREFIX: u32 = 64;

/// A client, as far as limits distinguish clients.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) enum Peer {
    /// A host: its IPv4 address, or the network of its IPv6 address.
    Host(IpAddr),
    /// A user of this machine, on a Unix socket: the UID.
    User(u32),
    /// The operating system does not report the peer.
    Unknown,
}

impl Peer {
    /// Returns the peer of an IP address.
    pub(crate) fn of(address: IpAddr) -> Peer {
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

/// A handshake in progress.
struct InProgress {
    /// The peer, and its process ID, 0 if that is not known.
    peer: (Peer, i32),
    /// Whether the client has sent something.
    spoke: Arc<AtomicBool>,
    task: AbortHandle,
}

/// The handshakes of one listening socket, oldest first.
pub(crate) struct Handshakes {
    /// The protocol, for messages: `NBD`.
    protocol: &'static str,
    max: usize,
    list: VecDeque<InProgress>,
    dropped: Arc<AtomicU64>,
    log: LogLimit,
}

impl Handshakes {
    /// Allows `max` at a time; handshakes that are dropped for others are counted in `dropped`.
    pub(crate) fn new(protocol: &'static str, max: usize, dropped: Arc<AtomicU64>) -> Handshakes {
        Handshakes { protocol, max, list: VecDeque::new(), dropped, log: LogLimit::default() }
    }

    pub(crate) fn add(&mut self, peer: (Peer, i32), spoke: Arc<AtomicBool>, task: AbortHandle) {
        self.list.push_back(InProgress { peer, spoke, task });
    }

    /// Whether another handshake may begin.
    pub(crate) fn has_room(&mut self) -> bool {
        if self.list.len() >= self.max {
            self.list.retain(|handshake| !handshake.task.is_finished());
        }
        self.list.len() < self.max
    }

    /// Drops the oldest handshake of the peer that has the most, if its client has sent nothing yet; with
    /// `any`, any other of that peer, too. Returns whether one was dropped.
    pub(crate) fn drop_one(&mut self, any: bool) -> bool {
        let mut by_peer: HashMap<(Peer, i32), usize> = HashMap::new();
        for handshake in &self.list {
            *by_peer.entry(handshake.peer).or_default() += 1;
        }
        let Some((busiest, _)) = by_peer.into_iter().max_by_key(|(_, count)| *count) else { return false };
        let mut of_peer = self.list.iter().enumerate().filter(|(_, handshake)| handshake.peer == busiest);
        let silent = of_peer.clone().find(|(_, handshake)| !handshake.spoke.load(Relaxed));
        let Some((position, _)) = silent.or_else(|| if any { of_peer.next() } else { None }) else {
            return false;
        };
        if let Some(handshake) = self.list.remove(position) {
            handshake.task.abort();
            self.dropped.fetch_add(1, Relaxed);
            if let Some(count) = self.log.admit_now() {
                tracing::warn!(
                    "{count} {} handshakes were dropped, the last one of {}: {} are in progress (an attack, or a broken client?)",
                    self.protocol,
                    busiest.0,
                    self.max
                );
            }
        }
        true
    }
}

/// Returns the largest number of concurrent handshakes on one socket.
pub(crate) fn handshakes_max() -> usize {
    let descriptors = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
    descriptors.map_or(HANDSHAKES_MAX, |most| HANDSHAKES_MAX.min(most as usize / 4).max(16))
}

/// Waits until another handshake may begin. Silent clients are dropped at once, others one per pause, so that
/// slow clients can finish first.
pub(crate) async fn make_room(handshakes: &mut Handshakes) {
    while !handshakes.has_room() {
        if !handshakes.drop_one(false) {
            tokio::time::sleep(FULL_PAUSE).await;
            if !handshakes.has_room() {
                handshakes.drop_one(true);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_of_one_ipv6_network_are_one_peer_and_mapped_ones_are_ipv4() {
        let peer = |text: &str| Peer::of(text.parse().unwrap());
        assert_eq!(peer("2001:db8:1:2::1"), peer("2001:db8:1:2:ffff::9"));
        assert_ne!(peer("2001:db8:1:2::1"), peer("2001:db8:1:3::1"));
        assert_eq!(peer("::ffff:10.1.2.3"), peer("10.1.2.3"));
        assert_eq!(peer("2001:db8:1:2::1").to_string(), "2001:db8:1:2::/64");
    }

    #[tokio::test]
    async fn silent_handshakes_of_the_peer_with_most_are_dropped_first() {
        let mut handshakes = Handshakes::new("NBD", 4, Arc::default());
        let (limits, honest) = ((Peer::User(1), 5), (Peer::User(1), 6));
        let mut tasks = Vec::new();
        for (peer, spoke) in [(honest, false), (limits, true), (limits, false), (limits, false)] {
            assert!(handshakes.has_room());
            let task = tokio::spawn(std::future::pending::<()>());
            handshakes.add(peer, Arc::new(AtomicBool::new(spoke)), task.abort_handle());
            tasks.push(task);
        }
        assert!(!handshakes.has_room());
        assert!(handshakes.drop_one(false));
        assert!((&mut tasks[2]).await.unwrap_err().is_cancelled());
        assert!(handshakes.has_room());
        assert!(handshakes.drop_one(false));
        // One of each peer is left: the silent one is dropped first, one that has sent something only with
        // `any`.
        assert!(handshakes.drop_one(true));
        assert_eq!(handshakes.dropped.load(Relaxed), 3);
    }
}
