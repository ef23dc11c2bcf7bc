//! Changing a device while it is served: size, direct I/O, backing file; suspending and resuming it
//! ([ADR 14](../../../docs/adr/0014-live-change.md)).
//!
//! Runs on the control plane. A change freezes the device's hardware queues on all reactors, waits until
//! nothing is under way, makes the new shared parts, has every queue prepare a stack for them, switches all queues to these,
//! and thaws them. Requests that came meanwhile waited; they are carried out in the order in which they came, by the new stack.
//!
//! *Invariant:* one change of a device at a time, and none while it is removed. *Invariant:* a change that
//! fails at any step leaves the device and its exports as they were: nothing is switched before everything is prepared, and
//! what exports were told by then is taken back.

use crate::device::{Device, DeviceError, Form};
use crate::host::{Host, HostError};
use crate::limits::LimitsRefusal;
use crate::reactor::Step;
use crate::spec::{Bytes, Direct, LayerSpec, StackSpec};
use crate::stacking::Footing;
use crate::tables;
use crate::trace::{TraceChange, TraceError};
use crate::tree::{Remake, SizeOf, Tables, Tree};
use backends::Backend;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::oneshot;

/// How long requests that are under way may take to end before a change is given up.
const DRAIN_TIME: Duration = Duration::from_secs(30);

/// What to change.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Change {
    /// Read and write past the page cache, or through it.
    Direct(Direct),
    /// Another file of the same size behind a read-only device. An absolute path.
    File(PathBuf),
    /// Sectors of a null device that become bad, `+FIRST-LAST`, or good, `-FIRST-LAST`.
    BadBlocks(String),
    /// Another size.
    Resize {
        /// In bytes; `None`: what the file has now.
        size: Option<u64>,
        /// It may become smaller.
        shrink: bool,
    },
    /// Other queue limits.
    Limits {
        /// Those to set, as `key=value,…`.
        set: String,
        /// Those that were set before go.
        reset: bool,
    },
    /// Tell of requests in the log that take so many nanoseconds; `None`: of none.
    Slow(Option<u64>),
    /// Cancel requests that take more nanoseconds; `None`: none.
    Timeout(Option<u64>),
    /// Write the overlay down into what it stands over.
    Commit,
    /// Hold requests back until it is resumed.
    Suspend {
        /// First let those under way end, and put everything onto stable storage.
        flush: bool,
    },
    /// Carry out what was held back, and go on.
    Resume,
    /// Of the trace that is made of it.
    Trace(TraceChange),
    /// Another scheduler, with parameters, or `none`.
    Scheduler(String),
    /// Another value for a parameter of its scheduler.
    Parameter {
        /// The kernel's name of it.
        name: String,
        /// The value, as it is written.
        value: String,
    },
    /// Another value for an option of one of its layers.
    Layer {
        /// The layer's name.
        layer: String,
        /// The option.
        key: String,
        /// The value, as it is written; empty for one that stands alone.
        value: String,
    },
    /// Leave it to another process: nothing is under way any more, and this process ends.
    Leave,
}

