//! End-to-end tests live under `tests/`; this crate itself holds only what they share.

#![forbid(unsafe_code)]

pub mod attack;
pub mod browser;
pub mod certificates;
pub mod disk;
pub mod guest;
mod mounts;
pub mod peer;
pub mod raw;
pub mod remote;
pub mod scripted;
pub mod server;
pub mod simulation;
pub mod tools;
