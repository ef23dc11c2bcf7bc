//! The test programs of the workspace: what cargo builds for `cargo test`, run side by side.
//!
//! Most test programs wait for servers and timers half of the time, so `./x test` runs one more than there
//! are processors at once, and a job of another kind, such as the guest's suite, beside them. Those of
//! [`ALONE`] measure time or count things that belong to the whole machine, and run last, one by one.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::time::Instant;

/// Programs that no other program may disturb.
const ALONE: [&str; 6] =
    ["loop_lifecycle", "loop_rules", "losetup", "memory_return", "schedulers", "sleeping"];
/// Programs that take longest, which start first.
const LONG: [&str; 12] = [
    "attack",
    "vhost_machines",
    "iscsi_conformance",
    "simulation",
    "rbd_gateways",
    "rbd",
    "loop_filesystems",
    "client_limits",
    "nbd_client_backoff",
    "client_memory",
    "blockyard_qcow2",
    "faults_and_shutdown",
];

/// A test program, or another command whose results are counted, and its working directory.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub(crate) struct Program {
    /// The executable.
    pub(crate) path: PathBuf,
    /// Its arguments; a test program has none.
    pub(crate) arguments: Vec<String>,
    /// The directory of its package, in which it runs.
    pub(crate) folder: PathBuf,
    /// The name of a command; a test program is named for its executable.
    pub(crate) title: Option<String>,
}

impl Program {
    /// Returns the title, or the name of the executable without the hash that cargo appends.
    pub(crate) fn name(&self) -> &str {
        if let Some(title) = &self.title {
            return title;
        }
        let name = self.path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        name.rsplit_once('-').map_or(name, |(name, _)| name)
    }
}

/// Builds all test programs with `environment` added; returns those that cargo reports.
///
/// # Errors
/// Cargo cannot be started, or a program does not build; its messages are printed.
pub(crate) fn programs(root: &Path, environment: &[(&str, &str)]) -> Result<Vec<Program>, String> {
    let words = ["test", "--locked", "--workspace", "--no-run", "--message-format=json-render-diagnostics"];
    let mut build = Command::new("cargo");
    build
        .args(words)
        .envs(environment.iter().copied())
        .current_dir(root)
        .stdin(Stdio::null())
        .stderr(Stdio::inherit());
    let output = build.output().map_err(|error| format!("starting cargo failed: {error}"))?;
    if !output.status.success() {
        return Err("building the tests failed".into());
    }
    Ok(String::from_utf8_lossy(&output.stdout).lines().filter_map(program).collect())
}

/// Parses a line of cargo's output. Paths with quotes are not supported.
fn program(line: &str) -> Option<Program> {
    // Cargo reports the binaries that tests run as well.
    let profile = line.split_once("\"profile\":{")?.1.split('}').next()?;
    if !profile.contains("\"test\":true") {
        return None;
    }
    let field = |name: &str| line.split_once(&format!("\"{name}\":\""))?.1.split('"').next();
    let folder = Path::new(field("manifest_path")?).parent()?.to_owned();
    Some(Program { path: field("executable")?.into(), folder, ..Program::default() })
}

/// The outcome of a program.
pub(crate) struct Outcome {
    /// Whether it exited with status 0.
    pub(crate) ok: bool,
    /// Its name and what it printed.
    pub(crate) output: String,
}

/// Runs every program once with `environment` added, those of `first` before the others; calls `each` when
/// one has ended.
pub(crate) fn run_all(
    first: &[Program],
    programs: &[Program],
    environment: &[(&str, &str)],
    each: &(dyn Fn(Outcome) + Sync),
) {
    let (alone, shared): (Vec<&Program>, Vec<&Program>) =
        programs.iter().partition(|program| ALONE.contains(&program.name()));
    let rank = |program: &Program| LONG.iter().position(|name| *name == program.name()).unwrap_or(LONG.len());
    let mut queue = shared;
    // The last one is taken first.
    queue.sort_by_key(|program| std::cmp::Reverse(rank(program)));
    queue.extend(first.iter().rev());
    let queue = Mutex::new(queue);
    let next = || queue.lock().unwrap_or_else(std::sync::PoisonError::into_inner).pop();
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..cpus + 1 + first.len() {
            scope.spawn(|| {
                while let Some(program) = next() {
                    each(run(program, environment));
                }
            });
        }
    });
    for program in alone {
        each(run(program, environment));
    }
}

fn run(program: &Program, environment: &[(&str, &str)]) -> Outcome {
    let started = Instant::now();
    let mut command = Command::new(&program.path);
    command.args(&program.arguments).current_dir(&program.folder);
    command.envs(environment.iter().copied()).stdin(Stdio::null());
    let mut output = Vec::new();
    let ok = match command.output() {
        Ok(ended) => {
            let errors = if ended.status.success() { &[][..] } else { &ended.stderr };
            output.extend_from_slice(&ended.stdout);
            output.extend_from_slice(errors);
            if !ended.status.success() {
                let _ = writeln!(output, "{}: {}", program.name(), ended.status);
            }
            ended.status.success()
        }
        Err(error) => {
            output.extend_from_slice(format!("starting it failed: {error}\n").as_bytes());
            false
        }
    };
    let seconds = started.elapsed().as_secs_f64();
    let output = format!("\n{} ({seconds:.1} s)\n{}", program.name(), String::from_utf8_lossy(&output));
    Outcome { ok, output }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

    #[test]
    fn test_programs_are_parsed_from_cargos_output() {
        let line = r#"{"reason":"compiler-artifact","manifest_path":"/a/crates/tests/Cargo.toml","target":{"test":true},"profile":{"opt_level":"0","test":true},"executable":"/a/target/debug/deps/top-12ab","fresh":true}"#;
        let found = program(line).unwrap();
        assert_eq!((found.name(), found.folder.as_path()), ("top", Path::new("/a/crates/tests")));
        assert_eq!(program(&line.replace("\"/a/target/debug/deps/top-12ab\"", "null")), None);
        assert_eq!(
            program(&line.replace("0\",\"test\":true", "0\",\"test\":false")),
            None,
            "a binary that tests run"
        );
    }

    #[test]
    fn every_program_runs_once_and_a_failure_is_reported() {
        let folder = std::env::temp_dir();
        let of = |path: &str| Program { path: path.into(), folder: folder.clone(), ..Program::default() };
        let programs = [of("true"), of("false"), of("/no/such-program"), of("true")];
        let shell = |script: &str| Program {
            arguments: vec!["-c".into(), script.into()],
            title: Some("a script".into()),
            ..of("sh")
        };
        let first = [shell("exit 0"), shell("echo broken >&2; exit 1")];
        let (passed, failed) = (AtomicU32::new(0), AtomicU32::new(0));
        run_all(&first, &programs, &[], &|outcome| {
            (if outcome.ok { &passed } else { &failed }).fetch_add(1, Relaxed);
            if outcome.output.contains("broken") {
                assert!(outcome.output.starts_with("\na script ("), "{}", outcome.output);
            }
        });
        assert_eq!((passed.into_inner(), failed.into_inner()), (3, 3));
    }

    #[test]
    fn listed_programs_exist() {
        let tests = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/tests");
        for name in ALONE.iter().chain(&LONG).filter(|name| !name.starts_with("blockyard_")) {
            assert!(tests.join(format!("{name}.rs")).exists(), "{name}");
        }
    }
}
