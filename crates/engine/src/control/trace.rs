//! Starts traces, and drains them.
//!
//! A thread of the session drains its buffers into a bounded channel, which the client reads. If the client
//! is slow, the thread waits, the buffers fill up, and events that find no space are counted as dropped:
//! neither I/O nor the control plane ever waits for a trace. The thread has the lowest priority, as does the
//! process that writes a trace to a file, so both use only CPU time that I/O leaves. It also allocates the
//! buffers, rather than the reactors. After a trace has ended, or its device was removed, a client that does
//! not read is waited for no longer than [`LINGER`].

use crate::control::ControlError;
use crate::device::Device;
use crate::host::Host;
use crate::observe::trace::{TraceError, TraceOptions, TraceSession, lock};
use std::collections::HashSet;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::mpsc::{Receiver, Sender, channel};
use trace::Record;
use trace::wire::{Frame, Node, Opened, RECORDS_MAX, SessionName};

/// Most chunks that wait for the client, each with the records of one pass over the buffers at most.
const CHUNKS: usize = 16;
/// Length at which a chunk is sent, in bytes.
const CHUNK_LEN: usize = 256 << 10;
/// Pause after a pass that found records; `PAUSE_MAX` is the longest pause after passes that did not.
const PAUSE: Duration = Duration::from_millis(1);
const PAUSE_MAX: Duration = Duration::from_millis(32);
/// Lowest priority: while every CPU is busy with I/O, events are dropped rather than requests delayed.
const NICE: i32 = 19;
/// Longest wait for the client to read the rest of a trace that has ended; at the lowest priority it may take
/// a while.
const LINGER: Duration = Duration::from_secs(5);

impl Host {
    /// Starts a trace of a device. Returns its stream of frames.
    ///
    /// # Errors
    /// There is no such device, it has a trace, or the options are malformed.
    pub fn start_trace(
        self: &Arc<Self>,
        name: &str,
        options: TraceOptions,
    ) -> Result<Receiver<Vec<u8>>, ControlError> {
        let device = self.device(name).ok_or(ControlError::NotFound)?;
        let session = Arc::new(TraceSession::new(options).map_err(refused)?);
        if !device.begin_trace(&session) {
            return Err(refused(TraceError::Traced));
        }
        let (sender, receiver) = channel(CHUNKS);
        let drain = Drain::new(self.clone(), &device, session, sender);
        let thread = std::thread::Builder::new().name(format!("trace-{name}"));
        let started = thread.spawn(move || drain.run());
        match started {
            Ok(_) => Ok(receiver),
            Err(why) => {
                device.end_trace();
                Err(refused(TraceError::Thread(why)))
            }
        }
    }
}

fn refused(error: TraceError) -> ControlError {
    match error {
        TraceError::Traced => ControlError::Busy(error.to_string()),
        other => ControlError::Failed(other.to_string()),
    }
}

/// The draining thread of a session.
struct Drain {
    host: Arc<Host>,
    /// Weak, as a device that is removed is closed although it is traced.
    device: Weak<Device>,
    session: Arc<TraceSession>,
    sender: Sender<Vec<u8>>,
    /// When the trace is to end by itself.
    end: Option<Instant>,
    chunk: Vec<u8>,
    /// By buffer: number of dropped events at the last pass.
    dropped: Vec<u64>,
    /// Numbers of the sessions whose commands were recorded: their names were sent if they still existed.
    sessions: HashSet<u16>,
}

/// The client has disconnected.
struct ClientGone;

impl Drain {
    fn new(
        host: Arc<Host>,
        device: &Arc<Device>,
        session: Arc<TraceSession>,
        sender: Sender<Vec<u8>>,
    ) -> Drain {
        let device = Arc::downgrade(device);
        Drain {
            host,
            device,
            session,
            sender,
            end: None,
            chunk: Vec::new(),
            dropped: Vec::new(),
            sessions: HashSet::new(),
        }
    }

    fn run(mut self) {
        // If the priority cannot be set, the thread runs with the present one.
        let _ = rustix::process::setpriority_process(Some(rustix::thread::gettid()), NICE);
        let result = self.drain_until_end();
        if let Some(device) = self.device.upgrade() {
            device.end_trace();
        }
        self.refresh_queues();
        // The records since the last pass.
        if result.and_then(|()| self.drain_once()).is_ok() {
            Frame::Closed.encode(&mut self.chunk);
            let _ = self.send();
        }
    }

