//! Slow requests in the log.
//!
//! The queues of a device with a limit collect requests that take longer. The reactor of the queue logs them,
//! at most [`LINES_MAX`] per second and device; the log accepts a line without blocking. Requests beyond that
//! are counted, and the count is logged with the next line, or by the control plane when the second is over.

use crate::log_limit::{Admission, LogLimit};
use crate::spec::DeviceName;
use queue::{InFlight, Nanos, NodeId, Slow, Visit};
use std::fmt::Write;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;
use tokio::sync::Notify;

/// Lines per device and second.
const LINES_MAX: u32 = 10;
const SECOND: Duration = Duration::from_secs(1);
/// Value of `limit_ns` without a limit.
const OFF: u64 = u64::MAX;

/// Notified when the first slow request is left out of the log, so that nobody polls while there is none.
pub(crate) static LEFT_OUT: Notify = Notify::const_new();

/// The limit for slow requests of a device, and what was logged.
#[derive(Debug)]
pub struct SlowLog {
    limit_ns: AtomicU64,
    lines: LogLimit,
    /// Slow requests since the device was opened.
    count: AtomicU64,
}

impl SlowLog {
    pub(crate) fn new(limit: Option<Duration>) -> SlowLog {
        let (lines, count) = (LogLimit::new(LINES_MAX, SECOND), AtomicU64::new(0));
        let log = SlowLog { limit_ns: AtomicU64::new(OFF), lines, count };
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

    /// Returns the limit; `None`: no request is slow.
    pub fn limit(&self) -> Option<Duration> {
        self.limit_ns().map(Duration::from_nanos)
    }

    /// Describes the limit, for `show`; `None` without one.
    pub(crate) fn describe(&self) -> Option<String> {
        let limit = crate::spec::format_time(Duration::from_nanos(self.limit_ns()?));
        let count = self.count.load(Relaxed);
        Some(format!("{limit} or longer: {count} so far"))
    }

    /// Requests a line about `count` slow requests. Returns how many were left out since the last line;
    /// `None`: no line.
    fn admit(&self, now: Nanos, count: u64) -> Option<u64> {
        self.count.fetch_add(count, Relaxed);
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

/// Formats nanoseconds as milliseconds with three decimals.
fn milliseconds(nanos: u64) -> String {
    format!("{}.{:03}", nanos / 1_000_000, nanos / 1_000 % 1_000)
}

/// Formats a node for the log: its name and number.
pub(crate) fn name_of(nodes: &[(u8, &'static str)], node: NodeId) -> String {
    let name = nodes.get(usize::from(node.0)).map_or("?", |(_, name)| *name);
    format!("{name}:{}", node.0)
}

/// Formats where a request was held: `split:0 21.400ms > file:1 21.100ms`. A node after `>` is below the one
/// before, whose time includes its own; a node after a comma came later.
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
    if text.is_empty() { "within one turn".to_owned() } else { text }
}

/// The queue of slow requests.
pub(crate) struct QueueLocation<'a> {
    /// Name of the device.
    pub(crate) device: &'a DeviceName,
    /// Nodes of the device, by number: depth and name.
    pub(crate) nodes: &'a [(u8, &'static str)],
    pub(crate) reactor: usize,
    pub(crate) queue: usize,
}

impl SlowLog {
    /// Logs slow requests of a queue; `missed`: how many more there were.
    pub(crate) fn log(&self, at: &QueueLocation<'_>, found: &[Slow], missed: u64, now: Nanos) {
        for slow in found {
            let Some(suppressed) = self.admit(now, 1) else { continue };
            tracing::warn!(
                device = %at.device,
                queue = at.queue,
                reactor = at.reactor,
                tag = slow.tag.0,
                op = slow.req.op.name(),
                sector = slow.req.offset.0 >> 9,
                bytes = slow.req.len.0,
                // A number with microsecond resolution.
                total_ms = (slow.total_ns / 1000) as f64 / 1e3,
                path = %path(at.nodes, &slow.visits),
                pieces = slow.pieces,
                retries = slow.retries,
                parks = slow.parks,
                errno = slow.status.errno(),
                suppressed,
                "slow request"
            );
        }
        if missed > 0
            && let Some(suppressed) = self.admit(now, missed)
        {
            log_suppressed(at.device, suppressed + missed);
        }
    }

    /// Returns whether requests were left out since the last line.
    pub(crate) fn has_left_out(&self) -> bool {
        self.lines.has_left_out()
    }

    /// Returns how many were left out, once the second is over.
    pub(crate) fn overdue(&self, now: Nanos) -> Option<u64> {
        self.lines.overdue(now)
    }
}

pub(crate) fn log_suppressed(device: &DeviceName, suppressed: u64) {
    tracing::warn!(device = %device, suppressed, "slow requests were left out of the log");
}

/// Requests in flight of one queue, in no order; formatted elsewhere, as the reactor must not spend time on
/// it.
pub(crate) struct QueueRequests {
    /// Number of the queue, as in `show`.
    pub(crate) queue: usize,
    pub(crate) found: Vec<InFlight>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_beyond_the_limit_are_counted() {
        let log = SlowLog::new(Some(Duration::from_millis(20)));
        assert_eq!(log.limit_ns(), Some(20_000_000));
        let at = |ms: u64| Nanos(10_000_000_000 + ms * 1_000_000);
        let admitted: Vec<_> = (0..15).map(|_| log.admit(at(0), 1)).collect();
        assert_eq!(admitted.iter().filter(|one| **one == Some(0)).count(), LINES_MAX as usize);
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
}
