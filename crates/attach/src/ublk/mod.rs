//! The control plane of the ublk export: a kernel block device is created, served, handed over and removed.
//!
//! [`export`] issues the driver's commands in its order: add the device, set its parameters, have reactors
//! fetch every tag, start it. For a device whose server died: start recovery, have every tag fetched, end
//! recovery. A [`Record`] in the run directory, written before the device can be used, has all that another
//! process needs to do the latter.
//!
//! Driver commands run on the blocking pool, each for a bounded time.

mod details;
mod error;
mod host_export;
mod listing;
mod params;
mod plan;
mod queue;
mod record;

pub use error::UblkError;
pub use listing::{ForeignDevice, foreign_devices, users_of};
pub use params::NotPresentable;
pub use record::{Invocation, PageRecord, PageToken, Record, RecordError};

use crate::{Exported, Exports, UblkLife};
use ::ublk::kernel::{SharedFile, block_path};
use ::ublk::{
    Descriptors, DeviceInfo, Driver, DriverError, Features, KernelControl, Params, State, Unusable,
};
use block::{Bytes, Integrity};
use engine::device::Device;
use engine::host::{Host, HostError};
use engine::rundir::RunDir;
use exports::ublk::{Choice, ServedQueueShared};
use host_export::HostExport;
use plan::Plan;
use queue::UblkQueue;
use spec::{Recovery, UblkSpec};
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

/// Longest time that the driver may take to clean up after a killed server before the device is taken over.
const CLEANUP_MAX: Duration = Duration::from_secs(30);
/// Longest time requests in flight may take before a handover is given up.
const QUIESCE_MAX: Duration = Duration::from_secs(10);
/// Interval at which the driver's state is polled.
const POLL_INTERVAL: Duration = Duration::from_millis(2);

