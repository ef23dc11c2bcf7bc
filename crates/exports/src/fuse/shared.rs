//! State shared by all channels of a mount: attributes of the file, and the number of channels. Written
//! rarely, by channels and the control plane; read with plain loads.

use proto::fuse::{Agreement, Attributes, StatFs};
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicU64};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Largest request in bytes: the kernel's own limit, unless an administrator has raised it.
pub const TRANSFER_MAX: u32 = 1 << 20;

/// Bytes that the requests of a channel may hold together. In addition a channel has memory for the largest
/// request, into which the next one is read, so a mount holds at most 1 MiB more than this on each thread.
/// Five requests of the largest size keep a disk busy; further ones wait in the kernel, where they use none
/// of our memory.
pub const HELD_MAX: u64 = 5 << 20;
/// Part of [`HELD_MAX`] that writes may hold which keep the whole buffer that they were read into, with its
/// space for the largest request. Beyond it, the data of a write is copied to a buffer of its own size, if
/// that is at most half as large.
pub(super) const HELD_WHOLE_MAX: u64 = 3 << 20;

/// Properties of a device exported as a file.
#[derive(Clone, Copy, Debug)]
pub struct FileFacts {
    /// Size in bytes.
    pub size: u64,
    /// Whether the device is read-only: writes are refused.
    pub read_only: bool,
    /// Block size of the stack's requests, in bytes; 1 means that any length is allowed.
    pub block_len_min: u32,
    /// Preferred I/O size in bytes.
    pub block_len_preferred: u32,
    /// Whether FUA is supported.
    pub fua: bool,
    /// Whether write-zeroes is supported.
    pub write_zeroes: bool,
    /// Whether to use passthrough if the kernel supports it.
    pub passthrough: bool,
    /// Whether to use FUSE over io_uring if the kernel supports it.
    pub over_io_uring: bool,
    /// Initial owner and group of the file.
    pub owner: (u32, u32),
}

/// State of a mount.
#[derive(Debug)]
pub struct MountState {
    pub(super) facts: FileFacts,
    size: AtomicU64,
    mode: AtomicU32,
    uid: AtomicU32,
    gid: AtomicU32,
    born_s: u64,
    /// Whether INIT was negotiated.
    agreed: AtomicBool,
    /// Whether passthrough was negotiated.
    agreed_passthrough: AtomicBool,
    /// Id of the backing file for passthrough, or 0.
    backing: AtomicI32,
    channels: AtomicU32,
    /// Number of times that the file is open.
    opens: AtomicU32,
    /// Whether FUSE over io_uring was negotiated.
    agreed_io_uring: AtomicBool,
    /// First errno, positive, with which the kernel refused an entry, or 0.
    refused: AtomicI32,
    /// Notified when INIT was negotiated and when a channel ends; the control plane waits for it.
    changed: (Mutex<()>, Condvar),
}

impl MountState {
    /// Creates a mount without channels. If the device requires whole blocks, all of its queues must be
    /// guarded by the device's range lock ([`Queue::guard`](queue::Queue::guard)).
    pub fn new(facts: FileFacts) -> MountState {
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        MountState {
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
            opens: AtomicU32::new(0),
            agreed_io_uring: AtomicBool::new(false),
            refused: AtomicI32::new(0),
            changed: Default::default(),
        }
    }

    fn notify(&self) {
        // Lock first, so that a thread that has checked its condition but does not wait yet cannot miss the
        // notification.
        drop(self.changed.0.lock().unwrap_or_else(PoisonError::into_inner));
        self.changed.1.notify_all();
    }

    /// Waits until a condition that channels change holds. Returns whether it does within `timeout`.
    fn wait_until(&self, timeout: Duration, holds: impl Fn() -> bool) -> bool {
        let held = self.changed.0.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self.changed.1.wait_timeout_while(held, timeout, |()| !holds());
        drop(waited);
        holds()
    }

