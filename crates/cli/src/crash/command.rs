//! Commands of the user: a shell in a process group of its own, with a deadline.

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process_group, pidfd_open};
use std::ffi::OsString;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// How a check ended.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Outcome {
    /// Status 0.
    Passed,
    /// The reason, as a predicate: "failed with status 1".
    Failed(String),
}

impl Outcome {
    /// Whether the deadline ended it.
    pub(super) fn is_late(&self) -> bool {
        matches!(self, Outcome::Failed(how) if how == LATE)
    }
}

const LATE: &str = "did not end before its deadline";

/// Bytes of output that are kept.
const OUTPUT_MAX: u64 = 8 << 10;

/// The environment of a command.
pub(super) type Environment = Vec<(&'static str, OsString)>;

/// Runs a command of the shell with a deadline, in `dir` if it is given; its output goes to a file.
pub(super) fn run(
    script: &str,
    environment: &Environment,
    deadline: Option<Duration>,
    output: &File,
    dir: Option<&Path>,
) -> Result<Outcome, String> {
    let file = || output.try_clone().map(Stdio::from).map_err(|why| why.to_string());
    let mut command = Command::new("/bin/sh");
    command.args(["-c", script]).envs(environment.iter().cloned()).process_group(0);
    command.stdin(Stdio::null()).stdout(file()?).stderr(file()?);
    if let Some(dir) = dir {
        command.current_dir(dir);
    }
    let mut child = command.spawn().map_err(|why| format!("/bin/sh: {why}"))?;
    let pid = Pid::from_child(&child);
    let ended = wait(pid, deadline)?;
    // Whatever the command left running would use the device of the next state.
    let _ = kill_process_group(pid, Signal::KILL);
    let status = child.wait().map_err(|why| why.to_string())?;
    Ok(if ended { outcome(status) } else { Outcome::Failed(LATE.to_owned()) })
}

/// Waits for a process; returns whether it ended before the deadline.
fn wait(pid: Pid, deadline: Option<Duration>) -> Result<bool, String> {
    let end = deadline.and_then(|deadline| Instant::now().checked_add(deadline));
    let process = pidfd_open(pid, PidfdFlags::empty()).map_err(|why| format!("pidfd_open: {why}"))?;
    loop {
        let left = end.map(|end| end.saturating_duration_since(Instant::now()));
        let left = left.map(|left| Timespec {
            tv_sec: left.as_secs().try_into().unwrap_or(i64::MAX),
            tv_nsec: left.subsec_nanos().into(),
        });
        match poll(&mut [PollFd::new(&process, PollFlags::IN)], left.as_ref()) {
            Ok(0) => return Ok(false),
            Ok(_) => return Ok(true),
            Err(rustix::io::Errno::INTR) => {}
            Err(why) => return Err(format!("poll: {why}")),
        }
    }
}

fn outcome(status: ExitStatus) -> Outcome {
    match (status.code(), status.signal()) {
        (Some(0), _) => Outcome::Passed,
        (Some(127), _) => Outcome::Failed("failed with status 127 (a command was not found)".to_owned()),
        (Some(code), _) => Outcome::Failed(format!("failed with status {code}")),
        (None, Some(signal)) => Outcome::Failed(format!("was ended by signal {signal}")),
        (None, None) => Outcome::Failed(format!("ended with {status}")),
    }
}

/// Returns the end of an output.
pub(super) fn tail(mut output: &File) -> String {
    let mut bytes = Vec::new();
    let len = output.metadata().map_or(0, |about| about.len());
    let read = output
        .seek(SeekFrom::Start(len.saturating_sub(OUTPUT_MAX)))
        .and_then(|_| output.take(OUTPUT_MAX).read_to_end(&mut bytes));
    match read {
        Ok(_) => String::from_utf8_lossy(&bytes).into_owned(),
        Err(why) => format!("(the output cannot be read: {why})"),
    }
}
