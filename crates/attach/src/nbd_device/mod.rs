//! The nbd-device export: a `/dev/nbdN` of the kernel's nbd driver, without a listener in between.
//!
//! Each connection is a socket pair. One end goes to the kernel over generic netlink; the other goes to a
//! reactor, in the transmission phase from the first byte. If this process dies, the kernel sees all
//! connections close, holds requests for the dead-connection timeout, and sends them to the next server of a
//! device of that name, which brings new sockets. Requests that were in flight are sent again only after the
//! request timeout. A single connection that the kernel gives up is replaced in the same way within one
//! process, after its last request has ended.
//!
//! Owned by the host, on the control plane's runtime. Calls to the kernel run on the blocking pool.
//!
//! *Invariant:* a socket whose other end the kernel did not accept never reaches a reactor.
//!
//! The protocol's bytes are in `proto` and `exports`, messages to the kernel in [`driver`].

mod driver;
#[cfg(test)]
mod model;
mod netlink;
#[cfg(test)]
mod tests;

use crate::Exports;
use crate::helper::page_cache::drop_blocks;
use crate::nbd::{adoption, info_of};
use crate::{Exported, UblkLife};
use driver::{Connect, DeviceState, Driver, Kernel, Reconfigure};
use engine::control::{BoxFuture, ExportInfo};
use engine::device::Device;
use engine::host::{Export, Host, HostError, HostErrorKind};
use engine::retry::{backoff, peer_log_limit};
use proto::nbd::{ExportId, Session, Style};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use spec::{Bytes, NbdDeviceSpec, format_time};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};
use tokio::sync::{Mutex, Notify};

/// Most connections of one device: the limit of `--nbd-device`.
const CONNECTIONS_MAX: usize = 256;
/// Number of attempts to pass sockets to a device whose old ones the kernel has not yet seen closed, and
/// the pause between them, three seconds in total. The kernel sees it at once unless it is busy, as the
/// rings of a killed server are torn down some time after its death.
const TAKE_OVER_TRIES: u32 = if cfg!(test) { 4 } else { 60 };
const TAKE_OVER_PAUSE: Duration = Duration::from_millis(50);
/// Longest time the kernel may take to disconnect a device.
const DISCONNECT_MAX: Duration = Duration::from_secs(10);

/// Why a device could not be attached, resized or detached.
#[derive(Debug, thiserror::Error)]
pub enum NbdDeviceError {
    /// The driver is not loaded.
    #[error("the kernel's nbd driver is not loaded (modprobe nbd; or export with --nbd, --ublk or --loop)")]
    NoDriver,
    /// The process lacks the capability.
    #[error("attaching an nbd device needs CAP_SYS_ADMIN (run it as root, or export with --nbd)")]
    NoPermission,
    /// Another server's device has the number.
    #[error("/dev/nbd{number} is attached already{}; `nbd-client -d /dev/nbd{number}` detaches it)", busy_hint(.backend.as_deref()))]
    Busy {
        /// The number.
        number: u32,
        /// Identifier that it was attached with.
        backend: Option<String>,
    },
    /// A live server of a device of this name serves it.
    #[error("/dev/nbd{0} belongs to a live server of a device of this name (stop that server first)")]
    Served(u32),
    /// The driver cannot have a device of this number.
    #[error("/dev/nbd{0}: the number is too large (choose a smaller one, or none)")]
    Range(u32),
    /// All devices are in use and no more can be created.
    #[error(
        "all nbd devices are in use (detach one, or load the driver with more: modprobe nbd nbds_max=64)"
    )]
    AllInUse,
    /// A volatile device whose server died is still in use.
    #[error(
        "/dev/nbd{0} is mounted or part of another device, and its data died with its server: a new server would serve \\
         other data (unmount it first)"
    )]
    Volatile(u32),
    /// The device is mounted or has holders.
    #[error("/dev/nbd{0} is mounted or part of another device (unmount it first)")]
    InUse(u32),
    /// Any other error of the kernel.
    #[error("the kernel did not {what} {device}: {why}")]
    Refused {
        /// The operation.
        what: &'static str,
        /// The device.
        device: String,
        /// The kernel's error.
        why: io::Error,
    },
    /// Socket pairs could not be created.
    #[error("socket pairs could not be created: {0}")]
    Sockets(#[from] io::Error),
}

