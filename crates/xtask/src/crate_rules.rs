//! Allowed dependencies between crates: the table of ARCHITECTURE.md as data, checked against the manifests.
//!
//! A crate may depend only on crates before it in the list. External crates are not checked, except that
//! their versions must be in the workspace manifest.

use crate::tidy::{Tree, Violation};

/// A crate of the workspace.
pub struct CrateRules {
    /// Its directory under `crates/`, which is also its name as a dependency.
    pub name: &'static str,
    /// Crates that its product code may depend on.
    pub may_use: &'static [&'static str],
    /// Additional crates that its tests may depend on, besides `sim`.
    pub tests_may_use: &'static [&'static str],
}

const fn rules(name: &'static str, may_use: &'static [&'static str]) -> CrateRules {
    CrateRules { name, may_use, tests_may_use: &[] }
}

const ALL: &[&str] = &[
    "block", "queue", "ring", "ublk", "virtio", "sim", "trace", "layers", "backends", "proto", "scsi",
    "exports", "spec", "engine",
];

/// Every crate of the workspace, lowest first.
pub const CRATES: &[CrateRules] = &[
    rules("block", &[]),
    rules("options", &[]),
    rules("queue", &["block"]),
    rules("ring", &["block", "queue"]),
    rules("ublk", &["block"]),
    rules("virtio", &["block", "ring"]),
    rules("partition", &["block"]),
    rules("sim", &["block", "queue"]),
    rules("trace", &["block", "queue"]),
    rules("layers", &["block", "queue", "options"]),
    rules("proto", &["block"]),
    rules("scsi", &["block"]),
    rules("backends", &["block", "queue", "ring", "proto"]),
    rules("qcow2", &[]),
    rules("images", &["block", "queue", "backends", "qcow2"]),
    rules("rbd", &["block", "queue", "ring", "backends"]),
    rules("fuse", &[]),
    rules("loopdev", &[]),
    CrateRules {
        name: "exports",
        may_use: &["proto", "scsi", "block", "queue", "ring", "ublk", "virtio"],
        // An export is tested with a backend.
        tests_may_use: &["backends"],
    },
    rules(
        "spec",
        &["block", "options", "partition", "proto", "layers", "backends", "images", "rbd", "ublk", "exports"],
    ),
    rules(
        "engine",
        &[
            "block",
            "options",
            "spec",
            "queue",
            "ring",
            "partition",
            "trace",
            "layers",
            "backends",
            "images",
            "rbd",
            "proto",
            "exports",
        ],
    ),
    rules(
        "attach",
        &[
            "block", "spec", "queue", "ring", "ublk", "virtio", "proto", "scsi", "fuse", "loopdev",
            "exports", "engine",
        ],
    ),
    rules("driver", &["attach", "engine", "spec", "backends", "ring"]),
    rules("lio", &[]),
    rules("web", &["engine"]),
    rules("crash", &["layers"]),
    rules("cli", &["attach", "crash", "engine", "fuse", "lio", "options", "proto", "trace", "web"]),
    rules("xtask", &[]),
    rules("bench", ALL),
    rules("tests", ALL),
];

/// Section of a manifest with dependencies.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Section {
    Product,
    Tests,
}

/// A dependency in a manifest.
#[derive(Debug)]
struct Dependency<'a> {
    line: usize,
    section: Section,
    name: &'a str,
    value: &'a str,
}

/// Reports each dependency that the table does not allow.
pub fn check(tree: &Tree, found: &mut Vec<Violation>) {
    for file in &tree.files {
        let Some(folder) =
            file.path.strip_prefix("crates/").and_then(|rest| rest.strip_suffix("/Cargo.toml"))
        else {
            continue;
        };
        let Some(rules) = CRATES.iter().find(|rules| rules.name == folder) else {
            found.push(Violation::new(
                &file.path,
                1,
                "unknown crate: add it to crates/xtask/src/crate_rules.rs and ARCHITECTURE.md",
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
            check_dependency(rules, &file.path, &dependency, found);
        }
    }
}

fn check_dependency(rules: &CrateRules, path: &str, dependency: &Dependency<'_>, found: &mut Vec<Violation>) {
    let Dependency { line, section, name, value } = *dependency;
    if !value.contains("workspace") {
        let what = format!("{name}: its version or path belongs into [workspace.dependencies]");
        found.push(Violation::new(path, line, what));
    }
    if !CRATES.iter().any(|other| other.name == name) {
        return;
    }
    let for_tests = section == Section::Tests && (name == "sim" || rules.tests_may_use.contains(&name));
    if !rules.may_use.contains(&name) && !for_tests {
        let what = format!("{} must not use {name}: see the crates in ARCHITECTURE.md", rules.name);
        found.push(Violation::new(path, line, what));
    }
}

/// Parses every dependency of a manifest: `name = …`, `name.workspace = true` and `[dependencies.name]`.
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
                // The value is on the following lines; the first of them represents it.
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

/// Checks the table of ARCHITECTURE.md against this one: a row `| \`name\` | holds | may use | … |` must list
/// the same crates.
pub fn check_document(tree: &Tree, found: &mut Vec<Violation>) {
    let Some(file) = tree.files.iter().find(|file| file.path == "ARCHITECTURE.md") else { return };
    for (index, line) in file.text.lines().enumerate() {
        let mut columns = line.split('|').map(str::trim).skip(1);
        let (Some(name), Some(_), Some(may_use)) = (columns.next(), columns.next(), columns.next()) else {
            continue;
        };
        let Some(rules) = CRATES.iter().find(|rules| name == format!("`{}`", rules.name)) else { continue };
        if may_use == "all above" || may_use == "anything" {
            continue;
        }
        let mut listed: Vec<&str> = may_use
            .split(',')
            .map(|word| word.trim().trim_matches('`'))
            .filter(|word| *word != "–")
            .collect();
        let mut held = rules.may_use.to_vec();
        listed.retain(|word| !word.is_empty());
        listed.sort_unstable();
        held.sort_unstable();
        if listed != held {
            let what = format!(
                "{} may use {held:?} by crates/xtask/src/crate_rules.rs, {listed:?} here",
                rules.name
            );
            found.push(Violation::new(&file.path, index + 1, what));
        }
    }
}
