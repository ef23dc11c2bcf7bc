//! One simulated machine: ring, queues, front-end and model, driven turn by turn.

use super::load::{self, Flying};
use super::paths::Paths;
use super::stacks::Setup;
use super::{Outcome, Scenario};
use block::{Bytes, Flags, Op, Request, Sectors, Status, Tag};
use queue::{Done, Nanos, Owner, Queue, QueueConfig, QueueId, Queues, Ring as _};
use sim::{Faults, Model, Rng, SECTOR_LEN, SimRing, Tracer, Wakes, fill_sector};

/// Turns without a completed request after which a run counts as stuck. A jammed stack of full rings needs a
/// few dozen; one that retries 200 times, child by child, some ten thousand.
const PATIENCE: u32 = 100_000;
/// Turns without a completed request after which queues are no longer frozen. A freeze makes a multipath hand
/// back what waits for a path, and a request split into dozens of children then starts over: frozen every few
/// dozen turns, it would never end.
const FREEZES_END: u32 = 5_000;
/// The limit while alarms are due: a silent server is waited for, ten seconds at most each time, and the
/// waiting node checks the clock every few milliseconds.
const PATIENCE_NS: u64 = 1_000_000_000_000;
/// Requests of one run, unless the scenario says otherwise.
const REQUESTS: u64 = 300;

/// The front-end's own counts, by operation, for one lifetime of a queue.
#[derive(Clone, Copy, Default)]
struct Counted {
    ended: u64,
    bytes_ok: u64,
    bytes: u64,
}

/// Turns without a completed request.
struct Idle {
    turns: u32,
    /// Number of these in which no event could ever end the wait.
    still: u32,
    since: Nanos,
}

impl Idle {
    fn since(since: Nanos) -> Idle {
        Idle { turns: 0, still: 0, since }
    }
}

pub(super) struct World {
    rng: Rng,
    ring: SimRing,
    queues: Queues<SimRing>,
    wakes: Wakes,
    ids: Vec<QueueId>,
    setup: Setup,
    model: Model,
    tracer: Tracer,
    /// By queue and tag.
    flying: Vec<Vec<Option<Flying>>>,
    counted: Vec<[Counted; Op::COUNT]>,
    failed: Vec<u64>,
    frozen: bool,
    outcome: Outcome,
}

type Outcomes = Result<(), String>;

impl World {
    pub(super) fn new(mut rng: Rng, mut setup: Setup, tracer: Tracer) -> World {
        let mut ring = SimRing::new(rng.fork(), Faults::NONE, tracer.clone());
        setup.plug(&mut rng, &mut ring);
        let model = Model::new(setup.sectors, false);
        let outcome = Outcome { hash: 0, events: 0, requests: 0, ok: 0, power_cuts: 0, swaps: 0, kills: 0 };
        let mut world = World {
            rng,
            ring,
            queues: Queues::default(),
            wakes: Wakes::default(),
            ids: Vec::new(),
            setup,
            model,
            tracer,
            flying: Vec::new(),
            counted: Vec::new(),
            failed: Vec::new(),
            frozen: false,
            outcome,
        };
        world.fill();
        world.open(false);
        world
    }

    /// Fills the origin of the overlay at the top.
    fn fill(&mut self) {
        let Some((disk, start)) = self.setup.filled else { return };
        let ticket = self.model.begin(Op::Write, Flags::FUA, Sectors(0), self.setup.sectors);
        let mut bytes = vec![0; SECTOR_LEN * self.setup.sectors.0 as usize];
        for (sector, bytes) in bytes.chunks_mut(SECTOR_LEN).enumerate() {
            fill_sector(bytes, sector as u64, ticket.start);
        }
        self.ring.disk_mut(disk).write(start.0, &bytes, true);
        self.model.end(ticket, Status::Ok);
    }

    pub(super) fn run(mut self, scenario: Scenario) -> Result<Outcome, String> {
        let mut left = if scenario.requests == 0 { REQUESTS } else { scenario.requests };
        while left > 0 {
            let burst = self.rng.between(1, 80).min(left);
            self.load(burst)?;
            left -= burst;
            match self.rng.below(10) {
                0..=2 if self.setup.durable => self.power_cut()?,
                3 => self.reopen()?,
                4..=5 => self.drain()?,
                _ => {}
            }
        }
        self.drain()?;
        self.check_drained()?;
        if self.setup.durable {
            self.power_cut()?;
        }
        Ok(self.outcome)
    }

