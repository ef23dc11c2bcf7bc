//! `add`: a process of its own that serves, and the wait until it is ready.
//!
//! The child is this program as `serve --detached`. It prints its ready lines, all at once, when
//! everything is attached, and then lets go of stdout and stderr: lines and then the end mean that it is
//! ready, the end alone that it is not. A child that cannot tell us (because we were interrupted)
//! takes everything back.

use crate::args::ServeArgs;
use crate::failure::{Failure, print};
use crate::plan;
use std::ffi::OsString;
use std::io::Read;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, ExitCode, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// How long a process that has said its last word may take to end.
const ENDING: Duration = Duration::from_secs(5);
/// How long to sleep before looking again.
const PAUSE: Duration = Duration::from_millis(2);

pub(crate) fn add(args: &ServeArgs) -> Result<ExitCode, Failure> {
    // What makes no sense is said without starting anything.
    let topology = plan::topology("add", args)?;
    let name = topology.devices[0].name.to_string();
    let fail = |why: std::io::Error| Failure::new("add", &name, why);
    // Behind the program's name and `add`.
    let words = std::env::args_os().skip(2);
    let started = match plan::given_table(&topology) {
        // Stdin is read once, and a file may be another by the time that the device is recovered.
        Some(text) => start(with_table(words, &text)),
        None => start(words),
    };
    tell("add", &name, started.map_err(fail)?)
}

/// The same words with the table's text in place of the file that it is in.
fn with_table(words: impl Iterator<Item = OsString>, text: &str) -> Vec<OsString> {
    let mut out = Vec::new();
    let mut words = words.peekable();
    while let Some(word) = words.next() {
        if word == "--table" {
            drop(words.next());
        } else if !word.as_encoded_bytes().starts_with(b"--table=") {
            out.push(word);
            continue;
        }
        out.push(format!("--table-text={text}").into());
    }
    out
}

/// Say what became of a process that was started.
pub(crate) fn tell(what: &str, name: &str, started: Started) -> Result<ExitCode, Failure> {
    let Started { ready, said, ended } = started;
    eprint!("{said}");
    let Some(status) = ended else {
        print(&ready);
        return Ok(ExitCode::SUCCESS);
    };
    match status.code() {
        Some(code) if !said.is_empty() => Ok(ExitCode::from(u8::try_from(code).unwrap_or(1).max(1))),
        Some(code) => Err(Failure::new(what, name, format!("its process ended with status {code}"))),
        None => {
            let signal = status.signal().unwrap_or_default();
            Err(Failure::new(what, name, format!("its process was killed by signal {signal}")))
        }
    }
}

/// A process that serves, or that could not.
pub(crate) struct Started {
    /// Its ready lines; empty when it is not.
    pub(crate) ready: String,
    /// What it said on stderr.
    pub(crate) said: String,
    /// How it ended, if it did.
    pub(crate) ended: Option<ExitStatus>,
}

/// Start a process that serves what `words` say, as `add` takes them, and wait until it is ready.
///
/// # Errors
/// No process can be started.
pub(crate) fn start(words: impl IntoIterator<Item = OsString>) -> std::io::Result<Started> {
    start_command("serve", words)
}

/// The same with another command that serves.
pub(crate) fn start_command(
    command: &str,
    words: impl IntoIterator<Item = OsString>,
) -> std::io::Result<Started> {
    // What whoever called us has open is not for a process that outlives the call: a pipe would never end.
    close_fds::set_fds_cloexec(3, &[]);
    let mut child = Command::new(std::env::current_exe()?)
        .arg(command)
        .arg("--detached")
        .args(words)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()?;
    let (ready, said) = outputs(&mut child)?;
    let ended = if ready.is_empty() { Some(end_of(&mut child)?) } else { None };
    Ok(Started { ready, said, ended })
}

/// How a child ended that has let go of its outputs. One that the kernel does not let end counts as failed.
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

/// All that the child says before it lets go.
fn outputs(child: &mut Child) -> std::io::Result<(String, String)> {
    let stderr = child.stderr.take();
    let said = std::thread::spawn(move || {
        let mut said = Vec::new();
        // What can be read is said; a broken pipe says no more.
        let _ = stderr.map(|mut pipe| pipe.read_to_end(&mut said));
        String::from_utf8_lossy(&said).into_owned()
    });
    let mut ready = String::new();
    if let Some(mut pipe) = child.stdout.take() {
        pipe.read_to_string(&mut ready)?;
    }
    Ok((ready, said.join().unwrap_or_default()))
}
