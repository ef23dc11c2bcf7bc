//! SCSI logical units: translates command descriptor blocks into block requests, and their results into
//! status and sense data.
//!
//! Source: SAM-6, SPC-6, SBC-4. A [`LogicalUnit`] is shared by all sessions that can access it; nothing
//! here does I/O, reads a clock, or depends on the transport.
//! See [ADR 40](../../../docs/adr/0040-iscsi-target.md).
//!
//! A transport calls [`begin`] with a command, and does the work that the returned [`Begin`] describes.

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
mod zones;

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
pub use zones::{Zoned, explain};
