//! `./x package`: the Debian package, its checks, the SBOM and the licence check.
//!
//! The package is built from the files below `packaging/` and from pages that the program prints itself. It
//! has the debug symbols in a package of their own. Nothing in it depends on the build directory or on the
//! time: paths are remapped, times are those of the last commit (`SOURCE_DATE_EPOCH`).

mod check;
mod crates;
mod deb;
mod systemd;

use crate::guest::process::{output, quiet};
use std::path::{Path, PathBuf};
use std::process::Command;

const USAGE: &str = "\
usage: ./x package [--binary FILE] [--version VERSION] [--out FOLDER]
       ./x package check [--binary FILE]
       ./x package test [--binary FILE]
       ./x package reproduce
       ./x package licences
       ./x package sbom

Builds blockyard_VERSION_ARCH.deb and blockyard-dbgsym_VERSION_ARCH.deb in target/package.

  check             builds the package from target/release/blockyard and checks it: contents, lintian, man pages, units
  test              installs, starts, reboots, upgrades and removes the package under systemd, in a guest
  reproduce         builds the last commit in two directories, and compares the packages
  licences          checks the licence of each crate that is linked into the program
  sbom              prints the crates that are linked into the program as CycloneDX JSON

  --binary FILE     package this program; otherwise a reproducible build is made in target/package/build
  --version VERSION the package's version [that of the workspace, with -1]
  --out FOLDER      the folder of the packages [target/package]
";

/// What to package.
struct Order {
    binary: Option<PathBuf>,
    version: Option<String>,
    out: PathBuf,
    /// Whether packages are compressed fast, for a test.
    quick: bool,
}

fn order(root: &Path, arguments: &[String]) -> Result<Order, String> {
    let mut order = Order { binary: None, version: None, out: root.join("target/package"), quick: false };
    let mut arguments = arguments.iter();
    while let Some(word) = arguments.next() {
        let mut value = || arguments.next().ok_or(format!("{word} needs a value"));
        match word.as_str() {
            "--binary" => order.binary = Some(value()?.into()),
            "--version" => order.version = Some(value()?.clone()),
            "--out" => order.out = value()?.into(),
            _ => return Err(format!("no such option: {word}\n\n{USAGE}")),
        }
    }
    Ok(order)
}

/// Runs the command line; returns whether it succeeded.
pub fn main(root: &Path, arguments: &[String]) -> bool {
    let done = match arguments {
        [word] if word == "--help" || word == "-h" => {
            print!("{USAGE}");
            Ok(())
        }
        [word] if word == "licences" => crates::check_licences(root),
        [word] if word == "reproduce" => reproduce(root),
        [word] if word == "sbom" => crates::sbom(root).map(|text| println!("{text}")),

        [word, rest @ ..] if word == "test" => order(root, rest).and_then(|order| systemd::test(root, order)),
        [word, rest @ ..] if word == "check" => order(root, rest).and_then(|order| check::all(root, order)),
        rest => order(root, rest).and_then(|order| packages(root, &order)),
    };
    done.inspect_err(|why| eprintln!("package: {why}")).is_ok()
}

fn packages(root: &Path, order: &Order) -> Result<(), String> {
    let root = root.canonicalize().map_err(|why| format!("{}: {why}", root.display()))?;
    let binary = match &order.binary {
        Some(binary) => binary.clone(),
        None => build(&root)?,
    };
    let built = deb::build(&root, &binary, order)?;
    for path in [&built.package, &built.symbols] {
        println!("{}", path.display());
    }
    Ok(())
}

/// Builds the last commit in two directories, with new build directories, and compares the bytes of the
/// packages.
fn reproduce(root: &Path) -> Result<(), String> {
    let root = root.canonicalize().map_err(|why| format!("{}: {why}", root.display()))?;
    let mut packages = Vec::new();
    for name in ["one", "a-longer-name"] {
        let clone = root.join("target/package/reproduce").join(name);
        shell("rm -rf \"$2\"; git clone --quiet \"$1\" \"$2\"", &[&root, &clone])?;
        let order = order(&clone, &[])?;
        let binary = build(&clone)?;
        packages.push(deb::build(&clone, &binary, &order)?);
    }
    let [one, other] = packages.as_slice() else { return Err("two packages were expected".into()) };
    for (one, other) in [(&one.package, &other.package), (&one.symbols, &other.symbols)] {
        quiet(Command::new("cmp").arg(one).arg(other))?;
        print!("{}", output(Command::new("sha256sum").arg(one))?);
    }
    Ok(())
}

/// Builds the program so that another directory gives the same bytes.
fn build(root: &Path) -> Result<PathBuf, String> {
    let home = |name: &str, below: &str| {
        std::env::var(name)
            .unwrap_or_else(|_| format!("{}/{below}", std::env::var("HOME").unwrap_or_default()))
    };
    let (cargo, epoch) = (home("CARGO_HOME", ".cargo"), epoch(root)?);
    let maps = [(root.display().to_string(), "/usr/src/blockyard"), (cargo, "/usr/src/cargo")];
    let rust: Vec<String> =
        maps.iter().map(|(from, to)| format!("--remap-path-prefix={from}={to}")).collect();
    let c: Vec<String> = maps.iter().map(|(from, to)| format!("-ffile-prefix-map={from}={to}")).collect();
    let target = root.join("target/package/build");
    let mut cargo = Command::new("cargo");
    cargo.args(["build", "--locked", "--release", "--package", "blockyard"]).current_dir(root);
    cargo.env("CARGO_PROFILE_RELEASE_DEBUG", "line-tables-only");
    cargo.env("CARGO_TARGET_DIR", &target).env("SOURCE_DATE_EPOCH", epoch);
    cargo.env("RUSTFLAGS", rust.join(" ") + " -Clink-arg=-Wl,--build-id=sha1").env("CFLAGS", c.join(" "));
    // The checks of a developer's environment are no part of the package.
    cargo.env_remove("RUSTC_WORKSPACE_WRAPPER");
    let status = cargo.status().map_err(|why| format!("starting cargo failed: {why}"))?;
    if status.success() { Ok(target.join("release/blockyard")) } else { Err("cargo build failed".into()) }
}

/// The time of the package's files: `SOURCE_DATE_EPOCH`, or that of the last commit.
fn epoch(root: &Path) -> Result<String, String> {
    if let Ok(given) = std::env::var("SOURCE_DATE_EPOCH") {
        return Ok(given);
    }
    let text = output(Command::new("git").arg("-C").arg(root).args(["log", "-1", "--format=%ct"]))?;
    Ok(text.trim().to_owned())
}

/// Runs a shell script, which stops at the first error.
fn shell(script: &str, arguments: &[&Path]) -> Result<(), String> {
    quiet(Command::new("bash").args(["-euo", "pipefail", "-c", script, "package"]).args(arguments))
}
