//! What of a trace is wanted: read by tracers at every event, changed by anyone while they run.

use crate::Kind;
use block::Op;
use serde::{Deserialize, Serialize};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Set in the mask of a filter that lets something through at all.
const RUNNING: u64 = 1 << 63;
const OPS_SHIFT: u32 = 16;
/// Operations that are no I/O to blktrace: its 16 categories have no word for them.
const UNTOLD: [Op; 9] = [
    Op::Extents,
    Op::ReportZones,
    Op::ZoneReset,
    Op::ZoneResetAll,
    Op::ZoneOpen,
    Op::ZoneClose,
    Op::ZoneFinish,
    Op::ReadTuples,
    Op::WriteTuples,
];

/// A filter as tracers read it: a change reaches them at the next event.
#[derive(Debug)]
pub struct Filter {
    /// Kinds in the lowest 16 bits, operations in the next 16, and whether it runs.
    mask: AtomicU64,
    /// The range, in bytes: from here …
    start: AtomicU64,
    /// … to before here.
    end: AtomicU64,
}

/// A filter as it is written; what is empty lets everything through.
#[derive(Clone, Default, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct FilterText {
    /// Letters or blktrace's names, with commas: `Q,D,C` or `queue,issue,complete`.
    pub actions: String,
    /// Names of operations, with commas: `read,write`.
    pub ops: String,
    /// `START-END`: sectors from START up to and with END, either of which may be left out.
    pub sectors: String,
}

/// What is wrong with a filter.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum FilterError {
    /// Such an action there is not.
    #[error(
        "there is no action \"{0}\" (there are Q X A G M F P U I D C R, or queue, split, remap, get, merge, front-merge, plug, unplug, insert, issue, \
         complete, requeue)"
    )]
    Action(String),
    /// Such an operation there is not.
    #[error(
        "there is no operation \"{0}\" to trace (there are read, write, flush, discard, write-zeroes, prefetch, zone-append)"
    )]
    Op(String),
    /// That is no range.
    #[error("\"{0}\" is no range of sectors (write START-END, START- or -END)")]
    Sectors(String),
}

impl FilterText {
    /// The same for whoever draws requests from their beginning to their end, as a Chrome trace does: what ends is always
    /// told, and steps that take no time are not unless they were asked for.
    #[must_use]
    pub fn with_ends(mut self) -> FilterText {
        if self.actions.is_empty() {
            self.actions = "queue,split,issue".into();
        }
        self.actions.push_str(",complete,requeue,done");
        self
    }

    /// Whether the end of requests is to be told, besides their completion.
    ///
    /// # Errors
    /// [`FilterError`]
    pub fn asks_for_ends(&self) -> Result<bool, FilterError> {
        Ok(self.compile()?.0 >> Kind::Done as u64 & 1 != 0)
    }

    /// The mask and the range in bytes.
    ///
    /// # Errors
    /// What it names and there is not.
    fn compile(&self) -> Result<(u64, u64, u64), FilterError> {
        let mut mask = 0;
        for word in words(&self.actions) {
            let named = Kind::NAMED.iter().find(|(_, letter, name)| *letter == word || *name == word);
            mask |= 1 << named.ok_or_else(|| FilterError::Action(word.to_owned()))?.0 as u64;
        }
        if mask == 0 {
            // All that blktrace has a letter for.
            let told = Kind::NAMED.iter().filter(|row| row.0 != Kind::Done);
            mask = told.map(|row| 1 << row.0 as u64).sum();
        }
        let told = |op: &&Op| !UNTOLD.contains(op);
        let mut ops = 0;
        for word in words(&self.ops) {
            let op = Op::ALL.iter().filter(told).find(|op| op.name() == word);
            ops |= 1 << *op.ok_or_else(|| FilterError::Op(word.to_owned()))? as u64;
        }
        if ops == 0 {
            ops = Op::ALL.iter().filter(told).map(|op| 1 << *op as u64).sum();
        }
        let (start, end) = self.range()?;
        Ok((mask | ops << OPS_SHIFT, start, end))
    }

    fn range(&self) -> Result<(u64, u64), FilterError> {
        if self.sectors.is_empty() {
            return Ok((0, u64::MAX));
        }
        let wrong = || FilterError::Sectors(self.sectors.clone());
        let (start, end) = self.sectors.split_once('-').ok_or_else(wrong)?;
        let bytes = |text: &str, or: u64| match text {
            "" => Ok(or),
            text => text.parse().ok().and_then(|n: u64| n.checked_mul(512)).ok_or_else(wrong),
        };
        let (start, end) = (bytes(start, 0)?, bytes(end, u64::MAX - 512)?.saturating_add(512));
        if start < end { Ok((start, end)) } else { Err(wrong()) }
    }
}

fn words(text: &str) -> impl Iterator<Item = &str> {
    text.split(',').map(str::trim).filter(|word| !word.is_empty())
}

