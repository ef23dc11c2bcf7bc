//! dmsetup's reports: `info`, `ls`, `deps`, `targets`.

use super::grid::{self, Column, number, text};
use super::options::Options;
use super::select::{self, Field};
use super::{Refusal, TableDevice, lvm, targets_of_kind};
use crate::failure::print;
use engine::control::DeviceInfo;
use engine::tables::{TableAnswer, TableInfo, TargetRow, target_rows};
use std::fmt::Write as _;
use std::os::unix::fs::MetadataExt;

/// The kernel's default read-ahead in sectors.
const READ_AHEAD: u32 = 256;
const NONE: &str = "No devices found\n";

/// Returns the device numbers of the export; without one, 0 and the device's number in its process.
pub(super) fn numbers(info: &DeviceInfo, table: &TableInfo) -> (u32, u32) {
    let nodes = info.exports.iter().filter(|export| export.address.starts_with("/dev/"));
    let mut found = nodes.filter_map(|export| std::fs::metadata(&export.address).ok());
    found.next().map_or((0, table.number as u32), |metadata| {
        let device = metadata.rdev();
        (rustix::fs::major(device), rustix::fs::minor(device))
    })
}

pub(super) fn opens(info: &DeviceInfo) -> u64 {
    info.exports.iter().map(|export| export.connections).sum()
}

pub(super) fn info(options: &Options, devices: Vec<TableDevice>) -> Result<(), Refusal> {
    if options.has("columns") || options.has("options") {
        return columns(options, devices);
    }
    if devices.is_empty() {
        print(NONE);
    }
    // All other commands have selected their devices before.
    let devices = if options.command == "info" { selected(options, devices)? } else { devices };
    for (answer, info) in devices {
        print(&facts(&answer, &info));
    }
    Ok(())
}

/// Formats the state of a device as `info` does.
pub(super) fn facts(answer: &TableAnswer, info: &DeviceInfo) -> String {
    let table = &answer.info;
    let mut text = format!("Name:              {}\n", info.name);
    let state = if table.suspended { "SUSPENDED" } else { "ACTIVE" };
    let read_only = if table.read_only { " (READ-ONLY)" } else { "" };
    let present = match (table.active, table.inactive) {
        (true, true) => "LIVE & INACTIVE",
        (true, false) => "LIVE",
        (false, true) => "INACTIVE",
        (false, false) => "None",
    };
    let (major, minor) = numbers(info, table);
    // Writing to a string does not fail.
    let _ = writeln!(text, "State:             {state}{read_only}");
    let _ = writeln!(text, "Read Ahead:        {READ_AHEAD}");
    let _ = writeln!(text, "Tables present:    {present}");
    let _ = writeln!(text, "Open count:        {}", opens(info));
    let _ = writeln!(text, "Event number:      {}", table.events);
    let _ = writeln!(text, "Major, minor:      {major}, {minor}");
    let _ = writeln!(text, "Number of targets: {}", table.targets);
    if !table.uuid.is_empty() {
        let _ = writeln!(text, "UUID: {}", table.uuid);
    }
    text.push('\n');
    text
}

static COLUMNS: [Column; 29] = [
    text("name", "Name", 16),
    text("mangled_name", "MangledName", 16),
    text("unmangled_name", "UnmangledName", 16),
    text("uuid", "UUID", 32),
    text("mangled_uuid", "MangledUUID", 32),
    text("unmangled_uuid", "UnmangledUUID", 32),
    number("read_ahead", "RAhead", 6),
    text("blkdevname", "BlkDevName", 16),
    text("attr", "Stat", 4),
    text("tables_loaded", "Tables", 6),
    text("suspended", "Suspended", 9),
    text("readonly", "Read-only", 9),
    text("devno", "DevNo", 5),
    number("major", "Maj", 3),
    number("minor", "Min", 3),
    number("open", "Open", 4),
    number("segments", "Targ", 4),
    number("events", "Event", 6),
    number("device_count", "#Devs", 5),
    text("devs_used", "DevNamesUsed", 16),
    text("devnos_used", "DevNosUsed", 16),
    text("blkdevs_used", "BlkDevNamesUsed", 16),
    number("device_ref_count", "#Refs", 5),
    text("names_using_dev", "RefNames", 8),
    text("devnos_using_dev", "RefDevNos", 9),
    text("subsystem", "Subsys", 6),
    text("vg_name", "VG", 4),
    text("lv_name", "LV", 4),
    text("lv_layer", "LVLayer", 7),
];
const DEFAULT: &str = "name,major,minor,attr,open,segments,events,uuid";

