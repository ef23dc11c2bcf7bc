//! Portals: addresses at which the targets of a process listen, and the logins there.

use super::handover::Ends;
use super::login_directory::LoginDirectory;
use super::targets::{Targets, TargetsError};
use crate::handshakes::{Handshakes, Peer, handshakes_max, make_room};
use crate::nbd::listen::bind_tcp;
use engine::log_limit::LogLimit;
use proto::iscsi::login::{LoginDone, SessionType, Step, Target};
use spec::PortalAddress;
use std::io;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::time::{Instant, timeout_at};

/// How long to wait after accept failed for lack of descriptors or memory.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// A listening address, shared by the groups that have it as a portal.
pub(super) struct Portal {
    /// The address as given, where the port may be 0.
    given: PortalAddress,
    /// The address with the port that the kernel chose for 0.
    address: PortalAddress,
    listeners: Vec<Arc<TcpListener>>,
    closing: watch::Sender<bool>,
    /// Logins that were dropped because there were too many.
    logins_dropped: Arc<AtomicU64>,
    /// Limits log lines about logins that were refused.
    refusals: LogLimit,
}

impl Portal {
    /// Listens at an address. Must be called on the control plane's runtime.
    pub(super) fn open(given: &PortalAddress, targets: &Arc<Targets>) -> Result<Arc<Portal>, TargetsError> {
        let failed = |source| failure(given, source);
        let (listeners, port) = bind_tcp(&given.host, given.port).map_err(failed)?;
        let nonblocking = |listener: std::net::TcpListener| {
            listener.set_nonblocking(true)?;
            TcpListener::from_std(listener)
        };
        let listeners = listeners.into_iter().map(|listener| nonblocking(listener).map(Arc::new));
        let listeners = listeners.collect::<io::Result<Vec<_>>>().map_err(failed)?;
        let address = PortalAddress { host: given.host.clone(), port };
        let portal = Arc::new(Portal {
            given: given.clone(),
            address,
            listeners,
            closing: watch::channel(false).0,
            logins_dropped: Arc::default(),
            refusals: LogLimit::default(),
        });
        for listener in &portal.listeners {
            tokio::spawn(accept_loop(listener.clone(), portal.clone(), Arc::downgrade(targets)));
        }
        Ok(portal)
    }

    /// The address, with the port that the kernel chose for 0.
    pub(super) fn address(&self) -> &PortalAddress {
        &self.address
    }

    pub(super) fn is_at(&self, address: &PortalAddress) -> bool {
        self.address == *address || self.given == *address
    }

    /// Stops listening, and drops logins in progress. Sessions stay.
    pub(super) fn close(&self) {
        self.closing.send_replace(true);
        self.listeners.iter().for_each(|listener| stop_listening(listener));
    }
}

/// Frees the address at once; the socket itself is closed when the task that accepts connections ends.
fn stop_listening(listener: &TcpListener) {
    // Shutdown fails only if the socket does not listen any more.
    let _ = socket2::SockRef::from(listener).shutdown(std::net::Shutdown::Both);
}

fn failure(address: &PortalAddress, source: io::Error) -> TargetsError {
    let hint = match source.kind() {
        io::ErrorKind::AddrInUse => {
            " (another server or the kernel's target listens there: stop it or choose another address)"
        }
        io::ErrorKind::AddrNotAvailable => " (this machine does not have the address)",
        io::ErrorKind::PermissionDenied => " (choose an address that you may use)",
        _ => "",
    };
    TargetsError::Listen { address: address.clone(), source, hint }
}

