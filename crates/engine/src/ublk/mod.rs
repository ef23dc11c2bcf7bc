//! The ublk export, seen from the control plane: a kernel block device is made, served, handed on and removed.
//!
//! [`Host::export_ublk`] goes through the driver's steps in its order: make the device, say what it is like, have
//! every tag fetched by a reactor, start it. Or, for a device whose server died: announce a new one, have every tag
//! fetched, end the recovery. What it takes to do that again in another process is in a [`Record`] in the run
//! directory before the device can be used.
//!
//! Commands block a thread that nothing else waits for, each for a bounded time.

mod details;
mod error;
mod listing;
mod params;
mod plan;
mod record;
mod shown;

pub use error::UblkError;
pub use listing::{Foreign, foreign, users_of};
pub use params::NotPresentable;
pub use record::{KeptPage, KeptToken, Record, RecordError, Words};

use crate::control::ExportInfo;
use crate::device::Device;
use crate::host::{Host, HostError};
use crate::rundir::RunDir;
use crate::spec::{Recovery, UblkSpec};
use crate::ublk_lane::UblkLane;
use ::ublk::kernel::{SharedFile, block_path};
use ::ublk::{
    Descriptors, DeviceInfo, Driver, DriverError, Features, KernelControl, Params, State, Unusable,
};
use block::{Bytes, Integrity};
use exports::ublk::{Choice, LaneShared};
use plan::Plan;
use shown::Shown;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

/// How long a server that was killed may take to be cleared away before another one is let in.
const CLEARING: Duration = Duration::from_secs(30);
/// How long requests under way may take before a planned change of server is given up.
const QUIESCING: Duration = Duration::from_secs(10);
/// How long to sleep before looking again.
const PAUSE: Duration = Duration::from_millis(2);

