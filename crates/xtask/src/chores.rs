//! Chores that run other programs: `check`, `test`, `fuzz`, `soak`.
//!
//! A chore is a list of steps; each prints its command first, and the first that fails ends the chore. What ran is
//! counted over all runners, so that the last line says `N passed, N failed`. Nothing is skipped quietly: a step that
//! cannot run fails.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Instant;

/// Stacks that `./x test` simulates with seeds that no earlier run had, besides the fixed seeds of the test itself. It
/// prints the first; `BLOCKYARD_SEED=N` replays any.
const FRESH_RUNS: &str = "300";

/// What passed and what failed, over all runners.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct Tally {
    /// Tests and steps that did what they should.
    pub passed: u64,
    /// Those that did not.
    pub failed: u64,
    /// Tests that their runner left out, by its own count.
    pub ignored: u64,
}

impl Tally {
    /// Adds a line of a test runner's output, if it is a summary: `test result: ok. 5 passed; 0 failed; 1 ignored; …`.
    /// True if it was one.
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

/// A chore under way.
pub(crate) struct Chore<'a> {
    root: &'a Path,
    output: Box<dyn Write>,
    pub(crate) tally: Tally,
    started: Instant,
}

impl<'a> Chore<'a> {
    pub(crate) fn begin(root: &'a Path) -> Self {
        Self::begin_into(root, Box::new(std::io::stdout()))
    }

    fn begin_into(root: &'a Path, output: Box<dyn Write>) -> Self {
        Self { root, output, tally: Tally::default(), started: Instant::now() }
    }

    /// Runs one command line with `environment` added; counts its tests, or itself where it has none.
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
            // A runner that dies after its summaries, or fails to build one of its programs, has failed too.
            (false, false) if self.tally.failed == before.failed => self.tally.failed += 1,
            (false, _) => {}
        }
        ok
    }

    /// A lost terminal must not end a chore, so failing to print is let go.
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

    /// The last line. `done` is what the steps came to.
    pub(crate) fn end(mut self, done: bool) -> bool {
        let Tally { passed, failed, ignored } = self.tally;
        let left_out = if ignored == 0 { String::new() } else { format!(" ({ignored} ignored)") };
        let _ = writeln!(self.output, "\n{} s{left_out}", self.started.elapsed().as_secs());
        let _ = writeln!(self.output, "{passed} passed, {failed} failed");
        done && failed == 0
    }
}

/// Runs `command` in `root`, passing its output on line by line while counting; true if it ended with status 0.
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

/// What to run before each commit: under a minute once built.
pub fn check(root: &Path) -> bool {
    let mut chore = Chore::begin(root);
    let unit = ["cargo", "test", "--quiet", "--locked", "--workspace", "--lib", "--bins"];
    let done = chore.step(FORMAT, &[]) && chore.tidy() && chore.step(CLIPPY, &[]) && chore.step(&unit, &[]);
    chore.end(done)
}

/// Everything that CI runs; `full` adds the guest's tests on an older kernel. The tests drive the release binary, named to
/// them by `BLOCKYARD_BIN`; they themselves are built without optimisation, so that overflow checks and debug assertions
/// are on.
pub fn test(root: &Path, full: bool) -> bool {
    let mut chore = Chore::begin(root);
    let release =
        ["cargo", "build", "--locked", "--release", "--package", "blockyard", "--package", "blockyard-bench"];
    let tests = ["cargo", "test", "--locked", "--workspace", "--no-fail-fast"];
    // As a part of the workspace: by itself its dependencies would have other features, and be compiled once more.
    let fresh = ["cargo", "test", "--locked", "--workspace", "--test", "simulation"];
    let fresh = [&fresh[..], &["--", "--nocapture", "fresh_seeds_keep"]].concat();
    let binary = match root.canonicalize() {
        Ok(root) => root.join("target/release/blockyard").to_string_lossy().into_owned(),
        Err(error) => {
            eprintln!("{}: {error}", root.display());
            return false;
        }
    };
    let done = chore.step(FORMAT, &[])
        && chore.tidy()
        && chore.step(&release, &[])
        && chore.step(CLIPPY, &[])
        && chore.step(&tests, &[("BLOCKYARD_BIN", &binary)])
        && chore.step(&fresh, &[("BLOCKYARD_SIM_RUNS", FRESH_RUNS)])
        && chore.step(&MODELS, &[("RUSTFLAGS", "--cfg loom"), ("CARGO_TARGET_DIR", "target/loom")])
        && chore.step(&["target/release/blockyard-bench", "instructions"], &[])
        && guest(&mut chore, &binary, "newest")
        && (!full || guest(&mut chore, &binary, "older"));
    chore.end(done)
}

