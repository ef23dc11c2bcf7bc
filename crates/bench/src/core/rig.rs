//! A queue with a stack, and a front-end that keeps it busy.

use super::ring::{BUFFERS, BenchRing, ZEROES};
use super::{DEPTH, LEN, PIECES};
use crate::multipath::{Shared, Subject};
use backends::{Null, NullSpec, Ram, RamSpec};
use block::{
    Abilities, Bytes, Cookie, Data, Flags, Op, Profile, QueueLimits, Request, Sectors, Segment, Status, Tag,
};
use layers::scheduler::{Choice, Policy, Scheduler};
use layers::{Layer, Pass, Split};
use queue::{Cx, Done, Nanos, Node, NodeId, Owner, Queue, QueueConfig, QueueId, Stack, Verdict};
use std::hint::black_box;
use std::sync::Arc;

/// Size of the RAM disk: far more than any cache.
const DISK: Bytes = Bytes::mib(256);
/// Number of random places before they repeat: a power of two, and too many for a branch predictor to
/// learn.
const PLACES: usize = 1 << 16;

/// The operations of a load.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Mix {
    Reads,
    Writes,
    Half,
}

impl Mix {
    pub(crate) const ALL: [Mix; 3] = [Mix::Reads, Mix::Writes, Mix::Half];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Mix::Reads => "read",
            Mix::Writes => "write",
            Mix::Half => "50/50",
        }
    }

    #[inline]
    pub(crate) fn op(self, place: Place) -> Op {
        match self {
            Mix::Reads => Op::Read,
            Mix::Writes => Op::Write,
            Mix::Half if place.0 & 1 == 0 => Op::Read,
            Mix::Half => Op::Write,
        }
    }
}

/// The place of a request: a multiple of [`LEN`]; its lowest bit is a random choice between reading and
/// writing.
#[derive(Clone, Copy)]
pub(crate) struct Place(u64);

impl Place {
    #[inline]
    pub(crate) fn offset(self) -> u64 {
        self.0 & !1
    }
}

/// The stack of a queue.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Stacking {
    /// A null device under this number of layers that do nothing.
    Null { layers: u8 },
    /// This number of layers over a backend that holds each request until all requests of a turn have
    /// arrived.
    Held { layers: u8 },
    /// A backend that answers at once, with requests of [`PIECES`] times the length: the reference for
    /// splitting. A null device would not do: the children of a split accept no zero-copy memory, so it
    /// would fill their memory with zeroes.
    Long,
    /// A splitting layer: with `whole`, over a null device with requests that need no split; otherwise over
    /// a backend that answers at once, with requests as long as those of `Long`, each split into [`PIECES`]
    /// children.
    Split { whole: bool },
    /// A RAM disk on which every block is written, in pages of 4 KiB or in huge pages.
    Ram { huge: bool },
    /// mq-deadline over a null device, with requests at random or at consecutive places.
    Deadline { follow: bool },
    /// Multipath and its references, on a single queue.
    Multipath(Subject),
}

/// A queue under load.
pub(crate) struct Rig {
    queue: Queue<BenchRing>,
    ring: BenchRing,
    done: Vec<Done>,
    /// The places of requests. Their number is a power of two.
    places: Vec<Place>,
    next: usize,
    len: u64,
    flags: Flags,
}

/// Returns random places of a disk for requests of `LEN` bytes, with random choices.
pub(super) fn places() -> Vec<Place> {
    let mut random = fastrand::Rng::with_seed(1);
    let mut place = || Place(random.u64(..DISK.0 / LEN) * LEN + u64::from(random.bool()));
    (0..PLACES).map(|_| place()).collect()
}

/// Returns every block of the disk once.
fn in_order() -> Vec<Place> {
    (0..DISK.0 / LEN).map(|n| Place(n * LEN)).collect()
}

pub(super) fn disk_size() -> usize {
    DISK.0 as usize
}

/// A backend that completes each request within submit.
struct Immediate;

impl Node<BenchRing> for Immediate {
    fn submit(&mut self, _: Cookie, _: &mut Request, _: &mut Cx<'_, BenchRing>) -> Verdict {
        Verdict::Up(Status::Ok)
    }
}

