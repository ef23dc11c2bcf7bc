//! From TOML to a topology. Every problem is kept, and reading goes on.

use super::{DEPTH_MAX, DeviceSpec, ExportKind, ExportSpec, NbdOptions, Problem, QUEUES_MAX, Topology};
use crate::spec::{
    DeviceName, FuseSpec, LayerSpec, LoopSpec, NbdAddress, NbdDeviceSpec, StackSpec, TableSpec, TlsMode,
    TlsSpec, UblkSpec,
};
use std::fmt::Display;
use std::path::Path;
use std::str::FromStr;
use toml::Spanned;
use toml::de::{DeTable, DeValue};

const TOP_KEYS: &[&str] = &["device", "export", "nbd-limits", "poll", "queues", "ring"];
const DEVICE_KEYS: &[&str] =
    &["stack", "table", "multipath", "layers", "limits", "scheduler", "depth", "slow", "io_timeout"];
const EXPORT_KEYS: &[&str] = &[
    "device",
    "fuse",
    "loop",
    "nbd",
    "nbd-device",
    "name",
    "tls",
    "tls-certificates",
    "tls-verify-peer",
    "ublk",
];

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

/// A table with its place in the file, for messages.
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
        let stack = match (stack, paths) {
            (Some(StackSpec::Table(table)), paths) => {
                // A table that is loaded later comes with an absolute path, and shares what this one has open.
                let base = std::path::absolute(self.base).unwrap_or_else(|_| self.base.to_owned());
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

    /// A time as on a command line.
    fn time(&mut self, at: At<'_>, key: &str) -> Option<std::time::Duration> {
        let value = at.table.get(key)?;
        let path = join(at.path, key);
        let Some(text) = value.get_ref().as_str() else {
            self.wrong_type(value, &path, "a string such as \"20ms\"");
            return None;
        };
        match crate::spec::parse_time(text) {
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

    /// With the scheduler that is named.
    fn scheduled(&mut self, at: At<'_>, layers: Vec<LayerSpec>) -> Vec<LayerSpec> {
        let Some(value) = at.table.get("scheduler") else { return layers };
        let key = join(at.path, "scheduler");
        let Some(text) = value.get_ref().as_str() else {
            self.wrong_type(value, &key, "a string");
            return layers;
        };
        match crate::spec::parse_scheduler(text) {
            Ok(choice) => crate::spec::with_scheduler(&layers, choice),
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
        match crate::spec::check_limits(&text) {
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
        self.known_keys(at, EXPORT_KEYS);
        self.required(at, "device", "device = \"NAME\"");
        let device: Option<DeviceName> = self.parsed(at, "device");
        let address = self.parsed(at, "nbd").map(|address| match address {
            NbdAddress::Unix(path) => NbdAddress::Unix(self.base.join(path)),
            tcp @ NbdAddress::Tcp { .. } => tcp,
        });
        let name = self.string(at, "name");
        let mode: Option<TlsMode> = self.parsed(at, "tls");
        let certificates = self.string(at, "tls-certificates").map(|path| self.base.join(path));
        let verify_peer = self.flag(at, "tls-verify-peer").unwrap_or_default();
        let tls = TlsSpec::new(mode, certificates, verify_peer)
            .map_err(|why| self.problems.push(Problem::new(line, join(path, "tls"), why)));
        let device = device?;
        let options = NbdOptions { name: name.unwrap_or_else(|| device.to_string()), tls: tls.ok()? };
        let fuse: Option<FuseSpec> = self.parsed(at, "fuse");
        let (nbd_device, loop_device, ublk) = (self.nbd_device(at), self.loop_device(at), self.ublk(at));
        let ways = ["nbd", "fuse", "loop", "nbd-device", "ublk"].map(|key| at.table.contains_key(key));
        if ways.into_iter().filter(|given| *given).count() > 1 {
            let why = "it is shown in two ways (write an [[export]] for each)";
            self.problems.push(Problem::new(line, path, why));
        }
        if ways[1..].contains(&true) && options.tls != TlsSpec::default() {
            let why = "TLS is for NBD, and this export is another (leave it out)";
            self.problems.push(Problem::new(line, join(path, "tls"), why));
        }
        let fuse = fuse.map(|spec| ExportKind::Fuse(spec.rooted(self.base)));
        let other = fuse
            .or(nbd_device.map(ExportKind::NbdDevice))
            .or(loop_device.map(ExportKind::Loop))
            .or(ublk.map(ExportKind::Ublk));
        let kind = match (address, other) {
            (Some(address), _) => ExportKind::Nbd { address, options },
            (None, Some(kind)) => kind,
            (None, None) => ExportKind::Default(options),
        };
        Some(ExportSpec { device, kind, line })
    }

    /// A number, `true`, or both a number and options as on the command line.
    fn nbd_device(&mut self, at: At<'_>) -> Option<NbdDeviceSpec> {
        let value = at.table.get("nbd-device")?;
        let key = join(at.path, "nbd-device");
        match value.get_ref() {
            DeValue::Boolean(true) => Some(NbdDeviceSpec::default()),
            DeValue::Boolean(false) => None,
            DeValue::Integer(number) => self.parse_text(number.as_str(), value.span().start, &key),
            DeValue::String(text) => self.parse_text(text, value.span().start, &key),
            _ => {
                self.wrong_type(value, &key, "a number, true or a string");
                None
            }
        }
    }

    fn parse_text<T: FromStr<Err: Display>>(&mut self, text: &str, offset: usize, key: &str) -> Option<T> {
        text.parse().map_err(|why| self.problem(offset, key, why)).ok()
    }

    /// `loop = true`, or what `--loop=` takes.
    fn loop_device(&mut self, at: At<'_>) -> Option<LoopSpec> {
        match at.table.get("loop")?.get_ref().as_bool() {
            Some(wanted) => wanted.then(LoopSpec::default),
            None => self.parsed(at, "loop"),
        }
    }

    /// The same for ublk.
    fn ublk(&mut self, at: At<'_>) -> Option<UblkSpec> {
        let value = at.table.get("ublk")?;
        let key = join(at.path, "ublk");
        match value.get_ref() {
            DeValue::Boolean(true) => Some(UblkSpec::default()),
            DeValue::Boolean(false) => None,
            DeValue::Integer(number) => self.parse_text(number.as_str(), value.span().start, &key),
            DeValue::String(text) => self.parse_text(text, value.span().start, &key),
            _ => {
                self.wrong_type(value, &key, "a number, true or a string");
                None
            }
        }
    }

    fn known_keys(&mut self, at: At<'_>, known: &[&str]) {
        for key in at.table.keys() {
            if !known.contains(&key.get_ref().as_ref()) {
                let why = format!("there is no such key (there is {})", known.join(", "));
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
