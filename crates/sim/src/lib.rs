//! Deterministic simulation: a virtual clock, a simulated ring with memory and disks, and the sector
//! model that says what a device may answer.
//!
//! [`SimRing`] stands in for the kernel behind [`queue::Ring`]: time only moves when the driving loop
//! says so, memory is poisoned, disks have volatile caches, and a [`Faults`] plan makes things go wrong.
//! Every choice comes from one [`Rng`], so a seed replays a run exactly; [`Tracer`] hashes what happened
//! to prove it. [`Model`] watches the front-end's side and refuses what no right device would answer.
//!
//! *Invariant:* no wall clock, thread, address or hash order decides anything here.
//! *Invariant:* a fault is one that real hardware or Linux can produce; a stack that breaks under it is wrong.

#![forbid(unsafe_code)]

mod arena;
mod disk;
mod faults;
mod model;
mod net;
pub mod nodes;
mod pattern;
mod ring;
mod rng;
mod trace;

pub use disk::{Disk, DiskConfig};
pub use faults::Faults;
pub use model::{Model, Ticket, Violation};
pub use net::{Peer, SimStream};
pub use pattern::{Content, SECTOR_LEN, fill_sector, read_sector};
pub use ring::SimRing;
pub use rng::Rng;
pub use trace::{Arg, Tracer};
