//! A reactor: one thread, its ring, the hardware queues and connections that it hosts.
//!
//! The control plane talks to it by [`Mail`] and a waker, and otherwise leaves it alone. One turn:
//! wait, hand completions to their queues and socket events to the front-end, let touched queues
//! finish, answer what is done, send. An idle reactor sleeps in one system call without a deadline.
//! One thing here can hold the thread up: a buffered write that a file backend makes in place, while the
//! kernel writes dirty pages back. The backend times each, and hands writes to the ring after a slow one.
//!
//! *Invariant:* what mail brings is done between turns, so a queue is opened and removed only while none
//! of its requests is moving.

use crate::device::{self, Device, DeviceError, Held, Mounted};
use crate::log_limit::LogLimit;
use crate::slow::OfQueue;
use block::Request;
use exports::nbd::{Alarm, Cut, CutReason, DeviceFacts, Limits};
use exports::{Fronts, Turn};
use live::{Live, Next};
use queue::{Done, Owner, Queue, QueueConfig, QueueId, Queues};
use ring::{EngineInfo, Event, KernelRing, RingConfig, Wait, Waker};
use rustix::process::Pid;
use rustix::thread::{CpuSet, gettid, sched_setaffinity};
use std::collections::BTreeSet;
use std::io;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use tokio::runtime::Handle;
use tokio::sync::oneshot;

mod live;

pub(crate) use live::Step;

/// The owner of requests that the reactor itself submits: no front-end has this number.
const SELF: Owner = Owner::new(15, 0);
/// Segments that one request's data may have: NBD payloads come in one piece.
const SEGMENTS_PER_TAG: u16 = 4;

/// What a front-end is told of a queue that it is to serve.
pub(crate) struct Lane {
    /// The queue.
    pub(crate) queue: QueueId,
    /// Front-end requests in flight on it at most.
    pub(crate) depth: u16,
    /// What may be counted on.
    pub(crate) facts: DeviceFacts,
    /// Its counters, and how many clients it has, for whoever asks.
    pub(crate) shown: Arc<device::Lane>,
}

