//! The model of a power cut: which writes of a log may be lost at a moment, and in which units.
//!
//! At a cut, which is a position between two events, a write is **durable** if it has FUA and completed before
//! the cut, or if it completed before a flush was submitted that completed before the cut. Discards and writes
//! of zeroes follow the rules of writes. Every other write that was submitted before the cut is **optional**:
//! it may be present or lost, independent of all others. Writes that are present apply in the order of their
//! submission, so of two to the same block the later one wins.
//!
//! With a bounded cache of N bytes, the device has written out the oldest completed writes beyond the last N
//! bytes: these are durable, too. A write in flight is always optional.
//!
//! *Invariant:* `tests/legal.rs` has a second implementation of these rules, slow and simple, which confirms
//! states that the explorer generates.

use crate::log::{Event, Log};
use std::fmt;
use std::str::FromStr;

/// The units in which writes are lost.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Variant {
    /// The device writes in order: the lost writes are the last ones, whole.
    Prefix,
    /// Any optional writes are lost, each whole.
    Subset,
    /// Any atomic units of optional writes are lost.
    Torn,
}

impl fmt::Display for Variant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Variant::Prefix => "prefix",
            Variant::Subset => "subset",
            Variant::Torn => "torn",
        })
    }
}

impl FromStr for Variant {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Variant, Self::Err> {
        match text {
            "prefix" => Ok(Variant::Prefix),
            "subset" => Ok(Variant::Subset),
            "torn" => Ok(Variant::Torn),
            _ => Err("write prefix, subset or torn"),
        }
    }
}

/// A model of a device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Model {
    /// The units in which writes are lost.
    pub variant: Variant,
    /// The device's atomic write in bytes: a power of two, 512 or more. Units are aligned to it.
    pub atomic: u64,
    /// The size of the volatile cache in bytes; `None`: unbounded.
    pub cache: Option<u64>,
}

/// The unit of a [`Piece`] that stands for the whole write.
pub const WHOLE: u32 = u32::MAX;

/// A lost write, or one lost atomic unit of it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Piece {
    /// The number of the write.
    pub write: u32,
    /// The unit from the first that the write touches, or [`WHOLE`].
    pub unit: u32,
}

impl Piece {
    /// Returns the piece that is all of a write.
    pub const fn whole(write: u32) -> Piece {
        Piece { write, unit: WHOLE }
    }
}

/// A state of the device: the moment of the cut and what is lost.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct State {
    /// The number of events before the cut.
    pub cut: u32,
    /// The lost pieces, sorted and unique.
    pub lost: Vec<Piece>,
}

impl State {
    /// Returns the state in which all submitted writes are present.
    pub const fn all_present(cut: u32) -> State {
        State { cut, lost: Vec::new() }
    }

    /// Creates a state; sorts the lost pieces.
    pub fn new(cut: u32, mut lost: Vec<Piece>) -> State {
        lost.sort_unstable();
        lost.dedup();
        State { cut, lost }
    }
}

/// Why the model does not permit a state.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Illegal {
    /// The cut is beyond the log.
    #[error("the log has fewer than {0} events")]
    Cut(u32),
    /// The write is durable, or was not submitted.
    #[error("write {0} cannot be lost there")]
    Present(u32),
    /// The variant has no such pieces.
    #[error("write {0} cannot be lost in part")]
    Part(u32),
    /// The lost writes are not the last ones.
    #[error("writes after {0} are present, so it is")]
    Order(u32),
}

/// What the model needs from the events before a cut.
#[derive(Clone, Debug)]
pub(crate) struct Moments {
    /// By event: the first write that was optional after it, if any later one is.
    floor: Vec<u32>,
    /// By flush in order of completion: the event of completion, and the latest submission so far.
    flushed: Vec<(u32, u32)>,
    /// The largest number of a durable FUA write, by event of its completion: for [`Variant::Prefix`].
    fua: Vec<(u32, u32)>,
}

impl Moments {
    pub(crate) fn new(log: &Log) -> Moments {
        let mut moments =
            Moments { floor: Vec::with_capacity(log.events.len()), flushed: Vec::new(), fua: Vec::new() };
        let mut first = 0_u32;
        let mut latest = 0;
        let mut fua_max = 0;
        for (at, event) in log.events.iter().enumerate() {
            let at = at as u32;
            match *event {
                Event::Flushed(number) => {
                    latest = latest.max(log.flushes[number as usize].submitted);
                    moments.flushed.push((at, latest));
                }
                Event::Complete(number) if log.writes[number as usize].fua => {
                    fua_max = fua_max.max(number);
                    moments.fua.push((at, fua_max));
                }
                _ => {}
            }
            let durable = |write: &crate::log::Write| {
                write.completed.is_some_and(|done| done < latest || write.fua && done <= at)
            };
            while log.writes.get(first as usize).is_some_and(|write| write.submitted <= at && durable(write))
            {
                first += 1;
            }
            moments.floor.push(first);
        }
        moments
    }

