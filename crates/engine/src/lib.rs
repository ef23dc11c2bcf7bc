//! Topology, device trees, threads, life cycle and the control API.

#![forbid(unsafe_code)]

pub mod control;
pub mod listen;
pub mod rundir;
pub mod spec;
pub mod topology;
