//! The login phase of a target (RFC 7143, sections 6.3, 11.12 and 11.13).
//!
//! [`Target`] is the state machine. Through [`Directory`] it asks its owner about targets, initiators and
//! sessions; [`Policy`] is the owner's answer; [`LoginDone`] is the result.

mod directory;
mod security;
mod status;
mod target;
#[cfg(test)]
mod tests;

pub use directory::{Admission, Authentication, Chap, Credentials, Directory, Existing, Policy, Secret};
pub use status::Status;
pub use target::{MAX_REQUESTS, Step, Target};

use super::parameters::{ConnectionParameters, Parameters};
use super::pdu::Isid;

/// Session type (SessionType, section 13.21).
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub enum SessionType {
    /// SendTargets only.
    Discovery,
    /// SCSI commands to a target.
    Normal {
        /// The target's name, in normal form.
        target: String,
    },
}

/// Relation of a new connection to the existing sessions (section 6.3.1).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Join {
    /// A new session.
    New,
    /// A new session in place of the one with this TSIH, which the owner ends before it sends the final response
    /// (session reinstatement, section 6.3.5).
    Reinstate {
        /// TSIH of the session to end.
        old_tsih: u16,
    },
    /// A further connection of the session [`LoginDone::tsih`].
    AddConnection,
    /// A connection of the session [`LoginDone::tsih`] in place of the one with [`LoginDone::cid`], which the owner
    /// ends before it sends the final response (connection reinstatement, section 6.3.4).
    ReinstateConnection,
}

/// A connection that entered the full-feature phase.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LoginDone {
    /// The initiator's name, in normal form.
    pub initiator: String,
    /// InitiatorAlias, if the initiator sent one.
    pub initiator_alias: Option<String>,
    /// Initiator session identifier.
    pub isid: Isid,
    /// Target session identifying handle of the session.
    pub tsih: u16,
    /// Connection identifier.
    pub cid: u16,
    /// Session type, with the target's name if it is a normal session.
    pub session: SessionType,
    /// Portal group tag of the portal.
    pub portal_group_tag: u16,
    /// Relation of the connection to other sessions.
    pub join: Join,
    /// Parameters of the session. For a further connection, the caller keeps those of the session.
    pub parameters: Parameters,
    /// Parameters of this connection.
    pub connection: ConnectionParameters,
    /// The name with which the initiator authenticated itself by CHAP.
    pub user: Option<String>,
    /// StatSN of the next status.
    pub stat_sn: u32,
    /// CmdSN of the session's first command, for [`super::sequence::CommandWindow::new`].
    pub cmd_sn: u32,
    /// Depth of the command window, for [`super::sequence::CommandWindow::new`].
    pub window: u32,
}
