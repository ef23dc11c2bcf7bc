//! Reservations of a logical unit: persistent reservations (SPC-6 section 5.14) and those of RESERVE and
//! RELEASE (SPC-2).
//!
//! [`Reservations`] is a pure state machine without lock, I/O or clock. PERSISTENT RESERVE OUT computes the
//! next state as a [`Change`]. If the state must survive a power loss, the caller stores its image first
//! ([`Change::store`]). Then it puts the state into force, and reports the unit attentions. Nothing is
//! acknowledged before it is stored.
//!
//! | module | content |
//! |---|---|
//! | `conflict` | which commands conflict with which reservation |
//! | `parameters` | CDB and parameter list of PERSISTENT RESERVE OUT |
//! | `out` | its service actions |
//! | `report` | the data of PERSISTENT RESERVE IN |
//! | `image` | the state as a text that survives a restart (APTPL) |
//! | `port` | initiator ports and TransportIDs |

mod conflict;
mod image;
mod out;
mod parameters;
mod port;
mod report;
#[cfg(test)]
mod tests;

pub use conflict::{Legacy, Persistent, Rules, rules};
pub use image::ImageError;
pub use parameters::{Action, Out};
pub use port::{NAME_LEN_MAX, Registrant, TransportId};
pub use report::{InAction, Kinds};

use crate::sense::Key;
use crate::{NexusName, Outcome, ScsiStatus, Sense};

/// Maximum number of registrations of a logical unit. It bounds memory: a registration has up to 300 bytes.
pub const REGISTRATIONS_MAX: usize = 4096;

/// Type of a persistent reservation: SPC-6 table 65.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
#[repr(u8)]
pub enum Kind {
    /// Other nexuses may only read.
    WriteExclusive = 0x1,
    /// Other nexuses may neither read nor write.
    ExclusiveAccess = 0x3,
    /// Registered nexuses have full access, others may only read.
    WriteExclusiveRegistrantsOnly = 0x5,
    /// Registered nexuses have full access, others have none.
    ExclusiveAccessRegistrantsOnly = 0x6,
    /// All registered nexuses hold the reservation; others may only read.
    WriteExclusiveAllRegistrants = 0x7,
    /// All registered nexuses hold the reservation; others may neither read nor write.
    ExclusiveAccessAllRegistrants = 0x8,
}

impl Kind {
    /// All types.
    pub const ALL: [Kind; 6] = [
        Kind::WriteExclusive,
        Kind::ExclusiveAccess,
        Kind::WriteExclusiveRegistrantsOnly,
        Kind::ExclusiveAccessRegistrantsOnly,
        Kind::WriteExclusiveAllRegistrants,
        Kind::ExclusiveAccessAllRegistrants,
    ];

    /// Returns the type with this code in the TYPE field.
    pub fn of(code: u8) -> Option<Kind> {
        Kind::ALL.into_iter().find(|kind| *kind as u8 == code)
    }

    /// Returns whether every registered nexus holds the reservation.
    pub fn is_all_registrants(self) -> bool {
        matches!(self, Kind::WriteExclusiveAllRegistrants | Kind::ExclusiveAccessAllRegistrants)
    }

    /// Returns whether registered nexuses have full access.
    pub fn admits_registered(self) -> bool {
        !matches!(self, Kind::WriteExclusive | Kind::ExclusiveAccess)
    }

    /// Returns whether other nexuses may read.
    pub fn admits_reads(self) -> bool {
        use Kind::{WriteExclusive, WriteExclusiveAllRegistrants, WriteExclusiveRegistrantsOnly};
        matches!(self, WriteExclusive | WriteExclusiveRegistrantsOnly | WriteExclusiveAllRegistrants)
    }
}

/// A registered I_T nexus.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Registration {
    /// The I_T nexus.
    pub registrant: Registrant,
    /// Reservation key of the nexus, never zero.
    pub key: u64,
}

/// A persistent reservation. Its scope is the logical unit.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Held {
    /// Type.
    pub kind: Kind,
    /// The holder; `None` for the types that all registrants hold.
    pub holder: Option<Registrant>,
}

/// Settings that the unit's attributes, and its environment, determine.
#[derive(Clone, Copy, Debug)]
pub struct Policy<'a> {
    /// Whether a registration belongs to a session's ISID (attribute `enforce_pr_isids`) instead of the
    /// initiator.
    pub with_isid: bool,
    /// Whether every registration persists through power loss (attribute `force_pr_aptpl`).
    pub force_aptpl: bool,
    /// Whether images can be stored. If not, APTPL is refused.
    pub can_persist: bool,
    /// Relative identifiers of all target ports of the unit.
    pub ports: &'a [u16],
}

