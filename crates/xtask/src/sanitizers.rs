//! `./x soak sanitizers`: the unit tests under Miri, AddressSanitizer and ThreadSanitizer, and loom's models.
//!
//! The sanitizers need a nightly compiler: `rustup toolchain install nightly -c miri -c rust-src`. Without
//! one only the models are run, and the rest is reported as skipped.

use crate::commands::{MODELS, Task};
use std::path::Path;
use std::process::{Command, Stdio};

/// Crates without system calls, which Miri can run entirely: besides other errors, it confirms that they have
/// no undefined behaviour. `partition` is excluded: it has neither threads nor `unsafe`, and its tests read
/// whole disks, one of them for longer than 15 minutes under Miri.
const PURE: [&str; 3] = ["blockyard-block", "blockyard-trace", "blockyard-queue"];
/// Tests of these crates that take longer than a minute each under Miri: they repeat themselves thousands of
/// times.
const LONG: [&str; 4] =
    ["no_order_of_parts_and_wholes", "threads_that_write", "many_threads_leave", "records_arrive_whole"];
/// Crates with `unsafe`.
const UNSAFE: [&str; 6] = [
    "blockyard-ring",
    "blockyard-ublk",
    "blockyard-virtio",
    "blockyard-fuse",
    "blockyard-loopdev",
    "blockyard-backends",
];
/// Crates whose tests share atomics between threads.
const SHARED: [&str; 3] = ["blockyard-queue", "blockyard-layers", "blockyard-backends"];
/// Target of sanitizer builds: with `--target`, their flags do not apply to build scripts.
const TARGET: [&str; 2] = ["--target", "x86_64-unknown-linux-gnu"];
/// Line numbers for the reports, which test builds leave out.
const LINES: (&str, &str) = ("CARGO_PROFILE_DEV_DEBUG", "line-tables-only");

fn has_nightly() -> bool {
    let mut miri = Command::new("cargo");
    let miri = miri.args(["+nightly", "miri", "--version"]).stdout(Stdio::null()).stderr(Stdio::null());
    miri.status().is_ok_and(|status| status.success())
}

fn of<'a>(packages: &[&'a str]) -> Vec<&'a str> {
    packages.iter().flat_map(|package| ["--package", package]).collect()
}

/// Runs all sanitizers and loom's models.
pub(crate) fn soak(root: &Path) -> bool {
    let mut task = Task::begin(root);
    let models = task.step(&MODELS, &[("RUSTFLAGS", "--cfg loom"), ("CARGO_TARGET_DIR", "target/loom")]);
    if !has_nightly() {
        let how = "rustup toolchain install nightly -c miri -c rust-src";
        task.announce(&format!(
            "skipped: Miri and the sanitizers: there is no nightly compiler with Miri ({how})"
        ));
        task.tally.ignored += 1;
        return task.end(models);
    }
    let skip: Vec<&str> = LONG.iter().flat_map(|name| ["--skip", name]).collect();
    let miri = [&["cargo", "+nightly", "miri", "test", "--locked", "--lib"][..], &of(&PURE), &["--"], &skip]
        .concat();
    let flags = "-Zmiri-disable-isolation -Zmiri-strict-provenance";
    let miri = task.step(&miri, &[("MIRIFLAGS", flags), ("CARGO_TARGET_DIR", "target/miri")]);
    let test = [&["cargo", "+nightly", "test", "--locked", "--lib"][..], &TARGET].concat();
    let address = [&test[..], &of(&UNSAFE)].concat();
    let environment = [("RUSTFLAGS", "-Zsanitizer=address"), ("CARGO_TARGET_DIR", "target/asan"), LINES];
    let address = task.step(&address, &environment);
    // The standard library is instrumented as well: otherwise false races are reported.
    let thread = [&test[..], &["-Zbuild-std"], &of(&SHARED)].concat();
    let known = format!("suppressions={}", root.join("crates/xtask/thread-sanitizer.txt").display());
    let environment = [
        LINES,
        ("RUSTFLAGS", "-Zsanitizer=thread"),
        ("CARGO_TARGET_DIR", "target/tsan"),
        ("TSAN_OPTIONS", known.as_str()),
    ];
    let thread = task.step(&thread, &environment);
    task.end(models && miri && address && thread)
}
