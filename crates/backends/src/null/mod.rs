//! `null:`, a device that does nothing, to measure everything else with; null_blk's counterpart.
//!
//! The kernel's leaves the memory of a read as it found it. That would show one client what another sent,
//! so here a read without `memory_backed` is zeroes: lent where the sender takes any memory, which costs
//! nothing, and filled elsewhere. With a set time each request is held that long, by a timer of the ring.
//! With `memory_backed` it is a RAM disk behind that timer. With zones it is a zoned device: see [`zones`]. The other
//! knobs, which make it slow, narrow or faulty, are in [`knobs`]; requests heed them in [`gate`].

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
use std::str::FromStr;
use std::sync::Arc;
use zoned::ZonedNode;
pub use zoned_spec::{ZonedError, ZonedSpec};
use zones::Zones;

/// How null_blk ends a request. A user-space queue has one thread, so `none` and `softirq` are one.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum IrqMode {
    /// At once, where it was submitted.
    None,
    /// At once; in the kernel, on the processor that submitted it.
    Softirq,
    /// After a set time.
    Timer,
}

impl FromStr for IrqMode {
    type Err = CompletionError;

    fn from_str(word: &str) -> Result<IrqMode, CompletionError> {
        match word {
            "none" | "0" => Ok(IrqMode::None),
            "softirq" | "1" => Ok(IrqMode::Softirq),
            "timer" | "2" => Ok(IrqMode::Timer),
            _ => Err(CompletionError::Word(word.to_owned())),
        }
    }
}

/// Why the words do not say when a request ends.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum CompletionError {
    /// Not one of the modes.
    #[error("irqmode=\"{0}\" is not known (use none, softirq or timer)")]
    Word(String),
    /// A time without a timer.
    #[error("completion= needs a timer (leave irqmode= out, or say irqmode=timer)")]
    TimeWithoutTimer,
}

/// When a request ends.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub enum Completion {
    /// At once.
    #[default]
    Instant,
    /// That many nanoseconds after it arrived, or soon after.
    After(u64),
}

impl Completion {
    /// null_blk's `completion_nsec`.
    pub const DEFAULT_NS: u64 = 10_000;

    /// From the user's `irqmode=` and `completion=`, either of which may be missing.
    ///
    /// # Errors
    /// A time was given for a mode that has none.
    pub fn new(irqmode: Option<IrqMode>, completion_ns: Option<u64>) -> Result<Completion, CompletionError> {
        match (irqmode, completion_ns) {
            (None, None) | (Some(IrqMode::None | IrqMode::Softirq), None) => Ok(Completion::Instant),
            (Some(IrqMode::None | IrqMode::Softirq), Some(_)) => Err(CompletionError::TimeWithoutTimer),
            (Some(IrqMode::Timer) | None, time) => {
                Ok(Completion::After(time.unwrap_or(Completion::DEFAULT_NS)))
            }
        }
    }
}

/// What is asked for.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct NullSpec {
    /// How much it claims to hold.
    pub size: Bytes,
    /// When requests end.
    pub completion: Completion,
    /// Keep what is written, in memory.
    pub memory_backed: bool,
    /// Be a zoned device.
    pub zoned: Option<ZonedSpec>,
    /// Everything else.
    pub knobs: Knobs,
}

