//! A device: a backend, the layers above it, and what the two of them promise.
//!
//! The shared part of the backend is made once, here, on the control plane; every reactor that serves
//! the device gets nodes of its own from [`Device::mount`].

use crate::spec::{DeviceName, Direct, IrqMode, LayerKind, LayerSpec, NullSpec, StackSpec};
use backends::{
    Backend, Completion, CompletionError, Fact, Failing, Features, File, Null, OpenError, Ram, RamError,
    Zero, ZeroPages,
};
use block::{Bytes, LimitOverrides, LimitsError, ParseLimitsError, QueueLimits, Sectors};
use exports::nbd::DeviceFacts;
use layers::Split;
use queue::{DEPTH_MAX, FileId, Nanos, NodeId, QueueStats, Snapshot, Stack, StackError};
use ring::KernelRing;
use std::io;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
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
}

/// Why a device cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum DeviceError {
    /// The file.
    #[error(transparent)]
    File(#[from] OpenError),
    /// The memory.
    #[error(transparent)]
    Ram(#[from] RamError),
    /// The completion time.
    #[error(transparent)]
    Completion(#[from] CompletionError),
    /// The limits.
    #[error("{0}")]
    Limits(#[from] LimitsError),
    /// The text of the limits.
    #[error("{0}")]
    LimitsText(#[from] ParseLimitsError),
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

enum Source {
    File(Arc<File>),
    Ram(Arc<Ram>),
    Null(Null, Arc<ZeroPages>),
    Zero(Zero, Arc<ZeroPages>),
    Failing(Failing),
}

impl Source {
    fn open(spec: &StackSpec) -> Result<Source, DeviceError> {
        Ok(match spec {
            StackSpec::File(spec) => Source::File(File::open(&backends::FileSpec {
                path: spec.path.clone(),
                direct: match spec.direct {
                    Direct::Auto => backends::Direct::Auto,
                    Direct::On => backends::Direct::On,
                    Direct::Off => backends::Direct::Off,
                },
                offset: spec.offset,
                sizelimit: spec.sizelimit,
                block: spec.block,
                read_only: spec.ro,
                create: spec.create.is_some(),
                size: spec.create,
                share: spec.share,
            })?),
            StackSpec::Ram(spec) => {
                Source::Ram(Ram::new(&backends::RamSpec { size: spec.size, huge: spec.hugepages })?)
            }
            StackSpec::Null(spec) => Source::Null(null(spec)?, Arc::new(ZeroPages::new()?)),
            StackSpec::Zero(size) => Source::Zero(Zero::new(*size), Arc::new(ZeroPages::new()?)),
            StackSpec::Error(size) => Source::Failing(Failing::new(*size)),
        })
    }

    fn backend(&self) -> &dyn Backend {
        match self {
            Source::File(file) => &**file,
            Source::Ram(ram) => &**ram,
            Source::Null(null, _) => null,
            Source::Zero(zero, _) => zero,
            Source::Failing(failing) => failing,
        }
    }

    /// Whether reads answer with memory of the backend's own.
    fn lends(&self) -> bool {
        !matches!(self, Source::File(_) | Source::Failing(_))
    }
}

fn null(spec: &NullSpec) -> Result<Null, DeviceError> {
    let (irqmode, completion_ns) = match spec.irqmode {
        IrqMode::None => (backends::IrqMode::None, None),
        IrqMode::Softirq => (backends::IrqMode::Softirq, None),
        IrqMode::Timer => (backends::IrqMode::Timer, u64::try_from(spec.completion.as_nanos()).ok()),
    };
    let completion = Completion::new(Some(irqmode), completion_ns)?;
    Ok(Null::new(&backends::NullSpec { size: spec.size, completion, memory_backed: spec.memory_backed })?)
}

/// What a reactor keeps for a device that it serves.
pub(crate) struct Mounted {
    /// The nodes of its queue.
    pub(crate) stack: Stack<KernelRing>,
    /// What the front-end may count on.
    pub(crate) facts: DeviceFacts,
    /// What the ring holds for it.
    pub(crate) held: Held,
}

/// What a ring holds for a device, to be let go with it.
#[derive(Default)]
pub(crate) struct Held {
    file: Option<FileId>,
    region: Option<block::Region>,
}

impl Held {
    /// The device's queue is gone.
    pub(crate) fn release(self, ring: &mut KernelRing) {
        self.file.into_iter().for_each(|file| ring.remove_file(file));
        self.region.into_iter().for_each(|region| ring.remove_region(region));
    }
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

/// A device.
pub struct Device {
    name: DeviceName,
    number: usize,
    stack: StackSpec,
    layers: Vec<LayerSpec>,
    source: Source,
    limits: QueueLimits,
    /// One for each layer, bottom first.
    layer_limits: Vec<QueueLimits>,
    description: String,
    depth: u16,
    lanes: Mutex<Vec<Arc<Lane>>>,
    /// What queues that are gone have counted.
    past: Mutex<Snapshot>,
    opened: Instant,
}

impl Device {
    pub(crate) fn open(config: &DeviceConfig, number: usize) -> Result<Device, DeviceError> {
        let source = Source::open(&config.stack)?;
        let mut layers = config.layers.clone();
        if !config.limits.is_empty() {
            // Limits of the whole device are a split above everything else.
            layers.push(LayerSpec { kind: LayerKind::Split, limits: config.limits.clone() });
        }
        if layers.len() >= DEPTH_MAX {
            return Err(DeviceError::TooDeep(layers.len()));
        }
        let mut limits = source.backend().limits();
        let mut layer_limits = Vec::new();
        for layer in &layers {
            let wanted: LimitOverrides = layer.limits.parse()?;
            let mut above = QueueLimits::stacking();
            // Both start at the same sector, so nothing is misaligned that was not before.
            let _ = above.stack(&limits, Sectors(0));
            // Nor do the zones differ; whoever stacks devices of several kinds has to say what holds.
            above.max_open_zones = limits.max_open_zones;
            above.max_active_zones = limits.max_active_zones;
            wanted.apply(&mut above)?;
            layer_limits.push(above.clone());
            limits = above;
        }
        Ok(Device {
            name: config.name.clone(),
            number,
            description: config.stack.to_string(),
            stack: config.stack.clone(),
            layers,
            source,
            limits,
            layer_limits,
            depth: config.depth,
            lanes: Mutex::default(),
            past: Mutex::default(),
            opened: Instant::now(),
        })
    }

    /// Its name.
    pub fn name(&self) -> &str {
        self.name.as_str()
    }

    /// Its number in this process, which no other device ever has.
    pub fn number(&self) -> usize {
        self.number
    }

    /// Its stack, in the user's words.
    pub fn description(&self) -> &str {
        &self.description
    }

    /// What it is made from.
    pub fn stack(&self) -> &StackSpec {
        &self.stack
    }

    /// The layers above its backend, bottom first.
    pub fn layers(&self) -> &[LayerSpec] {
        &self.layers
    }

    /// How much it holds.
    pub fn size(&self) -> Bytes {
        self.source.backend().size()
    }

    /// Whether writes are refused.
    pub fn read_only(&self) -> bool {
        self.source.backend().read_only()
    }

    /// What it can do.
    pub fn abilities(&self) -> Features {
        self.source.backend().features()
    }

    /// The limits of the whole stack.
    pub fn limits(&self) -> &QueueLimits {
        &self.limits
    }

    /// The finest offset and length that requests may have, in bytes. A backend takes any; layers and
    /// devices with larger blocks want whole blocks.
    pub fn block_size_min(&self) -> u32 {
        let block = self.limits.logical_block_size.0 as u32;
        if self.layers.is_empty() && block == 512 { 1 } else { block }
    }

    /// The smallest length that costs no reading for writing, in bytes.
    pub fn block_size_preferred(&self) -> u32 {
        (self.limits.physical_block_size.0 as u32).max(PAGE_LEN)
    }

    /// What `show` says about the backend.
    pub fn describe(&self) -> Vec<Fact> {
        self.source.backend().describe()
    }

    /// Requests in flight on each hardware queue at most.
    pub fn depth(&self) -> u16 {
        self.depth
    }

    /// Make the nodes of a queue on the thread that owns `ring`.
    pub(crate) fn mount(&self, ring: &mut KernelRing) -> Result<Mounted, DeviceError> {
        let mut stack = Stack::default();
        for (position, limits) in self.layer_limits.iter().rev().enumerate() {
            let child = NodeId(position as u8 + 1);
            stack.layer(Box::new(Split::new(limits, child)), Split::children(self.depth));
        }
        let mut held = Held::default();
        match &self.source {
            Source::File(file) => {
                let id = ring.add_file(Arc::new(file.descriptor()?))?;
                held.file = Some(id);
                if file.shared().facts().direct.is_some()
                    && let Err(error) = ring.register_memory()
                {
                    tracing::info!(%error, "direct I/O goes without registered memory");
                }
                stack.backend(Box::new(file.node(id)));
            }
            Source::Ram(ram) => {
                let region = ring.add_foreign(ram.memory());
                held.region = Some(region);
                stack.backend(Box::new(ram.node(Some(region))));
            }
            Source::Null(null, pages) => {
                let memory = null.ram().map_or_else(|| pages.memory(), |ram| ram.memory());
                let region = ring.add_foreign(memory);
                held.region = Some(region);
                stack.backend(Box::new(null.node(Some(region))));
            }
            Source::Zero(zero, pages) => {
                let region = ring.add_foreign(pages.memory());
                held.region = Some(region);
                stack.backend(Box::new(zero.node(Some(region))));
            }
            Source::Failing(failing) => {
                stack.backend(Box::new(failing.node()));
            }
        }
        // A layer that splits fills parts of one buffer, which lent memory is not.
        let lends = self.source.lends() && self.layer_limits.is_empty();
        let in_place = matches!(&self.source, Source::File(file) if file.shared().facts().direct.is_none());
        let sparse = matches!(self.source, Source::File(_) | Source::Ram(_) | Source::Zero(..));
        Ok(Mounted { stack, facts: DeviceFacts { lends, in_place, sparse }, held })
    }

    pub(crate) fn add_lane(&self, reactor: usize, stats: Arc<QueueStats>) -> Arc<Lane> {
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

    /// What queues that are gone have counted.
    pub fn past(&self) -> Snapshot {
        self.past.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// How long it has been there.
    pub fn uptime(&self) -> Duration {
        self.opened.elapsed()
    }
}