/// A ublk device of this process.
struct UblkExport {
    driver: Driver,
    info: DeviceInfo,
    offered: Option<Features>,
    choice: Choice,
    batch: (bool, &'static str),
    /// The integrity data of the device, and the reason if there is none.
    integrity: (Option<Integrity>, &'static str),
    /// Memory shared with clients, the file behind it, and the driver's index once registered.
    client_memory: Option<(PathBuf, Arc<SharedFile>, OnceLock<u16>)>,
    queues: Mutex<Vec<Arc<ServedQueueShared>>>,
    /// Set while the block device is started.
    live: AtomicBool,
    /// Set if the device must stay when this process ends.
    keeps_device: AtomicBool,
    /// Set if the device was removed although it was in use.
    forced: AtomicBool,
    record: Mutex<Option<(RunDir, Record)>>,
}

/// Whether a device is created or recovered.
#[derive(Clone, Debug)]
pub enum Origin {
    /// Created.
    New,
    /// Taken over: the device of this number waits for a new server.
    Recover(u32),
}

/// Runs a call that may block on the blocking pool.
async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Result<T, UblkError> {
    let done = tokio::task::spawn_blocking(work).await;
    done.map_err(|why| UblkError::Serve(why.to_string()))
}

/// Whether a command is stuck in the kernel, so that this process cannot exit normally.
pub fn is_stuck() -> bool {
    ::ublk::kernel::is_stuck()
}

/// Removes the device that a dead server left behind, and its record.
///
/// # Errors
/// The device is in use, unless `forced`; or the driver refuses.
pub fn remove_orphan(run: &RunDir, record: &Record, forced: bool) -> Result<(), UblkError> {
    if record.is_of_this_boot() {
        let driver = driver()?;
        match driver.info(record.number) {
            // The number was reassigned: the device belongs to another program.
            Ok(info) if has_other_server(&info, record) => {}
            Ok(_) if !forced && listing::is_claimed(record.number) => {
                return Err(UblkError::InUse(block_path(record.number)));
            }
            Ok(_) => {
                driver.stop(record.number)?;
                delete(&driver, record.number, forced)?;
            }
            // The device does not exist any more.
            Err(gone) if gone.errno() == Some(libc::ENODEV) => {}
            Err(why) => return Err(why.into()),
        }
    }
    record.remove(run);
    Ok(())
}

/// Removes a device without a record and without a live server, whichever program created it. `false`: there
/// is no such device.
///
/// # Errors
/// The device has a live server, or is in use unless `forced`; or the driver refuses.
pub fn remove_unrecorded(number: u32, forced: bool) -> Result<bool, UblkError> {
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

/// Deletes a stopped device. With `forced` this does not wait: the number is free when the last user closes
/// the device.
fn delete(driver: &Driver, number: u32, forced: bool) -> Result<(), DriverError> {
    if forced && driver.delete_later(number).is_ok() { Ok(()) } else { driver.delete(number) }
}

/// Whether the device of a record exists and may be taken over.
pub fn is_recoverable(record: &Record) -> bool {
    record.is_of_this_boot()
        && driver().is_ok_and(|driver| {
            driver.info(record.number).is_ok_and(|info| {
                Recovery::of(info.features()) != Recovery::None && !has_other_server(&info, record)
            })
        })
}

/// Whether a live process other than the recorded one serves the device.
fn has_other_server(info: &DeviceInfo, record: &Record) -> bool {
    info.state() == Some(State::Live)
        && u32::try_from(info.ublksrv_pid) != Ok(record.pid)
        && is_alive(info.ublksrv_pid)
}

/// Returns the kernel's driver. All devices of this process share one control descriptor.
///
/// # Errors
/// The driver cannot be used.
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

/// Exports a device as a ublk device, and records what another process needs to take it over. The export is
/// registered with the host as soon as the kernel has the device, so that it is removed with the device if a
/// later step fails.
///
/// # Errors
/// See [`UblkError`]. A block device that was created stays until the device is removed.
pub(crate) async fn export(
    exports: &Exports,
    device: &Arc<Device>,
    spec: &UblkSpec,
    life: impl FnOnce() -> UblkLife,
) -> Result<Exported, HostError> {
    let host = exports.host();
    let UblkLife { origin, keep } = life();
    if host.engine().name != "io_uring" {
        return Err(UblkError::NoUring(host.engine().name).into());
    }
    let driver = driver().map_err(UblkError::from)?;
    let export = match origin {
        Origin::New => create(host, device, spec, driver, keep).await?,
        Origin::Recover(number) => take_over(host, device, spec, driver, number, keep).await?,
    };
    let why = format!("data by {}: {}", export.choice.mode, export.choice.why);
    Ok(Exported { address: export.path(), why: Some(why) })
}

/// Checks whether a device can be exported by ublk with default options.
///
/// # Errors
/// Returns the reason why it cannot.
pub async fn is_possible(host: &Arc<Host>, device: &Arc<Device>) -> Result<(), UblkError> {
    if host.engine().name != "io_uring" {
        return Err(UblkError::NoUring(host.engine().name));
    }
    let (device, spec, threads) = (device.clone(), UblkSpec::default(), threads_of(host, device));
    let room = buffers_left(host, threads).await;
    blocking(move || {
        let offered = driver()?.features()?;
        plan_for(&device, &spec, threads, &room, offered).map(drop)
    })
    .await?
}

/// Checks whether the kernel has the driver, and this process may use it.
///
/// # Errors
/// Why not.
pub(crate) fn is_offered() -> Result<(), UblkError> {
    driver()?.features()?;
    Ok(())
}

/// Number of I/O threads that may serve a device: 1 if its stack takes one queue.
fn threads_of(host: &Host, device: &Device) -> u16 {
    if device.is_single() { 1 } else { host.reactors().len() as u16 }
}

/// Number of kernel buffers that each of the first threads can still register, in each free stretch of its
/// table. Exports are created one after the other, so no other export takes them meanwhile.
async fn buffers_left(host: &Host, threads: u16) -> Vec<Vec<u16>> {
    let mut room = Vec::new();
    for reactor in &host.reactors()[..threads.into()] {
        room.push(reactor.kernel_buffers_left().await.unwrap_or_default());
    }
    room
}

async fn create(
    host: &Arc<Host>,
    device: &Arc<Device>,
    spec: &UblkSpec,
    driver: Driver,
    keep: Option<(RunDir, Record)>,
) -> Result<Arc<UblkExport>, UblkError> {
    let plan = {
        let (driver, device, spec) = (driver.clone(), device.clone(), spec.clone());
        let threads = threads_of(host, &device);
        let room = buffers_left(host, threads).await;
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
    let export = register(host, device, driver, info, &plan, client_memory, keep);
    plan.check_granted(info.features())?;
    export.save_record()?;
    let driver = export.driver.clone();
    let params = plan.params;
    blocking(move || {
        if info.features().has(Features::UNPRIVILEGED_DEV) {
            driver.await_owned(info.dev_id).map_err(|why| UblkError::NotOwned(info.dev_id, why))?;
        }
        Ok::<_, UblkError>(driver.set_params(info.dev_id, &params)?)
    })
    .await??;
    serve(host, device, &export, plan.io_max).await?;
    let driver = export.driver.clone();
    blocking(move || driver.start(info.dev_id, std::process::id())).await??;
    export.live.store(true, Relaxed);
    Ok(export)
}

async fn take_over(
    host: &Arc<Host>,
    device: &Arc<Device>,
    spec: &UblkSpec,
    driver: Driver,
    number: u32,
    keep: Option<(RunDir, Record)>,
) -> Result<Arc<UblkExport>, UblkError> {
    let (info, params, offered) = {
        let driver = driver.clone();
        blocking(move || await_recovery(&driver, number)).await??
    };
    let plan = Plan::of(spec, &device.profile(), &info, &params, offered)?;
    let recorded = params.basic.dev_sectors;
    if plan.params.basic.dev_sectors < recorded {
        let size = |sectors| block::Sectors(sectors).bytes();
        return Err(UblkError::Shrunk { device: size(recorded), stack: size(plan.params.basic.dev_sectors) });
    }
    let client_memory = client_memory(spec)?;
    let export = register(host, device, driver, info, &plan, client_memory, keep);
    // The driver has started recovery. If a later step fails, the device stays and waits for the next
    // attempt.
    export.keeps_device.store(true, Relaxed);
    export.save_record()?;
    serve(host, device, &export, plan.io_max).await?;
    let driver = export.driver.clone();
    let grown = plan.params.basic.dev_sectors;
    blocking(move || {
        driver.end_recovery(number, std::process::id())?;
        // The device is served by now, so a refused size does not end its service.
        if grown > recorded
            && info.features().has(Features::UPDATE_SIZE)
            && let Err(error) = driver.update_size(number, grown)
        {
            tracing::warn!(number, %error, "the device keeps its size");
        }
        Ok::<_, DriverError>(())
    })
    .await??;
    export.keeps_device.store(false, Relaxed);
    export.live.store(true, Relaxed);
    Ok(export)
}

/// Adds the export to the host: from now on removing the device removes the block device, even if a later
/// step fails.
fn register(
    host: &Host,
    device: &Arc<Device>,
    driver: Driver,
    info: DeviceInfo,
    plan: &Plan,
    client_memory: Option<(PathBuf, Arc<SharedFile>)>,
    keep: Option<(RunDir, Record)>,
) -> Arc<UblkExport> {
    let client_memory = client_memory.map(|(path, memory)| (path, memory, OnceLock::new()));
    // Devices without recovery have a record, too, so that their remains can be found and deleted.
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
        keeps_device: AtomicBool::new(false),
        forced: AtomicBool::new(false),
        record: Mutex::new(record),
    });
    host.add_export(device, Arc::new(HostExport(export.clone())));
    export
}

/// Has reactors fetch every tag.
async fn serve(
    host: &Arc<Host>,
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
    let per_io = export.info.features().has(Features::PER_IO_DAEMON) && export.spreads_queues();
    let assignments = plan::assignments(
        export.info.nr_hw_queues,
        export.info.queue_depth,
        threads_of(host, device).into(),
        per_io,
    );
    let mut waiting = Vec::new();
    for part in assignments {
        let descriptors = Descriptors::map(opened.as_fd(), part.queue, export.info.queue_depth)
            .map_err(|why| UblkError::Open(number, why))?;
        let shared = Arc::new(ServedQueueShared::default());
        shared.size.store(device.size().0, Relaxed);
        export.queues().push(shared.clone());
        let reactor = &host.reactors()[part.reactor];
        if let Ok(cpus) = export.driver.affinity(number, part.queue) {
            reactor.add_affinity(&cpus);
        }
        waiting.push(queue::serve(
            reactor,
            device,
            UblkQueue {
                device: opened.clone(),
                // DEL_DEV waits until the file is closed. Drivers with zero copy (6.15) are newer than the
                // kernels (6.12) where commands of other devices can delay the closing of a registered file.
                registered: export.offered.is_some_and(|has| has.has(Features::SUPPORT_ZERO_COPY)),
                descriptors,
                q_id: part.queue,
                first_tag: part.first_tag,
                tags: part.tags,
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
    for answer in waiting {
        let done =
            answer.await.unwrap_or_else(|_| Err("an I/O thread refused a queue (see the log)".to_owned()));
        done.map_err(UblkError::Serve)?;
    }
    Ok(())
}

/// Starts recovery. If recovery was started before and not completed, the driver returns success since
/// Linux 6.15, and `EINVAL` before that, where recovery stays started.
fn start_recovery(driver: &Driver, number: u32, info: &DeviceInfo) -> Result<(), DriverError> {
    let recovers = Recovery::of(info.features()) != Recovery::None;
    match driver.start_recovery(number) {
        Err(error) if recovers && error.errno() == Some(libc::EINVAL) => Ok(()),
        done => done,
    }
}

/// Waits until the driver has cleaned up after a dead server, and starts recovery.
fn await_recovery(driver: &Driver, number: u32) -> Result<(DeviceInfo, Params, Option<Features>), UblkError> {
    let offered = driver.features()?;
    let started = Instant::now();
    loop {
        let info = driver.info(number)?;
        let waits = matches!(info.state(), Some(State::Quiesced | State::FailIo));
        if waits && start_recovery(driver, number, &info).is_ok() {
            return Ok((info, driver.params(number)?, offered));
        }
        let lives = info.state() == Some(State::Live) && is_alive(info.ublksrv_pid);
        if lives || started.elapsed() > CLEANUP_MAX {
            // The error of the driver contains the reason.
            driver.start_recovery(number).map_err(|error| match info.state() {
                Some(State::Live) => UblkError::Served(info.ublksrv_pid),
                _ => error.into(),
            })?;
        }
        std::thread::sleep(POLL_INTERVAL);
    }
}

/// Plans a new device.
fn plan_for(
    device: &Device,
    spec: &UblkSpec,
    threads: u16,
    room: &[Vec<u16>],
    offered: Option<Features>,
) -> Result<Plan, UblkError> {
    let profile = device.profile();
    let stack = plan::StackFacts {
        profile: &profile,
        survives: device.survives(),
        integrity: device.integrity(),
        hides_integrity: device.hides_integrity(),
        room,
    };
    Plan::new(spec, &stack, device.depth(), threads, offered)
}

/// Whether a process exists and is not a zombie.
fn is_alive(pid: i32) -> bool {
    let Ok(stat) = std::fs::read_to_string(format!("/proc/{pid}/stat")) else { return false };
    let state = stat.rsplit_once(')').and_then(|(_, rest)| rest.trim_start().chars().next());
    !matches!(state, Some('Z' | 'X') | None)
}

/// Opens the memory to be shared with clients, if requested.
fn client_memory(spec: &UblkSpec) -> Result<Option<(PathBuf, Arc<SharedFile>)>, UblkError> {
    let open = |path: &PathBuf| match SharedFile::open(path) {
        Ok(memory) => Ok((path.clone(), Arc::new(memory))),
        Err(why) => Err(UblkError::SharedFile(path.display().to_string(), why)),
    };
    spec.shmem.as_ref().map(open).transpose()
}

impl UblkExport {
    /// Registers the shared memory with the driver, which may still have a dead server's registration.
    fn share(&self) -> Result<(), UblkError> {
        let Some((_, memory, index)) = &self.client_memory else { return Ok(()) };
        let number = self.info.dev_id;
        if self.keeps_device.load(Relaxed) {
            let _ = self.driver.unshare(number, 0);
        }
        let _ = index.set(self.driver.share(number, memory.address(), memory.len())?);
        Ok(())
    }

    fn path(&self) -> String {
        block_path(self.info.dev_id)
    }

    fn queues(&self) -> std::sync::MutexGuard<'_, Vec<Arc<ServedQueueShared>>> {
        self.queues.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether all threads serve every queue, a setting stored in the driver's `ublksrv_flags`.
    fn spreads_queues(&self) -> bool {
        self.info.ublksrv_flags & plan::SPREAD != 0
    }

    fn record(&self) -> MutexGuard<'_, Option<(RunDir, Record)>> {
        self.record.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Replaces the record that another process would read, if there is one.
    fn update_record(
        &self,
        change: impl FnOnce(&RunDir, &Record) -> Result<Record, RecordError>,
    ) -> Result<(), UblkError> {
        if let Some((run, record)) = &mut *self.record() {
            *record = change(run, record)?;
        }
        Ok(())
    }

    /// Writes the record.
    fn save_record(&self) -> Result<(), UblkError> {
        match &*self.record() {
            Some((run, record)) => Ok(record.save(run)?),
            None => Ok(()),
        }
    }

    /// Stops the block device.
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

    async fn stop_device(self: Arc<Self>, forced: bool) -> Result<(), UblkError> {
        if self.keeps_device.load(Relaxed) {
            return Ok(());
        }
        let export = self.clone();
        blocking(move || export.stop(forced)).await??;
        self.forced.store(forced, Relaxed);
        self.live.store(false, Relaxed);
        Ok(())
    }

    /// Deletes the block device and its record. This process has closed its character device before.
    fn delete(&self) -> Result<(), UblkError> {
        delete(&self.driver, self.info.dev_id, self.forced.load(Relaxed))?;
        if let Some((run, record)) = &*self.record() {
            record.remove(run);
        }
        Ok(())
    }
}
