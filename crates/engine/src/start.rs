//! From what was described to what a host is given.

use crate::device::DeviceConfig;
use crate::host::HostConfig;
use crate::topology::{DeviceSpec, RingChoice, Topology};
use ring::{Choice, RingConfig};
use std::num::NonZero;

/// Reactors when none were asked for: one for each CPU up to this many, since each holds its own buffers.
const REACTORS_MAX: usize = 4;
/// Requests in flight on a hardware queue when nothing was asked for: what the kernel's drivers take.
const DEPTH: u16 = 128;
/// How long a reactor that polls looks for work before it sleeps, in microseconds: twice what waking it on
/// another CPU costs a client that waits for each reply (51 µs in a virtual machine).
const POLL_US: u32 = 100;
/// Address space for requests of a reactor. Each payload under way takes a block for all of it, 32 MiB at most, and memory
/// only as it comes: so much is for 2048 of them. What lies in memory is bounded by those who allocate, such as the budget
/// of NBD connections.
const ADDRESS_SPACE_MAX: u64 = 64 << 30;

impl Topology {
    /// The threads that are to serve this.
    pub fn host_config(&self) -> HostConfig {
        let cpus = std::thread::available_parallelism().map_or(1, NonZero::get);
        let engine = match self.ring {
            RingChoice::Auto => Choice::Auto,
            RingChoice::IoUring => Choice::Uring,
            RingChoice::Epoll => Choice::Epoll,
        };
        HostConfig {
            reactors: self.queues.map_or(cpus.min(REACTORS_MAX), usize::from),
            ring: RingConfig {
                engine,
                poll_us: self.poll.then_some(POLL_US),
                memory_max: ADDRESS_SPACE_MAX,
                ..RingConfig::default()
            },
            nbd: self.nbd_limits,
        }
    }
}

impl DeviceSpec {
    /// The device that is to be made.
    pub fn config(&self) -> DeviceConfig {
        DeviceConfig {
            name: self.name.clone(),
            stack: self.stack.clone(),
            layers: self.layers.clone(),
            limits: self.limits.clone().unwrap_or_default(),
            depth: self.depth.unwrap_or(DEPTH),
            slow: self.slow,
            io_timeout: self.io_timeout,
        }
    }
}
