//! The paths of a multipath target, read from its status as `dmsetup status` prints it.
//!
//! ```text
//! 2 untouched 0 · 0 · groups current · { state · n selector words · paths n · { path state fails · n words } }
//! ```

use engine::control::LayerStats;
use engine::tables::TargetAnswer;
use serde::Serialize;

/// A path.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub(crate) struct Path {
    /// The first sector of its target, to which messages go.
    pub(crate) sector: u64,
    /// Its group, from 1.
    pub(crate) group: usize,
    /// `A` in use, `E` enabled, `D` disabled.
    pub(crate) group_state: String,
    pub(crate) name: String,
    pub(crate) works: bool,
    pub(crate) fails: u64,
    /// The node that it is.
    pub(crate) node: Option<u8>,
}

/// The paths of all targets of a device.
pub(crate) fn paths(targets: &[TargetAnswer], layers: &[LayerStats]) -> Vec<Path> {
    let mut nodes = (0..layers.len()).filter(|at| layers[*at].name == "multipath");
    let mut all = Vec::new();
    for target in targets.iter().filter(|target| target.kind == "multipath") {
        // Words that nobody understands are no paths.
        let mut paths = parse(target).unwrap_or_default();
        if let Some(at) = nodes.next() {
            let below: Vec<usize> = crate::stack::children(layers, at).collect();
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

fn parse(target: &TargetAnswer) -> Option<Vec<Path>> {
    let mut words = target.params.split_ascii_whitespace();
    let skip_counted = |words: &mut std::str::SplitAsciiWhitespace<'_>| {
        let count: usize = words.next()?.parse().ok()?;
        (0..count).try_for_each(|_| words.next().map(drop))
    };
    // Features, and the words of a handler.
    skip_counted(&mut words)?;
    skip_counted(&mut words)?;
    let groups: usize = words.next()?.parse().ok()?;
    words.next()?;
    let mut paths = Vec::new();
    for group in 1..=groups {
        let group_state = words.next()?.to_owned();
        skip_counted(&mut words)?;
        let count: usize = words.next()?.parse().ok()?;
        let own: usize = words.next()?.parse().ok()?;
        for _ in 0..count {
            let name = words.next()?.to_owned();
            let works = words.next()? == "A";
            let fails = words.next()?.parse().ok()?;
            (0..own).try_for_each(|_| words.next().map(drop))?;
            let (sector, group_state) = (target.start, group_state.clone());
            paths.push(Path { sector, group, group_state, name, works, fails, node: None });
        }
    }
    Some(paths)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn target(params: &str) -> TargetAnswer {
        TargetAnswer { start: 0, len: 2048, kind: "multipath".into(), params: params.into() }
    }

    fn layer(node: u8, depth: u8, name: &str) -> LayerStats {
        LayerStats { node, depth, name: name.into(), backend: false, ios: 0, ticks_ns: 0, in_flight: 0 }
    }

    #[test]
    fn paths_are_those_of_the_status_with_their_nodes() {
        let status = "2 0 0 0 2 1 A 0 2 1 a F 1 0 ram:1M A 0 0 E 0 1 2 zero:1M A 3 0 1 ";
        let layers = [layer(0, 0, "multipath"), layer(1, 1, "file"), layer(2, 1, "ram"), layer(3, 1, "zero")];
        let paths = paths(&[target(status)], &layers);
        let told: Vec<_> =
            paths.iter().map(|p| (&*p.name, p.works, p.fails, p.group, &*p.group_state, p.node)).collect();
        let expected = [
            ("a", false, 1, 1, "A", Some(1)),
            ("ram:1M", true, 0, 1, "A", Some(2)),
            ("zero:1M", true, 3, 2, "E", Some(3)),
        ];
        assert_eq!(told, expected);
    }

    #[test]
    fn words_that_make_no_sense_are_no_paths() {
        for status in ["", "2", "2 0 0 0 9 1 A", "x", "2 0 0 0 1 1 A 0 1 1 a"] {
            assert_eq!(paths(&[target(status)], &[]), [], "{status}");
        }
    }
}
