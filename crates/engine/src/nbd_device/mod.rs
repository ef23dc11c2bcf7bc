//! A device of the kernel's nbd driver on an export of ours: `/dev/nbdN`, without a listener between.
//!
//! Each connection is a pair of sockets. One end goes to the kernel, over generic netlink; the other goes to a
//! reactor, in its transmission phase from the first byte. When this process dies the kernel sees all of them
//! close, holds requests back for the dead-connection timeout, and sends them again to whoever brings it new
//! sockets: the next server of a device of that name. What it had sent it sends again only when the request's
//! timeout has passed. The same happens to a single connection that the kernel gave up, within one process; a new
//! one is brought when the last request of the old one has ended.
//!
//! Owner: the device's host, on the control plane's runtime; waiting for the kernel is done on threads that may.
//!
//! *Invariant:* a socket whose end the kernel did not take never reaches a reactor.
//!
//! Not here: bytes of the protocol (`proto`, `exports`), messages to the kernel ([`driver`]).

mod driver;
#[cfg(test)]
mod model;
mod netlink;
#[cfg(test)]
mod tests;

use crate::cached::drop_blocks;
use crate::control::{BoxFuture, ExportInfo};
use crate::device::Device;
use crate::host::{Export, Host, HostError};
use crate::nbd::{adoption, info_of};
use crate::pace::{lines_about_a_peer, pause_after};
use crate::spec::{Bytes, NbdDeviceSpec, format_time};
use driver::{Connect, Driver, Facts, Kernel, Reconfigure};
use proto::nbd::{ExportId, Session, Style};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};
use tokio::sync::{Mutex, Notify};

/// The most connections of one device, as `--nbd-device` has it.
const CONNECTIONS_MAX: usize = 256;
/// How often, and how long apart, sockets are brought to a device whose old ones the kernel has not yet noticed
/// to be closed. It does at once, unless it is busy: for three seconds, as the rings of a server that was killed end some
/// time after it.
const TAKE_OVER_TRIES: u32 = if cfg!(test) { 4 } else { 60 };
const TAKE_OVER_PAUSE: Duration = Duration::from_millis(50);
/// How long the kernel may take to let go of a device.
const DISCONNECT_MAX: Duration = Duration::from_secs(10);

/// What the kernel did not do.
#[derive(Debug, thiserror::Error)]
pub enum NbdDeviceError {
    /// It has no such driver.
    #[error("the kernel's nbd driver is not loaded (modprobe nbd; or export with --nbd, --ublk or --loop)")]
    NoDriver,
    /// We may not.
    #[error("attaching an nbd device needs CAP_SYS_ADMIN (run it as root, or export with --nbd)")]
    NoPermission,
    /// Somebody else has it.
    #[error("/dev/nbd{number} is attached already{}; `nbd-client -d /dev/nbd{number}` detaches it)", known_as(.backend.as_deref()))]
    Busy {
        /// Its number.
        number: u32,
        /// What it was attached as.
        backend: Option<String>,
    },
    /// A live server has it.
    #[error(
        "/dev/nbd{0} is attached to another server of a device of this name, which is alive (stop that one first)"
    )]
    Served(u32),
    /// There is no such number.
    #[error("/dev/nbd{0} cannot be: the kernel's numbers do not go that far (choose a smaller one, or none)")]
    Range(u32),
    /// All are taken and no more can be made.
    #[error(
        "all nbd devices are in use (detach one, or load the driver with more: modprobe nbd nbds_max=64)"
    )]
    AllInUse,
    /// What it held is gone, and somebody still uses it.
    #[error(
        "/dev/nbd{0} is mounted or part of another device, and what it held, or what was not flushed of it, died with \
         its server: a new one would show something else (unmount it first)"
    )]
    Volatile(u32),
    /// It is mounted.
    #[error("/dev/nbd{0} is mounted or part of another device (unmount it first)")]
    Held(u32),
    /// It said something else.
    #[error("the kernel did not {what} {device}: {why}")]
    Refused {
        /// What was asked for.
        what: &'static str,
        /// Of what.
        device: String,
        /// What it said.
        why: io::Error,
    },
    /// Sockets could not be had.
    #[error("no sockets could be had: {0}")]
    Sockets(#[from] io::Error),
}

