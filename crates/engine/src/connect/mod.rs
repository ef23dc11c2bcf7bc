//! Connections of `nbd:` devices to their servers: the client's handshake, TLS, and reconnecting.
//!
//! All of it runs on one thread of its own, started with the first such device: opening a device blocks until
//! its first connection, and must not block the thread that serves handshakes. Reactors never wait here: a
//! node requests a connection and receives it over its channel
//! ([ADR 17](../../../../docs/adr/0017-nodes-with-sockets.md)).
//!
//! *Invariant:* a connection that is delivered to a node is to an export that is no smaller than the device
//! and has all of its features.

mod attempts;
mod handshake;
mod tls;

pub(crate) use handshake::ConnectError;

use crate::programs::Nbdkit;
use crate::spec::{Bytes, NbdSpec, ProgramSpec};
use attempts::Attempts;
use backends::Fact;
use backends::nbd::{Connected, ConnectionChannel, Connector, Export, Loss, Nbd, ServerTimeouts};
use handshake::Target;
use proto::nbd::{Command, Request, wire};
use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;
use tokio::runtime::{Builder, Handle};
use tracing::Level;

/// Longest duration of an attempt, from the first packet to the end of the handshake.
const ATTEMPT: Duration = Duration::from_secs(10);

/// Returns the runtime of the connecting thread, which is started if needed.
fn runtime() -> io::Result<Handle> {
    static RUNTIME: Mutex<Option<Handle>> = Mutex::new(None);
    let mut shared = RUNTIME.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(handle) = &*shared {
        return Ok(handle.clone());
    }
    let runtime = Builder::new_current_thread().enable_all().build()?;
    let handle = runtime.handle().clone();
    std::thread::Builder::new()
        .name("connect".to_owned())
        .spawn(move || runtime.block_on(std::future::pending::<()>()))?;
    Ok(shared.insert(handle).clone())
}

/// An `nbd:` device and its connector.
pub(crate) struct Remote {
    pub(crate) nbd: Nbd<OwnedFd>,
    /// Whether the export is known from a connection, rather than assumed.
    known: bool,
    /// Whether the device starts the server itself.
    is_nbdkit: bool,
}

/// The assumed properties of an export while its server is unreachable.
pub(crate) struct AssumedExport {
    pub(crate) size: Bytes,
    /// The export over another path, if known.
    pub(crate) like: Option<Export>,
}

impl Remote {
    /// Connects to a server. Blocks until the handshake is complete, 10 s at most. `device`: the name of the
    /// device that it is opened for, for the log.
    ///
    /// # Errors
    /// There is no server, no such export, or the export cannot be a device.
    pub(crate) fn open(spec: &NbdSpec, device: Option<&str>) -> Result<Remote, ConnectError> {
        Remote::open_target(Target::new(spec)?, described(spec), device)
    }

    /// Starts nbdkit, and connects to it as [`open`](Remote::open) does.
    ///
    /// # Errors
    /// nbdkit cannot be started or ends, or its export cannot be a device.
    pub(crate) fn open_nbdkit(spec: &ProgramSpec, device: Option<&str>) -> Result<Remote, ConnectError> {
        let uri = format!("nbdkit:{}", spec.command);
        let nbdkit = Nbdkit::new(spec, device);
        let timeouts = ServerTimeouts { timeout: spec.timeout, reconnect: spec.reconnect };
        let described = backends::nbd::NbdSpec { uri: uri.clone(), timeouts, read_only: spec.ro };
        Remote::open_target(Target::of_nbdkit(nbdkit, uri), described, device)
    }

    fn open_target(
        target: Target,
        described: backends::nbd::NbdSpec,
        device: Option<&str>,
    ) -> Result<Remote, ConnectError> {
        let target = Arc::new(target);
        let handle = runtime().map_err(|why| target.failed(why))?;
        let (done, is_done) = channel();
        let first = target.clone();
        // The receiver below waits until this has ended.
        handle.spawn(async move { _ = done.send(attempt(&first).await) });
        let connected = is_done.recv().map_err(|why| target.failed(io::Error::other(why)))??;
        let connector = Arc::new(NbdConnector::new(target.clone(), handle, device));
        let is_nbdkit = target.nbdkit().is_some();
        let nbd = Nbd::new(described, connected, connector.clone()).map_err(|why| target.refused(why))?;
        // Nodes request connections only from here on.
        let _ = connector.export.set(*nbd.export());
        Ok(Remote { nbd, known: true, is_nbdkit })
    }

