//! Service actions of PERSISTENT RESERVE OUT: SPC-6 section 5.14.
//!
//! Each function computes the next state from the previous one, so that a failure changes nothing.

use super::parameters::{Action, Destination, Out};
use super::{
    Change, Failure, Held, INSUFFICIENT_REGISTRATIONS, INVALID_RELEASE, Kind, Policy, REGISTRATIONS_MAX,
    REGISTRATIONS_PREEMPTED, RESERVATIONS_PREEMPTED, RESERVATIONS_RELEASED, Registrant, Registration,
    Reservations,
};
use crate::{NexusName, Sense};

impl Reservations {
    /// Computes the effect of a command of a nexus. The caller has already checked the command with
    /// [`check`](Reservations::check). Errors: RESERVATION CONFLICT, or CHECK CONDITION; nothing changes
    /// then.
    pub fn out(&self, nexus: &NexusName, policy: &Policy<'_>, out: &Out) -> Result<Change, Failure> {
        let mut change =
            Change { next: self.clone(), attentions: Vec::new(), aborts: Vec::new(), store: false };
        let own = self.registration(nexus);
        match (out.action, own) {
            (Action::Register | Action::RegisterAndIgnore, _) => {
                register(&mut change, nexus, own, policy, out)?
            }
            // All other service actions need the key of a registered nexus: SPC-6 section 5.14.1.
            (_, None) => return Err(Failure::Conflict),
            (_, Some(own)) if own.key != out.key => return Err(Failure::Conflict),
            (Action::Reserve, Some(own)) => reserve(&mut change, own, out)?,
            (Action::Release, Some(own)) => release(&mut change, own, out)?,
            (Action::Clear, Some(own)) => clear(&mut change, own),
            (Action::Preempt, Some(own)) => preempt(&mut change, own, out)?,
            (Action::PreemptAndAbort, Some(own)) => {
                preempt(&mut change, own, out)?;
                let lost = |attention: &&(Registrant, Sense)| attention.1 == REGISTRATIONS_PREEMPTED;
                change.aborts = change.attentions.iter().filter(lost).map(|(port, _)| port.clone()).collect();
            }
            (Action::RegisterAndMove, Some(own)) => {
                let destination = out.destination.as_ref().ok_or(Sense::PARAMETER_LIST_LENGTH)?;
                move_to(&mut change, own, destination, policy, out)?;
            }
        }
        change.store = (self.persists || change.next.persists) && *self != change.next;
        Ok(change)
    }

    /// Removes a registration, and the reservation if it then has no holder.
    fn remove(&mut self, registrant: &Registrant) {
        self.registrations.retain(|registration| registration.registrant != *registrant);
        let is_free = self.held.as_ref().is_some_and(|held| match &held.holder {
            Some(holder) => holder == registrant,
            None => self.registrations.is_empty(),
        });
        if is_free {
            self.held = None;
        }
    }

    /// Adds a registration, or changes its key.
    fn put(&mut self, registrant: Registrant, key: u64) -> Result<(), Failure> {
        if let Some(registration) = self.registrations.iter_mut().find(|known| known.registrant == registrant)
        {
            registration.key = key;
            return Ok(());
        }
        if self.registrations.len() >= REGISTRATIONS_MAX {
            return Err(INSUFFICIENT_REGISTRATIONS.into());
        }
        self.registrations.push(Registration { registrant, key });
        Ok(())
    }

    fn count(&mut self) {
        self.generation = self.generation.wrapping_add(1);
    }
}

impl Change {
    /// Records a unit attention for all remaining registrants, except the sender.
    fn report_others(&mut self, own: &Registrant, attention: Sense) {
        let others = self.next.registrations.iter().filter(|other| other.registrant != *own);
        self.attentions.extend(others.map(|other| (other.registrant.clone(), attention)));
    }
}

