//! `dmsetup ls --tree`: devices with the devices that they use, starting with devices that no other one uses.

use super::options::Options;
use super::report::{numbers, opens};
use super::{Refusal, TableDevice};
use crate::locale::is_utf8;
use std::fmt::Write as _;

/// Characters of the branches: one with siblings below it, the last one, and the continuation siblings deeper
/// levels.
struct Signs {
    middle: &'static str,
    last: &'static str,
    on: &'static str,
}

const ASCII: Signs = Signs { middle: " |-", last: " `-", on: " | " };
const UTF: Signs = Signs { middle: " ├─", last: " └─", on: " │ " };

/// The options of `-o`.
struct Style {
    signs: &'static Signs,
    numbers: bool,
    active: bool,
    rw: bool,
    open: bool,
    uuid: bool,
    inverted: bool,
}

fn style(options: &Options) -> Result<Style, Refusal> {
    let signs = if is_utf8() { &UTF } else { &ASCII };
    let mut style =
        Style { signs, numbers: true, active: false, rw: false, open: false, uuid: false, inverted: false };
    for word in options.value("options").into_iter().flat_map(|list| list.split(',')) {
        match word {
            "ascii" => style.signs = &ASCII,
            "utf" => style.signs = &UTF,
            "device" => style.numbers = true,
            "nodevice" => style.numbers = false,
            "active" => style.active = true,
            "rw" => style.rw = true,
            "open" => style.open = true,
            "uuid" => style.uuid = true,
            "inverted" => style.inverted = true,
            // Lines are never truncated.
            "notrunc" => {}
            other => return Err(Refusal::of(format!("Tree options not recognised: {other}"))),
        }
    }
    Ok(style)
}

pub(super) fn print(options: &Options, all: &[TableDevice]) -> Result<(), Refusal> {
    let style = style(options)?;
    let mut text = String::new();
    if style.inverted {
        crate::failure::print(&inverted(all, &style));
        return Ok(());
    }
    for device in all {
        // Other devices are shown below their users.
        if !all.iter().any(|(other, _)| other.info.devices.contains(&device.1.name)) {
            text += &format!("{}\n", line(device, &style));
            branches(device, all, &style, "", &mut text);
        }
    }
    crate::failure::print(&text);
    Ok(())
}

/// Draws the inverted tree, from the lowest devices up to their users.
fn inverted(all: &[TableDevice], style: &Style) -> String {
    let (mut text, mut shown) = (String::new(), Vec::new());
    for device in all {
        let below = &device.0.info.devices;
        if below.is_empty() {
            text += &format!("{}\n", line(device, style));
            users(&device.1.name, all, style, "", &mut text);
        }
        for name in below.iter().rev() {
            if !shown.contains(&name) && !all.iter().any(|(_, info)| info.name == *name) {
                shown.push(name);
                text += &format!(" ({name})\n");
                users(name, all, style, "", &mut text);
            }
        }
    }
    text
}

fn users(name: &String, all: &[TableDevice], style: &Style, before: &str, text: &mut String) {
    let users: Vec<&TableDevice> =
        all.iter().filter(|(answer, _)| answer.info.devices.contains(name)).collect();
    for (number, user) in users.iter().enumerate() {
        let is_last = number + 1 == users.len();
        let sign = if is_last { style.signs.last } else { style.signs.middle };
        // Writing to a string does not fail.
        let _ = writeln!(text, "{before}{sign}{}", line(user, style));
        let on = if is_last { "   " } else { style.signs.on };
        self::users(&user.1.name, all, style, &format!("{before}{on}"), text);
    }
}

fn line((answer, info): &TableDevice, style: &Style) -> String {
    let mut text = info.name.clone();
    if style.numbers {
        let (major, minor) = numbers(info, &answer.info);
        // Writing to a string does not fail.
        let _ = write!(text, " ({major}:{minor})");
    }
    let table = &answer.info;
    let facts = [
        style.active.then(|| if table.suspended { "SUSPENDED" } else { "ACTIVE" }.to_owned()),
        style.rw.then(|| if table.read_only { "RO" } else { "RW" }.to_owned()),
        style.open.then(|| opens(info).to_string()),
        style.uuid.then(|| table.uuid.clone()),
    ];
    let facts: Vec<String> = facts.into_iter().flatten().collect();
    if !facts.is_empty() {
        let _ = write!(text, " [{}]", facts.join(", "));
    }
    text
}

fn branches((answer, _): &TableDevice, all: &[TableDevice], style: &Style, before: &str, text: &mut String) {
    let below = &answer.info.devices;
    // As in `deps`, the device that was opened last comes first.
    for (number, name) in below.iter().rev().enumerate() {
        let is_last = number + 1 == below.len();
        let sign = if is_last { style.signs.last } else { style.signs.middle };
        match all.iter().find(|(_, info)| info.name == *name) {
            Some(device) => {
                let _ = writeln!(text, "{before}{sign}{}", line(device, style));
                let on = if is_last { "   " } else { style.signs.on };
                branches(device, all, style, &format!("{before}{on}"), text);
            }
            None => {
                let _ = writeln!(text, "{before}{sign} ({name})");
            }
        }
    }
}
