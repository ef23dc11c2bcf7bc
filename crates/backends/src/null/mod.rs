//! `null:`, a device without data, as a baseline for measurements; the counterpart of null_blk.
//!
//! null_blk does not write to the memory of a read, which would show one client the data of another. So
//! here a read without `memory_backed` returns zeroes: zero-copy if the submitter allows it, and filled
//! otherwise. With a completion time, a timer of the ring holds each request for that long. With
//! `memory_backed` it is a RAM disk behind that timer. With zones it is a zoned device: see [`zones`]. The
//! other options, which limit its speed or inject faults, are in [`knobs`] and applied in [`gate`].

mod bad_blocks;
mod cache;
mod fault;
mod gate;
#[cfg(test)]
mod gate_tests;
mod knobs;
mod tags;
mod throttle;
mod zoned;
mod zoned_spec;
mod zones;
#[cfg(test)]
mod zones_tests;

use crate::ram::{Ram, RamError, RamNode, RamSpec};
use crate::zero::{Zero, ZeroNode};
use crate::{Backend, Fact, Features};
pub use bad_blocks::{BadRanges, ParseBadError};
use block::{Bytes, Cookie, QueueLimits, Region, Request, Sectors, Status};
pub use fault::{FaultSpec, ParseFaultError};
use gate::{Gate, Shared};
pub use knobs::{KnobError, Knobs, Sharing};
use queue::{Cx, FileId, Node, NodeId, Ring, Verdict};
use std::sync::Arc;
use std::time::Duration;
use zoned::ZonedNode;
pub use zoned_spec::{ZonedError, ZonedSpec};
use zones::Zones;

/// Completion mode of requests, null_blk's `irqmode`. A user-space queue has one thread, so `none` and
/// `softirq` are equal.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub enum IrqMode {
    /// Complete within submission.
    #[default]
    None,
    /// Complete within submission; in the kernel, on the processor that submitted the request.
    Softirq,
    /// Complete after the completion time.
    Timer,
}

/// Time at which requests complete.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Completion {
    /// Inline.
    Instant,
    /// This many nanoseconds after submission, or soon after that.
    After(u64),
}

/// Options of `null:SIZE`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct NullSpec {
    /// Size of the device.
    pub size: Bytes,
    /// Completion mode of requests.
    pub irqmode: IrqMode,
    /// Completion time with [`IrqMode::Timer`].
    pub completion: Duration,
    /// Whether to store written data in memory.
    pub memory_backed: bool,
    /// Zone options; `None` for a device without zones.
    pub zoned: Option<ZonedSpec>,
    /// All other options.
    pub knobs: Knobs,
}

