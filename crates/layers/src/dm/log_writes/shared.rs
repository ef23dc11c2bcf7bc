//! The log, shared by all queues of a device: its pending entries, in order.
//!
//! A log is a total order of all writes, so there is one lock, and each write is copied: the purpose of this
//! target is to find faults of file systems, not speed. An entry gets its place on the log device when it is
//! queued; one request at a time, of any hardware queue, writes entries to the log device.
//!
//! *Invariant:* queued entries are adjacent on the log device, in order.
//! *Invariant:* the super block counts only entries that were written before it.

use super::super::background::{BackgroundWork, Disks};
use super::format::{DISCARD, ENTRY_LEN, Head, MARK, Super};
use block::{Bytes, Sectors};
use queue::{Nanos, WaitList};
use std::collections::VecDeque;
use std::io;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The background work of the log: it writes a mark when no request does.
impl BackgroundWork for Log {
    fn is_due(&self, _: Nanos) -> bool {
        self.has_unclaimed_work()
    }

    fn step(&self, _: Nanos, disks: &mut dyn Disks) {
        if !self.claim() {
            return;
        }
        if self.write_out(disks).is_err() {
            self.disable();
        }
        self.waiting.wake(None);
    }
}

/// An entry of the log.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Entry {
    pub(super) head: Head,
    /// The data of a write, or the text of a mark.
    pub(super) data: Box<[u8]>,
}

/// The next write to the log device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Next {
    /// Entries; the number of bytes that are queued.
    Entries(u64),
    /// The super block.
    Super(Super),
    /// Nothing; the claim is released.
    Nothing,
}

/// The number of the log device among the target's devices.
const LOG_DEVICE: usize = 1;
/// Longest write of background work, in bytes.
const BATCH_BYTES: u64 = 256 << 10;

#[derive(Debug)]
struct State {
    enabled: bool,
    /// The number of entries that have a place on the log device.
    entries: u64,
    /// The place of the next entry.
    next: Sectors,
    /// Writes that completed, with no flush submitted since.
    unflushed: Vec<Entry>,
    /// Entries to write, and the number of bytes of the first one that are written.
    queue: VecDeque<Entry>,
    written: usize,
    /// The log device offset of the next byte to write.
    at: u64,
    /// Claimed: a request or background work is writing the log.
    busy: bool,
    /// The number of entries that were completely written.
    written_entries: u64,
    /// The number of entries in the super block on the log device.
    super_entries: u64,
}

impl State {
    fn backlog(&self, block: u32) -> u64 {
        let blocks = |entry: &Entry| 1 + entry.head.data_blocks();
        self.queue.iter().map(blocks).sum::<u64>() * u64::from(block) - self.written as u64
    }

    fn has_unclaimed_work(&self) -> bool {
        self.enabled && !self.busy && (!self.queue.is_empty() || self.written_entries != self.super_entries)
    }
}

#[derive(Debug)]
pub(super) struct Log {
    state: Mutex<State>,
    block: u32,
    end: Sectors,
    /// The queues with requests that wait for the log. Woken whenever the claim is released or disabled.
    pub(super) waiting: WaitList,
}

impl Log {
    /// Creates an empty log. `block`: the logical block size of the logged device; `end`: the size of the log
    /// device.
    pub(super) fn new(block: u32, end: Sectors) -> Log {
        let next = Sectors(u64::from(block) >> 9);
        let state = State {
            enabled: true,
            entries: 0,
            next,
            unflushed: Vec::new(),
            queue: VecDeque::new(),
            written: 0,
            at: next.bytes().0,
            busy: false,
            written_entries: 0,
            super_entries: 0,
        };
        Log { state: Mutex::new(state), block, end, waiting: WaitList::default() }
    }

