//! Online reconfiguration of a device: size, direct I/O, backing file and others; suspending and resuming it
//! ([ADR 14](../../../docs/adr/0014-live-change.md)).
//!
//! Runs on the control plane. A change freezes the device's hardware queues on all reactors, waits until no
//! request is in flight, creates the new shared parts, has every queue prepare a stack for them, switches all
//! queues to these stacks, and thaws them. Requests that arrived meanwhile waited; they are processed in
//! their order, by the new stack.
//!
//! *Invariant:* a device has one change at a time, and none while it is removed. *Invariant:* a change that
//! fails at any step leaves the device and its exports as they were: nothing is switched before everything is
//! prepared, and what was reported to exports by then is corrected.

pub mod commit;
pub(crate) mod cycles;
mod layers;
pub mod limits;
pub(crate) mod migrate;
mod page_cache;
pub(crate) mod scheduler;
pub(crate) mod slots;

pub use layers::can_relayer;

use crate::change::limits::LimitsRefusal;
use crate::device::dependencies::Dependencies;
use crate::device::tree::targets;
use crate::device::tree::{PartitionTables, RbdSize, Rebuild, SizeSource, Tree};
use crate::device::{Composition, Device, DeviceError};
use crate::host::{Host, HostError, HostErrorKind};
use crate::observe::trace::{TraceChange, TraceError};
use crate::reactor::Step;
use crate::spec::{Bytes, Direct, LayerSpec, StackSpec};
use backends::Backend;
use rbd::Rbd;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::oneshot;

/// Longest time requests in flight may take to finish before a change is given up.
const DRAIN_TIME: Duration = Duration::from_secs(30);

/// A change of a device.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Change {
    /// Enable or disable direct I/O.
    Direct(Direct),
    /// Replace the file of a read-only device by another of the same size. An absolute path.
    File(PathBuf),
    /// Sectors of a null device that become bad, `+FIRST-LAST`, or good, `-FIRST-LAST`.
    BadBlocks(String),
    /// Change the size.
    Resize {
        /// In bytes; `None`: the file's present size.
        size: Option<u64>,
        /// Whether it may become smaller.
        shrink: bool,
    },
    /// Change the queue limits.
    Limits {
        /// Limits to set, as `key=value,…`.
        set: String,
        /// Whether limits set before are removed.
        reset: bool,
    },
    /// Log requests that take at least this long, in nanoseconds; `None`: none.
    Slow(Option<u64>),
    /// Cancel requests that take longer, in nanoseconds; `None`: none.
    Timeout(Option<u64>),
    /// Commit the overlay into its origin.
    Commit,
    /// Hold requests until the device is resumed.
    Suspend {
        /// First let requests in flight finish, and write everything to stable storage.
        flush: bool,
    },
    /// Process the held requests, and activate the inactive table, if any.
    Resume,
    /// Change its trace.
    Trace(TraceChange),
    /// Set another scheduler, with parameters, or `none`.
    Scheduler(String),
    /// Set a parameter of its scheduler.
    Parameter {
        /// The kernel's name of the parameter.
        name: String,
        /// The value, as typed.
        value: String,
    },
    /// Set an option of one of its layers.
    Layer {
        /// Name of the layer.
        layer: String,
        /// The option.
        key: String,
        /// The value, as typed; empty for an option without one.
        value: String,
    },
    /// Other layers between the backend and the scheduler, as they would be typed, bottom first.
    Layers(Vec<String>),
    /// Hand the device over to another process; this process ends.
    #[serde(rename = "leave")]
    HandOver,
}

/// A move of a device's contents. It is not a [`Change`]: it makes two changes, and locks the device only
/// during each.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum MoveRequest {
    /// Move the contents to another stack.
    Move {
        /// The stack, as it would be typed, with absolute paths.
        to: String,
        /// Bytes to copy a second; `None`: as fast as possible.
        rate: Option<u64>,
    },
    /// Cancel the move.
    CancelMove,
}

