//! Plans the actions that bring running devices to a topology, and the reasons why a plan is refused.
//!
//! Changes are planned online if the engine supports them. Otherwise the device is removed and added again,
//! which is refused while it is in use. A plan with a refusal is not started.

use super::device::{Difference, difference};
use super::order;
use super::running::{Running, RunningDevice};
use crate::change::Change;
use crate::spec::{DeviceName, StackSpec};
use crate::topology::{DeviceSpec, ExportKind, Topology, host_config};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::PathBuf;

/// One step from the running state towards the topology. An action takes effect fully or not at all.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Action {
    /// Drain, flush and remove a device with its exports.
    Remove {
        /// The device.
        device: DeviceName,
        /// Why a later action adds it again; empty if it is removed for good.
        again: String,
    },
    /// Close one export of a device that stays.
    RemoveExport {
        /// The device.
        device: DeviceName,
        /// The export's description.
        kind: ExportKind,
        /// The export's address.
        address: String,
    },
    /// Change a device while it is served.
    Change {
        /// The device.
        device: DeviceName,
        /// What to change.
        change: Change,
    },
    /// Load another table and make it the active one.
    Table {
        /// The device.
        device: DeviceName,
        /// The table's lines.
        text: String,
        /// The base of relative paths in the table.
        base: PathBuf,
    },
    /// Open a device and export it.
    Add {
        /// The device.
        spec: Box<DeviceSpec>,
        /// The kinds of its exports.
        exports: Vec<ExportKind>,
    },
    /// Add an export to a served device.
    AddExport {
        /// The device.
        device: DeviceName,
        /// The export.
        kind: ExportKind,
    },
}

impl Action {
    /// Returns the device that the action changes.
    pub fn device(&self) -> &DeviceName {
        match self {
            Action::Remove { device, .. }
            | Action::RemoveExport { device, .. }
            | Action::Change { device, .. }
            | Action::Table { device, .. }
            | Action::AddExport { device, .. } => device,
            Action::Add { spec, .. } => &spec.name,
        }
    }

    /// Returns the action's name in reports.
    pub fn kind(&self) -> &'static str {
        match self {
            Action::Remove { .. } => "remove",
            Action::RemoveExport { .. } => "remove-export",
            Action::Change { .. } | Action::Table { .. } => "change",
            Action::Add { .. } => "add",
            Action::AddExport { .. } => "add-export",
        }
    }
}

impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Action::Remove { device, again } if again.is_empty() => write!(f, "remove {device}"),
            Action::Remove { device, again } => write!(f, "remove {device}, to add it again: {again}"),
            Action::RemoveExport { device, address, .. } => write!(f, "remove export {address} of {device}"),
            Action::Change { device, change } => write!(f, "change {device}: {}", described(change)),
            Action::Table { device, text, .. } => {
                let lines = text.lines().count();
                write!(
                    f,
                    "change {device}: load a table of {lines} line{}",
                    if lines == 1 { "" } else { "s" }
                )
            }
            Action::Add { spec, exports } => {
                write!(f, "add {}: {}", spec.name, spec.stack)?;
                exports.iter().try_for_each(|kind| write!(f, ", {}", export_text(kind)))
            }
            Action::AddExport { device, kind } => write!(f, "add export {} of {device}", export_text(kind)),
        }
    }
}

/// Formats an export: `nbd unix:/run/disk.sock`.
fn export_text(kind: &ExportKind) -> String {
    match kind.row() {
        None => "the default export".to_owned(),
        Some(row) => format!("{} {}", row.kind, kind.value()).trim_end().to_owned(),
    }
}

/// Formats a change by its names in `set`, `limits` and `resize`.
fn described(change: &Change) -> String {
    match change {
        Change::Direct(direct) => format!("direct={}", direct_text(*direct)),
        Change::File(path) => format!("file={}", path.display()),
        Change::Resize { size: Some(size), .. } => format!("size {}", crate::spec::Bytes(*size)),
        Change::Limits { set, .. } if set.is_empty() => "no limits".to_owned(),
        Change::Limits { set, .. } => format!("limits {set}"),
        Change::Scheduler(text) => format!("scheduler={text}"),
        Change::Layers(layers) if layers.is_empty() => "no layers".to_owned(),
        Change::Layers(layers) => format!("layers {}", layers.join(" ")),
        Change::Slow(time) => format!("slow={}", time_or_off(*time)),
        Change::Timeout(time) => format!("io_timeout={}", time_or_off(*time)),
        // Plans contain no other changes.
        other => format!("{other:?}"),
    }
}

fn direct_text(direct: crate::spec::Direct) -> &'static str {
    match direct {
        crate::spec::Direct::On => "on",
        crate::spec::Direct::Off => "off",
        crate::spec::Direct::Auto => "auto",
    }
}

