//! One NBD connection until a reactor owns it: accept, handshake, TLS.

use super::{Listener, PeerCatalogue, Tls};
use crate::handshakes::{Handshakes, Peer, handshakes_max, make_room};
use crate::nbd::listen::Socket;
use engine::host::Host;
use engine::log_limit::LogLimit;
use engine::reactor::{Attach, QueueHandle};
use exports::{Fronts, Turn};
use proto::nbd::Session;
use proto::nbd::server::{Handshake, Step};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, copy_bidirectional_with_sizes};
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use tokio::time::timeout;
use tokio_rustls::server::TlsStream;

/// Longest duration of a handshake.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(30);
/// How long to wait after accept failed for lack of descriptors or memory.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// Size of the TLS copy buffers, in bytes.
const TLS_BUFFER_LEN: usize = 128 << 10;

/// A listening socket on the runtime.
pub(super) enum Acceptor {
    Tcp(TcpListener),
    Unix(UnixListener),
}

impl Acceptor {
    pub(super) fn new(socket: Socket) -> io::Result<Acceptor> {
        Ok(match socket {
            Socket::Tcp(listener) => {
                listener.set_nonblocking(true)?;
                Acceptor::Tcp(TcpListener::from_std(listener)?)
            }
            Socket::Unix(listener) => {
                listener.set_nonblocking(true)?;
                Acceptor::Unix(UnixListener::from_std(listener)?)
            }
        })
    }
}

/// A connection without TLS.
enum Plain {
    Tcp(TcpStream),
    Unix(UnixStream),
}

