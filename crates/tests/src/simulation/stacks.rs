//! Random stacks, as data: one stack is built for each queue, and again when it is reopened.

use super::Scenario;
use super::load::DeviceRules;
use super::parts::{Builder, Part, Remotes};
use super::paths::Paths;
use super::program::Program;
use super::remote::Remote;
use super::seeded_fault::SeededFault;
use super::target_line::TargetLine;
use backends::{Alignment, Facts, FileState, Null, Ram, RamSpec};
use block::{Abilities, Bytes, Profile, QueueLimits, Sectors, Segment};
use layers::LayerOptions;
use layers::cow::format::{Layout, PAGE_LEN, TABLE_AT};
use layers::cow::{Index, JournalSize, records};
use layers::dm::{LogWrites, TargetRange};
use layers::scheduler::Choice;
use queue::{FileId, Ring, Stack};
use sim::nodes::{Chop, Mirror};
use sim::{Disk, DiskConfig, Faults, Rng, SimRing};
use spec::{StackSpec, backend_rows};
use std::cell::Cell;
use std::convert::Infallible;
use std::fmt::Write as _;
use std::rc::Rc;
use std::sync::Arc;

/// Most nodes on a path, kept below the queue's own bound.
const DEPTH_MAX: usize = 6;

/// The state of an overlay.
#[derive(Debug)]
pub(super) struct Overlay {
    /// Its store.
    disk: usize,
    layout: Layout,
    origin_len: Bytes,
    /// Generation that the next opening begins, as its header would store it.
    generation: u64,
    /// Size of its journal.
    journal_size: JournalSize,
    /// A seeded fault: every chunk in its journal is used, without verification.
    believes: bool,
    /// State shared by its nodes, read anew whenever it is opened.
    pub(super) index: Option<Arc<Index>>,
}

/// The parts of a run that stay the same while it runs.
#[derive(Debug)]
pub(super) struct Setup {
    top: Part,
    disks: Vec<DiskConfig>,
    /// By disk: a sync failed, for all who have it open.
    pub(super) latches: Vec<Rc<Cell<bool>>>,
    /// State of each disk that a [`FileNode`](backends::FileNode) serves.
    facts: Vec<Option<Facts>>,
    /// By disk: whether it may switch between direct and buffered while it is open.
    switches: Vec<Option<Alignment>>,
    /// State shared by its nodes, created anew whenever the files are opened, and when the stack is swapped.
    pub(super) shared: Vec<Option<Arc<FileState>>>,
    pub(super) overlays: Vec<Overlay>,
    /// The disk that is the origin of the overlay at the top, and the origin's offset: it is filled before
    /// the run.
    pub(super) filled: Option<(FileId, Bytes)>,
    pub(super) rams: Vec<Arc<Ram>>,
    pub(super) nulls: Vec<Null>,
    /// Lengths of the lending backends, and once plugged in also their memory.
    pub(super) lenders: Vec<Segment>,
    pub(super) remotes: Vec<Remote>,
    pub(super) programs: Vec<Program>,
    /// State shared by log-writes targets, created anew whenever they are opened, and the lengths of their
    /// log devices.
    pub(super) logs: Vec<Arc<LogWrites>>,
    log_lens: Vec<Bytes>,
    /// State shared by the nodes of multipaths, created anew whenever they are opened, and at swaps.
    pub(super) paths: Vec<Paths>,
    sockets: bool,
    pub(super) forgets_sync_errors: bool,
    forgets_at_swaps: bool,
    pub(super) sectors: Sectors,
    pub(super) queues: u16,
    pub(super) depth: u16,
    pub(super) segments_per_tag: u16,
    pub(super) timeout_ns: Option<u64>,
    pub(super) faults: Faults,
    /// It keeps its content when the power fails.
    pub(super) durable: bool,
    /// Two places have the same data, and may differ after a power cut.
    pub(super) replicas: bool,
    /// Requests are counted as children.
    pub(super) pieces: bool,
    /// Requests may fail without a fault of the stack.
    pub(super) can_fail: bool,
    /// Discard or write zeroes may be refused.
    pub(super) can_refuse: bool,
    /// Memory consists of whole sectors.
    pub(super) even_memory: bool,
    /// The stack has a node that retries many times.
    patient: bool,
}

