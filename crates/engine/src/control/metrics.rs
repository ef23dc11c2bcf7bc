//! Metrics for Prometheus, gathered on request: in the OpenMetrics text format, or in the older one for
//! clients that do not accept OpenMetrics.

mod sessions;

use super::stats::sizes;
use super::{Counted, DeviceInfo, HostView};
use block::Op;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric, MetricEncoder, NoLabelSet, text::encode};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::Registry;
use queue::{NodeCounts, OpCounts, Snapshot};
use std::fmt;
use std::sync::Arc;

/// Format of the metrics.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Exposition {
    /// OpenMetrics 1.0.
    OpenMetrics,
    /// Prometheus's text format 0.0.4.
    Text,
}

impl Exposition {
    /// Chooses the format that a client accepts, by its `Accept` header.
    pub fn of(accept: Option<&str>) -> Exposition {
        match accept {
            Some(kinds) if kinds.contains("application/openmetrics-text") => Exposition::OpenMetrics,
            _ => Exposition::Text,
        }
    }

    /// Content type of the format.
    pub const fn content_type(self) -> &'static str {
        match self {
            Exposition::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
            Exposition::Text => "text/plain; version=0.0.4; charset=utf-8",
        }
    }
}

/// Latency buckets end at powers of two from 2^10 ns (1 µs) to 2^34 ns (17 s), which are also bounds of the
/// finer buckets of queues.
const BUCKET_BITS: std::ops::RangeInclusive<u32> = 10..=34;

/// Size buckets end at powers of two from a sector to 64 MiB.
const SIZE_BITS: std::ops::RangeInclusive<u32> = 9..=26;

pub(super) fn text(view: Arc<dyn HostView>, format: Exposition) -> String {
    match format {
        Exposition::OpenMetrics => open_metrics(view),
        Exposition::Text => prometheus_text(&open_metrics(view)),
    }
}

/// Converts to the older format: a counter's family has the name of its samples, and there is no end marker.
fn prometheus_text(text: &str) -> String {
    let mut converted = String::with_capacity(text.len() + text.len() / 16);
    let mut lines = text.lines().filter(|line| *line != "# EOF").peekable();
    while let Some(line) = lines.next() {
        let word = |line: &str, at| line.split(' ').nth(at).unwrap_or_default().to_owned();
        // The HELP line of a family precedes its TYPE line.
        let kind = match word(line, 1).as_str() {
            "HELP" => lines.peek().map(|next| word(next, 3)),
            "TYPE" => Some(word(line, 3)),
            _ => None,
        };
        if line.starts_with("# ") && kind.as_deref() == Some("counter") {
            let name = word(line, 2);
            converted += &line.replacen(&name, &format!("{name}_total"), 1);
        } else {
            converted += line;
        }
        converted.push('\n');
    }
    converted
}

fn open_metrics(view: Arc<dyn HostView>) -> String {
    let mut registry = Registry::default();
    registry.register_collector(Box::new(HostCollector(view)));
    let mut text = String::new();
    match encode(&mut text, &registry) {
        Ok(()) => text,
        // Writing to a string does not fail; a truncated exposition must not pass for a complete one.
        Err(_) => "# metrics could not be encoded\n".to_owned(),
    }
}

struct HostCollector(Arc<dyn HostView>);

impl fmt::Debug for HostCollector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("HostCollector")
    }
}

struct Gathered {
    info: DeviceInfo,
    counted: Counted,
    total: Snapshot,
}

/// A counter per operation: name, help, value.
type OpCounter = (&'static str, &'static str, fn(&OpCounts) -> u64);
const OP_COUNTERS: [OpCounter; 3] = [
    ("blockyard_requests", "Requests completed, with an error or without", |counts| counts.ios),
    ("blockyard_request_merges", "Requests that were merged into others", |counts| counts.merges),
    ("blockyard_request_bytes", "Bytes of completed requests", |counts| counts.bytes),
];

