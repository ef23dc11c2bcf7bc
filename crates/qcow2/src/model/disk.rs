//! An in-memory disk with power cuts, which may lose any sectors written since the last sync.

use super::rng::Rng;
use crate::Storage;
use crate::cache::SECTOR;
use std::io;
use std::sync::Mutex;

/// A change of the file that may be lost.
#[derive(Clone, Debug)]
pub(crate) enum Change {
    Write { at: u64, bytes: Vec<u8> },
    SetLen(u64),
}

/// An event in the order of occurrence.
#[derive(Clone, Debug)]
pub(crate) enum Event {
    Change(Change),
    Sync,
}

/// Rates and limits of injected faults.
#[derive(Clone, Copy, Default, Debug)]
pub(crate) struct Faults {
    /// Permille of writes that fail, with ENOSPC or EIO, after any part of them was done.
    pub(crate) writes: u32,
    /// Permille of syncs that fail.
    pub(crate) syncs: u32,
    /// Maximum length of the file in bytes.
    pub(crate) len_max: u64,
    /// Permille of reads and writes that are delayed, so that other threads overtake them.
    pub(crate) pauses: u32,
}

/// Durable content, and changes that may become durable.
#[derive(Clone, Default, Debug)]
pub(crate) struct Medium {
    pub(crate) durable: Vec<u8>,
    pub(crate) pending: Vec<Change>,
}

#[derive(Debug)]
struct Inner {
    now: Vec<u8>,
    medium: Medium,
    /// Events since [`MemoryDisk::mark`].
    events: Vec<Event>,
    faults: Faults,
    rng: Rng,
}

/// The disk.
#[derive(Debug)]
pub(crate) struct MemoryDisk(Mutex<Inner>);

fn apply(file: &mut Vec<u8>, change: &Change) {
    match change {
        Change::SetLen(len) => file.resize(*len as usize, 0),
        Change::Write { at, bytes } => {
            let (at, end) = (*at as usize, *at as usize + bytes.len());
            file.resize(file.len().max(end), 0);
            file[at..end].copy_from_slice(bytes);
        }
    }
}

impl Medium {
    pub(crate) fn event(&mut self, event: &Event) {
        match event {
            Event::Change(change) => self.pending.push(change.clone()),
            Event::Sync => {
                for change in std::mem::take(&mut self.pending) {
                    apply(&mut self.durable, &change);
                }
            }
        }
    }

    /// Returns the content after a power cut: it keeps a random subset of the pending sectors, and one of
    /// the lengths that the file had.
    pub(crate) fn cut(&self, rng: &mut Rng) -> Vec<u8> {
        let survives = *rng.pick(&[0, 100, 500, 900, 1000]);
        // Occasionally a single change is lost, and all others are kept.
        let lost = rng.below(self.pending.len() as u64 + 1) as usize;
        let loses_one = rng.chance(300);
        let (mut file, mut lens) = (self.durable.clone(), vec![self.durable.len()]);
        for (number, change) in self.pending.iter().enumerate() {
            match change {
                Change::SetLen(len) => lens.push(*len as usize),
                Change::Write { at, bytes } => {
                    for (sector, piece) in bytes.chunks(SECTOR).enumerate() {
                        let kept = if loses_one { number != lost } else { rng.chance(survives) };
                        if kept {
                            let at = at + (sector * SECTOR) as u64;
                            apply(&mut file, &Change::Write { at, bytes: piece.to_vec() });
                        }
                    }
                    lens.push(*at as usize + bytes.len());
                }
            }
        }
        // The length is not below the length of the durable content, unless the file was truncated.
        let len = if survives == 1000 { *lens.last().expect("one") } else { *rng.pick(&lens) };
        let least = self.pending.iter().filter_map(|change| match change {
            Change::SetLen(len) => Some(*len as usize),
            Change::Write { .. } => None,
        });
        let least = least.min().unwrap_or(self.durable.len()).min(self.durable.len());
        file.resize(len.max(least), 0);
        file
    }
}