impl Setup {
    /// Draws a setup. `sockets`: the ring has sockets, so that servers may hold the data.
    pub(super) fn random(rng: &mut Rng, scenario: Scenario, sockets: bool) -> Setup {
        let mut setup = Setup::bare(rng, scenario, sockets);
        setup.faults = random_faults(rng, setup.timeout_ns.is_some());
        if setup.forgets_sync_errors || setup.forgets_at_swaps {
            setup.faults.sync_error = 300;
        }
        setup.can_fail = setup.faults.can_fail_requests();
        let extra = scenario.seeded_fault.is_some().into();
        let len = Bytes(setup.sectors.0 << 9);
        let broken_overlay = scenario.seeded_fault.filter(|seeded_fault| seeded_fault.is_of_overlays());
        let is_overlay = broken_overlay.is_some() || scenario.overlay;
        if is_overlay || scenario.seeded_fault.is_none() && rng.chance(100) {
            setup.top = setup.filled_overlay(rng, len, broken_overlay);
            return setup;
        }
        if let Some(seeded_fault) = scenario.seeded_fault.filter(|seeded_fault| seeded_fault.is_of_paths()) {
            setup.top = setup.multipath(rng, len, Some(seeded_fault));
            return setup;
        }
        setup.top = setup.tree(rng, extra, len);
        if let Some(seeded_fault) = scenario.seeded_fault {
            setup.top = Part::Broken { seeded_fault, below: Box::new(setup.top.clone()) };
            setup.pieces = true;
        }
        setup
    }

    /// Draws an empty setup.
    fn bare(rng: &mut Rng, scenario: Scenario, sockets: bool) -> Setup {
        Setup {
            top: Part::PlainFile { disk: 0 },
            disks: Vec::new(),
            latches: Vec::new(),
            facts: Vec::new(),
            switches: Vec::new(),
            shared: Vec::new(),
            overlays: Vec::new(),
            filled: None,
            rams: Vec::new(),
            nulls: Vec::new(),
            lenders: Vec::new(),
            remotes: Vec::new(),
            programs: Vec::new(),
            logs: Vec::new(),
            log_lens: Vec::new(),
            paths: Vec::new(),
            sockets,
            forgets_sync_errors: scenario.seeded_fault == Some(SeededFault::ForgottenSyncError),
            forgets_at_swaps: scenario.seeded_fault == Some(SeededFault::ForgetfulSwap),
            sectors: Sectors(rng.between(8, 128) * 8),
            queues: rng.between(1, 2) as u16,
            depth: *rng.pick(&[1, 2, 8, 32]),
            segments_per_tag: *rng.pick(&[1, 2, 8, 100]),
            timeout_ns: rng.chance(300).then(|| rng.between(1_000_000, 400_000_000)),
            faults: Faults::NONE,
            durable: scenario.seeded_fault.is_some() || scenario.overlay || !rng.chance(300),
            replicas: false,
            pieces: false,
            can_fail: false,
            can_refuse: false,
            even_memory: false,
            patient: false,
        }
    }

    /// Draws a setup for devices of targets: arbitrary disks, faults that a device survives, nothing else.
    pub(super) fn for_targets(rng: &mut Rng, scenario: Scenario) -> Setup {
        let mut setup = Setup::bare(rng, scenario, false);
        (setup.durable, setup.timeout_ns, setup.even_memory) = (true, None, true);
        // Each may be split into many, and there are several devices.
        setup.depth = setup.depth.min(8);
        setup.faults = gentle_faults(rng);
        setup
    }

    /// Returns the requests and results of the device.
    pub(super) fn rules(&self) -> DeviceRules {
        DeviceRules {
            sectors: self.sectors,
            sectors_max: 256,
            segments_per_tag: self.segments_per_tag,
            even_memory: self.even_memory,
            tells_extents: true,
            can_fail: self.can_fail,
            can_refuse: self.can_refuse,
            has_timeout: self.timeout_ns.is_some(),
        }
    }

