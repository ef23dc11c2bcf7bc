//! The driver side of virtqueues in shared memory, for tests, benchmarks and fuzzing.
//!
//! A [`Driver`] makes chains available and takes used ones, without the free lists and scatter lists of a
//! kernel: it is simple enough to keep a device busy from one core. [`Disk`] uses it to send virtio-blk
//! requests. Both trust the device: an id that was never sent causes a panic, since it is our own bug. The
//! methods of [`Driver::forge`] write values that a correct driver never writes.
//! what a correct driver never does.

mod disk;
mod packed;
mod queue;
mod shared;
mod split;

pub use disk::Disk;
pub use queue::{Driver, Forge, Used};
pub use shared::{AddressAllocator, SharedMemory};
