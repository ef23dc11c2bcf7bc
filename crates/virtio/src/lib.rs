//! Virtqueues in memory shared with a guest, and virtio-blk requests.
//!
//! [`memory`] maps guest addresses, [`ring`] is the device side of virtqueues, [`blk`] parses requests and
//! builds the configuration space, [`inflight`] records requests so that another process can continue them,
//! and [`driver`] is the driver side, for tests, benchmarks and fuzzing. Messages, sockets and eventfds are
//! elsewhere: nothing here waits or notifies. The only system calls are those of [`memory::Mapping`], which
//! maps files, and of the memfd in [`driver`].
//!
//! Source: Virtual I/O Device (VIRTIO) 1.3, and vhost-user.rst of QEMU for `inflight` and the dirty log.
//!
//! *Invariant:* the guest may write any byte of its memory at any time. Each value that decides something is
//! loaded once, checked, and used from a local variable. No content of guest memory causes a panic, an access
//! outside the mapped regions, or a loop longer than the queue.
//!
//! *Invariant:* popping, parsing and pushing allocate nothing and make no system call.

#![deny(unsafe_code)]

pub mod blk;
pub mod driver;
mod features;
pub mod fuzzing;
pub mod inflight;
pub mod memory;
pub mod ring;

pub use features::Features;