/// Gives a front-end of a reactor something to serve. It runs on the reactor's thread, between turns.
pub(crate) type Attach = Box<dyn FnOnce(&Lane, &mut Fronts, &mut Turn<'_>) + Send>;

/// Lets the nodes of one queue look at what was brought to them. May be called on any thread, at any time.
pub(crate) type Nudge = Arc<dyn Fn() + Send + Sync>;

enum Mail {
    /// Serve a device to a new client, through a queue that is made if it is not there.
    Attach(Arc<Device>, Attach),
    /// The same through a new queue, of which so many tags are left to the front-end.
    AttachAlone(Arc<Device>, u16, Attach),
    /// Finish what the device's connections have asked for, close them, flush, drop the queue.
    Retire(Arc<Device>, oneshot::Sender<bool>),
    /// Close the device's connections whatever they still owe.
    Abort(Arc<Device>),
    /// A step of a live change of the device.
    Step(Arc<Device>, Step),
    /// Have the device's queues listened to by whoever traces it, or by nobody; answer when that is so.
    Listen(Arc<Device>, oneshot::Sender<()>),
    /// Answer what is under way of the device.
    UnderWay(Arc<Device>, oneshot::Sender<Vec<OfQueue>>),
    /// Let the nodes of a queue look at what was brought to them.
    Nudge(QueueId),
    /// Answer how many kernel buffers the ring has left.
    KernelBuffers(oneshot::Sender<Vec<u16>>),
    /// The alarm that the NBD front-end asked for.
    Tick,
    /// Answer: a turn has begun, and whether no request is on its way between a queue and the ublk driver.
    Turned(oneshot::Sender<bool>),
    Stop,
}

/// The control plane's end of a reactor.
pub(crate) struct Reactor {
    mail: Mutex<Sender<Mail>>,
    waker: Waker,
    engine: EngineInfo,
    thread: Mutex<Option<JoinHandle<()>>>,
    tid: Pid,
    turns: Arc<Turns>,
    /// The CPUs whose requests it serves; empty: no export knows.
    cpus: Mutex<BTreeSet<usize>>,
}

impl Reactor {
    /// Start the thread and wait until its ring is up.
    pub(crate) fn start(number: usize, config: RingConfig, limits: Limits) -> io::Result<Reactor> {
        let (mail, inbox) = channel();
        let own = mail.clone();
        let runtime = Handle::try_current().ok();
        let (ready, is_ready) = channel();
        let turns = Arc::new(Turns::default());
        let counted = turns.clone();
        let thread =
            std::thread::Builder::new().name(format!("reactor-{number}")).spawn(
                move || match KernelRing::new(config) {
                    Ok(ring) => {
                        let told = ready.send(Ok((ring.waker(), ring.engine().clone(), gettid())));
                        if told.is_ok() {
                            let alarm = runtime.map(|runtime| alarm(runtime, own.clone(), ring.waker()));
                            let mut state = State::new(number, ring, own, inbox, counted);
                            state.fronts.nbd.limit(limits, alarm);
                            state.run();
                        }
                    }
                    Err(error) => drop(ready.send(Err(error))),
                },
            )?;
        let (waker, engine, tid) =
            is_ready.recv().map_err(|_| io::Error::other("the reactor did not start"))??;
        let (mail, thread) = (Mutex::new(mail), Mutex::new(Some(thread)));
        Ok(Reactor { mail, waker, engine, thread, tid, turns, cpus: Mutex::default() })
    }

    /// It serves requests of these CPUs, too: run on those that it does, where their data and clients are.
    pub(crate) fn prefer(&self, cpus: &[usize]) {
        let mut all = self.cpus.lock().unwrap_or_else(|e| e.into_inner());
        all.extend(cpus);
        let mut set = CpuSet::new();
        all.iter().filter(|cpu| **cpu < CpuSet::MAX_CPU).for_each(|cpu| set.set(*cpu));
        // A thread that may not be moved serves as well where it is.
        let _ = sched_setaffinity(Some(self.tid), &set);
    }

    /// Ends when the thread has handed all that was asked of its ring before to the kernel, or at the latest with
    /// the next of these. Whether no request is on its way between a queue and the ublk driver.
    pub(crate) fn turned(&self) -> oneshot::Receiver<bool> {
        let (done, is_done) = oneshot::channel();
        self.post(Mail::Turned(done));
        is_done
    }

    /// How many places for the memory of a driver's requests its ring has left, in each stretch.
    pub(crate) fn kernel_buffers_left(&self) -> oneshot::Receiver<Vec<u16>> {
        let (answer, is_there) = oneshot::channel();
        self.post(Mail::KernelBuffers(answer));
        is_there
    }

    /// How many turns its loop has taken.
    pub(crate) fn turns(&self) -> u64 {
        self.turns.0.load(Relaxed)
    }

    /// Which engine its ring runs on, and why.
    pub(crate) fn engine(&self) -> &EngineInfo {
        &self.engine
    }

    /// Have `attach` called with the device's queue on this thread. It is dropped uncalled when the device is being
    /// retired or cannot be served here.
    pub(crate) fn attach(&self, device: Arc<Device>, attach: Attach) {
        self.post(Mail::Attach(device, attach));
    }

    /// The same with a new queue that is the front-end's alone: its first `tags` tags are left to it.
    pub(crate) fn attach_alone(&self, device: Arc<Device>, tags: u16, attach: Attach) {
        self.post(Mail::AttachAlone(device, tags, attach));
    }

    /// Ends with whether the final flush went well once nothing of the device is left on this thread.
    pub(crate) fn retire(&self, device: Arc<Device>) -> oneshot::Receiver<bool> {
        let (done, is_done) = oneshot::channel();
        self.post(Mail::Retire(device, done));
        is_done
    }

    pub(crate) fn abort(&self, device: Arc<Device>) {
        self.post(Mail::Abort(device));
    }

    /// Take a step of a live change.
    pub(crate) fn step(&self, device: Arc<Device>, step: Step) {
        self.post(Mail::Step(device, step));
    }

    /// Have the device's queues listened to by whoever traces it now, or by nobody, and guarded if it has a gate; ends when
    /// that is so.
    pub(crate) fn listen(&self, device: Arc<Device>) -> oneshot::Receiver<()> {
        let (done, is_done) = oneshot::channel();
        self.post(Mail::Listen(device, done));
        is_done
    }

    /// What is under way of the device on this thread.
    pub(crate) fn under_way(&self, device: Arc<Device>) -> oneshot::Receiver<Vec<OfQueue>> {
        let (answer, is_there) = oneshot::channel();
        self.post(Mail::UnderWay(device, answer));
        is_there
    }

    /// Stop the thread and wait for it. Its queues must have been retired.
    pub(crate) fn stop(&self) {
        self.post(Mail::Stop);
        let thread = self.thread.lock().unwrap_or_else(|e| e.into_inner()).take();
        if let Some(thread) = thread {
            let _ = thread.join();
        }
    }

    fn post(&self, mail: Mail) {
        // A reactor that is gone has nothing left that the mail could be about.
        let _ = self.mail.lock().unwrap_or_else(|e| e.into_inner()).send(mail);
        self.waker.wake();
    }
}

/// Sends a reactor [`Mail::Tick`] after the time that its front-end asks for.
fn alarm(runtime: Handle, mail: Sender<Mail>, waker: Waker) -> Alarm {
    Box::new(move |after| {
        let (mail, waker) = (mail.clone(), waker.clone());
        runtime.spawn(async move {
            tokio::time::sleep(after).await;
            if mail.send(Mail::Tick).is_ok() {
                waker.wake();
            }
        });
    })
}

/// How many turns a reactor's loop has taken: one for each time that it slept, or was kept from it. Only its thread writes it.
#[derive(Default)]
struct Turns(AtomicU64);

impl Turns {
    fn count(&self) {
        self.0.store(self.0.load(Relaxed) + 1, Relaxed);
    }
}

/// A device that this thread serves.
struct Hosted {
    device: Arc<Device>,
    lane: Lane,
    /// Its queue is one front-end's alone, and takes no other clients.
    alone: bool,
    held: Held,
    /// What its stack will be after the change that is under way; empty: there is no change, or it has not got so far.
    next: Option<Next>,
    retiring: Retiring,
}

/// How far a queue is on its way out.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Retiring {
    No,
    /// It waits for clients to be gone.
    Closing,
    Flushing,
    /// The final flush is over, and whether it went well.
    Flushed(bool),
}

