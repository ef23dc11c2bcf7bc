//! What a device counted, as it travels.

use super::Counted;
use block::Op;
use queue::{OpCounts, Snapshot};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// The seventeen fields of `/sys/block/X/stat`, in the kernel's order and units (sectors, milliseconds).
pub type QueueFields = [u64; 17];

/// What a device counted since it was added.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct DeviceStats {
    /// Its name.
    pub name: String,
    /// How long that took, in nanoseconds.
    pub uptime_ns: u64,
    /// The kernel's fields.
    pub stat: QueueFields,
    /// Requests that ended with an error.
    pub errors: u64,
    /// Requests in flight now.
    pub in_flight: u64,
    /// Time with at least one request in flight, in nanoseconds.
    pub busy_ns: u64,
    /// By operation, under its name: `read`, `write`, `flush`, `discard`, `write-zeroes`, ….
    pub operations: BTreeMap<String, OpStats>,
    /// The kernel's fields of each hardware queue.
    pub queues: Vec<QueueFields>,
    /// What each node of its stack did, from the top downwards; a backend is a path where there are several.
    #[serde(default)]
    pub layers: Vec<LayerStats>,
}

/// What a node of a device's stack did. Time is looked at once a turn of a queue's thread: what a node does with the
/// processor takes none here, what it waits for does.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct LayerStats {
    /// Its number.
    pub node: u8,
    /// How far down it is, from 0.
    pub depth: u8,
    /// What it is: `split`, `file`, ….
    pub name: String,
    /// Nothing stands below it.
    pub backend: bool,
    /// Requests that it is done with.
    pub ios: u64,
    /// The time that they, and those that are there, spent in it and below, in nanoseconds.
    pub ticks_ns: u64,
    /// Those that are there.
    pub in_flight: u64,
}

/// What was counted for one operation.
#[derive(Clone, Default, PartialEq, Debug, Serialize, Deserialize)]
pub struct OpStats {
    /// Requests ended, with an error or without.
    pub ios: u64,
    /// Requests merged into those.
    pub merges: u64,
    /// Bytes asked for.
    pub bytes: u64,
    /// Sum of the latencies, in nanoseconds.
    pub ticks_ns: u64,
    /// How the latencies lie.
    pub latency: Latency,
    /// How long they were: bytes at most, and count, of each size that there was.
    #[serde(default)]
    pub sizes: Vec<(u64, u64)>,
}

/// Latencies in nanoseconds, to within 6.25 %.
#[derive(Clone, Default, PartialEq, Debug, Serialize, Deserialize)]
pub struct Latency {
    /// Half were shorter.
    pub p50_ns: u64,
    /// 90 of 100 were shorter.
    pub p90_ns: u64,
    /// 99 of 100 were shorter.
    pub p99_ns: u64,
    /// 999 of 1000 were shorter.
    pub p999_ns: u64,
    /// The longest.
    pub max_ns: u64,
    /// The histogram: shortest latency and count of each bucket that is not empty.
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

    /// How the latencies lie that were counted since `earlier`.
    pub fn since(&self, earlier: &Latency) -> Latency {
        let before: BTreeMap<u64, u64> = earlier.buckets.iter().copied().collect();
        let added = |&(floor, count): &(u64, u64)| {
            (floor, count.saturating_sub(before.get(&floor).copied().unwrap_or(0)))
        };
        Latency::of(&self.buckets.iter().map(added).collect())
    }

    /// All of these together.
    pub fn sum<'a>(parts: impl IntoIterator<Item = &'a Latency>) -> Latency {
        Latency::of(&parts.into_iter().flat_map(|part| part.buckets.iter().copied()).collect())
    }

    /// How many there are.
    pub fn count(&self) -> u64 {
        self.buckets.iter().map(|bucket| bucket.1).sum()
    }
}

/// The children of the node at `at`, where `depths` are those of a stack's nodes from the top on: those one deeper, up to the
/// next that is no deeper.
pub fn children(depths: &[u8], at: usize) -> impl Iterator<Item = usize> + '_ {
    let depth = depths[at];
    let below = (at + 1..depths.len()).take_while(move |&other| depths[other] > depth);
    below.filter(move |&other| depths[other] == depth + 1)
}

/// Of the time that requests `spent` in each node and below, what they spent in it alone. Pieces of one request wait beside
/// each other, so that below a split the times may add up to more than above it: that is no time of its own.
pub fn own_times(depths: &[u8], spent: &[f64]) -> Vec<f64> {
    let below = |at| children(depths, at).map(|child| spent[child]).sum::<f64>();
    (0..spent.len()).map(|at| (spent[at] - below(at)).max(0.0)).collect()
}

/// The sizes that there were: bytes at most, and how many.
pub(super) fn sizes(counts: &OpCounts) -> impl Iterator<Item = (u64, u64)> {
    let places = counts.sizes.iter().enumerate().filter(|(_, count)| **count > 0);
    places.map(|(place, count)| (512u64.checked_shl(place as u32).unwrap_or(u64::MAX), *count))
}

impl DeviceStats {
    /// From what a device counted.
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
    // Nodes beyond those that are counted each by itself are left out.
    let nodes = counted.nodes.iter().zip(&total.nodes).enumerate();
    nodes
        .map(|(number, ((depth, name), counts))| LayerStats {
            node: number as u8,
            depth: *depth,
            name: (*name).to_owned(),
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
    fn latencies_of_an_interval_are_those_that_came_in_it() {
        let of = |buckets: &[(u64, u64)]| Latency::of(&buckets.iter().copied().collect());
        let (before, now) = (of(&[(1024, 100)]), of(&[(1024, 100), (4096, 9), (1 << 20, 1)]));
        let since = now.since(&before);
        assert_eq!((since.count(), since.buckets.len()), (10, 2));
        assert!((4096..4352).contains(&since.p50_ns) && since.p999_ns >= 1 << 20, "{since:?}");
        assert_eq!(now.since(&now), Latency::default());
        assert_eq!(Latency::sum([&before, &since]), now);
    }
}
