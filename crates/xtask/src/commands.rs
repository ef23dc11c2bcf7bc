//! Tasks that run other programs: `check`, `test`, `fuzz`, `soak`.
//!
//! A task is a list of steps; each prints its command first, and the first failure ends the task. Results
//! are summed over all runners, so that the last line says `N passed, N failed`. Nothing is skipped
//! silently: a step that cannot run fails.

use crate::ceph::Cluster;
use crate::programs;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

/// Stacks that `./x test` simulates with new seeds, besides the fixed seeds of the test itself. It prints the
/// first seed; `BLOCKYARD_SEED=N` reproduces a run.
const FRESH_RUNS: &str = "300";
/// Prefix of the names of tests with new seeds.
const FRESH_TESTS: &str = "fresh_seeds";

/// Test results, over all runners.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct Tally {
    /// Tests and steps that succeeded.
    pub passed: u64,
    /// Tests and steps that failed.
    pub failed: u64,
    /// Tests that their runner ignored.
    pub ignored: u64,
}

impl Tally {
    fn add(&mut self, other: Tally) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.ignored += other.ignored;
    }

    /// Adds a line of a test runner's output if it is a summary, such as `test result: ok. 5 passed; 0
    /// failed; 1 ignored; …`; returns whether it is.
    pub fn add_line(&mut self, line: &str) -> bool {
        let Some((_, counts)) = line.strip_prefix("test result: ").and_then(|rest| rest.split_once(". "))
        else {
            return false;
        };
        for part in counts.split(';') {
            let mut words = part.split_whitespace();
            let Some(count) = words.next().and_then(|word| word.parse::<u64>().ok()) else { continue };
            match words.next() {
                Some("passed") => self.passed += count,
                Some("failed") => self.failed += count,
                Some("ignored") => self.ignored += count,
                _ => {}
            }
        }
        true
    }
}

/// Names the directory with the files of virtual machines to their tests.
const MACHINE: &str = "BLOCKYARD_MACHINE";

/// A running task.
pub(crate) struct Task<'a> {
    root: &'a Path,
    output: Box<dyn Write + Send>,
    pub(crate) tally: Tally,
    started: Instant,
}

impl<'a> Task<'a> {
    pub(crate) fn begin(root: &'a Path) -> Self {
        Self::begin_into(root, Box::new(std::io::stdout()))
    }

    fn begin_into(root: &'a Path, output: Box<dyn Write + Send>) -> Self {
        Self { root, output, tally: Tally::default(), started: Instant::now() }
    }

    /// Runs a command with `environment` added; counts its tests, or itself if it has none.
    pub(crate) fn step(&mut self, command: &[&str], environment: &[(&str, &str)]) -> bool {
        let set: String = environment.iter().map(|(name, value)| format!("{name}={value} ")).collect();
        self.announce(&format!("{set}{}", command.join(" ")));
        let before = self.tally;
        let ok = match run(self.root, command, environment, &mut self.output, &mut self.tally) {
            Ok(ok) => ok,
            Err(error) => {
                eprintln!("starting {} failed: {error}", command[0]);
                false
            }
        };
        match (self.tally == before, ok) {
            (true, true) => self.tally.passed += 1,
            (true, false) => self.tally.failed += 1,
            // A runner that crashes after its summaries, or does not build a program, counts as failed,
            // too.
            (false, false) if self.tally.failed == before.failed => self.tally.failed += 1,
            (false, _) => {}
        }
        ok
    }

    /// Errors are ignored: a closed terminal must not end a task.
    pub(crate) fn announce(&mut self, step: &str) {
        let _ = writeln!(self.output, "\n=== {:3} s: {step}", self.started.elapsed().as_secs());
    }

    fn tidy(&mut self) -> bool {
        self.announce("tidy");
        let ok = crate::tidy::report(self.root);
        if ok {
            self.tally.passed += 1;
        } else {
            self.tally.failed += 1;
        }
        ok
    }

