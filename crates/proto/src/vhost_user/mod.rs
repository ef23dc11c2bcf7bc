//! vhost-user: a virtual machine monitor shares its virtqueues with a process that serves a device.
//!
//! The *front-end* (QEMU, Cloud Hypervisor, crosvm) sends requests over a Unix socket, some of them with
//! file descriptors; the *back-end* answers. The back-end sends its own requests over a second socket. This
//! module encodes and parses both directions, and [`Session`] is the back-end's state machine for a block
//! device. The owner of the socket moves bytes and descriptors; this module sees only the number of
//! descriptors.
//!
//! *Invariant:* all numbers are in native byte order. No message causes a panic, and a message that
//! contradicts the session ends it, because a front-end cannot use a device in an unknown state.
//!
//! Source: QEMU's `docs/interop/vhost-user.rst`.

pub mod fuzzing;
mod message;
mod session;
#[cfg(test)]
mod tests;
mod vring;
pub mod wire;

pub use message::{
    BackendRequest, Config, ConfigKind, Header, InflightArea, LogArea, Malformed, MemoryRegion, Request,
    VringAddress, VringFile, VringState, put_config, put_inflight, put_number, put_vring_state,
};
pub use session::{Action, Offer, Refused, Session, Violation};
pub use vring::Vring;