/// Executes REGISTER and REGISTER AND IGNORE EXISTING KEY: SPC-6 section 5.14.7, tables 69 and 70.
fn register(
    change: &mut Change,
    nexus: &NexusName,
    own: Option<&Registration>,
    policy: &Policy<'_>,
    out: &Out,
) -> Result<(), Failure> {
    // For a nexus that is not registered the key must be zero.
    if out.action == Action::Register && out.key != own.map_or(0, |own| own.key) {
        return Err(Failure::Conflict);
    }
    if own.is_some() && out.initiators.is_some() {
        // SPEC_I_PT from a nexus that is already registered is an error.
        return Err(Sense::INVALID_FIELD_IN_CDB.into());
    }
    if own.is_none() && out.action_key == 0 {
        return Ok(());
    }
    set_persistence(change, policy, out.persist, 20)?;
    let sender = own.map_or_else(|| Registrant::of(nexus, policy.with_isid), |own| own.registrant.clone());
    let ports = |only: u16| {
        let others = policy.ports.iter().copied().filter(move |port| out.all_ports && *port != only);
        std::iter::once(only).chain(others)
    };
    let at = |port: u16, of: &Registrant| Registrant { port, ..of.clone() };
    if out.action_key == 0 {
        for port in ports(sender.port) {
            unregister(change, &at(port, &sender), &sender);
        }
        // All ports are processed as one: a port that this command also unregisters is not notified,
        // whichever is removed first.
        let left = &change.next.registrations;
        change.attentions.retain(|(of, _)| left.iter().any(|known| known.registrant == *of));
        change.next.count();
        return Ok(());
    }
    if own.is_none() {
        let listed = out.initiators.iter().flatten().map(|id| Registrant {
            initiator: id.initiator.clone(),
            isid: id.isid.filter(|_| policy.with_isid),
            port: sender.port,
        });
        let all: Vec<_> = listed.flat_map(|of| ports(of.port).map(move |port| at(port, &of))).collect();
        for registrant in all {
            // The key of a nexus that is already registered is not overwritten.
            let is_taken =
                change.next.registrations.iter().any(|known| known.registrant.overlaps(&registrant));
            if is_taken && registrant.port == sender.port && registrant != sender {
                return Err(Failure::Conflict);
            }
            if !is_taken {
                change.next.put(registrant, out.action_key)?;
            }
        }
    }
    for port in ports(sender.port) {
        change.next.put(at(port, &sender), out.action_key)?;
    }
    change.next.count();
    Ok(())
}

/// Sets whether the state survives a power loss: the most recent APTPL bit applies to the whole unit.
/// Error: there is no store for it; `byte` of the parameter list contains the bit.
fn set_persistence(change: &mut Change, policy: &Policy<'_>, bit: bool, byte: u16) -> Result<(), Failure> {
    if bit && !policy.can_persist {
        return Err(Sense::parameter_field(byte, Some(0)).into());
    }
    change.next.persists = policy.can_persist && (bit || policy.force_aptpl);
    Ok(())
}

/// Removes a registration: SPC-6 section 5.14.11.3. `sender` is the nexus that gets no unit attention.
fn unregister(change: &mut Change, registrant: &Registrant, sender: &Registrant) {
    let held = change.next.held.clone();
    change.next.remove(registrant);
    // Registrants are notified of the end of a reservation that admitted all of them.
    if let Some(held) = held
        && change.next.held.is_none()
        && held.kind.admits_registered()
    {
        change.report_others(sender, RESERVATIONS_RELEASED);
    }
}

/// Executes RESERVE: SPC-6 section 5.14.9.
fn reserve(change: &mut Change, own: &Registration, out: &Out) -> Result<(), Failure> {
    let kind = kind_of(out)?;
    match &change.next.held {
        // The holder may repeat its reservation, but not change it.
        Some(held) if held.kind == kind && change.next.holds(&own.registrant) => Ok(()),
        Some(_) => Err(Failure::Conflict),
        None => {
            change.next.held = Some(Held { kind, holder: holder_of(kind, own) });
            Ok(())
        }
    }
}

fn holder_of(kind: Kind, own: &Registration) -> Option<Registrant> {
    (!kind.is_all_registrants()).then(|| own.registrant.clone())
}

/// Returns the type of a new reservation. Errors: 05/24/00 for a scope other than the logical unit, or an
/// unknown type.
fn kind_of(out: &Out) -> Result<Kind, Failure> {
    if out.scope != 0 {
        return Err(Sense::cdb_field(2, Some(7)).into());
    }
    Kind::of(out.kind).ok_or(Failure::Check(Sense::cdb_field(2, Some(3))))
}

