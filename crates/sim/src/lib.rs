//! Deterministic simulation: a virtual clock, a simulated ring with memory and disks, and a sector model that
//! checks a device's answers.
//!
//! [`SimRing`] replaces the kernel behind [`queue::Ring`]: time advances only on request of the driving loop,
//! memory is poisoned, disks have volatile caches, and a [`Faults`] plan injects faults. All random choices
//! come from one [`Rng`], so a seed reproduces a run exactly; [`Tracer`] hashes all events to prove it.
//! [`Model`] watches the requests of the front-end and reports answers that no correct device gives.
//!
//! *Invariant:* nothing depends on the wall clock, threads, addresses or the order of hash maps.
//! *Invariant:* every fault can occur on real hardware or Linux; a stack that cannot cope with one is wrong.

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
mod wakes;

pub use disk::{Disk, DiskConfig};
pub use faults::Faults;
pub use model::{Model, Ticket, Violation};
pub use net::{Peer, SimStream};
pub use pattern::{Content, SECTOR_LEN, fill_sector, read_sector};
pub use ring::SimRing;
pub use rng::Rng;
pub use trace::{Arg, Tracer};
pub use wakes::Wakes;
