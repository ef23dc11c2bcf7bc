//! `./x soak sanitizers`: the unit tests under Miri, AddressSanitizer and ThreadSanitizer, and loom's models.
//!
//! The sanitizers need a nightly compiler: `rustup toolchain install nightly -c miri -c rust-src`. Without one the models are
//! run alone, and what was left out is said and counted as ignored.

use crate::chores::{Chore, MODELS};
use std::path::Path;
use std::process::{Command, Stdio};

/// Crates without system calls, where Miri can follow everything: whatever else they do, they hold no `unsafe` today.
/// `partition` is not among them: it has neither threads nor `unsafe`, and its tests read whole disks, one of them for
/// longer than a quarter of an hour under Miri.
const PURE: [&str; 3] = ["blockyard-block", "blockyard-trace", "blockyard-queue"];
/// Tests of those that take Miri longer than a minute each: they repeat themselves thousands of times.
const LONG: [&str; 4] =
    ["no_order_of_parts_and_wholes", "threads_that_write", "many_threads_leave", "records_arrive_whole"];
/// Crates with `unsafe`.
const UNSAFE: [&str; 5] =
    ["blockyard-ring", "blockyard-ublk", "blockyard-fuse", "blockyard-loopdev", "blockyard-backends"];
/// Crates whose tests have several threads at shared atomics.
const SHARED: [&str; 3] = ["blockyard-queue", "blockyard-layers", "blockyard-backends"];
/// What sanitizers build for: with a target named, their flags are not for build scripts.
const TARGET: [&str; 2] = ["--target", "x86_64-unknown-linux-gnu"];

fn has_nightly() -> bool {
    let mut miri = Command::new("cargo");
    let miri = miri.args(["+nightly", "miri", "--version"]).stdout(Stdio::null()).stderr(Stdio::null());
    miri.status().is_ok_and(|status| status.success())
}

fn of<'a>(packages: &[&'a str]) -> Vec<&'a str> {
    packages.iter().flat_map(|package| ["--package", package]).collect()
}

/// All of them.
pub(crate) fn soak(root: &Path) -> bool {
    let mut chore = Chore::begin(root);
    let models = chore.step(&MODELS, &[("RUSTFLAGS", "--cfg loom"), ("CARGO_TARGET_DIR", "target/loom")]);
    if !has_nightly() {
        let how = "rustup toolchain install nightly -c miri -c rust-src";
        chore.announce(&format!(
            "skipped: Miri and the sanitizers: there is no nightly compiler with Miri ({how})"
        ));
        chore.tally.ignored += 1;
        return chore.end(models);
    }
    let skip: Vec<&str> = LONG.iter().flat_map(|name| ["--skip", name]).collect();
    let miri = [&["cargo", "+nightly", "miri", "test", "--locked", "--lib"][..], &of(&PURE), &["--"], &skip]
        .concat();
    let flags = "-Zmiri-disable-isolation -Zmiri-strict-provenance";
    let miri = chore.step(&miri, &[("MIRIFLAGS", flags), ("CARGO_TARGET_DIR", "target/miri")]);
    let test = [&["cargo", "+nightly", "test", "--locked", "--lib"][..], &TARGET].concat();
    let address = [&test[..], &of(&UNSAFE)].concat();
    let environment = [("RUSTFLAGS", "-Zsanitizer=address"), ("CARGO_TARGET_DIR", "target/asan")];
    let address = chore.step(&address, &environment);
    // The standard library is built with it, too: of one that is not, it reports races that are none.
    let thread = [&test[..], &["-Zbuild-std"], &of(&SHARED)].concat();
    let known = format!("suppressions={}", root.join("crates/xtask/thread-sanitizer.txt").display());
    let environment = [
        ("RUSTFLAGS", "-Zsanitizer=thread"),
        ("CARGO_TARGET_DIR", "target/tsan"),
        ("TSAN_OPTIONS", known.as_str()),
    ];
    let thread = chore.step(&thread, &environment);
    chore.end(models && miri && address && thread)
}
