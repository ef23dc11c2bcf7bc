//! A device: a tree of layers and backends under a name, with its state and counters.
//!
//! The shared parts of the tree are created once, here, on the control plane; every reactor that serves the
//! device gets nodes of its own from [`Device::build_nodes`].

pub(crate) mod dependencies;
pub(crate) mod tree;

use crate::connect::ConnectError;
use crate::observe::sample::SampleBuffers;
use crate::observe::slow::SlowLog;
use crate::observe::timeouts::Timeouts;
use crate::observe::trace::TraceSession;
use crate::programs::ProgramError;
use crate::spec::{DeviceName, DiskFileSpec, FileFormat, Format, LayerSpec, StackSpec};
use backends::{CustomError, Fact, Features, NullError, OpenError, RamError};
use block::{Bytes, Integrity, LimitsError, ParseLimitsError, Profile, QueueLimits};
use dependencies::Dependencies;
use images::ImageError;
use queue::{BusyTogether, DEPTH_MAX, Nanos, QueueStats, QueueWaker, RangeLock, Snapshot, StackError};
use rbd::{Rbd, RbdError};
use ring::KernelRing;
use std::collections::BTreeMap;
use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::Relaxed, Ordering::SeqCst};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, RwLock, Weak};
use std::time::{Duration, Instant};
pub use tree::TableError;
use tree::Tree;
pub(crate) use tree::{BuiltNodes, RingResources};
pub use tree::{CommitError, CowError, PartError};
use tree::{Loaded, OpenContext};

/// Size of a page of the page cache, in bytes.
const PAGE_LEN: u32 = 4096;

/// Settings of a device.
#[derive(Clone, Debug)]
pub struct DeviceConfig {
    /// Name.
    pub name: DeviceName,
    /// The backend.
    pub stack: StackSpec,
    /// Layers, bottom first.
    pub layers: Vec<LayerSpec>,
    /// Queue limits of the whole device; empty: those of its stack.
    pub limits: String,
    /// Queue depth: requests in flight on each hardware queue.
    pub depth: u16,
    /// Requests that take this long are logged; `None`: none.
    pub slow: Option<Duration>,
    /// Requests that take longer are cancelled; `None`: none.
    pub io_timeout: Option<Duration>,
}

