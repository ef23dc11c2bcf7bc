//! What all queues of a file share: facts that stand from its opening, and a few that change.

use super::exclusive::Exclusive;
use block::Bytes;
use queue::Rounds;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// What direct I/O needs: powers of two.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Alignment {
    /// Of addresses in memory.
    pub memory: u32,
    /// Of offsets and lengths: not above the logical block size.
    pub offset: u32,
}

/// What a node needs to know of its file. All of it stands as long as the node: what changes later comes
/// with new nodes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Facts {
    /// Where in the file the device begins.
    pub start: Bytes,
    /// How long the device is.
    pub size: Bytes,
    /// Its logical block size.
    pub block: u32,
    /// Writes fail.
    pub read_only: bool,
    /// It is read and written past the page cache, aligned so. `None`: through it.
    pub direct: Option<Alignment>,
    /// The file is memory: nothing on it ever waits for a device, and there is nothing to flush.
    pub memory: bool,
    /// Cached reads can be told from those that would wait.
    pub nowait_reads: bool,
    /// Buffered writes can be told so as well.
    pub nowait_writes: bool,
    /// Buffered writes may be done in place while the clock shows that they return at once.
    pub timed_writes: bool,
    /// It is a block device.
    pub block_device: bool,
    /// Bytes of the device, from its beginning, that lie where the format of a file shows, and that clients may not make
    /// an image of another format. 0: they may.
    pub head: u32,
}

impl Facts {
    /// Every request of whole blocks goes to the file as it is, in the memory that it brings: direct I/O needs no window
    /// to copy through.
    pub fn takes_any_block(&self) -> bool {
        self.direct.is_none_or(|alignment| alignment.offset <= self.block)
    }
}

/// The shared part that nodes see.
#[derive(Debug)]
pub struct Shared {
    /// What stands.
    pub(super) facts: Facts,
    /// A flush failed: what was written may be lost, and the kernel will not say so twice.
    flush_failed: AtomicBool,
    /// Other writers were let in for a while, and could not be kept off again. Of the open file, whatever it is served
    /// as.
    pub(super) lets_writers: Arc<AtomicBool>,
    /// One at a time, for all queues. The kernel reports a lost write to one sync of an open file only: of two
    /// that run together the other would succeed, and its flush be answered, although what it was for is gone.
    pub(super) syncs: Rounds,
    /// The file system does not punch holes.
    pub(super) no_punch: AtomicBool,
    /// The file system does not zero ranges.
    pub(super) no_zero_range: AtomicBool,
    /// Discards and write zeroes that `fallocate` did: what was known to be data before may be a hole.
    pub(super) cleared: AtomicU64,
    /// Who writes to the head: its key; 0: nobody.
    writes_head: AtomicU64,
    /// The format that a client was kept from turning the file into, last.
    refused_head: Arc<Mutex<Option<&'static str>>>,
    /// Keeps writes from those that cover a part of a block.
    pub(super) exclusive: Exclusive,
}

impl Shared {
    /// For nodes on a file with these facts.
    pub fn new(facts: Facts) -> Arc<Shared> {
        Arc::new(Shared {
            facts,
            flush_failed: AtomicBool::new(false),
            lets_writers: Arc::default(),
            syncs: Rounds::default(),
            no_punch: AtomicBool::new(false),
            no_zero_range: AtomicBool::new(false),
            cleared: AtomicU64::new(0),
            writes_head: AtomicU64::new(0),
            refused_head: Arc::default(),
            exclusive: Exclusive::new(),
        })
    }

    /// For nodes that take over from those of this one, with other facts. What was learned of the file
    /// stays: a flush that failed, and what its file system refuses.
    pub fn changed(&self, facts: Facts) -> Arc<Shared> {
        let copy = |flag: &AtomicBool| AtomicBool::new(flag.load(Ordering::Acquire));
        Arc::new(Shared {
            facts,
            flush_failed: copy(&self.flush_failed),
            lets_writers: Arc::clone(&self.lets_writers),
            syncs: Rounds::default(),
            no_punch: copy(&self.no_punch),
            no_zero_range: copy(&self.no_zero_range),
            cleared: AtomicU64::new(0),
            writes_head: AtomicU64::new(0),
            refused_head: Arc::clone(&self.refused_head),
            exclusive: Exclusive::new(),
        })
    }

    /// What stands.
    pub fn facts(&self) -> &Facts {
        &self.facts
    }

    /// Whether a flush has failed. It stays so until the file is opened anew.
    pub fn flush_failed(&self) -> bool {
        self.flush_failed.load(Ordering::Acquire)
    }

    /// Whether the file system still may punch holes, and zero ranges.
    pub(super) fn fallocates(&self) -> (bool, bool) {
        (!self.no_punch.load(Ordering::Relaxed), !self.no_zero_range.load(Ordering::Relaxed))
    }

    /// What it was seen to refuse, for `show`.
    pub(super) fn withdrawn(&self) -> Option<&'static str> {
        match self.fallocates() {
            (true, true) => None,
            (false, true) => Some("discard: the file system refused it"),
            (true, false) => Some("zeroing in place: the file system refused it, zeroes are written"),
            (false, false) => Some("discard and zeroing in place: the file system refused them"),
        }
    }

    pub(super) fn fail_flushes(&self) {
        self.flush_failed.store(true, Ordering::Release);
    }

    /// Ask to be the only request that writes to the head. `false`: another one is.
    pub(super) fn claim_head(&self, key: u64) -> bool {
        match self.writes_head.compare_exchange(0, key, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => true,
            Err(owner) => owner == key,
        }
    }

    /// Others may write to the head.
    pub(super) fn disclaim_head(&self, key: u64) {
        let _ = self.writes_head.compare_exchange(key, 0, Ordering::AcqRel, Ordering::Acquire);
    }

    /// A client was kept from turning the file into an image of this format.
    pub(super) fn refuse_head(&self, format: &'static str) {
        *self.refused_head.lock().unwrap_or_else(PoisonError::into_inner) = Some(format);
    }

    /// The format of that image.
    pub(super) fn refused_head(&self) -> Option<&'static str> {
        *self.refused_head.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