fn known_as(backend: Option<&str>) -> String {
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
        // Minor numbers have 20 bits, and a device takes one at least.
        (Errno::INVAL, Some(number)) if number >= 1 << 15 => NbdDeviceError::Range(number),
        _ => {
            let device = number.map_or("an nbd device".to_owned(), |number| format!("/dev/nbd{number}"));
            NbdDeviceError::Refused { what, device, why: errno.into() }
        }
    }
}

/// What a device of that name is attached as, so that the next server of it can be told from a stranger, and
/// knows how many connections it is to bring: the kernel does not tell. No device's name has a `/`.
fn backend_of(name: &str, connections: usize) -> String {
    format!("blockyard:{name}/{connections}")
}

/// How many connections a device has that was attached under that name; `None`: under another.
fn connections_of(name: &str, backend: &str) -> Option<usize> {
    let (found, connections) = backend.strip_prefix("blockyard:")?.split_once('/')?;
    connections.parse().ok().filter(|count| found == name && (1..=CONNECTIONS_MAX).contains(count))
}

/// Detach the device that a server of that name left behind when it died. Its number; `None`: there is none.
///
/// # Errors
/// [`NbdDeviceError`]; it is still there.
pub fn remove_orphan(name: &str) -> Result<Option<u32>, NbdDeviceError> {
    remove_orphan_of(&Kernel::default(), name)
}

fn remove_orphan_of(driver: &dyn Driver, name: &str) -> Result<Option<u32>, NbdDeviceError> {
    let Some((number, backend, connections)) = find(driver, name, None) else { return Ok(None) };
    if driver.is_mounted(number) {
        return Err(NbdDeviceError::Held(number));
    }
    // A process with another run directory may serve it: then its connections are alive.
    let ask = Reconfigure { number, backend, size: None, dead_timeout: None };
    if replace(driver, &ask, connections)?.len() < connections {
        return Ok(None);
    }
    driver.disconnect(number).map_err(|errno| refused("detach", Some(number), errno))?;
    Ok(Some(number))
}

/// Detach what a dead server left, before a stack is served whose contents died with it: whoever still has a file
/// system on that device would find other contents under it. `number`: only that one.
fn forget_orphan(driver: &dyn Driver, name: &str, number: Option<u32>) -> Result<(), NbdDeviceError> {
    let Some((number, backend, connections)) = find(driver, name, number) else { return Ok(()) };
    let ask = Reconfigure { number, backend, size: None, dead_timeout: None };
    if replace(driver, &ask, connections)?.len() < connections {
        // A live server's, which attaching tells of.
        return Ok(());
    }
    if driver.is_mounted(number) {
        return Err(NbdDeviceError::Volatile(number));
    }
    driver.disconnect(number).map_err(|errno| refused("detach", Some(number), errno))
}

/// The device that is attached under a name, among all or that one: its number, what it is attached as, and its
/// connections.
fn find(driver: &dyn Driver, name: &str, number: Option<u32>) -> Option<(u32, String, usize)> {
    let numbers = number.map_or_else(|| driver.numbers(), |number| vec![number]);
    numbers.into_iter().find_map(|number| {
        let backend = driver.facts(number).filter(|facts| facts.connected)?.backend?;
        let connections = connections_of(name, &backend)?;
        Some((number, backend, connections))
    })
}

/// Wait for the kernel on a thread that may.
async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    match tokio::task::spawn_blocking(work).await {
        Ok(value) => value,
        Err(error) => std::panic::resume_unwind(error.into_panic()),
    }
}

