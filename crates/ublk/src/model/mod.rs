//! A model of the driver in this process, based on the kernel's documentation and code: device states, the
//! order of commands, the life cycle of tags, the fate of requests when a server dies, and every error.
//!
//! It has three interfaces. The control side is [`Control`], as for the kernel. The server's side is a
//! [`CharDevice`]: it takes commands for tags, returns their completions, and copies data when the driver
//! would. Clients use [`Model::submit`] and [`Model::finished`].
//!
//! It has no clock and no thread. Control commands that wait for the server wait on a condition variable,
//! within their time limit; everything else happens in the call that causes it, in a fixed order, so a
//! seeded test is reproducible.
//!
//! *Invariant:* a request completes exactly once, or waits for a server.
//!
//! Zones and descriptors of other sizes are not modelled, and not offered as features. Partitions, merging,
//! and splitting by limits are not modelled either.

mod batch;
mod commands;
mod device;
mod server;
#[cfg(test)]
mod tests;

pub use server::{CharDevice, RingId, ServerMemory};

use crate::abi::{Features, IoFlags, KernelOp};
use crate::control::{Command, Control, Refusal};
use device::Device;
use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Configuration of the kernel to model.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ModelConfig {
    /// Features of the kernel's driver.
    pub features: Features,
    /// Number of CPUs, which limits the queues of a device.
    pub cpus: u16,
    /// Whether ADD_DEV hangs.
    pub hangs: bool,
    /// Whether the caller has CAP_SYS_ADMIN.
    pub privileged: bool,
}

impl ModelConfig {
    /// Features that are not modelled.
    const BEYOND: Features = Features::ZONED.with(Features::IO_DESC_SIZE);

    const fn with(features: Features) -> ModelConfig {
        ModelConfig { features: features.without(Self::BEYOND), cpus: 4, hangs: false, privileged: true }
    }

    /// Linux 6.1: the first long-term kernel with the driver.
    pub const LINUX_6_1: ModelConfig =
        ModelConfig::with(Features(0b1_1111).without(Features::SUPPORT_ZERO_COPY));
    /// Linux 6.8.
    pub const LINUX_6_8: ModelConfig =
        ModelConfig::with(Features(0b1_1111_1111).without(Features::SUPPORT_ZERO_COPY));
    /// Linux 6.15.
    pub const LINUX_6_15: ModelConfig = ModelConfig::with(Features(0b111_1111_1111));
    /// Linux 7.2.
    pub const LINUX_7_2: ModelConfig = ModelConfig::with(Features::KNOWN);
}

/// A request of a client.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ClientRequest {
    /// Operation.
    pub op: KernelOp,
    /// Flags.
    pub flags: IoFlags,
    /// Start sector.
    pub start: u64,
    /// Length in sectors.
    pub sectors: u32,
    /// Data of a write, or a buffer to overwrite for a read; as long as the request.
    pub data: Vec<u8>,
    /// If the data is in memory shared with the server, its address as in a descriptor.
    pub shared: Option<u64>,
    /// Integrity data, if the client has any; used like `data`. Ignored by a device without integrity data.
    pub tuples: Option<Vec<u8>>,
}

/// A completed request of a client.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Finished {
    /// Number returned by [`Model::submit`].
    pub number: u64,
    /// 0, or a positive errno.
    pub errno: i32,
    /// Data of a read.
    pub data: Vec<u8>,
    /// Integrity data of a read.
    pub tuples: Vec<u8>,
}

/// A driver with its devices. Clones refer to the same driver.
#[derive(Clone)]
pub struct Model(Arc<Shared>);

struct Shared {
    world: Mutex<World>,
    /// Notified after every change that a command may wait for.
    changed: Condvar,
}

struct World {
    config: ModelConfig,
    devices: BTreeMap<u32, Device>,
    next_request: u64,
    next_ring: u64,
    finished: VecDeque<(u32, Finished)>,
    /// Devices opened through [`Control::open`] that [`Model::take_opened`] has not taken yet.
    opened: Vec<CharDevice>,
}

impl Model {
    /// Creates the driver of a kernel, without devices.
    pub fn new(config: ModelConfig) -> Model {
        let world = World {
            config,
            devices: BTreeMap::new(),
            next_request: 0,
            next_ring: 0,
            finished: VecDeque::new(),
            opened: Vec::new(),
        };
        Model(Arc::new(Shared { world: Mutex::new(world), changed: Condvar::new() }))
    }

