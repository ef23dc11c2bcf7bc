//! A machine with disks and devices of targets: their requests, the work of the control plane, kills and
//! power cuts.
//!
//! All reads and writes of the control plane ([`control`](super::control)) go through nodes of its own and
//! take turns, as in the engine, so background work runs concurrently with incomplete requests.

use super::control::{DeviceOpener, TargetDisks};
use crate::simulation::load::{self, DeviceRules, Flying};
use crate::simulation::parts::{Builder, Part};
use crate::simulation::seeded_fault::{Bypass, SeededFault};
use crate::simulation::stacks::Setup;
use crate::simulation::{Outcome, Scenario};
use block::{Bytes, Flags, Op, Profile, Request, Sectors, Status, Tag};
use layers::Layer;
use layers::dm::{
    Names, Status as Asked, TableLayer, TableTarget, Target, TargetError, TargetRange, TargetType,
};
use queue::{FileId, NodeId, Owner, Queue, QueueConfig, QueueId, Queues, Ring as _, Stack};
use sim::{Faults, Model, Rng, SECTOR_LEN, SimRing, Tracer, Wakes, fill_sector};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Turns without a completed request after which a run counts as stuck.
const PATIENCE: u32 = 100_000;
/// Turns without a completed request after which all due events happen at once, and time passes faster.
const IDLE: u32 = 100;
/// The longest time that passes at once: background work of the control plane runs meanwhile.
const STEP_NS_MAX: u64 = 20_000_000;
/// Turns of a whole run; a run with more is in an endless loop.
const TURNS_MAX: u32 = 1_000_000;
/// Sectors of one request: it may be split at every one of them.
const SECTORS_MAX: u64 = 32;

/// Numbers the machines, so that each has disks of its own.
static MACHINES: AtomicU64 = AtomicU64::new(0);

/// The result of replacing a table.
#[derive(PartialEq, Eq, Debug)]
pub(super) enum Swap {
    Done,
    /// The earlier table stays.
    Refused(String),
    /// The power failed.
    Cut,
}

/// Result of a step or a check; the error becomes the failure's message.
pub(super) type Outcomes = Result<(), String>;

/// A disk of the machine.
#[derive(Clone, Debug)]
pub(super) struct Plugged {
    pub(super) part: Part,
    pub(super) file: FileId,
    /// Offset of its range in the file.
    pub(super) start: Bytes,
    pub(super) len: Bytes,
}

/// A target that was created from a line.
pub(super) struct BuiltTarget {
    pub(super) target: Arc<dyn Target<SimRing>>,
    /// Its devices: disks of the machine.
    pub(super) disks: Vec<usize>,
}

/// A device that clients use.
pub(super) struct ServedDevice {
    /// Its role in the world that it is part of.
    pub(super) role: usize,
    pub(super) made: BuiltTarget,
    pub(super) model: Model,
    pub(super) rules: DeviceRules,
    /// The status of its target at the power cut; empty before.
    pub(super) last_status: String,
    /// Its clients have no two concurrent writes of one sector: which one is the last would be undefined for
    /// them.
    pub(super) is_orderly: bool,
    ids: Vec<QueueId>,
    /// By queue and tag.
    flying: Vec<Vec<Option<Flying>>>,
    frozen: bool,
}

impl ServedDevice {
    /// Returns its target's status. A status caused by the power cut is unknown.
    pub(super) fn status(&self) -> String {
        if !self.last_status.is_empty() {
            return self.last_status.clone();
        }
        let mut names = Names::default();
        for disk in &self.made.disks {
            names.push(format!("d{disk}"), format!("d{disk}"));
        }
        self.made.target.status(Asked::Info, &names)
    }

    /// Returns whether it reports itself as lost.
    pub(super) fn is_lost(&self) -> bool {
        matches!(self.status().as_str(), "Invalid" | "Overflow")
    }