/// Failure of a command on reservations.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Failure {
    /// End with RESERVATION CONFLICT.
    Conflict,
    /// End with CHECK CONDITION.
    Check(Sense),
}

impl From<Sense> for Failure {
    fn from(sense: Sense) -> Failure {
        Failure::Check(sense)
    }
}

impl From<Failure> for Outcome {
    fn from(failure: Failure) -> Outcome {
        match failure {
            Failure::Conflict => Outcome::status(ScsiStatus::ReservationConflict),
            Failure::Check(sense) => Outcome::check(sense),
        }
    }
}

/// Result of a successful PERSISTENT RESERVE OUT.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Change {
    /// The state after the command.
    pub next: Reservations,
    /// Unit attentions for the nexuses that these registrants cover.
    pub attentions: Vec<(Registrant, Sense)>,
    /// Registrants whose commands, except this one, PREEMPT AND ABORT aborts.
    pub aborts: Vec<Registrant>,
    /// Whether the image must be stored, or removed, before the command ends with GOOD: see
    /// [`Reservations::image`].
    pub store: bool,
}

/// Restriction of a nexus's reads and writes by reservations.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Restriction {
    /// There is no restriction: the fast path needs no check.
    None,
    /// Only reads are allowed.
    Writes,
    /// Neither reads nor writes are allowed.
    All,
}

/// 2A/03 RESERVATIONS PREEMPTED.
pub const RESERVATIONS_PREEMPTED: Sense = Sense::new(Key::UnitAttention, 0x2A, 0x03);
/// 2A/04 RESERVATIONS RELEASED.
pub const RESERVATIONS_RELEASED: Sense = Sense::new(Key::UnitAttention, 0x2A, 0x04);
/// 2A/05 REGISTRATIONS PREEMPTED.
pub const REGISTRATIONS_PREEMPTED: Sense = Sense::new(Key::UnitAttention, 0x2A, 0x05);
/// 05/26/04 INVALID RELEASE OF PERSISTENT RESERVATION.
pub const INVALID_RELEASE: Sense = Sense::new(Key::IllegalRequest, 0x26, 0x04);
/// 05/55/04 INSUFFICIENT REGISTRATION RESOURCES.
pub const INSUFFICIENT_REGISTRATIONS: Sense = Sense::new(Key::IllegalRequest, 0x55, 0x04);

/// All reservations of a logical unit.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct Reservations {
    /// Registrations in the order in which they were made.
    registrations: Vec<Registration>,
    held: Option<Held>,
    /// PRGENERATION: counts successful service actions that change registrations, modulo 2^32. 0 after a restart.
    generation: u32,
    /// The most recent APTPL bit: whether registrations and the reservation survive a power loss.
    persists: bool,
    /// The nexus that holds the reservation of RESERVE.
    reserved: Option<NexusName>,
}

impl Reservations {
    /// Returns the registrations, in the order in which they were made.
    pub fn registrations(&self) -> &[Registration] {
        &self.registrations
    }

    /// Returns the persistent reservation.
    pub fn held(&self) -> Option<&Held> {
        self.held.as_ref()
    }

    /// Returns the nexus that holds the reservation of RESERVE.
    pub fn reserved(&self) -> Option<&NexusName> {
        self.reserved.as_ref()
    }

    /// Returns PRGENERATION.
    pub fn generation(&self) -> u32 {
        self.generation
    }

    /// Returns whether the persistent state survives a power loss (PTPL_A).
    pub fn persists(&self) -> bool {
        self.persists
    }

    /// Returns the registration of a nexus.
    fn registration(&self, nexus: &NexusName) -> Option<&Registration> {
        self.registrations.iter().find(|registration| registration.registrant.covers(nexus))
    }

    /// Checks whether a registered nexus holds the persistent reservation.
    fn holds(&self, registrant: &Registrant) -> bool {
        self.held.as_ref().is_some_and(|held| held.holder.as_ref().is_none_or(|holder| holder == registrant))
    }

