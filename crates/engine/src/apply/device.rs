//! Compares one running device with its description, and decides which differences can be changed online.

use super::plan::{Action, is_table};
use super::running::RunningDevice;
use crate::change::{Change, can_relayer};
use crate::spec::{Bytes, DiskFileSpec, LayerSpec, StackSpec, TableSpec, scheduler_of, with_scheduler};
use crate::topology::{DeviceSpec, device_config};
use block::LimitOverrides;
use std::collections::BTreeSet;
use std::time::Duration;

/// How a device can be brought to its description.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Difference {
    /// Online changes, in this order; empty if the device matches its description.
    Changes(Vec<Action>),
    /// The device must be removed and added again, for this reason ("its depth changes").
    Again(String),
    /// The difference is refused, for this reason.
    Refused(String),
}

/// The layers of a device, grouped by the change that sets them.
struct Layers {
    /// Between the backend and the scheduler.
    base: Vec<LayerSpec>,
    /// The scheduler, as in `set scheduler=`.
    scheduler: String,
    /// Limits of the whole device, each as `key=value`.
    limits: BTreeSet<String>,
}

impl Layers {
    fn of(spec: &DeviceSpec) -> Layers {
        let scheduler = scheduler_of(&spec.layers).map_or("none".to_owned(), |choice| choice.to_string());
        let mut base = with_scheduler(&spec.layers, None);
        let mut limits = spec.limits.clone();
        // Limits of a device are a split layer above all others, however they were given.
        if limits.is_none()
            && let Some(LayerSpec::Split(text)) = base.last()
        {
            limits = Some(text.clone());
            base.pop();
        }
        // Formatting parsed limits gives one canonical text, which can be compared.
        let limits: LimitOverrides = limits.and_then(|text| text.parse().ok()).unwrap_or_default();
        let limits =
            limits.to_string().split(',').filter(|limit| !limit.is_empty()).map(str::to_owned).collect();
        Layers { base, scheduler, limits }
    }
}

/// Compares a running device with its description.
pub(super) fn difference(running: &RunningDevice, wanted: &DeviceSpec) -> Difference {
    let (now, name) = (&running.spec, &wanted.name);
    let change = |change| Action::Change { device: name.clone(), change };
    if device_config(now).depth != device_config(wanted).depth {
        return Difference::Again("its depth changes".to_owned());
    }
    let (has, wants) = (Layers::of(now), Layers::of(wanted));
    let mut actions = match stack(running, wanted, &wants) {
        Difference::Changes(actions) => actions,
        other => return other,
    };
    if has.base != wants.base {
        if is_table(wanted) || !can_relayer(&has.base, &wants.base) {
            return Difference::Again("its layers change".to_owned());
        }
        actions.push(change(Change::Layers(wants.base.iter().map(ToString::to_string).collect())));
    }
    if has.scheduler != wants.scheduler {
        actions.push(change(Change::Scheduler(wants.scheduler)));
    }
    if has.limits != wants.limits {
        actions.push(change(Change::Limits { set: Vec::from_iter(wants.limits).join(","), reset: true }));
    }
    if now.slow != wanted.slow {
        actions.push(change(Change::Slow(wanted.slow.map(nanoseconds))));
    }
    if now.io_timeout != wanted.io_timeout {
        actions.push(change(Change::Timeout(wanted.io_timeout.map(nanoseconds))));
    }
    Difference::Changes(actions)
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// Compares the stacks.
fn stack(running: &RunningDevice, wanted: &DeviceSpec, layers: &Layers) -> Difference {
    match (&running.spec.stack, &wanted.stack) {
        (StackSpec::File(now), StackSpec::File(next)) => file(running, now, next, wanted),
        (StackSpec::Table(now), StackSpec::Table(next)) => table(now, next, wanted, layers),
        (now, next) if now == next => Difference::Changes(Vec::new()),
        _ => Difference::Again("its stack changes".to_owned()),
    }
}

fn file(running: &RunningDevice, now: &DiskFileSpec, next: &DiskFileSpec, wanted: &DeviceSpec) -> Difference {
    let change = |change| Action::Change { device: wanted.name.clone(), change };
    let mut changes = Vec::new();
    let mut same = now.clone();
    // Options of file creation do not affect an open file.
    same.file.create = next.file.create;
    same.cluster_size = next.cluster_size;
    same.backing_file.clone_from(&next.backing_file);
    let is_raw = !now.may_be_image() && !next.may_be_image();
    if is_raw && now.file.path != next.file.path && now.file.ro && next.file.ro {
        same.file.path.clone_from(&next.file.path);
        changes.push(change(Change::File(next.file.path.clone())));
    }
    if is_raw && now.file.direct != next.file.direct {
        same.file.direct = next.file.direct;
        changes.push(change(Change::Direct(next.file.direct)));
    }
    if same != *next {
        return Difference::Again("its stack changes".to_owned());
    }
    match (now.file.create, next.file.create) {
        (Some(was), Some(size)) if was != size && size > running.size => {
            if !is_raw || now.file.sizelimit.is_some() || now.part.is_some() {
                let fix = format!("resize it to {size}, then run: blockyard resize {}", wanted.name);
                return Difference::Refused(format!("apply cannot change its size ({fix})"));
            }
            changes.push(change(Change::Resize { size: Some(size.0), shrink: false }));
        }
        (Some(was), Some(size)) if was != size && size < running.size => {
            return Difference::Refused(shrinks(running.size, size, wanted.name.as_str()));
        }
        _ => {}
    }
    Difference::Changes(changes)
}

fn shrinks(from: Bytes, to: Bytes, name: &str) -> String {
    format!(
        "it would shrink from {from} to {to}, and its end would be lost (run: blockyard resize {name} {to} --shrink)"
    )
}

fn table(now: &TableSpec, next: &TableSpec, wanted: &DeviceSpec, layers: &Layers) -> Difference {
    let lines = |table: &TableSpec| (table.text(), table.base.clone());
    if now.paths != next.paths {
        return Difference::Again("its multipath options change".to_owned());
    }
    if lines(now) == lines(next) {
        return Difference::Changes(Vec::new());
    }
    if !layers.base.iter().all(|layer| matches!(layer, LayerSpec::Split(_))) {
        // A table can be loaded only below limits and a scheduler.
        return Difference::Again("its table changes below its layers".to_owned());
    }
    let (device, text, base) = (wanted.name.clone(), next.text(), next.base.clone());
    Difference::Changes(vec![Action::Table { device, text, base }])
}
