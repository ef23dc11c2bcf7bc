//! Marks in a device's charts: suspensions, failures of paths and reconfigurations, with their times.
//!
//! Marks are found by comparing a device's state from one second to the next, so a change that is undone
//! within a second leaves no mark.

use engine::control::{DeviceInfo, DeviceStats};
use engine::spec::Bytes;
use serde::Serialize;
use std::collections::VecDeque;

/// Largest number of marks of one device; beyond it the oldest are removed.
const MARKS_MAX: usize = 100;
/// The time for which a mark is kept, in milliseconds: the length of the history.
const AGE_MS_MAX: u64 = 3_600_000;

/// The kind of a mark.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Kind {
    /// The device was suspended or resumed.
    Suspension,
    /// A path failed or was reinstated.
    Path,
    /// Size, stack, limits or options changed.
    Change,
}

/// A mark.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub(crate) struct Mark {
    /// The time in milliseconds since 1970.
    pub(crate) t: u64,
    pub(crate) kind: Kind,
    pub(crate) text: String,
}

/// The state of a device that is compared from one second to the next.
#[derive(Clone, PartialEq, Eq, Debug)]
struct State {
    is_suspended: bool,
    is_read_only: bool,
    size: u64,
    /// The stack and its layers as given by the user, and the names of its nodes, which a new table changes.
    stack: (String, Vec<String>, Vec<String>),
    limits: std::collections::BTreeMap<String, u64>,
    direct: Option<String>,
    scheduler: Option<String>,
}

impl State {
    fn new(info: &DeviceInfo, stats: &DeviceStats) -> State {
        let fact = |name: &str| info.backend.get(name).cloned();
        State {
            is_suspended: info.backend.contains_key("suspended"),
            is_read_only: info.read_only,
            size: info.size,
            stack: (
                info.stack.clone(),
                info.layers.clone(),
                stats.layers.iter().map(|layer| format!("{} {}", layer.name, layer.label)).collect(),
            ),
            limits: info.limits.clone(),
            // A reason may follow the value; a different reason is not a change.
            direct: fact("direct").and_then(|text| text.split([' ', ',', ':']).next().map(str::to_owned)),
            scheduler: fact("scheduler"),
        }
    }

    /// Returns the changes from this state to `now`, described in words.
    fn changes(&self, now: &State) -> Vec<(Kind, String)> {
        let mut changes = Vec::new();
        if now.is_suspended != self.is_suspended {
            let text = if now.is_suspended { "suspended" } else { "resumed" };
            changes.push((Kind::Suspension, text.to_owned()));
        }
        if now.size != self.size {
            changes.push((Kind::Change, format!("resized to {}", Bytes(now.size))));
        }
        if now.stack != self.stack {
            changes.push((Kind::Change, "stack changed".to_owned()));
        }
        if now.is_read_only != self.is_read_only {
            let text = if now.is_read_only { "read-only" } else { "writable" };
            changes.push((Kind::Change, text.to_owned()));
        }
        if let Some(direct) = now.direct.as_ref().filter(|_| now.direct != self.direct) {
            changes.push((Kind::Change, format!("direct I/O {direct}")));
        }
        if let Some(scheduler) = now.scheduler.as_ref().filter(|_| now.scheduler != self.scheduler) {
            changes.push((Kind::Change, format!("scheduler {scheduler}")));
        }
        // A new stack has other limits, which are not a change besides that of the stack.
        let limits: Vec<String> = now
            .limits
            .iter()
            .filter(|(name, value)| self.limits.get(*name) != Some(value))
            .map(|(name, value)| format!("{name} {value}"))
            .collect();
        if !limits.is_empty() && now.stack == self.stack && now.size == self.size {
            changes.push((Kind::Change, limits.join(", ")));
        }
        changes
    }
}

/// The marks of one device.
#[derive(Default)]
pub(crate) struct Marks {
    state: Option<State>,
    /// The summary of the paths when they were last queried, and the names of the failed ones.
    paths: Option<(String, Vec<String>)>,
    marks: VecDeque<Mark>,
}

impl Marks {
    /// Compares a device with its previous state, and adds marks for the changes. `t` is the time in
    /// milliseconds since 1970.
    pub(crate) fn observe(&mut self, info: &DeviceInfo, stats: &DeviceStats, t: u64) {
        let now = State::new(info, stats);
        let changes = self.state.as_ref().map(|was| was.changes(&now)).unwrap_or_default();
        changes.into_iter().for_each(|(kind, text)| self.add(Mark { t, kind, text }));
        self.state = Some(now);
        while self.marks.front().is_some_and(|mark| mark.t + AGE_MS_MAX < t) {
            self.marks.pop_front();
        }
    }

