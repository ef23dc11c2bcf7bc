//! CDB and parameter list of PERSISTENT RESERVE OUT: SPC-6 section 6.16.

use super::{Failure, TransportId};
use crate::Sense;
use crate::bytes::{be8, be16, be32, be64};

/// Service action of PERSISTENT RESERVE OUT: SPC-6 table 195.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Action {
    /// Registers, changes or removes the key of the nexus.
    Register = 0x00,
    /// Creates the persistent reservation.
    Reserve = 0x01,
    /// Releases the persistent reservation.
    Release = 0x02,
    /// Removes all registrations and the reservation.
    Clear = 0x03,
    /// Takes over the reservation, or removes registrations of other nexuses.
    Preempt = 0x04,
    /// Like PREEMPT, and aborts the commands of the preempted nexuses.
    PreemptAndAbort = 0x05,
    /// Like REGISTER, but ignores the existing key.
    RegisterAndIgnore = 0x06,
    /// Registers another nexus and moves the reservation to it.
    RegisterAndMove = 0x07,
}

impl Action {
    /// All service actions, for REPORT SUPPORTED OPERATION CODES. REPLACE LOST RESERVATION (08h) is
    /// refused: a unit whose stored reservations cannot be read does not start, so no reservation gets
    /// lost.
    pub const ALL: [Action; 8] = [
        Action::Register,
        Action::Reserve,
        Action::Release,
        Action::Clear,
        Action::Preempt,
        Action::PreemptAndAbort,
        Action::RegisterAndIgnore,
        Action::RegisterAndMove,
    ];

    /// Returns the name in SPC-6.
    pub fn name(self) -> &'static str {
        match self {
            Action::Register => "REGISTER",
            Action::Reserve => "RESERVE",
            Action::Release => "RELEASE",
            Action::Clear => "CLEAR",
            Action::Preempt => "PREEMPT",
            Action::PreemptAndAbort => "PREEMPT AND ABORT",
            Action::RegisterAndIgnore => "REGISTER AND IGNORE EXISTING KEY",
            Action::RegisterAndMove => "REGISTER AND MOVE",
        }
    }
}

/// Nexus to which REGISTER AND MOVE moves the reservation.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Destination {
    /// Relative target port identifier.
    pub port: u16,
    /// The initiator port.
    pub initiator: TransportId,
    /// Whether to remove the sender's registration (UNREG).
    pub unregister: bool,
}

/// A PERSISTENT RESERVE OUT command with its parameter list.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Out {
    /// Service action.
    pub action: Action,
    /// SCOPE field; 0 is the logical unit.
    pub scope: u8,
    /// TYPE field.
    pub kind: u8,
    /// RESERVATION KEY field.
    pub key: u64,
    /// SERVICE ACTION RESERVATION KEY field.
    pub action_key: u64,
    /// Additional initiator ports to register; `None` if SPEC_I_PT is zero.
    pub initiators: Option<Vec<TransportId>>,
    /// Whether the registration is for all target ports (ALL_TG_PT).
    pub all_ports: bool,
    /// Whether registrations and the reservation survive a power loss (APTPL).
    pub persist: bool,
    /// Destination of REGISTER AND MOVE; `None` for other service actions.
    pub destination: Option<Destination>,
}

/// Bytes of the parameter list without TransportIDs.
const LIST_LEN: usize = 24;

impl Out {
    /// Returns the parameter list length in the CDB. Errors: the service action is unknown, or the list is
    /// too short for any service action.
    pub fn list_len(cdb: &[u8]) -> Result<u32, Failure> {
        action(cdb)?;
        let len = be32(cdb, 5);
        if (len as usize) < LIST_LEN {
            return Err(Sense::PARAMETER_LIST_LENGTH.into());
        }
        Ok(len)
    }

    /// Parses the command. Errors: 05/24/00 for CDB fields, 05/1A/00 for a wrong list length, 05/26/00 for
    /// list fields.
    pub fn parse(cdb: &[u8], list: &[u8]) -> Result<Out, Failure> {
        let action = action(cdb)?;
        let len = Out::list_len(cdb)? as usize;
        let list = list.get(..len).ok_or(Sense::PARAMETER_LIST_LENGTH)?;
        let mut out = Out {
            action,
            scope: be8(cdb, 2) >> 4,
            kind: be8(cdb, 2) & 0x0F,
            key: be64(list, 0),
            action_key: be64(list, 8),
            initiators: None,
            all_ports: false,
            persist: false,
            destination: None,
        };
        if action == Action::RegisterAndMove {
            let (initiator, unregister) = (one_transport_id(list)?, be8(list, 17) & 0x02 != 0);
            out.persist = be8(list, 17) & 0x01 != 0;
            out.destination = Some(Destination { port: be16(list, 18), initiator, unregister });
            return Ok(out);
        }
        let flags = be8(list, 20);
        if flags & 0x08 != 0 {
            // Only REGISTER allows SPEC_I_PT: SPC-6 section 6.16.3.
            if action != Action::Register {
                return Err(Sense::parameter_field(20, Some(3)).into());
            }
            out.initiators = Some(transport_ids(list)?);
        } else if len != LIST_LEN {
            return Err(Sense::PARAMETER_LIST_LENGTH.into());
        }
        // Service actions that do not register ignore both fields.
        if matches!(action, Action::Register | Action::RegisterAndIgnore) {
            (out.all_ports, out.persist) = (flags & 0x04 != 0, flags & 0x01 != 0);
        }
        Ok(out)
    }
}

fn action(cdb: &[u8]) -> Result<Action, Failure> {
    let code = be8(cdb, 1) & 0x1F;
    let action = Action::ALL.into_iter().find(|action| *action as u8 == code);
    action.ok_or(Failure::Check(Sense::cdb_field(1, Some(4))))
}

/// Parses the TransportIDs after a SPEC_I_PT list.
fn transport_ids(list: &[u8]) -> Result<Vec<TransportId>, Failure> {
    // The list ends with a length field and that many bytes of TransportIDs.
    let end = (be32(list, LIST_LEN) as usize).checked_add(LIST_LEN + 4);
    if list.len() < LIST_LEN + 4 || end != Some(list.len()) {
        return Err(Sense::PARAMETER_LIST_LENGTH.into());
    }
    let (mut ids, mut at) = (Vec::new(), LIST_LEN + 4);
    while let Some(rest) = list.get(at..).filter(|rest| !rest.is_empty()) {
        let (id, len) = TransportId::parse(rest, at)?;
        ids.push(id);
        at += len;
    }
    Ok(ids)
}

/// Parses the TransportID of REGISTER AND MOVE.
fn one_transport_id(list: &[u8]) -> Result<TransportId, Failure> {
    let rest = list.get(LIST_LEN..).unwrap_or(&[]);
    if be32(list, 20) as usize != rest.len() {
        return Err(Sense::PARAMETER_LIST_LENGTH.into());
    }
    let (id, len) = TransportId::parse(rest, LIST_LEN)?;
    if len != rest.len() {
        return Err(Sense::parameter_field(20, None).into());
    }
    Ok(id)
}
