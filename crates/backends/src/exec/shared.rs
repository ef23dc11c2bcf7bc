//! State that all queues of an `exec:` device share: the disk's properties, timeouts, and counters.
//!
//! The first start of the program determines the properties of the device for its lifetime. A restarted
//! program has to preserve them; otherwise it is refused before a node gets a connection to it.

use super::node::{ExecNode, Memory};
use crate::nbd::{Connector, NbdError, ServerTimeouts};
use crate::{Backend, CLEAR_MAX, Fact, base_limits};
use block::{Abilities, Bytes, Features as Limits, LimitsError, QueueLimits, Sectors};
use proto::exec::{Features, Hello, Ready};
use queue::QueueWaker;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

/// Longest data of a request in bytes: as common devices accept it (`max_sectors_kb` 1024).
pub const SLOT_LEN: u32 = 1 << 20;
/// Maximum number of requests in flight on a connection: as for common null_blk and NVMe queues.
pub const SLOTS: u32 = 64;

/// Reasons why a program cannot be used, or is not compatible with its predecessor.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum ExecError {
    /// The block sizes are not valid for a device.
    #[error("its limits cannot be kept: {0}")]
    Limits(#[from] LimitsError),
    /// The program's disk is smaller than the device.
    #[error("its disk has shrunk from {was} to {is} bytes")]
    Shrunk {
        /// Size of the device.
        was: u64,
        /// Size of the disk.
        is: u64,
    },
    /// The program lacks a property of the device.
    #[error("it has changed: {0}")]
    Changed(&'static str),
}

/// Options of an `exec:` backend.
#[derive(Clone, Debug)]
pub struct ExecSpec {
    /// The command line, for messages.
    pub command: String,
    /// Timeouts.
    pub timeouts: ServerTimeouts,
    /// Whether to fail writes even if the program allows them.
    pub read_only: bool,
}

/// Counters of a device.
#[derive(Default, Debug)]
pub(super) struct Counts {
    pub(super) connected: AtomicU32,
    pub(super) lost: AtomicU64,
    pub(super) replayed: AtomicU64,
    pub(super) failed: AtomicU64,
    /// Whether a node has the only connection that the program supports.
    taken: AtomicBool,
}

/// State that the nodes read.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) ready: Ready,
    pub(super) read_only: bool,
    pub(super) timeouts: ServerTimeouts,
    pub(super) counts: Counts,
}

impl Shared {
    pub(super) fn has(&self, feature: Features) -> bool {
        self.ready.features.contains(feature)
    }

    /// Claims a connection for a node. Returns `false` if the program supports only one, and another node
    /// has it.
    pub(super) fn claim(&self) -> bool {
        self.has(Features::MULTI) || !self.counts.taken.swap(true, Relaxed)
    }

    /// Releases a claim.
    pub(super) fn leave(&self) {
        self.counts.taken.store(false, Relaxed);
    }
}

/// The part of an `exec:` device that all queues share.
#[derive(Debug)]
pub struct Exec {
    spec: ExecSpec,
    shared: Arc<Shared>,
    limits: QueueLimits,
}

impl Exec {
    /// Returns the hello for the program.
    pub fn hello(spec: &ExecSpec) -> Hello {
        Hello { transfer_max: SLOT_LEN, depth_max: SLOTS, read_only: spec.read_only }
    }

    /// Creates a device with the properties that the program reported.
    ///
    /// # Errors
    /// The properties are not usable for a device.
    pub fn new(spec: ExecSpec, ready: Ready) -> Result<Exec, ExecError> {
        let read_only = spec.read_only || ready.features.contains(Features::READ_ONLY);
        let counts = Counts::default();
        let shared = Shared { ready, read_only, timeouts: spec.timeouts, counts };
        let limits = limits(&shared)?;
        Ok(Exec { spec, shared: Arc::new(shared), limits })
    }

    /// Checks that the answer of a restarted program still has all properties of the device.
    ///
    /// # Errors
    /// The property that the program lacks.
    pub fn admits(first: &Ready, now: &Ready, read_only: bool) -> Result<(), ExecError> {
        if now.size < first.size {
            return Err(ExecError::Shrunk { was: first.size, is: now.size });
        }
        let is_lost = |feature| first.features.contains(feature) && !now.features.contains(feature);
        let changes = [
            (
                !read_only
                    && !first.features.contains(Features::READ_ONLY)
                    && now.features.contains(Features::READ_ONLY),
                "it cannot be written any more",
            ),
            (is_lost(Features::FUA), "it cannot write through any more"),
            (is_lost(Features::DISCARD), "it cannot discard any more"),
            (is_lost(Features::WRITE_ZEROES), "it cannot write zeroes any more"),
            (is_lost(Features::MULTI), "it does not take several connections any more"),
            // A device without a volatile cache gets no flushes.
            (
                now.features.contains(Features::FLUSH) && !first.features.contains(Features::FLUSH),
                "its writes are volatile now",
            ),
            (is_lost(Features::FLUSH), "it cannot flush any more"),
            (now.block > first.block, "its block has grown"),
            (now.transfer_max < first.transfer_max, "it takes less in one request"),
        ];
        changes.iter().find(|(is, _)| *is).map_or(Ok(()), |(_, what)| Err(ExecError::Changed(what)))
    }

    /// Creates the node of one hardware queue. `memory` is the connection's shared memory. `waker` wakes
    /// that queue. `connector` passes connections that use this memory to the node.
    ///
    /// # Errors
    /// The program supports only one connection, and another node has it.
    pub fn node<S>(
        &self,
        memory: Memory,
        waker: QueueWaker,
        connector: Arc<dyn Connector<S, ()>>,
    ) -> Result<ExecNode<S>, NbdError> {
        if !self.shared.claim() {
            return Err(NbdError::Single);
        }
        Ok(ExecNode::new(self.shared.clone(), memory, connector, waker))
    }