    /// Returns whether the summary of the device's paths has changed since [`paths`](Marks::paths), so that
    /// they have to be queried.
    pub(crate) fn wants_paths(&self, info: &DeviceInfo) -> bool {
        info.backend.get("multipath") != self.paths.as_ref().map(|(summary, _)| summary)
    }

    /// Compares the names of the failed paths with those of the previous call, and adds marks for the
    /// changes.
    pub(crate) fn paths(&mut self, info: &DeviceInfo, failed: Vec<String>, t: u64) {
        let summary = info.backend.get("multipath").cloned();
        if let (Some((_, was)), Some(_)) = (&self.paths, &summary) {
            let fell = failed.iter().filter(|name| !was.contains(name)).map(|name| format!("{name} failed"));
            let rose = was.iter().filter(|name| !failed.contains(name));
            let texts: Vec<String> = fell.chain(rose.map(|name| format!("{name} works again"))).collect();
            texts.into_iter().for_each(|text| self.add(Mark { t, kind: Kind::Path, text }));
        }
        self.paths = summary.map(|summary| (summary, failed));
    }

    fn add(&mut self, mark: Mark) {
        if self.marks.len() >= MARKS_MAX {
            self.marks.pop_front();
        }
        self.marks.push_back(mark);
    }

    /// Returns all marks, oldest first.
    pub(crate) fn all(&self) -> &VecDeque<Mark> {
        &self.marks
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stack::tests::{info, stats};

    fn texts(marks: &Marks) -> Vec<(Kind, &str)> {
        marks.all().iter().map(|mark| (mark.kind, &*mark.text)).collect()
    }

    #[test]
    fn a_device_that_stays_as_it_is_has_no_marks() {
        let mut marks = Marks::default();
        (0..3).for_each(|t| marks.observe(&info(&["delay,read=5ms"]), &stats(t, Vec::new()), t));
        assert_eq!(texts(&marks), []);
    }

    #[test]
    fn suspensions_and_reconfigurations_are_marked() {
        let (mut marks, stats) = (Marks::default(), stats(0, Vec::new()));
        let mut info = info(&[]);
        marks.observe(&info, &stats, 1);
        info.backend.insert("suspended".into(), "yes".into());
        marks.observe(&info, &stats, 2);
        info.backend.clear();
        info.size = 2 << 30;
        marks.observe(&info, &stats, 3);
        info.backend.insert("direct".into(), "on (4096)".into());
        info.limits.insert("max_sectors".into(), 8);
        marks.observe(&info, &stats, 4);
        info.layers.push("delay,read=5ms".into());
        marks.observe(&info, &stats, 5);
        let expected = [
            (Kind::Suspension, "suspended"),
            (Kind::Suspension, "resumed"),
            (Kind::Change, "resized to 2G"),
            (Kind::Change, "direct I/O on"),
            (Kind::Change, "max_sectors 8"),
            (Kind::Change, "stack changed"),
        ];
        assert_eq!(texts(&marks), expected);
        assert_eq!(marks.all()[0].t, 2);
        marks.observe(&info, &stats, 4 + AGE_MS_MAX);
        assert_eq!(texts(&marks), expected[3..], "an hour later");
    }

    #[test]
    fn a_path_that_fails_is_marked_with_its_name() {
        let mut marks = Marks::default();
        let mut info = info(&[]);
        assert!(!marks.wants_paths(&info), "it has none");
        info.backend.insert("multipath".into(), "2 of 2 paths work".into());
        assert!(marks.wants_paths(&info));
        marks.paths(&info, Vec::new(), 1);
        assert!(!marks.wants_paths(&info));
        info.backend.insert("multipath".into(), "1 of 2 paths work".into());
        assert!(marks.wants_paths(&info));
        marks.paths(&info, vec!["nbd:one".into()], 2);
        info.backend.insert("multipath".into(), "2 of 2 paths work".into());
        marks.paths(&info, Vec::new(), 3);
        assert_eq!(texts(&marks), [(Kind::Path, "nbd:one failed"), (Kind::Path, "nbd:one works again")]);
    }

    #[test]
    fn the_oldest_marks_go_first() {
        let (mut marks, stats) = (Marks::default(), stats(0, Vec::new()));
        let mut info = info(&[]);
        for size in 0..=2 * MARKS_MAX as u64 {
            info.size = size;
            marks.observe(&info, &stats, size);
        }
        assert_eq!((marks.all().len(), marks.all()[0].t), (MARKS_MAX, MARKS_MAX as u64 + 1));
    }
}