/// Why a device is not changed.
#[derive(Debug, thiserror::Error)]
pub enum ChangeError {
    /// Only those have bad blocks that come and go.
    #[error("it is {0}, and only a null device has bad blocks that can be changed")]
    NotNull(String),
    /// It is no range of sectors.
    #[error("{0}")]
    BadBlocks(#[from] backends::ParseBadError),
    /// It has no file to read and write otherwise.
    #[error("it is {0}, and only a device on raw files can be changed so")]
    NoFile(String),
    /// It stands on several files, of which none is meant.
    #[error("it stands on {0} files, and only a device on one file can have another in its place")]
    ManyFiles(usize),
    /// It has the size it was made with.
    #[error(
        "it is {0}, which keeps the size it was made with (serve it anew with another; an image, after qemu-img resize)"
    )]
    KeepsSize(String),
    /// An overlay's tables are as long as its device needs them.
    #[error(
        "an overlay keeps the size it was made with (make another with size=, or commit it into what is below)"
    )]
    Overlay,
    /// Its size is in a partition table.
    #[error("it is as long as its partition (change the table, then resize without a size)")]
    Partition,
    /// Of a read-only device's other file, another size came.
    #[error(
        "it would be {to} long in that file, and is {from} (give a file with a partition of the same size)"
    )]
    OtherPartition {
        /// What it holds now.
        from: Bytes,
        /// What it would hold.
        to: Bytes,
    },
    /// It would lose its end.
    #[error("it would shrink from {from} to {to}, and what lies behind would be gone (add --shrink)")]
    Shrinks {
        /// What it holds now.
        from: Bytes,
        /// What it would hold.
        to: Bytes,
    },
    /// It would change for some of its users only.
    #[error("the kernel reads and writes its file past us, and would go on (show it without passthrough)")]
    PassedBy,
    /// Its limits.
    #[error(transparent)]
    Limits(#[from] LimitsRefusal),
    /// Its scheduler, or a parameter of that.
    #[error("{0}")]
    Scheduler(String),
    /// One of its layers, or an option of that.
    #[error("{0}")]
    Layer(String),
    /// It has none, and so no parameter of that name.
    #[error("{0} is a parameter of a scheduler, and it has none (first: set scheduler=mq-deadline or kyber)")]
    NoScheduler(String),
    /// What it would stand on stands on it: the names of both, and of what lies between.
    #[error("it would stand on itself: {0} (let one of them stand on something else)")]
    Cycle(String),
    /// Its trace.
    #[error(transparent)]
    Trace(#[from] TraceError),
    /// Requests that are under way do not end.
    #[error(
        "requests that are under way did not end within {} s: it goes on as it was (look at its backend)",
        DRAIN_TIME.as_secs()
    )]
    NotDrained,
}

impl Host {
    /// Change a device while it is served.
    ///
    /// # Errors
    /// [`HostError::NoDevice`], [`HostError::Change`], and what the file, an I/O thread or an export refuses: it is served as
    /// before then. When the kernel does not drop what it has cached of the first file, the other one is in its place
    /// nevertheless ([`HostError::Cached`]).
    pub async fn change(&self, name: &str, change: Change) -> Result<(), HostError> {
        let device = self.device(name).ok_or(HostError::NoDevice)?;
        let turn = device.turn.lock().await;
        // It may have been removed meanwhile.
        if !self.device(name).is_some_and(|now| Arc::ptr_eq(&now, &device)) {
            return Err(HostError::NoDevice);
        }
        // What stands on it changes with it, and by nobody else meanwhile.
        let tower = self.tower(&device);
        let mut turns = Vec::new();
        for user in tower.iter().filter(|user| !Arc::ptr_eq(user, &device)) {
            turns.push(user.turn.lock().await);
        }
        if !matches!(
            change,
            Change::Resize { .. } | Change::Resume | Change::Trace(_) | Change::Slow(_) | Change::Timeout(_)
        ) && self.is_passed_by(&device)
        {
            return Err(ChangeError::PassedBy.into());
        }
        let is_of_layers = matches!(
            change,
            Change::Scheduler(_)
                | Change::Parameter { .. }
                | Change::Limits { .. }
                | Change::Slow(_)
                | Change::Timeout(_)
        );
        let file = if let Change::File(path) = &change { Some(path.clone()) } else { None };
        let may_free = file.is_some() || change == Change::Resume;
        self.carry_out(&device, name, change).await?;
        if let Some(file) = file {
            // Whatever stands on it holds something else, too.
            Host::hold_something_else(&tower);
            for export in self.exports_of(&device) {
                if let Err(error) = export.refiled(&file) {
                    tracing::error!(device = %device.name(), %error, "recover would bring the file before");
                }
            }
        }
        if is_of_layers {
            for export in self.exports_of(&device) {
                if let Err(error) = export.relayered(&device) {
                    tracing::error!(device = %device.name(), %error, "recover would bring what was set before");
                }
            }
        }
        drop(turns);
        drop(turn);
        if may_free { self.drop_stale(&tower).await } else { Ok(()) }
    }

