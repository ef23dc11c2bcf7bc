//! The kernel's ublk driver, as its server sees it: the ABI, the control commands, and a model of it.

#![deny(unsafe_code)]

pub mod abi;
