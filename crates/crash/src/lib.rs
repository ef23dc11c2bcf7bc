//! The crash laboratory: which states a power cut can leave on a device, and which of them to check.
//!
//! A [`Log`] holds the writes, flushes and marks of a workload, with the moments of their submission and
//! completion. A [`Model`] decides which writes a power cut may lose; a [`State`] is a moment of the cut and
//! the writes that are lost there. A [`View`] reads the blocks of a state from the log and the base without
//! copying them. [`Explorer`] generates states, [`minimise`] reduces a failing one, and [`report`] explains it.
//!
//! *Invariant:* no process, mount or socket is used here; data is read through [`Source`].

#![forbid(unsafe_code)]

mod dm;
mod explore;
mod log;
mod minimise;
mod model;
pub mod record;
pub mod report;
mod seen;
mod source;
mod view;

pub use explore::{Explorer, Phase};
pub use log::{Event, Flush, Kind, Log, LogError, Mark, Write};
pub use minimise::minimise;
pub use model::{Illegal, Model, Piece, State, Variant, WHOLE};
pub use seen::{CHUNKS_MAX, ReadSet, Seen, Verdicts};
pub use source::Source;
pub use view::{CHUNK, View};
