//! A process's reactors and devices, and their exports.
//!
//! The host knows exports only through the trait [`Export`]; they are implemented in the crate `attach`. It
//! asks them for their users, reports changes to them, and closes them before a device is removed
//! ([`removal`]).

mod error;
mod export;
mod removal;

pub use error::{HostError, HostErrorKind};
pub use export::{Export, Handover};
pub use rbd::wait_until_closed as wait_for_clusters;

use crate::device::tree::{OpenContext, SourcePool};
use crate::device::{Device, DeviceConfig};
use crate::info::ExportInfo;
use crate::reactor::{Attach, Reactor};
use crate::spec::{Bytes, NbdLimits};
use ring::{EngineInfo, RingConfig};
use std::io;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Settings of a process.
#[derive(Clone, Debug)]
pub struct HostConfig {
    /// Number of I/O threads.
    pub reactors: usize,
    /// Settings of their rings.
    pub ring: RingConfig,
    /// Limits of NBD clients; their memory budget is divided among the reactors.
    pub nbd: NbdLimits,
}

/// An export and its device.
struct Exported {
    device: Arc<Device>,
    export: Arc<dyn Export>,
    /// The export is closed, but listed until its device is removed, because another export still uses the
    /// device.
    is_closed: bool,
}

/// The devices and I/O threads of a process.
pub struct Host {
    reactors: Vec<Reactor>,
    next_reactor: AtomicUsize,
    next_number: AtomicUsize,
    devices: Mutex<Vec<Arc<Device>>>,
    exported: Mutex<Vec<Exported>>,
    shutting_down: AtomicBool,
    /// Held from the check for cycles until other checks see the new dependency.
    pub(crate) stacking: tokio::sync::Mutex<()>,
    /// Devices that arguments of tables opened.
    pub(crate) pool: Arc<SourcePool>,
    /// Notified when a device gets a table.
    pub(crate) table_came: tokio::sync::Notify,
    /// Notified when a device gets targets with background work.
    pub(crate) background_came: tokio::sync::Notify,
    /// Notified when a device gets a stack.
    pub(crate) stack_came: tokio::sync::Notify,
    nbd_limits: NbdLimits,
    poll_ns: u64,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Host {
    /// Starts the reactors.
    ///
    /// # Errors
    /// A thread or a ring cannot be created; nothing is left running.
    pub fn start(config: &HostConfig) -> Result<Arc<Host>, HostError> {
        let count = config.reactors.max(1);
        let limits = exports::nbd::Limits {
            memory: (config.nbd.memory.0 / count as u64).max(1),
            stall: config.nbd.stall,
        };
        let reactors = (0..count)
            .map(|number| Reactor::start(number, config.ring.clone(), limits))
            .collect::<io::Result<Vec<_>>>()
            .map_err(|why| HostError::failed("an I/O thread could not be started", why))?;
        Ok(Arc::new(Host {
            reactors,
            next_reactor: AtomicUsize::new(0),
            next_number: AtomicUsize::new(0),
            devices: Mutex::default(),
            exported: Mutex::default(),
            shutting_down: AtomicBool::new(false),
            stacking: tokio::sync::Mutex::default(),
            pool: Arc::default(),
            table_came: tokio::sync::Notify::new(),
            background_came: tokio::sync::Notify::new(),
            stack_came: tokio::sync::Notify::new(),
            nbd_limits: config.nbd,
            poll_ns: u64::from(config.ring.poll_us.unwrap_or(0)) * 1000,
        }))
    }

    /// Returns the I/O engine of the reactors' rings, and why it was chosen.
    pub fn engine(&self) -> &EngineInfo {
        self.reactors[0].engine()
    }

    /// Opens a device. It can be reached once it is exported.
    ///
    /// # Errors
    /// The name is taken, or the stack cannot be opened; nothing is left behind.
    pub fn add_device(&self, config: &DeviceConfig) -> Result<Arc<Device>, HostError> {
        if self.device(config.name.as_str()).is_some() {
            return Err(HostError::name_taken());
        }
        let find = |name: &str| self.device(name);
        let context = OpenContext { pool: &self.pool, device: &find, name: Some(config.name.as_str()) };
        let device = Arc::new(Device::open(config, self.next_number.fetch_add(1, Relaxed), &context)?);
        let mut devices = lock(&self.devices);
        if devices.iter().any(|d| d.name() == device.name()) {
            return Err(HostError::name_taken());
        }
        devices.push(device.clone());
        self.table_came.notify_one();
        self.background_came.notify_one();
        self.stack_came.notify_one();
        Ok(device)
    }

    /// Adds an export of the device: from now on it is notified of changes, and closed before the device is
    /// removed.
    pub fn add_export(&self, device: &Arc<Device>, export: Arc<dyn Export>) {
        lock(&self.exported).push(Exported { device: device.clone(), export, is_closed: false });
    }

    /// Forgets an export that closed by itself, while its device stays. An unknown one has no effect.
    pub fn forget_export(&self, device: &Arc<Device>, export: &Arc<dyn Export>) {
        let is_it = |entry: &Exported| {
            Arc::ptr_eq(&entry.device, device)
                && !entry.is_closed
                && std::ptr::addr_eq(Arc::as_ptr(&entry.export), Arc::as_ptr(export))
        };
        // A device that is being removed keeps its exports until they have been closed.
        if !device.is_being_removed() {
            lock(&self.exported).retain(|entry| !is_it(entry));
        }
    }

    /// Returns all devices, in the order in which they were added.
    pub fn devices(&self) -> Vec<Arc<Device>> {
        lock(&self.devices).clone()
    }

    /// Returns the device of that name.
    pub fn device(&self, name: &str) -> Option<Arc<Device>> {
        lock(&self.devices).iter().find(|device| device.name().as_str() == name).cloned()
    }

    /// Describes the open exports of a device.
    pub fn exports(&self, device: &Arc<Device>) -> Vec<ExportInfo> {
        self.exports_of(device).iter().map(|export| export.info(device)).collect()
    }

    /// Returns the number of the only reactor that may serve a device; `None`: all may.
    pub fn reactor_of(&self, device: &Device) -> Option<usize> {
        device.is_single().then(|| device.number() % self.reactors.len())
    }

    /// Attaches a client of a device to the reactor of that number, or, if the device has a single queue, to
    /// the reactor of that queue.
    pub fn attach_to(&self, number: usize, device: Arc<Device>, attach: Attach) {
        let number = self.reactor_of(&device).unwrap_or(number);
        self.reactors[number].attach(device, attach);
    }

    /// Returns whether a client has the device in use.
    pub fn is_used(&self, device: &Arc<Device>) -> bool {
        self.exports_of(device).iter().any(|export| export.is_used(device))
    }

    /// Returns whether the kernel does I/O on the device's file directly (passthrough).
    pub(crate) fn is_passthrough(&self, device: &Arc<Device>) -> bool {
        self.exports_of(device).iter().any(|export| export.is_passthrough())
    }

    /// Attaches a new client of a device to the next reactor, in rotation.
    pub fn attach(&self, device: Arc<Device>, attach: Attach) {
        let number = self.next_reactor.fetch_add(1, Relaxed) % self.reactors.len();
        self.attach_to(number, device, attach);
    }

    /// Returns whether the process is shutting down: kernel devices that are in use are left to the next
    /// server.
    pub fn is_shutting_down(&self) -> bool {
        self.shutting_down.load(Relaxed)
    }

    /// Returns the open exports of a device.
    pub fn exports_of(&self, device: &Arc<Device>) -> Vec<Arc<dyn Export>> {
        let exported = lock(&self.exported);
        let of_it = exported.iter().filter(|entry| Arc::ptr_eq(&entry.device, device) && !entry.is_closed);
        of_it.map(|entry| entry.export.clone()).collect()
    }

    /// Longest time that the reactors poll before they sleep, in nanoseconds; 0: they sleep at once.
    pub fn poll_ns(&self) -> u64 {
        self.poll_ns
    }

    /// Limits of NBD clients.
    pub fn nbd_limits(&self) -> NbdLimits {
        self.nbd_limits
    }

    /// Refuses a zoned device to an export whose protocol has no zones: its clients would write at the wrong
    /// place.
    ///
    /// # Errors
    /// The device is zoned.
    pub fn refuse_zones(device: &Device, export: &'static str) -> Result<(), HostError> {
        let why = || {
            let text = format!(
                "it is a zoned device, and {export} has no zones (export it with --ublk, --vhost-user or --iscsi)"
            );
            HostError::new(HostErrorKind::Refused, text)
        };
        if device.limits().features.contains(block::Features::ZONED) { Err(why()) } else { Ok(()) }
    }

    /// The I/O threads.
    pub fn reactors(&self) -> &[Reactor] {
        &self.reactors
    }

    /// Checks whether all exports of a device support the size `to`. Changes nothing.
    pub(crate) fn check_size(&self, device: &Arc<Device>, from: Bytes, to: Bytes) -> Result<(), HostError> {
        match from == to {
            true => Ok(()),
            false => self.exports_of(device).iter().try_for_each(|export| export.may_resize(to)),
        }
    }

    /// Reports the size `to`, instead of `from`, to all exports of a device. If one refuses, `from` is
    /// reported again to it and to those before it.
    ///
    /// # Errors
    /// The first refusal.
    pub async fn report_size(&self, device: &Arc<Device>, from: Bytes, to: Bytes) -> Result<(), HostError> {
        if from == to {
            return Ok(());
        }
        let exports = self.exports_of(device);
        for (last, export) in exports.iter().enumerate() {
            let Err(refused) = export.resized(to).await else { continue };
            for export in &exports[..=last] {
                if let Err(error) = export.resized(from).await {
                    let (device, address) = (device.name(), export.info(device).address);
                    tracing::warn!(%device, address, %error, "the export could not be notified that the device keeps its size");
                }
            }
            return Err(refused);
        }
        Ok(())
    }
}