/// A device that is to be gone from this thread.
struct Retirement {
    device: Arc<Device>,
    done: oneshot::Sender<bool>,
    well: bool,
}

struct State {
    number: usize,
    ring: KernelRing,
    queues: Queues<KernelRing>,
    fronts: Fronts,
    /// What nudges are sent with.
    mail: Sender<Mail>,
    inbox: Receiver<Mail>,
    hosted: Vec<Hosted>,
    retirements: Vec<Retirement>,
    live: Live,
    /// When it was last logged that clients were disconnected.
    cuts_said: LogLimit,
    turns: Arc<Turns>,
    stopping: bool,
}

impl State {
    fn new(
        number: usize,
        ring: KernelRing,
        mail: Sender<Mail>,
        inbox: Receiver<Mail>,
        turns: Arc<Turns>,
    ) -> State {
        State {
            number,
            ring,
            queues: Queues::default(),
            fronts: Fronts::default(),
            mail,
            inbox,
            hosted: Vec::new(),
            retirements: Vec::new(),
            live: Live::default(),
            cuts_said: LogLimit::default(),
            turns,
            stopping: false,
        }
    }

    fn run(mut self) {
        let mut finished = Vec::new();
        let mut done = Vec::new();
        while !self.stopping {
            let is_dirty = self.fronts.is_dirty();
            let more = self.queues.any_touched() || is_dirty;
            if let Err(error) = self.ring.turn(if more { Wait::No } else { Wait::UntilEvent }) {
                tracing::error!(reactor = self.number, %error, "the ring failed");
                // What it served would wait for ever. Who is dead is noticed, and brought back.
                std::process::abort();
            }
            self.ring.look_at_clock();
            self.turns.count();
            let (mut has_mail, mut has_happened) = (false, is_dirty);
            while let Some(event) = self.ring.next_event() {
                has_happened = true;
                match event {
                    Event::Io { queue, cookie, result } => {
                        self.queues.touch(queue).complete(cookie, result, &mut self.ring);
                    }
                    Event::Woken => has_mail = true,
                    event => match event.to_node() {
                        Some((owner, event)) => {
                            self.queues.touch(owner.queue).node_event(owner.node, event, &mut self.ring);
                        }
                        None => {
                            let turn = &mut Turn { ring: &mut self.ring, queues: &mut self.queues };
                            self.fronts.event(event, turn);
                        }
                    },
                }
            }
            if has_mail {
                self.read_mail();
            }
            self.finish_turn(&mut finished, &mut done);
            if has_happened {
                // Front-ends have given memory back, after queues offered what waits for some.
                self.queues.recheck();
            }
        }
    }

