//! A stack as data, and how nodes are made of it.

use super::breakage::{Breakage, Broken, BrokenBelow};
use super::paths::FlakyPath;
use super::remote::Remote;
use super::stacks::Setup;
use super::within::Within;
use backends::FileNode;
use block::{Bytes, Profile, QueueLimits, Sectors};
use exports::ublk::ModelRing;
use layers::dm::{Place, Row, Striped, TableLayer};
use layers::scheduler::{Choice, Scheduler};
use layers::{Cow, Layer, Pass, Split, Words};
use queue::{FileId, Node, NodeId, Ring, Stack};
use sim::nodes::{Chop, Delay, Flaky, Jam, Lender, Mirror, PlainFile, Retry, Shift};
use sim::{Rng, SimRing};

/// A node and those below it.
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
    /// Requests are merged to those limits.
    Scheduler {
        choice: Choice,
        limits: Box<QueueLimits>,
        below: Box<Part>,
    },
    Mirror {
        children: u16,
        below: [Box<Part>; 2],
    },
    /// The origin, and the store. Short: the origin ends before the device does, and what is read past it is
    /// filled here.
    Cow {
        overlay: usize,
        short: bool,
        children: u16,
        below: [Box<Part>; 2],
    },
    /// Requests are cut at every so many bytes, as a table does it for what stands below.
    Table {
        cut: Bytes,
        below: Box<Part>,
    },
    /// Two stripes of a chunk each, under a table.
    Striped {
        chunk: Bytes,
        len: Bytes,
        starts: [Bytes; 2],
        below: [Box<Part>; 2],
    },
    /// A layer of the list of drivers. One that fails requests does not in a calm world.
    Driver {
        words: Words,
        fails: bool,
        below: Box<Part>,
    },
    /// The device, and that of its log.
    Logged {
        number: usize,
        below: [Box<Part>; 2],
    },
    /// It fails as paths do.
    FlakyPath {
        chance: u32,
        below: Box<Part>,
    },
    /// Two ways to one disk.
    Multipath {
        number: usize,
        breakage: Option<Breakage>,
        below: [Box<Part>; 2],
    },
    Broken {
        breakage: Breakage,
        below: Box<Part>,
    },
    BrokenBelow {
        breakage: Breakage,
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
            | Part::Remote { .. } => &[],
            Part::Mirror { below, .. }
            | Part::Cow { below, .. }
            | Part::Striped { below, .. }
            | Part::Multipath { below, .. }
            | Part::Logged { below, .. } => below,
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

    /// Whether none of it looks at data: requests may bring memory that only the kernel can reach.
    pub(super) fn is_opaque(&self, takes_any_block: &impl Fn(usize) -> bool) -> bool {
        let own = match self {
            Part::PlainFile { .. } => true,
            Part::File { disk } => takes_any_block(*disk),
            Part::Cow { short, .. } => !short,
            Part::Ram { .. } | Part::Null { .. } | Part::Lender { .. } | Part::Broken { .. } => false,
            Part::Remote { .. } | Part::Logged { .. } => false,
            _ => true,
        };
        own && self.below().iter().all(|part| part.is_opaque(takes_any_block))
    }

    /// Nodes of this part, itself included.
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
            Part::Delay { chance, .. } => format!("delay {chance}"),
            Part::Jam { chance, .. } => format!("jam {chance}"),
            Part::Flaky { chance, .. } => format!("flaky {chance}"),
            Part::FlakyPath { chance, .. } => format!("flaky path {chance}"),
            Part::Retry { times, .. } => format!("retry {times}"),
            Part::Shift { by, .. } => format!("shift {by}"),
            Part::Chop { children, .. } => format!("chop {children}"),
            Part::Mirror { children, .. } => format!("mirror {children}"),
            Part::Table { cut, .. } => format!("table {cut}"),
            Part::Striped { chunk, starts, .. } => format!("striped {chunk} {starts:?}"),
            Part::Multipath { number, breakage, .. } => format!("multipath {number} {breakage:?}"),
            Part::Driver { words, .. } => words.to_string(),
            Part::Logged { number, .. } => format!("logged {number}"),
            Part::Pass { .. } => "pass".to_owned(),
            Part::Split { children, .. } => format!("split {children}"),
            Part::Within { limits, .. } => format!("within {limits:?}"),
            Part::Scheduler { choice, .. } => choice.to_string(),
            Part::Cow { overlay, .. } => format!("cow {overlay}"),
            Part::Broken { breakage, .. } | Part::BrokenBelow { breakage, .. } => {
                format!("broken {breakage:?}")
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

/// A ring under which a stack may be built.
pub(super) trait Remotes: Ring + Sized {
    /// The node over a server.
    fn remote(remote: &Remote) -> Box<dyn Node<Self>>;
}

impl Remotes for SimRing {
    fn remote(remote: &Remote) -> Box<dyn Node<SimRing>> {
        Box::new(remote.node())
    }
}

impl<R: Ring> Remotes for ModelRing<R> {
    fn remote(_: &Remote) -> Box<dyn Node<ModelRing<R>>> {
        unreachable!("stacks for this ring are chosen without servers")
    }
}

pub(super) struct Builder<'a> {
    pub(super) setup: &'a Setup,
    pub(super) rng: &'a mut Rng,
    pub(super) calm: bool,
}

impl Builder<'_> {
    /// Add a part, whose number will be `id`: parents come before their children, which follow at once.
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
                stack.backend(Box::new(FileNode::new(shared, file).with_error_file(file)))
            }
            Part::Ram { number } => stack.backend(Box::new(self.setup.rams[*number].node(None))),
            Part::Null { number } => stack.backend(Box::new(self.setup.nulls[*number].node(None))),
            Part::Lender { number } => stack.backend(Box::new(Lender::new(self.setup.lenders[*number]))),
            Part::Remote { number } => stack.backend(R::remote(&self.setup.remotes[*number])),
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
                let lends = matches!(**below, Part::Lender { .. });
                let whole = Profile { limits: QueueLimits::clone(limits), lends, ..self.setup.any_profile() };
                scheduler.made_for(self.setup.depth);
                let children = Layer::<R>::spares(&scheduler, self.setup.depth);
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
            Part::Table { cut, below } => {
                let place = Place { start: Sectors(0), len: Sectors(1 << 40) };
                let spreads = matches!(**below, Part::Striped { .. });
                let row = Row { place, max_io_len: Some(cut.sectors()), spreads };
                let table = TableLayer::new(vec![row]);
                stack.layer(Layer::<R>::node(&table, &self.setup.any_profile(), &[child]), 16)
            }
            Part::Striped { chunk, len, starts, below } => {
                let children = [child, NodeId(id + 1 + below[0].size())];
                let striped = Striped::of(*len, *chunk, &starts[..]);
                stack.layer(Layer::<R>::node(&striped, &self.setup.any_profile(), &children), 8)
            }
            Part::Driver { fails: true, .. } if self.calm => stack.layer(Box::new(Pass::new(child)), 0),
            Part::Driver { words, .. } => {
                let profile = self.setup.any_profile();
                let layer = words.layer::<R>(std::slice::from_ref(&profile)).expect("it takes any device");
                stack.layer(layer.node(&profile, &[child]), layer.spares(self.setup.depth))
            }
            Part::Logged { number, below } => {
                let children = [child, NodeId(id + 1 + below[0].size())];
                let log = &self.setup.logs[*number];
                stack.layer(Layer::<R>::node(&**log, &self.setup.any_profile(), &children), 2)
            }
            Part::Multipath { number, breakage, below } => {
                let children = [child, NodeId(id + 1 + below[0].size())];
                stack.layer(self.setup.paths[*number].node(&children, *breakage, rng), 0)
            }
            Part::BrokenBelow { breakage, data_at, .. } => {
                stack.layer(Box::new(BrokenBelow::new(child, *breakage, *data_at)), 0)
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