async fn accept_loop(listener: Arc<TcpListener>, portal: Arc<Portal>, targets: std::sync::Weak<Targets>) {
    let mut closing = portal.closing.subscribe();
    let mut logins = Handshakes::new("iSCSI", handshakes_max(), portal.logins_dropped.clone());
    let failures = LogLimit::default();
    loop {
        let accepted = tokio::select! {
            accepted = async {
                make_room(&mut logins).await;
                accept(&listener, &portal.address).await
            } => accepted,
            _ = closing.wait_for(|closing| *closing) => return,
        };
        match accepted {
            Ok((stream, ends)) => {
                let Some(targets) = targets.upgrade() else { return };
                let (spoke, peer) = (Arc::new(AtomicBool::new(false)), Peer::of(ends.peer.ip()));
                let (portal, mut closing) = (portal.clone(), closing.clone());
                let client_spoke = spoke.clone();
                let login = tokio::spawn(async move {
                    tokio::select! {
                        () = serve(stream, ends, &portal, &targets, &client_spoke) => {}
                        _ = closing.wait_for(|closing| *closing) => {}
                    }
                });
                logins.add((peer, 0), spoke, login.abort_handle());
            }
            Err(_) if *closing.borrow() => return,
            Err(error) => {
                if let Some(count) = failures.admit_now() {
                    tracing::warn!(%error, "{count} iSCSI connections could not be accepted");
                }
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

async fn accept(listener: &TcpListener, portal: &PortalAddress) -> io::Result<(TcpStream, Ends)> {
    let (stream, peer) = listener.accept().await?;
    stream.set_nodelay(true)?;
    // Detects a peer that vanished without closing the connection.
    socket2::SockRef::from(&stream).set_keepalive(true)?;
    let canonical = |address: SocketAddr| SocketAddr::new(address.ip().to_canonical(), address.port());
    let ends = Ends { peer: canonical(peer), local: canonical(stream.local_addr()?), portal: portal.clone() };
    Ok((stream, ends))
}

/// Serves a connection until its session is on a reactor.
async fn serve(
    stream: TcpStream,
    ends: Ends,
    portal: &Arc<Portal>,
    targets: &Arc<Targets>,
    spoke: &AtomicBool,
) {
    let peer = ends.peer;
    if let Err(refused) = log_in(stream, ends, portal, targets, spoke).await {
        let Refused { names, why } = refused;
        let Some(count) = portal.refusals.admit_now() else { return };
        let (initiator, target) = names.unwrap_or_default();
        tracing::warn!(
            %peer, initiator, target_name = target,
            "{count} iSCSI logins failed, the last one because {why}"
        );
    }
}

/// A failed login: the names of initiator and target as far as they are known, and the reason.
struct Refused {
    names: Option<(String, String)>,
    why: String,
}

async fn log_in(
    mut stream: TcpStream,
    ends: Ends,
    portal: &Arc<Portal>,
    targets: &Arc<Targets>,
    spoke: &AtomicBool,
) -> Result<(), Refused> {
    let began = Instant::now();
    let directory = LoginDirectory::new(targets, portal);
    let nonce = nonce().map_err(|why| Refused { names: None, why: why.to_string() })?;
    let mut login = Target::new(nonce);
    let mut received = Vec::new();
    let done = loop {
        // The time limit of a portal group applies once the initiator has named its target.
        let step = timeout_at(
            began + directory.timeout(),
            step(&mut stream, &mut login, &mut received, &directory, spoke),
        );
        match step.await {
            Ok(Ok(Some(done))) => break done,
            Ok(Ok(None)) => {}
            Ok(Err(Ended::Closed)) => return Ok(()),
            Ok(Err(Ended::Because(why))) => return Err(Refused { names: names(&login), why }),
            Err(_) => {
                let why = format!("it took longer than {} s", directory.timeout().as_secs());
                return Err(Refused { names: names(&login), why });
            }
        }
    };
    let id = match targets.establish(&done, &ends).await {
        Ok(id) => id,
        Err(why) => {
            login.withdraw(why.status());
            let output = std::mem::take(login.output());
            let _ = timeout_at(Instant::now() + directory.timeout(), stream.write_all(&output)).await;
            return Err(Refused { names: names(&login), why: why.to_string() });
        }
    };
    directory.keep_tsih();
    let output = std::mem::take(login.output());
    let sent = timeout_at(Instant::now() + directory.timeout(), stream.write_all(&output)).await;
    match sent.map_err(io::Error::from).flatten().and_then(|()| stream.into_std()) {
        Ok(stream) => targets.adopt(id, OwnedFd::from(stream), received, &done, ends),
        Err(_) => targets.end_empty_session(id),
    }
    Ok(())
}

/// The reason why a login ended without a session.
enum Ended {
    /// The initiator closed the connection.
    Closed,
    Because(String),
}

impl From<io::Error> for Ended {
    fn from(_: io::Error) -> Ended {
        Ended::Closed
    }
}

/// Sends the login's pending output, and passes received bytes to it. Returns the result once the login is
/// complete; the caller must still send its last response.
async fn step(
    stream: &mut TcpStream,
    login: &mut Target,
    received: &mut Vec<u8>,
    directory: &LoginDirectory,
    spoke: &AtomicBool,
) -> Result<Option<LoginDone>, Ended> {
    match login.poll() {
        Step::Ready(done) => return Ok(Some(*done)),
        Step::Closed(status) => {
            let output = std::mem::take(login.output());
            stream.write_all(&output).await?;
            stream.shutdown().await?;
            return Err(Ended::Because(status.to_string()));
        }
        Step::NeedInput => {}
    }
    if !login.output().is_empty() {
        let output = std::mem::take(login.output());
        stream.write_all(&output).await?;
    }
    let used = login.input(received, directory);
    received.drain(..used);
    if used == 0 && login.output().is_empty() && login.poll() == Step::NeedInput {
        if stream.read_buf(received).await? == 0 {
            return Err(Ended::Closed);
        }
        spoke.store(true, Relaxed);
    }
    Ok(None)
}

fn names(login: &Target) -> Option<(String, String)> {
    let (initiator, session) = login.names()?;
    let target = match session {
        SessionType::Discovery => "(discovery)".to_owned(),
        SessionType::Normal { target } => target.clone(),
    };
    Some((initiator.to_owned(), target))
}

/// Returns random bytes for a CHAP challenge.
fn nonce<const N: usize>() -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    let mut filled = 0;
    while let Some(rest) = bytes.get_mut(filled..).filter(|rest| !rest.is_empty()) {
        filled += rustix::rand::getrandom(rest, rustix::rand::GetRandomFlags::empty())?;
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_closed_portals_address_is_free_before_its_task_ends() {
        let (listeners, port) = bind_tcp("127.0.0.1", 0).unwrap();
        let listener = listeners.into_iter().next().unwrap();
        listener.set_nonblocking(true).unwrap();
        let listener = TcpListener::from_std(listener).unwrap();
        assert!(bind_tcp("127.0.0.1", port).is_err());
        stop_listening(&listener);
        let again = bind_tcp("127.0.0.1", port);
        assert!(again.is_ok(), "{again:?}");
        assert!(listener.accept().await.is_err());
    }
}