    /// Has the reactors install probes on the device's queues, or remove them after the trace has ended.
    /// Returns when that is done.
    fn refresh_queues(&self) {
        let Some(device) = self.device.upgrade() else { return };
        loop {
            let listening: Vec<_> =
                self.host.reactors().iter().map(|reactor| reactor.refresh(device.clone())).collect();
            for done in listening {
                // A reactor that has ended has no queue of it.
                let _ = done.blocking_recv();
            }
            if !self.allocate_buffers() {
                return;
            }
        }
    }

    fn allocate_buffers(&self) -> bool {
        self.session.allocate_buffers(self.host.reactors().len())
    }

    /// Returns whether the trace has ended: no further events are recorded.
    fn is_over(&self) -> bool {
        self.session.ending.load(SeqCst)
            || self.device.strong_count() == 0
            || self.end.is_some_and(|end| Instant::now() >= end)
    }

    fn drain_until_end(&mut self) -> Result<(), ClientGone> {
        let wall = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let device = self.device.upgrade().ok_or(ClientGone)?;
        let (nodes, labels) = (device.nodes(), device.labels());
        let node = |(number, label): (usize, &String)| {
            let (depth, name) = nodes[number];
            let backend = nodes.get(number + 1).is_none_or(|next| next.0 <= depth);
            Node { name: format!("{name} {label}").trim_end().to_owned(), backend }
        };
        let opened = Opened {
            nodes: labels.iter().enumerate().take(nodes.len()).map(node).collect(),
            device: device.name().to_string(),
            number: device.number() as u32,
            clock_ns: ring::clock().0,
            wall: (wall.as_secs(), wall.subsec_nanos()),
        };
        Frame::Opened(opened).encode(&mut self.chunk);
        drop(device);
        self.allocate_buffers();
        self.refresh_queues();
        // From here on every event is recorded: a client that waits for the first chunk may start its load.
        self.send()?;
        let seconds = self.session.options.seconds;
        self.end = seconds.and_then(|s| Instant::now().checked_add(Duration::from_secs_f64(s)));
        let mut pause = PAUSE;
        while !self.is_over() {
            if self.allocate_buffers() {
                self.refresh_queues();
            }
            let some = self.drain_once()?;
            pause = if some { PAUSE } else { (pause * 2).min(PAUSE_MAX) };
            let left = self.end.map_or(pause, |end| end.saturating_duration_since(Instant::now()));
            std::thread::sleep(pause.min(left));
        }
        Ok(())
    }

    /// Drains all buffers once. Returns whether there were records.
    fn drain_once(&mut self) -> Result<bool, ClientGone> {
        let now = ring::clock();
        let queues = lock(&self.session.queues).clone();
        let mut some = false;
        for (number, traced) in queues.iter().enumerate() {
            let queue = number as u32;
            if number >= self.dropped.len() {
                self.dropped.push(0);
                Frame::Queue(queue, traced.info.clone()).encode(&mut self.chunk);
            }
            // At most what the buffer holds: a queue that is faster than this thread must not delay the
            // others.
            let mut left = traced.buffer.records();
            loop {
                let mut records = Vec::with_capacity(RECORDS_MAX.min(left));
                let count = traced.buffer.drain_records(RECORDS_MAX.min(left), |record| records.push(record));
                if count == 0 {
                    break;
                }
                some = true;
                left -= count;
                self.name_sessions(&records);
                Frame::Records(queue, records).encode(&mut self.chunk);
                if self.chunk.len() >= CHUNK_LEN {
                    self.send()?;
                }
            }
            let dropped = traced.buffer.dropped();
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

    /// Sends the names of sessions whose commands are among the records for the first time.
    fn name_sessions(&mut self, records: &[Record]) {
        let new = records.iter().filter_map(trace::command::session_of);
        let new: Vec<u16> = new.filter(|number| self.sessions.insert(*number)).collect();
        if new.is_empty() {
            return;
        }
        let Some(device) = self.device.upgrade() else { return };
        let exports = self.host.exports(&device);
        for session in exports.iter().flat_map(|export| &export.sessions) {
            if new.contains(&session.number) {
                let initiator = session.initiator.clone();
                Frame::Session(SessionName { number: session.number, initiator }).encode(&mut self.chunk);
            }
        }
    }

    fn send(&mut self) -> Result<(), ClientGone> {
        let mut chunk = std::mem::take(&mut self.chunk);
        let mut over_since = None;
        loop {
            chunk = match self.sender.try_send(chunk) {
                Ok(()) => return Ok(()),
                Err(TrySendError::Closed(_)) => return Err(ClientGone),
                Err(TrySendError::Full(chunk)) => chunk,
            };
            // A slow reader may delay the end of a trace, but not for ever.
            if self.is_over() && over_since.get_or_insert_with(Instant::now).elapsed() >= LINGER {
                return Err(ClientGone);
            }
            std::thread::sleep(PAUSE);
        }
    }
}
