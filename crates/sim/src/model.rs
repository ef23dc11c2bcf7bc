//! The sector model: the answers that a device may give, based on its requests and completions.
//!
//! For every sector it has the writes that may have determined its content, with their start and end. A read
//! may return the content of any of them, unless a later successful write hides it: one that started after
//! the hidden write ended, and ended before the read started. A failed write may have taken effect or not. A
//! discard may leave zeroes or the old content. After a power cut, only durable writes hide others: a
//! completed FUA write, or a write that ended before a successful flush started.
//!
//! Devices whose content changes by itself are not modelled. Times are the model's own count of events.

use crate::pattern::{Content, SECTOR_LEN, fill_sector, read_sector};
use block::{Flags, Op, Sectors, Status};
use std::cell::Cell;
use std::fmt;
use std::rc::Rc;

/// The end time of a write in flight.
const OPEN: u64 = u64::MAX;

/// A write to a sector.
#[derive(Clone, Copy, Debug)]
struct Write {
    /// Version of the data; `None`: zeroes.
    version: Option<u64>,
    start: u64,
    /// [`OPEN`] until it has ended.
    end: u64,
    /// Whether the write succeeded and its content is certain, so that it hides earlier writes.
    hides: bool,
    /// Whether the write was completed with FUA, or survived a power cut.
    stable: bool,
}

/// A request watched by the model.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Ticket {
    /// The start time of the request, which is also the version of a write's data.
    pub start: u64,
    op: Op,
    flags: Flags,
    first: u64,
    count: u64,
}

/// An answer that no correct device gives.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Violation {
    sector: u64,
    found: Content,
    allowed: Vec<Option<u64>>,
    when: &'static str,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sector {} {} holds {:?}; allowed:", self.sector, self.when, self.found)?;
        for version in &self.allowed {
            match version {
                Some(version) => write!(f, " version {version}")?,
                None => f.write_str(" zeroes")?,
            }
        }
        Ok(())
    }
}

impl std::error::Error for Violation {}

/// The model of one device.
#[derive(Clone, Debug)]
pub struct Model {
    sectors: Vec<Vec<Write>>,
    /// Start times of reads and extent queries in flight.
    reads: Vec<u64>,
    /// Latest start of a successful flush: writes that ended before it are stable.
    flushed: u64,
    /// Whether a successful discard leaves zeroes.
    discard_zeroes: bool,
    /// Shared with models copied from this one, so that versions are unique among all of them.
    clock: Rc<Cell<u64>>,
}

impl Model {
    /// Creates the model of a device of this many sectors, all zeroes.
    pub fn new(sectors: Sectors, discard_zeroes: bool) -> Model {
        let blank = Write { version: None, start: 0, end: 0, hides: true, stable: true };
        let sectors = vec![vec![blank]; sectors.0 as usize];
        Model { sectors, reads: Vec::new(), flushed: 0, discard_zeroes, clock: Rc::new(Cell::new(1)) }
    }

    /// Returns the model of a device that is a copy of this one from now on.
    ///
    /// # Panics
    /// If a request is in flight.
    #[must_use]
    pub fn copy(&self) -> Model {
        let open = self.sectors.iter().flatten().any(|write| write.end == OPEN);
        assert!(!open && self.reads.is_empty(), "a device is copied while a request is in flight");
        self.clone()
    }

    /// Returns the size of the device.
    pub fn device_len(&self) -> Sectors {
        Sectors(self.sectors.len() as u64)
    }

    /// Records a request that is about to be submitted. The data of a write must have version
    /// [`Ticket::start`].
    pub fn begin(&mut self, op: Op, flags: Flags, first: Sectors, count: Sectors) -> Ticket {
        debug_assert!(!op.is_special(), "this is the model of a device without zones: {op:?}");
        let start = self.tick();
        let ticket = Ticket { start, op, flags, first: first.0, count: count.0 };
        if matches!(op, Op::Read | Op::Extents) {
            self.reads.push(start);
        }
        if op.is_write() {
            let version = (op == Op::Write).then_some(start);
            let write = Write { version, start, end: OPEN, hides: false, stable: false };
            self.range(ticket).iter_mut().for_each(|sector| sector.push(write));
        }
        ticket
    }

    /// Records the completion of a request other than a read.
    pub fn end(&mut self, ticket: Ticket, status: Status) {
        let end = self.tick();
        self.reads.retain(|&start| start != ticket.start);
        if ticket.op == Op::Flush && status.is_ok() {
            self.flushed = self.flushed.max(ticket.start);
        }
        if !ticket.op.is_write() {
            return;
        }
        let certain = ticket.op != Op::Discard || self.discard_zeroes;
        let hides = status.is_ok() && certain;
        let stable = hides && ticket.flags.contains(Flags::FUA);
        let (flushed, reads) = (self.flushed, self.reads.iter().copied().min().unwrap_or(OPEN));
        for sector in self.range(ticket) {
            if let Some(write) = sector.iter_mut().find(|write| write.start == ticket.start) {
                *write = Write { end, hides, stable, ..*write };
            }
            let hider = |write: &&Write| write.is_stable(flushed) && write.end < reads;
            let newest = sector.iter().filter(hider).map(|write| write.start).max().unwrap_or(0);
            sector.retain(|write| write.end >= newest);
        }
    }