/// A backend that holds each request, and completes all of them at the end of the turn.
#[derive(Default)]
struct Holding {
    /// Held requests in order of arrival. Allocated for all tags of the queue at the start: a kernel that
    /// holds requests does not allocate either.
    held: Box<[Cookie]>,
    count: usize,
}

impl Node<BenchRing> for Holding {
    fn attach(&mut self, _: NodeId, tags: usize) {
        self.held = vec![Cookie { tag: Tag(0), generation: 0 }; tags].into();
    }

    fn submit(&mut self, io: Cookie, _: &mut Request, _: &mut Cx<'_, BenchRing>) -> Verdict {
        if let Some(slot) = self.held.get_mut(self.count) {
            *slot = io;
            self.count += 1;
        }
        Verdict::Held
    }

    fn reap(&mut self, _: Cookie, _: &mut Request, _: i64, _: &mut Cx<'_, BenchRing>) -> Verdict {
        Verdict::Up(Status::Ok)
    }

    fn commit(&mut self, cx: &mut Cx<'_, BenchRing>) {
        let count = std::mem::take(&mut self.count);
        self.held[..count].iter().for_each(|&io| cx.resume(io, 0));
    }
}

fn backend(stacking: Stacking) -> Box<dyn Node<BenchRing>> {
    match stacking {
        Stacking::Long | Stacking::Split { whole: false } => Box::new(Immediate),
        Stacking::Held { .. } => Box::<Holding>::default(),
        Stacking::Ram { huge } => {
            let ram = Ram::new(&RamSpec { size: DISK, hugepages: huge, integrity: None })
                .expect("memory for a RAM disk");
            Box::new(Arc::clone(&ram).node(None))
        }
        _ => Box::new(Null::new(&NullSpec::default()).expect("a null device").node(Some(ZEROES))),
    }
}

fn limits() -> QueueLimits {
    let mut limits = QueueLimits {
        max_hw_sectors: Sectors(8192),
        max_user_sectors: Bytes(LEN).sectors(),
        ..QueueLimits::default()
    };
    limits.validate().expect("limits of one block");
    limits
}

/// Returns the null device's profile for a scheduler.
fn profile() -> Profile {
    let mut limits = QueueLimits { max_hw_sectors: Sectors(8192), ..QueueLimits::default() };
    limits.validate().expect("limits of a disk");
    Profile {
        size: DISK,
        read_only: false,
        abilities: Abilities::MEMORY,
        limits,
        bytewise: true,
        zero_copy_reads: true,
        inline: false,
        sparse: false,
        opaque: false,
    }
}

/// Returns the next request of a front-end.
#[inline(always)]
fn request(mix: Mix, place: Place, tag: Tag, len: u64, flags: Flags) -> Request {
    let memory = Segment { offset: tag.index() as u64 * len, len: len as u32, region: BUFFERS };
    let op = mix.op(place);
    // Exports provide no memory for reads that are certain to be zero-copy.
    let zero_copy = op == Op::Read && flags.contains(Flags::ZERO_COPY);
    let data = if zero_copy { Data::NONE } else { Data::One(memory) };
    Request { offset: Bytes(place.offset()), len: Bytes(len), data, op, flags }
}

impl Rig {
    pub(crate) fn new(stacking: Stacking) -> Rig {
        let mut stack = Stack::default();
        let is_long = matches!(stacking, Stacking::Long | Stacking::Split { whole: false });
        let len = if is_long { LEN * PIECES } else { LEN };
        match stacking {
            Stacking::Null { layers } | Stacking::Held { layers } => (1..=layers).for_each(|below| {
                stack.layer(Box::new(Pass::new(NodeId(below))), 0);
            }),
            Stacking::Split { .. } => {
                stack.layer(Box::new(Split::new(&limits(), NodeId(1))), Split::children(DEPTH));
            }
            Stacking::Deadline { .. } => {
                let scheduler = Scheduler::new(Choice::of(Policy::MqDeadline));
                scheduler.set_depth(DEPTH);
                let children = Layer::<BenchRing>::child_requests(&scheduler, DEPTH);
                stack.layer(scheduler.node(&profile(), &[NodeId(1)]), children);
            }
            Stacking::Long | Stacking::Ram { .. } => {}
            Stacking::Multipath(subject) => {
                return Rig::of_multipath(&Shared::new::<BenchRing>(subject, 1, DEPTH), 0);
            }
        }
        stack.backend(backend(stacking));
        // Reads of a null device are zero-copy, as with the NBD export. Reads of a RAM disk are copied, and
        // those that are split bring memory, too.
        let is_ram = matches!(stacking, Stacking::Ram { .. });
        let flags = if is_ram || is_long { Flags::empty() } else { Flags::ZERO_COPY };
        let mut rig = Rig::over(stack, len, flags);
        if is_ram {
            rig.fill();
        }
        if stacking == (Stacking::Deadline { follow: true }) {
            rig.places = in_order();
        }
        rig
    }