    /// Adds a disk without other users; returns it, and the offset of its range.
    pub(super) fn disk(&mut self, rng: &mut Rng, len: Bytes) -> (Part, FileId, Bytes) {
        let file = self.disks.len();
        let mut part = self.any_file(rng, len);
        match rng.below(4) {
            0 => part = Part::Delay { chance: rng.between(50, 900) as u32, below: Box::new(part) },
            1 => part = Part::Jam { chance: rng.between(20, 400) as u32, below: Box::new(part) },
            _ => {}
        }
        (part, FileId(file as u32), self.facts[file].map_or(Bytes::ZERO, |facts| facts.start))
    }

    /// Draws a number of retries. Only one node of a stack may retry often: two above each other would retry
    /// 40,000 times where no request gets through, which looks like a request that never ends.
    fn retries(&mut self, rng: &mut Rng) -> u32 {
        let times = *rng.pick(&[1, 2, 3, 200]);
        if times > 3 && std::mem::replace(&mut self.patient, true) { 3 } else { times }
    }

    /// Draws a random stack whose device is at least `len` long, `above` nodes below the top.
    fn tree(&mut self, rng: &mut Rng, above: usize, len: Bytes) -> Part {
        if above + 1 >= DEPTH_MAX || rng.chance(250) {
            return self.backend(rng, len);
        }
        let below = |setup: &mut Setup, rng: &mut Rng, len| Box::new(setup.tree(rng, above + 1, len));
        match rng.below(20) {
            0 => Part::Delay { chance: rng.between(50, 900) as u32, below: below(self, rng, len) },
            1 => Part::Jam { chance: rng.between(20, 400) as u32, below: below(self, rng, len) },
            2 => {
                self.can_fail = true;
                // At times almost no request gets through, so that frequent retries use up the hops.
                let most = *rng.pick(&[30, 100, 100, 900]);
                Part::Flaky { chance: rng.between(5, most) as u32, below: below(self, rng, len) }
            }
            3 => Part::Retry { times: self.retries(rng), below: below(self, rng, len) },
            4 => {
                let by = Bytes(rng.between(0, 64) << 9);
                Part::Shift { by, below: below(self, rng, len + by) }
            }
            5 => Part::Pass { below: below(self, rng, len) },
            6..=7 if above + 2 < DEPTH_MAX => {
                self.pieces = true;
                // A segment that is not a whole number of sectors may lead to more segments than fit.
                self.even_memory = true;
                let limits = Box::new(random_limits(rng));
                let children = *rng.pick(&[1, 2, 8, 64]);
                let scheduled = above + 3 < DEPTH_MAX && rng.chance(300);
                let below = Box::new(self.tree(rng, above + 2 + usize::from(scheduled), len));
                let mut below = Box::new(Part::Within { limits: limits.clone(), below });
                if scheduled {
                    let choice = random_scheduler(rng);
                    below = Box::new(Part::Scheduler { choice, limits: limits.clone(), below });
                }
                Part::Split { limits, children, below }
            }
            8 => {
                self.pieces = true;
                let children = rng.between(Chop::PIECES.into(), 64) as u16;
                Part::Chop { children, below: below(self, rng, len) }
            }
            10..=11 if above + 2 < DEPTH_MAX => self.target(rng, above, len),
            12 => {
                let rows: Vec<_> =
                    layers::drivers::rows().into_iter().filter(|row| !row.has_files()).collect();
                let row = rng.pick(&rows);
                self.can_fail |= row.fails;
                let words = LayerOptions::random(row, &mut |most| rng.below(most));
                Part::Driver { words, fails: row.fails, below: below(self, rng, len) }
            }
            13 => self.logged(rng, above, len),
            // Only a world with sockets reinstates paths.
            14..=16 if above + 3 < DEPTH_MAX && self.sockets => self.multipath(rng, len, None),
            17..=18 => {
                // Merged requests are counted as one.
                self.pieces = true;
                let (choice, limits) = (random_scheduler(rng), Box::new(random_limits(rng)));
                Part::Scheduler { choice, limits, below: below(self, rng, len) }
            }
            9 => {
                let origin_len = if rng.chance(300) { Bytes(rng.between(1, len.0 >> 9) << 9) } else { len };
                let origin = below(self, rng, origin_len);
                self.overlay(rng, len, origin_len, origin, None)
            }
            _ => {
                self.replicas = true;
                let children = rng.between(Mirror::COPIES.into(), 64) as u16;
                Part::Mirror { children, below: [below(self, rng, len), below(self, rng, len)] }
            }
        }
    }