    /// Returns the block size in bytes.
    pub(super) fn block(&self) -> u32 {
        self.block
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn is_enabled(&self) -> bool {
        self.lock().enabled
    }

    /// Records a completed write that no flush has covered yet.
    pub(super) fn add_unflushed(&self, entry: Entry) {
        let mut state = self.lock();
        if state.enabled {
            state.unflushed.push(entry);
        }
    }

    /// Takes the writes that a flush submitted now makes durable.
    pub(super) fn take_unflushed(&self) -> Vec<Entry> {
        std::mem::take(&mut self.lock().unflushed)
    }

    /// Queues entries that are durable now, in this order.
    pub(super) fn append(&self, entries: impl IntoIterator<Item = Entry>) {
        let mut state = self.lock();
        for entry in entries {
            let len = Sectors(((1 + entry.head.data_blocks()) * u64::from(self.block)) >> 9);
            if !state.enabled {
                return;
            }
            if state.next.0 + len.0 >= self.end.0 {
                // The status counts the entry that did not fit, as the kernel's does.
                state.next.0 += len.0;
                state.enabled = false;
                return;
            }
            state.next.0 += len.0;
            state.entries += 1;
            state.queue.push_back(entry);
        }
    }

    pub(super) fn mark(&self, text: &str) {
        let most = self.block as usize - ENTRY_LEN - 1;
        let text = &text.as_bytes()[..text.len().min(most)];
        let head = Head { sector: 0, sectors: 0, flags: MARK, text_len: text.len() as u64 };
        self.append([Entry { head, data: text.into() }]);
    }

    /// Writes all pending entries and the super block. The caller has the claim.
    fn write_out(&self, disks: &mut dyn Disks) -> io::Result<()> {
        loop {
            match self.next() {
                Next::Entries(backlog) => {
                    let mut bytes = vec![0; backlog.min(BATCH_BYTES) as usize];
                    let at = self.fill(&mut bytes);
                    disks.write(LOG_DEVICE, Bytes(at), &bytes)?;
                }
                Next::Super(first) => {
                    let mut bytes = vec![0; self.block as usize];
                    first.fill(&mut bytes);
                    disks.write(LOG_DEVICE, Bytes(0), &bytes)?;
                    self.super_written(first.entries);
                }
                Next::Nothing => return Ok(()),
            }
        }
    }

    /// Returns the number of entries, the last sector in use, and whether logging is enabled.
    pub(super) fn status(&self) -> (u64, u64, bool) {
        let state = self.lock();
        (state.entries, state.next.0 - 1, state.enabled)
    }

    /// Returns whether entries are pending and the log is not claimed.
    fn has_unclaimed_work(&self) -> bool {
        self.lock().has_unclaimed_work()
    }

    /// Returns the number of entries, pending ones included.
    pub(super) fn entries(&self) -> u64 {
        self.lock().entries
    }

    /// Returns whether the log on disk contains this many entries, or never will because logging is disabled.
    pub(super) fn holds(&self, entries: u64) -> bool {
        let state = self.lock();
        !state.enabled || state.super_entries >= entries
    }

    /// Claims the log if entries are pending and no other request is writing it. Returns `true` if the caller
    /// must write it.
    pub(super) fn claim(&self) -> bool {
        let mut state = self.lock();
        let claimed = state.has_unclaimed_work();
        state.busy |= claimed;
        claimed
    }

    /// Releases the claim; the next claimant continues.
    pub(super) fn release(&self) {
        self.lock().busy = false;
    }

    /// Disables logging, because the log device failed or is full.
    pub(super) fn disable(&self) {
        let mut state = self.lock();
        state.enabled = false;
        state.busy = false;
        state.queue.clear();
        state.unflushed.clear();
    }

    /// Returns the next write for the holder of the claim, whose earlier writes must have completed.
    pub(super) fn next(&self) -> Next {
        let mut state = self.lock();
        match state.backlog(self.block) {
            0 if state.written_entries != state.super_entries => {
                Next::Super(Super { entries: state.written_entries, block: self.block })
            }
            0 => {
                state.busy = false;
                Next::Nothing
            }
            backlog => Next::Entries(backlog),
        }
    }

    /// Records that the super block with this entry count is on the log device.
    pub(super) fn super_written(&self, entries: u64) {
        self.lock().super_entries = entries;
    }

    /// Fills a buffer with the next bytes of the queue, and returns their offset on the log device.
    pub(super) fn fill(&self, buffer: &mut [u8]) -> u64 {
        let mut state = self.lock();
        let at = state.at;
        let mut filled = 0;
        while filled < buffer.len() {
            let written = state.written;
            let Some(entry) = state.queue.front() else { break };
            let whole = (1 + entry.head.data_blocks() as usize) * self.block as usize;
            let len = (whole - written).min(buffer.len() - filled);
            self.copy(entry, written, &mut buffer[filled..filled + len]);
            filled += len;
            state.written += len;
            if state.written == whole {
                state.queue.pop_front();
                state.written = 0;
                state.written_entries += 1;
            }
        }
        debug_assert_eq!(filled, buffer.len(), "the buffer is no longer than the backlog");
        state.at += filled as u64;
        at
    }

    /// Copies an entry, its block and then its data, from byte `from` on.
    fn copy(&self, entry: &Entry, from: usize, into: &mut [u8]) {
        let block = self.block as usize;
        let mut head = vec![0; block];
        head[..ENTRY_LEN].copy_from_slice(&entry.head.encode());
        let data: &[u8] = if entry.head.flags & MARK != 0 {
            head[ENTRY_LEN..ENTRY_LEN + entry.data.len()].copy_from_slice(&entry.data);
            &[]
        } else {
            &entry.data
        };
        debug_assert!(entry.head.flags & (MARK | DISCARD) != 0 || data.len().is_multiple_of(block));
        let of_head = block.saturating_sub(from).min(into.len());
        into[..of_head].copy_from_slice(&head[from.min(block)..from.min(block) + of_head]);
        let of_data = into.len() - of_head;
        let start = (from + of_head) - block;
        into[of_head..].copy_from_slice(&data[start..start + of_data]);
    }
}
