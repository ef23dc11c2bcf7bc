//! One attempt to connect: from the address to a connection in its transmission phase.

use super::tls::{self, Tls};
use crate::programs::Nbdkit;
use crate::spec::NbdSpec;
use backends::nbd::{Connected, NbdError};
use proto::nbd::Session;
use proto::nbd::client::{Failure, Handshake, HandshakeOptions, Step, TlsPolicy};
use proto::nbd::uri::Server;
use std::io;
use std::os::fd::OwnedFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpStream, UnixStream};

/// Longest wait for the end of an nbdkit that closed a connection: its last line is the reason.
const NBDKIT_ENDS: Duration = Duration::from_millis(500);
/// Interval between checks for that end.
const LOOK: Duration = Duration::from_millis(10);

/// Why there is no connection.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// Connecting or the transport failed.
    #[error("{uri}: {why}{hint}")]
    Io {
        /// URI of the export.
        uri: String,
        /// The cause.
        why: io::Error,
        /// A hint.
        hint: &'static str,
    },
    /// The handshake failed.
    #[error("{uri}: {why}")]
    Handshake {
        /// URI of the export.
        uri: String,
        /// The cause.
        why: Failure,
    },
    /// The export is not usable.
    #[error("{uri}: {why}")]
    Export {
        /// URI of the export.
        uri: String,
        /// The cause.
        why: NbdError,
    },
    /// TLS cannot be set up.
    #[error(transparent)]
    Tls(#[from] tls::TlsError),
}

impl ConnectError {
    /// Whether nothing listens at the address.
    pub(crate) fn is_refused(&self) -> bool {
        let kinds = [io::ErrorKind::ConnectionRefused, io::ErrorKind::NotFound];
        matches!(self, ConnectError::Io { why, .. } if kinds.contains(&why.kind()))
    }
}

/// The server, its export, and TLS settings.
pub(super) struct Target {
    address: Address,
    /// Name of the export.
    export: String,
    name: String,
    tls: Option<Tls>,
}

/// The server of a target.
enum Address {
    Server(Server),
    /// The device starts it.
    Nbdkit(Nbdkit),
}

impl Target {
    pub(super) fn new(spec: &NbdSpec) -> Result<Target, ConnectError> {
        let (tls, name) = (Tls::load(&spec.uri)?, spec.uri.to_string());
        let address = Address::Server(spec.uri.server.clone());
        Ok(Target { address, export: spec.uri.export.clone(), name, tls })
    }

    /// Creates a target that the device starts itself. `name`: for messages.
    pub(super) fn of_nbdkit(nbdkit: Nbdkit, name: String) -> Target {
        Target { address: Address::Nbdkit(nbdkit), export: String::new(), name, tls: None }
    }

    pub(super) fn nbdkit(&self) -> Option<&Nbdkit> {
        match &self.address {
            Address::Nbdkit(nbdkit) => Some(nbdkit),
            Address::Server(_) => None,
        }
    }

    /// URI of the export, for messages.
    pub(super) fn name(&self) -> &str {
        &self.name
    }

    pub(super) fn failed(&self, why: io::Error) -> ConnectError {
        let hint = match why.kind() {
            _ if self.nbdkit().is_some() => "",
            io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => " (does the server run?)",
            io::ErrorKind::TimedOut => " (is it an NBD server?)",
            io::ErrorKind::UnexpectedEof => " (the server hung up: does it serve others only?)",
            io::ErrorKind::PermissionDenied => " (do you have permission to use its socket?)",
            _ => "",
        };
        ConnectError::Io { uri: self.name.clone(), why, hint }
    }

    pub(super) fn refused(&self, why: NbdError) -> ConnectError {
        ConnectError::Export { uri: self.name.clone(), why }
    }

    fn refused_by(&self, why: Failure) -> ConnectError {
        ConnectError::Handshake { uri: self.name.clone(), why }
    }

    pub(super) async fn connect(self: &Arc<Target>) -> Result<Connected<OwnedFd>, ConnectError> {
        match &self.address {
            Address::Nbdkit(nbdkit) => self.connect_to_nbdkit(nbdkit).await,
            Address::Server(Server::Unix(path)) => {
                let stream = match path.as_os_str().as_bytes().split_first() {
                    Some((0, name)) => abstract_unix(name),
                    _ => UnixStream::connect(path).await,
                };
                let stream = stream.map_err(|why| self.failed(why))?;
                self.shake_hands(stream, |stream| Ok(stream.into_std()?.into())).await
            }
            Address::Server(Server::Tcp { host, port }) => {
                let stream = TcpStream::connect((host.as_str(), *port)).await;
                let stream = stream.and_then(|stream| {
                    stream.set_nodelay(true)?;
                    // Detects a server that vanished without closing the connection, also while no request is
                    // sent.
                    socket2::SockRef::from(&stream).set_keepalive(true)?;
                    Ok(stream)
                });
                let stream = stream.map_err(|why| self.failed(why))?;
                self.shake_hands(stream, |stream| Ok(stream.into_std()?.into())).await
            }
        }
    }

