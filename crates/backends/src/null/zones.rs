//! Zones of a zoned `null:` device, with null_blk's rules: conditions, write pointers, and the limits on
//! open and active zones. All hardware queues of a device share one instance.
//!
//! The state of a zone is one word: its condition, the number of writers that are copying data, and its
//! write pointer. A write to a zone that is open and stays open is one compare-and-swap. Conditions change
//! under the mutex on the counts of open and closed zones, a few times in a zone's life.
//!
//! *Invariant:* a condition changes only under the mutex. *Invariant:* a zone is cleared only while no
//! writer copies data to it, and no writer starts while it is being cleared.
//!
//! Source of the rules: drivers/block/null_blk/zoned.c. Data and request sizes are not handled here.

use super::zoned_spec::{ZonedError, ZonedSpec};
use block::{Bytes, Op, Sectors, Status, Zone, ZoneCondition, ZoneKind};
use queue::Verdict;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Condition of a zone that is being reset. It is not one of the kernel's conditions, and is not reported.
const CLEARING: u64 = 7;
/// Number of bits of the condition in a state word.
const CONDITION_BITS: u32 = 4;
const CONDITION_MASK: u64 = (1 << CONDITION_BITS) - 1;
/// Lowest bit of the write pointer, which counts sectors from the zone's start. The bits below it and above
/// the condition count the writers that copy data: at most one per thread, so 12 bits suffice.
const POINTER_SHIFT: u32 = 16;
/// Value that counts one writer that copies data.
const COPYING: u64 = 1 << CONDITION_BITS;

/// State of a zone, unpacked.
#[derive(Clone, Copy, PartialEq, Eq)]
struct State {
    word: u64,
}

impl State {
    const fn new(condition: ZoneCondition, written: u64) -> State {
        State { word: written << POINTER_SHIFT | condition as u64 }
    }

    /// Returns the condition, or `None` if the zone is being reset.
    fn condition(self) -> Option<ZoneCondition> {
        ZoneCondition::from_number((self.word & CONDITION_MASK) as u8)
    }

    /// Returns the number of sectors from the zone's start to its write pointer.
    const fn written(self) -> u64 {
        self.word >> POINTER_SHIFT
    }

    const fn is_copied_into(self) -> bool {
        self.word & ((1 << POINTER_SHIFT) - 1) >= COPYING
    }

    /// Returns the state with another condition.
    const fn with(self, condition: ZoneCondition) -> State {
        State { word: self.word >> CONDITION_BITS << CONDITION_BITS | condition as u64 }
    }
}

/// Numbers of zones that count towards the limits; they are also counted if there are no limits.
#[derive(Default)]
struct Counts {
    implicit: u32,
    explicit: u32,
    closed: u32,
    /// Position at which the search for an open zone to close starts.
    close_next: usize,
}

impl Counts {
    fn of(&mut self, condition: ZoneCondition) -> Option<&mut u32> {
        match condition {
            ZoneCondition::ImplicitOpen => Some(&mut self.implicit),
            ZoneCondition::ExplicitOpen => Some(&mut self.explicit),
            ZoneCondition::Closed => Some(&mut self.closed),
            _ => None,
        }
    }
}

/// Result of a reset.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Reset {
    /// The zone is empty, or cannot be reset.
    Over(Status),
    /// The zone's memory has to be cleared; then call [`Zones::cleared`].
    Clear,
    /// A writer is copying data to the zone, or the zone is already being reset.
    Busy,
}

/// Result of a write.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum ZoneWrite {
    /// Write the data at this offset, then call [`Zones::copied`].
    At(Bytes),
    /// The write fails, or has to wait.
    No(Verdict),
}

/// The zones of one device.
pub(super) struct Zones {
    /// The zone options.
    spec: ZonedSpec,
    /// log2 of a zone's length in sectors.
    shift: u32,
    device_len: u64,
    conventional: usize,
    /// Capacity of a sequential zone in sectors.
    capacity: u64,
    max_open: u32,
    max_active: u32,
    append_max: Sectors,
    states: Box<[AtomicU64]>,
    counts: Mutex<Counts>,
}

impl std::fmt::Debug for Zones {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} zones", self.states.len())
    }
}

fn no(status: Status) -> ZoneWrite {
    ZoneWrite::No(Verdict::Up(status))
}