    pub(super) fn under_way(&self) -> usize {
        self.flying.iter().flatten().flatten().count()
    }
}

pub(super) struct Machine {
    pub(super) number: u64,
    pub(super) rng: Rng,
    pub(super) ring: SimRing,
    pub(super) queues: Queues<SimRing>,
    pub(super) wakes: Wakes,
    pub(super) setup: Setup,
    pub(super) disks: Vec<Plugged>,
    pub(super) shows: Vec<ServedDevice>,
    /// Requests that clients have yet to send.
    pub(super) load: u64,
    /// The power failed while the control plane was at work.
    pub(super) is_cut: bool,
    /// The power may fail while the control plane is at work.
    pub(super) cuts: bool,
    pub(super) seeded_fault: Option<SeededFault>,
    /// Queues of the control plane, and the results of their requests.
    pub(super) controls: Vec<QueueId>,
    pub(super) answers: Vec<(QueueId, Status)>,
    /// An error that could not be returned yet.
    pub(super) wrong: Option<String>,
    idle: u32,
    turns: u32,
    tracer: Tracer,
    pub(super) outcome: Outcome,
}

impl Machine {
    pub(super) fn new(rng: &mut Rng, scenario: Scenario, disks: &[Bytes], tracer: Tracer) -> Machine {
        let mut setup = Setup::for_targets(rng, scenario);
        let disks: Vec<Plugged> = disks
            .iter()
            .map(|&len| {
                let (part, file, start) = setup.disk(rng, len);
                Plugged { part, file, start, len }
            })
            .collect();
        let mut ring = SimRing::new(rng.fork(), Faults::NONE, tracer.clone());
        setup.plug(rng, &mut ring);
        setup.reopen(&mut ring);
        Machine {
            number: MACHINES.fetch_add(1, Relaxed),
            rng: rng.fork(),
            ring,
            queues: Queues::default(),
            wakes: Wakes::default(),
            setup,
            disks,
            shows: Vec::new(),
            load: 0,
            is_cut: false,
            cuts: false,
            seeded_fault: scenario.seeded_fault,
            controls: Vec::new(),
            answers: Vec::new(),
            wrong: None,
            idle: 0,
            turns: 0,
            tracer,
            outcome: Outcome { hash: 0, events: 0, requests: 0, ok: 0, power_cuts: 0, swaps: 0, kills: 0 },
        }
    }

    /// Records the setup for the story of a failure.
    pub(super) fn note(&self, what: &'static str, args: &[sim::Arg]) {
        self.tracer.note(self.ring.now(), what, args);
    }

    /// Returns the present content of a disk, synced or not.
    pub(super) fn content(&self, disk: usize, at: Bytes, len: u64) -> Vec<u8> {
        let Plugged { file, start, .. } = self.disks[disk];
        let mut bytes = vec![0; len as usize];
        self.ring.disk(file).read(start.0 + at.0, &mut bytes);
        bytes
    }

    /// Writes initial content to a disk.
    pub(super) fn put(&mut self, disk: usize, at: Bytes, bytes: &[u8]) {
        let Plugged { file, start, .. } = self.disks[disk];
        self.ring.disk_mut(file).write(start.0 + at.0, bytes, true);
    }

    /// Fills a device's range of a disk, and enters the content into the model.
    pub(super) fn fill(&mut self, model: &mut Model, disks: &[(usize, Bytes)]) {
        let sectors = model.device_len();
        let ticket = model.begin(Op::Write, Flags::FUA, Sectors(0), sectors);
        let mut bytes = vec![0; SECTOR_LEN * sectors.0 as usize];
        for (sector, bytes) in bytes.chunks_mut(SECTOR_LEN).enumerate() {
            fill_sector(bytes, sector as u64, ticket.start);
        }
        disks.iter().for_each(|&(disk, at)| self.put(disk, at, &bytes));
        model.end(ticket, Status::Ok);
    }

