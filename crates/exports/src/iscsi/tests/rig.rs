//! A test reactor thread with in-memory disks that can hold requests back.

use crate::iscsi::Front;
use crate::{DeviceFacts, Front as _, Turn};
use block::{Cookie, Data, Op, Status};
use queue::{Cx, Node, Queue, QueueConfig, QueueId, Queues, RangeLock, Ring, Stack, Verdict};
use ring::{Choice, Event, KernelRing, RingConfig, Wait, Waker};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

/// Size of a disk in blocks of 512 bytes.
pub(super) const BLOCKS: u64 = 64 << 10;

/// An in-memory disk that can hold requests back.
#[derive(Clone)]
pub(super) struct Disk {
    state: Arc<Mutex<State>>,
}

#[derive(Default)]
struct State {
    data: Vec<u8>,
    holds: bool,
    held: Vec<(QueueId, Cookie)>,
    /// Requests that reached the disk.
    seen: Vec<(Op, u64, u64)>,
    status: Option<Status>,
}

impl Disk {
    fn new() -> Disk {
        let data = vec![0; (BLOCKS * 512) as usize];
        Disk { state: Arc::new(Mutex::new(State { data, ..State::default() })) }
    }

    pub(super) fn hold(&self, holds: bool) {
        self.state.lock().unwrap().holds = holds;
    }

    /// Takes the held requests, for [`Reactor::complete`].
    pub(super) fn take_held(&self) -> Vec<(QueueId, Cookie)> {
        std::mem::take(&mut self.state.lock().unwrap().held)
    }

    pub(super) fn held(&self) -> usize {
        self.state.lock().unwrap().held.len()
    }

    pub(super) fn fail(&self, status: Option<Status>) {
        self.state.lock().unwrap().status = status;
    }

    pub(super) fn seen(&self) -> Vec<(Op, u64, u64)> {
        self.state.lock().unwrap().seen.clone()
    }

    pub(super) fn bytes(&self, offset: u64, len: usize) -> Vec<u8> {
        self.state.lock().unwrap().data[offset as usize..][..len].to_vec()
    }

    pub(super) fn fill(&self, offset: u64, bytes: &[u8]) {
        self.state.lock().unwrap().data[offset as usize..][..bytes.len()].copy_from_slice(bytes);
    }
}

struct DiskNode {
    disk: Disk,
    queue: QueueId,
}

impl DiskNode {
    fn perform(&self, req: &block::Request, cx: &mut Cx<'_, KernelRing>) -> Verdict {
        let mut state = self.disk.state.lock().unwrap();
        state.seen.push((req.op, req.offset.0, req.len.0));
        if let Some(status) = state.status {
            return Verdict::Up(status);
        }
        let range = req.offset.0 as usize..(req.offset.0 + req.len.0) as usize;
        match (req.op, req.data) {
            (Op::Read, Data::One(segment)) => {
                cx.ring.bytes_mut(segment)[..range.len()].copy_from_slice(&state.data[range])
            }
            (Op::Write, Data::One(segment)) => {
                state.data[range.clone()].copy_from_slice(&cx.ring.bytes(segment)[..range.len()])
            }
            (Op::WriteZeroes | Op::Discard, _) => state.data[range].fill(0),
            _ => {}
        }
        Verdict::Up(Status::Ok)
    }
}

impl Node<KernelRing> for DiskNode {
    fn submit(&mut self, io: Cookie, req: &mut block::Request, cx: &mut Cx<'_, KernelRing>) -> Verdict {
        let mut state = self.disk.state.lock().unwrap();
        if state.holds {
            state.held.push((self.queue, io));
            return Verdict::Held;
        }
        drop(state);
        self.perform(req, cx)
    }

    fn reap(&mut self, _: Cookie, req: &mut block::Request, _: i64, cx: &mut Cx<'_, KernelRing>) -> Verdict {
        self.perform(req, cx)
    }
}