impl Filter {
    /// From what was written, letting it through from now on.
    ///
    /// # Errors
    /// [`FilterError`].
    pub fn new(text: &FilterText) -> Result<Filter, FilterError> {
        let (mask, start, end) = text.compile()?;
        Ok(Filter {
            mask: AtomicU64::new(mask | RUNNING),
            start: AtomicU64::new(start),
            end: AtomicU64::new(end),
        })
    }

    /// Let that through from now on. Whether anything is let through does not change.
    ///
    /// # Errors
    /// [`FilterError`]: it is as before.
    pub fn set(&self, text: &FilterText) -> Result<(), FilterError> {
        let (mask, start, end) = text.compile()?;
        // An event between these stores may pass by half of each, as one just before or after might.
        self.start.store(start, Relaxed);
        self.end.store(end, Relaxed);
        self.change(|was| mask | was & RUNNING);
        Ok(())
    }

    /// Let what the filter wants through, or nothing.
    pub fn run(&self, running: bool) {
        self.change(|mask| if running { mask | RUNNING } else { mask & !RUNNING });
    }

    /// In one step: two who change it at once do not undo each other.
    fn change(&self, change: impl Fn(u64) -> u64) {
        let _ = self.mask.fetch_update(Relaxed, Relaxed, |mask| Some(change(mask)));
    }

    /// Whether it lets anything through.
    pub fn is_running(&self) -> bool {
        self.mask.load(Relaxed) & RUNNING != 0
    }

    /// The kinds that are wanted of such a request, as bits; 0: it is not wanted at all.
    #[inline]
    pub(crate) fn kinds(&self, op: Op, offset: u64, len: u64) -> u64 {
        let mask = self.mask.load(Relaxed);
        if mask & RUNNING == 0 || mask >> OPS_SHIFT >> op as u64 & 1 == 0 {
            return 0;
        }
        let within =
            offset < self.end.load(Relaxed) && offset.saturating_add(len.max(1)) > self.start.load(Relaxed);
        if within { mask & 0xffff } else { 0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(actions: &str, ops: &str, sectors: &str) -> FilterText {
        FilterText { actions: actions.into(), ops: ops.into(), sectors: sectors.into() }
    }

    #[test]
    fn an_empty_filter_lets_all_io_through_and_the_end_of_requests_not() {
        let filter = Filter::new(&FilterText::default()).unwrap();
        assert_eq!(filter.kinds(Op::Read, 0, 512), 0x3cff);
        assert_eq!(filter.kinds(Op::Extents, 0, 512), 0);
        assert_eq!(filter.kinds(Op::ZoneReset, 0, 0), 0);
    }

    #[test]
    fn actions_operations_and_sectors_are_chosen_and_changed_while_it_runs() {
        let filter = Filter::new(&text("Q,complete", "write", "8-15")).unwrap();
        let both = 1 << Kind::Queue as u64 | 1 << Kind::Complete as u64;
        assert_eq!(filter.kinds(Op::Write, 8 * 512, 512), both);
        assert_eq!(filter.kinds(Op::Write, 0, 8 * 512), 0, "it ends before");
        assert_eq!(filter.kinds(Op::Write, 0, 8 * 512 + 1), both, "it reaches into it");
        assert_eq!(filter.kinds(Op::Write, 16 * 512, 512), 0);
        assert_eq!(filter.kinds(Op::Read, 8 * 512, 512), 0);
        filter.run(false);
        assert_eq!(filter.kinds(Op::Write, 8 * 512, 512), 0);
        filter.set(&text("", "read", "")).unwrap();
        assert!(!filter.is_running(), "another filter does not start it");
        filter.run(true);
        assert_eq!(filter.kinds(Op::Read, u64::MAX - 512, 512), 0x3cff);
        assert_eq!(filter.kinds(Op::Read, u64::MAX - 512, 4096), 0x3cff, "what reaches past all offsets");
    }

    #[test]
    fn ends_are_told_when_they_are_asked_for() {
        assert_eq!(text("", "write", "").asks_for_ends(), Ok(false));
        assert_eq!(text("Q,done", "", "").asks_for_ends(), Ok(true));
        for actions in ["", "Q"] {
            let filter = Filter::new(&text(actions, "write", "").with_ends()).unwrap();
            let ends = 1 << Kind::Complete as u64 | 1 << Kind::Requeue as u64 | 1 << Kind::Done as u64;
            assert_eq!(filter.kinds(Op::Write, 0, 512) & ends, ends);
            assert_eq!(filter.kinds(Op::Read, 0, 512), 0);
        }
    }

    #[test]
    fn a_filter_that_makes_no_sense_is_refused_and_changes_nothing() {
        let filter = Filter::new(&text("Q", "", "")).unwrap();
        for wrong in [text("Z", "", ""), text("", "eat", ""), text("", "extents", ""), text("", "", "9")] {
            assert!(filter.set(&wrong).is_err(), "{wrong:?}");
        }
        for sectors in ["9-8", "a-b", "-x", "99999999999999999999-"] {
            assert!(filter.set(&text("", "", sectors)).is_err(), "{sectors}");
        }
        assert_eq!(filter.kinds(Op::Read, 0, 1), 1);
    }
}