    /// Checks whether reservations permit a command of a nexus. Passes PERSISTENT RESERVE OUT, RESERVE and
    /// RELEASE if their own rules decide. Error: RESERVATION CONFLICT.
    pub fn check(&self, nexus: &NexusName, cdb: &[u8]) -> Result<(), Failure> {
        let rules = rules(cdb);
        if let Some(reserved) = &self.reserved {
            let allowed = match rules.legacy {
                Legacy::Allowed => true,
                Legacy::Conflicts => reserved == nexus,
                Legacy::Never => false,
            };
            return if allowed { Ok(()) } else { Err(Failure::Conflict) };
        }
        let allowed = match rules.persistent {
            Persistent::Allowed | Persistent::Own => true,
            Persistent::Reads => self.persistent_restriction(nexus) < Restriction::All,
            Persistent::Writes => self.persistent_restriction(nexus) < Restriction::Writes,
        };
        if allowed { Ok(()) } else { Err(Failure::Conflict) }
    }

    /// Returns how far reads and writes of a nexus are restricted. The result changes only with the
    /// reservations, so the caller keeps it in the nexus's fast-path word.
    pub fn restriction(&self, nexus: &NexusName) -> Restriction {
        match &self.reserved {
            Some(reserved) if reserved != nexus => Restriction::All,
            Some(_) => Restriction::None,
            None => self.persistent_restriction(nexus),
        }
    }

    fn persistent_restriction(&self, nexus: &NexusName) -> Restriction {
        let Some(held) = &self.held else { return Restriction::None };
        if let Some(registration) = self.registration(nexus)
            && (held.kind.admits_registered() || self.holds(&registration.registrant))
        {
            return Restriction::None;
        }
        if held.kind.admits_reads() { Restriction::Writes } else { Restriction::All }
    }

    /// Puts the next state of a [`Change`] into force. Keeps a RESERVE of SPC-2 that was processed while
    /// the image was being stored.
    pub fn put_in_force(&mut self, next: Reservations) {
        *self = Reservations { reserved: self.reserved.take(), ..next };
    }

    /// Replaces the state by one that another server has stored; PRGENERATION counts this as one change.
    pub fn adopt(&mut self, next: Reservations) {
        let generation = self.generation.wrapping_add(1);
        *self = Reservations { reserved: self.reserved.take(), generation, ..next };
    }

    /// Executes RESERVE(6) and RESERVE(10): SPC-2 section 7.21. While registrations exist, it changes
    /// nothing (CRH, SPC-6 section 5.14.3) and returns GOOD for a nexus that the reservation does not
    /// restrict, else a conflict.
    pub fn reserve(&mut self, nexus: &NexusName, cdb: &[u8]) -> Result<(), Failure> {
        check_legacy_cdb(cdb)?;
        if let Some(compatible) = self.compatible(nexus) {
            return compatible;
        }
        if self.reserved.as_ref().is_some_and(|reserved| reserved != nexus) {
            return Err(Failure::Conflict);
        }
        self.reserved = Some(nexus.clone());
        Ok(())
    }

    /// Executes RELEASE(6) and RELEASE(10). From a nexus that holds no reservation it succeeds without
    /// effect.
    pub fn release(&mut self, nexus: &NexusName, cdb: &[u8]) -> Result<(), Failure> {
        check_legacy_cdb(cdb)?;
        if let Some(compatible) = self.compatible(nexus) {
            return compatible;
        }
        self.end_nexus(nexus);
        Ok(())
    }

    /// Returns the result of RESERVE and RELEASE if registrations exist, else `None`.
    fn compatible(&self, nexus: &NexusName) -> Option<Result<(), Failure>> {
        if self.registrations.is_empty() {
            return None;
        }
        let admits = self.held.as_ref().is_some_and(|held| {
            self.registration(nexus).is_some_and(|registration| {
                held.kind.admits_registered() || self.holds(&registration.registrant)
            })
        });
        Some(if admits { Ok(()) } else { Err(Failure::Conflict) })
    }

    /// Releases a lost nexus's reservation by RESERVE. Persistent reservations stay.
    pub fn end_nexus(&mut self, nexus: &NexusName) {
        if self.reserved.as_ref() == Some(nexus) {
            self.reserved = None;
        }
    }

    /// Releases the reservation by RESERVE on a reset of the unit or the target. Persistent reservations
    /// stay.
    pub fn reset(&mut self) {
        self.reserved = None;
    }
}

/// Refuses third-party and extent reservations, obsolete since SPC-2.
fn check_legacy_cdb(cdb: &[u8]) -> Result<(), Failure> {
    let flags = cdb.get(1).copied().unwrap_or(0);
    // 3RDPTY, and EXTENT.
    for (mask, bit) in [(0x10, 4), (0x01, 0)] {
        if flags & mask != 0 {
            return Err(Sense::cdb_field(1, Some(bit)).into());
        }
    }
    Ok(())
}
