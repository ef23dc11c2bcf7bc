//! dmsetup's reports: `info`, `ls`, `deps`, `targets`.

use super::options::Options;
use super::{Named, Refusal, of_kind};
use crate::failure::print;
use engine::control::DeviceInfo;
use engine::tables::TableInfo;
use std::fmt::Write as _;
use std::os::unix::fs::MetadataExt;

/// What a device of the kernel's has in sectors where nobody said otherwise.
const READ_AHEAD: u32 = 256;
const NONE: &str = "No devices found\n";

/// The numbers of the kernel's device that shows it; where there is none, 0 and its number in its process.
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

pub(super) fn info(options: &Options, devices: Vec<Named>) -> Result<(), Refusal> {
    if options.has("columns") || options.has("options") {
        return columns(options, devices);
    }
    if devices.is_empty() {
        print(NONE);
    }
    for (answer, info) in devices {
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
        let (major, minor) = numbers(&info, table);
        // Writing to a string does not fail.
        let _ = writeln!(text, "State:             {state}{read_only}");
        let _ = writeln!(text, "Read Ahead:        {READ_AHEAD}");
        let _ = writeln!(text, "Tables present:    {present}");
        let _ = writeln!(text, "Open count:        {}", opens(&info));
        let _ = writeln!(text, "Event number:      {}", table.events);
        let _ = writeln!(text, "Major, minor:      {major}, {minor}");
        let _ = writeln!(text, "Number of targets: {}", table.targets);
        if !table.uuid.is_empty() {
            let _ = writeln!(text, "UUID: {}", table.uuid);
        }
        print(&format!("{text}\n"));
    }
    Ok(())
}

/// A column.
struct Column {
    name: &'static str,
    heading: &'static str,
    width: usize,
    /// Numbers stand right, and are sorted as such.
    is_number: bool,
}

const fn text(name: &'static str, heading: &'static str, width: usize) -> Column {
    Column { name, heading, width, is_number: false }
}

const fn number(name: &'static str, heading: &'static str, width: usize) -> Column {
    Column { name, heading, width, is_number: true }
}

const COLUMNS: [Column; 20] = [
    text("name", "Name", 16),
    text("uuid", "UUID", 32),
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
];
const DEFAULT: &str = "name,major,minor,attr,open,segments,events,uuid";

fn value(field: &str, (answer, info): &Named, all: &[Named]) -> String {
    let table = &answer.info;
    let (major, minor) = numbers(info, table);
    let used = |show: &dyn Fn(&String) -> Option<String>| {
        table.devices.iter().rev().filter_map(show).collect::<Vec<_>>().join(",")
    };
    let users = || all.iter().filter(|(other, _)| other.info.devices.contains(&info.name));
    match field {
        "name" => info.name.clone(),
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
        "uuid" => table.uuid.clone(),
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
        _ => format!("{major}:{minor}"),
    }
}

/// The columns that a list names; one that begins with `+` adds to those that are shown anyway.
fn columns_of(list: &str) -> Result<Vec<&'static Column>, Refusal> {
    let list = match list.strip_prefix('+') {
        Some(more) => format!("{DEFAULT},{more}"),
        None => list.to_owned(),
    };
    let column = |name: &str| COLUMNS.iter().find(|column| column.name == name);
    list.split(',').map(|name| column(name).ok_or_else(|| unknown(name))).collect()
}

fn unknown(name: &str) -> Refusal {
    let known = COLUMNS.iter().map(|column| format!("  {}", column.name));
    Refusal::told(known.chain([format!("Unrecognised field: {name}")]).collect())
}

