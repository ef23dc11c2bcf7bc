//! The device of a state: a view of the log and the base, with the checker's own writes above it.

use super::served::{Disk, Request};
use super::written::{IN_MEMORY_MAX, Written};
use crash::{CHUNK, CHUNKS_MAX, State, View};
use std::collections::HashSet;
use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

/// A device whose state is replaced between checks.
pub(super) struct Slot {
    view: Arc<View>,
    state: State,
    /// The chunks that the checker wrote.
    written: Written,
    /// The chunks of the log that were read from the state; beyond [`CHUNKS_MAX`] no more are noted.
    read: HashSet<u64>,
}

/// A slot that its checker's device and its worker share.
#[derive(Clone)]
pub(super) struct Shared(Arc<Mutex<Slot>>);

impl Shared {
    /// `dir`: for what a checker writes beyond a limit.
    pub(super) fn new(view: Arc<View>, dir: &Path) -> Shared {
        let written = Written::new(dir.to_owned(), IN_MEMORY_MAX);
        let slot = Slot { view, state: State::all_present(0), written, read: HashSet::new() };
        Shared(Arc::new(Mutex::new(slot)))
    }

    fn with<T>(&self, then: impl FnOnce(&mut Slot) -> T) -> T {
        then(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Replaces the state, and clears the chunks that the last check wrote and read.
    pub(super) fn set(&self, state: &State) {
        self.with(|slot| {
            slot.state = state.clone();
            slot.written.clear();
            slot.read.clear();
        });
    }

    /// Returns the chunks that were read, and clears the record of them.
    pub(super) fn take_read(&self) -> Vec<u64> {
        self.with(|slot| std::mem::take(&mut slot.read).into_iter().collect())
    }
}

impl Slot {
    fn note(&mut self, chunk: u64) {
        if self.read.len() <= CHUNKS_MAX && self.view.is_touched(chunk) {
            self.read.insert(chunk);
        }
    }

    fn read(&mut self, at: u64, into: &mut [u8]) -> io::Result<()> {
        let end = at + into.len() as u64;
        self.view.read(&self.state, at, into)?;
        for chunk in at / CHUNK..end.div_ceil(CHUNK) {
            if !self.written.contains(chunk) {
                self.note(chunk);
                continue;
            }
            let from = at.max(chunk * CHUNK);
            let to = end.min((chunk + 1) * CHUNK);
            let target = &mut into[(from - at) as usize..(to - at) as usize];
            self.written.read(chunk, (from - chunk * CHUNK) as usize, target)?;
        }
        Ok(())
    }

    /// Writes `len` bytes of `data`, or zeroes if `data` is empty.
    fn write(&mut self, at: u64, len: u64, data: &[u8]) -> io::Result<()> {
        let end = at + len;
        for chunk in at / CHUNK..end.div_ceil(CHUNK) {
            let (from, to) = (at.max(chunk * CHUNK), end.min((chunk + 1) * CHUNK));
            if !self.written.contains(chunk) {
                let mut bytes = vec![0; CHUNK as usize].into_boxed_slice();
                if to - from < CHUNK {
                    self.view.read_chunk(&self.state, chunk, &mut bytes)?;
                    self.note(chunk);
                }
                self.written.add(chunk, bytes)?;
            }
            let part = if data.is_empty() { data } else { &data[(from - at) as usize..(to - at) as usize] };
            self.written.write(chunk, (from - chunk * CHUNK) as usize, (to - from) as usize, part)?;
        }
        Ok(())
    }
}

impl Disk for Shared {
    fn submit(&mut self, _: &Request, _: &[u8], _: u32) -> io::Result<u32> {
        Ok(0)
    }

    fn complete(&mut self, request: &Request, data: &[u8], _: u32) -> io::Result<()> {
        self.with(|slot| match *request {
            Request::Write { at, len, .. } => slot.write(at, u64::from(len), data),
            Request::Clear { at, len, .. } => slot.write(at, len, &[]),
            Request::Flush | Request::Read { .. } => Ok(()),
        })
    }

    fn read(&mut self, at: u64, into: &mut [u8]) -> io::Result<()> {
        self.with(|slot| slot.read(at, into))
    }
}
