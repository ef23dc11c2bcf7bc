//! Plans the changes from a running process to a topology file: the running state, the plan, and its report.
//!
//! [`plan`] is a pure function of the running state and the wanted topology. This module changes no device:
//! the server executes the plan, one action at a time, by the operations of its control API
//! ([ADR 39](../../../docs/adr/0039-apply-plans-then-acts.md)).

mod device;
mod order;
mod plan;
mod report;
mod running;
#[cfg(test)]
mod tests;

pub use plan::{Action, Plan, Refusal, plan};
pub use report::{ActionReport, ApplyAnswer, ApplyRequest, DeviceText, Outcome, TopologyText};
pub use running::{Opened, Running, RunningDevice, RunningExport, SavedDevice, without_secrets};
