//! Filter of a trace. Tracers read it for every event; any thread may change it at the same time.

use crate::Kind;
use block::Op;
use serde::{Deserialize, Serialize};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Bit of the mask that is set while the filter is enabled.
const RUNNING: u64 = 1 << 63;
/// Bit of the mask that is set while only some operations or sectors are selected.
const SELECTIVE: u64 = 1 << 62;
const OPS_SHIFT: u32 = 16;
/// Operations that are not traced, because none of blktrace's 16 categories fits them.
const UNTRACED: [Op; 10] = [
    Op::Extents,
    Op::ReportZones,
    Op::ZoneReset,
    Op::ZoneResetAll,
    Op::ZoneOpen,
    Op::ZoneClose,
    Op::ZoneFinish,
    Op::ReadTuples,
    Op::WriteTuples,
    Op::CompareAndWrite,
];

/// A filter as tracers read it: a change takes effect at the next event.
#[derive(Debug)]
pub struct Filter {
    /// Kinds in the lowest 16 bits, operations in the next 16, and the enabled bit.
    mask: AtomicU64,
    /// Start of the range, in bytes.
    start: AtomicU64,
    /// End of the range (exclusive), in bytes.
    end: AtomicU64,
}

/// A filter as text; an empty field passes everything.
#[derive(Clone, Default, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct FilterText {
    /// Letters or blktrace's names, comma-separated: `Q,D,C` or `queue,issue,complete`.
    pub actions: String,
    /// Names of operations, comma-separated: `read,write`.
    pub ops: String,
    /// `START-END`: sectors from START to END inclusive; either may be omitted.
    pub sectors: String,
}

/// The reason why a filter is invalid.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum FilterError {
    /// The action is unknown.
    #[error(
        "unknown action \"{0}\" (actions: Q X A G M F P U I D C R m, or queue, split, remap, get, merge, front-merge, plug, unplug, insert, \
         issue, complete, requeue, notify)"
    )]
    Action(String),
    /// The operation is unknown.
    #[error(
        "unknown operation \"{0}\" (operations: read, write, flush, discard, write-zeroes, prefetch, zone-append)"
    )]
    Op(String),
    /// The sectors are not a range.
    #[error("\"{0}\" is not a range of sectors (write START-END, START- or -END)")]
    Sectors(String),
}

impl FilterText {
    /// Returns the filter for a Chrome trace, which shows requests from start to end and in each layer. It
    /// adds the events that end a request and those of layers.
    #[must_use]
    pub fn with_ends(mut self) -> FilterText {
        if self.actions.is_empty() {
            self.actions = "queue,split,merge,front-merge,notify".into();
        }
        self.actions.push_str(",complete,requeue,done,layer");
        self
    }

    /// Returns whether events are selected that only a Chrome trace shows: the ends of requests, and layers.
    ///
    /// # Errors
    /// [`FilterError`].
    pub fn asks_for_ends(&self) -> Result<bool, FilterError> {
        Ok(self.compile()?.0 & (1 << Kind::Done as u64 | 1 << Kind::Layer as u64) != 0)
    }

