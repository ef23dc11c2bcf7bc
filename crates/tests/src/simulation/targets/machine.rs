//! A machine with disks, on which devices are made of targets: their requests, the work of the control plane amid those, and
//! what happens to the machine.
//!
//! All that the control plane ([`control`](super::control)) reads and writes goes through nodes of its own and takes turns,
//! as it does in the engine, so whatever a chore does is met by requests half done.

use super::control::{Below, Opening};
use crate::simulation::breakage::{Breakage, PassBy};
use crate::simulation::load::{self, Flying, Manners};
use crate::simulation::parts::{Builder, Part};
use crate::simulation::stacks::Setup;
use crate::simulation::{Outcome, Scenario};
use block::{Bytes, Flags, Op, Profile, Request, Sectors, Status, Tag};
use layers::Layer;
use layers::dm::{Names, Place, Row, Status as Asked, TableLayer, Target, TargetError, kinds};
use queue::{FileId, NodeId, Owner, Queue, QueueConfig, QueueId, Queues, Ring as _, Stack};
use sim::{Faults, Model, Rng, SECTOR_LEN, SimRing, Tracer, fill_sector};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Turns without an end before a run counts as stuck.
const PATIENCE: u32 = 100_000;
/// After so many without an end all that is due is taken at once, and time goes faster.
const IDLE: u32 = 100;
/// Turns of a whole run: one that takes more goes in circles.
const TURNS_MAX: u32 = 1_000_000;
/// In one request: it may be cut at every one of them.
const SECTORS_MAX: u64 = 32;

/// Devices that are known to more than one run are not: each has disks of its own.
static MACHINES: AtomicU64 = AtomicU64::new(0);

/// What became of a table that was to take another's place.
#[derive(PartialEq, Eq, Debug)]
pub(super) enum Swap {
    Done,
    /// The one before it goes on.
    Refused(String),
    /// The power went.
    Cut,
}

/// What may go wrong besides what the model finds.
pub(super) type Outcomes = Result<(), String>;

/// A disk of the machine.
#[derive(Clone, Debug)]
pub(super) struct Plugged {
    pub(super) part: Part,
    pub(super) file: FileId,
    /// Where on the file it begins.
    pub(super) start: Bytes,
    pub(super) len: Bytes,
}

/// A target as it was made from a line.
pub(super) struct Made {
    pub(super) target: Arc<dyn Target<SimRing>>,
    /// Its devices: disks of the machine.
    pub(super) disks: Vec<usize>,
}

/// A device that clients use.
pub(super) struct Show {
    /// What it is to the world that it is part of.
    pub(super) role: usize,
    pub(super) made: Made,
    pub(super) model: Model,
    pub(super) manners: Manners,
    /// What its target said when the power went; empty before.
    pub(super) last_words: String,
    /// Its clients have no two writes of one sector under way: which one is the last is then not for them to say.
    pub(super) is_orderly: bool,
    ids: Vec<QueueId>,
    /// By queue and tag.
    flying: Vec<Vec<Option<Flying>>>,
    frozen: bool,
}

impl Show {
    /// What its target says of itself. What it makes of the power's going, nobody hears.
    pub(super) fn status(&self) -> String {
        if !self.last_words.is_empty() {
            return self.last_words.clone();
        }
        let mut names = Names::default();
        for disk in &self.made.disks {
            names.push(format!("d{disk}"), format!("d{disk}"));
        }
        self.made.target.status(Asked::Info, &names)
    }

