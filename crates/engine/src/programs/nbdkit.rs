//! nbdkit with a plugin: an NBD server that the device starts, on a socket that only its user can access.

use super::child::Running;
use crate::spec::ProgramSpec;
use rustix::process::Signal;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;
use tempfile::TempDir;

/// Longest wait for nbdkit to end by itself before it is killed.
const GRACE: Duration = Duration::from_secs(2);

/// The nbdkit of a device.
pub(crate) struct Nbdkit {
    spec: ProgramSpec,
    device: Option<String>,
    /// The folder of its socket, which other users cannot enter.
    folder: TempDir,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    running: Option<Running>,
    starts: u64,
    last_end: String,
}

impl Nbdkit {
    /// Creates the folder of the socket. nbdkit is started with the first connection.
    pub(crate) fn new(spec: &ProgramSpec, device: Option<&str>) -> io::Result<Nbdkit> {
        let folder = tempfile::Builder::new().prefix("blockyard-nbdkit-").tempdir()?;
        let device = device.map(str::to_owned);
        Ok(Nbdkit { spec: spec.clone(), device, folder, state: Mutex::default() })
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.folder.path().join("socket")
    }

    /// Starts nbdkit if it does not run. The kernel ends it with the thread that calls this, so that thread
    /// has to live as long as the process.
    ///
    /// # Errors
    /// It cannot be started, or has ended and is not to be started again.
    pub(crate) fn ensure(&self) -> io::Result<()> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.note_end(&self.spec.command, self.device.as_deref());
        if state.running.is_some() {
            return Ok(());
        }
        if state.starts > 0 && !self.spec.restart {
            return Err(io::Error::other(format!("nbdkit has ended ({}), and restart=off", state.last_end)));
        }
        match std::fs::remove_file(self.socket()) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let socket = path_text(&self.socket())?;
        let own = ["nbdkit", "--foreground", "--exit-with-parent", "--newstyle", "--unix", &socket];
        let argv: Vec<String> =
            own.into_iter().map(str::to_owned).chain(self.spec.argv.iter().cloned()).collect();
        let running = Running::start(&argv, &self.spec, Stdio::null(), self.device.as_deref(), "nbdkit")
            .map_err(|error| match error.kind() {
                io::ErrorKind::NotFound => {
                    io::Error::other("nbdkit is not installed, or dir= does not exist")
                }
                _ => io::Error::new(error.kind(), format!("nbdkit cannot be started: {error}")),
            })?;
        (state.starts, state.running) = (state.starts + 1, Some(running));
        Ok(())
    }

    /// Returns how nbdkit ended, if it did since it was last started.
    pub(crate) fn ended(&self) -> Option<String> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.note_end(&self.spec.command, self.device.as_deref());
        state.running.is_none().then(|| state.last_end.clone())
    }

    /// Describes the process, for `show`.
    pub(crate) fn describe(&self) -> Vec<backends::Fact> {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let pid = state.running.as_ref().map_or("none".to_owned(), |running| running.id().to_string());
        let last_end = if state.last_end.is_empty() { "none" } else { &state.last_end };
        vec![("program", pid), ("starts", state.starts.to_string()), ("last end", last_end.to_owned())]
    }
}

impl State {
    fn note_end(&mut self, command: &str, device: Option<&str>) {
        if let Some(how) = self.running.as_mut().and_then(Running::ended) {
            tracing::warn!(device, "nbdkit {command} has ended: {how}");
            (self.running, self.last_end) = (None, how);
        }
    }
}

fn path_text(path: &Path) -> io::Result<String> {
    let text =
        path.to_str().ok_or_else(|| io::Error::other("the folder for temporary files is not UTF-8"))?;
    Ok(text.to_owned())
}

impl Drop for Nbdkit {
    fn drop(&mut self) {
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        if let Some(mut running) = state.running.take() {
            running.signal(Signal::TERM);
            let _ = running.ends_within(GRACE);
        }
    }
}