/// Pairs of sockets: ours, and the kernel's.
fn pairs(count: usize) -> io::Result<(Vec<OwnedFd>, Vec<OwnedFd>)> {
    let pairs = (0..count).map(|_| UnixStream::pair()).collect::<io::Result<Vec<_>>>()?;
    Ok(pairs.into_iter().map(|(ours, theirs)| (OwnedFd::from(ours), OwnedFd::from(theirs))).unzip())
}

/// Whether the other end is still open.
fn is_open(socket: &OwnedFd) -> bool {
    let mut polled = [PollFd::new(socket, PollFlags::empty())];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    poll(&mut polled, Some(&now)).is_ok() && !polled[0].revents().contains(PollFlags::HUP)
}

/// Bring the kernel `count` sockets for connections of a device that are dead. The other ends of those it took:
/// fewer when fewer were dead.
fn replace(driver: &dyn Driver, ask: &Reconfigure, count: usize) -> Result<Vec<OwnedFd>, NbdDeviceError> {
    let mut taken = Vec::new();
    for attempt in 0..TAKE_OVER_TRIES {
        if attempt > 0 {
            std::thread::sleep(TAKE_OVER_PAUSE);
        }
        let (ours, theirs) = pairs(count - taken.len())?;
        driver.reconfigure(ask, &theirs).map_err(|errno| refused("reattach", Some(ask.number), errno))?;
        // What the kernel has no place for it lets go of, and with our copy the socket closes.
        drop(theirs);
        taken.extend(ours.into_iter().filter(is_open));
        if taken.len() == count {
            break;
        }
    }
    Ok(taken)
}

/// What is fixed when a device is attached.
struct Attached {
    driver: Arc<dyn Driver>,
    host: Weak<Host>,
    device: Arc<Device>,
    number: u32,
    backend: String,
    /// Connections that the kernel set the device up for.
    connections: usize,
    /// How long the kernel waits for an answer, and for a server.
    timeouts: (Duration, Duration),
    /// Those that are alive.
    alive: AtomicUsize,
    /// Told when a connection is over.
    gone: Notify,
    /// It is being taken away: what is over stays over.
    closing: AtomicBool,
    /// Held while sockets are brought to the kernel, or the device is taken away.
    changing: Mutex<()>,
}

/// A device of the kernel's nbd driver, as one export of a device of ours.
struct NbdDevice(Arc<Attached>);

impl Host {
    /// Attach a device to the kernel's nbd driver, or take over the one that a server of this device left behind
    /// when it died. Its path. Must be called on the control plane's runtime.
    ///
    /// # Errors
    /// [`HostError::Zoned`] and [`HostError::NbdDevice`]; nothing is left behind.
    pub async fn export_nbd_device(
        self: &Arc<Self>,
        device: &Arc<Device>,
        spec: &NbdDeviceSpec,
    ) -> Result<String, HostError> {
        self.export_nbd_device_of(Arc::new(Kernel::default()), device, spec).await
    }

