//! Simulation of the ublk export: a random stack behind the model of the driver, a client, and servers that
//! are killed at random moments and replaced.
//!
//! The client's results are compared with the sector model: no acknowledged write may be lost, in any
//! recovery mode. A killed server's operations reach its files in part; the files stay, and lose data only in
//! a power cut.

use super::stacks::Setup;
use super::{Failure, Outcome, Scenario, guarded};
use ::ublk::model::{ClientRequest, Finished, Model as Kernel, ModelConfig};
use ::ublk::{Driver as Control, Features, IoFlags, KernelOp, NewDevice, ParamTypes, Params};
use block::{Bytes, Flags, Op, Sectors, Status};
use exports::ublk::{DataMode, Front, ModelRing, ServedQueueConfig, ServedQueueShared};
use queue::{Done, IoId, Nanos, Queue, QueueConfig, QueueId, Queues, Ring as _};
use sim::{Faults, Model, Rng, SECTOR_LEN, SimRing, Ticket, Tracer, Wakes, fill_sector};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

/// Turns without a completed request after which a run counts as stuck.
const PATIENCE: u32 = 100_000;
const REQUESTS: u64 = 200;
const IO_MAX: Bytes = Bytes(64 << 10);

/// A request that the client waits for.
struct Flying {
    ticket: Ticket,
    op: KernelOp,
    sectors: u32,
    /// A server that may have received the request died before it was answered.
    orphaned: bool,
}

struct Server {
    ring: ModelRing<SimRing>,
    queues: Queues<ModelRing<SimRing>>,
    wakes: Wakes,
    front: Front,
    ids: Vec<QueueId>,
}

struct World {
    rng: Rng,
    setup: Setup,
    path: DataPath,
    recovery: Features,
    kernel: Kernel,
    control: Control,
    number: u32,
    processes: u32,
    /// Empty between the death of a server and the start of the next.
    server: Option<Server>,
    model: Model,
    flying: BTreeMap<u64, Flying>,
    tracer: Tracer,
    outcome: Outcome,
}

/// How requests and their data reach the server.
#[derive(Clone, Copy)]
struct DataPath {
    mode: DataMode,
    /// One command carries many requests.
    batch: bool,
}

/// Executes one run.
///
/// # Errors
/// [`Failure`] when the device lost or changed data, memory or a tag was misused, or the run did not end.
pub fn run(seed: u64, scenario: Scenario) -> Result<Outcome, Box<Failure>> {
    let tracer = Tracer::default();
    let mut rng = Rng::new(seed);
    let setup = loop {
        let setup = Setup::random(&mut rng, scenario, false);
        // Lent memory belongs to its process, and would be lost with it.
        if setup.lenders.is_empty() {
            break setup;
        }
    };
    let modes = DataMode::ALL.into_iter().filter(|mode| setup.is_opaque() || !mode.is_opaque());
    let mode = *rng.pick(&modes.collect::<Vec<_>>());
    let path = DataPath { mode, batch: mode != DataMode::GetData && rng.chance(500) };
    let reissue = Features::USER_RECOVERY.with(Features::USER_RECOVERY_REISSUE);
    let fail_io = Features::USER_RECOVERY.with(Features::USER_RECOVERY_FAIL_IO);
    let recovery = *rng.pick(&[Features::NONE, Features::USER_RECOVERY, reissue, fail_io]);
    let words = if path.batch { ", in batches" } else { "" };
    let stack = format!("{} by {mode}{words}, {recovery:?}", setup.describe());
    guarded(seed, "BLOCKYARD_UBLK_SEED", stack, &tracer, || {
        World::new(rng, setup, path, recovery, tracer.clone()).run()
    })
}

