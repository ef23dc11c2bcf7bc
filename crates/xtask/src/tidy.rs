//! Rules for the source tree, checked by `./x tidy`, and by `tests/tidy.rs` under `cargo test`.
//!
//! Each rule is a function that reports its violations. The rules are those that a reviewer would otherwise
//! have to remember: where `unsafe` is allowed, dependencies between crates, length of files, left-overs,
//! wording of comments. It only reads files; rules of rustc, clippy and rustfmt are not repeated here.

use std::fmt;
use std::path::Path;
use std::process::Command;

/// Most lines of a file.
const FILE_LINES_MAX: usize = 800;
/// The folder of pages that `blockyard reference` writes.
const GENERATED: &str = "docs/reference/";
/// Most lines of a module header; more belongs in ARCHITECTURE.md or an ADR.
const HEADER_LINES_MAX: usize = 25;

/// Where `unsafe` is allowed: a crate, and the beginnings of paths in it. `ring` is the only interface to
/// the kernel on the I/O path, and `ublk` to one driver off that path; `virtio` accesses memory that it
/// shares with guests; `rbd` calls a C library; the RAM backend shares its memory between threads, and the
/// file backend opens files in ways that std does not support.
const UNSAFE_PATHS: &[(&str, &[&str])] = &[
    ("ring", &["src/"]),
    ("ublk", &["src/kernel/"]),
    ("virtio", &["src/memory/", "src/ring/area"]),
    ("rbd", &["src/sys/"]),
    ("fuse", &["src/sys.rs"]),
    ("loopdev", &["src/sys.rs"]),
    ("backends", &["src/ram/memory.rs", "src/file/sys.rs"]),
];

/// Left-overs, split so that this file does not contain them itself.
const LEFTOVER_WORDS: &[&str] =
    &[concat!("TO", "DO"), concat!("FIX", "ME"), concat!("X", "XX"), concat!("HA", "CK")];
const LEFTOVER_MACROS: &[&str] =
    &[concat!("dbg", "!("), concat!("todo", "!("), concat!("unimplemented", "!(")];
/// Words that disable the lint or use the keyword: allowed only where `unsafe` is.
const UNSAFE_WORDS: &[&str] = &[
    concat!("allow(", "unsafe_code)"),
    concat!("expect(", "unsafe_code)"),
    concat!("unsafe", " {"),
    concat!("unsafe", " fn"),
    concat!("unsafe", " impl"),
    concat!("unsafe", " extern"),
    concat!("[unsafe", "("),
];
/// Beginnings of paths that exist on one machine only, and hosts that a checkout must not depend on.
const MACHINE_PATHS: &[&str] = &[
    concat!("/ho", "me/"),
    concat!("/ro", "ot/"),
    concat!("/wo", "rk/"),
    concat!("/Use", "rs/"),
    concat!("index.crates", ".io"),
    concat!("static.crates", ".io"),
];
/// The only allowed source of a locked dependency.
const LOCK_SOURCE: &str = "registry+https://github.com/rust-lang/crates.io-index";

/// A text file of the tree.
pub struct File {
    /// Relative to the root, with `/` between the parts.
    pub path: String,
    /// Its content.
    pub text: String,
}

/// Every text file of the tree.
pub struct Tree {
    /// Sorted by path.
    pub files: Vec<File>,
}

/// A violation of a rule.
pub struct Violation {
    path: String,
    line: usize,
    what: String,
}

impl Violation {
    /// Creates a violation at `line` of `path`, counted from 1; `what` says what is wrong and what to do.
    pub fn new(path: &str, line: usize, what: impl Into<String>) -> Self {
        Self { path: path.to_owned(), line, what: what.into() }
    }
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}: {}", self.path, self.line, self.what)
    }
}

