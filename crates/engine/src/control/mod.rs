//! The control API of a process: HTTP on a Unix socket.
//!
//! ```text
//! GET    /version               name, version, PID
//! GET    /devices               all devices
//! GET    /devices/NAME          one device
//! GET    /devices/NAME/stats    its counters
//! GET    /devices/NAME/inflight its requests in flight
//! POST   /devices/NAME/trace    trace it: `TraceOptions` in, a stream of `trace::wire` frames out
//! PATCH  /devices/NAME          change it while it is served: a `Change` or a `MoveRequest`
//! POST   /devices/NAME/table    query or change its table: a `TableCall`
//! DELETE /devices/NAME          drain, flush and remove it; with ?force also while it is in use
//! GET    /metrics               metrics for Prometheus
//! GET    /topology              what the process serves, as text of a topology: a `TopologyText`
//! POST   /targetcli             run a command line on LIO's tree; types of the crate `lio`
//! POST   /topology              bring it to what a topology says: an `ApplyRequest` in, an `ApplyAnswer` out
//! ```
//!
//! Bodies are JSON; an error is `{"error": "why (hint)"}` with status 404, 409, 422 or 500. [`HostView`] is
//! the interface to a host, which tests replace. Server and client run on a single-threaded runtime, off the
//! I/O path; every answer is a snapshot.

pub mod autosize;
mod client;
pub mod deleted;
pub mod inflight;
mod metrics;
mod partitions;
pub mod sample;
mod server;
mod stats;
mod trace;
mod view;

pub use crate::info::{BoxFuture, ClientConnection, ClientSession, DeviceInfo, ExportInfo, QueueInfo};
pub use client::{ClientError, ControlClient, TraceStream};
pub use metrics::Exposition;
pub use server::serve;
pub use stats::{DeviceStats, Latency, LayerStats, OpStats, QueueFields, children, own_times};

use crate::apply::{ApplyAnswer, ApplyRequest, TopologyText};
use crate::change::{Change, MoveRequest};
use crate::control::inflight::InFlightList;
use crate::observe::trace::TraceOptions;
use crate::tables::{TableAnswer, TableCall};
use sample::Sampling;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::mpsc::Receiver;

/// The process behind a control socket.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Version {
    /// `blockyard`.
    pub name: String,
    /// Version of the program.
    pub version: String,
    /// Process ID.
    pub pid: u32,
}

/// Counters of a device, from which [`DeviceStats`] and metrics are computed.
#[derive(Clone, Default, Debug)]
pub struct Counted {
    /// Time since the device was added.
    pub uptime: Duration,
    /// By hardware queue, in the order of [`DeviceInfo::queues`].
    pub queues: Vec<queue::Snapshot>,
    /// Time with a request in flight on any queue.
    pub busy_ns: u64,
    /// Number of requests that timed out.
    pub timeouts: u64,
    /// Nodes of its stack by number: depth from 0, and name.
    pub nodes: Vec<(u8, &'static str)>,
    /// Labels of those nodes: the path, URI or size of a backend, with its role (`origin`, `overlay`).
    pub labels: Vec<String>,
    /// How often limits of NBD clients took effect, by name.
    pub limit_hits: Vec<(&'static str, u64)>,
}

impl Counted {
    /// Returns the sum over all queues.
    pub fn total(&self) -> queue::Snapshot {
        let mut total = queue::Snapshot::default();
        self.queues.iter().for_each(|queue| total.add(queue));
        total.busy_ns = self.busy_ns;
        total
    }
}

/// Why a request was not executed.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum ControlError {
    /// The process has no such device.
    #[error("there is no such device (blockyard list shows all devices)")]
    NotFound,
    /// The operation is in progress already, or something else prevents it for now.
    #[error("{0}")]
    Busy(String),
    /// The operation failed.
    #[error("{0}")]
    Failed(String),
    /// The operation is refused, as the kernel's driver would.
    #[error("{why}")]
    Refused {
        /// The errno, positive.
        errno: i32,
        /// The reason.
        why: String,
    },
}

/// Encodes the metrics of all devices.
pub fn metrics(view: Arc<dyn HostView>, format: Exposition) -> String {
    metrics::text(view, format)
}

/// The devices of one process, as its control socket shows them.
pub trait HostView: Send + Sync + 'static {
    /// Describes all devices, in the order in which they were added.
    fn devices(&self) -> Vec<DeviceInfo>;

