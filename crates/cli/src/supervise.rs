//! `--supervise`: a process that does nothing but wait for the one that serves, and has another take its devices over
//! when it dies.
//!
//! It starts the same program with the same words and `--watched`. One that ends by itself ends this one, too; one
//! that a signal killed is replaced by `recover`, at once and then less and less often, up to a limit. A signal to
//! end is passed on.

use crate::attach;
use crate::failure::Failure;
use crate::listing::run_dir;
use crate::signals::Signals;
use engine::private::{Content, create};
use engine::rundir::RunDir;
use engine::ublk::{Record, waits};
use rustix::process::{Pid, Signal, kill_process};
use std::ffi::OsString;
use std::io::Write;
use std::process::{Child, Command, ExitCode, ExitStatus};
use std::time::{Duration, Instant};

/// The first pause before another attempt; each one is twice the last.
const PAUSE: Duration = Duration::from_millis(50);
/// The longest.
const PAUSE_MAX: Duration = Duration::from_secs(5);
/// So many deaths within [`WINDOW`], and it is given up.
const DEATHS_MAX: usize = 20;
const WINDOW: Duration = Duration::from_secs(300);

/// What this process does: it watches over another one.
pub(crate) fn supervise(what: &'static str, detached: bool) -> Result<ExitCode, Failure> {
    let fail = |why: std::io::Error| Failure::new(what, "", why);
    let run = run_dir(what)?;
    if detached {
        attach::leave_session(what)?;
    }
    let words = std::env::args_os().skip(1).chain([OsString::from("--watched")]);
    let child = Command::new(program().map_err(fail)?).args(words).spawn().map_err(fail)?;
    if detached {
        // What is to be said until it is ready, the other one says.
        attach::leave_outputs().map_err(fail)?;
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(fail)?;
    runtime.block_on(watch(what, &run, child, detached))
}

fn program() -> std::io::Result<std::path::PathBuf> {
    // A program that was replaced is found by its name, and is the one to go on with.
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
        if let Some(record) = record.as_ref().filter(|record| !ending && !status.success() && !waits(record))
        {
            say(run, &record.name, &format!("its server ended ({status}), and its device went with it"));
            return Ok(ExitCode::FAILURE);
        }
        name = record.map(|record| record.name).or(name);
        let (false, Some(name)) = (ending || ended_by_itself(status, deaths.is_empty()), &name) else {
            return Ok(ExitCode::from(status.code().map_or(1, |code| code as u8)));
        };
        if Record::load(run, name).is_err() {
            say(run, name, &format!("its server ended ({status}), and there is nothing left to bring back"));
            return Ok(ExitCode::FAILURE);
        }
        deaths.push(Instant::now());
        deaths.retain(|death| death.elapsed() < WINDOW);
        if deaths.len() > DEATHS_MAX {
            let why = format!("its server died {} times in {} s: given up", deaths.len(), WINDOW.as_secs());
            say(run, name, &format!("{why} (look at its log, then blockyard recover {name})"));
            return Ok(ExitCode::FAILURE);
        }
        say(run, name, &format!("its server ended ({status}): bringing it back"));
        tokio::time::sleep(pause(deaths.len())).await;
        child = Command::new(program().map_err(fail)?)
            .args(["recover", name, if detached { "--detached" } else { "--foreground" }, "--watched"])
            .spawn()
            .map_err(fail)?;
    }
}

/// Whether it meant to end. An attempt to take over that failed did not.
fn ended_by_itself(status: ExitStatus, first: bool) -> bool {
    status.success() || first && status.code().is_some()
}

/// None before the first attempt, then longer and longer.
fn pause(deaths: usize) -> Duration {
    match deaths {
        0 | 1 => Duration::ZERO,
        more => PAUSE.saturating_mul(1 << (more - 2).min(16)).min(PAUSE_MAX),
    }
}

/// Tells whoever reads the log of the device, or the terminal.
fn say(run: &RunDir, name: &str, what: &str) {
    eprintln!("blockyard: {name}: {what}");
    let log = run.log_file(name);
    // Without a server that wrote one there is nobody who reads it.
    if let (true, Ok(mut log)) = (log.exists(), create(&log, Content::Goes)) {
        let _ = log.write_all(crate::log::warning(name, what).as_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_attempt_is_at_once_and_later_ones_less_often() {
        let pauses: Vec<u128> = [1, 2, 3, 4, 20].map(|deaths| pause(deaths).as_millis()).to_vec();
        assert_eq!(pauses, [0, 50, 100, 200, 5000]);
    }

    #[test]
    fn one_that_never_lives_is_given_up() {
        let waited: Duration = (1..=DEATHS_MAX).map(pause).sum();
        assert!(waited < WINDOW / 2, "{waited:?}");
    }
}
