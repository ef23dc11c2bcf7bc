//! Why a device is not shown by ublk, and what to do about it.

use super::{NotPresentable, RecordError};
use ::ublk::{DriverError, Features, Unusable};
use block::Bytes;
use exports::ublk::NotPossible;
use std::io;

/// Why a device is not shown by ublk.
#[derive(Debug, thiserror::Error)]
pub enum UblkError {
    /// There is no driver to be used.
    #[error(transparent)]
    Unusable(#[from] Unusable),
    /// The driver refused.
    #[error(transparent)]
    Driver(#[from] DriverError),
    /// The threads do not have io_uring.
    #[error("ublk needs io_uring, and the I/O threads run on {0} (leave out --ring)")]
    NoUring(&'static str),
    /// The way of data that was asked for.
    #[error(transparent)]
    Mode(#[from] NotPossible),
    /// Commands for many requests at once.
    #[error("one command cannot be about many requests: {0} (leave out batch=yes)")]
    NoBatch(&'static str),
    /// Zones that nothing can be appended to.
    #[error("the ublk driver takes no zones without append (leave out zone_append_max_sectors=0)")]
    NoAppend,
    /// Memory of clients.
    #[error("memory cannot be shared with clients: {0} (leave out shmem=…)")]
    NoSharing(&'static str),
    /// The file that it is.
    #[error("{0}: {1} (give a file of whole pages in memory, on hugetlbfs or tmpfs)")]
    SharedFile(String, #[source] io::Error),
    /// The stack.
    #[error(transparent)]
    NotPresentable(#[from] NotPresentable),
    /// A feature that was asked for.
    #[error("this kernel's ublk driver lacks {0} (leave out {1})")]
    Lacks(Features, &'static str),
    /// Root makes ordinary devices.
    #[error("whoever may administer devices makes ordinary ones (leave out unprivileged)")]
    Privileged,
    /// A device that nobody could recover.
    #[error(
        "what it holds, or what was not flushed of it, dies with its process, so it cannot be recovered (leave out recovery=…)"
    )]
    Volatile,
    /// Unprivileged devices cannot be recovered.
    #[error("an unprivileged device cannot be recovered (leave out recovery=…)")]
    UnprivilegedRecovery,
    /// The node of an unprivileged device stayed root's.
    #[error("/dev/ublkc{0}: {1} (nobody gave the node to its owner: see docs/ublk.md for the udev rule)")]
    NotGiven(u32, #[source] io::Error),
    /// The character device.
    #[error("/dev/ublkc{0}: {1} (is another server using it?)")]
    Open(u32, #[source] io::Error),
    /// A reactor could not serve a queue.
    #[error("its queues cannot be served: {0}")]
    Serve(String),
    /// It is in use.
    #[error("{0} is in use (unmount it, or del --force)")]
    InUse(String),
    /// What is needed to recover it could not be written down.
    #[error(transparent)]
    Record(#[from] RecordError),
    /// The device that is to be taken over is not what was left.
    #[error(
        "the device that waits has {waits}, and its stack has {stack} now (bring the stack back, or del it)"
    )]
    Shrunk {
        /// What the kernel was told.
        waits: Bytes,
        /// What there is.
        stack: Bytes,
    },
    /// The device that is to be taken over has a server.
    #[error("its server is there: process {0} (end it first, or use upgrade)")]
    Served(i32),
    /// Its process would end, and with it the other devices.
    #[error("its process serves other devices, too (end it, and recover each)")]
    NotAlone,
    /// It cannot be left without a server.
    #[error("{0} (del it instead)")]
    CannotLeave(&'static str),
}
