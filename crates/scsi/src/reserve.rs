//! Reservations and access states in force: the state machines of [`reservation`](crate::reservation) and
//! [`alua`](crate::alua), behind the locks of a unit, and the commands that change them.
//!
//! Every change of one of them recomputes the restrictions of all nexuses, so that unrestricted reads and
//! writes keep the fast path.

use crate::alua::AccessGroups;
use crate::attention::Attention;
use crate::copy::CopyResults;
use crate::dispatch::Call;
use crate::nexus::Restrictions;
use crate::opcodes::CDB_MAX;
use crate::reservation::{Change, Failure, Out, Policy, Registrant, Reservations, Restriction};
use crate::sanitize::Sanitize;
use crate::sense::{Key, Sense};
use crate::{Begin, LogicalUnit, Nexus, Outcome};
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant};

/// Store for the image of reservations that survive a power loss (APTPL).
pub trait AptplStore: Send + Sync {
    /// Replaces the stored image durably, or removes it (`None`). May block.
    ///
    /// # Errors
    /// The image was not stored; the command that changed the reservations then fails without effect.
    fn store(&self, image: Option<&str>) -> io::Result<()>;

    /// Returns how long an image that was read may be relied on, if other servers of the unit change it as
    /// well; all registrations persist then.
    fn valid_for(&self) -> Option<Duration> {
        None
    }

    /// Returns the stored image of a shared store. May block.
    ///
    /// # Errors
    /// The image cannot be read.
    fn load(&self) -> io::Result<Option<Reservations>> {
        Ok(None)
    }

    /// Excludes other servers until [`AptplStore::end`]. May block.
    ///
    /// # Errors
    /// The other servers are not excluded; the command then fails without effect.
    fn begin(&self) -> io::Result<()> {
        Ok(())
    }

    /// Admits other servers again. May block.
    fn end(&self) {}

    /// Waits until no other server relies on an older image. May block.
    fn await_others(&self) {}
}

/// Reservations, access states, and the store of reservations.
#[derive(Default)]
pub(crate) struct Guards {
    reservations: Mutex<Reservations>,
    groups: Mutex<AccessGroups>,
    store: Mutex<Option<Arc<dyn AptplStore>>>,
    /// Held while PERSISTENT RESERVE OUT computes, stores and enforces the next state.
    order: Mutex<()>,
    validity: Validity,
    /// Results of EXTENDED COPY.
    pub(crate) copies: CopyResults,
    /// State of the sanitize operation.
    pub(crate) sanitize: Arc<Sanitize>,
}

/// How long the reservations of a shared store may be relied on.
#[derive(Default)]
struct Validity {
    is_limited: AtomicBool,
    /// `None`: they were not read since the store was set.
    until: Mutex<Option<Instant>>,
}

impl std::fmt::Debug for Guards {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Guards").field("reservations", &self.reservations).finish_non_exhaustive()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl LogicalUnit {
    /// Sets the store for reservations that survive a power loss. Without a store APTPL is refused, and not
    /// reported as supported.
    pub fn set_aptpl_store(&self, store: Option<Arc<dyn AptplStore>>) {
        let is_limited = store.as_ref().is_some_and(|store| store.valid_for().is_some());
        *lock(&self.guards.store) = store;
        *lock(&self.guards.validity.until) = None;
        self.guards.validity.is_limited.store(is_limited, Ordering::Release);
    }

    /// Returns whether another server of the unit may have changed the reservations so long ago that its
    /// initiator relies on the change. Commands must not begin before [`LogicalUnit::refresh_reservations`].
    #[inline]
    pub fn is_outdated(&self) -> bool {
        self.guards.validity.is_limited.load(Ordering::Acquire)
            && lock(&self.guards.validity.until).is_none_or(|until| Instant::now() > until)
    }

    /// Returns the reservations, for display and storage.
    pub fn reservations(&self) -> Reservations {
        lock(&self.guards.reservations).clone()
    }

    /// Puts reservations into force that were stored before a restart.
    pub fn restore_reservations(&self, reservations: Reservations) {
        *lock(&self.guards.reservations) = reservations;
        self.enforce();
    }

    /// Puts reservations into force that another server of the unit has stored. Waits for a command that
    /// changes them. May block.
    ///
    /// # Errors
    /// The stored reservations cannot be read.
    pub fn refresh_reservations(&self) -> io::Result<()> {
        let Some(store) = self.shared_store() else { return Ok(()) };
        // An image that is read while a command stores its change could be older than the change.
        let _order = lock(&self.guards.order);
        self.load_reservations(&*store)
    }