/// Why a device is not changed.
#[derive(Debug, thiserror::Error)]
pub enum ChangeError {
    /// Only null devices have bad blocks that can be changed.
    #[error("it is {0}, and only a null device has bad blocks that can be changed")]
    NotNull(String),
    /// The range of sectors is malformed.
    #[error("{0}")]
    BadBlocks(#[from] backends::ParseBadError),
    /// The device has no raw file.
    #[error("it is {0}, and only a device on raw files can be changed this way")]
    NoFile(String),
    /// The device has several files.
    #[error("it has {0} files, and only a device with one file can have it replaced")]
    ManyFiles(usize),
    /// The size is fixed.
    #[error(
        "it is {0}, whose size is fixed (remove it and add it again with another size; an image, after qemu-img resize)"
    )]
    KeepsSize(String),
    /// The size of an overlay is fixed by its tables.
    #[error("the size of an overlay is fixed (create another with size=, or commit it into its origin)")]
    Overlay,
    /// The size is in a partition table.
    #[error("its size is that of its partition (change the partition table, then resize without a size)")]
    Partition,
    /// The replacement of a read-only device's file has another size.
    #[error(
        "with that file, the size of the device would change from {from} to {to} (give a file with a partition of the same size)"
    )]
    OtherPartition {
        /// Present size.
        from: Bytes,
        /// Size with the new file.
        to: Bytes,
    },
    /// The device would shrink.
    #[error("it would shrink from {from} to {to}, and lose the data past the new end (add --shrink)")]
    Shrinks {
        /// Present size.
        from: Bytes,
        /// New size.
        to: Bytes,
    },
    /// The kernel accesses its file directly.
    #[error(
        "the kernel reads and writes its file directly, past this change (export it without passthrough)"
    )]
    Passthrough,
    /// The limits are refused.
    #[error(transparent)]
    Limits(#[from] LimitsRefusal),
    /// The scheduler, or one of its parameters, is refused.
    #[error("{0}")]
    Scheduler(String),
    /// A layer, or one of its options, is refused.
    #[error("{0}")]
    Layer(String),
    /// The device has no scheduler.
    #[error("{0} is a parameter of a scheduler, and it has none (first: set scheduler=mq-deadline or kyber)")]
    NoScheduler(String),
    /// The device would use itself: the names on the cycle.
    #[error("it would use itself: {0} (break the cycle: change one of these devices)")]
    Cycle(String),
    /// The contents cannot be moved.
    #[error("{0}")]
    Move(String),
    /// The trace cannot be changed.
    #[error(transparent)]
    Trace(#[from] TraceError),
    /// Requests in flight do not finish.
    #[error(
            "requests in flight did not finish within {} s: the device is unchanged (check its backend)",
            DRAIN_TIME.as_secs()
        )]
    NotDrained,
}

impl From<ChangeError> for HostError {
    fn from(error: ChangeError) -> HostError {
        let errno = match &error {
            ChangeError::Cycle(_) => libc::ELOOP,
            ChangeError::NotDrained => libc::EBUSY,
            _ => libc::EINVAL,
        };
        HostError::with_errno(HostErrorKind::Refused, errno, error)
    }
}