    /// Draws a target of the list, under a table if it needs split requests.
    fn target(&mut self, rng: &mut Rng, above: usize, len: Bytes) -> Part {
        let line = TargetLine::random(rng, len.sectors(), &self.any_profile());
        let row = line.row;
        let is_cut = row.max_io_len.is_some();
        self.can_fail |= line.fails;
        self.pieces |= is_cut;
        self.even_memory |= is_cut;
        let below = line.line.devices.clone().into_iter();
        let below = below.map(|device| Box::new(self.tree(rng, above + 2, device.bytes()))).collect();
        let target = Part::Target { line, below };
        if is_cut { Part::Table { row, below: Box::new(target) } } else { target }
    }

    /// Draws two paths to one disk, each with faults of its own.
    fn multipath(&mut self, rng: &mut Rng, len: Bytes, seeded_fault: Option<SeededFault>) -> Part {
        let could_fail = self.can_fail;
        let leaves = if self.sockets && !self.durable && rng.chance(500) {
            let one = Remote::random(rng, len, true);
            let two = one.twin(rng);
            self.remotes.extend([one, two]);
            [2, 1].map(|back| Part::Remote { number: self.remotes.len() - back })
        } else {
            let leaf = match rng.below(if self.durable { 1 } else { 2 }) {
                0 => self.any_file(rng, len),
                _ => {
                    self.rams.push(
                        Ram::new(&RamSpec { size: len, hugepages: false, integrity: None }).expect("memory"),
                    );
                    Part::Ram { number: self.rams.len() - 1 }
                }
            };
            [leaf.clone(), leaf]
        };
        let below = leaves.map(|leaf| {
            let below = Box::new(leaf);
            let flaky = Box::new(Part::FlakyPath { chance: rng.between(5, 300) as u32, below });
            match rng.below(3) {
                0 => flaky,
                1 => Box::new(Part::Delay { chance: rng.between(50, 900) as u32, below: flaky }),
                _ => Box::new(Part::Jam { chance: rng.between(20, 400) as u32, below: flaky }),
            }
        });
        // Requests that wait while there is no path must not fail for lack of one. A disk with a failed sync
        // fails for good on all paths, and only a limit on waiting ends that.
        let keeps = seeded_fault.is_some() || rng.chance(500);
        self.can_fail = could_fail || !keeps;
        self.paths.push(Paths::random(rng, keeps, !keeps || self.faults.can_fail_requests()));
        Part::Multipath { number: self.paths.len() - 1, seeded_fault, below }
    }

    /// Draws a device whose writes are logged. Some logs are short, and soon full.
    fn logged(&mut self, rng: &mut Rng, above: usize, len: Bytes) -> Part {
        self.can_refuse = true;
        let log_len = Bytes(rng.between(8, 4096) << 9);
        let device = Box::new(self.tree(rng, above + 1, len));
        let disk = self.disks.len();
        self.log_lens.push(log_len);
        let log = Box::new(self.any_file(rng, log_len));
        debug_assert!(matches!(*log, Part::File { disk: d } | Part::PlainFile { disk: d } if d == disk));
        Part::Logged { number: self.log_lens.len() - 1, below: [device, log] }
    }

    /// Returns the profile for nodes that do not use it.
    pub(super) fn any_profile(&self) -> Profile {
        Profile {
            size: Bytes(self.sectors.0 << 9),
            read_only: false,
            abilities: Abilities::MEMORY,
            limits: QueueLimits::default(),
            bytewise: false,
            zero_copy_reads: false,
            inline: false,
            sparse: false,
            opaque: false,
        }
    }

