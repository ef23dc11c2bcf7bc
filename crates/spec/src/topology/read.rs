//! Parses TOML into a topology. Parsing continues after a problem, so that all problems are reported.

use super::{DEPTH_MAX, DeviceSpec, ExportKind, ExportSpec, NbdOptions, Problem, QUEUES_MAX, Topology};
use crate::{
    DeviceName, ExportOptions, ExportRow, LayerSpec, NBD_EXPORT_KEYS, NbdExportSpec, StackSpec, TableSpec,
    TlsMode, TlsSpec, export_rows,
};
use std::fmt::Display;
use std::path::Path;
use std::str::FromStr;
use toml::Spanned;
use toml::de::{DeTable, DeValue};

const TOP_KEYS: &[&str] = &["device", "export", "nbd-limits", "poll", "queues", "ring"];
const DEVICE_KEYS: &[&str] = &[
    "stack",
    "table",
    "table-base",
    "multipath",
    "layers",
    "limits",
    "scheduler",
    "depth",
    "slow",
    "io_timeout",
];
/// The keys of an export: its device, one of the kinds, and those of NBD.
fn export_keys() -> Vec<&'static str> {
    let kinds = export_rows().iter().map(|row| row.kind);
    let nbd = NBD_EXPORT_KEYS.iter().map(|row| row.key);
    ["device"].into_iter().chain(kinds).chain(nbd).collect()
}

pub(super) fn topology(text: &str, base: &Path) -> (Topology, Vec<Problem>) {
    let mut reader = Reader { text, base, problems: Vec::new() };
    let topology = match DeTable::parse(text) {
        Ok(table) => reader.topology(table.get_ref()),
        Err(error) => {
            let line = error.span().map_or(0, |span| reader.line(span.start));
            reader.problems.push(Problem::new(line, "", format_args!("not TOML: {}", error.message())));
            Topology::default()
        }
    };
    (topology, reader.problems)
}

struct Reader<'a> {
    text: &'a str,
    base: &'a Path,
    problems: Vec<Problem>,
}

/// A table with its position in the file, for messages.
#[derive(Clone, Copy)]
struct At<'a> {
    table: &'a DeTable<'a>,
    path: &'a str,
    line: u32,
}