/// A gauge per device: name, help, value.
type DeviceGauge = (&'static str, &'static str, fn(&Gathered) -> f64);
const DEVICE_GAUGES: [DeviceGauge; 7] = [
    ("blockyard_device_size_bytes", "Size of the device", |device| device.info.size as f64),
    ("blockyard_device_uptime_seconds", "Time since the device was added", |device| {
        device.counted.uptime.as_secs_f64()
    }),
    ("blockyard_requests_in_flight", "Requests in flight", |device| device.total.in_flight as f64),
    ("blockyard_connections", "Clients connected to the device's exports", |device| {
        device.info.exports.iter().map(|export| export.connections).sum::<u64>() as f64
    }),
    ("blockyard_iscsi_sessions", "iSCSI sessions that see the device", |device| {
        iscsi_counts(device, "sessions").sum::<u64>() as f64
    }),
    // Each portal reports those of the logical unit.
    ("blockyard_iscsi_registrations", "Initiators registered for persistent reservations", |device| {
        iscsi_counts(device, "registrations").max().unwrap_or_default() as f64
    }),
    ("blockyard_iscsi_reservations", "Whether an initiator holds a SCSI reservation: 0 or 1", |device| {
        iscsi_counts(device, "reservations").max().unwrap_or_default() as f64
    }),
];

/// Returns the count of that name of each iSCSI export of a device.
fn iscsi_counts(device: &Gathered, name: &'static str) -> impl Iterator<Item = u64> {
    let exports = device.info.exports.iter().filter(|export| export.kind == "iscsi");
    exports.filter_map(move |export| export.counts.get(name).copied())
}

impl Collector for HostCollector {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let gather = |info: DeviceInfo| {
            // A device that was removed meanwhile is left out.
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
        let help = "Requests completed with an error";
        let mut family =
            encoder.encode_descriptor("blockyard_request_errors", help, None, MetricType::Counter)?;
        for device in &devices {
            ConstCounter::new(device.total.errors).encode(family.encode_family(&labels(device))?)?;
        }
        let help = "NBD clients or requests that a limit delayed, refused or disconnected";
        let mut family =
            encoder.encode_descriptor("blockyard_nbd_limit_hits", help, None, MetricType::Counter)?;
        for device in &devices {
            for (limit, count) in &device.counted.limit_hits {
                let labels = [("device", &*device.info.name), ("limit", *limit)];
                ConstCounter::new(*count).encode(family.encode_family(&labels)?)?;
            }
        }
        let help = "Requests that took longer than io_timeout, and were cancelled";
        let mut family =
            encoder.encode_descriptor("blockyard_request_timeouts", help, None, MetricType::Counter)?;
        for device in &devices {
            ConstCounter::new(device.counted.timeouts).encode(family.encode_family(&labels(device))?)?;
        }
        let help = "Time with at least one request in flight";
        let mut family =
            encoder.encode_descriptor("blockyard_busy_seconds", help, None, MetricType::Counter)?;
        for device in &devices {
            let busy = device.total.busy_ns as f64 / 1e9;
            ConstCounter::new(busy).encode(family.encode_family(&labels(device))?)?;
        }
        let help = "Latency of requests";
        let mut family = encoder.encode_descriptor(
            "blockyard_request_duration_seconds",
            help,
            None,
            MetricType::Histogram,
        )?;
        for_each_op(&devices, &mut family, encode_latency)?;
        let help = "Sizes of completed requests";
        let mut family =
            encoder.encode_descriptor("blockyard_request_size_bytes", help, None, MetricType::Histogram)?;
        for_each_op(&devices, &mut family, encode_sizes)?;
        let help = "Turns of the loop of an I/O thread";
        let mut family =
            encoder.encode_descriptor("blockyard_reactor_turns", help, None, MetricType::Counter)?;
        for (number, turns) in self.0.turns().into_iter().enumerate() {
            let labels = [("reactor", number.to_string())];
            ConstCounter::new(turns).encode(family.encode_family(&labels)?)?;
        }
        sessions::encode(&devices, &mut encoder)?;
        encode_layers(&devices, &mut encoder)?;
        encode_disks(&devices, &mut encoder)
    }
}

