//! A device: a tree of layers and backends under a name, and what the two of them promise.
//!
//! The shared parts of the tree are made once, here, on the control plane; every reactor that serves the
//! device gets nodes of its own from [`Device::mount`].

use crate::dial::DialError;
use crate::glance::Lanes;
use crate::limits::Told;
use crate::reactor::Nudge;
use crate::slow::SlowLog;
use crate::spec::{DeviceName, FileFormat, FileSpec, Format, LayerSpec, StackSpec};
use crate::stacking::Footing;
use crate::timeouts::Timeouts;
use crate::trace::Session;
pub use crate::tree::TableError;
use crate::tree::{self, Tree};
pub use crate::tree::{CommitError, CowError, PartError};
pub(crate) use crate::tree::{Held, Mounted};
use crate::tree::{Loaded, Surroundings};
use backends::{CompletionError, Fact, Features, NullError, OpenError, RamError};
use block::{Bytes, Integrity, LimitsError, ParseLimitsError, Profile, QueueLimits};
use images::ImageError;
use queue::{BusyTogether, DEPTH_MAX, Gate, Nanos, QueueStats, Snapshot, StackError};
use ring::KernelRing;
use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::Relaxed, Ordering::SeqCst};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, RwLock, Weak};
use std::time::{Duration, Instant};

/// A page of the page cache, in bytes.
const PAGE_LEN: u32 = 4096;

/// What a device is made from.
#[derive(Clone, Debug)]
pub struct DeviceConfig {
    /// Its name.
    pub name: DeviceName,
    /// The backend.
    pub stack: StackSpec,
    /// Layers, in the order in which they are stacked upwards.
    pub layers: Vec<LayerSpec>,
    /// Queue limits to hold the whole device to; empty: those of its stack.
    pub limits: String,
    /// Requests in flight on each hardware queue.
    pub depth: u16,
    /// Requests that take so long are told of in the log; none: none are.
    pub slow: Option<Duration>,
    /// Requests that take longer are cancelled; none: none are.
    pub io_timeout: Option<Duration>,
}