    /// Whose turn it is has been seen to.
    async fn carry_out(&self, device: &Arc<Device>, name: &str, change: Change) -> Result<(), HostError> {
        match change {
            Change::Direct(direct) => {
                let wanted = backend_direct(direct);
                let file = Box::new(move |file: &Arc<backends::File>| file.with_direct(wanted));
                self.remake(device, Remake { file, tables: Tables::Keep }).await
            }
            Change::File(path) => {
                let files = device.form().tree.files().len();
                if files > 1 {
                    return Err(ChangeError::ManyFiles(files).into());
                }
                let footing = Footing { files: vec![path.clone()], ..Footing::default() };
                let _coming = self.comes_to_stand_on(device, footing).await?;
                let file = Box::new(move |file: &Arc<backends::File>| file.replaced(path.clone()));
                self.remake(device, Remake { file, tables: Tables::Others }).await
            }
            Change::BadBlocks(change) => {
                let form = device.form();
                let null =
                    form.tree.only_null().ok_or_else(|| ChangeError::NotNull(form.stack.to_string()))?;
                Ok(null.change_bad_blocks(&change).map_err(ChangeError::from)?)
            }
            Change::Resize { size, shrink } => self.resize(device, size.map(Bytes), shrink).await,
            Change::Suspend { flush } => self.suspend(device, flush).await,
            Change::Trace(change) => Ok(Host::change_trace(device, &change).map_err(ChangeError::from)?),
            Change::Scheduler(text) => self.set_scheduler(device, &text).await,
            Change::Parameter { name, value } => Ok(Host::set_parameter(device, &name, &value)?),
            Change::Layer { layer, key, value } => self.set_layer(device, &layer, &key, &value).await,
            Change::Leave => self.leave_device(name).await,
            Change::Slow(limit) => {
                device.slow.set(limit.map(Duration::from_nanos));
                self.refresh_slow(device).await;
                Ok(())
            }
            Change::Timeout(limit) => {
                device.timeouts.set(limit.map(Duration::from_nanos));
                self.refresh_slow(device).await;
                Ok(())
            }
            Change::Limits { set, reset } => self.change_limits(device, &set, reset).await,
            Change::Commit => self.commit(device).await,
            Change::Resume => self.resume_with_loaded(device).await,
        }
    }

    /// How much longer the device would be if it were measured again; `None` when it would not be.
    pub(crate) fn growth(&self, device: &Device) -> Option<Bytes> {
        let form = device.form();
        let file = form.tree.only_file()?;
        let measured = file.measured().ok()?;
        (measured > file.size()).then_some(measured)
    }

    async fn resize(&self, device: &Arc<Device>, size: Option<Bytes>, shrink: bool) -> Result<(), HostError> {
        let form = device.form();
        check_size(&form, size)?;
        let from = form.tree.profile().size;
        let remake = move || Remake {
            file: match size {
                Some(size) => Box::new(move |file| file.resized(size)),
                None => Box::new(|file| file.remeasured()),
            },
            tables: Tables::Reread,
        };
        let to = match size {
            Some(size) => size,
            // Measuring changes nothing, so what would come of it can be seen while it is served.
            None => off_the_runtime(move || Ok(form.tree.remade(&remake())?.profile().size)).await?,
        };
        if to < from && !shrink {
            return Err(ChangeError::Shrinks { from, to }.into());
        }
        self.ask_size(device, from, to)?;
        // Nobody may know of blocks that are not there any more.
        let told = to.min(from);
        self.tell_size(device, from, told).await?;
        let before = device.form();
        let was_whole =
            before.tree.only_file().is_some_and(|file| file.measured().is_ok_and(|len| len == from));
        let mut result = self.remake(device, remake()).await;
        if result.is_ok() {
            result = self.tell_size(device, told, device.size()).await;
            if result.is_err() {
                self.go_back(device, &before).await;
            }
        }
        if result.is_err() {
            self.take_back_size(device, told, from).await;
        }
        // The end of the file goes with the end of the device, and what was added to it in vain goes again.
        if result.is_ok() && device.size() < from || result.is_err() && size.is_some() && was_whole {
            let form = device.form();
            let cut = move || Ok(form.tree.only_file().map_or(Ok(()), |file| file.cut())?);
            result = result.and(off_the_runtime(cut).await);
        }
        result
    }

    /// Give a device the form that it had before a change that was carried out in vain.
    async fn go_back(&self, device: &Arc<Device>, before: &Arc<Form>) {
        let form = before.clone();
        let back = self.exchange(device, move || Ok(Ok(form))).await;
        if let Err(error) = &back {
            tracing::error!(device = %device.name(), %error, "a change that was refused could not be undone");
        }
        self.let_go(device, back.is_ok());
    }