    /// Builds all test programs in that environment and runs them in parallel, including the guest's suite;
    /// then runs the simulation with new seeds. `full`: those of whole virtual machines as well, which
    /// emulate a boot several times, and all of the guest's.
    fn programs(&mut self, environment: &[(&str, &str)], binary: &str, full: bool) -> bool {
        self.announce("cargo test --workspace, compiled by clippy");
        let programs = match programs::programs(self.root, environment) {
            Ok(programs) => programs,
            Err(error) => {
                eprintln!("{error}");
                self.tally.failed += 1;
                return false;
            }
        };
        let cluster = self.cluster();
        let folder = cluster.as_ref().map(Cluster::folder);
        // A guest waits for its disks and timers about as often as the other programs do.
        let guest: Vec<programs::Program> = guest_suite(self, "newest", full).into_iter().collect();
        let machine = if full { self.machine(environment) } else { None };
        if full && machine.is_none() {
            return false;
        }
        let with = if guest.is_empty() { "" } else { ", and the tests on a kernel of their own" };
        self.announce(&format!("BLOCKYARD_BIN={binary}: {} test programs{with}", programs.len()));
        let total = programs.len() + guest.len();
        let ended = Mutex::new((&mut self.output, Tally::default(), Vec::new()));
        let mut environment = [environment, &[("BLOCKYARD_BIN", binary)]].concat();
        environment.extend(folder.as_ref().map(|folder| ("BLOCKYARD_CEPH", folder.as_str())));
        environment.extend(machine.as_ref().map(|folder| (MACHINE, folder.as_str())));
        programs::run_all(&guest, &programs, &environment, &|outcome| {
            let mut ended = ended.lock().unwrap_or_else(PoisonError::into_inner);
            let (output, tally, failed) = &mut *ended;
            let _ = output.write_all(outcome.output.as_bytes());
            let before = *tally;
            outcome.output.lines().for_each(|line| {
                tally.add_line(line);
            });
            if !outcome.ok {
                // A program that crashes prints no summary.
                tally.failed += u64::from(tally.failed == before.failed);
                failed.extend(outcome.output.lines().find(|line| !line.is_empty()).map(str::to_owned));
            }
        });
        drop(cluster);
        let (_, tally, failed) = ended.into_inner().unwrap_or_else(PoisonError::into_inner);
        self.tally.add(tally);
        if !failed.is_empty() {
            self.announce(&format!(
                "{} of {total} test programs failed: {}",
                failed.len(),
                failed.join(", ")
            ));
            return false;
        }
        let Some(simulation) = programs.iter().find(|program| program.name() == "simulation") else {
            eprintln!("the simulation is missing");
            self.tally.failed += 1;
            return false;
        };
        let passed = self.tally.passed;
        let simulation = simulation.path.to_string_lossy().into_owned();
        let done =
            self.step(&[&simulation, "--nocapture", FRESH_TESTS], &[("BLOCKYARD_SIM_RUNS", FRESH_RUNS)]);
        // A filter that matches no test would succeed, so a further passed test is required.
        done && self.tally.passed > passed + 1
    }

    /// Starts a Ceph cluster for the tests of `rbd:` devices. `None`: Ceph is not installed, and the tests
    /// are skipped; or it does not start, which counts as a failure.
    fn cluster(&mut self) -> Option<Cluster> {
        if let Some(program) = crate::ceph::missing_program() {
            self.announce(&format!("skipped: the tests on a Ceph of one node: there is no {program}"));
            self.tally.ignored += 1;
            return None;
        }
        self.announce("a Ceph of one node");
        match Cluster::start(self.root) {
            Ok(cluster) => Some(cluster),
            Err(error) => {
                eprintln!("starting a Ceph failed: {error}");
                self.tally.failed += 1;
                None
            }
        }
    }

    /// Writes the files of virtual machines; returns their directory. A process of its own builds what it
    /// needs in this environment.
    fn machine(&mut self, environment: &[(&str, &str)]) -> Option<String> {
        const FOLDER: &str = "target/machine";
        let words = ["cargo", "run", "--quiet", "--locked", "--package", "blockyard-xtask", "--", "guest"];
        let done = self.step(&[&words[..], &["--machine", FOLDER]].concat(), environment);
        let folder = self.root.join(FOLDER).canonicalize().ok().filter(|_| done)?;
        Some(folder.to_string_lossy().into_owned())
    }