impl Tree {
    /// Reads every text file under `root` that git tracks, or would add.
    ///
    /// # Errors
    /// Git cannot list the files, or a file cannot be read.
    pub fn read(root: &Path) -> std::io::Result<Self> {
        let mut files = Vec::new();
        for path in listed(root)? {
            match std::fs::read(root.join(&path)).map(String::from_utf8) {
                Ok(Ok(text)) => files.push(File { path, text }),
                Ok(Err(_)) => {}
                // The file was deleted, but is still in git's index.
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
                Err(error) => return Err(error),
            }
        }
        files.sort_by(|a, b| a.path.cmp(&b.path));
        Ok(Self { files })
    }

    fn holds(&self, path: &str) -> Option<&File> {
        self.files.iter().find(|file| file.path == path)
    }
}

/// The files that git tracks, and those it would add, by path relative to `root`.
fn listed(root: &Path) -> std::io::Result<Vec<String>> {
    let arguments = ["ls-files", "-z", "--cached", "--others", "--exclude-standard", "--deduplicate"];
    let output = Command::new("git").arg("-C").arg(root).args(arguments).output()?;
    if !output.status.success() {
        let why = String::from_utf8_lossy(&output.stderr);
        return Err(std::io::Error::other(format!("git ls-files: {}", why.trim())));
    }
    let names = output.stdout.split(|&byte| byte == 0).filter(|name| !name.is_empty());
    let files = names.map(|name| String::from_utf8_lossy(name).into_owned());
    // Fuzz corpora are data, although some look like text.
    Ok(files.filter(|path| !path.starts_with("fuzz/corpus/") && root.join(path).is_file()).collect())
}

/// All violations in the tree.
pub fn check(tree: &Tree) -> Vec<Violation> {
    let mut found = Vec::new();
    for file in &tree.files {
        if file.path == "Cargo.lock" || file.path.ends_with("/Cargo.lock") {
            check_lock(file, &mut found);
            continue;
        }
        check_length(file, &mut found);
        check_lines(file, &mut found);
        crate::words::check(file, &mut found);
        if file.path.ends_with(".rs") {
            // A module's tests in a separate file are covered by the module's header.
            if !file.path.ends_with("/tests.rs") {
                check_header(file, &mut found);
            }
            check_unsafe(file, &mut found);
        }
    }
    crate::folders::check(tree, &mut found);
    crate::crate_rules::check(tree, &mut found);
    crate::crate_rules::check_document(tree, &mut found);
    check_decisions(tree, &mut found);
    check_changelog(tree, &mut found);
    found
}

/// Prints the violations in the tree at `root`; returns whether there are none.
pub fn report(root: &Path) -> bool {
    let found = match Tree::read(root) {
        Ok(tree) => check(&tree),
        Err(error) => {
            eprintln!("tidy: reading {} failed: {error}", root.display());
            return false;
        }
    };
    for violation in &found {
        eprintln!("tidy: {violation}");
    }
    found.is_empty()
}

fn check_lock(file: &File, found: &mut Vec<Violation>) {
    for (index, line) in file.text.lines().enumerate() {
        if let Some(source) = line.strip_prefix("source = ")
            && source.trim_matches('"') != LOCK_SOURCE
        {
            found.push(Violation::new(
                &file.path,
                index + 1,
                "a dependency from somewhere else than crates.io",
            ));
        }
    }
}

fn check_length(file: &File, found: &mut Vec<Violation>) {
    let lines = file.text.lines().count();
    // Generated pages are as long as what they list.
    if lines > FILE_LINES_MAX && !file.path.starts_with(GENERATED) {
        let what = format!("{lines} lines, more than {FILE_LINES_MAX}: split it by what its parts are about");
        found.push(Violation::new(&file.path, FILE_LINES_MAX + 1, what));
    }
}

fn check_lines(file: &File, found: &mut Vec<Violation>) {
    for (index, line) in file.text.lines().enumerate() {
        let mut say = |what: String| found.push(Violation::new(&file.path, index + 1, what));
        if line.ends_with([' ', '\t', '\r']) {
            say("blanks at the end of the line".into());
        }
        if line.contains('\t') {
            say("a tab: indent with spaces".into());
        }
        for word in LEFTOVER_WORDS.iter().filter(|word| has_word(line, word)) {
            say(format!("{word}: finish it, or open an issue"));
        }
        for call in LEFTOVER_MACROS.iter().filter(|call| line.contains(**call)) {
            say(format!("{call}…): a left-over"));
        }
        for path in MACHINE_PATHS.iter().filter(|path| line.contains(**path)) {
            say(format!("{path} exists on one machine only"));
        }
    }
}