/// A ublk device of this process.
struct UblkExport {
    driver: Driver,
    info: DeviceInfo,
    offered: Option<Features>,
    choice: Choice,
    batch: (bool, &'static str),
    /// The integrity data that is shown, and why no other.
    integrity: (Option<Integrity>, &'static str),
    /// Memory that clients share, where they are to be, and what the driver calls it once it was told.
    client_memory: Option<(PathBuf, Arc<SharedFile>, OnceLock<u16>)>,
    queues: Mutex<Vec<Arc<LaneShared>>>,
    /// It was started and not stopped.
    live: AtomicBool,
    /// It stays when this process ends.
    left: AtomicBool,
    /// It was taken from whoever uses it.
    forced: AtomicBool,
    record: Mutex<Option<(RunDir, Record)>>,
}

/// What a device is shown as.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct UblkShown {
    /// The N of `/dev/ublkbN`.
    pub number: u32,
    /// The block device.
    pub path: String,
    /// What was chosen, and why, for those who want to know.
    pub why: String,
}

/// How a device comes to be.
#[derive(Clone, Debug)]
pub enum Origin {
    /// It is made.
    New,
    /// It waits for a server, under that number.
    Waits(u32),
}

/// Runs what blocks where it holds nothing up.
async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Result<T, UblkError> {
    let done = tokio::task::spawn_blocking(work).await;
    done.map_err(|why| UblkError::Serve(why.to_string()))
}

/// Whether a command never returned from the kernel, so that this process may not end when it wants to.
pub fn is_stuck() -> bool {
    ::ublk::kernel::is_stuck()
}

/// Take away what a server that died left of a device, and the record of it.
///
/// # Errors
/// It is in use, unless `forced`; or the driver refuses.
pub fn clear(run: &RunDir, record: &Record, forced: bool) -> Result<(), UblkError> {
    if record.is_of_this_boot() {
        let driver = driver()?;
        match driver.info(record.number) {
            // The number was given anew: that device is somebody else's.
            Ok(info) if has_other_server(&info, record) => {}
            Ok(_) if !forced && listing::is_claimed(record.number) => {
                return Err(UblkError::InUse(block_path(record.number)));
            }
            Ok(_) => {
                driver.stop(record.number)?;
                delete(&driver, record.number, forced)?;
            }
            // It is gone already.
            Err(gone) if gone.errno() == Some(libc::ENODEV) => {}
            Err(why) => return Err(why.into()),
        }
    }
    record.remove(run);
    Ok(())
}

/// Take away a device that no record tells of and that has no server any more, whoever made it. `false`: there is none
/// of that number.
///
/// # Errors
/// It has a server, or is in use, unless `forced`; or the driver refuses.
pub fn clear_unknown(number: u32, forced: bool) -> Result<bool, UblkError> {
    let driver = driver()?;
    match driver.info(number) {
        Ok(info) if info.state() == Some(State::Live) && is_alive(info.ublksrv_pid) => {
            Err(UblkError::Served(info.ublksrv_pid))
        }
        Ok(_) if !forced && listing::is_claimed(number) => Err(UblkError::InUse(block_path(number))),
        Ok(_) => {
            driver.stop(number)?;
            delete(&driver, number, forced)?;
            Ok(true)
        }
        Err(gone) if gone.errno() == Some(libc::ENODEV) => Ok(false),
        Err(why) => Err(why.into()),
    }
}

/// Removes a stopped device. By force it is not waited for: its number is free when whoever has it open closes it.
fn delete(driver: &Driver, number: u32, forced: bool) -> Result<(), DriverError> {
    if forced && driver.delete_later(number).is_ok() { Ok(()) } else { driver.delete(number) }
}

/// Whether the device of a record is there, for a server to take it over.
pub fn waits(record: &Record) -> bool {
    record.is_of_this_boot()
        && driver().is_ok_and(|driver| {
            driver.info(record.number).is_ok_and(|info| {
                Recovery::of(info.features()) != Recovery::None && !has_other_server(&info, record)
            })
        })
}

/// Whether a process that the record does not know serves the device of that number.
fn has_other_server(info: &DeviceInfo, record: &Record) -> bool {
    info.state() == Some(State::Live)
        && u32::try_from(info.ublksrv_pid) != Ok(record.pid)
        && is_alive(info.ublksrv_pid)
}

/// The kernel's driver: one way to it for all devices of this process.
///
/// # Errors
/// Why there is none to be used.
pub fn driver() -> Result<Driver, Unusable> {
    static SHARED: Mutex<Weak<KernelControl>> = Mutex::new(Weak::new());
    let mut shared = SHARED.lock().unwrap_or_else(PoisonError::into_inner);
    let control = match shared.upgrade() {
        Some(control) => control,
        None => Arc::new(KernelControl::open()?),
    };
    *shared = Arc::downgrade(&control);
    Ok(Driver::new(control))
}

impl Host {
    /// Show a device as a kernel block device. Must be called on the control plane's runtime.
    ///
    /// `keep`: where and what to write down so that another process can take the device over.
    ///
    /// # Errors
    /// See [`UblkError`]. What there is of the block device then goes when the device is removed.
    pub async fn export_ublk(
        self: &Arc<Self>,
        device: &Arc<Device>,
        spec: &UblkSpec,
        origin: Origin,
        keep: Option<(RunDir, Record)>,
    ) -> Result<UblkShown, HostError> {
        if self.engine().name != "io_uring" {
            return Err(UblkError::NoUring(self.engine().name).into());
        }
        let driver = driver().map_err(UblkError::from)?;
        let export = match origin {
            Origin::New => self.make(device, spec, driver, keep).await?,
            Origin::Waits(number) => self.take_over(device, spec, driver, number, keep).await?,
        };
        Ok(UblkShown {
            number: export.info.dev_id,
            path: export.path(),
            why: format!("data by {}: {}", export.choice.mode, export.choice.why),
        })
    }

