//! Rejects cycles between the folders of a crate, found by the paths in its code.
//!
//! Cycles within one folder are allowed. Tests, at the end of a file behind `#[cfg(test)]` or in a file of
//! tests, may use any module.

use crate::tidy::{Tree, Violation};
use std::collections::{BTreeMap, BTreeSet};

/// Crates that are checked.
const CRATES: &[&str] = &["engine", "attach"];

/// The folders that each folder uses, with a file that does so.
type Uses<'a> = BTreeMap<&'a str, BTreeMap<&'a str, &'a str>>;

/// Reports each cycle of folders once.
pub fn check(tree: &Tree, found: &mut Vec<Violation>) {
    for name in CRATES {
        let prefix = format!("crates/{name}/src/");
        let files = tree.files.iter().filter_map(|file| {
            let inner = file.path.strip_prefix(&prefix)?;
            (inner.ends_with(".rs") && inner != "lib.rs" && !is_test(inner)).then_some((inner, file))
        });
        let mut uses: Uses<'_> = BTreeMap::new();
        for (inner, file) in files {
            let own = folder_of(inner);
            for used in used_in(inner, &file.text).into_iter().filter(|used| *used != own) {
                uses.entry(own).or_default().entry(used).or_insert(&file.path);
            }
        }
        if let Some(circle) = circle(&uses) {
            let path = uses[circle[0]][circle[1]];
            let what =
                format!("a circle of folders: {} (move what is shared below both)", circle.join(" -> "));
            found.push(Violation::new(path, 1, what));
        }
    }
}

fn is_test(inner: &str) -> bool {
    inner.ends_with("tests.rs") || inner.contains("/tests/") || inner.ends_with("power_cuts.rs")
}

/// Returns the folder or file at the top of the crate that contains `inner`.
fn folder_of(inner: &str) -> &str {
    inner.split('/').next().unwrap_or(inner).trim_end_matches(".rs")
}

/// Returns the top-level modules of the crate that a file's code uses, by `crate::` paths or by enough
/// `super::` to reach the top. Comments and tests do not count.
fn used_in<'a>(inner: &str, text: &'a str) -> Vec<&'a str> {
    let code = without_tests(text);
    let up = "super::".repeat(inner.trim_end_matches("/mod.rs").split('/').count());
    let starts = code.match_indices("crate::").chain(code.match_indices(&up));
    let named = starts.filter(|(at, _)| begins_a_path(&code[..*at]));
    named.flat_map(|(at, word)| first_names(&code[at + word.len()..])).collect()
}

/// Returns the code before the tests. `mod tests;` only declares another file, so code continues after it.
fn without_tests(text: &str) -> &str {
    let with_body = |(at, marker): &(usize, &str)| {
        let declared = text[at + marker.len()..].lines().next().unwrap_or("");
        declared.trim_end().ends_with('{')
    };
    let begin = text.match_indices("#[cfg(test)]\nmod ").find(with_body).map_or(text.len(), |(at, _)| at);
    &text[..begin]
}

/// Whether a path may begin after `before`: not inside another path, a macro's `$crate` or a comment.
fn begins_a_path(before: &str) -> bool {
    let line = before.rsplit('\n').next().unwrap_or(before);
    let is_within =
        |letter: char| letter == '$' || letter == '_' || letter == ':' || letter.is_alphanumeric();
    !line.trim_start().starts_with("//") && !line.ends_with(is_within)
}

/// Returns the next module of a path; for a group in braces, the first module of each of its paths.
fn first_names(path: &str) -> Vec<&str> {
    let Some(group) = path.strip_prefix('{') else { return module_at(path).into_iter().collect() };
    let (mut depth, mut begin, mut names) = (0_usize, 0, Vec::new());
    for (at, letter) in group.char_indices() {
        match letter {
            '{' => depth += 1,
            '}' if depth > 0 => depth -= 1,
            ',' | '}' if depth == 0 => {
                names.extend(module_at(group[begin..at].trim_start()));
                begin = at + 1;
                if letter == '}' {
                    break;
                }
            }
            _ => {}
        }
    }
    names
}

