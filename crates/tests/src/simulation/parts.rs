//! A stack as data, and the creation of its nodes.

use super::paths::FlakyPath;
use super::program::Program;
use super::remote::Remote;
use super::seeded_fault::{Broken, BrokenBelow, SeededFault};
use super::stacks::Setup;
use super::target_line::TargetLine;
use super::within::Within;
use backends::FileNode;
use block::{Bytes, Profile, QueueLimits};
use exports::ublk::ModelRing;
use layers::dm::{TableLayer, TableTarget};
use layers::scheduler::{Choice, Scheduler};
use layers::{Cow, Layer, LayerOptions, Pass, Split};
use queue::{FileId, Node, NodeId, Ring, Stack};
use sim::nodes::{Chop, Delay, Flaky, Jam, Lender, Mirror, PlainFile, Retry, Shift};
use sim::{Rng, SimRing};

/// A node and the nodes below it.
#[derive(Clone, Debug)]
pub(super) enum Part {
    PlainFile {
        disk: usize,
    },
    File {
        disk: usize,
    },
    Ram {
        number: usize,
    },
    Null {
        number: usize,
    },
    Lender {
        number: usize,
    },
    Remote {
        number: usize,
    },
    Program {
        number: usize,
    },
    Delay {
        chance: u32,
        below: Box<Part>,
    },
    Jam {
        chance: u32,
        below: Box<Part>,
    },
    Flaky {
        chance: u32,
        below: Box<Part>,
    },
    Retry {
        times: u32,
        below: Box<Part>,
    },
    Shift {
        by: Bytes,
        below: Box<Part>,
    },
    Chop {
        children: u16,
        below: Box<Part>,
    },
    Pass {
        below: Box<Part>,
    },
    Split {
        limits: Box<QueueLimits>,
        children: u16,
        below: Box<Part>,
    },
    Within {
        limits: Box<QueueLimits>,
        below: Box<Part>,
    },
    /// Requests are merged up to these limits.
    Scheduler {
        choice: Choice,
        limits: Box<QueueLimits>,
        below: Box<Part>,
    },
    Mirror {
        children: u16,
        below: [Box<Part>; 2],
    },
    /// The origin, and the store. Short: the origin ends before the device does, and reads past it are filled
    /// here.
    Cow {
        overlay: usize,
        short: bool,
        children: u16,
        below: [Box<Part>; 2],
    },
    /// Requests are split as a table splits them for the target below.
    Table {
        row: TableTarget,
        below: Box<Part>,
    },
    /// A target of the list, from a line. Without faults in a calm world.
    Target {
        line: TargetLine,
        below: Box<[Box<Part>]>,
    },
    /// A layer of the list of drivers. Without faults in a calm world.
    Driver {
        words: LayerOptions,
        fails: bool,
        below: Box<Part>,
    },
    /// A log-writes target: its device, and its log's device.
    Logged {
        number: usize,
        below: [Box<Part>; 2],
    },
    /// A node that fails requests like a lost path.
    FlakyPath {
        chance: u32,
        below: Box<Part>,
    },
    /// Two paths to one disk.
    Multipath {
        number: usize,
        seeded_fault: Option<SeededFault>,
        below: [Box<Part>; 2],
    },
    Broken {
        seeded_fault: SeededFault,
        below: Box<Part>,
    },
    BrokenBelow {
        seeded_fault: SeededFault,
        data_at: Bytes,
        below: Box<Part>,
    },
}

impl Part {
    fn below(&self) -> &[Box<Part>] {
        match self {
            Part::PlainFile { .. }
            | Part::File { .. }
            | Part::Ram { .. }
            | Part::Null { .. }
            | Part::Lender { .. }
            | Part::Remote { .. }
            | Part::Program { .. } => &[],
            Part::Mirror { below, .. }
            | Part::Cow { below, .. }
            | Part::Multipath { below, .. }
            | Part::Logged { below, .. } => below,
            Part::Target { below, .. } => below,
            Part::Table { below, .. } | Part::Driver { below, .. } => std::slice::from_ref(below),
            Part::Delay { below, .. }
            | Part::Jam { below, .. }
            | Part::Flaky { below, .. }
            | Part::FlakyPath { below, .. }
            | Part::Retry { below, .. }
            | Part::Shift { below, .. }
            | Part::Chop { below, .. }
            | Part::Pass { below }
            | Part::Split { below, .. }
            | Part::Within { below, .. }
            | Part::Scheduler { below, .. }
            | Part::Broken { below, .. }
            | Part::BrokenBelow { below, .. } => std::slice::from_ref(below),
        }
    }

