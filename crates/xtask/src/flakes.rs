//! `./x soak flakes`: every test program again and again, while the processors are busy with something else.
//!
//! What waits for others passes however late they come; what only looks once, or trusts in a time, fails here before it
//! does on somebody else's machine. A program that fails is named, and its output kept in `target/flakes`.
//!
//! *Invariant:* the load is threads of this process, so none of it outlives it.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// Threads that do nothing but use a processor, for each that there is.
const SPINNERS_PER_CPU: usize = 3;
/// Seconds after which a program hangs.
const PROGRAM_MAX: &str = "900";

/// A test program, and the folder that it is run in.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Program {
    path: PathBuf,
    folder: PathBuf,
}

impl Program {
    /// Its name, without what cargo adds.
    fn name(&self) -> &str {
        let name = self.path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        name.rsplit_once('-').map_or(name, |(name, _)| name)
    }
}

/// Runs test programs for `[MINUTES]` (10), all or those named; true if none of them failed.
pub fn soak(root: &Path, words: &[String]) -> bool {
    let (minutes, names) = match words {
        [first, rest @ ..] if first.parse::<u64>().is_ok() => (first.parse().unwrap_or(10), rest),
        names => (10, names),
    };
    match hunt(root, Duration::from_secs(60 * minutes), names) {
        Ok(failed) => failed == 0,
        Err(why) => {
            eprintln!("soak flakes: {why}");
            false
        }
    }
}

fn hunt(root: &Path, time: Duration, names: &[String]) -> Result<u64, String> {
    let said = |error: std::io::Error| error.to_string();
    let root = root.canonicalize().map_err(said)?;
    let release = ["build", "--locked", "--release", "--package", "blockyard"];
    let built = Command::new("cargo").args(release).current_dir(&root).status().map_err(said)?;
    if !built.success() {
        return Err("building the binary failed".into());
    }
    let mut programs = programs(&root)?;
    programs.retain(|program| names.is_empty() || names.iter().any(|name| name == program.name()));
    if programs.is_empty() {
        return Err("no test program has such a name".into());
    }
    let folder = root.join("target/flakes");
    std::fs::create_dir_all(&folder).map_err(said)?;
    let binary = root.join("target/release/blockyard");
    let (start, stop) = (Instant::now(), AtomicBool::new(false));
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..cpus * SPINNERS_PER_CPU {
            scope.spawn(|| {
                while !stop.load(Relaxed) {
                    std::hint::spin_loop();
                }
            });
        }
        let (mut runs, mut failed) = (0, 0);
        while start.elapsed() < time {
            for program in &programs {
                let log = folder.join(format!("{}.{runs}.log", program.name()));
                let begun = Instant::now();
                let ok = run(program, &binary, &log).unwrap_or(false);
                runs += 1;
                failed += u64::from(!ok);
                let word = if ok { "ok" } else { "FAILED" };
                println!("{:28} {word:6} {:5} s", program.name(), begun.elapsed().as_secs());
                if !ok {
                    println!("    {}", log.display());
                }
            }
        }
        stop.store(true, Relaxed);
        println!("\n{runs} runs of {} programs, {failed} failed", programs.len());
        Ok(failed)
    })
}

/// Whether a program passes; its output is kept if it does not.
fn run(program: &Program, binary: &Path, log: &Path) -> std::io::Result<bool> {
    let (stdout, stderr) = (File::create(log)?, File::options().append(true).open(log)?);
    let mut command = Command::new("timeout");
    command.args(["--kill-after=10", PROGRAM_MAX]).arg(&program.path).current_dir(&program.folder);
    command.env("BLOCKYARD_BIN", binary).stdin(Stdio::null()).stdout(stdout).stderr(stderr);
    let ok = command.status()?.success();
    if ok {
        std::fs::remove_file(log)?;
    }
    Ok(ok)
}

/// Builds all test programs; which they are is what cargo says of them.
fn programs(root: &Path) -> Result<Vec<Program>, String> {
    let words = ["test", "--locked", "--workspace", "--no-run", "--message-format=json-render-diagnostics"];
    let mut build = Command::new("cargo");
    build.args(words).current_dir(root).stdin(Stdio::null()).stderr(Stdio::inherit());
    let output = build.output().map_err(|error| format!("starting cargo failed: {error}"))?;
    if !output.status.success() {
        return Err("building the tests failed".into());
    }
    Ok(String::from_utf8_lossy(&output.stdout).lines().filter_map(program).collect())
}

/// The test program that a line of cargo's is about. Paths with quotes in them are nobody's here.
fn program(line: &str) -> Option<Program> {
    // The binaries that tests run are among them, too.
    let profile = line.split_once("\"profile\":{")?.1.split('}').next()?;
    if !profile.contains("\"test\":true") {
        return None;
    }
    let field = |name: &str| line.split_once(&format!("\"{name}\":\""))?.1.split('"').next();
    let folder = Path::new(field("manifest_path")?).parent()?.to_owned();
    Some(Program { path: field("executable")?.into(), folder })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_are_those_that_cargo_names() {
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
    fn what_passes_leaves_nothing_and_what_fails_its_output() {
        let folder = std::env::temp_dir().join(format!("blockyard-flakes-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let log = folder.join("log");
        let of = |path: &str| Program { path: path.into(), folder: folder.clone() };
        assert!(run(&of("true"), Path::new("blockyard"), &log).unwrap());
        assert!(!log.exists());
        assert!(!run(&of("false"), Path::new("blockyard"), &log).unwrap());
        assert!(log.exists());
        std::fs::remove_dir_all(folder).unwrap();
    }
}
