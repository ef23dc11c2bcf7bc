//! The crates that are linked into the program, from `cargo metadata`: their licences, and the SBOM.

use crate::guest::process::output;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::Command;

/// Licences, by SPDX identifier, under which a crate may be linked into a program that is MIT or Apache-2.0.
const ALLOWED: &[&str] = &[
    "0BSD",
    "Apache-2.0",
    "Apache-2.0 WITH LLVM-exception",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "BSL-1.0",
    "CC0-1.0",
    "ISC",
    "MIT",
    "MIT-0",
    "Unicode-3.0",
    "Unlicense",
    "Zlib",
];

/// A crate.
struct Linked {
    name: String,
    version: String,
    licence: String,
    is_ours: bool,
    checksum: Option<String>,
}

/// Returns the crates of the program, sorted by name: its normal dependencies, not those of build scripts
/// and tests.
fn linked(root: &Path) -> Result<Vec<Linked>, String> {
    let mut ask = Command::new("cargo");
    ask.args(["metadata", "--format-version=1", "--locked", "--filter-platform=x86_64-unknown-linux-gnu"]);
    let metadata: Value = serde_json::from_str(&output(ask.current_dir(root))?)
        .map_err(|why| format!("cargo metadata: {why}"))?;
    let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let packages: BTreeMap<String, Value> =
        list(&metadata["packages"]).into_iter().map(|package| (text(&package["id"]), package)).collect();
    let nodes: BTreeMap<String, Value> =
        list(&metadata["resolve"]["nodes"]).into_iter().map(|node| (text(&node["id"]), node)).collect();
    let is_program = |package: &&Value| package["name"] == "blockyard";
    let first = packages.values().find(is_program).ok_or("cargo metadata names no package blockyard")?;
    let mut next = vec![text(&first["id"])];
    let mut seen = BTreeSet::new();
    while let Some(id) = next.pop() {
        if !seen.insert(id.clone()) {
            continue;
        }
        for dependency in nodes.get(&id).map(|node| list(&node["deps"])).unwrap_or_default() {
            // The kind of a normal dependency is null in the metadata.
            if list(&dependency["dep_kinds"]).iter().any(|kind| kind["kind"].is_null()) {
                next.push(text(&dependency["pkg"]));
            }
        }
    }
    let sums = checksums(&std::fs::read_to_string(root.join("Cargo.lock")).unwrap_or_default());
    let mut linked: Vec<Linked> = seen
        .iter()
        .filter_map(|id| packages.get(id))
        .map(|package| {
            let (name, version) = (text(&package["name"]), text(&package["version"]));
            let checksum = sums.get(&(name.clone(), version.clone())).cloned();
            let (licence, is_ours) = (text(&package["license"]), package["source"].is_null());
            Linked { name, version, licence, is_ours, checksum }
        })
        .collect();
    linked.sort_by(|a, b| (&a.name, &a.version).cmp(&(&b.name, &b.version)));
    Ok(linked)
}

/// The checksums in a lock file, by name and version.
fn checksums(lock: &str) -> BTreeMap<(String, String), String> {
    let of = |stanza: &str, key: &str| {
        let line = stanza.lines().find_map(|line| line.strip_prefix(key));
        line.map(|rest| rest.trim_start_matches(" = ").trim_matches('"').to_owned())
    };
    let stanzas = lock.split("[[package]]");
    stanzas
        .filter_map(|stanza| Some(((of(stanza, "name")?, of(stanza, "version")?), of(stanza, "checksum")?)))
        .collect()
}

/// Checks that each crate has an allowed licence.
///
/// # Errors
/// The crates without one.
pub(super) fn check_licences(root: &Path) -> Result<(), String> {
    let all = linked(root)?;
    let refused: Vec<String> = all
        .iter()
        .filter(|linked| !is_allowed(&linked.licence))
        .map(|linked| format!("{} {}: '{}'", linked.name, linked.version, linked.licence))
        .collect();
    if !refused.is_empty() {
        let fix = "replace the crate, or allow the licence in crates/xtask/src/package/crates.rs";
        return Err(format!("licences that are not allowed ({fix}):\n{}", refused.join("\n")));
    }
    println!("{} crates, each under an allowed licence", all.len());
    Ok(())
}

/// Whether an SPDX expression can be satisfied by allowed licences.
fn is_allowed(expression: &str) -> bool {
    let expression = expression.trim().replace('/', " OR ");
    if let Some(parts) = split(&expression, " OR ") {
        return parts.iter().any(|part| is_allowed(part));
    }
    if let Some(parts) = split(&expression, " AND ") {
        return parts.iter().all(|part| is_allowed(part));
    }
    match expression.strip_prefix('(').and_then(|rest| rest.strip_suffix(')')) {
        Some(inner) => is_allowed(inner),
        None => ALLOWED.contains(&expression.as_str()),
    }
}

/// Splits at an operator outside of parentheses; `None` if there is none.
fn split<'a>(expression: &'a str, operator: &str) -> Option<Vec<&'a str>> {
    let (mut parts, mut from) = (Vec::new(), 0);
    for (at, _) in expression.match_indices(operator) {
        let before = &expression[..at];
        if before.matches('(').count() == before.matches(')').count() {
            parts.push(&expression[from..at]);
            from = at + operator.len();
        }
    }
    if parts.is_empty() {
        return None;
    }
    parts.push(&expression[from..]);
    Some(parts)
}

/// The crates as a CycloneDX document.
///
/// # Errors
/// Errors of `cargo metadata`.
pub(super) fn sbom(root: &Path) -> Result<String, String> {
    let all = linked(root)?;
    let component = |linked: &Linked| {
        let Linked { name, version, licence, is_ours, checksum } = linked;
        let mut component = json!({
            "type": "library",
            "name": name,
            "version": version,
            "licenses": [{ "expression": licence.replace('/', " OR ") }],
        });
        if !is_ours {
            component["purl"] = json!(format!("pkg:cargo/{name}@{version}"));
        }
        if let Some(sum) = checksum {
            component["hashes"] = json!([{ "alg": "SHA-256", "content": sum }]);
        }
        component
    };
    let program = all.iter().find(|linked| linked.name == "blockyard");
    let others: Vec<Value> = all.iter().filter(|linked| linked.name != "blockyard").map(component).collect();
    let document = json!({
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": { "component": {
            "type": "application",
            "name": "blockyard",
            "version": program.map(|program| program.version.as_str()),
            "licenses": [{ "expression": "MIT OR Apache-2.0" }],
        }},
        "components": others,
    });
    serde_json::to_string_pretty(&document).map_err(|why| why.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_allowed_alternative_is_sufficient_and_all_joined_licences_are_needed() {
        for allowed in ["MIT", "GPL-3.0 OR MIT", "MIT/Apache-2.0", "(MIT OR GPL-2.0-only) AND Unicode-3.0"] {
            assert!(is_allowed(allowed), "{allowed}");
        }
        for refused in ["", "GPL-3.0-only", "MIT AND GPL-2.0-only", "(MIT AND GPL-2.0-only) OR AGPL-3.0-only"]
        {
            assert!(!is_allowed(refused), "{refused}");
        }
    }

    #[test]
    fn checksums_are_found_by_name_and_version() {
        let lock = "[[package]]\nname = \"a\"\nversion = \"1.0.0\"\nchecksum = \"12ab\"\n\n[[package]]\nname = \"b\"\n\
                    version = \"2.0.0\"\n";
        let sums = checksums(lock);
        assert_eq!(sums.get(&("a".to_owned(), "1.0.0".to_owned())).map(String::as_str), Some("12ab"));
        assert_eq!(sums.len(), 1);
    }
}