impl World {
    fn new(mut rng: Rng, mut setup: Setup, path: DataPath, recovery: Features, tracer: Tracer) -> World {
        let mut inner = SimRing::new(rng.fork(), Faults::NONE, tracer.clone());
        setup.plug(&mut rng, &mut inner);
        let kernel = Kernel::new(ModelConfig::LINUX_7_2);
        let control = Control::new(Arc::new(kernel.clone()));
        let number = add(&control, &setup, path, recovery);
        let server = Server::open(&kernel, number, 1, inner, &mut setup, path, &mut rng);
        control.start(number, 1).expect("every tag was fetched");
        let model = Model::new(setup.sectors, false);
        let outcome = Outcome { hash: 0, events: 0, requests: 0, ok: 0, power_cuts: 0, swaps: 0, kills: 0 };
        World {
            rng,
            setup,
            path,
            recovery,
            kernel,
            control,
            number,
            processes: 1,
            server: Some(server),
            model,
            flying: BTreeMap::new(),
            tracer,
            outcome,
        }
    }

    fn run(mut self) -> Result<Outcome, String> {
        let mut left = REQUESTS;
        while left > 0 {
            let burst = self.rng.between(1, 60).min(left);
            self.load(burst)?;
            left -= burst;
            match self.rng.below(10) {
                0..=3 => self.kill()?,
                4 if self.setup.durable => self.power_cut()?,
                5..=6 => self.drain()?,
                _ => {}
            }
        }
        self.drain()?;
        self.check_everything()?;
        self.check_drained()?;
        Ok(self.outcome)
    }

    /// Sends `count` requests, over as many turns as that needs.
    fn load(&mut self, mut count: u64) -> Result<(), String> {
        let mut idle = 0;
        while count > 0 {
            for _ in 0..self.rng.below(6).min(count) {
                self.submit();
                count -= 1;
            }
            self.turn(&mut idle)?;
        }
        Ok(())
    }

    fn submit(&mut self) {
        let (op, ours) = match self.rng.below(100) {
            0..=39 => (KernelOp::Read, Op::Read),
            40..=79 => (KernelOp::Write, Op::Write),
            80..=87 => (KernelOp::Flush, Op::Flush),
            88..=93 => (KernelOp::Discard, Op::Discard),
            _ => (KernelOp::WriteZeroes, Op::WriteZeroes),
        };
        let sectors = self.setup.sectors.0;
        let count = if op == KernelOp::Flush { 0 } else { self.rng.between(1, sectors.min(64)) };
        let first = if op == KernelOp::Flush { 0 } else { self.rng.between(0, sectors - count) };
        let fua = op == KernelOp::Write && self.rng.chance(150);
        let (flags, our_flags) =
            if fua { (IoFlags::FUA, Flags::FUA) } else { (IoFlags::NONE, Flags::empty()) };
        let ticket = self.model.begin(ours, our_flags, Sectors(first), Sectors(count));
        self.ask(op, flags, first, count as u32, ticket);
    }

    fn ask(&mut self, op: KernelOp, flags: IoFlags, first: u64, sectors: u32, ticket: Ticket) {
        let has_data = matches!(op, KernelOp::Read | KernelOp::Write);
        let mut data = vec![0xEE; if has_data { sectors as usize * SECTOR_LEN } else { 0 }];
        if op == KernelOp::Write {
            for (sector, content) in (first..).zip(data.chunks_mut(SECTOR_LEN)) {
                fill_sector(content, sector, ticket.start);
            }
        }
        let queue = self.rng.below(self.setup.queues.into()) as u16;
        let request = ClientRequest { op, flags, start: first, sectors, data, shared: None, tuples: None };
        let number = self.kernel.submit(self.number, queue, request).expect("there is a block device");
        let args = [("op", op as u64), ("number", number), ("sector", first), ("sectors", sectors.into())];
        self.note("ask", &args);
        self.flying.insert(number, Flying { ticket, op, sectors, orphaned: false });
    }

