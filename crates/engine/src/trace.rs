//! Tracing a device while it is served: who listens to its queues, and the thread that carries off what they heard.
//!
//! A session belongs to its device; there is one at a time, as with blktrace. Each hardware queue has a lane of fixed
//! size in it. A thread of the session's own empties the lanes into a bounded channel, from where whoever asked takes
//! them. If that is slow, the thread waits, the lanes fill up, and what finds no room is counted there: neither I/O
//! nor the control plane ever waits for a trace. It has the lowest priority, as whoever writes a trace down has: what they
//! take is time that I/O leaves. Lanes are made by that thread, not by those that serve. A trace that is
//! over, and one whose device is gone, waits for whoever does not take it no longer than [`LINGER`].
//!
//! *Invariant:* at most `buffer` bytes for each queue and [`CHUNKS`] chunks are held.

use crate::control::ControlError;
use crate::device::Device;
use crate::host::Host;
use block::Bytes;
use queue::{Nanos, QueueId};
use serde::{Deserialize, Serialize};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::mpsc::{Receiver, Sender, channel};
use trace::wire::{Frame, LaneInfo, Opened, RECORDS_MAX};
use trace::{Filter, FilterText, Lane, Place, Tracer, TracerConfig};

/// Chunks that may wait for whoever asked, each of the records of one look at the lanes at most.
const CHUNKS: usize = 16;
/// A chunk is sent when it has grown to this.
const CHUNK_LEN: usize = 256 << 10;
/// How long the thread sleeps when there was something to carry off, and the longest it sleeps when there was not.
const PAUSE: Duration = Duration::from_millis(1);
const PAUSE_MAX: Duration = Duration::from_millis(32);
/// What a lane holds unless it was said: 32,768 events, a hundredth of a second of three million a second.
const BUFFER: u64 = 1 << 20;
const BUFFER_MAX: u64 = 64 << 20;
/// The lowest priority: while every processor is busy with I/O, events are dropped rather than requests delayed.
const NICE: i32 = 19;
/// How long a trace that is over waits for whoever asked to take more of what is left: at the lowest priority that may be a
/// while.
const LINGER: Duration = Duration::from_secs(5);

/// How a device is to be traced.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TraceOptions {
    /// What is wanted.
    pub filter: FilterText,
    /// Tell of each piece of a request that was split that it was queued.
    pub queue_children: bool,
    /// What happens within one turn of a queue's thread has one time: cheaper, and coarser.
    pub coarse: bool,
    /// Bytes that each queue may have waiting.
    pub buffer: Option<u64>,
    /// End after so many seconds.
    pub seconds: Option<f64>,
}

/// What is to become of a trace that runs.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TraceChange {
    /// Tell nothing until it is started again.
    Stop,
    /// Go on.
    Start,
    /// It is over: whoever listens is told what is left.
    End,
    /// Tell this from now on, and nothing else.
    Filter(FilterText),
}

/// Why a device is not traced.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// Somebody does already.
    #[error("it is being traced already (blockyard trace NAME end ends that)")]
    Traced,
    /// Nobody does.
    #[error("it is not being traced (blockyard trace NAME)")]
    NotTraced,
    /// The filter makes no sense.
    #[error(transparent)]
    Filter(#[from] trace::FilterError),
    /// It asks for what this trace does not tell.
    #[error("only a Chrome trace tells of \"done\" (ask for complete)")]
    NoEnds,
    /// Nor does the size.
    #[error("a buffer of {0} is not possible (from 4K to {max})", max = Bytes(BUFFER_MAX))]
    Buffer(Bytes),
    /// Nor the time.
    #[error("a trace cannot last that long (some seconds, more than none)")]
    Seconds,
    /// The system.
    #[error("no thread for it: {0}")]
    Thread(std::io::Error),
}

/// A trace that runs.
pub(crate) struct Session {
    options: TraceOptions,
    filter: Arc<Filter>,
    /// It tells of the end of requests, whatever filter it is given.
    ends: bool,
    buffer: usize,
    /// In the order in which they came; their places are their numbers.
    lanes: Mutex<Vec<Heard>>,
    /// Lanes for queues that come.
    spare: Mutex<Vec<Arc<Lane>>>,
    /// Queues that found no lane, and are to be listened to once there are more.
    short: AtomicUsize,
    ending: AtomicBool,
}