    /// Returns the requests and results of a device here.
    pub(super) fn rules(&self, sectors: Sectors) -> DeviceRules {
        DeviceRules { sectors, sectors_max: SECTORS_MAX, tells_extents: false, ..self.setup.rules() }
    }

    /// Enables or disables faults.
    pub(super) fn set_calm(&mut self, calm: bool) {
        self.ring.set_faults(if calm { Faults::NONE } else { self.setup.faults });
    }

    /// Sets or removes a disk's own faults.
    pub(super) fn set_faults(&mut self, disk: usize, faults: Option<Faults>) {
        let file = self.disks[disk].file;
        let faults = faults.map(|faults| Faults { short: self.setup.faults.short, ..faults });
        self.note("faults", &[("disk", disk as u64), ("on", faults.is_some().into())]);
        self.ring.set_disk_faults(file, faults);
    }

    /// Unplugs and plugs in a disk: nodes that open it from now on do not know its failures.
    pub(super) fn plug_again(&mut self, disk: usize) {
        self.setup.open_again(self.disks[disk].file);
    }

    pub(super) fn profile(&self, disk: usize) -> Profile {
        let mut profile = Profile { size: self.disks[disk].len, ..self.setup.any_profile() };
        profile.limits.logical_block_size = Bytes(SECTOR_LEN as u64);
        profile.limits.validate().expect("limits that fit");
        profile
    }

    /// Creates a target from a table line. Its disks are `d0`, `d1`, …
    pub(super) fn make(&mut self, kind: &str, words: &str, len: Sectors) -> Result<BuiltTarget, TargetError> {
        let kind = TargetType::<SimRing>::find(kind).expect("a kind");
        let words: Vec<&str> = words.split_whitespace().collect();
        let mut opening = DeviceOpener { machine: self, opened: Vec::new() };
        let target = (kind.construct)(TargetRange { start: Sectors(0), len }, &words, &mut opening)?;
        let disks = opening.opened.into_iter().map(|(disk, ..)| disk).collect();
        Ok(BuiltTarget { target, disks })
    }

    /// Serves a target as a device of its own; returns its number.
    pub(super) fn show(
        &mut self,
        role: usize,
        made: BuiltTarget,
        model: Model,
    ) -> Result<usize, TargetError> {
        made.target.prepare(&mut TargetDisks::new(self, &made))?;
        made.target.resume();
        let rules = self.rules(model.device_len());
        let (queues, depth) = (usize::from(self.setup.queues), usize::from(self.setup.depth));
        let flying = (0..queues).map(|_| (0..depth).map(|_| None).collect()).collect();
        let mut show = ServedDevice {
            role,
            made,
            model,
            rules,
            last_status: String::new(),
            is_orderly: false,
            ids: Vec::new(),
            flying,
            frozen: false,
        };
        for _ in 0..queues {
            let id = self.queues.vacant();
            let config = QueueConfig {
                id,
                depth: self.setup.depth,
                segments_per_tag: self.setup.segments_per_tag,
                timeout_ns: None,
            };
            let stack = self.stack(&show.made, show.rules.sectors);
            let mut queue = Queue::new(config, stack).expect("the numbers fit");
            queue.set_waker(self.wakes.waker(id));
            self.queues.insert(queue);
            show.ids.push(id);
        }
        self.shows.push(show);
        Ok(self.shows.len() - 1)
    }