    /// Returns the latest submission of a flush that completed before the cut.
    fn flushed_before(&self, cut: u32) -> u32 {
        let count = self.flushed.partition_point(|(at, _)| *at < cut);
        count.checked_sub(1).map_or(0, |last| self.flushed[last].1)
    }
}

impl Model {
    /// Returns whether a write is durable at a cut, for an unbounded cache.
    fn is_durable(log: &Log, flushed: u32, cut: u32, write: u32) -> bool {
        let write = &log.writes[write as usize];
        write.completed.is_some_and(|done| done < cut && (write.fua || done < flushed))
    }

    /// Returns the writes that may be lost at a cut, in ascending order.
    pub(crate) fn optional(&self, log: &Log, moments: &Moments, cut: u32) -> Vec<u32> {
        let flushed = moments.flushed_before(cut);
        let first = cut.checked_sub(1).map_or(0, |at| moments.floor[at as usize]);
        let mut optional: Vec<u32> = (first..log.writes_before(cut))
            .filter(|write| !Model::is_durable(log, flushed, cut, *write))
            .collect();
        if let Some(cache) = self.cache {
            let mut completed: Vec<(u32, u32)> = optional
                .iter()
                .filter_map(|write| {
                    Some((log.writes[*write as usize].completed.filter(|at| *at < cut)?, *write))
                })
                .collect();
            completed.sort_unstable();
            let mut held = 0_u64;
            let mut written = std::collections::HashSet::new();
            for (_, write) in completed.iter().rev() {
                // A discard occupies no cache.
                let data = log.writes[*write as usize].data_len();
                held = held.saturating_add(data);
                if held > cache {
                    written.insert(*write);
                }
            }
            optional.retain(|write| !written.contains(write));
        }
        if self.variant == Variant::Prefix
            && let Some(last) = self.last_durable(log, moments, cut, &optional)
        {
            optional.retain(|write| *write > last);
        }
        optional
    }

    /// Returns the last durable write before a cut.
    fn last_durable(&self, log: &Log, moments: &Moments, cut: u32, optional: &[u32]) -> Option<u32> {
        let count = moments.fua.partition_point(|(at, _)| *at < cut);
        let fua = count.checked_sub(1).map(|last| moments.fua[last].1);
        let start = optional.first().copied().unwrap_or(log.writes_before(cut));
        let mut expected = optional.iter().copied().peekable();
        let mut last = start.checked_sub(1);
        for write in start..log.writes_before(cut) {
            if expected.peek() == Some(&write) {
                expected.next();
            } else {
                last = Some(write);
            }
        }
        last.max(fua)
    }

    /// Returns the number of atomic units that a write touches.
    pub fn units(&self, log: &Log, write: u32) -> u32 {
        let write = &log.writes[write as usize];
        let last = (write.offset + write.len - 1) / self.atomic;
        (last - write.offset / self.atomic + 1) as u32
    }

    /// Checks whether the model permits a state.
    pub(crate) fn allows(&self, log: &Log, moments: &Moments, state: &State) -> Result<(), Illegal> {
        if state.cut as usize > log.events.len() {
            return Err(Illegal::Cut(state.cut));
        }
        if state.lost.is_empty() {
            return Ok(());
        }
        let optional = self.optional(log, moments, state.cut);
        for piece in &state.lost {
            if optional.binary_search(&piece.write).is_err() {
                return Err(Illegal::Present(piece.write));
            }
            let is_part = piece.unit != WHOLE;
            if is_part && (self.variant != Variant::Torn || piece.unit >= self.units(log, piece.write)) {
                return Err(Illegal::Part(piece.write));
            }
        }
        if self.variant == Variant::Prefix {
            let first = state.lost[0].write;
            let from = optional.partition_point(|write| *write < first);
            let same = optional[from..].iter().eq(state.lost.iter().map(|piece| &piece.write));
            if !same {
                return Err(Illegal::Order(first));
            }
        }
        Ok(())
    }
}

impl crate::log::Write {
    /// Returns the number of bytes of data.
    pub fn data_len(&self) -> u64 {
        if self.kind == crate::log::Kind::Data { self.len } else { 0 }
    }
}
