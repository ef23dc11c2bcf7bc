//! State that all queues of an `nbd:` device share: the export's properties, timeouts, and counters.
//!
//! The first session determines the properties of the device for its lifetime. Every later session, of
//! another queue or after a loss, has to preserve them; otherwise it is refused before a node gets it.

use super::link::{Connected, Connector};
use super::node::NbdNode;
use crate::{Backend, CLEAR_MAX, Fact, REQUEST_MAX, base_limits};
use block::{Abilities, Bytes, Features, LimitsError, QueueLimits, Sectors};
use proto::nbd::{BlockSizes, Session, Style, TransmissionFlags};
use queue::QueueWaker;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// Reasons why an export cannot be used, or is not compatible with the device.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum NbdError {
    /// The export is smaller than a block.
    #[error("the export is smaller than one block of {block} bytes")]
    TooSmall {
        /// Block size of the device.
        block: u64,
    },
    /// The block sizes are not valid for a device.
    #[error("the server's block sizes cannot be kept: {0}")]
    Limits(#[from] LimitsError),
    /// The export is smaller than the device.
    #[error("the export has shrunk from {was} to {is} bytes")]
    Shrunk {
        /// Size of the device.
        was: u64,
        /// Size of the export.
        is: u64,
    },
    /// The export lacks a property of the device.
    #[error("the export has changed: {0}")]
    Changed(&'static str),
    /// The server supports only one connection, which is in use.
    #[error(
        "the server takes one connection at a time (no CAN_MULTI_CONN), and another queue of the device has it"
    )]
    Single,
}

/// Timeouts of a backend with connections.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ServerTimeouts {
    /// Time without any data from the server, while requests are unanswered, after which it is given up;
    /// `None`: never.
    pub timeout: Option<Duration>,
    /// Time for which requests wait for a new connection before they fail.
    pub reconnect: Duration,
}

/// Options of an NBD backend.
#[derive(Clone, Debug)]
pub struct NbdSpec {
    /// URI of the server's export, for messages.
    pub uri: String,
    /// Timeouts.
    pub timeouts: ServerTimeouts,
    /// Whether to fail writes even if the server allows them.
    pub read_only: bool,
}

/// Properties of the export, as the first session reported them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Export {
    /// Size in bytes, a whole number of blocks.
    pub size: u64,
    /// Whether writes fail.
    pub read_only: bool,
    /// Supported operations.
    pub flags: TransmissionFlags,
    /// Limits of requests.
    pub block_sizes: BlockSizes,
}

/// Properties that a later session must not lack.
const KEPT: [(TransmissionFlags, &str); 7] = [
    (TransmissionFlags::SEND_FLUSH, "it cannot flush any more"),
    (TransmissionFlags::SEND_FUA, "it cannot write through any more"),
    (TransmissionFlags::SEND_TRIM, "it cannot trim any more"),
    (TransmissionFlags::SEND_WRITE_ZEROES, "it cannot write zeroes any more"),
    (TransmissionFlags::SEND_FAST_ZERO, "it does not know fast zeroes any more"),
    (TransmissionFlags::SEND_CACHE, "it does not prefetch any more"),
    (TransmissionFlags::CAN_MULTI_CONN, "it does not take several connections any more"),
];

impl Export {
    /// Returns the properties of a session's export.
    ///
    /// # Errors
    /// The export is smaller than a block.
    pub fn new(session: &Session, read_only: bool) -> Result<Export, NbdError> {
        let block = u64::from(session.block_sizes.minimum.max(512));
        let size = session.size - session.size % block;
        if size == 0 || size > i64::MAX as u64 {
            return Err(NbdError::TooSmall { block });
        }
        let read_only = read_only || session.flags.contains(TransmissionFlags::READ_ONLY);
        Ok(Export { size, read_only, flags: session.flags, block_sizes: session.block_sizes })
    }

    /// Returns the assumed properties of an export that was never reached, as common servers offer them.
    pub fn assumed(size: Bytes, read_only: bool) -> Export {
        let flags = [
            TransmissionFlags::SEND_FLUSH,
            TransmissionFlags::SEND_FUA,
            TransmissionFlags::SEND_TRIM,
            TransmissionFlags::SEND_WRITE_ZEROES,
            TransmissionFlags::CAN_MULTI_CONN,
        ];
        let flags = flags.into_iter().fold(TransmissionFlags::HAS_FLAGS, TransmissionFlags::union);
        // Safe limits for a server that does not report block sizes.
        let block_sizes = BlockSizes { minimum: 512, preferred: 4096, maximum: REQUEST_MAX.0 as u32 };
        Export { size: size.0, read_only, flags, block_sizes }
    }

