//! In which order the devices of a topology are opened: each behind those that its table stands on.

use super::{DeviceSpec, Problem, Topology};
use crate::spec::StackSpec;

impl Topology {
    /// Devices of this topology that the table of one of them names.
    fn below<'a>(&'a self, device: &'a DeviceSpec) -> impl Iterator<Item = usize> + 'a {
        let table = match &device.stack {
            StackSpec::Table(table) => Some(table),
            _ => None,
        };
        let words = table.into_iter().flat_map(|table| table.words());
        words.filter_map(|word| {
            let name = word.strip_prefix("/dev/mapper/").unwrap_or(&word);
            self.devices.iter().position(|other| other.name.as_str() == name)
        })
    }

    /// All devices, none before one that it stands on. Those that stand on themselves come last, in any order.
    pub fn in_order(&self) -> Vec<&DeviceSpec> {
        let mut left: Vec<usize> = (0..self.devices.len()).collect();
        let mut order = Vec::new();
        loop {
            let is_free = |&device: &usize| {
                let mut below = self.below(&self.devices[device]);
                !below.any(|lower| lower != device && left.contains(&lower))
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
        let reaches = |from: usize| {
            let (mut seen, mut next) = (vec![false; self.devices.len()], vec![from]);
            while let Some(device) = next.pop() {
                for lower in self.below(&self.devices[device]) {
                    if lower == from {
                        return true;
                    }
                    if !std::mem::replace(&mut seen[lower], true) {
                        next.push(lower);
                    }
                }
            }
            false
        };
        let lost = (0..self.devices.len()).filter(|&device| reaches(device));
        lost.map(|device| {
            let DeviceSpec { name, line, .. } = &self.devices[device];
            let why = "it would stand on itself (name another device)";
            Problem::new(*line, format!("device.{name}.table"), why)
        })
        .collect()
    }
}