    /// Fetches `iscsi-test-cu`, which `iscsi_conformance` runs.
    fn iscsi_test(&mut self) -> bool {
        self.announce("iscsi-test-cu");
        let fetched = crate::foreign::iscsi_test(self.root);
        if let Err(error) = &fetched {
            eprintln!("{error}");
            self.tally.failed += 1;
        }
        fetched.is_ok()
    }

    /// Fetches the clients that `vhost_user_clients` runs; without those of the release it skips itself.
    fn vhost_clients(&mut self) -> bool {
        self.announce("clients of vhost-user");
        let fetched = crate::foreign::vhost_clients(self.root);
        self.fetched("vhost_user_clients", fetched)
    }

    /// Fetches the kernel that `vhost_user_mode_linux` runs; without it the test skips itself.
    fn user_mode_linux(&mut self) -> bool {
        self.announce("user-mode Linux");
        let fetched = crate::user_mode_linux::fetched(self.root);
        self.fetched("vhost_user_mode_linux", fetched)
    }

    /// Counts what was fetched for a test program, or what the release lacks, or an error.
    fn fetched(&mut self, test: &str, fetched: Result<Result<PathBuf, String>, String>) -> bool {
        match fetched {
            Ok(Ok(_)) => true,
            Ok(Err(lacking)) => {
                self.announce(&format!("skipped: {test}: {lacking}"));
                self.tally.ignored += 1;
                true
            }
            Err(error) => {
                eprintln!("{error}");
                self.tally.failed += 1;
                false
            }
        }
    }

    /// Prints the last line. `done`: all steps have succeeded.
    pub(crate) fn end(mut self, done: bool) -> bool {
        let Tally { passed, failed, ignored } = self.tally;
        let left_out = if ignored == 0 { String::new() } else { format!(" ({ignored} ignored)") };
        let _ = writeln!(self.output, "\n{} s{left_out}", self.started.elapsed().as_secs());
        let _ = writeln!(self.output, "{passed} passed, {failed} failed");
        done && failed == 0
    }
}

/// Runs `command` in `root`, copying its output line by line while counting; returns whether it exited with
/// status 0.
fn run(
    root: &Path,
    command: &[&str],
    environment: &[(&str, &str)],
    output: &mut dyn Write,
    tally: &mut Tally,
) -> std::io::Result<bool> {
    let mut child = Command::new(command[0])
        .args(&command[1..])
        .envs(environment.iter().copied())
        .current_dir(root)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()?;
    if let Some(stdout) = child.stdout.take() {
        let mut reader = BufReader::new(stdout);
        let mut line = Vec::new();
        while reader.read_until(b'\n', &mut line)? > 0 {
            output.write_all(&line)?;
            tally.add_line(String::from_utf8_lossy(&line).trim_end());
            line.clear();
        }
    }
    Ok(child.wait()?.success())
}

const FORMAT: &[&str] = &["cargo", "fmt", "--all", "--check"];
const CLIPPY: &[&str] =
    &["cargo", "clippy", "--quiet", "--locked", "--workspace", "--all-targets", "--", "-D", "warnings"];

/// The checks to run before each commit: under a minute once built.
pub fn check(root: &Path) -> bool {
    let mut task = Task::begin(root);
    let unit = ["cargo", "test", "--quiet", "--locked", "--workspace", "--lib", "--bins"];
    let done = task.step(FORMAT, &[]) && task.tidy() && task.step(CLIPPY, &[]) && task.step(&unit, &[]);
    task.end(done)
}