    /// Checks that another session's export still has all properties of the device.
    ///
    /// # Errors
    /// The property that the export lacks.
    pub fn admits(&self, session: &Session) -> Result<(), NbdError> {
        if session.size < self.size {
            return Err(NbdError::Shrunk { was: self.size, is: session.size });
        }
        if session.flags.contains(TransmissionFlags::READ_ONLY) && !self.read_only {
            return Err(NbdError::Changed("it cannot be written any more"));
        }
        let lost = KEPT.iter().find(|(flag, _)| self.flags.contains(*flag) && !session.flags.contains(*flag));
        if let Some((_, what)) = lost {
            return Err(NbdError::Changed(what));
        }
        if session.block_sizes.minimum > self.block_sizes.minimum {
            return Err(NbdError::Changed("its smallest block has grown"));
        }
        if self.payload_max() > payload_max(&session.block_sizes) {
            return Err(NbdError::Changed("it takes less in one request"));
        }
        Ok(())
    }

    fn payload_max(&self) -> u64 {
        payload_max(&self.block_sizes)
    }

    /// Returns whether every queue may have its own connection.
    pub fn is_multi(&self) -> bool {
        self.flags.contains(TransmissionFlags::CAN_MULTI_CONN)
    }

    fn limits(&self) -> Result<QueueLimits, LimitsError> {
        let can = |flag| self.flags.contains(flag) && !self.read_only;
        let features = Features::empty();
        let features =
            if can(TransmissionFlags::SEND_FLUSH) { features.union(Features::WRITE_CACHE) } else { features };
        let features =
            if can(TransmissionFlags::SEND_FUA) { features.union(Features::FUA) } else { features };
        let rotational = self.flags.contains(TransmissionFlags::ROTATIONAL);
        let features = if rotational { features.union(Features::ROTATIONAL) } else { features };
        let block = Bytes(u64::from(self.block_sizes.minimum.max(512)));
        // A preferred size of many megabytes is a hint for sequential readers, not the unit of a medium.
        let preferred = Bytes(u64::from(self.block_sizes.preferred.clamp(512, 65536)));
        let most = Bytes(self.payload_max()).sectors();
        let clear = |flag| if can(flag) { CLEAR_MAX } else { Sectors(0) };
        let mut limits = QueueLimits {
            features,
            logical_block_size: block,
            physical_block_size: block.max(preferred),
            max_hw_sectors: most,
            max_user_sectors: most,
            max_hw_discard_sectors: clear(TransmissionFlags::SEND_TRIM),
            discard_granularity: block.max(preferred),
            max_write_zeroes_sectors: clear(TransmissionFlags::SEND_WRITE_ZEROES),
            max_hw_wzeroes_unmap_sectors: clear(TransmissionFlags::SEND_WRITE_ZEROES),
            ..base_limits()
        };
        limits.validate()?;
        Ok(limits)
    }
}

/// Returns the longest data of one command in bytes: a whole number of the server's blocks, and at most a
/// ring's largest buffer.
pub(super) fn payload_max(sizes: &BlockSizes) -> u64 {
    let most = u64::from(sizes.maximum).min(REQUEST_MAX.0);
    most - most % u64::from(sizes.minimum.max(1))
}

/// Counters of a device.
#[derive(Default, Debug)]
pub(super) struct Counts {
    /// Number of current connections.
    pub(super) connected: AtomicU32,
    /// Number of lost connections.
    pub(super) lost: AtomicU64,
    /// Number of commands that were sent again.
    pub(super) replayed: AtomicU64,
    /// Reply style of the last session.
    pub(super) structured: AtomicU32,
    /// Whether a node has the only connection that the server supports.
    taken: AtomicBool,
}

/// State that the nodes read.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) export: Export,
    pub(super) timeouts: ServerTimeouts,
    pub(super) counts: Counts,
}

/// The part of an `nbd:` device that all queues share. `S` is the type of streams that the ring accepts.
pub struct Nbd<S> {
    spec: NbdSpec,
    shared: Arc<Shared>,
    limits: QueueLimits,
    connector: Arc<dyn Connector<S>>,
    /// The first connection, until a node takes it.
    first: Mutex<Option<Connected<S>>>,
    tls: bool,
}

impl<S> Nbd<S> {
    /// Creates a device on an export, with the first connection to it.
    ///
    /// # Errors
    /// The export is not usable as a device.
    pub fn new(
        spec: NbdSpec,
        first: Connected<S>,
        connector: Arc<dyn Connector<S>>,
    ) -> Result<Nbd<S>, NbdError> {
        let export = Export::new(&first.session, spec.read_only)?;
        let limits = export.limits()?;
        let shared = Shared { export, timeouts: spec.timeouts, counts: Counts::default() };
        shared.counts.structured.store(style_number(first.session.style), Relaxed);
        let tls = first.session.tls;
        Ok(Nbd { spec, shared: Arc::new(shared), limits, connector, first: Mutex::new(Some(first)), tls })
    }