    async fn export_nbd_device_of(
        self: &Arc<Self>,
        driver: Arc<dyn Driver>,
        device: &Arc<Device>,
        spec: &NbdDeviceSpec,
    ) -> Result<String, HostError> {
        Host::refuse_zones(device, "NBD")?;
        let connections = spec.connections.map_or(self.reactors().len(), usize::from);
        let ask = connect_of(device, spec, connections);
        let (kernel, name, survives) = (driver.clone(), device.name().to_string(), device.survives());
        let (number, backend, sockets) = blocking(move || {
            if !survives {
                forget_orphan(&*kernel, &name, ask.number)?;
            }
            attach(&*kernel, &name, ask, connections)
        })
        .await?;
        let attached = Arc::new(Attached {
            driver,
            host: Arc::downgrade(self),
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
        self.add_export(device, Arc::new(NbdDevice(attached.clone())));
        tokio::spawn(reconnect(Arc::downgrade(&attached)));
        Ok(attached.path())
    }
}

/// What the kernel is to be told of a device.
fn connect_of(device: &Device, spec: &NbdDeviceSpec, connections: usize) -> Connect {
    let block_size = spec.block.map_or(device.limits().logical_block_size.0, u64::from);
    let flags = info_of(device).transmission_flags(Style::Simple, false);
    Connect {
        number: spec.number,
        size: device.size().0,
        block_size,
        flags: flags.0.into(),
        timeout: spec.timeout.as_secs(),
        dead_timeout: spec.dead_timeout.as_secs(),
        destroy: false,
        backend: backend_of(device.name().as_str(), connections),
    }
}

/// Take over what a dead server left, or connect anew. The device's number, what it is attached as, and our ends
/// of its connections.
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
        && let Some(Facts { connected: true, backend }) = driver.facts(number)
    {
        return Err(NbdDeviceError::Busy { number, backend });
    }
    // A device that is made for us goes with us; those that the driver was loaded with stay.
    ask.destroy = match ask.number {
        Some(number) => driver.facts(number).is_none(),
        None => {
            let is_free = |number: u32| driver.facts(number).is_some_and(|facts| !facts.connected);
            !driver.numbers().into_iter().any(is_free)
        }
    };
    let (ours, theirs) = pairs(connections)?;
    match driver.connect(&ask, &theirs) {
        Ok(number) => Ok((number, ask.backend, ours)),
        Err(errno) => Err(refused("attach", ask.number, errno)),
    }
}

/// Bring new sockets to a device whose server died. `None`: its server is alive.
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
    // The stack may have been given another size meanwhile.
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

    /// Hand our ends of connections to reactors, one after the other.
    fn serve(self: &Arc<Self>, sockets: Vec<OwnedFd>) {
        let Some(host) = self.host.upgrade() else { return };
        for socket in sockets {
            self.alive.fetch_add(1, Relaxed);
            let guard = Gone(Arc::downgrade(self));
            let adopt = adoption(socket, self.session(), Vec::new(), Some(Box::new(move || drop(guard))));
            host.attach(self.device.clone(), adopt);
        }
    }

