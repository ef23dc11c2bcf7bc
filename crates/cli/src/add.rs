//! `add`: starts a server process in the background and waits until it is ready.
//!
//! The child is this program as `serve --detached`. When everything is attached it prints all ready lines at once and
//! then closes stdout and stderr: ready lines before end of file mean success, end of file alone means failure. A child
//! that cannot print its ready lines, because the parent was interrupted, removes its devices and exits.

use crate::args::ServeArgs;
use crate::failure::{Failure, print};
use crate::plan;
use std::ffi::OsString;
use std::io::Read;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, ExitCode, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// Longest time that a child may take to exit after it closed its outputs.
const ENDING: Duration = Duration::from_secs(5);
/// Interval between polls for the child's exit.
const PAUSE: Duration = Duration::from_millis(2);

pub(crate) fn add(args: &ServeArgs) -> Result<ExitCode, Failure> {
    // Invalid arguments are reported without starting a process.
    let topology = plan::topology("add", args)?;
    let name = topology.devices[0].name.to_string();
    let fail = |why: std::io::Error| Failure::new("add", &name, why);
    // Skips the program's name and `add`.
    let given = std::env::args_os().skip(2);
    let started = match plan::given_table(&topology) {
        // Stdin can be read only once, and the file may have changed by the time the device is recovered.
        Some(text) => start(with_table(given, &text)),
        None => start(given),
    };
    report("add", &name, started.map_err(fail)?)
}

/// Replaces `--table FILE` in the arguments with the table's text.
fn with_table(given: impl Iterator<Item = OsString>, text: &str) -> Vec<OsString> {
    let mut out = Vec::new();
    let mut given = given.peekable();
    while let Some(argument) = given.next() {
        if argument == "--table" {
            drop(given.next());
        } else if !argument.as_encoded_bytes().starts_with(b"--table=") {
            out.push(argument);
            continue;
        }
        out.push(format!("--table-text={text}").into());
    }
    out
}

/// Prints the ready lines of a started process, or reports why it ended. `what`: the command, for messages.
pub(crate) fn report(what: &str, name: &str, started: Started) -> Result<ExitCode, Failure> {
    let Started { ready, stderr, ended } = started;
    eprint!("{stderr}");
    let Some(status) = ended else {
        print(&ready);
        return Ok(ExitCode::SUCCESS);
    };
    match status.code() {
        Some(code) if !stderr.is_empty() => Ok(ExitCode::from(u8::try_from(code).unwrap_or(1).max(1))),
        Some(code) => Err(Failure::new(what, name, format!("its process exited with status {code}"))),
        None => {
            let signal = status.signal().unwrap_or_default();
            Err(Failure::new(what, name, format!("its process was killed by signal {signal}")))
        }
    }
}

/// The outcome of starting a server process.
pub(crate) struct Started {
    /// Ready lines; empty if the process failed.
    pub(crate) ready: String,
    /// The process's output on stderr until it was ready or exited.
    pub(crate) stderr: String,
    /// Exit status; `None` while the process serves.
    pub(crate) ended: Option<ExitStatus>,
}

/// Starts `blockyard serve` with `arguments` (those of `add`) and waits until it is ready.
///
/// # Errors
/// The process cannot be started.
pub(crate) fn start(arguments: impl IntoIterator<Item = OsString>) -> std::io::Result<Started> {
    start_command("serve", arguments)
}

/// Starts `blockyard COMMAND`, a command that serves, and waits until it is ready.
///
/// # Errors
/// The process cannot be started.
pub(crate) fn start_command(
    command: &str,
    arguments: impl IntoIterator<Item = OsString>,
) -> std::io::Result<Started> {
    // The server outlives this call and must not inherit the caller's descriptors: a pipe among them would never end.
    close_fds::set_fds_cloexec(3, &[]);
    let mut child = Command::new(std::env::current_exe()?)
        .arg(command)
        .arg("--detached")
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()?;
    let (ready, stderr) = outputs(&mut child)?;
    let ended = if ready.is_empty() { Some(end_of(&mut child)?) } else { None };
    Ok(Started { ready, stderr, ended })
}

/// Waits for the exit status of a child that closed its outputs. A child stuck in the kernel counts as failed.
fn end_of(child: &mut Child) -> std::io::Result<ExitStatus> {
    let started = Instant::now();
    loop {
        match child.try_wait()? {
            Some(status) => return Ok(status),
            None if started.elapsed() < ENDING => std::thread::sleep(PAUSE),
            None => return Ok(ExitStatus::from_raw(1 << 8)),
        }
    }
}

/// Reads the child's stdout and stderr until it closes them.
fn outputs(child: &mut Child) -> std::io::Result<(String, String)> {
    let stderr = child.stderr.take();
    let stderr = std::thread::spawn(move || {
        let mut text = Vec::new();
        // After a read error, the text read so far is kept.
        let _ = stderr.map(|mut pipe| pipe.read_to_end(&mut text));
        String::from_utf8_lossy(&text).into_owned()
    });
    let mut ready = String::new();
    if let Some(mut pipe) = child.stdout.take() {
        pipe.read_to_string(&mut ready)?;
    }
    Ok((ready, stderr.join().unwrap_or_default()))
}