/// A queue that is listened to.
#[derive(Clone)]
struct Heard {
    reactor: usize,
    queue: QueueId,
    info: LaneInfo,
    lane: Arc<Lane>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Session {
    fn new(options: TraceOptions) -> Result<Session, TraceError> {
        let buffer = options.buffer.unwrap_or(BUFFER);
        if !(4096..=BUFFER_MAX).contains(&buffer) {
            return Err(TraceError::Buffer(Bytes(buffer)));
        }
        let is_time = |seconds: f64| seconds > 0.0 && Duration::try_from_secs_f64(seconds).is_ok();
        if !options.seconds.is_none_or(is_time) {
            return Err(TraceError::Seconds);
        }
        let filter = Arc::new(Filter::new(&options.filter)?);
        let ends = options.filter.asks_for_ends()?;
        let (lanes, spare) = (Mutex::default(), Mutex::default());
        let (short, ending) = (AtomicUsize::new(0), AtomicBool::new(false));
        Ok(Session { options, filter, ends, buffer: buffer as usize, lanes, spare, short, ending })
    }

    /// The listener of a queue. One that was listened to before keeps its lane; one that finds none to take has no
    /// listener until the session's thread has made one.
    pub(crate) fn tracer(
        &self,
        reactor: usize,
        tid: i32,
        queue: QueueId,
        depth: u16,
        places: Vec<Place>,
    ) -> Option<Tracer> {
        let mut lanes = lock(&self.lanes);
        let known = lanes.iter().find(|heard| heard.reactor == reactor && heard.queue == queue);
        let lane = match known {
            Some(heard) => heard.lane.clone(),
            None => {
                let Some(lane) = lock(&self.spare).pop() else {
                    self.short.fetch_add(1, SeqCst);
                    return None;
                };
                let info = LaneInfo { pid: tid as u32, comm: format!("reactor-{reactor}") };
                lanes.push(Heard { reactor, queue, info, lane: lane.clone() });
                lane
            }
        };
        Some(Tracer::new(TracerConfig {
            filter: self.filter.clone(),
            lane,
            places,
            depth,
            queue_children: self.options.queue_children,
            clock: (!self.options.coarse).then_some(ring::clock as fn() -> Nanos),
        }))
    }

    /// Make lanes for the queues that found none, and for those that may come: one for each of so many threads, and one
    /// at least. Whether a queue found none.
    fn make_lanes(&self, threads: usize) -> bool {
        let short = self.short.swap(0, SeqCst);
        let wanted = threads.saturating_sub(lock(&self.lanes).len()).max(short).max(1);
        while lock(&self.spare).len() < wanted {
            let lane = Arc::new(Lane::of_size(self.buffer));
            lock(&self.spare).push(lane);
        }
        short > 0
    }

    /// Have it end soon.
    pub(crate) fn end(&self) {
        self.ending.store(true, SeqCst);
    }
}

impl Host {
    /// Trace a device from now on: what comes of it, until it ends.
    ///
    /// # Errors
    /// There is no such device, it is being traced, or the options make no sense.
    pub fn start_trace(
        self: &Arc<Self>,
        name: &str,
        options: TraceOptions,
    ) -> Result<Receiver<Vec<u8>>, ControlError> {
        let device = self.device(name).ok_or(ControlError::NotFound)?;
        let session = Arc::new(Session::new(options).map_err(refused)?);
        if !device.begin_trace(&session) {
            return Err(refused(TraceError::Traced));
        }
        let (sender, receiver) = channel(CHUNKS);
        let carrier = Carrier::new(self.clone(), &device, session, sender);
        let thread = std::thread::Builder::new().name(format!("trace-{name}"));
        let started = thread.spawn(move || carrier.run());
        match started {
            Ok(_) => Ok(receiver),
            Err(why) => {
                device.end_trace();
                Err(refused(TraceError::Thread(why)))
            }
        }
    }

    /// Change the trace of a device that runs.
    pub(crate) fn change_trace(device: &Device, change: &TraceChange) -> Result<(), TraceError> {
        let session = device.trace().ok_or(TraceError::NotTraced)?;
        match change {
            TraceChange::Stop => session.filter.run(false),
            TraceChange::Start => session.filter.run(true),
            TraceChange::End => session.end(),
            TraceChange::Filter(text) if session.ends => session.filter.set(&text.clone().with_ends())?,
            TraceChange::Filter(text) if text.asks_for_ends()? => return Err(TraceError::NoEnds),
            TraceChange::Filter(text) => session.filter.set(text)?,
        }
        Ok(())
    }
}

fn refused(error: TraceError) -> ControlError {
    match error {
        TraceError::Traced => ControlError::Busy(error.to_string()),
        other => ControlError::Failed(other.to_string()),
    }
}

/// The thread of a session.
struct Carrier {
    host: Arc<Host>,
    /// A device that is removed is closed, whoever traces it.
    device: Weak<Device>,
    session: Arc<Session>,
    sender: Sender<Vec<u8>>,
    /// When it was asked to end by itself.
    end: Option<Instant>,
    chunk: Vec<u8>,
    /// By lane: events that were dropped when it was last looked at.
    dropped: Vec<u64>,
}

/// Nobody takes what is carried off.
struct Unheard;

impl Carrier {
    fn new(host: Arc<Host>, device: &Arc<Device>, session: Arc<Session>, sender: Sender<Vec<u8>>) -> Carrier {
        let device = Arc::downgrade(device);
        Carrier { host, device, session, sender, end: None, chunk: Vec::new(), dropped: Vec::new() }
    }

