//! A queue with a stack, and a front end that keeps it busy.

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

/// How large the RAM disk is: far more than any cache.
const DISK: Bytes = Bytes::mib(256);
/// How many places there are before they repeat: a power of two. No branch predictor learns so many coins.
const PLACES: usize = 1 << 16;

/// What is asked of the device.
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

/// Where a request goes: a multiple of [`LEN`], and in its lowest bit a coin that decides between reading and writing.
#[derive(Clone, Copy)]
pub(crate) struct Place(u64);

impl Place {
    #[inline]
    pub(crate) fn offset(self) -> u64 {
        self.0 & !1
    }
}

/// What the queue carries requests through.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Stacking {
    /// A null device under so many layers that do nothing.
    Null { layers: u8 },
    /// The same over a backend at which each request rests until all of a turn are there.
    Rest { layers: u8 },
    /// A hollow device and requests as long as [`PIECES`]: what cutting is held against. Pieces take no lent
    /// memory, and a null device would fill what they read with zeroes.
    Long,
    /// A split: over a null device with requests that fit, or over a hollow one with requests that are as
    /// `Long` and cut into [`PIECES`].
    Split { whole: bool },
    /// A RAM disk, every block of which is written, in pages of 4 KiB.
    Ram,
    /// mq-deadline over a null device, with requests at random places, or with such as follow on each other.
    Deadline { follow: bool },
    /// Multipath and what it is held against, as one queue alone sees them.
    Multipath(Subject),
}

/// A queue under load.
pub(crate) struct Rig {
    queue: Queue<BenchRing>,
    ring: BenchRing,
    done: Vec<Done>,
    /// A power of two of them.
    places: Vec<Place>,
    next: usize,
    len: u64,
    flags: Flags,
}

/// Random places of a disk where a request of `LEN` bytes may lie, with random coins.
pub(super) fn places() -> Vec<Place> {
    let mut random = fastrand::Rng::with_seed(1);
    let mut place = || Place(random.u64(..DISK.0 / LEN) * LEN + u64::from(random.bool()));
    (0..PLACES).map(|_| place()).collect()
}

/// Every block of the disk once.
fn in_order() -> Vec<Place> {
    (0..DISK.0 / LEN).map(|n| Place(n * LEN)).collect()
}

pub(super) fn disk_size() -> usize {
    DISK.0 as usize
}

/// Answers without looking.
struct Hollow;

impl Node<BenchRing> for Hollow {
    fn submit(&mut self, _: Cookie, _: &mut Request, _: &mut Cx<'_, BenchRing>) -> Verdict {
        Verdict::Up(Status::Ok)
    }
}

/// Holds each request, and answers all of them once no more come.
#[derive(Default)]
struct Resting(Vec<Cookie>);

impl Node<BenchRing> for Resting {
    fn attach(&mut self, _: NodeId, tags: usize) {
        self.0.reserve(tags);
    }

    fn submit(&mut self, io: Cookie, _: &mut Request, _: &mut Cx<'_, BenchRing>) -> Verdict {
        self.0.push(io);
        Verdict::Held
    }

    fn reap(&mut self, _: Cookie, _: &mut Request, _: i64, _: &mut Cx<'_, BenchRing>) -> Verdict {
        Verdict::Up(Status::Ok)
    }

    fn commit(&mut self, cx: &mut Cx<'_, BenchRing>) {
        self.0.drain(..).for_each(|io| cx.resume(io, 0));
    }
}

