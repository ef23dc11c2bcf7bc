//! Paths of a device's multipath targets, with their nodes in the stack.

use crate::stack::depths;
use engine::control::{LayerStats, children};
use engine::tables::TargetAnswer;
use engine::tables::path_status::PathStatus;
use serde::Serialize;

/// A path of a multipath target.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub(crate) struct Path {
    #[serde(flatten)]
    pub(crate) status: PathStatus,
    /// Number of the path's node; `None`: unknown, because the stack does not match the status.
    pub(crate) node: Option<u8>,
}

/// Returns the paths of all targets of a device, from `dmsetup status` and the nodes of its stack.
pub(crate) fn paths(targets: &[TargetAnswer], layers: &[LayerStats]) -> Vec<Path> {
    let mut nodes = (0..layers.len()).filter(|at| layers[*at].name == "multipath");
    let depths = depths(layers);
    let mut all = Vec::new();
    for target in targets.iter().filter(|target| target.kind == "multipath") {
        let paths = PathStatus::of(target).into_iter();
        let mut paths: Vec<Path> = paths.map(|status| Path { status, node: None }).collect();
        if let Some(at) = nodes.next() {
            let below: Vec<usize> = children(&depths, at).collect();
            if below.len() == paths.len() {
                for (path, child) in paths.iter_mut().zip(below) {
                    path.node = Some(layers[child].node);
                }
            }
        }
        all.append(&mut paths);
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    fn target(params: &str) -> TargetAnswer {
        TargetAnswer { start: 0, len: 2048, kind: "multipath".into(), params: params.into() }
    }

    fn layer(node: u8, depth: u8, name: &str) -> LayerStats {
        LayerStats {
            node,
            depth,
            name: name.into(),
            label: String::new(),
            backend: false,
            ios: 0,
            ticks_ns: 0,
            in_flight: 0,
        }
    }

    #[test]
    fn paths_are_those_of_the_status_with_their_nodes() {
        let status = "2 0 0 0 2 1 A 0 2 1 a F 1 0 ram:1M A 0 0 E 0 1 2 zero:1M A 3 0 1 ";
        let layers = [layer(0, 0, "multipath"), layer(1, 1, "file"), layer(2, 1, "ram"), layer(3, 1, "zero")];
        let paths = paths(&[target(status)], &layers);
        let shown: Vec<_> = paths
            .iter()
            .map(|Path { status: p, node }| (&*p.name, p.works, p.fails, p.group, p.group_state, *node))
            .collect();
        let expected = [
            ("a", false, 1, 1, 'A', Some(1)),
            ("ram:1M", true, 0, 1, 'A', Some(2)),
            ("zero:1M", true, 3, 2, 'E', Some(3)),
        ];
        assert_eq!(shown, expected);
    }

    #[test]
    fn a_malformed_status_has_no_paths() {
        for status in ["", "2", "2 0 0 0 9 1 A", "x", "2 0 0 0 1 1 A 0 1 1 a"] {
            assert_eq!(paths(&[target(status)], &[]), [], "{status}");
        }
    }
}