impl MemoryDisk {
    pub(crate) fn new(file: Vec<u8>, rng: Rng) -> MemoryDisk {
        let medium = Medium { durable: file.clone(), pending: Vec::new() };
        let faults = Faults { len_max: u64::MAX, ..Faults::default() };
        MemoryDisk(Mutex::new(Inner { now: file, medium, events: Vec::new(), faults, rng }))
    }

    fn inner(&self) -> std::sync::MutexGuard<'_, Inner> {
        self.0.lock().expect("nobody panics in here")
    }

    /// Occasionally delays a request so that others overtake it.
    fn pause(&self) {
        let pauses = {
            let mut inner = self.inner();
            let pauses = inner.faults.pauses;
            inner.rng.chance(pauses)
        };
        if pauses {
            std::thread::sleep(std::time::Duration::from_micros(200));
        }
    }

    pub(crate) fn set_faults(&self, faults: Faults) {
        self.inner().faults = faults;
    }

    /// Starts recording events, and returns the current medium.
    pub(crate) fn mark(&self) -> Medium {
        let mut inner = self.inner();
        inner.events.clear();
        inner.medium.clone()
    }

    /// Returns the events since the mark.
    pub(crate) fn events(&self) -> Vec<Event> {
        self.inner().events.clone()
    }

    /// Returns the current medium.
    pub(crate) fn medium(&self) -> Medium {
        self.inner().medium.clone()
    }

    /// Returns the content after the process is killed.
    pub(crate) fn now(&self) -> Vec<u8> {
        self.inner().now.clone()
    }
}

impl Inner {
    fn change(&mut self, change: Change) {
        apply(&mut self.now, &change);
        let event = Event::Change(change);
        self.medium.event(&event);
        self.events.push(event);
    }
}

impl Storage for MemoryDisk {
    fn read_at(&self, into: &mut [u8], at: u64) -> io::Result<()> {
        self.pause();
        let inner = self.inner();
        let there = inner.now.get(at as usize..).unwrap_or_default();
        let len = there.len().min(into.len());
        into[..len].copy_from_slice(&there[..len]);
        into[len..].fill(0);
        Ok(())
    }

    fn write_at(&self, from: &[u8], at: u64) -> io::Result<()> {
        self.pause();
        let mut inner = self.inner();
        let permille = inner.faults.writes;
        if inner.rng.chance(permille) {
            let sectors = inner.rng.below((from.len() / SECTOR) as u64 + 1) as usize;
            if sectors > 0 && at.is_multiple_of(SECTOR as u64) {
                inner.change(Change::Write { at, bytes: from[..sectors * SECTOR].to_vec() });
            }
            let kind = *inner.rng.pick(&[io::ErrorKind::StorageFull, io::ErrorKind::Other]);
            return Err(kind.into());
        }
        inner.change(Change::Write { at, bytes: from.to_vec() });
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        let mut inner = self.inner();
        let permille = inner.faults.syncs;
        if inner.rng.chance(permille) {
            return Err(io::ErrorKind::Other.into());
        }
        inner.medium.event(&Event::Sync);
        inner.events.push(Event::Sync);
        Ok(())
    }

    fn len(&self) -> io::Result<u64> {
        Ok(self.inner().now.len() as u64)
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        let mut inner = self.inner();
        if len > inner.faults.len_max {
            return Err(io::ErrorKind::StorageFull.into());
        }
        inner.change(Change::SetLen(len));
        Ok(())
    }

    /// The content is lost at once, and arbitrary data may be read.
    fn punch(&self, at: u64, len: u64) {
        let mut inner = self.inner();
        let end = (at + len).min(inner.now.len() as u64);
        if at < end {
            inner.change(Change::Write { at, bytes: vec![0xdd; (end - at) as usize] });
        }
    }
}