    /// Draws an overlay over that origin.
    fn overlay(
        &mut self,
        rng: &mut Rng,
        len: Bytes,
        origin_len: Bytes,
        origin: Box<Part>,
        seeded_fault: Option<SeededFault>,
    ) -> Part {
        let chunk = if seeded_fault.is_some() { 4096 } else { *rng.pick(&[4096, 4096, 8192, 65536]) };
        let layout = Layout::new(len, Some(Bytes(chunk))).expect("sizes that fit");
        let disk = self.disks.len();
        let mut below = [origin, Box::new(self.any_file(rng, layout.file_len()))];
        if let Some(seeded_fault) = seeded_fault {
            let which = usize::from(seeded_fault != SeededFault::IncompleteChunk);
            let data_at = match seeded_fault {
                SeededFault::ForgottenRecords => layout.journal_at(),
                _ => layout.data_at(),
            };
            let part = std::mem::replace(&mut below[which], Box::new(Part::PlainFile { disk }));
            *below[which] = Part::BrokenBelow { seeded_fault, data_at, below: part };
        }
        // Sufficient for a request of the whole device, and soon full.
        let window = rng.between(3, 8);
        let journal_size = JournalSize { pages: window + rng.below(4), window };
        let believes = seeded_fault == Some(SeededFault::BelievedRecords);
        self.overlays.push(Overlay {
            disk,
            layout,
            origin_len,
            generation: 1,
            journal_size,
            believes,
            index: None,
        });
        // A chunk needs three at once.
        let children = *rng.pick(&[3, 4, 8, 64]);
        Part::Cow { overlay: self.overlays.len() - 1, short: origin_len < len, children, below }
    }

    /// Draws an overlay over a disk with initial content.
    fn filled_overlay(&mut self, rng: &mut Rng, len: Bytes, seeded_fault: Option<SeededFault>) -> Part {
        let disk = self.disks.len();
        let origin = Box::new(self.any_file(rng, len));
        let start = self.facts[disk].map_or(Bytes::ZERO, |facts| facts.start);
        self.filled = Some((FileId(disk as u32), start));
        self.overlay(rng, len, len, origin, seeded_fault)
    }

    fn backend(&mut self, rng: &mut Rng, len: Bytes) -> Part {
        if self.durable {
            return self.any_file(rng, len);
        }
        // Backends that need only memory come from the rows; others have disks, servers and programs of the
        // simulation.
        let drawn: Vec<_> = backend_rows().iter().filter_map(|row| row.random).collect();
        let remote = drawn.len() as u64 + 2;
        match rng.below(if self.sockets { remote + 3 } else { remote }) {
            number if number == remote + 2 => {
                let unreliable = rng.chance(300) && !std::mem::replace(&mut self.patient, true);
                let program = Program::random(rng, len, self.queues, unreliable);
                // A request that is cancelled takes the connection from the others, which do not outlive eight
                // lost connections.
                self.can_fail |= unreliable || self.timeout_ns.is_some();
                self.can_refuse |= program.can_refuse();
                self.programs.push(program);
                Part::Program { number: self.programs.len() - 1 }
            }
            number if number >= remote => {
                // Each of its failures takes as long as its server may be silent: no node above it retries
                // 200 times.
                let unreliable = rng.chance(300) && !std::mem::replace(&mut self.patient, true);
                self.can_fail |= unreliable;
                self.remotes.push(Remote::random(rng, len, unreliable));
                Part::Remote { number: self.remotes.len() - 1 }
            }
            0 => {
                self.lenders.push(Segment { len: len.0 as u32, ..Segment::EMPTY });
                Part::Lender { number: self.lenders.len() - 1 }
            }
            1 => self.any_file(rng, len),
            number => {
                let draw = drawn[number as usize - 2];
                match draw(len, &mut |limit| rng.below(limit)) {
                    StackSpec::Ram(spec) => {
                        self.rams.push(Ram::new(&spec).expect("memory"));
                        Part::Ram { number: self.rams.len() - 1 }
                    }
                    StackSpec::Null(spec) => {
                        self.nulls.push(Null::new(&spec).expect("memory"));
                        Part::Null { number: self.nulls.len() - 1 }
                    }
                    other => unreachable!("the simulation has no part for {other}"),
                }
            }
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
            self.switches.push(None);
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
            // They are timed by the real clock, which would not replay.
            timed_writes: false,
            block_device: false,
            head: 0,
        };
        self.facts.push(Some(facts));
        self.switches.push(facts.direct.filter(|_| rng.chance(500)));
        let (align, align_memory) = aligned(facts.direct);
        let len = start.0 + size.0;
        self.disks.push(DiskConfig { len, punch, zero_range, align, align_memory });
        Part::File { disk }
    }

