//! Asymmetric logical unit access: groups of target ports, and the access state of each group. SPC-6
//! section 5.17.
//!
//! Groups belong to a logical unit, and have LIO's names and attributes (`alua/<group>`). Each port is in
//! one group; a port that was not assigned is in the default group. [`AccessGroups`] is a pure state
//! machine; the caller raises [`ACCESS_STATE_CHANGED`] for the nexuses of the unit when a call reports a
//! change.

mod attributes;
mod report;

pub use attributes::{ATTRIBUTES, GroupError};
pub use report::SetFailure;

use crate::Sense;
use crate::bytes::be8;
use crate::sense::Key;
use bitflags::bitflags;

/// Name of the group that always exists.
pub const DEFAULT_GROUP: &str = "default_tg_pt_gp";
/// Maximum number of groups of a unit, so that REPORT TARGET PORT GROUPS stays below 64 KiB.
pub const GROUPS_MAX: usize = 256;
/// 2A/06 ASYMMETRIC ACCESS STATE CHANGED.
pub const ACCESS_STATE_CHANGED: Sense = Sense::new(Key::UnitAttention, 0x2A, 0x06);

/// Asymmetric access state: SPC-6 table 326. LBA dependent access (4h) is not supported.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
#[repr(u8)]
pub enum AccessState {
    /// All commands are allowed, at full performance.
    #[default]
    ActiveOptimized = 0x0,
    /// All commands are allowed, with lower performance.
    ActiveNonOptimized = 0x1,
    /// Commands that do not access the medium are allowed.
    Standby = 0x2,
    /// Only identification commands are allowed.
    Unavailable = 0x3,
    /// The port is offline.
    Offline = 0xE,
    /// The state is changing.
    Transitioning = 0xF,
}

impl AccessState {
    /// All states.
    pub const ALL: [AccessState; 6] = [
        AccessState::ActiveOptimized,
        AccessState::ActiveNonOptimized,
        AccessState::Standby,
        AccessState::Unavailable,
        AccessState::Offline,
        AccessState::Transitioning,
    ];

    /// Returns the state with this code.
    pub fn of(code: u8) -> Option<AccessState> {
        AccessState::ALL.into_iter().find(|state| *state as u8 == code)
    }

    /// Returns whether every command is allowed, so that no check is needed.
    pub fn is_active(self) -> bool {
        matches!(self, AccessState::ActiveOptimized | AccessState::ActiveNonOptimized)
    }

    /// Checks whether a command may be processed in this state. Error: 02/04 with the qualifier of the
    /// state.
    pub fn check(self, cdb: &[u8]) -> Result<(), Sense> {
        let (allowed, code) = match self {
            AccessState::ActiveOptimized | AccessState::ActiveNonOptimized => return Ok(()),
            AccessState::Standby => (Needs::STANDBY, 0x0B),
            AccessState::Unavailable => (Needs::UNAVAILABLE, 0x0C),
            AccessState::Offline => (Needs::OFFLINE, 0x12),
            AccessState::Transitioning => (Needs::TRANSITIONING, 0x0A),
        };
        if needs(cdb).intersects(allowed) { Ok(()) } else { Err(Sense::new(Key::NotReady, 0x04, code)) }
    }

    fn supported_bit(self) -> Supported {
        match self {
            AccessState::ActiveOptimized => Supported::ACTIVE_OPTIMIZED,
            AccessState::ActiveNonOptimized => Supported::ACTIVE_NONOPTIMIZED,
            AccessState::Standby => Supported::STANDBY,
            AccessState::Unavailable => Supported::UNAVAILABLE,
            AccessState::Offline => Supported::OFFLINE,
            AccessState::Transitioning => Supported::TRANSITIONING,
        }
    }
}

bitflags! {
    /// States, other than the active ones, in which a command is allowed.
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    struct Needs: u8 {
        const STANDBY = 1;
        const UNAVAILABLE = 1 << 1;
        const OFFLINE = 1 << 2;
        const TRANSITIONING = 1 << 3;
    }
}

