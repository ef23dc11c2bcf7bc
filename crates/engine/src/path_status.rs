//! The paths of multipath targets, read from the status that device-mapper prints of them: for whoever shows them.
//!
//! ```text
//! n features · n handler words · groups current · { state · n selector words · paths n · { path state fails · n words } }
//! ```

use crate::tables::TargetAnswer;
use serde::Serialize;
use std::str::SplitAsciiWhitespace;

/// One path.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct PathStatus {
    /// The first sector of its target, to which messages go.
    pub sector: u64,
    /// Its group, from 1.
    pub group: u32,
    /// The group is in use (`A`), enabled (`E`) or disabled (`D`).
    pub group_state: char,
    /// The device, as messages name it.
    pub name: String,
    /// It is in use, or may be.
    pub works: bool,
    /// How often it failed.
    pub fails: u64,
}

impl PathStatus {
    /// Those of a target, in the order of the table; none of another kind, nor of a status that is not as we know it.
    pub fn of(target: &TargetAnswer) -> Vec<PathStatus> {
        let is_multipath = target.kind == "multipath";
        is_multipath.then(|| parse(target.start, &target.params)).flatten().unwrap_or_default()
    }
}

fn parse(sector: u64, params: &str) -> Option<Vec<PathStatus>> {
    let mut words = params.split_ascii_whitespace();
    // Features, and the words of a handler.
    skip_counted(&mut words)?;
    skip_counted(&mut words)?;
    let groups: u32 = words.next()?.parse().ok()?;
    words.next()?;
    let mut paths = Vec::new();
    for group in 1..=groups {
        let group_state = words.next()?.chars().next()?;
        skip_counted(&mut words)?;
        let count: usize = words.next()?.parse().ok()?;
        let own: usize = words.next()?.parse().ok()?;
        for _ in 0..count {
            let name = words.next()?.to_owned();
            let works = words.next()? == "A";
            let fails = words.next()?.parse().ok()?;
            skip(&mut words, own)?;
            paths.push(PathStatus { sector, group, group_state, name, works, fails });
        }
    }
    Some(paths)
}

/// Past a number and as many words.
fn skip_counted(words: &mut SplitAsciiWhitespace<'_>) -> Option<()> {
    let count = words.next()?.parse().ok()?;
    skip(words, count)
}

fn skip(words: &mut SplitAsciiWhitespace<'_>, count: usize) -> Option<()> {
    (0..count).try_for_each(|_| words.next().map(drop))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn paths_of(kind: &str, params: &str) -> Vec<PathStatus> {
        PathStatus::of(&TargetAnswer { start: 8, len: 8, kind: kind.into(), params: params.into() })
    }

    #[test]
    fn paths_are_read_from_a_status() {
        let params = "2 1 0 0 2 1 A 0 2 1 a F 3 0 ram:1M A 0 7 E 0 1 0 zero:1M A 0 ";
        let told = paths_of("multipath", params);
        let rows: Vec<_> =
            told.iter().map(|p| (p.group, p.group_state, &*p.name, p.works, p.fails)).collect();
        assert_eq!(
            rows,
            [(1, 'A', "a", false, 3), (1, 'A', "ram:1M", true, 0), (2, 'E', "zero:1M", true, 0)]
        );
        assert_eq!(told[0].sector, 8);
        assert_eq!(paths_of("linear", "a 0"), []);
    }

    #[test]
    fn a_status_that_makes_no_sense_or_is_cut_short_has_no_paths() {
        for params in ["", "2", "2 1", "2 0 0 0 9 1 A", "x", "0 0 1 1 A 0 2 0 a A 0", "2 0 0 0 1 1 A 0 1 1 a"]
        {
            assert_eq!(paths_of("multipath", params), [], "{params}");
        }
    }
}