impl Host {
    /// Changes a device while it is served.
    ///
    /// # Errors
    /// The device does not exist, or the change is refused by the device, the file, an I/O thread or an
    /// export: the device is served as before. If the kernel does not drop what it has cached of a replaced
    /// file, the file is replaced nevertheless, and the error reports what is still cached.
    pub async fn change(&self, name: &str, change: Change) -> Result<(), HostError> {
        let device = self.device(name).ok_or_else(HostError::no_device)?;
        match &change {
            Change::Trace(_) | Change::Slow(_) | Change::Timeout(_) => {}
            _ => migrate::check_not_moving(&device)?,
        }
        let lock = device.change_lock.lock().await;
        // It may have been removed meanwhile.
        if !self.device(name).is_some_and(|now| Arc::ptr_eq(&now, &device)) {
            return Err(HostError::no_device());
        }
        // Devices that use this one change with it, and must not change otherwise meanwhile.
        let affected = self.affected(&device);
        let mut locks = Vec::new();
        for user in affected.iter().filter(|user| !Arc::ptr_eq(user, &device)) {
            locks.push(user.change_lock.lock().await);
        }
        if !matches!(
            change,
            Change::Resize { .. } | Change::Resume | Change::Trace(_) | Change::Slow(_) | Change::Timeout(_)
        ) && self.is_passthrough(&device)
        {
            return Err(ChangeError::Passthrough.into());
        }
        let changes_layers = matches!(
            change,
            Change::Scheduler(_)
                | Change::Parameter { .. }
                | Change::Layers(_)
                | Change::Limits { .. }
                | Change::Slow(_)
                | Change::Timeout(_)
        );
        let file = if let Change::File(path) = &change { Some(path.clone()) } else { None };
        let may_free = file.is_some() || change == Change::Resume;
        self.apply_change(&device, name, change).await?;
        if let Some(file) = file {
            // Devices that use this one have other content, too.
            Host::mark_content_replaced(&affected);
            for export in self.exports_of(&device) {
                if let Err(error) = export.file_changed(&file) {
                    tracing::error!(device = %device.name(), %error, "recovery would use the previous file");
                }
            }
        }
        if changes_layers {
            for export in self.exports_of(&device) {
                if let Err(error) = export.layers_changed(&device) {
                    tracing::error!(device = %device.name(), %error, "recovery would use the previous settings");
                }
            }
        }
        drop(locks);
        drop(lock);
        if may_free { self.drop_caches(&affected).await } else { Ok(()) }
    }

    /// Applies a change. The caller holds the locks of the devices affected.
    async fn apply_change(&self, device: &Arc<Device>, name: &str, change: Change) -> Result<(), HostError> {
        match change {
            Change::Direct(direct) => {
                let wanted = direct;
                let file = Box::new(move |file: &Arc<backends::File>| file.with_direct(wanted));
                self.rebuild(device, Rebuild { file, rbd: RbdSize::Keep, tables: PartitionTables::Keep })
                    .await
            }
            Change::File(path) => {
                let files = device.composition().tree.files().len();
                if files > 1 {
                    return Err(ChangeError::ManyFiles(files).into());
                }
                let dependencies = Dependencies { files: vec![path.clone()], ..Dependencies::default() };
                let _pending = self.reserve_dependencies(device, dependencies).await?;
                let file = Box::new(move |file: &Arc<backends::File>| file.replaced(path.clone()));
                self.rebuild(device, Rebuild { file, rbd: RbdSize::Keep, tables: PartitionTables::Replaced })
                    .await
            }
            Change::BadBlocks(change) => {
                let composition = device.composition();
                let null = composition
                    .tree
                    .only_null()
                    .ok_or_else(|| ChangeError::NotNull(composition.stack.to_string()))?;
                Ok(null.change_bad_blocks(&change).map_err(ChangeError::from)?)
            }
            Change::Resize { size, shrink } => self.resize(device, size.map(Bytes), shrink).await,
            Change::Suspend { flush } => self.suspend(device, flush).await,
            Change::Trace(change) => {
                let session = device.trace().ok_or(TraceError::NotTraced).map_err(ChangeError::from)?;
                Ok(session.change(&change).map_err(ChangeError::from)?)
            }
            Change::Scheduler(text) => self.set_scheduler(device, &text).await,
            Change::Parameter { name, value } => Ok(Host::set_parameter(device, &name, &value)?),
            Change::Layer { layer, key, value } => self.set_layer(device, &layer, &key, &value).await,
            Change::Layers(layers) => self.set_layers(device, &layers).await,
            Change::HandOver => self.hand_over_device(name).await,
            Change::Slow(limit) => {
                device.slow.set(limit.map(Duration::from_nanos));
                self.refresh_queues(device).await;
                Ok(())
            }
            Change::Timeout(limit) => {
                device.timeouts.set(limit.map(Duration::from_nanos));
                self.refresh_queues(device).await;
                Ok(())
            }
            Change::Limits { set, reset } => self.change_limits(device, &set, reset).await,
            Change::Commit => self.commit(device).await,
            Change::Resume => self.resume_with_inactive(device).await,
        }
    }