impl Reader<'_> {
    fn line(&self, offset: usize) -> u32 {
        let before = self.text.as_bytes().get(..offset).unwrap_or_default();
        1 + before.iter().filter(|byte| **byte == b'\n').count() as u32
    }

    fn problem(&mut self, offset: usize, key: impl Into<String>, why: impl Display) {
        let line = self.line(offset);
        self.problems.push(Problem::new(line, key, why));
    }

    fn topology(&mut self, table: &DeTable<'_>) -> Topology {
        let at = At { table, path: "", line: 0 };
        self.known_keys(at, TOP_KEYS);
        let mut topology = Topology {
            ring: self.parsed(at, "ring").unwrap_or_default(),
            poll: self.flag(at, "poll").unwrap_or_default(),
            queues: self.number(at, "queues", QUEUES_MAX),
            nbd_limits: self.parsed(at, "nbd-limits").unwrap_or_default(),
            ..Topology::default()
        };
        if let Some(value) = table.get("device") {
            topology.devices = self.devices(value);
        }
        if let Some(value) = table.get("export") {
            topology.exports = self.exports(value);
        }
        if topology.devices.is_empty() && self.problems.is_empty() {
            self.problem(0, "device", "there is none (write [device.NAME] and stack = \"…\")");
        }
        for device in &topology.devices {
            if !topology.exports.iter().any(|export| export.device == device.name) {
                topology.exports.push(ExportSpec {
                    device: device.name.clone(),
                    kind: ExportKind::Default(NbdOptions {
                        name: device.name.to_string(),
                        tls: TlsSpec::default(),
                    }),
                    line: device.line,
                });
            }
        }
        topology
    }

    fn devices(&mut self, value: &Spanned<DeValue<'_>>) -> Vec<DeviceSpec> {
        let Some(table) = value.get_ref().as_table() else {
            self.wrong_type(value, "device", "[device.NAME] tables");
            return Vec::new();
        };
        let mut entries: Vec<_> = table.iter().collect();
        entries.sort_by_key(|(name, _)| name.span().start);
        entries.into_iter().filter_map(|(name, value)| self.device(name, value)).collect()
    }

    fn device(
        &mut self,
        name: &Spanned<std::borrow::Cow<'_, str>>,
        value: &Spanned<DeValue<'_>>,
    ) -> Option<DeviceSpec> {
        let path = format!("device.{}", name.get_ref());
        let Some(table) = value.get_ref().as_table() else {
            self.wrong_type(value, &path, "a table");
            return None;
        };
        let line = self.line(name.span().start);
        let at = At { table, path: &path, line };
        let name = name.get_ref().parse().map_err(|why| self.problem(name.span().start, &path, why)).ok();
        self.known_keys(at, DEVICE_KEYS);
        let stack = match (table.get("stack"), table.get("table")) {
            (None, Some(_)) => self.parsed(at, "table").map(StackSpec::Table),
            (Some(_), Some(other)) => {
                let why = "it has a stack, too (leave one of them out)";
                self.problem(other.span().start, join(&path, "table"), why);
                None
            }
            _ => {
                self.required(at, "stack", "stack = \"file:disk.img\"");
                self.parsed(at, "stack")
            }
        };
        let paths = self.parsed(at, "multipath");
        let table_base = self.string(at, "table-base");
        if table_base.is_some() && !matches!(stack, None | Some(StackSpec::Table(_))) {
            let why = "only a table has a folder of its own (leave it out)";
            self.problems.push(Problem::new(line, join(&path, "table-base"), why));
        }
        let stack = match (stack, paths) {
            (Some(StackSpec::Table(table)), paths) => {
                // The base is absolute, as in tables that are loaded later, so that both share open files.
                let base = std::path::absolute(self.base).unwrap_or_else(|_| self.base.to_owned());
                let base = table_base.map_or(base.clone(), |folder| base.join(folder));
                let paths = paths.unwrap_or(table.paths);
                Some(StackSpec::Table(TableSpec { paths, ..table.rooted(&base) }))
            }
            (stack, _) => stack,
        };
        let layers = self.layers(at);
        let layers = self.scheduled(at, layers);
        let limits = self.limits(at);
        let depth = self.number(at, "depth", DEPTH_MAX);
        let slow = self.time(at, "slow");
        let io_timeout = self.time(at, "io_timeout");
        let (name, stack): (DeviceName, StackSpec) = (name?, stack?);
        let stack = stack.rooted(self.base);
        Some(DeviceSpec { name, stack, layers, limits, depth, slow, io_timeout, line })
    }

    /// Reads a time, written as on a command line.
    fn time(&mut self, at: At<'_>, key: &str) -> Option<std::time::Duration> {
        let value = at.table.get(key)?;
        let path = join(at.path, key);
        let Some(text) = value.get_ref().as_str() else {
            self.wrong_type(value, &path, "a string such as \"20ms\"");
            return None;
        };
        match crate::parse_time(text) {
            Ok(time) => Some(time),
            Err(why) => {
                self.problem(value.span().start, path, why);
                None
            }
        }
    }

    fn layers(&mut self, at: At<'_>) -> Vec<LayerSpec> {
        let Some(value) = at.table.get("layers") else { return Vec::new() };
        let key = join(at.path, "layers");
        let Some(array) = value.get_ref().as_array() else {
            self.wrong_type(value, &key, "an array of strings");
            return Vec::new();
        };
        let base = self.base;
        let items = array.iter().enumerate();
        let parsed = items.filter_map(|(i, item)| self.parse(item, &format!("{key}[{i}]")));
        parsed.map(|layer: LayerSpec| layer.rooted(base)).collect()
    }

    /// Adds the scheduler of the key `scheduler` to the layers.
    fn scheduled(&mut self, at: At<'_>, layers: Vec<LayerSpec>) -> Vec<LayerSpec> {
        let Some(value) = at.table.get("scheduler") else { return layers };
        let key = join(at.path, "scheduler");
        let Some(text) = value.get_ref().as_str() else {
            self.wrong_type(value, &key, "a string");
            return layers;
        };
        match crate::parse_scheduler(text) {
            Ok(choice) => crate::with_scheduler(&layers, choice),
            Err(why) => {
                self.problem(value.span().start, key, why);
                layers
            }
        }
    }

    fn limits(&mut self, at: At<'_>) -> Option<String> {
        let value = at.table.get("limits")?;
        let key = join(at.path, "limits");
        let text = match value.get_ref() {
            DeValue::String(text) => text.to_string(),
            DeValue::Table(table) => {
                let items = table.iter().map(|(key, value)| match value.get_ref() {
                    DeValue::String(text) => format!("{}={text}", key.get_ref()),
                    DeValue::Integer(number) => format!("{}={}", key.get_ref(), number.as_str()),
                    DeValue::Boolean(is) => format!("{}={}", key.get_ref(), u8::from(*is)),
                    _ => key.get_ref().to_string(),
                });
                items.collect::<Vec<_>>().join(",")
            }
            _ => {
                self.wrong_type(value, &key, "a table or a string");
                return None;
            }
        };
        match crate::check_limits(&text) {
            Ok(()) => Some(text),
            Err(why) => {
                self.problem(value.span().start, key, why);
                None
            }
        }
    }

    fn exports(&mut self, value: &Spanned<DeValue<'_>>) -> Vec<ExportSpec> {
        let Some(array) = value.get_ref().as_array() else {
            self.wrong_type(value, "export", "[[export]] tables");
            return Vec::new();
        };
        array
            .iter()
            .enumerate()
            .filter_map(|(i, value)| self.export(&format!("export[{i}]"), value))
            .collect()
    }

    fn export(&mut self, path: &str, value: &Spanned<DeValue<'_>>) -> Option<ExportSpec> {
        let Some(table) = value.get_ref().as_table() else {
            self.wrong_type(value, path, "a table");
            return None;
        };
        let line = self.line(value.span().start);
        let at = At { table, path, line };
        self.known_keys(at, &export_keys());
        self.required(at, "device", "device = \"NAME\"");
        let device: Option<DeviceName> = self.parsed(at, "device");
        let name = self.string(at, "name");
        let mode: Option<TlsMode> = self.parsed(at, "tls");
        let certificates = self.string(at, "tls-certificates").map(|path| self.base.join(path));
        let verify_peer = self.flag(at, "tls-verify-peer").unwrap_or_default();
        let tls = TlsSpec::new(mode, certificates, verify_peer)
            .map_err(|why| self.problems.push(Problem::new(line, join(path, "tls"), why)));
        let device = device?;
        let options = NbdOptions {
            name: name.unwrap_or_else(|| device.to_string()),
            tls: tls.clone().unwrap_or_default(),
        };
        let given: Vec<_> =
            export_rows().iter().filter_map(|row| Some((row, table.get(row.kind)?))).collect();
        if given.len() > 1 {
            let why = "it is shown in two ways (write an [[export]] for each)";
            self.problems.push(Problem::new(line, path, why));
        }
        let kinds: Vec<ExportKind> =
            given.iter().filter_map(|(row, value)| self.export_kind(path, row, value, &options)).collect();
        let is_other = given.iter().any(|(row, _)| row.kind != NbdExportSpec::ROW.kind);
        if is_other && options.tls != TlsSpec::default() {
            let why = "TLS is for NBD, and this export is another (leave it out)";
            self.problems.push(Problem::new(line, join(path, "tls"), why));
        }
        tls.ok()?;
        let kind = kinds.into_iter().next().unwrap_or(ExportKind::Default(options));
        Some(ExportSpec { device, kind: kind.rooted(self.base), line })
    }

    /// Reads the key of an export: a string with the value of its command line flag, or `true` or a number
    /// where that value is optional. `None`: the value is `false`, or was reported as a problem.
    fn export_kind(
        &mut self,
        path: &str,
        row: &ExportRow,
        value: &Spanned<DeValue<'_>>,
        options: &NbdOptions,
    ) -> Option<ExportKind> {
        let key = join(path, row.kind);
        let text = match value.get_ref() {
            DeValue::String(text) => text.as_ref(),
            DeValue::Boolean(true) if row.value_optional => "",
            DeValue::Boolean(false) if row.value_optional => return None,
            DeValue::Integer(number) if row.value_optional => number.as_str(),
            _ => {
                let expected = if row.value_optional { "a number, true or a string" } else { "a string" };
                self.wrong_type(value, &key, expected);
                return None;
            }
        };
        let parsed = ExportKind::parse(row.kind, text, options);
        parsed.map_err(|why| self.problem(value.span().start, key, why)).ok()
    }

    fn known_keys(&mut self, at: At<'_>, known: &[&str]) {
        for key in at.table.keys() {
            if !known.contains(&key.get_ref().as_ref()) {
                let near = options::did_you_mean(key.get_ref(), known.iter().copied());
                let why = format!("unknown key ({near}keys: {})", known.join(", "));
                self.problem(key.span().start, join(at.path, key.get_ref()), why);
            }
        }
    }

    fn required(&mut self, at: At<'_>, key: &str, example: &str) {
        if !at.table.contains_key(key) {
            let why = format!("it has no {key} (write {example})");
            self.problems.push(Problem::new(at.line, at.path, why));
        }
    }

    fn wrong_type(&mut self, value: &Spanned<DeValue<'_>>, key: &str, expected: &str) {
        let why = format!("this is {}, not {expected}", value.get_ref().type_str());
        self.problem(value.span().start, key, why);
    }

    fn string(&mut self, at: At<'_>, key: &str) -> Option<String> {
        self.parsed(at, key)
    }

    fn parsed<T: FromStr<Err: Display>>(&mut self, at: At<'_>, key: &str) -> Option<T> {
        self.parse(at.table.get(key)?, &join(at.path, key))
    }

    fn parse<T: FromStr<Err: Display>>(&mut self, value: &Spanned<DeValue<'_>>, key: &str) -> Option<T> {
        let Some(text) = value.get_ref().as_str() else {
            self.wrong_type(value, key, "a string");
            return None;
        };
        text.parse().map_err(|why| self.problem(value.span().start, key, why)).ok()
    }

    fn flag(&mut self, at: At<'_>, key: &str) -> Option<bool> {
        let value = at.table.get(key)?;
        let flag = value.get_ref().as_bool();
        if flag.is_none() {
            self.wrong_type(value, &join(at.path, key), "true or false");
        }
        flag
    }

    fn number(&mut self, at: At<'_>, key: &str, max: u16) -> Option<u16> {
        let value = at.table.get(key)?;
        let number =
            value.get_ref().as_integer().and_then(|n| u16::from_str_radix(n.as_str(), n.radix()).ok());
        match number {
            Some(number) if (1..=max).contains(&number) => Some(number),
            _ => {
                self.problem(
                    value.span().start,
                    join(at.path, key),
                    format!("this is not a number from 1 to {max}"),
                );
                None
            }
        }
    }
}

fn join(path: &str, key: &str) -> String {
    if path.is_empty() { key.to_owned() } else { format!("{path}.{key}") }
}