    /// Tell exports the size that they knew before a change that was refused.
    async fn take_back_size(&self, device: &Arc<Device>, told: Bytes, was: Bytes) {
        if let Err(error) = self.tell_size(device, told, was).await {
            tracing::error!(device = %device.name(), %error, "an export does not know that the device has its size still");
        }
    }

    /// Carry out what a suspension held back.
    pub(crate) fn resume(&self, device: &Arc<Device>) {
        tables::resume(&device.form());
        device.set_suspended(false);
        self.settle(&self.tower(device), true);
    }

    /// The same, with the table that was loaded if there is one.
    async fn resume_with_loaded(&self, device: &Arc<Device>) -> Result<(), HostError> {
        let Some((loaded, _coming)) = self.take_loaded(device).await? else {
            self.resume(device);
            return Ok(());
        };
        let result = self.put_to_use(device, &loaded).await;
        if result.is_err() {
            self.put_back(device, loaded);
        }
        result
    }

    /// Put a table to use in place of the one there is, and tell the exports its size. After an error the device has the
    /// table that it had, and its exports know the size that they knew.
    async fn put_to_use(&self, device: &Arc<Device>, loaded: &Arc<Form>) -> Result<(), HostError> {
        let next = tables::below_present_layers(device, loaded)?;
        let (before, was, to) = (device.form(), device.size(), next.tree.profile().size);
        let was_suspended = device.is_suspended();
        self.ask_size(device, was, to)?;
        // Nobody may know of blocks that are not there any more.
        let told = to.min(was);
        self.tell_size(device, was, told).await?;
        let mut result = self.swap_tables(device, &before, &next, false).await;
        if result.is_ok() {
            result = self.tell_size(device, told, device.size()).await;
            if result.is_err()
                && let Err(error) = self.swap_tables(device, &next, &before, was_suspended).await
            {
                tracing::error!(device = %device.name(), %error, "the table before could not be put back");
            }
        }
        if result.is_err() {
            self.take_back_size(device, told, was).await;
            return result;
        }
        if let StackSpec::Table(table) = &next.stack {
            for export in self.exports_of(device) {
                if let Err(error) = export.retabled(table) {
                    tracing::error!(device = %device.name(), %error, "recover would bring the table before");
                }
            }
        }
        Ok(())
    }

    /// Exchange one table for another, and suspend the device or resume it with that. After an error it is as it was.
    async fn swap_tables(
        &self,
        device: &Arc<Device>,
        from: &Arc<Form>,
        to: &Arc<Form>,
        suspended: bool,
    ) -> Result<(), HostError> {
        let was_suspended = device.is_suspended();
        // What waits for a path is carried out by the table that comes.
        tables::presuspend(from, true);
        let given = to.clone();
        // What it stands on may have got another table since it was loaded.
        let make = move || {
            let Form { stack, layers, tree, table } = &*given;
            let (stack, layers, table) = (stack.clone(), layers.clone(), table.clone());
            Ok(Ok(Arc::new(Form { stack, layers, tree: tree.rebased()?, table })))
        };
        let exchanged = self.exchange(device, make).await;
        if exchanged.is_ok() {
            tables::retire(device, from);
            self.table_came.notify_one();
            self.chores_came.notify_one();
            if !suspended {
                tables::resume(to);
            }
            device.set_suspended(suspended);
        } else if !was_suspended {
            tables::resume(from);
        }
        self.let_go(device, exchanged.is_ok());
        exchanged
    }

    pub(crate) async fn suspend(&self, device: &Arc<Device>, flush: bool) -> Result<(), HostError> {
        let was = device.is_suspended();
        device.set_suspended(true);
        tables::presuspend(&device.form(), !flush);
        let tower = self.tower(device);
        let drained = self.freeze(&tower);
        if !flush {
            return Ok(());
        }
        let result = match drained.wait().await {
            Ok(()) => self.flush_drained(device, &tower).await,
            Err(error) => Err(error),
        };
        if result.is_err() && !was {
            self.resume(device);
        }
        result
    }

    /// Put what a drained device has written onto stable storage.
    async fn flush_drained(&self, device: &Arc<Device>, tower: &[Arc<Device>]) -> Result<(), HostError> {
        let form = device.form();
        if form.tree.is_single() {
            // The flush needs the only connection that the server takes, which a queue has.
            self.close_nodes(tower).wait().await?;
        }
        off_the_runtime(move || form.tree.sync()).await
    }

