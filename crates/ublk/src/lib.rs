//! The kernel's ublk driver, as its server sees it: the ABI and the control commands.
//!
//! [`abi`] is `linux/ublk_cmd.h` by hand. [`Driver`] has the control commands with their meanings, over a
//! [`Control`] that is the kernel's driver or something in its place. Requests do not come through here: they go between
//! the driver and a reactor's ring, in the words of [`abi`].
//!
//! *Invariant:* `unsafe` is in `kernel/` only.

#![deny(unsafe_code)]

pub mod abi;
mod control;
mod driver;
pub mod kernel;

pub use abi::*;
pub use control::{Command, Control, Refusal};
pub use driver::{Driver, DriverError, NewDevice};
pub use kernel::{Descriptors, KernelControl, SharedDescriptors, Unusable};