    /// Describes one device.
    fn device(&self, name: &str) -> Option<DeviceInfo> {
        self.devices().into_iter().find(|device| device.name == name)
    }

    /// Returns entries of a device's `backend` that need I/O to determine.
    fn slow_facts<'a>(&'a self, name: &'a str) -> BoxFuture<'a, BTreeMap<String, String>> {
        let _ = name;
        Box::pin(async { BTreeMap::new() })
    }

    /// Returns how many turns each reactor has taken.
    fn turns(&self) -> Vec<u64> {
        Vec::new()
    }

    /// Returns the counters of a device.
    fn counted(&self, name: &str) -> Option<Counted>;

    /// Lists the requests in flight of a device.
    fn in_flight<'a>(&'a self, name: &'a str) -> BoxFuture<'a, Result<InFlightList, ControlError>> {
        let _ = name;
        Box::pin(async { Err(ControlError::NotFound) })
    }

    /// Changes a device while it is served.
    ///
    /// The future resolves when that is done, or with an error if nothing has changed.
    fn change<'a>(&'a self, name: &'a str, change: Change) -> BoxFuture<'a, Result<(), ControlError>>;

    /// Moves the contents of a device and resolves when the move has ended, or cancels a move.
    fn move_contents<'a>(
        &'a self,
        name: &'a str,
        request: MoveRequest,
    ) -> BoxFuture<'a, Result<(), ControlError>> {
        let _ = (name, request);
        Box::pin(async { Err(ControlError::NotFound) })
    }

    /// Starts a trace of a device. Returns a stream of `trace::wire` frames, until the trace ends or the
    /// receiver is dropped.
    ///
    /// # Errors
    /// The device has a trace, or the options are malformed.
    fn trace(self: Arc<Self>, name: &str, options: TraceOptions) -> Result<Receiver<Vec<u8>>, ControlError>;

    /// Starts to sample a device's requests, for a chart. `None`: there is no such device, or it is sampled
    /// already.
    fn sample(self: Arc<Self>, name: &str) -> Option<Sampling> {
        let _ = name;
        None
    }

    /// Executes a call on a device's table.
    ///
    /// The future resolves when that is done or has failed.
    fn table<'a>(
        &'a self,
        name: &'a str,
        call: TableCall,
    ) -> BoxFuture<'a, Result<TableAnswer, ControlError>> {
        let _ = (name, call);
        Box::pin(async { Err(ControlError::Failed("its devices have no tables".to_owned())) })
    }

    /// Returns the devices that the process serves, as text of a topology.
    fn topology(&self) -> TopologyText {
        TopologyText::default()
    }

    /// Applies a topology to the process, or only plans it.
    ///
    /// The future resolves when the last action is done or has failed, as the answer reports, or with an
    /// error if no plan could be made.
    fn apply(&self, request: ApplyRequest) -> BoxFuture<'_, Result<ApplyAnswer, ControlError>> {
        let _ = request;
        let why = "this process cannot apply a topology".to_owned();
        Box::pin(async { Err(ControlError::Failed(why)) })
    }

    /// Runs a command line on the LIO tree of this process. The types are those of the crate `lio`.
    fn targetcli(
        self: Arc<Self>,
        call: serde_json::Value,
    ) -> BoxFuture<'static, Result<serde_json::Value, ControlError>> {
        drop(call);
        let why = "this process does not serve LIO's tree".to_owned();
        Box::pin(async { Err(ControlError::Failed(why)) })
    }

    /// Closes a device's exports, drains and flushes it, and removes it.
    ///
    /// The future resolves when that is done or has failed.
    fn delete<'a>(&'a self, name: &'a str) -> BoxFuture<'a, Result<(), ControlError>>;

    /// Removes a device although clients use it; they get errors.
    fn delete_by_force<'a>(&'a self, name: &'a str) -> BoxFuture<'a, Result<(), ControlError>> {
        self.delete(name)
    }
}

#[cfg(test)]
mod tests;