/// Reasons why a null device could not be created.
#[derive(Debug, thiserror::Error)]
pub enum NullError {
    /// The size is not a valid size of a disk, or memory is not available.
    #[error(transparent)]
    Ram(#[from] RamError),
    /// The zone options are invalid.
    #[error(transparent)]
    Zoned(#[from] ZonedError),
    /// Options contradict each other.
    #[error(transparent)]
    Knobs(#[from] KnobError),
}

impl NullSpec {
    /// Default completion time, as null_blk's `completion_nsec`.
    pub const COMPLETION: Duration = Duration::from_micros(10);

    /// Returns the options with a completion time in nanoseconds.
    #[must_use]
    pub fn completing_after(self, nanos: u64) -> NullSpec {
        NullSpec { irqmode: IrqMode::Timer, completion: Duration::from_nanos(nanos), ..self }
    }

    fn completes(&self) -> Completion {
        match self.irqmode {
            IrqMode::None | IrqMode::Softirq => Completion::Instant,
            IrqMode::Timer => {
                Completion::After(u64::try_from(self.completion.as_nanos()).unwrap_or(u64::MAX))
            }
        }
    }
}

impl Default for NullSpec {
    /// Returns options with null_blk's size, completing inline.
    fn default() -> Self {
        NullSpec {
            size: Bytes::gib(250),
            irqmode: IrqMode::None,
            completion: NullSpec::COMPLETION,
            memory_backed: false,
            zoned: None,
            knobs: Knobs::default(),
        }
    }
}

/// The part of a null device that all queues share.
#[derive(Clone, Debug)]
pub struct Null {
    size: Bytes,
    completion: Completion,
    ram: Option<Arc<Ram>>,
    zones: Option<Arc<Zones>>,
    shared: Arc<Shared>,
}

impl Null {
    /// Creates a device.
    ///
    /// # Errors
    /// See [`NullError`].
    pub fn new(spec: &NullSpec) -> Result<Null, NullError> {
        let size = spec.size;
        if size == Bytes::ZERO || !size.is_aligned(512) {
            return Err(RamError::Size(size).into());
        }
        let knobs = &spec.knobs;
        knobs.check(size, spec.memory_backed, spec.zoned.is_some())?;
        let zones = spec.zoned.as_ref().map(|zoned| Zones::new(zoned, size)).transpose()?.map(Arc::new);
        let ram = match spec.memory_backed {
            true => Some(Ram::new(&RamSpec { size, hugepages: false, integrity: None })?),
            false => None,
        };
        Ok(Null {
            size,
            completion: spec.completes(),
            ram,
            zones,
            shared: Arc::new(Shared::new(knobs, size)),
        })
    }

    /// Marks sectors as bad (`+FIRST-LAST`) or good (`-FIRST-LAST`) from now on.
    ///
    /// # Errors
    /// The range is invalid or not on the device, or the device does not support bad blocks.
    pub fn change_bad_blocks(&self, change: &str) -> Result<(), ParseBadError> {
        if !self.is_gated() {
            return Err(ParseBadError::unheeded());
        }
        self.shared.bad.change(change, self.size.sectors())
    }

    /// Checks whether another hardware queue can be created: `init_hctx` injects failures.
    ///
    /// # Errors
    /// `EFAULT`, as in null_blk.
    pub fn admit_queue(&self) -> std::io::Result<()> {
        let mut chance = fault::Chance::new(self.shared.seed());
        match &self.shared.init_hctx {
            Some(fault) if fault.strikes(&mut chance) => Err(std::io::Error::from_raw_os_error(libc::EFAULT)),
            _ => Ok(()),
        }
    }

    /// Returns whether options need the slow path of requests, now or later.
    fn is_gated(&self) -> bool {
        !self.shared.knobs.are_idle() || self.ram.is_some()
    }

    /// Returns the memory that stores the data, with `memory_backed`.
    pub fn ram(&self) -> Option<&Arc<Ram>> {
        self.ram.as_ref()
    }

    /// Returns whether there are neither stored data nor zones, so that no data is accessed.
    pub fn is_hollow(&self) -> bool {
        self.ram.is_none() && self.zones.is_none()
    }

    /// Creates the node of one hardware queue. `region` is the memory for zero-copy reads, if it is
    /// registered with the queue's ring: that of [`ram`](Null::ram), or [`ZeroPages`](crate::ZeroPages).
    pub fn node(&self, region: Option<Region>) -> NullNode {
        let content = match &self.ram {
            Some(ram) => Content::Kept(ram.inline_node(region)),
            None => Content::Zero(Zero::new(self.size).node(region)),
        };
        let body = match &self.zones {
            None => Body::Plain(content),
            Some(zones) => Body::Zoned(ZonedNode::new(zones.clone(), content)),
        };
        let gate = self.is_gated().then(|| Box::new(Gate::new(self.shared.clone())));
        let at_once = self.completion == Completion::Instant && gate.is_none();
        NullNode { body, completion: self.completion, at_once, gate, ended: Box::default() }
    }

    /// Returns the options that differ from their defaults.
    fn knob_facts(&self) -> Vec<Fact> {
        let shared = &self.shared;
        let mut facts = Vec::new();
        if let (Some(size), Some(cache)) = (shared.knobs.cache_size, &shared.cache) {
            facts.push(("write cache", format!("{} of {size} in use", cache.held())));
        }
        if let Some(rate) = shared.knobs.mbps {
            facts.push(("rate", format!("{rate} MiB/s at most")));
        }
        if let Some(depth) = shared.knobs.depth() {
            let whose = match shared.knobs.sharing {
                Sharing::Queue => "of each queue",
                Sharing::Device => "of all queues",
                Sharing::Process => "of all null devices that share tags",
            };
            facts.push(("requests at once", format!("{depth} {whose}")));
        }
        let bad = shared.bad.ranges();
        if !bad.is_empty() || shared.knobs.badblocks_once {
            let bad = if bad.is_empty() { "none left".to_owned() } else { bad.to_string() };
            facts.push(("bad blocks", bad));
        }
        let faults = [
            ("timeouts injected", &shared.timeout),
            ("requeues injected", &shared.requeue),
            ("queues refused", &shared.init_hctx),
        ];
        for (name, fault) in faults {
            if let Some(fault) = fault {
                facts.push((name, fault.happened.load(std::sync::atomic::Ordering::Relaxed).to_string()));
            }
        }
        facts
    }

    fn zone_facts(zones: &Zones) -> Vec<Fact> {
        let (count, conventional) = zones.count();
        let spec = zones.spec();
        // A limit that could never be reached counts as none, as in null_blk.
        let limit = |held: u32, asked: u32| match (held, asked) {
            (0, 0) => "none".to_owned(),
            (0, asked) => format!("none ({asked} could never be reached)"),
            (held, asked) if held == asked => held.to_string(),
            (held, asked) => format!("{held} (of {asked}: an open zone is active)"),
        };
        let (open, active) = zones.limits();
        vec![
            ("zones", format!("{count} of {}, {conventional} conventional", zones.zone_len().bytes())),
            ("open zones at most", limit(open, spec.max_open)),
            ("active zones at most", limit(active, spec.max_active)),
        ]
    }
}

impl Backend for Null {
    fn size(&self) -> Bytes {
        self.size
    }

    fn features(&self) -> Features {
        let knobs = &self.shared.knobs;
        let plain = Features {
            discard: knobs.discard,
            fua: knobs.fua,
            rotational: knobs.rotational,
            ..Features::MEMORY
        };
        match &self.zones {
            None => plain,
            Some(_) => Features { write_zeroes: false, fast_zero: false, ..plain },
        }
    }

    fn limits(&self) -> QueueLimits {
        let knobs = &self.shared.knobs;
        let mut limits = match &self.zones {
            Some(zones) => zoned_limits(zones),
            None => crate::memory_limits(),
        };
        limits.logical_block_size = knobs.blocksize;
        // As in null_blk, no larger physical block is reported.
        limits.physical_block_size = knobs.blocksize;
        limits.io_min = knobs.blocksize;
        if let Some(sectors) = knobs.max_sectors {
            limits.max_hw_sectors = sectors;
        }
        if knobs.virt_boundary {
            limits.virt_boundary_mask = 4095;
        }
        if knobs.rotational {
            limits.features = limits.features.union(block::Features::ROTATIONAL);
        }
        if knobs.cache_size.is_some() {
            limits.features = limits.features.union(block::Features::WRITE_CACHE);
            if knobs.fua {
                limits.features = limits.features.union(block::Features::FUA);
            }
        }
        if !knobs.discard {
            limits.max_hw_discard_sectors = Sectors(0);
        }
        let checked = limits.validate();
        debug_assert_eq!(checked, Ok(()));
        limits
    }

    fn describe(&self) -> Vec<Fact> {
        let completion = match self.completion {
            Completion::Instant => "at once".to_owned(),
            Completion::After(nanos) => format!("after {nanos} ns"),
        };
        let mut facts = vec![
            ("backend", "null".to_owned()),
            ("size", self.size.to_string()),
            ("completion", completion),
            ("memory backed", if self.ram.is_some() { "yes" } else { "no" }.to_owned()),
        ];
        if let Some(ram) = &self.ram {
            facts.push(("allocated", ram.allocated().to_string()));
        }
        facts.extend(self.zones.iter().flat_map(|zones| Null::zone_facts(zones)));
        facts.extend(self.knob_facts());
        facts
    }
}

/// Returns the limits of a device with these zones, before other options.
fn zoned_limits(zones: &Zones) -> QueueLimits {
    let (max_open_zones, max_active_zones) = zones.limits();
    let plain = crate::memory_limits();
    QueueLimits {
        features: plain.features.union(block::Features::ZONED),
        chunk_sectors: zones.zone_len(),
        max_hw_zone_append_sectors: zones.append_max(),
        max_open_zones,
        max_active_zones,
        physical_block_size: plain.logical_block_size,
        io_min: plain.logical_block_size,
        max_write_zeroes_sectors: Sectors(0),
        max_hw_wzeroes_unmap_sectors: Sectors(0),
        ..plain
    }
}

/// Backend that answers requests after the options are applied.
#[derive(Debug)]
enum Content {
    Zero(ZeroNode),
    Kept(RamNode),
}

impl Content {
    fn attach<R: Ring>(&mut self, id: NodeId, tags: usize) {
        if let Content::Kept(ram) = self {
            Node::<R>::attach(ram, id, tags);
        }
    }

    fn submit<R: Ring>(&mut self, io: Cookie, req: &mut Request, cx: &mut Cx<'_, R>) -> Verdict {
        match self {
            Content::Zero(zero) => zero.submit(io, req, cx),
            Content::Kept(ram) => ram.submit(io, req, cx),
        }
    }

    fn reap<R: Ring>(&mut self, io: Cookie, req: &mut Request, result: i64, cx: &mut Cx<'_, R>) -> Verdict {
        match self {
            Content::Zero(_) => ZeroNode::filled(req, result),
            Content::Kept(ram) => ram.reap(io, req, result, cx),
        }
    }
}

#[derive(Debug)]
enum Body {
    Plain(Content),
    Zoned(ZonedNode),
}

/// A null device in one hardware queue.
#[derive(Debug)]
pub struct NullNode {
    body: Body,
    completion: Completion,
    /// Whether requests without data complete within submission.
    at_once: bool,
    /// State of the slow path; `None` if no option needs it.
    gate: Option<Box<Gate>>,
    /// By tag: status of a request that waits for its completion time; `None` while the RAM disk holds it.
    ended: Box<[Option<Status>]>,
}

impl NullNode {
    /// Sets [`zero_file`](crate::zero_file) on the queue's ring, so that requests may use memory that only
    /// the kernel can access. Has no effect on a device that stores data.
    #[must_use]
    pub fn with_file(mut self, file: FileId) -> NullNode {
        if let Body::Plain(Content::Zero(zero)) = &mut self.body {
            *zero = zero.with_file(file);
        }
        self
    }

    /// Holds a request for its completion time.
    fn hold<R: Ring>(&mut self, io: Cookie, verdict: Verdict, cx: &mut Cx<'_, R>) -> Verdict {
        let (Verdict::Up(status), Completion::After(nanos)) = (verdict, self.completion) else {
            return verdict;
        };
        self.ended[io.tag.index()] = Some(status);
        cx.timer(io, cx.now().after(nanos));
        Verdict::Held
    }

    /// Submits a request with options, data or a completion time. It is a separate function so that other
    /// requests need only a few instructions.
    #[inline(never)]
    fn submit_otherwise<R: Ring>(&mut self, io: Cookie, req: &mut Request, cx: &mut Cx<'_, R>) -> Verdict {
        if self.gate.is_some() { self.enter(io, req, cx) } else { self.submit_slowly(io, req, cx) }
    }

    /// Submits a request with data, a completion time, or both.
    fn submit_slowly<R: Ring>(&mut self, io: Cookie, req: &mut Request, cx: &mut Cx<'_, R>) -> Verdict {
        let verdict = match &mut self.body {
            Body::Plain(content) => content.submit(io, req, cx),
            Body::Zoned(zoned) => zoned.submit(io, req, cx),
        };
        if self.completion == Completion::Instant { verdict } else { self.hold(io, verdict, cx) }
    }
}

impl<R: Ring> Node<R> for NullNode {
    fn attach(&mut self, id: NodeId, tags: usize) {
        self.ended = vec![None; tags].into();
        if let Some(gate) = &mut self.gate {
            gate.attach(tags);
        }
        match &mut self.body {
            Body::Plain(content) => content.attach::<R>(id, tags),
            Body::Zoned(zoned) => zoned.attach::<R>(id, tags),
        }
    }

    #[inline]
    fn submit(&mut self, io: Cookie, req: &mut Request, cx: &mut Cx<'_, R>) -> Verdict {
        match &mut self.body {
            Body::Plain(Content::Zero(zero)) if self.at_once => zero.submit(io, req, cx),
            _ => self.submit_otherwise(io, req, cx),
        }
    }

    fn reap(&mut self, io: Cookie, req: &mut Request, result: i64, cx: &mut Cx<'_, R>) -> Verdict {
        if self.gate.is_some() {
            return self.go_on(io, req, result, cx);
        }
        if let Some(status) = self.ended[io.tag.index()].take() {
            return Verdict::Up(status);
        }
        let verdict = match &mut self.body {
            Body::Plain(content) => content.reap(io, req, result, cx),
            Body::Zoned(zoned) => zoned.reap(io, req, result, cx),
        };
        self.hold(io, verdict, cx)
    }

    fn commit(&mut self, cx: &mut Cx<'_, R>) {
        if let Some(gate) = &mut self.gate {
            gate.commit(cx);
        }
    }

    fn cancel(&mut self, io: Cookie, cx: &mut Cx<'_, R>) {
        match &mut self.gate {
            Some(gate) => gate.cancel(io, cx),
            None => cx.cancel(io),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Harness;
    use block::{Data, Flags, Op, Segment};

    fn null(spec: NullSpec, region: Option<Region>) -> Harness {
        Harness::new(Box::new(Null::new(&spec).unwrap().node(region)))
    }

    #[test]
    fn a_null_read_discloses_no_other_memory() {
        let mut disk = null(NullSpec::default(), None);
        assert_eq!(disk.write(0, &[9; 4096], Flags::empty()), Status::Ok);
        assert_eq!(disk.read(0, 4096), (Status::Ok, vec![0; 4096]));
    }

    #[test]
    fn a_zero_copy_null_read_returns_zeroes() {
        let mut disk = null(NullSpec::default(), Some(Region(7)));
        let zeroes = Data::One(Segment { offset: 0, len: 4096, region: Region(7) });
        assert_eq!(disk.read_zero_copy(1 << 30, 4096), (Status::Ok, zeroes));
    }

    #[test]
    fn a_timed_null_completes_at_its_time() {
        let spec = NullSpec::default().completing_after(10_000);
        let mut disk = null(spec, None);
        let before = disk.ring.now.0;
        assert_eq!(disk.bare(Op::Flush, 0, 0), Status::Ok);
        assert_eq!(disk.ring.now.0 - before, 10_000);
    }

    #[test]
    fn a_memory_backed_null_stores_data() {
        for is_timed in [false, true] {
            let knobs = Knobs { discard: true, ..Knobs::default() };
            let spec = NullSpec { size: Bytes::mib(64), memory_backed: true, knobs, ..NullSpec::default() };
            let spec = if is_timed { spec.completing_after(500) } else { spec };
            let mut disk = null(spec, None);
            assert_eq!(disk.write(4096, &[9; 4096], Flags::empty()), Status::Ok);
            assert_eq!(disk.read(4096, 4096), (Status::Ok, vec![9; 4096]));
            assert_eq!(disk.bare(Op::Discard, 0, 64 << 20), Status::Ok, "in several steps");
            assert_eq!(disk.read(4096, 4096), (Status::Ok, vec![0; 4096]));
        }
    }

    #[test]
    fn completion_follows_irqmode() {
        for irqmode in [IrqMode::None, IrqMode::Softirq] {
            let spec = NullSpec { irqmode, ..NullSpec::default() };
            assert_eq!(spec.completes(), Completion::Instant, "{irqmode:?}");
        }
        let spec = NullSpec { irqmode: IrqMode::Timer, ..NullSpec::default() };
        assert_eq!(spec.completes(), Completion::After(10_000));
        assert_eq!(spec.completing_after(5).completes(), Completion::After(5));
    }
}