    /// Starts nbdkit if it does not run, and connects to it. Its socket exists before it, so an nbdkit that
    /// cannot serve shows as a connection that is closed.
    async fn connect_to_nbdkit(&self, nbdkit: &Nbdkit) -> Result<Connected<OwnedFd>, ConnectError> {
        let socket = nbdkit.ensure().map_err(|why| self.failed(why))?;
        let connected = match UnixStream::connect(socket.path()).await {
            Ok(stream) => self.shake_hands(stream, |stream| Ok(stream.into_std()?.into())).await,
            Err(why) => Err(self.failed(why)),
        };
        let late = Instant::now() + NBDKIT_ENDS;
        while let Err(ConnectError::Io { .. }) = connected {
            if let Some(how) = nbdkit.ended() {
                return Err(self.failed(io::Error::other(format!("nbdkit ended before it served ({how})"))));
            }
            if Instant::now() >= late {
                break;
            }
            tokio::time::sleep(LOOK).await;
        }
        connected
    }

    async fn shake_hands<S>(
        &self,
        mut stream: S,
        into_fd: impl FnOnce(S) -> io::Result<OwnedFd>,
    ) -> Result<Connected<OwnedFd>, ConnectError>
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let mut requested = HandshakeOptions::new(self.export.clone());
        requested.tls = if self.tls.is_some() { TlsPolicy::Always } else { TlsPolicy::Never };
        let mut handshake = Handshake::new(requested);
        if let Some(session) = self.drive(&mut stream, &mut handshake).await? {
            let stream = into_fd(stream).map_err(|why| self.failed(why))?;
            return Ok(Connected { stream, session });
        }
        let Some(tls) = &self.tls else {
            return Err(self.refused_by(Failure::Broken("it asks for TLS, which was not offered")));
        };
        let mut stream = tls.connect(stream).await.map_err(|why| self.failed(why))?;
        handshake.tls_started();
        let Some(session) = self.drive(&mut stream, &mut handshake).await? else {
            return Err(self.refused_by(Failure::Broken("it asks for TLS twice")));
        };
        let stream = tls::relay(stream).map_err(|why| self.failed(why))?;
        Ok(Connected { stream, session })
    }

    /// Runs a handshake until transmission may start; `None`: TLS has to be started.
    async fn drive<S>(
        &self,
        stream: &mut S,
        handshake: &mut Handshake,
    ) -> Result<Option<Session>, ConnectError>
    where
        S: AsyncRead + AsyncWrite + Unpin,
    {
        let mut received = Vec::new();
        loop {
            if !handshake.output().is_empty() {
                let output = std::mem::take(handshake.output());
                stream.write_all(&output).await.map_err(|why| self.failed(why))?;
                stream.flush().await.map_err(|why| self.failed(why))?;
            }
            match handshake.poll() {
                // A server sends nothing unrequested, and bytes from before TLS must not count after it.
                Step::Ready(_) | Step::StartTls if !received.is_empty() => {
                    return Err(self.refused_by(Failure::Broken("it sends unrequested data")));
                }
                Step::Ready(session) => return Ok(Some(session)),
                Step::StartTls => return Ok(None),
                Step::Failed(why) => return Err(self.refused_by(why)),
                Step::Listed(_) => {
                    return Err(self.refused_by(Failure::Broken("it lists exports without a request")));
                }
                Step::NeedInput => {}
            }
            let used = handshake.input(&received);
            received.drain(..used);
            let waits = handshake.output().is_empty() && handshake.poll() == Step::NeedInput;
            if waits && stream.read_buf(&mut received).await.map_err(|why| self.failed(why))? == 0 {
                return Err(self.failed(io::ErrorKind::UnexpectedEof.into()));
            }
        }
    }
}

/// Connects to a socket in the abstract namespace. This blocks only while the server's backlog is full.
fn abstract_unix(name: &[u8]) -> io::Result<UnixStream> {
    let address = std::os::unix::net::SocketAddr::from_abstract_name(name)?;
    let stream = std::os::unix::net::UnixStream::connect_addr(&address)?;
    stream.set_nonblocking(true)?;
    UnixStream::from_std(stream)
}