/// What threads share, under every order in which they may run. In a folder of its own, for its flag.
pub(crate) const MODELS: [&str; 9] = [
    "cargo",
    "test",
    "--locked",
    "--package",
    "blockyard-layers",
    "--package",
    "blockyard-backends",
    "--lib",
    "models",
];

/// The tests that need a kernel of their own, on that kernel. A person may leave them out; CI may not.
fn guest(chore: &mut Chore<'_>, binary: &str, kernel: &str) -> bool {
    const SKIP: &str = "BLOCKYARD_SKIP_GUEST";
    if std::env::var_os(SKIP).is_some() && std::env::var_os("CI").is_none() {
        chore.announce(&format!("skipped: the tests on Linux {kernel}: {SKIP} is set"));
        chore.tally.ignored += 1;
        return true;
    }
    let run =
        ["cargo", "run", "--quiet", "--locked", "--package", "blockyard-xtask", "--", "guest", "--kernel"];
    chore.step(&[&run[..], &[kernel, "--suite"]].concat(), &[("BLOCKYARD_BIN", binary)])
}

/// What makes the compiler count edges and report comparisons to libFuzzer. It is what cargo-fuzz passes, less the address
/// sanitizer, which needs a nightly compiler and would watch code that forbids `unsafe`.
const FUZZ_FLAGS: &str = "--cfg fuzzing -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
    -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
    -Cllvm-args=-sanitizer-coverage-trace-compares -Ccodegen-units=1";

/// Fuzzes `[TARGET] [SECONDS]`, or every target in turn. What it finds worth keeping goes to `fuzz/target/corpus`; an
/// input that fails is kept in `fuzz/artifacts`.
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
    let mut chore = Chore::begin(root);
    // With a target named, the flags are for the targets alone and not for the build scripts.
    let build = ["cargo", "build", "--quiet", "--release", "--locked", "--manifest-path", "fuzz/Cargo.toml"];
    let build = [&build[..], &["--target", &host, "--target-dir", "fuzz/target"]].concat();
    let done = chore.step(&build, &[("RUSTFLAGS", FUZZ_FLAGS)])
        && wanted.iter().all(|target| fuzz_one(&mut chore, target, &host, seconds));
    chore.end(done)
}

fn fuzz_one(chore: &mut Chore<'_>, target: &str, host: &str, seconds: u64) -> bool {
    let (kept, seeds) = (format!("fuzz/target/corpus/{target}"), format!("fuzz/corpus/{target}"));
    let artifacts = format!("fuzz/artifacts/{target}/");
    for folder in [&kept, &seeds, &artifacts] {
        if let Err(error) = std::fs::create_dir_all(chore.root.join(folder)) {
            eprintln!("fuzz: making {folder} failed: {error}");
            return false;
        }
    }
    let binary = format!("fuzz/target/{host}/release/{target}");
    let (limit, prefix) = (format!("-max_total_time={seconds}"), format!("-artifact_prefix={artifacts}"));
    chore.step(&[&binary, &kept, &seeds, &limit, &prefix, "-print_final_stats=1", "-verbosity=0"], &[])
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

/// The triple that rustc builds for when it is not told.
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

/// Simulates with fresh seeds for `[MINUTES]`, optimised but with the debug assertions of a test build.
///
/// `ublk` instead runs the guest's long tests: servers killed hundreds of times. `attack` runs the attack on the real binary.
pub fn soak(root: &Path, arguments: &[String]) -> bool {
    if arguments == ["ublk"] {
        return soak_ublk(root);
    }
    if arguments == ["sanitizers"] {
        return crate::sanitizers::soak(root);
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
            "soak: usage: ./x soak [MINUTES | attack [PART...] [OPTIONS] | ublk | multipath | sanitizers | loop [MINUTES] \
             | flakes [MINUTES] [PROGRAM...]]"
        );
        return false;
    };
    let mut chore = Chore::begin(root);
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
    // A folder of its own, or each change of that flag would build the product again.
    let environment =
        [("CARGO_PROFILE_RELEASE_DEBUG_ASSERTIONS", "true"), ("CARGO_TARGET_DIR", "target/soak")];
    let done = chore.step(&soak.concat(), &environment);
    chore.end(done)
}

