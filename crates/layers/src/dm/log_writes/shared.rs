//! The log as all queues of a device see it: what is to be written to it, in order.
//!
//! A log is one order of all writes, so there is one lock, and each write is copied: this is a device to find faults of file
//! systems with, not to be fast. Entries get their places when they enter the queue; one request at a time, of whichever
//! hardware queue, carries them to the log device.
//!
//! *Invariant:* what is queued lies next to each other on the log device, in order. *Invariant:* the super block counts no
//! entry that was not written before it.

use super::super::chore::{Chore, Disks};
use super::format::{DISCARD, ENTRY_LEN, Head, MARK, Super};
use block::{Bytes, Sectors};
use queue::Nanos;
use std::collections::VecDeque;
use std::io;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// A mark is written without waiting for a request.
impl Chore for Log {
    fn is_due(&self, _: Nanos) -> bool {
        self.is_waiting()
    }

    fn step(&self, _: Nanos, disks: &mut dyn Disks) {
        if self.claim() && self.write_out(disks).is_err() {
            self.give_up();
        }
    }
}

/// Something that happened.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Entry {
    pub(super) head: Head,
    /// What was written, or the text of a mark.
    pub(super) data: Box<[u8]>,
}

/// What is to be written next.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Next {
    /// So many bytes of entries.
    Entries(u64),
    /// The super block.
    Super(Super),
    /// Nothing, and the claim is given up.
    Nothing,
}

/// The number of the log device among the target's.
const LOG_DEVICE: usize = 1;
/// How much the chore writes in one go.
const PIECE: u64 = 256 << 10;

#[derive(Debug)]
struct State {
    enabled: bool,
    /// Entries that have a place on the log device.
    entries: u64,
    /// Where the next one goes.
    next: Sectors,
    /// Writes that ended and that no flush was asked for after.
    unflushed: Vec<Entry>,
    /// To be written, and how many bytes of the first one are.
    queue: VecDeque<Entry>,
    written: usize,
    /// Where the first byte that is not written goes.
    at: u64,
    /// Somebody writes.
    busy: bool,
    /// How many entries went to the log device, whole.
    carried: u64,
    /// Of how many the super block knows.
    said: u64,
}

impl State {
    fn backlog(&self, block: u32) -> u64 {
        let blocks = |entry: &Entry| 1 + entry.head.data_blocks();
        self.queue.iter().map(blocks).sum::<u64>() * u64::from(block) - self.written as u64
    }

    fn is_waiting(&self) -> bool {
        self.enabled && !self.busy && (!self.queue.is_empty() || self.carried != self.said)
    }
}

#[derive(Debug)]
pub(super) struct Log {
    state: Mutex<State>,
    block: u32,
    end: Sectors,
}

impl Log {
    /// Over a log device that ends there. `block`: of the device that is logged.
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
            carried: 0,
            said: 0,
        };
        Log { state: Mutex::new(state), block, end }
    }

    /// Of how many bytes.
    pub(super) fn block(&self) -> u32 {
        self.block
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn is_enabled(&self) -> bool {
        self.lock().enabled
    }

    /// A write that was not flushed ended.
    pub(super) fn keep(&self, entry: Entry) {
        let mut state = self.lock();
        if state.enabled {
            state.unflushed.push(entry);
        }
    }

    /// What a flush that is asked for now makes durable.
    pub(super) fn take_unflushed(&self) -> Vec<Entry> {
        std::mem::take(&mut self.lock().unflushed)
    }

    /// These are on the medium now, in this order.
    pub(super) fn append(&self, entries: impl IntoIterator<Item = Entry>) {
        let mut state = self.lock();
        for entry in entries {
            let len = Sectors(((1 + entry.head.data_blocks()) * u64::from(self.block)) >> 9);
            if !state.enabled {
                return;
            }
            if state.next.0 + len.0 >= self.end.0 {
                // As in the kernel, whose counter has moved on by then.
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

    /// Write all that there is to write. Nobody else does meanwhile.
    fn write_out(&self, disks: &mut dyn Disks) -> io::Result<()> {
        loop {
            match self.next() {
                Next::Entries(backlog) => {
                    let mut bytes = vec![0; backlog.min(PIECE) as usize];
                    let at = self.fill(&mut bytes);
                    disks.write(LOG_DEVICE, Bytes(at), &bytes)?;
                }
                Next::Super(first) => {
                    let mut bytes = vec![0; self.block as usize];
                    first.fill(&mut bytes);
                    disks.write(LOG_DEVICE, Bytes(0), &bytes)?;
                    self.told(first.entries);
                }
                Next::Nothing => return Ok(()),
            }
        }
    }

    /// Entries, and the last sector that is in use.
    pub(super) fn status(&self) -> (u64, u64, bool) {
        let state = self.lock();
        (state.entries, state.next.0 - 1, state.enabled)
    }

    /// Whether there is something to write that nobody writes.
    fn is_waiting(&self) -> bool {
        self.lock().is_waiting()
    }

    /// How many entries there are.
    pub(super) fn entries(&self) -> u64 {
        self.lock().entries
    }

    /// Whether so many of them are in the log, or never will be.
    pub(super) fn holds(&self, entries: u64) -> bool {
        let state = self.lock();
        !state.enabled || state.said >= entries
    }

    /// Whether there is something to write and nobody who does: it is the caller's task from here on.
    pub(super) fn claim(&self) -> bool {
        let mut state = self.lock();
        let is_mine = state.is_waiting();
        state.busy |= is_mine;
        is_mine
    }

    /// What was claimed is left to whoever comes next.
    pub(super) fn leave(&self) {
        self.lock().busy = false;
    }

    /// The log device failed, or is full: nothing is logged any more.
    pub(super) fn give_up(&self) {
        let mut state = self.lock();
        state.enabled = false;
        state.busy = false;
        state.queue.clear();
        state.unflushed.clear();
    }

    /// What whoever has the claim is to write. Of what was written so far, all is on the log device.
    pub(super) fn next(&self) -> Next {
        let mut state = self.lock();
        match state.backlog(self.block) {
            0 if state.carried != state.said => {
                Next::Super(Super { entries: state.carried, block: self.block })
            }
            0 => {
                state.busy = false;
                Next::Nothing
            }
            backlog => Next::Entries(backlog),
        }
    }

    /// The super block says so many.
    pub(super) fn told(&self, entries: u64) {
        self.lock().said = entries;
    }

    /// Fill a buffer with what comes next; where it goes.
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
                state.carried += 1;
            }
        }
        debug_assert_eq!(filled, buffer.len(), "no more than the backlog is asked for");
        state.at += filled as u64;
        at
    }

    /// An entry from one byte of its own on: its block, then its data.
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