    /// Creates the queues anew, each with its own instance of the stack. `calm`: without faults, after a
    /// power cut.
    fn open(&mut self, calm: bool) {
        self.queues = Queues::default();
        self.ids.clear();
        self.setup.reopen(&mut self.ring);
        self.ring.set_faults(if calm { Faults::NONE } else { self.setup.faults });
        for _ in 0..self.setup.queues {
            let id = self.queues.vacant();
            let config = QueueConfig {
                id,
                depth: self.setup.depth,
                segments_per_tag: self.setup.segments_per_tag,
                timeout_ns: self.setup.timeout_ns.filter(|_| !calm),
            };
            let stack = self.setup.build(&mut self.rng, calm);
            let mut queue = Queue::new(config, stack).expect("the numbers fit");
            queue.set_waker(self.wakes.waker(id));
            self.queues.insert(queue);
            self.ids.push(id);
        }
        let queues = self.ids.len();
        self.flying = (0..queues).map(|_| (0..self.setup.depth).map(|_| None).collect()).collect();
        self.counted = vec![[Counted::default(); Op::COUNT]; queues];
        self.failed = vec![0; queues];
        self.frozen = false;
    }

    /// Sends `count` requests, over as many turns as that needs.
    fn load(&mut self, mut count: u64) -> Outcomes {
        let mut idle = Idle::since(self.ring.now());
        while count > 0 {
            for _ in 0..self.rng.below(5).min(count) {
                count -= u64::from(self.submit());
            }
            if self.rng.chance(30) && (self.frozen || idle.turns < FREEZES_END) {
                self.freeze_or_thaw();
            }
            if self.frozen && self.rng.chance(300) {
                self.swap_if_drained()?;
            }
            self.turn(&mut idle)?;
        }
        Ok(())
    }

    /// Sends one request, if there is a tag and memory for it.
    fn submit(&mut self) -> bool {
        let id = *self.rng.pick(&self.ids);
        let queue = self.queues.touch(id);
        let Some(tag) = queue.tag() else { return false };
        let World { rng, ring, model, .. } = self;
        let made = load::request(tag, queue, &self.setup.rules(), rng, ring, model, |_, _, _| false);
        let Some(flying) = made else {
            queue.release(tag);
            return false;
        };
        let req = flying.req;
        let flags = [Flags::FUA, Flags::NOWAIT]
            .iter()
            .fold(0, |sum, &flag| sum * 2 + u64::from(req.flags.contains(flag)));
        let args = [
            ("queue", id.0.into()),
            ("tag", tag.0.into()),
            ("op", req.op as u64),
            ("flags", flags),
            ("sector", req.offset.0 >> 9),
            ("sectors", req.len.0 >> 9),
        ];
        self.tracer.note(self.ring.now(), req.op.name(), &args);
        let owner = Owner(flying.owner);
        let slot = &mut self.flying[usize::from(id.0)][tag.index()];
        assert!(slot.is_none(), "the queue gave out a tag that is in use");
        *slot = Some(flying);
        queue.submit(tag, owner, req, &mut self.ring);
        true
    }

    /// Executes one turn of the loop that owns ring and queues.
    fn turn(&mut self, idle: &mut Idle) -> Outcomes {
        for paths in &self.setup.paths {
            paths.random_event(&mut self.rng);
        }
        let most = self.rng.below(8);
        for _ in 0..most {
            let Some((id, cookie, result)) = self.ring.reap() else { break };
            self.queues.touch(id).complete(cookie, result, &mut self.ring);
        }
        self.move_sockets();
        self.wakes.deliver(&mut self.queues);
        let mut touched = Vec::new();
        self.queues.turn(&mut self.ring, &mut touched);
        let mut ended = 0;
        for id in touched {
            let done: Vec<Done> = self.queues.touch(id).done().collect();
            ended += done.len();
            done.into_iter().try_for_each(|done| self.ended(id, done))?;
            self.queues.touch(id).account(self.ring.now());
        }
        if ended > 0 {
            *idle = Idle::since(self.ring.now());
        }
        idle.turns += 1;
        if idle.turns > PATIENCE && (idle.still > PATIENCE || self.ring.now().since(idle.since) > PATIENCE_NS)
        {
            return Err(format!("nothing ended in {} turns; {} in flight", idle.turns, self.under_way()));
        }
        if (ended == 0 || self.rng.chance(300)) && !self.pass_time() {
            idle.still += 1;
        }
        Ok(())
    }

    /// Delivers events of sockets, and new connections.
    fn move_sockets(&mut self) {
        let Setup { remotes, programs, .. } = &mut self.setup;
        let (rng, ring) = (&mut self.rng, &mut self.ring);
        let mut has_news = remotes.iter_mut().fold(false, |news, remote| remote.step(rng, ring) | news);
        has_news |= programs.iter_mut().fold(false, |news, program| program.step(rng, ring) | news);
        if has_news {
            self.ids.iter().for_each(|&id| self.queues.wake(id));
        }
        if self.ring.sockets() == 0 {
            return;
        }
        for _ in 0..self.rng.below(8) {
            if let Some((owner, event)) = self.ring.net_event() {
                self.queues.touch(owner.queue).node_event(owner.node, event, &mut self.ring);
            }
        }
    }

