//! Why a device cannot be exported through ublk, with hints.

use super::{NotPresentable, RecordError};
use ::ublk::{DriverError, Features, Unusable};
use block::Bytes;
use engine::host::{HostError, HostErrorKind};
use exports::ublk::NotPossible;
use std::io;

/// Why a device cannot be exported through ublk.
#[derive(Debug, thiserror::Error)]
pub enum UblkError {
    /// There is no usable driver.
    #[error(transparent)]
    Unusable(#[from] Unusable),
    /// The driver refused a command.
    #[error(transparent)]
    Driver(#[from] DriverError),
    /// The I/O threads do not run on io_uring.
    #[error("ublk needs io_uring, and the I/O threads run on {0} (leave out --ring)")]
    NoUring(&'static str),
    /// The requested data mode is not possible.
    #[error(transparent)]
    Mode(#[from] NotPossible),
    /// Batched commands are not possible.
    #[error("one command cannot be about many requests: {0} (leave out batch=yes)")]
    NoBatch(&'static str),
    /// Zones without zone append.
    #[error("the ublk driver takes no zones without append (leave out zone_append_max_sectors=0)")]
    NoAppend,
    /// Memory cannot be shared with clients.
    #[error("memory cannot be shared with clients: {0} (leave out shmem=…)")]
    NoSharing(&'static str),
    /// The file of the shared memory cannot be used.
    #[error("{0}: {1} (give a file of whole pages in memory, on hugetlbfs or tmpfs)")]
    SharedFile(String, #[source] io::Error),
    /// The driver cannot represent the stack.
    #[error(transparent)]
    NotPresentable(#[from] NotPresentable),
    /// The driver lacks a requested feature.
    #[error("this kernel's ublk driver lacks {0} (leave out {1})")]
    Lacks(Features, &'static str),
    /// Root creates ordinary devices only.
    #[error("a process that may administer devices creates ordinary ones (leave out unprivileged)")]
    Privileged,
    /// Recovery of a volatile device was requested.
    #[error("its data dies with its process, so it cannot be recovered (leave out recovery=…)")]
    Volatile,
    /// Unprivileged devices cannot be recovered.
    #[error("an unprivileged device cannot be recovered (leave out recovery=…)")]
    UnprivilegedRecovery,
    /// The character device of an unprivileged device still belongs to root.
    #[error("/dev/ublkc{0}: {1} (its owner was not given the node: see docs/ublk.md for the udev rule)")]
    NotOwned(u32, #[source] io::Error),
    /// The character device cannot be opened.
    #[error("/dev/ublkc{0}: {1} (is another server using it?)")]
    Open(u32, #[source] io::Error),
    /// A reactor could not serve a queue.
    #[error("its queues cannot be served: {0}")]
    Serve(String),
    /// The block device is in use.
    #[error("{0} is in use (unmount it, or del --force)")]
    InUse(String),
    /// The record for recovery could not be written.
    #[error(transparent)]
    Record(#[from] RecordError),
    /// The stack is smaller than the device to be taken over.
    #[error(
        "the device in recovery has {device}, and its stack has {stack} now (restore the stack, or del the device)"
    )]
    Shrunk {
        /// Size that the driver has.
        device: Bytes,
        /// Size of the stack.
        stack: Bytes,
    },
    /// The device to be taken over has a live server.
    #[error("its server is alive: process {0} (end it first, or use upgrade)")]
    Served(i32),
    /// The device cannot be handed over to another process.
    #[error("{0} (del it instead)")]
    CannotHandOver(&'static str),
}

impl From<UblkError> for HostError {
    fn from(error: UblkError) -> HostError {
        let is_used = matches!(error, UblkError::InUse(_));
        HostError::caused(if is_used { HostErrorKind::InUse } else { HostErrorKind::Failed }, error)
    }
}