/// Whether `line` contains `word` with no letter, digit or underscore beside it.
fn has_word(line: &str, word: &str) -> bool {
    let part_of_word = |c: char| c.is_alphanumeric() || c == '_';
    line.match_indices(word).any(|(at, _)| {
        !line[..at].ends_with(part_of_word) && !line[at + word.len()..].starts_with(part_of_word)
    })
}

fn check_header(file: &File, found: &mut Vec<Violation>) {
    let header = file.text.lines().take_while(|line| line.starts_with("//!")).count();
    if header == 0 {
        found.push(Violation::new(
            &file.path,
            1,
            "no module header: say in //! what it is and what it does not do",
        ));
    } else if header > HEADER_LINES_MAX {
        let what = format!("a header of {header} lines, more than {HEADER_LINES_MAX}");
        found.push(Violation::new(&file.path, HEADER_LINES_MAX + 1, what));
    }
}

fn check_unsafe(file: &File, found: &mut Vec<Violation>) {
    let mut parts = file.path.strip_prefix("crates/").unwrap_or(&file.path).splitn(2, '/');
    let (folder, inside) = (parts.next().unwrap_or_default(), parts.next().unwrap_or_default());
    let allowed = UNSAFE_PATHS.iter().find(|(name, _)| *name == folder).map_or(&[][..], |(_, files)| *files);
    let is_root = matches!(inside, "src/lib.rs" | "src/main.rs") || inside.starts_with("src/bin/");
    if is_root {
        let wanted: &[&str] = match (folder, allowed) {
            ("ring", _) => &[],
            (_, []) => &["#![forbid(unsafe_code)]"],
            // If one module is exempt, `deny` covers the rest, which only that module lifts.
            _ => &["#![deny(unsafe_code)]", "#![forbid(unsafe_code)]"],
        };
        if !wanted.is_empty() && !wanted.iter().any(|line| file.text.lines().any(|text| text == *line)) {
            found.push(Violation::new(&file.path, 1, format!("a crate root without {}", wanted[0])));
        }
    }
    if allowed.iter().any(|prefix| inside.starts_with(prefix)) {
        return;
    }
    for (index, line) in file.text.lines().enumerate() {
        let code = line.split("//").next().unwrap_or_default();
        if UNSAFE_WORDS.iter().any(|words| code.contains(words)) {
            found.push(Violation::new(&file.path, index + 1, "unsafe outside the paths that may contain it"));
        }
    }
}

/// Checks that decisions are numbered from 0001 without duplicates: `docs/adr/0001-what-was-decided.md`.
fn check_decisions(tree: &Tree, found: &mut Vec<Violation>) {
    let mut lowest = 1;
    for file in &tree.files {
        let Some(name) = file.path.strip_prefix("docs/adr/") else { continue };
        if name == "README.md" {
            continue;
        }
        let number = name.get(..4).and_then(|digits| digits.parse::<usize>().ok());
        if number.is_none_or(|number| number < lowest)
            || name.get(4..5) != Some("-")
            || !name.ends_with(".md")
        {
            found.push(Violation::new(&file.path, 1, format!("expected docs/adr/{lowest:04}-….md or later")));
        }
        lowest = number.unwrap_or(lowest) + 1;
    }
}

fn check_changelog(tree: &Tree, found: &mut Vec<Violation>) {
    let unreleased =
        |file: &File| file.text.lines().any(|line| matches!(line, "## Unreleased" | "## [Unreleased]"));
    if !tree.holds("CHANGELOG.md").is_some_and(unreleased) {
        found.push(Violation::new(
            "CHANGELOG.md",
            1,
            "no '## Unreleased': say there what changed, in the user's words",
        ));
    }
}
