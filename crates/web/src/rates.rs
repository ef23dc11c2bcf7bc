//! Samples for charts: the difference between two states of a device's counters.

use engine::control::{DeviceStats, OpStats};
use serde::Serialize;
use std::collections::BTreeMap;

/// Percentiles that are shown.
const PERCENTILES: [f64; 4] = [0.5, 0.9, 0.99, 0.999];
/// Rows of the heat map for every doubling of the latency.
const ROWS_LOG: u32 = 2;
/// The lowest row begins at 2^10 ns, a microsecond, and includes faster requests.
const ROW_FIRST_LOG: u32 = 10;
/// Number of rows: the last one begins below 2^34 ns, 17 seconds.
const ROWS: u32 = (34 - ROW_FIRST_LOG) << ROWS_LOG;

/// Operations that count as writes, as in the kernel; those of [`OTHERS`] count as `other`.
const WRITES: [&str; 3] = ["write", "write-zeroes", "zone-append"];
const OTHERS: [&str; 3] = ["discard", "flush", "prefetch"];

/// Operations of one kind in one interval.
#[derive(Clone, Default, PartialEq, Debug, Serialize)]
pub(crate) struct Rate {
    /// Requests a second.
    pub(crate) ios: f64,
    /// Bytes a second.
    pub(crate) bytes: f64,
    /// Average latency, in nanoseconds.
    pub(crate) wait: f64,
    /// Percentiles of the latency ([`PERCENTILES`]), in nanoseconds; 0 without requests.
    pub(crate) p: [u64; 4],
}

/// Activity of a device in one interval.
#[derive(Clone, Default, PartialEq, Debug, Serialize)]
pub(crate) struct Sample {
    /// End of the interval: milliseconds since 1970.
    pub(crate) t: u64,
    pub(crate) read: Rate,
    pub(crate) write: Rate,
    pub(crate) other: Rate,
    /// Percentiles of all operations together, as [`Rate::p`].
    pub(crate) p: [u64; 4],
    /// Requests in flight, on average over the interval.
    pub(crate) depth: f64,
    /// Requests in flight at the end of the interval.
    pub(crate) now: u64,
    /// Failed requests per second.
    pub(crate) errors: f64,
    /// Part of the interval with requests in flight, from 0 to 1.
    pub(crate) busy: f64,
    /// Heat map: rows with requests, and the number of requests in each.
    pub(crate) heat: Vec<(u32, u64)>,
}

/// Histogram of latencies: lower bound of each bucket, and count.
type Latencies = BTreeMap<u64, u64>;

/// Adds the difference between two states of a histogram to another one.
fn between(before: Option<&OpStats>, after: &OpStats, into: &mut Latencies) {
    let empty = Vec::new();
    let before = before.map_or(&empty, |op| &op.latency.buckets);
    for (floor, count) in &after.latency.buckets {
        let was = before.binary_search_by_key(floor, |bucket| bucket.0).map_or(0, |place| before[place].1);
        if *count > was {
            *into.entry(*floor).or_default() += count - was;
        }
    }
}

/// Returns [`PERCENTILES`] of a histogram, in nanoseconds. Each is the middle of a bucket; a doubling of the
/// latency has sixteen buckets.
fn percentiles(latencies: &Latencies) -> [u64; 4] {
    let total: u64 = latencies.values().sum();
    PERCENTILES.map(|fraction| {
        let rank = (total as f64 * fraction).ceil() as u64;
        let mut seen = 0;
        let reached = latencies.iter().find(|(_, count)| {
            seen += *count;
            seen >= rank.max(1)
        });
        reached.map_or(0, |(floor, _)| floor + floor / 32)
    })
}

/// Returns the row of the heat map for a latency in nanoseconds.
fn row(floor: u64) -> u32 {
    let log = floor.max(1).ilog2();
    if log < ROW_FIRST_LOG {
        return 0;
    }
    let within = (floor >> (log - ROWS_LOG)) as u32 & ((1 << ROWS_LOG) - 1);
    (((log - ROW_FIRST_LOG) << ROWS_LOG) + within).min(ROWS - 1)
}