/// Everything that CI runs; `full` adds virtual machines and user-mode Linux on vhost-user exports, the guest's longest rows, its
/// suite on an older kernel, and the documentation of all crates, for which rustdoc checks every dependency
/// once more. Tests use the release binary, passed as `BLOCKYARD_BIN`; the test programs themselves are built
/// without optimisation, to have overflow checks and debug assertions. Clippy compiles them ([`lints`]), so that
/// nothing is compiled twice.
pub fn test(root: &Path, full: bool) -> bool {
    let mut task = Task::begin(root);
    let release =
        ["cargo", "build", "--locked", "--release", "--package", "blockyard", "--package", "blockyard-bench"];
    let binary = match root.canonicalize() {
        Ok(root) => root.join("target/release/blockyard").to_string_lossy().into_owned(),
        Err(error) => {
            eprintln!("{}: {error}", root.display());
            return false;
        }
    };
    let clippy = match lints() {
        Ok(clippy) => clippy,
        Err(error) => {
            eprintln!("asking rustc for its folder failed: {error}");
            return false;
        }
    };
    let clippy: Vec<(&str, &str)> = clippy.iter().map(|(name, value)| (*name, value.as_str())).collect();
    let done = task.step(FORMAT, &[])
        && task.tidy()
        && task.step(&release, &[])
        && task.iscsi_test()
        && task.vhost_clients()
        && (!full || task.user_mode_linux())
        && task.programs(&clippy, &binary, full)
        && task.step(&MODELS, &[("RUSTFLAGS", "--cfg loom"), ("CARGO_TARGET_DIR", "target/loom")])
        && task.step(&["target/release/blockyard-bench", "instructions"], &[])
        && task.step(&PACKAGE, &clippy)
        && (!full || guest(&mut task, &binary, "older", &clippy))
        && (!full || task.step(&DOCUMENTATION, &[("RUSTDOCFLAGS", "-D warnings")]));
    task.end(done)
}

/// Fetches the clients of vhost-user for `cargo test --test vhost_user_clients`.
pub fn vhost_clients(root: &Path) -> bool {
    let mut task = Task::begin(root);
    let done = task.vhost_clients();
    task.end(done)
}

/// Fetches user-mode Linux for `cargo test --test vhost_user_mode_linux`.
pub fn user_mode_linux(root: &Path) -> bool {
    let mut task = Task::begin(root);
    let done = task.user_mode_linux();
    task.end(done)
}

/// Runs iscsi-test-cu against the optimised binary, or against the target at `--url`, and prints a table.
/// `arguments`: after the options `FAMILY`, `FAMILY.SUITE` or `FAMILY.SUITE.TEST`, by default all families.
pub fn conformance(root: &Path, arguments: &[String]) -> bool {
    const BINARY: &str = "BLOCKYARD_BIN";
    let (url, suites) = match arguments {
        [option, url, suites @ ..] if option == "--url" => (Some(url.as_str()), suites),
        suites => (None, suites),
    };
    if suites.iter().any(|word| word.starts_with('-')) {
        eprintln!("conformance: usage: ./x conformance [--url URL] [FAMILY[.SUITE[.TEST]]...]");
        return false;
    }
    let mut task = Task::begin(root);
    let given = std::env::var(BINARY).ok();
    let release = ["cargo", "build", "--locked", "--release", "--package", "blockyard"];
    if !task.iscsi_test() || (url.is_none() && given.is_none() && !task.step(&release, &[])) {
        return task.end(false);
    }
    let binary = given.unwrap_or_else(|| {
        let root = root.canonicalize().unwrap_or_else(|_| root.to_owned());
        root.join("target/release/blockyard").to_string_lossy().into_owned()
    });
    let suites = suites.join(" ");
    let mut environment = vec![("BLOCKYARD_ISCSI_SUITES", suites.as_str())];
    environment.push(url.map_or((BINARY, binary.as_str()), |url| ("BLOCKYARD_ISCSI_URL", url)));
    let run = ["cargo", "test", "--locked", "--package", "blockyard-tests", "--test", "iscsi_conformance"];
    let done = task.step(&[&run[..], &["--", "--nocapture"]].concat(), &environment);
    task.end(done)
}

