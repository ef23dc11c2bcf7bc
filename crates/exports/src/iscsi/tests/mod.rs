//! Tests of sessions on a ring, with an initiator over a socket pair.

mod client;
mod data;
mod programs;
mod random;
mod reservations;
mod rig;
mod sanitize;
mod sessions;
mod tasks;
