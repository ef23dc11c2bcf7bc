//! `--supervise`: a process that waits for the server and restarts it when it dies.
//!
//! The supervisor starts this program with its own arguments and `--watched`. When the server exits by itself, the
//! supervisor exits, too. When a signal killed the server, the supervisor runs `recover`: at once the first time, then
//! after growing pauses, at most [`DEATHS_MAX`] times within [`WINDOW`]. Signals that end the supervisor, and SIGUSR1,
//! are forwarded to the server.

use crate::failure::Failure;
use crate::listing::run_dir;
use crate::process;
use crate::signals::Signals;
use attach::ublk::{Record, is_recoverable};
use engine::private::{WriteMode, create};
use engine::rundir::RunDir;
use rustix::process::{Pid, Signal, kill_process};
use std::ffi::OsString;
use std::io::Write;
use std::process::{Child, Command, ExitCode, ExitStatus};
use std::time::{Duration, Instant};

/// Pause before the second restart; it doubles with each further one.
const PAUSE: Duration = Duration::from_millis(50);
/// Longest pause before a restart.
const PAUSE_MAX: Duration = Duration::from_secs(5);
/// Restarts within [`WINDOW`] after which the supervisor gives up.
const DEATHS_MAX: usize = 20;
const WINDOW: Duration = Duration::from_secs(300);

/// Runs the supervisor: starts the server, and restarts it until it exits by itself or a limit is reached.
pub(crate) fn supervise(what: &'static str, detached: bool) -> Result<ExitCode, Failure> {
    let fail = |why: std::io::Error| Failure::new(what, "", why);
    let run = run_dir(what)?;
    if detached {
        process::leave_session(what)?;
    }
    let arguments = std::env::args_os().skip(1).chain([OsString::from("--watched")]);
    let child = Command::new(program().map_err(fail)?).args(arguments).spawn().map_err(fail)?;
    if detached {
        // The server prints messages and ready lines; the supervisor must not keep the caller's pipes open.
        process::leave_outputs().map_err(fail)?;
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(fail)?;
    runtime.block_on(watch(what, &run, child, detached))
}

fn program() -> std::io::Result<std::path::PathBuf> {
    // After an upgrade of the binary, the new file at the old path is started.
    let path = std::env::current_exe()?;
    let replaced =
        path.to_str().and_then(|path| path.strip_suffix(" (deleted)")).map(std::path::PathBuf::from);
    Ok(replaced.unwrap_or(path))
}

async fn watch(what: &str, run: &RunDir, mut child: Child, detached: bool) -> Result<ExitCode, Failure> {
    let fail = |why: std::io::Error| Failure::new(what, "", why);
    let mut signals = Signals::new().map_err(fail)?;
    let mut asked = Signals::user().map_err(fail)?;
    let mut deaths: Vec<Instant> = Vec::new();
    let mut name = None;
    let mut ending = false;
    loop {
        let pid = child.id();
        let mut waiting = tokio::task::spawn_blocking(move || child.wait());
        let status = loop {
            tokio::select! {
                status = &mut waiting => break status.map_err(|why| fail(why.into()))?.map_err(fail)?,
                _ = signals.next() => {
                    ending = true;
                    if let Some(pid) = Pid::from_raw(pid as i32) {
                        let _ = kill_process(pid, Signal::TERM);
                    }
                }
                _ = asked.recv() => {
                    if let Some(pid) = Pid::from_raw(pid as i32) {
                        let _ = kill_process(pid, Signal::USR1);
                    }
                }
            }
        };
        let record = Record::all(run).into_iter().find(|record| record.pid == pid);
        if let Some(record) =
            record.as_ref().filter(|record| !ending && !status.success() && !is_recoverable(record))
        {
            say(
                run,
                &record.name,
                &format!("its server ended ({status}), and the kernel removed its device"),
            );
            return Ok(ExitCode::FAILURE);
        }
        name = record.map(|record| record.name).or(name);
        let (false, Some(name)) = (ending || ended_by_itself(status, deaths.is_empty()), &name) else {
            return Ok(ExitCode::from(status.code().map_or(1, |code| code as u8)));
        };
        if Record::load(run, name).is_err() {
            say(run, name, &format!("its server ended ({status}), and no record is left to recover from"));
            return Ok(ExitCode::FAILURE);
        }
        deaths.push(Instant::now());
        deaths.retain(|death| death.elapsed() < WINDOW);
        if deaths.len() > DEATHS_MAX {
            let why = format!("its server died {} times in {} s: giving up", deaths.len(), WINDOW.as_secs());
            say(run, name, &format!("{why} (see its log, then run blockyard recover {name})"));
            return Ok(ExitCode::FAILURE);
        }
        say(run, name, &format!("its server ended ({status}): restarting it"));
        tokio::time::sleep(pause(deaths.len())).await;
        child = Command::new(program().map_err(fail)?)
            .args(["recover", name, if detached { "--detached" } else { "--foreground" }, "--watched"])
            .spawn()
            .map_err(fail)?;
    }
}

/// Returns whether the server exited intentionally. A failed recovery is not intentional, so it is tried
/// again.
fn ended_by_itself(status: ExitStatus, first: bool) -> bool {
    status.success() || first && status.code().is_some()
}

/// Returns the pause before a restart after `deaths` deaths: none before the first, then doubling.
fn pause(deaths: usize) -> Duration {
    match deaths {
        0 | 1 => Duration::ZERO,
        more => PAUSE.saturating_mul(1 << (more - 2).min(16)).min(PAUSE_MAX),
    }
}

/// Writes a warning to stderr and to the device's log.
fn say(run: &RunDir, name: &str, what: &str) {
    eprintln!("blockyard: {name}: {what}");
    let log = run.log_file(name);
    // Only a detached server creates the log; without it, stderr is read.
    if let (true, Ok(mut log)) = (log.exists(), create(&log, WriteMode::Append)) {
        let _ = log.write_all(crate::log::warning(name, what).as_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_restart_is_immediate_and_later_pauses_grow() {
        let pauses: Vec<u128> = [1, 2, 3, 4, 20].map(|deaths| pause(deaths).as_millis()).to_vec();
        assert_eq!(pauses, [0, 50, 100, 200, 5000]);
    }

    #[test]
    fn repeated_deaths_reach_the_limit_within_the_window() {
        let waited: Duration = (1..=DEATHS_MAX).map(pause).sum();
        assert!(waited < WINDOW / 2, "{waited:?}");
    }
}