pub(super) async fn accept_loop(socket: Acceptor, listener: Arc<Listener>, host: Arc<Host>) {
    let mut closing = listener.closing.subscribe();
    let mut handshakes = Handshakes::new("NBD", handshakes_max(), listener.handshakes_dropped.clone());
    let failures = LogLimit::default();
    loop {
        let accepted = tokio::select! {
            accepted = async {
                make_room(&mut handshakes).await;
                accept(&socket).await
            } => accepted,
            _ = closing.wait_for(|closing| *closing) => return,
        };
        match accepted {
            Ok((stream, peer)) => {
                let (listener, host, mut closing) = (listener.clone(), host.clone(), closing.clone());
                let spoke = Arc::new(AtomicBool::new(false));
                let client = Client { peer: peer.0, spoke: spoke.clone() };
                let greeting = tokio::spawn(async move {
                    tokio::select! {
                        outcome = timeout(HANDSHAKE_TIMEOUT, greet(stream, client, &listener, &host)) => match outcome {
                            Ok(Ok(())) => {}
                            Ok(Err(error)) => tracing::debug!(%error, "a handshake failed"),
                            Err(_) => tracing::debug!("a handshake took too long"),
                        },
                        _ = closing.wait_for(|closing| *closing) => {}
                    }
                });
                handshakes.add(peer, spoke, greeting.abort_handle());
            }
            Err(error) => {
                if let Some(count) = failures.admit_now() {
                    tracing::warn!(%error, "{count} connections could not be accepted");
                }
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

/// Accepts a connection. Returns it with its peer and the peer's process ID, 0 where that is not known.
async fn accept(socket: &Acceptor) -> io::Result<(Plain, (Peer, i32))> {
    match socket {
        Acceptor::Tcp(listener) => {
            let (stream, address) = listener.accept().await?;
            stream.set_nodelay(true)?;
            // Detects a peer that vanished without closing the connection.
            socket2::SockRef::from(&stream).set_keepalive(true)?;
            Ok((Plain::Tcp(stream), (Peer::of(address.ip()), 0)))
        }
        Acceptor::Unix(listener) => {
            let (stream, _) = listener.accept().await?;
            let peer = match stream.peer_cred() {
                Ok(process) => (Peer::User(process.uid()), process.pid().unwrap_or(0)),
                Err(_) => (Peer::Unknown, 0),
            };
            Ok((Plain::Unix(stream), peer))
        }
    }
}

/// The client of a handshake.
struct Client {
    peer: Peer,
    /// Whether the client has sent something.
    spoke: Arc<AtomicBool>,
}

/// Result of a handshake, or of its part before TLS.
enum Outcome {
    Ready(Box<Session>, Vec<u8>),
    StartTls(Vec<u8>),
    Over,
}

async fn greet(mut stream: Plain, client: Client, listener: &Listener, host: &Arc<Host>) -> io::Result<()> {
    let mut handshake = Handshake::new(listener.handshake_config());
    let catalogue = PeerCatalogue { exports: &listener.exports, limits: &listener.limits, peer: client.peer };
    let outcome = match &mut stream {
        Plain::Tcp(stream) => drive(stream, &mut handshake, &catalogue, &client).await?,
        Plain::Unix(stream) => drive(stream, &mut handshake, &catalogue, &client).await?,
    };
    match outcome {
        Outcome::Over => Ok(()),
        Outcome::Ready(session, leftover) => {
            let fd = match stream {
                Plain::Tcp(stream) => OwnedFd::from(stream.into_std()?),
                Plain::Unix(stream) => OwnedFd::from(stream.into_std()?),
            };
            hand_over(fd, *session, leftover, &catalogue, host);
            Ok(())
        }
        Outcome::StartTls(early) => {
            let Some(tls) = listener.tls.clone() else { return Ok(()) };
            // Bytes received after STARTTLS but before our answer may come from a man in the middle who
            // wants them taken for encrypted ones, so the connection ends.
            if !early.is_empty() {
                return Err(io::Error::new(io::ErrorKind::InvalidData, "bytes behind STARTTLS"));
            }
            match stream {
                Plain::Tcp(stream) => encrypted(stream, &tls, handshake, &catalogue, &client, host).await,
                Plain::Unix(stream) => encrypted(stream, &tls, handshake, &catalogue, &client, host).await,
            }
        }
    }
}

/// Runs a handshake until it is complete, needs TLS, or ends.
async fn drive<S>(
    stream: &mut S,
    handshake: &mut Handshake,
    catalogue: &PeerCatalogue<'_>,
    client: &Client,
) -> io::Result<Outcome>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let mut received = Vec::new();
    loop {
        if !handshake.output().is_empty() {
            let output = std::mem::take(handshake.output());
            stream.write_all(&output).await?;
            stream.flush().await?;
        }
        match handshake.poll() {
            Step::Ready(session) => return Ok(Outcome::Ready(Box::new(session), received)),
            Step::StartTls => return Ok(Outcome::StartTls(received)),
            Step::Closed(why) => {
                tracing::debug!(%why, "a handshake ended");
                return Ok(Outcome::Over);
            }
            Step::NeedInput => {}
        }
        let used = handshake.input(&received, catalogue);
        received.drain(..used);
        let waits = handshake.output().is_empty() && handshake.poll() == Step::NeedInput;
        if waits && stream.read_buf(&mut received).await? == 0 {
            return Ok(Outcome::Over);
        }
        client.spoke.store(true, Relaxed);
    }
}

async fn encrypted<S>(
    stream: S,
    tls: &Tls,
    mut handshake: Handshake,
    catalogue: &PeerCatalogue<'_>,
    client: &Client,
    host: &Arc<Host>,
) -> io::Result<()>
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let mut stream = tls.accept(stream).await?;
    handshake.tls_started();
    match drive(&mut stream, &mut handshake, catalogue, client).await? {
        Outcome::Ready(session, leftover) => {
            let (ours, theirs) = UnixStream::pair()?;
            hand_over(OwnedFd::from(theirs.into_std()?), *session, leftover, catalogue, host);
            tokio::spawn(relay(stream, ours));
            Ok(())
        }
        Outcome::StartTls(_) | Outcome::Over => {
            stream.shutdown().await?;
            Ok(())
        }
    }
}

/// Copies between the TLS connection and the reactor's socket until one of them ends.
async fn relay<S>(mut network: TlsStream<S>, mut reactor: UnixStream)
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let copied =
        copy_bidirectional_with_sizes(&mut network, &mut reactor, TLS_BUFFER_LEN, TLS_BUFFER_LEN).await;
    if let Err(error) = copied {
        tracing::debug!(%error, "a TLS connection ended");
    }
}

fn hand_over(
    fd: OwnedFd,
    session: Session,
    leftover: Vec<u8>,
    catalogue: &PeerCatalogue<'_>,
    host: &Arc<Host>,
) {
    // If the device was removed since the handshake looked it up, the connection closes.
    let Some(device) = catalogue.exports.device(session.export) else { return };
    // The connection also closes if other clients have reached the limit meanwhile.
    let Some(permit) = catalogue.limits.admit(catalogue.peer, device.number()) else { return };
    // A backend that accepts byte ranges reports a minimum of 1; its logical blocks have 512 bytes.
    let reported = u64::from(session.block_sizes.minimum.max(512));
    let adopt = adoption(fd, session, leftover, Some(Box::new(move || drop(permit))));
    let known = device.clone();
    let attach = move |handle: &QueueHandle, fronts: &mut Fronts, turn: &mut Turn<'_>| {
        // Until now the client did not count as connected, so the logical block size may have changed since
        // it was reported.
        if known.limits().logical_block_size.0 == reported {
            adopt(handle, fronts, turn);
            fronts.nbd.count_limits(handle.queue, known.limit_counts.clone());
        } else {
            tracing::info!(device = %known.name(), "a connection was closed: the logical block size changed during its handshake");
        }
    };
    host.attach(device, Box::new(attach));
}

/// Returns the closure that hands a connection to a reactor after its handshake. `leftover`: bytes received
/// after the handshake. `when_gone` is called on the reactor's thread when the connection ends, and dropped
/// if the connection never started.
pub(crate) fn adoption(
    fd: OwnedFd,
    session: Session,
    leftover: Vec<u8>,
    when_gone: Option<Box<dyn FnOnce() + Send>>,
) -> Attach {
    Box::new(move |handle, fronts, turn| {
        let front = &mut fronts.nbd;
        if !front.has_queue(handle.queue) {
            front.add_queue(handle.queue, handle.depth, handle.facts, handle.counters.connections.clone());
        }
        match front.adopt(fd, session, handle.queue, &leftover, turn) {
            Ok(connection) => when_gone.into_iter().for_each(|notify| front.when_gone(connection, notify)),
            Err(error) => tracing::error!(%error, "a connection could not be taken over"),
        }
    })
}
