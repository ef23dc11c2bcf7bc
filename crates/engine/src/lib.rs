//! Devices: their topology, layer trees, threads, life cycle, online reconfiguration, observability, and the
//! control API.
//!
//! Folders use only the folders before them in this list, which `./x tidy` checks: `programs` (drivers as
//! programs, and nbdkit), `connect` (connections of NBD backends), `observe` (records of a device's
//! requests), `device` (a device and the tree of its nodes), `reactor` (I/O threads), `host` (devices and
//! their exports), `change` (online reconfiguration), `tables` (device-mapper tables), `topology` (checks the
//! files of a topology, and configures host and devices from it), `apply` (plans the actions from what is
//! served to a topology), `control` (the HTTP API and its watchers).

#![forbid(unsafe_code)]

pub mod apply;
pub mod change;
mod connect;
pub mod connection_slots;
pub mod control;
pub mod copy;
pub mod device;
pub mod host;
pub mod info;
pub mod log_limit;
pub mod observe;
mod poll;
pub mod private;
pub mod private_key;
pub mod programs;
pub mod reactor;
pub mod replay;
pub mod retry;
pub mod rundir;
pub mod stacking;
pub mod state_dir;
pub mod tables;
pub mod topology;

pub use spec;