type Job = Box<dyn FnOnce(&mut Front, &mut Turn<'_>) + Send>;

/// A reactor thread with one queue per disk.
pub(super) struct Reactor {
    jobs: Sender<Job>,
    waker: Waker,
    pub(super) disks: Vec<Disk>,
    thread: Option<JoinHandle<()>>,
}

/// Options of a reactor.
pub(super) struct Options {
    pub(super) disks: usize,
    pub(super) depth: u16,
    pub(super) memory: u64,
    /// Whether reads complete inline.
    pub(super) inline: bool,
}

impl Default for Options {
    fn default() -> Options {
        Options { disks: 1, depth: 64, memory: 64 << 20, inline: false }
    }
}

impl Reactor {
    pub(super) fn new(options: Options) -> Reactor {
        let disks: Vec<Disk> = (0..options.disks).map(|_| Disk::new()).collect();
        Reactor::on(options, disks)
    }

    /// Starts a reactor with queues on these disks.
    pub(super) fn on(options: Options, disks: Vec<Disk>) -> Reactor {
        let (jobs, inbox) = channel::<Job>();
        let (ready, is_ready) = channel();
        let own_disks = disks.clone();
        let own_jobs = jobs.clone();
        let thread = std::thread::spawn(move || {
            let config = RingConfig { engine: Choice::Auto, ..RingConfig::default() };
            let ring = KernelRing::new(config).unwrap();
            ready.send(ring.waker()).unwrap();
            run(ring, &own_disks, &options, own_jobs, &inbox);
        });
        Reactor { jobs, waker: is_ready.recv().unwrap(), disks, thread: Some(thread) }
    }

    /// Runs a closure on the reactor's thread, between turns.
    pub(super) fn with<T: Send + 'static>(
        &self,
        job: impl FnOnce(&mut Front, &mut Turn<'_>) -> T + Send + 'static,
    ) -> T {
        let (answer, result) = channel();
        let job: Job = Box::new(move |front, turn| drop(answer.send(job(front, turn))));
        self.jobs.send(job).unwrap();
        self.waker.wake();
        result.recv_timeout(Duration::from_secs(10)).expect("the reactor answers")
    }

    /// Completes the requests that a disk holds.
    pub(super) fn release(&self, disk: usize) {
        self.disks[disk].hold(false);
        self.complete(self.disks[disk].take_held());
    }

    /// Completes these requests.
    pub(super) fn complete(&self, held: Vec<(QueueId, Cookie)>) {
        self.with(move |_, turn| {
            for (queue, io) in held {
                turn.queues.touch(queue).complete(io, 0, turn.ring);
            }
        });
    }

    /// Waits until the front-end holds no memory for its connections.
    pub(super) fn holds_no_memory(&self) {
        let start = std::time::Instant::now();
        while self.memory_held() > 0 {
            assert!(start.elapsed() < Duration::from_secs(5), "{} bytes are held", self.memory_held());
            std::thread::yield_now();
        }
    }

    /// Returns how many bytes the front-end holds for its connections.
    pub(super) fn memory_held(&self) -> u64 {
        self.with(|front, _| front.connections.iter().flatten().map(|connection| connection.held).sum())
    }
}

impl Drop for Reactor {
    fn drop(&mut self) {
        let _ = self.jobs.send(Box::new(|_, _| stop()));
        self.waker.wake();
        if let Some(thread) = self.thread.take() {
            let ended = thread.join();
            if !std::thread::panicking() {
                ended.expect("the reactor ends without a panic");
            }
        }
    }
}

fn run(mut ring: KernelRing, disks: &[Disk], options: &Options, own: Sender<Job>, inbox: &Receiver<Job>) {
    let mut queues = Queues::default();
    let mut front = Front::default();
    let waker = ring.waker();
    let (wake_jobs, wake_ring) = (Mutex::new(own), ring.waker());
    for disk in disks {
        let id = queues.vacant();
        let config = QueueConfig { id, depth: options.depth, segments_per_tag: 4, timeout_ns: None };
        let mut stack = Stack::default();
        stack.backend(Box::new(DiskNode { disk: disk.clone(), queue: id }));
        let mut queue = Queue::new(config, stack).unwrap();
        let own_waker = waker.clone();
        queue.set_waker(Arc::new(move || own_waker.wake()));
        queue.guard(&Arc::new(RangeLock::default()));
        queues.insert(queue);
        let facts = DeviceFacts {
            zero_copy_reads: false,
            allows_zero_copy: false,
            inline: options.inline,
            sparse: false,
            opaque: false,
            compare_and_write: false,
        };
        front.add_queue(id, facts, Arc::default());
    }
    let limits = crate::iscsi::Limits { memory: options.memory, stall: Some(Duration::from_secs(60)) };
    let wake: crate::iscsi::Wake = Arc::new(move || {
        let _ = wake_jobs.lock().unwrap().send(Box::new(|front, turn| front.woken(turn)));
        wake_ring.wake();
    });
    front.limit(limits, Some(Box::new(|_| {})), Some(wake));
    let (mut finished, mut done) = (Vec::new(), Vec::new());
    loop {
        let more = queues.any_touched() || front.is_dirty();
        ring.turn(if more { Wait::No } else { Wait::UntilEvent }).unwrap();
        ring.read_clock();
        let mut has_mail = false;
        while let Some(event) = ring.next_event() {
            match event {
                Event::Io { queue, cookie, result } => {
                    queues.touch(queue).complete(cookie, result, &mut ring)
                }
                Event::Woken => has_mail = true,
                event => front.event(event, &mut Turn { ring: &mut ring, queues: &mut queues }),
            }
        }
        if has_mail {
            queues.recheck();
            while let Ok(job) = inbox.try_recv() {
                job(&mut front, &mut Turn { ring: &mut ring, queues: &mut queues });
            }
        }
        queues.turn(&mut ring, &mut finished);
        for &id in &finished {
            let queue = queues.get_mut(id);
            queue.account(ring.read_clock());
            queue.swap_done(&mut done);
            for end in done.drain(..) {
                front.done(id, end, &mut Turn { ring: &mut ring, queues: &mut queues });
            }
        }
        front.commit(&mut Turn { ring: &mut ring, queues: &mut queues });
        if STOPPED.with(|stopped| stopped.get()) {
            return;
        }
    }
}

thread_local! {
    static STOPPED: std::cell::Cell<bool> = const { std::cell::Cell::new(false) };
}

/// Ends the reactor's thread, from a job.
fn stop() {
    STOPPED.with(|stopped| stopped.set(true));
}
