//! A running program: its process group, its output, its end.

use crate::log_limit::LogLimit;
use crate::retry::peer_log_limit;
use crate::spec::ProgramSpec;
use rustix::process::{Pid, Signal, kill_process_group};
use std::io::{self, BufRead, BufReader, PipeReader, Read};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Longest line of output that is logged. The rest is a line of its own.
const LINE_MAX: u64 = 1024;
/// Interval at which a program is polled for its end.
const END_POLL: Duration = Duration::from_millis(5);

/// A program that runs in a process group of its own, and is killed on drop.
pub(super) struct Running {
    child: Child,
    /// The last line of its output, for messages.
    last_line: Arc<Mutex<String>>,
}

impl Running {
    /// Starts a program. `argv`: the program and its arguments. `name`: for the log.
    pub(super) fn start(
        argv: &[String],
        spec: &ProgramSpec,
        stdin: Stdio,
        device: Option<&str>,
        name: &str,
    ) -> io::Result<Running> {
        let (program, arguments) = argv.split_first().ok_or(io::ErrorKind::InvalidInput)?;
        // A path is relative to the directory in which the program starts.
        let path = match &spec.dir {
            Some(dir) if program.contains('/') => dir.join(program),
            _ => Path::new(program).to_owned(),
        };
        let (reader, writer) = io::pipe()?;
        let mut command = Command::new(path);
        command.args(arguments).stdin(stdin).stdout(writer.try_clone()?).stderr(writer).process_group(0);
        if let Some(dir) = &spec.dir {
            command.current_dir(dir);
        }
        let child = command.spawn()?;
        // Closes our copies of the pipe's end, so that reading ends with the program.
        drop(command);
        let last_line = Arc::<Mutex<String>>::default();
        let log = Log { device: device.map(str::to_owned), name: name.to_owned(), last: last_line.clone() };
        let limit = peer_log_limit();
        std::thread::Builder::new().name("program-log".to_owned()).spawn(move || log.read(reader, &limit))?;
        Ok(Running { child, last_line })
    }

    /// Process id.
    pub(super) fn id(&self) -> u32 {
        self.child.id()
    }

    /// Returns how it ended, with its last line of output; `None`: it runs.
    pub(super) fn ended(&mut self) -> Option<String> {
        match self.child.try_wait() {
            Ok(None) => None,
            Ok(Some(status)) => Some(self.with_last_line(&status.to_string())),
            Err(error) => Some(error.to_string()),
        }
    }

    /// Waits for its end for that long.
    pub(super) fn ends_within(&mut self, limit: Duration) -> Option<String> {
        let late = Instant::now() + limit;
        loop {
            let ended = self.ended();
            if ended.is_some() || Instant::now() >= late {
                return ended;
            }
            std::thread::sleep(END_POLL);
        }
    }

    /// Appends the last line of its output to a text.
    pub(super) fn with_last_line(&self, text: &str) -> String {
        // The thread that reads it may be a moment behind.
        std::thread::sleep(END_POLL);
        let line = self.last_line.lock().unwrap_or_else(PoisonError::into_inner);
        if line.is_empty() { text.to_owned() } else { format!("{text}: {line}") }
    }

    /// Sends a signal to its process group.
    pub(super) fn signal(&self, signal: Signal) {
        let _ = kill_process_group(Pid::from_child(&self.child), signal);
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // Also after the program's end: its child processes may still run and hold the shared memory.
        self.signal(Signal::KILL);
        let _ = self.child.wait();
    }
}

/// Reads the output of a program and logs it line by line, on a thread of its own.
struct Log {
    device: Option<String>,
    name: String,
    last: Arc<Mutex<String>>,
}

impl Log {
    fn read(&self, pipe: PipeReader, limit: &LogLimit) {
        let (mut pipe, mut line) = (BufReader::new(pipe), Vec::new());
        loop {
            line.clear();
            match pipe.by_ref().take(LINE_MAX).read_until(b'\n', &mut line) {
                Ok(0) | Err(_) => return,
                Ok(_) => {}
            }
            let text = String::from_utf8_lossy(&line);
            let text: String = text.trim_end().chars().filter(|c| !c.is_control()).collect();
            if text.is_empty() {
                continue;
            }
            // This thread has no runtime to report suppressed lines later, so the next line reports them.
            match limit.admit_now() {
                Some(1) => tracing::info!(device = self.device, program = self.name, "{text}"),
                Some(lines) => {
                    let suppressed = lines - 1;
                    tracing::info!(device = self.device, program = self.name, suppressed, "{text}");
                }
                None => {}
            }
            *self.last.lock().unwrap_or_else(PoisonError::into_inner) = text;
        }
    }
}
