//! The words in which a user describes devices: stacks, layers, exports, names.
//!
//! A description is a text of items separated by commas, `kind:what,key=value,flag`. A comma that
//! belongs to a path or a value is written twice, as QEMU has it: `file:odd,,name.img,ro`. Every
//! description is a value that writes itself back as the shortest text that reads as itself.
//!
//! Runs on any thread, at start-up. Nothing here opens or looks at a file.
//!
//! *Invariant:* what parses is complete and consistent in itself: keys are known, given once, and
//! fit each other. Whether files exist is `check`'s and `open`'s matter.

#![forbid(unsafe_code)]

mod export;
mod fuse;
mod layer;
mod name;
mod nbd;
mod nbd_device;
mod nbd_limits;
mod null;
mod paths;
mod scheduler;
mod stack;
mod table;
mod ublk;

pub use block::Bytes;
pub use export::{NBD_PORT, NbdAddress, TlsMode, TlsSpec, nbd_uri};
pub use fuse::{FuseSpec, LoopSpec, OverUring};
pub use images::{Backing, Format};
pub use layer::{CowSpec, LayerRow, LayerSpec, check_limits, layer_rows};
pub use layers::scheduler::is_parameter as is_scheduler_parameter;
pub use name::DeviceName;
pub use nbd::{NBD_RECONNECT_DEFAULT, NBD_TIMEOUT_DEFAULT, NbdSpec};
pub use nbd_device::NbdDeviceSpec;
pub use nbd_limits::NbdLimits;
pub use null::{IrqMode, NullSpec};
pub use options::{SpecError, format_time, parse_time};
pub use partition::Selector;
pub use paths::{Failback, PathSpec};
pub use scheduler::misplaced;
pub use scheduler::{parse_scheduler, scheduler_of, with_scheduler};
pub use stack::{Direct, FileFormat, FileSpec, RamSpec, SIZE_DEFAULT, StackSpec};
pub use table::{LineSpec, TableSpec, escaped_word};
pub use ublk::{Recovery, UblkSpec};

/// I/O threads of a process, so hardware queues of a device, at most.
pub const QUEUES_MAX: u16 = 256;

#[cfg(test)]
mod tests;
