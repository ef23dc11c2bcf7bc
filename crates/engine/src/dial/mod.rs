//! Connecting to NBD servers, for `nbd:` devices: the client's handshake, TLS, and trying again.
//!
//! All of it happens on one thread of the control plane that is started with the first such device: opening a device
//! waits for its first connection, and must not keep the thread that serves handshakes from doing that. Reactors never
//! wait here: a node asks for a connection and is brought one over its line ([ADR 17](../../../../docs/adr/0017-nodes-with-sockets.md)).
//!
//! *Invariant:* what is brought to a node is an export that is no smaller than the device and can do no less.

mod attempts;
mod connect;
mod tls;

pub(crate) use connect::DialError;

use crate::spec::{Bytes, NbdSpec};
use attempts::Attempts;
use backends::Fact;
use backends::nbd::{Connected, Connector, Export, Line, Loss, Nbd, Patience};
use connect::Target;
use proto::nbd::{Command, Request, wire};
use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;
use tokio::runtime::{Builder, Handle};
use tracing::Level;

/// How long an attempt may take, from the first packet to the end of the handshake.
const ATTEMPT: Duration = Duration::from_secs(10);

/// The thread's runtime.
fn runtime() -> io::Result<Handle> {
    static RUNTIME: Mutex<Option<Handle>> = Mutex::new(None);
    let mut there = RUNTIME.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(handle) = &*there {
        return Ok(handle.clone());
    }
    let runtime = Builder::new_current_thread().enable_all().build()?;
    let handle = runtime.handle().clone();
    std::thread::Builder::new()
        .name("dial".to_owned())
        .spawn(move || runtime.block_on(std::future::pending::<()>()))?;
    Ok(there.insert(handle).clone())
}

/// An `nbd:` device, and who connects for it.
pub(crate) struct Remote {
    pub(crate) nbd: Nbd<OwnedFd>,
    /// There was a connection: what it is was not assumed.
    known: bool,
}

/// What an export that nobody can reach yet is taken to be.
pub(crate) struct Assumed {
    pub(crate) size: Bytes,
    /// As another way to the same is known to be.
    pub(crate) like: Option<Export>,
}

impl Remote {
    /// Connect to what is described. Waits for that.
    ///
    /// # Errors
    /// There is no server, no such export, or none that a device can be.
    pub(crate) fn open(spec: &NbdSpec) -> Result<Remote, DialError> {
        let target = Arc::new(Target::new(spec)?);
        let handle = runtime().map_err(|why| target.failed(why))?;
        let (done, is_done) = channel();
        let first = target.clone();
        // Whoever waits below does so until this has ended.
        handle.spawn(async move { _ = done.send(attempt(&first).await) });
        let connected = is_done.recv().map_err(|why| target.failed(io::Error::other(why)))??;
        let dialer = Arc::new(Dialer::new(target.clone(), handle));
        let nbd = Nbd::new(described(spec), connected, dialer.clone()).map_err(|why| target.refused(why))?;
        // Nodes ask for connections only from here on.
        let _ = dialer.export.set(*nbd.export());
        Ok(Remote { nbd, known: true })
    }

    /// The same, or if there is no server now what it is assumed to be: connecting goes on while it is served. A server
    /// that turns out to be less is refused then.
    ///
    /// # Errors
    /// It is there and none that a device can be, or can never be reached by what is described.
    pub(crate) fn open_later(spec: &NbdSpec, assumed: &Assumed) -> Result<Remote, DialError> {
        let away = match Remote::open(spec) {
            Err(away @ DialError::Io { .. }) => away,
            other => return other,
        };
        tracing::warn!(%away, "a path is not there yet");
        let target = Arc::new(Target::new(spec)?);
        let handle = runtime().map_err(|why| target.failed(why))?;
        let dialer = Arc::new(Dialer::new(target.clone(), handle));
        let export = match assumed.like {
            Some(export) => Export { size: assumed.size.0, read_only: export.read_only || spec.ro, ..export },
            None => Export::assumed(assumed.size, spec.ro),
        };
        let nbd = Nbd::away(described(spec), export, dialer.clone()).map_err(|why| target.refused(why))?;
        let _ = dialer.export.set(export);
        Ok(Remote { nbd, known: false })
    }