    /// Executes one turn of the server, then checks the client's results.
    fn turn(&mut self, idle: &mut u32) -> Result<(), String> {
        let server = self.server.as_mut().ok_or("no server")?;
        let moved = server.turn(&mut self.rng, self.setup.timeout_ns);
        let ended = self.hear()?;
        *idle = if moved || ended { 0 } else { *idle + 1 };
        match *idle > PATIENCE {
            true => Err(format!("nothing ended in {PATIENCE} turns; {} in flight", self.flying.len())),
            false => Ok(()),
        }
    }

    fn note(&self, what: &'static str, args: &[sim::Arg]) {
        let now = self.server.as_ref().map_or(Nanos(0), |server| server.ring.now());
        self.tracer.note(now, what, args);
    }

    fn server(&mut self) -> &mut Server {
        self.server.as_mut().expect("there is one but while it is replaced")
    }

    fn hear(&mut self) -> Result<bool, String> {
        let mut any = false;
        while let Some(finished) = self.kernel.finished(self.number) {
            self.judge(finished)?;
            any = true;
        }
        Ok(any)
    }

    fn judge(&mut self, finished: Finished) -> Result<(), String> {
        let Finished { number, errno, data, .. } = finished;
        self.note("reported", &[("number", number), ("errno", errno as u64)]);
        let flying = self.flying.remove(&number).ok_or_else(|| format!("request {number} ended twice"))?;
        let status = Status::from_errno(errno);
        let refusal = status == Status::NotSupported
            && self.setup.can_refuse
            && matches!(flying.op, KernelOp::Discard | KernelOp::WriteZeroes);
        let timeout = status == Status::Timeout && self.setup.timeout_ns.is_some();
        if !(status.is_ok() || refusal || timeout || flying.orphaned || self.setup.can_fail) {
            return Err(format!("{:?} {number} ended with errno {errno}, and nothing was wrong", flying.op));
        }
        self.outcome.requests += 1;
        self.outcome.ok += u64::from(status.is_ok());
        if flying.op == KernelOp::Read {
            if status.is_ok() && data.len() != flying.sectors as usize * SECTOR_LEN {
                return Err(format!("read {number} brought {} bytes", data.len()));
            }
            let answer = if status.is_ok() { data } else { vec![0; flying.sectors as usize * SECTOR_LEN] };
            let ended = self.model.end_read(flying.ticket, status, answer.chunks(SECTOR_LEN));
            return ended.map_err(|violation| format!("{violation} (read {number})"));
        }
        self.model.end(flying.ticket, status);
        Ok(())
    }

    fn drain(&mut self) -> Result<(), String> {
        let mut idle = 0;
        while !self.flying.is_empty() {
            self.turn(&mut idle)?;
        }
        Ok(())
    }

    /// Kills the server at any point of its work, and starts another one.
    fn kill(&mut self) -> Result<(), String> {
        if self.server().ring.inner.has_failed_disk() {
            // Data of a failed sync can still be read: the next server cannot know. That is between kernel
            // and disk.
            return if self.setup.durable { self.power_cut() } else { Ok(()) };
        }
        self.note("kill", &[]);
        self.outcome.kills += 1;
        let mut inner = self.end();
        inner.kill();
        let fails = !self.recovery.has(Features::USER_RECOVERY_REISSUE);
        self.flying.values_mut().for_each(|flying| flying.orphaned |= fails);
        self.hear()?;
        // Meanwhile the client continues, if the device stays.
        if !self.recovery.is_empty() {
            (0..self.rng.below(4)).for_each(|_| self.submit());
            let fails = self.recovery.has(Features::USER_RECOVERY_FAIL_IO);
            self.flying.values_mut().for_each(|flying| flying.orphaned |= fails);
            self.hear()?;
        }
        self.processes += 1;
        if self.recovery.is_empty() {
            self.control.delete(self.number).map_err(|error| error.to_string())?;
            self.number = add(&self.control, &self.setup, self.path, self.recovery);
        } else {
            self.control.start_recovery(self.number).map_err(|error| error.to_string())?;
        }
        self.serve(inner);
        let started = match self.recovery.is_empty() {
            true => self.control.start(self.number, self.processes),
            false => self.control.end_recovery(self.number, self.processes),
        };
        started.map_err(|error| error.to_string())
    }

