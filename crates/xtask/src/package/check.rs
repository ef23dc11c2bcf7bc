//! `./x package check`: builds the package from an existing program, and checks it in seconds.

use super::{Order, crates, deb};
use crate::guest::process::output;
use std::path::Path;
use std::process::Command;

/// Files that must be in the package.
const CONTENTS: &[&str] = &[
    "./usr/bin/blockyard",
    "./usr/share/man/man1/blockyard.1.gz",
    "./usr/share/man/man1/blockyard-serve.1.gz",
    "./usr/share/man/man7/blockyard-stacks.7.gz",
    "./usr/share/man/man5/blockyard-topology.5.gz",
    "./usr/share/bash-completion/completions/blockyard",
    "./usr/share/zsh/vendor-completions/_blockyard",
    "./usr/share/fish/vendor_completions.d/blockyard.fish",
    "./usr/share/doc/blockyard/blockyard.cdx.json.gz",
    "./etc/blockyard/example.toml",
    "./usr/lib/systemd/system/blockyard@.service",
    "./usr/lib/systemd/system/blockyard-nbd@.socket",
    "./usr/lib/systemd/system/blockyard-recover.service",
    "./usr/lib/udev/rules.d/60-blockyard.rules",
    "./usr/lib/sysusers.d/blockyard.conf",
    "./usr/lib/tmpfiles.d/blockyard.conf",
];

/// Largest exposure of the unit without privileges that `systemd-analyze security` may compute, times ten.
const EXPOSURE_MAX: &str = "39";

/// Builds the package and checks its contents, units and pages.
pub(super) fn all(root: &Path, mut order: Order) -> Result<(), String> {
    order.out = order.out.join("check");
    order.quick = true;
    let binary = order.binary.take().unwrap_or_else(|| root.join("target/release/blockyard"));
    crates::check_licences(root)?;
    let built = deb::build(root, &binary, &order)?;
    contents(&built.package)?;
    lint(&[&built.package])?;
    pages(&order.out.join("tree"))?;
    units(&order.out.join("tree"))
}

fn contents(package: &Path) -> Result<(), String> {
    let list = output(Command::new("dpkg-deb").arg("-c").arg(package))?;
    let has = |path: &str| list.lines().any(|line| line.ends_with(&format!(" {path}")));
    let missing: Vec<&str> = CONTENTS.iter().copied().filter(|path| !has(path)).collect();
    if missing.is_empty() {
        println!("contents: {} files", list.lines().filter(|line| !line.starts_with('d')).count());
        return Ok(());
    }
    Err(format!("{} lacks {}", package.display(), missing.join(", ")))
}

/// Runs lintian; each tag that is not overridden is an error.
fn lint(packages: &[&Path]) -> Result<(), String> {
    let mut lintian = Command::new("lintian");
    // lintian must also check builds of root.
    lintian.args(["--allow-root", "--tag-display-limit=0", "--fail-on=error,warning"]).args(packages);
    let done = lintian.output().map_err(|why| format!("starting lintian failed: {why}"))?;
    let text = String::from_utf8_lossy(&done.stdout);
    if !done.status.success() {
        return Err(format!("lintian: {}\n{text}", done.status));
    }
    print!("lintian: clean\n{text}");
    Ok(())
}

/// Formats every page; a warning of groff is an error.
fn pages(tree: &Path) -> Result<(), String> {
    let script = "cd \"$1\"; n=0; for page in usr/share/man/man*/*.gz; do
        said=$(zcat \"$page\" | groff -man -Tutf8 -ww -rLL=100n 2>&1 >/dev/null)
        [ -z \"$said\" ] || { echo \"$page: $said\" >&2; exit 1; }
        n=$((n + 1))
    done; echo \"man pages: $n without a warning\"";
    let said = output(Command::new("bash").args(["-euc", script, "pages"]).arg(tree))?;
    print!("{said}");
    Ok(())
}

/// Checks the units with systemd, and the exposure of the one without privileges.
fn units(tree: &Path) -> Result<(), String> {
    let script = "cd \"$1\"
        said=$(systemd-analyze verify --recursive-errors=no --man=no --root=\"$PWD\" \
            usr/lib/systemd/system/blockyard@.service usr/lib/systemd/system/blockyard-nbd@.service \
            usr/lib/systemd/system/blockyard-recover.service usr/lib/systemd/system/blockyard-recover@.service 2>&1) ||
            { echo \"$said\" >&2; exit 1; }
        said=$(printf '%s' \"$said\" | grep -v '^$' | grep blockyard || true)
        [ -z \"$said\" ] || { echo \"$said\" >&2; exit 1; }
        systemd-analyze security --offline=yes --root=\"$PWD\" --threshold=\"$2\" --no-pager blockyard-nbd@x.service |
            tail -1";
    let said = output(Command::new("bash").args(["-euc", script, "units"]).arg(tree).arg(EXPOSURE_MAX))?;
    print!("units: verified\n{said}");
    Ok(())
}