fn busy_hint(backend: Option<&str>) -> String {
    match backend {
        Some(name) if !name.is_empty() => {
            format!(" as \"{name}\" (serve a device of that name to take it over")
        }
        _ => " (choose another number, or none".to_owned(),
    }
}

fn refused(what: &'static str, number: Option<u32>, errno: Errno) -> NbdDeviceError {
    match (errno, number) {
        (Errno::NOENT, _) => NbdDeviceError::NoDriver,
        (Errno::PERM | Errno::ACCESS, _) => NbdDeviceError::NoPermission,
        (Errno::BUSY, Some(number)) => NbdDeviceError::Busy { number, backend: None },
        (Errno::NOSPC | Errno::NODEV | Errno::BUSY, None) => NbdDeviceError::AllInUse,
        // Minor numbers have 20 bits, and a device takes at least one.
        (Errno::INVAL, Some(number)) if number >= 1 << 15 => NbdDeviceError::Range(number),
        _ => {
            let device = number.map_or("an nbd device".to_owned(), |number| format!("/dev/nbd{number}"));
            NbdDeviceError::Refused { what, device, why: errno.into() }
        }
    }
}

/// Identifier for the kernel: the device's name and its number of connections, which the kernel does not
/// report. It distinguishes our devices from others. Device names contain no `/`.
fn backend_of(name: &str, connections: usize) -> String {
    format!("blockyard:{name}/{connections}")
}

/// Parses an identifier. Returns the number of connections; `None`: it belongs to another name.
fn connections_of(name: &str, backend: &str) -> Option<usize> {
    let (found, connections) = backend.strip_prefix("blockyard:")?.split_once('/')?;
    connections.parse().ok().filter(|count| found == name && (1..=CONNECTIONS_MAX).contains(count))
}

/// Detaches the device that a dead server of that name left behind. Returns its number; `None`: there is
/// none.
///
/// # Errors
/// [`NbdDeviceError`]; the device stays.
pub fn remove_orphan(name: &str) -> Result<Option<u32>, NbdDeviceError> {
    remove_orphan_of(&Kernel::default(), name)
}

fn remove_orphan_of(driver: &dyn Driver, name: &str) -> Result<Option<u32>, NbdDeviceError> {
    let Some((number, backend, connections)) = find(driver, name, None) else { return Ok(None) };
    if driver.is_mounted(number) {
        return Err(NbdDeviceError::InUse(number));
    }
    // A process with another run directory may serve the device; its connections are alive then.
    let ask = Reconfigure { number, backend, size: None, dead_timeout: None };
    if replace(driver, &ask, connections)?.len() < connections {
        return Ok(None);
    }
    driver.disconnect(number).map_err(|errno| refused("detach", Some(number), errno))?;
    Ok(Some(number))
}

/// Detaches the device that a dead server left, before a volatile stack is served: a file system still
/// mounted from that device would otherwise see other data. `number`: only the device of that number.
fn detach_volatile_orphan(
    driver: &dyn Driver,
    name: &str,
    number: Option<u32>,
) -> Result<(), NbdDeviceError> {
    let Some((number, backend, connections)) = find(driver, name, number) else { return Ok(()) };
    let ask = Reconfigure { number, backend, size: None, dead_timeout: None };
    if replace(driver, &ask, connections)?.len() < connections {
        // A live server serves it; attaching will report that.
        return Ok(());
    }
    if driver.is_mounted(number) {
        return Err(NbdDeviceError::Volatile(number));
    }
    driver.disconnect(number).map_err(|errno| refused("detach", Some(number), errno))
}

/// Finds the device that is attached under a name, of all devices or the given one. Returns its number,
/// identifier and number of connections.
fn find(driver: &dyn Driver, name: &str, number: Option<u32>) -> Option<(u32, String, usize)> {
    let numbers = number.map_or_else(|| driver.numbers(), |number| vec![number]);
    numbers.into_iter().find_map(|number| {
        let backend = driver.state(number).filter(|state| state.connected)?.backend?;
        let connections = connections_of(name, &backend)?;
        Some((number, backend, connections))
    })
}