    /// Waits until INIT was negotiated, and returns whether passthrough was. Returns `None` if INIT was not
    /// negotiated within `timeout`. Must not be called on a reactor's thread.
    pub fn wait_for_agreement(&self, timeout: Duration) -> Option<bool> {
        self.wait_until(timeout, || self.agreement().is_some());
        self.agreement()
    }

    /// Waits until all channels have ended. Returns whether they have ended within `timeout`. Must not be
    /// called on a reactor's thread.
    pub fn wait_for_end(&self, timeout: Duration) -> bool {
        self.wait_until(timeout, || self.channels() == 0)
    }

    /// Returns the size of the file in bytes.
    #[inline]
    pub fn size(&self) -> u64 {
        self.size.load(Relaxed)
    }

    /// Sets the size of the file in bytes. The caller must notify the kernel, too.
    pub fn resized(&self, size: u64) {
        self.size.store(size, Relaxed);
    }

    /// Returns the number of channels. If it drops to 0, the file system was unmounted.
    pub fn channels(&self) -> u32 {
        self.channels.load(Relaxed)
    }

    /// Returns the number of times that the file is open, which is OPEN requests without their RELEASE. A
    /// loop device over the file counts as one.
    pub fn opens(&self) -> u32 {
        self.opens.load(Relaxed)
    }

    pub(super) fn opened(&self) {
        self.opens.fetch_add(1, Relaxed);
    }

    pub(super) fn released(&self) {
        // The kernel can abandon an OPEN whose process was killed, and then sends no RELEASE: do not go
        // below 0.
        let _ = self.opens.fetch_update(Relaxed, Relaxed, |opens| opens.checked_sub(1));
    }

    /// Returns whether passthrough was negotiated, or `None` before INIT was.
    pub fn agreement(&self) -> Option<bool> {
        self.agreed.load(Acquire).then(|| self.agreed_passthrough.load(Relaxed))
    }

    /// Makes files opened from now on use passthrough to the backing file with this id.
    pub fn pass_through(&self, backing: i32) {
        self.backing.store(backing, Relaxed);
    }

    /// Returns the id of the backing file, if there is one.
    pub fn backing(&self) -> Option<i32> {
        Some(self.backing.load(Relaxed)).filter(|number| *number > 0)
    }

    pub(super) fn agree(&self, on: &Agreement) {
        self.agreed_passthrough.store(on.has_passthrough(), Relaxed);
        self.agreed_io_uring.store(on.is_over_io_uring(), Relaxed);
        // Release: a thread that sees this value also sees the stores above.
        self.agreed.store(true, Release);
        self.notify();
    }

    /// Returns whether requests arrive over io_uring.
    ///
    /// # Errors
    /// FUSE over io_uring was negotiated, but the kernel refused an entry with this positive errno.
    pub fn over_io_uring(&self) -> Result<bool, i32> {
        match self.refused.load(Relaxed) {
            0 => Ok(self.agreed_io_uring.load(Relaxed)),
            errno => Err(errno),
        }
    }

    /// Records that the kernel has returned an entry for good, because the mount ended or the entry was
    /// refused.
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
        self.notify();
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    fn mount() -> Arc<MountState> {
        Arc::new(MountState::new(FileFacts {
            size: 4096,
            read_only: false,
            block_len_min: 1,
            block_len_preferred: 4096,
            fua: false,
            write_zeroes: false,
            passthrough: false,
            over_io_uring: false,
            owner: (0, 0),
        }))
    }

    #[test]
    fn waits_end_when_the_channels_change_something_and_not_later() {
        let shared = mount();
        assert_eq!(shared.wait_for_agreement(Duration::ZERO), None);
        shared.joined();
        assert!(!shared.wait_for_end(Duration::ZERO));
        let other = shared.clone();
        let thread = std::thread::spawn(move || other.wait_for_end(Duration::from_secs(60)));
        shared.left();
        assert!(thread.join().expect("no panic"));
    }
}