/// Encodes the counters of each node of each stack.
fn encode_layers(devices: &[Gathered], encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
    type LayerCounter = (&'static str, &'static str, fn(&NodeCounts) -> f64);
    let counters: [LayerCounter; 2] = [
        ("blockyard_layer_requests", "Requests completed by a node of the stack", |node| node.ios as f64),
        ("blockyard_layer_seconds", "Time that requests spent in a node of the stack and below", |node| {
            node.ticks_ns as f64 / 1e9
        }),
    ];
    for (name, help, value) in counters {
        let mut family = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
        for device in devices {
            let nodes = device.counted.nodes.iter().zip(&device.total.nodes).enumerate();
            for (number, ((_, layer), counts)) in nodes {
                let number = number.to_string();
                let labels = [("device", &*device.info.name), ("node", &*number), ("layer", *layer)];
                ConstCounter::new(value(counts)).encode(family.encode_family(&labels)?)?;
            }
        }
    }
    Ok(())
}

/// One of the kernel's seventeen `stat` counters: name, help, field, divisor.
type DiskCounter = (&'static str, &'static str, usize, f64);
/// node_exporter's names, so that its dashboards work for our devices.
const DISK_COUNTERS: [DiskCounter; 16] = [
    ("node_disk_reads_completed", "Reads completed", 0, 1.0),
    ("node_disk_reads_merged", "Reads merged", 1, 1.0),
    ("node_disk_read_bytes", "Bytes read", 2, 1.0 / 512.0),
    ("node_disk_read_time_seconds", "Time spent by all reads", 3, 1000.0),
    ("node_disk_writes_completed", "Writes completed", 4, 1.0),
    ("node_disk_writes_merged", "Writes merged", 5, 1.0),
    ("node_disk_written_bytes", "Bytes written", 6, 1.0 / 512.0),
    ("node_disk_write_time_seconds", "Time spent by all writes", 7, 1000.0),
    ("node_disk_io_time_seconds", "Time with I/O in flight", 9, 1000.0),
    ("node_disk_io_time_weighted_seconds", "Time spent by all I/O", 10, 1000.0),
    ("node_disk_discards_completed", "Discards completed", 11, 1.0),
    ("node_disk_discards_merged", "Discards merged", 12, 1.0),
    ("node_disk_discarded_sectors", "Sectors discarded", 13, 1.0),
    ("node_disk_discard_time_seconds", "Time spent by all discards", 14, 1000.0),
    ("node_disk_flush_requests", "Flushes completed", 15, 1.0),
    ("node_disk_flush_requests_time_seconds", "Time spent by all flushes", 16, 1000.0),
];

fn encode_disks(devices: &[Gathered], encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
    for (name, help, field, by) in DISK_COUNTERS {
        let mut family = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
        for device in devices {
            let value = device.total.fields()[field] as f64 / by;
            ConstCounter::new(value).encode(family.encode_family(&labels(device))?)?;
        }
    }
    let mut family =
        encoder.encode_descriptor("node_disk_io_now", "I/O in flight", None, MetricType::Gauge)?;
    for device in devices {
        ConstGauge::new(device.total.in_flight as f64).encode(family.encode_family(&labels(device))?)?;
    }
    Ok(())
}

fn encode_sizes(counts: &OpCounts, mut encoder: MetricEncoder<'_>) -> fmt::Result {
    let buckets: Vec<(f64, u64)> =
        SIZE_BITS.map(|bit| ((1u64 << bit) as f64, 0)).chain([(f64::INFINITY, 0)]).collect();
    let mut buckets = buckets;
    let last = buckets.len() - 1;
    for (most, count) in sizes(counts) {
        let place = most.ilog2().saturating_sub(*SIZE_BITS.start()) as usize;
        buckets[place.min(last)].1 += count;
    }
    encoder.encode_histogram::<NoLabelSet>(counts.bytes as f64, counts.ios, &buckets, None)
}

fn labels(device: &Gathered) -> [(&'static str, &str); 1] {
    [("device", &device.info.name)]
}

/// Calls `each` for every operation of every device that has occurred at all.
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
        BUCKET_BITS.map(|bit| ((1u64 << bit) as f64 / 1e9, 0)).chain([(f64::INFINITY, 0)]).collect();
    let mut total = 0;
    for (floor_ns, count) in counts.latency.buckets() {
        let above = (floor_ns.max(1).ilog2() + 1).max(*BUCKET_BITS.start()) - BUCKET_BITS.start();
        let last = buckets.len() - 1;
        buckets[(above as usize).min(last)].1 += count;
        total += count;
    }
    encoder.encode_histogram::<NoLabelSet>(counts.ticks_ns as f64 / 1e9, total, &buckets, None)
}
