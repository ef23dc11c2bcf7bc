//! Exports: what a host attaches to.
//!
//! An export turns what a host sends into requests on a hardware queue, and what ends there into
//! answers. It runs on the reactor's thread, between the ring and the queues.

#![forbid(unsafe_code)]

mod fronts;
pub mod fuse;
pub mod nbd;
pub mod ublk;

pub use fronts::{Front, FrontNumber, Fronts, Turn};