fn sort(devices: &mut [Named], keys: &str, all: &[Named]) -> Result<(), Refusal> {
    // The last key first: sorting leaves what is equal in its order.
    for key in keys.split(',').rev() {
        let name = key.trim_start_matches(['+', '-']);
        let column = *columns_of(name)?.first().ok_or_else(|| unknown(name))?;
        let by = |device: &Named| {
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

fn columns(options: &Options, mut devices: Vec<Named>) -> Result<(), Refusal> {
    let all = super::all()?;
    let fields = columns_of(options.value("options").unwrap_or(DEFAULT))?;
    if let Some(keys) = options.value("sort") {
        sort(&mut devices, keys, &all)?;
    }
    if devices.is_empty() {
        print(NONE);
        return Ok(());
    }
    let prefixed = options.has("nameprefixes");
    let quote = if options.has("unquoted") { "" } else { "'" };
    let cell = |column: &&Column, device: &Named| match value(column.name, device, &all) {
        value if prefixed => format!("DM_{}={quote}{value}{quote}", column.name.to_uppercase()),
        value => value,
    };
    let mut rows: Vec<Vec<String>> = Vec::new();
    if !options.has("noheadings") {
        rows.push(fields.iter().map(|column| column.heading.to_owned()).collect());
    }
    rows.extend(devices.iter().map(|device| fields.iter().map(|column| cell(column, device)).collect()));
    let separator = options.value("separator").or(options.has("noheadings").then_some(":"));
    let widths: Vec<usize> = fields
        .iter()
        .enumerate()
        .map(|(at, column)| rows.iter().map(|row| row[at].len()).max().unwrap_or(0).max(column.width))
        .collect();
    for (at, row) in rows.iter().enumerate() {
        // Headings stand left, also above numbers.
        let is_heading = at == 0 && !options.has("noheadings");
        let cells: Vec<String> = row
            .iter()
            .zip(&fields)
            .zip(&widths)
            .map(|((cell, column), width)| {
                match (separator.is_none() && !prefixed, column.is_number && !is_heading) {
                    (false, _) => cell.clone(),
                    (true, true) => format!("{cell:>width$}"),
                    (true, false) => format!("{cell:<width$}"),
                }
            })
            .collect();
        print(&format!("{}\n", cells.join(separator.unwrap_or(" "))));
    }
    Ok(())
}

/// How `-o` shows devices: by their numbers, by their names, or by those of the kernel's devices.
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
        Some(other) => Err(Refusal::of(format!("Option not recognised: {other}"))),
    }
}

pub(super) fn ls(options: &Options, devices: Vec<Named>) -> Result<(), Refusal> {
    let kind = options.value("target");
    let found: Vec<Named> = devices
        .into_iter()
        .filter(|(answer, _)| kind.is_none() || !of_kind(answer.targets.clone(), kind).is_empty())
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
            // So dmsetup has it.
            Shown::Numbers if kind.is_some() => format!("{major}, {minor}"),
            Shown::Name => info.name.clone(),
            Shown::Node => node(info).unwrap_or_else(|| format!("{major}:{minor}")),
            Shown::Numbers => format!("{major}:{minor}"),
        };
        print(&format!("{}\t({device})\n", info.name));
    }
    Ok(())
}

pub(super) fn deps(options: &Options, devices: Vec<Named>) -> Result<(), Refusal> {
    if devices.is_empty() {
        print(NONE);
    }
    let shown = shown(options)?;
    for (answer, info) in devices {
        let is_one = options.names.len() == 1;
        let mut text = if is_one { String::new() } else { format!("{}: ", info.name) };
        let _ = write!(text, "{} dependencies\t:", answer.info.devices.len());
        // The kernel puts each that it opens before the others.
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

/// The name of the kernel's device that shows it.
fn node(info: &DeviceInfo) -> Option<String> {
    let nodes = info.exports.iter().filter_map(|export| export.address.strip_prefix("/dev/"));
    nodes.map(str::to_owned).next()
}

/// The name of a device with these numbers; what has none is shown as it is.
fn block_name(device: &str) -> String {
    let target = std::fs::read_link(format!("/sys/dev/block/{device}")).ok().filter(|_| is_numbers(device));
    let name = target.and_then(|target| Some(target.file_name()?.to_string_lossy().into_owned()));
    name.unwrap_or_else(|| device.to_owned())
}

fn is_numbers(device: &str) -> bool {
    device.split_once(':').is_some_and(|(a, b)| a.parse::<u32>().is_ok() && b.parse::<u32>().is_ok())
}

/// Those of some kinds.
pub(super) fn target_versions(wanted: &[String]) -> Result<(), Refusal> {
    if wanted.is_empty() {
        targets();
    }
    for name in wanted {
        let kinds = engine::tables::kinds();
        let Some((name, [major, minor, patch])) = kinds.into_iter().find(|(known, _)| known == name) else {
            return Err(Refusal::ioctl("target-version", name, super::EINVAL, ""));
        };
        print(&format!("{name:<16} v{major}.{minor}.{patch}\n"));
    }
    Ok(())
}

pub(super) fn targets() {
    for (name, [major, minor, patch]) in engine::tables::kinds() {
        print(&format!("{name:<16} v{major}.{minor}.{patch}\n"));
    }
}
