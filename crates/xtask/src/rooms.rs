//! Who may use whom: the rooms of ARCHITECTURE.md as data, held against the manifests.
//!
//! Arrows go down the list only. External crates are not judged here, except that their versions stand in the
//! workspace manifest and nowhere else.

use crate::tidy::{Tree, Violation};

/// One crate of the workspace.
pub struct Room {
    /// Its folder under `crates/`, which is also its name as a dependency.
    pub name: &'static str,
    /// The rooms its product code may name.
    pub may_use: &'static [&'static str],
    /// Rooms that only its tests may name, besides `sim` and what the product code may use.
    pub tests_may_use: &'static [&'static str],
}

const fn room(name: &'static str, may_use: &'static [&'static str]) -> Room {
    Room { name, may_use, tests_may_use: &[] }
}

const ALL: &[&str] = &[
    "block", "queue", "ring", "ublk", "sim", "trace", "layers", "backends", "proto", "exports", "spec",
    "engine",
];

/// Every room of the workspace, lowest first.
pub const ROOMS: &[Room] = &[
    room("block", &[]),
    room("options", &[]),
    room("queue", &["block"]),
    room("ring", &["block", "queue"]),
    room("ublk", &["block"]),
    room("partition", &["block"]),
    room("sim", &["block", "queue"]),
    room("trace", &["block", "queue"]),
    room("layers", &["block", "queue", "options"]),
    room("proto", &["block"]),
    room("backends", &["block", "queue", "ring", "proto"]),
    room("qcow2", &[]),
    room("images", &["block", "queue", "backends", "qcow2"]),
    room("fuse", &[]),
    room("loopdev", &[]),
    Room {
        name: "exports",
        may_use: &["proto", "block", "queue", "ring", "ublk"],
        // An export is tested over something that holds blocks.
        tests_may_use: &["backends"],
    },
    room(
        "spec",
        &["block", "options", "partition", "proto", "layers", "backends", "images", "ublk", "exports"],
    ),
    room(
        "engine",
        &[
            "block",
            "options",
            "spec",
            "queue",
            "ring",
            "ublk",
            "partition",
            "trace",
            "layers",
            "backends",
            "images",
            "proto",
            "fuse",
            "loopdev",
            "exports",
        ],
    ),
    room("web", &["engine"]),
    room("cli", &["engine", "trace", "web"]),
    room("xtask", &[]),
    room("bench", ALL),
    room("tests", ALL),
];

/// Which part of a manifest names a dependency.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Section {
    Product,
    Tests,
}

/// One dependency as a manifest's line states it.
#[derive(Debug)]
struct Dependency<'a> {
    line: usize,
    section: Section,
    name: &'a str,
    value: &'a str,
}

/// Names each dependency that the table of rooms does not allow.
pub fn check(tree: &Tree, found: &mut Vec<Violation>) {
    for file in &tree.files {
        let Some(folder) =
            file.path.strip_prefix("crates/").and_then(|rest| rest.strip_suffix("/Cargo.toml"))
        else {
            continue;
        };
        let Some(room) = ROOMS.iter().find(|room| room.name == folder) else {
            found.push(Violation::new(
                &file.path,
                1,
                "no such room: add it to crates/xtask/src/rooms.rs and ARCHITECTURE.md",
            ));
            continue;
        };
        if !file.text.contains("[lints]\nworkspace = true") {
            found.push(Violation::new(
                &file.path,
                1,
                "the workspace's lints are not taken: add [lints] workspace = true",
            ));
        }
        for dependency in dependencies(&file.text) {
            check_dependency(room, &file.path, &dependency, found);
        }
    }
}

fn check_dependency(room: &Room, path: &str, dependency: &Dependency<'_>, found: &mut Vec<Violation>) {
    let Dependency { line, section, name, value } = *dependency;
    if !value.contains("workspace") {
        let what = format!("{name}: its version or path belongs into [workspace.dependencies]");
        found.push(Violation::new(path, line, what));
    }
    if !ROOMS.iter().any(|other| other.name == name) {
        return;
    }
    let for_tests = section == Section::Tests && (name == "sim" || room.tests_may_use.contains(&name));
    if !room.may_use.contains(&name) && !for_tests {
        let what = format!("{} must not use {name}: see the rooms of ARCHITECTURE.md", room.name);
        found.push(Violation::new(path, line, what));
    }
}

/// Every dependency of a manifest: `name = …`, `name.workspace = true` and `[dependencies.name]`.
fn dependencies(manifest: &str) -> Vec<Dependency<'_>> {
    let mut all = Vec::new();
    let mut section = None;
    for (index, line) in manifest.lines().enumerate() {
        let line = line.split('#').next().unwrap_or_default().trim();
        if let Some(header) = line.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
            let (kind, name) = match header.rsplit_once("dependencies.") {
                Some((before, name)) => (format!("{before}dependencies"), Some(name)),
                None => (header.to_owned(), None),
            };
            section = match kind.rsplit('.').next() {
                Some("dependencies" | "build-dependencies") => Some(Section::Product),
                Some("dev-dependencies") => Some(Section::Tests),
                _ => None,
            };
            if let (Some(section), Some(name)) = (section.take(), name) {
                // The table's own lines say the rest; the first of them stands in for the value.
                let value = manifest.lines().nth(index + 1).unwrap_or_default();
                all.push(Dependency { line: index + 1, section, name, value });
                continue;
            }
            section = match kind.rsplit('.').next() {
                Some("dependencies" | "build-dependencies") => Some(Section::Product),
                Some("dev-dependencies") => Some(Section::Tests),
                _ => None,
            };
            continue;
        }
        let (Some(section), Some((key, value))) = (section, line.split_once('=')) else { continue };
        let (name, value) = match key.trim().split_once('.') {
            Some((name, rest)) => (name, rest),
            None => (key.trim(), value),
        };
        all.push(Dependency { line: index + 1, section, name, value });
    }
    all
}

/// Holds the table of ARCHITECTURE.md against this one: a row `| \`name\` | holds | may use | … |` names the same rooms.
pub fn check_document(tree: &Tree, found: &mut Vec<Violation>) {
    let Some(file) = tree.files.iter().find(|file| file.path == "ARCHITECTURE.md") else { return };
    for (index, line) in file.text.lines().enumerate() {
        let mut columns = line.split('|').map(str::trim).skip(1);
        let (Some(name), Some(_), Some(may_use)) = (columns.next(), columns.next(), columns.next()) else {
            continue;
        };
        let Some(room) = ROOMS.iter().find(|room| name == format!("`{}`", room.name)) else { continue };
        if may_use == "all above" || may_use == "anything" {
            continue;
        }
        let mut said: Vec<&str> = may_use
            .split(',')
            .map(|word| word.trim().trim_matches('`'))
            .filter(|word| *word != "–")
            .collect();
        let mut held = room.may_use.to_vec();
        said.retain(|word| !word.is_empty());
        said.sort_unstable();
        held.sort_unstable();
        if said != held {
            let what = format!("{} may use {held:?} by crates/xtask/src/rooms.rs, {said:?} here", room.name);
            found.push(Violation::new(&file.path, index + 1, what));
        }
    }
}