    fn serve(&mut self, inner: SimRing) {
        let (kernel, setup) = (&self.kernel, &mut self.setup);
        let server =
            Server::open(kernel, self.number, self.processes, inner, setup, self.path, &mut self.rng);
        self.server = Some(server);
    }

    /// Ends the server's process; the rest belongs to the machine.
    fn end(&mut self) -> SimRing {
        self.server.take().expect("there is one but while it is replaced").ring.into_inner()
    }

    /// Ends the machine and starts it with another kernel.
    fn power_cut(&mut self) -> Result<(), String> {
        let mut inner = self.end();
        inner.power_cut();
        self.model.power_cut();
        self.flying.clear();
        self.outcome.power_cuts += 1;
        self.kernel = Kernel::new(ModelConfig::LINUX_7_2);
        self.control = Control::new(Arc::new(self.kernel.clone()));
        self.number = add(&self.control, &self.setup, self.path, self.recovery);
        self.processes = 1;
        self.serve(inner);
        self.control.start(self.number, 1).map_err(|error| error.to_string())?;
        self.check_everything()
    }

    /// Reads the whole device without faults.
    fn check_everything(&mut self) -> Result<(), String> {
        self.server().ring.inner.set_faults(Faults::NONE);
        let sectors = self.setup.sectors.0;
        for first in (0..sectors).step_by(64) {
            let count = (sectors - first).min(64);
            let ticket = self.model.begin(Op::Read, Flags::empty(), Sectors(first), Sectors(count));
            self.ask(KernelOp::Read, IoFlags::NONE, first, count as u32, ticket);
            self.drain()?;
        }
        let faults = self.setup.faults;
        self.server().ring.inner.set_faults(faults);
        Ok(())
    }

    /// Checks a drained device: every tag is the driver's, and only served queues have memory.
    fn check_drained(&mut self) -> Result<(), String> {
        let server = self.server.as_mut().ok_or("no server")?;
        for &id in &server.ids {
            let queue = server.queues.get_mut(id);
            if queue.in_flight() != 0 || queue.has_parked() || server.front.has_waiting() {
                return Err(format!("queue {id:?} is not drained: {} in flight", queue.in_flight()));
            }
        }
        self.control.stop(self.number).map_err(|error| error.to_string())?;
        for _ in 0..1000 {
            server.turn(&mut self.rng, None);
        }
        for &id in &server.ids {
            if server.front.has_tags(id) {
                return Err(format!("the driver has stopped, and queue {id:?} has tags"));
            }
            server.front.close(id, &mut server.ring);
        }
        match (server.ring.inner.memory_in_use(), server.ring.inner.pending()) {
            (0, 0) => Ok(()),
            (memory, pending) => Err(format!("{memory} allocations and {pending} operations are left")),
        }
    }
}

fn add(control: &Control, setup: &Setup, path: DataPath, recovery: Features) -> u32 {
    let batch = if path.batch { Features::BATCH_IO } else { Features::NONE };
    let features = path.mode.features().with(Features::CMD_IOCTL_ENCODE).with(recovery).with(batch);
    let (queues, depth) = (setup.queues, setup.depth);
    let new =
        NewDevice { number: None, queues, depth, io_bytes_max: IO_MAX.0 as u32, features, server_flags: 0 };
    let number = control.add(&new).expect("a device of this kernel").dev_id;
    let mut params = Params::new();
    params.types = ParamTypes::BASIC.0;
    params.basic.logical_bs_shift = 9;
    params.basic.physical_bs_shift = 9;
    params.basic.max_sectors = IO_MAX.sectors().0 as u32;
    params.basic.dev_sectors = setup.sectors.0;
    control.set_params(number, &params).expect("parameters that fit");
    number
}