    /// Returns the size the device would have if its file, which has grown, were measured again; `None`: it
    /// has not grown.
    pub(crate) fn growth(&self, device: &Device) -> Option<Bytes> {
        let composition = device.composition();
        let file = composition.tree.only_file()?;
        let measured = file.measured().ok()?;
        (measured > file.size()).then_some(measured)
    }

    /// Returns the size of the device's image of a cluster if another client has changed it.
    pub(crate) fn changed_rbd_size(&self, device: &Device) -> Option<Bytes> {
        device.composition().tree.only_rbd()?.changed_size()
    }

    /// Returns the device's image if its requests wait for an exclusive lock that is to be taken over.
    pub(crate) fn rbd_without_lock(&self, device: &Device) -> Option<Arc<Rbd>> {
        let composition = device.composition();
        composition.tree.only_rbd().filter(|rbd| rbd.waits_for_lock()).cloned()
    }

    async fn resize(&self, device: &Arc<Device>, size: Option<Bytes>, shrink: bool) -> Result<(), HostError> {
        let composition = device.composition();
        check_size(&composition, size)?;
        let from = composition.tree.profile().size;
        let rebuild = move || Rebuild {
            file: match size {
                Some(size) => Box::new(move |file| file.resized(size)),
                None => Box::new(|file| file.remeasured()),
            },
            rbd: size.map_or(RbdSize::Remeasured, RbdSize::Given),
            tables: PartitionTables::Reread,
        };
        let to = match size {
            Some(size) => size,
            // Measuring changes nothing, so the new size can be computed while the device is served.
            None => blocking(move || Ok(composition.tree.rebuilt(&rebuild())?.profile().size)).await?,
        };
        if to < from && !shrink {
            return Err(ChangeError::Shrinks { from, to }.into());
        }
        self.check_size(device, from, to)?;
        // A smaller size is reported first: clients must not know of blocks that do not exist.
        let reported = to.min(from);
        self.report_size(device, from, reported).await?;
        let before = device.composition();
        let was_whole = before.tree.is_as_long_as(from);
        let mut result = self.rebuild(device, rebuild()).await;
        if result.is_ok() {
            result = self.report_size(device, reported, device.size()).await;
            if result.is_err() {
                self.revert(device, &before).await;
            }
        }
        if result.is_err() {
            self.restore_reported_size(device, reported, from).await;
        }
        // The file is truncated after the device has shrunk. A file that was extended for a change that
        // failed is truncated to its previous length.
        if result.is_ok() && device.size() < from || result.is_err() && size.is_some() && was_whole {
            let composition = device.composition();
            result = result.and(blocking(move || composition.tree.cut()).await);
        }
        result
    }

    /// Returns a device to the composition that it had before a change that was refused later.
    async fn revert(&self, device: &Arc<Device>, before: &Arc<Composition>) {
        let composition = before.clone();
        let back = self.exchange(device, move || Ok(Ok(composition))).await;
        if let Err(error) = &back {
            tracing::error!(device = %device.name(), %error, "a refused change could not be undone");
        }
        self.finish_exchange(device, back.is_ok());
    }

    /// Reports to exports the size that they knew before a change that was refused.
    async fn restore_reported_size(&self, device: &Arc<Device>, reported: Bytes, was: Bytes) {
        if let Err(error) = self.report_size(device, reported, was).await {
            tracing::error!(device = %device.name(), %error, "an export could not be notified that the device keeps its size");
        }
    }

    /// Resumes a device: held requests proceed.
    pub(crate) fn resume(&self, device: &Arc<Device>) {
        targets::resume(&device.composition());
        device.set_suspended(false);
        self.finish_steps(&self.affected(device), true);
    }

    /// Resumes a device, with its inactive table if there is one.
    async fn resume_with_inactive(&self, device: &Arc<Device>) -> Result<(), HostError> {
        let Some((loaded, _pending)) = self.take_inactive(device).await? else {
            self.resume(device);
            return Ok(());
        };
        let result = self.activate(device, &loaded).await;
        if result.is_err() {
            self.return_inactive(device, loaded);
        }
        result
    }