/// Runs a call that may block on the blocking pool.
async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    match tokio::task::spawn_blocking(work).await {
        Ok(value) => value,
        Err(error) => std::panic::resume_unwind(error.into_panic()),
    }
}

/// Creates socket pairs: our ends, and the kernel's.
fn pairs(count: usize) -> io::Result<(Vec<OwnedFd>, Vec<OwnedFd>)> {
    let pairs = (0..count).map(|_| UnixStream::pair()).collect::<io::Result<Vec<_>>>()?;
    Ok(pairs.into_iter().map(|(ours, theirs)| (OwnedFd::from(ours), OwnedFd::from(theirs))).unzip())
}

/// Whether the other end is open.
fn is_open(socket: &OwnedFd) -> bool {
    let mut polled = [PollFd::new(socket, PollFlags::empty())];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    poll(&mut polled, Some(&now)).is_ok() && !polled[0].revents().contains(PollFlags::HUP)
}

/// Passes `count` sockets to the kernel to replace dead ones of a device. Returns our ends of the accepted
/// ones: fewer than `count` if fewer were dead.
fn replace(driver: &dyn Driver, ask: &Reconfigure, count: usize) -> Result<Vec<OwnedFd>, NbdDeviceError> {
    let mut taken = Vec::new();
    for attempt in 0..TAKE_OVER_TRIES {
        if attempt > 0 {
            std::thread::sleep(TAKE_OVER_PAUSE);
        }
        let (ours, theirs) = pairs(count - taken.len())?;
        driver.reconfigure(ask, &theirs).map_err(|errno| refused("reattach", Some(ask.number), errno))?;
        // The kernel closes sockets that it does not need; dropping our copies closes these pairs.
        drop(theirs);
        taken.extend(ours.into_iter().filter(is_open));
        if taken.len() == count {
            break;
        }
    }
    Ok(taken)
}

/// State of an attached device.
struct Attached {
    driver: Arc<dyn Driver>,
    host: Weak<Host>,
    device: Arc<Device>,
    number: u32,
    backend: String,
    /// Number of connections that the kernel's device has.
    connections: usize,
    /// The request timeout and the dead-connection timeout.
    timeouts: (Duration, Duration),
    /// Number of live connections.
    alive: AtomicUsize,
    /// Notified when a connection ends.
    gone: Notify,
    /// The device is being detached: connections are not replaced.
    closing: AtomicBool,
    /// Held while sockets are passed to the kernel or the device is detached.
    changing: Mutex<()>,
}

/// An attached nbd device as an export.
struct NbdDevice(Arc<Attached>);

impl From<NbdDeviceError> for HostError {
    fn from(error: NbdDeviceError) -> HostError {
        HostError::caused(HostErrorKind::Failed, error)
    }
}

/// Attaches a device to the kernel's nbd driver, or takes over the kernel's device that a dead server of
/// this name left. Must be called on the control plane's runtime.
///
/// # Errors
/// The device is zoned, or the driver refuses; nothing is left behind.
pub(crate) async fn export(
    exports: &Exports,
    device: &Arc<Device>,
    spec: &NbdDeviceSpec,
    _life: impl FnOnce() -> UblkLife,
) -> Result<Exported, HostError> {
    export_with(exports.host(), Arc::new(Kernel::default()), device, spec).await.map(Exported::at)
}

async fn export_with(
    host: &Arc<Host>,
    driver: Arc<dyn Driver>,
    device: &Arc<Device>,
    spec: &NbdDeviceSpec,
) -> Result<String, HostError> {
    Host::refuse_zones(device, "NBD")?;
    let connections = spec.connections.map_or(host.reactors().len(), usize::from);
    let ask = connect_of(device, spec, connections);
    let (kernel, name, survives) = (driver.clone(), device.name().to_string(), device.survives());
    let (number, backend, sockets) = blocking(move || {
        if !survives {
            detach_volatile_orphan(&*kernel, &name, ask.number)?;
        }
        attach(&*kernel, &name, ask, connections)
    })
    .await?;
    let attached = Arc::new(Attached {
        driver,
        host: Arc::downgrade(host),
        device: device.clone(),
        number,
        backend,
        connections: sockets.len(),
        timeouts: (spec.timeout, spec.dead_timeout),
        alive: AtomicUsize::new(0),
        gone: Notify::new(),
        closing: AtomicBool::new(false),
        changing: Mutex::new(()),
    });
    attached.serve(sockets);
    host.add_export(device, Arc::new(NbdDevice(attached.clone())));
    tokio::spawn(reconnect(Arc::downgrade(&attached)));
    Ok(attached.path())
}