    /// Plugs disks and memory into a new ring without faults so far.
    pub(super) fn plug(&mut self, rng: &mut Rng, ring: &mut SimRing) {
        self.remotes.iter_mut().for_each(|remote| remote.plug(rng, ring));
        self.programs.iter_mut().for_each(|program| program.plug(self.queues, ring));
        for &config in &self.disks {
            ring.add_disk(Disk::new(config));
        }
        for memory in &mut self.lenders {
            *memory = ring.allocate(memory.len).expect("a ring without faults has memory");
            ring.bytes_mut(*memory).fill(0);
        }
    }

    /// Allocations that stay while nothing is in flight.
    pub(super) fn memory_kept(&self) -> usize {
        self.lenders.len() + self.programs.len() * usize::from(self.queues)
    }

    /// Opens the files again, without their earlier errors. An overlay does not learn whether the page cache
    /// was lost before.
    pub(super) fn reopen(&mut self, ring: &mut SimRing) {
        for (disk, facts) in self.facts.iter().enumerate() {
            if let Some(facts) = facts {
                let (align, align_memory) = aligned(facts.direct);
                ring.disk_mut(FileId(disk as u32)).realign(align, align_memory);
            }
        }
        self.shared = self.facts.iter().map(|facts| facts.map(FileState::new)).collect();
        self.latches.iter().for_each(|latch| latch.set(false));
        self.paths.iter_mut().for_each(Paths::open);
        let place = TargetRange { start: Sectors(0), len: self.sectors };
        let profile = |size| {
            let mut profile = Profile { size, ..self.any_profile() };
            profile.limits.logical_block_size = Bytes(512);
            profile
        };
        let log =
            |&len: &Bytes| LogWrites::new(place, &profile(Bytes(0)), &profile(len)).expect("blocks that fit");
        self.logs = self.log_lens.iter().map(log).map(Arc::new).collect();
        for overlay in &mut self.overlays {
            let start = self.facts[overlay.disk].map_or(Bytes::ZERO, |facts| facts.start);
            let layout = overlay.layout;
            let disk = ring.disk_mut(FileId(overlay.disk as u32));
            let mut table = vec![0; layout.table_len() as usize];
            let mut journal = vec![0; (overlay.journal_size.pages * PAGE_LEN) as usize];
            disk.read(start.0 + TABLE_AT, &mut table);
            disk.read(start.0 + layout.journal_at().0, &mut journal);
            let found = match overlay.believes {
                true => records::recorded_chunks(layout, &table, &journal, overlay.generation),
                false => {
                    records::confirmed_chunks(layout, &table, &journal, overlay.generation, |at, into| {
                        disk.read(start.0 + layout.data_at().0 + at.0, into);
                        Ok::<_, Infallible>(())
                    })
                    .unwrap_or_else(|never| match never {})
                }
            };
            for chunk in &found {
                table[(chunk / 8) as usize] |= 1 << (chunk % 8);
            }
            if !found.is_empty() {
                disk.sync(disk.sync_point());
            }
            // A sync interrupted by a kill may have left it in the page cache only. The flush of the new
            // header includes it.
            disk.write(start.0 + TABLE_AT, &table, true);
            overlay.generation += 1;
            let index = Index::with_journal_size(
                layout,
                overlay.origin_len,
                &table,
                overlay.generation,
                overlay.journal_size,
            );
            overlay.index = Some(Arc::new(index));
        }
    }

    /// Opens one file again: nodes built from now on do not know its earlier errors.
    pub(super) fn open_again(&mut self, file: FileId) {
        let disk = file.0 as usize;
        self.shared[disk] = self.facts[disk].map(FileState::new);
        self.latches[disk] = Rc::default();
    }

    /// Changes how the next stack may serve its files; no request is in flight.
    pub(super) fn change(&mut self, rng: &mut Rng, ring: &mut SimRing) {
        for paths in &mut self.paths {
            if rng.chance(500) {
                paths.open();
            }
        }
        for (disk, (shared, switches)) in self.shared.iter_mut().zip(&self.switches).enumerate() {
            let (Some(shared), Some(alignment)) = (shared, switches) else { continue };
            let direct = rng.chance(500).then_some(*alignment);
            let facts = Facts { direct, ..*shared.facts() };
            *shared = if self.forgets_at_swaps { FileState::new(facts) } else { shared.changed(facts) };
            let (align, align_memory) = aligned(direct);
            ring.disk_mut(FileId(disk as u32)).realign(align, align_memory);
        }
    }