    /// Connects to a server, or, if there is none now, assumes its export: connecting continues while the
    /// device is served. A server whose export turns out to have less is refused then.
    ///
    /// # Errors
    /// The export exists and cannot be a device, or the address can never be reached.
    pub(crate) fn open_assumed(
        spec: &NbdSpec,
        assumed: &AssumedExport,
        device: Option<&str>,
    ) -> Result<Remote, ConnectError> {
        let error = match Remote::open(spec, device) {
            Err(error @ ConnectError::Io { .. }) => error,
            other => return other,
        };
        tracing::warn!(device, %error, "a path cannot be reached yet");
        let target = Arc::new(Target::new(spec)?);
        let handle = runtime().map_err(|why| target.failed(why))?;
        let connector = Arc::new(NbdConnector::new(target.clone(), handle, device));
        let export = match assumed.like {
            Some(export) => Export { size: assumed.size.0, read_only: export.read_only || spec.ro, ..export },
            None => Export::assumed(assumed.size, spec.ro),
        };
        let nbd = Nbd::away(described(spec), export, connector.clone()).map_err(|why| target.refused(why))?;
        let _ = connector.export.set(export);
        Ok(Remote { nbd, known: false, is_nbdkit: false })
    }

    /// Returns whether the server is an nbdkit of its own.
    pub(crate) fn is_nbdkit(&self) -> bool {
        self.is_nbdkit
    }

    /// Returns whether the export is known from a connection.
    pub(crate) fn is_known(&self) -> bool {
        self.known
    }
}

fn described(spec: &NbdSpec) -> backends::nbd::NbdSpec {
    backends::nbd::NbdSpec {
        uri: spec.uri.to_string(),
        timeouts: ServerTimeouts { timeout: spec.timeout, reconnect: spec.reconnect },
        read_only: spec.ro,
    }
}

impl Drop for Remote {
    fn drop(&mut self) {
        self.nbd.take_first().into_iter().for_each(disconnect);
    }
}

/// Ends a session on which no request was ever sent.
fn disconnect(connected: Connected<OwnedFd>) {
    let mut header = [0; wire::EXTENDED_REQUEST_LEN];
    let len = Request::new(Command::Disc, 0, 0, 0).put(&mut header, connected.session.extended());
    // A server that is gone needs no disconnect request.
    let _ = std::fs::File::from(connected.stream).write_all(&header[..len]);
}

struct NbdConnector {
    target: Arc<Target>,
    handle: Handle,
    /// The export that every connection must lead to. Set before the first connection is requested.
    export: OnceLock<Export>,
    attempts: Arc<Attempts>,
}

impl NbdConnector {
    fn new(target: Arc<Target>, handle: Handle, device: Option<&str>) -> NbdConnector {
        let attempts = Attempts::new(target.name(), device);
        NbdConnector { target, handle, export: OnceLock::new(), attempts: Arc::new(attempts) }
    }
}

impl Connector<OwnedFd> for NbdConnector {
    fn connect(&self, channel: Arc<ConnectionChannel<OwnedFd>>, loss: Loss) {
        if let Some(&export) = self.export.get() {
            self.handle.spawn(connect_and_deliver(
                self.target.clone(),
                export,
                channel,
                loss,
                self.attempts.clone(),
            ));
        }
    }

    fn describe(&self) -> Vec<Fact> {
        let mut facts = vec![("connecting", self.attempts.describe())];
        facts.extend(self.target.nbdkit().into_iter().flat_map(Nbdkit::describe));
        facts
    }
}

async fn attempt(target: &Arc<Target>) -> Result<Connected<OwnedFd>, ConnectError> {
    match tokio::time::timeout(ATTEMPT, target.connect()).await {
        Ok(connected) => connected,
        Err(_) => Err(target.failed(io::ErrorKind::TimedOut.into())),
    }
}

/// Connects until that succeeds, and delivers the connection. Pauses before each attempt according to the
/// failures before it, which the channel remembers from one loss to the next.
async fn connect_and_deliver(
    target: Arc<Target>,
    export: Export,
    channel: Arc<ConnectionChannel<OwnedFd>>,
    loss: Loss,
    attempts: Arc<Attempts>,
) {
    let mut next = attempts.begin();
    if loss != Loss::New {
        next.failed(&loss.to_string());
        if attempts.may_log() {
            tracing::warn!(device = attempts.device(), server = target.name(), %loss, "a connection was lost");
        }
    }
    let mut logged = String::new();
    while !channel.is_closed() {
        next.pause(channel.failures()).await;
        if channel.is_closed() {
            return;
        }
        let connected =
            attempt(&target).await.and_then(|connected| match export.admits(&connected.session) {
                Ok(()) => Ok(connected),
                Err(why) => {
                    disconnect(connected);
                    Err(target.refused(why))
                }
            });
        match connected {
            Ok(connected) => {
                match channel.deliver(connected) {
                    Ok(()) if loss != Loss::New && tracing::enabled!(Level::INFO) && attempts.may_log() => {
                        tracing::info!(device = attempts.device(), server = target.name(), "connected again");
                    }
                    Ok(()) => {}
                    Err(connected) => disconnect(connected),
                }
                return;
            }
            Err(error) => {
                channel.count_failure();
                if error.is_refused() {
                    channel.report_refused();
                }
                let text = error.to_string();
                next.failed(&text);
                if text != logged && attempts.may_log() {
                    tracing::warn!(device = attempts.device(), %error, "no connection yet");
                    logged = text;
                }
            }
        }
    }
}