/// Describes a device to the kernel.
fn connect_of(device: &Device, spec: &NbdDeviceSpec, connections: usize) -> Connect {
    let block_size = spec.block.map_or(device.limits().logical_block_size.0, u64::from);
    let flags = info_of(device).transmission_flags(Style::Simple, false);
    Connect {
        number: spec.number,
        size: device.size().0,
        block_size,
        flags: flags.bits().into(),
        timeout: spec.timeout.as_secs(),
        dead_timeout: spec.dead_timeout.as_secs(),
        destroy: false,
        backend: backend_of(device.name().as_str(), connections),
    }
}

/// Takes over a dead server's device, or connects a new one. Returns the number, the identifier and our ends
/// of the connections.
fn attach(
    driver: &dyn Driver,
    name: &str,
    mut ask: Connect,
    connections: usize,
) -> Result<(u32, String, Vec<OwnedFd>), NbdDeviceError> {
    if let Some((number, backend, connections)) = find(driver, name, ask.number) {
        if let Some(sockets) = take_over(driver, &ask, number, &backend, connections)? {
            return Ok((number, backend, sockets));
        }
        if ask.number.is_some() {
            return Err(NbdDeviceError::Served(number));
        }
    } else if let Some(number) = ask.number
        && let Some(DeviceState { connected: true, backend }) = driver.state(number)
    {
        return Err(NbdDeviceError::Busy { number, backend });
    }
    // A device created for us is removed on disconnect; devices of `nbds_max` stay.
    ask.destroy = match ask.number {
        Some(number) => driver.state(number).is_none(),
        None => {
            let is_free = |number: u32| driver.state(number).is_some_and(|state| !state.connected);
            !driver.numbers().into_iter().any(is_free)
        }
    };
    let (ours, theirs) = pairs(connections)?;
    match driver.connect(&ask, &theirs) {
        Ok(number) => Ok((number, ask.backend, ours)),
        Err(errno) => Err(refused("attach", ask.number, errno)),
    }
}

/// Passes new sockets to a device whose server died. `None`: its server is alive.
fn take_over(
    driver: &dyn Driver,
    ask: &Connect,
    number: u32,
    backend: &str,
    connections: usize,
) -> Result<Option<Vec<OwnedFd>>, NbdDeviceError> {
    let sockets_only = Reconfigure { number, backend: backend.to_owned(), size: None, dead_timeout: None };
    let sockets = replace(driver, &sockets_only, connections)?;
    if sockets.len() < connections {
        return Ok(None);
    }
    // The stack may have another size than under the last server.
    let rest = Reconfigure { size: Some(ask.size), dead_timeout: Some(ask.dead_timeout), ..sockets_only };
    driver.reconfigure(&rest, &[]).map_err(|errno| refused("resize", Some(number), errno))?;
    Ok(Some(sockets))
}

impl Attached {
    fn path(&self) -> String {
        format!("/dev/nbd{}", self.number)
    }

    fn session(&self) -> Session {
        let info = info_of(&self.device);
        Session {
            export: ExportId(self.device.number()),
            name: self.path(),
            size: info.size,
            flags: info.transmission_flags(Style::Simple, false),
            style: Style::Simple,
            block_sizes: info.block_sizes,
            block_sizes_agreed: false,
            base_allocation: None,
            tls: false,
        }
    }

    /// Hands our ends of connections to reactors in turn.
    fn serve(self: &Arc<Self>, sockets: Vec<OwnedFd>) {
        let Some(host) = self.host.upgrade() else { return };
        for socket in sockets {
            self.alive.fetch_add(1, Relaxed);
            let guard = ConnectionGuard(Arc::downgrade(self));
            let adopt = adoption(socket, self.session(), Vec::new(), Some(Box::new(move || drop(guard))));
            host.attach(self.device.clone(), adopt);
        }
    }