    /// Activates a table instead of the present one, and reports its size to the exports. After an error the
    /// device has its previous table, and its exports know the previous size.
    async fn activate(&self, device: &Arc<Device>, loaded: &Arc<Composition>) -> Result<(), HostError> {
        let next = slots::below_present_layers(device, loaded)?;
        let (before, was, to) = (device.composition(), device.size(), next.tree.profile().size);
        let was_suspended = device.is_suspended();
        self.check_size(device, was, to)?;
        // A smaller size is reported first: clients must not know of blocks that do not exist.
        let reported = to.min(was);
        self.report_size(device, was, reported).await?;
        let mut result = self.swap_tables(device, &before, &next, false).await;
        if result.is_ok() {
            result = self.report_size(device, reported, device.size()).await;
            if result.is_err()
                && let Err(error) = self.swap_tables(device, &next, &before, was_suspended).await
            {
                tracing::error!(device = %device.name(), %error, "the previous table could not be restored");
            }
        }
        if result.is_err() {
            self.restore_reported_size(device, reported, was).await;
            return result;
        }
        if let StackSpec::Table(table) = &next.stack {
            for export in self.exports_of(device) {
                if let Err(error) = export.table_changed(table) {
                    tracing::error!(device = %device.name(), %error, "recovery would use the previous table");
                }
            }
        }
        Ok(())
    }

    /// Replaces one table by another, and suspends the device or resumes it. After an error it is as before.
    async fn swap_tables(
        &self,
        device: &Arc<Device>,
        from: &Arc<Composition>,
        to: &Arc<Composition>,
        suspended: bool,
    ) -> Result<(), HostError> {
        let was_suspended = device.is_suspended();
        // Requests that wait for a path are processed by the new table.
        targets::presuspend(from, true);
        let given = to.clone();
        // Devices below may have switched to other tables since this table was loaded.
        let make = move || {
            let Composition { stack, layers, tree, table } = &*given;
            let (stack, layers, table) = (stack.clone(), layers.clone(), table.clone());
            Ok(Ok(Arc::new(Composition { stack, layers, tree: tree.with_current_devices()?, table })))
        };
        let exchanged = self.exchange(device, make).await;
        if exchanged.is_ok() {
            slots::retire(device, from);
            self.table_came.notify_one();
            self.background_came.notify_one();
            if !suspended {
                targets::resume(to);
            }
            device.set_suspended(suspended);
        } else if !was_suspended {
            targets::resume(from);
        }
        self.finish_exchange(device, exchanged.is_ok());
        exchanged
    }

    pub(crate) async fn suspend(&self, device: &Arc<Device>, flush: bool) -> Result<(), HostError> {
        let was = device.is_suspended();
        device.set_suspended(true);
        targets::presuspend(&device.composition(), !flush);
        let affected = self.affected(device);
        let drained = self.freeze(&affected);
        if !flush {
            return Ok(());
        }
        let result = match drained.wait().await {
            Ok(()) => self.flush_drained(device, &affected).await,
            Err(error) => Err(error),
        };
        if result.is_err() && !was {
            self.resume(device);
        }
        result
    }

    /// Writes what a drained device has acknowledged to stable storage.
    async fn flush_drained(&self, device: &Arc<Device>, affected: &[Arc<Device>]) -> Result<(), HostError> {
        let composition = device.composition();
        if composition.tree.is_single() {
            // The flush opens a connection of its own. The server accepts one at a time, so the queue's is
            // closed first.
            self.close_nodes(affected).wait().await?;
        }
        blocking(move || composition.tree.sync()).await
    }

    /// Replaces files of a device: freezes, drains, switches, thaws.
    async fn rebuild(&self, device: &Arc<Device>, rebuild: Rebuild) -> Result<(), HostError> {
        let before = device.composition();
        // A table's targets own their devices.
        let resizes_image = rebuild.rbd != RbdSize::Keep && before.tree.only_rbd().is_some();
        if before.tree.files().is_empty() && !resizes_image || before.table.is_some() {
            return Err(ChangeError::NoFile(before.stack.to_string()).into());
        }
        let composition = before.clone();
        let result = self.exchange(device, move || Ok(rebuilt(&composition, &rebuild)?.map(Arc::new))).await;
        if result.is_err() {
            // Files that share the open file may have been switched.
            for file in before.tree.files() {
                let _ = file.reinstate();
            }
        }
        self.finish_exchange(device, result.is_ok());
        result
    }