    /// Parses the filter to its mask, and the start and end of its range in bytes.
    ///
    /// # Errors
    /// [`FilterError`] for an unknown name or an invalid range.
    fn compile(&self) -> Result<(u64, u64, u64), FilterError> {
        let mut mask = 0;
        for word in words(&self.actions) {
            let named = Kind::NAMED.iter().find(|(_, letter, name)| *letter == word || *name == word);
            mask |= 1 << named.ok_or_else(|| FilterError::Action(word.to_owned()))?.0 as u64;
        }
        if mask == 0 {
            // Without a selection all events that blktrace has a letter for are traced.
            let traced = Kind::NAMED.iter().filter(|row| !matches!(row.0, Kind::Done | Kind::Layer));
            mask = traced.map(|row| 1 << row.0 as u64).sum();
        }
        let traced = |op: &&Op| !UNTRACED.contains(op);
        let mut ops = 0;
        for word in words(&self.ops) {
            let op = Op::ALL.iter().filter(traced).find(|op| op.name() == word);
            ops |= 1 << *op.ok_or_else(|| FilterError::Op(word.to_owned()))? as u64;
        }
        if ops != 0 || !self.sectors.is_empty() {
            mask |= SELECTIVE;
        }
        if ops == 0 {
            ops = Op::ALL.iter().filter(traced).map(|op| 1 << *op as u64).sum();
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
    /// Parses a filter. It is enabled at first.
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

    /// Replaces the filter. It stays enabled or disabled.
    ///
    /// # Errors
    /// [`FilterError`]: the filter is unchanged.
    pub fn set(&self, text: &FilterText) -> Result<(), FilterError> {
        let (mask, start, end) = text.compile()?;
        // An event between these stores may be compared with parts of the old and the new filter.
        self.start.store(start, Relaxed);
        self.end.store(end, Relaxed);
        self.change(|was| mask | was & RUNNING);
        Ok(())
    }

    /// Enables or disables the filter. A disabled filter passes no event.
    pub fn run(&self, running: bool) {
        self.change(|mask| if running { mask | RUNNING } else { mask & !RUNNING });
    }

    /// Changes the mask atomically, so that concurrent changes are not lost.
    fn change(&self, change: impl Fn(u64) -> u64) {
        let _ = self.mask.fetch_update(Relaxed, Relaxed, |mask| Some(change(mask)));
    }

    /// Returns whether the filter is enabled.
    pub fn is_running(&self) -> bool {
        self.mask.load(Relaxed) & RUNNING != 0
    }

    /// Returns the kinds of events to trace for a request with this operation, offset and length (in bytes),
    /// as bits; 0: none.
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

    /// Returns whether commands are traced from their beginning to their end, whatever their requests are.
    #[inline]
    pub(crate) fn passes_commands(&self) -> bool {
        let mask = self.mask.load(Relaxed);
        mask & (RUNNING | SELECTIVE) == RUNNING && mask >> Kind::Command as u64 & 1 != 0
    }

    /// Returns whether the ends of commands are traced.
    #[inline]
    pub(crate) fn passes_command_ends(&self) -> bool {
        let mask = self.mask.load(Relaxed);
        mask & RUNNING != 0 && mask >> Kind::Command as u64 & 1 != 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(actions: &str, ops: &str, sectors: &str) -> FilterText {
        FilterText { actions: actions.into(), ops: ops.into(), sectors: sectors.into() }
    }

    #[test]
    fn an_empty_filter_passes_all_io_but_not_the_end_of_requests() {
        let filter = Filter::new(&FilterText::default()).unwrap();
        assert_eq!(filter.kinds(Op::Read, 0, 512), 0xbcff);
        assert_eq!(filter.kinds(Op::Extents, 0, 512), 0);
        assert_eq!(filter.kinds(Op::ZoneReset, 0, 0), 0);
    }

    #[test]
    fn actions_operations_and_sectors_are_selected_and_changed_while_enabled() {
        let filter = Filter::new(&text("Q,complete", "write", "8-15")).unwrap();
        let both = 1 << Kind::Queue as u64 | 1 << Kind::Complete as u64;
        assert_eq!(filter.kinds(Op::Write, 8 * 512, 512), both);
        assert_eq!(filter.kinds(Op::Write, 0, 8 * 512), 0, "it ends before");
        assert_eq!(filter.kinds(Op::Write, 0, 8 * 512 + 1), both, "it overlaps the range");
        assert_eq!(filter.kinds(Op::Write, 16 * 512, 512), 0);
        assert_eq!(filter.kinds(Op::Read, 8 * 512, 512), 0);
        filter.run(false);
        assert_eq!(filter.kinds(Op::Write, 8 * 512, 512), 0);
        filter.set(&text("", "read", "")).unwrap();
        assert!(!filter.is_running(), "a new filter does not enable it");
        filter.run(true);
        assert_eq!(filter.kinds(Op::Read, u64::MAX - 512, 512), 0xbcff);
        assert_eq!(filter.kinds(Op::Read, u64::MAX - 512, 4096), 0xbcff, "a range past the largest offset");
    }

    #[test]
    fn ends_are_traced_on_request() {
        assert_eq!(text("", "write", "").asks_for_ends(), Ok(false));
        assert_eq!(text("Q,done", "", "").asks_for_ends(), Ok(true));
        assert_eq!(text("Q,layer", "", "").asks_for_ends(), Ok(true));
        assert_eq!(text("notify", "", "").asks_for_ends(), Ok(false));
        for actions in ["", "Q"] {
            let filter = Filter::new(&text(actions, "write", "").with_ends()).unwrap();
            let ends = [Kind::Complete, Kind::Requeue, Kind::Done, Kind::Layer];
            let ends = ends.into_iter().map(|kind| 1 << kind as u64).sum::<u64>();
            assert_eq!(filter.kinds(Op::Write, 0, 512) & ends, ends);
            assert_eq!(filter.kinds(Op::Read, 0, 512), 0);
        }
    }

    #[test]
    fn commands_are_traced_whole_unless_requests_are_selected() {
        let passes = |actions, ops, sectors| {
            let filter = Filter::new(&text(actions, ops, sectors)).unwrap();
            (filter.passes_commands(), filter.passes_command_ends())
        };
        assert_eq!(passes("", "", ""), (true, true));
        assert_eq!(passes("m", "", ""), (true, true));
        assert_eq!(passes("Q,C", "", ""), (false, false));
        assert_eq!(passes("", "write", ""), (false, true));
        assert_eq!(passes("", "", "8-"), (false, true));
        let filter = Filter::new(&text("", "", "")).unwrap();
        filter.run(false);
        assert!(!filter.passes_commands() && !filter.passes_command_ends());
    }

    #[test]
    fn an_invalid_filter_is_refused_and_changes_nothing() {
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
