//! Descriptions of a device, an export and a queue: the JSON of `show`.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::pin::Pin;

/// A future that may move between threads.
pub type BoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// A device, as `show` describes it.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct DeviceInfo {
    /// Name.
    pub name: String,
    /// The backend, as it would be typed.
    pub stack: String,
    /// The layers above it, bottom first, as they would be typed.
    pub layers: Vec<String>,
    /// Size in bytes.
    pub size: u64,
    /// Logical block size in bytes.
    pub logical_block_size: u32,
    /// Whether writes are refused.
    pub read_only: bool,
    /// Queue limits under the kernel's names.
    pub limits: BTreeMap<String, u64>,
    /// Exports of the device.
    pub exports: Vec<ExportInfo>,
    /// Facts about the backend: whether it uses direct I/O, its file system, ….
    pub backend: BTreeMap<String, String>,
    /// Hardware queues of the device.
    pub queues: Vec<QueueInfo>,
    /// Process ID of its server.
    pub pid: u32,
    /// Time since it was added, in milliseconds.
    pub uptime_ms: u64,
}

/// An export of a device.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct ExportInfo {
    /// `nbd`, `ublk`, ….
    pub kind: String,
    /// URI or path for clients.
    pub address: String,
    /// Number of connected clients.
    pub connections: u64,
    /// `off`, `on`, `require`.
    pub tls: String,
    /// Further facts, by name.
    #[serde(default)]
    pub details: BTreeMap<String, String>,
    /// Further numbers, by name, for the metrics.
    #[serde(default)]
    pub counts: BTreeMap<String, u64>,
    /// Sessions of clients, where the protocol has them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub sessions: Vec<ClientSession>,
}

/// A session of a client: an iSCSI session that sees the device.
#[derive(Clone, Default, PartialEq, Debug, Serialize, Deserialize)]
#[serde(default)]
pub struct ClientSession {
    /// Number of the session (TSIH).
    pub number: u16,
    /// Name of the initiator.
    pub initiator: String,
    /// Name that the initiator gave its session (ISID).
    pub isid: String,
    /// Name of the target.
    pub target: String,
    /// Tag of its portal group.
    pub portal_group: u16,
    /// Name by which the initiator authenticated itself; empty: without CHAP.
    pub user: String,
    /// `none`, `header`, `data` or `header,data`.
    pub digests: String,
    /// Connections of the session.
    pub connections: Vec<ClientConnection>,
    /// Whether the initiator holds the reservation of the device.
    pub has_reservation: bool,
    /// Whether the initiator is registered for persistent reservations.
    pub is_registered: bool,
    /// Counters, by name.
    pub counts: BTreeMap<String, u64>,
}

/// A connection of a session.
#[derive(Clone, Default, PartialEq, Debug, Serialize, Deserialize)]
#[serde(default)]
pub struct ClientConnection {
    /// Number of the connection (CID).
    pub cid: u16,
    /// The initiator's address.
    pub peer: String,
    /// The portal that it connected to.
    pub portal: String,
    /// The local address of the connection.
    pub local: String,
}

/// A hardware queue.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct QueueInfo {
    /// Number of its reactor.
    pub reactor: u16,
    /// I/O engine of the reactor: `io_uring` or `epoll`.
    pub engine: String,
    /// Why the preferred engine is not used; `None` if it is.
    pub why: Option<String>,
    /// Queue depth: most requests in flight.
    pub depth: u16,
    /// Requests in flight now.
    pub in_flight: u64,
}
