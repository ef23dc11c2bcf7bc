//! Parses the paths of multipath targets from the status that device-mapper prints:
//!
//! ```text
//! n features · n handler arguments · groups current · { state · n selector arguments · paths n · { path state fails
//! · n arguments } }
//! ```

use crate::tables::TargetAnswer;
use serde::Serialize;
use std::str::SplitAsciiWhitespace;

/// A path of a multipath target.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct PathStatus {
    /// First sector of its target, to which messages are sent.
    pub sector: u64,
    /// Number of its group, from 1.
    pub group: u32,
    /// State of the group: active (`A`), enabled (`E`) or disabled (`D`).
    pub group_state: char,
    /// The device, as messages name it.
    pub name: String,
    /// Whether the path is active, rather than failed.
    pub works: bool,
    /// Number of failures.
    pub fails: u64,
}

impl PathStatus {
    /// Returns the paths of a target, in the order of the table; none for other target types and for a
    /// malformed status.
    pub fn of(target: &TargetAnswer) -> Vec<PathStatus> {
        let is_multipath = target.kind == "multipath";
        is_multipath.then(|| parse(target.start, &target.params)).flatten().unwrap_or_default()
    }
}

fn parse(sector: u64, params: &str) -> Option<Vec<PathStatus>> {
    let mut arguments = params.split_ascii_whitespace();
    // Features and handler arguments.
    skip_counted(&mut arguments)?;
    skip_counted(&mut arguments)?;
    let groups: u32 = arguments.next()?.parse().ok()?;
    arguments.next()?;
    let mut paths = Vec::new();
    for group in 1..=groups {
        let group_state = arguments.next()?.chars().next()?;
        skip_counted(&mut arguments)?;
        let count: usize = arguments.next()?.parse().ok()?;
        let own: usize = arguments.next()?.parse().ok()?;
        for _ in 0..count {
            let name = arguments.next()?.to_owned();
            let works = arguments.next()? == "A";
            let fails = arguments.next()?.parse().ok()?;
            skip(&mut arguments, own)?;
            paths.push(PathStatus { sector, group, group_state, name, works, fails });
        }
    }
    Some(paths)
}

/// Skips a number and as many arguments.
fn skip_counted(arguments: &mut SplitAsciiWhitespace<'_>) -> Option<()> {
    let count = arguments.next()?.parse().ok()?;
    skip(arguments, count)
}

fn skip(arguments: &mut SplitAsciiWhitespace<'_>, count: usize) -> Option<()> {
    (0..count).try_for_each(|_| arguments.next().map(drop))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn paths_of(kind: &str, params: &str) -> Vec<PathStatus> {
        PathStatus::of(&TargetAnswer { start: 8, len: 8, kind: kind.into(), params: params.into() })
    }

    #[test]
    fn paths_are_parsed_from_a_status() {
        let params = "2 1 0 0 2 1 A 0 2 1 a F 3 0 ram:1M A 0 7 E 0 1 0 zero:1M A 0 ";
        let paths = paths_of("multipath", params);
        let rows: Vec<_> =
            paths.iter().map(|p| (p.group, p.group_state, &*p.name, p.works, p.fails)).collect();
        assert_eq!(
            rows,
            [(1, 'A', "a", false, 3), (1, 'A', "ram:1M", true, 0), (2, 'E', "zero:1M", true, 0)]
        );
        assert_eq!(paths[0].sector, 8);
        assert_eq!(paths_of("linear", "a 0"), []);
    }

    #[test]
    fn a_malformed_status_has_no_paths() {
        for params in ["", "2", "2 1", "2 0 0 0 9 1 A", "x", "0 0 1 1 A 0 2 0 a A 0", "2 0 0 0 1 1 A 0 1 1 a"]
        {
            assert_eq!(paths_of("multipath", params), [], "{params}");
        }
    }
}