    /// Whether [`export_ublk`](Host::export_ublk) would show a device without further wishes.
    ///
    /// # Errors
    /// Why not.
    pub async fn can_ublk(self: &Arc<Self>, device: &Arc<Device>) -> Result<(), UblkError> {
        if self.engine().name != "io_uring" {
            return Err(UblkError::NoUring(self.engine().name));
        }
        let (device, spec, threads) = (device.clone(), UblkSpec::default(), self.threads_of(device));
        let room = self.room_of(threads).await;
        blocking(move || {
            let offered = driver()?.features()?;
            plan_for(&device, &spec, threads, &room, offered).map(drop)
        })
        .await?
    }

    /// The I/O threads that may serve a device: one where its stack takes one queue.
    fn threads_of(&self, device: &Device) -> u16 {
        if device.is_single() { 1 } else { self.reactors().len() as u16 }
    }

    /// How many tags each of the first threads can still register the memory of, in each stretch of its table. Exports are made
    /// one after the other, so nobody takes of that before the one that is being made.
    async fn room_of(&self, threads: u16) -> Vec<Vec<u16>> {
        let mut room = Vec::new();
        for reactor in &self.reactors()[..threads.into()] {
            room.push(reactor.kernel_buffers_left().await.unwrap_or_default());
        }
        room
    }

    async fn make(
        self: &Arc<Self>,
        device: &Arc<Device>,
        spec: &UblkSpec,
        driver: Driver,
        keep: Option<(RunDir, Record)>,
    ) -> Result<Arc<UblkExport>, UblkError> {
        let plan = {
            let (driver, device, spec) = (driver.clone(), device.clone(), spec.clone());
            let threads = self.threads_of(&device);
            let room = self.room_of(threads).await;
            blocking(move || {
                let offered = driver.features()?;
                plan_for(&device, &spec, threads, &room, offered)
            })
            .await??
        };
        let client_memory = client_memory(spec)?;
        let info = {
            let (driver, new) = (driver.clone(), plan.new);
            blocking(move || driver.add(&new)).await??
        };
        let export = self.begin(device, driver, info, &plan, client_memory, keep);
        plan.check_granted(info.features())?;
        export.keep()?;
        let driver = export.driver.clone();
        let params = plan.params;
        blocking(move || {
            if info.features().has(Features::UNPRIVILEGED_DEV) {
                driver.await_owned(info.dev_id).map_err(|why| UblkError::NotGiven(info.dev_id, why))?;
            }
            Ok::<_, UblkError>(driver.set_params(info.dev_id, &params)?)
        })
        .await??;
        self.serve(device, &export, plan.io_max).await?;
        let driver = export.driver.clone();
        blocking(move || driver.start(info.dev_id, std::process::id())).await??;
        export.live.store(true, Relaxed);
        Ok(export)
    }

    async fn take_over(
        self: &Arc<Self>,
        device: &Arc<Device>,
        spec: &UblkSpec,
        driver: Driver,
        number: u32,
        keep: Option<(RunDir, Record)>,
    ) -> Result<Arc<UblkExport>, UblkError> {
        let (info, params, offered) = {
            let driver = driver.clone();
            blocking(move || wait_for_server_to_be_gone(&driver, number)).await??
        };
        let plan = Plan::of(spec, &device.profile(), &info, &params, offered)?;
        let waits = params.basic.dev_sectors;
        if plan.params.basic.dev_sectors < waits {
            let size = |sectors| block::Sectors(sectors).bytes();
            return Err(UblkError::Shrunk { waits: size(waits), stack: size(plan.params.basic.dev_sectors) });
        }
        let client_memory = client_memory(spec)?;
        let export = self.begin(device, driver, info, &plan, client_memory, keep);
        // The driver was told already. Whatever goes wrong from here on, the device stays and waits for the next attempt.
        export.left.store(true, Relaxed);
        export.keep()?;
        self.serve(device, &export, plan.io_max).await?;
        let driver = export.driver.clone();
        let grown = plan.params.basic.dev_sectors;
        blocking(move || {
            driver.end_recovery(number, std::process::id())?;
            // It is live by now: a size that the kernel does not take is no reason to let go of it again.
            if grown > waits
                && info.features().has(Features::UPDATE_SIZE)
                && let Err(error) = driver.update_size(number, grown)
            {
                tracing::warn!(number, %error, "it keeps the size that it had");
            }
            Ok::<_, DriverError>(())
        })
        .await??;
        export.left.store(false, Relaxed);
        export.live.store(true, Relaxed);
        Ok(export)
    }