    /// Whether a server ever said what it is.
    pub(crate) fn is_known(&self) -> bool {
        self.known
    }
}

fn described(spec: &NbdSpec) -> backends::nbd::NbdSpec {
    backends::nbd::NbdSpec {
        uri: spec.uri.to_string(),
        patience: Patience { timeout: spec.timeout, reconnect: spec.reconnect },
        read_only: spec.ro,
    }
}

impl Drop for Remote {
    fn drop(&mut self) {
        self.nbd.take_first().into_iter().for_each(say_goodbye);
    }
}

/// End a session on which nothing was ever asked.
fn say_goodbye(connected: Connected<OwnedFd>) {
    let mut header = [0; wire::EXTENDED_REQUEST_LEN];
    let len = Request::new(Command::Disc, 0, 0, 0).put(&mut header, connected.session.extended());
    // A server that is gone already needs no farewell.
    let _ = std::fs::File::from(connected.stream).write_all(&header[..len]);
}

struct Dialer {
    target: Arc<Target>,
    handle: Handle,
    /// What connections must lead to. Set before any is asked for.
    export: OnceLock<Export>,
    attempts: Arc<Attempts>,
}

impl Dialer {
    fn new(target: Arc<Target>, handle: Handle) -> Dialer {
        let attempts = Attempts::new(target.name());
        Dialer { target, handle, export: OnceLock::new(), attempts: Arc::new(attempts) }
    }
}

impl Connector<OwnedFd> for Dialer {
    fn connect(&self, line: Arc<Line<OwnedFd>>, loss: Loss) {
        if let Some(&export) = self.export.get() {
            self.handle.spawn(bring(self.target.clone(), export, line, loss, self.attempts.clone()));
        }
    }

    fn describe(&self) -> Vec<Fact> {
        vec![("connecting", self.attempts.describe())]
    }
}

async fn attempt(target: &Arc<Target>) -> Result<Connected<OwnedFd>, DialError> {
    match tokio::time::timeout(ATTEMPT, target.connect()).await {
        Ok(connected) => connected,
        Err(_) => Err(target.failed(io::ErrorKind::TimedOut.into())),
    }
}

/// Connect until that works, and bring the connection. Pauses before each attempt as the failures before it demand, which the
/// line remembers from one loss to the next.
async fn bring(
    target: Arc<Target>,
    export: Export,
    line: Arc<Line<OwnedFd>>,
    loss: Loss,
    attempts: Arc<Attempts>,
) {
    let mut next = attempts.begin();
    if loss != Loss::New {
        next.failed(&loss.to_string());
        if attempts.may_log() {
            tracing::warn!(server = target.name(), %loss, "a connection was lost");
        }
    }
    let mut said = String::new();
    while !line.is_closed() {
        next.pause(line.failures()).await;
        if line.is_closed() {
            return;
        }
        let connected =
            attempt(&target).await.and_then(|connected| match export.admits(&connected.session) {
                Ok(()) => Ok(connected),
                Err(why) => {
                    say_goodbye(connected);
                    Err(target.refused(why))
                }
            });
        match connected {
            Ok(connected) => {
                match line.bring(connected) {
                    Ok(()) if loss != Loss::New && tracing::enabled!(Level::INFO) && attempts.may_log() => {
                        tracing::info!(server = target.name(), "connected again");
                    }
                    Ok(()) => {}
                    Err(connected) => say_goodbye(connected),
                }
                return;
            }
            Err(error) => {
                line.count_failure();
                let text = error.to_string();
                next.failed(&text);
                if text != said && attempts.may_log() {
                    tracing::warn!(%error, "no connection yet");
                    said = text;
                }
            }
        }
    }
}