    /// Makes the nodes close sockets and alarms, while no request is in flight.
    fn close(&mut self) -> Outcomes {
        for _ in 0..PATIENCE {
            let ring = &mut self.ring;
            let closed = self.queues.iter_mut().map(|queue| queue.close(ring));
            if closed.fold(true, |all, closed| all & closed) {
                return Ok(());
            }
            self.move_sockets();
            while let Some((id, cookie, result)) = self.ring.reap() {
                self.queues.touch(id).complete(cookie, result, &mut self.ring);
            }
            self.ring.advance();
        }
        Err("nodes do not let go of their sockets".to_owned())
    }

    /// Lets time pass; returns whether an event is due.
    fn pass_time(&mut self) -> bool {
        let moved = if self.rng.chance(300) {
            self.ring.pass(self.rng.below(100_000));
            true
        } else {
            self.ring.advance()
        };
        if let Some(timeout) = self.setup.timeout_ns
            && (!moved || self.rng.chance(100))
        {
            if !moved {
                self.ring.pass(timeout);
            }
            for &id in &self.ids {
                self.queues.touch(id).expire(&mut self.ring);
            }
        }
        moved
    }

    fn ended(&mut self, id: QueueId, done: Done) -> Outcomes {
        let number = usize::from(id.0);
        let Done { tag, owner, status } = done;
        let args = [("queue", id.0.into()), ("tag", tag.0.into()), ("status", status as u64)];
        self.tracer.note(self.ring.now(), "done", &args);
        let flying = self.flying[number].get_mut(tag.index()).and_then(Option::take);
        let flying = flying.ok_or_else(|| format!("{done:?} was completed twice, or never sent"))?;
        if flying.owner != owner.0 {
            return Err(format!("{done:?} names the wrong owner, not {}", flying.owner));
        }
        let queue = self.queues.touch(id);
        load::judge(tag, &flying, status, queue, &self.setup.rules(), &mut self.ring, &mut self.model)?;
        queue.release(tag);
        let counted = &mut self.counted[number][flying.req.op as usize];
        counted.ended += 1;
        counted.bytes += flying.req.len.0;
        counted.bytes_ok += if status.is_ok() { flying.req.len.0 } else { 0 };
        self.failed[number] += u64::from(!status.is_ok());
        self.outcome.requests += 1;
        self.outcome.ok += u64::from(status.is_ok());
        Ok(())
    }

    fn freeze_or_thaw(&mut self) {
        self.frozen = !self.frozen;
        for paths in &self.setup.paths {
            if self.frozen { paths.suspend(&mut self.rng) } else { paths.resume() }
        }
        for &id in &self.ids {
            let queue = self.queues.touch(id);
            if self.frozen { queue.freeze() } else { queue.thaw(Bytes(u64::MAX), &mut self.ring) }
        }
    }

    /// Puts another instance of the stack into every queue, if no request is in flight: online
    /// reconfiguration, under load.
    fn swap_if_drained(&mut self) -> Outcomes {
        if !self.queues.iter_mut().all(|queue| queue.is_drained()) {
            return Ok(());
        }
        self.close()?;
        self.check_paths()?;
        self.tracer.note(self.ring.now(), "swap", &[]);
        self.setup.change(&mut self.rng, &mut self.ring);
        for &id in &self.ids {
            let stack = self.setup.build(&mut self.rng, false);
            self.queues.touch(id).replace(stack).expect("the numbers fit");
        }
        self.outcome.swaps += 1;
        self.check_paths()
    }

    /// Checks that no selector counts requests as in flight while there are none.
    fn check_paths(&self) -> Outcomes {
        self.setup.paths.iter().try_for_each(Paths::check_idle)
    }

    fn under_way(&self) -> usize {
        self.flying.iter().flatten().flatten().count()
    }

    /// Executes turns until every request has ended.
    fn drain(&mut self) -> Outcomes {
        if self.frozen {
            self.freeze_or_thaw();
        }
        let mut idle = Idle::since(self.ring.now());
        while self.under_way() > 0 {
            self.turn(&mut idle)?;
        }
        Ok(())
    }