/// Why a device cannot be created.
#[derive(Debug, thiserror::Error)]
pub enum DeviceError {
    /// The file cannot be opened.
    #[error(transparent)]
    File(#[from] OpenError),
    /// The image cannot be opened.
    #[error(transparent)]
    Image(#[from] ImageError),
    /// An option of raw files is given for an image.
    #[error("{}: {option} does not apply to a {format} image (leave it out, or add format=raw)", path.display())]
    RawOnly {
        /// The image.
        path: PathBuf,
        /// Format of the image.
        format: Format,
        /// The option.
        option: &'static str,
    },
    /// A snapshot of an image whose format has none.
    #[error("{}: snapshots of {format} images cannot be served (those of qcow2 images can)", path.display())]
    NoSnapshots {
        /// The file.
        path: PathBuf,
        /// Format of the image.
        format: Format,
    },
    /// A layer refuses what is below it, or one of its files.
    #[error("layer {name}: {why}")]
    Layer {
        /// Name of the layer.
        name: &'static str,
        /// The reason.
        why: String,
    },
    /// The memory cannot be allocated.
    #[error(transparent)]
    Ram(#[from] RamError),
    /// The null device's options are refused.
    #[error(transparent)]
    Null(#[from] NullError),
    /// The image of a cluster cannot be used.
    #[error(transparent)]
    Rbd(#[from] RbdError),
    /// The NBD server cannot be used.
    #[error(transparent)]
    Nbd(#[from] ConnectError),
    /// The driver cannot be used.
    #[error(transparent)]
    Custom(#[from] CustomError),
    /// The program cannot be used.
    #[error(transparent)]
    Program(#[from] ProgramError),
    /// The limits contradict each other or those below.
    #[error("{0}")]
    Limits(#[from] LimitsError),
    /// The limits are malformed.
    #[error("{0}")]
    LimitsText(#[from] ParseLimitsError),
    /// The partition cannot be served.
    #[error(transparent)]
    Part(#[from] PartError),
    /// The overlay cannot be opened.
    #[error(transparent)]
    Cow(#[from] CowError),
    /// The table is refused.
    #[error(transparent)]
    Table(#[from] TableError),
    /// The overlay cannot be committed.
    #[error(transparent)]
    Commit(#[from] CommitError),
    /// The destination of a move does not fit.
    #[error("{0}")]
    Move(String),
    /// The stack has more layers than a request's path can hold.
    #[error("{0} layers and a backend exceed the maximum of {DEPTH_MAX} nodes (use fewer layers)")]
    TooDeep(usize),
    /// The depth needs too many requests and children.
    #[error("{0} (choose a smaller --depth)")]
    Stack(#[from] StackError),
    /// A ring has no room for another file or region.
    #[error("an I/O thread cannot serve the device: {0}")]
    Ring(#[from] io::Error),
}

/// A hardware queue of a device, as the control plane sees it.
pub struct HardwareQueue {
    /// Number of its reactor.
    pub reactor: usize,
    /// Counters of the queue.
    pub stats: Arc<QueueStats>,
    /// Number of its NBD connections.
    pub connections: Arc<AtomicU32>,
}

/// Limits that were reported to hosts.
#[derive(Default)]
pub(crate) struct ReportedLimits {
    /// Outcome of the report to each export, by its address.
    pub(crate) text: BTreeMap<String, String>,
    /// By file in sysfs: the value before the first change, and the value written last.
    pub(crate) sysfs: BTreeMap<PathBuf, (u64, u64)>,
}

/// The parts of a device, which may change while it is served (see the folder `change`).
pub(crate) struct Composition {
    /// The stack, as it would be typed.
    pub(crate) stack: StackSpec,
    /// The layers above it, bottom first.
    pub(crate) layers: Vec<LayerSpec>,
    /// The tree that serves it.
    pub(crate) tree: Tree,
    /// The targets, if it has a table.
    pub(crate) table: Option<Arc<Loaded>>,
}

/// A move of a device's contents to another stack, in progress.
#[derive(Debug)]
pub(crate) struct MoveState {
    /// The destination, as it would be typed.
    pub(crate) to: String,
    /// It ends soon, and the device keeps its previous contents.
    pub(crate) is_cancelled: AtomicBool,
}

/// State of a device besides its active table.
#[derive(Default)]
pub(crate) struct TableState {
    /// The inactive table, which the next resume activates.
    pub(crate) inactive: Option<Arc<Composition>>,
    /// Dependencies that the device is about to get, during a change; empty otherwise.
    pub(crate) pending: Option<Arc<Dependencies>>,
    /// Events of tables that are gone, and of the device itself.
    pub(crate) past_events: u32,
    /// UUID that was set after the device was created.
    pub(crate) uuid: Option<String>,
}

/// A device.
pub struct Device {
    name: RwLock<DeviceName>,
    number: usize,
    composition: RwLock<Arc<Composition>>,
    /// The inactive table, and what past tables have counted.
    pub(crate) slot: Mutex<TableState>,
    /// Held while the device is changed or removed.
    pub(crate) change_lock: tokio::sync::Mutex<()>,
    /// The move of its contents to another stack, if there is one.
    pub(crate) moving: Mutex<Option<Arc<MoveState>>>,
    changing: AtomicBool,
    suspended: AtomicBool,
    /// The device is being removed: no other device may start to use it.
    being_removed: AtomicBool,
    /// A thread reads its partition table, for `show`.
    pub(crate) is_reading_partitions: AtomicBool,
    /// Its content was replaced, so the kernel may have stale data of it in its caches.
    pub(crate) has_stale_cache: AtomicBool,
    depth: u16,
    queues: Mutex<Vec<Arc<HardwareQueue>>>,
    /// Counters of queues that are gone.
    past: Mutex<Snapshot>,
    /// Busy time of its queues together.
    busy: Arc<BusyTogether>,
    /// By node: whether it is the same as before the last change of the composition.
    unchanged_nodes: Mutex<Vec<bool>>,
    opened: Instant,
    /// The running trace; `None`: the device is not traced.
    trace: Mutex<Option<Arc<TraceSession>>>,
    /// Limits that were reported to its hosts.
    pub(crate) reported_limits: Mutex<ReportedLimits>,
    /// Buffers of its sampler; dangling if it is not sampled.
    sample: Mutex<Weak<SampleBuffers>>,
    /// The limit above which a request is logged as slow.
    pub slow: SlowLog,
    /// How often limits of NBD clients took effect.
    pub limit_counts: Arc<exports::nbd::LimitCounts>,
    /// Its request timeout, and how many requests timed out.
    pub timeouts: Timeouts,
    /// Range lock for sub-block writes; empty until an export needs it.
    range_lock: OnceLock<Arc<RangeLock>>,
}

impl Device {
    pub(crate) fn open(
        config: &DeviceConfig,
        number: usize,
        context: &OpenContext<'_>,
    ) -> Result<Device, DeviceError> {
        let composition = tree::open(config, context)?;
        tree::targets::prepare(&composition)?;
        Ok(Device {
            name: RwLock::new(config.name.clone()),
            number,
            composition: RwLock::new(Arc::new(composition)),
            slot: Mutex::default(),
            change_lock: tokio::sync::Mutex::default(),
            moving: Mutex::default(),
            changing: AtomicBool::new(false),
            suspended: AtomicBool::new(false),
            being_removed: AtomicBool::new(false),
            is_reading_partitions: AtomicBool::new(false),
            has_stale_cache: AtomicBool::new(false),
            depth: config.depth,
            queues: Mutex::default(),
            past: Mutex::default(),
            busy: Arc::default(),
            unchanged_nodes: Mutex::default(),
            opened: Instant::now(),
            trace: Mutex::default(),
            reported_limits: Mutex::default(),
            sample: Mutex::default(),
            slow: SlowLog::new(config.slow),
            limit_counts: Arc::default(),
            timeouts: Timeouts::new(config.io_timeout),
            range_lock: OnceLock::new(),
        })
    }

    /// Returns whether its data outlives this process.
    pub fn survives(&self) -> bool {
        self.stack().survives() && self.composition().tree.survives()
    }

    /// Returns whether its data outlives this process, without regard to the devices that it uses.
    pub(crate) fn survives_itself(&self) -> bool {
        self.stack().survives() && self.composition().tree.survives_itself()
    }

    /// Returns its name.
    pub fn name(&self) -> DeviceName {
        self.name.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Renames it.
    pub(crate) fn set_name(&self, name: DeviceName) {
        *self.name.write().unwrap_or_else(PoisonError::into_inner) = name;
    }

    /// Number in this process, which no other device ever has.
    pub fn number(&self) -> usize {
        self.number
    }

    /// Returns the RBD image under the device, if it is the only backend.
    pub fn rbd_image(&self) -> Option<Arc<Rbd>> {
        self.composition().tree.only_rbd().cloned()
    }

    pub(crate) fn composition(&self) -> Arc<Composition> {
        self.composition.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Sets its composition. Its queues are frozen and drained, and are given new stacks next.
    pub(crate) fn set_composition(&self, composition: Arc<Composition>) {
        let nodes = composition.tree.node_names();
        let before = std::mem::replace(
            &mut *self.composition.write().unwrap_or_else(PoisonError::into_inner),
            composition,
        );
        let before = before.tree.node_names();
        let unchanged_nodes: Vec<bool> =
            nodes.iter().enumerate().map(|(number, node)| before.get(number) == Some(node)).collect();
        let mut past = self.past.lock().unwrap_or_else(PoisonError::into_inner);
        for (number, counts) in past.nodes.iter_mut().enumerate() {
            if unchanged_nodes.get(number) != Some(&true) {
                *counts = Default::default();
            }
        }
        *self.unchanged_nodes.lock().unwrap_or_else(PoisonError::into_inner) = unchanged_nodes;
    }

    /// Returns whether the node of that number is the same as before the last change: its counters are kept.
    pub(crate) fn is_node_unchanged(&self, node: usize) -> bool {
        self.unchanged_nodes.lock().unwrap_or_else(PoisonError::into_inner).get(node) == Some(&true)
    }

    /// Returns whether a change is in progress: no queue is created meanwhile.
    pub(crate) fn is_changing(&self) -> bool {
        self.changing.load(SeqCst)
    }

    pub(crate) fn set_changing(&self, changing: bool) {
        self.changing.store(changing, SeqCst);
    }

    /// Returns whether it is being removed.
    pub(crate) fn is_being_removed(&self) -> bool {
        self.being_removed.load(SeqCst)
    }

    pub(crate) fn set_being_removed(&self, leaving: bool) {
        self.being_removed.store(leaving, SeqCst);
    }

    /// Returns whether it is suspended: its requests are held until it is resumed.
    pub fn is_suspended(&self) -> bool {
        self.suspended.load(SeqCst)
    }

    /// Returns whether requests are held because it, or a device that it uses, is suspended.
    pub fn is_io_suspended(&self) -> bool {
        self.is_suspended() || self.composition().tree.is_io_suspended()
    }

    /// Returns whether it uses another device, or would with its inactive table.
    pub(crate) fn uses(&self, other: &Arc<Device>) -> bool {
        let loaded = self.slot.lock().unwrap_or_else(PoisonError::into_inner).inactive.clone();
        self.composition().tree.depends_on(other)
            || loaded.is_some_and(|composition| composition.tree.depends_on(other))
    }

    pub(crate) fn set_suspended(&self, suspended: bool) {
        self.suspended.store(suspended, SeqCst);
    }

    /// Returns the profile of the whole stack, without features that a backend was seen not to have.
    pub fn profile(&self) -> Profile {
        self.composition().tree.current_profile()
    }

    /// Returns the integrity data that it keeps.
    pub fn integrity(&self) -> Option<Integrity> {
        self.composition().tree.integrity()
    }

    /// Returns whether its layers hide integrity data that is kept below them.
    pub fn hides_integrity(&self) -> bool {
        self.composition().tree.hides_integrity()
    }

    /// Describes its stack, as it would be typed.
    pub fn description(&self) -> String {
        self.composition().stack.to_string()
    }

    /// Describes its stack to clients: the backend's kind, and the format of a file. Paths, addresses of
    /// other servers and tables are not disclosed.
    pub fn public_description(&self) -> String {
        match self.stack() {
            StackSpec::File(DiskFileSpec { format: FileFormat::Given(format), .. }) => {
                format!("{format} file")
            }
            stack @ (StackSpec::File(_)
            | StackSpec::Nbd(_)
            | StackSpec::Rbd(_)
            | StackSpec::Exec(_)
            | StackSpec::Nbdkit(_)
            | StackSpec::Table(_)) => stack.kind().to_owned(),
            stack => stack.to_string(),
        }
    }

    /// Returns the stack that it was created from.
    pub fn stack(&self) -> StackSpec {
        self.composition().stack.clone()
    }

    /// Returns whether the kernel is to scan for partitions, for exports that are kernel block devices.
    pub fn wants_partitions(&self) -> bool {
        matches!(&self.composition().stack, StackSpec::File(file) if file.partscan)
    }

    /// Returns the layers above its backend, bottom first.
    pub fn layers(&self) -> Vec<LayerSpec> {
        self.composition().layers.clone()
    }

    /// Returns its size.
    pub fn size(&self) -> Bytes {
        self.composition().tree.profile().size
    }

    /// Returns whether writes are refused.
    pub fn read_only(&self) -> bool {
        self.composition().tree.profile().read_only
    }

    /// Opens the file behind it, if the device is exactly that file. `None`: it is not.
    pub fn plain_file(&self) -> Option<io::Result<OwnedFd>> {
        self.composition().tree.plain_file()
    }

    /// Returns the features that it supports.
    pub fn abilities(&self) -> Features {
        self.profile().abilities
    }

    /// Returns the limits of the whole stack.
    pub fn limits(&self) -> QueueLimits {
        self.profile().limits
    }

    /// Returns the finest offset and length of requests, in bytes: 1 if backend and layers accept any, else
    /// the logical block size.
    pub fn block_size_min(&self) -> u32 {
        let block = self.limits().logical_block_size.0 as u32;
        if self.composition().tree.profile().bytewise && block == 512 { 1 } else { block }
    }

    /// Returns the smallest length of a write without read-modify-write, in bytes.
    pub fn block_size_preferred(&self) -> u32 {
        (self.limits().physical_block_size.0 as u32).max(PAGE_LEN)
    }

    /// Describes the backend, for `show`.
    pub fn describe(&self) -> Vec<Fact> {
        self.composition().tree.describe()
    }

    /// Returns whether writes to its file's first sector are checked, as the file's format was not given.
    /// Such a file must not be passed through to the kernel.
    pub fn checks_head(&self) -> bool {
        self.composition().tree.only_file().is_some_and(|file| file.shared().facts().head > 0)
    }

    /// Returns whether it has a single hardware queue.
    pub fn is_single(&self) -> bool {
        self.composition().tree.is_single()
    }

    /// Returns the queue depth of each hardware queue.
    pub fn depth(&self) -> u16 {
        self.depth
    }

    /// Builds the nodes of a queue, on the thread that owns `ring`. `waker` wakes that queue.
    pub(crate) fn build_nodes(
        &self,
        ring: &mut KernelRing,
        depth: u16,
        waker: QueueWaker,
    ) -> Result<BuiltNodes, DeviceError> {
        self.composition().tree.build_nodes(ring, depth, waker)
    }

    pub(crate) fn add_queue(&self, reactor: usize, stats: Arc<QueueStats>) -> Arc<HardwareQueue> {
        stats.share(self.busy.clone());
        let queue = Arc::new(HardwareQueue { reactor, stats, connections: Arc::default() });
        self.lock_queues().push(queue.clone());
        queue
    }

    pub(crate) fn remove_queue(&self, queue: &Arc<HardwareQueue>) {
        self.lock_queues().retain(|other| !Arc::ptr_eq(other, queue));
        let mut past = self.past.lock().unwrap_or_else(PoisonError::into_inner);
        past.add(&queue.stats.snapshot(Nanos(0)));
    }

    fn lock_queues(&self) -> std::sync::MutexGuard<'_, Vec<Arc<HardwareQueue>>> {
        self.queues.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lists its hardware queues.
    pub fn queues(&self) -> Vec<Arc<HardwareQueue>> {
        self.lock_queues().clone()
    }

    /// Returns the number of its NBD connections.
    pub fn connections(&self) -> u32 {
        self.lock_queues().iter().map(|queue| queue.connections.load(Relaxed)).sum()
    }

    /// Returns the busy time of its queues together.
    pub fn busy(&self) -> &BusyTogether {
        &self.busy
    }

    /// Returns the counters of queues that are gone.
    pub fn past(&self) -> Snapshot {
        self.past.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Returns the range lock for sub-block writes, which is created if needed. Queues take it into
    /// account once their reactors have refreshed them.
    pub fn range_lock_or_init(&self) -> &Arc<RangeLock> {
        self.range_lock.get_or_init(Arc::default)
    }

    /// Returns the range lock for sub-block writes, if there is one.
    pub(crate) fn range_lock(&self) -> Option<&Arc<RangeLock>> {
        self.range_lock.get()
    }

    /// Returns its trace session.
    pub(crate) fn trace(&self) -> Option<Arc<TraceSession>> {
        self.lock_trace().clone()
    }

    /// Sets its trace session, unless it has one. Returns whether it was set.
    pub(crate) fn begin_trace(&self, session: &Arc<TraceSession>) -> bool {
        let mut trace = self.lock_trace();
        let free = trace.is_none();
        if free {
            *trace = Some(session.clone());
        }
        free
    }

    /// Removes its trace session.
    pub(crate) fn end_trace(&self) {
        *self.lock_trace() = None;
    }

    fn lock_trace(&self) -> std::sync::MutexGuard<'_, Option<Arc<TraceSession>>> {
        self.trace.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the buffers of its sampler.
    pub(crate) fn sample(&self) -> Option<Arc<SampleBuffers>> {
        self.sample.lock().unwrap_or_else(PoisonError::into_inner).upgrade()
    }

    pub(crate) fn set_sample(&self, buffers: Weak<SampleBuffers>) {
        *self.sample.lock().unwrap_or_else(PoisonError::into_inner) = buffers;
    }

    /// Lists its nodes by number: depth from 0, and name.
    pub(crate) fn nodes(&self) -> Vec<(u8, &'static str)> {
        self.composition().tree.node_names()
    }

    /// Returns the labels of its nodes, by number: see [`Tree::labels`].
    pub(crate) fn labels(&self) -> Vec<String> {
        self.composition().tree.labels()
    }

    /// Describes its nodes for a trace.
    pub(crate) fn trace_roles(&self) -> Vec<trace::NodeRole> {
        self.composition().tree.trace_roles()
    }

    /// Returns the time since it was opened.
    pub fn uptime(&self) -> Duration {
        self.opened.elapsed()
    }
}
