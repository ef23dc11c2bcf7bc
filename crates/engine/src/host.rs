//! A process's reactors, devices and listeners, and their life: what is made in which order, and how it
//! ends without losing anything.

use crate::cached::CacheError;
use crate::change::ChangeError;
use crate::control::{BoxFuture, ExportInfo};
use crate::device::{Device, DeviceConfig, DeviceError};
use crate::fuse::{FuseError, FuseExport};
use crate::listen::Listening;
use crate::loop_device::{LoopError, LoopExport};
use crate::nbd::{Crowd, Listener, NameTaken, Tls, TlsError};
use crate::nbd_device::NbdDeviceError;
use crate::reactor::{Attach, Reactor};
use crate::rundir::RunDir;
use crate::spec::{Bytes, FuseSpec, LoopSpec, NbdAddress, NbdLimits, TableSpec, TlsSpec};
use crate::tables::{self, TableRefusal};
use crate::tree::{Pool, Surroundings};
use crate::ublk::UblkError;
use ring::{EngineInfo, RingConfig};
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// How long clients have to take their last replies before their connections are cut.
const GRACE: Duration = Duration::from_secs(10);

/// Devices that are taken away at once when all are.
const REMOVALS_MAX: usize = 32;
/// How long to wait before a device that is in use is tried again when the process is to end: at first, as whoever looks
/// for what is on a new device has soon seen it …
const FREE_LOOK_FIRST: Duration = Duration::from_millis(5);
/// … and, twice as long each time, at most.
const FREE_LOOK: Duration = Duration::from_millis(200);

/// How a process serves.
#[derive(Clone, Debug)]
pub struct HostConfig {
    /// Threads that do I/O.
    pub reactors: usize,
    /// How their rings are made.
    pub ring: RingConfig,
    /// What NBD clients may take.
    pub nbd: NbdLimits,
}