/// The attack of `crates/tests/src/attack` on the optimised binary, or on the one that `BLOCKYARD_BIN` names: first each part
/// with its canary, which it must find, then with what was asked for. The harness itself is built without optimisation.
fn soak_attack(root: &Path, arguments: &[String]) -> bool {
    const BINARY: &str = "BLOCKYARD_BIN";
    let mut chore = Chore::begin(root);
    let given = std::env::var(BINARY).ok();
    if given.is_none()
        && !chore.step(&["cargo", "build", "--locked", "--release", "--package", "blockyard"], &[])
    {
        return chore.end(false);
    }
    let binary =
        given.unwrap_or_else(|| root.join("target/release/blockyard").to_string_lossy().into_owned());
    let run =
        ["cargo", "run", "--quiet", "--locked", "--package", "blockyard-tests", "--bin", "attack", "--"];
    let asked: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let parts: Vec<&str> = asked.iter().copied().filter(|word| !word.starts_with("--")).collect();
    let done = chore.step(&[&run[..], &parts, &["--canary"]].concat(), &[(BINARY, &binary)])
        && chore.step(&[&run[..], &asked].concat(), &[(BINARY, &binary)]);
    chore.end(done)
}

/// Two servers killed and started again in turn for a minute, under a load that verifies.
fn soak_multipath(root: &Path) -> bool {
    let mut chore = Chore::begin(root);
    let words = [
        &["cargo", "test", "--locked", "--package", "blockyard-tests", "--test", "multipath"][..],
        &["--", "--nocapture", "two_servers_killed_in_turn"],
    ];
    let scenarios = ["cargo", "test", "--locked", "--package", "blockyard-tests", "--test", "mptest"];
    let done = chore.step(&words.concat(), &[("BLOCKYARD_SOAK_SECONDS", "60")])
        && chore.step(&scenarios, &[("BLOCKYARD_SOAK_SECONDS", "30")]);
    chore.end(done)
}

/// File systems on loop devices whose servers are killed again and again; as root.
fn soak_loop(root: &Path, minutes: &str) -> bool {
    let mut chore = Chore::begin(root);
    let words = [
        &["cargo", "test", "--locked", "--package", "blockyard-tests", "--test", "loop_filesystems"][..],
        &["--", "--ignored", "--nocapture", "soak"],
    ];
    let done = chore.step(&words.concat(), &[("BLOCKYARD_SOAK_MINUTES", minutes)]);
    chore.end(done)
}

fn soak_ublk(root: &Path) -> bool {
    let mut chore = Chore::begin(root);
    let release = ["cargo", "build", "--locked", "--release", "--package", "blockyard"];
    let run = ["cargo", "run", "--quiet", "--locked", "--package", "blockyard-xtask", "--", "guest"];
    let limit = ["--timeout", "14400", "--suite", "--long", "ublk"];
    let done = chore.step(&release, &[])
        && chore.step(&[&run[..], &limit].concat(), &[("BLOCKYARD_BIN", "target/release/blockyard")]);
    chore.end(done)
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
    fn a_failed_step_fails_the_chore_and_is_counted() {
        let mut chore = Chore::begin_into(Path::new("."), Box::new(std::io::sink()));
        assert!(chore.step(&["true"], &[]));
        assert!(!chore.step(&["false"], &[]));
        assert!(!chore.step(&["sh", "-c", "echo 'test result: ok. 2 passed; 0 failed;'; exit 1"], &[]));
        assert!(!chore.step(&["./no-such-program"], &[]));
        assert_eq!(chore.tally, Tally { passed: 3, failed: 3, ignored: 0 });
        assert!(!chore.end(true));
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
