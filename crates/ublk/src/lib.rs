//! The kernel's ublk driver, as its server uses it: the ABI, the control commands, and a model of the
//! driver.
//!
//! [`abi`] is `linux/ublk_cmd.h` in Rust. [`Driver`] issues the control commands through a [`Control`],
//! which is either the kernel's driver or the model. Requests do not pass through this crate: they go
//! between the driver and a reactor's ring, with the structures of [`abi`].
//!
//! *Invariant:* only `kernel/` contains `unsafe` code.

#![deny(unsafe_code)]

pub mod abi;
mod control;
mod driver;
pub mod kernel;
pub mod model;

pub use abi::*;
pub use control::{Command, Control, Refusal};
pub use driver::{Driver, DriverError, NewDevice};
pub use kernel::{Descriptors, KernelControl, SharedDescriptors, Unusable};