    /// Freezes and drains the device and all devices that use it, calls `make` for the device's next
    /// composition, and prepares all queues for the next compositions. On success the devices have these
    /// compositions. [`finish_exchange`](Host::finish_exchange), which must follow in any case, switches the
    /// queues to them. After an error all devices are as before, and no queue has been switched.
    pub(crate) async fn exchange(
        &self,
        device: &Arc<Device>,
        make: impl FnOnce() -> Result<Result<Arc<Composition>, ChangeError>, DeviceError> + Send + 'static,
    ) -> Result<(), HostError> {
        let affected = self.affected(device);
        affected.iter().for_each(|device| device.set_changing(true));
        self.freeze(&affected).wait().await?;
        self.close_nodes(&affected).wait().await?;
        let composition = blocking(make).await??;
        let is_new = match (&device.composition().table, &composition.table) {
            (Some(before), Some(next)) => !Arc::ptr_eq(before, next),
            _ => true,
        };
        if is_new {
            let next = composition.clone();
            blocking(move || targets::prepare(&next)).await?;
        }
        let mut next = vec![(device.clone(), composition)];
        for user in affected.iter().filter(|user| !Arc::ptr_eq(user, device)) {
            let Composition { stack, layers, tree, table } = &*user.composition();
            let (stack, layers, table) = (stack.clone(), layers.clone(), table.clone());
            let composition = Composition { stack, layers, tree: tree.with_devices(&next)?, table };
            next.push((user.clone(), Arc::new(composition)));
        }
        self.prepare(&next).await?;
        // Nothing fails from here on.
        next.into_iter().for_each(|(device, composition)| device.set_composition(composition));
        self.stack_came.notify_one();
        Ok(())
    }

    /// Makes every queue of these devices prepare a stack for its device's next composition.
    async fn prepare(&self, next: &[(Arc<Device>, Arc<Composition>)]) -> Result<(), HostError> {
        let mut answers = Vec::new();
        for (device, composition) in next {
            for reactor in self.reactors() {
                let (done, is_done) = oneshot::channel();
                reactor.step(device.clone(), Step::Prepare(composition.clone(), done));
                answers.push(is_done);
            }
        }
        let mut result = Ok(());
        for answer in answers {
            // A reactor that has ended has no queue of it.
            result = result.and(answer.await.unwrap_or(Ok(())));
        }
        Ok(result?)
    }

    /// Ends an exchange: keeps what was prepared, or drops it, and thaws.
    pub(crate) fn finish_exchange(&self, device: &Arc<Device>, keep: bool) {
        let affected = self.affected(device);
        affected.iter().for_each(|device| device.set_changing(false));
        self.finish_steps(&affected, keep);
    }

    /// Lists a device and all that use it, each after the devices that it uses.
    fn affected(&self, device: &Arc<Device>) -> Vec<Arc<Device>> {
        let mut affected = self.devices();
        affected.retain(|other| Arc::ptr_eq(other, device) || other.composition().tree.depends_on(device));
        let below: Vec<usize> = affected
            .iter()
            .map(|upper| affected.iter().filter(|lower| upper.composition().tree.depends_on(lower)).count())
            .collect();
        let mut numbered: Vec<_> = below.into_iter().zip(affected).collect();
        numbered.sort_by_key(|(below, _)| *below);
        let mut affected: Vec<_> = numbered.into_iter().map(|(_, device)| device).collect();
        if affected.is_empty() {
            // The host no longer lists a device that is being removed.
            affected.push(device.clone());
        }
        affected
    }

    fn freeze(&self, affected: &[Arc<Device>]) -> Drained {
        Drained(self.step_all(affected, Step::Freeze))
    }