    /// Creates queue `number` of a device with several queues.
    pub(crate) fn of_multipath(shared: &Shared, number: u16) -> Rig {
        Rig::over(shared.stack(number, DEPTH, Some(ZEROES)), LEN, Flags::ZERO_COPY)
    }

    fn over(stack: Stack<BenchRing>, len: u64, flags: Flags) -> Rig {
        let config = QueueConfig { id: QueueId(0), depth: DEPTH, segments_per_tag: 16, timeout_ns: None };
        Rig {
            queue: Queue::new(config, stack).expect("a stack that fits"),
            ring: BenchRing::new(usize::from(DEPTH) * len as usize),
            done: Vec::with_capacity(DEPTH.into()),
            places: places(),
            next: 0,
            len,
            flags,
        }
    }

    /// Writes every block of the disk once.
    fn fill(&mut self) {
        let random = std::mem::replace(&mut self.places, in_order());
        self.run(Mix::Writes, DISK.0 / LEN);
        self.places = random;
        self.next = 0;
        let _ = self.counted();
    }

    /// Returns the number of requests in the statistics so far.
    pub(crate) fn counted(&mut self) -> u64 {
        let now = self.ring.read_clock();
        self.queue.stats().snapshot(now).ops.iter().map(|op| op.ios).sum()
    }

    /// Runs `count` requests, [`DEPTH`] in flight. The measured function.
    #[inline(never)]
    pub(crate) fn run(&mut self, mix: Mix, count: u64) {
        for _ in 0..count / u64::from(DEPTH) {
            self.turn(mix);
        }
    }

    #[inline]
    fn turn(&mut self, mix: Mix) {
        while let Some(tag) = self.queue.tag() {
            let index = self.next & (self.places.len() - 1);
            let place = self.places[index];
            self.next += 1;
            let req = request(mix, place, tag, self.len, self.flags);
            self.queue.submit(tag, Owner(index as u32), req, &mut self.ring);
        }
        self.queue.turn(&mut self.ring);
        self.queue.swap_done(&mut self.done);
        for done in self.done.drain(..) {
            assert!(done.status.is_ok(), "{:?}", done.status);
            self.queue.release(done.tag);
        }
        let now = self.ring.read_clock();
        statistics_of_a_turn(&mut self.queue, now);
    }
}

/// The load of a [`Rig`] without its queue: its cost is subtracted to get the cost of the queue.
pub(crate) struct Harness {
    ring: BenchRing,
    free: Vec<Tag>,
    done: Vec<Done>,
    places: Vec<Place>,
    next: usize,
}

impl Harness {
    pub(crate) fn new() -> Harness {
        Harness {
            ring: BenchRing::new(usize::from(DEPTH) * LEN as usize),
            free: (0..DEPTH).rev().map(Tag).collect(),
            done: Vec::with_capacity(DEPTH.into()),
            places: places(),
            next: 0,
        }
    }

    #[inline(never)]
    pub(crate) fn run(&mut self, mix: Mix, count: u64) {
        for _ in 0..count / u64::from(DEPTH) {
            while let Some(tag) = self.free.pop() {
                let index = self.next & (self.places.len() - 1);
                let place = self.places[index];
                self.next += 1;
                black_box(request(mix, place, tag, LEN, Flags::ZERO_COPY));
                self.done.push(Done { tag, owner: Owner(index as u32), status: Status::Ok });
            }
            for done in self.done.drain(..) {
                assert!(done.status.is_ok(), "{:?}", done.status);
                self.free.push(done.tag);
            }
            black_box(self.ring.read_clock());
        }
    }
}

/// Counts the requests of a turn. This is a separate function, so that its instructions can be counted
/// separately.
#[inline(never)]
fn statistics_of_a_turn(queue: &mut Queue<BenchRing>, now: Nanos) {
    queue.account(now);
}