/// Executes RELEASE: SPC-6 section 5.14.11.2.
fn release(change: &mut Change, own: &Registration, out: &Out) -> Result<(), Failure> {
    let Some(held) = change.next.held.clone() else { return Ok(()) };
    if !change.next.holds(&own.registrant) {
        return Ok(());
    }
    if out.scope != 0 || out.kind != held.kind as u8 {
        return Err(INVALID_RELEASE.into());
    }
    change.next.held = None;
    if held.kind.admits_registered() {
        change.report_others(&own.registrant, RESERVATIONS_RELEASED);
    }
    Ok(())
}

/// Executes CLEAR: SPC-6 section 5.14.11.6.
fn clear(change: &mut Change, own: &Registration) {
    change.report_others(&own.registrant, RESERVATIONS_PREEMPTED);
    change.next.registrations.clear();
    change.next.held = None;
    change.next.count();
}

/// Executes PREEMPT and PREEMPT AND ABORT: SPC-6 sections 5.14.11.4 and 5.14.11.5.
fn preempt(change: &mut Change, own: &Registration, out: &Out) -> Result<(), Failure> {
    let held = change.next.held.clone();
    let holder_key = held.as_ref().and_then(|held| held.holder.as_ref()).and_then(|holder| {
        change.next.registrations.iter().find(|known| known.registrant == *holder).map(|known| known.key)
    });
    let is_all_registrants = held.as_ref().is_some_and(|held| held.kind.is_all_registrants());
    let takes_all = is_all_registrants && out.action_key == 0;
    if out.action_key == 0 && !is_all_registrants {
        return Err(Sense::parameter_field(8, None).into());
    }
    let takes_reservation = takes_all || holder_key == Some(out.action_key);
    let new_kind = if takes_reservation { Some(kind_of(out)?) } else { None };
    let is_victim = |known: &&Registration| {
        let is_sender = known.registrant == own.registrant;
        // A sender that takes over the reservation keeps its own registration, even if it has this key.
        (takes_all || known.key == out.action_key) && !(takes_reservation && is_sender)
    };
    let victims: Vec<Registrant> =
        change.next.registrations.iter().filter(is_victim).map(|known| known.registrant.clone()).collect();
    if victims.is_empty() && !takes_reservation {
        return Err(Failure::Conflict);
    }
    for victim in &victims {
        change.next.remove(victim);
        if *victim != own.registrant {
            change.attentions.push((victim.clone(), REGISTRATIONS_PREEMPTED));
        }
    }
    if let Some(kind) = new_kind {
        change.next.held = Some(Held { kind, holder: holder_of(kind, own) });
        if held.is_some_and(|held| held.kind != kind) {
            change.report_others(&own.registrant, RESERVATIONS_RELEASED);
        }
    }
    change.next.count();
    Ok(())
}

/// Executes REGISTER AND MOVE: SPC-6 section 5.14.8.
fn move_to(
    change: &mut Change,
    own: &Registration,
    to: &Destination,
    policy: &Policy<'_>,
    out: &Out,
) -> Result<(), Failure> {
    match &change.next.held {
        None => return Err(Sense::INVALID_FIELD_IN_CDB.into()),
        Some(held) if held.holder.as_ref() != Some(&own.registrant) => return Err(Failure::Conflict),
        Some(_) => (),
    }
    if out.action_key == 0 {
        return Err(Sense::parameter_field(8, None).into());
    }
    if !policy.ports.contains(&to.port) {
        return Err(Sense::parameter_field(18, None).into());
    }
    let isid = to.initiator.isid.filter(|_| policy.with_isid);
    let named = Registrant { initiator: to.initiator.initiator.clone(), isid, port: to.port };
    if named.overlaps(&own.registrant) {
        return Err(Sense::parameter_field(24, None).into());
    }
    set_persistence(change, policy, out.persist, 17)?;
    let known = change.next.registrations.iter().find(|known| known.registrant.overlaps(&named));
    let destination = known.map_or(named, |known| known.registrant.clone());
    change.next.put(destination.clone(), out.action_key)?;
    if let Some(held) = &mut change.next.held {
        held.holder = Some(destination);
    }
    if to.unregister {
        change.next.remove(&own.registrant);
    }
    change.next.count();
    Ok(())
}