    /// Has the nodes of frozen and drained devices close their connections.
    fn close_nodes(&self, affected: &[Arc<Device>]) -> Drained {
        Drained(self.step_all(affected, Step::Close))
    }

    fn finish_steps(&self, affected: &[Arc<Device>], keep: bool) {
        for device in affected {
            for reactor in self.reactors() {
                reactor.step(device.clone(), Step::Finish { switch: keep });
            }
        }
    }

    fn step_all<T>(
        &self,
        affected: &[Arc<Device>],
        step: impl Fn(oneshot::Sender<T>) -> Step,
    ) -> Vec<oneshot::Receiver<T>> {
        let ask = |(device, reactor): (&Arc<Device>, &crate::reactor::Reactor)| {
            let (done, is_done) = oneshot::channel();
            reactor.step(device.clone(), step(done));
            is_done
        };
        let reactors = self.reactors();
        affected
            .iter()
            .flat_map(|device| reactors.iter().map(move |reactor| (device, reactor)))
            .map(ask)
            .collect()
    }
}

/// Reactors that were asked to freeze a device, or to close its nodes.
struct Drained(Vec<oneshot::Receiver<()>>);

impl Drained {
    async fn wait(self) -> Result<(), HostError> {
        let all = async {
            for drained in self.0 {
                // A reactor that has ended has no request in flight.
                let _ = drained.await;
            }
        };
        tokio::time::timeout(DRAIN_TIME, all).await.map_err(|_| ChangeError::NotDrained.into())
    }
}

/// Runs what may wait for a disk or a server on the blocking pool.
pub(crate) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, DeviceError> + Send + 'static,
) -> Result<T, HostError> {
    match tokio::task::spawn_blocking(work).await {
        Ok(result) => Ok(result?),
        Err(panic) => std::panic::resume_unwind(panic.into_panic()),
    }
}

/// Checks whether a device can have another size at all.
fn check_size(composition: &Composition, size: Option<Bytes>) -> Result<(), ChangeError> {
    if composition.table.is_some() {
        return Err(ChangeError::KeepsSize(composition.stack.to_string()));
    }
    match (composition.tree.size_source(), size) {
        (SizeSource::File, _) | (SizeSource::Partition, None) => Ok(()),
        (SizeSource::Partition, Some(_)) => Err(ChangeError::Partition),
        (SizeSource::Overlay, _) => Err(ChangeError::Overlay),
        (SizeSource::Other, _) => Err(ChangeError::KeepsSize(composition.stack.to_string())),
    }
}

/// Returns the device's next composition, with the description as it would be typed.
fn rebuilt(
    composition: &Composition,
    rebuild: &Rebuild,
) -> Result<Result<Composition, ChangeError>, DeviceError> {
    let tree: Tree = composition.tree.rebuilt(rebuild)?;
    let (from, to) = (composition.tree.profile().size, tree.profile().size);
    if rebuild.tables == PartitionTables::Replaced && from != to {
        return Ok(Err(ChangeError::OtherPartition { from, to }));
    }
    let (mut stack, mut layers) = (composition.stack.clone(), composition.layers.clone());
    // Files are listed in the order of the walk: that of the stack, unless it is an image, then those of its
    // layers, bottom first.
    let mut files = tree.files().into_iter().map(|file| file.spec());
    if let StackSpec::File(spec) = &mut stack
        && !spec.is_image()
        && let Some(now) = files.next()
    {
        spec.file.path.clone_from(&now.path);
        spec.file.sizelimit = now.sizelimit;
        spec.file.create = None;
        spec.file.direct = now.direct;
    }
    if let (StackSpec::Rbd(spec), true) = (&mut stack, rebuild.rbd != RbdSize::Keep) {
        (spec.create, spec.object_size) = (None, None);
    }
    let overlays = layers.iter_mut().filter_map(|layer| match layer {
        LayerSpec::Cow(spec) => Some(spec),
        _ => None,
    });
    for (spec, now) in overlays.zip(files) {
        spec.direct = now.direct;
    }
    Ok(Ok(Composition { stack, layers, tree, table: composition.table.clone() }))
}

#[cfg(test)]
mod tests;
