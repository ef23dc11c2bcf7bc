//! The control plane of the vhost-user export: the socket, the messages of front-ends, and the state of
//! rings.
//!
//! An export has a hardware queue on a reactor for each virtqueue, from its start to its removal. A front-end
//! that connects shares guest memory and eventfds, and its rings are served on these queues. One front-end is
//! served at a time; the next one waits until the current one has disconnected.

mod choice;
mod connection;
mod disk;
mod socket;
mod virtqueue;

use crate::nbd::listen::{Listening, Socket as ListeningSocket};
use crate::{Exported, Exports, UblkLife};
use connection::Connection;
use disk::Disk;
use engine::control::{BoxFuture, ExportInfo};
use engine::device::Device;
use engine::host::{Export, Host, HostError, HostErrorKind};
use engine::log_limit::LogLimit;
use spec::{Bytes, NbdAddress, SocketMode, VhostUserSpec};
use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::net::{UnixListener, UnixStream};
use tokio::task::JoinHandle;

/// Pause before another attempt to connect, or to accept.
const RETRY_PAUSE: Duration = Duration::from_millis(100);

/// Exports a device as a disk of virtual machines.
///
/// # Errors
/// The socket cannot be created; nothing is left behind.
pub(crate) async fn export(
    exports: &Exports,
    device: &Arc<Device>,
    spec: &VhostUserSpec,
    _life: impl FnOnce() -> UblkLife,
) -> Result<Exported, HostError> {
    let host = exports.host();
    let path = spec.path.clone();
    let failed = |why: io::Error| HostError::failed(path.display().to_string(), why);
    let source = match spec.mode {
        SocketMode::Server => ConnectionSource::listen(&spec.path).map_err(failed)?,
        SocketMode::Client => ConnectionSource::Connect,
    };
    let disk = Disk::open(host, device, spec).await?;
    let task = tokio::spawn(serve(source, spec.path.clone(), disk.clone()));
    let address = path.display().to_string();
    let export = VhostExport { host: host.clone(), disk, path, task: Mutex::new(Some(task)) };
    host.add_export(device, Arc::new(export));
    Ok(Exported::at(address))
}

/// The source of connections to front-ends.
enum ConnectionSource {
    /// Front-ends connect to our socket. Dropping the first field removes the socket's file.
    Listen(
        #[expect(dead_code, reason = "it removes the socket file when it is dropped")] Listening,
        UnixListener,
    ),
    /// We connect to the socket of a front-end.
    Connect,
}

impl ConnectionSource {
    fn listen(path: &Path) -> io::Result<ConnectionSource> {
        let mut listening = Listening::open(&NbdAddress::Unix(path.to_owned()))?;
        match listening.sockets.pop() {
            Some(ListeningSocket::Unix(listener)) => {
                listener.set_nonblocking(true)?;
                Ok(ConnectionSource::Listen(listening, UnixListener::from_std(listener)?))
            }
            _ => Err(io::Error::other("it is not a Unix socket")),
        }
    }

    async fn next(&self, path: &Path) -> io::Result<UnixStream> {
        match self {
            ConnectionSource::Listen(_, listener) => Ok(listener.accept().await?.0),
            ConnectionSource::Connect => UnixStream::connect(path).await,
        }
    }
}

/// Serves one front-end after the other, until the export is closed.
async fn serve(source: ConnectionSource, path: PathBuf, disk: Arc<Disk>) {
    let failures = LogLimit::default();
    loop {
        let stream = tokio::select! {
            stream = source.next(&path) => stream,
            () = disk.closing() => return,
        };
        let error = match stream {
            Ok(stream) => {
                let mut connection = Connection::new(&disk, stream);
                disk.connected(Some(connection.peer()));
                tracing::debug!(device = %disk.name(), "a virtual machine has connected");
                let ended = connection.run().await;
                connection.shut_down().await;
                drop(connection);
                disk.connected(None);
                ended.err().map(|why| why.to_string())
            }
            Err(why) => {
                let is_pending = matches!(source, ConnectionSource::Connect)
                    && [io::ErrorKind::NotFound, io::ErrorKind::ConnectionRefused].contains(&why.kind());
                let text = (!is_pending).then(|| why.to_string());
                tokio::select! {
                    () = tokio::time::sleep(RETRY_PAUSE) => {}
                    () = disk.closing() => return,
                }
                text
            }
        };
        if let Some(why) = error
            && let Some(count) = failures.admit_now()
        {
            let device = disk.name();
            tracing::warn!(%device, "{count} connections of virtual machines ended with an error, the last one: {why}");
        }
    }
}

/// A device that is a disk of virtual machines.
struct VhostExport {
    host: Arc<Host>,
    disk: Arc<Disk>,
    path: PathBuf,
    /// Serves front-ends; empty once closed.
    task: Mutex<Option<JoinHandle<()>>>,
}

impl VhostExport {
    fn check_unused(&self) -> Result<(), HostError> {
        if self.disk.described().is_connected && !self.host.is_shutting_down() {
            let path = self.path.display();
            let text = format!(
                "{path} is in use by a virtual machine (unplug the disk there, or delete it with --force)"
            );
            return Err(HostError::new(HostErrorKind::InUse, text));
        }
        Ok(())
    }

    /// Ends the connection; requests in flight complete first.
    async fn end(&self) {
        self.disk.close();
        let task = self.task.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(task) = task {
            // The task does not panic unless it has a bug, which the runtime has reported then.
            let _ = task.await;
        }
    }
}

impl Export for VhostExport {
    fn info(&self, _device: &Device) -> ExportInfo {
        let described = self.disk.described();
        let virtqueues = self.disk.virtqueues();
        let threads: Vec<String> =
            virtqueues.iter().map(|virtqueue| virtqueue.reactor().to_string()).collect();
        let mut details = BTreeMap::from([
            ("virtqueues".to_owned(), virtqueues.len().to_string()),
            ("threads of virtqueues".to_owned(), threads.join(",")),
        ]);
        if described.is_connected {
            let mut add = |name: &str, value: String| details.insert(name.to_owned(), value);
            add("virtqueues in use", format!("{} ({})", described.rings, described.kind));
            add("guest memory", Bytes(described.memory).to_string());
            add("notified of changes", if described.is_informed { "yes" } else { "no" }.to_owned());
            if let Some(peer) = described.peer {
                add("process", peer.to_string());
            }
        }
        ExportInfo {
            kind: "vhost-user".to_owned(),
            address: self.path.display().to_string(),
            connections: described.is_connected.into(),
            sessions: Vec::new(),
            counts: self.disk.counts().map(|(name, count)| (name.to_owned(), count)).into(),
            tls: "off".to_owned(),
            details,
        }
    }

    fn is_used(&self, _device: &Device) -> bool {
        self.disk.described().is_connected
    }

    fn may_close<'a>(&'a self, _device: &'a Arc<Device>) -> BoxFuture<'a, Result<(), HostError>> {
        Box::pin(async { self.check_unused() })
    }

    fn close<'a>(&'a self, _device: &'a Arc<Device>) -> BoxFuture<'a, Result<(), HostError>> {
        Box::pin(async {
            self.check_unused()?;
            self.end().await;
            Ok(())
        })
    }

    fn force<'a>(&'a self, _device: &'a Arc<Device>) -> BoxFuture<'a, Result<(), HostError>> {
        Box::pin(async {
            self.end().await;
            Ok(())
        })
    }

    fn resized(&self, size: Bytes) -> BoxFuture<'_, Result<(), HostError>> {
        Box::pin(async move {
            self.disk.resized(size).await;
            Ok(())
        })
    }
}
