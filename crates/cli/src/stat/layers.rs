//! Statistics of the nodes of a stack: where requests spent their time.

use engine::control::{DeviceStats, LayerStats, own_times};
use serde_json::{Value, json};
use std::fmt::Write;

/// Which nodes are shown.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Shown {
    /// All nodes.
    Layers,
    /// Backends only. If the stack has several, each is a path.
    Paths,
}

/// The rates of a node in one interval.
#[derive(Clone, Debug)]
pub(crate) struct Row {
    device: String,
    pub(crate) layer: LayerStats,
    /// Requests each second.
    pub(crate) per_second: f64,
    /// Average milliseconds of a request at this node and below.
    pub(crate) await_ms: f64,
    /// Average number of requests at this node and below.
    queued: f64,
}

/// Returns the rows of a device, from the top of its stack down.
pub(crate) fn rows(before: Option<&DeviceStats>, now: &DeviceStats, shown: Shown) -> Vec<Row> {
    let before = before.filter(|before| before.uptime_ns < now.uptime_ns);
    let elapsed_ns = now.uptime_ns - before.map_or(0, |before| before.uptime_ns);
    let row = |layer: &LayerStats| {
        let earlier = before.and_then(|before| before.layers.iter().find(|other| other.node == layer.node));
        // The stack was replaced meanwhile, so its counters started anew.
        let earlier = earlier.filter(|other| other.ios <= layer.ios && other.name == layer.name);
        let ios = layer.ios - earlier.map_or(0, |other| other.ios);
        let ticks_ns = layer.ticks_ns.saturating_sub(earlier.map_or(0, |other| other.ticks_ns)) as f64;
        let ratio = |value: f64, by: f64| if by > 0.0 { value / by } else { 0.0 };
        Row {
            device: now.name.clone(),
            layer: layer.clone(),
            per_second: ratio(ios as f64 * 1e9, elapsed_ns as f64),
            await_ms: ratio(ticks_ns / 1e6, ios as f64),
            queued: ratio(ticks_ns, elapsed_ns as f64),
        }
    };
    now.layers.iter().filter(|layer| shown == Shown::Layers || layer.backend).map(row).collect()
}

/// Returns the share of each node, 0 to 1, in the time that requests spent in the stack. A node's time
/// excludes the nodes below it. `rows` must be all rows of a device.
pub(crate) fn shares(rows: &[Row]) -> Vec<f64> {
    let (depths, spent): (Vec<u8>, Vec<f64>) = rows.iter().map(|row| (row.layer.depth, row.queued)).unzip();
    let own = own_times(&depths, &spent);
    let all: f64 = own.iter().sum();
    own.into_iter().map(|own| if all > 0.0 { own / all } else { 0.0 }).collect()
}

/// Formats a header, a line for each node, and an empty line.
pub(super) fn text(rows: &[Row]) -> String {
    let mut text = format!("{:<29}{:>9}{:>9}{:>8}{:>9}\n", "Layer", "io/s", "await", "aqu-sz", "inflight");
    for Row { device, layer, per_second, await_ms, queued } in rows {
        let indent = 2 * usize::from(layer.depth);
        let name = format!("{device}/{} {:indent$}{}", layer.node, "", layer.name);
        // Writing to a string does not fail.
        let _ = writeln!(
            text,
            "{name:<28} {per_second:>9.2} {await_ms:>8.3} {queued:>7.2} {:>8}",
            layer.in_flight
        );
    }
    text.push('\n');
    text
}

/// Returns the rows as a JSON list.
pub(super) fn json(rows: &[Row]) -> Value {
    let row = |Row { device, layer, per_second, await_ms, queued }: &Row| {
        json!({
            "disk_device": device,
            "node": layer.node,
            "layer": layer.name,
            "depth": layer.depth,
            "backend": layer.backend,
            "io/s": per_second,
            "await": await_ms,
            "aqu-sz": queued,
            "inflight": layer.in_flight,
        })
    };
    rows.iter().map(row).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stats(uptime_s: u64, ios: u64, ticks_ms: u64) -> DeviceStats {
        let layer = |node, name: &str, ticks_ms: u64| LayerStats {
            node,
            depth: node,
            name: name.into(),
            label: String::new(),
            backend: node == 1,
            ios,
            ticks_ns: ticks_ms * 1_000_000,
            in_flight: 1,
        };
        DeviceStats {
            name: "disk".into(),
            uptime_ns: uptime_s * 1_000_000_000,
            stat: [0; 17],
            errors: 0,
            in_flight: 0,
            busy_ns: 0,
            operations: Default::default(),
            queues: Vec::new(),
            layers: vec![layer(0, "delay", ticks_ms * 2), layer(1, "file", ticks_ms)],
        }
    }

    #[test]
    fn a_layers_time_includes_the_layers_below() {
        let rows = rows(Some(&stats(1, 100, 50)), &stats(3, 300, 450), Shown::Layers);
        let expected = "\
Layer                             io/s    await  aqu-sz inflight
disk/0 delay                    100.00    4.000    0.40        1
disk/1   file                   100.00    2.000    0.20        1

";
        assert_eq!(text(&rows), expected);
        assert_eq!(shares(&rows), [0.5, 0.5]);
    }

    #[test]
    fn paths_are_backends_and_a_replaced_stack_counts_from_zero() {
        let rows = rows(Some(&stats(1, 100, 50)), &stats(3, 20, 10), Shown::Paths);
        assert_eq!(json(&rows)[0]["layer"], "file");
        assert_eq!((rows.len(), rows[0].per_second), (1, 10.0));
    }
}
