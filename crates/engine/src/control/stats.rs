//! Statistics of a device, as the control API returns them.

use super::Counted;
use block::Op;
use queue::{OpCounts, Snapshot};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// The seventeen fields of `/sys/block/X/stat`, in the kernel's order and units (sectors, milliseconds).
pub type QueueFields = [u64; 17];

/// Statistics of a device since it was added.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct DeviceStats {
    /// Name of the device.
    pub name: String,
    /// Time since it was added, in nanoseconds.
    pub uptime_ns: u64,
    /// The kernel's `stat` fields.
    pub stat: QueueFields,
    /// Requests completed with an error.
    pub errors: u64,
    /// Requests in flight now.
    pub in_flight: u64,
    /// Time with at least one request in flight, in nanoseconds.
    pub busy_ns: u64,
    /// By operation, under its name: `read`, `write`, `flush`, `discard`, `write-zeroes`, ….
    pub operations: BTreeMap<String, OpStats>,
    /// The kernel's fields of each hardware queue.
    pub queues: Vec<QueueFields>,
    /// By node of the stack, from the top down; several backends are the ends of several paths.
    #[serde(default)]
    pub layers: Vec<LayerStats>,
}

/// Statistics of a node. The clock is read once per turn of a queue's thread, so CPU time of a node does not
/// count here, but time for which it holds requests does.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct LayerStats {
    /// Node number.
    pub node: u8,
    /// Depth, from 0.
    pub depth: u8,
    /// Name: `split`, `file`, ….
    pub name: String,
    /// The path, URI or size of a backend, with its role under an overlay (`origin`, `overlay`); empty if not
    /// known.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub label: String,
    /// Whether it has no children.
    pub backend: bool,
    /// Requests completed by the node.
    pub ios: u64,
    /// Time that these requests, and those in flight, spent in the node and below, in nanoseconds.
    pub ticks_ns: u64,
    /// Requests in flight in the node and below.
    pub in_flight: u64,
}

/// Statistics of one operation.
#[derive(Clone, Default, PartialEq, Debug, Serialize, Deserialize)]
pub struct OpStats {
    /// Requests completed, with an error or without.
    pub ios: u64,
    /// Requests merged into these.
    pub merges: u64,
    /// Bytes requested.
    pub bytes: u64,
    /// Sum of the latencies, in nanoseconds.
    pub ticks_ns: u64,
    /// Distribution of the latencies.
    pub latency: Latency,
    /// Distribution of the lengths: upper bound in bytes, and count, of each size that occurred.
    #[serde(default)]
    pub sizes: Vec<(u64, u64)>,
}

/// Distribution of latencies in nanoseconds, to within 6.25 %.
#[derive(Clone, Default, PartialEq, Debug, Serialize, Deserialize)]
pub struct Latency {
    /// Median.
    pub p50_ns: u64,
    /// 90th percentile.
    pub p90_ns: u64,
    /// 99th percentile.
    pub p99_ns: u64,
    /// 99.9th percentile.
    pub p999_ns: u64,
    /// Maximum.
    pub max_ns: u64,
    /// Histogram: lower bound and count of each non-empty bucket.
    pub buckets: Vec<(u64, u64)>,
}

impl OpStats {
    fn new(counts: &OpCounts) -> OpStats {
        OpStats {
            ios: counts.ios,
            merges: counts.merges,
            bytes: counts.bytes,
            ticks_ns: counts.ticks_ns,
            latency: Latency::of(&counts.latency),
            sizes: sizes(counts).collect(),
        }
    }
}

impl Latency {
    fn of(counts: &queue::Counts) -> Latency {
        let quantile = |fraction| counts.quantile(fraction);
        Latency {
            p50_ns: quantile(0.5),
            p90_ns: quantile(0.9),
            p99_ns: quantile(0.99),
            p999_ns: quantile(0.999),
            max_ns: quantile(1.0),
            buckets: counts.buckets().collect(),
        }
    }

