//! Timeouts of a device's requests: the limit, the count, and log lines.

use crate::log_limit::{Admission, LogLimit};
use crate::observe::slow::QueueLocation;
use queue::{Nanos, TimedOut};
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

/// Value of `limit_ns` without a timeout.
const OFF: u64 = u64::MAX;
/// A device logs one line per window of this length.
const PAUSE: Duration = Duration::from_secs(1);

/// The timeout of a device's requests.
#[derive(Debug)]
pub struct Timeouts {
    limit_ns: AtomicU64,
    count: AtomicU64,
    lines: LogLimit,
}

impl Timeouts {
    pub(crate) fn new(limit: Option<Duration>) -> Timeouts {
        let (limit_ns, count) = (AtomicU64::new(OFF), AtomicU64::new(0));
        let timeouts = Timeouts { limit_ns, count, lines: LogLimit::new(1, PAUSE) };
        timeouts.set(limit);
        timeouts
    }

    pub(crate) fn set(&self, limit: Option<Duration>) {
        let nanos = limit.map_or(OFF, |limit| u64::try_from(limit.as_nanos()).unwrap_or(OFF));
        self.limit_ns.store(nanos, Relaxed);
    }

    pub(crate) fn limit_ns(&self) -> Option<u64> {
        Some(self.limit_ns.load(Relaxed)).filter(|&nanos| nanos != OFF)
    }

    /// Returns the timeout; `None`: requests may take any time.
    pub fn limit(&self) -> Option<Duration> {
        self.limit_ns().map(Duration::from_nanos)
    }

    /// Returns how many requests have timed out since the device was opened.
    pub(crate) fn count(&self) -> u64 {
        self.count.load(Relaxed)
    }

    /// Describes the timeout, for `show`.
    pub(crate) fn describe(&self) -> String {
        let count = self.count();
        match self.limit() {
            None if count == 0 => "off".to_owned(),
            None => format!("off ({count} timed out before)"),
            Some(limit) => format!("{} ({count} timed out)", crate::spec::format_time(limit)),
        }
    }

    /// Counts timed-out requests of a queue and logs them, at most one line per second and device.
    pub(crate) fn log(&self, at: &QueueLocation<'_>, found: &TimedOut, now: Nanos) {
        self.count.fetch_add(found.count, Relaxed);
        let Admission::Line { left_out } = self.lines.admit(now, found.count) else { return };
        let more = (left_out + found.count).saturating_sub(1);
        let node = at.nodes.get(usize::from(found.node.0)).map_or("?", |node| node.1);
        tracing::warn!(
            device = %at.device,
            reactor = at.reactor,
            queue = at.queue,
            tag = found.tag.0,
            op = found.request.op.name(),
            sector = found.request.offset.0 / 512,
            bytes = found.request.len.0,
            held_by = node,
            age_ms = found.age_ns / 1_000_000,
            more,
            "a request timed out and is being cancelled"
        );
    }
}
