//! The real binary, started often and quickly. Its exit is reported to the caller and never causes a panic
//! here.

use rustix::process::Signal;
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

/// Limit for the start and for the end of a server.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// A running server.
pub struct Daemon {
    child: Child,
    log: PathBuf,
    killed: bool,
}

/// The failure of a server's start.
#[derive(Debug)]
pub struct Refusal {
    /// Its exit status; `None` if it had to be killed.
    pub status: Option<ExitStatus>,
    /// The server's standard error.
    pub log: String,
}

impl Refusal {
    /// Returns whether the server refused in an orderly way: by itself, with a status, without a panic.
    pub fn is_orderly(&self) -> bool {
        self.status.is_some_and(|status| status.code().is_some()) && !has_panicked(&self.log)
    }
}

/// Returns whether a log contains a panic.
pub fn has_panicked(log: &str) -> bool {
    log.contains("panicked at") || log.contains("stack overflow") || log.contains("memory allocation of")
}

impl Daemon {
    /// Starts the binary with these arguments and waits until it has named that many exports.
    ///
    /// # Errors
    /// The process ended instead, or did not name its exports in time.
    pub fn start(folder: &Path, arguments: &[&str], exports: usize) -> Result<Daemon, Refusal> {
        let mut daemon = Daemon::spawn(folder, arguments)?;
        let mut stdout = BufReader::new(daemon.child.stdout.take().expect("stdout is a pipe"));
        let mut line = String::new();
        for _ in 0..exports {
            let is_there = !stdout.buffer().is_empty() || wait_readable(stdout.get_ref());
            if !is_there || !matches!(stdout.read_line(&mut line), Ok(len) if len > 0) {
                let status = daemon.wait();
                return Err(Refusal { status, log: daemon.log() });
            }
        }
        daemon.child.stdout = Some(stdout.into_inner());
        Ok(daemon)
    }

    /// Starts the binary without waiting for it.
    ///
    /// # Errors
    /// The process cannot be started.
    pub fn spawn(folder: &Path, arguments: &[&str]) -> Result<Daemon, Refusal> {
        let log = folder.join("stderr");
        let failed = |why: std::io::Error| Refusal { status: None, log: why.to_string() };
        let stderr = File::create(&log).map_err(failed)?;
        let mut command = Command::new(crate::server::binary());
        command.args(arguments).current_dir(folder).env("BLOCKYARD_RUN", folder.join("run"));
        command.env("BLOCKYARD_EXPORT", "nbd");
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(stderr);
        let child = command.spawn().map_err(failed)?;
        Ok(Daemon { child, log, killed: false })
    }

    /// Returns the process ID.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Returns the standard error so far.
    pub fn log(&self) -> String {
        std::fs::read(&self.log).map(|log| String::from_utf8_lossy(&log).into_owned()).unwrap_or_default()
    }

    /// Returns whether the server still runs.
    pub fn is_running(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(None))
    }

    /// Kills the server with SIGKILL.
    pub fn kill(&mut self) {
        self.killed = true;
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// Sends SIGTERM and waits for the end; returns `None` if the server had to be killed.
    pub fn terminate(&mut self) -> Option<ExitStatus> {
        crate::server::signal(self.pid(), Signal::TERM);
        self.wait()
    }

    /// Waits for the end; returns `None` if the server had to be killed.
    pub fn wait(&mut self) -> Option<ExitStatus> {
        let status = crate::tools::wait_within(&mut self.child, PATIENCE);
        self.killed = true;
        status
    }

    /// Reports a server that ended by itself or panicked.
    pub fn complaint(&mut self) -> Option<String> {
        let log = self.log();
        let ended = if self.killed { None } else { self.child.try_wait().ok().flatten() };
        match ended {
            Some(status) => Some(format!("the server ended ({status}): {}", tail(&log))),
            None if has_panicked(&log) => Some(format!("the server panicked: {}", tail(&log))),
            None => None,
        }
    }

    /// Returns a number of `/proc/PID/status`, in KiB for sizes.
    pub fn status_field(&self, name: &str) -> u64 {
        let text = std::fs::read_to_string(format!("/proc/{}/status", self.pid())).unwrap_or_default();
        let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        line.and_then(|line| line.split_whitespace().next()?.parse().ok()).unwrap_or(0)
    }

    /// Returns the number of open descriptors.
    pub fn descriptors(&self) -> usize {
        std::fs::read_dir(format!("/proc/{}/fd", self.pid())).map_or(0, Iterator::count)
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        if !self.killed {
            self.kill();
        }
    }
}

/// Returns the end of a log.
pub fn tail(log: &str) -> &str {
    let from = log.char_indices().rev().nth(1200).map_or(0, |(index, _)| index);
    &log[from..]
}

fn wait_readable(pipe: &std::process::ChildStdout) -> bool {
    use rustix::event::{PollFd, PollFlags, poll};
    let limit = rustix::event::Timespec { tv_sec: PATIENCE.as_secs() as i64, tv_nsec: 0 };
    let mut fds = [PollFd::new(pipe, PollFlags::IN)];
    matches!(poll(&mut fds, Some(&limit)), Ok(ready) if ready > 0)
}