fn backend(stacking: Stacking) -> Box<dyn Node<BenchRing>> {
    match stacking {
        Stacking::Long | Stacking::Split { whole: false } => Box::new(Hollow),
        Stacking::Rest { .. } => Box::<Resting>::default(),
        Stacking::Ram => {
            let ram = Ram::new(&RamSpec { size: DISK, huge: false, integrity: None })
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

/// What a scheduler knows of the null device.
fn profile() -> Profile {
    let mut limits = QueueLimits { max_hw_sectors: Sectors(8192), ..QueueLimits::default() };
    limits.validate().expect("limits of a disk");
    Profile {
        size: DISK,
        read_only: false,
        abilities: Abilities::MEMORY,
        limits,
        bytewise: true,
        lends: true,
        in_place: false,
        sparse: false,
        opaque: false,
    }
}

impl Rig {
    pub(crate) fn new(stacking: Stacking) -> Rig {
        let mut stack = Stack::default();
        let is_long = matches!(stacking, Stacking::Long | Stacking::Split { whole: false });
        let len = if is_long { LEN * PIECES } else { LEN };
        match stacking {
            Stacking::Null { layers } | Stacking::Rest { layers } => (1..=layers).for_each(|below| {
                stack.layer(Box::new(Pass::new(NodeId(below))), 0);
            }),
            Stacking::Split { .. } => {
                stack.layer(Box::new(Split::new(&limits(), NodeId(1))), Split::children(DEPTH));
            }
            Stacking::Deadline { .. } => {
                let scheduler = Scheduler::new(Choice::of(Policy::MqDeadline));
                scheduler.made_for(DEPTH);
                let children = Layer::<BenchRing>::spares(&scheduler, DEPTH);
                stack.layer(scheduler.node(&profile(), &[NodeId(1)]), children);
            }
            Stacking::Long | Stacking::Ram => {}
            Stacking::Multipath(subject) => {
                return Rig::of_multipath(&Shared::new::<BenchRing>(subject, 1, DEPTH), 0);
            }
        }
        stack.backend(backend(stacking));
        // A null device's reads are lent, as the NBD export has them; a RAM disk's are to be copied, and those that are cut
        // bring memory, too.
        let is_ram = stacking == Stacking::Ram;
        let flags = if is_ram || is_long { Flags::NONE } else { Flags::MAY_LEND };
        let mut rig = Rig::over(stack, len, flags);
        if is_ram {
            rig.fill();
        }
        if stacking == (Stacking::Deadline { follow: true }) {
            rig.places = in_order();
        }
        rig
    }

    /// Queue `number` of a device that several share.
    pub(crate) fn of_multipath(shared: &Shared, number: u16) -> Rig {
        Rig::over(shared.stack(number, DEPTH, Some(ZEROES)), LEN, Flags::MAY_LEND)
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

    /// Write every block of the disk once.
    fn fill(&mut self) {
        let random = std::mem::replace(&mut self.places, in_order());
        self.run(Mix::Writes, DISK.0 / LEN);
        self.places = random;
        self.next = 0;
        let _ = self.counted();
    }

    /// How many requests were counted so far, in the statistics' sense.
    pub(crate) fn counted(&mut self) -> u64 {
        let now = self.ring.look_at_clock();
        self.queue.stats().snapshot(now).ops.iter().map(|op| op.ios).sum()
    }

    /// Carry `count` requests, [`DEPTH`] in flight. What is measured.
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
            let memory =
                Segment { offset: tag.index() as u64 * self.len, len: self.len as u32, region: BUFFERS };
            let op = mix.op(place);
            // Where reads are sure to be lent memory, the exports bring none.
            let lent = op == Op::Read && self.flags.has(Flags::MAY_LEND);
            let req = Request {
                offset: Bytes(place.offset()),
                len: Bytes(self.len),
                data: if lent { Data::NONE } else { Data::One(memory) },
                op,
                flags: self.flags,
            };
            self.queue.submit(tag, Owner(index as u32), req, &mut self.ring);
        }
        self.queue.turn(&mut self.ring);
        self.queue.swap_done(&mut self.done);
        for done in self.done.drain(..) {
            assert!(done.status.is_ok(), "{:?}", done.status);
            self.queue.release(done.tag);
        }
        let now = self.ring.look_at_clock();
        statistics_of_a_turn(&mut self.queue, now);
    }
}

/// What keeps a [`Rig`] busy, without its queue: what is taken off to see what the queue takes.
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
                let memory = Segment { offset: tag.index() as u64 * LEN, len: LEN as u32, region: BUFFERS };
                let op = mix.op(place);
                let data = if op == Op::Read { Data::NONE } else { Data::One(memory) };
                let (offset, len) = (Bytes(place.offset()), Bytes(LEN));
                black_box(Request { offset, len, data, op, flags: Flags::MAY_LEND });
                self.done.push(Done { tag, owner: Owner(index as u32), status: Status::Ok });
            }
            for done in self.done.drain(..) {
                assert!(done.status.is_ok(), "{:?}", done.status);
                self.free.push(done.tag);
            }
            black_box(self.ring.look_at_clock());
        }
    }
}

/// A function of its own, so that what it takes can be counted apart from all else.
#[inline(never)]
fn statistics_of_a_turn(queue: &mut Queue<BenchRing>, now: Nanos) {
    queue.account(now);
}