    fn finish_turn(&mut self, finished: &mut Vec<QueueId>, done: &mut Vec<Done>) {
        self.queues.turn(&mut self.ring, finished);
        if !finished.is_empty() {
            let now = self.ring.look_at_clock();
            for &id in &*finished {
                let queue = self.queues.get_mut(id);
                queue.account(now);
                if let Some(found) = queue.take_timed_out() {
                    live::tell_timed_out(&self.hosted, self.number, id, &found, now);
                }
                if queue.looks_for_slow() {
                    live::tell_slow(queue, &self.hosted, self.number, now);
                }
                queue.swap_done(done);
                for end in done.drain(..) {
                    if end.owner == SELF {
                        self.flushed(id, end);
                    } else {
                        let turn = &mut Turn { ring: &mut self.ring, queues: &mut self.queues };
                        self.fronts.done(id, end, turn);
                    }
                }
            }
        }
        self.fronts.commit(&mut Turn { ring: &mut self.ring, queues: &mut self.queues });
        self.answer_awaited();
        if !self.retirements.is_empty() {
            self.go_on_retiring();
        }
    }

    fn read_mail(&mut self) {
        while let Ok(mail) = self.inbox.try_recv() {
            self.take(mail);
        }
    }

    fn take(&mut self, mail: Mail) {
        match mail {
            mail @ (Mail::Attach(..) | Mail::AttachAlone(..)) if self.is_early(&mail) => {
                self.live.late.push(mail)
            }
            Mail::Attach(device, attach) => self.attach(&device, attach),
            Mail::Step(device, step) => self.step(&device, step),
            Mail::Retire(device, done) => self.retire(&device, done),
            Mail::AttachAlone(device, tags, attach) => {
                let position = self.host(&device, Some(tags));
                self.attach_to(&device, position, attach);
            }
            Mail::Abort(device) => {
                for hosted in self.hosted.iter().filter(|hosted| Arc::ptr_eq(&hosted.device, &device)) {
                    let turn = &mut Turn { ring: &mut self.ring, queues: &mut self.queues };
                    self.fronts.close_lane(hosted.lane.queue, true, turn);
                }
            }
            Mail::Listen(device, done) => {
                self.positions(&device).for_each(|position| self.listen(position));
                let _ = done.send(());
            }
            Mail::UnderWay(device, answer) => drop(answer.send(self.under_way(&device))),
            Mail::Nudge(queue) => self.queues.nudge(queue),
            Mail::KernelBuffers(answer) => drop(answer.send(self.ring.kernel_buffers_left())),
            Mail::Turned(done) => drop(done.send(self.fronts.ublk.is_idle())),
            Mail::Tick => self.tick(),
            Mail::Stop => self.stopping = true,
        }
    }

