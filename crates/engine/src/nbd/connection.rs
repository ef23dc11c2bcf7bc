//! One connection until it belongs to a reactor: accept, handshake, TLS.

use super::crowd::{Handshakes, Peer};
use super::{Door, Listener, Tls};
use crate::host::Host;
use crate::listen::Socket;
use crate::log_limit::LogLimit;
use crate::reactor::{Attach, Lane};
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

/// How long a client may take over its handshake.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(30);
/// Handshakes under way on one socket, if a quarter of the descriptors that the process may have are as many. At 2,500 new
/// connections a second from one peer a client may be silent for 1.6 s.
const HANDSHAKES_MAX: usize = 4096;
/// How long accepting waits for one of them to end, when in all of them the client has said something.
const CROWDED_PAUSE: Duration = Duration::from_millis(50);
/// How long to wait after accept failed for want of descriptors or memory.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// Bytes that are decrypted and encrypted at a time.
const TLS_BUFFER_LEN: usize = 128 << 10;

/// A listening socket that the runtime watches.
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

/// A connection in the clear.
enum Plain {
    Tcp(TcpStream),
    Unix(UnixStream),
}

pub(super) async fn accept_loop(socket: Acceptor, listener: Arc<Listener>, host: Arc<Host>) {
    let mut closing = listener.closing.subscribe();
    let descriptors = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
    let most = descriptors.map_or(HANDSHAKES_MAX, |most| HANDSHAKES_MAX.min(most as usize / 4).max(16));
    let mut handshakes = Handshakes::new(most, listener.handshakes_dropped.clone());
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
                if let Some(count) = failures.say() {
                    tracing::warn!(%error, "{count} connections could not be accepted");
                }
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

/// Wait until another handshake may begin. Clients that stay silent make room at once, others once in a while, so that
/// those that are slow are done before it is their turn.
async fn make_room(handshakes: &mut Handshakes) {
    while !handshakes.has_room() {
        if !handshakes.end_one(false) {
            tokio::time::sleep(CROWDED_PAUSE).await;
            if !handshakes.has_room() {
                handshakes.end_one(true);
            }
        }
    }
}

/// A connection, and its peer: with the process where that is known, else 0.
async fn accept(socket: &Acceptor) -> io::Result<(Plain, (Peer, i32))> {
    match socket {
        Acceptor::Tcp(listener) => {
            let (stream, address) = listener.accept().await?;
            stream.set_nodelay(true)?;
            // A peer that vanished without a word is noticed, in the end.
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

/// The other side of a handshake.
struct Client {
    peer: Peer,
    /// It has sent something.
    spoke: Arc<AtomicBool>,
}

/// What the handshake in the clear came to.
enum Outcome {
    Ready(Box<Session>, Vec<u8>),
    StartTls(Vec<u8>),
    Over,
}

async fn greet(mut stream: Plain, client: Client, listener: &Listener, host: &Arc<Host>) -> io::Result<()> {
    let mut handshake = Handshake::new(listener.handshake_config());
    let door = Door { exports: &listener.exports, crowd: &listener.crowd, peer: client.peer };
    let outcome = match &mut stream {
        Plain::Tcp(stream) => drive(stream, &mut handshake, &door, &client).await?,
        Plain::Unix(stream) => drive(stream, &mut handshake, &door, &client).await?,
    };
    match outcome {
        Outcome::Over => Ok(()),
        Outcome::Ready(session, leftover) => {
            let fd = match stream {
                Plain::Tcp(stream) => OwnedFd::from(stream.into_std()?),
                Plain::Unix(stream) => OwnedFd::from(stream.into_std()?),
            };
            hand_over(fd, *session, leftover, &door, host);
            Ok(())
        }
        Outcome::StartTls(early) => {
            let Some(tls) = listener.tls.clone() else { return Ok(()) };
            // A client that sends behind STARTTLS before it was answered may be someone in the middle
            // who wants it to be taken for encrypted: that is never read as the client's.
            if !early.is_empty() {
                return Err(io::Error::new(io::ErrorKind::InvalidData, "bytes behind STARTTLS"));
            }
            match stream {
                Plain::Tcp(stream) => encrypted(stream, &tls, handshake, &door, &client, host).await,
                Plain::Unix(stream) => encrypted(stream, &tls, handshake, &door, &client, host).await,
            }
        }
    }
}

/// Carry a handshake on until it needs something other than bytes.
async fn drive<S>(
    stream: &mut S,
    handshake: &mut Handshake,
    door: &Door<'_>,
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
        let used = handshake.input(&received, door);
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
    door: &Door<'_>,
    client: &Client,
    host: &Arc<Host>,
) -> io::Result<()>
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let mut stream = tls.accept(stream).await?;
    handshake.tls_started();
    match drive(&mut stream, &mut handshake, door, client).await? {
        Outcome::Ready(session, leftover) => {
            let (ours, theirs) = UnixStream::pair()?;
            hand_over(OwnedFd::from(theirs.into_std()?), *session, leftover, door, host);
            tokio::spawn(relay(stream, ours));
            Ok(())
        }
        Outcome::StartTls(_) | Outcome::Over => {
            stream.shutdown().await?;
            Ok(())
        }
    }
}

/// Encrypt and decrypt between the network and the reactor until one of them ends.
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

fn hand_over(fd: OwnedFd, session: Session, leftover: Vec<u8>, door: &Door<'_>, host: &Arc<Host>) {
    // The device may have gone since the handshake looked it up: then the connection closes.
    let Some(device) = door.exports.device(session.export) else { return };
    // As it does when others came first since then.
    let Some(place) = host.crowd.enter(door.peer, device.number()) else { return };
    // A backend that takes single bytes says so; blocks are of 512 bytes then.
    let told = u64::from(session.block_sizes.minimum.max(512));
    let adopt = adoption(fd, session, leftover, Some(Box::new(move || drop(place))));
    let known = device.clone();
    let attach = move |lane: &Lane, fronts: &mut Fronts, turn: &mut Turn<'_>| {
        // Nobody was counted as connected until now, so its blocks may have changed since it was told of them.
        if known.limits().logical_block_size.0 == told {
            adopt(lane, fronts, turn);
            fronts.nbd.count_limits(lane.queue, known.limit_counts.clone());
        } else {
            tracing::info!(device = %known.name(), "a connection was closed: blocks changed as it was made");
        }
    };
    host.attach(device, Box::new(attach));
}

/// Hands a connection whose handshake is done to a reactor. `leftover`: bytes received behind the handshake.
/// `when_gone` is called on the reactor's thread when the connection is over, and dropped when it never began.
pub(crate) fn adoption(
    fd: OwnedFd,
    session: Session,
    leftover: Vec<u8>,
    when_gone: Option<Box<dyn FnOnce() + Send>>,
) -> Attach {
    Box::new(move |lane, fronts, turn| {
        let front = &mut fronts.nbd;
        if !front.has_lane(lane.queue) {
            front.open_lane(lane.queue, lane.depth, lane.facts, lane.shown.connections.clone());
        }
        match front.adopt(fd, session, lane.queue, &leftover, turn) {
            Ok(connection) => when_gone.into_iter().for_each(|tell| front.when_gone(connection, tell)),
            Err(error) => tracing::error!(%error, "a connection could not be taken over"),
        }
    })
}
