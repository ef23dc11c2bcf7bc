//! Determines the order in which the devices of a topology are opened: each after the devices to which its
//! table refers, and an origin after its snapshots, to which it must copy data from its first write on.

use super::{DeviceSpec, Problem, Topology};
use crate::{DeviceName, LineSpec, StackSpec};

impl Topology {
    /// Returns the devices of this topology that the table of a device names.
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

    /// Returns the snapshots of a device's snapshot-origin: the devices whose snapshot lines name the same origin.
    fn snapshots<'a>(&'a self, device: &'a DeviceSpec) -> impl Iterator<Item = usize> + 'a {
        let origins = first_words(device, "snapshot-origin");
        let is_one = move |(other, spec): (usize, &DeviceSpec)| {
            first_words(spec, "snapshot").iter().any(|word| origins.contains(word)).then_some(other)
        };
        self.devices.iter().enumerate().filter_map(is_one)
    }

    /// Returns the devices of this topology to which the table of a device refers directly.
    pub fn stands_on(&self, device: &DeviceSpec) -> Vec<DeviceName> {
        self.below(device).map(|lower| self.devices[lower].name.clone()).collect()
    }

    /// Returns the devices of this topology that are opened before a device: those to which its table
    /// refers, and the snapshots of an origin.
    pub fn opens_after(&self, device: &DeviceSpec) -> Vec<DeviceName> {
        let first = self.below(device).chain(self.snapshots(device));
        first.map(|other| self.devices[other].name.clone()).collect()
    }

    /// Returns all devices, each after those to which its table refers, and each origin after its
    /// snapshots. Devices of a cycle come last, in any order.
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

    /// Returns the tables that refer to their own device, directly or through other tables.
    pub(super) fn circles(&self) -> Vec<Problem> {
        let found = (0..self.devices.len()).filter_map(|device| Some((device, self.circle(device)?)));
        found
            .map(|(device, circle)| {
                let DeviceSpec { name, line, .. } = &self.devices[device];
                let why = format!("it would use itself: {} (name another device)", circle.join(" → "));
                Problem::new(*line, format!("device.{name}.table"), why)
            })
            .collect()
    }

    /// Returns the names of the devices of a cycle, which starts and ends with the device `from`.
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

/// Returns the arguments of a line that can be device names. The type of a mirror's log (`core`, `disk`),
/// the persistence of a snapshot's store (`P`, `PO`, `N`) and the arguments after that are keywords, even
/// if a device has such a name.
fn may_name_devices(line: &LineSpec) -> Vec<String> {
    let mut arguments = line.arguments();
    match line.kind.as_str() {
        "mirror" if !arguments.is_empty() => drop(arguments.remove(0)),
        "snapshot" => arguments.truncate(2),
        _ => {}
    }
    arguments
}

/// Returns the first arguments of those lines of a device that have this kind.
fn first_words(device: &DeviceSpec, kind: &str) -> Vec<String> {
    let StackSpec::Table(table) = &device.stack else { return Vec::new() };
    let lines = table.lines.iter().filter(|line| line.kind == kind);
    lines.filter_map(|line| line.arguments().into_iter().next()).collect()
}