    /// Returns whether no part accesses data: requests may then have memory that only the kernel can access.
    pub(super) fn is_opaque(&self, takes_any_block: &impl Fn(usize) -> bool) -> bool {
        let own = match self {
            Part::PlainFile { .. } => true,
            Part::File { disk } => takes_any_block(*disk),
            Part::Cow { short, .. } => !short,
            Part::Ram { .. } | Part::Null { .. } | Part::Lender { .. } | Part::Broken { .. } => false,
            Part::Remote { .. } | Part::Program { .. } | Part::Logged { .. } => false,
            Part::Target { line, .. } => !line.accesses_data,
            _ => true,
        };
        own && self.below().iter().all(|part| part.is_opaque(takes_any_block))
    }

    /// Returns the number of nodes of this part, including itself.
    pub(super) fn size(&self) -> u8 {
        1 + self.below().iter().map(|part| part.size()).sum::<u8>()
    }

    pub(super) fn describe(&self, text: &mut String) {
        let own = match self {
            Part::PlainFile { disk } => format!("plain file {disk}"),
            Part::File { disk } => format!("file {disk}"),
            Part::Ram { number } => format!("ram {number}"),
            Part::Null { number } => format!("null {number}"),
            Part::Lender { number } => format!("lender {number}"),
            Part::Remote { number } => format!("nbd {number}"),
            Part::Program { number } => format!("exec {number}"),
            Part::Delay { chance, .. } => format!("delay {chance}"),
            Part::Jam { chance, .. } => format!("jam {chance}"),
            Part::Flaky { chance, .. } => format!("flaky {chance}"),
            Part::FlakyPath { chance, .. } => format!("flaky path {chance}"),
            Part::Retry { times, .. } => format!("retry {times}"),
            Part::Shift { by, .. } => format!("shift {by}"),
            Part::Chop { children, .. } => format!("chop {children}"),
            Part::Mirror { children, .. } => format!("mirror {children}"),
            Part::Table { row, .. } => format!("table {:?}", row.max_io_len),
            Part::Target { line, .. } => line.to_string(),
            Part::Multipath { number, seeded_fault, .. } => format!("multipath {number} {seeded_fault:?}"),
            Part::Driver { words, .. } => words.to_string(),
            Part::Logged { number, .. } => format!("logged {number}"),
            Part::Pass { .. } => "pass".to_owned(),
            Part::Split { children, .. } => format!("split {children}"),
            Part::Within { limits, .. } => format!("within {limits:?}"),
            Part::Scheduler { choice, .. } => choice.to_string(),
            Part::Cow { overlay, .. } => format!("cow {overlay}"),
            Part::Broken { seeded_fault, .. } | Part::BrokenBelow { seeded_fault, .. } => {
                format!("broken {seeded_fault:?}")
            }
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

/// A ring for which a stack can be built.
pub(super) trait Remotes: Ring + Sized {
    /// Creates the node over a server.
    fn remote(remote: &Remote) -> Box<dyn Node<Self>>;
    /// Creates the node over a driver program.
    fn program(program: &Program) -> Box<dyn Node<Self>>;
}

impl Remotes for SimRing {
    fn remote(remote: &Remote) -> Box<dyn Node<SimRing>> {
        Box::new(remote.node())
    }

    fn program(program: &Program) -> Box<dyn Node<SimRing>> {
        Box::new(program.node())
    }
}

impl<R: Ring> Remotes for ModelRing<R> {
    fn remote(_: &Remote) -> Box<dyn Node<ModelRing<R>>> {
        unreachable!("stacks for this ring are chosen without servers")
    }

    fn program(_: &Program) -> Box<dyn Node<ModelRing<R>>> {
        unreachable!("stacks for this ring are chosen without programs")
    }
}

pub(super) struct Builder<'a> {
    pub(super) setup: &'a Setup,
    pub(super) rng: &'a mut Rng,
    pub(super) calm: bool,
}

impl Builder<'_> {
    /// Adds a part with the number `id`: parents precede their children, which follow at once.
    pub(super) fn add<R: Remotes>(&mut self, part: &Part, id: u8, stack: &mut Stack<R>) {
        let child = NodeId(id + 1);
        let rng = self.rng.fork();
        let got = match part {
            Part::PlainFile { disk } => {
                let latch = (!self.setup.forgets_sync_errors).then(|| self.setup.latches[*disk].clone());
                stack.backend(Box::new(PlainFile::new(FileId(*disk as u32), latch)))
            }
            Part::File { disk } => {
                let shared = self.setup.shared[*disk].clone().expect("made when the files were opened");
                let file = FileId(*disk as u32);
                stack.backend(Box::new(FileNode::new(shared, file).with_sync_file(file)))
            }
            Part::Ram { number } => stack.backend(Box::new(self.setup.rams[*number].node(None))),
            Part::Null { number } => stack.backend(Box::new(self.setup.nulls[*number].node(None))),
            Part::Lender { number } => stack.backend(Box::new(Lender::new(self.setup.lenders[*number]))),
            Part::Remote { number } => stack.backend(R::remote(&self.setup.remotes[*number])),
            Part::Program { number } => stack.backend(R::program(&self.setup.programs[*number])),
            Part::Delay { chance, .. } => stack.layer(Box::new(Delay::new(child, rng, *chance)), 0),
            Part::Jam { chance, .. } => stack.layer(Box::new(Jam::new(child, rng, *chance)), 0),
            Part::Flaky { chance, .. } => {
                let chance = if self.calm { 0 } else { *chance };
                stack.layer(Box::new(Flaky::new(child, rng, chance)), 0)
            }
            Part::FlakyPath { chance, .. } => {
                let chance = if self.calm { 0 } else { *chance };
                stack.layer(Box::new(FlakyPath::new(child, rng, chance)), 0)
            }
            Part::Retry { times, .. } => stack.layer(Box::new(Retry::new(child, *times)), 0),
            Part::Shift { by, .. } => stack.layer(Box::new(Shift::new(child, *by)), 0),
            Part::Chop { children, .. } => stack.layer(Box::new(Chop::new(child, rng)), *children),
            Part::Pass { .. } => stack.layer(Box::new(Pass::new(child)), 0),
            Part::Split { limits, children, .. } => {
                stack.layer(Box::new(Split::new(limits, child)), *children)
            }
            Part::Within { limits, .. } => {
                stack.layer(Box::new(Within::new(child, QueueLimits::clone(limits))), 0)
            }
            Part::Scheduler { choice, limits, below } => {
                let scheduler = Scheduler::new(*choice);
                let zero_copy_reads = matches!(**below, Part::Lender { .. });
                let whole = Profile {
                    limits: QueueLimits::clone(limits),
                    zero_copy_reads,
                    ..self.setup.any_profile()
                };
                scheduler.set_depth(self.setup.depth);
                let children = Layer::<R>::child_requests(&scheduler, self.setup.depth);
                stack.layer(Layer::<R>::node(&scheduler, &whole, &[child]), children)
            }
            Part::Mirror { children, below } => {
                let second = NodeId(id + 1 + below[0].size());
                stack.layer(Box::new(Mirror::new([child, second], rng)), *children)
            }
            Part::Cow { overlay, children, below, .. } => {
                let store = NodeId(id + 1 + below[0].size());
                let index = self.setup.overlays[*overlay].index.clone().expect("made when it was opened");
                stack.layer(Box::new(Cow::new(index, [child, store])), *children)
            }
            Part::Table { row, .. } => {
                let table = TableLayer::new(vec![*row]);
                stack.layer(Layer::<R>::node(&table, &self.setup.any_profile(), &[child]), 16)
            }
            Part::Target { line, .. } if line.fails && self.calm => {
                stack.layer(Box::new(Pass::new(child)), 0)
            }
            Part::Target { line, below } => {
                let (mut children, mut next) = (Vec::new(), id + 1);
                for part in below {
                    children.push(NodeId(next));
                    next += part.size();
                }
                let (target, devices) = line.build::<R>(&self.setup.any_profile());
                let children: Vec<NodeId> = devices.into_iter().map(|device| children[device]).collect();
                let node = target.node(&self.setup.any_profile(), &children);
                stack.layer(node, target.child_requests(self.setup.depth))
            }
            Part::Driver { fails: true, .. } if self.calm => stack.layer(Box::new(Pass::new(child)), 0),
            Part::Driver { words, .. } => {
                let profile = self.setup.any_profile();
                let layer = words.layer::<R>(std::slice::from_ref(&profile)).expect("it takes any device");
                stack.layer(layer.node(&profile, &[child]), layer.child_requests(self.setup.depth))
            }
            Part::Logged { number, below } => {
                let children = [child, NodeId(id + 1 + below[0].size())];
                let log = &self.setup.logs[*number];
                stack.layer(Layer::<R>::node(&**log, &self.setup.any_profile(), &children), 2)
            }
            Part::Multipath { number, seeded_fault, below } => {
                let children = [child, NodeId(id + 1 + below[0].size())];
                stack.layer(self.setup.paths[*number].node(&children, *seeded_fault, rng), 0)
            }
            Part::BrokenBelow { seeded_fault, data_at, .. } => {
                stack.layer(Box::new(BrokenBelow::new(child, *seeded_fault, *data_at)), 0)
            }
            Part::Broken { seeded_fault, .. } => {
                stack.layer(Box::new(Broken::new(child, *seeded_fault, rng)), 64)
            }
        };
        assert_eq!(got, NodeId(id), "nodes are numbered as they are added");
        let mut next = id + 1;
        for below in part.below() {
            self.add(below, next, stack);
            next += below.size();
        }
    }
}