    /// Puts the stored reservations of a shared store into force.
    fn load_reservations(&self, store: &dyn AptplStore) -> io::Result<()> {
        // A change that is stored from now on may be missing.
        let begun = Instant::now();
        self.adopt_reservations(store.load()?);
        *lock(&self.guards.validity.until) = store.valid_for().map(|time| begun + time);
        Ok(())
    }

    /// Puts reservations into force that another server of the unit has stored. Nexuses whose registration
    /// is gone get the unit attention 2A/05, those whose reservation is gone get 2A/04.
    fn adopt_reservations(&self, stored: Option<Reservations>) {
        let mut current = lock(&self.guards.reservations);
        let next = stored.unwrap_or_default();
        if current.registrations() == next.registrations() && current.held() == next.held() {
            return;
        }
        let before = current.clone();
        current.adopt(next.clone());
        drop(current);
        self.enforce();
        for nexus in self.nexuses() {
            let knows = |state: &Reservations| {
                state.registrations().iter().any(|known| known.registrant.covers(nexus.name()))
            };
            if knows(&before) && !knows(&next) {
                nexus.raise(Attention(0x2A, 0x05));
            } else if knows(&next) && before.held().is_some() && next.held().is_none() {
                nexus.raise(Attention(0x2A, 0x04));
            }
        }
    }

    /// Returns why SANITIZE denies commands access to the medium: it is running, or it has failed.
    pub fn sanitize_state(&self) -> Option<Sense> {
        self.guards.sanitize.sense()
    }

    /// Returns the target port groups.
    pub fn access_groups(&self) -> AccessGroups {
        lock(&self.guards.groups).clone()
    }

    /// Changes the target port groups. Nexuses, except `by`, whose group or its state has changed get the
    /// unit attention 2A/06.
    pub fn change_access_groups<R>(
        &self,
        by: Option<&Nexus>,
        change: impl FnOnce(&mut AccessGroups) -> R,
    ) -> R {
        let mut groups = lock(&self.guards.groups);
        let before = groups.clone();
        let result = change(&mut groups);
        let after = groups.clone();
        drop(groups);
        self.enforce();
        for nexus in self.nexuses() {
            let port = nexus.name().relative_port;
            let differs = before.state_of(port) != after.state_of(port)
                || before.of_port(port).id != after.of_port(port).id;
            if differs && !by.is_some_and(|by| std::ptr::eq(by, &*nexus)) {
                nexus.raise(Attention::ACCESS_STATE_CHANGED);
            }
        }
        result
    }

    /// Applies the restrictions in force to a new nexus.
    pub(crate) fn enforce_on(&self, nexus: &Nexus) {
        let restriction = lock(&self.guards.reservations).restriction(nexus.name());
        let is_active = lock(&self.guards.groups).state_of(nexus.name().relative_port).is_active();
        nexus.restrict(Restrictions::RESERVATION, restriction == Restriction::All);
        nexus.restrict(Restrictions::RESERVED_WRITES, restriction == Restriction::Writes);
        nexus.restrict(Restrictions::ACCESS_STATE, !is_active);
        nexus.restrict(Restrictions::SANITIZE, self.guards.sanitize.sense().is_some());
    }

    /// Recomputes the restrictions of all nexuses.
    pub(crate) fn enforce(&self) {
        self.nexuses().iter().for_each(|nexus| self.enforce_on(nexus));
    }

    /// Adds the target port of a new nexus to the default group.
    pub(crate) fn add_port(&self, port: u16) {
        lock(&self.guards.groups).add_port(port);
    }

    /// Releases the reservation by RESERVE of a nexus that ended, or of any nexus (`None`).
    pub(crate) fn release_reserved(&self, nexus: Option<&Nexus>) {
        let mut reservations = lock(&self.guards.reservations);
        match nexus {
            Some(nexus) => reservations.end_nexus(nexus.name()),
            None => reservations.reset(),
        }
        drop(reservations);
        self.enforce();
    }

    /// Returns TPGS of INQUIRY for a target port.
    pub(crate) fn tpgs(&self, port: u16) -> u8 {
        lock(&self.guards.groups).tpgs(port)
    }

    /// Returns the target port group of a target port.
    pub(crate) fn port_group(&self, port: u16) -> u16 {
        lock(&self.guards.groups).of_port(port).id
    }

