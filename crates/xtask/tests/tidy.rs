//! The tree follows its own rules, and each rule detects violations.
#![forbid(unsafe_code)]

use std::path::Path;

use xtask::tidy::{File, Tree, check};

#[test]
fn the_tree_is_tidy() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let tree = Tree::read(&root).expect("the tree is readable");
    assert!(tree.files.len() > 40, "only {} files found: is this the root?", tree.files.len());
    let found: Vec<String> = check(&tree).iter().map(ToString::to_string).collect();
    assert!(found.is_empty(), "\n{}", found.join("\n"));
}

#[test]
fn the_tree_has_all_files_that_git_tracks_or_would_add() {
    let root = std::env::temp_dir().join(format!("blockyard-tidy-{}", std::process::id()));
    std::fs::create_dir_all(root.join("crates/a/src/target")).expect("a folder");
    std::fs::create_dir_all(root.join("out")).expect("a folder");
    let git = |arguments: &[&str]| {
        let done = std::process::Command::new("git").arg("-C").arg(&root).args(arguments).output();
        assert!(done.expect("git runs").status.success(), "git {arguments:?}");
    };
    for (path, text) in [
        (".gitignore", "/out\n"),
        ("crates/a/src/target/tracked.rs", ""),
        ("crates/a/src/target/new.rs", ""),
        ("crates/a/src/gone.rs", ""),
        ("out/built.rs", ""),
    ] {
        std::fs::write(root.join(path), text).expect("a file");
    }
    git(&["init", "--quiet"]);
    git(&["add", ".gitignore", "crates/a/src/target/tracked.rs", "crates/a/src/gone.rs"]);
    std::fs::remove_file(root.join("crates/a/src/gone.rs")).expect("it was there");
    let tree = Tree::read(&root).expect("git lists it");
    std::fs::remove_dir_all(&root).expect("the folder is ours");
    let paths: Vec<&str> = tree.files.iter().map(|file| file.path.as_str()).collect();
    let expected = [".gitignore", "crates/a/src/target/new.rs", "crates/a/src/target/tracked.rs"];
    assert_eq!(paths, expected);
    assert!(Tree::read(&root).is_err(), "a missing folder");
}

/// The violations in a tree that is valid except for one file.
fn found_in(path: &str, text: &str) -> Vec<String> {
    let file = |path: &str, text: &str| File { path: path.into(), text: text.into() };
    let mut files = vec![file("CHANGELOG.md", "# Changes\n\n## Unreleased\n")];
    files.retain(|known| known.path != path);
    files.push(file(path, text));
    check(&Tree { files }).iter().map(ToString::to_string).collect()
}

#[track_caller]
fn assert_found(path: &str, text: &str, what: &str) {
    let found = found_in(path, text);
    assert!(found.len() == 1 && found[0].contains(what), "expected one '{what}', found {found:?}");
}

#[track_caller]
fn assert_tidy(path: &str, text: &str) {
    let found = found_in(path, text);
    assert!(found.is_empty(), "{found:?}");
}

fn manifest(dependencies: &str) -> String {
    format!("[package]\nname = \"x\"\n\n[lints]\nworkspace = true\n\n{dependencies}")
}

#[test]
fn long_file_is_found() {
    assert_tidy("notes.md", &"a\n".repeat(800));
    assert_found("notes.md", &"a\n".repeat(801), "801 lines");
}

#[test]
fn leftover_words_are_found_and_longer_words_are_not() {
    assert_found("notes.md", concat!("TO", "DO: more\n"), "finish it");
    assert_found("x", concat!("# FIX", "ME\n"), "finish it");
    assert_found("crates/block/src/a.rs", concat!("//! A.\nfn f() { dbg", "!(1); }\n"), "left-over");
    assert_tidy("x", "mktemp -d /tmp/a.XXXXXX\n");
}

#[test]
fn blanks_and_tabs_are_found() {
    assert_found("notes.md", "a \n", "blanks");
    assert_found("notes.md", "a\tb\n", "a tab");
}

#[test]
fn machine_paths_are_found() {
    assert_found("notes.md", concat!("see /ho", "me/someone/disk.img\n"), "one machine");
}

#[test]
fn foreign_sources_in_the_lock_are_found() {
    assert_tidy("Cargo.lock", "source = \"registry+https://github.com/rust-lang/crates.io-index\"\n");
    assert_found("Cargo.lock", "source = \"git+https://example.org/a\"\n", "somewhere else");
}

#[test]
fn missing_and_long_headers_are_found() {
    assert_found("crates/block/src/a.rs", "fn f() {}\n", "no module header");
    assert_tidy("crates/block/src/a.rs", &"//! A.\n".repeat(25));
    assert_found("crates/block/src/a.rs", &"//! A.\n".repeat(26), "a header of 26 lines");
}

