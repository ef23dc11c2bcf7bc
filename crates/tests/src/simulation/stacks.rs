//! Random stacks, as data: the same stack is built for each queue, and again when it is opened again.

use super::Scenario;
use super::breakage::{Breakage, Broken};
use backends::{Alignment, Completion, Facts, FileNode, Null, NullSpec, Ram, RamSpec, Shared};
use block::{Bytes, Sectors, Segment};
use queue::{FileId, NodeId, Ring as _, Stack};
use sim::nodes::{Chop, Delay, Flaky, Jam, Lender, Mirror, PlainFile, Retry, Shift};
use sim::{Disk, DiskConfig, Faults, Rng, SimRing};
use std::cell::Cell;
use std::fmt::Write as _;
use std::rc::Rc;
use std::sync::Arc;

/// The most nodes on a path, kept below the queue's own bound.
const DEPTH_MAX: usize = 6;

/// A node and those below it.
#[derive(Clone, Debug)]
enum Part {
    PlainFile { disk: usize },
    File { disk: usize },
    Ram { number: usize },
    Null { number: usize },
    Lender { number: usize },
    Delay { chance: u32, below: Box<Part> },
    Jam { chance: u32, below: Box<Part> },
    Flaky { chance: u32, below: Box<Part> },
    Retry { times: u32, below: Box<Part> },
    Shift { by: Bytes, below: Box<Part> },
    Chop { children: u16, below: Box<Part> },
    Mirror { children: u16, below: [Box<Part>; 2] },
    Broken { breakage: Breakage, below: Box<Part> },
}

/// Everything about a run that stays while it runs.
#[derive(Debug)]
pub(super) struct Setup {
    top: Part,
    disks: Vec<DiskConfig>,
    /// A sync of the disk failed, for all who have it open.
    latches: Vec<Rc<Cell<bool>>>,
    /// What is known of each disk, for those that a [`FileNode`](backends::FileNode) serves.
    facts: Vec<Option<Facts>>,
    /// What its nodes share, made anew whenever the files are opened.
    shared: Vec<Option<Arc<Shared>>>,
    rams: Vec<Arc<Ram>>,
    nulls: Vec<Null>,
    /// Lengths, and once plugged in also the memory, of what lends.
    lenders: Vec<Segment>,
    forgets_sync_errors: bool,
    pub(super) sectors: Sectors,
    pub(super) queues: u16,
    pub(super) depth: u16,
    pub(super) segments_per_tag: u16,
    pub(super) timeout_ns: Option<u64>,
    pub(super) faults: Faults,
    /// It keeps what it holds when the power goes.
    pub(super) durable: bool,
    /// Two places hold the same data, and may differ after a power cut.
    pub(super) replicas: bool,
    /// Requests are counted in pieces.
    pub(super) pieces: bool,
    /// Requests may fail without anyone being wrong.
    pub(super) can_fail: bool,
    /// Discard or write zeroes may be refused.
    pub(super) can_refuse: bool,
}

impl Setup {
    pub(super) fn random(rng: &mut Rng, scenario: Scenario) -> Setup {
        let mut setup = Setup {
            top: Part::PlainFile { disk: 0 },
            disks: Vec::new(),
            latches: Vec::new(),
            facts: Vec::new(),
            shared: Vec::new(),
            rams: Vec::new(),
            nulls: Vec::new(),
            lenders: Vec::new(),
            forgets_sync_errors: scenario.breakage == Some(Breakage::ForgottenSyncError),
            sectors: Sectors(rng.between(8, 128) * 8),
            queues: rng.between(1, 2) as u16,
            depth: *rng.pick(&[1, 2, 8, 32]),
            segments_per_tag: *rng.pick(&[1, 2, 8, 100]),
            timeout_ns: rng.chance(300).then(|| rng.between(1_000_000, 400_000_000)),
            faults: Faults::NONE,
            durable: scenario.breakage.is_some() || !rng.chance(300),
            replicas: false,
            pieces: false,
            can_fail: false,
            can_refuse: false,
        };
        setup.faults = random_faults(rng, setup.timeout_ns.is_some());
        if setup.forgets_sync_errors {
            setup.faults.sync_error = 300;
        }
        setup.can_fail = setup.faults.can_fail_requests();
        let extra = scenario.breakage.is_some().into();
        setup.top = setup.tree(rng, extra, Bytes(setup.sectors.0 << 9));
        if let Some(breakage) = scenario.breakage {
            setup.top = Part::Broken { breakage, below: Box::new(setup.top.clone()) };
            setup.pieces = true;
        }
        setup
    }

