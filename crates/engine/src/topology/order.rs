//! In which order the devices of a topology are opened: each behind those that its table stands on, and an origin behind its
//! snapshots, for which it copies from its first write on.

use super::{DeviceSpec, Problem, Topology};
use crate::spec::{LineSpec, StackSpec};

impl Topology {
    /// Devices of this topology that the table of one of them names.
    fn below<'a>(&'a self, device: &'a DeviceSpec) -> impl Iterator<Item = usize> + 'a {
        let table = match &device.stack {
            StackSpec::Table(table) => Some(table),
            _ => None,
        };
        let lines = table.into_iter().flat_map(|table| &table.lines);
        lines.flat_map(may_name_devices).filter_map(|word| {
            let name = word.strip_prefix("/dev/mapper/").unwrap_or(&word);
            self.devices.iter().position(|other| other.name.as_str() == name)
        })
    }

    /// Snapshots of what a device is the snapshot-origin of: those whose lines name it by the same word.
    fn snapshots<'a>(&'a self, device: &'a DeviceSpec) -> impl Iterator<Item = usize> + 'a {
        let origins = first_words(device, "snapshot-origin");
        let is_one = move |(other, spec): (usize, &DeviceSpec)| {
            first_words(spec, "snapshot").iter().any(|word| origins.contains(word)).then_some(other)
        };
        self.devices.iter().enumerate().filter_map(is_one)
    }

    /// All devices, none before one that it stands on, and no origin before its snapshots. Those that stand on themselves come last, in any order.
    pub fn in_order(&self) -> Vec<&DeviceSpec> {
        let mut left: Vec<usize> = (0..self.devices.len()).collect();
        let mut order = Vec::new();
        loop {
            let is_free = |&device: &usize| {
                let (spec, is_left) =
                    (&self.devices[device], |other| other != device && left.contains(&other));
                !self.below(spec).any(is_left) && !self.snapshots(spec).any(is_left)
            };
            let free: Vec<usize> = left.iter().copied().filter(is_free).collect();
            if free.is_empty() {
                order.append(&mut left);
                return order.into_iter().map(|device| &self.devices[device]).collect();
            }
            left.retain(|device| !free.contains(device));
            order.extend(free);
        }
    }

    /// Tables that would stand on themselves.
    pub(super) fn circles(&self) -> Vec<Problem> {
        let lost = (0..self.devices.len()).filter_map(|device| Some((device, self.circle(device)?)));
        lost.map(|(device, circle)| {
            let DeviceSpec { name, line, .. } = &self.devices[device];
            let why = format!("it would stand on itself: {} (name another device)", circle.join(" → "));
            Problem::new(*line, format!("device.{name}.table"), why)
        })
        .collect()
    }

    /// The way from a device down to itself, which begins and ends it.
    fn circle(&self, from: usize) -> Option<Vec<String>> {
        let name = |device: usize| self.devices[device].name.to_string();
        let (mut seen, mut next) = (vec![false; self.devices.len()], vec![(from, vec![name(from)])]);
        while let Some((device, trail)) = next.pop() {
            for lower in self.below(&self.devices[device]) {
                let trail = [trail.clone(), vec![name(lower)]].concat();
                if lower == from {
                    return Some(trail);
                }
                if !std::mem::replace(&mut seen[lower], true) {
                    next.push((lower, trail));
                }
            }
        }
        None
    }
}

/// The arguments of a line without those that are keywords wherever devices stand, whatever devices are called: the kind of a
/// mirror's log (`core`, `disk`), how a snapshot keeps its store (`P`, `PO`, `N`) and what follows.
fn may_name_devices(line: &LineSpec) -> Vec<String> {
    let mut words = line.words();
    match line.kind.as_str() {
        "mirror" if !words.is_empty() => drop(words.remove(0)),
        "snapshot" => words.truncate(2),
        _ => {}
    }
    words
}

/// What the lines of a kind begin with.
fn first_words(device: &DeviceSpec, kind: &str) -> Vec<String> {
    let StackSpec::Table(table) = &device.stack else { return Vec::new() };
    let lines = table.lines.iter().filter(|line| line.kind == kind);
    lines.filter_map(|line| line.words().into_iter().next()).collect()
}
