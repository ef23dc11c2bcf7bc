//! A reactor: one thread, its ring, the hardware queues and connections that it hosts.
//!
//! The control plane sends it [`Message`]s and wakes it. One iteration of its loop, a turn: wait, pass
//! completions to their queues and socket events to the front-ends, let touched queues finish, answer
//! completed requests, send. An idle reactor sleeps in one system call without a deadline.
//!
//! One thing can block the thread: a buffered write that a file backend does inline, while the kernel writes
//! dirty pages back. The backend times each, and hands writes to the ring's workers after a slow one.
//!
//! *Invariant:* messages are processed between turns, so a queue is opened and removed only while none of its
//! requests is moving.

use crate::device::{self, BuiltNodes, Device, DeviceError, RingResources};
use crate::log_limit::LogLimit;
use crate::observe::slow::QueueRequests;
use block::Request;
use exports::iscsi::{Dropped, EndReason, Wake};
use exports::nbd::{Alarm, Cut, CutReason, DeviceFacts, Limits};
use exports::{FrontNumber, Fronts, Turn};
use queue::{Done, Owner, Queue, QueueConfig, QueueId, QueueWaker, Queues};
use reconfigure::{PreparedQueue, Reconfiguration};
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
use std::time::Duration;
use tokio::runtime::Handle;
use tokio::sync::oneshot;

mod reconfigure;

pub(crate) use reconfigure::Step;

/// Owner of requests that the reactor itself submits: no front-end has this number.
const SELF: Owner = Owner::new(15, 0);
/// Segments that one request's data may have: NBD payloads are contiguous.
const SEGMENTS_PER_TAG: u16 = 4;

/// A hardware queue, as its front-end sees it.
pub struct QueueHandle {
    /// The queue.
    pub queue: QueueId,
    /// Queue depth: most front-end requests in flight.
    pub depth: u16,
    /// Properties that the front-end may rely on.
    pub facts: DeviceFacts,
    /// Counters and number of clients, shared with the control plane.
    pub counters: Arc<device::HardwareQueue>,
}

/// The shape of a queue that belongs to one front-end.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct OwnQueue {
    /// Number of tags, which the front-end assigns itself.
    pub tags: u16,
    /// Most segments of a request's data.
    pub segments_per_tag: u16,
}

impl OwnQueue {
    /// A queue with that many tags, whose requests have as many segments as those of other queues.
    pub fn with_tags(tags: u16) -> OwnQueue {
        OwnQueue { tags, segments_per_tag: SEGMENTS_PER_TAG }
    }
}

