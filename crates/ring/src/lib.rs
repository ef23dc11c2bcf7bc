//! The only door to the kernel: files, sockets, memory, timers, waking and waiting.
//!
//! A [`KernelRing`] belongs to one thread, the reactor that made it. It gathers what is asked for during a
//! turn, hands it over in [`turn`](KernelRing::turn), and gives out what has ended as [`Event`]s. Two engines
//! do this behind one face: io_uring, and epoll with a few I/O threads where io_uring is not to be had.
//! Which one shows in nothing but [`engine`](KernelRing::engine) and in speed.
//!
//! *Invariant:* every operation ends with exactly one event, and the memory that it names is not let go of
//! before that, not even when the ring is dropped.
//! *Invariant:* an idle ring uses no CPU.
//!
//! It does not know what a request means.

mod batching;
mod chunks;
mod config;
mod core;
mod epoll;
mod files;
mod memory;
mod nodes;
mod ops;
mod ring;
mod sockets;
mod sys;
#[cfg(test)]
mod tests;
mod timers;
mod uring;
mod waker;

pub use config::{
    Choice, Chunk, EngineInfo, Event, ReceiveEnd, RingConfig, SocketId, Token, Wait, WideCommand,
};
pub use memory::{ForeignMemory, KERNEL_BUFFER_SHIFT};
pub use ring::KernelRing;
pub use waker::Waker;

/// The monotonic clock, for those that have no ring.
pub fn clock() -> queue::Nanos {
    sys::now()
}