fn grouped(
    before: &DeviceStats,
    after: &DeviceStats,
    names: &[&str],
    seconds: f64,
    all: &mut Latencies,
) -> Rate {
    let (mut ios, mut bytes, mut ticks_ns, mut latencies) = (0, 0, 0, Latencies::new());
    for name in names {
        let Some(op) = after.operations.get(*name) else { continue };
        let was = before.operations.get(*name);
        let since = |value: fn(&OpStats) -> u64| value(op).saturating_sub(was.map_or(0, value));
        ios += since(|op| op.ios);
        bytes += since(|op| op.bytes);
        ticks_ns += since(|op| op.ticks_ns);
        between(was, op, &mut latencies);
    }
    let p = percentiles(&latencies);
    for (floor, count) in latencies {
        *all.entry(floor).or_default() += count;
    }
    let wait = if ios > 0 { ticks_ns as f64 / ios as f64 } else { 0.0 };
    Rate { ios: ios as f64 / seconds, bytes: bytes as f64 / seconds, wait, p }
}

impl Sample {
    /// Returns the activity from `before` to `after`, which ended at `t` (milliseconds since 1970).
    pub(crate) fn between(before: &DeviceStats, after: &DeviceStats, t: u64) -> Sample {
        let interval_ns = after.uptime_ns.saturating_sub(before.uptime_ns).max(1);
        let seconds = interval_ns as f64 / 1e9;
        let mut all = Latencies::new();
        let read = grouped(before, after, &["read"], seconds, &mut all);
        let write = grouped(before, after, &WRITES, seconds, &mut all);
        let other = grouped(before, after, &OTHERS, seconds, &mut all);
        let mut heat = BTreeMap::<u32, u64>::new();
        for (floor, count) in &all {
            *heat.entry(row(*floor)).or_default() += count;
        }
        // The top node has each request from its start to its end.
        let inside = |stats: &DeviceStats| stats.layers.first().map_or(0, |layer| layer.ticks_ns);
        Sample {
            t,
            p: percentiles(&all),
            depth: inside(after).saturating_sub(inside(before)) as f64 / interval_ns as f64,
            now: after.in_flight,
            errors: after.errors.saturating_sub(before.errors) as f64 / seconds,
            busy: (after.busy_ns.saturating_sub(before.busy_ns) as f64 / interval_ns as f64).min(1.0),
            heat: heat.into_iter().collect(),
            read,
            write,
            other,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use engine::control::Latency;

    fn op(ios: u64, bytes: u64, ticks_ns: u64, buckets: &[(u64, u64)]) -> OpStats {
        let latency = Latency { buckets: buckets.to_vec(), ..Latency::default() };
        OpStats { ios, bytes, ticks_ns, latency, ..OpStats::default() }
    }

    fn stats(uptime_ns: u64, ops: &[(&str, OpStats)]) -> DeviceStats {
        DeviceStats {
            name: "disk".into(),
            uptime_ns,
            stat: [0; 17],
            errors: 0,
            in_flight: 3,
            busy_ns: uptime_ns / 2,
            operations: ops.iter().map(|(name, op)| ((*name).to_owned(), op.clone())).collect(),
            queues: Vec::new(),
            layers: Vec::new(),
        }
    }

    #[test]
    fn rates_and_percentiles_are_of_the_interval() {
        let before = stats(1_000_000_000, &[("read", op(100, 409_600, 1_000_000, &[(1024, 100)]))]);
        let buckets = [(1024, 100), (4096, 99), (1 << 20, 1)];
        let reads = op(200, 819_200, 3_000_000, &buckets);
        let after =
            stats(3_000_000_000, &[("read", reads), ("write-zeroes", op(8, 512, 8000, &[(1000, 8)]))]);
        let sample = Sample::between(&before, &after, 7);
        assert_eq!((sample.read.ios, sample.read.bytes, sample.read.wait), (50.0, 204_800.0, 20_000.0));
        assert_eq!(sample.read.p, [4224, 4224, 4224, (1 << 20) + (1 << 15)]);
        assert_eq!((sample.write.ios, sample.write.p[0]), (4.0, 1031));
        assert_eq!((sample.busy, sample.now, sample.t), (0.5, 3, 7));
        assert_eq!(sample.heat, [(0, 8), (8, 99), (40, 1)]);
    }

    #[test]
    fn a_device_that_was_added_again_has_no_negative_rates() {
        let before = stats(9_000_000_000, &[("read", op(100, 1, 1, &[(1024, 100)]))]);
        let after = stats(1_000_000, &[("read", op(1, 1, 1, &[(1024, 1)]))]);
        let sample = Sample::between(&before, &after, 0);
        assert_eq!((sample.read.ios, sample.errors, sample.busy), (0.0, 0.0, 0.0));
    }

    #[test]
    fn rows_are_quarters_of_a_doubling_and_the_last_one_includes_all_above() {
        assert_eq!([0, 1, 1023, 1024, 1279, 1280, 2048].map(row), [0, 0, 0, 0, 0, 1, 4]);
        assert_eq!(row(u64::MAX), ROWS - 1);
    }
}
