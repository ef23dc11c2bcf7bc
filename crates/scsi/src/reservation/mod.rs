//! Reservations of a logical unit: persistent ones (SPC-6 section 5.14) and those of RESERVE and RELEASE (SPC-2).
//!
//! [`Reservations`] is a pure state machine without lock, I/O or clock. PERSISTENT RESERVE OUT computes the next state
//! as a [`Change`]; the caller stores its image first if it must survive a power loss ([`Change::store`]), then
//! puts it in force, and reports the unit attentions. Nothing is acknowledged before it is stored.
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

/// Most registrations of a logical unit. A bound of memory: a registration has up to 300 bytes.
pub const REGISTRATIONS_MAX: usize = 4096;

/// Type of a persistent reservation: SPC-6 table 65.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
#[repr(u8)]
pub enum Kind {
    /// Others may read.
    WriteExclusive = 0x1,
    /// Others may neither read nor write.
    ExclusiveAccess = 0x3,
    /// Registered nexuses may do everything, others may read.
    WriteExclusiveRegistrantsOnly = 0x5,
    /// Registered nexuses may do everything, others nothing.
    ExclusiveAccessRegistrantsOnly = 0x6,
    /// All registered nexuses hold the reservation; others may read.
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

    /// The type with this code in the TYPE field.
    pub fn of(code: u8) -> Option<Kind> {
        Kind::ALL.into_iter().find(|kind| *kind as u8 == code)
    }

    /// Every registered nexus holds the reservation.
    pub fn is_all_registrants(self) -> bool {
        matches!(self, Kind::WriteExclusiveAllRegistrants | Kind::ExclusiveAccessAllRegistrants)
    }

    /// Registered nexuses may do everything.
    pub fn admits_registered(self) -> bool {
        !matches!(self, Kind::WriteExclusive | Kind::ExclusiveAccess)
    }

    /// Others may read.
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
    /// Its reservation key. Never zero.
    pub key: u64,
}

/// A persistent reservation. Its scope is the logical unit.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Held {
    /// Type.
    pub kind: Kind,
    /// The holder; `None` for the types of which all registrants are holders.
    pub holder: Option<Registrant>,
}

/// What the attributes of the unit, and its surroundings, decide.
#[derive(Clone, Copy, Debug)]
pub struct Policy<'a> {
    /// A registration belongs to a session's ISID (attribute `enforce_pr_isids`), rather than to the initiator.
    pub with_isid: bool,
    /// Every registration persists through power loss (attribute `force_pr_aptpl`).
    pub force_aptpl: bool,
    /// Images can be stored. Without it, APTPL is refused.
    pub can_persist: bool,
    /// Relative identifiers of all target ports of the unit.
    pub ports: &'a [u16],
}

/// Why a command about reservations fails.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Failure {
    /// RESERVATION CONFLICT.
    Conflict,
    /// CHECK CONDITION.
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

/// A successful PERSISTENT RESERVE OUT.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Change {
    /// The state from now on.
    pub next: Reservations,
    /// Unit attentions for the nexuses that these registrants cover.
    pub attentions: Vec<(Registrant, Sense)>,
    /// Registrants whose commands PREEMPT AND ABORT ends, except this command.
    pub aborts: Vec<Registrant>,
    /// The image must be stored, or removed, before the command ends with GOOD: see [`Reservations::image`].
    pub store: bool,
}

/// How far reservations restrict the reads and writes of a nexus.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Restriction {
    /// Not at all: the fast path needs no check.
    None,
    /// Reads are allowed.
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
    /// In the order of their registration.
    registrations: Vec<Registration>,
    held: Option<Held>,
    /// PRGENERATION: counts successful service actions that change registrations, modulo 2^32. 0 after a restart.
    generation: u32,
    /// The most recent APTPL bit: registrations and the reservation survive a power loss.
    persists: bool,
    /// The nexus that holds the reservation of RESERVE.
    reserved: Option<NexusName>,
}

impl Reservations {
    /// The registrations, in the order in which they were made.
    pub fn registrations(&self) -> &[Registration] {
        &self.registrations
    }

    /// The persistent reservation.
    pub fn held(&self) -> Option<&Held> {
        self.held.as_ref()
    }

    /// The nexus that holds the reservation of RESERVE.
    pub fn reserved(&self) -> Option<&NexusName> {
        self.reserved.as_ref()
    }

    /// PRGENERATION.
    pub fn generation(&self) -> u32 {
        self.generation
    }

    /// The persistent state survives a power loss (PTPL_A).
    pub fn persists(&self) -> bool {
        self.persists
    }

    /// The registration of a nexus.
    fn registration(&self, nexus: &NexusName) -> Option<&Registration> {
        self.registrations.iter().find(|registration| registration.registrant.covers(nexus))
    }

    /// Checks whether a registered nexus holds the persistent reservation.
    fn holds(&self, registrant: &Registrant) -> bool {
        self.held.as_ref().is_some_and(|held| held.holder.as_ref().is_none_or(|holder| holder == registrant))
    }

    /// Checks a command of a nexus. PERSISTENT RESERVE OUT, RESERVE and RELEASE pass here where their own rules
    /// decide. Error: RESERVATION CONFLICT.
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

    /// How far reads and writes of a nexus are restricted. It changes only with the reservations: the caller keeps
    /// it in the nexus's fast-path word.
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

    /// Puts the next state of a [`Change`] in force. A RESERVE of SPC-2 that was processed while the image was
    /// stored stays.
    pub fn put_in_force(&mut self, next: Reservations) {
        *self = Reservations { reserved: self.reserved.take(), ..next };
    }

    /// Replaces the state by one that another server has stored; PRGENERATION counts that as one change.
    pub fn adopt(&mut self, next: Reservations) {
        let generation = self.generation.wrapping_add(1);
        *self = Reservations { reserved: self.reserved.take(), generation, ..next };
    }

    /// RESERVE(6) and RESERVE(10): SPC-2 section 7.21. With persistent reservations in use they change nothing
    /// (CRH, SPC-6 section 5.14.3): GOOD for a nexus that the reservation does not restrict, else a conflict.
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

    /// RELEASE(6) and RELEASE(10). Of a nexus that holds nothing it succeeds without effect.
    pub fn release(&mut self, nexus: &NexusName, cdb: &[u8]) -> Result<(), Failure> {
        check_legacy_cdb(cdb)?;
        if let Some(compatible) = self.compatible(nexus) {
            return compatible;
        }
        self.end_nexus(nexus);
        Ok(())
    }

    /// The result of RESERVE and RELEASE where registrations exist; `None` without registrations.
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

    /// Releases the reservation of RESERVE of a nexus that was lost. Persistent reservations stay.
    pub fn end_nexus(&mut self, nexus: &NexusName) {
        if self.reserved.as_ref() == Some(nexus) {
            self.reserved = None;
        }
    }

    /// Releases the reservation of RESERVE: reset of the unit or the target. Persistent reservations stay.
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
