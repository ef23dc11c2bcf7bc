//! Data plans of a command (RFC 7143, sections 4.2.5.2, 11.7 and 11.8): which data arrives for a write, and
//! how the data of a read is split into PDUs.
//!
//! *Invariants:* sequences and PDUs are in order (`DataPDUInOrder` and `DataSequenceInOrder` are always
//! `Yes`, which a target can enforce because their result function is OR), so a plan is a few counters.
//! Nothing allocates. Each byte is accepted once, and none beyond the expected data transfer length.

mod read;
#[cfg(test)]
mod tests;
mod write;

pub use read::{DataInPart, ReadPlan};
pub use write::{MAX_R2TS, Placement, R2tOrder, TransferError, WritePlan, WriteRules};
