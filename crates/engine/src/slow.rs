//! Slow requests in the log, and requests that are under way.
//!
//! A device with a limit has its queues look for requests that take longer. What they find is said by the reactor that
//! has the queue, at most [`LINES_MAX`] times a second for each device: the log takes a line without waiting. The rest is
//! counted, and the count is said with the next line, or by the control plane once the second is over.

use crate::device::Device;
use crate::host::Host;
use crate::log_limit::{Admission, LogLimit};
use queue::{Nanos, NodeId, Slow, Standing, UnderWay, Visit};
use serde::{Deserialize, Serialize};
use std::fmt::Write;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;
use tokio::sync::Notify;

/// Lines of one device in a second.
const LINES_MAX: u32 = 10;
const SECOND: Duration = Duration::from_secs(1);
/// Requests of one queue that are told of when somebody asks what is under way: all that a host can have there. Pieces of them, which
/// are younger, come behind.
const UNDER_WAY_MAX: usize = 4096;
/// How long a reactor may take to say what is under way on it.
const ANSWER_TIME: Duration = Duration::from_secs(3);
/// No limit.
const OFF: u64 = u64::MAX;

/// Told when something begins to be left out of the log, so that nobody has to look while nothing is.
static LEFT_OUT: Notify = Notify::const_new();

/// What a device says of its slow requests.
#[derive(Debug)]
pub(crate) struct SlowLog {
    limit_ns: AtomicU64,
    lines: LogLimit,
    /// Since the device was opened.
    all: AtomicU64,
}

impl SlowLog {
    pub(crate) fn new(limit: Option<Duration>) -> SlowLog {
        let (lines, all) = (LogLimit::new(LINES_MAX, SECOND), AtomicU64::new(0));
        let log = SlowLog { limit_ns: AtomicU64::new(OFF), lines, all };
        log.set(limit);
        log
    }

    pub(crate) fn set(&self, limit: Option<Duration>) {
        let nanos = limit.map_or(OFF, |limit| u64::try_from(limit.as_nanos()).unwrap_or(OFF));
        self.limit_ns.store(nanos, Relaxed);
    }

    pub(crate) fn limit_ns(&self) -> Option<u64> {
        Some(self.limit_ns.load(Relaxed)).filter(|&nanos| nanos != OFF)
    }

    /// From how long on requests are slow; none: none are.
    pub(crate) fn limit(&self) -> Option<Duration> {
        self.limit_ns().map(Duration::from_nanos)
    }

    /// What `show` says; nothing where there is no limit.
    pub(crate) fn describe(&self) -> Option<String> {
        let limit = crate::spec::format_time(Duration::from_nanos(self.limit_ns()?));
        let all = self.all.load(Relaxed);
        Some(format!("{limit} or longer: {all} so far"))
    }

    /// Whether one more may be said now, and if so how many were not since the last.
    fn admit(&self, now: Nanos, count: u64) -> Option<u64> {
        self.all.fetch_add(count, Relaxed);
        match self.lines.admit(now, count) {
            Admission::Line { left_out } => Some(left_out),
            Admission::LeftOut { is_first } => {
                if is_first {
                    LEFT_OUT.notify_one();
                }
                None
            }
        }
    }
}

/// Milliseconds, to the microsecond.
fn milliseconds(nanos: u64) -> String {
    format!("{}.{:03}", nanos / 1_000_000, nanos / 1_000 % 1_000)
}

