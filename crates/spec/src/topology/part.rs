//! Extracts the part of a topology's text about one device, which another process needs to serve that
//! device again. Without it the run directory of a process with a thousand devices would contain the whole
//! text a thousand times.

use super::{DeviceSpec, ExportSpec, Topology};
use std::path::Path;

impl Topology {
    /// Returns the part of a topology's text about one device and its exports. Returns the whole text if
    /// the part would not parse to an equal device, for example because its table refers to other devices
    /// of the topology.
    pub fn text_of(&self, text: &str, file: &Path, device: &str) -> String {
        let part: String = blocks(text).filter(|block| is_about(block, device)).collect();
        let same = Topology::parse(&part, file).is_ok_and(|part| self.has_as(&part, device));
        if same { part } else { text.to_owned() }
    }

    /// Returns whether a part describes exactly one device, with equal settings and exports, ignoring line
    /// numbers.
    fn has_as(&self, part: &Topology, device: &str) -> bool {
        let about = |of: &Topology| {
            let specs = of.devices.iter().filter(|spec| spec.name.as_str() == device);
            let exports = of.exports.iter().filter(|export| export.device.as_str() == device);
            let specs: Vec<_> = specs.map(|spec| DeviceSpec { line: 0, ..spec.clone() }).collect();
            let exports: Vec<_> = exports.map(|export| ExportSpec { line: 0, ..export.clone() }).collect();
            (of.ring, of.poll, of.queues, of.nbd_limits, specs, exports)
        };
        part.devices.len() == 1 && about(self) == about(part)
    }
}

/// Splits a text into the lines before the first table, and each table with its lines. A line of a multi-line string that
/// looks like the start of a table is mistaken for one: the parts then parse to something else, which the caller checks.
fn blocks(text: &str) -> impl Iterator<Item = &str> {
    let mut rest = text;
    std::iter::from_fn(move || {
        if rest.is_empty() {
            return None;
        }
        let mut begins = rest.match_indices('\n').map(|(at, _)| at + 1);
        let end = begins.find(|at| rest[*at..].trim_start_matches([' ', '\t']).starts_with('['));
        let (block, after) = rest.split_at(end.unwrap_or(rest.len()));
        rest = after;
        Some(block)
    })
}

fn is_about(block: &str, device: &str) -> bool {
    const QUOTES: [char; 2] = ['"', '\''];
    let head = block.trim_start().lines().next().unwrap_or_default();
    let Some(table) = head.strip_prefix('[') else { return true };
    if table.starts_with('[') {
        let named = |line: &str| {
            let (key, value) = line.split_once('=')?;
            let value = value.split('#').next().unwrap_or_default();
            (key.trim() == "device").then(|| value.trim().trim_matches(QUOTES) == device)
        };
        return block.lines().find_map(named).unwrap_or(true);
    }
    let Some(rest) = table.trim_start().strip_prefix("device.") else { return true };
    let after = rest.trim_start_matches(QUOTES).strip_prefix(device);
    after.is_some_and(|after| after.trim_start_matches(QUOTES).starts_with([']', '.']))
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "queues = 2\n# A view.\n[device.a]\nstack = \"null:1G\"\ndepth = 8\n\n[device.ab]\n\
        stack = \"ram:1M\"\nlayers = [\n  \"split,max_sectors=8\",\n]\n[[export]]\ndevice = \"a\"\nublk = 3\n\
        [[export]]\ndevice = \"ab\"\nublk = true\n[device.top]\ntable = \"0 8 linear ab 0\"\n\
        [[export]]\ndevice = \"top\"\nublk = true\n";

    #[test]
    fn the_part_of_a_device_parses_to_the_same_device() {
        let file = Path::new("/srv/view.toml");
        let whole = Topology::parse(TEXT, file).unwrap();
        for (device, other) in [("ab", "null:1G"), ("a", "max_sectors")] {
            let part = whole.text_of(TEXT, file, device);
            let read = Topology::parse(&part, file).unwrap();
            assert!(whole.has_as(&read, device), "{part}");
            assert!(part.starts_with("queues = 2"), "{part}");
            assert!(!part.contains(other), "{part}");
        }
        assert!(whole.text_of(TEXT, file, "ab").len() < TEXT.len() / 2);
    }

    #[test]
    fn a_text_that_cannot_be_cut_stays_whole() {
        let file = Path::new("/srv/view.toml");
        let text = "[device.a]\ntable = \"\"\"\n0 8 zero\n[device.b]\n\"\"\"\n[[export]]\ndevice = \"a\"\nublk = true\n";
        for text in [text, "device.a.stack = \"null:1G\"\nexport = [{ device = \"a\", ublk = true }]\n"] {
            let whole = Topology::parse(text, file).unwrap_or_default();
            assert_eq!(whole.text_of(text, file, "a"), text);
        }
    }
}