bitflags! {
    /// States that a group supports, as the second byte of its descriptor: SPC-6 table 325.
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    pub struct Supported: u8 {
        /// T_SUP.
        const TRANSITIONING = 0x80;
        /// O_SUP.
        const OFFLINE = 0x40;
        /// U_SUP.
        const UNAVAILABLE = 0x08;
        /// S_SUP.
        const STANDBY = 0x04;
        /// AN_SUP.
        const ACTIVE_NONOPTIMIZED = 0x02;
        /// AO_SUP.
        const ACTIVE_OPTIMIZED = 0x01;
    }
}

/// Returns the states, other than the active ones, in which a command is allowed: SPC-6 sections 5.17.2.5
/// to 5.17.2.8.
fn needs(cdb: &[u8]) -> Needs {
    let (identity, standby) = (Needs::all(), Needs::STANDBY);
    let not_offline = Needs::STANDBY | Needs::UNAVAILABLE | Needs::TRANSITIONING;
    match (be8(cdb, 0), be8(cdb, 1) & 0x1F) {
        // INQUIRY, REPORT LUNS, REQUEST SENSE, REPORT TARGET PORT GROUPS.
        (0x12 | 0xA0 | 0x03, _) | (0xA3, 0x0A) => identity,
        // READ BUFFER and WRITE BUFFER.
        (0x3B | 0x3C, _) => not_offline,
        // With SET TARGET PORT GROUPS an initiator leaves the state.
        (0xA4, 0x0A) => Needs::STANDBY | Needs::UNAVAILABLE,
        // LOG SELECT, LOG SENSE, MODE SELECT, MODE SENSE, diagnostics, READ CAPACITY, PERSISTENT RESERVE IN and OUT.
        (0x4C | 0x4D | 0x15 | 0x55 | 0x1A | 0x5A | 0x1C | 0x1D | 0x25 | 0x5E | 0x5F, _) => standby,
        // READ CAPACITY(16), REPORT SUPPORTED OPERATION CODES and TASK MANAGEMENT FUNCTIONS.
        (0x9E, 0x10) | (0xA3, 0x0C | 0x0D) => standby,
        _ => Needs::empty(),
    }
}

/// Origin of the last change of a group's state: SPC-6 table 327.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
#[repr(u8)]
pub enum StateStatus {
    /// The state has not changed.
    #[default]
    None = 0,
    /// SET TARGET PORT GROUPS changed the state.
    Explicit = 1,
    /// The device server changed the state: an attribute was set.
    Implicit = 2,
}

/// A target port group.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Group {
    /// Name of the group.
    pub name: String,
    /// TARGET PORT GROUP identifier (`tg_pt_gp_id`).
    pub id: u16,
    /// State (`alua_access_state`).
    pub state: AccessState,
    /// Origin of the last change of the state (`alua_access_status`).
    pub status: StateStatus,
    /// TPGS (`alua_access_type`): bit 0 implicit, bit 1 explicit.
    pub access_type: u8,
    /// PREF (`preferred`).
    pub preferred: bool,
    /// States that the group supports (`alua_support_*`).
    pub supported: Supported,
    /// Seconds for which an initiator waits for a transition (`implicit_trans_secs`); 0: not specified.
    pub implicit_transition_secs: u8,
    /// LIO's `nonop_delay_msecs`. Kept for configuration files; commands are not delayed.
    pub nonoptimized_delay_ms: u16,
    /// LIO's `trans_delay_msecs`. Kept for configuration files; a state changes at once.
    pub transition_delay_ms: u16,
    /// LIO's `alua_write_metadata`. Kept for configuration files, which hold the states themselves.
    pub write_metadata: bool,
    /// Relative target port identifiers of the group's ports, sorted.
    pub ports: Vec<u16>,
}