    /// Returns the command line.
    pub fn command(&self) -> &str {
        &self.spec.command
    }

    /// Returns whether all queues share one connection, so that there can be only one queue.
    pub fn is_single(&self) -> bool {
        !self.shared.has(Features::MULTI)
    }

    /// Returns whether ranges of any length are possible.
    pub fn is_bytewise(&self) -> bool {
        self.shared.ready.block == 1
    }
}

fn limits(shared: &Shared) -> Result<QueueLimits, LimitsError> {
    let can = |feature| shared.has(feature) && !shared.read_only;
    let with = |features: Limits, is: bool, more| if is { features.union(more) } else { features };
    let features = with(Limits::empty(), can(Features::FLUSH), Limits::WRITE_CACHE);
    let features = with(features, can(Features::FUA), Limits::FUA);
    let features = with(features, shared.has(Features::ROTATIONAL), Limits::ROTATIONAL);
    let block = Bytes(u64::from(shared.ready.block.max(512)));
    let clear = |feature| if can(feature) { CLEAR_MAX } else { Sectors(0) };
    let mut limits = QueueLimits {
        features,
        logical_block_size: block,
        physical_block_size: block,
        max_hw_sectors: Bytes(u64::from(shared.ready.transfer_max)).sectors(),
        max_user_sectors: Bytes(u64::from(shared.ready.transfer_max)).sectors(),
        max_hw_discard_sectors: clear(Features::DISCARD),
        discard_granularity: block,
        max_write_zeroes_sectors: clear(Features::WRITE_ZEROES),
        max_hw_wzeroes_unmap_sectors: clear(Features::WRITE_ZEROES),
        ..base_limits()
    };
    limits.validate()?;
    Ok(limits)
}

impl Backend for Exec {
    fn size(&self) -> Bytes {
        Bytes(self.shared.ready.size)
    }

    fn read_only(&self) -> bool {
        self.shared.read_only
    }

    fn features(&self) -> Abilities {
        let can = |feature| self.shared.has(feature) && !self.shared.read_only;
        Abilities {
            flush: can(Features::FLUSH),
            // Without FUA a flush follows the write. Without flushes, too, written data is never volatile.
            fua: true,
            discard: can(Features::DISCARD),
            write_zeroes: can(Features::WRITE_ZEROES),
            fast_zero: false,
            rotational: self.shared.has(Features::ROTATIONAL),
        }
    }

    fn limits(&self) -> QueueLimits {
        self.limits.clone()
    }

    fn describe(&self) -> Vec<Fact> {
        let (ready, counts, timeouts) = (&self.shared.ready, &self.shared.counts, &self.spec.timeouts);
        let time = |time: Duration| format!("{time:?}");
        let reconnect = timeouts.reconnect;
        vec![
            ("backend", "exec".to_owned()),
            ("command", self.spec.command.clone()),
            ("size", self.size().to_string()),
            ("read-only", if self.shared.read_only { "yes" } else { "no" }.to_owned()),
            ("block size", ready.block.to_string()),
            ("largest request", Bytes(u64::from(ready.transfer_max)).to_string()),
            ("several connections", if self.is_single() { "no: one queue" } else { "yes" }.to_owned()),
            ("connections", counts.connected.load(Relaxed).to_string()),
            ("connections lost", counts.lost.load(Relaxed).to_string()),
            ("requests replayed", counts.replayed.load(Relaxed).to_string()),
            ("requests given up", counts.failed.load(Relaxed).to_string()),
            ("timeout", timeouts.timeout.map_or("never".to_owned(), time)),
            ("reconnect", if reconnect.is_zero() { "off".to_owned() } else { time(reconnect) }),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ready(features: Features) -> Ready {
        Ready { features, size: 1 << 20, block: 512, transfer_max: 1 << 20, depth_max: 64 }
    }

    #[test]
    fn a_program_that_comes_back_with_less_is_refused() {
        let first = ready(Features::FLUSH.union(Features::DISCARD));
        assert_eq!(Exec::admits(&first, &Ready { size: 2 << 20, ..first }, false), Ok(()));
        for (now, why) in [
            (Ready { size: 4096, ..first }, ExecError::Shrunk { was: 1 << 20, is: 4096 }),
            (ready(Features::FLUSH), ExecError::Changed("it cannot discard any more")),
            (ready(Features::DISCARD), ExecError::Changed("it cannot flush any more")),
            (Ready { block: 4096, ..first }, ExecError::Changed("its block has grown")),
            (
                ready(first.features.union(Features::READ_ONLY)),
                ExecError::Changed("it cannot be written any more"),
            ),
        ] {
            assert_eq!(Exec::admits(&first, &now, false), Err(why));
        }
        let volatile = Exec::admits(&ready(Features::empty()), &ready(Features::FLUSH), false);
        assert_eq!(volatile, Err(ExecError::Changed("its writes are volatile now")));
    }

    #[test]
    fn a_disk_without_a_volatile_cache_needs_no_flush() {
        let timeouts = ServerTimeouts { timeout: None, reconnect: Duration::ZERO };
        let spec = ExecSpec { command: "./driver".to_owned(), timeouts, read_only: false };
        let exec = Exec::new(spec.clone(), ready(Features::empty())).unwrap();
        assert!(!exec.features().flush && !exec.features().discard && exec.features().fua);
        let exec = Exec::new(ExecSpec { read_only: true, ..spec }, ready(Features::all())).unwrap();
        assert!(exec.read_only() && !exec.features().discard && !exec.is_single());
    }
}
