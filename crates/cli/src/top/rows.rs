//! A device between two snapshots, and the order of devices.

use super::gather::Sample;
use crate::stat::layers::{self, Shown};
use crate::stat::{EachSecond, Rates};
use engine::control::{DeviceInfo, DeviceStats, Latency, OpStats};
use engine::tables::path_status::PathStatus;
use std::cmp::Ordering;
use std::path::PathBuf;

/// Requests of one operation.
#[derive(Clone, Debug)]
pub(super) struct Operation {
    pub(super) name: String,
    /// Requests per second.
    pub(super) ios: f64,
    /// Bytes per second.
    pub(super) bytes: f64,
    /// Latencies of the requests that completed in the interval.
    pub(super) latency: Latency,
}

/// A device in the last interval.
#[derive(Clone, Debug)]
pub(super) struct Row {
    pub(super) info: DeviceInfo,
    pub(super) socket: PathBuf,
    pub(super) rates: EachSecond,
    /// Latencies of all requests that completed in the interval.
    pub(super) latency: Latency,
    /// Operations with any request since the device was added.
    pub(super) operations: Vec<Operation>,
    pub(super) layers: Vec<layers::Row>,
    pub(super) shares: Vec<f64>,
    pub(super) paths: Vec<PathStatus>,
    pub(super) in_flight: u64,
    pub(super) depth: u64,
    /// Failed requests since the device was added, and in the interval.
    pub(super) errors: (u64, u64),
    /// Whether its process did not answer: the values are the last known ones then.
    pub(super) silent: bool,
}

impl Row {
    pub(super) fn new(before: Option<&DeviceStats>, sample: &Sample) -> Row {
        let now = &sample.stats;
        // A device that was removed and added again has counted from 0.
        let before = before.filter(|before| before.uptime_ns < now.uptime_ns);
        let seconds = (now.uptime_ns - before.map_or(0, |before| before.uptime_ns)) as f64 / 1e9;
        let each_second = |now: u64, before: u64| {
            if seconds > 0.0 { now.saturating_sub(before) as f64 / seconds } else { 0.0 }
        };
        let none = OpStats::default();
        let operation = |(name, op): (&String, &OpStats)| {
            let earlier = before.and_then(|before| before.operations.get(name)).unwrap_or(&none);
            Operation {
                name: name.clone(),
                ios: each_second(op.ios, earlier.ios),
                bytes: each_second(op.bytes, earlier.bytes),
                latency: op.latency.since(&earlier.latency),
            }
        };
        let happened = now.operations.iter().filter(|(_, op)| op.ios > 0);
        let operations: Vec<Operation> = happened.map(operation).collect();
        let layers = layers::rows(before, now, Shown::Layers);
        Row {
            info: sample.info.clone(),
            socket: sample.socket.clone(),
            rates: Rates::new(before, now).each_second(),
            latency: Latency::sum(operations.iter().map(|operation| &operation.latency)),
            operations,
            shares: layers::shares(&layers),
            layers,
            paths: sample.paths.clone(),
            in_flight: now.in_flight,
            depth: sample.info.queues.iter().map(|queue| u64::from(queue.depth)).sum(),
            errors: (now.errors, now.errors.saturating_sub(before.map_or(0, |before| before.errors))),
            silent: false,
        }
    }

    pub(super) fn iops(&self) -> f64 {
        self.rates.reads + self.rates.writes + self.rates.discards + self.rates.flushes
    }

    /// Returns a percentile; `None`: no request completed.
    pub(super) fn percentile(&self, of: fn(&Latency) -> u64) -> Option<u64> {
        (self.latency.count() > 0).then(|| of(&self.latency))
    }

    /// Whether name, stack or layers contain `text`, which is in lower case.
    pub(super) fn matches(&self, text: &str) -> bool {
        let info = &self.info;
        let mut texts = [&info.name, &info.stack].into_iter().chain(&info.layers);
        texts.any(|own| own.to_lowercase().contains(text))
    }

    /// Returns the number of active paths.
    pub(super) fn paths_up(&self) -> usize {
        self.paths.iter().filter(|path| path.works).count()
    }
}

/// Values of one interval, for sparklines.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) struct Past {
    pub(super) iops: f64,
    pub(super) read_bytes: f64,
    pub(super) written_bytes: f64,
    pub(super) p99_ns: f64,
}

impl Past {
    /// The values of a device in the last interval.
    pub(super) fn of(row: &Row) -> Past {
        Past {
            iops: row.iops(),
            read_bytes: row.rates.read_bytes,
            written_bytes: row.rates.written_bytes,
            p99_ns: row.percentile(|latency| latency.p99_ns).unwrap_or(0) as f64,
        }
    }
}

/// Order of devices: the largest value first, names from A on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Sort {
    Name,
    Iops,
    Bandwidth,
    Latency,
    Queue,
    Busy,
    Errors,
}

impl Sort {
    /// Every order with its key and its name, as the last lines of the screen list them.
    pub(super) const KEYS: [(&'static str, &'static str, Sort); 7] = [
        ("i", "IOPS", Sort::Iops),
        ("b", "bytes", Sort::Bandwidth),
        ("l", "latency", Sort::Latency),
        ("d", "queue", Sort::Queue),
        ("u", "busy", Sort::Busy),
        ("e", "errors", Sort::Errors),
        ("n", "name", Sort::Name),
    ];

    /// Returns the title of the column that it sorts by.
    pub(super) fn title(self) -> &'static str {
        match self {
            Sort::Name => "DEVICE",
            Sort::Iops => "IOPS",
            Sort::Bandwidth => "READ/s",
            Sort::Latency => "p99",
            Sort::Queue => "QUEUE",
            Sort::Busy => "BUSY%",
            Sort::Errors => "ERRORS",
        }
    }

    fn key(self, row: &Row) -> f64 {
        match self {
            Sort::Name => 0.0,
            Sort::Iops => row.iops(),
            Sort::Bandwidth => row.rates.read_bytes + row.rates.written_bytes,
            Sort::Latency => row.latency.p99_ns as f64,
            Sort::Queue => row.in_flight as f64,
            Sort::Busy => row.rates.busy_percent,
            Sort::Errors => row.errors.0 as f64,
        }
    }

    /// Sorts rows.
    pub(super) fn order(self, rows: &mut [Row], reversed: bool) {
        rows.sort_by(|a, b| {
            let most_first = self.key(b).total_cmp(&self.key(a));
            let order = most_first.then_with(|| match self {
                Sort::Name => a.info.name.cmp(&b.info.name),
                _ => Ordering::Equal,
            });
            let order = if reversed { order.reverse() } else { order };
            order.then_with(|| a.info.name.cmp(&b.info.name))
        });
    }
}
