//! The control plane: what one process tells about its devices, over HTTP on a Unix socket.
//!
//! ```text
//! GET    /version               who answers
//! GET    /devices               all devices
//! GET    /devices/NAME          one
//! GET    /devices/NAME/stats    what it counted
//! GET    /devices/NAME/inflight its requests that are under way
//! POST   /devices/NAME/trace    trace it: `TraceOptions` in, a stream of `trace::wire` frames out
//! PATCH  /devices/NAME          change it while it is served: a `Change`
//! POST   /devices/NAME/table   ask its table something, or change it: a `TableCall`
//! DELETE /devices/NAME          drain, flush and remove it; with ?force also while it is in use
//! GET    /metrics               all of it for Prometheus
//! ```
//!
//! Bodies are JSON; an error is `{"error": "why (what to do)"}` with 404, 409 or 500. [`Yard`] is the
//! seam: a host implements it, tests put a table in its place. Server and client run on a
//! single-threaded runtime, off the I/O path; every answer is a snapshot.

mod client;
mod metrics;
mod server;
mod stats;

pub use client::{ClientError, ControlClient, TraceStream};
pub use metrics::Exposition;
pub use server::serve;
pub use stats::{DeviceStats, Latency, LayerStats, OpStats, QueueFields, children, own_times};

use crate::change::Change;
use crate::glance::Glance;
use crate::slow::InFlightList;
use crate::tables::{TableAnswer, TableCall};
use crate::trace::TraceOptions;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::mpsc::Receiver;

/// What a device is made of and how it stands.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct DeviceInfo {
    /// Its name.
    pub name: String,
    /// The stack, as it would be typed.
    pub stack: String,
    /// The layers above it, upwards, as they would be typed.
    pub layers: Vec<String>,
    /// Its size in bytes.
    pub size: u64,
    /// Its logical block in bytes.
    pub logical_block_size: u32,
    /// Not to be written.
    pub read_only: bool,
    /// Its queue limits under the kernel's names.
    pub limits: BTreeMap<String, u64>,
    /// How it can be reached.
    pub exports: Vec<ExportInfo>,
    /// What the backend says about itself: whether it is direct, which file system, ….
    pub backend: BTreeMap<String, String>,
    /// Its hardware queues.
    pub queues: Vec<QueueInfo>,
    /// The process that serves it.
    pub pid: u32,
    /// How long it has been there, in milliseconds.
    pub uptime_ms: u64,
}

/// One way to reach a device.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct ExportInfo {
    /// `nbd`, `ublk`, ….
    pub kind: String,
    /// What a client is given: a URI or a path.
    pub address: String,
    /// How many clients are connected.
    pub connections: u64,
    /// `off`, `on`, `require`.
    pub tls: String,
    /// What else there is to say about it.
    #[serde(default)]
    pub details: BTreeMap<String, String>,
}

/// One hardware queue.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct QueueInfo {
    /// The number of its reactor thread.
    pub reactor: u16,
    /// How that talks to the kernel: `io_uring` or `epoll`.
    pub engine: String,
    /// Why, when it is not what would be best.
    pub why: Option<String>,
    /// Requests in flight, at most.
    pub depth: u16,
    /// Requests in flight now.
    pub in_flight: u64,
}

/// Who answers on a control socket.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Version {
    /// `blockyard`.
    pub name: String,
    /// Its version.
    pub version: String,
    /// Its process.
    pub pid: u32,
}

