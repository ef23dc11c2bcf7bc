//! The stack for the page: each node with its activity in an interval and its share of the time that requests
//! took.

use engine::control::{DeviceInfo, DeviceStats, LayerStats, own_times};
use serde::Serialize;

/// A node of the stack.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub(crate) struct Part {
    pub(crate) node: u8,
    /// Depth in the stack, from 0.
    pub(crate) depth: u8,
    pub(crate) name: String,
    /// The node's role for the copy-on-write layer above it: `origin` or `overlay`.
    pub(crate) role: Option<&'static str>,
    /// Arguments of a layer; path, URI or size of a backend; `None`: unknown.
    pub(crate) label: Option<String>,
    pub(crate) backend: bool,
    /// Requests per second.
    pub(crate) ios: f64,
    /// Average time of a request in this node and below it, in nanoseconds.
    pub(crate) wait: f64,
    /// Average time of a request in this node alone, without the nodes below, in nanoseconds.
    pub(crate) own: f64,
    /// The node's share of the time of all nodes, from 0 to 1. The shares add up to 1, or all are 0.
    pub(crate) share: f64,
    pub(crate) in_flight: u64,
}

/// Returns the depth of each node.
pub(crate) fn depths(layers: &[LayerStats]) -> Vec<u8> {
    layers.iter().map(|layer| layer.depth).collect()
}

/// Returns all nodes, the top first, with their activity from `before` to `after`.
pub(crate) fn parts(info: &DeviceInfo, before: &DeviceStats, after: &DeviceStats) -> Vec<Part> {
    let layers = &after.layers;
    // A new table replaces the nodes, so their counters cannot be compared.
    let same = before.layers.len() == layers.len()
        && before.layers.iter().zip(layers).all(|(was, is)| was.name == is.name && was.depth == is.depth);
    let since = |at: usize, value: fn(&LayerStats) -> u64| {
        let was = if same { value(&before.layers[at]) } else { 0 };
        value(&layers[at]).saturating_sub(was)
    };
    let seconds = (after.uptime_ns.saturating_sub(before.uptime_ns)).max(1) as f64 / 1e9;
    let spent: Vec<f64> = (0..layers.len()).map(|at| since(at, |layer| layer.ticks_ns) as f64).collect();
    let own = own_times(&depths(layers), &spent);
    let total: f64 = own.iter().sum();
    let part = |(at, layer): (usize, &LayerStats)| {
        let ios = since(at, |layer| layer.ios);
        let each = |time_ns: f64| if ios > 0 { time_ns / ios as f64 } else { 0.0 };
        let (role, label) = role(label(info, layers, at));
        Part {
            role,
            node: layer.node,
            depth: layer.depth,
            name: layer.name.clone(),
            label,
            backend: layer.backend,
            ios: ios as f64 / seconds,
            wait: each(spent[at]),
            own: each(own[at]),
            share: if total > 0.0 { own[at] / total } else { 0.0 },
            in_flight: layer.in_flight,
        }
    };
    layers.iter().enumerate().map(part).collect()
}

/// Splits a label into its role, if it has one, and the rest.
fn role(label: Option<String>) -> (Option<&'static str>, Option<String>) {
    for role in ["origin", "overlay"] {
        let rest = label.as_deref().and_then(|label| label.strip_prefix(role)?.strip_prefix(' '));
        if let Some(rest) = rest {
            return (Some(role), Some(rest.to_owned()));
        }
    }
    (None, label)
}

/// Returns the label of a node: the arguments of a layer, or the path, URI or size of a backend. The layer
/// that was given last is at the top of the stack.
fn label(info: &DeviceInfo, layers: &[LayerStats], at: usize) -> Option<String> {
    let count = info.layers.len();
    if at < count {
        return Some(info.layers[count - 1 - at].clone());
    }
    let known = &layers[at].label;
    if !known.is_empty() {
        return Some(known.clone());
    }
    let alone = at == count && layers.len() == count + 1;
    alone.then(|| info.stack.clone())
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use engine::control::children;

    fn layer(node: u8, depth: u8, name: &str, ios: u64, ticks_ns: u64) -> LayerStats {
        let backend = name == "ram";
        LayerStats {
            node,
            depth,
            name: name.into(),
            label: String::new(),
            backend,
            ios,
            ticks_ns,
            in_flight: 0,
        }
    }

    pub(crate) fn stats(uptime_ns: u64, layers: Vec<LayerStats>) -> DeviceStats {
        DeviceStats {
            name: "m".into(),
            uptime_ns,
            stat: [0; 17],
            errors: 0,
            in_flight: 0,
            busy_ns: 0,
            operations: Default::default(),
            queues: Vec::new(),
            layers,
        }
    }

    pub(crate) fn info(layers: &[&str]) -> DeviceInfo {
        DeviceInfo {
            name: "m".into(),
            stack: "table: …".into(),
            layers: layers.iter().map(|layer| (*layer).to_owned()).collect(),
            size: 0,
            logical_block_size: 512,
            read_only: false,
            limits: Default::default(),
            exports: Vec::new(),
            backend: Default::default(),
            queues: Vec::new(),
            pid: 1,
            uptime_ms: 0,
        }
    }

    #[test]
    fn the_own_time_of_a_node_excludes_the_nodes_below() {
        let tree = |ios, factor: u64| {
            vec![
                layer(0, 0, "delay", ios, 1000 * factor),
                layer(1, 1, "multipath", ios, 400 * factor),
                layer(2, 2, "ram", ios, 100 * factor),
                layer(3, 2, "ram", 0, 200 * factor),
            ]
        };
        let (before, after) = (stats(0, tree(10, 1)), stats(2_000_000_000, tree(30, 3)));
        let parts = parts(&info(&["delay,read=5ms"]), &before, &after);
        let shares: Vec<f64> = parts.iter().map(|part| part.share).collect();
        assert_eq!(shares, [0.6, 0.1, 0.1, 0.2]);
        assert_eq!((parts[0].ios, parts[0].wait, parts[0].own), (10.0, 100.0, 60.0));
        assert_eq!((parts[0].label.as_deref(), &parts[1].label), (Some("delay,read=5ms"), &None));
        assert_eq!(children(&depths(&after.layers), 1).collect::<Vec<_>>(), [2, 3]);
        assert_eq!(children(&depths(&after.layers), 0).collect::<Vec<_>>(), [1]);
    }

    #[test]
    fn files_of_an_overlay_have_their_roles_and_paths() {
        let mut tree = vec![layer(0, 0, "cow", 0, 0), layer(1, 1, "file", 0, 0), layer(2, 1, "file", 0, 0)];
        tree[1].label = "origin /golden.img".into();
        tree[2].label = "overlay /my disk.cow".into();
        let parts = parts(&info(&["cow,file=/my disk.cow"]), &stats(0, Vec::new()), &stats(1, tree));
        let shown: Vec<_> = parts.iter().map(|part| (part.role, part.label.as_deref())).collect();
        let expected = [
            (None, Some("cow,file=/my disk.cow")),
            (Some("origin"), Some("/golden.img")),
            (Some("overlay"), Some("/my disk.cow")),
        ];
        assert_eq!(shown, expected);
    }

    #[test]
    fn children_in_flight_at_once_make_no_negative_time() {
        let tree = vec![layer(0, 0, "split", 1, 100), layer(1, 1, "ram", 4, 300)];
        let parts = parts(&info(&["split,max_sectors=8"]), &stats(0, Vec::new()), &stats(1, tree));
        assert_eq!((parts[0].share, parts[1].share), (0.0, 1.0));
        assert_eq!(parts[1].label.as_deref(), Some("table: …"));
    }
}