    /// Builds one queue's nodes: the splitting table, the target, its disks.
    fn stack(&mut self, made: &BuiltTarget, len: Sectors) -> Stack<SimRing> {
        let BuiltTarget { target, disks } = made;
        let mut stack = Stack::default();
        let place = TargetRange { start: Sectors(0), len };
        let row =
            TableTarget { place, max_io_len: target.max_io_len(), splits_discards: target.splits_discards() };
        let profiles: Vec<Profile> = disks.iter().map(|&disk| self.profile(disk)).collect();
        let profile = Layer::profile(&**target, &profiles).expect("limits that fit");
        let is_origin = made.is_origin();
        let depth = self.setup.depth;
        let mut first = 0;
        if !TableLayer::is_needless(&[row]) {
            let table = TableLayer::new(vec![row]);
            let children = Layer::<SimRing>::child_requests(&table, depth);
            stack.layer(Layer::<SimRing>::node(&table, &profile, &[NodeId(1)]), children);
            first += 1;
        }
        let passes_by = is_origin && self.seeded_fault == Some(SeededFault::PassedBy);
        if passes_by {
            let node = Bypass::new(NodeId(first + 1), NodeId(first + 2), self.rng.fork());
            stack.layer(Box::new(node), 0);
            first += 1;
        }
        let parts: Vec<Part> = (0..disks.len()).map(|child| self.child(made, child, is_origin)).collect();
        let mut next = first + 1;
        let mut below = Vec::new();
        for part in &parts {
            below.push(NodeId(next));
            next += part.size();
        }
        stack.layer(Layer::node(&**target, &profile, &below), Layer::child_requests(&**target, depth));
        for (part, id) in parts.iter().zip(below) {
            Builder { setup: &self.setup, rng: &mut self.rng, calm: false }.add(part, id.0, &mut stack);
        }
        stack
    }

    /// Returns the part below a target as its child of that number.
    fn child(&self, made: &BuiltTarget, child: usize, is_origin: bool) -> Part {
        let part = self.disks[made.disks[child]].part.clone();
        let Some(seeded_fault) = self.seeded_fault else { return part };
        let has_log = made.has_log();
        let is_here = match seeded_fault {
            SeededFault::ForgottenCopy | SeededFault::EarlyException => is_origin && child > 0,
            SeededFault::ForgottenMark | SeededFault::ForgottenRecord => has_log && child == 0,
            SeededFault::StaleLeg => !has_log || child > 0,
            _ => false,
        };
        if !is_here {
            return part;
        }
        let chunk = made.target.max_io_len().map_or(Bytes::ZERO, Sectors::bytes);
        Part::BrokenBelow { seeded_fault, data_at: Bytes(2 * chunk.0), below: Box::new(part) }
    }

    /// Loads another table for a device, under load.
    pub(super) fn swap(&mut self, show: usize, made: BuiltTarget) -> Result<Swap, String> {
        self.note("swap", &[("show", show as u64)]);
        let before = self.shows[show].made.target.clone();
        before.presuspend(true);
        self.freeze(show, true);
        while !self.is_drained(show) {
            self.turn()?;
            self.run_background_work()?;
            if self.is_cut {
                return Ok(Swap::Cut);
            }
        }
        let prepared = made.target.prepare(&mut TargetDisks::new(self, &made));
        self.check()?;
        if self.is_cut {
            return Ok(Swap::Cut);
        }
        if let Err(why) = prepared {
            before.resume();
            self.freeze(show, false);
            return Ok(Swap::Refused(why.to_string()));
        }
        let sectors = self.shows[show].rules.sectors;
        for id in self.shows[show].ids.clone() {
            let stack = self.stack(&made, sectors);
            self.queues.touch(id).replace(stack).expect("the numbers fit");
        }
        made.target.resume();
        self.shows[show].made = made;
        self.freeze(show, false);
        self.outcome.swaps += 1;
        Ok(Swap::Done)
    }

    fn freeze(&mut self, show: usize, freeze: bool) {
        self.shows[show].frozen = freeze;
        for id in self.shows[show].ids.clone() {
            let queue = self.queues.touch(id);
            if freeze { queue.freeze() } else { queue.thaw(Bytes(u64::MAX), &mut self.ring) }
        }
    }

    fn is_drained(&mut self, show: usize) -> bool {
        let ids = self.shows[show].ids.clone();
        ids.into_iter().all(|id| self.queues.get_mut(id).is_drained())
    }

