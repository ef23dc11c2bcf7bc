//! What all queues of an `nbd:` device share: what the export is, how long is waited, and what has happened.
//!
//! The first session settles what the device is for as long as it lives; every later one, of another queue or after a
//! loss, must keep that, or it is refused before a node sees it.

use super::link::{Connected, Connector, Nudge};
use super::node::NbdNode;
use crate::{Backend, CLEAR_MAX, Fact, REQUEST_MAX, base_limits};
use block::{Abilities, Bytes, Features, LimitsError, QueueLimits, Sectors};
use proto::nbd::{BlockSizes, Session, Style, TransmissionFlags};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// Why an export cannot be used, or is not the one that it was.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum NbdError {
    /// Nothing fits into it.
    #[error("the export is smaller than one block of {block} bytes")]
    TooSmall {
        /// The device's block.
        block: u64,
    },
    /// Its block sizes are none that a device can have.
    #[error("the server's block sizes cannot be kept: {0}")]
    Limits(#[from] LimitsError),
    /// It holds less than the device.
    #[error("the export has shrunk from {was} to {is} bytes")]
    Shrunk {
        /// What the device needs.
        was: u64,
        /// What there is.
        is: u64,
    },
    /// It can no longer do what the device was said to do.
    #[error("the export has changed: {0}")]
    Changed(&'static str),
    /// It may have one connection, and has it.
    #[error(
        "the server takes one connection at a time (no CAN_MULTI_CONN), and another queue of the device has it"
    )]
    Single,
}

/// How long is waited.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Patience {
    /// A server that leaves requests unanswered and says nothing for so long is given up; `None`: never.
    pub timeout: Option<Duration>,
    /// How long requests wait for another connection before they fail.
    pub reconnect: Duration,
}

/// What is asked for.
#[derive(Clone, Debug)]
pub struct NbdSpec {
    /// Where, for people.
    pub uri: String,
    /// How long is waited.
    pub patience: Patience,
    /// Nothing is to be written, whatever the server allows.
    pub read_only: bool,
}

/// What the first session settled.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Export {
    /// Bytes, a whole number of blocks.
    pub size: u64,
    /// Nothing may be written.
    pub read_only: bool,
    /// What it can do.
    pub flags: TransmissionFlags,
    /// What requests keep to.
    pub block_sizes: BlockSizes,
}