    /// It says that it is not what it was.
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
    pub(super) setup: Setup,
    pub(super) disks: Vec<Plugged>,
    pub(super) shows: Vec<Show>,
    /// Requests that clients are about to bring.
    pub(super) load: u64,
    /// The power went while the control plane was at work.
    pub(super) is_cut: bool,
    /// It may.
    pub(super) cuts: bool,
    pub(super) breakage: Option<Breakage>,
    /// Queues of the control plane's own, and how their requests ended.
    pub(super) controls: Vec<QueueId>,
    pub(super) answers: Vec<(QueueId, Status)>,
    /// What was found to be wrong, until someone can say so.
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
            setup,
            disks,
            shows: Vec::new(),
            load: 0,
            is_cut: false,
            cuts: false,
            breakage: scenario.breakage,
            controls: Vec::new(),
            answers: Vec::new(),
            wrong: None,
            idle: 0,
            turns: 0,
            tracer,
            outcome: Outcome { hash: 0, events: 0, requests: 0, ok: 0, power_cuts: 0, swaps: 0, kills: 0 },
        }
    }

    /// What it is made of, for whoever reads a failure.
    pub(super) fn note(&self, what: &'static str, args: &[sim::Arg]) {
        self.tracer.note(self.ring.now(), what, args);
    }

    /// What lies on a disk now, synced or not.
    pub(super) fn content(&self, disk: usize, at: Bytes, len: u64) -> Vec<u8> {
        let Plugged { file, start, .. } = self.disks[disk];
        let mut bytes = vec![0; len as usize];
        self.ring.disk(file).read(start.0 + at.0, &mut bytes);
        bytes
    }

    /// Put something on a disk that was there before anything began.
    pub(super) fn put(&mut self, disk: usize, at: Bytes, bytes: &[u8]) {
        let Plugged { file, start, .. } = self.disks[disk];
        self.ring.disk_mut(file).write(start.0 + at.0, bytes, true);
    }

    /// Fill a device's range of a disk with what the model then knows to be there.
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

    /// What may be asked of a device here.
    pub(super) fn manners(&self, sectors: Sectors) -> Manners {
        Manners { sectors, sectors_max: SECTORS_MAX, tells_extents: false, ..self.setup.manners() }
    }

    /// Troubles come and go.
    pub(super) fn set_calm(&mut self, calm: bool) {
        self.ring.set_faults(if calm { Faults::NONE } else { self.setup.faults });
    }

    /// A disk has troubles of its own from now on, or none.
    pub(super) fn set_faults(&mut self, disk: usize, faults: Option<Faults>) {
        let file = self.disks[disk].file;
        let faults = faults.map(|faults| Faults { short: self.setup.faults.short, ..faults });
        self.note("faults", &[("disk", disk as u64), ("on", faults.is_some().into())]);
        self.ring.set_disk_faults(file, faults);
    }

    /// A disk was taken out and put in again: what opens it from now on knows nothing of its failures.
    pub(super) fn plug_again(&mut self, disk: usize) {
        self.setup.open_again(self.disks[disk].file);
    }

    pub(super) fn profile(&self, disk: usize) -> Profile {
        let mut profile = Profile { size: self.disks[disk].len, ..self.setup.any_profile() };
        profile.limits.logical_block_size = Bytes(SECTOR_LEN as u64);
        profile.limits.validate().expect("limits that fit");
        profile
    }

    /// A target, from a line of a table. Its disks are `d0`, `d1`, …
    pub(super) fn make(&mut self, kind: &str, words: &str, len: Sectors) -> Result<Made, TargetError> {
        let kind = kinds::<SimRing>().into_iter().find(|known| known.name == kind).expect("a kind");
        let words: Vec<&str> = words.split_whitespace().collect();
        let mut opening = Opening { machine: self, opened: Vec::new() };
        let target = (kind.make)(Place { start: Sectors(0), len }, &words, &mut opening)?;
        let disks = opening.opened.into_iter().map(|(disk, ..)| disk).collect();
        Ok(Made { target, disks })
    }

    /// Put a target to use, as a device of its own: its number.
    pub(super) fn show(&mut self, role: usize, made: Made, model: Model) -> Result<usize, TargetError> {
        made.target.prepare(&mut Below::new(self, &made))?;
        made.target.resume();
        let manners = self.manners(model.device_len());
        let (queues, depth) = (usize::from(self.setup.queues), usize::from(self.setup.depth));
        let flying = (0..queues).map(|_| (0..depth).map(|_| None).collect()).collect();
        let mut show = Show {
            role,
            made,
            model,
            manners,
            last_words: String::new(),
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
            let stack = self.stack(&show.made, show.manners.sectors);
            self.queues.insert(Queue::new(config, stack).expect("the numbers fit"));
            show.ids.push(id);
        }
        self.shows.push(show);
        Ok(self.shows.len() - 1)
    }

    /// One queue's nodes: the table that cuts, the target, its disks.
    fn stack(&mut self, made: &Made, len: Sectors) -> Stack<SimRing> {
        let Made { target, disks } = made;
        let mut stack = Stack::default();
        let place = Place { start: Sectors(0), len };
        let row = Row { place, max_io_len: target.max_io_len(), spreads: target.spreads() };
        let profiles: Vec<Profile> = disks.iter().map(|&disk| self.profile(disk)).collect();
        let profile = Layer::profile(&**target, &profiles).expect("limits that fit");
        let is_origin = made.is_origin();
        let depth = self.setup.depth;
        let mut first = 0;
        if !TableLayer::is_needless(&[row]) {
            let table = TableLayer::new(vec![row]);
            let children = Layer::<SimRing>::spares(&table, depth);
            stack.layer(Layer::<SimRing>::node(&table, &profile, &[NodeId(1)]), children);
            first += 1;
        }
        let passes_by = is_origin && self.breakage == Some(Breakage::PassedBy);
        if passes_by {
            let node = PassBy::new(NodeId(first + 1), NodeId(first + 2), self.rng.fork());
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
        stack.layer(Layer::node(&**target, &profile, &below), Layer::spares(&**target, depth));
        for (part, id) in parts.iter().zip(below) {
            Builder { setup: &self.setup, rng: &mut self.rng, calm: false }.add(part, id.0, &mut stack);
        }
        stack
    }

    /// What stands below a target as its child of that number.
    fn child(&self, made: &Made, child: usize, is_origin: bool) -> Part {
        let part = self.disks[made.disks[child]].part.clone();
        let Some(breakage) = self.breakage else { return part };
        let has_log = made.has_log();
        let is_here = match breakage {
            Breakage::ForgottenCopy | Breakage::EarlyException => is_origin && child > 0,
            Breakage::ForgottenMark | Breakage::ForgottenRecord => has_log && child == 0,
            Breakage::StaleLeg => !has_log || child > 0,
            _ => false,
        };
        if !is_here {
            return part;
        }
        let chunk = made.target.max_io_len().map_or(Bytes::ZERO, Sectors::bytes);
        Part::BrokenBelow { breakage, data_at: Bytes(2 * chunk.0), below: Box::new(part) }
    }

    /// Another table for a device, amid the load.
    pub(super) fn swap(&mut self, show: usize, made: Made) -> Result<Swap, String> {
        self.note("swap", &[("show", show as u64)]);
        let before = self.shows[show].made.target.clone();
        before.presuspend(true);
        self.freeze(show, true);
        while !self.is_drained(show) {
            self.turn()?;
            self.chores()?;
            if self.is_cut {
                return Ok(Swap::Cut);
            }
        }
        let prepared = made.target.prepare(&mut Below::new(self, &made));
        self.check()?;
        if self.is_cut {
            return Ok(Swap::Cut);
        }
        if let Err(why) = prepared {
            before.resume();
            self.freeze(show, false);
            return Ok(Swap::Refused(why.to_string()));
        }
        let sectors = self.shows[show].manners.sectors;
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

    /// The device that has that role.
    pub(super) fn find(&self, role: usize) -> Option<usize> {
        self.shows.iter().position(|show| show.role == role)
    }

    /// Take a device away, of which nothing is under way.
    pub(super) fn remove(&mut self, show: usize) -> Show {
        let show = self.shows.remove(show);
        assert_eq!(show.under_way(), 0, "a device is removed while nothing is under way");
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
        let made = load::request(tag, queue, &show.manners, rng, ring, &mut show.model, is_taken);
        let Some(flying) = made else {
            queue.release(tag);
            return;
        };
        let Request { op, offset, len, flags, .. } = flying.req;
        let args = [
            ("show", number as u64),
            ("tag", tag.0.into()),
            ("fua", flags.has(Flags::FUA).into()),
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

    /// One turn of the loop that owns ring and queues.
    pub(super) fn turn(&mut self) -> Outcomes {
        for _ in 0..self.rng.below(5).min(self.load) {
            if !self.shows.is_empty() {
                self.submit();
            }
        }
        // Hundreds that look at the clock again and again must not keep it from going on.
        let few = self.rng.below(8);
        for _ in 0..if self.idle > IDLE { u64::MAX } else { few } {
            let Some((id, cookie, result)) = self.ring.reap() else { break };
            self.queues.touch(id).complete(cookie, result, &mut self.ring);
        }
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
            let left: usize = self.shows.iter().map(Show::under_way).sum();
            let (idle, turns) = (self.idle, self.turns);
            let says: Vec<String> = self.shows.iter().map(Show::status).collect();
            return Err(format!(
                "nothing ended in {idle} of {turns} turns; {left} under way; they say {says:?}"
            ));
        }
        if self.idle > IDLE {
            self.ring.pass(1_000_000);
        } else if self.rng.chance(300) {
            self.ring.pass(self.rng.below(100_000));
        } else if ended == 0 || self.rng.chance(300) {
            self.ring.advance();
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
        let flying = flying.ok_or_else(|| format!("{done:?} was told twice, or never asked for"))?;
        let mut manners = show.manners;
        manners.can_fail |= !status.is_ok() && show.is_lost();
        let queue = self.queues.touch(id);
        load::judge(tag, &flying, status, queue, &manners, &mut self.ring, &mut show.model)
            .map_err(|why| format!("device {number}: {why}; it says: {}", show.status()))?;
        queue.release(tag);
        self.outcome.requests += 1;
        self.outcome.ok += u64::from(status.is_ok());
        Ok(())
    }

    /// What went wrong where it could not be said.
    pub(super) fn check(&mut self) -> Outcomes {
        self.wrong.take().map_or(Ok(()), Err)
    }

    /// Do what the targets have to do without being asked, for some of them.
    pub(super) fn chores(&mut self) -> Outcomes {
        for number in 0..self.shows.len() {
            let Some(chore) = self.shows[number].made.target.chore() else { continue };
            if !self.is_cut && self.rng.chance(300) && chore.is_due(self.ring.now()) {
                let made = &self.shows[number].made;
                let made = Made { target: made.target.clone(), disks: made.disks.clone() };
                self.note("chore", &[("show", number as u64)]);
                let now = self.ring.now();
                let mut below = Below::new(self, &made);
                chore.step(now, &mut below);
                let failed = below.failed;
                if failed {
                    // The header of a snapshot that is lost may not be written: its origin may fail writes then.
                    self.shows.iter_mut().filter(|show| show.made.is_origin()).for_each(|show| {
                        show.manners.can_fail = true;
                    });
                }
                self.check()?;
            }
        }
        Ok(())
    }

    /// Whether any target has something to do.
    pub(super) fn has_chores(&self) -> bool {
        let now = self.ring.now();
        self.shows.iter().any(|show| show.made.target.chore().is_some_and(|chore| chore.is_due(now)))
    }

    pub(super) fn is_busy(&self) -> bool {
        self.shows.iter().any(|show| show.under_way() > 0)
    }

    /// The machine goes down, with the power or as a process that is killed. What its devices were.
    pub(super) fn go_down(&mut self, power: bool) -> Vec<Show> {
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
                    // Done or not, and nothing of it is done later.
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

    /// Read all of a device while there is no trouble. `pin`: it is certain to stay what it is.
    pub(super) fn settle(&mut self, show: usize, pin: bool) -> Outcomes {
        let sectors = self.shows[show].manners.sectors.0;
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
            let ticket = model.begin(Op::Read, Flags::NONE, Sectors(first), Sectors(count));
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

    /// Flush a device that is idle.
    pub(super) fn flush(&mut self, show: usize) -> Result<bool, String> {
        let id = self.shows[show].ids[0];
        let tag = self.queues.touch(id).tag().ok_or("no tag on an idle device")?;
        let ticket = self.shows[show].model.begin(Op::Flush, Flags::NONE, Sectors(0), Sectors(0));
        let status = self.run(id, tag, Request::flush())?;
        self.shows[show].model.end(ticket, status);
        Ok(status.is_ok())
    }

    /// One request to its end, beside what the clients have.
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
                self.ring.advance();
            }
        }
        Err(format!("{req:?} does not end while all is well"))
    }

    /// Nothing is under way: nothing may be left.
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

impl Made {
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