    /// Checks a completed read. `sectors` is its data, in order; it is ignored unless the read succeeded.
    ///
    /// # Errors
    /// [`Violation`] if a sector has a content that is not allowed.
    pub fn end_read<'a>(
        &mut self,
        ticket: Ticket,
        status: Status,
        sectors: impl Iterator<Item = &'a [u8]>,
    ) -> Result<(), Violation> {
        self.tick();
        self.reads.retain(|&start| start != ticket.start);
        if !status.is_ok() {
            return Ok(());
        }
        let mut count = 0;
        for (number, bytes) in (ticket.first..).zip(sectors) {
            self.check(number, bytes, ticket.start, "read by a request")?;
            count += 1;
        }
        assert_eq!(count, ticket.count, "the caller hands over every sector of the read");
        Ok(())
    }

    /// Returns whether a sector may be reported as zeroes to a request in flight.
    pub fn may_be_zero(&self, sector: Sectors, ticket: Ticket) -> bool {
        self.allowed(sector.0, ticket.start).any(|write| write.version.is_none())
    }

    /// Records a power cut: writes in flight may have taken effect, and writes that are not stable may be
    /// lost.
    pub fn power_cut(&mut self) {
        let now = self.tick();
        self.reads.clear();
        for sector in &mut self.sectors {
            let newest = sector
                .iter()
                .filter(|w| w.is_stable(self.flushed))
                .map(|write| write.start)
                .max()
                .unwrap_or(0);
            sector.retain(|write| write.end >= newest);
            for write in sector {
                write.stable = write.is_stable(self.flushed);
                write.hides = write.stable;
                write.end = write.end.min(now);
            }
        }
    }

    /// Records that a sector contains `bytes` after a power cut, which is its only possible content from now
    /// on.
    ///
    /// # Errors
    /// [`Violation`] if that content is not allowed.
    pub fn settle(&mut self, sector: Sectors, bytes: &[u8]) -> Result<(), Violation> {
        let now = self.tick();
        let version = self.check(sector.0, bytes, now, "after a power cut")?;
        self.sectors[sector.0 as usize] =
            vec![Write { version, start: now, end: now, hides: true, stable: true }];
        Ok(())
    }

    fn tick(&mut self) -> u64 {
        self.clock.set(self.clock.get() + 1);
        self.clock.get()
    }

    fn range(&mut self, ticket: Ticket) -> &mut [Vec<Write>] {
        &mut self.sectors[ticket.first as usize..(ticket.first + ticket.count) as usize]
    }

    /// Returns the writes whose content a read that started at `start` and ends now may return.
    fn allowed(&self, sector: u64, start: u64) -> impl Iterator<Item = &Write> {
        let writes = &self.sectors[sector as usize];
        let hiding = writes.iter().filter(move |write| write.hides && write.end < start);
        let newest = hiding.map(|write| write.start).max().unwrap_or(0);
        writes.iter().filter(move |write| write.end >= newest)
    }

    /// Returns whether the read overlaps a write in flight, and each byte is from before or after that write,
    /// as when the operation takes effect in two steps.
    fn may_be_torn(&self, sector: u64, bytes: &[u8], start: u64) -> bool {
        let mut known = vec![false; bytes.len()];
        for write in self.allowed(sector, start) {
            let mut content = [0; SECTOR_LEN];
            if let Some(version) = write.version {
                fill_sector(&mut content, sector, version);
            }
            known.iter_mut().zip(bytes.iter().zip(content)).for_each(|(known, (&a, b))| *known |= a == b);
        }
        self.sectors[sector as usize].iter().any(|write| write.end > start)
            && known.iter().all(|&known| known)
    }

    fn check(
        &self,
        sector: u64,
        bytes: &[u8],
        start: u64,
        when: &'static str,
    ) -> Result<Option<u64>, Violation> {
        assert_eq!(bytes.len(), SECTOR_LEN);
        let found = read_sector(bytes);
        let version = match found {
            Content::Zero => Some(None),
            Content::Data { sector: meant, version } if meant == sector => Some(Some(version)),
            _ => None,
        };
        match version {
            Some(version) if self.allowed(sector, start).any(|write| write.version == version) => Ok(version),
            None if self.may_be_torn(sector, bytes, start) => Ok(None),
            _ => {
                let allowed = self.allowed(sector, start).map(|write| write.version).collect();
                Err(Violation { sector, found, allowed, when })
            }
        }
    }
}

impl Write {
    fn is_stable(&self, flushed: u64) -> bool {
        self.hides && (self.stable || self.end < flushed)
    }
}

#[cfg(test)]
mod tests;
