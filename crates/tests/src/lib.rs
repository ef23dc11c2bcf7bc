//! Helpers that the end-to-end tests under `tests/` share.

#![forbid(unsafe_code)]

#[cfg(feature = "suites")]
pub mod attack;
pub mod browser;
pub mod ceph;
pub mod certificates;
pub mod disk;
#[cfg(feature = "suites")]
pub mod guest;
pub mod iscsi;
pub mod machine;
mod mounts;
pub mod peer;
pub mod raw;
pub mod remote;
pub mod scripted;
pub mod server;
#[cfg(feature = "suites")]
pub mod simulation;
pub mod tools;
pub mod vhost_user;