    /// Freeze, drain, swap, thaw.
    async fn remake(&self, device: &Arc<Device>, remake: Remake) -> Result<(), HostError> {
        let before = device.form();
        // What a table's targets made of their devices stays as it was made.
        if before.tree.files().is_empty() || before.table.is_some() {
            return Err(ChangeError::NoFile(before.stack.to_string()).into());
        }
        let form = before.clone();
        let result = self.exchange(device, move || Ok(remade(&form, &remake)?.map(Arc::new))).await;
        if result.is_err() {
            // What shares the open files may have switched them.
            for file in before.tree.files() {
                let _ = file.reinstate();
            }
        }
        self.let_go(device, result.is_ok());
        result
    }

    /// Freeze and drain the device and all that stand on it, and prepare them for another form: the device for what `make`
    /// makes meanwhile. They have it from here on, and their queues switch to it with [`let_go`](Host::let_go), which has to
    /// follow. After an error all of them are what they were, and nothing has been switched.
    pub(crate) async fn exchange(
        &self,
        device: &Arc<Device>,
        make: impl FnOnce() -> Result<Result<Arc<Form>, ChangeError>, DeviceError> + Send + 'static,
    ) -> Result<(), HostError> {
        let tower = self.tower(device);
        tower.iter().for_each(|device| device.set_changing(true));
        self.freeze(&tower).wait().await?;
        self.close_nodes(&tower).wait().await?;
        let form = off_the_runtime(make).await??;
        let is_new = match (&device.form().table, &form.table) {
            (Some(before), Some(next)) => !Arc::ptr_eq(before, next),
            _ => true,
        };
        if is_new {
            let next = form.clone();
            off_the_runtime(move || tables::prepare(&next)).await?;
        }
        let mut coming = vec![(device.clone(), form)];
        for user in tower.iter().filter(|user| !Arc::ptr_eq(user, device)) {
            let Form { stack, layers, tree, table } = &*user.form();
            let (stack, layers, table) = (stack.clone(), layers.clone(), table.clone());
            let form = Form { stack, layers, tree: tree.rebased_on(&coming)?, table };
            coming.push((user.clone(), Arc::new(form)));
        }
        self.prepare(&coming).await?;
        // Nothing fails from here on.
        coming.into_iter().for_each(|(device, form)| device.set_form(form));
        Ok(())
    }

    /// Have every queue of these devices prepare a stack for the form that its device is about to have.
    async fn prepare(&self, coming: &[(Arc<Device>, Arc<Form>)]) -> Result<(), HostError> {
        let mut answers = Vec::new();
        for (device, form) in coming {
            for reactor in self.reactors() {
                let (done, is_done) = oneshot::channel();
                reactor.step(device.clone(), Step::Prepare(form.clone(), done));
                answers.push(is_done);
            }
        }
        let mut result = Ok(());
        for answer in answers {
            // A reactor that is gone has no queue of it.
            result = result.and(answer.await.unwrap_or(Ok(())));
        }
        Ok(result?)
    }

    /// An exchange is over: `keep` what was prepared, and thaw.
    pub(crate) fn let_go(&self, device: &Arc<Device>, keep: bool) {
        let tower = self.tower(device);
        tower.iter().for_each(|device| device.set_changing(false));
        self.settle(&tower, keep);
    }

    /// A device and all that stand on it, each behind those that it stands on.
    fn tower(&self, device: &Arc<Device>) -> Vec<Arc<Device>> {
        let mut tower = self.devices();
        tower.retain(|other| Arc::ptr_eq(other, device) || other.form().tree.stands_on(device));
        let below: Vec<usize> = tower
            .iter()
            .map(|upper| tower.iter().filter(|lower| upper.form().tree.stands_on(lower)).count())
            .collect();
        let mut numbered: Vec<_> = below.into_iter().zip(tower).collect();
        numbered.sort_by_key(|(below, _)| *below);
        let mut tower: Vec<_> = numbered.into_iter().map(|(_, device)| device).collect();
        if tower.is_empty() {
            // It is being removed.
            tower.push(device.clone());
        }
        tower
    }

    fn freeze(&self, tower: &[Arc<Device>]) -> Drained {
        Drained(self.step_all(tower, Step::Freeze))
    }