/// What cannot be done, and why.
#[derive(Debug, thiserror::Error)]
pub enum HostError {
    /// A reactor's ring could not be made.
    #[error("an I/O thread could not be started: {0}")]
    Reactor(#[source] io::Error),
    /// The name is in use in this process.
    #[error("there is a device of that name (choose another with --name)")]
    NameTaken,
    /// There is no such device.
    #[error("there is no device of that name (see blockyard list)")]
    NoDevice,
    /// The device could not be opened.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// The address could not be listened on.
    #[error("{address}: {source}{hint}")]
    Listen {
        /// Where.
        address: NbdAddress,
        /// What to do about it.
        hint: &'static str,
        /// Why.
        source: io::Error,
    },
    /// Two listeners of one address want different TLS.
    #[error("{0} is already listened on with other TLS options (give all its exports the same)")]
    OtherTls(NbdAddress),
    /// TLS could not be set up.
    #[error(transparent)]
    Tls(#[from] TlsError),
    /// The export's name is taken.
    #[error(transparent)]
    ExportTaken(#[from] NameTaken),
    /// The kernel's nbd driver.
    #[error(transparent)]
    NbdDevice(#[from] NbdDeviceError),
    /// The device has zones, and the export's hosts would not know of them.
    #[error("it is a zoned device, and {0} has no zones (export it with --ublk)")]
    Zoned(&'static str),
    /// Its socket cannot have another name.
    #[error("its socket cannot be moved: {0}")]
    Move(#[source] io::Error),
    /// It cannot be changed so.
    #[error(transparent)]
    Change(#[from] ChangeError),
    /// Its table cannot be asked or changed so.
    #[error(transparent)]
    Table(#[from] TableRefusal),
    /// Another device of the process would lose what it stands on.
    #[error("{0} stands on it (remove that first)")]
    Stood(String),
    /// It cannot be shown as a file, or not be taken away.
    #[error(transparent)]
    Fuse(#[from] FuseError),
    /// What the kernel has cached of what it held before.
    #[error(transparent)]
    Cached(#[from] CacheError),
    /// It cannot be shown as a loop device, or not be taken away.
    #[error(transparent)]
    Loop(#[from] LoopError),
    /// The kernel block device.
    #[error(transparent)]
    Ublk(#[from] UblkError),
    /// The last flush failed: what was written since the one before may be lost.
    #[error("the final flush failed: writes that were not flushed before may be lost")]
    Flush,
}

impl HostError {
    /// Whether it would go well if somebody let go of the device.
    pub(crate) fn is_in_use(&self) -> bool {
        matches!(
            self,
            HostError::Fuse(FuseError::InUse { .. })
                | HostError::Loop(LoopError::InUse(_) | LoopError::File(FuseError::InUse { .. }))
                | HostError::Ublk(UblkError::InUse(_))
                | HostError::Stood(_)
        )
    }
}

/// One way in which a device is shown, from the control plane's side.
pub(crate) trait Export: Send + Sync {
    /// What `show` says.
    fn info(&self, device: &Device) -> ExportInfo;

    /// Whether somebody has it in use at the moment.
    fn is_used(&self, device: &Device) -> bool {
        self.info(device).connections > 0
    }

    /// Whether the kernel does I/O on the device's file past us, so that nothing can be held back.
    fn is_passed_by(&self) -> bool {
        false
    }

    /// Whether [`close`](Export::close) would refuse now, as it does where somebody has the device in use. Changes nothing and
    /// does no I/O on the device, which may be suspended. A device goes only when none of its exports refuses.
    fn may_close<'a>(&'a self, device: &'a Arc<Device>) -> BoxFuture<'a, Result<(), HostError>> {
        let _ = device;
        Box::pin(async { Ok(()) })
    }

    /// Offer it no longer. What clients have asked for is finished afterwards, while its queues are retired. A
    /// refusal, as of a device that is in use, leaves it offered.
    fn close<'a>(&'a self, device: &'a Arc<Device>) -> BoxFuture<'a, Result<(), HostError>>;

    /// As [`close`](Export::close), but whoever has the device is left with errors rather than asked.
    fn force<'a>(&'a self, device: &'a Arc<Device>) -> BoxFuture<'a, Result<(), HostError>> {
        self.close(device)
    }

    /// Whether hosts could be told at all that the device has another size. Changes nothing. A device is resized only when none
    /// of its exports refuses.
    fn may_resize(&self, size: Bytes) -> Result<(), HostError> {
        let _ = size;
        Ok(())
    }

    /// The device has another size: let whoever has it attached know. Called while it is served, after it grew and
    /// before it shrinks, so that nobody is told of blocks that are not there. Clients that learn the size only when
    /// they connect need nothing. After a refusal the device keeps its size or goes back to it, and this is called with that.
    fn resized(&self, size: Bytes) -> BoxFuture<'_, Result<(), HostError>> {
        let _ = size;
        Box::pin(async { Ok(()) })
    }

    /// All that the device holds is something else from now on: what the kernel has cached of it is to go. May wait for
    /// I/O on the device, for a bounded time.
    fn replaced(&self) -> BoxFuture<'_, Result<(), HostError>> {
        Box::pin(async { Ok(()) })
    }

    /// The device is called something else from now on: what bears its name in the run directory follows.
    fn renamed(&self, run: &RunDir, from: &str, to: &str) -> Result<(), HostError> {
        let _ = (run, from, to);
        Ok(())
    }

    /// The device has that table from now on: whoever takes it over needs to know.
    fn retabled(&self, table: &TableSpec) -> Result<(), HostError> {
        let _ = table;
        Ok(())
    }

    /// That file is in the place of its first from now on: whoever takes it over needs to know.
    fn refiled(&self, file: &Path) -> Result<(), HostError> {
        let _ = file;
        Ok(())
    }

    /// The device has another scheduler, other limits or another limit for slow requests from now on: whoever takes it
    /// over needs to know.
    fn relayered(&self, device: &Device) -> Result<(), HostError> {
        let _ = device;
        Ok(())
    }

    /// Stop serving and leave what there is to another process, which takes it over: this one is about to end.
    /// Clients that find the next process by themselves need nothing.
    fn leave(&self) -> BoxFuture<'_, Result<(), HostError>> {
        Box::pin(async { Ok(()) })
    }

    /// The device's queues are gone: remove what is left of the export.
    fn closed(&self) -> BoxFuture<'_, Result<(), HostError>> {
        Box::pin(async { Ok(()) })
    }
}

/// An export and what it shows.
struct Shown {
    device: Arc<Device>,
    export: Arc<dyn Export>,
    /// It was closed, and what is left of it goes with the device, which another export keeps.
    is_closed: bool,
}

/// A device as one export of an NBD listener.
struct NbdExport {
    listener: Arc<Listener>,
    name: String,
}

impl Export for NbdExport {
    fn info(&self, device: &Device) -> ExportInfo {
        ExportInfo {
            kind: "nbd".to_owned(),
            address: self.listener.uri(&self.name),
            connections: device.connections().into(),
            tls: self.listener.tls_mode().to_string(),
            details: self.listener.limit_facts(device),
        }
    }

    fn renamed(&self, run: &RunDir, from: &str, to: &str) -> Result<(), HostError> {
        let (from, to) = (run.nbd_socket(from), run.nbd_socket(to));
        self.listener.moved(&from, &to).map_err(HostError::Move)
    }

    fn close<'a>(&'a self, device: &'a Arc<Device>) -> BoxFuture<'a, Result<(), HostError>> {
        self.listener.exports().remove(device);
        if self.listener.exports().is_empty() {
            self.listener.close();
        }
        Box::pin(async { Ok(()) })
    }
}

/// A listener that more exports may join.
struct Joinable {
    /// As it was asked for.
    address: NbdAddress,
    tls: TlsSpec,
    listener: Arc<Listener>,
}

/// One process's worth of devices.
pub struct Host {
    reactors: Vec<Reactor>,
    next_reactor: AtomicUsize,
    next_number: AtomicUsize,
    devices: Mutex<Vec<Arc<Device>>>,
    listeners: Mutex<Vec<Joinable>>,
    shown: Mutex<Vec<Shown>>,
    shutting_down: AtomicBool,
    /// Held while a device comes to stand on another, from the check that it may to when others see it.
    pub(crate) stacking: tokio::sync::Mutex<()>,
    /// What words of tables opened.
    pub(crate) pool: Arc<Pool>,
    /// Told when a device has a table that it had not.
    pub(crate) table_came: tokio::sync::Notify,
    /// The same for whoever does the chores of targets.
    pub(crate) chores_came: tokio::sync::Notify,
    /// NBD connections, counted.
    pub(crate) crowd: Arc<Crowd>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Host {
    /// Start the reactors.
    ///
    /// # Errors
    /// [`HostError::Reactor`]; nothing is left running.
    pub fn start(config: &HostConfig) -> Result<Arc<Host>, HostError> {
        let count = config.reactors.max(1);
        let limits = exports::nbd::Limits {
            memory: (config.nbd.memory.0 / count as u64).max(1),
            stall: config.nbd.stall,
        };
        let reactors = (0..count)
            .map(|number| Reactor::start(number, config.ring.clone(), limits))
            .collect::<io::Result<Vec<_>>>()
            .map_err(HostError::Reactor)?;
        Ok(Arc::new(Host {
            reactors,
            next_reactor: AtomicUsize::new(0),
            next_number: AtomicUsize::new(0),
            devices: Mutex::default(),
            listeners: Mutex::default(),
            shown: Mutex::default(),
            shutting_down: AtomicBool::new(false),
            stacking: tokio::sync::Mutex::default(),
            pool: Arc::default(),
            table_came: tokio::sync::Notify::new(),
            chores_came: tokio::sync::Notify::new(),
            crowd: Arc::new(Crowd::new(config.nbd)),
        }))
    }

    /// Which engine the reactors' rings run on, and why.
    pub fn engine(&self) -> &EngineInfo {
        self.reactors[0].engine()
    }

    /// Open a device. It is reachable once it is exported.
    ///
    /// # Errors
    /// [`HostError::NameTaken`] and [`HostError::Device`]; nothing is left behind.
    pub fn add_device(&self, config: &DeviceConfig) -> Result<Arc<Device>, HostError> {
        if self.device(config.name.as_str()).is_some() {
            return Err(HostError::NameTaken);
        }
        let find = |name: &str| self.device(name);
        let around = Surroundings { pool: &self.pool, device: &find };
        let device = Arc::new(Device::open(config, self.next_number.fetch_add(1, Relaxed), &around)?);
        let mut devices = lock(&self.devices);
        if devices.iter().any(|d| d.name() == device.name()) {
            return Err(HostError::NameTaken);
        }
        devices.push(device.clone());
        self.table_came.notify_one();
        self.chores_came.notify_one();
        Ok(device)
    }

    /// Offer a device to NBD clients and say where: a URI. Must be called on the control plane's runtime.
    ///
    /// # Errors
    /// The address, the certificates or the name; nothing is left behind.
    pub fn export_nbd(
        self: &Arc<Self>,
        device: &Arc<Device>,
        address: &NbdAddress,
        name: &str,
        tls: &TlsSpec,
    ) -> Result<String, HostError> {
        Self::refuse_zones(device, "NBD")?;
        let listener = self.listener(address, tls)?;
        self.show(device, listener, name)
    }

    /// The same on a socket that the service manager opened. Other devices join it through
    /// [`export_nbd`](Host::export_nbd) at its address.
    ///
    /// # Errors
    /// As [`export_nbd`](Host::export_nbd).
    pub fn export_nbd_on(
        self: &Arc<Self>,
        device: &Arc<Device>,
        listening: Listening,
        name: &str,
        tls: &TlsSpec,
    ) -> Result<String, HostError> {
        Self::refuse_zones(device, "NBD")?;
        let address = listening.address.clone();
        let loaded = Tls::load(tls)?.map(Arc::new);
        let listener = Listener::start(listening, loaded, self).map_err(|e| listen_error(&address, e))?;
        lock(&self.listeners).push(Joinable { address, tls: tls.clone(), listener: listener.clone() });
        self.show(device, listener, name)
    }

    /// Clients of an export without zones would write where they must not.
    pub(crate) fn refuse_zones(device: &Device, export: &'static str) -> Result<(), HostError> {
        let zoned = device.limits().features.has(block::Features::ZONED);
        if zoned { Err(HostError::Zoned(export)) } else { Ok(()) }
    }

    fn show(&self, device: &Arc<Device>, listener: Arc<Listener>, name: &str) -> Result<String, HostError> {
        if let Err(taken) = listener.exports().add(name, device.clone()) {
            self.drop_unused_listeners();
            return Err(taken.into());
        }
        let uri = listener.uri(name);
        self.add_export(device, Arc::new(NbdExport { listener, name: name.to_owned() }));
        Ok(uri)
    }

    /// Show a device as a file, and say which.
    ///
    /// # Errors
    /// It cannot be mounted there; nothing is left behind.
    pub fn export_fuse(&self, device: &Arc<Device>, spec: &FuseSpec) -> Result<String, HostError> {
        Host::refuse_zones(device, "FUSE")?;
        let export = FuseExport::start(self, device, spec)?;
        let path = export.path().display().to_string();
        self.add_export(device, Arc::new(export));
        Ok(path)
    }

    /// Show a device as a loop device, over `file` in the run directory, and say which.
    ///
    /// # Errors
    /// There is no loop device to be had; nothing is left behind.
    pub fn export_loop(
        &self,
        device: &Arc<Device>,
        file: &Path,
        spec: &LoopSpec,
    ) -> Result<String, HostError> {
        Host::refuse_zones(device, "a loop device")?;
        let export = LoopExport::start(self, device, file, spec)?;
        let address = export.address();
        self.add_export(device, Arc::new(export));
        Ok(address)
    }

    /// From here on the device is shown in this way, too.
    pub(crate) fn add_export(&self, device: &Arc<Device>, export: Arc<dyn Export>) {
        lock(&self.shown).push(Shown { device: device.clone(), export, is_closed: false });
    }

    /// The listener of an address: the one there is, or a new one.
    fn listener(self: &Arc<Self>, address: &NbdAddress, tls: &TlsSpec) -> Result<Arc<Listener>, HostError> {
        let mut listeners = lock(&self.listeners);
        if let Some(there) =
            listeners.iter().find(|l| l.listener.address() == *address || l.address == *address)
        {
            if there.tls != *tls {
                return Err(HostError::OtherTls(address.clone()));
            }
            return Ok(there.listener.clone());
        }
        let loaded = Tls::load(tls)?.map(Arc::new);
        let listener = Listening::open(address)
            .and_then(|listening| Listener::start(listening, loaded, self))
            .map_err(|source| listen_error(address, source))?;
        listeners.push(Joinable { address: address.clone(), tls: tls.clone(), listener: listener.clone() });
        Ok(listener)
    }

    /// All devices, in the order they were added.
    pub fn devices(&self) -> Vec<Arc<Device>> {
        lock(&self.devices).clone()
    }

    /// The device of that name.
    pub fn device(&self, name: &str) -> Option<Arc<Device>> {
        lock(&self.devices).iter().find(|device| device.name().as_str() == name).cloned()
    }

    /// How a device is offered.
    pub fn exports(&self, device: &Arc<Device>) -> Vec<ExportInfo> {
        self.exports_of(device).iter().map(|export| export.info(device)).collect()
    }

    /// Hand a client of a device to a certain reactor; of a device of one queue, to the one that has it.
    pub(crate) fn attach_to(&self, number: usize, device: Arc<Device>, attach: Attach) {
        let number = if device.is_single() { device.number() % self.reactors.len() } else { number };
        self.reactors[number].attach(device, attach);
    }

    /// Whether a client has a device in use, in whichever way.
    pub fn is_used(&self, device: &Arc<Device>) -> bool {
        self.exports_of(device).iter().any(|export| export.is_used(device))
    }

    /// Whether I/O on a device goes past us.
    pub(crate) fn is_passed_by(&self, device: &Arc<Device>) -> bool {
        self.exports_of(device).iter().any(|export| export.is_passed_by())
    }

    /// Hand a new client of a device to the reactor whose turn it is.
    pub(crate) fn attach(&self, device: Arc<Device>, attach: Attach) {
        let number = self.next_reactor.fetch_add(1, Relaxed) % self.reactors.len();
        self.attach_to(number, device, attach);
    }

    /// The process is about to end: what cannot be taken away is left to the next.
    pub(crate) fn is_shutting_down(&self) -> bool {
        self.shutting_down.load(Relaxed)
    }

    /// Take a device away: offer it no longer, finish what its clients asked for, flush, close. Clients
    /// that do not take their replies are cut off after a while.
    ///
    /// # Errors
    /// [`HostError::NoDevice`]; what an export refuses, and the device stays; [`HostError::Flush`], and whatever an
    /// export could not remove, when the device is gone.
    pub async fn remove_device(&self, name: &str) -> Result<(), HostError> {
        self.remove(name, false).await
    }

    /// The same although somebody uses it, who is left with errors.
    ///
    /// # Errors
    /// As [`remove_device`](Host::remove_device).
    pub async fn remove_device_by_force(&self, name: &str) -> Result<(), HostError> {
        self.remove(name, true).await
    }

    async fn remove(&self, name: &str, by_force: bool) -> Result<(), HostError> {
        let device = self.device(name).ok_or(HostError::NoDevice)?;
        self.check_unused(&device)?;
        // A change that is being made ends first.
        let _turn = device.turn.lock().await;
        {
            // It may have gone meanwhile, or another one come to stand on it. From here on none does.
            let devices = lock(&self.devices);
            if !devices.iter().any(|other| Arc::ptr_eq(other, &device)) {
                return Err(HostError::NoDevice);
            }
            stood_on(&devices, &device)?;
            device.set_leaving(true);
        }
        if let Err(refused) = self.close_exports(&device, by_force).await {
            device.set_leaving(false);
            return Err(refused);
        }
        lock(&self.devices).retain(|other| !Arc::ptr_eq(other, &device));
        let mut exports = Vec::new();
        lock(&self.shown).retain(|shown| {
            let of_it = Arc::ptr_eq(&shown.device, &device);
            exports.extend(of_it.then(|| shown.export.clone()));
            !of_it
        });
        self.drop_unused_listeners();
        let well = self.retire(&device).await;
        if let Some(session) = device.trace() {
            session.end();
        }
        let mut result = if well { Ok(()) } else { Err(HostError::Flush) };
        for export in exports {
            let removed = export.closed().await;
            // A flush that failed matters more.
            result = result.and(removed);
        }
        result
    }

    fn check_unused(&self, device: &Arc<Device>) -> Result<(), HostError> {
        stood_on(&lock(&self.devices), device)
    }

    /// Close all exports of a device, or none: all are asked before the first is closed, and a device that is suspended goes on
    /// only when none refuses. One that refuses after all, because somebody came to use it in between, leaves the
    /// others closed: they are not shown any more, and the device stays.
    async fn close_exports(&self, device: &Arc<Device>, by_force: bool) -> Result<(), HostError> {
        let mut exports = self.exports_of(device);
        // NBD never refuses, so it goes last.
        exports.sort_by_key(|export| export.info(device).kind == "nbd");
        let was_suspended = device.is_suspended();
        // One export alone refuses by itself, and knows better than whoever asks whether it has to.
        if !by_force && (exports.len() > 1 || was_suspended) {
            for export in &exports {
                export.may_close(device).await?;
            }
        }
        if was_suspended {
            // What is held back has to end, or no client could leave.
            self.resume(device);
        }
        for export in &exports {
            let address = export.info(device).address;
            let closed = if by_force { export.force(device) } else { export.close(device) };
            if let Err(refused) = closed.await {
                if was_suspended && let Err(error) = self.suspend(device, false).await {
                    tracing::error!(device = %device.name(), %error, "it is not suspended any more");
                }
                return Err(refused);
            }
            tracing::debug!(device = %device.name(), address, "closed");
            let is_it =
                |shown: &&mut Shown| std::ptr::addr_eq(Arc::as_ptr(&shown.export), Arc::as_ptr(export));
            lock(&self.shown).iter_mut().filter(is_it).for_each(|shown| shown.is_closed = true);
        }
        Ok(())
    }

    /// Take a device away when whoever uses it has let go of it: with it they would lose what they have not written.
    async fn remove_when_free(&self, name: &str) -> Result<(), HostError> {
        let mut said = false;
        let mut pause = FREE_LOOK_FIRST;
        loop {
            match self.remove_device(name).await {
                Err(in_use) if in_use.is_in_use() => {
                    if !matches!(in_use, HostError::Stood(_)) && !std::mem::replace(&mut said, true) {
                        tracing::warn!("{name}: {in_use}; waiting for that (a second signal ends at once)");
                    }
                    tokio::time::sleep(pause).await;
                    pause = (pause * 2).min(FREE_LOOK);
                }
                other => return other,
            }
        }
    }

    pub(crate) fn exports_of(&self, device: &Arc<Device>) -> Vec<Arc<dyn Export>> {
        let shown = lock(&self.shown);
        let of_it = shown.iter().filter(|shown| Arc::ptr_eq(&shown.device, device) && !shown.is_closed);
        of_it.map(|shown| shown.export.clone()).collect()
    }

    pub(crate) fn reactors(&self) -> &[Reactor] {
        &self.reactors
    }

    /// Ask all exports of a device whether they could be told that it holds `to` in place of `from`.
    pub(crate) fn ask_size(&self, device: &Arc<Device>, from: Bytes, to: Bytes) -> Result<(), HostError> {
        match from == to {
            true => Ok(()),
            false => self.exports_of(device).iter().try_for_each(|export| export.may_resize(to)),
        }
    }

    /// Tell all exports of a device that it holds `to` from now on, in place of `from`. When one refuses, it and those that were
    /// told before it are told `from` again.
    pub(crate) async fn tell_size(
        &self,
        device: &Arc<Device>,
        from: Bytes,
        to: Bytes,
    ) -> Result<(), HostError> {
        if from == to {
            return Ok(());
        }
        let exports = self.exports_of(device);
        for (last, export) in exports.iter().enumerate() {
            let Err(refused) = export.resized(to).await else { continue };
            for export in &exports[..=last] {
                if let Err(error) = export.resized(from).await {
                    let (device, address) = (device.name(), export.info(device).address);
                    tracing::warn!(%device, address, %error, "could not be told again that the device has its old size");
                }
            }
            return Err(refused);
        }
        Ok(())
    }

    /// Have all reactors finish with a device; whether its last flushes went well.
    async fn retire(&self, device: &Arc<Device>) -> bool {
        let mut retired: Vec<_> = self.reactors.iter().map(|r| r.retire(device.clone())).collect();
        let all = async {
            let mut well = true;
            for done in &mut retired {
                well &= done.await.unwrap_or(false);
            }
            well
        };
        let mut all = std::pin::pin!(all);
        match tokio::time::timeout(GRACE, &mut all).await {
            Ok(well) => well,
            Err(_) => {
                tables::give_up(&device.form());
                self.reactors.iter().for_each(|reactor| reactor.abort(device.clone()));
                all.await
            }
        }
    }

    /// Listeners that offer nothing any more are closed already; forget them.
    fn drop_unused_listeners(&self) {
        lock(&self.listeners).retain(|there| {
            let keep = !there.listener.exports().is_empty();
            if !keep {
                there.listener.close();
            }
            keep
        });
    }

    /// Take every device away, then stop the reactors.
    ///
    /// # Errors
    /// Devices that could not be taken away, or not without loss, each with why.
    pub async fn shut_down(self: &Arc<Self>) -> Result<(), Vec<(String, HostError)>> {
        self.shutting_down.store(true, Relaxed);
        // Beside each other: a kernel device takes a good while, most of which is waiting.
        let mut removals = tokio::task::JoinSet::new();
        let mut failed = Vec::new();
        let mut done = |ended: Option<Result<_, tokio::task::JoinError>>| match ended {
            Some(Ok((name, Err(why)))) => failed.push((name, why)),
            Some(Err(panicked)) if panicked.is_panic() => std::panic::resume_unwind(panicked.into_panic()),
            _ => {}
        };
        let mut devices = self.devices();
        // What stands on others goes before them. All are kept to the end: an origin that is in use for longer than its snapshots
        // copies for them until it goes, too.
        let all = devices.clone();
        devices.sort_by_cached_key(|device| std::cmp::Reverse(devices_below(&all, device)));
        for device in devices {
            if removals.len() >= REMOVALS_MAX {
                done(removals.join_next().await);
            }
            let (host, name) = (self.clone(), device.name().to_string());
            removals.spawn(async move {
                let removed = host.remove_when_free(&name).await;
                (name, removed)
            });
        }
        while !removals.is_empty() {
            done(removals.join_next().await);
        }
        self.reactors.iter().for_each(Reactor::stop);
        if failed.is_empty() { Ok(()) } else { Err(failed) }
    }
}

/// How many of these a device stands on.
fn devices_below(all: &[Arc<Device>], device: &Device) -> usize {
    all.iter().filter(|other| device.uses(other)).count()
}

/// Whether another device stands on this one, or would with the table that is loaded.
fn stood_on(devices: &[Arc<Device>], device: &Arc<Device>) -> Result<(), HostError> {
    let above = devices.iter().find(|other| !Arc::ptr_eq(other, device) && other.uses(device));
    above.map_or(Ok(()), |above| Err(HostError::Stood(above.name().to_string())))
}

fn listen_error(address: &NbdAddress, source: io::Error) -> HostError {
    let hint = match source.kind() {
        io::ErrorKind::AddrInUse => " (another server listens there: stop it or choose another address)",
        io::ErrorKind::AlreadyExists => " (take that away or choose another address)",
        io::ErrorKind::PermissionDenied => " (choose an address that you may use)",
        io::ErrorKind::NotFound => " (does its directory exist?)",
        _ => "",
    };
    HostError::Listen { address: address.clone(), hint, source }
}