/// Gives a front-end of a reactor something to serve. Runs on the reactor's thread, between turns.
pub type Attach = Box<dyn FnOnce(&QueueHandle, &mut Fronts, &mut Turn<'_>) + Send>;

/// Work for the front-ends of a reactor. Runs on the reactor's thread, between turns.
pub type Work = Box<dyn FnOnce(&mut Fronts, &mut Turn<'_>) + Send>;

enum Message {
    /// Run work that does not depend on a device.
    Run(Work),
    /// Serve a device to a new client, through a queue that is created if needed.
    Attach(Arc<Device>, Attach),
    /// Serve a device through a new queue, which belongs to the front-end.
    AttachAlone(Arc<Device>, OwnQueue, Attach),
    /// Finish the requests of the device's connections, close these, flush, remove the queue.
    Retire(Arc<Device>, oneshot::Sender<bool>),
    /// Close the device's connections although requests are unanswered.
    Abort(Arc<Device>),
    /// A step of a reconfiguration of the device.
    Step(Arc<Device>, Step),
    /// Apply the device's trace, samples, range lock and limits to its queues; answered when done.
    Refresh(Arc<Device>, oneshot::Sender<()>),
    /// Answer with the device's requests in flight.
    InFlight(Arc<Device>, oneshot::Sender<Vec<QueueRequests>>),
    /// Wake a queue whose nodes have received something from another thread.
    Wake(QueueId),
    /// Answer how many kernel buffers the ring has left.
    KernelBuffers(oneshot::Sender<Vec<u16>>),
    /// An alarm of this front-end is due.
    Tick(FrontNumber),
    /// Another reactor has sent the iSCSI front-end a message.
    ReadInbox,
    /// Answer at the start of a turn whether no request is in flight between a queue and the ublk driver.
    NextTurn(oneshot::Sender<bool>),
    Stop,
}

/// The control plane's handle of a reactor.
pub struct Reactor {
    messages: Mutex<Sender<Message>>,
    waker: Waker,
    engine: EngineInfo,
    thread: Mutex<Option<JoinHandle<()>>>,
    tid: Pid,
    turns: Arc<Turns>,
    /// CPUs whose requests it serves; empty if no export knows.
    cpus: Mutex<BTreeSet<usize>>,
}

impl Reactor {
    /// Starts the thread and waits until its ring is set up.
    pub(crate) fn start(number: usize, config: RingConfig, limits: Limits) -> io::Result<Reactor> {
        let (messages, inbox) = channel();
        let own = messages.clone();
        let runtime = Handle::try_current().ok();
        let (ready, is_ready) = channel();
        let turns = Arc::new(Turns::default());
        let counted = turns.clone();
        let thread =
            std::thread::Builder::new().name(format!("reactor-{number}")).spawn(
                move || match KernelRing::new(config) {
                    Ok(ring) => {
                        let sent = ready.send(Ok((ring.waker(), ring.engine().clone(), gettid())));
                        if sent.is_ok() {
                            let set = |front| Some(alarm(runtime.clone()?, own.clone(), ring.waker(), front));
                            let (nbd, iscsi) = (set(FrontNumber::Nbd), set(FrontNumber::Iscsi));
                            let (mail, waker) = (Mutex::new(own.clone()), ring.waker());
                            let wake: Wake = Arc::new(move || {
                                post_to(&mail, &waker, Message::ReadInbox);
                            });
                            let mut state = State::new(number, ring, own, inbox, counted);
                            state.fronts.nbd.limit(limits, nbd);
                            state.fronts.iscsi.limit(limits, iscsi, Some(wake));
                            state.run();
                        }
                    }
                    Err(error) => drop(ready.send(Err(error))),
                },
            )?;
        let (waker, engine, tid) =
            is_ready.recv().map_err(|_| io::Error::other("the reactor did not start"))??;
        let (messages, thread) = (Mutex::new(messages), Mutex::new(Some(thread)));
        Ok(Reactor { messages, waker, engine, thread, tid, turns, cpus: Mutex::default() })
    }

    /// Adds CPUs whose requests it serves, and binds the thread to all of them, to be near the clients and
    /// their data.
    pub fn add_affinity(&self, cpus: &[usize]) {
        let mut all = self.cpus.lock().unwrap_or_else(|e| e.into_inner());
        all.extend(cpus);
        let mut set = CpuSet::new();
        all.iter().filter(|cpu| **cpu < CpuSet::MAX_CPU).for_each(|cpu| set.set(*cpu));
        // A thread that may not be bound serves as well.
        let _ = sched_setaffinity(Some(self.tid), &set);
    }

    /// Resolves when the thread has submitted everything requested of its ring before, at the latest with the
    /// next of these. Returns whether no request is in flight between a queue and the ublk driver.
    pub fn next_turn(&self) -> oneshot::Receiver<bool> {
        let (done, receiver) = oneshot::channel();
        self.post(Message::NextTurn(done));
        receiver
    }

    /// Returns how many kernel buffers its ring has left, in each free stretch of the table.
    pub fn kernel_buffers_left(&self) -> oneshot::Receiver<Vec<u16>> {
        let (answer, receiver) = oneshot::channel();
        self.post(Message::KernelBuffers(answer));
        receiver
    }

    /// Returns how many turns its loop has taken.
    pub(crate) fn turns(&self) -> u64 {
        self.turns.0.load(Relaxed)
    }

    /// Processor time that its thread has used. Zero if the kernel does not count it
    /// (`CONFIG_SCHED_INFO`).
    pub fn cpu_time(&self) -> Duration {
        let path = format!("/proc/self/task/{}/schedstat", self.tid.as_raw_nonzero());
        let text = std::fs::read_to_string(path).unwrap_or_default();
        let time_ns = text.split_whitespace().next().and_then(|word| word.parse().ok());
        Duration::from_nanos(time_ns.unwrap_or(0))
    }

    /// Returns the I/O engine of its ring, and why it was chosen.
    pub fn engine(&self) -> &EngineInfo {
        &self.engine
    }

    /// Calls `attach` on this thread with the device's queue. Drops it without a call if the device is being
    /// retired or cannot be served here.
    pub fn attach(&self, device: Arc<Device>, attach: Attach) {
        self.post(Message::Attach(device, attach));
    }

    /// Calls `work` on this thread.
    pub fn run(&self, work: Work) {
        self.post(Message::Run(work));
    }

    /// Calls `attach` on this thread with a new queue that belongs to one front-end, which assigns the first
    /// `own.tags` tags itself.
    pub fn attach_alone(&self, device: Arc<Device>, own: OwnQueue, attach: Attach) {
        self.post(Message::AttachAlone(device, own, attach));
    }

    /// Retires the device's queues on this thread. Resolves when nothing of the device is left here, with
    /// whether the final flush succeeded.
    pub(crate) fn retire(&self, device: Arc<Device>) -> oneshot::Receiver<bool> {
        let (done, receiver) = oneshot::channel();
        self.post(Message::Retire(device, done));
        receiver
    }

    pub(crate) fn abort(&self, device: Arc<Device>) {
        self.post(Message::Abort(device));
    }

    /// Takes a step of a reconfiguration.
    pub(crate) fn step(&self, device: Arc<Device>, step: Step) {
        self.post(Message::Step(device, step));
    }

    /// Applies the device's trace, samples, range lock and limits to its queues. Resolves when done.
    pub fn refresh(&self, device: Arc<Device>) -> oneshot::Receiver<()> {
        let (done, receiver) = oneshot::channel();
        self.post(Message::Refresh(device, done));
        receiver
    }

    /// Returns the device's requests in flight on this thread.
    pub(crate) fn in_flight(&self, device: Arc<Device>) -> oneshot::Receiver<Vec<QueueRequests>> {
        let (answer, receiver) = oneshot::channel();
        self.post(Message::InFlight(device, answer));
        receiver
    }

    /// Stops the thread and waits for it. Its queues must have been retired.
    pub(crate) fn stop(&self) {
        self.post(Message::Stop);
        let thread = self.thread.lock().unwrap_or_else(|e| e.into_inner()).take();
        if let Some(thread) = thread {
            let _ = thread.join();
        }
    }

    fn post(&self, message: Message) {
        post_to(&self.messages, &self.waker, message);
    }
}

fn post_to(messages: &Mutex<Sender<Message>>, waker: &Waker, message: Message) {
    // A reactor that has ended has nothing left to do.
    let _ = messages.lock().unwrap_or_else(|e| e.into_inner()).send(message);
    waker.wake();
}

/// Returns the function by which a front-end sets an alarm: it sends [`Message::Tick`] after that time.
fn alarm(runtime: Handle, messages: Sender<Message>, waker: Waker, front: FrontNumber) -> Alarm {
    Box::new(move |after| {
        let (messages, waker) = (messages.clone(), waker.clone());
        runtime.spawn(async move {
            tokio::time::sleep(after).await;
            if messages.send(Message::Tick(front)).is_ok() {
                waker.wake();
            }
        });
    })
}

/// Number of turns of a reactor's loop: one for each time that it waited, or skipped waiting. Written by its
/// thread only.
#[derive(Default)]
struct Turns(AtomicU64);

impl Turns {
    fn count(&self) {
        self.0.store(self.0.load(Relaxed) + 1, Relaxed);
    }
}

/// A device's queue on this thread.
struct Hosted {
    device: Arc<Device>,
    handle: QueueHandle,
    /// Whether the queue belongs to one front-end and takes no other clients.
    alone: bool,
    resources: RingResources,
    /// The stack after the change in progress; empty if there is no change or it is not prepared yet.
    next: Option<PreparedQueue>,
    retiring: Retiring,
}

/// State of the removal of a queue.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Retiring {
    No,
    /// Waits for clients to disconnect.
    Closing,
    Flushing,
    /// Whether the final flush succeeded.
    Flushed(bool),
}

/// A device that is being removed from this thread.
struct Retirement {
    device: Arc<Device>,
    done: oneshot::Sender<bool>,
    flushed: bool,
}

struct State {
    number: usize,
    ring: KernelRing,
    queues: Queues<KernelRing>,
    fronts: Fronts,
    /// Sends this reactor messages of its own, from other threads.
    messages: Sender<Message>,
    inbox: Receiver<Message>,
    hosted: Vec<Hosted>,
    retirements: Vec<Retirement>,
    reconfiguration: Reconfiguration,
    /// Limits log lines about disconnected clients.
    cut_log: LogLimit,
    turns: Arc<Turns>,
    stopping: bool,
}

impl State {
    fn new(
        number: usize,
        ring: KernelRing,
        messages: Sender<Message>,
        inbox: Receiver<Message>,
        turns: Arc<Turns>,
    ) -> State {
        State {
            number,
            ring,
            queues: Queues::default(),
            fronts: Fronts::default(),
            messages,
            inbox,
            hosted: Vec::new(),
            retirements: Vec::new(),
            reconfiguration: Reconfiguration::default(),
            cut_log: LogLimit::default(),
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
                // Clients would wait for ever, so the process aborts and its supervisor restarts it.
                std::process::abort();
            }
            self.ring.read_clock();
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
                // Front-ends have freed memory for which requests wait, after the queues were processed.
                self.queues.recheck();
            }
        }
    }

    fn finish_turn(&mut self, finished: &mut Vec<QueueId>, done: &mut Vec<Done>) {
        self.queues.turn(&mut self.ring, finished);
        if !finished.is_empty() {
            let now = self.ring.read_clock();
            for &id in &*finished {
                let queue = self.queues.get_mut(id);
                queue.account(now);
                if let Some(found) = queue.take_timed_out() {
                    reconfigure::log_timed_out(&self.hosted, self.number, id, &found, now);
                }
                if queue.tracks_slow() {
                    reconfigure::log_slow(queue, &self.hosted, self.number, now);
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
        self.answer_pending();
        if !self.retirements.is_empty() {
            self.advance_retirements();
        }
    }

    fn read_mail(&mut self) {
        while let Ok(message) = self.inbox.try_recv() {
            self.take(message);
        }
    }

    fn take(&mut self, message: Message) {
        match message {
            message @ (Message::Attach(..) | Message::AttachAlone(..)) if self.must_wait(&message) => {
                self.reconfiguration.deferred.push(message)
            }
            Message::Attach(device, attach) => self.attach(&device, attach),
            Message::Run(work) => {
                work(&mut self.fronts, &mut Turn { ring: &mut self.ring, queues: &mut self.queues });
            }
            Message::Step(device, step) => self.step(&device, step),
            Message::Retire(device, done) => self.retire(&device, done),
            Message::AttachAlone(device, own, attach) => {
                let position = self.host(&device, Some(own));
                self.attach_to(&device, position, attach);
            }
            Message::Abort(device) => {
                for hosted in self.hosted.iter().filter(|hosted| Arc::ptr_eq(&hosted.device, &device)) {
                    let turn = &mut Turn { ring: &mut self.ring, queues: &mut self.queues };
                    self.fronts.close_queue(hosted.handle.queue, true, turn);
                }
            }
            Message::Refresh(device, done) => {
                self.positions(&device).for_each(|position| self.refresh(position));
                let _ = done.send(());
            }
            Message::InFlight(device, answer) => drop(answer.send(self.in_flight(&device))),
            Message::Wake(queue) => self.queues.wake(queue),
            Message::KernelBuffers(answer) => drop(answer.send(self.ring.kernel_buffers_left())),
            Message::NextTurn(done) => drop(done.send(self.fronts.ublk.is_idle())),
            Message::Tick(FrontNumber::Iscsi) => self.tick_iscsi(),
            Message::Tick(_) => self.tick(),
            Message::ReadInbox => {
                let turn = &mut Turn { ring: &mut self.ring, queues: &mut self.queues };
                self.fronts.iscsi.woken(turn);
            }
            Message::Stop => self.stopping = true,
        }
    }

    /// Disconnects clients that exceed limits, and logs that.
    fn tick(&mut self) {
        let now = self.ring.read_clock();
        let turn = &mut Turn { ring: &mut self.ring, queues: &mut self.queues };
        for Cut { queue, why, held, still } in self.fronts.nbd.tick(now, turn) {
            let Some(count) = self.cut_log.admit_now() else { continue };
            let device = self.hosted.iter().find(|hosted| hosted.handle.queue == queue);
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

    /// Pings iSCSI initiators, ends sessions that exceed limits, and logs that.
    fn tick_iscsi(&mut self) {
        let now = self.ring.read_clock();
        let turn = &mut Turn { ring: &mut self.ring, queues: &mut self.queues };
        for Dropped { target, why, held, still } in self.fronts.iscsi.tick(now, turn) {
            let Some(count) = self.cut_log.admit_now() else { continue };
            let why = match why {
                EndReason::Evicted => "others waited for its memory",
                _ => "its initiator did not answer, or stopped in the middle of a PDU",
            };
            tracing::warn!(
                %target, held, still_ms = still.as_millis() as u64,
                "{count} clients were disconnected, the last one an iSCSI session because {why}"
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
            attach(&hosted.handle, &mut self.fronts, turn);
        }
    }

    pub(super) fn waker_of(&self, queue: QueueId) -> QueueWaker {
        let (messages, waker) = (self.messages.clone(), self.ring.waker());
        Arc::new(move || {
            // A reactor that has ended has no such queue.
            if messages.send(Message::Wake(queue)).is_ok() {
                waker.wake();
            }
        })
    }

    /// Creates a hardware queue for the device on this thread. Returns its position among those hosted.
    /// `own`: the queue belongs to one front-end with that many tags; one more is for the final flush.
    fn host(&mut self, device: &Arc<Device>, own: Option<OwnQueue>) -> Result<usize, DeviceError> {
        let id = self.queues.vacant();
        let waker = self.waker_of(id);
        let depth = own.map_or(device.depth(), |own| own.tags + 1);
        let BuiltNodes { stack, facts, resources } =
            device.build_nodes(&mut self.ring, depth, waker.clone())?;
        let segments_per_tag = own.map_or(SEGMENTS_PER_TAG, |own| own.segments_per_tag);
        let config = QueueConfig { id, depth, segments_per_tag, timeout_ns: None };
        let mut queue = Queue::new(config, stack)?;
        queue.set_waker(waker);
        queue.reserve_tags(own.map_or(0, |own| own.tags));
        if device.is_io_suspended() {
            queue.freeze();
        }
        let counters = device.add_queue(self.number, queue.stats().clone());
        self.queues.insert(queue);
        let handle = QueueHandle { queue: id, depth, facts, counters };
        let (device, alone) = (device.clone(), own.is_some());
        self.hosted.push(Hosted { device, handle, alone, resources, next: None, retiring: Retiring::No });
        self.refresh(self.hosted.len() - 1);
        Ok(self.hosted.len() - 1)
    }

    /// Installs the probes of the device's trace and samples on a queue, its range lock if partial blocks are
    /// written, and the limits for slow requests and timeouts.
    fn refresh(&mut self, position: usize) {
        let Hosted { device, handle, .. } = &self.hosted[position];
        let tracer = device.trace().and_then(|session| {
            let tid = gettid().as_raw_nonzero().get();
            session.tracer(self.number, tid, handle.queue, handle.depth, device.trace_roles())
        });
        let sampler = device.sample().and_then(|buffers| buffers.sampler(self.number));
        let probe: Option<Box<dyn queue::Probe>> = match (tracer, sampler) {
            (None, None) => None,
            (Some(tracer), None) => Some(Box::new(tracer)),
            (None, Some(sampler)) => Some(Box::new(sampler)),
            (Some(tracer), Some(sampler)) => Some(Box::new(trace::Both(tracer, sampler))),
        };
        let queue = self.queues.get_mut(handle.queue);
        queue.set_probe(probe);
        if let Some(lock) = device.range_lock() {
            queue.guard(lock);
        }
        queue.set_slow_limit(device.slow.limit_ns());
        queue.set_timeout(device.timeouts.limit_ns());
    }

    fn retire(&mut self, device: &Arc<Device>, done: oneshot::Sender<bool>) {
        for hosted in self.hosted.iter_mut().filter(|hosted| Arc::ptr_eq(&hosted.device, device)) {
            hosted.retiring = Retiring::Closing;
            // Requests held by a suspension are finished like the others.
            self.queues.touch(hosted.handle.queue).thaw(hosted.device.size(), &mut self.ring);
            let turn = &mut Turn { ring: &mut self.ring, queues: &mut self.queues };
            self.fronts.close_queue(hosted.handle.queue, false, turn);
        }
        self.retirements.push(Retirement { device: device.clone(), done, flushed: true });
    }

    /// Advances devices that are being retired: waits for clients, flushes, removes the queue.
    fn advance_retirements(&mut self) {
        let mut position = 0;
        while position < self.hosted.len() {
            let hosted = &mut self.hosted[position];
            let id = hosted.handle.queue;
            match hosted.retiring {
                Retiring::Closing if !self.fronts.is_open(id) => {
                    let queue = self.queues.touch(id);
                    if let Some(tag) = queue.tag() {
                        hosted.retiring = Retiring::Flushing;
                        queue.submit(tag, SELF, Request::flush(), &mut self.ring);
                    }
                }
                // Tried again on each turn until its nodes are closed.
                Retiring::Flushed(_) if !self.queues.get_mut(id).close(&mut self.ring) => {}
                Retiring::Flushed(flushed) => {
                    self.drop_hosted(position, flushed);
                    continue;
                }
                _ => {}
            }
            position += 1;
        }
        let hosted = &self.hosted;
        let gone = |device: &Arc<Device>| !hosted.iter().any(|hosted| Arc::ptr_eq(&hosted.device, device));
        for retirement in self.retirements.extract_if(.., |retirement| gone(&retirement.device)) {
            let _ = retirement.done.send(retirement.flushed);
        }
    }

    fn drop_hosted(&mut self, position: usize, flushed: bool) {
        let hosted = self.hosted.swap_remove(position);
        let id = hosted.handle.queue;
        self.queues.remove(id);
        self.fronts.remove_queue(id, &mut Turn { ring: &mut self.ring, queues: &mut self.queues });
        hosted.device.remove_queue(&hosted.handle.counters);
        hosted.resources.release(&mut self.ring);
        for retirement in &mut self.retirements {
            retirement.flushed &= flushed || !Arc::ptr_eq(&retirement.device, &hosted.device);
        }
    }

    fn flushed(&mut self, id: QueueId, end: Done) {
        self.queues.get_mut(id).release(end.tag);
        for hosted in self.hosted.iter_mut().filter(|hosted| hosted.handle.queue == id) {
            hosted.retiring = Retiring::Flushed(end.status.is_ok());
        }
    }
}
