//! `limits`: the queue limits of a device, shown and changed while it is served.

use crate::args::LimitsArgs;
use crate::failure::{Failure, print};
use crate::listing::{block_on, client_of, run_dir};
use crate::progress::shown;
use engine::change::Change;
use engine::change::limits::{Attribute, Field, LimitOverrides, ParseLimitsError, QueueLimits, Unit};
use engine::control::DeviceInfo;
use engine::spec::{LayerSpec, unknown_limit};
use std::collections::BTreeMap;
use std::fmt::Write;
use std::process::ExitCode;

pub(crate) fn limits(args: &LimitsArgs) -> Result<ExitCode, Failure> {
    let set = args.set.join(",");
    let wanted: LimitOverrides = set.parse().map_err(|why| match why {
        ParseLimitsError::UnknownName { name } => Failure::usage("limits", &args.name, unknown_limit(&name)),
        why => Failure::usage("limits", &args.name, why),
    })?;
    let run = run_dir("limits")?;
    let client = client_of(&run, "limits", &args.name)?;
    let fail = |why: engine::control::ClientError| Failure::new("limits", &args.name, why);
    let changes = args.reset || !wanted.is_empty();
    if changes {
        let change = Change::Limits { set: wanted.to_string(), reset: args.reset };
        let draining = format!("draining {}", args.name);
        block_on("limits", shown(&draining, client.change(&args.name, &change)))?.map_err(fail)?;
    }
    let info = block_on("limits", client.device(&args.name))?.map_err(fail)?;
    if args.output.json {
        print(&json(&info));
    } else if changes {
        let names: Vec<&str> = wanted.names().collect();
        print(&table(&info, |name| names.is_empty() || names.contains(&name)));
        print(&notified(&info));
    } else {
        print(&table(&info, |_| true));
        print(&notified(&info));
    }
    Ok(ExitCode::SUCCESS)
}

/// Returns the limits that were set for the device itself.
fn set(info: &DeviceInfo) -> LimitOverrides {
    match info.layers.last().map(|layer| layer.parse()) {
        Some(Ok(LayerSpec::Split(text))) => text.parse().unwrap_or_default(),
        _ => LimitOverrides::default(),
    }
}

fn unit(field: &Field) -> &'static str {
    match field.unit {
        Unit::Bytes => "bytes",
        Unit::Sectors => "sectors",
        Unit::Mask => "mask",
        Unit::Count => "",
    }
}

fn value(field: &Field, value: u64) -> String {
    if field.unit == Unit::Mask { format!("{value:#x}") } else { value.to_string() }
}

/// Returns the limit's name and value in sysfs, if sysfs shows it.
fn attribute(field: &Field, value: u64) -> Option<(&'static str, u64)> {
    // Two sysfs files may show one field: the second name of logical_block_size is an older one.
    let is_of =
        |attribute: &&Attribute| attribute.field().name == field.name && attribute.name != "hw_sector_size";
    let attribute = Attribute::ALL.iter().find(is_of)?;
    Some((attribute.name, attribute.shown(value)))
}

/// Formats limits as columns as wide as their widest entry, with two spaces between.
fn table(info: &DeviceInfo, is_wanted: impl Fn(&str) -> bool) -> String {
    let set = set(info);
    let set: Vec<&str> = set.names().collect();
    let mut rows = vec![["LIMIT", "VALUE", "UNIT", "SYSFS", "", "STATE"].map(str::to_owned)];
    for field in QueueLimits::FIELDS.into_iter().filter(|field| is_wanted(field.name)) {
        let Some(&number) = info.limits.get(field.name) else { continue };
        let (name, in_sysfs) = match attribute(&field, number) {
            Some((name, number)) => (name, number.to_string()),
            None => ("", String::new()),
        };
        let state = match field.why_fixed() {
            Some(why) => format!("read-only: {why}"),
            None if set.contains(&field.name) => "set".to_owned(),
            None => String::new(),
        };
        let number = value(&field, number);
        rows.push([field.name.into(), number, unit(&field).into(), name.into(), in_sysfs, state]);
    }
    let width = |i: usize| rows.iter().map(|row| row[i].len()).max().unwrap_or_default();
    let widths: [usize; 6] = std::array::from_fn(width);
    let mut text = String::new();
    for [name, number, unit, attribute, in_sysfs, state] in &rows {
        let line = format!(
            "{name:<0$}  {number:>1$}  {unit:<2$}  {attribute:<3$}  {in_sysfs:>4$}  {state}",
            widths[0], widths[1], widths[2], widths[3], widths[4]
        );
        let _ = writeln!(text, "{}", line.trim_end());
    }
    text
}