    /// From here on the device goes with ours, also when the rest fails.
    fn begin(
        &self,
        device: &Arc<Device>,
        driver: Driver,
        info: DeviceInfo,
        plan: &Plan,
        client_memory: Option<(PathBuf, Arc<SharedFile>)>,
        keep: Option<(RunDir, Record)>,
    ) -> Arc<UblkExport> {
        let client_memory = client_memory.map(|(path, memory)| (path, memory, OnceLock::new()));
        // Also of one that nobody can recover: whoever deletes what is left of it has to find it.
        let record = keep.map(|(run, mut record)| {
            (record.number, record.pid) = (info.dev_id, std::process::id());
            (run, record)
        });
        let export = Arc::new(UblkExport {
            driver: driver.knowing(&info),
            info,
            offered: plan.offered,
            choice: plan.choice,
            batch: plan.batch,
            integrity: plan.integrity,
            client_memory,
            queues: Mutex::default(),
            live: AtomicBool::new(false),
            left: AtomicBool::new(false),
            forced: AtomicBool::new(false),
            record: Mutex::new(record),
        });
        self.add_export(device, Arc::new(Shown(export.clone())));
        export
    }

    /// Have every tag fetched.
    async fn serve(
        self: &Arc<Self>,
        device: &Arc<Device>,
        export: &Arc<UblkExport>,
        io_max: Bytes,
    ) -> Result<(), UblkError> {
        let number = export.info.dev_id;
        let opened: Arc<OwnedFd> = {
            let driver = export.driver.clone();
            let opened = blocking(move || driver.open(number)).await?;
            Arc::new(opened.map_err(|why| UblkError::Open(number, why))?)
        };
        if export.client_memory.is_some() {
            let export = export.clone();
            blocking(move || export.share()).await??;
        }
        let client_memory = export
            .client_memory
            .as_ref()
            .and_then(|(_, memory, index)| Some((memory.clone(), index.get().copied()?)));
        let per_io = export.info.features().has(Features::PER_IO_DAEMON) && export.spreads();
        let places = plan::places(
            export.info.nr_hw_queues,
            export.info.queue_depth,
            self.threads_of(device).into(),
            per_io,
        );
        let mut told = Vec::new();
        for place in places {
            let descriptors = Descriptors::map(opened.as_fd(), place.queue, export.info.queue_depth)
                .map_err(|why| UblkError::Open(number, why))?;
            let shared = Arc::new(LaneShared::default());
            shared.size.store(device.size().0, Relaxed);
            export.lanes().push(shared.clone());
            let reactor = &self.reactors()[place.reactor];
            if let Ok(cpus) = export.driver.affinity(number, place.queue) {
                reactor.prefer(&cpus);
            }
            told.push(reactor.serve_ublk(
                device,
                UblkLane {
                    device: opened.clone(),
                    // DEL_DEV waits until it is closed. Drivers with zero copy (6.15) are newer than the kernels (6.12)
                    // that let other devices' commands hold that up.
                    registered: export.offered.is_some_and(|has| has.has(Features::SUPPORT_ZERO_COPY)),
                    descriptors,
                    q_id: place.queue,
                    first_tag: place.first_tag,
                    tags: place.tags,
                    mode: export.choice.mode,
                    io_max,
                    batch: export.batch.0,
                    integrity: export.integrity.0,
                    client_memory: client_memory.clone(),
                    encoded: export.info.features().has(Features::CMD_IOCTL_ENCODE),
                    shared,
                },
            ));
        }
        for told in told {
            let done =
                told.await.unwrap_or_else(|_| Err("an I/O thread refused one: see the log".to_owned()));
            done.map_err(UblkError::Serve)?;
        }
        Ok(())
    }

