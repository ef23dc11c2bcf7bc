//! vhost-user: how a virtual machine monitor shares its virtqueues with a process that serves a device.
//!
//! The *front-end* (QEMU, Cloud Hypervisor, crosvm) sends requests over a Unix socket, with file descriptors
//! beside some of them; the *back-end* answers. A second socket carries the back-end's own requests. Both
//! directions are encoded and parsed here, and [`Session`] is the back-end's state machine for a block device.
//! The owner of the socket moves bytes and descriptors; descriptors never enter this module, only their number.
//!
//! *Invariant:* all numbers are in native byte order. No message causes a panic, and a message that
//! contradicts the session ends it: front-ends have no use for a device in an unknown state.
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
