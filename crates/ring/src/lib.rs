//! The interface to the kernel: files, sockets, memory, timers, waking and waiting.
//!
//! A [`KernelRing`] belongs to one thread, the reactor that created it. It gathers operations during a turn,
//! submits them in [`turn`](KernelRing::turn), and returns completions as [`Event`]s. There are two engines
//! with equal behaviour: io_uring, and epoll with a few I/O threads where io_uring is not available. Which
//! one is in use shows only in [`engine`](KernelRing::engine) and in speed.
//!
//! *Invariant:* every operation completes with exactly one event, and the memory that it refers to stays
//! valid until then, even when the ring is dropped.
//! *Invariant:* an idle ring uses no CPU.
//!
//! The ring does not know what a request means.

mod batch;
mod batching;
mod chunks;
mod config;
mod core;
mod epoll;
mod files;
mod memory;
mod nodes;
mod ops;
mod poll;
mod ring;
mod shared;
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
pub use poll::AdaptivePoll;
pub use ring::KernelRing;
pub use shared::SharedMemory;
pub use waker::Waker;

/// The monotonic clock, for threads without a ring.
pub fn clock() -> queue::Nanos {
    sys::now()
}