    /// Checks a drained device: nothing is held, lost or counted wrongly.
    fn check_drained(&mut self) -> Outcomes {
        self.close()?;
        self.check_paths()?;
        let now = self.ring.now();
        for &id in &self.ids {
            let queue = self.queues.touch(id);
            if queue.in_flight() != 0 || !queue.is_drained() || queue.has_parked() {
                return Err(format!("queue {id:?} is not drained: {} in flight", queue.in_flight()));
            }
            let tags: Vec<Tag> = std::iter::from_fn(|| queue.tag()).collect();
            if tags.len() != usize::from(self.setup.depth) {
                return Err(format!("queue {id:?} has {} of {} tags left", tags.len(), self.setup.depth));
            }
            tags.into_iter().for_each(|tag| queue.release(tag));
            let snapshot = queue.stats().snapshot(now);
            let (counted, failed) = (&self.counted[usize::from(id.0)], self.failed[usize::from(id.0)]);
            for (op, (own, counts)) in Op::ALL.iter().zip(counted.iter().zip(&snapshot.ops)) {
                let right = if self.setup.pieces {
                    // An overlay passes on a hint only for its first range.
                    let bytes = counts.bytes >= own.bytes_ok || *op == Op::Prefetch;
                    counts.ios + counts.merges >= own.ended && bytes
                } else {
                    counts.ios == own.ended && counts.bytes == own.bytes
                };
                if !right || counts.latency.total() != counts.ios {
                    let (ios, bytes) = (counts.ios, counts.bytes);
                    return Err(format!(
                        "{op:?} counted as {ios} of {bytes} bytes, not {} of {}",
                        own.ended, own.bytes
                    ));
                }
            }
            if snapshot.in_flight != 0 || !self.setup.pieces && snapshot.errors != failed {
                let (errors, left) = (snapshot.errors, snapshot.in_flight);
                return Err(format!("{errors} errors counted, not {failed}; {left} in flight"));
            }
        }
        match (self.ring.memory_in_use() - self.setup.memory_kept(), self.ring.pending()) {
            (0, 0) => Ok(()),
            (memory, pending) => Err(format!("{memory} allocations and {pending} operations are left")),
        }
    }

    /// Closes the device cleanly and opens it again. After a failed sync that is impossible: the lost data
    /// can still be read, so the machine is restarted, if the stack survives that.
    fn reopen(&mut self) -> Outcomes {
        self.drain()?;
        self.check_drained()?;
        if self.ring.has_failed_disk() {
            return if self.setup.durable { self.power_cut() } else { Ok(()) };
        }
        self.tracer.note(self.ring.now(), "reopen", &[]);
        self.open(false);
        Ok(())
    }

    /// Cuts the power and restores it; all durable data must be present.
    fn power_cut(&mut self) -> Outcomes {
        self.ring.power_cut();
        self.model.power_cut();
        self.open(true);
        self.outcome.power_cuts += 1;
        let sectors = self.setup.sectors.0;
        for first in (0..sectors).step_by(64) {
            self.settle(first, (sectors - first).min(64))?;
        }
        self.open(false);
        Ok(())
    }

    /// Reads a range after a power cut.
    fn settle(&mut self, first: u64, count: u64) -> Outcomes {
        let id = self.ids[0];
        let memory = self.ring.allocate((count as u32) << 9).ok_or("no memory without faults")?;
        let queue = self.queues.touch(id);
        let tag = queue.tag().ok_or("no tag in a new queue")?;
        let data = queue.run(tag, &[memory]).ok_or("no room for one segment")?;
        let req = Request { data, ..Request::new(Op::Read, Bytes(first << 9), Bytes(count << 9)) };
        let ticket = self.model.begin(Op::Read, Flags::empty(), Sectors(first), Sectors(count));
        queue.submit(tag, Owner(0), req, &mut self.ring);
        for _ in 0..PATIENCE {
            while let Some((id, cookie, result)) = self.ring.reap() {
                self.queues.touch(id).complete(cookie, result, &mut self.ring);
            }
            let queue = self.queues.touch(id);
            queue.turn(&mut self.ring);
            let Some(done) = queue.done().next() else {
                self.ring.advance();
                continue;
            };
            if !done.status.is_ok() {
                return Err(format!("{req:?} after a power cut ended with {:?}", done.status));
            }
            let bytes = self.ring.bytes(memory);
            let ended = self.model.end_read(ticket, done.status, bytes.chunks(SECTOR_LEN));
            ended.map_err(|violation| format!("after a power cut: {violation}"))?;
            for (sector, bytes) in (first..).zip(bytes.chunks(SECTOR_LEN)) {
                if !self.setup.replicas {
                    self.model.settle(Sectors(sector), bytes).map_err(|violation| violation.to_string())?;
                }
            }
            queue.release(tag);
            self.ring.free(memory);
            return Ok(());
        }
        Err(format!("{req:?} after a power cut does not end"))
    }
}