impl Zones {
    /// Creates the zones of a device of this size.
    ///
    /// # Errors
    /// The options are invalid.
    pub(super) fn new(spec: &ZonedSpec, size: Bytes) -> Result<Zones, ZonedError> {
        let layout = spec.check(size)?;
        let device_len = size.sectors().0;
        let shift = layout.zone_len.0.ilog2();
        let mut zones = Zones {
            spec: spec.clone(),
            shift,
            device_len,
            conventional: layout.conventional,
            capacity: layout.capacity.0,
            max_open: layout.max_open,
            max_active: layout.max_active,
            append_max: layout.append_max,
            states: Box::default(),
            counts: Mutex::default(),
        };
        zones.counts.get_mut().unwrap_or_else(PoisonError::into_inner).close_next = layout.conventional;
        let first = |index: usize| match (index < layout.conventional, spec.full) {
            (true, _) => State::new(ZoneCondition::NotWritePointer, 0),
            (_, true) => State::new(ZoneCondition::Full, zones.capacity_of(index)),
            (_, false) => State::new(ZoneCondition::Empty, 0),
        };
        let states: Vec<_> = (0..layout.count).map(|index| AtomicU64::new(first(index).word)).collect();
        for (list, condition) in
            [(&spec.read_only, ZoneCondition::ReadOnly), (&spec.offline, ZoneCondition::Offline)]
        {
            for sector in list {
                let index = (sector.0 >> shift) as usize;
                states[index].store(State::new(condition, 0).word, Ordering::Relaxed);
            }
        }
        zones.states = states.into();
        Ok(zones)
    }

    /// Returns the options.
    pub(super) fn spec(&self) -> &ZonedSpec {
        &self.spec
    }

    /// Returns the number of zones, and of conventional zones.
    pub(super) fn count(&self) -> (usize, usize) {
        (self.states.len(), self.conventional)
    }

    /// Returns the effective limits on open and active zones; 0 for none.
    pub(super) fn limits(&self) -> (u32, u32) {
        (self.max_open, self.max_active)
    }

    /// Returns the largest append; 0 if the kernel emulates it.
    pub(super) fn append_max(&self) -> Sectors {
        self.append_max
    }

    /// Returns the length of a zone. The last zone may be shorter.
    pub(super) fn zone_len(&self) -> Sectors {
        Sectors(1 << self.shift)
    }

    fn index(&self, at: Bytes) -> usize {
        (at.sectors().0 >> self.shift) as usize
    }

    /// Returns the start and length of a zone.
    pub(super) fn range(&self, index: usize) -> (Bytes, Bytes) {
        let start = (index as u64) << self.shift;
        (Sectors(start).bytes(), Sectors((1 << self.shift).min(self.device_len - start)).bytes())
    }

    fn capacity_of(&self, index: usize) -> u64 {
        let len = self.range(index).1.sectors().0;
        if index < self.conventional { len } else { self.capacity.min(len) }
    }

    fn state(&self, index: usize) -> State {
        State { word: self.states[index].load(Ordering::Acquire) }
    }