/// Formats the notifications of changed limits that the exports' hosts received.
fn notified(info: &DeviceInfo) -> String {
    let mut text = String::new();
    for export in &info.exports {
        if let Some(state) = export.details.get("limits") {
            let _ = writeln!(text, "{}: {state}", export.address);
        }
    }
    text
}

fn json(info: &DeviceInfo) -> String {
    let mut in_sysfs = BTreeMap::new();
    let mut read_only = BTreeMap::new();
    for field in QueueLimits::FIELDS {
        let Some(&number) = info.limits.get(field.name) else { continue };
        if let Some((name, number)) = attribute(&field, number) {
            in_sysfs.insert(name, number);
        }
        if let Some(why) = field.why_fixed() {
            read_only.insert(field.name, why);
        }
    }
    let notified: BTreeMap<&str, &String> = info
        .exports
        .iter()
        .filter_map(|export| Some((export.address.as_str(), export.details.get("limits")?)))
        .collect();
    let all = serde_json::json!({
        "name": info.name,
        "limits": info.limits,
        "sysfs": in_sysfs,
        "set": set(info).to_string(),
        "read_only": read_only,
        "notified": notified,
    });
    // Serialization cannot fail: the structures have only text as keys.
    format!("{}\n", serde_json::to_string_pretty(&all).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn info(layers: &[&str], limits: &QueueLimits) -> DeviceInfo {
        DeviceInfo {
            name: "disk".into(),
            stack: "ram:1M".into(),
            layers: layers.iter().map(|&layer| layer.to_owned()).collect(),
            size: 1 << 20,
            logical_block_size: 512,
            read_only: false,
            limits: limits.values().map(|(field, value)| (field.name.to_owned(), value)).collect(),
            exports: Vec::new(),
            backend: BTreeMap::new(),
            queues: Vec::new(),
            pid: 1,
            uptime_ms: 0,
        }
    }

    #[test]
    fn every_limit_has_a_line_with_its_sysfs_name_and_the_reason_if_it_is_fixed() {
        let mut limits = QueueLimits::default();
        "max_sectors=255".parse::<LimitOverrides>().unwrap().apply(&mut limits).unwrap();
        let text = table(&info(&["split,max_sectors=255"], &limits), |_| true);
        assert_eq!(text.lines().count(), 1 + QueueLimits::FIELDS.len());
        let row = |name: &str| {
            let line = text.lines().find(|line| line.split_whitespace().next() == Some(name)).expect(name);
            line.split_whitespace().collect::<Vec<_>>().join(" ")
        };
        assert_eq!(row("max_sectors"), "max_sectors 255 sectors max_sectors_kb 127 set");
        assert_eq!(row("max_segments"), "max_segments 128");
        assert_eq!(row("seg_boundary_mask"), "seg_boundary_mask 0xffffffff mask");
        assert!(row("max_write_streams").contains("read-only: nothing here has write streams"));
        let json: serde_json::Value = serde_json::from_str(&json(&info(&[], &limits))).unwrap();
        assert_eq!(
            (&json["limits"]["max_sectors"], &json["sysfs"]["max_sectors_kb"]),
            (&255.into(), &127.into())
        );
    }
}
