//! Formats a topology as text that [`read`](super::read) parses to the same devices and exports.

use super::{DeviceSpec, ExportKind, NbdOptions, RingChoice, Topology};
use crate::{
    DeviceName, LayerSpec, NbdLimits, PathSpec, StackSpec, TableSpec, TlsMode, TlsSpec, format_time,
    scheduler_of, with_scheduler,
};
use std::fmt::Write;
use std::path::PathBuf;

impl Topology {
    /// Formats the process settings as lines of a topology, without defaults.
    pub fn settings_text(&self) -> String {
        let mut text = String::new();
        if self.ring != RingChoice::default() {
            line(&mut text, "ring", &quoted(&self.ring.to_string()));
        }
        if self.poll {
            line(&mut text, "poll", "true");
        }
        if let Some(queues) = self.queues {
            line(&mut text, "queues", &queues.to_string());
        }
        if self.nbd_limits != NbdLimits::default() {
            line(&mut text, "nbd-limits", &quoted(&self.nbd_limits.to_string()));
        }
        text
    }
}

impl DeviceSpec {
    /// Formats the device and its exports as TOML tables: `[device.NAME]`, and `[[export]]` for each export. Paths stay
    /// unchanged, so relative ones start from the directory of the file that the text is written to.
    pub fn text(&self, exports: &[ExportKind]) -> String {
        let mut text = format!("[device.{}]\n", key(self.name.as_str()));
        match &self.stack {
            StackSpec::Table(table) => write_table(&mut text, table),
            stack => line(&mut text, "stack", &quoted(&stack.to_string())),
        }
        let scheduler = scheduler_of(&self.layers);
        let below = with_scheduler(&self.layers, None);
        // A scheduler that was given among the layers may be at another position, and stays there.
        let is_usual = with_scheduler(&below, scheduler) == self.layers;
        let layers: &[LayerSpec] = if is_usual { &below } else { &self.layers };
        if !layers.is_empty() {
            let layers: Vec<String> = layers.iter().map(|layer| quoted(&layer.to_string())).collect();
            line(&mut text, "layers", &format!("[{}]", layers.join(", ")));
        }
        if let Some(choice) = scheduler.filter(|_| is_usual) {
            line(&mut text, "scheduler", &quoted(&choice.to_string()));
        }
        if let Some(limits) = &self.limits {
            line(&mut text, "limits", &quoted(limits));
        }
        if let Some(depth) = self.depth {
            line(&mut text, "depth", &depth.to_string());
        }
        for (name, time) in [("slow", self.slow), ("io_timeout", self.io_timeout)] {
            if let Some(time) = time {
                line(&mut text, name, &quoted(&format_time(time)));
            }
        }
        // A device without an export gets the default one.
        let is_default = |kind: &ExportKind| matches!(kind, ExportKind::Default(options) if *options == NbdOptions { name: self.name.to_string(), tls: TlsSpec::default() });
        if !matches!(exports, [only] if is_default(only)) {
            exports.iter().for_each(|kind| write_export(&mut text, &self.name, kind));
        }
        text
    }
}

fn write_table(text: &mut String, table: &TableSpec) {
    line(text, "table", &format!("\"\"\"\n{}\"\"\"", escaped(&table.text(), true)));
    if has_relative_paths(table) {
        // Collecting the components drops the trailing slash of a joined empty path.
        let base: PathBuf = table.base.components().collect();
        line(text, "table-base", &quoted(&base.to_string_lossy()));
    }
    if table.paths != PathSpec::default() {
        line(text, "multipath", &quoted(&table.paths.to_string()));
    }
}

/// Whether an argument of a table may be a path relative to the table's base, or a device's name.
fn has_relative_paths(table: &TableSpec) -> bool {
    let may_be = |word: String| {
        let path = word.split_once(':').map_or(word.as_str(), |(_, path)| path);
        !path.is_empty() && !path.starts_with('/') && path.parse::<u64>().is_err()
    };
    table.arguments().any(may_be)
}

fn write_export(text: &mut String, device: &DeviceName, kind: &ExportKind) {
    text.push_str("\n[[export]]\n");
    line(text, "device", &quoted(device.as_str()));
    if let Some(row) = kind.row() {
        let value = kind.value();
        // An export without an address has an empty value.
        let value = if value.is_empty() { "true".to_owned() } else { quoted(&value) };
        line(text, row.kind, &value);
    }
    match kind {
        ExportKind::Default(options) => write_options(text, device, options),
        ExportKind::Nbd(spec) => write_options(text, device, &spec.options),
        _ => {}
    }
}

fn write_options(text: &mut String, device: &DeviceName, NbdOptions { name, tls }: &NbdOptions) {
    if name != device.as_str() {
        line(text, "name", &quoted(name));
    }
    if tls.mode != TlsMode::Off {
        line(text, "tls", &quoted(&tls.mode.to_string()));
    }
    if let Some(folder) = &tls.certificates {
        line(text, "tls-certificates", &quoted(&folder.to_string_lossy()));
    }
    if tls.verify_peer {
        line(text, "tls-verify-peer", "true");
    }
}