impl Server {
    /// Opens the device; `process`: 1 is the first since the machine was started.
    fn open(
        kernel: &Kernel,
        number: u32,
        process: u32,
        mut inner: SimRing,
        setup: &mut Setup,
        path: DataPath,
        rng: &mut Rng,
    ) -> Server {
        inner.set_faults(Faults::NONE);
        setup.reopen(&mut inner);
        let device = kernel.open_char(number, process).expect("no other process has it open");
        let mut ring = ModelRing::new(inner, device, process.into());
        let (mut queues, mut front, mut ids) = (Queues::default(), Front::default(), Vec::new());
        let wakes = Wakes::default();
        for q_id in 0..setup.queues {
            let id = queues.vacant();
            let config =
                QueueConfig { id, depth: setup.depth + 1, segments_per_tag: 1, timeout_ns: setup.timeout_ns };
            let mut queue = Queue::new(config, setup.build(rng, false)).expect("the numbers fit");
            queue.reserve_tags(setup.depth);
            queue.set_waker(wakes.waker(id));
            queues.insert(queue);
            let shared = ServedQueueShared::default();
            shared.size.store(setup.sectors.bytes().0, Relaxed);
            let served = ServedQueueConfig {
                queue: id,
                file: ring.file(),
                descriptors: ring.descriptors(q_id).expect("a queue of the device"),
                q_id,
                first_tag: 0,
                depth: setup.depth,
                mode: path.mode,
                zero_copy_reads: false,
                io_max: IO_MAX,
                batch: path.batch,
                integrity: None,
                client_memory: None,
                encoded: true,
                shared: Arc::new(shared),
            };
            front.add_queue(served, &mut ring).expect("memory without faults");
            ids.push(id);
        }
        ring.inner.set_faults(setup.faults);
        Server { ring, queues, wakes, front, ids }
    }

    /// Executes one turn of the loop that owns ring and queues, up to a random point. Returns whether
    /// anything happened.
    fn turn(&mut self, rng: &mut Rng, timeout_ns: Option<u64>) -> bool {
        let mut moved = false;
        for _ in 0..rng.below(8) {
            let Some((queue, cookie, result)) = self.ring.inner.reap() else { break };
            self.ring.io_ended(IoId { queue, cookie }, result);
            self.queues.touch(queue).complete(cookie, result, &mut self.ring);
            moved = true;
        }
        for _ in 0..rng.below(8) {
            let Some((token, result)) = self.ring.next_ended() else { break };
            self.front.ended(token, result, &mut self.ring, &mut self.queues);
            moved = true;
        }
        if rng.chance(50) {
            self.ring.copies_refused += 1;
        }
        moved |= self.wakes.deliver(&mut self.queues);
        let mut touched = Vec::new();
        self.queues.turn(&mut self.ring, &mut touched);
        for id in touched {
            let done: Vec<Done> = self.queues.get_mut(id).done().collect();
            moved |= !done.is_empty();
            for end in done {
                self.front.request_done(id, end, &mut self.ring, &mut self.queues);
            }
        }
        self.front.take_up(&mut self.ring, &mut self.queues);
        if !moved || rng.chance(300) {
            self.pass_time(rng, timeout_ns);
        }
        moved
    }

    fn pass_time(&mut self, rng: &mut Rng, timeout_ns: Option<u64>) {
        let moved = if rng.chance(300) {
            self.ring.inner.pass(rng.below(100_000));
            true
        } else {
            self.ring.inner.advance()
        };
        if let Some(timeout) = timeout_ns
            && (!moved || rng.chance(100))
        {
            if !moved {
                self.ring.inner.pass(timeout);
            }
            for &id in &self.ids {
                self.queues.touch(id).expire(&mut self.ring);
            }
        }
    }
}