    /// A random stack whose device is at least `len` long, `above` nodes below the top.
    fn tree(&mut self, rng: &mut Rng, above: usize, len: Bytes) -> Part {
        if above + 1 >= DEPTH_MAX || rng.chance(250) {
            return self.backend(rng, len);
        }
        let below = |setup: &mut Setup, rng: &mut Rng, len| Box::new(setup.tree(rng, above + 1, len));
        match rng.below(7) {
            0 => Part::Delay { chance: rng.between(50, 900) as u32, below: below(self, rng, len) },
            1 => Part::Jam { chance: rng.between(20, 400) as u32, below: below(self, rng, len) },
            2 => {
                self.can_fail = true;
                // Now and then almost nothing gets through, so that who tries often runs out of hops.
                let most = *rng.pick(&[30, 100, 100, 900]);
                Part::Flaky { chance: rng.between(5, most) as u32, below: below(self, rng, len) }
            }
            3 => Part::Retry { times: *rng.pick(&[1, 2, 3, 200]), below: below(self, rng, len) },
            4 => {
                let by = Bytes(rng.between(0, 64) << 9);
                Part::Shift { by, below: below(self, rng, len + by) }
            }
            5 => {
                self.pieces = true;
                let children = rng.between(Chop::PIECES.into(), 64) as u16;
                Part::Chop { children, below: below(self, rng, len) }
            }
            _ => {
                self.replicas = true;
                let children = rng.between(Mirror::COPIES.into(), 64) as u16;
                Part::Mirror { children, below: [below(self, rng, len), below(self, rng, len)] }
            }
        }
    }

    fn backend(&mut self, rng: &mut Rng, len: Bytes) -> Part {
        if self.durable {
            return self.any_file(rng, len);
        }
        match rng.below(4) {
            0 => {
                self.rams.push(Ram::new(&RamSpec { size: len, huge: false }).expect("memory"));
                Part::Ram { number: self.rams.len() - 1 }
            }
            1 => {
                let completion = *rng.pick(&[Completion::Instant, Completion::After(20_000)]);
                let spec = NullSpec { size: len, completion, memory_backed: true };
                self.nulls.push(Null::new(&spec).expect("memory"));
                Part::Null { number: self.nulls.len() - 1 }
            }
            2 => {
                self.lenders.push(Segment { len: len.0 as u32, ..Segment::EMPTY });
                Part::Lender { number: self.lenders.len() - 1 }
            }
            _ => self.any_file(rng, len),
        }
    }