    /// Leave a device to another process: no request is under way any more, and its block device waits. This process
    /// must end then.
    ///
    /// # Errors
    /// See [`UblkError::CannotLeave`]; the device is served on then.
    pub async fn leave_device(&self, name: &str) -> Result<(), HostError> {
        let device = self.device(name).ok_or(HostError::NoDevice)?;
        if self.devices().len() > 1 {
            return Err(UblkError::NotAlone.into());
        }
        let exports = self.exports_of(&device);
        if !exports.iter().any(|export| export.info(&device).kind == "ublk") {
            return Err(UblkError::CannotLeave("it is not shown by ublk").into());
        }
        let infos: Vec<ExportInfo> = exports.iter().map(|export| export.info(&device)).collect();
        if infos.iter().any(|info| matches!(info.kind.as_str(), "fuse" | "loop")) {
            return Err(UblkError::CannotLeave("it is shown as a file, too, which goes with it").into());
        }
        for export in exports {
            export.leave().await?;
        }
        if device.is_suspended() {
            // What is held back has to end.
            self.resume(&device);
        }
        let reissue = Recovery::Reissue.to_string();
        let again = infos.iter().any(|info| info.details.get("recovery") == Some(&reissue));
        let started = Instant::now();
        while !self.is_idle().await {
            // Whoever goes on asking, as on kernels that cannot quiesce, is answered by the next server.
            if again && started.elapsed() > QUIESCING {
                break;
            }
            tokio::time::sleep(PAUSE).await;
        }
        // What is done is told to the driver in the turn in which it is done, or at the beginning of the next.
        for _ in 0..2 {
            for reactor in self.reactors() {
                let _ = reactor.turned().await;
            }
        }
        Ok(())
    }
}

impl Host {
    /// Whether no request is on its way between a ublk driver and its end. Clients on sockets are not waited for: they
    /// ask the next server again.
    async fn is_idle(&self) -> bool {
        let mut idle = true;
        for reactor in self.reactors() {
            idle &= reactor.turned().await.unwrap_or(true);
        }
        idle
    }
}

/// Have the driver expect the next server. One that was told before, and whose next server never came, answers anew
/// since Linux 6.15, and `EINVAL` until then: what it is told for stands already.
fn begin_recovery(driver: &Driver, number: u32, info: &DeviceInfo) -> Result<(), DriverError> {
    let recovers = Recovery::of(info.features()) != Recovery::None;
    match driver.start_recovery(number) {
        Err(error) if recovers && error.errno() == Some(libc::EINVAL) => Ok(()),
        done => done,
    }
}

/// A device whose server died, once that was cleared away.
fn wait_for_server_to_be_gone(
    driver: &Driver,
    number: u32,
) -> Result<(DeviceInfo, Params, Option<Features>), UblkError> {
    let offered = driver.features()?;
    let started = Instant::now();
    loop {
        let info = driver.info(number)?;
        let waits = matches!(info.state(), Some(State::Quiesced | State::FailIo));
        if waits && begin_recovery(driver, number, &info).is_ok() {
            return Ok((info, driver.params(number)?, offered));
        }
        let lives = info.state() == Some(State::Live) && is_alive(info.ublksrv_pid);
        if lives || started.elapsed() > CLEARING {
            // The driver says what it is that it does not like.
            driver.start_recovery(number).map_err(|error| match info.state() {
                Some(State::Live) => UblkError::Served(info.ublksrv_pid),
                _ => error.into(),
            })?;
        }
        std::thread::sleep(PAUSE);
    }
}

/// What a new device is to be like.
fn plan_for(
    device: &Device,
    spec: &UblkSpec,
    threads: u16,
    room: &[Vec<u16>],
    offered: Option<Features>,
) -> Result<Plan, UblkError> {
    let profile = device.profile();
    let stack = plan::Stands {
        profile: &profile,
        survives: device.survives(),
        integrity: device.integrity(),
        hides_integrity: device.hides_integrity(),
        room,
    };
    Plan::new(spec, &stack, device.depth(), threads, offered)
}

/// Whether a process is there and not about to be gone.
fn is_alive(pid: i32) -> bool {
    let Ok(stat) = std::fs::read_to_string(format!("/proc/{pid}/stat")) else { return false };
    let state = stat.rsplit_once(')').and_then(|(_, rest)| rest.trim_start().chars().next());
    !matches!(state, Some('Z' | 'X') | None)
}

/// The memory that clients are to share, if there is to be any.
fn client_memory(spec: &UblkSpec) -> Result<Option<(PathBuf, Arc<SharedFile>)>, UblkError> {
    let open = |path: &PathBuf| match SharedFile::open(path) {
        Ok(memory) => Ok((path.clone(), Arc::new(memory))),
        Err(why) => Err(UblkError::SharedFile(path.display().to_string(), why)),
    };
    spec.shmem.as_ref().map(open).transpose()
}

impl UblkExport {
    /// Tell the driver of memory that clients share. What a server that died had told it, it may still have.
    fn share(&self) -> Result<(), UblkError> {
        let Some((_, memory, index)) = &self.client_memory else { return Ok(()) };
        let number = self.info.dev_id;
        if self.left.load(Relaxed) {
            let _ = self.driver.unshare(number, 0);
        }
        let _ = index.set(self.driver.share(number, memory.address(), memory.len())?);
        Ok(())
    }

