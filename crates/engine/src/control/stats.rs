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
        let quantile = |fraction| counts.latency.quantile(fraction);
        OpStats {
            ios: counts.ios,
            merges: counts.merges,
            bytes: counts.bytes,
            ticks_ns: counts.ticks_ns,
            latency: Latency {
                p50_ns: quantile(0.5),
                p90_ns: quantile(0.9),
                p99_ns: quantile(0.99),
                p999_ns: quantile(0.999),
                max_ns: quantile(1.0),
                buckets: counts.latency.buckets().collect(),
            },
            sizes: sizes(counts).collect(),
        }
    }
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