    /// Returns the device with that role.
    pub(super) fn find(&self, role: usize) -> Option<usize> {
        self.shows.iter().position(|show| show.role == role)
    }

    /// Removes a device without requests in flight.
    pub(super) fn remove(&mut self, show: usize) -> ServedDevice {
        let show = self.shows.remove(show);
        assert_eq!(show.under_way(), 0, "a device is removed while nothing is in flight");
        for &id in &show.ids {
            self.queues.remove(id);
        }
        show
    }

    fn submit(&mut self) {
        let number = self.rng.below(self.shows.len() as u64) as usize;
        let show = &mut self.shows[number];
        let at = self.rng.below(show.ids.len() as u64) as usize;
        let id = show.ids[at];
        let queue = self.queues.touch(id);
        let Some(tag) = queue.tag() else { return };
        let Machine { rng, ring, .. } = self;
        let (flying, orderly) = (&show.flying, show.is_orderly);
        let is_taken = |op: Op, first: u64, count: u64| {
            orderly
                && op.is_write()
                && flying.iter().flatten().flatten().any(|other| other.is_write_of(first, count))
        };
        let made = load::request(tag, queue, &show.rules, rng, ring, &mut show.model, is_taken);
        let Some(flying) = made else {
            queue.release(tag);
            return;
        };
        let Request { op, offset, len, flags, .. } = flying.req;
        let args = [
            ("show", number as u64),
            ("tag", tag.0.into()),
            ("fua", flags.contains(Flags::FUA).into()),
            ("sector", offset.0 >> 9),
            ("sectors", len.0 >> 9),
            ("version", flying.ticket.start),
        ];
        self.tracer.note(ring.now(), op.name(), &args);
        let (owner, req) = (Owner(flying.owner), flying.req);
        show.flying[at][tag.index()] = Some(flying);
        queue.submit(tag, owner, req, ring);
        self.load = self.load.saturating_sub(1);
    }

    /// Executes one turn of the loop that owns ring and queues.
    pub(super) fn turn(&mut self) -> Outcomes {
        for _ in 0..self.rng.below(5).min(self.load) {
            if !self.shows.is_empty() {
                self.submit();
            }
        }
        // Hundreds of nodes that check the clock repeatedly must not keep it from advancing.
        let few = self.rng.below(8);
        for _ in 0..if self.idle > IDLE { u64::MAX } else { few } {
            let Some((id, cookie, result)) = self.ring.reap() else { break };
            self.queues.touch(id).complete(cookie, result, &mut self.ring);
        }
        self.wakes.deliver(&mut self.queues);
        let mut touched = Vec::new();
        self.queues.turn(&mut self.ring, &mut touched);
        let mut ended = 0;
        for id in touched {
            if !self.controls.contains(&id) && !self.shows.iter().any(|show| show.ids.contains(&id)) {
                continue;
            }
            let done: Vec<queue::Done> = self.queues.get_mut(id).done().collect();
            ended += done.len();
            for done in done {
                self.ended(id, done)?;
            }
            self.queues.get_mut(id).account(self.ring.now());
        }
        self.idle = if ended > 0 { 0 } else { self.idle + 1 };
        self.turns += 1;
        if self.idle > PATIENCE || self.turns > TURNS_MAX {
            let left: usize = self.shows.iter().map(ServedDevice::under_way).sum();
            let (idle, turns) = (self.idle, self.turns);
            let says: Vec<String> = self.shows.iter().map(ServedDevice::status).collect();
            return Err(format!(
                "nothing ended in {idle} of {turns} turns; {left} in flight; they say {says:?}"
            ));
        }
        if self.idle > IDLE {
            self.ring.pass(1_000_000);
        } else if self.rng.chance(300) {
            self.ring.pass(self.rng.below(100_000));
        } else if ended == 0 || self.rng.chance(300) {
            self.ring.advance_within(STEP_NS_MAX);
        }
        Ok(())
    }

