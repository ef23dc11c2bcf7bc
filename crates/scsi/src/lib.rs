//! SCSI logical units: from a command descriptor block to block requests, and back to status and sense data.
//!
//! Source: SAM-6, SPC-6, SBC-4. A [`LogicalUnit`] is shared by all sessions that see it;
//! nothing here does I/O, reads a clock, or knows the transport.
//! See [ADR 40](../../../docs/adr/0040-iscsi-target.md).
//!
//! A transport calls [`begin`] with a command, and carries out what it returns: see [`Begin`].

#![forbid(unsafe_code)]

pub mod alua;
mod attention;
mod attributes;
mod bytes;
mod capacity;
mod command;
pub mod copy;
mod data;
mod diagnostics;
mod dispatch;
pub mod fuzzing;
mod identity;
mod inquiry;
mod log;
mod lun;
mod media;
mod mode;
mod nexus;
mod opcodes;
mod outcome;
pub mod program;
mod report_luns;
pub mod reservation;
mod reserve;
pub mod sanitize;
pub mod sense;
mod states;
#[cfg(test)]
mod tests;
mod unit;

pub use attention::Attention;
pub use attributes::{AttributeError, Attributes};
pub use command::{Begin, BlockIo, Command, Parameters, Session, TaskAttribute, begin, complete};
pub use identity::{Designators, Identity};
pub use lun::Lun;
pub use media::{Can, Media};
pub use nexus::{Access, Nexus, NexusLoss, NexusName, Restrictions};
pub use outcome::{Outcome, Residual, ScsiStatus};
pub use program::Program;
pub use report_luns::no_unit;
pub use reserve::{AptplStore, StoreReservations};
pub use sense::Sense;
pub use unit::{LogicalUnit, Reset};
