//! The driver side of virtqueues: a front-end in shared memory, for tests, the benchmark and fuzzing.
//!
//! A [`Driver`] makes chains available and takes used ones, without the free lists and scatter lists of a kernel: it is
//! lean enough to keep a device busy from one core. [`Disk`] sends virtio-blk requests with it. Both trust the device: an
//! id that was never sent is a panic, since it is a bug of ours. The methods that [`Driver::forge`] returns write
//! what a correct driver never does.

mod disk;
mod packed;
mod queue;
mod shared;
mod split;

pub use disk::Disk;
pub use queue::{Driver, Forge, Used};
pub use shared::{Place, SharedMemory};
