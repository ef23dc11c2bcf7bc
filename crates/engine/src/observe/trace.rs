//! A trace of a device: its options, its filter, and the buffers that its hardware queues write to.
//!
//! A device has one trace session at a time, as with blktrace. Each hardware queue has a buffer of fixed
//! size. The control plane drains the buffers.
//!
//! *Invariant:* a queue has at most `buffer` bytes of undrained records.

use block::Bytes;
use queue::{Nanos, QueueId};
use serde::{Deserialize, Serialize};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use trace::wire::TracedQueueInfo;
use trace::{Filter, FilterText, NodeRole, TraceBuffer, Tracer, TracerConfig};

/// Default size of a buffer: 32,768 events, a hundredth of a second at three million events a second.
const BUFFER: u64 = 1 << 20;
const BUFFER_MAX: u64 = 64 << 20;

/// Options of a trace.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TraceOptions {
    /// Which events are recorded.
    pub filter: FilterText,
    /// Also record queue events of the children of split requests.
    pub queue_children: bool,
    /// Timestamp all events of one reactor turn alike: cheaper, and coarser.
    pub coarse: bool,
    /// Size of each queue's buffer in bytes.
    pub buffer: Option<u64>,
    /// End after this many seconds.
    pub seconds: Option<f64>,
}

/// A change of a running trace.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TraceChange {
    /// Stop recording.
    Stop,
    /// Resume recording.
    Start,
    /// End the trace; its reader still gets what was recorded.
    End,
    /// Replace the filter.
    Filter(FilterText),
}

/// Why a device cannot be traced, or its trace not changed.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// The device has a trace.
    #[error("it is being traced already (blockyard trace NAME end ends that)")]
    Traced,
    /// The device has no trace.
    #[error("it is not being traced (blockyard trace NAME)")]
    NotTraced,
    /// The filter is malformed.
    #[error(transparent)]
    Filter(#[from] trace::FilterError),
    /// The filter asks for an event that this trace does not record.
    #[error("only a Chrome trace records \"done\" (use complete)")]
    NoEnds,
    /// The buffer size is out of range.
    #[error("the buffer size {0} is out of range (4K to {max})", max = Bytes(BUFFER_MAX))]
    Buffer(Bytes),
    /// The duration is out of range.
    #[error("the duration is out of range (give a positive number of seconds)")]
    Seconds,
    /// The draining thread could not be started.
    #[error("the trace's thread could not be started: {0}")]
    Thread(std::io::Error),
}

/// A running trace.
pub(crate) struct TraceSession {
    pub(crate) options: TraceOptions,
    pub(crate) filter: Arc<Filter>,
    /// Whether ends of requests are recorded under any filter.
    pub(crate) ends: bool,
    pub(crate) buffer: usize,
    /// The queues that are traced; the position is the number in the stream.
    pub(crate) queues: Mutex<Vec<TracedQueue>>,
    /// Buffers for queues that are added.
    pub(crate) spare: Mutex<Vec<Arc<TraceBuffer>>>,
    /// Number of queues without a buffer, which are traced once there are more buffers.
    pub(crate) queues_without_buffer: AtomicUsize,
    pub(crate) ending: AtomicBool,
}

/// A traced queue.
#[derive(Clone)]
pub(crate) struct TracedQueue {
    pub(crate) reactor: usize,
    pub(crate) queue: QueueId,
    pub(crate) info: TracedQueueInfo,
    pub(crate) buffer: Arc<TraceBuffer>,
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl TraceSession {
    pub(crate) fn new(options: TraceOptions) -> Result<TraceSession, TraceError> {
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
        let (queues, spare) = (Mutex::default(), Mutex::default());
        let (queues_without_buffer, ending) = (AtomicUsize::new(0), AtomicBool::new(false));
        Ok(TraceSession {
            options,
            filter,
            ends,
            buffer: buffer as usize,
            queues,
            spare,
            queues_without_buffer,
            ending,
        })
    }

    /// Returns the probe of a queue. A queue that was traced before keeps its buffer; one for which no buffer
    /// is free is traced once the session's thread has allocated one.
    pub(crate) fn tracer(
        &self,
        reactor: usize,
        tid: i32,
        queue: QueueId,
        depth: u16,
        roles: Vec<NodeRole>,
    ) -> Option<Tracer> {
        let mut queues = lock(&self.queues);
        let known = queues.iter().find(|traced| traced.reactor == reactor && traced.queue == queue);
        let buffer = match known {
            Some(traced) => traced.buffer.clone(),
            None => {
                let Some(buffer) = lock(&self.spare).pop() else {
                    self.queues_without_buffer.fetch_add(1, SeqCst);
                    return None;
                };
                let info = TracedQueueInfo { pid: tid as u32, comm: format!("reactor-{reactor}") };
                queues.push(TracedQueue { reactor, queue, info, buffer: buffer.clone() });
                buffer
            }
        };
        Some(Tracer::new(TracerConfig {
            filter: self.filter.clone(),
            buffer,
            roles,
            depth,
            queue_children: self.options.queue_children,
            clock: (!self.options.coarse).then_some(ring::clock as fn() -> Nanos),
        }))
    }

    /// Allocates buffers for the queues without one, and spare buffers: one per thread, at least one. Returns
    /// whether a queue had no buffer.
    pub(crate) fn allocate_buffers(&self, threads: usize) -> bool {
        let queues_without_buffer = self.queues_without_buffer.swap(0, SeqCst);
        let wanted = threads.saturating_sub(lock(&self.queues).len()).max(queues_without_buffer).max(1);
        while lock(&self.spare).len() < wanted {
            let buffer = Arc::new(TraceBuffer::of_size(self.buffer));
            lock(&self.spare).push(buffer);
        }
        queues_without_buffer > 0
    }

    /// Requests the end of the trace.
    pub(crate) fn end(&self) {
        self.ending.store(true, SeqCst);
    }
}

impl TraceSession {
    /// Changes the trace while it runs.
    pub(crate) fn change(&self, change: &TraceChange) -> Result<(), TraceError> {
        let session = self;
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