    fn path(&self) -> String {
        block_path(self.info.dev_id)
    }

    fn lanes(&self) -> std::sync::MutexGuard<'_, Vec<Arc<LaneShared>>> {
        self.queues.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether its server asked for every queue to be served by all threads. The driver keeps a word of ours.
    fn spreads(&self) -> bool {
        self.info.ublksrv_flags & plan::SPREAD != 0
    }

    fn record(&self) -> MutexGuard<'_, Option<(RunDir, Record)>> {
        self.record.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Writes down what another process finds from now on, if it can take the device over.
    fn rewrite(
        &self,
        change: impl FnOnce(&RunDir, &Record) -> Result<Record, RecordError>,
    ) -> Result<(), UblkError> {
        if let Some((run, record)) = &mut *self.record() {
            *record = change(run, record)?;
        }
        Ok(())
    }

    /// Writes down what another process needs.
    fn keep(&self) -> Result<(), UblkError> {
        match &*self.record() {
            Some((run, record)) => Ok(record.save(run)?),
            None => Ok(()),
        }
    }

    /// Takes the block device away.
    fn stop(&self, forced: bool) -> Result<(), UblkError> {
        let number = self.info.dev_id;
        if !self.live.load(Relaxed) || forced {
            return Ok(self.driver.stop(number)?);
        }
        let in_use = || Err(UblkError::InUse(self.path()));
        if self.info.features().has(Features::SAFE_STOP_DEV) {
            return match self.driver.try_stop(number) {
                Err(error) if error.is_busy() => in_use(),
                done => Ok(done?),
            };
        }
        if listing::is_claimed(number) {
            return in_use();
        }
        Ok(self.driver.stop(number)?)
    }

    async fn take_away(self: Arc<Self>, forced: bool) -> Result<(), UblkError> {
        if self.left.load(Relaxed) {
            return Ok(());
        }
        let export = self.clone();
        blocking(move || export.stop(forced)).await??;
        self.forced.store(forced, Relaxed);
        self.live.store(false, Relaxed);
        Ok(())
    }

    /// Removes what is left of it. Nobody of this process has its character device open any more.
    fn delete(&self) -> Result<(), UblkError> {
        delete(&self.driver, self.info.dev_id, self.forced.load(Relaxed))?;
        if let Some((run, record)) = &*self.record() {
            record.remove(run);
        }
        Ok(())
    }
}