    fn world(&self) -> MutexGuard<'_, World> {
        self.0.world.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until `done` returns a value, or the time limit is exceeded.
    fn wait<T>(&self, limit: Duration, mut done: impl FnMut(&mut World) -> Option<T>) -> Result<T, Refusal> {
        let started = Instant::now();
        let mut world = self.world();
        loop {
            if let Some(value) = done(&mut world) {
                return Ok(value);
            }
            let left = limit.checked_sub(started.elapsed()).ok_or(Refusal::NoAnswer(limit))?;
            let waited = self.0.changed.wait_timeout(world, left);
            world = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn change<T>(&self, act: impl FnOnce(&mut World) -> T) -> T {
        let value = act(&mut self.world());
        self.0.changed.notify_all();
        value
    }

    /// Submits a client's request to the queue of its CPU. Returns the number under which it completes.
    ///
    /// # Errors
    /// A positive errno: the block device does not exist.
    pub fn submit(&self, device: u32, queue: u16, request: ClientRequest) -> Result<u64, i32> {
        self.change(|world| {
            let number = world.next_request;
            let there = world.devices.get_mut(&device).filter(|there| there.has_disk()).ok_or(libc::ENXIO)?;
            world.next_request += 1;
            there.submit(usize::from(queue), number, request);
            world.gather(device);
            Ok(number)
        })
    }

    /// Returns the next completed request, in order of completion.
    pub fn finished(&self, device: u32) -> Option<Finished> {
        let mut world = self.world();
        let position = world.finished.iter().position(|(of, _)| *of == device)?;
        world.finished.remove(position).map(|(_, finished)| finished)
    }

    /// Opens or closes the block device as a client.
    pub fn hold(&self, device: u32, opened: bool) {
        self.change(|world| {
            if let Some(there) = world.devices.get_mut(&device) {
                there.openers = if opened { there.openers + 1 } else { there.openers.saturating_sub(1) };
            }
        });
    }

    /// Opens a character device as the given process.
    ///
    /// # Errors
    /// A positive errno: `ENOENT`, or `EBUSY` if it is already open.
    pub fn open_char(&self, device: u32, process: u32) -> Result<CharDevice, i32> {
        let mut world = self.world();
        let there = world.devices.get_mut(&device).filter(|there| !there.deleted).ok_or(libc::ENOENT)?;
        if there.open_by.is_some() {
            return Err(libc::EBUSY);
        }
        there.open_by = Some(process);
        Ok(CharDevice::new(self.clone(), device))
    }

    /// Takes the character device that this process has opened through [`Control::open`], whose returned
    /// descriptor is only a placeholder.
    pub fn take_opened(&self, device: u32) -> Option<CharDevice> {
        let mut world = self.world();
        let position = world.opened.iter().position(|open| open.device() == device)?;
        Some(world.opened.remove(position))
    }
}

impl World {
    /// Collects completions of a device.
    fn gather(&mut self, device: u32) {
        if let Some(there) = self.devices.get_mut(&device) {
            self.finished.extend(there.finished.drain(..).map(|finished| (device, finished)));
        }
    }
}

impl Control for Model {
    fn execute(&self, command: Command) -> Result<(u32, Vec<u8>), Refusal> {
        commands::execute(self, command)
    }

    fn open(&self, device: u32, _limit: Duration) -> io::Result<OwnedFd> {
        let opened = self.open_char(device, std::process::id()).map_err(io::Error::from_raw_os_error)?;
        self.world().opened.push(opened);
        Ok(std::fs::File::open("/dev/null")?.into())
    }

    fn await_owned(&self, device: u32, _limit: Duration) -> io::Result<()> {
        if self.world().devices.contains_key(&device) { Ok(()) } else { Err(io::ErrorKind::NotFound.into()) }
    }

    fn await_node(&self, device: u32, _limit: Duration) -> io::Result<()> {
        let there = self.world().devices.get(&device).is_some_and(Device::has_disk);
        if there { Ok(()) } else { Err(io::ErrorKind::NotFound.into()) }
    }

    fn devices(&self) -> Vec<u32> {
        self.world().devices.keys().copied().collect()
    }
}

impl std::fmt::Debug for Model {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Model")
    }
}