fn line(text: &mut String, key: &str, value: &str) {
    // Writing to a string does not fail.
    let _ = writeln!(text, "{key} = {value}");
}

/// Formats a key, bare if TOML allows it.
fn key(name: &str) -> String {
    let is_bare = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
    if name.chars().all(is_bare) { name.to_owned() } else { quoted(name) }
}

/// Formats a TOML basic string.
fn quoted(text: &str) -> String {
    format!("\"{}\"", escaped(text, false))
}

/// Escapes characters that a basic string must not contain. `over_lines`: keeps line feeds, for a multi-line string.
fn escaped(text: &str, over_lines: bool) -> String {
    let mut escaped = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '"' => escaped.push_str("\\\""),
            '\\' => escaped.push_str("\\\\"),
            '\n' if over_lines => escaped.push('\n'),
            c if c.is_control() => {
                let _ = write!(escaped, "\\u{:04X}", u32::from(c));
            }
            c => escaped.push(c),
        }
    }
    escaped
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    /// Writes a topology and reads it back from another folder.
    #[track_caller]
    fn round_trip(text: &str) -> String {
        let first = Topology::parse(text, Path::new("/srv/lab.toml")).unwrap_or_else(|why| panic!("{why}"));
        let mut written = first.settings_text();
        for spec in &first.devices {
            let exports = first.exports.iter().filter(|export| export.device == spec.name);
            let exports: Vec<ExportKind> = exports.map(|export| export.kind.clone()).collect();
            written = format!("{written}\n{}", spec.text(&exports));
        }
        let second = Topology::parse(&written, Path::new("/elsewhere/saved.toml"))
            .unwrap_or_else(|why| panic!("{why}\n{written}"));
        assert_eq!(bare(first), bare(second), "{written}");
        written
    }

    /// Removes line numbers and table bases for comparison.
    fn bare(mut topology: Topology) -> Topology {
        topology.devices.iter_mut().for_each(|device| {
            device.line = 0;
            if let StackSpec::Table(table) = &mut device.stack {
                table.lines.iter_mut().for_each(|line| line.line = 0);
                // Absolute paths have no base.
                if !has_relative_paths(table) {
                    table.base = Default::default();
                }
            }
        });
        topology.exports.iter_mut().for_each(|export| export.line = 0);
        topology
    }

    #[test]
    fn every_key_survives_a_round_trip() {
        let written = round_trip(
            r#"
ring = "epoll"
poll = true
queues = 3
nbd-limits = "connections=5,stall=0"
[device."a.b+c"]
stack = 'file:/data/we"ird\,,name.img,direct=on,ro'
layers = ["split,max_sectors=8", "delay,read=5ms", "cow,file=over.img,create,size=1G"]
scheduler = "mq-deadline,fifo_batch=4"
limits = { max_segments = 4 }
depth = 7
slow = "20ms"
io_timeout = "30s"
[[export]]
device = "a.b+c"
nbd = "unix:here.sock"
name = "grüße"
tls = "require"
tls-certificates = "certificates"
tls-verify-peer = true
[[export]]
device = "a.b+c"
fuse = "a.raw,passthrough"
[[export]]
device = "a.b+c"
nbd-device = "3,connections=2"
[[export]]
device = "a.b+c"
nbd-device = true
[[export]]
device = "a.b+c"
loop = "partscan"
[[export]]
device = "a.b+c"
ublk = 0
[[export]]
device = "a.b+c"
"#,
        );
        assert!(written.contains("[device.\"a.b+c\"]") && written.contains("ublk = \"0\""), "{written}");
    }

    #[test]
    fn a_device_with_the_default_export_only_has_no_export_of_its_own() {
        assert_eq!(round_trip("[device.a]\nstack = \"null:1M\"\n"), "\n[device.a]\nstack = \"null:1M\"\n");
    }

    #[test]
    fn tables_keep_their_lines_and_base() {
        let table = "[device.t]\ntable = \"\"\"\n0 8 linear a.img 0\n8 8 linear /b\\\\ c 0\n\"\"\"\n\
                     multipath = \"checker=5s\"\n";
        let written = round_trip(table);
        assert!(written.contains("table-base = \"/srv\"\n"), "{written}");
        let written = round_trip("[device.t]\ntable = \"0 8 zero\"\n");
        assert_eq!(written, "\n[device.t]\ntable = \"\"\"\n0 8 zero\n\"\"\"\n");
    }

    #[test]
    fn a_scheduler_in_an_unusual_place_stays_there() {
        let written =
            round_trip("[device.a]\nstack = \"null:1M\"\nlayers = [\"split,max_sectors=8\", \"kyber\"]\n");
        assert!(written.contains("\"split,max_sectors=8\", \"kyber\""), "{written}");
    }

    #[test]
    fn control_characters_are_escaped() {
        assert_eq!(quoted("a\tb\u{7f}\n"), "\"a\\u0009b\\u007F\\u000A\"");
        assert_eq!(escaped("a\nb\"", true), "a\nb\\\"");
    }
}