    /// Have the nodes of a frozen and drained tower close their connections.
    fn close_nodes(&self, tower: &[Arc<Device>]) -> Drained {
        Drained(self.step_all(tower, Step::Close))
    }

    fn settle(&self, tower: &[Arc<Device>], keep: bool) {
        for device in tower {
            for reactor in self.reactors() {
                reactor.step(device.clone(), Step::Settle { keep });
            }
        }
    }

    fn step_all<T>(
        &self,
        tower: &[Arc<Device>],
        step: impl Fn(oneshot::Sender<T>) -> Step,
    ) -> Vec<oneshot::Receiver<T>> {
        let ask = |(device, reactor): (&Arc<Device>, &crate::reactor::Reactor)| {
            let (done, is_done) = oneshot::channel();
            reactor.step(device.clone(), step(done));
            is_done
        };
        let reactors = self.reactors();
        tower
            .iter()
            .flat_map(|device| reactors.iter().map(move |reactor| (device, reactor)))
            .map(ask)
            .collect()
    }
}

/// Reactors that were told to freeze a device, or to close its nodes.
struct Drained(Vec<oneshot::Receiver<()>>);

impl Drained {
    async fn wait(self) -> Result<(), HostError> {
        let all = async {
            for drained in self.0 {
                // A reactor that is gone has nothing under way.
                let _ = drained.await;
            }
        };
        tokio::time::timeout(DRAIN_TIME, all).await.map_err(|_| ChangeError::NotDrained.into())
    }
}

/// Run what may wait for a disk beside the control plane.
pub(crate) async fn off_the_runtime<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, DeviceError> + Send + 'static,
) -> Result<T, HostError> {
    match tokio::task::spawn_blocking(work).await {
        Ok(result) => Ok(result?),
        Err(panic) => std::panic::resume_unwind(panic.into_panic()),
    }
}

/// Whether it can have another size at all.
fn check_size(form: &Form, size: Option<Bytes>) -> Result<(), ChangeError> {
    if form.table.is_some() {
        return Err(ChangeError::KeepsSize(form.stack.to_string()));
    }
    match (form.tree.size_of(), size) {
        (SizeOf::File, _) | (SizeOf::Partition, None) => Ok(()),
        (SizeOf::Partition, Some(_)) => Err(ChangeError::Partition),
        (SizeOf::Overlay, _) => Err(ChangeError::Overlay),
        (SizeOf::Other, _) => Err(ChangeError::KeepsSize(form.stack.to_string())),
    }
}

/// The device as it will be, and as it would be typed then.
fn remade(form: &Form, remake: &Remake) -> Result<Result<Form, ChangeError>, DeviceError> {
    let tree: Tree = form.tree.remade(remake)?;
    let (from, to) = (form.tree.profile().size, tree.profile().size);
    if remake.tables == Tables::Others && from != to {
        return Ok(Err(ChangeError::OtherPartition { from, to }));
    }
    let (mut stack, mut layers) = (form.stack.clone(), form.layers.clone());
    // Files stand in the order of the walk: that of the stack, unless it is an image, then those of its layers from the
    // lowest up.
    let mut files = tree.files().into_iter().map(|file| file.spec());
    if let StackSpec::File(spec) = &mut stack
        && !spec.is_image()
        && let Some(now) = files.next()
    {
        spec.path.clone_from(&now.path);
        spec.sizelimit = now.sizelimit;
        spec.create = None;
        spec.direct = spec_direct(now.direct);
    }
    let overlays = layers.iter_mut().filter_map(|layer| match layer {
        LayerSpec::Cow(spec) => Some(spec),
        _ => None,
    });
    for (spec, now) in overlays.zip(files) {
        spec.direct = spec_direct(now.direct);
    }
    Ok(Ok(Form { stack, layers, tree, table: form.table.clone() }))
}

fn spec_direct(direct: backends::Direct) -> Direct {
    match direct {
        backends::Direct::Auto => Direct::Auto,
        backends::Direct::On => Direct::On,
        backends::Direct::Off => Direct::Off,
    }
}

fn backend_direct(direct: Direct) -> backends::Direct {
    match direct {
        Direct::Auto => backends::Direct::Auto,
        Direct::On => backends::Direct::On,
        Direct::Off => backends::Direct::Off,
    }
}

#[cfg(test)]
mod tests;
