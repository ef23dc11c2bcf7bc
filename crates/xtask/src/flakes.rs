//! `./x soak flakes`: runs every test program repeatedly while other threads keep the processors busy.
//!
//! A test that waits for a condition passes even if the condition becomes true late; a test that checks
//! only once, or relies on a time, fails here before it does on another machine. The output of a failing
//! program is kept in `target/flakes`.
//!
//! *Invariant:* threads of this process make the load, so it ends with the process.

use crate::programs::{Program, programs};
use std::fs::File;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// Busy threads per processor.
const SPINNERS_PER_CPU: usize = 3;
/// Seconds after which a program counts as hanging.
const PROGRAM_MAX: &str = "900";

/// Runs test programs for `[MINUTES]` (10), all or those named; returns whether none failed.
pub fn soak(root: &Path, arguments: &[String]) -> bool {
    let (minutes, names) = match arguments {
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
    let text_of = |error: std::io::Error| error.to_string();
    let root = root.canonicalize().map_err(text_of)?;
    let release = ["build", "--locked", "--release", "--package", "blockyard"];
    let built = Command::new("cargo").args(release).current_dir(&root).status().map_err(text_of)?;
    if !built.success() {
        return Err("building the binary failed".into());
    }
    let mut programs = programs(&root, &[])?;
    programs.retain(|program| names.is_empty() || names.iter().any(|name| name == program.name()));
    if programs.is_empty() {
        return Err("no test program has such a name".into());
    }
    let folder = root.join("target/flakes");
    std::fs::create_dir_all(&folder).map_err(text_of)?;
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

/// Runs a program; returns whether it passed. Its output is kept if it did not.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_failing_programs_leave_their_output() {
        let folder = std::env::temp_dir().join(format!("blockyard-flakes-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let log = folder.join("log");
        let of = |path: &str| Program { path: path.into(), folder: folder.clone(), ..Program::default() };
        assert!(run(&of("true"), Path::new("blockyard"), &log).unwrap());
        assert!(!log.exists());
        assert!(!run(&of("false"), Path::new("blockyard"), &log).unwrap());
        assert!(log.exists());
        std::fs::remove_dir_all(folder).unwrap();
    }
}