/// What a device counted, to be turned into [`DeviceStats`] or metrics.
#[derive(Clone, Default, Debug)]
pub struct Counted {
    /// How long the device has been there.
    pub uptime: Duration,
    /// By hardware queue, in the order of [`DeviceInfo::queues`].
    pub queues: Vec<queue::Snapshot>,
    /// Time with a request under way on any of them.
    pub busy_ns: u64,
    /// Requests that timed out.
    pub timeouts: u64,
    /// The nodes of its stack by number: how far down each is, from 0, and its name.
    pub nodes: Vec<(u8, &'static str)>,
    /// How often limits of NBD clients took effect, by name.
    pub limit_hits: Vec<(&'static str, u64)>,
}

impl Counted {
    /// All queues together.
    pub fn total(&self) -> queue::Snapshot {
        let mut total = queue::Snapshot::default();
        self.queues.iter().for_each(|queue| total.add(queue));
        total.busy_ns = self.busy_ns;
        total
    }
}

/// Why a control action was not done.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum ControlError {
    /// There is no such device here.
    #[error("there is no such device (blockyard list shows those there are)")]
    NotFound,
    /// It is under way already, or something else stands in its way for now.
    #[error("{0}")]
    Busy(String),
    /// It was tried.
    #[error("{0}")]
    Failed(String),
    /// The kernel's driver would refuse it, too.
    #[error("{why}")]
    Refused {
        /// With this errno, positive.
        errno: i32,
        /// Why.
        why: String,
    },
}

/// All that Prometheus asks for, as the control socket says it.
pub fn metrics(yard: Arc<dyn Yard>, form: Exposition) -> String {
    metrics::text(yard, form)
}

/// A future that may move between threads.
pub type BoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// The devices of one process, as its control socket shows them.
pub trait Yard: Send + Sync + 'static {
    /// All of them, in the order they were added.
    fn devices(&self) -> Vec<DeviceInfo>;

    /// One of them.
    fn device(&self, name: &str) -> Option<DeviceInfo> {
        self.devices().into_iter().find(|device| device.name == name)
    }

    /// Facts about one of them that take a while to find out, to be added to those of its backend.
    fn slow_facts<'a>(&'a self, name: &'a str) -> BoxFuture<'a, BTreeMap<String, String>> {
        let _ = name;
        Box::pin(async { BTreeMap::new() })
    }

    /// How many turns the loop of each reactor has taken.
    fn turns(&self) -> Vec<u64> {
        Vec::new()
    }

    /// What one of them counted up to now.
    fn counted(&self, name: &str) -> Option<Counted>;

    /// What is under way of one of them.
    fn in_flight<'a>(&'a self, name: &'a str) -> BoxFuture<'a, Result<InFlightList, ControlError>> {
        let _ = name;
        Box::pin(async { Err(ControlError::NotFound) })
    }

    /// Changes it while it is served.
    ///
    /// The future ends when that is done, or with why nothing has changed.
    fn change<'a>(&'a self, name: &'a str, change: Change) -> BoxFuture<'a, Result<(), ControlError>>;

    /// Traces it from now on: what happens to its requests, in [`trace::wire`] frames, until the trace ends or nobody
    /// takes them any more.
    ///
    /// # Errors
    /// It is being traced, or the options make no sense.
    fn trace(self: Arc<Self>, name: &str, options: TraceOptions) -> Result<Receiver<Vec<u8>>, ControlError>;

    /// Looks at where its requests go, for a picture. `None`: there is no such device, or somebody looks already.
    fn glance(self: Arc<Self>, name: &str) -> Option<Glance> {
        let _ = name;
        None
    }

    /// Asks its table something, or changes it.
    ///
    /// The future ends when that is done, or with why it was not.
    fn table<'a>(
        &'a self,
        name: &'a str,
        call: TableCall,
    ) -> BoxFuture<'a, Result<TableAnswer, ControlError>> {
        let _ = (name, call);
        Box::pin(async { Err(ControlError::Failed("its devices have no tables".to_owned())) })
    }

    /// Closes its exports, drains and flushes it, and removes it.
    ///
    /// The future ends when that is done, or with why it was not.
    fn delete<'a>(&'a self, name: &'a str) -> BoxFuture<'a, Result<(), ControlError>>;

    /// The same although somebody uses it, who is left with errors.
    fn delete_by_force<'a>(&'a self, name: &'a str) -> BoxFuture<'a, Result<(), ControlError>> {
        self.delete(name)
    }
}

#[cfg(test)]
mod tests;