    fn any_file(&mut self, rng: &mut Rng, len: Bytes) -> Part {
        let (punch, zero_range) = (!rng.chance(200), !rng.chance(300));
        let disk = self.disks.len();
        self.latches.push(Rc::default());
        if self.forgets_sync_errors || rng.chance(250) {
            self.can_refuse |= !punch || !zero_range;
            self.disks.push(DiskConfig { len: len.0, punch, zero_range, align: 1, align_memory: 1 });
            self.facts.push(None);
            return Part::PlainFile { disk };
        }
        self.can_refuse |= !punch;
        let direct = rng.chance(400).then(|| *rng.pick(&[512, 4096]));
        let unit = direct.unwrap_or(512);
        let start = Bytes(rng.below(10) * unit);
        let size = Bytes(len.0.next_multiple_of(unit));
        let facts = Facts {
            start,
            size,
            block: unit as u32,
            read_only: false,
            direct: direct.map(|offset| Alignment { memory: 512, offset: offset as u32 }),
            memory: direct.is_none() && !self.durable && rng.chance(300),
            nowait_reads: rng.chance(500),
            nowait_writes: rng.chance(500),
            // These are timed by the real clock, which would not replay.
            timed_writes: false,
            block_device: false,
        };
        self.facts.push(Some(facts));
        let (align, align_memory) = direct.map_or((1, 1), |offset| (offset, 512));
        let len = start.0 + size.0;
        self.disks.push(DiskConfig { len, punch, zero_range, align, align_memory });
        Part::File { disk }
    }

    /// Plug disks and memory into a new ring that has no faults yet.
    pub(super) fn plug(&mut self, ring: &mut SimRing) {
        for &config in &self.disks {
            ring.add_disk(Disk::new(config));
        }
        for memory in &mut self.lenders {
            *memory = ring.allocate(memory.len).expect("a ring without faults has memory");
            ring.bytes_mut(*memory).fill(0);
        }
    }

    /// Allocations that stay while nothing is under way.
    pub(super) fn memory_kept(&self) -> usize {
        self.lenders.len()
    }

    /// Open the files again: what was wrong with them before is forgotten.
    pub(super) fn reopen(&mut self) {
        self.shared = self.facts.iter().map(|facts| facts.map(Shared::new)).collect();
        self.latches.iter().for_each(|latch| latch.set(false));
    }

    /// One queue's instance of the stack. `calm`: without nodes that fail requests.
    pub(super) fn build(&self, rng: &mut Rng, calm: bool) -> Stack<SimRing> {
        let mut stack = Stack::default();
        Builder { setup: self, rng, calm }.add(&self.top, 0, &mut stack);
        stack
    }

    /// The setup in a line or two.
    pub(super) fn describe(&self) -> String {
        let mut text = String::new();
        self.top.describe(&mut text);
        let (sectors, queues, depth) = (self.sectors.0, self.queues, self.depth);
        let _ = write!(text, "; {sectors} sectors, {queues} queues of {depth}");
        for (disk, facts) in self.facts.iter().enumerate() {
            let _ = match facts {
                Some(facts) => write!(text, "\nfile {disk}: {:?} {facts:?}", self.disks[disk]),
                None => write!(text, "\nfile {disk}: {:?}", self.disks[disk]),
            };
        }
        let _ = write!(text, ", timeout {:?}\n{:?}", self.timeout_ns, self.faults);
        text
    }
}

fn random_faults(rng: &mut Rng, timeouts: bool) -> Faults {
    let mut some = |chance, most| if rng.chance(chance) { rng.between(1, most) as u32 } else { 0 };
    let gentle = Faults {
        short: some(600, 400),
        slow: some(500, 100),
        ring_full: some(500, 300),
        not_now: some(500, 500),
        no_memory: some(400, 200),
        ..Faults::NONE
    };
    if some(500, 1) == 0 {
        return gentle;
    }
    Faults {
        io_error: some(500, 80),
        again: some(300, 50),
        no_space: some(300, 100),
        sync_error: some(500, 200),
        lost: if timeouts { some(700, 30) } else { 0 },
        ..gentle
    }
}

impl Part {
    fn below(&self) -> &[Box<Part>] {
        match self {
            Part::PlainFile { .. }
            | Part::File { .. }
            | Part::Ram { .. }
            | Part::Null { .. }
            | Part::Lender { .. } => &[],
            Part::Mirror { below, .. } => below,
            Part::Delay { below, .. }
            | Part::Jam { below, .. }
            | Part::Flaky { below, .. }
            | Part::Retry { below, .. }
            | Part::Shift { below, .. }
            | Part::Chop { below, .. }
            | Part::Broken { below, .. } => std::slice::from_ref(below),
        }
    }