/// Why a device cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum DeviceError {
    /// The file.
    #[error(transparent)]
    File(#[from] OpenError),
    /// The image.
    #[error(transparent)]
    Image(#[from] ImageError),
    /// An option that means nothing for an image.
    #[error("{}: it is a {format} image, for which {option} means nothing (leave it out, or add format=raw)", path.display())]
    RawOnly {
        /// The image.
        path: PathBuf,
        /// Its format.
        format: Format,
        /// The option.
        option: &'static str,
    },
    /// A snapshot of an image that has none.
    #[error("{}: {format} images have no snapshots that could be served (qcow2 images do)", path.display())]
    NoSnapshots {
        /// The file.
        path: PathBuf,
        /// Its format.
        format: Format,
    },
    /// A layer does not take what stands below it, or one of its files.
    #[error("layer {name}: {why}")]
    Layer {
        /// Its name.
        name: &'static str,
        /// Why.
        why: String,
    },
    /// The memory.
    #[error(transparent)]
    Ram(#[from] RamError),
    /// The null device.
    #[error(transparent)]
    Null(#[from] NullError),
    /// The server.
    #[error(transparent)]
    Nbd(#[from] DialError),
    /// The completion time.
    #[error(transparent)]
    Completion(#[from] CompletionError),
    /// The limits.
    #[error("{0}")]
    Limits(#[from] LimitsError),
    /// The text of the limits.
    #[error("{0}")]
    LimitsText(#[from] ParseLimitsError),
    /// The partition.
    #[error(transparent)]
    Part(#[from] PartError),
    /// The overlay.
    #[error(transparent)]
    Cow(#[from] CowError),
    /// The table.
    #[error(transparent)]
    Table(#[from] TableError),
    /// Committing the overlay.
    #[error(transparent)]
    Commit(#[from] CommitError),
    /// More layers than a request's path holds.
    #[error("{0} layers and a backend are more than the {DEPTH_MAX} that fit (leave some out)")]
    TooDeep(usize),
    /// Too many requests and children.
    #[error("{0} (choose a smaller --depth)")]
    Stack(#[from] StackError),
    /// A ring has no room for another file or region.
    #[error("an I/O thread cannot take the device on: {0}")]
    Ring(#[from] io::Error),
}

/// A hardware queue of a device, as others see it.
pub struct Lane {
    /// The reactor that owns it.
    pub reactor: usize,
    /// Its counters.
    pub stats: Arc<QueueStats>,
    /// NBD connections that it serves.
    pub connections: Arc<AtomicU32>,
}

/// What of a device may change while it is served: see [`change`](crate::change).
pub(crate) struct Form {
    /// What it is made from.
    pub(crate) stack: StackSpec,
    /// What stands on that, bottom first.
    pub(crate) layers: Vec<LayerSpec>,
    /// What serves it.
    pub(crate) tree: Tree,
    /// The targets, if it is made from a table.
    pub(crate) table: Option<Arc<Loaded>>,
}

/// What a device has besides the table in use.
#[derive(Default)]
pub(crate) struct Slot {
    /// The table that the next resume puts to use.
    pub(crate) inactive: Option<Arc<Form>>,
    /// What it is about to stand on, in the middle of a change; empty otherwise.
    pub(crate) coming: Option<Arc<Footing>>,
    /// Events of tables that are gone, and of the device itself.
    pub(crate) past_events: u32,
    /// What it was called besides its name after it was made without that.
    pub(crate) uuid: Option<String>,
}

/// A device.
pub struct Device {
    name: RwLock<DeviceName>,
    number: usize,
    form: RwLock<Arc<Form>>,
    /// The table that is loaded and not in use, and what tables that are gone have counted.
    pub(crate) slot: Mutex<Slot>,
    /// Held by whoever changes or removes it.
    pub(crate) turn: tokio::sync::Mutex<()>,
    changing: AtomicBool,
    suspended: AtomicBool,
    /// It is being taken away: no other device comes to stand on it.
    leaving: AtomicBool,
    /// A thread reads its partition table, to tell of it.
    pub(crate) reads_table: AtomicBool,
    /// It holds something else than what the kernel may have cached of it.
    pub(crate) is_cached_wrongly: AtomicBool,
    depth: u16,
    lanes: Mutex<Vec<Arc<Lane>>>,
    /// What queues that are gone have counted.
    past: Mutex<Snapshot>,
    /// When its queues are busy, all together.
    busy: Arc<BusyTogether>,
    /// By node: it is what it was before the form last changed.
    as_before: Mutex<Vec<bool>>,
    opened: Instant,
    /// Who listens to its queues; none: nobody.
    trace: Mutex<Option<Arc<Session>>>,
    /// What its hosts were told of limits that changed.
    pub(crate) told: Mutex<Told>,
    /// Who looks at where its requests go; gone: nobody.
    glance: Mutex<Weak<Lanes>>,
    /// What is said of slow requests.
    pub(crate) slow: SlowLog,
    /// How often limits of NBD clients took effect.
    pub(crate) limit_counts: Arc<exports::nbd::LimitCounts>,
    /// From how long on requests are cancelled, and how many were.
    pub(crate) timeouts: Timeouts,
    /// Keeps writes from those that write parts of blocks; none: nobody has ever done so.
    gate: OnceLock<Arc<Gate>>,
}

impl Device {
    pub(crate) fn open(
        config: &DeviceConfig,
        number: usize,
        around: &Surroundings<'_>,
    ) -> Result<Device, DeviceError> {
        let form = tree::open(config, around)?;
        crate::tables::prepare(&form)?;
        Ok(Device {
            name: RwLock::new(config.name.clone()),
            number,
            form: RwLock::new(Arc::new(form)),
            slot: Mutex::default(),
            turn: tokio::sync::Mutex::default(),
            changing: AtomicBool::new(false),
            suspended: AtomicBool::new(false),
            leaving: AtomicBool::new(false),
            reads_table: AtomicBool::new(false),
            is_cached_wrongly: AtomicBool::new(false),
            depth: config.depth,
            lanes: Mutex::default(),
            past: Mutex::default(),
            busy: Arc::default(),
            as_before: Mutex::default(),
            opened: Instant::now(),
            trace: Mutex::default(),
            told: Mutex::default(),
            glance: Mutex::default(),
            slow: SlowLog::new(config.slow),
            limit_counts: Arc::default(),
            timeouts: Timeouts::new(config.io_timeout),
            gate: OnceLock::new(),
        })
    }

    /// Whether what it holds is there after its process.
    pub fn survives(&self) -> bool {
        self.stack().survives() && self.form().tree.survives()
    }

    /// The same, leaving out the devices that it stands on.
    pub(crate) fn survives_itself(&self) -> bool {
        self.stack().survives() && self.form().tree.survives_itself()
    }

    /// Its name.
    pub fn name(&self) -> DeviceName {
        self.name.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// From now on it is called that.
    pub(crate) fn set_name(&self, name: DeviceName) {
        *self.name.write().unwrap_or_else(PoisonError::into_inner) = name;
    }

    /// Its number in this process, which no other device ever has.
    pub fn number(&self) -> usize {
        self.number
    }

    /// What it is at the moment.
    pub(crate) fn form(&self) -> Arc<Form> {
        self.form.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// From now on it is that. Its queues are frozen and drained, and are given new stacks next.
    pub(crate) fn set_form(&self, form: Arc<Form>) {
        let nodes = form.tree.names();
        let before = std::mem::replace(&mut *self.form.write().unwrap_or_else(PoisonError::into_inner), form);
        let before = before.tree.names();
        let as_before: Vec<bool> =
            nodes.iter().enumerate().map(|(number, node)| before.get(number) == Some(node)).collect();
        let mut past = self.past.lock().unwrap_or_else(PoisonError::into_inner);
        for (number, counts) in past.nodes.iter_mut().enumerate() {
            if as_before.get(number) != Some(&true) {
                *counts = Default::default();
            }
        }
        *self.as_before.lock().unwrap_or_else(PoisonError::into_inner) = as_before;
    }

    /// Whether the node of that number is what it was before its form last changed: its counters go on.
    pub(crate) fn is_as_before(&self, node: usize) -> bool {
        self.as_before.lock().unwrap_or_else(PoisonError::into_inner).get(node) == Some(&true)
    }

    /// A change is under way: no queue is made for it now.
    pub(crate) fn is_changing(&self) -> bool {
        self.changing.load(SeqCst)
    }

    pub(crate) fn set_changing(&self, changing: bool) {
        self.changing.store(changing, SeqCst);
    }

    /// Whether it is being taken away.
    pub(crate) fn is_leaving(&self) -> bool {
        self.leaving.load(SeqCst)
    }

    pub(crate) fn set_leaving(&self, leaving: bool) {
        self.leaving.store(leaving, SeqCst);
    }

    /// Whether its requests are held back until it is resumed.
    pub fn is_suspended(&self) -> bool {
        self.suspended.load(SeqCst)
    }

    /// Whether they are held back for its own sake or for that of a device that it stands on.
    pub(crate) fn is_held(&self) -> bool {
        self.is_suspended() || self.form().tree.is_held()
    }

    /// Whether it stands on another device, or would with the table that is loaded.
    pub(crate) fn uses(&self, other: &Arc<Device>) -> bool {
        let loaded = self.slot.lock().unwrap_or_else(PoisonError::into_inner).inactive.clone();
        self.form().tree.stands_on(other) || loaded.is_some_and(|form| form.tree.stands_on(other))
    }

    pub(crate) fn set_suspended(&self, suspended: bool) {
        self.suspended.store(suspended, SeqCst);
    }

    /// What the whole stack is at the moment: what a backend was seen not to do is withdrawn.
    pub(crate) fn profile(&self) -> Profile {
        self.form().tree.current()
    }

    /// The integrity data that it keeps, for whoever can show it.
    pub(crate) fn integrity(&self) -> Option<Integrity> {
        self.form().tree.integrity()
    }

    /// Whether its layers leave out integrity data that is kept below them.
    pub(crate) fn hides_integrity(&self) -> bool {
        self.form().tree.hides_integrity()
    }

    /// Its stack, in the user's words.
    pub fn description(&self) -> String {
        self.form().stack.to_string()
    }

    /// What clients may know of its stack: its kind and, of a file, its format. Paths, addresses of other servers and
    /// tables are the host's own.
    pub fn public_description(&self) -> String {
        match self.stack() {
            StackSpec::File(FileSpec { format: FileFormat::Given(format), .. }) => format!("{format} file"),
            stack @ (StackSpec::File(_) | StackSpec::Nbd(_) | StackSpec::Table(_)) => stack.kind().to_owned(),
            stack => stack.to_string(),
        }
    }

    /// What it is made from.
    pub fn stack(&self) -> StackSpec {
        self.form().stack.clone()
    }

    /// Whether the kernel is to look for partitions, where it is a device of the kernel's.
    pub fn wants_partitions(&self) -> bool {
        matches!(&self.form().stack, StackSpec::File(file) if file.partscan)
    }

    /// The layers above its backend, bottom first.
    pub fn layers(&self) -> Vec<LayerSpec> {
        self.form().layers.clone()
    }

    /// How much it holds.
    pub fn size(&self) -> Bytes {
        self.form().tree.profile().size
    }

    /// Whether writes are refused.
    pub fn read_only(&self) -> bool {
        self.form().tree.profile().read_only
    }

    /// The file behind it, when the device is that file whole and as it is. `None`: it is something else.
    pub(crate) fn plain_file(&self) -> Option<io::Result<OwnedFd>> {
        self.form().tree.plain_file()
    }

    /// What it can do.
    pub fn abilities(&self) -> Features {
        self.profile().abilities
    }

    /// The limits of the whole stack.
    pub fn limits(&self) -> QueueLimits {
        self.profile().limits
    }

    /// The finest offset and length that requests may have, in bytes. A backend takes any; layers and
    /// devices with larger blocks want whole blocks.
    pub fn block_size_min(&self) -> u32 {
        let block = self.limits().logical_block_size.0 as u32;
        if self.form().tree.profile().bytewise && block == 512 { 1 } else { block }
    }

    /// The smallest length that costs no reading for writing, in bytes.
    pub fn block_size_preferred(&self) -> u32 {
        (self.limits().physical_block_size.0 as u32).max(PAGE_LEN)
    }

    /// What `show` says about the backend.
    pub fn describe(&self) -> Vec<Fact> {
        self.form().tree.describe()
    }

    /// Whether it has one hardware queue, whoever uses it.
    pub(crate) fn is_single(&self) -> bool {
        self.form().tree.is_single()
    }

    /// Requests in flight on each hardware queue at most.
    pub fn depth(&self) -> u16 {
        self.depth
    }

    /// Make the nodes of a queue on the thread that owns `ring`.
    /// `nudge` wakes that queue.
    pub(crate) fn mount(
        &self,
        ring: &mut KernelRing,
        depth: u16,
        nudge: Nudge,
    ) -> Result<Mounted, DeviceError> {
        self.form().tree.mount(ring, depth, nudge)
    }

    pub(crate) fn add_lane(&self, reactor: usize, stats: Arc<QueueStats>) -> Arc<Lane> {
        stats.share(self.busy.clone());
        let lane = Arc::new(Lane { reactor, stats, connections: Arc::default() });
        self.lock_lanes().push(lane.clone());
        lane
    }

    pub(crate) fn remove_lane(&self, lane: &Arc<Lane>) {
        self.lock_lanes().retain(|other| !Arc::ptr_eq(other, lane));
        let mut past = self.past.lock().unwrap_or_else(PoisonError::into_inner);
        past.add(&lane.stats.snapshot(Nanos(0)));
    }

    fn lock_lanes(&self) -> std::sync::MutexGuard<'_, Vec<Arc<Lane>>> {
        self.lanes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Its hardware queues.
    pub fn lanes(&self) -> Vec<Arc<Lane>> {
        self.lock_lanes().clone()
    }

    /// NBD connections to it.
    pub fn connections(&self) -> u32 {
        self.lock_lanes().iter().map(|lane| lane.connections.load(Relaxed)).sum()
    }

    /// For how long its queues were busy, all together.
    pub fn busy(&self) -> &BusyTogether {
        &self.busy
    }

    /// What queues that are gone have counted.
    pub fn past(&self) -> Snapshot {
        self.past.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// What keeps writes of parts of blocks from all others. Its queues heed it from when their reactors have been told to
    /// listen.
    pub(crate) fn make_gate(&self) -> &Arc<Gate> {
        self.gate.get_or_init(Arc::default)
    }

    /// The same, if there is one.
    pub(crate) fn gate(&self) -> Option<&Arc<Gate>> {
        self.gate.get()
    }

    /// Who listens to its queues.
    pub(crate) fn trace(&self) -> Option<Arc<Session>> {
        self.lock_trace().clone()
    }

    /// Have it listened to from now on, unless it is. Whether it was not.
    pub(crate) fn begin_trace(&self, session: &Arc<Session>) -> bool {
        let mut trace = self.lock_trace();
        let free = trace.is_none();
        if free {
            *trace = Some(session.clone());
        }
        free
    }

    /// Nobody listens any more.
    pub(crate) fn end_trace(&self) {
        *self.lock_trace() = None;
    }

    fn lock_trace(&self) -> std::sync::MutexGuard<'_, Option<Arc<Session>>> {
        self.trace.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Who looks at where its requests go.
    pub(crate) fn glance(&self) -> Option<Arc<Lanes>> {
        self.glance.lock().unwrap_or_else(PoisonError::into_inner).upgrade()
    }

    pub(crate) fn set_glance(&self, lanes: Weak<Lanes>) {
        *self.glance.lock().unwrap_or_else(PoisonError::into_inner) = lanes;
    }

    /// Its nodes by number: how far down each is, from 0, and its name.
    pub(crate) fn nodes(&self) -> Vec<(u8, &'static str)> {
        self.form().tree.names()
    }

    /// What its nodes are to a trace.
    pub(crate) fn places(&self) -> Vec<trace::Place> {
        self.form().tree.places()
    }

    /// How long it has been there.
    pub fn uptime(&self) -> Duration {
        self.opened.elapsed()
    }
}
