//! Marks of a workload: over a socket, whose sender waits until the mark is in the log, or as lines to an
//! inherited descriptor.

use super::recorder::Recorder;
use crate::failure::Failure;
use rustix::event::{PollFd, PollFlags, poll};
use std::fs::File;
use std::io::{self, PipeReader, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::ExitCode;
use std::sync::{Arc, Mutex, PoisonError};

/// The environment variable with the path of the socket.
pub(super) const SOCKET: &str = "CRASH_SOCKET";

/// Accepts marks until the process ends.
pub(super) fn listen(path: &Path, recorder: Arc<Mutex<Recorder>>) -> std::io::Result<()> {
    let listener = UnixListener::bind(path)?;
    std::thread::Builder::new().name("crash-marks".to_owned()).spawn(move || {
        for stream in listener.incoming().flatten() {
            take(stream, &recorder);
        }
    })?;
    Ok(())
}

fn take(mut stream: UnixStream, recorder: &Mutex<Recorder>) {
    let mut text = String::new();
    if (&stream).take(1 << 16).read_to_string(&mut text).is_err() {
        return;
    }
    let added = recorder.lock().unwrap_or_else(PoisonError::into_inner).mark(&one_line(&text));
    let _ = stream.write_all(added.map_or_else(|why| why.to_string(), |()| "ok".to_owned()).as_bytes());
}

/// Replaces line ends in a mark, since marks are listed one a line.
fn one_line(text: &str) -> String {
    text.trim_end().replace(['\n', '\r'], " ")
}

/// The lines of a pipe as marks.
///
/// It is read before each write is recorded, so a mark that a workload makes before a write precedes it in the
/// log, and by a thread, for marks that no write follows.
pub(super) struct Lines {
    pipe: File,
    /// The bytes of a line that has not ended.
    rest: Vec<u8>,
}

impl Lines {
    /// Takes the reading end of a pipe.
    pub(super) fn new(pipe: PipeReader) -> io::Result<Lines> {
        let pipe = File::from(OwnedFd::from(pipe));
        rustix::io::ioctl_fionbio(&pipe, true)?;
        Ok(Lines { pipe, rest: Vec::new() })
    }

    /// Returns the pipe, to wait for more.
    pub(super) const fn pipe(&self) -> &File {
        &self.pipe
    }

    /// Reads what has arrived; calls `line` for each line. Returns whether the pipe is still open.
    pub(super) fn read(&mut self, mut line: impl FnMut(&str)) -> bool {
        let mut bytes = [0; 4096];
        let open = loop {
            match self.pipe.read(&mut bytes) {
                Ok(0) => break false,
                Ok(len) => self.rest.extend_from_slice(&bytes[..len]),
                Err(why) if why.kind() == io::ErrorKind::Interrupted => {}
                Err(why) => break why.kind() == io::ErrorKind::WouldBlock,
            }
        };
        let mut from = 0;
        while let Some(len) = self.rest[from..].iter().position(|byte| *byte == b'\n') {
            line(&one_line(&String::from_utf8_lossy(&self.rest[from..from + len])));
            from += len + 1;
        }
        self.rest.drain(..from);
        if !open && !self.rest.is_empty() {
            line(&one_line(&String::from_utf8_lossy(&std::mem::take(&mut self.rest))));
        }
        open
    }
}

/// Adds the lines of the recorder's pipe until all its writers have closed it.
pub(super) fn follow(recorder: &Mutex<Recorder>) {
    loop {
        let pipe = match recorder.lock().unwrap_or_else(PoisonError::into_inner).wait_for_lines() {
            Some(pipe) => pipe,
            None => return,
        };
        let _ = poll(&mut [PollFd::new(&pipe, PollFlags::IN)], None);
    }
}

/// `blockyard crash mark TEXT`.
pub(super) fn mark(text: &str) -> Result<ExitCode, Failure> {
    let failed = |why: String| Failure::new("crash mark", "", why);
    let Some(path) = std::env::var_os(SOCKET) else {
        return Err(failed(format!("{SOCKET} is not set (run it from a workload of blockyard crash)")));
    };
    let asked = || -> std::io::Result<String> {
        let mut stream = UnixStream::connect(&path)?;
        stream.write_all(text.as_bytes())?;
        stream.shutdown(std::net::Shutdown::Write)?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        Ok(answer)
    };
    match asked() {
        Ok(answer) if answer == "ok" => Ok(ExitCode::SUCCESS),
        Ok(answer) => Err(failed(format!("the log cannot be written: {answer}"))),
        Err(why) => {
            let path = Path::new(&path).display();
            Err(failed(format!("{path}: {why} (is the workload still being recorded?)")))
        }
    }
}