    /// Changes a state from `from` to `to`. Returns whether it still was `from`.
    fn change(&self, index: usize, from: State, to: State) -> bool {
        let word = &self.states[index];
        word.compare_exchange(from.word, to.word, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }

    fn lock(&self) -> MutexGuard<'_, Counts> {
        self.counts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reserves the sectors for a write or an append of `len` bytes at `at`. `copies`: data will be stored,
    /// and a reset has to wait for that.
    #[inline]
    pub(super) fn take(&self, at: Bytes, len: Bytes, append: bool, copies: bool) -> ZoneWrite {
        let index = self.index(at);
        let (start, zone_len) = self.range(index);
        let within = at.0 - start.0;
        if index < self.conventional {
            let fits = !append && within + len.0 <= zone_len.0;
            return if fits { ZoneWrite::At(at) } else { no(Status::IoError) };
        }
        if append && (within != 0 || len.sectors() > self.append_limit()) {
            return no(Status::IoError);
        }
        let (within, count) = ((!append).then_some(within >> Sectors::SHIFT), len.sectors().0);
        let capacity = self.capacity_of(index);
        let writers = if copies { COPYING } else { 0 };
        loop {
            let state = self.state(index);
            let open = ZoneCondition::ImplicitOpen as u64..=ZoneCondition::ExplicitOpen as u64;
            let stays_open = open.contains(&(state.word & CONDITION_MASK))
                && within.is_none_or(|within| within == state.written())
                && state.written() + count < capacity;
            if !stays_open {
                return self.take_locked(index, within, count, writers);
            }
            let to = State { word: state.word + (count << POINTER_SHIFT) + writers };
            if self.change(index, state, to) {
                return ZoneWrite::At(start + Sectors(state.written()).bytes());
            }
        }
    }

    /// Reserves sectors in a zone whose condition may have to change.
    #[cold]
    fn take_locked(&self, index: usize, within: Option<u64>, count: u64, writers: u64) -> ZoneWrite {
        let mut counts = self.lock();
        loop {
            let state = self.state(index);
            let Some(before) = state.condition() else { return ZoneWrite::No(Verdict::Busy) };
            let end = state.written() + count;
            let at_pointer = within.is_none_or(|within| within == state.written());
            let capacity = self.capacity_of(index);
            let dead = matches!(before, ZoneCondition::ReadOnly | ZoneCondition::Offline);
            if dead || !at_pointer || end > capacity {
                return no(Status::IoError);
            }
            if let Err(status) = self.make_room(before, &mut counts) {
                return no(status);
            }
            let after = match before {
                _ if end == capacity => ZoneCondition::Full,
                ZoneCondition::ExplicitOpen => ZoneCondition::ExplicitOpen,
                _ => ZoneCondition::ImplicitOpen,
            };
            let to = State { word: state.with(after).word + (count << POINTER_SHIFT) + writers };
            if self.change(index, state, to) {
                Self::recount(&mut counts, before, after);
                return ZoneWrite::At(self.range(index).0 + Sectors(state.written()).bytes());
            }
        }
    }

    /// Ends a write at offset `at` that was reserved with `copies`, after its data is stored.
    pub(super) fn copied(&self, at: Bytes) {
        let index = self.index(at);
        if index >= self.conventional {
            self.states[index].fetch_sub(COPYING, Ordering::Release);
        }
    }

    fn append_limit(&self) -> Sectors {
        if self.append_max.0 == 0 { Sectors(self.capacity) } else { self.append_max }
    }

    fn recount(counts: &mut Counts, before: ZoneCondition, after: ZoneCondition) {
        if let Some(count) = counts.of(before) {
            *count -= 1;
        }
        if let Some(count) = counts.of(after) {
            *count += 1;
        }
    }

    /// Checks whether another zone in this condition may be opened, and closes another one if necessary:
    /// the kernel's `null_check_zone_resources`.
    fn make_room(&self, before: ZoneCondition, counts: &mut Counts) -> Result<(), Status> {
        if !matches!(before, ZoneCondition::Empty | ZoneCondition::Closed) {
            return Ok(());
        }
        let active = counts.implicit + counts.explicit + counts.closed;
        let may_activate = self.max_active == 0 || active < self.max_active;
        if before == ZoneCondition::Empty && !may_activate {
            return Err(Status::ZoneActiveResource);
        }
        if self.max_open == 0 || counts.implicit + counts.explicit < self.max_open {
            return Ok(());
        }
        // As in the kernel, no zone is closed to open another while the limit on active zones is reached.
        if counts.implicit == 0 || !may_activate {
            return Err(Status::ZoneOpenResource);
        }
        self.close_one(counts);
        Ok(())
    }

    /// Closes the next implicitly open zone, round robin.
    fn close_one(&self, counts: &mut Counts) {
        let first = counts.close_next;
        let in_turn = (first..self.states.len()).chain(self.conventional..first);
        for index in in_turn {
            if self.state(index).condition() == Some(ZoneCondition::ImplicitOpen) {
                let next = index + 1;
                counts.close_next = if next == self.states.len() { self.conventional } else { next };
                // Writes in the meantime leave it open until we close it.
                let _ = self.transition(index, counts, |state, _| Ok(closed(state)));
                return;
            }
        }
    }

    /// Changes a zone's condition. `rule` returns the new state or an error; it is called again if the
    /// write pointer has moved in the meantime.
    fn transition(
        &self,
        index: usize,
        counts: &mut Counts,
        mut rule: impl FnMut(State, &mut Counts) -> Result<State, Status>,
    ) -> Result<(), Verdict> {
        loop {
            let state = self.state(index);
            let Some(before) = state.condition() else { return Err(Verdict::Busy) };
            let to = rule(state, counts).map_err(Verdict::Up)?;
            if self.change(index, state, to) {
                if let Some(after) = to.condition() {
                    Self::recount(counts, before, after);
                }
                return Ok(());
            }
        }
    }

    /// Opens, closes or finishes the zone at `at`.
    pub(super) fn manage(&self, op: Op, at: Bytes) -> Verdict {
        let index = self.index(at);
        if index < self.conventional {
            return Verdict::Up(Status::IoError);
        }
        let len = self.range(index).1.sectors().0;
        let mut counts = self.lock();
        let changed = self.transition(index, &mut counts, |state, counts| {
            let Some(before) = state.condition() else { return Err(Status::IoError) };
            match (op, before) {
                (_, ZoneCondition::ReadOnly | ZoneCondition::Offline) => Err(Status::IoError),
                (Op::ZoneOpen, ZoneCondition::Full) => Err(Status::IoError),
                (Op::ZoneOpen, _) => {
                    self.make_room(before, counts)?;
                    Ok(state.with(ZoneCondition::ExplicitOpen))
                }
                (Op::ZoneClose, ZoneCondition::Closed) => Ok(state),
                (Op::ZoneClose, ZoneCondition::ImplicitOpen | ZoneCondition::ExplicitOpen) => {
                    Ok(closed(state))
                }
                (Op::ZoneFinish, ZoneCondition::Full) => Ok(state),
                (Op::ZoneFinish, _) => {
                    self.make_room(before, counts)?;
                    let writers = state.word & ((1 << POINTER_SHIFT) - COPYING);
                    Ok(State { word: State::new(ZoneCondition::Full, len).word | writers })
                }
                _ => Err(Status::IoError),
            }
        });
        changed.map_or_else(|verdict| verdict, |()| Verdict::Up(Status::Ok))
    }

    /// Resets the zone at `index`. `clears`: the zone has memory to clear.
    pub(super) fn reset(&self, index: usize, clears: bool) -> Reset {
        let mut counts = self.lock();
        loop {
            let state = self.state(index);
            let before = match state.condition() {
                None => return Reset::Busy,
                Some(ZoneCondition::Empty) => return Reset::Over(Status::Ok),
                Some(ZoneCondition::NotWritePointer | ZoneCondition::ReadOnly | ZoneCondition::Offline) => {
                    return Reset::Over(Status::IoError);
                }
                Some(_) if state.is_copied_into() => return Reset::Busy,
                Some(before) => before,
            };
            let to = if clears { State { word: CLEARING } } else { State::new(ZoneCondition::Empty, 0) };
            if self.change(index, state, to) {
                Self::recount(&mut counts, before, ZoneCondition::Empty);
                return if clears { Reset::Clear } else { Reset::Over(Status::Ok) };
            }
        }
    }

    /// Ends a reset after the zone's memory has been cleared.
    pub(super) fn cleared(&self, index: usize) {
        self.states[index].store(State::new(ZoneCondition::Empty, 0).word, Ordering::Release);
    }

    /// Returns the index of the zone at `at`.
    pub(super) fn index_of(&self, at: Bytes) -> usize {
        self.index(at)
    }

    /// Returns whether a range can be read.
    pub(super) fn readable(&self, at: Bytes, len: Bytes) -> bool {
        let last = self.index(Bytes(at.0 + len.0.max(1) - 1));
        (self.index(at)..=last).all(|index| self.state(index).condition() != Some(ZoneCondition::Offline))
    }

    /// Returns a zone's record in a report.
    pub(super) fn report(&self, index: usize) -> Zone {
        let (start, len) = self.range(index);
        let (start, len) = (start.sectors(), len.sectors());
        let state = self.state(index);
        let condition = state.condition().unwrap_or(ZoneCondition::Empty);
        let write_pointer = match condition {
            ZoneCondition::NotWritePointer => start.0 + len.0,
            ZoneCondition::ReadOnly | ZoneCondition::Offline => u64::MAX,
            _ => start.0 + state.written(),
        };
        let conventional = index < self.conventional;
        Zone {
            start,
            len,
            capacity: Sectors(self.capacity_of(index)),
            write_pointer: Sectors(write_pointer),
            kind: if conventional { ZoneKind::Conventional } else { ZoneKind::SequentialRequired },
            condition,
        }
    }
}

/// Returns the state of a zone after it is closed: empty if nothing was written.
fn closed(state: State) -> State {
    let empty = state.written() == 0;
    state.with(if empty { ZoneCondition::Empty } else { ZoneCondition::Closed })
}
