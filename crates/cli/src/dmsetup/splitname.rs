//! dmsetup's words about names alone: `splitname`, which takes LVM's names apart, and `mangle`.

use super::grid::{self, Column, text};
use super::options::Options;
use super::select::{self, Field};
use super::{Named, Refusal};
use crate::failure::print;

const COLUMNS: [Column; 3] =
    [text("vg_name", "VG", 4), text("lv_name", "LV", 4), text("lv_layer", "LVLayer", 7)];
const DEFAULT: &str = "vg_name,lv_name,lv_layer";
/// Whose names can be taken apart.
const LVM: &str = "LVM";

/// Volume group, logical volume and layer of a name of LVM's: hyphens part them, and two stand for one.
pub(super) fn parts(name: &str) -> [String; 3] {
    let mut parts = <[String; 3]>::default();
    let (mut at, mut chars) = (0, name.chars().peekable());
    while let Some(c) = chars.next() {
        if c == '-' && chars.next_if_eq(&'-').is_none() {
            at += 1;
        } else if let Some(part) = parts.get_mut(at) {
            part.push(c);
        }
    }
    parts
}

/// What stands before the first hyphen of a uuid says who made a device.
pub(super) fn subsystem(uuid: &str) -> &str {
    uuid.split_once('-').map_or("", |(first, _)| first)
}

/// The parts of a device's name, if it is LVM's.
pub(super) fn of(name: &str, uuid: &str) -> [String; 3] {
    if subsystem(uuid) == LVM { parts(name) } else { Default::default() }
}

pub(super) fn split(options: &Options) -> Result<(), Refusal> {
    let fields = grid::named(options.value("options").unwrap_or(DEFAULT), DEFAULT, &COLUMNS)?;
    let is_lvm = options.names.get(1).is_none_or(|subsystem| subsystem == LVM);
    let parts = if is_lvm { parts(&options.names[0]) } else { Default::default() };
    let value = |field: &str| {
        let at = COLUMNS.iter().position(|known| known.name == field);
        at.map_or_else(String::new, |at| parts[at].clone())
    };
    // One name is in its order whatever it is sorted by, but not by what is no field.
    if let Some(keys) = options.value("sort") {
        keys.split(',').try_for_each(|key| {
            grid::named(key.trim_start_matches(['+', '-']), DEFAULT, &COLUMNS).map(drop)
        })?;
    }
    let known: Vec<Field> = COLUMNS.iter().map(|column| (column.name, column.is_number)).collect();
    if select::parse(options.value("select").unwrap_or_default(), &known)?.takes(&value) {
        grid::show(options, &fields, &[fields.iter().map(|column| value(column.name)).collect()]);
    }
    Ok(())
}

/// Only names that need no mangling are taken here.
pub(super) fn mangle(devices: &[Named]) {
    for (answer, info) in devices {
        let (uuid, what) = match answer.info.uuid.as_str() {
            "" => ("[no UUID]", "name"),
            uuid => (uuid, "name and UUID"),
        };
        print(&format!("{}: {uuid}: {what} already in correct form\n", info.name));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_volumes_come_apart_at_single_hyphens() {
        for (name, wanted) in [
            ("vg-lv", ["vg", "lv", ""]),
            ("vg--x-lv--y-real", ["vg-x", "lv-y", "real"]),
            ("a--b--c-d", ["a-b-c", "d", ""]),
            ("plain", ["plain", "", ""]),
            ("vg-lv_tmeta", ["vg", "lv_tmeta", ""]),
            ("", ["", "", ""]),
            ("a-b-c-d", ["a", "b", "c"]),
        ] {
            assert_eq!(parts(name), wanted, "{name}");
        }
        assert_eq!(of("vg-lv", "LVM-abc"), ["vg", "lv", ""]);
        assert_eq!(of("vg-lv", "mpath-abc"), ["", "", ""]);
    }
}
