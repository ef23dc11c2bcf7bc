//! Exports: the interfaces that hosts attach to.
//!
//! An export turns the requests of a host into requests of a hardware queue, and their completions into
//! replies. It runs on the reactor's thread, between the ring and the queues.

#![forbid(unsafe_code)]

mod budget;
mod chunk_uses;
mod facts;
mod fronts;
pub mod fuse;
pub mod iscsi;
pub mod nbd;
mod outbox;
pub mod ublk;
pub mod vhost;

pub use facts::DeviceFacts;
pub use fronts::{Front, FrontNumber, Fronts, Turn};