/// A node in the words of a log: its name and number.
fn name_of(nodes: &[(u8, &'static str)], node: NodeId) -> String {
    let name = nodes.get(usize::from(node.0)).map_or("?", |(_, name)| *name);
    format!("{name}:{}", node.0)
}

/// `split:0 21.400ms > file:1 21.100ms`: where it rested. What is behind a `>` stands below, and its time is a part of
/// what is before; behind a comma, after it.
fn path(nodes: &[(u8, &'static str)], visits: &[Visit]) -> String {
    let mut text = String::new();
    let mut above = None;
    for visit in visits {
        let between = match above {
            None => "",
            Some(depth) if visit.depth > depth => " > ",
            Some(_) => ", ",
        };
        above = Some(visit.depth);
        let _ = write!(text, "{between}{} {}ms", name_of(nodes, visit.node), milliseconds(visit.ns));
    }
    if text.is_empty() { "in one turn".to_owned() } else { text }
}

/// Say what a queue found; `missed`: how many more.
pub(crate) fn tell(device: &Device, reactor: usize, queue: usize, found: &[Slow], missed: u64, now: Nanos) {
    let nodes = device.nodes();
    for slow in found {
        let Some(suppressed) = device.slow.admit(now, 1) else { continue };
        tracing::warn!(
            device = %device.name(),
            queue,
            reactor,
            tag = slow.tag.0,
            op = slow.req.op.name(),
            sector = slow.req.offset.0 >> 9,
            bytes = slow.req.len.0,
            // A number, to the microsecond.
            total_ms = (slow.total_ns / 1000) as f64 / 1e3,
            path = %path(&nodes, &slow.visits),
            pieces = slow.pieces,
            retries = slow.retries,
            parks = slow.parks,
            errno = slow.status.errno(),
            suppressed,
            "slow request"
        );
    }
    if missed > 0
        && let Some(suppressed) = device.slow.admit(now, missed)
    {
        tell_suppressed(device, suppressed + missed);
    }
}

fn tell_suppressed(device: &Device, suppressed: u64) {
    tracing::warn!(device = %device.name(), suppressed, "slow requests that were not told one by one");
}

/// Say how many slow requests were not said, until the future is dropped.
pub async fn watch(host: Arc<Host>) {
    loop {
        LEFT_OUT.notified().await;
        while host.devices().iter().any(|device| device.slow.lines.has_left_out()) {
            tokio::time::sleep(Duration::from_secs(1)).await;
            for device in host.devices() {
                if let Some(suppressed) = device.slow.lines.overdue(ring::clock()) {
                    tell_suppressed(&device, suppressed);
                }
            }
        }
    }
}

/// A request that is under way.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct InFlight {
    /// Its device.
    pub device: String,
    /// Its hardware queue, as `show` numbers them.
    pub queue: usize,
    /// The reactor that has it.
    pub reactor: usize,
    /// Its tag.
    pub tag: u16,
    /// The tag of the one that it is a piece or a copy of.
    pub parent: Option<u16>,
    /// `read`, `write`, ….
    pub op: String,
    /// Where it begins.
    pub sector: u64,
    /// How long it is.
    pub bytes: u64,
    /// Where it is: a node by name and number; none: before the first.
    pub node: Option<String>,
    /// `held`, `parked` (there was no room, it is offered again) or `waiting` (for the device to go on).
    pub state: String,
    /// For how long it has been under way, in nanoseconds.
    pub age_ns: u64,
}

/// What is under way of a device.
#[derive(Clone, Default, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct InFlightList {
    /// Oldest first of each queue.
    pub requests: Vec<InFlight>,
    /// How many more there are.
    pub more: usize,
    /// Reactors that did not answer: they do not turn.
    pub silent: Vec<usize>,
}

/// What is under way in one queue, as its reactor tells it: in no order, and not in words.
pub(crate) struct OfQueue {
    /// As `show` numbers it.
    pub(crate) queue: usize,
    pub(crate) found: Vec<UnderWay>,
}

impl InFlightList {
    fn add(&mut self, device: &str, nodes: &[(u8, &'static str)], reactor: usize, of_it: OfQueue) {
        let OfQueue { queue, mut found } = of_it;
        found.sort_by_key(|request| std::cmp::Reverse(request.age_ns));
        self.more += found.len().saturating_sub(UNDER_WAY_MAX);
        found.truncate(UNDER_WAY_MAX);
        self.requests.extend(found.into_iter().map(|request| {
            InFlight {
                device: device.to_owned(),
                queue,
                reactor,
                tag: request.tag.0,
                parent: request.parent.map(|parent| parent.0),
                op: request.req.op.name().to_owned(),
                sector: request.req.offset.0 >> 9,
                bytes: request.req.len.0,
                node: request.node.map(|node| name_of(nodes, node)),
                state: match request.standing {
                    Standing::Waiting => "waiting",
                    Standing::Held => "held",
                    Standing::Parked => "parked",
                }
                .to_owned(),
                age_ns: request.age_ns,
            }
        }));
    }
}

impl Host {
    /// What is under way of a device. Takes three seconds at most.
    pub async fn in_flight(&self, device: &Arc<Device>) -> InFlightList {
        let asked: Vec<_> = self.reactors().iter().map(|reactor| reactor.under_way(device.clone())).collect();
        let mut list = InFlightList::default();
        let (name, nodes) = (device.name().to_string(), device.nodes());
        let until = tokio::time::Instant::now() + ANSWER_TIME;
        for (number, answer) in asked.into_iter().enumerate() {
            match tokio::time::timeout_at(until, answer).await {
                Ok(Ok(queues)) => {
                    queues.into_iter().for_each(|of_it| list.add(&name, &nodes, number, of_it));
                }
                // A reactor that is gone has none.
                Ok(Err(_)) => {}
                Err(_) => list.silent.push(number),
            }
        }
        list
    }

    /// Have the queues of a device look for slow requests as it says now.
    pub(crate) async fn refresh_slow(&self, device: &Arc<Device>) {
        let told: Vec<_> = self.reactors().iter().map(|reactor| reactor.listen(device.clone())).collect();
        for done in told {
            // A reactor that is gone has no queue of it.
            let _ = done.await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use block::{Bytes, Op, Request, Tag};

    #[test]
    fn more_lines_than_a_second_has_room_for_are_counted() {
        let log = SlowLog::new(Some(Duration::from_millis(20)));
        assert_eq!(log.limit_ns(), Some(20_000_000));
        let at = |ms: u64| Nanos(10_000_000_000 + ms * 1_000_000);
        let said: Vec<_> = (0..15).map(|_| log.admit(at(0), 1)).collect();
        assert_eq!(said.iter().filter(|one| **one == Some(0)).count(), LINES_MAX as usize);
        assert_eq!(log.lines.overdue(at(500)), None, "the second is not over");
        assert_eq!(log.admit(at(1001), 1), Some(5));
        for _ in 0..12 {
            log.admit(at(1002), 2);
        }
        assert_eq!(log.lines.overdue(at(2500)), Some(6));
        assert_eq!(log.lines.overdue(at(2501)), None);
        assert_eq!(log.describe().as_deref(), Some("20ms or longer: 40 so far"));
        log.set(None);
        assert_eq!((log.limit_ns(), log.describe()), (None, None));
    }

    #[test]
    fn the_oldest_of_each_queue_come_first_and_the_youngest_are_counted() {
        let under_way = |tag: u16| UnderWay {
            tag: Tag(tag),
            parent: (tag == 1).then_some(Tag(7)),
            req: Request::new(Op::Write, Bytes(4096), Bytes(512)),
            standing: Standing::Parked,
            node: Some(NodeId(2)),
            age_ns: tag.into(),
        };
        let mut list = InFlightList::default();
        let found = (0..UNDER_WAY_MAX as u16 + 3).map(under_way).collect();
        list.add("disk", &[(0, "split"), (1, "?"), (2, "file")], 1, OfQueue { queue: 3, found });
        list.add("disk", &[(0, "null")], 0, OfQueue { queue: 0, found: vec![under_way(1)] });
        let (first, last) = (&list.requests[0], &list.requests[UNDER_WAY_MAX]);
        assert_eq!((list.requests.len(), list.more), (UNDER_WAY_MAX + 1, 3));
        assert_eq!((first.age_ns, list.requests[UNDER_WAY_MAX - 1].age_ns), (4098, 3));
        assert_eq!((first.queue, first.reactor, first.node.as_deref()), (3, 1, Some("file:2")));
        assert_eq!((first.op.as_str(), first.sector, first.state.as_str()), ("write", 8, "parked"));
        assert_eq!((last.parent, last.queue, last.node.as_deref()), (Some(7), 0, Some("?:2")));
    }
}
