//! One attempt: from a name to a connection on which transmission may start.

use super::tls::{self, Tls};
use crate::spec::NbdSpec;
use backends::nbd::{Connected, NbdError};
use proto::nbd::Session;
use proto::nbd::Uri;
use proto::nbd::client::{Failure, Handshake, Step, TlsWish, Wish};
use proto::nbd::uri::Server;
use std::io;
use std::os::fd::OwnedFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpStream, UnixStream};

/// Why there is no connection.
#[derive(Debug, thiserror::Error)]
pub enum DialError {
    /// The way to the server.
    #[error("{uri}: {why}{hint}")]
    Io {
        /// The export.
        uri: String,
        /// Why.
        why: io::Error,
        /// What to do about it.
        hint: &'static str,
    },
    /// The server.
    #[error("{uri}: {why}")]
    Handshake {
        /// The export.
        uri: String,
        /// Why.
        why: Failure,
    },
    /// The export.
    #[error("{uri}: {why}")]
    Export {
        /// The export.
        uri: String,
        /// Why.
        why: NbdError,
    },
    /// TLS cannot be set up.
    #[error(transparent)]
    Tls(#[from] tls::TlsError),
}

/// Where to connect to, and how.
pub(super) struct Target {
    uri: Uri,
    name: String,
    tls: Option<Tls>,
}

impl Target {
    pub(super) fn new(spec: &NbdSpec) -> Result<Target, DialError> {
        Ok(Target { tls: Tls::load(&spec.uri)?, name: spec.uri.to_string(), uri: spec.uri.clone() })
    }

    /// The export, as people write it.
    pub(super) fn name(&self) -> &str {
        &self.name
    }

    pub(super) fn failed(&self, why: io::Error) -> DialError {
        let hint = match why.kind() {
            io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => " (does the server run?)",
            io::ErrorKind::TimedOut => " (is it an NBD server?)",
            io::ErrorKind::UnexpectedEof => " (the server hung up: does it serve others only?)",
            io::ErrorKind::PermissionDenied => " (may you use its socket?)",
            _ => "",
        };
        DialError::Io { uri: self.name.clone(), why, hint }
    }

    pub(super) fn refused(&self, why: NbdError) -> DialError {
        DialError::Export { uri: self.name.clone(), why }
    }

    fn refused_by(&self, why: Failure) -> DialError {
        DialError::Handshake { uri: self.name.clone(), why }
    }

    pub(super) async fn connect(self: &Arc<Target>) -> Result<Connected<OwnedFd>, DialError> {
        match &self.uri.server {
            Server::Unix(path) => {
                let stream = match path.as_os_str().as_bytes().split_first() {
                    Some((0, name)) => abstract_unix(name),
                    _ => UnixStream::connect(path).await,
                };
                let stream = stream.map_err(|why| self.failed(why))?;
                self.shake_hands(stream, |stream| Ok(stream.into_std()?.into())).await
            }
            Server::Tcp { host, port } => {
                let stream = TcpStream::connect((host.as_str(), *port)).await;
                let stream = stream.and_then(|stream| {
                    stream.set_nodelay(true)?;
                    // A server that vanished without a word is noticed, in the end, also when nothing is asked of it.
                    socket2::SockRef::from(&stream).set_keepalive(true)?;
                    Ok(stream)
                });
                let stream = stream.map_err(|why| self.failed(why))?;
                self.shake_hands(stream, |stream| Ok(stream.into_std()?.into())).await
            }
        }
    }

    async fn shake_hands<S>(
        &self,
        mut stream: S,
        into_fd: impl FnOnce(S) -> io::Result<OwnedFd>,
    ) -> Result<Connected<OwnedFd>, DialError>
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let mut wish = Wish::new(self.uri.export.clone());
        wish.tls = if self.tls.is_some() { TlsWish::Always } else { TlsWish::Never };
        let mut handshake = Handshake::new(wish);
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

    /// Carry a handshake on until transmission may start, or `None` when TLS is to be started.
    async fn drive<S>(&self, stream: &mut S, handshake: &mut Handshake) -> Result<Option<Session>, DialError>
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
                // A server says nothing that it was not asked, and nothing in the clear that counts behind TLS.
                Step::Ready(_) | Step::StartTls if !received.is_empty() => {
                    return Err(self.refused_by(Failure::Broken("it sends what it was not asked for")));
                }
                Step::Ready(session) => return Ok(Some(session)),
                Step::StartTls => return Ok(None),
                Step::Failed(why) => return Err(self.refused_by(why)),
                Step::Listed(_) => return Err(self.refused_by(Failure::Broken("it lists exports unasked"))),
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

/// A socket in the abstract namespace. Connecting to one does not wait, save for a server with a full backlog.
fn abstract_unix(name: &[u8]) -> io::Result<UnixStream> {
    let address = std::os::unix::net::SocketAddr::from_abstract_name(name)?;
    let stream = std::os::unix::net::UnixStream::connect_addr(&address)?;
    stream.set_nonblocking(true)?;
    UnixStream::from_std(stream)
}