    /// Bring the kernel sockets in place of connections that are over. How many are alive now.
    async fn mend(self: &Arc<Self>) -> Result<usize, NbdDeviceError> {
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

    /// Whether the kernel's device is still connected, and to us.
    fn is_ours(&self) -> bool {
        self.driver.is_connected(self.number) == Ok(true)
            && self
                .driver
                .facts(self.number)
                .is_some_and(|facts| facts.backend.as_ref() == Some(&self.backend))
    }

    /// Whether somebody has it exclusively. Asked only of a device that answers: opening one reads from it.
    fn is_claimed(&self) -> bool {
        self.alive.load(Relaxed) > 0 && self.driver.is_claimed(self.number)
    }

    /// Tell the kernel that the device holds so many bytes.
    async fn tell_size(self: &Arc<Self>, size: u64) -> Result<(), NbdDeviceError> {
        let _changing = self.changing.lock().await;
        let this = self.clone();
        blocking(move || {
            let ask = Reconfigure { size: Some(size), ..this.sockets_only() };
            this.driver.reconfigure(&ask, &[]).map_err(|errno| refused("resize", Some(this.number), errno))
        })
        .await
    }

    /// Whether the device is to be detached; then what was written through the page cache has got here, however long
    /// that took.
    fn is_to_go(&self, leave: bool) -> Result<bool, NbdDeviceError> {
        if !self.is_ours() {
            return Ok(false);
        }
        if self.driver.is_mounted(self.number) || self.is_claimed() {
            return if leave { Ok(false) } else { Err(NbdDeviceError::Held(self.number)) };
        }
        // It is lost with the device, unless it gets here first.
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

    /// Take the kernel's device away, if it is still ours. `leave`: one that is mounted is left to the next
    /// server rather than to be a refusal.
    async fn detach(self: &Arc<Self>, leave: bool) -> Result<(), NbdDeviceError> {
        self.closing.store(true, Relaxed);
        let _changing = self.changing.lock().await;
        let this = self.clone();
        let done = match blocking(move || this.is_to_go(leave)).await {
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

/// Tells when a connection is over, or never began.
struct Gone(Weak<Attached>);

impl Drop for Gone {
    fn drop(&mut self) {
        if let Some(attached) = self.0.upgrade() {
            attached.alive.fetch_sub(1, Relaxed);
            attached.gone.notify_one();
        }
    }
}

/// A connection that the kernel gives up sooner counts as one that was never of use: the next pause is longer.
const OF_USE: Duration = Duration::from_secs(1);

/// Mends a device whose connections the kernel gave up, as long as there is one. The more often it gives them up at once, the
/// less often it gets new ones; and one that could not be mended is tried again.
async fn reconnect(attached: Weak<Attached>) {
    let (log, mut failures, mut mended_at, mut again) = (lines_about_a_peer(), 0u32, None::<Instant>, false);
    loop {
        let Some(gone) = attached.upgrade() else { return };
        if !again {
            gone.gone.notified().await;
        }
        failures = match mended_at {
            _ if again => failures.saturating_add(1),
            Some(at) if at.elapsed() < OF_USE => failures.saturating_add(1),
            _ => 0,
        };
        drop(gone);
        tokio::time::sleep(pause_after(failures)).await;
        let Some(attached) = attached.upgrade() else { return };
        if attached.closing.load(Relaxed) {
            // It may be refused: then there is something to mend after all.
            drop(attached.changing.lock().await);
            if attached.closing.load(Relaxed) {
                return;
            }
        }
        let (name, path) = (attached.device.name().to_string(), attached.path());
        let may_log = || {
            let (name, path) = (name.clone(), path.clone());
            log.admits_or_reports(move |suppressed| {
                tracing::warn!(%name, %path, suppressed, "connections of the kernel come and go; lines about that were suppressed");
            })
        };
        again = false;
        match attached.mend().await {
            Ok(0) => {
                tracing::warn!(%name, %path, "the kernel's device was detached by somebody else");
                return;
            }
            Ok(alive) if may_log() => tracing::info!(%name, %path, alive, "a connection was mended"),
            Ok(_) => {}
            Err(error) => {
                again = true;
                if may_log() {
                    tracing::warn!(%name, %path, %error, "a connection could not be mended");
                }
            }
        }
        mended_at = Some(Instant::now());
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
            tls: "off".to_owned(),
            details: details.map(|(name, text)| (name.to_owned(), text)).into(),
        }
    }

    fn may_close<'a>(&'a self, device: &'a Arc<Device>) -> BoxFuture<'a, Result<(), HostError>> {
        let leave = self.0.host.upgrade().is_none_or(|host| host.is_shutting_down());
        let (this, is_held) = (self.0.clone(), device.is_held());
        Box::pin(async move {
            // Asking who has claimed it reads from it, which waits while it is held.
            let is_used = move || {
                this.is_ours() && (this.driver.is_mounted(this.number) || !is_held && this.is_claimed())
            };
            match leave || !blocking(is_used).await {
                true => Ok(()),
                false => Err(NbdDeviceError::Held(self.0.number).into()),
            }
        })
    }

    fn close<'a>(&'a self, _: &'a Arc<Device>) -> BoxFuture<'a, Result<(), HostError>> {
        let leave = self.0.host.upgrade().is_none_or(|host| host.is_shutting_down());
        Box::pin(async move { self.0.detach(leave).await.map_err(HostError::from) })
    }

    fn resized(&self, size: Bytes) -> BoxFuture<'_, Result<(), HostError>> {
        Box::pin(async move { self.0.tell_size(size.0).await.map_err(HostError::from) })
    }

    fn replaced(&self) -> BoxFuture<'_, Result<(), HostError>> {
        Box::pin(async move { Ok(drop_blocks(self.0.path()).await?) })
    }
}
