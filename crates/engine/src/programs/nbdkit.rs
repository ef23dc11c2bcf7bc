//! nbdkit with a plugin: an NBD server that the device starts, on a socket that only this process can reach.
//!
//! nbdkit receives a listening socket by systemd's socket activation. The socket's name is removed before
//! nbdkit starts; connections are made through a descriptor of its inode. So no file is left behind, however
//! the server ends, and the socket can be connected to before nbdkit accepts.
//!
//! *Invariant:* only nbdkit has the listening socket. When nbdkit ends, connections are refused or closed.

use super::child::Running;
use crate::spec::ProgramSpec;
use rustix::fs::{Mode, OFlags};
use rustix::process::Signal;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::process::Stdio;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// Longest wait for nbdkit to end by itself before it is killed.
const GRACE: Duration = Duration::from_secs(2);
/// Passes the listening socket from standard input on as descriptor 3, the first one of socket activation,
/// which also demands the id of the process. `exec` keeps that id, and nbdkit is still our child.
const ACTIVATE: &str = r#"exec 3<&0 0</dev/null; LISTEN_PID=$$ LISTEN_FDS=1 exec nbdkit "$@""#;

/// The nbdkit of a device.
pub(crate) struct Nbdkit {
    spec: ProgramSpec,
    device: Option<String>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    running: Option<Running>,
    /// The socket of the last nbdkit; `None` before the first start.
    socket: Option<Arc<NamelessSocket>>,
    starts: u64,
    last_end: String,
}

impl Nbdkit {
    /// Describes a device's nbdkit, which is started with the first connection.
    pub(crate) fn new(spec: &ProgramSpec, device: Option<&str>) -> Nbdkit {
        Nbdkit { spec: spec.clone(), device: device.map(str::to_owned), state: Mutex::default() }
    }

    /// Starts nbdkit if it does not run, and returns its socket. The kernel ends nbdkit with the thread that
    /// calls this, so that thread has to live as long as the process.
    ///
    /// # Errors
    /// It cannot be started, or has ended and is not to be started again.
    pub(crate) fn ensure(&self) -> io::Result<Arc<NamelessSocket>> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.note_end(&self.spec.command, self.device.as_deref());
        if let (Some(_), Some(socket)) = (&state.running, &state.socket) {
            return Ok(socket.clone());
        }
        if state.starts > 0 && !self.spec.restart {
            return Err(io::Error::other(format!("nbdkit has ended ({}), and restart=off", state.last_end)));
        }
        if !is_installed() {
            return Err(io::Error::other("nbdkit is not installed"));
        }
        let (listener, socket) = NamelessSocket::listen()?;
        let (running, socket) = (self.start(listener)?, Arc::new(socket));
        (state.starts, state.running, state.socket) = (state.starts + 1, Some(running), Some(socket.clone()));
        Ok(socket)
    }

    /// Starts nbdkit, and gives the listening socket to it.
    fn start(&self, listener: UnixListener) -> io::Result<Running> {
        let own = ["sh", "-c", ACTIVATE, "nbdkit", "--foreground", "--exit-with-parent", "--newstyle"];
        let argv: Vec<String> =
            own.into_iter().map(str::to_owned).chain(self.spec.argv.iter().cloned()).collect();
        let stdin = Stdio::from(OwnedFd::from(listener));
        let started = Running::start(&argv, &self.spec, stdin, self.device.as_deref(), "nbdkit");
        started.map_err(|error| match &self.spec.dir {
            Some(dir) if !dir.is_dir() => io::Error::other(format!("dir={} is no folder", dir.display())),
            _ => io::Error::new(error.kind(), format!("nbdkit cannot be started: {error}")),
        })
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

/// Returns whether `PATH` has an nbdkit.
fn is_installed() -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|folder| folder.join("nbdkit").is_file())
}

/// The inode of a listening socket whose name was removed.
pub(crate) struct NamelessSocket(OwnedFd);

impl NamelessSocket {
    /// Creates a listening socket. Other users cannot enter its folder, which exists for this call only.
    fn listen() -> io::Result<(UnixListener, NamelessSocket)> {
        let folder = tempfile::Builder::new().prefix("blockyard-nbdkit-").tempdir()?;
        let name = folder.path().join("socket");
        let listener = UnixListener::bind(&name)?;
        let socket = rustix::fs::open(&name, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
        folder.close()?;
        Ok((listener, NamelessSocket(socket)))
    }

    /// Returns the path by which this process can connect to the socket, as long as this value exists.
    pub(crate) fn path(&self) -> PathBuf {
        PathBuf::from(format!("/proc/self/fd/{}", self.0.as_raw_fd()))
    }
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
