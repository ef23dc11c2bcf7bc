//! The vocabulary of the block layer.
//!
//! All other crates use these types: units that cannot be mixed up, the closed sets of operations and
//! statuses, the request that moves through a stack, and queue limits. This crate knows no clock, no system
//! call, no layer and no thread.
//!
//! *Invariant:* nothing here allocates except [`QueueLimits`] errors, and nothing here panics on a
//! value that came from outside.

#![forbid(unsafe_code)]

mod extent;
mod integrity;
mod limits;
mod op;
mod profile;
mod request;
mod status;
mod units;
mod zone;

pub use extent::Extent;
pub use integrity::{Guard, Integrity, UnknownIntegrity};
pub use limits::{
    Attribute, Features, Field, LimitOverrides, LimitsError, Misaligned, ParseLimitsError, QueueLimits,
    SEG_BOUNDARY_MASK, Scale, UNLIMITED_BYTES, UNLIMITED_SECTORS, Unit,
};
pub use op::{Flags, Op};
pub use profile::{Abilities, Fact, Profile};
pub use request::{Cookie, Data, Region, Request, Segment, Tag};
pub use status::Status;
pub use units::{Bytes, ParseSizeError, Sectors};
pub use zone::{Zone, ZoneCondition, ZoneKind};