    /// Creates a device on an export that cannot be reached yet, with assumed properties.
    ///
    /// # Errors
    /// The properties are not usable for a device.
    pub fn away(spec: NbdSpec, export: Export, connector: Arc<dyn Connector<S>>) -> Result<Nbd<S>, NbdError> {
        let limits = export.limits()?;
        let shared = Shared { export, timeouts: spec.timeouts, counts: Counts::default() };
        Ok(Nbd { spec, shared: Arc::new(shared), limits, connector, first: Mutex::default(), tls: false })
    }

    /// Returns the properties of the first session, for checking later ones.
    pub fn export(&self) -> &Export {
        &self.shared.export
    }

    /// Creates the node of one hardware queue. `waker` wakes that queue.
    ///
    /// # Errors
    /// The server supports only one connection, and another node has it.
    pub fn node(&self, waker: QueueWaker) -> Result<NbdNode<S>, NbdError> {
        if !self.shared.claim() {
            return Err(NbdError::Single);
        }
        Ok(NbdNode::new(self.shared.clone(), self.connector.clone(), waker, self.take_first()))
    }

    /// Takes the first connection, if no node has taken it, so that it can be closed.
    pub fn take_first(&self) -> Option<Connected<S>> {
        self.first.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// Returns the URI of the server's export.
    pub fn uri(&self) -> &str {
        &self.spec.uri
    }

    /// Returns whether all queues share one connection, so that there can be only one queue.
    pub fn is_single(&self) -> bool {
        !self.export().is_multi()
    }
}

impl Shared {
    /// Claims a connection for a node. Returns `false` if the server supports only one, and another node
    /// has it.
    pub(super) fn claim(&self) -> bool {
        self.export.is_multi() || !self.counts.taken.swap(true, Relaxed)
    }

    /// Releases a claim.
    pub(super) fn leave(&self) {
        self.counts.taken.store(false, Relaxed);
    }
}

pub(super) fn style_number(style: Style) -> u32 {
    match style {
        Style::Simple => 0,
        Style::Structured => 1,
        Style::Extended => 2,
    }
}

impl<S: Send> Backend for Nbd<S> {
    fn size(&self) -> Bytes {
        Bytes(self.export().size)
    }

    fn read_only(&self) -> bool {
        self.export().read_only
    }

    fn features(&self) -> Abilities {
        let Export { flags, read_only, .. } = *self.export();
        let can = |flag| flags.contains(flag) && !read_only;
        let flush = can(TransmissionFlags::SEND_FLUSH);
        Abilities {
            flush,
            // Without FUA a flush follows the write. Without flushes, too, written data is never volatile.
            fua: true,
            discard: can(TransmissionFlags::SEND_TRIM),
            write_zeroes: can(TransmissionFlags::SEND_WRITE_ZEROES),
            fast_zero: can(TransmissionFlags::SEND_FAST_ZERO),
            rotational: flags.contains(TransmissionFlags::ROTATIONAL),
        }
    }

    fn limits(&self) -> QueueLimits {
        self.limits.clone()
    }

    fn describe(&self) -> Vec<Fact> {
        let Export { size, read_only, block_sizes, .. } = *self.export();
        let (counts, timeouts) = (&self.shared.counts, &self.spec.timeouts);
        let replies = ["simple", "structured", "extended"][counts.structured.load(Relaxed).min(2) as usize];
        let timeout = timeouts.timeout.map_or("never".to_owned(), |time| format!("{time:?}"));
        let reconnect = match timeouts.reconnect {
            Duration::ZERO => "off".to_owned(),
            time => format!("{time:?}"),
        };
        let BlockSizes { minimum, preferred, maximum } = block_sizes;
        let mut facts = vec![
            ("backend", "nbd".to_owned()),
            ("server", self.spec.uri.clone()),
            ("size", size.to_string()),
            ("read-only", if read_only { "yes" } else { "no" }.to_owned()),
            ("block sizes", format!("{minimum} {preferred} {maximum}")),
            ("replies", replies.to_owned()),
            ("tls", if self.tls { "yes" } else { "no" }.to_owned()),
            ("multi-conn", if self.is_single() { "no: one queue" } else { "yes" }.to_owned()),
            ("connections", counts.connected.load(Relaxed).to_string()),
            ("connections lost", counts.lost.load(Relaxed).to_string()),
            ("requests replayed", counts.replayed.load(Relaxed).to_string()),
            ("timeout", timeout),
            ("reconnect", reconnect),
        ];
        facts.extend(self.connector.describe());
        facts
    }
}