fn time_or_off(nanoseconds: Option<u64>) -> String {
    let text = |ns| crate::spec::format_time(std::time::Duration::from_nanos(ns));
    nanoseconds.map_or("off".to_owned(), text)
}

/// A reason why a plan is refused.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Refusal {
    /// The device, or the process setting.
    pub subject: String,
    /// The reason, and what to do.
    pub why: String,
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.subject, self.why)
    }
}

/// Actions in the order of their execution, and refusals. With any refusal, no action is executed.
#[derive(Clone, Default, PartialEq, Eq, Debug)]
pub struct Plan {
    /// The actions.
    pub actions: Vec<Action>,
    /// Reasons why the plan is refused; empty if it can be executed.
    pub refusals: Vec<Refusal>,
}

/// The planned fate of a running device.
#[derive(Clone, PartialEq, Eq, Debug)]
enum Fate {
    /// The device is removed: the topology does not contain it.
    Goes,
    /// The device stays, with these changes.
    Stays(Vec<Action>),
    /// The device is removed and added again, for this reason.
    Again(String),
}

/// Computes the actions that bring `running` to `wanted`. A pure function.
pub fn plan(running: &Running, wanted: &Topology) -> Plan {
    let mut refusals = process_settings(running, wanted);
    let mut fates: BTreeMap<String, Fate> = BTreeMap::new();
    for device in &running.devices {
        let name = device.spec.name.as_str();
        let fate = match wanted.devices.iter().find(|spec| spec.name.as_str() == name) {
            None => Fate::Goes,
            Some(spec) => match difference(device, spec) {
                Difference::Changes(actions) => exports_fate(device, spec, wanted, actions, &mut refusals),
                Difference::Again(why) => Fate::Again(why),
                Difference::Refused(why) => {
                    refusals.push(Refusal { subject: name.to_owned(), why });
                    Fate::Stays(Vec::new())
                }
            },
        };
        fates.insert(name.to_owned(), fate);
    }
    let actions = loop {
        let stacked = spread(running, wanted, &mut fates);
        match order::ordered(running, wanted, actions(running, wanted, &fates)) {
            Ok(ordered) => {
                refusals.extend(stacked);
                break ordered;
            }
            // No order of actions fits this table: its device is removed and added again, which resolves the
            // conflict.
            Err(stuck) => match stuck.iter().find(|name| gets_table(&fates, name)) {
                Some(name) => {
                    let why = "the devices that it uses and will use change places";
                    fates.insert(name.clone(), Fate::Again(why.to_owned()));
                }
                // The devices use files that are exports of each other.
                None => {
                    let subject = Vec::from_iter(stuck).join(", ");
                    let why = "they would use each other (change one of them to use another device)";
                    refusals.push(Refusal { subject, why: why.to_owned() });
                    break Vec::new();
                }
            },
        }
    };
    refuse_in_use(running, &fates, &mut refusals);
    refusals.sort();
    refusals.dedup();
    Plan { actions, refusals }
}

/// Refuses changes of process settings, which are fixed at the start.
fn process_settings(running: &Running, wanted: &Topology) -> Vec<Refusal> {
    let (now, next) = (&running.settings, wanted);
    let limits = |topology: &Topology| topology.nbd_limits.to_string();
    let threads = |topology: &Topology| host_config(topology).reactors.to_string();
    let differs = [
        ("ring", now.ring.to_string(), next.ring.to_string()),
        ("poll", now.poll.to_string(), next.poll.to_string()),
        ("queues", threads(now), threads(next)),
        ("nbd-limits", limits(now), limits(next)),
    ];
    let differs = differs.into_iter().filter(|(_, now, next)| now != next);
    differs
        .map(|(setting, now, next)| Refusal {
            subject: setting.to_owned(),
            why: format!(
                "the process was started with {now}, and {next} needs a restart (stop it, and start it again with up)"
            ),
        })
        .collect()
}

/// Decides the fate of a device that can be changed online, from the differences of its exports.
fn exports_fate(
    device: &RunningDevice,
    spec: &DeviceSpec,
    wanted: &Topology,
    mut actions: Vec<Action>,
    refusals: &mut Vec<Refusal>,
) -> Fate {
    let name = &spec.name;
    let mut missing: Vec<&ExportKind> = exports_of(wanted, name).collect();
    let mut surplus = Vec::new();
    for export in &device.exports {
        match missing.iter().position(|kind| **kind == export.kind) {
            Some(place) => drop(missing.remove(place)),
            None => surplus.push(export),
        }
    }
    if surplus.iter().any(|export| matches!(export.kind, ExportKind::Ublk(_))) {
        // The driver's queues cannot change while the device exists.
        return Fate::Again("its ublk device changes".to_owned());
    }
    for export in surplus {
        if export.clients > 0 {
            let clients = if export.clients == 1 { "a client uses" } else { "clients use" };
            let why = format!(
                "{clients} the device, so its export {} is not removed (disconnect it, and apply again)",
                export.address
            );
            refusals.push(Refusal { subject: name.to_string(), why });
        }
        let (kind, address) = (export.kind.clone(), export.address.clone());
        actions.push(Action::RemoveExport { device: name.clone(), kind, address });
    }
    let added =
        missing.into_iter().map(|kind| Action::AddExport { device: name.clone(), kind: kind.clone() });
    actions.extend(added);
    Fate::Stays(actions)
}