    /// Builds one queue's instance of the stack. `calm`: without nodes that fail requests.
    pub(super) fn build<R: Remotes>(&self, rng: &mut Rng, calm: bool) -> Stack<R> {
        let mut stack = Stack::default();
        Builder { setup: self, rng, calm }.add(&self.top, 0, &mut stack);
        stack
    }

    /// Returns whether requests of whole sectors may have memory that only the kernel can access.
    pub(super) fn is_opaque(&self) -> bool {
        self.top.is_opaque(&|disk| {
            self.facts[disk].is_none_or(|facts| facts.direct.is_none_or(|direct| direct.offset == 512))
        })
    }

    /// Describes the setup in a line or two.
    pub(super) fn describe(&self) -> String {
        let mut text = String::new();
        self.top.describe(&mut text);
        let (sectors, queues, depth) = (self.sectors.0, self.queues, self.depth);
        let _ = write!(text, "; {sectors} sectors, {queues} queues of {depth}");
        for paths in &self.paths {
            let _ = write!(text, "\n{paths:?}");
        }
        for (number, remote) in self.remotes.iter().enumerate() {
            let _ = write!(text, "\nnbd {number}: {remote:?}");
        }
        for (number, program) in self.programs.iter().enumerate() {
            let _ = write!(text, "\nexec {number}: {program:?}");
        }
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

/// Returns a disk's alignment of offsets and of memory.
fn aligned(direct: Option<Alignment>) -> (u64, u64) {
    direct.map_or((1, 1), |direct| (direct.offset.into(), direct.memory.into()))
}

fn some(rng: &mut Rng, chance: u32, most: u64) -> u32 {
    if rng.chance(chance) { rng.between(1, most) as u32 } else { 0 }
}

/// Draws faults that fail no request.
fn gentle_faults(rng: &mut Rng) -> Faults {
    Faults {
        short: some(rng, 600, 400),
        slow: some(rng, 500, 100),
        ring_full: some(rng, 500, 300),
        not_now: some(rng, 500, 500),
        no_memory: some(rng, 400, 200),
        ..Faults::NONE
    }
}

fn random_faults(rng: &mut Rng, timeouts: bool) -> Faults {
    let gentle = gentle_faults(rng);
    let mut some = |chance, most| some(rng, chance, most);
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

/// Draws limits of a few sectors, as far as they are valid.
fn random_scheduler(rng: &mut Rng) -> Choice {
    let text = match rng.below(2) {
        0 => "kyber,read_lat_nsec=500000".to_owned(),
        _ => {
            let (read_expire, fifo_batch) = (rng.below(20), *rng.pick(&[1, 2, 16]));
            format!("mq-deadline,read_expire={read_expire},write_expire=30,fifo_batch={fifo_batch}")
        }
    };
    let (queue_depth, async_depth) = (*rng.pick(&[1, 2, 8, 64]), *rng.pick(&[0, 1, 8]));
    format!("{text},queue_depth={queue_depth},async_depth={async_depth}").parse().expect("parameters")
}

fn random_limits(rng: &mut Rng) -> QueueLimits {
    loop {
        let mut limits = QueueLimits {
            physical_block_size: Bytes(*rng.pick(&[512, 1024, 4096])),
            max_hw_sectors: Sectors(*rng.pick(&[8, 9, 16, 100, 255])),
            chunk_sectors: Sectors(*rng.pick(&[0, 0, 8, 24, 64])),
            max_segments: *rng.pick(&[2, 3, 128]),
            max_segment_size: Bytes(*rng.pick(&[0, 4096, 6144, 65536])),
            seg_boundary_mask: *rng.pick(&[0, 0xfff, 0x1fff]),
            virt_boundary_mask: *rng.pick(&[0, 0, 0xfff]),
            max_hw_discard_sectors: Sectors(*rng.pick(&[1, 8, 20, 1 << 20])),
            discard_granularity: Bytes(*rng.pick(&[512, 4096])),
            discard_alignment: Bytes(*rng.pick(&[0, 512, 3584])),
            max_write_zeroes_sectors: Sectors(*rng.pick(&[1, 7, 8, 64, 1 << 20])),
            ..QueueLimits::default()
        };
        if limits.validate().is_ok() {
            return limits;
        }
    }
}