    fn ended(&mut self, id: QueueId, done: queue::Done) -> Outcomes {
        let queue::Done { tag, status, .. } = done;
        let Some(number) = self.shows.iter().position(|show| show.ids.contains(&id)) else {
            self.queues.get_mut(id).release(tag);
            self.answers.push((id, status));
            return Ok(());
        };
        let args = [("show", number as u64), ("tag", tag.0.into()), ("status", status as u64)];
        self.note("done", &args);
        let show = &mut self.shows[number];
        let at = show.ids.iter().position(|&own| own == id).unwrap_or_default();
        let flying = show.flying[at].get_mut(tag.index()).and_then(Option::take);
        let flying = flying.ok_or_else(|| format!("{done:?} was completed twice, or never sent"))?;
        let mut rules = show.rules;
        rules.can_fail |= !status.is_ok() && show.is_lost();
        let queue = self.queues.touch(id);
        load::judge(tag, &flying, status, queue, &rules, &mut self.ring, &mut show.model)
            .map_err(|why| format!("device {number}: {why}; it says: {}", show.status()))?;
        queue.release(tag);
        self.outcome.requests += 1;
        self.outcome.ok += u64::from(status.is_ok());
        Ok(())
    }

    /// Returns an error that could not be returned before.
    pub(super) fn check(&mut self) -> Outcomes {
        self.wrong.take().map_or(Ok(()), Err)
    }

    /// Runs background work of some of the targets.
    pub(super) fn run_background_work(&mut self) -> Outcomes {
        for number in 0..self.shows.len() {
            let Some(work) = self.shows[number].made.target.background_work() else { continue };
            if !self.is_cut && self.rng.chance(300) && work.is_due(self.ring.now()) {
                let made = &self.shows[number].made;
                let made = BuiltTarget { target: made.target.clone(), disks: made.disks.clone() };
                self.note("background", &[("show", number as u64)]);
                let now = self.ring.now();
                let mut below = TargetDisks::new(self, &made);
                work.step(now, &mut below);
                let failed = below.failed;
                if failed {
                    // The header of a lost snapshot may not be written: then its origin may fail writes.
                    self.shows.iter_mut().filter(|show| show.made.is_origin()).for_each(|show| {
                        show.rules.can_fail = true;
                    });
                }
                self.check()?;
            }
        }
        Ok(())
    }

    /// Returns whether any target has background work.
    pub(super) fn has_background_work(&self) -> bool {
        let now = self.ring.now();
        self.shows.iter().any(|show| show.made.target.background_work().is_some_and(|work| work.is_due(now)))
    }

    pub(super) fn is_busy(&self) -> bool {
        self.shows.iter().any(|show| show.under_way() > 0)
    }

    /// Ends the machine, by a power cut or by a kill. Returns its devices.
    pub(super) fn go_down(&mut self, power: bool) -> Vec<ServedDevice> {
        let mut shows = std::mem::take(&mut self.shows);
        for show in &mut shows {
            let flying = std::mem::take(&mut show.flying);
            if power {
                show.model.power_cut();
                continue;
            }
            for flying in flying.into_iter().flatten().flatten() {
                match flying.req.op {
                    Op::Read => drop(show.model.end_read(flying.ticket, Status::IoError, std::iter::empty())),
                    // Executed or not, and nothing is executed later.
                    _ => show.model.end(flying.ticket, Status::IoError),
                }
            }
        }
        if power {
            self.ring.power_cut();
            self.outcome.power_cuts += 1;
        } else {
            self.ring.kill();
            self.outcome.kills += 1;
        }
        self.queues = Queues::default();
        self.answers.clear();
        self.controls.clear();
        self.is_cut = false;
        for disk in 0..self.disks.len() {
            self.ring.set_disk_faults(self.disks[disk].file, None);
        }
        self.setup.reopen(&mut self.ring);
        shows
    }

