//! dmsetup's reports: `info`, `ls`, `deps`, `targets`.

use super::options::Options;
use super::{Named, Refusal, of_kind};
use crate::failure::print;
use engine::control::DeviceInfo;
use engine::tables::TableInfo;
use std::fmt::Write as _;
use std::os::unix::fs::MetadataExt;

const NONE: &str = "No devices found\n";

/// The numbers of the kernel's device that shows it; where there is none, 0 and its number in its process.
fn numbers(info: &DeviceInfo, table: &TableInfo) -> (u32, u32) {
    let nodes = info.exports.iter().filter(|export| export.address.starts_with("/dev/"));
    let mut found = nodes.filter_map(|export| std::fs::metadata(&export.address).ok());
    found.next().map_or((0, table.number as u32), |metadata| {
        let device = metadata.rdev();
        (rustix::fs::major(device), rustix::fs::minor(device))
    })
}

fn users(info: &DeviceInfo) -> u64 {
    info.exports.iter().map(|export| export.connections).sum()
}

pub(super) fn info(options: &Options, devices: Vec<Named>) -> Result<(), Refusal> {
    if options.has("columns") || options.has("options") {
        return columns(options, &devices);
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
        let _ = writeln!(text, "Read Ahead:        256");
        let _ = writeln!(text, "Tables present:    {present}");
        let _ = writeln!(text, "Open count:        {}", users(&info));
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

/// A column: its name, heading, least width, and whether it is set to the right.
const FIELDS: [(&str, &str, usize, bool); 12] = [
    ("name", "Name", 16, false),
    ("major", "Maj", 3, true),
    ("minor", "Min", 3, true),
    ("attr", "Stat", 4, false),
    ("open", "Open", 4, true),
    ("segments", "Targ", 4, true),
    ("events", "Event", 6, true),
    ("uuid", "UUID", 32, false),
    ("suspended", "Suspended", 9, false),
    ("readonly", "Read-only", 10, false),
    ("tables_loaded", "Tables", 6, false),
    ("devno", "DevNo", 5, false),
];
const DEFAULT: &str = "name,major,minor,attr,open,segments,events,uuid";

fn value(field: &str, info: &DeviceInfo, table: &TableInfo) -> String {
    let (major, minor) = numbers(info, table);
    match field {
        "name" => info.name.clone(),
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
        "open" => users(info).to_string(),
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
        _ => format!("{major}:{minor}"),
    }
}

fn columns(options: &Options, devices: &[Named]) -> Result<(), Refusal> {
    let wanted = options.value("options").unwrap_or(DEFAULT).split(',');
    let fields = wanted.map(|name| {
        let field = FIELDS.iter().find(|(known, ..)| *known == name);
        field.ok_or_else(|| Refusal(vec![format!("Unrecognised field: {name}")]))
    });
    let fields = fields.collect::<Result<Vec<_>, Refusal>>()?;
    if devices.is_empty() {
        print(NONE);
        return Ok(());
    }
    let mut rows: Vec<Vec<String>> = Vec::new();
    if !options.has("noheadings") {
        rows.push(fields.iter().map(|(_, heading, ..)| (*heading).to_owned()).collect());
    }
    rows.extend(
        devices
            .iter()
            .map(|(answer, info)| fields.iter().map(|(name, ..)| value(name, info, &answer.info)).collect()),
    );
    let separator = options.value("separator");
    let aligned = separator.is_none();
    let widths: Vec<usize> = fields
        .iter()
        .enumerate()
        .map(|(at, (_, _, least, _))| rows.iter().map(|row| row[at].len()).max().unwrap_or(0).max(*least))
        .collect();
    for row in rows {
        let cells: Vec<String> = row
            .iter()
            .zip(&fields)
            .zip(&widths)
            .map(|((cell, (.., right)), width)| match (aligned, right) {
                (false, _) => cell.clone(),
                (true, true) => format!("{cell:>width$}"),
                (true, false) => format!("{cell:<width$}"),
            })
            .collect();
        print(&format!("{}\n", cells.join(separator.unwrap_or(" "))));
    }
    Ok(())
}

pub(super) fn ls(options: &Options, devices: Vec<Named>) -> Result<(), Refusal> {
    let kind = options.value("target");
    let shown: Vec<Named> = devices
        .into_iter()
        .filter(|(answer, _)| kind.is_none() || !of_kind(answer.targets.clone(), kind).is_empty())
        .collect();
    if shown.is_empty() {
        print(NONE);
    }
    for (answer, info) in &shown {
        let (major, minor) = numbers(info, &answer.info);
        if options.has("tree") {
            print(&format!("{} ({major}:{minor})\n", info.name));
            branches(&answer.info.devices, &shown, 1);
        } else {
            print(&format!("{}\t({major}:{minor})\n", info.name));
        }
    }
    Ok(())
}

fn branches(below: &[String], all: &[Named], depth: usize) {
    for (number, name) in below.iter().enumerate() {
        let elbow = if number + 1 == below.len() { "└─" } else { "├─" };
        let indent = " ".repeat(1 + 3 * (depth - 1));
        match all.iter().find(|(_, info)| info.name == *name) {
            Some((answer, info)) => {
                let (major, minor) = numbers(info, &answer.info);
                print(&format!("{indent}{elbow}{name} ({major}:{minor})\n"));
                branches(&answer.info.devices, all, depth + 1);
            }
            None => {
                print(&format!("{indent}{elbow} ({name})\n"));
            }
        }
    }
}

pub(super) fn deps(options: &Options, devices: Vec<Named>) -> Result<(), Refusal> {
    if devices.is_empty() {
        print(NONE);
    }
    for (answer, info) in devices {
        let mut text = if options.names.is_empty() { format!("{}: ", info.name) } else { String::new() };
        let _ = write!(text, "{} dependencies\t:", answer.info.devices.len());
        for device in &answer.info.devices {
            let _ = write!(text, " ({})", device.replacen(':', ", ", usize::from(is_numbers(device))));
        }
        print(&format!("{text}\n"));
    }
    Ok(())
}

fn is_numbers(device: &str) -> bool {
    device.split_once(':').is_some_and(|(a, b)| a.parse::<u32>().is_ok() && b.parse::<u32>().is_ok())
}

pub(super) fn targets() {
    for (name, [major, minor, patch]) in engine::tables::kinds() {
        print(&format!("{name:<16} v{major}.{minor}.{patch}\n"));
    }
}
