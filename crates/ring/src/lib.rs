//! The only door to the kernel.
#![allow(missing_docs, clippy::undocumented_unsafe_blocks)]
mod memory;
mod uring;
use block::*;
pub use memory::ForeignMemory;
use queue::*;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
pub use uring::KernelRing;
#[derive(Clone, Debug)]
pub struct RingConfig {
    pub receive_buffers: u16,
    pub receive_buffer_len: u32,
}
impl Default for RingConfig {
    fn default() -> Self {
        RingConfig { receive_buffers: 32, receive_buffer_len: 64 << 10 }
    }
}
#[derive(Clone, Debug)]
pub struct EngineInfo {
    pub name: &'static str,
    pub why: Option<String>,
}
#[derive(Clone)]
pub struct Waker(Arc<(OwnedFd, AtomicBool)>);
impl Waker {
    fn new() -> io::Result<Waker> {
        Ok(Waker(Arc::new((
            rustix::event::eventfd(
                0,
                rustix::event::EventfdFlags::CLOEXEC | rustix::event::EventfdFlags::NONBLOCK,
            )?,
            AtomicBool::new(false),
        ))))
    }
    pub fn wake(&self) {
        if !self.0.1.swap(true, Ordering::SeqCst) {
            let _ = rustix::io::write(&self.0.0, &1u64.to_ne_bytes());
        }
    }
    fn clear(&self) {
        let mut b = [0; 8];
        let _ = rustix::io::read(&self.0.0, &mut b);
        self.0.1.store(false, Ordering::SeqCst);
    }
    fn fd(&self) -> i32 {
        self.0.0.as_raw_fd()
    }
}
pub fn clock() -> Nanos {
    let t = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    Nanos(t.tv_sec as u64 * 1_000_000_000 + t.tv_nsec as u64)
}
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SocketId(pub u32);
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chunk(pub u16);
impl Chunk {
    pub fn index(self) -> usize {
        self.0 as usize
    }
}
pub enum Wait {
    No,
    UntilEvent,
}
#[derive(Clone, Copy, Debug)]
pub enum ReceiveEnd {
    Eof,
    Stopped,
    Error(i32),
}
#[derive(Clone, Copy, Debug)]
pub enum Event {
    Io { queue: QueueId, cookie: Cookie, result: i64 },
    Received { socket: SocketId, owner: u32, segment: Segment, chunk: Chunk },
    ReceiveEnded { socket: SocketId, owner: u32, end: ReceiveEnd },
    Filled { socket: SocketId, owner: u32, result: i64 },
    Sent { socket: SocketId, owner: u32, result: i64 },
    Closed { socket: SocketId, owner: u32 },
    Woken,
}