    fn run(mut self) {
        // It takes what processor time I/O leaves; refused, it goes on as it is.
        let _ = rustix::process::setpriority_process(Some(rustix::thread::gettid()), NICE);
        let heard = self.carry();
        if let Some(device) = self.device.upgrade() {
            device.end_trace();
        }
        self.listen();
        // What was heard to the last.
        if heard.and_then(|()| self.look()).is_ok() {
            Frame::Closed.encode(&mut self.chunk);
            let _ = self.send();
        }
    }

    /// Have every queue of the device listened to, or none once the trace has ended; returns when that is so.
    fn listen(&self) {
        let Some(device) = self.device.upgrade() else { return };
        loop {
            let listening: Vec<_> =
                self.host.reactors().iter().map(|reactor| reactor.listen(device.clone())).collect();
            for done in listening {
                // A reactor that is gone has no queue of it.
                let _ = done.blocking_recv();
            }
            if !self.make_lanes() {
                return;
            }
        }
    }

    fn make_lanes(&self) -> bool {
        self.session.make_lanes(self.host.reactors().len())
    }

    /// Nothing more is to be told than what was heard already.
    fn is_over(&self) -> bool {
        self.session.ending.load(SeqCst)
            || self.device.strong_count() == 0
            || self.end.is_some_and(|end| Instant::now() >= end)
    }

    fn carry(&mut self) -> Result<(), Unheard> {
        let wall = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let device = self.device.upgrade().ok_or(Unheard)?;
        let opened = Opened {
            device: device.name().to_string(),
            number: device.number() as u32,
            clock_ns: ring::clock().0,
            wall: (wall.as_secs(), wall.subsec_nanos()),
        };
        Frame::Opened(opened).encode(&mut self.chunk);
        drop(device);
        self.make_lanes();
        self.listen();
        // From here on everything is heard: whoever waits for the first chunk may begin.
        self.send()?;
        let seconds = self.session.options.seconds;
        self.end = seconds.and_then(|s| Instant::now().checked_add(Duration::from_secs_f64(s)));
        let mut pause = PAUSE;
        while !self.is_over() {
            if self.make_lanes() {
                self.listen();
            }
            let some = self.look()?;
            pause = if some { PAUSE } else { (pause * 2).min(PAUSE_MAX) };
            let left = self.end.map_or(pause, |end| end.saturating_duration_since(Instant::now()));
            std::thread::sleep(pause.min(left));
        }
        Ok(())
    }

    /// Carry off what the lanes hold, and whether that was something.
    fn look(&mut self) -> Result<bool, Unheard> {
        let now = ring::clock();
        let lanes = lock(&self.session.lanes).clone();
        let mut some = false;
        for (number, heard) in lanes.iter().enumerate() {
            let queue = number as u32;
            if number >= self.dropped.len() {
                self.dropped.push(0);
                Frame::Lane(queue, heard.info.clone()).encode(&mut self.chunk);
            }
            // At most what it holds: a queue that is faster than this must not keep the others waiting.
            let mut left = heard.lane.records();
            loop {
                let mut records = Vec::with_capacity(RECORDS_MAX.min(left));
                let count = heard.lane.drain_records(RECORDS_MAX.min(left), |record| records.push(record));
                if count == 0 {
                    break;
                }
                some = true;
                left -= count;
                Frame::Records(queue, records).encode(&mut self.chunk);
                if self.chunk.len() >= CHUNK_LEN {
                    self.send()?;
                }
            }
            let dropped = heard.lane.dropped();
            if dropped > self.dropped[number] {
                some = true;
                Frame::Dropped(queue, dropped - self.dropped[number]).encode(&mut self.chunk);
                self.dropped[number] = dropped;
            }
        }
        Frame::Tick(now.0).encode(&mut self.chunk);
        self.send()?;
        Ok(some)
    }

    fn send(&mut self) -> Result<(), Unheard> {
        let mut chunk = std::mem::take(&mut self.chunk);
        let mut over_since = None;
        loop {
            chunk = match self.sender.try_send(chunk) {
                Ok(()) => return Ok(()),
                Err(TrySendError::Closed(_)) => return Err(Unheard),
                Err(TrySendError::Full(chunk)) => chunk,
            };
            // A slow reader may hold a trace up, but not keep it.
            if self.is_over() && over_since.get_or_insert_with(Instant::now).elapsed() >= LINGER {
                return Err(Unheard);
            }
            std::thread::sleep(PAUSE);
        }
    }
}
