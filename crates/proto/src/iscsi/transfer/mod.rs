//! Plans of a command's data (RFC 7143, sections 4.2.5.2, 11.7 and 11.8): what arrives for a write, and how the
//! data of a read is split.
//!
//! *Invariants:* sequences and PDUs are in order (`DataPDUInOrder` and `DataSequenceInOrder` are always `Yes`: a
//! target may insist, as their result function is OR), so a plan is a few counters. Nothing allocates. A byte is
//! accepted once, and none beyond the expected data transfer length.

mod read;
#[cfg(test)]
mod tests;
mod write;

pub use read::{DataInPart, ReadPlan};
pub use write::{MAX_R2TS, Placement, R2tOrder, TransferError, WritePlan, WriteRules};
