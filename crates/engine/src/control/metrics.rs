//! The same facts for Prometheus, in the OpenMetrics text format, gathered when asked for.

use super::{Counted, DeviceInfo, Yard};
use block::Op;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric, MetricEncoder, NoLabelSet, text::encode};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::Registry;
use queue::{OpCounts, Snapshot};
use std::fmt;
use std::sync::Arc;

pub(super) const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// Latency buckets end at powers of two from 2^10 ns (1 µs) to 2^34 ns (17 s), which are also ends of the
/// finer buckets that queues count in.
const BUCKET_BITS: std::ops::RangeInclusive<u32> = 10..=34;

pub(super) fn text(yard: Arc<dyn Yard>) -> String {
    let mut registry = Registry::default();
    registry.register_collector(Box::new(YardCollector(yard)));
    let mut text = String::new();
    match encode(&mut text, &registry) {
        Ok(()) => text,
        // Writing to a string does not fail; an exposition that is cut short must not pass for whole.
        Err(_) => "# metrics could not be encoded\n".to_owned(),
    }
}

struct YardCollector(Arc<dyn Yard>);

impl fmt::Debug for YardCollector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("YardCollector")
    }
}

struct Gathered {
    info: DeviceInfo,
    counted: Counted,
    total: Snapshot,
}

/// The per-operation counters: name, what it says, and where it comes from.
type OpCounter = (&'static str, &'static str, fn(&OpCounts) -> u64);
const OP_COUNTERS: [OpCounter; 3] = [
    ("blockyard_requests", "Requests that ended, with an error or without", |counts| counts.ios),
    ("blockyard_request_merges", "Requests that were merged into others", |counts| counts.merges),
    ("blockyard_request_bytes", "Bytes of requests that ended", |counts| counts.bytes),
];

/// The per-device gauges.
type DeviceGauge = (&'static str, &'static str, fn(&Gathered) -> f64);
const DEVICE_GAUGES: [DeviceGauge; 4] = [
    ("blockyard_device_size_bytes", "Size of the device", |device| device.info.size as f64),
    ("blockyard_device_uptime_seconds", "Time since the device was added", |device| {
        device.counted.uptime.as_secs_f64()
    }),
    ("blockyard_requests_in_flight", "Requests under way", |device| device.total.in_flight as f64),
    ("blockyard_connections", "Clients connected to the device's exports", |device| {
        device.info.exports.iter().map(|export| export.connections).sum::<u64>() as f64
    }),
];

impl Collector for YardCollector {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let gather = |info: DeviceInfo| {
            // A device that was deleted meanwhile is left out.
            let counted = self.0.counted(&info.name)?;
            Some(Gathered { total: counted.total(), info, counted })
        };
        let devices: Vec<Gathered> = self.0.devices().into_iter().filter_map(gather).collect();
        for (name, help, value) in DEVICE_GAUGES {
            let mut family = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
            for device in &devices {
                ConstGauge::new(value(device)).encode(family.encode_family(&labels(device))?)?;
            }
        }
        for (name, help, value) in OP_COUNTERS {
            let mut family = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
            for_each_op(&devices, &mut family, |counts, encoder| {
                ConstCounter::new(value(counts)).encode(encoder)
            })?;
        }
        let help = "Requests that ended with an error";
        let mut family =
            encoder.encode_descriptor("blockyard_request_errors", help, None, MetricType::Counter)?;
        for device in &devices {
            ConstCounter::new(device.total.errors).encode(family.encode_family(&labels(device))?)?;
        }
        let help = "Time with at least one request under way";
        let mut family =
            encoder.encode_descriptor("blockyard_busy_seconds", help, None, MetricType::Counter)?;
        for device in &devices {
            let busy = device.total.busy_ns as f64 / 1e9;
            ConstCounter::new(busy).encode(family.encode_family(&labels(device))?)?;
        }
        let help = "Time from a request's arrival to its end";
        let mut family = encoder.encode_descriptor(
            "blockyard_request_duration_seconds",
            help,
            None,
            MetricType::Histogram,
        )?;
        for_each_op(&devices, &mut family, encode_latency)
    }
}

fn labels(device: &Gathered) -> [(&'static str, &str); 1] {
    [("device", &device.info.name)]
}

/// Every operation of every device that happened at all: most never do.
fn for_each_op(
    devices: &[Gathered],
    family: &mut MetricEncoder<'_>,
    mut each: impl FnMut(&OpCounts, MetricEncoder<'_>) -> fmt::Result,
) -> fmt::Result {
    for device in devices {
        for (op, counts) in Op::ALL.iter().zip(&device.total.ops).filter(|(_, counts)| counts.ios > 0) {
            let labels = [("device", device.info.name.as_str()), ("op", op.name())];
            each(counts, family.encode_family(&labels)?)?;
        }
    }
    Ok(())
}

fn encode_latency(counts: &OpCounts, mut encoder: MetricEncoder<'_>) -> fmt::Result {
    let mut buckets: Vec<(f64, u64)> =
        BUCKET_BITS.map(|bit| ((1u64 << bit) as f64 / 1e9, 0)).chain([(f64::MAX, 0)]).collect();
    let mut total = 0;
    for (floor_ns, count) in counts.latency.buckets() {
        let above = (floor_ns.max(1).ilog2() + 1).max(*BUCKET_BITS.start()) - BUCKET_BITS.start();
        let last = buckets.len() - 1;
        buckets[(above as usize).min(last)].1 += count;
        total += count;
    }
    encoder.encode_histogram::<NoLabelSet>(counts.ticks_ns as f64 / 1e9, total, &buckets, None)
}