impl Group {
    fn new(name: &str, id: u16) -> Group {
        Group {
            name: name.to_owned(),
            id,
            state: AccessState::ActiveOptimized,
            status: StateStatus::None,
            access_type: 3,
            preferred: false,
            supported: Supported::all(),
            implicit_transition_secs: 0,
            nonoptimized_delay_ms: 100,
            transition_delay_ms: 0,
            write_metadata: false,
            ports: Vec::new(),
        }
    }
}

/// The target port groups of a logical unit.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct AccessGroups {
    /// All groups; the default group is the first.
    groups: Vec<Group>,
}

impl Default for AccessGroups {
    fn default() -> AccessGroups {
        AccessGroups { groups: vec![Group::new(DEFAULT_GROUP, 0)] }
    }
}

impl AccessGroups {
    /// Returns the groups; the default group is the first.
    pub fn groups(&self) -> &[Group] {
        &self.groups
    }

    /// Returns the group of a target port.
    pub fn of_port(&self, port: u16) -> &Group {
        let group = self.groups.iter().find(|group| group.ports.contains(&port));
        // The default group cannot be removed.
        group.unwrap_or(&self.groups[0])
    }

    /// Returns the state in which a target port accesses the unit. It changes only when the groups change,
    /// so the caller keeps it in the fast-path word of a nexus.
    pub fn state_of(&self, port: u16) -> AccessState {
        self.of_port(port).state
    }

    /// Creates a group. `id` 0 selects the next free identifier. Errors: the name or identifier is taken or
    /// invalid, or there are [`GROUPS_MAX`] groups.
    pub fn create(&mut self, name: &str, id: u16) -> Result<(), GroupError> {
        let is_valid = !name.is_empty() && !name.contains(|c: char| c == '/' || c.is_whitespace());
        if !is_valid || self.groups.iter().any(|group| group.name == name) {
            return Err(GroupError::Name(name.to_owned()));
        }
        if self.groups.len() >= GROUPS_MAX {
            return Err(GroupError::TooMany);
        }
        let id = self.free_id(id)?;
        self.groups.push(Group::new(name, id));
        Ok(())
    }

    fn free_id(&self, id: u16) -> Result<u16, GroupError> {
        let is_free = |id: &u16| self.groups.iter().all(|group| group.id != *id);
        let found = if id == 0 { (1..=u16::MAX).find(is_free) } else { Some(id).filter(is_free) };
        found.ok_or(GroupError::Id(id))
    }

    /// Removes a group; its ports return to the default group. Errors: the group does not exist, or is the default
    /// group.
    pub fn remove(&mut self, name: &str) -> Result<(), GroupError> {
        let index = self.groups.iter().position(|group| group.name == name);
        let index = index.filter(|index| *index != 0).ok_or_else(|| GroupError::Unknown(name.to_owned()))?;
        let group = self.groups.remove(index);
        group.ports.into_iter().for_each(|port| self.put_port(0, port));
        Ok(())
    }

    /// Adds a target port to the default group, unless it is already in a group.
    pub fn add_port(&mut self, port: u16) {
        if !self.groups.iter().any(|group| group.ports.contains(&port)) {
            self.put_port(0, port);
        }
    }

    /// Removes a target port.
    pub fn remove_port(&mut self, port: u16) {
        self.groups.iter_mut().for_each(|group| group.ports.retain(|other| *other != port));
    }

    /// Moves a target port into a group. Error: the group does not exist.
    pub fn move_port(&mut self, port: u16, name: &str) -> Result<(), GroupError> {
        let index = self.groups.iter().position(|group| group.name == name);
        let index = index.ok_or_else(|| GroupError::Unknown(name.to_owned()))?;
        self.remove_port(port);
        self.put_port(index, port);
        Ok(())
    }

    fn put_port(&mut self, index: usize, port: u16) {
        let ports = &mut self.groups[index].ports;
        if let Err(at) = ports.binary_search(&port) {
            ports.insert(at, port);
        }
    }
}

#[cfg(test)]
mod tests;
