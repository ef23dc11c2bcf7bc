//! The paths of multipath targets, from the status that device-mapper prints of them.

use engine::tables::TargetAnswer;
use std::str::SplitWhitespace;

/// One path.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct PathState {
    /// A sector of its target: where messages to it go.
    pub(super) sector: u64,
    /// Its group, from 1.
    pub(super) group: u32,
    /// The group is in use (`A`), enabled (`E`) or disabled (`D`).
    pub(super) group_state: char,
    /// The device, as messages name it.
    pub(super) name: String,
    /// It is in use, or may be.
    pub(super) up: bool,
    /// How often it failed.
    pub(super) failures: u64,
}

/// Those of all targets, in the order of the table.
pub(super) fn paths_of(targets: &[TargetAnswer]) -> Vec<PathState> {
    let multipath = targets.iter().filter(|target| target.kind == "multipath");
    // A status that is not as we know it tells of no paths.
    multipath.flat_map(|target| parse(target.start, &target.params).unwrap_or_default()).collect()
}

/// `NR features… NR handler… GROUPS NEXT {STATE NR args… PATHS NR_INFO {NAME A|F FAILURES info…}…}…`, as dm-mpath's
/// status has it.
fn parse(sector: u64, params: &str) -> Option<Vec<PathState>> {
    let mut words = params.split_whitespace();
    skip_counted(&mut words)?;
    skip_counted(&mut words)?;
    let groups: u32 = words.next()?.parse().ok()?;
    words.next()?;
    let mut paths = Vec::new();
    for group in 1..=groups {
        let group_state = words.next()?.chars().next()?;
        skip_counted(&mut words)?;
        let count: usize = words.next()?.parse().ok()?;
        let info: usize = words.next()?.parse().ok()?;
        for _ in 0..count {
            let name = words.next()?.to_owned();
            let up = words.next()? == "A";
            let failures = words.next()?.parse().ok()?;
            if info > 0 {
                words.nth(info - 1)?;
            }
            paths.push(PathState { sector, group, group_state, name, up, failures });
        }
    }
    Some(paths)
}

/// Past a number and as many words.
fn skip_counted(words: &mut SplitWhitespace<'_>) -> Option<()> {
    let count: usize = words.next()?.parse().ok()?;
    if count > 0 { words.nth(count - 1).map(|_| ()) } else { Some(()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn target(kind: &str, params: &str) -> TargetAnswer {
        TargetAnswer { start: 8, len: 8, kind: kind.into(), params: params.into() }
    }

    #[test]
    fn paths_are_read_from_a_status() {
        let params = "2 1 0 0 2 1 A 0 2 1 a F 3 0 ram:1M A 0 7 E 0 1 0 zero:1M A 0 ";
        let told = paths_of(&[target("linear", "a 0"), target("multipath", params)]);
        let rows: Vec<_> =
            told.iter().map(|p| (p.group, p.group_state, &*p.name, p.up, p.failures)).collect();
        assert_eq!(
            rows,
            [(1, 'A', "a", false, 3), (1, 'A', "ram:1M", true, 0), (2, 'E', "zero:1M", true, 0)]
        );
        assert_eq!(told[0].sector, 8);
    }

    #[test]
    fn a_status_that_is_cut_short_has_no_paths() {
        for params in ["", "2 1", "0 0 1 1 A 0 2 0 a A 0", "x"] {
            assert_eq!(paths_of(&[target("multipath", params)]), [], "{params}");
        }
    }
}