/// Returns the environment in which cargo compiles the workspace with clippy's compiler and warnings as
/// errors, but not its dependencies. `cargo clippy` would compile everything once more.
fn lints() -> std::io::Result<[(&'static str, String); 2]> {
    let output = Command::new("rustc").args(["--print", "sysroot"]).output()?;
    let sysroot = String::from_utf8_lossy(&output.stdout).trim_end().to_owned();
    // `cargo clippy` separates the arguments like this, too.
    const DENY_WARNINGS: &str = "-D__CLIPPY_HACKERY__warnings__CLIPPY_HACKERY__";
    Ok([
        ("RUSTC_WORKSPACE_WRAPPER", format!("{sysroot}/bin/clippy-driver")),
        ("CLIPPY_ARGS", DENY_WARNINGS.to_owned()),
    ])
}

/// The loom models, which check shared state under every interleaving. They are built in a separate target
/// directory, because of the compiler flag.
pub(crate) const MODELS: [&str; 11] = [
    "cargo",
    "test",
    "--locked",
    "--package",
    "blockyard-layers",
    "--package",
    "blockyard-queue",
    "--package",
    "blockyard-virtio",
    "--lib",
    "models",
];

/// Packages the release binary, and checks the package without installing it.
const PACKAGE: [&str; 9] =
    ["cargo", "run", "--quiet", "--locked", "--package", "blockyard-xtask", "--", "package", "check"];

/// Builds the documentation of all crates. Links that lead nowhere are errors.
const DOCUMENTATION: [&str; 6] = ["cargo", "doc", "--quiet", "--locked", "--no-deps", "--workspace"];

/// The arguments of cargo that run the guest's suite on a kernel. `full`: with the rows of features that other
/// rows test as well.
fn guest_arguments(kernel: &str, full: bool) -> Vec<String> {
    const RUN: [&str; 8] =
        ["run", "--quiet", "--locked", "--package", "blockyard-xtask", "--", "guest", "--kernel"];
    let quick = (!full).then_some("--quick");
    RUN.into_iter().chain([kernel, "--suite"]).chain(quick).map(str::to_owned).collect()
}

/// Returns the tests that need a kernel of their own. A developer may skip them; CI may not.
fn guest_suite(task: &mut Task<'_>, kernel: &str, full: bool) -> Option<programs::Program> {
    const SKIP: &str = "BLOCKYARD_SKIP_GUEST";
    if std::env::var_os(SKIP).is_some() && std::env::var_os("CI").is_none() {
        task.announce(&format!("skipped: the tests on Linux {kernel}: {SKIP} is set"));
        task.tally.ignored += 1;
        return None;
    }
    Some(programs::Program {
        path: "cargo".into(),
        arguments: guest_arguments(kernel, full),
        folder: task.root.to_owned(),
        title: Some(format!("guest: the suite on the {kernel} kernel")),
    })
}

/// Runs the guest's suite on an older kernel, alone.
fn guest(task: &mut Task<'_>, binary: &str, kernel: &str, environment: &[(&str, &str)]) -> bool {
    let Some(suite) = guest_suite(task, kernel, true) else { return true };
    let command: Vec<&str> =
        ["cargo"].into_iter().chain(suite.arguments.iter().map(String::as_str)).collect();
    task.step(&command, &[environment, &[("BLOCKYARD_BIN", binary)]].concat())
}

/// Flags with which the compiler counts edges and reports comparisons to libFuzzer, those of cargo-fuzz
/// except for the address sanitizer, which needs a nightly compiler and would check code that forbids
/// `unsafe`.
const FUZZ_FLAGS: &str = "--cfg fuzzing -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
    -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
    -Cllvm-args=-sanitizer-coverage-trace-compares -Ccodegen-units=1";

/// Fuzzes `[TARGET] [SECONDS]`, or every target in turn. New interesting inputs are kept in
/// `fuzz/target/corpus`, failing ones in `fuzz/artifacts`.
pub fn fuzz(root: &Path, arguments: &[String]) -> bool {
    let Some((only, seconds)) = fuzz_arguments(arguments) else {
        eprintln!("fuzz: usage: ./x fuzz [TARGET] [SECONDS]");
        return false;
    };
    let targets = match fuzz_targets(root) {
        Ok(targets) => targets,
        Err(error) => {
            eprintln!("fuzz: reading {}/fuzz/fuzz_targets failed: {error}", root.display());
            return false;
        }
    };
    let wanted: Vec<&String> =
        targets.iter().filter(|name| only.as_ref().is_none_or(|only| only == *name)).collect();
    if wanted.is_empty() {
        eprintln!("fuzz: no such target; there are: {}", targets.join(" "));
        return false;
    }
    let host = match host() {
        Ok(host) => host,
        Err(error) => {
            eprintln!("fuzz: asking rustc for its host failed: {error}");
            return false;
        }
    };
    let mut task = Task::begin(root);
    // With `--target`, the flags apply to the fuzz targets only, not to build scripts.
    let build = ["cargo", "build", "--quiet", "--release", "--locked", "--manifest-path", "fuzz/Cargo.toml"];
    let build = [&build[..], &["--target", &host, "--target-dir", "fuzz/target"]].concat();
    let done = task.step(&build, &[("RUSTFLAGS", FUZZ_FLAGS)])
        && wanted.iter().all(|target| fuzz_one(&mut task, target, &host, seconds));
    task.end(done)
}

fn fuzz_one(task: &mut Task<'_>, target: &str, host: &str, seconds: u64) -> bool {
    let (kept, seeds) = (format!("fuzz/target/corpus/{target}"), format!("fuzz/corpus/{target}"));
    let artifacts = format!("fuzz/artifacts/{target}/");
    for folder in [&kept, &seeds, &artifacts] {
        if let Err(error) = std::fs::create_dir_all(task.root.join(folder)) {
            eprintln!("fuzz: making {folder} failed: {error}");
            return false;
        }
    }
    let binary = format!("fuzz/target/{host}/release/{target}");
    let (limit, prefix) = (format!("-max_total_time={seconds}"), format!("-artifact_prefix={artifacts}"));
    task.step(&[&binary, &kept, &seeds, &limit, &prefix, "-print_final_stats=1", "-verbosity=0"], &[])
}

fn fuzz_targets(root: &Path) -> std::io::Result<Vec<String>> {
    let mut targets = Vec::new();
    for entry in std::fs::read_dir(root.join("fuzz/fuzz_targets"))? {
        let name = entry?.file_name();
        targets.extend(name.to_str().and_then(|name| name.strip_suffix(".rs")).map(str::to_owned));
    }
    targets.sort();
    Ok(targets)
}

/// Returns the default target triple of rustc.
fn host() -> std::io::Result<String> {
    let output = Command::new("rustc").arg("-vV").output()?;
    let text = String::from_utf8_lossy(&output.stdout);
    let host = text.lines().find_map(|line| line.strip_prefix("host: "));
    host.map(str::to_owned).ok_or_else(|| std::io::ErrorKind::InvalidData.into())
}

fn fuzz_arguments(arguments: &[String]) -> Option<(Option<String>, u64)> {
    const SECONDS: u64 = 60;
    match arguments {
        [] => Some((None, SECONDS)),
        [one] => Some(one.parse().map_or_else(|_| (Some(one.clone()), SECONDS), |seconds| (None, seconds))),
        [target, seconds] => Some((Some(target.clone()), seconds.parse().ok()?)),
        _ => None,
    }
}

/// Simulates with new seeds for `[MINUTES]`, optimised but with the debug assertions of a test build.
///
/// `ublk` and `iscsi` instead run the guest's long tests, which kill servers hundreds of times. `attack` runs
/// the attack on the real binary.
pub fn soak(root: &Path, arguments: &[String]) -> bool {
    if let [group] = arguments
        && matches!(group.as_str(), "ublk" | "iscsi")
    {
        return soak_guest(root, group);
    }
    if arguments == ["sanitizers"] {
        return crate::sanitizers::soak(root);
    }
    if arguments == ["crash"] {
        return soak_crash(root);
    }
    if let [word, rest @ ..] = arguments
        && word == "vhost"
    {
        return soak_vhost(root, rest.first().map_or("300", String::as_str));
    }
    if arguments == ["multipath"] {
        return soak_multipath(root);
    }
    if let [word, rest @ ..] = arguments
        && word == "flakes"
    {
        return crate::flakes::soak(root, rest);
    }
    if let [word, rest @ ..] = arguments
        && word == "attack"
    {
        return soak_attack(root, rest);
    }
    if let [word, rest @ ..] = arguments
        && word == "loop"
    {
        return soak_loop(root, rest.first().map_or("60", String::as_str));
    }
    let minutes = match arguments {
        [] => Some(60),
        [minutes] => minutes.parse::<u64>().ok(),
        _ => None,
    };
    let Some(minutes) = minutes else {
        eprintln!(
            "soak: usage: ./x soak [MINUTES | attack [PART...] [OPTIONS] | ublk | iscsi | vhost [KILLS] | multipath | crash | sanitizers | loop [MINUTES] \
             | flakes [MINUTES] [PROGRAM...]]"
        );
        return false;
    };
    let mut task = Task::begin(root);
    let seconds = (minutes * 60).to_string();
    let soak = [
        &[
            "cargo",
            "run",
            "--quiet",
            "--locked",
            "--release",
            "--package",
            "blockyard-tests",
            "--bin",
            "soak",
            "--",
        ],
        &[seconds.as_str()][..],
    ];
    // A separate target directory: a change of the flag would rebuild the product.
    let environment =
        [("CARGO_PROFILE_RELEASE_DEBUG_ASSERTIONS", "true"), ("CARGO_TARGET_DIR", "target/soak")];
    let done = task.step(&soak.concat(), &environment);
    task.end(done)
}

/// Runs the attack of `crates/tests/src/attack` on the optimised binary, or on that of `BLOCKYARD_BIN`: first
/// each part with its canary, which it must detect, then with the given arguments. The harness itself is
/// built without optimisation.
fn soak_attack(root: &Path, arguments: &[String]) -> bool {
    const BINARY: &str = "BLOCKYARD_BIN";
    let mut task = Task::begin(root);
    let given = std::env::var(BINARY).ok();
    if given.is_none()
        && !task.step(&["cargo", "build", "--locked", "--release", "--package", "blockyard"], &[])
    {
        return task.end(false);
    }
    let binary =
        given.unwrap_or_else(|| root.join("target/release/blockyard").to_string_lossy().into_owned());
    let run =
        ["cargo", "run", "--quiet", "--locked", "--package", "blockyard-tests", "--bin", "attack", "--"];
    let asked: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let parts: Vec<&str> = asked.iter().copied().filter(|word| !word.starts_with("--")).collect();
    let done = task.step(&[&run[..], &parts, &["--canary"]].concat(), &[(BINARY, &binary)])
        && task.step(&[&run[..], &asked].concat(), &[(BINARY, &binary)]);
    task.end(done)
}

/// Checks the crash laboratory against file systems, databases and our own stores; as root.
fn soak_crash(root: &Path) -> bool {
    let mut task = Task::begin(root);
    let words = [
        &["cargo", "test", "--locked", "--package", "blockyard-tests", "--test", "crash_soak"][..],
        &["--", "--ignored", "--nocapture", "--test-threads", "1"],
    ];
    let done = task.step(&words.concat(), &[]);
    task.end(done)
}

/// Kills and restarts two servers in turn for a minute, under a verifying load.
fn soak_multipath(root: &Path) -> bool {
    let mut task = Task::begin(root);
    let words = [
        &["cargo", "test", "--locked", "--package", "blockyard-tests", "--test", "multipath"][..],
        &["--", "--nocapture", "two_servers_killed_in_turn"],
    ];
    let scenarios = ["cargo", "test", "--locked", "--package", "blockyard-tests", "--test", "mptest"];
    let done = task.step(&words.concat(), &[("BLOCKYARD_SOAK_SECONDS", "60")])
        && task.step(&scenarios, &[("BLOCKYARD_SOAK_SECONDS", "30")]);
    task.end(done)
}

/// Kills the servers of a virtual machine's two disks `kills` times while it writes to them, and migrates
/// one.
fn soak_vhost(root: &Path, kills: &str) -> bool {
    const BINARY: &str = "BLOCKYARD_BIN";
    let mut task = Task::begin(root);
    let release = ["cargo", "build", "--locked", "--release", "--package", "blockyard"];
    let given = std::env::var(BINARY).ok();
    if given.is_none() && !task.step(&release, &[]) {
        return task.end(false);
    }
    let Some(machine) = task.machine(&[]) else { return task.end(false) };
    let built = || root.canonicalize().unwrap_or_else(|_| root.to_owned()).join("target/release/blockyard");
    let binary = given.unwrap_or_else(|| built().to_string_lossy().into_owned());
    let words = [
        &["cargo", "test", "--locked", "--package", "blockyard-tests", "--test", "vhost_machines"][..],
        &["--", "--include-ignored", "--nocapture", "--test-threads", "1"],
    ];
    let environment = [(MACHINE, machine.as_str()), ("BLOCKYARD_SOAK_KILLS", kills), (BINARY, &binary)];
    let done = task.step(&words.concat(), &environment);
    task.end(done)
}

/// Runs file systems on loop devices whose servers are killed repeatedly; as root.
fn soak_loop(root: &Path, minutes: &str) -> bool {
    let mut task = Task::begin(root);
    let words = [
        &["cargo", "test", "--locked", "--package", "blockyard-tests", "--test", "loop_filesystems"][..],
        &["--", "--ignored", "--nocapture", "soak"],
    ];
    let done = task.step(&words.concat(), &[("BLOCKYARD_SOAK_MINUTES", minutes)]);
    task.end(done)
}

/// Runs the long rows of a group in a guest.
fn soak_guest(root: &Path, group: &str) -> bool {
    let mut task = Task::begin(root);
    let release = ["cargo", "build", "--locked", "--release", "--package", "blockyard"];
    let run = ["cargo", "run", "--quiet", "--locked", "--package", "blockyard-xtask", "--", "guest"];
    let limit = ["--timeout", "14400", "--suite", "--long", group];
    let done = task.step(&release, &[])
        && task.step(&[&run[..], &limit].concat(), &[("BLOCKYARD_BIN", "target/release/blockyard")]);
    task.end(done)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn summaries_of_test_runners_add_up() {
        let mut tally = Tally::default();
        assert!(tally.add_line("test result: ok. 5 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out"));
        assert!(
            tally.add_line("test result: FAILED. 2 passed; 3 failed; 0 ignored; 0 measured; 9 filtered out")
        );
        assert_eq!(tally, Tally { passed: 7, failed: 3, ignored: 1 });
    }

    #[test]
    fn other_lines_are_not_counted() {
        let mut tally = Tally::default();
        assert!(!tally.add_line("test units::tests::five_passed ... ok"));
        assert_eq!(tally, Tally::default());
    }

    #[test]
    fn a_failed_step_fails_the_command_and_is_counted() {
        let mut task = Task::begin_into(Path::new("."), Box::new(std::io::sink()));
        assert!(task.step(&["true"], &[]));
        assert!(!task.step(&["false"], &[]));
        assert!(!task.step(&["sh", "-c", "echo 'test result: ok. 2 passed; 0 failed;'; exit 1"], &[]));
        assert!(!task.step(&["./no-such-program"], &[]));
        assert_eq!(task.tally, Tally { passed: 3, failed: 3, ignored: 0 });
        assert!(!task.end(true));
    }

    #[test]
    fn fuzz_takes_a_target_or_seconds_or_both() {
        let words = |text: &str| text.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
        assert_eq!(fuzz_arguments(&[]), Some((None, 60)));
        assert_eq!(fuzz_arguments(&words("5")), Some((None, 5)));
        assert_eq!(fuzz_arguments(&words("request 5")), Some((Some("request".into()), 5)));
        assert_eq!(fuzz_arguments(&words("request five")), None);
    }
}