/// Why there is no such null device.
#[derive(Debug, thiserror::Error)]
pub enum NullError {
    /// The size is not one that a disk has, or memory cannot be had.
    #[error(transparent)]
    Ram(#[from] RamError),
    /// It cannot be zoned like that.
    #[error(transparent)]
    Zoned(#[from] ZonedError),
    /// Knobs do not go together.
    #[error(transparent)]
    Knobs(#[from] KnobError),
}

impl Default for NullSpec {
    /// null_blk's size, and no waiting.
    fn default() -> Self {
        let (completion, memory_backed, zoned) = (Completion::Instant, false, None);
        NullSpec { size: Bytes::gib(250), completion, memory_backed, zoned, knobs: Knobs::default() }
    }
}

/// The shared part.
#[derive(Clone, Debug)]
pub struct Null {
    size: Bytes,
    completion: Completion,
    ram: Option<Arc<Ram>>,
    zones: Option<Arc<Zones>>,
    shared: Arc<Shared>,
}

impl Null {
    /// Make one.
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
            true => Some(Ram::new(&RamSpec { size, huge: false, integrity: None })?),
            false => None,
        };
        Ok(Null { size, completion: spec.completion, ram, zones, shared: Arc::new(Shared::new(knobs, size)) })
    }

    /// Make sectors bad (`+FIRST-LAST`) or good (`-FIRST-LAST`) from now on.
    ///
    /// # Errors
    /// It is no such range, or not on the device, or nothing of this device looks at bad blocks.
    pub fn change_bad_blocks(&self, change: &str) -> Result<(), ParseBadError> {
        if !self.is_gated() {
            return Err(ParseBadError::unheeded());
        }
        self.shared.bad.change(change, self.size.sectors())
    }

    /// Whether another hardware queue can be made: `init_hctx` says now and then that it cannot.
    ///
    /// # Errors
    /// `EFAULT`, as null_blk.
    pub fn admit_queue(&self) -> std::io::Result<()> {
        let mut chance = fault::Chance::new(self.shared.seed());
        match &self.shared.init_hctx {
            Some(fault) if fault.strikes(&mut chance) => Err(std::io::Error::from_raw_os_error(libc::EFAULT)),
            _ => Ok(()),
        }
    }

    /// Knobs stand between a request and its end, or may come to.
    fn is_gated(&self) -> bool {
        !self.shared.knobs.are_idle() || self.ram.is_some()
    }

    /// The memory behind it, with `memory_backed`.
    pub fn ram(&self) -> Option<&Arc<Ram>> {
        self.ram.as_ref()
    }

    /// Nothing that is written is kept, and there are no zones: nobody looks at data.
    pub fn is_hollow(&self) -> bool {
        self.ram.is_none() && self.zones.is_none()
    }

    /// The node of one hardware queue. `region`: what reads are lent from, if the queue's ring knows it: the
    /// memory of [`ram`](Null::ram), or [`ZeroPages`](crate::ZeroPages) where there is none.
    pub fn node(&self, region: Option<Region>) -> NullNode {
        let content = match &self.ram {
            Some(ram) => Content::Kept(ram.node(region)),
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

    /// Only of knobs that were turned.
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
        // A limit that could never be reached is none, as in null_blk.
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
        // As null_blk's: it has no medium that would write larger ones.
        limits.physical_block_size = knobs.blocksize;
        limits.io_min = knobs.blocksize;
        if let Some(sectors) = knobs.max_sectors {
            limits.max_hw_sectors = sectors;
        }
        if knobs.virt_boundary {
            limits.virt_boundary_mask = 4095;
        }
        if knobs.rotational {
            limits.features = limits.features.with(block::Features::ROTATIONAL);
        }
        if knobs.cache_size.is_some() {
            limits.features = limits.features.with(block::Features::WRITE_CACHE);
            if knobs.fua {
                limits.features = limits.features.with(block::Features::FUA);
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

/// What a device with those zones takes, before other knobs.
fn zoned_limits(zones: &Zones) -> QueueLimits {
    let (max_open_zones, max_active_zones) = zones.limits();
    let plain = crate::memory_limits();
    QueueLimits {
        features: plain.features.with(block::Features::ZONED),
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

/// What answers requests that nothing else has to say about.
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

/// A null device as one hardware queue sees it.
#[derive(Debug)]
pub struct NullNode {
    body: Body,
    completion: Completion,
    /// A request without content is over as soon as it is submitted.
    at_once: bool,
    /// Where knobs ask for more than an end after some time.
    gate: Option<Box<Gate>>,
    /// By tag: how a request that waits for its time ended; `None` while the RAM disk has it.
    ended: Box<[Option<Status>]>,
}

impl NullNode {
    /// With [`zero_file`](crate::zero_file), as the queue's ring knows it: then requests may bring memory that only
    /// the kernel can reach. Without effect on a device that keeps what is written.
    #[must_use]
    pub fn with_file(mut self, file: FileId) -> NullNode {
        if let Body::Plain(Content::Zero(zero)) = &mut self.body {
            *zero = zero.with_file(file);
        }
        self
    }

    /// What the content answered: keep it for its time.
    fn hold<R: Ring>(&mut self, io: Cookie, verdict: Verdict, cx: &mut Cx<'_, R>) -> Verdict {
        let (Verdict::Up(status), Completion::After(nanos)) = (verdict, self.completion) else {
            return verdict;
        };
        self.ended[io.tag.index()] = Some(status);
        cx.timer(io, cx.now().after(nanos));
        Verdict::Held
    }

    /// With knobs, a content or a time; kept apart so that a request with none of them stays a few instructions.
    #[inline(never)]
    fn submit_otherwise<R: Ring>(&mut self, io: Cookie, req: &mut Request, cx: &mut Cx<'_, R>) -> Verdict {
        if self.gate.is_some() { self.enter(io, req, cx) } else { self.submit_slowly(io, req, cx) }
    }

    /// With a content, a time, or both.
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
    fn a_null_read_shows_nobody_elses_memory() {
        let mut disk = null(NullSpec::default(), None);
        assert_eq!(disk.write(0, &[9; 4096], Flags::NONE), Status::Ok);
        assert_eq!(disk.read(0, 4096), (Status::Ok, vec![0; 4096]));
    }

    #[test]
    fn a_null_read_is_lent_zeroes() {
        let mut disk = null(NullSpec::default(), Some(Region(7)));
        let lent = Data::One(Segment { offset: 0, len: 4096, region: Region(7) });
        assert_eq!(disk.read_lent(1 << 30, 4096), (Status::Ok, lent));
    }

    #[test]
    fn a_timed_null_ends_when_its_time_has_come() {
        let spec = NullSpec { completion: Completion::After(10_000), ..NullSpec::default() };
        let mut disk = null(spec, None);
        let before = disk.ring.time;
        assert_eq!(disk.bare(Op::Flush, 0, 0), Status::Ok);
        assert_eq!(disk.ring.time - before, 10_000);
    }

    #[test]
    fn a_memory_backed_null_keeps_what_is_written() {
        for completion in [Completion::Instant, Completion::After(500)] {
            let knobs = Knobs { discard: true, ..Knobs::default() };
            let spec = NullSpec {
                size: Bytes::mib(64),
                completion,
                memory_backed: true,
                knobs,
                ..NullSpec::default()
            };
            let mut disk = null(spec, None);
            assert_eq!(disk.write(4096, &[9; 4096], Flags::NONE), Status::Ok);
            assert_eq!(disk.read(4096, 4096), (Status::Ok, vec![9; 4096]));
            assert_eq!(disk.bare(Op::Discard, 0, 64 << 20), Status::Ok, "in several steps");
            assert_eq!(disk.read(4096, 4096), (Status::Ok, vec![0; 4096]));
        }
    }

    #[test]
    fn completion_follows_irqmode() {
        let of = |mode: &str, time| Completion::new(Some(mode.parse().unwrap()), time);
        assert_eq!(of("none", None), Ok(Completion::Instant));
        assert_eq!(of("softirq", None), Ok(Completion::Instant));
        assert_eq!(of("timer", None), Ok(Completion::After(10_000)));
        assert_eq!(of("timer", Some(5)), Ok(Completion::After(5)));
        assert_eq!(of("none", Some(5)), Err(CompletionError::TimeWithoutTimer));
        assert_eq!(Completion::new(None, Some(5)), Ok(Completion::After(5)));
        assert_eq!(Completion::new(None, None), Ok(Completion::Instant));
        assert!("soon".parse::<IrqMode>().is_err());
    }
}
