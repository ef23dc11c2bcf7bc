//! What all channels of a mount share: what the file is, and how many threads serve it. Written by any of
//! them and by the control plane, seldom; read with plain loads.

use proto::fuse::{Agreement, Attributes, StatFs};
use queue::Gate;
use std::sync::Arc;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicU64};
use std::time::{SystemTime, UNIX_EPOCH};

/// The most that one request of the kernel moves: its own limit, unless an administrator has raised that.
pub const TRANSFER_MAX: u32 = 1 << 20;

/// Memory that a channel's requests may hold together, in bytes. Besides, it has memory for the largest request that the next
/// one is read into, so a mount holds 1 MiB more than this on each thread at most. Five requests of the largest size keep a
/// disk busy; what exceeds them waits in the kernel, where it takes no memory of ours.
pub const HELD_MAX: u64 = 5 << 20;
/// Of that, what writes may hold that keep all of the memory they were read into, which has room for the largest: data of
/// later ones is copied to where it just fits, if that is at most half as much.
pub(super) const HELD_WHOLE_MAX: u64 = 3 << 20;

/// What the control plane knows of a device that is shown as a file.
#[derive(Clone, Copy, Debug)]
pub struct FileFacts {
    /// Bytes.
    pub size: u64,
    /// Writes are refused.
    pub read_only: bool,
    /// The stack is asked for whole blocks of this many bytes; 1: for any length.
    pub block_len_min: u32,
    /// What to read and write at a time, in bytes.
    pub block_len_preferred: u32,
    /// A write can be made to last by itself.
    pub fua: bool,
    /// Ranges can be zeroed.
    pub write_zeroes: bool,
    /// Reads and writes shall go past us, where the kernel can do that.
    pub passthrough: bool,
    /// Requests shall come through io_uring, where the kernel can do that.
    pub over_io_uring: bool,
    /// The file's owner and group at first.
    pub owner: (u32, u32),
}

/// A mount.
#[derive(Debug)]
pub struct Shared {
    pub(super) facts: FileFacts,
    size: AtomicU64,
    mode: AtomicU32,
    uid: AtomicU32,
    gid: AtomicU32,
    born_s: u64,
    /// The kernel and we have agreed.
    agreed: AtomicBool,
    /// And on passing through.
    agreed_passthrough: AtomicBool,
    /// The number of the backing file for that; 0: there is none.
    backing: AtomicI32,
    channels: AtomicU32,
    /// The kernel and we have agreed on io_uring.
    agreed_io_uring: AtomicBool,
    /// The first errno, positive, with which the kernel refused an entry; 0: it refused none.
    refused: AtomicI32,
    /// Who writes where on the device, for writes of parts of blocks.
    pub(super) gate: Arc<Gate>,
}

impl Shared {
    /// A mount that nobody serves yet. Where the device wants whole blocks, all of its queues are guarded by `gate`.
    pub fn new(facts: FileFacts, gate: Arc<Gate>) -> Shared {
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        Shared {
            facts,
            size: AtomicU64::new(facts.size),
            mode: AtomicU32::new(if facts.read_only { 0o400 } else { 0o600 }),
            uid: AtomicU32::new(facts.owner.0),
            gid: AtomicU32::new(facts.owner.1),
            born_s: now.map_or(0, |since| since.as_secs()),
            agreed: AtomicBool::new(false),
            agreed_passthrough: AtomicBool::new(false),
            backing: AtomicI32::new(0),
            channels: AtomicU32::new(0),
            agreed_io_uring: AtomicBool::new(false),
            refused: AtomicI32::new(0),
            gate,
        }
    }

    /// Bytes that the file has.
    #[inline]
    pub fn size(&self) -> u64 {
        self.size.load(Relaxed)
    }

    /// It has another size now. The kernel must be told, too.
    pub fn resized(&self, size: u64) {
        self.size.store(size, Relaxed);
    }

    /// Descriptors that serve it. 0 after there were some: it was unmounted.
    pub fn channels(&self) -> u32 {
        self.channels.load(Relaxed)
    }

    /// Whether the first words with the kernel have been exchanged; whether it can pass I/O through.
    pub fn agreement(&self) -> Option<bool> {
        self.agreed.load(Acquire).then(|| self.agreed_passthrough.load(Relaxed))
    }

    /// From here on files that are opened are passed through to the backing file of that number.
    pub fn pass_through(&self, backing: i32) {
        self.backing.store(backing, Relaxed);
    }

    /// The number of the backing file.
    pub fn backing(&self) -> Option<i32> {
        Some(self.backing.load(Relaxed)).filter(|number| *number > 0)
    }

    pub(super) fn agree(&self, on: &Agreement) {
        self.agreed_passthrough.store(on.has_passthrough(), Relaxed);
        self.agreed_io_uring.store(on.is_over_io_uring(), Relaxed);
        // Whoever sees this sees the others.
        self.agreed.store(true, Release);
    }

    /// Whether requests come through io_uring. `Err`: they were to, and the kernel refused with this errno.
    ///
    /// # Errors
    /// A positive errno.
    pub fn over_io_uring(&self) -> Result<bool, i32> {
        match self.refused.load(Relaxed) {
            0 => Ok(self.agreed_io_uring.load(Relaxed)),
            errno => Err(errno),
        }
    }

    /// An entry is the kernel's no more: for the end of the mount, or because it was refused.
    pub(super) fn entry_ended(&self, errno: i32) {
        if !matches!(errno, libc::ENOTCONN | libc::ECONNABORTED | libc::ECANCELED) {
            let _ = self.refused.compare_exchange(0, errno, Relaxed, Relaxed);
        }
    }

    pub(super) fn joined(&self) {
        self.channels.fetch_add(1, Relaxed);
    }

    pub(super) fn left(&self) {
        self.channels.fetch_sub(1, Relaxed);
    }

    pub(super) fn set_mode(&self, mode: u32) {
        self.mode.store(mode, Relaxed);
    }

    pub(super) fn set_owner(&self, uid: Option<u32>, gid: Option<u32>) {
        uid.into_iter().for_each(|uid| self.uid.store(uid, Relaxed));
        gid.into_iter().for_each(|gid| self.gid.store(gid, Relaxed));
    }

    pub(super) fn attributes(&self) -> Attributes {
        Attributes {
            size: self.size(),
            blocks: self.size() / 512,
            mode: self.mode.load(Relaxed),
            uid: self.uid.load(Relaxed),
            gid: self.gid.load(Relaxed),
            block_len: self.facts.block_len_preferred,
            time_s: self.born_s,
        }
    }

    pub(super) fn statfs(&self) -> StatFs {
        StatFs { size: self.size(), block_len: self.facts.block_len_preferred }
    }
}