    /// Replaces connections that have ended. Returns how many are alive now.
    async fn replace_connections(self: &Arc<Self>) -> Result<usize, NbdDeviceError> {
        let _changing = self.changing.lock().await;
        let missing = self.connections.saturating_sub(self.alive.load(Relaxed));
        if missing == 0 || self.closing.load(Relaxed) {
            return Ok(self.alive.load(Relaxed));
        }
        let this = self.clone();
        let sockets = blocking(move || {
            if !this.is_ours() {
                return Ok(Vec::new());
            }
            replace(&*this.driver, &this.sockets_only(), missing)
        })
        .await?;
        self.serve(sockets);
        Ok(self.alive.load(Relaxed))
    }

    fn sockets_only(&self) -> Reconfigure {
        Reconfigure { number: self.number, backend: self.backend.clone(), size: None, dead_timeout: None }
    }

    /// Whether the kernel's device is still connected, and to this export.
    fn is_ours(&self) -> bool {
        self.driver.is_connected(self.number) == Ok(true)
            && self
                .driver
                .state(self.number)
                .is_some_and(|state| state.backend.as_ref() == Some(&self.backend))
    }

    /// Whether another process has the device open exclusively. Checked only while connections are alive,
    /// as opening the device reads from it.
    fn is_claimed(&self) -> bool {
        self.alive.load(Relaxed) > 0 && self.driver.is_claimed(self.number)
    }

    /// Reports a new size in bytes to the kernel.
    async fn set_size(self: &Arc<Self>, size: u64) -> Result<(), NbdDeviceError> {
        let _changing = self.changing.lock().await;
        let this = self.clone();
        blocking(move || {
            let ask = Reconfigure { size: Some(size), ..this.sockets_only() };
            this.driver.reconfigure(&ask, &[]).map_err(|errno| refused("resize", Some(this.number), errno))
        })
        .await
    }

    /// Checks whether the device may be detached, and writes back its page cache first, however long that
    /// takes. `keep_if_used`: a device in use is kept rather than an error.
    fn prepare_detach(&self, keep_if_used: bool) -> Result<bool, NbdDeviceError> {
        if !self.is_ours() {
            return Ok(false);
        }
        if self.driver.is_mounted(self.number) || self.is_claimed() {
            return if keep_if_used { Ok(false) } else { Err(NbdDeviceError::InUse(self.number)) };
        }
        // Detaching the device would lose its dirty pages.
        if self.alive.load(Relaxed) > 0
            && let Err(error) = self.driver.sync(self.number)
        {
            tracing::warn!(path = self.path(), %error, "not synced before it is detached");
        }
        Ok(true)
    }

    async fn disconnect(self: &Arc<Self>) -> Result<(), NbdDeviceError> {
        let this = self.clone();
        let work = blocking(move || {
            let done = this.driver.disconnect(this.number);
            done.map_err(|errno| refused("detach", Some(this.number), errno))
        });
        let done = tokio::time::timeout(DISCONNECT_MAX, work).await;
        done.unwrap_or_else(|_| Err(refused("detach", Some(self.number), Errno::TIMEDOUT)))
    }

    /// Detaches the kernel's device if it is still connected to this export. `keep_if_used`: a mounted
    /// device is left to the next server instead of returning an error.
    async fn detach(self: &Arc<Self>, keep_if_used: bool) -> Result<(), NbdDeviceError> {
        self.closing.store(true, Relaxed);
        let _changing = self.changing.lock().await;
        let this = self.clone();
        let done = match blocking(move || this.prepare_detach(keep_if_used)).await {
            Ok(true) => self.disconnect().await,
            Ok(false) => Ok(()),
            Err(refused) => Err(refused),
        };
        if done.is_err() {
            self.closing.store(false, Relaxed);
        }
        self.gone.notify_one();
        done
    }
}

/// Reports the end of a connection when dropped, also if the connection never started.
struct ConnectionGuard(Weak<Attached>);

impl Drop for ConnectionGuard {
    fn drop(&mut self) {
        if let Some(attached) = self.0.upgrade() {
            attached.alive.fetch_sub(1, Relaxed);
            attached.gone.notify_one();
        }
    }
}