/// Returns the module at the beginning of a path; `None` for types and `self`.
fn module_at(path: &str) -> Option<&str> {
    let is_part = |letter: char| letter.is_ascii_lowercase() || letter.is_ascii_digit() || letter == '_';
    let end = path.find(|letter| !is_part(letter)).unwrap_or(path.len());
    (end > 0 && &path[..end] != "self").then_some(&path[..end])
}

/// Returns a cycle, its first folder repeated at the end; `None`: there is no cycle.
fn circle<'a>(uses: &Uses<'a>) -> Option<Vec<&'a str>> {
    let mut done = BTreeSet::new();
    uses.keys().find_map(|start| walk(start, uses, &mut Vec::new(), &mut done))
}

fn walk<'a>(
    folder: &'a str,
    uses: &Uses<'a>,
    trail: &mut Vec<&'a str>,
    done: &mut BTreeSet<&'a str>,
) -> Option<Vec<&'a str>> {
    if let Some(begin) = trail.iter().position(|known| *known == folder) {
        let mut circle = trail[begin..].to_vec();
        circle.push(folder);
        return Some(circle);
    }
    if done.contains(folder) {
        return None;
    }
    trail.push(folder);
    let below = uses.get(folder).into_iter().flat_map(|used| used.keys());
    let found = below.into_iter().find_map(|used| walk(used, uses, trail, done));
    trail.pop();
    done.insert(folder);
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::File;

    fn violations(files: &[(&str, &str)]) -> Vec<String> {
        let files = files
            .iter()
            .map(|(path, text)| File { path: format!("crates/engine/src/{path}"), text: (*text).to_owned() });
        let mut found = Vec::new();
        check(&Tree { files: files.collect() }, &mut found);
        found.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn a_circle_of_folders_is_named() {
        let found = violations(&[
            ("host/mod.rs", "use crate::device::Device;"),
            ("device/mod.rs", "use crate::tree::Tree;"),
            ("tree.rs", "fn f() { crate::host::start() }"),
        ]);
        let expected =
            "crates/engine/src/device/mod.rs:1: a circle of folders: device -> tree -> host -> device";
        assert!(found.len() == 1 && found[0].starts_with(expected), "{found:?}");
    }

    #[test]
    fn a_circle_through_a_group_of_imports_is_found() {
        let found = violations(&[
            ("host/mod.rs", "use crate::device::Device;"),
            ("device/mod.rs", "use crate::{\n    observe::{slow::Slow, trace},\n    host::Host,\n};"),
            ("observe/mod.rs", "use crate::{log_limit, slow::Slow};"),
        ]);
        assert!(found.len() == 1 && found[0].contains("device -> host -> device"), "{found:?}");
    }

    #[test]
    fn a_circle_through_super_is_found_and_super_within_a_folder_is_none() {
        let found = violations(&[
            ("host/mod.rs", "use crate::device::Device;"),
            ("device/tree/mod.rs", "use super::super::host::Host;"),
        ]);
        assert!(found.len() == 1 && found[0].contains("device -> host -> device"), "{found:?}");
        let found = violations(&[
            ("host/mod.rs", "use crate::device::Device;"),
            ("device/tree/mod.rs", "use super::host::Host;"),
            ("device/tree/part.rs", "use super::super::host::Host;"),
        ]);
        assert_eq!(found, [""; 0]);
    }

    #[test]
    fn code_after_the_declaration_of_a_module_of_tests_counts() {
        let found = violations(&[
            ("host/mod.rs", "use crate::device::Device;"),
            ("device/mod.rs", "#[cfg(test)]\nmod tests;\nmod tree;\n\nuse crate::host::Host;"),
        ]);
        assert!(found.len() == 1 && found[0].contains("device -> host -> device"), "{found:?}");
    }

    #[test]
    fn one_folder_comments_and_tests_make_no_circle() {
        let found = violations(&[
            ("host/mod.rs", "use crate::device::Device;\nuse crate::host::error::Error;"),
            ("host/error.rs", "use crate::host::Host;"),
            (
                "device/mod.rs",
                "/// See crate::host.\nstruct A;\n#[cfg(test)]\nmod tests {\n    use crate::host::Host;\n}",
            ),
            ("device/tests.rs", "use crate::host::Host;"),
        ]);
        assert_eq!(found, [""; 0]);
    }
}