    /// Disconnect clients that limits do not let stay, and log that.
    fn tick(&mut self) {
        let now = self.ring.look_at_clock();
        let turn = &mut Turn { ring: &mut self.ring, queues: &mut self.queues };
        for Cut { queue, why, held, still } in self.fronts.nbd.tick(now, turn) {
            let Some(count) = self.cuts_said.say() else { continue };
            let device = self.hosted.iter().find(|hosted| hosted.lane.queue == queue);
            let device = device.map(|hosted| hosted.device.name().to_string()).unwrap_or_default();
            let why = match why {
                CutReason::Stalled => "it sent part of a request and then nothing (see --nbd-limits stall)",
                CutReason::Evicted => "others waited for its memory (see --nbd-limits memory)",
            };
            tracing::warn!(
                %device, held, still_ms = still.as_millis() as u64,
                "{count} NBD clients were disconnected, the last one because {why}"
            );
        }
    }

    fn attach(&mut self, device: &Arc<Device>, attach: Attach) {
        let mut hosted = self.hosted.iter();
        let position = hosted.position(|hosted| Arc::ptr_eq(&hosted.device, device) && !hosted.alone);
        let position = position.map_or_else(|| self.host(device, None), Ok);
        self.attach_to(device, position, attach);
    }

    fn attach_to(&mut self, device: &Arc<Device>, position: Result<usize, DeviceError>, attach: Attach) {
        let position = match position {
            Ok(position) => position,
            Err(error) => {
                tracing::error!(device = %device.name(), %error, "no queue for a client");
                return;
            }
        };
        let hosted = &self.hosted[position];
        if hosted.retiring == Retiring::No {
            let turn = &mut Turn { ring: &mut self.ring, queues: &mut self.queues };
            attach(&hosted.lane, &mut self.fronts, turn);
        }
    }

    pub(super) fn nudge(&self, queue: QueueId) -> Nudge {
        let (mail, waker) = (self.mail.clone(), self.ring.waker());
        Arc::new(move || {
            // A reactor that is gone has no such queue.
            if mail.send(Mail::Nudge(queue)).is_ok() {
                waker.wake();
            }
        })
    }

    /// Make a hardware queue for the device on this thread: its place among those hosted. `tags`: so many are left
    /// to one front-end, whose queue it is alone; one more is for the final flush.
    fn host(&mut self, device: &Arc<Device>, tags: Option<u16>) -> Result<usize, DeviceError> {
        let id = self.queues.vacant();
        let nudge = self.nudge(id);
        let depth = tags.map_or(device.depth(), |tags| tags + 1);
        let Mounted { stack, facts, held } = device.mount(&mut self.ring, depth, nudge)?;
        let config = QueueConfig { id, depth, segments_per_tag: SEGMENTS_PER_TAG, timeout_ns: None };
        let mut queue = Queue::new(config, stack)?;
        queue.leave_tags(tags.unwrap_or(0));
        if device.is_held() {
            queue.freeze();
        }
        let shown = device.add_lane(self.number, queue.stats().clone());
        self.queues.insert(queue);
        let lane = Lane { queue: id, depth, facts, shown };
        let (device, alone) = (device.clone(), tags.is_some());
        self.hosted.push(Hosted { device, lane, alone, held, next: None, retiring: Retiring::No });
        self.listen(self.hosted.len() - 1);
        Ok(self.hosted.len() - 1)
    }