fn value(field: &str, (answer, info): &TableDevice, all: &[TableDevice]) -> String {
    let table = &answer.info;
    let (major, minor) = numbers(info, table);
    let used = |show: &dyn Fn(&String) -> Option<String>| {
        table.devices.iter().rev().filter_map(show).collect::<Vec<_>>().join(",")
    };
    let users = || all.iter().filter(|(other, _)| other.info.devices.contains(&info.name));
    match field {
        "name" | "mangled_name" | "unmangled_name" => info.name.clone(),
        "read_ahead" => READ_AHEAD.to_string(),
        "blkdevname" => node(info).unwrap_or_default(),
        "major" => major.to_string(),
        "minor" => minor.to_string(),
        "attr" => {
            let letter = |is: bool, letter: char| if is { letter } else { '-' };
            let write = if table.read_only { 'r' } else { 'w' };
            format!(
                "{}{}{}{write}",
                letter(table.active, 'L'),
                letter(table.inactive, 'I'),
                letter(table.suspended, 's')
            )
        }
        "open" => opens(info).to_string(),
        "segments" => table.targets.to_string(),
        "events" => table.events.to_string(),
        "uuid" | "mangled_uuid" | "unmangled_uuid" => table.uuid.clone(),
        "subsystem" => lvm::subsystem(&table.uuid).to_owned(),
        "vg_name" => lvm::of(&info.name, &table.uuid)[0].clone(),
        "lv_name" => lvm::of(&info.name, &table.uuid)[1].clone(),
        "lv_layer" => lvm::of(&info.name, &table.uuid)[2].clone(),
        "suspended" => if table.suspended { "Suspended" } else { "Active" }.to_owned(),
        "readonly" => if table.read_only { "Read-only" } else { "Writeable" }.to_owned(),
        "tables_loaded" => match (table.active, table.inactive) {
            (true, true) => "Both",
            (true, false) => "Live",
            (false, true) => "Inactive",
            (false, false) => "None",
        }
        .to_owned(),
        "device_count" => table.devices.len().to_string(),
        "devs_used" => {
            used(&|device| all.iter().any(|(_, info)| info.name == *device).then(|| device.clone()))
        }
        "devnos_used" => used(&|device| Some(device.clone())),
        "blkdevs_used" => used(&|device| Some(block_name(device))),
        "device_ref_count" => users().count().to_string(),
        "names_using_dev" => users().map(|(_, info)| info.name.clone()).collect::<Vec<_>>().join(","),
        "devnos_using_dev" => {
            let numbers = users().map(|(answer, info)| numbers(info, &answer.info));
            numbers.map(|(major, minor)| format!("{major}:{minor}")).collect::<Vec<_>>().join(",")
        }
        _ => format!("{major}:{minor}"),
    }
}

fn columns_of(list: &str) -> Result<Vec<&'static Column>, Refusal> {
    grid::named(list, DEFAULT, &COLUMNS)
}

/// Returns the devices that match `-S`.
pub(super) fn selected(options: &Options, devices: Vec<TableDevice>) -> Result<Vec<TableDevice>, Refusal> {
    let Some(text) = options.value("select") else { return Ok(devices) };
    let fields: Vec<Field> = COLUMNS.iter().map(|column| (column.name, column.is_number)).collect();
    let selection = select::parse(text, &fields)?;
    let all = super::all()?;
    let matches = |device: &TableDevice| selection.matches(&|field: &str| value(field, device, &all));
    Ok(devices.into_iter().filter(matches).collect())
}

/// Prints the column names if they were requested (`help` or `?`). Returns whether they were.
fn prints_fields(options: &Options) -> bool {
    let requests = [options.value("options"), options.value("select"), options.value("sort")];
    let is_requested = requests.into_iter().flatten().any(|text| matches!(text, "help" | "?"));
    if is_requested {
        print(&format!("{}\n", grid::names(&COLUMNS).join("\n")));
    }
    is_requested
}

fn sort(devices: &mut [TableDevice], keys: &str, all: &[TableDevice]) -> Result<(), Refusal> {
    // The last key first: the sort is stable.
    for key in keys.split(',').rev() {
        let name = key.trim_start_matches(['+', '-']);
        let column = *columns_of(name)?.first().ok_or_else(|| grid::unknown(name, &COLUMNS))?;
        let by = |device: &TableDevice| {
            let value = value(column.name, device, all);
            (if column.is_number { value.parse::<u64>().unwrap_or(0) } else { 0 }, value)
        };
        devices.sort_by(|a, b| {
            let order = by(a).cmp(&by(b));
            if key.starts_with('-') { order.reverse() } else { order }
        });
    }
    Ok(())
}

