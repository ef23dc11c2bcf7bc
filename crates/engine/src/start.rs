//! From what was described to what a host is given.

use crate::device::DeviceConfig;
use crate::host::HostConfig;
use crate::spec::SpecError;
use crate::topology::{DeviceSpec, RingChoice, Topology};
use ring::RingConfig;
use std::num::NonZero;

/// Reactors when none were asked for: one for each CPU up to this many, since each holds its own buffers.
const REACTORS_MAX: usize = 4;
/// Requests in flight on a hardware queue when nothing was asked for: what the kernel's drivers take.
const DEPTH: u16 = 128;

impl Topology {
    /// The threads that are to serve this.
    ///
    /// # Errors
    /// A kind of thread that this build does not have.
    pub fn host_config(&self) -> Result<HostConfig, SpecError> {
        if self.ring == RingChoice::Epoll {
            return Err(SpecError::new("the epoll ring is not in this build", "leave out ring"));
        }
        if self.poll {
            return Err(SpecError::new("polling is not in this build", "leave out poll"));
        }
        let cpus = std::thread::available_parallelism().map_or(1, NonZero::get);
        Ok(HostConfig {
            reactors: self.queues.map_or(cpus.min(REACTORS_MAX), usize::from),
            ring: RingConfig::default(),
        })
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
        }
    }
}