    /// Have a queue listened to by whoever traces its device and whoever looks at it, or by nobody; and guarded, if somebody
    /// writes parts of blocks.
    fn listen(&mut self, position: usize) {
        let Hosted { device, lane, .. } = &self.hosted[position];
        let tracer = device.trace().and_then(|session| {
            let tid = gettid().as_raw_nonzero().get();
            session.tracer(self.number, tid, lane.queue, lane.depth, device.places())
        });
        let sampler = device.glance().and_then(|lanes| lanes.sampler(self.number));
        let probe: Option<Box<dyn queue::Probe>> = match (tracer, sampler) {
            (None, None) => None,
            (Some(tracer), None) => Some(Box::new(tracer)),
            (None, Some(sampler)) => Some(Box::new(sampler)),
            (Some(tracer), Some(sampler)) => Some(Box::new(trace::Both(tracer, sampler))),
        };
        let gate = device.gate().map(|gate| (gate, self.nudge(lane.queue)));
        let queue = self.queues.get_mut(lane.queue);
        queue.set_probe(probe);
        if let Some((gate, nudge)) = gate {
            queue.guard(gate, nudge);
        }
        queue.look_for_slow(device.slow.limit_ns());
        queue.set_timeout(device.timeouts.limit_ns());
    }

    fn retire(&mut self, device: &Arc<Device>, done: oneshot::Sender<bool>) {
        for hosted in self.hosted.iter_mut().filter(|hosted| Arc::ptr_eq(&hosted.device, device)) {
            hosted.retiring = Retiring::Closing;
            // What a suspension held back is finished like the rest.
            self.queues.touch(hosted.lane.queue).thaw(hosted.device.size(), &mut self.ring);
            let turn = &mut Turn { ring: &mut self.ring, queues: &mut self.queues };
            self.fronts.close_lane(hosted.lane.queue, false, turn);
        }
        self.retirements.push(Retirement { device: device.clone(), done, well: true });
    }

    /// Take devices that are being retired a step further: wait for clients, flush, drop.
    fn go_on_retiring(&mut self) {
        let mut position = 0;
        while position < self.hosted.len() {
            let hosted = &mut self.hosted[position];
            let id = hosted.lane.queue;
            match hosted.retiring {
                Retiring::Closing if !self.fronts.is_open(id) => {
                    let queue = self.queues.touch(id);
                    if let Some(tag) = queue.tag() {
                        hosted.retiring = Retiring::Flushing;
                        queue.submit(tag, SELF, Request::flush(), &mut self.ring);
                    }
                }
                // Asked again whenever something has come of what its nodes let go of.
                Retiring::Flushed(_) if !self.queues.get_mut(id).close(&mut self.ring) => {}
                Retiring::Flushed(well) => {
                    self.drop_hosted(position, well);
                    continue;
                }
                _ => {}
            }
            position += 1;
        }
        let hosted = &self.hosted;
        let gone = |device: &Arc<Device>| !hosted.iter().any(|hosted| Arc::ptr_eq(&hosted.device, device));
        for retirement in self.retirements.extract_if(.., |retirement| gone(&retirement.device)) {
            let _ = retirement.done.send(retirement.well);
        }
    }

    fn drop_hosted(&mut self, position: usize, well: bool) {
        let hosted = self.hosted.swap_remove(position);
        let id = hosted.lane.queue;
        self.queues.remove(id);
        self.fronts.drop_lane(id, &mut Turn { ring: &mut self.ring, queues: &mut self.queues });
        hosted.device.remove_lane(&hosted.lane.shown);
        hosted.held.release(&mut self.ring);
        for retirement in &mut self.retirements {
            retirement.well &= well || !Arc::ptr_eq(&retirement.device, &hosted.device);
        }
    }

    fn flushed(&mut self, id: QueueId, end: Done) {
        self.queues.get_mut(id).release(end.tag);
        for hosted in self.hosted.iter_mut().filter(|hosted| hosted.lane.queue == id) {
            hosted.retiring = Retiring::Flushed(end.status.is_ok());
        }
    }
}
