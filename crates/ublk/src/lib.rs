//! The kernel's ublk driver, as its server sees it: the ABI, the control commands, and a model of it.
//!
//! [`abi`] is `linux/ublk_cmd.h` by hand. [`Driver`] has the control commands with their meanings, over a
//! [`Control`] that is the kernel's driver or a model of it. Requests do not come through here: they go between
//! the driver and a reactor's ring, in the words of [`abi`].
//!
//! *Invariant:* `unsafe` is in `kernel/` only.

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