#[test]
fn crate_root_must_forbid_unsafe_code() {
    assert_found("crates/block/src/lib.rs", "//! A.\n\nmod a;\nmod b;\n", "#![forbid(unsafe_code)]");
    assert_tidy("crates/block/src/lib.rs", "//! A.\n#![forbid(unsafe_code)]\n");
    assert_found("crates/backends/src/lib.rs", "//! A.\n\nmod a;\nmod b;\n", "#![deny(unsafe_code)]");
    assert_tidy("crates/ring/src/lib.rs", "//! A.\n\nmod a;\nmod b;\n");
}

#[test]
fn unsafe_is_found_outside_allowed_files() {
    let block = concat!("//! A.\nfn f() { unsafe", " { g() } }\n");
    assert_found("crates/engine/src/a.rs", block, "unsafe outside");
    assert_found("crates/backends/src/file.rs", block, "unsafe outside");
    assert_tidy("crates/backends/src/ram/memory.rs", block);
    assert_tidy("crates/ring/src/a.rs", block);
    assert_tidy("crates/engine/src/a.rs", "//! A.\n// Nothing here is unsafe.\n");
}

#[test]
fn a_forbidden_dependency_is_found_in_every_notation() {
    for up in [
        "[dependencies]\nring.workspace = true\n",
        "[dependencies]\nring = { workspace = true, features = [\"a\"] }\n",
        "[build-dependencies]\nring.workspace = true\n",
        "[dev-dependencies]\nring.workspace = true\n",
        "[target.'cfg(unix)'.dependencies]\nring.workspace = true\n",
        "[dependencies.ring]\nworkspace = true\n",
    ] {
        assert_found("crates/layers/Cargo.toml", &manifest(up), "layers must not use ring");
    }
}

#[test]
fn allowed_dependencies_pass_and_tests_may_use_the_simulator() {
    assert_tidy("crates/layers/Cargo.toml", &manifest("[dependencies]\nblock.workspace = true\n"));
    assert_tidy("crates/layers/Cargo.toml", &manifest("[dev-dependencies]\nsim.workspace = true\n"));
    assert_found(
        "crates/layers/Cargo.toml",
        &manifest("[dependencies]\nsim.workspace = true\n"),
        "must not use sim",
    );
}

#[test]
fn versions_stand_in_the_workspace_only() {
    assert_found(
        "crates/block/Cargo.toml",
        &manifest("[dependencies]\nlibc = \"0.2\"\n"),
        "[workspace.dependencies]",
    );
    let renamed = "[dependencies]\nb = { package = \"blockyard-ring\", path = \"../ring\" }\n";
    assert_found("crates/block/Cargo.toml", &manifest(renamed), "[workspace.dependencies]");
}

#[test]
fn unknown_crates_and_missing_lints_are_found() {
    assert_found("crates/attic/Cargo.toml", &manifest(""), "unknown crate");
    assert_found("crates/block/Cargo.toml", "[package]\nname = \"x\"\n", "lints");
}

#[test]
fn the_document_and_the_table_of_crates_agree() {
    assert_tidy("ARCHITECTURE.md", "| `queue` | Queue | block | – |\n| `block` | words | – | clocks |\n");
    assert_found("ARCHITECTURE.md", "| `queue` | Queue | block, ring | – |\n", "queue may use");
}

#[test]
fn sentences_that_name_nothing_are_found() {
    for comment in [
        "/// The same for writes.",
        "// Who writes, waits.",
        "/// Whoever writes.",
        "/// A write. That of a reader\n/// is longer.",
        "/// First line.\n/// Those that follow.",
        "/// - What is said first.",
        "//! 1. Those that\n//!    wait.",
    ] {
        let text = format!("//! A.\n\n{comment}\nfn f() {{}}\n");
        assert_found("crates/block/src/a.rs", &text, "name the thing");
        assert_found("crates/attic/src/a.rs", &text, "name the thing");
    }
    let fine = "//! A.\n\n/// Whole blocks, as the same\n/// Who list has it (e.g. who asks).\nfn f() {}\n";
    assert_tidy("crates/block/src/a.rs", fine);
    assert_tidy("crates/block/src/a.rs", "//! A.\n\nconst A: &str = \"The same\";\n");
    assert_found("crates/block/README.md", "# Block\n\n* The same here.\n", "name the thing");
    assert_tidy("crates/block/README.md", "# Block\n\n```\nThe same\n```\n");
}

#[test]
fn decisions_are_numbered_without_doubles() {
    assert_tidy("docs/adr/0001-verdicts.md", "# Verdicts\n");
    assert_found("docs/adr/0000-verdicts.md", "# Verdicts\n", "expected docs/adr/0001-");
    assert_found("docs/adr/verdicts.md", "# Verdicts\n", "expected docs/adr/0001-");
}

#[test]
fn changelog_needs_an_unreleased_section() {
    assert_found("CHANGELOG.md", "# Changes\n", "Unreleased");
}