fn exports_of<'a>(wanted: &'a Topology, name: &'a DeviceName) -> impl Iterator<Item = &'a ExportKind> {
    wanted.exports.iter().filter(move |export| export.device == *name).map(|export| &export.kind)
}

/// Whether a device stays and gets another table.
fn gets_table(fates: &BTreeMap<String, Fate>, name: &str) -> bool {
    let is_table = |action: &Action| matches!(action, Action::Table { .. });
    matches!(fates.get(name), Some(Fate::Stays(changes)) if changes.iter().any(is_table))
}

/// Marks users of a device that is added again: they must be removed before it, so they are added again, too,
/// unless their new table does not use it. Returns refusals for users of devices that are removed for good.
fn spread(running: &Running, wanted: &Topology, fates: &mut BTreeMap<String, Fate>) -> Vec<Refusal> {
    loop {
        let mut refusals = Vec::new();
        let mut next: Option<(String, String)> = None;
        for upper in &running.devices {
            let name = upper.spec.name.as_str();
            let Some(Fate::Stays(_)) = fates.get(name) else { continue };
            let stays_on: BTreeSet<String> =
                match wanted.devices.iter().find(|spec| spec.name.as_str() == name) {
                    Some(spec) if gets_table(fates, name) => {
                        order::below(running, wanted, spec).iter().map(ToString::to_string).collect()
                    }
                    _ => upper.below.iter().map(ToString::to_string).collect(),
                };
            let lower = upper.below.iter().map(ToString::to_string).filter(|lower| stays_on.contains(lower));
            for lower in lower {
                match fates.get(&lower) {
                    Some(Fate::Again(_)) => next = Some((name.to_owned(), lower)),
                    Some(Fate::Goes) => {
                        let why = format!(
                            "it uses {lower}, which the file does not contain (keep {lower}, or remove both)"
                        );
                        refusals.push(Refusal { subject: name.to_owned(), why });
                    }
                    Some(Fate::Stays(_)) | None => {}
                }
            }
            if next.is_some() {
                break;
            }
        }
        let Some((upper, lower)) = next else { return refusals };
        fates.insert(upper, Fate::Again(format!("{lower}, which it uses, is added again")));
    }
}

/// Refuses to remove devices that are in use.
fn refuse_in_use(running: &Running, fates: &BTreeMap<String, Fate>, refusals: &mut Vec<Refusal>) {
    for device in &running.devices {
        let name = device.spec.name.as_str();
        let Some(used) = &device.in_use else { continue };
        // The use may be by a device of this process that is removed first. Other users are found when the
        // plan runs.
        let is_freed = running.devices.iter().any(|upper| {
            upper.below.contains(&device.spec.name)
                && matches!(fates.get(upper.spec.name.as_str()), Some(Fate::Goes | Fate::Again(_)))
        });
        let why = match fates.get(name) {
            Some(Fate::Goes) => {
                format!("{used}, so it is not removed (stop its clients, or run: blockyard del {name})")
            }
            Some(Fate::Again(why)) => format!(
                "it would have to be removed and added again, as {why}; but {used} (stop its clients, and apply again)"
            ),
            Some(Fate::Stays(_)) | None => continue,
        };
        if !is_freed {
            refusals.push(Refusal { subject: name.to_owned(), why });
        }
    }
}

/// Returns all actions: first those of running devices, then those of added ones.
fn actions(running: &Running, wanted: &Topology, fates: &BTreeMap<String, Fate>) -> Vec<Action> {
    let mut actions = Vec::new();
    for device in &running.devices {
        let remove =
            |again: &str| Action::Remove { device: device.spec.name.clone(), again: again.to_owned() };
        match fates.get(device.spec.name.as_str()) {
            Some(Fate::Goes) => actions.push(remove("")),
            Some(Fate::Again(why)) => actions.push(remove(why)),
            Some(Fate::Stays(changes)) => actions.extend(changes.iter().cloned()),
            None => {}
        }
    }
    for spec in wanted.in_order() {
        let is_added = matches!(fates.get(spec.name.as_str()), None | Some(Fate::Again(_)));
        if is_added {
            let exports = exports_of(wanted, &spec.name).cloned().collect();
            actions.push(Action::Add { spec: Box::new(spec.clone()), exports });
        }
    }
    actions
}

/// Whether a device's stack is a table.
pub(super) fn is_table(spec: &DeviceSpec) -> bool {
    matches!(spec.stack, StackSpec::Table(_))
}