    /// Returns the distribution of the latencies counted since `earlier`.
    pub fn since(&self, earlier: &Latency) -> Latency {
        let before: BTreeMap<u64, u64> = earlier.buckets.iter().copied().collect();
        let added = |&(floor, count): &(u64, u64)| {
            (floor, count.saturating_sub(before.get(&floor).copied().unwrap_or(0)))
        };
        Latency::of(&self.buckets.iter().map(added).collect())
    }

    /// Returns the sum of several distributions.
    pub fn sum<'a>(parts: impl IntoIterator<Item = &'a Latency>) -> Latency {
        Latency::of(&parts.into_iter().flat_map(|part| part.buckets.iter().copied()).collect())
    }

    /// Returns the number of latencies.
    pub fn count(&self) -> u64 {
        self.buckets.iter().map(|bucket| bucket.1).sum()
    }
}

/// Returns the children of the node at `at`, where `depths` are those of the nodes of a stack in order: those
/// one deeper, up to the next node that is no deeper.
pub fn children(depths: &[u8], at: usize) -> impl Iterator<Item = usize> + '_ {
    let depth = depths[at];
    let below = (at + 1..depths.len()).take_while(move |&other| depths[other] > depth);
    below.filter(move |&other| depths[other] == depth + 1)
}

/// Subtracts from the time that requests `spent` in each node and below the time below. Children of one
/// request run in parallel, so the times below a split may exceed its own; then the result is 0.
pub fn own_times(depths: &[u8], spent: &[f64]) -> Vec<f64> {
    let below = |at| children(depths, at).map(|child| spent[child]).sum::<f64>();
    (0..spent.len()).map(|at| (spent[at] - below(at)).max(0.0)).collect()
}

/// Returns the sizes that occurred: upper bound in bytes, and count.
pub(super) fn sizes(counts: &OpCounts) -> impl Iterator<Item = (u64, u64)> {
    let places = counts.sizes.iter().enumerate().filter(|(_, count)| **count > 0);
    places.map(|(place, count)| (512u64.checked_shl(place as u32).unwrap_or(u64::MAX), *count))
}

impl DeviceStats {
    /// Computes the statistics from counters.
    pub fn new(name: &str, counted: &Counted) -> DeviceStats {
        let total = counted.total();
        let operations = Op::ALL.iter().zip(&total.ops);
        DeviceStats {
            name: name.to_owned(),
            uptime_ns: u64::try_from(counted.uptime.as_nanos()).unwrap_or(u64::MAX),
            stat: total.fields(),
            errors: total.errors,
            in_flight: total.in_flight,
            busy_ns: total.busy_ns,
            operations: operations.map(|(op, counts)| (op.name().to_owned(), OpStats::new(counts))).collect(),
            queues: counted.queues.iter().map(Snapshot::fields).collect(),
            layers: layers(counted, &total),
        }
    }
}

fn layers(counted: &Counted, total: &Snapshot) -> Vec<LayerStats> {
    // Only the first nodes have counters of their own; others are left out.
    let nodes = counted.nodes.iter().zip(&total.nodes).enumerate();
    nodes
        .map(|(number, ((depth, name), counts))| LayerStats {
            node: number as u8,
            depth: *depth,
            name: (*name).to_owned(),
            label: counted.labels.get(number).cloned().unwrap_or_default(),
            backend: counted.nodes.get(number + 1).is_none_or(|next| next.0 <= *depth),
            ios: counts.ios,
            ticks_ns: counts.ticks_ns,
            in_flight: counts.in_flight,
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn latencies_since_an_earlier_snapshot_are_the_difference() {
        let of = |buckets: &[(u64, u64)]| Latency::of(&buckets.iter().copied().collect());
        let (before, now) = (of(&[(1024, 100)]), of(&[(1024, 100), (4096, 9), (1 << 20, 1)]));
        let since = now.since(&before);
        assert_eq!((since.count(), since.buckets.len()), (10, 2));
        assert!((4096..4352).contains(&since.p50_ns) && since.p999_ns >= 1 << 20, "{since:?}");
        assert_eq!(now.since(&now), Latency::default());
        assert_eq!(Latency::sum([&before, &since]), now);
    }
}