    fn shared_store(&self) -> Option<Arc<dyn AptplStore>> {
        lock(&self.guards.store).clone().filter(|store| store.valid_for().is_some())
    }

    fn can_persist(&self) -> bool {
        lock(&self.guards.store).is_some()
    }
}

/// Checks the access state of the nexus' target port group for a command: 02/04/xx.
pub(crate) fn check_access_state(nexus: &Nexus, cdb: &[u8]) -> Result<(), Sense> {
    lock(&nexus.unit().guards.groups).state_of(nexus.name().relative_port).check(cdb)
}

/// Checks a command against the reservations.
pub(crate) fn check_reservations(nexus: &Nexus, cdb: &[u8]) -> Result<(), Outcome> {
    lock(&nexus.unit().guards.reservations).check(nexus.name(), cdb).map_err(Outcome::from)
}

/// Returns whether a nexus may read (`false`) or write (`true`) its unit, for the parties of an EXTENDED
/// COPY.
pub(crate) fn may_access(nexus: &Nexus, is_write: bool) -> bool {
    const READ_16: [u8; 16] = [0x88, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    const WRITE_16: [u8; 16] = [0x8A, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    let cdb = if is_write { WRITE_16 } else { READ_16 };
    let unusable = Restrictions::SANITIZE | Restrictions::NO_MEDIUM;
    let is_protected = nexus.is_restricted(Restrictions::READ_ONLY) || nexus.unit().fast_facts().is_protected;
    !(nexus.is_restricted(unusable) || is_write && is_protected)
        && check_access_state(nexus, &cdb).is_ok()
        && check_reservations(nexus, &cdb).is_ok()
}

fn answer(result: Result<(Vec<u8>, u32), impl Into<Outcome>>) -> Begin {
    match result {
        Ok((data, allocation)) => Outcome::with_data(data, allocation).into(),
        Err(failure) => failure.into().into(),
    }
}

/// Executes PERSISTENT RESERVE IN.
pub(crate) fn persistent_in(call: &Call<'_>) -> Begin {
    let can_persist = call.unit().can_persist();
    let reservations = lock(&call.unit().guards.reservations);
    // LIO-19: it conflicts with a reservation by RESERVE.
    if reservations.reserved().is_some() {
        return Outcome::from(Failure::Conflict).into();
    }
    answer(reservations.report(&call.cdb, can_persist))
}

/// Begins PERSISTENT RESERVE OUT, whose parameter list has not been received yet.
pub(crate) fn persistent_out_begin(call: &Call<'_>) -> Begin {
    if lock(&call.unit().guards.reservations).reserved().is_some() {
        return Outcome::from(Failure::Conflict).into();
    }
    match Out::list_len(&call.cdb) {
        Ok(len) => call.parameters(len),
        Err(failure) => Outcome::from(failure).into(),
    }
}

/// Continues PERSISTENT RESERVE OUT with its parameter list.
pub(crate) fn persistent_out(call: &Call<'_>, list: &[u8]) -> Begin {
    let out = match Out::parse(&call.cdb, list) {
        Ok(out) => out,
        Err(failure) => return Outcome::from(failure).into(),
    };
    let work = StoreReservations { nexus: call.nexus.clone(), out, wanted: list.len() as u64 };
    work.begin()
}

/// A PERSISTENT RESERVE OUT whose effect must be stored before it ends.
pub struct StoreReservations {
    nexus: Arc<Nexus>,
    out: Out,
    wanted: u64,
}

impl std::fmt::Debug for StoreReservations {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("StoreReservations").field("nexus", &self.nexus).finish_non_exhaustive()
    }
}

impl StoreReservations {
    /// Executes the command at once if nothing has to be stored, and no other command is being stored.
    fn begin(self) -> Begin {
        let unit = self.nexus.unit().clone();
        if unit.shared_store().is_some() {
            return Begin::Store(Box::new(self));
        }
        let _order = match unit.guards.order.try_lock() {
            Ok(order) => order,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return Begin::Store(Box::new(self)),
        };
        match self.change(&unit) {
            Err(failure) => Outcome::from(failure).into(),
            Ok(change) if change.store => Begin::Store(Box::new(self)),
            Ok(change) => self.apply(&unit, change).into(),
        }
    }

    /// Executes the command. Blocks while the image is stored, so it must not run on a reactor's thread.
    pub fn run(&self) -> Outcome {
        let unit = self.nexus.unit();
        let order = lock(&unit.guards.order);
        let Some(shared) = unit.shared_store() else { return self.run_alone(unit) };
        let failed = || self.nexus.finish(Sense::new(Key::HardwareError, 0x44, 0x00).into());
        if shared.begin().is_err() {
            return failed();
        }
        if unit.load_reservations(&*shared).is_err() {
            shared.end();
            return failed();
        }
        let before = unit.reservations();
        let outcome = self.run_alone(unit);
        shared.end();
        let has_changed = unit.reservations() != before;
        drop(order);
        if has_changed {
            shared.await_others();
        }
        outcome
    }

    fn run_alone(&self, unit: &LogicalUnit) -> Outcome {
        let change = match self.change(unit) {
            Ok(change) => change,
            Err(failure) => return self.nexus.finish(failure.into()),
        };
        let store = lock(&unit.guards.store).clone();
        if let (true, Some(store)) = (change.store, store)
            && store.store(change.next.image().as_deref()).is_err()
        {
            // INTERNAL TARGET FAILURE.
            return self.nexus.finish(Sense::new(Key::HardwareError, 0x44, 0x00).into());
        }
        let outcome = self.apply(unit, change);
        self.nexus.finish(outcome)
    }

    fn change(&self, unit: &LogicalUnit) -> Result<Change, Failure> {
        let attributes = unit.attributes();
        let ports: Vec<u16> =
            unit.access_groups().groups().iter().flat_map(|group| group.ports.clone()).collect();
        let policy = Policy {
            with_isid: attributes.enforce_pr_isids,
            force_aptpl: attributes.force_pr_aptpl || unit.shared_store().is_some(),
            can_persist: unit.can_persist(),
            ports: &ports,
        };
        lock(&unit.guards.reservations).out(self.nexus.name(), &policy, &self.out)
    }

    fn apply(&self, unit: &LogicalUnit, change: Change) -> Outcome {
        lock(&unit.guards.reservations).put_in_force(change.next);
        unit.enforce();
        let covers = |registrant: &Registrant, nexus: &Nexus| registrant.covers(nexus.name());
        for nexus in unit.nexuses() {
            if std::ptr::eq(&*nexus, &*self.nexus) {
                continue;
            }
            if change.aborts.iter().any(|registrant| covers(registrant, &nexus)) {
                nexus.advance_epoch();
            }
            for (_, sense) in change.attentions.iter().filter(|(registrant, _)| covers(registrant, &nexus)) {
                nexus.raise(Attention(sense.asc, sense.ascq));
            }
        }
        Outcome::good(self.wanted)
    }
}

/// Executes RESERVE (6) and (10).
pub(crate) fn reserve(call: &Call<'_>) -> Begin {
    legacy(call, Reservations::reserve)
}

/// Executes RELEASE (6) and (10).
pub(crate) fn release(call: &Call<'_>) -> Begin {
    legacy(call, Reservations::release)
}

type Legacy = fn(&mut Reservations, &crate::NexusName, &[u8]) -> Result<(), Failure>;

fn legacy(call: &Call<'_>, change: Legacy) -> Begin {
    let cdb: &[u8; CDB_MAX] = &call.cdb;
    let result = change(&mut lock(&call.unit().guards.reservations), call.nexus.name(), cdb);
    call.unit().enforce();
    match result {
        Ok(()) => Outcome::good(0).into(),
        Err(failure) => Outcome::from(failure).into(),
    }
}

/// Executes REPORT TARGET PORT GROUPS.
pub(crate) fn report_groups(call: &Call<'_>) -> Begin {
    answer(lock(&call.unit().guards.groups).report(&call.cdb, call.nexus.name().relative_port))
}

/// Begins SET TARGET PORT GROUPS, whose parameter list has not been received yet.
pub(crate) fn set_groups_begin(call: &Call<'_>) -> Begin {
    let port = call.nexus.name().relative_port;
    let len = lock(&call.unit().guards.groups).set_list_len(&call.cdb, port);
    match len {
        Ok(0) => Outcome::good(0).into(),
        Ok(len) => call.parameters(len),
        Err(sense) => sense.into(),
    }
}

/// Continues SET TARGET PORT GROUPS with its parameter list.
pub(crate) fn set_groups(call: &Call<'_>, list: &[u8]) -> Begin {
    match call.unit().change_access_groups(Some(call.nexus), |groups| groups.set(list)) {
        Ok(_) => Outcome::good(list.len() as u64).into(),
        Err(sense) => sense.into(),
    }
}
