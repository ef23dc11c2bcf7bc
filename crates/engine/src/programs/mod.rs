//! Programs that hold the blocks of a device: drivers that speak the exec protocol, and nbdkit.
//!
//! Every program has a process group of its own, and its output becomes lines of the log. It is ended when
//! its device is closed, and started again when it ends by itself
//! ([ADR 56](../../../../docs/adr/0056-drivers-as-programs.md)).

mod child;
mod conformance;
mod exec;
mod nbdkit;
mod program;

pub use conformance::{Checked, Verdict, exec_test};
pub(crate) use exec::ExecDevice;
pub(crate) use nbdkit::Nbdkit;
pub(crate) use program::ProgramError;