fn columns(options: &Options, devices: Vec<TableDevice>) -> Result<(), Refusal> {
    if prints_fields(options) {
        return Ok(());
    }
    let all = super::all()?;
    let fields = columns_of(options.value("options").unwrap_or(DEFAULT))?;
    let is_none = devices.is_empty();
    let mut devices = selected(options, devices)?;
    if let Some(keys) = options.value("sort") {
        sort(&mut devices, keys, &all)?;
    }
    if is_none {
        print(NONE);
    }
    if !devices.is_empty() {
        let values =
            |device: &TableDevice| fields.iter().map(|column| value(column.name, device, &all)).collect();
        grid::show(options, &fields, &devices.iter().map(values).collect::<Vec<_>>());
    }
    Ok(())
}

/// How `-o` of `ls` and `deps` shows devices: by numbers, name, or name of the exported device node.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Shown {
    Numbers,
    Name,
    Node,
}

fn shown(options: &Options) -> Result<Shown, Refusal> {
    match options.value("options") {
        None | Some("devno") => Ok(Shown::Numbers),
        Some("devname") => Ok(Shown::Name),
        Some("blkdevname") => Ok(Shown::Node),
        Some(other) => Err(Refusal::without_footer(vec![
            format!("Option not recognised: {other}."),
            "Couldn't process command line.".to_owned(),
        ])),
    }
}

pub(super) fn ls(options: &Options, devices: Vec<TableDevice>) -> Result<(), Refusal> {
    let kind = options.value("target");
    let found: Vec<TableDevice> = devices
        .into_iter()
        .filter(|(answer, _)| kind.is_none() || !targets_of_kind(answer.targets.clone(), kind).is_empty())
        .collect();
    if found.is_empty() {
        if kind.is_none() {
            print(NONE);
        }
        return Ok(());
    }
    if options.has("tree") {
        return super::tree::print(options, &found);
    }
    let shown = shown(options)?;
    for (answer, info) in &found {
        let (major, minor) = numbers(info, &answer.info);
        let device = match shown {
            // The format of dmsetup.
            Shown::Numbers if kind.is_some() => format!("{major}, {minor}"),
            Shown::Name => info.name.clone(),
            Shown::Node => node(info).unwrap_or_else(|| format!("{major}:{minor}")),
            Shown::Numbers => format!("{major}:{minor}"),
        };
        print(&format!("{}\t({device})\n", info.name));
    }
    Ok(())
}

pub(super) fn deps(options: &Options, devices: Vec<TableDevice>) -> Result<(), Refusal> {
    if devices.is_empty() {
        print(NONE);
    }
    let shown = shown(options)?;
    let is_one = options.names.len() == 1;
    for (answer, info) in devices {
        if options.has("verbose") {
            print(&facts(&answer, &info));
        }
        let mut text = if is_one { String::new() } else { format!("{}: ", info.name) };
        let _ = write!(text, "{} dependencies\t:", answer.info.devices.len());
        // As in the kernel, the device that was opened last comes first.
        for device in answer.info.devices.iter().rev() {
            let device = match shown {
                Shown::Numbers => device.replacen(':', ", ", usize::from(is_numbers(device))),
                Shown::Name | Shown::Node => block_name(device),
            };
            let _ = write!(text, " ({device})");
        }
        print(&format!("{text}\n"));
    }
    Ok(())
}

/// Returns the name of the exported device node.
fn node(info: &DeviceInfo) -> Option<String> {
    let nodes = info.exports.iter().filter_map(|export| export.address.strip_prefix("/dev/"));
    nodes.map(str::to_owned).next()
}

/// Returns the name of the block device with these numbers, or `device` if it has none.
fn block_name(device: &str) -> String {
    let target = std::fs::read_link(format!("/sys/dev/block/{device}")).ok().filter(|_| is_numbers(device));
    let name = target.and_then(|target| Some(target.file_name()?.to_string_lossy().into_owned()));
    name.unwrap_or_else(|| device.to_owned())
}

fn is_numbers(device: &str) -> bool {
    device.split_once(':').is_some_and(|(a, b)| a.parse::<u32>().is_ok() && b.parse::<u32>().is_ok())
}

/// Prints the versions of the named targets.
pub(super) fn target_versions(wanted: &[String]) -> Result<(), Refusal> {
    for name in wanted {
        let Some(row) = target_rows().iter().find(|row| row.name == name) else {
            return Err(Refusal::ioctl("target-version", name, super::EINVAL, ""));
        };
        print(&target_line(row));
    }
    Ok(())
}

fn target_line(TargetRow { name, version: [major, minor, patch], .. }: &TargetRow) -> String {
    format!("{name:<16} v{major}.{minor}.{patch}\n")
}

pub(super) fn targets() {
    let lines: String = target_rows().iter().map(target_line).collect();
    print(&lines);
}