    /// Nodes of this part, itself included.
    fn size(&self) -> u8 {
        1 + self.below().iter().map(|part| part.size()).sum::<u8>()
    }

    fn describe(&self, text: &mut String) {
        let own = match self {
            Part::PlainFile { disk } => format!("plain file {disk}"),
            Part::File { disk } => format!("file {disk}"),
            Part::Ram { number } => format!("ram {number}"),
            Part::Null { number } => format!("null {number}"),
            Part::Lender { number } => format!("lender {number}"),
            Part::Delay { chance, .. } => format!("delay {chance}"),
            Part::Jam { chance, .. } => format!("jam {chance}"),
            Part::Flaky { chance, .. } => format!("flaky {chance}"),
            Part::Retry { times, .. } => format!("retry {times}"),
            Part::Shift { by, .. } => format!("shift {by}"),
            Part::Chop { children, .. } => format!("chop {children}"),
            Part::Mirror { children, .. } => format!("mirror {children}"),
            Part::Broken { breakage, .. } => format!("broken {breakage:?}"),
        };
        text.push_str(&own);
        if let Some((last, others)) = self.below().split_last() {
            text.push_str(" > ");
            for part in others {
                text.push('(');
                part.describe(text);
                text.push_str(") ");
            }
            last.describe(text);
        }
    }
}

struct Builder<'a> {
    setup: &'a Setup,
    rng: &'a mut Rng,
    calm: bool,
}

impl Builder<'_> {
    /// Add a part, whose number will be `id`: parents come before their children, which follow at once.
    fn add(&mut self, part: &Part, id: u8, stack: &mut Stack<SimRing>) {
        let child = NodeId(id + 1);
        let rng = self.rng.fork();
        let got = match part {
            Part::PlainFile { disk } => {
                let latch = (!self.setup.forgets_sync_errors).then(|| self.setup.latches[*disk].clone());
                stack.backend(Box::new(PlainFile::new(FileId(*disk as u32), latch)))
            }
            Part::File { disk } => {
                let shared = self.setup.shared[*disk].clone().expect("made when the files were opened");
                stack.backend(Box::new(FileNode::new(shared, FileId(*disk as u32))))
            }
            Part::Ram { number } => stack.backend(Box::new(self.setup.rams[*number].node(None))),
            Part::Null { number } => stack.backend(Box::new(self.setup.nulls[*number].node(None))),
            Part::Lender { number } => stack.backend(Box::new(Lender::new(self.setup.lenders[*number]))),
            Part::Delay { chance, .. } => stack.layer(Box::new(Delay::new(child, rng, *chance)), 0),
            Part::Jam { chance, .. } => stack.layer(Box::new(Jam::new(child, rng, *chance)), 0),
            Part::Flaky { chance, .. } => {
                let chance = if self.calm { 0 } else { *chance };
                stack.layer(Box::new(Flaky::new(child, rng, chance)), 0)
            }
            Part::Retry { times, .. } => stack.layer(Box::new(Retry::new(child, *times)), 0),
            Part::Shift { by, .. } => stack.layer(Box::new(Shift::new(child, *by)), 0),
            Part::Chop { children, .. } => stack.layer(Box::new(Chop::new(child, rng)), *children),
            Part::Mirror { children, below } => {
                let second = NodeId(id + 1 + below[0].size());
                stack.layer(Box::new(Mirror::new([child, second], rng)), *children)
            }
            Part::Broken { breakage, .. } => stack.layer(Box::new(Broken::new(child, *breakage, rng)), 64),
        };
        assert_eq!(got, NodeId(id), "nodes are numbered as they are added");
        let mut next = id + 1;
        for below in part.below() {
            self.add(below, next, stack);
            next += below.size();
        }
    }
}
