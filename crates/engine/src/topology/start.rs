//! Turns a topology into the configuration of a host and its devices.

use crate::device::DeviceConfig;
use crate::host::HostConfig;
use crate::topology::{DeviceSpec, RingChoice, Topology};
use ring::{Choice, RingConfig};
use std::num::NonZero;

/// Default number of reactors: one per CPU up to this many, since each allocates its own buffers.
const REACTORS_MAX: usize = 4;
/// Default queue depth of a hardware queue, as in the kernel's drivers.
const DEPTH: u16 = 128;
/// How long a polling reactor polls before it sleeps, in microseconds: twice what waking it on another CPU
/// costs a client that waits for each reply (51 µs in a virtual machine).
const POLL_US: u32 = 100;
/// Address space for the payloads of a reactor's requests, in bytes: 2048 payloads of 32 MiB, the maximum. A
/// payload reserves address space for its whole length, and uses memory only as data arrives. Front-ends
/// bound the memory in use, for example by the budget of NBD connections.
const ADDRESS_SPACE_MAX: u64 = 64 << 30;

/// Returns the configuration of the threads that serve a topology.
pub fn host_config(topology: &Topology) -> HostConfig {
    let cpus = std::thread::available_parallelism().map_or(1, NonZero::get);
    let engine = match topology.ring {
        RingChoice::Auto => Choice::Auto,
        RingChoice::IoUring => Choice::Uring,
        RingChoice::Epoll => Choice::Epoll,
    };
    HostConfig {
        reactors: topology.queues.map_or(cpus.min(REACTORS_MAX), usize::from),
        ring: RingConfig {
            engine,
            poll_us: topology.poll.then_some(POLL_US),
            memory_max: ADDRESS_SPACE_MAX,
            ..RingConfig::default()
        },
        nbd: topology.nbd_limits,
    }
}

/// Returns the configuration of a device, with the defaults of a host where the description omits a setting.
pub fn device_config(device: &DeviceSpec) -> DeviceConfig {
    DeviceConfig {
        name: device.name.clone(),
        stack: device.stack.clone(),
        layers: device.layers.clone(),
        limits: device.limits.clone().unwrap_or_default(),
        depth: device.depth.unwrap_or(DEPTH),
        slow: device.slow,
        io_timeout: device.io_timeout,
    }
}
