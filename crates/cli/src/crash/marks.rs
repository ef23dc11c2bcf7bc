//! Marks of a workload: over a socket, whose sender waits until the mark is in the log, or as lines to an
//! inherited descriptor.

use super::recorder::Recorder;
use crate::failure::Failure;
use std::io::{BufRead, BufReader, Read, Write};
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

/// Marks are listed one a line.
fn one_line(text: &str) -> String {
    text.trim_end().replace(['\n', '\r'], " ")
}

/// Adds each line of a pipe as a mark until all its writers have closed it.
pub(super) fn read_lines(pipe: impl Read, recorder: &Mutex<Recorder>) {
    let mut pipe = BufReader::new(pipe);
    let mut line = Vec::new();
    loop {
        line.clear();
        match pipe.read_until(b'\n', &mut line) {
            Ok(0) | Err(_) => return,
            Ok(_) => {
                let text = one_line(&String::from_utf8_lossy(&line));
                if recorder.lock().unwrap_or_else(PoisonError::into_inner).mark(&text).is_err() {
                    return;
                }
            }
        }
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