/// A connection that ends sooner counts as a failure, which makes the next pause longer.
const LIFETIME_MIN: Duration = Duration::from_secs(1);

/// Replaces connections that the kernel gives up, for as long as the device exists, with growing pauses while
/// they fail early. A failed replacement is tried again.
async fn reconnect(attached: Weak<Attached>) {
    let (log, mut failures, mut replaced_at, mut again) = (peer_log_limit(), 0u32, None::<Instant>, false);
    loop {
        let Some(gone) = attached.upgrade() else { return };
        if !again {
            gone.gone.notified().await;
        }
        failures = match replaced_at {
            _ if again => failures.saturating_add(1),
            Some(at) if at.elapsed() < LIFETIME_MIN => failures.saturating_add(1),
            _ => 0,
        };
        drop(gone);
        tokio::time::sleep(backoff(failures)).await;
        let Some(attached) = attached.upgrade() else { return };
        if attached.closing.load(Relaxed) {
            // A refused detach leaves the device attached, so its connections must be replaced then.
            drop(attached.changing.lock().await);
            if attached.closing.load(Relaxed) {
                return;
            }
        }
        let (name, path) = (attached.device.name().to_string(), attached.path());
        let may_log = || {
            let (name, path) = (name.clone(), path.clone());
            log.admit_or_report(move |suppressed| {
                tracing::warn!(%name, %path, suppressed, "the kernel drops connections repeatedly; log lines about that were suppressed");
            })
        };
        again = false;
        match attached.replace_connections().await {
            Ok(0) => {
                tracing::warn!(%name, %path, "another process detached the kernel's device");
                return;
            }
            Ok(alive) if may_log() => tracing::info!(%name, %path, alive, "a connection was replaced"),
            Ok(_) => {}
            Err(error) => {
                again = true;
                if may_log() {
                    tracing::warn!(%name, %path, %error, "a connection could not be replaced");
                }
            }
        }
        replaced_at = Some(Instant::now());
    }
}

impl Export for NbdDevice {
    fn info(&self, _: &Device) -> ExportInfo {
        let alive = self.0.alive.load(Relaxed);
        let (timeout, dead) = self.0.timeouts;
        let details = [
            ("attached as", self.0.backend.clone()),
            ("alive", format!("{alive} of {} connections", self.0.connections)),
            ("timeout", format_time(timeout)),
            ("dead_conn_timeout", format_time(dead)),
        ];
        ExportInfo {
            kind: "nbd-device".to_owned(),
            address: self.0.path(),
            connections: alive as u64,
            counts: Default::default(),
            sessions: Default::default(),
            tls: "off".to_owned(),
            details: details.map(|(name, text)| (name.to_owned(), text)).into(),
        }
    }

    fn may_close<'a>(&'a self, device: &'a Arc<Device>) -> BoxFuture<'a, Result<(), HostError>> {
        let keep_if_used = self.0.host.upgrade().is_none_or(|host| host.is_shutting_down());
        let (this, is_held) = (self.0.clone(), device.is_io_suspended());
        Box::pin(async move {
            // Checking for exclusive openers reads from the device, which would wait while it is suspended.
            let is_used = move || {
                this.is_ours() && (this.driver.is_mounted(this.number) || !is_held && this.is_claimed())
            };
            match keep_if_used || !blocking(is_used).await {
                true => Ok(()),
                false => Err(NbdDeviceError::InUse(self.0.number).into()),
            }
        })
    }

    fn close<'a>(&'a self, _: &'a Arc<Device>) -> BoxFuture<'a, Result<(), HostError>> {
        let keep_if_used = self.0.host.upgrade().is_none_or(|host| host.is_shutting_down());
        Box::pin(async move { self.0.detach(keep_if_used).await.map_err(HostError::from) })
    }

    fn resized(&self, size: Bytes) -> BoxFuture<'_, Result<(), HostError>> {
        Box::pin(async move { self.0.set_size(size.0).await.map_err(HostError::from) })
    }

    fn content_changed(&self) -> BoxFuture<'_, Result<(), HostError>> {
        Box::pin(async move { Ok(drop_blocks(self.0.path()).await?) })
    }
}
