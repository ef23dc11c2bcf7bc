//! The order of a plan's actions: the devices below a device are added before it and removed after it.

use super::plan::Action;
use super::running::Running;
use crate::spec::{DeviceName, LayerSpec, StackSpec};
use crate::topology::{DeviceSpec, Topology};
use std::collections::BTreeSet;
use std::path::Path;

/// Returns the devices directly below a device of a topology: devices named by its table, and devices whose
/// export is one of its files or its server.
pub(super) fn below(running: &Running, wanted: &Topology, spec: &DeviceSpec) -> BTreeSet<DeviceName> {
    let mut below: BTreeSet<DeviceName> = wanted.stands_on(spec).into_iter().collect();
    let places = places_of(spec);
    let is_used = |address: &String| places.contains(address);
    for device in &running.devices {
        if device.exports.iter().any(|export| is_used(&export.address)) {
            below.insert(device.spec.name.clone());
        }
    }
    for export in &wanted.exports {
        if export.kind.address().as_ref().is_some_and(is_used) {
            below.insert(export.device.clone());
        }
    }
    below.remove(&spec.name);
    below
}

/// Returns the paths and URIs of a device's backends.
fn places_of(spec: &DeviceSpec) -> Vec<String> {
    let text = |path: &Path| path.display().to_string();
    let mut places = match &spec.stack {
        StackSpec::File(file) => vec![text(&file.file.path)],
        StackSpec::Nbd(nbd) => vec![nbd.uri.to_string()],
        StackSpec::Rbd(rbd) => vec![rbd.place()],
        StackSpec::Exec(program) | StackSpec::Nbdkit(program) => program.argv.clone(),
        StackSpec::Table(table) => {
            let place = |word: String| match word.parse::<StackSpec>() {
                Ok(StackSpec::File(file)) => text(&table.base.join(file.file.path)),
                Ok(StackSpec::Nbd(nbd)) => nbd.uri.to_string(),
                _ => word,
            };
            table.arguments().map(place).collect()
        }
        _ => Vec::new(),
    };
    places.extend(spec.layers.iter().filter_map(|layer| match layer {
        LayerSpec::Cow(cow) => Some(text(&cow.file)),
        _ => None,
    }));
    places
}

/// Ranks actions that may come next: actions that free names, addresses and files precede actions that take
/// them.
fn rank(action: &Action) -> u8 {
    match action {
        Action::RemoveExport { .. } => 0,
        Action::Remove { .. } => 1,
        Action::Change { .. } | Action::Table { .. } => 2,
        Action::AddExport { .. } => 3,
        Action::Add { .. } => 4,
    }
}

/// Orders actions so that each comes after those that it depends on. The error has the names of devices whose
/// actions depend on each other.
pub(super) fn ordered(
    running: &Running,
    wanted: &Topology,
    actions: Vec<Action>,
) -> Result<Vec<Action>, BTreeSet<String>> {
    let needs = needs(running, wanted, &actions);
    let mut left: Vec<usize> = (0..actions.len()).collect();
    let mut order: Vec<usize> = Vec::new();
    while !left.is_empty() {
        let is_ready = |&&action: &&usize| needs[action].iter().all(|needed| order.contains(needed));
        let Some(&next) =
            left.iter().filter(is_ready).min_by_key(|&&action| (rank(&actions[action]), action))
        else {
            return Err(left.iter().map(|&action| actions[action].device().to_string()).collect());
        };
        left.retain(|&action| action != next);
        order.push(next);
    }
    Ok(order.into_iter().map(|action| actions[action].clone()).collect())
}

/// Returns, for each action, the indices of the actions that must precede it.
fn needs(running: &Running, wanted: &Topology, actions: &[Action]) -> Vec<BTreeSet<usize>> {
    let is_of = |action: &Action, name: &DeviceName| action.device() == name;
    let frees = |action: &Action| matches!(action, Action::Remove { .. } | Action::Table { .. });
    let brings = |action: &Action| !matches!(action, Action::Remove { .. } | Action::RemoveExport { .. });
    let above = |lower: &DeviceName| {
        let uppers = running.devices.iter().filter(|upper| upper.below.contains(lower));
        uppers.map(|upper| upper.spec.name.clone()).collect::<Vec<_>>()
    };
    let stands: Vec<(&DeviceSpec, BTreeSet<DeviceName>)> =
        wanted.devices.iter().map(|spec| (spec, below(running, wanted, spec))).collect();
    let stands_on = |name: &DeviceName| stands.iter().find(|(spec, _)| spec.name == *name);
    let mut needs = vec![BTreeSet::new(); actions.len()];
    for (number, action) in actions.iter().enumerate() {
        let name = action.device();
        for (other, needed) in actions.iter().enumerate().filter(|(other, _)| *other != number) {
            let is_needed = match action {
                Action::Remove { .. } | Action::RemoveExport { .. } => {
                    // Its users must first be removed, or load a table without it.
                    above(name).iter().any(|upper| is_of(needed, upper) && frees(needed))
                }
                Action::Add { .. } => {
                    let again = is_of(needed, name) && matches!(needed, Action::Remove { .. });
                    let below = stands_on(name).is_some_and(|(spec, below)| {
                        below.contains(needed.device()) || wanted.opens_after(spec).contains(needed.device())
                    });
                    again || below && brings(needed)
                }
                Action::Table { .. } | Action::Change { .. } => {
                    // Changes of a device keep their order.
                    let earlier = is_of(needed, name)
                        && other < number
                        && matches!(needed, Action::Change { .. } | Action::Table { .. });
                    let below = matches!(action, Action::Table { .. })
                        && stands_on(name).is_some_and(|(_, below)| below.contains(needed.device()));
                    earlier || below && brings(needed)
                }
                Action::AddExport { .. } => {
                    is_of(needed, name) && matches!(needed, Action::RemoveExport { .. })
                }
            };
            if is_needed {
                needs[number].insert(other);
            }
        }
    }
    needs
}