    /// Reads a whole device without faults. `pin`: its content is fixed from now on.
    pub(super) fn settle(&mut self, show: usize, pin: bool) -> Outcomes {
        let sectors = self.shows[show].rules.sectors.0;
        for first in (0..sectors).step_by(64) {
            let count = (sectors - first).min(64);
            let memory = self.ring.allocate((count as u32) << 9).ok_or("no memory without faults")?;
            let id = self.shows[show].ids[0];
            let queue = self.queues.touch(id);
            let tag = queue.tag().ok_or("no tag on an idle device")?;
            let data = queue.run(tag, &[memory]).ok_or("no room for one segment")?;
            let req = Request { data, ..Request::new(Op::Read, Bytes(first << 9), Bytes(count << 9)) };
            let status = self.run(id, tag, req)?;
            if !status.is_ok() {
                return Err(format!("device {show}: {req:?} ended with {status:?} while all is well"));
            }
            let (model, bytes) = (&mut self.shows[show].model, self.ring.bytes(memory));
            let ticket = model.begin(Op::Read, Flags::empty(), Sectors(first), Sectors(count));
            let read = model.end_read(ticket, status, bytes.chunks(SECTOR_LEN));
            read.map_err(|violation| format!("device {show}, when all is read: {violation}"))?;
            for (sector, bytes) in (first..).zip(bytes.chunks(SECTOR_LEN)).filter(|_| pin) {
                let settled = model.settle(Sectors(sector), bytes);
                settled.map_err(|violation| format!("device {show}: {violation}"))?;
            }
            self.ring.free(memory);
        }
        Ok(())
    }

    /// Flushes an idle device.
    pub(super) fn flush(&mut self, show: usize) -> Result<bool, String> {
        let id = self.shows[show].ids[0];
        let tag = self.queues.touch(id).tag().ok_or("no tag on an idle device")?;
        let ticket = self.shows[show].model.begin(Op::Flush, Flags::empty(), Sectors(0), Sectors(0));
        let status = self.run(id, tag, Request::flush())?;
        self.shows[show].model.end(ticket, status);
        Ok(status.is_ok())
    }

    /// Runs one request to its end, beside those of the clients.
    fn run(&mut self, id: QueueId, tag: Tag, req: Request) -> Result<Status, String> {
        self.queues.touch(id).submit(tag, Owner(0), req, &mut self.ring);
        for _ in 0..PATIENCE {
            while let Some((id, cookie, result)) = self.ring.reap() {
                self.queues.touch(id).complete(cookie, result, &mut self.ring);
            }
            let queue = self.queues.get_mut(id);
            queue.turn(&mut self.ring);
            let done = queue.done().next();
            if let Some(done) = done {
                queue.release(done.tag);
                return Ok(done.status);
            }
            if !queue.has_parked() {
                self.ring.advance_within(STEP_NS_MAX);
            }
        }
        Err(format!("{req:?} does not end while all is well"))
    }

    /// Checks that nothing is left when no request is in flight.
    pub(super) fn check_idle(&mut self) -> Outcomes {
        for show in &self.shows {
            for &id in &show.ids {
                let queue = self.queues.get_mut(id);
                if queue.in_flight() != 0 || queue.has_parked() {
                    return Err(format!("{id:?} is not idle: {} in flight", queue.in_flight()));
                }
            }
        }
        match (self.ring.memory_in_use(), self.ring.pending()) {
            (0, 0) => Ok(()),
            (memory, pending) => Err(format!("{memory} allocations and {pending} operations are left")),
        }
    }
}

impl BuiltTarget {
    fn is_origin(&self) -> bool {
        Layer::<SimRing>::name(&*self.target) == "snapshot-origin"
    }

    /// Its first device is a mirror's log.
    pub(super) fn has_log(&self) -> bool {
        let mut names = Names::default();
        self.disks.iter().for_each(|disk| names.push(format!("d{disk}"), format!("d{disk}")));
        self.target.status(Asked::Table, &names).starts_with("disk ")
    }
}