/// What a device relies on once it was told that it may.
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
    /// What a session says.
    ///
    /// # Errors
    /// It holds nothing.
    pub fn new(session: &Session, read_only: bool) -> Result<Export, NbdError> {
        let block = u64::from(session.block_sizes.minimum.max(512));
        let size = session.size - session.size % block;
        if size == 0 || size > i64::MAX as u64 {
            return Err(NbdError::TooSmall { block });
        }
        let read_only = read_only || session.flags.has(TransmissionFlags::READ_ONLY);
        Ok(Export { size, read_only, flags: session.flags, block_sizes: session.block_sizes })
    }

    /// What an export is taken to be that nobody has seen yet: what common servers offer.
    pub fn assumed(size: Bytes, read_only: bool) -> Export {
        let flags = [
            TransmissionFlags::SEND_FLUSH,
            TransmissionFlags::SEND_FUA,
            TransmissionFlags::SEND_TRIM,
            TransmissionFlags::SEND_WRITE_ZEROES,
            TransmissionFlags::CAN_MULTI_CONN,
        ];
        let flags = flags.into_iter().fold(TransmissionFlags::HAS_FLAGS, TransmissionFlags::with);
        // What a server that says nothing of block sizes can be asked for.
        let block_sizes = BlockSizes { minimum: 512, preferred: 4096, maximum: REQUEST_MAX.0 as u32 };
        Export { size: size.0, read_only, flags, block_sizes }
    }

    /// Whether another session is about the same: nothing that the device was said to be is lost.
    ///
    /// # Errors
    /// What is lost.
    pub fn admits(&self, session: &Session) -> Result<(), NbdError> {
        if session.size < self.size {
            return Err(NbdError::Shrunk { was: self.size, is: session.size });
        }
        if session.flags.has(TransmissionFlags::READ_ONLY) && !self.read_only {
            return Err(NbdError::Changed("it cannot be written any more"));
        }
        let lost = KEPT.iter().find(|(flag, _)| self.flags.has(*flag) && !session.flags.has(*flag));
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

    /// Whether every queue may have a connection of its own.
    pub fn is_multi(&self) -> bool {
        self.flags.has(TransmissionFlags::CAN_MULTI_CONN)
    }

    fn limits(&self) -> Result<QueueLimits, LimitsError> {
        let can = |flag| self.flags.has(flag) && !self.read_only;
        let features = Features::NONE;
        let features =
            if can(TransmissionFlags::SEND_FLUSH) { features.with(Features::WRITE_CACHE) } else { features };
        let features = if can(TransmissionFlags::SEND_FUA) { features.with(Features::FUA) } else { features };
        let rotational = self.flags.has(TransmissionFlags::ROTATIONAL);
        let features = if rotational { features.with(Features::ROTATIONAL) } else { features };
        let block = Bytes(u64::from(self.block_sizes.minimum.max(512)));
        // A hint of many megabytes is one for readers of whole files, not the unit of a medium.
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

/// The most data of one command: a whole number of the server's blocks, and no more than a ring has in one piece.
pub(super) fn payload_max(sizes: &BlockSizes) -> u64 {
    let most = u64::from(sizes.maximum).min(REQUEST_MAX.0);
    most - most % u64::from(sizes.minimum.max(1))
}

/// What has happened, for whoever asks.
#[derive(Default, Debug)]
pub(super) struct Counts {
    /// Connections there are.
    pub(super) connected: AtomicU32,
    /// Connections that were lost.
    pub(super) lost: AtomicU64,
    /// Commands that were sent again.
    pub(super) replayed: AtomicU64,
    /// The style of the last session.
    pub(super) structured: AtomicU32,
    /// The only queue that the server takes has its node.
    taken: AtomicBool,
}

/// What nodes read of it.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) export: Export,
    pub(super) patience: Patience,
    pub(super) counts: Counts,
}

/// The shared part of an `nbd:` device. `S`: streams, as the ring takes them.
pub struct Nbd<S> {
    spec: NbdSpec,
    shared: Arc<Shared>,
    limits: QueueLimits,
    connector: Arc<dyn Connector<S>>,
    /// The connection by which the export became known, until a node has it.
    first: Mutex<Option<Connected<S>>>,
    tls: bool,
}

impl<S> Nbd<S> {
    /// A device on an export, with the first connection to it.
    ///
    /// # Errors
    /// The export is none that a device can be.
    pub fn new(
        spec: NbdSpec,
        first: Connected<S>,
        connector: Arc<dyn Connector<S>>,
    ) -> Result<Nbd<S>, NbdError> {
        let export = Export::new(&first.session, spec.read_only)?;
        let limits = export.limits()?;
        let shared = Shared { export, patience: spec.patience, counts: Counts::default() };
        shared.counts.structured.store(style_number(first.session.style), Relaxed);
        let tls = first.session.tls;
        Ok(Nbd { spec, shared: Arc::new(shared), limits, connector, first: Mutex::new(Some(first)), tls })
    }

    /// A device on an export that cannot be reached yet, as which it is assumed to be.
    ///
    /// # Errors
    /// None that a device can be.
    pub fn away(spec: NbdSpec, export: Export, connector: Arc<dyn Connector<S>>) -> Result<Nbd<S>, NbdError> {
        let limits = export.limits()?;
        let shared = Shared { export, patience: spec.patience, counts: Counts::default() };
        Ok(Nbd { spec, shared: Arc::new(shared), limits, connector, first: Mutex::default(), tls: false })
    }

    /// What the first session settled, for whoever connects to hold others against.
    pub fn export(&self) -> &Export {
        &self.shared.export
    }

    /// The node of one hardware queue, which `nudge` has take a turn.
    ///
    /// # Errors
    /// The server takes one connection, and there is another node.
    pub fn node(&self, nudge: Nudge) -> Result<NbdNode<S>, NbdError> {
        if !self.shared.claim() {
            return Err(NbdError::Single);
        }
        Ok(NbdNode::new(self.shared.clone(), self.connector.clone(), nudge, self.take_first()))
    }

    /// The connection that no node has taken, to be ended by whoever can.
    pub fn take_first(&self) -> Option<Connected<S>> {
        self.first.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// The URI of the server's export.
    pub fn uri(&self) -> &str {
        &self.spec.uri
    }

    /// Whether all queues share one connection, so that there can be one queue only.
    pub fn is_single(&self) -> bool {
        !self.export().is_multi()
    }
}

impl Shared {
    /// A node wants a connection. False when the server takes one, and another node has it.
    pub(super) fn claim(&self) -> bool {
        self.export.is_multi() || !self.counts.taken.swap(true, Relaxed)
    }

    /// A node that had claimed one wants none any more.
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
        let can = |flag| flags.has(flag) && !read_only;
        let flush = can(TransmissionFlags::SEND_FLUSH);
        Abilities {
            flush,
            // Where the server cannot, a flush follows the write. Without either nothing is ever unstable.
            fua: true,
            discard: can(TransmissionFlags::SEND_TRIM),
            write_zeroes: can(TransmissionFlags::SEND_WRITE_ZEROES),
            fast_zero: can(TransmissionFlags::SEND_FAST_ZERO),
            rotational: flags.has(TransmissionFlags::ROTATIONAL),
        }
    }

    fn limits(&self) -> QueueLimits {
        self.limits.clone()
    }

    fn describe(&self) -> Vec<Fact> {
        let Export { size, read_only, block_sizes, .. } = *self.export();
        let (counts, patience) = (&self.shared.counts, &self.spec.patience);
        let replies = ["simple", "structured", "extended"][counts.structured.load(Relaxed).min(2) as usize];
        let timeout = patience.timeout.map_or("never".to_owned(), |time| format!("{time:?}"));
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
            ("reconnect", format!("{:?}", patience.reconnect)),
        ];
        facts.extend(self.connector.describe());
        facts
    }
}
