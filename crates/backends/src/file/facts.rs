//! State that all queues of a file share: constant facts, and a few values that change.

use block::Bytes;
use queue::{RangeLock, SharedSync, WaitList};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// Alignment that direct I/O requires, as powers of two.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Alignment {
    /// Alignment of memory addresses, in bytes.
    pub memory: u32,
    /// Alignment of offsets and lengths, in bytes: at most the logical block size.
    pub offset: u32,
}

/// Facts about a file. They are constant for the lifetime of a node; a change creates new nodes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Facts {
    /// Offset of the device in the file, in bytes.
    pub start: Bytes,
    /// Length of the device in bytes.
    pub size: Bytes,
    /// Logical block size in bytes.
    pub block: u32,
    /// Whether the device is read-only, so that writes fail.
    pub read_only: bool,
    /// Alignment of direct I/O; `None` for buffered I/O.
    pub direct: Option<Alignment>,
    /// Whether the file is in memory: no operation waits for a device, and flushes have nothing to do.
    pub memory: bool,
    /// Whether reads support `RWF_NOWAIT`.
    pub nowait_reads: bool,
    /// Whether buffered writes support `RWF_NOWAIT`.
    pub nowait_writes: bool,
    /// Whether buffered writes may be done inline as long as they return at once.
    pub timed_writes: bool,
    /// Whether the file is a block device.
    pub block_device: bool,
    /// Number of bytes at the beginning of the device that are also the beginning of the file, and to which
    /// clients may not write the header of another format; 0 if they may.
    pub head: u32,
}

impl Facts {
    /// Returns whether every request of whole blocks can be passed to the file with its own memory, because
    /// direct I/O needs no window for it.
    pub fn takes_any_block(&self) -> bool {
        self.direct.is_none_or(|alignment| alignment.offset <= self.block)
    }
}

/// State that the nodes of a file share.
#[derive(Debug)]
pub struct FileState {
    /// Constant facts.
    pub(super) facts: Facts,
    /// Whether a flush failed: written data may be lost, and the kernel will not report that again.
    flush_failed: AtomicBool,
    /// Whether other writers were allowed temporarily, and could not be excluded again. All states of the
    /// open file share it.
    pub(super) lets_writers: Arc<AtomicBool>,
    /// Serialises syncs over all queues. The kernel reports a lost write only to one sync of an open file: a
    /// concurrent sync would succeed, and its flush would complete although its data is lost.
    pub(super) syncs: SharedSync,
    /// Whether the file system refused to punch a hole.
    pub(super) no_punch: AtomicBool,
    /// Whether the file system refused to zero a range.
    pub(super) no_zero_range: AtomicBool,
    /// Number of discards and write zeroes done by `fallocate`: data found before the last of them may be a
    /// hole now.
    pub(super) cleared: AtomicU64,
    /// Key of the request that writes to the head, or 0.
    writes_head: AtomicU64,
    /// Format of the last header that a client was not allowed to write.
    refused_head: Arc<Mutex<Option<&'static str>>>,
    /// Lock that separates direct writes of partial blocks from all other writes.
    pub(super) range_lock: RangeLock,
    /// Nodes with requests that wait for a sync to end, or for the head.
    pub(super) waiting: WaitList,
    /// Nodes created so far.
    nodes: AtomicU32,
}

impl FileState {
    /// Creates the state for nodes on a file with these facts.
    pub fn new(facts: Facts) -> Arc<FileState> {
        Arc::new(FileState {
            facts,
            flush_failed: AtomicBool::new(false),
            lets_writers: Arc::default(),
            syncs: SharedSync::default(),
            no_punch: AtomicBool::new(false),
            no_zero_range: AtomicBool::new(false),
            cleared: AtomicU64::new(0),
            writes_head: AtomicU64::new(0),
            refused_head: Arc::default(),
            range_lock: RangeLock::default(),
            waiting: WaitList::default(),
            nodes: AtomicU32::new(0),
        })
    }

    /// Creates the state for nodes with other facts that replace the nodes of this state. It keeps what is
    /// known about the file: a failed flush, and operations that the file system refuses.
    pub fn changed(&self, facts: Facts) -> Arc<FileState> {
        let copy = |flag: &AtomicBool| AtomicBool::new(flag.load(Ordering::Acquire));
        Arc::new(FileState {
            facts,
            flush_failed: copy(&self.flush_failed),
            lets_writers: Arc::clone(&self.lets_writers),
            syncs: SharedSync::default(),
            no_punch: copy(&self.no_punch),
            no_zero_range: copy(&self.no_zero_range),
            cleared: AtomicU64::new(0),
            writes_head: AtomicU64::new(0),
            refused_head: Arc::clone(&self.refused_head),
            range_lock: RangeLock::default(),
            waiting: WaitList::default(),
            nodes: AtomicU32::new(0),
        })
    }

    /// Returns the constant facts.
    pub fn facts(&self) -> &Facts {
        &self.facts
    }

    /// Returns whether a flush has failed. This stays true until the file is opened again.
    pub fn flush_failed(&self) -> bool {
        self.flush_failed.load(Ordering::Acquire)
    }

    /// Returns whether the file system may still punch holes, and zero ranges.
    pub(super) fn fallocates(&self) -> (bool, bool) {
        (!self.no_punch.load(Ordering::Relaxed), !self.no_zero_range.load(Ordering::Relaxed))
    }

    /// Describes the operations that the file system refused, for `show`.
    pub(super) fn withdrawn(&self) -> Option<&'static str> {
        match self.fallocates() {
            (true, true) => None,
            (false, true) => Some("discard: the file system refused it"),
            (true, false) => Some("zeroing with fallocate: the file system refused it, zeroes are written"),
            (false, false) => Some("discard and zeroing with fallocate: the file system refused them"),
        }
    }

    /// Returns the number of a new node, counted from 1.
    pub(super) fn number_node(&self) -> u32 {
        self.nodes.fetch_add(1, Ordering::Relaxed) + 1
    }

    pub(super) fn fail_flushes(&self) {
        self.flush_failed.store(true, Ordering::Release);
    }

    /// Claims the right to write to the head. Returns `false` if another request has it.
    pub(super) fn claim_head(&self, key: u64) -> bool {
        match self.writes_head.compare_exchange(0, key, Ordering::SeqCst, Ordering::SeqCst) {
            Ok(_) => true,
            Err(owner) => owner == key,
        }
    }

    /// Lets other requests write to the head again.
    pub(super) fn release_head(&self, key: u64) {
        let _ = self.writes_head.compare_exchange(key, 0, Ordering::SeqCst, Ordering::SeqCst);
    }

    /// Records that a client was not allowed to write the header of this format.
    pub(super) fn refuse_head(&self, format: &'static str) {
        *self.refused_head.lock().unwrap_or_else(PoisonError::into_inner) = Some(format);
    }

    /// Returns the format of the last such header.
    pub(super) fn refused_head(&self) -> Option<&'static str> {
        *self.refused_head.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
